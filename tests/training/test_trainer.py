"""The trainer against the equations, and what it refuses.

The oracle of the loss is slow: one unpadded row at a time through the model's own forward pass,
token by token.
"""

import copy
import math
import warnings
from itertools import islice

import pytest
import torch
import transformers
from deep import first
from small_trainer import (
    BASE,
    CONFIGS,
    EOS,
    PROMPTS,
    QUERIES,
    RESPONSES,
    SCORES,
    TOKENIZER,
    WORDS,
    V,
    agent_and_reference,
    config,
    no_clock,
    ready,
    reward,
    same,
    tiny,
    weights,
)

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.models.long_rows import RowsTooLong
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.objective.advantages import ADVANTAGES, Advantage
from instruct_goose.objective.group import PRESETS
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.tasks.probes import tiny_world
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.metrics import rollout_metrics
from instruct_goose.training.trainer import RLHFTrainer


def slow_rows(trainer, queries, responses, scores, moved=None, sampler=None):
    """Each response alone and unpadded through the models' plain forward pass.

    Returns a dictionary of lists, one entry per token. `moved` is log π − log π_old of each token,
    `sampler` log π_old − log of what the sampler saw; None: 0.
    """
    c, agent, ref = trainer.config, trainer.agent, trainer.ref_model
    was = [(m, m.training) for m in agent.modules()]
    agent.eval()
    ref.eval()
    rows = []
    for i, (q, r, s) in enumerate(zip(queries, responses, scores.tolist(), strict=True)):
        ids = torch.tensor([q + r])
        n = range(len(r))
        logits = agent.model(ids).logits[0] / c.temperature
        ref_logits = (ref(ids).logits[0] / c.temperature).detach()
        base = agent.model.base_model if agent.value_model is None else agent.value_model
        hidden = base(ids).last_hidden_state[0]
        V = [agent.value_head(hidden[len(q) - 1 + t])[0] for t in n]
        logp = [logits[len(q) - 1 + t].log_softmax(-1) for t in n]
        lp = [logp[t][a] for t, a in enumerate(r)]
        rlp = [ref_logits[len(q) - 1 + t].log_softmax(-1)[a] for t, a in enumerate(r)]
        old = [x.detach() - (moved[i][t] if moved else 0.0) for t, x in enumerate(lp)]
        rows.append(
            dict(
                lp=lp,
                rlp=rlp,
                old=old,
                V=V,
                ent=[-(x.exp() * x).sum() for x in logp],
                score=s,
                w=[math.exp(x) for x in sampler[i]] if sampler else [1.0 for _ in n],
            )
        )
    for m, mode in was:
        m.training = mode
    return rows


def estimate(name, ell):
    return {"k1": ell, "k2": ell**2 / 2, "k3": (-ell).exp() - 1 + ell}[name]


def slow_rewards(c, rows):
    "rₜ of each row: the score at its last token, less the price of the KL. Fills the rows in."
    for row in rows:
        n = len(row["lp"])
        price = [
            c.beta * estimate(c.kl_estimator or "k1", row["old"][t] - row["rlp"][t]).item()
            if c.kl_placement == "reward"
            else 0.0
            for t in range(n)
        ]
        row["reward"] = [(row["score"] if t == n - 1 else 0.0) - price[t] for t in range(n)]


def slow_comparison(c, totals, i, baseline):
    "The total reward of response i beside those of its group, or the greedy one."
    first = i - i % c.group_size
    group = totals[first : first + c.group_size]
    mean = sum(group) / len(group)
    if c.advantage == "group_mean":
        return totals[i] - mean
    if c.advantage == "group_mean_std":
        std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - c.group_ddof))
        return (totals[i] - mean) / (std + 1e-4)
    if c.advantage == "group_mean_batch_std":
        overall = sum(totals) / len(totals)
        std = math.sqrt(sum((x - overall) ** 2 for x in totals) / (len(totals) - c.group_ddof))
        return (totals[i] - mean) / (std + 1e-4)
    if c.advantage == "leave_one_out":
        others = [x for k, x in enumerate(group) if first + k != i]
        return totals[i] - sum(others) / len(others)
    assert c.advantage == "greedy"
    return totals[i] - baseline[i].item()


def slow_advantages(c, rows, baseline):
    "Rewards, then Â, by the papers' formulas; R̂ for the values. Fills the rows in."
    slow_rewards(c, rows)
    totals = [sum(row["reward"]) for row in rows]
    for i, row in enumerate(rows):
        n = len(row["lp"])
        if c.advantage == "gae":
            v = [x.item() for x in row["V"]] + [0.0]
            row["A"] = [
                sum(
                    (c.gamma * c.lam) ** (k - t) * (row["reward"][k] + c.gamma * v[k + 1] - v[k])
                    for k in range(t, n)
                )
                for t in range(n)
            ]
            row["R"] = [a + b for a, b in zip(row["A"], v, strict=False)]
        elif c.advantage == "return":
            row["A"] = [
                sum(c.gamma ** (k - t) * row["reward"][k] for k in range(t, n)) for t in range(n)
            ]
        else:
            row["A"] = [slow_comparison(c, totals, i, baseline)] * n
    if c.whiten_advantages:
        flat = [a for row in rows for a in row["A"]]
        mean = sum(flat) / len(flat)
        var = sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
        for row in rows:
            row["A"] = [(a - mean) / math.sqrt(var + 1e-8) for a in row["A"]]


def slow_weight(c, each, t):
    "The sampler's weight of one token, from the ratios of its response."
    w = {
        "token": each[t],
        "product": math.prod(each),
        "sequence": math.prod(each) ** (1 / len(each)),
    }[c.importance_level]
    low = c.importance_floor or 0.0
    high = c.importance_cap
    if c.importance_beyond == "cut":
        return min(max(w, low), high)
    return w if low <= w <= high else 0.0


def within(x, low, high):
    if x < low:
        return low
    return high if x > high else x


