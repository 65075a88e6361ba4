"""Tokenizers that do not fit the embedding. Oracle: embeddings with the sizes of released models, rows by hand."""

import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.models.adapters import with_lora
from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.loading import (
    configured_vocabulary,
    load_adapters,
    load_model,
    load_tokenizer,
    save_merged,
    save_model,
    tiny_smollm,
)
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.models.vocabulary import (
    UnreadableTokens,
    embedding_note,
    readable_pad_id,
    require_readable,
    unreadable_in,
    unreadable_tokens,
    warn_of_unreadable,
)
from instruct_goose.rollouts.prompts import special_ids
from instruct_goose.supervised.dpo import train_dpo, train_kto
from instruct_goose.supervised.reward_model_training import pair_accuracy, train_reward_model
from instruct_goose.supervised.sft import lm_nats, train_lm

WORDS = "the film was good bad".split()
UNREAD = "<tool>"


def longer_tokenizer(pad="<pad>"):
    "Two tokens more than the model of `small` has rows; perhaps one of them is the pad token."
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens([UNREAD, "<more>"], special_tokens=True)
    tokenizer.pad_token = pad
    return tokenizer


def small(rows=len(WORDS) + 4):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=rows, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


ONCE = {"steps": 1, "lr": 1e-3, "progress": False, "batch_size": 2}
DEMOS = [{"prompt": "the film ", "completion": "was good"}] * 2
PAIRS = [{"prompt": "the film ", "chosen": "was good", "rejected": "bad"}] * 2
LABELLED = [row | {"label": i == 0} for i, row in enumerate(DEMOS)]


def sft(tokenizer, word):
    rows = [*DEMOS, {"prompt": "the film ", "completion": word}]
    model = small()
    train_lm(model, tokenizer, rows, **ONCE)
    lm_nats(model, tokenizer, rows)


def dpo(tokenizer, word):
    model = small()
    rows = [*PAIRS, {"prompt": "the ", "chosen": "film", "rejected": word}]
    train_dpo(model, tokenizer, rows, ref_model=create_reference_model(model), **ONCE)


def kto(tokenizer, word):
    model = small()
    rows = [*LABELLED, {"prompt": "the ", "completion": word, "label": True}]
    train_kto(model, tokenizer, rows, ref_model=create_reference_model(model), **ONCE)


def scores(tokenizer, word):
    judge = RewardModel.from_causal_lm(small(), tokenizer)
    rows = [*PAIRS, {"prompt": "the ", "chosen": "film", "rejected": word}]
    train_reward_model(judge, rows, **ONCE)
    pair_accuracy(judge, rows)
    judge.score(["the film", f"the {word}"])


def rl(tokenizer, word):
    sizes = {"batch_size": 2, "minibatches": 1, "max_new_tokens": 2, "steps": 1}
    trainer = RLHFTrainer(small(), config=RLHFConfig(**sizes), tokenizer=tokenizer)
    prompts = ["the film", f"the {word}"]
    trainer.train(prompts, lambda texts: [0.0] * len(texts), progress=False)


@pytest.mark.parametrize("stage", [sft, dpo, kto, scores, rl])
@pytest.mark.filterwarnings("ignore::instruct_goose.models.vocabulary.UnreadableTokens")
def test_a_token_beyond_the_embedding_is_refused_where_the_data_has_it_and_only_there(stage):
    for pad in ("<pad>", UNREAD):
        tokenizer = longer_tokenizer(pad)
        stage(tokenizer, "bad")
        with pytest.raises(ValueError, match="'<tool>' .9. is beyond the model's embedding of 9"):
            stage(tokenizer, UNREAD)


def test_the_tokens_that_cannot_be_read_are_named_in_a_warning():
    tokenizer = longer_tokenizer()
    assert unreadable_tokens(tokenizer, 9) == {9: UNREAD, 10: "<more>"}
    with pytest.warns(
        UnreadableTokens, match="'<tool>' .9., '<more>' .10.*resize_token_embeddings"
    ):
        special_ids(small(), tokenizer)
    with pytest.warns(UnreadableTokens):
        RewardModel.from_causal_lm(small(), tokenizer)


