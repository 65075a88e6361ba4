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
from instruct_goose.models import decoding, response, reward_model, sampling
from instruct_goose.recipes.quickstart import QuickstartConfig, make_start
from instruct_goose.tasks import gallery
from instruct_goose.training import experience, metrics, trainer

root = Path(__file__).parents[2]
lesson = json.loads((root / "nbs/learn/22_failure_gallery.ipynb").read_text("utf-8"))
texts = ["".join(c["source"]) for c in lesson["cells"]]


@pytest.fixture(scope="module")
def world():
    small = dict(reviews=800, pairs=400, sft_steps=80, rm_steps=30)
    start = make_start(QuickstartConfig(**gallery.WORLD | gallery.RUN | small))
    return gallery.World(start.data.prompts, start.tokenizer, start.lm, start.reward_model)


@pytest.fixture(scope="module")
def record():
    return json.loads((root / "evidence/gallery.json").read_text("utf-8"))


# --- the catalogue, which is a table of the lesson --------------------------------------------------------------------
def rows(head):
    "The rows of the lesson's table that begins so, by bug."
    table = next(t for t in texts if t.startswith(head)).splitlines()[2:]
    return {
        cells[0]: cells[1:]
        for cells in ([c.strip(" `") for c in line.strip("|").split("|")] for line in table)
    }


def test_the_lesson_has_all_bugs_and_their_lessons_exist():
    what = rows("| bug | what is wrong")
    assert list(what) == list(gallery.BUGS)
    for *said, link in what.values():
        assert all(said) and (root / "nbs/learn" / re.search(r"\((.*)\)", link)[1]).is_file()


# --- the record -------------------------------------------------------------------------------------------------------
def test_the_record_is_of_this_catalogue_and_small(record):
    assert record["origin"]["commit"]
    assert list(record["bugs"]) == list(gallery.BUGS) and list(record["healthy"]) == list(
        gallery.HEALTHY
    )
    assert record["config"] == gallery.WORLD | gallery.RUN, (
        "recorded with other settings: python evidence/run.py gallery"
    )
    assert (root / "evidence/gallery.json").stat().st_size < 700_000
    for runs in (*record["bugs"].values(), *record["healthy"].values()):
        assert len(runs) == 3 and len(set(runs)) == 3
        for run in map(json.loads, runs):
            assert set(run) <= set(KEYS) and {len(c) for c in run.values()} == {
                gallery.RUN["steps"]
            }


# --- alive ------------------------------------------------------------------------------------------------------------
def test_replaced_is_put_back_even_after_an_error():
    modules = (decoding, response, reward_model, sampling, experience, metrics, trainer)

    def library():
        return [vars(module).copy() for module in modules]

    before = library()
    patches = [bug.patch for bug in gallery.BUGS.values() if bug.patch is not nullcontext]
    assert len(patches) == 10
    for patch in patches:
        with pytest.raises(ZeroDivisionError), patch():
            assert library() != before
            raise ZeroDivisionError
    assert library() == before
    owner = type("Owner", (), {"x": 1})
    with gallery.replaced(owner, "x", 2):
        assert owner.x == 2
    assert owner.x == 1


@pytest.mark.parametrize(
    "name",
    first(
        3,
        [
            "off by one",
            "dropout on",
            "no position ids in training",
            "padding in the loss",
            "temperature forgotten",
            "no position ids in the rollout",
        ],
    ),
)
def test_the_librarys_own_check_stops_what_the_record_says(name, world, record):
    message = gallery.stopped_by(name, world)
    assert message and "the ratio is off 1 by" in message and record["guards"][name]


def test_without_a_bug_no_guard_speaks_and_the_doctor_neither(world):
    assert not diagnose(
        gallery.run_healthy("ppo", world, steps=3, batch_size=48), {"epochs": 2, "minibatches": 2}
    )


@pytest.mark.parametrize(
    "name",
    first(
        4,
        [
            "old log-probabilities with gradient",
            "value head never trained",
            "end never sampled",
            "old log-probabilities after the step",
            "temperature forgotten",
            "dropout on",
            "scores of the row above",
            "reward model in training mode",
            "one prompt only",
            "wrong γ",
            "length as reward",
            "advantages of other rows",
            "no division in accumulation",
            "entropy sign",
            "zero_grad forgotten",
        ],
    ),
)
def test_injected_alive_and_named(name, world):
    metrics = gallery.run_bug(name, world, steps=3, batch_size=32)
    assert set(gallery.BUGS[name].findings) <= {
        f.name
        for f in diagnose(metrics, asdict(gallery.gallery_config(**gallery.BUGS[name].settings)))
    }


@pytest.mark.parametrize("name", [None, *(n for n, b in gallery.BUGS.items() if not b.findings)])
def test_wider_padding_finds_what_metrics_do_not(name, world):
    effect = gallery.padding_effect(name, world)
    assert (
        effect < 1e-4 if name is None else effect > 1e-3
    )  # float32, and a wider batch may take another kernel
