"""The doctor on metrics made by hand, one rule at a time; the gallery's recorded runs are shown to
it in its guide.
"""

import json
import math
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instruct_goose.config import RLHFConfig
from instruct_goose.doctor.diagnosis import LADDER, OF_THE_BUILT_IN_LOSS, RULES, diagnose, report
from instruct_goose.doctor.rules import KEYS, Run
from instruct_goose.tasks.gallery import to_metrics

root = Path(__file__).parents[2]


def names(metrics, config=None):
    return [f.name for f in diagnose(metrics, config)]


def test_the_quickstart_as_measured_is_healthy_and_without_a_price_it_drifts():
    measured = json.loads((root / "evidence/quickstart.json").read_text("utf-8"))
    for run in (run for block in measured["machines"].values() for run in block["runs"]):
        assert not names(to_metrics(run["curves"])), (run["seed"], run["draw"])
        assert "drift" in names(to_metrics(run["beta_0"]["curves"])), (run["seed"], run["draw"])


# ---------------------------------------------------------------- one rule at a time
HEALTH = dict(
    reward_mean=0.5,
    total_reward_mean=0.4,
    reward_std=1.0,
    kl_to_reference=1.0,
    kl_estimate=1.0,
    beta=0.1,
    entropy=1.5,
    response_length=8.3,
    finished=1.0,
    tokens=830,
    return_std=0.8,
    value_mean=0.1,
    max_sampler_deviation=2e-6,
    sampler_kl=1e-12,
    max_ratio_deviation_first=0.0,
    clip_fraction=0.03,
    kl_to_old=0.1,
    grad_norm=0.5,
    flat_groups=None,
    rounding=2**-23,
    sampled_nll=1.5,
    sampled_nll_error=0.03,
    prompt_nll_ratio=0.3,
    prompts_given=24,
    distinct_prompts=24,
    distinct_responses=1.0,
    distinct_2=0.6,
    score_length_correlation=0.1,
    reward_noise=0.0,
    reward_shift=1e-6,
    advantage_std=0.8,
    advantage_correlation=1.0,
    value_bias=0.1,
    value_scatter=0.8,
    value_error=0.9,
    return_gamma=1.0,
    return_lam=0.95,
    policy_gradient_scale=1.0,
    policy_gradient_cosine=1.0,
    value_gradient_scale=1.0,
    value_gradient_cosine=1.0,
    entropy_gradient_scale=1.0,
    stale_gradient=0.0,
    weights_moved=1.0,
    kl_to_old_exact=0.2,
    updates=4,
    coverage_error=0.0,
    lr=1e-3,
    weight_change_rms=2e-3,
    value_weight_change_rms=2e-3,
    tensors_unmoved=0.0,
    prompts_kept=1.0,
    prompts_ended=0.0,
    prompts_held_out=0.0,
    weights_missing=0,
    reference_weight_mean_abs=0.1,
    advantage_mean=0.0,
    clipped_grad_norm=0.5,
    tensors_without_gradient=0.0,
    moment_norm=0.3,
)


def log(n=12, **changes):
    "n iterations of a healthy run, some metrics changed: a number, or a function of the iteration."
    rows = []
    for i in range(n):
        row = HEALTH | {
            "iteration": i,
            "optimizer_step_count": 4 * i + 4,
            "kl_to_reference": 0.1 * i,
            "kl_estimate": 0.1 * i,
            "value_mean": 0.1 * i,
            "total_reward_mean": 0.5 - 0.01 * i,
        }
        rows.append(row | {k: x(i) if callable(x) else x for k, x in changes.items()})
    return rows


