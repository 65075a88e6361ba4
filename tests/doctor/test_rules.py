"""Healthy runs, with every preset, scale, place of the KL and form of the ratio, and with random
settings: no error is found in them.
"""

import json
import sys
from itertools import product
from pathlib import Path

import pytest
from deep import first

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.report import read_tokens
from instruct_goose.doctor.rules import read_metrics
from instruct_goose.objective.group import PRESETS
from instruct_goose.objective.policy_loss import LEVELS

sys.path.append(str(Path(__file__).parents[2] / "evidence"))
from doctor_unseen import USUAL, a_run, random_settings

RATIOS = [
    dict(surrogate=s, ratio_level=level) for s, level in product(("min", "ratio", "weight"), LEVELS)
]
ALL = [
    dict(
        PRESETS[preset],
        kl_placement=place,
        reward_scaling=scaling,
        kl_estimator=None,
        importance_cap=None,
    )
    for scaling, preset, place in product(("batch", None, "running"), PRESETS, ("loss", "reward"))
    if not (scaling and PRESETS[preset].get("advantage") == "greedy")
]  # a greedy response has a scale of its own


def errors(settings):
    log, config, tokens = a_run(USUAL | settings)
    return [f for c in (config, None) for f in diagnose(log, c, tokens) if f.severity == "error"]


@pytest.mark.parametrize(
    "settings", first(12, ALL[::5] + ALL), ids=lambda s: " ".join(map(str, s.values()))
)
def test_no_error_on_any_scale_and_place(settings):
    assert not errors(settings)


@pytest.mark.parametrize(
    "settings",
    first(6, sorted(RATIOS, key=lambda c: c["ratio_level"] == "token")),
    ids=lambda c: " ".join(c.values()),
)
def test_no_error_whatever_the_ratio(settings):
    assert not errors(settings)


@pytest.mark.parametrize("seed", first(20, range(200)))
def test_no_error_on_random_healthy_settings(seed):
    assert not errors(random_settings(seed))


@pytest.mark.parametrize("preset", first(3, PRESETS))
def test_one_iteration_of_a_healthy_run_has_no_finding(preset):
    log, config, tokens = a_run(USUAL | PRESETS[preset] | {"steps": 1})
    assert not diagnose(log, config, tokens) and not diagnose(log)


@pytest.mark.parametrize(
    "tokens, exact, found",
    [(22.0, None, True), (22.0, 20.0, True), (22.0, 0.4, False), (5.0, 5.0, False)],
)
def test_one_step_that_moves_every_token_is_named_at_once(tokens, exact, found):
    "22 nats on 8.3 tokens; not where the exact KL says that a rare token is all of it."
    assert (
        "large steps"
        in [
            f.name
            for f in diagnose(
                [{"kl_to_old": tokens, "response_length": 8.3, "kl_to_old_exact": exact}]
            )
        ]
    ) == found


def test_what_stands_between_reward_and_total_is_not_always_the_kl():
    """Total − reward is k1 with the wrong sign, but for: scaled rewards, by the settings or by
    iteration 0; and a KL that is in the loss.
    """
    rows = [
        {
            "reward_mean": 0.5,
            "total_reward_mean": 0.5 + 0.03 * i,
            "beta": 0.1,
            "kl_to_reference": 0.3 * i,
            "kl_estimate": 0.3 * i,
        }
        for i in range(12)
    ]

    def sign(rows, config=None):
        return "KL sign" in [f.name for f in diagnose(rows, config)]

    assert sign(rows) and sign(rows, {"kl_placement": "reward"})
    assert not any(
        sign(rows, c)
        for c in (
            {"kl_placement": "loss"},
            {"reward_scaling": "batch"},
            {"reward_weighting": "scaled"},
        )
    )
    assert not sign([m | {"total_reward_mean": m["total_reward_mean"] + 0.1} for m in rows])


def test_the_log_of_an_older_version_is_read_by_the_names_of_today(tmp_path):
    old_metrics = {
        "iteration": 0,
        "reward_mean": 1.0,
        "learnt_apart": 0.5,
        "optimizer_age": 4,
        "clipped_norm": 0.25,
        "weight_step": 1e-3,
        "reference_weight": 0.02,
        "prompt_nll": 0.5,
        "ent_weight": 0.0,
    }
    old_response = {"tokens": ["a"], "moved": [0.25], "held": [True], "pull": [2.0]}
    old_tokens = {"iteration": 0, "responses": [old_response]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old_metrics) + "\n")
    (tmp_path / "tokens.jsonl").write_text(json.dumps(old_tokens) + "\n")

    [metrics], _ = read_metrics(tmp_path)
    [response] = read_tokens(tmp_path / "tokens.jsonl")[0]

    assert metrics == {
        "iteration": 0,
        "reward_mean": 1.0,
        "coverage_error": 0.5,
        "optimizer_step_count": 4,
        "clipped_grad_norm": 0.25,
        "weight_change_rms": 1e-3,
        "reference_weight_mean_abs": 0.02,
        "prompt_nll_ratio": 0.5,
        "ent_coef_used": 0.0,
    }
    assert response == {
        "tokens": ["a"],
        "log_ratio": [0.25],
        "clipped": [True],
        "negative_gradient": [2.0],
    }
