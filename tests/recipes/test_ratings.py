"""A tiny set in the format of the real files, with their quirks; and the real files where they lie beside the repository."""
import json
import re
from pathlib import Path

import pytest
import torch
from rated_files import CODE, PRAISE, corpus, edit, table, write

from instruct_goose.recipes import ratings, stages
from instruct_goose.recipes.ratings import (
    RATINGS,
    TEXTS,
    Review,
    ReviewsConfig,
    RidgeBagOfWords,
    both_margins,
    find_files,
    load_reviews,
    read_rated,
    review_data,
    run_reviews,
    split_half,
    split_reviews,
    stop_if_worse,
    two_halves,
    vader_compound,
)

REAL = Path(__file__).parents[3] / "shared/data/icwsm2014"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the rated sentences are not beside this repository (../shared/data/icwsm2014)")

@pytest.fixture
def folder(tmp_path): return write(tmp_path / "data")


# the loader

def test_loads_the_quirks(folder):
    reviews = load_reviews(folder)
    assert len(reviews) == 60 and [r.id for r in reviews[:3]] == ["0_0", "1_1", "2_2"] and len(reviews[3].ratings) == 99
    assert re.fullmatch(r'A \w+ film & a \w+ fiancé, nº 5 – "so"', reviews[5].text)
    assert all(r.mean == pytest.approx(sum(r.ratings) / len(r.ratings)) and -4 <= min(r.ratings) for r in reviews)


@pytest.mark.parametrize("end, last, boms", [("\n", "", (False, False)), ("\n", "\n", (True, True)), ("\r\n", "\r\n\r\n", (True, False))])
def test_line_ends_and_marks_do_not_matter(folder, tmp_path, end, last, boms):
    assert load_reviews(write(tmp_path / "other", end=end, last=last, boms=boms)) == load_reviews(folder)


@pytest.mark.parametrize("name, pattern, replacement, reasons, lost", [
    (TEXTS, rb"^1_1\t", b"x_1\t", [r"anonDataRatings.txt, line \d+: the id '1_1' has no row in movie", r"GroundTruth.txt, line 2: the id 'x_1' has no row in movie"], "1_1"),
    (TEXTS, rb"^1_1\t.*\r\n", b"", [r"anonDataRatings.txt, line \d+: the id '1_1' has no row"], "1_1"),
    (TEXTS, rb"\A", b"0_0\t3\tfirst\r\n", [r"GroundTruth.txt, line 2: the id '0_0' stands there already, .* line 1"], None),
    (TEXTS, rb"^(2_2\t[^\t]*)\t", rb"\1 ", [r"GroundTruth.txt, line 3: 2 columns, expected 3", "the id '2_2' has no row"], "2_2"),
    (TEXTS, rb"^(2_2\t[^\t]*\t)[^\r]*", rb"\1  ", [r"line 3: no text"], "2_2"),
    (TEXTS, "é".encode(), "é".encode("latin-1"), [r"line 1: not UTF-8", "the id '0_0' has no row"], "0_0"),
    (RATINGS, rb"^(2_2\t.*)\]", rb"\1", [r"line \d+: the ratings .* are not a list of whole numbers"], "2_2"),
    (RATINGS, rb"^(2_2\t.*)\[", rb"\1[5, ", ["from −4 to 4"], "2_2"),
    (RATINGS, rb"^(2_2\t.*)\[", rb"\1[true, ", ["whole numbers"], "2_2"),
    (RATINGS, rb"^(2_2\t.*)\[.*", rb"\1[]", ["whole numbers"], "2_2"),
    (RATINGS, rb"^(2_2\t.*)\[.*", rb"\1" + b"[" * 100_000, ["whole numbers"], "2_2"),
])
def test_a_bad_row_is_left_out_and_named(folder, name, pattern, replacement, reasons, lost):
    before = load_reviews(folder)
    edit(folder, name, pattern, replacement)
    rated = read_rated(folder)
    assert len(rated.left_out) == len(reasons) and all(any(re.search(why, said) for said in rated.left_out) for why in reasons), rated.left_out
    assert max(map(len, rated.left_out)) < 200 and not [i for i in rated.means_off if i != "0_0"]
    same = lambda reviews: [r for r in reviews if r.id != "0_0"]
    assert same(rated.reviews) == [r for r in same(before) if r.id != lost] and rated.counts()["left_out"] == len(reasons)


