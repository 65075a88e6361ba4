"""Logs of torchtune's own PPO recipe, healthy and with bugs, for the tests of `doctor.libraries`.

torchtune's are the recipe (`ppo_full_finetune_single_device`, as its wheel has it), models, loss and
`DiskLogger`, which writes every line. Ours are the sizes, random weights, the tokenizer of a few
words, the prompts, and the bugs. Beside a log stands what is counted here from the tensors of the
same iterations, under our names: a second way to each number that the doctor reads.

In an environment with torchtune 0.6.1 (`make parity` makes one) and torchao 0.9.0, the newest
that its recipes can import: `python evidence/library_logs_torchtune.py`. It writes
`tests/doctor/library_logs/torchtune_*`. Its GRPO recipe needs torchtune.dev, which the wheel lacks.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import OmegaConf
from torchtune.models.mistral._component_builders import mistral, mistral_classifier
from torchtune.rlhf.loss import PPOLoss

root = Path(__file__).parents[1]
OUT = root / "tests/doctor/library_logs"
THIS = "library_logs_torchtune"  # this module, as a recipe's settings name it
PAD, BOS, EOS = 0, 1, 2
VOCABULARY = 16
PROMPT = 4  # tokens
LIMIT = 6  # tokens of a response
ITERATIONS = 12
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=64,
    max_seq_len=32,
)


class Words:
    "The least that the recipe asks of a tokenizer."

    pad_id = PAD
    eos_id = EOS
    stop_tokens = (EOS,)


class Prompts(torch.utils.data.Dataset):
    "Prompts of random words."

    def __init__(self, tokenizer: Words, rows: int):
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(EOS + 1, VOCABULARY, (rows, PROMPT - 1), generator=generator)
        start = torch.full((rows, 1), BOS)
        self.rows = torch.cat([start, words], 1).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[i], "labels": self.rows[i]}


class WritesNoPadding(torch.nn.Linear):
    "The policy's last layer: a trained model does not write its padding token."

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        is_padding = torch.arange(VOCABULARY) == PAD
        return logits.masked_fill(is_padding, -1e9)


def policy_without_padding(**sizes: int) -> torch.nn.Module:
    "torchtune's model, with that layer."
    model = mistral(**sizes)
    model.output = WritesNoPadding(sizes["embed_dim"], VOCABULARY, bias=False)
    return model


class OtherSign(PPOLoss):
    "A bug: the advantages have the other sign."

    def forward(self, old, new, advantages: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().forward(old, new, -advantages, *rest, **named)


def recipe_class() -> Any:
    "The recipe's class; the folder `recipes` of the wheel refuses to be imported as a package."
    folder = Path(torchtune.__file__).parents[1] / "recipes"
    path = folder / "ppo_full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("ppo_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PPOFullFinetuneRecipeSingleDevice


def save_weights(folder: Path, score_scale: float) -> None:
    "Random weights of policy, and of value and reward model."
    folder.mkdir()
    torch.manual_seed(0)
    policy = mistral(**SIZES)
    torch.save(policy.state_dict(), folder / "policy.pt")
    for name, scale in (("reward", score_scale), ("value", 0.1)):
        model = mistral_classifier(num_classes=1, **SIZES)
        torch.nn.init.normal_(model.output.weight, std=scale)
        torch.save(model.state_dict(), folder / f"{name}.pt")


def checkpointer(folder: Path, name: str) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(folder / "weights"),
        "checkpoint_files": [f"{name}.pt"],
        "output_dir": str(folder / "saved" / name),
        "model_type": "MISTRAL" if name == "policy" else "REWARD",
    }


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    "The recipe's settings for a run of seconds."
    builders = "torchtune.models.mistral._component_builders"
    settings = {
        "output_dir": str(folder),
        "tokenizer": {"_component_": f"{THIS}.Words"},
        "dataset": {"_component_": f"{THIS}.Prompts", "rows": 32 * ITERATIONS},
        "policy_model": {"_component_": f"{THIS}.policy_without_padding", **SIZES},
        "reward_and_value_model": {
            "_component_": f"{builders}.mistral_classifier",
            "num_classes": 1,
            **SIZES,
        },
        "checkpointer": checkpointer(folder, "policy"),
        "ref_policy_checkpointer": checkpointer(folder, "policy"),
        "value_checkpointer": checkpointer(folder, "value"),
        "reward_checkpointer": checkpointer(folder, "reward"),
        "resume_from_checkpoint": False,
        "seed": 0,
        "shuffle": True,
        "device": "cpu",
        "dtype": "fp32",
        "batch_size": 32,
        "forward_batch_size": 32,
        "num_steps": 32 * ITERATIONS,
        "ppo_epochs": 2,
        "ppo_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "compile": False,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "optimizer_in_bwd": False,
        "enable_activation_checkpointing": False,
        "enable_kv_cache": False,
        "max_generated_tokens": LIMIT,
        "temperature": 1.0,
        "top_k": None,
        "min_response_length": 0,
        "penalise_no_eos": False,
        "reward_penalty": -3,
        "whiten_rewards": False,
        "gamma": 1,
        "lmbda": 0.95,
        "loss": {"_component_": "torchtune.rlhf.loss.PPOLoss", "epsilon": 0.2, "value_coeff": 0.1},
        "kl_coeff": 0.05,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder),
            "filename": "log.txt",
        },
        "log_every_n_steps": 1,
    }
    return settings | changes


def counted(trajectory: Any) -> dict[str, float]:
    "Our metrics of an iteration, row by row and token by token from its tensors."
    lengths = []
    kls = []
    ends = []
    for i, response in enumerate(trajectory.query_responses[:, PROMPT:].tolist()):
        length = LIMIT
        if EOS in response:
            length = response.index(EOS) + 1  # the end is a token that the policy writes
        kl = 0.0
        for t in range(length):
            kl += float(trajectory.logprobs[i, t]) - float(trajectory.ref_logprobs[i, t])
        lengths.append(length)
        kls.append(kl)
        ends.append(EOS in response)
    return {
        "reward_mean": float(trajectory.scores.double().mean()),
        "kl_to_reference": sum(kls) / len(kls),
        "response_length": sum(lengths) / len(lengths),
        "finished": sum(ends) / len(ends),
    }


def counting(recipe: Any) -> list[dict[str, float]]:
    "Let a recipe count each iteration when it logs it."
    rows: list[dict[str, float]] = []
    log_metrics = recipe.log_metrics

    def log_and_count(trajectory: Any, *rest: Any) -> None:
        rows.append(counted(trajectory))
        log_metrics(trajectory, *rest)

    recipe.log_metrics = log_and_count
    return rows


STDOUT = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
RUNS: dict[str, tuple[float, dict[str, Any]]] = {  # the scale of the scores, and settings
    "ppo_healthy": (0.2, {}),
    "ppo_healthy_one_update": (0.2, {"ppo_epochs": 1, "ppo_batch_size": 32}),
    "ppo_healthy_accumulated": (0.2, {"gradient_accumulation_steps": 4}),
    "ppo_healthy_console": (0.2, {"metric_logger": STDOUT}),
    "ppo_reward_always_the_same": (0.0, {}),
    "ppo_learning_rate_30_times": (
        0.2,
        {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-2}},
    ),
    "ppo_learning_rate_0": (0.2, {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.0}}),
    "ppo_advantage_sign": (0.2, {"loss": {"_component_": f"{THIS}.OtherSign"}}),
    "ppo_kl_sign": (0.2, {"kl_coeff": -0.5}),
    "ppo_padding_is_sampled": (
        0.2,
        {
            "ppo_epochs": 1,
            "ppo_batch_size": 32,
            "policy_model": {
                "_component_": "torchtune.models.mistral._component_builders.mistral",
                **SIZES,
            },
        },
    ),
    "ppo_never_ends": (0.2, {"stop_token_ids": [VOCABULARY + 1], "penalise_no_eos": True}),
}


def run(name: str, folder: Path) -> None:
    "Train, let torchtune log, and write what is counted beside it."
    scale, changes = RUNS[name]
    save_weights(folder / "weights", scale)
    settings = OmegaConf.create(settings_of(folder, **changes))
    recipe = recipe_class()(cfg=settings)
    recipe.setup(cfg=settings)
    rows = counting(recipe)
    recipe.save_checkpoint = lambda *_, **__: None
    recipe.train()
    recipe.cleanup()
    if name == "ppo_never_ends":
        return  # the recipe sees other ends than those that are counted here
    lines = ",\n ".join(json.dumps(row) for row in rows)
    (OUT / f"torchtune_{name}_counted.json").write_text(f"[\n {lines}\n]\n", "utf-8")


def console_of(name: str, folder: Path) -> str:
    "What a run prints, both streams as a terminal shows them: bars of progress among the lines."
    command = [sys.executable, "-W", "ignore", __file__, "--run", name, str(folder)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]))
        return
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as place:
            text = console_of(name, Path(place))
            if "metric_logger" not in RUNS[name][1]:
                text = (Path(place) / "log.txt").read_text("utf-8")
        (OUT / f"torchtune_{name}.log").write_text(text, "utf-8")
        print(name, len(text), flush=True)


if __name__ == "__main__":
    main()
