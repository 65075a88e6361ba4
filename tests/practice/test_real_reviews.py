"""A tiny set in the format of the real files, with their quirks; and the real files where they lie beside the repository."""
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.models.reward import all_pairs_loss
from instruct_goose.objective.group import PRESETS
from instruct_goose.practice.real_reviews import (
    RATINGS,
    TEXTS,
    Review,
    ReviewsConfig,
    RidgeBagOfWords,
    both_margins,
    load_other_texts,
    load_reviews,
    make_data,
    preferences,
    ranking,
    run_reviews,
    soft_pairs_loss,
    split_half,
    split_reviews,
    vader_compound,
)

REAL = Path(__file__).parents[3] / "shared/data/icwsm2014"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the rated sentences are not beside this repository (../shared/data/icwsm2014)")
WORTH = {"superb": 3, "good": 2, "fine": 1, "long": 0, "dull": -2, "awful": -3}


def table(rows, bom=False, end="\r\n", last=""): return (b"\xef\xbb\xbf" if bom else b"") + (end.join("\t".join(r) for r in rows) + last).encode()


def write(directory, n=60, end="\r\n", last="", boms=(False, True)):
    "Odd numbers of raters, one row with 99, entities, accents, blanks, ids that are not numbers, rows in another order."
    rng, texts, ratings = random.Random(0), [], []
    for i in range(n):
        a, b = rng.choice(list(WORTH)), rng.choice(list(WORTH))
        scores = [max(-4, min(4, round(rng.gauss((WORTH[a] + WORTH[b]) / 2, 1)))) for _ in range(99 if i == 3 else 15 + rng.randrange(15))]
        mean = sum(scores) / len(scores)
        texts.append((f"{i % 7}_{i}", f"{mean:.12g}", f"A {a} film &amp;  a {b} fiancé,  nº {i} &#8211; &quot;so&quot; "))
        ratings.append((f"{i % 7}_{i}", f"{mean:.10g}", "1.0", str(scores)))
    rng.shuffle(ratings)
    directory.mkdir(exist_ok=True)
    (directory / TEXTS).write_bytes(table(texts, boms[0], end, last))
    (directory / RATINGS).write_bytes(table(ratings, boms[1], end, last))
    return directory


@pytest.fixture
def folder(tmp_path): return write(tmp_path / "data")


def edit(folder, name, pattern, replacement, flags=re.M):
    path = folder / name
    before = path.read_bytes()
    after = re.sub(pattern, replacement, before, count=1, flags=flags)
    assert after != before
    path.write_bytes(after)


# the loader

def test_loads_the_quirks(folder):
    reviews = load_reviews(folder)
    assert len(reviews) == 60 and [r.id for r in reviews[:3]] == ["0_0", "1_1", "2_2"] and len(reviews[3].ratings) == 99
    assert re.fullmatch(r'A \w+ film & a \w+ fiancé, nº 5 – "so"', reviews[5].text)
    assert all(r.mean == pytest.approx(sum(r.ratings) / len(r.ratings)) and -4 <= min(r.ratings) for r in reviews)


@pytest.mark.parametrize("end, last, boms", [("\n", "", (False, False)), ("\n", "\n", (True, True)), ("\r\n", "\r\n\r\n", (True, False))])
def test_line_ends_and_marks_do_not_matter(folder, tmp_path, end, last, boms):
    assert load_reviews(write(tmp_path / "other", end=end, last=last, boms=boms)) == load_reviews(folder)


