"""Mixtures of experts in every stage; oracle: transformers' own loss with labels, row by row."""

from types import SimpleNamespace

import pytest
import torch
from mixtures import CONFIGS, mixture
from small_trainer import PROMPTS, TOKENIZER, reward, trainer
from torch.nn import functional as F

from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.experts import (
    RouterRecord,
    continue_record,
    experts_per_token,
    language_model,
    load_balancing_loss,
    open_record,
    record_of,
    record_routers,
    router_coef,
)
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import pad
from instruct_goose.supervised.dpo import train_dpo, train_kto
from instruct_goose.supervised.reward_model_training import train_reward_model
from instruct_goose.supervised.sft import lm_rows, train_lm

mixtures = pytest.mark.parametrize("name", CONFIGS)
TEXTS = ["w1 w2 w3 w4", "w5", "w6 w7"]
PAIRS = [("w1 w2", "w3"), ("w4", "w5 w6 w7")]
ONCE = dict(steps=1, lr=1e-3, progress=False)


def sft(model, **options):
    return train_lm(model, TOKENIZER, TEXTS, batch_size=3, **ONCE, **options)


def dpo(model, **options):
    reference = create_reference_model(model)
    return train_dpo(model, TOKENIZER, PAIRS, ref_model=reference, batch_size=2, **ONCE, **options)


def kto(model, **options):
    reference = create_reference_model(model)
    rows = [{"prompt": "w1", "completion": f"w{i}", "label": i % 2 == 0} for i in range(4)]
    return train_kto(model, TOKENIZER, rows, ref_model=reference, batch_size=4, **ONCE, **options)


def reward_model(model, **options):
    if model.config.model_type in ("granitemoe", "olmoe"):
        pytest.skip("transformers has no classifier of this family")
    model.resize_token_embeddings(len(TOKENIZER))
    judge = RewardModel.from_causal_lm(model, TOKENIZER)
    return train_reward_model(judge, PAIRS, batch_size=2, **ONCE, **options)


def rl(model, **settings):
    return trainer(model=model, algorithm="grpo", group_size=2, **settings).train(
        PROMPTS, reward, steps=1, progress=False
    )


STAGES = pytest.mark.parametrize("stage", [rl, sft, dpo, kto, reward_model])


@mixtures
@STAGES
def test_a_mixture_that_is_asked_for_its_routers_logits_trains_in_every_stage(name, stage):
    history = stage(mixture(name, output_router_logits=True, router_aux_loss_coef=0.02))
    assert 1 <= history[0]["router_aux_loss"] <= 4  # k = 2 where all experts are equally busy


@STAGES
def test_the_coefficient_is_a_setting_and_zero_leaves_the_loss_out(stage):
    assert "router_aux_loss" in stage(mixture("mixtral"), router_aux_loss_coef=0.1)[0]
    asked_for = mixture("mixtral", output_router_logits=True)
    assert "router_aux_loss" not in stage(asked_for, router_aux_loss_coef=0.0)[0]
    assert "router_aux_loss" not in stage(mixture("mixtral"))[0]


def test_a_model_without_experts_is_refused_with_a_coefficient():
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0\.1, and GPT2LMHeadModel"):
        trainer(router_aux_loss_coef=0.1)
    assert router_coef(trainer().agent) == 0


def test_without_a_setting_the_coefficient_is_the_models_own():
    assert router_coef(torch.nn.Linear(2, 2)) == 0.0  # no language model
    assert router_coef(trainer().agent) == 0.0  # no experts
    assert router_coef(mixture("mixtral", router_aux_loss_coef=0.3)) == 0.0  # not asked for
    asked_for = mixture("mixtral", output_router_logits=True, router_aux_loss_coef=0.3)
    assert router_coef(asked_for) == 0.3
    plain = trainer().agent  # its configuration knows no such coefficient
    plain.model.config.output_router_logits = True
    assert router_coef(plain) == 0.0
    assert router_coef(asked_for, 0.2) == 0.2
    del plain.model.config.output_router_logits
    plain.model.config.router_aux_loss_coef = 0.3  # the word alone asks for nothing
    assert router_coef(plain) == 0.0
    assert router_coef(plain, 0.0) == 0.0  # a loss that is left out needs no routers


