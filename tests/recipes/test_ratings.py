"""Rated sentences: small made-up files, a run on them, and the real files where they lie beside the
repository. How they are read, split, compared and learnt from, step by step: the oracles are double
loops over raters, numbers by hand, and stand-ins that note what a stage is asked for."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from rated_files import corpus

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
    run_reviews,
    soft_pairs_loss,
    split_reviews,
    train_on_raters,
    train_writer,
    two_halves,
)
from instruct_goose.runs.checkpoints import checkpoints, load_checkpoint

REAL = Path(__file__).parents[3] / "shared/data/icwsm2014"
real = pytest.mark.skipif(
    not REAL.is_dir(),
    reason="the rated sentences are not beside this repository (../shared/data/icwsm2014)",
)


@pytest.fixture
def folder(tmp_path):
    return corpus(tmp_path / "data")


def test_two_files_joined_by_id(folder, tmp_path):
    reviews, other = read_rated(folder)
    assert (
        len(reviews) == 60 and [r.id for r in reviews[:3]] == ["0_0", "1_1", "2_2"] and other == []
    )
    assert all(re.fullmatch(r"the \w+( & \w+){4} of it – fiancé\.", r.text) for r in reviews)
    row = next(
        line for line in (folder / RATINGS).read_text().splitlines() if line.startswith("2_2\t")
    )
    assert list(reviews[2].ratings) == json.loads(row.split("\t")[3]) and reviews[2].mean == sum(
        reviews[2].ratings
    ) / len(reviews[2].ratings)
    assert read_rated(corpus(tmp_path / "other", end="\r\n", mark="\ufeff"))[0] == reviews


@pytest.mark.parametrize(
    "name, pattern, replacement, why",
    [
        (TEXTS, rb"^1_1\t", b"x_1\t", r"line \d+: the id '1_1' stands in this file alone"),
        (TEXTS, rb"\A", b"0_0\t3\tfirst\n", "line 2: the id '0_0' stands in .*line 1 already"),
        (TEXTS, rb"^(2_2\t[^\t]*)\t", rb"\1 ", "line 3: 2 columns, expected 3"),
        (TEXTS, "é".encode(), "é".encode("latin-1"), "line 1: not UTF-8"),
        *(
            (
                RATINGS,
                rb"^(2_2\t.*)\[.*",
                rb"\1" + cell,
                r"line \d+: the ratings '.*' are not a list",
            )
            for cell in (b"[5, 1]", b"[true, 1]", b"[1]", b"[1, 2", b"[" * 100_000)
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line_and_reason(folder, name, pattern, replacement, why):
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(re.sub(pattern, replacement, before, count=1, flags=re.M))
    with pytest.raises(ValueError, match=f"{folder}/movieReview.*, {why}") as raised:
        read_rated(folder)
    assert len(str(raised.value)) < 500


def test_a_file_is_read_alone_and_a_directory_with_its_other_texts(folder, tmp_path):
    (folder / "b_GroundTruth.txt").write_text("1\t0\tb &lt; c\n")
    (folder / "a_GroundTruth.txt").write_text("1\t\tfirst\n2\t\tsecond\n")
    (folder / "a_anonDataRatings.txt").write_text("2\t\t\t[-1, 0]\n1\t\t\t[1, 2, 3]\n")
    assert (
        read_rated(folder)[1] == ["first", "second", "b < c"] and len(read_rated(folder)[0]) == 60
    )
    assert read_rated(folder / "a_GroundTruth.txt") == (
        [Review("1", "first", (1, 2, 3)), Review("2", "second", (-1, 0))],
        [],
    )
    with pytest.raises(FileNotFoundError, match="b_GroundTruth.txt.*anonDataRatings"):
        read_rated(folder / "b_GroundTruth.txt")
    with pytest.raises(FileNotFoundError, match="c_GroundTruth.txt' here: a directory is needed"):
        read_rated(folder / "c_GroundTruth.txt")
    with pytest.raises(FileNotFoundError, match="GroundTruth"):
        read_rated(tmp_path)


def test_no_text_is_on_both_sides_of_the_split(folder):
    reviews, _ = read_rated(folder)
    train, held_out = split_reviews(reviews, 20)
    train, held_out = split_reviews(
        [*reviews, Review("twin", held_out[0].text.upper(), (1, 2))], 20
    )
    assert not {r.text.lower() for r in train} & {r.text.lower() for r in held_out}


def test_long_texts_are_left_out(folder):
    reviews = read_rated(folder)[0]
    data = review_data(
        tiny(folder, None),
        [*reviews, Review("long", "word " * 200, (1, 2))],
        ["short", "word " * 200],
    )
    assert len(data.train) + len(data.held_out) == 60 and data.other_texts == ["short"]
    assert all(2 <= len(p.split()) <= 6 for p in data.prompts + data.held_out_prompts)


# the run


def tiny(folder, out, **settings):
    return ReviewsConfig(
        **dict(
            data=folder,
            output_dir=out,
            even_if_worse=True,
            held_out=20,
            vocab_size=300,
            hidden_size=16,
            layers=1,
            heads=2,
            context=64,
            sft_steps=15,
            rm_epochs=2.0,
            rm_batch_tokens=256,
            steps=2,
            batch_size=8,
            max_new_tokens=8,
            eval_samples=12,
            baseline_prompts=3,
            best_of=2,
            tune_steps=2,
            progress=False,
        )
        | settings
    )


def test_what_a_run_writes(folder, tmp_path, monkeypatch, capsys):
    state = torch.get_rng_state()
    made = []
    make = ratings.make_trainer
    out = tmp_path / "a"
    monkeypatch.setattr(ratings, "make_trainer", lambda *args: made.append(make(*args)) or made[0])
    summary = run_reviews(tiny(folder, out))
    assert (
        torch.get_rng_state().equal(state) and made[0].config.missing_eos_penalty == 0.5
    )  # the global generator is left alone
    assert {"pair_accuracy", "pair_accuracy_margin_1", "ceiling"} <= set(summary["reward_model"])
    assert set(summary["judges"]) == {"reward_model", "vader", "half_of_the_raters"}
    for figures in (summary["before"], summary["after"]):
        assert {"vader_compound", "reward_model_score", "distinct_2", "response_length"} <= set(
            figures
        )
    assert summary["before"]["kl_to_reference"] == 0 < summary["after"]["kl_to_reference"]
    assert (
        json.loads((out / "summary.json").read_text("utf-8"))["after"] == summary["after"]
        and len((out / "metrics.jsonl").read_text().splitlines()) == 2
    )
    assert {p.name for p in out.iterdir()} >= {
        "sft",
        "reward_model",
        "policy",
        "samples.md",
        "config.json",
        "reward_and_kl.png",
        "entropy.png",
    }
    assert "vader" in capsys.readouterr().out


def test_goes_on_where_it_stopped(folder, tmp_path):
    "With dropout and hidden words, whose random numbers belong to the state."

    def result(out):
        summary = {
            k: v
            for k, v in json.loads((out / "summary.json").read_text("utf-8")).items()
            if "seconds" not in k and k != "resumed_from"
        }
        log = [
            {k: v for k, v in json.loads(line).items() if "second" not in k}
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        return (
            summary,
            log,
            (out / "samples.md").read_text(),
            [
                (out / d / "model.safetensors").read_bytes()
                for d in ("sft", "reward_model", "policy")
            ],
        )

    whole = tmp_path / "whole"
    best = dict(eval_every=1, keep_best=True)
    assert run_reviews(tiny(folder, whole, save_every=1, keep=1000, **best))["best_iteration"] in (
        1,
        2,
    )
    places = [load_checkpoint(p)[1]["progress"] for p in checkpoints(whole / "checkpoints")]
    for stage in ("reward model", "ppo"):
        n = next(i for i, (name, at, of) in enumerate(places) if name == stage and at < of)
        out = tmp_path / stage
        shutil.copytree(whole, out)
        (out / "summary.json").unlink()
        for path in checkpoints(out / "checkpoints")[n + 1 :]:
            shutil.rmtree(path)
        torch.rand(5)
        assert run_reviews(tiny(folder, out, resume=True, **best))["resumed_from"] == (
            places[n][1] if stage == "ppo" else stage
        )
        assert result(out) == result(whole)
    (out / "summary.json").unlink()
    corpus(folder, 61)
    with pytest.raises(ValueError, match="other settings: SHA-256 of the data was"):
        run_reviews(tiny(folder, out, resume=True, **best))


def test_nothing_is_written_before_the_data_are_good(folder, tmp_path):
    with pytest.raises(ValueError, match="held_out=59"):
        run_reviews(tiny(folder, tmp_path / "a", held_out=59))
    (folder / RATINGS).write_bytes(b"")
    with pytest.raises(ValueError, match="stands in this file alone"):
        run_reviews(tiny(folder, tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_a_reward_model_that_loses_stops_the_run_and_may_go_on(tmp_path, capsys):
    "Five steps teach it nothing, and VADER knows the words; resumed with even_if_worse, no stage is done twice."
    few = dict(sft_steps=5, rm_epochs=0.5, baselines=False)
    folder = corpus(tmp_path / "data", 90)
    out = tmp_path / "run"
    with pytest.raises(
        ValueError,
        match=r"reward model has 0?\.\d+ of the held-out pairs .* VADER.*--even-if-worse",
    ):
        run_reviews(tiny(folder, out, even_if_worse=False, **few))
    assert (
        (out / "reward_model" / "model.safetensors").exists()
        and not (out / "policy").exists()
        and not (out / "metrics.jsonl").exists()
    )
    assert f"{out} --resume --even-if-worse" in capsys.readouterr().err
    summary = run_reviews(tiny(folder, out, resume=True, **few))
    assert (
        summary["resumed_from"] == "reward model"
        and summary["judges"]["vader"]["pair_accuracy"]
        > summary["judges"]["reward_model"]["pair_accuracy"]
    )


@real
def test_the_real_files_and_the_baselines_on_them():
    reviews, other = read_rated(REAL)
    assert (
        len(reviews) == 10_605
        and min(len(r.ratings) for r in reviews) == 15
        and len(other) >= 3_700 * (REAL / "amazonReviewSnippets_GroundTruth.txt").exists()
    )
    truth = {
        line.split("\t")[0]: float(line.split("\t")[1])
        for line in (REAL / TEXTS).read_text("utf-8-sig").splitlines()
    }
    assert max(abs(r.mean - truth[r.id]) for r in reviews) < 1e-6 and not any(
        "&amp;" in r.text or "  " in r.text for r in reviews
    )
    found = beside_baselines({}, split_reviews(reviews)[1])
    for name, share in {"vader": (0.647, 0.694), "half_of_the_raters": (0.91, 0.99)}.items():
        assert list(found[name].values()) == pytest.approx(share, abs=0.001)


def write(place, lines, name=TEXTS):
    (place / name).write_text("\n".join(lines), "utf-8")


@pytest.fixture
def made_folder(tmp_path):
    write(tmp_path, ["1\t0\ta &amp;  b", "2\t0\tc"])
    write(tmp_path, ["2\t0\t1\t[-4, 4]", "1\t0\t1\t[ 1, -1 ,0 ]"], RATINGS)
    return tmp_path


def test_texts_and_ratings_are_joined_by_their_id(made_folder):
    reviews, others = read_rated(made_folder)
    assert reviews == [Review("1", "a & b", (1, -1, 0)), Review("2", "c", (-4, 4))]
    assert others == [] and [review.mean for review in reviews] == [0, 0]
    write(made_folder, ["", "1\t0\td", "", "2\t0\te", ""], "z_GroundTruth.txt")  # blank lines
    write(made_folder, ["3\t0\tf"], "a_GroundTruth.txt")
    assert read_rated(made_folder) == (reviews, ["f", "d", "e"])


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
def test_ratings_are_two_or_more_whole_numbers_from_minus_4_to_4(cell, is_read, made_folder):
    write(made_folder, [f"1\t0\t1\t{cell}", "2\t0\t1\t[1, 2]"], RATINGS)
    if is_read:
        assert len(read_rated(made_folder)[0]) == 2
    else:
        with pytest.raises(ValueError, match=re.escape(f"{RATINGS}, line 1: the ratings")):
            read_rated(made_folder)


@pytest.mark.parametrize("missing", [TEXTS, RATINGS])
def test_both_files_are_needed(missing, made_folder):
    (made_folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match="are needed|is needed"):
        read_rated(made_folder)


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
def test_a_bad_line_is_named(name, line, says, made_folder):
    (made_folder / name).write_text((made_folder / name).read_text() + "\n" + line)
    with pytest.raises(ValueError, match=f"{name}, {says}"):
        read_rated(made_folder)


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
