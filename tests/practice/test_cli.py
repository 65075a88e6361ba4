"The command as a shell runs it: a real process, so that nothing imported here can help."
import json
import subprocess
import sys

import pytest

from instruct_goose.practice.cli import main

TINY = ["--reviews", "300", "--pairs", "60", "--held-out-pairs", "40", "--sft-steps", "12", "--rm-steps", "6", "--steps", "2", "--batch-size", "16",
        "--eval-samples", "32", "--tune-steps", "2", "--no-progress"]


def goose(*args, cwd):
    code = "from instruct_goose.practice.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A whole quickstart, small enough for a few seconds, started from an empty directory."
    here = tmp_path_factory.mktemp("cli")
    done = goose("quickstart", *TINY, "--seed", 3, cwd=here)
    assert done.returncode == 0, done.stderr
    return here, done


def test_without_a_directory_the_run_is_named(run):
    here, done = run
    summary = json.loads((here / "runs/quickstart/summary.json").read_text())
    assert summary["seed"] == 3 and summary["torch_threads"] == 1
    assert len((here / "runs/quickstart/metrics.jsonl").read_text().splitlines()) == 2
    assert "SFT" in done.stdout and "human score" in done.stdout and "Writing model" not in done.stderr


def test_sample_reads_that_run(run):
    here, _ = run
    done = goose("sample", "runs/quickstart", "the film", "--n", 2, cwd=here)
    assert done.returncode == 0, done.stderr
    assert sum("| the film" in line for line in done.stdout.splitlines()) == 2
    unknown = goose("sample", "runs/quickstart", "zyzzyva", cwd=here)
    assert unknown.returncode == 1 and "'zyzzyva'" in unknown.stderr and "Traceback" not in unknown.stderr


def test_a_directory_that_holds_a_run_is_refused(run):
    here, _ = run
    before = {p: p.stat().st_mtime_ns for p in (here / "runs/quickstart").rglob("*")}
    done = goose("quickstart", *TINY, "--output-dir", "runs/quickstart", cwd=here)
    assert done.returncode == 1 and "runs/quickstart" in done.stderr and "Traceback" not in done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in (here / "runs/quickstart").rglob("*")}


@pytest.mark.parametrize("args, code, says", [
    (["quickstart", "--lam", "2"], 2, "lam"), (["quickstart", "--clip", "0"], 2, "clip"), (["quickstart", "--beta", "-1"], 2, "beta"),
    (["quickstart", "--steps", "0"], 2, "steps"), (["quickstart", "--algorithm", "dqn"], 2, "ppo"), (["quickstart", "--sede", "1"], 2, "--seed"),
    (["reviews"], 2, "data"), (["reviews", "--data", "."], 1, "GroundTruth"), (["sample", "here"], 1, "here")])
def test_what_is_refused_names_itself_and_leaves_nothing(tmp_path, monkeypatch, capsys, args, code, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop: main(args)
    if isinstance(stop.value.code, str): assert code == 1 and says in stop.value.code
    else:
        shown = capsys.readouterr()
        assert stop.value.code == code and says in shown.err + shown.out
    assert not list(tmp_path.iterdir())
