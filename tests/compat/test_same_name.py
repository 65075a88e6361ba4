"""Same name, different mathematics: each formula against an oracle of its own, and the tests that tell them apart."""

import importlib
import json
import math
import statistics
import subprocess
import sys
from fractions import Fraction as Q
from pathlib import Path

import pytest
import torch
from same_name_formulas import (
    QUANTITIES,
    SOURCES,
    comparison_table,
    kinds_table,
    padded_example,
    tells_apart,
)
from torch.distributions import Categorical

from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.group import PRESET_SOURCES, PRESETS
from instruct_goose.objective.kl import ESTIMATORS, exact_kl
from instruct_goose.objective.masks import AGGREGATES
from instruct_goose.objective.policy_loss import SURROGATES, clipped_shares, policy_loss
from instruct_goose.objective.ppo import ppo_loss


def t(*x):
    return torch.tensor(x, dtype=torch.float64)


def close(a, b, atol=1e-09):
    return torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64),
        torch.as_tensor(b, dtype=torch.float64),
        atol=atol,
        rtol=0,
    )


def told_apart(name, stranger, answer="unknown"):
    "Each formula is known as what its row says, and a stranger as none of them."
    q = QUANTITIES[name]
    assert {r.library: tells_apart(name, r.f) for r in q.rows} == {
        r.library: r.kind for r in q.rows
    }
    assert tells_apart(name, stranger).startswith(answer)
    return q


def all_as(q, wanted, atol=1e-9):
    "The worked number of every formula of a kind."
    assert q.kinds.keys() == wanted.keys()
    for kind, rows in q.kinds.items():
        for r in rows:
            close(q.work(r.f), wanted[kind], atol)


@pytest.fixture
def ex():
    return padded_example()


def real(x, mask):
    return [[v for v, m in zip(row, ms) if m] for row, ms in zip(x.tolist(), mask.tolist())]


def test_masked_mean(ex):
    q = told_apart("masked mean", lambda x, m: (x * m).sum() / len(x))
    assert tells_apart("masked mean", lambda x, m: x[m].mean()) == "real tokens, empty: nan"
    total = sum(map(sum, real(ex.loss, ex.mask)))
    all_as(
        q,
        {
            kind: {"all slots": (total + 3) / 8, "all slots, padding as 0": total / 8}.get(
                kind, total / 5
            )
            for kind in q.kinds
        },
        1e-7,
    )


def test_whitening():
    "1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14 over 3 or 4; with the 9 behind them mean 4.2, squares 42.8 over 4."
    q = told_apart("whitening", lambda x, m: -x)
    x = t(1, 2, 3, 6)
    s = math.sqrt(14 / 3)
    n = math.sqrt(14 / 4)
    every = math.sqrt(42.8 / 4)
    wanted = {
        "centred": (x - 3) / s,
        "mean added back": (x - 3) / s + 3,
        "over all slots": (x - 4.2) / every,
        "centred, by n": (x - 3) / n,
        "not whitened": x,
        "mean added back, by n": (x - 3) / n + 3,
    }
    assert q.kinds.keys() == wanted.keys()
    for kind, (r, *_) in q.kinds.items():
        close(r.f(t([1, 2, 3, 6, 9]), torch.arange(5)[None] < 4)[0, :4], wanted[kind], 1e-6)


def test_returns():
    "The last token of a response: A = r − V, so A + V = r, which is the score less β·ℓ: 1, and −1 − .1·ln 2."
    q = told_apart("returns", lambda a, v, m: a)
    for r in q.kinds["before whitening"]:
        close(q.work(r.f), t(1, -1 - 0.1 * math.log(2)))
    assert (q.work(q["RLHF_in_notebooks"].f) - t(1, -1 - 0.1 * math.log(2))).abs().min() > 0.4


