"""How rated sentences are read, split, compared and learnt from, step by step. The oracles are double
loops over raters, numbers by hand, and stand-ins that note what a stage is asked for."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.recipes import ratings
from instruct_goose.recipes.ratings import (
    RATINGS,
    TEXTS,
    WORTH,
    Review,
    ReviewData,
    ReviewsConfig,
    beside_baselines,
    both_margins,
    pairs_table,
    preferences,
    ranking,
    read_rated,
    rehearse,
    review_data,
    review_figures,
    soft_pairs_loss,
    split_reviews,
    train_on_raters,
    train_writer,
    two_halves,
)


def write(place, lines, name=TEXTS):
    (place / name).write_text("\n".join(lines), "utf-8")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, ["1\t0\ta &amp;  b", "2\t0\tc"])
    write(tmp_path, ["2\t0\t1\t[-4, 4]", "1\t0\t1\t[ 1, -1 ,0 ]"], RATINGS)
    return tmp_path


def test_texts_and_ratings_are_joined_by_their_id(folder):
    reviews, others = read_rated(folder)
    assert reviews == [Review("1", "a & b", (1, -1, 0)), Review("2", "c", (-4, 4))]
    assert others == [] and [review.mean for review in reviews] == [0, 0]
    write(folder, ["", "1\t0\td", "", "2\t0\te", ""], "z_GroundTruth.txt")  # blank lines
    write(folder, ["3\t0\tf"], "a_GroundTruth.txt")
    assert read_rated(folder) == (reviews, ["f", "d", "e"])


@pytest.mark.parametrize(
    "cell, is_read",
    [
        ("[4, -4]", True),
        ("[0,0,0]", True),
        ("[ -1 , 2 ]", True),
        ("[5, 1]", False),
        ("[-5, 1]", False),
        ("[1]", False),
        ("[]", False),
        ("[1, 2", False),
        ("[1.5, 2]", False),
        ("[1, 2] ", False),
        ("[1, , 2]", False),
    ],
)
def test_ratings_are_two_or_more_whole_numbers_from_minus_4_to_4(cell, is_read, folder):
    write(folder, [f"1\t0\t1\t{cell}", "2\t0\t1\t[1, 2]"], RATINGS)
    if is_read:
        assert len(read_rated(folder)[0]) == 2
    else:
        with pytest.raises(ValueError, match=re.escape(f"{RATINGS}, line 1: the ratings")):
            read_rated(folder)


@pytest.mark.parametrize("missing", [TEXTS, RATINGS])
def test_both_files_are_needed(missing, folder):
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match="are needed|is needed"):
        read_rated(folder)


@pytest.mark.parametrize(
    "name, line, says",
    [
        (TEXTS, "3\t0", "line 3: 2 columns, expected 3"),
        (TEXTS, "3\t0\ta\tb", "line 3: 4 columns, expected 3"),
        (TEXTS, "1\t0\td", "line 3: the id '1' stands in .*line 1 already"),
        (TEXTS, "3\t0\td", "line 3: the id '3' stands in this file alone"),
        (RATINGS, "3\t0\t[1, 2]", "line 3: 3 columns, expected 4"),
        (RATINGS, "3\t0\t1\t[1, 2]", "line 3: the id '3' stands in this file alone"),
    ],
)
def test_a_bad_line_is_named(name, line, says, folder):
    (folder / name).write_text((folder / name).read_text() + "\n" + line)
    with pytest.raises(ValueError, match=f"{name}, {says}"):
        read_rated(folder)


def test_made_up_sentences_have_the_format_of_the_real_ones(tmp_path):
    rehearse(tmp_path, n=40, seed=3)
    reviews, others = read_rated(tmp_path)
    assert [review.id for review in reviews] == [str(i) for i in range(1, 41)]
    assert len(others) == 6 and all(re.fullmatch(r"the \w+ works\.", text) for text in others)
    assert all(15 <= len(review.ratings) <= 29 for review in reviews)
    worth = []
    for review in reviews:
        words = [word for word in re.findall(r"\w+", review.text) if word in WORTH]
        assert 2 <= len(words) <= 3
        worth.append(sum(WORTH[word] for word in words) / 2)
    means = [review.mean for review in reviews]
    assert ranking(worth, means, 1.0) > 0.95  # the raters follow what the words are worth
    clipped = [max(-4.0, min(4.0, x)) for x in worth]
    assert sum(abs(a - b) for a, b in zip(clipped, means, strict=True)) / 40 < 0.4
    lines = (tmp_path / RATINGS).read_text("utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] != [review.id for review in reviews]
    again = (tmp_path / TEXTS).read_text("utf-8")
    rehearse(tmp_path, n=40, seed=3)
    assert (tmp_path / TEXTS).read_text("utf-8") == again
    rehearse(tmp_path, n=40, seed=4)
    assert (tmp_path / TEXTS).read_text("utf-8") != again


def reviews_of(n):
    return [Review(str(i), f"text {i}", (i % 9 - 4, 0)) for i in range(n)]


@pytest.mark.parametrize("n, held_out", [(4, 2), (5, 2), (5, 3), (20, 7)])
def test_reviews_are_split_once_and_for_all(n, held_out):
    reviews = reviews_of(n)
    train, test = split_reviews(reviews, held_out)
    assert len(test) == held_out and sorted([*train, *test]) == sorted(reviews)
    assert split_reviews(reviews, held_out) == (train, test)


@pytest.mark.parametrize("n, held_out", [(4, 1), (4, 3), (3, 2), (0, 2)])
def test_both_parts_of_a_split_have_two_reviews(n, held_out):
    with pytest.raises(ValueError, match=f"held_out={held_out} of {n} reviews"):
        split_reviews(reviews_of(n), held_out)


# --- the order of pairs


@pytest.mark.parametrize(
    "scores, means, margin, share",
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.0, 1.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], 0.0, 0.0),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 0.0, 0.5),
        ([1.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0, 2.5 / 3),
        ([2.0, 1.0, 3.0], [1.0, 2.0, 3.0], 0.0, 2 / 3),
        ([2.0, 1.0, 3.0], [1.0, 1.0, 3.0], 0.0, 1.0),  # the raters do not tell the first two apart
        ([2.0, 1.0, 3.0], [1.0, 2.0, 3.0], 2.0, 1.0),  # a margin of just as much counts
        ([2.0, 1.0, 0.0], [1.0, 2.0, 3.0], 1.5, 0.0),
    ],
)
def test_the_share_of_pairs_in_the_raters_order(scores, means, margin, share):
    assert ranking(scores, means, margin) == pytest.approx(share)


@pytest.mark.parametrize(
    "means, margin, says", [([1.0, 1.0], 0.0, "anything"), ([1.0, 2.0], 1.5, "1.5")]
)
def test_reviews_that_the_raters_do_not_tell_apart_have_no_order(means, margin, says):
    with pytest.raises(ValueError, match=f"no two of the 2 reviews differ by {says}"):
        ranking([1.0, 2.0], means, margin)


def test_both_margins_are_all_pairs_and_those_a_point_apart():
    assert both_margins([2.0, 1.0, 3.0], [0.0, 0.5, 1.0]) == {
        "pair_accuracy": pytest.approx(2 / 3),
        "pair_accuracy_margin_1": 1.0,
    }


def test_each_texts_raters_are_dealt_into_halves():
    reviews = [Review("a", "x", (1, 2, 3, 4)), Review("b", "y", (-1, -2, -3))]
    first, second = two_halves(reviews)
    for review, one, other in zip(reviews, first, second, strict=True):
        assert sorted(one.ratings + other.ratings) == sorted(review.ratings)
        assert len(one.ratings) == len(review.ratings) // 2
        assert (one.id, one.text, other.text) == (review.id, review.text, review.text)
    assert two_halves(reviews) == (first, second)
    dealt = {two_halves(reviews, seed)[0][0].ratings for seed in range(9)}
    assert len(dealt) > 1


def test_scores_stand_beside_vader_and_half_of_the_raters(monkeypatch):
    def vader(texts):
        return [float(text.split()[1]) for text in texts]

    monkeypatch.setattr(ratings, "vader_compound", vader)
    held_out = [Review(str(i), f"text {i}", (i - 2, i - 2, i - 2, i - 2)) for i in range(5)]
    shares = beside_baselines({"mine": [4.0, 3.0, 2.0, 1.0, 0.0]}, held_out)
    one = {"pair_accuracy": 1.0, "pair_accuracy_margin_1": 1.0}
    assert shares == {
        "mine": {name: 0.0 for name in one},
        "vader": one,
        "half_of_the_raters": one,
    }
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in pairs_table(shares).splitlines()
    ]
    assert cells[0] == ["judge", "all pairs", "margin ≥ 1"]
    assert cells[-1] == ["half of the raters", "1.000", "1.000"]
    assert review_figures(["text 3"], [True]) == {"vader_compound": [3.0]}


def slow_preferences(ratings):
    n = len(ratings)
    table = [[0.0] * n for _ in range(n)]
    for i, j in itertools.permutations(range(n), 2):
        won = sum(a > b for a in ratings[i] for b in ratings[j])
        table[i][j] = won / (len(ratings[i]) * len(ratings[j]))
    return torch.tensor(table)


RATED = [(4, -4, 0), (1, 2), (4, 4, 4, 3), (-4, -4), (0, 0)]


def test_preferences_compare_every_rater_with_every_other():
    assert torch.allclose(preferences(RATED), slow_preferences(RATED), atol=1e-6)


def test_the_loss_is_the_mean_over_all_comparisons_of_raters():
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.25], dtype=torch.float64)
    weights = slow_preferences(RATED)
    total = 0.0
    for i, j in itertools.permutations(range(5), 2):
        total -= weights[i, j].item() * math.log(1 / (1 + math.exp(scores[j] - scores[i])))
    loss = soft_pairs_loss(scores, RATED)
    assert loss.item() == pytest.approx(total / weights.sum().item(), rel=1e-5)
    with pytest.raises(ValueError, match="no pair to learn from"):
        soft_pairs_loss(scores[:2], [(1, 1), (1,)])


# --- the data and the stages of a run


def settings(**more):
    small = dict(
        data=Path("unused"),
        held_out=4,
        vocab_size=300,
        hidden_size=16,
        layers=1,
        heads=2,
        context=40,
        steps=3,
        batch_size=8,
        eval_samples=5,
        max_new_tokens=4,
        prompt_words=3,
        device="cpu",
    )
    return ReviewsConfig(**small | more)


def sentences(n):
    words = list(WORTH)
    texts = [f"{words[i % 12]} and {words[i // 12 % 12]} film {i}" for i in range(n)]
    return [Review(str(i), text, (i % 9 - 4, 0)) for i, text in enumerate(texts)]


def test_prompts_are_cut_from_texts_of_their_own_side():
    config = settings()
    data = review_data(config, sentences(30), ["another text", "long " * 99])
    assert (
        len(data.held_out) == 4 and len(data.train) == 26 and data.other_texts == ["another text"]
    )
    assert len(data.prompts) == 3 * 8 and len(data.held_out_prompts) == 5
    for prompts, side in ((data.prompts, data.train), (data.held_out_prompts, data.held_out)):
        for prompt in prompts:
            assert 2 <= len(prompt.split()) <= 3
            assert any(review.text.startswith(prompt) for review in side)
    assert data.tokenizer.model_max_length == 40 and len(data.tokenizer) <= 300
    assert "another" in data.tokenizer.decode(data.tokenizer("another")["input_ids"])
    other = review_data(settings(seed=1), sentences(30))
    assert other.prompts != data.prompts


def test_a_text_leaves_room_for_its_end():
    reviews = sentences(30)
    data = review_data(settings(), reviews)
    longest = max(len(data.tokenizer(review.text)["input_ids"]) for review in data.train)
    fits = review_data(settings(context=longest + 1), reviews)
    cut = review_data(settings(context=longest), reviews)
    assert len(fits.train) == len(data.train) > len(cut.train)


def test_the_writer_reads_rated_and_other_texts_with_the_settings(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        ratings, "train_lm", lambda model, tokenizer, texts, **k: asked.update(k, texts=texts)
    )
    config = settings(sft_steps=40, sft_lr=1e-2, sft_batch_tokens=77, progress=False)
    data = review_data(config, sentences(30), ["another text"])
    lm = train_writer(config, data)
    assert not lm.training and lm.config.resid_pdrop == 0.1
    assert lm.config.pad_token_id == data.tokenizer.pad_token_id
    assert asked.pop("texts") == [review.text for review in data.train] + ["another text"]
    assert isinstance(asked.pop("seed"), int)
    assert asked == {
        "steps": 40,
        "batch_tokens": 77,
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "warmup": 8,
        "desc": "1 SFT",
        "progress": False,
        "stage": None,
    }
    train_writer(settings(sft_steps=1000), data)
    assert asked["warmup"] == 100


@pytest.fixture
def raters(monkeypatch):
    "What `train_on_raters` hands to `fit`, and the reward model before it learns."
    asked = {}

    def fit(model, loss_of, batches, **options):
        asked.update(options, model=model, loss_of=loss_of, batches=batches)

    monkeypatch.setattr(ratings, "fit", fit)
    monkeypatch.setattr(RewardModel, "normalise", lambda self, texts: asked.update(texts=texts))
    lm, tokenizer = tiny_smollm(["good", "bad", "film"])
    train = [
        Review("1", "good film good", (3, 4)),
        Review("2", "bad film", (-3, -4)),
        Review("3", "film", (0, 0)),
    ]
    held_out = [Review("4", "good", (1, 2)), Review("5", "bad", (-1, 2))]
    data = ReviewData(train, held_out, [], tokenizer, [], [])

    def learn(**more):
        model = train_on_raters(settings(**more), data, lm)
        return model, asked

    return learn


def test_the_reward_model_learns_for_so_many_passes_and_is_frozen(raters):
    "Six tokens; five passes of batches of four tokens are 7.5 updates."
    model, asked = raters(rm_epochs=5.0, rm_batch_tokens=4, rm_lr=0.3)
    assert (asked["steps"], asked["warmup"], asked["lr"]) == (8, 0, 0.3)
    assert asked["desc"] == "2 reward model" and [*asked["generators"]] == ["word dropout"]
    assert asked["texts"] == ["good", "bad"]  # of the held-out sentences
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    _, asked = raters(rm_epochs=50.0, rm_batch_tokens=4)
    assert (asked["steps"], asked["warmup"]) == (75, 7)
    _, asked = raters(rm_epochs=0.1, rm_batch_tokens=4000)
    assert asked["steps"] == 1


def test_batches_of_texts_that_raters_do_not_tell_apart_are_passed_over(raters):
    "The first text has three tokens and is alone in a batch of four; the other two go together."
    _, asked = raters(rm_batch_tokens=4)
    assert [sorted(batch) for batch in itertools.islice(asked["batches"], 3)] == [[1, 2]] * 3
    _, asked = raters(rm_batch_tokens=100)
    assert sorted(next(asked["batches"])) == [0, 1, 2]


@pytest.mark.parametrize("share, changes", [(0.0, False), (1.0, True)])
def test_hidden_words_are_padding_that_is_read_and_the_first_one_stays(share, changes, raters):
    model, asked = raters(rm_word_dropout=share, rm_dropout=0.0)
    torch.nn.init.normal_(model.model.score.weight)
    tokenizer = model.tokenizer
    expected = []
    for words in ("good film good", "bad film"):
        ids = tokenizer(words)["input_ids"]
        if changes:
            ids = [ids[0]] + [tokenizer.pad_token_id] * (len(ids) - 1)
        expected.append(model(torch.tensor([ids])))
    loss = asked["loss_of"]([0, 1])
    torch.testing.assert_close(loss, soft_pairs_loss(torch.cat(expected), [(3, 4), (-3, -4)]))


def test_dropout_of_the_reward_model_is_a_setting_of_its_own(monkeypatch):
    monkeypatch.setattr(ratings, "fit", lambda *_, **__: None)
    monkeypatch.setattr(RewardModel, "normalise", lambda self, texts: None)
    config = settings(rm_dropout=0.35)
    data = review_data(config, sentences(30))
    monkeypatch.setattr(ratings, "train_lm", lambda *_, **__: None)
    model = train_on_raters(config, data, train_writer(config, data))
    rates = {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)}
    assert rates == {0.35}


@pytest.mark.parametrize("context, is_allowed", [(5, True), (4, False), (3, False)])
def test_the_context_leaves_a_prompt_room(context, is_allowed):
    if is_allowed:
        settings(context=context, max_new_tokens=4)
    else:
        with pytest.raises(ValueError, match="context.*above max_new_tokens, 4"):
            settings(context=context, max_new_tokens=4)
