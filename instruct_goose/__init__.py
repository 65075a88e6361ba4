"""Learn PPO and RLHF by running it, and go on using the library afterwards."""

__version__ = "0.1.0"
