"""Products of vectors and matrices.

A product is rows times columns: every number of the result is a sum of products of a row of the
left and a column of the right matrix.
"""

from math import prod
from operator import mul

from .autograd import record, wants_gradient
from .dtypes import FLOAT, dtype
from .numbers import total
from .refusal import refuse, refuse_keywords
from .shapes import broadcast_two
from .shaping import expand, reshape, transpose
from .tensor import Tensor, make


def product_of(a: list, b: list, n: int, k: int, m: int) -> list:
    "(n, k) times (k, m), as lists."
    columns = [b[j::m] for j in range(m)]
    values = []
    for i in range(n):
        row = a[i * k : i * k + k]
        values.extend([total(map(mul, row, column)) for column in columns])
    return values


def turned(flat: list, n: int, m: int) -> list:
    "The transposed of an (n, m) matrix."
    values = []
    for j in range(m):
        values.extend(flat[j::m] if n else [])
    return values


def same_types(name: str, *tensors: Tensor) -> dtype:
    "The type that all have."
    kinds = {x.dtype for x in tensors}
    if len(kinds) > 1:
        first, second = tensors[0].dtype, tensors[1].dtype
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {c_name(first)} != {c_name(second)}"
        )
    kind = tensors[0].dtype
    if kind.category != FLOAT:
        if kind.name == "bool":
            refuse(f"{name} of bool tensors")
    return kind


def c_name(kind: dtype) -> str:
    "What the error messages of torch call a type."
    names = {
        "float64": "double",
        "float32": "float",
        "int64": "long long",
        "bfloat16": "c10::BFloat16",
    }
    return names.get(kind.name, kind.name)


def rounded(values: list, kind: dtype) -> list:
    if kind.category != FLOAT:
        values = list(map(int, values))
    return kind.keep(values)


def multiply(name: str, a: Tensor, b: Tensor, sizes: tuple[int, int, int], shape: tuple) -> Tensor:
    "The product of two matrices, read from tensors of any fitting shape."
    kind = same_types(name.lower(), a, b)
    n, k, m = sizes
    x = a.flat()
    y = b.flat()
    out = make(rounded(product_of(x, y, n, k, m), kind), shape, kind)
    if wants_gradient(a, b):

        def pull(g):
            left = right = None
            if a.requires_grad:
                left = product_of(g, turned(y, k, m), n, m, k)
            if b.requires_grad:
                right = product_of(turned(x, n, k), g, k, n, m)
            return left, right

        reads = [b] if a.requires_grad else []
        reads += [a] if b.requires_grad else []
        record(out, name, (a, b), pull, reads)
    return out


def matmul(input: Tensor, other: Tensor, **others) -> Tensor:
    "Products of vectors, of matrices, and of batches of them."
    refuse_keywords("matmul", others)
    if not isinstance(other, Tensor):
        raise TypeError(f"matmul(): argument 'other' must be Tensor, not {type(other).__name__}")
    if input.ndim == 0 or other.ndim == 0:
        raise RuntimeError(
            "both arguments to matmul need to be at least 1D, but they are "
            f"{input.ndim}D and {other.ndim}D"
        )
    if input.ndim == 1 and other.ndim == 1:
        return dot(input, other)
    if input.ndim == 2 and other.ndim == 1:
        return mv(input, other)
    if input.ndim <= 2 and other.ndim == 2:
        if input.ndim == 2:
            return mm(input, other)
        k, m = other.shape
        if input.shape[0] != k:
            raise RuntimeError(
                f"size mismatch, got input ({k}), mat ({k}x{m}), vec ({input.shape[0]})"
            )
        return multiply("Squeeze", input, other, (1, k, m), (m,))
    if other.ndim <= 2 and input.ndim > 2:
        k = input.shape[-1]
        m = other.shape[1] if other.ndim == 2 else 1
        n = prod(input.shape[:-1])
        if other.shape[0] != k:
            raise RuntimeError(
                f"mat1 and mat2 shapes cannot be multiplied ({n}x{k} and {other.shape[0]}x{m})"
            )
        tail = (m,) if other.ndim == 2 else ()
        return multiply("UnsafeView", input, other, (n, k, m), (*input.shape[:-1], *tail))
    return batched(input, other)


