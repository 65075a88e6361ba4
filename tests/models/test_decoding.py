"""The oracle is the model's own forward over the whole text of one row, without padding and without a cache."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from instruct_goose.models.decoding import LibrarySteps, OwnSteps, begin, is_known
from instruct_goose.models.tokens import pad

V = 23
BASE = dict(vocab_size=V, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=40, bos_token_id=1, eos_token_id=2)
ROTARY = BASE | dict(intermediate_size=20)
gpt2 = lambda **k: transformers.GPT2Config(**BASE | k)
llama = lambda **k: transformers.LlamaConfig(**ROTARY | dict(num_key_value_heads=2) | k)
OURS = {  # what our step must be for, in every setting that it takes
    "gpt2": lambda: gpt2(resid_pdrop=.3, embd_pdrop=.3, attn_pdrop=.3),
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2, gelu": lambda: gpt2(activation_function="gelu", n_inner=7),
    "llama, grouped": lambda: llama(attention_dropout=.3),
    "llama, a key each": lambda: llama(num_key_value_heads=6),
    "llama, wide heads": lambda: llama(head_dim=10),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, other base": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 50.}),
    "llama, stretched": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 100., "factor": 3.}),
    "llama 3": lambda: llama(rope_parameters={"rope_type": "llama3", "rope_theta": 100., "factor": 4., "low_freq_factor": 1., "high_freq_factor": 4.,
                                             "original_max_position_embeddings": 16}),
}
OTHERS = {
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY | dict(num_key_value_heads=2)),
    "mistral, window": lambda: transformers.MistralConfig(**ROTARY | dict(num_key_value_heads=2, sliding_window=4)),
    "gemma2": lambda: transformers.Gemma2Config(**ROTARY | dict(num_key_value_heads=2, head_dim=4, final_logit_softcapping=2.)),
    "bloom": lambda: transformers.BloomConfig(vocab_size=V, hidden_size=24, n_layer=2, n_head=2),
    "gpt2, quick gelu": lambda: gpt2(activation_function="quick_gelu"),
    "llama, dynamic": lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 100., "factor": 2.}),
}
QUERIES = [[3, 5, 7, 4, 9, 11], [1], [6, 6, 8], [12, 20, 2, 0, 3]]
NEW = torch.tensor([[4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21], [22, 0, 1, 2, 3, 4]])


def tiny(config, seed=0, std=.3):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters(): nn.init.normal_(p, std=std)
    return model.eval()


@torch.no_grad()
def slow(model, row, t): return model(torch.tensor([QUERIES[row] + NEW[row, :t].tolist()])).logits[0, -1]


def close(model, logits, rows, t):
    expected = torch.stack([slow(model, row, t) for row in rows])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def queries(poison=0):
    ids, seen = pad(QUERIES, poison, side="left")
    return ids, seen


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("poison", [0, V - 1])
@torch.no_grad()
def test_our_step_says_what_the_model_says_while_rows_leave(name, poison):
    model = tiny(OURS[name]())
    assert is_known(model)
    logits, step = begin(model, *queries(poison), 6)
    assert type(step) is OwnSteps
    two_rows_leave(model, logits, step)
    logits, graph = begin(model, *queries(poison), 6, graph=True)
    two_rows_leave(model, logits, graph.step)                # its buffers are as wide from the first step on


def two_rows_leave(model, logits, step):
    close(model, logits, range(4), 0)
    close(model, step(NEW[:, 0]), range(4), 1)
    step.keep(torch.tensor([0, 3, 2]))                       # row 1 ends, row 3 takes its place
    close(model, step(NEW[[0, 3, 2], 1]), [0, 3, 2], 2)
    step.keep(torch.tensor([2, 1]))                          # and row 0
    for t in range(2, 6): close(model, step(NEW[[2, 3], t]), [2, 3], t + 1)  # to the last place of the buffers


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_everything_else_goes_through_the_library_and_rows_leave_too(name):
    model = tiny(OTHERS[name]())
    assert not is_known(model)
    logits, step = begin(model, *queries(), 6)
    assert type(step) is LibrarySteps
    if "dynamic" in name: model.config.max_position_embeddings = 40
    two_rows_leave(model, logits, step)


def test_a_model_without_keys_and_values_is_refused_by_name():
    model = tiny(transformers.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(TypeError, match="MambaForCausalLM returns no past_key_values"): begin(model, *queries(), 6)
