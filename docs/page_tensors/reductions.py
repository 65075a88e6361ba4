"""Operations along dimensions: sums, means, extremes, softmax, cumulative sums, order.

`lines_along` cuts a tensor into one list per line along the chosen dimensions; each operation is a
function of such a list. Its derivative makes a list of the same length.
"""

import math
from collections.abc import Callable
from operator import mul
from typing import NamedTuple

from . import numbers
from .autograd import record, wants_gradient
from .dtypes import FLOAT, bool_, cast, dtype, float32, int64
from .numbers import total
from .refusal import refuse, refuse_keywords
from .shapes import Lines, all_dims, lines_along, one_dim
from .tensor import Tensor, make


def lines_of(input: Tensor, dim: object, kind: dtype | None = None) -> tuple[Lines, list[list]]:
    "The lines of a tensor along dim, in the type `kind`."
    lines = lines_along(input.shape, all_dims(dim, input.ndim))
    flat = input.flat()
    if kind is not None:
        flat = cast(flat, input.dtype, kind)
    return lines, lines.split(flat)


def float_type(name: str, input: Tensor, wanted: dtype | None = None) -> dtype:
    "The floating-point type of a mean and its kind, which whole numbers do not have."
    kind = wanted or input.dtype
    if kind.category != FLOAT:
        raise RuntimeError(
            f"{name}(): could not infer output dtype. Input dtype must be either a floating point "
            f"or complex dtype. Got: {type_word(kind)}"
        )
    return kind


def type_word(kind: dtype) -> str:
    return {"int64": "Long", "bool": "Bool", "int32": "Int"}.get(kind.name, kind.name)


# --- sums -------------------------------------------------------------------------------------
def sum_(
    input: Tensor,
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: dtype | None = None,
    **others,
) -> Tensor:
    "Σ x along dim."
    refuse_keywords("sum", others)
    kind = dtype or (input.dtype if input.dtype.category == FLOAT else int64)
    lines, rows = lines_of(input, dim, kind)
    of = total if kind.category == FLOAT else sum
    out = make(kind.keep(list(map(of, rows))), lines.shape(keepdim), kind)
    if wants_gradient(input):
        record(out, "Sum", (input,), lambda g: (lines.spread(g),))
    return out


def mean(
    input: Tensor,
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: dtype | None = None,
    **others,
) -> Tensor:
    "Σ x / n along dim."
    refuse_keywords("mean", others)
    kind = float_type("mean", input, dtype)
    lines, rows = lines_of(input, dim, kind)
    n = lines.length
    means = [total(row) / n if n else math.nan for row in rows]
    out = make(kind.keep(means), lines.shape(keepdim), kind)
    if wants_gradient(input):
        record(out, "Mean", (input,), lambda g: (lines.spread([x / n for x in g]),))
    return out


def product(line: list) -> float:
    result = 1
    for x in line:
        result *= x
    return result


def products_of_others(line: list) -> list:
    "For each number the product of all others, right also where some are 0."
    before = 1.0
    result = []
    for x in line:
        result.append(before)
        before *= x
    after = 1.0
    for i in range(len(line) - 1, -1, -1):
        result[i] *= after
        after *= line[i]
    return result


def prod(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: dtype | None = None,
    **others,
) -> Tensor:
    "The product along dim."
    refuse_keywords("prod", others)
    kind = dtype or (input.dtype if input.dtype.category == FLOAT else int64)
    lines, rows = lines_of(input, dim, kind)
    values = list(map(product, rows))
    if kind.category == FLOAT:
        values = list(map(float, values))
    out = make(kind.keep(values), lines.shape(keepdim), kind)
    if wants_gradient(input):

        def pull(g):
            slopes = [[gi * p for p in products_of_others(row)] for gi, row in zip(g, rows)]
            return (lines.join(slopes),)

        record(out, "Prod", (input,), pull, (input,))
    return out


def cumsum(input: Tensor, dim: int, *, dtype: dtype | None = None, **others) -> Tensor:
    "Σ of all numbers up to this one, along dim."
    refuse_keywords("cumsum", others)
    kind = dtype or (input.dtype if input.dtype.category == FLOAT else int64)
    one_dim(dim, input.ndim)
    lines, rows = lines_of(input, dim if input.ndim else None, kind)

    def running(row: list) -> list:
        sums = []
        so_far = 0.0 if kind.category == FLOAT else 0
        for x in row:
            so_far += x
            sums.append(so_far)
        return sums

    out = make(kind.keep(lines.join(list(map(running, rows)))), input.shape, kind)
    if wants_gradient(input):

        def pull(g):
            return (lines.join([running(row[::-1])[::-1] for row in lines.split(g)]),)

        record(out, "Cumsum", (input,), pull)
    return out


