"""TRL's GRPOConfig, RLOOConfig, DPOConfig, SFTConfig and RewardConfig, field by field.

Of the installed TRL; where there is none, of the record that `trl_fields.py` made.
"""

import dataclasses
import inspect
import json
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from trl_fields import KINDS, RECORD, recorded_class, trl_args, trl_class

from instruct_goose.compat.trl import (
    IDLE,
    NotCarried,
    config_from_trl,
    dpo_from_trl,
    reward_model_from_trl,
    sft_from_trl,
)
from instruct_goose.config import BiasedSettings, RLHFConfig
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.objective.group import PRESET_SOURCES, PRESETS
from instruct_goose.objective.kl import ESTIMATORS, KL_GRADIENTS
from instruct_goose.objective.masks import AGGREGATES, aggregate
from instruct_goose.objective.policy_loss import SURROGATES, policy_loss
from instruct_goose.supervised.dpo import train_dpo
from instruct_goose.supervised.fit import fit
from instruct_goose.supervised.reward_model_training import train_reward_model
from instruct_goose.supervised.sft import train_lm

TABLES = (SURROGATES, ADVANTAGES, AGGREGATES, ESTIMATORS, PRESETS, PRESET_SOURCES)


@pytest.fixture(scope="module", autouse=True)
def tables_stay():
    "What the plug-in of losses adds to the tables is taken out again."
    before = [dict(table) for table in TABLES]
    sys.modules.pop("instruct_goose.compat.losses", None)
    yield
    sys.modules.pop("instruct_goose.compat.losses", None)
    for table, old in zip(TABLES, before, strict=True):
        table.clear()
        table.update(old)


TRANSLATE = {
    "GRPOConfig": config_from_trl,
    "RLOOConfig": config_from_trl,
    "DPOConfig": dpo_from_trl,
    "SFTConfig": sft_from_trl,
    "RewardConfig": reward_model_from_trl,
}
TRAINS = {"DPOConfig": train_dpo, "SFTConfig": train_lm, "RewardConfig": train_reward_model}


def carried(kind="GRPOConfig", **options):
    "The translation, which must come without a warning that something is lost."
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCarried)
        warnings.simplefilter("ignore", BiasedSettings)
        return TRANSLATE[kind](trl_args(kind, **options))


def lost(kind="GRPOConfig", **options):
    "The translation, and the text of its warning."
    with pytest.warns(NotCarried) as seen:
        ours = TRANSLATE[kind](trl_args(kind, **options))
    return ours, str(seen[0].message)


# Other values than the defaults, where a number one higher or another text will not do.
OTHER = {
    "per_device_train_batch_size": 16,
    "generation_batch_size": 16,
    "num_generations": 4,
    "lr_scheduler_type": "polynomial",
    "eval_strategy": "epoch",
    "scale_rewards": "batch",
    "importance_sampling_level": "sequence",
    "multi_objective_aggregation": "normalize_then_sum",
    "reward_weights": [1.0, 2.0],
    "reward_clip_range": (-2.0, 2.0),
    "epsilon_high": 0.3,
    "delta": 2.0,
    "max_steps": 7,
    "steps_per_generation": 2,
    "weight_decay": 0.1,
    "top_p": 0.9,
    "off_policy_mask_threshold": 0.5,
    "router_aux_loss_coef": 0.01,
    "top_entropy_quantile": 0.5,
}
CHANGES_NOTHING = {  # of a result, whatever it is
    "gradient_checkpointing": "memory against time",
    "activation_checkpointing": "its newer name",
    "dataloader_pin_memory": "where rows lie before they are read",
    "generation_batch_size": "TRL turns it into steps_per_generation",
}
OF_THE_MODEL = {"use_cpu", "bf16"}  # train_dpo, train_lm and the like take the model as it is


def another(name, value):
    "A value that is not this one."
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another"


