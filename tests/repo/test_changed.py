"""A learner changes a constant, and the lesson goes on: it says what has become different, and every cell still runs.

Each lesson runs in a process of its own, as in Jupyter: the shell has a kernel, and nothing says that this is a test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deep import first

root = Path(__file__).parents[2]
CHANGES = [  # lesson, what it says, what the learner writes instead
    (
        "learn/07_advantages",
        "gae(rewards, values, ex.mask, ex.gamma, ex.lam)",
        "gae(rewards, values, ex.mask, ex.gamma, .95)",
    ),
    ("notation", "claim(ex.mask.sum() == 5,", "claim(ex.mask.sum() == 6,"),
    ("learn/16_trainer", 'lr_schedule="linear", seed=9)', 'lr_schedule="linear", seed=1)'),
    ("learn/06_kl", "near, far = along(.1), along(4.)", "near, far = along(.2), along(3.)"),
    (
        "learn/08_policy_loss",
        "clipped_objective(ratio, advantages, ex.clip)",
        "clipped_objective(ratio, advantages, .1)",
    ),
    ("guides/multi_turn", "int(words[2])}", "int(words[2]) + 1}"),
]


@pytest.mark.parametrize("lesson, old, new", first(1, CHANGES))
def test_a_changed_constant_stops_nobody(lesson, old, new):
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    done = subprocess.run(
        [sys.executable, __file__, str(root / f"nbs/{lesson}.ipynb"), old, new],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["errors"] and found["noticed"]


def by_hand(path: str, old: str, new: str) -> dict:
    "Run the changed lesson: whether it noticed a change, and the cells that stopped it."
    from execnb.shell import CaptureShell
    from fastcore.nbio import read_nb

    shell = CaptureShell(path)
    cells = [c for c in read_nb(path).cells if c.cell_type == "code"]
    printed = ""
    errors = []
    shell.kernel = "a person's"
    assert sum(old in c.source for c in cells), f"the lesson no longer says {old!r}"
    os.chdir(Path(path).parent)
    for c in cells:
        if "nbdev_export" in c.source:
            continue
        for o in shell.run(c.source.replace(old, new)):
            if o["output_type"] == "error":
                errors.append(f"cell {c.id}: {o['ename']}: {o['evalue'][:200]}")
            printed += "".join(o.get("text", ""))
    return {"noticed": "You changed something" in printed, "errors": errors}


if __name__ == "__main__":
    print("\n" + json.dumps(by_hand(*sys.argv[1:])), flush=True)
    os._exit(0)
