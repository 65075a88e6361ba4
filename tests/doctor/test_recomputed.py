"""Each rule on recorded tokens: nothing on a run as the settings ask for it, the finding where one
column is changed.
"""

import math

import pytest
from small_runs import each, rows_of, run, settings_of

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.recomputed import (
    RECOMPUTED_RULES,
    advantages_off,
    cached_scores,
    chosen_falls,
    few_pairs,
    kl_penalty_off,
    learnt_rows_held_out,
    optimizer_steps,
    other_discount,
    other_rows_learnt,
    other_schedule,
    other_step_size,
    other_text_scored,
    parts_stand_still,
    prompts_cut,
    prompts_that_end,
    reference_moves,
    same_prompts,
    same_random_numbers,
    score_off,
    token_gradient_off,
    value_gradient_off,
)
from instruct_goose.doctor.rules import Run
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS
from instruct_goose.objective.policy_loss import LEVELS, SURROGATES


# ---------------------------------------------------------------- each limit, from both sides
@pytest.mark.parametrize(
    "rule, columns, seen",
    [
        (other_rows_learnt, {"coverage_error": [0.0, 0.001]}, None),
        (other_rows_learnt, {"coverage_error": [0.0, 0.002]}, "above 0.001 in 1 of 2 iterations"),
        (optimizer_steps, {"optimizer_step_count": [4, 8, 12], "updates": [9, 4, 4]}, None),
        (
            optimizer_steps,
            {"optimizer_step_count": [4, 8, 10, 10], "updates": 4},
            "iteration 2 has 4 updates, the optimizer 2 steps",
        ),
        (
            optimizer_steps,
            {"iteration": [0, 2, 3], "optimizer_step_count": [4, 12, 16], "updates": 4},
            None,
        ),
        # a median of three times the learning rate of 0.001, or of a 500th
        (
            other_step_size,
            {"weight_change_rms": [0.012], "updates": 4, "optimizer_step_count": 4},
            "weight_change_rms is 0.003 per update (median), its learning rate 0.001",
        ),
        (
            other_step_size,
            {"weight_change_rms": [0.0119], "updates": 4, "optimizer_step_count": 4},
            None,
        ),
        (
            other_step_size,
            {"weight_change_rms": [8e-6], "updates": 4, "optimizer_step_count": 4},
            "weight_change_rms is 2e-06 per update",
        ),
        (
            other_step_size,
            {"weight_change_rms": [8.1e-6], "updates": 4, "optimizer_step_count": 4},
            None,
        ),
        (
            other_step_size,
            {"weight_change_rms": [0.0], "updates": 4, "optimizer_step_count": 4},
            None,
        ),
        (
            other_step_size,
            {"weight_change_rms": [0.1, 0.004], "updates": [0, 4], "optimizer_step_count": 4},
            None,
        ),
        (other_step_size, {"weight_change_rms": [9.0], "updates": 4}, None),
        (
            other_step_size,
            {"value_weight_change_rms": [0.012], "updates": 4, "optimizer_step_count": 4},
            "value_weight_change_rms is 0.003 per update",
        ),
        # parts stand still: not where rounding can hold them
        (
            parts_stand_still,
            {
                "tensors_unmoved": [0.0, 0.25],
                "lr": 1e-6,
                "rounding": 1e-6,
                "optimizer_step_count": 1,
            },
            "25% of the policy's tensors have a gradient and stay (median)",
        ),
        (
            parts_stand_still,
            {"tensors_unmoved": [0.25], "lr": 1e-6, "rounding": 2e-6, "optimizer_step_count": 1},
            None,
        ),
        (
            parts_stand_still,
            {"tensors_unmoved": [0.25], "lr": 9e-7, "rounding": 1e-6, "optimizer_step_count": 1},
            None,
        ),
        (
            parts_stand_still,
            {"tensors_unmoved": [0.25], "lr": 1e-3, "optimizer_step_count": 1},
            None,
        ),
        (
            parts_stand_still,
            {
                "tensors_unmoved": [0.25, 0.0, 0.0],
                "lr": 1.0,
                "rounding": 0,
                "optimizer_step_count": 1,
            },
            None,
        ),
        (parts_stand_still, {"tensors_unmoved": [0.25], "rounding": 0, "lr": 1.0}, None),
        (
            parts_stand_still,
            {"tensors_unmoved": [0.25], "rounding": 0, "optimizer_step_count": 1},
            None,
        ),
        # the reference: in single precision its mean weight stays to 10⁻⁷
        (
            reference_moves,
            {"reference_weight_mean_abs": [1.0, 1.0, 1.0000002, 2.0]},
            "the weights of the reference changed before iteration 2",
        ),
        (reference_moves, {"reference_weight_mean_abs": [1.0, 1.00000005]}, None),
        (
            reference_moves,
            {"reference_weight_mean_abs": [1.0, 2.0], "reference_moved": [0.0, 1.0]},
            None,
        ),
        (
            reference_moves,
            {"reference_weight_mean_abs": [1.0, 0.5], "reference_moved": [0.0, 0.0]},
            "before iteration 1",
        ),
        # prompts
        (prompts_cut, {"prompts_kept": [1.0, 1.0]}, None),
        (
            prompts_cut,
            {"prompts_kept": [1.0, 0.5, 0.75]},
            "at worst 50% of an iteration's prompts are whole",
        ),
        (prompts_cut, {"prompts_kept": [0.5], "groups_dropped": 1}, "at worst 50%"),
        (prompts_cut, {"entropy": [0.5]}, None),
        (prompts_that_end, {"prompts_ended": [0.01]}, None),
        (prompts_that_end, {"prompts_ended": [0.02]}, "prompts_ended is above 0.01 in 1 of 1"),
        # chosen texts: from the first three steps to the last quarter, a nat and 5 %
        (chosen_falls, {"chosen_logprob": [-10.0] * 5 + [-12.0] * 2}, None),
        (
            chosen_falls,
            {"chosen_logprob": [-9.0, -10.0, -11.0, 0.0, 0.0, -10.0, -11.0, -12.0]},
            "chosen_logprob fell from -10 to -11 nats per text",
        ),
        (chosen_falls, {"chosen_logprob": [-10.0] * 5 + [-10.9] * 3}, None),
        (chosen_falls, {"chosen_logprob": [-40.0] * 5 + [-41.9] * 3}, None),
        (chosen_falls, {"chosen_logprob": [-40.0] * 5 + [-42.0] * 3}, "from -40 to -42"),
    ],
)
def test_each_limit_from_both_sides(rule, columns, seen):
    found = rule(Run(rows_of(**columns), settings_of()))
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "rule, settings, columns, is_found",
    [
        (other_rows_learnt, {"max_kl_to_old": 1.0}, {}, False),
        (other_rows_learnt, {"mask_truncated": True}, {}, False),
        (
            other_rows_learnt,
            {"drop_flat_groups": True, "group_size": 2, "advantage": "group_mean"},
            {},
            False,
        ),
        (other_rows_learnt, {}, {}, True),
        (other_step_size, {"lr_schedule": "linear", "steps": 100}, {}, False),
        (other_step_size, {"value_lr": 1e-2}, {"weight_change_rms": 0.001}, False),
        (other_step_size, {"value_lr": 2e-3}, {"weight_change_rms": 0.001}, True),
    ],
)
def test_settings_under_which_a_rule_is_not_looked_for(rule, settings, columns, is_found):
    "The values' weights move by 0.009, three times 0.003 and nine times 0.001."
    usual = {
        "coverage_error": [0.5],
        "weight_change_rms": 0.5,
        "value_weight_change_rms": 0.009,
        "updates": 1,
        "optimizer_step_count": 1,
    }
    run_ = Run(rows_of(**usual | columns), settings_of(**settings))
    assert (rule(run_) is not None) == is_found


