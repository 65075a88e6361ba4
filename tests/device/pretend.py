"""A GPU that is not there, to find what would fail on one that is.

Inside `with PretendGPU():` every tensor has a place, "cuda" or "cpu", though all of them are computed on the CPU. A factory
makes its tensors where its `device=` says, `.to`, `.cuda` and `.cpu` move them, a result is where its inputs are. `x.device`
says cuda:0 and `torch.cuda.is_available()` says True, so code takes the branches that it would take on a GPU. What CUDA refuses is
refused: two places in one operation, a CPU generator for a tensor on the GPU, `.numpy()` of one. So is what CUDA would do in
silence: indices on the CPU that it copies to the GPU at each use. A number may come along (a CPU tensor without dimensions, in
arithmetic), `.item()`, `.tolist()` and `copy_` may cross, as in CUDA. The error names the operation and the line.

`with PretendGPU() as waits:` also counts, by kernel, where Python would wait for the GPU: `.item()`, copies across that are not
`non_blocking`, shapes that depend on data. A CUDA graph is run again step by step, and refuses what no graph can hold.

Two modes make it. The function mode sees what is written, `device=` and `x.device` among it; the dispatch mode sees each kernel,
those of the backward pass included. The place is kept on the tensor's storage, so that views share it.
"""

import linecache
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instruct_goose.models.decoding import GraphSteps
from instruct_goose.objective.logprobs_in_pieces import LogprobsInPieces

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent

# a CPU tensor without dimensions may come along in these; CUDA's other kernels do not take it, or not all of them
ARITHMETIC = set(
    """add sub rsub mul div remainder fmod pow atan2 maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill fill index_put _index_put_impl addcmul addcdiv lerp copy
    _foreach_add _foreach_mul _foreach_div floor_divide""".split()
)
INDEXING = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
CROSSING = {"copy", "_foreach_copy"}  # that is what they are for
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
}  # the host needs what they say
WAITS: Counter[str] = Counter()


class DeviceError(RuntimeError):
    "What CUDA would have refused, or done behind our back."


def _tensors(*trees) -> list[Tensor]:
    return [
        x
        for x in tree_leaves(trees)
        if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type != "meta"
    ]


def place(x: Tensor) -> str | None:
    "cuda or cpu; None, which goes with either: what autograd made for itself, an empty gradient say."
    with torch._C.DisableTorchFunction():
        return getattr(x.untyped_storage(), "place", "cpu")


def _put(x: Tensor, where: str | None) -> Tensor:
    with torch._C.DisableTorchFunction():
        x.untyped_storage().place = where
    return x


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to):
        ctx.back = place(x)
        return _put(x.clone(), to)

    @staticmethod
    def backward(ctx, gradient):
        return _moved(gradient, ctx.back), None


def _moved(x: Tensor, to: str, waits: bool = True) -> Tensor:
    if place(x) == to:
        return x
    WAITS[f"to {to}"] += waits
    return _Move.apply(x, to)


def _meant(device) -> str | None:
    "The place that a device= means; None: none that concerns us."
    if type(device) is int:
        return "cuda"
    kind = torch.device(device).type
    return kind if kind in ("cuda", "cpu") else None


def _line() -> str:
    "Where in our own code, or the caller's, this was written."
    frame = sys._getframe(1)
    found = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        own = path.is_relative_to(ROOT / "instruct_goose") or path.is_relative_to(ROOT / "nbs")
        if own or (found is None and path != Path(__file__) and not path.is_relative_to(TORCH)):
            found = f"{path.name}:{frame.f_lineno}: {linecache.getline(str(path), frame.f_lineno).strip()}"
        if own:
            break
        frame = frame.f_back
    return found or "in the backward pass"


def _refuse(what: str, why: str):
    raise DeviceError(f"{why} ({what}) at {_line()}")


