"""Operations number by number, in two tables: what each computes, and its derivative.

A derivative is a function (g, x, y, out) of lists: g = ∂L/∂out, the operands x and y, the result.
It returns ∂L/∂x. `reads` says which of them it looks at, so that a change in place of one of these
is noticed.
"""

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from operator import add as plus
from operator import mul as times
from operator import sub as minus
from typing import NamedTuple

from . import numbers
from .autograd import adopt, record, wants_gradient
from .dtypes import (
    BOOL,
    FLOAT,
    INT,
    bool_,
    cast,
    dtype,
    dtype_of_number,
    finfo,
    float32,
    int64,
    promote_types,
)
from .refusal import refuse, refuse_keywords
from .shapes import Size, broadcast, broadcast_shapes, broadcast_two, sum_to
from .tensor import Tensor, make, numbers_of


# --- the type and shape of a result -----------------------------------------------------------
def result_type(*operands: object) -> dtype:
    "The type that operands have together; tensors with dimensions decide within a category."
    kinds = []
    for x in operands:
        if isinstance(x, Tensor):
            kinds.append((x.dtype, 0 if x.shape else 1))
        elif isinstance(x, bool):
            kinds.append((bool_, 2))
        elif isinstance(x, int):
            kinds.append((int64, 2))
        elif isinstance(x, float):
            kinds.append((float32, 2))
        else:
            refuse(f"arithmetic with {type(x).__name__}")
    return common_type(tuple(kinds))


@lru_cache(1024)
def common_type(kinds: tuple) -> dtype:
    "Tensors with dimensions come first, then those without, then Python's numbers."
    levels: list[dtype | None] = [None, None, None]
    for kind, level in kinds:
        before = levels[level]
        levels[level] = kind if before is None else promote_types(before, kind)
    result = None
    for lower in reversed(levels):
        if lower is None:
            continue
        if result is None or (lower.category >= result.category and lower.category != BOOL):
            result = lower
        else:
            result = promote_types(lower, result)
    return result


def paired(a: object, b: object) -> tuple[list, list, dtype, Size]:
    "Two operands as lists of one type and length."
    if a.__class__ is Tensor and b.__class__ is Tensor and a.dtype is b.dtype:
        kind = a.dtype
        x = a.flat()
        y = b.flat()
        if a.shape == b.shape:
            return x, y, kind, a.shape
        shape = broadcast_two(a.shape, b.shape)
    else:
        kind = result_type(a, b)
        x, x_shape, x_kind = numbers_of(a)
        y, y_shape, y_kind = numbers_of(b)
        shape = broadcast_two(x_shape, y_shape)
        x, y = cast(x, x_kind, kind), cast(y, y_kind, kind)
        return broadcast(x, x_shape, shape), broadcast(y, y_shape, shape), kind, shape
    return broadcast(x, a.shape, shape), broadcast(y, b.shape, shape), kind, shape


# --- one operand ------------------------------------------------------------------------------
class Unary(NamedTuple):
    "A function of one number, and its derivative as (g, x, out) → ∂L/∂x."

    of: Callable[[list], list]
    derivative: Callable | None = None  # None: 0 everywhere
    reads: str = ""  # "x", "out" or nothing
    name: str = ""
    ints: bool = False  # a function of whole numbers too


def scaled(g: list, slope: list) -> list:
    return list(map(times, g, slope))


def softplus_of(x: float) -> float:
    "log(1 + eˣ) without overflow."
    return max(x, 0.0) + math.log1p(math.exp(-abs(x))) if x == x else x


def log_sigmoid_of(x: float) -> float:
    return min(x, 0.0) - math.log1p(math.exp(-abs(x))) if x == x else x


def entropy_of(x: float) -> float:
    "−x·log x, and 0 at 0."
    if x > 0:
        return -x * math.log(x)
    if x == 0:
        return 0.0
    return x if x != x else -math.inf


