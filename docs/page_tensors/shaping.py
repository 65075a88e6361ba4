"""Other shapes of the same numbers: views, which share a list, and copies that join or repeat.

The derivative of a view puts each number of the gradient back to the place it was read from.
"""

from collections.abc import Sequence
from math import prod

from .autograd import record, wants_gradient
from .dtypes import cast, dtype, promote_types
from .refusal import refuse, refuse_keywords
from .shapes import Size, as_size, contiguous_strides, one_dim, places, sum_to
from .tensor import Tensor, is_contiguous, make, view_of


def put_back(g: list, where: list[int], n: int) -> list:
    "A gradient of n numbers that is 0 but at the places that were read."
    back = [0.0] * n
    for place, x in zip(where, g):
        back[place] += x
    return back


# --- the same numbers in the same order -------------------------------------------------------
def same_order(input: Tensor, shape: Size, name: str) -> Tensor | None:
    "A view of another shape, or None where strides cannot say it."
    strides = strides_of_new_shape(input, shape)
    if strides is None:
        return None
    out = view_of(input, shape, strides, input.offset)
    if wants_gradient(input):
        record(out, name, (input,), lambda g: (g,))
    return out


def strides_of_new_shape(input: Tensor, shape: Size) -> tuple | None:
    "Strides with which `shape` reads the numbers in the same order."
    if input.whole or is_contiguous(input.shape, input.strides):
        return contiguous_strides(shape)
    if prod(shape) == 0:
        return contiguous_strides(shape)
    # join old dimensions that lie side by side into blocks, then cut each block
    blocks: list[list] = []  # [size, stride of its last dimension]
    for size, stride in zip(input.shape, input.strides):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = [blocks[-1][0] * size, stride]
        else:
            blocks.append([size, stride])
    strides: list[int] = []
    for size in reversed(shape):
        if size == 1:
            strides.append(1)
            continue
        if not blocks or blocks[-1][0] % size:
            return None
        left, stride = blocks[-1]
        strides.append(stride)
        blocks[-1] = [left // size, stride * size]
        if left == size:
            blocks.pop()
    return tuple(reversed(strides))


def complete(shape: Size, n: int) -> Size:
    "Replace a size of −1 by what is left of n numbers."
    if shape.count(-1) > 1:
        raise RuntimeError("only one dimension can be inferred")
    if -1 in shape:
        known = -prod(shape)
        if known == 0 or n % known:
            raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {n}")
        shape = Size(n // known if size == -1 else size for size in shape)
    if prod(shape) != n or any(size < 0 for size in shape):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {n}")
    return shape


def view(input: Tensor, *shape, **others) -> Tensor:
    "The same numbers, shared, in another shape."
    refuse_keywords("view", others)
    if shape and isinstance(shape[0], dtype):
        refuse("view(dtype)")
    size = complete(as_size(shape), input.shape.numel())
    out = same_order(input, size, "View")
    if out is None:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one "
            "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )
    return out


def reshape(input: Tensor, *shape, **others) -> Tensor:
    "The same numbers in another shape: shared if strides can say it, else copied."
    if "shape" in others:
        shape = (others.pop("shape"),)
    refuse_keywords("reshape", others)
    size = complete(as_size(shape), input.shape.numel())
    out = same_order(input, size, "View")
    if out is None:
        out = make(input.flat(), size, input.dtype)
        if wants_gradient(input):
            record(out, "UnsafeView", (input,), lambda g: (g,))
    return out


def view_as(input: Tensor, other: Tensor) -> Tensor:
    return view(input, other.shape)


def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    return reshape(input, other.shape)


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1, **others) -> Tensor:
    "Join dimensions from start_dim to end_dim into one."
    refuse_keywords("flatten", others)
    first = one_dim(start_dim, input.ndim)
    last = one_dim(end_dim, input.ndim)
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if input.ndim == 0:
        return reshape(input, 1)
    if first == last:
        return input
    shape = input.shape
    return reshape(input, *shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])


