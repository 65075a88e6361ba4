"""Everything that can be said is listed, so the trainer's estimates meet the numbers that they estimate."""

import copy

import pytest
import torch
from deep import first

from instruct_goose.config import RLHFConfig
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.tasks.exact_world import (
    PROMPTS,
    WORDS,
    enumerate_logprobs,
    expected_loss,
    fixed_point,
    flat_gradient,
    make_world,
    objective,
    optimum,
    response_gradients,
    states,
    total_variation,
)
from instruct_goose.training.trainer import RLHFTrainer

KINDS = ("absolute", "rotary")
worlds = {kind: make_world(kind) for kind in KINDS}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def drifted(world, scale=0.03):
    "A policy near the reference, but not at it, and the reference: both in float64."
    g = torch.Generator().manual_seed(3)
    ref = copy.deepcopy(world.reference).double()
    for module in list(ref.modules()):  # Llama's own norm computes in float32 whatever it is given
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                exact = torch.nn.RMSNorm(
                    len(norm.weight), norm.variance_epsilon, dtype=torch.float64
                )
                exact.weight.data.copy_(norm.weight)
                setattr(module, name, exact.requires_grad_(False))
    policy = copy.deepcopy(ref).requires_grad_()
    with torch.no_grad():
        for p in policy.parameters():
            p += scale * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return policy, ref


def trainer_of(world, policy, ref, **dials):
    c = dict(
        lam=1.0,
        vf_coef=0.0,
        whiten_advantages=False,
        aggregation="sequence_sum",
        max_new_tokens=world.mask.shape[1],
        beta=0.5,
        device="cpu",
    )
    trainer = RLHFTrainer(policy, ref, RLHFConfig(**c | dials), tokenizer=world.tokenizer)
    g = torch.Generator().manual_seed(5)  # a baseline changes no expectation, so it may be anything
    with torch.no_grad():
        trainer.agent.value_head.weight.copy_(0.3 * torch.randn(1, 32, generator=g))
    return trainer


def exact_gradient(world, policy, ref, beta=0.5):
    now = enumerate_logprobs(policy, world).sum(-1)
    was = enumerate_logprobs(ref, world).sum(-1).detach()
    return flat_gradient(objective(now, was, world.rewards, beta), policy)


@kinds
def test_logprobs_against_a_loop_without_padding(kind):
    world = worlds[kind]
    policy, _ = drifted(world, 0.1)
    left, right = (enumerate_logprobs(policy, world, side).detach() for side in ("left", "right"))
    torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
    for k, prompt in enumerate(PROMPTS):
        start = world.tokenizer(prompt)["input_ids"]
        assert start == [WORDS.index(w) for w in prompt.split()]
        for i in (0, 7, 22, 39):
            row = world.response_ids[i][world.mask[i]].tolist()
            for t, token in enumerate(row):
                with torch.no_grad():
                    lp = (
                        policy(torch.tensor([start + row[:t]])).logits[0, -1].log_softmax(-1)[token]
                    )
                assert abs(lp - left[k, i, t]) < 1e-12


def test_the_table_of_rewards():
    for world in worlds.values():
        with torch.no_grad():
            q = enumerate_logprobs(world.reference, world).sum(-1).double().exp()
        r = world.rewards
        assert (q * r).sum(-1).abs().max() < 1e-6 and ((q * r**2).sum(-1) - 1).abs().max() < 1e-6
        assert (r.amax(-1) + r.amin(-1)).abs().min() > 0.2  # lopsided for every prompt
        texts = [t for ts in world.texts() for t in ts]
        assert (
            len(set(texts)) == len(texts) == r.numel()
        )  # a text says which prompt and which response
        assert world.reward_fn(texts) == r.flatten().tolist()


def test_the_optimum():
    world = worlds["absolute"]
    beta = 0.5
    with torch.no_grad():
        q = enumerate_logprobs(world.reference, world).sum(-1).double()
    best = optimum(q, world.rewards, beta)
    log_z = (q.exp() * (world.rewards / beta).exp()).sum(-1).log()
    assert (
        abs(objective(best, q, world.rewards, beta) - beta * log_z.mean()) < 1e-6
    )  # q adds up to 1 in float32 only
    g = torch.Generator().manual_seed(0)
    for scale in (0.01, 0.3):  # J falls short of it by exactly β·KL(π‖π*)
        other = (best + scale * torch.randn(best.shape, generator=g, dtype=best.dtype)).log_softmax(
            -1
        )
        short = objective(best, q, world.rewards, beta) - objective(other, q, world.rewards, beta)
        assert abs(short - beta * (other.exp() * (other - best)).sum(-1).mean()) < 1e-9 < short
    z = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(z.log_softmax(-1), q, world.rewards, beta), z)
    assert slope.abs().max() < 1e-12


