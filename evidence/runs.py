"""Awkward runs of the commands: `python evidence/runs.py` writes evidence/runs.json.

Seven kinds of at least sixty: signals at a step of each stage, changes between start and resume,
rewards with children, rewards that change the working directory, outputs that are not UTF-8,
mixtures of experts, and adapters. Each command runs in a forked process, with a session of its own.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}

from runs_cases import Case, cases  # noqa: E402  # before torch is imported
from runs_world import make_world  # noqa: E402

FILE = Path(__file__).parent / "runs.json"


def fault_of(case: Case, world: Path) -> str | None:
    "The fault of a case in a world of its own."
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory) / "here"
        shutil.copytree(world, here)
        try:
            fault = case.fault(here)
        except Exception as e:  # a fault as well
            fault = f"{type(e).__name__}: {e}"
        return fault.replace(directory, "…") if fault else None


def try_all(chosen: list[Case]) -> list[dict[str, str]]:
    "The faults of some cases; each case is a line."
    faults = []
    with tempfile.TemporaryDirectory() as directory:
        world = Path(directory) / "world"
        world.mkdir()
        make_world(world)
        for number, case in enumerate(chosen, 1):
            began = time.monotonic()
            fault = fault_of(case, world)
            seconds = time.monotonic() - began
            line = f"{number:3d} {seconds:5.1f} s  {case.kind}: {case.name}  {fault or ''}"
            print(line, flush=True)
            if fault:
                faults.append({"kind": case.kind, "name": case.name, "fault": fault})
    return faults


def main() -> None:
    known = cases()
    kinds = list(dict.fromkeys(case.kind for case in known))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(kinds)}; none: all")
    parser.add_argument(
        "--only", default="", help="cases whose name holds this; nothing is written"
    )
    args = parser.parse_args()
    wanted = args.kinds or kinds
    chosen = [case for case in known if case.kind in wanted and args.only in case.name]
    import matplotlib.figure  # noqa: F401  # what the forked commands need is loaded once
    import torch

    from instruct_goose.recipes import own_model  # noqa: F401

    torch.set_num_threads(1)
    faults = try_all(chosen)
    if not args.only:
        record = json.loads(FILE.read_text("utf-8"))
        counts = record["cases"] | Counter(case.kind for case in chosen)
        others = [fault for fault in record["faults"] if fault["kind"] not in wanted]
        record |= {"cases": {kind: counts.get(kind, 0) for kind in kinds}}
        record |= {"faults": [*others, *faults]}
        FILE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(chosen)} cases, {len(faults)} faults")


if __name__ == "__main__":
    main()
