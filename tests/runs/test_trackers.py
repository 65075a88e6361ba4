"""The three trackers with their real packages, in a process of their own and without a network;
what they wrote is read back with the package's own reader. Not installed: skipped, and said so.
(They are no part of `dev`: pip install -e '.[trackers]'.)
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from small_trainer import PROMPTS, reward, trainer

from instruct_goose.core.checks import check_values
from instruct_goose.recipes.own_model import TrainConfig
from instruct_goose.runs.directory import TrainingJob, open_run, train_policy
from instruct_goose.runs.resume import RL_STAGE, CheckpointManager
from instruct_goose.runs.trackers import (
    TRACKERS,
    TensorBoard,
    Tracker,
    Trackio,
    WandB,
    by_word,
    need_tracker,
    some_texts,
)
from instruct_goose.training.callbacks import Callback

RUN = """
import socket, sys
def refuse(self, address):
    is_internet = self.family in (socket.AF_INET, socket.AF_INET6)
    if is_internet and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise OSError("no network")
    return connect(self, address)
connect, socket.socket.connect = socket.socket.connect, refuse
import torch, transformers
from contextlib import closing
from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.trackers import TRACKERS
name, out = sys.argv[1:3]
tokenizer = word_tokenizer("a b c".split(), 16, pad="<end>", bos="<end>", eos="<end>")
def trainer():
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=2
    )
    config = RLHFConfig(steps=4, batch_size=4, max_new_tokens=3, device="cpu")
    return RLHFTrainer(transformers.GPT2LMHeadModel(shape), config=config, tokenizer=tokenizer)
t, judge, lines = trainer(), lambda texts: [float(len(x)) for x in texts], []
with closing(TRACKERS[name](out, every=2)) as tracker:
    t.callbacks.append(tracker)
    lines += t.train(["a", "b c"], judge, steps=3, progress=False)
state = t.state_dict()
with closing(TRACKERS[name](out, every=2)) as tracker:  # broken off, and resumed
    again = trainer()
    again.load_state_dict(state)
    again.callbacks.append(tracker)
    lines += again.train(["a", "b c"], judge, progress=False)
import json, pathlib
pathlib.Path(out, "lines.json").write_text(json.dumps(lines))
"""


def run(name, out, **environment):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[trackers]'")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | environment
    done = subprocess.run(
        [sys.executable, "-c", RUN, name, str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=540,
        cwd=out.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "lines.json").read_text())


def test_tensorboard(tmp_path):
    lines = run("tensorboard", tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(
        str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    seen.Reload()
    for i, line in enumerate(lines):
        for name, x in by_word(line).items():
            [event] = [e for e in seen.Scalars(name) if e.step == i]
            assert event.value == pytest.approx(x, rel=1e-6, abs=1e-30), name
    assert set(seen.Tags()["scalars"]) == {name for line in lines for name in by_word(line)}
    texts = {
        e.step: e.tensor_proto.string_val[0].decode() for e in seen.Tensors("samples/text_summary")
    }
    assert sorted(texts) == [0, 2] and texts[0].count("\n") == 5 and "score" in texts[0]


def records(path):
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB, behind a header of
    seven bytes.
    """
    data = path.read_bytes()
    at = 7
    whole = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or not kind:
            at += left
            continue
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def test_wandb_offline(tmp_path):
    lines = run(
        "wandb",
        tmp_path / "run",
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DISABLE_GIT="true",
    )
    from wandb.proto import wandb_internal_pb2 as proto

    rows = {}
    settings = {}
    ids = set()
    for path in sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb")):
        for data in records(path):
            record = proto.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
                settings |= {x.key: json.loads(x.value_json) for x in record.run.config.update}
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.setdefault(int(row["_step"]), {}).update(row)
    assert (
        sorted(rows) == [0, 1, 2, 3]
        and ids == {(tmp_path / "run/tracker.id").read_text()}
        and settings["batch_size"] == 4
    )
    for i, line in enumerate(lines):
        for name, x in by_word(line).items():
            assert rows[i][name] == pytest.approx(x), name
    assert [i for i in rows if any(name.startswith("samples") for name in rows[i])] == [0, 2]


def test_trackio(tmp_path):
    lines = run(
        "trackio",
        tmp_path / "run",
        TRACKIO_DIR=str(tmp_path / "kept"),
        HF_HUB_OFFLINE="1",
        GRADIO_ANALYTICS_ENABLED="False",
    )
    import sqlite3

    [base] = (tmp_path / "kept").glob("*.db")
    with sqlite3.connect(base) as db:
        found = db.execute("select step, metrics from metrics order by id").fetchall()
    rows = {}
    for step, text in found:
        rows.setdefault(step, {}).update(json.loads(text))
    assert sorted(rows) == [0, 1, 2, 3]
    for i, line in enumerate(lines):
        for name, x in by_word(line).items():
            assert rows[i][name] == pytest.approx(x), name
    assert [i for i in rows if "samples" in rows[i]] == [0, 2]