def answer_to(kind, name):
    "Whether another value of this field changes the translation, and what is said of it."
    args, unset = trl_args(kind), trl_args(kind)
    setattr(args, name, another(name, getattr(args, name)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usual = TRANSLATE[kind](unset)
        assert not [w for w in caught if w.category is NotCarried], "nobody set anything"
        try:
            ours = TRANSLATE[kind](args)
        except ValueError as error:
            return False, str(error)
    said = "".join(str(w.message) for w in caught if w.category is NotCarried)
    return ours != usual, said


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_that_is_set_is_carried_warned_about_or_refused_by_its_name(kind):
    names = {field.name for field in fields_of(kind)} - {*CHANGES_NOTHING}
    for name in names - OF_THE_MODEL if kind in TRAINS else names:
        changes, said = answer_to(kind, name)
        assert changes or name in said, name
        assert "there is nothing like it" not in said, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_is_that_of_the_installed_trl(kind):
    if find_spec("trl") is None:
        pytest.skip("no TRL here; python tests/compat/trl_fields.py in .venv-bench-trl116 makes it")
    own = trl_class(kind)[0]
    recorded = recorded_class(kind)
    of_record = json.loads(RECORD.read_text("utf-8"))
    assert of_record["trl"] == trl_class(kind)[1].removeprefix("trl ")
    names = [f.name for f in dataclasses.fields(own)]
    assert names == [f.name for f in dataclasses.fields(recorded)]


@pytest.mark.parametrize("kind", TRAINS)
def test_what_is_carried_are_arguments_of_the_function_that_trains(kind):
    arguments = {*inspect.signature(TRAINS[kind]).parameters, *inspect.signature(fit).parameters}
    assert {*carried(kind, max_steps=3)} <= arguments


def test_cispo_s_cap_is_the_largest_weight_and_it_has_no_floor():
    "TRL: −sg(min(ρ, ε_high))·Â·log π, for ρ on both sides of 1 and beyond the cap."
    config = carried(loss_type="cispo", epsilon_high=5.0)
    assert (config.clip, config.clip_high, config.surrogate) == (1.0, 4.0, "weight")
    ell = torch.tensor([[-3.0, -0.7, 0.0], [0.5, 1.5, 2.5]], dtype=torch.float64)
    logprobs = torch.full_like(ell, -4.0).requires_grad_()
    old = logprobs.detach() - ell
    advantages = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 1.0, 3.0]], dtype=torch.float64)
    weight = torch.tensor([[math_exp(x) for x in row] for row in ell.tolist()]).double()
    by_trl = -(weight.clamp(max=5.0) * advantages * logprobs)
    loss = policy_loss(
        logprobs,
        old,
        advantages,
        torch.ones_like(ell, dtype=torch.bool),
        config.clip,
        config.clip_high,
        surrogate=config.surrogate,
    )
    torch.testing.assert_close(loss, by_trl, rtol=1e-6, atol=0)
    ours = torch.autograd.grad(loss.sum(), logprobs)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(by_trl.sum(), logprobs)[0])


def math_exp(x):
    "e^x by its series: no second use of torch."
    total, term = 0.0, 1.0
    for k in range(1, 60):
        total += term
        term *= x / k
    return total


def test_a_cap_that_cuts_every_weight_is_refused_with_what_it_does():
    with pytest.raises(ValueError, match="epsilon_high=None.*a cap above 1.*to 0.2"):
        carried(loss_type="cispo")
    with pytest.raises(ValueError, match="epsilon_high=0.28"):
        carried(loss_type="cispo", epsilon_high=0.28)


