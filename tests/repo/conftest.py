"""One browser, with the network off, for all tests of pages."""

import chromium
import pytest


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    it = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield it
    it.close()
