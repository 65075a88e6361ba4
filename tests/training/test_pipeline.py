"""Oracles: one unpadded row at a time through torch's cross_entropy, enumeration of a small world, counting, files."""
import itertools
import json
import math
import multiprocessing
import os
from collections import Counter
from itertools import islice

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose.models.agent import Agent
from instruct_goose.models.reward import RewardModel
from instruct_goose.models.text import bpe_tokenizer, pad, word_tokenizer
from instruct_goose.training.checkpoints import Stage, load_checkpoint, save_checkpoint
from instruct_goose.training.pipeline import (
    Clock,
    append_jsonl,
    batches,
    best_of_n,
    claim_run_dir,
    cosine,
    ended,
    fit,
    kl_to_reference,
    lm_loss,
    lm_nats,
    lm_rows,
    new_run_dir,
    one_seed,
    pair_accuracy,
    plot_metrics,
    save_model,
    text_table,
    torch_threads,
    train_lm,
    train_reward_model,
    train_reward_model_on_ratings,
    versions,
    write,
    write_json,
)
from instruct_goose.training.rollout import Rollout

BASE = dict(vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=12,
            pad_token_id=0, bos_token_id=0, eos_token_id=0)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {"gpt2": lambda: transformers.GPT2Config(**BASE), "llama": lambda: transformers.LlamaConfig(**ROTARY),
           "qwen2": lambda: transformers.Qwen2Config(**ROTARY),
           "gemma2": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2.)}  # no plain head
families = pytest.mark.parametrize("name", CONFIGS)
TEXTS = ["the film is good", "a bad plot", "good", "the plot is bad bad bad"]
PROMPTS = ["the film", "", "good", "the"]


@pytest.fixture
def tokenizer():
    return word_tokenizer("the a film plot is good bad".split(), model_max_length=12, pad="<end>", bos="<end>", eos="<end>")


def tiny(name="gpt2", seed=0, std=.3):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=std)
    return model


def by_rows(model, rows, given):
    "Summed surprise and number of learnt tokens, one row at a time, no padding."
    total, n = 0., 0
    for row, g in zip(rows, given, strict=True):
        g = max(g, 1)
        logits = model(torch.tensor([row])).logits[0]
        total, n = total + cross_entropy(logits[g - 1:-1], torch.tensor(row[g:]), reduction="sum"), n + len(row) - g
    return total, n


def gradients(model): return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# --- seeds ---

def crc32(data):
    "Bit by bit, from the polynomial."
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8): crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_seeds():
    assert one_seed(7, "sft") == crc32(b"7/sft")
    assert crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32
    assert len({one_seed(s, n) for s in range(30) for n in ("sft", "reward model", "ppo")}) == 90


def test_threads_are_put_back_even_after_an_error():
    with pytest.raises(KeyError), torch_threads(3):
        assert torch.get_num_threads() == 3
        raise KeyError
    assert torch.get_num_threads() == 1


# --- the language model's loss ---

@families
def test_the_loss_is_cross_entropy_of_single_rows_and_padding_and_prompts_take_no_part(name, tokenizer):
    model = tiny(name)
    rows, given = lm_rows(TEXTS, tokenizer, PROMPTS)
    assert given == [3, 1, 2, 2]  # the begin token, and the prompt's words
    total, n = by_rows(model, rows, given)
    (total / n).backward()
    expected, gradient = (total / n).item(), gradients(model)
    assert gradient.norm() > .01
    ids, mask = pad(rows, 0)
    learn = mask & (torch.arange(ids.shape[1]) >= torch.tensor(given)[:, None])
    for filling in (0, 5, 8):
        model.zero_grad()
        loss = lm_loss(model, ids.masked_fill(~mask, filling), mask, learn)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(gradients(model), gradient, atol=1e-5, rtol=1e-3)
    everything = by_rows(model, rows, [1] * 4)
    assert lm_loss(model, ids, mask).item() == pytest.approx((everything[0] / everything[1]).item(), rel=1e-4)
    assert abs(everything[0] / everything[1] - expected) > .003  # leaving the prompts out does make a difference


