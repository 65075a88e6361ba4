"""A run goes on where it stopped, whatever stopped it, and ends with the very bytes of a run that
was never stopped.

First the manager alone; then the quickstart, through functions and in processes that are
killed.
"""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import jaxtyping
import pytest
import torch
from deep import first
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose.cli.main import main
from instruct_goose.recipes import quickstart, stages
from instruct_goose.recipes.quickstart import QuickstartConfig, run_quickstart
from instruct_goose.runs import checkpoints as files
from instruct_goose.runs.checkpoints import (
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from instruct_goose.runs.directory import open_run
from instruct_goose.runs.resume import (
    CheckpointManager,
    Clock,
    SignalWatch,
    StoppedError,
    Terminated,
    is_run_record,
    refuse_other_run,
)
from instruct_goose.supervised.fit import batches, fit


def step(manager, name, at, of, **tensors):
    manager.stage(name).after_step(at, of, lambda: tensors | {"at": at})


def test_other_stages_are_saved_as_often(tmp_path):
    manager = CheckpointManager(tmp_path, {}, steps=12, every=4, keep=100)
    for name, of in (("a", 12), ("b", 30), ("c", 2)):
        for at in range(1, of + 1):
            step(manager, name, at, of)
    assert [load_checkpoint(p)[1]["progress"][:2] for p in checkpoints(manager.checkpoint_dir)] == [
        ["a", 4],
        ["a", 8],
        ["a", 12],
        ["b", 10],
        ["b", 20],
        ["b", 30],
        ["c", 1],
        ["c", 2],
    ]


def test_a_checkpoint_by_time_without_being_asked_for(tmp_path, monkeypatch):
    """At a twentieth of the steps or after two minutes, never within five seconds, and with at
    most a tenth of the time spent on it.
    """
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def saves(seconds, of, slow=0.0):
        now[0] = 0.0
        found = []
        manager = CheckpointManager(tmp_path / f"{seconds} {slow}", {}, steps=of, every=None)
        write = files.save_checkpoint

        def slowly(*args):
            now[0] += slow
            return write(*args)

        monkeypatch.setattr("instruct_goose.runs.resume.save_checkpoint", slowly)
        for at in range(1, of + 1):
            now[0] += seconds
            last = manager.on_disk
            step(manager, "ppo", at, of)
            if manager.on_disk is not last:
                found.append(at)
        return found

    assert (
        saves(0.01, 100) == []
        and saves(3.0, 40) == list(range(2, 41, 2))
        and saves(61.0, 100)[:3] == [2, 4, 5]
    )  # 5: a twentieth; 4: two minutes
    assert saves(1.0, 100, slow=3.0) == [5, 35, 65, 95]


def test_memory_is_a_copy_and_goes_to_the_disk_when_the_block_breaks(tmp_path, capsys):
    manager = CheckpointManager(tmp_path, {"lr": 1.0}, steps=10)
    x = torch.zeros(2)
    with pytest.raises(KeyboardInterrupt), manager:
        step(manager, "sft", 10, 10, w=torch.ones(1))
        step(manager, "ppo", 3, 10, x=x)
        x += 1  # half a step
        assert not checkpoints(manager.checkpoint_dir)
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert (
        "after 3 of 10 steps of the stage 'ppo'" in said
        and f"--output-dir {tmp_path} --resume" in said
    )
    again = CheckpointManager(tmp_path, {"lr": 1.0}, steps=10)
    assert again.resume() == checkpoints(again.checkpoint_dir)[0] and again.resumed_from == 3
    assert again.stage("ppo").newest_state["x"].tolist() == [0.0, 0.0]
    assert again.stage("sft").newest_state == {"w": torch.ones(1), "at": 10}
    assert again.stage("baselines").newest_state is None
    assert again.save() is None  # it is there already
    with pytest.raises(ValueError, match="lr was 1.0 and is 2.0"):
        CheckpointManager(tmp_path, {"lr": 2.0}, steps=10).resume()


def test_a_run_that_could_not_begin_does_not_keep_its_directory(tmp_path):
    for before, made, left in (
        ([], ["config.json"], False),
        ([], ["config.json", "empty.jsonl"], False),
        ([], ["config.json", "metrics.jsonl"], True),  # its log has a row
        ([], ["notes.txt"], True),
        (["config.json"], [], True),
    ):
        out = tmp_path / "-".join([*before, "then", *made])
        out.mkdir()
        for name in before:
            (out / name).write_text("{}")
        with pytest.raises(ZeroDivisionError), CheckpointManager(out, {}, steps=10):
            for name in made:
                if name == "empty.jsonl":
                    (out / "metrics.jsonl").touch()
                else:
                    (out / name).write_text("{}")
            raise ZeroDivisionError
        assert out.exists() == left


def test_a_supervised_stage_keeps_every_whole_step_without_a_copy(tmp_path):
    """Whatever breaks it off: a signal, also in the middle of an update, or an error.

    Compared with a stage that was never stopped, to the bit, with dropout.
    """

    def train(out, resume=False, loss=lambda step: None, callback=lambda step: None):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5))
        manager = CheckpointManager(out, {}, steps=40, every=None)
        if resume:
            manager.resume()
        calls = []

        def loss_of(rows):
            loss(len(calls))
            calls.append(rows)
            return net(torch.ones(1, 2)).square().sum()

        with torch.random.fork_rng(devices=[]), manager:
            options = dict(steps=40, lr=0.1, progress=False, stage=manager.stage("sft"))
            log = fit(
                net,
                loss_of,
                batches([1], 1),
                callback=lambda step, _: callback(step),
                **options,
            )
        return log, [p.tolist() for p in net.parameters()]

    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole")

    def stop_at(place, number=signal.SIGTERM):
        return lambda step: os.kill(os.getpid(), number) if step == place else None

    def fail_at(place):
        return lambda step: 1 / (step != place)

    for n, (done, hooks) in enumerate(
        (
            (5, {"loss": stop_at(5)}),
            (38, {"loss": stop_at(38, signal.SIGINT)}),
            (38, {"callback": stop_at(37)}),
            (17, {"loss": fail_at(17)}),
            (17, {"callback": fail_at(16)}),
        )
    ):
        out = tmp_path / str(n)
        out.mkdir()
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            train(out, **hooks)
        assert load_checkpoint(checkpoints(out / "checkpoints")[-1])[1]["progress"] == [
            "sft",
            done,
            40,
        ]
        assert train(out, resume=True) == whole


