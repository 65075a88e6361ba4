"""bench/results.json: one object per row, written as soon as it is measured, in place of the row of the same name."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from bench.form import Case, Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results.json"
KEYS = (
    "name",
    "case",
    "what",
    "unit",
    "ours",
    "peer",
    "limit",
    "goal",
    "ratio",
    "spread",
    "of",
    "met",
    "repeats",
    "note",
    "versions",
    "commit",
    "processor",
)  # every row has them; one that could not be measured has `missed` or `error` as well


def origin() -> dict[str, str]:
    "The commit, with a + where files differ from it, and the processor."

    def git(*args):
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", "instruct_goose", "bench/*.py"
    )
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        processor = next(
            (
                line.split(": ")[1].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            processor,
        )
    return {
        "commit": (git("rev-parse", "HEAD") or "unknown") + "+" * bool(changed),
        "processor": processor,
    }


def met(goal: str | None, value: float | None) -> bool | None:
    "Is 1.2 ≤ 1.25? None where there is no goal, or no number."
    if goal is None or value is None:
        return None
    sign, limit = re.fullmatch(r"([≤≥]) (-?[\d.]+)", goal).groups()
    return value <= float(limit) if sign == "≤" else value >= float(limit)


def of_run(run: dict, what: str) -> float | None:
    return run.get(what) if what in ("cpu", "wall", "peak") else run["phases"].get(what)


def summary(label: str, numbers: list[float], wall: list[float] = ()) -> dict[str, Any]:
    made = {
        "label": label,
        "median": digits(median(numbers)),
        "min": digits(min(numbers)),
        "max": digits(max(numbers)),
    }
    return made | ({"wall": digits(median(wall))} if wall else {})


def digits(x: float | None, n: int = 4) -> float | None:
    return None if x is None else float(f"{x:.{n}g}")


def direction(row: Row) -> str | None:
    "Which of the two is divided by which."
    if row.peer is None:
        return None
    return "peer / ours" if row.flip else "ours / peer"


def empty(case: Case, row: Row) -> dict[str, Any]:
    "A row before anything is known of it."
    return dict.fromkeys(KEYS) | {
        "name": row.name,
        "case": case.name,
        "what": row.what,
        "unit": row.unit or ("MiB" if row.what == "peak" else "CPU-seconds"),
        "goal": row.goal,
        "of": direction(row),
        "note": row.note,
    }


def entry(
    case: Case,
    row: Row,
    runs: dict[str, list[dict]],
    versions: dict[str, dict],
    missed: dict[str, str],
    errors: dict[str, str],
) -> dict[str, Any]:
    """The row's object. `runs` are the repeats of each side; `missed` and `errors` say why one is not there. Repeats are paired: the
    ratio is the median of theirs, its spread from the least to the most."""
    made = empty(case, row) | origin()
    needed = [s for s in (row.ours, row.peer) if isinstance(s, str)]
    for s in needed:
        if s in errors:
            return made | {"error": errors[s]}
        if s not in runs:
            return made | {"missed": missed.get(s, f"{s} was not run")}
    numbers = {
        s: [of_run(r, row.what) for r in runs[s]]
        for s in {*needed, *([row.limit] if row.limit in runs else [])}
    }
    if any(x is None for xs in numbers.values() for x in xs):
        return made | {
            "error": f"no {row.what} was measured of {', '.join(s for s, xs in numbers.items() if None in xs)}"
        }

    def wall(s):
        return [] if row.what != "cpu" else [r["wall"] for r in runs[s]]

    ours = numbers[row.ours]
    made |= {
        "ours": summary(case.sides[row.ours].label, ours, wall(row.ours)),
        "repeats": len(ours),
        "versions": {s: versions[s] for s in needed if s in versions},
    }
    if row.peer is None:
        return made | {"met": met(row.goal, median(ours))}
    peer = numbers[row.peer] if isinstance(row.peer, str) else [row.peer] * len(ours)
    label = case.sides[row.peer].label if isinstance(row.peer, str) else row.peer_label

    def divide(a, b):
        return [y / x if row.flip else x / y for x, y in zip(a, b)]

    ratios = divide(ours, peer)
    made |= {
        "peer": summary(label, peer, wall(row.peer) if isinstance(row.peer, str) else []),
        "ratio": digits(median(ratios), 3),
        "spread": [digits(min(ratios), 3), digits(max(ratios), 3)],
        "met": met(row.goal, median(ratios)),
    }
    if row.limit is not None and (row.limit in numbers or not isinstance(row.limit, str)):
        value = (
            row.limit
            if not isinstance(row.limit, str)
            else median(divide(numbers[row.limit], peer))
        )
        made["limit"] = {"ratio": digits(value, 3), "why": row.limit_why}
    return made


def read(path: Path = RESULTS) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []


def write(rows: list[dict], path: Path = RESULTS):
    "Each in place of the one of its name, or at the end; the file is whole at every moment."
    kept = {r["name"]: r for r in read(path)}
    for row in rows:
        kept[row["name"]] = row
    whole = {
        "how": "make bench: one thread, float32; process CPU-seconds; medians of interleaved repeats",
        "rows": list(kept.values()),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, path)
