"""Repeats of a check with other values, for `make deep`: `make test` runs the first of them."""

import pytest


def deep(*values, **more) -> object:
    return pytest.param(*values, marks=pytest.mark.deep, **more)


def first(n: int, values) -> list:
    "The first n of them always, the rest in `make deep`. A tuple is the values of several parameters."
    return [
        v if i < n else deep(*(v if isinstance(v, tuple) else (v,))) for i, v in enumerate(values)
    ]
