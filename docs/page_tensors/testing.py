"""torch.testing.assert_close."""

from .creation import as_tensor
from .elementwise import isclose
from .refusal import refuse, refuse_keywords
from .tensor import Tensor

TOLERANCES = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5)}


def assert_close(
    actual: object,
    expected: object,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_dtype: bool = True,
    msg: str | None = None,
    **others,
) -> None:
    "Raise AssertionError unless two tensors have one shape and type, and close numbers."
    refuse_keywords("testing.assert_close", others)
    if isinstance(actual, tuple | list):
        if len(actual) != len(expected):
            raise AssertionError(
                f"The length of the sequences mismatch: {len(actual)} != {len(expected)}"
            )
        for a, b in zip(actual, expected):
            assert_close(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan, check_dtype=check_dtype)
        return
    if isinstance(actual, Tensor) != isinstance(expected, Tensor):
        refuse("testing.assert_close of a tensor and a number")
    if (rtol is None) != (atol is None):
        raise ValueError("rtol and atol must both be specified or both be unspecified")
    words = gap(as_tensor(actual), as_tensor(expected), rtol, atol, equal_nan, check_dtype)
    if words is not None:
        raise AssertionError(msg or words)


def gap(
    a: Tensor, b: Tensor, rtol: float | None, atol: float | None, equal_nan: bool, check_dtype: bool
) -> str | None:
    "In words how two tensors differ, or None."
    if a.shape != b.shape:
        return f"The values for attribute 'shape' do not match: {a.shape} != {b.shape}."
    if a.dtype is not b.dtype:
        if not check_dtype:
            refuse("testing.assert_close(check_dtype=False) of two types")
        return f"The values for attribute 'dtype' do not match: {a.dtype} != {b.dtype}."
    if rtol is None:
        rtol, atol = TOLERANCES.get(a.dtype.name, (0.0, 0.0))
    near = isclose(a, b, rtol, atol, equal_nan).flat()
    off = near.count(False)
    if not off:
        return None
    share = f"{off} / {len(near)} ({off / len(near):.1%})"
    return f"Tensor-likes are not close!\n\nMismatched elements: {share}\n"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.testing.{name}")
