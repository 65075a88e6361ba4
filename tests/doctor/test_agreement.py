"""Each rule that compares two records of one thing: nothing on a healthy run, the finding where one
of the two is changed.
"""

import copy
import math

import pytest
from small_runs import each, rows_of, run, settings_of

from instruct_goose.config import RLHFConfig
from instruct_goose.doctor.agreement import (
    AGREEMENT_RULES,
    clip_bounds_off,
    columns_of_other_rows,
    ends_miscounted,
    equal_parts,
    gradient_not_clipped,
    groups_mixed,
    harmful_values,
    held_out_prompts_trained,
    other_best_iteration,
    other_beta,
    parts_without_gradient,
    policy_loss_direction,
    policy_stands_still,
    prompt_tokens_off,
    reference_is_the_policy,
    reference_of_one_state,
    reference_of_other_tokens,
    returns_off,
    same_responses,
    score_shaping_off,
    shaped_by_hand,
    steps_rounded_away,
    token_gradient_rounded,
    tokens_behind_the_end,
    updates_missing,
    values_of_one_state,
    weights_missing,
)
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.rules import Run

# ---------------------------------------------------------------- each limit, from both sides
FLOAT32 = {"rounding": 2.0**-23}
HALF = {"rounding": 2.0**-7}


@pytest.mark.parametrize(
    "rule, columns, seen",
    [
        (
            reference_is_the_policy,
            {"kl_to_reference": [9.0, 1e-6, -1e-6], "kl_to_old": [0.0, 0.0, 1e-3]},
            "kl_to_reference is 0 in all 2 iterations after the first, and one of them moves the "
            "policy by 0.001 nats per response",
        ),
        (
            reference_is_the_policy,
            {"kl_to_reference": [9.0, 2e-6, 0.0], "kl_to_old": [0.0, 0.0, 1.0]},
            None,
        ),
        (
            reference_is_the_policy,
            {"kl_to_reference": [9.0, 0.0], "kl_to_old": [9e-4, 9e-4]},
            None,
        ),
        (
            reference_is_the_policy,
            {"kl_to_reference": [0.0, 0.0], "kl_to_old": 1.0, "kl_to_old_exact": 9e-4},
            None,
        ),
        (
            reference_is_the_policy,
            {"kl_to_reference": [0.0, 0.0], "kl_to_old": 1.0, "reference_moved": [0.0, 1.0]},
            None,
        ),
        (reference_is_the_policy, {"kl_to_reference": [0.0], "kl_to_old": 1.0}, None),
        (reference_is_the_policy, {"kl_to_reference": [0.0, 0.0]}, None),
        (
            reference_of_other_tokens,
            FLOAT32 | {"kl_to_reference": [9e-7], "kl_estimate": 1.1e-3},
            "in iteration 0 the exact KL is 9e-07, and its estimate from log π and log π_ref of "
            "the sampled tokens 0.0011 nats per response",
        ),
        (
            reference_of_other_tokens,
            FLOAT32 | {"kl_to_reference": [0.0, 0.0], "kl_estimate": [1e-3, 9.0]},
            None,
        ),
        (
            reference_of_other_tokens,
            FLOAT32 | {"kl_to_reference": [1e-6], "kl_estimate": 1.0},
            None,
        ),
        (reference_of_other_tokens, HALF | {"kl_to_reference": [0.0], "kl_estimate": 0.05}, None),
        (
            reference_of_other_tokens,
            HALF | {"kl_to_reference": [0.0], "kl_estimate": 0.051},
            "0.051 nats",
        ),
        # directions: the middle of an even number is a mean here
        (policy_loss_direction, FLOAT32 | {"policy_gradient_cosine": [0.995]}, None),
        (
            policy_loss_direction,
            FLOAT32 | {"policy_gradient_cosine": [0.994, 1.0, 0.1]},
            "policy_gradient_cosine is 0.994 in the median iteration",
        ),
        (policy_loss_direction, HALF | {"policy_gradient_cosine": [0.9]}, None),
        (policy_loss_direction, HALF | {"policy_gradient_cosine": [0.89]}, "is 0.89"),
        (
            policy_loss_direction,
            FLOAT32 | {"policy_gradient_cosine": [0.5], "beta": 0.1, "kl_to_reference": 1e-6},
            None,
        ),
        (
            policy_loss_direction,
            FLOAT32 | {"policy_gradient_cosine": [0.5], "beta": 0.1, "kl_to_reference": 9e-7},
            "is 0.5",
        ),
        # weights that stay
        (
            policy_stands_still,
            {"grad_norm": [0.5, 1e-6], "weights_moved": [0.0, 0.01]},
            "at most 0.01 of the weights with a gradient move in an iteration, and grad_norm is up "
            "to 0.5",
        ),
        (policy_stands_still, {"grad_norm": [0.5, 0.5], "weights_moved": [0.0, 0.011]}, None),
        (policy_stands_still, {"grad_norm": [0.0, 1e-6], "weights_moved": 0.0}, "up to 1e-06"),
        (policy_stands_still, {"grad_norm": [0.0, 9e-7], "weights_moved": 0.0}, None),
        (policy_stands_still, {"grad_norm": [0.5], "weights_moved": 0.0}, None),
        (policy_stands_still, {"grad_norm": [0.5, 0.5], "weights_moved": 0.0, "lr": 9e-9}, None),
        (
            policy_stands_still,
            {"grad_norm": [0.5, 0.5], "weights_moved": 0.0, "lr": [9e-9, 1e-8]},
            "up to 0.5",
        ),
        (
            steps_rounded_away,
            HALF | {"weights_moved": [0.5, 0.25, 0.75]},
            "an iteration changes 50% of the weights that have a gradient (median)",
        ),
        (steps_rounded_away, HALF | {"weights_moved": [0.51]}, None),
        (steps_rounded_away, {"rounding": 1e-4, "weights_moved": [0.25]}, None),
        (steps_rounded_away, {"weights_moved": [0.25]}, None),
        (steps_rounded_away, HALF | {"weights_moved": [0.0, 0.0], "grad_norm": 1.0}, None),
        # tensors without a gradient, from the second iteration on
        (
            parts_without_gradient,
            {"tensors_without_gradient": [1.0, 0.25, 0.25], "clipped_grad_norm": 2e-8},
            "25% of the policy's tensors have no gradient (median of 2 iterations)",
        ),
        (
            parts_without_gradient,
            {"tensors_without_gradient": [1.0, 0.25], "clipped_grad_norm": 1.0},
            None,
        ),
        (
            parts_without_gradient,
            {"tensors_without_gradient": [0.25] * 3, "clipped_grad_norm": 1e-8},
            None,
        ),
        (parts_without_gradient, {"tensors_without_gradient": [0.25] * 3}, None),
        (
            parts_without_gradient,
            {
                "iteration": [1, 2, 3],
                "tensors_without_gradient": [1.0, 0.25, 0.25],
                "clipped_grad_norm": 1.0,
            },
            "25% of the policy's tensors have no gradient (median of 2 iterations)",
        ),
        (
            parts_without_gradient,
            {"tensors_without_gradient": [0.25] * 4, "clipped_grad_norm": [1.0, 1.0, 0.0, 0.0]},
            None,
        ),
        (
            parts_without_gradient,
            {
                "tensors_without_gradient": [0.25] * 3,
                "clipped_grad_norm": 1.0,
                "response_length": 1.5,
            },
            None,
        ),
        (
            parts_without_gradient,
            {
                "tensors_without_gradient": [0.25] * 3,
                "clipped_grad_norm": 1.0,
                "response_length": 1.6,
            },
            "median of 2 iterations",
        ),
        (
            parts_without_gradient,
            {"tensors_without_gradient": [0.5, 0.5, 0.0, 0.0], "clipped_grad_norm": 1.0},
            None,
        ),
        # max_grad_norm is 1
        (gradient_not_clipped, {"clipped_grad_norm": [1.02], "moment_norm": 1.02}, None),
        (
            gradient_not_clipped,
            {"clipped_grad_norm": [1.0, 1.03, 9.0]},
            "clipped_grad_norm is 1.03 in iteration 1; at most 1 is allowed",
        ),
        (
            gradient_not_clipped,
            {"clipped_grad_norm": [1.0], "moment_norm": 1.5},
            "moment_norm is 1.5 in iteration 0",
        ),
        # copies: a response of 4 tokens has more than 8 nats, of more than 8 responses
        (
            same_responses,
            {
                "distinct_responses": [0.25, 0.25],
                "entropy": 2.1,
                "response_length": 4,
                "tokens": 33,
            },
            "25% of the responses differ in 2 of 2 iterations",
        ),
        (
            same_responses,
            {"distinct_responses": [0.3, 0.3], "entropy": 2.1, "response_length": 4, "tokens": 33},
            None,
        ),
        (
            same_responses,
            {
                "distinct_responses": [0.25, 0.25],
                "entropy": 2.0,
                "response_length": 4,
                "tokens": 33,
            },
            None,
        ),
        (
            same_responses,
            {
                "distinct_responses": [0.25, 0.25],
                "entropy": 2.1,
                "response_length": 4,
                "tokens": 32,
            },
            None,
        ),
        (
            same_responses,
            {"distinct_responses": [0.25], "entropy": 2.1, "response_length": 4, "tokens": 33},
            None,
        ),
        (
            same_responses,
            {
                "distinct_responses": [0.25, 0.25, 1.0, 1.0],
                "entropy": 2.1,
                "response_length": 4,
                "tokens": 33,
            },
            None,
        ),
        (
            same_responses,
            {
                "distinct_responses": [0.25, 0.125, 1.0],
                "entropy": 2.1,
                "response_length": 4,
                "tokens": 33,
            },
            "differ in 2 of 3 iterations",
        ),
        (harmful_values, {"value_error": [9.0] * 7}, None),
        (harmful_values, {"value_error": [9.0] * 5 + [1.9, 1.9, 9.0]}, None),
        (harmful_values, {"value_error": [0.5] * 5 + [2.0, 2.0, 1.0]}, "value_error is 2;"),
        (
            held_out_prompts_trained,
            {"prompts_held_out": [0.0, 0.25, 0.5, 0.125]},
            "in 3 of 4 iterations prompts are held out as well; most in iteration 2, 50% of its",
        ),
        (held_out_prompts_trained, {"prompts_held_out": [0.0]}, None),
        (
            weights_missing,
            {"weights_missing": [0, 3]},
            "3 tensors of the policy were not in its files; they began at random",
        ),
        (weights_missing, {"weights_missing": [0]}, None),
        (weights_missing, {"entropy": [1.0]}, None),
        # reward functions
        (
            equal_parts,
            {"reward_mean/a": [0.1, 0.2, 0.3], "reward_mean/b": [0.1, 0.2, 0.3]},
            "reward_mean/a and reward_mean/b are equal in all 3 iterations",
        ),
        (equal_parts, {"reward_mean/a": [0.1, 0.2], "reward_mean/b": [0.1, 0.2]}, None),
        (equal_parts, {"reward_mean/a": [0.1] * 3, "reward_mean/b": [0.1] * 3}, None),
        (equal_parts, {"reward_mean/a": [0.1, 0.2] * 2, "reward_mean/b": [0.1, 0.2] * 2}, None),
        (
            equal_parts,
            {
                "reward_mean/a": [0.1, 0.2, 0.3],
                "reward_mean/b": [0.1, 0.2, 0.4],
                "reward_mean/c": [0.1, 0.2, 0.4],
            },
            "reward_mean/b and reward_mean/c are equal",
        ),
        (
            equal_parts,
            {"reward_mean/a": [0.1, 0.2, 0.3], "reward_mean/b": [0.1, 0.2, 0.4]},
            None,
        ),
    ],
)
def test_each_limit_from_both_sides(rule, columns, seen):
    found = rule(Run(rows_of(**columns), settings_of(kl_placement="loss")))
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "rule, settings, is_found",
    [
        (policy_stands_still, {"lr": 9e-9}, False),
        (policy_stands_still, {"lr": 1e-8}, True),
        (steps_rounded_away, {}, True),
        (steps_rounded_away, {"autocast": "bfloat16"}, False),
        (parts_without_gradient, {}, True),
        (parts_without_gradient, {"router_aux_loss_coef": 0.0}, False),
    ],
)
def test_settings_under_which_a_rule_is_not_looked_for(rule, settings, is_found):
    columns = {"weights_moved": 0.25, "tensors_without_gradient": 0.5, "clipped_grad_norm": 1.0}
    if rule is policy_stands_still:
        columns["weights_moved"] = 0.0
    rows = rows_of(grad_norm=[1.0] * 3, **HALF, **columns)
    assert (rule(Run(rows, settings)) is not None) == is_found


