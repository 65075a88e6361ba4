"""Language models of four families, small enough for a test.

Nine words, twelve positions, two layers.
"""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

BASE = dict(
    vocab_size=9,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=12,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE),
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY),
    "gemma2": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2.0),
}  # no plain head
families = pytest.mark.parametrize("name", CONFIGS)


def tiny(name="gpt2", seed=0, std=0.3):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model


def what_learns(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
