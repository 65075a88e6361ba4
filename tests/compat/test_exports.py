"""Runs exported to verl and OpenRLHF. The oracles: the names of settings in their wheels (`peer_keys.json`), numbers by hand, and our
own rewards. `evidence/larger_libraries.py` gives the exports to the libraries themselves."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch

from instruct_goose import RLHFConfig
from instruct_goose.compat.exports import (
    OPENRLHF,
    VERL,
    CannotExport,
    ClusterJob,
    completion_of,
    openrlhf_command,
    openrlhf_reward,
    openrlhf_row,
    to_openrlhf,
    to_verl,
    verl_command,
    verl_reward,
    verl_row,
    write_openrlhf_rows,
    write_verl_rows,
)
from instruct_goose.objective.masks import aggregate, masked_sum
from instruct_goose.objective.policy_loss import probability_ratio
from instruct_goose.rollouts.rewards import RewardError

RECORD = json.loads(Path(__file__).with_name("peer_keys.json").read_text("utf-8"))
JOB = ClusterJob("some/model", "train.parquet", "reward.py", gpus_per_node=2)
EXPORTS = {"verl": to_verl, "openrlhf": to_openrlhf}
BASES = {
    "ppo": RLHFConfig.preset("ppo", steps=40),
    "grpo": RLHFConfig.preset("grpo", steps=40, minibatches=1),
    "gspo": RLHFConfig.preset("gspo", steps=40),
    "reinforce_pp": RLHFConfig.preset("reinforce_pp", steps=40),
    "dr_grpo": RLHFConfig.preset("dr_grpo", steps=40, aggregation="token_mean"),
}
OTHERS = {  # another value of each setting, which the bases may have
    "seed": 7,
    "steps": 41,
    "device": "cpu",
    "eval_every": 5,
    "eval_greedy": True,
    "max_kl_to_reference": 3.0,
    "reward_weights": (1.0, 2.0),
    "reward_weighting": "scaled",
    "reward_scaling": "running",
    "reward_clip": 3.0,
    "missing_eos_penalty": 1.0,
    "overlong_buffer": 4,
    "mask_truncated": True,
    "reward_timeout": 3.0,
    "keep_special_tokens": True,
    "recheck_every": 3,
    "max_redraws": 2,
    "drop_flat_groups": True,
    "batch_size": 128,
    "group_size": 16,
    "max_new_tokens": 40,
    "long_rows": "drop",
    "template_kwargs": '{"enable_thinking": false}',
    "temperature": 0.7,
    "stop_strings": ("###",),
    "group_ddof": 0,
    "gamma": 0.9,
    "lam": 0.7,
    "clip": 0.1,
    "clip_high": 0.3,
    "dual_clip": 4.0,
    "value_clip": None,
    "vf_coef": 0.1,
    "ent_coef": 0.02,
    "entropy_target": 1.5,
    "router_aux_loss_coef": 0.1,
    "importance_cap": 2.0,
    "beta": 0.3,
    "kl_estimator": "k2",
    "kl_target": 5.0,
    "ref_every": 4,
    "epochs": 3,
    "max_kl_to_old": 2.0,
    "minibatches": 4,
    "micro_batch_size": 3,
    "micro_batch_tokens": 3000,
    "autocast": "bfloat16",
    "tf32": True,
    "lr": 3e-6,
    "value_lr": 2e-6,
    "lr_schedule": "linear",
    "warmup_steps": 4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.3,
}
WITHOUT_EFFECT = {  # what the base does not use, or the machine decides
    "device": BASES,
    "eval_greedy": BASES,
    "value_clip": ("grpo", "gspo", "reinforce_pp", "dr_grpo"),
    "value_lr": ("grpo", "gspo", "reinforce_pp", "dr_grpo"),
    "vf_coef": BASES,  # named in any case
    "group_ddof": ("ppo", "gspo", "reinforce_pp", "dr_grpo"),
    "lam": ("grpo", "gspo", "reinforce_pp", "dr_grpo"),
    "gamma": ("grpo", "gspo", "dr_grpo"),
    "kl_target": ("gspo", "dr_grpo"),
    "kl_estimator": ("gspo", "dr_grpo"),
}


def changed(base, setting, value):
    "The base with another value; None where the two do not go together."
    try:
        return dataclasses.replace(base, **{setting: value})
    except ValueError:
        return None


@pytest.mark.parametrize("library", EXPORTS)
def test_the_record_is_of_the_versions_that_the_export_names(library):
    named = {"verl": VERL, "openrlhf": OPENRLHF}[library]
    assert named.split()[-1] == RECORD[library]["version"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", EXPORTS)
@pytest.mark.parametrize("base", BASES)
def test_every_setting_is_carried_named_or_refused_and_every_key_exists(library, base):
    known = set(RECORD[library]["keys"])
    export = EXPORTS[library]
    before = export(BASES[base], JOB)
    lost = []
    tried = 0
    for setting, value in OTHERS.items():
        config = changed(BASES[base], setting, value)
        if config is None:
            continue
        tried += 1
        try:
            after = export(config, JOB)
        except CannotExport as e:
            assert f"{setting}=" in str(e)
            continue
        for key in after.settings:
            parent = key.removeprefix("+").rpartition(".")[0]
            assert key in known or key.startswith("+") and parent in known, key
        if after == before and base not in WITHOUT_EFFECT.get(setting, ()):
            lost.append(setting)
    assert lost == [] and tried > 40


def test_every_setting_is_tried():
    by_tables = {"advantage", "whiten_advantages", "ratio_level", "surrogate", "aggregation"}
    with_others = {
        "keep_best",
        "surrogate_settings",
        "entropy_step",
        "importance_floor",
        "importance_level",
        "importance_beyond",
        "kl_placement",
        "kl_gradient",
        "ref_mixup",
    }
    names = {field.name for field in dataclasses.fields(RLHFConfig)}
    assert names == set(OTHERS) | by_tables | with_others


def test_sizes_by_hand():
    config = RLHFConfig.preset(
        "grpo", steps=10, batch_size=96, group_size=8, minibatches=3, epochs=2, warmup_steps=4
    )
    verl = to_verl(config, JOB).settings
    assert verl["data.train_batch_size"] == 12  # prompts
    assert verl["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4  # prompts
    assert verl["actor_rollout_ref.rollout.n"] == 8
    assert verl["actor_rollout_ref.actor.optim.lr_warmup_steps"] == 4
    assert verl["actor_rollout_ref.actor.kl_loss_type"] == "low_var_kl"
    openrlhf = to_openrlhf(config, JOB._replace(rows=50)).settings
    assert openrlhf["rollout.batch_size"] == 12  # prompts
    assert openrlhf["train.batch_size"] == 32  # responses
    assert openrlhf["train.num_episodes"] == 3  # 120 prompts of 50 rows
    assert openrlhf["actor.lr_warmup_ratio"] == 0.4
    assert openrlhf["algo.kl.estimator"] == "k3"


def test_a_bound_that_cannot_be_switched_off_is_never_reached():
    verl = to_verl(RLHFConfig.preset("ppo", value_clip=None), JOB).settings
    assert verl["actor_rollout_ref.actor.clip_ratio_c"] > 1e6
    assert verl["critic.cliprange_value"] > 1e6
    assert to_openrlhf(RLHFConfig.preset("ppo"), JOB).settings["reward.clip_range"][1] > 1e6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "preset, more, library, why",
    [
        ("dapo", {}, "verl", "aggregation='group_token_mean'"),
        ("cispo", {"aggregation": "token_mean"}, "openrlhf", "surrogate='weight'"),
        ("remax", {"epochs": 1, "minibatches": 1}, "openrlhf", "advantage='greedy'"),
        ("rloo", {}, "verl", "ratio_level='product'"),
        ("gspo", {"aggregation": "token_mean"}, "verl", "ratio_level='sequence'"),
        ("ppo", {"whiten_advantages": False}, "verl", "whiten_advantages=False: with gae it is"),
        ("grpo", {"kl_gradient": "ratio"}, "openrlhf", "kl_gradient='ratio'"),
        ("grpo", {"advantage": "group_mean_batch_std"}, "verl", "advantage='group_mean_batch_std'"),
    ],
)
def test_what_would_train_something_else_is_refused(preset, more, library, why):
    with pytest.raises(CannotExport) as refused:
        EXPORTS[library](RLHFConfig.preset(preset, **more), JOB)
    assert why in str(refused.value)


def test_a_batch_that_the_gpus_cannot_share_is_an_error():
    with pytest.raises(ValueError, match="batch_size=64 must be a multiple of the 24 GPUs"):
        to_verl(RLHFConfig.preset("ppo"), JOB._replace(nodes=3, gpus_per_node=8))


def test_a_product_of_ratios_is_exported_where_its_gradient_is_that_of_the_sum():
    "RLOO with one step: ∇ρ(response)·A averaged over responses is verl's seq-mean-token-sum."
    config = RLHFConfig.preset("rloo", epochs=1, minibatches=1)
    exported = to_verl(config, JOB).settings
    assert exported["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum"
    generator = torch.Generator().manual_seed(3)
    logprobs = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [5]])
    ratio = probability_ratio(logprobs, logprobs.detach(), mask, level="product")
    ours = aggregate(ratio * advantages.expand(4, 6), mask, "sequence_mean")
    token_ratio = (logprobs - logprobs.detach()).exp()
    theirs = masked_sum(token_ratio * advantages, mask, dim=-1).mean()
    (our_gradient,) = torch.autograd.grad(ours, logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    assert torch.allclose(our_gradient, their_gradient, atol=1e-14)
    assert our_gradient.abs().sum() > 0.1


# ----------------------------------------------------------- data and rewards


def right(completions, answer):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def short(prompts, completion_messages):
    sizes = [len(messages[0]["content"]) for messages in completion_messages]
    return [-size / len(prompt[0]["content"]) for size, prompt in zip(sizes, prompts, strict=True)]


ROW = {"prompt": [{"role": "user", "content": "3 + 4"}], "answer": "7", "odd": None, "n": [1, {}]}


@pytest.mark.parametrize("answer", ["7", " 7", "77", "", "ü ⟦7⟧"])
def test_the_same_answer_gets_the_same_score_everywhere(answer):
    ours = 2 * right([answer], ["7"])[0] - 3 * len(answer) / 5
    extra = verl_row(ROW)["extra_info"] | {"num_turns": 2}  # what verl adds
    in_verl = verl_reward(right, short, weights=(2, 3))("", answer, "", extra, reward_router=None)
    ask = openrlhf_reward(right, short, weights=(2, 3), ends=("<end>",))
    label = openrlhf_row(ROW)["label"]
    told = ask([f"<s>q: 3 + 4 a:{answer}<end>"], ["q: 3 + 4 a:"], [label])
    assert in_verl == pytest.approx(ours, rel=1e-6)
    assert told["rewards"].tolist() == told["scores"].tolist() == [pytest.approx(ours, rel=1e-6)]


def test_a_response_that_repeats_its_prompt_stays_whole():
    assert completion_of("<s>ab ab c</s>", "ab", ("</s>",)) == " ab c"
    with pytest.raises(ValueError, match="does not contain its prompt 'x'"):
        completion_of("ab", "x", ())


def test_a_reward_that_reads_texts_is_refused_when_it_is_asked():
    def whole(texts):
        return [1.0] * len(texts)

    with pytest.raises(RewardError):
        verl_reward(whole)("", "7", "", verl_row(ROW)["extra_info"])


def test_rows_are_read_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow: pip install -e '.[data]'")
    rows = [ROW, {"prompt": [{"role": "user", "content": "Ω"}], "answer": "8"}]
    write_verl_rows(rows, tmp_path / "rows.parquet")
    write_openrlhf_rows(rows, tmp_path / "rows.jsonl")
    stored = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["prompt"] for row in stored] == [row["prompt"] for row in rows]
    assert [json.loads(row["extra_info"]["row"]) for row in stored] == rows
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(json.loads(line)["label"]) for line in lines] == rows
    with pytest.raises(ValueError, match="the prompt 'plain' is a text"):
        verl_row({"prompt": "plain"})


def words_of(command):
    return shlex.split(command.replace("\\\n", ""))


def test_commands_are_words_of_a_shell():
    job = JOB._replace(model="it's a model", train_file="a b.parquet")
    config = RLHFConfig.preset("ppo", template_kwargs='{"enable_thinking": false}')
    words = words_of(verl_command(to_verl(config, job)))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert "actor_rollout_ref.model.path='it\\'s a model'" in words
    assert "data.train_files='a b.parquet'" in words
    assert "trainer.logger=[console]" in words
    assert "+data.apply_chat_template_kwargs.enable_thinking=False" in words
    words = words_of(openrlhf_command(to_openrlhf(config, job)))
    assert words[words.index("--data.prompt_dataset") + 1] == "a b.parquet"
    assert words[words.index("--actor.eps_clip_low_high") + 1 :][:2] == ["0.2", "0.2"]
    assert "--train.colocate_all" in words and "--algo.kl.use_loss" not in words
