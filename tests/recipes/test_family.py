"The comparison's settings: one budget, and one KL coefficient where it is asked for."

import pytest

from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes.family import BETA, BUDGET, family_config
from instruct_goose.recipes.quickstart import QuickstartConfig


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gets_the_same_budget(name):
    config = family_config(name)
    usual = QuickstartConfig()
    assert (config.rm_steps, config.lr, config.value_lr) == tuple(BUDGET.values())
    assert (config.steps, config.batch_size) == (usual.steps, usual.batch_size)
    assert config.beta == PRESETS[name].get("beta", BETA)


@pytest.mark.parametrize("name", PRESETS)
def test_same_beta_is_charged_in_the_reward(name):
    config = family_config(name, same_beta=True)
    assert (config.beta, config.kl_placement) == (BETA, "reward")
