"""New tensors: from numbers, of one number, of numbers in a row; and conversions."""

import math
from collections.abc import Sequence
from operator import index as as_index

from . import dtypes
from .autograd import Mode, adopt, record, wants_gradient
from .dtypes import FLOAT, bool_, cast, dtype, dtype_of_number, float32, int64, promote_types
from .refusal import refuse, refuse_keywords
from .shapes import Size
from .tensor import Tensor, make, numbers_of, view_of
from .tensor import device as device_class


def finish(function: str, x: Tensor, requires_grad: bool, device: object, others: dict) -> Tensor:
    "What all functions that make a tensor have in common."
    refuse_keywords(function, others)
    if device is not None:
        device_class(device)
    if requires_grad:
        requires_grad_(x)
    return x


def requires_grad_(x: Tensor, requires_grad: bool = True) -> Tensor:
    "Ask for gradients of this tensor, in place."
    if requires_grad and x.dtype.category != FLOAT:
        raise RuntimeError("only Tensors of floating point dtype can require gradients")
    if not requires_grad and x.node is not None:
        raise RuntimeError(
            "you can only change requires_grad flags of leaf variables. If you want to use a "
            "computed variable in a subgraph that doesn't require differentiation use var_no_grad "
            "= var.detach()."
        )
    x.requires_grad = requires_grad
    return x


# --- from numbers -----------------------------------------------------------------------------
def read(data: object) -> tuple[list, tuple, dtype | None]:
    "Numbers, shape and type of a nest of lists, numbers and tensors."
    if isinstance(data, Tensor):
        return data.flat(), data.shape, data.dtype
    kind = dtype_of_number(data)
    if kind is not None:
        return [data], (), kind
    if isinstance(data, str) or not hasattr(data, "__len__"):
        raise TypeError(f"new(): invalid data type '{type(data).__name__}'")
    return read_rows(data) if len(data) else ([], (0,), None)


def read_rows(data: Sequence) -> tuple[list, tuple, dtype | None]:
    "The same of a list whose items have one shape."
    values: list = []
    first = None
    found = None
    for i, item in enumerate(data):
        numbers, shape, kind = read(item)
        if first is None:
            first = shape
        elif shape != first:
            if not shape or not first:
                raise ValueError(f"only one element tensors can be converted, at place {i}")
            raise ValueError(f"expected sequence of length {first[0]} at dim 1 (got {shape[0]})")
        if kind is not None and kind is not found:
            found = kind if found is None else promote_types(found, kind)
        values.extend(numbers)
    return values, (len(data), *first), found


def tensor(
    data: object,
    *,
    dtype: dtype | None = None,
    device: object = None,
    requires_grad: bool = False,
    **others,
) -> Tensor:
    "A new tensor of numbers in nested lists."
    values, shape, found = read(data)
    kind = dtype or found or float32
    x = make(convert(values, kind), shape, kind)
    return finish("tensor", x, requires_grad, device, others)


def convert(values: list, kind: dtype) -> list:
    "Numbers of any Python type in one type of tensor."
    if kind.category == FLOAT:
        return kind.keep(list(map(float, values)))
    if kind is bool_:
        return list(map(bool, values))
    whole = [
        x if x.__class__ is int else (dtypes.to_int(x) if isinstance(x, float) else int(x))
        for x in values
    ]
    return kind.keep(whole)


def as_tensor(data: object, dtype: dtype | None = None, device: object = None, **others) -> Tensor:
    "The tensor itself, if it is one of this type; else a new one."
    refuse_keywords("as_tensor", others)
    if device is not None:
        device_class(device)
    if isinstance(data, Tensor):
        return data if dtype is None else to_type(data, dtype)
    return tensor(data, dtype=dtype)


# --- of one number ----------------------------------------------------------------------------
def filled(
    function: str,
    shape: Sequence,
    value: float,
    dtype: dtype | None,
    requires_grad: bool,
    device: object,
    others: dict,
) -> Tensor:
    kind = dtype or float32
    size = Size(as_index(n) for n in shape)
    if any(n < 0 for n in size):
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(size)}: {list(size)}"
        )
    x = make(convert([value], kind) * size.numel(), size, kind)
    return finish(function, x, requires_grad, device, others)


def sizes(size: tuple, others: dict) -> Sequence:
    "*size, or the keyword size."
    if "size" in others:
        size = (others.pop("size"),)
    if len(size) == 1 and isinstance(size[0], tuple | list):
        return size[0]
    return size


