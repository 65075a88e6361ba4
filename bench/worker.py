"""One side in a process of its own: `python -m bench.worker MODULE:FUNCTION SETTINGS`. It answers lines of JSON with lines of JSON,
and waits on its standard input in between, so that several of them can take turns."""

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.form import Job, Side
from bench.measure import peak, quiet, timed

ROOT = Path(__file__).parents[1]


class SideFailed(RuntimeError):
    "A side could not be set up, or raised."


class Worker:
    "The other end: starts the process and asks."

    def __init__(self, side: Side, python: Path | str = sys.executable, **more_env: str):
        self.side = side
        self.errors = tempfile.TemporaryFile("w+")
        env = quiet() | {"PYTHONPATH": str(ROOT)} | more_env
        self.process = subprocess.Popen(
            [str(python), "-m", "bench.worker", side.make, json.dumps(side.settings)],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        try:
            self.versions = self.read()["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, given: Any = None) -> dict:
        self.process.stdin.write(json.dumps({"do": do, "given": given}) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = [x for x in self.errors.read().splitlines() if x.strip()]
            raise SideFailed(
                f"{self.side.label}: {said[-1] if said else f'ended with status {self.process.returncode}'}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.side.label}: {answer['error']}")
        return answer

    def close(self):
        "Its standard input ends, and with it the process."
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()
        self.errors.close()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", *packages):
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            pass
    return found


def answer(job: Job, do: str, given: Any) -> dict:
    if do == "run":
        return timed(job.run)
    if do == "peak":
        return peak(job.run)
    return job.check(given) if job.check else {"numbers": None}


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(x):
        out.write(json.dumps(x) + "\n")
        out.flush()

    try:
        module, name = sys.argv[1].split(":")
        job = getattr(import_module(module), name)(**json.loads(sys.argv[2]))
        say({"versions": {"python": sys.version.split()[0], **versions(job.packages)}})
        for line in sys.stdin:
            say(answer(job, **json.loads(line)))
    except Exception as e:
        say({"error": f"{type(e).__name__}: {e}"[:500]})
        raise
    finally:
        out.flush()
    os._exit(0)  # a peer that sits in the middle of its training loop is not waited for


if __name__ == "__main__":
    main()
