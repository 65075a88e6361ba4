"A run from Python that leaves everything on the disk. Oracles: a run that was never stopped, and the files as other programs read them."
import itertools
import json
import math

import pytest
from small_models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose import Agent, RLHFConfig, RLHFTrainer, model_card, push_to_hub
from instruct_goose.cli.main import main
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.evaluation import held_out_answers
from instruct_goose.training.callbacks import Callback

TOKENIZER = word_tokenizer("a b c d e f".split(), pad="<e>", bos="<e>", eos="<e>", unk="<u>", model_max_length=12)
ROWS = [{"prompt": "a b", "answer": "c"}, {"prompt": "d", "answer": "e"}, {"prompt": "f a", "answer": "c"}]


def right(completions, answer): return [text.split().count(a) for text, a in zip(completions, answer, strict=True)]


def trainer(steps=3, family="llama", value_model=None, **settings):
    config = RLHFConfig(**dict(batch_size=8, max_new_tokens=4, lr=.01, epochs=1) | settings, steps=steps)
    return RLHFTrainer(Agent(tiny(family), value_model), config=config, tokenizer=TOKENIZER)


def files(out, suffix): return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob(f"*.{suffix}") if "checkpoints" not in p.parts}


def log(out): return [{k: x for k, x in json.loads(line).items() if "second" not in k} for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_all_that_a_run_is_lies_in_its_directory(tmp_path):
    out, made = tmp_path / "runs/mine", trainer(value_model="copy")
    summary = made.train_in(out, ROWS, right, progress=False)
    assert summary == json.loads((out / "summary.json").read_text()) and summary["iterations"] == len(log(out)) == 3
    settings = json.loads((out / "config.json").read_text())
    assert settings["lr"] == .01 and settings["algorithm"] == "ppo" and summary["config"]["beta"] == settings["beta"]
    again, words = Agent.from_pretrained(out / "policy"), AutoTokenizer.from_pretrained(out / "policy")
    assert again.value_model is not None and again.value_head.weight.norm() > 0
    assert all(p.equal(q) for p, q in zip(again.parameters(), made.agent.parameters(), strict=True))
    assert words("a b")["input_ids"] == TOKENIZER("a b")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(out / "policy")
    assert all(p.equal(q) for p, q in zip(plain.parameters(), made.agent.model.parameters(), strict=True))
    RLHFTrainer(again, config=RLHFConfig(steps=1, batch_size=4, max_new_tokens=2), tokenizer=words).train(ROWS, right, progress=False)


def samples(out): return [[x.strip() for x in line.strip("|").split("|")] for line in (out / "samples.md").read_text().splitlines() if line.startswith("|")]


def test_samples_are_the_same_prompts_before_and_after_and_no_reward_is_asked(tmp_path):
    asked = []
    def counted(completions, answer): asked.append(len(completions)); return right(completions, answer)
    start, made = trainer(2, lr=.5), trainer(2, lr=.5)
    made.train_in(tmp_path / "run", ROWS, counted, progress=False, samples=2)
    assert asked == [8, 8]  # two iterations
    header, _, *rows = samples(tmp_path / "run")
    assert header == ["prompt", "before", "after"] and [r[0] for r in rows] == ["a b", "d"]
    for column, who in ((1, start), (2, made)):  # the dice of an evaluation, whoever throws them
        [r] = held_out_answers(who, ROWS[:2])
        words = [TOKENIZER.decode(ids[m], skip_special_tokens=True) for ids, m in zip(r.response_ids, r.mask, strict=True)]
        assert [row[column] for row in rows] == words
    assert [r[1] for r in rows] != [r[2] for r in rows]
    main(["report", str(tmp_path / "run")])
    assert all(word in (tmp_path / "run/report.html").read_text() for word in ("part-samples", *rows[0]))


@pytest.mark.parametrize("prompts, more, shown", [(lambda: itertools.cycle(ROWS), {}, None), (lambda: itertools.cycle(ROWS), {"held_out": ROWS[1:]}, ["d", "f a"]), (lambda: ROWS, {"samples": 0}, None)])
def test_nothing_is_taken_of_a_stream_for_samples(prompts, more, shown, tmp_path):
    trainer(1).train_in(tmp_path / "run", prompts(), right, progress=False, **more)
    assert (tmp_path / "run/samples.md").exists() == (shown is not None)
    if shown: assert [r[0] for r in samples(tmp_path / "run")[2:]] == shown and "Held-out" in (tmp_path / "run/samples.md").read_text()


class Stop(Callback):
    def on_annotate(self, trainer, rollout):
        if trainer.iteration == 2: raise KeyboardInterrupt


@pytest.mark.parametrize("stream, save_every", [(False, None), (True, 1)])
def test_stopped_resumed_and_made_longer_it_is_the_run_that_was_that_long(tmp_path, stream, save_every):
    def prompts(): return itertools.cycle(ROWS) if stream else ROWS
    trainer(4).train_in(tmp_path / "whole", prompts(), right, progress=False)
    first = trainer(3)
    first.callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt): first.train_in(tmp_path / "run", prompts(), right, save_every=save_every, progress=False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/policy") and not (tmp_path / "run/summary.json").exists()
    assert trainer(4).train_in(tmp_path / "run", prompts(), right, save_every=save_every, resume=True, progress=False)["resumed_from"] == 2
    assert log(tmp_path / "run") == log(tmp_path / "whole") and files(tmp_path / "run", "safetensors") == files(tmp_path / "whole", "safetensors")
    if not stream: assert samples(tmp_path / "run") == samples(tmp_path / "whole") and len(samples(tmp_path / "run")) == 2 + len(ROWS)


def test_what_is_refused_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "run"
    trainer(2).train_in(out, ROWS, right, save_every=None, progress=False)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    go = lambda made, **options: made.train_in(out, ROWS, right, progress=False, **options)
    with pytest.raises(FileExistsError, match="already holds a run"): go(trainer(2))
    with pytest.raises(ValueError, match="clip was 0.2 and is 0.3"): go(trainer(2, clip=.3), resume=True)
    with pytest.raises(ValueError, match="steps was 2 and is 1"): go(trainer(1), resume=True)
    with pytest.raises(ValueError, match="kept no checkpoint"): go(trainer(3), resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    done = trainer(2)
    assert go(done, resume=True)["iterations"] == 2  # nothing is trained, and the trainer has what was
    assert all(p.equal(q) for p, q in zip(done.agent.parameters(), Agent.from_pretrained(out / "policy").parameters(), strict=True))


def test_a_reward_that_fails_leaves_a_run_that_can_go_on(tmp_path):
    def fails(texts, broken=iter([False, False, True])):
        if next(broken): raise OSError("the judge is down")
        return [len(t) for t in texts]
    with pytest.raises(RuntimeError, match="the judge is down"): trainer(3).train_in(tmp_path / "run", ["a", "b c"], fails, progress=False)
    assert len(log(tmp_path / "run")) == 2
    assert trainer(3).train_in(tmp_path / "run", ["a", "b c"], lambda texts: [len(t) for t in texts], resume=True, progress=False)["resumed_from"] == 2


def test_the_best_policy_is_what_is_saved(tmp_path):
    made = trainer(4, eval_every=1, keep_best=True, lr=.5)
    summary = made.train_in(tmp_path / "run", ROWS, right, held_out=ROWS, progress=False)
    rewards = [m["held_out_reward"] for m in log(tmp_path / "run")]
    assert summary["best_iteration"] == 1 + rewards.index(max(rewards)) and "held_out_reward" in summary["last"]
    saved = Agent.from_pretrained(tmp_path / "run/policy").model
    assert all(p.equal(q) for p, q in zip(saved.parameters(), made.agent.model.parameters(), strict=True))


def test_a_trainer_without_a_tokenizer_saves_the_model_alone(tmp_path):
    config = RLHFConfig(steps=1, batch_size=4, max_new_tokens=2)
    RLHFTrainer(tiny(), config=config).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("tokenizer*")) and Agent.from_pretrained(tmp_path)


SUMMARY = {"model": "owner/name", "iterations": 7, "first": {"reward_mean": -1., "kl_to_reference": 0.}, "last": {"reward_mean": 2.5, "kl_to_reference": math.pi},
           "config": {"algorithm": "rloo", "lr": 2e-5, "beta": .1, "group_size": 4, "reward_weights": [1., 2.]}, "versions": {"torch": "2", "platform": "secret"}}


@pytest.mark.parametrize("base, named", [("owner/name", True), ("/home/me/model", False), (None, False), ("a/b/c", False)])
def test_a_card_says_what_was_done_and_nothing_of_the_machine(base, named):
    card = model_card(SUMMARY | {"model": base})
    _, header, body = card.split("---\n", 2)
    assert ("base_model: owner/name" in header) == named == ("owner/name" in body) and "/home" not in card and "secret" not in card
    assert "| -1.000 " in body and "3.142" in body and "RLOO, 7 iterations" in body and "[1.0, 2.0]" in body and "beta" not in body.split("## Settings")[1].split("## To load")[0]


def test_the_hub_is_given_policy_and_card(tmp_path, monkeypatch):
    seen = []
    class Api:
        def __init__(self, token=None): seen.append(token)
        def create_repo(self, *args, **options): seen.append((args, options)); return "https://hub/me/x"
        def upload_folder(self, **options): seen.append(options)
    monkeypatch.setattr("instruct_goose.runs.run_directory.HfApi", Api)
    with pytest.raises(FileNotFoundError, match="no policy with a card"): push_to_hub(tmp_path, "me/x")
    assert not seen
    (tmp_path / "policy").mkdir(); (tmp_path / "policy/README.md").write_text("#")
    assert push_to_hub(tmp_path, "me/x", token="t") == "https://hub/me/x"
    assert seen == ["t", (("me/x",), {"private": True, "exist_ok": True}), {"repo_id": "me/x", "folder_path": tmp_path / "policy"}]
