"""The table of small changes to the code that no test noticed adds up (`make mutations` writes it)."""
import json
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
TABLE = root / "evidence/mutations.json"


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
    assert samples[0]["share"] >= .95