UNARY = {
    "exp": Unary(numbers.exp, lambda g, x, out: scaled(g, out), "out"),
    "expm1": Unary(
        numbers.expm1, lambda g, x, out: [gi * (yi + 1) for gi, yi in zip(g, out)], "out"
    ),
    "log": Unary(numbers.log, lambda g, x, out: numbers.divide(g, x), "x"),
    "log1p": Unary(numbers.log1p, lambda g, x, out: numbers.divide(g, [xi + 1 for xi in x]), "x"),
    "sqrt": Unary(numbers.sqrt, lambda g, x, out: numbers.divide(g, [2 * yi for yi in out]), "out"),
    "rsqrt": Unary(
        numbers.rsqrt,
        lambda g, x, out: [
            -0.5 * gi * yi**3 if math.isfinite(yi) else -0.5 * gi * yi for gi, yi in zip(g, out)
        ],
        "out",
    ),
    "square": Unary(
        lambda x: list(map(times, x, x)),
        lambda g, x, out: [gi * (2 * xi) for gi, xi in zip(g, x)],
        "x",
        "Pow",
        ints=True,
    ),
    "neg": Unary(
        lambda x: list(map(operator.neg, x)),
        lambda g, x, out: list(map(operator.neg, g)),
        ints=True,
    ),
    "abs": Unary(
        lambda x: list(map(abs, x)),
        lambda g, x, out: scaled(g, list(map(numbers.same_sign, x))),
        "x",
        ints=True,
    ),
    "sign": Unary(
        lambda x: list(map(numbers.same_sign, x)), lambda g, x, out: [0.0] * len(g), ints=True
    ),
    "reciprocal": Unary(
        numbers.reciprocal, lambda g, x, out: [-gi * (yi * yi) for gi, yi in zip(g, out)], "out"
    ),
    "sin": Unary(numbers.sin, lambda g, x, out: scaled(g, numbers.cos(x)), "x"),
    "cos": Unary(
        numbers.cos, lambda g, x, out: [-gi * si for gi, si in zip(g, numbers.sin(x))], "x"
    ),
    "tanh": Unary(
        lambda x: list(map(math.tanh, x)),
        lambda g, x, out: [gi * (1 - yi * yi) for gi, yi in zip(g, out)],
        "out",
    ),
    "sigmoid": Unary(
        numbers.sigmoid,
        lambda g, x, out: [gi * ((1 - yi) * yi) for gi, yi in zip(g, out)],
        "out",
    ),
    "log_sigmoid": Unary(
        lambda x: list(map(log_sigmoid_of, x)),
        lambda g, x, out: scaled(g, numbers.sigmoid(list(map(operator.neg, x)))),
        "x",
        "LogSigmoid",
    ),
    "entr": Unary(
        lambda x: list(map(entropy_of, x)),
        lambda g, x, out: [gi * (-li - 1) for gi, li in zip(g, numbers.log(x))],
        "x",
        "SpecialEntr",
    ),
    "relu": Unary(
        lambda x: [xi * 0 if xi < 0 else xi for xi in x],
        lambda g, x, out: [gi if yi > 0 else 0.0 for gi, yi in zip(g, out)],
        "out",
        ints=True,
    ),
    "floor": Unary(numbers.whole_part(math.floor), lambda g, x, out: [0.0] * len(g), ints=True),
    "ceil": Unary(numbers.whole_part(math.ceil), lambda g, x, out: [0.0] * len(g), ints=True),
    "round": Unary(
        lambda x: list(map(numbers.round_half_to_even, x)),
        lambda g, x, out: [0.0] * len(g),
        ints=True,
    ),
}
WHOLE = {"floor", "ceil", "round"}  # whole numbers stay as they are


def apply_unary(name: str, input: Tensor) -> Tensor:
    "Compute an entry of UNARY, and remember it."
    entry = UNARY[name]
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}(): argument 'input' must be Tensor, not {type(input).__name__}")
    kind = input.dtype
    x = input.flat()
    if kind.category == BOOL and entry.ints and name not in ("abs", "square"):
        if name != "sign":
            refuse(f"{name} of a bool tensor")
    if kind.category != FLOAT:
        if not entry.ints:
            x = cast(x, kind, float32)
            kind = float32
        elif name in WHOLE:
            return make(list(x), input.shape, kind)
    values = entry.of(x)
    if kind.category == INT and name == "sign":
        values = list(map(int, values))
    if name == "square" and kind is bool_:
        kind = int64
        values = list(map(int, values))
    values = kind.keep(values)
    out = make(values, input.shape, kind)
    if kind.category == FLOAT and wants_gradient(input):
        reads = {"x": (input,), "out": (out,), "": ()}[entry.reads]
        record(
            out,
            entry.name or name.capitalize(),
            (input,),
            lambda g: (entry.derivative(g, x, values),),
            reads,
        )
    return out


