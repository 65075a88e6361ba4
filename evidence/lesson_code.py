"What a lesson defines, for the record that it shows: what is recorded is the code that a reader sees."
import ast
import json
from pathlib import Path
from types import SimpleNamespace

root = Path(__file__).parents[1]


def defined_in(lesson: str, *names: str) -> SimpleNamespace:
    "Functions and constants of nbs/LESSON.ipynb, from the cells that define one of `names`; before these, the imports that they need."
    cells = json.loads((root / f"nbs/{lesson}.ipynb").read_text("utf-8"))["cells"]
    found: dict = {}
    for source in ("".join(c["source"]) for c in cells if c["cell_type"] == "code"):
        if any(line.startswith(("%", "!")) for line in source.splitlines()): continue
        body = ast.parse(source).body
        defines = {n for s in body for n in ([s.name] if isinstance(s, ast.FunctionDef) else [ast.unparse(t) for t in getattr(s, "targets", [])])}
        imports = body and all(isinstance(s, ast.Import | ast.ImportFrom) for s in body) and "# in Colab" not in source and "matplotlib" not in source
        if defines & set(names) or imports: exec(compile(source, lesson, "exec"), found)
    return SimpleNamespace(**{n: found[n] for n in names})