def test_learn_may_reach_into_the_padding_and_over_the_first_token(tokenizer):
    model, (rows, _) = tiny(), lm_rows(TEXTS, tokenizer)
    ids, mask = pad(rows, 0)
    assert lm_loss(model, ids, mask, torch.ones_like(mask)).equal(lm_loss(model, ids, mask))


def test_what_cannot_be_learnt_is_refused(tokenizer):
    model, (rows, _) = tiny(), lm_rows(TEXTS, tokenizer)
    ids, mask = pad(rows, 0)
    with pytest.raises(ValueError, match="no token to learn"): lm_loss(model, ids, mask, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="pad on the right"): lm_loss(model, *pad(rows, 0, side="left"))
    quick = dict(steps=1, lr=1e-3, batch_size=2, progress=False)
    with pytest.raises(ValueError, match="text 1 has 14 tokens.*context of 12"):
        train_lm(model, tokenizer, ["a", "good " * 12], **quick)
    with pytest.raises(ValueError, match="context of 12"): lm_nats(model, tokenizer, ["good " * 12])
    for f in (lambda t: train_lm(model, tokenizer, t, **quick), lambda t: lm_nats(model, tokenizer, t)):
        with pytest.raises(ValueError, match="no texts"): f([])


def test_rows(tokenizer, unchecked):
    id_of = tokenizer.convert_tokens_to_ids
    assert lm_rows(["a film"], tokenizer) == ([[0, id_of("a"), id_of("film"), 0]], [1])
    with pytest.raises(ValueError, match="text 1 does not begin with its prompt: 'film'"):
        lm_rows(["a film", "a film"], tokenizer, ["a", "film"])
    with pytest.raises(ValueError): lm_rows(["a film", "a film"], tokenizer, ["a"])
    plain = word_tokenizer("a film".split(), add_bos=False)
    assert lm_rows(["a film"], plain)[0][0][0] == plain.bos_token_id  # added here where the tokenizer does not
    plain.bos_token = None
    assert lm_rows(["a film"], plain) == ([[*plain("a film")["input_ids"], plain.eos_token_id]], [1])
    plain.eos_token = None
    with pytest.raises(ValueError, match="no eos token"): lm_rows(["a film"], plain)
    with unchecked(), pytest.raises(TypeError, match="one string"): lm_rows("a film", tokenizer)


def test_a_prompt_that_ends_inside_a_token_is_refused():
    tokenizer = bpe_tokenizer(["film film film"] * 20, 300)
    assert len(tokenizer("film")["input_ids"]) == 2  # begin, and one token
    with pytest.raises(ValueError, match="does not begin with its prompt"): lm_rows(["film"], tokenizer, ["fi"])
    assert lm_rows(["film film"], tokenizer, ["film"])[1] == [2]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_nats_count_every_token_once_however_they_are_batched(tokenizer, batch_size):
    model = tiny().train()
    rows, given = lm_rows(TEXTS, tokenizer)
    total, n = by_rows(tiny(), rows, given)
    assert lm_nats(model, tokenizer, TEXTS, batch_size) == pytest.approx((total / n).item(), rel=1e-5)
    assert all(m.training for m in model.modules())


# --- batches, schedule, loop ---

@pytest.mark.parametrize("n, size", [(7, 3), (5, 5), (3, 8), (1, 1)])
def test_batches_by_rows_use_each_row_equally_often(n, size):
    drawn = list(islice(batches([1] * n, size, seed=3), n * 4))
    assert all(len(b) == size for b in drawn)
    assert Counter(sum(drawn, [])) == dict.fromkeys(range(n), 4 * size)
    assert drawn == list(islice(batches([9] * n, size, seed=3), n * 4))
    if n > 3: assert drawn != list(islice(batches([1] * n, size, seed=4), n * 4))