def test_value_clipping(ex):
    def slow(v, r, old, c, around):
        total = 0
        for vi, ri, oi in zip(v, r, old):
            total += max((vi - ri) ** 2, (around * oi + min(max(vi - oi, -c), c) - ri) ** 2) / 2
        return total / len(v)

    q = told_apart(
        "value clipping",
        lambda v, r, old, c: torch.minimum((v - r) ** 2, (v.clamp(old - c, old + c) - r) ** 2) / 2,
    )
    columns = [sum(real(x, ex.mask), []) for x in (ex.values, ex.returns, ex.old_values)]
    all_as(
        q,
        {
            "half the larger square": slow(*columns, 0.2, 1),
            "without V_old": slow(*columns, 0.2, 0),
            "the square": sum((v - r) ** 2 for v, r, _ in zip(*columns)) / 5,
        },
    )


PI, REF = (Q(7, 10), Q(2, 10), Q(1, 10)), (Q(3, 10), Q(3, 10), Q(4, 10))
KL = sum(float(p) * math.log(p / q) for p, q in zip(PI, REF))
CHI2 = float(sum(p * p / q for p, q in zip(PI, REF)) - 1)


def test_KL_k1():
    q = told_apart("KL, k1", lambda p, q: (p - q) / 2)
    close(KL, 0.3734, 1e-4)
    close(KL, exact_kl(t(0.7, 0.2, 0.1).log(), t(0.3, 0.3, 0.4).log()))
    for r in q.rows:
        close(q.work(r.f), -KL if r.library == "rlhf-book" else KL)


def test_KL_k3():
    q = told_apart("KL, k3", lambda p, q: (p - q) ** 2 / 2)
    close(CHI2 - KL, 0.4183, 1e-4)
    for r in q.rows:
        close(q.work(r.f), CHI2 - KL if r.library == "rlhf-book" else KL)
        close(r.f(t(1e-4), t(0.0)), t(5e-9), 1e-11)  # what a test near ℓ = 0 sees: nothing


def test_KL_as_a_loss():
    q = told_apart("KL as a loss", lambda p, r, old: (p - r) ** 2)

    def divergence(kind, z):  # of softmax(z), by enumeration
        p = z.softmax(-1)
        r = t(0.3, 0.3, 0.4)
        return {
            "gradient of KL(π‖π_ref)": (p * (p / r).log()).sum(),
            "gradient of KL(π_ref‖π)": (r * (r / p).log()).sum(),
            "gradient of ½χ²(π‖π_ref)": (p * p / r).sum() / 2,
            "no gradient": 0 * p.sum(),
        }[kind]

    z = t(0.7, 0.2, 0.1).log()
    step = 1e-6
    for kind, rows in q.kinds.items():  # finite differences of the whole divergence
        slopes = [
            (divergence(kind, z + step * e) - divergence(kind, z - step * e)) / (2 * step)
            for e in torch.eye(3).double()
        ]
        for r in rows:
            close(q.work(r.f), torch.stack(slopes), 1e-7)


def test_entropy(ex):
    q = told_apart(
        "entropy",
        lambda z, lp, m, tau: Categorical(logits=z / tau).entropy()[m].mean() / math.log(2),
    )
    S = {tau: Categorical(logits=ex.logits / tau).entropy() for tau in (1.0, 0.7)}
    sampled = sum(-sum(row) for row in real(ex.old_logprobs, ex.mask))
    all_as(
        q,
        {
            "real tokens": S[0.7][ex.mask].mean(),
            "all slots": S[0.7].mean(),
            "all slots, τ = 1": S[1.0].mean(),
            "all slots, padding as 0, τ = 1": S[1.0][ex.mask].sum() / 8,
            "per response, each pad −1": (sampled - 3) / 2,
            "per response": sampled / 2,
        },
    )


def test_logged_KL(ex):
    q = told_apart("logged KL", lambda new, old, m: ((old - new).exp() - 1 - (old - new))[m].mean())
    ell = [math.log(r) - 0.2 for r in (1.1, 1.5, 0.7, 0.6, 1.1)]  # new − old
    k = dict(
        k1=[-x for x in ell], k2=[x * x / 2 for x in ell], k3=[math.exp(x) - 1 - x for x in ell]
    )
    for kind, rows in q.kinds.items():
        which, where = kind.split(", ")
        for r in rows:
            close(q.work(r.f), sum(k[which]) / (5 if where == "real tokens" else 8))