def test_what_is_not_installed_is_said_before_anything_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr("instruct_goose.runs.trackers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--track wandb needs the package wandb.*\[trackers\]"):
        need_tracker("wandb")
    given = TrainConfig(
        model="m", data=Path("x"), reward=("r",), track="wandb", output_dir=tmp_path / "run"
    )
    with pytest.raises(ValueError, match="needs the package wandb"):
        open_run(given, "train")
    assert not any(tmp_path.iterdir())  # before anything is written
    with pytest.raises(
        ValueError, match="track is 'mlflow': it must be one of 'tensorboard', 'wandb', 'trackio'"
    ):
        TrainConfig(model="m", data=Path("x"), reward=("r",), track="mlflow")
    assert list(TRACKERS) == ["tensorboard", "wandb", "trackio"]


def test_texts_of_a_table_are_evenly_spaced():
    import torch

    from instruct_goose.rollouts.rollout import Rollout

    ids = torch.zeros(5, 2).long()
    r = Rollout(ids, ids.bool(), ids, ids.bool(), texts=list("vwxyz"), scores=torch.arange(5.0))
    assert some_texts(r) == [("", t, s) for t, s in zip("vwxyz", range(5))] and [
        t for _, t, _ in some_texts(r[torch.arange(9) % 5])
    ] == list("vxzwy")


class Counting(Tracker):
    "Counts the iterations that it was sent, and remembers the count."

    counts: ClassVar[list[int]] = []  # after each iteration, of all that were made
    intervals: ClassVar[list[int]] = []  # between tables, of all that were made

    def __init__(self, run_dir, every=10):
        super().__init__(run_dir, every)
        self.intervals.append(every)
        self.sent = 0

    def numbers(self, numbers, iteration):
        self.sent += 1
        self.counts.append(self.sent)

    def state_dict(self):
        return {"sent": self.sent}

    def check_state_dict(self, state):
        check_values(state, {"sent": int})

    def load_state_dict(self, state):
        self.sent = state["sent"]


def test_a_tracker_with_a_state_goes_on_with_it(tmp_path, monkeypatch, recwarn):
    monkeypatch.setitem(TRACKERS, "counting", Counting)
    monkeypatch.setattr(Counting, "counts", [])
    monkeypatch.setattr(Counting, "intervals", [])
    job = TrainingJob(PROMPTS, reward, progress=False, track="counting", track_every=3)
    for steps in (2, 5):  # two iterations, then a longer run goes on
        manager = CheckpointManager(tmp_path, {"steps": steps}, steps, every=1)
        manager.resume()
        with manager:
            train_policy(trainer(steps=steps), job, tmp_path, manager.stage(RL_STAGE))

    assert Counting.counts == [1, 2, 3, 4, 5]
    assert Counting.intervals == [3, 3]
    assert not [w for w in recwarn if "is left out" in str(w.message)]


def test_a_name_that_begins_with_its_group_stays():
    numbers = {"logged/accuracy": 1.0, "reward_mean": 2.0, "held_out_reward": 3.0}
    named = by_word(numbers | {"iteration": 4, "kl_to_reference": None})
    assert named == {
        "logged/accuracy": 1.0,
        "reward/reward_mean": 2.0,
        "held_out/held_out_reward": 3.0,
    }


def test_a_tracker_that_does_not_open_is_not_shut(tmp_path):
    class Offline(Tracker):
        def open(self, iteration):
            raise RuntimeError("no network")

        def shut(self):
            raise AssertionError("shut without having been opened")

    tracker = Offline(tmp_path)
    with pytest.raises(RuntimeError, match="no network"):
        trainer(callbacks=[tracker]).step(PROMPTS, reward)
    tracker.close()


class Kept(Tracker):
    "Keeps what it is sent, by iteration."

    def __init__(self, run_dir, every=10):
        super().__init__(run_dir, every)
        self.sent = {}

    def numbers(self, numbers, iteration):
        self.sent[iteration] = dict(numbers)


def test_a_tracker_gets_what_is_measured_when_a_callback_has_ended_the_run(tmp_path):
    "A run that a callback ends measures the policy that it leaves, after `on_iteration`."

    class Enough(Callback):
        def on_iteration(self, trainer, experience, metrics):
            return "enough" if metrics["iteration"] == 1 else None

    tracker = Kept(tmp_path, every=0)
    t = trainer(max_kl_to_reference=1e3, callbacks=[Enough(), tracker])
    history = t.train(PROMPTS, reward, progress=False)
    assert history[1]["final_kl_to_reference"] is not None
    assert tracker.sent == {line["iteration"]: by_word(line) for line in history}


# ---------------------------------------------------------------- what is sent, and when
class Told(Tracker):
    "Notes each call, in order."

    def __init__(self, run_dir, every=10):
        super().__init__(run_dir, every)
        self.calls = []

    def open(self, iteration):
        self.calls.append(("open", iteration))

    def numbers(self, numbers, iteration):
        self.calls.append(("numbers", iteration))

    def table(self, rows, iteration):
        self.calls.append(("table", iteration, len(rows)))

    def shut(self):
        self.calls.append(("shut",))