@pytest.mark.parametrize(
    "lr, settings, seen",
    [
        ([1e-3] * 4, {}, None),
        ([1e-3, 1e-3, 1e-3, 1.0011e-3], {}, None),  # one of four
        (
            [1e-3, 1.0011e-3, 1e-3, 1.0011e-3],
            {},
            "lr is 0.001 in iteration 1, 0.001 by the constant schedule",
        ),
        ([1e-3, 1.0009e-3, 1e-3, 1.0009e-3], {}, None),  # less than 0.1 %
        ([1000.0, 1001.0, 1000.0, 1001.0], {}, None),  # 0.1 %
        ([1e-3] * 6 + [9e-4] * 2, {}, None),  # a quarter
        ([1e-3, 7.5e-4, 5e-4, 2.5e-4], {"lr_schedule": "linear", "steps": 4}, None),
        (
            # the end of a schedule of two steps, then two of one of four
            [1e-3, 5e-4, 5e-4, 5e-4],
            {"lr_schedule": "linear", "steps": 4},
            "lr is 0.0005 in iteration 3, 0.00025 by the linear schedule",
        ),
        # two steps to the end, then one of a schedule of three; warmed up for one and two steps
        ([1e-3, 5e-4, 1e-3 / 3], {"lr_schedule": "linear", "steps": 3}, None),
        (
            [1e-3, 1e-3, 5e-4, 1e-3 / 3],
            {"lr_schedule": "linear", "steps": 4, "warmup_steps": 1},
            None,
        ),
        ([5e-4, 1e-3, 1e-3], {"warmup_steps": 2}, None),
        (
            [1e-3, 1e-3, 1e-3],
            {"warmup_steps": 2},
            "lr is 0.001 in iteration 1, 0.002 by the constant schedule",
        ),
        # four steps to the end, then four more of a schedule of eight
        (
            [1e-3, 7.5e-4, 5e-4, 2.5e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4],
            {"lr_schedule": "linear", "steps": 8},
            None,
        ),
        (
            [1e-3, 7.5e-4, 5e-4, 2.5e-4, 5e-4, 3.75e-4, 1.25e-4, 1e-4],
            {"lr_schedule": "linear", "steps": 8},
            "lr is 0.000125 in iteration 6, 0.00025 by the linear schedule",
        ),
    ],
)
def test_the_schedule_of_the_learning_rate(lr, settings, seen):
    assert other_schedule(Run(rows_of(lr=lr), settings_of(**settings))) == seen


def test_a_learning_rate_after_the_end_of_its_schedule():
    "By the settings a linear rate is 0 from iteration 4 on; its first value is not known."
    rows = rows_of(iteration=[4, 5], lr=1e-3)
    found = other_schedule(Run(rows, settings_of(lr_schedule="linear", steps=4)))
    assert found == "lr is 0.001 in iteration 4, 0 by the linear schedule"


@pytest.mark.parametrize(
    "settings, columns, seen",
    [
        ({"gamma": 0.95, "lam": 0.9}, {"return_gamma": [0.941], "return_lam": 0.909}, None),
        (
            {"gamma": 0.95, "lam": 0.9},
            {"return_gamma": [0.93, 0.95, 0.93], "return_lam": 0.9},
            "γ is 0.93 in the returns and 0.95 in the settings",
        ),
        (
            {"gamma": 1.0, "lam": 0.9},
            {"return_gamma": [1.0], "return_lam": 0.92},
            "λ is 0.92 in the returns and 0.9 in the settings",
        ),
        ({"gamma": 0.0, "lam": 0.9}, {"return_gamma": [0.0], "return_lam": 0.2}, None),
        (
            {"gamma": 1.0},
            {"return_gamma": [0.5], "return_lam": 0.2},
            "γ is 0.5 in the returns and 1 in the settings",
        ),
        ({"gamma": 0.0}, {"return_gamma": [0.01]}, None),
        (
            {"gamma": 0.0},
            {"return_gamma": [0.011]},
            "γ is 0.011 in the returns and 0 in the settings",
        ),
        ({"lam": 0.9}, {"return_gamma": [0.5], "return_lam": 0.9}, None),
    ],
)
def test_the_discount_of_the_returns(settings, columns, seen):
    assert other_discount(Run(rows_of(**columns), settings)) == seen


@pytest.mark.parametrize(
    "summary, rule, seen",
    [
        (
            {"pair_accuracy": 0.95, "held_out_rows": 99},
            few_pairs,
            "pair_accuracy is 0.95, of 99 pairs",
        ),
        ({"pair_accuracy": 0.95, "held_out_rows": 100}, few_pairs, None),
        ({"pair_accuracy": 0.94, "held_out_rows": 9}, few_pairs, None),
        ({"pair_accuracy": 1.0}, few_pairs, None),
        ({"held_out_rows": 9}, few_pairs, None),
        (
            {"held_out_seen": 3, "held_out_rows": 40},
            learnt_rows_held_out,
            "3 of 40 held-out rows are training rows",
        ),
        ({"held_out_seen": 3}, learnt_rows_held_out, "3 of 0 held-out rows are training rows"),
        ({"held_out_seen": 0, "held_out_rows": 40}, learnt_rows_held_out, None),
        ({"held_out_rows": 40}, learnt_rows_held_out, None),
    ],
)
def test_the_summary_of_a_supervised_stage(summary, rule, seen):
    assert rule(Run([{"grad_norm": 1.0}], summary)) == seen


def recorded(*responses, **metrics):
    "A run of one iteration per list of responses."
    tokens = {i: list(rows) for i, rows in enumerate(responses)}
    rows = [{"iteration": i, "beta": 0.5} | metrics for i in tokens]
    return rows, tokens


PAID = {
    "prompt": "p",
    "tokens": ["a", "b", "c"],
    "rewards": [-0.1, -0.2, 1.7],
    "log_ratio_to_reference": [0.2, 0.4, 0.6],
    "score": 2.0,
    "has_token_scores": False,
}


@pytest.mark.parametrize(
    "estimator, penalties",
    [
        (None, [0.1, 0.2]),
        ("k1", [0.1, 0.2]),
        ("k2", [0.01, 0.04]),  # β·ℓ²/2
        ("k3", [0.5 * (math.exp(-0.2) - 1 + 0.2), 0.5 * (math.exp(-0.4) - 1 + 0.4)]),
    ],
)
def test_the_kl_of_each_token_is_charged_as_its_estimator_says(estimator, penalties):
    "Two responses have four tokens before the last; of each one is 1 % off, or 0.5 %."
    settings = settings_of(kl_placement="reward", kl_estimator=estimator)
    for factor, is_found in [(1.0, False), (1.005, False), (1.01, True)]:
        rewards = [-factor * penalties[0], -penalties[1], 0.0]
        metrics, tokens = recorded([PAID | {"rewards": rewards}] * 2)
        found = kl_penalty_off(Run(metrics, settings, tokens))
        assert (found is not None) == is_found and (
            found is None
            or found.startswith("rewards before the last token: 2 of 4 recorded numbers differ")
        )


