"""Every loss with every dial: its gradient against finite differences in float64, its value in three narrower floats against
float64, both where log-ratios are ±1e4, both with poison in the padding, with rows in another order and padding on another side."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from instruct_goose.models.reward_model import all_pairs_loss, pairwise_loss
from instruct_goose.objective.advantages import (
    ADVANTAGES,
    discounted_returns,
    estimate_advantages,
    gae,
    group_advantages,
    td_errors,
)
from instruct_goose.objective.gaussian import gaussian_entropy, gaussian_kl, gaussian_logprobs
from instruct_goose.objective.kl import (
    ESTIMATORS,
    exact_kl,
    kl_in_loss,
    kl_in_reward,
    log_ratio,
    sequence_kl,
    token_kl,
)
from instruct_goose.objective.logprobs import (
    entropy,
    log_softmax,
    logprobs_from_hidden,
    token_logprobs,
)
from instruct_goose.objective.masks import (
    AGGREGATES,
    aggregate,
    group_token_counts,
    masked_mean,
    masked_sum,
    masked_var,
    whiten,
)
from instruct_goose.objective.policy_loss import (
    LEVELS,
    SURROGATES,
    clip_fraction,
    clipped_shares,
    policy_loss,
    probability_ratio,
    sampler_weights,
)
from instruct_goose.objective.ppo import PPOLoss, ppo_loss, update_meters
from instruct_goose.objective.preference import dpo_loss, implicit_reward
from instruct_goose.objective.value_loss import explained_variance, value_loss

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


HALF = (torch.float16, torch.bfloat16)
MASK = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
TOKENS = torch.randint(5, MASK.shape, generator=torch.Generator().manual_seed(5))
TOKENS[0, 0] = 3  # never one that the extreme logits forbid


def numbers(kind="usual", dtype=torch.float64):
    """Inputs by name. "usual": ratios beyond every clip on both sides. "extreme": log-ratios of 0 and ±1e4, values and
    returns of ±1e4, logits of ±1e4 and −inf, margins of ±2e4."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    b = dict(
        logprobs=-2 + 0.6 * normal(4, 5),
        old=-2 + 0.6 * normal(4, 5),
        ref=-2 + 0.6 * normal(4, 5),
        sampled=-2 + 0.4 * normal(4, 5),
        A=normal(4, 5),
        V=normal(4, 5),
        V_old=normal(4, 5),
        R=normal(4, 5),
        S=normal(4, 5).abs(),
        logits=2 * normal(4, 5, 5),
        ref_logits=2 * normal(4, 5, 5),
        hidden=normal(4, 3),
        weight=normal(5, 3),
        bias=normal(5),
        chosen=normal(4),
        rejected=normal(4),
        ref_chosen=normal(4),
        ref_rejected=normal(4),
        actions=normal(4, 5, 2),
        mean=normal(4, 5, 2),
        std=0.5 + normal(4, 5, 2).abs(),
        mean2=normal(4, 5, 2),
        std2=0.5 + normal(4, 5, 2).abs(),
    )
    if kind == "extreme":

        def sign(*shape):
            return torch.randint(-1, 2, shape, generator=draw).double()

        def far(x):
            return torch.where(sign(*x.shape) > 0, -1e4, x)

        b |= {k: far(b[k]) for k in ("logprobs", "old", "ref", "sampled")} | {
            k: 1e4 * sign(4, 5) for k in ("V", "V_old", "R")
        }
        b |= {k: 1e4 * sign(4) for k in ("chosen", "rejected", "ref_chosen", "ref_rejected")}
        b["logits"] = 1e4 * sign(4, 5, 5)
        b["logits"][0, 0] = f64([-math.inf, 1.0, -math.inf, 0.0, 2.0])
        b["mean"], b["mean2"] = 100 * sign(4, 5, 2), 100 * sign(4, 5, 2)
    return SimpleNamespace(**{k: x.to(dtype) for k, x in b.items()})


def counts(how):
    return dict(group_tokens=group_token_counts(MASK, 2)) if how == "group_token_mean" else {}


def ppo(how, **dials):
    return lambda b: ppo_loss(
        b.logprobs,
        b.old,
        b.A,
        MASK,
        values=b.V,
        returns=b.R,
        old_values=b.V_old,
        entropy=b.S,
        ent_coef=0.01,
        how=how,
        **counts(how),
        **dials,
    )[0]


def mean(how):
    return lambda b: aggregate(b.V, MASK, how, **counts(how))


