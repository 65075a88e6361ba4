"""Random healthy runs shown to the doctor, and twenty bugs that its rules were not made for: `python evidence/run.py doctor_unseen`.

The rules were fixed first. With each bug stands which findings would name it and which would be true consequences of it; any other
finding is a false name. The probes climb their ladder with the same bug.
"""

import copy
import dataclasses
import json
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from gallery_world import gallery_world

from instruct_goose.config import RLHFConfig
from instruct_goose.core.random import torch_threads
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.report import checked_response
from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS
from instruct_goose.objective.masks import AGGREGATES, last_index, whiten
from instruct_goose.objective.policy_loss import LEVELS, SURROGATES
from instruct_goose.rollouts.rollout import finished
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.tasks.gallery import World, gallery_config, replaced, without_guards
from instruct_goose.tasks.probes import run_probes, tiny_world
from instruct_goose.training import trainer as training_trainer
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.experience import raw_advantages
from instruct_goose.training.token_log import record_tokens
from instruct_goose.training.trainer import RLHFTrainer

PROMPTS = ["", "a", "b c", "c", "a b", "b"]


class KeepTokens(Callback):
    "What a run directory holds in tokens.jsonl, in memory."

    def __init__(self):
        self.record = {}

    def on_iteration(self, trainer, experience, metrics):
        seen = record_tokens(trainer, experience, 4)
        self.record[metrics["iteration"]] = [
            checked_response(r) for r in json.loads(json.dumps(seen, allow_nan=False))
        ]


# --- random healthy runs ----------------------------------------------------------------------------------------------
USUAL = dict(
    steps=5,
    batch_size=32,
    epochs=2,
    minibatches=2,
    max_new_tokens=4,
    lr=0.01,
    value_lr=0.05,
    beta=0.05,
    device="cpu",
)
CHOICES: dict[str, list] = dict(
    advantage=[*ADVANTAGES],
    group_size=[1, 2, 4, 8],
    group_ddof=[0, 1],
    ratio_level=[*LEVELS],
    surrogate=[*SURROGATES],
    clip=[0.05, 0.2, 0.5],
    clip_high=[None, 0.28],
    dual_clip=[None, 1.5, 3.0],
    value_clip=[None, 0.2],
    vf_coef=[0.1, 0.5, 1.0],
    ent_coef=[0.0, 0.02],
    entropy_target=[None, 1.0],
    aggregation=[*AGGREGATES],
    importance_cap=[None, 1.2, 2.0],
    importance_floor=[None, 0.5],
    importance_level=[*LEVELS],
    importance_beyond=["cut", "drop"],
    beta=[0.0, 0.02, 0.2],
    kl_placement=["reward", "loss"],
    kl_estimator=[None, *ESTIMATORS],
    kl_gradient=[*KL_GRADIENTS],
    kl_target=[None, None, 0.5],
    ref_every=[None, None, 2],
    ref_mixup=[1.0, 0.5],
    epochs=[1, 2, 3],
    minibatches=[1, 2, 3, 4],
    micro_batch_size=[None, 5, 8],
    autocast=[None, None, "bfloat16"],
    lr=[0.001, 0.01, 0.03],
    value_lr=[None, 0.05],
    lr_schedule=["constant", "linear", "cosine"],
    weight_decay=[0.0, 0.1],
    max_grad_norm=[0.1, 1.0, 100.0],
    max_kl_to_old=[None, None, 0.05],
    warmup_steps=[0, 0, 2],
    reward_weighting=["raw", "raw", "scaled"],
    reward_scaling=[None, None, "batch", "running"],
    reward_clip=[None, 0.3],
    missing_eos_penalty=[None, 0.2],
    overlong_buffer=[None, 2],
    mask_truncated=[False, False, True],
    max_redraws=[0, 2],
    drop_flat_groups=[False, True],
    gamma=[1.0, 0.9, 0.0],
    lam=[0.0, 0.95, 1.0],
    whiten_advantages=[True, False],
    temperature=[0.7, 1.0, 1.3],
    stop_strings=[None, None, ("b",)],
    batch_size=[8, 32, 64],
    max_new_tokens=[1, 3, 6],
    recheck_every=[None, 2],
    seed=list(range(100)),
)


