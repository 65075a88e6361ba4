"""What can be chosen by name stands in tables: an entry added by a user is accepted at once, and the meters follow it."""

import math

import pytest
import torch

from instruct_goose.lesson import running_example
from instruct_goose.objective.advantages import (
    ADVANTAGES,
    Advantage,
    discounted_returns,
    estimate_advantages,
    gae,
)
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS, kl_in_loss, token_kl
from instruct_goose.objective.masks import AGGREGATES, Aggregate, aggregate, whole_count
from instruct_goose.objective.policy_loss import (
    LEVELS,
    SURROGATES,
    Surrogate,
    clipped_shares,
    probability_ratio,
)
from instruct_goose.objective.ppo import ppo_loss

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


MASK = torch.tensor([[True, True, True, True], [False, True, True, False]])
# one token in each region at ε = .2, ε_high = .3, c = 2: below, in range, above, far above; the padding is out of every range
RATIO = f64([[0.5, 1.0, 1.4, 3.0], [9.0, 0.7, 2.5, 0.01]])
A = f64([[-1.0, 1.0, 1.0, -1.0], [-1.0, 1.0, -1.0, -1.0]])


def counted(which):
    "The share of the six real tokens for which `which(ρ, Â)` holds, one at a time."
    real = [
        (r, a)
        for r, a, m in zip(RATIO.flatten().tolist(), A.flatten().tolist(), MASK.flatten().tolist())
        if m
    ]
    return sum(bool(which(r, a)) for r, a in real) / len(real)


@pytest.mark.parametrize(
    "surrogate, dual, sides",
    [
        (
            "min",
            None,
            {"low": lambda r, a: r < 0.8 and a < 0, "high": lambda r, a: r > 1.3 and a > 0},
        ),
        (
            "min",
            2.0,
            {
                "low": lambda r, a: r < 0.8 and a < 0,
                "high": lambda r, a: r > 1.3 and a > 0,
                "dual": lambda r, a: r > 2 and a < 0,
            },
        ),
        ("ratio", None, {"low": lambda r, a: False, "high": lambda r, a: False}),
        ("weight", None, {"low": lambda r, a: r < 0.8, "high": lambda r, a: r > 1.3}),
    ],
)
def test_the_shares_that_the_clip_holds(surrogate, dual, sides):
    shares = clipped_shares(surrogate, RATIO, A, MASK, 0.2, 0.3, dual)
    hand = {f"clip_fraction_{side}": counted(which) for side, which in sides.items()}
    assert {"clip_fraction", *hand} == set(shares)
    for name, x in ({"clip_fraction": sum(hand.values())} | hand).items():
        assert math.isclose(shares[name].item(), x, abs_tol=1e-6), name


def test_the_meters_of_the_loss_speak_of_its_own_surrogate():
    for surrogate, total in (
        ("min", 2 / 6),
        ("ratio", 0.0),
        ("weight", 5 / 6),
    ):  # held at .2, .3: see RATIO
        parts = ppo_loss(
            RATIO.log(),
            torch.zeros_like(RATIO),
            A,
            MASK,
            clip=0.2,
            clip_high=0.3,
            surrogate=surrogate,
        )[1]
        close(parts["clip_fraction"], torch.tensor(total))
    assert (
        "clip_fraction_dual"
        in ppo_loss(RATIO.log(), torch.zeros_like(RATIO), A, MASK, dual_clip=2.0)[1]
    )