# --- spread -----------------------------------------------------------------------------------
def line_variance(line: list, correction: float) -> float:
    "Σ (x − x̄)² / (n − correction)."
    n = len(line)
    if n == 0:
        return math.nan
    middle = total(line) / n
    squares = total((x - middle) * (x - middle) for x in line)
    freedom = max(n - correction, 0)
    if freedom == 0:
        return math.nan if squares == 0 or squares != squares else math.inf
    return squares / freedom


def spread_arguments(name: str, dim: object, unbiased: object, correction: object, others: dict):
    "dim and correction of var and std, which can be said in several ways."
    refuse_keywords(name, others)
    if isinstance(dim, bool):  # var(True)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction


def spread_of(
    name: str, input: Tensor, dim: object, keepdim: bool, correction: float, is_std: bool
) -> Tensor:
    "The variance along dim, or its root."
    if input.dtype.category != FLOAT:
        raise RuntimeError(f"{name}: only support floating point and complex dtypes")
    lines, rows = lines_of(input, dim)
    variances = [line_variance(row, correction) for row in rows]
    if is_std:
        variances = numbers.sqrt(variances)
    out = make(input.dtype.keep(variances), lines.shape(keepdim), input.dtype)
    if wants_gradient(input):
        freedom = max(lines.length - correction, 0)

        def pull(g):
            slopes = []
            for gi, row, value in zip(g, rows, variances):
                middle = total(row) / len(row)
                if is_std:
                    (scale,) = numbers.divide([gi], [value * freedom])
                    scale = 0.0 if value == 0 else scale
                else:
                    (scale,) = numbers.divide([2.0 * gi], [freedom])
                slopes.append([scale * (x - middle) for x in row])
            return (lines.join(slopes),)

        record(out, name.capitalize(), (input,), pull, (input, out) if is_std else (input,))
    return out


def var(
    input: Tensor,
    dim: object = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    **others,
) -> Tensor:
    "The variance along dim; divides by n − correction, which is 1 unless given."
    dim, correction = spread_arguments("var", dim, unbiased, correction, others)
    return spread_of("var", input, dim, keepdim, correction, False)


def std(
    input: Tensor,
    dim: object = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    **others,
) -> Tensor:
    "The root of the variance along dim."
    dim, correction = spread_arguments("std", dim, unbiased, correction, others)
    return spread_of("std", input, dim, keepdim, correction, True)


def norm(
    input: Tensor, p: object = "fro", dim: object = None, keepdim: bool = False, **others
) -> Tensor:
    "√Σ x² along dim; with another p (Σ |x|ᵖ)^(1/p) for p = 1, 2 or inf."
    refuse_keywords("norm", others)
    if p in ("fro", None):
        p = 2
    if p not in (1, 2, math.inf):
        refuse(f"norm(p={p})")
    if input.dtype.category != FLOAT:
        raise RuntimeError(
            "linalg.vector_norm: Expected a floating point or complex tensor as input. Got "
            f"{type_word(input.dtype)}"
        )
    lines, rows = lines_of(input, dim)
    values = input.dtype.keep([line_norm(row, p) for row in rows])
    out = make(values, lines.shape(keepdim), input.dtype)
    if wants_gradient(input):

        def pull(g):
            scales = zip(g, rows, values)
            return (lines.join([norm_slopes(gi, row, value, p) for gi, row, value in scales]),)

        record(out, "LinalgVectorNorm", (input,), pull, (input, out))
    return out


def line_norm(line: list, p: float) -> float:
    "(Σ |x|ᵖ)^(1/p) for p = 1, 2 or inf."
    if p == 1:
        return total(map(abs, line))
    if p == 2:
        return math.sqrt(total(map(mul, line, line)))
    return extreme(list(map(abs, line)), max)


def norm_slopes(g: float, line: list, value: float, p: float) -> list:
    "The gradient of a line from that of its norm."
    if p == 1:
        return [g * numbers.same_sign(x) for x in line]
    if p == 2:
        return [g * x / value if value else 0.0 for x in line]
    ties = sum(abs(x) == value for x in line)
    return [g / ties * numbers.same_sign(x) if abs(x) == value else 0.0 for x in line]


# --- extremes ---------------------------------------------------------------------------------
def extreme(line: list, of: Callable) -> float:
    "The largest or smallest number of a line; NaN if one is."
    best = of(line)
    if best != best:
        return best
    for x in line:
        if x != x:
            return x
    return best


