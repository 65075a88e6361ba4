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


def half_moved():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].cuda()
    return model(x(**G))


def lost_buffer():
    model = nn.BatchNorm1d(3).eval()
    model.weight.data, model.bias.data = model.weight.data.cuda(), model.bias.data.cuda()
    return model(x(**G))


REFUSED = {  # as CUDA does
    "add": lambda: x(**G) + x(**C),
    "compare": lambda: x(**G) < row(**C),
    "a number on the GPU, a tensor on the CPU": lambda: number(**G) * x(**C),
    "in place": lambda: x(**G).mul_(row(**C)),
    "a result into a number on the CPU": lambda: number(**C).add_(number(**G)),
    "cat": lambda: torch.cat([x(**G), x(**C)]),
    "stack of numbers": lambda: torch.stack([number(**G), number(**C)]),
    "where, mask on the CPU": lambda: torch.where(mask(**C), x(**G), 0.),
    "where, tensors on the CPU": lambda: torch.where(mask(**G), x(**G), x(**C)),
    "masked_fill, mask on the CPU": lambda: x(**G).masked_fill(mask(**C), 0.),
    "masked_scatter": lambda: x(**G).masked_scatter(mask(**C), x(**G)),
    "gather": lambda: x(**G).gather(-1, ids(**C)),
    "scatter": lambda: x(**G).scatter(-1, ids(**G), x(**C)),
    "index_select": lambda: x(**G).index_select(0, torch.tensor([0])),
    "index_put, values on the CPU": lambda: x(**G).index_put((mask(**G),), torch.ones(12)),
    "indices on the GPU": lambda: x(**C)[torch.tensor([0], **G)],
    "embedding": lambda: F.embedding(ids(**C), x(**G)),
    "linear": lambda: F.linear(x(**G), x(**C)),
    "matmul": lambda: x(**G) @ row(**C),
    "cross entropy": lambda: F.cross_entropy(x(**G), torch.zeros(4, dtype=torch.long)),
    "a loss with its mask on the CPU": lambda: (x(**G) * mask(**C)).sum() / mask(**C).sum(),
    "equal": lambda: torch.equal(x(**G), x(**C)),
    "isin": lambda: torch.isin(ids(**G), torch.tensor([1, 2])),
    "searchsorted": lambda: torch.searchsorted(x(**G).cumsum(-1), x(**C)),
    "rand with a CPU generator": lambda: torch.rand(3, **G, generator=torch.Generator()),
    "randperm with a CPU generator": lambda: torch.randperm(3, **G, generator=torch.Generator()),
    "uniform_ with a CPU generator": lambda: x(**G).uniform_(generator=torch.Generator()),
    "multinomial with a CPU generator": lambda: x(**G).multinomial(1, generator=torch.Generator()),
    "half a module moved": half_moved,
    "a buffer left behind": lost_buffer,
}
NOT_FAKED = {"equal", "stack of numbers", "a result into a number on the CPU", "indices on the GPU", "index_put, values on the CPU", "a loss with its mask on the CPU", "half a module moved",
             "a buffer left behind"} | {name for name in REFUSED if "generator" in name}


def trains(model, device):
    "One update of AdamW on the GPU: backward, clipping, foreach and fused."
    for fused in (False, True):
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        model(x(**G)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        again = torch.optim.AdamW(model.parameters(), fused=fused)
        again.load_state_dict(optimizer.state_dict())
        again.step()
    return model[0].weight


def by_row(y):
    y = y.clone()
    y[0] = torch.ones(3, **G)
    return y


TAKEN = {
    "a number on the CPU": lambda: x(**G) * number(**C),
    "a number on the CPU first": lambda: number(**C) * x(**G),
    "numbers of both": lambda: number(**C) + number(**G),
    "Python's numbers": lambda: 2 * x(**G) + 1,
    "like": lambda: torch.zeros_like(x(**G)) + x(**G).new_ones(3) + torch.arange(3, device=x(**G).device),
    "to": lambda: x(**C).to("cuda") + x(**C).cuda() + x(**C).to(x(**G)) + x(**C).to(torch.device("cuda:0"), torch.float64),
    "dtype": lambda: x(**G).double().to(torch.float32).bfloat16(),
    "there and back": lambda: x(**G).cpu().numpy() + x(**C).numpy(),
    "views": lambda: x(**G)[1:].T.reshape(-1) + x(**G)[:3].view(-1),
    "masks": lambda: x(**G)[mask(**G)].sum() + x(**G).masked_fill(mask(**G), 0.).sum(),
    "rows": lambda: by_row(x(**G)),
    "a number to index with": lambda: x(**G)[0, 1],
    "numbers out": lambda: (x(**G).sum().item(), x(**G).tolist(), bool((x(**G) > 0).all()), int(x(**G).sum())),
    "copy_": lambda: (x(**G).copy_(x(**C)), x(**C).copy_(x(**G))),
    "drawn on the CPU, then moved": lambda: torch.rand(3, generator=torch.Generator()).to("cuda") + row(**G),
    "its own dice": lambda: torch.rand(3, **G) + F.dropout(row(**G), .5) + row(**G).uniform_(),
    "a module moved": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).cuda()(x(**G)),
    "a module made there": lambda: nn.Linear(3, 3, **G)(x(**G)),
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


def test_numpy():
    with PretendGPU(), pytest.raises(TypeError, match="numpy"): x(**G).numpy()


def test_copied_in_silence():
    "CUDA takes indices on the CPU and copies them at each use: we want to know."
    with PretendGPU():
        for index in (torch.tensor([0]), torch.ones(4, dtype=torch.bool)):
            with pytest.raises(DeviceError, match="in silence"): x(**G)[index]
            with pytest.raises(DeviceError, match="in silence"): x(**G)[index] = 0.


def test_devices_have_names():
    with PretendGPU():
        y = x(**G)
        assert y.device == torch.device("cuda:0") and y.is_cuda and not y.is_cpu and not x().is_cuda
        assert (y + 1)[0].sum().device.type == "cuda" and torch.arange(3).device.type == "cpu"
        assert nn.Linear(3, 3).to("cuda").weight.device.type == "cuda"
    assert not torch.cuda.is_available()


def test_gradients_cross_with_their_tensors():
    "A leaf on the CPU, a loss on the GPU: the gradient comes back to the CPU, and is right."
    with PretendGPU():
        w = torch.tensor([1., 2.], requires_grad=True)
        (w.to("cuda").square() * torch.tensor([3., 5.], **G)).sum().backward()
        assert w.grad.device.type == "cpu" and w.grad.tolist() == [6., 20.]
        with pytest.raises(DeviceError): w.grad = w.grad.cuda()


def test_recomputed_in_the_backward_pass():
    "Activation checkpoints run the code a second time; it asks for devices again."
    f = lambda y: y * torch.arange(3, device=y.device).to(y) + y.new_ones(3)
    with PretendGPU():
        y = x(**G).requires_grad_()
        torch.utils.checkpoint.checkpoint(f, y, use_reentrant=False).sum().backward()
        assert y.grad[0].tolist() == [0., 1., 2.]


def test_backward_pass_is_watched():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y): return y * 2
        @staticmethod
        def backward(ctx, gradient): return gradient * kept

    with PretendGPU():
        kept = x(**C)
        with pytest.raises(DeviceError): Wrong.apply(x(**G).requires_grad_()).sum().backward()