@pytest.mark.parametrize(
    "settings, beta, kl, seen",
    [
        ({}, [0.5, 0.5], [1.0, 1.0], None),
        ({}, [0.5, 0.5009], [1.0, 1.0], None),  # 0.2 % are 0.001
        (
            {},
            [0.5, 0.5, 0.502],
            [1.0, 3.0, 1.0],
            "after iteration 1, with a KL of 3 nats per response, beta goes from 0.5 to 0.502; it "
            "should be 0.5",
        ),
        # β·(1 + 0.1·e) with e = 2.2/2 − 1
        ({"kl_target": 2.0}, [0.5, 0.505], [2.2, 0.0], None),
        ({"kl_target": 2.0}, [0.5, 0.5], [2.2, 0.0], "it should be 0.505"),
        ({"kl_target": 2.0}, [0.5, 0.51], [9.0, 0.0], None),  # e is at most 0.2
        ({"kl_target": 2.0}, [0.5, 0.49], [0.0, 0.0], None),
        ({"kl_target": 2.0}, [0.5, 0.5], [0.0, 0.0], "it should be 0.49"),
    ],
)
def test_beta_stays_or_follows_its_target(settings, beta, kl, seen):
    settings = settings_of(kl_placement="reward", **settings)
    rows = rows_of(beta=beta, kl_to_reference=kl)
    found = other_beta(Run(rows, settings))
    if seen is None:
        assert found is None
    else:
        assert seen in found
    apart = [row | {"iteration": 2 * i} for i, row in enumerate(rows)]
    assert other_beta(Run(apart, settings)) is None


