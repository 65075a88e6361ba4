"""Tokens that others wrote. The oracles are one row at a time, each turn as a response of its own to
all that stands before it."""

import copy
import dataclasses
from functools import partial

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
from instruct_goose.training.metrics import rollout_metrics
from instruct_goose.training.trainer import RLHFTrainer

CASES = [
    ("ppo", "gpt2"),
    ("all of PPO's", "llama"),
    ("gspo", "gpt2"),
    ("dapo", "llama"),
    ("GAE in groups", "gpt2"),
]
HOLES = [(0, 1), (1, 1), (1, 2), (4, 0), (5, 3)]  # row and place; of 3, 5, 2, 1, 3 and 5 tokens


def holed(setting):
    "Some tokens in the middle, and one at the beginning, are somebody else's."
    r = responses(setting)
    r.mask = r.mask.clone()
    r.environment_mask = torch.zeros_like(r.mask)
    for i, t in HOLES:
        r.mask[i, t] = False
        r.environment_mask[i, t] = True
    if r.sampled_logprobs is not None:
        r.sampled_logprobs = r.sampled_logprobs * r.mask
    return r


def turns_of(r, i):
    "What stands before each turn of row i, and the turn: lists of ids."
    before = r.query_ids[i][r.query_mask[i]].tolist()
    turns = []
    in_turn = False
    for t, token in enumerate(r.response_ids[i].tolist()):
        if r.mask[i, t]:
            if not in_turn:
                turns.append((list(before), []))
            turns[-1][1].append(token)
            in_turn = True
            before.append(token)
        elif r.environment_mask[i, t]:
            in_turn = False
            before.append(token)
    return turns


def one_row(ids):
    return torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)


def turn_by_turn(function, r):
    "function(query_ids, query_mask, response_ids, mask) of each row's sampled tokens."
    rows = []
    for i in range(len(r)):
        turns = [function(*one_row(before), *one_row(turn))[0] for before, turn in turns_of(r, i)]
        rows.append(torch.cat(turns))
    return rows


@pytest.mark.parametrize("setting,name", CASES)
def test_nan_in_the_holes_changes_no_bit(setting, name):
    seen = []

    def fill_holes(r):
        seen.append(poisoned(r, float("nan"), V - 1))
        return seen[-1]

    plain = outcome(trainer(setting, name), holed(setting))
    with_nan = outcome(trainer(setting, name), holed(setting), fill_holes)

    assert difference(plain, with_nan) == (0.0, "nowhere")
    filled = seen[-1]
    columns = [getattr(filled, field.name) for field in dataclasses.fields(filled)]
    floats = [x for x in columns if torch.is_tensor(x) and x.is_floating_point() and x.ndim == 2]
    assert len(floats) >= 5
    assert all(x[filled.environment_mask].isnan().all() for x in floats)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_turn_is_a_response_to_all_that_stands_before_it(name):
    t = trainer("ppo", name)
    r = holed("ppo")
    agent, ref = models(name)

    annotations = t.annotate(r)

    oracles = {
        "old_logprobs": turn_by_turn(partial(response_logprobs, agent.model), r),
        "ref_logprobs": turn_by_turn(partial(response_logprobs, ref), r),
        "values": turn_by_turn(agent.values, r),
    }
    for column, rows in oracles.items():
        for i, row in enumerate(rows):
            torch.testing.assert_close(getattr(annotations, column)[i][r.mask[i]], row)
    assert not any(column[~r.mask].any() for column in annotations)
    new = t.evaluate_tokens(r)
    assert not new.logprobs[~r.mask].any() and not new.values[~r.mask].any()
    torch.testing.assert_close(kl_to_reference(agent.model, ref, r), annotations.kl.sum(-1))


def test_another_reply_changes_what_comes_after_it_and_nothing_before():
    t = trainer("ppo", "gpt2")
    r, other = holed("ppo"), holed("ppo")
    other.response_ids[1, 1] = 4  # the environment says something else
    before, after = t.annotate(r).old_logprobs, t.annotate(other).old_logprobs
    assert torch.equal(after[1, 0], before[1, 0])
    assert (after[1, 3:] - before[1, 3:]).abs().min() > 1e-4


def test_gae_goes_from_turn_to_turn():
    "Row by row on the sampled tokens alone: the next of them is the successor, whatever is between."
    t = trainer("ppo", "gpt2", gamma=0.9, lam=0.7, whiten_advantages=False)
    r = t.advantages(holed("ppo"))
    log_ratios = r.old_logprobs - r.ref_logprobs
    for i, m in enumerate(r.mask):
        values = r.values[i][m].tolist()
        rewards = [-0.2 * x for x in log_ratios[i][m].tolist()]
        rewards[-1] += r.scores[i].item()
        advantages = []
        later = 0.0
        for k in reversed(range(len(rewards))):
            following = values[k + 1] if k + 1 < len(values) else 0.0
            later = rewards[k] + 0.9 * following - values[k] + 0.9 * 0.7 * later
            advantages.insert(0, later)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        assert r.advantages[i][m].tolist() == pytest.approx(advantages, abs=1e-10)
        assert r.returns[i][m].tolist() == pytest.approx(returns, abs=1e-10)
    assert not any(x[~r.mask].any() for x in (r.rewards, r.advantages, r.returns))


