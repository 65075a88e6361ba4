"""The second round of attacks, as counts: `python evidence/run.py attacks`, about six CPU-minutes.

Every function tries something n times and returns how many went how; `wrong` are those that ended otherwise than documented.
`THEN` is what the same attack found when it was first made, on the tree of 20 November 2026.
"""
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

THEN = {
    "a checkpoint forged in one place, its checksum right": "a crash (SIGSEGV), errors after the weights were overwritten, NaN weights and missing moments accepted",
    "one bit of a checkpoint turned": "1,499 of 1,500 refused, the last one harmless",
    "a run stopped by a signal, without `--save-every`": "SIGTERM and SIGHUP lost the run",
    "a broken JSON file in a run's directory": "an empty summary read as finished; tracebacks",
    "other people's files in a run's directory": "names with a dot in front were deleted, or stopped the run",
    "odd metrics and settings shown to the doctor": "MemoryError, TypeError, OverflowError",
    "a text with control characters, shown": "sent to the terminal",
}
ODD = [None, True, False, 0, -1, 1.5, 10**400, 2**60, math.nan, math.inf, -math.inf, 1e308, 5e-324, "", "abc", "1", [], {}, [[]], [{}], ["a"], {"x": 1}, b"x"]


# --- checkpoints ---

def make_trainer():
    "A trainer of four thousand weights, after two iterations with everything switched on that has a state."
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from instruct_goose.models.agent import Agent
    from instruct_goose.models.tokens import word_tokenizer
    from instruct_goose.training.config import RLHFConfig
    from instruct_goose.training.trainer import RLHFTrainer

    torch.manual_seed(0)
    words = "a good film ; a dull film ; the plot was thin".split()
    tokenizer = word_tokenizer(sorted(set(words)))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=tokenizer.eos_token_id,
                                       eos_token_id=tokenizer.eos_token_id))
    config = RLHFConfig(steps=6, batch_size=8, max_new_tokens=4, eval_every=1, keep_best=True, lr=1e-3, kl_target=1., device="cpu")
    trainer = RLHFTrainer(Agent(model, value_model="copy"), None, config, tokenizer=tokenizer)
    trainer.train(sorted(set(words)), lambda texts: [text.count("a") for text in texts], 2, progress=False, held_out=["a", "the"])
    return trainer


def go_on(trainer) -> None:
    trainer.train(["a", "the plot", "film"], lambda texts: [text.count("a") for text in texts], 1, progress=False, held_out=["a", "the"])


