"evidence/gpu.py where there is no GPU: it refuses to measure, every line of it can be tried, and the site reads what it writes."

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "annotate", "update")


@pytest.fixture
def gpu(monkeypatch):
    "evidence/gpu.py as a module."
    monkeypatch.syspath_prepend(ROOT / "evidence")
    monkeypatch.delitem(
        sys.modules, "run", raising=False
    )  # tests/run.py, if another test has imported it
    import gpu

    return gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refused_without_a_gpu(gpu):
    with pytest.raises(SystemExit, match="no GPU here.*--rehearse"):
        gpu.main([])


def test_what_does_not_fit_is_named_and_the_rest_goes_on(gpu, monkeypatch):
    def fails(error):
        raise error

    written = []
    card = gpu.Card("cpu", False, gpu.TINY, gpu.TINY)
    work = [
        ("speed", "small", 1, lambda: {"x": 1.23456}),
        ("large", "big", 1, lambda: fails(torch.OutOfMemoryError("CUDA out of memory.\nTried"))),
        ("large", "long", 1000, lambda: fails(AssertionError("begun too late"))),
        ("others", "peer", 1, lambda: fails(ImportError("No module named 'trl'"))),
        ("others", "broken", 1, lambda: fails(ValueError("a mistake"))),
        ("resume", "not asked", 1, lambda: fails(AssertionError("not asked"))),
        ("speed", "there", 1, lambda: fails(AssertionError("it has been measured"))),
        ("agreement", "last", 1, lambda: {"y": 2}),
    ]
    monkeypatch.setattr(gpu, "units", lambda card: work)
    figures = {
        "not_run": {"speed: small": "out of memory, before"},
        "unit_seconds": {},
        "speed": {"there": {"z": 3}},
    }
    errors = gpu.measure(
        card,
        figures,
        lambda f: written.append(json.dumps(f)),
        ("speed", "large", "others", "agreement"),
        minutes=10,
    )
    assert (
        errors == ["others: broken"]
        and figures["speed"] == {"there": {"z": 3}, "small": {"x": 1.235}}
        and figures["agreement"] == {"last": {"y": 2}}
    )
    why = figures["not_run"]
    assert (
        why.keys() == {"large: big", "large: long", "others: peer", "others: broken"}
        and why["large: big"] == "out of memory: CUDA out of memory."
    )
    assert (
        "1000 seconds may be needed" in why["large: long"]
        and "trl" in why["others: peer"]
        and why["others: broken"] == "ValueError: a mistake"
    )
    assert (
        len(written) == 6 and "agreement" not in written[-2] and "small" in written[0]
    )  # a run that is killed keeps what it has


def test_what_is_too_large_for_the_card_is_not_tried(gpu, monkeypatch):
    "The fastest plan that leaves a tenth of the card free; none is named with the least that is needed."
    card = gpu.Card("cpu", True, gpu.TINY, gpu.TINY)
    config = gpu.large_configs(True)["1 B"]
    needs = []
    for plan in gpu.plans(card, None):
        sizes = gpu.TINY | {"micro_batch_size": plan.micro_batch_size}
        weights = gpu.WAYS[plan.way].weights
        needs.append(
            gpu.ledger(
                config, sizes, weights, 2**40, value_copy=True, checkpointing=plan.checkpointing
            )
        )
    assert needs == sorted(needs, reverse=True)
    for plan, needed in zip(gpu.plans(card, None), needs, strict=True):
        monkeypatch.setattr(gpu.Card, "memory", needed / 0.9 + 1)
        assert gpu.first_plan(config, card, "copy", None) == (plan, needed)
    row = gpu.large(config, card, "ppo")
    assert row["weights"] == "bfloat16" and row["checkpointing"]
    monkeypatch.setattr(gpu.Card, "memory", needs[-1])
    with pytest.raises(gpu.NotHere, match="are estimated, and the card has"):
        gpu.large(config, card, "ppo")


