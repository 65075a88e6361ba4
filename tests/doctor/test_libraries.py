"""Logs of other libraries: what they have written themselves, healthy and with bugs, and forms of file.

`evidence/library_logs.py` and `library_logs_trl_ppo.py` make the logs of TRL,
`library_logs_torchtune.py` and `library_logs_verl.py` the others. `expected.json` has what is wrong in each, and what is said of it.
"""

import json
import math
from pathlib import Path

import pytest
from small_runs import rows_of as rows_of_columns

from instruct_goose.cli.main import main
from instruct_goose.doctor.diagnosis import RULES
from instruct_goose.doctor.libraries import (
    LIBRARIES,
    TRL,
    Log,
    asked_rules,
    constant_reward,
    diagnose_log,
    kl_stays_zero,
    log_of_rows,
    loss_note,
    negative_beta,
    not_finite,
    nothing_ends,
    pairs_alike,
    read_log,
    read_rows,
    report_log,
    zero_advantages,
    zero_learning_rate,
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


def test_a_rule_that_finds_something_in_a_part_of_its_numbers_was_asked():
    log = log_of(flat_groups=[1.0] * 4)
    findings = diagnose_log(log)
    assert "equal rewards" in {finding.name for finding in findings}
    asked, others = asked_rules(log, findings)
    assert "equal rewards" in asked and "equal rewards" not in others


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


@pytest.mark.parametrize("steps", [(1, 2, 3, 2, 3, 4), (1, 2, 3, 3, 4), (4, 1, 2, 3, 4)])
def test_a_resumed_run_counts_its_later_steps(tmp_path, steps):
    path = tmp_path / "log"
    rows = [{"step": step} | NUMBERS[0] for step in steps]
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


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_any_system_are_joined(end):
    folded = end.join(["{'loss': 1.5,", "'grad_norm': 2.5,", "'reward': 0.25}"])
    assert read_rows(folded) == [{"loss": 1.5, "grad_norm": 2.5, "reward": 0.25}]


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


# ---------------------------------------------------------------- each limit, from both sides
def log_of(has_steps=True, not_finite=None, **columns):
    "A log in our names, each read from the same name in capitals."
    rows = rows_of_columns(**columns)
    read = {name: name.upper() for row in rows for name in row}
    rows = [{"iteration": i} | row for i, row in enumerate(rows)]
    return Log(TRL, rows, read, not_finite=not_finite or {}, has_steps=has_steps)


LOG_2 = math.log(2)


@pytest.mark.parametrize(
    "rule, columns, seen",
    [
        # the learning rate, of three steps
        (zero_learning_rate, {"lr": [0.0] * 3}, "LR is 0 in all 3 logged steps"),
        (zero_learning_rate, {"lr": [0.0] * 2}, None),
        (zero_learning_rate, {"lr": [0.0, 0.0, 1e-9]}, None),
        (
            zero_learning_rate,
            {"lr": [1.0] * 3, "value_lr": 0.0},
            "VALUE_LR is 0 in all 3 logged steps",
        ),
        (
            zero_learning_rate,
            {"lr": [0.0, None, None], "value_lr": 0.0},
            "VALUE_LR is 0 in all 3 logged steps",
        ),
        # beta, of two steps
        (
            negative_beta,
            {"beta": [-0.1, -0.1, 0.5]},
            "beta, read from BETA, is -0.1 in the median step",
        ),
        (negative_beta, {"beta": [-0.1, -0.1]}, "is -0.1 in the median step"),
        (negative_beta, {"beta": [-0.1]}, None),
        (negative_beta, {"beta": [0.0, 0.0]}, None),
        # the KL, of eight steps; a number with more than four decimals shows that none is rounded
        (
            kl_stays_zero,
            {"kl_to_reference": [1e-6] * 8, "loss": 0.5},
            "the KL is at most 1e-06 nats per response in all 8 logged steps",
        ),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 8, "loss": 0.12345}, "in all 8 logged steps"),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 8, "loss": 0.1234}, None),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 7, "loss": 0.12345}, None),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 7 + [2e-6], "loss": 0.12345}, None),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 7 + [-2e-6], "loss": 0.12345}, None),
        (kl_stays_zero, {"kl_to_reference": [0.0] * 8, "loss": 0.12345, "lr": 0.0}, None),
        # the reward, of four steps, to four times the distance of two numbers in float32
        (constant_reward, {"reward_mean": [0.25] * 4}, "REWARD_MEAN is 0.25 in all 4 logged steps"),
        (constant_reward, {"reward_mean": [0.25] * 3}, None),
        (constant_reward, {"reward_mean": [0.25] * 3 + [0.25 + 2.0**-23]}, "in all 4"),
        (constant_reward, {"reward_mean": [0.25] * 3 + [0.25 + 2.0**-22]}, None),
        (constant_reward, {"reward_mean": [-0.25] * 3 + [-0.25 - 2.0**-23]}, "in all 4"),
        (constant_reward, {"reward_mean": [0.25] * 4, "reward_std": 0.0}, None),
        (constant_reward, {"reward_mean": [0.25] * 4, "flat_groups": 1.0}, None),
        (constant_reward, {"reward_mean": [0.25] * 4, "reward_min": 0.25}, "in all 4"),
        (constant_reward, {"reward_mean": [0.25] * 4, "reward_min": [None, 0.0, None, None]}, None),
        (constant_reward, {"reward_mean": [0.25] * 4, "reward_max": 1.0}, None),
        # advantages, of three steps
        (
            zero_advantages,
            {"advantage_std": [1e-9, 1e-9, 1.0]},
            "the largest is the smallest, too, in the median of 3 logged steps (ADVANTAGE_STD)",
        ),
        (zero_advantages, {"advantage_std": [1e-9, 2e-9, 2e-9]}, None),
        (zero_advantages, {"advantage_std": [0.0, 0.0]}, None),
        # ends, in the last quarter of the steps, three at least
        (
            nothing_ends,
            {"ended_responses": [5] * 9 + [0] * 3, "response_length": [9.0] * 9 + [20.0] * 3},
            "at the end ENDED_RESPONSES is 0, and responses have 20 tokens",
        ),
        (nothing_ends, {"ended_responses": [0] * 2, "response_length": 20.0}, None),
        (nothing_ends, {"ended_responses": [0, 0, 1], "response_length": 20.0}, None),
        (nothing_ends, {"ended_responses": [0] * 3, "response_length": [20.0, 20.0, 19.0]}, None),
        (nothing_ends, {"response_length": [20.0] * 3}, None),
        # pairs, of four steps: a margin of at most 10⁻⁶ and a loss within 10⁻⁴ of log 2
        (
            pairs_alike,
            {"loss": [LOG_2] * 4, "margin": 0.0},
            "loss is log 2 = 0.693 and MARGIN 0 in all 4 logged steps",
        ),
        (pairs_alike, {"loss": [LOG_2] * 3, "margin": 0.0}, None),
        (pairs_alike, {"loss": [LOG_2] * 4, "margin": [0.0, 0.0, 1e-6, -1e-6]}, "in all 4"),
        (pairs_alike, {"loss": [LOG_2] * 4, "margin": [0.0, 0.0, 0.0, 2e-6]}, None),
        (pairs_alike, {"loss": [LOG_2] * 4, "margin": [0.0, 0.0, 0.0, -2e-6]}, None),
        (pairs_alike, {"loss": [LOG_2 + 9e-5, LOG_2 - 9e-5] * 2, "margin": 0.0}, "in all 4"),
        (pairs_alike, {"loss": [LOG_2] * 3 + [LOG_2 + 2e-4], "margin": 0.0}, None),
        (pairs_alike, {"loss": [LOG_2] * 3 + [LOG_2 - 2e-4], "margin": 0.0}, None),
    ],
)
def test_each_limit_of_a_log_from_both_sides(rule, columns, seen):
    finding = rule(log_of(**columns))
    if seen is None:
        assert finding is None
    else:
        assert seen in finding.evidence


