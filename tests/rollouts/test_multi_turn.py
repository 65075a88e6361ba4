"""Tokens that others wrote: the oracles are one row at a time, each turn as a response of its own to all that stands before it."""

import copy

import pytest
import torch
from invariant_rows import models, responses, trainer
from small_trainer import V

from instruct_goose.config import RLHFConfig
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.sampling import sample_token
from instruct_goose.models.tokens import pad
from instruct_goose.rollouts.evaluation import kl_to_reference
from instruct_goose.rollouts.multi_turn import TurnSampler, chat_reply
from instruct_goose.rollouts.rollout import PromptBatch, concat
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.tasks.invariances import difference, outcome, poisoned
from instruct_goose.training.trainer import RLHFTrainer

CASES = [
    ("ppo", "gpt2"),
    ("all of PPO's", "llama"),
    ("gspo", "gpt2"),
    ("dapo", "llama"),
    ("GAE in groups", "gpt2"),
]
HOLES = [
    (0, 1),
    (1, 1),
    (1, 2),
    (4, 0),
    (5, 3),
]  # row and place; rows of 3, 5, 2, 1, 3 and 5 tokens


def holed(setting):
    "Some tokens in the middle, and one at the beginning, are somebody else's."
    r = responses(setting)
    r.mask = r.mask.clone()
    r.environment_mask = torch.zeros_like(r.mask)
    for i, t in HOLES:
        r.mask[i, t], r.environment_mask[i, t] = False, True
    if r.sampled_logprobs is not None:
        r.sampled_logprobs = r.sampled_logprobs * r.mask
    return r


def turns_of(r, i):
    "What stands before each turn of row i, and the turn: lists of ids."
    before, turns = r.query_ids[i][r.query_mask[i]].tolist(), []
    for token, own, other in zip(
        r.response_ids[i].tolist(), r.mask[i].tolist(), r.environment_mask[i].tolist(), strict=True
    ):
        if own and (not turns or turns[-1][2]):
            turns.append([list(before), [], False])
        if own:
            turns[-1][1].append(token)
        if other and turns:
            turns[-1][2] = True
        if own or other:
            before.append(token)
    return [(a, b) for a, b, _ in turns]


def piecewise(model, r, of=response_logprobs):
    "of(model, …) of the sampled tokens of each row, turn after turn."

    def one(ids):
        return (torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))

    return [
        torch.cat([of(model, *one(before), *one(turn))[0] for before, turn in turns_of(r, i)])
        for i in range(len(r))
    ]


@pytest.mark.parametrize("setting,name", CASES)
def test_poison_in_the_holes_changes_no_bit(setting, name):
    seen = []

    def spoil(r):
        seen.append(poisoned(r, float("nan"), V - 1))
        return seen[-1]

    off = difference(
        outcome(trainer(setting, name), holed(setting)),
        outcome(trainer(setting, name), holed(setting), spoil),
    )
    assert off == (0.0, "nowhere")
    floats = [
        x
        for x in vars(seen[-1]).values()
        if torch.is_tensor(x) and x.is_floating_point() and x.ndim == 2
    ]
    assert len(floats) >= 5 and all(x[seen[-1].environment_mask].isnan().all() for x in floats)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_turn_is_a_response_to_all_that_stands_before_it(name):
    t, r = trainer("ppo", name), holed("ppo")
    t.annotate(r)
    agent, ref = models(name)

    def values(model, *parts):
        return agent.values(*parts)

    for got, model, of in (
        (r.old_logprobs, agent.model, response_logprobs),
        (r.ref_logprobs, ref, response_logprobs),
        (r.values, None, values),
    ):
        for i, row in enumerate(piecewise(model, r, of)):
            torch.testing.assert_close(got[i][r.mask[i]], row)
    assert not any(
        x[~r.mask].any() for x in (r.old_logprobs, r.ref_logprobs, r.values, r.entropy, r.kl)
    )
    now = t.now(r)
    assert torch.equal(now.logprobs, now.logprobs * r.mask) and not now.values[~r.mask].any()
    torch.testing.assert_close(kl_to_reference(agent.model, ref, r), r.kl.sum(-1))
    other = holed("ppo")
    other.response_ids[1, 1] = (
        4  # the environment says something else: what comes after it is another state, what came before is not
    )
    t.annotate(other)
    assert (
        torch.equal(other.old_logprobs[1, 0], r.old_logprobs[1, 0])
        and (other.old_logprobs[1, 3:] - r.old_logprobs[1, 3:]).abs().min() > 1e-4
    )


