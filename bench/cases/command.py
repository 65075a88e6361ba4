"""What starting costs: the command's `--version` and `--help`, the import, and the whole quickstart. Each in a fresh process."""

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.form import Case, Job, Row, Side


def quietly(*command: str):
    subprocess.run(command, check=True, capture_output=True)


def command(flag: str) -> Job:
    return Job(
        lambda: quietly(
            sys.executable, "-c", "from instruct_goose.cli.main import main; main()", flag
        )
    )


def imports() -> Job:
    "A process that says how much CPU time `import instruct_goose` took after the two; parts of transformers that nobody asked for before count."
    code = "import time, torch, transformers; start = time.process_time(); import instruct_goose; print(time.process_time() - start)"

    def run():
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        return {"import": float(done.stdout.split()[-1])}

    return Job(run)


def nothing() -> Job:
    return Job(lambda: quietly(sys.executable, "-c", "pass"))


def quickstart() -> Job:
    def run():
        with tempfile.TemporaryDirectory() as folder:
            quietly(
                sys.executable,
                "-c",
                "from instruct_goose.cli.main import main; main()",
                "quickstart",
                "--output-dir",
                str(Path(folder) / "run"),
            )

    return Job(run)


def fresh(label: str, make: str, **settings) -> Side:
    return Side(label, f"bench.cases.command:{make}", settings, agrees=None)


CASES = [
    Case(
        "command",
        {
            "--version": fresh("instruct-goose --version", "command", flag="--version"),
            "--help": fresh("instruct-goose --help", "command", flag="--help"),
            "import": fresh("import instruct_goose", "imports"),
            "python": fresh("python -c pass", "nothing"),
        },
        [
            Row("instruct-goose --version", "--version", None, goal="≤ 1"),
            Row("instruct-goose --help", "--help", None, goal="≤ 1"),
            Row(
                "import instruct_goose beyond torch and transformers",
                "import",
                None,
                "import",
                goal="≤ 0.2",
                note="names are loaded when they are asked for, which then costs what they need",
            ),
            Row("an empty Python, for comparison", "python", None),
        ],
    ),
    Case(
        "quickstart",
        {"ours": fresh("instruct-goose quickstart", "quickstart")},
        [Row("instruct-goose quickstart", "ours", None, goal="≤ 30")],
        repeats=2,
        optional=True,
    ),
]