def test_batches_by_tokens_fit_and_cover_every_row_in_each_pass():
    lengths = torch.randint(1, 20, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    stream, passes = batches(lengths, batch_tokens=40, seed=0), []
    for _ in range(3):
        seen, order = [], []
        while len(seen) < 50:
            batch = next(stream)
            assert len(batch) * max(lengths[i] for i in batch) <= 40
            seen += batch; order.append(tuple(batch))
        assert sorted(seen) == list(range(50))
        passes.append(order)
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("wrong", [dict(), dict(batch_size=2, batch_tokens=9), dict(batch_size=0), dict(batch_size=-1),
                                   dict(batch_tokens=4), dict(batch_tokens=0)], ids=str)
def test_batches_refuse_at_once(wrong):
    with pytest.raises(ValueError): batches([2, 5], **wrong)
    with pytest.raises(ValueError, match="no rows"): batches([], 2)


def test_cosine():
    assert [cosine(k, 10, 4) for k in range(4)] == [.25, .5, .75, 1.]
    factors = [cosine(k, 10, 4, .2) for k in range(4, 13)]
    assert factors == sorted(factors, reverse=True) and factors[0] == 1. and factors[6:] == pytest.approx([.2] * 3)
    assert cosine(7, 10, 4, .2) == pytest.approx(.6)  # halfway down


def line():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def test_fit_is_adamw_by_hand():
    "Two parameters, written out: decay on the matrix, none on the bias, gradient clipped to length 1."
    model, x, y = line().double(), torch.tensor([[3., -1.]]).double(), torch.tensor([[9.]]).double()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    log = fit(model, lambda rows: (model(x) - y).square().sum(), batches([1], 1), steps=12, lr=.1, weight_decay=.3,
              warmup=3, floor=.5, progress=False)
    first, second = ({n: torch.zeros_like(v) for n, v in values.items()} for _ in range(2))
    for k in range(12):
        error = (x @ values["weight"].T + values["bias"] - y).item()
        g = {"weight": 2 * error * x, "bias": torch.tensor([2 * error]).double()}
        norm = math.sqrt(sum(v.square().sum().item() for v in g.values()))
        lr = .1 * ((k + 1) / 3 if k < 3 else .5 + .25 * (1 + math.cos(math.pi * (k - 3) / 9)))
        assert log[k] == pytest.approx({"step": k, "loss": error**2, "lr": lr, "grad_norm": norm}, rel=1e-6)
        for n, v in values.items():
            d = g[n] * min(1., 1 / (norm + 1e-6))
            first[n], second[n] = .9 * first[n] + .1 * d, .99 * second[n] + .01 * d**2
            if n == "weight": v = v * (1 - lr * .3)
            m, s = first[n] / (1 - .9**(k + 1)), second[n] / (1 - .99**(k + 1))
            values[n] = v - lr * m / (s.sqrt() + 1e-8)
    for n, p in model.named_parameters(): torch.testing.assert_close(p.detach(), values[n], atol=1e-9, rtol=1e-7)


class Shelf(Stage):
    "A stage of a run that keeps every state that it is shown, as it comes back from the files."

    found = None

    def __init__(self, directory, found=None): self.directory, self.found, self.kept = directory, found, {}

    def reached(self, at, of, state, often=1): self.kept[at] = load_checkpoint(save_checkpoint(self.directory, *state(), keep=1000))


def test_fit_goes_on_from_any_update_to_the_bit(tmp_path):
    "Dropout, a generator of the loss's own, frozen weights, batches that end in the middle of a pass."
    def train(directory, found=None):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(.5), torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)).eval()
        net[3].requires_grad_(False)
        data, dice, shelf = torch.randn(7, 3), torch.Generator().manual_seed(2), Shelf(directory, found)
        def loss(batch): return (net(data[batch]) - torch.rand(len(batch), 1, generator=dice)).square().mean()
        seen = []
        history = fit(net, loss, batches(range(7), 3, seed=4), steps=9, lr=.05, progress=False, stage=shelf, generators={"dice": dice},
                      callback=lambda step, m: seen.append(step))
        assert not net.training
        return history, [p.detach().clone() for p in net.parameters()], torch.rand(2).tolist(), dice.get_state(), shelf, seen
    whole = train(tmp_path / "whole")
    assert list(whole[4].kept) == list(range(1, 10))
    assert not [name for name in whole[4].kept[9][0] if name.startswith("optimizer")]  # a finished stage needs none
    for at, found in whole[4].kept.items():
        again = train(tmp_path / "again", found)
        assert again[0] == whole[0] and all(torch.equal(a, b) for a, b in zip(again[1], whole[1], strict=True))
        assert again[2] == whole[2] and torch.equal(again[3], whole[3])
        assert again[5] == list(range(at, 9)) and list(again[4].kept) == list(range(at + 1, 10))


