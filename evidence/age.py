"""Which evidence is older than the code that it measures: `python evidence/age.py`; exit status 1 if any is.

The code of a record is its module in instruct_goose and everything of the package that this one imports, near or far. Functions are
compared by name and program, wherever they stood then: a module that moved is no change, nor is a comment, a docstring or a type.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

root = Path(__file__).parents[1]
MEASURES = {
    "quickstart": "recipes.quickstart",
    "reviews": "recipes.ratings",
    "family": "recipes.family",
    "control": "tasks.control",
    "exact_world": "tasks.exact_world",
    "gallery": "tasks.gallery",
    "doctor_unseen": "tasks.gallery",
    "doctor_bugs": "tasks.gallery",
    "doctor_fresh": "tasks.probes",
    "doctor_healthy": "tasks.probes",
    "probes": "tasks.probes",
    "resume": "cli.main",
    "fuzz": "data.load",
    "inputs": "cli.main",
    "details": "tasks.exact_world",
    "distillation": "models.teacher",
    "asynchrony": "training.asynchronous",
    "playground_edits": "tasks.playground",
    "trackers": "runs.trackers",
    "recipes": "recipes.smollm",
    "smollm_reviews": "recipes.smollm",
    "reports/quickstart": "recipes.quickstart",
    "reports/smollm-sentiment": "recipes.smollm",
}


def source_of(text: str) -> str:
    "The imports, functions, classes and constants of a notebook, given as JSON; hidden cells and what a lesson does with them are left out."

    def defines(s: ast.stmt) -> bool:
        if isinstance(s, ast.Assign | ast.AnnAssign):
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            return all(
                n.id[0].isupper() or n.id[0] == "_"
                for t in targets
                for n in ast.walk(t)
                if isinstance(n, ast.Name)
            )
        return isinstance(s, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)

    cells = json.loads(text)["cells"]
    shown = [
        source
        for c in cells
        if c["cell_type"] == "code"
        and not (source := "".join(c["source"])).startswith(("#| hide", "#| eval"))
    ]
    return "\n\n".join(
        ast.unparse(s) for source in shown for s in ast.parse(source).body if defines(s)
    )


LESSONS = (  # where a part of this code stood before it was a module
    "guides/classic_control",
    "guides/side_by_side",
    "learn/20_exact_world",
    "learn/21_probes",
    "learn/22_failure_gallery",
)


@cache  # most modules are the same at every commit
def pieces(source: str) -> tuple[tuple[str, str], ...]:
    "(name, program) of each function, class and constant of a module, without docstrings, types and imports."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        for name, inner in ast.iter_fields(node):
            if name == "body" and isinstance(inner, list):

                def told(s):
                    return (
                        isinstance(s, ast.Import | ast.ImportFrom)
                        or isinstance(s, ast.Expr)
                        and isinstance(s.value, ast.Constant)
                    )

                node.body = [s for s in inner if not told(s)]
    named = (
        (
            getattr(s, "name", None)
            or ast.unparse(getattr(s, "targets", [getattr(s, "target", s)])[0]),
            s,
        )
        for s in tree.body
    )
    return tuple((name, ast.dump(s)) for name, s in named if name != "__all__")


def imports(module: str, source: str) -> set[str]:
    "What a module of the package takes from the package; a name may be a module or something in one."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, ast.ImportFrom)
            or not node.level
            and not (node.module or "").startswith("instruct_goose")
        ):
            continue
        here = module.split(".")[: -node.level] if node.level else []
        place = [
            *here,
            *filter(None, (node.module or "").removeprefix("instruct_goose").split(".")),
        ]
        found |= {".".join(place), *(".".join([*place, a.name]) for a in node.names)}
    return found - {""}


def reached(start: str, read: Callable[[str], str | None]) -> dict[str, str]:
    "Module → its source, for `start` and all that it imports. `read` gives a file's text, None where there is none."
    found = {}
    todo = [start]
    while todo:
        module = todo.pop()
        if module in found:
            continue
        text = read(f"instruct_goose/{module.replace('.', '/')}.py")
        if text is None:
            continue
        found[module] = text
        todo += imports(module, text)
    return found


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=root, capture_output=True, text=True, check=True
    ).stdout


@cache
def at(commit: str) -> frozenset[tuple[str, str]]:
    "Every piece of the package, and of the lessons that have become modules since, as it was then."
    files = git("ls-tree", "-r", "--name-only", commit, "instruct_goose", "nbs").splitlines()
    texts = [
        git("show", f"{commit}:{f}")
        for f in files
        if f.startswith("instruct_goose/") and f.endswith(".py")
    ]
    texts += [
        source_of(git("show", f"{commit}:{f}"))
        for f in files
        if f.removeprefix("nbs/").removesuffix(".ipynb") in LESSONS
    ]
    return frozenset(piece for text in texts for piece in pieces(text))


def changed(name: str, commit: str) -> list[str]:
    "The functions whose program is another one now, as module.name."

    def now(path):
        return (root / path).read_text("utf-8") if (root / path).exists() else None

    return sorted(
        {
            f"{module}.{piece[0]}"
            for module, text in reached(MEASURES[name], now).items()
            for piece in pieces(text)
            if piece not in at(commit)
        }
    )


def main():
    old = False
    for name in MEASURES:
        record = (root / f"evidence/{name}.json").read_text("utf-8")
        for commit in sorted(set(re.findall(r'"commit": "(\w+)"', record))):
            if changes := changed(name, commit):
                old = True
                print(
                    f"{name:<12} {commit[:7]}  older than {len(changes)} functions, such as {', '.join(changes[:3])}: python evidence/run.py {name}"
                )
    if not old:
        print("every record measures the code of today")
    sys.exit(old)


if __name__ == "__main__":
    main()
