"Numbers of a rollout and of an update, each against a second way to know it: plain forwards, sums by hand, other formulas."

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from deep import first
from small_trainer import (
    EOS,
    FOUR,
    PROMPTS,
    SHORT,
    TOKENIZER,
    config,
    even,
    kl_by_hand,
    made,
    ready,
    reward,
    rows,
    step,
    tiny,
    trainer,
)

import instruct_goose.training.metrics as module
from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.tokens import pad
from instruct_goose.objective.advantages import gae
from instruct_goose.objective.group import PRESETS
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.metrics import (
    PolicyChange,
    correlation,
    estimate_discounts,
    prompt_metrics,
    prompt_nll,
    rollout_metrics,
    sample_weights,
    sampler_metrics,
    sparkline,
    weight_changes,
)
from instruct_goose.training.trainer import RLHFTrainer


@pytest.mark.parametrize("micro", first(1, [3, None, 1]))
@pytest.mark.parametrize("algorithm", PRESETS)
def test_the_loss_of_every_preset_pulls_as_the_equations_say(algorithm, micro):
    m = step(made(algorithm=algorithm, micro_batch_size=micro, minibatches=1, ent_coef=0.03))
    names = ["policy_gradient_scale", "policy_gradient_cosine", "entropy_gradient_scale"]
    names += ["value_gradient_scale", "value_gradient_cosine"] if algorithm == "ppo" else []
    assert [m[name] for name in names] == pytest.approx([1.0] * len(names), abs=1e-9) and m[
        "stale_gradient"
    ] == 0
    assert (
        m["advantage_correlation"] == pytest.approx(1.0)
        and m["prompts_given"] == m["distinct_prompts"] == 4
    )


@pytest.mark.parametrize("factor", [-1.0, 0.5, 3.0])
def test_a_factor_or_a_sign_in_the_loss_is_the_slope(factor):
    class Wrong(RLHFTrainer):
        def loss(self, now, batch):
            loss, parts = super().loss(now, batch)
            return factor * loss, parts

    m = step(made(trainer=Wrong))
    assert m["policy_gradient_scale"] == pytest.approx(factor) == m["value_gradient_scale"]
    assert m["policy_gradient_cosine"] == pytest.approx(factor / abs(factor))


def test_a_gradient_that_stays_and_a_step_that_does_not():
    class Kept(RLHFTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.optimizer.zero_grad = lambda *args, **kwargs: None

    assert step(made(trainer=Kept))["stale_gradient"] > 1e-4
    still = step(made(optimizer=lambda groups: torch.optim.SGD([g | {"lr": 0.0} for g in groups])))
    assert (
        still["weights_moved"] == 0 == still["update_ratio"] == still["kl_to_old_exact"]
        and still["lr"] == 0
    )
    moved = step(made())
    assert (
        moved["weights_moved"] > 0.95 and 1e-4 < moved["update_ratio"] < 0.1
    )  # Adam's steps of .001, four, beside weights of .3
    half = step(made(dtype=torch.bfloat16, lr=1e-5))
    assert half["weights_moved"] < 0.3 and half["rounding"] == 2**-7


def test_of_many_weights_some_are_looked_at_and_of_frozen_ones_nothing_is_said():
    large = torch.nn.Linear(600, 600)
    learn = list(large.parameters())
    before = sample_weights(learn)
    large.weight.grad = torch.ones(600, 600)
    with torch.no_grad():
        large.weight[:300] += 1
    changes = weight_changes(learn, before)
    assert (
        changes["weights_moved"] == pytest.approx(0.5, abs=0.01)
        and sum(map(len, before)) < 2**16 + 600
    )
    assert (
        changes["tensors_without_gradient"] == 0.5
        and changes["tensors_still"] == 0
        and changes["clipped_norm"] == pytest.approx(600.0)
    )
    t = made()
    t.agent.model.requires_grad_(False)
    assert set(PolicyChange(t.agent, t.rollout(FOUR * 2), t.config).read()) == {
        "kl_to_old_exact",
        "value_weight_step",
    }


@pytest.mark.parametrize("gamma, lam", [(0.9, 0.5), (0.7, 0.0), (0.0, 0.5)])
def test_the_returns_say_what_they_were_made_with(gamma, lam):
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1))
    rewards, values = (torch.randn(40, 7) * mask for _ in range(2))
    r = Rollout(mask.long(), mask, mask.long(), mask, rewards=rewards, values=values)
    r.advantages, r.returns = gae(rewards, values, mask, gamma, lam)
    found = estimate_discounts(r)
    assert found[0].item() == pytest.approx(gamma, abs=1e-4)
    if gamma:
        assert found[1].item() == pytest.approx(lam, abs=1e-4)
    r.returns = values.clone()  # undetermined, and not a guess
    assert estimate_discounts(r)[0].isnan()
    r.values = torch.zeros_like(values)
    assert estimate_discounts(r)[0].isnan()


