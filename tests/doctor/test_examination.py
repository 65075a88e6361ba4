"""The examination of a log: whose it is, what of it is used, and what cannot be read."""

import json

import pytest

from instruct_goose.doctor.diagnosis import OF_THE_BUILT_IN_LOSS, RULES
from instruct_goose.doctor.examination import examine, has_own_lines, main_curves
from instruct_goose.doctor.libraries import NOTHING_FOUND

OURS = [{"iteration": i, "reward_mean": 0.1 * i, "kl_to_reference": 0.01 * i} for i in range(5)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_of_our_metrics_alone_is_ours(tmp_path):
    path = write_lines(tmp_path / "log.jsonl", OURS)
    assert has_own_lines(path)
    examined = examine(path)
    assert examined.metrics == OURS


def test_what_no_rule_reads_is_told(tmp_path):
    rows = [row | {"loss_of_mine": 1.0, "reward_mean/length": 2.0} for row in OURS]
    examined = examine(write_lines(tmp_path / "log.jsonl", rows))
    assert set(examined.read) == {
        "iteration",
        "reward_mean",
        "kl_to_reference",
        "reward_mean/length",
    }
    assert examined.unused == ["loss_of_mine"]


def test_a_file_of_another_library_is_not_ours(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.0}]}), encoding="utf-8")
    assert not has_own_lines(path)


def test_a_text_without_numbers_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing to see here\n", encoding="utf-8")
    with pytest.raises(ValueError):
        examine(path)


def test_curves_are_points_by_iteration():
    points = [(row["iteration"], row["reward_mean"]) for row in OURS]
    assert points in main_curves(OURS).values()


@pytest.mark.parametrize(
    "first, is_ours",
    [
        ('{"iteration": 0, "reward_mean": 1.0}', True),
        ('{"iteration": 0, "reward_mean": 1.0, "loss": 0.5}', True),
        ('{"iteration": 0}', False),
        ('{"reward_mean": 1.0}', False),
        ('["iteration", "reward_mean"]', False),
        ('{"iteration": 0, "reward_mean":', False),
        ("", False),
    ],
)
def test_our_lines_have_an_iteration_and_a_reward(tmp_path, first, is_ours):
    path = tmp_path / "log"
    path.write_text(f"{first}\n{first}\n", encoding="utf-8")
    assert has_own_lines(path) == is_ours


def test_the_examination_of_a_file_of_lines(tmp_path):
    "Nothing stands beside it, and its last line is cut short."
    path = write_lines(tmp_path / "log.jsonl", [row | {"mine": 1} for row in OURS])
    path.write_text(path.read_text() + '{"iteration": 5, "rew', encoding="utf-8")
    examined = examine(path)
    assert (examined.program, examined.version, examined.unit, examined.first) == (
        "instruct_goose",
        "",
        "iteration",
        0,
    )
    assert examined.read == {name: name for name in ("iteration", "reward_mean", "kl_to_reference")}
    assert examined.unused == ["mine"]
    assert examined.notes == [
        "line 6 is cut short and left out: the run is still writing?",
        "There is no config.json.",
        "There is no summary.json.",
    ]
    assert examined.findings == [] and examined.nothing.startswith("Nothing looks wrong")
    assert examined.text.split("\n")[:3] == examined.notes
    assert examined.nothing in examined.text and "Not looked for, for want of" in examined.text


def run_directory(path, rows, config, summary):
    write_lines(path / "metrics.jsonl", rows)
    for name, content in (("config", config), ("summary", summary)):
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_rules_are_asked_not_asked_or_can_find_nothing(tmp_path):
    "With a beta of 0 in its settings a run is not asked about its KL; a reference it may have."
    run = run_directory(tmp_path, OURS, {"beta": 0.0}, {"beta": 0.5, "held_out_seen": 0})
    examined = examine(run)
    assert "start KL" in examined.asked and "noisy forward" in examined.not_asked
    assert "KL sign" not in {*examined.asked, *examined.not_asked}
    assert not {*examined.asked} & {*examined.not_asked}
    assert examined.notes == []


def test_a_loss_of_ones_own_is_noted(tmp_path):
    rows = [row | {"policy_gradient_scale": 9.0, "return_std": 9.0} for row in OURS]
    names = {}
    for is_own in (False, True):
        examined = examine(run_directory(tmp_path, rows, {"own_loss": is_own}, {}))
        names[is_own] = [finding.name for finding in examined.findings]
        note = f"Not looked for: {', '.join(OF_THE_BUILT_IN_LOSS)}."
        assert any(note in said for said in examined.notes) == is_own
        assert examined.nothing == ""
    assert names == {False: ["policy loss scale", "reward scale"], True: ["reward scale"]}


def test_damaged_metrics_name_their_place(tmp_path):
    run = run_directory(tmp_path, [{"iteration": 0, "entropy": "much"}], {}, {})
    with pytest.raises(ValueError, match=f"{run}/metrics.jsonl: .*entropy"):
        examine(run)


@pytest.mark.parametrize("has_steps", [True, False])
def test_the_examination_of_another_library(tmp_path, has_steps):
    row = {"completions/mean_length": 9.0, "frac_reward_zero_std": 0.0, "loss": 0.0, "num": 7}
    row |= {"reward": 0.5, "reward_std": 0.25}
    rows = [row | ({"step": step} if has_steps else {}) for step in (1, 2)]
    examined = examine(write_lines(tmp_path / "log", rows))
    assert (examined.program, examined.version) == ("TRL (GRPO, RLOO)", "0.18 or 0.19")
    assert (examined.unit, examined.first) == (("step", 1) if has_steps else ("row", 0))
    assert examined.read["reward_mean"] == "reward" and examined.unused == ["num"]
    assert len(examined.metrics) == 2 and len(examined.notes) == 1
    assert examined.notes[0].startswith("The loss is 0 in 2 of 2 logged steps")
    assert examined.findings == [] and examined.nothing == NOTHING_FOUND
    assert "equal rewards" in examined.asked
    assert len(examined.asked) + len(examined.not_asked) == len(RULES)
    assert NOTHING_FOUND in examined.text and examined.notes[0] in examined.text


def test_what_a_finding_leaves_to_say(tmp_path):
    row = {"completions/mean_length": 9.0, "frac_reward_zero_std": 1.0, "reward": 0.5}
    examined = examine(write_lines(tmp_path / "log", [row, row]))
    assert [finding.name for finding in examined.findings] == ["equal rewards"]
    assert examined.nothing == "" and examined.notes == []


def test_five_curves_by_iteration_by_step_or_by_row():
    names = (
        "reward_mean",
        "kl_to_reference",
        "entropy",
        "clip_fraction",
        "response_length",
        "loss",
    )
    rows = [dict.fromkeys(names, 1.0), dict.fromkeys(names, None) | {"entropy": 2, "loss": 3.0}]
    drawn = main_curves(rows)
    assert list(drawn) == [
        "Reward per response",
        "KL to the reference, nats per response",
        "Entropy, nats per token",
        "Share of tokens outside the clip",
        "Tokens per response",
    ]
    assert drawn["Entropy, nats per token"] == [(0, 1.0), (1, 2.0)]
    assert drawn["Reward per response"] == [(0, 1.0)]
    assert list(main_curves(rows, most=1)) == ["Reward per response"]
    assert main_curves([{"step": 4.0, "loss": 1}, {"loss": "x"}]) == {"Loss": [(4, 1.0)]}
    assert main_curves([{"iteration": 2, "step": 4, "loss": 1}]) == {"Loss": [(2, 1.0)]}
    assert main_curves([{"mine": 1.0}]) == {}
