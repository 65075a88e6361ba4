"""Build the site: notebooks -> pages for Sphinx in docs/_build/pages -> docs/_site. Everything comes from pip packages.

A page is its lesson with hidden cells left out, exported and figure code folded, figures inline in the page's own colours,
`names` linked to their entries, and at its end a reference of what it exports. Every formula is typeset here: see typeset.py.
"""

import argparse
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import page_build
from all_figures import figures_page
from api import entry, methods, one_line
from compare import compare_page
from exercises import boxes, write_python
from glossary import glossary_page, hover
from know import know_page
from lessons import (
    BRANCH,
    ONLINE,
    PACKAGES,
    REPO,
    ROOT,
    SHELVES,
    STAGES,
    Cell,
    Page,
    of_course,
    plain,
    read_pages,
    target,
)
from narrow import stacked, text_factor
from paste import paste_page
from playground import bundle, frame, page_of_site
from quizzes import QUIZZES, quiz_page
from reports import reports_page, write_reports
from shelves import anchor, course, neighbours, shelf_page, up
from speed import speed_page

BUILD, SITE = ROOT / "docs/_build", ROOT / "docs/_site"
COLAB = (
    REPO.replace("https://github.com", "https://colab.research.google.com/github")
    + f"/blob/{BRANCH}/nbs"
)
COPIED = {
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
}  # pages that are no lessons
MADE = {
    ROOT / "evidence/reports/README.md": "reports",
    ROOT / "docs/compare.md": "compare",
    ROOT / "docs/speed.md": "speed",
    ROOT / "docs/know.md": "know",
    ROOT / "docs/paste.md": "paste",
}  # a file of the repository, and the page that stands for it here
NEXT = re.compile(
    r"^\*\*Next\*\*.*(?:\n.+)*\n?", re.M
)  # a notebook says it for its readers in Jupyter; the site has the builder's line
LESSON = r"\bnbs/(?:\w+/)+\w+\.ipynb"  # a path that a program printed


@cache
def top_names() -> set[str]:
    "What can be imported from `instruct_goose` itself."
    init = ast.parse((ROOT / "instruct_goose/__init__.pyi").read_text("utf-8"))
    return {a.asname or a.name for n in init.body if isinstance(n, ast.ImportFrom) for a in n.names}


# --- links ------------------------------------------------------------------------------------------------------------
class Links:
    "Where names and relative links of the notebooks lead to on the site."

    def __init__(self, pages: list[Page]):
        self.pages = {p.path.resolve(): p for p in pages}
        self.names = {}  # short name -> full names
        self.broken = []  # links that lead nowhere
        for page in pages:
            for cell in page.cells:
                for node in cell.documented:
                    self.add(node.name, page)
                    for m in methods(node):
                        self.add(f"{node.name}.{m.name}", page)

    def add(self, name, page):
        self.names.setdefault(name, []).append(f"{page.module}.{name}")

    def find(self, name: str, page: Page | None = None, call: bool = False) -> str | None:
        """Full name of a symbol; the page's own module first when several modules have it.
        A method without its class is recognised where it is called, `like_this()`: alone, `values` may be any values."""
        short = name.removeprefix("instruct_goose.")
        tail = (
            [f for fs in self.names.values() for f in fs if f.endswith("." + short)]
            if call or "." in short
            else []
        )
        found = self.names.get(short) or tail
        own = [f for f in found if page and page.module and f.startswith(page.module + ".")]
        if not own and not call and re.fullmatch("[a-z]+", short) and short not in top_names():
            return None  # `step`, `rows`: a word like another
        return (own or found or [None])[0]

    def apply(self, text: str, page: Page, names: bool = True) -> str:
        "Markdown with its `names` (once in each text) and its links to notebooks and files resolved for the site."
        seen: set[str] = set()

        def name(m):
            return self.linked_name(m, page, seen)

        def link(m):
            return self.linked_file(m, page)

        pieces = re.split(r"(^```.*?^```\s*$|\$\$.*?\$\$)", text, flags=re.S | re.M)
        for i in range(0, len(pieces), 2):
            lines = pieces[i].split("\n")
            for j, line in enumerate(lines):
                if names and not line.startswith(("#", "<")):
                    line = re.sub(
                        r"(?<![`\[\\}])`([A-Za-z_][\w.]*)((?:\(\))?)`(?!`|\])", name, line
                    )
                lines[j] = re.sub(r"\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)", link, line)
            pieces[i] = "\n".join(lines)
        return "".join(pieces)

    def linked_name(self, m: re.Match, page: Page, seen: set[str]) -> str:
        "A name in backticks as a link to its documentation, the first time that a text has it."
        full = self.find(m[1], page, bool(m[2]))
        if full is None or full in seen:
            return m[0]
        seen.add(full)
        return f"{{py:obj}}`{m[1]}{m[2]} <{full}>`"

    def linked_file(self, m: re.Match, page: Page) -> str:
        "A relative link as the site has it; one that leads nowhere is noted, and stays."
        file = target(page, m[1])
        anchor = (m[2] or "").lower()
        there = self.page_of(file)
        if there is not None:
            path = os.path.relpath(there, Path(page.url).parent).replace(os.sep, "/")
            return f"]({path}{anchor})"
        if file.is_relative_to(ROOT) and file.exists():
            if ONLINE:
                return f"]({REPO}/blob/{BRANCH}/{file.relative_to(ROOT).as_posix()}{anchor})"
            copy = os.path.relpath(file, (BUILD / "pages" / page.url).parent)
            return f"]({copy.replace(os.sep, '/')})"
        self.broken.append(f"{page.path.relative_to(ROOT)}: a link to {m[1]}, which is not there")
        return m[0]

    def page_of(self, file: Path) -> str | None:
        "The page that stands for a file of the repository; None: there is none."
        if file in self.pages:
            return self.pages[file].url + ".ipynb"
        if file.name in COPIED and file.parent == ROOT:
            return COPIED[file.name] + ".md"
        if file in MADE:
            return MADE[file] + ".md"
        if file == ROOT / "README.md":
            return "index.ipynb"
        return None


