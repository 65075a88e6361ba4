"""The world of `runs.py`: small models, rows for every command, and a command in a process."""

import io
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "models")]  # their small models
STEPS = 6
COMMANDS = {
    "train": ["--reward", "rewards.py:score", "--batch-size", "4", "--max-new-tokens", "4"],
    "sft": ["--batch-size", "4"],
    "dpo": ["--batch-size", "4"],
    "kto": ["--batch-size", "4"],
    "reward-model": ["--batch-size", "4"],
}
SAVED = {  # where a command's model stands in its run
    "train": "policy",
    "sft": "sft",
    "dpo": "policy",
    "kto": "policy",
    "reward-model": "reward_model",
}
LONGEST = 120  # seconds of a command; then it hangs


def make_models(here: Path) -> None:
    "Small models of several families, which read nine words and an end."
    import torch
    from mixtures import CONFIGS, mixture
    from small_trainer import CONFIGS as PLAIN
    from transformers import AutoModelForCausalLM

    from instruct_goose.models.tokens import word_tokenizer

    words = word_tokenizer([f"w{i}" for i in range(9)], 24, pad="<end>", bos="<end>", eos="<end>")
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": len(words)}
    models = {}
    for name, family in (("model", "gpt2"), ("llama", "llama")):
        config = PLAIN[family]()
        for setting, value in ends.items():
            setattr(config, setting, value)
        torch.manual_seed(0)
        models[name] = AutoModelForCausalLM.from_config(config)
    for family in CONFIGS:
        models[family] = mixture(family, **ends)
        models[f"{family}-router-logits"] = mixture(family, **ends, output_router_logits=True)
    for name, model in models.items():
        model.save_pretrained(here / name)
        words.save_pretrained(here / name)


def make_world(here: Path) -> None:
    "The models, rows for every command, and a reward."
    make_models(here)
    rows = {
        "train": [{"prompt": f"w{i} w{i + 1}"} for i in range(8)],
        "sft": [{"prompt": f"w{i}", "completion": f"w{i + 1}"} for i in range(8)],
        "dpo": [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2 w3"} for i in range(8)],
        "kto": [{"prompt": f"w{i}", "completion": "w1", "label": i % 2 == 0} for i in range(8)],
    }
    rows["reward-model"] = rows["dpo"]
    for name, lines in rows.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for name in ("rewards.py", "plain_rewards.py"):  # a case may change the first
        (here / name).write_text("def score(texts): return [1.0 * len(t) for t in texts]\n")


def command(name: str, out: str, *more: str) -> list[str]:
    "The words of a command that writes to `out`; of a flag that comes twice the last one counts."
    argv = [name, "--model", "model", "--data", f"{name}.jsonl", "--output-dir", out]
    argv += ["--steps", str(STEPS), "--save-every", "2", "--lr", "0.01", "--threads", "1"]
    return [*argv, *COMMANDS[name], *more]


def call(argv: list[str], here: Path, encoding: str) -> None:
    "The command, as in a shell: in a session of its own, with the handlers that Python has."
    os.setsid()
    os.chdir(here)
    file = (here / "said").open("ab")
    said = io.TextIOWrapper(file, encoding=encoding, write_through=True)
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


def log(here: Path, out: str) -> list[dict]:
    "The log of a run without its times; of a run that has none, nothing."
    path = here / out / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # being written
            break
        rows.append({name: x for name, x in row.items() if "second" not in name})
    return rows


def run(
    argv: list[str],
    here: Path,
    signals: tuple[int, ...] = (),
    after: int = 0,  # rows of the log, then the signals come
    encoding: str = "utf-8",
    watched: str = "",  # a file in the output that has to be there, too
) -> int | None:  # the exit status; None: no end in time
    "Run a command to its end."
    child = multiprocessing.get_context("fork").Process(target=call, args=(argv, here, encoding))
    child.start()
    out = argv[argv.index("--output-dir") + 1] if "--output-dir" in argv else ""
    end = time.monotonic() + LONGEST
    while signals and child.is_alive() and time.monotonic() < end:
        if len(log(here, out)) >= after and (here / out / watched).exists() or not out:
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
    "The end of what the commands have said, on one line."
    path = here / "said"
    if not path.exists():
        return ""
    return " ".join(path.read_bytes().decode("utf-8", "replace").split())[-300:]
