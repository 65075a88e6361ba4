"""A run goes on where it stopped, whatever stopped it, and ends with the very bytes of a run that was never stopped.

Through functions: from every kind of place. Through real processes: killed at random moments, and stopped by Ctrl-C.
"""
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jaxtyping
import pytest
import torch
from deep import deep, first
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose.cli.main import main
from instruct_goose.recipes import quickstart
from instruct_goose.recipes.quickstart import QuickstartConfig, run_quickstart
from instruct_goose.runs.checkpoints import checkpoints, load_checkpoint
from instruct_goose.runs.run_directory import open_run

TINY = dict(reviews=300, pairs=60, held_out_pairs=40, sft_steps=12, rm_steps=6, steps=4, batch_size=16, eval_samples=32,
            best_of=2, tune_steps=2, epochs=1, layers=1, hidden_size=16, progress=False)
FLAGS = [x for k, v in TINY.items() if k != "progress" for x in (f"--{k.replace('_', '-')}", str(v))] + ["--no-progress"]


def result(out):
    "All that a run says, but for the time it took and where it was resumed from."
    files = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.safetensors") if "checkpoints" not in p.parts}
    log = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    summary = {k: v for k, v in json.loads((out / "summary.json").read_text("utf-8")).items() if "seconds" not in k and k != "resumed_from"}
    return files, log, summary, (out / "samples.md").read_text("utf-8")


def config(out, **settings): return QuickstartConfig(**TINY | {"output_dir": out} | settings)


@pytest.fixture(scope="module", autouse=True)
def _as_users_run_it():
    "Without the shape checker: other tests have it, it doubles the time, and it draws from Python's generator. And without plots."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "plot_metrics", lambda *_: [])
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that was never stopped, with every checkpoint that it made; and what it says."
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run_quickstart(config(out, save_every=1, keep=1000))["resumed_from"] is None
    return out, result(out)


def stopped_at(whole, out, n):
    "The directory as it was when checkpoint n was the last, with the log some lines longer."
    shutil.copytree(whole, out)
    for path in checkpoints(out / "checkpoints")[n:]: shutil.rmtree(path)
    for name in ("summary.json", "samples.md"): (out / name).unlink()
    shutil.rmtree(out / "policy")
    return out


def places(out): return [tuple(load_checkpoint(p)[1]["place"]) for p in checkpoints(out / "checkpoints")]


def test_saving_changes_nothing(whole, tmp_path):
    run_quickstart(config(tmp_path / "run"))
    assert result(tmp_path / "run") == whole[1]
    assert not (tmp_path / "run/checkpoints").exists()  # off unless asked for


def test_every_stage_was_saved(whole):
    assert places(whole[0]) == [("sft", n, 12) for n in (3, 6, 9, 12)] + [("reward model", n, 6) for n in range(1, 7)] \
        + [("ppo", n, 4) for n in range(1, 5)] + [("baselines", n, 2) for n in (1, 2)]


@pytest.mark.parametrize("place, says", [(("sft", 6, 12), "sft"), (("sft", 12, 12), "sft"), (("reward model", 3, 6), "reward model"),
                                         (("ppo", 3, 4), 3), (("ppo", 4, 4), 4), (("baselines", 1, 2), "baselines")], ids=str)
def test_goes_on_from_every_kind_of_place(whole, tmp_path, place, says, capsys):
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(place))
    torch.rand(3); random.random()  # another process has other dice
    assert run_quickstart(config(out, resume=True))["resumed_from"] == says
    assert result(out) == whole[1]
    assert f"{place[1]} of {place[2]} steps of the stage {place[0]!r} are done" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path, capsys):
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(("ppo", 3, 4)))
    newest = checkpoints(out / "checkpoints")[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1000])
    (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text() + '{"iteration": 3, "rew')
    assert run_quickstart(config(out, resume=True))["resumed_from"] == 2
    assert "is damaged: tensors.safetensors" in capsys.readouterr().err and result(out) == whole[1]