@pytest.mark.parametrize(
    "settings, updates, tokens, seen",
    [
        ({}, 6, 40, None),
        ({}, 5, 40, "iteration 0 has 5 updates, not 6"),
        ({}, 4, 9, None),  # two responses of 4 tokens: two minibatches
        ({}, 6, 8, "iteration 0 has 6 updates, not 4"),
        ({"max_kl_to_old": 1.0}, 5, 40, None),
        ({"mask_truncated": True}, 5, 40, None),
        (
            {"drop_flat_groups": True, "group_size": 2, "advantage": "group_mean"},
            5,
            40,
            None,
        ),
    ],
)
def test_epochs_times_minibatches_updates(settings, updates, tokens, seen):
    rows = [{"updates": updates, "tokens": tokens, "response_length": 4.0}]
    settings = settings_of(epochs=2, minibatches=3, **settings)
    assert updates_missing(Run(rows, settings)) == seen


@pytest.mark.parametrize("unknown", ["updates", "tokens", "response_length"])
def test_updates_are_counted_where_all_is_logged(unknown):
    row = {"updates": 5, "tokens": 40, "response_length": 4.0}
    rows = [{name: row[name] for name in row if name != unknown}, row]
    found = updates_missing(Run(rows, settings_of(epochs=2, minibatches=3)))
    assert found == "iteration 1 has 5 updates, not 6"


@pytest.mark.parametrize(
    "best, kl, seen",
    [
        (2, 0.1, None),
        (
            1,
            0.1,
            "iteration 1 was kept, with a held_out_reward of 0.25; iteration 2 has 0.75",
        ),
        (1, 0.5, "iteration 2 has 0.75"),  # the limit may be reached
        (1, 0.51, None),  # the second one is beyond it
        (3, 0.51, None),
        (9, 0.1, None),
    ],
)
def test_the_best_one_within_the_limit_of_the_kl(best, kl, seen):
    rows = rows_of(held_out_reward=[0.25, 0.75, 0.25], held_out_kl=[0.1, kl, 0.1])
    settings = settings_of(keep_best=True, eval_every=1, max_kl_to_reference=0.5)
    found = other_best_iteration(Run(rows, settings | {"best_iteration": best}))
    if seen is None:
        assert found is None
    else:
        assert seen in found
    assert other_best_iteration(Run(rows, settings_of() | {"best_iteration": best})) is None


@pytest.mark.parametrize(
    "columns, settings, best, seen",
    [
        # no KL is logged, or none is limited
        (
            {"held_out_reward": [0.25, 0.75]},
            {"max_kl_to_reference": 0.5},
            1,
            "iteration 2 has 0.75",
        ),
        ({"held_out_reward": [0.25, 0.75], "held_out_kl": 9.0}, {}, 1, "iteration 2 has 0.75"),
        ({"held_out_reward": [0.25, 0.75]}, {"keep_best": False}, 1, None),
        # iterations are counted when they are done; two may be equally good
        ({"iteration": [4, 9], "held_out_reward": [0.25, 0.75]}, {}, 5, "iteration 10 has 0.75"),
        ({"held_out_reward": [0.75, 0.75]}, {}, 2, None),
        ({"held_out_reward": [None, 0.25, 0.75]}, {}, 2, "iteration 3 has 0.75"),
        ({"held_out_reward": [0.25, 0.75]}, {}, None, None),
        ({"entropy": [0.25, 0.75]}, {}, 1, None),
    ],
)
def test_which_iterations_can_be_the_best_one(columns, settings, best, seen):
    settings = settings_of(**{"keep_best": True, "eval_every": 1} | settings)
    found = other_best_iteration(Run(rows_of(**columns), settings | {"best_iteration": best}))
    if seen is None:
        assert found is None
    else:
        assert seen in found


def state_evidence(rule, responses, rounding=2.0**-23):
    tokens = {3: responses, 5: responses}
    return rule(Run([{"entropy": 1.0, "rounding": rounding}], None, tokens))


