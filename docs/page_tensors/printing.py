"""A tensor as text, as torch prints it (torch/_tensor_str.py): 4 digits, 80 columns."""

import math

from .dtypes import bool_, float32, int64
from .indexing import select
from .refusal import refuse_keywords
from .tensor import Tensor


class Options:
    "How tensors are printed; see set_printoptions."

    precision = 4
    threshold = 1000
    edgeitems = 3
    linewidth = 80
    sci_mode: bool | None = None


def set_printoptions(
    precision: int | None = None,
    threshold: int | None = None,
    edgeitems: int | None = None,
    linewidth: int | None = None,
    profile: str | None = None,
    sci_mode: bool | None = None,
    **others,
) -> None:
    "Change how tensors are printed from now on."
    refuse_keywords("set_printoptions", others)
    if profile is not None:
        refuse_keywords("set_printoptions", {"profile": profile})
    given = dict(precision=precision, threshold=threshold, edgeitems=edgeitems, linewidth=linewidth)
    for name, value in given.items():
        if value is not None:
            setattr(Options, name, value)
    Options.sci_mode = sci_mode


class Formatter:
    "One width and one notation for all numbers of a tensor."

    def __init__(self, values: list, is_float: bool):
        self.is_float = is_float
        self.is_whole = True
        self.is_scientific = False
        self.width = 1
        if not is_float:
            self.width = max(len(str(x)) for x in values)
            return
        finite = [x for x in values if math.isfinite(x) and x != 0]
        if not finite:
            return
        smallest = min(map(abs, finite))
        largest = max(map(abs, finite))
        self.is_whole = all(x == math.ceil(x) for x in finite)
        self.is_scientific = Options.sci_mode
        if self.is_scientific is None:
            self.is_scientific = largest / smallest > 1000 or largest > 1e8 or smallest < 1e-4
        self.width = max(len(self.digits(x)) for x in finite)

    def digits(self, x: float) -> str:
        if self.is_scientific:
            return f"{x:.{Options.precision}e}"
        if self.is_whole:
            return f"{x:.0f}" + ("." if math.isfinite(x) else "")
        return f"{x:.{Options.precision}f}"

    def __call__(self, x: object) -> str:
        return (self.digits(x) if self.is_float else str(x)).rjust(self.width)


def shown(x: Tensor) -> list:
    "The numbers that are printed: of a long tensor only those at the edges."
    edge = Options.edgeitems
    if x.ndim == 0:
        return list(x.flat())
    n = x.shape[0]
    rows = range(n) if n <= 2 * edge else [*range(edge), *range(n - edge, n)]
    return [value for i in rows for value in shown(select(x, 0, i))]


def vector_text(x: Tensor, indent: int, is_short: bool, form: Formatter) -> str:
    values = x.flat()
    edge = Options.edgeitems
    if is_short and len(values) > 2 * edge:
        words = [*map(form, values[:edge]), " ...", *map(form, values[-edge:])]
    else:
        words = list(map(form, values))
    in_a_line = max(1, (Options.linewidth - indent) // (form.width + 2))
    lines = [", ".join(words[i : i + in_a_line]) for i in range(0, len(words), in_a_line)]
    return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"


def body(x: Tensor, indent: int, is_short: bool, form: Formatter) -> str:
    if x.ndim == 0:
        return form(x.flat()[0])
    if x.ndim == 1:
        return vector_text(x, indent, is_short, form)
    n = x.shape[0]
    edge = Options.edgeitems
    if is_short and n > 2 * edge:
        rows = [*range(edge), None, *range(n - edge, n)]
    else:
        rows = list(range(n))
    parts = []
    for i in rows:
        parts.append("..." if i is None else body(select(x, 0, i), indent + 1, is_short, form))
    return "[" + ("," + "\n" * (x.ndim - 1) + " " * (indent + 1)).join(parts) + "]"


def text(x: Tensor) -> str:
    "tensor([…], dtype=…, grad_fn=<…>), as torch prints it."
    from .autograd import no_grad

    with no_grad():
        kind = x.dtype
        suffixes = []
        had_views = x.storage.has_views
        if x.shape.numel() == 0:
            numbers = "[]"
            if x.ndim != 1:
                suffixes.append(f"size={tuple(x.shape)}")
            if kind is not float32:
                suffixes.append(f"dtype={kind}")
        else:
            is_short = x.shape.numel() > Options.threshold
            form = Formatter(shown(x) if is_short else x.flat(), kind.is_floating_point)
            numbers = body(x, len("tensor("), is_short, form)
            if kind not in (float32, int64, bool_):
                suffixes.append(f"dtype={kind}")
        x.storage.has_views = had_views
    if x.node is not None:
        suffixes.append(f"grad_fn={x.node}")
    elif x.requires_grad:
        suffixes.append("requires_grad=True")
    result = "tensor(" + numbers
    line = len(result) - result.rfind("\n") + 1
    for suffix in suffixes:
        if line + len(suffix) + 2 > Options.linewidth:
            result += ",\n" + " " * len("tensor(") + suffix
            line = len("tensor(") + len(suffix)
        else:
            result += ", " + suffix
            line += len(suffix) + 2
    return result + ")"


def formatted(x: Tensor, spec: str) -> str:
    "f'{x:.2f}' of a tensor without dimensions is that of its number."
    if x.ndim == 0:
        return format(x.flat()[0], spec)
    if spec:
        raise TypeError(f"unsupported format string passed to {type(x).__name__}.__format__")
    return text(x)