@pytest.mark.parametrize(
    "log_ratio, penalty",
    [
        # β·k3 = ½(e^−ℓ − 1 + ℓ), of −ℓ and of −10 where they are beyond 10
        (-9.0, 0.5 * (math.exp(9.0) - 1 - 9.0)),
        (-12.0, 0.5 * (math.exp(10.0) - 1 - 10.0)),
        (12.0, 0.5 * (math.exp(-12.0) - 1 + 12.0)),
    ],
)
def test_k3_is_clamped_where_the_policy_lost_a_token(log_ratio, penalty):
    settings = settings_of(kl_placement="reward", kl_estimator="k3")
    record = PAID | {"log_ratio_to_reference": [log_ratio, 0.0, 0.0]}
    for factor, is_found in [(1.0, False), (1.01, True)]:
        metrics, tokens = recorded([record | {"rewards": [-factor * penalty, 0.0, 2.0]}] * 2)
        found = kl_penalty_off(Run(metrics, settings, tokens))
        assert (found is not None) == is_found


@pytest.mark.parametrize(
    "error, is_found",
    [
        # 0.3 % of the recorded number and of the expected −0.1, and 10⁻⁵
        (6.0e-4, False),
        (6.2e-4, True),
        (-6.0e-4, False),
        (-6.2e-4, True),
    ],
)
def test_the_tolerance_of_a_penalty(error, is_found):
    record = PAID | {"rewards": [-0.1 - error, -0.2, 1.7]}
    metrics, tokens = recorded([record] * 2)
    settings = settings_of(kl_placement="reward", kl_estimator="k1")
    assert (kl_penalty_off(Run(metrics, settings, tokens)) is not None) == is_found


@pytest.mark.parametrize(
    "changes, settings",
    [
        ({"has_token_scores": True}, {}),
        ({"has_token_scores": None}, {}),  # not recorded: an older record
        ({"from_environment": [True] * 3}, {}),
        ({"rewards": [None, 9.0, 9.0]}, {}),
        ({"log_ratio_to_reference": [None] * 3}, {}),
        ({}, {"kl_estimator": "own"}),
    ],
)
def test_rewards_that_are_not_compared(changes, settings):
    "Both rules say nothing, though every reward is 9."
    record = PAID | {"rewards": [9.0] * 3} | changes
    record = {name: value for name, value in record.items() if value is not None}
    metrics, tokens = recorded([record] * 2)
    run_ = Run(metrics, settings_of(kl_placement="reward") | settings, tokens)
    assert kl_penalty_off(run_) is None and score_off(run_) is None
    assert kl_penalty_off(Run(metrics, None, tokens)) is None


def test_without_a_reference_nothing_is_charged():
    "No `log_ratio_to_reference` is recorded: the rewards are 0, 0 and the score."
    unpaid = {name: PAID[name] for name in PAID if name != "log_ratio_to_reference"}
    settings = settings_of(kl_placement="reward", kl_estimator="k1", beta=0.0)
    for rewards, is_found in [([0.0, 0.0, 2.0], False), ([-0.1, -0.2, 2.0], True)]:
        metrics, tokens = recorded([unpaid | {"rewards": rewards}] * 2)
        found = kl_penalty_off(Run(metrics, settings, tokens))
        assert (found is not None) == is_found


@pytest.mark.parametrize(
    "rewards, settings, metrics, seen",
    [
        # the score is 2, less β·ℓ = 0.3
        ([-0.1, -0.2, 1.7], {}, {}, None),
        ([-0.1, -0.2, 1.706], {}, {}, None),  # 0.3 % of 2.3
        (
            [-0.1, -0.2, 1.71],
            {},
            {},
            "the score as it is paid: 2 of 2 recorded numbers differ, most 2.01 from 2 by hand at "
            "token 2, 'c', of the response 'a b c' to the prompt 'p' in iteration 0",
        ),
        ([-0.1, -0.2, 9.0], {"reward_scaling": "running"}, {}, None),
        ([-0.1, -0.2, 3.7], {"reward_scaling": "batch"}, {"reward_std": 0.5}, None),
        ([-0.1, -0.2, 1.7], {"reward_scaling": "batch"}, {"reward_std": 0.5}, "most 2 from 4"),
        ([-0.1, -0.2, 1.7], {"reward_scaling": "batch"}, {"reward_std": 1e-5}, None),
        ([-0.1, -0.2, 1.7], {}, {"reward_std": 0.5}, None),
        ([0.0, 0.0, 9.0], {}, {}, None),  # the KL's penalties are off already
        ([0.0, 0.0, 2.0], {"kl_placement": "loss"}, {}, None),
        ([0.0, 0.0, 1.7], {"kl_placement": "loss"}, {}, "most 1.7 from 2"),
        # 0.3 % of the score and of the penalty 0.3, and 10⁻⁴: 0.0070
        ([-0.1, -0.2, 1.70695], {}, {}, None),
        ([-0.1, -0.2, 1.70705], {}, {}, "most 2.01 from 2"),
        ([-0.1, -0.2, 1.69305], {}, {}, None),
        ([-0.1, -0.2, 1.69295], {}, {}, "most 1.99 from 2"),
        # a spread of at most 10⁻⁵ divides nothing
        ([-0.1, -0.2, 1e5], {"reward_scaling": "batch"}, {"reward_std": 2e-5}, None),
    ],
)
def test_the_score_is_paid_at_the_last_token(rewards, settings, metrics, seen):
    rows, tokens = recorded([PAID | {"rewards": rewards}] * 2, **metrics)
    settings = {"kl_placement": "reward", "kl_estimator": "k1"} | settings
    if settings["kl_placement"] == "loss":
        settings["kl_estimator"] = "k2"
    found = score_off(Run(rows, settings_of(**settings), tokens))
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "changes, settings",
    [
        ({"score": None}, {}),
        ({"score": math.inf}, {}),
        ({"score": 2e100}, {}),
        ({}, {"reward_weighting": "scaled"}),
    ],
)
def test_scores_that_are_not_compared(changes, settings):
    rows, tokens = recorded([PAID | {"rewards": [-0.1, -0.2, 9.0]} | changes] * 2)
    usual = settings_of(kl_placement="reward", kl_estimator="k1")
    assert score_off(Run(rows, usual | settings, tokens)) is None
    assert score_off(Run(rows, None, tokens)) is None


GAE = {
    "prompt": "p",
    "tokens": ["a", "b"],
    "rewards": [1.0, 3.0],
    "values": [1.0, 2.0],
    "has_token_scores": False,
}