KEYS = {  # what the colours of a figure mean, above its caption, where one function draws figure after figure
    "draw_bugs(": '<span class="key"><i class="orange"></i>broken</span> <span class="key"><i class="blue"></i>healthy, with the same settings;</span> a line is a seed. '
}


SIDES = r"(?i)\b(left|right|above|below|rows?|columns?|upper|lower)\b"  # what a caption says of panels that a phone shows one below the other
ON_A_PHONE = '<span class="on-a-phone">On this screen the panels stand one below the other: row by row, each from the left. </span>'


# --- cells ------------------------------------------------------------------------------------------------------------
def figure(output: dict, cell: Cell, i: int) -> dict | None:
    "An SVG or plotly output as HTML; its caption is also its description."
    data = output.get("data", {})
    caption = cell.directives.get("fig-cap", "")
    described = f'role="img" aria-label="{html.escape(caption)}"'
    key = next((k for call, k in KEYS.items() if call in cell.source), "")
    below = (
        f"<figcaption>{key}{ON_A_PHONE * bool(re.search(SIDES, caption))}{html.escape(caption)}</figcaption>"
        if caption
        else ""
    )
    if svg := "".join(data.get("image/svg+xml", "")):
        svg = re.sub(
            r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S
        )
        points = float(re.search(r'width="([\d.]+)pt"', svg)[1])
        width = points * 4 / 3
        prefix = f"{cell.id}-{i}-"
        below_each_other = stacked(svg, prefix) if 'id="figure_1"' in svg else ""
        svg = re.sub(
            r'(<svg[^>]*?) width="[^"]*"',
            r"\1",
            re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1),
            count=1,
        )
        svg = re.sub(
            r'(?<=\bid=")|(?<=url\(#)|(?<=href="#)', prefix, svg
        )  # ids are unique on the page
        svg = re.sub(r"#262626", "currentColor", svg)
        svg = re.sub(r"(font(?:-size)?): ([\d.]+)px", r"\1: calc(\2px * var(--text, 1))", svg)
        grow = "" if below_each_other else f"; --narrow: {text_factor(points)}"
        svg = svg.replace("<svg", f'<svg {described} style="max-width:{width:.0f}px{grow}"', 1)
        svg = re.sub(
            r"\s*\n\s*",
            " ",
            re.sub(r'(?<= d=")[^"]+', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), svg),
        )  # a hundredth of a unit is seen by nobody
        kind = "plot panels" if below_each_other else "plot"
        made = (
            f'<figure class="{kind}" id="fig-{cell.id}-{i}">{svg}{below_each_other}{below}</figure>'
        )
    elif plotly := data.get("application/vnd.plotly.v1+json"):
        spec = json.dumps({k: plotly.get(k) for k in ("data", "layout", "frames")}).replace(
            "</", "<\\/"
        )
        key = f"plotly-{cell.id}-{i}"
        height = (plotly.get("layout") or {}).get("height", 420)
        made = (
            f'<figure class="plot"><div id="{key}" class="plotly-figure" style="min-height:{height}px" {described}></div>{below}</figure>'
            f'<script type="application/json" data-plotly="{key}">{spec}</script>'
        )
    else:
        return None
    return {"output_type": "display_data", "metadata": {}, "data": {"text/html": made}}


