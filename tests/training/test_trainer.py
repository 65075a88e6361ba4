"""The oracle of the loss is slow: one unpadded row at a time through the model's own forward, token by token, by the equations."""
import dataclasses
import itertools
import json
import math

import pytest
import torch
import transformers
from deep import first
from transformers import AutoModelForCausalLM

from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.models.tokens import PromptDataset, pad, word_tokenizer
from instruct_goose.objective.group import PRESETS
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.metrics import describe, describe_step
from instruct_goose.training.prompts import PromptOrder
from instruct_goose.training.rewards import check_scores
from instruct_goose.training.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer

WORDS = [f"w{i}" for i in range(9)]
TOKENIZER = word_tokenizer(WORDS, 20, pad="<end>", bos="<end>", eos="<end>")  # <end>, <unk> and nine words
V, EOS = len(TOKENIZER), TOKENIZER.eos_token_id
BASE = dict(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=20,
            pad_token_id=EOS, bos_token_id=EOS, eos_token_id=EOS)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE, resid_pdrop=.3, embd_pdrop=.3, attn_pdrop=.3),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, attention_dropout=.3),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, attention_dropout=.3),
}
QUERIES = [[0, 5, 7], [0], [0, 4, 0, 6, 8], [0, 10]]       # the end token occurs inside
RESPONSES = [[8, 9, 0], [2, 10, 3, 5, 0], [7], [3, 0]]
SCORES = torch.tensor([1.5, -2., .25, .5])


def tiny(name="gpt2", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for p in model.parameters(): torch.nn.init.normal_(p, std=.35)
    return model.to(dtype)


def agent_and_reference(name="gpt2", separate=False):
    "A value head that says something and a reference that differs from the policy, in training mode: dropout is on."
    agent = Agent(tiny(name), value_model=tiny(name, seed=7) if separate else None).train()
    torch.nn.init.normal_(agent.value_head.weight, std=.3); torch.nn.init.constant_(agent.value_head.bias, .2)
    return agent, tiny(name, seed=1).train()


def config(algorithm="ppo", **changes):
    small = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=1e-3) | (dict(group_size=2) if PRESETS[algorithm]["group_size"] > 1 else {})
    return RLHFConfig.preset(algorithm, **small | changes)


# ---------------------------------------------------------------- the loss

def slow_rows(trainer, queries, responses, scores, moved=None, sampler=None):
    """Each response alone and unpadded through the models' plain forward: a dictionary of lists, one entry per token.
    `moved` is log π − log π_old of each token, `sampler` log π_old − log of what the sampler saw; None: 0."""
    c, agent, ref = trainer.config, trainer.agent, trainer.ref_model
    was = [(m, m.training) for m in agent.modules()]
    agent.eval(); ref.eval()
    rows = []
    for i, (q, r, s) in enumerate(zip(queries, responses, scores.tolist(), strict=True)):
        ids, n = torch.tensor([q + r]), range(len(r))
        logits = agent.model(ids).logits[0] / c.temperature
        ref_logits = (ref(ids).logits[0] / c.temperature).detach()
        base = agent.model.base_model if agent.value_model is None else agent.value_model
        hidden = base(ids).last_hidden_state[0]
        V = [agent.value_head(hidden[len(q) - 1 + t])[0] for t in n]
        logp = [logits[len(q) - 1 + t].log_softmax(-1) for t in n]
        lp = [logp[t][a] for t, a in enumerate(r)]
        rlp = [ref_logits[len(q) - 1 + t].log_softmax(-1)[a] for t, a in enumerate(r)]
        old = [x.detach() - (moved[i][t] if moved else 0.) for t, x in enumerate(lp)]
        rows.append(dict(lp=lp, rlp=rlp, old=old, V=V, ent=[-(x.exp() * x).sum() for x in logp], score=s, w=[math.exp(x) for x in sampler[i]] if sampler else [1. for _ in n]))
    for m, mode in was: m.training = mode
    return rows


def estimate(name, ell): return {"k1": ell, "k2": ell**2 / 2, "k3": (-ell).exp() - 1 + ell}[name]


def slow_advantages(c, rows, baseline):
    "Rewards, then Â, by the papers' formulas; R̂ for the values. Fills the rows in."
    for row in rows:
        n = len(row["lp"])
        price = [c.beta * estimate(c.kl_estimator or "k1", row["old"][t] - row["rlp"][t]).item() if c.kl_placement == "reward" else 0. for t in range(n)]
        row["reward"] = [(row["score"] if t == n - 1 else 0.) - price[t] for t in range(n)]
    totals = [sum(row["reward"]) for row in rows]
    for i, row in enumerate(rows):
        n, first = len(row["lp"]), i - i % c.group_size
        group = totals[first:first + c.group_size]
        others = [x for k, x in enumerate(group) if first + k != i]
        mean = sum(group) / len(group)
        if c.advantage == "gae":
            v = [x.item() for x in row["V"]] + [0.]
            row["A"] = [sum((c.gamma * c.lam)**(k - t) * (row["reward"][k] + c.gamma * v[k + 1] - v[k]) for k in range(t, n)) for t in range(n)]
            row["R"] = [a + b for a, b in zip(row["A"], v, strict=False)]
        elif c.advantage == "return": row["A"] = [sum(c.gamma**(k - t) * row["reward"][k] for k in range(t, n)) for t in range(n)]
        elif c.advantage == "group_mean": row["A"] = [totals[i] - mean] * n
        elif c.advantage == "group_mean_std":
            std = math.sqrt(sum((x - mean)**2 for x in group) / (len(group) - c.group_ddof))
            row["A"] = [(totals[i] - mean) / (std + 1e-4)] * n
        elif c.advantage == "group_mean_batch_std":
            overall = sum(totals) / len(totals)
            std = math.sqrt(sum((x - overall)**2 for x in totals) / (len(totals) - c.group_ddof))
            row["A"] = [(totals[i] - mean) / (std + 1e-4)] * n
        elif c.advantage == "leave_one_out": row["A"] = [totals[i] - sum(others) / len(others)] * n
        elif c.advantage == "greedy": row["A"] = [totals[i] - baseline[i].item()] * n
    if c.whiten_advantages:
        flat = [a for row in rows for a in row["A"]]
        mean = sum(flat) / len(flat)
        var = sum((a - mean)**2 for a in flat) / (len(flat) - 1)
        for row in rows: row["A"] = [(a - mean) / math.sqrt(var + 1e-8) for a in row["A"]]


def slow_weight(c, each, t):
    "The sampler's weight of one token, from the ratios of its response."
    w = {"token": each[t], "product": math.prod(each), "sequence": math.prod(each)**(1 / len(each))}[c.importance_level]
    low, high = c.importance_floor or 0., c.importance_cap
    return min(max(w, low), high) if c.importance_beyond == "cut" else w if low <= w <= high else 0.


def slow_token(c, row, t):
    "One token's share of the loss, before any averaging."
    n, A, old, lp = len(row["lp"]), row["A"][t], row["old"], row["lp"]
    log_ratios = [lp[k] - old[k] for k in range(n)]
    ratio = {"token": log_ratios[t], "sequence": sum(log_ratios) / n, "product": sum(log_ratios)}.get(c.ratio_level, log_ratios[t]).exp()
    if c.ratio_level == "sequence_token": ratio = ratio / ratio.item() * math.exp(sum(log_ratios).item() / n)
    low, high = 1 - c.clip, 1 + (c.clip if c.clip_high is None else c.clip_high)
    clipped = low if ratio < low else high if ratio > high else ratio
    if c.surrogate == "min":
        objective = ratio * A if ratio * A <= clipped * A else torch.as_tensor(clipped * A)
        if c.dual_clip is not None and A < 0 and objective < c.dual_clip * A: objective = torch.tensor(c.dual_clip * A)
    elif c.surrogate == "ratio": objective = ratio * A
    else: objective = (clipped.item() if torch.is_tensor(clipped) else clipped) * A * lp[t]
    loss = -objective * (1. if c.importance_cap is None else slow_weight(c, row["w"], t))
    if c.advantage == "gae": loss = loss + c.vf_coef * (row["V"][t] - row["R"][t])**2 / 2
    ell = lp[t] - row["rlp"][t]
    if c.kl_placement == "loss":
        name, own = c.kl_estimator or "k2", log_ratios[t].exp()
        kl = estimate(name, ell)
        if c.kl_gradient == "ratio": kl = kl * (own.item() if name == "k2" else own)
        if c.kl_gradient == "straight_through": kl = ell**2 / 2 - (ell**2 / 2).item() + kl.item()
        loss = loss + c.beta * kl
    return loss - c.ent_coef * row["ent"][t]


