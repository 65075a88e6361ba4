"""Wrong input of five kinds, given to the commands: `python evidence/inputs.py`, or only some of it: `python evidence/inputs.py yaml --seed 1`.

A case damages a copy of a small world (a model, prompts, a reward, a finished run) and calls the command in a process of its own. How it may end stands
beside it: refused, ran, or either. A fault is a traceback, an end other than that, a minute without an end, more than 100 kB of output, a changed input,
or an output directory that is neither gone nor ready for --resume.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import inputs_damage as damage

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100"}
LEFT = re.compile(r"^(runs|__pycache__|out|compare\.html|.*\.lock)(/|$)|/report\.html$|/\.lock$")


class Case(NamedTuple):
    "What is damaged, and how it may end."

    name: str
    ends: str  # refused, ran, either
    make: Callable[
        [Path], list[str] | None
    ]  # damages the world; what the command is called with, None: `damage.TRAIN`
    wrong: Callable[[Path, str], str | None] = lambda here, said: (
        None
    )  # of one that ran: what is not as it was asked for


def called(argv: list[str], here: Path) -> None:
    "The command, as in a shell."
    os.setsid()
    os.chdir(here)
    for stream in (1, 2):
        os.dup2(os.open(here.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
    sys.path[:0], sys.argv = [str(here)], ["instruct-goose", *argv]
    from instruct_goose.cli.main import main

    main(argv)


def run(
    argv: list[str], here: Path, seconds: float = 60.0
) -> tuple[int | None, str]:  # exit status, None: no end; and the output
    said = here.parent / "said"
    said.write_bytes(b"")
    child = multiprocessing.get_context("fork").Process(target=called, args=(argv, here))
    child.start()
    child.join(seconds)
    status = child.exitcode
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return status, said.read_bytes()[: 2 * 10**7].decode("utf-8", "replace")


def files(here: Path) -> dict:
    return {
        name: p.read_bytes()
        for p in here.rglob("*")
        if p.is_file() and not LEFT.search(name := str(p.relative_to(here)))
    }


def end_of(
    case: Case, argv: list[str], status: int | None, said: str, here: Path, before: dict
) -> tuple[str, str | None]:
    "refused or ran; and the fault, if there is one."
    end = "ran" if status == 0 else "refused"
    if status is None:
        return end, "no end in 60 s"
    text = re.sub("LOUD+\n?", "", said)
    fault = fault_of_output(text, status)
    if fault is None and case.ends not in (end, "either"):
        fault = f"{end}, and should have been {case.ends}: {text.strip()[-200:]!r}"
    if fault is None:
        fault = fault_of_files(argv, end, text, here, before)
    if fault is None and end == "ran":
        try:
            fault = case.wrong(here, text)
        except (ValueError, KeyError, OSError, IndexError) as e:
            fault = f"what it wrote cannot be read: {e!r:.200}"
    return end, fault


def fault_of_output(text: str, status: int) -> str | None:
    "What is wrong with what a command printed, and with its exit status."
    if "Traceback (most recent" in text:
        return f"a traceback: {text.strip().splitlines()[-1][:200]}"
    if len(text.encode()) > 100_000:
        return f"{len(text.encode()):,} bytes of output"
    if status not in (0, 1, 2, 130):
        return f"exit status {status}"
    if status in (1, 2) and not re.search("instruct-goose: .|error|Error", text):
        return f"no sentence: {text[-200:]!r}"
    if "For the traceback:" in text and ".py, line" not in text:
        return f"an error of the inside: {text.strip().splitlines()[-2][:200]}"
    return None


def fault_of_files(argv: list[str], end: str, text: str, here: Path, before: dict) -> str | None:
    "What is wrong with the files: one that was changed, or a directory that was left."
    after = files(here)
    if end == "ran" and "--resume" in argv:
        before = {k: x for k, x in before.items() if not k.startswith("run/")}
    for name, content in before.items():
        if after.get(name) != content:
            return f"changed: {name}"
    out = here / "out"
    if end == "refused" and out.exists() and "To go on: " not in text:
        return f"out is left with {sorted(p.name for p in out.iterdir())}"
    return None


def tried(cases: list[Case], world: Path, show: bool) -> tuple[dict, list]:
    "Counts, and the faults."
    counts = Counter()
    faults = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / "here"
            shutil.copytree(world, here, symlinks=True)
            argv = case.make(here) or damage.TRAIN
            before = files(here)
            status, said = run(argv, here)
            end, fault = end_of(case, argv, status, said, here, before)
        counts[end if fault is None else "fault"] += 1
        if fault is not None:
            faults.append({"case": case.name, "fault": fault})
        if show or fault:
            print(
                f"{'FAULT ' if fault else ''}{case.name}: {end}{f': {fault}' if fault else ''}\n    {said.strip()[-300:]!r}",
                flush=True,
            )
    return counts, faults


def make_world(folder: Path) -> Path:
    "A model, an adapter, prompts, pairs, a reward, and a run of three iterations with its checkpoints."
    here = folder / "world"
    here.mkdir()
    damage.write_world(here)
    status, said = run(
        [*damage.TRAIN[:-1], "run", "--steps", "3", "--save-every", "1", "--keep", "3"], here
    )
    if status:
        raise SystemExit(said)
    return here


def record(kinds=None, seed: int = 0, show: bool = False) -> dict:
    import matplotlib.pyplot  # noqa: F401  what the children need is loaded once
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import instruct_goose.doctor.report
    import instruct_goose.recipes.own_model  # noqa: F401

    rows = {}
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        for kind, cases in damage.KINDS.items():
            if kinds and kind not in kinds:
                continue
            made = [Case(*c) for c in cases(random.Random(seed), world)]
            counts, bad = tried(made, world, show)
            rows[kind] = {
                "tried": len(made),
                "refused": counts["refused"],
                "ran": counts["ran"],
                "faults": counts["fault"],
            }
            faults += [{"kind": kind, **f} for f in bad]
            print(kind, rows[kind], flush=True)
    return {"seed": seed, "rows": rows, "faults": faults}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*damage.KINDS, []])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="each case")
    args = parser.parse_args()
    print(json.dumps(record(args.kinds, args.seed, args.show), ensure_ascii=False, indent=1))