def zeros(*size, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    return filled("zeros", sizes(size, others), 0, dtype, requires_grad, device, others)


def ones(*size, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    return filled("ones", sizes(size, others), 1, dtype, requires_grad, device, others)


def empty(*size, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    "Zeros: this page does not show what lay in memory before."
    return filled("empty", sizes(size, others), 0, dtype, requires_grad, device, others)


def full(size, fill_value, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    if isinstance(fill_value, Tensor):
        if fill_value.requires_grad:
            refuse("full with a value that has a gradient")
        dtype = dtype or fill_value.dtype
        (fill_value,) = fill_value.flat()
    kind = dtype or dtype_of_number(fill_value)
    shape = (size,) if isinstance(size, int) else size
    return filled("full", shape, fill_value, kind, requires_grad, device, others)


def like(function: str, input: Tensor, value, dtype, device, requires_grad, others) -> Tensor:
    others.pop("memory_format", None)
    return filled(function, input.shape, value, dtype or input.dtype, requires_grad, device, others)


def zeros_like(input, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    return like("zeros_like", input, 0, dtype, device, requires_grad, others)


def ones_like(input, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    return like("ones_like", input, 1, dtype, device, requires_grad, others)


def empty_like(input, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    return like("empty_like", input, 0, dtype, device, requires_grad, others)


def full_like(
    input, fill_value, *, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    if isinstance(fill_value, Tensor):
        refuse("full_like with a tensor as value")
    return like("full_like", input, fill_value, dtype, device, requires_grad, others)


def new_zeros(
    input: Tensor, *size, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    kind = dtype or input.dtype
    return filled("new_zeros", sizes(size, others), 0, kind, requires_grad, device, others)


def new_ones(
    input: Tensor, *size, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    kind = dtype or input.dtype
    return filled("new_ones", sizes(size, others), 1, kind, requires_grad, device, others)


def new_full(
    input: Tensor, size, fill_value, *, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    kind = dtype or input.dtype
    return filled("new_full", size, fill_value, kind, requires_grad, device, others)


def new_tensor(
    input: Tensor, data, *, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    x = tensor(data, dtype=dtype or input.dtype)
    return finish("new_tensor", x, requires_grad, device, others)


# --- numbers in a row -------------------------------------------------------------------------
def arange(*ends, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    "start, start + step, … below end."
    for name in ("start", "end", "step"):
        if name in others:
            ends = (*ends, others.pop(name))
    ends = tuple(x.item() if isinstance(x, Tensor) else x for x in ends)
    start, end, step = {1: (0, *ends, 1), 2: (*ends, 1), 3: ends}[len(ends)]
    is_whole = all(isinstance(x, int) for x in ends)
    kind = dtype or (int64 if is_whole else float32)
    if kind.category != FLOAT:
        start, end, step = int(start), int(end), int(step)
        is_whole = True
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    n = max(math.ceil((end - start) / step), 0) if not is_whole else len(range(start, end, step))
    x = make(convert([start + i * step for i in range(n)], kind), (n,), kind)
    return finish("arange", x, requires_grad, device, others)


def evenly(start: float, end: float, steps: int, kind: dtype) -> list:
    "Numbers at equal distances; the second half is counted from the end, as torch does."
    from fractions import Fraction  # few need it, and a page begins sooner without it

    if steps == 1:
        return kind.keep([float(start)])
    (start, end) = kind.keep([float(start), float(end)])
    (step,) = kind.keep([(end - start) / (steps - 1)])
    half = steps // 2
    values = []
    for i in range(steps):
        first, times = (start, i) if i < half else (end, i + 1 - steps)
        values.append(float(Fraction(first) + Fraction(step) * times))  # rounded once
    return kind.keep(values)


def linspace(
    start, end, steps, *, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    "`steps` numbers at equal distances from start to end."
    kind = dtype or float32
    if kind.category != FLOAT or isinstance(start, Tensor) or isinstance(end, Tensor):
        refuse(f"linspace of {kind}")
    x = make(evenly(start, end, steps, kind), (steps,), kind)
    return finish("linspace", x, requires_grad, device, others)


def logspace(
    start, end, steps, base=10.0, *, dtype=None, device=None, requires_grad=False, **others
) -> Tensor:
    "Powers of the base whose exponents lie at equal distances."
    kind = dtype or float32
    if (
        kind not in (float32, dtypes.float64)
        or isinstance(start, Tensor)
        or isinstance(end, Tensor)
    ):
        refuse(f"logspace of {kind}")
    if base <= 0:
        refuse(f"logspace(base={base})")
    values = [float(base) ** e for e in evenly(start, end, steps, kind)]
    x = make(kind.keep(values), (steps,), kind)
    return finish("logspace", x, requires_grad, device, others)


def eye(n, m=None, *, dtype=None, device=None, requires_grad=False, **others) -> Tensor:
    "1 on the diagonal, 0 beside it."
    m = n if m is None else m
    kind = dtype or float32
    values = [int(i == j) for i in range(n) for j in range(m)]
    x = make(convert(values, kind), (n, m), kind)
    return finish("eye", x, requires_grad, device, others)


def tril(input: Tensor, diagonal: int = 0, **others) -> Tensor:
    "0 above the diagonal."
    from .elementwise import where

    refuse_keywords("tril", others)
    return where(triangle(input, lambda i, j: j <= i + diagonal), input, zeros_like(input))


def triu(input: Tensor, diagonal: int = 0, **others) -> Tensor:
    "0 below the diagonal."
    from .elementwise import where

    refuse_keywords("triu", others)
    return where(triangle(input, lambda i, j: j >= i + diagonal), input, zeros_like(input))


def triangle(input: Tensor, holds) -> Tensor:
    if input.ndim != 2:
        refuse(f"a triangle of {input.ndim} dimensions")
    if wants_gradient(input):
        refuse("the gradient of a triangle")
    rows, columns = input.shape
    return make([holds(i, j) for i in range(rows) for j in range(columns)], input.shape, bool_)


# --- the same numbers otherwise ---------------------------------------------------------------
def to_type(input: Tensor, kind: dtype) -> Tensor:
    "The numbers in another type; the tensor itself, if it has it."
    if input.dtype is kind:
        return input
    out = make(cast(input.flat(), input.dtype, kind), input.shape, kind)
    if kind.category == FLOAT and wants_gradient(input):
        record(out, "ToCopy", (input,), lambda g: (g,))
    return out


def to(input: Tensor, *targets, dtype=None, device=None, copy=False, **others) -> Tensor:
    "In another type, or that of another tensor. There is one device on this page."
    others.pop("non_blocking", None)
    if "other" in others:
        targets = (*targets, others.pop("other"))
    refuse_keywords("to", others)
    kind = dtype or input.dtype
    for target in targets:
        if isinstance(target, dtypes.dtype):
            kind = target
        elif isinstance(target, Tensor):
            kind = target.dtype
        elif isinstance(target, str | device_class):
            device_class(target)
        else:
            refuse(f"to({target!r})")
    if device is not None:
        device_class(device)
    if copy and kind is input.dtype:
        return clone(input)
    return to_type(input, kind)


def double(input: Tensor) -> Tensor:
    return to_type(input, dtypes.float64)


def float_(input: Tensor) -> Tensor:
    return to_type(input, float32)


def half(input: Tensor) -> Tensor:
    return to_type(input, dtypes.float16)


def bfloat16(input: Tensor) -> Tensor:
    return to_type(input, dtypes.bfloat16)


def long(input: Tensor) -> Tensor:
    return to_type(input, int64)


def int_(input: Tensor) -> Tensor:
    return to_type(input, dtypes.int32)


def bool_of(input: Tensor) -> Tensor:
    return to_type(input, bool_)


def cpu(input: Tensor) -> Tensor:
    return input


def detach(input: Tensor) -> Tensor:
    "The same numbers, shared, without a gradient."
    had_views = input.storage.has_views
    out = view_of(input, input.shape, input.strides, input.offset)
    input.storage.has_views = had_views
    out.is_view = False
    return out


def clone(input: Tensor, **others) -> Tensor:
    "A copy, with a gradient."
    others.pop("memory_format", None)
    refuse_keywords("clone", others)
    out = make(input.flat(), input.shape, input.dtype)
    if wants_gradient(input):
        record(out, "Clone", (input,), lambda g: (g,))
    return out


def contiguous(input: Tensor, **others) -> Tensor:
    from .tensor import is_contiguous

    refuse_keywords("contiguous", others)
    return input if is_contiguous(input.shape, input.strides) else clone(input)


def copy_(input: Tensor, src: object, non_blocking: bool = False) -> Tensor:
    "Write the numbers of `src`, in place."
    from .indexing import put

    put(input, ..., src)
    return input


def fill_(input: Tensor, value: object) -> Tensor:
    "Write one number everywhere, in place."
    if isinstance(value, Tensor) and value.requires_grad:
        refuse("fill_ with a value that has a gradient")
    numbers, _, kind = numbers_of(value)
    if Mode.enabled and input.requires_grad:
        if input.node is None:
            adopt(input, input)
        refuse("fill_ of a tensor with a gradient")
    input.write(cast(numbers, kind, input.dtype) * input.shape.numel())
    return input


def zero_(input: Tensor) -> Tensor:
    return fill_(input, 0)


# --- as Python's numbers ----------------------------------------------------------------------
def item(input: Tensor):
    "The one number of a tensor."
    values = input.flat()
    if len(values) != 1:
        raise RuntimeError(f"a Tensor with {len(values)} elements cannot be converted to Scalar")
    return values[0]


def tolist(input: Tensor):
    "Nested lists of numbers."
    values = list(input.flat())
    if input.ndim == 0:
        return values[0]
    for size in reversed(input.shape[1:]):
        values = [values[i : i + size] for i in range(0, len(values), size)] if size else values
    if not values and len(input.shape) > 1:
        return empty_nest(input.shape)
    return values


def empty_nest(shape: Sequence) -> list:
    return (
        [empty_nest(shape[1:]) for _ in range(shape[0])]
        if len(shape) > 1
        else []
        if not shape[0]
        else [None]
    )
