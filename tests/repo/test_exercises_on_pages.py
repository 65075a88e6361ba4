"""Exercises that run on the page: every answer, beginning and common mistake in plain Python, the judge, the download, and one page in Chromium."""
import base64
import hashlib
import json
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

root = Path(__file__).parents[2]
site = root / "docs/_site"
sys.path.insert(0, str(root / "docs"))
import chromium  # noqa: E402
import exercises  # noqa: E402
import judge  # noqa: E402
from lessons import read_pages  # noqa: E402

from instruct_goose import lesson  # noqa: E402

pages = {p.url: p for p in read_pages()[1]}
ALL = {one.name: (pages[url], one) for url, ones in exercises.BROWSER.items() for one in ones}
WRONG = {  # what is changed in the answer, and how the verdict begins
    "my_best": [("/ beta", "* beta", "β divides"), ("x / sum(tilted)", "x", "it does not add up")],
    "my_mask": [("not ended", "not (ended or token == eos_id)", "the first end is missing"), ("mask.append(real)", "mask.append([token != eos_id for token in row])", "you asked what")],
    "my_entropy": [("-sum(x * math.log(x)", "sum(x * math.log(x)", "sign"), ("math.log(x)", "math.log2(x)", "unit")],
    "my_k3": [("- 1 + x", "+ x", "constant"), ("l - q", "q - l", "direction")],
    "my_rewards": [("last = max", "last = min", "place: the score is at the first"), ("if m else 0.", "* m", "poisoned padding: nan")],
    "my_td": [("+ gamma * after", "+ after", "γ is missing"), (" and m[t + 1]", "", "bootstrap: row 2")],
    "my_gae": [("gamma * lam * advantage", "lam * advantage", "fading: surprises fade by γλ, not by λ"), ("if not m[t]: continue", "", "padding: right but")],
    "my_objective": [("min(r * a, c * a)", "c * a", "the min is missing"), ("min(r * a, c * a)", "max(r * a, c * a)", "max")],
    "my_value_loss": [("w / 2", "w", "the ½"), ("w / 2 if real else 0.", "w / 2 * real", "poisoned padding: nan × 0 is nan; select with an if")],
    "my_advantages": [("(G - 1)", "G", "std: divide by G"), (" / (std + 1e-4)", "", "the std is missing")],
    "my_dpo_loss": [("exp(-margin)", "exp(margin)", "the sign"), ("l - q for", "l for", "the reference is missing")],
    "my_pairwise_loss": [("math.log1p(math.exp(-abs(c - r))) + max(r - c, 0.)", "math.log(1 + math.exp(r - c))", "it raised OverflowError: math range error (line 4"),
                         ("math.log1p(math.exp(-abs(c - r))) + max(r - c, 0.)", "max(0, 1 - c + r)", "hinge")]}


@cache
def asked(name) -> str: return json.dumps({"name": name, "cases": exercises.cases(*ALL[name])})


def judged(name, code) -> str: return json.loads(judge.judge(code, asked(name)))["verdict"]


# --- what is asked, and what is said ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_the_answer_is_right_and_the_beginning_is_not(name):
    begin, answer = exercises.texts(*ALL[name])
    assert judged(name, answer) == "right"
    assert judged(name, begin).startswith("nothing returned yet")
    for old, new, verdict in WRONG[name]:
        assert old in answer and judged(name, answer.replace(old, new, 1)).startswith(verdict), (old, judged(name, answer.replace(old, new, 1)))


@pytest.mark.parametrize("name", ALL)
def test_the_page_names_each_mistake_as_the_lesson_does(name):
    "A function that returns the mistake's value, judged by the page and by lesson.diagnose."
    first, *later = json.loads(asked(name))["cases"]
    assert len(later) and len(first["mistakes"]) > 3
    for wrong in first["mistakes"].values():
        theirs = lesson.diagnose(lambda wrong=wrong: torch.tensor(wrong), right=torch.tensor(first["right"]), mistakes={k: torch.tensor(v) for k, v in first["mistakes"].items()})
        assert judged(name, f"from math import nan, inf\ndef {name}(*_): return {wrong!r}") == theirs
    assert "torch" not in asked(name)


