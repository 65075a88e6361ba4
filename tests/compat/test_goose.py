"""The old script runs and trains; the old repository's calls work; the numbers are those of a loop in plain Python."""

import math
import sys
import types

import pytest
import torch
from torch import tensor
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.compat import goose
from instruct_goose.compat.goose import (
    Agent,
    AgentObjective,
    PairDataset,
    PairwiseLoss,
    PromptDataset,
    RewardModel,
    RLHFConfig,
    RLHFTrainer,
    create_reference_model,
)
from instruct_goose.models.tokens import word_tokenizer

WORDS = "the film was good bad and a very dull bright story actor I loved hated it".split()
close = torch.testing.assert_close

# The four steps of the old README; only the import of instruct_goose is another one.
SCRIPT = """
from transformers import AutoTokenizer, AutoModelForCausalLM
from datasets import load_dataset

import torch
from torch.utils.data import DataLoader, random_split
from torch import optim

from instruct_goose.compat.goose import Agent, RewardModel, RLHFTrainer, RLHFConfig, create_reference_model

dataset = load_dataset("imdb", split="train")
dataset, _ = random_split(dataset, lengths=[10, len(dataset) - 10]) # for demenstration purposes
train_dataloader = DataLoader(dataset, batch_size=4, shuffle=True)

model_base = AutoModelForCausalLM.from_pretrained("gpt2") # for demonstration purposes
reward_model = RewardModel("gpt2")

tokenizer = AutoTokenizer.from_pretrained("gpt2", padding_side="left")
eos_token_id = tokenizer.eos_token_id
tokenizer.pad_token = tokenizer.eos_token

model = Agent(model_base)
ref_model = create_reference_model(model)

max_new_tokens = 20
generation_kwargs = {
    "min_length":-1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
    "max_new_tokens": max_new_tokens
}

config = RLHFConfig()
N_EPOCH = 1 # for demonstration purposes
trainer = RLHFTrainer(model, ref_model, config)
optimizer = optim.SGD(model.parameters(), lr=1e-3)

for epoch in range(N_EPOCH):
    for batch in train_dataloader:
        inputs = tokenizer(batch["text"], padding=True, truncation=True, return_tensors="pt")
        response_ids = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"],
            **generation_kwargs
        )

        # extract the generated text
        response_ids = response_ids[:, -max_new_tokens:]
        response_attention_mask = torch.ones_like(response_ids)

        # evaluate from the reward model
        with torch.no_grad():
            text_input_ids = torch.stack([torch.concat([q, r]) for q, r in zip(inputs["input_ids"], response_ids)], dim=0)
            rewards = reward_model(text_input_ids)

        # calculate PPO loss
        loss = trainer.compute_loss(
            query_ids=inputs["input_ids"],
            query_attention_mask=inputs["attention_mask"],
            response_ids=response_ids,
            response_attention_mask=response_attention_mask,
            rewards=rewards
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss={loss}")
"""


@pytest.fixture(scope="module")
def tokenizer():  # one special token for everything, as GPT-2 has it
    return word_tokenizer(
        WORDS, pad="<end>", eos="<end>", bos="<end>", add_bos=False, model_max_length=64
    )


def tiny(tokenizer, cls=GPT2LMHeadModel, **extra):
    torch.manual_seed(1)
    end = tokenizer.eos_token_id
    return cls(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            eos_token_id=end,
            bos_token_id=end,
            **extra,
        )
    ).eval()


@pytest.fixture
def lm(tokenizer):
    return tiny(tokenizer)


@pytest.fixture
def agent(lm):
    return Agent(lm)


@pytest.fixture
def script(tokenizer, lm, tmp_path, monkeypatch):
    "script(changes) runs the old script on a tiny GPT-2 from a directory, and returns its variables."
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [
        {"text": " ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(2 + i % 7))}
        for i in range(40)
    ]
    monkeypatch.setitem(
        sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name, split: rows)
    )

    def run(**changes):
        source = SCRIPT.replace('"gpt2"', repr(str(tmp_path)))
        scope = {"history": []}
        for old, new in changes.values():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        exec(compile(source, "script", "exec"), scope)
        return scope

    return run


