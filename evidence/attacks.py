"""Sixteen bugs beyond the gallery, and healthy runs with unusual settings: `python evidence/run.py doctor`.

With each bug stands, written down before its first run, which findings would name it and which would be true consequences of it. The rules
that recompute were made after these bugs; `doctor_unseen.py` has those that came after the rules.
"""
import copy
import json
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lesson_code import lesson_module

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.objective.advantages import gae
from instruct_goose.objective.group import PRESETS
from instruct_goose.objective.masks import last_index, whiten
from instruct_goose.runs.microscope import as_response, seen_tokens
from instruct_goose.supervised.fit import torch_threads
from instruct_goose.training import rollout as training_rollout
from instruct_goose.training.callbacks import Callback, RecheckRewards
from instruct_goose.training.trainer import RLHFTrainer

gallery = lesson_module("learn/22_bug_hunt")
replaced, top_k = gallery.replaced, gallery.top_k
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Attack:
    "A bug, and what would be said of it rightly."
    wrong: str
    trainer: type = RLHFTrainer
    names: tuple[str, ...] = ()         # findings that name it
    consequences: tuple[str, ...] = ()  # findings that are true, and follow from it
    patch: Callable = nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict)


# --- prompts, responses, scores ---------------------------------------------------------------------------------------
class SameDice(RLHFTrainer):
    def rollout(self, prompts):
        self.sampling.manual_seed(0)
        return super().rollout(prompts)


class PromptOfAnotherRow(RLHFTrainer):
    def rollout(self, prompts):
        r = super().rollout(prompts)
        answers = [text.removeprefix(prompt) for prompt, text in zip(r.prompts, r.texts, strict=True)]
        r.texts = [(prompt + answer).strip() or "it" for prompt, answer in zip(r.prompts[1:] + r.prompts[:1], answers, strict=True)]
        return r


class ThreeWords(RLHFTrainer):
    def rollout(self, prompts):
        r = super().rollout(prompts)
        r.texts = [" ".join(text.split()[:3]) or "it" for text in r.texts]
        return r


class Clamped(RLHFTrainer):
    def judge(self, rollout, reward_fn, kind="text"): return super().judge(rollout, reward_fn, kind).clamp(-.1, .1)


class EndOutsideTheMask(RLHFTrainer):
    def rollout(self, prompts):
        r = super().rollout(prompts)
        longer = r.mask.sum(-1) > 1
        r.mask[torch.arange(len(r))[longer], last_index(r.mask)[longer]] = False
        return r


# --- the KL and the reference -----------------------------------------------------------------------------------------
class ChargedTwice(RLHFTrainer):
    def loss(self, now, batch):
        with replaced(self.config, "kl_placement", "loss"): return super().loss(now, batch)


class InBits(RLHFTrainer):
    def annotate(self, rollout):
        r = super().annotate(rollout)
        r.ref_logprobs = r.ref_logprobs / .6931
        return r


class ReferenceFollows(RLHFTrainer):
    @torch.no_grad()
    def optimize(self, rollout):
        with torch.enable_grad(): found = super().optimize(rollout)
        for ref, p in zip(self.ref_model.parameters(), self.agent.model.parameters(), strict=True): ref.lerp_(p, .5)
        return found


class TheWrongWay(RLHFTrainer):
    def step(self, prompts, reward_fn):
        before = self.beta
        metrics = super().step(prompts, reward_fn)
        self.beta = before * before / self.beta
        return metrics


# --- advantages, loss, minibatches ------------------------------------------------------------------------------------
class ScoreOnEveryToken(RLHFTrainer):
    def advantages(self, rollout):
        r = super().advantages(rollout)
        r.rewards = r.rewards + r.mask * r.scores[:, None]
        r.rewards[torch.arange(len(r)), last_index(r.mask)] -= r.scores
        r.advantages, r.returns = gae(r.rewards, r.values, r.mask, self.config.gamma, self.config.lam)
        r.advantages = whiten(r.advantages, r.mask)
        return r


class ReturnsAsAdvantages(RLHFTrainer):
    def advantages(self, rollout):
        r = super().advantages(rollout)
        r.advantages = whiten(r.returns, r.mask)
        return r