def unary(name: str) -> Callable[..., Tensor]:
    "The function of a tensor that an entry of UNARY stands for."

    def of_tensor(input: Tensor, **others) -> Tensor:
        refuse_keywords(name, others)
        return apply_unary(name, input)

    of_tensor.__name__ = name
    of_tensor.__doc__ = f"{name}(x), number by number."
    return of_tensor


exp = unary("exp")
expm1 = unary("expm1")
log = unary("log")
log1p = unary("log1p")
sqrt = unary("sqrt")
rsqrt = unary("rsqrt")
square = unary("square")
neg = unary("neg")
absolute = unary("abs")
sign = unary("sign")
reciprocal = unary("reciprocal")
sin = unary("sin")
cos = unary("cos")
tanh = unary("tanh")
sigmoid = unary("sigmoid")
logsigmoid = unary("log_sigmoid")
entr = unary("entr")
floor = unary("floor")
ceil = unary("ceil")
round_ = unary("round")


def relu(input: Tensor, inplace: bool = False, **others) -> Tensor:
    refuse_keywords("relu", others)
    if inplace:
        refuse("relu(inplace=True)")
    return apply_unary("relu", input)


# --- two operands -----------------------------------------------------------------------------
class Binary(NamedTuple):
    "A function of two numbers, and its derivatives as (g, x, y, out) → ∂L/∂x and ∂L/∂y."

    of: Callable[[list, list], list]
    left: Callable
    right: Callable
    left_reads: str = ""  # what `left` looks at: "x", "y", "out"
    right_reads: str = ""


def share_of_maximum(g: list, mine: list, theirs: list) -> list:
    "The gradient of a maximum: half of it where the two are equal."
    return [0.0 if b > a else gi / 2 if a == b else gi for gi, a, b in zip(g, mine, theirs)]


def share_of_minimum(g: list, mine: list, theirs: list) -> list:
    return [0.0 if b < a else gi / 2 if a == b else gi for gi, a, b in zip(g, mine, theirs)]


def power_left(g: list, x: list, y: list, out: list) -> list:
    "∂x^y/∂x = y·x^(y−1), and 0 for y = 0."
    below = numbers.power(x, [yi - 1 for yi in y])
    return [0.0 if yi == 0 else gi * (yi * pi) for gi, yi, pi in zip(g, y, below)]


def power_right(g: list, x: list, y: list, out: list) -> list:
    "∂x^y/∂y = x^y·log x, and 0 where x = 0 and y ≥ 0."
    logs = numbers.log(x)
    return [
        0.0 if xi == 0 and yi >= 0 else gi * (oi * li)
        for gi, xi, yi, oi, li in zip(g, x, y, out, logs)
    ]


def log_of_two(x: float, y: float) -> float:
    "log(eˣ + eʸ) without overflow."
    if x == y and math.isinf(x):
        return x
    return max(x, y) + math.log1p(math.exp(-abs(x - y))) if x == x and y == y else math.nan


def negative(values: list) -> list:
    return list(map(operator.neg, values))


BINARY = {
    "add": Binary(
        lambda x, y: list(map(plus, x, y)), lambda g, x, y, out: g, lambda g, x, y, out: g
    ),
    "sub": Binary(
        lambda x, y: list(map(minus, x, y)),
        lambda g, x, y, out: g,
        lambda g, x, y, out: negative(g),
    ),
    "mul": Binary(
        lambda x, y: list(map(times, x, y)),
        lambda g, x, y, out: scaled(g, y),
        lambda g, x, y, out: scaled(g, x),
        "y",
        "x",
    ),
    "div": Binary(
        numbers.divide,
        lambda g, x, y, out: numbers.divide(g, y),
        lambda g, x, y, out: [
            -gi * qi for gi, qi in zip(g, numbers.divide(numbers.divide(x, y), y))
        ],
        "y",
        "xy",
    ),
    "pow": Binary(numbers.power, power_left, power_right, "xy", "xyo"),
    "maximum": Binary(
        numbers.larger_of,
        lambda g, x, y, out: share_of_maximum(g, x, y),
        lambda g, x, y, out: share_of_maximum(g, y, x),
        "xy",
        "xy",
    ),
    "minimum": Binary(
        numbers.smaller_of,
        lambda g, x, y, out: share_of_minimum(g, x, y),
        lambda g, x, y, out: share_of_minimum(g, y, x),
        "xy",
        "xy",
    ),
    "logaddexp": Binary(
        lambda x, y: list(map(log_of_two, x, y)),
        lambda g, x, y, out: scaled(g, numbers.exp(list(map(minus, x, out)))),
        lambda g, x, y, out: scaled(g, numbers.exp(list(map(minus, y, out)))),
        "xo",
        "yo",
    ),
}