def digest(state) -> str:
    tensors, record = state
    whole = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode())
    for name in sorted(tensors): whole.update(name.encode() + repr(tensors[name].dtype).encode() + tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def forged_tensors(r: random.Random, tensors: dict) -> dict:
    "One tensor changed, lost, renamed, or put in the place of another."
    import torch

    tensors, name = dict(tensors), r.choice(sorted(tensors))
    x = tensors[name]
    def one(value):
        y = x.clone().flatten()
        if len(y): y[r.randrange(len(y))] = value if y.is_floating_point() else int(max(-100, min(100, 0 if value != value else value)))
        return y.reshape(x.shape)
    ways = {"short": lambda: x.flatten()[:-1].clone(), "long": lambda: torch.cat([x.flatten(), x.flatten()[:1]]), "turned": lambda: x.T.contiguous() if x.ndim == 2 else x[None],
            "double": lambda: x.double(), "half": lambda: x.half(), "whole": lambda: x.long(), "one NaN": lambda: one(math.nan), "one infinity": lambda: one(math.inf),
            "one huge": lambda: one(1e30), "zeros": lambda: torch.zeros_like(x), "negative": lambda: -x if x.dtype != torch.uint8 else 255 - x,
            "another's": lambda: tensors[r.choice(sorted(tensors))].clone(), "empty": lambda: x[..., :0].clone() if x.ndim else x.new_zeros(0),
            "turned round": lambda: x.flip(0).clone() if x.ndim else x + 1}
    way = r.choice(["lost", "renamed", "one more", *ways])
    if way == "lost": del tensors[name]
    elif way == "renamed": tensors[r.choice([name + "x", name.replace(".", "/"), name.split("/")[0], "x"])] = tensors.pop(name)
    elif way == "one more": tensors[r.choice([name + ".1", "generator/third", "extra/x", "best/x"])] = x.clone()
    else: tensors[name] = ways[way]()
    return tensors


def forged_record(r: random.Random, record: dict) -> dict:
    "One value anywhere in the record changed, lost, or one more beside it."
    record = json.loads(json.dumps(record, default=str))
    place = record
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = r.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and r.random() < .7: place = place[key]
        else: break
    odd = r.choice([x for x in ODD if not isinstance(x, bytes) and (not isinstance(x, float) or math.isfinite(x))])
    way = r.choice(["odd", "odd", "odd", "lost", "more"])
    if way == "lost": del place[key]
    elif way == "more" and isinstance(place, dict): place["one_more"] = odd
    else: place[key] = odd
    return record


def try_forgeries(first: int, n: int, seed: int, told) -> None:
    "In a process of its own, since one of them once ended it: sends the outcome of each."
    from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint

    warnings.simplefilter("ignore")
    trainer = make_trainer()
    clean, here = trainer.state(), Path(tempfile.mkdtemp())
    clean = {k: x.clone() for k, x in clean[0].items()}, json.loads(json.dumps(clean[1], default=str))
    go_on(trainer)  # what is here is another state than what is loaded
    for i in range(first, first + n):
        r = random.Random(f"{seed}/{i}")
        tensors, record = dict(clean[0]), clean[1]
        if r.random() < .6: tensors = forged_tensors(r, tensors)
        else: record = forged_record(r, record)
        path = save_checkpoint(here / "checkpoints", tensors, record)
        before = digest(trainer.state())
        try: trainer.load_state(*load_checkpoint(path))
        except (ValueError, OSError): outcome = "refused" if digest(trainer.state()) == before else "wrong: half written"
        except Exception as e: outcome = f"wrong: {type(e).__name__} at loading"
        else:
            try: go_on(trainer)
            except (ValueError, FloatingPointError): outcome = "stopped in training, with the reason"
            except Exception as e: outcome = f"wrong: {type(e).__name__} in training"
            else: outcome = "accepted: a legal state"
            trainer = make_trainer() if outcome != "accepted: a legal state" else trainer
            trainer.load_state(*clean)
            go_on(trainer)
        told.send((i, outcome))
    shutil.rmtree(here)


def forgeries(n: int = 400, seed: int = 0) -> dict:
    counts, i, fork = Counter(), 0, multiprocessing.get_context("spawn")
    while i < n:
        hear, tell = fork.Pipe(duplex=False)
        child = fork.Process(target=try_forgeries, args=(i, n - i, seed, tell))
        child.start()
        tell.close()
        while True:
            try: at, outcome = hear.recv()
            except EOFError: break
            counts[outcome], i = counts[outcome] + 1, at + 1
        child.join()
        if i < n: counts["wrong: crash"], i = counts["wrong: crash"] + 1, i + 1
    return dict(counts)


def flips(n: int = 500, seed: int = 0) -> dict:
    "A bit in any file of a checkpoint: refused, or what is read is what was written."
    from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint

    trainer, here, counts, r = make_trainer(), Path(tempfile.mkdtemp()), Counter(), random.Random(seed)
    path = save_checkpoint(here, *trainer.state())
    meant = digest(load_checkpoint(path))
    files = sorted(path.iterdir())
    for _ in range(n):
        file = r.choice(files)
        whole = file.read_bytes()
        place = r.randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << r.randrange(8)]) + whole[place + 1:])
        try: counts["harmless: the same was read" if digest(load_checkpoint(path)) == meant else "wrong: another state was read"] += 1
        except ValueError: counts["refused"] += 1
        except Exception as e: counts[f"wrong: {type(e).__name__}"] += 1
        file.write_bytes(whole)
    shutil.rmtree(here)
    return dict(counts)


# --- runs ---

TINY = {"reviews": 300, "pairs": 60, "held_out_pairs": 40, "sft_steps": 60, "rm_steps": 30, "steps": 8, "batch_size": 16, "eval_samples": 32, "best_of": 2,
        "tune_steps": 6, "epochs": 1, "layers": 1, "hidden_size": 16}
