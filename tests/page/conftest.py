"""A folder with the files of a page, and Python as a page has it."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
sys.path.append(str(ROOT / "evidence"))

import page_build  # noqa: E402
import page_cells  # noqa: E402


def unpacked(data: bytes, folder: Path) -> Path:
    "The folder, with packed files in it."
    for name, text in json.loads(gzip.decompress(data)).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory) -> Path:
    "What Python finds on the page of a lesson."
    return unpacked(page_build.packed_files(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="session")
def doctor_folder(tmp_path_factory) -> Path:
    "What Python finds on the page that reads a pasted log."
    folder = unpacked(page_build.packed_files(), tmp_path_factory.mktemp("doctor"))
    return unpacked(page_build.packed_doctor(), folder)


@pytest.fixture(scope="session")
def runnable_cells() -> dict[int, list[page_cells.PageCell]]:
    "The cells of each lesson that run on its page."
    return {
        number: [cell for cell in page_cells.page_cells(number) if cell.reason is None]
        for number in page_cells.LESSONS
    }


@pytest.fixture(scope="session")
def both_runs(page_folder, runnable_cells, tmp_path_factory) -> dict[str, dict]:
    """What every runnable cell printed, showed, checked and raised: with torch, and with page tensors.

    The first process of pytest that asks runs them, and the others read what it found.
    """
    of_all_processes = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_all_processes = of_all_processes.parent
    found = of_all_processes / "both_runs.json"
    with FileLock(found.with_suffix(".lock")):
        if not found.exists():
            runs = run_both(page_folder, runnable_cells, tmp_path_factory.mktemp("runs"))
            found.write_text(json.dumps(runs), "utf-8")
    return json.loads(found.read_text("utf-8"))


def run_both(page_folder: Path, runnable_cells: dict, place: Path) -> dict[str, dict]:
    "The records of `both_runs`, whose files are written to a place."
    sources = {n: [(cell.id, cell.source) for cell in cells] for n, cells in runnable_cells.items()}
    (place / "cells.json").write_text(json.dumps(sources), "utf-8")
    script = Path(__file__).parent / "run_lessons.py"
    started = {}
    for which, alone in (("torch", []), ("page", ["-I", "-S"])):  # -I -S: the standard library only
        result = place / f"{which}.json"
        command = [sys.executable, *alone, script, page_folder, which, result, place / "cells.json"]
        started[which] = subprocess.Popen([str(part) for part in command])
    runs = {}
    for which, process in started.items():
        assert process.wait(timeout=600) == 0, which
        runs[which] = json.loads((place / f"{which}.json").read_text("utf-8"))
    return runs
