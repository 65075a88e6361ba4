"""Each rule on a few rows by hand, just inside and just outside its limits; and healthy runs with
every preset, scale, place of the KL and form of the ratio, and random settings, without an error.
"""

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
from deep import first
from small_runs import rows_of

from instruct_goose.config import RLHFConfig
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.report import read_tokens
from instruct_goose.doctor.rules import (
    METRIC_RULES,
    Run,
    advantages_of_other_rows,
    charged_k1,
    charges,
    drift,
    ends_unseen,
    entropy_bonus_off,
    entropy_collapse,
    equal_rewards,
    foreign_prompts,
    kl_estimate_off,
    kl_sign,
    large_steps,
    length_collapse,
    length_is_reward,
    negative_kl,
    never_ends,
    nll_off_entropy,
    no_clip,
    no_policy_gradient,
    noisy_forward,
    noisy_reward,
    padding_counted,
    policy_loss_scale,
    prompts_lost,
    ratio_never_moves,
    read_metrics,
    returns_are_values,
    reward_of_other_rows,
    reward_scale,
    sampler_left_behind,
    sampler_mismatch,
    small_rewards,
    stale_gradients,
    start_kl,
    value_loss_off,
    values_stand_still,
    variety_collapse,
)
from instruct_goose.objective.group import PRESETS
from instruct_goose.objective.policy_loss import LEVELS

sys.path.append(str(Path(__file__).parents[2] / "evidence"))
from doctor_unseen import USUAL, a_run, random_settings


# ---------------------------------------------------------------- each limit, from both sides
def evidence(rule, settings=None, recorded=None, **columns):
    return rule(Run(rows_of(**columns), settings, recorded))


FLOAT32_ROUNDING = {"rounding": 2.0**-23}
HALF = {"rounding": 2.0**-7}