def test_a_surrogate_of_ones_own(monkeypatch):
    "SAPO's gate: 4/τ·σ(τ(ρ − 1))·Â; its slope in ρ, 4σ(1 − σ), is 1 at ρ = 1 and 4·σ(.5)·σ(−.5) at ρ = 1.5, τ = 1."

    def gate(x):
        return 4 * (x.ratio - 1).sigmoid() * x.advantages

    monkeypatch.setitem(SURROGATES, "sapo", Surrogate(gate))
    lp = f64([[0.0, math.log(1.5)]]).requires_grad_()
    old = f64([[0.0, 0.0]])
    one = torch.ones(1, 2, dtype=torch.bool)
    loss, parts = ppo_loss(lp, old, f64([[1.0, 1.0]]), one, surrogate="sapo")
    sigma = 1 / (1 + math.exp(-0.5))
    close(torch.autograd.grad(loss, lp)[0], f64([[-0.5, -0.5 * 1.5 * 4 * sigma * (1 - sigma)]]))
    assert parts["clip_fraction"] == parts["clip_fraction_low"] == parts["clip_fraction_high"] == 0
    with pytest.raises(ValueError, match="dual_clip belongs to"):
        ppo_loss(lp, old, f64([[1.0, 1.0]]), one, surrogate="sapo", dual_clip=2.0)

    def half(x):
        return {"gate": x.mask & (x.ratio > 1.2)}

    monkeypatch.setitem(SURROGATES, "sapo", Surrogate(gate, half))
    shares = clipped_shares("sapo", lp.exp(), f64([[1.0, 1.0]]), one)
    assert {k: x.item() for k, x in shares.items()} == {
        "clip_fraction": 0.5,
        "clip_fraction_low": 0,
        "clip_fraction_high": 0,
        "clip_fraction_gate": 0.5,
    }


def test_a_level_of_ones_own(monkeypatch):
    "The largest log-ratio of the response, at each of its tokens; 1 at padding whatever the function says."
    ex = running_example()
    monkeypatch.setitem(
        LEVELS,
        "boldest",
        lambda ell, mask: ell.masked_fill(~mask, -math.inf).amax(-1, keepdim=True).expand_as(ell),
    )
    close(
        probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask, level="boldest"),
        f64([[1.5] * 3, [1.1, 1.1, 1.0]]),
    )
    with pytest.raises(
        ValueError,
        match="level is 'row': choose one of token, sequence, product, sequence_token, boldest",
    ):
        probability_ratio(ex.logprobs, ex.old_logprobs, ex.mask, level="row")


def test_an_average_of_ones_own(monkeypatch):
    "Each response over the root of its length. Rows of 3 and 2: 1.9/√3 and −.1/√2, halved: .5131."
    ex = running_example()
    monkeypatch.setitem(AGGREGATES, "root", Aggregate(lambda mask, *_: mask.sum(-1).sqrt()))
    close(aggregate(ex.old_values, ex.mask, "root"), f64((1.9 / 3**0.5 - 0.1 / 2**0.5) / 2))
    assert whole_count("root", ex.mask) == 2
    with pytest.raises(ValueError, match=r"no True in rows \[1\]"):
        aggregate(ex.old_values, ex.mask & f64([[1.0], [0.0]]).bool(), "root")
    pieces = [
        aggregate(
            ex.old_values[i : i + 1],
            ex.mask[i : i + 1],
            "root",
            denominator=whole_count("root", ex.mask),
        )
        for i in (0, 1)
    ]
    close(sum(pieces), aggregate(ex.old_values, ex.mask, "root"))


def test_the_count_of_a_whole_minibatch():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]).bool()
    assert {
        how: float(whole_count(how, mask, 2))
        for how in ("token_mean", "sequence_mean", "sequence_sum", "group_token_mean")
    } == {"token_mean": 7, "sequence_mean": 4, "sequence_sum": 4, "group_token_mean": 2}
    with pytest.raises(ValueError, match="how is 'mean'"):
        whole_count("mean", mask)