@pytest.mark.parametrize("name, pattern, replacement, message", [
    (TEXTS, rb"^1_1\t", b"x_1\t", r"anonDataRatings.txt has no row with the id 'x_1' \(and 0 more\)"),
    (RATINGS, rb"^1_1\t", b"x_1\t", r"anonDataRatings.txt has no row with the id '1_1'"),
    (RATINGS, rb"^1_1\t.*\r\n", b"", r"no row with the id '1_1'"),
    (TEXTS, rb"^1_1\t.*\r\n", b"", r"GroundTruth.txt has no row with the id '1_1'"),
    (TEXTS, rb"^1_1\t", b"0_0\t", r"GroundTruth.txt, line 2: the id '0_0' stands on line 1 already"),
    (TEXTS, rb"^(2_2\t[^\t]*)\t", rb"\1 ", r"GroundTruth.txt, line 3: 2 columns, expected 3, separated by tabs: '2_2"),
    (TEXTS, rb"^(2_2\t)[^\t]*", rb"\1n/a", r"GroundTruth.txt, line 3: the mean rating 'n/a' is not a number from −4 to 4"),
    (TEXTS, rb"^(2_2\t)[^\t]*", rb"\1nan", r"line 3: the mean rating 'nan'"),
    (TEXTS, rb"^(2_2\t)[^\t]*", rb"\g<1>4.2", r"line 3: the mean rating '4.2'"),
    (TEXTS, rb"^(2_2\t)[^\t]*", rb"\1-3.99", r"line 3: the mean is -3.99, but the ratings of id '2_2' .*: the ids do not match"),
    (TEXTS, rb"^(2_2\t[^\t]*\t)[^\r]*", rb"\1  ", r"line 3: no text"),
    (TEXTS, "é".encode(), "é".encode("latin-1"), r"line 1: not UTF-8"),
    (RATINGS, rb"\]", b"", r"line 1: the ratings .* are not a list of whole numbers"),
    (RATINGS, rb"\[", b"[5, ", r"line 1: the ratings .* hold 5: the scale goes from −4 to 4"),
    (RATINGS, rb"\[", b"[-5, ", r"hold -5"),
    (RATINGS, rb"\[", b"[0.5, ", r"whole numbers"),
    (RATINGS, rb"\[", b"[true, ", r"whole numbers"),
    (RATINGS, rb"\[", b'["3", ', r"whole numbers"),
    (RATINGS, rb"\[.*", b"[]", r"nobody's opinion"),
    (RATINGS, rb"\[.*", b"3", r"whole numbers"),
    (RATINGS, rb".*", b"", r"is empty"),
    (TEXTS, rb".*", b"", r"is empty"),
])
def test_says_what_is_wrong_and_where(folder, name, pattern, replacement, message):
    edit(folder, name, pattern, replacement, flags=re.S if replacement == b"" and pattern == rb".*" else re.M)
    with pytest.raises(ValueError, match=message) as e: load_reviews(folder)
    assert str(folder) in str(e.value) and len(str(e.value)) < 500


@pytest.mark.parametrize("name", [TEXTS, RATINGS])
def test_missing_files(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing: give the directory that holds"): load_reviews(folder)
    with pytest.raises(FileNotFoundError): load_reviews(folder / "nowhere")


def test_other_texts(folder):
    assert load_other_texts(folder) == []
    (folder / "bReviewSnippets_GroundTruth.txt").write_bytes(table([("1_1", "0.1", "b &lt; c"), ("1_2", "0.1", " ")], bom=True))
    (folder / "aSnippets_GroundTruth.txt").write_bytes(table([("1_1", "anything", "first")]))
    (folder / "aSnippets_anonDataRatings.txt").write_bytes(b"not read")
    assert load_other_texts(folder) == ["first", "b < c"]


def test_split(folder):
    reviews = load_reviews(folder)
    train, held_out = split_reviews(reviews, 20)
    assert len(held_out) == 20 and len(train) == 40 and {r.id for r in train}.isdisjoint(r.id for r in held_out)
    twin = Review("twin", held_out[0].text.upper(), (1,))
    part = split_reviews([*reviews, twin], 20)
    assert not {r.text.lower() for r in part[0]} & {r.text.lower() for r in part[1]}
    for n in (1, 59, 100):
        with pytest.raises(ValueError, match=f"held_out={n} of 60"): split_reviews(reviews, n)


# judging judges

@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-6, 6)), min_size=2, max_size=10), st.sampled_from([0., 1., 2.]))
@settings(deadline=None, max_examples=60)
def test_ranking_is_the_double_loop(items, margin):
    scores, means = ([x / 2 for x in column] for column in zip(*items, strict=True))
    pairs = [(i, j) for i, j in itertools.permutations(range(len(items)), 2) if means[i] > means[j] and means[i] - means[j] >= margin]
    if not pairs:
        with pytest.raises(ValueError, match="no two"): ranking(scores, means, margin)
        return
    slow = sum(1. if scores[i] > scores[j] else .5 if scores[i] == scores[j] else 0. for i, j in pairs) / len(pairs)
    assert ranking(scores, means, margin) == pytest.approx(slow, abs=1e-12)


