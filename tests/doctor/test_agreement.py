"""Each rule that compares two records of one thing: nothing on a healthy run, the finding where one
of the two is changed.
"""

import copy

import pytest
from small_runs import each, run

from instruct_goose.config import RLHFConfig
from instruct_goose.doctor.agreement import AGREEMENT_RULES, shaped_by_hand, values_of_one_state
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.rules import Run


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