def unflatten(input: Tensor, dim: int, sizes: Sequence[int], **others) -> Tensor:
    "Cut one dimension into several."
    refuse_keywords("unflatten", others)
    dim = one_dim(dim, input.ndim)
    if not sizes:
        raise RuntimeError("unflatten: sizes must be non-empty")
    sizes = Size(sizes)
    size = input.shape[dim]
    known = -prod(sizes)
    if sizes.count(-1) == 1 and known > 0 and size % known == 0:
        sizes = Size(size // known if s == -1 else s for s in sizes)
    if prod(sizes) != size or any(s < 0 for s in sizes):
        raise RuntimeError(
            f"unflatten: Provided sizes {list(sizes)} don't multiply up to the size of dim {dim} "
            f"({size}) in the input tensor"
        )
    return view(input, *input.shape[:dim], *sizes, *input.shape[dim + 1 :])


def squeeze(input: Tensor, dim: int | None = None, **others) -> Tensor:
    "Without dimensions of size 1, or without this one."
    refuse_keywords("squeeze", others)
    if isinstance(dim, tuple | list):
        refuse("squeeze(dim=(…))")
    chosen = range(input.ndim) if dim is None else [one_dim(dim, input.ndim)]
    kept = [d for d in range(input.ndim) if d not in chosen or input.shape[d] != 1]
    return reread(
        input, "Squeeze", [input.shape[d] for d in kept], [input.strides[d] for d in kept]
    )


def unsqueeze(input: Tensor, dim: int, **others) -> Tensor:
    "With one more dimension, of size 1."
    refuse_keywords("unsqueeze", others)
    dim = one_dim(dim, input.ndim + 1)
    shape = [*input.shape[:dim], 1, *input.shape[dim:]]
    step = input.shape[dim] * input.strides[dim] if dim < input.ndim else 1
    strides = [*input.strides[:dim], step, *input.strides[dim:]]
    return reread(input, "Unsqueeze", shape, strides)


def reread(input: Tensor, name: str, shape: Sequence, strides: Sequence) -> Tensor:
    "A view with dimensions of size 1 added or taken away."
    out = view_of(input, shape, strides, input.offset)
    if wants_gradient(input):
        record(out, name, (input,), lambda g: (g,))
    return out


# --- the same numbers in another order --------------------------------------------------------
def permute(input: Tensor, *dims, **others) -> Tensor:
    "The same numbers with the dimensions in another order."
    if "dims" in others:
        dims = (others.pop("dims"),)
    refuse_keywords("permute", others)
    dims = [one_dim(d, input.ndim) for d in as_size(dims)]
    return reorder(input, dims, "Permute")


def reorder(input: Tensor, dims: Sequence[int], name: str) -> Tensor:
    if sorted(dims) != list(range(input.ndim)):
        raise RuntimeError(
            "permute(sparse_coo): number of dimensions in the tensor input does not match"
        )
    shape = Size(input.shape[d] for d in dims)
    out = view_of(input, shape, tuple(input.strides[d] for d in dims), input.offset)
    if wants_gradient(input):
        side_by_side = contiguous_strides(input.shape)
        strides = tuple(side_by_side[d] for d in dims)
        n = input.shape.numel()
        record(out, name, (input,), lambda g: (put_back(g, places(shape, strides, 0), n),))
    return out


def transpose(input: Tensor, dim0: int, dim1: int, **others) -> Tensor:
    "Exchange two dimensions."
    refuse_keywords("transpose", others)
    dims = list(range(input.ndim))
    if not dims:
        return reorder(input, dims, "Transpose")
    a, b = one_dim(dim0, input.ndim), one_dim(dim1, input.ndim)
    dims[a], dims[b] = dims[b], dims[a]
    return reorder(input, dims, "Transpose")


def t(input: Tensor) -> Tensor:
    if input.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {input.ndim}D")
    return reorder(input, list(range(input.ndim))[::-1], "T")


def T(input: Tensor) -> Tensor:
    "The transposed matrix; all dimensions reversed."
    if input.ndim not in (0, 2):
        refuse(f"Tensor.T with {input.ndim} dimensions")
    return reorder(input, list(range(input.ndim))[::-1], "Permute")


def mT(input: Tensor) -> Tensor:
    "With the last two dimensions exchanged."
    if input.ndim < 2:
        raise RuntimeError(
            f"tensor.mT is only supported on matrices or batches of matrices. Got {input.ndim}-D tensor."
        )
    return transpose(input, -2, -1)


def movedim(input: Tensor, source: int, destination: int, **others) -> Tensor:
    refuse_keywords("movedim", others)
    if not isinstance(source, int) or not isinstance(destination, int):
        refuse("movedim of several dimensions")
    dims = list(range(input.ndim))
    moved = dims.pop(one_dim(source, input.ndim))
    dims.insert(one_dim(destination, input.ndim), moved)
    return reorder(input, dims, "Permute")


def flip(input: Tensor, *dims, **others) -> Tensor:
    "A copy, read backwards along some dimensions."
    if "dims" in others:
        dims = (others.pop("dims"),)
    refuse_keywords("flip", others)
    turned = [one_dim(d, input.ndim) for d in as_size(dims)]
    if len(set(turned)) < len(turned):
        raise RuntimeError("dim appears multiple times in the list of dims")
    side_by_side = contiguous_strides(input.shape)
    offset = 0
    strides = list(side_by_side)
    for d in turned:
        offset += (input.shape[d] - 1) * side_by_side[d]
        strides[d] = -side_by_side[d]
    where = places(input.shape, tuple(strides), offset) if input.shape.numel() else []
    return picked(input, where, input.shape, "Flip")


def picked(input: Tensor, where: list[int], shape: Sequence, name: str, *reads: Tensor) -> Tensor:
    "A copy of the numbers at some places, counted in the order of `input`."
    flat = input.flat()
    out = make([flat[i] for i in where], shape, input.dtype)
    if wants_gradient(input):
        n = len(flat)
        record(out, name, (input,), lambda g: (put_back(g, where, n),), reads)
    return out


# --- repeated numbers -------------------------------------------------------------------------
def expand(input: Tensor, *sizes, **others) -> Tensor:
    "A view that repeats dimensions of size 1; −1 leaves a size as it is."
    if "size" in others:
        sizes = (others.pop("size"),)
    others.pop("implicit", None)
    refuse_keywords("expand", others)
    sizes = as_size(sizes)
    new = len(sizes) - input.ndim
    if new < 0:
        raise RuntimeError(
            f"expand(torch.{type_name(input)}Tensor{{{list(input.shape)}}}, size={list(sizes)}): "
            f"the number of sizes provided ({len(sizes)}) must be greater or equal to the number "
            f"of dimensions in the tensor ({input.ndim})"
        )
    shape: list[int] = []
    strides: list[int] = []
    for d, size in enumerate(sizes):
        if d < new:
            if size < 0:
                raise RuntimeError(
                    f"The expanded size of the tensor ({size}) isn't allowed in a leading, "
                    f"non-existing dimension {d}"
                )
            shape.append(size)
            strides.append(0)
            continue
        own, stride = input.shape[d - new], input.strides[d - new]
        size = own if size == -1 else size
        if size != own and own != 1:
            raise RuntimeError(
                f"The expanded size of the tensor ({size}) must match the existing size ({own}) at "
                f"non-singleton dimension {d}.  Target sizes: {list(sizes)}.  Tensor sizes: "
                f"{list(input.shape)}"
            )
        shape.append(size)
        strides.append(stride if size == own else 0)
    out = view_of(input, shape, strides, input.offset)
    if wants_gradient(input):
        record(out, "Expand", (input,), lambda g: (sum_to(g, tuple(shape), tuple(input.shape)),))
    return out


def type_name(x: Tensor) -> str:
    return {"float32": "Float", "float64": "Double", "int64": "Long", "bool": "Bool"}.get(
        x.dtype.name, x.dtype.name
    )


def expand_as(input: Tensor, other: Tensor) -> Tensor:
    return expand(input, other.shape)


def repeat(input: Tensor, *repeats, **others) -> Tensor:
    "A copy, laid side by side so many times along each dimension."
    if "repeats" in others:
        repeats = (others.pop("repeats"),)
    refuse_keywords("repeat", others)
    repeats = as_size(repeats)
    new = len(repeats) - input.ndim
    if new < 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor"
        )
    sizes = (1,) * new + tuple(input.shape)
    strides = contiguous_strides(sizes)
    tall: list[int] = []
    steps: list[int] = []
    for times, size, stride in zip(repeats, sizes, strides):
        tall += [times, size]
        steps += [0, stride]
    where = places(tuple(tall), tuple(steps), 0)
    shape = [times * size for times, size in zip(repeats, sizes)]
    return picked(input, where, shape, "Repeat")