def test_the_script_runs_and_every_weight_moves(script, lm):
    after = script()
    assert math.isfinite(after["loss"].item()) and after["rewards"].shape == (2,)  # 4 + 4 + 2 texts
    moved = {
        n: not torch.equal(p, dict(lm.named_parameters())[n])
        for n, p in after["model_base"].named_parameters()
    }
    assert all(moved.values()), moved
    assert after["model"].value_head.weight.abs().max() > 0
    frozen = after["ref_model"].policy_network.state_dict()
    assert all(torch.equal(x, frozen[n]) for n, x in lm.state_dict().items())


@pytest.fixture
def prompts(tokenizer):
    return tokenizer(
        ["the film was very", "I loved", "a dull story and"], padding=True, return_tensors="pt"
    )


def test_agent_reads_the_last_real_token(agent, prompts):
    "Each text alone, without padding, gives the same entropy; padding right gives it too."
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    torch.nn.init.normal_(agent.value_network.weight)
    _, logprobs, entropies, values = agent(ids, mask)
    for i in range(3):
        row = ids[i][mask[i].bool()]
        *_, entropy, value = agent(row[None])
        close(entropy[0], entropies[i])
        close(value[0], values[i])
        p = agent.policy_network(row[None]).logits[0, -1].softmax(-1)
        close(entropy[0], -(p * p.log()).sum())


def test_old_attributes(agent, lm, tokenizer):
    assert agent.policy_network is lm and agent.eos_token_id == tokenizer.eos_token_id
    assert agent.get_value(torch.randn(3, 5, 32)).shape == (3, 1)
    ref = create_reference_model(agent)
    assert (
        isinstance(ref, Agent)
        and ref.policy_network is not lm
        and not any(p.requires_grad for p in ref.parameters())
    )
    assert type(create_reference_model(lm)) is type(lm)
    trainer = RLHFTrainer(agent, ref, RLHFConfig())
    assert trainer.model is agent and trainer.ref_model is ref.policy_network
    assert (trainer.epsilon, trainer.ent_coef, trainer.vf_coef) == (0.1, 0.01, 0.1)
    c = RLHFTrainer(agent, ref, RLHFConfig(0.3, 0.02, 0.4, 0.05)).config
    assert (c.clip, c.clip_high, c.ent_coef, c.vf_coef, c.beta) == (0.3, None, 0.02, 0.8, 0.05)
    assert isinstance(RLHFConfig().epsilon, float) and RLHFConfig(0.2, 0.0, 0.5) == RLHFConfig(
        epsilon=0.2, ent_coef=0.0, vf_coef=0.5
    )


def test_generate_fills_up_to_max_new_tokens(agent, prompts, tokenizer):
    "An agent that always ends: 4 query columns + 20, as the script's slice from the right needs it."
    torch.nn.init.zeros_(agent.policy_network.transformer.ln_f.weight)
    bias = agent.policy_network.transformer.ln_f.bias
    with torch.no_grad():
        bias.copy_(1e3 * agent.policy_network.lm_head.weight[tokenizer.eos_token_id])
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    out = agent.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.eos_token_id,
    )
    assert out.shape == (3, ids.shape[1] + 20) and torch.equal(out[:, : ids.shape[1]], ids)
    assert (out[:, -20:] == tokenizer.eos_token_id).all()
    assert (
        agent.generate(ids, mask, max_length=30, pad_token_id=0).shape[1] <= 30
    )  # without max_new_tokens: as it comes