def apply_binary(name: str, a: object, b: object, kind: dtype | None = None) -> Tensor:
    "Compute an entry of BINARY, and remember it."
    entry = BINARY[name]
    x, y, common, shape = paired(a, b)
    if kind is not None and kind is not common:
        x = cast(x, common, kind)
        y = cast(y, common, kind)
        common = kind
    values = common.keep(entry.of(x, y))
    out = make(values, shape, common)
    if common.category == FLOAT and wants_gradient(a, b):
        left_is_asked = isinstance(a, Tensor) and a.requires_grad
        right_is_asked = isinstance(b, Tensor) and b.requires_grad

        def pull(g):
            left = right = None
            if left_is_asked:
                left = sum_to(entry.left(g, x, y, values), shape, a.shape)
            if right_is_asked:
                right = sum_to(entry.right(g, x, y, values), shape, b.shape)
            return left, right

        looked_at = (entry.left_reads if left_is_asked else "") + (
            entry.right_reads if right_is_asked else ""
        )
        reads = []
        for letter, tensor in (("x", a), ("y", b), ("o", out)):
            if letter in looked_at:
                reads.append(tensor if isinstance(tensor, Tensor) else A_NUMBER)
        record(out, NODE_NAMES.get(name) or name.capitalize(), (a, b), pull, reads)
    return out


A_NUMBER = make([0.0], (), float32)  # stands for a Python number, which nobody can change
NODE_NAMES = {"logaddexp": "Logaddexp"}


def refuse_bool_subtraction(*operands: object) -> None:
    "Torch has no difference of booleans either."
    if any(isinstance(x, Tensor) and x.dtype is bool_ for x in operands):
        if all(
            isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype is bool_) for x in operands
        ):
            raise RuntimeError(
                "Subtraction, the `-` operator, with two bool tensors is not supported. Use the "
                "`^` or `logical_xor()` operator instead."
            )
        for x in operands:
            if isinstance(x, Tensor) and x.dtype is bool_:
                raise RuntimeError(
                    "Subtraction, the `-` operator, with a bool tensor is not supported. If you "
                    "are trying to invert a mask, use the `~` or `logical_not()` operator instead."
                )


def times_alpha(other: object, alpha: float, input: object) -> object:
    "α·other, for the keyword alpha of add and sub."
    if alpha == 1:
        return other
    if isinstance(alpha, float) and result_type(input, other).category != FLOAT:
        raise RuntimeError(
            "For integral input tensors, argument alpha must not be a floating point number."
        )
    if result_type(input, other).category == BOOL:
        refuse("alpha for bool tensors")
    return mul(other, alpha) if isinstance(other, Tensor) else other * alpha


def add(input: object, other: object, *, alpha: float = 1, **others) -> Tensor:
    refuse_keywords("add", others)
    return apply_binary("add", input, times_alpha(other, alpha, input))


def sub(input: object, other: object, *, alpha: float = 1, **others) -> Tensor:
    refuse_keywords("sub", others)
    refuse_bool_subtraction(input, other)
    return apply_binary("sub", input, times_alpha(other, alpha, input))


def mul(input: object, other: object, **others) -> Tensor:
    refuse_keywords("mul", others)
    return apply_binary("mul", input, other)


def div(input: object, other: object, *, rounding_mode: str | None = None, **others) -> Tensor:
    refuse_keywords("div", others)
    if rounding_mode is not None:
        refuse(f"div(rounding_mode={rounding_mode!r})")
    kind = result_type(input, other)
    return apply_binary("div", input, other, kind if kind.category == FLOAT else float32)


def maximum(input: Tensor, other: Tensor, **others) -> Tensor:
    refuse_keywords("maximum", others)
    both_tensors("maximum", input, other)
    return apply_binary("maximum", input, other)


def minimum(input: Tensor, other: Tensor, **others) -> Tensor:
    refuse_keywords("minimum", others)
    both_tensors("minimum", input, other)
    return apply_binary("minimum", input, other)


def logaddexp(input: Tensor, other: Tensor, **others) -> Tensor:
    refuse_keywords("logaddexp", others)
    both_tensors("logaddexp", input, other)
    if result_type(input, other).category != FLOAT:
        refuse("logaddexp of whole numbers")
    return apply_binary("logaddexp", input, other)