ALIKE = {"prompt": "p", "tokens": ["a", "b"], "values": [1.0, 2.0], "ref_logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    "rule, other, rounding, seen",
    [
        # 0.2 % of the larger one, and 0.0002
        (values_of_one_state, {"values": [1.0, 2.0]}, 0.0, None),
        (values_of_one_state, {"values": [1.0021, 2.004]}, 0.0, None),
        (
            values_of_one_state,
            {"values": [1.0, 2.25]},
            0.0,
            "2 of 4 pairs of one state differ in values, most 2 from 2.25: iteration 3, prompt "
            "'p', before token 1 of the responses 'a b' and 'a b'",
        ),
        (values_of_one_state, {"values": [1.0023, 2.0]}, 0.0, "before token 0"),
        (values_of_one_state, {"values": [1.1, 2.2]}, 2.0**-7, None),  # 10 % and 0.05
        (values_of_one_state, {"values": [1.2, 2.0]}, 2.0**-7, "most 1 from 1.2"),
        # before the second token both are in one state, and write another token
        (
            values_of_one_state,
            {"tokens": ["a", "c"], "values": [1.0, 9.0]},
            0.0,
            "2 of 4 pairs",
        ),
        (values_of_one_state, {"tokens": ["c", "b"], "values": [1.0, 9.0]}, 0.0, None),
        (values_of_one_state, {"prompt": "q", "values": [9.0, 9.0]}, 0.0, None),
        (values_of_one_state, {"values": [None, 9.0]}, 0.0, "2 of 2 pairs"),
        (
            reference_of_one_state,
            {"tokens": ["a", "c"], "ref_logprobs": [-1.0, -9.0]},
            0.0,
            None,
        ),
        (
            reference_of_one_state,
            {"ref_logprobs": [-1.0, -9.0]},
            0.0,
            "2 of 4 pairs of one state differ in ref_logprobs, most -2 from -9",
        ),
        # what others wrote is no draw, and the state behind it is the same
        (
            values_of_one_state,
            {"from_environment": [True, False], "values": [9.0, 9.0]},
            0.0,
            None,
        ),
    ],
)
def test_one_state_has_one_number(rule, other, rounding, seen):
    found = state_evidence(rule, [ALIKE, ALIKE | other], rounding)
    if seen is None:
        assert found is None
    else:
        assert seen in found


def test_the_worst_pair_is_named():
    responses = [ALIKE | {"values": [1.0 + k * k, 2.0]} for k in range(3)]
    found = state_evidence(values_of_one_state, responses)
    assert "6 of 12 pairs" in found and "most 1 from 5" in found


def test_responses_without_the_column_are_left_out():
    unknown = {"prompt": "p", "tokens": ["a", "b"]}
    responses = [ALIKE, unknown, ALIKE | {"values": [1.0, 9.0]}]
    assert "2 of 4 pairs" in state_evidence(values_of_one_state, responses)


@pytest.mark.parametrize(
    "absolute, rounding, is_found",
    [(2e-4, 0.0, False), (2.1e-4, 0.0, True), (0.05, 2.0**-7, False), (0.056, 2.0**-7, True)],
)
def test_small_numbers_of_one_state_differ_by_rounding(absolute, rounding, is_found):
    "A relative limit says nothing of 0."
    responses = [ALIKE | {"values": [0.0, 0.0]}, ALIKE | {"values": [absolute, absolute]}]
    found = state_evidence(values_of_one_state, responses, rounding)
    assert (found is not None) == is_found


@pytest.mark.parametrize(
    "other, seen",
    [
        # the first token was written by others in both, the second was not
        ({"values": [9.0, 2.0]}, None),
        ({"values": [1.0, 9.0]}, "2 of 2 pairs"),
        ({"values": [1.0, 9.0], "tokens": ["x", "b"]}, None),
        ({"values": [1.0, 9.0], "from_environment": [False, False]}, None),
    ],
)
def test_tokens_of_the_environment_are_a_part_of_the_state(other, seen):
    first = ALIKE | {"from_environment": [True, False]}
    found = state_evidence(values_of_one_state, [first, first | other])
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "changes, seen",
    [
        ([{}, {}], None),
        ([{"group_prompts": 1}, {}], None),
        (
            [{}, {"group_prompts": 3}],
            "in iteration 0 the group of the response to 'p' has 3 prompts; it should have one",
        ),
    ],
)
def test_a_group_has_one_prompt(changes, seen):
    responses = [{"prompt": "p", "tokens": ["a"]} | change for change in changes]
    assert groups_mixed(Run([{"entropy": 1.0}], None, {0: responses})) == seen


@pytest.mark.parametrize(
    "changes, is_found",
    [
        ({"end": 1}, True),
        ({"end": 2}, False),
        ({"end": None}, False),
        ({"end": 0, "from_environment": [False] * 3}, False),
    ],
)
def test_the_first_end_token_is_the_last_token(changes, is_found):
    response = {"prompt": "p", "tokens": ["a", "b", "c"]}
    tokens = {0: [response], 4: [response | changes, response | changes]}
    found = tokens_behind_the_end(Run([{"entropy": 1.0}], None, tokens))
    assert (found is not None) == is_found
    if is_found:
        assert found == (
            "2 recorded responses go on behind their end token, such as 'a b c' to 'p' in "
            "iteration 4, whose token 1 is an end"
        )


@pytest.mark.parametrize("prompts, other, is_found", [(3, 3, True), (2, 2, False), (6, 3, False)])
def test_a_column_of_another_row(prompts, other, is_found):
    "Of `other` prompts the answer in the third iteration is not that of the first two."
    tokens = {}
    for iteration in (1, 2, 6):
        tokens[iteration] = []
        for k in range(prompts):
            answer = 10 + k if iteration == 6 and k < other else k
            response = {"prompt": f"p{k}", "tokens": ["a"], "columns": {"answer": answer}}
            tokens[iteration].append(response)
    found = columns_of_other_rows(Run([{"entropy": 1.0}], None, tokens))
    assert (found is not None) == is_found
    if is_found:
        assert found == (
            "the column 'answer' of the prompt 'p0' is 0 in iteration 1 and 10 in iteration 6; so "
            "it is for 3 prompts"
        )