def test_reward_model(tokenizer, tmp_path):
    tiny(tokenizer).save_pretrained(tmp_path)
    judge = RewardModel(str(tmp_path), device="cpu")
    texts = ["the film was bad", "I loved the bright story"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    scores = judge(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert scores.shape == (2,) and (0 <= scores).all() and (scores <= 1).all()
    close(judge(batch["input_ids"]), scores)  # pads are ends here, on the left
    for text, score in zip(texts, scores, strict=True):
        close(judge(tokenizer(text, return_tensors="pt")["input_ids"])[0], score)


E = 0  # the end, and the padding


@pytest.mark.parametrize(
    "ids, mask",
    [
        ([5, 6, 7], [1, 1, 1]),
        ([E, E, 5, 6], [0, 0, 1, 1]),  # padded left
        ([E, 5, 6, E, E, E], [0, 1, 1, 1, 0, 0]),  # ended early: the first end is a word
        (
            [5, E, 6, E],
            [1, 1, 1, 1],
        ),  # an end inside stays: it cannot be told from one that was written
        ([E, E, E], [0, 0, 1]),
    ],
)
def test_filling_is_told_from_text(ids, mask):
    assert goose._text_mask(tensor([ids]), E, None)[0].long().tolist() == mask
    assert goose._text_mask(tensor([ids]), [E, 99], None)[0].long().tolist() == mask


def test_filling_with_a_padding_id_of_its_own():
    "9 is padding, 0 the end."
    assert goose._text_mask(tensor([[9, 9, 5, 0, 9, 9]]), 0, 9)[0].long().tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
    ]
    assert goose._text_mask(tensor([[9, 9, 5, 6, 9, 9]]), 0, 9)[0].long().tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
    ]
    assert goose._text_mask(tensor([[9, 9, 5, 6, 9, 9]]), None, 9)[0].long().tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
    ]


