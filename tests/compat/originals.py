"""Calls of another library's functions as numbers: recorded from the library itself in originals.json, asked of ours always, and of the library
where it is installed (`make parity`). `RECORD=1` there writes the file anew."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).with_name("originals.json")


def normal(seed, dtype=torch.float64):
    "x(*shape): normal numbers, the same on every machine."
    dice = random.Random(seed)
    return lambda *shape: (
        torch.tensor([dice.gauss(0, 1) for _ in range(math.prod(shape))], dtype=torch.float64)
        .view(shape)
        .to(dtype)
    )


def in_a_row(x):
    "What is packed in tuples and dicts, without what is None."
    if isinstance(x, dict | tuple | list):
        return [z for y in (x.values() if isinstance(x, dict) else x) for z in in_a_row(y)]
    return [] if x is None else [x]


def each(f, x):
    "f of every floating-point tensor, packed as before."
    if isinstance(x, dict):
        return {k: each(f, y) for k, y in x.items()}
    if isinstance(x, tuple | list):
        return [each(f, y) for y in x]
    return f(x) if torch.is_tensor(x) and x.is_floating_point() else x


def digest(f, args, options):
    "A kind and a number for each output, for each argument afterwards, and for the gradient of all outputs on each: its product with fixed weights."

    def number(x, k):
        return float(f"{(x.detach().double() * normal(k)(*x.shape)).sum():.12g}")

    leaves = each(lambda x: x.clone().requires_grad_(), args)
    given = each(lambda x: x * 1, leaves)  # a function may write into them
    outs = in_a_row(f(*given, **options))
    found = [
        [f"{x.dtype} {[*x.shape]}" + " grad" * x.requires_grad, number(x, k)]
        if torch.is_tensor(x)
        else [type(x).__name__, float(x)]
        for k, x in enumerate(outs)
    ]
    found += [
        ["after", number(x, 50 + k)] for k, x in enumerate(in_a_row(given)) if torch.is_tensor(x)
    ]
    inputs = [x for x in in_a_row(leaves) if torch.is_tensor(x) and x.requires_grad]
    smooth = [
        (x.double() * normal(100 + k)(*x.shape)).sum()
        for k, x in enumerate(outs)
        if torch.is_tensor(x) and x.requires_grad
    ]
    grads = torch.autograd.grad(sum(smooth), inputs, allow_unused=True) if smooth else []
    return found + [
        ["gradient", 0.0 if g is None else number(g, 150 + k)] for k, g in enumerate(grads)
    ]


def compare(library, calls, dtype=torch.float64):
    "calls: (label, function, arguments, options)."
    found = {
        f"{library} {label} {k}": digest(f, args, options)
        for k, (label, f, args, options) in enumerate(calls)
    }
    recorded = json.loads(FILE.read_text())
    if os.environ.get("RECORD"):
        kept = {k: x for k, x in recorded.items() if not k.startswith(library)}
        FILE.write_text(
            "{\n"
            + ",\n".join(f"{json.dumps(k)}: {json.dumps(x)}" for k, x in (kept | found).items())
            + "\n}\n"
        )
        return
    wanted = {k: x for k, x in recorded.items() if k.startswith(library)}
    assert found.keys() == wanted.keys()
    close = dict(rel=1e-9, abs=1e-9) if dtype == torch.float64 else dict(rel=1e-3, abs=1e-4)
    for k, rows in wanted.items():
        kinds, numbers = zip(*rows)
        assert [kind for kind, _ in found[k]] == [
            kind.replace("float64", str(dtype).removeprefix("torch.")) for kind in kinds
        ], k
        assert [x for _, x in found[k]] == pytest.approx(numbers, nan_ok=True, **close), k