def slow_token(c, row, t):
    "One token's share of the loss, before any averaging."
    n = len(row["lp"])
    A = row["A"][t]
    old = row["old"]
    lp = row["lp"]
    log_ratios = [lp[k] - old[k] for k in range(n)]
    ratio = {
        "token": log_ratios[t],
        "sequence": sum(log_ratios) / n,
        "product": sum(log_ratios),
    }.get(c.ratio_level, log_ratios[t]).exp()
    if c.ratio_level == "sequence_token":
        ratio = ratio / ratio.item() * math.exp(sum(log_ratios).item() / n)
    low, high = 1 - c.clip, 1 + (c.clip if c.clip_high is None else c.clip_high)
    clipped = within(ratio, low, high)
    if c.surrogate == "min":
        objective = ratio * A if ratio * A <= clipped * A else torch.as_tensor(clipped * A)
        if c.dual_clip is not None and A < 0 and objective < c.dual_clip * A:
            objective = torch.tensor(c.dual_clip * A)
    elif c.surrogate == "ratio":
        objective = ratio * A
    else:
        objective = (clipped.item() if torch.is_tensor(clipped) else clipped) * A * lp[t]
    loss = -objective * (1.0 if c.importance_cap is None else slow_weight(c, row["w"], t))
    if c.advantage == "gae":
        loss = loss + c.vf_coef * (row["V"][t] - row["R"][t]) ** 2 / 2
    ell = lp[t] - row["rlp"][t]
    if c.kl_placement == "loss":
        name = c.kl_estimator or "k2"
        own = log_ratios[t].exp()
        kl = estimate(name, ell)
        if c.kl_gradient == "ratio":
            kl = kl * (own.item() if name == "k2" else own)
        if c.kl_gradient == "straight_through":
            kl = ell**2 / 2 - (ell**2 / 2).item() + kl.item()
        loss = loss + c.beta * kl
    return loss - c.ent_coef * row["ent"][t]


def slow_mean(c, rows, minibatch):
    "The average of the settings over the rows of a minibatch, which may have parts of groups."
    per = {i: [slow_token(c, rows[i], t) for t in range(len(rows[i]["lp"]))] for i in minibatch}
    if c.aggregation == "token_mean":
        return sum(x for row in per.values() for x in row) / sum(map(len, per.values()))
    if c.aggregation == "sequence_mean":
        return sum(sum(row) / len(row) for row in per.values()) / len(per)
    if c.aggregation == "sequence_sum":
        return sum(x for row in per.values() for x in row) / (len(per) * c.max_new_tokens)
    groups = [range(k, k + c.group_size) for k in range(0, len(rows), c.group_size)]
    of_groups = [
        sum(x for i in g if i in per for x in per[i]) / sum(len(rows[i]["lp"]) for i in g)
        for g in groups
    ]
    return sum(of_groups) / (len(per) / c.group_size)


def slow_loss(
    trainer, queries, responses, scores, baseline=None, moved=None, sampler=None, minibatch=None
):
    "Equations (3) to (6) with Python loops. Differentiable."
    rows = slow_rows(trainer, queries, responses, scores, moved, sampler)
    slow_advantages(trainer.config, rows, baseline)
    return slow_mean(trainer.config, rows, range(len(rows)) if minibatch is None else minibatch)


SETTINGS = {name: dict(algorithm=name) for name in PRESETS} | {
    "discount": dict(gamma=0.9, lam=0.5, whiten_advantages=False, vf_coef=0.7, value_clip=None),
    "warm, with entropy": dict(temperature=1.7, ent_coef=0.05, beta=0.4),
    "KL in the loss, k2": dict(kl_placement="loss", beta=0.3),
    "KL in the loss, k3": dict(kl_placement="loss", kl_estimator="k3", beta=0.3, clip_high=0.3),
    "KL in the loss, k1 with the ratio": dict(
        kl_placement="loss", kl_estimator="k1", kl_gradient="ratio", beta=0.3
    ),
    "KL in the loss, k2 with the ratio": dict(
        kl_placement="loss", kl_estimator="k2", kl_gradient="ratio", beta=0.3
    ),
    "KL in the loss, k3 straight through": dict(
        kl_placement="loss", kl_estimator="k3", kl_gradient="straight_through", beta=0.3
    ),
    "KL in the reward, k3": dict(kl_estimator="k3", beta=0.3),
    "sequence_mean": dict(aggregation="sequence_mean"),
    "sequence_sum": dict(aggregation="sequence_sum"),
    "GAE, tokens of a group": dict(aggregation="group_token_mean", group_size=2, ent_coef=0.05),
    "dual clip": dict(dual_clip=1.3),
    "no clip": dict(surrogate="ratio"),
    "no clip, sequence": dict(surrogate="ratio", ratio_level="sequence"),
    "GSPO-token, values": dict(ratio_level="sequence_token", clip=0.05),
    "GRPO, KL in the loss, token mean": dict(algorithm="grpo", aggregation="token_mean", beta=0.4),
    "GRPO, std of the population": dict(
        algorithm="grpo", group_size=4, group_ddof=0, kl_gradient="ratio"
    ),
    "GRPO, whitened": dict(algorithm="grpo", whiten_advantages=True),
    "discounted return": dict(algorithm="reinforce_pp", gamma=0.8),
    "weights": dict(algorithm="dapo", importance_cap=1.2),
    "weights, bounded on both sides": dict(
        algorithm="dapo", importance_cap=1.05, importance_floor=0.97
    ),
    "weights, tokens dropped": dict(
        algorithm="dapo", importance_cap=1.05, importance_floor=0.97, importance_beyond="drop"
    ),
    "weights, responses dropped": dict(
        algorithm="grpo", importance_cap=1.02, importance_level="product", importance_beyond="drop"
    ),
    "spread of the batch": dict(algorithm="grpo", advantage="group_mean_batch_std"),
    "weights, CISPO": dict(
        algorithm="cispo", importance_cap=1.2, clip=0.2, clip_high=0.1, beta=0.2
    ),
}
BASELINE = torch.tensor([0.5, -1.0, 0.75, 0.0], dtype=torch.float64)


def gradients(agent):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in agent.parameters()]


