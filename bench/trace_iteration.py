"""One iteration of `instruct-goose train`, from its prompts to the optimizer and the checkpoint on the disk: which files and functions of the package it passes through.

    python -m bench.trace_iteration             how many files, functions and calls from one file to another
    python -m bench.trace_iteration --functions and the functions of each file

The iteration is what runs within `RLHFTrainer.train`. What the command does before (read flags, data and model, try the reward) and after (save the policy, the summary,
the model card) is counted apart, below the table.
Every module is imported first, so that only what runs is counted; a function without a name (a comprehension, a lambda) counts to its file alone.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

GOAL = {"files": 35, "functions": 300}  # of the whole command, from the shell to the disk


class Trace(NamedTuple):
    functions: dict[str, set[str]]  # file -> the functions that ran
    calls: Counter[tuple[str, str]]  # (from, to) -> how many times

    @property
    def counts(self) -> dict[str, int]:
        return {
            "files": len(self.functions),
            "functions": sum(map(len, self.functions.values())),
            "calls from file to file": len(self.calls),
        }


def traced(work, package: Path, within: str = "") -> tuple[Trace, Trace]:
    """What runs of a package while work() does: in the function of that name, or everywhere if there is none; and outside it. A call through a library, a decorator
    or torch's modules comes from the file that began it."""
    parts, inside, open_calls = (
        [(defaultdict(set), Counter()) for _ in range(2)],
        f"{package}{os.sep}",
        0 if within else 1,
    )

    def name(frame):
        return frame.f_code.co_filename.removeprefix(inside)

    def seen(frame, event, _):
        nonlocal open_calls
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(inside):
            return
        if frame.f_code.co_qualname == within:
            open_calls += 1 if event == "call" else -1
        if event == "return":
            return
        functions, calls = parts[0 if open_calls else 1]
        here = functions[name(frame)]
        if not frame.f_code.co_name.startswith("<"):
            here.add(frame.f_code.co_qualname)
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(inside):
            caller = caller.f_back
        if caller and caller.f_code.co_filename != frame.f_code.co_filename:
            calls[name(caller), name(frame)] += 1

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Trace(dict(parts[0][0]), parts[0][1]), Trace(dict(parts[1][0]), parts[1][1])


def prepared(folder: Path) -> list[str]:
    "The command's words for a model, prompts and a reward of a few bytes."
    from transformers import GPT2Config, GPT2LMHeadModel

    from instruct_goose.models.tokens import word_tokenizer

    tokenizer = word_tokenizer(
        "the film plot is good bad".split(),
        model_max_length=16,
        pad="<end>",
        bos="<end>",
        eos="<end>",
    )
    ends = dict(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=1, **ends)
    ).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"the {x} is"}) + "\n" for x in ["film", "plot"] * 4), "utf-8"
    )
    (folder / "rewards.py").write_text(
        "def good(texts): return [t.count('good') for t in texts]\n", "utf-8"
    )
    return [
        "train",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "prompts.jsonl"),
        "--reward",
        f"{folder / 'rewards.py'}:good",
        "--output-dir",
        str(folder / "run"),
        "--steps",
        "1",
        "--batch-size",
        "4",
        "--minibatches",
        "1",
        "--epochs",
        "1",
        "--max-new-tokens",
        "4",
        "--save-every",
        "1",
    ]


def one_iteration() -> tuple[Trace, Trace]:
    "The iteration; and what the command does before and after it."
    import instruct_goose
    from instruct_goose.cli.main import main

    package = Path(instruct_goose.__file__).parent
    for module in pkgutil.walk_packages([str(package)], "instruct_goose."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    with tempfile.TemporaryDirectory() as folder:
        words = prepared(Path(folder))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return traced(lambda: main(words), package, "RLHFTrainer.train")


def table(trace: Trace, functions: bool = False) -> str:
    "Each file with its functions, and how many other files call it and are called by it; the totals below."
    rows = [f"{'file':36}{'functions':>10}{'called by':>11}{'calls':>7}"]
    for file, names in sorted(trace.functions.items(), key=lambda x: -len(x[1])):
        rows.append(
            f"{file:36}{len(names):10}{sum(b == file for _, b in trace.calls):11}{sum(a == file for a, _ in trace.calls):7}"
        )
        if functions:
            rows += [f"    {x}" for x in sorted(names)]
    return "\n".join([*rows, "", *(f"{n:5} {what}" for what, n in trace.counts.items())])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--json", action="store_true", help="the totals, for a program")
    args = parser.parse_args()
    found, around = one_iteration()
    ran = {
        (file, x)
        for trace in (found, around)
        for file, names in trace.functions.items()
        for x in names
    }
    whole = {"files": len({file for file, _ in ran}), "functions": len(ran)}
    print(
        json.dumps(found.counts | {"whole command": whole})
        if args.json
        else table(found, args.functions)
    )
    if not args.json:
        print(
            "the whole command: "
            + ", ".join(f"{n} {what} (goal: at most {GOAL[what]})" for what, n in whole.items())
        )
