"Oracles: the files as any reader finds them, and a run that was never stopped."
import errno
import itertools
import json
import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from small_models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose.runs import run_directory as runs
from instruct_goose.runs.resume import CheckpointManager
from instruct_goose.runs.run_directory import (
    Clock,
    append_jsonl,
    claim_run_dir,
    finished_run,
    new_run_dir,
    open_run,
    save_model,
    saving_conflicts,
    train_policy,
    versions,
    write_json,
)
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.trainer import RLHFTrainer


def test_new_run_dirs_differ(tmp_path):
    assert [new_run_dir("a", tmp_path / "runs").name for _ in range(3)] == ["a", "a-2", "a-3"]
    (tmp_path / "runs" / "b").write_text("a file of that name")
    assert new_run_dir("b", tmp_path / "runs").name == "b-2"


def make_some(root):
    return [str(new_run_dir("run", root)) for _ in range(20)]


def test_new_run_dirs_differ_when_several_processes_ask_at_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool: made = pool.map(make_some, [str(tmp_path)] * 4, chunksize=1)
    assert len(set(sum(made, []))) == 80 == len(list(tmp_path.iterdir()))


def test_claim_run_dir(tmp_path):
    assert claim_run_dir(tmp_path / "x" / "new").is_dir() and claim_run_dir(tmp_path / "x" / "new").is_dir()  # empty
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="is a file"): claim_run_dir(tmp_path / "file")
    (tmp_path / "x" / "new" / "notes.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="already holds files"): claim_run_dir(tmp_path / "x" / "new")
    (tmp_path / "x" / "new" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a run"): claim_run_dir(str(tmp_path / "x" / "new"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "file", "new", "notes.txt", "x"]
    assert (tmp_path / "file").read_text() == (tmp_path / "x" / "new" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_write_json_refuses_what_json_lacks_and_leaves_the_old_file(tmp_path, number):
    write_json(tmp_path / "s.json", {"ä": 1, "path": tmp_path})
    old = (tmp_path / "s.json").read_bytes()
    assert json.loads(old) == {"ä": 1, "path": str(tmp_path)} and "ä".encode() in old
    with pytest.raises(ValueError): write_json(tmp_path / "s.json", {"a": [1, {"b": number}]})
    assert (tmp_path / "s.json").read_bytes() == old and os.listdir(tmp_path) == ["s.json"]


def test_write_json_never_shows_half_a_file(tmp_path, monkeypatch):
    "Stop it just before the renaming: the old file is whole. A reader that looks in between sees the old one too."
    write_json(tmp_path / "s.json", {"a": 1})
    def killed(self, other): raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt): write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    write_json(tmp_path / "s.json", {"a": 3})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 3}


def test_jsonl_grows_line_by_line(tmp_path):
    for i in range(3):
        append_jsonl(tmp_path / "m.jsonl", {"i": i, "text": "zwei\nZeilen – ü"})
        lines = (tmp_path / "m.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(x)["i"] for x in lines] == list(range(i + 1))


def test_jsonl_knows_no_nan_and_no_infinity(tmp_path):
    append_jsonl(tmp_path / "m.jsonl", {"a": float("nan"), "b": [1.5, float("inf"), {"c": float("-inf")}], "d": (2, None, True, "NaN")})
    def refuse(name): raise AssertionError(f"{name} is not JSON")
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse) == {"a": None, "b": [1.5, None, {"c": None}], "d": [2, None, True, "NaN"]}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_saved_models_load_with_transformers_alone(tmp_path, tokenizer, name):
    model = tiny(name)
    save_model(model, tokenizer, tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    assert words("the film is good")["input_ids"] == tokenizer("the film is good")["input_ids"]
    ids = torch.tensor([[0, 3, 4]])
    assert all(p.equal(q) for p, q in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)  # memory is aligned anew
    assert list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("*.bin"))


def test_clock_and_versions(monkeypatch):
    wall, cpu = iter([10., 12.3456]), iter([5., 5.5])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(runs.time, "process_time", lambda: next(cpu))
    assert Clock().read() == {"wall_seconds": 2.35, "cpu_seconds": .5}
    v = versions()
    assert v["torch"].split("+")[0] == torch.__version__.split("+")[0] and v["transformers"] == transformers.__version__ and json.dumps(v)


# --- going on ---

@dataclass
class Settings:
    output_dir: Path | None
    steps: int = 6
    save_every: int | None = 1
    keep: int = 100
    resume: bool = False


@pytest.mark.parametrize("wrong", ["", " ", "[]", "null", "3", "{", '{"a": NaN}', "[" * 100_000, '{"a": ' * 100_000], ids=lambda s: s[:9])
@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_damaged_file_is_named_and_never_finished(tmp_path, name, wrong):
    for file in ("summary.json", "config.json"): (tmp_path / file).write_text('{"steps": 6}')
    assert finished_run(Settings(tmp_path, resume=True)) == {"steps": 6}
    (tmp_path / name).write_text(wrong)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")): finished_run(Settings(tmp_path, resume=True))
    if name == "config.json":
        with pytest.raises(ValueError, match=r"config\.json"): open_run(Settings(tmp_path, resume=True), "x")
    assert (tmp_path / name).read_text() == wrong


def test_a_claimed_directory_may_hold_its_own_half_written_files_and_no_others(tmp_path):
    (tmp_path / ".summary.json.12").write_text("half")
    assert claim_run_dir(tmp_path) == tmp_path
    (tmp_path / ".notes.json.12").write_text("somebody's")
    with pytest.raises(FileExistsError): claim_run_dir(tmp_path)


def test_a_disk_that_refuses_is_said_with_a_cure(tmp_path, monkeypatch, tokenizer):
    def full(*args, **kwargs): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="config.json could not be written.*free some space"): write_json(tmp_path / "config.json", {})
    with pytest.raises(OSError, match="the model could not be written"):
        model = tiny()
        model.save_pretrained = full
        save_model(model, tokenizer, tmp_path)


