"""What annotation costs, counted; and that the short way says what the whole tables say."""

import pytest
import torch
import transformers

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.models.families import trunk
from instruct_goose.models.tokens import pad
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.experience import annotate, compare_row_by_row

transformers.utils.logging.set_verbosity_error()
V = 31
BASE = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=20,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE),
    "gemma2": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2.0),
    "granite": lambda: transformers.GraniteConfig(**ROTARY, logits_scaling=3.0),
    "bert": lambda: transformers.BertConfig(**BASE, intermediate_size=24, is_decoder=True),
}
NAMES = ("old_logprobs", "ref_logprobs", "entropy", "kl")


def tiny(name, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model.double().eval()


def rollout(side="left"):
    return Rollout(
        *pad([[1, 5, 7], [4], [1, 4, 2, 30]], 0, side=side),
        *pad([[8, 3, 9, 2], [2, 11, 3, 12, 2], [7, 2]], 0, side="right"),
    )  # by length the second, the third, the first


@pytest.mark.parametrize(
    "pair", [("gpt2", "gpt2"), ("gemma2", "granite"), ("gpt2", "bert")], ids="-".join
)
@pytest.mark.parametrize(
    "micro", [{}, {"micro_batch_size": 2}, {"micro_batch_tokens": 12}], ids=str
)
def test_the_same_numbers_as_from_whole_tables(pair, micro):
    policy, ref = tiny(pair[0], 0), tiny(pair[1], 1)
    agent = Agent(policy)
    torch.nn.init.normal_(agent.value_head.weight)
    c = RLHFConfig(temperature=0.7, **micro)
    for r in (rollout(), rollout("right")):
        table = annotate(agent, ref, r, c)
        for i in range(len(r)):
            q, a = r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]
            with torch.no_grad():
                pi, base = (
                    (m(torch.cat([q, a])[None]).logits[0, len(q) - 1 : -1] / 0.7).log_softmax(-1)
                    for m in (policy, ref)
                )
            at = torch.arange(len(a))
            want = (
                pi[at, a],
                base[at, a],
                -(pi.exp() * pi).sum(-1),
                (pi.exp() * (pi - base)).sum(-1),
            )
            for name, x in zip(NAMES, want, strict=True):
                torch.testing.assert_close(table[name][i][r.mask[i]], x, atol=1e-10, rtol=0)
        torch.testing.assert_close(
            table["values"],
            agent.values(r.query_ids, r.query_mask, r.response_ids, r.mask).detach(),
            atol=1e-10,
            rtol=0,
        )
        assert not any(x.requires_grad for x in table.values()) and all(
            (x[~r.mask] == 0).all() for x in table.values()
        )
        if not micro:
            for name, x in zip(NAMES, compare_row_by_row(policy, ref, r, 0.7), strict=True):
                torch.testing.assert_close(table[name][r.mask], x.detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "micro,passes", [({}, 1), ({"micro_batch_size": 2}, 2), ({"micro_batch_tokens": 6}, 3)]
)
def test_each_transformer_is_run_once(separate, micro, passes):
    agent, ref, seen = Agent(tiny("gpt2", 0), "copy" if separate else None), tiny("gpt2", 1), []
    annotate(agent, ref, rollout(), RLHFConfig())  # models are asked about their heads once
    models = {"policy": trunk(agent.model), "reference": trunk(ref)} | (
        {"values": agent.value_model} if separate else {}
    )
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: seen.append(name))
    annotate(agent, ref, rollout(), RLHFConfig(**micro))
    assert sorted(seen) == sorted(list(models) * passes)
