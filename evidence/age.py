"""Which evidence is older than the code that it measures: `python evidence/age.py`; exit status 1 if any is.

The code of a record is its module in instruct_goose and everything of the package that this one imports, near or far. A change
counts when the program differs: not a comment, a docstring or a place in the file.
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

root = Path(__file__).parents[1]
MEASURES = {"quickstart": "recipes.quickstart", "drift": "worlds.drift",
            "reviews": "recipes.real_reviews", "family": "worlds.family",
            "control": "worlds.control", "exact_world": "worlds.exact_world", "gallery": "worlds.gallery", "doctor": "worlds.gallery",
            "probes": "worlds.probes", "resume": "cli.main", "fuzz": "data.load", "attacks": "cli.main", "details": "worlds.exact_world",
            "distillation": "variants.distillation", "trackers": "runs.trackers",
            "recipes": "recipes.smollm_sentiment",
            "smollm_reviews": "recipes.smollm_reviews",
            "reports/quickstart": "recipes.quickstart", "reports/smollm-sentiment": "recipes.smollm_sentiment"}


def bare(source: str) -> ast.Module:
    "The program without its docstrings."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))] or [ast.Pass()]
    return tree


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


@cache  # most modules are the same at every commit
def program(module: str, source: str) -> tuple[str, tuple[str, ...]]:
    "What a module does, and what it takes from the package."
    tree = bare(source)
    return ast.dump(tree), tuple(imports(module, tree))


def programs(start: str, read: Callable[[str], str | None]) -> dict[str, str]:
    "Module → its program, for `start` and all that it imports. `read` gives a file's text, None where there is none."
    found, todo = {}, [start]
    while todo:
        module = todo.pop()
        if not module or module in found: continue
        text = read(f"instruct_goose/{module.replace('.', '/')}.py")
        if text is None: continue
        found[module], taken = program(module, text)
        todo += taken
    return found


@cache
def at(commit: str, folder: Path = root) -> Callable[[str], str | None]:
    "Reads files of the package as they were then."
    packed = subprocess.run(["git", "archive", "--format=tar", commit, "instruct_goose"], cwd=folder, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        texts = {m.name: tar.extractfile(m).read().decode("utf-8") for m in tar if m.isfile() and m.name.endswith(".py")}
    return texts.get


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
    """The modules whose program is another one now. Raises LookupError for a commit that this checkout does not have."""
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=folder, capture_output=True).returncode:
        raise LookupError(f"evidence/{name}.json names commit {commit}, which is not here: fetch the whole history")
    then, today = (programs(MEASURES[name], read) for read in (at(commit, folder), now(folder)))
    return sorted(m for m in then | today if then.get(m) != today.get(m))


def ages() -> Iterator[tuple[str, str, list[str]]]:
    "name, commit, modules that have changed since."
    for name in MEASURES:
        if not (root / f"evidence/{name}.json").exists(): continue
        for commit in sorted(set(commits(json.loads((root / f"evidence/{name}.json").read_text("utf-8"))))):
            yield name, commit, changed(name, commit)


if __name__ == "__main__":
    old = [(name, commit, modules) for name, commit, modules in ages() if modules]
    for name, commit, modules in old:
        print(f"{name:<12} {commit[:7]}  older than {len(modules)} modules, such as {', '.join(modules[:3])}: python evidence/run.py {name}")
    if not old: print("every record measures the code of today")
    sys.exit(bool(old))
