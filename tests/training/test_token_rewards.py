"Rewards at their tokens: the oracle is the equation, row by row and token by token, on lists."
import math
import sys
from pathlib import Path

import pytest
import torch
from test_trainer import PROMPTS, SUMS, TOKENIZER, agent_and_reference, config, tiny

from instruct_goose.objective.kl import kl_in_reward
from instruct_goose.training.metrics import describe
from instruct_goose.training.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer


def slow_paid(scores, parts, ell, beta):
    "One row: lists of the real tokens."
    paid = [p - beta * k for p, k in zip(parts, ell, strict=True)]
    paid[-1] += scores - sum(parts)
    return paid


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_parts_stand_at_their_tokens_and_the_rest_at_the_end(side, unchecked):
    g = torch.Generator().manual_seed(2)
    mask = {"right": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]), "left": torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]),
            "holes": torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1]])}[side].bool()
    lp, ref, p = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    scores = torch.tensor([1.5, -2., .25], dtype=torch.float64)
    poisoned = [torch.where(mask, x, torch.tensor(bad)) for x, bad in ((lp, math.nan), (ref, math.inf), (p, math.nan))]
    got = kl_in_reward(scores, *poisoned[:2], mask, .3, token_scores=poisoned[2])
    for i in range(3):
        m = mask[i]
        assert got[i][m].tolist() == pytest.approx(slow_paid(scores[i].item(), p[i][m].tolist(), (lp - ref)[i][m].tolist(), .3), abs=1e-12)
    assert (got[~mask] == 0).all() and not got.requires_grad
    torch.testing.assert_close(got.sum(-1), scores - .3 * ((lp - ref) * mask).sum(-1))  # nothing twice
    for other in (p[:, :3], p[0]):
        with unchecked(), pytest.raises(ValueError, match="token_scores"): kl_in_reward(scores, lp, ref, mask, .3, token_scores=other)


def dense(completion_ids): return [[.5 * (i % 3) - .1 * t for t, i in enumerate(ids)] for ids in completion_ids]
def summed(completion_ids): return [sum(row) for row in dense(completion_ids)]


def test_gae_on_parts_beside_kl_and_a_price_for_no_end():
    agent, reference = agent_and_reference()
    c = config(beta=.3, gamma=.9, lam=.7, missing_eos_penalty=.75, whiten_advantages=False, micro_batch_size=3)
    trainer = RLHFTrainer(agent, reference, c, tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)
    for i in (0, 3): r.response_ids[i, 2], r.mask[i, 3:] = TOKENIZER.eos_token_id, False  # two that end
    r.sampled_logprobs, ended = None, 0
    trainer.advantages(trainer.score(r, dense))
    for i in range(len(r)):
        m, n = r.mask[i], int(r.mask[i].sum())
        ids, ell, V = r.response_ids[i][m].tolist(), (r.old_logprobs - r.ref_logprobs)[i][m].tolist(), r.values[i][m].tolist()
        parts = [.5 * (x % 3) - .1 * t for t, x in enumerate(ids)]
        score = sum(parts) - .75 * (ids[-1] != TOKENIZER.eos_token_id)
        ended += ids[-1] == TOKENIZER.eos_token_id
        assert r.scores[i].item() == pytest.approx(score, abs=1e-5)
        rewards, later, advantages = slow_paid(score, parts, ell, .3), 0., []
        for t in reversed(range(n)):
            delta = rewards[t] + .9 * (V[t + 1] if t + 1 < n else 0.) - V[t]
            later = delta + .9 * .7 * later
            advantages.insert(0, later)
        assert r.rewards[i][m].tolist() == pytest.approx(rewards, abs=1e-5)
        assert r.advantages[i][m].tolist() == pytest.approx(advantages, abs=1e-5)
    assert 0 < ended < len(r)
    assert describe(r, c)["reward_mean"] == pytest.approx(r.scores.mean().item())


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dr_grpo", "remax"])
def test_whole_responses_are_compared_by_the_sum(algorithm):
    def advantages(reward):
        c = config(algorithm, beta=.2)
        trainer = RLHFTrainer(tiny(), tiny(seed=1), c, tokenizer=TOKENIZER)
        return trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8 // c.group_size]), reward))
    one, other = advantages(dense), advantages(summed)
    assert one.token_scores is not None and other.token_scores is None
    torch.testing.assert_close(one.advantages, other.advantages, atol=1e-5, rtol=1e-5)