@pytest.mark.parametrize("spare", [1, 7, 143, 271, 1000])  # OPT 7, GPT-J 143, Qwen2.5 271
def test_rows_without_a_token_are_never_refused(spare):
    tokenizer = word_tokenizer(WORDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small(len(tokenizer) + spare)
        RewardModel.from_causal_lm(model, tokenizer)
        special_ids(model, tokenizer)
    assert embedding_note(tokenizer, len(tokenizer) + spare).endswith(
        f"{spare:,} rows have no token"
    )


def test_adapters_without_an_embedding_read_what_their_base_reads(tmp_path):
    pytest.importorskip("peft")
    model, tokenizer = tiny_smollm(WORDS)
    save_model(model, tokenizer, tmp_path / "base")
    model = load_model(tmp_path / "base")
    save_model(with_lora(model, 2), tokenizer, tmp_path / "adapters")
    assert configured_vocabulary(tmp_path / "adapters") == len(tokenizer)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_a_resized_embedding_are_loaded_again_and_merged(tmp_path, tied):
    pytest.importorskip("peft")
    model, tokenizer = tiny_smollm(WORDS)
    model.config.tie_word_embeddings = tied
    model = type(model)(model.config).eval()
    save_model(model, tokenizer, tmp_path / "base")
    model = load_model(tmp_path / "base")
    tokenizer.add_tokens([UNREAD], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    with_lora(model, 2)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    save_model(model, tokenizer, tmp_path / "adapters")
    assert configured_vocabulary(tmp_path / "base") == len(tokenizer) - 1
    assert configured_vocabulary(tmp_path / "adapters") == len(tokenizer)
    ids = torch.tensor([tokenizer(f"the {UNREAD} was good")["input_ids"]])
    expected = model(ids).logits
    save_merged(tmp_path / "adapters", tmp_path / "merged")
    for again in (
        load_adapters(tmp_path / "adapters"),
        load_model(tmp_path / "adapters"),
        load_model(tmp_path / "merged"),
    ):
        torch.testing.assert_close(again(ids).logits, expected, atol=1e-5, rtol=0)
    assert len(load_tokenizer(tmp_path / "merged")) == len(tokenizer)


# --- piece by piece


@pytest.mark.parametrize("n, shown, more", [(0, 0, False), (5, 5, False), (6, 5, True)])
def test_a_warning_names_five_tokens_at_most(n, shown, more):
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens([f"<x{i}>" for i in range(n)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_unreadable(tokenizer, 9)
    assert len(said) == (n > 0)
    if n:
        names = ", ".join(f"'<x{i}>' ({9 + i})" for i in range(shown)) + ", …" * more
        assert f"9 rows, and the tokenizer {n} tokens beyond: {names}. Rows" in str(said[0].message)


@pytest.mark.parametrize("ids, first", [([0, 8], None), ([], None), ([9], 9), ([3, 12, 9], 12)])
def test_the_first_id_beyond_an_embedding_of_nine_rows(ids, first):
    assert unreadable_in(ids, 9) == first


def test_the_first_item_with_an_unreadable_token_is_named():
    batch = [[0, 8], [8, 9], [10]]
    require_readable(batch[:1], 9, None, "text {}".format)
    with pytest.raises(ValueError, match="^text 1: the token '<tool>' .9. is beyond .* 9 rows"):
        require_readable(batch, 9, longer_tokenizer(), "text {}".format)
    with pytest.raises(ValueError, match="^text 1: the token None .9. is beyond"):
        require_readable(batch, 9, None, "text {}".format)


@pytest.mark.parametrize(
    "pad, eos, rows, pad_id",
    [
        ("good", "bad", 9, 7),
        ("<tool>", "bad", 10, 9),
        ("<tool>", "bad", 9, 8),
        (None, "bad", 9, 8),
        ("<tool>", "<more>", 9, 0),
        (None, None, 9, 0),
        ("<pad>", "bad", 9, 0),  # the pad token's own id is 0
    ],
)
def test_padding_is_a_token_that_the_model_reads(pad, eos, rows, pad_id):
    tokenizer = longer_tokenizer(pad)
    tokenizer.eos_token = eos
    assert readable_pad_id(tokenizer, rows) == pad_id


@pytest.mark.parametrize(
    "rows, note",
    [
        (9, "embedding: 9 rows for 11 tokens; 2 tokens have no row, and no row of data may use"),
        (11, "embedding: 11 rows for 11 tokens"),
        (12, "embedding: 12 rows for 11 tokens; 1 rows have no token"),
        (2011, "embedding: 2,011 rows for 11 tokens; 2,000 rows have no token"),
    ],
)
def test_an_embedding_and_a_tokenizer_are_compared_in_a_line(rows, note):
    assert embedding_note(longer_tokenizer(), rows).removesuffix(" them") == note