def test_the_kl_of_trl_is_multiplied_by_the_ratio_unless_somebody_says_otherwise():
    "TRL: β·ρ·(e^(ref − π) − (ref − π) − 1) with the gradient through ρ as well."
    assert carried(beta=0.04, use_bias_correction_kl=False).kl_gradient == "plain"
    config = carried(beta=0.04)
    assert config.kl_gradient == "ratio"
    values = [[-1.0, -2.5, -0.3]], [[-1.4, -1.0, -0.9]], [[-1.1, -2.0, -0.4]]
    logprobs, ref, old = (torch.tensor(x, dtype=torch.float64) for x in values)
    logprobs.requires_grad_()
    gap = ref - logprobs
    by_trl = 0.04 * (logprobs - old).exp() * (gap.exp() - gap - 1)
    mask = torch.ones_like(ref, dtype=torch.bool)
    terms = (logprobs, ref, mask, config.beta, config.kl_estimator, old)
    ours = KL_GRADIENTS[config.kl_gradient](*terms)
    torch.testing.assert_close(ours, by_trl)
    ours_grad = torch.autograd.grad(ours.sum(), logprobs)[0]
    torch.testing.assert_close(ours_grad, torch.autograd.grad(by_trl.sum(), logprobs)[0])


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(warmup_steps=6, max_steps=60, num_iterations=2), dict(warmup_steps=3, steps=30)),
        (dict(warmup_steps=0.1, max_steps=60), dict(warmup_steps=6)),
        (
            dict(lr_scheduler_type="constant_with_warmup", warmup_steps=5),
            dict(lr_schedule="constant", warmup_steps=5),
        ),
        (dict(eval_strategy="steps", eval_steps=10, num_iterations=2), dict(eval_every=5)),
        (dict(eval_strategy="steps", eval_steps=0.25, max_steps=40), dict(eval_every=10)),
        (dict(bf16=False), dict(autocast=None)),
        (dict(), dict(autocast="bfloat16", eval_every=None, warmup_steps=0, device="cpu")),
        (dict(max_grad_norm=0.0), dict(max_grad_norm=1e9)),
        (dict(entropy_coef=0.01), dict(ent_coef=0.01, entropy_target=None)),
        (
            dict(use_adaptive_entropy=True, entropy_target=0.3, entropy_coef_delta=0.01),
            dict(ent_coef=0.0, entropy_target=0.3, entropy_step=0.01),
        ),
        (
            dict(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 2.0]),
            dict(
                reward_weighting="scaled",
                advantage="group_mean_batch_std",
                reward_weights=(1.0, 2.0),
            ),
        ),
        (
            dict(gradient_accumulation_steps=4, steps_per_generation=2),
            dict(batch_size=32, minibatches=1, micro_batch_size=8),
        ),
        (
            dict(loss_type="sapo", sapo_temperature_neg=1.3),
            dict(surrogate="sapo", surrogate_settings=dict(tau_pos=1.0, tau_neg=1.3)),
        ),
        (
            dict(loss_type="vespo", vespo_k_neg=4.0),
            dict(
                surrogate="vespo",
                ratio_level="product",
                surrogate_settings=dict(k_pos=2.0, lambda_pos=3.0, k_neg=4.0, lambda_neg=2.0),
            ),
        ),
        (
            dict(loss_type="luspo", importance_sampling_level="sequence"),
            dict(aggregation="sequence_total", ratio_level="sequence", surrogate="min"),
        ),
        (dict(epsilon_high=0.28, delta=3.0), dict(clip=0.2, clip_high=0.28, dual_clip=3.0)),
        (
            dict(off_policy_mask_threshold=0.4),
            dict(surrogate="sequence_masked", surrogate_settings={"max_kl": 0.4}),
        ),
        (dict(router_aux_loss_coef=0.01), dict(router_aux_loss_coef=0.01)),
        (dict(top_entropy_quantile=0.2), dict(advantage="group_mean_std_high_entropy")),
    ],
    ids=str,
)
def test_by_hand(options, expected):
    config = carried(**options)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_grpo_config_by_hand():
    c = carried(
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=30,
        num_iterations=3,
        scale_rewards=False,
        loss_type="grpo",
        reward_weights=[1.0, 2.0],
        sync_ref_model=True,
        ref_model_sync_steps=12,
        beta=0.04,
    )
    sizes = c.batch_size, c.minibatches, c.micro_batch_size, c.steps, c.epochs
    assert sizes == (32, 2, 8, 5, 3)  # 30 optimizer steps are 5 iterations of 2 · 3
    assert (c.ref_every, c.ref_mixup, c.reward_weights) == (2, 0.6, (1.0, 2.0))
    assert (c.advantage, c.aggregation) == ("group_mean", "sequence_mean")
    assert (c.kl_estimator, c.kl_placement, c.beta) == ("k3", "loss", 0.04)
    assert (c.lr, c.lr_schedule, c.seed) == (1e-6, "linear", 42)


def test_epochs_become_steps_with_the_number_of_prompts():
    "4 prompts of 8 responses fill an iteration of 32: 103 prompts are 25 iterations, and 3 left."
    args = trl_args("GRPOConfig", per_device_train_batch_size=32, num_train_epochs=2.0)
    assert config_from_trl(args, n_prompts=103).steps == 50
    config, said = lost(num_train_epochs=2.0)
    assert config.steps == RLHFConfig.steps and "give n_prompts" in said


@pytest.mark.parametrize(
    "options, optimizer_steps",
    [
        (dict(num_iterations=2, steps_per_generation=2), 40),
        (dict(gradient_accumulation_steps=2, steps_per_generation=4), 8),
        (dict(gradient_accumulation_steps=2), 10),
        (dict(num_iterations=3), 60),
    ],
    ids=str,
)
def test_a_run_has_as_many_optimizer_steps_as_trl_s(options, optimizer_steps):
    "GRPOTrainer of TRL 1.16.0 ran 21 prompts twice: its state.global_step at the end."
    sizes = dict(per_device_train_batch_size=8, num_generations=4, num_train_epochs=2.0)
    config = config_from_trl(trl_args("GRPOConfig", **sizes, **options), n_prompts=21)
    assert config.steps * config.epochs * config.minibatches == optimizer_steps


def test_an_rloo_config_by_hand():
    config = carried("RLOOConfig", reward_clip_range=(-2.0, 2.0), epsilon=0.1, epsilon_high=0.3)
    assert config.algorithm == "rloo" and config.reward_clip == 2.0
    assert (config.clip, config.clip_high, config.beta, config.group_size) == (0.1, 0.3, 0.05, 2)
    with pytest.raises(ValueError, match="normalize_advantages=True: here whiten_advantages"):
        carried("RLOOConfig", normalize_advantages=True)
    with pytest.raises(ValueError, match="reward_clip_range"):
        carried("RLOOConfig", reward_clip_range=(0.0, 2.0))