@pytest.mark.parametrize("mean, off", [(b"n/a", True), (b"nan", True), (b"4.2", True), (b"-3.99", True), (b"inf", True), (b"", False), (b" ", False)])
def test_between_a_mean_and_the_ratings_the_raters_win(folder, mean, off):
    before = load_reviews(folder)
    edit(folder, TEXTS, rb"^(2_2\t)[^\t]*", rb"\g<1>" + mean)
    rated = read_rated(folder)
    assert rated.reviews == before and rated.means_off == ["2_2"] * off and not rated.left_out
    assert ("In 1 rows the mean is not that of the ratings" in str(rated)) == off


def test_files_that_do_not_belong_together_are_refused(folder):
    text = (folder / TEXTS).read_bytes()
    (folder / TEXTS).write_bytes(re.sub(rb"(?m)^(\d_)(\d+)\t", lambda m: b"%d_%d\t" % ((int(m[2]) + 1) % 60 % 7, (int(m[2]) + 1) % 60), text))
    with pytest.raises(ValueError, match=r"in \d+ of 60 rows the mean is not that of the ratings.*ids do not match"): read_rated(folder)
    (folder / TEXTS).write_bytes(text.replace(b"_", b"-", 40))
    with pytest.raises(ValueError, match=r"only \d+ of 60 rows can be used. The first that cannot: "): read_rated(folder)
    (folder / TEXTS).write_bytes(text); edit(folder, RATINGS, rb".*", b"", re.S)
    with pytest.raises(FileNotFoundError, match="holds no rated sentences: there must be a file of texts"): read_rated(folder)


def test_any_names_and_several_sets_side_by_side(tmp_path):
    one = corpus(tmp_path / "all", "a", 70, PRAISE, 0, wrong_means=3)
    assert [p.name for p in find_files(one)[:2]] == ["said.tsv", "scores.tsv"]
    rated = read_rated(one)
    assert len(rated.reviews) == 70 and rated.means_off == ["a0", "a1", "a2"] and rated.other_texts == [] and not rated.left_out
    corpus(one, "b", 20, CODE, 1, names=("b texts", "b ratings.csv")); (one / "README.md").write_text("about"); (one / "image").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"several files of ratings, b ratings.csv, scores.tsv: give one of them"): read_rated(one)
    for name, n, others in (("said.tsv", 70, 0), ("scores.tsv", 70, 0), ("b texts", 20, 0), ("b ratings.csv", 20, 0)):
        found = read_rated(one / name)
        assert (len(found.reviews), len(found.other_texts)) == (n, others)
    with pytest.raises(FileNotFoundError, match="README.md holds no rated sentences"): read_rated(one / "README.md")
    write(one); assert len(read_rated(one).reviews) == 60 and len(read_rated(one).other_texts) == 90  # Hutto & Gilbert's come first


def test_other_texts(folder):
    assert read_rated(folder).other_texts == []
    (folder / "bReviewSnippets_GroundTruth.txt").write_bytes(table([("1_1", "0.1", "b &lt; c"), ("1_2", "0.1", " ")], bom=True))
    (folder / "aSnippets_GroundTruth.txt").write_bytes(table([("1_1", "anything", "first")]))
    (folder / "aSnippets_anonDataRatings.txt").write_bytes(b"not read")
    assert read_rated(folder).other_texts == ["first", "b < c"]


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

def test_both_margins_and_split_half(folder):
    reviews = load_reviews(folder)
    means = [r.mean for r in reviews]
    assert both_margins(means, means) == {"pair_accuracy": 1., "pair_accuracy_margin_1": 1.}
    assert both_margins([0.] * 60, means) == {"pair_accuracy": .5, "pair_accuracy_margin_1": .5}
    assert split_half(reviews) == split_half(reviews) != split_half(reviews, seed=1)
    agree = [Review(str(i), "x", (i,) * 16) for i in range(-4, 5)]
    assert split_half(agree)["pair_accuracy"] == 1.
    assert split_half([Review("a", "x", (1,)), Review("b", "y", (-1,)), Review("c", "z", (2, 2, -2))])["pair_accuracy"] <= 1.


