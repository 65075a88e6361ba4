"""Functions of numbers that follow IEEE 754, where Python's would raise an error.

`each(f, otherwise)` makes of a function of one number a function of a list. It first tries the
whole list; only if Python has raised an error is every number looked at alone.
"""

import math
from collections.abc import Callable, Iterable

INF, NAN = math.inf, math.nan
ERRORS = (ValueError, OverflowError, ZeroDivisionError)


def each(f: Callable, otherwise: Callable) -> Callable[[list], list]:
    "Apply f to every number of a list; `otherwise` where f raises an error."

    def careful(x: float) -> float:
        try:
            return f(x)
        except ERRORS:
            return otherwise(x)

    def of_list(values: list) -> list:
        try:
            return list(map(f, values))
        except ERRORS:
            return list(map(careful, values))

    return of_list


def each_pair(f: Callable, otherwise: Callable) -> Callable[[list, list], list]:
    "The same for functions of two numbers."

    def careful(x: float, y: float) -> float:
        try:
            return f(x, y)
        except ERRORS:
            return otherwise(x, y)

    def of_lists(left: list, right: list) -> list:
        try:
            return list(map(f, left, right))
        except ERRORS:
            return list(map(careful, left, right))

    return of_lists


def total(values: Iterable[float]) -> float:
    "The sum, exact to the last digit: the same with every Python, close to any order of adding."
    values = list(values)
    try:
        return math.fsum(values)
    except ERRORS:  # infinities of both signs, or a sum beyond all numbers
        return sum(values, 0.0)


def divide_by_zero(x: float, y: float) -> float:
    if x == 0 or x != x:
        return NAN
    return math.copysign(INF, x) * math.copysign(1.0, y)


def power_beyond(x: float, y: float) -> float:
    "x to the power of y, where math.pow raises an error."
    is_odd = y == int(y) and int(y) % 2 == 1 if math.isfinite(y) else False
    if x == 0:  # to a negative power
        return math.copysign(INF, x) if is_odd else INF
    if x < 0 and y != int(y):
        return NAN
    return -INF if x < 0 and is_odd else INF


def log_of_nothing(x: float) -> float:
    return -INF if x == 0 else NAN


def infinite(x: float) -> float:
    return INF


def undefined(x: float) -> float:
    return NAN


exp = each(math.exp, infinite)
expm1 = each(math.expm1, infinite)
log = each(math.log, log_of_nothing)
log1p = each(math.log1p, lambda x: -INF if x == -1 else NAN)
log2 = each(math.log2, log_of_nothing)
log10 = each(math.log10, log_of_nothing)
sqrt = each(math.sqrt, undefined)
sin = each(math.sin, undefined)
cos = each(math.cos, undefined)
tan = each(math.tan, undefined)
reciprocal = each(lambda x: 1.0 / x, lambda x: math.copysign(INF, x))
sigmoid = each(lambda x: 1.0 / (1.0 + math.exp(-x)), lambda x: 0.0)
divide = each_pair(lambda x, y: x / y, divide_by_zero)
power = each_pair(math.pow, power_beyond)


def rsqrt(values: list) -> list:
    return reciprocal(sqrt(values))


def same_sign(x: float) -> float:
    "−1, 0 or 1; NaN stays."
    if x > 0:
        return 1.0
    return -1.0 if x < 0 else x * 0.0


def larger_of(left: list, right: list) -> list:
    "The larger of each two; NaN if one is."
    return [x if x >= y or x != x else y for x, y in zip(left, right)]


def smaller_of(left: list, right: list) -> list:
    "The smaller of each two; NaN if one is."
    return [x if x <= y or x != x else y for x, y in zip(left, right)]


def round_half_to_even(x: float) -> float:
    return math.copysign(float(round(x)), x) if math.isfinite(x) else x


def whole_part(f: Callable) -> Callable[[list], list]:
    "math.floor and its kind as functions of lists of float."
    return each(lambda x: math.copysign(float(f(x)), x), lambda x: x)