LP = ("logprobs",)
CASES = {}  # name -> (function of the numbers, which of them learn)
for level, surrogate in itertools.product(LEVELS, SURROGATES):
    dial = dict(level=level, surrogate=surrogate)
    CASES[f"policy_loss {level} {surrogate}"] = (
        lambda b, dial=dial: policy_loss(b.logprobs, b.old, b.A, MASK, **dial),
        LP,
    )
    CASES[f"policy_loss {level} {surrogate} weights"] = (
        lambda b, dial=dial: policy_loss(
            b.logprobs,
            b.old,
            b.A,
            MASK,
            clip_high=0.4,
            weights=sampler_weights(b.old, b.sampled, MASK),
            **dial,
        ),
        LP,
    )
    if surrogate == "min":
        CASES[f"policy_loss {level} dual"] = (
            lambda b, dial=dial: policy_loss(b.logprobs, b.old, b.A, MASK, dual_clip=1.2, **dial),
            LP,
        )
for k, through, rho in itertools.product(ESTIMATORS, (False, True), (False, True)):
    if (k, through, rho) == ("k1", False, False):
        continue  # refused: it would do nothing
    CASES[f"kl_in_loss {k}{' through' * through}{' rho' * rho}"] = (
        lambda b, k=k, s=through, rho=rho: kl_in_loss(
            b.logprobs, b.ref, MASK, 0.3, k, b.old if rho else None, s
        ),
        LP,
    )
CASES |= {
    f"token_kl {k}": (lambda b, k=k: token_kl(b.logprobs, b.ref, MASK, k), LP) for k in ESTIMATORS
}
CASES |= {f"aggregate {how}": (mean(how), ("V",)) for how in AGGREGATES}
CASES |= {f"ppo_loss {how}": (ppo(how), ("logprobs", "V", "S")) for how in AGGREGATES}
CASES |= {
    "ppo_loss all dials": (
        ppo("group_token_mean", level="sequence", dual_clip=1.2, clip_high=0.3, value_clip=None),
        ("logprobs", "V", "S"),
    ),
    "probability_ratio": (lambda b: probability_ratio(b.logprobs, b.old, MASK), LP),
    "log_ratio": (lambda b: log_ratio(b.logprobs, b.ref, MASK), LP),
    "sequence_kl": (lambda b: sequence_kl(b.logprobs, b.ref, MASK), LP),
    "exact_kl": (
        lambda b: exact_kl(b.logits.log_softmax(-1), b.ref_logits.log_softmax(-1), MASK),
        ("logits", "ref_logits"),
    ),
    "token_logprobs": (lambda b: token_logprobs(b.logits, TOKENS, 0.7), ("logits",)),
    "log_softmax": (
        lambda b: log_softmax(b.logits, 0.7).clamp(min=-60.0),
        ("logits",),
    ),  # −∞ for a forbidden token
    "entropy": (lambda b: entropy(b.logits, 1.3), ("logits",)),
    "logprobs_from_hidden": (
        lambda b: logprobs_from_hidden(
            b.hidden, b.weight, TOKENS[0, :4], 0.7, b.bias, chunk_bytes=80
        ),
        ("hidden", "weight", "bias"),
    ),
    "value_loss": (lambda b: value_loss(b.V, b.R, MASK), ("V",)),
    "value_loss clip": (lambda b: value_loss(b.V, b.R, MASK, b.V_old, 0.2), ("V",)),
    "masked_sum": (lambda b: masked_sum(b.V, MASK, -1), ("V",)),
    "masked_mean": (lambda b: masked_mean(b.V, MASK), ("V",)),
    "masked_var": (lambda b: masked_var(b.V, MASK), ("V",)),
    "whiten": (lambda b: whiten(b.V, MASK), ("V",)),
    "whiten, mean kept": (lambda b: whiten(b.V, MASK, shift_mean=False), ("V",)),
    "PPOLoss": (
        lambda b: PPOLoss()(b.old, b.logprobs, b.A, b.V_old, b.V, b.R, MASK, MASK)[0],
        ("logprobs", "V"),
    ),
    "implicit_reward": (lambda b: implicit_reward(b.chosen, b.ref_chosen, 0.5), ("chosen",)),
    "dpo_loss": (
        lambda b: dpo_loss(b.chosen, b.rejected, b.ref_chosen, b.ref_rejected, 0.5),
        ("chosen", "rejected"),
    ),
    "dpo_loss smooth": (
        lambda b: dpo_loss(b.chosen, b.rejected, b.ref_chosen, b.ref_rejected, 0.5, 0.2),
        ("chosen", "rejected"),
    ),
    "pairwise_loss": (
        lambda b: pairwise_loss(b.chosen, b.rejected, b.ref_chosen.abs().detach()),
        ("chosen", "rejected"),
    ),
    "all_pairs_loss": (
        lambda b: all_pairs_loss(b.chosen, torch.tensor([1.0, 2.0, 2.0, 5.0])),
        ("chosen",),
    ),
    "gaussian_logprobs": (
        lambda b: gaussian_logprobs(b.actions, b.mean, b.std, MASK),
        ("mean", "std"),
    ),
    "gaussian_entropy": (lambda b: gaussian_entropy(b.std), ("std",)),
    "gaussian_kl": (
        lambda b: gaussian_kl(b.mean, b.std, b.mean2, b.std2),
        ("mean", "std", "mean2", "std2"),
    ),
}
CONSTANT = {  # no gradient, by design: targets and meters
    "kl_in_reward": lambda b: kl_in_reward(b.chosen, b.logprobs, b.ref, MASK, 0.3),
    "sampler_weights": lambda b: sampler_weights(b.old, b.sampled, MASK),
    "discounted_returns": lambda b: discounted_returns(b.R, MASK, 0.9),
    "td_errors": lambda b: td_errors(b.R, b.V, MASK, 0.9),
    "gae": lambda b: gae(b.R, b.V, MASK, 0.9, 0.8)[0],
    "gae returns": lambda b: gae(b.R, b.V, MASK, 0.9, 0.8)[1],
    "group_advantages": lambda b: group_advantages(b.chosen, 2),
    "explained_variance": lambda b: explained_variance(b.V, b.R, MASK),
    "clip_fraction": lambda b: torch.stack(
        clip_fraction(probability_ratio(b.logprobs, b.old, MASK), b.A, MASK)
    ),
    "clipped_shares": lambda b: torch.stack(
        list(
            clipped_shares("weight", probability_ratio(b.logprobs, b.old, MASK), b.A, MASK).values()
        )
    ),
    "update_meters": lambda b: torch.stack(
        list(update_meters(b.logprobs, b.old, b.A, MASK).values())
    ),
}


