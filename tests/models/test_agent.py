"""An agent's values, what it learns from, saving, loading and its reference; the oracle is one unpadded row at a time."""

import pytest
import torch
import transformers
from row_alone import BASE, FAMILIES, LAYOUTS, V, batch, near, oracle, tiny
from transformers import AutoModelForCausalLM

from instruct_goose.models.agent import Agent, make_reference
from instruct_goose.models.families import trunk
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import word_tokenizer


def same_bits(a, b):
    a = a.state_dict()
    b = b.state_dict()
    assert a.keys() == b.keys()
    assert not [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]


def test_a_reward_model_is_named_where_a_value_model_is_wanted():
    reward_model = RewardModel.from_causal_lm(tiny("gpt2"), word_tokenizer(["a", "b"]))
    with pytest.raises(TypeError, match="value_model is a RewardModel.*pass its directory"):
        Agent(tiny("gpt2"), reward_model)


# --- the agent ---


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_values_stand_before_each_token(any_model, value_model):
    _, model = any_model
    agent = Agent(model, value_model)
    assert (agent.evaluate(*batch()).values == 0).all()  # exactly, at the start
    torch.nn.init.normal_(agent.value_head.weight)
    torch.nn.init.normal_(agent.value_head.bias)
    w, b = agent.value_head.weight[0], agent.value_head.bias[0]
    for qside, rside, pad_id in LAYOUTS:
        args = batch(qside, rside, pad_id)
        found = agent.evaluate(*args, temperature=0.7)
        for i, (lp, s, h, _) in enumerate(oracle(model, 0.7)):
            m = args[3][i]
            near(found.values[i][m], h @ w + b)
            near(found.logprobs[i][m], lp)
            near(found.entropy[i][m], s)
        assert (found.values[~args[3]] == 0).all()
        near(agent.values(*args), found.values)


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_the_head_computes_in_float32_under_autocast(value_model):
    "The transformer's states are rounded to 8 bits; w·h + b of them, in float64, is the oracle."
    agent = Agent(tiny("gpt2").float(), value_model)
    torch.nn.init.normal_(agent.value_head.weight, std=3.0)
    torch.nn.init.constant_(agent.value_head.bias, 100.0)
    states = []
    agent.value_trunk.register_forward_hook(lambda _m, _i, out: states.append(out[0].double()))
    with torch.autocast("cpu", torch.bfloat16):
        found = agent.values(*batch())
    w, b = agent.value_head.weight[0].double(), agent.value_head.bias[0].double()
    possible = (states[-1] @ w + b).flatten()
    distance = (found[batch()[3]].double()[:, None] - possible).abs().min(1).values
    assert found.dtype == torch.float32
    assert distance.max() < 1e-3  # a bfloat16 near 100 is known to ±.25


def test_a_value_model_of_ones_own(family, tmp_path):
    other = tiny("gpt2", seed=1)
    agent = Agent(family, other)
    assert agent.value_trunk is other.transformer
    torch.nn.init.ones_(agent.value_head.weight)
    args = batch()
    found = agent.evaluate(*batch())
    for i, (own, others) in enumerate(zip(oracle(family), oracle(other), strict=True)):
        m = args[3][i]
        near(found.logprobs[i][m], own[0])
        near(found.values[i][m], others[2].sum(-1))
    assert (
        Agent(family, family).value_model is None
        and Agent(family, trunk(family)).value_model is None
    )  # its own: shared
    other.save_pretrained(tmp_path / "other")
    near(
        Agent(family, tmp_path / "other").value_trunk.wte.weight,
        other.transformer.wte.weight,
        atol=0,
    )
    wrong = transformers.GPT2Model(transformers.GPT2Config(**BASE | dict(vocab_size=V + 1)))
    with pytest.raises(ValueError, match=r"\(13, 14\) for the policy"):
        Agent(family, wrong)


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("name", [*FAMILIES, "gemma2: capped logits"])
def test_saved_and_loaded(name, value_model, tmp_path):
    agent = Agent(tiny(name), value_model).eval()
    torch.nn.init.normal_(agent.value_head.weight)
    if value_model:
        torch.nn.init.normal_(
            next(agent.value_model.parameters())
        )  # no longer equal to the policy's
    agent.save_pretrained(tmp_path / "new" / "agent")
    again = Agent.from_pretrained(tmp_path / "new" / "agent")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "agent")
    same_bits(again, agent)
    same_bits(plain, agent.model)
    for a, b in zip(agent.evaluate(*batch()), again.evaluate(*batch()), strict=True):
        near(a, b, atol=1e-10)
    near(plain(batch()[0]).logits, agent.model(batch()[0]).logits, atol=1e-10)
    files = {f.name for f in tmp_path.rglob("*") if f.is_file()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "head.safetensors",
    }
    beside = {f.name for f in (tmp_path / "new" / "agent").glob("*.safetensors")}
    assert beside == {"model.safetensors"}  # an engine takes each of them for the policy's
    assert {k for k, _ in again.named_parameters()} == {k for k, _ in agent.named_parameters()}
    assert Agent(str(tmp_path / "new" / "agent")).value_head.weight.abs().max() == 0


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_recomputed_layers_give_the_same_gradient_in_either_mode(kind, value_model):
    "Dropout in the config, training mode outside: neither the forward nor the second one may see it."
    grads, counts = [], []
    for again in (False, True):
        agent = Agent(tiny(kind), value_model, gradient_checkpointing=again).train()
        torch.nn.init.constant_(agent.value_head.weight, 0.3)
        blocks = [m for m in agent.modules() if type(m).__name__ in ("GPT2MLP", "LlamaMLP")]
        passes = []
        with torch.no_grad():
            agent.evaluate(*batch())  # at first sight it is asked whether it is causal
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: passes.append(1))  # noqa: B023
        out = agent.evaluate(*batch())
        (out.logprobs.sum() + out.values.square().sum()).backward()
        assert all(m.training for m in agent.modules())
        grads.append([p.grad for p in agent.parameters()])
        counts.append(len(passes) / len(blocks))
    assert counts == [1, 2]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    with torch.no_grad():
        agent.evaluate(*batch())
    assert len(passes) == 3 * len(
        blocks
    )  # nothing is computed twice where no gradient is asked for


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_making_an_agent_leaves_the_random_generator_as_it_is(value_model):
    model = tiny("llama")
    before = torch.get_rng_state()
    Agent(model, value_model=value_model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("given", ["a model", "an agent", "nothing"])
def test_a_reference_is_frozen_and_without_dropout(given):
    "Also one that is passed as it learns; the policy stays as it is."
    agent = Agent(tiny("gpt2").train())
    other = tiny("gpt2", 1).train()
    ref_model = {"a model": other, "an agent": Agent(other), "nothing": None}[given]
    reference = make_reference(ref_model, agent)
    assert not any(p.requires_grad for p in reference.parameters())
    assert not any(module.training for module in reference.modules())
    assert all(p.requires_grad for p in agent.model.parameters()) and agent.model.training