def repeat_interleave(
    input: Tensor,
    repeats: object,
    dim: int | None = None,
    *,
    output_size: int | None = None,
    **others,
) -> Tensor:
    "A copy in which each slice along dim is repeated, side by side."
    refuse_keywords("repeat_interleave", others)
    if output_size is not None:
        refuse("repeat_interleave(output_size=…)")
    if dim is None:
        input = flatten(input)
        dim = 0
    dim = one_dim(dim, input.ndim)
    n = input.shape[dim]
    counts = repeats.tolist() if isinstance(repeats, Tensor) else repeats
    if isinstance(counts, list) and len(counts) == 1:
        counts = counts[0]
    if isinstance(counts, int):
        counts = [counts] * n
    if len(counts) != n:
        raise RuntimeError("repeats must have the same size as input along dim")
    rows = [i for i, times in enumerate(counts) for _ in range(times)]
    return pick_rows(input, dim, rows, "IndexSelect" if input.ndim else "Index")


def pick_rows(input: Tensor, dim: int, rows: Sequence[int], name: str, *reads: Tensor) -> Tensor:
    "A copy of some slices along one dimension."
    inner = prod(input.shape[dim + 1 :])
    n = input.shape[dim]
    where = []
    for outer in range(prod(input.shape[:dim])):
        for row in rows:
            start = (outer * n + row) * inner
            where.extend(range(start, start + inner))
    shape = [*input.shape[:dim], len(rows), *input.shape[dim + 1 :]]
    return picked(input, where, shape, name, *reads)


