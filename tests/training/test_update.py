"""What reaches the loss, the price of the KL, the optimizer and the limit of a run: one number of each, worked out by hand."""

import math

import pytest
import torch
import transformers

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent, Evaluation
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.training.update import backward, epoch_minibatches, kl_penalty, micro_batches

TOKENIZER = word_tokenizer([f"w{i}" for i in range(9)], 20, pad="<end>", bos="<end>", eos="<end>")
EOS = TOKENIZER.eos_token_id
PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2"]


def tiny(seed=0):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(TOKENIZER),
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=20,
            bos_token_id=EOS,
            eos_token_id=EOS,
        )
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.double()


def trainer(algorithm="ppo", **changes):
    settings = dict(device="cpu", batch_size=4, max_new_tokens=4, minibatches=1) | changes
    return RLHFTrainer(
        Agent(tiny()), tiny(1), RLHFConfig.preset(algorithm, **settings), tokenizer=TOKENIZER
    )


def one_token(**columns):
    "A rollout of one response of one token, of which these things are known."
    there, ids = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)

    def number(x):
        return torch.tensor([[x]], dtype=torch.float64)

    known = (
        dict(old_logprobs=-1.0, ref_logprobs=-1.0, advantages=0.0, values=0.0, returns=0.0)
        | columns
    )
    return Rollout(ids, there, ids, there, **{name: number(x) for name, x in known.items()})


def loss_of_one(t, now=-1.0, value=0.0, **columns):
    learnt = t.config.needs == "values"

    def number(x):
        return torch.tensor([[x]], dtype=torch.float64)

    batch = one_token(**columns)
    if not learnt:
        batch.values = batch.returns = None
    return t.loss(Evaluation(number(now), None, number(value) if learnt else None), batch)[0].item()


@pytest.mark.parametrize(
    "value_clip,loss", [(0.2, 0.5 * 0.8**2 / 2), (0.3, 0.5 * 0.7**2 / 2), (None, 0.0)]
)
def test_the_value_may_go_value_clip_from_the_value_before_the_update(value_clip, loss):
    "It has gone from 0 to its return, 1: no error at all, but max(0, (V_old + clip − R̂)²)/2 with the clip. c₁ is ½."
    assert loss_of_one(trainer(value_clip=value_clip), value=1.0, returns=1.0) == pytest.approx(
        loss, abs=1e-12
    )


def test_the_kl_in_the_loss_has_the_price_of_now():
    t = trainer("grpo", group_size=2, kl_placement="loss", kl_estimator="k2", beta=0.1)
    for beta in (0.1, 0.7, 0.0):  # k2 of a log-ratio of 2 is 2²/2
        t.beta = beta
        assert loss_of_one(t, ref_logprobs=-3.0) == pytest.approx(beta * 2, abs=1e-12)
    t = trainer("grpo", group_size=2, kl_placement="loss", kl_estimator="k2", beta=0.0)
    t.beta = 0.7  # where the run began without
    assert loss_of_one(t, ref_logprobs=-3.0) == pytest.approx(1.4, abs=1e-12)


def steps_of_cleanrl(epochs, target):
    "CleanRL 1.2.0, ppo.py lines 246–290: the mean of k3 over the actions of the last minibatch, looked at when an epoch is over."
    steps = 0
    for epoch in epochs:
        for ells in epoch:
            approx_kl, steps = sum(math.exp(x) - 1 - x for x in ells) / len(ells), steps + 1
        if approx_kl > target:
            break
    return steps


def steps_of_sb3(epochs, target):
    "Stable-Baselines3 2.9.2, ppo.py lines 260–271: the same mean, before each step and against 1.5 × target; that step is not made."
    for n, ells in enumerate(x for epoch in epochs for x in epoch):
        if sum(math.exp(x) - 1 - x for x in ells) / len(ells) > 1.5 * target:
            return n
    return sum(map(len, epochs))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_early_stop_beside_two_peers(minibatches):
    """With responses of one token, nats per response are nats per action. Ours makes the step that it measured before, as CleanRL does with one
    minibatch per epoch (with more, that one finishes its epoch); Stable-Baselines3 makes one step less, at 1.5 × its target."""

    def run(limit):
        t = trainer(
            max_new_tokens=1, minibatches=minibatches, epochs=5, lr=0.02, kl_early_stop=limit
        )
        made, update = [], t.update

        def watched(batch, first=False):
            now = t.now(batch).logprobs.detach()
            made.append((now - batch.old_logprobs)[batch.mask].tolist())
            return update(batch, first)

        t.update = watched
        t.step(PROMPTS, lambda texts: [float(len(x) + 3 * i) for i, x in enumerate(texts)])
        return made

    every = run(None)
    epochs = [every[i : i + minibatches] for i in range(0, len(every), minibatches)]
    assert len(epochs) == 5 and every[0] == pytest.approx([0.0] * len(every[0]), abs=1e-9)
    measured = [sum(math.exp(x) - 1 - x for x in ells) / len(ells) for ells in every]
    for i in range(1, len(every) - 1):
        target = measured[i] * 0.999  # the first of these to be above it ends the iteration
        ours, theirs = len(run(target)), steps_of_cleanrl(epochs, target)
        assert ours == theirs if minibatches == 1 else ours <= theirs
        assert ours == min(steps_of_sb3(epochs, target / 1.5) + 1, len(every))
        assert ours == 1 + next(k for k, x in enumerate(measured) if x > target)


