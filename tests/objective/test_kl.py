"""KL: against enumeration, PyTorch's own KL, finite differences and numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from instruct_goose.objective.kl import (
    ESTIMATORS,
    adaptive_beta,
    exact_kl,
    k1,
    k2,
    k3,
    kl_in_loss,
    kl_in_reward,
    log_ratio,
    sequence_kl,
    token_kl,
)

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def pair(seed, vocab=5, n=2):
    "n random distributions, float64 log-probabilities, far apart"
    draw = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(n, vocab, generator=draw, dtype=torch.float64)).log_softmax(-1)


def batch(seed=0, B=4, T=7, side="right"):
    "log-probabilities of a padded batch with lengths 1…T, no two rows alike"
    draw = torch.Generator().manual_seed(seed)
    lp, ref = -3 * torch.rand(2, B, T, generator=draw, dtype=torch.float64)
    lengths = torch.tensor([T, 1, 3, 5])[:B]
    mask = torch.arange(T) < lengths[:, None]
    return lp, ref, mask if side == "right" else mask.flip(1)


def test_by_hand():
    # π = (.7, .2, .1), π_ref = (.3, .3, .4): KL = .7 ln 7/3 + .2 ln 2/3 + .1 ln 1/4 = .59310 − .08109 − .13863 = .373386
    p = f64([0.7, 0.2, 0.1]).log()
    q = f64([0.3, 0.3, 0.4]).log()

    def mean(x):
        return (p.exp() * x).sum()

    close(exact_kl(p, q), f64(0.373386), atol=2e-6, rtol=0)
    # ½(.7·.8473² + .2·.4055² + .1·1.3863²) = ½(.50254 + .03288 + .19218) = .36380
    close(mean(k2(p - q)), f64(0.36380), atol=5e-6, rtol=0)
    # reversed: χ² − KL = (.49/.3 + .04/.3 + .01/.4 − 1) − .373386 = .418281
    close(mean(k3(q - p)), f64(0.418281), atol=2e-6, rtol=0)
    close(mean(k1(q - p)), f64(-0.373386), atol=2e-6, rtol=0)


@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 9))
def test_unbiased_and_pointing_the_right_way(seed, vocab):
    p, q = pair(seed, vocab)
    oracle = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    close(exact_kl(p, q), oracle, atol=1e-10, rtol=0)
    for k in (k1, k3):
        close((p.exp() * k(p - q)).sum(), oracle, atol=1e-10, rtol=0)
    if oracle > 0.05:
        for k in (k1, k3):
            assert ((p.exp() * k(q - p)).sum() - oracle).abs() > 1e-6, (
                "a reversed KL must be told from a right one"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_is_never_negative_and_keeps_its_digits(dtype):
    ell = torch.cat([torch.logspace(-7, 1, 200), -torch.logspace(-7, 0.95, 200)]).to(dtype)
    assert (k3(ell) >= 0).all() and (k2(ell) >= 0).all()
    if (
        dtype == torch.float32
    ):  # e^(−ℓ) − 1 + ℓ = ℓ²/2 − ℓ³/6 + …; where that is representable, expm1 keeps it
        small = torch.tensor([1e-2, -1e-2, 3e-3])
        series = small.double() ** 2 / 2 - small.double() ** 3 / 6 + small.double() ** 4 / 24
        close(k3(small).double(), series, rtol=2e-3, atol=0)
        close(
            k3(ell[ell.abs() > 0.1]), k3(ell[ell.abs() > 0.1].double()).float(), rtol=1e-4, atol=0
        )


def test_clamp_is_on_the_side_that_overflows():
    ell = torch.tensor([-1e4, -10.5, -9.0, 50.0, 1e4], requires_grad=True)
    y = k3(ell)
    y.sum().backward()
    top = math.exp(10) - 11
    close(y.detach(), torch.tensor([top, top, math.exp(9) - 10, 49.0, 9999.0]))
    close(ell.grad, torch.tensor([0.0, 0.0, 1 - math.exp(9), 1.0, 1.0]))
    assert k3(torch.tensor([-1e4]).half()).isfinite().all(), "e¹⁰ must fit in float16"
    assert k3(torch.tensor(-4.0), clamp=3.0) == k3(torch.tensor(-3.0), clamp=3.0)


def test_exact_kl_at_the_edges():
    certain = f64([1.0, 0.0, 0.0]).log().requires_grad_()
    kl = exact_kl(certain, f64([0.5, 0.25, 0.25]).log())
    kl.backward()
    close(kl.detach(), f64(math.log(2)))
    assert certain.grad.isfinite().all()
    assert exact_kl(f64([0.5, 0.5]).log(), f64([1.0, 0.0]).log()).isinf()
    assert exact_kl(f64([0.0, 1.0]).log(), f64([0.0, 1.0]).log()) == 0


def test_exact_kl_padding(poison):
    p, q = pair(4, n=12).view(2, 2, 3, 5)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    clean = exact_kl(p, q)
    p, q = (poison(x.clone().requires_grad_(), mask[..., None]) for x in (p, q))
    kl = exact_kl(p, q, mask)
    kl.sum().backward()
    close(kl[mask], clean[mask])
    assert (kl[~mask] == 0).all()
    for x in (p, q):
        assert x.grad.isfinite().all() and (x.grad[~mask] == 0).all() and (x.grad[mask] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_kl_dtypes_and_logits_refused(dtype):
    p, q = pair(5, vocab=300)
    close(
        exact_kl(p.to(dtype), q.to(dtype)).double(),
        exact_kl(p, q),
        rtol=0.1 if dtype == torch.bfloat16 else 1e-4,
        atol=0,
    )
    logits = torch.randn(2, 3, 300, dtype=dtype)
    with pytest.raises(ValueError, match=r"^logprobs: .*log_softmax"):
        exact_kl(logits, logits.log_softmax(-1))
    with pytest.raises(ValueError, match=r"^ref_logprobs: "):
        exact_kl(logits.log_softmax(-1), logits)


@given(seed=st.integers(0, 10**6))
def test_chain_rule_over_all_responses(seed):
    "two tokens from a vocabulary of three, the second depending on the first; token 2 ends a response"
    first, ref_first, *rows = pair(seed, vocab=3, n=6)
    then, ref_then = torch.stack(rows[:2]), torch.stack(rows[2:])
    tokens = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 2]])
    mask = torch.tensor([[True, True]] * 6 + [[True, False]])

    def step(f, t):
        return torch.stack([f[tokens[:, 0]], torch.cat([t.flatten(), f64([5.0])])], 1)  # 5: padding

    lp, ref = step(first, then), step(ref_first, ref_then)
    joint = lp.masked_fill(~mask, 0).sum(1)
    ref_joint = ref.masked_fill(~mask, 0).sum(1)
    oracle = kl_divergence(Categorical(logits=joint), Categorical(logits=ref_joint))
    for name in ("k1", "k3"):
        close((joint.exp() * sequence_kl(lp, ref, mask, name)).sum(), oracle, atol=1e-9, rtol=0)


def expected_gradient(loss, weights, theta):
    return torch.autograd.grad((weights.exp().detach() * loss).sum(), theta, retain_graph=True)[0]


@given(seed=st.integers(0, 10**6), vocab=st.integers(3, 5))
def test_every_placement_by_enumeration(seed, vocab):
    """One token, a vocabulary of three to five, on policy: the exact expected gradient of each estimator in each form, through
    the library's functions, against four targets worked out by hand from the softmax. Reverse: π(ℓ − KL); forward: π − π_ref;
    nothing; and E[k·∇log π] = π(k − E k) for a k that is a plain number."""
    p, q = pair(seed, vocab)
    ell = p - q

    def mean(x):
        return (p.exp() * x).sum()

    theta = p.clone().requires_grad_()
    lp = theta.log_softmax(-1)[None]
    one = torch.ones(vocab, 1, dtype=torch.bool)  # a batch of one-token responses, one of each kind
    zero, reverse, forward = 0 * p, p.exp() * (ell - mean(ell)), p.exp() - q.exp()
    values = {"k1": ell, "k2": ell**2 / 2, "k3": (-ell).exp() - 1 + ell}
    plain_number = {name: p.exp() * (k - mean(k)) for name, k in values.items()}
    close(plain_number["k3"], reverse - forward, atol=1e-9, rtol=0)

    def in_loss(name, **kw):
        return expected_gradient(kl_in_loss(lp.T, q[:, None], one, 1.0, name, **kw)[:, 0], p, theta)

    def in_reward(name):
        rewards = kl_in_reward(zero, p[:, None], q[:, None], one, 1.0, name)[:, 0]
        return expected_gradient(
            -rewards * lp[0], p, theta
        )  # what the policy gradient makes of a reward

    table = {("k2", "plain"): reverse, ("k3", "plain"): forward}
    for name in ESTIMATORS:
        table[name, "straight_through"] = table[name, "ratio"] = table[name, "both"] = reverse
        table[name, "reward"] = plain_number[name]
    close(plain_number["k1"], reverse, atol=1e-12, rtol=0)
    form = {
        "plain": {},
        "straight_through": dict(straight_through=True),
        "ratio": dict(old_logprobs=p[:, None]),
        "both": dict(straight_through=True, old_logprobs=p[:, None]),
    }
    for (name, how), want in table.items():
        got = in_reward(name) if how == "reward" else in_loss(name, **form[how])
        close(got, want, atol=1e-9, rtol=0, msg=f"{name}, {how}")
    close(
        expected_gradient(k1(lp[0] - q), p, theta), zero, atol=1e-12, rtol=0
    )  # plain k1, which kl_in_loss refuses


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("straight", [False, True])
def test_the_ratio_of_stale_samples_is_cut_where_it_would_overflow(name, straight):
    lp = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = kl_in_loss(lp, torch.full((1, 3), -1.0), None, 0.1, name, torch.zeros(1, 3), straight)
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all()
    # inside the cut nothing changes: ρ = e⁵ and ℓ = 6
    k = {"k1": 6.0, "k2": 18.0, "k3": math.exp(-6) + 5}[name]
    loss = kl_in_loss(f64([[5.0]]), f64([[-1.0]]), None, 0.1, name, f64([[0.0]]), straight)
    close(loss, f64([[0.1 * math.exp(5) * k]]))


FORMULAS = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_estimator_token_by_token(name, side):
    "In the sum of a response, in a straight-through loss, whose gradient is k2's, and in the reward. test_numbers has the padding."
    lp, ref, mask = batch(side=side)
    scores, k = (
        f64([2.0, -1.0, 0.5, 3.0]),
        f64([[FORMULAS[name](x) for x in row] for row in (lp - ref).tolist()]),
    )
    close(sequence_kl(lp, ref, mask, name), f64([row[m].sum() for row, m in zip(k, mask)]))
    loss = kl_in_loss(lp.requires_grad_(), ref, mask, 0.3, name, straight_through=True)
    close(loss, torch.where(mask, 0.3 * k, 0.0))
    close(
        torch.autograd.grad(loss.sum(), lp)[0], torch.where(mask, 0.3 * (lp - ref), 0.0)
    )  # ∇½ℓ² = ℓ
    rewards = kl_in_reward(scores, lp, ref, mask, 0.2, name)
    for i, row in enumerate(mask):
        slow = -0.2 * k[i][row]
        slow[-1] += scores[i]
        close(rewards[i][row], slow)
    assert (rewards[~mask] == 0).all() and not rewards.requires_grad


@given(seed=st.integers(0, 10**6), vocab=st.integers(3, 5), straight=st.booleans())
def test_stale_samples(seed, vocab, straight):
    "Under π_old every estimator with the ratio has the gradient of KL(π‖π_ref) and the value ρ·k; without the ratio none has that gradient."
    now, was, q = pair(seed, vocab, n=3)
    theta = now.clone().requires_grad_()
    lp = theta.log_softmax(-1)[None]
    target = now.exp() * ((now - q) - (now.exp() * (now - q)).sum())

    def loss(name, old):
        return kl_in_loss(lp, q[None], None, 1.0, name, old, straight_through=straight)

    for name in ESTIMATORS:
        with_ratio = loss(name, was[None])
        close(expected_gradient(with_ratio, was, theta), target, atol=1e-9, rtol=0)
        close(
            (was.exp() * with_ratio[0]).sum().detach(),
            (now.exp() * ESTIMATORS[name](now - q)).sum(),
        )
        if straight or name != "k1":  # plain k1 is refused
            assert not torch.allclose(
                expected_gradient(loss(name, None), was, theta), target, atol=1e-4
            )


def test_refusals(unchecked):
    lp, ref, mask = batch()
    scores = torch.ones(4).double()
    empty = mask.clone()
    empty[2] = False
    with unchecked():
        for fn in (
            lambda: log_ratio(lp, ref[:, :1]),
            lambda: log_ratio(lp, ref, mask[:1]),
            lambda: sequence_kl(lp, ref[:2], mask),
            lambda: kl_in_loss(lp, ref, mask, 0.1, old_logprobs=lp[:1]),
            lambda: exact_kl(torch.zeros(2, 1), torch.zeros(3, 1)),
        ):
            with pytest.raises(ValueError, match="shapes differ"):
                fn()
        with pytest.raises(TypeError, match="mask.bool"):
            log_ratio(lp, ref, mask.long())
        with pytest.raises(ValueError, match="one score per response"):
            kl_in_reward(scores[:, None], lp, ref, mask, 0.1)
        with pytest.raises(ValueError, match=r"\[2\]"):
            kl_in_reward(scores, lp, ref, empty, 0.1)
        with pytest.raises(ValueError, match="token_scores"):
            kl_in_reward(scores, lp, ref, mask, 0.1, token_scores=lp[:, :1])
        with pytest.raises(ValueError, match="'k4'.*k1, k2, k3"):
            token_kl(lp, ref, mask, "k4")
        with pytest.raises(ValueError, match="gradient of 0.*straight_through"):
            kl_in_loss(lp, ref, mask, 0.1, "k1")
        with pytest.raises(ValueError, match="beta is"):
            adaptive_beta(-0.1, 1.0, 1.0)


def test_controller_by_hand():
    assert adaptive_beta(1.0, 9.0, 0.5) == pytest.approx(1.02)  # error clipped to .2, times .1
    assert adaptive_beta(0.1, 0.55, 0.5) == pytest.approx(0.101)  # error .1
    assert adaptive_beta(0.1, 0.9, 0.5, gain=0.5, max_error=0.4) == pytest.approx(0.12)


@pytest.mark.parametrize(
    "kl, target",
    [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan"))],
)
def test_controller_refuses(kl, target):
    with pytest.raises(ValueError, match="target is|KL is"):
        adaptive_beta(0.1, kl, target)


def test_exact_kl_of_nearly_equal_distributions_is_zero_up_to_the_rounding_of_float32():
    "In float64 it is positive, in float32 it may fall just below 0."
    torch.manual_seed(0)
    logits = torch.randn(2000, 50, dtype=torch.float64)
    near = logits + 1e-5 * torch.randn_like(logits)
    p = logits.log_softmax(-1)
    q = near.log_softmax(-1)
    wide, narrow = exact_kl(p, q), exact_kl(p.float(), q.float())
    assert (wide > 0).all()
    assert -1e-6 < narrow.min() < 0 and (narrow - wide).abs().max() < 1e-6
