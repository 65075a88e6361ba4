"""Torch's own random numbers: the same seed gives the same draws.

Both torch and Python use the Mersenne Twister, so Python's generator gives torch's stream once it
has torch's state, which `twister` computes from the seed. The rest is how torch makes numbers of 32
random bits.
"""

import math
import random
from array import array
from bisect import bisect_left
from operator import index as as_index

from . import numbers
from .autograd import wants_gradient
from .creation import convert, finish, sizes
from .dtypes import INT, dtype, float32, float64, int64
from .refusal import refuse, refuse_keywords
from .shapes import Size
from .tensor import Tensor, make
from .tensor import device as device_class

DEFAULT_SEED = 67280421310721  # torch's, before manual_seed is called


def twister(seed: int) -> random.Random:
    "Python's Mersenne Twister in the state that torch's has after this seed (Matsumoto, 2002)."
    words = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        last = words[-1]
        words.append((1812433253 * (last ^ last >> 30) + i) & 0xFFFFFFFF)
    generator = random.Random()
    generator.setstate((3, (*words, 624), None))
    return generator


class Generator:
    "A stream of random numbers."

    def __init__(self, device: object = "cpu"):
        device_class(device)
        self.manual_seed(DEFAULT_SEED)

    def manual_seed(self, seed: int) -> "Generator":
        "Begin the stream of this seed."
        self.start = as_index(seed)
        self.twister = twister(self.start)
        self.waiting_normal: float | None = None  # normal numbers are made in pairs
        return self

    def initial_seed(self) -> int:
        return self.start

    @property
    def device(self) -> device_class:
        return device_class()

    def words(self, n: int) -> array:
        "The next n times 32 random bits."
        if n == 0:
            return array("I")
        return array("I", self.twister.getrandbits(32 * n).to_bytes(4 * n, "little"))

    def long_words(self, n: int) -> list[int]:
        "The next n times 64 random bits: two words, the upper one first."
        words = self.words(2 * n)
        return [high << 32 | low for high, low in zip(words[::2], words[1::2])]

    def uniform(self, n: int, kind: dtype) -> list[float]:
        "n numbers from 0 to below 1: 24 random bits in float32, 53 in float64."
        if kind is float32:
            return [(word & 0xFFFFFF) / 2**24 for word in self.words(n)]
        words = self.words(2 * n)
        return [
            ((high & 0x1FFFFF) << 32 | low) / 2**53 for high, low in zip(words[::2], words[1::2])
        ]

    def normal(self, n: int, kind: dtype) -> list[float]:
        "n normal numbers, by the method of Box and Muller."
        if n < 16:
            return [self.one_normal() for _ in range(n)]
        values = self.uniform(n, kind)
        for start in range(0, n - 15, 16):
            values[start : start + 16] = sixteen_normals(values[start : start + 16])
        if n % 16:  # the last sixteen are drawn again
            values[n - 16 :] = sixteen_normals(self.uniform(16, kind))
        return values

    def one_normal(self) -> float:
        "A normal number; its twin waits for the next call."
        if self.waiting_normal is not None:
            value = self.waiting_normal
            self.waiting_normal = None
            return value
        u, v = self.uniform(2, float64)
        radius = math.sqrt(-2.0 * math.log1p(-v))
        self.waiting_normal = radius * math.sin(2.0 * math.pi * u)
        return radius * math.cos(2.0 * math.pi * u)

    def exponential(self, n: int) -> list[float]:
        "n exponential numbers of mean 1."
        return [-math.log1p(-u) for u in self.uniform(n, float64)]

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"Generator.{name}")


def sixteen_normals(uniform: list) -> list:
    "Eight pairs of uniform numbers as eight pairs of normal ones."
    cosines = []
    sines = []
    for u, v in zip(uniform[:8], uniform[8:]):
        radius = math.sqrt(-2.0 * math.log(1.0 - u))
        angle = 2.0 * math.pi * v
        cosines.append(radius * math.cos(angle))
        sines.append(radius * math.sin(angle))
    return cosines + sines


default_generator = Generator()


def manual_seed(seed: int) -> Generator:
    "Begin the default stream anew."
    return default_generator.manual_seed(seed)


def drawn(function: str, kind: dtype | None) -> dtype:
    kind = kind or float32
    if kind not in (float32, float64):
        refuse(f"{function} of {kind}")
    return kind


