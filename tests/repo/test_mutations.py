"""The tool on a package of a few lines, where it is known what its tests notice; and the table that it has written of this one."""
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
TABLE = root / "evidence/mutations.json"
PLANTED = '''"Words are left alone."
__all__ = ["area"]
LIMIT = 3

def area(w: int, h: int = 1) -> int:
    "w · h. Documentation says 2 + 2."
    if w < 0:
        raise ValueError("w is " + str(w + 0))
    return w * h

def grown(x):
    print(x + 1)
    return x + 1

def waited(done):
    while not done:
        pass

def forgotten(x):
    return x or 7
'''
TESTS = '''import pytest
from tiny.floor.made import LIMIT, area, grown, waited
def test_limit(): assert LIMIT == 3
@pytest.mark.parametrize("w", [2, 0])
def test_area(w): assert area(w, 3) == 3 * w and area(w) == w
def test_area_refuses():
    with pytest.raises(ValueError): area(-1)
def test_grown(): assert grown(0) != 5
def test_waited(): waited(True)
'''


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    here = tmp_path_factory.mktemp("tiny")
    for name, text in {"tiny/__init__.py": "", "tiny/floor/__init__.py": "", "tiny/floor/made.py": PLANTED, "tests/test_made.py": TESTS}.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text, "utf-8")
    def run(*args):
        command = [sys.executable, root / "tests/mutations.py", *args, "--root", here, "--floors", "tiny/floor", "--tests", "tests", "--patience", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout, json.loads((here / "evidence/mutations.json").read_text("utf-8"))
    return here, run, run("99")


@pytest.mark.deep
def test_a_planted_catch_and_a_planted_survivor_are_told_apart(ran):
    _, _, (out, table) = ran
    tried = [line.split("floor/made.py:")[1].split("   [") for line in out.splitlines() if "floor/made.py:" in line]
    caught = {what: by[0].rstrip("]") for what, *by in tried if by}
    # grown is only asked whether it is 5, and nobody asks for forgotten
    assert [what for what, *by in tried if not by] == [
        "20 and, or: x or 7  →  x and 7", "20 constant: 7  →  8", "13 arithmetic: x + 1  →  x - 1", "13 constant: 1  →  0"]
    assert caught.keys() == {  # nothing of words, errors and what is printed
        "3 constant: 3  →  4", "5 constant: 1  →  0", "7 comparison: w < 0  →  w <= 0", "7 comparison: w < 0  →  w > 0", "7 constant: 0  →  1",
        "9 arithmetic: w * h  →  w / h", "16 not, minus: not done  →  done"}
    assert caught["3 constant: 3  →  4"] == "tests/test_made.py::test_limit"  # which is imported anew
    assert caught["7 comparison: w < 0  →  w <= 0"] == "tests/test_made.py::test_area[0" and caught["16 not, minus: not done  →  done"] == "it died"
    (sample,) = table["samples"]
    assert (sample["mutants"], sample["caught"], sample["equivalent"], sample["share"]) == (11, 7, 0, .6364)
    assert [(s["at"], s["before"], s["equivalent"]) for s in sample["survivors"]][0] == ("tiny/floor/made.py:13", "x + 1", None)


@pytest.mark.deep
def test_judgements_stay_and_only_survivors_are_tried_again(ran):
    here, run, (_, table) = ran
    reason = "nobody could see it"
    table["samples"][0]["survivors"][0]["equivalent"] = reason
    (here / "evidence/mutations.json").write_text(json.dumps(table))
    made = here / "tests/test_made.py"
    made.write_text(made.read_text() + "def test_forgotten():\n    from tiny.floor.made import forgotten\n    assert forgotten(0) == 7 and forgotten(3) == 3\n")
    out, table = run("99")
    assert out.count("floor/made.py:") == 3 and out.count("SURVIVED") == 1  # not what has been judged, nor what was caught
    (sample,) = table["samples"]
    assert (sample["mutants"], sample["caught"], sample["equivalent"], sample["share"]) == (11, 9, 1, .9)
    assert [s["equivalent"] for s in sample["survivors"]] == [reason, None]


def test_a_new_draw_takes_what_no_earlier_one_has():
    sys.path.insert(0, str(root / "tests"))
    import mutations
    found = mutations.mutants(root, ["instruct_goose/training"])
    one = mutations.draw(found, 60, 0)
    assert one == mutations.draw(found, 60, 0) != mutations.draw(found, 60, 1)
    spread = Counter(m.module for m in one)
    assert set(spread) == {m.module for m in found} and max(spread.values()) - min(spread.values()) <= 1
    sources = {m.module: (root / m.module).read_text("utf-8") for m in one}
    for m in one:
        new = mutations.source_of(root, m)
        assert new != sources[m.module] and new.count("\n") == sources[m.module].count("\n")
        compile(new, m.module, "exec")


@pytest.mark.skipif(not TABLE.exists(), reason="make mutations has not been run")
def test_the_table_adds_up_and_nearly_all_that_can_be_noticed_is():
    samples = json.loads(TABLE.read_text("utf-8"))["samples"]
    assert samples[0]["mutants"] >= 150 and samples[1]["mutants"] >= 60 and len({s["seed"] for s in samples}) == len(samples)
    for s in samples:
        for kinds in (s["modules"], s["operators"]):
            assert sum(k["mutants"] for k in kinds.values()) == s["mutants"] and sum(k["caught"] for k in kinds.values()) == s["caught"]
        assert s["caught"] + len(s["survivors"]) == s["mutants"]
        judged = [x["equivalent"] for x in s["survivors"] if x["equivalent"]]
        assert len(judged) == s["equivalent"] and all(len(reason.split()) > 3 for reason in judged)
        assert s["share"] == round(s["caught"] / (s["mutants"] - s["equivalent"]), 4)
        for x in s["survivors"]: assert (root / x["at"].split(":")[0]).exists()
    assert samples[0]["share"] >= .95
