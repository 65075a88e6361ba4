"""Where the numbers of a tensor lie: sizes, strides, broadcasting, and lines along a dimension.

A tensor of shape (2, 3) keeps six numbers in a list. Its strides, (3, 1), say how far to walk in
the list for a step along each dimension. A view is the same list with other sizes and strides.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from operator import index as as_index

from .numbers import total


class Size(tuple):
    "The shape of a tensor: a tuple that prints as torch's does."

    __slots__ = ()

    def numel(self) -> int:
        return prod(self)

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"

    __str__ = __repr__

    def __getitem__(self, at):
        found = tuple.__getitem__(self, at)
        return Size(found) if isinstance(at, slice) else found

    def __add__(self, other):
        return Size(tuple(self) + tuple(other))


def as_size(sizes: object) -> Size:
    "Read a shape from one number, a sequence, or what `*sizes` has caught."
    if isinstance(sizes, int):
        return Size((sizes,))
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return Size(as_index(n) for n in sizes)


@lru_cache(4096)
def contiguous_strides(shape: tuple) -> tuple:
    "Strides of a tensor whose numbers lie side by side, the last dimension fastest."
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def one_dim(dim: int, ndim: int) -> int:
    "A dimension counted from the front; −1 is the last."
    dim = as_index(dim)
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], "
            f"but got {dim})"
        )
    return dim % bound


def all_dims(dim: object, ndim: int) -> tuple:
    "Dimensions counted from the front; None and () are all of them."
    if dim is None:
        return tuple(range(ndim))
    if ndim == 0:
        for one in dim if isinstance(dim, tuple | list) else (dim,):
            one_dim(one, 0)
        return ()
    if isinstance(dim, tuple | list):
        dims = tuple(sorted(one_dim(d, ndim) for d in dim))
        for first, second in zip(dims, dims[1:]):
            if first == second:
                raise RuntimeError(f"dim {first} appears multiple times in the list of dims")
        return dims or tuple(range(ndim))
    return (one_dim(dim, ndim),)


# --- broadcasting -----------------------------------------------------------------------------
@lru_cache(4096)
def broadcast_two(a: tuple, b: tuple) -> Size:
    "The common shape of two: sizes agree from the last dimension on, or one of them is 1."
    n = max(len(a), len(b))
    left = (1,) * (n - len(a)) + tuple(a)
    right = (1,) * (n - len(b)) + tuple(b)
    sizes = []
    for dim, (x, y) in enumerate(zip(left, right)):
        if x != y and x != 1 and y != 1:
            raise RuntimeError(
                f"The size of tensor a ({x}) must match the size of tensor b ({y}) at "
                f"non-singleton dimension {dim}"
            )
        sizes.append(y if x == 1 else x)
    return Size(sizes)


def broadcast_shapes(*shapes: tuple) -> Size:
    "The common shape of any number of shapes."
    common = Size()
    for shape in shapes:
        common = broadcast_two(common, as_size(shape) if isinstance(shape, int) else Size(shape))
    return common


def expanded_strides(shape: tuple, strides: tuple, target: tuple) -> tuple:
    "Strides that repeat a tensor up to `target`: a repeated dimension has stride 0."
    new = len(target) - len(shape)
    kept = [0 if size == 1 else stride for size, stride in zip(shape, strides)]
    return (0,) * new + tuple(kept)


# --- places in the list -----------------------------------------------------------------------
def walk(shape: tuple, strides: tuple, offset: int) -> list[int]:
    "The place of each number in the list, in the order of the tensor."
    places = [offset]
    for size, stride in zip(shape, strides):
        if stride:
            steps = range(0, size * stride, stride)
        else:
            steps = [0] * size
        places = [start + step for start in places for step in steps]
    return places


remembered_walk = lru_cache(4096)(walk)


def places(shape: tuple, strides: tuple, offset: int) -> list[int]:
    "As `walk`; those of small tensors are remembered."
    if prod(shape) > 2048:
        return walk(shape, strides, offset)
    return remembered_walk(shape, strides, offset)


def broadcast(values: list, shape: tuple, target: tuple) -> list:
    "Repeat numbers of one shape up to another."
    if shape == target:
        return values
    if len(values) == 1:
        return values * prod(target)
    where = places(target, expanded_strides(shape, contiguous_strides(shape), target), 0)
    return list(map(values.__getitem__, where))


def sum_to(values: list, shape: tuple, target: tuple) -> list:
    "Add up what `broadcast` repeats: the way back of a gradient."
    if shape == target:
        return values
    n = prod(target)
    if n == 1:
        return [total(values)]
    totals = [0.0] * n
    where = places(shape, expanded_strides(target, contiguous_strides(target), shape), 0)
    for place, x in zip(where, values):
        totals[place] += x
    return totals


# --- lines along dimensions -------------------------------------------------------------------
class Lines:
    "The numbers of a tensor as one list per line along the chosen dimensions."

    def __init__(self, shape: tuple, dims: tuple):
        others = [d for d in range(len(shape)) if d not in dims]
        self.length = prod(shape[d] for d in dims)
        self.count = prod(shape[d] for d in others)
        self.kept_shape = Size(1 if d in dims else n for d, n in enumerate(shape))
        self.short_shape = Size(shape[d] for d in others)
        order = (*others, *dims)
        self.order = None  # lines lie one after the other already
        if order != tuple(range(len(shape))):
            strides = contiguous_strides(shape)
            sizes = tuple(shape[d] for d in order)
            self.order = walk(sizes, tuple(strides[d] for d in order), 0)

    def shape(self, keepdim: bool) -> Size:
        "The shape of one number per line."
        return self.kept_shape if keepdim else self.short_shape

    def split(self, flat: list) -> list[list]:
        "Cut a tensor's numbers into lines."
        if self.order is not None:
            flat = list(map(flat.__getitem__, self.order))
        if self.count == 1:
            return [flat]
        n = self.length
        return [flat[i * n : i * n + n] for i in range(self.count)]

    def join(self, lines: Sequence[Sequence]) -> list:
        "Put lines back to where `split` took them from."
        in_order = list(chain.from_iterable(lines))
        if self.order is None:
            return in_order
        flat = [0] * len(in_order)
        for place, x in zip(self.order, in_order):
            flat[place] = x
        return flat

    def spread(self, numbers: list) -> list:
        "Repeat one number per line along its line."
        return self.join([[x] * self.length for x in numbers])


remembered_lines = lru_cache(1024)(Lines)


def lines_along(shape: tuple, dims: tuple) -> Lines:
    "Lines of a shape; those of small shapes are remembered."
    if prod(shape) > 2048:
        return Lines(shape, dims)
    return remembered_lines(shape, dims)
