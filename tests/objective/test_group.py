"""The presets: legal, complete, and each one the equation of its paper, written out in plain Python."""

import math
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose import RLHFConfig, RLHFTrainer, Rollout
from instruct_goose.models.agent import Evaluation
from instruct_goose.objective.advantages import discounted_returns, gae, group_advantages
from instruct_goose.objective.group import PRESET_SOURCES, PRESETS, preset_table
from instruct_goose.objective.kl import kl_in_loss, kl_in_reward
from instruct_goose.objective.masks import AGGREGATES, aggregate, group_token_counts, whiten
from instruct_goose.objective.policy_loss import LEVELS, SURROGATES
from instruct_goose.objective.ppo import ppo_loss
from instruct_goose.training.experience import Annotations

each = pytest.mark.parametrize("name", PRESETS)
close = torch.testing.assert_close
BETA, GAMMA, LAM = 0.1, 0.9, 0.5


# ── the dictionaries ──

DIALS = set(
    (
        "advantage group_size group_ddof whiten_advantages ratio_level surrogate clip clip_high dual_clip aggregation "
        "kl_placement kl_estimator kl_gradient"
    ).split()
)


@each
def test_a_preset_names_every_dial_and_every_dial_is_legal(name):
    dials = PRESETS[name]
    assert DIALS <= dials.keys() <= DIALS | {"beta"}
    hints = get_type_hints(RLHFConfig)
    for key, x in dials.items():
        allowed = get_args(hints[key])
        if allowed and all(isinstance(a, str | int) for a in allowed):
            assert x in allowed, (key, x)
    assert (
        dials["ratio_level"] in LEVELS
        and dials["surrogate"] in SURROGATES
        and dials["aggregation"] in AGGREGATES
    )
    compares = (
        dials["advantage"] in ("group_mean", "group_mean_std", "leave_one_out")
        or dials["aggregation"] == "group_token_mean"
    )
    assert (dials["group_size"] > 1) == compares, (
        "a group exactly where something is compared or averaged in it"
    )


# ── the table ──


def rows():
    return {line.split("|")[1].strip(): line for line in preset_table().splitlines()[2:]}


def test_the_table_has_one_row_per_preset_and_as_many_cells_as_its_head():
    lines = preset_table().splitlines()
    assert list(rows()) == list(PRESETS) and len(lines) == 11
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    for name, s in PRESET_SOURCES.items():
        assert (
            f"https://arxiv.org/abs/{s['arxiv']}" in rows()[name] and s["equations"] in rows()[name]
        )


TURNED = dict(
    advantage="group_mean_std",
    group_size=5,
    group_ddof=0,
    whiten_advantages=False,
    ratio_level="product",
    surrogate="ratio",
    clip=0.3,
    clip_high=0.7,
    dual_clip=3.0,
    aggregation="sequence_sum",
    kl_placement="loss",
    kl_estimator="k2",
    kl_gradient="ratio",
    beta=0.5,
)


@pytest.mark.parametrize("key", TURNED)
def test_no_dial_turns_unseen(key, monkeypatch):
    "Table and code cannot drift: turn any one dial of a preset and its row reads differently."
    start = PRESETS["grpo"] | dict(beta=0.04)
    if key == "advantage":
        start = start | dict(advantage="group_mean")
    if key == "whiten_advantages":
        start = start | dict(whiten_advantages=True)
    if key == "kl_placement":
        start = start | dict(kl_placement="reward")
    monkeypatch.setitem(PRESETS, "grpo", start)
    before = rows()["grpo"]
    monkeypatch.setitem(PRESETS, "grpo", start | {key: TURNED[key]})
    assert rows()["grpo"] != before


# ── the losses: the library's functions against the papers' equations, token by token in Python floats ──


def batch(seed, lengths=(5, 2, 4, 1, 3, 3), G=3, far=0.4):
    draw = torch.Generator().manual_seed(seed)
    B = len(lengths)
    T = max(lengths)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]

    def noise(scale):
        return scale * torch.randn(B, T, generator=draw, dtype=torch.float64)

    old = noise(0.5) - 2
    return SimpleNamespace(
        mask=mask,
        G=G,
        old=old,
        new=old + noise(far),
        ref=old + noise(0.3),
        values=noise(1.0),
        scores=noise(1.0)[:, 0],
        greedy=noise(1.0)[:, 0],
    )


