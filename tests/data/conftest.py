"An empty working directory with files in it, this package's own errors, and what a refusal must say."

from pathlib import Path

import pytest


@pytest.fixture
def at(tmp_path, monkeypatch):
    "at(name, content): a file in an empty working directory."
    monkeypatch.chdir(tmp_path)

    def write(name, content=b""):
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


@pytest.fixture(autouse=True)
def _own_errors(unchecked):
    with unchecked():
        yield


@pytest.fixture
def refused():
    "refused(call, words): the error, which says them."

    def check(call, *words, error=ValueError):
        with pytest.raises(error) as e:
            call()
        for word in words:
            assert word in str(e.value), str(e.value)
        return e.value

    return check