def test_an_advantage_of_ones_own(monkeypatch):
    "1 for the best response of a group, else 0."

    def best(x):
        total = x.rewards.masked_fill(~x.mask, 0.0).sum(-1).view(-1, x.group_size)
        return torch.where(
            x.mask, (total == total.amax(1, keepdim=True)).double().view(-1, 1), 0.0
        ), None

    monkeypatch.setitem(ADVANTAGES, "best", Advantage(best, needs="group"))
    ex = running_example()
    rewards = f64([[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    close(
        estimate_advantages("best", rewards, ex.mask, group_size=2)[0],
        f64([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    )


def test_every_advantage_by_hand():
    """Rewards 0, 0, 1 and .5, −1.5 with a stray 7 at the padding. Totals 1 and −1: mean 0, std √2 with ddof 1 and 1 with 0."""
    mask = running_example().mask
    rewards, values = (
        f64([[0.0, 0.0, 1.0], [0.5, -1.5, 7.0]]),
        f64([[0.5, 0.6, 0.8], [0.1, -0.2, 3.0]]),
    )
    known = dict(values=values, baseline=f64([0.25, 0.25]), group_size=2, gamma=0.5, lam=0.5)
    hand = {
        "return": [[0.25, 0.5, 1.0], [-0.25, -1.5, 0.0]],
        "group_mean": [[1.0] * 3, [-1.0, -1.0, 0.0]],
        "group_mean_std": [[1 / (2**0.5 + 1e-4)] * 3, [-1 / (2**0.5 + 1e-4)] * 2 + [0.0]],
        "leave_one_out": [[2.0] * 3, [-2.0, -2.0, 0.0]],
        "group_mean_batch_std": [
            [1 / (2**0.5 + 1e-4)] * 3,
            [-1 / (2**0.5 + 1e-4)] * 2 + [0.0],
        ],  # one group is the batch
        "greedy": [[0.75] * 3, [-1.25, -1.25, 0.0]],
        # δ: 0 + .3 − .5, 0 + .4 − .6, 1 − .8; .5 − .1 − .1, −1.5 + .2; Â: −.2 + .25·(−.15), −.2 + .25·.2, .2; .3 − .25·1.3, −1.3
        "gae": [[-0.2375, -0.15, 0.2], [-0.025, -1.3, 0.0]],
    }
    for how, expected in hand.items():
        advantages, returns = estimate_advantages(how, rewards, mask, **known)
        close(advantages, f64(expected), msg=how)
        assert (returns is None) == (how != "gae")
    close(
        estimate_advantages("group_mean_std", rewards, mask, group_size=2, group_ddof=0)[0],
        f64([[1.0] * 3, [-1.0, -1.0, 0.0]]) / 1.0001,
    )
    close(
        estimate_advantages("gae", rewards, mask, **known)[1],
        gae(rewards, values, mask, 0.5, 0.5)[1],
    )
    missing = set(ADVANTAGES) - set(hand)
    assert not missing, f"work it out by hand: `hand` of {__file__} lacks {missing}"
    learns = [x.clone().requires_grad_() for x in (rewards, values)]
    for how in ADVANTAGES:
        out = estimate_advantages(how, learns[0], mask, **known | dict(values=learns[1]))
        assert not any(x.requires_grad for x in out if x is not None), how
    assert discounted_returns(rewards, mask, 0.5).equal(
        estimate_advantages("return", rewards, mask, gamma=0.5)[0]
    )


def test_what_an_advantage_lacks():
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = torch.zeros(2, 2)
    for how, says in (
        ("gae", "no values"),
        ("greedy", "no baseline: call score"),
        ("group_mean", "at least one other"),
        ("best", "choose one of gae"),
    ):
        with pytest.raises(ValueError, match=says):
            estimate_advantages(how, rewards, mask)


def test_estimators_and_gradients_of_the_kl(monkeypatch):
    ex = running_example()
    monkeypatch.setitem(ESTIMATORS, "abs", torch.abs)
    close(
        token_kl(ex.logprobs, ex.ref_logprobs, ex.mask, "abs"),
        (ex.logprobs - ex.ref_logprobs).abs() * ex.mask,
    )
    ways = dict(
        plain={},
        ratio=dict(old_logprobs=ex.old_logprobs),
        straight_through=dict(straight_through=True),
    )
    assert set(ways) == set(KL_GRADIENTS)
    for name, options in ways.items():
        lp = ex.logprobs.clone().requires_grad_()
        one = KL_GRADIENTS[name](lp, ex.ref_logprobs, ex.mask, 0.1, "k3", ex.old_logprobs)
        other = kl_in_loss(lp, ex.ref_logprobs, ex.mask, 0.1, "k3", **options)
        assert one.equal(other) and torch.autograd.grad(one.sum(), lp)[0].equal(
            torch.autograd.grad(other.sum(), lp)[0]
        )