@pytest.mark.parametrize(
    "steps, severity, seen",
    [
        ({}, None, None),
        ({"lr": [0]}, None, None),
        ({"grad_norm": [1, 2]}, "warning", "GRAD_NORM is not finite in 2 of 4 logged steps, first"),
        ({"grad_norm": [3], "loss": [2]}, "error", "first in step 3; so are GRAD_NORM"),
        ({"loss": [2], "reward_mean": [1, 2]}, "error", "first in step 2; so are LOSS"),
        ({"entropy": [0], "loss": [2], "kl_to_reference": [1]}, "error", "so are LOSS, KL_TO"),
    ],
)
def test_the_number_that_is_first_not_finite(steps, severity, seen):
    columns = dict.fromkeys(("lr", "grad_norm", "reward_mean", "entropy", "kl_to_reference"), 1.0)
    finding = not_finite(log_of(loss=[1.0] * 4, not_finite=steps, **columns))
    if severity is None:
        assert finding is None
    else:
        assert finding.severity == severity
        assert seen in finding.evidence


@pytest.mark.parametrize(
    "columns, says",
    [
        ({"loss": [0.5, 0.5]}, None),
        ({"loss": [1e-4, -1e-4]}, None),
        # half of the steps, or the first one
        ({"loss": [0.5, 9e-5, 0.5]}, None),
        (
            {"loss": [0.5, -9e-5]},
            "The loss is 0 in 1 of 2 logged steps, the first of them step 2: its value says "
            "nothing. grad_norm, which would, is not logged.",
        ),
        (
            {"loss": [0.0, 0.5, 0.5]},
            "The loss is 0 in 1 of 3 logged steps, the first of them step 1",
        ),
        ({"loss": [0.5, 0.0, 0.0], "grad_norm": [9.0, 2e-6, 2e-6]}, "grad_norm is 2e-06 (median)"),
        ({"loss": [0.0] * 3, "grad_norm": 1e-6}, "Look at the rewards of the groups first."),
        (
            {"loss": [0.0] * 3, "grad_norm": 0.0, "flat_groups": [0.79, 0.79, 1.0]},
            "so is grad_norm: nothing is learnt there. The rewards of most groups differ",
        ),
        (
            {"loss": [0.0] * 3, "grad_norm": 0.0, "flat_groups": 0.8},
            "so is grad_norm: nothing is learnt there. Look at the rewards of the groups first.",
        ),
    ],
)
def test_what_a_loss_of_zero_means(columns, says):
    note = loss_note(log_of(reward_mean=1.0, **columns))
    if says is None:
        assert note is None
    else:
        assert says in note


