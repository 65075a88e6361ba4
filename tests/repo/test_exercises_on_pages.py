"""Exercises that run on the page: every answer, beginning and common mistake in plain Python, the download, and one page in Chromium."""

import base64
import hashlib
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

root = Path(__file__).parents[2]
site = root / "docs/_site"
sys.path.insert(0, str(root / "docs"))
import answer  # noqa: E402
import chromium  # noqa: E402
import exercises  # noqa: E402
from lessons import read_pages  # noqa: E402

from instruct_goose import lesson  # noqa: E402

pages = {p.url: p for p in read_pages()[1]}
ALL = {one.name: (pages[url], one) for url, ones in exercises.BROWSER.items() for one in ones}
WRONG = {  # what is changed in the answer, and how the verdict begins
    "my_best": [("/ beta", "* beta", "β divides"), ("x / sum(tilted)", "x", "it does not add up")],
    "my_mask": [
        ("not ended", "not (ended or token == eos_id)", "the first end is missing"),
        ("mask.append(real)", "mask.append([token != eos_id for token in row])", "you asked what"),
    ],
    "my_entropy": [
        ("-sum(x * math.log(x)", "sum(x * math.log(x)", "sign"),
        ("math.log(x)", "math.log2(x)", "unit"),
    ],
    "my_k3": [("- 1 + x", "+ x", "constant"), ("l - q", "q - l", "direction")],
    "my_rewards": [
        ("last = max", "last = min", "place: the score is at the first"),
        ("if m else 0.", "* m", "poisoned padding: nan"),
    ],
    "my_td": [
        ("+ gamma * after", "+ after", "γ is missing"),
        (" and m[t + 1]", "", "bootstrap: row 2"),
    ],
    "my_gae": [
        ("gamma * lam * advantage", "lam * advantage", "fading: TD errors fade by γλ, not by λ"),
        ("if not m[t]: continue", "", "padding: right but"),
    ],
    "my_objective": [
        ("min(r * a, c * a)", "c * a", "the min is missing"),
        ("min(r * a, c * a)", "max(r * a, c * a)", "max"),
    ],
    "my_value_loss": [
        ("w / 2", "w", "the ½"),
        (
            "w / 2 if real else 0.",
            "w / 2 * real",
            "poisoned padding: nan × 0 is nan; select with an if",
        ),
    ],
    "my_advantages": [
        ("(G - 1)", "G", "std: divide by G"),
        (" / (std + 1e-4)", "", "the std is missing"),
    ],
    "my_dpo_loss": [
        ("exp(-margin)", "exp(margin)", "the sign"),
        ("l - q for", "l for", "the reference is missing"),
    ],
    "my_pairwise_loss": [
        (
            "math.log1p(math.exp(-abs(c - r))) + max(r - c, 0.)",
            "math.log(1 + math.exp(r - c))",
            "it raised OverflowError: math range error (line 4",
        ),
        ("math.log1p(math.exp(-abs(c - r))) + max(r - c, 0.)", "max(0, 1 - c + r)", "hinge"),
    ],
}


@cache
def asked(name) -> str:
    return json.dumps({"name": name, "cases": exercises.cases(*ALL[name])})


def judged(name, code) -> str:
    return json.loads(answer.check(code, asked(name)))["verdict"]


# --- what is asked, and what is said ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_the_answer_is_right_and_the_beginning_is_not(name):
    begin, right = exercises.texts(*ALL[name])
    assert judged(name, right) == "right"
    assert judged(name, begin).startswith("nothing returned yet")
    for old, new, verdict in WRONG[name]:
        assert old in right and judged(name, right.replace(old, new, 1)).startswith(verdict), (
            old,
            judged(name, right.replace(old, new, 1)),
        )


@pytest.mark.parametrize("name", ALL)
def test_the_page_names_each_mistake_as_the_lesson_does(name):
    "A function that returns the mistake's value, judged by the page and by lesson.diagnose."
    first, *later = json.loads(asked(name))["cases"]
    assert len(later) and len(first["mistakes"]) > 3
    for wrong in first["mistakes"].values():
        theirs = lesson.diagnose(
            lambda wrong=wrong: torch.tensor(wrong),
            right=torch.tensor(first["right"]),
            mistakes={k: torch.tensor(v) for k, v in first["mistakes"].items()},
        )
        assert (
            judged(name, f"from math import nan, inf\ndef {name}(*_): return {wrong!r}") == theirs
        )
    assert "torch" not in asked(name)