def compare(trainer, *batch):
    "Value and every gradient against the slow loss."
    before = [m.training for m in trainer.agent.modules()]
    trainer.agent.zero_grad()
    loss = trainer.compute_loss(*batch)
    loss.backward()
    got = gradients(trainer.agent)
    assert [m.training for m in trainer.agent.modules()] == before, "dropout must be restored"
    trainer.agent.zero_grad()
    slow = slow_loss(trainer, QUERIES, RESPONSES, SCORES.double(), BASELINE)
    slow.backward()
    expected = gradients(trainer.agent)
    close = (
        dict(atol=1e-9, rtol=1e-7)
        if trainer.agent.model.config.model_type == "gpt2"
        else dict(atol=1e-6, rtol=1e-4)
    )  # their norms are float32
    torch.testing.assert_close(loss, slow, **close)
    assert sum(g.abs().sum() for g in expected) > 1e-3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loss_and_its_gradient_are_those_of_the_equations(name, setting):
    agent, ref = agent_and_reference(name, separate=setting == "ppo")
    trainer = RLHFTrainer(agent, ref, config(**SETTINGS[setting]))
    compare(
        trainer,
        *pad(QUERIES, EOS, side="left"),
        *pad(RESPONSES, EOS, side="right"),
        SCORES.double(),
        *baseline_for(trainer),
    )


def baseline_for(trainer):
    return [BASELINE] if trainer.config.advantage == "greedy" else []


# log-ratios beyond every clip on both sides, for rows of both signs of the advantage
MOVED = [[0.3, -0.4, 0.35], [-0.5, 0.2, 0.6, 1.2, -0.02], [-0.4], [-0.1, -0.9]]
SAMPLER = [[0.1, -0.3, 0.5], [0.0, 0.02, 0.4, -0.2, -0.1], [0.3], [-0.6, 0.25]]


def stale_experience(trainer):
    "Of an older policy, written by a sampler that was not quite that policy."
    queries, responses = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    width = responses[0].shape[1]

    def spread(rows):
        padded = [row + [0.0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.float64)

    rollout = Rollout(*queries, *responses, scores=SCORES.double(), baseline=BASELINE)
    annotations = trainer.annotate(rollout)
    old_logprobs = annotations.old_logprobs - spread(MOVED)
    rollout.sampled_logprobs = old_logprobs - spread(SAMPLER)
    return trainer.advantages(rollout, annotations._replace(old_logprobs=old_logprobs))


@pytest.mark.parametrize("minibatch", first(1, [[3, 0, 1], [0, 1, 2, 3]]), ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_stale_minibatches_and_their_micro_batches_have_the_gradient_of_the_equations(
    setting, minibatch
):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config(**SETTINGS[setting], max_grad_norm=1e9))
    trainer.optimizer.step = lambda: None  # look, do not move
    experience = stale_experience(trainer)
    agent.zero_grad()
    slow_loss(
        trainer, QUERIES, RESPONSES, SCORES.double(), BASELINE, MOVED, SAMPLER, minibatch
    ).backward()
    expected = gradients(agent)
    assert sum(g.abs().sum() for g in expected) > 1e-3
    for micro in (1, 2, None):
        trainer.config.micro_batch_size = micro
        log = trainer.update(experience[minibatch], is_first=False)
        for a, b in zip(gradients(agent), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)
        assert ("value_grad_norm" in log) == (trainer.config.advantage == "gae")


GOOD = dict(
    zip(
        ("query_ids", "query_attention_mask", "response_ids", "response_attention_mask", "rewards"),
        (*pad(QUERIES, EOS, side="left"), *pad(RESPONSES, EOS, side="right"), SCORES),
        strict=True,
    )
)
NO_TOKEN = GOOD["response_attention_mask"].clone()
NO_TOKEN[1] = False
THREE_QUERIES = {name: GOOD[name][:3] for name in ("query_ids", "query_attention_mask")}
LONG_QUERIES = {
    "query_ids": torch.zeros(4, 19).long(),
    "query_attention_mask": torch.ones(4, 19).bool(),
}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"rewards": SCORES[:3]}, r"scores has shape \(3,\), expected \(4,\)"),
        ({"rewards": SCORES[:, None]}, r"shape \(4, 1\)"),
        ({"response_attention_mask": NO_TOKEN}, r"no response token in row \[1\]"),
        ({"query_attention_mask": torch.zeros(4, 5).bool()}, "no query token"),
        ({"query_ids": GOOD["query_ids"][:, 1:]}, "differ in shape"),
        (THREE_QUERIES, "3 queries and 4 responses"),
        ({"response_ids": GOOD["response_ids"] + 8}, "vocabulary ends at 10"),
        ({"query_attention_mask": GOOD["query_attention_mask"].long() * 2}, "only 0"),
        (LONG_QUERIES, "context is 20"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x,
)
def test_compute_loss_refuses_what_does_not_fit(change, says, unchecked):
    trainer = RLHFTrainer(tiny(), config=config())
    with unchecked(), pytest.raises(ValueError, match=says):
        trainer.compute_loss(**GOOD | change)


def test_compute_loss_refuses_rewards_that_are_not_finite(unchecked):
    trainer = RLHFTrainer(tiny(), config=config())
    rewards = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    with unchecked(), pytest.raises(FloatingPointError, match="scores is nan at response 2"):
        trainer.compute_loss(**GOOD | {"rewards": rewards})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_the_first_iteration_starts_at_ratio_one_and_kl_zero_with_dropout_in_the_config(
    name, algorithm
):
    trainer = RLHFTrainer(
        tiny(name, dtype=torch.float32).train(),
        config=config(algorithm=algorithm),
        tokenizer=TOKENIZER,
    )
    m = trainer.step(PROMPTS, reward)
    assert m["kl_to_reference"] < 1e-6 and abs(m["kl_estimate"]) < 1e-6
    assert m["max_ratio_deviation_first"] < 1e-4 and m["max_sampler_deviation"] < 1e-4
    assert trainer.step(PROMPTS, reward)["kl_to_reference"] > 0
    assert (
        all(module.training for module in trainer.agent.modules())
        and not trainer.ref_model.training
    )


