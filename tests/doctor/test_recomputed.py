"""Each rule on recorded tokens: nothing on a run as the settings ask for it, the finding where one
column is changed.
"""

import pytest
from small_runs import each, run

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.recomputed import (
    RECOMPUTED_RULES,
    other_schedule,
    token_gradient_off,
)
from instruct_goose.doctor.rules import Run


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
