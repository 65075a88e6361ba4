"""x[…]: numbers, slices, None and … make views; tensors and lists of places make copies.

Reading is `get`, writing `put`. `take_apart` gives every index the dimensions it belongs to; first
numbers, slices and None are worked off as a view, then the tensors pick from what is left.
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


def take_apart(input: Tensor, key: object) -> tuple[list, list, int, int, dict[int, Tensor], str]:
    """Work off numbers, slices and None.

    Returns the shape and strides that are left, where they begin, the same counted in the order of
    `input`, the tensors that pick from them by dimension, and the name of the operation.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    taken = 0
    for item in items:
        if item is None or item is Ellipsis or isinstance(item, bool):
            continue
        is_mask = isinstance(item, Tensor) and item.dtype is bool_
        taken += item.ndim if is_mask else 1
    missing = input.ndim - taken
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {input.ndim}")
    at = [i for i, item in enumerate(items) if item is Ellipsis]
    if not at:
        items += [slice(None)] * missing
    else:
        items[at[0] : at[0] + 1] = [slice(None)] * missing
        if any(item is Ellipsis for item in items):
            raise IndexError("an index can only have a single ellipsis ('...')")
    own_strides = contiguous_strides(input.shape)
    shape: list[int] = []
    strides: list[tuple[int, int]] = []  # in the storage, and in the order of the input
    start = own_start = 0
    dim = 0
    picks: dict[int, Tensor] = {}
    name = "Alias"
    for item in items:
        if item is None:
            shape.append(1)
            strides.append((0, 0))
            name = "Unsqueeze"
        elif isinstance(item, bool):
            refuse("an index True or False")
        elif isinstance(item, slice):
            size, step = input.shape[dim], input.strides[dim]
            first, last, by = slice_numbers(item).indices(size)
            if by <= 0:
                raise ValueError("step must be greater than zero")
            start += first * step if first < last else 0
            own_start += first * own_strides[dim] if first < last else 0
            shape.append(len(range(first, last, by)))
            strides.append((by * step, by * own_strides[dim]))
            if item != slice(None):
                name = "Slice"
            dim += 1
        elif isinstance(item, Tensor | list | tuple | range) and not is_number(item):
            tensor = as_index_tensor(item)
            if tensor.dtype is bool_:
                for d, size in enumerate(tensor.shape):
                    if size != input.shape[dim + d]:
                        raise IndexError(
                            f"The shape of the mask {list(tensor.shape)} at index {d} does not "
                            f"match the shape of the indexed tensor {list(input.shape)} at index "
                            f"{dim + d}"
                        )
                found = nonzero(tensor, as_tuple=True)
            else:
                found = (tensor,)
            for one in found:
                picks[len(shape)] = one
                shape.append(input.shape[dim])
                strides.append((input.strides[dim], own_strides[dim]))
                dim += 1
        else:
            i = in_range(as_index(item), input.shape[dim], dim)
            start += i * input.strides[dim]
            own_start += i * own_strides[dim]
            name = "Select"
            dim += 1
    return shape, strides, start, own_start, picks, name


def is_number(item: object) -> bool:
    "A tensor without dimensions is a number, unless it is a bool."
    return isinstance(item, Tensor) and item.ndim == 0 and item.dtype is not bool_


def slice_numbers(item: slice) -> slice:
    "A slice may hold tensors without dimensions."
    ends = (item.start, item.stop, item.step)
    return slice(*(None if x is None else as_index(x) for x in ends))


def picked_places(
    shape: list, strides: list, start: int, picks: dict[int, Tensor], which: int
) -> tuple[list, Size]:
    """Where the numbers lie that tensors pick, and the shape of the result.

    The tensors' own dimensions stand where the first of them stood, or in front if there is
    something between them.
    """
    common = broadcast_shapes(*(x.shape for x in picks.values()))
    offsets = [start] * common.numel()
    for dim, x in picks.items():
        size, stride = shape[dim], strides[dim][which]
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
    where = places(tuple(shape[d] for d in before), tuple(strides[d][which] for d in before), 0)
    rest = places(tuple(shape[d] for d in after), tuple(strides[d][which] for d in after), 0)
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
    shape, strides, start, own_start, picks, name = take_apart(input, key)
    if not picks:
        own = [own for _, own in strides], own_start
        return sub_view(input, name, shape, [stride for stride, _ in strides], start, own)
    where, size = picked_places(shape, strides, own_start, picks, 1)
    return picked(input, where, size, "Index", *picks.values())


def put(input: Tensor, key: object, value: object) -> None:
    "x[key] = value."
    shape, strides, _, own_start, picks, _ = take_apart(input, key)
    if picks:
        where, size = picked_places(shape, strides, own_start, picks, 1)
    else:
        size = Size(shape)
        where = places(size, tuple(own for _, own in strides), own_start)
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
    is_asked = wants_gradient(input, value)
    if is_asked and len(set(where)) < len(where):
        refuse("x[places] = values, with a gradient and a place that appears twice")
    result = make(values, input.shape, input.dtype)
    if is_asked:
        n = len(values)

        def pull(g):
            kept = list(g)
            for place in where:
                kept[place] = 0.0
            own = None
            if isinstance(value, Tensor) and value.requires_grad:
                own = sum_to([g[place] for place in where], size, value.shape)
            return kept, own

        record(result, "CopySlices", (input, value), pull)
        if n == 0:
            return
    adopt(input, result)


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
