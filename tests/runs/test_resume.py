"A run of several stages: what is kept, what ends it, what is removed, and who may be at work."
import errno
import multiprocessing
import os
import random
import signal

import pytest
import torch

from instruct_goose.runs import checkpoints as files
from instruct_goose.runs.checkpoints import (
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from instruct_goose.runs.resume import Keeper, Terminated


def reach(keeper, name, at, of, **tensors): keeper.stage(name).reached(at, of, lambda: (tensors, {"at": at}))


def test_other_stages_are_saved_as_often(tmp_path):
    keeper = Keeper(tmp_path, {}, steps=12, every=4, keep=100)
    for of, expected in ((12, [4, 8, 12]), (30, [10, 20, 30]), (2, [1, 2])):
        saved = []
        for at in range(1, of + 1):
            before = len(checkpoints(keeper.directory))
            reach(keeper, "stage", at, of)
            if len(checkpoints(keeper.directory)) > before: saved.append(at)
        assert saved == expected


def test_memory_is_a_copy_and_goes_to_the_disk_when_the_block_breaks(tmp_path, capsys):
    keeper, x = Keeper(tmp_path, {"lr": 1.}, steps=10), torch.zeros(2)
    with pytest.raises(KeyboardInterrupt), keeper:
        reach(keeper, "sft", 10, 10, w=torch.ones(1))
        reach(keeper, "ppo", 3, 10, x=x)
        x += 1  # half a step
        assert not checkpoints(keeper.directory)
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert "after 3 of 10 steps of the stage 'ppo'" in said and f"--output-dir {tmp_path} --resume" in said
    again = Keeper(tmp_path, {"lr": 1.}, steps=10)
    assert again.resume() == checkpoints(again.directory)[0] and again.resumed_from == 3
    assert again.stage("ppo").found[0]["x"].tolist() == [0., 0.] and again.stage("sft").found[0]["w"].tolist() == [1.]
    assert again.stage("sft").found[1] == {"at": 10} and again.stage("baselines").found is None
    assert again.save() is None  # it is there already
    with pytest.raises(ValueError, match="lr was 1.0 and is 2.0"): Keeper(tmp_path, {"lr": 2.}, steps=10).resume()


def test_seconds_add_up(tmp_path):
    class Clock:
        def read(self): return {"wall_seconds": 2.5}
    first = Keeper(tmp_path, {}, steps=1, every=1, clock=Clock())
    reach(first, "a", 1, 1)
    second = Keeper(tmp_path, {}, steps=1, clock=Clock())
    second.resume()
    assert second.seconds() == {"wall_seconds": 5.} and second.resumed_from == "a"


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    with Keeper(tmp_path, {}, steps=1):
        with pytest.raises(BlockingIOError, match="another process is at work"), Keeper(tmp_path, {}, steps=1): pass
    with Keeper(tmp_path, {}, steps=1): pass


def test_a_disk_that_is_full_does_not_hide_why_the_run_stopped(tmp_path, monkeypatch, capsys):
    keeper = Keeper(tmp_path, {}, steps=10)
    def full(*_): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ZeroDivisionError), keeper:
        reach(keeper, "ppo", 3, 10)
        raise ZeroDivisionError
    said = capsys.readouterr().err
    assert "No space left on device" in said and "holds nothing to go on from" in said


def test_ctrl_c_pressed_again_does_not_break_off_the_saving(tmp_path, monkeypatch):
    write = files._write

    def pressed_again(path, content):
        signal.raise_signal(signal.SIGINT)
        write(path, content)

    monkeypatch.setattr(files, "_write", pressed_again)
    hears = signal.getsignal(signal.SIGINT)
    keeper = Keeper(tmp_path, {}, steps=3)
    with pytest.raises(KeyboardInterrupt, match="the first"), keeper:
        keeper.stage("ppo").reached(1, 3, lambda: ({"x": torch.ones(3)}, {}))
        raise KeyboardInterrupt("the first")
    assert load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"))[1]["place"] == ["ppo", 1, 3]
    assert signal.getsignal(signal.SIGINT) is hears


def test_a_failure_of_any_kind_does_not_hide_why_the_run_stopped(tmp_path, capsys):
    keeper = Keeper(tmp_path, {}, steps=10)
    with pytest.raises(ZeroDivisionError), keeper:
        keeper.stage("ppo").reached(1, 10, lambda: ({}, {"loss": float("nan")}))
        raise ZeroDivisionError
    assert "JSON" in capsys.readouterr().err


# ---------------------------------------------------------------- signals

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_saves(tmp_path, number, capsys):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as e, Keeper(tmp_path, {}, steps=5) as keeper:
        reach(keeper, "ppo", 2, 5, x=torch.ones(1))
        os.kill(os.getpid(), number)
        pytest.fail("the signal came to nothing")
    assert isinstance(e.value, Terminated) == (number != signal.SIGINT) and getattr(e.value, "signum", number) == number
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1])[1]["place"] == ["ppo", 2, 5]
    assert signal.getsignal(number) == before and "after 2 of 5 steps" in capsys.readouterr().err


def test_a_signal_that_somebody_swallows_is_raised_again_after_the_step(tmp_path):
    with pytest.raises(Terminated, match="SIGTERM"), Keeper(tmp_path, {}, steps=5) as keeper:
        try: os.kill(os.getpid(), signal.SIGTERM)
        except BaseException: pass
        reach(keeper, "ppo", 3, 5)
        pytest.fail("it was forgotten")
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1])[1]["place"] == ["ppo", 3, 5]