@pytest.mark.parametrize(
    "settings, record, expected",
    [
        # δ₂ = 3 − 2, δ₁ = 1 + ½·2 − 1, Â₁ = δ₁ + ½·½·δ₂
        ({"advantage": "gae", "gamma": 0.5, "lam": 0.5}, {}, [1.25, 1.0]),
        ({"advantage": "return", "gamma": 0.5}, {}, [2.5, 3.0]),
        ({"advantage": "greedy"}, {"baseline": 1.5}, [2.5, 2.5]),
        # totals of the group 4, 2, 0, 6: their mean is 3, their variance 5, 20/3 of a sample
        ({"advantage": "group_mean", "group_size": 4}, {"group": [4.0, 2.0, 0.0, 6.0]}, [1.0, 1.0]),
        ({"advantage": "group_mean", "group_size": 4}, {"group": [4.0, 4.0, 4.0, 4.0]}, [0.0, 0.0]),
        (
            {"advantage": "leave_one_out", "group_size": 4},
            {"group": [4.0, 2.0, 0.0, 6.0]},
            [4 / 3, 4 / 3],
        ),
        (
            {"advantage": "group_mean_std", "group_size": 4, "group_ddof": 0},
            {"group": [4.0, 2.0, 0.0, 6.0]},
            [1 / math.sqrt(5)] * 2,
        ),
        (
            {"advantage": "group_mean_std", "group_size": 4, "group_ddof": 1},
            {"group": [4.0, 2.0, 0.0, 6.0]},
            [1 / math.sqrt(20 / 3)] * 2,
        ),
    ],
)
def test_advantages_by_hand(settings, record, expected):
    "Alike is nothing; of two responses one number each is 0.1 off."
    settings = settings_of(whiten_advantages=False, **settings)
    for error, is_found in [(0.0, False), (0.1, True)]:
        advantages = [expected[0] + error, expected[1]]
        metrics, tokens = recorded([GAE | record | {"advantages": advantages}] * 2)
        found = advantages_off(Run(metrics, settings, tokens))
        assert (found is not None) == is_found
        if is_found:
            assert found.startswith("advantages: 2 of 4 recorded numbers differ")
            assert f"most {advantages[0]:.3g} from {expected[0]:.3g} by hand at token 0" in found


@pytest.mark.parametrize(
    "advantages, metrics, is_found",
    [
        # of 3, 1: less a mean of 1, over √(2²·5/4)
        ([2 / 5**0.5, 0.0], {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 5}, False),
        ([1.0, 0.0], {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 5}, True),
        ([3.0, 1.0], {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 1}, False),
        ([9.0, 9.0], {"advantage_mean": 1.0, "advantage_std": 9e-5, "tokens": 5}, False),
        ([9.0, 9.0], {"advantage_std": 2.0, "tokens": 5}, False),  # its mean is not known
        ([3.0, 1.0], {"advantage_mean": 1.0, "advantage_std": 2.0}, False),
        ([0.5**0.5, 0.0], {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 2}, False),
        # 10⁻⁸ is added to the variance of 1.25·10⁻⁸: over 1.5·10⁻⁴
        ([2e4 / 1.5, 0.0], {"advantage_mean": 1.0, "advantage_std": 1e-4, "tokens": 5}, False),
        ([9.0, 9.0], {"advantage_mean": 1.0, "advantage_std": 1e-4, "tokens": 5}, True),
        ([9.0, 9.0], {"advantage_mean": 1.0, "tokens": 5}, False),  # nor its spread
    ],
)
def test_whitened_advantages_by_hand(advantages, metrics, is_found):
    settings = settings_of(advantage="return", whiten_advantages=True)
    record = GAE | {"rewards": [2.0, 1.0], "advantages": advantages}
    rows, tokens = recorded([record] * 2, **metrics)
    assert (advantages_off(Run(rows, settings, tokens)) is not None) == is_found


@pytest.mark.parametrize(
    "settings, record, metrics, expected, tolerance",
    [
        # 0.001·(|1| + |3| + 2·2) + 10⁻⁵, 1 % of Â, and 0.005
        (
            {"advantage": "gae", "gamma": 0.5, "lam": 0.5},
            {},
            {},
            [1.25, 1.0],
            0.00801 + 0.0125 + 0.005,
        ),
        # of a group its largest total counts, and no value: 0.001·(4 + 6) + 10⁻⁵
        (
            {"advantage": "group_mean", "group_size": 4},
            {"group": [4.0, 2.0, 0.0, 6.0]},
            {},
            [1.0, 1.0],
            0.01001 + 0.01 + 0.005,
        ),
        (
            {"advantage": "group_mean_std", "group_size": 4, "group_ddof": 0},
            {"group": [4.0, 2.0, 0.0, 6.0]},
            {},
            [1 / math.sqrt(5)] * 2,
            (0.01001 + 0.01) / math.sqrt(5) + 0.005,
        ),
        # whitened: 4 and 3, less a mean of 1, over √(2²·5/4); the rounding is divided, too
        (
            {"advantage": "return", "whiten_advantages": True},
            {},
            {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 5},
            [3 / math.sqrt(5), 2 / math.sqrt(5)],
            (0.00401 + 0.03) / math.sqrt(5) + 0.005,
        ),
    ],
)
def test_the_tolerance_of_an_advantage(settings, record, metrics, expected, tolerance):
    "The first advantage of both responses is off by 1 % less, or by 1 % more."
    settings = settings_of(**{"whiten_advantages": False} | settings)
    for share, is_found in [(0.99, False), (-0.99, False), (1.01, True), (-1.01, True)]:
        advantages = [expected[0] + share * tolerance, expected[1]]
        rows, tokens = recorded([GAE | record | {"advantages": advantages}] * 2, **metrics)
        assert (advantages_off(Run(rows, settings, tokens)) is not None) == is_found


WHITENED = {"advantage_mean": 1.0, "advantage_std": 2.0, "tokens": 5}  # by √5


@pytest.mark.parametrize(
    "total, distance, metrics, is_found",
    [
        # the rounding is 0.001·(total + total) + 10⁻⁵, and a fifth is 0.2·1 or 0.2·√5 or 0.2·10
        (99.9, 1.0, {}, True),
        (100.0, 1.0, {}, False),
        (223.0, 1.0, WHITENED, True),
        (224.0, 1.0, WHITENED, False),
        (999.9, 20.0, {}, True),
        (1000.0, 20.0, {}, False),
    ],
)
def test_advantages_that_are_all_rounding_are_left_out(total, distance, metrics, is_found):
    "Of a group of two the larger total is by half their distance above the mean, and not by 50."
    record = {
        "prompt": "p",
        "tokens": ["a"],
        "rewards": [total],
        "group": [total, total - distance],
        "advantages": [50.0],
    }
    settings = settings_of(advantage="group_mean", group_size=2, whiten_advantages=bool(metrics))
    rows, tokens = recorded([record] * 2, **metrics)
    assert (advantages_off(Run(rows, settings, tokens)) is not None) == is_found


def test_the_spread_of_a_group_gets_a_small_number():
    "Totals of 0.001 and 0 are 0.0005 off their mean, over a spread of 0.0005 and 10⁻⁴."
    settings = settings_of(
        advantage="group_mean_std", group_size=2, group_ddof=0, whiten_advantages=False
    )
    record = {"prompt": "p", "tokens": ["a"], "rewards": [0.001], "group": [0.001, 0.0]}
    for error, is_found in [(0.0, False), (0.2, True)]:
        advantages = [0.0005 / 0.0006 + error]
        rows, tokens = recorded([record | {"advantages": advantages}] * 2)
        assert (advantages_off(Run(rows, settings, tokens)) is not None) == is_found


