"""A small student, and a policy that PPO has improved as its teacher: from the teacher's opinion of the student's texts, and from the
teacher's own texts, on equally many tokens. `python evidence/run.py distillation`; about two CPU-minutes a seed."""

import copy
import dataclasses

import torch

from instruct_goose.core.random import stage_seed
from instruct_goose.models.teacher import DISTILLATION, Teacher
from instruct_goose.recipes.quickstart import (
    QuickstartConfig,
    evaluate,
    make_data,
    make_lm,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    train_sft,
)
from instruct_goose.rollouts.evaluation import generate, kl_to_reference
from instruct_goose.supervised.sft import train_lm
from instruct_goose.training.trainer import RLHFTrainer

STUDENT = dict(hidden_size=24, layers=1, heads=2, sft_steps=300, sft_lr=1e-2)
SETTINGS = dict(steps=80, batch_size=256, lr=3e-3, lr_schedule="linear")
FIGURES = ("human_score", "grammatical", "distinct_2", "response_length", "kl_to_teacher")


def weights(model) -> int:
    return sum(p.numel() for p in model.parameters())


def distil(seed: int = 0, student=STUDENT, settings=SETTINGS, **teacher) -> dict:
    "Figures of the teacher, of the student before, after its own texts were rated, and after it read the teacher's."
    config = QuickstartConfig(seed=seed, progress=False, **teacher)
    data = make_data(config)
    tokenizer = make_tokenizer(config)
    lm, _ = train_sft(config, data, tokenizer)
    judge, _ = make_reward_model(config, data, lm)
    improving = make_trainer(config, lm, tokenizer)
    improving.train(data.prompts, judge, progress=False)
    policy = improving.agent.model.eval()

    own = dataclasses.replace(config, **student)
    beginner, _ = train_sft(own, data, tokenizer)
    c = dataclasses.replace(own, **DISTILLATION | settings)
    prompts = [data.prompts[i % len(data.prompts)] for i in range(c.steps * c.batch_size)]
    trainer = RLHFTrainer(copy.deepcopy(beginner), config=c, tokenizer=tokenizer)
    history = trainer.train(prompts, Teacher(policy), progress=False)

    reader = make_lm(own, tokenizer)
    reader.load_state_dict(beginner.state_dict())
    texts = generate(
        policy, tokenizer, prompts, config.max_new_tokens, seed=stage_seed(seed, "teacher's texts")
    ).texts
    train_lm(
        reader,
        tokenizer,
        texts,
        steps=c.steps,
        batch_size=c.batch_size,
        lr=c.lr,
        seed=stage_seed(seed, "reader"),
        progress=False,
    )

    def figures(model):
        rollout, found = evaluate(config, model, lm, tokenizer, judge, data.held_out_prompts)
        with torch.no_grad():
            found["kl_to_teacher"] = kl_to_reference(model, policy, rollout).mean().item()
        return {name: round(found[name], 4) for name in FIGURES}

    models = {
        "teacher": policy,
        "student before": beginner,
        "on its own texts": trainer.agent.model.eval(),
        "on the teacher's texts": reader.eval(),
    }
    return {
        "seed": seed,
        "weights": {"teacher": weights(policy), "student": weights(beginner)},
        "figures": {name: figures(model) for name, model in models.items()},
        "curve": [round(-m["reward_mean"], 4) for m in history],
    }


def record(seeds) -> dict:
    return {"student": STUDENT, "settings": SETTINGS, "runs": [distil(seed) for seed in seeds]}
