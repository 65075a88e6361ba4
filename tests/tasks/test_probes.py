"The ladder: the shipped trainer passes it, each broken one falls where it is meant to, and what cannot be judged is said to be."

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deep import first
from torch import nn

from instruct_goose.config import RLHFConfig
from instruct_goose.objective.masks import whiten
from instruct_goose.tasks.probes import (
    ACTIONS,
    BROKEN,
    end_chances,
    in_own_settings,
    optimum,
    run_probes,
    tiny_world,
    two_token_optimum,
    values_at,
    why_not,
)
from instruct_goose.training.trainer import RLHFTrainer

root = Path(__file__).parents[2]
ORDER = ["value_head", "advantage_sign", "credit", "eos", "kl", "rows", "temperature"]


@pytest.mark.parametrize(
    "bug",
    first(
        3,
        [
            "padding read as text",
            "sign of the advantage",
            "temperature 1 in the loss",
            "value loss weighs nothing",
            "advantage one token late",
            "end-of-text not in the mask",
            "sign of the KL",
            "scores of the row above",
        ],
    ),
)
def test_each_bug_is_caught_by_the_probe_meant_for_it(bug):
    trainer, rung = BROKEN[bug]
    (result,) = run_probes(trainer, [rung])
    assert result.passed is False and result.numbers and not result.note, str(
        result
    )  # by its numbers, not by an exception
    assert "off" in str(result) and "look at" in str(result)


def test_the_record_of_all_bugs():
    record = json.loads((root / "evidence/probes.json").read_text("utf-8"))
    assert record["probes"] == ORDER and record["meant_for"] == {
        bug: rung for bug, (_, rung) in BROKEN.items()
    }
    assert {(r["bug"], r["seed"]) for r in record["runs"]} == {
        (bug, seed) for bug in BROKEN for seed in (0, 1)
    } | {(None, seed) for seed in range(10)}
    for r in record["runs"]:
        if r["bug"] is None:
            assert not r["failed"]
        else:
            assert BROKEN[r["bug"]][1] in r["failed"] and not r["raised"], r["bug"]


def test_the_expected_numbers_from_first_principles():
    # V by brute force: every response of up to three tokens from a policy that says each of four actions with ¼, paid 1 at its end
    def value(t, gamma=0.5):
        return (
            1.0
            if t == 3
            else sum(
                0.25 * (1.0 if action == "<eos>" else gamma * value(t + 1)) for action in ACTIONS
            )
        )

    # π* by maximising E[r] − β·KL with plain gradient ascent on the logits
    def ascend(beta):
        ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        r = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
        z = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        for _ in range(3000):
            p = z.softmax(-1)
            (grad,) = torch.autograd.grad((p * (r - beta * (p / ref).log())).sum(), z)
            with torch.no_grad():
                z += grad / beta
        return z.softmax(-1).detach()

    assert [value(t) for t in (1, 2, 3)] == [0.484375, 0.625, 1.0]
    for beta in (1, 50):
        torch.testing.assert_close(optimum(beta).double(), ascend(beta), atol=1e-5, rtol=0)


def test_values_are_read_at_the_state_before_the_token():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def values(self, query, query_mask, response, mask):
            assert query_mask.all() and mask.all() and query.shape == query_mask.shape
            return torch.arange(response.shape[1])[None].float() + query.shape[1]

    _, tokenizer = tiny_world()
    assert values_at(Agent(), tokenizer, ["a", "<eos>"], "b c") == [
        3.0,
        4.0,
    ]  # the beginning of the text counts


def mine(**parts):
    "A trainer with only the parts named: `train` with two arguments, no metrics, no values."

    class Mine:
        def __init__(self, model, ref_model, config, tokenizer=None):
            self.inner = RLHFTrainer(model, ref_model, config, tokenizer=tokenizer)
            if "agent" in parts:
                self.agent = parts["agent"](self.inner.agent)

        if "train" in parts:

            def train(self, prompts, reward_fn):
                self.inner.train(prompts, reward_fn, progress=False)

    return Mine


