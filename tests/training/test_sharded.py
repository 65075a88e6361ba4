"""FSDP2 on two CPU processes gives the weights of one process. Really run: torch's FSDP2 over gloo. Not run: NCCL, GPUs, bfloat16, offloading."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_processes import GRPO, PPO, PROMPTS, apart, reward, same_numbers, trainer_of, weights_of

from instruct_goose.training.processes import in_processes
from instruct_goose.training.sharded import asked_for, configs, is_sharded, parts_of

root = Path(__file__).parents[2]


def train(preset, settings, out=None, steps=4):
    if out is not None: os.environ["ACCELERATE_USE_FSDP"] = "true"
    trainer = trainer_of(preset, steps=steps, **settings)
    history = trainer.train(PROMPTS, reward, progress=False)
    if out is None: return weights_of(trainer), history, None
    trainer.save_pretrained(out)
    with pytest.raises(NotImplementedError, match="save_pretrained keeps its policy"): trainer.state()
    own = sum(p.to_local().numel() for group in trainer.optimizer.param_groups for p in group["params"])
    return {k: p.detach().clone() for k, p in trainer.agent.named_parameters()}, history, (own, len(parts_of(trainer.agent)), is_sharded(trainer.agent))


@pytest.mark.parametrize("preset, settings", (("ppo", PPO), ("grpo", GRPO)))
def test_two_processes_with_a_piece_each_are_one(preset, settings, tmp_path):
    weights, history, _ = train(preset, settings)
    (one, one_history, (own, parts, cut)), (two, _, (rest, _, _)) = in_processes(2, train, preset, settings, tmp_path, seconds=500)
    assert cut and parts == (6 if preset == "ppo" else 4) and all(torch.equal(one[k], two[k]) for k in one)
    assert apart(one, weights) < 1e-9
    everything = sum(p.numel() for p in one.values())
    assert own + rest == everything and max(own, rest) < .56 * everything  # a value head of one row cannot be halved
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[k.removeprefix("model.")], one[k]) for k in one if k.startswith("model.") and k.removeprefix("model.") in saved) and len(saved) > 20
    for log in (*history, *one_history): log.pop("weights_moved")          # FSDP keeps the gradients where they are not looked for
    same_numbers(history, one_history)


def test_deepspeed_is_refused_by_name(monkeypatch):
    assert asked_for() is False
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="does not run under DeepSpeed.*fsdp.yaml"): asked_for()
