"""Each rule that compares two records of one thing: nothing on a healthy run, the finding where one
of the two is changed.
"""

import copy

import pytest
from small_runs import each, run

from instruct_goose.config import RLHFConfig
from instruct_goose.doctor.agreement import AGREEMENT_RULES
from instruct_goose.doctor.diagnosis import diagnose


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
