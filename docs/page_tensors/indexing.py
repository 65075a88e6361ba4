"""x[…]: numbers, slices, None and … make views; tensors and lists of places make copies.

Reading is `get`, writing `put`. `Reading` gives every index the dimension it belongs to: numbers,
slices and None make a view, tensors pick from what is left.
"""

import math
from collections.abc import Sequence
from itertools import chain
from operator import index as as_index

from .autograd import Mode, adopt, record, wants_gradient
from .dtypes import INT, bool_, cast, int64
from .refusal import refuse, refuse_keywords
from .shapes import Size, broadcast, broadcast_shapes, contiguous_strides, one_dim, places, sum_to
from .shaping import picked, put_back
from .tensor import Tensor, make, numbers_of, view_of


# --- views ------------------------------------------------------------------------------------
def sub_view(
    input: Tensor, name: str, shape: Sequence, strides: Sequence, start: int, own: Sequence
) -> Tensor:
    """A view that begins `start` numbers later and walks with `strides`.

    `own`: the same strides and start for an input whose numbers lie side by side, for the gradient.
    """
    out = view_of(input, shape, strides, input.offset + start)
    if wants_gradient(input):
        own_strides, own_start = own
        n = input.shape.numel()

        def pull(g):
            return (put_back(g, places(tuple(shape), tuple(own_strides), own_start), n),)

        record(out, name, (input,), pull)
    return out


def select(input: Tensor, dim: int, index: int, name: str = "Select") -> Tensor:
    "One slice along a dimension, without it."
    dim = one_dim(dim, input.ndim)
    i = in_range(as_index(index), input.shape[dim], dim)
    shape = [*input.shape[:dim], *input.shape[dim + 1 :]]
    strides = [*input.strides[:dim], *input.strides[dim + 1 :]]
    flat = contiguous_strides(input.shape)
    own = [*flat[:dim], *flat[dim + 1 :]], i * flat[dim]
    return sub_view(input, name, shape, strides, i * input.strides[dim], own)


def narrow(input: Tensor, dim: int, start: int, length: int, name: str = "Slice") -> Tensor:
    "Slices from `start` on, so many of them."
    dim = one_dim(dim, input.ndim)
    shape = [*input.shape[:dim], length, *input.shape[dim + 1 :]]
    flat = contiguous_strides(input.shape)
    own = flat, start * flat[dim]
    return sub_view(input, name, shape, input.strides, start * input.strides[dim], own)


def in_range(i: int, size: int, dim: int) -> int:
    if not -size <= i < size:
        raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
    return i % size


# --- what stands in the brackets --------------------------------------------------------------
def as_index_tensor(x: object) -> Tensor:
    "Places from a list, a range or a tensor."
    if isinstance(x, Tensor):
        if x.dtype is not bool_ and x.dtype.category != INT:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        return x
    from .creation import tensor

    made = tensor(list(x))
    if made.shape == (0,):
        made = make([], (0,), int64)
    return made


def one_item_per_dimension(ndim: int, key: object) -> list:
    "What stands in the brackets, with whole slices for … and for what is not mentioned."
    items = list(key) if isinstance(key, tuple) else [key]
    mentioned = 0
    dots = []
    for i, item in enumerate(items):
        if item is Ellipsis:
            dots.append(i)
        elif item is not None and not isinstance(item, bool):
            is_mask = isinstance(item, Tensor) and item.dtype is bool_
            mentioned += item.ndim if is_mask else 1
    if mentioned > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * (ndim - mentioned)
    return items