@pytest.mark.parametrize(
    "rule, columns, seen",
    [
        # a limit may be reached, and not passed; the first and the worst iteration are named
        (
            noisy_forward,
            FLOAT32_ROUNDING | {"max_ratio_deviation_first": [0.001, 0.002, 0.25, 0.125]},
            "max_ratio_deviation_first is above 0.001 in 3 of 4 iterations, first in iteration 1, "
            "most in iteration 2 (0.25)",
        ),
        (noisy_forward, FLOAT32_ROUNDING | {"max_ratio_deviation_first": [0.001]}, None),
        (noisy_forward, {"rounding": 1e-4, "max_ratio_deviation_first": [0.25]}, "iteration 0"),
        (noisy_forward, {"rounding": 1.1e-4, "max_ratio_deviation_first": [0.25]}, None),
        (noisy_forward, {"max_ratio_deviation_first": [0.5]}, None),
        (noisy_forward, {"max_ratio_deviation_first": [0.51]}, "above 0.5 in 1 of 1"),
        (start_kl, {"kl_to_reference": [0.001, 1.0]}, None),
        (
            start_kl,
            {"kl_to_reference": [0.0011, 1.0]},
            "kl_to_reference is 0.0011 in iteration 0, before any update",
        ),
        (start_kl, {"iteration": [1, 2], "kl_to_reference": 0.5}, None),
        # sampler mismatch: the ratio, in half precision the mean, with a cap the start
        (
            sampler_mismatch,
            FLOAT32_ROUNDING | {"max_sampler_deviation": [0.0, 0.0011], "sampler_kl": 0.0},
            "max_sampler_deviation is above 0.001 in 1 of 2 iterations, first in iteration 1",
        ),
        (sampler_mismatch, FLOAT32_ROUNDING | {"max_sampler_deviation": [0.0, 0.001]}, None),
        (sampler_mismatch, HALF | {"max_sampler_deviation": [9.0], "sampler_kl": 0.1}, None),
        (
            sampler_mismatch,
            HALF | {"max_sampler_deviation": [0.0], "sampler_kl": 0.11},
            "sampler_kl is above 0.1",
        ),
        (sampler_mismatch, {"importance_mean": 1.0, "sampler_kl": [0.03, 9.0]}, None),
        (
            sampler_mismatch,
            {"importance_mean": 1.0, "sampler_kl": [0.031]},
            "sampler_kl is 0.031 in iteration 0",
        ),
        # k tokens of a sampled negative log-likelihood against the entropy: six errors and 3 %
        (
            nll_off_entropy,
            {"sampled_nll": [2.75], "entropy": 2.0, "sampled_nll_error": 0.125, "tokens": 32},
            None,
        ),
        (
            nll_off_entropy,
            {"sampled_nll": [2.875], "entropy": 2.0, "sampled_nll_error": 0.125, "tokens": 32},
            "sampled_nll is 2.88 ± 0.1 (standard error), the entropy 2",
        ),
        (
            nll_off_entropy,
            {"sampled_nll": [1.125], "entropy": 2.0, "sampled_nll_error": 0.125, "tokens": 32},
            "sampled_nll is 1.12 ± 0.1",
        ),
        (
            nll_off_entropy,
            {"sampled_nll": [9.0], "entropy": 2.0, "sampled_nll_error": 0.125, "tokens": 31},
            None,
        ),
        (
            nll_off_entropy,
            {"sampled_nll": [2.059], "entropy": 2.0, "sampled_nll_error": 0.0, "tokens": 32},
            None,
        ),
        (
            nll_off_entropy,
            {"sampled_nll": [2.061], "entropy": 2.0, "sampled_nll_error": 0.0, "tokens": 32},
            "sampled_nll is 2.06 ± 0 ",
        ),
        (  # (4·32 + 2·96)/128, (2·32 + 1·96)/128, √(32² + 96²·0)/128 each
            nll_off_entropy,
            {
                "sampled_nll": [4.0, 2.0],
                "entropy": [2.0, 1.0],
                "sampled_nll_error": [0.4, 0.0],
                "tokens": [32, 96],
            },
            "sampled_nll is 2.5 ± 0.1 (standard error), the entropy 1.25",
        ),
        (
            nll_off_entropy,
            {
                "sampled_nll": [9.0],
                "entropy": 2.0,
                "sampled_nll_error": 0.1,
                "tokens": 32,
                "importance_mean": 1.0,
            },
            None,
        ),
        # prompts: the larger of two middle numbers counts
        (foreign_prompts, {"prompt_nll_ratio": [0.1, 1.19], "kl_to_reference": 0.5}, None),
        (
            foreign_prompts,
            {"prompt_nll_ratio": [0.1, 1.2], "kl_to_reference": 0.5},
            "prompt_nll_ratio is 1.2 in the median iteration",
        ),
        (foreign_prompts, {"prompt_nll_ratio": [1.5]}, None),
        (
            foreign_prompts,
            {"prompt_nll_ratio": [1.5], "kl_to_reference": 0.5, "reference_moved": 1.0},
            None,
        ),
        # gradients
        (no_policy_gradient, {"grad_norm": [0.0]}, None),
        (
            no_policy_gradient,
            {"grad_norm": [0.0, 1e-6]},
            "grad_norm is at most 1e-06 in all 2 iterations",
        ),
        (no_policy_gradient, {"grad_norm": [0.0, 2e-6]}, None),
        (no_policy_gradient, {"grad_norm": [0.0, 0.0], "reward_std": 0.0}, None),
        (no_policy_gradient, {"grad_norm": [0.0, 0.0], "advantage_std": [0.0, 9e-7]}, None),
        (no_policy_gradient, {"grad_norm": [0.0, 0.0], "advantage_std": [0.0, 1e-6]}, "all 2"),
        (
            ratio_never_moves,
            {"kl_to_old": [0.0, -1e-9], "grad_norm": [0.0, 1e-6]},
            "kl_to_old is 0 in all 2 iterations, and grad_norm is not",
        ),
        (ratio_never_moves, {"kl_to_old": [0.0, -2e-9], "grad_norm": 1.0}, None),
        (ratio_never_moves, {"kl_to_old": [0.0, 0.0], "grad_norm": [0.0, 9e-7]}, None),
        (ratio_never_moves, {"kl_to_old": [0.0], "grad_norm": 1.0}, None),
        # values
        (values_stand_still, {"value_mean": [0.5, 0.5], "return_std": 1.0}, None),
        (
            values_stand_still,
            {"value_mean": [0.5, 0.5, 0.5 + 1e-9], "return_std": 1.0},
            "value_mean is 0.5 in all 3 iterations, and the returns differ from it by 1",
        ),
        (values_stand_still, {"value_mean": [0.5, 0.5, 0.5 + 2e-9], "return_std": 1.0}, None),
        (
            values_stand_still,
            {"value_mean": [0.5] * 3, "return_std": 0.0, "return_mean": [0.5, 0.25, 0.5]},
            "differ from it by 0.25",
        ),
        (values_stand_still, {"value_mean": [0.0] * 3, "return_std": 1e-6}, "by 1e-06"),
        (values_stand_still, {"value_mean": [0.0] * 3, "return_std": 9e-7}, None),
        (values_stand_still, {"value_mean": [0.0] * 3, "return_std": 1.0, "updates": 0}, None),
        (
            values_stand_still,
            {"value_mean": [0.0] * 3, "return_std": 1.0, "updates": [0, 1, 0]},
            "all 3",
        ),
        # ends
        (ends_unseen, {"response_length": [2.5, 3.5], "finished": 0.0, "tokens": 50}, None),
        (
            ends_unseen,
            {"response_length": [2.5, 4.5, 3.5], "finished": [0.0, 0.0, 0.02], "tokens": 50},
            "finished is 0, and response_length from 2.5 to 4.5",
        ),
        (
            ends_unseen,
            {"response_length": [2.5, 4.5, 3.5], "finished": [0.0, 0.0, 0.03], "tokens": 50},
            None,
        ),
        (ends_unseen, {"response_length": [2.5] * 3, "finished": 0.0, "tokens": 50}, None),
        (
            ends_unseen,
            {"response_length": [2.5, 2.5, 4.5], "finished": 0.0, "tokens": [5, 5, 9]},
            "from 2.5 to 4.5",
        ),
        (
            ends_unseen,
            {"response_length": [2.5, 2.5, 4.5], "finished": 0.0, "tokens": [5, 5, 8]},
            None,
        ),
        (never_ends, {"response_length": [8.0, 8.0], "finished": 0.0}, None),
        (
            never_ends,
            {"response_length": [4.5, 8.0, 8.0, 8.0], "finished": [1.0, 0.0, 0.05, 0.0]},
            "at the end response_length is 8 and finished at most 0.05",
        ),
        (never_ends, {"response_length": [8.0] * 3, "finished": [0.0, 0.0, 0.06]}, None),
        (never_ends, {"response_length": [8.0, 8.0, 7.5], "finished": 0.0}, None),
        (  # the last quarter of sixteen are four
            never_ends,
            {"response_length": [7.0] * 12 + [8.0] * 4, "finished": 0.0},
            "response_length is 8",
        ),
        (never_ends, {"response_length": [7.0] * 13 + [8.0] * 3, "finished": 0.0}, None),
        # slopes: between 0.7 and 1.4
        (policy_loss_scale, {"policy_gradient_scale": [0.71]}, None),
        (policy_loss_scale, {"policy_gradient_scale": [1.39]}, None),
        (
            policy_loss_scale,
            {"policy_gradient_scale": [0.7]},
            "policy_gradient_scale is 0.7 in the median iteration",
        ),
        (policy_loss_scale, {"policy_gradient_scale": [1.4]}, "is 1.4"),
        (policy_loss_scale, {"policy_gradient_scale": [0.0, -9e-7]}, None),
        (policy_loss_scale, {"policy_gradient_scale": [-1e-6]}, "is -1e-06"),
        (policy_loss_scale, {"policy_gradient_scale": [2.0], "beta": 0.0}, "is 2"),
        (
            policy_loss_scale,
            {"policy_gradient_scale": [2.0], "beta": 0.1, "kl_to_reference": 0.009},
            "is 2",
        ),
        (
            policy_loss_scale,
            {"policy_gradient_scale": [2.0], "beta": 0.1, "kl_to_reference": 0.01},
            None,
        ),
        (value_loss_off, {"value_gradient_scale": [0.71]}, None),
        (value_loss_off, {"value_gradient_scale": [1.39]}, None),
        (value_loss_off, {"value_gradient_scale": [0.7]}, "value_gradient_scale is 0.7"),
        (value_loss_off, {"value_gradient_scale": [1.4]}, "value_gradient_scale is 1.4"),
        (entropy_bonus_off, {"entropy_gradient_scale": [0.71]}, None),
        (entropy_bonus_off, {"entropy_gradient_scale": [1.39]}, None),
        (entropy_bonus_off, {"entropy_gradient_scale": [0.7]}, "entropy_gradient_scale is 0.7"),
        (entropy_bonus_off, {"entropy_gradient_scale": [1.4]}, "entropy_gradient_scale is 1.4"),
        (stale_gradients, {"stale_gradient": [1e-12, 0.0]}, None),
        (stale_gradients, {"stale_gradient": [0.0, 2e-12]}, "above 1e-12 in 1 of 2"),
        # advantages
        (
            advantages_of_other_rows,
            {"advantage_correlation": [0.9, 1.0, 0.5], "advantage_std": 2e-6},
            "advantage_correlation is 0.9 in the median iteration",
        ),
        (
            advantages_of_other_rows,
            {"advantage_correlation": [0.91, 1.0, 0.5], "advantage_std": 1.0},
            None,
        ),
        (
            advantages_of_other_rows,
            {"advantage_correlation": [0.1], "advantage_std": 1e-6},
            None,
        ),
        (
            returns_are_values,
            {"advantage_std": [0.0, 1e-6], "value_mean": 0.5, "reward_std": [0.0, 1e-6]},
            "advantage_std is 0 in all 2 iterations, though the scores differ",
        ),
        (
            returns_are_values,
            {"advantage_std": [0.0, 2e-6], "value_mean": 0.5, "reward_std": 1.0},
            None,
        ),
        (
            returns_are_values,
            {"advantage_std": [0.0, 0.0], "value_mean": 0.5, "reward_std": [0.0, 9e-7]},
            None,
        ),
        (returns_are_values, {"advantage_std": [0.0], "value_mean": 0.5, "reward_std": 1.0}, None),
        # prompts and rewards
        (
            prompts_lost,
            {"distinct_prompts": [3, 8, 3], "prompts_given": 8},
            "in 2 of 3 iterations less than half of the prompts were answered",
        ),
        (prompts_lost, {"distinct_prompts": [3, 8], "prompts_given": 8}, None),
        (prompts_lost, {"distinct_prompts": [4, 4, 4], "prompts_given": 8}, None),
        (
            prompts_lost,
            {"distinct_prompts": [3, 3], "prompts_given": 8, "groups_dropped": [0, 1]},
            None,
        ),
        (noisy_reward, {"reward_noise": [0.05]}, None),
        (noisy_reward, {"reward_noise": [0.051]}, "reward_noise is above 0.05 in 1 of 1"),
        (reward_of_other_rows, {"reward_shift": [0.05], "reward_noise": 0.0}, None),
        (reward_of_other_rows, {"reward_shift": [0.051], "reward_noise": 0.05}, "reward_shift is"),
        (reward_of_other_rows, {"reward_shift": [0.051], "reward_noise": 0.051}, None),
        # length: two iterations of eight responses, three quarters of all
        (
            length_is_reward,
            {"score_length_correlation": [0.95, 0.95], "tokens": 16, "response_length": 2.0},
            "score_length_correlation is 0.95 in the median iteration",
        ),
        (
            length_is_reward,
            {"score_length_correlation": [-0.95, -0.95]},
            "score_length_correlation is -0.95",
        ),
        (length_is_reward, {"score_length_correlation": [0.94, 0.94]}, None),
        (length_is_reward, {"score_length_correlation": [-0.94, -0.94]}, None),
        (length_is_reward, {"score_length_correlation": [0.99]}, None),
        (
            length_is_reward,
            {"score_length_correlation": [0.99] * 2, "tokens": 15, "response_length": 2.0},
            None,
        ),
        (
            length_is_reward,
            {"score_length_correlation": [0.99, 0.99, 0.99, None], "tokens": 99},
            None,
        ),
        (
            length_is_reward,
            {"score_length_correlation": [0.99, None, 0.99, 0.99], "iteration": [0, 1, 2, 3]},
            "is 0.99",
        ),
        (
            length_is_reward,
            {"score_length_correlation": [0.99, None, 0.99, None], "iteration": [0, 1, 2, 3]},
            None,
        ),
        # steps of 4 tokens
        (large_steps, {"kl_to_old": [1.2, 0.0], "response_length": 4.0}, None),
        (
            large_steps,
            {"kl_to_old": [2.0, 0.0, 3.0, 1.0], "response_length": 4.0},
            "kl_to_old is 3 nats per response in iteration 2, 0.75 per token",
        ),
        (
            large_steps,
            {"kl_to_old": [0.3, 0.0, 0.3], "response_length": 1.0},
            "kl_to_old is 0.3 nats per response in iteration 2, 0.3 per token",
        ),
        (large_steps, {"kl_to_old": [0.29, 0.0, 0.3], "response_length": 1.0}, None),
        (large_steps, {"kl_to_old": [0.6, 0.6], "response_length": 0.5}, "0.6 per token"),
        (large_steps, {"kl_to_old": [4.0], "response_length": 4.0}, None),
        (large_steps, {"kl_to_old": [4.1], "response_length": 4.0}, "is 4.1 nats per response"),
        (large_steps, {"kl_to_old": [9.0], "response_length": 4.0, "kl_to_old_exact": 2.0}, None),
        (
            large_steps,
            {"kl_to_old": [9.0], "response_length": 4.0, "kl_to_old_exact": 2.1},
            "is 9 nats per response in iteration 0, 2.2 per token",
        ),
        (
            no_clip,
            {"clip_fraction": [0.0, 0.0], "kl_to_old": 4.0, "response_length": 4.0},
            "clip_fraction is 0 in all 2 iterations, and yet kl_to_old is 4 nats per response",
        ),
        (no_clip, {"clip_fraction": [0.0, 0.1], "kl_to_old": 4.0, "response_length": 4.0}, None),
        (no_clip, {"clip_fraction": [0.0, 0.0], "kl_to_old": 0.4, "response_length": 4.0}, None),
        (no_clip, {"kl_to_old": [4.0, 4.0], "response_length": 4.0}, None),
        # drift: 3 nats per response and 1.5 per token
        (
            drift,
            {"kl_to_reference": [3.0], "response_length": 2.0},
            "at the end kl_to_reference is 3, 1.5 nats per token",
        ),
        (drift, {"kl_to_reference": [2.9], "response_length": 1.0}, None),
        (drift, {"kl_to_reference": [2.9], "response_length": 2.0}, None),
        (drift, {"kl_to_reference": [4.4], "response_length": 3.0}, None),
        (drift, {"kl_to_reference": [4.5], "response_length": 3.0}, "is 4.5, 1.5 nats"),
        (drift, {"kl_to_reference": [3.0], "response_length": 0.5}, "is 3, 3 nats per token"),
        (drift, {"kl_to_reference": [9.0] * 3 + [0.0] * 3, "response_length": 1.0}, None),
        (reward_scale, {"return_std": [3.9]}, None),
        (reward_scale, {"return_std": [4.0]}, "return_std is 4 in the median iteration"),
        # what is left at the end: a quarter of the entropy, a third of the length
        (entropy_collapse, {"entropy": [8.0, 1.0, 1.0, 1.0]}, "entropy fell from 8 to 1"),
        (entropy_collapse, {"entropy": [8.0, 1.0, 1.0]}, None),
        (entropy_collapse, {"entropy": [8.0, 2.0, 2.0, 2.0]}, None),
        (entropy_collapse, {"entropy": [8.0, 2.0, 2.0, 1.9]}, "entropy fell from 8 to 2"),
        (length_collapse, {"response_length": [9.0, 9.0, 9.0, 2.0, 2.0, 2.0]}, "from 9 to 2"),
        (length_collapse, {"response_length": [12.0, 9.0, 6.0, 3.0, 3.0, 3.0]}, None),
        (length_collapse, {"response_length": [9.0, 9.0, 2.0, 2.0, 2.0]}, None),
        (variety_collapse, {"distinct_2": [0.75, 0.75, 0.75, 0.2, 0.2, 0.2]}, "from 0.75 to 0.2"),
        (variety_collapse, {"distinct_2": [0.75, 0.75, 0.75, 0.25, 0.25, 0.25]}, None),
        (variety_collapse, {"distinct_2": [0.75, 0.75, 0.2, 0.2, 0.2]}, None),
    ],
)
def test_each_limit_from_both_sides(rule, columns, seen):
    found = evidence(rule, **columns)
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "rule, settings, columns, is_found",
    [
        (ratio_never_moves, {"epochs": 1, "minibatches": 1}, {"grad_norm": 1.0}, False),
        (ratio_never_moves, {"epochs": 1, "minibatches": 2}, {"grad_norm": 1.0}, True),
        (ratio_never_moves, {"epochs": 2, "minibatches": 1}, {"grad_norm": 1.0}, True),
        (ratio_never_moves, {"epochs": 1}, {"grad_norm": 1.0}, True),
        (ratio_never_moves, {"lr": 0.0}, {"grad_norm": 1.0}, False),
        (ratio_never_moves, {"lr": 1.0}, {"grad_norm": 1.0}, True),
        (values_stand_still, {"vf_coef": 0.0}, {"return_std": 1.0}, False),
        (values_stand_still, {"vf_coef": 0.5}, {"return_std": 1.0}, True),
        (values_stand_still, {"lr": 0.0}, {"return_std": 1.0}, False),
        (values_stand_still, {"lr": 9e-8}, {"return_std": 1.0}, False),
        (values_stand_still, {"lr": 1e-7}, {"return_std": 1.0}, True),
        (values_stand_still, {"lr": 9e-8, "value_lr": 1e-3}, {"return_std": 1.0}, True),
        (values_stand_still, {"lr": 1e-3, "value_lr": 9e-8}, {"return_std": 1.0}, False),
        (no_clip, {"epochs": 1, "minibatches": 1}, {"kl_to_old": 9.0}, False),
        (no_clip, {"epochs": 1, "minibatches": 2}, {"kl_to_old": 9.0}, True),
        (no_clip, {"epochs": 1}, {"kl_to_old": 9.0}, True),
        (no_clip, {"minibatches": 1}, {"kl_to_old": 9.0}, True),
        (ratio_never_moves, {"minibatches": 1}, {"grad_norm": 1.0}, True),
        (policy_loss_scale, {"kl_placement": "reward"}, {"kl_to_reference": 9.0}, True),
        (policy_loss_scale, {"kl_placement": "loss"}, {"kl_to_reference": 9.0}, False),
        (never_ends, {"max_new_tokens": 1}, {"response_length": 1.0}, False),
        (never_ends, {}, {"response_length": 1.0}, False),
        (never_ends, {"max_new_tokens": 2}, {"response_length": 1.0}, True),
        (never_ends, {"max_new_tokens": 2}, {"response_length": 2.0}, True),
        (never_ends, {"max_new_tokens": 1}, {"response_length": 2.0}, True),
    ],
)
def test_settings_under_which_a_rule_is_not_looked_for(rule, settings, columns, is_found):
    usual = {
        "kl_to_old": [0.0] * 3,
        "clip_fraction": 0.0,
        "value_mean": 0.0,
        "response_length": 4.0,
        "finished": 0.0,
        "policy_gradient_scale": 2.0,
        "beta": 0.1,
        "iteration": [0, 1, 2],
    }
    assert (evidence(rule, settings, **usual | columns) is not None) == is_found