def code_cell(cell: Cell) -> dict | None:
    "A code cell for myst-nb, or None when nothing of it is shown."
    d = cell.directives
    if "hide" in d or "default_exp" in d:
        return None
    tags = d.get("classes", "").split()
    summary = d.get("code-summary", "")  # myst-nb makes each a class, tag_NAME
    outputs = [figure(o, cell, i) or o for i, o in enumerate(cell.outputs)]
    outputs = [o for o in outputs if o.get("output_type") != "stream" or "".join(o["text"]).strip()]
    if d.get("output") == "false":
        outputs = []
    if {"export", "exporti"} & d.keys():
        if not cell.defined:
            return None  # imports and private helpers
        tags.append("hide-input")
        summary = "The code of " + ", ".join(n.name for n in cell.defined)
    elif d.get("echo") == "false":
        tags.append("remove-input")
    elif "code-fold" in d and d["code-fold"] != "false":
        tags.append("hide-input")
        summary = summary or ("The code of this figure" if "fig-cap" in d else "Show the code")
    metadata = {"tags": tags}
    if summary:
        metadata["mystnb"] = {"code_prompt_show": summary, "code_prompt_hide": summary}
    return {
        "cell_type": "code",
        "id": cell.id,
        "source": cell.source,
        "metadata": metadata,
        "outputs": outputs,
        "execution_count": None,
    }


LONG, HEAD = 34, 14  # exported code of more lines than LONG shows its first HEAD


def behind(kind: str, summary: str, source: str) -> str:
    "Code behind a click."
    return f'<details class="{kind}"><summary>{summary}</summary>\n\n`````{{code-block}} ipython3\n{source}\n`````\n\n</details>'


def outlined(cell: Cell) -> str:
    "The signatures and docstrings of a cell that holds nothing but functions; nothing of any other, or of one that is short."
    lines = cell.source.split("\n")
    if len(lines) < 8 or not all(
        isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) for s in cell.exported
    ):
        return ""

    def first(s):
        return min([s.lineno, *(d.lineno for d in s.decorator_list)])

    def last(s):
        return s.body[0].end_lineno if ast.get_docstring(s) else s.body[0].lineno - 1

    return "\n\n".join(
        "\n".join(lines[first(s) - 1 : last(s)])
        for s in cell.exported
        if not s.name.startswith("_")
    )


def shortened(cell: Cell, outline: bool = False) -> tuple[str, str]:
    "What is shown of an exported cell, and behind a click the whole of a long one."
    if "exports" not in cell.directives or "code-fold" in cell.directives:
        return cell.source, ""
    if outline and (said := outlined(cell)):
        return said, behind("whole", "The code", cell.source)
    lines = cell.source.split("\n")
    if len(lines) <= LONG:
        return cell.source, ""
    return "\n".join(lines[:HEAD]).rstrip(), behind("whole", f"All {len(lines)} lines", cell.source)


CHECKS = {"expect", "within", "claim", "test_eq", "test_close", "test_fail", "test_is"}