CAP = {"importance_mean": 0.99}


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, []),
        ({"max_sampler_deviation": lambda i: 2.0 if i == 7 else 0.0}, ["sampler mismatch"]),
        (
            CAP | {"sampler_kl": lambda i: 0.01 * i},
            ["sampler left behind"],
        ),  # 8.3 tokens: as far as the reference, .1 a response and iteration
        (
            CAP | {"sampler_kl": lambda i: 0.105 if i > 5 else 0.01},
            ["sampler left behind"],
        ),  # more than ten times as far as at first
        (CAP | {"sampler_kl": lambda i: 0.095 if i > 5 else 0.01}, []),
        (CAP | {"sampler_kl": lambda i: 0.004 * i}, []),  # a third as far
        (CAP | {"sampler_kl": lambda i: 0.006 if i > 8 else 1e-4}, []),  # too little to matter
        (
            CAP | {"sampler_kl": lambda i: 0.01 * i, "reference_moved": 1.0},
            [],
        ),  # the reference is near because it follows
        (
            CAP | {"sampler_kl": 0.05},
            ["sampler mismatch"],
        ),  # from the first iteration on: another temperature
        ({"max_ratio_deviation_first": 1.0}, ["noisy forward"]),
        ({"kl_to_reference": lambda i: 0.01 + 0.1 * i}, ["start KL"]),
        ({"kl_estimate": lambda i: 0.3 * i}, ["KL estimate off"]),
        ({"total_reward_mean": lambda i: 0.5 + 0.01 * i}, ["KL sign"]),
        (
            {"total_reward_mean": lambda i: 0.5 + 0.01 * i, "max_sampler_deviation": 2.0},
            ["sampler mismatch", "negative KL"],
        ),
        ({"total_reward_mean": 0.5}, []),  # the KL is in the loss
        ({"grad_norm": 0.0}, ["no policy gradient"]),
        ({"grad_norm": 0.0, "reward_std": 0.0}, ["equal rewards"]),
        ({"flat_groups": 0.9}, ["equal rewards"]),
        ({"kl_to_old": 0.0, "clip_fraction": 0.0}, ["ratio never moves"]),
        ({"value_mean": 0.0}, ["values stand still"]),
        ({"return_std": 16.0}, ["reward scale"]),
        (
            {"response_length": lambda i: 11.0 + i % 2, "finished": 0.02, "tokens": 1100},
            ["padding counted"],
        ),
        (
            {
                "response_length": lambda i: 11.0 + i % 2,
                "tokens": lambda i: 11 + i % 2,
                "finished": 0.0,
            },
            [],
        ),  # one response: always whole
        ({"response_length": 20.0, "finished": 0.0}, ["never ends"]),
        ({"response_length": 1.0, "finished": 1.0}, []),  # short, and ended
        ({"kl_to_old": lambda i: 5.0 if i in (3, 8) else 0.1}, ["large steps"]),
        ({"kl_to_old": 5.0, "clip_fraction": 0.0}, ["large steps", "no clip"]),
        (
            {
                "kl_to_reference": lambda i: 2.0 * i,
                "kl_estimate": lambda i: 2.0 * i,
                "total_reward_mean": lambda i: 0.5 - 0.2 * i,
            },
            ["drift"],
        ),
        (
            {"entropy": lambda i: 1.5 * 0.7**i, "sampled_nll": lambda i: 1.5 * 0.7**i},
            ["entropy collapse"],
        ),
        ({"sampled_nll": 1.2}, ["nll off entropy"]),
        ({"sampled_nll": lambda i: 1.5 + 0.1 * (-1) ** i}, []),  # chance
        (
            {"sampled_nll": 1.2, "sampled_nll_error": 0.2},
            [],
        ),  # six standard errors of twelve iterations are .35
        ({"prompt_nll_ratio": 1.9}, ["foreign prompts"]),
        ({"prompt_nll_ratio": 1.0}, []),  # a model that has learnt nothing
        ({"distinct_prompts": 1}, ["prompts lost"]),
        ({"reward_noise": 0.5, "reward_shift": 0.5}, ["noisy reward"]),
        ({"reward_shift": 2.0}, ["reward of other rows"]),
        ({"score_length_correlation": -0.99}, ["length is reward"]),
        ({"advantage_correlation": 0.1}, ["advantages of other rows"]),
        (
            {"advantage_correlation": 0.1, "advantage_std": 1e-9, "value_mean": None},
            [],
        ),  # groups of equal rewards: rounding
        ({"advantage_std": 0.0, "advantage_correlation": None}, ["returns are values"]),
        ({"return_gamma": 0.9}, ["other discount"]),
        ({"policy_gradient_scale": 4.0}, ["policy loss scale"]),
        ({"policy_gradient_scale": -1.0}, ["policy loss scale"]),
        (
            {"policy_gradient_scale": lambda i: 0.1 if i else 1.0, "total_reward_mean": 0.5},
            [],
        ),  # the KL in the loss pulls too
        ({"reference_weight_mean_abs": lambda i: 0.1 + 0.01 * i}, ["reference moves"]),
        (
            {"reference_weight_mean_abs": lambda i: 0.1 + 0.01 * i, "reference_moved": 1.0},
            [],
        ),  # as asked
        ({"prompts_kept": 0.5}, ["prompts cut"]),
        ({"prompts_ended": 1.0}, ["prompts that end"]),
        ({"prompts_held_out": 0.1}, ["held out prompts trained"]),
        ({"weights_missing": 1}, ["weights missing"]),
        ({"policy_gradient_scale": 0.0, "grad_norm": 0.0}, ["no policy gradient"]),
        ({"value_gradient_scale": 4.0}, ["value loss off"]),
        ({"entropy_gradient_scale": -1.0}, ["entropy bonus off"]),
        ({"stale_gradient": 0.2}, ["stale gradients"]),
        ({"finished": 0.0, "response_length": lambda i: 8.3 + 0.1 * i}, ["ends unseen"]),
        ({"finished": 0.02, "response_length": lambda i: 8.3 + 0.1 * i}, ["ends unseen"]),
        ({"finished": 0.03, "response_length": lambda i: 8.3 + 0.1 * i}, []),
        ({"response_length": lambda i: max(3.3, 17.4 - 2 * i)}, ["length collapse"]),
        ({"distinct_2": lambda i: max(0.1, 0.6 - 0.1 * i)}, ["variety collapse"]),
        ({"reward_std": 0.01}, ["small rewards"]),
        (
            {"kl_to_reference": 0.0, "kl_estimate": 0.0, "total_reward_mean": 0.5},
            ["reference is the policy"],
        ),
        (
            {"kl_estimate": lambda i: 0.1 * i + 0.2, "reference_moved": 1.0},
            ["reference of other tokens"],
        ),
        ({"policy_gradient_cosine": 0.98}, ["policy loss direction"]),
        ({"weights_moved": 0.001}, ["policy stands still"]),
        ({"weights_moved": 0.3, "rounding": 2**-7}, ["steps rounded away"]),
        ({"weights_moved": 0.3}, []),
        ({"tensors_without_gradient": 0.2}, ["parts without gradient"]),
        ({"tensors_without_gradient": 0.2, "response_length": 1.0, "tokens": 100}, []),
        ({"distinct_responses": 0.1}, ["same responses"]),
        ({"value_error": lambda i: 0.5 * i}, ["harmful values"]),
        (
            {"reward_std": 0.01, "total_reward_mean": 0.5},
            [],
        ),  # no KL in the reward: the scale is free
    ],
)
def test_each_rule_alone(changes, found):
    assert names(log(**changes), {"gamma": 1.0, "lam": 0.95}) == found


