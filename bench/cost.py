"""What the lesson "How cost grows" holds its counts against: `python -m bench.cost` writes bench/cost.json.

python -m bench.cost                    curves and models, about three CPU-minutes
python -m bench.cost curves             only the curves: one setting turned at a time, repeats in turns
python -m bench.cost models             only one iteration, and the peak memory, of three shapes
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median

import torch

from bench.form import Job, Side
from bench.measure import EXACT, timed
from bench.record import digits, origin
from bench.worker import Worker, versions

RECORD = Path(__file__).with_suffix(".json")
BASE = dict(layers=4, width=128, vocab=2000, rows=16, prompt=16, response=16, epochs=2, group=1)
CURVES = {  # what is turned, and to what; the base is among them
    "response": (8, 16, 32, 64, 128),
    "rows": (4, 8, 16, 32, 64),
    "vocab": (500, 2000, 8000, 32000),
    "layers": (1, 2, 4, 8),
    "epochs": (1, 2, 4, 8),
    "group": (1, 2, 4, 8),
}
MODELS = {  # GPT-2 with random weights; and the shape of SmolLM-135M
    "tiny": BASE,
    "gpt2-small": dict(
        layers=12, width=768, vocab=50257, rows=4, prompt=16, response=16, epochs=1, group=1
    ),
    "smollm-135m": dict(
        layers=30, width=576, vocab=49152, rows=4, prompt=16, response=16, epochs=1, group=1
    ),
}


def llama_135m(seed: int):
    "SmolLM-135M's shape: 9 heads that share 3 keys, tied embeddings."
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    return model.eval()


def iteration(
    layers: int,
    width: int,
    vocab: int,
    rows: int,
    prompt: int,
    response: int,
    epochs: int,
    group: int,
) -> Job:
    "One iteration of PPO, values on the policy's trunk; of GRPO where group is above 1."
    from bench.ours import Run
    from bench.tiny import even_share, gpt2, prompts, tokenizer
    from instruct_goose.config import RLHFConfig

    def made(seed):
        return (
            llama_135m(seed)
            if width == 576
            else gpt2(seed, layers, width, vocab, positions=prompt + response)
        )

    config = RLHFConfig.preset(
        "grpo" if group > 1 else "ppo",
        batch_size=rows,
        group_size=group,
        max_new_tokens=response,
        epochs=epochs,
        minibatches=1,
        lr=1e-5,
        device="cpu",
    )
    run = Run(
        made(0),
        made(1),
        config,
        tokenizer(vocab),
        lambda texts: [even_share(t, response) for t in texts],
    )
    given = prompts(rows // group, 0, prompt, vocab)
    return Job(lambda: run.step(given))


def spread(runs: list[dict]) -> dict[str, dict[str, float]]:
    "CPU-seconds of each phase: median, least, most."

    def of(name):
        return [r["phases"][name] for r in runs]

    return {
        name: {
            k: digits(f(of(name)), 4) for k, f in (("median", median), ("min", min), ("max", max))
        }
        for name in ("rollout", "score", "update")
    }


def in_turns(points: list[dict], repeats: int) -> list[dict]:
    "One iteration of each after another, in one process; the first does not count."
    jobs = [iteration(**p) for p in points]
    for job in jobs:
        job.run()
    runs = [[] for _ in jobs]
    for i in range(repeats):
        for job, found in list(zip(jobs, runs))[:: -1 if i % 2 else 1]:
            found.append(timed(job.run))
    return [{"settings": p, **spread(found)} for p, found in zip(points, runs)]


def highest(settings: dict) -> float:
    "MiB, of a fresh process."
    worker = Worker(Side("ours", "bench.cost:from_nothing", settings, agrees=None), **EXACT)
    try:
        return digits(worker.ask("run")["phases"]["peak"], 4)
    finally:
        worker.close()


def from_nothing(**settings) -> Job:
    "Models, optimiser and two iterations: the highest point, less what the process held when all was imported."
    import bench.ours  # noqa: F401
    from bench.measure import MIB, RESET, status

    iteration(
        **BASE | {"rows": 2, "layers": 1, "width": 32}
    ).run()  # what a library loads at its first call is not counted

    def run():
        before = status("VmRSS")
        RESET.write_text("5")
        job = iteration(**settings)
        for _ in range(2):
            job.run()
        return {"peak": (status("VmHWM") - before) / MIB}

    return Job(run)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["curves", "models"], help="curves, models")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    record = (
        json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"curves": {}, "models": {}}
    )

    def keep(kind: str, name: str, found):
        record[kind][name] = found
        record[kind + "_origin"] = origin() | {
            "versions": versions(()),
            "command": f"python -m bench.cost {kind}",
            "repeats": args.repeats,
        }
        temporary = RECORD.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(temporary, RECORD)
        print(kind, name, json.dumps(found), flush=True)

    torch.set_num_threads(1)
    for name, values in CURVES.items() if "curves" in args.what else ():
        keep("curves", name, in_turns([BASE | {name: x} for x in values], args.repeats))
    for name, settings in MODELS.items() if "models" in args.what else ():
        keep(
            "models", name, in_turns([settings], args.repeats)[0] | {"peak_mib": highest(settings)}
        )


if __name__ == "__main__":
    main()
