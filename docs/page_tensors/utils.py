"""Names of torch.utils, all of which are refused."""

from .refusal import refuse


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.utils.{name}")
