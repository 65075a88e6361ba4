"""Oracles: scripted rewards, prompts counted by hand, a rollout that never held what is left out,
and a run that was never stopped."""

import itertools

import pytest
import torch
from small_trainer import TOKENIZER, no_clock, same, weights
from small_trainer import trainer as small_trainer

from instruct_goose.doctor.rules import Run, prompts_lost
from instruct_goose.rollouts.dynamic_sampling import resample_flat_groups
from instruct_goose.rollouts.prompts import PromptOrder
from instruct_goose.training.callbacks import Callback

PROMPTS = ["w0 w3", "w5", "w1 w1 w2", "w8 w7", "w4", "w2", "w6 w6"]


def trainer(**changes):
    return small_trainer(
        **dict(algorithm="grpo", group_size=2, max_new_tokens=4, steps=4) | changes
    )


def only_even(prompts, completion_ids):
    "Groups of an even first word may differ in length; those of an odd one are always flat."
    scores = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        is_odd = int(prompt[1]) % 2 == 1
        scores.append(0.0 if is_odd else float(len(ids) % 2))
    return scores


class Script:
    "Scores by call: each inner list is what the next call says."

    def __init__(self, *calls):
        self.calls = list(calls)
        self.asked = []

    def __call__(self, prompts):
        self.asked.append(list(prompts))
        return [float(x) for x in self.calls.pop(0)]


def test_flat_groups_give_way_to_the_next_prompts_in_their_place():
    """Four prompts, groups of two. In the first round groups 0 and 2 are flat. Of the two that
    replace them one is flat again, in place 2; and again, which is the last round. Its place keeps
    the flat answers of the last prompt."""
    t = trainer(max_redraws=2)
    judge = Script([1, 1, 0, 1, 2, 2, 3, 4], [5, 6, 7, 7], [8, 8])
    history = t.train(PROMPTS, judge, steps=1, progress=False)
    rounds = [call[::2] for call in judge.asked]
    assert [len(r) for r in rounds] == [4, 2, 1] and t.prompt_order.seen == 7
    assert sorted(sum(rounds, [])) == sorted(PROMPTS)  # one pass: each prompt once
    m = history[0]
    assert m["groups_redrawn"] == 3 and m["groups_dropped"] == 0 and m["flat_groups"] == 0.25
    assert m["reward_mean"] == pytest.approx((5 + 6 + 0 + 1 + 8 + 8 + 3 + 4) / 8)
    assert m["reward_mean_drawn"] == pytest.approx(
        (1 + 1 + 0 + 1 + 2 + 2 + 3 + 4 + 5 + 6 + 7 + 7 + 8 + 8) / 14
    )
    assert not t.prompt_order.is_open  # the prompts belong to that call of train


def test_what_a_reward_logs_is_averaged_over_all_rounds():
    "Eight responses with .25 each, then four with 1: (8 · .25 + 4 · 1) / 12 = .5."
    scores = [[1, 1, 0, 1, 2, 2, 3, 4], [5, 6, 7, 7]]
    heights = [0.25, 1.0]

    def judge(prompts, log_metric):
        log_metric("height", heights.pop(0))
        return [float(x) for x in scores.pop(0)]

    history = trainer(max_redraws=1).train(PROMPTS, judge, steps=1, progress=False)
    assert history[0]["groups_redrawn"] == 2
    logged = [value for name, value in history[0].items() if name.endswith("height")]
    assert logged == [pytest.approx(0.5)]


@pytest.mark.parametrize("settings", [dict(max_redraws=2), dict(drop_flat_groups=True)])
def test_prompts_that_were_replaced_or_dropped_do_not_count_as_cut(settings):
    t = trainer(**settings)
    history = t.train(PROMPTS, only_even, progress=False)
    counts = [m["groups_redrawn"] + m["groups_dropped"] for m in history]
    assert max(counts) > 0
    assert [m["prompts_kept"] for m in history] == [1.0] * 4


def test_a_prompt_that_is_drawn_later_can_be_held_out():
    """Four prompts, groups of two: groups 0 and 2 are flat, and the next two prompts take their
    places. One of these is held out, one of six prompts in all."""
    order = PromptOrder(seed=trainer().config.seed)
    order.open(PROMPTS)
    drawn_later = order.take(6)[5]
    t = trainer(max_redraws=1, eval_every=1)
    script = Script([0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 0, 1], [0])
    (m,) = t.train(PROMPTS, script, steps=1, held_out=[drawn_later], progress=False)
    assert m["groups_redrawn"] == 2
    assert m["prompts_held_out"] == pytest.approx(1 / 6)
    assert m["prompts_given"] == 4


class KeepExperience(Callback):
    def on_advantages(self, trainer, experience):
        self.experience = experience