# ── responses that were cut off ──


def cut_trainer(stale=0.05, **changes):
    "Six responses to two prompts, three of them cut off; a policy that is not π_old any more."
    c = RLHFConfig.preset(
        "grpo",
        **dict(
            device="cpu",
            max_new_tokens=6,
            batch_size=6,
            group_size=3,
            mask_truncated=True,
            minibatches=1,
            epochs=1,
            beta=0.1,
            kl_placement="loss",
            whiten_advantages=False,
        )
        | changes,
    )
    trainer = RLHFTrainer(Agent(tiny()), tiny(1), c, tokenizer=TOKENIZER)
    rows = [[8, 9, EOS], [2, 10, 3, 5, 6, 7], [EOS], [3, EOS], [4, 5, 6, 7, 8, 9], [5] * 6]
    (q, qm), (r, rm) = (
        pad([[0, 5, 7]] * 3 + [[0, 4]] * 3, EOS, side="left"),
        pad(rows, EOS, side="right"),
    )
    rollout = Rollout(
        q, qm, r, rm, scores=torch.tensor([1.5, -2.0, 0.25, 0.5, 3.0, -1.0], dtype=torch.float64)
    )
    trainer.advantages(rollout)
    with torch.no_grad():
        rollout.old_logprobs = (
            rollout.old_logprobs
            + stale
            * torch.randn(
                rollout.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            * rm
        )
    return trainer, rollout


@pytest.mark.parametrize("size", [None, 1, 2, "tokens"])
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum", "group_token_mean"])
def test_what_was_cut_off_is_compared_with_and_not_learnt_from(how, size):
    "By hand: each token's loss of the whole rollout, then the sum over the rows that end, over N of the equation."
    trainer, r = cut_trainer(
        aggregation=how,
        **({"micro_batch_tokens": 9} if size == "tokens" else {"micro_batch_size": size}),
    )
    c, kept = trainer.config, [0, 2, 3]
    groups = [[1.5, -2.0, 0.25], [0.5, 3.0, -1.0]]
    for i, (scores, x) in enumerate((g, x) for g in groups for x in g):  # all six are compared
        spread = (sum((y - sum(scores) / 3) ** 2 for y in scores) / 2) ** 0.5
        assert r.advantages[i][0].item() == pytest.approx(
            (x - sum(scores) / 3) / (spread + 1e-4), abs=1e-6
        )
    now = trainer.now(r).logprobs
    ratio = (now - r.old_logprobs).exp()
    gain = torch.minimum(
        ratio * r.advantages, ratio.clamp(1 - c.clip, 1 + (c.clip_high or c.clip)) * r.advantages
    )
    each = [(-gain + kl_penalty(now, r, 0.1, c))[i][r.mask[i]].sum() for i in range(6)]
    n = r.mask.sum(-1).tolist()
    expected = {
        "token_mean": sum(each[i] for i in kept) / (3 + 1 + 2),
        "sequence_mean": sum(each[i] / n[i] for i in kept) / 6,
        "sequence_sum": sum(each[i] for i in kept) / (6 * c.max_new_tokens),
        "group_token_mean": ((each[0] + each[2]) / 4 + each[3] / 2) / 2,
    }[how]
    params = [p for p in trainer.agent.model.parameters() if p.requires_grad]
    exact = torch.autograd.grad(expected, params, allow_unused=True)
    batches = list(epoch_minibatches(r, trainer.config, trainer.eos_ids, trainer.shuffling))
    assert [len(b) for b in batches] == [3] and sorted(n[i] for i in kept) == sorted(
        batches[0].mask.sum(-1).tolist()
    )
    trainer.optimizer.zero_grad()
    micros = list(micro_batches(batches[0], c))
    if size == "tokens":
        assert [len(m) for m in micros] == [
            2,
            1,
        ]  # 4 and 4 tokens; with the third, of 6, they would be 3 × 6
    for micro in micros:
        backward(trainer.agent, trainer.now, trainer.loss, micro)
    for p, g in zip(params, exact, strict=True):
        if g is not None:
            torch.testing.assert_close(p.grad, g, atol=1e-9, rtol=1e-6)


def test_a_minibatch_without_an_end_makes_no_step_and_a_run_goes_on():
    trainer, r = cut_trainer(stale=0.0)
    before = [p.clone() for p in trainer.agent.model.parameters()]
    log = trainer.optimize(r[[1, 4, 5]])
    assert "policy_loss" not in log and all(
        torch.equal(a, b) for a, b in zip(before, trainer.agent.model.parameters(), strict=True)
    )
    assert "policy_loss" in trainer.optimize(r[[1, 3, 4]])
    trainer.eos_ids.clear()
    with pytest.raises(ValueError, match="nothing is known to end a response.*stop_token_ids"):
        trainer.optimize(r)
    off, _ = cut_trainer(mask_truncated=False)
    assert [len(b) for b in epoch_minibatches(r, off.config, off.eos_ids, off.shuffling)] == [6]
    q = (r.query_ids, r.query_mask, r.response_ids, r.mask)
    loss = cut_trainer()[0].compute_loss(*q, r.scores)
    moved = r.scores.clone()
    moved[1] += 0.5
    assert loss.isfinite() and cut_trainer()[0].compute_loss(*q, moved) != loss  # compared with


# ── rows of like length together, and matrix products in bfloat16 ──


def test_matrix_products_in_bfloat16_and_weights_as_they_are():
    "A float32 model: its layers' outputs are bfloat16 while writing, judging and learning; gradients point where float32's do."
    grads, logs, seen = {}, {}, []
    for autocast in (None, "bfloat16"):
        c = RLHFConfig.preset(
            "ppo",
            device="cpu",
            batch_size=8,
            max_new_tokens=4,
            minibatches=1,
            epochs=1,
            micro_batch_size=3,
            lr=1e-3,
            autocast=autocast,
        )
        t = RLHFTrainer(Agent(tiny().float()), tiny(1).float(), c, tokenizer=TOKENIZER)
        for m in (t.agent.model, t.ref_model):
            m.transformer.h[0].mlp.c_fc.register_forward_hook(
                lambda _m, _x, out: seen.append(out.dtype)
            )
        r = t.rollout(PROMPTS * 2) if autocast is None else r  # noqa: F821
        r.scores = torch.linspace(-1, 1, 8)
        t.advantages(t.annotate(r))
        t.update(next(iter(epoch_minibatches(r, t.config, t.eos_ids, t.shuffling))), first=True)
        grads[autocast] = torch.cat([p.grad.flatten() for p in t.agent.policy_parameters()])
        assert set(seen) == {torch.float32 if autocast is None else torch.bfloat16}
        seen.clear()
        assert {p.dtype for p in t.agent.parameters()} == {
            torch.float32
        } and r.old_logprobs.dtype == torch.float32
        logs[autocast] = t.step(PROMPTS * 2, lambda texts: [float(len(x)) for x in texts])
        seen.clear()
    assert torch.cosine_similarity(*grads.values(), dim=0) > 0.98
    assert [logs[a]["rounding"] for a in logs] == [2**-23, 2**-7]
    assert (
        logs[None]["max_sampler_deviation"] < 1e-4
        and logs["bfloat16"]["max_sampler_deviation"] < 0.1
    )  # the sampler rounds too
    with pytest.raises((ValueError, TypeError), match="float16"):
        RLHFConfig(autocast="float16")  # a TypeError where annotations are checked


# ── parts of a loss of one's own ──


class OwnParts(RLHFTrainer):
    more = {}

    def loss(self, now, batch):
        loss, parts = super().loss(now, batch)
        return loss, parts | {
            "rows": float(len(batch)),
            "likely": (now.logprobs.exp() * batch.mask).sum(),
        } | self.more


def own_parts(micro, **more):
    settings = RLHFConfig(
        device="cpu",
        batch_size=4,
        max_new_tokens=4,
        minibatches=2,
        epochs=1,
        micro_batch_size=micro,
        seed=2,
    )
    t = OwnParts(Agent(tiny()), tiny(1), settings, tokenizer=TOKENIZER)
    t.more = more
    return t.step(PROMPTS, lambda texts: [len(x) for x in texts])


def test_every_part_of_the_loss_is_logged_and_adds_up_over_micro_batches():
    "Two minibatches of two rows: 2 each, however they are cut; and a sum over rows is that of the minibatch."
    whole, cut, plain = (
        own_parts(None),
        own_parts(1),
        trainer(minibatches=2, epochs=1, seed=2).step(
            PROMPTS, lambda texts: [len(x) for x in texts]
        ),
    )
    assert (
        whole["rows"] == cut["rows"] == 2.0
        and whole["likely"] == pytest.approx(cut["likely"], rel=1e-9)
        and 0 < whole["likely"] < 8
    )
    assert (
        set(whole) - set(plain) == {"rows", "likely"}
        and set(plain) <= set(whole)
        and not {"approx_kl", "ratio_std"} & set(plain)
    )
    assert whole["entropy"] == pytest.approx(
        plain["entropy"]
    )  # of the rollout, not that of the loss's own call


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(()), (torch.ones(2), {}), (torch.ones(()), torch.ones(()))],
    ids=["a loss alone", "two numbers", "parts without names"],
)
def test_what_a_loss_must_return_is_said(wrong):
    t = trainer(minibatches=1, epochs=1)
    t.loss = lambda now, batch: wrong
    with pytest.raises(TypeError, match=r"return \(loss, parts\)"):
        t.step(PROMPTS, lambda texts: [len(x) for x in texts])
