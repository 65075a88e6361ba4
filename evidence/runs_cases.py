"""The cases of `runs.py`: sixty and more of each of seven kinds.

A case has a kind, a name, and a function of a fresh directory that returns what is wrong, or None.
"""

import json
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import runs_oracles as oracles
from runs_world import COMMANDS, STEPS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ADAPTERS = ["--lora-rank", "2"]
SCORES = "    return [1.0 * len(text) for text in texts]\n"
ONE = "def one(text): return 1.0 * len(text)\n"


class Case(NamedTuple):
    "A kind, a name, and what returns a fault of it, or None."

    kind: str
    name: str
    fault: Callable[[Path], str | None]


def signals() -> Iterator[Case]:
    "Signals at the beginning, the middle and the end of each stage of each command."
    for name, number, after in product(COMMANDS, SIGNALS, (0, 1, 3, 5)):
        words = f"{name}, {number.name} after step {after}"
        yield Case("signals", words, oracles.stopped(name, (number,), after))
    for name in COMMANDS:
        thrice = (signal.SIGINT, signal.SIGTERM, signal.SIGINT)
        yield Case("signals", f"{name}, three signals", oracles.stopped(name, thrice, 2))
        figures = oracles.stopped(name, (signal.SIGTERM,), STEPS)
        yield Case("signals", f"{name}, SIGTERM in the figures", figures)
    first = ["--sft", "sft.jsonl", "--sft-steps", "6", "--sft-lr", "0.01"]
    for number in SIGNALS:
        fault = oracles.stopped("train", (number,), 0, *first, watched="checkpoints")
        yield Case("signals", f"train after SFT, {number.name} in SFT", fault)
        fault = oracles.stopped("train", (number,), 2, *first)
        yield Case("signals", f"train after SFT, {number.name} in RL", fault)


# ---------------------------------------------------------------- changes

CHANGED_FLAGS = {
    "learning rate": ["--lr", "0.02"],
    "seed": ["--seed", "7"],
    "batch size": ["--batch-size", "2"],
    "fewer steps": ["--steps", "1"],
}


def edit_json(file: Path, **values: object) -> None:
    "Set some names of a JSON file."
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | values))


def other_weights(here: Path, name: str) -> None:
    "Another model of the same shape."
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(here / "model")
    with torch.no_grad():
        model.transformer.wte.weight.add_(0.1)
    model.save_pretrained(here / "model")


def other_ids(here: Path, name: str) -> None:
    "A tokenizer that numbers two words the other way round."
    path = here / "model/tokenizer.json"
    text = path.read_text().replace('"w3"', '"w_"').replace('"w4"', '"w3"')
    path.write_text(text.replace('"w_"', '"w4"'))


def other_rows(here: Path, name: str) -> None:
    "The rows in another order."
    path = here / f"{name}.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def one_row_less(here: Path, name: str) -> None:
    "One row is missing."
    path = here / f"{name}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def one_other_word(here: Path, name: str) -> None:
    "One word of one row."
    path = here / f"{name}.jsonl"
    path.write_text(path.read_text().replace("w5", "w6", 1))


CHANGED_FILES = {
    "weights": other_weights,
    "ids": other_ids,
    "order of rows": other_rows,
    "one row less": one_row_less,
    "another word": one_other_word,
    "dropout": lambda here, name: edit_json(here / "model/config.json", resid_pdrop=0.5),
    "norm": lambda here, name: edit_json(here / "model/config.json", layer_norm_epsilon=0.1),
    "ends": lambda here, name: edit_json(
        here / "model/generation_config.json", eos_token_id=[0, 3]
    ),
}


def changes() -> Iterator[Case]:
    "What a run depends on, changed between its start and its resume: it does not go on."
    for name in COMMANDS:
        for words, flags in CHANGED_FLAGS.items():
            yield Case("changes", f"{name}, {words}", oracles.changed(name, None, flags))
        for words, change in CHANGED_FILES.items():
            yield Case("changes", f"{name}, {words}", oracles.changed(name, change, []))


# ---------------------------------------------------------------- children

START_METHODS = ("fork", "spawn", "forkserver")
POOL = """
import multiprocessing
{one}
def score(texts):
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        return pool.map(one, texts)
"""
EXECUTOR = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
{one}
def score(texts):
    context = multiprocessing.get_context("{method}")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return list(pool.map(one, texts))
"""
KEPT_POOL = """
import multiprocessing
{one}
pool = None
def score(texts):
    global pool
    pool = pool or multiprocessing.get_context("{method}").Pool(1)
    return pool.map(one, texts)