def advantages(d, b):
    paid = d.get("beta", BETA) if d["kl_placement"] == "reward" else 0.0
    r = kl_in_reward(b.scores, b.old, b.ref, b.mask, paid, d["kl_estimator"] or "k1")
    if d["advantage"] == "gae":
        A = gae(r, b.values, b.mask, GAMMA, LAM)[0]
    elif d["advantage"] == "return":
        A = discounted_returns(r, b.mask, GAMMA)
    else:
        x = r.sum(1)
        of_row = (
            x - b.greedy
            if d["advantage"] == "greedy"
            else group_advantages(
                x, b.G, d["advantage"].removeprefix("group_"), ddof=d["group_ddof"]
            )
        )
        A = torch.where(b.mask, of_row[:, None], 0.0)
    return whiten(A, b.mask) if d["whiten_advantages"] else A


def loss(d, b, new=None):
    "A preset through the exported functions: what a trainer does, without minibatches."
    new = b.new if new is None else new
    of = group_token_counts(b.mask, b.G) if d["aggregation"] == "group_token_mean" else None
    more = dict(how=d["aggregation"], group_tokens=of)
    total, _ = ppo_loss(
        new,
        b.old,
        advantages(d, b),
        b.mask,
        clip=d["clip"],
        clip_high=d["clip_high"],
        level=d["ratio_level"],
        surrogate=d["surrogate"],
        dual_clip=d["dual_clip"],
        **more,
    )
    if d["kl_placement"] == "loss" and (beta := d.get("beta", BETA)):
        total = total + aggregate(
            kl_in_loss(new, b.ref, b.mask, beta, d["kl_estimator"] or "k2"), b.mask, **more
        )
    return total


def gradient(d, b):
    new = b.new.clone().requires_grad_()
    return torch.autograd.grad(loss(d, b, new), new)[0]


def lists(b):
    "Each response as lists of its real tokens: log-ratios to the sampler, drift at sampling, drift now, log π, values."

    def pick(x):
        return [row[m].tolist() for row, m in zip(x, b.mask)]

    return [pick(x) for x in (b.new - b.old, b.old - b.ref, b.new - b.ref, b.new, b.values)]


def clipped(rho, A, low, high):
    "PPO's objective by cases, not by min: whoever has gone far enough the way of A stands at the edge."
    if A > 0:
        return min(rho, high) * A
    return max(rho, low) * A


def groups_of(x, G):
    return [x[i : i + G] for i in range(0, len(x), G)]


def std_advantages(x, G):
    return [(a - fmean(g)) / (stdev(g) + 1e-4) for g in groups_of(x, G) for a in g]


def paper(name, b):
    "The loss of each preset from its paper's equation. No tensor, no function of the library."
    ell, drift, now, lp, V = lists(b)
    B = len(ell)
    T = b.mask.shape[1]
    x = b.scores.tolist()
    shaped = [
        s - BETA * sum(k) for s, k in zip(x, drift)
    ]  # the response's reward, less the price of its drift
    if name == "grpo":  # eqs. 3, 4: per response the mean over tokens of min(…) − β·k3

        def k3(k):
            return math.exp(-k) - 1 + k

        return -fmean(
            fmean(clipped(math.exp(e), A, 0.8, 1.2) - 0.04 * k3(k) for e, k in zip(row, ks))
            for row, ks, A in zip(ell, now, std_advantages(x, b.G))
        )
    if name == "dr_grpo":  # GRPO less 1/|o| and the std, a constant in their place
        A = [a - fmean(g) for g in groups_of(x, b.G) for a in g]
        return -sum(clipped(math.exp(e), a, 0.8, 1.2) for row, a in zip(ell, A) for e in row) / (
            B * T
        )
    if name in ("dapo", "cispo"):  # eq. 8; eqs. 4, 5: 1/Σ|o| inside the expectation over questions

        def token(e, a, logp):
            if name == "dapo":
                return clipped(math.exp(e), a, 0.8, 1.28)
            return min(math.exp(e), 5.0) * a * logp

        terms = [
            [token(e, a, p) for e, p in zip(row, ps)]
            for row, ps, a in zip(ell, lp, std_advantages(x, b.G))
        ]
        return -fmean(sum(map(sum, g)) / sum(map(len, g)) for g in groups_of(terms, b.G))
    if name == "gspo":  # eqs. 5 to 7
        return -fmean(
            clipped(math.exp(fmean(row)), a, 1 - 3e-4, 1 + 4e-4)
            for row, a in zip(ell, std_advantages(x, b.G))
        )
    if name in ("rloo", "remax"):  # one action per response, its own ratio, clipped
        rloo = [a - (sum(g) - a) / (b.G - 1) for g in groups_of(shaped, b.G) for a in g]
        A = rloo if name == "rloo" else [a - g for a, g in zip(shaped, b.greedy.tolist())]
        return -fmean(clipped(math.exp(sum(row)), a, 0.8, 1.2) for row, a in zip(ell, A))
    return ppo_by_hand(name, ell, drift, V, x)


