"""The examination of a log: whose it is, what of it is used, and what cannot be read."""

import json

import pytest

from instruct_goose.doctor.examination import examine, has_own_lines, main_curves

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