BEHIND = {
    "sampler_kl": [0.0125] * 5 + [0.125] * 3,
    "response_length": 8.0,
    "kl_to_reference": 2.5,
    "importance_mean": 1.0,
}


@pytest.mark.parametrize(
    "changes, is_found",
    [
        ({}, True),  # ten times 0.0125; 8 · 0.125 nats are 0.4 of 2.5
        ({"sampler_kl": [0.0126] + [0.0125] * 4 + [0.125] * 3}, False),
        ({"kl_to_reference": 2.51}, False),
        ({"sampler_kl": [0.0125] * 4 + [0.125] * 3}, False),  # seven iterations
        ({"sampler_kl": [0.0] * 5 + [0.01] * 3, "kl_to_reference": 0.19}, True),
        ({"sampler_kl": [0.0] * 5 + [0.0099] * 3, "kl_to_reference": 0.1}, False),
        ({"reference_moved": [0.0] * 7 + [1.0]}, False),
        ({"reference_moved": 0.0}, True),
        ({"importance_mean": None}, False),
    ],
)
def test_a_sampler_that_is_left_behind(changes, is_found):
    found = evidence(sampler_left_behind, **BEHIND | changes)
    assert (found is not None) == is_found
    if not changes:
        assert found == (
            "sampler_kl, 0.01 at first, is 0.12 at the end: 1 nats per response, and the reference "
            "is 2.5 away"
        )


