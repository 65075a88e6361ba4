"""Every check in one go: `make test`. Each step says what it runs; the summary at the end says what failed.

`python tests/run.py ruff current` runs only the steps named; `--deep` adds the repeats that `make test` has no time for.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).parents[1]
bin = Path(sys.executable).parent
WHY = "       why: "  # the line below a notebook that fell, in tests/notebooks.py
# lessons that once fell on another machine: `make test` runs the short one on another one's arithmetic, `make deep` all of them on both; `make portable` has every lesson
FELL_ELSEWHERE = [
    "guides/invariances",
    "learn/14_reward_model",
    "learn/16_trainer",
    "guides/side_by_side",
]
# steps of one process each: two lanes of them side by side, where there are two workers
LANES = [["ruff", "format", "layers", "portable", "types", "current"], ["site"]]


def other_machine() -> tuple[str, dict]:
    "The capability that is not this processor's own, with its environment variables."
    sys.path.insert(0, str(root / "tests/portable"))
    from variants import FORCED, missing

    name = "default" if missing("avx512") else "avx2"
    return name, FORCED[name]


def steps(workers: int, deep: bool = False) -> dict:
    "name -> (what it is for, command)"
    python = sys.executable
    elsewhere = FELL_ELSEWHERE if deep else FELL_ELSEWHERE[:1]
    return {
        "ruff": ("style and plain mistakes", [bin / "ruff", "check", "."]),
        "format": (
            "layout is what ruff format makes of it",
            [bin / "ruff", "format", "--check", "."],
        ),
        "layers": (
            "imports point down, in no circle",
            [bin / "lint-imports", "--no-cache"],
        ),
        "current": (
            "modules, clean notebooks and README are what the notebooks say",
            [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/repo/test_current.py"],
        ),
        "notebooks": (
            "every other notebook runs, and what it asserts holds",
            [
                python,
                "tests/notebooks.py",
                "--workers",
                str(workers),
                *([] if deep else ["--without", *elsewhere]),
            ],
        ),
        "portable": (
            f"what once fell elsewhere, on another processor's arithmetic: {other_machine()[0]}",
            [python, "tests/notebooks.py", "--workers", "1", *elsewhere],
        ),
        "types": (
            "a type checker finds nothing",
            [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/repo/test_types.py"],
        ),
        "site": (
            "the site builds without a warning, every formula is valid",
            [python, "docs/build.py", "--quiet"],
        ),
        "pytest": (
            "properties, parity, reliability, repository and site",
            [
                python,
                "-m",
                "pytest",
                "-ra",
                "-n",
                str(workers + 1),  # a quarter of the time a test waits for a browser or a process
                "--dist",
                "worksteal",
                "--ignore=tests/repo/test_current.py",
                "--ignore=tests/repo/test_types.py",
                *["--deep"] * deep,
                "tests",
            ],
        ),
    }


def run(name: str, what: str, command: list, env: dict, show=print) -> tuple:
    "Run, show the output as it comes, and return name, whether all is well, seconds, the last line, and the lines that say what fell and why."
    last = ""
    fell = []
    start = time.time()
    show(f"\n\033[1m── {name}: {what}\033[0m\n", end="", flush=True)
    with subprocess.Popen(
        command,
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            show(line, end="", flush=True)
            last = line.strip() or last
            if line.startswith(("FAILED ", "ERROR ", WHY)) and not line.endswith(" s\n"):
                fell.append(line.rstrip())
    return name, process.returncode == 0, time.time() - start, last, fell


def one_by_one(steps: list[tuple]) -> list[tuple]:
    "Steps one after the other; a step's output is shown whole, when it ends."
    results = []
    for step in steps:
        lines = []
        results.append(run(*step, show=lambda line, **_: lines.append(line)))  # noqa: B023
        print("".join(lines), end="", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of steps; all of them without")
    parser.add_argument("--workers", type=int, default=2, help="processes for notebooks and pytest")
    parser.add_argument(
        "--deep", action="store_true", help="also repeats with other values: twice as long"
    )
    args = parser.parse_args()
    todo = steps(args.workers, args.deep)
    if unknown := set(args.only) - set(todo):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(todo)}")

    # one thread per process: more of them fight for the cores. Dozens of processes import torch: uncompiled that takes 15 s more, each time
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
    }
    jobs = {
        name: (name, what, command, env | (other_machine()[1] if name == "portable" else {}))
        for name, (what, command) in todo.items()
        if not args.only or name in args.only
    }
    lanes = [lane for names in LANES if (lane := [jobs.pop(n) for n in names if n in jobs])]
    if lanes:
        print(
            f"\n\033[1m── side by side: {', '.join(job[0] for lane in lanes for job in lane)}\033[0m",
            flush=True,
        )
    with ThreadPoolExecutor(args.workers) as pool:
        results = sum(pool.map(one_by_one, lanes), [])
    results += [run(*job) for job in jobs.values()]  # after the site: a test reads it

    print("\n\033[1m── summary\033[0m")
    for name, ok, seconds, last, fell in results:
        print(
            f"{'ok    ' if ok else 'FAILED'} {name:<10} {seconds:6.1f} s   {last if name == 'pytest' or not ok else ''}"
        )
        for line in fell:
            print(f"       {line}")
    sys.exit(not all(ok for _, ok, *_ in results))


if __name__ == "__main__":
    main()
