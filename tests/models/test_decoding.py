"""The oracle is the model's own forward over the whole text of one row, unpadded, without a cache.

Which step a model gets, and what a step in a CUDA graph does when, is tested with stand-ins for
the graph, which this machine cannot capture."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from instruct_goose.models import decoding
from instruct_goose.models.adapters import with_lora
from instruct_goose.models.decoding import (
    FAMILIES,
    GraphSteps,
    LibrarySteps,
    OwnSteps,
    StaticSteps,
    attention,
    concat_weights,
    conv1d_layer,
    has_own_steps,
    has_static_steps,
    is_plain_cache,
    is_unhooked,
    layer_norm,
    linear_layer,
    only_marks_gradients,
    product_rounding,
    rms_norm,
    rotate_halves,
    start_decoding,
)
from instruct_goose.models.tokens import pad

# --- the numbers of a step

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
    "llama, one block": lambda: llama(num_hidden_layers=1),
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
    "qwen2, one block": lambda: shared("Qwen2", num_hidden_layers=1),
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


# --- which caches and which models


def plain_llama():
    return tiny(llama())


def sliding(window):
    return DynamicSlidingWindowLayer(sliding_window=window)


def cache_of(*layers):
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


class OtherCache(DynamicCache):
    pass


class OtherLayer(DynamicLayer):
    pass


@pytest.mark.parametrize(
    "cache, width, is_plain",
    [
        (cache_of(), 0, True),
        (cache_of(DynamicLayer(), DynamicLayer()), 9, True),
        (cache_of(sliding(8)), 8, True),
        (cache_of(sliding(8)), 9, False),
        (cache_of(DynamicLayer(), sliding(8)), 9, False),
        (cache_of(sliding(8)), 0, True),
        (cache_of(OtherLayer()), 0, False),
        (cache_of(DynamicLayer(), OtherLayer()), 0, False),
        (OtherCache(), 0, False),
        (None, 0, False),
    ],
)
def test_a_plain_cache_holds_keys_and_values_of_all_columns(cache, width, is_plain):
    assert is_plain_cache(cache, width) == is_plain


def make_inputs_require_grads(*_):
    pass


@pytest.mark.parametrize(
    "hook, is_harmless", [(make_inputs_require_grads, True), (print, False), (object(), False)]
)
def test_the_hook_of_gradient_checkpointing_changes_no_number(hook, is_harmless, unchecked):
    with unchecked():
        assert only_marks_gradients(hook) == is_harmless


def add_hook(model):
    model.model.norm.register_forward_hook(lambda *_: None)


def add_early_hook(model):
    model.model.norm.register_forward_pre_hook(lambda *_: None)


def add_marking_hook(model):
    model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)


def change_forward(model):
    model.model.norm.forward = lambda x: x


class OwnNorm(nn.Module):
    def forward(self, x):
        return x


def add_own_layer(model):
    model.model.norm = OwnNorm()


@pytest.mark.parametrize(
    "change, is_plain",
    [
        (lambda model: None, True),
        (add_hook, False),
        (add_early_hook, False),
        (add_marking_hook, True),
        (change_forward, False),
        (add_own_layer, False),
    ],
)
def test_a_layer_that_somebody_changed_is_found(change, is_plain):
    model = plain_llama()
    change(model)
    assert is_unhooked(model) == is_plain
    assert has_own_steps(model) == is_plain and has_static_steps(model) == is_plain


def test_modules_of_a_known_package_are_none_of_somebodys():
    model = plain_llama()
    add_own_layer(model)
    assert is_unhooked(model, OwnNorm.__module__) and not is_unhooked(model, "other.")


@pytest.mark.parametrize("name", ["_global_forward_hooks", "_global_forward_pre_hooks"])
def test_a_hook_of_all_modules_is_found(name, monkeypatch):
    monkeypatch.setattr(torch_module, name, {0: print})
    assert not is_unhooked(plain_llama())


def bfloat16(model):
    model.bfloat16()


def of_two_dtypes(model):
    model.model.norm.double()


def own_parameter(model):
    class Own(nn.Parameter):
        pass

    model.lm_head.weight = Own(model.lm_head.weight.detach().clone())


def other_activation(model):
    model.config.hidden_act = "relu"


@pytest.mark.parametrize(
    "change", [bfloat16, of_two_dtypes, own_parameter, other_activation], ids=lambda f: f.__name__
)
def test_what_an_own_step_does_not_compute_is_left_to_the_library(change):
    model = plain_llama()
    assert has_own_steps(model)
    change(model)
    assert not has_own_steps(model)


@pytest.mark.parametrize(
    "rope, is_own, is_static",
    [
        ("default", True, True),
        ("linear", True, True),
        ("llama3", True, True),
        ("yarn", False, True),
        ("dynamic", False, False),
        ("longrope", False, False),
    ],
)
def test_angles_that_hold_for_every_length(rope, is_own, is_static):
    model = plain_llama()
    model.config.rope_parameters = {"rope_type": rope}
    assert (has_own_steps(model), has_static_steps(model)) == (is_own, is_static)
    model.config.rope_parameters = None
    assert has_own_steps(model)


@pytest.mark.parametrize(
    "implementation, is_static", [("eager", True), ("sdpa", True), ("flash_attention_2", False)]
)
def test_a_mask_that_is_ready_is_taken_by_some_attentions(implementation, is_static):
    model = plain_llama()
    model.config._attn_implementation = implementation
    assert has_static_steps(model) == is_static


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "dtype, eps", [(torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]
)
def test_products_are_as_coarse_as_their_type(dtype, eps, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # counts on a GPU alone
    try:
        assert product_rounding(torch.zeros(2, dtype=dtype)) == eps
    finally:
        torch.set_float32_matmul_precision(before)


# --- operations


def test_attention_is_the_softmax_of_scaled_products_shared_by_neighbouring_heads():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 3)
    keys, values = torch.randn(2, 4, 5, 3)  # rows · key heads, time, D
    bias = torch.zeros(4, 1, 5)
    bias[:, :, 4] = -torch.inf
    made = attention(q, keys, values, bias).view(2, 4, 3)
    for row in range(2):
        for head in range(4):
            key_head = 2 * row + head // 2
            scores = (keys[key_head, :4] @ q[row, head]) / 3**0.5
            expected = scores.softmax(0) @ values[key_head, :4]
            torch.testing.assert_close(made[row, head], expected)


def test_a_rotation_turns_pairs_of_a_half_apart():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos = torch.tensor([0.6, 0.8, 0.6, 0.8])
    sin = torch.tensor([0.8, 0.6, 0.8, 0.6])
    signed = sin * torch.tensor([-1, -1, 1, 1])
    angles = torch.stack([cos, signed])[None, :, None]
    expected = [1 * 0.6 - 3 * 0.8, 2 * 0.8 - 4 * 0.6, 3 * 0.6 + 1 * 0.8, 4 * 0.8 + 2 * 0.6]
    assert rotate_halves(x, angles).flatten().tolist() == pytest.approx(expected)


def test_layers_as_functions_are_the_layers():
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    first, second = nn.Linear(4, 2), nn.Linear(4, 5)
    both = torch.cat([first(x), second(x)], -1)
    torch.testing.assert_close(linear_layer(first, second)(x), both)
    bare = nn.Linear(4, 2, bias=False)
    torch.testing.assert_close(linear_layer(bare)(x), bare(x))
    conv = transformers.pytorch_utils.Conv1D(6, 4)
    nn.init.normal_(conv.bias)
    torch.testing.assert_close(conv1d_layer(conv)(x), conv(x))
    norm = nn.LayerNorm(4, eps=0.3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(layer_norm(norm)(x), norm(x))
    root = LlamaRMSNorm(4, eps=0.3)
    nn.init.normal_(root.weight)
    torch.testing.assert_close(rms_norm(root)(x), root(x))


def test_weights_are_cast_once_under_autocast_and_one_alone_is_not_copied():
    a, b = torch.ones(2, 3), torch.zeros(1, 3)
    assert concat_weights(a) is a
    assert concat_weights(a, b).tolist() == [[1] * 3, [1] * 3, [0] * 3]
    with torch.autocast("cpu", torch.bfloat16):
        assert concat_weights(a, b).dtype == concat_weights(a).dtype == torch.bfloat16


# --- a step in a graph


class Counts:
    "A step that counts: its logits are its token plus what it has been called."

    def __init__(self):
        self.calls = 0
        self.kept = []

    def __call__(self, token):
        self.calls += 1
        return token + 10.0 * self.calls

    def keep(self, order):
        self.kept.append(order.tolist())


class Space:
    "Captures by doing the work once; a replay writes the next logits in place."

    cleared = 0

    def __init__(self, fails=False):
        self.fails = fails
        self.captured = 0
        self.replayed = 0

    def capture(self, work):
        if self.fails:
            raise RuntimeError("no graph here")
        self.captured += 1
        work()
        return SimpleNamespace(replay=self.replay)

    def replay(self):
        self.replayed += 1


@pytest.fixture
def spaces(monkeypatch, unchecked):
    "use(space): what the next captures are made in; clearing is counted."

    def use(space):
        def capture_space(device):
            return space

        space.cleared = 0

        def clear():
            space.cleared += 1

        capture_space.cache_clear = clear
        monkeypatch.setattr(decoding, "capture_space", capture_space)
        return space

    with unchecked():
        yield use


def test_the_first_step_is_captured_and_all_are_replayed(spaces):
    space = spaces(Space())
    step = Counts()
    graph = GraphSteps(step)
    tokens = torch.tensor([1, 2])
    first = graph(tokens)
    assert (space.captured, space.replayed, step.calls) == (1, 1, 1)
    assert first.tolist() == [11, 12] and graph.token is not tokens
    again = graph(torch.tensor([3, 4]))
    assert again is first and graph.token.tolist() == [3, 4]  # where the graph reads
    assert (space.captured, space.replayed, step.calls) == (1, 2, 1)


def test_behind_a_change_of_rows_one_step_runs_without_a_graph_and_the_next_is_captured(spaces):
    space = spaces(Space())
    step = Counts()
    graph = GraphSteps(step)
    graph(torch.tensor([1, 2]))
    graph.keep(torch.tensor([1]))
    assert step.kept == [[1]] and graph.graph is None
    assert graph(torch.tensor([5])).tolist() == [25]  # the second call of the step itself
    assert (space.captured, space.replayed) == (1, 1)
    graph(torch.tensor([6]))
    assert (space.captured, space.replayed, step.calls) == (2, 2, 3)
    assert len(graph.token) == 1


def test_a_step_that_cannot_be_captured_goes_on_with_one_warning(spaces, recwarn):
    space = spaces(Space(fails=True))
    step = Counts()
    graph = GraphSteps(step)
    for n in (1, 2, 3):
        assert graph(torch.tensor([1])).tolist() == [1 + 10 * n]
        graph.keep(torch.tensor([0]))
    said = [str(w.message) for w in recwarn if "no CUDA graph" in str(w.message)]
    assert len(said) == 1 and "no graph here" in said[0]
    assert space.cleared == 1 and step.calls == 3


# --- the choice of a step


IDS = torch.tensor([[3, 5, 7]])
MASK = torch.ones(1, 3, dtype=torch.bool)


@torch.no_grad()
def chosen(monkeypatch, off, scale=1.0):
    "The step that `start_decoding` goes on with, where a faster one is off by this much."
    model = plain_llama()
    model.lm_head.weight.data *= scale

    class Faster:
        def __init__(self, functions, mask, past, n, graph):
            pass

        def __call__(self, token):
            logits = model(IDS).logits[:, -1]
            off_one = torch.zeros_like(logits)
            off_one[0, 0] = off
            return logits + off_one

    monkeypatch.setattr(decoding, "OwnSteps", Faster)
    logits, step = start_decoding(model, IDS, MASK, 4)
    torch.testing.assert_close(logits, model(IDS).logits[:, -1])
    return type(step), logits.abs().max().item()


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_a_faster_step_may_be_off_by_a_hundred_thousandth_and_not_more(
    scale, monkeypatch, recwarn, unchecked
):
    with unchecked():
        _, size = chosen(monkeypatch, 0.0, scale)
        limit = 1e-5 * max(1.0, size)
        kind, _ = chosen(monkeypatch, 0.8 * limit, scale)
        assert kind.__name__ == "Faster" and not recwarn
        kind, _ = chosen(monkeypatch, 1.3 * limit, scale)
        assert kind is LibrarySteps
    assert "from those of a faster step" in str(recwarn.pop(UserWarning).message)


def test_a_faster_step_that_fails_is_named(monkeypatch, recwarn):
    def fails(*_):
        raise IndexError("out of range")

    monkeypatch.setattr(decoding, "OwnSteps", fails)
    _, step = start_decoding(plain_llama(), IDS, MASK, 4)
    assert type(step) is LibrarySteps
    assert "a faster step fails, out of range" in str(recwarn.pop(UserWarning).message)


def test_activations_are_those_of_their_names():
    x = torch.linspace(-3, 3, 7)
    expected = {"gelu": F.gelu(x), "silu": F.silu(x), "gelu_new": F.gelu(x, approximate="tanh")}
    assert decoding.ACTIVATIONS.keys() == expected.keys()
    for name, y in expected.items():
        assert torch.equal(decoding.ACTIVATIONS[name](x), y)