def test_a_loss_of_zero_without_a_reward_is_no_policy_s():
    assert loss_note(log_of(loss=[0.0] * 3)) is None


def test_errors_of_a_log_come_first():
    columns = {"loss": [LOG_2] * 4, "margin": 0.0, "grad_norm": 1.0}
    findings = diagnose_log(log_of(not_finite={"grad_norm": [1]}, **columns))
    assert [(finding.name, finding.severity) for finding in findings] == [
        ("pairs alike", "error"),
        ("not finite", "warning"),
    ]


# ---------------------------------------------------------------- which rules can be asked
NEVER_ASKED = {"negative KL", "KL sign", "other beta", "other schedule"}


def test_rules_that_compare_with_settings_or_tokens_are_never_asked():
    asked, others = asked_rules(log_of(**{name: [1.0] for name in KEYS if name != "iteration"}))
    of_metrics = [rule.name for rule in RULES if rule.metrics and not rule.columns]
    assert asked == [name for name in of_metrics if name not in NEVER_ASKED]
    assert sorted([*asked, *others]) == sorted(rule.name for rule in RULES)
    assert NEVER_ASKED < {*others}


@pytest.mark.parametrize(
    "columns, rule, is_asked",
    [
        ({"kl_to_reference": [0.1]}, "reference is the policy", False),
        ({"kl_to_reference": [0.1], "kl_to_old": 0.1}, "reference is the policy", True),
        ({"kl_to_reference": [0.1]}, "start KL", True),
        ({"iteration": [1], "kl_to_reference": 0.1}, "start KL", False),
        ({"iteration": [1], "kl_to_reference": 0.1, "entropy": 1.0}, "entropy collapse", True),
        ({"entropy": [0.1]}, "entropy collapse", True),
        ({"loss": [0.1]}, "entropy collapse", False),
    ],
)
def test_a_rule_is_asked_where_its_numbers_are_logged(columns, rule, is_asked):
    asked, others = asked_rules(log_of(**columns))
    assert (rule in asked) == is_asked
    assert (rule in others) != is_asked