def _check_indices(name: str, of: Tensor, indices: list[Tensor]) -> None:
    "Indices are where the tensor is that they are taken from."
    if any(place(i) == "cuda" for i in indices) and place(of) == "cpu":
        _refuse(name, "indices on cuda:0 for a tensor on the CPU")
    if any(place(i) == "cpu" for i in indices) and place(of) == "cuda":
        _refuse(
            name,
            "indices on the CPU for a tensor on cuda:0: they would be copied there in silence",
        )


def _check_on_gpu(name: str, func, args, kwargs) -> None:
    "A kernel of the GPU draws from its generator, and writes to its tensors."
    if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
        _refuse(name, "Expected a 'cuda' device type for generator but found 'cpu'")
    for spec, x in zip(func._schema.arguments, args):
        is_written = spec.alias_info is not None and spec.alias_info.is_write
        if is_written and isinstance(x, Tensor) and place(x) == "cpu":
            _refuse(name, "a result on cuda:0 cannot be written to a tensor on the CPU")


def _check_capturable(name: str, args) -> None:
    """A graph's step waits for nothing, and copies nothing from memory that the CPU may page out.

    `x[indices] = 0` makes a tensor of the number on the CPU, and sends it across.
    """
    if name in WAITING:
        _refuse(name, "operation not permitted when stream is capturing")
    if name == "index_put" and any(place(x) == "cpu" for x in _tensors(args[2:])):
        _refuse(name, "Cannot copy between CPU and CUDA tensors during CUDA graph capture")


def _common_place(func, args, kwargs) -> str | None:
    "Where the kernel runs, or a DeviceError."
    name = func.overloadpacket.__name__.removesuffix("_")
    given = _tensors(args, kwargs)
    if _Graph.capturing:
        _check_capturable(name, args)
    if name in INDEXING:
        _check_indices(name, args[0], _tensors(args[1]))

    def goes_along(x):
        return place(x) == "cpu" and x.ndim == 0 and name in ARITHMETIC

    places = {place(x) for x in given if not goes_along(x)} - {None}
    if len(places) > 1 and name not in CROSSING:
        _refuse(
            name,
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        )
    if "cuda" in places and name not in CROSSING:
        _check_on_gpu(name, func, args, kwargs)
    if places:
        return places.pop() if len(places) == 1 else place(args[0])
    if given:
        return place(given[0])
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return None if in_backward else "cpu"


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        where = _common_place(func, args, kwargs)
        name = func.overloadpacket.__name__.removesuffix("_")
        if where == "cuda" and (
            name in WAITING
            or name in INDEXING
            and any(i.dtype == torch.bool for i in _tensors(args[1]))
        ):
            WAITS[name] += 1
        out = func(*args, **kwargs)
        for x in _tensors(out):
            if not hasattr(x.untyped_storage(), "place"):
                _put(x, where)
        return out


