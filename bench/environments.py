"""Where the peers live: an environment each, on top of the one that runs this. torch and transformers are lent, so both sides have
the same; only the peer and what it lacks are installed."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = {  # name -> what pip is given
    "trl112": ["trl==1.12.0"],  # the last with PPOTrainer
    "trl116": ["trl==1.16.0"],
    "liger": [
        "--no-deps",
        "liger-kernel==0.8.5",
    ],  # its triton is not there on a CPU; the chunked losses do without
}


class Missing(RuntimeError):
    "A peer that cannot be had; the message says why."


def python_of(name: str | None) -> Path:
    "The Python of an environment, made and filled the first time. Raises Missing if pip cannot."
    if name is None:
        return Path(sys.executable)
    folder = ROOT / f".venv-bench-{name}"
    python, stamp = folder / "bin/python", folder / ".installed"
    wanted = f"{' '.join(ENVIRONMENTS[name])} on {sys.prefix}"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    print(f"· making .venv-bench-{name}: {' '.join(ENVIRONMENTS[name])}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(ROOT / "constraints.txt"),
            *ENVIRONMENTS[name],
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        errors = (
            [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            or done.stderr.splitlines()
            or ["no reason given"]
        )
        raise Missing(
            f"pip install {' '.join(ENVIRONMENTS[name])}: {errors[-1].removeprefix('ERROR: ')}"
        )
    stamp.write_text(wanted)
    return python