def slow_mean(c, rows, minibatch):
    "The average of the settings over the rows of a minibatch, which may have parts of groups."
    per = {i: [slow_token(c, rows[i], t) for t in range(len(rows[i]["lp"]))] for i in minibatch}
    if c.aggregation == "token_mean": return sum(x for row in per.values() for x in row) / sum(map(len, per.values()))
    if c.aggregation == "sequence_mean": return sum(sum(row) / len(row) for row in per.values()) / len(per)
    if c.aggregation == "sequence_sum": return sum(x for row in per.values() for x in row) / (len(per) * c.max_new_tokens)
    groups = [range(k, k + c.group_size) for k in range(0, len(rows), c.group_size)]
    of_groups = [sum(x for i in g if i in per for x in per[i]) / sum(len(rows[i]["lp"]) for i in g) for g in groups]
    return sum(of_groups) / (len(per) / c.group_size)


def slow_loss(trainer, queries, responses, scores, baseline=None, moved=None, sampler=None, minibatch=None):
    "Equations (3) to (6) with Python loops. Differentiable."
    rows = slow_rows(trainer, queries, responses, scores, moved, sampler)
    slow_advantages(trainer.config, rows, baseline)
    return slow_mean(trainer.config, rows, range(len(rows)) if minibatch is None else minibatch)


SETTINGS = {name: dict(algorithm=name) for name in PRESETS} | {
    "discount": dict(gamma=.9, lam=.5, whiten_advantages=False, vf_coef=.7, value_clip=None),
    "warm, with entropy": dict(temperature=1.7, ent_coef=.05, beta=.4),
    "KL in the loss, k2": dict(kl_placement="loss", beta=.3),
    "KL in the loss, k3": dict(kl_placement="loss", kl_estimator="k3", beta=.3, clip_high=.3),
    "KL in the loss, k1 with the ratio": dict(kl_placement="loss", kl_estimator="k1", kl_gradient="ratio", beta=.3),
    "KL in the loss, k2 with the ratio": dict(kl_placement="loss", kl_estimator="k2", kl_gradient="ratio", beta=.3),
    "KL in the loss, k3 straight through": dict(kl_placement="loss", kl_estimator="k3", kl_gradient="straight_through", beta=.3),
    "KL in the reward, k3": dict(kl_estimator="k3", beta=.3),
    "sequence_mean": dict(aggregation="sequence_mean"),
    "sequence_sum": dict(aggregation="sequence_sum"),
    "GAE, tokens of a group": dict(aggregation="group_token_mean", group_size=2, ent_coef=.05),
    "dual clip": dict(dual_clip=1.3),
    "no clip": dict(surrogate="ratio"),
    "no clip, sequence": dict(surrogate="ratio", ratio_level="sequence"),
    "GSPO-token, values": dict(ratio_level="sequence_token", clip=.05),
    "GRPO, KL in the loss, token mean": dict(algorithm="grpo", aggregation="token_mean", beta=.4),
    "GRPO, std of the population": dict(algorithm="grpo", group_size=4, group_ddof=0, kl_gradient="ratio"),
    "GRPO, whitened": dict(algorithm="grpo", whiten_advantages=True),
    "discounted return": dict(algorithm="reinforce_pp", gamma=.8),
    "weights": dict(algorithm="dapo", importance_cap=1.2),
    "weights, bounded on both sides": dict(algorithm="dapo", importance_cap=1.05, importance_floor=.97),
    "weights, tokens dropped": dict(algorithm="dapo", importance_cap=1.05, importance_floor=.97, importance_beyond="drop"),
    "weights, responses dropped": dict(algorithm="grpo", importance_cap=1.02, importance_level="product", importance_beyond="drop"),
    "spread of the batch": dict(algorithm="grpo", advantage="group_mean_batch_std"),
    "weights, CISPO": dict(algorithm="cispo", importance_cap=1.2, clip=.2, clip_high=.1, beta=.2),
}
BASELINE = torch.tensor([.5, -1., .75, 0.], dtype=torch.float64)


def gradients(agent): return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in agent.parameters()]


def compare(trainer, *batch):
    "Value and every gradient against the slow loss."
    before = [m.training for m in trainer.agent.modules()]
    trainer.agent.zero_grad(); loss = trainer.compute_loss(*batch); loss.backward(); got = gradients(trainer.agent)
    assert [m.training for m in trainer.agent.modules()] == before, "dropout must be restored"
    trainer.agent.zero_grad(); slow = slow_loss(trainer, QUERIES, RESPONSES, SCORES.double(), BASELINE); slow.backward(); expected = gradients(trainer.agent)
    close = dict(atol=1e-9, rtol=1e-7) if trainer.agent.model.config.model_type == "gpt2" else dict(atol=1e-6, rtol=1e-4)  # their norms are float32
    torch.testing.assert_close(loss, slow, **close)
    assert sum(g.abs().sum() for g in expected) > 1e-3
    for a, b in zip(got, expected, strict=True): torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loss_and_its_gradient_are_those_of_the_equations(name, setting):
    agent, ref = agent_and_reference(name, separate=setting == "ppo")
    trainer = RLHFTrainer(agent, ref, config(**SETTINGS[setting]))
    compare(trainer, *pad(QUERIES, EOS, side="left"), *pad(RESPONSES, EOS, side="right"), SCORES.double(), *baseline_for(trainer))


def baseline_for(trainer): return [BASELINE] if trainer.config.advantage == "greedy" else []


# log-ratios beyond every clip on both sides, for rows of both signs of the advantage
MOVED = [[.3, -.4, .35], [-.5, .2, .6, 1.2, -.02], [-.4], [-.1, -.9]]
SAMPLER = [[.1, -.3, .5], [0., .02, .4, -.2, -.1], [.3], [-.6, .25]]


def stale_rollout(trainer):
    "A rollout of an older policy, written by a sampler that was not quite that policy. Advantages are filled in."
    (q, qm), (r, rm) = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    rollout = trainer.annotate(Rollout(q, qm, r, rm, scores=SCORES.double(), baseline=BASELINE))
    spread = lambda rows: torch.tensor([row + [0.] * (rm.shape[1] - len(row)) for row in rows], dtype=torch.float64)
    rollout.old_logprobs = rollout.old_logprobs - spread(MOVED)
    rollout.sampled_logprobs = rollout.old_logprobs - spread(SAMPLER)
    return trainer.advantages(rollout)


@pytest.mark.parametrize("minibatch", first(1, [[3, 0, 1], [0, 1, 2, 3]]), ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_stale_minibatches_and_their_micro_batches_have_the_gradient_of_the_equations(setting, minibatch):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config(**SETTINGS[setting], max_grad_norm=1e9))
    trainer.optimizer.step = lambda: None  # look, do not move
    rollout = stale_rollout(trainer)
    agent.zero_grad()
    slow_loss(trainer, QUERIES, RESPONSES, SCORES.double(), BASELINE, MOVED, SAMPLER, minibatch).backward()
    expected = gradients(agent)
    assert sum(g.abs().sum() for g in expected) > 1e-3
    for micro in (1, 2, None):
        trainer.config.micro_batch_size = micro
        log = trainer.update(rollout[minibatch], first=False)
        for a, b in zip(gradients(agent), expected, strict=True): torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)
        assert ("value_grad_norm" in log) == (trainer.config.advantage == "gae")


