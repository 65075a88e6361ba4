"""TRL's PPOTrainer on the models, prompts and reward of bench.cases.ppo, one iteration at a time."""

import types

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from bench.cases.ppo import POLICY, REFERENCE, SETTINGS, VALUES
from bench.form import Job
from bench.peers.turns import Turns
from bench.tiny import QUERY, RESPONSE, ROWS, gpt2, movement, prompts, tokenizer


class Even(nn.Module):
    "A reward model whose 'hidden state' is the share of even ids so far in the response."

    base_model_prefix = "backbone"

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.score = nn.Identity()


class Backbone(nn.Module):
    def forward(self, input_ids, **_):
        even = (input_ids % 2 == 0).float()
        even[:, :QUERY] = 0
        return types.SimpleNamespace(hidden_states=[even.cumsum(1)[..., None] / RESPONSE])


class Values(nn.Module):
    base_model_prefix = "transformer"

    def __init__(self):
        super().__init__()
        self.transformer = gpt2(VALUES, trunk=True)
        self.score = nn.Linear(128, 1)
        self.config = self.transformer.config
        for p in self.score.parameters():
            nn.init.zeros_(p)


def trainer(collect: bool = True, iterations: int = 300) -> Job:
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    args = PPOConfig(
        output_dir="runs/bench-trl-ppo",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=ROWS,
        total_episodes=ROWS * iterations,
        num_ppo_epochs=SETTINGS["epochs"],
        response_length=RESPONSE,
        stop_token=None,
        temperature=1.0,
        learning_rate=SETTINGS["lr"],
        lr_scheduler_type="constant",
        kl_coef=SETTINGS["beta"],
        cliprange=SETTINGS["clip"],
        cliprange_value=SETTINGS["value_clip"],
        vf_coef=SETTINGS["vf_coef"],
        lam=SETTINGS["lam"],
        gamma=1.0,
        whiten_rewards=False,
        num_sample_generations=0,
        missing_eos_penalty=None,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    if not collect:
        ppo_trainer.gc = types.SimpleNamespace(collect=lambda: 0)
    data = Dataset.from_dict({"input_ids": prompts(ROWS * 8, 0)})
    policy = gpt2(POLICY)
    t = PPOTrainer(
        args=args,
        processing_class=tokenizer(beyond=True),
        model=policy,
        ref_model=gpt2(REFERENCE),
        reward_model=Even(),
        value_model=Values(),
        train_dataset=data,
        eval_dataset=data,
    )
    turns = Turns(t.train)
    seen = {}

    class Gate(TrainerCallback):
        def on_train_begin(self, *_, **__):
            turns.gate()

        def on_step_end(self, *_, **__):
            turns.gate()

    t.add_callback(Gate())
    generate, forward, log = ppo_trainer.batch_generation, ppo_trainer.forward, t.log

    def generated(*args):
        out = generate(*args)
        seen["ids"] = out[0]
        turns.mark("written")
        return out

    def forwarded(model, *args):
        if model is t.model:
            turns.first("judged")
        return forward(model, *args)

    ppo_trainer.batch_generation, ppo_trainer.forward = generated, forwarded
    t.log = lambda metrics: (seen.update(metrics=metrics), log(metrics))[1]

    def run():
        turns.step()
        m = turns.marks
        return {
            "rollout": m["written"] - m["start"],
            "score": m["judged"] - m["written"],
            "update": m["end"] - m["judged"],
        }

    def check(_):
        "Its first iteration: what it wrote, for the others, and what it says of it."
        run()
        ids, m = seen["ids"], seen["metrics"]
        numbers = {
            "score": m["objective/scores"],
            "kl": m["objective/kl"],
            "policy_loss": m["loss/policy_avg"],
            "value_loss": m["loss/value_avg"],
            "movement": movement(policy, POLICY),
        }
        return {
            "given": {"queries": ids[:, :QUERY].tolist(), "responses": ids[:, QUERY:].tolist()},
            "numbers": numbers,
        }

    torch.set_num_threads(1)
    return Job(run, check, ("trl", "accelerate"))