SETTINGS_ASKED = asdict(RLHFConfig(steps=12, lr=1e-3, batch_size=100, max_kl_to_reference=9.0))


@pytest.mark.parametrize(
    "changes, settings, name",
    [
        ({"coverage_error": 0.5}, {}, "other rows learnt"),
        ({"optimizer_step_count": 4}, {}, "optimizer steps"),
        ({"optimizer_step_count": lambda i: 2 * i + 2}, {}, "optimizer steps"),
        ({"lr": lambda i: 1e-3 * 0.5**i}, {}, "other schedule"),
        ({}, {"lr_schedule": "linear"}, "other schedule"),
        ({"weight_change_rms": 0.2}, {}, "other step size"),
        ({"value_weight_change_rms": 1e-7}, {}, "other step size"),
        ({"tensors_unmoved": 0.2}, {}, "parts stand still"),
        ({"updates": 3, "optimizer_step_count": lambda i: 3 * i + 3}, {}, "updates missing"),
        ({"moment_norm": 1.1}, {}, "gradient not clipped"),
        ({"clipped_grad_norm": 1.1}, {}, "gradient not clipped"),
        ({"beta": lambda i: 0.1 + 0.001 * i}, {}, "other beta"),
        ({}, {"kl_target": 2.0}, "other beta"),
    ],
)
def test_what_the_settings_ask_for(changes, settings, name):
    assert not names(log(), SETTINGS_ASKED)
    assert name in names(log(**changes), SETTINGS_ASKED | settings)