def clipped_step(vf_coef):
    "The metrics of one plain gradient step, and how far it moved the policy."
    t = RLHFTrainer(
        Agent(tiny(), value_model="copy"),
        config=config(vf_coef=vf_coef, max_grad_norm=0.1, epochs=1, minibatches=1),
        tokenizer=TOKENIZER,
        optimizer=lambda groups: torch.optim.SGD(groups),
    )
    experience = ready(t)
    before = [p.detach().clone() for p in t.agent.policy_parameters()]
    m = t.optimize(experience)
    steps = [p - b for p, b in zip(t.agent.policy_parameters(), before, strict=True)]
    return m, torch.cat([step.flatten() for step in steps]).norm().item()


def test_policy_and_value_gradients_are_clipped_apart():
    small, a = clipped_step(vf_coef=0.5)
    large, b = clipped_step(vf_coef=500.0)
    assert large["value_grad_norm"] == pytest.approx(1000 * small["value_grad_norm"])
    assert large["grad_norm"] == pytest.approx(small["grad_norm"])
    assert a == pytest.approx(b, rel=1e-4)
    assert a == pytest.approx(0.1 * 1e-3, rel=1e-4)  # the step is max_grad_norm · lr


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_each_prompt_is_answered_group_size_times_side_by_side(algorithm):
    trainer = RLHFTrainer(tiny(), config=config(algorithm, group_size=4), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS[:2])
    assert r.prompts == ["w0 w3"] * 4 + ["w5"] * 4
    assert len(set(r.texts)) > 2


def test_values_and_returns_are_there_only_where_values_are_learnt():
    for algorithm in ("grpo", "ppo"):
        trainer = RLHFTrainer(tiny(), config=config(algorithm, group_size=4), tokenizer=TOKENIZER)
        experience = ready(trainer, prompts=PROMPTS[:2])
        assert (experience.values is None) == (algorithm == "grpo")
        assert (experience.returns is None) == (algorithm == "grpo")


def test_in_a_group_all_tokens_of_a_response_have_one_advantage():
    trainer = RLHFTrainer(tiny(), config=config("grpo", group_size=4), tokenizer=TOKENIZER)
    experience = ready(trainer, lambda texts: list(range(8)), PROMPTS[:2])
    assert experience.advantages[:4].sum(1).sign().tolist() == [-1, -1, 1, 1]
    for i in range(8):
        assert experience.advantages[i][experience.mask[i]].unique().numel() == 1


def off_policy(importance_cap):
    "A trainer, and a scored rollout whose sampler was another policy."
    settings = config("grpo", importance_cap=importance_cap)
    t = RLHFTrainer(tiny(), config=settings, tokenizer=TOKENIZER)
    r = t.score(t.rollout(PROMPTS[:4]), reward)
    noise = torch.randn(r.mask.shape, generator=torch.Generator().manual_seed(0)) * 0.5
    r.sampled_logprobs = torch.where(r.mask, r.sampled_logprobs + noise, 0.0)
    return t, r


def test_importance_weights_correct_a_sampler_that_is_another_policy():
    t, r = off_policy(importance_cap=1.5)
    experience = t.advantages(r)
    m = rollout_metrics(experience, t.config)
    log_ratios = experience.old_logprobs - experience.sampled_logprobs
    ratios = log_ratios[r.mask].exp().tolist()
    mean = sum(min(x, 1.5) for x in ratios) / len(ratios)
    assert m["importance_mean"] == pytest.approx(mean)
    assert 0 < m["importance_capped"]
    assert m["importance_capped"] == pytest.approx(sum(x > 1.5 for x in ratios) / len(ratios))


def test_without_them_a_sampler_that_is_another_policy_is_refused():
    t, r = off_policy(importance_cap=None)
    with pytest.raises(ValueError, match="sampler and the training forward disagree"):
        t.annotate(r)


def test_importance_weights_need_the_samplers_probabilities(unchecked):
    t, r = off_policy(importance_cap=1.5)
    r.sampled_logprobs = None
    with unchecked(), pytest.raises(ValueError, match="importance_cap needs to know the sampler"):
        t.optimize(t.advantages(r))


def run(steps=3, **changes):
    "The metrics and the weights of a run."
    model = tiny(dtype=torch.float32)
    t = RLHFTrainer(model, config=config(steps=steps, **changes), tokenizer=TOKENIZER)
    history = t.train(PROMPTS, reward, progress=False)
    return no_clock(history), weights(t)


def test_a_run_is_its_seed_and_nothing_else():
    history, first_weights = run()
    torch.manual_seed(5)
    torch.rand(100)
    again, second_weights = run()
    assert again == history
    assert same(first_weights, second_weights)
    other, _ = run(seed=1)
    assert other != history


def test_a_step_draws_nothing_from_the_global_generator():
    torch.manual_seed(3)
    t = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    before = torch.get_rng_state()
    t.step(PROMPTS, reward)
    assert torch.get_rng_state().equal(before)


class LearningRates(Callback):
    "Those of policy and values in each update."

    def __init__(self):
        self.seen = []

    def on_optimize(self, trainer, update):
        self.seen.append([group["lr"] for group in trainer.optimizer.param_groups])


def test_the_learning_rate_follows_its_schedule_over_several_calls_of_train():
    rates = LearningRates()
    t = RLHFTrainer(
        tiny(dtype=torch.float32),
        config=config(steps=4, lr_schedule="linear", value_lr=0.02),
        tokenizer=TOKENIZER,
        callbacks=[rates],
    )
    history = t.train(PROMPTS, reward, steps=3, progress=False)
    history += t.train(PROMPTS, reward, progress=False)  # what is left
    policy, values = zip(*rates.seen, strict=True)
    assert policy == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert values == pytest.approx([0.02, 0.015, 0.01, 0.005])
    assert [m["lr"] for m in history] == list(policy)
    with pytest.raises(ValueError, match="4 of 4 iterations are done"):
        t.train(PROMPTS, reward, progress=False)
    with pytest.raises(ValueError, match="ends at config.steps"):
        t.train(PROMPTS, reward, steps=1, progress=False)


