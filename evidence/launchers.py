"""Launchers with two CPU processes against one process, in an environment of its own.

    make launchers      builds .venv-launchers (Ray, accelerate) and runs this; downloads, ten minutes on two cores

Each launcher starts `launchers_job.py`, which knows nothing of it. Three things are compared with one process that was started
by `python` alone: the weights and responses after six iterations; those of a run whose last process was killed in iteration 3 and
that the same launcher has finished; and, once, those of a run that two processes began and one has finished.
A launcher that is not installed is left out, and the record says so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from launchers_job import SETTINGS, new_trainer

from instruct_goose.models.sharding import configs

root = Path(__file__).parents[1]
RECORD = root / "evidence/launchers.json"
JOB = Path(__file__).parent / "launchers_job.py"
PACKAGES = ("torch", "transformers", "accelerate", "ray")
LARGEST = 1e-9  # difference of a weight, in float64
KILLED_AT = 3  # iteration
SECONDS = 600  # for one start
TWO = ["--num_processes", "2"]
COMMANDS = {  # what stands before the job's own words, behind `python`; the package that is needed
    "one process": ([], "torch"),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "torch"),
    "accelerate launch, data_parallel.yaml": (
        ["-m", "accelerate.commands.launch", "--config_file", "data_parallel.yaml", *TWO],
        "accelerate",
    ),
    "accelerate launch, fsdp.yaml": (
        ["-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", *TWO],
        "accelerate",
    ),
    "train_ray.py": (["train_ray.py", "--cpu", "--processes", "2"], "ray"),
}


def installed(package):
    "The version of a package; None: it is not installed."
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_of(launcher, folder, algorithm, *flags):
    "The words that start the job; the configurations are those that the package ships."
    words, _ = COMMANDS[launcher]
    shipped = [str(configs() / x) if x.endswith((".yaml", "ray.py")) else x for x in words]
    return [sys.executable, *shipped, str(JOB), str(folder), algorithm, *flags]


def start(launcher, folder, algorithm, *flags):
    "Run the job to its end; returns the exit status, and what it printed."
    folder.parent.mkdir(parents=True, exist_ok=True)
    kept = {k: x for k, x in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP"))}
    environment = kept | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(folder.parent),  # Ray writes into ~/ray_results
    }
    done = subprocess.run(
        command_of(launcher, folder, algorithm, *flags),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        cwd=folder.parent,
    )
    return done.returncode, done.stdout + done.stderr


def result_of(folder):
    "What the main process has left; raises FileNotFoundError for a job that did not end."
    return torch.load(folder / "told.pt", weights_only=True)


def finished(launcher, folder, algorithm):
    "Run the job to its end and read what it left; raises RuntimeError where it fails."
    status, printed = start(launcher, folder, algorithm)
    if status != 0:
        raise RuntimeError(f"{launcher}, {algorithm}: exit status {status}\n{printed[-3000:]}")
    return result_of(folder)


def largest_difference(result, other):
    "max |w − w'| over all weights."
    pairs = zip(result["weights"].values(), other["weights"].values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def untrained(algorithm):
    "The weights before the first iteration: had they stayed, all comparisons would pass."
    return {"weights": new_trainer(algorithm).agent.state_dict()}


def compared(result, alone):
    "A result beside that of one process."
    difference = largest_difference(result, alone)
    same_texts = result["responses"] == alone["responses"]
    return {
        "processes": result["processes"],
        "sharded": result["sharded"],
        "resumed_from": result["resumed_from"],
        "largest_difference": difference,
        "same_responses": same_texts,
        "passed": difference <= LARGEST and same_texts,
    }


def killed_and_resumed(launcher, algorithm, alone, folder):
    "Start a run whose last process is killed, and let the same launcher finish it."
    status, printed = start(launcher, folder, algorithm, "--kill-at", str(KILLED_AT))
    if status == 0 or (folder / "told.pt").exists():
        raise RuntimeError(f"{launcher}, {algorithm}: nothing was killed\n{printed[-3000:]}")
    return {
        "killed": {"exit_status": status, "in_iteration": KILLED_AT},
        "resumed": compared(finished(launcher, folder, algorithm), alone),
    }


def try_launcher(launcher, algorithm, alone, folder):
    "A run to its end, and a run that is killed and finished."
    whole = compared(finished(launcher, folder / "whole", algorithm), alone)
    return {"whole": whole} | killed_and_resumed(launcher, algorithm, alone, folder / "killed")


def run_launchers(names, algorithms):
    "Every launcher with every algorithm; the record is written after each."
    cases = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for algorithm in algorithms:
            alone = finished("one process", place / algorithm / "alone", algorithm)
            moved = largest_difference(alone, untrained(algorithm))
            case = cases[algorithm] = {"weights_moved_by": moved, "launchers": {}}
            for launcher in names:
                package = COMMANDS[launcher][1]
                if find_spec(package) is None:
                    case["launchers"][launcher] = {"skipped": f"{package} is not installed"}
                    continue
                folder = place / algorithm / launcher.replace(" ", "-")
                found = try_launcher(launcher, algorithm, alone, folder)
                case["launchers"][launcher] = found
                print(algorithm, launcher, json.dumps(found), flush=True)
            mixed = place / algorithm / "mixed"
            start("torchrun", mixed, algorithm, "--kill-at", str(KILLED_AT))
            case["begun_by_two_finished_by_one"] = compared(
                finished("one process", mixed, algorithm), alone
            )
    return cases


def write_record(cases):
    "The versions, the commit, and what was found."
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    record = {
        "command": "make launchers",
        "commit": commit.stdout.strip(),
        "versions": {package: installed(package) for package in PACKAGES},
        "python": platform.python_version(),
        "device": "cpu, gloo, float64, two processes on one machine",
        "compared": "weights and responses after six iterations, with those of one process",
        "bound": LARGEST,
        "cases": cases,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def failures_in(cases):
    "Name what did not pass."
    failed = []
    for algorithm, case in cases.items():
        for launcher, found in case["launchers"].items():
            for part in ("whole", "resumed"):
                if "skipped" not in found and not found[part]["passed"]:
                    failed.append(f"{algorithm}, {launcher}, {part}")
        if not case["begun_by_two_finished_by_one"]["passed"]:
            failed.append(f"{algorithm}, begun by two and finished by one")
    return failed


def main():
    "Run what the flags name; exit status 1 if anything differs."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", nargs="+", choices=[*COMMANDS][1:], default=[*COMMANDS][1:])
    parser.add_argument("--algorithms", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    args = parser.parse_args()
    cases = run_launchers(args.launchers, args.algorithms)
    write_record(cases)
    failed = failures_in(cases)
    print("differs: " + "; ".join(failed) if failed else "all as one process")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
