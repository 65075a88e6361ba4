"Numbers that are not finite, ratios that are not 1, weights that cannot be trained."

import copy
import math
import warnings

import pytest
import torch
from small_trainer import PROMPTS, TOKENIZER, config, reward, same, tiny, trainer, weights

from instruct_goose.config import RLHFConfig
from instruct_goose.core.tensor_checks import LostSteps, require_finite_weights
from instruct_goose.models.agent import Agent
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.supervised.fit import adamw
from instruct_goose.training.trainer import RLHFTrainer


def test_a_changed_model_and_another_temperature_are_noticed():
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    trainer.optimize(r)
    weights = [p.detach().clone() for p in trainer.agent.parameters()]
    with pytest.raises(
        ValueError, match="(?s)before the first update.*dropout.*temperature.*padding"
    ):
        trainer.optimize(r)
    assert all(a.equal(b) for a, b in zip(trainer.agent.parameters(), weights, strict=True)), (
        "no step may be taken"
    )
    trainer.config.temperature = 1.5
    with pytest.raises(ValueError, match="sampler and the training forward disagree"):
        other = trainer.rollout(PROMPTS)
        trainer.config.temperature = 1.0
        trainer.annotate(other)


def test_a_wrong_sampler_is_noticed():
    trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)
    r.query_mask = torch.ones_like(r.query_mask)  # as if the training forward took padding for text
    with pytest.raises(ValueError, match="disagree"):
        trainer.annotate(r)


def spoiled(name, value=float("nan")):
    return lambda t: dict(t.agent.named_parameters())[name].data.view(-1)[3:4].fill_(value)


def poison_reference(t):
    t.ref_model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("inf")


def endless_price(t):
    annotate = t.annotate

    def broken(rollout):
        notes = annotate(rollout)
        notes.ref_logprobs[0, 0] = float("-inf")
        return notes

    t.annotate = broken


def bad_advantages(t):
    estimate = ADVANTAGES["gae"].estimate

    def broken(*args, **kw):
        a, R = estimate(*args, **kw)
        a[2, 1] = float("nan")
        return a, R

    ADVANTAGES["spoiled"] = ADVANTAGES["gae"]._replace(estimate=broken)
    t.config.advantage, t.config.whiten_advantages = "spoiled", False


def bad_loss(t):
    optimize = t.optimize

    def broken(r):
        assert not r.mask.all()
        r.advantages[5, 0], t.bad = float("inf"), r.texts[5]
        r.old_logprobs = torch.where(r.mask, r.old_logprobs, float("nan"))  # which is allowed
        return optimize(r)

    t.optimize = broken
    t.config.minibatches = 1


def bad_gradient(t):
    t.agent.model.transformer.h[0].attn.c_proj.weight.register_hook(lambda g: g * float("nan"))


