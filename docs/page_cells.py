"""Which cells of a lesson run on its page, and the files that Python finds there.

A page has the library of tensors (page_tensors), modules that stand for those which draw or check
types (page_stand_ins), and of the package what needs nothing else: `objective`, `lesson`, and from
a few more modules single functions, as they are. The page that reads a pasted log loads the doctor,
too, with the settings that it reads.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lessons import ROOT
from page_names import Names

LESSONS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 12)  # whose cells are compared with torch
ON_PAGES = LESSONS  # whose cells can be run by a reader
CHAOS = "it trains in float32, where the order of adding decides the last digits, and these grow"
DIFFERENT = {  # (lesson, cell): why it gives other numbers than torch
    (9, "4455d583"): "it shows what is left of a difference of rounding errors",
    (10, "de4a69de"): CHAOS,
    (10, "5dfeb755"): CHAOS,
    (10, "ff43325d"): CHAOS,
    (10, "2b61a42c"): CHAOS,
    (10, "02c29e99"): "its check is of a float32 number that is given as Python's float",
}
SECONDS = 10  # that a cell may take on its page
LONGER = {  # (lesson, cell): what a cell may take that computes more than others
    (1, "bb070902"): 30,
    (1, "b571f268"): 30,
    (4, "3e3d4700"): 30,
    (10, "de4a69de"): 60,
}
NOT_ON_A_PAGE = ("nbdev", "os", "subprocess", "torch.utils")  # what a page has nothing like

PARTS = {  # modules that need more than a page has, and the functions that do not
    "tasks/exact_world.py": ("all_responses", "objective", "optimum", "total_variation"),
    "models/reward_model.py": ("all_pairs_loss", "pairwise_loss"),
    "models/tokens.py": ("pad",),
    "rollouts/reward_shaping.py": ("overlong_punishment",),
    "tasks/playground.py": (
        "ALGORITHMS",
        "PlaygroundSettings",
        "minibatch_loss",
        "rewards_and_advantages",
    ),
}
WHOLE = ("lesson.py", "core/tensor_checks.py")  # and all of objective/
WHOLE_FOR_DOCTOR = ("config.py", "core/checks.py", "core/files.py")  # and all of doctor/


class PageCell(NamedTuple):
    "A code cell of a lesson; `reason` says why it does not run on the page, if it does not."

    id: str
    source: str
    reason: str | None
    hidden: bool
    exported: bool
    begins_exercise: bool
    defines: frozenset[str]
    uses: frozenset[str]


def lesson_path(number: int) -> Path:
    (path,) = (ROOT / "nbs/learn").glob(f"{number:02}_*.ipynb")
    return path


def reason_to_leave_out(source: str) -> str | None:
    "Why a cell does not run on a page, or None."
    if re.search(r"^#\| *eval: *false", source, re.M):
        return "it is not evaluated here either"
    if re.search(r"^[%!]", source, re.M):
        return "it speaks to Jupyter"
    for statement in ast.walk(ast.parse(source)):
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module or ""]
        for name in names:
            for missing in NOT_ON_A_PAGE:
                if name == missing or name.startswith(f"{missing}."):
                    return f"it needs {missing}"
    return None


# --- which cell needs which -------------------------------------------------------------------
def with_missing_names(cells: list["PageCell"]) -> list["PageCell"]:
    "Leave out cells, too, that use a name which only a cell that was left out defines."
    lost: dict[str, str] = {}
    result = []
    for cell in cells:
        if cell.reason is not None:
            lost |= dict.fromkeys(cell.defines, cell.id)
            result.append(cell)
            continue
        gone = sorted(name for name in cell.uses if name in lost)
        if gone:
            cell = cell._replace(reason=f"it uses {gone[0]}, of a cell that does not run here")
            lost |= {name: cell.id for name in cell.defines}
        else:
            for name in cell.defines:
                lost.pop(name, None)
        result.append(cell)
    return result


def page_cells(number: int) -> list[PageCell]:
    "The code cells of a lesson."
    cells = []
    for cell in json.loads(lesson_path(number).read_text("utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        names = Names(source)
        cells.append(
            PageCell(
                cell["id"],
                source,
                reason_to_leave_out(source),
                "#| hide" in source,
                re.search(r"^#\| *exporti?\b", source, re.M) is not None,
                re.search(r"^def my_\w+\(", source, re.M) is not None,
                frozenset(names.defined),
                frozenset(names.used),
            )
        )
    return with_missing_names(cells)


# --- files ------------------------------------------------------------------------------------
def defined_name(statement: ast.stmt) -> str | None:
    "What a statement of a module defines: a function, a class or a constant."
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None


def first_line(statement: ast.stmt) -> int:
    "The line of a statement, or of its first decorator."
    decorators = getattr(statement, "decorator_list", [])
    return min(node.lineno for node in [statement, *decorators])


def part_of_module(source: str, wanted: tuple[str, ...]) -> str:
    "Some definitions of a module as they stand there, and the imports that they need."
    tree = ast.parse(source)
    lines = source.splitlines()
    chosen = {}
    used = set()
    for statement in tree.body:
        name = defined_name(statement)
        if name in wanted:
            chosen[name] = "\n".join(lines[first_line(statement) - 1 : statement.end_lineno])
            used |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    imports = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [a for a in statement.names if (a.asname or a.name).partition(".")[0] in used]
            if names:
                statement.names = names
                imports.append(ast.unparse(statement))
    missing = set(wanted) - set(chosen)
    if missing:
        raise SystemExit(f"docs/page_cells.py: PARTS names what is gone: {missing}")
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(chosen.values()) + "\n"


def modules_of(names: tuple[str, ...], folder: str) -> Iterator[tuple[str, str]]:
    "(path, text) of some modules of the package as they are, and of all that lie in a folder."
    package = ROOT / "instruct_goose"
    for path in [*(package / name for name in names), *sorted((package / folder).glob("*.py"))]:
        if path.name != "__init__.py":
            yield f"instruct_goose/{path.relative_to(package).as_posix()}", path.read_text("utf-8")


def stand_in_files(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    "(path, text) of the modules that stand for libraries."
    place = ROOT / "docs/page_stand_ins"
    for name in names:
        for path in sorted([*place.glob(f"{name}.py"), *(place / name).glob("*.py")]):
            yield path.relative_to(place).as_posix(), path.read_text("utf-8")


def page_files() -> Iterator[tuple[str, str]]:
    "(path, text) of every file that Python finds on the page of a lesson, and in the playground."
    for path in sorted((ROOT / "docs/page_tensors").rglob("*.py")):
        yield path.relative_to(ROOT / "docs").as_posix(), path.read_text("utf-8")
    yield from stand_in_files(("IPython", "fastcore", "jaxtyping", "matplotlib", "plotly"))
    for name in ("page_loss.py", "page_names.py", "page_runner.py"):
        yield name, (ROOT / "docs" / name).read_text("utf-8")
    for name in ("", "core", "objective", "tasks", "models"):
        yield (Path("instruct_goose") / name / "__init__.py").as_posix(), ""
    yield from modules_of(WHOLE, "objective")
    for name, wanted in PARTS.items():
        text = (ROOT / "instruct_goose" / name).read_text("utf-8")
        yield f"instruct_goose/{name}", part_of_module(text, wanted)


def doctor_files() -> Iterator[tuple[str, str]]:
    "(path, text) of what Python finds besides on the page that reads a pasted log."
    yield from stand_in_files(("tyro",))
    yield "page_doctor.py", (ROOT / "docs/page_doctor.py").read_text("utf-8")
    yield "instruct_goose/doctor/__init__.py", ""
    yield from modules_of(WHOLE_FOR_DOCTOR, "doctor")
