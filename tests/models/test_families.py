"""Every family against its own rows alone, unpadded, through its own forward; and what is refused, by name."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from row_alone import BASE, QUERIES, RESPONSES, ROTARY, V
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from instruct_goose.models.agent import Agent
from instruct_goose.models.families import (
    check_causal,
    configured_context,
    context_length,
    differs_by_more_than_rounding,
    eval_mode,
    forward_options,
    has_plain_head,
    hidden_size,
    main_output,
    plain_head,
    plain_options,
    recompute_layers,
    recomputed_layers,
    trunk,
    vocabulary_size,
)
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.tokens import pad

T = transformers
SERVED = {
    "bart's decoder": lambda: T.BartConfig(
        vocab_size=V,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=14,
    ),
    "recurrent_gemma": lambda: T.RecurrentGemmaConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=3,
        intermediate_size=24,
        num_attention_heads=2,
        lru_width=16,
        attention_window_size=8,
    ),
    "qwen3_next": lambda: T.Qwen3NextConfig(
        **ROTARY | dict(num_hidden_layers=4),
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "llama4": lambda: T.Llama4TextConfig(
        **ROTARY, head_dim=8, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=8
    ),
    "gpt_neox": lambda: T.GPTNeoXConfig(**BASE, intermediate_size=24),
    "falcon": lambda: T.FalconConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    ),
    "mixtral": lambda: T.MixtralConfig(**ROTARY, num_local_experts=2),
    "gemma3": lambda: T.Gemma3TextConfig(**ROTARY, head_dim=8),
    "olmo2": lambda: T.Olmo2Config(**ROTARY),
    "phi3": lambda: T.Phi3Config(**ROTARY),
    "stablelm": lambda: T.StableLmConfig(**ROTARY),
}
AHEAD = {
    "bert": lambda: T.BertConfig(**BASE, intermediate_size=24),
    "roberta": lambda: T.RobertaConfig(**BASE, intermediate_size=24),
}


def tiny(config, std=0.3):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=std)
    return model


@pytest.mark.parametrize("name", SERVED)
def test_every_family_is_the_row_alone(name):
    "float32: experts have no float64. Logits of a few units, some ten sums of 24 terms a layer: 1e-4 is a hundred times their rounding."
    model = tiny(SERVED[name]())
    agent = Agent(model)
    torch.nn.init.normal_(agent.value_head.weight)
    for side, pad_id in (("left", 0), ("right", 2)):
        args = *pad(QUERIES, pad_id, side), *pad(RESPONSES, pad_id)
        found = agent.evaluate(*args)
        for i, (q, r) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
            with eval_mode(model), torch.no_grad():
                logits = (
                    model(input_ids=torch.tensor([q + r]))
                    .logits[0, len(q) - 1 : -1]
                    .log_softmax(-1)
                )
                hidden = trunk(model)(input_ids=torch.tensor([q + r]))[0][0, len(q) - 1 : -1]
            alone = logits.gather(-1, torch.tensor(r)[:, None])[:, 0]
            for mine in (found.logprobs, response_logprobs(model, *args)):
                torch.testing.assert_close(
                    mine[i][args[3][i]].detach(), alone, atol=1e-4, rtol=1e-4
                )
            values = (agent.value_head(hidden)[..., 0]).detach()
            torch.testing.assert_close(
                found.values[i][args[3][i]].detach(), values, atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("name", AHEAD)
def test_readers_are_refused_by_name(name, std):
    model = tiny(AHEAD[name](), std)
    args = *pad(QUERIES, 0, "left"), *pad(RESPONSES, 0)
    for call in (
        lambda: Agent(model),
        lambda: response_logprobs(model, *args),
        lambda: check_causal(trunk(model)),
    ):
        with pytest.raises(
            TypeError, match=f"{type(model).__name__.split('For')[0].split('LM')[0]}.* looks ahead"
        ):
            call()
    causal = tiny(SERVED["gpt_neox"]())
    with pytest.raises(TypeError, match="looks ahead"):
        Agent(causal, trunk(model))


def test_a_model_is_asked_once(monkeypatch):
    model = tiny(SERVED["gpt_neox"]())
    state = torch.get_rng_state()
    check_causal(model.train())
    assert model.training and torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(model, "forward", None)
    check_causal(model)


# --- heads ---


def test_a_head_that_scales_or_caps_is_not_plain():
    for config in (
        T.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=1.5),
        T.CohereConfig(**ROTARY, logit_scale=0.3),
        T.GraniteConfig(**ROTARY, logits_scaling=3.0),
    ):
        assert plain_head(tiny(config)) is None
    plain = tiny(T.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=None)).bfloat16()
    assert plain_head(plain) is plain.lm_head


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z * 1.01,
        lambda z: z + 0.1,
        lambda z: z.clamp(-2, 2),
        lambda z: z.flip(-1),
        lambda z: z[..., :-1],
    ],
)
def test_what_is_done_to_the_logits_is_noticed(change):
    class Other(T.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = change(out.logits)
            return out

    assert plain_head(Other(T.LlamaConfig(**ROTARY))) is None


class Passes:
    "Count the passes through a model's layers that have a gradient, below any checkpoint."

    def __init__(self, model):
        self.n = 0
        for name, part in model.named_modules():
            if name.rsplit(".", 1)[-1] in ("input_layernorm", "ln_1", "self_attn_layer_norm"):
                part.register_forward_hook(self.count)

    def count(self, *_):
        self.n += torch.is_grad_enabled()


def opt():
    "Its layers drop out by themselves, not in a module of their own."
    config = T.OPTConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=16,
        dropout=0.5,
    )
    return tiny(config)


def rotary():
    return tiny(T.LlamaConfig(**ROTARY, attention_dropout=0.5))


RECOMPUTE = {
    "never": lambda model: None,
    "transformers'": lambda model: model.activation_checkpointing_enable(),
    "transformers', reentrant": lambda model: model.activation_checkpointing_enable(
        {"use_reentrant": True}
    ),
    "ours": recompute_layers,
}


@pytest.mark.parametrize("make", [rotary, opt])
def test_who_asks_transformers_to_recompute_activations_gets_it_without_dropout(make):
    args = *pad(QUERIES, 0, "left"), *pad(RESPONSES, 0)
    found = {}
    for name, ask in RECOMPUTE.items():
        model = make().train()
        response_logprobs(model, *args)  # at first sight it is asked whether it is causal
        ask(model)
        passes = Passes(model)
        response_logprobs(model, *args).sum().backward()
        assert all(part.training for part in model.modules())
        found[name] = passes.n, [p.grad for p in model.parameters()]
    plain, expected = found.pop("never")
    assert plain == 2
    for count, gradients in found.values():
        assert count == 2 * plain
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_every_second_layer_stays_every_second_and_disabled_is_disabled():
    args = *pad(QUERIES, 0, "left"), *pad(RESPONSES, 0)
    model = rotary()
    response_logprobs(model, *args)
    model.activation_checkpointing_enable(every_n_layers=2)
    passes = Passes(model)
    response_logprobs(model, *args).sum().backward()
    assert passes.n == 3
    model.activation_checkpointing_disable()
    response_logprobs(model, *args).sum().backward()
    assert passes.n == 3 + 2


def test_what_is_trained_with_dropout_is_recomputed_with_the_same_dropout():
    "As in SFT; torch's checkpoint draws the same numbers again."
    ids = torch.tensor([RESPONSES[0] + QUERIES[0]])
    gradients = []
    for ask in (lambda model: None, recompute_layers):
        model = rotary().train()
        ask(model)
        torch.manual_seed(3)
        model(input_ids=ids).logits.log_softmax(-1)[..., 1].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral"])
def test_a_model_that_returns_tuples_is_read_by_name(name):
    args = *pad(QUERIES, 0, "left"), *pad(RESPONSES, 0)
    configs = SERVED | {"llama": lambda: T.LlamaConfig(**ROTARY)}
    model = tiny(configs[name]())
    expected = response_logprobs(model, *args)
    model.config.return_dict = False
    model.config.output_hidden_states = True
    torch.testing.assert_close(response_logprobs(model, *args), expected)


# --- what is read from a configuration


@pytest.mark.parametrize("limit, expected", [(14, 14), (1, 1), (0, None), (-1, None), (None, None)])
def test_a_context_is_a_number_of_tokens_or_has_no_limit(limit, expected):
    config = T.PretrainedConfig()
    config.max_position_embeddings = limit
    assert configured_context(config) == expected
    assert configured_context(T.BloomConfig()) is None  # it has no such word


@pytest.fixture(scope="module")
def rotary_model():
    return rotary().eval()


def test_sizes_are_those_of_the_tensors(rotary_model):
    narrow = opt()
    narrow.config.word_embed_proj_dim = 8
    assert (context_length(rotary_model), vocabulary_size(rotary_model)) == (14, V)
    assert (hidden_size(rotary_model), hidden_size(narrow)) == (16, 8)
    narrow.resize_token_embeddings(V + 5)
    assert vocabulary_size(narrow) == V + 5


def test_the_transformer_is_found_under_any_usual_name(rotary_model):
    inner = rotary_model.model
    assert trunk(rotary_model) is inner and trunk(inner) is inner

    class Wrapped(T.LlamaForCausalLM):  # it does not say which of its parts is the transformer
        base_model = property(lambda self: self)

        def get_output_embeddings(self):
            return self.lm_head

    wrapped = Wrapped(T.LlamaConfig(**ROTARY))
    inner = wrapped.model
    del wrapped.model
    with pytest.raises(TypeError, match="Wrapped: its transformer is not found"):
        trunk(wrapped)
    for name in ("model", "transformer", "backbone", "language_model"):
        setattr(wrapped, name, inner)
        assert trunk(wrapped) is inner
        delattr(wrapped, name)


# --- modes


def test_every_module_gets_its_own_mode_back_from_nested_blocks_too():
    model = rotary().train()
    model.model.layers[0].eval()
    before = [part.training for part in model.modules()]
    with pytest.raises(KeyError), eval_mode(model) as given:
        assert given is model and not any(part.training for part in model.modules())
        with eval_mode(model):
            model.lm_head.train()
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert [part.training for part in model.modules()] == before


def test_recomputed_layers_are_those_that_were_asked_for():
    model = rotary()
    assert recomputed_layers(model) == set()
    recompute_layers(model)
    assert recomputed_layers(model) == {*model.model.layers}
    with eval_mode(model.eval()):  # transformers recomputes layers in training mode alone
        assert [layer.training for layer in model.model.layers] == [True, True]
        assert not any(part.training for part in model.model.layers[0].self_attn.modules())
    with torch.no_grad(), eval_mode(model):
        assert not any(part.training for part in model.modules())
    model.activation_checkpointing_disable()
    assert recomputed_layers(model) == set()


def test_a_model_that_cannot_recompute_is_refused():
    class Never(T.LlamaForCausalLM):
        supports_gradient_checkpointing = False

    with pytest.raises(ValueError, match="Never has no gradient checkpointing"):
        recompute_layers(Never(T.LlamaConfig(**ROTARY)))


# --- what a forward pass is given, and gives


@pytest.mark.parametrize(
    "settings, options",
    [
        ({}, {}),
        ({"return_dict": False}, {"return_dict": True}),
        ({"output_router_logits": True}, {"output_router_logits": False}),
        ({"return_dict": True, "output_router_logits": False}, {}),
    ],
)
def test_outputs_are_asked_for_by_name_and_without_routers(settings, options):
    model = rotary()
    for name, value in settings.items():
        setattr(model.config, name, value)
    assert plain_options(model) == options
    assert plain_options(torch.nn.Linear(2, 2)) == {}
    mask = torch.tensor([[0, 1, 1]])
    given = forward_options(model, mask)
    assert given.pop("position_ids").tolist() == [[0, 0, 1]]
    assert given == {"use_cache": False} | options


def test_a_forward_without_positions_is_given_none():
    bloom = T.BloomForCausalLM(T.BloomConfig(vocab_size=V, hidden_size=8, n_layer=1, n_head=1))
    assert forward_options(bloom, torch.ones(1, 2)) == {"use_cache": False}
    assert forward_options(torch.nn.Linear(2, 2), torch.ones(1, 2)) == {}


def test_logits_are_taken_by_name_or_else_the_states():
    model = torch.nn.Linear(2, 2)
    logits, states = torch.ones(2), torch.zeros(3)
    both = SimpleNamespace(loss=torch.ones(1), last_hidden_state=states, logits=logits)
    assert main_output(model, both) is logits
    assert main_output(model, SimpleNamespace(logits=None, last_hidden_state=states)) is states
    with pytest.raises(TypeError, match="the forward of Linear returns tuple, with neither"):
        main_output(model, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps, differs", [(0, False), (7, False), (8, False), (9, True)])
def test_numbers_differ_by_more_than_eight_roundings_of_the_largest(dtype, steps, differs):
    x = torch.tensor([1.0, -8.0, 0.0], dtype=dtype)
    y = x.clone()
    y[2] = 8 * steps * torch.finfo(dtype).eps
    assert differs_by_more_than_rounding(x, y) == differs_by_more_than_rounding(-x, -y) == differs


class FromOne(T.GPT2LMHeadModel):
    "It counts positions from 1, where nobody tells it otherwise."

    def forward(self, input_ids=None, position_ids=None, **options):
        if position_ids is None:
            position_ids = torch.arange(1, input_ids.shape[1] + 1)[None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **options)


def test_a_model_that_counts_from_another_number_or_has_an_encoder_is_refused():
    with pytest.raises(TypeError, match="FromOne does not count positions from 0"):
        check_causal(FromOne(T.GPT2Config(**BASE)))
    model = rotary()
    model.config.is_encoder_decoder = True
    with pytest.raises(TypeError, match="LlamaForCausalLM has an encoder beside its decoder"):
        check_causal(model)


def test_asking_for_the_head_leaves_the_model_as_it_was():
    model = rotary().train()
    assert has_plain_head(model, model.lm_head) is True
    assert not model.lm_head._forward_hooks and all(part.training for part in model.modules())
    other = torch.nn.Linear(16, V)
    assert has_plain_head(model, other) is False  # one that the forward does not ask


class Halved(T.LlamaForCausalLM):
    "Its head reads half of the last states, as families that scale them do."

    def forward(self, input_ids=None, **options):
        states = self.model(input_ids=input_ids, **options).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states / 2))


def test_a_head_of_other_states_than_the_last_is_not_plain():
    model = Halved(T.LlamaConfig(**ROTARY))
    assert (model.model.embed_tokens.weight[0] == 0).all()  # padding: all of its states are 0
    assert plain_head(model) is None