FLAGS = [x for k, v in TINY.items() for x in (f"--{k.replace('_', '-')}", str(v))] + ["--no-progress"]


def run_said(out: Path) -> tuple:
    files = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.safetensors") if "checkpoints" not in p.parts}
    log = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    return files, log, {k: v for k, v in summary.items() if "seconds" not in k and k != "resumed_from"}


def signals(n: int = 18, seed: int = 0) -> dict:
    "SIGTERM, SIGHUP and SIGINT in turn, at random moments after the first step; then --resume, and the end compared."
    from instruct_goose.cli.main import main as command

    fork, here, counts, r = multiprocessing.get_context("forkserver"), Path(tempfile.mkdtemp()), Counter(), random.Random(seed)
    fork.set_forkserver_preload(["instruct_goose.recipes.quickstart", "instruct_goose.cli.main"])

    def start(out, *more):
        child = fork.Process(target=command, args=(["quickstart", *FLAGS, "--output-dir", str(out), *more],))
        child.start()
        return child

    start(here / "whole").join()
    whole, longest = run_said(here / "whole"), json.loads((here / "whole/summary.json").read_text("utf-8"))["wall_seconds"]
    for i in itertools.count():
        if sum(counts.values()) == n: break
        number, out = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[i % 3], here / f"run{i}"
        child = start(out)
        while not (out / "config.json").exists(): time.sleep(.005)
        child.join(r.uniform(.1, .95) * longest)
        if not child.is_alive(): longest *= .9; continue  # it was done
        os.kill(child.pid, number)
        child.join()
        if (out / "summary.json").exists() and child.exitcode == 0: continue  # it came after the last step
        again = start(out, "--resume")
        again.join()
        if again.exitcode or run_said(out) != whole: counts[f"wrong: {number.name}"] += 1
        else: counts["resumed, and ended as if never stopped" if child.exitcode == 128 + number else f"wrong: exit status {child.exitcode}"] += 1
    shutil.rmtree(here)
    return dict(counts)


def broken_json(n: int = 400, seed: int = 0) -> dict:
    from instruct_goose.runs.checkpoints import read_json

    here, counts, r = Path(tempfile.mkdtemp()), Counter(), random.Random(seed)
    good = json.dumps({"seed": 0, "before": {"human": .2}, "config": {"steps": 36, "lr": 1e-3}}).encode()
    whole = [b"", b" \n", b"null", b"[]", b"3", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"{}x", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b"\0" * 10, b"{" + b" " * 10**6]
    for _ in range(n):
        blob = r.choice(whole) if r.random() < .3 else bytearray(good)
        if isinstance(blob, bytearray):
            for _ in range(r.choice([1, 1, 2, 5])):
                a, b = sorted(r.randrange(len(blob) + 1) for _ in "ab")
                way = r.randrange(3)
                if way == 0: del blob[a:a + 1]
                elif way == 1: del blob[a:b]
                else: blob.insert(a, r.randrange(256))
        path = here / r.choice(["summary.json", "config.json"])
        path.write_bytes(bytes(blob))
        try: value = read_json(path, "the summary")
        except ValueError as e: counts["refused, and the file named" if str(path) in str(e) else "wrong: no name of a file"] += 1
        except Exception as e: counts[f"wrong: {type(e).__name__}"] += 1
        else: counts["read: still an object" if isinstance(value, dict) and value == json.loads(bytes(blob)) else "wrong: read as something else"] += 1
    shutil.rmtree(here)
    return dict(counts)