@pytest.mark.parametrize("every, tables", [(2, [0, 2]), (0, [])])
def test_a_tracker_is_opened_once_and_gets_a_table_at_times(tmp_path, every, tables):
    tracker = Told(tmp_path / "new/run", every)
    tracker.close()
    assert tracker.calls == []
    made = trainer(steps=3, callbacks=[tracker])
    made.train(PROMPTS, reward, progress=False)
    assert tracker.run_dir.is_dir() and tracker.is_open
    assert tracker.settings["steps"] == 3 and tracker.settings["lr"] == made.config.lr
    tracker.close()
    tracker.close()
    expected = [("open", 0)]
    for iteration in range(3):
        expected.append(("numbers", iteration))
        if iteration in tables:
            expected.append(("table", iteration, min(8, made.config.batch_size)))
    assert tracker.calls == [*expected, ("shut",)]


def test_the_settings_of_a_run_are_those_of_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"mine": 1}', "utf-8")
    tracker = Told(tmp_path)
    trainer(steps=1, callbacks=[tracker]).train(PROMPTS, reward, progress=False)
    assert tracker.settings == {"mine": 1}


@pytest.mark.parametrize("n, shown", [(1, [0]), (8, list(range(8))), (9, [0, 2, 4, 6, 8])])
def test_eight_texts_at_most(n, shown):
    import torch

    from instruct_goose.rollouts.rollout import Rollout

    ids = torch.zeros(n, 2).long()
    rollout = Rollout(ids, ids.bool(), ids, ids.bool(), scores=torch.arange(float(n)))
    assert some_texts(rollout) == [("", "", float(i)) for i in shown]
    rollout.prompts = [f"p{i}" for i in range(n)]
    assert some_texts(rollout) == [(f"p{i}", "", float(i)) for i in shown]


# ---------------------------------------------------------------- the calls of each package
class Package:
    "Stands for a tracker's package: notes each call by its name."

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **named):
            self.calls.append((name, *args, named))
            return self

        return call


ROWS = [("p", "p a", 1.0), ("q", "q b", 0.5)]


def package_of(monkeypatch, expected):
    package = Package()

    def load(name):
        assert name == expected
        return package

    monkeypatch.setattr("instruct_goose.runs.trackers.import_module", load)
    return package


def test_the_calls_of_tensorboard(monkeypatch, tmp_path):
    package = package_of(monkeypatch, "torch.utils.tensorboard")
    tracker = TensorBoard(tmp_path / "run")
    tracker.settings = {"lr": 0.1}
    tracker.open(3)
    tracker.numbers({"a/b": 1.0, "c/d": 2.0}, 4)
    tracker.table(ROWS, 5)
    tracker.shut()
    writer, settings, *numbers, flush, table, close = package.calls
    assert writer == ("SummaryWriter", str(tmp_path / "run/tensorboard"), {"purge_step": 3})
    assert settings[:2] == ("add_text", "settings") and settings[3:] == (3, {})
    assert "| lr " in settings[2] and "0.1" in settings[2] and "setting" in settings[2]
    assert numbers == [("add_scalar", "a/b", 1.0, 4, {}), ("add_scalar", "c/d", 2.0, 4, {})]
    assert (flush, close) == (("flush", {}), ("close", {}))
    assert table[:2] == ("add_text", "samples") and table[3:] == (5, {})
    assert all(word in table[2] for word in ("prompt", "text", "score", "p a", "q b"))


@pytest.mark.parametrize("kind, module", [(WandB, "wandb"), (Trackio, "trackio")])
def test_the_calls_of_wandb_and_of_trackio(monkeypatch, tmp_path, kind, module):
    package = package_of(monkeypatch, module)
    tracker = kind(tmp_path)
    tracker.settings = {"lr": 0.1}
    tracker.open(3)
    tracker.numbers({"a/b": 1.0}, 4)
    tracker.table(ROWS, 5)
    tracker.shut()
    identity = (tmp_path / "tracker.id").read_text("utf-8")
    named = {"project": "instruct_goose", "config": {"lr": 0.1}, "resume": "allow"}
    if kind is WandB:
        named |= {"name": tmp_path.name, "dir": str(tmp_path), "id": identity}
    else:
        named |= {"name": f"{tmp_path.name}-{identity}"}
    init, numbers, table, samples, finish = package.calls
    assert init == ("init", named)
    assert numbers == ("log", {"a/b": 1.0}, {"step": 4})
    assert table == ("Table", {"columns": ["prompt", "text", "score"], "data": [*map(list, ROWS)]})
    assert samples == ("log", {"samples": package}, {"step": 5})
    assert finish == ("finish", {})


def test_a_run_keeps_its_identity(tmp_path):
    "Eight digits; or what stands in the file."
    made = WandB(tmp_path).identity()
    assert len(made) == 8 and int(made, 16) >= 0
    assert WandB(tmp_path).identity() == Trackio(tmp_path).identity() == made
    (tmp_path / "tracker.id").write_text("mine\n", "utf-8")
    assert WandB(tmp_path).identity() == "mine"
