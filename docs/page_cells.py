"""Which cells of a lesson run on its page, and the files that Python finds there.

A page has the library of tensors (page_tensors), modules that stand for those which draw or check
types (page_stand_ins), and of the package what needs nothing else: `objective`, `lesson`, and from a
few more modules single functions, as they are.
"""

import ast
import builtins
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lessons import ROOT

LESSONS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 12)
NOT_ON_A_PAGE = ("nbdev", "os", "subprocess", "torch.utils")  # what a page has nothing like

PARTS = {  # modules that need more than a page has, and the functions that do not
    "tasks/exact_world.py": ("all_responses", "objective", "optimum", "total_variation"),
    "models/reward_model.py": ("all_pairs_loss", "pairwise_loss"),
    "models/tokens.py": ("pad",),
}
WHOLE = ("lesson.py", "core/tensor_checks.py")  # and all of objective/


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
class Names(ast.NodeVisitor):
    "What a cell defines for later cells, and what it uses of earlier ones."

    def __init__(self, source: str):
        self.defined: set[str] = set()
        self.used: set[str] = set()
        self.used_later: set[str] = set()  # by functions, when they are called
        self.visit(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.M)))
        self.used |= self.used_later - self.defined

    def use(self, name: str) -> None:
        if name not in self.defined and not hasattr(builtins, name):
            self.used.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.use(node.id)
        else:
            self.defined.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.use(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                module = ROOT / (node.module.replace(".", "/") + ".py")
                self.defined |= public_names(module)
                continue
            self.defined.add((alias.asname or alias.name).partition(".")[0])

    visit_ImportFrom = visit_Import

    def visit_Subscript(self, node: ast.Subscript) -> None:
        "x[…] = … changes x: later cells need this one, and this one needs x."
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            self.use(node.value.id)
            self.defined.add(node.value.id)
        self.generic_visit(node)

    visit_Attribute = visit_Subscript

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.defined.add(node.name)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def of_scope(self, parameters: list[ast.arg], body: list[ast.AST]) -> None:
        "A function's own names are nobody else's."
        inner = Names("")
        inner.defined |= {parameter.arg for parameter in parameters}
        for part in body:
            inner.visit(part)
        own = inner.defined
        for part in body:  # a name may be used above its definition
            for node in ast.walk(part):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    own.add(node.id)
        self.used_later |= {name for name in inner.used - own if not hasattr(builtins, name)}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self.defined.add(node.name)
        self.of_scope(parameters_of(node.args), node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self.of_scope(parameters_of(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases):
            self.visit(part)
        self.defined.add(node.name)
        self.of_scope([], node.body)

    def visit_comprehension_of(self, node: ast.AST) -> None:
        inner = Names("")
        for generator in node.generators:
            inner.visit(generator.iter)
            inner.visit(generator.target)
            for condition in generator.ifs:
                inner.visit(condition)
        for part in ("key", "value", "elt"):
            if hasattr(node, part):
                inner.visit(getattr(node, part))
        for name in inner.used:
            self.use(name)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of


def public_names(module: Path) -> set[str]:
    "What `from module import *` gives."
    for statement in ast.parse(module.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__":
            return set(ast.literal_eval(statement.value))
    return set()


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    "All parameters of a function, *args and **kwargs too."
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


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
def part_of_module(source: str, wanted: tuple[str, ...]) -> str:
    "Some functions of a module as they stand there, and the imports that they need."
    tree = ast.parse(source)
    lines = source.splitlines()
    chosen = []
    used = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in wanted:
            chosen.append("\n".join(lines[statement.lineno - 1 : statement.end_lineno]))
            used |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    imports = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [a for a in statement.names if (a.asname or a.name).partition(".")[0] in used]
            if names:
                statement.names = names
                imports.append(ast.unparse(statement))
    missing = set(wanted) - {re.match(r"def (\w+)", text)[1] for text in chosen}
    if missing:
        raise SystemExit(f"docs/page_cells.py: PARTS names functions that are gone: {missing}")
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(chosen) + "\n"


def page_files() -> Iterator[tuple[str, str]]:
    "(path, text) of every file that Python finds on a page."
    package = ROOT / "instruct_goose"
    for place in ("page_tensors", "page_stand_ins"):
        for path in sorted((ROOT / "docs" / place).rglob("*.py")):
            where = path.relative_to(ROOT / "docs")
            if place == "page_stand_ins":
                where = where.relative_to(place)
            yield where.as_posix(), path.read_text("utf-8")
    yield "page_runner.py", (ROOT / "docs/page_runner.py").read_text("utf-8")
    for name in ("", "core", "objective", "tasks", "models"):
        yield (Path("instruct_goose") / name / "__init__.py").as_posix(), ""
    for path in [
        *(package / name for name in WHOLE),
        *sorted((package / "objective").glob("*.py")),
    ]:
        if path.name != "__init__.py":
            yield f"instruct_goose/{path.relative_to(package).as_posix()}", path.read_text("utf-8")
    for name, wanted in PARTS.items():
        text = (package / name).read_text("utf-8")
        yield f"instruct_goose/{name}", part_of_module(text, wanted)
