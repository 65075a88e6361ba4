"""Twenty-four more bugs, shown to the doctor and to the probes: `python evidence/run.py doctor_bugs`.

The rules were fixed first. With each bug stands which findings would name it, and which would be
true consequences of it; any other finding is a false name. The bugs are of other kinds than those
of `doctor_unseen.py` and of the failure gallery. `python evidence/doctor_bugs.py --only NAME` shows
single bugs.
"""

import argparse
import copy
import dataclasses
import warnings
from collections import Counter

import torch
from doctor_unseen import Bug, KeepTokens, after, annotated_otherwise, updates_with
from gallery_world import gallery_world
from torch import nn

from instruct_goose.core.random import torch_threads
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.objective.masks import whiten
from instruct_goose.tasks.gallery import World, gallery_config, replaced, without_guards
from instruct_goose.tasks.probes import run_probes
from instruct_goose.training.trainer import RLHFTrainer

GROUPS = {"advantage": "group_mean_std", "group_size": 4}


class ReferenceIsThePolicy(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.ref_model = self.agent.model


def one_late(values):
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)


class BetaBackwards(RLHFTrainer):
    def advance(self, experience, metrics):
        before = self.beta
        more = super().advance(experience, metrics)
        self.beta = before * before / self.beta
        return more


class SwappedBounds(RLHFTrainer):
    def loss(self, new, batch):
        low, high = self.config.clip, self.config.clip_high
        with replaced(self.config, "clip", high), replaced(self.config, "clip_high", low):
            return super().loss(new, batch)


class HalfInTheLoss(RLHFTrainer):
    def loss(self, new, batch):
        return super().loss(new._replace(logprobs=new.logprobs.bfloat16().float()), batch)


class NotClipped(RLHFTrainer):
    def update(self, batch, is_first=False):
        with replaced(self.config, "max_grad_norm", 1e9):
            return super().update(batch, is_first)


def tiled(trainer, rollout):
    "Responses in the order of `repeat`, not of `repeat_interleave`."
    rows = torch.arange(len(rollout)).view(-1, trainer.config.group_size).T.reshape(-1)
    return rollout[rows]


class AttentionCutOff(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)

        def cut(module, inputs, output):
            return tuple(x.detach() if torch.is_tensor(x) else x for x in output)

        self.agent.model.transformer.h[0].attn.register_forward_hook(cut)


def white_returns(trainer, experience):
    experience.returns = experience.advantages + experience.values
    return experience


class OptimizerOfACopy(RLHFTrainer):
    "It is exchanged after `train` has checked it: the check refuses one of a copy."

    def optimize(self, experience):
        group = self.optimizer.param_groups[0]
        if self.iteration == 0:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        return super().optimize(experience)


class SecondEpochLost(RLHFTrainer):
    def run_epochs(self, experience):
        with replaced(self.config, "epochs", 1):
            return super().run_epochs(experience)


def twice(reward):
    "Two functions that were to score two things, and share the last one."

    def truth(texts):
        return [len(set(text.split())) / 10 for text in texts]

    def style(texts):
        return [len(set(text.split())) / 10 for text in texts]

    return [truth, style]


class OneNoiseForAll(RLHFTrainer):
    def generate(self, prompts, n, generator):
        if generator is None:
            return super().generate(prompts, n, generator)
        state = generator.get_state()
        rollouts = []
        for prompt in prompts:
            for _ in range(n):
                generator.set_state(state)
                rollouts.append(super().generate([prompt], 1, generator))
        torch.rand(1, generator=generator)
        return (
            type(rollouts[0]).concat(rollouts)
            if hasattr(rollouts[0], "concat")
            else joined(rollouts)
        )


def joined(rollouts):
    from instruct_goose.rollouts.rollout import concat

    return concat(rollouts, 0)


def absolute(trainer, experience):
    experience.advantages = experience.advantages.abs()
    return experience


