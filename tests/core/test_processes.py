"""Processes that meet, share, tell each other, add up, and end together. They are forked here,
meet over gloo, and are really two. How a process finds its place, its share and its device is tried without any other
process, with stand-ins for launchers and torch's group."""

import faulthandler
import importlib
import io
import itertools
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from two_processes import GRPO, PPO, apart, rollout, run

from instruct_goose.core import processes
from instruct_goose.core.processes import (
    DEFAULT_TIMEOUT,
    TORCHRUN_VARIABLES,
    ProgressBar,
    all_reduce,
    broadcast_weights,
    deserialize,
    explain_lost_peer,
    find_device,
    full_tensor,
    in_processes,
    init_processes,
    is_main_process,
    on_main_process,
    rank,
    rank_slice,
    require_equal,
    require_one_process,
    run_and_gather,
    serialize,
    with_progress,
    world_size,
)
from instruct_goose.models.sharding import configs
from instruct_goose.recipes.quickstart import run_quickstart
from instruct_goose.recipes.ratings import ReviewsConfig, run_reviews
from instruct_goose.rollouts.rollout import map_shares

# ----------------------------------------------------------- the primitives


def primitives():
    k = rank()
    shares = [list(range(n))[rank_slice(n)] for n in (5, 1, 0)] + [list(range(7))[rank_slice(7, 3)]]
    x = torch.full((3,), 1.0 + k)
    y = torch.full((2, 2), 10.0 * k, dtype=torch.float64)
    z = torch.ones(4)
    transposed = (torch.arange(6.0).view(2, 3) * (1 + k)).T  # not contiguous
    all_reduce([x, y, z, transposed])
    assert torch.equal(transposed, 3 * torch.arange(6.0).view(2, 3).T)
    column = map_shares(
        lambda r: {
            "s": r.mask.sum(-1) + 10,
            "none": None,
            "some": r.mask.double() if k == 0 else None,
        },
        rollout(5),
    )
    torch.manual_seed(k)
    net = torch.nn.Linear(2, 1)
    broadcast_weights(net)
    seen = []
    on_main_process(lambda: seen.append(k))
    try:
        require_equal("the settings", k, "start again")
    except ValueError as e:
        said = str(e)
    return (
        shares,
        (x, y, z),
        column,
        net.weight,
        (seen, is_main_process(), world_size(), on_main_process(lambda: k)),
        said,
        run_and_gather(lambda: k * 2),
    )


def test_primitives():
    (shares, sums, column, weight, firsts, said, twice), other = in_processes(2, primitives)
    assert shares == [[0, 1], [], [], [0, 1, 2]] and other[0] == [[2, 3, 4], [0], [], [3, 4, 5, 6]]
    assert [x.flatten()[0].item() for x in sums] == [3.0, 10.0, 2.0] and [
        x.dtype for x in sums
    ] == [torch.float32, torch.float64, torch.float32]
    assert (
        column["s"].tolist() == [11, 12, 13, 14, 14]
        and column["none"] is None
        and column["some"].sum(-1).tolist() == [1, 2, 0, 0, 0]
    )
    assert (
        torch.equal(weight, other[3])
        and firsts == ([0], True, 2, 0)
        and other[4] == ([], False, 2, 0)
        and twice == [0, 2]
    )
    assert "the settings differ between process 0 and process 1: start again" == said


# ----------------------------------------------------------- one fails, the others do not wait


def how_it_ends(trouble, seconds=60.0):
    began = time.monotonic()
    try:
        run("grpo", GRPO, 3, reward_fn=[trouble])
    except BaseException as e:
        return type(e).__name__, str(e), time.monotonic() - began
    return "fine", "", 0


def raising(error):
    def trouble(texts):
        if rank() == 1 and world_size() == 2:
            raise error
        return [0.0] * len(texts)

    return trouble


@pytest.mark.parametrize("error", (ValueError("no more"), KeyboardInterrupt("Ctrl-C")))
def test_an_error_in_one_process_ends_all_and_is_named(error):
    first, second = in_processes(2, how_it_ends, raising(error))
    assert (
        first[0] == "PeerFailed" and "process 1 of 2 failed" in first[1] and str(error) in first[1]
    )
    assert (
        second[0] in ("RewardError", "KeyboardInterrupt")
        and str(error) in second[1]
        and "others" not in second[1]
    )