def test_raters_are_dealt_and_nobody_is_in_both_halves():
    reviews = [Review("a", "x", (1, 2, 3, 4, -4)), Review("b", "y", (0, -1))]
    first, second = two_halves(reviews, 5)
    for r, a, b in zip(reviews, first, second, strict=True):
        assert sorted(a.ratings + b.ratings) == sorted(r.ratings) and (len(a.ratings), len(b.ratings)) == (len(r.ratings) // 2, (len(r.ratings) + 1) // 2)
    assert two_halves(reviews, 5) == (first, second) and any(two_halves(reviews, s)[0] != first for s in range(6, 12))
    with pytest.raises(ValueError, match="'c' has 1 rater"): two_halves([Review("c", "z", (1,))])


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


# the run

def tiny(folder, out, **settings):
    return ReviewsConfig(**dict(data=folder, output_dir=out, even_if_worse=True, held_out=20, vocab_size=300, hidden_size=16, layers=1, heads=2, context=64, sft_steps=15,
                                rm_epochs=2., rm_batch_tokens=256, steps=2, batch_size=8, max_new_tokens=8, eval_samples=12, baseline_prompts=3, best_of=2,
                                tune_steps=2, progress=False) | settings)


def test_what_a_run_writes(folder, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    state, made = torch.get_rng_state(), []
    make = ratings.make_trainer
    monkeypatch.setattr(ratings, "make_trainer", lambda *args: made.append(make(*args)) or made[0])
    first = run_reviews(tiny(folder, tmp_path / "a", unfinished_penalty=.25))
    assert torch.get_rng_state().equal(state) and made[0].config.missing_eos_penalty == .25  # the global generator is left alone
    assert set(first) == {"seed", "wall_seconds", "cpu_seconds", "torch_threads", "resumed_from", "stopped", "best_iteration", "sft", "reward_model", "judges", "before", "after", "baselines", "config", "versions", "data", "findings", "samples"}
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


def test_goes_on_where_it_stopped(folder, tmp_path):
    "With dropout and hidden words, whose dice belong to the state."
    import shutil

    from instruct_goose.runs.checkpoints import checkpoints, load_checkpoint

    def result(out):
        summary = {k: v for k, v in json.loads((out / "summary.json").read_text("utf-8")).items() if "seconds" not in k and k != "resumed_from"}
        log = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in (out / "metrics.jsonl").read_text().splitlines()]
        return summary, log, (out / "samples.md").read_text(), [(out / d / "model.safetensors").read_bytes() for d in ("sft", "reward_model", "policy")]

    whole = tmp_path / "whole"
    best = dict(eval_every=1, keep_best=True)
    assert run_reviews(tiny(folder, whole, save_every=1, keep=1000, **best))["best_iteration"] in (1, 2)
    places = [load_checkpoint(p)[1]["place"] for p in checkpoints(whole / "checkpoints")]
    assert {stage for stage, *_ in places} == {"sft", "reward model", "ppo"}  # the SFT model never ends a text here: no second baseline
    for stage in ("reward model", "ppo"):
        n = next(i for i, (name, at, of) in enumerate(places) if name == stage and at < of)
        out = tmp_path / stage
        shutil.copytree(whole, out); (out / "summary.json").unlink()
        for path in checkpoints(out / "checkpoints")[n + 1:]: shutil.rmtree(path)
        torch.rand(5)
        assert run_reviews(tiny(folder, out, resume=True, **best))["resumed_from"] == (places[n][1] if stage == "ppo" else stage)
        assert result(out) == result(whole)
    (out / "summary.json").unlink(); write(folder, 61)
    with pytest.raises(ValueError, match="other settings: SHA-256 of the data was"): run_reviews(tiny(folder, out, resume=True, **best))


def test_nothing_is_written_before_the_data_are_good(folder, tmp_path):
    (folder / RATINGS).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="holds no rated sentences"): run_reviews(tiny(folder, tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="held_out=59"): run_reviews(tiny(write(folder), tmp_path / "a", held_out=59))
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir(); (tmp_path / "b" / "mine").write_text("x")
    with pytest.raises(FileExistsError): run_reviews(tiny(folder, tmp_path / "b"))
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["mine"]


def test_a_reward_model_that_loses_stops_the_run_and_may_go_on(tmp_path, capsys):
    "Five steps teach it nothing, and the ridge reads the words off; resumed with even_if_worse, no stage is done twice."
    few = dict(sft_steps=5, rm_epochs=.5, baselines=False)
    folder, out = corpus(tmp_path / "data", "a", 90, CODE, 2, wrong_means=4), tmp_path / "run"
    with pytest.raises(ValueError, match=r"reward model has 0?\.\d+ of the held-out pairs .* ridge 0.*--even-if-worse"): run_reviews(tiny(folder, out, even_if_worse=False, **few))
    assert (out / "reward_model" / "model.safetensors").exists() and not (out / "policy").exists() and not (out / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="even-if-worse"): run_reviews(tiny(folder, out, even_if_worse=False, resume=True, **few))
    before, err = capsys.readouterr()
    summary = run_reviews(tiny(folder, out, resume=True, **few))
    assert f"{out} --resume --even-if-worse" in err
    assert "the mean is not that of the ratings" in before and "Going on from" in capsys.readouterr().out
    assert summary["resumed_from"] == "reward model" and summary["data"] == {"reviews": 90, "left_out": 0, "means_off": 4, "reasons": []}
    assert summary["judges"]["ridge"]["pair_accuracy"] > summary["judges"]["reward_model"]["pair_accuracy"]


def test_whom_it_may_lose_to():
    def judges(own): return {k: {"pair_accuracy": x} for k, x in dict(reward_model=own, ridge=.651, vader=.667).items()}
    stop_if_worse(judges(.667)); stop_if_worse(judges(.6), even_so=True)
    with pytest.raises(ValueError, match=r"and vader 0.667: PPO"): stop_if_worse(judges(.66))
    with pytest.raises(ValueError, match=r"and ridge 0.651, vader 0.667: PPO"): stop_if_worse(judges(.633))


def test_a_collapse_is_in_the_summary(tmp_path, monkeypatch):
    "A judge that likes only short texts, as the one that was fooled did; the policy's log is made up, the rest runs."
    train = stages.train_policy
    def shrinking(*args):
        rows = train(*args)
        return [rows[0] | {"iteration": i, "response_length": max(3.3, 17.4 - 3 * i), "distinct_2": max(.05, .7 - .1 * i)} for i in range(12)]
    monkeypatch.setattr(stages, "train_policy", shrinking)
    summary = run_reviews(tiny(corpus(tmp_path / "data", "a", 90, PRAISE, 3), tmp_path / "run", sft_steps=5, rm_epochs=.5, baselines=False))
    found = {f["name"]: f["evidence"] for f in summary["findings"]}
    assert "from 14.4 to 3.3" in found["length collapse"] and "variety collapse" in found


def test_long_texts_are_left_out(folder):
    edit(folder, TEXTS, rb"^(5_5\t[^\t]*\t)", rb"\1" + b"word " * 200)
    reviews = load_reviews(folder)
    data = review_data(tiny(folder, None), reviews)
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
    if (REAL / "amazonReviewSnippets_GroundTruth.txt").exists(): assert len(read_rated(REAL).other_texts) >= 3_700


@real
def test_the_baselines_on_the_real_files():
    train, held_out = split_reviews(load_reviews(REAL))
    texts, means = [r.text for r in held_out], [r.mean for r in held_out]
    ridge = both_margins(RidgeBagOfWords([r.text for r in train], [r.mean for r in train]).score(texts), means)
    vader, people = both_margins(vader_compound(texts), means), split_half(held_out)
    assert ridge == pytest.approx({"pair_accuracy": .762, "pair_accuracy_margin_1": .853}, abs=.001)
    assert vader == pytest.approx({"pair_accuracy": .647, "pair_accuracy_margin_1": .694}, abs=.001)
    assert people["pair_accuracy"] == pytest.approx(.91, abs=.005)
