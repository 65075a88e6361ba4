"""What holds for the runs of `runs.py`: functions that make a check of a fresh directory.

The oracle of a run that goes on is the log of one that was never stopped.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from runs_world import SAVED, command, log, run, said

Fault = Callable[[Path], str | None]  # of a directory: what is wrong, or None
PLACES = ("out", "a place/with a blank", "link")  # of outputs


def prepare_place(here: Path, place: str) -> None:
    "What a place of outputs needs."
    if place == "link":
        (here / "elsewhere").mkdir()
        os.symlink("elsewhere", here / "link")


def fails(here: Path, argv: list[str], wanted: int = 0) -> str | None:
    "Run a command; a sentence where it ends with another status than the wanted one."
    status = run(argv, here)
    if status == wanted:
        return None
    return f"{argv[0]} ends with {status} instead of {wanted}: {said(here)}"


whole_logs: dict[tuple[str, ...], list[dict]] = {}  # of runs that were never stopped


def differs(here: Path, out: str, name: str, flags: tuple[str, ...] = ()) -> str | None:
    "A sentence where a run has another log than one that was never stopped."
    known = (name, *flags)
    if known not in whole_logs:
        wrong = fails(here, command(name, "whole", *flags))
        if wrong:
            return f"the whole run: {wrong}"
        whole_logs[known] = log(here, "whole")
    return None if log(here, out) == whole_logs[known] else "another log"


def go_on(here: Path, argv: list[str], out: str) -> str | None:
    "Go on with a run that was stopped, or begin it again where nothing is left of it."
    more = ["--resume"] if (here / out).is_dir() and any((here / out).iterdir()) else []
    return fails(here, [*argv, *more])


def stopped(
    name: str, signals: tuple[int, ...], after: int, *flags: str, watched: str = ""
) -> Fault:
    "A run that signals have stopped goes on, and ends as one that was never stopped."

    def fault(here: Path) -> str | None:
        argv = command(name, "out", *flags)
        status = run(argv, here, signals, after, watched=watched)
        # before the run has begun, the signal ends the process
        allowed = [0, 128 + signals[0], *([-signals[0]] if after == 0 else [])]
        if status not in allowed:
            return f"status {status}: {said(here)}"
        wrong = None
        if not (here / "out/summary.json").exists():
            wrong = go_on(here, argv, "out")
        return wrong or differs(here, "out", name, flags)

    return fault


def changed(
    name: str, change: Callable[[Path, str], None] | None, flags: list[str], *more: str
) -> Fault:
    "A run that has become another one does not go on, and its log stays."

    def fault(here: Path) -> str | None:
        run(command(name, "out", *more), here, (signal.SIGTERM,), 2)
        (here / "out/summary.json").unlink(missing_ok=True)
        before = log(here, "out")
        if change is not None:
            change(here, name)
        status = run([*command(name, "out", *more), "--resume", *flags], here)
        if status in (0, None) or "Traceback" in said(here):
            return f"status {status}: {said(here)}"
        return None if log(here, "out") == before else "the log has changed"

    return fault


def with_reward(text: str, stops: bool, place: str = "out") -> Fault:
    "A reward leaves its run whole, also where it is stopped and goes on."

    def fault(here: Path) -> str | None:
        prepare_place(here, place)
        (here / "rewards.py").write_text(text)
        argv = command("train", place)
        if stops:
            run(argv, here, (signal.SIGINT,), 3)
        wrong = None
        if not (here / place / "summary.json").exists():
            wrong = go_on(here, argv, place)
        shutil.copyfile(here / "plain_rewards.py", here / "rewards.py")
        return wrong or differs(here, place, "train")

    return fault


def in_encoding(argv: list[str], encoding: str, wanted: int) -> Fault:
    "An output in this encoding ends no run, and no help."

    def fault(here: Path) -> str | None:
        status = run(argv, here, encoding=encoding)
        text = (here / "said").read_bytes().decode(encoding, "replace")
        if status != wanted or "Traceback" in text:
            return f"status {status}: {' '.join(text.split())[-300:]}"
        return None if text.strip() else "it says nothing"

    return fault


def refused(argv: list[str], words: str) -> Fault:
    "A command ends with 1 and a sentence that holds these words."

    def fault(here: Path) -> str | None:
        wrong = fails(here, argv, 1)
        if wrong or words in said(here):
            return wrong
        return f"other words: {said(here)}"

    return fault


def logs(name: str, metric: str, *flags: str) -> Fault:
    "A run logs this metric in every row."

    def fault(here: Path) -> str | None:
        wrong = fails(here, command(name, "out", *flags))
        rows = log(here, "out")
        if not wrong and not all(metric in row for row in rows):
            return f"no {metric} in {rows[0]}"
        return wrong

    return fault


def same_as(name: str, flags: list[str], others: list[str]) -> Fault:
    "Two ways to say the same have the same log, but for the model's name."

    def fault(here: Path) -> str | None:
        wrong = fails(here, command(name, "out", *flags, "--router-aux-loss-coef", "0"))
        return wrong or differs(here, "out", name, tuple(others))

    return fault


# ---------------------------------------------------------------- adapters


def other_base(name: str, family: str, flags: list[str]) -> Fault:
    "Adapters do not go on on another base."

    def change(here: Path, _: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(here / family)
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.1)
        model.save_pretrained(here / family)

    return changed(name, change, [], *flags)


def merged(name: str, flags: list[str]) -> Fault:
    "Merged adapters are the plain model that `load_model` makes of them."

    def fault(here: Path) -> str | None:
        import torch
        from transformers import AutoModelForCausalLM

        from instruct_goose.models.loading import load_model

        saved = f"out/{SAVED[name]}"
        wrong = fails(here, command(name, "out", *flags))
        wrong = wrong or fails(here, ["merge", saved, "plain"])
        if wrong:
            return wrong
        ids = torch.tensor([[1, 2, 3, 4]])
        was = Path.cwd()
        os.chdir(here)  # adapters name their base as the command did
        try:
            own = load_model(saved).eval()(ids).logits
            plain = AutoModelForCausalLM.from_pretrained("plain").eval()(ids).logits
        finally:
            os.chdir(was)
        gap = (own - plain).abs().max().item()
        return None if gap < 1e-5 else f"the logits differ by {gap}"

    return fault


def learnt_from(name: str, flags: list[str]) -> Fault:
    "The next stage goes on from adapters, with all weights."

    def fault(here: Path) -> str | None:
        wrong = fails(here, command(name, "out", *flags))
        saved = f"out/{SAVED[name]}"
        wrong = wrong or fails(here, command("dpo", "next", "--model", saved))
        return wrong or (None if len(log(here, "next")) else "it has no log")

    return fault


def sampled(name: str, flags: list[str]) -> Fault:
    "A run with adapters can be asked."

    def fault(here: Path) -> str | None:
        wrong = fails(here, command(name, "out", *flags))
        return wrong or fails(here, ["sample", "out", "w1 w2", "--n", "1", "--max-new-tokens", "4"])

    return fault
