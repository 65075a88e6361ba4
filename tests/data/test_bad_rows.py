"""Rows that cannot be used: refused together by their lines, or left out and counted. Oracle: the rows that were spoilt by hand."""

import json

import pytest

from instruct_goose.data.bad_rows import RowPolicy, RowReport, SkippedRows, usable_rows
from instruct_goose.data.files import BadRow


def word(row, where):
    "What these tests make of a row."
    if isinstance(row, str) and len(row) > 5:
        raise BadRow("length", where, "too long")
    if not row:
        raise BadRow("empty", where, "nothing in it")
    return row.upper()


def numbered(rows):
    return [(f"f.txt, line {i}", row) for i, row in enumerate(rows, 1)]


def refusal_of(rows, policy=RowPolicy()):
    with pytest.raises(BadRow) as e:
        usable_rows(numbered(rows), word, policy, source="f.txt")
    return e.value


def test_all_bad_rows_are_counted_and_the_first_five_are_shown():
    rows = ["a", ""] * 7
    error = refusal_of(rows)
    lines = str(error).splitlines()
    assert lines[0].startswith("f.txt: 7 of 14 rows cannot be used (7 × empty). Mend them")
    assert lines[0].endswith("bad_rows='skip' leaves such rows out")
    assert lines[1:6] == [f"- f.txt, line {2 * i}: nothing in it" for i in range(1, 6)]
    assert lines[6:] == ["- and 2 more"]
    assert error.reason == "empty"


def test_one_bad_row_is_named_by_its_line_alone():
    error = refusal_of(["a", ""])
    assert str(error) == ("f.txt, line 2: nothing in it. bad_rows='skip' leaves such rows out")


@pytest.mark.parametrize(
    "policy, rows, says",
    [
        (RowPolicy("skip", "refuse"), ["a", "", "toolong"], "line 3: too long"),
        (RowPolicy("refuse", "drop"), ["a", "", "toolong"], "line 2: nothing in it"),
        (RowPolicy("skip", "cut"), ["a", "toolong"], "line 2: too long"),
    ],
)
def test_long_rows_and_bad_rows_have_a_policy_each(policy, rows, says):
    assert says in str(refusal_of(rows, policy))


def test_what_is_left_out_is_counted_by_its_reason():
    report = RowReport()
    broken = BadRow("json", "f.txt, line 4", "not JSON")
    rows = [*numbered(["a", "", "toolong"]), ("f.txt, line 4", broken)]
    with pytest.warns(SkippedRows, match="f.txt: 3 of 4 rows skipped .1 × empty, 1 × json, 1 × l"):
        kept = usable_rows(rows, word, RowPolicy("skip", "drop"), report, "f.txt")
    assert kept == ["A"]
    assert report.skipped == {"empty": 1, "length": 1, "json": 1}
    assert json.loads(json.dumps(report.summary()))["used"] == 1
    assert report.examples == [
        "f.txt, line 2: nothing in it",
        "f.txt, line 3: too long",
        "f.txt, line 4: not JSON",
    ]


def test_no_row_left_is_an_error_and_no_rows_is_another():
    with pytest.raises(ValueError, match="f.txt: no row is left: 2 of 2 rows skipped"):
        usable_rows(numbered(["", ""]), word, RowPolicy("skip"), source="f.txt")
    with pytest.raises(ValueError, match="f.txt: no rows"):
        usable_rows([], word, source="f.txt")


def test_a_fault_that_is_no_rows_is_not_skipped():
    def broken(row, where):
        raise ZeroDivisionError("the program's own")

    with pytest.raises(ZeroDivisionError):
        usable_rows(numbered(["a"]), broken, RowPolicy("skip", "drop"))
