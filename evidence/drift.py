"""What the front page lets a reader drag: the quickstart's policy on its way, at several prices of KL.

From one SFT model and one reward model (seed 0), PPO at each β. Every few iterations the policy
answers the same prompts with the same dice, and is judged on 256 held-out prompts: `record_drift`,
which draws a reader's own runs in Jupyter too.
"""
from pathlib import Path

from quickstart import in_lines

from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.worlds.drift import record_drift

BETAS = (0., .06, .18, .6)


def record(path: Path, origin: dict) -> None:
    "One file: prompts, and frames by β."
    found = record_drift(BETAS, QuickstartConfig(progress=False))
    path.write_text(in_lines({"origin": origin} | found), "utf-8")
    for run in found["runs"]: print(f"β = {run['beta']}: {run['frames'][-1]}", flush=True)