@pytest.mark.parametrize("how", ["sequence_mean", "sequence_sum", "group_token_mean"])
def test_equal_minibatches_of_shuffled_rows_average_to_the_whole(how):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config("grpo", aggregation=how, max_grad_norm=1e9))
    trainer.optimizer.step = lambda: None
    rollout = stale_rollout(trainer)
    def gradient(rows): trainer.update(rollout[rows], first=False); return gradients(agent)
    whole, parts = gradient([0, 1, 2, 3]), [gradient(rows) for rows in ([2, 1], [0, 3])]  # each has a part of both groups
    for a, b, c in zip(whole, *parts, strict=True): torch.testing.assert_close(a, (b + c) / 2, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("setting", ["grpo", "gspo", "cispo", "rloo", "dual clip", "no clip"])
def test_the_shares_of_clipped_tokens_are_of_the_right_ratio(setting):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config(**SETTINGS[setting] | (dict(clip=.2, clip_high=.3) if setting == "cispo" else {})))
    c, rollout = trainer.config, stale_rollout(trainer)
    low = high = dual = 0
    for i, row in enumerate(MOVED):
        for t, own in enumerate(row):
            ratio = math.exp({"token": own, "sequence": sum(row) / len(row), "product": sum(row)}[c.ratio_level])
            A, weight = rollout.advantages[i, t].item(), c.surrogate == "weight"
            low += ratio < 1 - c.clip and (weight or A < 0)
            high += ratio > 1 + (c.clip if c.clip_high is None else c.clip_high) and (weight or A > 0)
            dual += c.dual_clip is not None and ratio > c.dual_clip and A < 0
    assert low + high + dual
    if c.surrogate == "ratio": low = high = 0
    got = describe_step(rollout.old_logprobs + torch.tensor([row + [0.] * (5 - len(row)) for row in MOVED], dtype=torch.float64), rollout, c)
    assert {k: round(v.item() * 11) for k, v in got.items() if k.startswith("clip")} == {"clip_fraction": low + high + dual, "clip_fraction_low": low, "clip_fraction_high": high} | (
        {"clip_fraction_dual": dual} if c.dual_clip else {})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("query_side,response_side", list(itertools.product(("left", "right"), repeat=2)))
@pytest.mark.parametrize("pad_id", [EOS, 3, -100])
@pytest.mark.parametrize("kind", first(1, [torch.bool, torch.int64]))
def test_padding_changes_nothing(name, query_side, response_side, pad_id, kind):
    agent, ref = agent_and_reference(name)
    trainer = RLHFTrainer(agent, ref, config())
    (q, qm), (r, rm) = pad(QUERIES, pad_id, side=query_side), pad(RESPONSES, pad_id, side=response_side)
    compare(trainer, q, qm.to(kind), r, rm.to(kind), SCORES.double())


@pytest.mark.parametrize("algorithm", PRESETS)
@pytest.mark.parametrize("query_side,response_side", [("left", "left"), ("right", "right")])
def test_padding_changes_no_preset(algorithm, query_side, response_side):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config(algorithm))
    compare(trainer, *pad(QUERIES, -100, side=query_side), *pad(RESPONSES, -100, side=response_side), SCORES.double(), *baseline_for(trainer))


def test_rows_may_stand_in_any_order_and_padding_may_be_wider():
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config())
    batch = (*pad(QUERIES, EOS, side="left"), *pad(RESPONSES, EOS, side="right"), SCORES.double())
    order = torch.tensor([2, 0, 3, 1])
    wide = lambda x: torch.cat([x, torch.zeros(4, 30, dtype=x.dtype)], 1)
    for other in ([x[order] for x in batch], [wide(x) for x in batch[:4]] + [batch[4]]):
        torch.testing.assert_close(trainer.compute_loss(*other), trainer.compute_loss(*batch), atol=1e-12, rtol=1e-10)


def test_models_of_any_kind_are_accepted():
    batch = (*pad(QUERIES, EOS, side="left"), *pad(RESPONSES, EOS, side="right"), SCORES)
    model = tiny(dtype=torch.float32)
    losses = [RLHFTrainer(m, r, config()).compute_loss(*batch) for m, r in [
        (model, None), (Agent(model), None), (model, create_reference_model(model)), (model, create_reference_model(Agent(model))),
        (model, Agent(tiny(dtype=torch.float32)))]]
    for loss in losses[1:]: torch.testing.assert_close(loss, losses[0])
    assert losses[0].requires_grad and losses[0].shape == ()


def test_one_token_alone_can_be_learned_from():
    loss = RLHFTrainer(tiny(), config=config()).compute_loss(torch.tensor([[0, 1]]), torch.ones(1, 2).bool(), torch.tensor([[3]]), torch.ones(1, 1).bool(), torch.ones(1))
    assert loss.isfinite() and loss.requires_grad


def test_compute_loss_refuses(unchecked):
    trainer = RLHFTrainer(tiny(), config=config())
    good = dict(zip(("query_ids", "query_attention_mask", "response_ids", "response_attention_mask", "rewards"),
                    (*pad(QUERIES, EOS, side="left"), *pad(RESPONSES, EOS, side="right"), SCORES), strict=True))
    empty = good["response_attention_mask"].clone(); empty[1] = False
    cases = [
        (dict(rewards=SCORES[:3]), "rewards has shape \\(3,\\), expected \\(4,\\)"), (dict(rewards=SCORES[:, None]), "shape \\(4, 1\\)"),
        (dict(rewards=torch.tensor([0., 1., float("nan"), 0.])), "rewards of responses \\[2\\]"),
        (dict(response_attention_mask=empty), "no response token in row \\[1\\]"), (dict(query_attention_mask=torch.zeros(4, 5).bool()), "no query token"),
        (dict(query_ids=good["query_ids"][:, 1:]), "differ in shape"), (dict(query_ids=good["query_ids"][:3], query_attention_mask=good["query_attention_mask"][:3]), "3 queries and 4 responses"),
        (dict(response_ids=good["response_ids"] + 8), "vocabulary ends at 10"), (dict(query_attention_mask=good["query_attention_mask"].long() * 2), "only 0"),
        (dict(query_ids=torch.zeros(4, 19).long(), query_attention_mask=torch.ones(4, 19).bool()), "context is 20")]
    with unchecked():
        for change, message in cases:
            with pytest.raises(ValueError, match=message): trainer.compute_loss(**(good | change))
        with pytest.raises(TypeError, match="float32"): trainer.compute_loss(**(good | dict(query_attention_mask=good["query_attention_mask"].float())))


# ---------------------------------------------------------------- the steps

def reward(texts): return [text.split().count("w1") - .5 * text.split().count("w2") for text in texts]


PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2", "w8 w7", "w4", "w2", "w6"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("micro", [None, 3])
def test_annotations_are_those_of_whole_distributions(name, micro):
    agent, ref = agent_and_reference(name)
    trainer = RLHFTrainer(agent, ref, config(temperature=1.3, micro_batch_size=micro), tokenizer=TOKENIZER)
    r = trainer.annotate(trainer.rollout(PROMPTS))
    agent.eval()
    for i in range(len(r)):
        q, a = r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]
        ids, n = torch.cat([q, a])[None], len(a)
        at = slice(len(q) - 1, len(q) - 1 + n)
        pi, rho = ((m(ids).logits[0, at] / 1.3).softmax(-1) for m in (agent.model, trainer.ref_model))
        expected = dict(old_logprobs=pi.log()[range(n), a], ref_logprobs=rho.log()[range(n), a], entropy=-(pi * pi.log()).sum(-1),
                        kl=(pi * (pi / rho).log()).sum(-1), values=agent(ids).values[0, at])
        for what, x in expected.items():
            torch.testing.assert_close(getattr(r, what)[i, :n], x, atol=1e-9, rtol=0)
            assert (getattr(r, what)[i, n:] == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_the_first_iteration_starts_at_ratio_one_and_kl_zero_with_dropout_in_the_config(name, algorithm):
    trainer = RLHFTrainer(tiny(name, dtype=torch.float32).train(), config=config(algorithm=algorithm), tokenizer=TOKENIZER)
    m = trainer.step(PROMPTS, reward)
    assert m["kl_to_reference"] < 1e-6 and abs(m["kl_estimate"]) < 1e-6
    assert m["max_ratio_deviation_first"] < 1e-4 and m["max_sampler_deviation"] < 1e-4
    assert trainer.step(PROMPTS, reward)["kl_to_reference"] > 0
    assert all(module.training for module in trainer.agent.modules()) and not trainer.ref_model.training


def test_metrics_are_json_and_what_they_say():
    trainer = RLHFTrainer(tiny(dtype=torch.float32), tiny(seed=1, dtype=torch.float32), config(), tokenizer=TOKENIZER)
    seen = []
    history = trainer.train(PROMPTS, reward, steps=3, callback=lambda m: seen.append(m), progress=False)
    assert seen == history == json.loads(json.dumps(history)) and [m["iteration"] for m in history] == [0, 1, 2]
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    m = describe(r, trainer.config, trainer.eos_ids)
    ell = [(r.old_logprobs - r.ref_logprobs)[i, t].item() for i, t in r.mask.nonzero().tolist()]
    assert m["kl_estimate"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in ell) / 8, rel=1e-4) and m["kl_to_reference"] == pytest.approx(r.kl.sum().item() / 8)
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
    assert m["return_mean"] == pytest.approx(R.mean().item(), abs=1e-5) and m["advantage_std"] == pytest.approx((R - V).std(unbiased=False).item(), abs=1e-5)
    assert m["total_reward_mean"] == pytest.approx(r.rewards.sum().item() / 8, abs=1e-5)