def test_the_whole_text_about_a_log():
    "Each line of it, with and without what there may be none of."
    rows = [{"iteration": 0, "loss": 0.5, "lr": 0.1}]
    log = Log(TRL, rows, {"loss": "LOSS", "lr": "LR"})
    first, read, nothing, asked, others = report_log(log, []).split("\n")
    assert first == "TRL (GRPO, RLOO): 1 logged step."
    assert read == "Read: loss from LOSS, lr from LR."
    assert nothing == "Nothing looks wrong in these numbers, which is no proof."
    assert asked == "0 rules could be asked: none."
    assert others.startswith(f"{len(RULES)} could not, for want of numbers: ")
    rows = [{"iteration": i, "loss": 0.0, "reward_mean": 0.5, "entropy": 1.0} for i in (0, 1)]
    log = Log(
        TRL,
        rows,
        {"loss": "L"},
        "7",
        ("x", "y"),
        not_finite={"loss": [1]},
        left_out=2,
        has_steps=False,
    )
    lines = report_log(log, diagnose_log(log)).split("\n")
    assert lines[:6] == [
        "TRL (GRPO, RLOO), version 7 by its names: 2 logged steps.",
        "Steps are not logged: rows are counted from 1, perhaps not the run's first.",
        "Left out: 2 rows of other numbers, such as an evaluation's.",
        "Read: loss from L.",
        "Not used: x, y.",
        "The loss is 0 in 2 of 2 logged steps, the first of them row 0: its value says nothing. "
        "grad_norm, which would, is not logged.",
    ]
    assert lines[6].startswith("ERROR  not finite")
    assert not any(line.startswith("Nothing looks wrong") for line in lines)
    assert lines[-2] == "1 rule could be asked: entropy collapse."


# ---------------------------------------------------------------- columns, and their units
VERL_ROW = {"critic/score/mean": 1.0, "response_length/mean": 10.0, "step": 2}


@pytest.mark.parametrize(
    "row, name, number",
    [
        # verl: (score − reward)/β, where that is no rounding: 80·2⁻²³ of the score
        (
            {"critic/rewards/mean": 0.9, "critic/kl_coeff": 0.5, "critic/kl": 7.0},
            "kl_to_reference",
            pytest.approx(0.2),
        ),
        (
            {"critic/rewards/mean": 1.1, "critic/kl_coeff": 0.5, "critic/kl": 7.0},
            "kl_to_reference",
            pytest.approx(-0.2),
        ),
        (
            {
                "critic/rewards/mean": 0.9,
                "actor/reward_kl_penalty_coeff": 0.25,
                "critic/kl_coeff": 0.5,
                "actor/reward_kl_penalty": 7.0,
            },
            "kl_to_reference",
            pytest.approx(0.4),
        ),
        (
            {"critic/rewards/mean": 1 - 81 * 2.0**-23, "critic/kl_coeff": 1.0, "critic/kl": 7.0},
            "kl_to_reference",
            81 * 2.0**-23,
        ),
        (
            {"critic/rewards/mean": 1 - 80 * 2.0**-23, "critic/kl_coeff": 1.0, "critic/kl": 7.0},
            "kl_to_reference",
            70.0,
        ),
        ({"critic/rewards/mean": 0.9, "critic/kl": 7.0}, "kl_to_reference", 70.0),
        (
            {"critic/rewards/mean": 0.9, "critic/kl_coeff": 0.0, "critic/kl": 7.0},
            "kl_to_reference",
            70.0,
        ),
        ({"critic/kl_coeff": 0.5, "critic/kl": 7.0}, "kl_to_reference", 70.0),
        # verl's KL of the present policy: in step 1 only while that has not moved
        ({"actor/kl_loss": 0.5}, "kl_to_reference", 5.0),
        ({"actor/kl_loss": 0.5, "step": 1}, "kl_to_reference", None),
        ({"actor/kl_loss": 0.5, "step": 1, "actor/ppo_kl": 1e-6}, "kl_to_reference", 5.0),
        ({"actor/kl_loss": 0.5, "step": 1, "actor/ppo_kl": 2e-6}, "kl_to_reference", None),
        ({"actor/kl_loss": 0.5, "step": 1, "actor/ppo_kl": -2e-6}, "kl_to_reference", None),
        ({"actor/kl_loss": 0.5, "step": 2, "actor/ppo_kl": 0.1}, "kl_to_reference", 5.0),
        ({"actor/kl_loss": 0.5, "step": None, "actor/ppo_kl": 0.1}, "kl_to_reference", 5.0),
        ({"actor/kl_loss": 0.5, "response_length/mean": None}, "kl_to_reference", None),
        (
            {"actor/kl_loss": 0.5, "response_length_non_aborted/mean": 3.0},
            "kl_to_reference",
            5.0,  # the first of the two lengths
        ),
        # half of the largest less the smallest
        ({"critic/advantages/max": 2.0, "critic/advantages/min": -1.0}, "advantage_std", 1.5),
        ({"critic/advantages/max": 2.0}, "advantage_std", None),
        ({"response_length/clip_ratio": 0.25}, "finished", 0.75),
    ],
)
def test_verl_s_columns_in_our_units(row, name, number):
    row = {key: x for key, x in (VERL_ROW | row).items() if x is not None}
    assert log_of_rows([row]).metrics[0].get(name) == number