def test_correlation_against_numpy_and_of_what_does_not_vary():
    x, y = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.arange(50.0)
    assert correlation(x, y).item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    for flat in (torch.full((50,), 0.1), torch.full((50,), 1e8), torch.zeros(50)):
        assert correlation(x, flat).isnan()


def test_prompts_are_guessed_by_a_model_without_knowledge_and_read_one_by_one():
    t = made()
    r = t.rollout(FOUR * 2)
    one_by_one = []
    for prompt in FOUR:
        ids = torch.tensor([SHORT(prompt)["input_ids"]])
        logp = t.ref_model(ids).logits[0].log_softmax(-1)
        one_by_one += [-logp[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1)]
    assert prompt_nll(t.ref_model, r).item() == pytest.approx(
        np.mean(one_by_one) / np.log(len(SHORT)), rel=1e-6
    )
    blank = create_reference_model(t.agent)
    torch.nn.init.zeros_(blank.transformer.wte.weight)
    assert prompt_nll(blank, r).item() == pytest.approx(1.0, abs=1e-6)
    assert prompt_nll(t.ref_model, t.rollout([""])).isnan()  # one token: nothing to predict


def test_the_samplers_kl_is_that_of_three_tokens_and_the_mean_weight_says_only_what_the_cap_took():
    """Ten tokens drawn from μ = (.6, .3, .1) in just these shares, so a mean over them is an expectation under μ. By hand: with π_old = (.5, .25, .25)
    E[w] = Σπ = 1; capped at 2 it is .5 + .25 + .1·2 = .95; and the KL is Σ μ log(μ/π)."""
    mu, pi = (0.6, 0.3, 0.1), (0.5, 0.25, 0.25)
    tokens = torch.tensor([[0, 0, 0, 1, 2, 1, 2], [0, 1, 0, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 0]]).bool()
    assert [int((tokens[mask] == a).sum()) for a in range(3)] == [6, 3, 1]
    sampled, old = (torch.tensor(p, dtype=torch.float64).log()[tokens] for p in (mu, pi))
    for poison in (0.0, 50.0, -200.0, math.nan):
        r = Rollout(
            tokens,
            mask,
            tokens,
            mask,
            sampled_logprobs=torch.where(mask, sampled, poison),
            old_logprobs=torch.where(mask, old, -poison),
        )
        for cap, weight in ((None, None), (2.0, 0.95), (1e3, 1.0)):
            m = sampler_metrics(r, RLHFConfig(importance_cap=cap))
            assert m["sampler_kl"].item() == pytest.approx(
                sum(a * math.log(a / b) for a, b in zip(mu, pi)), rel=1e-12
            )
            assert m["max_sampler_deviation"].item() == pytest.approx(1.5) and (
                weight is None or m["importance_mean"].item() == pytest.approx(weight)
            )
    assert (
        sampler_metrics(
            Rollout(tokens, mask, tokens, mask, sampled_logprobs=sampled, old_logprobs=sampled),
            RLHFConfig(),
        )["sampler_kl"]
        == 0
    )