def both_tensors(function: str, input: object, other: object) -> None:
    for name, x in (("input", input), ("other", other)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{function}(): argument '{name}' must be Tensor, not {type(x).__name__}"
            )


def pow_(input: object, exponent: object, **others) -> Tensor:
    "input to the power of exponent; one of them may be a number."
    refuse_keywords("pow", others)
    kind = result_type(input, exponent)
    if kind.category != FLOAT:
        x, y, _, shape = paired(input, exponent)
        if kind is bool_:
            refuse("pow of bool tensors")
        if isinstance(exponent, int) and exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return make(kind.keep(list(map(whole_power, x, y))), shape, kind)
    return apply_binary("pow", input, exponent)


def whole_power(x: int, y: int) -> int:
    "xʸ within 64 bits; of a negative y the whole part."
    if y < 0:
        return x if x == 1 or (x == -1 and y % 2) else int(x == -1)
    return pow(x, y, 2**64)


def floor_divide(input: object, other: object, **others) -> Tensor:
    refuse_keywords("floor_divide", others)
    return whole_division("floor_divide", input, other, operator.floordiv)


def remainder(input: object, other: object, **others) -> Tensor:
    refuse_keywords("remainder", others)
    return whole_division("remainder", input, other, operator.mod)


def whole_division(name: str, input: object, other: object, of: Callable) -> Tensor:
    "Quotient rounded down, or the rest of it; of whole numbers only, if one is 0."
    x, y, kind, shape = paired(input, other)
    if kind is bool_:
        refuse(f"{name} of bool tensors")
    if wants_gradient(input, other):
        refuse(f"the gradient of {name}")
    if not all(y):
        if kind.category == INT:
            raise RuntimeError("ZeroDivisionError")
        refuse(f"{name} by 0")
    if kind.category == FLOAT and not all(map(math.isfinite, x + y)):
        refuse(f"{name} of infinite numbers")
    return make(kind.keep(list(map(of, x, y))), shape, kind)


def nextafter(input: Tensor, other: Tensor, **others) -> Tensor:
    "The next number of this type, in the direction of `other`."
    refuse_keywords("nextafter", others)
    x, y, kind, shape = paired(input, other)
    if kind.category != FLOAT:
        raise RuntimeError(f"\"nextafter_cpu\" not implemented for '{kind.name}'")
    if wants_gradient(input, other):
        refuse("the gradient of nextafter")
    return make([neighbour(a, b, kind) for a, b in zip(x, y)], shape, kind)


def neighbour(x: float, towards: float, kind: dtype) -> float:
    "The next number that this type holds, towards another."
    if kind.name == "float64" or x == towards or x != x or towards != towards:
        return math.nextafter(x, towards)
    if math.isinf(x):
        return math.copysign(finfo(kind).max, x)
    digits = {"float32": 24, "bfloat16": 8, "float16": 11}[kind.name]
    _, exponent = math.frexp(x)
    step = math.ldexp(1.0, exponent - digits)
    if abs(x) < finfo(kind).tiny:
        step = finfo(kind).tiny * finfo(kind).eps
    elif abs(math.frexp(x)[0]) == 0.5 and abs(towards) < abs(x):
        step /= 2  # below a power of two numbers lie closer
    (found,) = kind.keep([x + math.copysign(step, towards - x)])
    return found


# --- comparisons and logic --------------------------------------------------------------------
def comparison(name: str, of: Callable) -> Callable[..., Tensor]:
    "A function of two tensors that says where something holds."

    def compare(input: Tensor, other: object, **others) -> Tensor:
        refuse_keywords(name, others)
        x, y, _, shape = paired(input, other)
        return make(list(map(of, x, y)), shape, bool_)

    compare.__name__ = name
    return compare


eq = comparison("eq", operator.eq)
ne = comparison("ne", operator.ne)
lt = comparison("lt", operator.lt)
le = comparison("le", operator.le)
gt = comparison("gt", operator.gt)
ge = comparison("ge", operator.ge)
logical_and = comparison("logical_and", lambda x, y: bool(x) and bool(y))
logical_or = comparison("logical_or", lambda x, y: bool(x) or bool(y))
logical_xor = comparison("logical_xor", lambda x, y: bool(x) != bool(y))


