"""Mixtures of experts in every stage; oracle: transformers' own loss with labels, row by row."""

import pytest
import torch
from mixtures import CONFIGS, mixture
from small_trainer import PROMPTS, TOKENIZER, reward, trainer
from torch.nn import functional as F

from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.experts import load_balancing_loss, record_routers, router_coef
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
