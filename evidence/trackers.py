"""TensorBoard, Weights & Biases and trackio, installed in an environment of their own, and their tests run with them, without a network.

    python evidence/run.py trackers      a few minutes; downloads

The packages are those of the extra `trackers`, in the versions that pip finds for it; all else comes from the environment that runs this.
"""
import re
import tomllib
from pathlib import Path

from lowest import tested_with
from packaging.requirements import Requirement

root = Path(__file__).parents[1]
TESTS = "tests/runs/test_trackers.py"


def asked_for() -> dict[str, str]:
    "The packages of the extra, as pyproject.toml asks for them."
    extra = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["trackers"]
    return {Requirement(line).name: line for line in extra}


def counts(said: str) -> dict[str, int]:
    "What pytest's last line counts."
    lines = [line for line in said.splitlines() if re.search(r"\d (passed|failed|skipped)|\d errors?\b", line)]
    return {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", lines[-1].partition(" in ")[0])} if lines else {}


def run_trackers() -> dict:
    "What was installed, and what the tests said."
    installed, done = tested_with(list(asked_for().values()), asked_for(), [TESTS], "-rs")
    found = counts(done.stdout)
    return {"asked_for": asked_for(), "installed": installed, "tests": TESTS, "counts": found, "passed": done.returncode == 0 and not found.get("skipped")}
