"""The table of libraries' losses: each formula against loops in plain Python, and our own rows against our presets."""

import importlib
import math
import sys

import pytest
import torch

from instruct_goose.compat.library_losses import (
    AVERAGES,
    KL_TERMS,
    LIBRARY_LOSSES,
    SOURCES,
    TERMS,
    LossInputs,
)
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.group import PRESET_SOURCES, PRESETS
from instruct_goose.objective.kl import ESTIMATORS
from instruct_goose.objective.masks import AGGREGATES, aggregate
from instruct_goose.objective.policy_loss import SURROGATES, policy_loss

TABLES = (SURROGATES, ADVANTAGES, AGGREGATES, ESTIMATORS, PRESETS, PRESET_SOURCES)

NEW = [[-0.4, -1.1, -2.0, -0.3], [-1.5, -0.2, -0.9, -0.7], [-0.6, -0.6, -0.6, -0.6]]
OLD = [[-0.9, -1.0, -0.5, -0.4], [-0.2, -0.3, -1.9, -0.1], [-2.0, -0.7, -0.5, -0.6]]
GOOD = [[0.8, 0.8, 0.8, 0.8], [-1.3, -1.3, -1.3, -1.3], [-0.5, 0.4, 0.2, 0.1]]
REF = [[-0.5, -1.6, -1.0, -0.2], [-1.0, -0.4, -0.4, -0.9], [-0.3, -0.8, -1.1, -0.6]]
LENGTHS = [3, 2, 4]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    "The plug-in of more losses, which registers opo and max_rl, in the tables of this file alone."
    before = [dict(table) for table in TABLES]
    sys.modules.pop("instruct_goose.compat.losses", None)
    yield importlib.import_module("instruct_goose.compat.losses")
    del sys.modules["instruct_goose.compat.losses"]
    for table, old in zip(TABLES, before, strict=True):
        table.clear()
        table.update(old)


def t(rows):
    return torch.tensor(rows, dtype=torch.float64)


MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
INPUTS = LossInputs(t(NEW), t(OLD), t(GOOD), MASK, clip=0.2, clip_high=0.3, dual_clip=2.0)


def clip(r):
    return min(max(r, 0.8), 1.3)


def smaller(r, a):
    return min(r * a, clip(r) * a)


def geometric_mean(row):
    return math.exp(sum(NEW[row][i] - OLD[row][i] for i in range(LENGTHS[row])) / LENGTHS[row])


def by_hand(term, row, i):
    "The loss of one token, with numbers alone."
    p, a = NEW[row][i], GOOD[row][i]
    r = math.exp(p - OLD[row][i])
    product = geometric_mean(row) ** LENGTHS[row]
    dual = max(smaller(r, a), 2.0 * a)
    return {
        "PPO's clip": -smaller(r, a),
        "PPO's clip and a dual clip": -dual if a < 0 else -smaller(r, a),
        "GSPO's clip": -smaller(geometric_mean(row), a),
        "GSPO-token's clip": -smaller(geometric_mean(row), a),
        "the clip of the response's ratio": -smaller(product, a),
        "CISPO, cut on both sides": -clip(r) * a * p,
        "CISPO, cut above": -min(r, 1.3) * a * p,
        "a clip without the min": -clip(r) * a,
        "ρ·clip(ρ) in the place of clip(ρ)·Â": min(r * a, r * min(max(r, 0.8), 1.2)),
        "a dual clip for every sign": -max(min(r * a, min(max(r, 0.8), 1.2) * a), 2.0 * a),
        "the ratio": -r * a,
        "the log-probability": -a * p,
    }[term]


@pytest.mark.parametrize("term", TERMS)
def test_each_term_is_its_formula(term):
    loss = TERMS[term].loss(INPUTS)
    for row, length in enumerate(LENGTHS):
        for i in range(length):
            assert math.isclose(loss[row, i].item(), by_hand(term, row, i), abs_tol=1e-12)