def test_rows_and_columns_stay_together():
    keep = KeepExperience()
    t = trainer(max_redraws=1)
    t.callbacks = [keep]
    rows = [{"prompt": p, "n": i} for i, p in enumerate(PROMPTS)]
    script = Script([0, 0, 1, 2, 3, 3, 4, 5], [6, 7, 8, 9])

    def judge(prompts, n):
        assert [PROMPTS[i] for i in n] == [p.removeprefix("<end>").strip() for p in prompts]
        return script(prompts)

    t.train(rows, judge, steps=1, progress=False)

    r = keep.experience
    assert r.scores.tolist() == [6, 7, 1, 2, 8, 9, 4, 5]
    assert [PROMPTS[i] for i in r.columns["n"]] == r.prompts
    assert all(text.startswith(p) for p, text in zip(r.prompts, r.texts, strict=True))
    for i in range(8):  # the tokens are those of the text, wherever the padding is
        ids = torch.cat([r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]])
        assert TOKENIZER.decode(ids, skip_special_tokens=True) == r.texts[i]
    # the sampler's log-probabilities went with their tokens
    assert (r.old_logprobs - r.sampled_logprobs)[r.mask].abs().max() < 1e-9


def test_rewards_of_tokens_that_only_some_rows_get_keep_their_place():
    """The first call scores tokens, the second whole responses. Row by row, what each token is
    paid adds up to the score, and where tokens were scored it stands at them."""
    t = trainer(max_redraws=1, algorithm="rloo", kl_placement="reward", beta=0.0)
    keep = KeepExperience()
    t.callbacks.append(keep)
    calls = []

    def judge(completion_ids):
        calls.append(len(completion_ids))
        if len(calls) == 1:  # groups 0 and 1 are flat
            return [
                [float(i // 4 * i + 1)] + [0.0] * (len(x) - 1) for i, x in enumerate(completion_ids)
            ]
        return [10.0 + i for i in range(len(completion_ids))]

    t.train(PROMPTS, judge, steps=1, progress=False)
    assert calls == [8, 4]
    experience = keep.experience
    placed = experience.token_scores
    assert placed is not None and placed[:4].abs().sum() == 0
    assert placed[4:, 0].tolist() == experience.scores[4:].tolist() == [5, 6, 7, 8]
    assert experience.scores[:4].tolist() == [10, 11, 12, 13]


def test_a_stream_that_ends_leaves_flat_what_it_cannot_replace():
    t = trainer(max_redraws=5)
    judge = Script([0, 0, 1, 1, 2, 2, 3, 3], [4, 5])
    history = t.train(iter(PROMPTS[:5]), judge, steps=1, progress=False)
    assert history[0]["groups_redrawn"] == 1
    assert history[0]["flat_groups"] == 0.75
    assert t.prompt_order.seen == 5


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
    "The same weights after an iteration as without these rows: no denominator knows of them."
    settings = dict(algorithm=algorithm, minibatches=2, **more)
    dropping = trainer(drop_flat_groups=True, **settings)
    by_hand = trainer(drop_flat_groups=False, **settings)
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 3.0, 5.0]).double()

    r = dropping.rollout(PROMPTS[:4])
    r.scores = scores
    r = resample_flat_groups(r, dropping.config, dropping.rollout, lambda rows: rows)
    dropping.optimize(dropping.advantages(r))
    whole = by_hand.rollout(PROMPTS[:4])
    whole.scores = scores
    never = whole[[2, 3, 6, 7]]
    by_hand.optimize(by_hand.advantages(never))

    assert len(r) == len(never) == 4
    assert same(weights(dropping), weights(by_hand))
    assert not same(weights(dropping), weights(trainer(algorithm=algorithm)))


@pytest.mark.parametrize("more", [dict(beta=0.5, whiten_advantages=True), dict(max_redraws=2)])
def test_where_all_are_flat_no_step_is_taken(more):
    t = trainer(drop_flat_groups=True, **more)
    before = weights(t)
    history = t.train(PROMPTS, lambda texts: [1.0] * len(texts), steps=2, progress=True)
    assert same(weights(t), before)
    for m in history:
        assert "grad_norm" not in m
        assert (m["groups_dropped"], m["flat_groups"]) == (4, 1)


def test_the_doctor_does_not_miss_prompts_that_were_left_out():
    rows = [{"iteration": i, "distinct_prompts": 1, "prompts_given": 4} for i in range(4)]
    dropped = [row | {"groups_dropped": 3} for row in rows]
    assert prompts_lost(Run(rows))
    assert not prompts_lost(Run(dropped))


def test_a_resumed_run_draws_the_same_prompts():
    def prompts(seen=0):
        return itertools.islice(itertools.cycle(PROMPTS), seen, None)

    settings = dict(max_redraws=3, drop_flat_groups=True)
    whole = trainer(**settings)
    expected = whole.train(prompts(), only_even, progress=False)
    assert sum(m["groups_redrawn"] for m in expected) > 3
    first, again = trainer(**settings), trainer(**settings)
    first.train(prompts(), only_even, steps=2, progress=False)
    again.load_state_dict(first.state_dict())
    rest = again.train(prompts(again.prompt_order.seen), only_even, progress=False)
    assert no_clock(rest) == no_clock(expected[2:])
    assert same(weights(again), weights(whole))