def advantage(how):
    "An entry of ADVANTAGES with everything that one may need."

    def estimate(b):
        return estimate_advantages(
            how,
            b.R,
            MASK,
            values=b.V,
            baseline=b.chosen,
            group_size=2,
            gamma=0.9,
            lam=0.8,
            entropy=b.S,
        )[0]

    return estimate


CONSTANT |= {f"estimate_advantages {how}": advantage(how) for how in ADVANTAGES}
COVERED_ELSEWHERE = {
    "response_mask",
    "last_index",
    "same_shape",
    "group_token_counts",
    "clip_active",
    "clipped_tokens",
    "clipped_objective",
    "k1",
    "k2",
    "k3",
    "adaptive_beta",
    "adaptive_entropy",
    "wide",
    "chosen",
    "whole_count",
    "whole_groups",
    "Aggregate",
    "Surrogate",
    "SurrogateInputs",
    "complete_settings",
    "Estimator",
    "Advantage",
    "AdvantageInputs",  # ids, bools, plain numbers; or what the cases above are made of
    "Head",
    "head_scores",
    "tile_shape",
    "tiles",
    "own_column",
    "Blocks",
    "tile_gradient",
    "add_product",
    "shape_for",
    "tile_bytes",
    "refuse_if",
    "checks_at_end",
    "LogprobsInPieces",
    "Compared",
    "compare_heads",
}  # test_logprobs_in_pieces


def estimators_of_advantages():
    "The functions of the table ADVANTAGES: the cases of their entries test them."
    return {entry.estimate.__name__ for entry in ADVANTAGES.values()}


def test_no_function_is_left_out():
    from importlib import import_module
    from pkgutil import iter_modules

    import instruct_goose.objective as package

    public = {
        n
        for m in iter_modules(package.__path__)
        if m.name != "group"
        for n in import_module(f"{package.__name__}.{m.name}").__all__
        if not n.isupper()
    }
    covered = {n.split()[0].rstrip(",") for n in CASES | CONSTANT}
    covered |= estimators_of_advantages()
    missing = public - COVERED_ELSEWHERE - {"only_tensors"} - covered
    assert not missing, (
        f"without finite differences: {missing}. Add an entry to CASES of {__file__}, or to "
        "CONSTANT if it has no gradient"
    )