def test_group_std():
    q = told_apart(
        "group std",
        lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-5),
        "divides by G, ϵ = 1e-05",
    )
    scores = [0.3, 0.9, 0.1, 0.5, -2.0]
    for r in q.rows:
        eps = float(r.kind.split("ϵ = ")[1].split(",")[0])
        close(
            r.f(t(*scores)),
            [(x - statistics.mean(scores)) / (statistics.stdev(scores) + eps) for x in scores],
        )


def test_aggregation(ex):
    q = told_apart("aggregation", lambda x, m: (x * m).sum() / 7)
    a, b = real(ex.loss, ex.mask)
    all_as(
        q,
        {
            "token mean": sum(a + b) / 5,
            "sequence mean": (sum(a) / 3 + sum(b) / 2) / 2,
            "sums over B·L": sum(a + b) / 8,
            "sums over B": sum(a + b) / 2,
            "the sum": sum(a + b),
            "all slots": (sum(a + b) + 3) / 8,
            "length × unmasked mean": (3 * (sum(a) + 1) + 2 * (sum(b) + 2)) / 8,
        },
    )
    column = t([0.3], [-0.7])
    close(q["TRL GRPO: luspo"].f(column, ex.mask), q["Liger: luspo"].f(column, ex.mask))


def test_temperature():
    q = told_apart("temperature", lambda z, a, tau: z.log_softmax(-1)[..., a] / tau)
    hot = [p ** (1 / 0.6) for p in (0.3, 0.2, 0.5)]
    for r in q.rows:
        close(
            q.work(r.f), math.log(0.5) if r.kind == "τ = 1" else math.log(hot[2] / sum(hot)), 1e-6
        )


def test_reward_position():
    q = told_apart("reward position", lambda s, m: torch.eye(4)[[0, 0, 0]])
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    for r in q.rows:
        got = r.f(t(2, -3), mask)
        at = {"last real token": 2, "last column": 4}.get(r.kind, 3)
        close(got, t([2.0 * (i == at) for i in range(5)], [0, 0, 0, 0, -3]))
    close(
        q["instruct_goose"].f(t(5), torch.tensor([[False, True, True]])), t([0, 0, 5])
    )  # with padding on the left the index is not the count


def test_clipped_objective():
    q = told_apart(
        "clipped objective", lambda r, a, e: torch.maximum(r * a, r.clamp(1 - e, 1 + e) * a)
    )
    all_as(
        q,
        {
            "the smaller of both": t(0.4, 0.96, -1.5, -0.8),
            "clipped on every side": t(0.64, 0.96, -1.2, -0.8),
            "ρ·clip(ρ) in the place of clip(ρ)Â": t(0.4, 1.2, -1.5, -0.5),
        },
    )


def test_dual_clip():
    q = told_apart("dual clip", lambda r, a, c: torch.minimum(r * a, r.clamp(0.8, 1.2) * a))
    for r in q.kinds["negative advantages only"]:
        # Â < 0: −ρ, the floor at −3, the clip's −.8; Â > 0: untouched
        close(r.f(t(2, 9, 0.5, 1, 9), t(-1, -1, -1, 1, 1), 3.0), t(-2, -3, -0.8, 1, 1.2))
    rho = t(1.0).requires_grad_()
    q["DI-engine: continuous"].f(rho, t(1.0), 3.0).sum().backward()
    close(rho.grad, t(0.0))


