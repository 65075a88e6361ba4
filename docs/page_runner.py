"""Run the cells of a lesson on a page: what each prints, shows, and raises.

The same runner serves the worker of a page and the tests that compare page tensors with torch.
"""

import ast
import contextlib
import io
import json
import linecache
import sys
import traceback

SHOWN: list = []  # what the running cell has shown


def shown_text(value: object) -> dict | None:
    "What is shown below a cell for the value of its last line."
    if value is None:
        return None
    if hasattr(value, "to_dict") and hasattr(value, "frames"):
        return {"figure": json.dumps(value.to_dict(), default=str)}
    if type(value).__name__ == "Markdown":
        return {"markdown": value.data}
    return {"text": repr(value)}


def where_it_failed(error: BaseException, filename: str) -> int | None:
    "The line of the cell in which an error arose."
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == filename:
            line = frame.lineno
    if line is None and isinstance(error, SyntaxError):
        line = error.lineno
    return line


def run_cell(source: str, space: dict, name: str = "cell") -> dict:
    """Run one cell in a lesson's names.

    Returns `printed`, `shown` (a list of texts, tables and figures), and `error`: None, or its
    type, its words and its line in the cell.
    """
    SHOWN.clear()
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    printed = io.StringIO()
    error = None
    try:
        tree = ast.parse(source, filename)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, filename, "exec"), space)
            if last is not None:
                value = eval(compile(last, filename, "eval"), space)
                if value is not None and not source.rstrip().endswith(";"):
                    SHOWN.append(value)
        shown = [shown_text(value) for value in SHOWN]
    except Exception as raised:
        shown = [shown_text(value) for value in SHOWN]
        error = {
            "type": type(raised).__name__,
            "text": str(raised),
            "line": where_it_failed(raised, filename),
        }
    sys.modules.pop("IPython", None)  # so that lesson.py does not look for a notebook
    sys.modules.pop("IPython.display", None)
    return {"printed": printed.getvalue(), "shown": shown, "error": error}
