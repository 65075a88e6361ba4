"""A tensor: a list of numbers, and how to read it as rows and columns.

Several tensors may share one list: `x[0]`, `x.T` and `x.view(-1)` are other ways to read x. The
list is never changed. A change in place, `x += 1`, puts a new list into the storage, where all that
share it see it, and counts one version up. So an operation may keep the lists that it has read.
"""

from math import prod

from .dtypes import bool_, dtype, float64, int64
from .shapes import Size, contiguous_strides, places


class Storage:
    "The numbers of one tensor and of all its views."

    __slots__ = ("has_views", "values", "version")

    def __init__(self, values: list):
        self.values = values
        self.version = 0  # how often it was changed in place
        self.has_views = False


class Tensor:
    "Numbers of one type in a shape. Made by `torch.tensor`, `torch.zeros` and their kind."

    __slots__ = (
        "__dict__",
        "__weakref__",
        "dtype",
        "grad",
        "index",
        "is_view",
        "node",
        "offset",
        "requires_grad",
        "shape",
        "storage",
        "strides",
        "whole",
    )

    def __new__(cls, *args, **kwargs):
        if args or kwargs:
            from .refusal import refuse

            refuse(f"{cls.__name__}(…)")
        return object.__new__(cls)

    def flat(self) -> list:
        "The numbers in the order of the tensor. Nobody may change this list."
        values = self.storage.values
        if self.whole:
            return values
        return list(map(values.__getitem__, self.places()))

    def places(self) -> list[int]:
        "Where each number lies in the storage."
        return places(self.shape, self.strides, self.offset)

    def write(self, values: list) -> None:
        "Change the numbers in place, for all that share them."
        storage = self.storage
        if not self.whole:
            changed = storage.values.copy()
            for place, x in zip(self.places(), values):
                changed[place] = x
            values = changed
        storage.values = values
        storage.version += 1

    # what a tensor is
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_leaf(self) -> bool:
        return self.node is None

    @property
    def grad_fn(self):
        return self.node

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def device(self) -> "device":
        return CPU

    @property
    def is_cuda(self) -> bool:
        return False

    @property
    def is_sparse(self) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)


class device:
    "Where numbers are kept: on this page always the CPU."

    def __init__(self, type: "str | device" = "cpu", index: int | None = None):
        self.type = str(type.type if isinstance(type, device) else type).partition(":")[0]
        self.index = index
        if self.type != "cpu":
            from .refusal import refuse

            refuse(f"device({self.type!r})")

    def __repr__(self) -> str:
        return "device(type='cpu')"

    def __str__(self) -> str:
        return "cpu"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and self.type == other.type

    def __hash__(self) -> int:
        return hash(self.type)


CPU = device()


def fill_slots(x: Tensor, storage: Storage, shape: Size, strides: tuple, offset: int, kind: dtype):
    "Set all that a new tensor has; it has no gradient yet."
    x.storage = storage
    x.shape = shape
    x.strides = strides
    x.offset = offset
    x.dtype = kind
    x.requires_grad = False
    x.grad = None
    x.node = None  # how it was made, if a gradient may be asked for
    x.index = 0  # which of the node's outputs it is
    x.is_view = False
    x.whole = True  # the storage holds these numbers, in this order, and no others


def make(values: list, shape: tuple, kind: dtype) -> Tensor:
    "A new tensor of numbers that are of the type `kind` already."
    x = object.__new__(Tensor)
    if shape.__class__ is not Size:
        shape = Size(shape)
    fill_slots(x, Storage(values), shape, contiguous_strides(shape), 0, kind)
    return x


def view_of(base: Tensor, shape: tuple, strides: tuple, offset: int) -> Tensor:
    "Another way to read the numbers of `base`, without a gradient."
    x = object.__new__(Tensor)
    shape = Size(shape)
    fill_slots(x, base.storage, shape, tuple(strides), offset, base.dtype)
    x.is_view = True
    base.storage.has_views = True
    x.whole = (
        offset == 0 and prod(shape) == len(base.storage.values) and is_contiguous(shape, x.strides)
    )
    return x


def is_contiguous(shape: tuple, strides: tuple) -> bool:
    "Do the numbers lie side by side, in order? The stride of a size 1 does not matter."
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def numbers_of(x: object) -> tuple[list, Size, dtype] | None:
    "Numbers, shape and type of a tensor or a Python number; None for anything else."
    if isinstance(x, Tensor):
        return x.flat(), x.shape, x.dtype
    if isinstance(x, bool):
        return [x], Size(), bool_
    if isinstance(x, int):
        return [x], Size(), int64
    if isinstance(x, float):
        return [x], Size(), float64
    return None
