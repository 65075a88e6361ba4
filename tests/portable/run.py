"""Lessons and tests (all but tests/repo, which reads files) on other machines' arithmetic: `make portable`, or `make portable ARGS="avx2 jitter:1-3 python3.12"`.

native       as it is here
default      no vector instructions: torch's and oneDNN's plainest kernels, MKL's compatible ones
avx2, avx512 as on processors with and without AVX-512
threads      two torch threads, whatever a lesson asks for
gpu          the lessons where torch sees a GPU, which it does not anywhere else here
jitter:n     initial weights times (1 + 1e-6·noise), draw n of 1 to 10
python3.n    another Python, with constraints.txt, in .venv-portable/

Prints which assertion fell under which, and writes evidence/portable.json; each variant replaces its own entry there.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from variants import FORCED, missing

root = Path(__file__).parents[2]

PYTHONS = ["python3.11", "python3.12", "python3.13"]
here = "python{}.{}".format(*sys.version_info)
record = root / "evidence/portable.json"


def chosen(words: list[str]) -> list[str]:
    "The variants named; `jitter` is all ten, `jitter:1-3` three of them."
    known, names = [*FORCED, *PYTHONS], []
    for word in words:
        if span := re.fullmatch(r"jitter(?::(\d+)-(\d+))?", word):
            names += [f"jitter:{n}" for n in range(int(span[1] or 1), int(span[2] or 10) + 1)]
        else: names.append(word)
    if unknown := set(names) - set(known): sys.exit(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names or known


def environment(variant: str) -> dict:
    "The variables that make this process's children the other machine."
    path = os.pathsep.join(filter(None, [str(root / "tests/portable"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | FORCED.get(variant, {})


def python_of(variant: str) -> tuple[str | None, str | None]:
    "Path of a Python with everything installed, or why there is none."
    if variant not in PYTHONS or variant == here: return sys.executable, None
    version, venv = variant.removeprefix("python"), root / ".venv-portable" / variant.removeprefix("python")
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/{variant}"), shutil.which(variant)]
    working = [p for p in found if p and not subprocess.run([p, "-c", ""], capture_output=True).returncode]
    if not working: return None, f"{variant} was not found"
    if not (venv / ".installed").exists():
        subprocess.run([working[0], "-m", "venv", venv], check=True)
        done = subprocess.run([venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt",
                               "-e", ".[dev,docs]"], cwd=root, capture_output=True, text=True)
        if done.returncode: return None, f"the pinned packages could not be installed: {done.stderr.strip().splitlines()[-1][:200]}"
        (venv / ".installed").touch()
    return str(venv / "bin/python"), None


def origin_of(python: str, command: str) -> dict:
    "Where a figure comes from, as the Python that made it says: another than this one may have another torch."
    asked = "import json, sys; sys.path.insert(0, 'evidence'); from run import origin; print(json.dumps(origin(sys.argv[1])))"
    return json.loads(subprocess.run([python, "-c", asked, command], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def tests_of(report: Path) -> tuple[int, int, list[dict]]:
    "From pytest's XML: how many ran, how many were skipped, what fell and why."
    cases, fell = list(ElementTree.parse(report).iter("testcase")) if report.exists() else [], []
    for case in cases:
        for bad in [*case.iter("failure"), *case.iter("error")]:
            fell.append({"test": f"{case.get('file')}::{case.get('name')}", "error": " ".join((bad.get("message") or "").split())[:500]})
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - skipped, skipped, fell


def run(variant: str, python: str, workers: int) -> dict:
    "Notebooks, then tests."
    env, start = environment(variant), time.time()
    with tempfile.TemporaryDirectory() as folder:
        notebooks, report = (Path(folder) / name for name in ("notebooks.json", "tests.xml"))
        env["PATH"] = f"{Path(python).parent}{os.pathsep}{env['PATH']}"
        subprocess.run([python, "tests/notebooks.py", "--workers", str(workers), "--json", notebooks], cwd=root, env=env)
        if variant != "gpu":  # tests do not let a GPU be seen
            subprocess.run([python, "-m", "pytest", "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", "-o", "junit_family=xunit1",
                            f"--junitxml={report}", "tests", "--ignore=tests/repo"], cwd=root, env=env)
        ran, skipped, fell = tests_of(report)
        told = json.loads(notebooks.read_text("utf-8")) if notebooks.exists() else []
    entry = {"origin": origin_of(python, f"python tests/portable/run.py {variant}"), "environment": FORCED.get(variant, {}), "seconds": round(time.time() - start),
             "notebooks": len(told), "tests": ran, "skipped": skipped,
             "fell": [{"notebook": r["name"], **r["fell"]} for r in told if r["fell"]] + fell}
    if not told or not ran and variant != "gpu": entry["fell"].append({"error": f"{len(told)} notebooks and {ran} tests ran"})
    return entry


def say(variant: str, entry: dict):
    if "not_run" in entry: return print(f"--     {variant:<11} not run: {entry['not_run']}")
    print(f"{'FAILED' if entry['fell'] else 'ok    '} {variant:<11} {entry['notebooks']} notebooks, {entry['tests']} tests, {entry['seconds']} s")
    for f in entry["fell"]:
        place = f"{f['notebook']}, cell {f.get('cell')} ({f.get('id')}): {f.get('line', '')}" if "notebook" in f else f.get("test", "")
        print(f"       {place}\n         {f['error']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="all of them without")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    names = chosen(args.variants)
    for variant in names:
        known = json.loads(record.read_text("utf-8")) if record.exists() else {}
        python, why = python_of(variant)
        if why := why or missing(variant): entry = {"not_run": why}
        elif variant == here: entry = {"not_run": "it is the Python of every other variant"}
        else:
            print(f"\n\033[1m── {variant}\033[0m", flush=True)
            entry = run(variant, python, args.workers)
        known[variant] = entry
        order = {v: known[v] for v in [*FORCED, *PYTHONS] if v in known}
        record.write_text(json.dumps(order, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print("\n\033[1m── summary\033[0m")
    for variant in names: say(variant, order[variant])
    sys.exit(any(order[v].get("fell") for v in names))


if __name__ == "__main__": main()