def gradients(fn, learns, b):
    for k in learns:
        getattr(b, k).requires_grad_()
    out = fn(b)
    weights = torch.linspace(1.0, 2.0, out.numel()).view_as(out)  # a whitened sum is 0
    return out.detach(), torch.autograd.grad(
        (out.double() * weights.double()).sum(), [getattr(b, k) for k in learns]
    )


def is_frozen(name):
    "Part of it is held constant, so that differences of its value say something else: gradients in test_policy_loss and test_kl."
    return (
        "sequence_token" in name
        or "weight" in name.split()[2:3]
        or "through" in name
        or name == "kl_in_loss k2 rho"
    )


@pytest.mark.parametrize("name", [name for name in CASES if not is_frozen(name)])
def test_finite_differences(name):
    fn, learns = CASES[name]
    b = numbers()
    inputs = [getattr(b, k).requires_grad_() for k in learns]

    def of(*xs):
        return fn(SimpleNamespace(**vars(b) | dict(zip(learns, xs, strict=True))))

    assert torch.autograd.gradcheck(of, inputs)
    moved = gradients(fn, learns, numbers())[1]
    assert all(g.abs().sum() > 0 for g in moved), "a gradient of zeros agrees with anything"


GIVEN = {
    "actions"
}  # numbers of the user, neither target nor reference: no rule says that they are constants


@pytest.mark.parametrize("name", CASES | CONSTANT)
def test_samplers_references_targets_and_meters_have_no_gradient(name):
    b = numbers()
    (fn, learns) = CASES.get(name, (CONSTANT.get(name), ()))
    for x in vars(b).values():
        x.requires_grad_()
    out = fn(b)
    if learns:
        out.sum().backward()
    else:
        assert not out.requires_grad
    assert {k for k, x in vars(b).items() if x.grad is not None} - GIVEN == set(learns)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", ["usual", "extreme"])
@pytest.mark.parametrize("name", CASES | CONSTANT)
def test_narrow_floats_give_what_float64_gives(name, kind, dtype):
    """From the same rounded inputs, in float32 or wider and finite. A gradient comes back in the precision of its input: finite,
    but in float16 where the true one is beyond 65504, then inf. What goes through a head's own matrix product is coarser."""
    narrow = numbers(kind, dtype)
    wide = SimpleNamespace(**{k: x.double() for k, x in vars(narrow).items()})
    fn, learns = CASES.get(name, (CONSTANT.get(name), ()))
    if name == "exact_kl":  # the distributions, not the logits, are its input
        for b in (narrow, wide):
            b.logits = b.logits.float()
            b.ref_logits = b.ref_logits.float()
    if learns:
        (got, g), (expected, h) = gradients(fn, learns, narrow), gradients(fn, learns, wide)
    else:
        got = fn(narrow)
        g = []
        expected = fn(wide)
        h = []
    keeps = name.startswith("whiten")
    assert got.dtype == dtype if keeps else got.dtype == torch.float32
    assert expected.isfinite().all() and got.isfinite().all()
    coarse = (
        dict(rtol=0.02, atol=0.02)
        if dtype in HALF and (keeps or name == "logprobs_from_hidden")
        else dict(rtol=2e-5, atol=2e-6 * max(1.0, expected.abs().max().item()))
    )
    close(got.double(), expected.double(), **coarse)
    for x, y in zip(g, h, strict=True):
        assert dtype == torch.float16 or x.isfinite().all()
        close(
            x,
            y.to(x.dtype),
            rtol=2e-2 if dtype in HALF else 1e-3,
            atol=(2e-2 if dtype in HALF else 1e-5) * max(1e-3, min(6e4, y.abs().max().item())),
        )


NO_MASK = {
    "token_logprobs",
    "log_softmax",
    "entropy",
    "logprobs_from_hidden",
    "implicit_reward",
    "dpo_loss",
    "dpo_loss smooth",
    "pairwise_loss",
    "all_pairs_loss",
    "gaussian_entropy",
    "gaussian_kl",
    "group_advantages",
    "exact_kl",
}  # exact_kl's is in test_kl: its inputs are distributions
MASKED = [name for name in CASES | CONSTANT if name not in NO_MASK]


def outcome(name, b):
    "The value, and the gradient of it times a number for each token or row."
    fn, learns = CASES.get(name, (CONSTANT.get(name), ()))
    for k in learns:
        getattr(b, k).requires_grad_()
    out = fn(b)
    weights = {2: b.W, 1: b.w}.get(out.ndim, f64(1.0))
    return out.detach(), torch.autograd.grad(
        (out * weights).sum(), [getattr(b, k) for k in learns]
    ) if learns else ()