@pytest.mark.parametrize(
    "code, verdict",
    [
        ("x = 1\ny = x / 0", "it raised ZeroDivisionError: division by zero (line 2 of your code)"),
        (
            "def my_k3(a, b):\n    return [x for x in a",
            "it raised SyntaxError: '[' was never closed (line 2 of your code)",
        ),
        ("def k3(a, b): return a", "my_k3 is gone"),
        ("def my_k3(a, b): return 'no'", "type: return a list of 3, not str"),
        ("def my_k3(a, b): return [a, b]", "shape: yours is 2 rows of 3, expected a list of 3"),
        (
            "def my_k3(a, b): return [float('nan')] * 3",
            "not yet: you have [nan, nan, nan], expected [0.3066, 0.0499, 2.3530]",
        ),
    ],
)
def test_what_goes_wrong_is_said_with_the_readers_line(code, verdict):
    assert judged("my_k3", code).startswith(verdict), judged("my_k3", code)


def test_an_answer_made_for_the_lessons_numbers_is_found_out():
    right = json.loads(asked("my_k3"))["cases"][0]["right"]
    assert judged("my_k3", f"def my_k3(a, b): return {right} if len(a) == 3 else a").startswith(
        "right on the lesson's numbers, not on others: my_k3([-1.0000"
    )


def test_another_package_than_the_pinned_one_is_refused_and_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercises, "download", lambda: b"something else")
    assert exercises.write_python(tmp_path / "python.js", tmp_path) is False and not list(
        tmp_path.iterdir()
    )
    assert "whose sha512" in capsys.readouterr().out
    monkeypatch.setattr(
        exercises,
        "INTEGRITY",
        base64.b64encode(hashlib.sha512(b"something else").digest()).decode(),
    )
    assert exercises.pyodide(tmp_path) == b"something else"
    monkeypatch.setattr(exercises, "download", None)
    assert exercises.pyodide(tmp_path) == b"something else"  # the second time from the disk


# --- in a browser, with the network off ---------------------------------------------------------------------------------
whole = pytest.mark.skipif(
    not (site / "_static/python.js").exists(),
    reason="docs/_site is not built, or without Pyodide: make docs",
)
browser = pytest.mark.skipif(chromium.FOUND is None, reason="no Chromium on this machine")
# ten seconds of a loop without an end pass at once where the test says `impatient`
SOON = """const later = setTimeout
window.setTimeout = (f, t, ...more) => later(f, t === 10000 && window.impatient ? 300 : t, ...more)"""


@whole
@browser
@pytest.mark.deep
def test_a_reader_tries_on_the_page(one):
    "From disk: no server, no network."
    tab = one.open((site / "learn/kl.html").as_uri(), 390, first=SOON)
    at = "document.querySelector('.try')"
    begin, right = exercises.texts(*ALL["my_k3"])

    def verdict(code):
        tab.ask(
            f"{at}.querySelector('textarea').value = {json.dumps(code)}, {at}.querySelector('.verdict').textContent = '', {at}.querySelector('.keys button').click()"
        )
        tab.wait(f"{at}.querySelector('.verdict').textContent")
        return tab.ask(f"{at}.querySelector('.verdict').textContent")

    tab.ask(f"{at}.querySelector('button').click()")
    assert tab.ask(f"{at}.querySelector('textarea').value") == begin and not [
        a for a in tab.asked if "python.js" in a
    ]
    assert (
        verdict(begin).startswith("nothing returned yet")
        and len([a for a in tab.asked if "python.js" in a]) == 1
    )
    assert verdict(right) == "right" and tab.ask(
        f"{at}.querySelector('.verdict').classList.contains('right')"
    )
    raised = verdict(
        "import math\nprint('<img src=x onerror=alert(1)>')\ndef my_k3(a, b):\n    return 1 / 0"
    )
    assert raised == "it raised ZeroDivisionError: division by zero (line 4 of your code)"
    assert tab.ask(
        f"{at}.querySelector('.said pre').textContent"
    ) == "<img src=x onerror=alert(1)>\n" and not tab.ask(f"{at}.querySelectorAll('img').length")
    tab.ask("window.impatient = true")
    assert verdict("while True: pass").startswith("stopped after 10 seconds")
    tab.ask("window.impatient = false")
    assert verdict(right) == "right"  # the page has stayed alive

    tab.ask(
        f"{at}.querySelector('textarea').value = 'if x:', {at}.querySelector('textarea').focus(), {at}.querySelector('textarea').setSelectionRange(5, 5)"
    )
    for key, number in (("Enter", 13), ("Tab", 9)):
        for kind in ("keyDown", "keyUp"):
            tab.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number
            )
    assert tab.ask(f"{at}.querySelector('textarea').value") == "if x:\n        "
    assert (
        tab.ask("document.documentElement.scrollWidth") <= 390
        and tab.quiet()
        and not tab.barriers("'.try'")
    )
    tab.close()


@whole
def test_every_place_is_on_its_page_and_the_script_only_there():
    for path in site.rglob("*.html"):
        url = path.relative_to(site).with_suffix("").as_posix()
        text = path.read_text("utf-8")
        assert len(re.findall('<div class="try"', text)) == len(exercises.BROWSER.get(url, [])), url
        assert ('_static/exercises.js"' in text) == (url in exercises.BROWSER), url