PADDED = {"response_length": [8.0, 9.0] * 2, "finished": 0.5, "tokens": [800, 900] * 2}
ENDED = {"tokens": ["a", "b"]}
LONGER = {"tokens": ["a", "b", "c"]}


@pytest.mark.parametrize(
    "changes, tokens, is_found",
    [
        ({}, {}, True),  # of 100 responses each: by chance once in 100⁴ times
        ({"response_length": [8.0] * 4}, {}, False),
        ({"finished": [0.5, 0.5, 0.5, 0.51]}, {}, False),
        ({"response_length": [8.0, 9.0, 8.0, 8.5]}, {}, False),
        ({"response_length": [8.0, 9.0, 8.0, 9.00001]}, {}, False),
        ({"response_length": [8.0, 9.0, 8.0, 9.0000001]}, {}, True),
        ({"response_length": [8.0, 9.0, None, None]}, {}, False),  # once in 100² times
        ({"tokens": [248, 279] * 2}, {}, False),  # 31⁴ is below a million
        ({"tokens": [256, 288] * 2}, {}, True),  # 32⁴ is above
        ({"tokens": [0, 0, 0, 0]}, {}, False),  # the number of responses is not known
        ({}, {0: [ENDED, ENDED], 1: [LONGER, LONGER]}, True),
        ({}, {0: [ENDED, ENDED], 1: [LONGER, ENDED]}, False),
    ],
)
def test_padding_that_counts(changes, tokens, is_found):
    found = evidence(
        padding_counted, None, tokens, **PADDED | {"iteration": [0, 1, 2, 3]} | changes
    )
    assert (found is not None) == is_found
    if not changes and not tokens:
        assert found == (
            "response_length is a whole number in all 4 iterations, and finished is 0.5 on average"
        )


