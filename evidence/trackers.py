"""TensorBoard, Weights & Biases and trackio, installed in an environment of their own, and their tests run with them, without a network.

    python evidence/run.py trackers      a few minutes; downloads

The packages are those of the extra `trackers`, in the versions that pip finds for it; all else comes from the environment that runs this.
"""

import json
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
TESTS = "tests/runs/test_trackers.py"


def run_trackers() -> dict:
    "What was installed, and what the tests said."
    extra = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["trackers"]
    asked_for = {Requirement(line).name: line for line in extra}
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        venv.create(env, with_pip=False)
        python = env / "bin/python"
        site = next((env / "lib").glob("python*/site-packages"))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                "install",
                "--quiet",
                "--no-compile",
                *extra,
            ],
            check=True,
        )
        (site / "rest.pth").write_text(
            sysconfig.get_path("purelib") + "\n"
        )  # comes after what was installed
        code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {sorted(asked_for)!r}}}))"
        installed = json.loads(
            subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        )
        done = subprocess.run(
            [python, "-m", "pytest", "-rs", "--disable-warnings", "-p", "no:cacheprovider", TESTS],
            cwd=root,
            capture_output=True,
            text=True,
            env={
                "PYTHONPATH": str(root),
                "PATH": f"{env}/bin:/usr/bin:/bin",
                "OMP_NUM_THREADS": "1",
            },
        )
    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    last = done.stdout.strip().splitlines()[-1].partition(" in ")[0]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", last)}
    return {
        "asked_for": asked_for,
        "installed": installed,
        "tests": TESTS,
        "counts": counts,
        "passed": done.returncode == 0 and not counts.get("skipped"),
    }