def test_raters_are_drawn_as_before(tokenizer, tmp_path):
    texts, ratings = ["a good film", "a bad film", "the film is bad", "the film is good"], [[1, 3], [-1, 2], [-3, 0, 1], [2, 2]]
    def train(found=None):
        model, shelf = RewardModel.from_causal_lm(tiny(), tokenizer), Shelf(tmp_path, found)
        return train_reward_model_on_ratings(model, texts, ratings, steps=6, lr=.01, batch_size=4, progress=False, stage=shelf), shelf.kept
    whole, kept = train()
    assert train(kept[3])[0] == whole


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights(factor):
    model, kept = line().eval(), []
    def loss_of(batch):
        assert model.training
        kept.append([p.detach().clone() for p in model.parameters()])
        return model(torch.ones(1, 2)).square().sum() * (factor if len(kept) == 3 else 1.)
    with pytest.raises(FloatingPointError, match="words, step 2: the loss is"):
        fit(model, loss_of, batches([1], 1), steps=9, lr=.1, desc="words", progress=False)
    assert all(p.equal(q) for p, q in zip(model.parameters(), kept[2], strict=True)) and not kept[2][0].equal(kept[1][0])
    assert not model.training  # as before


def test_a_gradient_that_is_not_finite_stops_before_the_weights():
    model = line()
    with torch.no_grad(): model.weight.zero_()
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        fit(model, lambda b: model.weight.abs().sqrt().sum(), batches([1], 1), steps=1, lr=.1, progress=False)
    assert model.weight.eq(0).all()


def test_fit_leaves_frozen_weights_alone_calls_back_and_refuses_nonsense():
    model, calls = line(), []
    model.bias.requires_grad_(False)
    bias, weight = model.bias.clone(), model.weight.clone()
    log = fit(model, lambda b: model(torch.ones(1, 2)).square().sum(), batches([1], 1), steps=3, lr=.1, progress=False,
              callback=lambda step, m: calls.append((step, m)))
    assert model.bias.equal(bias) and not model.weight.equal(weight) and calls == list(enumerate(log))
    for wrong in (dict(steps=0, lr=.1), dict(steps=1, lr=0.), dict(steps=1, lr=math.nan)):
        with pytest.raises(ValueError): fit(model, lambda b: None, batches([1], 1), **wrong)


def test_training_learns_the_data_does_not_learn_prompts_and_repeats_itself(tokenizer):
    texts = ["the film is good"] * 3 + ["a bad plot"]
    def trained(**kw):
        model = tiny("llama", std=.1)
        torch.rand(len(kw) + 1)  # the global generator must not matter
        log = train_lm(model, tokenizer, texts, steps=250, lr=1e-2, batch_size=4, progress=False, **kw)
        return model, log
    model, log = trained()
    floor = -(.75 * math.log(.75) + .25 * math.log(.25)) * 4 / 19  # nats per token: (3 · 5 + 4) tokens in 4 texts
    assert floor < lm_nats(model, tokenizer, texts) < floor + .02
    assert trained()[1] == log != trained(seed=1)[1]
    given, _ = trained(prompts=["the film"] * 3 + ["a bad"])
    assert lm_nats(given, tokenizer, texts) > floor + .1  # it was never told how a text begins
    rows, starts = lm_rows(texts, tokenizer, ["the film"] * 3 + ["a bad"])
    total, n = by_rows(given, rows, starts)
    assert total / n < .05  # and has learnt the rest


# --- the reward model ---

