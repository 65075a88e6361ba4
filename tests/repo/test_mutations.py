"""The table of small changes to the code that no test noticed adds up (`make mutations` writes it)."""
import json
from pathlib import Path

root = Path(__file__).parents[2]


def test_the_table_adds_up_and_most_of_what_can_be_noticed_is():
    table = json.loads((root / "evidence/mutations.json").read_text("utf-8"))
    equivalent = [s["equivalent"] for s in table["survivors"] if s["equivalent"]]
    assert table["caught"] + len(table["survivors"]) == table["mutants"] >= 12 and len(equivalent) == table["equivalent"]
    assert [sum(x) for x in zip(*table["rooms"].values())] == [table["mutants"], table["caught"]]
    assert table["share"] == round(table["caught"] / (table["mutants"] - len(equivalent)), 4) > .6 and all(len(reason.split()) > 3 for reason in equivalent)
