"""A model out of torch.compile is taken for what it is. Its backend here runs what was traced as it stands, without a C++ compiler;
what the default one brings is measured in bench/cases/trials.py."""
import copy

import pytest
import torch
import transformers

from instruct_goose.models.agent import Agent, as_reference, create_reference_model
from instruct_goose.models.decoding import why_not
from instruct_goose.models.families import trunk
from instruct_goose.models.tokens import pad

transformers.utils.logging.set_verbosity_error()
QUERY, RESPONSE = pad([[1, 5, 7], [4]], 0, side="left"), pad([[8, 2], [2, 9, 3, 7, 2]], 0)


def tiny(seed=0):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=2)).eval()


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    model, calls = tiny(), []

    def backend(graph, inputs):
        calls.append(1)
        return graph.forward

    agent = Agent(torch.compile(copy.deepcopy(model), backend=backend, dynamic=True))
    yield model, agent, calls
    torch._dynamo.reset()


def test_a_compiled_policy_says_what_the_plain_one_says(compiled):
    model, agent, calls = compiled
    plain = Agent(model)
    torch.nn.init.normal_(plain.value_head.weight)
    agent.value_head.load_state_dict(plain.value_head.state_dict())
    said, found = (a.evaluate(*QUERY, *RESPONSE) for a in (plain, agent))
    for x, y in zip(said, found, strict=True): torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-5)
    assert calls, "nothing was compiled"
    for e in (said, found): (e.logprobs.sum() + e.values.sum()).backward()
    for x, y in zip(plain.parameters(), agent.parameters(), strict=True): torch.testing.assert_close(y.grad, x.grad, atol=1e-5, rtol=1e-4)


def test_what_is_kept_of_it_is_plain(compiled, tmp_path):
    model, agent, _ = compiled
    assert type(agent.model) is type(model) and why_not(agent.model) is None  # our own sampling step still reads its weights
    assert trunk(agent.model)._compiled_call_impl is not None and trunk(create_reference_model(agent))._compiled_call_impl is None
    agent.save_pretrained(tmp_path)
    again = Agent.from_pretrained(tmp_path)
    for x, y in zip(model.parameters(), again.model.parameters(), strict=True): torch.testing.assert_close(x, y)


def test_a_compiled_model_without_a_head_is_refused_as_others_are():
    with pytest.raises(TypeError, match="has no language-model head"): Agent(torch.compile(tiny().transformer, backend="eager"))


def test_a_compiled_reference_is_taken_out_of_its_wrapper(compiled):
    model, agent, _ = compiled
    other = tiny(1)
    found = as_reference(torch.compile(other, backend="eager"), agent)
    assert found is other and trunk(found)._compiled_call_impl is not None and not any(p.requires_grad for p in found.parameters())