@kinds
def test_exact_gradient_against_finite_differences(kind):
    world = worlds[kind]
    policy, ref = drifted(world)
    g = exact_gradient(world, policy, ref)
    with torch.no_grad():
        was = enumerate_logprobs(ref, world).sum(-1)
    for seed in range(3):
        way = torch.randn(len(g), generator=torch.Generator().manual_seed(seed), dtype=g.dtype)

        def shifted(h, way=way):
            moved = copy.deepcopy(policy)
            at = 0
            with torch.no_grad():
                for p in moved.parameters():
                    p += h * way[at : at + p.numel()].view_as(p)
                    at += p.numel()
                return objective(enumerate_logprobs(moved, world).sum(-1), was, world.rewards, 0.5)

        slope = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
        assert abs(slope - g @ way) < 1e-5 * max(1, abs(slope))


def average(trainer, world, policy):
    "-E of the loss's gradient over everything that can be said, times what sequence_sum divides by."
    chance = enumerate_logprobs(policy, world).sum(-1).detach().exp()
    return (
        -world.mask.shape[1]
        * (chance[..., None] * response_gradients(world, trainer)).sum((0, 1))
        / len(PROMPTS)
    )


@pytest.mark.parametrize(
    "kind, advantage, T", first(1, [("absolute", "return", 2), ("rotary", "gae", 3)])
)
def test_average_of_the_loss_gradient_is_the_exact_gradient(kind, advantage, T):
    world = worlds[kind] if T == 3 else make_world(kind, T)
    policy, ref = drifted(world)
    mean = average(trainer_of(world, policy, ref, advantage=advantage), world, policy)
    exact = exact_gradient(world, policy, ref)
    assert exact.norm() > 1
    torch.testing.assert_close(mean, exact, atol=1e-10, rtol=0)
    if (kind, T) != ("absolute", 2):
        return
    for wrong in (
        dict(gamma=0.9),
        dict(kl_estimator="k3"),
        dict(beta=0.4),
        dict(aggregation="sequence_mean"),
    ):
        off = (
            average(trainer_of(world, policy, ref, advantage=advantage, **wrong), world, policy)
            - exact
        )
        assert off.norm() > 0.01 * exact.norm(), (wrong, off.norm() / exact.norm())


def test_leave_one_out_over_all_pairs():
    "rloo with groups of two: every pair of responses, weighted by its probability."
    world = make_world("absolute", 1)
    policy, ref = drifted(world)
    trainer = trainer_of(
        world,
        policy,
        ref,
        advantage="leave_one_out",
        group_size=2,
        ratio_level="product",
        aggregation="sequence_mean",
    )
    chance = enumerate_logprobs(policy, world).sum(-1).detach().exp()
    n = len(world.mask)
    ids, mask = world.queries()
    mean = 0.0
    for k in range(len(PROMPTS)):
        for i in range(n):
            for j in range(n):
                two = [i, j]
                query = [x[[k, k]] for x in (ids, mask)]
                loss = trainer.compute_loss(
                    *query, world.response_ids[two], world.mask[two], world.rewards[k, two]
                )
                mean = mean - chance[k, i] * chance[k, j] * flat_gradient(loss, policy) / len(
                    PROMPTS
                )
    torch.testing.assert_close(mean, exact_gradient(world, policy, ref), atol=1e-10, rtol=0)


def test_the_trainer_charges_the_kl_in_the_loss_as_the_expected_loss_does():
    world = make_world("absolute", 2)
    policy, ref = drifted(world)
    flat = copy.copy(world)
    object.__setattr__(flat, "rewards", 0 * world.rewards)
    trainer = trainer_of(
        world, policy, ref, advantage="return", kl_placement="loss", beta=1.0, kl_estimator="k3"
    )
    now, was = enumerate_logprobs(policy, world), enumerate_logprobs(ref, world)
    right = flat_gradient(expected_loss(now, was, 0 * was, world.mask, 1.0, "k3", "plain"), policy)
    torch.testing.assert_close(-average(trainer, flat, policy), right, atol=1e-10, rtol=0)


