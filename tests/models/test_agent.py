"""An agent's values, what it learns from, saving, loading and its reference; the oracle is one unpadded row at a time."""

import pytest
import torch
import transformers
from row_alone import BASE, FAMILIES, LAYOUTS, QUERIES, RESPONSES, V, batch, near, oracle, tiny
from transformers import AutoModelForCausalLM

from instruct_goose.models.adapters import has_adapters, with_lora
from instruct_goose.models.agent import (
    Agent,
    create_reference_model,
    load_policy,
    load_value_trunk,
    make_reference,
    require_unshared,
)
from instruct_goose.models.families import eval_mode, trunk
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import pad, word_tokenizer


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


# --- logits and values at every position


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2: capped logits"])
def test_every_position_has_the_logits_and_the_value_of_its_row_alone(name, value_model):
    "Padding may stand on both sides, and holds ids that no embedding has."
    model = tiny(name)
    agent = Agent(model, value_model)
    torch.nn.init.normal_(agent.value_head.weight)
    if agent.value_model is not None:
        for p in agent.value_model.parameters():
            p.data *= 1.1  # it has learnt since it was copied
    w = agent.value_head.weight[0]
    texts = [q + r for q, r in zip(QUERIES, RESPONSES, strict=True)]
    ids, mask = pad(texts, 0, "left")
    ids, mask = (torch.nn.functional.pad(x, (1, 2)) for x in (ids, mask))
    ids = ids.masked_fill(~mask, 10**6)
    with eval_mode(agent), torch.no_grad():
        found = agent(ids, mask)
        for i, text in enumerate(texts):
            alone = torch.tensor([text])
            near(found.logits[i][mask[i]], model(alone).logits[0], atol=1e-6)
            hidden = agent.value_trunk(alone).last_hidden_state[0]
            near(found.values[i][mask[i]], hidden @ w, atol=1e-6)
            whole = agent(alone)  # without a mask nothing is padding
            near(whole.logits[0], model(alone).logits[0], atol=1e-6)
            near(whole.values[0], hidden @ w, atol=1e-6)
    assert (found.logits[~mask] == 0).all() and (found.values[~mask] == 0).all()


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_a_forward_pass_has_the_mode_that_the_agent_is_in(value_model):
    agent = Agent(tiny("gpt2"), value_model)
    torch.nn.init.ones_(agent.value_head.weight)
    ids = torch.tensor([[1, 5, 7]])
    for mode in (agent.train, agent.eval):
        mode()
        first, second = agent(ids), agent(ids)
        assert torch.equal(first.logits, second.logits) == (not agent.training)
        assert torch.equal(first.values, second.values) == (not agent.training)


def test_what_is_not_asked_for_is_none():
    agent = Agent(tiny("llama"))
    found = agent.evaluate(*batch(), with_entropy=False, with_values=False)
    assert found.entropy is found.values is found.router_loss is None
    near(found.logprobs, agent.evaluate(*batch()).logprobs)


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_values_are_computed_in_float32_or_wider(dtype, expected):
    agent = Agent(tiny("gpt2", dtype=dtype))
    assert agent.value_head.weight.dtype == agent.value_head.bias.dtype == expected
    assert agent.values_at(torch.ones(2, 16, dtype=dtype)).dtype == expected
    agent.value_head.to(torch.bfloat16)  # whoever narrows the whole agent
    assert agent.values_at(torch.ones(2, 16)).dtype == torch.float32


# --- whose parameters


def test_policy_and_values_have_parameters_of_their_own():
    shared = Agent(tiny("llama"))
    assert [id(p) for p in shared.policy_parameters()] == [id(p) for p in shared.model.parameters()]
    assert [id(p) for p in shared.value_parameters()] == [
        id(p) for p in shared.value_head.parameters()
    ]
    separate = Agent(tiny("llama"), "copy")
    policy = {id(p) for p in separate.policy_parameters()}
    values = {id(p) for p in separate.value_parameters()}
    assert not policy & values
    assert policy | values == {id(p) for p in separate.parameters()}
    assert len(values) == len([*trunk(separate.model).parameters()]) + 2