def test_the_controller_moves_beta_and_the_rewards_follow():
    t = RLHFTrainer(
        tiny(dtype=torch.float32), config=config(beta=0.2, kl_target=5.0), tokenizer=TOKENIZER
    )
    history = t.train(PROMPTS, reward, steps=3, progress=False)
    assert [m["beta"] for m in history] == pytest.approx([0.2, 0.2 * 0.98, 0.2 * 0.98**2])
    assert t.beta == pytest.approx(0.2 * 0.98**3)
    experience = ready(t, lambda texts: [0.0] * 8)
    charge = -t.beta * (experience.old_logprobs - experience.ref_logprobs)
    torch.testing.assert_close(experience.rewards, charge)


def test_what_does_not_belong_together_is_refused():
    model = tiny()
    bare = word_tokenizer(WORDS, 20)
    bare.pad_token = None
    wider = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**(BASE | dict(vocab_size=V + 1)))
    ).double()
    for kwargs, message in [
        (dict(tokenizer=bare), "tokenizer.pad_token = tokenizer.eos_token"),
        (dict(ref_model=model), "shares parameters"),
        (dict(ref_model=wider), "ref_model has 12 tokens, the policy 11"),
        (
            dict(optimizer=torch.optim.SGD(model.parameters(), lr=1.0)),
            "value function's parameters",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            RLHFTrainer(model, config=config(), **kwargs)


def test_an_optimizer_of_ones_own():
    agent = Agent(tiny())
    mine = torch.optim.SGD(agent.parameters(), lr=0.5)
    for optimizer, lr in (
        (mine, 0.5),
        (lambda groups: torch.optim.SGD(groups, momentum=0.9), 1e-3),
    ):
        trainer = RLHFTrainer(agent, config=config(), tokenizer=TOKENIZER, optimizer=optimizer)
        assert isinstance(trainer.optimizer, torch.optim.SGD) and trainer.step(PROMPTS, reward)[
            "lr"
        ] == pytest.approx(lr)
    frozen = Agent(tiny())
    for p in frozen.model.transformer.h[0].parameters():
        p.requires_grad_(False)
    trainer = RLHFTrainer(frozen, config=config(), tokenizer=TOKENIZER)
    before = frozen.model.transformer.h[0].mlp.c_fc.weight.clone()
    trainer.step(PROMPTS, reward)
    assert (
        frozen.model.transformer.h[0].mlp.c_fc.weight.equal(before)
        and not frozen.model.transformer.h[1].mlp.c_fc.weight.grad.eq(0).all()
    )


def test_only_gae_trains_a_value_function():
    for algorithm in PRESETS:
        agent = Agent(tiny(dtype=torch.float32))
        trainer = RLHFTrainer(agent, config=config(algorithm), tokenizer=TOKENIZER)
        known = {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
        assert all((id(p) in known) == (algorithm == "ppo") for p in agent.value_parameters())
        m = trainer.step(PROMPTS[: 8 // trainer.config.group_size], reward)
        assert ("value_loss" in m) == ("explained_variance" in m) == (algorithm == "ppo")
        assert all((p == 0).all() for p in agent.value_parameters()) == (algorithm != "ppo")


def test_a_rollout_of_ones_own_needs_no_tokenizer_and_no_texts():
    "Rows from elsewhere, scores set by hand."
    t = RLHFTrainer(tiny(), config=config(minibatches=2))
    queries, responses = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    m = t.optimize(t.advantages(Rollout(*queries, *responses, scores=SCORES.double())))
    assert m["max_ratio_deviation_first"] < 1e-9


def test_a_rollout_without_scores_has_no_advantages():
    t = RLHFTrainer(tiny(), config=config(minibatches=2))
    queries, responses = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    with pytest.raises(ValueError, match="no scores"):
        t.advantages(Rollout(*queries, *responses))


def greedy_by_hand(trainer, prompt):
    """One token at a time, without cache or padding.

    Returns the text, and log π − log π_ref of each token.
    """
    ids = list(TOKENIZER(prompt)["input_ids"])
    drift = []
    start = len(ids)
    while len(drift) < trainer.config.max_new_tokens:
        pi, ref = (
            m.eval()(torch.tensor([ids])).logits[0, -1] / trainer.config.temperature
            for m in (trainer.agent.model, trainer.ref_model)
        )
        token = pi.argmax().item()
        drift.append((pi.log_softmax(-1) - ref.log_softmax(-1))[token].item())
        ids.append(token)
        if token == EOS:
            break
    assert len(ids) > start
    return TOKENIZER.decode(ids, skip_special_tokens=True), drift


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(micro_batch_size=2),
        dict(temperature=1.6),
        dict(kl_estimator="k3"),
        dict(kl_placement="loss"),
    ],
    ids=str,
)
def test_the_greedy_baseline_is_the_total_reward_of_the_likeliest_response(changes):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config("remax", **changes), tokenizer=TOKENIZER)
    trainer.beta = 0.3  # what the controller has made of it
    prompts, asked = ["w0 w3", "w5", "w0 w3", "", "w5", "w8 w7", "", "w5"], []

    def spy(texts):
        asked.append(list(texts))
        return reward(texts)

    r = trainer.score(trainer.rollout(prompts), spy)
    by_hand = [greedy_by_hand(trainer, p) for p in prompts]
    # a text per row, so that a reward function may know its place
    assert asked == [r.texts, [text for text, _ in by_hand]]
    estimators = {"k1": lambda x: x, "k3": lambda x: math.exp(-x) - 1 + x}
    estimate_kl = estimators[changes.get("kl_estimator", "k1")]
    for i, (text, drift) in enumerate(by_hand):
        charge = 0.3 * sum(map(estimate_kl, drift))
        if changes.get("kl_placement") == "loss":
            charge = 0.0
        assert r.baseline[i].item() == pytest.approx(reward([text])[0] - charge, abs=1e-5)
    experience = trainer.advantages(r)
    for i in range(8):
        expected = (experience.rewards[i].sum() - r.baseline[i]).item()
        for advantage in experience.advantages[i][r.mask[i]].tolist():
            assert advantage == pytest.approx(expected, abs=1e-6)
    m = rollout_metrics(experience, trainer.config)
    assert m["baseline_mean"] == pytest.approx(r.baseline.mean().item())


def test_the_greedy_baseline_reads_the_responses_of_a_sampler_of_ones_own():
    own = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER)

    def bare(prompts, n, config, generator):
        r = own.sampler(prompts, n, config, generator)
        return Rollout(r.query_ids, r.query_mask, r.response_ids, r.mask)  # without texts

    other = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER, sampler=bare)
    one, two = (t.score(t.rollout(PROMPTS), reward) for t in (own, other))
    assert one.baseline.equal(two.baseline)
    assert one.scores.equal(two.scores)


