"""Logs of other libraries: TRL's own runs, healthy and with bugs, and the forms of file that others
write. `evidence/library_logs.py` makes the logs of TRL.
"""

import json
from pathlib import Path

import pytest

from instruct_goose.cli.main import main
from instruct_goose.doctor.libraries import (
    LIBRARIES,
    asked_rules,
    diagnose_log,
    log_of_rows,
    loss_note,
    read_log,
    read_rows,
    report_log,
)
from instruct_goose.doctor.rules import KEYS

LOGS = Path(__file__).parent / "library_logs"
HEALTHY = [
    "grpo_healthy",
    "grpo_with_kl",
    "grpo_loss_of_zero",
    "rloo_healthy",
    "dpo_healthy",
    "sft_healthy",
    "reward_healthy",
]
BUGS = {
    "grpo_all_right": "equal rewards",
    "grpo_all_wrong": "equal rewards",
    "grpo_learning_rate_30_times": "entropy collapse",
    "grpo_no_gradient": "no policy gradient",
    "grpo_one_reward_twice": "equal parts",
    "dpo_same_pairs": "pairs alike",
    "dpo_chosen_falls": "chosen falls",
    "sft_no_learning_rate": "zero learning rate",
    "reward_same_pairs": "pairs alike",
}


def trl(name):
    return read_log(LOGS / f"trl_{name}.json")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_trl_has_no_finding(name):
    assert diagnose_log(trl(name)) == []


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_a_run_of_trl_is_named(name):
    assert BUGS[name] in [finding.name for finding in diagnose_log(trl(name))]


def test_a_loss_of_zero_is_explained():
    "GRPO's loss is 0 by algebra; grad_norm says whether it learns."
    assert "learns all the same" in loss_note(trl("grpo_loss_of_zero"))
    assert "nothing is learnt" in loss_note(trl("grpo_all_right"))
    assert loss_note(trl("dpo_healthy")) is None


def test_numbers_keep_their_meaning():
    log = trl("grpo_with_kl")
    rows = json.loads((LOGS / "trl_grpo_with_kl.json").read_text())["log_history"]
    theirs, ours = rows[3], log.metrics[3]
    assert ours["iteration"] == theirs["step"] - 1
    assert ours["reward_mean"] == theirs["reward"]
    assert ours["finished"] == 1 - theirs["completions/clipped_ratio"]
    assert ours["kl_to_reference"] == theirs["kl"] * theirs["completions/mean_length"]
    assert ours["reward_mean/count_w1"] == theirs["rewards/count_w1/mean"]


def test_what_could_not_be_asked_is_said():
    log = trl("grpo_healthy")
    asked, others = asked_rules(log)
    assert "equal rewards" in asked and "noisy forward" in others and not {*asked} & {*others}
    said = report_log(log, [])
    assert f"{len(others)} could not" in said and "reward_mean from reward" in said


NUMBERS = [
    {"critic/score/mean": 0.5, "critic/score/min": 0.0, "critic/score/max": 1.0, "actor/lr": 1e-6}
    | {"actor/entropy": 1.2 * 0.6**i, "response_length/mean": 120.0, "actor/grad_norm": 0.4}
    | {"response_length/clip_ratio": 0.25, "actor/pg_loss": -0.01}
    for i in range(8)
]


def console(numbers):
    "As verl's console logger prints them."
    lines = []
    for i, row in enumerate(numbers, 1):
        lines.append(
            "(pid=7) " + " - ".join([f"step:{i}", *(f"{k}:{x:.3f}" for k, x in row.items())])
        )
    return "a line of something else\n" + "\n".join(lines)


def json_lines(numbers):
    return "\n".join(json.dumps({"step": i} | row) for i, row in enumerate(numbers, 1))


def printed(numbers):
    return "\n".join(f"INFO { ({'step': i} | row)!r}" for i, row in enumerate(numbers, 1))


def table(numbers):
    "As Weights & Biases exports it, with the run's name before the metric's."
    names = list(numbers[0])
    lines = ["step," + ",".join(f"run - {n}" for n in names) + ",run - actor/entropy__MIN"]
    for i, row in enumerate(numbers, 1):
        lines.append(",".join([str(i), *(str(row[n]) for n in names), "0"]))
    return "\n".join(lines)


@pytest.mark.parametrize("write", [console, json_lines, printed, table], ids=lambda f: f.__name__)
def test_every_form_of_file_gives_the_same_numbers(tmp_path, write):
    path = tmp_path / "log"
    path.write_text(write(NUMBERS))
    log = read_log(path)
    assert log.library.name == "verl" and len(log.metrics) == 8
    assert [row["iteration"] for row in log.metrics] == list(range(8))
    assert log.metrics[2]["entropy"] == pytest.approx(1.2 * 0.6**2, abs=1e-3)
    assert log.metrics[2]["finished"] == 0.75
    assert ("lr" in log.metrics[0]) == (write is not console)
    assert [finding.name for finding in diagnose_log(log)] == ["entropy collapse"]