def need_numbers(name: str, lines: Lines) -> None:
    if lines.length == 0 and lines.count:
        raise IndexError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument."
        )


def shared_among_ties(lines: Lines, rows: list[list], best: list, g: list) -> list:
    "A gradient in equal parts to all numbers of a line that are its extreme."
    slopes = []
    for gi, row, value in zip(g, rows, best):
        is_best = [x == value or (x != x and value != value) for x in row]
        part = gi / max(sum(is_best), 1)
        slopes.append([part if b else 0.0 for b in is_best])
    return lines.join(slopes)


def extreme_along(name: str, input: Tensor, dim: object, keepdim: bool, of: Callable) -> Tensor:
    "The extremes of lines, with the gradient shared among ties."
    lines, rows = lines_of(input, dim)
    need_numbers(name, lines)
    best = [extreme(row, of) for row in rows]
    out = make(best, lines.shape(keepdim), input.dtype)
    if wants_gradient(input):
        record(
            out,
            name.capitalize(),
            (input,),
            lambda g: (shared_among_ties(lines, rows, best, g),),
            (input, out),
        )
    return out


def amax(input: Tensor, dim: object = (), keepdim: bool = False, **others) -> Tensor:
    "The largest number along dim."
    refuse_keywords("amax", others)
    return extreme_along("amax", input, dim, keepdim, max)


def amin(input: Tensor, dim: object = (), keepdim: bool = False, **others) -> Tensor:
    "The smallest number along dim."
    refuse_keywords("amin", others)
    return extreme_along("amin", input, dim, keepdim, min)


class ValuesAndIndices(NamedTuple):
    "Numbers along a dimension, and where they stood."

    values: Tensor
    indices: Tensor


def place_of(row: list, value: float) -> int:
    "Where a number stands first; a NaN too."
    if value != value:
        for i, x in enumerate(row):
            if x != x:
                return i
    return row.index(value)


def best_and_place(
    name: str, input: Tensor, dim: int, keepdim: bool, of: Callable
) -> ValuesAndIndices:
    "The extreme of each line and its place, to which the gradient goes."
    dim = one_dim(dim, input.ndim)
    lines, rows = lines_of(input, dim if input.ndim else None)
    if lines.length == 0:
        raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")
    best = [extreme(row, of) for row in rows]
    at = [place_of(row, value) for row, value in zip(rows, best)]
    out = make(best, lines.shape(keepdim), input.dtype)
    where = make(at, lines.shape(keepdim), int64)
    if wants_gradient(input):

        def pull(g):
            slopes = [[0.0] * lines.length for _ in rows]
            for slope, place, gi in zip(slopes, at, g):
                slope[place] = gi
            return (lines.join(slopes),)

        record(out, name.capitalize(), (input,), pull, (where,))
    return ValuesAndIndices(out, where)


def max_(input: Tensor, dim: object = None, keepdim: bool = False, **others):
    "The largest number; with dim also where it stands; of two tensors the maximum."
    from .elementwise import maximum

    if "other" in others:
        dim = others.pop("other")
    refuse_keywords("max", others)
    if isinstance(dim, Tensor):
        return maximum(input, dim)
    if dim is None:
        return all_of_it("max", input, max)
    return best_and_place("max", input, dim, keepdim, max)


def min_(input: Tensor, dim: object = None, keepdim: bool = False, **others):
    "The smallest number; with dim also where it stands; of two tensors the minimum."
    from .elementwise import minimum

    if "other" in others:
        dim = others.pop("other")
    refuse_keywords("min", others)
    if isinstance(dim, Tensor):
        return minimum(input, dim)
    if dim is None:
        return all_of_it("min", input, min)
    return best_and_place("min", input, dim, keepdim, min)


def all_of_it(name: str, input: Tensor, of: Callable) -> Tensor:
    if input.shape.numel() == 0:
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )
    return extreme_along(name, input, None, False, of)


def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False, **others) -> tuple:
    "Smallest and largest number."
    refuse_keywords("aminmax", others)
    if wants_gradient(input):
        refuse("the gradient of aminmax")
    if dim is None and keepdim:
        refuse("aminmax(keepdim=True) without dim")
    return MinMax(
        amin(input, () if dim is None else dim, keepdim),
        amax(input, () if dim is None else dim, keepdim),
    )


class MinMax(NamedTuple):
    "Smallest and largest number."

    min: Tensor
    max: Tensor


