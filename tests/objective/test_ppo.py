"""The whole loss: against loops in plain Python, finite differences, hand numbers, and torchtune where it is installed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.lesson import running_example
from instruct_goose.objective.kl import exact_kl
from instruct_goose.objective.logprobs import entropy
from instruct_goose.objective.masks import aggregate
from instruct_goose.objective.policy_loss import policy_loss
from instruct_goose.objective.ppo import PPOLoss, adaptive_entropy, ppo_loss, update_meters

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


ADVANTAGES = f64(
    [[0.112186, 0.21, 0.2], [-0.671192, -0.869315, 0.0]]
)  # derived by hand in test_advantages.py
RETURNS = f64([[0.612186, 0.81, 1.0], [-0.571192, -1.069315, 0.0]])
HOW = ["token_mean", "sequence_mean", "sequence_sum"]
seeds = st.integers(0, 10**6)


def batch(seed, B=4, T=6, dtype=torch.float64):
    "positional arguments, and keywords, of ppo_loss; gaps on any side, no row empty"
    draw = torch.Generator().manual_seed(seed)
    lp, old, A, v, v_old, r, S = torch.randn(7, B, T, generator=draw, dtype=dtype)
    mask = torch.rand(B, T, generator=draw) < 0.6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return (0.7 * lp - 3, 0.7 * old - 3, A, mask), dict(
        values=v, old_values=v_old, returns=r, entropy=S.abs()
    )


def slow_ppo(
    lp,
    old,
    A,
    mask,
    values,
    old_values,
    returns,
    entropy,
    clip=0.2,
    clip_high=0.2,
    value_clip=0.2,
    vf_coef=0.5,
    ent_coef=0.0,
    how="token_mean",
):
    "rows of lists; every token by cases, then the average that `how` asks for"
    rows = []
    for m, *row in zip(mask, lp, old, A, values, old_values, returns, entropy):
        tokens = []
        for real, n, o, a, v, v0, r, s in zip(m, *row):
            if not real:
                continue
            rho = math.exp(n - o)
            gain = a * (min(rho, 1 + clip_high) if a > 0 else max(rho, 1 - clip))
            near = v if value_clip is None else v0 + max(-value_clip, min(value_clip, v - v0))
            tokens.append(-gain + vf_coef * max((v - r) ** 2, (near - r) ** 2) / 2 - ent_coef * s)
        rows.append(tokens)
    if how == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if how == "sequence_mean":
        return sum(sum(t) / len(t) for t in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * len(mask[0]))


def test_running_example_by_hand():
    ex = running_example()
    loss, parts = ppo_loss(
        ex.logprobs,
        ex.old_logprobs,
        ADVANTAGES,
        ex.mask,
        values=ex.values,
        old_values=ex.old_values,
        returns=RETURNS,
        entropy=entropy(ex.logits),
        ent_coef=0.01,
    )
    # policy: −(.123405 + .252 + .14 − .536954 − .956246) / 5 = .977795 / 5
    # value: (.0019336 + .00405 + .045 + .111011 + .2239913) / 5 = .3859859 / 5
    # entropy: of (.55, .3, .15), (.6, .2, .2), (.35, .3, .35), (.6, .15, .25), (.2, .25, .55)
    S = [
        -sum(p * math.log(p) for p in row)
        for row in (
            (0.55, 0.3, 0.15),
            (0.6, 0.2, 0.2),
            (0.35, 0.3, 0.35),
            (0.6, 0.15, 0.25),
            (0.2, 0.25, 0.55),
        )
    ]
    hand = dict(
        policy_loss=0.195559,
        value_loss=0.0771972,
        entropy=sum(S) / 5,
        loss=0.195559 + 0.5 * 0.0771972 - 0.01 * sum(S) / 5,
        clip_fraction=0.4,
        clip_fraction_low=0.2,
        clip_fraction_high=0.2,
        ratio_mean=1.0,
        ratio_min=0.6,
        ratio_max=1.5,
        # deviations .1, .5, −.3, −.4, .1: squares .01 + .25 + .09 + .16 + .01 = .52
        ratio_std=math.sqrt(0.52 / 5),
        # ρ − 1 − ln ρ; the ρ − 1 add up to 0
        approx_kl=-sum(map(math.log, (1.1, 1.5, 0.7, 0.6, 1.1))) / 5,
    )
    assert set(parts) == set(hand)
    for name, x in hand.items():
        assert abs(parts[name].item() - x) < 2e-6, name
    close(loss, parts["loss"])
    for name, x in update_meters(ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask).items():
        close(x, parts[name])


@given(
    seeds,
    st.sampled_from(HOW),
    st.floats(0.05, 0.9),
    st.floats(0.05, 0.9),
    st.none() | st.floats(0.05, 1),
    st.floats(0, 0.5),
)
def test_equals_the_slow_version(seed, how, clip, clip_high, value_clip, ent_coef):
    args, kwargs = batch(seed)
    settings_ = dict(
        how=how,
        clip=clip,
        clip_high=clip_high,
        value_clip=value_clip,
        ent_coef=ent_coef,
        vf_coef=0.3,
    )
    slow = slow_ppo(
        *(x.tolist() for x in args), **{k: x.tolist() for k, x in kwargs.items()}, **settings_
    )
    close(ppo_loss(*args, **kwargs, **settings_)[0], f64(slow))


def test_approx_kl_estimates_the_kl_from_the_sampler_by_enumeration():
    ex = running_example()
    old = f64([0.7, 0.2, 0.1]).log()
    new = f64([0.3, 0.3, 0.4]).log()
    copies = torch.tensor(
        [0] * 7 + [1] * 2 + [2]
    )  # every token as often as the old policy writes it
    every = torch.ones(1, 10, dtype=torch.bool)
    meters = update_meters(new[copies][None], old[copies][None], torch.ones(1, 10).double(), every)
    close(
        meters["approx_kl"], exact_kl(old[None], new[None])[0]
    )  # .4733 the other way round: .4220
    assert abs(meters["approx_kl"] - exact_kl(new[None], old[None])[0]) > 0.04
    close(meters["ratio_mean"], f64(1.0))
    start = update_meters(ex.logprobs, ex.logprobs, ADVANTAGES, ex.mask)
    for name, x in dict(
        approx_kl=0.0,
        clip_fraction_low=0.0,
        clip_fraction_high=0.0,
        ratio_mean=1.0,
        ratio_std=0.0,
        ratio_max=1.0,
    ).items():
        assert start[name] == x


def test_terms_that_lack_an_input_and_terms_left_out():
    args, kwargs = batch(3)
    v, old, r = (kwargs[k] for k in ("values", "old_values", "returns"))
    for bad in (dict(values=v), dict(returns=r)):
        with pytest.raises(ValueError, match="both, or neither"):
            ppo_loss(*args, **bad)
    with pytest.raises(ValueError, match="needs old_values"):
        ppo_loss(*args, values=v, returns=r)
    with pytest.raises(ValueError, match="no entropy"):
        ppo_loss(*args, ent_coef=0.01)
    with pytest.raises(ValueError, match="how is"):
        ppo_loss(*args, how="mean")
    _, parts = ppo_loss(*args, values=v, returns=r, value_clip=None)
    assert "value_loss" in parts and "entropy" not in parts
    S = kwargs["entropy"].requires_grad_()
    loss, parts = ppo_loss(
        args[0].requires_grad_(), *args[1:], entropy=S
    )  # logged, and no gradient paid for at ent_coef 0
    loss.backward()
    assert S.grad is None and parts["entropy"] > 0
    assert all(x.ndim == 0 and not x.requires_grad for x in parts.values())


family = st.fixed_dictionaries(
    dict(
        level=st.sampled_from(["token", "sequence", "product"]),
        surrogate=st.sampled_from(["min", "ratio", "weight"]),
        dual=st.sampled_from([None, 1.3, 3]),
        clip=st.floats(0.05, 1),
        high=st.floats(0.05, 4),
        how=st.sampled_from([*HOW, "group_token_mean"]),
        length=st.sampled_from([5, 64.0]),
    )
)


def dials(setting, mask, G=2):
    "a setting as keywords of ppo_loss"
    s = dict(setting)
    how = s["how"]
    return dict(
        level=s["level"],
        surrogate=s["surrogate"],
        dual_clip=s["dual"],
        clip=s["clip"],
        clip_high=s["high"],
        how=how,
        length=s["length"] if how == "sequence_sum" else None,
        group_tokens=mask.sum(1).view(-1, G).sum(1).repeat_interleave(G)
        if how == "group_token_mean"
        else None,
    )


@given(seeds, family, st.booleans())
def test_every_dial_reaches_the_loss(seed, setting, weighted):
    "The parts are proven in test_policy_loss and test_masks."
    args, _ = batch(seed)
    w = (
        torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)).double() + 0.3
        if weighted
        else None
    )
    if setting["surrogate"] != "min":
        setting["dual"] = None
    of_loss = dials(setting, args[3])
    of_mean = {k: of_loss[k] for k in ("how", "length", "group_tokens")}
    tokens = policy_loss(*args, weights=w, **{k: x for k, x in of_loss.items() if k not in of_mean})
    close(ppo_loss(*args, **of_loss, weights=w)[0], aggregate(tokens, args[3], **of_mean))


@given(seeds, family, st.permutations(range(4)), st.integers(1, 3))
def test_micro_batches_add_up_with_every_dial(seed, setting, order, cut):
    "groups of two, cut apart: rows in any order, the counts taken before the cut; values, entropy and gradients"
    args, kwargs = batch(seed)
    if setting["surrogate"] != "min":
        setting["dual"] = None
    count = {"token_mean": args[3].sum(), "group_token_mean": 2}.get(setting["how"], 4)
    kw = dials(setting, args[3])
    w = torch.rand(4, 6).double() + 0.3

    def run(pieces, **more):
        total = 0.0
        leaves = [
            x.clone().requires_grad_() for x in (args[0], kwargs["values"], kwargs["entropy"])
        ]
        for rows in pieces:
            of_rows = {
                **kw,
                "group_tokens": None if kw["group_tokens"] is None else kw["group_tokens"][rows],
            }
            loss, _ = ppo_loss(
                *(x[rows] for x in (leaves[0], *args[1:])),
                values=leaves[1][rows],
                old_values=kwargs["old_values"][rows],
                returns=kwargs["returns"][rows],
                entropy=leaves[2][rows],
                ent_coef=0.1,
                weights=w[rows],
                **of_rows,
                **more,
            )
            loss.backward()
            total = total + loss.detach()
        return [total, *(x.grad for x in leaves)]

    close(
        run([order[:cut], order[cut:]], denominator=count),
        run([list(range(4))]),
        atol=1e-10,
        rtol=1e-9,
    )


def test_meters_by_hand_at_the_level_of_the_response():
    ex = running_example()
    # s = 1.155^(1/3) = 1.0492057 three times and √.66 = .8124038 twice; with ε = .1 the two of response 2, Â < 0, are cut.
    # mean (3·1.0492057 + 2·.8124038)/5 = .9544849; the spread of two values: (1.0492057 − .8124038)·√(3·2)/5 = .1160088
    meters = update_meters(
        ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask, clip=0.1, level="sequence"
    )
    hand = dict(
        ratio_min=0.8124038,
        ratio_max=1.0492057,
        ratio_mean=0.9544849,
        ratio_std=0.1160088,
        clip_fraction_low=0.4,
        clip_fraction_high=0.0,
    )
    for name, x in hand.items():
        assert abs(meters[name].item() - x) < 2e-7, name
    # 1.155 is cut where Â > 0 and .66 where Â < 0: everything
    meters = update_meters(
        ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask, clip=0.1, level="product"
    )
    close(
        [meters["clip_fraction_low"], meters["clip_fraction_high"]],
        [torch.tensor(0.4), torch.tensor(0.6)],
    )
    for level in (
        "token",
        "sequence",
        "product",
    ):  # the KL is measured token by token, whatever the ratio
        parts = ppo_loss(ex.logprobs, ex.old_logprobs, ADVANTAGES, ex.mask, level=level)[1]
        assert abs(parts["approx_kl"] + sum(map(math.log, (1.1, 1.5, 0.7, 0.6, 1.1))) / 5) < 1e-9
        close(
            parts["ratio_max"],
            f64({"token": 1.5, "sequence": 1.155 ** (1 / 3), "product": 1.155}[level]),
        )


def tune_batch(seed, shape=(4, 6), dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *shape, generator=draw, dtype=dtype)
    x[:2] = 0.5 * x[:2] - 3
    masks = torch.rand(2, *shape, generator=draw) < 0.6
    masks.view(2, -1)[:, 0] = True
    return list(x), list(masks)


def test_ppoloss_edges(unchecked):
    x, (mask, _) = tune_batch(4)
    with unchecked():
        for m in (mask.int(), mask.float()):
            close(PPOLoss()(*x, m, m), PPOLoss()(*x, mask, mask))
        with pytest.raises(ValueError, match="shapes differ.*pi_old_logprobs"):
            PPOLoss()(x[0][:, :1], *x[1:])
        with pytest.raises(ValueError, match="shapes differ.*returns"):
            PPOLoss()(*x[:5], x[5][0])
        with pytest.raises(ValueError, match="shapes differ.*mask"):
            PPOLoss()(*x, mask[:1])
    nothing = mask & False
    assert PPOLoss()(*x, nothing, nothing)[0] == 0  # 0 / 1e-8, as there
    for bad in (
        dict(epsilon=0.0),
        dict(epsilon=-1.0),
        dict(value_clip_range=0.0),
        dict(epsilon=math.nan),
    ):
        with pytest.raises(ValueError, match="must be positive"):
            PPOLoss(**bad)(*x)
    far = x[0] + 30  # beyond ppo_loss's cut of 20 it is still torchtune's number
    close(PPOLoss()(x[0], far, -torch.ones_like(far), *x[3:])[1], f64(math.exp(30)))
    for side in (1e4, -1e4):
        new = (x[0].float() + side).requires_grad_()
        out = PPOLoss()(x[0].float(), new, *(t.float() for t in x[2:]))
        out[0].backward()
        assert new.grad.isfinite().all() and torch.stack(out).isfinite().all()


def test_the_adaptive_coefficient_is_trls_and_skyworks():
    """trl 1.16, GRPOTrainer with use_adaptive_entropy: the coefficient applies where the last entropy was at or below the target; it goes up
    by Δ there, to 1 at most, and down by Δ elsewhere, to 0 at least. Its gate is a step late, so here it is given the same entropy."""
    import random

    dice = random.Random(0)
    ours = 0.012
    theirs = 0.012
    weights = []
    for _ in range(300):
        entropy = dice.choice([0.05, 0.15, 0.2, 0.25, 1.5])
        applied = theirs if entropy <= 0.2 else 0.0
        theirs = min(theirs + 0.005, 1.0) if entropy <= 0.2 else max(theirs - 0.005, 0.0)
        weight, ours = adaptive_entropy(ours, entropy, 0.2)
        weights.append(weight)
        assert (weight, ours) == (applied, theirs)
    assert max(weights) > 0.05 and 0.0 in weights
    assert adaptive_entropy(3.0, 0.1, 0.2) == (3.0, 3.0)  # one that begins above 1 stays
    assert adaptive_entropy(3.0, 0.3, 0.2) == (0.0, 2.995)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            adaptive_entropy(0.1, wrong, 0.2)