def checked(cell: Cell) -> tuple[str, str]:
    """A cell's own code, and the checks at its end, which a tick hides: calls of `expect`, `within`, `claim` and asserts, and what was computed for these alone.
    A cell whose last statement is something else keeps everything."""
    if (
        cell.kind != "code"
        or {"hide", "export", "exports", "exporti", "code-fold"} & cell.directives.keys()
        or cell.directives.get("echo") == "false"
    ):
        return cell.source, ""
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:
        return cell.source, ""  # a magic of IPython's

    def checks(s):
        if isinstance(s, ast.For | ast.With):
            return all(map(checks, s.body))
        call = s.value if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) else None
        return (
            isinstance(s, ast.Assert)
            or call is not None
            and getattr(call.func, "id", getattr(call.func, "attr", "")) in CHECKS
        )

    n = len(body)
    while n and checks(body[n - 1]):
        n -= 1
    if n == len(body):
        return cell.source, ""
    lines = cell.source.split("\n")
    first = body[n].lineno - 1
    if n and body[n - 1].end_lineno >= body[n].lineno:
        return cell.source, ""  # two statements in a line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1  # what is said of them
    return "\n".join(lines[:first]).rstrip(), "\n".join(lines[first:])


def text_cell(source: str, id: str = "") -> dict:
    return {"cell_type": "markdown", "id": id, "source": source, "metadata": {}}


def heading_slug(heading: str) -> str:
    "The anchor that MyST gives a heading."
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*$]|&nbsp;", "", heading).strip().lower()).replace(
        " ", "-"
    )


def folded(text: str) -> str:
    "The opening's numbers to expect behind a click: they give the answers away."
    found = re.search(
        r"^\*\*Numbers to expect\*\*([^|\n]*)\n\n(?=\|)((?:\|.*(?:\n|$))+)", text, re.M
    )
    if not found:
        return re.sub(
            r"^\*\*Numbers to expect\*\*: (?!none)((?:.+\n?)+)",
            r'<details class="numbers"><summary>Numbers to expect</summary>\n\n\1\n\n</details>\n',
            text,
            flags=re.M,
        )
    said = re.sub(
        r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"^[,;.:]?\s*|[:.]\s*$", "", found[1])
    )  # a link would open nothing but the fold
    summary = "Numbers to expect" + (f", {said}" if said else "")
    return (
        text[: found.start()]
        + f'<details class="numbers"><summary>{summary}</summary>\n\n{found[2].rstrip()}\n\n</details>\n'
        + text[found.end() :]
    )


# --- pages ------------------------------------------------------------------------------------------------------------
def roadmap(page: Page, pages: list[Page]) -> str:
    "The steps of one iteration, each a link to its lesson, this page's lit."
    have = {p.url for p in pages}
    steps = [
        f'<li class="here" aria-current="step"><span>{label}</span></li>'
        if url == page.url
        else f'<li><a href="{up(page.url, url)}.html">{label}</a></li>'
        for url, label in STAGES.items()
        if url in have
    ]
    return f'<nav class="roadmap" aria-label="One step of RLHF"><ol>{"".join(steps)}</ol></nav>'


def start(page: Page, pages: list[Page]) -> str:
    "The two buttons of the front page: the course, and the two commands."
    first = of_course(pages)[0]
    return f'<p class="start"><a href="{up(page.url, first.url)}.html">Start the course</a><a href="#run-it">Run it</a></p>'


def head(page: Page, pages: list[Page]) -> str:
    "What stands between a title and its text: place, time, module, notebook, and in the course where in the algorithm we are."
    if page.part in SHELVES:
        where = f'<a href="{up(page.url, page.part)}.html">{SHELVES[page.part]}</a>'
        heading = f'<a href="{up(page.url, page.part)}.html#{anchor(page.group)}">{html.escape(page.group)}</a>'
        place = f"lesson {page.number} of {len(of_course(pages))}" if page.number else ""
    else:
        where, heading, place = (
            f'<a href="{up(page.url, "reference")}.html">Reference</a>',
            f'<a href="{up(page.url, "reference")}.html#look-up">Look up</a>',
            "",
        )
    crumbs = f'<nav class="crumbs" aria-label="Where this page stands">{where} <span>›</span> {heading}{f" <span>›</span> {place}" if place else ""}</nav>'
    file = page.path.relative_to(ROOT / "nbs").as_posix()
    facts = [f"{page.minutes} minutes"] if page.minutes and page.part in ("learn", "guides") else []
    if page.part == "reference" and page.module:
        facts.append(f"<code>{page.module}</code>")
    if page.names:
        facts.append(
            f'<a href="#reference">{len(page.names)} name{"s" * (len(page.names) > 1)}</a>'
        )
    facts += [f'<a href="{up(page.url, "notebooks/" + file)}" download>notebook</a>']
    if ONLINE:
        facts.append(f'<a href="{COLAB}/{file}">open in Colab</a>')
    if page.url != "notation":
        facts.append(f'<a class="beside" href="{up(page.url, "notation")}.html">notation</a>')
    line = crumbs + '<p class="lesson-facts">' + " <span>·</span> ".join(facts) + "</p>"
    return line + (roadmap(page, pages) if page.url in STAGES else "")