@pytest.mark.parametrize(
    "changes,seen",
    [
        (dict(), range(8)),
        (dict(micro_batch_size=3, temperature=1.4), range(8)),
        (dict(batch_size=24), range(0, 24, 3)),
        (dict(batch_size=80), range(0, 80, 10)),
    ],
    ids=str,
)
def test_the_exact_distance_that_an_iteration_goes(changes, seen):
    t = trainer(**changes)
    r = ready(t, prompts=(PROMPTS * 10)[: t.config.batch_size])
    assert not r.mask.all()
    old = copy.deepcopy(t.agent.model)
    m = t.optimize(r)
    queries, responses = rows(r)
    exact = kl_by_hand(
        old,
        t.agent.model,
        *([x[i] for i in seen] for x in (queries, responses)),
        t.config.temperature,
    )
    assert (
        m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6)
        and m["kl_to_old_exact"] > 1e-3
    )


def test_of_a_large_vocabulary_fewer_responses_are_asked_and_at_last_none(monkeypatch):
    for most, seen in ((6 * 11 * 8, range(8)), (6 * 11 * 3, range(0, 8, 3)), (6 * 11 - 1, None)):
        t = trainer()
        r = ready(t)
        assert r.mask.shape == (8, 6)
        monkeypatch.setattr(module, "MOST", most)
        old, m, (queries, responses) = copy.deepcopy(t.agent.model), t.optimize(r), rows(r)
        if seen is None:
            assert m["kl_to_old_exact"] is None
            continue
        exact = kl_by_hand(
            old, t.agent.model, *([x[i] for i in seen] for x in (queries, responses))
        )
        assert m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6)