def test_a_single_iteration_does_not_say_that_length_is_the_reward():
    assert names(log(1, score_length_correlation=0.99)) == []
    assert names(log(2, score_length_correlation=0.99)) == ["length is reward"]


def test_every_rule_is_tried_above():
    marks = test_each_rule_alone.pytestmark[0].args[1]
    more = {n for _, _, n in test_what_the_settings_ask_for.pytestmark[0].args[1]}
    assert {n for _, found in marks for n in found} | more == {
        rule.name for rule in RULES if rule.metrics and not rule.columns
    }


def test_evidence_names_numbers_and_iterations():
    (finding,) = diagnose(log(max_sampler_deviation=lambda i: 2.5 if i in (7, 9) else 0.0))
    assert (
        all(x in finding.evidence for x in ("2 of 12", "iteration 7", "2.5"))
        and finding.severity == "error"
    )
    text = report([finding])
    assert LADDER in report([]) and "no proof" in report([])
    assert all(
        x in text
        for x in (
            "ERROR",
            finding.name,
            finding.what,
            finding.evidence,
            finding.cure,
            finding.lesson,
        )
    )


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"rounding": 2**-23, "max_sampler_deviation": 1e-6}, []),
        ({"rounding": 2**-23, "max_sampler_deviation": 0.05}, ["error"]),
        ({"rounding": 2**-7, "max_sampler_deviation": 0.9}, []),  # bfloat16: a single token
        ({"rounding": 2**-7, "sampler_kl": 0.2}, ["error"]),
        ({"rounding": None, "max_sampler_deviation": 0.9}, []),
        ({"rounding": None, "max_sampler_deviation": 0.9, "sampler_kl": None}, ["error"]),
        ({"rounding": 2**-23, "max_ratio_deviation_first": 0.05}, ["error"]),
        ({"rounding": 2**-7, "max_ratio_deviation_first": 0.05}, []),
        ({"rounding": 2**-7, "max_ratio_deviation_first": 0.9}, ["error"]),
    ],
)
def test_rounding_is_no_finding_and_more_is_an_error(changes, found):
    assert [finding.severity for finding in diagnose(log(**changes))] == found


@pytest.mark.parametrize(
    "changes, config",
    [
        ({"value_mean": 0.0, "value_gradient_scale": None}, {"vf_coef": 0.0}),
        ({"response_length": 1.0, "finished": 0.0}, {"max_new_tokens": 1}),
        ({"response_length": 1.0, "finished": 0.0}, None),
        ({"return_gamma": 0.9, "return_lam": 0.0}, {"gamma": 0.9, "lam": 0.0}),
        ({"return_gamma": 0.9}, None),
        (
            {"weights_moved": 0.0, "kl_to_old": 0.0, "value_mean": 0.0, "clip_fraction": 0.0},
            {"lr": 0.0},
        ),
        ({"kl_to_old": 0.0, "clip_fraction": 0.0}, {"epochs": 1, "minibatches": 1}),
    ],
)
def test_what_the_settings_ask_for_is_no_finding(changes, config):
    assert names(log(**changes), config) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_lessons_exist_and_names_are_words(rule):
    assert (root / "nbs" / f"{rule.lesson}.ipynb").exists()
    assert rule.severity in ("error", "warning") and rule.what and rule.cure
    assert {*rule.metrics} <= {*KEYS}


