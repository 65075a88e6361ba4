"""A quickstart that takes less: what each shorter setting saves, and what it costs. `python -m bench.shorter [--part 0/8]`, a CPU-hour in all.

Stages 1 to 3 of the quickstart, four seeds of each setting. Writes bench/shorter.json, from which the page *How fast* has its table.
"""

import argparse
import json
import time
from pathlib import Path

from bench.record import origin
from bench.worker import versions

FILE = Path(__file__).with_name("shorter.json")
SEEDS = range(4)
SFT = {"sft_steps": 500}
TRIED = {  # name -> settings; "activation" is the model's, which is no setting
    "as it is": {},
    "ReLU in the model": {"activation": "relu"},
    "half the SFT": SFT,
    "half the SFT, ReLU": SFT | {"activation": "relu"},
    "half the SFT, GELU by erf": SFT | {"activation": "gelu"},
    "half the SFT, 192 responses": SFT | {"batch_size": 192},
    "half the SFT, 30 iterations of 192, lr 1.2e-3": SFT
    | {"steps": 30, "batch_size": 192, "lr": 1.2e-3},
    "half the SFT, 28 iterations, lr 1.2e-3": SFT | {"steps": 28, "lr": 1.2e-3},
    "half the SFT, 28 iterations, lr 1.2e-3, β .16": SFT
    | {"steps": 28, "lr": 1.2e-3, "beta": 0.16},
    "half the SFT, 28 iterations, lr 1.2e-3, ReLU": SFT
    | {"activation": "relu", "steps": 28, "lr": 1.2e-3},
    "half the SFT, 28 iterations, lr 1.5e-3, 2 minibatches, ReLU": SFT
    | {"activation": "relu", "steps": 28, "lr": 1.5e-3, "minibatches": 2},
    "half the SFT, 24 iterations, lr 1.5e-3, value lr 4e-3": SFT
    | {"steps": 24, "lr": 1.5e-3, "value_lr": 4e-3},
    "400 steps of 64 at 1e-2 in SFT, 28 iterations, lr 1.2e-3": {
        "sft_steps": 400,
        "sft_batch_size": 64,
        "sft_lr": 1e-2,
        "steps": 28,
        "lr": 1.2e-3,
    },
    "half the SFT, 400 steps at 4e-3 for the reward model, 30 iterations, lr 1.2e-3": SFT
    | {"rm_steps": 400, "rm_lr": 4e-3, "steps": 30, "lr": 1.2e-3},
    "half the SFT, 350 steps at 5e-3 for the reward model, 30 iterations, lr 1.2e-3": SFT
    | {"rm_steps": 350, "rm_lr": 5e-3, "steps": 30, "lr": 1.2e-3},
    "half the SFT, 48 pairs a step, 30 iterations, lr 1.2e-3": SFT
    | {"rm_batch_size": 48, "steps": 30, "lr": 1.2e-3},
}
LIMITS = {
    "human_score": 2.2,
    "grammatical": 0.94,
    "distinct_2": 0.6,
    "below_ceiling": 0.05,
}  # at least; the last at most


def measured(name: str, seed: int) -> dict:
    "Stages 1 to 3 with these settings: the figures that are promised, and the CPU-seconds of each stage."
    import torch

    from instruct_goose.recipes import quickstart as lesson
    from instruct_goose.supervised.reward_model_training import pair_accuracy
    from instruct_goose.tasks.film_reviews import pair_ceiling

    torch.set_num_threads(1)
    settings = dict(TRIED[name])
    shape, activation = lesson.small_gpt2, settings.pop("activation", None)
    config, seconds = lesson.QuickstartConfig(seed=seed, progress=False, **settings), {}

    def timed(stage: str, work):
        start = time.process_time()
        done = work()
        seconds[stage] = time.process_time() - start
        return done

    data, tokenizer = timed(
        "data", lambda: (lesson.make_data(config), lesson.make_tokenizer(config))
    )
    if activation:
        lesson.small_gpt2 = lambda *args, **more: shape(
            *args, **more | {"activation_function": activation}
        )
    try:
        lm, _ = timed("sft", lambda: lesson.train_sft(config, data, tokenizer))
    finally:
        lesson.small_gpt2 = shape
    judge, _ = timed("reward_model", lambda: lesson.make_reward_model(config, data, lm))
    held_out, trainer = data.held_out_prompts, lesson.make_trainer(config, lm, tokenizer)
    before = lesson.evaluate(config, lm, lm, tokenizer, judge, held_out)[1]
    timed("ppo", lambda: trainer.train(data.prompts, judge, progress=False))
    after = lesson.evaluate(config, trainer.agent.model.eval(), lm, tokenizer, judge, held_out)[1]
    found = {
        "human_score": after["human_score"],
        "grammatical": after["grammatical"],
        "distinct_2": after["distinct_2"] / before["distinct_2"],
        "below_ceiling": pair_ceiling(data.held_out_pairs)
        - pair_accuracy(judge.score, data.held_out_pairs),
        "kl": after["kl_to_reference"],
    }
    return {
        "name": name,
        "seed": seed,
        **{k: round(x, 4) for k, x in found.items()},
        "seconds": {k: round(x, 1) for k, x in seconds.items()},
    }


def table(record: dict) -> str:
    "Markdown: per setting the CPU time over that of the setting as it is, and the worst of the seeds."
    runs, spent = record["runs"], {}
    for r in runs:
        spent.setdefault(r["name"], []).append(sum(r["seconds"].values()))
    whole = {r["seed"]: sum(r["seconds"].values()) for r in runs if r["name"] == "as it is"}
    rows = [
        f"| | CPU time | human score (≥ {LIMITS['human_score']}) | grammatical (≥ {LIMITS['grammatical']}) | distinct bigrams (≥ {LIMITS['distinct_2']}) | "
        f"below the ceiling (≤ {LIMITS['below_ceiling']}) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in spent:
        mine = [r for r in runs if r["name"] == name]
        worst = {k: (max if k == "below_ceiling" else min)(r[k] for r in mine) for k in LIMITS}
        shown = [
            f"**{x:.3g}**"
            if (x > LIMITS[k] if k == "below_ceiling" else x < LIMITS[k])
            else f"{x:.3g}"
            for k, x in worst.items()
        ]
        ratios = sorted(sum(r["seconds"].values()) / whole[r["seed"]] for r in mine)
        rows.append(f"| {name} | {sum(ratios) / len(ratios):.2f} | {' | '.join(shown)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        default="0/1",
        help="k/n: every n-th run, from the k-th; for several processes, each with an --output of its own",
    )
    parser.add_argument("--output", type=Path, default=FILE)
    given = parser.parse_args()
    k, n = map(int, given.part.split("/"))
    jobs, runs = [(name, seed) for seed in SEEDS for name in TRIED][k::n], []
    for name, seed in jobs:
        runs.append(measured(name, seed))
        print(runs[-1], flush=True)
        record = {
            "origin": origin() | {"versions": versions(()), "command": "python -m bench.shorter"},
            "runs": runs,
        }
        given.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