def weighed(b):
    b.W, b.w = 1 + torch.arange(20).double().view(4, 5) / 20, 1 + torch.arange(4).double()
    return b


def by_token(x, mask):
    return mask.view(*mask.shape, *[1] * (x.ndim - 2)).expand_as(x)


@pytest.mark.parametrize("name", MASKED)
def test_padding_is_silent(name, poison):
    clean, dirty = weighed(numbers()), weighed(numbers())
    for k, x in vars(dirty).items():
        if x.shape[:2] == MASK.shape and k != "W":
            setattr(dirty, k, poison(x, by_token(x, MASK)))
    (a, g), (b, h) = outcome(name, clean), outcome(name, dirty)
    assert b.isfinite().all()
    close(b, a)
    for x, y in zip(g, h, strict=True):
        close(y, x)
        assert (y[~by_token(y, MASK)] == 0).all() and (y != 0).any()


@pytest.mark.parametrize("how", ["rows", "left", "right"])
@pytest.mark.parametrize("name", MASKED)
def test_order_of_rows_and_side_of_padding_do_not_matter(name, how, monkeypatch):
    if "sequence_sum" in name and how != "rows":
        return  # it divides by the width, or by the length that it is given: test_masks

    def moved(x):
        if x.shape[:1] != (4,):
            return x
        if how == "rows":
            return x[[2, 3, 0, 1]]  # groups of two stay together
        if x.shape[:2] != (4, 5):
            return x
        more = torch.zeros(4, 2, *x.shape[2:], dtype=x.dtype)
        return torch.cat([more, x] if how == "left" else [x, more], 1)

    there = SimpleNamespace(**{k: moved(x) for k, x in vars(weighed(numbers())).items()})
    mask = moved(MASK)
    out, g = outcome(name, weighed(numbers()))
    monkeypatch.setattr(sys.modules[__name__], "MASK", mask)
    got, h = outcome(name, there)
    for x, y in zip((out, *g), (got, *h), strict=True):
        if x.shape[:2] == (4, 5):
            close(y[mask], moved(x)[mask])
        else:
            close(y, moved(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("n", [2, 8, 1000])
@pytest.mark.parametrize("value", [0.0, 1000.1, 1e-30])
def test_equal_rewards_give_no_advantage_not_even_by_rounding(value, n, dtype):
    """The float32 mean of eight times 1000.1 is 6e-5 off: divided by its own square root and ϵ, that would be an advantage of .4
    for every response."""
    equal = torch.full((n,), value, dtype=dtype)
    for how in ("mean", "mean_std", "leave_one_out"):
        for ddof in (0, 1):
            assert (group_advantages(equal, n, how, ddof=ddof) == 0).all()
        mixed = group_advantages(torch.cat([equal, torch.arange(n).to(equal)]), n, how)
        assert (mixed[:n] == 0).all() and (mixed[n:] != 0).any(), (
            "one flat group says nothing about the next"
        )
    flat = equal[None]
    mask = torch.ones(1, n).bool()
    assert (whiten(flat, mask) == 0).all()
    close(whiten(flat, mask, shift_mean=False), flat, rtol=1e-6, atol=0)
    poisoned = torch.cat([flat, torch.full((1, 2), math.nan, dtype=dtype)], 1)
    wider = torch.arange(n + 2)[None] < n
    assert (whiten(poisoned, wider) == 0).all() and explained_variance(flat * 0, flat, mask).isnan()


def test_whitening_equal_numbers_keeps_its_gradient():
    "It is that of (x − x̄)/√ϵ, as without the special case."
    x = torch.full((1, 4), 0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: whiten(x, torch.ones(1, 4).bool(), eps=1.0), x)
    whiten(x, torch.ones(1, 4).bool(), eps=0.25)[0, 0].backward()
    close(x.grad, f64([[1.5, -0.5, -0.5, -0.5]]))


def test_beyond_float32s_square_as_documented():
    x = torch.tensor([[1e20, -1e20, 5e19]])
    mask = torch.ones(1, 3).bool()
    assert (whiten(x, mask) == 0).all() and explained_variance(x / 2, x, mask).isnan()
    close(whiten(x.double(), mask), whiten(x.double() / 1e20, mask), rtol=1e-6, atol=0)
    assert (
        ESTIMATORS["k2"](torch.tensor([256.0], dtype=torch.float16)).isinf()
        and ESTIMATORS["k2"](torch.tensor([255.0], dtype=torch.float16)).isfinite()
    )
