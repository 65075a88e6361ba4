"The oracle of the models' tests: one unpadded row at a time through the model's own forward, in eval mode."

import itertools

import torch
import transformers
from transformers import AutoModelForCausalLM

from instruct_goose.models.families import eval_mode
from instruct_goose.models.tokens import pad

transformers.utils.logging.set_verbosity_error()
V, EOS = 13, 2
BASE = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=14,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
# the three families named in the design, with dropout, then heads and positions of other kinds
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        **BASE, resid_pdrop=0.4, embd_pdrop=0.4, attn_pdrop=0.4
    ),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, attention_dropout=0.4),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, attention_dropout=0.4),
    "qwen3": lambda: transformers.Qwen3Config(**ROTARY, head_dim=8, attention_dropout=0.4),
    "phi: a head with bias": lambda: transformers.PhiConfig(**ROTARY, resid_pdrop=0.4),
    "bloom: no position ids": lambda: transformers.BloomConfig(
        vocab_size=V, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.4
    ),
    "opt: a narrow head": lambda: transformers.OPTConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=14,
        word_embed_proj_dim=8,
    ),
    "bert: a head that transforms": lambda: transformers.BertConfig(
        **BASE, intermediate_size=24, is_decoder=True
    ),
    "gemma2: capped logits": lambda: transformers.Gemma2Config(
        **ROTARY, head_dim=8, final_logit_softcapping=2.0, attention_dropout=0.4
    ),
    "cohere: scaled logits": lambda: transformers.CohereConfig(**ROTARY, logit_scale=0.3),
    "granite: divided logits": lambda: transformers.GraniteConfig(**ROTARY, logits_scaling=3.0),
}
PLAIN = {
    name for name in CONFIGS if name.split(":")[0] not in ("bert", "gemma2", "cohere", "granite")
}
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3"]
LAYOUTS = list(itertools.product(("left", "right"), ("left", "right"), (EOS, 0)))

# rows of 5, 6 and 7 tokens; queries and responses hold the end token, which is also the padding in half of the tests
QUERIES = [[1, 5, 7], [1], [1, 4, 2, 6, 8]]
RESPONSES = [[8, 2], [2, 11, 3, 12, 2], [7, 4]]


def tiny(name, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model.to(dtype)


def batch(qside="left", rside="right", pad_id=EOS):
    return *pad(QUERIES, pad_id, qside), *pad(RESPONSES, pad_id, rside)


def oracle(model, temperature=1.0, rows=None):
    "logprobs, entropies, hidden states and logits of every row, unpadded."
    found = []
    with eval_mode(model):
        for q, r in rows or zip(QUERIES, RESPONSES, strict=True):
            ids = torch.tensor([q + r])
            logits = model(input_ids=ids).logits[0, len(q) - 1 : -1]
            dist = torch.distributions.Categorical(logits=logits / temperature)
            hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(q) - 1 : -1]
            found.append((dist.log_prob(torch.tensor(r)), dist.entropy(), hidden, logits))
    return found


def near(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
