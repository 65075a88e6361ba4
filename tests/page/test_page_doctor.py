"""What the page *Paste your log* asks of Python gives the command's words, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from instruct_goose.doctor.examination import examine

ROOT = Path(__file__).parents[2]
OURS = ROOT / "evidence/reports/quickstart"
ASK = """
import sys, json
sys.path.insert(0, sys.argv[1])
import page_tensors
page_tensors.install()
import page_doctor
print(page_doctor.examine_files(sys.stdin.read()))
"""


def on_a_page(folder: Path, files: dict[str, str], place: Path) -> dict:
    "Ask page_doctor in a Python that has nothing but a page's files."
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", ASK, str(folder)],
        input=json.dumps(files),
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_run_with_its_tokens_is_examined_as_by_the_command(doctor_folder, tmp_path):
    "Rules that recompute the recorded tokens run on page tensors."
    names = ("metrics.jsonl", "config.json", "summary.json", "tokens.jsonl")
    said = on_a_page(doctor_folder, {name: (OURS / name).read_text() for name in names}, tmp_path)
    assert said["text"] == examine(OURS).text and said["ignored"] == []


LIBRARY_LOGS = (
    "trl_grpo_all_right.json",
    "trl_dpo_same_pairs.json",
    "torchtune_ppo_kl_sign.log",
    "verl_grpo_reward_nan.log",
)


@pytest.mark.parametrize("name", LIBRARY_LOGS)
def test_a_log_of_another_library_is_examined_as_by_the_command(name, doctor_folder, tmp_path):
    path = ROOT / f"tests/doctor/library_logs/{name}"
    said = on_a_page(doctor_folder, {"pasted.txt": path.read_text()}, tmp_path)
    examined = examine(path)
    assert said["text"] == examined.text
    assert [found["name"] for found in said["findings"]] == [f.name for f in examined.findings]
    assert said["findings"][0]["what"].startswith(examined.findings[0].what)


def test_files_that_are_no_log_are_refused_or_named(doctor_folder, tmp_path):
    refused = on_a_page(doctor_folder, {"config.json": "{}"}, tmp_path)
    assert refused == {"refused": "config.json is no log: add metrics.jsonl"}
    lines = (OURS / "metrics.jsonl").read_text()
    said = on_a_page(doctor_folder, {"metrics.jsonl": lines, "notes.txt": "x"}, tmp_path)
    assert said["ignored"] == ["notes.txt"] and said["program"] == "instruct_goose"
