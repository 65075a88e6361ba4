"The public names. They are loaded when they are asked for (`X as X` is how a stub exports), so `instruct-goose --help` does not wait for torch."
__version__: str

from . import exercises as exercises
from .models.adapters import (
    merge_adapters as merge_adapters, with_lora as with_lora,
    without_adapters as without_adapters,
)
from .models.agent import Agent as Agent, create_reference_model as create_reference_model
from .data.load import (
    load_answers as load_answers, load_pairs as load_pairs, load_prompts as load_prompts,
    stream_answers as stream_answers, stream_pairs as stream_pairs,
    stream_prompts as stream_prompts,
)
from .models.loading import (
    load_adapters as load_adapters, load_model as load_model, load_tokenizer as load_tokenizer,
    save_merged as save_merged,
)
from .models.reward_model import (
    PairwiseLoss as PairwiseLoss, RewardModel as RewardModel, all_pairs_loss as all_pairs_loss,
    pairwise_loss as pairwise_loss,
)
from .models.reward_model import Classifier as Classifier
from .models.loading import load_smollm as load_smollm
from .models.tokens import PairDataset as PairDataset, PromptDataset as PromptDataset
from .objective.advantages import (
    discounted_returns as discounted_returns, gae as gae, group_advantages as group_advantages,
)
from .objective.gaussian import (
    gaussian_entropy as gaussian_entropy, gaussian_kl as gaussian_kl,
    gaussian_logprobs as gaussian_logprobs,
)
from .objective.group import (
    PRESET_SOURCES as PRESET_SOURCES, PRESETS as PRESETS, preset_table as preset_table,
)
from .objective.kl import (
    adaptive_beta as adaptive_beta, exact_kl as exact_kl, k1 as k1, k2 as k2, k3 as k3,
    kl_in_loss as kl_in_loss, kl_in_reward as kl_in_reward, log_ratio as log_ratio,
    sequence_kl as sequence_kl, token_kl as token_kl,
)
from .objective.logprobs import (
    entropy as entropy, logprobs_from_hidden as logprobs_from_hidden,
    token_logprobs as token_logprobs,
)
from .objective.masks import (
    aggregate as aggregate, group_token_counts as group_token_counts, last_index as last_index,
    masked_mean as masked_mean, masked_sum as masked_sum, masked_var as masked_var,
    response_mask as response_mask, whiten as whiten,
)
from .objective.policy_loss import (
    clip_active as clip_active, clip_fraction as clip_fraction,
    clipped_objective as clipped_objective, policy_loss as policy_loss,
    probability_ratio as probability_ratio, sampler_weights as sampler_weights,
)
from .objective.ppo import (
    PPOLoss as PPOLoss, ppo_loss as ppo_loss, update_meters as update_meters,
)
from .objective.preference import dpo_loss as dpo_loss, implicit_reward as implicit_reward
from .objective.value_loss import (
    explained_variance as explained_variance, value_loss as value_loss,
)
from .runs.checkpoints import (
    load_checkpoint as load_checkpoint, newest_checkpoint as newest_checkpoint,
    save_checkpoint as save_checkpoint,
)
from .models.teacher import Teacher as Teacher
from .supervised.dpo import train_dpo as train_dpo, train_kto as train_kto
from .rollouts.rollout import Rollout as Rollout
from .models.sampling import sample as sample
from .rollouts.evaluation import plot_metrics as plot_metrics
from .recipes.card import model_card as model_card, push_to_hub as push_to_hub
from .recipes.training import train_in as train_in
from .config import RLHFConfig as RLHFConfig
from .training.trainer import RLHFTrainer as RLHFTrainer
from .rollouts.multi_turn import TurnSampler as TurnSampler, chat_reply as chat_reply
from .rollouts.environments import (
    EnvironmentSampler as EnvironmentSampler, environment_reward as environment_reward,
)

__all__ = [
    "Agent", "Classifier", "EnvironmentSampler", "PPOLoss", "PRESETS", "PRESET_SOURCES", "PairDataset",
    "PairwiseLoss", "PromptDataset", "RLHFConfig", "RLHFTrainer", "RewardModel", "Rollout",
    "Teacher", "TurnSampler", "adaptive_beta", "aggregate", "all_pairs_loss", "chat_reply",
    "clip_active", "clip_fraction", "clipped_objective", "create_reference_model",
    "discounted_returns", "dpo_loss", "entropy", "environment_reward", "exact_kl", "exercises", "explained_variance", "gae",
    "gaussian_entropy", "gaussian_kl", "gaussian_logprobs", "group_advantages",
    "group_token_counts", "implicit_reward", "k1", "k2", "k3", "kl_in_loss", "kl_in_reward",
    "last_index", "load_adapters", "load_answers", "load_checkpoint", "load_model", "load_pairs", "load_prompts",
    "load_smollm", "load_tokenizer", "log_ratio", "logprobs_from_hidden", "masked_mean", "masked_sum", "masked_var",
    "merge_adapters", "model_card", "newest_checkpoint", "pairwise_loss", "plot_metrics", "policy_loss",
    "ppo_loss", "preset_table", "probability_ratio", "push_to_hub", "response_mask", "sample",
    "sampler_weights", "save_checkpoint", "save_merged", "sequence_kl", "stream_answers", "stream_pairs", "stream_prompts",
    "token_kl", "token_logprobs", "train_dpo", "train_in", "train_kto", "update_meters", "value_loss", "whiten",
    "with_lora", "without_adapters",
]  # fmt: skip

def install(extra: str) -> str: ...