def next_lesson(page: Page) -> str:
    "The one way on, at the end of a lesson."
    after = neighbours(page.url)[1]
    if after is None:
        return f'<p class="to-next" data-read="{page.url}">This was the last lesson. <a href="{up(page.url, "guides")}.html">The guides</a> say how to do one thing each.</p>'
    return f'<p class="to-next" data-read="{page.url}"><b>Next</b> lesson {after.number}: <a href="{up(page.url, after.url)}.html">{html.escape(after.title)}</a></p>'


DRAWN = {
    "roadmap": roadmap,
    "start": start,
    "course": lambda page, pages: course(page.url, pages),
}  # where a page says <!-- name -->


def to_source(cell: Cell, page: Page) -> str:
    "A line between the equation and its code: to the entry of each name, and to its place in the module."
    source = up(page.url, f"_modules/{page.module.replace('.', '/')}.html")
    return "\n".join(
        f'<p class="to-source" id="code-{n.name}"><code>{n.name}</code> <a href="#{page.module}.{n.name}">entry</a> <a href="{source}#{n.name}">source</a></p>'
        for n in cell.documented
    )


def linked(output: dict, page: Page, links: Links) -> dict:
    """An output with the links of its Markdown resolved; its names are left alone, they may be another library's.
    Printed paths of lessons, the doctor's among them, are links here."""
    if output["output_type"] == "stream" and re.search(LESSON, text := "".join(output["text"])):

        def there(m):
            return (
                f'<a href="{up(page.url, links.pages[ROOT / m[0]].url)}.html">{m[0]}</a>'
                if ROOT / m[0] in links.pages
                else m[0]
            )

        made = re.sub(LESSON, there, html.escape(text.rstrip(), quote=False))
        return {
            "output_type": "display_data",
            "metadata": {},
            "data": {"text/html": f'<div class="highlight"><pre>{made}</pre></div>'},
        }
    if "text/markdown" not in output.get("data", {}):
        return output
    text = links.apply("".join(output["data"]["text/markdown"]), page, names=False)
    return output | {"data": output["data"] | {"text/markdown": text}}


def staged_code(cell: Cell, page: Page, links: Links, below: dict, runs: set[str]) -> list[dict]:
    "A code cell, shortened, with its outputs; before it a link to its source, below what is folded."
    made = code_cell(cell)
    if not made:
        return []
    cells = []
    if cell.documented and page.module:
        cells.append(text_cell(to_source(cell, page), f"{cell.id}-source"))
    short, whole = shortened(cell, page.part == "reference")
    own, tick = checked(cell)
    if tick:
        short = own
    if short or made["outputs"]:
        outputs = [linked(output, page, links) for output in made["outputs"]]
        cells.append(made | {"source": short, "outputs": outputs})
        if cell.id in runs:
            cells.append(text_cell(page_build.place(page, cell.id), f"{cell.id}-run"))
    if whole:
        cells.append(text_cell(whole, f"{cell.id}-whole"))
    if tick:
        cells.append(text_cell(behind("checked", "checked", tick), f"{cell.id}-checked"))
    more = below.get((page.url, cell.id))
    if more:
        cells.append(text_cell(more, f"{cell.id}-below"))
    return cells


def is_title(cell: Cell) -> bool:
    "Does a cell begin with a heading of the first rank?"
    return cell.kind != "code" and NEXT.sub("", cell.source).startswith("# ")


