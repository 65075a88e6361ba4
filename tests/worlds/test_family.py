"""One task, all algorithms: what a preset keeps of the quickstart, and what the recorded comparison says."""
import json
from pathlib import Path

import pytest

from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.worlds.family import PRICE, family_config

record = json.loads((Path(__file__).parents[2] / "evidence/family.json").read_text("utf-8"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_gets_the_same_budget(name):
    mine, base = family_config(name, one_price=True), QuickstartConfig()
    for field in "steps batch_size epochs minibatches lr_schedule max_new_tokens reviews pairs seed".split():
        assert getattr(mine, field) == getattr(base, field), field
    assert (mine.lr, mine.value_lr, mine.rm_steps) == (1.2e-3, None, 300)
    assert (mine.beta, mine.kl_placement) == (PRICE, "reward") and mine.advantage == PRESETS[name]["advantage"]
    assert family_config(name, one_price=True, beta=.5).beta == .5  # an override has the last word


def test_the_record_is_complete_and_unlike_work_is_not_compared():
    runs = record["runs"]
    for price in ("published", "one"):
        found = {(r["name"], r["seed"]) for r in runs if r["price"] == price and r["lr"] == record["config"]["lr"]}
        assert found == {(name, seed) for name in PRESETS for seed in (0, 1, 2)}
    assert {r["beta"] for r in runs if r["price"] == "one"} == {PRICE}
    for name in PRESETS:
        assert {r["beta"] for r in runs if (r["name"], r["price"]) == (name, "published")} == {family_config(name).beta}
    assert record["config"] == {k: getattr(family_config("ppo"), k) for k in record["config"]}
