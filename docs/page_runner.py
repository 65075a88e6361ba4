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

from page_names import Names

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


class Lesson:
    """The cells of a lesson, of which a reader runs some and edits some, in any order.

    A cell sees what a notebook run from the top would show it at its place: the names of the cells
    above it, as these left them.
    """

    def __init__(self, cells: list[list[str]]):  # [identifier, source] of each cell that runs
        self.order = [cell for cell, _ in cells]
        self.original = dict(cells)
        self.sources: dict[str, str] = {}
        self.names: dict[str, Names] = {}
        self.all_needs: dict[str, set[str]] = {}  # of each cell that was asked for since an edit
        self.made: dict[str, dict] = {}  # of each cell that is up to date: the names that it left
        self.space: dict = {"__name__": "__main__"}
        for cell, source in cells:
            self.edit(cell, source)

    def edit(self, cell: str, source: str) -> None:
        "Give a cell another text."
        if self.sources.get(cell) == source:
            return
        self.forget(cell)
        self.all_needs.clear()
        self.sources[cell] = source
        try:
            self.names[cell] = Names(source)
        except SyntaxError:  # so that what needs the cell runs it, and says what is wrong there
            self.names[cell] = Names(self.original[cell])

    def needs(self, cell: str) -> set[str]:
        """The cells that gave a cell its names: for each name the last one above it.

        A function reads its names when it is called, so those that it reads count here, too.
        """
        above = self.order[: self.order.index(cell)]
        wanted = set(self.names[cell].used)
        while True:
            found = set()
            missing = set(wanted)
            for earlier in reversed(above):
                given = missing & self.names[earlier].defined
                if given:
                    found.add(earlier)
                    missing -= given
            more = wanted.union(*(self.names[one].used_later for one in found))
            if more == wanted:
                return found
            wanted = more

    def with_all_needs(self, cell: str) -> set[str]:
        "A cell and all cells that it rests on."
        if cell in self.all_needs:
            return self.all_needs[cell]
        found: set[str] = set()
        waiting = [cell]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting.extend(self.needs(one))
        self.all_needs[cell] = found
        return found

    def resting_on(self, cell: str) -> list[str]:
        "The cells below that rest on a cell."
        below = self.order[self.order.index(cell) + 1 :]
        return [one for one in below if cell in self.with_all_needs(one)]

    def forget(self, cell: str) -> None:
        "A cell, and what rests on it, is no longer up to date."
        if cell not in self.made:
            return
        for one in [cell, *self.resting_on(cell)]:
            self.made.pop(one, None)

    def plan(self, wanted: str) -> list[str]:
        "What has to run, in order, so that a cell runs: it, and what it needs and has not."
        self.forget(wanted)
        for name in self.names[wanted].changed:  # it would change the same thing twice
            for cell in self.needs(wanted):
                if name in self.names[cell].defined:
                    self.forget(cell)
        needed = self.with_all_needs(wanted)
        return [cell for cell in self.order if cell in needed and cell not in self.made]

    def enter(self, cell: str) -> None:
        "Put the names in place that the cells above a cell have left."
        for name in [name for name in self.space if not name.startswith("__")]:
            del self.space[name]
        for earlier in self.order[: self.order.index(cell)]:
            self.space.update(self.made.get(earlier, {}))

    def run_one(self, cell: str) -> dict:
        "Run one cell at its place."
        self.enter(cell)
        before = dict(self.space)
        result = run_cell(self.sources[cell], self.space, cell)
        if result["error"] is None:
            changed = self.names[cell].defined
            self.made[cell] = {
                name: value
                for name, value in self.space.items()
                if name in changed or name not in before or before[name] is not value
            }
        return result

    def run(self, wanted: str, sources: dict[str, str], report) -> None:
        """Run a cell, after what it needs; `sources` are the texts that a reader has edited.

        `report` is called with JSON: before and after each cell that runs, and at the end with the
        cells that are up to date and those that rest on an edited one.
        """
        for cell in self.order:
            self.edit(cell, sources.get(cell, self.original[cell]))
        for cell in self.plan(wanted):
            report(json.dumps({"begins": cell}))
            result = self.run_one(cell)
            report(json.dumps({"cell": cell, **result}))
            if result["error"] is not None:
                break
        edited = {cell for cell in self.order if self.sources[cell] != self.original[cell]}
        touched = [cell for cell in self.order if edited & self.with_all_needs(cell)]
        report(json.dumps({"fresh": list(self.made), "touched": touched}))


def open_lesson(cells: str) -> Lesson:
    "A lesson on a page, where checks speak and stop nobody."
    import page_tensors

    page_tensors.install()
    from instruct_goose import lesson

    lesson.at_the_keyboard = lambda: True
    return Lesson(json.loads(cells))