def random_settings(seed: int, most: int = 14) -> dict[str, Any]:
    "Up to so many settings, none of them the usual, that may be combined."
    dice = random.Random(seed)
    while True:
        names = dice.sample([*CHOICES], dice.randint(3, most))
        settings = USUAL | {name: dice.choice(CHOICES[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                RLHFConfig(**settings)
            except ValueError:
                continue
        return settings


def reward_of(texts: list[str]) -> list[float]:
    return [0.2 * text.count("a") - 0.1 * text.count("b") + 0.03 * len(text) for text in texts]


def a_run(
    settings: dict[str, Any], trainer: Callable = RLHFTrainer, prompts=PROMPTS, reward=reward_of
) -> tuple[list[dict], dict, dict]:
    "The log, the settings and the tokens of a small run."
    with warnings.catch_warnings(), torch_threads(1):
        warnings.simplefilter("ignore")
        model, tokenizer = tiny_world(seed=settings.get("seed", 0))
        config = RLHFConfig(**settings)
        kept = KeepTokens()
        made = trainer(model, None, config, tokenizer=tokenizer, callbacks=[kept])
        return (
            made.train(list(prompts), reward, progress=False),
            dataclasses.asdict(config),
            kept.record,
        )


def findings_on(seed: int) -> list[dict[str, str]]:
    "What the doctor says of a random healthy run, with the evidence."
    return [
        {"name": f.name, "severity": f.severity, "evidence": f.evidence}
        for f in diagnose(*a_run(random_settings(seed)))
    ]


# --- twenty bugs, written when the rules were fixed --------------------------------------------------------------------
class Bug(NamedTuple):
    "A bug, and what would be said of it rightly."

    wrong: str
    trainer: type = RLHFTrainer
    names: tuple[str, ...] = ()  # findings that name it
    consequences: tuple[str, ...] = ()  # findings that are true, and follow from it
    settings: dict[str, Any] = {}
    unforeseen: tuple[str, ...] = ()  # true consequences that were noted after the first run
    patch: Callable = nullcontext
    rewards: Callable = lambda reward: reward  # what is passed in place of the reward
    prompts: list = PROMPTS
    held_out: list | None = None


def after(method, change):
    "A trainer that changes what a method returns."

    def call(self, *args, **more):
        return change(self, getattr(RLHFTrainer, method)(self, *args, **more))

    return type("Broken", (RLHFTrainer,), {method: call})


def with_other(name, change, method="rollout"):
    "A trainer that changes one field of the rollout that a method returns."

    def changed(trainer, r):
        setattr(r, name, change(trainer, r))
        return r

    return after(method, changed)


def annotated_otherwise(name, change):
    "A trainer that changes one column of the annotations."
    return after(
        "annotate", lambda trainer, annotations: annotations._replace(**{name: change(annotations)})
    )


def updates_with(change):
    "A trainer that changes each minibatch before the update."

    class Broken(RLHFTrainer):
        def update(self, batch, is_first=False):
            self.made = 0 if is_first else self.made + 1
            change(self, batch)
            return super().update(batch, is_first)

    return Broken


def paid_otherwise(change):
    "A trainer that changes the rewards in place; advantages and returns follow."

    def changed(trainer, r):
        change(trainer, r)
        r.advantages, r.returns = raw_advantages(r, r.rewards, r.values, trainer.config)
        if trainer.config.whiten_advantages:
            r.advantages = whiten(r.advantages, r.mask)
        return r

    return after("advantages", changed)


def last_of(r):
    return torch.arange(len(r)), last_index(r.mask)


class LastTokenOut(RLHFTrainer):
    def loss(self, new, batch):
        short = copy.copy(batch)
        short.mask = batch.mask.clone()
        rows, last = last_of(batch)
        long = batch.mask.sum(-1) > 1
        short.mask[rows[long], last[long]] = False
        return super().loss(new, short)


class NarrowValueClip(RLHFTrainer):
    def loss(self, new, batch):
        with replaced(self.config, "value_clip", 0.02):
            return super().loss(new, batch)


def clamped_kl(trainer, r):
    r.rewards += trainer.beta * (r.old_logprobs - r.ref_logprobs).clamp(max=0.0) * r.mask


def free_end(trainer, r):
    r.rewards[last_of(r)] += trainer.beta * (r.old_logprobs - r.ref_logprobs)[last_of(r)]


def old_again(trainer, batch):
    if trainer.made >= trainer.config.minibatches:
        batch.old_logprobs = trainer.evaluate_tokens(batch).logprobs.detach()


def values_again(trainer, batch):
    if trainer.made >= trainer.config.minibatches:
        batch.values = trainer.evaluate_tokens(batch).values.detach()


def white_minibatch(trainer, batch):
    batch.advantages = whiten(batch.advantages, batch.mask)


class Averaged(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.slow = copy.deepcopy(self.agent)
        self.sampler = PolicySampler(self.slow, self.tokens)

    def optimize(self, experience):
        metrics = super().optimize(experience)
        with torch.no_grad():
            for s, p in zip(
                self.slow.model.parameters(), self.agent.model.parameters(), strict=True
            ):
                s.lerp_(p, 0.3)
        return metrics


class EightfoldRate(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        for group in self.optimizer.param_groups:
            group["lr"], group["initial_lr"] = 8 * group["lr"], 8 * group["initial_lr"]


class LastBlockOnly(RLHFTrainer):
    def __init__(self, *args, **more):
        def made(groups):
            return torch.optim.AdamW(
                [groups[0] | {"params": groups[0]["params"][-6:]}, *groups[1:]], weight_decay=0.0
            )

        super().__init__(*args, optimizer=made, **more)


def without_first_words(trainer, r):
    answers = [
        text.removeprefix(prompt).split()[1:]
        for prompt, text in zip(r.prompts, r.texts, strict=True)
    ]
    return [
        " ".join([prompt, *answer]).strip() or "it"
        for prompt, answer in zip(r.prompts, answers, strict=True)
    ]


class UsedTwice(RLHFTrainer):
    def rollout(self, prompts):
        if self.iteration % 2 == 0:
            self.kept = super().rollout(prompts)
        return copy.copy(self.kept)


def four_times_as_fast(config, iteration):
    return max(0.0, 1 - 4 * iteration / config.steps)


UNSEEN = {
    "each rollout twice": Bug(
        "an iteration in two takes the rollout of the one before",
        UsedTwice,
        ("same random numbers",),
        ("sampler mismatch", "KL estimate off", "nll off entropy"),
    ),
    "free end": Bug(
        "the last token pays nothing for its KL",
        paid_otherwise(free_end),
        ("KL penalty off", "score off"),
    ),
    "learning rate × 8": Bug(
        "each process multiplies the learning rate by their number",
        EightfoldRate,
        ("other step size",),
        (
            "large steps",
            "drift",
            "entropy collapse",
            "variety collapse",
            "length collapse",
            "never ends",
        ),
    ),
    "whitened per minibatch": Bug(
        "advantages are whitened once more in each minibatch",
        updates_with(white_minibatch),
        ("other rows learnt",),
    ),
    "old log-probabilities of the second epoch": Bug(
        "they are computed again before the second epoch",
        updates_with(old_again),
        ("other rows learnt",),
        ("large steps", "no clip"),
    ),
    "advantages within ±1": Bug(
        "advantages are clamped at ±1",
        with_other("advantages", lambda t, r: r.advantages.clamp(-1.0, 1.0), "advantages"),
        ("advantages off",),
        ("advantages of other rows",),
    ),
    "whole scores": Bug(
        "scores are rounded to whole numbers",
        with_other("scores", lambda t, r: r.scores.round(), "ask_rewards"),
        (),
        ("equal rewards",),
    ),
    "old log-probabilities in half precision": Bug(
        "they are rounded to sixteen bits",
        annotated_otherwise(
            "old_logprobs", lambda annotations: annotations.old_logprobs.half().float()
        ),
        ("noisy forward", "sampler mismatch"),
    ),
    "sampler is an average": Bug(
        "the sampler has a running average of the policy's weights",
        Averaged,
        ("sampler mismatch", "sampler left behind"),
        ("KL estimate off", "nll off entropy", "negative KL"),
    ),
    "mean subtracted": Bug(
        "the mean of the iteration's scores is subtracted from them",
        with_other("scores", lambda t, r: r.scores - r.scores.mean(), "score"),
        ("score off",),
        ("reward of other rows",),
    ),
    "last block only": Bug(
        "the optimizer knows six tensors of the policy", LastBlockOnly, ("parts stand still",)
    ),
    "narrow value clip": Bug(
        "the value clip is 0.02", NarrowValueClip, ("value gradient off",), ("values stand still",)
    ),
    "only what was good": Bug(
        "advantages below 0 are set to 0",
        with_other("advantages", lambda t, r: r.advantages.clamp(0.0, 9.0), "advantages"),
        ("advantages off", "advantages of other rows"),
    ),
    "last token outside the loss": Bug(
        "the loss leaves out the last token of each response",
        LastTokenOut,
        ("token gradient off", "value gradient off"),
    ),
    "last token of the prompt": Bug(
        "a prompt is cut to its last token",
        after("encode", lambda t, q: type(q)(q.ids[:, -1:], q.mask[:, -1:])),
        ("prompts cut",),
        ("prompts lost",),
    ),
    "schedule four times as fast": Bug(
        "the schedule moves with each update",
        RLHFTrainer,
        ("other schedule",),
        settings=dict(lr_schedule="linear"),
        patch=lambda: replaced(training_trainer, "lr_factor", four_times_as_fast),
    ),
    "0 without an end": Bug(
        "a response that is cut off scores 0",
        with_other("scores", lambda t, r: r.scores * finished(r, t.eos_ids), "score"),
        (),
        ("reward of other rows",),
    ),
    "first word lost": Bug(
        "the scored text lacks the response's first word",
        with_other("texts", without_first_words),
        ("other text scored",),
    ),
    "KL never below 0": Bug(
        "the KL charge of a token is clamped at 0", paid_otherwise(clamped_kl), ("KL penalty off",)
    ),
    "old values of the second epoch": Bug(
        "they are computed again before the second epoch", updates_with(values_again)
    ),
}


def visited(world: World, settings: RLHFConfig, trainer: type[RLHFTrainer]) -> list[str]:
    "Train in the gallery's world, and ask the doctor."
    lm = copy.deepcopy(world.lm)
    kept = KeepTokens()
    agent = Agent(copy.deepcopy(lm), value_model="copy" if settings.advantage == "gae" else None)
    with (
        torch_threads(1),
        without_guards() if trainer is not RLHFTrainer else nullcontext(),
    ):
        made = trainer(
            agent,
            create_reference_model(lm),
            dataclasses.replace(settings, recheck_every=1),
            tokenizer=world.tokenizer,
            callbacks=[kept],
        )
        metrics = made.train(world.prompts, world.reward_model, progress=False)
    return [f.name for f in diagnose(metrics, dataclasses.asdict(settings), kept.record)]


def doctor_says(name: str, world: World, seed: int) -> list[str]:
    "The findings on a run of the gallery with this bug."
    bug = UNSEEN[name]
    with bug.patch():
        return visited(world, gallery_config(seed=seed, **bug.settings), bug.trainer)


def probes_say(name: str) -> list[str]:
    "The probes that fail with this bug, or end in an error."
    bug = UNSEEN[name]
    with bug.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [r.name for r in run_probes(bug.trainer) if r.passed is not True]


def record() -> dict:
    "Twenty bugs seen by doctor and probes; 200 healthy runs."
    worlds = [gallery_world(seed) for seed in (0, 1)]
    bugs = {}
    for name, bug in UNSEEN.items():
        found = [doctor_says(name, world, seed) for seed, world in enumerate(worlds)]
        bugs[name] = {
            "wrong": bug.wrong,
            "names": bug.names,
            "consequences": bug.consequences,
            "found": found,
            "probes": probes_say(name),
        }
        print(name, found, bugs[name]["probes"], flush=True)
    return {
        "bugs": bugs,
        "healthy": {
            "runs": 200,
            "found": {seed: found for seed in range(200) if (found := findings_on(seed))},
        },
    }