def test_a_second_run_adds_to_the_first_at_one_commit_alone(gpu, tmp_path):
    (tmp_path / "gpu.json").write_text(
        json.dumps({"origin": {"commit": "a", "gpu": "G"}, "speed": {}})
    )
    assert "speed" in gpu.begun(tmp_path / "gpu.json", {"origin": {"commit": "a", "gpu": "G"}})
    assert "speed" not in gpu.begun(
        tmp_path / "gpu.json", {"origin": {"commit": "b", "gpu": "G"}}
    ) and gpu.begun(tmp_path / "none", {"origin": 1}) == {"origin": 1}


def test_waits_are_those_for_the_gpu(gpu):
    "What the measurement itself waits for is the device; a number on the CPU is no wait."
    seen = {
        "cudaStreamSynchronize": 5,
        "cudaEventSynchronize": 1,
        "cudaDeviceSynchronize": 2,
        "Memcpy DtoH (Device -> Pageable)": 5,
        "aten::_local_scalar_dense": 9,
    }
    assert (
        gpu.host_waits(seen, True) == 6
        and gpu.host_waits(seen, False) == 9
        and gpu.host_waits({"aten::_local_scalar_dense": 9}, True) == 0
    )


def test_the_loop_by_hand_does_what_the_trainer_does(gpu):
    "The same responses, and after an iteration the same weights."
    card = gpu.Card("cpu", True, gpu.TINY, gpu.TINY)
    config = gpu.configs(True)["Llama, 135M"]
    trainer = gpu.new_trainer(
        gpu.made(config, "cpu"), card, gpu.TINY, "grpo", minibatches=1, lr=1e-3
    )
    hand = gpu.ByHand(gpu.made(config, "cpu"), trainer.config)
    batch = gpu.next_batch(trainer, gpu.TINY, 1)
    rollout = trainer.rollout(batch)
    text = torch.cat([rollout.query_ids, rollout.response_ids], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "generated", lambda *_: text)
        start = [p.detach().clone() for p in hand.model.parameters()]
        hand.step(batch, lambda: torch.autocast("cpu", torch.bfloat16, enabled=False))
    gpu.iterate(trainer, batch, lambda phase, f, *args: rollout if phase == "rollout" else f(*args))
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(hand.model.parameters(), start, strict=True)]
    )
    off = torch.cat(
        [
            (a - b).flatten()
            for a, b in zip(trainer.agent.model.parameters(), hand.model.parameters(), strict=True)
        ]
    )
    assert moved.norm() > 0.01 and off.norm() < 0.02 * moved.norm()


def test_the_site_reads_old_records_and_new_ones(gpu, tmp_path):
    from gpu_table import EARLIER, NONE, gpu_speed, gpu_table

    old = gpu_table(EARLIER, None)
    assert (
        "NVIDIA H100 80GB HBM3 (79 GiB" in old
        and "2026-11-22" in old
        and "| GPT-2, 124M | float32 | 3,212 | 8,698 | 5,958 | 4.1 |" in old
    )
    assert (
        "1.8e-06 (1.3e-04)" in old
        and "to the bit" in old
        and "human score 0.26 before, 2.48 after" in old
        and "3,212" in gpu_speed(EARLIER)
        and "H100" in gpu_speed(EARLIER)
    )

    def each(x):
        return dict.fromkeys(PHASES, x)

    row = {
        "seconds": each(2.0),
        "tokens_per_second": each(5000.0),
        "peak_gib": each(3.0),
        "estimated_gib": 2.0,
        "roofline_seconds": each(0.5),
        "computing_seconds": each(1.0),
        "waits_per": {"sampled token": 0.0625, "optimizer step": 3.0},
        "graph": False,
        "profile": {"rollout": {"no_graph": ["no CUDA graph: why"]}},
    }
    one = {"median": 2.0, "least": 1.0, "most": 3.0}
    new = {
        "origin": {
            "gpu": "A card",
            "memory_gib": 24.0,
            "cuda": "13",
            "torch": "2.12",
            "commit": "abcdefghi",
            "measured": "2030-01-02",
        },
        "rehearsal": False,
        "sizes": gpu.SIZES,
        "large_sizes": gpu.LARGE,
        "speed": {"M": {"w": row, "v": row | {"graph": True}}},
        "not_run": {"large: 8 B": "out of memory: all"},
        "others": {
            "writers, M": {"sample": one},
            "GRPO by hand, M": {"trainer": one, "by hand": one},
            "GRPO by TRL, M": one | {"trl": "1.16.0"},
        },
        "large": {
            "1 B, PPO": row | {"weights": "w", "utilisation": {"update": 0.4, "recomputed": 0.13}}
        },
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(new))
    text = gpu_table(path, None)
    for line in (
        "A card (24 GiB, CUDA 13, torch 2.12), 2030-01-02, commit `abcdefg`",
        "| M | w | 5,000 | 5,000 | 5,000 | 3.0 | 50% | 0.0625 | 3 |",
        "M, w (no CUDA graph: why).",
        "| M | w | 4.0 | 4.0 | 4.0 | 1.50 |",
        "`sample` 2 (1 to 3)",
        "trainer 2 (1 to 3), by hand 2 (1 to 3)",
        "TRL 1.16.0 2 (1 to 3)",
        "| 1 B, PPO | w | 2.0 | 2.0 | 2.0 | 3 | 2 | 40% + 13% |",
        "Not run: large: 8 B (out of memory: all).",
    ):
        assert line in text, (line, text)
    assert "2030-01-02" in gpu_speed(path) and "50%" in gpu_speed(path)
    path.write_text(
        json.dumps({k: x for k, x in new.items() if k not in ("speed", "others", "large")})
    )
    assert "A card" in gpu_table(path) and gpu_speed(path) == ""  # a run that was killed early
    both = gpu_table(path)
    assert "Not measured again since one NVIDIA H100" in both and "human score 0.26" in both
    path.write_text(json.dumps(new | {"rehearsal": True}))
    assert gpu_table(path) == NONE and gpu_speed(path) == ""


