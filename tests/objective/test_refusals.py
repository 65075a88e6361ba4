"""What no loss accepts: things that are no tensors, and settings that no formula has. Without the shape checker, as users run it."""

import inspect
import math

import pytest
import torch

from instruct_goose.objective import (
    advantages,
    gaussian,
    group,
    kl,
    logprobs,
    masks,
    policy_loss,
    ppo,
    preference,
    value_loss,
)
from instruct_goose.objective.kl import kl_in_loss, kl_in_reward
from instruct_goose.objective.masks import aggregate
from instruct_goose.objective.preference import dpo_loss, implicit_reward


def test_a_list_is_refused_by_the_name_of_its_argument(unchecked):
    x = torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    logits, ids, row = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2)
    calls = {
        policy_loss.policy_loss: (x, x, x, mask),
        policy_loss.probability_ratio: (x, x, mask),
        policy_loss.clipped_objective: (x, x),
        policy_loss.clip_fraction: (x, x, mask),
        policy_loss.sampler_weights: (x, x, mask),
        ppo.ppo_loss: (x, x, x, mask),
        value_loss.value_loss: (x, x, mask),
        value_loss.explained_variance: (x, x, mask),
        kl.token_kl: (x, x, mask),
        kl.kl_in_loss: (x, x, mask, 0.1),
        kl.kl_in_reward: (row, x, x, mask, 0.1),
        kl.exact_kl: (logits.log_softmax(-1), logits.log_softmax(-1)),
        masks.aggregate: (x, mask),
        masks.masked_mean: (x, mask),
        masks.whiten: (x, mask),
        masks.last_index: (mask,),
        masks.group_token_counts: (mask, 2),
        masks.response_mask: (ids, 0),
        advantages.gae: (x, x, mask),
        advantages.discounted_returns: (x, mask),
        advantages.group_advantages: (row, 2),
        advantages.td_errors: (x, x, mask, 1.0),
        gaussian.gaussian_entropy: (x + 1,),
        gaussian.gaussian_kl: (x, x + 1, x, x + 1),
        gaussian.gaussian_logprobs: (x, x, x + 1, mask[:, 0]),
        group.flat_groups: (row, 2),
        logprobs.token_logprobs: (logits, ids),
        logprobs.logprobs_from_hidden: (logits[0], torch.zeros(5, 4), ids[0]),
        logprobs.entropy: (logits,),
        preference.dpo_loss: (row, row, row, row),
        preference.implicit_reward: (row, row),
    }
    with unchecked():
        for f, args in calls.items():
            f(*args)
            for i, name in zip(range(len(args)), inspect.signature(f).parameters):
                if not torch.is_tensor(args[i]):
                    continue
                with pytest.raises(TypeError, match=rf"(?s)\b{name}\b.*list|list.*\b{name}\b"):
                    f(*args[:i], args[i].tolist(), *args[i + 1 :])


def test_counts_and_coefficients_are_finite():
    x = torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    row = torch.zeros(2)
    for bad in (math.nan, math.inf, 0, -1):
        with pytest.raises(ValueError, match="denominator="):
            aggregate(x, mask, denominator=bad)
        with pytest.raises(ValueError, match="length="):
            aggregate(x, mask, "sequence_sum", length=bad)
    for bad in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="beta is"):
            kl_in_loss(x, x, mask, bad)
        with pytest.raises(ValueError, match="beta is"):
            kl_in_reward(row, x, x, mask, bad)
        with pytest.raises(ValueError, match="beta is"):
            dpo_loss(row, row, row, row, bad)
        with pytest.raises(ValueError, match="beta is"):
            implicit_reward(row, row, bad)