def test_delta_is_the_dual_clip_from_the_range_on_only():
    delta, ours = (
        QUANTITIES["dual clip"][name].f for name in ("TRL GRPO: delta", "instruct_goose")
    )
    rho, a = t(0.5, 1.15, 2, 9), t(-1, -1, -1, -1)
    for c in (1.2, 1.5, 3.0):
        close(delta(rho, a, c), ours(rho, a, c))
    close(delta(t(9.0), t(-1.0), 1.1), [-1.2])
    close(ours(t(9.0), t(-1.0), 1.1), [-1.1])  # below 1 + ε_high: the clip's own bound


def test_sampler_weights():
    q = told_apart("sampler weights", lambda log_w, m, low, high: torch.ones_like(log_w))
    all_as(
        q,
        {
            "cut above": [2, 0.25, 1],
            "cut on both sides": [2, 0.5, 1],
            "0 outside": [0, 0, 1],
            "whole responses, uncut": [4, 0.25, 1],
        },
    )
    far = t([4, 4], [1, 1]).log()  # geometric means of 4 and 1: the first response is given up
    close(
        q["OpenRLHF: seq, mask"].f(far, torch.ones(2, 2, dtype=torch.bool), 0.5, 2.0),
        t([0, 0], [1, 1]),
    )


def test_the_entropy_bonus_follows_the_average_of_the_loss():
    "Rows of 3 and 1 tokens with S = 1, 1, 1 and 3: token mean 6/4, sequence mean (1 + 3)/2; TRL takes the first for both."
    mask = torch.tensor([[True] * 3, [True, False, False]])
    S = t([1, 1, 1], [3, 0, 0])
    zero = torch.zeros(2, 3).double()
    for how, bonus in (("token_mean", 1.5), ("sequence_mean", 2.0)):
        close(ppo_loss(zero, zero, zero, mask, entropy=S, ent_coef=1.0, how=how)[0], -bonus)


def test_CISPO():
    "The pull on log π where ρ = 1.5 and .6, Â = 1: its weight, cut to 1.2 and .8, or nothing."
    q = told_apart(
        "CISPO",
        lambda new, old, a, low, high: (
            -torch.minimum((new - old).exp() * a, (new - old).exp().clamp(low, high) * a)
        ),
    )
    all_as(
        q,
        {
            "weight cut on both sides": [-1.2, -0.8],
            "weight cut above": [-1.2, -0.6],
            "no gradient outside": [0, 0],
        },
    )
    close(
        q["TRL GRPO"].f(t(-0.5, -1.2), t(-1.0, -1.0), t(2.0, -1.0), 0.8, 1.2),
        [-1.2 * 2 * -0.5, math.exp(-0.2) * -1.2],
    )


def test_clip_fraction(ex):
    q = told_apart("clip fraction", lambda r, a, m, e: ((r - 1).abs() > e)[m].double().mean())
    # ratios 1.1, 1.5, .7, .6, 1.1 with advantages + + + − −: 1.5 and .6 are cut, .7 is out of range and free
    for r in q.rows:
        close(q.work(r.f), 2 / 5 if r.kind.startswith("cut") else 3 / 8, 1e-6)


def test_CISPO_clip_fraction():
    "Four of five weights are cut; one of them is above the cap where Â > 0."
    q = told_apart("CISPO, clip fraction", lambda r, a, m, low, high: t(0.4).mean())
    all_as(q, {"either side, either sign": 4 / 5, "above, Â > 0": 1 / 5})
    ratios, signs = t([0.5, 0.5, 1, 2, 2]), t([1.0, -1.0, 1.0, 1.0, -1.0])
    shares = clipped_shares("weight", ratios, signs, torch.ones(1, 5, dtype=torch.bool), 0.2, 0.5)
    close(shares["clip_fraction"], 4 / 5, 1e-6)


def test_GMPO_clip_fraction(plugin):
    "Cut are ρ = .5 with Â < 0 and ρ = 2 with Â > 0; the other two lie out of range as well."
    q = told_apart("GMPO, clip fraction", lambda r, a, m, eps: t(0.3).mean())
    all_as(q, {"cut": 2 / 5, "out of range": 4 / 5})
    ratios, signs = t([0.5, 0.5, 1, 2, 2]), t([1.0, -1.0, 1.0, 1.0, -1.0])
    shares = clipped_shares("gmpo", ratios, signs, torch.ones(1, 5, dtype=torch.bool), 0.4)
    close(shares["clip_fraction"], 2 / 5, 1e-6)