def page_title(cell: Cell, page: Page, pages: list[Page], links: Links) -> str:
    "The first text of a page: title, subtitle, and what the reader can go to from here."
    title, _, rest = NEXT.sub("", cell.source).partition("\n")
    rest = re.sub(
        r"^> (.+)$",
        lambda m: f"```{{rst-class}} subtitle\n```\n\n{m[1]}\n",
        rest,
        count=1,
        flags=re.M,
    )
    top = head(page, pages) if page.url != "index" else ""
    module = f"```{{py:module}} {page.module}\n```\n" if page.module else ""
    return f"{title}\n\n{module}\n{links.apply(rest, page)}\n\n{top}\n"


def page_text(cell: Cell, page: Page, links: Links, seen: set[str]) -> str:
    "A text of a page with its links; terms of the glossary are explained where they come first."
    source = NEXT.sub("", cell.source)
    text = links.apply(source, page)
    if "**Numbers to expect**" in source:
        return folded(text)
    if page.part:
        return hover(text, seen, up(page.url, "glossary.html"))
    return text


def with_drawings(text: str, page: Page, pages: list[Page]) -> str:
    "A text with what its comments name in their places: lists of pages, the playground."
    text = re.sub(r" ?<!-- github: .*? -->", "", text)  # said in the README alone
    text = re.sub(f"<!-- ({'|'.join(DRAWN)}) -->", lambda m: DRAWN[m[1]](page, pages), text)
    root = "../" * page.url.count("/")
    text = re.sub(r"<!-- playground ?(\w*) -->", lambda m: frame(m[1] or None, root), text)
    return re.sub(r"<!-- loss ([\w -]*?) -->", lambda m: frame(None, root, m[1]), text)


def last_cells(page: Page, pages: list[Page], links: Links) -> list[dict]:
    "What ends a page: the questions of its part, the next lesson, the reference of its names."
    cells = []
    if page.number:
        part = [p for p in pages if p.number and p.group == page.group]
        text = next_lesson(page)
        if page is part[-1] and page.group in QUIZZES:
            text = f'<p class="to-quiz">The end of this part: <a href="{up(page.url, "quiz")}.html#{anchor(page.group)}">{len(QUIZZES[page.group])} questions on it</a>.</p>{text}'
        cells.append(text_cell(text, "next"))
    if page.names:
        entries = [
            entry(node, page.module, lambda t: links.apply(t, page))
            for c in page.cells
            for node in c.documented
        ]
        cells.append(text_cell("## Reference\n\n" + "\n\n".join(entries), "reference"))
    return cells


def staged(page: Page, pages: list[Page], links: Links, below: dict | None = None) -> dict:
    "A page as a notebook for myst-nb; `below` has what stands under a cell."
    runs = page_build.places(page) if below else set()  # without Python nothing runs
    below = below or {}
    cells = []
    seen: set[str] = set()  # terms of the glossary that the page has explained
    title_cell = next((cell for cell in page.cells if is_title(cell)), None)
    for cell in page.cells:
        if cell.kind == "code":
            cells += staged_code(cell, page, links, below, runs)
        elif cell is title_cell:
            text = with_drawings(page_title(cell, page, pages, links), page, pages)
            cells.append(text_cell(text, cell.id))
            if not below and page_build.lesson_of(page) is not None:
                cells.append(text_cell(page_build.WITHOUT_PYTHON, "without-python"))
        else:
            text = with_drawings(page_text(cell, page, links, seen), page, pages)
            cells.append(text_cell(text, cell.id))
    cells += last_cells(page, pages, links)
    if runs:
        names = ("_static/keep.js", "_static/cells.js")
        script = "".join(f'<script src="{up(page.url, n)}" defer></script>' for n in names)
        cells.append(text_cell(page_build.sources(page) + script, "page-cells"))
    if any(url == page.url for url, _ in below):
        cells.append(
            text_cell(
                f'<script src="{up(page.url, "_static/exercises.js")}" defer></script>', "exercises"
            )
        )
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def toctree(pages: list[Page]) -> str:
    "All pages, for Sphinx, which asks to know them; the list at the side is that of shelves.py."
    urls = [
        *SHELVES,
        *(p.url for p in pages),
        "know",
        "reports",
        "speed",
        "paste",
        "quiz",
        "glossary",
        "figures",
        "api",
        "tables",
        "compare",
        *COPIED.values(),
    ]
    return "```{toctree}\n:hidden:\n\n" + "\n".join(urls) + "\n```"