def test_a_signal_in_the_middle_of_an_update_waits_for_its_end(tmp_path):
    with pytest.raises(Terminated), CheckpointManager(tmp_path, {}, steps=9) as manager:
        stage = manager.stage("sft")
        with stage.uninterrupted_step():
            os.kill(os.getpid(), signal.SIGTERM)
            stage.offer_state(4, 9, lambda: {"w": torch.ones(1)})
        pytest.fail("it was forgotten")
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1])[1]["progress"] == [
        "sft",
        4,
        9,
    ]


def test_one_process_at_a_time(tmp_path):
    for _ in range(2):
        with (
            CheckpointManager(tmp_path, {}, steps=1),
            pytest.raises(BlockingIOError),
            CheckpointManager(tmp_path, {}, steps=1),
        ):
            pass


def test_what_fails_while_saving_does_not_hide_why_the_run_stopped(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path, {}, steps=10) as manager:
        manager.stage("ppo").after_step(3, 10, lambda: {"loss": float("nan")})
        raise ZeroDivisionError
    said = capsys.readouterr().err
    assert "'ppo/loss' is nan" in said and "holds nothing to go on from" in said


def test_a_full_disk_is_said_once_by_the_error_that_stops_the_run(tmp_path, monkeypatch, capsys):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match="the checkpoint could not be written: No space left"),
        CheckpointManager(tmp_path, {}, steps=10, every=1) as manager,
    ):
        manager.stage("ppo").after_step(3, 10, lambda: {"w": torch.ones(1)})
    said = capsys.readouterr().err
    assert "No space left" not in said and "holds nothing to go on from" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_saves_and_a_second_one_does_not_break_off_the_saving(
    tmp_path, monkeypatch, number, capsys
):
    before = signal.getsignal(number)
    write = os.fsync

    def again(handle):
        signal.raise_signal(number)
        write(handle)

    with pytest.raises(KeyboardInterrupt) as e, CheckpointManager(tmp_path, {}, steps=5) as manager:
        step(manager, "ppo", 2, 5, x=torch.ones(1))
        monkeypatch.setattr(os, "fsync", again)
        os.kill(os.getpid(), number)
        pytest.fail("the signal came to nothing")
    assert (
        isinstance(e.value, Terminated) == (number != signal.SIGINT)
        and getattr(e.value, "signum", number) == number
    )
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1])[1]["progress"] == [
        "ppo",
        2,
        5,
    ]
    assert signal.getsignal(number) == before and "after 2 of 5 steps" in capsys.readouterr().err


