"""Full runs of the recipe smollm-reviews, and its sweep over the KL coefficient: `python evidence/smollm_reviews.py --data DIR`.

Needs `pip install -e '.[smollm,peft]'` and the rated sentences. First a run for each seed, then one for each coefficient, with the
first seed; --jobs of them at a time, each in its own directory under --runs, where one that broke off goes on and one
that is finished stays. evidence/smollm_reviews.json is written anew from all that are finished.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quickstart import in_lines, rounded
from ridge import ridge_shares
from run import origin

from instruct_goose.core.files import write_json
from instruct_goose.recipes.ratings import read_rated, split_reviews, two_halves

root = Path(__file__).parents[1]
BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
SWEEP_STEPS = 40
CURVES = {
    "reward_mean/proxy": "proxy",
    "reward_mean/other_half": "other_half",
    "reward_mean/vader": "vader",
    "kl_to_reference": "kl",
    "entropy": "entropy",
    "response_length": "response_length",
}
COMMAND = "import sys; from instruct_goose.cli.main import main; main(sys.argv[1:])"


def start(name: str, flags: list[str], given) -> None:
    "One run, if it is not finished, in a process of its own; what it says goes to a file beside it."
    out = given.runs / name
    if (out / "summary.json").exists():
        return
    given.runs.mkdir(parents=True, exist_ok=True)
    if not (given.runs / f"{name}.json").exists():
        write_json(given.runs / f"{name}.json", origin("python evidence/smollm_reviews.py"))
    flags += [
        "--data",
        str(given.data),
        "--device",
        given.device,
        "--threads",
        str(given.threads),
        "--output-dir",
        str(out),
        "--no-progress",
    ]
    if given.cache:
        flags += ["--cache", str(given.cache)]
    if out.exists():
        flags += ["--resume"]
    print("──", name, *flags, flush=True)
    with (given.runs / f"{name}.log").open("a") as log:
        code = subprocess.run(
            [sys.executable, "-c", COMMAND, "recipe", "smollm-reviews", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if code:
        print(
            f"{name} failed:",
            *(given.runs / f"{name}.log").read_text("utf-8").splitlines()[-12:],
            sep="\n",
        )


def figures(name: str, given) -> dict | None:
    "A run that is finished."
    out = given.runs / name
    if not (out / "summary.json").exists():
        return None
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    train, held_out = split_reviews(read_rated(given.data)[0], summary["config"]["held_out"])
    half = two_halves(train, f"halves/{summary['seed']}")[0]
    summary["judges"]["pairs"] |= {
        "ridge": ridge_shares(train, held_out),
        "ridge_of_the_proxy's_raters": ridge_shares(half, held_out),
    }
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    kept = {
        k: summary[k]
        for k in (
            "seed",
            "cpu_seconds",
            "wall_seconds",
            "torch_threads",
            "judges",
            "before",
            "after",
            "samples",
        )
    }
    shown = (
        "steps",
        "batch_size",
        "max_new_tokens",
        "lr",
        "lr_schedule",
        "lora_rank",
        "lora_top",
        "eval_samples",
        "held_out",
        "question",
        "judge_frozen",
        "judge_trained",
        "judge_epochs",
        "judge_batch",
        "judge_lr",
        "device",
    )
    return {
        "name": name,
        "beta": summary["config"]["beta"],
        "origin": json.loads((given.runs / f"{name}.json").read_text("utf-8")),
        **rounded(kept),
        "config": {k: summary["config"][k] for k in shown},
        "curves": {new: rounded([m[k] for m in log], 3) for k, new in CURVES.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=root.parent / "shared/data/icwsm2014")
    parser.add_argument(
        "--cache",
        type=Path,
        help="where the plain model is kept, so that not every process has to make it",
    )
    parser.add_argument("--runs", type=Path, default=root / "runs/evidence")
    parser.add_argument("--out", type=Path, default=root / "evidence/smollm_reviews.json")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--betas", type=float, nargs="*", default=BETAS)
    parser.add_argument(
        "--steps",
        type=int,
        help="iterations of every run; default: the recipe's, and of the sweep 40",
    )
    given = parser.parse_args()
    if given.cache and not given.cache.exists():
        from instruct_goose.models.loading import load_smollm

        load_smollm(given.cache)
    mine = {
        f"smollm-reviews-{seed}": ["--seed", str(seed)]
        + (["--steps", str(given.steps)] if given.steps else [])
        for seed in given.seeds
    }
    steps = str(given.steps or SWEEP_STEPS)
    swept = {
        f"smollm-reviews-beta{beta:g}": [
            "--seed",
            str(given.seeds[0]),
            "--beta",
            str(beta),
            "--steps",
            steps,
        ]
        for beta in given.betas
    }
    for some in (mine, swept):
        with ThreadPoolExecutor(given.jobs) as jobs:
            list(jobs.map(lambda item: start(*item, given), some.items()))
        found = {
            part: [x for name in names if (x := figures(name, given))]
            for part, names in (("runs", mine), ("sweep", swept))
        }
        given.out.write_text(in_lines(found), "utf-8")


if __name__ == "__main__":
    main()
