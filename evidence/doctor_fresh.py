"""Twenty-four bugs that were invented when the rules were fixed: `python evidence/run.py doctor_fresh`.

With each bug stands which findings would name it, and which would be true consequences of it. Both
were written before the first run; what was noted after it is `unforeseen`. What the same run has
without the bug does not count. Any other finding is a false name. Runs train a tiny model for eight iterations. `--only NAME` shows single bugs, `--probes`
asks the probes as well; they stop at the first one that fails.
"""

import argparse
import copy
import dataclasses
import warnings
from collections import Counter

import torch
from doctor_unseen import (
    PROMPTS,
    USUAL,
    Bug,
    KeepTokens,
    after,
    reward_of,
    updates_with,
    with_other,
)

from instruct_goose.config import RLHFConfig
from instruct_goose.core.random import torch_threads
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.models.response import response_logprobs
from instruct_goose.objective.masks import last_index, masked_mean, whiten
from instruct_goose.rollouts.rollout import finished
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.tasks.gallery import replaced, without_guards
from instruct_goose.tasks.probes import ALL_PROBES, run_probes, tiny_world
from instruct_goose.training.trainer import RLHFTrainer

RUN = USUAL | dict(steps=8, batch_size=32, max_new_tokens=6, recheck_every=1)
GROUPS = {"advantage": "group_mean", "group_size": 4, "whiten_advantages": False}
ROWS = [{"prompt": prompt, "answer": f"answer {i}"} for i, prompt in enumerate(PROMPTS)]


# --- prompts and texts ----------------------------------------------------------------------------
def without_first_token(trainer, queries):
    "Prompts as a tokenizer without its beginning-of-text token writes them."
    mask = queries.mask.clone()
    first = mask.int().argmax(-1)
    is_long = mask.sum(-1) > 1
    mask[torch.arange(len(mask))[is_long], first[is_long]] = False
    return type(queries)(queries.ids, mask)


def prompt_twice(trainer, rollout):
    "Texts in which a template has put the prompt a second time."
    return [f"{p} {t}".strip() for p, t in zip(rollout.prompts, rollout.texts, strict=True)]


class AnswersShuffled(RLHFTrainer):
    def rollout(self, prompts):
        rollout = super().rollout(prompts)
        answers = rollout.columns["answer"]
        rollout.columns["answer"] = answers[1 + self.iteration :] + answers[: 1 + self.iteration]
        return rollout


# --- scores ---------------------------------------------------------------------------------------
def penalised_ends(trainer, rollout):
    "The penalty for a missing end is paid by the responses that have one."
    return rollout.scores + torch.where(finished(rollout, trainer.eos_ids), -0.4, 0.4)


# --- advantages -----------------------------------------------------------------------------------
def one_more_token(trainer, rollout):
    "The mask has the token behind the end, too."
    shifted = rollout.mask.roll(1, 1)
    shifted[:, 0] = True
    return rollout.mask | shifted


def last_for_all(trainer, experience):
    "Every token has the advantage of the last one."
    rows = torch.arange(len(experience))
    last = experience.advantages[rows, last_index(experience.mask)]
    return last[:, None] * experience.mask


def bootstrapped(trainer, experience):
    "A response that is cut off gets its last value once more, as if it went on."
    rows = torch.arange(len(experience))
    last = last_index(experience.mask)
    extra = torch.where(finished(experience, trainer.eos_ids), 0.0, 1.0)
    extra = extra * (0.5 + experience.values[rows, last])
    experience.returns = experience.returns + extra[:, None] * experience.mask
    raw = experience.returns - experience.values
    experience.advantages = whiten(raw, experience.mask)
    return experience


def mean_of_the_batch(trainer, experience):
    "Scores are compared with the whole batch in place of their group."
    totals = (experience.rewards * experience.mask).sum(-1)
    return (totals - totals.mean())[:, None] * experience.mask


def rolled_advantages(trainer, batch):
    batch.advantages = batch.advantages.roll(1, 0) * batch.mask