# ---------------------------------------------------------------- what is missing
@pytest.mark.parametrize("key", [k for k in KEYS if k != "iteration"])
def test_a_metric_may_be_missing_or_none_anywhere(key):
    assert names([{k: x for k, x in m.items() if k != key} for m in log()]) == []
    assert names(log(**{key: None})) == []
    assert names([m | {key: None} if i % 3 else m for i, m in enumerate(log())]) == []
    assert names(log(2, **{key: None})) == []


def test_one_number_is_enough_and_the_report_says_what_was_not_looked_for():
    few = [{"entropy": 1.5}, {"entropy": 1.4}]
    unread = report([], few).rpartition("for want of numbers: ")[2].rstrip(".").split(", ")
    needs_more = [rule.name for rule in RULES if {*rule.metrics, *rule.columns} - {"entropy"}]
    assert diagnose(few) == [] and unread == needs_more
    assert report([], log()).rpartition("for want of numbers: ")[2].rstrip(".").split(", ") == [
        rule.name for rule in RULES if rule.columns
    ]


def test_what_cannot_be_wrong_by_the_settings_is_not_listed():
    few = [{"entropy": 1.5}, {"entropy": 1.4}]
    unread = report([], few, config={"advantage": "group_mean", "beta": 0.0, "kl_target": None})
    for absent in ("values stand still", "value loss off", "start KL", "KL sign", "drift"):
        assert absent in report([], few) and absent not in unread
    assert "noisy forward" in unread and "equal rewards" in unread


OF_VALUES = {
    "values stand still",
    "value loss off",
    "returns are values",
    "reward scale",
    "other discount",
    "value gradient off",
    "harmful values",
    "values of one state",
    "returns off",
}
OF_A_CHARGED_KL = {"negative KL", "KL sign", "small rewards", "KL penalty off", "other beta"}
OF_A_REFERENCE = {
    "start KL",
    "foreign prompts",
    "KL estimate off",
    "drift",
    "reference moves",
    "reference is the policy",
    "reference of other tokens",
    "reference of one state",
}


@pytest.mark.parametrize(
    "settings, logged, cannot_be_wrong",
    [
        ({"advantage": "gae"}, {}, set()),
        ({"advantage": "group_mean"}, {}, OF_VALUES),
        ({"beta": 0.1}, {}, set()),
        ({"beta": 0.0}, {}, OF_A_CHARGED_KL | OF_A_REFERENCE),
        ({"beta": 0.0}, {"kl_to_reference": 0.1}, OF_A_CHARGED_KL),
        ({"beta": 0.0, "kl_target": 1.0}, {}, set()),
        ({"group_size": 1}, {}, {"groups mixed"}),
        ({"group_size": 2}, {}, set()),
        ({"ent_coef": 0.0}, {}, {"entropy bonus off"}),
        ({"ent_coef": 0.1}, {}, set()),
        ({"ent_coef": 0.0, "entropy_target": 1.0}, {}, set()),
        ({"importance_cap": None}, {}, {"sampler left behind"}),
        ({"importance_cap": 2.0}, {}, set()),
        ({"eval_every": None}, {}, {"held out prompts trained"}),
        ({"eval_every": 1}, {}, set()),
        ({"recheck_every": None}, {}, {"noisy reward", "reward of other rows"}),
        ({"recheck_every": 1}, {}, set()),
    ],
)
def test_the_settings_say_what_cannot_be_wrong(settings, logged, cannot_be_wrong):
    run = Run([{"entropy": 1.5} | logged], settings)
    assert {rule.name for rule in RULES if not rule.applies(run)} == cannot_be_wrong


