"""Trainers small enough for a test.

Nine words and an end token, two layers of sixteen numbers, dropout in the settings.
"""

import math

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.objective.group import PRESETS
from instruct_goose.training.experience import Experience
from instruct_goose.training.trainer import RLHFTrainer

WORDS = [f"w{i}" for i in range(9)]
TOKENIZER = word_tokenizer(
    WORDS, 20, pad="<end>", bos="<end>", eos="<end>"
)  # <end>, <unk> and nine words
V = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
BASE = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=20,
    pad_token_id=EOS,
    bos_token_id=EOS,
    eos_token_id=EOS,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        **BASE, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3
    ),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, attention_dropout=0.3),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, attention_dropout=0.3),
}
QUERIES = [[0, 5, 7], [0], [0, 4, 0, 6, 8], [0, 10]]  # the end token occurs inside
RESPONSES = [[8, 9, 0], [2, 10, 3, 5, 0], [7], [3, 0]]
SCORES = torch.tensor([1.5, -2.0, 0.25, 0.5])


def tiny(name="gpt2", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.35)
    return model.to(dtype)


def agent_and_reference(name="gpt2", separate=False):
    """A value head that says something, and a reference that differs from the policy.

    Both are in training mode: dropout is on.
    """
    value_model = tiny(name, seed=7) if separate else None
    agent = Agent(tiny(name), value_model=value_model).train()
    torch.nn.init.normal_(agent.value_head.weight, std=0.3)
    torch.nn.init.constant_(agent.value_head.bias, 0.2)
    return agent, tiny(name, seed=1).train()


def config(algorithm="ppo", **changes):
    small = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=1e-3)
    if PRESETS[algorithm]["group_size"] > 1:
        small["group_size"] = 2
    return RLHFConfig.preset(algorithm, **small | changes)


def reward(texts):
    return [text.split().count("w1") - 0.5 * text.split().count("w2") for text in texts]


PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2", "w8 w7", "w4", "w2", "w6"]
SUMS = [{"prompt": f"w{i % 8 + 1}", "answer": f"w{(i + 1) % 8 + 1}"} for i in range(8)]
HELD_OUT = [
    "w7",
    "w7 w7",
    "w7 w8",
    "w7 w1 w1",
    "w7 w0",
    "w7 w6",
    "w7 w5 w4",
    "w7 w3",
    "w7 w2",
    "w7 w4",
    "w7 w1",
]  # more than a batch


def trainer(cls=RLHFTrainer, model=None, ref_model=None, callbacks=(), **changes):
    settings = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=5e-3, steps=50, seed=1)
    settings |= changes
    preset = settings.pop("algorithm", "ppo")
    config = RLHFConfig.preset(preset, **settings)
    return cls(model or tiny(), ref_model, config, tokenizer=TOKENIZER, callbacks=callbacks)


def ready(t, judge=reward, prompts=PROMPTS):
    "The experience of one iteration: sampled, scored, annotated, with advantages."
    return t.advantages(t.score(t.rollout(prompts), judge))


def experience(query_ids, query_mask, response_ids, mask, **columns):
    "An experience of which only the given columns matter; the other ones are 0."
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    needed = {"scores": zeros[:, 0], "rewards": zeros, "advantages": zeros}
    for name in ("old_logprobs", "ref_logprobs", "entropy", "kl"):
        needed[name] = zeros
    return Experience(query_ids, query_mask, response_ids, mask, **needed | columns)


def no_clock(metrics):
    return [{k: v for k, v in m.items() if "second" not in k} for m in metrics]


def weights(t):
    return [p.detach().clone() for p in t.agent.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kl_by_hand(p, q, queries, responses, temperature=1.0):
    """Σₜ Σ_v p·log(p/q) of each response.

    Each is read alone and unpadded, through the models' own forward pass.
    """
    sums = []
    for query, response in zip(queries, responses, strict=True):
        ids = torch.tensor([query + response])
        places = slice(len(query) - 1, len(query) + len(response) - 1)
        with torch.no_grad():
            p_table = p.eval()(ids).logits[0, places].div(temperature).softmax(-1)
            q_table = q.eval()(ids).logits[0, places].div(temperature).softmax(-1)
        pairs = zip(p_table.flatten().tolist(), q_table.flatten().tolist(), strict=True)
        sums.append(sum(x * math.log(x / y) for x, y in pairs))
    return sums


def rows(rollout):
    "The queries, and the responses, as lists of token ids without padding."
    queries = zip(rollout.query_ids, rollout.query_mask, strict=True)
    responses = zip(rollout.response_ids, rollout.mask, strict=True)
    return [[ids[mask].tolist() for ids, mask in pairs] for pairs in (queries, responses)]


SHORT = word_tokenizer(WORDS, 16, pad="<end>", bos="<end>", eos="<end>")
FOUR = ["w1 w2", "w3", "w4 w5 w6", "w7"]


def made(
    seed=0,
    algorithm="ppo",
    reference=None,
    trainer=RLHFTrainer,
    optimizer=None,
    callbacks=(),
    dtype=torch.float64,
    **changes,
):
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(SHORT), n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    group = 2 if PRESETS[algorithm]["group_size"] > 1 else 1
    small = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=1e-3, group_size=group) | changes
    return trainer(
        model.to(dtype),
        reference,
        RLHFConfig.preset(algorithm, **small),
        tokenizer=SHORT,
        optimizer=optimizer,
        callbacks=callbacks,
    )


def even(texts):
    return [len(text) % 5 - 2.0 for text in texts]


def step(t):
    return t.step((FOUR * 2)[: 8 // t.config.group_size], even)