class PolicyOnly:
    def __init__(self, agent):
        self.model = agent.model


def test_a_minimal_trainer_is_judged_by_what_it_has(capsys):
    value, temperature = run_probes(mine(train=1, agent=PolicyOnly), ["temperature", "value_head"])
    assert value.passed is None and "agent.values" in value.note and "skipped" in str(value)
    assert temperature.passed is True and "max|ratio − 1| at first" not in temperature.numbers


@pytest.mark.parametrize(
    "parts, says",
    [
        ({}, "no method train"),
        ({"train": 1}, "agent.model"),
        ({"train": 1, "agent": lambda agent: None}, "agent.model"),
    ],
)
def test_what_is_missing_is_a_reason_to_skip(parts, says):
    (result,) = run_probes(mine(**parts), ["advantage_sign"])
    assert result.passed is None and says in result.note and not result.numbers


@pytest.mark.parametrize(
    "broken, says",
    [
        (lambda *a, **k: 1 / 0, "ZeroDivisionError"),
        (lambda model: model, "TypeError"),
        (
            type(
                "Diverges",
                (RLHFTrainer,),
                {"train": lambda self, p, r: self.agent.model.lm_head.weight.data.fill_(torch.nan)},
            ),
            "",
        ),
    ],
)
def test_a_trainer_that_raises_or_diverges_has_failed(broken, says):
    (result,) = run_probes(broken, ["advantage_sign"])
    assert result.passed is False and says in result.note and "look at" in str(result)
    if not says:
        assert math.isnan(result.numbers["π(a)"][0])


OWN = {
    "ppo": {"kl": None, "credit": None},
    "grpo": {"kl": "another optimum", "credit": "no values", "rows": None},
    "rloo": {"kl": None, "value_head": "no values"},
}


@pytest.mark.parametrize("preset", OWN)
def test_probes_that_do_not_apply_to_a_runs_settings_say_why(preset):
    own = asdict(RLHFConfig.preset(preset, batch_size=64))
    for name, reason in OWN[preset].items():
        said = why_not(name, own)
        assert said is None if reason is None else reason in said


def test_an_entropy_bonus_moves_the_optimum_of_the_kl():
    own = asdict(RLHFConfig(ent_coef=0.01))
    assert why_not("kl", own) == why_not("temperature", own) == "an entropy bonus moves the optimum"


def test_a_healthy_grpo_trainer_passes_in_its_own_settings_and_one_with_the_sign_reversed_fails():
    own = asdict(RLHFConfig.preset("grpo", batch_size=64, eval_every=2, micro_batch_size=8))
    (healthy,) = run_probes(only=["advantage_sign"], own=own)
    assert healthy.passed is True

    class Reversed(RLHFTrainer):
        def loss(self, new, batch):
            assert self.config.group_size == own["group_size"] and self.config.eval_every
            assert len(batch) <= self.config.batch_size // 3
            value, parts = super().loss(new, batch)
            return -value, parts

    (result,) = run_probes(Reversed, ["advantage_sign"], own=own)
    assert result.passed is False


def test_settings_of_the_tasks_stay_as_they_are():
    own = asdict(
        RLHFConfig.preset("grpo", batch_size=8, beta=0.7, epochs=1, minibatches=1, reward_clip=0.1)
    )

    def make(model, ref_model, config, **options):
        assert (config.lr, config.beta, config.reward_clip) == (0.01, 0.2, None)
        assert (config.advantage, config.group_size) == (own["advantage"], own["group_size"])
        assert config.batch_size == 24  # the next multiple of 8 beyond 20
        return config

    in_own_settings(make, own)(None, None, RLHFConfig(lr=0.01, beta=0.2, batch_size=20))


