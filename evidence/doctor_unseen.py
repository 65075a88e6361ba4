"""Random healthy runs shown to the doctor, and twenty bugs that its rules were not made for: `python evidence/run.py doctor_unseen`.

The rules were fixed first. With each bug stands which findings would name it and which would be true consequences of it; any other
finding is a false name. The probes climb their ladder with the same bug.
"""
import copy
import math
import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from attacks import Attack, KeepTokens, findings, visited
from lesson_code import lesson_module

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS
from instruct_goose.objective.masks import AGGREGATES, last_index, whiten
from instruct_goose.objective.policy_loss import LEVELS, SURROGATES
from instruct_goose.supervised.fit import torch_threads
from instruct_goose.training import rollout as training_rollout
from instruct_goose.training import trainer as training_trainer
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.rollout import finished
from instruct_goose.training.sampling import PolicySampler
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.training.updates import advantages_of, clip_gradients
from instruct_goose.worlds.probes import run_probes, tiny_world

gallery = lesson_module("learn/22_bug_hunt")
replaced = gallery.replaced
PROMPTS = ["", "a", "b c", "c", "a b", "b"]


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


# --- bugs, written when the rules were fixed: twenty of thirty-two, drawn by chance before the first run ---------------
def again(trainer, r):
    "Advantages and returns of these rewards, whitened as usual."
    r.advantages, r.returns = advantages_of(r, trainer.config)
    if trainer.config.whiten_advantages: r.advantages = whiten(r.advantages, r.mask)
    return r


def last_of(r): return torch.arange(len(r)), last_index(r.mask)


def loss_with(**settings):
    "A trainer whose loss has other settings."
    class Other(RLHFTrainer):
        def loss(self, now, batch):
            with ExitStack() as stack:
                for name, value in settings.items(): stack.enter_context(replaced(self.config, name, value(batch) if callable(value) else value))
                return super().loss(now, batch)
    return Other


def advantages_then(change):
    "A trainer that changes the rollout when its advantages are there."
    class Other(RLHFTrainer):
        def advantages(self, rollout): return change(self, super().advantages(rollout))
    return Other


def updates_with(change):
    "A trainer that changes each minibatch before the update."
    class Other(RLHFTrainer):
        def update(self, batch, first=False):
            self.made = 0 if first else self.made + 1
            change(self, batch)
            return super().update(batch, first)
    return Other


def optimizer_with(change):
    "A trainer whose optimizer is changed once it is made."
    class Other(RLHFTrainer):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            change(self)
    return Other


class LastTokenOut(RLHFTrainer):
    def loss(self, now, batch):
        short = copy.copy(batch)
        short.mask = batch.mask.clone()
        rows, last = last_of(batch)
        long = batch.mask.sum(-1) > 1
        short.mask[rows[long], last[long]] = False
        return super().loss(now, short)


def bootstrapped(trainer, r):
    r.rewards[last_of(r)] += trainer.config.gamma * r.values[last_of(r)] * ~finished(r, trainer.eos_ids)
    return again(trainer, r)


def clamped_kl(trainer, r):
    r.rewards += trainer.beta * (r.old_logprobs - r.ref_logprobs).clamp(max=0.) * r.mask
    return again(trainer, r)


def free_end(trainer, r):
    r.rewards[last_of(r)] += trainer.beta * (r.old_logprobs - r.ref_logprobs)[last_of(r)]
    return again(trainer, r)


def score_fades(trainer, r):
    r.rewards[last_of(r)] += r.scores * (.95 ** r.mask.sum(-1) - 1)
    return again(trainer, r)


def white_returns(trainer, r):
    r.returns = whiten(r.returns, r.mask)
    return r


def clamped_advantages(low, high):
    def change(trainer, r):
        r.advantages = r.advantages.clamp(low, high)
        return r
    return change


class HalfPrecision(RLHFTrainer):
    def annotate(self, rollout):
        r = super().annotate(rollout)
        r.old_logprobs = r.old_logprobs.half().float()
        return r


def old_again(trainer, batch):
    if trainer.made >= trainer.config.minibatches: batch.old_logprobs = trainer.now(batch).logprobs.detach()


def values_again(trainer, batch):
    if trainer.made >= trainer.config.minibatches: batch.values = trainer.now(batch).values.detach()


def white_minibatch(trainer, batch): batch.advantages = whiten(batch.advantages, batch.mask)


