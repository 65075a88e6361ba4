"""Stop strings: the oracle is the text from its beginning on, decoded anew after each token; and transformers' own criterion."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StopStringCriteria

from instruct_goose.config import RLHFConfig
from instruct_goose.models import decoding as decode
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import bpe_tokenizer, pad
from instruct_goose.rollouts.rollout import PromptBatch, Rollout, Tokens
from instruct_goose.rollouts.sampler import PolicySampler, StopStrings
from instruct_goose.training.trainer import RLHFTrainer

TOKENIZER = bpe_tokenizer(
    ["the END. " * 9, "spENDs " * 9, "weEN on. " * 9, "end of it. "],
    300,
    lowercase=False,
    model_max_length=80,
    add_bos=False,
)
BASE = dict(
    vocab_size=len(TOKENIZER),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=80,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE),
    "llama": lambda: transformers.LlamaConfig(**BASE, intermediate_size=24),
}
PROMPTS = ["we", "in a b", "the", "x y z x y z x", "ha"]
LETTERS = [i for i in range(len(TOKENIZER)) if set(TOKENIZER.decode([i])) & set("ENDs. t")]


def tiny(name="llama", seed=0):
    "It likes the letters that the stops are made of."
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25)
    head = torch.nn.Linear(16, len(TOKENIZER))
    torch.nn.init.normal_(head.weight, std=0.35)
    with torch.no_grad():
        head.bias[:] = torch.tensor([2.5 * (i in LETTERS) for i in range(len(TOKENIZER))])
    model.lm_head = head
    return model


def rows():
    return [TOKENIZER(text)["input_ids"] for text in PROMPTS]


def dice(seed):
    return torch.Generator().manual_seed(seed)


def first(tokens, texts):
    "How many tokens there are up to the stop; None: it does not come."
    return next(
        (
            t
            for t in range(1, len(tokens) + 1)
            if any(x in TOKENIZER.decode(tokens[:t]) for x in texts)
        ),
        None,
    )


@pytest.mark.parametrize(
    "name,side,own,texts",
    [
        ("llama", "left", True, ("END",)),
        ("gpt2", "right", True, ("EN", " s")),
        ("llama", "right", False, ("s.", "t")),
        ("gpt2", "left", False, ("END", "t")),
    ],
)
def test_a_padded_batch_ends_where_the_text_of_each_row_does(name, side, own, texts, monkeypatch):
    if not own:
        monkeypatch.setattr(decode, "has_own_steps", lambda _: False)
    model, stops, T = tiny(name), StopStrings(texts, TOKENIZER), 30
    ids, mask = pad(rows() * 2, 9, side=side)
    whole, written, logprobs = sample(
        model, ids, mask, T, 2, 0, generator=dice(4), with_logprobs=True
    )
    cut, stopped, said = sample(
        model,
        ids,
        mask,
        T,
        2,
        0,
        generator=dice(4),
        with_logprobs=True,
        stops=stops.watch([[] for _ in ids]),
    )
    r = Rollout(ids, mask, cut, stopped)
    ends, kinds = stops.ended(r, [2]), set()
    for i in range(len(ids)):
        tokens = whole[i][written[i]].tolist()
        n = first(tokens, texts) or len(tokens)
        assert (
            cut[i][stopped[i]].tolist() == tokens[:n]
            and stopped[i, :n].all()
            and not cut[i, n:].any()
        )
        torch.testing.assert_close(said[i, :n], logprobs[i, :n], rtol=1e-4, atol=1e-5)
        assert ends[i] == (tokens[n - 1] == 2 or first(tokens, texts) is not None)
        kinds.add((n < len(tokens), n == T))
        if n < len(tokens):
            kinds.add(
                "in the middle"
                if not any(TOKENIZER.decode(tokens[:n]).endswith(x) for x in texts)
                else "at the end"
            )
    assert (True, False) in kinds and cut.shape[1] <= whole.shape[1]


@pytest.mark.parametrize("texts", [("END",), ("EN", ". "), ("s",), ("the e", "Ds")])
def test_transformers_own_criterion_says_the_same_of_every_beginning(texts):
    theirs, ours, g, found = (
        StopStringCriteria(TOKENIZER, list(texts)),
        StopStrings(texts, TOKENIZER),
        dice(1),
        0,
    )
    own = [i for text in texts for i in TOKENIZER(text)["input_ids"]] + LETTERS
    for _ in range(25):
        row = torch.tensor(own)[torch.randint(len(own), (12,), generator=g)]
        for n in range(1, 13):
            hit = bool(theirs(row[None, :n], None))
            assert ours.found(row[:n].tolist()) == hit
            found += hit
            if hit:
                break
    assert found > 3


def trainer(**given):
    c = RLHFConfig.preset(
        "rloo",
        **dict(
            batch_size=10, group_size=2, max_new_tokens=12, device="cpu", stop_strings=("s", ".")
        )
        | given,
    )
    return RLHFTrainer(tiny(), config=c, tokenizer=TOKENIZER)


def test_in_the_trainer_a_stop_is_an_end():
    t = trainer(missing_eos_penalty=5.0, mask_truncated=True)
    r = t.rollout(PROMPTS)
    texts = [TOKENIZER.decode(i[m]) for i, m in zip(r.response_ids, r.mask, strict=True)]
    ended = [
        bool(set("s.") & set(text)) or int(i[m][-1]) == 2
        for text, i, m in zip(texts, r.response_ids, r.mask, strict=True)
    ]
    assert r.ended.tolist() == ended and {True, False} == set(ended)
    t.score(r, lambda completions: [1.0] * len(completions))
    assert r.scores.tolist() == [1.0 - 5.0 * (not e) for e in ended]
    t.advantages(t.annotate(r))
    assert t.describe(r)["finished"] == pytest.approx(sum(ended) / 10)
    left = []
    t.loss, plain = lambda now, batch: (left.append(batch.ended), plain(now, batch))[1], t.loss
    t.optimize(r)
    assert all(x.all() for x in left) and sum(map(len, left)) == sum(ended) * t.config.epochs
    assert t.evaluate(PROMPTS, lambda texts: [0.0] * len(texts))["held_out_reward"] <= 0
    silent = t.sampler(PromptBatch(*pad(rows(), 0, "left")), 1, t.config, None)
    assert silent.ended is not None and silent.sampled_logprobs is None and len(silent) == 5


def test_a_stop_works_without_an_end_token_and_needs_a_tokenizer(unchecked):
    t = trainer(mask_truncated=True)
    t.eos_ids.clear()
    assert t.step(PROMPTS, lambda texts: [float(len(x)) for x in texts])["finished"] > 0
    with pytest.raises(ValueError, match="give the trainer a tokenizer"):
        PolicySampler(t.agent, Tokens(None, [], 0))(
            PromptBatch(*pad(rows(), 0, "left")), 1, t.config, dice(0)
        )
    with unchecked(), pytest.raises(TypeError, match="stop_strings is 'END': it must be a tuple"):
        RLHFConfig(stop_strings="END")
    for wrong in ((), ("a", "")):
        with pytest.raises(ValueError, match="texts that are not empty, or None"):
            RLHFConfig(stop_strings=wrong)