@mixtures
def test_the_first_loss_of_a_stage_is_transformers_own_with_its_auxiliary_loss(name):
    "One row: without padding both average over the same tokens."
    model = mixture(name, output_router_logits=True, router_aux_loss_coef=0.3)
    (row,), _ = lm_rows(TEXTS[:1], TOKENIZER)
    ids = torch.tensor([row])
    theirs = model(input_ids=ids, labels=ids)
    model.zero_grad()
    theirs.loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    (log,) = train_lm(model, TOKENIZER, TEXTS[:1], batch_size=1, **ONCE)
    assert log["router_aux_loss"] == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    assert log["loss"] == pytest.approx(theirs.loss.item(), rel=1e-5)
    assert log["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@mixtures
def test_padding_and_the_cut_into_passes_take_no_part(name):
    model = mixture(name)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [2, 9]]
    expected = []
    for row in rows:
        ids = torch.tensor([row])
        expected.append(torch.stack(model(ids, output_router_logits=True).router_logits))
    alone = load_balancing_loss(torch.cat(expected, 1), 2)
    queries = pad([row[:1] for row in rows], 7, "left")
    answers = pad([row[1:] for row in rows], 7)
    with record_routers(model) as together:
        response_logprobs(model, *queries, *answers)
    with record_routers(model) as in_pieces:
        for i in range(3):
            response_logprobs(model, *(x[i : i + 1] for x in (*queries, *answers)))
    assert together.loss().item() == pytest.approx(alone.item(), rel=1e-5)
    assert in_pieces.loss().item() == pytest.approx(alone.item(), rel=1e-5)


def test_the_loss_by_hand():
    "Two tokens, two experts, one each: fₑ = ½ and Pₑ = ½ where they are mirrored."
    mirrored = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    assert load_balancing_loss(mirrored, 1).item() == pytest.approx(1.0)
    same = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # f = (1, 0), P = (σ(1), 1 − σ(1))
    assert load_balancing_loss(same, 1).item() == pytest.approx(2 * F.sigmoid(torch.tensor(1.0)))


def test_micro_batches_of_one_iteration_give_about_the_loss_of_the_whole():
    "Each piece balances its own tokens, weighted by its rows; the whole is one of the pieces."
    whole = rl(mixture("mixtral"), router_aux_loss_coef=0.1, minibatches=1)[0]
    cut = rl(mixture("mixtral"), router_aux_loss_coef=0.1, minibatches=1, micro_batch_size=2)[0]
    assert cut["router_aux_loss"] == pytest.approx(whole["router_aux_loss"], rel=0.2)


def test_training_with_the_loss_alone_makes_experts_equally_busy():
    model = mixture("mixtral")
    history = train_lm(
        model,
        TOKENIZER,
        TEXTS,
        batch_size=3,
        steps=30,
        lr=3e-2,
        progress=False,
        router_aux_loss_coef=10.0,
    )
    assert history[-1]["router_aux_loss"] < 2.05 < history[0]["router_aux_loss"]


@mixtures
def test_recomputed_layers_give_the_same_auxiliary_gradient(name):
    gradients = []
    for recompute in (False, True):
        model = mixture(name)
        if recompute:
            model.activation_checkpointing_enable()
        (log,) = sft(model, router_aux_loss_coef=1.0)
        gradients.append((log["loss"], log["grad_norm"]))
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)


# --- piece by piece


def test_the_loss_of_several_layers_averages_them_before_the_product():
    "Three experts, two a token; f and P by a loop over layers and tokens."
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 3).bfloat16()
    chosen, probability = torch.zeros(3), torch.zeros(3)
    for layer in logits.float():
        for token in layer:
            p = token.exp() / token.exp().sum()
            chosen += (p > p.min()).float() / 10
            probability += p / 10
    loss = load_balancing_loss(logits, 2)
    assert loss.item() == pytest.approx(3 * (chosen * probability).sum().item(), rel=1e-5)
    assert loss.dtype == torch.float32
    assert load_balancing_loss(logits.double(), 2).dtype == torch.float64