def foreign(n: int = 200, seed: int = 0) -> dict:
    "Files and directories of other people, some with names close to ours, before a run is opened and after it has saved."
    import torch

    from instruct_goose.runs.resume import CheckpointManager

    counts, r = Counter(), random.Random(seed)
    stems = [".config.json.swp", ".notes.json.bak", ".summary.json~", ".metrics.jsonl.", ".config.json.12x", ".writing-", ".writing-x", ".removing-checkpoint-1", ".removing-me", "checkpoint-12",
             "checkpoint-000001.bak", "checkpoint-abc", ".git", "notes.md", ".DS_Store", "checkpoints.tar", ".config.json.", "x.safetensors"]
    for _ in range(n):
        run = Path(tempfile.mkdtemp())
        (run / "checkpoints").mkdir()
        made = {}
        for name in r.sample(stems, 4):
            path = r.choice([run, run / "checkpoints"]) / name
            if r.random() < .3: path.mkdir(); path /= "inside"
            path.write_text(str(r.random()), "utf-8")
            made[path] = path.read_text("utf-8")
        try:
            with CheckpointManager(run, {"lr": 1}, 4, every=1, keep=1) as keeper:
                stage = keeper.stage("ppo")
                for at in (1, 2, 3): stage.after_step(at, 4, lambda: ({"w": torch.ones(2)}, {}))
        except Exception as e: counts[f"wrong: {type(e).__name__}"] += 1
        else: counts["all still there" if all(p.exists() and p.read_text("utf-8") == text for p, text in made.items()) else "wrong: one is gone"] += 1
        shutil.rmtree(run)
    return dict(counts)


def doctor(n: int = 4_000, seed: int = 0) -> dict:
    from instruct_goose.doctor.diagnosis import diagnose
    from instruct_goose.training.config import RLHFConfig

    trainer = make_trainer()
    healthy = trainer.train(["a", "the"], lambda texts: [text.count("a") for text in texts], 2, progress=False, held_out=["a"])
    names, settings, counts, r = sorted({k for m in healthy for k in m}), vars(RLHFConfig()), Counter(), random.Random(seed)
    for _ in range(n):
        metrics, config = [dict(m) for m in healthy] * r.choice([1, 1, 4]), dict(settings)
        for _ in range(r.choice([0, 0, 1, 2])): r.choice(metrics)[r.choice([*names, "x", 3] if r.random() < .1 else names)] = r.choice(ODD)
        for _ in range(r.choice([0, 0, 1, 3])): config[r.choice([*settings, "x", None] if r.random() < .1 else list(settings))] = r.choice(ODD)
        given = metrics if r.random() < .95 else r.choice([*ODD, metrics + [r.choice(ODD)]]), config if r.random() < .95 else r.choice(ODD)
        try: diagnose(*given); counts["findings, or none"] += 1
        except (ValueError, TypeError) as e: counts["refused" if str(e) and not str(e).startswith(("unsupported", "'<", "'>", "must be real", "float()", "int()")) else f"wrong: {e}"] += 1
        except Exception as e: counts[f"wrong: {type(e).__name__}"] += 1
    return dict(counts)


def shown(n: int = 5_000, seed: int = 0) -> dict:
    import unicodedata

    from instruct_goose.models.tokens import printable

    counts, r = Counter(), random.Random(seed)
    odd = ["\x1b[2J", "\x1b]0;x\x07", "\r", "\b", "\0", "\x9b31m", "\u202e", "\u2066", "\u200f", "\x7f", "\u2028", "é", "漢", "🙂", "\n", "\t", " good", "\u0301"]
    for _ in range(n):
        text = "".join(r.choice(odd) if r.random() < .5 else chr(r.choice([r.randrange(0x250), r.randrange(0x2000, 0x2100), r.randrange(0xe000)]) % 0xd800) for _ in range(r.randint(1, 8)))
        left = {c for c in printable(text) if c not in "\n\t" and (unicodedata.category(c) == "Cc" or unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"))}
        counts["escaped where it must be" if not left else "wrong: sent as it is"] += 1
    return dict(counts)


def attacks() -> dict:
    assert threading.current_thread() is threading.main_thread()
    rows = {}
    for what, attack in zip(THEN, (forgeries, flips, signals, broken_json, foreign, doctor, shown)):
        print(f"\n\033[1m── {what}\033[0m", flush=True)
        found = attack()
        extra = {k: found.pop(k) for k in ("most_mib_added",) if k in found}
        rows[what] = {"then": THEN[what], "tried": sum(found.values()), "wrong": sum(n for k, n in found.items() if k.startswith("wrong")), "outcomes": found} | extra
        print(rows[what], flush=True)
    return {"rows": rows}
