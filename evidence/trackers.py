"""TensorBoard, Weights & Biases and trackio, installed in an environment of their own, and their tests run with them, without a network.

    python evidence/run.py trackers      a few minutes; downloads

The packages are those of the extra `trackers`, in the versions that pip finds for it; all else comes from the environment that runs this.
"""
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

root = Path(__file__).parents[1]
TESTS = "tests/training/test_trackers.py"


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
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        venv.create(env, with_pip=False)
        python, site = env / "bin/python", next((env / "lib").glob("python*/site-packages"))
        print("installing", *asked_for().values(), flush=True)
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", *asked_for().values()], check=True)
        (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")  # comes after what was installed
        code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {sorted(asked_for())!r}}}))"
        installed = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
        print(installed, flush=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO", "PYTEST"))}
        done = subprocess.run([python, "-m", "pytest", "-rs", "--disable-warnings", "-p", "no:cacheprovider", TESTS], cwd=root, capture_output=True, text=True,
                              env=kept | {"PYTHONPATH": str(root), "PATH": f"{env}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    found = counts(done.stdout)
    return {"asked_for": asked_for(), "installed": installed, "tests": TESTS, "counts": found, "passed": done.returncode == 0 and not found.get("skipped")}