def test_the_first_language_model_inside_a_module_is_found():
    model = mixture("mixtral")
    holder = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ModuleList([model])])
    assert language_model(holder) is language_model(model) is model
    assert language_model(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    "settings, k",
    [
        ({"num_experts_per_tok": 2}, 2),
        ({"ffn_config": SimpleNamespace(moe_top_k=4)}, 4),  # DBRX
        ({"num_experts_per_tok": None, "ffn_config": SimpleNamespace(moe_top_k=4)}, 4),
        ({"num_experts_per_tok": 2, "ffn_config": SimpleNamespace(moe_top_k=4)}, 2),
        ({"num_experts_per_tok": [2, 2]}, None),  # a number for each layer: not known here
        ({"ffn_config": SimpleNamespace()}, None),
        ({}, None),
    ],
)
def test_how_many_experts_a_token_goes_to_stands_in_the_configuration(settings, k):
    model = trainer().agent.model
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings))
    assert experts_per_token(model) == k
    assert experts_per_token(None) is None


def passed(model):
    return response_logprobs(model, *pad([[1], [2]], 0), *pad([[3, 4], [5]], 0))


def test_a_record_has_the_passes_inside_its_block_that_learn():
    model, other = mixture("mixtral"), mixture("mixtral", seed=1)
    passed(model)
    assert open_record() is None
    with record_routers(model) as record:
        assert open_record() is record and record_of(model) is record
        assert record_of(other) is None and record_of(trainer().agent) is None
        with torch.no_grad():
            assert record_of(model) is None
            passed(model)
        passed(other)
        assert record.passes == []
        with record_routers(other) as inner:
            passed(model)
            passed(other)
        assert record.passes == [] and len(inner.passes) == 1
        passed(model)
        assert record_of(model) is record
    assert open_record() is None
    passed(model)
    assert len(record.passes) == 1
    layers = model.config.num_hidden_layers
    assert record.passes[0].shape == (layers, 5, 4)  # five real tokens, four experts


def test_a_pass_that_is_made_again_for_its_gradient_is_counted_once():
    "Of a model without a plain head each row is read again, when the block is over."
    model = mixture("granitemoe")
    with record_routers(model) as record:
        logprobs = passed(model)
        loss = record.loss()
    passes = len(record.passes)
    (logprobs.sum() + loss).backward()
    assert len(record.passes) == passes == 2
    assert record.loss().item() == loss.item()


def test_a_block_that_fails_leaves_no_record_behind():
    record = RouterRecord(mixture("mixtral"))
    with pytest.raises(KeyError), continue_record(record):
        assert open_record() is record
        with continue_record(None):
            assert open_record() is None
        raise KeyError
    assert open_record() is None


def test_a_record_without_a_router_has_no_loss():
    record = RouterRecord(trainer().agent)
    for logits in (None, ()):
        record.add(logits, torch.ones(1, 2, dtype=torch.bool))
    assert record.passes == []
    with pytest.raises(ValueError, match="no forward pass returned the logits of a router"):
        record.loss()
    record.add([torch.ones(2, 3)], torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="leave router_aux_loss_coef out"):
        record.loss()  # how many experts a token goes to is not known


def test_a_mixture_that_does_not_give_its_routers_is_refused_with_a_coefficient():
    model = mixture("mixtral")
    inner = model.model
    forward = inner.forward

    def without_routers(input_ids):
        return forward(input_ids=input_ids)

    inner.forward = without_routers
    with pytest.raises(ValueError, match="MixtralForCausalLM returns no logits of a router"):
        router_coef(model, 0.1)
    assert router_coef(mixture("mixtral"), 0.1) == 0.1
    assert router_coef(mixture("mixtral", return_dict=False), 0.1) == 0.1  # asked for by name
