"""Change the package in one small way after another, and count the changes that a test notices: `make mutations`.

Draws mutants from all of them alike, and runs for each the test file of its module, then the module's notebook, then the tests of its folder,
of the trainer, and those that name the changed function. What no test noticed is listed in evidence/mutations.json; write behind its "equivalent" why nobody could see a difference, or write a test,
which `make mutations ARGS=--again` tries on it.
Left alone is what is no behaviour: documentation, annotations, defaults, errors and their words, what is printed.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

root = Path(__file__).parents[1]
TABLE = root / "evidence/mutations.json"
ROOMS = (
    "core",
    "objective",
    "models",
    "data",
    "rollouts",
    "training",
    "supervised",
    "runs",
    "doctor",
    "recipes",
    "cli",
)
COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
WORDS = {
    "print",
    "warn",
    "tqdm",
    "cast",
    "isinstance",
    "TypeVar",
    "field",
}  # calls in which nothing is changed
SECONDS = 300  # a notebook that takes longer has noticed, and so have tests that take this and
TIMES = 4  # times what they took without a change


KEY = ("module", "operator", "before", "after")  # the line may move


class Mutant(NamedTuple):
    module: str
    line: int
    operator: str
    before: str
    after: str
    start: int  # of the text that is replaced, in bytes
    end: int

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in KEY)


def changed(node, **parts):
    vars(new := copy.copy(node)).update(parts)
    return new


def text(node):
    return (
        isinstance(node, ast.JoinedStr | ast.List)
        or isinstance(node, ast.Constant)
        and isinstance(node.value, str | bytes)
    )


def changes(node):
    "(operator, what stands there then) for one node."
    yield from changed_operators(node)
    yield from changed_statements(node)


def changed_operators(node):
    "The changes of comparisons, arithmetic and logic."
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                yield (
                    "comparison",
                    changed(node, ops=[*node.ops[:i], COMPARE[type(op)](), *node.ops[i + 1 :]]),
                )
        case ast.BinOp() if type(node.op) in OTHER and not text(node.left) and not text(node.right):
            yield "arithmetic", changed(node, op=OTHER[type(node.op)]())
        case ast.BoolOp():
            yield "and, or", changed(node, op=OTHER[type(node.op)]())
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return  # mostly an axis, counted from the end
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            yield "not, minus", node.operand


def changed_statements(node):
    "The changes of constants, statements, arguments and conditions."
    match node:
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield (
                "constant",
                ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value + 1),
            )
        case (
            ast.AugAssign()
            | ast.Expr(value=ast.Call())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ):
            yield "statement", ast.Pass()
        case ast.Call():
            for i, k in enumerate(node.keywords):
                if k.arg and k.arg != "strict":
                    yield (
                        "keyword",
                        changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]]),
                    )
        case ast.If() | ast.While() | ast.IfExp() if isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield "condition", ast.UnaryOp(ast.Not(), node.test)


def sites(node):
    "Each node below that is behaviour."
    match node:
        case (
            ast.Raise()
            | ast.Import()
            | ast.ImportFrom()
            | ast.JoinedStr()
            | ast.Expr(value=ast.Constant())
            | ast.FunctionDef(name="__str__" | "__repr__")
        ):
            return
        case ast.Call(func=f) | ast.Expr(value=ast.Call(func=f)) if (
            ast.unparse(f).split(".")[-1] in WORDS
        ):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.AnnAssign():
            return  # a setting's default is a choice
    yield node
    for name, below in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for x in below if isinstance(below, list) else [below]:
            if isinstance(x, ast.AST):
                yield from sites(x)


def mutants(path: Path) -> list[Mutant]:
    source = path.read_bytes()
    starts = [0]
    made = {}
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in sites(ast.parse(source)):
        for operator, new in changes(node):
            place = node.test if operator == "condition" else node
            start, end = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            m = Mutant(
                path.relative_to(root).as_posix(),
                node.lineno,
                operator,
                " ".join(source[start:end].decode().split()),
                ast.unparse(new),
                start,
                end,
            )
            made.setdefault((start, end, m.after), m)
    return list(made.values())


def tests_of(m: Mutant) -> list[list[str]]:
    "The runs of tests that may notice, the nearest first."
    room = Path(m.module).parts[1]
    name = Path(m.module).stem
    own = f"tests/{room}/test_{name}.py"
    elsewhere = [
        path
        for path in files_that_name(definition_at(m))
        if not path.startswith(f"tests/{room}/") and not path.startswith("tests/repo/")
    ]
    return [
        *([[own]] if (root / own).exists() else []),
        [f"tests/{room}"],
        sorted({*elsewhere, "tests/training/test_trainer.py"}),
    ]


def definition_at(m: Mutant) -> str | None:
    "The function or class of a module in which a mutant stands; None: in none."
    for node in ast.parse((root / m.module).read_text("utf-8")).body:
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and node.lineno <= m.line <= (node.end_lineno or 0):
            return node.name
    return None


def files_that_name(definition: str | None) -> list[str]:
    "The test files in which a name stands."
    if definition is None:
        return []
    word = re.compile(rf"\b{definition}\b")
    return [
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("test_*.py")
        if word.search(path.read_text("utf-8"))
    ]


def ends_badly(command: list[str], folder: Path, seconds: int = SECONDS) -> bool:
    "Whether a command in a copy of the repository fails, or does not end."
    run = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        return run.wait(seconds) != 0
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        return run.wait() != 0


def pytest(tests: list[str]) -> list[str]:
    return ["-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]


def notebook_fails(m: Mutant, source: str, folder: Path) -> bool:
    "The notebook that exports the module checks its own cells: the changed one stands in it while it runs."
    place = (folder / m.module).parent / re.search(r"File to edit: (\S+\.ipynb)", source)[1]
    before = place.read_text("utf-8")
    marks = list(re.finditer(r"^# %% \S+ #(\w+)\n", source, re.M))
    mark = [x for x in marks if source.count("\n", 0, x.start()) < m.line][-1]
    end = next((x.start() for x in marks if x.start() > mark.start()), len(source))
    cells = json.loads(before)
    cell = next(c for c in cells["cells"] if c["id"] == mark[1])
    cell["source"] = "#| export\n" + source[mark.end() : end].rstrip()
    place.write_text(json.dumps(cells), "utf-8")
    try:
        return ends_badly(
            [
                "tests/notebooks.py",
                "--workers",
                "1",
                place.resolve().relative_to((folder / "nbs").resolve()).with_suffix("").as_posix(),
            ],
            folder,
        )
    finally:
        place.write_text(before, "utf-8")


def seconds_unchanged(tests: str, folder: Path) -> float:
    "How long these tests take without a change; where one fails the run ends."
    start = time.monotonic()
    if ends_badly(pytest([tests]), folder, 3600):
        sys.exit(f"a test in {tests} fails without any change: mend it first")
    return time.monotonic() - start


def noticed(m: Mutant, folder: Path, seconds: dict[str, float]) -> str | None:
    """What fails with the mutant in a copy of the repository: a run of tests, or the module's notebook; None if nothing does.

    `seconds` holds, for each room, what its tests took without a change.
    """
    limit = SECONDS + int(TIMES * seconds[Path(m.module).parts[1]])
    path = folder / m.module
    source = (root / m.module).read_bytes()
    changed = (
        source[: m.start]
        + (m.after if m.operator == "statement" else f"({m.after})").encode()
        + source[m.end :]
    )
    path.write_bytes(changed)
    try:
        first, *later = tests_of(m)
        if ends_badly(pytest(first), folder, limit):
            return first[0]
        if notebook_fails(m, changed.decode(), folder):
            return "its notebook"
        return next((tests[0] for tests in later if ends_badly(pytest(tests), folder, limit)), None)
    finally:
        path.write_bytes(source)


def left_out(place: str, names: list[str]) -> set[str]:
    "What a copy of the repository does not need; of the directories called runs, that of the root alone."
    return {
        n
        for n in names
        if n in (".git", "__pycache__", ".hypothesis")
        or n.startswith(".venv")
        or n == "runs"
        and Path(place) == root
    }


def all_mutants(rooms: Sequence[str]) -> list[Mutant]:
    return [
        m
        for room in rooms
        for path in sorted((root / "instruct_goose" / room).glob("*.py"))
        for m in mutants(path)
    ]


def try_each(chosen: list[Mutant], workers: int) -> list[tuple[Mutant, str | None]]:
    "Each mutant with what noticed it, in copies of the repository."
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(i) for i in range(workers)]
        for folder in folders:
            shutil.copytree(root, folder, ignore=left_out)
        rooms = sorted({Path(m.module).parts[1] for m in chosen})
        seconds = {room: seconds_unchanged(f"tests/{room}", folders[0]) for room in rooms}

        def work(i: int) -> list[tuple[Mutant, str | None]]:
            done = []
            for m in chosen[i::workers]:
                by = noticed(m, folders[i], seconds)
                done.append((m, by))
                print(
                    f"{'caught' if by else 'SURVIVED':9}{m.module}:{m.line} {m.operator}: "
                    f"{m.before[:70]}  →  {m.after[:70]}",
                    flush=True,
                )
            return done

        with ThreadPoolExecutor(workers) as pool:
            return [x for part in pool.map(work, range(workers)) for x in part]


def summary(results: list[tuple[Mutant, str | None]], known: list[dict]) -> dict:
    "The record of a sample; `known` are survivors of an earlier one, with what was said of them."
    said = {tuple(s[k] for k in KEY): s["equivalent"] for s in known}
    survivors = [
        {name: getattr(m, name) for name in ("module", "line", *KEY[1:])}
        | {"equivalent": said.get(m.key)}
        for m, by in results
        if not by
    ]
    rooms: dict[str, list[int]] = {}
    for m, by in results:
        counts = rooms.setdefault(Path(m.module).parts[1], [0, 0])
        counts[0] += 1
        counts[1] += by is not None
    return {
        "mutants": len(results),
        "caught": len(results) - len(survivors),
        "rooms": rooms,
        "survivors": survivors,
    }


def write(table: dict) -> None:
    "Count what is equivalent, and what tests have noticed since; write the record and print it."
    table["equivalent"] = sum(bool(s["equivalent"]) for s in table["survivors"])
    table["caught_since"] = sum(bool(s.get("caught_since_by")) for s in table["survivors"])
    others = table["mutants"] - table["equivalent"]
    table["share"] = round(table["caught"] / others, 4)
    table["share_since"] = round((table["caught"] + table["caught_since"]) / others, 4)
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(
        f"{table['caught']} of {table['mutants']} caught, {table['equivalent']} equivalent: "
        f"{table['share']:.1%} of the others, {table['share_since']:.1%} with the tests since then"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", nargs="?", type=int, default=60, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="try the listed survivors alone")
    args = parser.parse_args()
    found = all_mutants(args.rooms)
    table = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {"survivors": []}
    if args.again:
        listed = {tuple(s[k] for k in KEY): s for s in table["survivors"] if not s["equivalent"]}
        for m, by in try_each([m for m in found if m.key in listed], args.workers):
            listed[m.key]["caught_since_by"] = by
        return write(table)
    chosen = random.Random(args.seed).sample(found, min(args.number, len(found)))
    results = try_each(chosen, args.workers)
    write({"of": len(found), "seed": args.seed} | summary(results, table["survivors"]))


if __name__ == "__main__":
    main()