def test_reward_model_finds_log_odds(tokenizer):
    "Three of four people prefer the first: −¾ log σ(d) − ¼ log σ(−d) is lowest at d = log 3."
    reward_model = RewardModel.from_causal_lm(tiny("llama", std=.1), tokenizer)  # no dropout
    pairs = [("a good film", "a bad film")] * 3 + [{"chosen": "a bad film", "rejected": "a good film"}]
    log = train_reward_model(reward_model, pairs, steps=200, lr=1e-2, batch_size=4, progress=False)
    assert log[0]["loss"] == pytest.approx(math.log(2)) and log[-1]["loss"] == pytest.approx(.562335, abs=1e-3)
    good, bad = reward_model.eval().score(["a good film", "a bad film"])
    assert good - bad == pytest.approx(math.log(3), abs=.05)
    assert pair_accuracy(reward_model.score, pairs) == .75


def test_reward_model_from_ratings_finds_the_odds_of_drawn_raters(tokenizer):
    """Ratings (1, 1, 1, −1) and (0,): a drawn rater puts the first above in 3 of 4 cases, so d = log 3 again. A model
    that learnt from the means would let d grow without end. Copies of a text against each other change nothing."""
    reward_model = RewardModel.from_causal_lm(tiny("llama", std=.1), tokenizer)  # no dropout
    texts, ratings = ["a good film"] * 24 + ["a bad film"] * 8, [[1, 1, 1, -1]] * 24 + [[0.]] * 8
    train_reward_model_on_ratings(reward_model, texts, ratings, steps=200, lr=1e-2, batch_size=32, progress=False)
    good, bad = reward_model.eval().score(["a good film", "a bad film"])
    assert good - bad == pytest.approx(math.log(3), abs=.2)
    quick = dict(steps=1, lr=1e-3, progress=False)
    with pytest.raises(ValueError, match="nobody rated text 1: 'b'"):
        train_reward_model_on_ratings(reward_model, ["a", "b"], [[1], []], **quick)
    with pytest.raises(ValueError, match="2 texts and ratings for 1"):
        train_reward_model_on_ratings(reward_model, ["a", "b"], [[1]], **quick)
    with pytest.raises(ValueError, match="context of 12"):
        train_reward_model_on_ratings(reward_model, ["a", "good " * 12], [[1], [2]], **quick)


def test_pair_accuracy_by_hand(unchecked):
    seen = []
    def length(texts): seen.extend(texts); return [len(t) for t in texts]
    pairs = [{"chosen": "long one", "rejected": "short"}, ("ab", "cd"), ("x", "xyz"), ("xyz", "x")]
    assert pair_accuracy(length, pairs) == (1 + .5 + 0 + 1) / 4
    assert pair_accuracy(lambda texts: torch.tensor(length(texts)), pairs) == 2.5 / 4
    seen.clear()
    assert pair_accuracy(length, [{"prompt": "he said ", "chosen": "yes", "rejected": "no"}]) == 1.
    assert seen == ["he said yes", "he said no"]  # as the reward model was trained
    with pytest.raises(ValueError, match="no pairs"): pair_accuracy(length, [])


# --- judging ---

def world(T, V=9, end=0):
    "All responses of at most T tokens."
    others = [v for v in range(V) if v != end]
    rows = [[*r, end] for n in range(T) for r in itertools.product(others, repeat=n)]
    rows += [list(r) for r in itertools.product(others, repeat=T)]
    return Rollout(torch.tensor([[0, 3]] * len(rows)), torch.ones(len(rows), 2, dtype=torch.bool), *pad(rows, 5))


@families
@pytest.mark.parametrize("temperature", [1., 1.7])
def test_kl_to_reference_is_the_enumerated_kl(name, temperature):
    model, reference, every = tiny(name, 0, .4), tiny(name, 1, .4), world(2)
    def log_p(m):
        out = []
        for q, r, real in zip(every.query_ids, every.response_ids, every.mask, strict=True):
            r = r[real]
            with torch.no_grad(): z = m(torch.cat([q, r])[None]).logits[0, 1:-1].double() / temperature
            out.append(z.log_softmax(-1).gather(-1, r[:, None]).sum())
        return torch.stack(out)
    here, there = log_p(model), log_p(reference)
    assert here.exp().sum().item() == pytest.approx(1, abs=1e-5)
    each = kl_to_reference(model.train(), reference, every, temperature, batch_size=7)
    expected = (here.exp() * (here - there)).sum().item()
    assert expected > .005 and (here.exp() * each).sum().item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert each.min() >= 0 and kl_to_reference(model, model, every).abs().max() < 1e-6
    assert kl_to_reference(Agent(model), reference, every, temperature).allclose(each, atol=1e-5)