class Reading:
    """What an index reads: a view, by numbers, slices and None, and tensors that pick from it.

    A place is counted twice: in the storage, for the view, and in the order of the tensor, for its
    gradient. So each stride and each start is a pair.
    """

    def __init__(self, input: Tensor, key: object):
        self.input = input
        self.steps = list(zip(input.strides, contiguous_strides(input.shape)))
        self.dim = 0  # the next dimension of the input
        self.shape: list[int] = []
        self.strides: list[tuple[int, int]] = []
        self.start = (0, 0)
        self.picks: dict[int, Tensor] = {}  # by dimension of the view
        self.name = "Alias"
        for item in one_item_per_dimension(input.ndim, key):
            self.take(item)

    def take(self, item: object) -> None:
        if item is None:
            self.keep(1, (0, 0))
            self.name = "Unsqueeze"
        elif isinstance(item, bool):
            refuse("an index True or False")
        elif isinstance(item, slice):
            self.take_slice(item)
        elif isinstance(item, Tensor | list | tuple | range) and not is_number(item):
            self.take_tensor(as_index_tensor(item))
        else:
            i = in_range(as_index(item), self.input.shape[self.dim], self.dim)
            self.move(i)
            self.dim += 1
            self.name = "Select"

    def keep(self, size: int, stride: tuple[int, int]) -> None:
        self.shape.append(size)
        self.strides.append(stride)

    def move(self, places: int) -> None:
        "Begin so many places further along the present dimension."
        stored, own = self.steps[self.dim]
        self.start = (self.start[0] + places * stored, self.start[1] + places * own)

    def take_slice(self, item: slice) -> None:
        ends = (item.start, item.stop, item.step)  # they may be tensors without dimensions
        numbers = slice(*(None if x is None else as_index(x) for x in ends))
        first, last, by = numbers.indices(self.input.shape[self.dim])
        if by <= 0:
            raise ValueError("step must be greater than zero")
        if first < last:
            self.move(first)
        stored, own = self.steps[self.dim]
        self.keep(len(range(first, last, by)), (by * stored, by * own))
        self.dim += 1
        if item != slice(None):
            self.name = "Slice"

    def take_tensor(self, tensor: Tensor) -> None:
        found = (tensor,)
        if tensor.dtype is bool_:
            sizes = self.input.shape[self.dim : self.dim + tensor.ndim]
            if sizes != tensor.shape:
                raise IndexError(
                    f"The shape of the mask {list(tensor.shape)} does not match the shape of the "
                    f"indexed tensor {list(self.input.shape)} from dimension {self.dim} on"
                )
            found = nonzero(tensor, as_tuple=True)
        for one in found:
            self.picks[len(self.shape)] = one
            self.keep(self.input.shape[self.dim], self.steps[self.dim])
            self.dim += 1

    def places(self) -> tuple[list[int], Size]:
        "Where the numbers lie, in the order of the tensor, and the shape of the result."
        strides = [own for _, own in self.strides]
        if self.picks:
            return picked_places(self.shape, strides, self.start[1], self.picks)
        return places(tuple(self.shape), tuple(strides), self.start[1]), Size(self.shape)


def is_number(item: object) -> bool:
    "A tensor without dimensions is a number, unless it is a bool."
    return isinstance(item, Tensor) and item.ndim == 0 and item.dtype is not bool_


def picked_places(
    shape: list, strides: list, start: int, picks: dict[int, Tensor]
) -> tuple[list, Size]:
    """Where the numbers lie that tensors pick, and the shape of the result.

    The tensors' own dimensions stand where the first of them stood, or in front if there is
    something between them.
    """
    common = broadcast_shapes(*(x.shape for x in picks.values()))
    offsets = [start] * common.numel()
    for dim, x in picks.items():
        size, stride = shape[dim], strides[dim]
        for i, place in enumerate(broadcast(x.flat(), x.shape, common)):
            if not -size <= place < size:
                raise IndexError(
                    f"index {place} is out of bounds for dimension {dim} with size {size}"
                )
            offsets[i] += place % size * stride
    dims = list(picks)
    are_adjacent = dims[-1] - dims[0] == len(dims) - 1
    at = dims[0] if are_adjacent else 0
    kept = [d for d in range(len(shape)) if d not in picks]
    before = [d for d in kept if d < at]
    after = [d for d in kept if d >= at]
    where = places(tuple(shape[d] for d in before), tuple(strides[d] for d in before), 0)
    rest = places(tuple(shape[d] for d in after), tuple(strides[d] for d in after), 0)
    if rest == [0]:
        found = [b + o for b in where for o in offsets]
    else:
        found = [b + o + a for b in where for o in offsets for a in rest]
    sizes = [shape[d] for d in before] + list(common) + [shape[d] for d in after]
    return found, Size(sizes)