@pytest.mark.parametrize("changes", [dict(algorithm="reinforce_pp", gamma=.9), dict(algorithm="rloo", whiten_advantages=True)], ids=str)
def test_the_log_shows_advantages_as_they_were_before_whitening(changes):
    trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(**changes), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8 // trainer.config.group_size]), lambda texts: [3. + len(t) for t in texts]))
    m, plain = describe(r, trainer.config, trainer.eos_ids), []
    scores = [3. + len(t) for t in r.texts]
    for i, n in enumerate(r.mask.sum(1).tolist()):  # no drift yet, so the score is all there is
        plain += [scores[i] * .9**(n - 1 - t) if trainer.config.group_size == 1 else scores[i] - scores[i ^ 1] for t in range(n)]
    mean = sum(plain) / len(plain)
    assert m["advantage_mean"] == pytest.approx(mean, rel=1e-4, abs=1e-4)
    assert m["advantage_std"] == pytest.approx(math.sqrt(sum((x - mean)**2 for x in plain) / len(plain)), rel=1e-4)
    white = r.advantages[r.mask]
    assert abs(white.mean()) < 1e-5 and white.std().item() == pytest.approx(1, abs=1e-4)


def test_the_meters_of_the_update_describe_the_policy_before_each_step():
    trainer = RLHFTrainer(tiny(), config=config(minibatches=1, epochs=2, lr=.02, clip=.1, clip_high=.3), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    start = [p.detach().clone() for p in trainer.agent.parameters()]
    m = trainer.optimize(r)
    for p, w in zip(trainer.agent.parameters(), start, strict=True): p.data = w
    again = RLHFTrainer(trainer.agent, config=dataclasses.replace(trainer.config, epochs=1), tokenizer=TOKENIZER)
    one = again.optimize(r)  # the same first step; what the second sees is the policy after it
    logp = trainer.agent.evaluate(r.query_ids, r.query_mask, r.response_ids, r.mask).logprobs.detach()
    k3, low, high, n = 0., 0, 0, r.mask.sum().item()
    for i, t in r.mask.nonzero().tolist():
        ell = (logp[i, t] - r.old_logprobs[i, t]).item(); ratio, a = math.exp(ell), r.advantages[i, t].item()
        k3 += ratio - 1 - ell  # k3 of KL(old, new), sampled from old
        low += ratio < .9 and a < 0; high += ratio > 1.3 and a > 0
    assert low and high and one["kl_to_old"] == one["clip_fraction"] == 0  # before the first step nothing has moved
    assert m["kl_to_old"] == pytest.approx(k3 / 8 / 2) and m["clip_fraction_low"] == pytest.approx(low / n / 2)
    assert m["clip_fraction_high"] == pytest.approx(high / n / 2) and m["clip_fraction"] == pytest.approx((low + high) / n / 2)


def test_an_iteration_ends_early_where_an_update_finds_the_policy_too_far():
    def steps(**settings):
        trainer = RLHFTrainer(tiny(), config=config(lr=.02, epochs=3, minibatches=2, **settings), tokenizer=TOKENIZER)
        seen, update = [], trainer.update
        trainer.update = lambda batch, first=False: seen.append(update(batch, first)) or seen[-1]
        trainer.step(PROMPTS, reward)
        return [x["kl_to_old"].item() for x in seen]
    whole = steps()
    assert len(whole) == 6 and whole[0] < 1e-9 < whole[2]  # each is measured before its own step
    for n in (2, 4):
        limit = whole[n - 1] * .999
        expected = 1 + next(i for i, x in enumerate(whole) if x > limit)
        assert steps(kl_early_stop=limit) == pytest.approx(whole[:expected], rel=1e-3, abs=1e-9) and expected < 6
    assert len(steps(kl_early_stop=1e6)) == 6


def test_what_is_not_defined_is_none():
    trainer = RLHFTrainer(tiny(), config=config(beta=0.), tokenizer=TOKENIZER)
    m = trainer.step(PROMPTS, lambda texts: [0.] * len(texts))  # returns that do not vary
    assert m["explained_variance"] is None and json.loads(json.dumps(m)) == m


@pytest.mark.parametrize("changes", first(4, [
    dict(algorithm="ppo"), dict(algorithm="dapo", importance_cap=1.5), dict(kl_placement="loss", ent_coef=.02), dict(algorithm="gspo"),
    *(dict(algorithm=name) for name in PRESETS if name not in ("ppo", "gspo")), dict(aggregation="sequence_mean"), dict(aggregation="sequence_sum")]), ids=str)
def test_micro_batches_take_the_same_step(changes):
    def stepped(micro):
        agent, ref = agent_and_reference()
        trainer = RLHFTrainer(agent, ref, config(micro_batch_size=micro, **changes), tokenizer=TOKENIZER)
        metrics = [trainer.step(PROMPTS[:8 // trainer.config.group_size], reward) for _ in range(2)]
        return metrics, [p.detach().clone() for p in agent.parameters()]
    whole, expected = stepped(None)
    for micro in (1, 3) if changes == {"algorithm": "ppo"} else (3,):
        metrics, got = stepped(micro)
        for a, b in zip(got, expected, strict=True): torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)
        for a, b in zip(metrics, whole, strict=True):
            for name in a.keys() - {n for n in a if "second" in n}:
                # a gradient of rounding alone moves a weight or not
                assert a[name] == pytest.approx(b[name], abs=1e-2 if name == "weights_moved" else 1e-6), name


def test_a_changed_model_and_another_temperature_are_noticed():
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    trainer.optimize(r)
    weights = [p.detach().clone() for p in trainer.agent.parameters()]
    with pytest.raises(ValueError, match="(?s)before the first update.*dropout.*temperature.*padding") as e: trainer.optimize(r)
    assert "make a new one" in str(e.value)
    assert all(a.equal(b) for a, b in zip(trainer.agent.parameters(), weights, strict=True)), "no step may be taken"
    trainer.config.temperature = 1.5
    with pytest.raises(ValueError, match="sampler and the training forward disagree"):
        other = trainer.rollout(PROMPTS); trainer.config.temperature = 1.; trainer.annotate(other)


def test_a_wrong_sampler_is_noticed():
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)
    r.query_mask = torch.ones_like(r.query_mask)  # as if the training forward took padding for text
    with pytest.raises(ValueError, match="disagree"): trainer.annotate(r)


@pytest.mark.parametrize("where,message", [
    ("value_head.weight", "the loss is nan and values is nan at token 0 of response 0 of the minibatch, 'w.*; the weight value_head.weight is not finite"), ("score", "the gradient of|rewards and values")])
def test_nothing_that_is_not_finite_reaches_the_optimizer(where, message):
    trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    if where == "score": r.returns = r.returns * 1e38
    else: dict(trainer.agent.named_parameters())[where].data[0, 0] = float("nan")
    weights = [p.detach().clone() for p in trainer.agent.parameters()]
    trainer.iteration = 17
    with pytest.raises(FloatingPointError, match=f"iteration 17: .*(?:{message}).*optimizer has not moved"): trainer.optimize(r)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(trainer.agent.parameters(), weights, strict=True))


def test_a_gradient_that_is_not_finite_names_its_parameter():
    trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    trainer.agent.model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(FloatingPointError, match="grad_norm is inf; the gradient of model.transformer.h.1.mlp.c_fc.weight"): trainer.optimize(r)


def test_policy_and_value_gradients_are_clipped_apart():
    def policy_step(scale):
        trainer = RLHFTrainer(Agent(tiny(), value_model="copy"), config=config(vf_coef=scale, max_grad_norm=.1), tokenizer=TOKENIZER,
                              optimizer=lambda groups: torch.optim.SGD(groups))
        r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
        before = [p.detach().clone() for p in trainer.agent.policy_parameters()]
        trainer.config.epochs = trainer.config.minibatches = 1
        m = trainer.optimize(r)
        moved = torch.cat([(p - b).flatten() for p, b in zip(trainer.agent.policy_parameters(), before, strict=True)]).norm().item()
        return m, moved
    (small, a), (large, b) = policy_step(.5), policy_step(500.)
    assert large["value_grad_norm"] == pytest.approx(1000 * small["value_grad_norm"]) and large["grad_norm"] == pytest.approx(small["grad_norm"])
    assert a == pytest.approx(b, rel=1e-4) and a == pytest.approx(.1 * 1e-3, rel=1e-4)  # the step is max_grad_norm · lr


# ---------------------------------------------------------------- rewards

def test_reward_functions_are_checked_and_the_text_is_named(unchecked):
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)
    cases = [(lambda t: [0.] * 7, ValueError, "7 scores for 8 texts; the first without a score is text 7 of 8, 'w6"),
             (lambda t: [0.] * 9, ValueError, "9 scores for 8"), (lambda t: None, TypeError, "returned a NoneType"), (lambda t: "12345678", TypeError, "a str"),
             (lambda t: {}, TypeError, "a dict"), (lambda t: 1., TypeError, "a float"), (lambda t: torch.zeros(8, 1), ValueError, "shape \\(8, 1\\)"),
             (lambda t: torch.tensor(1.), ValueError, "shape \\(\\)"), (lambda t: [0.] * 3 + [float("nan")] + [0.] * 4, ValueError, "text 3 of 8, 'w1 w1 w2.*is nan"),
             (lambda t: [0.] * 3 + [float("-inf")] + [0.] * 4, ValueError, "is -inf"), (lambda t: [0.] * 5 + ["w"] + [0.] * 2, TypeError, "text 5 of 8.*not a number"),
             (lambda t: [None] * 8, TypeError, "text 0 of 8"), (lambda t: [[1.] * 99] * 8, ValueError, "text 0 of 8.*list of 99 numbers"), (lambda t: [1e300] * 8, ValueError, "is inf")]
    with unchecked():
        for fn, error, message in cases:
            with pytest.raises(error, match=message): trainer.score(r, fn)
            assert r.scores is None
        with pytest.raises(TypeError, match="reward_fn is a float"): trainer.score(r, 3.)
        with pytest.raises(ValueError, match="no texts: give the trainer tokenizer="): trainer.score(dataclasses.replace(r, texts=None), reward)
    def spoil(texts): texts.clear(); return [0.] * 8
    trainer.score(r, spoil)
    assert len(r.texts) == 8