def bitwise(name: str, of: Callable) -> Callable[..., Tensor]:
    "A function of two bool or whole tensors."

    def apply(input: object, other: object, **others) -> Tensor:
        refuse_keywords(name, others)
        x, y, kind, shape = paired(input, other)
        if kind.category == FLOAT:
            raise RuntimeError(f"\"{name}_cpu\" not implemented for '{kind.name}'")
        return make(list(map(of, x, y)), shape, kind)

    apply.__name__ = name
    return apply


bitwise_and = bitwise("bitwise_and", operator.and_)
bitwise_or = bitwise("bitwise_or", operator.or_)
bitwise_xor = bitwise("bitwise_xor", operator.xor)


def bitwise_not(input: Tensor, **others) -> Tensor:
    refuse_keywords("bitwise_not", others)
    if input.dtype.category == FLOAT:
        raise TypeError(
            "~ (operator.invert) is only implemented on integer and Boolean-type tensors"
        )
    of = operator.not_ if input.dtype is bool_ else operator.invert
    return make(list(map(of, input.flat())), input.shape, input.dtype)


def question(name: str, of: Callable) -> Callable[..., Tensor]:
    "A function of one tensor that says where something holds."

    def ask(input: Tensor, **others) -> Tensor:
        refuse_keywords(name, others)
        return make(list(map(of, input.flat())), input.shape, bool_)

    ask.__name__ = name
    return ask


logical_not = question("logical_not", operator.not_)
isnan = question("isnan", lambda x: x != x)
isfinite = question("isfinite", math.isfinite)
isinf = question("isinf", math.isinf)
isneginf = question("isneginf", lambda x: x == -math.inf)
isposinf = question("isposinf", lambda x: x == math.inf)


def isclose(
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    **others,
) -> Tensor:
    "|input − other| ≤ atol + rtol·|other|."
    refuse_keywords("isclose", others)
    if input.dtype is not other.dtype:
        raise RuntimeError(f"{input.dtype} did not match {other.dtype}")
    if rtol < 0 or atol < 0:
        raise RuntimeError("rtol and atol must be greater than or equal to zero")
    x, y, kind, shape = paired(input, other)
    if kind is not bool_ and kind.category != FLOAT and rtol:
        y = list(map(float, y))
    near = []
    for a, b in zip(x, y):
        if a == b:
            near.append(True)
        elif a != a or b != b:
            near.append(equal_nan and a != a and b != b)
        else:
            near.append(math.isfinite(b) and abs(a - b) <= atol + abs(rtol * b))
    return make(near, shape, bool_)


def allclose(
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    **others,
) -> bool:
    "Is every number close? See isclose."
    refuse_keywords("allclose", others)
    return all(isclose(input, other, rtol, atol, equal_nan).flat())


def equal(input: Tensor, other: Tensor) -> bool:
    "Are shapes and numbers the same?"
    if input.shape != other.shape:
        return False
    x, y, _, _ = paired(input, other)
    return all(map(operator.eq, x, y))


# --- choices ----------------------------------------------------------------------------------
def chosen(holds: list, x: list, x_shape: Size, y: list, y_shape: Size, shape: Size) -> list:
    "x where it holds, else y; one of them is often a single number, and often all of it holds."
    if all(holds):
        return broadcast(x, x_shape, shape)
    if len(y) == 1:
        (number,) = y
        return [a if c else number for c, a in zip(holds, broadcast(x, x_shape, shape))]
    x, y = broadcast(x, x_shape, shape), broadcast(y, y_shape, shape)
    return [a if c else b for c, a, b in zip(holds, x, y)]


def where(condition: Tensor, input: object = None, other: object = None, **others):
    "input where the condition holds, else other."
    refuse_keywords("where", others)
    if input is None and other is None:
        from .indexing import nonzero

        return nonzero(condition, as_tuple=True)
    if not isinstance(condition, Tensor) or condition.dtype is not bool_:
        kind = condition.dtype if isinstance(condition, Tensor) else type(condition).__name__
        raise RuntimeError(
            f"where expected condition to be a boolean tensor, but got a tensor with dtype {kind}"
        )
    kind = result_type(input, other)
    x, x_shape, x_kind = numbers_of(input)
    y, y_shape, y_kind = numbers_of(other)
    shape = condition.shape
    if not shape == x_shape == y_shape:
        shape = broadcast_shapes(shape, x_shape, y_shape)
    holds = broadcast(condition.flat(), condition.shape, shape)
    x, y = cast(x, x_kind, kind), cast(y, y_kind, kind)
    out = make(chosen(holds, x, x_shape, y, y_shape, shape), shape, kind)
    if kind.category == FLOAT and wants_gradient(input, other):

        def pull(g):
            left = right = None
            if isinstance(input, Tensor) and input.requires_grad:
                kept = g if all(holds) else [gi if c else 0.0 for c, gi in zip(holds, g)]
                left = sum_to(kept, shape, input.shape)
            if isinstance(other, Tensor) and other.requires_grad:
                right = sum_to([0.0 if c else gi for c, gi in zip(holds, g)], shape, other.shape)
            return left, right

        record(out, "Where", (input, other), pull, (condition,))
    return out