class AnotherReference(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.ref_model.parameters(): p += .02 * torch.randn(p.shape, generator=g)


class MeanSubtracted(RLHFTrainer):
    def score(self, rollout, reward_fn):
        r = super().score(rollout, reward_fn)
        r.scores = r.scores - r.scores.mean()
        return r


class BatchSpread(RLHFTrainer):
    def advantages(self, rollout):
        with replaced(self.config, "advantage", "group_mean_batch_std"): return super().advantages(rollout)


class UnfinishedZero(RLHFTrainer):
    def score(self, rollout, reward_fn):
        r = super().score(rollout, reward_fn)
        r.scores = r.scores * finished(r, self.eos_ids)
        return r


class Averaged(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.slow = copy.deepcopy(self.agent)
        self.sampler = PolicySampler(self.slow, self.tokens)

    def optimize(self, rollout):
        found = super().optimize(rollout)
        with torch.no_grad():
            for s, p in zip(self.slow.model.parameters(), self.agent.model.parameters(), strict=True): s.lerp_(p, .3)
        return found


class StepsForPieces(RLHFTrainer):
    def update(self, batch, first=False):
        return [super(StepsForPieces, self).update(batch[i:i + 12], first and not i) for i in range(0, len(batch), 12)][-1]


def eightfold(trainer):
    for group in trainer.optimizer.param_groups: group["lr"], group["initial_lr"] = 8 * group["lr"], 8 * group["initial_lr"]


def heavy_decay(trainer):
    for group in trainer.optimizer.param_groups: group["weight_decay"] = .5


class LastBlockOnly(RLHFTrainer):
    def __init__(self, *args, **more):
        def made(groups): return torch.optim.AdamW([groups[0] | {"params": groups[0]["params"][-6:]}, *groups[1:]], weight_decay=0.)
        super().__init__(*args, optimizer=made, **more)


class LastTokenOfThePrompt(RLHFTrainer):
    def encode(self, prompts):
        q = super().encode(prompts)
        return type(q)(q.ids[:, -1:], q.mask[:, -1:])


class FirstWordLost(RLHFTrainer):
    def rollout(self, prompts):
        r = super().rollout(prompts)
        answers = [text.removeprefix(prompt).split()[1:] for prompt, text in zip(r.prompts, r.texts, strict=True)]
        r.texts = [(" ".join([prompt, *answer])).strip() or "it" for prompt, answer in zip(r.prompts, answers, strict=True)]
        return r


def half_greedy(p, k=None):
    best = torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1.)
    return torch.where((torch.arange(len(p)) % 2 == 0)[:, None], best, p)


class UsedTwice(RLHFTrainer):
    def rollout(self, prompts):
        if self.iteration % 2 == 0: self.kept = super().rollout(prompts)
        return copy.copy(self.kept)


class WholeScores(RLHFTrainer):
    def judge(self, rollout, reward_fn, kind="text"): return super().judge(rollout, reward_fn, kind).round()


def clipped_by_value(agent, max_norm):
    norms = clip_gradients(agent, 1e9)
    torch.nn.utils.clip_grad_value_([p for p in agent.parameters() if p.grad is not None], 1.)
    return norms


def four_times_as_fast(optimizer, config, iteration):
    for group in optimizer.param_groups: group["lr"] = group["initial_lr"] * max(0., 1 - 4 * iteration / config.steps)


class EntropyOfTheTokens(RLHFTrainer):
    def loss(self, now, batch): return super().loss(now._replace(entropy=-now.logprobs), batch)


def at(name, new): return lambda: replaced(training_trainer, name, new)


WRITTEN = {
    "last token outside the loss": Attack("the loss leaves out the last token of each response", LastTokenOut, ("pull off", "value pull off")),
    "whitened per minibatch": Attack("advantages are whitened once more in each minibatch", updates_with(white_minibatch), ("other rows learnt",)),
    "value behind a cut": Attack("a response that is cut off gets the value of its last state on top", advantages_then(bootstrapped), ("score off",)),
    "KL never below 0": Attack("the KL charge of a token is clamped at 0", advantages_then(clamped_kl), ("KL charge off",)),
    "padded length": Attack("a response's sum is divided by the width of the batch", loss_with(aggregation="sequence_sum", max_new_tokens=lambda b: b.mask.shape[1]),
                            ("pull off",), ("policy loss scale",), settings=dict(preset="grpo")),
    "old log-probabilities in half precision": Attack("they are rounded to sixteen bits", HalfPrecision, ("noisy forward", "sampler mismatch")),
    "clip of the logarithm": Attack("log ρ is clipped at ±0.2, not ρ at 1 ± 0.2", loss_with(clip=1 - math.exp(-.2), clip_high=math.exp(.2) - 1), ("pull off",)),
    "old log-probabilities of the second epoch": Attack("they are computed again before the second epoch", updates_with(old_again), ("other rows learnt",),
                                                        ("large steps", "no clip")),
    "whitened returns": Attack("the values learn whitened returns", advantages_then(white_returns), ("returns off",), ("value loss off", "other discount")),
    "another reference": Attack("the reference is another checkpoint", AnotherReference, ("start KL",), ("drift",)),
    "mean subtracted": Attack("the mean of the iteration's scores is subtracted from them", MeanSubtracted, ("score off",), ("reward of other rows",)),
    "spread of the batch": Attack("GRPO's advantages are divided by the spread of all scores", BatchSpread, ("advantages off",), ("advantages of other rows",),
                                  settings=dict(preset="grpo")),
    "0 without an end": Attack("a response that is cut off scores 0", UnfinishedZero, (), ("reward of other rows",)),
    "sampler is an average": Attack("the sampler has a running average of the policy's weights", Averaged, ("sampler mismatch", "sampler left behind"),
                                    ("KL estimate off", "nll off entropy", "negative KL")),
    "a step for each piece": Attack("the optimizer steps after every micro-batch", StepsForPieces, ("optimizer steps",), ("other rows learnt", "large steps", "drift")),
    "learning rate × 8": Attack("each process multiplies the learning rate by their number", optimizer_with(eightfold), ("other step size",),
                                ("large steps", "drift", "entropy collapse", "variety collapse", "length collapse", "never ends")),
    "heavy weight decay": Attack("the optimizer's weight decay is 0.5", optimizer_with(heavy_decay), ("other step size",)),
    "last block only": Attack("the optimizer knows six tensors of the policy", LastBlockOnly, ("parts stand still",)),
    "last token of the prompt": Attack("a prompt is cut to its last token", LastTokenOfThePrompt, ("prompts cut",), ("prompts lost",)),
    "first word lost": Attack("the scored text lacks the response's first word", FirstWordLost, ("other text scored",)),
    "score fades": Attack("a score is multiplied by 0.95 for each token", advantages_then(score_fades), ("score off",)),
    "narrow value clip": Attack("the value clip is 0.02", loss_with(value_clip=.02), ("value pull off",), ("values stand still")),
    "half greedy": Attack("every second response takes the likeliest tokens", RLHFTrainer, ("nll off entropy",), ("KL estimate off"),
                          patch=lambda: replaced(training_rollout, "truncated", half_greedy)),
    "each rollout twice": Attack("an iteration in two takes the rollout of the one before", UsedTwice, ("same random numbers",),
                                 ("sampler mismatch", "KL estimate off", "nll off entropy")),
    "free end": Attack("the last token pays nothing for its KL", advantages_then(free_end), ("KL charge off", "score off")),
    "whole scores": Attack("scores are rounded to whole numbers", WholeScores, (), ("equal rewards",)),
    "clipped by value": Attack("each number of a gradient is cut at ±1, not its norm", RLHFTrainer, ("gradient not clipped",),
                               patch=at("clip_gradients", clipped_by_value)),
    "old values of the second epoch": Attack("they are computed again before the second epoch", updates_with(values_again)),
    "schedule four times as fast": Attack("the schedule moves with each update", RLHFTrainer, ("other schedule",), settings=dict(lr_schedule="linear"),
                                          patch=at("set_learning_rate", four_times_as_fast)),
    "advantages within ±1": Attack("advantages are clamped at ±1", advantages_then(clamped_advantages(-1., 1.)), ("advantages off",), ("advantages of other rows",)),
    "only what was good": Attack("advantages below 0 are set to 0", advantages_then(clamped_advantages(0., 9.)), ("advantages off", "advantages of other rows")),
    "entropy of the tokens": Attack("the entropy bonus takes −log π of the sampled tokens", EntropyOfTheTokens, ("entropy bonus off", "pull off"),
                                    settings=dict(ent_coef=.02)),
}
UNSEEN = {name: WRITTEN[name] for name in random.Random(2026).sample(sorted(WRITTEN), 20)}


def doctor_says(name: str, world: dict, seed: int) -> list[str]:
    "The findings on a run of the gallery with this bug."
    bug = UNSEEN[name]
    with bug.patch(): return visited(world, gallery.gallery_config(seed=seed, **bug.settings), bug.trainer)


def probes_say(name: str) -> list[str]:
    "The probes that fail with this bug, or end in an error."
    bug = UNSEEN[name]
    with bug.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [r.name for r in run_probes(bug.trainer) if r.passed is not True]


def record() -> dict:
    "Twenty bugs seen by doctor and probes; 200 healthy runs."
    doctor, bugs = findings(UNSEEN, doctor_says, (0, 1)), {}
    for name, bug in UNSEEN.items():
        bugs[name] = {"wrong": bug.wrong, "names": bug.names, "consequences": bug.consequences, "found": doctor[name], "probes": probes_say(name)}
        print(name, bugs[name]["probes"], flush=True)
    return {"bugs": bugs, "healthy": {"runs": 200, "found": {seed: found for seed in range(200) if (found := findings_on(seed))}}}