class Length(torch.nn.Module):
    "A reward model with `score`."

    def score(self, texts):
        return [float(len(text)) for text in texts]


def test_the_greedy_baseline_draws_no_random_number():
    one, two = (
        RLHFTrainer(tiny(), config=config(algorithm), tokenizer=TOKENIZER)
        for algorithm in ("remax", "reinforce_pp")
    )
    before = torch.get_rng_state()
    for trainer in (one, two):
        trainer.score(trainer.rollout(PROMPTS), Length())
    assert one.rollout(PROMPTS).texts == two.rollout(PROMPTS).texts
    assert torch.get_rng_state().equal(before)


def test_a_score_of_a_greedy_response_that_is_not_finite_is_refused(unchecked):
    t = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER)
    calls = []

    def judge(texts):
        calls.append(texts)
        return [0.0] * 8 if len(calls) == 1 else [0.0] * 5 + [float("nan")] * 3

    r = t.rollout(PROMPTS)
    says = "the score of greedy text 5 of 8, 'w4.*is nan"
    with unchecked(), pytest.raises(ValueError, match=says):
        t.score(r, judge)
    assert r.scores is None


def test_without_a_greedy_baseline_remax_has_no_advantages(unchecked):
    t = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER)
    queries, responses = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    with unchecked(), pytest.raises(ValueError, match="no baseline: call score"):
        t.advantages(Rollout(*queries, *responses, scores=SCORES.double()))


@pytest.mark.parametrize("baseline", [None, BASELINE[:3]], ids=["none", "too short"])
def test_compute_loss_asks_for_the_greedy_baseline(baseline, unchecked):
    t = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER)
    with unchecked(), pytest.raises(ValueError, match="pass baseline="):
        t.compute_loss(**GOOD, baseline=baseline)


def test_compute_loss_refuses_a_baseline_that_is_not_finite(unchecked):
    t = RLHFTrainer(tiny(), config=config("remax"), tokenizer=TOKENIZER)
    baseline = BASELINE / torch.tensor([0.0, 1, 1, 1])
    with unchecked(), pytest.raises(FloatingPointError, match="baseline is inf at response 0"):
        t.compute_loss(**GOOD, baseline=baseline)


def test_layers_that_transformers_was_asked_to_recompute_are_recomputed():
    passes = []
    model = tiny("llama")
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(
            lambda *_: passes.append(1) if torch.is_grad_enabled() else None
        )
    t = RLHFTrainer(model, config=config("grpo", minibatches=1, epochs=1), tokenizer=TOKENIZER)
    t.train(PROMPTS, reward, steps=1, progress=False)
    plain = len(passes)
    model.activation_checkpointing_enable()
    t.train(PROMPTS, reward, steps=1, progress=False)
    assert len(passes) - plain == 2 * plain == 2 * len(model.model.layers)


def passes_of(model):
    "A list that grows with each forward pass of a model."
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    return passes


@pytest.mark.parametrize("preset", ["dr_grpo", "dapo", "gspo", "cispo"])
def test_with_beta_0_no_reference_is_kept_or_run(preset):
    t = RLHFTrainer(tiny(), config=config(preset, group_size=4), tokenizer=TOKENIZER)
    assert t.ref_model is None
    (log,) = t.train(PROMPTS, reward, steps=1, progress=False)
    assert log["kl_to_reference"] is None and log["reference_weight_mean_abs"] is None
    with pytest.raises(ValueError, match="there is no reference: beta is 0"):
        t.require_reference()
    t.beta = 0.1
    with pytest.raises(ValueError, match=r"beta is 0\.1, and there is no reference"):
        t.step(PROMPTS[:2], reward)


@pytest.mark.parametrize("changes", [{"max_kl_to_reference": 9.0}, {"ref_every": 2}, {"beta": 0.1}])
def test_a_setting_that_needs_a_reference_keeps_one(changes):
    t = RLHFTrainer(tiny(), config=config("dr_grpo", **changes), tokenizer=TOKENIZER)
    passes = passes_of(t.require_reference().base_model)
    (log,) = t.train(PROMPTS, reward, steps=1, progress=False)
    assert passes and log["kl_to_reference"] is not None


def test_a_reference_that_is_given_is_kept_and_changes_no_weight():
    without = RLHFTrainer(tiny(), config=config("dr_grpo"), tokenizer=TOKENIZER)
    given = RLHFTrainer(tiny(), tiny(seed=1), config("dr_grpo"), tokenizer=TOKENIZER)
    logs = [t.train(PROMPTS, reward, steps=2, progress=False) for t in (without, given)]
    assert logs[1][0]["kl_to_reference"] > 0
    assert same(weights(without), weights(given))
    assert [log["grad_norm"] for log in logs[0]] == [log["grad_norm"] for log in logs[1]]


# ---- what a reading of the trainer found


def words_a(texts):
    return [float(text.split().count("a")) for text in texts]


def world_trainer(kind=RLHFTrainer, optimizer=None, sampler=None, callbacks=(), **settings):
    "A trainer of the probes' tiny world: words a, b and c, one update an iteration."
    model, tokenizer = tiny_world()
    config = RLHFConfig(
        **dict(batch_size=8, max_new_tokens=4, device="cpu", steps=4, lr=1e-2)
        | dict(minibatches=1, epochs=1)
        | settings
    )
    return kind(
        model,
        None,
        config,
        tokenizer=tokenizer,
        optimizer=optimizer,
        sampler=sampler,
        callbacks=callbacks,
    )


