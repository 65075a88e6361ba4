"""Logs from public issues and repositories, which nobody here has written, shown to the doctor.

    python evidence/doctor_public.py FOLDER     FOLDER/NAME holds the log, copied by hand

The logs are not kept. The record has the address of each, what was found, and whether that is true
by what the thread, or the rest of the repository, says.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import run

from instruct_goose.doctor.examination import examine

HERE = Path(__file__).parent
TRL, OPEN_R1, SWIFT, VERL = (
    f"https://github.com/{name}"
    for name in (
        "huggingface/trl",
        "huggingface/open-r1",
        "modelscope/ms-swift",
        "verl-project/verl",
    )
)
LESSONS = "https://github.com/johnson7788/RLDecisionAgent/blob/main"


class PublicLog(NamedTuple):
    "Where a log stands, and what is known of its run from elsewhere."

    source: str
    title: str
    true: str  # is what the doctor says true? "yes", "no", "says too little", "not known"
    why: str  # by what


LOGS = {
    "trl_3452.log": PublicLog(
        f"{TRL}/issues/3452",
        "TRL #3452, loss 0",
        "yes",
        "the note explains the loss of 0: grad_norm is 0.1 and the rewards move",
    ),
    "trl_3857.log": PublicLog(
        f"{TRL}/issues/3857",
        "TRL #3857, loss 0 with a spread of rewards",
        "yes",
        "all groups are flat (frac_reward_zero_std 1), the spread is between groups",
    ),
    "open_r1_239.log": PublicLog(
        f"{OPEN_R1}/issues/239",
        "open-r1 #239, the loss begins at 0",
        "yes",
        "grad_norm is not 0, and the author sees the rewards rise",
    ),
    "swift_5571.log": PublicLog(
        f"{SWIFT}/issues/5571",
        "ms-swift #5571, grad_norm 0",
        "yes",
        "the note says that rewards differ and nothing is learnt; one row is too few for a finding",
    ),
    "swift_5890.log": PublicLog(
        f"{SWIFT}/issues/5890",
        "ms-swift #5890, grad_norm 0, rewards normal",
        "yes",
        "*no policy gradient* is what the author reports; the cause is not in the log",
    ),
    "swift_4465.log": PublicLog(
        f"{SWIFT}/issues/4465",
        "ms-swift #4465, KL is NaN at times",
        "yes",
        "the KL of that row is NaN",
    ),
    "swift_4800.log": PublicLog(
        f"{SWIFT}/issues/4800",
        "ms-swift #4800, the run goes wrong",
        "says too little",
        "the author's loss rises and ends at 0; two rows show a KL of 3 nats, and no rule speaks",
    ),
    "trl_1236.log": PublicLog(
        f"{TRL}/issues/1236",
        "TRL #1236, DPO loss near 0",
        "says too little",
        "margins of 5 to 11 at once suggest a rate that is too high; no rule looks at that",
    ),
    "ppo_hongbo.log": PublicLog(
        "https://github.com/hongbo-miao/hongbomiao.com/pull/37684",
        "a PPO run of TRL in a pull request",
        "yes",
        "nothing is found, and the run was merged as one that works",
    ),
    "verl_7412.log": PublicLog(
        f"{VERL}/issues/7412",
        "verl #7412, many responses at the limit",
        "says too little",
        "the pasted row ends before the share at the limit, of which the author asks",
    ),
    "unsloth_grpo.log": PublicLog(
        f"{LESSONS}/docs/Unsloth/train_grpo.log",
        "GRPO with Unsloth, a console of 47 steps",
        "yes",
        "grad_norm is NaN in 20 rows of the log, and the reward does not rise",
    ),
    "unsloth_sft.log": PublicLog(
        f"{LESSONS}/docs/Unsloth/train_sft.log",
        "SFT with Unsloth, a console of 109 steps",
        "yes",
        "nothing is found; the loss falls, and the repository goes on to use the model",
    ),
    "verl_char_count.md": PublicLog(
        f"{LESSONS}/backend/char_count/README.md",
        "verl's GRPO on counting letters, one step",
        "yes",
        "nothing is found; the README reports that validation rises from 0.12 to 0.36",
    ),
    "tau_state.json": PublicLog(
        "https://github.com/Ray-Cheng-11/Tau-Bench-Model-Training/blob/main/trainer_state.json",
        "trainer_state.json of a GRPO run, one row",
        "says too little",
        "91 % of the responses end at the limit of 256 tokens; one row is too few for *never ends*",
    ),
}


def row_of(path: Path, log: PublicLog) -> dict:
    "What the doctor reads and finds in a log."
    examined = examine(path)
    return {
        "title": log.title,
        "source": log.source,
        "library": f"{examined.program} {examined.version}".strip(),
        "steps": len(examined.metrics),
        "found": [finding.name for finding in examined.findings],
        "notes": examined.notes,
        "true": log.true,
        "why": log.why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the copied logs lie")
    folder = parser.parse_args().folder
    rows = [row_of(folder / name, log) for name, log in LOGS.items()]
    origin = run.origin("python evidence/doctor_public.py FOLDER")
    text = json.dumps({"origin": origin, "logs": rows}, indent=1, ensure_ascii=False)
    (HERE / "doctor_public.json").write_text(text + "\n", "utf-8")
    for row in rows:
        print(row["title"], row["found"], row["true"])


if __name__ == "__main__":
    main()
