"""What makes a lesson's cells run on its page: their places, their sources, and the files of Python as one script."""

import ast
import base64
import gzip
import html
import json
import re
from pathlib import Path

from lessons import Page
from page_cells import ON_PAGES, lesson_path, page_cells, page_files


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


def place(cell_id: str) -> str:
    "Where the runner of a cell stands."
    return f'<div class="run-here" data-cell="{html.escape(cell_id)}"></div>'


def without_directives(source: str) -> str:
    "A cell as a reader edits it."
    return re.sub(r"^#\|.*\n?", "", source, flags=re.M)


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


def packed_files() -> bytes:
    """The files that Python finds on a page, packed.

    Of the package every word is kept, because readers edit it there; what is only run is without
    its docstrings and comments.
    """
    files = {}
    for path, text in page_files():
        files[path] = text if path.startswith("instruct_goose/") else without_words(text)
    return gzip.compress(json.dumps(files).encode(), 9, mtime=0)


def write_files(place: Path) -> int:
    "Write the files that Python finds on a page as a script; returns its bytes."
    packed = packed_files()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(
        f"const PAGE_FILES = {json.dumps(base64.b64encode(packed).decode())}\n", "utf-8"
    )
    return place.stat().st_size
