"""Scales of rewards: GDPO's formula row by row, a deviation over all scores so far, and scores that
stay as they were given."""

import copy
import math
import statistics
from fractions import Fraction

import pytest
import torch
from small_models import tiny

from instruct_goose.config import RLHFConfig
from instruct_goose.rollouts.reward_shaping import (
    add_to_moments,
    moments_std,
    shape_scores,
    training_scores,
)
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer

PROMPTS = ["the film", "a plot is", "the plot", "film"]


def trainer(tokenizer, algorithm="grpo", callbacks=(), **changes):
    settings = dict(batch_size=8, max_new_tokens=4, beta=0.0, epochs=1, minibatches=1, lr=1e-3)
    if algorithm == "grpo":
        settings["group_size"] = 4
    config = RLHFConfig.preset(algorithm, **settings | changes)
    return RLHFTrainer(tiny(), config=config, tokenizer=tokenizer, callbacks=callbacks)


class Seen(Callback):
    "Keeps the experience of the last iteration."

    def on_advantages(self, trainer, experience):
        self.experience = experience


def good(completions):
    return [float(c.split().count("good")) for c in completions]


def long(completions):
    return [10.0 * len(c.split()) for c in completions]


def some(completions):
    return [None if len(c) % 2 else 1.0 + len(c) for c in completions]


def scaled_in_groups(part, ddof):
    "One function's scores, in groups of four; those that are NaN take no part and count 0."
    scaled = [0.0] * len(part)
    for first in range(0, len(part), 4):
        rows = [i for i in range(first, first + 4) if not math.isnan(part[i])]
        scores = [part[i] for i in rows]
        mean = statistics.fmean(scores) if scores else 0.0
        variance = sum((x - mean) ** 2 for x in scores) / max(1, len(scores) - ddof)
        for i in rows:
            scaled[i] = (part[i] - mean) / (math.sqrt(variance) + 1e-4)
    return scaled


