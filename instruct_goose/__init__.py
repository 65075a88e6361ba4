"""Learn PPO and RLHF by running it, and go on using the library afterwards."""

import lazy_loader

__version__ = "0.2.0"


def install(extra: str) -> str:
    "How to install an optional part: from a clone. The index has an older project of this name."
    return f"pip install -e '.[{extra}]' in a clone of the repository"


# the public names stand in __init__.pyi; each is loaded when it is first asked for
load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

TRL = {"GRPO": "RLHFTrainer with RLHFConfig.preset('grpo')",
       "PPO": "RLHFTrainer with RLHFConfig()",
       "RLOO": "RLHFTrainer with RLHFConfig.preset('rloo')",
       "DPO": "train_dpo", "KTO": "train_kto", "SFT": "supervised.sft.train_lm",
       "Reward": "supervised.reward_model_training.train_reward_model"}


def __getattr__(name: str) -> object:
    "A public name. TRL's are answered with ours, in an ImportError (`from` shows its text)."
    ours = TRL.get(name.removesuffix("Trainer").removesuffix("Config"))
    if ours and name not in TRL:
        raise ImportError(f"instruct_goose has no {name}: use {ours}; "
                          "the guide Coming from TRL has each setting")
    return load(name)