class ValuesOneTokenLate(RLHFTrainer):
    def annotate(self, rollout):
        r = super().annotate(rollout)
        r.values = r.values.roll(1, 1) * r.mask
        return r


class FirstMinibatchOnly(RLHFTrainer):
    def optimize(self, rollout):
        with replaced(self, "shuffling", None), replaced(type(rollout), "minibatches", lambda r, n, _: [r[:len(r) // n]] * n):
            return super().optimize(rollout)


class SlippedInTheMinibatch(RLHFTrainer):
    def update(self, batch, first=False):
        batch.advantages = batch.advantages.roll(1, 0) * batch.mask
        return super().update(batch, first)


class GroupsInterleaved(RLHFTrainer):
    def advantages(self, rollout):
        r, g = rollout, self.config.group_size
        order = torch.arange(len(r)).view(g, -1).T.reshape(-1)  # (prompt, answer) read as (answer, prompt)
        r = super().advantages(r)
        mixed = super().advantages(r[order])
        r.advantages = torch.empty_like(r.advantages)
        r.advantages[order] = mixed.advantages
        return r


@contextmanager
def the_larger_of_the_two():
    "max(ρÂ, clip(ρ)Â) in the place of min."
    with replaced(torch, "minimum", torch.maximum): yield


ATTACKS = {
    "same dice in every iteration": Attack("the generator is seeded again before each rollout", SameDice),
    "scored with another row's prompt": Attack("the text that is scored is a response behind the prompt of the next row", PromptOfAnotherRow),
    "three words are scored": Attack("the text that is scored is cut after three words", ThreeWords),
    "scores clamped": Attack("scores beyond ±0.1 are cut", Clamped, consequences=("small rewards",)),
    "end outside the mask": Attack("the end token does not count as part of the response", EndOutsideTheMask, names=("ends unseen",)),
    "KL charged twice": Attack("the KL is in the reward, and again in the loss", ChargedTwice),
    "reference in bits": Attack("the reference's log-probabilities have base 2", InBits, consequences=("KL estimate off",)),
    "reference follows": Attack("after each iteration the reference goes half the way to the policy", ReferenceFollows, names=("reference is the policy",)),
    "β moves the wrong way": Attack("β falls when the KL is above its target", TheWrongWay, consequences=("drift", "large steps", "entropy collapse"),
                                    settings=dict(kl_target=1.)),
    "score on every token": Attack("every token of a response gets its score", ScoreOnEveryToken, consequences=("reward scale",)),
    "returns as advantages": Attack("no value is subtracted", ReturnsAsAdvantages, names=("advantages of other rows",)),
    "values one token late": Attack("GAE reads the value of the token before", ValuesOneTokenLate, names=("value loss off",)),
    "first minibatch only": Attack("all updates of an iteration see the same half of it", FirstMinibatchOnly),
    "slipped in the minibatch": Attack("in each minibatch a row is weighed with the advantages of the row before", SlippedInTheMinibatch,
                                       names=("advantages of other rows", "policy loss direction")),
    "groups interleaved": Attack("the responses to one prompt are compared with those to others", GroupsInterleaved,
                                 names=("advantages of other rows",), settings=dict(preset="grpo")),
    "the larger of the two": Attack("the surrogate is a maximum, not a minimum", names=("no clip",),
                                    consequences=("large steps", "drift", "entropy collapse"), patch=the_larger_of_the_two),
}

# --- healthy, and unusual: what the settings ask for is no finding ----------------------------------------------------
UNUSUAL = {
    "vf_coef=0": dict(vf_coef=0.), "max_new_tokens=1": dict(max_new_tokens=1), "bfloat16": {}, "lr=0": {}, "plain SGD": {}, "one prompt": {},
    "top_k=5": {}, "beta=0": dict(beta=0.), "beta=5": dict(beta=5.), "epochs=1": dict(epochs=1), "minibatches=1": dict(minibatches=1),
    "one update": dict(epochs=1, minibatches=1), "gamma=0.9": dict(gamma=.9), "lam=0": dict(lam=0.), "lam=1": dict(lam=1.),
    "no whitening": dict(whiten_advantages=False), "no value clip": dict(value_clip=None), "micro_batch_size=4": dict(micro_batch_size=4),
    "ent_coef=0.02": dict(ent_coef=.02), "KL in the loss": dict(kl_placement="loss"), "kl_target=1": dict(kl_target=1.),
    "temperature=0.7": dict(temperature=.7), "temperature=1.3": dict(temperature=1.3), "importance_cap=2": dict(importance_cap=2.),
    "cosine": dict(lr_schedule="cosine"), "weight_decay=0.1": dict(weight_decay=.1), "8 responses": dict(batch_size=8, lr=3e-4),
    "lr=1e-6": dict(lr=1e-6), "groups of 2": dict(preset="grpo", group_size=2),
    **{f"preset {name}": dict(preset=name) for name in PRESETS},
}
UNUSUAL["preset cispo"] = dict(preset="cispo", beta=.08, kl_placement="reward", lr=4e-4)  # at the gallery's rate it drifts, which is true


class KeepTokens(Callback):
    "What a run directory holds in tokens.jsonl, in memory."
    def __init__(self): self.record = {}

    def on_iteration(self, trainer, rollout, metrics):
        seen = seen_tokens(trainer.now, rollout, trainer.config, trainer.tokenizer, 4, trainer.loss)
        self.record[metrics["iteration"]] = [as_response(r) for r in json.loads(json.dumps(seen, allow_nan=False))]


def attacked(name: str, world: dict, seed: int) -> list[str]:
    "The findings on a run with this bug."
    attack = ATTACKS[name]
    settings = gallery.gallery_config(seed=seed, **attack.settings)
    with attack.patch(): return visited(world, settings, attack.trainer)


def unusual(name: str, world: dict, seed: int) -> list[str]:
    "The findings on a healthy run."
    settings, more, prompts, asked, patch = gallery.gallery_config(seed=seed, **UNUSUAL[name]), {}, world["data"].prompts, {}, nullcontext()
    if name == "lr=0": more, asked = {"optimizer": lambda groups: torch.optim.SGD([g | {"lr": 0.} for g in groups])}, {"lr": 0.}
    if name == "plain SGD": more = {"optimizer": lambda groups: torch.optim.SGD([g | {"lr": .05} for g in groups])}
    if name == "one prompt": prompts = ["the film"]
    if name == "top_k=5": asked, patch = {"top_k": 5}, replaced(training_rollout, "truncated", top_k)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    with patch: return visited(world, settings, RLHFTrainer, prompts, dtype, asked, **more)


def visited(world, settings, trainer, prompts=None, dtype=torch.float32, asked=None, **more) -> list[str]:
    "Train, and ask the doctor."
    judge, lm = world["reward_model"], copy.deepcopy(world["lm"]).to(dtype)
    agent = Agent(copy.deepcopy(lm), value_model="copy" if settings.advantage == "gae" else None)
    with torch_threads(1), gallery.without_guards() if trainer is not RLHFTrainer else nullcontext():
        kept = KeepTokens()
        made = trainer(agent, create_reference_model(lm), settings, tokenizer=world["tokenizer"], callbacks=[RecheckRewards(judge), kept], **more)
        metrics = made.train(prompts or world["data"].prompts, judge, progress=False)
    return [f.name for f in diagnose(metrics, asdict(settings) | (asked or {}), kept.record)]


def findings(names, look: Callable, seeds) -> dict[str, list]:
    "By name and seed, what the doctor found."
    found = {name: [] for name in names}
    for seed in seeds:
        world = gallery.make_world(seed)
        for name in names:
            found[name].append(look(name, world, seed))
            print(f"seed {seed}, {name}: {', '.join(found[name][-1])}", flush=True)
    return found


def record() -> dict:
    "Every attack and every unusual setting: the doctor's findings."
    attacks, healthy = findings(ATTACKS, attacked, SEEDS), findings(UNUSUAL, unusual, SEEDS)
    told = {n: {"wrong": a.wrong, "names": a.names, "consequences": a.consequences, "found": attacks[n]} for n, a in ATTACKS.items()}
    return {"attacks": told, "healthy": {n: {"settings": s, "found": healthy[n]} for n, s in UNUSUAL.items()}}
