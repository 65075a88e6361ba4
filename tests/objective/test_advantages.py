"""Returns, TD errors, GAE and groups: against double sums in plain Python, identities and numbers worked out by hand."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.lesson import running_example
from instruct_goose.objective.advantages import discounted_returns, gae, group_advantages, td_errors
from instruct_goose.objective.kl import kl_in_reward

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


dial = st.floats(0, 1)


def batch(seed, B=4, T=8):
    "rewards, values and a mask with gaps on any side; no row empty"
    draw = torch.Generator().manual_seed(seed)
    r, v = torch.randn(2, B, T, generator=draw, dtype=torch.float64)
    mask = torch.rand(B, T, generator=draw) < 0.6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return r, v, mask


def slow_gae(r, v, gamma, lam):
    "one response as lists: Âₜ = Σₗ (γλ)ˡ·(rₜ₊ₗ + γ·Vₜ₊ₗ₊₁ − Vₜ₊ₗ)"
    n = len(r)
    v = [*v, 0.0]
    return [
        sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, n))
        for t in range(n)
    ]


def test_running_example_by_hand():
    ex = running_example()
    rewards = kl_in_reward(ex.scores, ex.old_logprobs, ex.ref_logprobs, ex.mask, ex.beta)
    # δ of response 1, from the end: 1 − .8 = .2;  .9·.8 − .6 = .12;  −.022314 + .9·.6 − .5 = .017686
    # Â: .2;  .12 + .45·.2 = .21;  .017686 + .45·.21 = .112186
    # δ of response 2: −1.069315 + .2 = −.869315;  .9·(−.2) − .1 = −.28.  Â: −.869315;  −.28 − .45·.869315 = −.671192
    advantages, returns = gae(rewards, ex.old_values, ex.mask, 0.9, 0.5)
    close(
        td_errors(rewards, ex.old_values, ex.mask, 0.9),
        f64([[0.017686, 0.12, 0.2], [-0.28, -0.869315, 0]]),
        atol=1e-6,
        rtol=0,
    )
    close(advantages, f64([[0.112186, 0.21, 0.2], [-0.671192, -0.869315, 0]]), atol=1e-6, rtol=0)
    close(returns, f64([[0.612186, 0.81, 1], [-0.571192, -1.069315, 0]]), atol=1e-6, rtol=0)
    # G of response 1: 1; .9; −.022314 + .81 = .787686. Of response 2: −1.069315; ·.9 = −.962383
    close(
        discounted_returns(rewards, ex.mask, 0.9),
        f64([[0.787686, 0.9, 1], [-0.962383, -1.069315, 0]]),
        atol=1e-6,
        rtol=0,
    )


@given(seed=st.integers(0, 10**6), gamma=dial, lam=dial)
def test_against_the_double_sum(seed, gamma, lam):
    r, v, mask = batch(seed)
    advantages, returns = gae(r, v, mask, gamma, lam)
    G = discounted_returns(r, mask, gamma)
    for i, m in enumerate(mask):
        rewards = r[i, m].tolist()
        values = v[i, m].tolist()
        slow = f64(slow_gae(rewards, values, gamma, lam))
        close(advantages[i, m], slow, atol=1e-9, rtol=0)
        close(returns[i, m], slow + v[i, m], atol=1e-9, rtol=0)
        later = [sum(gamma**k * x for k, x in enumerate(rewards[t:])) for t in range(len(rewards))]
        close(G[i, m], f64(later), atol=1e-9, rtol=0)
    for x in (advantages, returns, G):
        assert (x[~mask] == 0).all()


def test_bfloat16_sums_do_not_stall():
    "a thousand rewards of 1: in bfloat16 the sum would stop at 256"
    one = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert discounted_returns(one, one.bool())[0, 0] == 1000
    assert gae(one, 0 * one, one.bool(), 1.0, 1.0)[0][0, 0] == 1000


def test_refusals(unchecked):
    r, v, mask = batch(4)
    empty = mask.clone()
    empty[[1, 3]] = False
    with unchecked():
        for fn in (
            lambda: gae(r, v[:, :1], mask),
            lambda: td_errors(r, v[:1], mask),
            lambda: discounted_returns(r, mask[:, 1:]),
        ):
            with pytest.raises(ValueError, match="shapes differ"):
                fn()
        for fn in (
            lambda: gae(r, v, empty),
            lambda: td_errors(r, v, empty),
            lambda: discounted_returns(r, empty),
        ):
            with pytest.raises(ValueError, match=r"\[1, 3\]"):
                fn()
        with pytest.raises(TypeError, match="mask.bool"):
            gae(r, v, mask.long())
        for bad in (-0.01, 1.01, float("nan")):
            with pytest.raises(ValueError, match="gamma is"):
                gae(r, v, mask, gamma=bad)
            with pytest.raises(ValueError, match="gamma is"):
                discounted_returns(r, mask, bad)
        with pytest.raises(ValueError, match="lam is"):
            gae(r, v, mask, gamma=0.0, lam=2.0)  # γλ alone would not show it


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("how", ["mean_std", "mean", "leave_one_out"])
def test_groups_against_the_statistics_module(how, ddof):
    scores = [1.0, 4.0, -2.0, 0.5, 3.0, 3.1, 0.0, 7.0]
    slow = []
    for group in (scores[:4], scores[4:]):
        for i, s in enumerate(group):
            others = group[:i] + group[i + 1 :]
            slow.append(
                {
                    "mean": s - statistics.mean(group),
                    "leave_one_out": s - statistics.mean(others),
                    "mean_std": (s - statistics.mean(group))
                    / ((statistics.stdev if ddof else statistics.pstdev)(group) + 0.01),
                }[how]
            )
    close(group_advantages(f64(scores), 4, how, eps=0.01, ddof=ddof), f64(slow))
    assert group_advantages(torch.tensor(scores).bfloat16(), 4, how).dtype == torch.float32
    assert not group_advantages(f64(scores).requires_grad_(), 4, how).requires_grad


@pytest.mark.parametrize(
    "scores", [[1.0, 4.0, -2.0, 0.5, 3.0, 3.1, 0.0, 7.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 5.0]]
)
def test_the_spread_of_the_batch_is_trls(scores):
    """TRL 1.16.0, trainer/grpo_trainer.py lines 2767–2787 and utils.nanstd: scale_rewards="batch" takes each group's own mean away and divides by the
    std of all scores, n − 1 beneath, plus 1e-4. By hand for [1, 1, 1, 1, 0, 0, 0, 5]: group means 1 and 1.25; the mean of all is 1.125, squares add up
    to 4·.125² + 3·1.125² + 3.875² = 18.875, std √(18.875/7) = 1.642081."""
    mean_all = sum(scores) / 8
    std = math.sqrt(sum((s - mean_all) ** 2 for s in scores) / 7)
    theirs = [
        (s - sum(group) / 4) / (std + 1e-4) for group in (scores[:4], scores[4:]) for s in group
    ]
    close(group_advantages(f64(scores), 4, "batch_std"), f64(theirs))
    if scores[4] == 0:
        close(
            group_advantages(f64(scores), 4, "batch_std"),
            f64([0.0] * 4 + [-1.25 / 1.642181] * 3 + [3.75 / 1.642181]),
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize("G", [2, 3, 5])
def test_leaving_one_out_is_unbiased_and_the_mean_is_not(G):
    "all 2^G groups of a policy that scores 1 with probability p = .7, else 0: the gradient on its logit is p(1 − p) = .21"
    groups = f64(list(itertools.product([1.0, 0.0], repeat=G)))
    prob = torch.where(groups > 0, 0.7, 0.3).double().prod(1)
    score_grad = groups - 0.7
    for how, factor in (("leave_one_out", 1.0), ("mean", (G - 1) / G)):
        advantages = group_advantages(groups.flatten(), G, how).view_as(groups)
        close(
            (prob * (advantages * score_grad).mean(1)).sum(), f64(0.21 * factor), atol=1e-6, rtol=0
        )


def test_group_refusals(unchecked):
    scores = torch.arange(6.0)
    with (
        unchecked(),
        pytest.raises(ValueError, match=r"scores has shape \(2, 3\), expected \(batch,\)"),
    ):
        group_advantages(scores.reshape(2, 3), 2)
    for size in (4, 5, 7):
        with pytest.raises(ValueError, match=f"6 rows do not divide into groups of {size}"):
            group_advantages(scores, size)
    for size in (1, 0, -2):
        with pytest.raises(ValueError, match="at least one other"):
            group_advantages(scores, size)
    with pytest.raises(ValueError, match="'median'"):
        group_advantages(scores, 2, "median")
    for place, bad in ((0, math.inf), (1, math.nan), (3, -math.inf)):
        scores = torch.arange(4.0)
        scores[place] = bad  # the first of them is named
        scores[3] = bad
        with unchecked(), pytest.raises(ValueError, match=rf"scores\[{place}\] is {bad}"):
            group_advantages(scores, 2)