# --- reading and writing ----------------------------------------------------------------------
def get(input: Tensor, key: object) -> Tensor:
    "x[key]."
    if key.__class__ is int and input.ndim:
        return select(input, 0, key)
    reading = Reading(input, key)
    if reading.picks:
        where, size = reading.places()
        return picked(input, where, size, "Index", *reading.picks.values())
    stored = [stride for stride, _ in reading.strides]
    own = [stride for _, stride in reading.strides], reading.start[1]
    return sub_view(input, reading.name, reading.shape, stored, reading.start[0], own)


def put(input: Tensor, key: object, value: object) -> None:
    "x[key] = value."
    where, size = Reading(input, key).places()
    new, new_shape, new_kind = numbers_of(value) or refuse(f"x[…] = {type(value).__name__}")
    while len(new_shape) > len(size) and new_shape[0] == 1:
        new_shape = new_shape[1:]
    if broadcast_shapes(new_shape, size) != size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(new_shape)} cannot be broadcast to "
            f"indexing result of shape {list(size)}"
        )
    new = broadcast(cast(new, new_kind, input.dtype), new_shape, size)
    values = list(input.flat())
    for place, x in zip(where, new):
        values[place] = x
    result = make(values, input.shape, input.dtype)
    if wants_gradient(input, value):
        if len(set(where)) < len(where):
            refuse("x[places] = values, with a gradient and a place that appears twice")
        record(result, "CopySlices", (input, value), lambda g: put_gradients(g, where, size, value))
    adopt(input, result)


def put_gradients(g: list, where: list[int], size: Size, value: object) -> tuple[list, list | None]:
    "Of x[…] = value: 0 for what was written over, and what stands there for the value."
    kept = list(g)
    for place in where:
        kept[place] = 0.0
    own = None
    if isinstance(value, Tensor) and value.requires_grad:
        own = sum_to([g[place] for place in where], size, value.shape)
    return kept, own


def masked_scatter(input: Tensor, mask: Tensor, source: Tensor, **others) -> Tensor:
    "Where the mask holds, the next number of `source`; else input."
    refuse_keywords("masked_scatter", others)
    if mask.dtype is not bool_:
        raise RuntimeError("masked_scatter_ only supports boolean masks")
    if input.dtype is not source.dtype:
        raise RuntimeError(
            "masked_scatter: expected self and source to have same dtypes but got "
            f"{input.dtype} and {source.dtype}"
        )
    shape = broadcast_shapes(input.shape, mask.shape)
    holds = broadcast(mask.flat(), mask.shape, shape)
    x = broadcast(input.flat(), input.shape, shape)
    new = source.flat()
    if sum(holds) > len(new):
        raise RuntimeError(
            "masked_scatter: expected the number of elements in source >= number of ones in mask"
        )
    following = iter(new)
    out = make([next(following) if m else xi for m, xi in zip(holds, x)], shape, input.dtype)
    if wants_gradient(input, source):

        def pull(g):
            kept = [0.0 if m else gi for m, gi in zip(holds, g)]
            moved = [gi for m, gi in zip(holds, g) if m]
            moved += [0.0] * (len(new) - len(moved))
            return sum_to(kept, shape, input.shape), moved

        record(out, "MaskedScatter", (input, source), pull, (mask,))
    return out


def masked_select(input: Tensor, mask: Tensor, **others) -> Tensor:
    "The numbers where the mask holds, in a row."
    refuse_keywords("masked_select", others)
    if mask.dtype is not bool_:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    from .shaping import expand

    shape = broadcast_shapes(input.shape, mask.shape)
    holds = broadcast(mask.flat(), mask.shape, shape)
    where = [i for i, m in enumerate(holds) if m]
    return picked(expand(input, *shape), where, (len(where),), "MaskedSelect", mask)