def test_adapters_of_the_values_are_merged_where_an_agent_is_saved(tmp_path):
    agent = Agent(tiny("llama").float(), with_lora(tiny("llama", seed=1).float(), rank=2))
    for p in agent.parameters():
        torch.nn.init.normal_(p, std=0.3)
    for _ in range(2):  # the second time into a directory that is there
        agent.save_pretrained(tmp_path / "agent")
    again = Agent.from_pretrained(tmp_path / "agent")
    assert not has_adapters(again.value_model) and has_adapters(agent.value_model)
    near(again.values(*batch()), agent.values(*batch()), atol=1e-4)


def test_an_agent_is_loaded_in_its_own_precision_or_in_that_which_is_asked_for(tmp_path):
    Agent(tiny("gpt2", dtype=torch.bfloat16), "copy").save_pretrained(tmp_path)
    own = Agent.from_pretrained(tmp_path)
    assert (own.model.dtype, own.value_model.dtype) == (torch.bfloat16, torch.bfloat16)
    asked = Agent.from_pretrained(tmp_path, dtype=torch.float64)
    assert (asked.model.dtype, asked.value_model.dtype) == (torch.float64, torch.float64)


def test_a_directory_without_a_value_head_is_named(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no values/head.safetensors in .*a new value head"):
        Agent.from_pretrained(tmp_path)


# --- what may be a policy, a value model, a reference


def test_a_policy_has_a_head_over_the_vocabulary():
    for other in (tiny("gpt2").transformer, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"{type(other).__name__} has no language-model head"):
            load_policy(other)
    model = tiny("gpt2")
    assert load_policy(model) is model
    reader = transformers.BertLMHeadModel(transformers.BertConfig(**BASE, intermediate_size=24))
    with pytest.raises(TypeError, match="BertLMHeadModel looks ahead"):
        load_policy(reader)
    with pytest.raises(TypeError, match="BertModel looks ahead"):
        load_value_trunk(reader, model)


def test_a_copy_for_the_values_has_the_policys_numbers_and_moves_alone():
    policy = tiny("llama")
    copied = load_value_trunk("copy", policy)
    same_bits(copied, policy.model)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in policy.parameters()}
    assert load_value_trunk(None, policy) is None


@pytest.mark.parametrize("change", [{"vocab_size": V + 1}, {"n_positions": 15}])
def test_a_value_model_reads_the_policys_tokens_and_as_many(change):
    config = transformers.GPT2Config(**BASE)
    for name, value in change.items():
        setattr(config, name, value)
    other = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match="is \\(13, 14\\) for the policy and "):
        load_value_trunk(other, tiny("gpt2"))


def test_a_reference_with_weights_that_the_policy_learns_is_refused():
    agent = Agent(tiny("gpt2"))
    other = tiny("gpt2", seed=1)
    require_unshared(agent, other)
    other.transformer.ln_f.weight = agent.model.transformer.ln_f.weight
    with pytest.raises(ValueError, match="shares parameters with the policy"):
        make_reference(other, agent)
    agent.model.transformer.ln_f.weight.requires_grad_(False)
    require_unshared(agent, other)  # what stands still may be shared


def test_a_reference_has_the_policys_tokens():
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE | dict(vocab_size=V + 1)))
    with pytest.raises(ValueError, match="ref_model has 14 tokens, the policy 13"):
        make_reference(other, Agent(tiny("gpt2")))


@pytest.mark.parametrize("with_head", [False, True])
def test_a_copy_of_the_policy_is_the_language_model_alone(with_head):
    model = tiny("gpt2").train()
    reference = create_reference_model(Agent(model) if with_head else model)
    same_bits(reference, model)
    assert not any(p.requires_grad for p in reference.parameters()) and not reference.training
    assert not {id(p) for p in reference.parameters()} & {id(p) for p in model.parameters()}
