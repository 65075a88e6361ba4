"""A plug-in of pytest: `import torch` gives page tensors, and the package is a page's part of it.

PAGE_FOLDER=… python -m pytest -p with_page_tensors tests/objective
"""

import contextlib
import os
import sys

import hypothesis
import pytest

sys.path.insert(0, os.environ["PAGE_FOLDER"])

import page_tensors  # noqa: E402

page_tensors.install()
hypothesis.settings.register_profile("page", max_examples=10, deadline=None)
hypothesis.settings.load_profile("page")


def pytest_configure(config):
    config.addinivalue_line("markers", "deep: a repeat with other values")


@pytest.fixture(autouse=True)
def _seed():
    page_tensors.manual_seed(0)


@pytest.fixture
def unchecked():
    "No types are checked on a page."
    return contextlib.nullcontext


@pytest.fixture(params=[float("nan"), float("inf"), float("-inf"), 1e6, -1e6], ids=str)
def poison(request):
    "See tests/conftest.py."
    return lambda x, mask: page_tensors.where(mask, x.detach(), request.param).requires_grad_(
        x.requires_grad
    )