def test_rules_that_need_no_certain_number():
    "They read a summary, or whatever columns there are; each other rule says what it reads."
    assert {rule.name for rule in RULES if not rule.metrics and not rule.columns} == {
        "learnt rows held out",
        "few pairs",
        "chosen falls",
        "equal parts",
        "other best iteration",
    }


@pytest.mark.parametrize(
    "low, high, mean, says",
    [
        (0.0, 1.0, 1.0, "all right"),
        (0.0, 1.0, 0.0, "all wrong"),
        (0.0, 1.0, 0.5, "Some prompts are always right"),
        (0.0, 0.0, 0.0, "No response has earned more"),
        (None, None, None, "nothing to learn from"),
    ],
)
def test_equal_rewards_are_right_or_wrong(low, high, mean, says):
    "The run began with scores of 0 and 1."
    changes = {"reward_min": low, "reward_max": high, "reward_mean": mean, "reward_std": 0.0}
    (finding,) = diagnose(log(**changes, total_reward_mean=None))
    assert finding.name == "equal rewards" and says in finding.what


@pytest.mark.parametrize("tokens, found", [(830, True), (8.3, False)])
def test_a_single_response_has_no_equal_rewards(tokens, found):
    few = log(reward_std=0.0, tokens=tokens, sampled_nll=None)
    assert ("equal rewards" in names(few)) == found


def test_one_heavy_tailed_iteration_is_no_wrong_kl():
    "k3 of one response may be large: nothing is said unless most iterations are above the KL."
    assert names(log(kl_estimate=lambda i: 30.0 if i == 5 else 0.1 * i)) == []
    assert names(log(total_reward_mean=lambda i: 3.0 if i == 5 else 0.5 - 0.01 * i)) == []


def test_rounding_of_large_scores_is_no_kl():
    large = log(reward_mean=1e6, total_reward_mean=lambda i: 1e6 + 0.0625 * (i % 2))
    assert "KL sign" not in names(large)


def test_values_that_are_right_may_stand_still():
    assert names(log(value_mean=0.5, return_mean=0.5, return_std=0.0)) == []


def test_iterations_are_counted_where_they_are_not_logged():
    rows = [
        {k: x for k, x in m.items() if k != "iteration"}
        for m in log(max_sampler_deviation=lambda i: 2.0 if i == 5 else 0.0)
    ]
    assert "iteration 5" in diagnose(rows)[0].evidence
    later = [
        m | {"iteration": m["iteration"] + 100}
        for m in log(kl_to_reference=lambda i: 1 + 0.1 * i, kl_estimate=1.5)
    ]
    assert names(later) == []  # not the first iteration: a KL is no surprise


@pytest.mark.parametrize(
    "bad, error, says",
    [
        ([], ValueError, "the list is empty"),
        ("metrics.jsonl", TypeError, r"metrics\[0\] is 'm'"),
        ([{"entropy": 1.0}, [1.0]], TypeError, r"metrics\[1\] is \[1.0\]"),
        ([{"entropy": "high"}], TypeError, r"entropy in metrics\[0\] is 'high'"),
        ([{"entropy": True}], TypeError, "not a number"),
        (
            [{"entropy": 1.0}, {"kl_to_old": math.nan}],
            ValueError,
            r"kl_to_old in metrics\[1\] is nan",
        ),
        ([{"grad_norm": -math.inf}], ValueError, "is -inf"),
        ([{"loss": 1.0}], ValueError, "none of the numbers"),
        (
            [{"iteration": i, "entropy": 1.0} for i in (0, 1, 2, 0, 1, 2)],
            ValueError,
            r"metrics\[3\] is iteration 0 and the one before it is 2",
        ),
        (
            [{"iteration": i, "entropy": 1.0} for i in (2, 1, 0)],
            ValueError,
            r"metrics\[1\] is iteration 1",
        ),
    ],
)
def test_what_is_no_metrics_is_refused(bad, error, says, unchecked):
    with unchecked(), pytest.raises(error, match=says):
        diagnose(bad)