@pytest.mark.parametrize("epochs, minibatches, lr", [(1, 1, 0.01), (2, 1, 0.01), (4, 4, 0.00125)])
def test_more_updates_of_an_iteration_are_smaller(epochs, minibatches, lr):
    own = asdict(RLHFConfig(epochs=epochs, minibatches=minibatches))
    config = RLHFConfig(lr=0.01, value_lr=0.02)
    made = in_own_settings(lambda model, ref_model, config: config, own)(None, None, config)
    assert (made.lr, made.value_lr) == pytest.approx((lr, 2 * lr))


def test_the_optimum_over_responses_of_two_tokens_maximises_reward_less_kl():
    "Plain gradient ascent on E[r] − KL over the logits of thirteen responses."
    best = two_token_optimum()
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ref = torch.cat([reference[3:], (reference[:3, None] * reference).flatten()])
    rewards = torch.tensor([2.0 * (y == ("a", "b")) for y in best], dtype=torch.float64)
    z = torch.zeros(13, dtype=torch.float64, requires_grad=True)
    for _ in range(4000):
        p = z.softmax(-1)
        (grad,) = torch.autograd.grad((p * (rewards - (p / ref).log())).sum(), z)
        with torch.no_grad():
            z += grad
    found = torch.tensor([*best.values()], dtype=torch.float64)
    torch.testing.assert_close(found, z.softmax(-1).detach(), atol=1e-6, rtol=0)


class KLOfTheLastToken(RLHFTrainer):
    "Only the last token pays for its KL."

    def advantages(self, rollout, annotations=None):
        experience = super().advantages(rollout, annotations)
        rewards = torch.zeros_like(experience.rewards)
        rows = torch.arange(len(rewards))
        last = experience.mask.sum(-1) - 1
        rewards[rows, last] = experience.rewards[rows, last]
        advantages = rewards.flip(-1).cumsum(-1).flip(-1) * experience.mask
        experience.advantages = whiten(advantages, experience.mask)
        return experience


@pytest.mark.parametrize("trainer, passed", [(RLHFTrainer, True), (KLOfTheLastToken, False)])
def test_the_kl_of_two_tokens_is_the_sum_over_them(trainer, passed):
    assert run_probes(trainer, ["kl"])[0].passed is True  # of one token alone
    (result,) = run_probes(trainer, ["sequence_kl"])
    assert result.passed is passed and result.numbers


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, None),
        ({"kl_placement": "loss"}, "KL in the loss"),
        ({"aggregation": "sequence_mean"}, "short responses"),
        ({"aggregation": "sequence_mean", "advantage": "leave_one_out", "group_size": 4}, None),
        ({"entropy_target": 1.0}, "entropy bonus"),
    ],
)
def test_the_kl_of_two_tokens_says_where_it_does_not_apply(settings, reason):
    said = why_not("sequence_kl", asdict(RLHFConfig(batch_size=64, **settings)))
    assert said is None if reason is None else reason in said


def test_a_text_counts_for_the_end_as_often_as_the_policy_writes_it():
    "A policy that always begins with a ends after it with 0.4; after b and c it would never end."
    _, tokenizer = tiny_world()
    ids = [tokenizer.get_vocab()[action] for action in ACTIONS]
    chances = {"": [1.0, 0.0, 0.0, 0.0], "a": [0.3, 0.3, 0.0, 0.4], "b": [1.0, 0.0, 0.0, 0.0]}
    chances["c"] = chances["b"]

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids):
            said = tokenizer.decode(input_ids[0], skip_special_tokens=True).split()
            logits = torch.full((1, input_ids.shape[1], len(tokenizer)), -1e9)
            last = said[-1] if said else ""
            logits[0, -1, ids] = torch.tensor(chances[last]).clamp(min=1e-30).log()
            return SimpleNamespace(logits=logits)

    first, second, third = end_chances(Policy(), tokenizer, 2)
    assert (first, second) == pytest.approx((0.0, 0.4))
    assert third == pytest.approx(0.3 * 0.4 / 0.6)  # after a a, of a a and a b