def test_numbers_come_from_the_library(monkeypatch):
    cases = json.loads(asked("my_k3"))["cases"]
    assert cases[0]["args"] == [[-.3, -1.1, -4.], [-1.2, -.8, -2.4]]           # float32 in the lesson, without its noise
    assert cases[0]["right"] == pytest.approx([.306570, .049859, 2.353032], abs=1e-6)  # e^(−ℓ) − 1 + ℓ at .9, −.3, −1.6
    assert cases[1]["right"] == pytest.approx([0., .106531, .091825, 6.674182], abs=1e-6)  # at 0, .5, −.4, −2.3
    from instruct_goose.objective import kl
    monkeypatch.setattr(kl, "k3", lambda ell: 2 * ell)
    with pytest.raises(SystemExit, match="my_k3: the lesson's checker wants something else"): exercises.cases(*ALL["my_k3"])


@pytest.mark.parametrize("code, verdict", [
    ("x = 1\ny = x / 0", "it raised ZeroDivisionError: division by zero (line 2 of your code)"),
    ("def my_k3(a, b):\n    return [x for x in a", "it raised SyntaxError: '[' was never closed (line 2 of your code)"),
    ("import nowhere", "it raised ModuleNotFoundError: there is no nowhere on this page, only Python and what comes with it (line 1"),
    ("def my_k3(a, b): return my_k3(a, b)", "it raised RecursionError"),
    ("def k3(a, b): return a", "my_k3 is gone"),
    ("def my_k3(a, b): return 'no'", "type: return a list of 3, not str"),
    ("def my_k3(a, b): return 3", "shape: yours is one number, expected a list of 3"),
    ("def my_k3(a, b): return [a, b]", "shape: yours is 2 rows of 3, expected a list of 3"),
    ("def my_k3(a, b): return [float('nan')] * 3", "not yet: you have [nan, nan, nan], expected [0.3066, 0.0499, 2.3530]")])
def test_what_goes_wrong_is_said_with_the_readers_line(code, verdict):
    assert judged("my_k3", code).startswith(verdict), judged("my_k3", code)


def test_an_answer_made_for_the_lessons_numbers_is_found_out():
    right = json.loads(asked("my_k3"))["cases"][0]["right"]
    assert judged("my_k3", f"def my_k3(a, b): return {right} if len(a) == 3 else a").startswith("right on the lesson's numbers, not on others: my_k3([-1.0000")


# --- Python for the browser -------------------------------------------------------------------------------------------


def test_another_package_than_the_pinned_one_is_refused_and_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercises, "download", lambda: b"something else")
    assert exercises.write_python(tmp_path / "python.js", tmp_path) is False and not list(tmp_path.iterdir())
    assert "whose sha512" in capsys.readouterr().out
    monkeypatch.setattr(exercises, "INTEGRITY", base64.b64encode(hashlib.sha512(b"something else").digest()).decode())
    assert exercises.pyodide(tmp_path) == b"something else"
    monkeypatch.setattr(exercises, "download", None)
    assert exercises.pyodide(tmp_path) == b"something else"  # the second time from the disk


# --- in a browser, with the network off ---------------------------------------------------------------------------------
whole = pytest.mark.skipif(not (site / "_static/python.js").exists(), reason="docs/_site is not built, or without Pyodide: make docs")
browser = pytest.mark.skipif(chromium.FOUND is None, reason="no Chromium on this machine")
SOON = "const later = setTimeout; window.setTimeout = (f, t, ...more) => later(f, t === 10000 ? 300 : t, ...more)"  # ten seconds of a loop without an end


