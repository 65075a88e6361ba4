"""Full runs of the recipes, on the real model: `python evidence/recipes.py [--cache DIR] [--runs DIR] [--only TEXT]`.

Needs `pip install -e '.[smollm,peft]'`. Each run takes about ten minutes of one quiet core and stays in its own directory
under --runs, so that one that breaks off goes on; evidence/recipes.json is written anew from all that are finished there. Every run
says at which commit it began.
"""

import argparse
import json
from pathlib import Path

import torch
from quickstart import in_lines, rounded
from run import origin

from instruct_goose.core.files import write_json
from instruct_goose.recipes.smollm import RECIPES, recipe_settings, run_task

root = Path(__file__).parents[1]
PLAN = [  # recipe, algorithm, settings beside its own
    *(("smollm-sentiment", name, {}) for name in ("rloo", "ppo")),
    ("smollm-sentiment", "rloo", {"beta": 0.0, "max_kl_to_reference": None}),
    ("smollm-answers", "grpo", {}),
]
SEEDS = (0, 1, 2)
CURVES = ("reward_mean", "kl_to_reference", "entropy", "response_length")


def measured(
    recipe: str, algorithm: str, more: dict, seed: int, runs: Path, cache: Path | None, start: bool
) -> dict | None:
    "One run: from its directory if it is finished there; else it is run, or gone on with, if asked for."
    name = "-".join([recipe, algorithm, *(f"{k}{x}" for k, x in more.items()), str(seed)])
    out = runs / name
    if not (out / "summary.json").exists():
        if not start:
            return None
        out.parent.mkdir(parents=True, exist_ok=True)
        if not (runs / f"{name}.json").exists():
            write_json(runs / f"{name}.json", origin("python evidence/recipes.py"))
        print(f"\n── {name}", flush=True)
        config = recipe_settings(
            recipe,
            algorithm,
            seed=seed,
            output_dir=out,
            cache=cache,
            resume=out.exists(),
            save_every=4,
            **more,
        )
        run_task(recipe, config, RECIPES[recipe].task)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    began = json.loads((runs / f"{name}.json").read_text("utf-8"))
    figures = {
        k: summary[k] for k in ("seed", "cpu_seconds", "wall_seconds", "before", "after", "samples")
    }
    return {
        "recipe": recipe,
        "algorithm": algorithm,
        "beta": summary["config"]["beta"],
        "origin": began,
        **rounded(figures),
        "config": {
            k: rounded(summary["config"][k])
            for k in (
                "steps",
                "batch_size",
                "group_size",
                "max_new_tokens",
                "lr",
                "lr_schedule",
                "max_kl_to_reference",
                "lora_rank",
                "lora_top",
                "eval_samples",
            )
        },
        "curves": {k: rounded([m[k] for m in log], 3) for k in CURVES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--runs", type=Path, default=root / "runs/evidence")
    parser.add_argument(
        "--only", default="", help="start runs whose name begins so; 'nothing' only collects"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in SEEDS:
        for recipe, algorithm, more in PLAN:
            run = measured(
                recipe,
                algorithm,
                more,
                seed,
                given.runs,
                given.cache,
                recipe.startswith(given.only),
            )
            if run is None:
                continue
            found.append(run)
            (root / "evidence/recipes.json").write_text(in_lines({"runs": found}), "utf-8")


if __name__ == "__main__":
    main()
