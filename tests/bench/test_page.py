"""The page "How fast": what a row looks like on it, whether met, missed, without a peer or in error; and that it says which processor."""

import re
import sys
from pathlib import Path

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "docs")]
import speed  # noqa: E402

from bench import record  # noqa: E402
from bench.form import Case, Row, Side  # noqa: E402

CASE = Case("sampling x", {"a": Side("ours", ""), "b": Side("theirs", "")}, [])
RUNS = {
    "a": [{"cpu": 2.0, "wall": 2.0, "phases": {}}],
    "b": [{"cpu": 3.0, "wall": 3.0, "phases": {}}],
}


def row(goal, **settings):
    return record.entry(
        CASE, Row("work", "a", "b", goal=goal, **settings), RUNS, {"a": {"torch": "2.13.0"}}, {}, {}
    )


def test_cells_by_hand():
    assert speed.cells(row("≥ 3", flip=True)) == [
        "work",
        "1.5× (1.5–1.5) peer / ours",
        "ours: 2 s",
        "theirs: 3 s",
        "≥ 3: missed, at 50% of it",
    ]
    assert (
        speed.cells(row("≤ 1"))[-1] == "≤ 1: met"
        and speed.cells(row("≤ 0.5"))[-1] == "≤ 0.5: missed, at 75% of it"
    )
    alone = record.entry(CASE, Row("alone", "a", None, goal="≤ 1"), RUNS, {}, {}, {})
    assert speed.cells(alone) == [
        "alone",
        "2 s (2–2) ",
        "ours: 2 s",
        "",
        "≤ 1: missed, at 50% of it",
    ]


def test_what_is_not_measured_says_why():
    missed = record.entry(
        CASE, Row("work", "a", "b", goal="≤ 1"), {"a": RUNS["a"]}, {}, {"b": "pip | no"}, {}
    )
    assert "not measured: pip / no" in speed.table([missed]) and speed.plot([missed]) == ""


def test_the_picture_marks_what_is_met():
    made = speed.plot([row("≥ 3", flip=True), row("≤ 1")])
    assert made.count(speed.BLUE) == 2 and made.count(speed.ORANGE) == 2 and "1 of 2" in made


def test_a_row_that_misses_its_goal_says_why(monkeypatch):
    monkeypatch.setattr(speed, "WHY", {"work": "The other is @other, and @others; nobody@example."})
    rows = [
        row("≥ 3", flip=True),
        row(None, flip=True) | {"name": "other"},
        row(None) | {"name": "others"},
    ]
    assert (
        speed.reasons(rows, rows)
        == "- **work**, missed. The other is 1.5×, and 0.667×; nobody@example."
    )
    assert speed.reasons([row("≤ 1")], rows) == ""


def test_every_row_of_the_record_that_misses_its_goal_has_a_reason():
    rows = record.read()
    assert {r["name"] for r in rows if r["met"] is False} <= set(speed.WHY), "bench/why.py"
    page = speed.speed_page()
    assert not re.search("@[A-Za-z]", page), "a figure of a row that is not there"


def test_the_page_says_which_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "RESULTS", tmp_path / "results.json")
    assert "Nothing is measured yet" in speed.speed_page()
    record.write([row("≤ 1")], tmp_path / "results.json")
    assert (
        record.origin()["processor"] in speed.speed_page() and "## Sampling" in speed.speed_page()
    )