def test_prompts_that_were_asked_once_do_not_count():
    "Three prompts come with two answers, four come in one iteration."
    tokens = {}
    for iteration in (0, 1):
        tokens[iteration] = [
            {"prompt": f"p{k}", "tokens": ["a"], "columns": {"answer": iteration}} for k in range(3)
        ]
    tokens[0] += [{"prompt": f"q{k}", "tokens": ["a"], "columns": {"answer": 0}} for k in range(4)]
    tokens[1] += [
        {"prompt": "p0", "tokens": ["a"], "columns": None},
        {"prompt": "p1", "tokens": []},
    ]
    found = columns_of_other_rows(Run([{"entropy": 1.0}], None, tokens))
    assert found.endswith("is 0 in iteration 0 and 1 in iteration 1; so it is for 3 prompts")


@pytest.mark.parametrize(
    "settings, response, shaped",
    [
        ({}, {}, 0.9),
        ({"reward_clip": 0.3}, {}, 0.3),
        ({"reward_clip": 0.3}, {"raw_score": -0.9}, -0.3),
        ({"reward_clip": 1.0}, {}, 0.9),
        ({"missing_eos_penalty": 0.5}, {}, 0.9),
        ({"missing_eos_penalty": 0.5}, {"ended": False}, 0.4),
        ({"reward_clip": 0.3, "missing_eos_penalty": 0.5}, {"ended": False}, -0.2),
        # (L − B − n)/B of a limit of 8 and a buffer of 4
        ({"overlong_buffer": 4}, {"tokens": ["a"] * 3}, 0.9),
        ({"overlong_buffer": 4}, {"tokens": ["a"] * 4}, 0.9),
        ({"overlong_buffer": 4}, {"tokens": ["a"] * 6}, 0.4),
        ({"overlong_buffer": 4}, {"tokens": ["a"] * 8}, -0.1),
        ({}, {"raw_score": None}, None),
        ({}, {"ended": None}, None),
    ],
)
def test_the_shape_of_a_score_by_hand(settings, response, shaped):
    "A response of one token that ended by itself and has 0.9; None is not recorded."
    record = {"raw_score": 0.9, "ended": True, "tokens": ["a"]} | response
    record = {name: value for name, value in record.items() if value is not None}
    config = RLHFConfig(max_new_tokens=8, **settings)
    assert shaped_by_hand(record, config) == pytest.approx(shaped)


def test_a_response_that_did_not_end_is_said_to_be_so():
    response = {"prompt": "p", "tokens": ["a"], "raw_score": 0.5, "score": 0.5, "ended": False}
    run_ = Run([{"entropy": 1.0}], settings_of(missing_eos_penalty=0.25), {0: [response] * 2})
    assert "0.5, the response did not end, and by the settings its score is 0.25" in (
        score_shaping_off(run_)
    )


@pytest.mark.parametrize(
    "scores, seen",
    [
        ([0.3015, 0.3015], None),
        ([0.3017, 0.3017], "2 of 2 recorded scores differ"),
        ([None, 0.4], None),
        ([None, 0.4, 0.4], "2 of 2 recorded scores differ"),
        (
            [0.304, 0.304],
            "2 of 2 recorded scores differ, such as 0.304 of the response 'a' to 'p' in iteration "
            "0: the reward functions gave 0.9, the response ended by itself, and by the settings "
            "its score is 0.3",
        ),
        ([0.4], None),
        ([0.3] * 38 + [0.4] * 2, None),  # one in twenty
        ([0.3] * 37 + [0.4] * 2, "2 of 39 recorded scores differ"),
    ],
)
def test_scores_that_are_shaped_otherwise(scores, seen):
    "A raw score of 0.9 is clipped to 0.3; the tolerance is 0.001 of 0.3 + 0.3 + 0.9, and 0.0001."
    responses = []
    for score in scores:
        response = {"prompt": "p", "tokens": ["a"], "raw_score": 0.9, "ended": True}
        responses.append(response | {"score": score})
    found = score_shaping_off(Run([{"entropy": 1.0}], settings_of(reward_clip=0.3), {0: responses}))
    if seen is None:
        assert found is None
    else:
        assert seen in found


@pytest.mark.parametrize(
    "ended, end, number, seen",
    [
        (True, 1, 2, None),
        (False, None, 2, None),
        (True, None, 1, None),
        (
            True,
            None,
            2,
            "2 recorded responses, such as 'a b' to 'p' in iteration 0, which counts as ended; its "
            "last token 'b' is no end token",
        ),
        (
            False,
            1,
            2,
            "2 recorded responses, such as 'a b' to 'p' in iteration 0, which counts as cut off; "
            "its last token 'b' is an end token",
        ),
    ],
)
def test_a_response_ends_with_its_end_token(ended, end, number, seen):
    responses = [{"prompt": "p", "tokens": ["a", "b"], "ended": ended, "end": end}] * number
    assert ends_miscounted(Run([{"entropy": 1.0}], settings_of(), {0: responses})) == seen


@pytest.mark.parametrize(
    "changes, settings",
    [
        ({"ended": "unknown"}, {}),
        ({"end": "unknown"}, {}),
        ({"from_environment": [False, False]}, {}),
        ({}, {"stop_strings": ("b",)}),
    ],
)
def test_ends_that_are_not_compared(changes, settings):
    response = {"prompt": "p", "tokens": ["a", "b"], "ended": True, "end": None} | changes
    response = {name: value for name, value in response.items() if value != "unknown"}
    run_ = Run([{"entropy": 1.0}], settings_of(**settings), {0: [response] * 2})
    assert ends_miscounted(run_) is None


def test_the_prompt_of_the_data_is_quoted():
    same = {"prompt": "p", "tokens": ["a"], "prompt_difference": None}
    other = same | {"prompt_difference": "token 0 is 'x'", "columns": {"prompt": "P"}}
    metrics = [{"entropy": 1.0}]
    assert prompt_tokens_off(Run(metrics, None, {0: [same, same]})) is None
    found = prompt_tokens_off(Run(metrics, None, {0: [same], 2: [other, other, {"prompt": "q"}]}))
    assert found == (
        "in 2 of 3 recorded responses, such as one to 'P' in iteration 2: token 0 is 'x'"
    )
    bare = {"prompt": "p", "tokens": ["a"], "prompt_difference": "token 0 is 'x'"}
    assert "such as one to 'p' in iteration 0" in prompt_tokens_off(Run(metrics, None, {0: [bare]}))