def argument(name: str, input: Tensor, dim: int | None, keepdim: bool, of: Callable) -> Tensor:
    "Where the extreme of each line stands."
    if input.dtype is bool_:
        raise RuntimeError(f"\"{name}_cpu\" not implemented for 'Bool'")
    lines, rows = lines_of(input, dim if input.ndim else None)
    if lines.length == 0:
        raise IndexError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument."
        )
    at = [place_of(row, extreme(row, of)) for row in rows]
    return make(at, lines.shape(keepdim), int64)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False, **others) -> Tensor:
    "Where the largest number stands; of equal ones the first."
    refuse_keywords("argmax", others)
    return argument("argmax", input, dim, keepdim, max)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False, **others) -> Tensor:
    "Where the smallest number stands; of equal ones the first."
    refuse_keywords("argmin", others)
    return argument("argmin", input, dim, keepdim, min)


# --- truth ------------------------------------------------------------------------------------
def any_(input: Tensor, dim: object = None, keepdim: bool = False, **others) -> Tensor:
    "Is one of them not 0?"
    refuse_keywords("any", others)
    lines, rows = lines_of(input, dim)
    return make(list(map(any, rows)), lines.shape(keepdim), bool_)


def all_(input: Tensor, dim: object = None, keepdim: bool = False, **others) -> Tensor:
    "Is none of them 0?"
    refuse_keywords("all", others)
    lines, rows = lines_of(input, dim)
    return make(list(map(all, rows)), lines.shape(keepdim), bool_)


# --- softmax ----------------------------------------------------------------------------------
def line_logsumexp(line: list) -> float:
    "log Σ eˣ without overflow."
    top = max(line, default=-math.inf)
    if math.isinf(top):
        top = 0.0
    (result,) = numbers.log([total(numbers.exp([x - top for x in line]))])
    return result + top


def logsumexp(input: Tensor, dim: object, keepdim: bool = False, **others) -> Tensor:
    "log Σ eˣ along dim."
    refuse_keywords("logsumexp", others)
    kind = input.dtype if input.dtype.category == FLOAT else float32
    lines, rows = lines_of(input, dim, kind)
    values = kind.keep(list(map(line_logsumexp, rows)))
    out = make(values, lines.shape(keepdim), kind)
    if wants_gradient(input):

        def pull(g):
            slopes = []
            for gi, row, value in zip(g, rows, values):
                slopes.append([gi * p for p in numbers.exp([x - value for x in row])])
            return (lines.join(slopes),)

        record(out, "Logsumexp", (input,), pull, (input, out))
    return out


def line_softmax(line: list) -> list:
    "eˣ / Σ eˣ without overflow."
    top = extreme(line, max)
    weights = numbers.exp([x - top for x in line])
    all_of_it = total(weights)
    return [w / all_of_it for w in weights]


def line_log_softmax(line: list) -> list:
    top = extreme(line, max)
    if not math.isfinite(top):
        return [math.nan] * len(line)
    rest = math.log(total(numbers.exp([x - top for x in line])))
    return [x - top - rest for x in line]


def softmax_kind(name: str, input: Tensor, wanted: dtype | None) -> dtype:
    kind = wanted or input.dtype
    if kind.category != FLOAT:
        raise RuntimeError(
            f"\"{name}_lastdim_kernel_impl\" not implemented for '{type_word(kind)}'"
        )
    return kind


def softmax(input: Tensor, dim: int, *, dtype: dtype | None = None, **others) -> Tensor:
    "eˣ / Σ eˣ along dim."
    refuse_keywords("softmax", others)
    kind = softmax_kind("softmax", input, dtype)
    one_dim(dim, input.ndim)
    lines, rows = lines_of(input, dim if input.ndim else None, kind)
    shares = [line_softmax(row) if row else [] for row in rows]
    out = make(kind.keep(lines.join(shares)), input.shape, kind)
    if wants_gradient(input):
        shares = lines.split(out.flat())

        def pull(g):
            slopes = []
            for row, p in zip(lines.split(g), shares):
                average = total(map(mul, row, p))
                slopes.append([pi * (gi - average) for gi, pi in zip(row, p)])
            return (lines.join(slopes),)

        record(out, "Softmax", (input,), pull, (out,))
    return out