def nonzero(input: Tensor, *, as_tuple: bool = False, **others):
    "Where numbers are not 0: a row of places for each."
    refuse_keywords("nonzero", others)
    found = [i for i, x in enumerate(input.flat()) if x]
    columns = []
    for size, stride in zip(input.shape, contiguous_strides(input.shape)):
        columns.append([i // stride % size for i in found])
    if as_tuple:
        if not columns:
            refuse("nonzero(as_tuple=True) of a number")
        return tuple(make(column, (len(found),), int64) for column in columns)
    rows = list(chain.from_iterable(zip(*columns)))
    return make(rows, (len(found), input.ndim), int64)


# --- along one dimension ----------------------------------------------------------------------
def gather_places(input: Tensor, dim: int, index: Tensor, name: str) -> list[int]:
    "Where in `input` the numbers lie that `index` names along dim."
    if index.dtype.category != INT:
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index")
    if input.ndim != index.ndim and 0 in (input.ndim, index.ndim):
        refuse(f"{name} of a number")
    if input.ndim != index.ndim:
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    for d, (n, most) in enumerate(zip(index.shape, input.shape)):
        if d != dim and n > most:
            raise RuntimeError(
                f"Size does not match at dimension {d} expected index {list(index.shape)} to be no "
                f"larger than self {list(input.shape)} apart from dimension {dim}"
            )
    if input.ndim == 0:
        return [0]
    strides = contiguous_strides(input.shape)
    others = tuple(0 if d == dim else stride for d, stride in enumerate(strides))
    size, step = input.shape[dim], strides[dim]
    where = []
    for start, i in zip(places(index.shape, others, 0), index.flat()):
        if not 0 <= i < size:
            raise RuntimeError(f"index {i} is out of bounds for dimension {dim} with size {size}")
        where.append(start + i * step)
    return where


def gather(
    input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, **others
) -> Tensor:
    "out[i][j] = input[index[i][j]][j] for dim 0, and so on."
    refuse_keywords("gather", others)
    if sparse_grad:
        refuse("gather(sparse_grad=True)")
    where = gather_places(input, one_dim(dim, input.ndim), index, "gather")
    return picked(input, where, index.shape, "Gather", index)


def source_numbers(
    name: str, input: Tensor, index: Tensor, src: object
) -> tuple[list, Tensor | None]:
    "The numbers that scatter writes, one for each of `index`."
    if not isinstance(src, Tensor):
        values, _, kind = numbers_of(src)
        return cast(values, kind, input.dtype) * index.shape.numel(), None
    if src.dtype is not input.dtype:
        raise RuntimeError(f"{name}(): Expected self.dtype to be equal to src.dtype")
    for n, most in zip(index.shape, src.shape):
        if n > most:
            raise RuntimeError(
                f"Expected index {list(index.shape)} to be no larger than src {list(src.shape)}"
            )
    where = places(index.shape, contiguous_strides(src.shape), 0)
    return list(map(src.flat().__getitem__, where)), src


def scatter(input: Tensor, dim: int, index: Tensor, src: object = None, **others) -> Tensor:
    "A copy with src written to the places that `index` names along dim."
    if "value" in others:
        src = others.pop("value")
    refuse_keywords("scatter", others)
    if index.shape.numel() == 0:
        refuse("scatter with an empty index")
    where = gather_places(input, one_dim(dim, input.ndim), index, "scatter")
    new, source = source_numbers("scatter", input, index, src)
    values = list(input.flat())
    for place, x in zip(where, new):
        values[place] = x
    out = make(values, input.shape, input.dtype)
    if wants_gradient(input, source):
        if len(set(where)) < len(where):
            refuse("the gradient of scatter to a place that appears twice")

        def pull(g):
            kept = list(g)
            for place in where:
                kept[place] = 0.0
            return kept, from_source(g, where, index, source)

        record(out, "Scatter", (input, source), pull, (index,))
    return out


def from_source(g: list, where: list[int], index: Tensor, source: Tensor | None) -> list | None:
    "The gradient of the numbers that were written."
    if source is None or not source.requires_grad:
        return None
    own = [0.0] * source.shape.numel()
    for place, target in zip(places(index.shape, contiguous_strides(source.shape), 0), where):
        own[place] = g[target]
    return own


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor, **others) -> Tensor:
    "A copy with src added at the places that `index` names along dim."
    refuse_keywords("scatter_add", others)
    if index.shape.numel() == 0:
        refuse("scatter_add with an empty index")
    where = gather_places(input, one_dim(dim, input.ndim), index, "scatter_add")
    new, source = source_numbers("scatter_add", input, index, src)
    values = list(input.flat())
    for place, x in zip(where, new):
        values[place] += x
    out = make(input.dtype.keep(values), input.shape, input.dtype)
    if wants_gradient(input, source):
        record(
            out,
            "ScatterAdd",
            (input, source),
            lambda g: (g, from_source(g, where, index, source)),
            (index,),
        )
    return out


def index_select(input: Tensor, dim: int, index: Tensor, **others) -> Tensor:
    "A copy of some slices along dim."
    from .shaping import pick_rows

    refuse_keywords("index_select", others)
    dim = one_dim(dim, input.ndim)
    if index.ndim > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype.category != INT:
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if input.ndim == 0:
        refuse("index_select of a number")
    for i in index.flat():
        if not 0 <= i < input.shape[dim]:
            raise IndexError("index out of range in self")
    return pick_rows(input, dim, index.flat(), "IndexSelect", index)


def index_copy_(input: Tensor, dim: int, index: Tensor, source: Tensor, **others) -> Tensor:
    "Write the slices of `source` to places along dim, in place."
    refuse_keywords("index_copy_", others)
    dim = one_dim(dim, input.ndim)
    if wants_gradient(input, source):
        refuse("the gradient of index_copy_")
    put(input, (*[slice(None)] * dim, index), source)
    return input


def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False, **others) -> Tensor:
    "Write a number on the diagonal of a matrix, in place."
    refuse_keywords("fill_diagonal_", others)
    if wrap or input.ndim != 2:
        refuse("fill_diagonal_ of anything but a matrix")
    if Mode.enabled and input.requires_grad:
        refuse("the gradient of fill_diagonal_")
    (value,) = cast([fill_value], numbers_of(fill_value)[2], input.dtype)
    values = list(input.flat())
    for i in range(min(input.shape)):
        values[i * input.shape[1] + i] = value
    input.write(values)
    return input


