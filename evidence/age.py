"""Which evidence is older than the code that it measures: `python evidence/age.py`; exit status 1 if any is.

The code of a record is its module in instruct_goose, or what its lesson defines, and everything of the package that this one imports, near or far. Functions are
compared by name and program, wherever they stood then: a module that moved is no change, nor is a comment, a docstring or a type.
"""
import ast
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from lesson_code import source_of

root = Path(__file__).parents[1]
MEASURES = {"quickstart": "recipes.quickstart",
            "reviews": "recipes.ratings", "family": "recipes.quickstart",
            "control": "guides/classic_control", "exact_world": "learn/20_exact_world", "gallery": "learn/22_bug_hunt", "doctor": "learn/22_bug_hunt", "doctor_unseen": "learn/22_bug_hunt",
            "probes": "learn/21_probes", "resume": "cli.main", "fuzz": "data.load", "attacks": "cli.main", "inputs": "cli.main", "details": "learn/20_exact_world",
            "distillation": "variants.distillation", "playground": "guides/playground", "trackers": "runs.trackers",
            "recipes": "recipes.smollm",
            "smollm_reviews": "recipes.smollm",
            "reports/quickstart": "recipes.quickstart", "reports/smollm-sentiment": "recipes.smollm"}

LESSONS = ("learn/22_bug_hunt", "guides/playground", "guides/classic_control", "learn/20_exact_world", "learn/21_probes")  # what they define is no part of the package


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    "What a module of the package takes from the package; a name may be a module or something in one."
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom): continue
        if node.level: base = module.split(".")[:-node.level]
        elif (node.module or "").split(".")[0] == "instruct_goose": base = []
        else: continue
        place = base + (node.module or "").removeprefix("instruct_goose").strip(".").split(".") * bool(node.module)
        place = [p for p in place if p]
        yield ".".join(place)
        yield from (".".join([*place, alias.name]) for alias in node.names)


class Bare(ast.NodeTransformer):
    "Leaves out what changes no number: docstrings, types, imports, and whether a method stands in its class or is added to it."
    def body(self, node):
        self.generic_visit(node)
        node.body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = body

    def visit_FunctionDef(self, node):
        node.returns, node.decorator_list = None, [d for d in node.decorator_list if ast.unparse(d) != "patch"]
        return self.body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node): return ast.arg(node.arg)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else ast.Expr(node.target)

    def visit_Import(self, node): return ast.Pass()

    visit_ImportFrom = visit_Import


@cache  # most modules are the same at every commit
def pieces(source: str) -> tuple[tuple[str, str], ...]:
    "(name, program) of each function, method, class without its methods, and constant of a module, wherever it stands."
    found = []
    for node in Bare().visit(ast.parse(source)).body:
        if isinstance(node, ast.ClassDef):
            inner = [s for s in node.body if isinstance(s, ast.FunctionDef)]
            node.body = [s for s in node.body if s not in inner]
            found += [(s.name, ast.dump(s)) for s in inner]
        names = [node.name] if hasattr(node, "name") else [ast.unparse(t) for t in getattr(node, "targets", [])]
        found += [(name, ast.dump(node)) for name in names if name != "__all__"]
    return tuple(found)


def reached(start: str, read: Callable[[str], str | None]) -> dict[str, str]:
    "Module → its source, for `start` and all that it imports. `read` gives a file's text, None where there is none."
    found, todo = {}, [start]
    while todo:
        module = todo.pop()
        if not module or module in found: continue
        text = read(f"nbs/{module}.ipynb" if "/" in module else f"instruct_goose/{module.replace('.', '/')}.py")
        if text is None: continue
        if "/" in module: text = source_of(text)
        found[module] = text
        todo += imports(module, ast.parse(text))
    return found


@cache
def at(commit: str, folder: Path = root) -> frozenset[tuple[str, str]]:
    "Every piece of the package as it was then."
    packed = subprocess.run(["git", "archive", "--format=tar", commit, "instruct_goose"], cwd=folder, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        texts = {m.name: tar.extractfile(m).read().decode("utf-8") for m in tar if m.isfile() and m.name.endswith(".py")}
    for lesson in LESSONS:
        shown = subprocess.run(["git", "show", f"{commit}:nbs/{lesson}.ipynb"], cwd=folder, capture_output=True)
        if not shown.returncode: texts[lesson] = source_of(shown.stdout.decode("utf-8"))
    return frozenset(piece for text in texts.values() for piece in pieces(text))


def now(folder: Path = root) -> Callable[[str], str | None]:
    def read(path): return (folder / path).read_text("utf-8") if (folder / path).exists() else None
    return read


def commits(record) -> Iterator[str]:
    "Every commit that a record names."
    if isinstance(record, dict):
        if isinstance(record.get("commit"), str): yield record["commit"]
        for value in record.values(): yield from commits(value)
    elif isinstance(record, list):
        for value in record: yield from commits(value)


def changed(name: str, commit: str, folder: Path = root) -> list[str]:
    """The functions whose program is another one now, as module.name. Raises LookupError for a commit that this checkout does not have."""
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=folder, capture_output=True).returncode:
        raise LookupError(f"evidence/{name}.json names commit {commit}, which is not here: fetch the whole history")
    then = at(commit, folder)
    return sorted({f"{module}.{piece[0]}" for module, text in reached(MEASURES[name], now(folder)).items() for piece in pieces(text) if piece not in then})


def ages() -> Iterator[tuple[str, str, list[str]]]:
    "name, commit, functions that have changed since."
    for name in MEASURES:
        if not (root / f"evidence/{name}.json").exists(): continue
        for commit in sorted(set(commits(json.loads((root / f"evidence/{name}.json").read_text("utf-8"))))):
            yield name, commit, changed(name, commit)


if __name__ == "__main__":
    old = [(name, commit, changes) for name, commit, changes in ages() if changes]
    for name, commit, changes in old:
        print(f"{name:<12} {commit[:7]}  older than {len(changes)} functions, such as {', '.join(changes[:3])}: python evidence/run.py {name}")
    if not old: print("every record measures the code of today")
    sys.exit(bool(old))
