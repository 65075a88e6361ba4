"""FSDP2 on two CPU processes gives the weights of one process. Really run: torch's FSDP2 over gloo. Not run: NCCL, GPUs, bfloat16, offloading."""
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_processes import GRPO, PPO, PROMPTS, apart, reward, same_numbers, trainer_of, weights_of

from instruct_goose.training.processes import in_processes
from instruct_goose.training.sharded import asked_for, configs, is_sharded, parts_of

root = Path(__file__).parents[2]


def train(preset, settings, out=None, steps=2):
    if out is not None: os.environ["ACCELERATE_USE_FSDP"] = "true"
    trainer = trainer_of(preset, steps=steps, **settings)
    if out is None:
        history = trainer.train(PROMPTS, reward, progress=False)
        return weights_of(trainer), history, None
    for more in ({}, {"save_every": None, "resume": True}):
        with pytest.raises(ValueError, match=r"weights in pieces \(FSDP\) are not saved in the middle of a run: pass save_every=None"): trainer.train_in(out, PROMPTS, reward, **more)
    assert not out.exists()
    summary = trainer.train_in(out, PROMPTS, reward, save_every=None, progress=False)
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["iterations"] == steps and not (out / "checkpoints").exists()
    with pytest.raises(NotImplementedError, match="save_pretrained keeps its policy"): trainer.state()
    own = sum(p.to_local().numel() for group in trainer.optimizer.param_groups for p in group["params"])
    return {k: p.detach().clone() for k, p in trainer.agent.named_parameters()}, history, (own, len(parts_of(trainer.agent)), is_sharded(trainer.agent))


@pytest.mark.parametrize("preset, settings", (("ppo", PPO), ("grpo", GRPO)))
def test_two_processes_with_a_piece_each_are_one(preset, settings, tmp_path):
    weights, history, _ = train(preset, settings)
    (one, one_history, (own, parts, cut)), (two, _, (rest, _, _)) = in_processes(2, train, preset, settings, tmp_path / "run", seconds=500)
    assert cut and parts == (6 if preset == "ppo" else 4) and all(torch.equal(one[k], two[k]) for k in one)
    assert apart(one, weights) < 1e-9
    everything = sum(p.numel() for k, p in one.items() if preset == "ppo" or k.startswith("model."))  # GRPO learns no values
    assert own + rest == everything and max(own, rest) < .56 * everything  # a value head of one row cannot be halved
    saved = load_file(tmp_path / "run/policy/model.safetensors")
    assert all(torch.equal(saved[k.removeprefix("model.")], one[k]) for k in one if k.startswith("model.") and k.removeprefix("model.") in saved) and len(saved) > 20
    same_numbers(history, one_history)


def test_deepspeed_is_refused_by_name(monkeypatch):
    assert asked_for() is False
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="does not run under DeepSpeed.*fsdp.yaml"): asked_for()


@pytest.mark.parametrize("name, kind", (("data_parallel", "MULTI_GPU"), ("fsdp", "FSDP"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED")))
def test_accelerate_reads_the_configurations(name, kind):
    "Its own parser, which refuses keys that it does not know. Nothing is launched."
    config = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file(str(configs() / f"{name}.yaml"))
    assert config.distributed_type == kind and config.num_processes == 8
    if kind == "DEEPSPEED": assert config.deepspeed_config["zero_stage"] == int(name[-1])
    if kind == "FSDP": assert config.fsdp_config["fsdp_version"] == 2
