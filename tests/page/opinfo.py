"""Compare an operation on page tensors with torch, on torch's own samples (OpInfo)."""

import math
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# torch's lists of samples import a library for tests of their own, of which they need one name
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))

import page_tensors as page  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

DTYPES = ("float64", "float32", "int64", "bool")
TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 2e-2, "float16": 3e-3}
NOT_COMPARABLE = {
    "empty": "its numbers are what lay in memory",
    "empty_like": "its numbers are what lay in memory",
    "rand_like": "torch's list calls randn_like",
    "zero_": "torch's list calls it on a copy",
    "fill_": "torch's list calls it on a copy",
}
OTHER_ORDER = {"where": lambda x, condition, other: page.where(condition, x, other)}


class Declared(NamedTuple):
    "An operation that both have."

    name: str
    info: Any  # torch's OpInfo
    function: Any  # on page tensors


def resolve(name: str) -> object:
    "The function of that name on page tensors, or None where it is refused."
    thing = page
    for part in name.split("."):
        try:
            thing = getattr(thing, part)
        except (AttributeError, page.NotOnThisPage):
            return None
    return thing


def declared() -> list[Declared]:
    "All operations of torch's list of samples that page tensors have, as function or method."
    found = []
    for info in op_db:
        if info.name in NOT_COMPARABLE:
            continue
        function = OTHER_ORDER.get(info.name) or resolve(info.name)
        if function is None and "." not in info.name:
            function = page.methods.METHODS.get(info.name)
        if callable(function):
            title = info.name + (f" ({info.variant_test_name})" if info.variant_test_name else "")
            found.append(Declared(title, info, function))
    return found


# --- from one kind of tensor to the other -----------------------------------------------------
def tensor_to_page(x: torch.Tensor) -> page.Tensor:
    "The same numbers, and the same wish for a gradient."
    kind = getattr(page, str(x.dtype).removeprefix("torch."), None)
    if kind is None or x.layout != torch.strided:
        raise page.NotOnThisPage(f"a tensor of {x.dtype}")
    made = page.tensor(x.detach().flatten().tolist(), dtype=kind).reshape(*x.shape).clone()
    return made.requires_grad_() if x.requires_grad else made


def to_page(x: Any) -> Any:
    "The same argument with page tensors; NotOnThisPage for what a page does not have."
    if isinstance(x, torch.Tensor):
        return tensor_to_page(x)
    if isinstance(x, torch.dtype):
        kind = resolve(str(x).removeprefix("torch."))
        if not isinstance(kind, page.dtype):
            raise page.NotOnThisPage(str(x))
        return kind
    if isinstance(x, torch.device):
        return page.device(x.type)
    if isinstance(x, complex | torch.memory_format | torch.layout):
        raise page.NotOnThisPage(str(x))
    if isinstance(x, dict):
        return {key: to_page(y) for key, y in x.items()}
    if type(x) in (tuple, list):
        return type(x)(to_page(y) for y in x)
    return x


def without_gradient(x: Any) -> Any:
    "The same argument, which asks for no gradient."
    if isinstance(x, torch.Tensor):
        return x.detach()
    if isinstance(x, tuple | list):
        return type(x)(map(without_gradient, x)) if type(x) in (tuple, list) else x
    if isinstance(x, dict):
        return {key: without_gradient(y) for key, y in x.items()}
    return x


