"The comparison's settings: one budget, and one KL coefficient where it is asked for."

import pytest

from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes.family import BUDGET, PRICE, family_config
from instruct_goose.recipes.quickstart import QuickstartConfig


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gets_the_same_budget(name):
    config = family_config(name)
    usual = QuickstartConfig()
    assert (config.rm_steps, config.lr, config.value_lr) == tuple(BUDGET.values())
    assert (config.steps, config.batch_size) == (usual.steps, usual.batch_size)
    assert config.beta == PRESETS[name].get("beta", PRICE)


@pytest.mark.parametrize("name", PRESETS)
def test_one_price_is_charged_in_the_reward(name):
    config = family_config(name, one_price=True)
    assert (config.beta, config.kl_placement) == (PRICE, "reward")
