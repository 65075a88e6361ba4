"Rated sentences: small made-up files, a run on them, and the real files where they lie beside the repository."

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rated_files import corpus

from instruct_goose.recipes import ratings
from instruct_goose.recipes.ratings import (
    RATINGS,
    TEXTS,
    Review,
    ReviewsConfig,
    beside_baselines,
    read_rated,
    review_data,
    run_reviews,
    split_reviews,
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