def ppo_by_hand(name, ell, drift, V, x):
    "ppo, reinforce_pp: token rewards, then advantages from the back, whitened over the batch."
    out = []
    for ks, vs, s in zip(drift, V, x):
        r = [-BETA * k for k in ks]
        r[-1] += s
        A = []
        later = 0.0
        v_next = 0.0
        for r_t, v in zip(reversed(r), reversed(vs)):
            later = (
                r_t + GAMMA * later
                if name == "reinforce_pp"
                else r_t + GAMMA * v_next - v + GAMMA * LAM * later
            )
            v_next = v
            A.append(later)
        out.append(A[::-1])
    flat = [a for row in out for a in row]
    mean = fmean(flat)
    scale = math.sqrt(stdev(flat) ** 2 + 1e-8)
    return -fmean(
        clipped(math.exp(e), (a - mean) / scale, 0.8, 1.2)
        for row, A in zip(ell, out)
        for e, a in zip(row, A)
    )


@each
@pytest.mark.parametrize("seed", range(6))
def test_a_preset_is_its_papers_equation(name, seed):
    b = batch(seed)
    if name == "gspo" and seed % 2:
        b.new = b.old + (b.new - b.old) * 1e-3  # also inside its narrow range
    close(loss(PRESETS[name], b).item(), paper(name, b), rtol=1e-9, atol=1e-11)


@each
def test_the_trainer_off_policy_is_the_papers_equation_too(name):
    "Log-probabilities put in by hand, so that old and new differ."
    b = batch(3)
    group = dict(group_size=b.G) if PRESETS[name]["group_size"] > 1 else {}
    beta = {} if "beta" in PRESETS[name] else dict(beta=BETA)
    config = RLHFConfig.preset(
        name,
        batch_size=6,
        max_new_tokens=b.mask.shape[1],
        gamma=GAMMA,
        lam=LAM,
        vf_coef=0.0,
        device="cpu",
        **group,
        **beta,
    )
    tiny = GPT2LMHeadModel(
        GPT2Config(
            n_layer=1,
            n_head=1,
            n_embd=4,
            vocab_size=5,
            n_positions=8,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = RLHFTrainer(tiny, config=config)
    ids = torch.zeros(b.mask.shape, dtype=torch.long)
    rollout = Rollout(
        ids,
        b.mask,
        ids,
        b.mask,
        sampled_logprobs=b.old,
        scores=b.scores,
        baseline=b.greedy,
    )
    nothing = torch.zeros_like(b.old)
    notes = Annotations(b.old, b.ref, entropy=nothing, kl=nothing, values=b.values)
    experience = trainer.advantages(rollout, notes)
    new = Evaluation(b.new, None, b.values if name == "ppo" else None)
    close(trainer.loss(new, experience)[0].item(), paper(name, b), rtol=1e-9, atol=1e-11)


@each
def test_an_unanimous_group_is_finite_and_teaches_no_group_preset(name):
    b = batch(5)
    b.scores = torch.full((6,), 0.3, dtype=torch.float64)
    b.ref = b.old.clone()
    slope = gradient(PRESETS[name] | dict(beta=0.0), b)
    assert slope.isfinite().all()
    if PRESETS[name]["group_size"] > 1:
        assert slope.abs().max() < 1e-12


@pytest.mark.parametrize("placement, shown", [("reward", "reward, k1"), ("loss", "loss, k2")])
def test_an_estimator_that_is_not_set_shows_as_what_it_stands_for(placement, shown, monkeypatch):
    start = PRESETS["grpo"] | dict(beta=0.04, kl_estimator=None, kl_placement=placement)
    monkeypatch.setitem(PRESETS, "grpo", start)
    assert f"| {shown}, " in rows()["grpo"]
