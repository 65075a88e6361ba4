"""The part of torch.special that the lessons use."""

from .elementwise import entr as entr
from .refusal import refuse


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.special.{name}")