def test_best_of_n_against_all_groups():
    "Probability of each text among all 4³ groups; ties go to the first, which no score can tell apart."
    p, scores, n = [.4, .3, .2, .1], [.5, 2., -1., 3.], 3
    groups = torch.tensor(list(itertools.product(range(4), repeat=n)))
    one = torch.ones(groups.numel(), 1, dtype=torch.bool)
    drawn = Rollout(torch.zeros(groups.numel(), 1, dtype=torch.long), one, groups.reshape(-1, 1), one,
                    texts=[str(i) for i in groups.flatten().tolist()])
    kept, kept_scores = best_of_n(drawn, [scores[i] for i in groups.flatten().tolist()], n)
    share = [0.] * 4
    for group, text in zip(groups.tolist(), kept.texts, strict=True): share[int(text)] += math.prod(p[i] for i in group)
    order = sorted(range(4), key=scores.__getitem__)
    for k, i in enumerate(order):
        at_most, below = sum(p[j] for j in order[:k + 1]), sum(p[j] for j in order[:k])
        assert share[i] == pytest.approx(at_most**n - below**n)
    assert kept_scores == [scores[int(t)] for t in kept.texts]
    assert sum(s * math.log(s / q) for s, q in zip(share, p, strict=True)) <= math.log(n) - (n - 1) / n
    for wrong in (([0.] * 5, 3), ([0.] * 192, 5), ([0.] * 192, 0)):
        with pytest.raises(ValueError, match="groups of"): best_of_n(drawn, *wrong)
    with pytest.raises(ValueError, match="response 191 is nan"): best_of_n(drawn, [0.] * 191 + [math.nan], 3)


@pytest.mark.parametrize("batch_size", [2, 256])
def test_write_keeps_order_prompts_and_widths(tokenizer, batch_size):
    model, prompts = tiny(), ["the film is good", "", "a", "bad plot", "good"]
    rollout = write(model, tokenizer, prompts, 6, seed=4, batch_size=batch_size)
    assert rollout.prompts == prompts and len(rollout) == 5
    for i, prompt in enumerate(prompts):
        assert rollout.query_ids[i][rollout.query_mask[i]].tolist() == tokenizer(prompt)["input_ids"]
        response = rollout.response_ids[i][rollout.mask[i]].tolist()
        assert 0 not in response[:-1] and ended(rollout, 0)[i].item() == (response[-1] == 0)
        whole = tokenizer.decode(tokenizer(prompt)["input_ids"] + response, skip_special_tokens=True)
        assert rollout.texts[i] == whole
    assert write(model, tokenizer, prompts, 6, seed=4, batch_size=batch_size).texts == rollout.texts
    assert write(model, tokenizer, prompts, 6, seed=5, batch_size=batch_size).texts != rollout.texts