K3 = {"kl_to_reference": [0.25] * 4, "kl_estimate": 0.5, "tokens": 128, "response_length": 8.0}


@pytest.mark.parametrize(
    "changes, is_found",
    [
        ({}, True),  # a nat over the run, 16 over all responses, twice the exact one
        ({"kl_to_reference": [0.249] * 4}, False),
        ({"tokens": 127}, False),
        ({"kl_estimate": 0.49}, False),
        ({"kl_estimate": [2.0, 2.0, 0.25, 0.25]}, False),  # in half of the iterations
        ({"kl_estimate": [2.0, 2.0, 0.375, 0.38]}, True),
        ({"kl_estimate": [2.0, 2.0, 0.375, 0.375]}, False),
        (
            {
                "kl_to_reference": [0.5, 0.5, 0.01, 0.01],
                "kl_estimate": [2.0, 0.5, 0.01, 0.01],
            },
            False,
        ),
        (  # iterations of 0.01 nats say nothing
            {
                "kl_to_reference": [1.0, 0.01, 0.01, 0.01],
                "kl_estimate": [4.0, 0.0, 0.0, 0.0],
            },
            True,
        ),
        ({"kl_estimate": [None, 9.0, 9.0, 9.0]}, False),  # three quarters of a nat
    ],
)
def test_an_estimate_that_is_not_the_kl(changes, is_found):
    found = evidence(kl_estimate_off, **K3 | changes)
    assert (found is not None) == is_found
    if not changes:
        assert found == (
            "kl_estimate adds up to 2 over the run, kl_to_reference to 1, and it is more than 1.5 "
            "times as large in 4 of 4 iterations"
        )


