"Oracles: the exact world's enumeration and finite differences; one unpadded row at a time."

import pytest
import torch
from row_alone import QUERIES, RESPONSES, V, oracle, tiny
from tasks.test_exact_world import (
    drifted,
    every_response,
    expected_loss,
    flat_gradient,
    kinds,
    worlds,
)

from instruct_goose.config import RLHFConfig
from instruct_goose.models.teacher import DISTILLATION, Teacher
from instruct_goose.rollouts.rollout import attach_texts
from instruct_goose.tasks.exact_world import PROMPTS, enumerate_logprobs
from instruct_goose.training.trainer import RLHFTrainer


def rated(world, policy, teacher, **changes):
    "Advantages of every token of every response, as the trainer makes them from a teacher's ratings."
    trainer = RLHFTrainer(
        policy,
        config=RLHFConfig(**DISTILLATION | dict(max_new_tokens=3, device="cpu") | changes),
        tokenizer=world.tokenizer,
    )
    r = attach_texts(every_response(world), world.tokenizer)
    logprobs = enumerate_logprobs(policy, world)
    r.sampled_logprobs = logprobs.detach().reshape(len(r), -1)
    A = trainer.advantages(trainer.score(r, Teacher(teacher, batch_size=17))).advantages
    return logprobs, A.reshape(logprobs.shape).double()


@kinds
def test_the_gradient_of_distillation_is_that_of_the_exact_reverse_kl(kind):
    "Whole with γ = 1; with γ = 0 that of the next token's KL at each state, its probability held fixed, by finite differences."
    world = worlds[kind]
    policy, teacher = drifted(world, 0.1)
    logprobs, A = rated(world, policy, teacher, gamma=1.0)
    theirs = enumerate_logprobs(teacher, world).detach()
    now = enumerate_logprobs(policy, world).sum(-1)
    kl = (now.exp() * (now - theirs.sum(-1))).sum(-1).mean()
    exact = flat_gradient(kl, policy)
    assert exact.norm() > 0.05
    got = flat_gradient(expected_loss(logprobs, logprobs.detach(), A, world.mask), policy)
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-4)

    logprobs, A = rated(world, policy, teacher)
    got = flat_gradient(expected_loss(logprobs, logprobs.detach(), A, world.mask), policy)
    g = torch.Generator().manual_seed(8)
    direction = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in policy.parameters()]
    before = enumerate_logprobs(policy, world).detach()
    reach = (before.cumsum(-1) - before).exp()  # of the state in which each token was said

    def local():
        "Σ over states of P_old(s)·KL(π(·|s)‖π_T(·|s)), from the enumeration alone: a state's tokens are found by what came before them."
        with torch.no_grad():
            table = enumerate_logprobs(policy, world)
        total = 0.0
        for k in range(len(PROMPTS)):
            seen = {}
            for i, row in enumerate(world.response_ids.tolist()):
                for t in range(int(world.mask[i].sum())):
                    seen[tuple(row[: t + 1])] = (reach[k, i, t], table[k, i, t], theirs[k, i, t])
            total += sum(w * q.exp() * (q - s) for w, q, s in seen.values())
        return (total / len(PROMPTS)).item()

    def shifted(step):
        with torch.no_grad():
            for p, d in zip(policy.parameters(), direction):
                p += step * d
            out = local()
            for p, d in zip(policy.parameters(), direction):
                p -= step * d
        return out

    slope = (shifted(1e-4) - shifted(-1e-4)) / 2e-4
    along = (got * torch.cat([d.flatten() for d in direction])).sum().item()
    assert abs(slope) > 0.01 and along == pytest.approx(slope, rel=1e-3, abs=1e-5)
    assert not torch.allclose(got, exact, atol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_teacher_scores_each_token_as_if_its_row_were_alone(batch_size):
    model = tiny("gpt2").train()
    expected = [logprobs.tolist() for logprobs, *_ in oracle(model, temperature=0.7)]
    teacher = Teacher(model, temperature=0.7, batch_size=batch_size)
    assert not any(part.training for part in model.modules())
    found = teacher.logprobs(QUERIES, RESPONSES)
    own = [[-0.5] * len(response) for response in RESPONSES]
    scores = teacher.score(QUERIES, RESPONSES, own)
    for row, score, wanted in zip(found, scores, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-9)
        assert score == pytest.approx([x + 0.5 for x in wanted], abs=1e-9)
    assert all(p.grad is None for p in model.parameters())


def test_a_teacher_says_which_prompt_or_response_it_cannot_read():
    teacher = Teacher(tiny("gpt2"))
    with pytest.raises(ValueError, match=f"token 1 of query 0 is {V}, but the model's"):
        teacher.logprobs([[1, V], [2]], [[3], [4]])
    with pytest.raises(ValueError, match=f"token 0 of response 1 is {V}, but the model's"):
        teacher.logprobs([[1], [2]], [[3], [V]])
    with pytest.raises(ValueError, match="rows of at least one token"):
        teacher.logprobs([[1], []], [[3], [4]])
    with pytest.raises(ValueError):
        teacher.score([[1]], [[3, 4]], [[-1.0]])  # as many numbers as tokens
    assert teacher.score([], [], []) == []


def test_distillation_has_no_other_reward_than_the_teachers():
    config = RLHFConfig(**DISTILLATION)
    assert (config.advantage, config.gamma, config.beta) == ("return", 0, 0)
    assert (config.epochs, config.minibatches, config.whiten_advantages) == (1, 1, False)
