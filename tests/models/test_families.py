"""Every family against its own rows alone, unpadded, through its own forward; and what is refused, by name."""

import pytest
import torch
import transformers
from row_alone import BASE, QUERIES, RESPONSES, ROTARY, V
from transformers import AutoModelForCausalLM

from instruct_goose.models.agent import Agent
from instruct_goose.models.families import (
    check_causal,
    eval_mode,
    plain_head,
    recompute_layers,
    trunk,
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
