"""Modules: an object with a function `forward`, called like a function."""

from ..tensor import Tensor
from . import functional as functional


class Module:
    "Something that computes: call it, and its `forward` is called."

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def parameters(self) -> list[Tensor]:
        "Tensors that are asked for gradients, its own and those of modules in it."
        found = []
        for value in vars(self).values():
            if isinstance(value, Module):
                found += value.parameters()
            elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                found.append(value)
        return found

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    from ..refusal import refuse

    refuse(f"torch.nn.{name}")
