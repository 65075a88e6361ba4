"""The comparisons in small, without peers: the sides agree, a side that does not is found out, and what the record is made of.
Nothing is written, and nobody's time is judged."""

import sys
from pathlib import Path

import pytest
import torch

root = Path(__file__).parents[2]
sys.path.insert(0, str(root))
from bench import record  # noqa: E402
from bench.cases import annotate, logprobs, ppo, sampling  # noqa: E402
from bench.form import Case, Row, Side  # noqa: E402
from bench.measure import timed  # noqa: E402
from bench.run import cases, check, differ, line, wanted  # noqa: E402

pytestmark = pytest.mark.deep  # it compares for `make bench` alone
SIZES = dict(tokens=24, hidden=16, vocab=50)
LITTLE = dict(rows=4, query=5, layers=1, width=32, vocab=60, new_tokens=9)


class Here:
    "What Worker is, without a process."

    def __init__(self, job):
        self.job = job
        self.versions = {}

    def ask(self, do, given=None):
        return timed(self.job.run) if do == "run" else self.job.check(given)


def agree(**jobs):
    "The reasons why jobs may not be compared; each is run once, so that what would be timed is known to run."
    case = Case("here", {name: Side(name, "") for name in jobs}, [])
    reasons = check(case, {name: Here(job) for name, job in jobs.items()})
    print({name: f"{timed(job.run)['cpu']:.4f} s" for name, job in jobs.items()})
    return reasons


@pytest.mark.parametrize("entropy", [False, True])
def test_logprobs_and_the_table(entropy):
    assert agree(naive=logprobs.naive(entropy, **SIZES), ours=logprobs.ours(entropy, **SIZES)) == {}


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has had it since 2.13"
)
def test_logprobs_and_torchs_chunks():
    assert agree(naive=logprobs.naive(**SIZES), torch=logprobs.torch_chunks(**SIZES)) == {}
    logprobs.matmuls(**SIZES).run()


@pytest.mark.parametrize("mixed", [False, True])
def test_sampling_and_generate(mixed):
    settings = LITTLE | {"mixed": mixed}
    assert agree(generate=sampling.generate(**settings), ours=sampling.ours(**settings)) == {}
    sampling.matmuls(**settings).run()


@pytest.mark.parametrize("separate", [False, True])
def test_the_trainer_and_the_loop_by_hand(separate):
    size = dict(rows=6, new_tokens=5, layers=1, width=32, vocab=40)
    assert agree(hand=ppo.by_hand(separate, **size), ours=ppo.ours(separate, **size)) == {}
    assert set(ppo.ours(separate, **size).run()) == {"rollout", "score", "update"}


def test_annotate_and_whole_tables():
    size = dict(layers=1, width=32, vocab=90, rows=3, new_tokens=6)
    assert agree(table=annotate.table(**size), ours=annotate.annotate(**size)) == {}
    annotate.epoch(**size).run()


def test_a_side_with_other_numbers_is_found_out():
    wrong = logprobs.naive(**SIZES | {"tokens": 23})
    assert (
        "not the same numbers as naive" in agree(naive=logprobs.naive(**SIZES), ours=wrong)["ours"]
    )
    assert differ({"x": [1.0, 2.0]}, {"x": [1.0, 2.01]}, 1e-3) == "x: 2 and 2.01" and not differ(
        {"x": 1.0}, {"x": 1.0005}, 1e-3
    )
    assert differ({"x": [1.0]}, {"x": [1.0, 2.0]}, 1.0) == "x: 1 numbers and 2" and differ(
        {"x": float("nan")}, {"x": 1.0}, 1.0
    )


# --- the record -------------------------------------------------------------------------------------------------------
TWO = Case(
    "two",
    {"a": Side("A", "nobody:a"), "b": Side("B", "nobody:b", environment="liger")},
    [Row("work", "a", "b", goal="≤ 0.5", limit=0.1)],
)
RUNS = {
    "a": [{"cpu": x, "wall": 2 * x, "phases": {}, "peak": 30.0} for x in (1.0, 2.0, 6.0)],
    "b": [{"cpu": 4.0, "wall": 9.0, "phases": {}, "peak": 10.0}] * 3,
}


def test_a_row_by_hand():
    row = record.entry(TWO, TWO.rows[0], RUNS, {"a": {"torch": "1"}}, {}, {})
    assert (row["ratio"], row["spread"], row["met"], row["limit"]["ratio"]) == (
        0.5,
        [0.25, 1.5],
        True,
        0.1,
    )
    assert (
        row["ours"] == {"label": "A", "median": 2.0, "min": 1.0, "max": 6.0, "wall": 4.0}
        and row["of"] == "ours / peer"
    )
    flipped = record.entry(TWO, Row("work", "a", "b", flip=True, goal="≥ 2.1"), RUNS, {}, {}, {})
    assert (flipped["ratio"], flipped["spread"], flipped["met"]) == (2.0, [0.667, 4.0], False)
    alone = record.entry(TWO, Row("work", "a", None, "peak", goal="≤ 31"), RUNS, {}, {}, {})
    assert (alone["ours"]["median"], alone["unit"], alone["ratio"], alone["met"]) == (
        30.0,
        "MiB",
        None,
        True,
    )
    assert "wall" not in alone["ours"]


def test_a_peer_that_is_missed_and_a_side_that_is_wrong():
    only = {"a": RUNS["a"]}
    missed = record.entry(TWO, TWO.rows[0], only, {}, {"b": "pip install b: no such package"}, {})
    assert (
        missed["missed"] == "pip install b: no such package"
        and missed["ratio"] is None
        and set(record.KEYS) < set(missed)
    )
    wrong = record.entry(TWO, TWO.rows[0], only, {}, {}, {"b": "not the same numbers as A"})
    assert wrong["error"] == "not the same numbers as A" and wrong["ratio"] is None
    assert "missed: pip install b" in line(missed) and "ERROR" in line(wrong)


def test_rows_have_names_of_their_own_and_sides_that_exist():
    rows = [(c, r) for c in cases() for r in c.rows]
    assert len({r.name for _, r in rows}) == len(rows)
    for c, r in rows:
        assert {s for s in (r.ours, r.peer, r.limit) if isinstance(s, str)} <= set(c.sides), r.name
        assert r.what != "peak" or r.ours in c.peaks
        record.met(r.goal, 1.0)
    assert [c.name for c in wanted([], cases()) if c.optional] == [] and wanted(
        ["quickstart"], cases()
    )[0].optional
    with pytest.raises(SystemExit, match="no row is called"):
        wanted(["nothing of the kind"], cases())
