"""Mixtures of experts of several families, small enough for a test.

Nine words and an end token, as in `small_trainer`; four experts, two for each token.
"""

import torch
import transformers
from small_trainer import ROTARY
from transformers import AutoModelForCausalLM

SMALL = ROTARY | dict(num_experts_per_tok=2, max_position_embeddings=32)
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, head_dim=8
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=4),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **SMALL, num_local_experts=4, logits_scaling=3.0
    ),  # no plain head
}


def mixture(name, seed=0, **settings):
    "A mixture with weights large enough that its experts differ, in evaluation mode."
    config = CONFIGS[name]()
    for setting, value in settings.items():
        setattr(config, setting, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model
