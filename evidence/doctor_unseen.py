"""Random healthy runs shown to the doctor, and twenty bugs that its rules were not made for: `python evidence/run.py doctor_unseen`.

The rules were fixed first. With each bug stands which findings would name it and which would be true consequences of it; any other
finding is a false name. The probes climb their ladder with the same bug.
"""
import json
import random
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS
from instruct_goose.objective.masks import AGGREGATES
from instruct_goose.objective.policy_loss import LEVELS, SURROGATES
from instruct_goose.runs.microscope import as_response, seen_tokens
from instruct_goose.supervised.fit import torch_threads
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.worlds.probes import tiny_world

PROMPTS = ["", "a", "b c", "c", "a b", "b"]


class KeepTokens(Callback):
    "What a run directory holds in tokens.jsonl, in memory."
    def __init__(self): self.record = {}

    def on_iteration(self, trainer, rollout, metrics):
        seen = seen_tokens(trainer.now, rollout, trainer.config, trainer.tokenizer, 4, trainer.loss, trainer.eos_ids)
        self.record[metrics["iteration"]] = [as_response(r) for r in json.loads(json.dumps(seen, allow_nan=False))]


# --- random healthy runs ----------------------------------------------------------------------------------------------
USUAL = dict(steps=5, batch_size=32, epochs=2, minibatches=2, max_new_tokens=4, lr=.01, value_lr=.05, beta=.05, device="cpu")
CHOICES: dict[str, list] = dict(
    advantage=[*ADVANTAGES], group_size=[1, 2, 4, 8], group_ddof=[0, 1], ratio_level=[*LEVELS], surrogate=[*SURROGATES], clip=[.05, .2, .5],
    clip_high=[None, .28], dual_clip=[None, 1.5, 3.], value_clip=[None, .2], vf_coef=[.1, .5, 1.], ent_coef=[0., .02], entropy_target=[None, 1.],
    aggregation=[*AGGREGATES], importance_cap=[None, 1.2, 2.], importance_floor=[None, .5], importance_level=[*LEVELS], importance_beyond=["cut", "drop"],
    beta=[0., .02, .2], kl_placement=["reward", "loss"], kl_estimator=[None, *ESTIMATORS], kl_gradient=[*KL_GRADIENTS], kl_target=[None, None, .5],
    ref_every=[None, None, 2], ref_mixup=[1., .5], epochs=[1, 2, 3], minibatches=[1, 2, 3, 4], micro_batch_size=[None, 5, 8], autocast=[None, None, "bfloat16"],
    lr=[.001, .01, .03], value_lr=[None, .05], lr_schedule=["constant", "linear", "cosine"], weight_decay=[0., .1], max_grad_norm=[.1, 1., 100.],
    kl_early_stop=[None, None, .05], warmup_steps=[0, 0, 2], reward_weighting=["raw", "raw", "scaled"], reward_scaling=[None, None, "batch", "running"], reward_clip=[None, .3],
    missing_eos_penalty=[None, .2], overlong_buffer=[None, 2], mask_truncated=[False, False, True], redraw_flat=[0, 2], drop_flat=[False, True],
    gamma=[1., .9, 0.], lam=[0., .95, 1.], whiten_advantages=[True, False], temperature=[.7, 1., 1.3], stop_strings=[None, None, ("b",)],
    batch_size=[8, 32, 64], max_new_tokens=[1, 3, 6], recheck_every=[None, 2], seed=list(range(100)))


def random_settings(seed: int, most: int = 14) -> dict[str, Any]:
    "Up to so many settings, none of them the usual, that may be combined."
    dice = random.Random(seed)
    while True:
        names = dice.sample([*CHOICES], dice.randint(3, most))
        settings = USUAL | {name: dice.choice(CHOICES[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try: RLHFConfig(**settings)
            except ValueError: continue
        return settings


def reward_of(texts: list[str]) -> list[float]: return [.2 * text.count("a") - .1 * text.count("b") + .03 * len(text) for text in texts]


def a_run(settings: dict[str, Any], trainer: Callable = RLHFTrainer, prompts=PROMPTS, reward=reward_of) -> tuple[list[dict], dict, dict]:
    "The log, the settings and the tokens of a small run."
    with warnings.catch_warnings(), torch_threads(1):
        warnings.simplefilter("ignore")
        model, tokenizer = tiny_world(seed=settings.get("seed", 0))
        config, kept = RLHFConfig(**settings), KeepTokens()
        made = trainer(model, None, config, tokenizer=tokenizer, callbacks=[kept])
        return made.train(list(prompts), reward, progress=False), asdict(config), kept.record


def findings_on(seed: int) -> list[dict[str, str]]:
    "What the doctor says of a random healthy run, with the evidence."
    return [{"name": f.name, "severity": f.severity, "evidence": f.evidence} for f in diagnose(*a_run(random_settings(seed)))]
