"What is written, what is believed when it is read, and what happens when writing fails."

import errno
import json
import os
import random
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_models import tiny

from instruct_goose.core.files import explain_write_errors
from instruct_goose.runs import checkpoints as module
from instruct_goose.runs.checkpoints import (
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)

RECORD = {
    "where": "Zürich – 北京",
    "numbers": [1, 0.1 + 0.2, 1e-300, 2**53 + 1, None, True],
    "nested": {"": []},
}


def some(seed=0):
    torch.manual_seed(seed)
    return {
        "a/b": torch.randn(3, 5),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "half": torch.randn(7).bfloat16(),
        "wide": torch.randn(2, dtype=torch.float64),
        "ids": torch.tensor([-1, 2**62]),
        "mask": torch.tensor([True, False]),
        "transposed": torch.randn(4, 6).T,
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        x.dtype == b[k].dtype and x.shape == b[k].shape and torch.equal(x, b[k])
        for k, x in a.items()
    )


def contents(directory):
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


# ---------------------------------------------------------------- files


def test_what_is_written_is_read(tmp_path):
    path = save_checkpoint(tmp_path / "new/place", some(), RECORD)
    assert (
        path == tmp_path / "new/place/checkpoint-000001"
        and newest_checkpoint(tmp_path / "new/place") == path
    )
    tensors, record = load_checkpoint(path)
    assert same(tensors, some()) and record == RECORD
    assert {p.name for p in path.iterdir()} == {"tensors.safetensors", "record.json"}
    assert same(
        safetensors.torch.load_file(path / "tensors.safetensors"), some()
    )  # plain safetensors, plain JSON
    assert json.loads((path / "record.json").read_text("utf-8"))["record"] == RECORD
    assert not re.findall(
        r"pickle|(?<!safetensors\.)torch\.(?:load|save)\b|eval\(",
        Path(module.__file__).read_text("utf-8"),
    )
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path / "here", some(), {"x": float("nan")})
    assert not (tmp_path / "here").exists()


def test_the_newest_stay(tmp_path):
    assert (
        checkpoints(tmp_path) == checkpoints(tmp_path / "nowhere") == []
        and newest_checkpoint(tmp_path) is None
    )
    for n in range(5):
        save_checkpoint(tmp_path, {"n": torch.tensor(n)}, {"n": n}, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "checkpoint-000004",
        "checkpoint-000005",
    ]
    (tmp_path / "checkpoint-notes").mkdir()
    (tmp_path / "checkpoint-000099").write_text("a file")
    assert load_checkpoint(newest_checkpoint(tmp_path))[1] == {"n": 4}
    save_checkpoint(tmp_path, {}, {}, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-000006"] and (
        tmp_path / "checkpoint-notes"
    ).is_dir()
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(tmp_path, {}, {}, keep=0)


def _cut(n):
    return lambda path, rng: (path / "tensors.safetensors").write_bytes(
        (path / "tensors.safetensors").read_bytes()[:n]
    )