PAID = {  # β is 0.5, and k1 −0.25 of a KL of 0.25
    "reward_mean": 1.0,
    "total_reward_mean": [1.125] * 4,
    "beta": 0.5,
    "kl_to_reference": 0.25,
    "tokens": 128,
    "response_length": 8.0,
}


@pytest.mark.parametrize(
    "changes, is_found",
    [
        ({}, True),
        ({"total_reward_mean": [1.0625] * 4}, False),  # half of the KL
        ({"total_reward_mean": [1.0625] * 3 + [1.0626]}, True),
        ({"kl_to_reference": 0.2499}, False),  # less than a nat
        ({"tokens": 127}, False),  # less than 16 nats over all responses
        ({"total_reward_mean": [1.25, 1.25, 1.0, 1.0]}, False),  # in half of the iterations
        ({"total_reward_mean": [1.25, 1.25, 1.01, 1.0]}, True),
        ({"beta": 0.0}, False),
        ({"total_reward_mean": [0.9375] * 4}, False),  # charged
        # the difference of two means of scores of 10⁶, of which 0.1·β·KL is known
        ({"reward_mean": 1e6, "total_reward_mean": [1e6 + 0.0625] * 4}, False),
        ({"total_reward_mean": [None] + [1.125] * 3}, False),  # three quarters of a nat
    ],
)
def test_a_kl_of_the_wrong_sign(changes, is_found):
    columns = PAID | {"iteration": [0, 1, 2, 3]} | changes
    found = evidence(kl_sign, **columns)
    assert (found is not None) == is_found
    assert evidence(negative_kl, **columns) is None
    mismatch = columns | FLOAT32_ROUNDING | {"max_sampler_deviation": 1.0}
    assert evidence(kl_sign, **mismatch) is None
    assert evidence(negative_kl, **mismatch) == found
    if not changes:
        assert found == "(reward_mean − total_reward_mean)/β adds up to -1, the exact KL to 1"