def _to(x: Tensor, *args, **kwargs) -> Tensor:
    "Tensor.to in all its forms."
    given = [*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
    like = next((a for a in given if isinstance(a, Tensor)), None)
    device = next((a for a in given if isinstance(a, str | torch.device) or type(a) is int), None)
    dtype = next(
        (a for a in given if isinstance(a, torch.dtype)), x.dtype if like is None else like.dtype
    )
    if device is not None and _meant(device) is None:
        return x.to(*args, **kwargs)
    y = x.to(dtype, copy=kwargs.get("copy", False))
    to = None
    if like is not None:
        to = place(like)
    elif device is not None:
        to = _meant(device)
    by_torch = Path(sys._getframe(2).f_code.co_filename).is_relative_to(
        TORCH
    )  # to a place that its C++ has told it
    return y if to is None else _moved(y, to, waits=not kwargs.get("non_blocking") and not by_torch)


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        x = (
            args[0]
            if args and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
            else None
        )
        if x is not None and (special := _METHODS.get(func)):
            return special(x, *args[1:], **kwargs)
        device = kwargs.get("device")
        if device is None or (to := _meant(device)) is None:
            return func(*args, **kwargs)
        if to == "cuda" and isinstance(kwargs.get("generator"), torch.Generator):
            _refuse(func.__name__, "Expected a 'cuda' device type for generator but found 'cpu'")
        known = {t.untyped_storage()._cdata for t in _tensors(args, kwargs)}
        out = func(*args, **kwargs | {"device": "cpu"})
        return _moved(out, to) if out.untyped_storage()._cdata in known else _put(out, to)


def _numpy(x, *args, **kwargs):
    if place(x) == "cuda":
        raise TypeError(
            f"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first, at {_line()}"
        )
    return x.numpy(*args, **kwargs)


def _tolist(x):
    WAITS["tolist"] += (
        place(x) == "cuda" and x.ndim > 0
    )  # of a number it is an item(), which is counted
    return x.tolist()


def _set_gradient(p, gradient):
    if gradient is not None and {place(p), place(gradient)} == {"cuda", "cpu"}:
        _refuse("grad", "assigned grad has data located on a different device")
    p.grad = gradient


_METHODS = {
    Tensor.device.__get__: lambda x: GPU if place(x) == "cuda" else torch.device("cpu"),
    Tensor.is_cuda.__get__: lambda x: place(x) == "cuda",
    Tensor.is_cpu.__get__: lambda x: place(x) != "cuda",
    Tensor.get_device: lambda x: 0 if place(x) == "cuda" else -1,
    Tensor.to: _to,
    Tensor.cuda: lambda x, *args, **kwargs: _moved(x, "cuda"),
    Tensor.cpu: lambda x, **kwargs: _moved(x, "cpu"),
    Tensor.pin_memory: lambda x: x,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: lambda x, *args, **kwargs: _numpy(x).__array__(*args, **kwargs),
    Tensor.__deepcopy__: lambda x, memo: _put(x.__deepcopy__(memo), place(x)),
    Tensor.grad.__set__: _set_gradient,
}


class _Graph:
    "In the place of a CUDA graph: the step, run again on the token that was copied in."

    capturing = False

    def __init__(self, steps, token):
        self.steps = steps
        steps.token = token.clone()

    def replay(self):
        _Graph.capturing = True
        try:
            self.steps.logits = self.steps.step(self.steps.token)
        finally:
            _Graph.capturing = False


@contextmanager
def PretendGPU():
    "See above."
    WAITS.clear()
    dice = torch.zeros(16, dtype=torch.uint8)  # the state of a generator that does not exist
    names = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=2**33),
        get_rng_state=lambda *_: dice.clone(),
        get_rng_state_all=lambda: [dice.clone()],
        set_rng_state=lambda state, *_: dice.copy_(state),
        is_current_stream_capturing=lambda: False,
        is_bf16_supported=lambda *_, **__: True,
    )
    calls = _Calls()
    run = torch.utils.checkpoint._run_fn_with_dynamo_disabled

    def run_again(
        f, *args
    ):  # an activation checkpoint, in the backward pass: there the function mode is off
        with calls:
            return run(f, *args)

    pieces = LogprobsInPieces.backward

    def piecewise(ctx, *gradients):  # there too
        with calls:
            return pieces(ctx, *gradients)

    shape = {
        "default": lambda x: {"shape": x.shape, "dtype": x.dtype}
    }  # its own check would compare devices seen in the mode and out of it

    def none(**_):
        return None  # as in torch's CPU build; a CUDA build without a driver would be asked for its stream by each optimizer step

    with (
        patch.multiple(torch.cuda, **names),
        patch.object(torch.accelerator, "current_accelerator", none),
        patch.object(torch.utils.checkpoint, "_run_fn_with_dynamo_disabled", run_again),
        patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, shape),
        patch.object(LogprobsInPieces, "backward", staticmethod(piecewise)),
        patch.object(GraphSteps, "capture", lambda steps, token: _Graph(steps, token)),
        _Kernels(),
        calls,
    ):
        yield WAITS
