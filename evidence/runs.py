"""Sixty awkward runs of the commands: `python evidence/runs.py` writes evidence/runs.json.

Five kinds: signals at a step of each stage, changes between start and resume, rewards with children, rewards and commands that change the working
directory, and outputs that are not UTF-8. Each command runs in a forked process, with a session of its own. The oracle of a run that goes on is the log of
one that was never stopped.
"""

import argparse
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
FILE = Path(__file__).parent / "runs.json"
STEPS = 6
COMMANDS = {
    "train": ["--reward", "rewards.py:score", "--batch-size", "4", "--max-new-tokens", "4"],
    "sft": ["--batch-size", "4"],
    "dpo": ["--batch-size", "4"],
    "kto": ["--batch-size", "4"],
    "reward-model": ["--batch-size", "4"],
}
POOL = """
import multiprocessing
def one(text): return float(len(text))
def score(texts):
    with multiprocessing.get_context("{}").Pool(1) as pool:
        return pool.map(one, texts)
"""
CHILDREN = {
    "a pool that is forked": POOL.format("fork"),
    "a pool that is spawned": POOL.format("spawn"),
    "a pool of a server": POOL.format("forkserver"),
    "a child that exits": "import os\ndef score(texts):\n    pid = os.fork()\n    if pid == 0: os._exit(3)\n    os.waitpid(pid, 0)\n    return [1.0 * len(t) for t in texts]\n",
    "a child that raises": "import os\ndef score(texts):\n    pid = os.fork()\n    if pid == 0: raise SystemExit(4)\n    os.waitpid(pid, 0)\n    return [1.0 * len(t) for t in texts]\n",
    "a child that is terminated": "import os, signal, time\ndef score(texts):\n    pid = os.fork()\n    if pid == 0: time.sleep(5); os._exit(0)\n    os.kill(pid, signal.SIGTERM)\n    os.waitpid(pid, 0)\n    return [1.0 * len(t) for t in texts]\n",
    "a child that is interrupted": "import os, signal, time\ndef score(texts):\n    pid = os.fork()\n    if pid == 0: time.sleep(5); os._exit(0)\n    os.kill(pid, signal.SIGINT)\n    os.waitpid(pid, 0)\n    return [1.0 * len(t) for t in texts]\n",
    "a command": "import subprocess\ndef score(texts):\n    subprocess.run(['true'], check=True)\n    return [1.0 * len(t) for t in texts]\n",
    "an event loop with a semaphore": "import asyncio\ngate = asyncio.Semaphore(1)\nasync def one(t):\n    async with gate:\n        await asyncio.sleep(0)\n        return 1.0 * len(t)\nasync def score(texts): return await asyncio.gather(*map(one, texts))\n",
    "a thread": "import threading\ndef score(texts):\n    t = threading.Thread(target=len, args=(texts,)); t.start(); t.join()\n    return [1.0 * len(t) for t in texts]\n",
}
ELSEWHERE = {
    "a reward that goes away": "import os, tempfile\ndef score(texts):\n    os.chdir(tempfile.gettempdir())\n    return [1.0 * len(t) for t in texts]\n",
    "a reward that goes into its output": "import os\ndef score(texts):\n    if os.path.isdir('out'): os.chdir('out')\n    return [1.0 * len(t) for t in texts]\n",
    "a file that goes away": "import os\nos.chdir('/')\ndef score(texts): return [1.0 * len(t) for t in texts]\n",
    "a reward in a removed directory": "import os, tempfile\ndef score(texts):\n    d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)\n    return [1.0 * len(t) for t in texts]\n",
}
ENCODINGS = ["ascii", "latin-1", "cp1252", "cp437", "utf-16", "shift_jis"]


class Case(NamedTuple):
    "A kind, a name, and what returns a fault of it, or None."

    kind: str
    name: str
    fault: Callable[[Path], str | None]