def test_gae_goes_from_turn_to_turn():
    "Row by row on the sampled tokens alone: the next one of them is the successor, whatever stands between."
    t, r = trainer("ppo", "gpt2", gamma=0.9, lam=0.7, whiten_advantages=False), holed("ppo")
    t.advantages(t.annotate(r))
    for i in range(len(r)):
        m = r.mask[i]
        ell, values = (r.old_logprobs - r.ref_logprobs)[i][m].tolist(), r.values[i][m].tolist()
        rewards = [-0.2 * x for x in ell]
        rewards[-1] += r.scores[i].item()
        later, want = 0.0, []
        for k in reversed(range(len(rewards))):
            delta = rewards[k] + 0.9 * (values[k + 1] if k + 1 < len(values) else 0.0) - values[k]
            later = delta + 0.63 * later
            want.append(later)
        assert r.advantages[i][m].tolist() == pytest.approx(want[::-1], abs=1e-10)
        assert r.returns[i][m].tolist() == pytest.approx(
            [a + v for a, v in zip(want[::-1], values, strict=True)], abs=1e-10
        )
    assert not any(x[~r.mask].any() for x in (r.rewards, r.advantages, r.returns))


def test_the_gradient_is_that_of_the_turns():
    "GRPO before its first update: −Σ Â·∇log π over the sampled tokens, over their number; in the trainer, and in compute_loss."
    c = dict(beta=0.0, whiten_advantages=False, aggregation="token_mean", epochs=1, minibatches=1)
    t, r = trainer("grpo", "gpt2", **c), holed("grpo")
    real, sampled = r.attention_mask, r.mask
    loss = t.compute_loss(
        r.query_ids, r.query_mask, r.response_ids, real, r.scores, sampled_mask=sampled
    )
    loss.backward()
    agent = copy.deepcopy(models("gpt2")[0])
    s = r.scores.view(-1, 2)
    advantages = ((s - s.mean(1, keepdim=True)) / (s.std(1, keepdim=True) + 1e-4)).flatten()
    ours = -sum(
        a * row.sum() for a, row in zip(advantages, piecewise(agent.model, r), strict=True)
    ) / int(sampled.sum())
    ours.backward()
    for (n, p), q in zip(t.agent.model.named_parameters(), agent.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=n)
    with pytest.raises(ValueError, match=r"no sampled token in row \[3\]"):
        t.compute_loss(
            r.query_ids,
            r.query_mask,
            r.response_ids,
            real,
            r.scores,
            sampled_mask=sampled & (torch.arange(6) != 3)[:, None],
        )


WORDS = [*"abcdefgh", "?", "="]


def parts(seed=0, **given):
    model, tokenizer = tiny_smollm(WORDS, seed=seed, width=16)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    c = RLHFConfig.preset(
        "rloo",
        **dict(
            batch_size=8,
            group_size=2,
            max_new_tokens=14,
            stop_strings=("?", "b c"),
            device="cpu",
            beta=0.0,
        )
        | given,
    )
    return RLHFTrainer(model, config=c, tokenizer=tokenizer)


def environment(text):
    "A reply of one to three words that depends on the text; silence when the text has many letters a."
    words = text.split()
    return None if words.count("a") > 4 else " ".join(["=", *words[: len(words) % 3]])


@torch.no_grad()
def slow_talk(t, prompt, dice, turns=3, most=14):
    "One token at a time, the whole text through the model; the text is searched from the turn's beginning on."
    ids, own, turn, asked = list(prompt), [], [], 0
    while len(own) < most:
        logits = t.agent.model(torch.tensor([ids])).logits[:, -1]
        token = (
            logits.argmax(-1)
            if dice is None
            else sample_token(logits, torch.rand(1, dtype=torch.float64, generator=dice))
        )
        ids.append(int(token))
        own.append(True)
        turn.append(int(token))
        said = t.tokenizer.decode(turn)
        if int(token) not in t.eos_ids and not any(s in said for s in ("?", "b c")):
            continue
        reply = environment(t.tokenizer.decode(ids)) if asked < turns else None
        asked += 1
        if reply is None:
            return ids, own, True
        new = t.tokenizer(reply)["input_ids"]
        if len(own) + len(new) >= most:
            return ids, own, False
        ids += new
        own += [False] * len(new)
        turn = []
    return ids, own, False


def queries(t):
    return [t.tokenizer(x)["input_ids"] for x in ("a", "b c d", "c a", "h g f e d", "e", "a b ?")]


def same(r, i, found):
    ids, own, ended = found
    n = int(r.query_mask[i].sum())
    assert (
        r.response_ids[i][r.attention_mask[i]].tolist() == ids[n:]
        and r.mask[i][r.attention_mask[i]].tolist() == own
        and bool(r.ended[i]) == ended
    )
    return ended


@pytest.mark.parametrize("seed", range(2))
def test_many_talks_at_once_are_what_each_is_alone(seed):
    "Greedy: rows of different lengths, padded on the left, that are answered, end and run out of room at different times."
    t = parts(seed)
    r = TurnSampler(t.agent, t.tokens, environment, turns=3)(
        PromptBatch(*pad(queries(t), t.pad_id, "right")), 1, t.config, None
    )
    for i, q in enumerate(queries(t)):
        same(r, i, slow_talk(t, q, None))
    assert r.sampled_logprobs is None