def clamp(input: Tensor, min: object = None, max: object = None, **others) -> Tensor:
    "The nearest number from min to max; if max is the smaller, it wins."
    refuse_keywords("clamp", others)
    bounds = [b for b in (min, max) if b is not None]
    if not bounds:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    if len({isinstance(b, Tensor) for b in bounds}) > 1:
        raise TypeError("clamp(): bounds are two numbers or two tensors")
    kind = result_type(input, *bounds)
    if kind is bool_:
        refuse("clamp of bool tensors")
    if not isinstance(bounds[0], Tensor):
        return clamp_to_numbers(input, min, max, kind)
    return clamp_to_tensors(input, min, max, kind)


def clamp_to_tensors(input: Tensor, min: Tensor | None, max: Tensor | None, kind: dtype) -> Tensor:
    "The nearest number between two others, one pair for each; either may be missing."
    bounds = [b for b in (min, max) if b is not None]
    shape = broadcast_shapes(input.shape, *(b.shape for b in bounds))

    def spread(a: Tensor | None, missing: float) -> list:
        if a is None:
            return [missing] * shape.numel()
        return broadcast(cast(a.flat(), a.dtype, kind), a.shape, shape)

    x = spread(input, 0)
    low, high = spread(min, -math.inf), spread(max, math.inf)
    values = numbers.smaller_of(numbers.larger_of(x, low), high)
    out = make(values if kind.category == FLOAT else list(map(int, values)), shape, kind)
    if kind.category == FLOAT and wants_gradient(input, min, max):

        def pull(g):
            inside = [gi if a <= xi <= b else 0.0 for gi, xi, a, b in zip(g, x, low, high)]
            below = [gi if xi < a < b else 0.0 for gi, xi, a, b in zip(g, x, low, high)]
            above = [gi if b < a or xi > b else 0.0 for gi, xi, a, b in zip(g, x, low, high)]
            return [
                sum_to(gradient, shape, tensor.shape) if wants_part(tensor) else None
                for gradient, tensor in ((inside, input), (below, min), (above, max))
            ]

        record(out, "Clamp", (input, min, max), pull, (input, *bounds))
    return out


def wants_part(x: object) -> bool:
    "Is a gradient of this operand asked for?"
    return isinstance(x, Tensor) and x.requires_grad


def clamp_to_numbers(input: Tensor, min: object, max: object, kind: dtype) -> Tensor:
    "The nearest number between two Python numbers, either of which may be missing."

    def bound(b: object, missing: float) -> float:
        return missing if b is None else convert_number(b, kind)

    low, high = bound(min, -math.inf), bound(max, math.inf)
    x = cast(input.flat(), input.dtype, kind)
    if low != low or high != high:  # a bound that is NaN makes everything NaN
        values = [math.nan] * len(x)
    elif low > high:
        values = [high if xi == xi else xi for xi in x]
    else:
        values = [low if xi < low else high if xi > high else xi for xi in x]
    out = make(values, input.shape, kind)
    if kind.category == FLOAT and wants_gradient(input):
        record(
            out,
            "Clamp",
            (input,),
            lambda g: ([gi if low <= xi <= high else 0.0 for gi, xi in zip(g, x)],),
            (input,),
        )
    return out


def convert_number(number: object, kind: dtype) -> object:
    "A Python number as a tensor of this type would hold it."
    return cast([number], dtype_of_number(number), kind)[0]