@pytest.mark.parametrize(
    "settings, changes",
    [
        ({"advantage": "group_mean", "group_size": 2}, {}),
        ({"advantage": "group_mean", "group_size": 2}, {"group": [None, 1.0]}),
        ({"advantage": "greedy"}, {}),
        ({"advantage": "gae"}, {"values": [None, 1.0]}),
        ({"advantage": "gae"}, {"rewards": [None, 1.0]}),
        ({"advantage": "group_mean_batch_std", "group_size": 2}, {"group": [0.0, 1.0]}),
    ],
)
def test_advantages_of_which_something_is_not_recorded(settings, changes):
    rows, tokens = recorded([GAE | {"advantages": [9.0, 9.0]} | changes] * 2)
    settings = settings_of(whiten_advantages=False, **settings)
    assert advantages_off(Run(rows, settings, tokens)) is None


PULLED = {
    "prompt": "p",
    "tokens": ["a", "b"],
    "log_ratio": [0.0, math.log(1.1)],
    "log_ratio_to_reference": [0.0, 0.0],
    "advantages": [2.0, -1.0],
    "group_tokens": 4,
}
SHORT = PULLED | {
    "tokens": ["a"],
    "log_ratio": [0.0],
    "log_ratio_to_reference": [0.0],
    "advantages": [4.0],
    "group_tokens": 2,
}


def gradient_evidence(negative_gradients, *, metrics=(), records=(PULLED, SHORT), **settings):
    settings = {"kl_placement": "reward", "kl_estimator": "k1", "max_new_tokens": 8} | settings
    if settings.get("aggregation") == "group_token_mean":
        settings["group_size"] = 2
    responses = [
        record | {"negative_gradient": numbers}
        for record, numbers in zip(records, negative_gradients, strict=True)
    ]
    rows, tokens = recorded(responses, **dict(metrics))
    return token_gradient_off(Run(rows, settings_of(**settings), tokens))


@pytest.mark.parametrize(
    "aggregation, shares",
    [
        ("token_mean", [1 / 3, 1 / 3]),
        ("sequence_mean", [1 / 4, 1 / 2]),
        ("sequence_sum", [1 / 16, 1 / 16]),
        # 2/4 and 1/2 of their groups are here, which is one group in all
        ("group_token_mean", [1 / 4, 1 / 2]),
    ],
)
def test_what_a_token_counts_in_the_mean(aggregation, shares):
    "ρÂ is 2 and −1.1 in a response of two tokens, and 4 in one of one token."
    by_hand = [[2 * shares[0], -1.1 * shares[0]], [4 * shares[1]]]
    assert gradient_evidence(by_hand, aggregation=aggregation) is None
    other = [[x * 1.1 for x in numbers] for numbers in by_hand]
    assert gradient_evidence(other, aggregation=aggregation).startswith(
        "−∂L/∂log π after the update: 3 of 3 recorded numbers differ, most "
    )


@pytest.mark.parametrize(
    "errors, is_found",
    [
        # 1 % of the expected 2/3 and −1.1/3, and of the largest advantage's 2/3
        ([0.0132, 0.0102], False),
        ([-0.0132, -0.0102], False),
        ([0.0135, 0.0105], True),
        ([-0.0135, -0.0105], True),
        ([0.0135, 0.0102], False),  # one alone
    ],
)
def test_the_tolerance_of_a_tokens_gradient(errors, is_found):
    by_hand = [[2 / 3 + errors[0], -1.1 / 3 + errors[1]], [4 / 3]]
    found = gradient_evidence(by_hand, aggregation="token_mean")
    assert (found is not None) == is_found


@pytest.mark.parametrize("tokens, bad, is_found", [(99, 2, True), (100, 2, False), (100, 3, True)])
def test_two_in_a_hundred_gradients_may_be_off(tokens, bad, is_found):
    record = {
        "prompt": "p",
        "tokens": ["a"] * tokens,
        "log_ratio": [0.0] * tokens,
        "log_ratio_to_reference": [0.0] * tokens,
        "advantages": [1.0] * tokens,
        "values": [0.0] * tokens,
        "values_now": [0.0] * tokens,
        "returns": [1.0] * tokens,
    }
    numbers = [2 / tokens] * bad + [1 / tokens] * (tokens - bad)
    record |= {"negative_gradient": numbers, "negative_value_gradient": numbers}
    rows, of_run = recorded([record])
    settings = settings_of(kl_placement="reward", aggregation="token_mean", vf_coef=1.0)
    run_ = Run(rows, settings, of_run)
    assert (token_gradient_off(run_) is not None) == is_found
    assert (value_gradient_off(run_) is not None) == is_found


def test_weights_multiply_what_the_policy_gains():
    "ρÂ is 2 and −1.1, each token counts a half."
    weighted = PULLED | {"weights": [0.5, 2.0]}
    settings = {"aggregation": "token_mean", "records": [weighted]}
    assert gradient_evidence([[0.5, -1.1]], **settings) is None
    assert gradient_evidence([[1.0, -0.55]], **settings) is not None


def test_the_mean_of_an_iteration_needs_all_its_responses():
    "Of a group nobody knows how many tokens it has, or of the third response its ratio."
    doubled = [[4 / 3, -2.2 / 3], [8 / 3]]
    assert gradient_evidence(doubled, aggregation="token_mean") is not None
    unknown = {name: SHORT[name] for name in SHORT if name != "log_ratio"}
    for aggregation, records in [
        ("group_token_mean", (PULLED, SHORT | {"group_tokens": None})),
        ("group_token_mean", (PULLED, SHORT | {"group_tokens": 0})),
        ("token_mean", (PULLED, unknown)),
    ]:
        found = gradient_evidence(doubled, aggregation=aggregation, records=records)
        assert found is None


@pytest.mark.parametrize(
    "registry, settings",
    [
        (SURROGATES, {"surrogate": "own"}),
        (LEVELS, {"ratio_level": "own"}),
        (ESTIMATORS, {"kl_estimator": "own"}),
        (KL_GRADIENTS, {"kl_gradient": "own"}),
        ({}, {"kl_target": 1.0}),  # its beta moves
    ],
)
def test_a_loss_of_ones_own_is_not_compared(monkeypatch, registry, settings):
    "Every gradient is twice what it is by hand, the KL charged in the loss 0."
    monkeypatch.setitem(registry, "own", registry.get("k2"))
    usual = {"kl_placement": "loss", "kl_estimator": "k2", "aggregation": "token_mean"}
    run_of = {"records": [PULLED | {"log_ratio_to_reference": [0.0, -math.log(1.1)]}]}
    doubled = [[2.0, -1.1]]
    assert gradient_evidence(doubled, **usual, **run_of) is not None
    assert gradient_evidence(doubled, **usual | settings, **run_of) is None


def test_a_target_of_the_kl_in_the_reward_leaves_the_loss_as_it_is():
    found = gradient_evidence(
        [[2.0, -1.1]], kl_target=1.0, aggregation="token_mean", records=[PULLED]
    )
    assert found is not None


RATIOS = PULLED | {"log_ratio": [math.log(1.5), math.log(0.5)], "advantages": [1.0, 1.0]}
FALLING = RATIOS | {"advantages": [-1.0, -1.0]}


