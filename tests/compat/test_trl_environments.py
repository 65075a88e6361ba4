"""The same class as an environment of TRL's GRPOTrainer and of ours.

With TRL installed (`make parity`, or the environment of `make bench`) both trainers play it with the
same model, whose likeliest tokens are taken: prompts, responses, masks and rewards are compared.
"""

import random

import pytest
import torch

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.models.tokens import unpad
from instruct_goose.rollouts.environments import EnvironmentSampler, environment_reward
from instruct_goose.supervised.sft import train_lm
from instruct_goose.tasks.games import Calculator, calculator_talks, tool_model

ROWS = [
    {"prompt": [{"role": "user", "content": f"{a} + {b}"}], "a": a, "b": b}
    for a in range(3)
    for b in range(3)
]


class Greeting(Calculator):
    "Says something first, and fails where a tool is asked for large numbers."

    def reset(self, a, b, **row):
        super().reset(a, b, **row)
        return " ok"

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first number.
            b: the second number.

        Returns:
            Their sum.
        """
        if a + b > 5:
            raise ValueError("ok")
        return str(a + b)


@pytest.fixture(scope="module")
def policy():
    "A model that has seen how tools are called, with arguments at random."
    words = [*map(str, range(9)), "+", "ok", "{'error':", "'ok'}"]
    model, tokenizer = tool_model(words, ["add", "submit"], ["a", "b", "value"], width=32)
    talks = calculator_talks(400, random.Random(0), largest=4)
    train_lm(model, tokenizer, talks, steps=120, lr=5e-3, batch_size=64, progress=False)
    return model, tokenizer


def ours(policy, environment, limit=40):
    "Each row's prompt and response, as ids, the mask of the policy's tokens, and the reward."
    model, tokenizer = policy
    config = RLHFConfig.preset(
        "grpo", max_new_tokens=limit, device="cpu", beta=0.0, group_size=2, batch_size=2
    )
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    trainer.use_sampler(lambda agent, tokens: EnvironmentSampler(agent, tokens, environment))
    rollout = trainer.generate(ROWS, 1, None)
    scores = trainer.ask_rewards(rollout, environment_reward).scores
    return list(
        zip(
            unpad(rollout.query_ids, rollout.query_mask),
            unpad(rollout.response_ids, rollout.attention_mask),
            unpad(rollout.mask.int(), rollout.attention_mask),
            scores.tolist(),
            strict=True,
        )
    )


def theirs(policy, environment, folder, limit=40):
    "The same, of TRL's trainer: what it computes before its update."
    trl = pytest.importorskip("trl", minversion="1.16")
    datasets = pytest.importorskip("datasets")
    model, tokenizer = policy
    tokenizer.padding_side = "left"
    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2 * len(ROWS),
        num_generations=2,
        max_completion_length=limit,
        generation_kwargs={"do_sample": False},
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=environment,
    )
    paid = []
    scored = trainer._calculate_rewards

    def keep(*args, **kwargs):
        paid.append(scored(*args, **kwargs))
        return paid[-1]

    trainer._calculate_rewards = keep
    batch = trainer._generate_and_score_completions([row for row in ROWS for _ in range(2)])
    rows = []
    for i in range(0, 2 * len(ROWS), 2):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
        read = batch["completion_mask"][i].bool()
        response = batch["completion_ids"][i][read]
        sampled = batch["tool_mask"][i][read]
        rows.append((prompt.tolist(), response.tolist(), sampled.tolist(), paid[0][i, 0].item()))
    return rows


@pytest.mark.parametrize("environment", [Calculator, Greeting])
def test_trl_plays_the_same_episodes(policy, environment, tmp_path):
    for own, other in zip(
        ours(policy, environment), theirs(policy, environment, tmp_path), strict=True
    ):
        assert own == other


def test_episodes_have_tools_results_and_an_end(policy):
    "What the comparison reads is not empty: tools are called, their results are not sampled."
    _, tokenizer = policy
    rows = ours(policy, Calculator)
    texts = [tokenizer.decode(response) for _, response, _, _ in rows]
    assert any('"add"' in text for text in texts) and any('"submit"' in text for text in texts)
    for text, (_, response, sampled, _) in zip(texts, rows, strict=True):
        given = [x for x, own in zip(response, sampled, strict=True) if not own]
        assert ("tool" in text) == bool(given)
    assert torch.tensor([len(response) for _, response, _, _ in rows]).float().std() > 0