def masked_fill(input: Tensor, mask: Tensor, value: object, **others) -> Tensor:
    "value where the mask holds, else input."
    refuse_keywords("masked_fill", others)
    if not isinstance(mask, Tensor) or mask.dtype is not bool_:
        raise RuntimeError("masked_fill_ only supports boolean masks")
    fill, fill_shape, fill_kind = numbers_of(value)
    if fill_shape:
        raise RuntimeError(
            "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{len(fill_shape)} dimension(s)."
        )
    if input.dtype is bool_ and fill_kind.category == FLOAT:
        refuse("masked_fill of a bool tensor with a fraction")
    if fill_kind.category == FLOAT and input.dtype.category == INT and fill[0] % 1:
        raise RuntimeError(f"value cannot be converted to type {input.dtype} without overflow")
    kind = input.dtype
    shape = broadcast_two(input.shape, mask.shape)
    (new,) = cast(fill, fill_kind, kind)
    holds = broadcast(mask.flat(), mask.shape, shape)
    x = broadcast(input.flat(), input.shape, shape)
    out = make([new if m else xi for m, xi in zip(holds, x)], shape, kind)
    if wants_gradient(input, value):

        def pull(g):
            kept = sum_to([0.0 if m else gi for m, gi in zip(holds, g)], shape, input.shape)
            return kept, [numbers.total(gi for m, gi in zip(holds, g) if m)]

        record(out, "MaskedFill", (input, value), pull, (mask,))
    return out


def nan_to_num(
    input: Tensor,
    nan: float | None = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
    **others,
) -> Tensor:
    "Replace NaN and infinities; those by the largest numbers of the type."
    refuse_keywords("nan_to_num", others)
    kind = input.dtype
    if kind.category != FLOAT:
        return make(list(input.flat()), input.shape, kind)
    limits = finfo(kind)
    by = {
        math.inf: limits.max if posinf is None else float(posinf),
        -math.inf: limits.min if neginf is None else float(neginf),
    }
    x = input.flat()
    instead = 0.0 if nan is None else float(nan)
    values = kind.keep([instead if xi != xi else by.get(xi, xi) for xi in x])
    out = make(values, input.shape, kind)
    if wants_gradient(input):
        record(
            out,
            "NanToNum",
            (input,),
            lambda g: ([gi if math.isfinite(xi) else 0.0 for gi, xi in zip(g, x)],),
            (input,),
        )
    return out


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0, **others) -> Tensor:
    "log(1 + exp(β·x))/β; x itself where β·x is above the threshold."
    refuse_keywords("softplus", others)
    kind = input.dtype
    if kind.category != FLOAT:
        refuse(f"softplus of {kind}")
    x = input.flat()

    def one(xi: float) -> float:
        z = beta * xi
        return xi if z > threshold else math.log1p(numbers.exp([z])[0]) / beta

    out = make(kind.keep(list(map(one, x))), input.shape, kind)
    if wants_gradient(input):

        def pull(g):
            slopes = numbers.sigmoid([beta * xi for xi in x])
            return ([gi if beta * xi > threshold else gi * s for gi, xi, s in zip(g, x, slopes)],)

        record(out, "Softplus", (input,), pull, (input,))
    return out


def logit(input: Tensor, eps: float | None = None, **others) -> Tensor:
    "log(x/(1 − x)); with eps, of x from eps to 1 − eps."
    refuse_keywords("logit", others)
    if eps is not None:
        refuse("logit(eps=…)")
    kind = input.dtype if input.dtype.category == FLOAT else float32
    x = cast(input.flat(), input.dtype, kind)
    ratio = numbers.divide(x, [1.0 - xi for xi in x])
    out = make(kind.keep(numbers.log(ratio)), input.shape, kind)
    if wants_gradient(input):

        def pull(g):
            slopes = numbers.reciprocal([xi * (1 - xi) for xi in x])
            return ([gi * s if 0 <= xi <= 1 else math.nan for gi, xi, s in zip(g, x, slopes)],)

        record(out, "Logit", (input,), pull, (input,))
    return out


# --- in place ---------------------------------------------------------------------------------
def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    "The method with a trailing underscore: the same, with its result put into the tensor."

    def change(self: Tensor, *args, **kwargs) -> Tensor:
        result = function(self, *args, **kwargs)
        if result.dtype.category > self.dtype.category:
            names = {BOOL: "Bool", INT: "Long", FLOAT: "Float"}
            raise RuntimeError(
                f"result type {names[result.dtype.category]} can't be cast to the desired output "
                f"type {names[self.dtype.category]}"
            )
        if result.shape != self.shape:
            raise RuntimeError(
                f"output with shape {list(self.shape)} doesn't match the broadcast shape "
                f"{list(result.shape)}"
            )
        adopt(self, result)
        return self

    change.__name__ = f"{function.__name__}_"
    return change