def test_any_kind_of_numbers_will_do():
    import numpy as np
    expected = [1., 0., -2.5]
    for scores in (expected, tuple(expected), np.array(expected), np.array(expected, dtype=np.float16), torch.tensor(expected, dtype=torch.bfloat16),
                   (x for x in expected), [torch.tensor(x) for x in expected], [np.float32(x) for x in expected], torch.tensor(expected, requires_grad=True)):
        assert check_scores(scores, ["a", "b", "c"]).tolist() == expected


def test_an_object_with_a_score_method_is_a_reward():
    class Judge(torch.nn.Module):
        def score(self, texts): return [len(t) for t in texts]
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.score(trainer.rollout(PROMPTS), Judge())
    assert r.scores.tolist() == [len(t) for t in r.texts]


# ---------------------------------------------------------------- prompts

def test_prompts_in_any_form_give_the_same_rollout():
    dataset = PromptDataset(PROMPTS, TOKENIZER)
    ids = [TOKENIZER(p)["input_ids"] for p in PROMPTS]
    left, right = ({k: v for k, v in zip(("query_ids", "query_mask"), pad(ids, EOS, side=side), strict=True)} for side in ("left", "right"))
    texts = None
    for prompts in (PROMPTS, tuple(PROMPTS), ids, [torch.tensor(i) for i in ids], [dataset[i] for i in range(8)], dataset.collate([dataset[i] for i in range(8)]), left, right):
        got = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER).rollout(prompts).texts
        texts = texts or got
        assert got == texts


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_each_prompt_is_answered_group_size_times_side_by_side(algorithm):
    trainer = RLHFTrainer(tiny(), config=config(algorithm, group_size=4), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS[:2])
    assert r.prompts == ["w0 w3"] * 4 + ["w5"] * 4 and len(set(r.texts)) > 2
    trainer.advantages(trainer.score(r, lambda texts: list(range(8))))
    assert (r.values is None) == (r.returns is None) == (algorithm == "grpo")
    if algorithm == "ppo": return
    assert r.advantages[:4].sum(1).sign().tolist() == [-1, -1, 1, 1]
    for i in range(8): assert r.advantages[i][r.mask[i]].unique().numel() == 1


# ---------------------------------------------------------------- the greedy baseline

def greedy_by_hand(trainer, prompt):
    "One token at a time, without cache or padding; the text, and log π − log π_ref of each token."
    ids, drift = list(TOKENIZER(prompt)["input_ids"]), []
    start = len(ids)
    while len(drift) < trainer.config.max_new_tokens:
        pi, ref = (m.eval()(torch.tensor([ids])).logits[0, -1] / trainer.config.temperature for m in (trainer.agent.model, trainer.ref_model))
        token = pi.argmax().item()
        drift.append((pi.log_softmax(-1) - ref.log_softmax(-1))[token].item()); ids.append(token)
        if token == EOS: break
    assert len(ids) > start
    return TOKENIZER.decode(ids, skip_special_tokens=True), drift


@pytest.mark.parametrize("changes", [{}, dict(micro_batch_size=2), dict(temperature=1.6), dict(kl_estimator="k3"), dict(kl_placement="loss")], ids=str)
def test_the_greedy_baseline_is_the_total_reward_of_the_likeliest_response(changes):
    agent, ref = agent_and_reference()
    trainer = RLHFTrainer(agent, ref, config("remax", beta=.3, **changes), tokenizer=TOKENIZER)
    prompts, asked = ["w0 w3", "w5", "w0 w3", "", "w5", "w8 w7", "", "w5"], []
    def spy(texts): asked.append(list(texts)); return reward(texts)
    r = trainer.score(trainer.rollout(prompts), spy)
    by_hand = [greedy_by_hand(trainer, p) for p in prompts]
    assert asked == [r.texts, [text for text, _ in by_hand]]  # a text per row, so that a judge may know its place
    for i, (text, drift) in enumerate(by_hand):
        k = {"k3": lambda x: math.exp(-x) - 1 + x}.get(changes.get("kl_estimator"), lambda x: x)
        price = 0. if changes.get("kl_placement") == "loss" else .3 * sum(map(k, drift))
        assert r.baseline[i].item() == pytest.approx(reward([text])[0] - price, abs=1e-5)
    trainer.advantages(r)
    for i in range(8):
        assert r.advantages[i][r.mask[i]].tolist() == pytest.approx([(r.rewards[i].sum() - r.baseline[i]).item()] * int(r.mask[i].sum()), abs=1e-6)
    assert describe(r, trainer.config)["baseline_mean"] == pytest.approx(r.baseline.mean().item())


def test_the_greedy_baseline_throws_no_dice(unchecked):
    class Counting(torch.nn.Module):
        def score(self, texts): return [float(len(t)) for t in texts]
    one, two = (RLHFTrainer(tiny(), config=config(a), tokenizer=TOKENIZER) for a in ("remax", "reinforce_pp"))
    state = torch.get_rng_state()
    for trainer in (one, two): trainer.score(trainer.rollout(PROMPTS), Counting())
    assert one.rollout(PROMPTS).texts == two.rollout(PROMPTS).texts and torch.get_rng_state().equal(state)
    seen = []
    def judge(texts): seen.append(texts); return [0.] * 8 if len(seen) == 1 else [0.] * 5 + [float("nan")] * 3
    r = one.rollout(PROMPTS)
    with unchecked(), pytest.raises(ValueError, match="the score of greedy text 5 of 8, 'w4.*is nan"): one.score(r, judge)
    assert r.scores is None
    (q, qm), (ids, mask) = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    with unchecked():
        with pytest.raises(ValueError, match="no baseline: call score"): one.advantages(Rollout(q, qm, ids, mask, scores=SCORES.double()))
        with pytest.raises(ValueError, match="pass baseline="): one.compute_loss(q, qm, ids, mask, SCORES)
        with pytest.raises(ValueError, match="baseline has shape \\(3,\\)"): one.compute_loss(q, qm, ids, mask, SCORES, BASELINE[:3])
        with pytest.raises(ValueError, match="baseline of responses \\[0\\]"): one.compute_loss(q, qm, ids, mask, SCORES, BASELINE / torch.tensor([0., 1, 1, 1]))
    again = RLHFTrainer(tiny(), config=config("grpo", group_size=8), tokenizer=TOKENIZER)
    with unchecked(), pytest.raises(ValueError, match="4 scores do not divide into groups of 8"): again.compute_loss(q, qm, ids, mask, SCORES)


