"""What makes a lesson's cells run on its page: their places, their sources, and the files of Python as one script."""

import ast
import base64
import gzip
import html
import json
from pathlib import Path

from lessons import Page
from page_cells import (
    DIFFERENT,
    LONGER,
    ON_PAGES,
    SECONDS,
    doctor_files,
    lesson_path,
    page_cells,
    page_files,
)


def lesson_of(page: Page) -> int | None:
    "The number of a lesson whose cells run on its page."
    for number in ON_PAGES:
        if page.path == lesson_path(number):
            return number
    return None


def places(page: Page) -> set[str]:
    "The cells below which a runner stands."
    number = lesson_of(page)
    if number is None:
        return set()
    return {cell.id for cell in page_cells(number) if cell.reason is None}


def place(page: Page, cell_id: str) -> str:
    "Where the runner of a cell stands: how long the cell may take, and why its numbers differ."
    where = (lesson_of(page), cell_id)
    data = {"cell": cell_id, "seconds": str(LONGER.get(where, SECONDS))}
    if where in DIFFERENT:
        data["differs"] = DIFFERENT[where]
    attributes = "".join(f' data-{name}="{html.escape(text)}"' for name, text in data.items())
    return f'<div class="run-here"{attributes}></div>'


WITHOUT_PYTHON = (
    '<p class="without-python">The cells of this page cannot be run here: this build of the site '
    "has no Python for the browser. Run them in the notebook.</p>"
)


def sources(page: Page) -> str:
    "All cells of a lesson that run on its page, hidden ones too, as data for cells.js."
    cells = [[cell.id, cell.source] for cell in page_cells(lesson_of(page)) if cell.reason is None]
    data = json.dumps(cells, ensure_ascii=False).replace("</", "<\\/")
    return f'<script type="application/json" id="page-cells">{data}</script>'.replace("\n", " ")


def without_words(source: str) -> str:
    "A module without its docstrings and comments."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


def packed(files: dict[str, str]) -> bytes:
    "Files by path as one packed JSON."
    return gzip.compress(json.dumps(files).encode(), 9, mtime=0)


def packed_files() -> bytes:
    """The files that Python finds on the page of a lesson and in the playground, packed.

    Of the package every word is kept, because readers edit it there; what is only run is without
    its docstrings and comments.
    """
    files = {}
    for path, text in page_files():
        files[path] = text if path.startswith("instruct_goose/") else without_words(text)
    return packed(files)


def packed_doctor() -> bytes:
    "What the page that reads a pasted log needs besides, packed: it is run there, and not shown."
    return packed({path: without_words(text) for path, text in doctor_files()})


def write_packed(place: Path, name: str, data: bytes) -> None:
    "Write packed files as a script that defines a constant."
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"const {name} = {json.dumps(base64.b64encode(data).decode())}\n", "utf-8")


def write_files(place: Path) -> None:
    "Write the files that Python finds on the page of a lesson as a script."
    write_packed(place, "PAGE_FILES", packed_files())


def write_doctor(place: Path) -> None:
    "Write what the page that reads a pasted log needs besides as a script."
    write_packed(place, "DOCTOR_FILES", packed_doctor())
