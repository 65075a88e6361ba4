"The pictures of a run are a third of the time of one that is small enough for a test: here they are files that begin as a PNG does. What a module shares is drawn."
from pathlib import Path

import matplotlib.figure
import pytest


@pytest.fixture(autouse=True)
def _pictures_are_not_drawn(monkeypatch):
    draw = matplotlib.figure.Figure.savefig

    def savefig(self, to, **how):
        if isinstance(to, (str, Path)): Path(to).write_bytes(b"\x89PNG\r\n\x1a\n")
        else: draw(self, to, **how)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