def test_a_held_out_prompt_is_quoted():
    tokens = {0: [{"prompt": "p"}, {"prompt": "q", "is_held_out": False}]}
    tokens[1] = [{"prompt": "r", "is_held_out": True}, {"prompt": "s", "is_held_out": True}]
    found = held_out_prompts_trained(Run(rows_of(prompts_held_out=[0.0, 0.5]), None, tokens))
    assert found == (
        "in 1 of 2 iterations prompts are held out as well, such as 'r'; most in iteration 1, 50% "
        "of its prompts"
    )


PULLED = {
    "prompt": "p",
    "tokens": ["a", "b"],
    "log_ratio_to_reference": [0.0, 0.0],
    "advantages": [1.0, 1.0],
}


def pulled_run(ratios, gradients, **settings):
    "One response of two tokens, each of which counts a half."
    log_ratios = [math.log(ratio) for ratio in ratios]
    response = PULLED | {"log_ratio": log_ratios, "negative_gradient": gradients}
    usual = {"kl_placement": "reward", "clip": 0.25, "aggregation": "token_mean"}
    rows = [{"entropy": 1.0, "beta": settings.get("beta", 0.5)}]
    return Run(rows, settings_of(**usual | settings), {0: [response]})


@pytest.mark.parametrize(
    "ratios, gradients, settings, seen",
    [
        ([1.1, 1.3], [0.55, 0.0], {}, None),
        ([1.1, 1.1], [0.55, 0.0], {}, None),  # one token alone
        (
            [1.1, 1.2],
            [0.0, 0.0],
            {},
            "2 recorded tokens, such as one of ratio 1.1 and advantage 1, which has no gradient "
            "and should have one: token 0, 'a'",
        ),
        (
            [1.3, 1.4],
            [0.65, 0.7],
            {},
            "2 recorded tokens, such as one of ratio 1.3 and advantage 1, which has a gradient and "
            "should have none: token 0, 'a'",
        ),
        ([1.3, 1.4], [0.65, 0.7], {"clip_high": 0.5}, None),
        ([1.255, 1.255], [0.6275, 0.6275], {}, None),  # within 0.01 of a bound
        ([1.245, 1.245], [0.0, 0.0], {}, None),
        ([1.3, 1.4], [0.65, 0.7], {"kl_placement": "loss"}, None),
        ([1.3, 1.4], [0.65, 0.7], {"kl_placement": "loss", "beta": 0.0}, "2 recorded tokens"),
    ],
)
def test_the_clip_holds_the_tokens_beyond_its_bounds(ratios, gradients, settings, seen):
    found = clip_bounds_off(pulled_run(ratios, gradients, **settings))
    if seen is None:
        assert found is None
    else:
        assert found.startswith(seen)


@pytest.mark.parametrize(
    "level, ratio, is_found",
    [
        # the bound is 1.25; near is 1 % of the whole ratio
        ("product", 1.23, True),
        ("product", 1.243, False),
        ("sequence", 1.23, True),
        ("sequence", 1.243, False),
    ],
)
def test_a_whole_ratio_near_a_bound(level, ratio, is_found):
    "A product of two ratios, or a mean of two log-ratios; the recorded gradients are 0."
    token_ratio = math.sqrt(ratio) if level == "product" else ratio
    run_ = pulled_run([token_ratio] * 2, [0.0, 0.0], ratio_level=level)
    assert (clip_bounds_off(run_) is not None) == is_found


@pytest.mark.parametrize(
    "log_ratio, advantage, gradient, is_found",
    [
        (14.9, 1.0, 0.0, True),
        (15.1, 1.0, 0.0, False),  # a ratio beyond e¹⁵
        (-15.1, 1.0, 0.0, False),
        # a gradient of up to 10⁻¹² is 0
        (0.0, 1.0, 1e-12, True),
        (0.0, 1.0, -1e-12, True),
        (0.0, 1.0, 1e-11, False),
        (0.0, 0.0, 0.5, False),  # nothing is said of an advantage of 0
    ],
)
def test_what_counts_as_held(log_ratio, advantage, gradient, is_found):
    settings = {"surrogate": "ratio"}
    run_ = pulled_run([math.exp(log_ratio)] * 2, [gradient] * 2, **settings)
    run_.tokens[0][0]["advantages"] = [advantage] * 2
    assert (clip_bounds_off(run_) is not None) == is_found


def test_the_first_token_that_is_held_wrongly_is_named():
    "Of three tokens the second and the third have no gradient; the third is -2."
    response = PULLED | {
        "tokens": ["a", "b", "c"],
        "log_ratio": [0.0, 0.0, 0.0],
        "log_ratio_to_reference": [0.0] * 3,
        "advantages": [1.0, -2.0, 3.0],
        "negative_gradient": [1 / 3, 0.0, 0.0],
    }
    settings = settings_of(kl_placement="reward", aggregation="token_mean")
    found = clip_bounds_off(Run([{"entropy": 1.0, "beta": 0.5}], settings, {0: [response]}))
    assert found.startswith(
        "2 recorded tokens, such as one of ratio 1 and advantage -2, which has no gradient and "
        "should have one: token 1, 'b'"
    )


@pytest.mark.parametrize(
    "factor, tokens, rounding, is_found",
    [
        (1.0016, 24, 1e-6, True),
        (1.0014, 24, 1e-6, False),
        (1.0016, 23, 1e-6, False),
        (1.0016, 24, 2e-6, False),
        (1.0016, 24, None, False),
        (1.049, 24, 1e-6, True),
        (1.051, 24, 1e-6, False),  # a factor, and no rounding
    ],
)
def test_gradients_that_have_lost_digits(factor, tokens, rounding, is_found):
    response = {
        "prompt": "p",
        "tokens": ["a"] * tokens,
        "log_ratio": [0.0] * tokens,
        "log_ratio_to_reference": [0.0] * tokens,
        "advantages": [1.0] * tokens,
        "negative_gradient": [factor / tokens] * tokens,
    }
    settings = settings_of(kl_placement="reward", aggregation="token_mean")
    rows = rows_of(entropy=[1.0], rounding=rounding)
    found = token_gradient_rounded(Run(rows, settings, {0: [response]}))
    assert (found is not None) == is_found
    if is_found:
        assert f"over {tokens} tokens" in found