def test_signals_that_have_an_answer_keep_it(tmp_path):
    heard = []
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        with Keeper(tmp_path, {}, steps=5) as keeper:
            for n in before: os.kill(os.getpid(), n)
            reach(keeper, "ppo", 1, 5)
        assert heard == [1] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for n, handler in before.items(): signal.signal(n, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_break_off_the_saving(tmp_path, monkeypatch, number):
    write = files._write
    def again(path, content):
        signal.raise_signal(number)
        write(path, content)
    monkeypatch.setattr(files, "_write", again)
    with pytest.raises(Terminated), Keeper(tmp_path, {}, steps=3) as keeper:
        reach(keeper, "ppo", 1, 3)
        os.kill(os.getpid(), number)
    assert newest_checkpoint(tmp_path / "checkpoints")


# ---------------------------------------------------------------- what is removed

def test_only_its_own_names_are_removed(tmp_path):
    own = [".config.json.123", ".summary.json.9", ".metrics.jsonl.77"]
    others = [".config.json.swp", ".notes.json.bak", ".notes.json.123", ".config.json.", ".config.json.12a", "x.config.json.1", ".config.jsonl.1.bak"]
    for name in (*own, *others): (tmp_path / name).write_text("{")
    for name in (".summary.json.4", ".metrics.jsonl.old"): (tmp_path / name).mkdir()  # a directory of such a name is somebody's
    (tmp_path / "thesis").write_text("mine"); (tmp_path / ".config.json.5").symlink_to(tmp_path / "thesis")
    shelf = tmp_path / "checkpoints"
    for name in (".writing-77", ".removing-checkpoint-000003", ".removing-mine"): (shelf / name / "deep").mkdir(parents=True)
    with Keeper(tmp_path, {}, steps=1): pass
    assert not any((tmp_path / name).exists() for name in own) and all((tmp_path / name).exists() for name in others)
    assert (tmp_path / ".summary.json.4").is_dir() and (tmp_path / ".config.json.5").is_symlink() and (tmp_path / "thesis").exists()
    assert [p.name for p in shelf.iterdir()] == [".removing-mine"]


# ---------------------------------------------------------------- what is resumed

def whole_run(tmp_path):
    keeper = Keeper(tmp_path, {"lr": 1.}, steps=4, every=1)
    reach(keeper, "sft", 2, 2, w=torch.ones(2))
    reach(keeper, "ppo", 1, 4, w=torch.zeros(2))
    return load_checkpoint(newest_checkpoint(keeper.directory))


CHANGES = [{"place": None}, {"place": ["ppo", 1]}, {"place": ["ppo", 1., 4]}, {"place": ["elsewhere", 1, 4]}, {"place": ["ppo", 0, 4]}, {"place": ["ppo", 5, 4]},
           {"stages": {}}, {"stages": []}, {"stages": {"ppo": 1}}, {"stages": {"ppo": {}}}, {"stages": {"ppo": {}, "sft": {}, "a/b": {}}}, {"seconds": None},
           {"seconds": {"wall_seconds": "x"}}, {"seconds": {"wall_seconds": -1}}, {"settings": None}, {"settings": []}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_record_that_is_no_runs_is_named(tmp_path, change):
    tensors, record = whole_run(tmp_path)
    path = save_checkpoint(tmp_path / "checkpoints", tensors, record | change)
    with pytest.raises(ValueError, match=f"{path} is not that of a run: .* in its record"): Keeper(tmp_path, {"lr": 1.}, steps=4).resume()
    for name in change:
        path = save_checkpoint(tmp_path / "checkpoints", tensors, {k: v for k, v in record.items() if k != name})
        with pytest.raises(ValueError, match=f"{name} in its record is missing"): Keeper(tmp_path, {"lr": 1.}, steps=4).resume()


# ---------------------------------------------------------------- processes that are killed, and two at once

def _work(run, steps):
    keeper = Keeper(run, {}, steps=steps, every=1)
    keeper.resume()
    with keeper:
        stage = keeper.stage("ppo")
        total = stage.found[0]["total"].clone() if stage.found else torch.zeros(50_000, dtype=torch.float64)
        for at in range(stage.found[1]["at"] if stage.found else 0, steps):
            total = total * 1.25 + at
            stage.reached(at + 1, steps, lambda state=({"total": total}, {"at": at + 1}): state)


def test_killed_at_random_moments_and_resumed(tmp_path):
    "One run, killed again and again, until it is done: what it ends with is what an undisturbed one ends with."
    context, steps, dice, longest = multiprocessing.get_context("fork"), 60, random.Random(), .2
    while True:
        before = checkpoints(tmp_path / "checkpoints")
        child = context.Process(target=_work, args=(tmp_path, steps)); child.start()
        child.join(dice.uniform(0, longest))
        if child.exitcode == 0: break
        child.kill(); child.join()
        if checkpoints(tmp_path / "checkpoints") == before: longest *= 1.2  # a busy machine: nothing was done in that time
    expected = torch.zeros(50_000, dtype=torch.float64)
    for at in range(steps): expected = expected * 1.25 + at
    assert load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"))[0]["ppo/total"].equal(expected)
    with Keeper(tmp_path, {}, steps=steps): pass
    assert {p.name[:11] for p in (tmp_path / "checkpoints").iterdir()} == {"checkpoint-"} and not list(tmp_path.glob(".*"))


def test_of_two_processes_one_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")
    with Keeper(tmp_path, {}, steps=3):
        child = context.Process(target=_work, args=(tmp_path, 3)); child.start(); child.join(60)
        assert child.exitcode == 1 and not checkpoints(tmp_path / "checkpoints")
    child = context.Process(target=_work, args=(tmp_path, 3)); child.start(); child.join(60)
    assert child.exitcode == 0 and len(checkpoints(tmp_path / "checkpoints")) == 2
