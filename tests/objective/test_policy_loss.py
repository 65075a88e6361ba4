"""Ratio and clipped loss: against plain Python, enumeration, finite differences and numbers worked out by hand."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.lesson import running_example
from instruct_goose.objective.policy_loss import (
    clip_active,
    clip_fraction,
    clipped_objective,
    policy_loss,
    probability_ratio,
)

close = torch.testing.assert_close
f64 = lambda x: torch.tensor(x, dtype=torch.float64)
ADVANTAGES = f64([[.112186, .21, .2], [-.671192, -.869315, 0.]])  # derived by hand in test_advantages.py
seeds = st.integers(0, 10**6)
sizes = st.floats(.01, .9)


def batch(seed, B=4, T=6):
    "logprobs, old logprobs, advantages and a mask with gaps on any side; no row empty; ratios well out of any clip range"
    draw = torch.Generator().manual_seed(seed)
    lp, old, A = torch.randn(3, B, T, generator=draw, dtype=torch.float64)
    mask = torch.rand(B, T, generator=draw) < .6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return .7 * lp - 3, .7 * old - 3, A, mask


def slow_loss(lp, old, A, m, clip, clip_high=None):
    "one token in floats, by cases and not by min: who is cut stands still at the edge"
    if not m: return 0.
    rho, top, bottom = math.exp(lp - old), 1 + (clip if clip_high is None else clip_high), 1 - clip
    if A > 0 and rho > top: rho = top
    if A < 0 and rho < bottom: rho = bottom
    return -rho * A


def test_running_example_by_hand():
    ex = running_example()
    # ρ = .55/.5, .6/.4, .35/.5; .15/.25, .55/.5
    ratio = probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask)
    close(ratio, f64([[1.1, 1.5, .7], [.6, 1.1, 1.]]))
    # 1.1·.112186 = .123405;  1.5 is cut to 1.2: .252;  .7·.2 = .14 (the clip would say .8·.2 = .16, the min says no)
    # −.671192·.6 = −.402715 but −.671192·.8 = −.536954 is smaller;  1.1·(−.869315) = −.956246
    hand = f64([[.123405, .252, .14], [-.536954, -.956246, 0.]])
    close(clipped_objective(ratio, ADVANTAGES), hand, atol=1e-6, rtol=0)
    close(policy_loss(ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask), -hand, atol=1e-6, rtol=0)


def test_the_gradient_is_zero_at_exactly_the_two_cut_tokens():
    ex = running_example()
    lp = ex.logprobs.requires_grad_()
    policy_loss(lp, ex.old_logprobs, ADVANTAGES, ex.mask).sum().backward()
    close(lp.grad, f64([[-.123405, 0., -.14], [0., .956246, 0.]]), atol=1e-6, rtol=0)
    low, high = clip_active(probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask), ADVANTAGES)
    assert low.nonzero().tolist() == [[1, 0]] and high.nonzero().tolist() == [[0, 1]]


# ρ, Â, objective at ε = .2: all six cells of (below, in range, above) × (good, bad)
@pytest.mark.parametrize("rho, A, objective, slope", [
    (.5, .8, .40, .8), (1., .8, .80, .8), (1.5, .8, .96, 0.),           # the first is .64 where a slider forgot the min
    (.5, -.8, -.64, 0.), (1., -.8, -.80, -.8), (1.5, -.8, -1.20, -.8)])
def test_six_cells(rho, A, objective, slope):
    r = f64([rho]).requires_grad_()
    L = clipped_objective(r, f64([A]))
    close(L, f64([objective]))
    close(torch.autograd.grad(L.sum(), r)[0], f64([slope]))


@settings(deadline=None)
@given(seeds, sizes, st.none() | sizes)
def test_equals_the_slow_version(seed, clip, clip_high):
    lp, old, A, mask = batch(seed)
    slow = [[slow_loss(*x, clip, clip_high) for x in zip(*row)] for row in zip(*(t.tolist() for t in (lp, old, A, mask)))]
    close(policy_loss(lp, old, A, mask, clip, clip_high), f64(slow), atol=1e-12, rtol=1e-12)


@settings(deadline=None)
@given(seeds, sizes, st.none() | sizes)
def test_zero_gradient_if_and_only_if_the_clip_is_active(seed, clip, clip_high):
    lp, old, A, mask = batch(seed)
    policy_loss(lp.requires_grad_(), old, A, mask, clip, clip_high).sum().backward()
    ratio = (lp - old).exp().detach()
    low, high = clip_active(ratio, A, clip, clip_high)
    assert torch.equal(lp.grad == 0, low | high | ~mask) and not (low & high).any()
    close(lp.grad[lp.grad != 0], (-ratio * A)[lp.grad != 0])
    fractions = clip_fraction(torch.where(mask, ratio, 1e6), A, mask, clip, clip_high)     # padding far out of range
    counted = [sum(c and m for c, m in zip(x.flatten().tolist(), mask.flatten().tolist())) / mask.sum().item() for x in (low, high)]
    close(torch.stack(fractions), torch.tensor(counted))


@settings(deadline=None)
@given(seeds, sizes)
def test_never_more_than_the_unclipped_objective_and_homogeneous_in_the_advantage(seed, clip):
    lp, old, A, _ = batch(seed)
    r = (lp - old).exp()
    L = clipped_objective(r, A, clip)
    assert (L <= r * A).all()
    inside = (r - 1).abs() < clip
    assert torch.equal(L[inside], (r * A)[inside])
    close(clipped_objective(r, 8 * A, clip), 8 * L)
    close(clipped_objective(r, A, clip, clip), L)            # the second ε, when it is the same
    wider = clipped_objective(r, A, clip, clip + .5)
    assert (wider >= L).all() and torch.equal(wider[A < 0], L[A < 0])


@pytest.mark.parametrize("seed", range(5))
def test_gradcheck(seed):
    lp, old, A, mask = batch(seed)
    for clip, high in ((.2, None), (.1, .4)):
        assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, A, mask, clip, high), lp.requires_grad_())  # noqa: B023


@pytest.mark.parametrize("seed", range(5))
def test_by_enumeration_the_ratio_gives_the_new_policys_gradient(seed):
    draw = torch.Generator().manual_seed(seed)
    old, theta, payoff = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    old = old.log_softmax(-1); theta.requires_grad_()
    truth, = torch.autograd.grad((theta.softmax(-1) * payoff).sum(), theta)
    every = torch.ones(1, 5, dtype=torch.bool)
    # one row with every token once, weighted by how often the old policy samples it, and a clip that never bites
    ours = policy_loss(theta.log_softmax(-1)[None], old[None], payoff[None], every, clip=1e6)
    close(torch.autograd.grad(-(old.exp() * ours).sum(), theta)[0], truth)


def test_padding_is_silent(poison):
    lp, old, A, mask = batch(1)
    clean = lp.clone().requires_grad_(); policy_loss(clean, old, A, mask).sum().backward()
    dirty = poison(lp.requires_grad_(), mask)
    loss = policy_loss(dirty, poison(old, mask), poison(A, mask), mask)
    close(loss, policy_loss(lp, old, A, mask)); assert (loss[~mask] == 0).all()
    loss.sum().backward()
    close(dirty.grad, clean.grad); assert (dirty.grad[~mask] == 0).all()
    ratio = probability_ratio(dirty, poison(old, mask), mask)
    assert (ratio[~mask] == 1).all()
    fractions = clip_fraction(poison(ratio.detach(), mask), poison(A, mask), mask)
    close(torch.stack(fractions), torch.stack(clip_fraction(ratio, A, mask)))


@settings(deadline=None)
@given(seeds, st.permutations(range(4)), st.integers(1, 5))
def test_order_split_and_padding_side(seed, order, shift):
    inputs = batch(seed)
    loss = policy_loss(*inputs)
    close(policy_loss(*(x[order] for x in inputs)), loss[order])
    close(torch.cat([policy_loss(*(x[:1] for x in inputs)), policy_loss(*(x[1:] for x in inputs))]), loss)
    wide = [torch.nn.functional.pad(x, (shift, 0)) for x in inputs]      # left padding
    close(policy_loss(*wide)[:, shift:], loss)
    wide = [torch.nn.functional.pad(x, (0, shift)) for x in inputs]      # right padding
    close(policy_loss(*wide)[:, :-shift], loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_log_ratios_are_finite_in_value_and_gradient(dtype):
    lp = torch.tensor([[1e4, 1e4, -1e4, -1e4]], dtype=dtype, requires_grad=True)
    zero, A = torch.zeros(1, 4, dtype=dtype), torch.tensor([[1., -1., 1., -1.]], dtype=dtype)
    loss = policy_loss(lp, zero, A, torch.ones(1, 4, dtype=torch.bool))
    loss.sum().backward()
    assert lp.grad.isfinite().all() and loss.isfinite().all()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # cut at 1 + ε;  e²⁰ = 485165195, the documented cut;  e⁻²⁰ ≈ 0;  cut at 1 − ε
    close(loss.double(), f64([[-1.2, 485165195.4, 0., .8]]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-6), (torch.bfloat16, .05)])
def test_narrow_floats(dtype, atol):
    lp, old, A, mask = batch(2)
    narrow = policy_loss(lp.to(dtype), old.to(dtype), A.to(dtype), mask)
    assert narrow.dtype == torch.float32
    close(narrow.double(), policy_loss(*(x.to(dtype).double() for x in (lp, old, A)), mask), atol=atol, rtol=0)


def test_old_policy_and_advantages_are_constants():
    lp, old, A, mask = batch(3)
    for x in (lp, old, A): x.requires_grad_()
    policy_loss(lp, old, A, mask).sum().backward()
    assert lp.grad is not None and old.grad is None and A.grad is None


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 4, 1), ()])
def test_advantages_that_would_broadcast_are_refused(shape, unchecked):
    x, mask = torch.zeros(4, 4), torch.ones(4, 4, dtype=torch.bool)
    with unchecked(), pytest.raises(ValueError, match="one advantage per token.*expand_as"):
        policy_loss(x, x, torch.ones(shape), mask)


def test_other_bad_input(unchecked):
    lp, old, A, mask = batch(4)
    with unchecked():
        with pytest.raises(ValueError, match="shapes differ.*old_logprobs"): policy_loss(lp, old[:, :1], A, mask)
        with pytest.raises(TypeError, match="mask.bool"): policy_loss(lp, old, A, mask.long())
        with pytest.raises(ValueError, match="ratio.*advantages"): clipped_objective(lp, A[:1])
        with pytest.raises(ValueError, match="nothing to average"): clip_fraction(lp.exp(), A, mask & False)
    for bad in (0., -.2, math.nan):
        with pytest.raises(ValueError, match="clip is"): policy_loss(lp, old, A, mask, bad)
        with pytest.raises(ValueError, match="clip_high is"): clip_active(lp.exp(), A, .2, bad)
