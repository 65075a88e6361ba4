"""The quickstart over seeds, initial weights and arithmetics: `python evidence/run.py quickstart`.

Ten seeds, and of each some draws of the initial weights. Draw 0 is the run that a user gets; draw
n > 0 multiplies every initial weight by 1 + 1e-6·noise, which another processor's rounding does as
well: what differs between draws is luck, not the setting. Each run has PPO with its price of KL
and, from the same SFT and reward model, PPO with β = 0.

A record is a block for each processor and instruction set, so that a second machine adds its own.
To be another one here: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2, or
ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41.
"""

import json
import os
import re
from pathlib import Path

import torch

from instruct_goose.recipes import quickstart as lesson
from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.recipes.stages import make_baselines
from instruct_goose.runs.directory import settings_of
from instruct_goose.runs.resume import Clock
from instruct_goose.supervised.reward_model_training import pair_accuracy
from instruct_goose.supervised.sft import lm_nats

CURVES = [
    "reward_mean",
    "kl_to_reference",
    "entropy",
    "explained_variance",
    "clip_fraction",
    "response_length",
]
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS")
EVERY = 6  # iterations between two looks at the policy


def rounded(x, digits: int = 4):
    "Figures as far as they mean something, so that a diff of the JSON is readable."
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {k: rounded(v, digits) for k, v in x.items()}
    return [rounded(v, digits) for v in x] if isinstance(x, list) else x


def jittered(model, draw: int):
    "Every weight times 1 + 1e-6·noise; draw 0 leaves them alone."
    if draw:
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))
    return model


def improved(config: QuickstartConfig, data, tokenizer, lm, reward_model, samples: int) -> dict:
    "Stage 3: the figures at the end, on the way, the training curves, and the first samples."

    def judged(model, n):
        prompts = data.held_out_prompts[:n]
        return lesson.evaluate(config, model, lm, tokenizer, reward_model, prompts)

    trainer = lesson.make_trainer(config, lm, tokenizer)
    path = []

    def watch(m):
        if m["iteration"] % EVERY == EVERY - 1:
            figures = judged(trainer.agent.model, 256)[1]
            path.append({"iterations": m["iteration"] + 1} | rounded(figures, 3))

    metrics = trainer.train(data.prompts, reward_model, callback=watch, progress=False)
    texts, after = judged(trainer.agent.model.eval(), config.eval_samples)
    curves = {k: rounded([m[k] for m in metrics], 3) for k in CURVES}
    return {"after": rounded(after), "path": path, "curves": curves, "texts": texts.texts[:samples]}


def measured(seed: int, draw: int, samples: int = 12) -> dict:
    "One run by the lesson's own functions. Baselines and samples of draw 0 alone."
    clock = Clock()
    samples = 0 if draw else samples
    config = QuickstartConfig(seed=seed, progress=False)
    data = lesson.make_data(config)
    tokenizer = lesson.make_tokenizer(config)
    make_lm = lesson.make_lm
    lesson.make_lm = lambda *args: jittered(make_lm(*args), draw)
    try:
        lm, _ = lesson.train_sft(config, data, tokenizer)
    finally:
        lesson.make_lm = make_lm
    reward_model, _ = lesson.make_reward_model(config, data, lm)
    ceiling = lesson.pair_ceiling(data.held_out_pairs)
    accuracy = pair_accuracy(reward_model.score, data.held_out_pairs)
    ask = data.held_out_prompts
    texts, before = lesson.evaluate(config, lm, lm, tokenizer, reward_model, ask)
    with_price = improved(config, data, tokenizer, lm, reward_model, samples)
    baselines = (
        {}
        if draw
        else make_baselines(
            config,
            lm,
            tokenizer,
            reward_model,
            ask,
            lesson.film_figures,
            given=True,
            batch_size=config.sft_batch_size,
        )
    )
    seconds = clock.read()["cpu_seconds"]
    free = QuickstartConfig(seed=seed, beta=0.0, progress=False)
    without = improved(free, data, tokenizer, lm, reward_model, samples)
    table = [
        list(row)
        for row in zip(
            ask, texts.texts, with_price.pop("texts"), without.pop("texts"), strict=False
        )
    ]
    return {
        "seed": seed,
        "draw": draw,
        "cpu_seconds": round(seconds, 1),
        "sft": rounded({"held_out_nats_per_token": lm_nats(lm, tokenizer, data.held_out)}),
        "reward_model": rounded({"pair_accuracy": accuracy, "ceiling": ceiling}),
        "before": rounded(before),
        **with_price,
        "baselines": rounded(baselines),
        "beta_0": without,
    } | ({"samples": table} if table else {})


def in_lines(record: dict) -> str:
    "JSON in which a list of numbers or of strings is one line."
    text = json.dumps(record, indent=1, ensure_ascii=False)
    return (
        re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: "[" + re.sub(r",\n\s+", ", ", m[1]) + "]", text)
        + "\n"
    )


def open_block(path: Path, settings: dict, origin: dict, only_these=True) -> tuple[dict, dict]:
    """The whole record, and in it the block of this machine, to which runs are added. Blocks of
    other machines stay (with `only_these`, if their settings are the same); so do this one's runs
    of one commit."""
    whole = json.loads(path.read_text("utf-8")) if path.exists() else {}
    machines = {
        name: block
        for name, block in whole.get("machines", {}).items()
        if block["config"] == settings or not only_these
    }
    capability = torch.backends.cpu.get_cpu_capability()
    name = f"{origin['processor']}, {capability}"
    here = machines.get(name)
    if here is None or here["origin"]["commit"] != origin["commit"]:
        environment = {k: os.environ[k] for k in ARITHMETIC if k in os.environ}
        origin = origin | {"capability": capability, "threads": 1, "environment": environment}
        here = machines[name] = {"origin": origin, "config": settings, "runs": []}
    return {"machines": machines}, here


def settings_in(config: dict) -> dict:
    "What makes a run what it is: not its seed, nor where it is written."
    elsewhere = ("seed", "data", "output_dir", "progress")
    return {k: v for k, v in rounded(config).items() if k not in elsewhere}


def record(path: Path, origin: dict, seeds=range(10), draws=(0, 1)) -> None:
    "Measure every seed with every draw; the file is written after each run."
    torch.set_num_threads(1)
    settings = settings_in({"algorithm": "ppo"} | settings_of(QuickstartConfig()))
    whole, here = open_block(path, settings, origin)
    done = {(r["seed"], r["draw"]) for r in here["runs"]}
    for seed, draw in ((s, d) for d in draws for s in seeds if (s, d) not in done):
        here["runs"].append(run := measured(seed, draw))
        path.write_text(in_lines(whole), "utf-8")
        after, free = run["after"], run["beta_0"]["after"]
        print(
            f"seed {seed}, draw {draw}:",
            *(
                f"{k} {after[k]} (β = 0: {free[k]})"
                for k in ("human_score", "grammatical", "distinct_2", "kl_to_reference")
            ),
            flush=True,
        )
