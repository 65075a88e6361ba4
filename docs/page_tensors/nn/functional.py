"""The part of torch.nn.functional that the lessons use."""

from collections.abc import Sequence

from ..autograd import record, wants_gradient
from ..dtypes import cast, int64
from ..elementwise import clamp, div, logsigmoid, mul, neg, relu, sigmoid, softplus, tanh
from ..indexing import gather, one_hot
from ..linear import linear
from ..reductions import log_softmax, mean, norm, softmax, sum_
from ..refusal import refuse, refuse_keywords
from ..shapes import broadcast_shapes, contiguous_strides, places
from ..shaping import expand, squeeze, unsqueeze
from ..tensor import Tensor, make, numbers_of


def pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None, **others
) -> Tensor:
    "Numbers around a tensor: pad = (left, right) of the last dimension, then of the one before."
    refuse_keywords("pad", others)
    if mode != "constant":
        refuse(f"pad(mode={mode!r})")
    if len(pad) % 2 or len(pad) // 2 > input.ndim:
        raise RuntimeError(
            "Padding length must be divisible by 2 and at most twice the number of dimensions"
        )
    if any(n < 0 for n in pad):
        refuse("pad by less than 0")
    shape = list(input.shape)
    starts = [0] * len(shape)
    for i in range(len(pad) // 2):
        starts[-1 - i] = pad[2 * i]
        shape[-1 - i] += pad[2 * i] + pad[2 * i + 1]
    strides = contiguous_strides(tuple(shape))
    offset = sum(start * stride for start, stride in zip(starts, strides))
    where = places(input.shape, strides, offset)
    fill = 0 if value is None else value
    (fill,) = cast([fill], numbers_of(fill)[2], input.dtype)
    n = 1
    for size in shape:
        n *= size
    values = [fill] * n
    for place, x in zip(where, input.flat()):
        values[place] = x
    out = make(values, shape, input.dtype)
    if wants_gradient(input):
        record(out, "ConstantPadNd", (input,), lambda g: ([g[place] for place in where],))
    return out


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    **others,
) -> Tensor:
    "−log softmax(input) of the class that `target` names; classes lie along dimension 1."
    refuse_keywords("cross_entropy", others)
    if weight is not None:
        refuse("cross_entropy(weight=…)")
    if target.dtype is not int64:
        refuse("cross_entropy with probabilities as target")
    if target.shape.numel() == 0:
        refuse("cross_entropy of nothing")
    if any(not 0 <= c for c in target.flat()):
        refuse("cross_entropy with classes below 0")
    classes = 0 if input.ndim == 1 else 1
    logs = log_softmax(input, classes)
    picked = squeeze(gather(logs, classes, unsqueeze(target, classes)), classes)
    losses = neg(picked)
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return mean(losses) if reduction == "mean" else sum_(losses)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8, **others) -> Tensor:
    "x₁·x₂ / (|x₁|·|x₂|)."
    refuse_keywords("cosine_similarity", others)
    shape = broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = expand(x1, *shape), expand(x2, *shape)
    product = sum_(mul(x1, x2), dim)
    return div(product, mul(clamp(norm(x1, 2, dim), min=eps), clamp(norm(x2, 2, dim), min=eps)))


__all__ = [
    "cosine_similarity",
    "cross_entropy",
    "linear",
    "log_softmax",
    "logsigmoid",
    "one_hot",
    "pad",
    "relu",
    "sigmoid",
    "softmax",
    "softplus",
    "tanh",
]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.nn.functional.{name}")
