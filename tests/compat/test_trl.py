"""TRL's settings and its step(): by hand, against a loop over tokens, and against TRL's own PPOConfig where one is installed."""

import dataclasses
import importlib
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.compat.trl import (
    BESIDE,
    DEFAULTS,
    INSTEAD,
    config_from_trl,
    step,
)
from instruct_goose.training.trainer import RLHFTrainer

beside = [name for names in BESIDE.values() for name in names]


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            dict(per_device_train_batch_size=16, gradient_accumulation_steps=4),
            dict(batch_size=64, micro_batch_size=16, steps=50),
        ),
        (
            dict(per_device_train_batch_size=16, total_episodes=100),
            dict(batch_size=16, micro_batch_size=None, steps=7),
        ),
        (dict(per_device_train_batch_size=16, total_episodes=96), dict(steps=6)),
        (
            dict(cliprange=0.3, cliprange_value=0.4, gamma=0.99, lam=0.9, vf_coef=0.7),
            dict(clip=0.3, value_clip=0.4, gamma=0.99, lam=0.9, vf_coef=0.7),
        ),
        (
            dict(kl_estimator="k3", kl_coef=0.11),
            dict(kl_estimator="k3", beta=0.11, kl_placement="reward"),
        ),
        (
            dict(num_ppo_epochs=3, num_mini_batches=4, response_length=17, temperature=0.9),
            dict(epochs=3, minibatches=4, max_new_tokens=17, temperature=0.9),
        ),
        (
            dict(lr_scheduler_type="cosine", learning_rate=1e-4, weight_decay=0.01, seed=7),
            dict(lr_schedule="cosine", lr=1e-4, weight_decay=0.01, seed=7),
        ),
        (dict(max_grad_norm=0.5), dict(max_grad_norm=0.5)),
    ],
    ids=str,
)
def test_train_by_hand(options, expected):
    config = config_from_trl(**options)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            dict(batch_size=256, mini_batch_size=32, gradient_accumulation_steps=2),
            dict(batch_size=256, minibatches=4, micro_batch_size=32),
        ),
        (dict(batch_size=64, mini_batch_size=16), dict(minibatches=4, micro_batch_size=None)),
        (dict(batch_size=64, mini_batch_size=64, steps=129), dict(steps=3)),
        (dict(adap_kl_ctrl=False, init_kl_coef=0.3), dict(kl_target=None, beta=0.3)),
        (dict(target=9.0), dict(kl_target=9.0, beta=0.2)),
        (dict(kl_penalty="mse"), dict(kl_estimator="k2")),
        (dict(ppo_epochs=1), dict(epochs=1)),
    ],
    ids=str,
)
def test_step_by_hand(options, expected):
    config = config_from_trl("step", **options)
    assert {k: getattr(config, k) for k in expected} == expected


@pytest.mark.parametrize("api", DEFAULTS)
@pytest.mark.parametrize("name", INSTEAD)
def test_what_has_no_counterpart_is_refused_and_its_off_value_is_not(api, name):
    nothing, how = INSTEAD[name]
    assert config_from_trl(api, **{name: nothing}) == config_from_trl(api)
    with pytest.raises(ValueError, match=f"{name}=7.5 has no counterpart") as e:
        config_from_trl(api, **{name: 7.5})
    assert how in str(e.value)


@pytest.mark.parametrize("name", beside)
def test_what_is_said_elsewhere(name):
    with pytest.raises(ValueError, match=f"{name} is no setting of RLHFConfig. Here: "):
        config_from_trl("train", **{name: 1})


def test_misspelt_misplaced_and_illegal(unchecked):
    with pytest.raises(ValueError, match="did you mean cliprange?"):
        config_from_trl(clip_range=0.2)
    with pytest.raises(ValueError, match="zzz is no option of TRL's PPOConfig that is known here$"):
        config_from_trl(zzz=1)
    with pytest.raises(ValueError, match="init_kl_coef belongs to TRL's step.. form"):
        config_from_trl(init_kl_coef=0.2)
    with pytest.raises(ValueError, match="kl_coef belongs to TRL's train.. form"):
        config_from_trl("step", kl_coef=0.2)
    with pytest.raises(
        ValueError, match="a multiple of mini_batch_size times gradient_accumulation_steps, 96"
    ):
        config_from_trl("step", mini_batch_size=48, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="lam is 1.2"):
        config_from_trl(lam=1.2)
    with unchecked(), pytest.raises(ValueError, match="api is 'ppo'"):
        config_from_trl("ppo")