@pytest.mark.parametrize(
    "log_ratio, weight, placement, is_found",
    [
        # ratios within e^±0.5, and gradients above 5 % of what the advantage is worth
        (0.49, 1.0, "reward", True),
        (-0.49, 1.0, "reward", True),
        (0.51, 1.0, "reward", False),
        (-0.51, 1.0, "reward", False),
        (0.0, 0.06, "reward", True),
        (0.0, 0.04, "reward", False),
        (0.0, 1.0, "loss", False),
    ],
)
def test_gradients_of_which_the_digits_are_compared(log_ratio, weight, placement, is_found):
    "24 tokens, each of 0.2 % more than weight · ratio / 24."
    response = {
        "prompt": "p",
        "tokens": ["a"] * 24,
        "log_ratio": [log_ratio] * 24,
        "log_ratio_to_reference": [0.0] * 24,
        "advantages": [1.0] * 24,
        "weights": [weight] * 24,
        "negative_gradient": [1.002 * weight * math.exp(log_ratio) / 24] * 24,
    }
    settings = settings_of(kl_placement=placement, surrogate="ratio", aggregation="token_mean")
    rows = rows_of(entropy=[1.0], rounding=1e-6, beta=0.0)
    found = token_gradient_rounded(Run(rows, settings, {0: [response]}))
    assert (found is not None) == is_found


@pytest.mark.parametrize(
    "returns, is_found",
    [
        # values 1 and 2, γ = λ = ½: Â is 1.25 and 1, see the rewards of 1 and 3
        ([2.25, 3.0], False),
        ([2.27, 3.02], False),
        ([2.35, 3.1], True),
        # twice 0.001·(1 + 3 + 2·2) + 10⁻⁵, and 1 % of Â: 0.0285 and 0.0260
        ([2.278, 3.0255], False),
        ([2.222, 2.9745], False),
        ([2.279, 3.0265], True),
        ([2.221, 2.9735], True),
    ],
)
def test_returns_less_values_are_gae(returns, is_found):
    response = {
        "prompt": "p",
        "tokens": ["a", "b"],
        "rewards": [1.0, 3.0],
        "values": [1.0, 2.0],
        "returns": returns,
    }
    settings = settings_of(advantage="gae", gamma=0.5, lam=0.5)
    found = returns_off(Run([{"entropy": 1.0}], settings, {0: [response]}))
    assert (found is not None) == is_found
    if is_found:
        assert found.startswith("returns less values: 2 of 2 recorded numbers differ")


@pytest.mark.parametrize(
    "rule",
    [
        other_beta,
        updates_missing,
        gradient_not_clipped,
        other_best_iteration,
        score_shaping_off,
        ends_miscounted,
        clip_bounds_off,
        token_gradient_rounded,
        returns_off,
    ],
)
def test_without_settings_nothing_is_expected(rule):
    columns = {
        "beta": [0.1, 0.2],
        "kl_to_reference": 1.0,
        "updates": 99,
        "tokens": 40,
        "response_length": 4.0,
        "clipped_grad_norm": 9.0,
        "held_out_reward": [0.25, 0.75],
        "rounding": 1e-7,
    }
    response = {
        "prompt": "p",
        "tokens": ["a"] * 24,
        "raw_score": 0.5,
        "score": 0.9,
        "ended": True,
        "end": None,
        "rewards": [1.0] * 24,
        "values": [0.0] * 24,
        "returns": [99.0] * 24,
        "log_ratio": [0.0] * 24,
        "log_ratio_to_reference": [0.0] * 24,
        "advantages": [1.0] * 24,
    }
    gradient = 1.002 / 48 if rule is token_gradient_rounded else 0.0
    responses = [response | {"negative_gradient": [gradient] * 24}] * 2
    tokens = {0: responses, 1: responses}
    settings = settings_of(
        kl_placement="reward", keep_best=True, eval_every=1, aggregation="token_mean"
    )
    best = {"best_iteration": 1}
    assert rule(Run(rows_of(**columns), settings | best, tokens)) is not None
    assert rule(Run(rows_of(**columns), best, tokens)) is None


# ---------------------------------------------------------------- a trained run, one column changed
def found(metrics, config, tokens=None):
    return {finding.name for finding in diagnose(metrics, config, tokens)}


def later(name):
    "The column as if each number were read one token late."

    def change(response, i, k):
        response[name] = [*response[name][1:], 0.0]

    return each(change)


def noisy(name):
    def change(response, i, k):
        response[name] = [x + 0.05 * (k + 1) for x in response[name]]

    return each(change)


def other_lambda(response, i, k):
    response["returns"] = [
        v + 1.3 * (r - v) for r, v in zip(response["returns"], response["values"])
    ]


def wider_clip(response, i, k):
    "Two tokens beyond the clip of 0.2 that are still pulled at."
    response["log_ratio"] = [0.24] * len(response["log_ratio"])
    response["advantages"] = [1.0] * len(response["log_ratio"])
    share = 0.1
    response["negative_gradient"] = [share * 1.27] * len(response["log_ratio"])


def rounded(response, i, k):
    response["negative_gradient"] = [x * 1.003 for x in response["negative_gradient"]]