def test_torchtune_and_openrlhf_are_recognised(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("Step 1 | loss:0.1 rlhf_reward:0.4 scores:0.5 kl:0.2 clipfrac:0.0\n")
    log = read_log(path)
    assert log.library.name.startswith("torchtune")
    assert log.metrics == [
        {"iteration": 0, "reward_mean": 0.5, "total_reward_mean": 0.4, "kl_to_reference": 0.2}
        | {"clip_fraction": 0.0, "loss": 0.1}
    ]
    path.write_text(
        "{'policy_loss': 0.1, 'actor_lr': 1e-6, 'reward': 1.0, 'kl': 0.01, "
        "'response_length': 50.0}\n"
    )
    log = read_log(path)
    assert log.library.name == "OpenRLHF" and log.metrics[0]["kl_to_reference"] == 0.5


def test_a_resumed_run_counts_its_later_steps(tmp_path):
    path = tmp_path / "log"
    rows = [{"step": step} | NUMBERS[0] for step in (1, 2, 3, 2, 3, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [row["iteration"] for row in read_log(path).metrics] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text, says", [("hello\n", "no line of the log"), ('{"a": 1.0, "b": 2}', "not the metrics of")]
)
def test_what_is_no_log_is_refused(tmp_path, text, says):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_log(path)


def test_the_command_reads_them(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(LOGS / "trl_dpo_same_pairs.json")])
    assert stop.value.code == 3 and "pairs alike" in capsys.readouterr().out
    main(["doctor", str(LOGS / "trl_rloo_healthy.json")])
    assert "learns all the same" in capsys.readouterr().out


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_column_is_one_of_ours(library):
    more = {"loss", "accuracy", "margin", "rejected_logprob"}
    assert {column.ours for column in library.columns} <= {*KEYS} | more


ROW = {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-6, "reward": 0.25, "kl": 0.1}
ROW |= {"completions/mean_length": 20.0, "frac_reward_zero_std": 0.5}


def rows_of(text):
    return log_of_rows(read_rows(text)).metrics


def test_a_folded_row_is_one_row():
    "A terminal folds a dictionary and verl's line anywhere, in the middle of a name or a number."
    whole = f" 5%|# | 1/20 {ROW!r}\n 10%|## | 2/20 {ROW!r}  15%|#"
    folded = "\n".join(whole.replace("\n", " ")[i : i + 70] for i in range(0, len(whole), 70))
    assert rows_of(folded) == rows_of(whole)
    lines = console(NUMBERS[:2]).partition("\n")[2]
    for width in (60, 83):
        pieces = [
            line[i : i + width] for line in lines.split("\n") for i in range(0, len(line), width)
        ]
        assert rows_of("\n".join(pieces)) == rows_of(lines)


def test_colours_and_missing_braces_do_not_matter():
    bare = repr(ROW)[1:-1]
    assert rows_of(bare) == rows_of(repr(ROW)) == rows_of(f"\x1b[36m(pid=1)\x1b[0m {ROW!r}")


def test_what_is_not_finite_is_a_finding(tmp_path):
    text = repr(ROW) + "\n" + repr(ROW | {"kl": float("nan")})
    log = log_of_rows(read_rows(text))
    (finding,) = diagnose_log(log)
    assert finding.name == "not finite" and finding.severity == "error"
    assert "kl is not finite in 1 of 2 logged steps, first in row 2" in finding.evidence
    log = log_of_rows(read_rows(repr(ROW | {"grad_norm": float("inf")})))
    assert [finding.severity for finding in diagnose_log(log)] == ["warning"]


def test_a_log_without_steps_has_no_first_iteration():
    "Such a log may begin anywhere: a KL in its first row says nothing of the run's start."
    rows = [ROW | {"kl": 0.5}] * 3
    assert diagnose_log(log_of_rows(rows)) == []
    counted = [row | {"step": step} for step, row in enumerate(rows, 1)]
    assert [finding.name for finding in diagnose_log(log_of_rows(counted))] == ["start KL"]
    swift = [row | {"global_step/max_steps": f"{step}/90"} for step, row in enumerate(rows, 7)]
    assert [row["iteration"] for row in rows_of(json.dumps(swift))] == [6, 7, 8]


def test_units_and_rounding_of_verl():
    old = "step:1 - actor/lr(1e-4):0.010 - critic/score/mean:0.500 - critic/rewards/mean:0.400"
    assert rows_of(old) == [pytest.approx({"iteration": 0, "lr": 1e-6, "reward_mean": 0.5})]
    new = "step:1 - actor/lr:1e-06 - critic/score/mean:np.float64(0.5) - critic/rewards/mean:0.41"
    assert rows_of(new) == [
        {"iteration": 0, "reward_mean": 0.5, "total_reward_mean": 0.41, "lr": 1e-6}
    ]
    of_file = json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}})
    assert rows_of(of_file) == [{"iteration": 0, "reward_mean": 0.5}]


def test_what_is_not_used_is_named():
    rows = [ROW | {"step": 1, "num_tokens": 7}, {"eval_loss": 1.0, "step": 1}]
    log = log_of_rows(rows)
    said = report_log(log, [])
    assert "Not used: num_tokens." in said and "Left out: 1 row of" in said
    assert log.version == "0.18 or 0.19"


@pytest.mark.parametrize(
    "text, says",
    [
        (" \n", "the log is empty"),
        ("<html>", "a web page"),
        ('{"log_history": [', "cut short"),
        ("Traceback (most recent call last):\n x", "traceback"),
    ],
)
def test_what_a_text_seems_to_be_is_said(text, says):
    with pytest.raises(ValueError, match=says):
        read_rows(text)