class SwappedRates(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        first, second = self.optimizer.param_groups[:2]
        for name in ("lr", "initial_lr"):
            first[name], second[name] = second[name], first[name]
        self.schedule.base_lrs = [group["lr"] for group in self.optimizer.param_groups]


def not_centred(trainer, experience):
    raw = experience.returns - experience.values
    experience.advantages = whiten(raw, experience.mask, shift_mean=False)
    return experience


def advantages_as_target(trainer, batch):
    batch.returns = batch.advantages


class LastPieceLost(RLHFTrainer):
    def update(self, batch, is_first=False):
        self.pieces = -(-len(batch) // self.config.micro_batch_size)
        self.seen = 0
        return super().update(batch, is_first)

    def loss(self, new, batch):
        value, parts = super().loss(new, batch)
        self.seen += 1
        return (0 * value if self.seen == self.pieces else value), parts


class AdamMadeAnew(RLHFTrainer):
    def optimize(self, experience):
        self.optimizer.state.clear()
        return super().optimize(experience)


class EntropyDetached(RLHFTrainer):
    def loss(self, new, batch):
        return super().loss(new._replace(entropy=new.entropy.detach()), batch)


class ScoresOfTheIterationBefore(RLHFTrainer):
    def score(self, rollout, reward_fn):
        rollout = super().score(rollout, reward_fn)
        now = rollout.scores
        rollout.scores = getattr(self, "before", now)
        self.before = now
        return rollout


class WeightsPulledToZero(RLHFTrainer):
    def loss(self, new, batch):
        value, parts = super().loss(new, batch)
        squares = sum(p.square().sum() for p in self.agent.model.parameters())
        return value + 0.03 * squares, parts


def steps_too_far():
    return ("large steps", "drift", "entropy collapse", "no clip", "variety collapse")


BUGS = {
    "adapters on in the reference": Bug(
        "the reference is computed with the policy's own weights",
        ReferenceIsThePolicy,
        ("reference is the policy", "reference moves"),
        steps_too_far(),
    ),
    "values one token late": Bug(
        "V of a state is read at the token behind it",
        annotated_otherwise("values", lambda notes: one_late(notes.values)),
        ("values of one state",),
        ("value gradient off", "value loss off", "harmful values"),
    ),
    "dropout in the critic": Bug(
        "values are computed with noise",
        annotated_otherwise(
            "values", lambda notes: notes.values + 0.3 * torch.randn_like(notes.values)
        ),
        ("values of one state",),
        unforeseen=("value loss off",),
    ),
    "beta backwards": Bug(
        "the adaptive β falls where it should rise",
        BetaBackwards,
        ("other beta",),
        steps_too_far(),
        {"kl_target": 0.3},
    ),
    "bounds swapped": Bug(
        "the clip is 0.28 below and 0.2 above",
        SwappedBounds,
        ("clip bounds off", "token gradient off"),
        settings={"clip": 0.2, "clip_high": 0.28},
    ),
    "half precision in the loss": Bug(
        "log π is rounded to bfloat16 in the loss",
        HalfInTheLoss,
        ("token gradient rounded", "token gradient off"),
    ),
    "not clipped": Bug(
        "the gradient's norm is never clipped",
        NotClipped,
        ("gradient not clipped",),
        settings={"max_grad_norm": 0.1},
    ),
    "tiled groups": Bug(
        "responses are ordered as repeat does, groups as repeat_interleave does",
        after("rollout", tiled),
        ("groups mixed",),
        settings=GROUPS,
    ),
    "attention cut off": Bug(
        "the first attention layer's output is detached",
        AttentionCutOff,
        ("parts without gradient",),
    ),
    "returns of whitened advantages": Bug(
        "returns are made of the advantages after whitening",
        after("advantages", white_returns),
        ("returns off", "other discount"),
        ("advantages of other rows", "harmful values", "advantages off"),
    ),
    "optimizer of a copy": Bug(
        "the optimizer was made before the model was copied",
        OptimizerOfACopy,
        ("policy stands still", "parts stand still"),
        ("ratio never moves", "other step size", "optimizer steps"),
        unforeseen=("stale gradients",),
    ),
    "second epoch lost": Bug(
        "an iterator is exhausted after the first epoch",
        SecondEpochLost,
        ("updates missing",),
        unforeseen=("other rows learnt",),
    ),
    "one reward twice": Bug(
        "two reward functions share the last one of a loop",
        names=("equal parts",),
        rewards=twice,
    ),
    "reference one token late": Bug(
        "log π_ref is that of the token behind",
        annotated_otherwise("ref_logprobs", lambda notes: one_late(notes.ref_logprobs)),
        ("reference of other tokens",),
        ("KL estimate off", "KL sign", "negative KL", "reference of one state"),
    ),
    "one noise for all rows": Bug(
        "every response is drawn with the same random numbers",
        OneNoiseForAll,
        ("same responses",),
        ("nll off entropy", "KL estimate off"),
    ),
    "absolute advantages": Bug(
        "advantages lose their sign",
        after("advantages", absolute),
        ("advantages off", "advantages of other rows"),
    ),
    "rates swapped": Bug(
        "policy and values have each other's learning rate",
        SwappedRates,
        ("other step size",),
        (*steps_too_far(), "other schedule"),
        unforeseen=("length collapse",),
        settings={"value_lr": 0.03, "lr": 0.003},
    ),
    "advantages not centred": Bug(
        "whitening divides, and does not subtract the mean",
        after("advantages", not_centred),
        ("advantages off",),
    ),
    "values learn the advantages": Bug(
        "the values' target is the advantage",
        updates_with(advantages_as_target),
        (),
        ("harmful values", "value gradient off"),
    ),
    "last micro-batch lost": Bug(
        "the gradient of the last micro-batch is dropped",
        LastPieceLost,
        ("policy loss direction", "policy loss scale"),
        ("value loss off",),
        {"micro_batch_size": 6},
    ),
    "Adam made anew": Bug(
        "the optimizer's state is lost after each iteration",
        AdamMadeAnew,
        ("optimizer steps",),
        steps_too_far(),
    ),
    "entropy detached": Bug(
        "the entropy bonus has no gradient",
        EntropyDetached,
        ("entropy bonus off",),
        settings={"ent_coef": 0.05},
    ),
    "scores of the iteration before": Bug(
        "an asynchronous reward delivers one iteration late",
        ScoresOfTheIterationBefore,
        ("reward of other rows", "score off"),
        ("same random numbers", "noisy reward"),
        unforeseen=("score shaping off",),
    ),
    "weights pulled to zero": Bug(
        "the loss holds a large L2 penalty of all weights", WeightsPulledToZero
    ),
}


def doctor_says(bug: Bug, world: World, seed: int) -> list[str]:
    "Train in the gallery's world with a bug, and ask the doctor."
    settings = gallery_config(seed=seed, **bug.settings)
    lm = copy.deepcopy(world.lm)
    kept = KeepTokens()
    agent = Agent(copy.deepcopy(lm), value_model="copy" if settings.advantage == "gae" else None)
    with torch_threads(1), without_guards(), bug.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = bug.trainer(
            agent,
            create_reference_model(lm),
            dataclasses.replace(settings, recheck_every=1),
            tokenizer=world.tokenizer,
            callbacks=[kept],
        )
        metrics = trainer.train(world.prompts, bug.rewards(world.reward_model), progress=False)
    return [f.name for f in diagnose(metrics, dataclasses.asdict(settings), kept.record)]


def probes_say(bug: Bug, settings: dict) -> list[str] | None:
    "The probes that fail with this bug in the run's own settings; None: the bug is not in the trainer."
    if bug.trainer is RLHFTrainer:
        return None
    with bug.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [r.name for r in run_probes(bug.trainer, own=settings) if r.passed is False]


def verdict(bug: Bug, found: list[str]) -> str:
    "Named, seen by a consequence, named falsely, or missed; a false name spoils a right one."
    if set(found) - {*bug.names, *bug.consequences, *bug.unforeseen}:
        return "false"
    if set(found) & set(bug.names):
        return "named"
    return "seen" if found else "missed"


def record(only: list[str] | None = None, seeds: tuple[int, ...] = (0,)) -> dict:
    "What doctor and probes say of each bug."
    rows = {}
    worlds = {seed: gallery_world(seed) for seed in seeds}
    for name in only or BUGS:
        bug = BUGS[name]
        found = [doctor_says(bug, world, seed) for seed, world in worlds.items()]
        own = dataclasses.asdict(gallery_config(**bug.settings))
        rows[name] = {
            "wrong": bug.wrong,
            "names": bug.names,
            "consequences": bug.consequences,
            "unforeseen": bug.unforeseen,
            "found": found,
            "verdicts": [verdict(bug, some) for some in found],
            "probes": probes_say(bug, own),
        }
        print(name, rows[name]["verdicts"], found, rows[name]["probes"], flush=True)
    return {"bugs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(BUGS), help="these bugs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    arguments = parser.parse_args()
    rows = record(arguments.only, tuple(arguments.seeds))["bugs"]
    print(Counter(row["verdicts"][0] for row in rows.values()))


if __name__ == "__main__":
    main()