@pytest.mark.parametrize(
    "settings, gains, losses",
    [
        # ratios of 1.5 and 0.5, of an advantage of 1 and of −1; a clip of 0.2 and of 0.2 to 0.6
        ({}, [0.0, 0.5], [-1.5, 0.0]),
        ({"clip_high": 0.6}, [1.5, 0.5], [-1.5, 0.0]),
        ({"dual_clip": 1.25}, [0.0, 0.5], [0.0, 0.0]),
        ({"dual_clip": 2.0}, [0.0, 0.5], [-1.5, 0.0]),
        ({"surrogate": "ratio"}, [1.5, 0.5], [-1.5, -0.5]),
        ({"surrogate": "weight"}, [1.2, 0.8], [-1.2, -0.8]),
        # the product 0.75 and its root 0.866, for both tokens
        ({"ratio_level": "product", "surrogate": "ratio"}, [1.5, 1.5], [-1.5, -1.5]),
        ({"ratio_level": "sequence", "surrogate": "ratio"}, [0.75**0.5] * 2, [-(0.75**0.5)] * 2),
        (
            {"ratio_level": "sequence_token", "surrogate": "ratio"},
            [0.75**0.5] * 2,
            [-(0.75**0.5)] * 2,
        ),
        # weights of 1.5 and 0.5 between 0.8 and 1.6
        ({"surrogate": "weight", "clip_high": 0.6}, [1.5, 0.8], [-1.5, -0.8]),
    ],
)
def test_the_gradient_of_clipped_tokens(settings, gains, losses):
    settings = {"clip": 0.2, "aggregation": "token_mean"} | settings
    by_hand = [[x / 4 for x in gains], [x / 4 for x in losses]]
    records = (RATIOS, FALLING)
    assert gradient_evidence(by_hand, records=records, **settings) is None
    other = [[x + 0.1 for x in numbers] for numbers in by_hand]
    assert gradient_evidence(other, records=records, **settings) is not None


@pytest.mark.parametrize(
    "level, by_hand",
    [
        # ratios of 1.5 and 0.5 with advantages of 1 and 3; each token counts a half
        ("token", [1.5, 1.5]),
        ("product", [0.75 * 4] * 2),
        ("sequence", [0.75**0.5 * 2] * 2),
        ("sequence_token", [0.75**0.5, 0.75**0.5 * 3]),
    ],
)
def test_the_advantages_that_a_ratio_gathers(level, by_hand):
    record = RATIOS | {"advantages": [1.0, 3.0]}
    settings = {"surrogate": "ratio", "ratio_level": level, "aggregation": "token_mean"}
    halves = [x / 2 for x in by_hand]
    assert gradient_evidence([halves], records=[record], **settings) is None
    other = [halves[0] + 0.1, halves[1] - 0.1]
    assert gradient_evidence([other], records=[record], **settings) is not None


@pytest.mark.parametrize(
    "ratio, advantage, is_found",
    [
        # held above 1.2, where a gradient falls from ρÂ to 0. Near is 0.01 of log ρ
        (1.18, 1.0, True),
        (1.195, 1.0, False),
        # a fall of 0.1·1.18 is more than five tolerances of 0.01·(0.1·1.2 + 2), 0.08·1.18 is less
        (1.195, 0.1, False),
        (1.195, 0.08, True),
    ],
)
def test_gradients_near_a_bound_are_left_out(ratio, advantage, is_found):
    "The gradients of the first two tokens are recorded as 0; that of the third is 2."
    record = {
        "prompt": "p",
        "tokens": ["a", "b", "c"],
        "log_ratio": [math.log(ratio), math.log(ratio), 0.0],
        "log_ratio_to_reference": [0.0] * 3,
        "advantages": [advantage, advantage, 2.0],
    }
    found = gradient_evidence(
        [[0.0, 0.0, 2 / 3]], records=[record], aggregation="token_mean", clip=0.2
    )
    assert (found is not None) == is_found


@pytest.mark.parametrize(
    "level, ratio, is_found",
    [
        # four tokens move by 0.01 / 4 each in a product, by 0.01 each in a mean: by 1 % in both
        ("product", 1.185, True),
        ("product", 1.195, False),
        ("sequence", 1.185, True),
        ("sequence", 1.195, False),
    ],
)
def test_near_is_1_percent_of_the_whole_ratio(level, ratio, is_found):
    "The gradients of a response whose ratio is near 1.2 are recorded as 0."
    whole = math.log(ratio)
    record = {
        "prompt": "p",
        "tokens": ["a"] * 4,
        "log_ratio": [whole / 4 if level == "product" else whole] * 4,
        "log_ratio_to_reference": [0.0] * 4,
        "advantages": [1.0] * 4,
    }
    settings = {"ratio_level": level, "aggregation": "token_mean", "clip": 0.2}
    found = gradient_evidence([[0.0] * 4], records=[record], **settings)
    assert (found is not None) == is_found


@pytest.mark.parametrize("log_ratio, is_found", [(14.9, True), (15.1, False)])
def test_ratios_beyond_e_to_the_15_are_left_out(log_ratio, is_found):
    for sign in (1, -1):
        record = RATIOS | {"log_ratio": [sign * log_ratio] * 2}
        found = gradient_evidence(
            [[9.0, 9.0]], records=[record], surrogate="ratio", aggregation="token_mean"
        )
        assert (found is not None) == is_found


@pytest.mark.parametrize(
    "settings, penalty",
    [
        # the gradient of β·k at ℓ = ln 1.5 + 0.2, with β = 0.5, by log π
        ({"kl_estimator": "k2", "kl_gradient": "plain"}, 0.5 * (math.log(1.5) + 0.2)),
        ({"kl_estimator": "k3", "kl_gradient": "plain"}, 0.5 * (1 - math.exp(-0.2) / 1.5)),
        (
            {"kl_estimator": "k3", "kl_gradient": "straight_through"},
            0.5 * (math.log(1.5) + 0.2),
        ),
        ({"kl_estimator": "k2", "kl_gradient": "ratio"}, 0.75 * (math.log(1.5) + 0.2)),
        # of ρ·k3 = ρ(e^−ℓ − 1 + ℓ): ρ·k3 + ρ(1 − e^−ℓ) = ρ·ℓ
        ({"kl_estimator": "k3", "kl_gradient": "ratio"}, 0.75 * (math.log(1.5) + 0.2)),
    ],
)
def test_the_gradient_of_a_kl_in_the_loss(settings, penalty):
    record = RATIOS | {"log_ratio": [math.log(1.5)] * 2, "log_ratio_to_reference": [0.2] * 2}
    settings = {
        "surrogate": "ratio",
        "kl_placement": "loss",
        "aggregation": "token_mean",
    } | settings
    by_hand = [[(1.5 - penalty) / 2] * 2]
    assert gradient_evidence(by_hand, records=[record], **settings) is None
    other = [[1.5 / 2] * 2]
    assert gradient_evidence(other, records=[record], **settings) is not None


