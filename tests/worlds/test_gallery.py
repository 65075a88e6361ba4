"""The gallery: what its catalogue promises is there, the record is of it, and bugs injected alive do what the record says."""
import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from deep import first

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.rules import KEYS
from instruct_goose.models import decoding, response, reward_model
from instruct_goose.training import metrics, rollout, trainer
from instruct_goose.worlds.gallery import (
    BUGS,
    HEALTHY,
    SMALL,
    gallery_config,
    make_world,
    padding_effect,
    replaced,
    run_bug,
    run_healthy,
    stopped_by,
    to_columns,
    to_metrics,
)

root = Path(__file__).parents[2]
lesson = json.loads((root / "nbs/learn/22_bug_hunt.ipynb").read_text("utf-8"))
texts = ["".join(c["source"]) for c in lesson["cells"]]


@pytest.fixture(scope="module")
def world(): return make_world(reviews=800, pairs=400, sft_steps=80, rm_steps=30)


@pytest.fixture(scope="module")
def record(): return json.loads((root / "evidence/gallery.json").read_text("utf-8"))


# --- the catalogue, which is a table of the lesson --------------------------------------------------------------------
def rows(head):
    "The rows of the lesson's table that begins so, by bug."
    table = next(t for t in texts if t.startswith(head)).splitlines()[2:]
    return {cells[0]: cells[1:] for cells in ([c.strip(" `") for c in line.strip("|").split("|")] for line in table)}


def test_the_lesson_has_all_bugs_and_their_lessons_exist():
    what = rows("| bug | what is wrong")
    assert list(what) == list(BUGS)
    for *said, link in what.values():
        assert all(said) and (root / "nbs/learn" / re.search(r"\((.*)\)", link)[1]).is_file()


def test_there_are_thirty_four_and_three_show_nothing():
    assert len(BUGS) == 34 and [n for n, b in BUGS.items() if not b.findings] == ["reward after the end", "no value mask", "whitened over padding"]
    assert all(b.trainer is not trainer.RLHFTrainer or b.patch is not nullcontext or b.settings for b in BUGS.values())


# --- the record -------------------------------------------------------------------------------------------------------
def test_the_record_is_of_this_catalogue_and_small(record):
    assert record["origin"]["commit"] and all(part["commit"] and part["names"] for part in record["later"])
    assert list(record["bugs"]) == list(BUGS) and list(record["healthy"]) == list(HEALTHY)
    assert record["config"] == SMALL, "recorded with other settings: python evidence/run.py gallery"
    assert (root / "evidence/gallery.json").stat().st_size < 700_000
    for runs in (*record["bugs"].values(), *record["healthy"].values()):
        assert len(runs) == 3 and len(set(runs)) == 3
        for run in map(json.loads, runs): assert set(run) <= set(KEYS) and {len(c) for c in run.values()} == {SMALL["steps"]}


def test_columns_and_back():
    metrics = [{"iteration": 0, "entropy": 1.23456, "texts": 3, "value_mean": None}, {"iteration": 1, "entropy": None, "beta": .1}]
    columns = to_columns(metrics)
    assert columns == {"iteration": [0, 1], "beta": [None, .1], "entropy": [1.235, None]}
    assert to_metrics(columns) == [{"iteration": 0, "beta": None, "entropy": 1.235}, {"iteration": 1, "beta": .1, "entropy": None}]


# --- alive ------------------------------------------------------------------------------------------------------------
def test_replaced_is_put_back_even_after_an_error():
    now = lambda: [vars(m).copy() for m in (decoding, response, reward_model, metrics, rollout, trainer)]
    before, patched = now(), [b.patch for b in BUGS.values() if b.patch is not nullcontext]
    for patch in patched:
        with pytest.raises(ZeroDivisionError), patch():
            assert now() != before
            raise ZeroDivisionError
    assert now() == before and len(patched) == 10
    owner = type("Owner", (), {"x": 1})
    with replaced(owner, "x", 2): assert owner.x == 2
    assert owner.x == 1


@pytest.mark.parametrize("name", first(3, ["off by one", "dropout on", "no position ids in training", "padding in the loss",
                                  "temperature forgotten", "no position ids in the rollout"]))
def test_the_librarys_own_check_stops_what_the_record_says(name, world, record):
    message = stopped_by(name, world)
    assert message and "the ratio is off 1 by" in message and record["guards"][name]


def test_without_a_bug_no_guard_speaks_and_the_doctor_neither(world):
    assert not diagnose(run_healthy("ppo", world, steps=3, batch_size=48), {"epochs": 2, "minibatches": 2})


@pytest.mark.parametrize("name", first(4, ["old log-probabilities with gradient", "value head never trained", "end never sampled",
                                  "old log-probabilities after the step", "temperature forgotten", "dropout on",
                                  "scores of the row above", "reward model in training mode", "one prompt only", "wrong γ", "length as reward",
                                  "advantages of other rows", "no division in accumulation", "entropy sign", "zero_grad forgotten"]))
def test_injected_alive_and_named(name, world):
    metrics = run_bug(name, world, steps=3, batch_size=32)
    assert set(BUGS[name].findings) <= {f.name for f in diagnose(metrics, asdict(gallery_config(**BUGS[name].settings)))}


@pytest.mark.parametrize("name", [None, *(n for n, b in BUGS.items() if not b.findings)])
def test_wider_padding_finds_what_metrics_do_not(name, world):
    effect = padding_effect(name, world)
    assert effect < 1e-4 if name is None else effect > 1e-3  # float32, and a wider batch may take another kernel
