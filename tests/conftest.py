"""Every test runs with shapes and dtypes checked: the jaxtyping hook must be in place before the package is imported.
And no test may ask for the network: whatever is downloaded by accident fails at once, and says so."""

import contextlib
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import shapes

assert "instruct_goose" not in sys.modules, (
    "instruct_goose was imported before the shape checker could be installed"
)
shapes.install()
os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # a GPU has lessons of its own: make portable ARGS=gpu, make evidence ARGS=gpu
)

import torch  # noqa: E402

torch.set_num_threads(1)
# who starts the tests in the background, or under nohup, makes them deaf to signals that some tests send
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="also what only `make deep` runs")


def pytest_configure(config):
    config.addinivalue_line("markers", "deep: a repeat with other values, left to `make deep`")
    for name, n in (("test", 50), ("deep", 300)):
        hypothesis.settings.register_profile(name, max_examples=n, deadline=None)
    hypothesis.settings.load_profile("deep" if config.getoption("--deep") else "test")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--deep"):
        return
    left_out = [item for item in items if item.get_closest_marker("deep")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture(autouse=True)
def _seed():
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed writes down the whole stack for a GPU to come, each time
    shapes.again()


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family not in (socket.AF_INET, socket.AF_INET6):
            return connect(self, address)
        try:
            ours = ipaddress.ip_address(address[0]).is_loopback
        except ValueError:
            ours = address[0] == "localhost"
        if not ours:
            raise RuntimeError(f"a test asked for the network: {address}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield


@pytest.fixture(params=[float("nan"), float("inf"), float("-inf"), 1e6, -1e6], ids=str)
def poison(request):
    "poison(x, mask): x with one of five poisons where the mask is False. A test that takes it runs five times."
    return lambda x, mask: torch.where(mask, x.detach(), request.param).requires_grad_(
        x.requires_grad
    )


@pytest.fixture
def unchecked():
    "with unchecked(): the package's own errors, as users meet them without the shape checker."

    @contextlib.contextmanager
    def off():
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            yield
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    return off


@pytest.fixture
def tokenizer():
    "Its nine words are the vocabulary of `small_models.tiny`."
    from instruct_goose.models.tokens import word_tokenizer

    return word_tokenizer(
        "the a film plot is good bad".split(),
        model_max_length=12,
        pad="<end>",
        bos="<end>",
        eos="<end>",
    )


DRAWING = {"recipes", "tasks", "cli", "doctor", "compat"}  # folders whose tests make whole runs


@pytest.fixture(autouse=True)
def _pictures_are_not_drawn(request, monkeypatch):
    "The pictures of a run take a third of a run that is small enough for a test: here they are files that begin as a PNG does."
    if request.path.parent.name not in DRAWING:
        return
    import matplotlib.figure

    draw = matplotlib.figure.Figure.savefig

    def savefig(self, to, **how):
        if isinstance(to, (str, Path)):
            Path(to).write_bytes(b"\x89PNG\r\n\x1a\n")
        else:
            draw(self, to, **how)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