def loss_of(t, r, sampled_mask):
    return t.compute_loss(
        r.query_ids,
        r.query_mask,
        r.response_ids,
        r.attention_mask,
        r.scores,
        sampled_mask=sampled_mask,
    )


GRPO_ONCE = dict(
    beta=0.0, whiten_advantages=False, aggregation="token_mean", epochs=1, minibatches=1
)


def test_the_gradient_is_that_of_the_turns():
    "GRPO before its first update: −Σ Â·∇log π over the sampled tokens, over their number."
    t = trainer("grpo", "gpt2", **GRPO_ONCE)
    r = holed("grpo")
    agent = copy.deepcopy(models("gpt2")[0])

    loss_of(t, r, r.mask).backward()

    groups = r.scores.view(-1, 2)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    total = 0.0
    rows = turn_by_turn(partial(response_logprobs, agent.model), r)
    for advantage, logprobs in zip(advantages, rows, strict=True):
        total = total - advantage * logprobs.sum()
    (total / int(r.mask.sum())).backward()
    for (name, p), q in zip(
        t.agent.model.named_parameters(), agent.model.parameters(), strict=True
    ):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_a_row_without_a_sampled_token_is_refused():
    t = trainer("grpo", "gpt2", **GRPO_ONCE)
    r = holed("grpo")
    not_the_fourth = (torch.arange(6) != 3)[:, None]
    with pytest.raises(ValueError, match=r"no sampled token in row \[3\]"):
        loss_of(t, r, r.mask & not_the_fourth)


WORDS = [*"abcdefgh", "?", "="]


def small_trainer(seed=0, **changes):
    model, tokenizer = tiny_smollm(WORDS, seed=seed, width=16)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    settings = dict(
        batch_size=8,
        group_size=2,
        max_new_tokens=14,
        stop_strings=("?", "b c"),
        device="cpu",
        beta=0.0,
    )
    config = RLHFConfig.preset("rloo", **settings | changes)
    return RLHFTrainer(model, config=config, tokenizer=tokenizer)


def environment(text):
    "A reply of one to three words that depends on the text; none to a text with many letters a."
    words = text.split()
    if words.count("a") > 4:
        return None
    return " ".join(["=", *words[: len(words) % 3]])


@torch.no_grad()
def slow_episode(t, prompt, seed, turns=3, limit=14):
    """One token at a time, the whole text through the model; the text is searched from the turn's
    beginning on. Each turn has random numbers of its own; without a seed the likeliest tokens are
    taken. Returns all ids, which of the response are sampled, and whether it ended."""
    ids = list(prompt)
    sampled = []
    turn = []
    asked = 0
    while len(sampled) < limit:
        logits = t.agent.model(torch.tensor([ids])).logits[:, -1]
        if seed is None:
            token = int(logits.argmax(-1))
        else:
            if not turn:
                generator = torch.Generator().manual_seed(seed + asked)
            u = torch.rand(1, dtype=torch.float64, generator=generator)
            token = int(sample_token(logits, u))
        ids.append(token)
        sampled.append(True)
        turn.append(token)
        text = t.tokenizer.decode(turn)
        if token not in t.eos_ids and "?" not in text and "b c" not in text:
            continue
        reply = environment(t.tokenizer.decode(ids)) if asked < turns else None
        asked += 1
        if reply is None:
            return ids, sampled, True
        new = t.tokenizer(reply)["input_ids"]
        if len(sampled) + len(new) >= limit:
            return ids, sampled, False
        ids += new
        sampled += [False] * len(new)
        turn = []
    return ids, sampled, False


def queries(t):
    return [t.tokenizer(x)["input_ids"] for x in ("a", "b c d", "c a", "h g f e d", "e", "a b ?")]


def batch_of(t, rows, side="left"):
    return PromptBatch(*pad(rows, t.tokens.pad_id, side))


def assert_same_episode(r, i, episode):
    ids, sampled, ended = episode
    query = int(r.query_mask[i].sum())
    assert r.response_ids[i][r.attention_mask[i]].tolist() == ids[query:]
    assert r.mask[i][r.attention_mask[i]].tolist() == sampled
    assert bool(r.ended[i]) == ended