def nested(make_other):
    "Process 0 fails two levels deep. Returns what each process raises."

    def fail():
        if rank() == 0:
            raise OSError("the judge is down")

    def middle():
        try:
            run_and_gather(fail)
        except OSError as error:
            raise make_other(error) from None

    try:
        run_and_gather(lambda: run_and_gather(middle))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.mark.parametrize(
    "make_other, says",
    [
        (lambda error: error, "OSError: the judge is down"),
        (lambda error: ValueError("no scores"), "ValueError: no scores"),
    ],
    ids=["as it is", "as another error"],
)
def test_an_error_inside_nested_work_keeps_its_name(make_other, says):
    first, second = in_processes(2, nested, make_other)
    assert first == says
    assert second == (
        "PeerFailed: process 0 of 2 failed, which ends this one too: OSError: the judge is down"
    )


def left_alone(leave, patience=None):
    "Process 1 leaves without a word, or sleeps; process 0 is told, after so many seconds at the latest, and tells."
    if patience:
        torch.distributed.distributed_c10d._set_pg_timeout(
            timedelta(seconds=patience), torch.distributed.group.WORLD
        )
    if rank() == 1:
        return leave()
    try:
        run_and_gather(lambda: 1)
    except ConnectionError as e:
        return str(e)


@pytest.mark.parametrize(
    "leave, patience",
    [(torch.distributed.destroy_process_group, None), (lambda: time.sleep(6), 3)],
    ids=["gone", "asleep"],
)
def test_a_process_that_is_gone_or_sleeps_is_not_waited_for_longer_than_allowed(leave, patience):
    began = time.monotonic()
    said, _ = in_processes(2, left_alone, leave, patience, seconds=500)
    assert (
        "process 0 waited for the others and lost them" in said
        and "has taken another way" in said
        and time.monotonic() - began < 200
    )


def sums_of_many():
    return torch.arange(300_000.0).exp2().clamp(max=1.0).sum().item()


def test_a_process_that_has_worked_with_threads_can_fork():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = sums_of_many()  # begins OpenMP's threads, which are not forked along
        assert in_processes(2, sums_of_many, seconds=20) == [alone, alone]
    finally:
        torch.set_num_threads(before)


def crashes(flag):
    if torch.distributed.get_rank() == 1 and not flag.exists():
        flag.touch()
        faulthandler.disable()  # it would print the stack
        os.kill(os.getpid(), signal.SIGSEGV)
    return torch.distributed.get_rank()


def test_a_crash_is_tried_once_more_and_said(tmp_path):
    with pytest.warns(RuntimeWarning, match="segmentation fault: once more"):
        assert in_processes(2, crashes, tmp_path / "once") == [0, 1]


# ----------------------------------------------------------- launched, by torch's own launcher