def test_both_margins_and_split_half(folder):
    reviews = load_reviews(folder)
    means = [r.mean for r in reviews]
    assert both_margins(means, means) == {"pair_accuracy": 1., "pair_accuracy_margin_1": 1.}
    assert both_margins([0.] * 60, means) == {"pair_accuracy": .5, "pair_accuracy_margin_1": .5}
    assert split_half(reviews) == split_half(reviews) != split_half(reviews, seed=1)
    agree = [Review(str(i), "x", (i,) * 16) for i in range(-4, 5)]
    assert split_half(agree)["pair_accuracy"] == 1.
    assert split_half([Review("a", "x", (1,)), Review("b", "y", (-1,)), Review("c", "z", (2, 2, -2))])["pair_accuracy"] <= 1.


def test_ridge_is_the_dense_solution(folder):
    texts, means = zip(*[(r.text, r.mean) for r in load_reviews(folder)], strict=True)
    ridge = RidgeBagOfWords(texts, means, penalty=.7)
    bags = [set(re.findall(r"[a-z0-9']+|[^\sa-z0-9']", t.lower())) for t in texts]
    words = sorted(set().union(*bags))
    idf = {w: torch.tensor((1 + len(bags)) / (1 + sum(w in b for b in bags)), dtype=torch.float64).log() for w in words}
    X = torch.tensor([[idf[w] if w in b else 0. for w in words] for b in bags], dtype=torch.float64)
    X = X / X.norm(dim=1, keepdim=True)
    y = torch.tensor(means, dtype=torch.float64)
    w = torch.linalg.solve(X.T @ X + .7 * torch.eye(len(words), dtype=torch.float64), X.T @ (y - y.mean()))
    assert list(ridge.column) == words
    torch.testing.assert_close(ridge.weights, w, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(torch.tensor(ridge.score(texts), dtype=torch.float64), X @ w + y.mean(), atol=1e-7, rtol=1e-6)
    assert ridge.score(["unheard", ""]) == [pytest.approx(y.mean().item())] * 2


def test_vader():
    good, bad, none = vader_compound(["a superb film", "an awful film", "a film"])
    assert good > .5 and bad < -.4 and none == 0


# raters

rating_lists = st.lists(st.lists(st.integers(-4, 4), min_size=1, max_size=6), min_size=2, max_size=6)

@given(rating_lists)
@settings(deadline=None, max_examples=60)
def test_preferences_ask_every_pair_of_raters(ratings):
    P = preferences(ratings)
    for i, j in itertools.product(range(len(ratings)), repeat=2):
        wins = 0. if i == j else sum(a > b for a in ratings[i] for b in ratings[j]) / (len(ratings[i]) * len(ratings[j]))
        assert P[i, j].item() == pytest.approx(wins, abs=1e-6)


def test_soft_pairs_is_the_mean_over_all_draws():
    opinions, scores = [(3, 1, 2), (2, -1), (0, 1), (0,)], torch.tensor([.3, -.2, .1, .5], dtype=torch.float64)
    total = pairs = 0
    for drawn in itertools.product(*opinions):
        n = sum(a > b for a in drawn for b in drawn)
        total, pairs = total + n * all_pairs_loss(scores, torch.tensor(drawn)).item(), pairs + n
    assert soft_pairs_loss(scores, preferences(opinions).double()).item() == pytest.approx(total / pairs, abs=1e-7)


def test_soft_pairs_with_one_rater_each_is_all_pairs():
    scores, ratings = torch.randn(8), torch.randint(-4, 5, (8,))
    torch.testing.assert_close(soft_pairs_loss(scores, preferences([[y] for y in ratings.tolist()])), all_pairs_loss(scores, ratings))
    with pytest.raises(ValueError, match="no pair to learn from"): soft_pairs_loss(torch.zeros(2), preferences([[1, 1], [1]]))


# the run

def tiny(folder, out, **settings):
    return ReviewsConfig(**dict(data=folder, output_dir=out, held_out=20, vocab_size=300, hidden_size=16, layers=1, heads=2, context=64, sft_steps=15,
                                rm_epochs=2., rm_batch_tokens=256, steps=2, batch_size=8, max_new_tokens=8, eval_samples=12, baseline_prompts=3, best_of=2,
                                tune_steps=2, progress=False) | settings)


def test_run_twice_the_same(folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    state = torch.get_rng_state()
    first, second = (run_reviews(tiny(folder, tmp_path / name)) for name in "ab")
    assert torch.get_rng_state().equal(state)  # the global generator is left alone
    for summary in (first, second):
        for name in ("wall_seconds", "cpu_seconds"): assert summary.pop(name) >= 0
    assert first == second
    assert set(first) == {"seed", "torch_threads", "resumed_from", "stopped", "best_iteration", "sft", "reward_model", "judges", "before", "after", "baselines", "config", "versions"}
    assert {"pair_accuracy", "pair_accuracy_margin_1", "ceiling"} <= set(first["reward_model"])
    assert set(first["judges"]) == {"reward_model", "ridge", "vader", "half_of_the_raters"}
    for figures in (first["before"], first["after"]):
        assert figures["human_score"] is None and figures["grammatical"] is None
        assert {"vader_compound", "reward_model_score", "distinct_2", "kl_to_reference", "response_length"} <= set(figures)
    assert first["before"]["kl_to_reference"] == 0 and first["after"]["kl_to_reference"] > 0
    out = tmp_path / "a"
    written = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert written["after"] == first["after"] and len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert {p.name for p in out.iterdir()} >= {"sft", "reward_model", "policy", "samples.md", "config.json", "reward_and_kl.png", "entropy.png"}
    assert not list(out.rglob("*.bin")) and all((out / d / "model.safetensors").exists() for d in ("sft", "reward_model", "policy"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "policy"), AutoTokenizer.from_pretrained(out / "policy")
    assert model.generate(**tokenizer("a good", return_tensors="pt"), max_new_tokens=3).shape[1] >= 4
    assert AutoModelForSequenceClassification.from_pretrained(out / "reward_model").config.num_labels == 1
    assert "vader" in capsys.readouterr().out
    assert run_reviews(tiny(folder, tmp_path / "c", seed=1))["after"] != first["after"]


def test_goes_on_where_it_stopped(folder, tmp_path):
    "With dropout and hidden words, whose dice belong to the state."
    import shutil

    from instruct_goose.training.checkpoints import checkpoints, load_checkpoint

    def result(out):
        summary = {k: v for k, v in json.loads((out / "summary.json").read_text("utf-8")).items() if "seconds" not in k and k != "resumed_from"}
        log = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in (out / "metrics.jsonl").read_text().splitlines()]
        return summary, log, (out / "samples.md").read_text(), [(out / d / "model.safetensors").read_bytes() for d in ("sft", "reward_model", "policy")]

    whole = tmp_path / "whole"
    best = dict(eval_every=1, keep_best=True)
    assert run_reviews(tiny(folder, whole, save_every=1, keep=1000, **best))["best_iteration"] in (1, 2)
    places = [load_checkpoint(p)[1]["place"] for p in checkpoints(whole / "checkpoints")]
    assert {stage for stage, *_ in places} == {"sft", "reward model", "ppo"}  # the SFT model never ends a text here: no second baseline
    for stage in ("sft", "reward model", "ppo"):
        n = next(i for i, (name, at, of) in enumerate(places) if name == stage and at < of)
        out = tmp_path / stage
        shutil.copytree(whole, out); (out / "summary.json").unlink()
        for path in checkpoints(out / "checkpoints")[n + 1:]: shutil.rmtree(path)
        torch.rand(5)
        assert run_reviews(tiny(folder, out, resume=True, **best))["resumed_from"] == (places[n][1] if stage == "ppo" else stage)
        assert result(out) == result(whole)
    (out / "summary.json").unlink(); write(folder, 61)
    with pytest.raises(ValueError, match="other settings: SHA-256 of the data was"): run_reviews(tiny(folder, out, resume=True, **best))


def test_every_response_without_an_end_pays_the_greedy_one_too(folder, tmp_path):
    from instruct_goose.practice.real_reviews import FinishingTrainer, make_lm
    from instruct_goose.training.annotate import greedy_responses
    from instruct_goose.training.evaluation import ended

    config = tiny(folder, None, **PRESETS["remax"], unfinished_penalty=.25)
    data = make_data(config, load_reviews(folder))
    trainer = FinishingTrainer(make_lm(config, data.tokenizer).eval(), config=config, tokenizer=data.tokenizer)
    r = trainer.score(trainer.rollout(data.prompts[:8]), lambda texts: [1.] * 8)
    eos = data.tokenizer.eos_token_id
    assert r.scores.tolist() == [1. if e else .75 for e in ended(r, eos)]
    greedy, row = greedy_responses(trainer, r)
    assert r.baseline.tolist() == pytest.approx([1. if e else .75 for e in ended(greedy[row], eos)], abs=1e-6)  # the policy is its own reference: no drift


def test_nothing_is_written_before_the_data_are_good(folder, tmp_path):
    (folder / RATINGS).write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"): run_reviews(tiny(folder, tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="held_out=59"): run_reviews(tiny(write(folder), tmp_path / "a", held_out=59))
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir(); (tmp_path / "b" / "mine").write_text("x")
    with pytest.raises(FileExistsError): run_reviews(tiny(folder, tmp_path / "b"))
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["mine"]


@pytest.mark.parametrize("name, bad", [("sft_steps", 0), ("rm_epochs", 0.), ("rm_epochs", float("inf")), ("rm_dropout", 1.), ("rm_word_dropout", -.1), ("held_out", 1),
                                       ("prompt_words", (6, 2)), ("prompt_words", (0, 2)), ("heads", 3), ("context", 8), ("threads", 0), ("tune_lr", 0.), ("lam", 1.5)])
def test_settings_out_of_range(folder, name, bad):
    with pytest.raises(ValueError, match=name): tiny(folder, None, **{name: bad})


def test_long_texts_are_left_out(folder):
    edit(folder, TEXTS, rb"^(5_5\t[^\t]*\t)", rb"\1" + b"word " * 200)
    reviews = load_reviews(folder)
    data = make_data(tiny(folder, None), reviews)
    assert "5_5" not in {r.id for r in data.train + data.held_out} and len(data.train) + len(data.held_out) == 59
    assert all(1 <= len(p.split()) <= 6 for p in data.prompts + data.held_out_prompts)


# the real files

@real
def test_the_real_files():
    reviews = load_reviews(REAL)
    counts = [len(r.ratings) for r in reviews]
    assert len(reviews) == 10_605 and min(counts) == 15
    truth = {line.split("\t")[0]: float(line.split("\t")[1]) for line in (REAL / TEXTS).read_text("utf-8-sig").splitlines()}
    assert max(abs(r.mean - truth[r.id]) for r in reviews) < 1e-6
    assert not any("&amp;" in r.text or "\n" in r.text or "  " in r.text for r in reviews)
    if (REAL / "amazonReviewSnippets_GroundTruth.txt").exists(): assert len(load_other_texts(REAL)) >= 3_700


@real
def test_the_baselines_on_the_real_files():
    train, held_out = split_reviews(load_reviews(REAL))
    texts, means = [r.text for r in held_out], [r.mean for r in held_out]
    ridge = both_margins(RidgeBagOfWords([r.text for r in train], [r.mean for r in train]).score(texts), means)
    vader, people = both_margins(vader_compound(texts), means), split_half(held_out)
    assert ridge == pytest.approx({"pair_accuracy": .762, "pair_accuracy_margin_1": .853}, abs=.001)
    assert vader == pytest.approx({"pair_accuracy": .647, "pair_accuracy_margin_1": .694}, abs=.001)
    assert people["pair_accuracy"] == pytest.approx(.91, abs=.005)