def test_a_moving_reference_follows_the_policy_that_is_put_back():
    t = world_trainer(max_kl_to_reference=1e-3, ref_every=2, lr=5e-2, steps=6)
    t.train(["a b"] * 8, words_a, progress=False)
    assert t.stop_reason is not None
    kl = t.annotate(t.rollout(["a b"] * 8)).kl
    assert kl.sum(-1).mean().item() < 1e-3


def test_a_stream_goes_on_behind_what_was_read_also_with_dropped_prompts():
    def stream():
        yield "a " * 60  # too long
        yield from ["a", "b", "c", "a b", "b c", "a c"]

    def recorder():
        seen = []

        class Records(RLHFTrainer):
            def rollout(self, prompts):
                seen.append(list(prompts))
                return super().rollout(prompts)

        return world_trainer(Records, batch_size=2, steps=2, long_rows="drop"), seen

    whole, undisturbed = recorder()
    whole.train(stream(), words_a, progress=False)
    begun, first = recorder()
    begun.train(stream(), words_a, steps=1, progress=False)
    resumed, second = recorder()
    resumed.load_state_dict(begun.state_dict())
    assert resumed.prompt_order.seen == 3
    resumed.train(islice(stream(), resumed.prompt_order.seen, None), words_a, progress=False)
    assert first + second == undisturbed == [["a", "b"], ["c", "a b"]]


def test_a_state_of_another_class_of_trainer_is_loaded_with_a_word():
    class Mine(RLHFTrainer):
        "It may compute another loss, which no setting shows."

    state = world_trainer(Mine).state_dict()
    with pytest.warns(UserWarning, match="a Mine made this state, and this is a RLHFTrainer"):
        world_trainer().load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world_trainer(Mine).load_state_dict(state)


@pytest.mark.parametrize("name", ["kl_to_reference", "reward_mean", "iteration", "lr", "seconds"])
def test_a_part_of_the_loss_replaces_no_metric(name):
    class Named(RLHFTrainer):
        def loss(self, new, batch):
            loss, parts = super().loss(new, batch)
            return loss, parts | {name: torch.tensor(99.0)}

    t = world_trainer(Named)
    if name == "seconds":  # a name of its own
        assert t.step(["a b"] * 8, words_a)["seconds"] == 99
        return
    with pytest.raises(ValueError, match=f"'{name}', which is a metric"):
        t.step(["a b"] * 8, words_a)


OF_A_STEP = [
    "kl_to_old",
    "grad_norm",
    "policy_gradient_scale",
    "max_ratio_deviation_first",
    "stale_gradient",
]
OF_AN_UPDATE = ["updates", "coverage_error", "kl_to_old_exact", "update_ratio"]
OF_LATER = ["held_out_reward", "final_kl_to_reference", "ent_coef", "reference_moved"]


@pytest.mark.parametrize("name", [*OF_A_STEP, *OF_AN_UPDATE, *OF_LATER])
def test_a_part_of_the_loss_hides_no_metric_that_comes_later(name):
    "Neither in the step that logs it, nor in the first iteration of a run that logs it later."

    class Named(RLHFTrainer):
        def loss(self, new, batch):
            loss, parts = super().loss(new, batch)
            return loss, parts | {name: torch.tensor(99.0)}

    t = world_trainer(Named)
    before = [p.clone() for p in t.agent.parameters()]
    with pytest.raises(ValueError, match=f"'{name}', which is a metric"):
        t.step(["a b"] * 8, words_a)
    if name in OF_A_STEP:  # refused before the optimizer steps
        after = list(t.agent.parameters())
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_part_of_the_loss_is_one_number():
    class Vector(RLHFTrainer):
        def loss(self, new, batch):
            loss, parts = super().loss(new, batch)
            return loss, parts | {"vector": new.logprobs.detach().sum(-1)}

    with pytest.raises(TypeError, match="'vector' has the shape"):
        world_trainer(Vector).step(["a b"] * 8, words_a)


def test_an_advantage_is_asked_once_an_iteration(monkeypatch):
    asked = []

    def counting(inputs):
        asked.append(1)
        return inputs.spread(inputs.totals()), None

    monkeypatch.setitem(ADVANTAGES, "counting", Advantage(counting))
    world_trainer(advantage="counting").step(["a b"] * 8, words_a)
    assert len(asked) == 1


def test_callbacks_see_what_is_sampled_again():
    class Rewrites(Callback):
        def on_rollout(self, trainer, rollout):
            rollout.texts = ["a a a"] * len(rollout)

    scored = []

    def flat(texts):
        scored.append(set(texts))
        return [0.0] * len(texts)

    groups = dict(advantage="group_mean", group_size=4, max_redraws=1)
    world_trainer(callbacks=[Rewrites()], **groups).step(["a b"] * 2, flat)
    assert scored == [{"a a a"}] * 2


def test_an_optimizer_has_to_know_the_policy():
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="knows none of the policy's parameters"):
        world_trainer(
            optimizer=torch.optim.SGD([other], lr=1.0), advantage="group_mean", group_size=4
        )


def test_an_optimizer_of_a_part_of_the_policy_is_named():
    def first_tensor(groups):
        return torch.optim.SGD(groups[0]["params"][:1], lr=1.0)

    with pytest.warns(UserWarning, match="does not know .* of the policy's"):
        world_trainer(optimizer=first_tensor, advantage="group_mean", group_size=4)


