"Outside a checkout the lesson of the names ends with a message that says where it runs, and not with a traceback."
import json
import os
import subprocess
import sys
from pathlib import Path

root = Path(__file__).parents[2]


def test_the_lesson_says_what_it_needs(tmp_path):
    cells = json.loads((root / "nbs/guides/same_name.ipynb").read_text("utf-8"))["cells"]
    first = next("".join(c["source"]) for c in cells if c["cell_type"] == "code" and "google.colab" not in "".join(c["source"]))
    def go(where): return subprocess.run([sys.executable, "-c", first], cwd=where, capture_output=True, text=True, env=os.environ)
    outside, inside = go(tmp_path), go(root / "nbs/guides")
    assert outside.returncode == 1 and "inside a checkout" in outside.stderr and "Traceback" not in outside.stderr
    assert inside.returncode == 0, inside.stderr