def stamps(out): return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.rglob("*") if p.is_file()}


def test_a_finished_run_is_left_alone(whole, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "make_data", lambda *_: pytest.fail("work was done"))
    before = stamps(whole[0])
    assert run_quickstart(config(whole[0], resume=True)) == json.loads((whole[0] / "summary.json").read_text("utf-8"))
    assert stamps(whole[0]) == before and "is finished: nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match="beta was 0.18 and is 0.5"): run_quickstart(config(whole[0], resume=True, beta=.5))
    with pytest.raises(FileExistsError, match="already holds a run"): run_quickstart(config(whole[0]))


def test_other_settings_are_named_and_nothing_is_touched(whole, tmp_path, monkeypatch):
    out = stopped_at(whole[0], tmp_path / "run", 5)
    monkeypatch.setattr(quickstart, "make_data", lambda *_: pytest.fail("work was done"))
    before = stamps(out)
    for _ in range(2):  # by config.json; and by the checkpoint alone
        with pytest.raises(ValueError, match="threads was 1 and is 2; sft_lr was 0.008 and is 0.01. Give the same"):
            run_quickstart(config(out, resume=True, sft_lr=.01, steps=5, threads=2))
        assert stamps(out) == before
        (out / "config.json").unlink(missing_ok=True); before = stamps(out)


