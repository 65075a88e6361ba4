"Oracle: one unpadded row at a time through torch's cross_entropy."

import math

import pytest
import torch
from small_models import families, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from instruct_goose.config import RLHFConfig
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import bpe_tokenizer, pad, word_tokenizer
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.supervised.dpo import train_dpo, train_kto
from instruct_goose.supervised.sft import lm_loss, lm_nats, lm_rows, train_lm
from instruct_goose.training.trainer import RLHFTrainer

TEXTS = ["the film is good", "a bad plot", "good", "the plot is bad bad bad"]
PROMPTS = ["the film", "", "good", "the"]


def by_rows(model, rows, given):
    "Summed surprise and number of learnt tokens, one row at a time, no padding."
    total, n = 0.0, 0
    for row, g in zip(rows, given, strict=True):
        g = max(g, 1)
        logits = model(torch.tensor([row])).logits[0]
        total, n = (
            total + cross_entropy(logits[g - 1 : -1], torch.tensor(row[g:]), reduction="sum"),
            n + len(row) - g,
        )
    return total, n


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@families
def test_the_loss_is_cross_entropy_of_single_rows_and_padding_and_prompts_take_no_part(
    name, tokenizer
):
    model = tiny(name)
    rows, given = lm_rows(TEXTS, tokenizer, PROMPTS)
    assert given == [3, 1, 2, 2]  # the begin token, and the prompt's words
    total, n = by_rows(model, rows, given)
    (total / n).backward()
    expected = (total / n).item()
    gradient = gradients(model)
    assert gradient.norm() > 0.01
    ids, mask = pad(rows, 0)
    learn = mask & (torch.arange(ids.shape[1]) >= torch.tensor(given)[:, None])
    for filling in (0, 5, 8):
        model.zero_grad()
        loss = lm_loss(model, ids.masked_fill(~mask, filling), mask, learn)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(gradients(model), gradient, atol=1e-5, rtol=1e-3)
    assert lm_loss(model, ids, mask, torch.ones_like(mask)).equal(
        lm_loss(model, ids, mask)
    )  # `learn` may reach into the padding
    everything = by_rows(model, rows, [1] * 4)
    assert lm_loss(model, ids, mask).item() == pytest.approx(
        (everything[0] / everything[1]).item(), rel=1e-4
    )
    assert (
        abs(everything[0] / everything[1] - expected) > 0.003
    )  # leaving the prompts out does make a difference


def test_rows(tokenizer, unchecked):
    id_of = tokenizer.convert_tokens_to_ids
    assert lm_rows(["a film"], tokenizer) == ([[0, id_of("a"), id_of("film"), 0]], [1])
    with pytest.raises(ValueError, match="text 1 does not begin with its prompt: 'film'"):
        lm_rows(["a film", "a film"], tokenizer, ["a", "film"])
    with pytest.raises(ValueError):
        lm_rows(["a film", "a film"], tokenizer, ["a"])
    with pytest.raises(ValueError, match="text 0 ends inside a word"):
        lm_rows(["a film"], tokenizer, ["a fi"])
    plain = word_tokenizer("a film".split(), add_bos=False)
    assert lm_rows(["a film"], plain) == (
        [[*plain("a film")["input_ids"], plain.eos_token_id]],
        [1],
    )  # no bos where the tokenizer writes none
    plain.bos_token = None
    assert lm_rows(["a film"], plain) == (
        [[*plain("a film")["input_ids"], plain.eos_token_id]],
        [1],
    )
    plain.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        lm_rows(["a film"], plain)
    with unchecked(), pytest.raises(TypeError, match="one string"):
        lm_rows("a film", tokenizer)


def test_a_token_across_the_border_is_cut_and_no_letter_is_lost():
    """Bytes pairs of the whole join the prompt's blank to the response: the prompt stays what the
    policy will be given.
    """
    tokenizer = bpe_tokenizer(["answer: good plot", "good plot", "film film"] * 20, 400)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    prompt = "answer: "
    text = "answer: good plot"
    assert ids(text)[: len(ids(prompt))] != ids(prompt)  # else this test shows nothing
    assert lm_rows([text], tokenizer, [prompt]) == (
        [[bos, *ids(prompt), *ids("good plot"), eos]],
        [1 + len(ids(prompt))],
    )
    assert lm_rows([text], tokenizer, ["answer:"]) == (
        [[bos, *ids(text), eos]],
        [1 + len(ids("answer:"))],
    )  # no token there
    assert len(ids("film")) == 1
    (row,), (n,) = lm_rows(["film"], tokenizer, ["fi"])
    assert (
        row == [bos, *ids("fi"), *ids("lm"), eos]
        and n == 1 + len(ids("fi"))
        and tokenizer.decode(row[1:-1]) == "film"
    )
    assert lm_rows(["film film"], tokenizer, ["film"])[1] == [2]
    assert lm_rows(["film"], tokenizer, ["film"]) == (
        [[bos, *ids("film"), eos]],
        [2],
    )  # nothing but the end to learn
    with pytest.raises(ValueError, match="text 1 does not begin with its prompt"):
        lm_rows(["film", "film"], tokenizer, ["fi", "fo"])


