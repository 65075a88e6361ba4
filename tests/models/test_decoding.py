"""The oracle is the model's own forward over the whole text of one row, without padding and without a cache."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from instruct_goose.models.adapters import with_lora
from instruct_goose.models.decoding import (
    FAMILIES,
    LibrarySteps,
    OwnSteps,
    StaticSteps,
    has_own_steps,
    start_decoding,
)
from instruct_goose.models.tokens import pad

V = 23
BASE = dict(
    vocab_size=V,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=6,
    max_position_embeddings=40,
    bos_token_id=1,
    eos_token_id=2,
)
ROTARY = BASE | dict(intermediate_size=20)


def gpt2(**k):
    return transformers.GPT2Config(**BASE | k)


def llama(**k):
    return transformers.LlamaConfig(**ROTARY | dict(num_key_value_heads=2) | k)


OURS = {  # what our step must be for, in every setting that it takes
    "gpt2": lambda: gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2, gelu": lambda: gpt2(activation_function="gelu", n_inner=7),
    "llama, grouped": lambda: llama(attention_dropout=0.3),
    "llama, a key each": lambda: llama(num_key_value_heads=6),
    "llama, wide heads": lambda: llama(head_dim=10),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, other base": lambda: llama(
        rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    ),
    "llama, stretched": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
    ),
    "llama 3": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
}


def shared(kind, **k):
    return getattr(transformers, f"{kind}Config")(**ROTARY | dict(num_key_value_heads=2) | k)


STATIC = {  # what goes through the library, on a GPU in fixed shapes
    "qwen2": lambda: shared("Qwen2"),
    "qwen3": lambda: shared("Qwen3", head_dim=4),
    "mistral": lambda: shared("Mistral", sliding_window=None),
    "mistral, a window as wide as the text": lambda: shared("Mistral", sliding_window=12),
    "gemma": lambda: shared("Gemma", head_dim=4),
    "gemma2": lambda: shared("Gemma2", head_dim=4, final_logit_softcapping=2.0),
    "phi": lambda: shared("Phi"),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**ROTARY),
    "opt": lambda: transformers.OPTConfig(**BASE, ffn_dim=20, word_embed_proj_dim=24),
    "mixtral": lambda: shared("Mixtral", num_local_experts=3),
    "gpt2, quick gelu": lambda: gpt2(activation_function="quick_gelu"),
}
OTHERS = {
    "mistral, window": lambda: shared("Mistral", sliding_window=4),
    "mistral, a window one column too short": lambda: shared("Mistral", sliding_window=11),
    "falcon, alibi": lambda: transformers.FalconConfig(**BASE, alibi=True),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        vocab_size=V,
        hidden_size=24,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=V, hidden_size=24, n_layer=2, n_head=2),
    "llama, dynamic": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    ),
}
QUERIES = [[3, 5, 7, 4, 9, 11], [1], [6, 6, 8], [12, 20, 2, 0, 3]]
NEW = torch.tensor(
    [[4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21], [22, 0, 1, 2, 3, 4]]
)


def tiny(config, seed=0, std=0.3):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        nn.init.normal_(p, std=std)
    return model.eval()


@torch.no_grad()
def slow(model, row, t):
    return model(torch.tensor([QUERIES[row] + NEW[row, :t].tolist()])).logits[0, -1]


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
    assert has_own_steps(model)
    logits, step = start_decoding(model, *queries(poison), 6)
    assert type(step) is OwnSteps
    two_rows_leave(model, logits, step)
    logits, graph = start_decoding(model, *queries(poison), 6, graph=True)
    two_rows_leave(model, logits, graph.step)  # its buffers are as wide from the first step on


def two_rows_leave(model, logits, step):
    close(model, logits, range(4), 0)
    close(model, step(NEW[:, 0]), range(4), 1)
    step.keep(torch.tensor([0, 3, 2]))  # row 1 ends, row 3 takes its place
    close(model, step(NEW[[0, 3, 2], 1]), [0, 3, 2], 2)
    step.keep(torch.tensor([2, 1]))  # and row 0
    for t in range(2, 6):
        close(model, step(NEW[[2, 3], t]), [2, 3], t + 1)  # to the last place of the buffers


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_everything_else_goes_through_the_library_and_rows_leave_too(name, graph, recwarn):
    model = tiny(OTHERS[name]())
    assert not has_own_steps(model)
    logits, step = start_decoding(model, *queries(), 6, graph=graph)
    said = [
        str(w.message) for w in recwarn if "samples through transformers' forward" in str(w.message)
    ]
    assert (
        type(step) is LibrarySteps
        and len(said) == graph
        and not any("from those of" in text for text in said)
    )
    if "dynamic" in name:
        model.config.max_position_embeddings = 40
    two_rows_leave(model, logits, step)


@pytest.mark.parametrize("name", STATIC)
@torch.no_grad()
def test_the_library_in_fixed_shapes_says_what_it_says_without_while_rows_leave(name):
    model = tiny(STATIC[name]())
    assert type(start_decoding(model, *queries(), 6)[1]) is LibrarySteps
    logits, graph = start_decoding(model, *queries(V - 1), 6, graph=True)
    assert type(graph.step) is StaticSteps
    two_rows_leave(model, logits, graph.step)


@torch.no_grad()
def test_adapters_run_in_fixed_shapes_and_what_hooks_do_is_not_foreseen():
    model = with_lora(tiny(STATIC["qwen2"](), std=0.3), 2)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    logits, graph = start_decoding(model, *queries(), 6, graph=True)
    assert type(graph.step) is StaticSteps
    two_rows_leave(model, logits, graph.step)
    model.model.layers[1].register_forward_pre_hook(lambda *_: None)
    assert type(start_decoding(model, *queries(), 6, graph=True)[1]) is LibrarySteps


@pytest.mark.parametrize("name", ["llama, grouped", *STATIC])
@torch.no_grad()
def test_from_token_to_token_nothing_changes_but_what_tensors_hold(name):
    "A captured graph would keep a number, a shape and an address as they were."
    model = tiny({**OURS, **STATIC}[name]())
    step = start_decoding(model, *queries(), 6, graph=True)[1].step
    step(NEW[:, 0])
    before = baked(model, step)
    time = step.time.item()
    for t in (1, 2):
        step(NEW[:, t])
    assert baked(model, step) == before and step.time.item() == time + 2


@torch.no_grad()
def test_what_would_be_baked_is_found():
    model = tiny(OURS["llama, grouped"]())
    _, step = start_decoding(model, *queries(), 6)
    before = baked(model, step)
    step(NEW[:, 0])
    assert baked(model, step) != before  # its time is a number


def baked(model, step):
    "Numbers and addresses of a step, its cache and their parts, and of the model's."

    def walk(x):
        if isinstance(x, torch.Tensor):
            return x.data_ptr(), x.shape
        if isinstance(x, list | tuple):
            return [walk(y) for y in x]
        if isinstance(x, dict):
            return {k: walk(y) for k, y in x.items()}
        return (
            walk(vars(x))
            if type(x).__module__.startswith(("instruct_goose.", "transformers.cache_utils"))
            and hasattr(x, "__dict__")
            else x
        )

    return walk({k: x for k, x in vars(step).items() if k not in ("weights", "model")}), [
        walk(vars(m)) for m in model.modules()
    ]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "llama, tied", "llama, biases"])
@torch.no_grad()
def test_under_autocast_our_step_is_as_near_to_float32_as_the_library(name, static):
    "Both round the same products, so neither may be more than twice as far off; and no weight is rounded at each token."
    model = tiny(OURS[name]())
    (ids, seen) = queries()
    casts = []
    exact = [torch.stack([slow(model, row, t + 1) for row in range(4)]) for t in range(5)]

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                casts.append(args[0].shape)
            return func(*args, **kwargs or {})

    with torch.autocast("cpu", torch.bfloat16):
        assert not has_own_steps(model)
        theirs = start_decoding(model, ids, seen, 6)[1]
        own = OwnSteps(FAMILIES[type(model)](model, 12), seen, theirs.past, 6, static=static)
        own(ids[:, -1])
        for t in range(5):
            with Casts():
                said = own(NEW[:, t])
            off, limit = ((x - exact[t]).abs().max() for x in (said, theirs(NEW[:, t])))
            assert said.dtype == torch.bfloat16 and off <= 2 * limit
    assert casts and all(
        len(shape) == 3 or shape[0] == 4 for shape in casts
    )  # keys and values; or rows of them