def rand(*size, generator=None, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    "Uniform from 0 to below 1."
    kind = drawn("rand", dtype)
    shape = Size(as_index(n) for n in sizes(size, others))
    x = make((generator or default_generator).uniform(shape.numel(), kind), shape, kind)
    return finish("rand", x, requires_grad, device, others)


def randn(*size, generator=None, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    "Normal with mean 0 and variance 1."
    kind = drawn("randn", dtype)
    shape = Size(as_index(n) for n in sizes(size, others))
    values = (generator or default_generator).normal(shape.numel(), kind)
    x = make(kind.keep(values), shape, kind)
    return finish("randn", x, requires_grad, device, others)


def rand_like(input: Tensor, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    refuse_keywords("rand_like", others)
    return rand(
        *input.shape, dtype=dtype or input.dtype, device=device, requires_grad=requires_grad
    )


def randn_like(input: Tensor, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    refuse_keywords("randn_like", others)
    return randn(
        *input.shape, dtype=dtype or input.dtype, device=device, requires_grad=requires_grad
    )


def randint(
    *ends, generator=None, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    "Whole numbers from low to below high: randint(high, size) or randint(low, high, size)."
    for name in ("low", "high", "size"):
        if name in others:
            ends = (*ends, others.pop(name))
    low, high, size = (0, *ends) if len(ends) == 2 else ends
    kind = dtype or int64
    shape = Size(as_index(n) for n in size)
    span = high - low
    if span <= 0:
        raise RuntimeError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )
    stream = generator or default_generator
    n = shape.numel()
    words = stream.words(n) if span < 2**28 else stream.long_words(n)
    x = make(convert([low + word % span for word in words], kind), shape, kind)
    return finish("randint", x, requires_grad, device, others)


def randperm(
    n: int, *, generator=None, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    "0 … n − 1 in a random order (Fisher and Yates)."
    order = list(range(n))
    words = (generator or default_generator).words(max(n - 1, 0))
    for i, word in enumerate(words):
        other = i + word % (n - i)
        order[i], order[other] = order[other], order[i]
    kind = dtype or int64
    x = make(convert(order, kind), (n,), kind)
    return finish("randperm", x, requires_grad, device, others)


def bernoulli(input: Tensor, p: float | None = None, *, generator=None, **others) -> Tensor:
    "1 with the probability that stands there, else 0."
    refuse_keywords("bernoulli", others)
    if p is not None:
        refuse("bernoulli(p=…)")
    if wants_gradient(input):
        refuse("the gradient of bernoulli")
    kind = drawn("bernoulli", input.dtype if input.dtype.category != INT else None)
    chances = input.flat()
    if not all(0 <= x <= 1 for x in chances):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    draws = (generator or default_generator).uniform(len(chances), kind)
    return make([float(u < x) for u, x in zip(draws, chances)], input.shape, kind)


def multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *, generator=None, **others
) -> Tensor:
    "Places drawn with the weights that stand there, row by row."
    refuse_keywords("multinomial", others)
    drawn("multinomial", input.dtype)
    if input.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    width = input.shape[-1]
    if not replacement and num_samples > width:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    flat = input.flat()
    rows = [flat[i : i + width] for i in range(0, len(flat), width)]
    for row in rows:
        if not all(0 <= w < math.inf for w in row):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if not sum(row) > 0:
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    stream = generator or default_generator
    if replacement and num_samples > 1:
        places = [with_replacement(row, num_samples, stream, input.dtype) for row in rows]
    else:
        races = input.dtype.keep(stream.exponential(len(flat)))
        arrivals = input.dtype.keep(numbers.divide(flat, races))
        places = []
        for i in range(0, len(flat), width):
            row = arrivals[i : i + width]
            order = sorted(range(width), key=row.__getitem__, reverse=True)
            places.append(order[:num_samples])
    shape = (*input.shape[:-1], num_samples)
    return make([place for row in places for place in row], shape, int64)


def with_replacement(weights: list, n: int, stream: Generator, kind: dtype) -> list[int]:
    "Where uniform numbers fall among the cumulative sums of the weights."
    sums = []
    total = 0.0
    for w in weights:
        (total,) = kind.keep([total + w])
        sums.append(total)
    borders = kind.keep([s / total for s in sums])
    borders[-1] = 1.0
    return [bisect_left(borders, u) for u in stream.uniform(n, float64)]
