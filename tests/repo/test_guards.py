"""On the site, exported code begins with its idea: checks of the input are left out by ast, and the whole stands beneath."""
import ast
import sys
from pathlib import Path

root = Path(__file__).parents[2]
site = root / "docs/_site"
sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
from guards import guards, without_guards  # noqa: E402
from lessons import read_pages  # noqa: E402

index, pages = read_pages()
EXPORTED = [(p, c) for p in pages for c in p.cells if "exports" in c.directives]

LONG = """
def f(x):
    "What f is."
    if x < 0:
        raise ValueError("no")
    y = 2 * x
    a, b = x - 1, x + 1
    if y < a < b: raise ValueError
    for z in y:
        if z < 0: raise ValueError
        print(z)
    return y

def check_it(x):
    if x: raise ValueError"""
SHORT = """
def f(x):
    "What f is."
    y = 2 * x
    for z in y:
        if z < 0: raise ValueError
        print(z)
    return y

def check_it(x):
    if x: raise ValueError"""


def test_guards_go_with_what_was_computed_for_them(): assert without_guards(LONG.strip()) == SHORT.strip()


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


def test_the_whole_stands_beneath_and_the_notebook_is_whole():
    page = next(p for p in pages if p.url == "learn/value_loss")
    cells = build.staged(page, pages, build.Links([index, *pages]))["cells"]
    at = next(i for i, c in enumerate(cells) if c["source"].startswith("def value_loss("))
    whole = next(c.source for c in page.cells if c.source.startswith("def value_loss("))
    assert "raise" in whole and "raise" not in cells[at]["source"].replace("Raises", "")
    assert cells[at - 1]["source"].startswith('<p class="to-source" id="code-value_loss">')
    assert cells[at + 1]["source"].startswith('<details class="whole"><summary>All ') and whole in cells[at + 1]["source"]