SCRIPT = """
import sys; sys.path[:0] = {paths!r}
from two_processes import PPO, run
from instruct_goose.core.processes import is_main_process, world_size
from instruct_goose.models.sharding import fsdp_requested
import torch
cut = fsdp_requested()
weights, texts, history = run("ppo", PPO, 2)
if cut: weights = {{k: (x.full_tensor() if hasattr(x, "full_tensor") else x) for k, x in weights.items()}}
if is_main_process(): torch.save((weights, texts, world_size(), cut), {out!r})
"""
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate, copies": [
        "accelerate.commands.launch",
        "--config_file",
        "data_parallel.yaml",
        "--num_processes",
        "2",
    ],
    "accelerate, FSDP": [
        "accelerate.commands.launch",
        "--config_file",
        "fsdp.yaml",
        "--num_processes",
        "2",
    ],
}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=pytest.mark.deep),  # the next test has it, too
        "accelerate, copies",
        pytest.param("accelerate, FSDP", marks=pytest.mark.deep),
    ],
)
def test_a_launcher_starts_a_script_that_knows_of_nothing(launcher, tmp_path):
    "The configurations are those that are shipped; only the number of processes is another. Really run: CPU processes over gloo."
    if launcher.startswith("accelerate"):
        pytest.importorskip(
            "accelerate", reason="accelerate is not installed: pip install -e '.[smollm]'"
        )
    here = Path(__file__).parent
    out = tmp_path / "weights.pt"
    (tmp_path / "script.py").write_text(
        SCRIPT.format(paths=[str(here.parent), str(here.parents[1])], out=str(out))
    )
    command = [str(configs() / x) if x.endswith(".yaml") else x for x in LAUNCHERS[launcher]]
    told = subprocess.run(
        [sys.executable, "-m", *command, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=500,
        env={k: x for k, x in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP"))}
        | {"OMP_NUM_THREADS": "1"},
    )
    assert told.returncode == 0, told.stderr[-2000:]
    weights, texts, processes, cut = torch.load(out)
    alone, alone_texts, _ = run("ppo", PPO, 2)
    assert (
        processes == 2
        and cut == ("FSDP" in launcher)
        and apart(alone, weights) < 1e-9
        and texts == alone_texts
    )


def test_two_processes_of_torchrun_of_which_one_was_killed_end_as_one_process(
    tmp_path, monkeypatch
):
    "`make launchers` does the same with accelerate and Ray, and with PPO."
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "evidence")
    launchers = importlib.import_module("launchers")
    alone = launchers.finished("one process", tmp_path / "alone", "grpo")
    found = launchers.killed_and_resumed("torchrun", "grpo", alone, tmp_path / "killed")
    resumed = found["resumed"]
    assert found["killed"]["exit_status"] != 0 and resumed["resumed_from"] == 3
    assert resumed["processes"] == 2 and resumed["same_responses"]
    assert resumed["largest_difference"] < 1e-9
    assert launchers.largest_difference(alone, launchers.untrained("grpo")) > 1e-3


def test_rays_script_asks_ray_for_these_processes_and_runs_the_script_in_each(
    tmp_path, monkeypatch
):
    "With a Ray that only writes down what it is asked, and starts the function here."
    asked, ran = [], []

    class Trainer:
        def __init__(self, function, **how):
            self.function, self.how = function, how
            asked.append(how)

        def fit(self):
            self.function(self.how["train_loop_config"])

    def kept(**how):
        return how

    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(ScalingConfig=kept))
    monkeypatch.setitem(
        sys.modules,
        "ray.train.torch",
        types.SimpleNamespace(TorchConfig=kept, TorchTrainer=Trainer, get_device=lambda: 0),
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "set_device", ran.append)
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "train.py").write_text(
        "import os, sys, beside\nassert __name__ == '__main__'\nopen('told', 'w').write(f'{sys.argv} {beside.name}')\n"
    )
    monkeypatch.chdir(tmp_path)
    script = configs() / "train_ray.py"
    for flags, backend, gpu in (
        ([], "cpu:gloo,cuda:nccl", True),
        (["--cpu", "--processes", "2"], "gloo", False),
    ):
        monkeypatch.setattr(sys, "argv", [str(script), *flags, "train.py", "--lr", "3"])
        runpy.run_path(str(script), run_name="__main__")
        assert asked[-1]["torch_config"] == {"backend": backend} and asked[-1][
            "scaling_config"
        ] == {"num_workers": 2 if flags else 16, "use_gpu": gpu}
        assert (tmp_path / "told").read_text() == "['train.py', '--lr', '3'] beside"
        (tmp_path / "told").unlink()
    assert bool(ran) == torch.cuda.is_available()
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_in_a_pipe_is_a_line_at_each_tenth(terminal, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar(40, "SFT") as bar:
        for i in range(40):
            bar.step(f"loss {i}")
    lines = [line for line in stream.getvalue().split("\n") if line.strip()]
    if terminal:
        assert len(lines) == 1 and "\r" in lines[0]
        return
    assert 10 <= len(lines) <= 12 and "\r" not in stream.getvalue()
    for tenth in range(1, 11):
        assert any(f"{4 * tenth}/40" in line for line in lines)


def test_a_slow_step_is_shown_after_ten_seconds(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = itertools.count(0.0, 11.0)
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(seconds))
    with ProgressBar(1000, "SFT") as bar:
        for _ in range(3):
            bar.step("")
    assert all(f"{n}/1000" in stream.getvalue() for n in (1, 2, 3))


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "name, delay, shown", [("KL", 0.0, True), ("KL", 1e9, False), (None, 0.0, False)]
)
def test_what_is_over_at_once_has_no_bar(terminal, name, delay, shown, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(processes, "SECONDS_UNSEEN", delay)
    assert list(with_progress(range(4), name)) == [0, 1, 2, 3]
    assert ("KL: 100%" in stream.getvalue()) == shown
    assert shown or stream.getvalue() == ""


def test_one_process_is_asked_for_before_they_meet(monkeypatch):
    require_one_process("quickstart")
    for name in processes.TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2")
    for start in (run_quickstart, lambda: run_reviews(ReviewsConfig(data=Path("no")))):
        with pytest.raises(ValueError, match="runs in one process: start it without torchrun"):
            start()


@pytest.fixture
def launched(monkeypatch):
    "launched(n): the variables of a launcher of n processes; what joins the group is noted."
    joined = []
    monkeypatch.setattr(
        processes.dist,
        "init_process_group",
        lambda backend, timeout: joined.append((backend, timeout)),
    )

    def launch(n, missing=None, gpu=None):
        for name in TORCHRUN_VARIABLES:
            monkeypatch.setenv(name, str(n))
        if missing is not None:
            monkeypatch.delenv(missing)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda i: joined.append(i))
        if gpu is not None:
            monkeypatch.setenv("LOCAL_RANK", str(gpu))
        return joined

    return launch


