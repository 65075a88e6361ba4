"Diagonal Gaussians: against torch.distributions, integrals, finite differences and numbers worked out by hand."

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

from instruct_goose.lesson import running_example
from instruct_goose.objective.advantages import gae
from instruct_goose.objective.gaussian import gaussian_entropy, gaussian_kl, gaussian_logprobs
from instruct_goose.objective.kl import kl_in_reward
from instruct_goose.objective.masks import masked_mean
from instruct_goose.objective.policy_loss import policy_loss
from instruct_goose.objective.ppo import ppo_loss

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


seeds = st.integers(0, 10**6)
widths = st.integers(1, 4)


def batch(seed, n=3, B=3, T=4):
    "actions, two means and two spreads (B, T, n), and a mask with gaps on any side, no row empty"
    draw = torch.Generator().manual_seed(seed)
    a, m, o, s, r = torch.randn(5, B, T, n, generator=draw, dtype=torch.float64)
    mask = torch.rand(B, T, generator=draw) < 0.6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return a, m, o, s.exp(), r.exp(), mask


@given(seeds, widths)
def test_equals_torch(seed, n):
    a, m, o, s, r, _ = batch(seed, n)
    one, other = Independent(Normal(m, s), 1), Independent(Normal(o, r), 1)
    close(gaussian_logprobs(a, m, s), one.log_prob(a), atol=1e-10, rtol=1e-12)
    close(gaussian_entropy(s), one.entropy(), atol=1e-12, rtol=1e-12)
    close(gaussian_kl(m, s, o, r), kl_divergence(one, other), atol=1e-10, rtol=1e-10)


@given(seeds, widths)
def test_one_spread_per_dimension_is_spread_over_the_batch(seed, n):
    a, m, o, s, r, _ = batch(seed, n)

    def wide(x):
        return x[0, 0].expand_as(m).contiguous()

    close(gaussian_logprobs(a, m, s[0, 0]), gaussian_logprobs(a, m, wide(s)))
    close(gaussian_kl(m, s[0, 0], o, r[0, 0]), gaussian_kl(m, wide(s), o, wide(r)))


def test_the_same_loss_for_torques_as_for_tokens():
    "torques a = 2 log ρ + .25 have, from N(0, 1) to N(.5, 1), the tokens' own ratios: every loss must agree"
    ex = running_example()
    rewards = kl_in_reward(ex.scores, ex.old_logprobs, ex.ref_logprobs, ex.mask, ex.beta)
    A, R = gae(rewards, ex.old_values, ex.mask, ex.gamma, ex.lam)
    torques = 2 * f64([[1.1, 1.5, 0.7], [0.6, 1.1, 1.0]]).log()[..., None] + 0.25
    one = f64([1.0])
    mean = torch.full_like(torques, 0.5).requires_grad_()
    new, old = gaussian_logprobs(torques, mean, one), gaussian_logprobs(torques, 0 * torques, one)
    loss = policy_loss(new, old, A, ex.mask)
    close(loss, policy_loss(ex.logprobs, ex.old_logprobs, A, ex.mask), atol=1e-12, rtol=0)
    close(masked_mean(loss, ex.mask), f64(0.1956), atol=5e-5, rtol=0)
    tokens, torques_ = (
        ppo_loss(*x, A, ex.mask, values=ex.values, old_values=ex.old_values, returns=R)[0]
        for x in ((ex.logprobs, ex.old_logprobs), (new, old))
    )
    close(torques_, tokens, atol=1e-12, rtol=0)
    loss.sum().backward()  # −ρ·Â·(a − μ)/σ², and 0 where the clip has cut, r1 t2 and r2 t1
    ratio = f64([[1.1, 0.0, 0.7], [0.0, 1.1, 0.0]])
    close(mean.grad[..., 0], -ratio * A * (torques[..., 0] - 0.5), atol=1e-12, rtol=0)


def test_refusals(unchecked):
    a, m, o, s, r, mask = batch(1)
    with unchecked():
        for wrong in (s[..., :1], s[:, :1], s[0], torch.ones(1, dtype=torch.float64)):
            with pytest.raises(ValueError, match="one number per action, or one per dimension"):
                gaussian_logprobs(a, m, wrong)
            with pytest.raises(ValueError, match="other_std has shape"):
                gaussian_kl(m, s, o, wrong)
        for wrong in (-s, 0 * s, s.log()):
            with pytest.raises(ValueError, match="log_std.exp()"):
                gaussian_logprobs(a, m, wrong)
            with pytest.raises(ValueError, match="log_std.exp()"):
                gaussian_entropy(wrong)
            with pytest.raises(ValueError, match="other_std goes down"):
                gaussian_kl(m, s, o, wrong)
        with pytest.raises(ValueError, match="actions.*mean"):
            gaussian_logprobs(a[:1], m, s)
        with pytest.raises(ValueError, match="mean.*other_mean"):
            gaussian_kl(m, s, o[:, :1], r)
        with pytest.raises(ValueError, match="mask"):
            gaussian_logprobs(a, m, s, mask[:1])
        with pytest.raises(TypeError, match="bool"):
            gaussian_logprobs(a, m, s, mask.double())
