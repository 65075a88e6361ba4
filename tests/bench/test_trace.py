"The trace on a package of two files, where it is known what runs; and on one iteration of the command."

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.trace_iteration import traced

LIMITS = {"files": 35, "functions": 300}  # of the iteration alone; to be lowered with the code
WHOLE = {
    "files": 44,
    "functions": 420,
}  # of the whole command; to be lowered to bench.trace_iteration.GOAL


def test_what_runs_is_counted_once_and_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "traced_here").mkdir()
    for name, text in {
        "__init__": "",
        "low": "class Low:\n    def half(self, x): return [x / n for n in (2,)][0]\ndef unused(): pass\n",
        "top": "from .low import Low\ndef start(xs): return sorted(xs, key=lambda x: Low().half(x))\n",
    }.items():
        (tmp_path / f"traced_here/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from traced_here.top import start

    found, _ = traced(lambda: start([3, 2, 1]), tmp_path / "traced_here")
    half, rest = traced(lambda: start([3, 2, 1]), tmp_path / "traced_here", "Low.half")
    assert found.functions == {"top.py": {"start"}, "low.py": {"Low.half"}}
    assert found.calls == {("top.py", "low.py"): 3}  # through sorted, which is no file of ours
    assert half.functions == {"low.py": {"Low.half"}} and rest.functions == {"top.py": {"start"}}
    assert sys.getprofile() is None


@pytest.mark.deep
def test_one_iteration_of_the_command_can_be_followed():
    done = subprocess.run(
        [sys.executable, "-m", "bench.trace_iteration", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(10 < counts[what] <= most for what, most in LIMITS.items()), counts
    assert all(10 < counts["whole command"][what] <= most for what, most in WHOLE.items()), counts