def test_pairwise_loss(unchecked):
    loss = PairwiseLoss()(tensor([1, 2, 3, 4]), tensor([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(
        math.log1p(math.exp(-1))
    )  # one, four times; not divided by four again
    close(
        PairwiseLoss()(
            chosen_rewards=torch.zeros(2, 1), rejected_rewards=torch.full((2, 1), 200.0)
        ),
        tensor(200.0),
    )
    with unchecked(), pytest.raises(ValueError, match="shapes differ"):
        PairwiseLoss()(torch.zeros(2), torch.zeros(3))


def test_datasets(tokenizer):
    pairs = PairDataset([{"chosen": "the film was good", "rejected": "bad"}] * 3, tokenizer, 8)
    prompts = PromptDataset(
        [{"prompt": "the film"}, {"prompt": " ".join(WORDS)}], tokenizer, max_length=8
    )
    assert len(pairs) == 3 and len(pairs[0]) == 4 and {x.shape for x in pairs[0]} == {(8,)}
    assert len(prompts) == 2 and [x.sum().item() for _, x in prompts] == [2, 8]
    batch = next(iter(torch.utils.data.DataLoader(pairs, batch_size=3)))
    assert [x.shape for x in batch] == [(3, 8)] * 4


def test_advantage_and_return_of_one_step():
    rewards = torch.arange(1, 11)
    values = torch.arange(1, 11) / 10
    advantages, returns = RLHFTrainer.compute_advantage_and_return(rewards, values)
    close(advantages, rewards - values)
    close(returns, rewards.to(values))


def batch_of(tokenizer, responses=((4, 5, 0, 0), (6, 7, 8, 9), (0, 0, 0, 0))):
    queries = tokenizer(["the film was", "I", "a story"], padding=True, return_tensors="pt")
    return dict(
        query_ids=queries["input_ids"],
        query_attention_mask=queries["attention_mask"],
        response_ids=tensor(responses),
        response_attention_mask=torch.ones(len(responses), len(responses[0]), dtype=torch.long),
        rewards=tensor([0.1, 0.9, 0.5]),
    )


def test_the_loss_is_that_of_a_loop(agent, tokenizer):
    """Before the first step V = 0 and π = π_ref, so Âₜ = .95^(last − t)·score, R̂ = Â. Whitened advantages have mean 0 and ρ is 1:
    the policy loss is 0, and what is left is .1·mean (V − R̂)² − .01·mean S."""
    x = batch_of(tokenizer)
    loss = RLHFTrainer(agent, create_reference_model(agent), RLHFConfig()).compute_loss(**x)
    squares, entropies = [], []
    for i, words in enumerate((3, 4, 1)):  # 0 is the end
        query = x["query_ids"][i][x["query_attention_mask"][i].bool()].tolist()
        for t in range(words):
            squares.append((0.95 ** (words - 1 - t) * x["rewards"][i].item()) ** 2)
            logits = (
                agent.policy_network(tensor([query + x["response_ids"][i, :t].tolist()]))
                .logits[0, -1]
                .tolist()
            )
            z = sum(math.exp(v) for v in logits)
            entropies.append(-sum(math.exp(v) / z * math.log(math.exp(v) / z) for v in logits))
    assert loss.item() == pytest.approx(
        0.1 * sum(squares) / 8 - 0.01 * sum(entropies) / 8, abs=1e-6
    )


def test_the_gradient_is_that_of_the_advantages(agent, tokenizer):
    """On policy ∇L^CLIP = −mean Â·∇log π: the same gradient, from a loop over tokens, rewards that charge β·(log π − log π_ref) for a reference
    that has other weights, and whitened advantages by hand."""
    x = batch_of(tokenizer)
    ref = create_reference_model(Agent(GPT2LMHeadModel(agent.policy_network.config).eval()))
    trainer = RLHFTrainer(agent, ref, RLHFConfig(ent_coef=0.0, vf_coef=0.0, beta=0.3))
    trainer.compute_loss(**x).backward()
    mine = {n: p.grad.clone() for n, p in agent.policy_network.named_parameters()}
    agent.zero_grad()
    raw, logprobs = [], []
    for i, words in enumerate((3, 4, 1)):
        query = x["query_ids"][i][x["query_attention_mask"][i].bool()]
        rewards = []
        for t in range(words):
            text = torch.cat([query, x["response_ids"][i, :t]])
            pi, other = (
                m.policy_network(text[None]).logits[0, -1].log_softmax(-1)[x["response_ids"][i, t]]
                for m in (agent, ref)
            )
            logprobs.append(pi)
            rewards.append(-0.3 * (pi - other).item() + (t == words - 1) * x["rewards"][i].item())
        raw += [sum(0.95 ** (k - t) * rewards[k] for k in range(t, words)) for t in range(words)]
    mean = sum(raw) / 8
    std = math.sqrt(sum((a - mean) ** 2 for a in raw) / 7)
    (-sum((a - mean) / std * lp for a, lp in zip(raw, logprobs, strict=True)) / 8).backward()
    for n, p in agent.policy_network.named_parameters():
        close(mine[n], p.grad, atol=1e-6, rtol=1e-4)


def loss_and_gradient(agent, ref, x):
    agent.zero_grad()
    loss = RLHFTrainer(agent, ref, RLHFConfig()).compute_loss(**x)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in agent.parameters()]


def test_what_follows_the_first_end_does_not_count(agent, tokenizer):
    ref = create_reference_model(agent)
    x = batch_of(tokenizer)
    mask = tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    expected = loss_and_gradient(agent, ref, x)
    close(loss_and_gradient(agent, ref, x | {"response_attention_mask": mask}), expected)
    close(
        loss_and_gradient(
            agent, ref, x | {"response_ids": tensor([[4, 5, 0, 3], [6, 7, 8, 9], [0, 7, 0, 2]])}
        ),
        expected,
    )


def test_forward_names_every_token(agent, tokenizer):
    x = batch_of(tokenizer)
    x.pop("rewards")
    trainer = RLHFTrainer(agent, create_reference_model(agent), RLHFConfig())
    logprobs, entropies, values, ref = trainer.forward(**x)
    close(logprobs, ref)
    assert values.shape == (3, 4) and not values.any()
    words = tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    assert ((logprobs < 0) == words).all() and ((entropies > 0) == words).all()


def test_agent_objective(agent, tokenizer, prompts):
    "mean(score − β·(log π − log π_sft)) + γ·mean log π, text by text; π_sft gives 0.5 nats more to each."
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    torch.manual_seed(3)
    sft = Agent(GPT2LMHeadModel(agent.policy_network.config).eval())

    def judge(ids, mask):
        return mask.sum(-1).float()

    value = AgentObjective(agent, sft, judge, gamma=0.3, beta=0.2)(ids, mask)
    terms = []
    for i in range(3):
        row = ids[i][mask[i].bool()]
        lp = [
            sum(
                m.policy_network(row[None]).logits[0].log_softmax(-1)[t, row[t + 1]].item()
                for t in range(len(row) - 1)
            )
            for m in (agent.eval(), sft)
        ]
        terms.append(len(row) - 0.2 * (lp[0] - lp[1]) + 0.3 * lp[0])
    assert value.item() == pytest.approx(sum(terms) / 3, rel=1e-4)