def blank_first(scheme):
    "As SentencePiece writes: a blank is ▁, and one is put in front of every text."
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.train_from_iterator(
        ["answer: good plot", "answer: bad plot", "sea food"] * 9,
        BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("cut", range(len("answer: good plot")))
def test_wherever_the_border_lies_the_parts_read_as_the_whole(scheme, cut):
    "Also where a tokenizer puts a blank before every text: the response goes on, and gets none."
    tokenizer = blank_first(scheme)
    text = "answer: good plot"
    prompt = tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
    (row,), (n,) = lm_rows([text], tokenizer, [text[:cut]])
    assert tokenizer.decode(row[:-1]).removeprefix(" ") == text
    assert row[: len(prompt)] == prompt and n == max(1, len(prompt))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_nats_count_every_token_once_however_they_are_batched(tokenizer, batch_size):
    model = tiny().train()
    rows, given = lm_rows(TEXTS, tokenizer)
    total, n = by_rows(tiny(), rows, given)
    assert lm_nats(model, tokenizer, TEXTS, batch_size) == pytest.approx(
        (total / n).item(), rel=1e-5
    )
    assert all(m.training for m in model.modules())


def test_training_learns_the_data_does_not_learn_prompts_and_repeats_itself(tokenizer):
    texts = ["the film is good"] * 3 + ["a bad plot"]

    def trained(steps=250, **kw):
        model = tiny("llama", std=0.1)
        torch.rand(len(kw) + 1)  # the global generator must not matter
        log = train_lm(
            model, tokenizer, texts, steps=steps, lr=1e-2, batch_size=4, progress=False, **kw
        )
        return model, log

    model, _ = trained()
    floor = (
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) * 4 / 19
    )  # nats per token: (3 · 5 + 4) tokens in 4 texts
    assert floor - 1e-5 < lm_nats(model, tokenizer, texts) < floor + 0.04
    assert trained(20)[1] == trained(20)[1] != trained(20, seed=1)[1]
    given, _ = trained(prompts=["the film"] * 3 + ["a bad"])
    assert lm_nats(given, tokenizer, texts) > floor + 0.1  # it was never told how a text begins
    rows, starts = lm_rows(texts, tokenizer, ["the film"] * 3 + ["a bad"])
    total, n = by_rows(given, rows, starts)
    assert total / n < 0.1  # and has learnt the rest


def test_conversations_and_rows_are_learnt_behind_the_prompt_that_rl_gives():
    _, tokenizer = tiny_smollm("the film was good".split())
    question = [{"role": "user", "content": "the film"}]
    conversation = [*question, {"role": "assistant", "content": "was good"}]
    prompt = encode_rows([question], Tokens(tokenizer, [], 0))[0]

    rows, given = lm_rows([conversation, {"prompt": question, "completion": "was good"}], tokenizer)

    assert rows[0] == rows[1] and rows[0][: given[0]] == prompt
    assert rows[0][given[0] :] == [
        *tokenizer.convert_tokens_to_ids(["was", "good"]),
        tokenizer.eos_token_id,
    ]
    unknown = [{"role": "human", "content": "the film"}, conversation[1]]
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ '<|im_start|>' + message['role']",
        "{{ '' if message['role'] == 'human' else '<|im_start|>' + message['role']",
    )
    with pytest.raises(ValueError, match="text 1: .*leaves out what turn 0 .human. says"):
        lm_rows([conversation, unknown], tokenizer)


COLUMNS = {"prompt": ["the film is"], "completion": ["good"], "chosen": ["a"], "rejected": ["b"]}


def columns_as(kind):
    "The columns as a dictionary, or as a table or a series of pandas."
    if kind == "dict":
        return COLUMNS
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(COLUMNS) if kind == "table" else pandas.Series(["the", "film"])


@pytest.mark.parametrize("kind", ["dict", "table", "series"])
def test_a_table_is_refused_where_its_names_would_be_read_as_texts(tokenizer, kind, unchecked):
    table = columns_as(kind)
    model = tiny()
    options = dict(steps=1, lr=1e-3, batch_size=1, progress=False)
    reads = {
        "load_answers": lambda: train_lm(model, tokenizer, table, **options),
        "load_pairs": lambda: train_dpo(model, tokenizer, table, ref_model=tiny(), **options),
        "load_prompts": lambda: encode_rows(table, Tokens(tokenizer, [], 0)),
    }
    with unchecked():
        for loader, read in reads.items():
            with pytest.raises(TypeError, match=rf"pass a list of rows.*{loader}\(table\)"):
                read()
        with pytest.raises(TypeError, match=r"load_answers\(table\)"):
            train_kto(model, tokenizer, table, ref_model=tiny(), **options)


def test_a_trainer_refuses_a_table(tokenizer, unchecked):
    config = RLHFConfig(batch_size=2, minibatches=1, max_new_tokens=2, steps=1)
    trainer = RLHFTrainer(tiny(), config=config, tokenizer=tokenizer)
    table = columns_as("table")
    with unchecked():
        for read in (trainer.evaluate, trainer.train):
            with pytest.raises(TypeError, match=r"load_prompts\(table\)"):
                read(table, lambda texts: [0.0] * len(texts))


def test_a_row_without_a_completion_is_refused_by_its_number(tokenizer):
    with pytest.raises(ValueError, match="text 0 has no 'completion': its columns are messages"):
        lm_rows([{"messages": [{"role": "user", "content": "the film"}]}], tokenizer)