@pytest.mark.parametrize(
    "row, name, number",
    [
        ({"scores": 1.0, "kl": 0.5, "kl_reward": -0.05}, "beta", 0.1),
        ({"scores": 1.0, "kl": 0.0, "kl_reward": -0.05}, "beta", None),
        ({"scores": 1.0, "kl_reward": -0.05}, "beta", None),
        ({"approx_policy_kl": 0.5, "response_lengths": 9.0}, "kl_to_old", 5.0),
        ({"approx_policy_kl": 0.5, "scores": 1.0}, "kl_to_old", None),
        ({"scores": 1.0, "response_lengths": 9.0}, "response_length", 10.0),
    ],
)
def test_torchtune_s_columns_in_our_units(row, name, number):
    assert log_of_rows([{"rlhf_reward": 0.5} | row]).metrics[0].get(name) == number


@pytest.mark.parametrize(
    "row, library, version",
    [
        ({"completion_length": 9.0, "reward": 1.0}, "TRL (GRPO, RLOO)", "0.14 to 0.16"),
        ({"completions/mean_length": 9.0, "reward": 1.0}, "TRL (GRPO, RLOO)", "0.17"),
        ({"frac_reward_zero_std": 0.5, "entropy": 1.0}, "TRL (GRPO, RLOO)", "0.20 or later"),
        ({"objective/scores": 1.0}, "TRL (PPO)", ""),
        ({"critic/score/mean": 1.0}, "verl", ""),
        ({"critic/score/mean": 1.0, "critic/kl": 0.1}, "verl", "0.3 or earlier"),
        ({"critic/score/mean": 1.0, "actor/entropy_loss": 0.1}, "verl", "0.4 or earlier"),
        ({"critic/score/mean": 1.0, "actor/entropy": 0.1}, "verl", "0.5 or later"),
        ({"glen": 9.0, "act_lr": 0.1}, "OpenRLHF", "0.7 or earlier"),
        ({"train/act_loss": 0.5, "act_lr": 0.1}, "OpenRLHF", "0.8 or later"),
        ({"act_lr": 0.1, "ppo_clip_ratio": 0.1}, "OpenRLHF", "0.9 or later"),
        # the marks of the policy are there, none of its columns is: the next library that has some
        (
            {"mean_token_accuracy": 0.5, "loss": 1.0},
            "TRL and transformers (SFT, DPO, reward model)",
            "",
        ),
    ],
)
def test_a_library_and_its_version_by_the_names_that_it_logs(row, library, version):
    log = log_of_rows([row])
    assert (log.library.name, log.version) == (library, version)


def test_rows_of_other_numbers_are_left_out():
    "A loss is enough for a row; a learning rate or the norm of a gradient alone is not."
    rows = [
        {"reward": 1.0, "completion_length": 9.0},
        {"learning_rate": 0.1, "grad_norm": 1.0},
        {"loss": 0.5},
        {"eval_loss": 0.5},
        {"train/reward": 2.0, "rewards/right/mean": 0.5, "rewards/short": 0.25},
    ]
    log = log_of_rows(rows)
    assert log.left_out == 2 and not log.has_steps
    assert log.metrics == [
        {"iteration": 1, "reward_mean": 1.0, "response_length": 9.0},
        {"iteration": 2, "loss": 0.5},
        {"iteration": 3, "reward_mean": 2.0, "reward_mean/right": 0.5, "reward_mean/short": 0.25},
    ]
    assert log.unused == ()