# ---------------------------------------------------------------- a sampler that is not quite the policy

def test_importance_weights_are_those_of_the_sampler(unchecked):
    trainer = RLHFTrainer(tiny(), config=config("grpo", importance_cap=1.5), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS[:4])
    noise = torch.randn(r.mask.shape, generator=torch.Generator().manual_seed(0)) * .5
    r.sampled_logprobs = torch.where(r.mask, r.sampled_logprobs + noise, 0.)
    m = describe(trainer.advantages(trainer.score(r, reward)), trainer.config)  # no refusal: the weights are there for it
    ratios = [math.exp((r.old_logprobs - r.sampled_logprobs)[i, t].item()) for i, t in r.mask.nonzero().tolist()]
    assert m["importance_mean"] == pytest.approx(sum(min(x, 1.5) for x in ratios) / len(ratios))
    assert 0 < m["importance_capped"] == pytest.approx(sum(x > 1.5 for x in ratios) / len(ratios))
    trainer.optimize(r)
    plain = RLHFTrainer(tiny(), config=config("grpo"), tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="sampler and the training forward disagree"): plain.annotate(r)
    assert "importance_mean" not in describe(plain.advantages(plain.score(plain.rollout(PROMPTS[:4]), reward)), plain.config)
    r.sampled_logprobs = None
    fresh = RLHFTrainer(tiny(), config=config("grpo", importance_cap=1.5), tokenizer=TOKENIZER)
    with unchecked(), pytest.raises(ValueError, match="importance_cap needs to know the sampler"): fresh.optimize(fresh.advantages(fresh.annotate(r)))


def test_rollout_refuses(unchecked):
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    with unchecked():
        for prompts, error, message in [([], ValueError, "no prompts"), ("w1", TypeError, "one text"), (["w1", "w1 " * 14], ValueError, "prompt 1 has 15 tokens, the limit is 14"),
                                        ([[0, 1], []], ValueError, "row \\[1\\]"), (["w1", None], TypeError, "prompt 1")]:
            with pytest.raises(error, match=message): trainer.rollout(prompts)
        with pytest.raises(ValueError, match="has no tokenizer"): RLHFTrainer(tiny(), config=config()).rollout(PROMPTS)
        with pytest.raises(ValueError, match="max_new_tokens is 20 and the model's context 20 tokens: there is no room"):
            RLHFTrainer(tiny(), config=config(max_new_tokens=20), tokenizer=TOKENIZER).rollout(PROMPTS)
    untexted = RLHFTrainer(tiny(), config=config()).rollout([[0, 1], [0]])  # ids need no tokenizer
    assert untexted.texts is None


def test_every_pass_shows_every_prompt_once_in_a_new_order():
    trainer = RLHFTrainer(tiny(), config=config(batch_size=3, minibatches=1), tokenizer=TOKENIZER)
    seen, trainer.fresh = [], PromptOrder(PROMPTS, trainer.config.seed)
    while len(seen) < 48: seen += trainer.next_prompts(3)
    passes = [seen[i:i + 8] for i in range(0, 48, 8)]
    assert all(sorted(p) == sorted(PROMPTS) for p in passes) and len({tuple(p) for p in passes}) > 4 and trainer.prompts_seen == 48
    assert PromptOrder(PROMPTS, trainer.config.seed).take(9, 3) == seen[9:12]  # the place is all there is to remember
    assert PromptOrder(PROMPTS, 1).take(0, 8) != passes[0]


def test_a_stream_is_read_in_order_and_may_run_out():
    trainer = RLHFTrainer(tiny(), config=config(batch_size=4), tokenizer=TOKENIZER)
    seen = []
    def spy(texts): seen.extend(t.split()[0] for t in texts); return [0.] * len(texts)
    trainer.train((f"w{i % 9}" for i in itertools.count()), spy, steps=2, progress=False)
    assert seen == [f"w{i}" for i in range(8)]
    with pytest.raises(ValueError, match="ran out in iteration 4"): trainer.train(iter(["w1"] * 8), spy, steps=3, progress=False)
    with pytest.raises(ValueError, match="no prompts"): trainer.train([], spy, steps=1, progress=False)
    with pytest.raises(TypeError, match="one text"): trainer.train("w1", spy, steps=1, progress=False)


# ---------------------------------------------------------------- the run

def run(steps=3, **changes):
    trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(steps=steps, **changes), tokenizer=TOKENIZER)
    history = trainer.train(PROMPTS, reward, progress=False)
    return [{k: v for k, v in m.items() if "second" not in k} for m in history], [p.detach().clone() for p in trainer.agent.parameters()]


def test_a_run_is_its_seed_and_nothing_else():
    state = torch.get_rng_state()
    history, weights = run()
    torch.manual_seed(5); torch.rand(100)
    again, same = run()
    assert history == again and all(a.equal(b) for a, b in zip(weights, same, strict=True))
    other, _ = run(seed=1)
    assert other != history
    torch.manual_seed(3)
    trainer, before = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER), torch.get_rng_state()
    trainer.step(PROMPTS, reward)
    assert torch.get_rng_state().equal(before) and not state.equal(before)


def test_steps_and_schedules():
    for schedule, expected in {"constant": [1, 1, 1, 1], "linear": [1, .75, .5, .25],
                               "cosine": [.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]}.items():
        trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(steps=4, lr_schedule=schedule, value_lr=.02), tokenizer=TOKENIZER)
        history = trainer.train(PROMPTS, reward, steps=3, progress=False) + trainer.train(PROMPTS, reward, progress=False)  # what is left
        assert [m["lr"] for m in history] == pytest.approx([1e-3 * x for x in expected])
        assert trainer.optimizer.param_groups[1]["lr"] == pytest.approx(.02 * expected[-1])
        with pytest.raises(ValueError, match="4 of 4 iterations are done"): trainer.train(PROMPTS, reward, progress=False)
        if schedule != "constant":
            with pytest.raises(ValueError, match="ends at config.steps"): trainer.train(PROMPTS, reward, steps=1, progress=False)
    assert len(RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER).train(PROMPTS, reward, steps=9, callback=lambda m: m["iteration"] == 1, progress=False)) == 2


def test_the_controller_moves_beta_and_the_rewards_follow():
    trainer = RLHFTrainer(tiny(dtype=torch.float32), config=config(beta=.2, kl_target=5.), tokenizer=TOKENIZER)
    history = trainer.train(PROMPTS, reward, steps=3, progress=False)
    assert [m["beta"] for m in history] == pytest.approx([.2, .2 * .98, .2 * .98**2]) and trainer.beta == pytest.approx(.2 * .98**3)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), lambda t: [0.] * 8))
    torch.testing.assert_close(r.rewards, -trainer.beta * (r.old_logprobs - r.ref_logprobs))


def test_the_reference_does_not_move_and_the_value_function_does():
    agent, ref = agent_and_reference(separate=True)
    trainer = RLHFTrainer(agent, ref, config(), tokenizer=TOKENIZER)
    kept, values = [p.detach().clone() for p in trainer.ref_model.parameters()], [p.detach().clone() for p in agent.value_parameters()]
    trainer.train(PROMPTS, reward, steps=2, progress=False)
    assert all(a.equal(b) for a, b in zip(trainer.ref_model.parameters(), kept, strict=True))
    assert not all(a.equal(b) for a, b in zip(agent.value_parameters(), values, strict=True))


def test_what_does_not_belong_together_is_refused():
    model = tiny()
    bare = word_tokenizer(WORDS, 20); bare.pad_token = None
    larger = word_tokenizer(WORDS + ["more"], 20)
    wider = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(BASE | dict(vocab_size=V + 1)))).double()
    for kwargs, message in [(dict(tokenizer=bare), "tokenizer.pad_token = tokenizer.eos_token"), (dict(tokenizer=larger), "14 tokens, the model 11"),
                            (dict(ref_model=model), "shares parameters"), (dict(ref_model=wider), "ref_model has 12 tokens, the policy 11"),
                            (dict(optimizer=torch.optim.SGD(model.parameters(), lr=1.)), "value function's parameters")]:
        with pytest.raises(ValueError, match=message): RLHFTrainer(model, config=config(), **kwargs)


