"""What the front page lets a reader drag: the quickstart's policy on its way, at several prices of KL.

From one SFT model and one reward model (seed 0), PPO at each β. Every few iterations the policy
answers the same prompts with the same dice, and is judged on 256 held-out prompts.
"""
from pathlib import Path

import torch
from quickstart import in_lines

from instruct_goose.practice import quickstart as lesson
from instruct_goose.practice.quickstart import QuickstartConfig
from instruct_goose.training.evaluation import write

BETAS = (0., .06, .18, .6)
EVERY = 3  # iterations between two looks
PROMPTS = ("", "the film", "a", "i found", "this", "the plot", "it is", "an")
FIGURES = ("human_score", "reward_model_score", "grammatical", "distinct_2", "kl_to_reference")


def looked_at(config, model, lm, tokenizer, reward_model, held_out) -> dict:
    "Figures, and what the policy answers to PROMPTS with the same dice each time."
    _, found = lesson.evaluate(config, model, lm, tokenizer, reward_model, held_out)
    texts = write(model, tokenizer, list(PROMPTS), config.max_new_tokens, seed=3).texts
    return {k: float(f"{found[k]:.3g}") for k in FIGURES} | {"texts": texts}


def one_price(beta, config, data, tokenizer, lm, reward_model) -> list[dict]:
    "The policy before the first iteration, and after every few."
    config = QuickstartConfig(**vars(config) | {"beta": beta})
    trainer, held_out = lesson.make_trainer(config, lm, tokenizer), data.held_out_prompts[:256]
    def look():
        found = looked_at(config, trainer.agent.model, lm, tokenizer, reward_model, held_out)
        frames.append({"iteration": trainer.iteration} | found)

    frames: list[dict] = []
    look()
    def watch(m):
        if trainer.iteration % EVERY == 0: look()

    trainer.train(data.prompts, reward_model, callback=watch, progress=False)
    return frames


def record(path: Path, origin: dict) -> None:
    "One file: prompts, and frames by β; written after each price."
    torch.set_num_threads(1)
    config = QuickstartConfig(progress=False)
    data, tokenizer = lesson.make_data(config), lesson.make_tokenizer(config)
    lm, _ = lesson.train_sft(config, data, tokenizer)
    reward_model, _ = lesson.train_judge(config, data, lm)
    found = {"origin": origin, "seed": config.seed, "prompts": list(PROMPTS), "runs": []}
    for beta in BETAS:
        frames = one_price(beta, config, data, tokenizer, lm, reward_model)
        found["runs"].append({"beta": beta, "frames": frames})
        path.write_text(in_lines(found), "utf-8")
        print(f"β = {beta}: {frames[-1]}", flush=True)