STAGES = {  # what is broken, and what the message must say
    "rollout logits": (
        spoiled("model.transformer.ln_f.bias"),
        "the model's logits are NaN or infinite in rows .0, 1.*the weight model.transformer.ln_f.bias is not finite",
    ),
    "values": (
        spoiled("value_head.weight", float("inf")),
        "values is (nan|-?inf) at token 0 of response 0, 'w.*the weight value_head.weight",
    ),
    "reference": (
        poison_reference,
        "ref_logprobs is nan at token 0 of response 0, .*the reference's weight transformer.h.1.mlp.c_fc.weight",
    ),
    "rewards": (
        endless_price,
        "rewards is (nan|-?inf) at token 0 of response 0, .*weights and gradients are finite: look at rewards and values",
    ),
    "advantages": (bad_advantages, "advantages is nan at token 1 of response 2, '"),
    "loss": (bad_loss, "advantages is inf at token 0 of response ., '"),
    "gradient": (
        bad_gradient,
        "grad_norm is nan; the gradient of model.transformer.h.0.attn.c_proj.weight is not finite",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_number_that_is_not_finite_stops_the_run_before_the_weights_move(
    stage, monkeypatch
):
    spoil, message = STAGES[stage]
    monkeypatch.setitem(ADVANTAGES, "spoiled", ADVANTAGES["gae"])  # and taken out again
    t = trainer()
    t.train(PROMPTS, reward, steps=2, progress=False)
    spoil(t)
    before = weights(t)
    moments = copy.deepcopy(t.optimizer.state_dict()["state"])
    with pytest.raises(FloatingPointError, match=f"iteration 2: {message}") as e:
        t.step(PROMPTS, reward)
    assert t.iteration == 2
    if stage == "loss":
        assert repr(t.bad) in str(e.value)  # the minibatch is shuffled, the text is the one
    assert same([w.nan_to_num() for w in weights(t)], [w.nan_to_num() for w in before])
    for i, state in t.optimizer.state_dict()["state"].items():
        for k, x in state.items():
            assert torch.equal(x, moments[i][k])


def test_a_weight_that_the_last_step_has_blown_up_is_found_in_the_same_iteration():
    class Blows(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 4:
                self.param_groups[0]["params"][2].data[1] = float("-inf")

    t = trainer()
    name = next(
        n for n, p in t.agent.named_parameters() if p is t.optimizer.param_groups[0]["params"][2]
    )
    t.optimizer = Blows(t.optimizer.param_groups)
    with pytest.raises(
        FloatingPointError,
        match=f"iteration 0: the optimizer has made a weight infinite or NaN: go back to the last checkpoint; the weight {name} is not finite",
    ):
        t.step(PROMPTS, reward)
    assert t.iteration == 0 and t.optimizer.taken == 4


def test_huge_weights_are_not_taken_for_infinite_ones():
    t = trainer(model=Agent(tiny(dtype=torch.float32)))
    t.agent.value_head.weight.data.fill_(1e30)  # its square is infinite in float32
    require_finite_weights(t.agent)


def test_scores_set_by_hand_are_checked_and_padding_is_not(poison):
    t = trainer()
    rollout = t.rollout(PROMPTS)
    notes = t.annotate(rollout)
    rollout.scores = torch.tensor([0.0] * 6 + [float("nan"), 0.0])
    with pytest.raises(FloatingPointError, match="scores is nan at response 6, 'w2"):
        t.advantages(rollout, notes)
    rollout.scores = torch.ones(8)
    for name in ("old_logprobs", "ref_logprobs", "values"):
        notes = notes._replace(**{name: poison(getattr(notes, name), rollout.mask)})
    m = t.optimize(t.advantages(rollout, notes))
    assert all(math.isfinite(m[k]) for k in ("ratio_max", "kl_to_old_exact", "policy_loss"))


def test_float16_is_refused():
    for made in (
        lambda: RLHFTrainer(tiny().half(), config=RLHFConfig(device="cpu"), tokenizer=TOKENIZER),
        lambda: adamw(tiny().half(), 1e-3, (0.9, 0.99), 0.0),
    ):
        with pytest.raises(
            ValueError, match="float16, and cannot be trained.*No learning rate helps.*bfloat16"
        ):
            made()
    frozen = Agent(tiny().half().requires_grad_(False))
    frozen.value_head.float()
    RLHFTrainer(
        frozen, config=RLHFConfig(device="cpu"), tokenizer=TOKENIZER
    )  # what does not learn may be anything


@pytest.mark.parametrize(
    "make",
    [
        lambda model, lr: RLHFTrainer(
            model, config=RLHFConfig(device="cpu", lr=lr), tokenizer=TOKENIZER
        ),
        lambda model, lr: adamw(model, lr, (0.9, 0.99), 0.0),
    ],
)
def test_steps_that_are_rounded_away_are_told_before_the_first(make):
    with pytest.warns(
        LostSteps, match=r"of \d+% of them a step of lr=1e-05 is rounded away.*dtype=torch.float32"
    ):
        make(tiny().bfloat16(), 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostSteps)
        for model, lr in (
            (tiny().bfloat16(), 0.1),
            (tiny(), 1e-5),
            (Agent(tiny().bfloat16().requires_grad_(False)), 1e-5),
        ):
            make(model, lr)
        policy = Agent(tiny().bfloat16())
        RLHFTrainer(
            policy,
            config=RLHFConfig(device="cpu", lr=1e-5, advantage="return"),
            tokenizer=TOKENIZER,
            optimizer=torch.optim.SGD(policy.parameters(), 1e-5),
        )  # who knows what it keeps
