"""Another machine's arithmetic, and nothing else. `make portable` puts this folder on PYTHONPATH; every Python process then reads

    GOOSE_JITTER=n    initial weights that are drawn are multiplied by (1 + 1e-6·noise); n = 1, 2, … is the draw
    GOOSE_THREADS=n   torch works with n threads, whatever a program asks for

and is left alone where none of them is set. torch is not imported here: a hook waits until somebody else does.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import zlib

DRAWS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
    "sparse_",
)
jitter, threads = (int(os.environ.get(name) or 0) for name in ("GOOSE_JITTER", "GOOSE_THREADS"))


def jittered(draw):
    "The same initialiser, and then the jitter: a function of the draw, the shape and the very weights, so what was equal stays equal."
    import functools

    import torch

    @functools.wraps(draw)
    def initialise(tensor, *args, **kwargs):
        tensor = draw(tensor, *args, **kwargs)
        if not tensor.is_meta:
            with torch.no_grad():
                wide = tensor.double().cpu()
                seed = zlib.crc32(
                    wide.contiguous().numpy().tobytes(),
                    zlib.crc32(repr((jitter, tuple(tensor.shape))).encode()),
                )
                noise = torch.randn(
                    wide.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
                )
                tensor.copy_(
                    wide * (1 + 1e-6 * torch.empty_like(wide).copy_(noise))
                )  # on a pretended GPU `wide` has stayed there
        return tensor

    return initialise


def change_init(init):
    "Before anybody can have taken a function out of torch.nn.init."
    for name in DRAWS:
        setattr(init, name, jittered(getattr(init, name)))


def change_torch(torch):
    "Our number of threads; a program that asks how many there are hears the number that it has set."
    asked = torch.get_num_threads()

    def set_num_threads(n):
        nonlocal asked
        asked = n
        if multiprocessing.current_process().daemon:
            own(
                n
            )  # forked by `in_processes`: it would wait for OpenMP's threads, which are not forked along

    own = torch.set_num_threads
    own(threads)
    torch.set_num_threads = set_num_threads
    torch.get_num_threads = lambda: asked


class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in changes:
            return None
        change = changes.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


changes = ({"torch.nn.init": change_init} if jitter else {}) | (
    {"torch": change_torch} if threads else {}
)
if changes:
    sys.meta_path.insert(0, Hook())
