"""Scales of rewards: GDPO's formula row by row, a deviation over all that was ever scored, and what stays as it was given."""

import json
import math
import statistics

import pytest
import torch
from small_models import tiny

from instruct_goose.config import RLHFConfig
from instruct_goose.rollouts.reward_shaping import training_scores
from instruct_goose.training.trainer import RLHFTrainer

PROMPTS = ["the film", "a plot is", "the plot", "film"]


def trainer(tokenizer, algorithm="grpo", **changes):
    group = {} if algorithm in ("ppo", "remax") else dict(group_size=4)
    settings = RLHFConfig.preset(
        algorithm,
        **dict(
            dict(batch_size=8, max_new_tokens=4, beta=0.0, epochs=1, minibatches=1, lr=1e-3)
            | group,
            **changes,
        ),
    )
    return RLHFTrainer(tiny(), config=settings, tokenizer=tokenizer)


def good(completions):
    return [float(c.split().count("good")) for c in completions]


def long(completions):
    return [10.0 * len(c.split()) for c in completions]


def some(completions):
    return [None if len(c) % 2 else 1.0 + len(c) for c in completions]


@pytest.mark.parametrize("ddof", [0, 1])
def test_each_function_is_scaled_in_its_group_and_the_sum_in_the_batch(tokenizer, ddof):
    "Row by row: TRL 1.16's normalize_then_sum, whose means leave out what is None, and whose sums are divided by their deviation in the batch."
    t = trainer(
        tokenizer,
        advantage="group_mean_batch_std",
        reward_weighting="scaled",
        reward_weights=(1.0, -0.5, 2.0),
        group_ddof=ddof,
    )
    r = t.advantages(t.annotate(t.score(t.rollout(PROMPTS[:2]), [good, long, some])))
    sums = [0.0] * 8
    for w, part in zip((1.0, -0.5, 2.0), r.score_parts.values(), strict=True):
        for g in (0, 4):
            rows = [i for i in range(g, g + 4) if not math.isnan(part[i])]
            xs = [part[i].item() for i in rows]
            mean = statistics.fmean(xs) if xs else 0.0
            std = math.sqrt(sum((x - mean) ** 2 for x in xs) / max(1, len(xs) - ddof))
            for i in rows:
                sums[i] += w * (part[i].item() - mean) / (std + 1e-4)
    mean = [statistics.fmean(sums[:4]), statistics.fmean(sums[4:])]
    whole = statistics.fmean(sums)
    std = math.sqrt(sum((x - whole) ** 2 for x in sums) / (8 - ddof)) + 1e-4
    expected = [(x - mean[i // 4]) / std for i, x in enumerate(sums)]
    got = (r.advantages * r.mask).sum(-1) / r.mask.sum(-1)
    assert got.tolist() == pytest.approx(expected, abs=1e-4) and max(expected) > 0.5
    assert r.scores.tolist() == pytest.approx(
        [
            g - 0.5 * n + 2 * (0 if math.isnan(s) else s)
            for g, n, s in zip(*(p.tolist() for p in r.score_parts.values()), strict=True)
        ]
    )  # as they were given


def test_raw_scores_of_several_functions_stay_as_they_were_added_up(tokenizer):
    t = trainer(tokenizer, reward_weights=(1.0, 0.1))
    r = t.score(t.rollout(PROMPTS[:2]), [good, long])
    assert r.scores.tolist() == pytest.approx(
        [g + 0.1 * n for g, n in zip(*(p.tolist() for p in r.score_parts.values()), strict=True)]
    )
    assert training_scores(r, t.config, t.eos_ids, t.reward_scale.moments)[0] is r.scores


def test_the_running_deviation_is_that_of_all_scores_and_goes_on_in_another_process(tokenizer):
    t, scores = trainer(tokenizer, "ppo", reward_scaling="running", whiten_advantages=False), []
    for k in range(3):
        r = t.score(t.rollout(PROMPTS * 2), lambda texts, k=k: [len(x) * 3.0**k for x in texts])
        scores += r.scores.tolist()
        t.advantages(t.annotate(r))
        sigma = statistics.stdev(scores)
        assert r.rewards.sum(-1).tolist() == pytest.approx(
            [x / sigma for x in r.scores.tolist()], rel=1e-5
        )
        if k == 1:
            tensors, record = t.state()
            kept, saved = json.loads(json.dumps(record)), {n: x.clone() for n, x in tensors.items()}
    other = trainer(tokenizer, "ppo", reward_scaling="running", whiten_advantages=False)
    other.load_state(saved, kept)
    assert other.reward_scale.moments[0] == 16
    other.reward_scale.add(torch.tensor(scores[16:]))
    assert other.reward_scale.moments == t.reward_scale.moments


def test_the_batchs_own_deviation_scales_parts_with_a_place_too(tokenizer):
    def per_token(completion_ids):
        return [[float(t) for t in ids] for ids in completion_ids]

    t = trainer(tokenizer, "ppo", reward_scaling="batch", whiten_advantages=False)
    r = t.advantages(t.annotate(t.score(t.rollout(PROMPTS * 2), per_token)))
    sigma = statistics.stdev(r.scores.tolist())
    assert torch.allclose(r.rewards, r.token_scores / sigma, rtol=1e-5)
    assert t.reward_scale.moments == (0.0, 0.0, 0.0)
    m = t.step(PROMPTS * 2, per_token)
    assert m["reward_mean"] != pytest.approx(m["total_reward_mean"], rel=0.01)


def test_held_out_prompts_and_the_log_keep_the_scores_as_given(tokenizer):
    t = trainer(tokenizer, reward_weighting="scaled", reward_scaling="batch", eval_every=1, steps=1)
    [m] = t.train(PROMPTS, [good, long], held_out=PROMPTS, progress=False)
    assert (
        m["reward_mean"] == pytest.approx(m["reward_mean/good"] + m["reward_mean/long"])
        and m["held_out_reward"] > 1
    )
    assert abs(m["total_reward_mean"]) < 1e-4


def test_greedy_answers_are_one_and_the_same(tokenizer):
    t = trainer(tokenizer, eval_every=1, eval_greedy=True, steps=1)
    texts = []

    def see(completions):
        texts.append(completions)
        return [0.0] * len(completions)

    (
        t.evaluate(PROMPTS, see, greedy=True),
        t.evaluate(PROMPTS, see, greedy=True),
        t.train(PROMPTS, see, held_out=PROMPTS, progress=False),
    )
    assert texts[0] == texts[1]


def test_numbers_of_tokens_have_no_group_to_be_compared_with(tokenizer):
    def per_token(completion_ids):
        return [[1.0] * len(ids) for ids in completion_ids]

    t = trainer(tokenizer, reward_weighting="scaled")
    with pytest.raises(
        ValueError,
        match="iteration 0: a reward function returned numbers for tokens, and reward_weighting='scaled'",
    ):
        t.step(PROMPTS[:2], [per_token, good])