@pytest.mark.parametrize(
    "values_now, gradient, value_clip, is_found",
    [
        # V was 1 and R̂ is 3; vf_coef is 0.5 and a token counts a half
        ([1.5, 1.5], [0.375, 0.375], None, False),
        ([1.5, 1.5], [0.4, 0.4], None, True),
        ([1.5, 1.5], [0.375, 0.375], 0.2, True),  # held: the clipped error is the larger
        ([0.5, 0.5], [0.625, 0.625], 0.2, False),
        ([1.5, 1.5], [0.0, 0.0], 0.2, False),
        ([1.5, 1.5], [0.375, 0.375], 0.6, False),
    ],
)
def test_the_gradient_of_the_values(values_now, gradient, value_clip, is_found):
    record = PULLED | {
        "values_now": values_now,
        "values": [1.0, 1.0],
        "returns": [3.0, 3.0],
        "negative_value_gradient": gradient,
    }
    metrics, tokens = recorded([record])
    settings = settings_of(vf_coef=0.5, value_clip=value_clip, aggregation="token_mean")
    assert (value_gradient_off(Run(metrics, settings, tokens)) is not None) == is_found


@pytest.mark.parametrize(
    "values_now, error, value_clip, is_found",
    [
        # V was 1 and R̂ is 3: rounding is 0.002·(3 + V + 1) + 10⁻⁵, times ½·½, and 1 % of the
        # recorded number: of 0.375 + 0.0066 it is 0.00275 + 0.00382
        (1.5, 0.0065, None, False),
        (1.5, 0.0067, None, True),
        (1.5, -0.0064, None, False),
        (1.5, -0.0066, None, True),
        # V has moved by 0.5: 0.011 around a clip nothing is known
        (1.5, 1.0, 0.505, False),
        (1.5, 1.0, 0.495, False),
        (1.5, 1.0, 0.515, True),
        (1.5, 1.0, 0.485, True),
        # with a clip of 0.2 the errors are 1.8 and V − 3: 0.0176 around 4.8 nothing is known
        (4.79, 1.0, 0.2, False),
        (4.81, 1.0, 0.2, False),
        (4.78, 1.0, 0.2, True),
        (4.82, 1.0, 0.2, True),
    ],
)
def test_the_tolerance_of_a_values_gradient(values_now, error, value_clip, is_found):
    "By hand it is ½·½·(3 − V), and 0 where the clip holds the value: there its error is larger."
    is_held = value_clip is not None and values_now - 1 > value_clip and values_now < 4.8
    by_hand = 0.0 if is_held else 0.25 * (3 - values_now)
    record = PULLED | {
        "values_now": [values_now] * 2,
        "values": [1.0, 1.0],
        "returns": [3.0, 3.0],
        "negative_value_gradient": [by_hand + error] * 2,
    }
    metrics, tokens = recorded([record])
    settings = settings_of(vf_coef=0.5, value_clip=value_clip, aggregation="token_mean")
    assert (value_gradient_off(Run(metrics, settings, tokens)) is not None) == is_found


REPEATED = {"prompt": "p", "tokens": ["a", "b", "c"], "old_logprobs": [-3.0, -1.0, -9.0]}


@pytest.mark.parametrize(
    "changes, pairs, is_found",
    [
        ({"tokens": ["a", "b", "d"]}, 8, True),  # 3 + 1 nats in common
        ({"tokens": ["a", "b", "d"]}, 7, False),
        ({"tokens": ["a", "b", "d"], "old_logprobs": [-3.0, -0.9, -9.0]}, 8, False),
        ({"tokens": ["a", "d", "c"]}, 8, False),
        ({"old_logprobs": [-3.0, None, -9.0]}, 8, False),
        ({"from_environment": [False] * 3}, 8, True),
        ({"old_logprobs": [-1.0, -1.0, -2.0]}, 8, True),  # the likelier of the two: 1 + 1 + 2
        ({"old_logprobs": [-0.9, -1.0, -2.0]}, 8, False),
        ({"old_logprobs": [None, -1.0, -9.0]}, 8, False),
        ({"tokens": ["a", "b"], "old_logprobs": [-3.0, -1.0]}, 8, True),  # a shorter one
    ],
)
def test_the_nats_that_two_iterations_have_in_common(changes, pairs, is_found):
    tokens = {0: [REPEATED] * pairs, 2: [REPEATED | changes] * pairs}
    found = same_random_numbers(Run([{"entropy": 1.0}], None, tokens))
    assert (found is not None) == is_found
    if changes == {"tokens": ["a", "b", "d"]} and is_found:
        assert found == "recorded responses begin as those before, with 4 nats on average"


@pytest.mark.parametrize(
    "scores, is_found",
    [
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)], True),
        ([(0.1, 0.1), (0.2, 0.2), (0.2, 0.2)], False),  # two scores: they may repeat
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.4)], False),
        ([(0.1, 0.1), (0.2, 0.2)], False),
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)] * 2, False),  # three scores of six prompts
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.1, 0.1), (0.2, 0.2)], True),
    ],
)
def test_one_score_for_all_responses_to_a_prompt(scores, is_found):
    tokens = {}
    for i in range(2):
        tokens[i] = [
            {"prompt": str(k), "tokens": [str(i)], "score": pair[i]}
            for k, pair in enumerate(scores)
        ]
    found = cached_scores(Run([{"entropy": 1.0}], None, tokens))
    assert (found is not None) == is_found
    if is_found:
        assert found.endswith(f"with each of {len(scores)} prompts")


@pytest.mark.parametrize(
    "prompts, given, is_found",
    [
        (["p", "q"], 3, True),
        (["p", "q"], 2, False),
        (["p", "q"], None, True),
        (["p", "p"], 3, False),
    ],
)
def test_the_same_prompts_in_each_iteration(prompts, given, is_found):
    responses = [{"prompt": prompt, "tokens": ["a"]} for prompt in prompts]
    metrics = [{"entropy": 1.0} | ({} if given is None else {"prompts_given": given})]
    found = same_prompts(Run(metrics, None, dict.fromkeys(range(4), responses)))
    assert (found is not None) == is_found


def test_the_text_that_is_scored():
    tokens = {0: [{"tokens": ["a"]}, {"tokens": ["b"], "same_text": True}]}
    tokens[1] = [{"tokens": ["c"], "same_text": False}, {"tokens": ["d"], "same_text": False}]
    metrics = [{"entropy": 1.0}]
    found = other_text_scored(Run(metrics, settings_of(), tokens))
    assert found == "in 2 of 3 recorded responses, such as ['c']"
    assert other_text_scored(Run(metrics, settings_of(stop_strings=("x",)), tokens)) is None
    assert other_text_scored(Run(metrics, None, tokens)) == found


def test_responses_of_which_one_side_is_not_comparable():
    "All repeat each other; the first ones have no log π_old, or others wrote a part of them."
    unknown = {"prompt": "p", "tokens": ["a", "b", "c"]}
    others = REPEATED | {"from_environment": [True, False, False]}
    for first, second, is_found in [
        (REPEATED, REPEATED, True),
        (unknown, REPEATED, False),
        (REPEATED, unknown, False),
        (others, REPEATED, False),
    ]:
        tokens = {0: [first] * 8, 1: [second] * 8}
        found = same_random_numbers(Run([{"entropy": 1.0}], None, tokens))
        assert (found is not None) == is_found


def test_iterations_of_other_sizes_are_compared_response_by_response():
    "Eight of nine responses have a partner, with 13 nats in common."
    for before, after in [(9, 8), (8, 9)]:
        tokens = {0: [REPEATED] * before, 1: [REPEATED] * after}
        found = same_random_numbers(Run([{"entropy": 1.0}], None, tokens))
        assert found == "recorded responses begin as those before, with 13 nats on average"


