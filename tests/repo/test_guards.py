"""On the site, exported code begins with its idea: checks of the input are left out by ast, and the whole stands beneath."""
import ast
import html
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

root = Path(__file__).parents[2]
site = root / "docs/_site"
sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
from guards import ONLY_CHECK, guards, without_guards  # noqa: E402
from lessons import read_pages  # noqa: E402

index, pages = read_pages()
EXPORTED = [(p, c) for p in pages for c in p.cells if "exports" in c.directives]

CASES = {
    "an if that raises": ("""
def f(x):
    "What f is."
    if x < 0:
        raise ValueError("no")
    return x""", """
def f(x):
    "What f is."
    return x"""),
    "in one line, with a comment behind it and one above": ("""
def f(x):
    a = 1 if x else 2
    return a

def g(x):
    # nothing below 0
    # is legal
    if x < 0: raise ValueError  # says so
    return x""", """
def f(x):
    a = 1 if x else 2
    return a

def g(x):
    return x"""),
    "a docstring and code, of a method that is decorated": ("""
class A:
    "A."

    @property
    @cache
    def f(self):
        '''Two
        lines.'''
        if not self.x: raise ValueError(
            "é", 3)
        return self.x""", """
class A:
    "A."

    @property
    @cache
    def f(self):
        '''Two
        lines.'''
        return self.x"""),
    "in the middle, and what was computed for it alone": ("""
def f(x):
    y = 2 * x
    a, b = x - 1, x + 1
    one = next(x)
    if y < a < b < one:
        raise ValueError
    return y""", """
def f(x):
    y = 2 * x
    one = next(x)
    return y"""),
    "nested functions, each at its beginning": ("""
def f(x):
    if x: raise ValueError

    def g(y):
        if y: raise ValueError
        return y
    return g(x)""", """
def f(x):
    def g(y):
        return y
    return g(x)""")}
STAYS = {
    "within the computation": "def f(x):\n    for y in x:\n        z = 2 * y\n        if z < 0: raise ValueError\n        print(z)\n    return y",
    "one whose name is read later": "def f(x):\n    if bad := x - 1: raise ValueError(bad)\n    return bad",
    "what is left would be names alone": "def check_it(x):\n    y = 2 * x\n    z = 3\n    if y: raise ValueError",
    "an if that does something else as well": "def f(x):\n    if x:\n        x = 2\n        raise ValueError(x)\n    return x",
    "a function that does nothing but check": "def check_it(x):\n    'It checks.'\n    if x: raise ValueError\n    same_shape(x)",
    "two statements in a line": "def f(x):\n    check_it(x); y = 2\n    return y",
    "a function in a line": "def f(x): check_it(x); return x",
    "calls that do something": "def f(x):\n    print(x)\n    x.check()\n    super().__init__()\n    checked(x)\n    return x",
    "a guard outside of functions": "if not x: raise ValueError\ny = 3"}


@pytest.mark.parametrize("name", CASES)
def test_guards_go(name):
    source, short = CASES[name]
    assert without_guards(source.strip("\n")) == short.strip("\n")


@pytest.mark.parametrize("name", STAYS)
def test_everything_else_stays(name): assert without_guards(STAYS[name]) == STAYS[name]


def test_no_function_of_the_library_becomes_another():
    "The same functions with the same first words, valid; what is missing are guards and names that are not read any more."
    read = lambda f: {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made = lambda s: {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    changed = 0
    for page, cell in EXPORTED:
        short = without_guards(cell.source)
        before, after = ([n for n in ast.walk(ast.parse(t)) if isinstance(n, ast.FunctionDef)] for t in (cell.source, short))
        assert [(f.name, ast.get_docstring(f)) for f in before] == [(f.name, ast.get_docstring(f)) for f in after], (page.url, cell.id)
        for f, g in zip(before, after, strict=True):
            left = [ast.dump(s) for s in g.body]
            for gone in (s for s in f.body if ast.dump(s) not in left and not isinstance(s, ast.FunctionDef)):
                assert guards(gone) or isinstance(gone, ast.Assign | ast.AnnAssign) and not made(gone) & read(g), (page.url, f.name)
        changed += short != cell.source
    assert changed > 80


def test_what_is_called_a_check_raises_and_returns_nothing():
    "Every name of the package that is left out by its name."
    found = [f for p in pages for c in p.cells for f in c.exported if isinstance(f, ast.FunctionDef) and ONLY_CHECK.fullmatch(f.name)]
    gives = lambda f: [n for n in ast.walk(f) if isinstance(n, ast.Return) and n.value is not None]
    asked = {ast.unparse(s.value.func) for _, c in EXPORTED for f in ast.walk(ast.parse(c.source)) if isinstance(f, ast.FunctionDef)
             for s in f.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and ONLY_CHECK.fullmatch(ast.unparse(s.value.func))}
    left_out = {name.rpartition(".")[2] for name in asked}
    assert left_out <= {f.name for f in found} | {n.name for p in pages for c in p.cells for k in c.exported if isinstance(k, ast.ClassDef) for n in k.body if isinstance(n, ast.FunctionDef)}
    assert not [f.name for f in found if f.name in left_out and gives(f)]


def test_the_whole_stands_beneath_and_the_notebook_is_whole():
    page = next(p for p in pages if p.url == "learn/value_loss")
    cells = build.staged(page, pages, build.Links([index, *pages]))["cells"]
    at = next(i for i, c in enumerate(cells) if c["source"].startswith("def value_loss("))
    whole = next(c.source for c in page.cells if c.source.startswith("def value_loss("))
    assert "raise" in whole and "raise" not in cells[at]["source"].replace("Raises", "")
    assert cells[at - 1]["source"].startswith('<p class="to-source" id="code-value_loss">')
    assert cells[at + 1]["source"].startswith('<details class="whole"><summary>All ') and whole in cells[at + 1]["source"]


@pytest.mark.skipif(not (site / "learn/value_loss.html").exists(), reason="docs/_site is not built: make docs")
@pytest.mark.parametrize("url", ["learn/value_loss"])
def test_the_page_has_both_in_colours(url):
    page = next(p for p in pages if p.url == url)
    soup = BeautifulSoup((site / f"{url}.html").read_text("utf-8"), "html.parser")
    folds = soup.select("details.whole")
    wanted = [c.source for c in page.cells if "exports" in c.directives and build.shortened(c)[1]]
    assert [f.select_one(".highlight pre").get_text().strip() for f in folds] == [s.strip() for s in wanted] and wanted
    assert all(f.select(".highlight span.k") and not f.has_attr("open") for f in folds)
    shown = [html.unescape(pre.get_text()).strip() for pre in soup.select("div.cell_input pre")]
    assert all(build.shortened(c)[0].strip() in shown for c in page.cells if "exports" in c.directives)