@pytest.mark.parametrize(
    "options",
    [
        dict(loss_type="of_tomorrow"),
        dict(top_p=0.9),
        dict(top_k=50),
        dict(min_p=0.1),
        dict(repetition_penalty=1.1),
        dict(delta=1.1),
        dict(entropy_coef_max=0.5, use_adaptive_entropy=True),
        dict(top_entropy_quantile=0.5),
        dict(off_policy_mask_threshold=0.5, loss_type="sapo"),
    ],
    ids=str,
)
def test_what_would_train_something_else_is_refused(options):
    name, value = [*options.items()][0]
    with pytest.raises(ValueError, match=f"{name}={value!r}: here"):
        carried(**options)


def test_only_what_somebody_set_is_listed_with_what_to_do():
    _, said = lost(output_dir="runs/x", optim="sgd", lr_scheduler_type="polynomial")
    listed = [part.split("=")[0].split(":")[0] for part in said.split(". ", 1)[1].split("; ")]
    assert sorted(listed) == ["lr_scheduler_type", "optim", "output_dir"]
    assert "train_in" in said and "optimizer" in said


@pytest.mark.parametrize("name", IDLE)
def test_a_field_that_trl_does_not_read_either_is_said_to_have_no_effect(name):
    kinds = [kind for kind in KINDS[:2] if name in {f.name for f in fields_of(kind)}]
    args = trl_args(kinds[0])
    setattr(args, name, another(name, getattr(args, name)))
    other, needed = IDLE[name]
    with pytest.warns(NotCarried, match=f"{name}=.*no effect without {other}={needed!r}, in TRL"):
        config_from_trl(args)


def fields_of(kind):
    return dataclasses.fields(trl_class(kind)[0])


@pytest.mark.parametrize(
    "mode, level, beyond",
    [
        ("token_truncate", "token", "cut"),
        ("token_mask", "token", "drop"),
        ("sequence_truncate", "product", "cut"),
        ("sequence_mask", "product", "drop"),
    ],
)
def test_the_weights_of_vllm_s_samples_are_carried_and_the_sampler_is_named(mode, level, beyond):
    config, said = lost(
        use_vllm=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=0.5
    )
    assert "use_sampler" in said and "importance" not in said
    assert (config.importance_level, config.importance_beyond) == (level, beyond)
    assert (config.importance_floor, config.importance_cap) == (0.5, 3.0)


def test_dpo_sft_and_reward_models_by_hand():
    ours = carried(
        "DPOConfig",
        max_steps=9,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        warmup_steps=0.34,
        adam_beta2=0.95,
    )
    assert ours == dict(
        lr=1e-6,
        beta=0.1,
        label_smoothing=0.0,
        seed=42,
        steps=9,
        batch_size=16,
        weight_decay=0.1,
        max_grad_norm=1.0,
        betas=(0.9, 0.95),
        warmup=4,
    )
    assert "steps" not in carried("DPOConfig")
    assert dpo_from_trl(trl_args("DPOConfig"), n_pairs=100)["steps"] == 39  # 3 · ⌈100/8⌉
    with pytest.raises(ValueError, match="loss_type"):
        carried("DPOConfig", loss_type=["ipo"])
    assert carried("SFTConfig", max_steps=4, learning_rate=0.1)["lr"] == 0.1
    with pytest.raises(ValueError, match="loss_type='dft'"):
        carried("SFTConfig", loss_type="dft")
    with pytest.raises(ValueError, match="center_rewards_coefficient=0.01"):
        carried("RewardConfig", center_rewards_coefficient=0.01)


def test_options_beside_a_configuration_are_refused():
    with pytest.raises(ValueError, match="kl_coef beside a GRPOConfig"):
        config_from_trl(trl_args("GRPOConfig"), kl_coef=0.1)
    with pytest.raises(ValueError, match="n_prompts is for a GRPOConfig"):
        config_from_trl("train", n_prompts=5)


def test_the_weights_of_tokens_are_those_of_trl_s_averages():
    "TRL's averages of one batch in a row of micro-batches of its own size, by hand."
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    by_hand = dict(grpo=(2 + 4.5) / 2, dapo=3.0, bnpo=3.0, dr_grpo=15 / (2 * 512), luspo=15 / 2)
    for loss, expected in by_hand.items():
        config = carried(loss_type=loss)
        length = config.max_new_tokens if loss == "dr_grpo" else None
        got = aggregate(x, mask, config.aggregation, length=length)
        assert got.item() == pytest.approx(expected)
