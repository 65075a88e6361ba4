"""Logs of other libraries: what they have written themselves, healthy and with bugs, and forms of file.

`evidence/library_logs.py` and `library_logs_trl_ppo.py` make the logs of TRL,
`library_logs_torchtune.py` and `library_logs_verl.py` the others. `expected.json` has what is wrong in each, and what is said of it.
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
EXPECTED = json.loads((LOGS / "expected.json").read_text("utf-8"))
HEALTHY = [name for name, known in EXPECTED.items() if not known["wrong"]]
BUGS = [name for name, known in EXPECTED.items() if known["wrong"]]
OTHER_MASK = "torchtune_ppo_never_ends.log"  # its bug is that the recipe sees other ends
COUNTED = [name for name in EXPECTED if not name.startswith("trl") and name != OTHER_MASK]


def trl(name):
    return read_log(LOGS / f"trl_{name}.json")


def counted(name):
    "What the script that made a log has counted from the tensors of the same iterations."
    path = LOGS / f"{name.rpartition('.')[0]}_counted.json"
    return json.loads(path.read_text("utf-8"))


def test_every_log_has_an_expectation():
    logs = {path.name for path in LOGS.iterdir() if "counted" not in path.name}
    assert logs - {"expected.json"} == set(EXPECTED)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_a_library_has_no_finding(name):
    assert diagnose_log(read_log(LOGS / name)) == []


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_a_run_of_a_library_is_told_as_expected(name):
    known = EXPECTED[name]
    found = {finding.name for finding in diagnose_log(read_log(LOGS / name))}
    assert found <= {*known["names"], *known["consequences"]}  # nothing untrue is said
    verdict = "missed"
    if found:
        verdict = "named" if found & {*known["names"]} else "seen"
    assert verdict == known["verdict"]


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_read_is_what_the_tensors_say(name):
    "Lengths, rewards, ends and KL of each row, counted token by token while the log was written."
    log = read_log(LOGS / name)
    rows = counted(name)
    assert len(log.metrics) == len(rows)
    left_out = set()
    if log.read.get("kl_to_reference") == "actor/kl_loss":  # of the policy during its updates
        left_out = {"kl_to_reference"}
    for read, tensors in zip(log.metrics, rows, strict=True):
        compared = (read.keys() & tensors.keys()) - left_out
        assert "response_length" in compared
        assert "reward_mean" in compared or name == "verl_grpo_reward_nan.log"
        assert "kl_to_reference" in compared or "grpo" in name
        for metric in compared:
            assert read[metric] == pytest.approx(tensors[metric], abs=1e-4), metric


def test_torchtune_counts_updates_and_no_iterations():
    "With four updates in an iteration the log begins at 4: nobody knows where the run began."
    log = read_log(LOGS / "torchtune_ppo_healthy.log")
    assert [row["iteration"] for row in log.metrics[:3]] == [3, 7, 11]
    assert "start KL" not in asked_rules(log)[0]
    log = read_log(LOGS / "torchtune_ppo_healthy_one_update.log")
    assert [row["iteration"] for row in log.metrics[:3]] == [0, 1, 2]
    assert "start KL" in asked_rules(log)[0]


def test_torchtune_s_numbers_get_our_units():
    log = read_log(LOGS / "torchtune_ppo_healthy.log")
    row = read_rows((LOGS / "torchtune_ppo_healthy.log").read_text("utf-8"))[5]
    assert log.metrics[5]["response_length"] == row["response_lengths"] + 1
    assert log.metrics[5]["beta"] == pytest.approx(0.05)  # kl_coeff of the recipe's settings
    tokens = log.metrics[5]["response_length"]
    assert log.metrics[5]["kl_to_old"] == pytest.approx(row["approx_policy_kl"] * tokens)


@pytest.mark.parametrize("run, kl_coef", [("healthy", 0.05), ("kl_sign", -0.5)])
def test_trl_s_ppo_takes_off_its_coefficient_times_the_kl_that_it_logs(run, kl_coef):
    "So the KL has the unit and the sign of the reward: nats per response."
    log = trl(f"ppo_{run}")
    betas = [row["beta"] for row in log.metrics if abs(row["kl_to_reference"]) > 1e-3]
    assert len(betas) > 8 and betas == pytest.approx([kl_coef] * len(betas), rel=1e-3)
    assert [row["iteration"] for row in log.metrics] == list(range(12))


def test_a_kl_of_the_present_policy_says_nothing_of_the_start():
    "With two updates in step 1, verl's kl_loss there is no longer that of the two equal models."
    log = read_log(LOGS / "verl_grpo_healthy_kl_loss.log")
    assert "kl_to_reference" not in log.metrics[0] and "kl_to_reference" in log.metrics[1]
    rows = read_rows((LOGS / "verl_grpo_healthy_kl_loss.log").read_text("utf-8"))
    unmoved = [row | {"actor/ppo_kl": 0.0} for row in rows]  # as with one update
    assert log_of_rows(unmoved).metrics[0]["kl_to_reference"] > 0


def test_verl_s_file_and_console_hold_the_same_run():
    file = read_log(LOGS / "verl_ppo_healthy.log")
    console = read_log(LOGS / "verl_ppo_healthy_console.log")
    assert file.read == console.read
    assert file.metrics == console.metrics


def test_null_in_verl_s_file_is_not_finite():
    log = read_log(LOGS / "verl_grpo_reward_nan.log")
    assert '"critic/score/mean":null' in (LOGS / "verl_grpo_reward_nan.log").read_text("utf-8")
    assert log.not_finite["reward_mean"] == [3, 4, 5, 6, 7]


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
    path.write_text(
        "INFO ppo_trainer.py:551] ✨ Global step 4: {'policy_loss': 0.1, 'actor_lr': 1e-6, "
        "'reward': 1.0, 'kl': 0.01, 'rollout/response_length_mean': 50.0, "
        "'rollout/truncated_rate': 0.25}\n"
    )
    log = read_log(path)
    assert log.metrics[0]["iteration"] == 3 and log.metrics[0]["kl_to_reference"] == 0.5
    assert log.metrics[0]["finished"] == 0.75


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
    more = {"loss", "accuracy", "margin", "rejected_logprob", "value_lr", "ended_responses"}
    assert {column.ours for column in library.columns} <= {*KEYS} | more


READ_FROM_SOURCE = {"torchtune (PPO, GRPO)": {"lr"}}  # of recipes that could not be run


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_column_is_read_from_a_log_that_the_library_has_written(library):
    if library.name == "OpenRLHF":
        return  # no log of it could be made
    read = set(READ_FROM_SOURCE.get(library.name, ()))
    for name in EXPECTED:
        log = read_log(LOGS / name)
        if log.library == library:
            read |= log.read.keys()
    assert read == {column.ours for column in library.columns}


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