def diagonal(input: Tensor, **others) -> Tensor:
    "The diagonal of a matrix, as a view."
    refuse_keywords("diagonal", others)
    if input.ndim != 2:
        refuse(f"diagonal with {input.ndim} dimensions")
    rows, columns = input.shape
    own = [columns + 1], 0
    return sub_view(input, "Diagonal", [min(rows, columns)], [sum(input.strides)], 0, own)


def isin(elements: Tensor, test_elements: object, **others) -> Tensor:
    "Where a number is one of test_elements."
    refuse_keywords("isin", others)
    known = test_elements.flat() if isinstance(test_elements, Tensor) else [test_elements]
    numbers, shape, _ = numbers_of(elements)
    one_of = {x for x in known if x == x}
    return make([x in one_of for x in numbers], shape, bool_)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0, **others) -> Tensor:
    "How often each of 0, 1, 2, … appears."
    refuse_keywords("bincount", others)
    if weights is not None:
        refuse("bincount(weights=…)")
    numbers = input.flat()
    if input.ndim != 1 or input.dtype.category != INT or any(x < 0 for x in numbers):
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    counts = [0] * max(minlength, max(numbers, default=-1) + 1)
    for x in numbers:
        counts[x] += 1
    return make(counts, (len(counts),), int64)


def searchsorted(
    sorted_sequence: Tensor,
    input: object,
    *,
    out_int32: bool = False,
    right: bool = False,
    **others,
) -> Tensor:
    "Where each number would have to stand in a sorted row."
    from bisect import bisect_left, bisect_right

    refuse_keywords("searchsorted", others)
    if out_int32:
        refuse("searchsorted(out_int32=True)")
    if sorted_sequence.ndim != 1:
        refuse("searchsorted in several rows")
    numbers, shape, _ = numbers_of(input)
    if any(map(math.isnan, numbers)):
        refuse("searchsorted of NaN")
    find = bisect_right if right else bisect_left
    row = sorted_sequence.flat()
    return make([find(row, x) for x in numbers], shape, int64)


def one_hot(tensor: Tensor, num_classes: int = -1, **others) -> Tensor:
    "1 in the column that a number names, 0 in the others."
    refuse_keywords("one_hot", others)
    if tensor.dtype is not int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    classes = tensor.flat()
    n = max(classes, default=-1) + 1 if num_classes == -1 else num_classes
    if not classes:
        refuse("one_hot of nothing")
    if min(classes) < 0:
        raise RuntimeError("Class values must be non-negative.")
    if max(classes) >= n:
        raise RuntimeError("Class values must be smaller than num_classes.")
    values = [0] * (n * len(classes))
    for row, x in enumerate(classes):
        values[row * n + x] = 1
    return make(values, (*tensor.shape, n), int64)
