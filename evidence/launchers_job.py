"""The script that each launcher of launchers.py starts: PPO and GRPO on a tiny model in float64.

It knows nothing of launchers. Seven responses, or three groups of three, divide evenly by no number of processes.

    python launchers_job.py FOLDER ALGORITHM              six iterations, or the rest of a run that is there
    python launchers_job.py FOLDER ALGORITHM --kill-at 3  the last process is killed in iteration 3
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from instruct_goose import Agent, RLHFConfig, RLHFTrainer
from instruct_goose.core.processes import (
    full_tensor,
    init_processes,
    is_main_process,
    rank,
    world_size,
)
from instruct_goose.models.sharding import fsdp_requested
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.recipes.training import train_in

PROMPTS = ["the film", "a plot is", "the", "is good film the", "bad"]
SETTINGS = {
    "ppo": {"batch_size": 7, "minibatches": 2, "epochs": 2},
    "grpo": {"batch_size": 9, "group_size": 3, "minibatches": 2, "micro_batch_size": 2},
}
STEPS = 6


def new_trainer(algorithm):
    "A trainer of an untrained Llama in float64; other processes than the first have other weights."
    end = "<end>"
    words = "the a film plot is good bad".split()
    tokenizer = word_tokenizer(words, model_max_length=16, pad=end, bos=end, eos=end)
    torch.manual_seed(rank())
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = RLHFConfig.preset(
        algorithm,
        max_new_tokens=6,
        steps=STEPS,
        lr=3e-3,
        seed=3,
        device="cpu",
        **SETTINGS[algorithm],
    )
    values = "copy" if algorithm == "ppo" else None
    agent = Agent(LlamaForCausalLM(shape).double(), value_model=values)
    return RLHFTrainer(agent, config=config, tokenizer=tokenizer)


def likes_good(texts):
    "Good words less bad ones, and a little for each word."
    return [t.split().count("good") - t.split().count("bad") + 0.1 * len(t.split()) for t in texts]


def main():
    "Train; the main process leaves the weights beside the run."
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("algorithm", choices=SETTINGS)
    parser.add_argument("--kill-at", type=int)
    args = parser.parse_args()
    init_processes()
    trainer = new_trainer(args.algorithm)

    def reward(texts):
        if trainer.iteration == args.kill_at and rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return likes_good(texts)

    run = args.folder / "run"
    options = {"save_every": 1, "trial": False, "progress": False}
    train_in(trainer, run, PROMPTS, reward, resume=run.exists(), **options)
    weights = {name: full_tensor(x).detach() for name, x in trainer.agent.state_dict().items()}
    responses = trainer.rollout(PROMPTS).texts
    if is_main_process():
        resumed_from = json.loads((run / "summary.json").read_text("utf-8"))["resumed_from"]
        told = {
            "weights": weights,
            "responses": list(responses),
            "processes": world_size(),
            "sharded": fsdp_requested(),
            "resumed_from": resumed_from,
        }
        torch.save(told, args.folder / "told.pt")


if __name__ == "__main__":
    main()