def batched(input: Tensor, other: Tensor) -> Tensor:
    "Products of batches of matrices, broadcast against each other."
    from .shaping import stack, unbind

    if input.ndim == 1 or other.ndim == 1:
        refuse("matmul of a vector and a batch")
    batch = broadcast_two(input.shape[:-2], other.shape[:-2])
    n = batch.numel()
    a = reshape(expand(input, *batch, *input.shape[-2:]), n, *input.shape[-2:])
    b = reshape(expand(other, *batch, *other.shape[-2:]), n, *other.shape[-2:])
    products = [mm(x, y) for x, y in zip(unbind(a), unbind(b))]
    if not products:
        refuse("matmul of an empty batch")
    out = stack(products)
    return reshape(out, *batch, *out.shape[-2:])


def dot(input: Tensor, tensor: Tensor, **others) -> Tensor:
    "Σ xᵢyᵢ."
    refuse_keywords("dot", others)
    if input.ndim != 1 or tensor.ndim != 1:
        raise RuntimeError(f"1D tensors expected, but got {input.ndim}D and {tensor.ndim}D tensors")
    if input.dtype is not tensor.dtype:
        raise RuntimeError(
            f"dot : expected both vectors to have same dtype, but found "
            f"{type_title(input.dtype)} and {type_title(tensor.dtype)}"
        )
    k = len(input.flat())
    if k != len(tensor.flat()):
        raise RuntimeError(
            "inconsistent tensor size, expected tensor ["
            + str(k)
            + "] and src ["
            + str(len(tensor.flat()))
            + "] to have the same number of elements, but got "
            f"{k} and {len(tensor.flat())} elements respectively"
        )
    return multiply("Dot", input, tensor, (1, k, 1), ())


def type_title(kind: dtype) -> str:
    return {"float64": "Double", "float32": "Float", "int64": "Long", "bool": "Bool"}.get(
        kind.name, kind.name
    )


def mv(input: Tensor, vec: Tensor, **others) -> Tensor:
    "A matrix times a vector."
    refuse_keywords("mv", others)
    if input.ndim != 2 or vec.ndim != 1:
        refuse("mv of other shapes")
    n, k = input.shape
    if vec.shape[0] != k:
        raise RuntimeError(f"size mismatch, got input ({n}), mat ({n}x{k}), vec ({vec.shape[0]})")
    return multiply("Mv", input, vec, (n, k, 1), (n,))


def mm(input: Tensor, mat2: Tensor, **others) -> Tensor:
    "A matrix times a matrix."
    refuse_keywords("mm", others)
    if input.ndim != 2 or mat2.ndim != 2:
        raise RuntimeError("self must be a matrix" if input.ndim != 2 else "mat2 must be a matrix")
    n, k = input.shape
    if mat2.shape[0] != k:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({n}x{k} and {mat2.shape[0]}x{mat2.shape[1]})"
        )
    m = mat2.shape[1]
    return multiply("Mm", input, mat2, (n, k, m), (n, m))


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **others
) -> Tensor:
    "β·input + α·mat1·mat2."
    from .elementwise import add
    from .elementwise import mul as times

    refuse_keywords("addmm", others)
    if input.dtype is not mat1.dtype:
        raise RuntimeError("self and mat2 must have the same dtype")
    if beta == 0:
        refuse("addmm(beta=0)")
    product = mm(mat1, mat2)
    if alpha != 1:
        product = times(product, alpha)
    return add(input if beta == 1 else times(input, beta), product)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **others) -> Tensor:
    "x·wᵀ + b."
    from .elementwise import add

    refuse_keywords("linear", others)
    if weight.ndim != 2:
        refuse("linear with a weight that is no matrix")
    out = matmul(input, transpose(weight, 0, 1))
    if bias is not None:
        same_types("linear", out, bias)
        out = add(out, bias)
    return out


def outer(input: Tensor, vec2: Tensor, **others) -> Tensor:
    "All products of a number of one and a number of the other."
    from .elementwise import mul as times

    refuse_keywords("outer", others)
    return times(reshape(input, -1, 1), vec2)
