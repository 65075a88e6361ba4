"""RLHFTrainer as the comparisons run it: one that samples and is timed, one that is given a peer's responses and asked for its numbers."""

import torch

from bench.measure import cpu
from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.objective.kl import sequence_kl
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer


class Phases(Callback):
    "CPU-seconds up to the end of the rollout, of the advantages, of the iteration."

    def begin(self):
        self.marks = [cpu()]
        self.rollout = None

    def on_rollout(self, trainer, rollout):
        self.marks.append(cpu())
        self.rollout = rollout

    def on_advantages(self, trainer, rollout):
        self.marks.append(cpu())

    def phases(self) -> dict[str, float]:
        start, written, judged = self.marks
        return {"rollout": written - start, "score": judged - written, "update": cpu() - judged}


class Run:
    def __init__(
        self,
        model,
        reference,
        config: RLHFConfig,
        tokenizer,
        reward,
        value_model=None,
        responses: dict | None = None,
    ):
        self.watch = Phases()
        self.reward = reward
        sampler = None if responses is None else lambda *_: replayed(responses)
        self.trainer = RLHFTrainer(
            Agent(model, value_model),
            reference,
            config,
            tokenizer=tokenizer,
            sampler=sampler,
            callbacks=[self.watch],
        )

    def step(self, prompts) -> dict:
        self.watch.begin()
        self.metrics = self.trainer.step(prompts, self.reward)
        return self.watch.phases()

    def numbers(self) -> dict[str, float]:
        "Of the last iteration, by the names that all sides use."
        r, m = self.watch.rollout, self.metrics
        kl = sequence_kl(r.old_logprobs, r.ref_logprobs, r.mask, "k1").mean().item()
        found = {
            "score": m["reward_mean"],
            "kl": kl,
            "policy_loss": m["policy_loss"],
            "value_loss": m.get("value_loss"),
        }
        return {name: x for name, x in found.items() if x is not None}


def replayed(responses: dict) -> Rollout:
    "What a peer wrote, all of it real."
    query, response = (torch.tensor(responses[name]) for name in ("queries", "responses"))
    return Rollout(
        query,
        torch.ones_like(query, dtype=torch.bool),
        response,
        torch.ones_like(response, dtype=torch.bool),
    )