def test_with_dice_it_is_the_loop_and_all_kinds_of_ends_occur():
    kinds = set()
    for seed in range(3):
        t = parts(seed)
        sampler = TurnSampler(t.agent, t.tokens, environment, turns=3)
        for k, q in enumerate(queries(t) * 3):
            r = sampler(
                PromptBatch(*pad([q], t.pad_id)), 1, t.config, torch.Generator().manual_seed(k)
            )
            ended = same(r, 0, slow_talk(t, q, torch.Generator().manual_seed(k)))
            kinds.add((ended, int(r.environment_mask.sum() > 0), int(r.attention_mask.sum()) == 14))
    assert {(True, 1, False), (False, 1, True)} <= kinds and {a for a, _, _ in kinds} == {
        True,
        False,
    }, kinds


def test_a_step_with_an_environment():
    "Sampled log-probabilities agree with the training forward's (the trainer would stop), text holds all, parts at other people's tokens are not paid."
    t = parts(max_new_tokens=12)
    t.sampler = TurnSampler(t.agent, t.tokens, environment)
    r = t.rollout(["a b", "c", "d e f", "g"])
    assert (
        r.environment_mask.any() and not (r.environment_mask & r.mask).any() and len(r.ended) == 8
    )
    assert all(
        "=" in text
        for text, other in zip(r.texts, r.environment_mask.any(-1).tolist(), strict=True)
        if other
    )
    seen = {}

    def judge(completions, completion_ids, completion_mask, sampled_logprobs):
        seen.update(
            ids=completion_ids, mask=completion_mask, logprobs=sampled_logprobs, texts=completions
        )
        return [
            [1.0 + 0.1 * k if own else 100.0 for k, own in enumerate(row)]
            for row in completion_mask
        ]

    t.score(r, judge)
    for i in range(8):
        assert (
            seen["ids"][i] == r.response_ids[i][r.attention_mask[i]].tolist()
            and seen["mask"][i] == r.mask[i][r.attention_mask[i]].int().tolist()
        )
        assert [bool(x) for x in seen["logprobs"][i]] == [bool(x) for x in seen["mask"][i]]
        assert r.scores[i].item() == pytest.approx(
            sum(1.0 + 0.1 * k for k, own in enumerate(seen["mask"][i]) if own), abs=1e-4
        )
    assert not r.token_scores[~r.mask].any()
    t.advantages(t.annotate(r))
    metrics = t.describe(r) | t.optimize(r)
    assert (
        metrics["given_tokens"] == pytest.approx(r.environment_mask.sum().item() / 8)
        and metrics["max_sampler_deviation"] < 1e-3
    )
    assert metrics["tokens"] == int(r.mask.sum()) and metrics["finished"] == pytest.approx(
        r.ended.float().mean().item()
    )
    both = concat(
        [
            r,
            PolicySampler(t.agent, t.tokens)(
                PromptBatch(*pad(queries(t), t.pad_id, "left")), 1, t.config, torch.Generator()
            ),
        ]
    )
    assert (
        len(both) == 14
        and int(both.environment_mask.sum()) == int(r.environment_mask.sum())
        and len(both.ended) == 14
    )


def test_the_context_is_not_left():
    t = parts(max_new_tokens=20)
    long = [
        t.tokenizer("a " * 236)["input_ids"],
        t.tokenizer("b")["input_ids"],
    ]  # 236 + 20: the context to the last place
    for k in range(6):
        r = TurnSampler(t.agent, t.tokens, lambda text: "= a b")(
            PromptBatch(*pad(long, t.pad_id, "left")), 2, t.config, torch.Generator().manual_seed(k)
        )
        assert (
            int((r.query_mask.sum(-1) + r.attention_mask.sum(-1)).max()) <= 256
            and r.mask[torch.arange(4), [int(x.nonzero().max()) for x in r.attention_mask]].all()
        )
    with pytest.raises(ValueError, match="beyond the model's context"):
        TurnSampler(t.agent, t.tokens, environment)(
            PromptBatch(*pad([[5] * 240], 0)), 1, t.config, None
        )


def test_a_reply_in_the_chat_template():
    tokenizer = parts().tokenizer
    assert chat_reply("a b", tokenizer) == " <|im_start|>user a b <|im_end|> <|im_start|>assistant "
    talk = [
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d ?"},
        {"role": "tool", "content": "a b"},
    ]
    whole = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    first = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert whole == first + "d ? <|im_end|>" + chat_reply("a b", tokenizer, "tool")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="does not end the assistant's turn"):
        chat_reply("a", tokenizer)
