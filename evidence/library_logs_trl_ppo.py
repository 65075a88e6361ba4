"""Logs of TRL's PPO, healthy and with bugs, for the tests of `doctor.libraries`.

TRL 1.4.0 has this trainer, 1.16.0 no longer. In an environment with the former:
`python evidence/library_logs_trl_ppo.py`. It writes `tests/doctor/library_logs/trl_ppo_*.json`,
each the trainer_state.json of a run of a few seconds.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from library_logs import COMMON, WORDS, shape, tokenizer, write_log
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel
from trl.experimental.ppo import PPOConfig, PPOTrainer

BATCH = 32
LIMIT = 6  # tokens of a response


class WritesNoPadding(torch.nn.Linear):
    "The policy's last layer: a trained model does not write its padding token."

    pad_id = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        is_padding = torch.arange(logits.shape[-1]) == self.pad_id
        return logits.masked_fill(is_padding, -1e9)


def policy(words: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(shape(words))
    head = WritesNoPadding(model.config.n_embd, model.config.vocab_size, bias=False)
    head.pad_id = words.pad_token_id
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


def scorer(words: Any, seed: int, scale: float) -> GPT2ForSequenceClassification:
    "A random model of one score."
    torch.manual_seed(seed)
    config = shape(words)
    config.num_labels = 1
    model = GPT2ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=scale)
    return model


def ppo(where: Path, score_scale: float = 0.3, **settings: Any) -> PPOTrainer:
    words = tokenizer()
    common = {name: x for name, x in COMMON.items() if name not in ("max_steps", "learning_rate")}
    ours: dict[str, Any] = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": 2,
        "total_episodes": BATCH * 12,
        "response_length": LIMIT,
        "stop_token": "eos",
        "local_rollout_forward_batch_size": BATCH,
        "num_sample_generations": 0,
        "temperature": 1.0,
    }
    rows = [words(f"{WORDS[i % 8 + 2]} {WORDS[i % 5 + 4]}")["input_ids"] for i in range(64)]
    return PPOTrainer(
        args=PPOConfig(output_dir=str(where), **common | ours | settings),
        processing_class=words,
        model=policy(words),
        ref_model=policy(words),
        reward_model=scorer(words, 1, score_scale),
        value_model=scorer(words, 2, 0.1),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[:8]}),
    )


RUNS: dict[str, dict[str, Any]] = {
    "ppo_healthy": {},
    "ppo_reward_always_the_same": {"score_scale": 0.0},
    "ppo_learning_rate_30_times": {"learning_rate": 3e-2},
    "ppo_learning_rate_0": {"learning_rate": 0.0},
    "ppo_kl_sign": {"kl_coef": -0.5},
}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as place:
            trainer = ppo(Path(place), **RUNS[name])
            trainer.train()
            log = write_log(trainer, name, Path(place))
        print(name, log[0], flush=True)


if __name__ == "__main__":
    main()