def test_the_first_signal_while_an_error_is_saved_does_not_break_off_the_saving(
    tmp_path, monkeypatch
):
    write = os.fsync

    def signalled(handle):
        signal.raise_signal(signal.SIGTERM)
        write(handle)

    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path, {}, steps=5) as manager:
        step(manager, "ppo", 2, 5, x=torch.ones(1))
        monkeypatch.setattr(os, "fsync", signalled)
        raise ZeroDivisionError
    assert len(checkpoints(manager.checkpoint_dir)) == 1


def test_a_signal_that_somebody_swallows_is_raised_again_after_the_step(tmp_path):
    with (
        pytest.raises(Terminated, match="SIGTERM"),
        CheckpointManager(tmp_path, {}, steps=5) as manager,
    ):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            pass
        step(manager, "ppo", 3, 5)
        pytest.fail("it was forgotten")
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1])[1]["progress"] == [
        "ppo",
        3,
        5,
    ]


def test_signals_that_have_an_answer_keep_it(tmp_path):
    heard = []
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        with CheckpointManager(tmp_path, {}, steps=5) as manager:
            for n in before:
                os.kill(os.getpid(), n)
            step(manager, "ppo", 1, 5)
        assert heard == [1] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


# ---------------------------------------------------------------- children of a run


def in_child(work):
    "The exit status of a forked child that does this; -15 after SIGTERM."
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_is_terminated_or_fails_does_not_act_as_the_run(tmp_path, capfd):
    "It dies of the signal, writes no checkpoint, removes nothing and says nothing."

    def fail_in(manager):
        manager.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    with CheckpointManager(tmp_path, {}, steps=9, keep=1) as manager:
        step(manager, "ppo", 1, 9)
        manager.save()
        step(manager, "ppo", 2, 9)
        [before] = checkpoints(manager.checkpoint_dir)
        assert in_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
        assert in_child(lambda: fail_in(manager)) == 0
        assert in_child(manager.save) == 0
        assert checkpoints(manager.checkpoint_dir) == [before]
        assert signal.getsignal(signal.SIGTERM) == manager.signals.receive  # the run's is as it was
        with pytest.raises(BlockingIOError), CheckpointManager(tmp_path, {}, steps=9):
            pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_child_that_is_signalled_at_once_dies(tmp_path, capfd, number):
    "Python forgets a signal that comes while it forks, or hands it to the handlers of the run."

    def dies() -> bool:
        child = -1
        try:
            child = os.fork()
            if child == 0:
                time.sleep(10)
                os._exit(0)
        except KeyboardInterrupt:  # nobody interrupts the parent
            os._exit(-number % 256)  # a shell's word for it would be 128 + number
        os.kill(child, number)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-number, -number % 256)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with CheckpointManager(tmp_path, {}, steps=9):
        survivors = [trial for trial in range(25) if not dies()]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert survivors == []
    assert capfd.readouterr().err == ""


SIGNALLED_WHILE_IT_FORKS = """
import os, signal, sys, torch
from instruct_goose.runs.resume import CheckpointManager

os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
with CheckpointManager(sys.argv[1], {}, steps=9) as manager:
    child = os.fork()
    if child == 0:
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    manager.stage("ppo").after_step(1, 9, lambda: {"x": torch.ones(1)})
    print("never reached")
"""


def test_a_run_that_is_signalled_while_it_forks_stops_after_the_step(tmp_path):
    "Python prints and forgets what a handler raises there; the child is not that of the signal."
    result = subprocess.run(
        [sys.executable, "-c", SIGNALLED_WHILE_IT_FORKS, tmp_path], capture_output=True, text=True
    )
    assert result.stdout == "0\n"
    assert "Exception ignored" not in result.stderr
    assert "checkpoint-000001 holds the run after 1 of 9 steps" in result.stderr
    assert result.stderr.rstrip().endswith("Terminated: stopped by SIGTERM")