# --- several tensors --------------------------------------------------------------------------
def common_dtype(tensors: Sequence[Tensor]) -> dtype:
    "The type that holds the numbers of all."
    kind = tensors[0].dtype
    for x in tensors[1:]:
        kind = promote_types(kind, x.dtype)
    return kind


def check_sizes_beside(dim: int, tensors: Sequence[Tensor]) -> None:
    "Refuse tensors that cannot stand one after the other."
    first = tensors[0]
    for i, x in enumerate(tensors):
        if x.ndim != first.ndim:
            raise RuntimeError(
                f"Tensors must have same number of dimensions: got {first.ndim} and {x.ndim}"
            )
        for d in range(first.ndim):
            if d != dim and x.shape[d] != first.shape[d]:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {dim}. Expected size "
                    f"{first.shape[d]} but got size {x.shape[d]} for tensor number {i} in the list."
                )


def interleaved(flats: Sequence[list], widths: Sequence[int], rows: int) -> list:
    "A piece of each in turn, row by row."
    values: list = []
    for r in range(rows):
        for flat, width in zip(flats, widths):
            values += flat[r * width : r * width + width]
    return values


def taken_apart(g: list, widths: Sequence[int], rows: int) -> list[list]:
    "The way back of `interleaved`."
    step = sum(widths)
    parts = []
    start = 0
    for width in widths:
        part: list = []
        for r in range(rows):
            part += g[r * step + start : r * step + start + width]
        parts.append(part)
        start += width
    return parts


def cat(tensors: Sequence[Tensor], dim: int = 0, **others) -> Tensor:
    "One after the other along a dimension that they have."
    refuse_keywords("cat", others)
    tensors = list(tensors)
    if not tensors:
        raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
    kind = common_dtype(tensors)
    full = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    first = full[0]
    if len(full) < len(tensors) and first.ndim != 1:
        refuse("cat with an empty tensor of another shape")
    if first.ndim == 0:
        raise RuntimeError("zero-dimensional tensor (at position 0) cannot be concatenated")
    dim = one_dim(dim, first.ndim)
    check_sizes_beside(dim, full)
    rows = prod(first.shape[:dim])
    widths = [prod(x.shape[dim:]) for x in full]
    values = interleaved([cast(x.flat(), x.dtype, kind) for x in full], widths, rows)
    length = sum(x.shape[dim] for x in full)
    out = make(values, [*first.shape[:dim], length, *first.shape[dim + 1 :]], kind)
    if wants_gradient(*full):
        record(out, "Cat", full, lambda g: taken_apart(g, widths, rows))
    return out


