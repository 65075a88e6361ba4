"""Limits, defaults and flags of the models' floor, each with a number worked out by hand: what small changes of the code once got past."""
import pytest
import torch
import transformers

from instruct_goose.models.agent import Agent
from instruct_goose.models.families import forward_options
from instruct_goose.models.response import check_part
from instruct_goose.models.reward_model import all_pairs_loss, check_spread, check_tokenizer
from instruct_goose.models.tokens import pad, word_tokenizer

BASE = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=14)


def gpt2(vocab=13): return transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE, vocab_size=vocab, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize("with_entropy", [True, False])
def test_an_entropy_that_nobody_wants_is_not_computed(with_entropy):
    batch = (*pad([[1, 5, 7], [1]], 2, side="left"), *pad([[8, 2], [2, 11, 3]], 2))
    assert (Agent(gpt2()).evaluate(*batch, with_entropy=with_entropy).entropy is not None) == with_entropy


def test_two_texts_as_one_have_one_beginning_and_one_end():
    t = word_tokenizer(["film", "good"], 20, bos="<bos>", eos="<eos>", add_bos=True, add_eos=True)
    film, good = t.convert_tokens_to_ids(["film", "good"])
    assert t("film")["input_ids"] == [t.bos_token_id, film, t.eos_token_id]
    assert t("film", "good")["input_ids"] == [t.bos_token_id, film, good, t.eos_token_id]


def test_a_forward_counts_tokens_and_keeps_no_cache():
    options = forward_options(gpt2(), torch.tensor([[False, True, True], [True, True, True]]))
    assert options.pop("position_ids").tolist() == [[0, 0, 1], [0, 1, 2]] and options == {"use_cache": False}


@pytest.mark.parametrize("rows,n,fits", [(128, 128, True), (128, 125, True), (128, 124, False), (128, 129, False), (130, 128, False), (192, 187, True), (192, 186, False)])
def test_spare_rows_of_an_embedding_are_for_the_hardware(rows, n, fits):
    "Rounded up to a multiple of 64, by at most 3 %: 3.84 rows of 128, 5.76 of 192."
    more = n - len(word_tokenizer(["w0"], 14)) + 1
    tokenizer = word_tokenizer([f"w{i}" for i in range(more)], 14)
    assert len(tokenizer) == n
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**BASE, vocab_size=rows, num_labels=1))
    if fits: check_tokenizer(model, tokenizer)
    else:
        with pytest.raises(ValueError, match=f"has {n} tokens.*an embedding of {rows}"): check_tokenizer(model, tokenizer)


@pytest.mark.parametrize("gap,dtype,wide", [(15, torch.float32, False), (17, torch.float32, True), (17, torch.bfloat16, False)])
def test_a_spread_of_eight_roundings_is_no_scale(gap, dtype, wide):
    "Two scores gap·ε apart have the standard deviation gap·ε/2; ε is 2⁻²³, and 2⁻⁷ of a model in bfloat16."
    scores = torch.tensor([1., 1. + gap * 2**-23], dtype=torch.float64)
    if wide: check_spread(scores, dtype)
    else:
        with pytest.raises(ValueError, match="train the reward model first"): check_spread(scores, dtype)


@pytest.mark.parametrize("ids", [torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)], ids=["float", "bool"])
def test_token_ids_are_integers(ids):
    with pytest.raises(TypeError, match="query_ids is torch.* token ids are integers"): check_part(ids, torch.ones(1, 2, dtype=torch.bool), "query")


def test_every_score_has_its_rating(unchecked):
    with unchecked():
        for n in (1, 2, 4):
            with pytest.raises(ValueError, match="scores"): all_pairs_loss(torch.zeros(n), torch.tensor([1., 2., 3.]))
