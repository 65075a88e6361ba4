"""The run on rated sentences, small enough for a few seconds: its loss, what it writes, where it goes on, what it refuses."""
import json
import re

import pytest
import torch
from rated_files import CODE, PRAISE, corpus, edit, write
from transformers import LlamaConfig, LlamaForCausalLM

from instruct_goose.models.loading import stand_in
from instruct_goose.recipes import real_reviews, stages
from instruct_goose.recipes.ratings import RATINGS, TEXTS, Review, load_reviews
from instruct_goose.recipes.real_reviews import (
    Judge,
    ReviewsConfig,
    review_data,
    run_reviews,
    stop_if_worse,
    train_on_states,
)


@pytest.fixture
def folder(tmp_path): return write(tmp_path / "data")


# the run

def tiny(folder, out, **settings):
    return ReviewsConfig(**dict(data=folder, output_dir=out, even_if_worse=True, held_out=20, vocab_size=300, hidden_size=16, layers=1, heads=2, context=64, sft_steps=15,
                                rm_epochs=2., rm_batch_tokens=256, steps=2, batch_size=8, max_new_tokens=8, eval_samples=12, baseline_prompts=3, best_of=2,
                                tune_steps=2, progress=False) | settings)


def test_what_a_run_writes(folder, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    state, made = torch.get_rng_state(), []
    make = real_reviews.make_trainer
    monkeypatch.setattr(real_reviews, "make_trainer", lambda *args: made.append(make(*args)) or made[0])
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


@pytest.mark.parametrize("own, ridge, vader, named", [(.633, .651, .667, "ridge 0.651, vader 0.667"), (.66, .651, .667, "vader 0.667"), (.66, .7, .6, "ridge 0.700"), (.7, .7, .6, None), (.8, .7, .6, None)])
def test_whom_it_may_lose_to(own, ridge, vader, named):
    judges = {k: {"pair_accuracy": x, "pair_accuracy_margin_1": 1.} for k, x in dict(reward_model=own, ridge=ridge, vader=vader, half_of_the_raters=.9).items()}
    stop_if_worse(judges, even_so=True)
    if named is None: return stop_if_worse(judges)
    with pytest.raises(ValueError, match=f"and {named}: PPO"): stop_if_worse(judges)


def test_a_collapse_is_in_the_summary(tmp_path, monkeypatch):
    "A judge that likes only short texts, as the one that was fooled did; the policy's log is made up, the rest runs."
    train = stages.train_policy
    def shrinking(*args):
        rows = train(*args)
        return [rows[0] | {"iteration": i, "response_length": max(3.3, 17.4 - 3 * i), "distinct_2": max(.05, .7 - .1 * i)} for i in range(12)]
    monkeypatch.setattr(stages, "train_policy", shrinking)
    summary = run_reviews(tiny(corpus(tmp_path / "data", "a", 90, PRAISE, 3), tmp_path / "run", sft_steps=5, rm_epochs=.5, baselines=False))
    found = {f["name"]: f["evidence"] for f in summary["findings"]}
    assert found["length collapse"] == "response_length fell from 14.4 to 3.3 tokens" and "variety collapse" in found


def test_long_texts_are_left_out(folder):
    edit(folder, TEXTS, rb"^(5_5\t[^\t]*\t)", rb"\1" + b"word " * 200)
    reviews = load_reviews(folder)
    data = review_data(tiny(folder, None), reviews)
    assert "5_5" not in {r.id for r in data.train + data.held_out} and len(data.train) + len(data.held_out) == 59
    assert all(1 <= len(p.split()) <= 6 for p in data.prompts + data.held_out_prompts)


# a reward model on layers that are computed once

SAID = ["a fine film", "the plot", "a slow and silly film the plot is dull", "fine"]
WORDS = sorted({w for t in SAID for w in t.split()} | {"is", "it", "good"})
ASK = " is it good"


def model(layers=4):
    tokenizer = stand_in(WORDS)[1]
    torch.manual_seed(3)
    shape = LlamaConfig(vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=3, num_key_value_heads=1,
                        initializer_range=.2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    return LlamaForCausalLM(shape).eval(), tokenizer


def judge_with_a_head(frozen=2, trained=1):
    lm, tokenizer = model()
    judge = Judge(lm, tokenizer, frozen, trained, ASK)
    with torch.no_grad(): judge.learns[-1].weight.copy_(torch.linspace(-1, 1, 24)[None])
    return lm, judge


def test_both_halves_of_the_forward_beside_the_models_own_states():
    lm, judge = judge_with_a_head()
    states = judge.lower_states(SAID, batch_tokens=14)
    found, w = judge.upper_scores(states), torch.linspace(-1, 1, 24)
    for text, x, stored in zip(SAID, states, found, strict=True):       # row by row, without padding, in the untouched model
        ids = torch.tensor([[lm.config.vocab_size and judge.reward_model.tokenizer.convert_tokens_to_ids(t) for t in (text + ASK).split()]])
        hidden = lm.model(ids, output_hidden_states=True).hidden_states   # hidden[k]: what goes into layer k
        torch.testing.assert_close(x.float(), hidden[2][0], rtol=8e-3, atol=8e-3)   # bfloat16 has 8 bits
        last = hidden[3][0, -1]
        whole = (last / (last.square().mean() + lm.config.rms_norm_eps).sqrt()) @ w    # the norm's weights are 1
        assert judge.score([text])[0] == pytest.approx(whole.item(), rel=1e-4, abs=1e-5)
        assert stored.item() == pytest.approx(whole.item(), abs=.08)
    assert found.std() > .3


def test_scores_are_of_the_text_before_the_padding():
    _, judge = judge_with_a_head()
    states = [torch.randn(n, 24) for n in (3, 9, 5)]
    together = judge.upper_scores(states)
    for x, score in zip(states, together, strict=True): torch.testing.assert_close(judge.upper_scores([x])[0], score, rtol=1e-4, atol=1e-5)


def test_layers_are_put_back_whatever_happens():
    judge = Judge(*model(), 2, 1, ASK)
    layers, norm = judge.body.layers, judge.body.norm
    with pytest.raises(KeyError), judge.only(1, 2) as body:
        assert len(body.layers) == 1 and body.layers[0] is layers[1] and body.norm is not norm
        raise KeyError
    assert judge.body.layers is layers and judge.body.norm is norm
    with judge.only(1, 3) as body: assert body.norm is norm


@pytest.mark.parametrize("frozen, trained", [(0, 1), (2, 0), (3, 2)])
def test_layers_that_are_not_there(frozen, trained):
    with pytest.raises(ValueError, match="no more than the model's 4"): Judge(*model(), frozen, trained, ASK)


def rated(n=60):
    rows = []
    for i in range(n):
        good = i % 3 - 1
        rows.append(Review(str(i), ["a dull film", "the plot", "a fine film"][i % 3] + " and" * (i % 4), (2 * good, 2 * good + 1, 2 * good - 1, i % 2)))
    return rows


def test_only_the_upper_layers_learn_and_come_back_from_a_file(tmp_path):
    lm, tokenizer = model()
    judge, reviews = Judge(lm, tokenizer, 2, 1, ASK), rated()
    before = {k: x.clone() for k, x in judge.reward_model.state_dict().items()}
    states = judge.lower_states([r.text for r in reviews])
    log = train_on_states(judge, reviews, states, epochs=8., lr=3e-3, batch_size=20, progress=False)
    assert len(log) == 24 and log[0]["loss"] == pytest.approx(.6931, abs=1e-3) and log[-1]["loss"] < .6
    moved = {k for k, x in judge.reward_model.state_dict().items() if not torch.equal(x, before[k])}
    assert {re.sub(r".*layers\.(\d).*", r"\1", k) for k in moved if "layers." in k} == {"2"} and len([k for k in moved if "layers.2" in k]) == 9
    assert not any("embed" in k for k in moved) and not any(p.requires_grad for p in judge.reward_model.parameters())
    judge.normalise(SAID)
    scores = torch.tensor(judge.score(SAID))
    assert scores.mean().abs() < 1e-5 and scores.std(correction=0) == pytest.approx(1, abs=1e-5)
    judge.save(tmp_path / "judges" / "one.safetensors")
    again = Judge(lm, tokenizer, 2, 1, ASK)
    again.load(tmp_path / "judges" / "one.safetensors")
    assert again.score(SAID) == judge.score(SAID)
    with pytest.raises(RuntimeError, match="layers|Missing|Unexpected|key"): Judge(lm, tokenizer, 2, 2, ASK).load(tmp_path / "judges" / "one.safetensors")