def log_softmax(
    input: Tensor, dim: int, *, dtype: dtype | None = None, out: Tensor | None = None, **others
) -> Tensor:
    "x − log Σ eˣ along dim."
    refuse_keywords("log_softmax", others)
    kind = softmax_kind("log_softmax", input, dtype)
    one_dim(dim, input.ndim)
    lines, rows = lines_of(input, dim if input.ndim else None, kind)
    logs = [line_log_softmax(row) if row else [] for row in rows]
    result = make(kind.keep(lines.join(logs)), input.shape, kind)
    if wants_gradient(input):
        shares = [numbers.exp(row) for row in lines.split(result.flat())]

        def pull(g):
            slopes = []
            for row, p in zip(lines.split(g), shares):
                together = total(row)
                slopes.append([gi - pi * together for gi, pi in zip(row, p)])
            return (lines.join(slopes),)

        if out is not None:
            raise RuntimeError(
                "log_softmax(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad."
            )
        record(result, "LogSoftmax", (input,), pull, (result,))
    if out is None:
        return result
    if out.shape != result.shape or out.dtype is not result.dtype:
        refuse("log_softmax(out=…) of another shape or type")
    out.write(list(result.flat()))
    return out


# --- order ------------------------------------------------------------------------------------
def ordered(row: list, descending: bool) -> list[int]:
    "The places of a line from its smallest number to its largest; NaN is the largest."
    return sorted(
        range(len(row)),
        key=lambda i: (math.inf, 1) if row[i] != row[i] else (row[i], 0),
        reverse=descending,
    )


def in_order(row: list, descending: bool) -> list[int]:
    "As `ordered`; equal numbers keep their order."
    if descending:
        return [len(row) - 1 - i for i in ordered(row[::-1], False)][::-1]
    return ordered(row, False)


def sort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None, **others
) -> ValuesAndIndices:
    "The numbers in order along dim, and where each stood."
    refuse_keywords("sort", others)
    if input.dtype is bool_ and input.shape.numel() > 16 and not stable:
        refuse("sort of a bool tensor without stable=True")
    one_dim(dim, input.ndim)
    lines, rows = lines_of(input, dim if input.ndim else None)
    orders = [in_order(row, descending) for row in rows]
    values = [[row[i] for i in order] for row, order in zip(rows, orders)]
    out = make(lines.join(values), input.shape, input.dtype)
    where = make(lines.join(orders), input.shape, int64)
    if wants_gradient(input):

        def pull(g):
            slopes = []
            for row, order in zip(lines.split(g), orders):
                slope = [0.0] * len(row)
                for gi, i in zip(row, order):
                    slope[i] = gi
                slopes.append(slope)
            return (lines.join(slopes),)

        record(out, "Sort", (input,), pull, (where,))
    return ValuesAndIndices(out, where)


def argsort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False, **others
) -> Tensor:
    "Where the numbers stand, in their order."
    refuse_keywords("argsort", others)
    return sort(input, dim, descending, stable).indices


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    **others,
) -> Tensor:
    "Each number once, in order."
    refuse_keywords("unique", others)
    if return_inverse or return_counts or dim is not None:
        refuse("unique(return_inverse=…, return_counts=…, dim=…)")
    if input.dtype is bool_:
        refuse("unique of a bool tensor")
    if wants_gradient(input):
        refuse("the gradient of unique")
    values = input.flat()
    if any(x != x for x in values):
        refuse("unique of NaN")
    distinct = list(set(values))
    distinct.sort()
    return make(distinct, (len(distinct),), input.dtype)


def quantile(
    input: Tensor,
    q: object,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    **others,
) -> Tensor:
    "The number below which a share q of the line lies, between two neighbours linearly."
    refuse_keywords("quantile", others)
    if interpolation != "linear":
        refuse(f"quantile(interpolation={interpolation!r})")
    if isinstance(q, Tensor):
        refuse("quantile(q=tensor)")
    if not 0 <= q <= 1:
        raise RuntimeError(f"quantile() q must be in the range [0, 1] but got {q}")
    if wants_gradient(input):
        refuse("the gradient of quantile")
    kind = input.dtype
    if kind.name not in ("float32", "float64"):
        raise RuntimeError("quantile() input tensor must be either float or double dtype")
    lines, rows = lines_of(input, dim)
    if lines.length == 0:
        raise RuntimeError("quantile() input tensor must be non-empty")
    values = []
    (q,) = kind.keep([float(q)])
    for row in rows:
        in_order_now = [row[i] for i in ordered(row, False)]
        (rank,) = kind.keep([q * (len(row) - 1)])
        below = math.floor(rank)
        low, high = in_order_now[below], in_order_now[min(below + 1, len(row) - 1)]
        share = rank - below
        if in_order_now[-1] != in_order_now[-1]:
            values.append(math.nan)
        elif share < 0.5:
            values.append(low + share * (high - low) if share else low)
        else:
            values.append(high - (high - low) * (1 - share))
    return make(kind.keep(values), lines.shape(keepdim), kind)
