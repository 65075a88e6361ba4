"""The shape checker, which costs a small training run more time than the run: whatever a test calls is checked every time, what the
package calls within itself the first five times in each test."""

import functools
import inspect
import sys

import jaxtyping

TIMES = 5
checks: list[list[int]] = []  # how many checks each function has left


def again():
    "A new test begins."
    for left in checks:
        left[0] = TIMES


def install():
    "Before the package is imported."
    whole = jaxtyping.jaxtyped

    def sparing(fn=None, *, typechecker=None):
        if fn is None:
            return functools.partial(sparing, typechecker=typechecker)
        if inspect.isfunction(fn) and "<locals>" in fn.__qualname__:
            return fn  # made anew at every call, and checked by what is made of it
        if inspect.isfunction(fn) and "Self" in str(fn.__annotations__):
            return fn  # beartype knows Self only where it decorates the whole class
        checked = whole(fn, typechecker=typechecker)
        if not inspect.isfunction(fn):
            return checked  # a class, a property
        left = [TIMES]
        checks.append(left)

        @functools.wraps(fn)
        def call(*args, **kwargs):
            if left[0] <= 0 and sys._getframe(1).f_globals.get("__name__", "").startswith(
                "instruct_goose"
            ):
                return fn(*args, **kwargs)
            left[0] -= 1
            return checked(*args, **kwargs)

        return call

    jaxtyping.jaxtyped = sparing
    jaxtyping.install_import_hook("instruct_goose", "beartype.beartype")