def stack(tensors: Sequence[Tensor], dim: int = 0, **others) -> Tensor:
    "Side by side along a new dimension."
    refuse_keywords("stack", others)
    tensors = list(tensors)
    if not tensors:
        raise RuntimeError("stack expects a non-empty TensorList")
    first = tensors[0]
    dim = one_dim(dim, first.ndim + 1)
    for i, x in enumerate(tensors):
        if x.shape != first.shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first.shape)} at entry "
                f"0 and {list(x.shape)} at entry {i}"
            )
    kind = common_dtype(tensors)
    widths = [prod(first.shape[dim:])] * len(tensors)
    rows = prod(first.shape[:dim])
    values = interleaved([cast(x.flat(), x.dtype, kind) for x in tensors], widths, rows)
    out = make(values, [*first.shape[:dim], len(tensors), *first.shape[dim:]], kind)
    if wants_gradient(*tensors):
        record(out, "Stack", tensors, lambda g: taken_apart(g, widths, rows))
    return out


def unbind(input: Tensor, dim: int = 0, **others) -> tuple:
    "The slices along a dimension, without it."
    from .indexing import select

    refuse_keywords("unbind", others)
    dim = one_dim(dim, input.ndim)
    return tuple(select(input, dim, i, "Unbind") for i in range(input.shape[dim]))


def split(
    input: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0, **others
) -> tuple:
    "Pieces along a dimension: all of one size but the last, or of the sizes given."
    from .indexing import narrow

    if "split_size" in others:
        split_size_or_sections = others.pop("split_size")
    refuse_keywords("split", others)
    dim = one_dim(dim, input.ndim)
    n = input.shape[dim]
    if isinstance(split_size_or_sections, int):
        size = split_size_or_sections
        if size <= 0:
            refuse("split into pieces of size 0")
        sizes = [min(size, n - start) for start in range(0, n, size)] or [0]
        name = "Split"
    else:
        sizes = list(split_size_or_sections)
        name = "SplitWithSizes"
        if sum(sizes) != n:
            raise RuntimeError(
                f"split_with_sizes expects split_sizes to sum exactly to {n} (input tensor's size "
                f"at dimension {dim}), but got split_sizes={sizes}"
            )
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(narrow(input, dim, start, size, name))
        start += size
    return tuple(pieces)


def chunk(input: Tensor, chunks: int, dim: int = 0, **others) -> tuple:
    "At most so many pieces of one size along a dimension."
    refuse_keywords("chunk", others)
    n = input.shape[one_dim(dim, input.ndim)]
    if n == 0:
        refuse("chunk of nothing")
    return split(input, -(-n // chunks), dim)


def meshgrid(*tensors, indexing: str | None = None, **others) -> tuple:
    "Coordinates of a grid: one tensor for each axis, in the shape of the grid."
    refuse_keywords("meshgrid", others)
    if len(tensors) == 1 and isinstance(tensors[0], tuple | list):
        tensors = tuple(tensors[0])
    if indexing != "ij":
        refuse(f"meshgrid(indexing={indexing!r})")
    tensors = [reshape(x, 1) if x.ndim == 0 else x for x in tensors]
    shape = [len(x.flat()) for x in tensors]
    grids = []
    for axis, x in enumerate(tensors):
        line = [1] * len(shape)
        line[axis] = -1
        grids.append(expand(reshape(x, *line), *shape))
    return tuple(grids)


def cartesian_prod(*tensors: Tensor) -> Tensor:
    "All combinations of one number from each tensor, as rows."
    if len(tensors) < 2:
        refuse("cartesian_prod of one tensor")
    grids = meshgrid(*tensors, indexing="ij")
    return stack([reshape(g, -1) for g in grids], 1)