@pytest.mark.parametrize("api, where", [("train", "trl.experimental.ppo"), ("step", "trl")])
def test_every_field_of_trl_itself(api, where):
    try:
        theirs = importlib.import_module(where).PPOConfig
    except (ImportError, AttributeError, RuntimeError) as e:
        pytest.skip(f"no PPOConfig in {where}: {e}")
    fields = {f.name: f.default for f in dataclasses.fields(theirs)}
    if ("ppo_epochs" in fields) != (api == "step"):
        pytest.skip(f"{where}.PPOConfig is of the other form")
    inherited = {
        f.name
        for base in theirs.__mro__[1:]
        if dataclasses.is_dataclass(base)
        for f in dataclasses.fields(base)
    }
    known = {*DEFAULTS[api], *INSTEAD, *beside}
    assert set(fields) - inherited <= known
    default = DEFAULTS[api] | {
        "max_grad_norm": fields["max_grad_norm"]
    }  # of transformers, and unused by TRL's trainer
    assert {k: getattr(fields[k], "value", fields[k]) for k in default} == default


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=13,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            initializer_range=0.3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=1,
        )
    ).double()


QUERIES = [torch.tensor(x) for x in ([1, 5, 6], [1, 7], [1, 8, 9, 3], [1])]
RESPONSES = [torch.tensor(x) for x in ([4, 1], [6, 7, 8, 9], [1], [5, 5, 1])]
SCORES = [1.0, -0.5, 2.0, 0.3]


def trainer_for(config, **options):
    policy, reference = model(), model()
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.05 * torch.randn_like(p)
    trainer = RLHFTrainer(policy, reference, config, **options)
    torch.nn.init.normal_(trainer.agent.value_head.weight, std=0.3)
    return trainer


def loss_by_tokens(trainer):
    "TRL 0.11's compute_rewards, compute_advantages and loss, a token at a time on rows without padding; the first minibatch."
    c = trainer.config
    rows = []
    for q, a, score in zip(QUERIES, RESPONSES, SCORES, strict=True):
        ids = torch.cat([q, a])[None]
        out = trainer.agent(ids)
        ref = trainer.ref_model(ids).logits[0].log_softmax(-1)
        at = [len(q) - 1 + t for t in range(len(a))]
        logp = torch.stack(
            [out.logits[0].log_softmax(-1)[i, x] for i, x in zip(at, a, strict=True)]
        )
        kl = logp.detach() - torch.stack([ref[i, x] for i, x in zip(at, a, strict=True)])
        kl = {"k1": kl, "k2": kl**2 / 2}[c.kl_estimator]
        V = out.values[0][at]
        advantage = 0.0
        row = []
        for t in reversed(range(len(a))):
            reward = -trainer.beta * kl[t] + (score if t == len(a) - 1 else 0.0)
            after = V[t + 1].detach() if t + 1 < len(a) else 0.0
            advantage = reward + c.gamma * after - V[t].detach() + c.gamma * c.lam * advantage
            row.insert(0, (logp[t], V[t], advantage))
        rows += row
    logp, V, A = (torch.stack(x) for x in zip(*rows, strict=True))
    R, A = A + V.detach(), (A - A.mean()) * torch.rsqrt(A.var() + 1e-8)
    return -((logp - logp.detach()).exp() * A).mean() + c.vf_coef * 0.5 * ((V - R) ** 2).mean()


@pytest.mark.parametrize("penalty", ["kl", "mse"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_step_moves_the_weights_by_trl_s_gradient(penalty, accumulation):
    config = config_from_trl(
        "step",
        batch_size=4,
        mini_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        ppo_epochs=1,
        kl_penalty=penalty,
        gamma=0.9,
        lam=0.8,
        learning_rate=0.1,
        max_grad_norm=1e9,
    )
    trainer = trainer_for(config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    trainer.agent.eval()
    wanted = torch.autograd.grad(loss_by_tokens(trainer), (ps := list(trainer.agent.parameters())))
    before = [p.detach().clone() for p in ps]
    step(trainer, QUERIES, RESPONSES, SCORES)
    for p, b, g in zip(ps, before, wanted, strict=True):
        torch.testing.assert_close(p.detach(), b - 0.1 * g, rtol=1e-5, atol=1e-9)


def test_scores_may_be_tensors_and_the_clock_goes_on():
    config = config_from_trl("step", batch_size=4, mini_batch_size=4, steps=8, target=0.001)
    trainer, other = trainer_for(config), trainer_for(config)
    first = step(trainer, QUERIES, RESPONSES, SCORES)
    assert first == step(other, QUERIES, RESPONSES, [torch.tensor(x) for x in SCORES])
    assert trainer.iteration == 1 and math.isclose(
        trainer.beta, 0.2 * 1.02, rel_tol=1e-9
    )  # far above the target: + .1 · .2
    assert (
        math.isclose(first["reward_mean"], sum(SCORES) / 4, rel_tol=1e-6)
        and first["response_length"] == 2.5
    )


def test_lists_of_different_lengths():
    trainer = trainer_for(config_from_trl("step", batch_size=4, mini_batch_size=4))
    with pytest.raises(ValueError, match="4 queries, 3 responses and 4 scores"):
        step(trainer, QUERIES, RESPONSES[:3], SCORES)
    with pytest.raises(ValueError):
        step(trainer, QUERIES, [*RESPONSES[:3], torch.tensor([], dtype=torch.long)], SCORES)
    assert trainer.iteration == 0
