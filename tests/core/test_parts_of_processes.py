"""How a process finds its place, its share and its device, without any other process: the variables of
launchers and torch's group are stand-ins. The expectations are written by hand."""

import pickle
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from instruct_goose.core import processes
from instruct_goose.core.processes import (
    DEFAULT_TIMEOUT,
    TORCHRUN_VARIABLES,
    all_reduce,
    broadcast_weights,
    deserialize,
    explain_lost_peer,
    find_device,
    full_tensor,
    init_processes,
    is_main_process,
    on_main_process,
    rank,
    rank_slice,
    require_equal,
    require_one_process,
    run_and_gather,
    serialize,
    world_size,
)


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