def test_what_resuming_needs(tmp_path):
    for fine in (Settings(None), Settings(tmp_path, resume=True)): assert not list(saving_conflicts(fine))
    (name, legal), = saving_conflicts(Settings(None, resume=True))
    assert name == "output_dir" and "resume is set" in legal


class StopAt(Callback):
    "Ctrl-C in the middle of an iteration, when the rollout is there."

    def __init__(self, iteration): self.iteration = iteration

    def on_rollout(self, trainer, rollout):
        if trainer.iteration == self.iteration: raise KeyboardInterrupt


def likes_good(texts): return [text.split().count("good") - text.split().count("bad") for text in texts]


def ppo(out, tokenizer, stop=None, prompts=("the film", "a"), held_out=None, resume=False, **settings):
    "One sitting. Returns the trainer, and all metrics."
    settings = dict(steps=5, batch_size=8, max_new_tokens=4, lr=.01) | settings
    trainer = RLHFTrainer(tiny(), config=RLHFConfig(**settings), tokenizer=tokenizer, callbacks=[StopAt(stop)])
    out.mkdir(exist_ok=True)
    keeper = CheckpointManager(out, {}, steps=5, every=1, keep=100)
    if resume: keeper.resume()
    with keeper: return trainer, train_policy(trainer, prompts, likes_good, out, keeper.stage("ppo"), held_out, progress=False)


def numbers(metrics): return [{k: x for k, x in m.items() if "second" not in k} for m in metrics]


def logged(out): return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def stream():
    for i in itertools.count(): yield ["the film", "a", "good plot", "is bad", "the"][i % 5]


@pytest.mark.parametrize("prompts", [lambda: ["the film", "a", "good"], stream], ids=["list", "stream"])
def test_a_stopped_policy_goes_on_to_the_bit(tmp_path, tokenizer, prompts):
    "The same process, the same shapes, so the same bits. A stream begins anew, and what was seen is skipped."
    settings = dict(eval_every=2, keep_best=True, lr=.05)
    whole, expected = ppo(tmp_path / "whole", tokenizer, prompts=prompts(), held_out=["a", "the"], **settings)
    with pytest.raises(KeyboardInterrupt):
        ppo(tmp_path / "cut", tokenizer, 3, prompts=prompts(), held_out=["a", "the"], **settings)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "policy")  # what there is can be used
    assert AutoTokenizer.from_pretrained(tmp_path / "cut" / "policy") and len(logged(tmp_path / "cut")) == 3
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as f: f.write('{"iteration": 3}\n{"iter')  # ahead of the checkpoint
    again, metrics = ppo(tmp_path / "cut", tokenizer, prompts=prompts(), held_out=["a", "the"], resume=True, **settings)
    assert numbers(metrics) == numbers(expected) == numbers(logged(tmp_path / "cut")) and len(metrics) == 5
    assert all(p.equal(q) for p, q in zip(again.agent.parameters(), whole.agent.parameters(), strict=True))
    assert not all(p.equal(q) for p, q in zip(half.parameters(), again.agent.model.parameters(), strict=True))
    held_out = {m["iteration"] + 1: m["held_out_reward"] for m in expected if "held_out_reward" in m}
    assert again.best_iteration == whole.best_iteration == max(held_out, key=held_out.get) and len(held_out) == 2
    finished, metrics = ppo(tmp_path / "cut", tokenizer, prompts=prompts(), held_out=["a", "the"], resume=True, **settings)
    assert numbers(metrics) == numbers(expected) and finished.best_iteration == whole.best_iteration
    assert again.callbacks == [again.callbacks[0]] and isinstance(again.callbacks[0], StopAt)  # ours is gone


def test_a_run_that_its_kl_ended_stays_ended_though_it_was_killed_before_it_could_say_so(tmp_path, tokenizer, capsys):
    first, expected = ppo(tmp_path, tokenizer, kl_stop=1e-6, lr=.05)
    assert len(expected) == 2 and "kl_to_reference is" in first.stopped  # of iteration 0 it is 0
    again, metrics = ppo(tmp_path, tokenizer, kl_stop=1e-6, lr=.05, resume=True)
    assert metrics == expected and again.stopped == first.stopped and again.iteration == 2
    assert capsys.readouterr().out.count(f"Stopped early: {first.stopped}") == 2