ONE_PROMPT = {"group_size": 4, "advantage": "gae"}
SHAPED = {"reward_clip": 0.3, "missing_eos_penalty": 0.2, "overlong_buffer": 3}
CHANGES = [
    ("values of one state", later("values"), ONE_PROMPT),
    ("values of one state", noisy("values"), ONE_PROMPT),
    ("reference of one state", noisy("ref_logprobs"), ONE_PROMPT),
    ("policy of one state", noisy("old_logprobs"), ONE_PROMPT),
    ("groups mixed", each(lambda r, i, k: r.update(group_prompts=2)), ONE_PROMPT),
    ("tokens behind the end", each(lambda r, i, k: r.update(end=-1)), {}),
    (
        "columns of other rows",
        each(lambda r, i, k: r.update(columns={"answer": f"{i}"})),
        {"batch_size": 16},
    ),
    ("score shaping off", each(lambda r, i, k: r.update(score=r["score"] + 0.4)), SHAPED),
    ("score shaping off", each(lambda r, i, k: r.update(ended=not r["ended"])), SHAPED),
    ("ends miscounted", each(lambda r, i, k: r.update(ended=not r["ended"])), {}),
    (
        "prompt tokens off",
        each(lambda r, i, k: r.update(prompt_difference="token 0 is 'a', by the tokenizer 'b'")),
        {},
    ),
    ("returns off", each(other_lambda), {}),
    ("clip bounds off", each(wider_clip), {}),
    ("token gradient rounded", each(rounded), {}),
]


@pytest.mark.parametrize("name, change, settings", CHANGES, ids=lambda x: str(x)[:25])
def test_a_changed_record_is_named_and_the_healthy_one_is_not(name, change, settings):
    metrics, config, tokens = run(**settings)
    before = found(metrics, config, tokens)
    change(tokens)
    assert name not in before
    assert name in found(metrics, config, tokens)


def test_every_rule_on_tokens_is_tried_above():
    assert {name for name, *_ in CHANGES} == {rule.name for rule in AGREEMENT_RULES if rule.columns}


@pytest.mark.parametrize(
    "pairs, bad, named",
    [(9, 2, True), (10, 2, False), (10, 3, True), (4, 1, False), (2, 2, True)],
)
def test_a_fifth_of_the_pairs_may_differ_and_one_always(pairs, bad, named):
    "Each iteration has two responses of one token, so one pair; the values of some are apart."
    metrics, config, _ = run(**ONE_PROMPT)
    response = {"prompt": "a", "tokens": ["b"]}
    tokens = {
        i: [response | {"values": [0.5]}, response | {"values": [0.9 if i < bad else 0.5]}]
        for i in range(pairs)
    }
    evidence = values_of_one_state(Run(metrics, config, tokens))
    assert (evidence is not None) == named
    if named:
        assert evidence.startswith(f"{bad} of {pairs} pairs")


def test_two_reward_functions_that_always_agree_are_named():
    metrics, config, _ = run()
    twice = copy.deepcopy(metrics)
    for i, row in enumerate(twice):
        row |= {"reward_mean/length": 0.1 * i, "reward_mean/truth": 0.1 * i}
    apart = [row | {"reward_mean/truth": 0.2 * i} for i, row in enumerate(twice)]
    still = [row | {"reward_mean/length": 0.0, "reward_mean/truth": 0.0} for row in twice]
    assert "equal parts" in found(twice, config)
    assert "equal parts" not in found(apart, config) | found(still, config)


@pytest.mark.parametrize("best, named", [(2, False), (4, True), (3, False)])
def test_the_best_iteration_has_the_highest_held_out_reward(best, named):
    "Evaluated are iterations 2 and 4, as the first of which the log counts 1; 3 was never."
    metrics, config, _ = run()
    rewards = {1: 0.9, 3: 0.4}
    rows = [
        row | ({"held_out_reward": rewards[i], "held_out_kl": 0.1} if i in rewards else {})
        for i, row in enumerate(metrics)
    ]
    config = config | {"keep_best": True, "eval_every": 2, "best_iteration": best}
    assert RLHFConfig(**{k: x for k, x in config.items() if k != "best_iteration"})
    assert ("other best iteration" in found(rows, config)) == named


def test_a_score_is_shaped_by_hand_as_the_settings_say():
    "R of 0.9 clipped to 0.3, less 0.2 without an end, less 2/3 for five of six tokens, buffer 3."
    config = RLHFConfig(max_new_tokens=6, **SHAPED)
    response = {"raw_score": 0.9, "ended": False, "tokens": ["a"] * 5}
    assert shaped_by_hand(response, config) == pytest.approx(0.3 - 0.2 - 2 / 3)
    assert shaped_by_hand(response | {"ended": True}, config) == pytest.approx(0.3 - 2 / 3)
    assert shaped_by_hand(response | {"raw_score": -0.1}, RLHFConfig()) == -0.1
    assert shaped_by_hand({"ended": True, "tokens": ["a"]}, config) is None


@pytest.mark.parametrize(
    "settings, change",
    [
        ({"stop_strings": ("b",)}, {"ended": True, "end": None}),
        ({}, {"ended": False, "from_environment": [False] * 6}),
    ],
)
def test_where_others_may_end_a_response_its_end_is_not_compared(settings, change):
    metrics, config, tokens = run()
    for responses in tokens.values():
        for response in responses:
            response |= change
            if "from_environment" in response:
                response["from_environment"] = [False] * len(response["tokens"])
    assert "ends miscounted" not in found(metrics, config | settings, tokens)


@pytest.mark.parametrize("name", ["prompts_held_out", "weights_missing"])
def test_one_number_above_zero_is_named(name):
    "Of the fourth of eight iterations; settings without an evaluation have no held-out prompts."
    rule = {"prompts_held_out": "held out prompts trained", "weights_missing": "weights missing"}
    metrics, config, _ = run()
    config = config | {"eval_every": 2}
    healthy = [row | {name: 0.0} for row in metrics]
    ill = [row | {name: 0.25 if i == 3 else 0.0} for i, row in enumerate(metrics)]
    assert rule[name] not in found(healthy, config)
    assert rule[name] in found(ill, config)


def test_a_held_out_prompt_that_is_trained_on_is_quoted():
    metrics, config, tokens = run()
    rows = [row | {"prompts_held_out": 0.5} for row in metrics]
    for responses in tokens.values():
        for response in responses:
            response["is_held_out"] = response["prompt"] == "b c"
    findings = diagnose(rows, config | {"eval_every": 2}, tokens)
    (finding,) = [f for f in findings if f.name == "held out prompts trained"]
    assert "'b c'" in finding.evidence and "50%" in finding.evidence
