"Oracles: the log-odds at which the loss is lowest, worked out by hand, and counting."

import math

import pytest
import small_models
import torch
from small_models import what_learns
from states import Shelf

from instruct_goose.data.files import BadRow
from instruct_goose.data.load import load_pairs
from instruct_goose.models.adapters import has_adapters, with_lora
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.recipes.inputs import read_preferences
from instruct_goose.supervised.reward_model_training import pair_accuracy, train_reward_model


def tiny():
    return small_models.tiny("llama", std=0.1)


def test_reward_model_finds_log_odds(tokenizer):
    "Three of four people prefer the first: −¾ log σ(d) − ¼ log σ(−d) is lowest at d = log 3."
    reward_model = RewardModel.from_causal_lm(tiny(), tokenizer)
    pairs = [("a good film", "a bad film")] * 3 + [
        {"chosen": "a bad film", "rejected": "a good film"}
    ]
    log = train_reward_model(reward_model, pairs, steps=200, lr=1e-2, batch_size=4, progress=False)
    assert (
        log[0]["loss"] == pytest.approx(math.log(2)) and 0.562334 < log[-1]["loss"] < 0.567
    )  # the entropy of a coin that falls 3 to 1
    good, bad = reward_model.eval().score(["a good film", "a bad film"])
    assert good - bad == pytest.approx(math.log(3), abs=0.15)
    assert pair_accuracy(reward_model.score, pairs) == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_and_the_score_learn_and_are_saved_merged(tokenizer, tmp_path, dtype):
    """Frozen weights stand still; a kept state goes on to the bit; what is saved is a plain
    classifier with the same scores.
    """
    pairs = [("a good film", "a bad film"), ("the film is good", "the film is bad")]

    def train(found=None):
        lm = tiny().to(dtype)
        shelf = Shelf(tmp_path, found)
        torch.manual_seed(1)
        made = RewardModel(with_lora(RewardModel.from_causal_lm(lm, tokenizer).model, 2), tokenizer)
        frozen = {k: p.clone() for k, p in made.named_parameters() if not p.requires_grad}
        log = train_reward_model(
            made, pairs, steps=6, lr=0.05, batch_size=2, progress=False, stage=shelf
        )
        assert all(p.equal(frozen[k]) for k, p in made.named_parameters() if k in frozen)
        return made.eval(), log, shelf.kept

    model, log, kept = train()
    assert {k.split(".")[-2] for k in what_learns(model)} == {"score", "default"} and all(
        p.dtype == torch.float32 for p in what_learns(model).values()
    )
    assert (
        log[-1]["loss"] < log[0]["loss"] == pytest.approx(math.log(2)) and train(kept[3])[1] == log
    )
    texts = ["a good film", "the film is bad"]
    model.normalise(texts)
    model.save_pretrained(tmp_path / "reward_model")
    again = RewardModel.from_pretrained(tmp_path)  # the run's directory
    assert not has_adapters(again) and again.score(texts) == pytest.approx(
        model.score(texts), abs=1e-5 if dtype == torch.float32 else 0.1
    )


def test_the_margin_of_a_pair_reaches_the_loss(tokenizer):
    "The head begins at zero, so the first loss is mean log(1 + exp(margin)): of a file's rows too."
    rows = [
        {"chosen": "a good film", "rejected": "a bad film", "margin": 3.0},
        {"chosen": "the film is good", "rejected": "the film is bad"},
    ]
    expected = (math.log1p(math.exp(3.0)) + math.log(2)) / 2
    of_files = (load_pairs(rows), read_preferences(rows, tokenizer, margins=True))
    for pairs in (rows, *of_files):
        reward_model = RewardModel.from_causal_lm(tiny(), tokenizer)
        log = train_reward_model(reward_model, pairs, steps=1, lr=1e-3, progress=False)
        assert log[0]["loss"] == pytest.approx(expected)


def test_a_margin_that_is_no_number_and_one_that_nothing_learns_from_are_refused(tokenizer):
    row = {"chosen": "a good film", "rejected": "a bad film", "margin": "much"}
    with pytest.raises(BadRow, match="row 0: margin is 'much': a number is needed"):
        load_pairs([row])
    with pytest.raises(BadRow, match="row 0: it has a margin, and only a reward model"):
        read_preferences([row | {"margin": 1}], tokenizer)