def test_a_child_of_a_run_without_a_step_leaves_its_directory(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with CheckpointManager(out, {}, steps=9) as manager:
        in_child(lambda: manager.__exit__(ValueError, ValueError(), None))
        assert out.is_dir()


def nap(_):
    time.sleep(60)


def test_a_pool_that_is_terminated_says_nothing(tmp_path, capfd):
    with CheckpointManager(tmp_path, {}, steps=9):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map_async(nap, range(2), chunksize=1)
            time.sleep(0.2)  # they are at it
    assert capfd.readouterr().err == ""


def test_the_orphan_of_a_killed_run_does_not_hold_its_directory(tmp_path):
    read, write = os.pipe()

    def run_with_a_child():
        with CheckpointManager(tmp_path, {}, steps=9):
            orphan = os.fork()
            if orphan == 0:
                time.sleep(60)
                os._exit(0)
            os.write(write, f"{orphan}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(run_with_a_child) == -signal.SIGKILL
    orphan = int(os.read(read, 20))
    try:
        with CheckpointManager(tmp_path, {}, steps=9):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_only_its_own_names_are_removed(tmp_path):
    own = [".config.json.123", ".summary.json.9", ".metrics.jsonl.77"]
    others = [".config.json.swp", ".notes.json.123", ".config.json.12a", "x.config.json.1"]
    for name in (*own, *others, "thesis"):
        (tmp_path / name).write_text("{")
    (tmp_path / ".config.json.5").symlink_to(tmp_path / "thesis")
    for name in (".writing-77", ".removing-checkpoint-000003", ".removing-mine"):
        (tmp_path / "checkpoints" / name / "deep").mkdir(parents=True)
    with CheckpointManager(tmp_path, {}, steps=1):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*others, "thesis", ".config.json.5", "checkpoints"]
    )
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [".removing-mine"]


CHANGES = [
    {"progress": ["ppo", 1]},
    {"progress": ["ppo", 1.0, 4]},
    {"progress": ["elsewhere", 1, 4]},
    {"progress": ["ppo", 5, 4]},
    {"stages": {"ppo": 1}},
    {"stages": {"ppo": {}}},
    {"stages": {"ppo": {}, "sft": {}, "a/b": {}}},
    {"seconds": None},
    {"seconds": {"wall_seconds": -1}},
    {"settings": []},
]


def test_a_record_that_is_no_runs_is_named(tmp_path):
    manager = CheckpointManager(tmp_path, {"lr": 1.0}, steps=4, every=1)
    step(manager, "sft", 2, 2, w=torch.ones(2))
    step(manager, "ppo", 1, 4, w=torch.zeros(2))
    manager.earlier_seconds = {"wall_seconds": 100.0}
    step(manager, "ppo", 2, 4, w=torch.zeros(2))
    again = CheckpointManager(tmp_path, {"lr": 1.0}, steps=4)
    again.resume()
    assert again.seconds()["wall_seconds"] >= 100  # they add up
    tensors, record = load_checkpoint(newest_checkpoint(manager.checkpoint_dir))
    for odd in (
        *(record | change for change in CHANGES),
        *({k: x for k, x in record.items() if k != name} for name in ("settings", "progress")),
    ):
        path = save_checkpoint(manager.checkpoint_dir, tensors, odd)
        with pytest.raises(ValueError, match=f"{path} is not that of a run"):
            CheckpointManager(tmp_path, {"lr": 1.0}, steps=4).resume()


