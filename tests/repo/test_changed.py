"""A learner changes a constant, and the lesson goes on: it says what has become different, and every cell still runs.

Each lesson runs in a process of its own, as in Jupyter: the shell has a kernel, and nothing says that this is a test. They are forks
of one process, which loads torch and transformers once.
"""
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

root = Path(__file__).parents[2]
CHANGES = [  # lesson, what it says, what the learner writes instead; where `make test` stops reading, if what follows has other dice and half the time
    ("learn/07_advantages", "gae(rewards, values, ex.mask, ex.gamma, ex.lam)", "gae(rewards, values, ex.mask, ex.gamma, .95)", None),
    ("notation", "assert gently(own) is own and", "assert gently(own) is None and", None),  # a bare assert, in a hidden cell
    ("learn/16_trainer", 'lr_schedule="linear", seed=9)', 'lr_schedule="linear", seed=1)', "## Nine algorithms, one trainer"),
    ("learn/06_kl", "near, far = along(.1), along(4.)", "near, far = along(.2), along(3.)", None),
    ("learn/08_policy_loss", "clipped_objective(ratio, advantages, ex.clip)", "clipped_objective(ratio, advantages, .1)", None),
    ("notation", ".6, 1.1])", ".6, 1.2])", None),
    ("guides/multi_turn", "int(words[2])}", "int(words[2]) + 1}", None),
]
ALWAYS = 1  # the others in `make deep`


def by_hand(path: str, old: str, new: str, until: str | None) -> dict:
    "Run the changed lesson: what was printed of changes, and the cells that stopped it."
    from execnb.shell import CaptureShell
    from fastcore.nbio import read_nb

    shell, nb = CaptureShell(path), read_nb(path)
    shell.kernel = "a person's"
    assert sum(old in c.source for c in nb.cells if c.cell_type == "code"), f"the lesson no longer says {old!r}"
    ends = [i for i, c in enumerate(nb.cells) if until and c.source.startswith(until)]
    assert bool(ends) == bool(until), f"the lesson has no heading {until!r}"
    os.chdir(Path(path).parent)
    said, errors = [], []
    for c in nb.cells[:ends[0] if ends else None]:
        if c.cell_type != "code" or "nbdev_export" in c.source: continue
        for o in shell.run(c.source.replace(old, new)):
            if o["output_type"] == "error": errors.append(f"cell {c.id}: {o['ename']}: {o['evalue'][:200]}")
            said += [line for line in "".join(o.get("text", "")).splitlines() if "You changed something" in line]
    return {"said": said, "errors": errors}


def test_a_changed_constant_stops_nobody(request):
    "One test for all: two workers would start all of them twice."
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__, *["--deep"] * request.config.getoption("--deep")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for change, found in zip(CHANGES, json.loads(done.stdout.splitlines()[-1])):
        assert "died" not in found, (change, found["died"])
        assert not found["errors"], change
        assert found["said"], f"nobody noticed {change}"


def in_a_process(change: tuple) -> dict:
    def run():
        try: there.send(by_hand(str(root / f"nbs/{change[0]}.ipynb"), *change[1:]))
        except Exception as e: there.send({"died": repr(e)})

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=run)
    process.start()
    there.close()
    try: result = here.recv()
    except EOFError: result = {"died": "its process died"}
    process.join()
    return result


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    todo = [(*change[:3], None) for change in CHANGES] if "--deep" in sys.argv else CHANGES[:ALWAYS]
    print("\n" + json.dumps([in_a_process(change) for change in todo]), flush=True)
    os._exit(0)
