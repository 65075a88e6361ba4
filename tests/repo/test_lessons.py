"""Every lesson has the same shape, and says nothing about the machine it ran on."""

import ast
import re
import sys
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "docs"))
from build import checked  # noqa: E402
from lessons import GUIDES, PACKAGES, SHELVES, read_pages, target  # noqa: E402

index, pages = read_pages()
each = pytest.mark.parametrize("page", pages, ids=lambda p: p.url)
everything = pytest.mark.parametrize("page", [index, *pages], ids=lambda p: p.url)


def text(page):
    return "\n".join(c.source for c in page.cells if c.kind == "markdown")


@each
def test_a_page_opens_as_its_shelf_does(page):
    words = text(page)
    assert page.subtitle, "> one line below the title"
    assert len(re.findall("^# ", words, re.M)) == 1, "one title"
    if page.part == "learn":
        assert page.minutes and "**You will be able to**" in words
    if page.part == "reference":
        assert page.module and page.group in PACKAGES
    if page.names:
        assert "nbdev_export()" in page.cells[-1].source, "the last cell exports"


@pytest.mark.parametrize("page", [p for p in pages if p.part == "reference"], ids=lambda p: p.url)
def test_a_reference_page_says_what_it_holds_and_teaches_nothing(page):
    words = text(page)
    opening = [words.index(f"**{line}**: ") for line in ("Holds", "Needs", "Not here")]
    assert opening == sorted(opening) and not re.search(
        r"[●○]{3}|You will be able to|Numbers to expect|## Summary", words
    )


def test_next_leads_to_the_next_lesson():
    course = [p for p in pages if p.number]
    for page, after in zip(course, course[1:]):
        said = re.findall(r"^\*\*Next\*\*.*?\]\(([^)#]+)", text(page), re.M)
        assert len(said) <= 1 and all(
            target(page, link) == after.path.resolve() for link in said
        ), f"{page.url}: **Next** leads to {after.url}"


def test_each_guide_is_in_one_group():
    listed = [stem for stems in GUIDES.values() for stem in stems]
    assert len(set(listed)) == len(listed) and {
        p.path.stem for p in pages if p.part == "guides"
    } <= set(listed)


@each
def test_what_stands_open_on_a_page_is_short(page):
    "Code that is shown unfolded and is not the library's: at most a screen, in lines that fit."
    hidden = {"hide", "export", "exports", "exporti", "code-fold"}
    shown = [c for c in page.cells if c.kind == "code" and not hidden & c.directives.keys()]
    assert not [(c.id, n) for c in shown if (n := len(c.source.splitlines())) > 70]
    assert not [(c.id, line) for c in shown for line in c.source.splitlines() if len(line) > 120]


@each
def test_figures_are_described_and_outputs_are_stored(page):
    for c in page.cells:
        kinds = {k for o in c.outputs for k in o.get("data", {})}
        if (
            kinds & {"image/svg+xml", "image/png", "application/vnd.plotly.v1+json"}
            and "hide" not in c.directives
        ):
            assert len(c.directives.get("fig-cap", "")) > 40, (
                f"cell {c.id}: a caption that describes the figure"
            )
        assert not [o for o in c.outputs if o["output_type"] == "error"], (
            f"cell {c.id} stored an error"
        )


CHECKS, SHOWS = ("expect", "within", "claim"), ("print", "display", "show")


def checks_and_shows(source: str) -> tuple[list[int], list[int], list[int]]:
    "Lines of a cell, outside of functions: of expectations, of what stops everybody, and of what puts something on the page."
    checks, stops, shows = [], [], []
    body = ast.parse(
        "\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines())
    ).body

    def look(node):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            return
        name = (
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            if isinstance(node, ast.Call)
            else ""
        )
        if isinstance(node, ast.Assert) or name.startswith("test_"):
            stops.append(node.lineno)
        if name in CHECKS:
            checks.append(node.lineno)
        if name in SHOWS:
            shows.append(node.lineno)
        for below in ast.iter_child_nodes(node):
            look(below)

    for node in body:
        look(node)
    last = body[-1] if body else None
    if (
        isinstance(last, ast.Expr)
        and last.lineno not in checks + stops
        and not source.rstrip().endswith(";")
    ):
        shows.append(last.lineno)
    return checks, stops, shows


@everything
def test_what_is_shown_comes_before_what_is_expected_of_it(page):
    seen = [
        c
        for c in page.cells
        if c.kind == "code" and not {"hide", "export", "exporti"} & c.directives.keys()
    ]
    found = {c.id: checks_and_shows(c.source) for c in seen}
    assert not [
        i
        for i, (checks, _, shows) in found.items()
        if checks and shows and min(checks) < max(shows)
    ], "outputs first, or a cell of its own"
    assert not [i for i, (_, stops, _) in found.items() if stops], (
        "expect, within or claim: they stop a test, not a reader"
    )


@everything
def test_links_lead_somewhere(page):
    headings = {
        p.path.resolve(): {slug(h) for h in re.findall(r"^#+ (.+)$", text(p), re.M)}
        for p in [index, *pages]
    }
    prose = re.sub(r"```.*?```", "", text(page), flags=re.S)
    for file, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)", prose):
        there = target(page, file) if file else page.path.resolve()
        assert there.exists(), file
        if anchor and there in headings:
            assert slug(anchor) in headings[there], f"{file}#{anchor}"