def test_parameters_unfrozen_later_stay_and_count_once_in_each_gradient():
    "Two updates on the same minibatch, by steps too small to move a weight, have one gradient."

    def too_small(groups):
        return torch.optim.SGD([{**group, "lr": 0.0} for group in groups])

    model, tokenizer = tiny_world()
    frozen = list(model.transformer.h[0].parameters())
    for p in frozen:
        p.requires_grad_(False)
    settings = dict(advantage="group_mean", group_size=4, beta=0.0, batch_size=8, max_new_tokens=4)
    config = RLHFConfig(device="cpu", steps=2, max_grad_norm=1e9, **settings)
    t = RLHFTrainer(model, None, config, tokenizer=tokenizer, optimizer=too_small)
    for p in frozen:
        p.requires_grad_(True)
    batch = t.advantages(t.score(t.rollout(["a b"] * 2), words_a))
    norms = [t.update(batch)["grad_norm"].item() for _ in range(3)]
    assert norms == [norms[0]] * 3
    loss, _ = t.loss(t.evaluate_tokens(batch), batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert norms[0] == pytest.approx(sum(g.square().sum() for g in gradients).sqrt().item(), 1e-5)
    with pytest.warns(UserWarning, match="does not know 12 of the policy's 18 tensors"):
        t.train(["a b"], words_a, progress=False)


def test_evaluate_drops_the_prompts_that_train_drops():
    long = "a " * 60
    t = world_trainer(long_rows="drop")
    with pytest.warns(RowsTooLong, match="1 left out"):
        mixed = t.evaluate(["a b", long, "b"], words_a)
    assert mixed == t.evaluate(["a b", "b"], words_a)
    cut = world_trainer(long_rows="cut")
    assert cut.evaluate(["b", long], words_a) == cut.evaluate(["b", "a " * 12], words_a)


def test_ids_that_a_callback_changes_are_those_that_are_scored():
    got = []

    def reward(texts, completion_ids):
        got.append(completion_ids[0])
        return [0.0] * len(texts)

    class Changes(Callback):
        def on_rollout(self, trainer, rollout):
            rollout.host_copy = copy.copy(rollout)  # as `to_` makes it from a GPU
            rollout.response_ids = torch.full_like(rollout.response_ids, 1)

    t = world_trainer(callbacks=[Changes()])
    with t.phases() as after:
        rollout = after.rollout(t.rollout(["a b"] * 8))
    t.score(rollout, reward)
    assert set(got[0]) == {1}


def test_held_out_prompts_are_forgotten_where_train_refuses_the_others():
    t = world_trainer(eval_every=1)
    with pytest.raises(ValueError, match="room for prompts"):
        t.train(["a b " * 50], words_a, progress=False, held_out=["a"])
    assert "held_out_reward" not in t.step(["a b"] * 8, words_a)


def test_what_held_out_rewards_log_counts_each_response_once():
    def reward(texts, log_metric):
        log_metric("n", 1.0 if len(texts) == 1 else 0.0)
        return [float(len(texts) == 1)] * len(texts)

    log = world_trainer(batch_size=4, eval_every=1).evaluate(["a"] * 5, reward)
    assert log["held_out_reward"] == pytest.approx(0.2)
    assert log["held_out_logged/n"] == pytest.approx(0.2)


def test_each_of_several_reward_functions_has_its_mean_on_held_out_prompts():
    "Each response counts once, and not where a function does not apply to it."

    def short(texts):
        return [float(len(texts) == 1)] * len(texts)

    def applies_once(texts):
        return [2.0] + [None] * (len(texts) - 1)

    t = world_trainer(batch_size=4, eval_every=1, reward_weights=(1.0, 0.5))
    log = t.evaluate(["a"] * 5, [short, applies_once])
    assert log["held_out_reward/short"] == pytest.approx(0.2)
    assert log["held_out_reward/applies_once"] == pytest.approx(2.0)
    assert log["held_out_reward"] == pytest.approx(0.2 + 0.5 * 2 * 2 / 5)
    assert not [name for name in t.evaluate(["a"] * 5, short) if "/" in name]


def test_the_weight_of_the_entropy_bonus_is_saved():
    settings = dict(entropy_target=0.1, ent_coef=0.5)
    t = world_trainer(**settings)
    t.step(["a b"] * 8, words_a)
    twin = world_trainer(**settings)
    twin.load_state_dict(t.state_dict())
    rollout = t.score(t.rollout(["a b"] * 8), words_a)
    columns = rollout.query_ids, rollout.query_mask, rollout.response_ids, rollout.mask
    one = t.compute_loss(*columns, rollout.scores)
    assert twin.compute_loss(*columns, rollout.scores).item() == one.item()


def test_a_sampler_that_is_empty_is_a_sampler():
    class Empty:
        def __len__(self):
            return 0

        def __call__(self, queries, n, config, generator):
            raise RuntimeError("asked")

    with pytest.raises(RuntimeError, match="asked"):
        world_trainer(sampler=Empty()).step(["a b"] * 8, words_a)


def test_an_attribute_that_begins_like_a_hook_is_no_hook():
    class Disk(Callback):
        on_disk = True

    world_trainer(callbacks=[Disk()]).train(["a b"] * 8, words_a, steps=1, progress=False)


def test_an_error_of_the_evaluation_names_the_iteration():
    class Breaks(RLHFTrainer):
        def advance(self, experience, metrics):
            log = super().advance(experience, metrics)
            self.agent.value_head.weight.data[0, 0] = float("nan")
            return log

    t = world_trainer(Breaks, eval_every=1)
    with pytest.raises(FloatingPointError, match="iteration 0"):
        t.train(["a b"] * 8, words_a, progress=False, held_out=["a"])


def test_an_evaluation_needs_prompts():
    with pytest.raises(ValueError, match="no prompts to evaluate on"):
        world_trainer().evaluate([], words_a)


def test_what_makes_a_sampler_has_to_return_one():
    with pytest.raises(TypeError, match="sampler is None"):
        world_trainer().use_sampler(lambda agent, tokens: None)


def test_advantages_that_a_callback_changes_in_place_leave_the_raw_ones():
    class Doubles(Callback):
        def on_advantages(self, trainer, experience):
            experience.advantages *= 2

    settings = dict(advantage="group_mean", group_size=4, seed=3)
    plain = world_trainer(**settings).step(["a b"] * 2, words_a)
    doubled = world_trainer(callbacks=[Doubles()], **settings).step(["a b"] * 2, words_a)
    assert doubled["advantage_std"] == plain["advantage_std"] > 0
    assert doubled["grad_norm"] > 1.5 * plain["grad_norm"]