# --- loss -----------------------------------------------------------------------------------------
class TwiceCharged(RLHFTrainer):
    def loss(self, new, batch):
        value, parts = super().loss(new, batch)
        log_ratio = new.logprobs - batch.ref_logprobs
        return value + 0.3 * masked_mean(log_ratio.square() / 2, batch.mask), parts


class AveragedOverPadding(RLHFTrainer):
    def loss(self, new, batch):
        value, parts = super().loss(new, batch)
        return value * batch.mask.float().mean(), parts


class RatioOfTheSequence(RLHFTrainer):
    def loss(self, new, batch):
        with replaced(self.config, "ratio_level", "sequence"):
            return super().loss(new, batch)


class EntropyOfTheSample(RLHFTrainer):
    def loss(self, new, batch):
        return super().loss(new._replace(entropy=-new.logprobs * batch.mask), batch)


def reference_at_one(trainer, annotations):
    rollout = trainer.last_rollout
    logprobs = response_logprobs(
        trainer.require_reference(),
        rollout.query_ids,
        rollout.query_mask,
        rollout.response_ids,
        rollout.mask,
    )
    return annotations._replace(ref_logprobs=logprobs)


class ColdReference(RLHFTrainer):
    def annotate(self, rollout):
        self.last_rollout = rollout
        return reference_at_one(self, super().annotate(rollout))


class K3Charged(RLHFTrainer):
    def advantages(self, rollout, annotations=None):
        with replaced(self.config, "kl_estimator", "k3"):
            return super().advantages(rollout, annotations)


# --- optimizer ------------------------------------------------------------------------------------
class GradientsOfTwo(RLHFTrainer):
    def update(self, batch, is_first=False):
        kept = [
            None if is_first or p.grad is None else p.grad.clone() for p in self.agent.parameters()
        ]
        zero = self.optimizer.zero_grad

        def keep_gradients(set_to_none=True):
            for parameter, gradient in zip(self.agent.parameters(), kept, strict=True):
                parameter.grad = gradient

        self.optimizer.zero_grad = keep_gradients
        try:
            return super().update(batch, is_first)
        finally:
            self.optimizer.zero_grad = zero


def optimizer_with(**options):
    "A trainer whose AdamW has other options."

    class Other(RLHFTrainer):
        def __init__(self, *args, **more):
            def made(groups):
                return torch.optim.AdamW(groups, **{"weight_decay": 0.0, **options})

            super().__init__(*args, optimizer=made, **more)

    return Other


