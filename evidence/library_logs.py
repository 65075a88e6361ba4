"""Logs of TRL's own tiny runs, healthy and with bugs, for the tests of `doctor.libraries`.

In an environment with TRL: `python evidence/library_logs.py`. It writes
`tests/doctor/library_logs/trl_*.json`, each the trainer_state.json of a run of a few seconds.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

root = Path(__file__).parents[1]
sys.path.insert(0, str(root))

from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel  # noqa: E402

from instruct_goose.models.tokens import word_tokenizer  # noqa: E402

OUT = root / "tests/doctor/library_logs"
WORDS = [f"w{i}" for i in range(12)]
COMMON: dict[str, Any] = dict(
    max_steps=12,
    logging_steps=1,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    report_to=[],
    save_strategy="no",
    bf16=False,
    use_cpu=True,
    disable_tqdm=True,
    gradient_checkpointing=False,
    seed=0,
)
ONLINE: dict[str, Any] = dict(
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=6,
    temperature=1.0,
    top_k=0,
)


def tokenizer() -> Any:
    return word_tokenizer(WORDS, 32, pad="<pad>", bos="<bos>", eos="<eos>")


def shape(words: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(words),
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )


def saved_model(kind: type, words: Any, where: Path, **more: Any) -> Any:
    "A tiny model from its directory, where TRL looks for the reference."
    torch.manual_seed(0)
    config = shape(words)
    for name, value in more.items():
        setattr(config, name, value)
    model = kind(config)
    model.save_pretrained(where)
    model.config._name_or_path = str(where)
    return model


def count_w1(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count("w1")) for text in completions]


def always(number: float) -> Callable:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [number] * len(completions)

    return reward


def has_w1(completions: list[str], **_: Any) -> list[float]:
    return [float("w1" in text.split()) for text in completions]


def style(completions: list[str], **_: Any) -> list[float]:
    return count_w1(completions)


def online(trainer: type, config: type, rewards: Any = count_w1, change=None, **settings: Any):
    "A run of GRPO or RLOO."

    def run(where: Path) -> Any:
        words = tokenizer()
        made = trainer(
            model=saved_model(GPT2LMHeadModel, words, where / "model"),
            reward_funcs=rewards,
            args=config(output_dir=str(where), **COMMON | ONLINE | settings),
            train_dataset=Dataset.from_dict(
                {"prompt": [f"w{i} w{i + 2}" for i in range(2, 10)] * 8}
            ),
            processing_class=words,
        )
        if change is not None:
            change(made)
        return made

    return run


def frozen(trainer: Any) -> None:
    "The optimizer's weights get no gradient, since the loss is detached."
    compute = trainer.compute_loss

    def detached(*args: Any, **more: Any) -> Any:
        loss = compute(*args, **more)
        return loss.detach() + 0 * sum(p.sum() for p in trainer.model.parameters())

    trainer.compute_loss = detached


def pairs(swap: bool = False, same: bool = False) -> Dataset:
    rows = []
    for i in range(64):
        good = f" w{i % 8 + 2} w1"
        bad = good if same else f" w{i % 8 + 2} w0"
        rows.append(
            {
                "prompt": f"w{i % 8 + 2}",
                "chosen": bad if swap else good,
                "rejected": good if swap else bad,
            }
        )
    return Dataset.from_list(rows)


def dpo(data: Dataset, **settings: Any):
    def run(where: Path) -> Any:
        words = tokenizer()
        return DPOTrainer(
            model=saved_model(GPT2LMHeadModel, words, where / "model"),
            args=DPOConfig(
                output_dir=str(where), per_device_train_batch_size=16, **COMMON | settings
            ),
            train_dataset=data,
            processing_class=words,
        )

    return run


def sft(**settings: Any):
    def run(where: Path) -> Any:
        words = tokenizer()
        texts = [f"w{i % 8 + 2} w1 w{i % 8 + 2}" for i in range(64)]
        return SFTTrainer(
            model=saved_model(GPT2LMHeadModel, words, where / "model"),
            args=SFTConfig(
                output_dir=str(where), per_device_train_batch_size=16, **COMMON | settings
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=words,
        )

    return run


def reward_model(data: Dataset, **settings: Any):
    def run(where: Path) -> Any:
        words = tokenizer()
        return RewardTrainer(
            model=saved_model(GPT2ForSequenceClassification, words, where / "model", num_labels=1),
            args=RewardConfig(
                output_dir=str(where), per_device_train_batch_size=16, **COMMON | settings
            ),
            train_dataset=data,
            processing_class=words,
        )

    return run


RUNS = {
    "grpo_healthy": online(GRPOTrainer, GRPOConfig),
    "grpo_with_kl": online(GRPOTrainer, GRPOConfig, beta=0.05),
    "grpo_loss_of_zero": online(GRPOTrainer, GRPOConfig, loss_type="grpo"),
    "grpo_all_right": online(GRPOTrainer, GRPOConfig, always(1.0)),
    "grpo_all_wrong": online(GRPOTrainer, GRPOConfig, always(0.0)),
    "grpo_learning_rate_30_times": online(GRPOTrainer, GRPOConfig, learning_rate=0.3, beta=0.01),
    "grpo_never_ends": online(GRPOTrainer, GRPOConfig, max_completion_length=2),
    "grpo_no_gradient": online(GRPOTrainer, GRPOConfig, change=frozen),
    "grpo_one_reward_twice": online(GRPOTrainer, GRPOConfig, [count_w1, style]),
    "rloo_healthy": online(RLOOTrainer, RLOOConfig),
    "dpo_healthy": dpo(pairs()),
    "dpo_same_pairs": dpo(pairs(same=True)),
    "dpo_chosen_falls": dpo(pairs(), learning_rate=0.1, beta=0.01),
    "sft_healthy": sft(),
    "sft_no_learning_rate": sft(learning_rate=0.0),
    "reward_healthy": reward_model(pairs()),
    "reward_same_pairs": reward_model(pairs(same=True)),
}


def write_log(trainer: Any, name: str, place: Path) -> list[dict]:
    "Write what a trainer of TRL has logged, a row a line, and return it; `place` is a scratch folder."
    trainer.state.save_to_json(str(place / "trainer_state.json"))
    state = json.loads((place / "trainer_state.json").read_text("utf-8"))
    log = state["log_history"]
    rows = ",\n  ".join(json.dumps(row) for row in log)
    text = f'{{\n "global_step": {state["global_step"]},\n "log_history": [\n  {rows}\n ]\n}}\n'
    (OUT / f"trl_{name}.json").write_text(text, "utf-8")
    return log


def main() -> None:
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as place:
            trainer = RUNS[name](Path(place))
            trainer.train()
            log = write_log(trainer, name, Path(place))
        print(name, log[0], flush=True)


if __name__ == "__main__":
    main()
