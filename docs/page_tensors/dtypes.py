"""The types of numbers: how each is rounded, and which type two of them have together.

A tensor keeps its numbers as a flat list of Python's float, int or bool. Python's float is
float64. A narrower type is a float64 that has been rounded: after every operation `keep` rounds
each number to the nearest one that the type has.
"""

import math
import struct
from array import array
from collections.abc import Callable
from functools import lru_cache

from .refusal import refuse

BOOL, INT, FLOAT = range(3)  # categories; a wider category wins over any number of bits


class dtype:
    "A type of numbers; compare with `is` or `==`."

    def __init__(self, name: str, category: int, itemsize: int, keep: Callable[[list], list]):
        self.name = name
        self.category = category
        self.itemsize = itemsize  # bytes that torch needs for one number
        self.keep = keep  # rounds results of this category to what the type can hold
        self.is_floating_point = category == FLOAT
        self.is_complex = False
        self.is_signed = category != BOOL

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self):
        return self.name


# --- rounding ---------------------------------------------------------------------------------
def keep_float64(values: list) -> list:
    return values


def keep_float32(values: list) -> list:
    "Round to 24 binary digits: an array of C's float does it."
    return array("f", values).tolist()


def keep_bfloat16(values: list) -> list:
    "Round to float32, then to its upper 16 bits, half to even."
    bits = array("I", array("f", values).tobytes())
    for i, b in enumerate(bits):
        if b & 0x7FFFFFFF <= 0x7F800000:  # a NaN stays as it is
            bits[i] = (b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000
    return array("f", bits.tobytes()).tolist()


def keep_float16(values: list) -> list:
    "Round to 11 binary digits; beyond 65504 lies infinity."
    return [half(x) for x in array("f", values)]


def half(x: float) -> float:
    try:
        return struct.unpack("e", struct.pack("e", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def keep_int64(values: list) -> list:
    "Wrap around beyond 63 bits, as a processor does."
    try:
        array("q", values)
    except OverflowError:
        return [(x + 2**63) % 2**64 - 2**63 for x in values]
    return values


def keep_int32(values: list) -> list:
    return [(x + 2**31) % 2**32 - 2**31 for x in values]


def keep_bool(values: list) -> list:
    return list(map(bool, values))


bool_ = dtype("bool", BOOL, 1, keep_bool)
int32 = dtype("int32", INT, 4, keep_int32)
int64 = dtype("int64", INT, 8, keep_int64)
float16 = dtype("float16", FLOAT, 2, keep_float16)
bfloat16 = dtype("bfloat16", FLOAT, 2, keep_bfloat16)
float32 = dtype("float32", FLOAT, 4, keep_float32)
float64 = dtype("float64", FLOAT, 8, keep_float64)


# --- from one type to another -----------------------------------------------------------------
def to_int(x: float) -> int:
    "Cut off the fraction; what is no number becomes what a processor makes of it."
    return int(x) if math.isfinite(x) else -(2**63)


def cast(values: list, source: dtype, target: dtype) -> list:
    "Give numbers of one type in another."
    if source is target:
        return values
    if target.category == BOOL:
        return list(map(bool, values))
    if target.category == INT:
        if source.category == FLOAT:
            values = list(map(to_int, values))
        elif source.category == BOOL:
            values = list(map(int, values))
        return target.keep(values)
    if source.category != FLOAT:
        values = list(map(float, values))
    return target.keep(values)


@lru_cache
def promote_types(a: dtype, b: dtype) -> dtype:
    "The smallest type that holds the numbers of both."
    if a is b:
        return a
    if a.category != b.category:
        return a if a.category > b.category else b
    if {a, b} == {float16, bfloat16}:
        return float32
    return a if a.itemsize > b.itemsize else b


def dtype_of_number(x: object) -> dtype | None:
    "The type of a Python number on its own, or None."
    if isinstance(x, bool):
        return bool_
    if isinstance(x, int):
        return int64
    if isinstance(x, float):
        return float32
    if isinstance(x, complex):
        refuse("complex numbers")
    return None


class finfo:
    "The limits of a floating-point type."

    def __init__(self, type: dtype = float32):
        if not type.is_floating_point:
            raise TypeError(
                f"torch.finfo() requires a floating point input type. Use torch.iinfo to handle "
                f"'{type}'"
            )
        self.dtype = type.name
        digits, most = {
            float16: (11, 16),
            bfloat16: (8, 128),
            float32: (24, 128),
            float64: (53, 1024),
        }[type]
        self.bits = 8 * type.itemsize
        self.eps = 2.0 ** (1 - digits)
        self.max = (2 - self.eps) * 2.0 ** (most - 1)
        self.min = -self.max
        self.tiny = self.smallest_normal = 2.0 ** (2 - most)