def test_prompts_that_change_in_one_iteration():
    same = [{"prompt": prompt, "tokens": ["a"]} for prompt in ("p", "q")]
    other = [{"prompt": prompt, "tokens": ["a"]} for prompt in ("p", "r")]
    tokens = dict.fromkeys(range(5), same)
    found = same_prompts(Run([{"entropy": 1.0}], None, tokens))
    assert found == ("the recorded prompts are the same ones in all 5 iterations: ('p', 'q')")
    assert same_prompts(Run([{"entropy": 1.0}], None, tokens | {3: other})) is None


@pytest.mark.parametrize(
    "rule",
    [
        other_rows_learnt,
        other_schedule,
        other_step_size,
        advantages_off,
        token_gradient_off,
        value_gradient_off,
    ],
)
def test_without_settings_nothing_is_expected(rule):
    columns = {
        "coverage_error": [1.0] * 4,
        "lr": [1.0, 2.0, 3.0, 4.0],
        "weight_change_rms": 9.0,
        "updates": 1,
        "optimizer_step_count": [1, 2, 3, 4],
    }
    record = (
        GAE
        | PULLED
        | {
            "advantages": [9.0, 9.0],
            "values_now": [1.0, 1.0],
            "returns": [3.0, 3.0],
            "negative_gradient": [7.0, 7.0],
            "negative_value_gradient": [7.0, 7.0],
        }
    )
    tokens = dict.fromkeys(range(4), [record])
    assert rule(Run(rows_of(**columns), settings_of(whiten_advantages=False), tokens)) is not None
    assert rule(Run(rows_of(**columns), None, tokens)) is None


def test_what_others_wrote_is_left_out_and_the_sampled_token_is_named():
    "Each response has one sampled number that is wrong, behind two tokens of the environment."
    record = PAID | {
        "tokens": ["e", "a", "f", "b", "c"],
        "from_environment": [True, False, True, False, False],
        "rewards": [None, -0.1, None, -0.5, 1.7],
        "log_ratio_to_reference": [None, 0.2, None, 0.4, 0.6],
    }
    metrics, tokens = recorded([record] * 2)
    tokens[7] = [record | {"rewards": [9.0] * 5}] * 2  # not logged
    found = kl_penalty_off(
        Run(metrics, settings_of(kl_placement="reward", kl_estimator="k1"), tokens)
    )
    assert found == (
        "rewards before the last token: 2 of 4 recorded numbers differ, most -0.5 from -0.2 by "
        "hand at token 3, 'b', of the response 'e a f b c' to the prompt 'p' in iteration 0"
    )


@pytest.mark.parametrize(
    "responses, bad, is_found",
    [(10, 2, True), (20, 2, False), (19, 2, True), (1, 1, False), (20, 3, True)],
)
def test_two_numbers_and_one_in_twenty_are_needed(responses, bad, is_found):
    "Each response has two numbers before the last token; of `bad` responses one is off."
    off = PAID | {"rewards": [-0.5, -0.2, 1.7]}
    metrics, tokens = recorded([off] * bad + [PAID] * (responses - bad))
    settings = settings_of(kl_placement="reward", kl_estimator="k1")
    assert (kl_penalty_off(Run(metrics, settings, tokens)) is not None) == is_found


# ---------------------------------------------------------------- a trained run, one column changed
def scaled(name, by, where=slice(None)):
    def change(r, i, k):
        r[name][where] = [x * by for x in r[name][where]]

    return each(change)


def penalty(factor):
    def change(r, i, k):
        r["rewards"][:-1] = [x * factor for x in r["rewards"][:-1]]

    return each(change)


def paid_at_once(r, i, k):
    r["rewards"][0], r["rewards"][-1] = r["rewards"][0] + r["score"], r["rewards"][-1] - r["score"]


def another_score(r, i, k):
    r["rewards"][-1] += 1.0


def held_too(r, i, k):
    r["negative_gradient"] = [-x for x in r["negative_gradient"]]


def as_before(r, i, k):
    r["tokens"], r["old_logprobs"] = ["a"] * len(r["tokens"]), [-3.0] * len(r["tokens"])


def by_prompt(r, i, k):
    r["score"] = 0.1 * len(r["prompt"]) + 0.01 * ord((r["prompt"] or "d")[0])


def same_prompt(r, i, k):
    r["prompt"] = str(k)


CHANGES = [
    ("KL penalty off", penalty(0.5), {}),
    ("KL penalty off", penalty(-1.0), {}),
    ("KL penalty off", each(paid_at_once), {}),
    ("score off", each(another_score), {}),
    ("advantages off", scaled("advantages", 1.5), {}),
    ("advantages off", scaled("advantages", 0.5), {"advantage": "group_mean_std", "group_size": 4}),
    ("token gradient off", scaled("negative_gradient", 2.0), {}),
    ("token gradient off", each(held_too), {"surrogate": "weight"}),
    ("value gradient off", scaled("negative_value_gradient", 2.0), {"value_clip": None}),
    ("other text scored", each(lambda r, i, k: r.update(same_text=False)), {}),
    ("same random numbers", each(as_before), {}),
    ("cached scores", each(by_prompt), {}),
    ("same prompts", each(same_prompt), {}),
]


@pytest.mark.parametrize(
    "name, change, settings", CHANGES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_changed_record_is_named(name, change, settings):
    log, config, tokens = run(**settings)
    before = [f.name for f in diagnose(log, config, tokens)]
    change(tokens)
    assert name not in before and name in [f.name for f in diagnose(log, config, tokens)]


def test_a_gradient_is_compared_to_1_percent_of_its_own_size():
    "All advantages are a tenth of what they were, so are the gradients; then these by a fifth more."
    log, config, tokens = run()

    def small(r, i, k):
        for name in ("advantages", "negative_gradient"):
            r[name] = [0.1 * x for x in r[name]]

    def off(r, i, k):
        r["negative_gradient"] = [1.2 * x for x in r["negative_gradient"]]

    each(small)(tokens)
    assert token_gradient_off(Run(log, config, tokens)) is None
    each(off)(tokens)
    assert token_gradient_off(Run(log, config, tokens)) is not None


def test_the_first_iteration_with_another_rate_is_named():
    log, config, _ = run()
    rows = [row | {"lr": row["lr"] * (1 if i < 3 else 0.5)} for i, row in enumerate(log)]
    assert " in iteration 3, " in other_schedule(Run(rows, config))


@pytest.mark.parametrize("recorded, named", [(3, False), (4, True)])
def test_the_same_prompts_are_named_from_the_fourth_record_on(recorded, named):
    log, config, tokens = run()
    tokens = {i: tokens[i] for i in list(tokens)[:recorded]}
    each(same_prompt)(tokens)
    assert ("same prompts" in [f.name for f in diagnose(log, config, tokens)]) == named


def test_every_rule_on_tokens_is_tried_above():
    assert {name for name, *_ in CHANGES} == {
        rule.name for rule in RECOMPUTED_RULES if rule.columns
    }


def test_numbers_that_are_not_there_are_left_out():
    log, config, tokens = run()
    for rows in tokens.values():
        for r in rows:
            r["rewards"][0] = None
            del r["negative_gradient"]
    assert not [f for f in diagnose(log, config, tokens) if f.severity == "error"]
    assert diagnose(log, config) == [f for f in diagnose(log, config, {}) if f]
