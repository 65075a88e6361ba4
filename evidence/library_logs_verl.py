"""Logs that verl's own functions write of a tiny loop on a CPU, for the tests of `doctor.libraries`.

verl's trainer needs GPUs, and its workers are not used here. verl's are: `DataProto`, the KL in the
reward (`apply_kl_penalty`), the advantages, `ppo_loss` and `value_loss`, the log-probabilities and
the entropy of logits, `Metric` and its averages over micro-batches and updates, `reduce_metrics`,
`compute_data_metrics` and those of time, and the loggers (`Tracking`: file and console), which
write every line. Ours are the model, the sampling, the reward, the optimizer's step, the order of
the calls, the names `grad_norm` and `lr` that verl's worker gives to these two numbers, and the
bugs. Beside a log stands what is counted here from the tensors of the same iterations, under our
names: a second way to the numbers that the doctor reads.

In an environment with verl 0.9.1 (`make launchers` makes one; its trainer's module also imports
torchdata, uvicorn, fastapi and opentelemetry-sdk): `python evidence/library_logs_verl.py`. It
writes `tests/doctor/library_logs/verl_*`.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.utils.tracking import Tracking
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

root = Path(__file__).parents[1]
OUT = root / "tests/doctor/library_logs"
PAD, BOS, EOS, W1 = 0, 1, 2, 3
VOCABULARY = 15
PROMPT = 3  # tokens
LIMIT = 6  # tokens of a response
PROMPTS = 8  # of an iteration
ITERATIONS = 8


class Settings(NamedTuple):
    "A run; of the last six, each other value is a bug."

    estimator: str = "grpo"  # verl's name of an advantage
    group_size: int = 4
    updates: int = 2  # of an iteration, each on its share of the rows
    lr: float = 1e-2
    kl_in_reward: float | None = None  # the coefficient
    kl_loss: float | None = None
    backend: str = "file"  # of verl's loggers
    reward: Callable[[list[int]], float] = lambda response: response.count(W1) / 3
    reward_nan_from: int = ITERATIONS  # an iteration
    end: int = EOS  # what ends a response
    other_reference: bool = False
    trained_copy: bool = False  # the optimizer has the weights of another model
    critic_frozen: bool = False


class Critic(torch.nn.Module):
    "A value for each token."

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT2Model(model_config())
        self.head = torch.nn.Linear(16, 1)

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        return self.head(self.body(*args, **named)[0])[..., 0]


def model_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def policy_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(model_config()).eval()


def logits_of(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    "Logits (B, S, V) of left-padded rows; nobody writes the padding token."
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits.masked_fill(torch.arange(VOCABULARY) == PAD, -1e9)


def prompts_of(iteration: int, group_size: int) -> torch.Tensor:
    "Left-padded prompts of one or two words, each as often as its group is large."
    generator = torch.Generator().manual_seed(iteration)
    prompts = torch.randint(W1 + 1, VOCABULARY, (PROMPTS, PROMPT), generator=generator)
    prompts[:, 0] = BOS
    prompts[::2, 0] = PAD
    prompts[::2, 1] = BOS
    return prompts.repeat_interleave(group_size, 0)


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: torch.Tensor, end: int) -> DataProto:
    "Responses that stop at their end token, as verl lays them out."
    ids = prompts
    mask = (prompts != PAD).long()
    writes = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(LIMIT):
        probs = logits_of(model, ids, mask)[:, -1].softmax(-1)
        token = torch.multinomial(probs, 1)[:, 0].where(writes, torch.tensor(PAD))
        ids = torch.cat([ids, token[:, None]], 1)
        mask = torch.cat([mask, writes[:, None].long()], 1)
        writes = writes & (token != end)
    tensors = {
        "prompts": prompts,
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": mask[:, PROMPT:],
    }
    uid = np.array([f"prompt {i}" for i in range(PROMPTS)], dtype=object)
    return DataProto.from_single_dict(tensors | {"uid": uid.repeat(len(prompts) // PROMPTS)})


def responses_of(batch: DataProto) -> Iterator[tuple[int, list[int]]]:
    "Each row and the tokens that its mask keeps."
    rows = zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    for i, (tokens, mask) in enumerate(rows):
        yield i, tokens[mask.bool()].tolist()


def token_logprobs(
    model: torch.nn.Module, batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S) each: of the next token, and the entropy
    "log π of the token after each one, and the entropy there, by verl's two functions."
    ids = batch["input_ids"]
    logits = logits_of(model, ids, batch["attention_mask"])
    logprobs = logprobs_from_logits(logits, ids.roll(-1, 1), inplace_backward=False)
    return logprobs, entropy_from_logits(logits)


def values_of(critic: Critic, batch: Any) -> torch.Tensor:
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return critic(batch["input_ids"], attention_mask=mask, position_ids=positions)


def of_responses(x: torch.Tensor) -> torch.Tensor:
    "The columns (B, LIMIT) that belong to the tokens of the responses."
    return x[:, PROMPT - 1 : -1]


def without_padding(x: torch.Tensor, batch: Any) -> torch.Tensor:
    "One vector of all real tokens, which verl's losses take."
    return x[batch["attention_mask"].bool()]


def configs(settings: Settings) -> tuple[ActorConfig, CriticConfig]:
    common: dict[str, Any] = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": 8, "rollout_n": 1}
    actor = ActorConfig(
        **common,
        use_kl_loss=settings.kl_loss is not None,
        kl_loss_coef=settings.kl_loss or 0.0,
    )
    return actor, CriticConfig(**common)


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], tuple[torch.Tensor, dict]],
    batch: DataProto,
    updates: int,
) -> dict[str, Any]:
    "Train on each share of the rows, in micro-batches of 8: verl's metrics, before their mean."
    metrics: dict[str, Any] = {}
    for share in batch.batch.chunk(updates):
        of_update: dict[str, Any] = {}
        for rows in share.split(8):
            data = rows.clone()
            tu.assign_non_tensor(
                data,
                dp_size=1,
                batch_num_tokens=share["response_mask"].sum().item(),
                global_batch_size=len(share),
            )
            loss, of_rows = loss_of(data)
            loss.backward()
            append_to_dict(of_update, of_rows)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():  # as verl's workers
            optimizer.step()
        optimizer.zero_grad()
        for name, value in of_update.items():
            if isinstance(value, Metric):
                of_update[name] = Metric.aggregate_dp([value])
        of_update["grad_norm"] = norm.item()
        append_to_dict(metrics, of_update)
    metrics["lr"] = [optimizer.param_groups[0]["lr"]]
    return metrics


def counted(batch: DataProto) -> dict[str, float]:
    "Our metrics of an iteration, row by row and token by token from its tensors."
    kls = []
    lengths = []
    ends = []
    scores = []
    charges = []
    for i, response in responses_of(batch):
        kl = 0.0
        for t in range(len(response)):
            if "ref_log_prob" in batch.batch:
                old = float(batch.batch["old_log_probs"][i, t])
                kl += old - float(batch.batch["ref_log_prob"][i, t])
        kls.append(kl)
        lengths.append(len(response))
        ends.append(len(response) < LIMIT)
        scores.append(float(batch.batch["token_level_scores"][i].sum()))
        charges.append(float(batch.batch["token_level_rewards"][i].sum()))
    ours = {
        "reward_mean": float(np.mean(scores)),
        "total_reward_mean": float(np.mean(charges)),
        "response_length": float(np.mean(lengths)),
        "finished": float(np.mean(ends)),
    }
    if "ref_log_prob" in batch.batch:
        ours["kl_to_reference"] = float(np.mean(kls))
    return ours


class Learner:
    "The models of a run, and one iteration of it in three parts."

    def __init__(self, settings: Settings):
        self.settings = settings
        self.policy = policy_model(0)
        self.reference = policy_model(1 if settings.other_reference else 0)
        self.trained = policy_model(0) if settings.trained_copy else self.policy
        self.critic = Critic()
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=settings.lr)
        critic_lr = 0.0 if settings.critic_frozen else settings.lr
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=critic_lr, weight_decay=0.0
        )
        self.actor_config, self.critic_config = configs(settings)
        self.has_critic = settings.estimator == "gae"
        self.has_reference = settings.kl_in_reward is not None or settings.kl_loss is not None

    def policy_loss(self, data: Any) -> tuple[torch.Tensor, dict]:
        logprobs, entropy = token_logprobs(self.policy, data)
        if self.settings.trained_copy:
            logprobs = logprobs.detach() + 0 * next(self.trained.parameters()).sum()
        outputs = {"log_probs": without_padding(logprobs, data)}
        outputs["entropy"] = without_padding(entropy.detach(), data)
        return ppo_loss(self.actor_config, outputs, data)

    def critic_loss(self, data: Any) -> tuple[torch.Tensor, dict]:
        outputs = {"values": without_padding(values_of(self.critic, data), data)}
        return value_loss(self.critic_config, outputs, data)

    @torch.no_grad()
    def sample(self, iteration: int) -> tuple[DataProto, dict[str, Any]]:
        "Responses with what the models say of their tokens, and the entropy as verl logs it."
        prompts = prompts_of(iteration, self.settings.group_size)
        batch = sample(self.policy, prompts, self.settings.end)
        tensors = batch.batch
        logprobs, entropy = token_logprobs(self.policy, tensors)
        tensors["old_log_probs"] = of_responses(logprobs)
        if self.has_reference:
            logprobs, _ = token_logprobs(self.reference, tensors)
            tensors["ref_log_prob"] = of_responses(logprobs)
        if self.has_critic:
            tensors["values"] = of_responses(values_of(self.critic, tensors))
        entropy = core_algos.agg_loss(
            of_responses(entropy), tensors["response_mask"], self.actor_config.loss_agg_mode
        )
        return batch, {"actor/entropy": entropy.item()}

    def score(self, batch: DataProto, iteration: int) -> tuple[DataProto, dict[str, Any]]:
        "Rewards at the last tokens, and verl's KL in the reward and its advantages."
        scores = torch.zeros(batch.batch["responses"].shape)
        for i, response in responses_of(batch):
            scores[i, len(response) - 1] = self.settings.reward(response)
        if iteration >= self.settings.reward_nan_from:
            scores[0, 0] = float("nan")
        batch.batch["token_level_scores"] = scores
        batch.batch["token_level_rewards"] = scores
        metrics: dict[str, Any] = {}
        if self.settings.kl_in_reward is not None:
            controller = core_algos.FixedKLController(self.settings.kl_in_reward)
            batch, metrics = apply_kl_penalty(batch, controller)
        return compute_advantage(batch, self.settings.estimator, lam=0.95, config={}), metrics

    def learn(self, batch: DataProto, times: dict[str, float]) -> dict[str, Any]:
        "Train value function and policy; verl's metrics of both."
        updates = self.settings.updates
        metrics: dict[str, Any] = {}
        if self.has_critic:
            with marked_timer("update_critic", times):
                of_critic = update(
                    self.critic, self.critic_optimizer, self.critic_loss, batch, updates
                )
            metrics.update(reduce_metrics(rename_dict(of_critic, "critic/")))
        with marked_timer("update_actor", times):
            of_actor = update(self.trained, self.optimizer, self.policy_loss, batch, updates)
        metrics.update(reduce_metrics(rename_dict(of_actor, "actor/")))
        return metrics


def run(settings: Settings, log: Tracking, has_times: bool) -> list[dict[str, float]]:
    "Train, let verl log each iteration, and return what is counted beside it."
    learner = Learner(settings)
    rows = []
    for iteration in range(ITERATIONS):
        times: dict[str, float] = {}
        with marked_timer("step", times):
            with marked_timer("gen", times):
                batch, metrics = learner.sample(iteration)
            with marked_timer("adv", times):
                batch, of_kl = learner.score(batch, iteration)
            metrics.update(of_kl)
            metrics.update(learner.learn(batch, times))
        step = iteration + 1
        metrics.update({"training/global_step": step, "training/epoch": 0})
        metrics.update(compute_data_metrics(batch, use_critic=learner.has_critic))
        if has_times:
            tokens = batch.batch["attention_mask"].sum(-1).tolist()
            batch.meta_info["global_token_num"] = tokens
            metrics.update(compute_timing_metrics(batch, times))
            metrics.update(compute_throughout_metrics(batch, times, n_gpus=1))
        log.log(data=metrics, step=step)
        rows.append(counted(batch))
    return rows


PPO = Settings("gae", group_size=4, kl_in_reward=0.05)
RUNS = {
    "grpo_healthy": Settings(),
    "grpo_healthy_one_update": Settings(updates=1),
    "grpo_healthy_kl_loss": Settings(kl_loss=0.05),
    "ppo_healthy": PPO,
    "ppo_healthy_console": PPO._replace(backend="console"),
    "grpo_reward_always_the_same": Settings(reward=lambda response: 0.5),
    "grpo_reward_nan": Settings(reward_nan_from=3),
    "grpo_learning_rate_30_times": Settings(lr=0.3, kl_loss=0.001),
    "grpo_learning_rate_0": Settings(lr=0.0, kl_loss=0.05),
    "grpo_no_gradient": Settings(trained_copy=True),
    "grpo_never_ends": Settings(end=VOCABULARY),
    "ppo_kl_sign": PPO._replace(kl_in_reward=-0.5),
    "ppo_other_reference": PPO._replace(other_reference=True),
    "ppo_values_frozen": PPO._replace(critic_frozen=True),
}


def logged(name: str) -> tuple[str, list[dict[str, float]]]:
    "A run's log, as verl's logger has written it, and what is counted beside it."
    settings = RUNS[name]
    torch.manual_seed(0)
    console = io.StringIO()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "log.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(path)
        log = Tracking("tests", name, settings.backend)
        with contextlib.redirect_stdout(console):
            rows = run(settings, log, has_times=settings.backend == "console")
        if settings.backend == "file":
            return path.read_text("utf-8"), rows
    return console.getvalue(), rows


def main() -> None:
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        text, rows = logged(name)
        (OUT / f"verl_{name}.log").write_text(text, "utf-8")
        lines = ",\n ".join(json.dumps(row) for row in rows)
        (OUT / f"verl_{name}_counted.json").write_text(f"[\n {lines}\n]\n", "utf-8")
        print(name, len(text), text.splitlines()[0][:200], rows[0], flush=True)


if __name__ == "__main__":
    main()