def test_a_process_joins_the_others_that_a_launcher_has_started(launched):
    joined = launched(2)
    init_processes()
    init_processes(7)
    assert joined == [("gloo", timedelta(seconds=DEFAULT_TIMEOUT)), ("gloo", timedelta(seconds=7))]


def test_a_process_takes_the_gpu_of_its_local_rank(launched, monkeypatch):
    joined = launched(2, gpu=3)
    init_processes()
    assert joined == [3, ("cpu:gloo,cuda:nccl", timedelta(seconds=DEFAULT_TIMEOUT))]
    joined.clear()
    monkeypatch.delenv("LOCAL_RANK")
    init_processes()
    assert joined[0] == 0


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_without_all_the_variables_of_a_launcher_a_process_is_alone(missing, launched):
    joined = launched(2, missing)
    init_processes()
    require_one_process("sft")
    assert joined == [] and (world_size(), rank(), is_main_process()) == (1, 0, True)


def test_one_process_and_one_that_has_joined_join_nothing(launched, monkeypatch):
    joined = launched(1)
    init_processes()
    require_one_process("sft")
    launched(2)
    with pytest.raises(ValueError, match="sft runs in one process"):
        require_one_process("sft")
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    init_processes()
    assert joined == []


def test_several_processes_that_have_met_are_refused_too(monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="sft runs in one process"):
        require_one_process("sft")


@pytest.mark.parametrize(
    "name, has_gpu, device",
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_a_device_is_named_or_what_there_is(name, has_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert find_device(name).type == device


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        find_device("cuda")


def shares(n, unit, size, monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: size)
    made = []
    for i in range(size):
        monkeypatch.setattr(processes, "rank", lambda i=i: i)
        made.append(list(range(n))[rank_slice(n, unit)])
    return made


@pytest.mark.parametrize(
    "n, unit, size, lengths",
    [
        (6, 1, 1, [6]),
        (6, 1, 2, [3, 3]),
        (7, 1, 2, [3, 4]),
        (8, 1, 3, [2, 3, 3]),
        (2, 1, 3, [0, 1, 1]),
        (12, 4, 2, [4, 8]),
        (16, 4, 2, [8, 8]),
        (18, 4, 2, [8, 10]),  # two of an incomplete unit
        (0, 1, 2, [0, 0]),
    ],
)
def test_shares_stand_side_by_side_and_are_nearly_equal(n, unit, size, lengths, monkeypatch):
    parts = shares(n, unit, size, monkeypatch)
    assert [len(part) for part in parts] == lengths
    assert [row for part in parts for row in part] == list(range(n))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, None, "x"], "b": (True, 0.5)},
        torch.arange(3),
        *(np.array([1, 2]).astype(code) for code in ("int8", "uint16", "int64", "float16", "?")),
        np.float32(0.5),
        np.int64(3),
        Path("a/b"),
        torch.__version__,
    ],
    ids=repr,
)
def test_plain_values_arrays_and_paths_are_sent(value):
    again = deserialize(serialize(value))
    assert type(again) is type(value)
    same = again == value
    assert same.all() if hasattr(same, "all") else same


def test_what_could_run_code_is_not_read():
    with pytest.raises(pickle.UnpicklingError):
        deserialize(serialize(SimpleNamespace(a=1)))


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
@pytest.mark.parametrize("given", [True, False])
def test_a_lost_process_is_named_in_plain_words(error, given, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if given:
        monkeypatch.setenv("RANK", "3")
    says = rf"process {3 if given else 0} waited for the others.*\(first\)"
    with pytest.raises(ConnectionError, match=says), explain_lost_peer():
        raise error("first\nsecond")
    with pytest.raises(KeyError), explain_lost_peer():
        raise KeyError


def test_a_long_reason_is_cut():
    with pytest.raises(ConnectionError) as e, explain_lost_peer():
        raise RuntimeError("x" * 201)
    assert f"({'x' * 200})" in str(e.value)


def test_a_process_alone_does_its_work_and_changes_nothing():
    assert run_and_gather(lambda: 3) == [3] and on_main_process(lambda: 4) == 4
    require_equal("settings", {"a": 1}, "cure")
    x = torch.ones(2)
    all_reduce([x])
    module = torch.nn.Linear(2, 2)
    broadcast_weights(module)
    assert x.tolist() == [1, 1] and full_tensor(x) is x
    assert full_tensor(SimpleNamespace(full_tensor=lambda: 5)) == 5


def test_values_that_differ_between_processes_are_named(monkeypatch):
    monkeypatch.setattr(processes, "run_and_gather", lambda work: [work(), 2, work()])
    require_equal("seeds", 2, "cure")
    with pytest.raises(ValueError, match="seeds differ between process 0 and process 1: do this"):
        require_equal("seeds", 1, "do this")