def scored(t, scores):
    "A rollout whose scores are set by hand."
    r = t.rollout((PROMPTS * 4)[: len(scores) // t.config.group_size])
    r.scores = torch.tensor(scores, dtype=torch.float64)
    return module.rollout_metrics(t.advantages(r), t.config)


def test_rewards_of_groups_by_hand():
    scores = [
        1.0,
        3.0,
        2.0,
        2.0,
        0.0,
        4.0,
        5.0,
        5.0,
    ]  # std of the pairs, by n − 1: √2, 0, 2√2, 0; by n: 1, 0, 2, 0
    for ddof, std in ((1, 3 * math.sqrt(2) / 4), (0, 0.75)):
        m = scored(trainer(algorithm="grpo", group_size=2, group_ddof=ddof), scores)
        assert (m["reward_min"], m["reward_max"], m["flat_groups"]) == (0.0, 5.0, 0.5) and m[
            "group_reward_std"
        ] == pytest.approx(std)
    m = scored(
        trainer(algorithm="rloo", group_size=4), [1.0, 1.0, 1.0, 2.0, -3.0, -3.0, -3.0, -3.0]
    )  # std ½ and 0
    assert (m["reward_min"], m["reward_max"], m["flat_groups"], m["group_reward_std"]) == (
        -3.0,
        2.0,
        0.5,
        pytest.approx(0.25),
    )
    assert scored(trainer(algorithm="grpo", group_size=4), [0.1] * 8)["flat_groups"] == 1.0
    m = scored(trainer(), scores)
    assert (
        m["group_reward_std"] is None
        and m["flat_groups"] is None
        and (m["reward_min"], m["reward_max"]) == (0.0, 5.0)
    )


@pytest.mark.parametrize("level,largest", [("token", 0.9), ("sequence", 0.25), ("product", 0.5)])
def test_the_largest_ratio_is_that_of_real_tokens_at_the_level_of_the_loss(level, largest):
    t = trainer(ratio_level=level)
    (q, qm), (ids, mask) = (
        pad([[0, 5], [0], [0, 4]], EOS, side="left"),
        pad([[3, 4], [5, 6, 2], [7, 8]], EOS, side="right"),
    )
    moved = torch.tensor(
        [[0.1, 0.4, 3.0], [0.9, -0.8, 0.1], [-0.2, -0.3, 3.0]], dtype=torch.float64
    )  # the threes are padding
    old = torch.full_like(moved, -2.0)
    r = Rollout(q, qm, ids, mask, old_logprobs=old, advantages=torch.ones_like(old))
    assert module.ratio_metrics(old + moved, r, t.config)["ratio_max"].item() == pytest.approx(
        math.exp(largest)
    )
    low = r[[2]]  # all below 1, and the padding is not a token
    expected = {"token": -0.2, "sequence": -0.25, "product": -0.5}[level]
    assert module.ratio_metrics(old[[2]] + moved[[2]], low, t.config)[
        "ratio_max"
    ].item() == pytest.approx(math.exp(expected))


def test_metrics_are_json_and_what_they_say():
    trainer = RLHFTrainer(
        tiny(dtype=torch.float32), tiny(seed=1, dtype=torch.float32), config(), tokenizer=TOKENIZER
    )
    seen = []
    history = trainer.train(
        PROMPTS, reward, steps=3, callback=lambda m: seen.append(m), progress=False
    )
    assert seen == history == json.loads(json.dumps(history)) and [
        m["iteration"] for m in history
    ] == [0, 1, 2]
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    m = rollout_metrics(r, trainer.config, trainer.eos_ids)
    ell = [(r.old_logprobs - r.ref_logprobs)[i, t].item() for i, t in r.mask.nonzero().tolist()]
    assert m["kl_estimate"] == pytest.approx(
        sum(math.exp(-x) - 1 + x for x in ell) / 8, rel=1e-4
    ) and m["kl_to_reference"] == pytest.approx(r.kl.sum().item() / 8)
    lengths = [row.sum().item() for row in r.mask]
    assert m["tokens"] == sum(lengths) and m["response_length"] == pytest.approx(sum(lengths) / 8)
    ended = [r.response_ids[i, n - 1].item() == EOS for i, n in enumerate(lengths)]
    assert m["finished"] == pytest.approx(sum(ended) / 8) and 0 < sum(ended) < 8
    assert m["reward_mean"] == pytest.approx(sum(reward(r.texts)) / 8)
    assert m["reward_std"] == pytest.approx(torch.tensor(reward(r.texts)).std().item(), abs=1e-6)
    flat = [r.entropy[i, t].item() for i, n in enumerate(lengths) for t in range(n)]
    assert m["entropy"] == pytest.approx(sum(flat) / len(flat), abs=1e-5)
    R, V = r.returns[r.mask], r.values[r.mask]
    assert m["explained_variance"] == pytest.approx(1 - ((R - V).var() / R.var()).item(), abs=1e-4)
    assert m["return_mean"] == pytest.approx(R.mean().item(), abs=1e-5) and m[
        "advantage_std"
    ] == pytest.approx((R - V).std(unbiased=False).item(), abs=1e-5)
    assert m["total_reward_mean"] == pytest.approx(r.rewards.sum().item() / 8, abs=1e-5)


def test_the_meters_of_the_update_describe_the_policy_before_each_step():
    trainer = RLHFTrainer(
        tiny(),
        config=config(minibatches=1, epochs=2, lr=0.02, clip=0.1, clip_high=0.3),
        tokenizer=TOKENIZER,
    )
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    start = [p.detach().clone() for p in trainer.agent.parameters()]
    m = trainer.optimize(r)
    for p, w in zip(trainer.agent.parameters(), start, strict=True):
        p.data = w
    again = RLHFTrainer(
        trainer.agent, config=dataclasses.replace(trainer.config, epochs=1), tokenizer=TOKENIZER
    )
    one = again.optimize(r)  # the same first step; what the second sees is the policy after it
    logp = trainer.agent.evaluate(
        r.query_ids, r.query_mask, r.response_ids, r.mask
    ).logprobs.detach()
    k3, low, high, n = 0.0, 0, 0, r.mask.sum().item()
    for i, t in r.mask.nonzero().tolist():
        ell = (logp[i, t] - r.old_logprobs[i, t]).item()
        ratio, a = math.exp(ell), r.advantages[i, t].item()
        k3 += ratio - 1 - ell  # k3 of KL(old, new), sampled from old
        low += ratio < 0.9 and a < 0
        high += ratio > 1.3 and a > 0
    assert (
        low and high and one["kl_to_old"] == one["clip_fraction"] == 0
    )  # before the first step nothing has moved
    assert m["kl_to_old"] == pytest.approx(k3 / 8 / 2) and m["clip_fraction_low"] == pytest.approx(
        low / n / 2
    )
    assert m["clip_fraction_high"] == pytest.approx(high / n / 2) and m[
        "clip_fraction"
    ] == pytest.approx((low + high) / n / 2)


def test_the_share_of_prompts_that_are_whole():
    "Inside a template's text counts, in any rows' order; a piece does not, nor does a text that two prompts make together."
    r = dataclasses.replace(
        made().rollout(PROMPTS), prompts=["<user> The film is </user>", "the plot", "was dull"]
    )
    for prompts, share in {
        ("the film  is",): 1.0,
        ("was dull", "the plot"): 1.0,
        ("the plot was",): 0.0,
        ("the plot", "the plot was thin"): 0.5,
    }.items():
        assert prompt_metrics(list(prompts), r)["prompts_kept"] == share
    assert prompt_metrics(
        [[{"role": "user", "content": "The film is"}], {"prompt": "the score"}], r
    ) == {"prompts_given": 2, "prompts_kept": 0.5}
    assert prompt_metrics({"query_ids": r.query_ids}, r) == {
        "prompts_given": 8,
        "prompts_kept": None,
    }


def test_what_a_notebook_shows():
    "Shown rows are the rollout's, coloured by the sign of the advantage; a history keeps being a list."
    t = made(algorithm="grpo", steps=3)
    history = t.train(FOUR, even, progress=False)
    assert isinstance(history, list) and len(history) == 3 and history == [*history]
    line = next(x for x in repr(history).splitlines() if x.startswith("reward_mean"))
    assert (
        f"{history[0]['reward_mean']:.3g}" in line and f"{history[-1]['reward_mean']:.3g}" in line
    )
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█" and sparkline([3.0] * 100) == "▁" * 34
    r = t.advantages(t.score(t.rollout(FOUR), even))
    html = r._repr_html_()
    assert (
        html.count("rgba(0,150,80") == sum(a > 0 for a in r.advantages.sum(-1).tolist()) > 0
        and html.count("<tr>") == 9
    )
    assert (
        repr(r.texts[2].removeprefix(r.prompts[2])[:60]) in repr(r)
        and "Rollout of 8" in repr(r)
        and "Rollout of 1" in repr(r[3])
    )
    assert (
        "<b>"
        not in Rollout(
            *(getattr(r[[0]], k) for k in ("query_ids", "query_mask", "response_ids", "mask")),
            texts=["<b>"],
        )._repr_html_()
    )
    assert "grpo, 3 of 3 iterations done. GPT2LMHeadModel on cpu" in repr(t) and len(repr(t)) < 600


def test_a_line_tells_what_is_known():
    "300 tokens in 2 + 1 + 3 seconds are 50 a second."
    m = {
        "reward_mean": 0.254,
        "kl_to_reference": 1.0,
        "held_out_reward": None,
        "clip_fraction": 0.256,
        "tokens": 300,
        "seconds_rollout": 2.0,
        "seconds_score": 1.0,
        "seconds_optimize": 3.0,
    }
    assert module.progress_line(m) == "reward 0.25, KL 1.00, clipped 26%, 50 tokens/s"
    assert module.progress_line({"entropy": 2.0, "tokens": 300}) == "entropy 2.00"
