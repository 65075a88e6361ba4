"""`make test` ends with a summary that says of each notebook that fell in which cell, at which line, and why, however many workers there were."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
pytestmark = pytest.mark.deep
LESSONS = {  # name: cells by id
    "1_objective/00_fine": {"aa01": "x = 1", "aa02": "assert x == 1"},
    "1_objective/01_wrong": {"bb01": "def half(x):\n    assert x % 2 == 0\n    return x / 2", "bb02": "half(4)", "bb03": "y = 3\nhalf(y)", "bb04": "half(5)"},
    "2_models/00_refused": {"cc01": "#| hide\nprint('so far')", "cc02": "raise ValueError('seven\\nlines')"},
    "2_models/01_gone": {"dd01": "import os", "dd02": "os._exit(3)"},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> str:
    "What `python tests/run.py --workers 2 notebooks` prints in a repository of four short lessons."
    here = tmp_path_factory.mktemp("repository")
    for name in ("tests/run.py", "tests/notebooks.py", "tests/portable/variants.py", "pyproject.toml", "settings.ini", "instruct_goose/__init__.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, here / name)
    for name, cells in LESSONS.items():
        path = here / f"nbs/{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        made = [{"cell_type": "code", "id": i, "metadata": {}, "execution_count": None, "outputs": [], "source": s.splitlines(keepends=True)} for i, s in cells.items()]
        path.write_text(json.dumps({"cells": made, "metadata": {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}},
                                    "nbformat": 4, "nbformat_minor": 5}), "utf-8")
    done = subprocess.run([sys.executable, "tests/run.py", "--workers", "2", "notebooks"], cwd=here, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_each_notebook_that_fell_is_named_with_cell_line_and_error(shown):
    summary = [line.strip() for line in shown.split("── summary")[1].splitlines()]
    said = {line: summary[i + 1] for i, line in enumerate(summary) if re.match(r"FAILED \d_", line)}
    assert said == {
        "FAILED 1_objective/01_wrong, cell 2 (bb03): half(y)": "why: AssertionError: assert x % 2 == 0",
        "FAILED 2_models/00_refused, cell 1 (cc02): raise ValueError('seven\\nlines')": "why: ValueError: seven lines",
        "FAILED 2_models/01_gone, cell None (None):": "why: its process died"}
    assert any(re.match(r"FAILED notebooks +\d.* s   1 of 4 notebooks ran to the end", line) for line in summary)


def test_what_ran_well_is_in_the_log_alone(shown):
    log, summary = shown.split("── summary")
    assert "ok     1_objective/00_fine" in log and "00_fine" not in summary