def names_page(pages: list[Page]) -> str:
    "One table of all names, by module."
    top = top_names()
    text = [
        "# All names",
        "```{rst-class} subtitle\n```\n\nEvery public name of the library, with the page that defines it\n",
    ]
    if top:
        text.append(
            "Those marked • can be imported from `instruct_goose` itself; all of them from the module that heads the table. The [index](genindex) lists them by letter."
        )
    part = None
    for page in sorted(
        (p for p in pages if p.names),
        key=lambda p: (
            PACKAGES.index(p.module.split(".")[1]) if p.module.split(".")[1] in PACKAGES else -1
        ),
    ):
        package = page.module.split(".")[1]
        if package != part:
            text.append(f"## {package}")
        part = package
        short = page.module.removeprefix("instruct_goose.")
        text.append(f"### {short}\n\n`{page.module}`, from [{page.title}]({page.url}.ipynb).\n")
        nodes = [n for c in page.cells for n in c.documented]
        rows = [
            f"| {'•' if n.name in top else ''} | {{py:obj}}`{n.name} <{page.module}.{n.name}>` | {one_line(n)} |"
            for n in nodes
        ]
        text.append(
            "```{rst-class} names\n```\n\n| | name | what it does |\n|---|---|---|\n"
            + "\n".join(rows)
        )
    return "\n\n".join(text) + "\n"


def tables_page(links: Links, near: Page) -> str:
    "The tables that lessons compute, in one place: made by the package's own functions."
    from instruct_goose.objective.group import preset_table

    sys.path.insert(0, str(ROOT / "tests/compat"))
    from same_name_formulas import QUANTITIES, comparison_table

    text = [
        "# Tables",
        "```{rst-class} subtitle\n```\n\nEvery preset setting by setting, and what the same name means elsewhere\n",
        "## Presets",
        "The rows of `RLHFConfig.preset()`, with the equations they come from. "
        "[GRPO and its family](learn/11_group.ipynb) derives them, says what each leaves out of its paper and where it departs; "
        "[the comparison](guides/side_by_side.ipynb) runs them on one task.",
        preset_table(),
        "No preset sets what several papers and libraries share, whatever the algorithm: the sampler's weights `importance_cap`, `importance_floor`, "
        "`importance_level` and `importance_beyond` (TRL corrects by default), `kl_target` and `max_kl_to_old`, `entropy_target`, dynamic sampling by `max_redraws` and "
        "`drop_flat_groups`, the spread of the whole batch, `advantage='group_mean_batch_std'`, a reference that moves, `ref_every`, `overlong_buffer`, `reward_weighting` and "
        "`reward_scaling`. [Config](reference/config.ipynb) has them all.",
        "## Same name, different mathematics",
        "What libraries compute under one name, each on the same input. "
        "Above each table stands the test that tells them apart; [the guide](guides/same_name.ipynb) has the reasons.",
    ]
    ours = links.apply("\n\n".join(text), near)
    theirs = []  # a name in a row of another library is that library's
    for name in QUANTITIES:
        theirs += [f"### {name[0].upper()}{name[1:]}", comparison_table(name)]
    return "\n\n".join([ours, *theirs]) + "\n"


# --- build ------------------------------------------------------------------------------------------------------------
def write(path: Path, text: str):
    "Write only what changed, so that Sphinx need not do the rest again."
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def copied(text: str) -> str:
    "A Markdown file of the repository's root, with its links as the site has them."
    text = re.sub(r"\]\((\w+\.md)\)", lambda m: f"]({COPIED[m[1]]}.md)", text)
    return re.sub(
        r"\]\(nbs/((?:\w+/)*)(\w+)\.ipynb", lambda m: f"]({m[1]}{plain(m[2])}.ipynb", text
    )


def stage() -> list[str]:
    "Write the pages for Sphinx; returns the links that lead nowhere."
    index, pages = read_pages()
    links = Links([index, *pages])
    out = BUILD / "pages"
    wanted, drawn = all_pages(index, pages, links, out)
    for path, text in wanted.items():
        write(path, text)
    for path in out.rglob("*.*"):
        if path not in wanted:
            path.unlink()
    stage_static(pages, drawn, any("data-plotly" in text for text in wanted.values()))
    return links.broken