LESSONS = [p for p in pages if p.part == "learn"]
IN_EXERCISES = r"[●○]{3}[^\n]*?(\d+) minutes"


@pytest.mark.parametrize("page", LESSONS, ids=lambda p: p.url)
def test_the_minutes_of_the_exercises_add_up_to_what_the_lesson_says(page):
    said = re.search(
        r"\*\*Time\*\*.*?(?:exercises? (\d+)|(\d+) for the exercises|$)", text(page), re.M
    )
    minutes = [int(m) for m in re.findall(IN_EXERCISES, text(page))]
    if minutes:
        assert sum(minutes) == int(said[1] or said[2])


@pytest.mark.parametrize("page", LESSONS, ids=lambda p: p.url)
def test_the_reading_time_fits_the_length(page):
    "160 words a minute, 25 lines of open code, half a minute a figure; more is allowed than less."
    words = len(re.sub(r"<details>.*?</details>", "", text(page), flags=re.S).split())
    hidden = {"hide", "export", "exporti", "code-fold"}
    shown = [c for c in page.cells if c.kind == "code" and not hidden & c.directives.keys()]
    lines = sum(len(c.source.splitlines()) for c in shown)
    figures = sum("fig-cap" in c.directives for c in page.cells)
    needed = words / 160 + lines / 25 + figures / 2
    assert 0.75 * needed <= page.minutes <= 2.2 * needed, f"about {needed:.0f} minutes"


def slug(heading):
    return re.sub(r"[^\w-]", "", re.sub(r"[`*$]", "", heading).strip().lower().replace(" ", "-"))


@everything
def test_nothing_of_this_machine(page):
    words = page.path.read_text("utf-8")
    assert not re.search(re.escape(str(root)) + r"|/(home|Users|tmp)/\w|/root\b", words)


@each
def test_numbers_and_names_agree_with_the_place(page):
    assert page.part in SHELVES or page.url == "notation"
    assert re.fullmatch(
        r"\d\d_[a-z_]+\.ipynb" if page.part == "learn" else r"[a-z_]+\.ipynb", page.path.name
    )
    if page.part == "reference":
        place = page.path.relative_to(root / "nbs/reference").with_suffix("").parts
        assert page.module == ".".join(["instruct_goose", *place])


@each
def test_exported_code_keeps_to_its_cell(page):
    "A notebook exports functions, classes and constants; it does not act at import time."
    for c in page.cells:
        for node in c.exported:
            allowed = (
                ast.Import
                | ast.ImportFrom
                | ast.FunctionDef
                | ast.AsyncFunctionDef
                | ast.ClassDef
                | ast.Assign
                | ast.AugAssign
                | ast.AnnAssign
            )
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            allows = isinstance(node, ast.Expr) and re.match(
                r"RULES\.\w+\(|allow_\w*types\(|torch\.serialization\.add_safe_globals\(",
                ast.unparse(node),
            )  # what is registered
            for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            assert isinstance(node, allowed) or docstring or allows or for_checkers, (
                f"cell {c.id}, {ast.unparse(node)[:60]}"
            )


def test_every_solution_that_is_checked_is_right():
    "What its stored output says: a checker catches errors, so a solution that raises stops no lesson."
    solutions = [
        (page.url, c)
        for page in pages
        for c in page.cells
        if "Solution" in c.directives.get("code-summary", "")
        and re.match(r"check_\w+\(", c.source.strip().splitlines()[-1])
    ]
    assert len(solutions) > 50
    for url, c in solutions:
        said = "".join(
            "".join(o.get("data", {}).get("text/plain", o.get("text", ""))) for o in c.outputs
        )
        assert "right" in said, (url, c.id, said)


@each
def test_predictions_come_in_threes_and_name_what_is_there(page):
    "A lesson asks for three or for none, and a constant that it says to change stands in its code."
    asked = re.findall(r"\*\*Predict, (?:and|then) .*", text(page))
    if "**Predict" in text(page):
        assert text(page).count("**Predict") >= 3
    code = unspaced("\n".join(c.source for c in page.cells if c.kind == "code"))
    for prompt in asked:
        if found := re.match(
            r"\*\*Predict, then change\*\* (?:both |the first )?`([^`]+)`", prompt
        ):
            assert unspaced(found[1]) in code, prompt


def unspaced(code: str) -> str:
    "Without what a formatter decides: spaces, line ends, trailing commas and the kind of quotes."
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", code).replace("'", '"'))


def announced_in_vain(page) -> list[str]:
    """Cells whose text ends in a colon, and after which a reader sees no more than a fold.

    Hidden cells are skipped. What comes then must be text, open code, an output or a figure, and
    not code that only checks: the site folds that behind a tick.
    """
    found = []
    for i, cell in enumerate(page.cells):
        if cell.kind != "markdown" or not cell.source.rstrip().endswith(":"):
            continue
        later = [c for c in page.cells[i + 1 :] if not {"hide", "export"} & c.directives.keys()]
        shown = next(iter(later), None)
        if shown is None or shown.kind == "markdown" and shown.source.startswith("#"):
            found.append(cell.id)
        elif shown.kind == "code" and not shown.outputs:
            own, _ = checked(shown)
            lines = [line for line in own.splitlines() if not line.startswith(("import", "from"))]
            if not "".join(lines).strip():
                found.append(cell.id)
    return found


@everything
def test_a_colon_is_followed_by_something_that_one_sees(page):
    assert not announced_in_vain(page)
