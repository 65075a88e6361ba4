"""The pretend GPU itself: what CUDA refuses is refused, what it takes is taken. Where torch's own FakeTensorMode, which knows
CUDA's rules without a GPU, can run a snippet, it must say the same."""
import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from device.pretend import DeviceError, PretendGPU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.deep  # that mistakes of the library are found: test_library.test_a_mistake_is_found_with_its_line
G, C = {"device": "cuda"}, {"device": "cpu"}
x = lambda **kw: torch.ones(4, 3, **kw)
row = lambda **kw: torch.ones(3, **kw)
ids = lambda **kw: torch.zeros(4, 3, dtype=torch.long, **kw)
mask = lambda **kw: torch.ones(4, 3, dtype=torch.bool, **kw)
number = lambda **kw: torch.tensor(2., **kw)


REFUSED = {  # as CUDA does
    "add": lambda: x(**G) + x(**C),
    "compare": lambda: x(**G) < row(**C),
    "a number on the GPU, a tensor on the CPU": lambda: number(**G) * x(**C),
    "a result into a number on the CPU": lambda: number(**C).add_(number(**G)),
    "cat": lambda: torch.cat([x(**G), x(**C)]),
    "where, mask on the CPU": lambda: torch.where(mask(**C), x(**G), 0.),
    "gather": lambda: x(**G).gather(-1, ids(**C)),
    "index_put, values on the CPU": lambda: x(**G).index_put((mask(**G),), torch.ones(12)),
    "indices on the GPU": lambda: x(**C)[torch.tensor([0], **G)],
    "linear": lambda: F.linear(x(**G), x(**C)),
    "searchsorted": lambda: torch.searchsorted(x(**G).cumsum(-1), x(**C)),
    "rand with a CPU generator": lambda: torch.rand(3, **G, generator=torch.Generator()),
}
NOT_FAKED = {"a result into a number on the CPU", "indices on the GPU", "index_put, values on the CPU", "rand with a CPU generator"}


def trains(model, device):
    "One update of AdamW on the GPU: backward, clipping, foreach and fused."
    for fused in (False, True):
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        model(x(**G)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()


TAKEN = {
    "a number on the CPU": lambda: x(**G) * number(**C),
    "numbers of both": lambda: number(**C) + number(**G),
    "like": lambda: torch.zeros_like(x(**G)) + x(**G).new_ones(3) + torch.arange(3, device=x(**G).device),
    "to": lambda: x(**C).to("cuda") + x(**C).cuda() + x(**C).to(x(**G)) + x(**C).to(torch.device("cuda:0"), torch.float64),
    "there and back": lambda: x(**G).cpu().numpy() + x(**C).numpy(),
    "masks": lambda: x(**G)[mask(**G)].sum() + x(**G).masked_fill(mask(**G), 0.).sum(),
    "numbers out": lambda: (x(**G).sum().item(), x(**G).tolist(), bool((x(**G) > 0).all()), int(x(**G).sum())),
    "copy_": lambda: (x(**G).copy_(x(**C)), x(**C).copy_(x(**G))),
    "drawn on the CPU, then moved": lambda: torch.rand(3, generator=torch.Generator()).to("cuda") + row(**G),
    "a copy of a module": lambda: copy.deepcopy(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).cuda())(x(**G)),
    "training": lambda: trains(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), "cuda"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with PretendGPU(), pytest.raises(DeviceError, match="test_pretend.py:|backward"): REFUSED[name]()


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - NOT_FAKED))
def test_torch_agrees_that_it_is_refused(name):
    with FakeTensorMode(), pytest.raises((RuntimeError, ValueError), match="same device|different devices"): REFUSED[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    with PretendGPU(): TAKEN[name]()


def test_gradients_cross_with_their_tensors():
    "A leaf on the CPU, a loss on the GPU: the gradient comes back to the CPU, and is right."
    with PretendGPU():
        w = torch.tensor([1., 2.], requires_grad=True)
        (w.to("cuda").square() * torch.tensor([3., 5.], **G)).sum().backward()
        assert w.grad.device.type == "cpu" and w.grad.tolist() == [6., 20.]
        with pytest.raises(DeviceError): w.grad = w.grad.cuda()


def test_backward_pass_is_watched():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y): return y * 2
        @staticmethod
        def backward(ctx, gradient): return gradient * kept

    with PretendGPU():
        kept = x(**C)
        with pytest.raises(DeviceError): Wrong.apply(x(**G).requires_grad_()).sum().backward()