def test_nothing_saved_yet_starts_over(whole, tmp_path, capsys):
    nowhere, empty, begun = tmp_path / "nowhere", tmp_path / "empty", tmp_path / "begun"
    for out in (empty, begun): out.mkdir()
    (empty / ".config.json.123").write_text("{")  # killed while writing it
    shutil.copy(whole[0] / "config.json", begun); (begun / "metrics.jsonl").write_text('{"iteration": 0}\n')
    for out in (nowhere, empty):
        assert open_run(config(out, resume=True), "quickstart")[0] == out and "starts over" in capsys.readouterr().out
    assert run_quickstart(config(begun, resume=True))["resumed_from"] is None and result(begun) == whole[1]
    foreign = tmp_path / "foreign"; foreign.mkdir(); (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds files"): run_quickstart(config(foreign, resume=True))
    assert (foreign / "thesis.tex").read_text() == "mine"


def test_flags_that_make_no_sense(tmp_path, unchecked, capsys):
    with unchecked():
        with pytest.raises(ValueError, match="output_dir is None: it must be the run to go on with, since resume is set"): QuickstartConfig(resume=True)
        for name in ("save_every", "keep"):
            for wrong in (0, -1, 1.5, True):
                with pytest.raises((TypeError, ValueError), match=f"{name} is {wrong}: it must be .*at least 1"): QuickstartConfig(**{name: wrong})
    with pytest.raises(SystemExit): main(["quickstart", *FLAGS, "--resume"])
    assert "output_dir is None: it must be the run to go on with, since resume is set" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_stopped_for_its_kl_stays_stopped_and_the_best_policy_the_best(tmp_path, capsys):
    "Killed after its last checkpoint, before it knew that it was over."
    settings = dict(lr=.02, kl_stop=.5, eval_every=1, keep_best=True, baselines=False)
    out = tmp_path / "run"
    run_quickstart(config(out, save_every=1, keep=1000, **settings))
    before = result(out)
    assert 1 < len(before[1]) < 4 and before[1][-1]["kl_to_reference"] > .5 and places(out)[-1] == ("ppo", len(before[1]), 4)
    best = max(before[1], key=lambda m: m["held_out_reward"])
    for n in range(-2, 0):
        again = stopped_at(out, tmp_path / f"again{n}", len(places(out)) + 1 + n)
        run_quickstart(config(again, resume=True, **settings))
        assert result(again) == before
    assert best["iteration"] < 3
    why = json.loads((out / "summary.json").read_text("utf-8"))["stopped"]
    assert why.startswith(f"iteration {len(before[1]) - 1}: kl_to_reference is") and f"Stopped early: {why}" in capsys.readouterr().out


# ---------------------------------------------------------------- Ctrl-C, and errors, inside an iteration

def interrupting(monkeypatch, when, error):
    "The reward model's score raises after so many calls: in the middle of an iteration, or wherever it is asked."
    calls, real = [], quickstart.RewardModel.score
    def score(self, texts, *args):
        calls.append(1)
        if len(calls) == when: raise error
        return real(self, texts, *args)
    monkeypatch.setattr(quickstart.RewardModel, "score", score)


def _raise(error): raise error


STOPS = {"Ctrl-C": (KeyboardInterrupt, lambda: _raise(KeyboardInterrupt())), "error": (ZeroDivisionError, lambda: _raise(ZeroDivisionError())),
         **{n.name: (KeyboardInterrupt, lambda n=n: os.kill(os.getpid(), n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}}  # schedulers; a closed terminal


@pytest.mark.parametrize("error, stop", [pytest.param(*s, id=k) if k in ("error", "SIGTERM") else deep(*s, id=k) for k, s in STOPS.items()])
def test_half_an_iteration_is_not_kept(whole, tmp_path, error, stop, capsys):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        real = quickstart.make_trainer
        def make(*args):
            trainer = real(*args)
            step, calls = trainer.optimizer.step, []
            def interrupted(*args, **kwargs):
                calls.append(1)
                if len(calls) == 2 * 4 + 2: stop()  # four updates an iteration: in the middle of the third
                return step(*args, **kwargs)
            trainer.optimizer.step = interrupted
            return trainer
        patch.setattr(quickstart, "make_trainer", make)
        run_quickstart(config(out))
    assert places(out) == [("ppo", 2, 4)] and f"--output-dir {out} --resume" in capsys.readouterr().err
    if error is KeyboardInterrupt:  # what there is can be used
        AutoModelForCausalLM.from_pretrained(out / "policy"), AutoTokenizer.from_pretrained(out / "policy")
        main(["sample", str(out), "--n", "1"])
    run_quickstart(config(out, resume=True))
    assert result(out) == whole[1]


def test_a_full_disk_stops_the_run_and_costs_nothing(whole, tmp_path, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(("ppo", 1, 4)))
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), stamps(out / "checkpoints")
    real = quickstart.make_trainer
    def make(*args):  # from here on no file may grow beyond 200 kB; a checkpoint has some MB
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        return real(*args)
    monkeypatch.setattr(quickstart, "make_trainer", make)
    try:
        with pytest.raises(OSError, match="the checkpoint could not be written: File too large.*is untouched"):
            run_quickstart(config(out, resume=True, save_every=1, keep=1000))
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stamps(out / "checkpoints") == before
    monkeypatch.undo()
    assert run_quickstart(config(out, resume=True))["resumed_from"] == 1 and result(out) == whole[1]


# ---------------------------------------------------------------- real processes

@pytest.fixture(scope="module")
def process():
    "Starts the command in a process of its own, forked from one that has imported everything: an import takes longer than the run."
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["instruct_goose.recipes.quickstart", "instruct_goose.recipes.real_reviews", "instruct_goose.cli.main",
                                    "transformers.models.gpt2.modeling_gpt2", "transformers.models.auto.modeling_auto", "matplotlib.backends.backend_agg"])
    def start(*argv):
        child = context.Process(target=main, args=(["quickstart", *FLAGS, *argv],))
        child.start()
        return child
    return start


def ran(child, seconds=1200):  # it ends long before, but on a busy machine
    child.join(seconds)
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.parametrize("n", first(1, [1, 0, 2]))  # `make evidence` kills twenty
def test_a_kill(whole, tmp_path, process, n):
    longest, dice = json.loads((whole[0] / "summary.json").read_text("utf-8"))["wall_seconds"], random.Random()
    out = tmp_path / "run"
    child = process("--output-dir", str(out), "--save-every", "1")
    begun = time.monotonic()
    while not (out / "config.json").exists() and time.monotonic() < begun + 60: time.sleep(.005)
    moment = dice.uniform(n * longest / 3, (n + 1) * longest / 3)
    child.join(moment)
    child.kill()  # SIGKILL
    assert ran(child) in (-signal.SIGKILL, 0)
    last = places(out)[-1:]
    assert ran(process("--output-dir", str(out), "--save-every", "1", "--resume")) == 0
    resumed = json.loads((out / "summary.json").read_text("utf-8"))["resumed_from"]
    print(f"killed after {moment:.2f} of about {longest:.2f} s, at {last}; resumed from {resumed}")
    assert result(out) == whole[1]
    assert not [p for p in out.rglob(".*")]  # nothing half written is left


PRESSED_IN_THE_SECOND_ITERATION = """
import time
from instruct_goose.recipes import quickstart
from instruct_goose.cli.main import main
real = quickstart.make_trainer

def make(*args):
    trainer = real(*args)
    optimize = trainer.optimize
    def wait(*args, **kwargs):
        if trainer.iteration == 1:
            print("waiting for the key", flush=True)
            time.sleep(600)
        return optimize(*args, **kwargs)
    trainer.optimize = wait
    return trainer

quickstart.make_trainer = make
main()
"""


def test_ctrl_c(whole, tmp_path, process):
    "The real command, in the shell's way: SIGINT, exit status 130. It waits for the key at a known place, so no clock is raced."
    out = tmp_path / "run"
    command = [sys.executable, "-c", PRESSED_IN_THE_SECOND_ITERATION, "quickstart", *FLAGS, "--output-dir", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert any("waiting for the key" in line for line in child.stdout), child.communicate()[1]
    child.send_signal(signal.SIGINT)
    said, error = child.communicate()
    assert child.returncode == 130, error
    assert f"--output-dir {out} --resume" in error and "Traceback" not in error
    assert places(out) == [("ppo", 1, 4)]
    assert ran(process("--output-dir", str(out), "--resume")) == 0 and result(out) == whole[1]


# ── a run is made longer ──

def test_a_finished_run_is_made_longer_and_a_shorter_one_is_refused(whole, tmp_path, capsys):
    "The quickstart's learning rate falls to 0, so it is told that the rate jumps; SFT and reward model are not trained again."
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    before = stamps(out)
    with pytest.raises(ValueError, match="steps was 4 and is 3: a run can be made longer, not shorter"): run_quickstart(config(out, resume=True, steps=3))
    assert stamps(out) == before
    summary = run_quickstart(config(out, resume=True, steps=6))
    shown, log = capsys.readouterr().out, result(out)[1]
    assert "goes on: 6 steps, not 4" in shown and "now ends at 6" in shown
    assert log[:4] == whole[1][1] and [m["iteration"] for m in log] == list(range(6)) and summary["config"]["steps"] == 6
    assert result(out)[0].keys() == whole[1][0].keys() and result(out)[0]["sft/model.safetensors"] == whole[1][0]["sft/model.safetensors"]
    assert run_quickstart(config(out, resume=True, steps=6)) == summary and "is finished: nothing to do" in capsys.readouterr().out


def test_a_stopped_run_is_made_longer_too_and_stopped_again(whole, tmp_path):
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(("ppo", 3, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart.RLHFTrainer, "optimize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): run_quickstart(config(out, resume=True, steps=5))
    run_quickstart(config(out, resume=True, steps=5))
    assert [m["iteration"] for m in result(out)[1]] == list(range(5))


def test_a_run_that_kept_nothing_cannot_be_made_longer(tmp_path):
    out = tmp_path / "run"
    run_quickstart(config(out, baselines=False, sft_steps=2, rm_steps=2, steps=1))
    before = stamps(out)
    with pytest.raises(ValueError, match="kept no checkpoint.*--save-every.*run/policy"): run_quickstart(config(out, baselines=False, sft_steps=2, rm_steps=2, steps=2, resume=True))
    assert stamps(out) == before