def test_ended_looks_at_the_mask():
    response = torch.tensor([[3, 0, 0], [3, 4, 0], [3, 4, 5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]).bool()  # row 1 was cut off; its 0 is padding
    assert ended(Rollout(response, mask, response, mask), 0).tolist() == [True, False, False]


# --- the run directory ---

def test_new_run_dirs_differ(tmp_path):
    assert [new_run_dir("a", tmp_path / "runs").name for _ in range(3)] == ["a", "a-2", "a-3"]
    (tmp_path / "runs" / "b").write_text("a file of that name")
    assert new_run_dir("b", tmp_path / "runs").name == "b-2"


def make_some(root):
    return [str(new_run_dir("run", root)) for _ in range(20)]


def test_new_run_dirs_differ_when_several_processes_ask_at_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool: made = pool.map(make_some, [str(tmp_path)] * 4, chunksize=1)
    assert len(set(sum(made, []))) == 80 == len(list(tmp_path.iterdir()))


def test_claim_run_dir(tmp_path):
    assert claim_run_dir(tmp_path / "x" / "new").is_dir() and claim_run_dir(tmp_path / "x" / "new").is_dir()  # empty
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="is a file"): claim_run_dir(tmp_path / "file")
    (tmp_path / "x" / "new" / "notes.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="already holds files"): claim_run_dir(tmp_path / "x" / "new")
    (tmp_path / "x" / "new" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a run"): claim_run_dir(str(tmp_path / "x" / "new"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "file", "new", "notes.txt", "x"]
    assert (tmp_path / "file").read_text() == (tmp_path / "x" / "new" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_write_json_refuses_what_json_lacks_and_leaves_the_old_file(tmp_path, number):
    write_json(tmp_path / "s.json", {"ä": 1, "path": tmp_path})
    old = (tmp_path / "s.json").read_bytes()
    assert json.loads(old) == {"ä": 1, "path": str(tmp_path)} and "ä".encode() in old
    with pytest.raises(ValueError): write_json(tmp_path / "s.json", {"a": [1, {"b": number}]})
    assert (tmp_path / "s.json").read_bytes() == old and os.listdir(tmp_path) == ["s.json"]


def test_write_json_never_shows_half_a_file(tmp_path, monkeypatch):
    "Stop it just before the renaming: the old file is whole. A reader that looks in between sees the old one too."
    from pathlib import Path
    write_json(tmp_path / "s.json", {"a": 1})
    def killed(self, other): raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt): write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    write_json(tmp_path / "s.json", {"a": 3})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 3}


def test_jsonl_grows_line_by_line(tmp_path):
    for i in range(3):
        append_jsonl(tmp_path / "m.jsonl", {"i": i, "text": "zwei\nZeilen – ü"})
        lines = (tmp_path / "m.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(x)["i"] for x in lines] == list(range(i + 1))


def test_jsonl_knows_no_nan_and_no_infinity(tmp_path):
    append_jsonl(tmp_path / "m.jsonl", {"a": float("nan"), "b": [1.5, float("inf"), {"c": float("-inf")}], "d": (2, None, True, "NaN")})
    def refuse(name): raise AssertionError(f"{name} is not JSON")
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse) == {"a": None, "b": [1.5, None, {"c": None}], "d": [2, None, True, "NaN"]}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_saved_models_load_with_transformers_alone(tmp_path, tokenizer, name):
    model = tiny(name)
    save_model(model, tokenizer, tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    assert words("the film is good")["input_ids"] == tokenizer("the film is good")["input_ids"]
    ids = torch.tensor([[0, 3, 4]])
    assert again(ids).logits.equal(model(ids).logits)
    assert list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("*.bin"))


def test_clock_and_versions():
    clock = Clock()
    while clock.read()["cpu_seconds"] < .05: sum(range(10_000))
    t = clock.read()
    assert t.keys() == {"wall_seconds", "cpu_seconds"} and t["wall_seconds"] >= .04
    v = versions()
    assert v["torch"] == torch.__version__ and v["transformers"] == transformers.__version__ and json.dumps(v)


def test_plots_are_of_what_was_logged(tmp_path):
    metrics = [{"iteration": i, "reward_mean": i / 2, "kl_to_reference": .1 * i, "entropy": 1., "clip_fraction": None} for i in range(3)]
    assert [p.name for p in plot_metrics(metrics, tmp_path)] == ["reward_and_kl.png", "entropy.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.iterdir()) and plot_metrics([], tmp_path) == []


def test_text_table_lines_up_and_escapes():
    table = text_table(["", "a|b"], [["x", 1.23456], ["two\nlines", None], [True, 12]])
    assert table.splitlines() == ["|           | a\\|b  |", "|-----------|-------|", "| x         | 1.235 |",
                                  "| two lines | –     |", "| True      | 12    |"]
