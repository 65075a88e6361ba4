"The command as a shell runs it: a real process, so that nothing imported here can help."
import json
import subprocess
import sys

import pytest

from instruct_goose.objective.group import PRESETS
from instruct_goose.practice import quickstart, real_reviews
from instruct_goose.practice.cli import main
from instruct_goose.practice.quickstart import QuickstartConfig
from instruct_goose.practice.real_reviews import ReviewsConfig

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
    (["quickstart", "--steps", "0"], 2, "steps"), (["quickstart", "--algorithm", "dqn"], 2, "'remax'"), (["quickstart", "--sede", "1"], 2, "--seed"),
    ([], 2, "quickstart"), (["reviews", "--data", ".", "--algorithm=dqn"], 2, "'remax'"), (["quickstart", "--algorithm"], 2, "--algorithm"),
    (["quickstart", "--algorithm", "grpo", "--group-size", "1"], 2, "group_size is 1"), (["quickstart", "--advantage", "group_mean"], 2, "group_size is 1"),
    (["reviews"], 2, "data"), (["reviews", "--data", "."], 1, "GroundTruth"), (["sample", "here"], 1, "here")])
def test_what_is_refused_names_itself_and_leaves_nothing(tmp_path, monkeypatch, capsys, args, code, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop: main(args)
    if isinstance(stop.value.code, str): assert code == 1 and says in stop.value.code
    else:
        shown = capsys.readouterr()
        assert stop.value.code == code and says in shown.err + shown.out
    assert not list(tmp_path.iterdir())


@pytest.fixture
def parsed(monkeypatch):
    "What the command would run, without running it."
    seen = []
    monkeypatch.setattr(quickstart, "run_quickstart", seen.append)
    monkeypatch.setattr(real_reviews, "run_reviews", seen.append)
    def parse(*args): main(list(args)); return seen.pop()
    return parse


@pytest.mark.parametrize("name", PRESETS)
def test_algorithm_is_the_preset_and_other_flags_override_it(parsed, name, tmp_path):
    quick, reviews = QuickstartConfig.preset(name), ReviewsConfig.preset(name, data=tmp_path)
    assert parsed("quickstart", "--algorithm", name) == quick and type(parsed("quickstart", "--algorithm", name)) is QuickstartConfig
    assert parsed("reviews", "--data", str(tmp_path), f"--algorithm={name}") == reviews
    changed = QuickstartConfig.preset(name, clip=.11, beta=.5, steps=3, group_size=4, clip_high=None)
    flags = ["--clip", ".11", "--beta", "0.5", "--steps", "3", "--group-size", "4", "--clip-high", "None"]
    for args in ([*flags, "--algorithm", name], ["--algorithm", name, *flags], [*flags[:4], f"--algorithm={name}", *flags[4:]]):
        assert parsed("quickstart", *args) == changed
    assert parsed("quickstart", "--algorithm", "grpo", "--algorithm", name) == quick  # the last counts, as for any flag


def test_without_the_flag_the_defaults_hold(parsed):
    assert parsed("quickstart") == QuickstartConfig() and parsed("quickstart", "--advantage", "return").algorithm == "reinforce_pp"


def test_help_shows_the_presets_and_their_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    def shown(*args):
        with pytest.raises(SystemExit) as stop: main([*args, "--help"])
        assert stop.value.code == 0
        return " ".join(capsys.readouterr().out.replace("│", " ").split())
    for command in ("quickstart", "reviews"):
        plain, gspo = shown(command), shown(command, "--algorithm", "gspo")
        for text in (plain, gspo): assert "--algorithm {" + ",".join(PRESETS) + "}" in text and "is cut (default" in text
        assert "(default: ppo)" in plain and "is cut (default: 0.2)" in plain
        assert "(default: gspo)" in gspo and "is cut (default: 0.0003)" in gspo and "(default: sequence)" in gspo


def test_a_run_of_another_algorithm_says_so(tmp_path):
    done = goose("quickstart", *TINY, "--no-baselines", "--algorithm", "remax", "--output-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 REMAX: 2 times" in done.stdout
    config, summary = (json.loads((tmp_path / f"run/{file}.json").read_text()) for file in ("config", "summary"))
    assert config["algorithm"] == summary["config"]["algorithm"] == "remax"
    assert all("baseline_mean" in json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
