"The public names. They are loaded when they are asked for, so `instruct-goose --help` does not wait for torch."
__version__: str

from . import exercises
from .models.adapters import merge_adapters, with_lora, without_adapters
from .models.agent import Agent, create_reference_model
from .data.load import load_pairs, load_prompts, stream_pairs, stream_prompts
from .models.loading import load_adapters, load_model, load_tokenizer, save_merged
from .models.reward_model import PairwiseLoss, RewardModel, all_pairs_loss, pairwise_loss
from .models.reward_model import Classifier
from .models.loading import load_smollm
from .models.tokens import PairDataset, PromptDataset
from .objective.advantages import discounted_returns, gae, group_advantages
from .objective.gaussian import gaussian_entropy, gaussian_kl, gaussian_logprobs
from .objective.group import PRESET_SOURCES, PRESETS, preset_table
from .objective.kl import (
    adaptive_beta,
    exact_kl,
    k1,
    k2,
    k3,
    kl_in_loss,
    kl_in_reward,
    log_ratio,
    sequence_kl,
    token_kl,
)
from .objective.logprobs import entropy, logprobs_from_hidden, token_logprobs
from .objective.masks import (
    aggregate,
    group_token_counts,
    last_index,
    masked_mean,
    masked_sum,
    masked_var,
    response_mask,
    whiten,
)
from .objective.policy_loss import (
    clip_active,
    clip_fraction,
    clipped_objective,
    policy_loss,
    probability_ratio,
    sampler_weights,
)
from .objective.ppo import PPOLoss, ppo_loss, update_meters
from .objective.preference import dpo_loss, implicit_reward
from .objective.value_loss import explained_variance, value_loss
from .runs.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from .variants.distillation import Teacher
from .supervised.dpo import train_dpo, train_kto
from .training.rollout import Rollout, sample
from .runs.evaluation import plot_metrics
from .runs.run_directory import model_card, push_to_hub
from .training.trainer import RLHFConfig, RLHFTrainer
from .variants.multi_turn import TurnSampler, chat_reply

__all__ = [
    "Agent", "Classifier", "PPOLoss", "PRESETS", "PRESET_SOURCES", "PairDataset",
    "PairwiseLoss", "PromptDataset", "RLHFConfig", "RLHFTrainer", "RewardModel", "Rollout",
    "Teacher", "TurnSampler", "adaptive_beta", "aggregate", "all_pairs_loss", "chat_reply",
    "clip_active", "clip_fraction", "clipped_objective", "create_reference_model",
    "discounted_returns", "dpo_loss", "entropy", "exact_kl", "exercises", "explained_variance", "gae",
    "gaussian_entropy", "gaussian_kl", "gaussian_logprobs", "group_advantages",
    "group_token_counts", "implicit_reward", "k1", "k2", "k3", "kl_in_loss", "kl_in_reward",
    "last_index", "load_adapters", "load_checkpoint", "load_model", "load_pairs", "load_prompts",
    "load_smollm", "load_tokenizer", "log_ratio", "logprobs_from_hidden", "masked_mean", "masked_sum", "masked_var",
    "merge_adapters", "model_card", "newest_checkpoint", "pairwise_loss", "plot_metrics", "policy_loss",
    "ppo_loss", "preset_table", "probability_ratio", "push_to_hub", "response_mask", "sample",
    "sampler_weights", "save_checkpoint", "save_merged", "sequence_kl", "stream_pairs", "stream_prompts",
    "token_kl", "token_logprobs", "train_dpo", "train_kto", "update_meters", "value_loss", "whiten",
    "with_lora", "without_adapters",
]  # fmt: skip

def install(extra: str) -> str: ...
