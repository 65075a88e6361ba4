"""Lessons and tests (all but tests/repo, which reads files) on other machines' arithmetic: `make portable`, or `make portable ARGS="avx2 jitter:1-3"`.

native       as it is here
default      no vector instructions: torch's and oneDNN's plainest kernels, MKL's compatible ones
avx2, avx512 as on processors with and without AVX-512
threads      two torch threads, whatever a lesson asks for
gpu          the lessons where torch sees a GPU, which it does not anywhere else here
jitter:n     initial weights times (1 + 1e-6·noise), draw n of 1 to 10

Another Python: `make test PYTHON=python3.13`.
Prints which assertion fell under which, and writes evidence/portable.json; each variant replaces its own entry there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from variants import FORCED, missing

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "evidence"))
from run import origin  # noqa: E402

record = root / "evidence/portable.json"


def chosen(words: list[str]) -> list[str]:
    "The variants named; `jitter` is all ten, `jitter:1-3` three of them."
    names = []
    for word in words:
        if span := re.fullmatch(r"jitter(?::(\d+)-(\d+))?", word):
            names += [f"jitter:{n}" for n in range(int(span[1] or 1), int(span[2] or 10) + 1)]
        else:
            names.append(word)
    if unknown := set(names) - set(FORCED):
        sys.exit(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(FORCED)}")
    return names or [*FORCED]


def environment(variant: str) -> dict:
    "The variables that make this process's children the other machine."
    path = os.pathsep.join(
        filter(None, [str(root / "tests/portable"), os.environ.get("PYTHONPATH")])
    )
    return (
        os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        | FORCED[variant]
    )


def tests_of(report: Path) -> tuple[int, int, list[dict]]:
    "From pytest's XML: how many ran, how many were skipped, what fell and why."
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    fell = []
    for case in cases:
        for bad in [*case.iter("failure"), *case.iter("error")]:
            fell.append(
                {
                    "test": f"{case.get('file')}::{case.get('name')}",
                    "error": " ".join((bad.get("message") or "").split())[:500],
                }
            )
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - skipped, skipped, fell


def run(variant: str, workers: int) -> dict:
    "Notebooks, then tests."
    env = environment(variant)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        notebooks, report = (Path(folder) / name for name in ("notebooks.json", "tests.xml"))
        subprocess.run(
            [sys.executable, "tests/notebooks.py", "--workers", str(workers), "--json", notebooks],
            cwd=root,
            env=env,
        )
        if variant != "gpu":  # tests do not let a GPU be seen
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-n",
                    str(workers),
                    "--dist",
                    "worksteal",
                    "-p",
                    "no:cacheprovider",
                    "-o",
                    "junit_family=xunit1",
                    f"--junitxml={report}",
                    "tests",
                    "--ignore=tests/repo",
                ],
                cwd=root,
                env=env,
            )
        ran, skipped, fell = tests_of(report)
        told = json.loads(notebooks.read_text("utf-8")) if notebooks.exists() else []
    entry = {
        "origin": origin(f"python tests/portable/run.py {variant}"),
        "environment": FORCED[variant],
        "seconds": round(time.time() - start),
        "notebooks": len(told),
        "tests": ran,
        "skipped": skipped,
        "fell": [{"notebook": r["name"], **r["fell"]} for r in told if r["fell"]] + fell,
    }
    if not told or not ran and variant != "gpu":
        entry["fell"].append({"error": f"{len(told)} notebooks and {ran} tests ran"})
    return entry


def say(variant: str, entry: dict):
    if "not_run" in entry:
        return print(f"--     {variant:<11} not run: {entry['not_run']}")
    print(
        f"{'FAILED' if entry['fell'] else 'ok    '} {variant:<11} {entry['notebooks']} notebooks, {entry['tests']} tests, {entry['seconds']} s"
    )
    for f in entry["fell"]:
        place = (
            f"{f['notebook']}, cell {f.get('cell')} ({f.get('id')}): {f.get('line', '')}"
            if "notebook" in f
            else f.get("test", "")
        )
        print(f"       {place}\n         {f['error']}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", help="all of them without")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    names = chosen(args.variants)
    for variant in names:
        known = json.loads(record.read_text("utf-8")) if record.exists() else {}
        why = missing(variant)
        known[variant] = {"not_run": why} if why else run(variant, args.workers)
        record.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", "utf-8")
        say(variant, known[variant])
    sys.exit(any(known[v].get("fell") for v in names))


if __name__ == "__main__":
    main()