@pytest.mark.parametrize("ddof", [0, 1])
def test_each_function_is_scaled_in_its_group_and_the_sum_in_the_batch(tokenizer, ddof):
    """Row by row: TRL 1.16's normalize_then_sum, whose means leave out what is None, and whose sums
    are divided by their deviation in the batch."""
    weights = (1.0, -0.5, 2.0)
    t = trainer(
        tokenizer,
        advantage="group_mean_batch_std",
        reward_weighting="scaled",
        reward_weights=weights,
        group_ddof=ddof,
    )

    r = t.advantages(t.score(t.rollout(PROMPTS[:2]), [good, long, some]))

    parts = [part.tolist() for part in r.score_parts.values()]
    sums = [0.0] * 8
    for weight, part in zip(weights, parts, strict=True):
        for i, x in enumerate(scaled_in_groups(part, ddof)):
            sums[i] += weight * x
    group_means = [statistics.fmean(sums[:4]), statistics.fmean(sums[4:])]
    mean = statistics.fmean(sums)
    std = math.sqrt(sum((x - mean) ** 2 for x in sums) / (8 - ddof)) + 1e-4
    expected = [(x - group_means[i // 4]) / std for i, x in enumerate(sums)]
    per_row = (r.advantages * r.mask).sum(-1) / r.mask.sum(-1)
    assert per_row.tolist() == pytest.approx(expected, abs=1e-4)
    assert max(expected) > 0.5
    as_given = []
    for g, n, x in zip(*parts, strict=True):
        as_given.append(g - 0.5 * n + (0.0 if math.isnan(x) else 2 * x))
    assert r.scores.tolist() == pytest.approx(as_given)


def test_raw_scores_of_several_functions_stay_as_they_were_added_up(tokenizer):
    t = trainer(tokenizer, reward_weights=(1.0, 0.1))
    r = t.score(t.rollout(PROMPTS[:2]), [good, long])
    parts = [part.tolist() for part in r.score_parts.values()]
    assert r.scores.tolist() == pytest.approx([g + 0.1 * n for g, n in zip(*parts, strict=True)])
    assert training_scores(r, t.config, t.eos_ids, t.reward_scale.moments)[0] is r.scores


def test_the_running_deviation_is_that_of_all_scores_and_goes_on_in_another_process(tokenizer):
    settings = dict(algorithm="ppo", reward_scaling="running", whiten_advantages=False)
    seen = Seen()
    t = trainer(tokenizer, **settings, callbacks=[seen])
    scores = []
    for k in range(3):
        t.step(PROMPTS * 2, lambda texts, k=k: [len(x) * 3.0**k for x in texts])
        scores += seen.experience.scores.tolist()
        sigma = statistics.stdev(scores)
        assert seen.experience.rewards.sum(-1).tolist() == pytest.approx(
            [x / sigma for x in seen.experience.scores.tolist()], rel=1e-5
        )
        if k == 1:
            saved = copy.deepcopy(t.state_dict())
    other = trainer(tokenizer, **settings)
    other.load_state_dict(saved)
    assert other.reward_scale.moments[0] == 16
    other.reward_scale.add(torch.tensor(scores[16:]))
    assert other.reward_scale.moments == t.reward_scale.moments


def test_the_running_deviation_is_that_of_the_scores_which_a_callback_left(tokenizer):
    class TenTimes(Callback):
        def on_score(self, trainer, rollout):
            rollout.scores *= 10

    def rewards_with(callbacks):
        seen = Seen()
        settings = dict(algorithm="ppo", reward_scaling="running", whiten_advantages=False)
        t = trainer(tokenizer, **settings, callbacks=[*callbacks, seen])
        t.step(PROMPTS * 2, lambda texts: [len(x) for x in texts])
        return seen.experience.rewards.sum(-1).tolist()

    assert rewards_with([TenTimes()]) == pytest.approx(rewards_with([]), rel=1e-5)


def test_advantages_by_hand_count_nothing_until_the_iteration_ends(tokenizer):
    t = trainer(tokenizer, algorithm="ppo", reward_scaling="running")
    r = t.score(t.rollout(PROMPTS * 2), good)
    once, again = t.advantages(r), t.advantages(r)
    assert torch.equal(once.rewards, again.rewards)
    assert t.reward_scale.moments == (0.0, 0.0, 0.0)
    t.step(PROMPTS * 2, good)
    assert t.reward_scale.moments[0] == 8


def test_what_a_callback_makes_of_the_scores_leaves_the_raw_ones(tokenizer):
    class TenTimes(Callback):
        def on_score(self, trainer, rollout):
            rollout.scores *= 10

    seen = Seen()
    trainer(tokenizer, callbacks=[TenTimes(), seen]).step(PROMPTS[:2], long)
    assert seen.experience.scores.tolist() == [10 * x for x in seen.experience.raw_scores.tolist()]


def test_the_batchs_own_deviation_scales_parts_with_a_place_too(tokenizer):
    def per_token(completion_ids):
        return [[float(t) for t in ids] for ids in completion_ids]

    t = trainer(tokenizer, "ppo", reward_scaling="batch", whiten_advantages=False)
    r = t.advantages(t.score(t.rollout(PROMPTS * 2), per_token))
    sigma = statistics.stdev(r.scores.tolist())
    assert torch.allclose(r.rewards, r.token_scores / sigma, rtol=1e-5)
    assert t.reward_scale.moments == (0.0, 0.0, 0.0)
    metrics = t.step(PROMPTS * 2, per_token)
    assert metrics["reward_mean"] != pytest.approx(metrics["total_reward_mean"], rel=0.01)


def test_held_out_prompts_and_the_log_keep_the_scores_as_given(tokenizer):
    t = trainer(tokenizer, reward_weighting="scaled", reward_scaling="batch", eval_every=1, steps=1)
    [m] = t.train(PROMPTS, [good, long], held_out=PROMPTS, progress=False)
    assert m["reward_mean"] == pytest.approx(m["reward_mean/good"] + m["reward_mean/long"])
    assert m["held_out_reward"] > 1
    assert abs(m["total_reward_mean"]) < 1e-4


def test_greedy_answers_are_one_and_the_same(tokenizer):
    t = trainer(tokenizer, eval_every=1, eval_greedy=True, steps=1)
    texts = []

    def see(completions):
        texts.append(completions)
        return [0.0] * len(completions)

    t.evaluate(PROMPTS, see, greedy=True)
    t.evaluate(PROMPTS, see, greedy=True)
    assert texts[0] == texts[1]


def test_numbers_of_tokens_have_no_group_to_be_compared_with(tokenizer):
    def per_token(completion_ids):
        return [[1.0] * len(ids) for ids in completion_ids]

    t = trainer(tokenizer, reward_weighting="scaled")
    message = (
        "iteration 0: a reward function returned numbers for tokens, and reward_weighting='scaled'"
    )
    with pytest.raises(ValueError, match=message):
        t.step(PROMPTS[:2], [per_token, good])


def test_a_spread_of_one_beside_a_million_is_a_spread_and_one_step_of_float32_is_none():
    "Two scores a and a + d have the standard deviation d/√2; at 10⁶ float32 steps are 1/16."
    for apart, std in ((1.0, 0.5**0.5), (0.5, 0.125**0.5), (0.0625, 1.0), (0.0, 1.0)):
        scores = torch.tensor([1e6, 1e6 + apart])
        assert scores[1] - scores[0] == apart
        moments = add_to_moments((0.0, 0.0, 0.0), scores)
        assert moments_std(moments) == pytest.approx(std)
    sums = torch.tensor([0.1 + 0.2 + 0.4, 0.4 + 0.2 + 0.1, 0.7]) * 1000  # equal up to rounding
    assert moments_std(add_to_moments((0.0, 0.0, 0.0), sums)) == 1.0


def test_penalties_keep_the_digits_of_float64_scores():
    "By fractions: 2/3 of a buffer of 3 used costs 2/3, and the missing end a tenth."
    config = RLHFConfig(max_new_tokens=8, overlong_buffer=3, missing_eos_penalty=0.1)
    scores = torch.tensor([0.3, 0.3], dtype=torch.float64)
    ends = torch.tensor([True, False])
    shaped = shape_scores(scores, torch.tensor([7, 6]), ends, config)
    exact = [Fraction(3, 10) - Fraction(2, 3), Fraction(3, 10) - Fraction(1, 10) - Fraction(1, 3)]
    assert shaped.dtype == torch.float64
    assert shaped.tolist() == pytest.approx([float(x) for x in exact], rel=1e-14)
    assert shape_scores(scores.float(), torch.tensor([7, 6]), ends, config).dtype == torch.float32
