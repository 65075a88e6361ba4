"""Two distributions, Categorical and Binomial, and the KL divergence of the first."""

import math

from .creation import full_like, long
from .dtypes import finfo
from .elementwise import (
    add,
    clamp,
    eq,
    log,
    log1p,
    masked_fill,
    mul,
    neg,
    sub,
)
from .indexing import gather
from .randomness import multinomial
from .reductions import logsumexp, softmax, sum_
from .refusal import refuse, refuse_keywords
from .shapes import Size, broadcast_shapes
from .shaping import expand, reshape, squeeze, transpose, unsqueeze
from .tensor import Tensor, make


class Categorical:
    "One of several outcomes; by probabilities, or by logits, the last dimension."

    def __init__(self, probs: Tensor | None = None, logits: Tensor | None = None, **others):
        refuse_keywords("Categorical", others)
        if (probs is None) == (logits is None):
            raise ValueError("Either `probs` or `logits` must be specified, but not both.")
        given = logits if probs is None else probs
        if given.ndim < 1:
            raise ValueError("`probs` parameter must be at least one-dimensional.")
        if any(x != x for x in given.flat()):
            raise ValueError(
                f"Expected parameter of distribution Categorical() to be valid, but found invalid values:\n{given}"
            )
        if probs is not None:
            if any(x < 0 for x in probs.flat()):
                raise ValueError(
                    "Expected parameter probs of distribution Categorical() to satisfy the constraint Simplex()"
                )
            self.probs = probs / sum_(probs, -1, True)
            eps = finfo(probs.dtype).eps
            self.logits = log(clamp(self.probs, eps, 1 - eps))
        else:
            self.logits = sub(logits, logsumexp(logits, -1, True))
            self.probs = softmax(self.logits, -1)
        self.batch_shape = Size(given.shape[:-1])

    def sample(self, sample_shape: tuple = ()) -> Tensor:
        "Draw, in the shape sample_shape × batch."
        shape = Size(sample_shape)
        rows = reshape(self.probs, -1, self.probs.shape[-1]).detach()
        drawn = transpose(multinomial(rows, shape.numel(), True), 0, 1)
        return reshape(drawn, *shape, *self.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        "log π(value)."
        n = self.logits.shape[-1]
        if any(not 0 <= x < n or x != int(x) for x in value.flat()):
            raise ValueError(
                f"Expected value argument to be within the support of Categorical: a number from 0 to {n - 1}"
            )
        value = unsqueeze(long(value), -1)
        shape = broadcast_shapes(value.shape[:-1], self.logits.shape[:-1])
        logits = expand(self.logits, *shape, n)
        return squeeze(gather(logits, -1, expand(value, *shape, 1)), -1)

    def entropy(self) -> Tensor:
        "−Σ π·log π."
        logits = clamp(self.logits, min=finfo(self.logits.dtype).min)
        return neg(sum_(mul(logits, self.probs), -1))

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(f"Categorical.{name}")


class Binomial:
    "How often something of probability p happens in n tries."

    def __init__(self, total_count: float = 1, probs: Tensor | None = None, **others):
        refuse_keywords("Binomial", others)
        if probs is None:
            refuse("Binomial(logits=…)")
        self.probs = probs
        self.total_count = full_like(probs, float(total_count))
        eps = finfo(probs.dtype).eps
        p = clamp(probs, eps, 1 - eps)
        self.logits = sub(log(p), log1p(neg(p)))

    def log_prob(self, value: Tensor) -> Tensor:
        "log of n over k, times pᵏ(1 − p)ⁿ⁻ᵏ."
        n, logits = self.total_count, self.logits
        exponent = neg(logits.abs()).exp()
        most = logits.clamp(min=0)
        rest = add(mul(n, most), mul(n, log1p(exponent)))
        rest = sub(rest, lgamma(n + 1))
        return value * logits - lgamma(value + 1) - lgamma(n - value + 1) - rest

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(f"Binomial.{name}")


def lgamma(x: Tensor) -> Tensor:
    "log Γ(x), without a gradient."
    if x.requires_grad:
        refuse("the gradient of lgamma")
    return make(x.dtype.keep(list(map(math.lgamma, x.flat()))), x.shape, x.dtype)


def kl_divergence(p: Categorical, q: Categorical) -> Tensor:
    "Σ p·(log p − log q)."
    if not isinstance(p, Categorical) or not isinstance(q, Categorical):
        refuse(f"kl_divergence of {type(p).__name__} and {type(q).__name__}")
    parts = mul(p.probs, sub(p.logits, q.logits))
    parts = masked_fill(parts, expand(eq(q.probs, 0), *parts.shape), math.inf)
    parts = masked_fill(parts, expand(eq(p.probs, 0), *parts.shape), 0.0)
    return sum_(parts, -1)


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.distributions.{name}")


__all__ = ["Binomial", "Categorical", "kl_divergence"]