class ValuesFrozen(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        group = self.optimizer.param_groups[-1]
        group["lr"] = 0.0
        self.schedule.base_lrs[-1] = 0.0


class WeightsOfTheStart(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.start = copy.deepcopy(self.agent.state_dict())

    def step(self, prompts, reward_fn):
        if self.iteration == 4:
            self.agent.load_state_dict(self.start)
        return super().step(prompts, reward_fn)


class SamplerOneBehind(RLHFTrainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.late = copy.deepcopy(self.agent)
        self.sampler = PolicySampler(self.late, self.tokens)

    def optimize(self, experience):
        now = copy.deepcopy(self.agent.state_dict())
        metrics = super().optimize(experience)
        self.late.load_state_dict(now)
        return metrics


class BestByTrainingReward(RLHFTrainer):
    "The policy that is kept is the one of the lowest held-out reward."

    def evaluate_held_out(self, held_out, iterations_seen):
        offer = self.best_policy.offer
        self.best_policy.offer = lambda reward, iteration: offer(-reward, iteration)
        try:
            return super().evaluate_held_out(held_out, iterations_seen)
        finally:
            self.best_policy.offer = offer


def steps_too_far():
    return ("large steps", "drift", "entropy collapse", "variety collapse", "length collapse")


BUGS = {
    "beginning of text lost": Bug(
        "the tokenizer does not write the prompt's first token",
        after("encode", without_first_token),
        ("prompt tokens off",),
        ("prompts cut", "foreign prompts"),
    ),
    "prompt twice in the scored text": Bug(
        "a template puts the prompt in front of the text again",
        with_other("texts", prompt_twice),
        ("other text scored",),
    ),
    "scores clamped": Bug(
        "scores are clamped at ±0.2",
        with_other("scores", lambda t, r: r.scores.clamp(-0.2, 0.2), "score"),
        ("score shaping off",),
        ("reward of other rows", "equal rewards", "small rewards"),
    ),
    "ends penalised": Bug(
        "the penalty for a missing end is paid by those that end",
        with_other("scores", penalised_ends, "score"),
        ("score shaping off",),
        ("reward of other rows", "never ends"),
        {"missing_eos_penalty": 0.4},
    ),
    "one token behind the end": Bug(
        "the mask has one token behind the end",
        with_other("mask", one_more_token),
        ("tokens behind the end", "padding counted"),
        ("sampler mismatch", "KL estimate off", "nll off entropy", "ends miscounted", "never ends"),
    ),
    "last advantage for all": Bug(
        "every token has the advantage of the last one",
        with_other("advantages", last_for_all, "advantages"),
        ("advantages off",),
        ("advantages of other rows",),
    ),
    "bootstrapped at the limit": Bug(
        "a response that is cut off is paid a value more",
        after("advantages", bootstrapped),
        ("returns off", "advantages off"),
        ("other discount", "advantages of other rows", "harmful values", "value gradient off"),
    ),
    "gradients of two updates": Bug(
        "gradients are cleared before each iteration only",
        GradientsOfTwo,
        ("stale gradients",),
        (*steps_too_far(), "gradient not clipped"),
    ),
    "weight decay": Bug(
        "the optimizer decays the weights by 5 a step, the settings say 0",
        optimizer_with(weight_decay=5.0),
        (),
        ("other step size", "large steps"),
    ),
    "KL charged twice": Bug(
        "the KL stands in the reward and in the loss",
        TwiceCharged,
        ("token gradient off",),
        ("policy loss direction", "policy loss scale", "clip bounds off"),
    ),
    "k3 in the reward": Bug(
        "the reward is charged k3, the settings say k1",
        K3Charged,
        ("KL penalty off",),
        ("score off", "KL sign"),
    ),
    "reference at temperature 1": Bug(
        "log π_ref is that of temperature 1, the policy has 1.5",
        ColdReference,
        (),
        ("reference of other tokens", "KL estimate off", "KL sign", "negative KL"),
        {"temperature": 1.5},
    ),
    "mean of the batch": Bug(
        "scores are compared with the batch, not with their group",
        with_other("advantages", mean_of_the_batch, "advantages"),
        ("advantages off",),
        ("advantages of other rows",),
        GROUPS,
    ),
    "advantages of the row above": Bug(
        "a minibatch has the advantages of other rows",
        updates_with(rolled_advantages),
        ("other rows learnt",),
        ("policy loss direction", "policy loss scale", "advantages of other rows"),
    ),
    "mean over the padding": Bug(
        "the loss is divided by all places, padding as well",
        AveragedOverPadding,
        ("policy loss scale", "token gradient off"),
        ("value loss off", "value gradient off", "token gradient rounded", "entropy bonus off"),
    ),
    "ratio of the sequence": Bug(
        "the ratio is that of the whole response",
        RatioOfTheSequence,
        ("token gradient off",),
        ("clip bounds off", "policy loss direction", "token gradient rounded"),
        unforeseen=("never ends", "variety collapse"),
    ),
    "values frozen": Bug(
        "the values' group has a learning rate of 0",
        ValuesFrozen,
        ("values stand still",),
        ("other step size", "harmful values"),
    ),
    "worst policy kept": Bug(
        "the comparison of two evaluations is reversed",
        BestByTrainingReward,
        ("other best iteration",),
        settings={"keep_best": True, "eval_every": 2},
        held_out=["a c", "c b"],
    ),
    "held-out prompts among the others": Bug(
        "the split is made after the data are doubled",
        names=("held out prompts trained",),
        settings={"eval_every": 2},
        held_out=["b c", "c b"],
    ),
    "sampler one update behind": Bug(
        "the sampler gets the weights of the iteration before",
        SamplerOneBehind,
        ("sampler mismatch", "sampler left behind"),
        ("KL estimate off", "nll off entropy", "noisy forward", "negative KL", "KL sign"),
    ),
    "entropy of the sampled token": Bug(
        "the entropy bonus is −log π of the sampled token",
        EntropyOfTheSample,
        ("entropy bonus off",),
        ("token gradient off", "policy loss direction", "policy loss scale"),
        {"ent_coef": 0.1},
        ("clip bounds off", "entropy collapse"),  # without the bonus the entropy falls
    ),
    "answers of other prompts": Bug(
        "prompts are shuffled without their answers",
        AnswersShuffled,
        ("columns of other rows",),
        prompts=ROWS,
    ),
    "ε of 1 in Adam": Bug(
        "Adam's ε is 1: its steps are tiny",
        optimizer_with(eps=1.0),
        ("other step size",),
        ("values stand still", "ratio never moves"),
    ),
    "weights of the start": Bug(
        "the policy of iteration 0 is loaded again in iteration 4",
        WeightsOfTheStart,
    ),
}


def doctor_says(bug: Bug, seed: int) -> list[str]:
    "Train a tiny model with a bug, and ask the doctor."
    config = RLHFConfig(**RUN | {"seed": seed} | bug.settings)
    kept = KeepTokens()
    model, tokenizer = tiny_world(seed=seed)
    options = {} if bug.held_out is None else {"held_out": bug.held_out}
    with torch_threads(1), without_guards(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = bug.trainer(model, None, config, tokenizer=tokenizer, callbacks=[kept])
        metrics = trainer.train(list(bug.prompts), reward_of, progress=False, **options)
    settings = dataclasses.asdict(config)
    if config.keep_best:
        settings["best_iteration"] = trainer.best_policy.iteration
    return [finding.name for finding in diagnose(metrics, settings, kept.record)]


def first_probe_that_fails(bug: Bug) -> str | None:
    "Climb the ladder in the run's own settings to the first probe that fails; None: none does."
    own = dataclasses.asdict(RLHFConfig(**RUN | bug.settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ALL_PROBES:
            (result,) = run_probes(bug.trainer, [name], own=own)
            if result.passed is False:
                return name
    return None


def without_bug(bug: Bug) -> Bug:
    "The same run with the library's own trainer, and held-out prompts of its own."
    held_out = None if bug.held_out is None else ["a c", "c b"]
    return bug._replace(trainer=RLHFTrainer, held_out=held_out)


def verdict(bug: Bug, found: list[str], without: list[str]) -> str:
    "Named, seen by a consequence, named falsely, or missed; a false name spoils a right one."
    found = sorted(set(found) - set(without))
    if set(found) - {*bug.names, *bug.consequences, *bug.unforeseen}:
        return "false"
    if set(found) & set(bug.names):
        return "named"
    return "seen" if found else "missed"


def record(
    only: list[str] | None = None, seeds: tuple[int, ...] = (0, 1), with_probes: bool = True
) -> dict:
    "What the doctor says of each bug, and the first probe that fails where it says nothing."
    rows = {}
    for name in only or BUGS:
        bug = BUGS[name]
        found = [doctor_says(bug, seed) for seed in seeds]
        without = [doctor_says(without_bug(bug), seed) for seed in seeds]
        verdicts = [verdict(bug, *both) for both in zip(found, without, strict=True)]
        row = {
            "wrong": bug.wrong,
            "names": bug.names,
            "consequences": bug.consequences,
            "unforeseen": bug.unforeseen,
            "found": found,
            "without": without,
            "verdicts": verdicts,
        }
        is_missed = verdicts[0] == "missed"
        has_probes = with_probes and is_missed and bug.trainer is not RLHFTrainer
        row["probes"] = first_probe_that_fails(bug) if has_probes else "not asked"
        rows[name] = row
        print(name, verdicts, found, without, row["probes"], flush=True)
    return {"bugs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(BUGS), help="these bugs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--probes", action="store_true", help="ask the probes where all is silent")
    arguments = parser.parse_args()
    rows = record(arguments.only, tuple(arguments.seeds), arguments.probes)["bugs"]
    print(Counter(row["verdicts"][0] for row in rows.values()))


if __name__ == "__main__":
    main()