def test_an_optimizer_of_ones_own():
    agent = Agent(tiny())
    mine = torch.optim.SGD(agent.parameters(), lr=.5)
    for optimizer, lr in ((mine, .5), (lambda groups: torch.optim.SGD(groups, momentum=.9), 1e-3)):
        trainer = RLHFTrainer(agent, config=config(), tokenizer=TOKENIZER, optimizer=optimizer)
        assert isinstance(trainer.optimizer, torch.optim.SGD) and trainer.step(PROMPTS, reward)["lr"] == pytest.approx(lr)
    frozen = Agent(tiny())
    for p in frozen.model.transformer.h[0].parameters(): p.requires_grad_(False)
    trainer = RLHFTrainer(frozen, config=config(), tokenizer=TOKENIZER)
    before = frozen.model.transformer.h[0].mlp.c_fc.weight.clone()
    trainer.step(PROMPTS, reward)
    assert frozen.model.transformer.h[0].mlp.c_fc.weight.equal(before) and not frozen.model.transformer.h[1].mlp.c_fc.weight.grad.eq(0).all()


@pytest.mark.parametrize("name,algorithm", first(1, [("llama", "ppo"), ("gpt2", "grpo"), ("gpt2", "ppo"), ("gpt2", "rloo"), ("gpt2", "remax")]))
def test_it_reaches_the_best_possible_policy(name, algorithm):
    """A uniform reference, so that the best J = E[score − β·KL] is a sum that can be done (see the lesson): each of the V tokens has
    1/V, w1 earns 1, w2 costs .5, the end stops. Prompts of different lengths, left padding, absolute and rotary positions."""
    beta, T = .5, 6
    W = 0.
    for _ in range(T): W = beta * math.log((math.exp((1 + W) / beta) + math.exp((W - .5) / beta) + (V - 3) * math.exp(W / beta) + 1) / V)
    settings = dict(tie_word_embeddings=False, pad_token_id=None)  # an embedding of padding is held at 0, and the first token would have nothing to read
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**(ROTARY | settings)) if name == "llama" else
        transformers.GPT2Config(**(BASE | settings), resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
    torch.nn.init.zeros_(model.lm_head.weight)
    kl = dict(kl_placement="reward", kl_estimator=None)  # GRPO's k3 in the loss has another optimum
    group = dict(group_size=8) if PRESETS[algorithm]["group_size"] > 1 else {}
    settings = config(algorithm, **kl, **group, steps=40, batch_size=64, max_new_tokens=T, lr=1e-2, beta=beta, lr_schedule="linear")
    agent = Agent(model, value_model="copy" if settings.advantage == "gae" else None)
    prompts = ["w0 w3", "w5", "", "w8 w7 w0 w4"]
    history = RLHFTrainer(agent, config=settings, tokenizer=TOKENIZER).train(prompts, reward, progress=False)
    reached = sum(m["total_reward_mean"] for m in history[-10:]) / 10
    assert history[0]["total_reward_mean"] < .3 * W and .97 * W < reached < W + .02


# ---------------------------------------------------------------- settings

def test_every_setting_is_checked_by_name_value_and_range(unchecked):
    with unchecked():
        for field in dataclasses.fields(RLHFConfig):
            for bad in (float("nan"), float("inf"), -1, "x", ["x"] if field.name == "reward_weights" else [1], object()):
                with pytest.raises((ValueError, TypeError), match=f"^{field.name} is .*must be"): RLHFConfig(**{field.name: bad})
        for name in ("steps", "batch_size", "epochs", "minibatches", "max_new_tokens", "group_size", "seed"):
            for bad in (1.5, True, None):
                with pytest.raises(TypeError, match=f"{name} is .*whole number"): RLHFConfig(**{name: bad})
        for bad, message in [(dict(clip=0), "above 0"), (dict(lam=1.01), "from 0 to 1"), (dict(gamma=-.1), "from 0 to 1"), (dict(temperature=0), "above 0"),
                             (dict(advantage="group_mean"), "group_size is 1: it must be at least 2 for group_mean"),
                             (dict(advantage="group_mean_std"), "at least 2 for group_mean_std"), (dict(advantage="leave_one_out"), "at least 2 for leave_one_out"),
                             (dict(aggregation="group_token_mean"), "at least 2 for group_token_mean"), (dict(group_size=0), "at least 1"),
                             (dict(group_size=8, batch_size=12), "multiple of group_size, 8"), (dict(dual_clip=1.), "above 1"),
                             (dict(dual_clip=2., surrogate="ratio"), "None with surrogate='ratio'"), (dict(importance_cap=0.), "above 0"), (dict(importance_floor=.5), "below importance_cap"),
                             (dict(importance_cap=2., importance_floor=2.), "below importance_cap"), (dict(kl_early_stop=0.), "above 0"), (dict(importance_beyond="mask"), "one of"), (dict(group_ddof=2), "one of 0, 1"),
                             (dict(kl_placement="loss", kl_estimator="k1"), "kl_gradient is 'plain': it must be 'ratio' or 'straight_through'"),
                             (dict(kl_gradient="ratio"), "'plain' with kl_placement='reward'"),
                             (dict(minibatches=65), "at most batch_size, 64"), (dict(beta=0, kl_target=3), "above 0 when kl_target")]:
            with pytest.raises(ValueError, match=message): RLHFConfig(**bad)
        RLHFConfig(beta=0, lr=1, clip=1, gamma=1, lam=0, ent_coef=0, vf_coef=0)  # whole numbers where numbers are meant


def test_every_setting_has_help_on_the_command_line():
    import contextlib
    import io
    import re

    import tyro
    assert tyro.cli(RLHFConfig, args=["--advantage", "leave_one_out", "--group-size", "4", "--beta", "0", "--micro-batch-size", "8", "--no-whiten-advantages",
                                      "--dual-clip", "3", "--kl-estimator", "None", "--group-ddof", "0"]) == \
        RLHFConfig(advantage="leave_one_out", group_size=4, beta=0., micro_batch_size=8, whiten_advantages=False, dual_clip=3., group_ddof=0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit): tyro.cli(RLHFConfig, args=["--help"], console_outputs=True)
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", out.getvalue())
    for field in dataclasses.fields(RLHFConfig): assert f"--{field.name.replace('_', '-')}" in text
    import inspect
    lines = inspect.getsource(RLHFConfig).splitlines()
    for field in dataclasses.fields(RLHFConfig):
        at = next(i for i, x in enumerate(lines) if re.match(rf"\s+{field.name}:", x))
        below = next(x for x in lines[at:] if re.match(r'    "', x) or "  # " in x)  # beside the field, or a string under it
        comment = below.split("  # ")[1] if "  # " in below else below.strip().strip('"')
        assert len(comment) > 10 and comment.split()[0].strip("`;:") in text, field.name


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_preset_is_its_dials_and_what_overrides_them(algorithm):
    c = RLHFConfig.preset(algorithm)
    assert {k: getattr(c, k) for k in PRESETS[algorithm]} == PRESETS[algorithm] and c.algorithm == algorithm
    defaults = RLHFConfig()
    for f in dataclasses.fields(RLHFConfig):
        if f.name not in PRESETS[algorithm]: assert getattr(c, f.name) == getattr(defaults, f.name), f.name
    other = RLHFConfig.preset(algorithm, steps=7, clip=.11, beta=.9, group_size=4)
    assert (other.steps, other.clip, other.beta, other.group_size, other.algorithm) == (7, .11, .9, 4, algorithm)  # sizes do not make another algorithm
    assert RLHFConfig.preset(algorithm, group_ddof=0).algorithm == "custom"
    assert dataclasses.replace(c, steps=3).algorithm == algorithm


def test_presets_of_other_configurations_and_unknown_ones():
    @dataclasses.dataclass
    class Mine(RLHFConfig):
        beta: float = .7
        clip: float = .3
        steps: int = 5
    grpo, rloo = Mine.preset("grpo"), Mine.preset("rloo")
    assert type(grpo) is Mine and (grpo.beta, grpo.clip, grpo.steps) == (.04, .2, 5)  # the preset beats the class
    assert rloo.beta == .7 and Mine.preset("rloo", beta=.2).beta == .2                # which it leaves alone where it says nothing
    assert RLHFConfig().algorithm == Mine().algorithm == "ppo"
    with pytest.raises(ValueError, match="no preset 'dqn': choose one of ppo, grpo.*remax"): RLHFConfig.preset("dqn")
    with pytest.raises(TypeError, match="algorithm"): RLHFConfig(algorithm="grpo")
    with pytest.raises(AttributeError): RLHFConfig().algorithm = "grpo"


def test_only_gae_trains_a_value_function():
    for algorithm in PRESETS:
        agent = Agent(tiny(dtype=torch.float32))
        trainer = RLHFTrainer(agent, config=config(algorithm), tokenizer=TOKENIZER)
        known = {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
        assert all((id(p) in known) == (algorithm == "ppo") for p in agent.value_parameters())
        m = trainer.step(PROMPTS[:8 // trainer.config.group_size], reward)
        assert ("value_loss" in m) == ("explained_variance" in m) == (algorithm == "ppo")
        assert all((p == 0).all() for p in agent.value_parameters()) == (algorithm != "ppo")


def test_half_precision_runs():
    trainer = RLHFTrainer(tiny(dtype=torch.bfloat16), config=config(), tokenizer=TOKENIZER)
    m = trainer.step(PROMPTS, reward)
    assert m["kl_to_reference"] == 0 and math.isfinite(m["value_loss"]) and m["max_ratio_deviation_first"] < .5


def test_the_trainer_leaves_a_rollout_of_ones_own_alone():
    "Rows from elsewhere, scores set by hand, no tokenizer, no texts."
    trainer = RLHFTrainer(tiny(), config=config(minibatches=2))
    (q, qm), (r, rm) = pad(QUERIES, EOS, side="left"), pad(RESPONSES, EOS, side="right")
    rollout = Rollout(q, qm, r, rm, scores=SCORES.double())
    m = trainer.optimize(trainer.advantages(rollout))
    assert m["max_ratio_deviation_first"] < 1e-9
    with pytest.raises(ValueError, match="no scores"): trainer.advantages(Rollout(q, qm, r, rm))
    with pytest.raises(ValueError, match="no advantages"): trainer.optimize(Rollout(q, qm, r, rm))


# ── what a reward is given ──

SUMS = [{"prompt": f"w{i % 8 + 1}", "answer": f"w{(i + 1) % 8 + 1}"} for i in range(8)]


@pytest.mark.parametrize("advantage", ["gae", "group_mean", "greedy"])
def test_a_reward_sees_the_columns_of_its_own_row(advantage):
    seen = []

    def right(prompts, completions, answer, completion_ids):
        seen.extend(zip(prompts, completions, answer, completion_ids, strict=True))
        return [float(c.split()[:1] == [a]) for c, a in zip(completions, answer)]

    group = 1 if advantage != "group_mean" else 2
    c = RLHFConfig(batch_size=8, max_new_tokens=4, advantage=advantage, group_size=group, eval_every=1, steps=2, minibatches=2)
    trainer = RLHFTrainer(tiny(), config=c, tokenizer=TOKENIZER)
    trainer.train(SUMS, right, held_out=SUMS[:3], progress=False)
    expected = {row["prompt"]: row["answer"] for row in SUMS}
    assert len(seen) >= 2 * (8 + 3)
    for prompt, completion, answer, ids in seen:
        assert answer == expected[prompt]
        assert completion == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_two_rewards_are_their_weighted_sum_and_stand_in_the_log(unchecked):
    def long(completion_ids): return [float(len(ids)) for ids in completion_ids]
    def first(completions, answer): return [None if a == "w2" else 1. for a in answer]
    c = config(reward_weights=(.5, 2.))
    trainer = RLHFTrainer(tiny(), config=c, tokenizer=TOKENIZER)
    r = trainer.score(trainer.rollout(SUMS), [long, first])
    by_hand = [.5 * n + 2. * (row["answer"] != "w2") for n, row in zip(r.mask.sum(-1).tolist(), [x for x in SUMS for _ in range(c.group_size)])]
    assert r.scores.tolist() == by_hand
    m = describe(trainer.advantages(r), c)
    assert m["reward_mean/long"] == pytest.approx(r.mask.sum().item() / len(r)) and m["reward_mean/first"] == 1.
    assert r[[2, 0]].score_parts["long"].tolist() == [r.score_parts["long"][i].item() for i in (2, 0)] and r[1].columns == {"answer": [SUMS[1 // c.group_size]["answer"]]}
    with pytest.raises(ValueError, match="2 reward functions and 1 weights"):
        RLHFTrainer(tiny(), config=config(reward_weights=(1.,)), tokenizer=TOKENIZER).score(r, [long, first])


def test_stop_tokens_end_a_response():
    stop = TOKENIZER.convert_tokens_to_ids("w3")
    trainer = RLHFTrainer(tiny(), config=config(batch_size=64), tokenizer=TOKENIZER, stop_token_ids=[stop])
    r = trainer.rollout(PROMPTS * 8)
    inside = (r.response_ids == stop) & r.mask
    assert inside.any() and (inside.sum(-1) <= 1).all()
    assert all(row[m][-1] == stop for row, m in zip(r.response_ids[inside.any(-1)], r.mask[inside.any(-1)]))
    with pytest.raises(ValueError, match="stop_token_ids holds 99"): RLHFTrainer(tiny(), tokenizer=TOKENIZER, stop_token_ids=[99])


def test_the_ends_of_tokenizer_model_and_caller_are_one_set():
    "As of Qwen's chat models: the tokenizer ends a text, the generation config lists the end of a turn as well, and each of them ends a response."
    turn, own = TOKENIZER.convert_tokens_to_ids(["w3", "w5"])
    model = tiny()
    model.generation_config.eos_token_id = [turn, EOS]
    trainer = RLHFTrainer(model, config=config(batch_size=64), tokenizer=TOKENIZER, stop_token_ids=[own, turn])
    assert sorted(trainer.eos_ids) == sorted({EOS, turn, own}) and len(trainer.eos_ids) == 3
    r = trainer.rollout(PROMPTS * 16)
    last = [row[m][-1].item() for row, m in zip(r.response_ids, r.mask)]
    inside = torch.isin(r.response_ids, torch.tensor([EOS, turn, own])) & r.mask
    assert {EOS, turn, own} <= set(last) and (inside.sum(-1) <= 1).all()  # each ends some, and nothing is written behind an end
    assert all((x in (EOS, turn, own)) == bool(end) for x, end in zip(last, inside.any(-1)))
    plain = tiny()
    plain.generation_config.eos_token_id = turn  # one number may be the default of a class: the tokenizer is asked
    assert RLHFTrainer(plain, config=config(), tokenizer=TOKENIZER).eos_ids == [EOS]
    assert RLHFTrainer(plain, config=config()).eos_ids == [turn]


def test_scores_are_shaped_in_training_on_held_out_prompts_and_for_the_greedy_baseline(unchecked):
    "By hand: a score of 9 is cut to 2; no end costs 1; with 6 tokens at most and a buffer of 3, n = 4, 5, 6 cost a third, two thirds, all."
    c = config("remax", reward_clip=2., missing_eos_penalty=1., overlong_buffer=3, batch_size=64, eval_every=1)
    trainer = RLHFTrainer(tiny(), config=c, tokenizer=TOKENIZER)
    nine = lambda texts: [9.] * len(texts)
    r = trainer.score(trainer.rollout(PROMPTS * 8), nine)
    def by_hand(ids, mask):
        n = int(mask.sum())
        return 2. - (ids[mask][-1].item() != EOS) - max(0, n - 3) / 3
    expected = [by_hand(ids, m) for ids, m in zip(r.response_ids, r.mask)]
    assert r.scores.tolist() == pytest.approx(expected, abs=1e-6) and len(set(expected)) > 3
    plain = RLHFTrainer(tiny(), config=config("remax", batch_size=64), tokenizer=TOKENIZER)
    assert (plain.score(plain.rollout(PROMPTS * 8), nine).baseline > r.baseline).all()
    assert trainer.evaluate(PROMPTS, nine)["held_out_reward"] < 2. < plain.evaluate(PROMPTS, nine)["held_out_reward"] == 9.
    with pytest.raises(ValueError, match="overlong_buffer is 7: it must be at most max_new_tokens, 6"): config(overlong_buffer=7)


def test_held_out_prompts_may_come_from_a_generator(unchecked):
    "It is declared a sequence; who passes a generator all the same had it read once, and must not find it empty at the first evaluation."
    trainer = RLHFTrainer(tiny(), config=config(eval_every=1, steps=2), tokenizer=TOKENIZER)
    with unchecked(): history = trainer.train(PROMPTS, reward, held_out=(p for p in PROMPTS[:3]), progress=False)
    assert all("held_out_reward" in m for m in history)
