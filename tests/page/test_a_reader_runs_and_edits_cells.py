"""A reader runs one cell, edits another, starts over: what runs, what is said, what is out of date."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def reader(page_folder, runnable_cells, tmp_path):
    "reader(lesson, steps): what the page reports at each step."

    def go(cells: list[list[str]], steps: list) -> list[list[dict]]:
        for name, data in (("cells", cells), ("steps", steps)):
            (tmp_path / f"{name}.json").write_text(json.dumps(data), "utf-8")
        script = Path(__file__).parent / "edit_cells.py"
        paths = [script, page_folder, *(tmp_path / f"{n}.json" for n in ("cells", "steps", "said"))]
        command = [sys.executable, "-I", "-S", *map(str, paths)]
        subprocess.run(command, check=True, timeout=300)
        return json.loads((tmp_path / "said.json").read_text("utf-8"))

    return go


SMALL = [
    ["a", "x = [1]\ny = 10"],
    ["b", "def f():\n    return x[0] + y"],
    ["c", "x.append(2)\nprint(f())"],
    ["d", "y = 20"],
    ["e", "print(len(x), f())"],
    ["f", "from instruct_goose.lesson import *\nexpect(y, 20)\nprint('on')"],
]


def cells_that_ran(said: list[dict]) -> list[str]:
    return [one["cell"] for one in said if "cell" in one]


def printed(said: list[dict], cell: str) -> str:
    (one,) = [one for one in said if one.get("cell") == cell]
    return one["printed"]


def test_a_function_reads_its_names_when_it_is_called(reader):
    (said,) = reader(SMALL, [["e", {}]])
    assert printed(said, "e") == "2 21\n"  # y is 20 by then


def test_a_cell_runs_after_what_it_needs_and_nothing_else(reader):
    (said,) = reader(SMALL, [["e", {}]])
    assert cells_that_ran(said) == ["a", "b", "c", "d", "e"]
    (said,) = reader(SMALL, [["b", {}]])
    assert cells_that_ran(said) == ["a", "b"]


def test_what_is_up_to_date_does_not_run_again(reader):
    _, said = reader(SMALL, [["e", {}], ["e", {}]])
    assert cells_that_ran(said) == ["e"]
    assert printed(said, "e") == "2 21\n"


def test_a_cell_that_changes_something_begins_with_what_it_was(reader):
    *_, said = reader(SMALL, [["c", {}], ["c", {}], ["e", {}]])
    assert printed(said, "e").startswith("2 ")


def test_an_edit_is_followed_and_starting_over_brings_back_the_first_numbers(reader):
    first, edited, again = reader(SMALL, [["c", {}], ["c", {"a": "x = [5]\ny = 10"}], ["c", {}]])
    assert [printed(said, "c") for said in (first, edited, again)] == ["11\n", "15\n", "11\n"]
    assert edited[-1]["touched"] == ["a", "b", "c", "e"]
    assert again[-1]["touched"] == []


def test_a_cell_above_sees_no_name_of_a_cell_below(reader):
    *_, said = reader(SMALL, [["e", {}], ["c", {}]])
    assert printed(said, "c") == "11\n"


def test_checks_speak_and_stop_nobody(reader):
    (said,) = reader(SMALL, [["f", {"d": "y = 21"}]])
    assert printed(said, "f") == "You changed something: this was 20 at [], now it is 21\non\n"


def test_an_error_names_its_line_and_ends_the_run(reader):
    (said,) = reader(SMALL, [["e", {"c": "z = 1\nz = 1 / 0\nx.append(2)"}]])
    assert said[-2]["cell"] == "c"
    assert said[-2]["error"] == {"type": "ZeroDivisionError", "text": "division by zero", "line": 2}
    (said,) = reader(SMALL, [["c", {"c": "x = ("}]])
    assert said[-2]["error"]["type"] == "SyntaxError"
    (said,) = reader(SMALL, [["c", {"b": "def f(:\n    return 1"}]])  # what needs the cell says so
    assert (said[-2]["cell"], said[-2]["error"]["line"]) == ("b", 1)
    assert said[-1]["touched"] == ["b", "c", "e"]


@pytest.mark.parametrize("lesson", [6, 8, 11])
def test_any_cell_of_a_lesson_can_be_run_first(lesson, reader, runnable_cells, both_runs):
    cells = [[cell.id, cell.source] for cell in runnable_cells[lesson]]
    chosen = [cell for cell, _ in cells[5::9]]
    steps = []
    for cell in chosen:
        steps += [None, [cell, {}]]
    reports = reader(cells, steps)[1::2]
    for cell, said in zip(chosen, reports, strict=True):
        assert not [one["error"] for one in said if one.get("error")], (lesson, cell, said)
        expected = both_runs["page"][str(lesson)][cell]["printed"]
        assert printed(said, cell) == expected, (lesson, cell)


def test_the_lesson_runs_on_an_edited_function(reader, runnable_cells):
    cells = [[cell.id, cell.source] for cell in runnable_cells[8]]
    sources = dict(cells)
    (definition,) = [cell for cell, text in cells if "def clipped_objective(" in text]
    edited = sources[definition].replace("torch.minimum(", "torch.maximum(")
    assert edited != sources[definition]
    checked = [cell for cell, text in cells if "expect(" in text and "policy_loss(" in text][0]
    before, after = reader(cells, [[checked, {}], [checked, {definition: edited}]])
    assert "You changed something" not in printed(before, checked)
    assert "You changed something" in "".join(one.get("printed", "") for one in after)
    assert checked in after[-1]["touched"]