def all_pages(
    index: Page, pages: list[Page], links: Links, out: Path
) -> tuple[dict[Path, str], dict[str, str]]:
    "Each page as a text, by the file that it goes to; and the figures by name, as SVG."
    wanted = {}
    below = boxes(pages) if write_python(BUILD / "static/python.js", BUILD) else {}
    page_build.write_files(BUILD / "static/page_files.js")
    page_build.write_doctor(BUILD / "static/doctor_files.js")
    (BUILD / "static/keep.js").write_text(bundle("keep.js"), "utf-8")
    for page in [index, *pages]:
        nb = staged(page, pages, links, below)
        if page is index:
            nb["cells"].append(text_cell(toctree(pages), "toctree"))
        wanted[out / f"{page.url}.ipynb"] = json.dumps(nb, indent=1, ensure_ascii=False)
    wanted[out / "api.md"] = names_page(pages)
    wanted[out / "tables.md"] = tables_page(links, index)
    wanted[out / "know.md"] = links.apply(know_page(), index)
    for shelf in SHELVES:
        wanted[out / f"{shelf}.md"] = shelf_page(shelf, pages)
    wanted[out / "speed.md"] = links.apply(speed_page(), index, names=False)
    wanted[out / "figures.md"], drawn = figures_page(pages)
    wanted[out / "reports.md"] = links.apply(reports_page(), index)
    wanted[out / "compare.md"] = links.apply(compare_page(), index, names=False)
    wanted[out / "playground.md"] = page_of_site(BUILD / "static", bool(below))
    wanted[out / "paste.md"] = links.apply(paste_page(pages, bool(below)), index, names=False)
    wanted[out / "quiz.md"] = quiz_page({p.url: p.title for p in pages})
    wanted[out / "glossary.md"] = glossary_page({p.url: p.title for p in pages})
    for file, url in COPIED.items():
        wanted[out / f"{url}.md"] = copied((ROOT / file).read_text("utf-8"))
    return wanted, drawn


def stage_static(pages: list[Page], drawn: dict[str, str], with_plotly: bool) -> None:
    "Write what the pages load: style sheet, figures, scripts, notebooks and reports."
    import plotly
    from typeset import style_sheet

    write(BUILD / "static/katex.css", style_sheet())
    shutil.rmtree(BUILD / "static/figures", ignore_errors=True)
    for name, svg in drawn.items():
        write(BUILD / "static/figures" / name, svg)
    if with_plotly:
        shutil.copy2(Path(plotly.__file__).parent / "package_data/plotly.min.js", BUILD / "static")
    shutil.rmtree(BUILD / "extra", ignore_errors=True)
    for page in pages:
        copy = BUILD / "extra/notebooks" / page.path.relative_to(ROOT / "nbs")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(page.path, copy)
    write_reports(BUILD / "extra/reports")
    write(BUILD / "extra/llms.txt", llms_text(pages))


def llms_text(pages: list[Page]) -> str:
    "The site in one list for language models, by https://llmstxt.org: each page with its line."
    index, _ = read_pages()
    lines = [f"# {index.title}", "", f"> {index.subtitle or SHELVES['learn']}"]
    for shelf, heading in SHELVES.items():
        lines += ["", f"## {heading}", ""]
        for page in pages:
            if page.part == shelf:
                lines.append(f"- [{page.title}]({page.url}.html): {page.subtitle}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", action="store_true", help="only warnings and the result")
    args = parser.parse_args()
    broken = stage()
    if broken:
        sys.exit("\n".join(broken))
    shutil.rmtree(SITE, ignore_errors=True)
    flags = ["-W", "--keep-going"] + ["-q"] * args.quiet
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-E",
        "-c",
        "docs",
        "-d",
        "docs/_build/doctrees",
        *flags,
        "docs/_build/pages",
        "docs/_site",
    ]
    status = subprocess.call(command, cwd=ROOT)
    if status == 0:
        print(f"site built: {SITE / 'index.html'}")
    sys.exit(status)


if __name__ == "__main__":
    main()