NUMBERS = st.one_of(
    st.floats(),
    st.floats(-1e100, 1e100),
    st.floats(0, 2),
    st.integers(),
    st.sampled_from(
        [
            1e308,
            -1e308,
            5e-324,
            10**400,
            0,
            -0.0,
            math.nan,
            math.inf,
            -math.inf,
            True,
            Fraction(10**400, 3),
        ]
    ),
)
nested = []
for _ in range(2000):
    nested = [nested]
ODD = st.one_of(
    st.none(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.just(nested),
    st.binary(max_size=3),
    NUMBERS,
)
USUAL = st.one_of(*[NUMBERS] * 6, ODD)
SETTINGS = (
    "epochs",
    "minibatches",
    "max_new_tokens",
    "vf_coef",
    "lr",
    "gamma",
    "lam",
    "top_k",
    "top_p",
    "kl_placement",
    "pair_accuracy",
    "held_out_rows",
    "held_out_seen",
)


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.one_of(*[st.dictionaries(st.sampled_from(KEYS), USUAL, max_size=12)] * 9, ODD),
        max_size=5,
    ),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(SETTINGS), USUAL)),
)
def test_only_documented_errors_come_out(unchecked, metrics, config):
    with unchecked():
        try:
            findings = diagnose(metrics, config)
        except (TypeError, ValueError) as e:
            assert "metrics" in str(e)
        else:
            assert report(findings, metrics)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                k: st.one_of(
                    st.floats(-1e100, 1e100),
                    st.sampled_from([0.0, 1.0, 5e-324, 1e-100, 1e100, -1e100]),
                    st.none(),
                )
                for k in KEYS
            },
        ),
        min_size=1,
        max_size=6,
    ),
    st.fixed_dictionaries(
        {},
        optional={
            k: st.one_of(st.floats(-1e100, 1e100), st.integers(0, 10**30), st.none())
            for k in SETTINGS
        },
    ),
)
def test_any_number_that_is_let_in_is_read_by_every_rule(metrics, config):
    metrics = [m | {"iteration": i, "entropy": 1.0} for i, m in enumerate(metrics)]
    assert report(diagnose(metrics, config), metrics)


def test_other_columns_do_not_matter_and_nothing_is_changed():
    metrics = [m | {"text": "a good film", "loss": math.inf} for m in log()]
    before = json.dumps(metrics)
    assert names(metrics) == [] and json.dumps(metrics) == before


def test_numbers_of_other_kinds_and_none_in_the_settings():
    import numpy as np

    assert not diagnose([{"entropy": np.float32(1.0)}, {"entropy": np.float64(1.0)}])
    with pytest.raises(ValueError, match="entropy in metrics\\[0\\] is 1000"):
        diagnose([{"entropy": 10**400}])
    still = [{"kl_to_old": 0.0, "grad_norm": 1.0}] * 3
    assert [f.name for f in diagnose(still, {"epochs": None, "minibatches": 2})] == [
        "ratio never moves"
    ]
    assert not diagnose([{"response_length": 0.0, "finished": 0.0, "tokens": 0}] * 2)


def test_a_loss_of_ones_own_is_no_error():
    "A run says that its loss is its own; the same numbers of the built-in one are errors."
    metrics = [
        {
            "iteration": i,
            "reward_mean": 0.0,
            "policy_gradient_scale": 3.0,
            "value_gradient_scale": 3.0,
            "entropy_gradient_scale": -5.0,
        }
        for i in range(8)
    ]
    names = {finding.name for finding in diagnose(metrics, {"ent_coef": 0.01})}
    assert {"policy loss scale", "entropy bonus off"} <= names
    own = {finding.name for finding in diagnose(metrics, {"ent_coef": 0.01, "own_loss": True})}
    assert not own & set(OF_THE_BUILT_IN_LOSS)
    assert set(OF_THE_BUILT_IN_LOSS) <= {rule.name for rule in RULES}