def make_world(here: Path) -> None:
    "A tiny model, rows for every command, and a reward."
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from instruct_goose.models.tokens import word_tokenizer

    words = word_tokenizer([f"w{i}" for i in range(9)], 24, pad="<end>", bos="<end>", eos="<end>")
    torch.manual_seed(0)
    shape = dict(n_embd=16, n_layer=1, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **shape)).save_pretrained(here / "model")
    words.save_pretrained(here / "model")
    rows = {
        "train": [{"prompt": f"w{i} w{i + 1}"} for i in range(8)],
        "sft": [{"prompt": f"w{i}", "completion": f"w{i + 1}"} for i in range(8)],
        "dpo": [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2 w3"} for i in range(8)],
        "kto": [{"prompt": f"w{i}", "completion": "w1", "label": i % 2 == 0} for i in range(8)],
    }
    rows["reward-model"] = rows["dpo"]
    for name, lines in rows.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (here / "rewards.py").write_text("def score(texts): return [1.0 * len(t) for t in texts]\n")


def command(name: str, out: str, *more: str) -> list[str]:
    "The words of a command that writes to `out`."
    argv = [name, "--model", "model", "--data", f"{name}.jsonl", "--output-dir", out]
    argv += ["--steps", str(STEPS), "--save-every", "2", "--lr", "0.01", "--threads", "1"]
    return [*argv, *COMMANDS[name], *more]


def call(argv: list[str], here: Path, encoding: str) -> None:
    "The command, as in a shell."
    os.setsid()
    os.chdir(here)
    said = io.TextIOWrapper((here / "said").open("ab"), encoding=encoding, write_through=True)
    sys.stdout = sys.stderr = said
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name)
        default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(number, default)
    sys.argv = ["instruct-goose", *argv]
    from instruct_goose.cli.main import main

    main(argv)


def lines(here: Path, out: str) -> list[dict]:
    "The log without its times; of a run that has none, nothing."
    path = here / out / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # being written
            break
        rows.append({k: x for k, x in row.items() if "second" not in k})
    return rows


def run(
    argv: list[str],
    here: Path,
    signals: tuple[int, ...] = (),
    after: int = 0,  # rows of the log, then the signals come
    encoding: str = "utf-8",
) -> int | None:  # the exit status; None: no end within two minutes
    "Run a command to its end."
    child = multiprocessing.get_context("fork").Process(target=call, args=(argv, here, encoding))
    child.start()
    out = argv[argv.index("--output-dir") + 1] if "--output-dir" in argv else ""
    end = time.monotonic() + 120
    while signals and child.is_alive() and time.monotonic() < end:
        if len(lines(here, out)) >= after:
            for number in signals:
                os.kill(child.pid or 0, number)
                time.sleep(0.01)
            break
        time.sleep(0.002)
    child.join(max(0.0, end - time.monotonic()))
    if child.is_alive():
        child.kill()
        return None
    return child.exitcode


def said(here: Path) -> str:
    "The end of what the commands have said."
    text = (
        (here / "said").read_bytes().decode("utf-8", "replace") if (here / "said").exists() else ""
    )
    return " ".join(text.split())[-300:]


def stopped(name: str, signals: tuple[int, ...], after: int) -> Callable[[Path], str | None]:
    "A run that signals have stopped goes on, and ends as one that was never stopped."

    def fault(here: Path) -> str | None:
        if run(command(name, "whole"), here) != 0:
            return f"the whole run fails: {said(here)}"
        status = run(command(name, "out"), here, signals, after)
        if status not in (0, 128 + signals[0]):
            return f"status {status}: {said(here)}"
        if status == 0 and (here / "out/summary.json").exists():
            return None if lines(here, "out") == lines(here, "whole") else "another log"
        more = ["--resume"] if (here / "out").is_dir() else []
        status = run(command(name, "out", *more), here)
        if status != 0:
            return f"it does not go on, status {status}: {said(here)}"
        return None if lines(here, "out") == lines(here, "whole") else "another log"

    return fault


def change_weights(here: Path) -> list[str]:
    "Another model of the same shape."
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(here / "model")
    with torch.no_grad():
        model.transformer.wte.weight.add_(0.1)
    model.save_pretrained(here / "model")
    return []


def change_ids(here: Path) -> list[str]:
    "A tokenizer that numbers two words the other way round."
    path = here / "model/tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"w3"', '"w_"').replace('"w4"', '"w3"').replace('"w_"', '"w4"'))
    return []