@pytest.fixture
def tab(tmp_path):
    it = chromium.Chromium(tmp_path)
    yield it.open((site / "learn/kl.html").as_uri(), 390, first=SOON)
    it.close()


@whole
@browser
@pytest.mark.deep
def test_a_reader_tries_on_the_page(tab):
    "From disk: no server, no network."
    name, at = "my_k3", "document.querySelector('.try')"
    begin, answer = exercises.texts(*ALL[name])

    def run(code, keys=False):
        tab.ask(f"{at}.querySelector('textarea').value = {json.dumps(code)}, {at}.querySelector('.verdict').textContent = '', {at}.querySelector('.keys button').click()")

    def verdict():
        tab.wait(f"{at}.querySelector('.verdict').textContent")
        return tab.ask(f"{at}.querySelector('.verdict').textContent")

    assert not [a for a in tab.asked if "python.js" in a] and tab.ask(f"{at}.checkVisibility()")
    tab.ask(f"{at}.querySelector('button').click()")
    assert tab.ask(f"{at}.querySelector('textarea').value") == begin and not [a for a in tab.asked if "python.js" in a]
    run(begin)
    assert verdict().startswith("nothing returned yet") and len([a for a in tab.asked if "python.js" in a]) == 1
    run(answer)
    assert verdict() == "right" and tab.ask(f"{at}.querySelector('.verdict').classList.contains('right')")
    run("import math\nprint('<img src=x onerror=alert(1)>')\ndef my_k3(a, b):\n    return 1 / 0")
    assert verdict() == "it raised ZeroDivisionError: division by zero (line 4 of your code)"
    assert tab.ask(f"{at}.querySelector('.said pre').textContent") == "<img src=x onerror=alert(1)>\n" and not tab.ask(f"{at}.querySelectorAll('img').length")
    run("while True: pass")
    assert verdict().startswith("stopped after 10 seconds")  # SOON makes them short; the page has stayed alive, or it could not say so
    run("while True: pass")
    tab.ask(f"{at}.querySelectorAll('.keys button')[1].click()")
    assert verdict() == "stopped"
    run(answer)
    assert verdict() == "right"

    tab.ask(f"{at}.querySelector('textarea').value = 'if x:', {at}.querySelector('textarea').focus(), {at}.querySelector('textarea').setSelectionRange(5, 5)")
    press = lambda key, **more: [tab.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more) for kind in ("keyDown", "keyUp")]
    for key in ("Enter", "Tab"): press(key, windowsVirtualKeyCode={"Enter": 13, "Tab": 9}[key])
    assert tab.ask(f"{at}.querySelector('textarea').value") == "if x:\n        "
    press("Escape", windowsVirtualKeyCode=27), press("Tab", windowsVirtualKeyCode=9)
    assert tab.ask("document.activeElement.textContent") == "Run"

    assert tab.ask("document.documentElement.scrollWidth") <= 390 and not tab.log, tab.log
    assert not [a for a in tab.asked if not a.startswith(("file:", "data:", "blob:"))]
    if not find_spec("axe_core_python"): return
    tab.ask((Path(find_spec("axe_core_python").origin).parent / "axe.min.js").read_text("utf-8") + ";0")
    for dark in (False, True):
        tab.screen(390, dark=dark)
        found = tab.ask("axe.run('.try').then(r => r.violations.filter(v => ['serious', 'critical'].includes(v.impact)).map(v => [v.id, v.nodes.map(n => n.failureSummary)]))")
        assert not found, ("dark" if dark else "light", found)


@whole
def test_every_place_is_on_its_page_and_the_script_only_there():
    for path in site.rglob("*.html"):
        url, text = path.relative_to(site).with_suffix("").as_posix(), path.read_text("utf-8")
        assert len(re.findall('<div class="try"', text)) == len(exercises.BROWSER.get(url, [])), url
        assert ('_static/exercises.js"' in text) == (url in exercises.BROWSER), url