# ---------------------------------------------------------------- when a step is saved
@pytest.fixture
def now(monkeypatch):
    "A clock that a test sets: seconds on each of the three clocks of `time`."
    seconds = [0.0]
    for name in ("monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: seconds[0])
    return seconds


def test_seconds_are_counted_to_a_hundredth_and_add_up(now, tmp_path):
    now[0] = 10.0
    clock = Clock()
    manager = CheckpointManager(tmp_path, {}, steps=1)
    now[0] = 12.3456
    assert clock.read() == {"wall_seconds": 2.35, "cpu_seconds": 2.35}
    manager.earlier_seconds = {"wall_seconds": 1.006, "other": 9.0}
    assert manager.seconds() == {"wall_seconds": 3.36, "cpu_seconds": 2.35}


@pytest.mark.parametrize(
    "every, done, total, is_due",
    [
        (None, 12, 12, False),
        (4, 3, 12, False),
        (4, 4, 12, True),
        (4, 11, 12, False),
        (5, 10, 12, True),
        (5, 12, 12, True),  # the last
        # another stage, by its share: of 30 steps every tenth, of two each
        (4, 4, 30, False),
        (4, 10, 30, True),
        (4, 1, 2, True),
    ],
)
def test_every_so_many_steps_of_twelve(tmp_path, every, done, total, is_due):
    assert CheckpointManager(tmp_path, {}, steps=12, every=every).is_due(done, total) == is_due


@pytest.mark.parametrize(
    "seconds, done, total, is_overdue",
    [
        (4.99, 20, 100, False),
        (5.0, 20, 100, True),
        (5.0, 21, 100, False),
        (119.0, 21, 100, False),
        (120.0, 21, 100, True),
        (5.0, 7, 39, True),  # a twentieth of fewer than forty steps is one step
        (5.0, 7, 40, False),
        (5.0, 7, 19, True),
    ],
)
def test_a_twentieth_of_the_steps_or_two_minutes(now, tmp_path, seconds, done, total, is_overdue):
    manager = CheckpointManager(tmp_path, {}, steps=total)
    now[0] = seconds
    assert manager.is_overdue(done, total) == is_overdue


@pytest.mark.parametrize("slow, interval", [(0.0, 5.0), (0.5, 5.0), (0.51, 5.1), (3.0, 30.0)])
def test_saving_takes_a_tenth_of_the_time(now, tmp_path, monkeypatch, slow, interval):
    def slowly(directory, tensors, record, keep):
        now[0] += slow
        assert keep == 7

    monkeypatch.setattr("instruct_goose.runs.resume.save_checkpoint", slowly)
    manager = CheckpointManager(tmp_path, {}, steps=9, keep=7)
    now[0] = 100.0
    manager.copy_state("ppo", 1, 9, {})
    manager.save()
    assert manager.save_interval == pytest.approx(interval)
    assert manager.saved_at == 100.0 + slow


def test_a_state_that_can_be_asked_for_is_not_copied_at_each_step(tmp_path):
    "It is copied when the stage ends, early or not, and where nothing has been offered."
    manager = CheckpointManager(tmp_path, {}, steps=4)
    stage = manager.stage("sft")
    asked = []

    def state():
        asked.append(1)
        return {"x": torch.ones(1)}

    stage.after_step(1, 4, state)
    assert len(asked) == 1 and manager.latest.progress == ("sft", 1, 4)
    stage.offer_state(2, 4, state)
    stage.after_step(2, 4, state)
    assert len(asked) == 1 and manager.latest.progress == ("sft", 1, 4)
    manager.copy_offered_state()
    assert len(asked) == 2 and manager.latest.progress == ("sft", 2, 4)
    assert manager.offered is None
    stage.offer_state(3, 4, state)
    with stage.uninterrupted_step():
        assert manager.offered is None  # it is no longer valid
    stage.offer_state(4, 4, state)
    stage.after_step(4, 4, state)
    assert len(asked) == 3 and manager.latest.progress == ("sft", 4, 4)
    assert not checkpoints(manager.checkpoint_dir)
    stage.offer_state(2, 4, state)
    stage.after_step(2, 4, state, is_last=True)
    assert len(asked) == 4 and len(checkpoints(manager.checkpoint_dir)) == 1


def test_what_is_on_disk_is_not_written_again(tmp_path):
    manager = CheckpointManager(tmp_path, {}, steps=4)
    manager.save()  # nothing is done
    assert not manager.checkpoint_dir.exists()
    manager.copy_state("ppo", 1, 4, {})
    manager.save()
    manager.save()
    assert len(checkpoints(manager.checkpoint_dir)) == 1
    manager.copy_state("ppo", 2, 4, {})
    manager.leave()  # as in a forked child
    manager.save()
    assert len(checkpoints(manager.checkpoint_dir)) == 1


@pytest.mark.parametrize("stage, resumed_from", [("ppo", 3), ("sft", "sft")])
def test_a_run_says_where_it_was_resumed(tmp_path, stage, resumed_from):
    "An iteration of the main stage, or the name of another one; and the seconds before."
    assert CheckpointManager(tmp_path, {}, steps=4).resume() is None
    manager = CheckpointManager(tmp_path, {}, steps=4)
    manager.earlier_seconds = {"wall_seconds": 50.0}
    manager.copy_state(stage, 3, 4, {"x": 1})
    manager.save()
    again = CheckpointManager(tmp_path, {}, steps=4)
    assert again.resume() == manager.checkpoint_dir / "checkpoint-000001"
    assert again.resumed_from == resumed_from
    assert again.latest.progress == (stage, 3, 4) and again.on_disk is again.latest
    assert again.earlier_seconds["wall_seconds"] >= 50.0
    record = load_checkpoint(manager.checkpoint_dir / "checkpoint-000001")[1]
    assert {"instruct_goose", "torch"} <= record["environment"].keys()


# ---------------------------------------------------------------- how a run goes on
class Worse(StoppedError):
    flags = " --even-if-worse"


@pytest.mark.parametrize(
    "error, to_go_on, says",
    [
        (ValueError, None, "the same command with --output-dir {run} --resume\n"),
        (Worse, None, "the same command with --output-dir {run} --resume --even-if-worse\n"),
        (Worse, "by hand", "by hand\n"),
    ],
)
def test_how_to_go_on_is_said(tmp_path, capsys, error, to_go_on, says):
    with pytest.raises(error), CheckpointManager(tmp_path, {}, steps=4) as manager:
        manager.to_go_on = to_go_on
        manager.copy_state("sft", 2, 4, {})
        raise error("it stops")
    said = capsys.readouterr().err
    assert "checkpoint-000001 holds the run after 2 of 4 steps of the stage 'sft'.\n" in said
    assert said.endswith("To go on: " + says.format(run=tmp_path))


def test_a_block_that_ends_well_saves_nothing_and_says_nothing(tmp_path, capsys):
    with CheckpointManager(tmp_path, {}, steps=4) as manager:
        manager.copy_state("sft", 2, 4, {})
    assert not checkpoints(manager.checkpoint_dir) and capsys.readouterr().err == ""


# ---------------------------------------------------------------- signals, without a run
def test_signals_in_another_thread_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with SignalWatch() as watch:
            seen.append(dict(watch.before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{}] and signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_raised_once_and_again_if_it_was_swallowed():
    watch = SignalWatch()
    watch.check()  # none has come
    with pytest.raises(Terminated, match="stopped by SIGTERM"):
        watch.receive(signal.SIGTERM, None)
    watch.receive(signal.SIGINT, None)  # a later one is not
    assert watch.received == signal.SIGTERM and watch.raised
    with pytest.raises(Terminated):
        watch.check()
    watch.muted = True
    watch.check()


def test_a_signal_waits_for_the_end_of_a_block():
    watch = SignalWatch()
    with pytest.raises(KeyboardInterrupt) as e, watch.delayed():
        watch.receive(signal.SIGINT, None)
        assert not watch.raised and watch.waiting
    assert not isinstance(e.value, Terminated) and not watch.waiting
    with pytest.raises(ZeroDivisionError):
        with SignalWatch().delayed():
            raise ZeroDivisionError


# ---------------------------------------------------------------- records of a run
RECORD = {
    "settings": {"steps": 4},
    "progress": ["ppo", 2, 4],
    "stages": {"ppo": {}, "sft": {}},
    "seconds": {"wall_seconds": 0, "cpu_seconds": 1.5},
}


@pytest.mark.parametrize(
    "change, is_run",
    [
        ({}, True),
        ({"progress": ["ppo", 4, 4]}, True),
        ({"progress": ["ppo", 0, 4]}, False),
        ({"progress": ["ppo", 5, 4]}, False),
        ({"progress": ["ppo", 2, 4.0]}, False),
        ({"progress": ["ppo", True, 4]}, False),
        ({"progress": ["other", 2, 4]}, False),
        ({"settings": {}}, True),
        ({"settings": {"steps": 4.0}}, False),
        ({"settings": [4]}, False),
        ({"stages": {"ppo": {}, "sft": 1}}, False),
        ({"stages": {"ppo": {}, "s/t": {}}}, False),
        ({"stages": {"ppo": {}}}, False),  # tensors of another stage
        ({"seconds": {"wall_seconds": -0.1}}, False),
        ({"seconds": {"wall_seconds": float("inf")}}, False),
        ({"seconds": {}}, True),
    ],
)
def test_the_parts_of_a_record_fit_each_other(change, is_run):
    tensors = {"ppo/weight": torch.zeros(1), "sft/deep/weight": torch.zeros(1)}
    assert is_run_record(tensors, RECORD | change) == is_run


@pytest.mark.parametrize(
    "then, now_given, says",
    [
        ({"lr": 1, "steps": 4}, {"lr": 1, "steps": 4}, None),
        ({"lr": 1, "steps": 4}, {"lr": 1, "steps": 5}, None),
        ({"lr": 1, "steps": 4}, {"lr": 1, "steps": 3}, "steps was 4 and is 3"),
        ({"lr": 1, "steps": 4}, {"lr": 2, "steps": 4}, "lr was 1 and is 2"),
        ({"lr": 1}, {"lr": 1, "steps": 0}, None),
        ({"lr": 1, "steps": 1}, {"lr": 1}, "steps was 1 and is 0"),
    ],
)
def test_a_run_grows_and_nothing_else_changes(then, now_given, says):
    if says is None:
        refuse_other_run(then, now_given)
    else:
        with pytest.raises(ValueError, match=says):
            refuse_other_run(then, now_given)


# ---------------------------------------------------------------- the quickstart, small

TINY = dict(
    reviews=300,
    pairs=60,
    held_out_pairs=40,
    sft_steps=12,
    rm_steps=6,
    steps=4,
    batch_size=16,
    eval_samples=32,
    best_of=2,
    tune_steps=2,
    epochs=1,
    layers=1,
    hidden_size=16,
    progress=False,
)
FLAGS = [
    x for k, v in TINY.items() if k != "progress" for x in (f"--{k.replace('_', '-')}", str(v))
] + ["--no-progress"]


def result(out):
    "All that a run says, but for the time it took and where it was resumed from."
    files = {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob("*.safetensors")
        if "checkpoints" not in p.parts
    }
    log = [
        {k: v for k, v in json.loads(line).items() if "second" not in k}
        for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    summary = {
        k: v
        for k, v in json.loads((out / "summary.json").read_text("utf-8")).items()
        if "seconds" not in k and k != "resumed_from"
    }
    return files, log, summary, (out / "samples.md").read_text("utf-8")


def config(out, **settings):
    return QuickstartConfig(**TINY | {"output_dir": out} | settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, with every checkpoint that it made; and what it says. Plots
    and the shape checker, which draws from Python's generator, are off.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "plot_metrics", lambda *_: [])
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        out = tmp_path_factory.mktemp("whole") / "run"
        assert run_quickstart(config(out, save_every=1, keep=1000))["resumed_from"] is None
        yield out, result(out)


def stopped_at(whole, out, n):
    "The directory as it was when checkpoint n was the last, with the log some lines longer."
    shutil.copytree(whole, out)
    for path in checkpoints(out / "checkpoints")[n:]:
        shutil.rmtree(path)
    for name in ("summary.json", "samples.md"):
        (out / name).unlink()
    shutil.rmtree(out / "policy")
    return out


def places(out):
    return [tuple(load_checkpoint(p)[1]["progress"]) for p in checkpoints(out / "checkpoints")]


def stamps(out):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.rglob("*") if p.is_file()}


def test_every_stage_was_saved(whole):
    assert places(whole[0]) == [("sft", n, 12) for n in (3, 6, 9, 12)] + [
        ("reward model", n, 6) for n in range(1, 7)
    ] + [("ppo", n, 4) for n in range(1, 5)] + [("baselines", n, 2) for n in (1, 2)]


@pytest.mark.deep
@pytest.mark.parametrize(
    "place, says",
    [
        (("sft", 6, 12), "sft"),
        (("sft", 12, 12), "sft"),
        (("reward model", 3, 6), "reward model"),
        (("ppo", 3, 4), 3),
        (("ppo", 4, 4), 4),
        (("baselines", 1, 2), "baselines"),
    ],
    ids=str,
)
def test_from_every_kind_of_place_it_ends_the_same(whole, tmp_path, place, says):
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(place))
    assert (
        run_quickstart(config(out, resume=True))["resumed_from"] == says and result(out) == whole[1]
    )


def test_a_damaged_checkpoint_is_passed_over_and_it_ends_the_same(whole, tmp_path, capsys):
    out = stopped_at(whole[0], tmp_path / "run", 1 + places(whole[0]).index(("ppo", 3, 4)))
    newest = checkpoints(out / "checkpoints")[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1000])
    (out / "metrics.jsonl").write_text(
        (out / "metrics.jsonl").read_text() + '{"iteration": 3, "rew'
    )
    assert run_quickstart(config(out, resume=True))["resumed_from"] == 2
    assert "is damaged: tensors.safetensors" in capsys.readouterr().err and result(out) == whole[1]


def test_a_finished_run_is_left_alone_and_other_settings_are_named(
    whole, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(quickstart, "make_data", lambda *_: pytest.fail("work was done"))
    assert run_quickstart(config(whole[0], resume=True)) == json.loads(
        (whole[0] / "summary.json").read_text("utf-8")
    )
    assert "is finished: nothing to do" in capsys.readouterr().out
    out = stopped_at(whole[0], tmp_path / "run", 5)
    for _ in range(2):  # by config.json; and by the checkpoint alone
        before = stamps(out)
        with pytest.raises(ValueError, match="settings: sft_lr was 0.008 and is 0.01. Give"):
            run_quickstart(config(out, resume=True, sft_lr=0.01, steps=5, threads=2))
        assert stamps(out) == before
        (out / "config.json").unlink(missing_ok=True)


def test_nothing_saved_yet_starts_over(whole, tmp_path, capsys):
    (tmp_path / "begun").mkdir()
    shutil.copy(whole[0] / "config.json", tmp_path / "begun")
    for out in (tmp_path / "nowhere", tmp_path / "begun"):
        assert (
            open_run(config(out, resume=True), "quickstart")[0] == out
            and "starts over" in capsys.readouterr().out
        )
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds files: give another"):
        run_quickstart(config(tmp_path / "foreign", resume=True))


@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT]))
def test_half_an_iteration_is_not_kept(whole, tmp_path, number, capsys):
    """The command ends with the shell's status, leaves a policy that can be used, and goes on from
    the last whole iteration.
    """
    out = tmp_path / "run"
    real = quickstart.make_trainer

    def make(*args):
        trainer = real(*args)
        move = trainer.optimizer.step
        calls = []

        def interrupted(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2 * 4 + 2:
                os.kill(
                    os.getpid(), number
                )  # four updates an iteration: in the middle of the third
            return move(*args, **kwargs)

        trainer.optimizer.step = interrupted
        return trainer

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as e:
        patch.setattr(quickstart, "make_trainer", make)
        main(["quickstart", *FLAGS, "--output-dir", str(out)])
    assert (
        places(out) == [("ppo", 2, 4)] and f"--output-dir {out} --resume" in capsys.readouterr().err
    )
    assert (
        e.value.code == 128 + number
        and AutoModelForCausalLM.from_pretrained(out / "policy")
        and AutoTokenizer.from_pretrained(out / "policy")
    )
    main(["sample", str(out), "--n", "1"])
    run_quickstart(config(out, resume=True))
    assert result(out) == whole[1]


def process(*argv):
    "The command in a process of its own."
    child = multiprocessing.get_context("fork").Process(
        target=main, args=(["quickstart", *FLAGS, *argv],)
    )
    child.start()
    return child


@pytest.mark.parametrize("n", first(1, [1, 0, 2]))  # `make evidence` kills twenty
def test_a_kill(whole, tmp_path, n):
    longest = json.loads((whole[0] / "summary.json").read_text("utf-8"))["wall_seconds"]
    out = tmp_path / "run"
    child = process("--output-dir", str(out), "--save-every", "1")
    begun = time.monotonic()
    while not (out / "config.json").exists() and time.monotonic() < begun + 60:
        time.sleep(0.005)
    moment = random.Random().uniform(n * longest / 3, (n + 1) * longest / 3)
    child.join(moment)
    child.kill()  # SIGKILL
    child.join(600)
    print(f"killed after {moment:.2f} of about {longest:.2f} s, at {places(out)[-1:]}")
    again = process("--output-dir", str(out), "--save-every", "1", "--resume")
    again.join(600)
    assert (
        child.exitcode in (-signal.SIGKILL, 0) and again.exitcode == 0 and result(out) == whole[1]
    )
    assert not [p for p in out.rglob(".*")]  # nothing half written is left