@pytest.mark.parametrize(
    "changes, charged",
    [
        ({}, [0.25, 0.5]),
        ({"beta": [0.5, 0.0]}, [0.25]),
        ({"kl_to_reference": [9.9e-5, 0.25]}, []),  # charged where the exact KL is 0
        (
            {
                "kl_to_reference": [1e-4, 0.25],
                "reward_mean": 0.0,
                "total_reward_mean": [-0.1, -0.2],
            },
            [0.2, 0.4],
        ),
        # up to 2 % of β and 0.2 % of the score are rounding, of a KL of 0
        (
            {
                "kl_to_reference": [0.0, 0.25],
                "reward_mean": 0.0,
                "total_reward_mean": [-0.01, -0.125],
            },
            [0.02, 0.25],
        ),
        (
            {
                "kl_to_reference": [0.0, 0.25],
                "reward_mean": 0.0,
                "total_reward_mean": [-0.0101, -0.125],
            },
            [],
        ),
        ({"reward_mean": 1.0, "total_reward_mean": [0.9999, 1.0001]}, []),  # nothing is charged
    ],
)
def test_k1_as_it_was_charged(changes, charged):
    "β is 0.5, and 0.125 and 0.25 are missing from the total reward."
    columns = {
        "reward_mean": 1.0,
        "total_reward_mean": [0.875, 0.75],
        "beta": 0.5,
        "kl_to_reference": 0.25,
    }
    assert charged_k1(Run(rows_of(**columns | changes))) == pytest.approx(charged)


def test_a_charge_has_the_number_of_responses_that_it_is_a_mean_of():
    "12 tokens in responses of 4; 2 tokens in a response of 4; no tokens; no length."
    rows = rows_of(
        reward_mean=1.0,
        total_reward_mean=[0.875] * 4,
        beta=0.5,
        kl_to_reference=0.25,
        tokens=[12, 2, 0, 12],
        response_length=[4.0, 4.0, 4.0, 0.0],
    )
    assert [charge.responses for charge in charges(Run(rows))] == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "columns, settings, seen",
    [
        ({"flat_groups": [0.79]}, {}, None),
        ({"flat_groups": [0.8]}, {}, "flat_groups is 0.8 in the median iteration"),
        ({"flat_groups": [0.8]}, {"group_size": 1}, None),
        ({"flat_groups": [0.8]}, {"group_size": 2}, "flat_groups"),
        ({"reward_std": [1e-6]}, {}, "reward_std is 1e-06 in the median iteration"),
        ({"reward_std": [2e-6]}, {}, None),
        ({"reward_std": [0.0], "tokens": 11, "response_length": 8.0}, {}, None),
        ({"reward_std": [0.0], "tokens": 12, "response_length": 8.0}, {}, "reward_std is 0"),
        (
            {"reward_std": [0.0] * 4, "reward_mean": [9.0, 1.0, 2.0, 3.0]},
            {},
            "reward_std is 0 in the median iteration, and at the end reward_mean is 2",
        ),
    ],
)
def test_equal_rewards_in_a_group_or_in_the_batch(columns, settings, seen):
    verdict = evidence(equal_rewards, settings, **columns)
    assert (verdict and verdict.evidence) == seen or seen in verdict.evidence


@pytest.mark.parametrize(
    "low, high, end, says",
    [
        (2.0, 12.0, 11.1, "They are all right"),
        (2.0, 12.0, 10.9, "Some prompts are always right"),
        (2.0, 12.0, 3.1, "Some prompts are always right"),
        (2.0, 12.0, 2.9, "They are all wrong"),
        (-1.0, 3.0, 2.61, "They are all right"),
        (8.0, 8.0 + 32 * 2.0**-23, 8.0, "No response has earned more"),  # 4·2⁻²³ of 8
        (8.0, 8.0 + 33 * 2.0**-23, 8.0, "They are all wrong"),
        (-8.0 - 31 * 2.0**-23, -8.0, -8.0, "No response has earned more"),
    ],
)
def test_where_the_scores_lie_says_whether_they_are_right(low, high, end, says):
    verdict = evidence(
        equal_rewards,
        reward_std=[0.0] * 4,
        reward_min=[low, high, high, high],
        reward_max=[low, high, low, low],
        reward_mean=[50.0, end, end, end],
    )
    assert says in verdict.what
    if says == "They are all right" and low == 2.0:
        assert verdict.evidence == (
            "reward_std is 0 in the median iteration, and at the end reward_mean is 11.1, of 2 to 12"
        )