def test_what_is_not_finite_is_no_number_of_the_log():
    rows = [{"step": 1.0, "reward": 1.0, "kl": math.inf, "completion_length": 9.0}]
    rows[0] |= {"z": 1.0, "a": 2.0}
    rows.append({"step": math.nan, "reward": math.nan, "completion_length": 8.0})
    log = log_of_rows(rows)
    assert log.metrics == [
        {"iteration": 0, "reward_mean": 1.0, "response_length": 9.0},
        {"iteration": 2, "response_length": 8.0},
    ]
    assert log.not_finite == {"kl_to_reference": [0], "reward_mean": [2]}
    assert log.unused == ("a", "z")


def test_twelve_names_of_an_unknown_log_are_told():
    with pytest.raises(ValueError, match=r"\(x00, .*, x11\)\. Known are verl; TRL"):
        log_of_rows([{f"x{i:02}": 1.0 for i in range(13)}])


# ---------------------------------------------------------------- forms of a file
@pytest.mark.parametrize(
    "text, rows",
    [
        ('{"log_history": [{"loss": 1.0}, {"text": "x"}, {"loss": 2.0}]}', [1.0, 2.0]),
        ('\n[{"loss": 1.0}, {"loss": "2.0"}]', [1.0, 2.0]),
        ('{"loss": 1.0}', [1.0]),
        ("\ufeffloss,lr\n1.0,2.0\n3.0,\n4.0,5.0,6.0\n", [1.0, 4.0]),  # of a row two numbers
        ("loss,lr,best - loss__MAX\n1.0,2.0,9.0\n", [1.0]),
        ("{'loss': 1.0} {'loss': 2.0}", [1.0, 2.0]),
        ("{'loss': 1.0,\n'lr': 0.1} {'loss': 2.0}", [1.0, 2.0]),
        ("{'loss': 1.0,\n'lr': 0.1\n} {'loss': 2.0}", [1.0, 2.0]),
        ("{'loss': 1.0,\n{'loss': 2.0}", [2.0]),  # the first is cut short
        ("{'loss': 1.0,\nx {'loss': 2.0}", [2.0]),
        ("{x\n'loss': 1.0, 'lr': 0.1", [1.0]),  # no dictionary
    ],
)
def test_the_rows_of_a_text(text, rows):
    assert [row["loss"] for row in read_rows(text)] == rows


@pytest.mark.parametrize("folds, is_read", [(60, True), (61, False)])
def test_a_row_is_folded_sixty_times_at_most(folds, is_read):
    "Two rows: the fold of the first does not count for the second."
    pieces = ["{'loss': 1.0,", *(f"'x{i}': 1.0," for i in range(folds - 1)), "'lr': 0.1}"]
    rows = read_rows("\n".join(pieces * 2 + ["{'loss': 2.0}"]))
    assert [row["loss"] for row in rows if len(row) > folds] == [1.0, 1.0] * is_read


@pytest.mark.parametrize(
    "text, step",
    [
        ("Global step 4: {'loss': 1.0}", 4.0),
        ("Global step 4: {'loss': 1.0, 'step': 7}", 7.0),
        ("Global step 4: {'loss': 1.0} {'loss': 2.0}", None),  # whose step it is is not known
        ("{'loss': 1.0}", None),
        ("step:5 - loss:1.0", 5.0),
        ("Step 6 | loss:1.0", 6.0),
    ],
)
def test_the_step_of_a_line(text, step):
    assert read_rows(text)[0].get("step") == step


def test_what_is_a_number_of_a_dictionary():
    "Truth values and other texts are none; a number may be written as text, or be too large."
    row = {"a": True, "b": None, "c": "1.5", "d": "x", "e": 2, "f": [1.0], "g": 10**400}
    nested = {"step": 3, "data": {"h": None, "i": 1.0}}
    (read,) = read_rows(json.dumps(row | nested))
    assert math.isnan(read.pop("h"))
    assert read == {"c": 1.5, "e": 2.0, "step": 3.0, "i": 1.0}


@pytest.mark.parametrize(
    "text, says",
    [
        (' {"a": "x"}', "this JSON is cut short, or holds no list of metrics"),
        ('["x", ', "this JSON is cut short"),
        ('{"log_history": []}', "log_history is empty"),
        ("a, b\nTraceback (most recent call last):", "the traceback of an error"),
        ("no numbers", "no line of the log holds numbers by name"),
    ],
)
def test_what_a_text_without_rows_seems_to_be(text, says):
    with pytest.raises(ValueError, match=says):
        read_rows(text)
