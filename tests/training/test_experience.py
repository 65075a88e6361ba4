"""The short way of annotation says what the whole tables say, and what it costs is counted."""

import copy
from dataclasses import fields

import pytest
import torch
import transformers

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.models.families import trunk
from instruct_goose.models.tokens import pad
from instruct_goose.objective.advantages import ADVANTAGES, Advantage
from instruct_goose.rollouts.reward_shaping import RewardScale
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.experience import (
    Experience,
    annotate,
    compare_row_by_row,
    make_experience,
    model_inputs,
    require_finite,
)

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
    "By length the second row, the third, the first."
    queries = pad([[1, 5, 7], [4], [1, 4, 2, 30]], 0, side=side)
    responses = pad([[8, 3, 9, 2], [2, 11, 3, 12, 2], [7, 2]], 0, side="right")
    return Rollout(*queries, *responses)


def annotations_of_one_row(policy, ref_model, query, response, temperature):
    "From the whole tables of the models' own forward pass."
    ids = torch.cat([query, response])[None]
    places = slice(len(query) - 1, -1)
    with torch.no_grad():
        pi = (policy(ids).logits[0, places] / temperature).log_softmax(-1)
        ref = (ref_model(ids).logits[0, places] / temperature).log_softmax(-1)
    at = torch.arange(len(response))
    return {
        "old_logprobs": pi[at, response],
        "ref_logprobs": ref[at, response],
        "entropy": -(pi.exp() * pi).sum(-1),
        "kl": (pi.exp() * (pi - ref)).sum(-1),
    }


@pytest.mark.parametrize(
    "pair", [("gpt2", "gpt2"), ("gemma2", "granite"), ("gpt2", "bert")], ids="-".join
)
@pytest.mark.parametrize(
    "micro", [{}, {"micro_batch_size": 2}, {"micro_batch_tokens": 12}], ids=str
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_same_numbers_as_from_whole_tables(pair, micro, side):
    policy, ref_model = tiny(pair[0], 0), tiny(pair[1], 1)
    agent = Agent(policy)
    torch.nn.init.normal_(agent.value_head.weight)
    r = rollout(side)
    annotations = annotate(agent, ref_model, r, RLHFConfig(temperature=0.7, **micro))
    for i in range(len(r)):
        query = r.query_ids[i][r.query_mask[i]]
        response = r.response_ids[i][r.mask[i]]
        expected = annotations_of_one_row(policy, ref_model, query, response, 0.7)
        for name, x in expected.items():
            got = getattr(annotations, name)[i][r.mask[i]]
            torch.testing.assert_close(got, x, atol=1e-10, rtol=0)
    values = agent.values(*model_inputs(r)).detach()
    torch.testing.assert_close(annotations.values, values, atol=1e-10, rtol=0)
    for x in annotations:
        assert not x.requires_grad
        assert (x[~r.mask] == 0).all()


def test_row_by_row_the_same_numbers():
    policy, ref_model = tiny("gpt2", 0), tiny("granite", 1)
    r = rollout()
    annotations = annotate(Agent(policy), ref_model, r, RLHFConfig(temperature=0.7))
    for name, x in zip(NAMES, compare_row_by_row(policy, ref_model, r, 0.7), strict=True):
        torch.testing.assert_close(
            getattr(annotations, name)[r.mask], x.detach(), atol=1e-10, rtol=0
        )


def test_annotating_changes_no_column_of_the_rollout():
    r = rollout()
    before = {field.name: copy.deepcopy(getattr(r, field.name)) for field in fields(r)}
    annotate(Agent(tiny("gpt2", 0)), tiny("gpt2", 1), r, RLHFConfig())
    for name, x in before.items():
        after = getattr(r, name)
        assert after.equal(x) if torch.is_tensor(x) else after == x


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "micro, passes", [({}, 1), ({"micro_batch_size": 2}, 2), ({"micro_batch_tokens": 6}, 3)]
)
def test_each_transformer_is_run_once(separate, micro, passes):
    agent = Agent(tiny("gpt2", 0), "copy" if separate else None)
    ref_model = tiny("gpt2", 1)
    annotate(agent, ref_model, rollout(), RLHFConfig())  # models are asked about their heads once
    models = {"policy": trunk(agent.model), "reference": trunk(ref_model)}
    if separate:
        models["values"] = agent.value_model
    seen = []
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: seen.append(name))
    annotate(agent, ref_model, rollout(), RLHFConfig(**micro))
    assert sorted(seen) == sorted(list(models) * passes)


# ── rewards and advantages ──


def experience_of(rollout, config, beta):
    agent = Agent(tiny("gpt2", 0))
    ref_model = tiny("gpt2", 1)
    annotations = annotate(agent, ref_model, rollout, config)
    return make_experience(
        rollout, annotations, config, beta, RewardScale(), eos_ids=[2]
    ), annotations


def test_an_advantage_sees_the_entropy_of_each_token(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "entropy", Advantage(lambda x: (x.entropy * x.mask, None)))
    r = rollout()
    r.scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    config = RLHFConfig(advantage="entropy", whiten_advantages=False)
    batch, annotations = experience_of(r, config, beta=0.0)
    torch.testing.assert_close(batch.advantages, annotations.entropy * r.mask, check_dtype=False)


def test_an_experience_has_the_rollout_and_the_annotations():
    r = rollout()
    r.scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    batch, annotations = experience_of(r, RLHFConfig(), beta=0.1)
    for name, x in annotations._asdict().items():
        assert getattr(batch, name).equal(x)
    assert batch.response_ids.equal(r.response_ids)
    assert batch.scores.equal(r.scores)


def test_the_rewards_of_a_response_add_up_to_its_score_less_the_kl_charge():
    "k1: β·(log π_old − log π_ref) of each token."
    r = rollout()
    r.scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    batch, annotations = experience_of(r, RLHFConfig(), beta=0.1)
    charge = 0.1 * (annotations.old_logprobs - annotations.ref_logprobs).sum(-1)
    torch.testing.assert_close(batch.rewards.sum(-1), r.scores - charge)


def test_a_rollout_without_scores_makes_no_experience():
    with pytest.raises(ValueError, match="this rollout has no scores: call score"):
        experience_of(rollout(), RLHFConfig(), beta=0.1)


def test_rows_of_an_experience_are_an_experience():
    r = rollout()
    r.scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    batch, _ = experience_of(r, RLHFConfig(), beta=0.1)
    rows = batch[[2, 0]]
    assert isinstance(rows, Experience)
    assert rows.advantages.equal(batch.advantages[[2, 0]])


def test_a_number_that_is_not_finite_is_refused_at_its_token():
    r = rollout()
    column = torch.zeros(r.mask.shape)
    column[0, 4] = torch.nan  # padding
    require_finite(r, {"rewards": column, "values": None})
    column[1, 3] = torch.inf
    with pytest.raises(FloatingPointError, match="rewards is inf at token 3 of response 1"):
        require_finite(r, {"rewards": column})