def test_ReMax_advantage():
    "Rewards .5, 0, 1: the total is 1.5; from the second token on it is 1."
    q = told_apart("ReMax advantage", lambda r, m, b: r - b)
    all_as(q, {"total less baseline": [1.1] * 3, "reward to go less baseline": [1.1, 0.6, 0.6]})
    at_end = t([0, 0, 2]), torch.ones(1, 3, dtype=torch.bool), t(0.5)
    for row in q.rows:  # one score at the end: no difference
        close(row.f(*at_end), t([1.5, 1.5, 1.5]))


def test_GMPO_sampler_weights(plugin):
    "4, .25 and 1: their mean is 1.75, their geometric mean 1."
    q = told_apart("GMPO, sampler weights", lambda w, m, a: w.max() * a)
    all_as(q, {"arithmetic mean": 1.75, "geometric mean": 1.0})
    zero = torch.zeros(1, 3).double()
    mask = torch.ones(1, 3, dtype=torch.bool)
    ours = policy_loss(zero, zero, zero + 1, mask, surrogate="gmpo", weights=t([4, 0.25, 1]))
    close(-ours.mean(), 1.75)


@pytest.fixture
def plugin():
    "The plug-in of more losses, for one test."
    tables = (SURROGATES, ADVANTAGES, AGGREGATES, ESTIMATORS, PRESETS, PRESET_SOURCES)
    before = [dict(table) for table in tables]
    sys.modules.pop("instruct_goose.compat.losses", None)
    importlib.import_module("instruct_goose.compat.losses")
    yield
    del sys.modules["instruct_goose.compat.losses"]
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def test_the_table_is_complete():
    for q in QUANTITIES.values():
        assert callable(getattr(sys.modules[__name__], q.test)) and q.rows[0].library.startswith(
            "instruct_goose"
        )
        for r in q.rows:
            cells = (r.version, r.link, r.formula, q.number(r), r.good_for, r.verdict, r.kind)
            assert (
                all(cells)
                and not any("|" in c or "\n" in c for c in cells)
                and "::" in r.place
                and "nan" not in q.number(r)
            ), cells
    assert {r.library.partition(": ")[0] for q in QUANTITIES.values() for r in q.rows} == set(
        SOURCES
    )


def test_the_table_in_markdown():
    one = comparison_table("dual clip")
    assert [line.count("|") for line in one.split("\n")[2:]] == [6] * (2 + 6) and one.startswith(
        "**dual clip**"
    )
    assert (
        "https://github.com/opendilab/DI-engine/blob/d0b21d0/ding/rl_utils/ppo.py" in one
        and kinds_table(QUANTITIES["dual clip"]).count("\n") == 3
    )
    for unknown in (lambda: comparison_table("clip"), lambda: tells_apart("KL", abs)):
        with pytest.raises(ValueError, match="choose from masked mean"):
            unknown()


def test_the_lesson_says_what_it_needs(tmp_path):
    "Outside a checkout it ends with a message, and not with a traceback."
    root = Path(__file__).parents[2]
    cells = json.loads((root / "nbs/guides/same_name.ipynb").read_text("utf-8"))["cells"]
    first = next(
        "".join(c["source"])
        for c in cells
        if c["cell_type"] == "code" and "google.colab" not in "".join(c["source"])
    )

    def go(where):
        return subprocess.run(
            [sys.executable, "-c", first], cwd=where, capture_output=True, text=True
        )

    outside, inside = go(tmp_path), go(root / "nbs/guides")
    assert (
        outside.returncode == 1
        and "inside a checkout" in outside.stderr
        and "Traceback" not in outside.stderr
    )
    assert inside.returncode == 0, inside.stderr