@pytest.mark.parametrize(
    "spread, beta, is_found",
    [
        (0.029, 0.5, True),
        (0.03, 0.5, False),
        (0.015, 0.03125, True),
        (0.015625, 0.03125, False),  # half of β
        (1e-6, 0.5, False),
        (2e-6, 0.5, True),
    ],
)
def test_scores_that_differ_less_than_the_kl_costs(spread, beta, is_found):
    columns = {
        "reward_std": [9.0, spread, 0.0],
        "beta": [beta, 9.0, 0.0],
        "reward_mean": 1.0,
        "total_reward_mean": [0.875, 0.75, 0.75],
        "kl_to_reference": 0.25,
    }
    found = evidence(small_rewards, **columns)
    assert (found is not None) == is_found
    if spread == 0.029:
        assert found == "reward_std is 0.029 in the median iteration, and a nat costs 0.5"
    assert evidence(small_rewards, {"kl_placement": "loss"}, **columns) is None


ALL_SETTINGS = asdict(RLHFConfig(vf_coef=0.5, ent_coef=0.25))
ONE_SLOPE = {"policy_gradient_scale": [1.0, 1.0], "entropy_gradient_scale": [2.0, 1.0]}


@pytest.mark.parametrize(
    "settings, changes, value_seen, entropy_seen",
    [
        ({}, {"entropy_gradient_scale": None}, None, None),
        ({"vf_coef": 0.0}, {}, None, "entropy_gradient_scale is 2"),
        ({}, {"return_std": [0.001, 0.001]}, None, "entropy_gradient_scale is 2"),
        ({}, {"policy_gradient_scale": [1.0, None]}, None, "entropy_gradient_scale is 2"),
        (
            {},
            {},
            "the loss has no gradient for the value in any iteration, and vf_coef is 0.5",
            "entropy_gradient_scale is 2",
        ),
    ],
)
def test_a_part_of_the_loss_without_a_gradient(settings, changes, value_seen, entropy_seen):
    columns = ONE_SLOPE | {"return_std": [0.0, 0.002], "iteration": [0, 1]} | changes
    run = Run(rows_of(**columns), ALL_SETTINGS | settings)
    assert value_loss_off(run) == value_seen
    assert (entropy_bonus_off(run) or "").startswith(entropy_seen or "")
    assert (entropy_bonus_off(run) is None) == (entropy_seen is None)


@pytest.mark.parametrize(
    "settings, seen",
    [
        ({}, "the loss has no gradient for the entropy in any iteration, and ent_coef is 0.25"),
        ({"ent_coef": 0.0}, None),
        ({"entropy_target": 1.0}, None),
    ],
)
def test_an_entropy_bonus_that_is_never_measured(settings, seen):
    rows = [{"policy_gradient_scale": 1.0, "entropy_gradient_scale": None}] * 2
    assert entropy_bonus_off(Run(rows, ALL_SETTINGS | settings)) == seen


@pytest.mark.parametrize(
    "tokens, is_found",
    [
        ([120] * 6, True),  # 18 pairs are left of 67.5
        ([120] * 3 + [148] * 3, True),
        ([120] * 3 + [150] * 3, False),  # 22.5 of 67.5: a third
        ([120] * 3 + [None] * 3, True),  # the number is not known
    ],
)
def test_longer_responses_of_a_small_vocabulary_have_as_many_pairs(tokens, is_found):
    columns = {"distinct_2": [0.75] * 3 + [0.2] * 3, "response_length": 4.0}
    assert (evidence(variety_collapse, tokens=tokens, **columns) is not None) == is_found


@pytest.mark.parametrize(
    "settings, not_asked",
    [
        ({}, []),
        (
            {"beta": 0.0},
            [
                "start KL",
                "foreign prompts",
                "KL estimate off",
                "negative KL",
                "KL sign",
                "small rewards",
                "drift",
            ],
        ),
        ({"beta": 0.0, "kl_target": 1.0}, []),
        (
            {"advantage": "group_mean"},
            ["values stand still", "value loss off", "returns are values", "reward scale"],
        ),
        ({"ent_coef": 0.0}, ["entropy bonus off"]),
        ({"ent_coef": 0.0, "entropy_target": 1.0}, []),
        ({"importance_cap": None}, ["sampler left behind"]),
        ({"recheck_every": None}, ["noisy reward", "reward of other rows"]),
    ],
)
def test_rules_that_cannot_be_wrong_by_the_settings(settings, not_asked):
    run = Run([{"entropy": 1.0}], settings)
    assert [rule.name for rule in METRIC_RULES if not rule.applies(run)] == not_asked


def test_every_rule_on_metrics_says_which_it_needs():
    assert [rule.name for rule in METRIC_RULES if not rule.metrics] == []


# ---------------------------------------------------------------- healthy runs
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


def test_the_largest_number_that_is_read():
    assert Run([{"entropy": 1e100}])["entropy"] == [1e100]
    with pytest.raises(ValueError, match="not finite"):
        Run([{"entropy": 1.01e100}])


def test_settings_are_read_without_the_warnings_that_they_gave(recwarn):
    settings = asdict(RLHFConfig()) | {"kl_placement": "reward", "kl_estimator": "k2"}
    assert Run([{"entropy": 1.0}], settings).config is not None
    assert not recwarn.list
