"""The lowest versions that pyproject.toml names, installed in an environment of their own, and a short selection of tests with them.

    python evidence/run.py lowest        a few minutes; downloads

torch, the large one, and what only the tests need come from the environment that runs this: torch is tested in its own version, which is
recorded, and not in the lowest that is named. Everything else that is named with a lowest version is installed in just that one.
"""
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

root = Path(__file__).parents[1]
KEPT = {"torch": "the registry that this was recorded with has no other version than the installed one"}  # not lowered, and why
TESTS = ("tests/objective/test_group.py", "tests/objective/test_kl.py", "tests/training/test_rollout.py", "tests/variants/test_moving_reference.py",
         "tests/runs/test_run_directory.py", "tests/models/test_tokens.py", "tests/models/test_decoding.py", "tests/cli/test_main.py")


def lowest(requirement: Requirement) -> str | None:
    "The version after >= or ==; None where none is named."
    found = [s.version for s in requirement.specifier if s.operator in (">=", "==")]
    return found[0] if found else None


def named() -> dict[str, str]:
    "Each dependency of the package with the lowest version that is named."
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return {r.name: low for r in map(Requirement, project["dependencies"]) if (low := lowest(r))}


def tested_with(packages: list[str], names: Iterable[str], tests: Iterable[str], *options: str) -> tuple[dict[str, str], subprocess.CompletedProcess]:
    "These packages in an environment of their own, all else from this one: the versions of `names` there, and pytest on `tests`."
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        venv.create(env, with_pip=False)
        python, site = env / "bin/python", next((env / "lib").glob("python*/site-packages"))
        print("installing", *packages, flush=True)
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", *packages], check=True)
        (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")  # comes after what was installed
        code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {sorted(names)!r}}}))"
        installed = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
        print(installed, flush=True)
        done = subprocess.run([python, "-m", "pytest", *options, "--disable-warnings", "-p", "no:cacheprovider", *tests], cwd=root, capture_output=True,
                              text=True, env={"PYTHONPATH": str(root), "PATH": f"{env}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return installed, done


def run_lowest() -> dict:
    "What was installed, and what the tests said."
    installed, done = tested_with([f"{name}=={low}" for name, low in named().items() if name not in KEPT], named(), TESTS)
    counts = [line.strip("= ") for line in done.stdout.splitlines() if re.search(r"\d (passed|failed)|\d errors?\b", line)]
    return {"named": named(), "installed": installed, "not_lowered": {name: {"tested": version(name).split("+")[0], "why": why} for name, why in KEPT.items()},
            "tests": list(TESTS), "passed": done.returncode == 0, "pytest": counts[-1] if counts else ""}