def tensors_in(x: Any) -> Iterator[Any]:
    "All tensors of a result or an argument, in order."
    if isinstance(x, torch.Tensor | page.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for y in x:
            yield from tensors_in(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from tensors_in(y)


# --- comparing --------------------------------------------------------------------------------
def near(a: float, b: float, tolerance: float, size: float) -> bool:
    if a == b or (a != a and b != b):
        return True
    return math.isfinite(a) and abs(a - b) <= tolerance * max(size, abs(a))


def difference(ours: Any, theirs: Any, size: float = 1.0) -> str | None:
    """In words what differs between a tensor of torch and one of a page.

    Numbers that are smaller than `size` may differ by as much as those of that size.
    """
    if not isinstance(ours, torch.Tensor):
        return None if ours == theirs else f"{ours} and {theirs}"
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if str(ours.dtype) != str(theirs.dtype):
        return f"types {ours.dtype} and {theirs.dtype}"
    a = ours.detach().flatten().tolist()
    b = theirs.flat()
    if len(a) != len(b):
        return f"{len(a)} numbers and {len(b)}"
    wanted = float if theirs.dtype.is_floating_point else int
    if str(theirs.dtype) == "torch.bool":
        wanted = bool
    for x in b:
        if type(x) is not wanted:
            return f"a {type(x).__name__} in a tensor of {theirs.dtype}"
    tolerance = TOLERANCE.get(str(ours.dtype).removeprefix("torch."), 0.0)
    for x, y in zip(a, b, strict=True):
        if not near(x, y, tolerance, size):
            return f"numbers {a[:12]} and {b[:12]}"
    return None


class Outcome(NamedTuple):
    "Of one sample: 'equal', 'refused', or what differs."

    word: str
    detail: str = ""


def run(call: Any, arguments: tuple, keywords: dict) -> tuple[Any, Exception | None]:
    page.manual_seed(42)  # the seed of torch's samples
    torch.default_generator.manual_seed(42)
    try:
        return call(*arguments, **keywords), None
    except Exception as error:
        return None, error


def compare(torch_call: Any, page_call: Any, arguments: tuple, keywords: dict) -> Outcome:
    "One sample on both, forward and backward; without a gradient where that is refused."
    outcome = compare_once(torch_call, page_call, arguments, keywords)
    if outcome.word == "refused":
        arguments, keywords = without_gradient(arguments), without_gradient(keywords)
        return compare_once(torch_call, page_call, arguments, keywords)
    return outcome


def compare_once(torch_call: Any, page_call: Any, arguments: tuple, keywords: dict) -> Outcome:
    try:
        mine, my_keywords = to_page(arguments), to_page(keywords)
    except page.NotOnThisPage as error:
        return Outcome("refused", str(error))
    result, refused = run(page_call, mine, my_keywords)
    if isinstance(refused, page.NotOnThisPage):
        return Outcome("refused", str(refused))
    expected, failed = run(torch_call, arguments, keywords)
    if failed is not None or refused is not None:
        if failed is not None and refused is not None:
            return Outcome("equal")
        return Outcome("differs", f"torch raises {failed!r}, the page {refused!r}")
    ours, theirs = list(tensors_in(expected)), list(tensors_in(result))
    if len(ours) != len(theirs):
        return Outcome("differs", f"{len(ours)} tensors and {len(theirs)}")
    if not ours:
        return Outcome("equal" if expected == result else "differs", f"{expected} and {result}")
    for a, b in zip(ours, theirs):
        words = difference(a, b)
        if words is not None:
            return Outcome("differs", words)
        if a.requires_grad != b.requires_grad:
            return Outcome("differs", f"requires_grad {a.requires_grad} and {b.requires_grad}")
    return compare_gradients(ours, theirs, arguments, keywords, mine, my_keywords)


def compare_gradients(ours, theirs, arguments, keywords, mine, my_keywords) -> Outcome:
    "Gradients of a weighted sum of all results, by every input that asks for one."
    learn = [x for x in tensors_in((arguments, keywords)) if x.requires_grad]
    my_learn = [x for x in tensors_in((mine, my_keywords)) if x.requires_grad]
    pairs = [(a, b) for a, b in zip(ours, theirs) if a.requires_grad]
    if not pairs or not learn:
        return Outcome("equal")
    weights = []
    for a, _ in pairs:
        values = [math.cos(1.0 + 0.7 * i) for i in range(a.numel())]
        weights.append(torch.tensor(values, dtype=a.dtype).reshape(a.shape))
    expected, failed = run(
        torch.autograd.grad, ([a for a, _ in pairs], learn, weights), {"allow_unused": True}
    )
    found, refused = run(
        page.autograd.grad,
        ([b for _, b in pairs], my_learn, [to_page(w) for w in weights]),
        {"allow_unused": True},
    )
    if isinstance(refused, page.NotOnThisPage):
        return Outcome("refused", str(refused))
    if failed is not None or refused is not None:
        return Outcome("differs", f"backward: torch raises {failed!r}, the page {refused!r}")
    for a, b in zip(expected, found):
        if (a is None) != (b is None):
            if a is None and not any(b.flat()) or b is None and not a.any():
                continue
            return Outcome("differs", f"gradient {a} and {b}")
        if a is not None:
            # it is a sum over what was broadcast, whose rounding is that of the largest terms
            largest = max([1.0, *a.detach().abs().nan_to_num(0, 0, 0).flatten().tolist()])
            words = difference(a, b, size=largest)
            if words is not None:
                return Outcome("differs", f"gradient: {words}")
    return Outcome("equal")


def references(one: Declared, dtype: str) -> Iterator[tuple[tuple, dict]]:
    "More samples, without gradients: very large and very small numbers, infinities, NaN."
    kind = getattr(torch, dtype)
    if kind in one.info.supported_dtypes("cpu"):
        for sample in one.info.reference_inputs("cpu", kind, requires_grad=False):
            yield (sample.input, *sample.args), sample.kwargs


def samples(one: Declared, dtype: str) -> Iterator[tuple[tuple, dict]]:
    """Arguments and keywords of torch's samples in one type.

    They come from the function below `sample_inputs`, which looks through the stack for a test of
    torch's own at every sample.
    """
    kind = getattr(torch, dtype)
    if kind not in one.info.supported_dtypes("cpu"):
        return
    learns = kind.is_floating_point and one.info.supports_autograd
    torch.default_generator.manual_seed(42)
    for sample in one.info.sample_inputs_func(one.info, "cpu", kind, requires_grad=learns):
        yield (sample.input, *sample.args), sample.kwargs
