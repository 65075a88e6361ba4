"What a lesson defines, for its tests and for the record that it shows: both run the code that a reader sees."

import ast
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

root = Path(__file__).parents[1]


def defined_in(lesson: str, *names: str) -> SimpleNamespace:
    "Functions and constants of nbs/LESSON.ipynb, from the cells that define one of `names`; before these, the imports that they need."
    cells = json.loads((root / f"nbs/{lesson}.ipynb").read_text("utf-8"))["cells"]
    found: dict = {}
    for source in ("".join(c["source"]) for c in cells if c["cell_type"] == "code"):
        if any(line.startswith(("%", "!")) for line in source.splitlines()):
            continue
        body = ast.parse(source).body
        defines = {
            n
            for s in body
            for n in (
                [s.name]
                if isinstance(s, ast.FunctionDef)
                else [ast.unparse(t) for t in getattr(s, "targets", [])]
            )
        }
        imports = (
            body
            and all(isinstance(s, ast.Import | ast.ImportFrom) for s in body)
            and "# in Colab" not in source
            and "matplotlib" not in source
        )
        if defines & set(names) or imports:
            exec(compile(source, lesson, "exec"), found)
    return SimpleNamespace(**{n: found[n] for n in names})


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


@cache
def lesson_module(lesson: str) -> ModuleType:
    "What a lesson defines, as a module."
    module = sys.modules[lesson] = ModuleType(lesson)
    exec(
        compile(source_of((root / f"nbs/{lesson}.ipynb").read_text("utf-8")), lesson, "exec"),
        vars(module),
    )
    return module
