"""Ratio, clips, surrogates and sampler weights: against plain Python, enumeration, finite differences and numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.lesson import running_example
from instruct_goose.objective.policy_loss import (
    LEVELS,
    SURROGATES,
    clip_active,
    clip_fraction,
    clipped_objective,
    policy_loss,
    probability_ratio,
    sampler_weights,
)

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


ADVANTAGES = f64(
    [[0.112186, 0.21, 0.2], [-0.671192, -0.869315, 0.0]]
)  # derived by hand in test_advantages.py
seeds = st.integers(0, 10**6)
sizes = st.floats(0.01, 0.9)


def batch(seed, B=4, T=6):
    "logprobs, old logprobs, advantages and a mask with gaps on any side; no row empty; ratios well out of any clip range"
    draw = torch.Generator().manual_seed(seed)
    lp, old, A = torch.randn(3, B, T, generator=draw, dtype=torch.float64)
    mask = torch.rand(B, T, generator=draw) < 0.6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return 0.7 * lp - 3, 0.7 * old - 3, A, mask


def test_running_example_by_hand():
    ex = running_example()
    # ρ = .55/.5, .6/.4, .35/.5; .15/.25, .55/.5
    ratio = probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask)
    close(ratio, f64([[1.1, 1.5, 0.7], [0.6, 1.1, 1.0]]))
    # 1.1·.112186 = .123405;  1.5 is cut to 1.2: .252;  .7·.2 = .14 (the clip would say .8·.2 = .16, the min says no)
    # −.671192·.6 = −.402715 but −.671192·.8 = −.536954 is smaller;  1.1·(−.869315) = −.956246
    hand = f64([[0.123405, 0.252, 0.14], [-0.536954, -0.956246, 0.0]])
    close(clipped_objective(ratio, ADVANTAGES), hand, atol=1e-6, rtol=0)
    close(policy_loss(ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask), -hand, atol=1e-6, rtol=0)


@given(seeds, sizes, st.none() | sizes)
def test_zero_gradient_if_and_only_if_the_clip_is_active(seed, clip, clip_high):
    lp, old, A, mask = batch(seed)
    policy_loss(lp.requires_grad_(), old, A, mask, clip, clip_high).sum().backward()
    ratio = (lp - old).exp().detach()
    low, high = clip_active(ratio, A, clip, clip_high)
    assert torch.equal(lp.grad == 0, low | high | ~mask) and not (low & high).any()
    close(lp.grad[lp.grad != 0], (-ratio * A)[lp.grad != 0])
    fractions = clip_fraction(
        torch.where(mask, ratio, 1e6), A, mask, clip, clip_high
    )  # padding far out of range
    counted = [
        sum(c and m for c, m in zip(x.flatten().tolist(), mask.flatten().tolist()))
        / mask.sum().item()
        for x in (low, high)
    ]
    close(torch.stack(fractions), torch.tensor(counted))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 4, 1), ()])
def test_advantages_that_would_broadcast_are_refused(shape, unchecked):
    x = torch.zeros(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with unchecked(), pytest.raises(ValueError, match="one advantage per token.*expand_as"):
        policy_loss(x, x, torch.ones(shape), mask)


def slow_row(
    lp, old, A, mask, clip=0.2, high=0.2, *, level="token", surrogate="min", dual=None, weights=None
):
    """One response in floats: (losses, gradients to its log-probabilities), the latter written down case by case and not
    differentiated. Every token's ratio depends on all tokens of its row, so gradients of the row's summed loss add up."""
    T = len(lp)
    real = [t for t, m in enumerate(mask) if m]
    logs = {t: lp[t] - old[t] for t in real}
    share = {"token": 1, "sequence": 1 / max(1, len(real)), "product": 1, "sequence_token": 1}[
        level
    ]  # d log ρ / d log π
    of_row = (1 if level == "product" else 1 / max(1, len(real))) * sum(logs.values())
    losses, grads = [0.0] * T, [0.0] * T
    for t in real:
        rho = math.exp(logs[t] if level == "token" else of_row)
        w = 1.0 if weights is None else weights[t]
        kept = min(max(rho, 1 - clip), 1 + high)
        if surrogate == "weight":
            losses[t] -= w * kept * A[t] * lp[t]
            grads[t] -= w * kept * A[t]
            continue
        gain, slope = rho * A[t], rho * A[t]
        if surrogate == "min":
            if A[t] > 0 and rho > 1 + high:
                gain = (1 + high) * A[t]
                slope = 0.0
            if A[t] < 0 and rho < 1 - clip:
                gain = (1 - clip) * A[t]
                slope = 0.0
            if A[t] < 0 and dual is not None and rho > dual:
                gain = dual * A[t]
                slope = 0.0
        losses[t] -= w * gain
        for s in [t] if "token" in level else real:
            grads[s] -= w * slope * share
    return losses, grads


SETTINGS = [
    dict(level=level, surrogate=surrogate, dual=dual, weighted=weighted)
    for level in LEVELS
    for surrogate in SURROGATES
    for weighted in (False, True)
    for dual in ((None, 1.5) if surrogate == "min" else (None,))
]


def named(s):
    return "-".join(str(x) for x in s.values() if x)


def ours(lp, old, A, mask, clip, high, w, level, surrogate, dual, weighted):
    return policy_loss(
        lp,
        old,
        A,
        mask,
        clip,
        high,
        level=level,
        surrogate=surrogate,
        dual_clip=dual,
        weights=w if weighted else None,
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=named)
@pytest.mark.parametrize("seed", range(4))
def test_every_setting_equals_the_slow_version_in_value_and_gradient(setting, seed):
    lp, old, A, mask = batch(seed)
    w = torch.rand(*mask.shape, generator=torch.Generator().manual_seed(seed)).double() + 0.5
    clip, high = ((0.2, 0.2), (0.1, 0.5), (0.6, 0.05), (1.0, 4.0))[seed]
    loss = ours(lp.requires_grad_(), old, A, mask, clip, high, w, **setting)
    loss.sum().backward()
    for i in range(len(mask)):
        row = [x[i].tolist() for x in (lp, old, A, mask)]
        slow, slopes = slow_row(
            *row,
            clip,
            high,
            level=setting["level"],
            surrogate=setting["surrogate"],
            dual=setting["dual"],
            weights=w[i].tolist() if setting["weighted"] else None,
        )
        close(loss[i].detach(), f64(slow), atol=1e-11, rtol=1e-9)
        close(lp.grad[i], f64(slopes), atol=1e-11, rtol=1e-9)


def test_three_levels_by_hand():
    ex = running_example()
    # ρ = 1.1, 1.5, .7 and .6, 1.1. Products 1.155 and .66; geometric means 1.155^(1/3) = 1.0492057 and √.66 = .8124038
    levels = [
        probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask, level=level) for level in LEVELS
    ]
    close(levels[0], f64([[1.1, 1.5, 0.7], [0.6, 1.1, 1.0]]))
    close(levels[1], f64([[1.0492057] * 3, [0.8124038] * 2 + [1.0]]), atol=1e-7, rtol=0)
    close(levels[2], f64([[1.155] * 3, [0.66] * 2 + [1.0]]))
    assert levels[3].equal(levels[1])  # the same number; who pulls at it is another matter
    rows = [
        probability_ratio(ex.logprobs[1:, :2], ex.old_logprobs[1:, :2], level=level)
        for level in LEVELS
    ]  # no mask at all
    close(
        torch.cat(rows),
        f64([[0.6, 1.1], [0.8124038] * 2, [0.66] * 2, [0.8124038] * 2]),
        atol=1e-7,
        rtol=0,
    )
    empty = torch.zeros_like(ex.mask)
    for level in LEVELS:
        assert probability_ratio(ex.logprobs, ex.old_logprobs, empty, level=level).eq(1).all()


def test_gspo_token_by_hand_and_against_trls_formula():
    """s = 1.0492057 and .8124038, each token pulled by s times its own advantage (eq. 14); where s is beyond the clip, .8124 < 1 − .1 with
    Â < 0, not at all. TRL 0.24 and 1.0 have it as log π − sg(log π) + sg(mean log ρ), in trl.experimental.gspo_token: the same number."""
    ex = running_example()
    A = f64([[1.0, -2.0, 0.5], [-1.0, 3.0, 7.0]])
    lp = ex.logprobs.requires_grad_()
    loss = policy_loss(lp, ex.old_logprobs, A, ex.mask, level="sequence_token", clip=0.1)
    s1, s2 = 1.155 ** (1 / 3), 0.66**0.5
    close(loss.detach(), f64([[-s1, 2 * s1, -0.5 * s1], [0.9, -3 * s2, 0.0]]))
    close(
        torch.autograd.grad(loss.sum(), lp)[0], f64([[-s1, 2 * s1, -0.5 * s1], [0.0, -3 * s2, 0.0]])
    )
    ell = torch.where(ex.mask, lp - ex.old_logprobs, 0.0)
    theirs = (lp - lp.detach() + (ell.sum(1) / ex.mask.sum(1)).detach()[:, None]).exp()
    ours = probability_ratio(lp, ex.old_logprobs, ex.mask, level="sequence_token")
    close(ours[ex.mask], theirs[ex.mask])
    close(*(torch.autograd.grad((x * A)[ex.mask].sum(), lp)[0] for x in (ours, theirs)))
    one = A[:, :1].expand(2, 3)  # one advantage per response: GSPO's gradient, token by token
    close(
        *(
            torch.autograd.grad(
                policy_loss(lp, ex.old_logprobs, one, ex.mask, level=level).sum(), lp
            )[0]
            for level in ("sequence", "sequence_token")
        )
    )


@pytest.mark.parametrize("seed", range(3))
def test_by_enumeration_the_product_ratio_is_exact_and_the_token_ratio_is_not(seed):
    "All nine responses of two tokens from a vocabulary of three: old samples, the new policy's expected payoff and its gradient."
    draw = torch.Generator().manual_seed(seed)
    logits, old_logits = torch.randn(
        2, 4, 3, generator=draw, dtype=torch.float64
    )  # a first token, then one of three states
    payoff = torch.randn(9, generator=draw, dtype=torch.float64)
    a, b = (x.flatten() for x in torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))

    def both(z):
        return torch.stack([z.log_softmax(-1)[0, a], z.log_softmax(-1)[1 + a, b]], 1)

    logits.requires_grad_()
    (truth,) = torch.autograd.grad((both(logits).sum(1).exp() * payoff).sum(), logits)
    every = torch.ones(9, 2, dtype=torch.bool)
    A = payoff[:, None].expand(9, 2)
    chance = both(old_logits).sum(1).exp()

    def proposed(level, surrogate="ratio"):
        loss = policy_loss(
            both(logits), both(old_logits), A, every, clip=1e6, level=level, surrogate=surrogate
        )
        rows = (
            loss.mean(1) if surrogate == "ratio" and level != "token" else loss.sum(1)
        )  # one term per response, or per token
        return torch.autograd.grad(-(chance * rows).sum(), logits)[0]

    close(proposed("product"), truth)
    close(
        proposed("product", "weight"), truth, atol=1e-12, rtol=1e-9
    )  # sg(ρ)·∇log π summed over tokens is the same gradient
    assert (proposed("token") - truth).abs().max() > 0.01  # the earlier tokens are not reweighted
    assert (
        2 * proposed("sequence") - truth
    ).abs().max() > 0.01  # a geometric mean is no importance weight
    # on policy all of them are the policy gradient; the sequence ratio's is 1/|y| of it
    with torch.no_grad():
        old_logits.copy_(logits)
    chance = both(old_logits).sum(1).exp()
    for level, factor in (("token", 1), ("product", 1), ("sequence", 2)):
        close(factor * proposed(level), truth)


# ρ, Â, objective and slope at ε = .2, c = 3: only a bad token that has risen beyond c is cut
@given(seeds, st.integers(2, 6))
def test_uncapped_weights_by_enumeration(seed, vocab):
    "for any sampler and any earlier step: E_μ[w·loss] has the gradient of E_old[loss], clip and all"
    draw = torch.Generator().manual_seed(seed)
    mu, old, theta, A = torch.randn(4, 1, vocab, generator=draw, dtype=torch.float64)
    mu = mu.log_softmax(-1)
    old = old.log_softmax(-1)
    theta.requires_grad_()
    every = torch.ones(1, vocab, dtype=torch.bool)

    def grad(who, **kw):
        return torch.autograd.grad(
            (who.exp() * policy_loss(theta.log_softmax(-1), old, A, every, **kw)).sum(), theta
        )[0]

    for surrogate in SURROGATES:
        close(
            grad(mu, surrogate=surrogate, weights=sampler_weights(old, mu, every, math.inf)),
            grad(old, surrogate=surrogate),
        )


def test_sampler_weights_padding_and_edges(poison):
    lp, old, _, mask = batch(8)
    want = torch.where(mask, (lp - old).exp().clamp(max=0.7), 1.0)
    got = sampler_weights(
        poison(lp.requires_grad_(), mask), poison(old, mask), mask, 0.7
    )  # a cap below 1 leaves padding at 1
    close(got, want.detach())
    assert not got.requires_grad
    wild = torch.tensor([[1e4, -1e4, 0.0]])
    close(
        sampler_weights(wild, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)),
        torch.tensor([[2.0, 0.0, 1.0]]),
    )
    close(
        sampler_weights(
            wild.bfloat16(), torch.zeros(1, 3).bfloat16(), torch.ones(1, 3, dtype=torch.bool), 3
        ),
        torch.tensor([[3.0, 0.0, 1.0]]),
    )
    assert sampler_weights(lp.bfloat16(), old.bfloat16(), mask).dtype == torch.float32


def trl_weights(mode, log_old, log_mu, mask, low, high):
    """TRL 1.16.0, trainer/grpo_trainer.py lines 2662–2703, row by row in floats: the sum of a response's log-ratios for the two sequence modes,
    clamped in the two that truncate, 0 out of bounds (which may be None) in the two that mask. One weight per token; padding has none."""
    level, beyond = mode.split("_")
    rows = []
    for old, mu, real in zip(log_old.tolist(), log_mu.tolist(), mask.tolist(), strict=True):
        diffs = [a - b if m else 0.0 for a, b, m in zip(old, mu, real, strict=True)]
        ratios = (
            [math.exp(sum(diffs))] * len(diffs)
            if level == "sequence"
            else [math.exp(d) for d in diffs]
        )
        bottom, top = (-math.inf if low is None else low), (math.inf if high is None else high)
        cut = {
            "truncate": lambda r, low=bottom, high=top: max(low, min(r, high)),
            "mask": lambda r, low=bottom, high=top: 0.0 if r < low or r > high else r,
        }[beyond]
        rows.append([cut(r) for r in ratios])
    return f64(rows)


@pytest.mark.parametrize("low,high", [(None, 3.0), (0.5, 3.0), (None, 1.2), (0.3, None)])
@pytest.mark.parametrize(
    "mode,form",
    [
        ("token_truncate", {}),
        ("token_mask", dict(beyond="drop")),
        ("sequence_truncate", dict(level="product")),
        ("sequence_mask", dict(level="product", beyond="drop")),
    ],
)
def test_the_four_forms_of_trl(mode, form, low, high):
    "Its default is sequence_mask with (None, 3); its loss per token is multiplied by the weight (line 3147), as ours is."
    seen = set()
    for seed in range(4):
        old, mu, A, mask = batch(seed)
        theirs = trl_weights(mode, old, mu, mask, low, high)
        ours = sampler_weights(old, mu, mask, math.inf if high is None else high, floor=low, **form)
        close(ours[mask], theirs[mask])
        seen |= (
            {"above"}
            if high is not None and (theirs == (high if "truncate" in mode else 0.0))[mask].any()
            else set()
        )
        seen |= (
            {"within"}
            if ((theirs > (low or 0)) & (theirs < (high or math.inf)))[mask].any()
            else set()
        )
        lp = (old + 0.1 * A).requires_grad_()  # an update away from π_old
        plain = policy_loss(lp, old, A, mask)
        grads = [
            torch.autograd.grad(x[mask].sum(), lp, retain_graph=True)[0]
            for x in (policy_loss(lp, old, A, mask, weights=ours), plain * theirs)
        ]
        close(*grads)
    assert "within" in seen and ("above" in seen or high is None)


def test_unknown_settings_are_refused(unchecked):
    lp, old, A, mask = batch(10)
    for bad, says in (
        (
            dict(level="row"),
            "level is 'row': choose one of token, sequence, product, sequence_token",
        ),
        (dict(surrogate="max"), "surrogate is 'max': choose one of min, ratio, weight"),
        (dict(dual_clip=1.0), "dual_clip is 1.0"),
        (dict(dual_clip=0.5), "dual_clip is 0.5"),
        (dict(dual_clip=math.nan), "dual_clip is nan"),
        (
            dict(dual_clip=3, surrogate="weight"),
            "dual_clip belongs to surrogate='min', not to 'weight'",
        ),
        (dict(dual_clip=3, surrogate="ratio"), "dual_clip belongs"),
        (dict(clip=0.0, surrogate="weight"), "clip is 0"),
    ):
        with pytest.raises(ValueError, match=says):
            policy_loss(lp, old, A, mask, **bad)
    with pytest.raises(ValueError, match="level is 'row'"):
        probability_ratio(lp, old, mask, level="row")
    with pytest.raises(ValueError, match="dual_clip is 1"):
        clipped_objective(lp.exp(), A, dual_clip=1)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="cap is"):
            sampler_weights(lp, old, mask, cap)
    with unchecked():
        with pytest.raises(ValueError, match="'weights': \\(4, 1\\)"):
            policy_loss(lp, old, A, mask, weights=torch.ones(4, 1).double())
        with pytest.raises(ValueError, match="shapes differ"):
            sampler_weights(lp, old[:1], mask)