def change_rate(here: Path) -> list[str]:
    "Another learning rate."
    return ["--lr", "0.02"]


def changed(name: str, change: Callable[[Path], list[str]]) -> Callable[[Path], str | None]:
    "A run does not go on as another one."

    def fault(here: Path) -> str | None:
        run(command(name, "out"), here, (signal.SIGTERM,), 2)
        if (here / "out/summary.json").exists():
            (here / "out/summary.json").unlink()
        before = lines(here, "out")
        status = run([*command(name, "out", "--resume"), *change(here)], here)
        if status in (0, None):
            return f"status {status}: {said(here)}"
        return None if lines(here, "out") == before else "the log has changed"

    return fault


def with_reward(text: str, stops: bool) -> Callable[[Path], str | None]:
    "A reward leaves its run whole, also where it is stopped and goes on."

    def fault(here: Path) -> str | None:
        if run(command("train", "whole"), here) != 0:
            return f"the whole run fails: {said(here)}"
        (here / "rewards.py").write_text(text)
        if stops:
            run(command("train", "out"), here, (signal.SIGINT,), 3)
        more = ["--resume"] if (here / "out").is_dir() else []
        status = run(command("train", "out", *more), here)
        if status != 0:
            return f"status {status}: {said(here)}"
        return None if lines(here, "out") == lines(here, "whole") else "another log"

    return fault


def in_encoding(name: str, encoding: str) -> Callable[[Path], str | None]:
    "An output in this encoding ends no run, and no help."

    def fault(here: Path) -> str | None:
        argv = [name, "--help"] if name == "exercises" else command(name, "out")
        status = run(argv, here, encoding=encoding)
        return None if status == 0 else f"status {status}: {said(here)}"

    return fault


def cases() -> list[Case]:
    "All of them."
    made = []
    for name in COMMANDS:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            after = 1 + (number + len(name)) % (STEPS - 1)
            words = f"{name}, {signal.Signals(number).name} after step {after}"
            made.append(Case("signals", words, stopped(name, (number,), after)))
        twice = (signal.SIGINT, signal.SIGTERM, signal.SIGINT)
        made.append(Case("signals", f"{name}, three signals", stopped(name, twice, 2)))
        for change in (change_weights, change_ids, change_rate):
            words = f"{name}, {change.__name__.replace('change_', 'other ')}"
            made.append(Case("changes", words, changed(name, change)))
    for words, text in CHILDREN.items():
        made.append(Case("children", words, with_reward(text, stops=len(made) % 2 == 0)))
    for words, text in ELSEWHERE.items():
        for stops in (False, True):
            name = f"{words}{', stopped' if stops else ''}"
            made.append(Case("working directories", name, with_reward(text, stops)))
    for encoding in ENCODINGS:
        for name in ("train", "exercises"):
            made.append(Case("encodings", f"{name}, {encoding}", in_encoding(name, encoding)))
    return made


def tried(case: Case, world: Path) -> str | None:
    "The fault of a case in a world of its own."
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory) / "here"
        shutil.copytree(world, here)
        fault = case.fault(here)
        return fault.replace(directory, "…") if fault else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the cases whose kind or name holds this")
    args = parser.parse_args()
    import torch

    from instruct_goose.recipes import own_model  # noqa: F401  # before the forks

    torch.set_num_threads(1)
    chosen = [case for case in cases() if args.only in f"{case.kind}: {case.name}"]
    with tempfile.TemporaryDirectory() as directory:
        world = Path(directory) / "world"
        world.mkdir()
        make_world(world)
        faults = []
        for number, case in enumerate(chosen, 1):
            began = time.monotonic()
            fault = tried(case, world)
            print(
                f"{number:3d} {time.monotonic() - began:5.1f} s  {case.kind}: {case.name}  {fault or ''}",
                flush=True,
            )
            if fault:
                faults.append({"kind": case.kind, "name": case.name, "fault": fault})
    record = {
        "command": "python evidence/runs.py",
        "cases": dict(Counter(case.kind for case in chosen)),
        "faults": faults,
    }
    if not args.only:
        FILE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(chosen)} cases, {len(faults)} faults")


if __name__ == "__main__":
    main()