def test_several_functions_with_and_without_parts():
    def flat(completions): return [None if i % 2 else 1. for i in range(len(completions))]
    trainer = RLHFTrainer(tiny(), config=config(reward_weights=(2., .5, -1.)), tokenizer=TOKENIZER)
    def twice(completion_ids): return [[1.] * len(ids) if i % 3 else None for i, ids in enumerate(completion_ids)]
    r = trainer.score(trainer.rollout(PROMPTS), [dense, flat, twice])
    for i in range(len(r)):
        ids = r.response_ids[i][r.mask[i]].tolist()
        parts = [2. * p - bool(i % 3) for p in dense([ids])[0]]
        assert r.token_scores[i][r.mask[i]].tolist() == pytest.approx(parts, abs=1e-5)
        assert r.scores[i].item() == pytest.approx(sum(parts) + .5 * (i % 2 == 0), abs=1e-5)
    again = trainer.score(r, summed)  # scored anew by a plain one: no part is left from before
    assert again.token_scores is None and r[[1, 0]].token_scores is None


def test_it_trains_and_what_is_wrong_names_the_text():
    trainer = RLHFTrainer(tiny(), config=config(steps=2, eval_every=1), tokenizer=TOKENIZER)
    history = trainer.train(SUMS, dense, held_out=SUMS[:3], progress=False)
    assert all(math.isfinite(m["held_out_reward"]) and math.isfinite(m["value_loss"]) for m in history)
    r = trainer.rollout(PROMPTS)
    for wrong, error, says in ((lambda completion_ids: [[1.]] * 3 + [[1.] * 99] + [0.] * (len(completion_ids) - 4), ValueError, r"text 3 of 8.* got a list of 99 numbers.*has \d+ tokens"),
                               (lambda completion_ids: [["x"] * len(ids) for ids in completion_ids], TypeError, "number of token 0 of .*text 0 of 8"),
                               (lambda completion_ids: [[math.inf] * len(ids) for ids in completion_ids], ValueError, "must be finite")):
        if error is ValueError and "list of 99" in says: r.mask[:3] = False; r.mask[:3, 0] = True  # one token each
        with pytest.raises(error, match=says): trainer.score(r, wrong)
    nameless = RLHFTrainer(tiny(), config=config())
    mine = Rollout(r.query_ids, r.query_mask, r.response_ids, r.mask, texts=r.texts)
    with pytest.raises(ValueError, match="train with a tokenizer"): nameless.score(mine, lambda texts: [[1.]] * 8)


def test_a_student_of_a_policy_end_to_end():
    "The run behind evidence/distillation.json, very small: all four models write and are judged, and the KL to the teacher falls."
    sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
    from distillation import FIGURES, distil
    run = distil(0, student=dict(hidden_size=8, layers=1, heads=2, sft_steps=4, sft_lr=1e-2), settings=dict(steps=8, batch_size=32, lr=2e-2, lr_schedule="linear"),
                 reviews=300, pairs=60, held_out_pairs=40, sft_steps=30, rm_steps=4, steps=2, batch_size=16, eval_samples=64, hidden_size=16, heads=2)
    kl = {name: figures["kl_to_teacher"] for name, figures in run["figures"].items()}
    assert kl["teacher"] == 0 and kl["on its own texts"] < .8 * kl["student before"] and len(run["curve"]) == 8
    assert all(set(figures) == set(FIGURES) for figures in run["figures"].values()) and run["weights"]["teacher"] > run["weights"]["student"]
