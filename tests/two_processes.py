"""A small trainer that is built alike in each of several processes, and how its runs are compared.

Seven prompts of seven responses, or three groups of three: no share divides evenly."""

import pytest
import torch
from small_models import tiny

from instruct_goose import Agent, RLHFConfig, RLHFTrainer
from instruct_goose.core.processes import rank
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.callbacks import Callback

PROMPTS = ["the film", "a plot is", "the", "is good film the", "bad"]
PPO = dict(batch_size=7, minibatches=2, epochs=2)
GRPO = dict(batch_size=9, group_size=3, minibatches=2, micro_batch_size=2)


def words():
    return word_tokenizer(
        "the a film plot is good bad".split(),
        model_max_length=12,
        pad="<end>",
        bos="<end>",
        eos="<end>",
    )


def reward(texts):
    return [t.split().count("good") - t.split().count("bad") + 0.1 * len(t.split()) for t in texts]


def trainer_of(preset="ppo", dtype=torch.float64, sampler=None, **settings):
    # GPT-2's key biases have a gradient of exactly 0, which in float32 is rounding,
    # and which Adam makes as large as any
    model = tiny("llama" if dtype is torch.float32 else "gpt2").to(dtype)
    if rank() == 1:  # another start: the first process's is what counts
        for p in model.parameters():
            p.data.add_(1.0)
    config = RLHFConfig.preset(
        preset, max_new_tokens=5, seed=3, device="cpu", **dict(lr=1e-3) | settings
    )
    agent = Agent(model, value_model="copy" if preset == "ppo" else None)
    return RLHFTrainer(agent, config=config, tokenizer=words(), sampler=sampler)


def weights_of(trainer):
    return {k: x.detach().clone() for k, x in trainer.agent.state_dict().items()}


def apart(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in a)


def same_numbers(a, b, rel=1e-6):
    """The same metrics, but for seconds and what counts rounding where the gradient is 0.

    The latter is the share of weights that moved at all, and the size of their steps.
    """
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys(), set(x) ^ set(y)
        for name in x:
            if "second" in name or name in ("weights_moved", "weight_change_rms"):
                continue
            assert x[name] == y[name] or x[name] == pytest.approx(
                y[name], rel=rel, abs=rel / 100
            ), name


def halves(completion_ids):
    return [[0.5] * len(ids) if len(ids) % 2 else 1.0 for ids in completion_ids]


class Texts(Callback):
    def __init__(self):
        self.seen = []

    def on_score(self, trainer, rollout):
        self.seen.append(list(rollout.texts))


def run(preset, settings, steps=10, dtype=torch.float64, reward_fn=(reward, halves), **more):
    trainer = trainer_of(preset, dtype, steps=steps, **settings)
    texts = Texts()
    trainer.callbacks.append(texts)
    history = trainer.train(PROMPTS, list(reward_fn), progress=False, **more)
    return weights_of(trainer), texts.seen, list(history)


def rollout(n):
    mask = torch.arange(4) < torch.arange(1, n + 1).clamp(max=4)[:, None]
    return Rollout(torch.zeros(n, 2).long(), torch.ones(n, 2).bool(), mask.long(), mask)
