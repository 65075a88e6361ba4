"Oracles: scripted judges, prompts counted by hand, a rollout that never held what is left out, and a run that was never stopped."

import itertools

import pytest
import torch
from small_trainer import TOKENIZER, no_clock
from small_trainer import trainer as small_trainer

from instruct_goose.rollouts.dynamic_sampling import resample_flat_groups

PROMPTS = ["w0 w3", "w5", "w1 w1 w2", "w8 w7", "w4", "w2", "w6 w6"]


def trainer(**changes):
    return small_trainer(
        **dict(algorithm="grpo", group_size=2, max_new_tokens=4, steps=4) | changes
    )


def only_even(prompts, completion_ids):
    "Groups of an even first word differ in length now and then; those of an odd one are always flat."
    return [
        0.0 if int(p[1]) % 2 else float(len(ids) % 2)
        for p, ids in zip(prompts, completion_ids, strict=True)
    ]


class Script:
    "Scores by call: each inner list is what the next call says."

    def __init__(self, *calls):
        self.calls, self.asked = list(calls), []

    def __call__(self, prompts):
        self.asked.append(list(prompts))
        return [float(x) for x in self.calls.pop(0)]


def test_flat_groups_give_way_to_the_next_prompts_in_their_place():
    """Four prompts, groups of two. First round: groups 0 and 2 are flat; of the two that replace them one is flat again, place 2; and
    again, which is the last round. Its place keeps the flat answers of the last prompt."""
    t, judge = trainer(redraw_flat=2), Script([1, 1, 0, 1, 2, 2, 3, 4], [5, 6, 7, 7], [8, 8])
    history = t.train(PROMPTS, judge, steps=1, progress=False)
    rounds = [call[::2] for call in judge.asked]
    assert [len(r) for r in rounds] == [4, 2, 1] and t.prompts_seen == 7
    assert sorted(sum(rounds, [])) == sorted(PROMPTS)  # one pass: each prompt once
    m = history[0]
    assert m["groups_redrawn"] == 3 and m["groups_dropped"] == 0 and m["flat_groups"] == 0.25
    assert m["reward_mean"] == pytest.approx((5 + 6 + 0 + 1 + 8 + 8 + 3 + 4) / 8)
    assert m["reward_mean_drawn"] == pytest.approx(
        (1 + 1 + 0 + 1 + 2 + 2 + 3 + 4 + 5 + 6 + 7 + 7 + 8 + 8) / 14
    )
    assert t.fresh is None  # the prompts belong to that call of train


def test_rows_and_columns_stay_together():
    t = trainer(redraw_flat=1)
    rows = [{"prompt": p, "n": i} for i, p in enumerate(PROMPTS)]
    script, kept = Script([0, 0, 1, 2, 3, 3, 4, 5], [6, 7, 8, 9]), {}

    class Keep:
        def __getattr__(self, name):
            return lambda trainer, r, *_: kept.__setitem__(name, r)

    t.callbacks = [Keep()]

    def judge(prompts, n):
        assert [PROMPTS[i] for i in n] == [p.removeprefix("<end>").strip() for p in prompts]
        return script(prompts)

    t.train(rows, judge, steps=1, progress=False)
    r = kept["on_optimize"]
    assert r.scores.tolist() == [6, 7, 1, 2, 8, 9, 4, 5]
    assert [PROMPTS[i] for i in r.columns["n"]] == r.prompts and all(
        text.startswith(p) for p, text in zip(r.prompts, r.texts, strict=True)
    )
    for i in range(8):  # the tokens are those of the text, wherever the padding is
        assert (
            TOKENIZER.decode(
                torch.cat([r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]]),
                skip_special_tokens=True,
            )
            == r.texts[i]
        )
    assert (r.old_logprobs - r.sampled_logprobs)[
        r.mask
    ].abs().max() < 1e-9  # the sampler's numbers went with their tokens


def test_a_stream_that_ends_leaves_flat_what_it_cannot_replace():
    t, judge = trainer(redraw_flat=5), Script([0, 0, 1, 1, 2, 2, 3, 3], [4, 5])
    history = t.train(iter(PROMPTS[:5]), judge, steps=1, progress=False)
    assert (
        history[0]["groups_redrawn"] == 1
        and history[0]["flat_groups"] == 0.75
        and t.prompts_seen == 5
    )


@pytest.mark.parametrize(
    "algorithm,more",
    [
        ("grpo", dict(beta=0.3)),
        ("dapo", {}),
        ("dr_grpo", dict(whiten_advantages=True)),
        ("gspo", dict(micro_batch_size=2)),
        ("grpo", dict(advantage="group_mean_batch_std", aggregation="token_mean")),
    ],
)
def test_what_is_left_out_was_never_there(algorithm, more):
    "The same weights after an iteration as of a rollout from which the rows were taken by hand, and no denominator knows of them."
    one, two = (
        trainer(algorithm=algorithm, drop_flat=drop, minibatches=2, **more)
        for drop in (True, False)
    )
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 3.0, 5.0])
    for t in (one, two):
        r = t.rollout(PROMPTS[:4])
        r.scores = scores.double()
        if t is one:
            resample_flat_groups(r, t.config, t.rollout, lambda r: r.scores)
        else:
            r = r[[2, 3, 6, 7]]
        assert len(r) == 4
        t.optimize(t.advantages(r))
    for a, b in zip(one.agent.parameters(), two.agent.parameters(), strict=True):
        assert a.equal(b)
    assert any(
        not a.equal(b)
        for a, b in zip(
            one.agent.parameters(), trainer(algorithm=algorithm).agent.parameters(), strict=True
        )
    )


@pytest.mark.parametrize("more", [dict(beta=0.5, whiten_advantages=True), dict(redraw_flat=2)])
def test_where_all_are_flat_no_step_is_taken(more):
    t = trainer(drop_flat=True, **more)
    before = [p.clone() for p in t.agent.parameters()]
    history = t.train(PROMPTS, lambda texts: [1.0] * len(texts), steps=2, progress=True)
    assert all(p.equal(b) for p, b in zip(t.agent.parameters(), before, strict=True))
    assert all(
        "grad_norm" not in m and m["groups_dropped"] == 4 and m["flat_groups"] == 1 for m in history
    )


def test_the_doctor_does_not_miss_prompts_that_were_left_out():
    from instruct_goose.doctor.rules import Run, prompts_lost

    rows = [{"iteration": i, "distinct_prompts": 1, "prompts_given": 4} for i in range(4)]
    assert prompts_lost(Run(rows)) and not prompts_lost(
        Run([row | {"groups_dropped": 3} for row in rows])
    )


def test_a_resumed_run_draws_the_same_prompts():
    def prompts(seen=0):
        return itertools.islice(itertools.cycle(PROMPTS), seen, None)

    settings = dict(redraw_flat=3, drop_flat=True)
    whole = trainer(**settings)
    expected = whole.train(prompts(), only_even, progress=False)
    assert sum(m["groups_redrawn"] for m in expected) > 3
    first, again = trainer(**settings), trainer(**settings)
    first.train(prompts(), only_even, steps=2, progress=False)
    again.load_state(*first.state())
    rest = again.train(prompts(again.prompts_seen), only_even, progress=False)
    assert no_clock(rest) == no_clock(expected[2:])
    assert all(
        a.equal(b) for a, b in zip(again.agent.parameters(), whole.agent.parameters(), strict=True)
    )