def _flip(name):
    def damage(path, rng):
        content = bytearray((path / name).read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(content)

    return damage


def _lose(name):
    return lambda path, rng: (path / name).unlink()


def _exchange(path, rng):
    (path / "tensors.safetensors").write_bytes(
        safetensors.torch.save({k: x.contiguous() for k, x in some(5).items()})
    )


def _foreign(path, rng):
    (path / "record.json").write_text('{"model_type": "gpt2"}')


DAMAGES = {
    "empty": _cut(0),
    "flipped": _flip("tensors.safetensors"),
    "flipped record": _flip("record.json"),
    "no tensors": _lose("tensors.safetensors"),
    "no record": _lose("record.json"),
    "exchanged": _exchange,
    "foreign": _foreign,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_damaged_are_named_and_passed_over(tmp_path, damage, capsys):
    for seed in range(10 if "flip" in damage.__qualname__ else 1):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        good, bad = (save_checkpoint(tmp_path, some(i), RECORD) for i in range(2))
        damage(bad, random.Random(seed))
        with pytest.raises(ValueError, match="is damaged|is no checkpoint") as e:
            load_checkpoint(bad)
        assert str(bad) in str(e.value)
        assert newest_checkpoint(tmp_path) == good and str(bad) in capsys.readouterr().err
        damage(good, random.Random(seed))
        with pytest.raises(ValueError, match="none of the 2 checkpoints in .* is whole"):
            newest_checkpoint(tmp_path)


# ---------------------------------------------------------------- writing that fails


def failing(monkeypatch, at, error):
    """The at-th operation on the file system does `error()`; returns the names of those that went
    before.
    """
    done = []

    def watch(owner, name):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            done.append(name)
            if len(done) == at:
                error()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in (
        (os, "fsync"),
        (Path, "mkdir"),
        (Path, "rename"),
        (Path, "open"),
        (shutil, "rmtree"),
    ):
        watch(owner, name)
    return done


# mkdir ×2, (open, fsync) ×2, fsync, rename, fsync, rename, rmtree …; beyond, nothing fails
OPERATIONS = 14


@pytest.mark.parametrize("how", ["a kill", "a full disk"])
def test_whatever_stops_the_writing_a_whole_one_is_there(tmp_path, how):
    """At every operation: a process that ends there and then, without a chance to clear up; or an
    error.
    """

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    moments = set()
    for at in range(1, OPERATIONS):
        shutil.rmtree(tmp_path)
        save_checkpoint(tmp_path, some(), RECORD, keep=1)
        if how == "a full disk":
            with pytest.MonkeyPatch.context() as patch:
                failing(patch, at, fail)
                try:
                    save_checkpoint(tmp_path, some(1), RECORD, keep=1)
                except OSError as error:  # the first one, whatever clearing up meets
                    assert error.errno == errno.ENOSPC
        else:
            if not (child := os.fork()):
                try:
                    failing(pytest.MonkeyPatch(), at, lambda: os._exit(9))
                    save_checkpoint(tmp_path, some(1), RECORD, keep=1)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        newest = newest_checkpoint(tmp_path)
        moments.add(newest.name)
        assert same(load_checkpoint(newest)[0], some(int(newest.name[-1]) - 1))
        assert same(load_checkpoint(save_checkpoint(tmp_path, some(2), RECORD, keep=1))[0], some(2))
        assert len(list(tmp_path.iterdir())) == 1  # nothing is left beside
    assert moments == {"checkpoint-000001", "checkpoint-000002"}


def test_a_limit_on_the_size_of_files(tmp_path):
    "The operating system itself refuses: no file may grow beyond 4 kB."
    good = save_checkpoint(tmp_path, {}, RECORD)
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            OSError, match="could not be written.*raise the limit.*checkpoint-000001 is untouched"
        ):
            save_checkpoint(tmp_path, {"x": torch.zeros(10_000)}, RECORD)
        with (
            pytest.raises(OSError, match="the model could not be written: File too large"),
            explain_write_errors("the model", tmp_path / "m"),
        ):
            tiny().save_pretrained(tmp_path / "m")  # safetensors raises an error of its own
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    shutil.rmtree(tmp_path / "m")
    assert contents(tmp_path) == before and newest_checkpoint(tmp_path) == good


def test_writers_of_one_directory_wait_for_each_other(tmp_path):
    """Two threads, eight checkpoints each: all are whole, none is overwritten, no half one is
    swept away while it is written.
    """
    errors = []

    def write(who):
        for n in range(8):
            try:
                save_checkpoint(
                    tmp_path, {"x": torch.full((2000,), float(n))}, {"who": who, "n": n}, keep=100
                )
            except Exception as e:
                errors.append(e)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = [load_checkpoint(p)[1] for p in checkpoints(tmp_path)]
    assert not errors and sorted((r["who"], r["n"]) for r in found) == [
        (w, n) for w in range(2) for n in range(8)
    ]
