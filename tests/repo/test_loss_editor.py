"""The editor of the loss in the playground, in Chromium, from a file, with the network off."""

import json
import sys
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path[:0] = [str(root / "docs"), str(root / "tests/repo")]
import chromium  # noqa: E402
import exercises  # noqa: E402
import playground  # noqa: E402

HERE = chromium.FOUND is not None
PYODIDE = root / f"docs/_build/pyodide-{exercises.PYODIDE}.tgz"
pytestmark = pytest.mark.skipif(
    not (HERE and PYODIDE.exists()), reason="Chromium or Pyodide is not here: make docs"
)
SOON = "const later = setTimeout; window.setTimeout = (f, t, ...more) => later(f, t === 10000 ? 6000 : t, ...more)"
STATE = "document.getElementById('pg-loss-state').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "playground.html").write_text(playground.page(), "utf-8")
    playground.write_static(folder / "_static")
    return (folder / "playground.html").as_uri()


class Editor:
    "The editor on an opened page."

    def __init__(self, tab):
        self.tab = tab
        tab.ask("playground.ready.then(() => 1)")

    def press(self, name: str) -> None:
        self.tab.ask(f"document.getElementById('pg-{name}').click(), 0")

    def text(self) -> str:
        return self.tab.ask("document.getElementById('pg-text').value")

    def edit(self, old: str, new: str) -> None:
        assert old in self.text()
        box = "document.getElementById('pg-text')"
        changed = f"{box}.value.replace({json.dumps(old)}, () => {json.dumps(new)})"
        self.tab.ask(f"{box}.value = {changed}, {box}.dispatchEvent(new Event('input'))")

    def train(self) -> str:
        "Train until an iteration is over, or something is said."
        self.press("train")
        self.tab.wait(
            "!document.getElementById('pg-mistake').hidden || "
            f"/^Trains/.test({STATE}) && /Iteration [1-9]/.test(document.getElementById('pg-iteration').textContent)"
        )
        if self.tab.ask("document.getElementById('pg-play').textContent") == "Pause":
            self.press("play")
        return self.tab.ask(STATE)

    def mistake(self) -> str | None:
        return self.tab.ask(
            "(p => p.hidden ? null : p.textContent)(document.getElementById('pg-mistake'))"
        )


def opened(one, page, asked: str = "", width: int = 1280) -> Editor:
    return Editor(one.open(page + asked, width, first=SOON))


def test_a_reader_edits_trains_and_sees_what_is_wrong(one, page):
    editor = opened(one, page)
    tab = editor.tab
    assert not [address for address in tab.asked if "python.js" in address]
    editor.edit("objective = torch.minimum(", "objective = torch.maximum(")
    assert "your surrogate, in Python" in editor.train()
    assert editor.mistake() is None
    lines = editor.text().splitlines()
    place = next(n for n, line in enumerate(lines, 1) if "torch.maximum(ratio" in line)
    editor.edit(lines[place - 1], "    objective = (ratio - ratio.detach()).sqrt() * advantages")
    editor.train()
    assert editor.mistake().startswith(f"Line {place}: Here the gradient stops being finite")
    editor.press("original")
    assert "torch.minimum(ratio" in editor.text()
    assert editor.mistake() is None
    assert "Nothing is edited" in editor.train()
    assert tab.quiet(), (tab.log, tab.asked)
    tab.close()


def test_a_build_without_python_says_so(one, tmp_path):
    (tmp_path / "playground.html").write_text(playground.page(has_python=False), "utf-8")
    editor = opened(one, (tmp_path / "playground.html").as_uri())
    assert "has no Python for the browser" in editor.tab.ask(STATE)
    assert editor.tab.ask("document.getElementById('pg-train').disabled")
    assert "def clipped_objective(" in editor.text()
    editor.tab.ask("document.querySelector('[data-edit=sign]').click(), 0")
    assert "has no Python for the browser" in editor.tab.ask(STATE)
    assert editor.mistake() is None
    editor.tab.close()


def test_a_loop_without_an_end_is_stopped_and_training_goes_on(one, page):
    editor = opened(one, page, width=390)
    editor.edit("def clipped_objective(", "while True:\n    pass\n\n\ndef clipped_objective(")
    editor.train()
    assert "Stopped after 10 seconds" in editor.mistake()
    editor.press("original")
    assert "Nothing is edited" in editor.train()
    assert editor.tab.ask("document.documentElement.scrollWidth") <= 390
    editor.tab.close()


def test_edits_stay_are_shared_and_are_no_barrier(one, page):
    editor = opened(one, page, "?edit=cispo")
    edited = editor.text()
    assert "_weight_objective,\n        _weight_clipped,\n        takes_dual_clip" in edited
    editor.edit("        _weight_clipped,", "        _weight_clipped,  # mine")
    edited = editor.text()
    address = editor.tab.ask("playground.editor.link()")
    editor.tab.ask("document.querySelector('[data-edit=sign]').click(), 0")
    assert "    return objective\n" in editor.text()
    editor.press("original")
    editor.tab.close()
    kept = opened(one, page)
    assert kept.text() == edited
    assert "on an earlier visit: surrogate" in kept.tab.ask(STATE)
    kept.press("original")
    for width in (1280, 390):
        for dark in (False, True):
            kept.tab.screen(width, dark=dark)
            assert kept.tab.barriers("'.pg-loss'") == []
    kept.tab.close()
    shared = opened(one, address)
    assert shared.text() == edited
    assert "by the sender of this link" in shared.tab.ask(STATE)
    shared.press("original")
    shared.tab.close()