def test_the_token_form_of_gspo_has_the_tokens_gradient():
    "sg(s)·π/sg(π): inside the clip ∂L/∂log π is −s·Â, at each token its own Â."
    logprobs = (t(OLD) + 0.01).requires_grad_()
    inputs = INPUTS._replace(logprobs=logprobs)
    TERMS["GSPO-token's clip"].loss(inputs).sum().backward()
    wanted = -math.exp(0.01) * t(GOOD)
    assert torch.allclose(logprobs.grad[MASK], wanted[MASK])


def test_each_average_is_its_formula():
    x = t(GOOD)
    sums = [sum(GOOD[row][:n]) for row, n in enumerate(LENGTHS)]
    wanted = {
        "token mean": sum(sums) / 9,
        "sequence mean": (sums[0] / 3 + sums[1] / 2 + sums[2] / 4) / 3,
        "sums over B·L": sum(sums) / 12,
        "sums over B": sum(sums) / 3,
        "length × unmasked mean": sum(n * sum(GOOD[row]) for row, n in enumerate(LENGTHS)) / 12,
        "the sum": sum(sums),
        "all slots": sum(map(sum, GOOD)) / 12,
    }
    assert wanted.keys() == AVERAGES.keys()
    for name, number in wanted.items():
        assert math.isclose(AVERAGES[name](x, MASK).item(), number, abs_tol=1e-12), name


def test_each_kl_is_its_formula():
    for row in range(3):
        for p, q, o in zip(NEW[row], REF[row], OLD[row]):
            gap = p - q
            k3 = math.exp(-gap) - 1 + gap
            wanted = {
                "k3": k3,
                "k3 times ρ": math.exp(p - o) * k3,
                "k2": gap**2 / 2,
                "k1": gap,
                "k3, with the gradient of k2": k3,
                "k3, with the gradient of k2 times ρ": k3,
                "k3 reversed": math.exp(gap) - 1 - gap,
            }
            assert wanted.keys() == KL_TERMS.keys()
            for name, number in wanted.items():
                got = KL_TERMS[name].estimate(t([p]), t([q]), t([o])).item()
                assert math.isclose(got, number, abs_tol=1e-12), name


def test_the_gradients_of_the_kls_are_those_of_their_names():
    p, q, o = t([-0.4]).requires_grad_(), t([-1.0]), t([-0.7])
    for name, wanted in {
        "k3, with the gradient of k2": 0.6,
        "k3, with the gradient of k2 times ρ": 0.6 * math.exp(0.3),
        "k3 reversed": math.exp(0.6) - 1,
    }.items():
        (slope,) = torch.autograd.grad(KL_TERMS[name].estimate(p, q, o).sum(), p)
        assert math.isclose(slope.item(), wanted, abs_tol=1e-12), name


OUR_LOSSES = [
    (preset, loss)
    for loss in LIBRARY_LOSSES
    if loss.library == "instruct_goose"
    for preset in loss.name.split(", ")
]


@pytest.mark.parametrize(("preset", "loss"), OUR_LOSSES, ids=[name for name, _ in OUR_LOSSES])
def test_our_own_rows_are_our_presets(preset, loss):
    settings = PRESETS[preset]
    tokens = policy_loss(
        t(NEW), t(OLD), t(GOOD), MASK, 0.2, 0.3,
        level=settings["ratio_level"], surrogate=settings["surrogate"],
    )  # fmt: skip
    ours = aggregate(tokens, MASK, settings["aggregation"])
    theirs = AVERAGES[loss.average](TERMS[loss.term].loss(INPUTS), MASK)
    assert math.isclose(ours.item(), theirs.item(), abs_tol=1e-12)


def test_every_name_of_the_table_is_known():
    for loss in LIBRARY_LOSSES:
        assert loss.library in SOURCES and loss.term in TERMS and loss.average in AVERAGES
    titles = [loss.title for loss in LIBRARY_LOSSES]
    assert len(set(titles)) == len(titles)
    users = [user for kl in KL_TERMS.values() for user in kl.users]
    users += [user for term in TERMS.values() for user in term.users]
    assert {user.partition(":")[0] for user in users} <= set(SOURCES)