@pytest.mark.parametrize("seed", range(2))
def test_many_episodes_at_once_are_what_each_is_alone(seed):
    """Greedy: rows of different lengths, padded, that are answered, end and run out of room at
    different times."""
    t = small_trainer(seed)
    sampler = TurnSampler(t.agent, t.tokens, environment, turns=3)
    r = sampler(batch_of(t, queries(t), "right"), 1, t.config, None)
    for i, query in enumerate(queries(t)):
        assert_same_episode(r, i, slow_episode(t, query, None))
    assert r.sampled_logprobs is None


def test_with_random_numbers_it_is_the_loop_and_all_kinds_of_ends_occur():
    kinds = set()
    for seed in range(3):
        t = small_trainer(seed)
        sampler = TurnSampler(t.agent, t.tokens, environment, turns=3)
        rows = queries(t) * 3
        r = sampler(batch_of(t, rows), 1, t.config, torch.Generator().manual_seed(seed))
        numbers = torch.Generator().manual_seed(seed)
        seeds = (torch.rand(len(rows), dtype=torch.float64, generator=numbers) * 2**31).long()
        for i, query in enumerate(rows):
            assert_same_episode(r, i, slow_episode(t, query, int(seeds[i])))
            ended = bool(r.ended[i])
            answered = bool(r.environment_mask[i].any())
            full = int(r.attention_mask[i].sum()) == 14
            kinds.add((ended, answered, full))
    assert {(True, True, False), (False, True, True)} <= kinds, kinds


def test_a_step_with_an_environment():
    "Text holds all tokens; parts of the score at the environment's tokens are not counted."
    t = small_trainer(max_new_tokens=12)
    t.sampler = TurnSampler(t.agent, t.tokens, environment)
    r = t.rollout(["a b", "c", "d e f", "g"])
    answered = r.environment_mask.any(-1).tolist()
    assert any(answered) and len(r.ended) == 8
    assert not (r.environment_mask & r.mask).any()
    assert all("=" in text for text, has_reply in zip(r.texts, answered, strict=True) if has_reply)

    seen = {}

    def judge(completion_ids, completion_mask, sampled_logprobs):
        seen.update(ids=completion_ids, mask=completion_mask, logprobs=sampled_logprobs)
        scores = []
        for row in completion_mask:
            scores.append([1.0 + 0.1 * k if own else 100.0 for k, own in enumerate(row)])
        return scores

    r = t.score(r, judge)
    for i, (read, own) in enumerate(zip(r.attention_mask, r.mask, strict=True)):
        assert seen["ids"][i] == r.response_ids[i][read].tolist()
        assert seen["mask"][i] == own[read].int().tolist()
        assert [x != 0 for x in seen["logprobs"][i]] == [x == 1 for x in seen["mask"][i]]
        paid = [1.0 + 0.1 * k for k, is_own in enumerate(seen["mask"][i]) if is_own]
        assert r.scores[i].item() == pytest.approx(sum(paid), abs=1e-4)
    assert not r.token_scores[~r.mask].any()

    experience = t.advantages(r)
    metrics = rollout_metrics(experience, t.config, t.eos_ids) | t.optimize(experience)
    assert metrics["environment_tokens"] == pytest.approx(r.environment_mask.sum().item() / 8)
    assert metrics["max_sampler_deviation"] < 1e-3  # training's log-probabilities agree
    assert metrics["tokens"] == int(r.mask.sum())
    assert metrics["finished"] == pytest.approx(r.ended.float().mean().item())


def test_rollouts_with_and_without_an_environment_are_concatenated():
    t = small_trainer()
    batch = batch_of(t, queries(t))
    multi = TurnSampler(t.agent, t.tokens, environment)(batch, 1, t.config, torch.Generator())
    single = PolicySampler(t.agent, t.tokens)(batch, 1, t.config, torch.Generator())
    both = concat([multi, single])
    assert len(both) == len(both.ended) == 12
    assert int(both.environment_mask.sum()) == int(multi.environment_mask.sum())


def test_the_context_is_not_left():
    "236 tokens and 20 more: the model's context to the last place."
    t = small_trainer(max_new_tokens=20)
    long = [t.tokenizer("a " * 236)["input_ids"], t.tokenizer("b")["input_ids"]]
    sampler = TurnSampler(t.agent, t.tokens, lambda text: "= a b")
    for seed in range(6):
        r = sampler(batch_of(t, long), 2, t.config, torch.Generator().manual_seed(seed))
        lengths = r.query_mask.sum(-1) + r.attention_mask.sum(-1)
        assert int(lengths.max()) <= 256
        last = [int(row.nonzero().max()) for row in r.attention_mask]
        assert r.mask[torch.arange(4), last].all()  # the policy has the last word
    with pytest.raises(ValueError, match="beyond the model's context"):
        sampler(batch_of(t, [[5] * 240]), 1, t.config, None)


def test_a_reply_in_the_chat_template():
    tokenizer = small_trainer().tokenizer
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