"""
FORKED = """
import os, signal, sys, time
def score(texts):
    child = os.fork()
    if child == 0:
        {child}
        os._exit(0)
    {parent}
    os.waitpid(child, 0)
"""
LEFT_ALONE = FORKED.replace("    os.waitpid(child, 0)\n", "")
NAP = "time.sleep(5)"


def killed_by(name: str) -> tuple[str, str]:
    "What a child and its parent do where it gets a signal at once."
    return NAP, f"os.kill(child, signal.{name})"


CHILD_AND_PARENT = {
    "exits": ("os._exit(3)", "pass"),
    "leaves by sys.exit": ("sys.exit(4)", "pass"),
    "raises": ("raise ValueError('child')", "pass"),
    "is interrupted": killed_by("SIGINT"),
    "is terminated": killed_by("SIGTERM"),
    "is hung up": killed_by("SIGHUP"),
    "is killed": killed_by("SIGKILL"),
    "signals itself": ("os.kill(os.getpid(), signal.SIGTERM)", "pass"),
    "has a session of its own": ("os.setsid(); os.kill(0, signal.SIGTERM)", "pass"),
    "writes to standard error": ("print('child', file=sys.stderr)", "pass"),
    "forks": ("os.fork(); os.kill(os.getpid(), signal.SIGTERM)", "pass"),
}
OTHERS = {
    "a command": "import subprocess\ndef score(texts):\n    subprocess.run(['true'], check=True)\n",
    "a command that fails": "import subprocess\ndef score(texts):\n    subprocess.run(['false'])\n",
    "a command that is killed": (
        "import subprocess\ndef score(texts):\n"
        "    child = subprocess.Popen(['sleep', '5'])\n    child.terminate()\n    child.wait()\n"
    ),
    "a command with a function before it": (
        "import os, subprocess\ndef score(texts):\n"
        "    subprocess.run(['true'], preexec_fn=os.getpid, check=True)\n"
    ),
    "a thread": (
        "import threading\ndef score(texts):\n"
        "    worker = threading.Thread(target=len, args=(texts,))\n"
        "    worker.start()\n    worker.join()\n"
    ),
    "a thread that forks": (
        "import os, threading\ndef work():\n    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n    os.waitpid(child, 0)\n"
        "def score(texts):\n    worker = threading.Thread(target=work)\n"
        "    worker.start()\n    worker.join()\n"
    ),
    "a command of an event loop": (
        "import asyncio\nasync def score(texts):\n"
        "    child = await asyncio.create_subprocess_exec('true')\n    await child.wait()\n"
    ),
    "a semaphore of an event loop": (
        "import asyncio\ngate = asyncio.Semaphore(1)\n"
        "async def score(texts):\n    async with gate:\n        await asyncio.sleep(0)\n"
    ),
}


def children() -> Iterator[Case]:
    "Rewards with children: the run is whole, also where it is stopped and goes on."
    texts = {}
    for method in START_METHODS:
        texts[f"a pool ({method})"] = POOL.format(one=ONE, method=method)
        texts[f"a kept pool ({method})"] = KEPT_POOL.format(one=ONE, method=method)
        texts[f"an executor ({method})"] = EXECUTOR.format(one=ONE, method=method)
    for name, (child, parent) in CHILD_AND_PARENT.items():
        texts[f"a child that {name}"] = FORKED.format(child=child, parent=parent) + SCORES
    for name in ("SIGTERM", "SIGINT"):
        lines = LEFT_ALONE.format(child=NAP, parent=f"os.kill(child, signal.{name})")
        texts[f"a child that nobody waits for ({name})"] = lines + SCORES
    for name, lines in OTHERS.items():
        texts[name] = lines + SCORES
    for (name, text), stops in product(texts.items(), (False, True)):
        words = f"{name}, the run is stopped" if stops else name
        yield Case("children", words, oracles.with_reward(text, stops))


# ---------------------------------------------------------------- working directories

GOING = {
    "away": "os.chdir(tempfile.gettempdir())",
    "to the root": "os.chdir('/')",
    "up": "os.chdir('..')",
    "into the output": "os.chdir(OUT) if os.path.isdir(OUT) else None",
    "into the checkpoints": "os.chdir(OUT + '/checkpoints') if os.path.isdir(OUT + '/checkpoints') else None",
    "into a directory that is removed": (
        "gone = tempfile.mkdtemp(); os.chdir(gone); os.rmdir(gone)"
    ),
    "away and back": "was = os.getcwd(); os.chdir('/'); os.chdir(was)",
    "away in a thread": ("t = threading.Thread(target=os.chdir, args=('/',)); t.start(); t.join()"),
    "into a link": (
        "place = tempfile.mkdtemp(); os.symlink('/', place + '/l'); os.chdir(place + '/l')"
    ),
    "back and forth": "os.chdir('/' if len(texts) % 2 else tempfile.gettempdir())",
}
MODULES = "import os, tempfile, threading\n"


def working_directories() -> Iterator[Case]:
    "Rewards and plug-ins that change the working directory: everything stands where it should."
    for (name, line), place, stops in product(GOING.items(), oracles.PLACES, (False, True)):
        known = f"OUT = os.path.abspath({place!r})\n"
        text = f"{MODULES}{known}def score(texts):\n    {line}\n{SCORES}"
        words = f"a reward goes {name}, output in {place!r}"
        fault = oracles.with_reward(text, stops, place)
        yield Case("working directories", words + (", stopped" if stops else ""), fault)


# ---------------------------------------------------------------- encodings

ENCODINGS = ("ascii", "latin-1", "cp1252", "cp437", "utf-16", "shift_jis")
WORDS = {
    "a help": (["train", "--help"], 0),
    "exercises": (["exercises"], 0),
    "a sample": (["sample", "model", "w1 w2", "--n", "1", "--max-new-tokens", "4"], 0),
    "a flag that is none": (["train", "--no-such-flag-é"], 2),
    "a file that is none": (["doctor", "nothing-é"], 1),
}


def encodings() -> Iterator[Case]:
    "An output in another encoding ends no run and no help."
    for encoding in ENCODINGS:
        for name in COMMANDS:
            fault = oracles.in_encoding(oracles.command(name, "out"), encoding, 0)
            yield Case("encodings", f"{name}, {encoding}", fault)
        for words, (argv, status) in WORDS.items():
            fault = oracles.in_encoding(argv, encoding, status)
            yield Case("encodings", f"{words}, {encoding}", fault)


# ---------------------------------------------------------------- mixtures, adapters

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
BALANCED = ["--router-aux-loss-coef", "0.1"]
LEARNERS = tuple(name for name in COMMANDS if name != "reward-model")


def mixtures() -> Iterator[Case]:
    "Models with experts: they learn, are stopped, and go on."
    for family, name in product(MIXTURES, COMMANDS):
        model = ["--model", family]
        if (family, name) == ("olmoe", "reward-model"):  # transformers has no classifier of it
            for flags in ([], BALANCED, ["--dry-run"]):
                argv = oracles.command(name, "out", *model, *flags)
                fault = oracles.refused(argv, "none for OlmoeForCausalLM")
                yield Case("mixtures", " ".join([name, *model, *flags]), fault)
            continue
        stops = oracles.stopped(name, (signal.SIGTERM,), 3, *model)
        yield Case("mixtures", f"{name}, {family}", stops)
        logged = oracles.logs(name, "router_aux_loss", *model, *BALANCED)
        yield Case("mixtures", f"{name}, {family}, balanced", logged)
        with_logits = ["--model", f"{family}-router-logits"]
        plain = oracles.same_as(name, with_logits, [*model, "--router-aux-loss-coef", "0"])
        yield Case("mixtures", f"{name}, {family}, with the routers' logits", plain)


def adapters() -> Iterator[Case]:
    "Adapters: they learn, are stopped, go on, are read, merged, and learnt from."
    families = ("model", "llama", "mixtral")
    for family, name in product(families, LEARNERS):
        flags = ["--model", family, *ADAPTERS]
        words = f"{name}, {family}"
        stops = oracles.stopped(name, (signal.SIGINT,), 3, *flags)
        yield Case("adapters", f"{words}, stopped", stops)
        base = oracles.other_base(name, family, flags)
        yield Case("adapters", f"{words}, another base", base)
        yield Case("adapters", f"{words}, merged", oracles.merged(name, flags))
        yield Case("adapters", f"{words}, learnt from", oracles.learnt_from(name, flags))
        yield Case("adapters", f"{words}, read", oracles.sampled(name, flags))
    for family in MIXTURES:
        flags = ["--model", family, *ADAPTERS, "--lora-experts"]
        for name in LEARNERS:
            stops = oracles.stopped(name, (signal.SIGTERM,), 3, *flags)
            yield Case("adapters", f"{name}, {family}, on experts", stops)


def cases() -> list[Case]:
    "All of them."
    kinds = (signals, changes, children, working_directories, encodings, mixtures, adapters)
    return [case for kind in kinds for case in kind()]
