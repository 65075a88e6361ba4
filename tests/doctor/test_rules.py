"Healthy runs with every preset, scaling of the rewards, place of the KL and form of the ratio: no error is found in them."
from dataclasses import asdict
from itertools import product

import pytest
from deep import first

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.objective.group import PRESETS
from instruct_goose.supervised.fit import torch_threads
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.worlds.probes import tiny_world

SCALES = ["batch", None, "running"]
RATIOS = [dict(surrogate=s, ratio_level=level) for s, level in product(("min", "ratio", "weight"), ("token", "sequence", "product", "sequence_token"))]


def train(preset="ppo", **changes):
    "The log of a small run that drifts by nats, and its settings."
    model, tokenizer = tiny_world()
    c = RLHFConfig.preset(preset, **dict(steps=8, batch_size=64, epochs=1, minibatches=2, max_new_tokens=4, lr=.01, value_lr=.05, beta=.05, device="cpu",
                                         kl_estimator=None, importance_cap=None) | changes)
    with torch_threads(1):
        trainer = RLHFTrainer(model, config=c, tokenizer=tokenizer)
        return trainer.train([""], lambda texts: [.2 * t.count("a") - .1 * t.count("b") + .3 for t in texts], progress=False), asdict(c)


def errors(log, config): return [f for f in diagnose(log, config) if f.severity == "error"]


ALL = [(preset, scaling, place) for scaling, preset, place in product(SCALES, PRESETS, ("loss", "reward"))
       if not (scaling and PRESETS[preset].get("advantage") == "greedy")]  # a greedy response has a scale of its own


@pytest.mark.parametrize("preset, scaling, placement", first(16, ALL))
def test_no_error_on_any_scale_and_place(preset, scaling, placement):
    log, config = train(preset, reward_scaling=scaling, kl_placement=placement)
    assert not errors(log, config) and not errors(log, None)


@pytest.mark.parametrize("changes", first(6, sorted(RATIOS, key=lambda c: c["ratio_level"] == "token")), ids=lambda c: " ".join(c.values()))
def test_no_error_whatever_the_ratio(changes):
    for preset in ("ppo", "grpo"): assert not errors(*train(preset, **changes))


@pytest.mark.parametrize("tokens, exact, found", [(22., None, True), (22., 20., True), (22., .4, False), (5., 5., False)])
def test_one_step_that_moves_every_token_is_named_at_once(tokens, exact, found):
    "22 nats on 8.3 tokens; not where the exact KL says that a rare token is all of it."
    assert ("large steps" in [f.name for f in diagnose([{"kl_to_old": tokens, "response_length": 8.3, "kl_to_old_exact": exact}])]) == found


def test_what_stands_between_reward_and_total_is_not_always_the_kl():
    "Total − reward is k1 with the wrong sign, but for: scaled rewards, by the settings or by iteration 0; and a KL that is in the loss."
    rows = [{"reward_mean": .5, "total_reward_mean": .5 + .01 * i, "beta": .1, "kl_to_reference": .1 * i, "kl_estimate": .1 * i} for i in range(12)]
    sign = lambda rows, config=None: "KL sign" in [f.name for f in diagnose(rows, config)]
    assert sign(rows) and sign(rows, {"kl_placement": "reward"})
    assert not any(sign(rows, c) for c in ({"kl_placement": "loss"}, {"reward_scaling": "batch"}, {"reward_weighting": "scaled"}))
    assert not sign([m | {"total_reward_mean": m["total_reward_mean"] + .1} for m in rows])
