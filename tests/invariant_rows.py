"""Trainers and responses that the invariances are tested on, in one turn and in several.

float64, dropout on, an end token inside the queries.
"""

import copy
from functools import cache

import torch
from small_trainer import EOS, agent_and_reference

from instruct_goose.config import RLHFConfig
from instruct_goose.models.tokens import pad
from instruct_goose.objective.group import PRESETS
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.tasks.invariances import difference
from instruct_goose.training.trainer import RLHFTrainer

CONFIGS = ("gpt2", "llama")

SETTINGS = {name: dict(algorithm=name) for name in PRESETS} | {
    "all of PPO's": dict(
        ent_coef=0.05,
        temperature=1.3,
        gamma=0.9,
        dual_clip=1.5,
        kl_placement="loss",
        kl_estimator="k1",
        kl_gradient="ratio",
        importance_cap=1.1,
        lr_schedule="cosine",
        kl_target=2.0,
    ),
    "straight through, no clip": dict(
        algorithm="grpo",
        surrogate="ratio",
        kl_gradient="straight_through",
        ent_coef=0.05,
        importance_cap=1.1,
        group_ddof=0,
    ),
    "GAE in groups": dict(aggregation="group_token_mean", group_size=2, value_clip=None),
}


models = cache(agent_and_reference)  # for all tests: who trains takes a copy


def trainer(setting, name, **changes):
    agent, ref = models(name)
    settings = dict(SETTINGS[setting])
    algorithm = settings.pop("algorithm", "ppo")
    small = dict(
        device="cpu", batch_size=6, max_new_tokens=5, lr=0.02, beta=0.2, epochs=2, minibatches=2
    )
    if PRESETS[algorithm]["group_size"] > 1:
        small["group_size"] = 2
    config = RLHFConfig.preset(algorithm, **small | settings | changes)
    return RLHFTrainer(copy.deepcopy(agent), ref, config)


def responses(setting):
    """Six responses of 1 to 5 tokens to three queries of 1 to 4, in groups of two.

    The second group is unanimous. The end token occurs inside queries; two responses are cut off.
    """
    queries = [[0, 5, 7], [0], [0, 4, 0, 6]]
    answers = [[8, 9, 0], [2, 10, 3, 5, 1], [7, 0], [0], [3, 4, 0], [9, 9, 6, 1, 2]]
    query_ids, query_mask = pad([x for x in queries for _ in range(2)], EOS, side="left")
    response_ids, mask = pad(answers, EOS, side="right")
    scores = torch.tensor([1.5, -2.0, 0.25, 0.25, 3.0, -0.5], dtype=torch.float64)
    rollout = Rollout(query_ids, query_mask, response_ids, mask, scores=scores)
    if setting == "remax":
        rollout.baseline = torch.tensor([0.5, 0.5, -1.0, -1.0, 0.75, 0.75], dtype=torch.float64)
    if "importance_cap" in SETTINGS[setting]:  # a sampler that is not quite the policy
        noise = torch.randn(
            mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        rollout.sampled_logprobs = torch.where(mask, -2.4 + 0.3 * noise, 0.0)
    return rollout


def agree(one, other, name):
    """Two dictionaries of tensors agree within what rounding explains.

    A sum of a few hundred float64 terms near 1: 1e-12. Weights: where a gradient is truly 0, as
    that of GPT-2's keys' bias, Adam makes of its rounding δ a step of lr·δ/1e-8 = 2e6·δ, of 1e-15
    some 2e-9, and there are four steps. Llama's norms and rotations are float32 in every dtype:
    a sum that lies on the boundary between two of them may fall to either.
    """
    weights = {k for k in one if k.startswith("weight")}
    for bound, names in ((1e-12, one.keys() - weights), (1e-8, weights)):
        others = {k for k in other if (k in weights) == (names == weights)}
        off, where = difference({k: one[k] for k in names}, {k: other[k] for k in others})
        assert off <= (bound if name == "gpt2" else 1e-6), (off, where)