def by_backward_induction(world, beta, estimator, scale):
    """Per state, from the last token to the first: k2 gives π ∝ π_ref·exp(Q/β), k3 gives π = β·π_ref/(μ − Q), where Q is the
    expected reward after the token, without what later drift costs."""
    with torch.no_grad():
        ref = enumerate_logprobs(world.reference, world).double()
    rows = [tuple(i[m].tolist()) for i, m in zip(world.response_ids, world.mask, strict=True)]
    out = torch.zeros_like(world.rewards)
    for k in range(len(PROMPTS)):
        reward = dict(zip(rows, world.rewards[k].tolist(), strict=True))
        base = {
            row[: t + 1]: ref[k, i, t].item() for i, row in enumerate(rows) for t in range(len(row))
        }
        policy = {}

        def value(s, reward=reward, base=base, policy=policy):
            if s in reward:
                return reward[s]
            q = torch.tensor([value((*s, a)) for a in range(4)], dtype=torch.float64)
            lp = torch.tensor([base[*s, a] for a in range(4)], dtype=torch.float64)
            if estimator == "k2":
                lp = (lp + scale * q / beta).log_softmax(-1)
            else:
                low, high = (
                    scale * q.max(),
                    scale * q.max() + beta,
                )  # at μ = max Q + β all probabilities add up to at most 1
                for _ in range(80):
                    mu = (low + high) / 2
                    low, high = (
                        (mu, high) if (beta * lp.exp() / (mu - scale * q)).sum() > 1 else (low, mu)
                    )
                lp = (beta * lp.exp() / (high - scale * q)).log()
            policy.update({(*s, a): x for a, x in enumerate(lp.tolist())})
            return (lp.exp() * q).sum().item()

        value(())
        out[k] = torch.tensor([sum(policy[row[: t + 1]] for t in range(len(row))) for row in rows])
    return out


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("kind, beta", first(1, [("absolute", 0.5), ("rotary", 2.0)]))
def test_fixed_points_against_backward_induction(kind, beta, estimator):
    world = worlds[kind]
    found = fixed_point(world, beta, estimator)
    right = by_backward_induction(world, beta, estimator, 7 / 8)
    assert total_variation(found, right) < 2e-3
    with torch.no_grad():
        q = enumerate_logprobs(world.reference, world).sum(-1).double()
    assert (
        total_variation(right, optimum(q, world.rewards, beta)) > 0.02
    )  # and that is not the optimum


def every_response(world):
    "A row for each response to each prompt."
    n, P = len(world.response_ids), len(PROMPTS)
    return Rollout(
        *world.queries(copies=n), world.response_ids.repeat(P, 1), world.mask.repeat(P, 1)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_the_expected_gradient_is_that_of_the_objective_wherever_the_parts_stand(causal):
    """Over all responses, each with its probability, the gradient of J with the KL in it: if a token's part depends on what stands
    before it and on itself. A part that knows what comes after it is no reward of that token, and later tokens never hear of it."""
    world = worlds["absolute"]
    policy, ref = drifted(world)
    g = torch.Generator().manual_seed(1)
    at = states(world)
    parts = torch.randn(
        len(PROMPTS), int(at.max()) + 1, len(WORDS), generator=g, dtype=torch.float64
    )[:, at, world.response_ids]
    if not causal:
        parts = torch.randn(
            parts.shape, generator=g, dtype=torch.float64
        )  # of each response its own
    parts = parts * world.mask
    trainer = trainer_of(world, policy, ref, advantage="return", gamma=1.0)
    r = every_response(world)
    r.scores = world.rewards.reshape(-1)
    r.token_scores = parts.reshape(len(r), -1)
    A = trainer.advantages(r).advantages.reshape(parts.shape).double()
    plain = every_response(world)
    plain.scores = world.rewards.reshape(-1)
    assert not torch.allclose(
        A, trainer.advantages(plain).advantages.reshape(parts.shape).double(), atol=0.1
    )  # other advantages,
    logprobs = enumerate_logprobs(policy, world)
    got = -flat_gradient(expected_loss(logprobs, 0 * logprobs.detach(), A, world.mask), policy)
    exact = exact_gradient(world, policy, ref)
    assert (
        exact.norm() > 0.1 and torch.allclose(got, exact, atol=1e-6, rtol=1e-5) == causal
    )  # the same gradient