def test_the_estimate_of_memory_is_near_what_a_card_needed(gpu):
    "The record's peaks, and those of the same iteration with gradient checkpointing and 16 rows: 30.2 GiB."
    text = (ROOT / "evidence/gpu.json").read_text("utf-8")
    record = json.loads(text)
    assert gpu.estimate_again(json.loads(text)) == record
    rows = [row for ways in record["speed"].values() for row in ways.values()]
    for row in [*rows, *record["large"].values()]:
        assert 0.85 < row["estimated_gib"] / max(row["peak_gib"].values()) < 1.15
    sizes = record["large_sizes"] | {"micro_batch_size": 16}
    needed = gpu.ledger(
        gpu.large_configs(False)["1 B"], sizes, "float32", 139.8 * 2**30, checkpointing=True
    )
    assert 0.85 < needed / 2**30 / 30.2 < 1.15


@pytest.mark.deep
def test_rehearsal(gpu, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "evidence/gpu.py", "--rehearse", "--output", tmp_path / "gpu.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert figures["rehearsal"] and "rehearsal" in figures["origin"]["gpu"]
    card = gpu.Card("cpu", True, gpu.TINY, gpu.TINY)
    missing = {
        where
        for where in figures["not_run"]
        if not ("TRL" in where and importlib.util.find_spec("trl") is None)
    }
    assert not missing, figures["not_run"]
    assert {(unit.part, unit.name) for unit in gpu.units(card)} >= {
        (part, name) for part in gpu.PARTS for name in figures[part]
    } and all(map(figures.get, gpu.PARTS))
    for row in figures["agreement"].values():
        coarse, fine = (row[d] for d in ("bfloat16", "float32"))
        assert coarse["within"] and fine["within"]
        assert all(
            coarse["difference"][k] > fine["bound"][k] for k in ("logprobs", "gradient")
        )  # the bound can tell them apart
    assert all(row["loaded_to_the_bit"] for row in figures["resume"].values())
    for ways in figures["speed"].values():
        assert ways.keys() == gpu.WAYS.keys()
        for x in ways.values():
            assert (
                all(
                    len(x["profile"][p]["longest"]) == 10 and x["computing_seconds"][p] > 0
                    for p in PHASES
                )
                and min(x["waits_per"].values()) > 0
            )

    from gpu_table import gpu_table

    (tmp_path / "gpu.json").write_text(
        json.dumps(
            figures
            | {
                "rehearsal": False,
                "origin": figures["origin"] | {"memory_gib": 1.0, "cuda": "none"},
            }
        )
    )
    assert "smollm-reviews" in gpu_table(tmp_path / "gpu.json")
