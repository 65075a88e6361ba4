"""The builder on small cases, and the site that make docs has built: links, offline, formulas, entries."""

import ast
import dataclasses
import json
import re
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from built_site import browser, built, root, site, soup
from deep import first

sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
import shelves  # noqa: E402
import typeset  # noqa: E402
from glossary import ALIASES  # noqa: E402
from lessons import of_course, read_cell, read_pages  # noqa: E402

from instruct_goose.config import RLHFConfig  # noqa: E402


# --- the builder ------------------------------------------------------------------------------------------------------
def cell(source):
    return read_cell({"cell_type": "code", "source": source, "id": "c0"}, "test")


def test_checks_fold_into_a_tick_and_long_code_into_its_first_lines():
    own, tick = build.checked(
        cell("x = f(2)\nx\n# four\nexpect(x, 4)\nfor y in x: claim(y, 'so')\nassert x")
    )
    assert own == "x = f(2)\nx" and tick.startswith("# four\nexpect(x, 4)\nfor y")
    for whole in (
        "expect(x, 4)\nx",
        "x = 3",
        "#| hide\nassert x",
        "%magic\nexpect(1, 1)",
        "x = 1; expect(x, 1)",
    ):
        assert not build.checked(cell(whole))[1], whole
    short, whole = build.shortened(
        cell("#| exports\ndef f(x):\n" + "    x += 1\n" * 40 + "    return x")
    )
    assert short.count("\n") == build.HEAD - 1 and "All 42 lines" in whole and "return x" in whole


def test_formulas_are_typeset_or_refused():
    assert "katex-display" in typeset.html(r"\sum_{i \lt t} x_i", True)
    with pytest.raises(ValueError, match="KaTeX parse error"):
        typeset.html(r"\frac{1}{", True)


# --- the site ---------------------------------------------------------------------------------------------------------
files = sorted(p for p in site.rglob("*.html") if "_static" not in p.parts) if site.exists() else []
pages = [
    p for p in files if "_modules" not in p.parts
]  # without the modules' sources, which are code and nothing else


@cache
def outline(path: Path) -> tuple[list[str], list[str], str]:
    "The ids of a page, where its links lead, and its tags that load something: read without a parser, which takes a minute for all pages."
    text = re.sub(
        r"(<script\b[^>]*>).*?</script>|<!--.*?-->", r"\1", path.read_text("utf-8"), flags=re.S
    )
    links = [unescape(h) for h in re.findall(r'<a\b[^>]*?\shref="([^"]*)"', text)]
    return (
        re.findall(r'\sid="([^"]*)"', text),
        links,
        "".join(re.findall(r"<(?:script|img|iframe|link|source)\b[^>]*>", text)),
    )


@cache
def anchors(path: Path) -> set[str]:
    return {unescape(i) for i in outline(path)[0]} | {"", "top"}


@built
def test_links_and_anchors():
    broken = []
    for path in files:
        for address in outline(path)[1]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.exists():
                broken.append((path.name, address))
            elif there.suffix == ".html" and unquote(parts.fragment) not in anchors(there):
                broken.append((path.name, address))
    assert not broken
    assert sum(len(outline(path)[1]) for path in files) > 10_000


@built
def test_nothing_is_fetched_from_elsewhere():
    away = re.compile(r"^(https?:)?//")
    for path in files:
        for tag in BeautifulSoup(
            outline(path)[2].replace("<script", "<link"), "html.parser"
        ).find_all(["img", "iframe", "link", "source"]):
            address = tag.get("src") or (
                tag.get("href")
                if set(tag.get("rel", [])) & {"stylesheet", "preload", "icon", "preconnect"}
                else ""
            )
            assert not (address and away.match(address)), f"{path.name}: {address}"
            if address:
                assert (path.parent / unquote(urlsplit(address).path)).exists(), (
                    f"{path.name}: {address}"
                )
    for css in site.rglob("*.css"):
        for address in re.findall(
            r"url\(['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css.read_text("utf-8")
        ):
            assert not away.match("".join(address)), css.name


def counted(text: str, page) -> tuple[int, int, int]:
    "Formulas, figures and links to entries of a page, read without a parser too; an AssertionError says what it lacks."
    formulas = re.findall(r'<(?:div|span) class="math [^>]*>(.{0,80})', text, flags=re.S)
    for inside in formulas:
        assert 'class="katex' in inside, inside
    said = re.sub(r"<(script|pre|code|math|svg|style)\b[^>]*>.*?</\1>", "", text, flags=re.S)
    assert not (raw := re.search(r"(?:\$\$|\\\(|\\begin\{|\{py:).*", said)), raw
    figures = [
        *re.findall(r'<figure class="plot[^>]*>\s*(<svg[^>]*>)', text),
        *re.findall(r'<div\b[^>]*class="plotly-figure"[^>]*>', text),
    ]
    for tag in figures:
        assert len(re.search(r'aria-label="([^"]*)"', tag)[1]) > 40, tag
    for picture in re.findall(r"<img\b[^>]*>", text):
        assert "alt=" in picture, picture
    if page is None:
        return len(formulas), len(figures), 0
    for part in (
        "<h1>",
        'class="crumbs"',
        'class="lesson-facts"',
        '<html class="no-js" lang="en"',
        '<meta name="viewport"',
    ):
        assert part in text, part
    for n in (n for c in page.cells for n in c.documented if page.names):
        where = text.find(f'id="{page.module}.{n.name}"')
        assert where >= 0 and "_modules/" in text[where : text.index("</dt>", where)], (
            f"{n.name}: no entry with a source link"
        )
        if isinstance(n, ast.FunctionDef) and n.args.args:
            assert '<table class="parameters' in text[where:], n.name
    return (
        len(formulas),
        len(figures),
        len(re.findall(r'<a class="reference[^>]*><code class="xref', text)),
    )


@built
def test_every_page_says_what_it_must():
    by_url = {p.url: p for p in read_pages()[1]}
    wrong = []
    found = []
    assert not [u for u in by_url if not (site / f"{u}.html").exists()]
    for path in pages:
        url = path.relative_to(site).with_suffix("").as_posix()
        try:
            found.append(counted(path.read_text("utf-8"), by_url.get(url)))
        except AssertionError as e:
            wrong.append((url, str(e)))
    assert not wrong
    formulas, figures, linked = map(sum, zip(*found))
    assert formulas > 800 and figures > 150 and linked > 500, (formulas, figures, linked)


@built
def test_search_index_knows_the_names():
    "And leads to places that are there, whatever is in it."
    text = (site / "_static/find-index.js").read_text("utf-8")
    index = json.loads(text.removeprefix("const INDEX = "))
    known = {(p["url"], name) for p in index["pages"] for _, name, _ in p["names"]}
    for page in read_pages()[1]:
        for name in page.names:
            assert (page.url, name) in known, name
    for page in index["pages"]:
        there = anchors(site / f"{page['url']}.html")
        for place, *_ in page["sections"] + page["names"] + page["rows"]:
            assert place in there, (page["url"], place)
    of = {
        row[1]
        for p in index["pages"]
        for row in p["rows"]
        if row[3:] == ["RLHFConfig"] and p["url"] == "reference/config"
    }
    assert of == {f.name for f in dataclasses.fields(RLHFConfig)}
    for _, _, lesson, _, place in index["terms"]:
        assert (site / f"{lesson}.html").exists() and place in anchors(site / "glossary.html")


@built
def test_no_two_elements_share_an_id():
    for path in files:
        if path.relative_to(site).parts[0] == "_modules":
            continue
        ids = outline(path)[0]
        assert len(ids) == len(set(ids)), (
            path.name,
            sorted({i for i in ids if ids.count(i) > 1})[:5],
        )


# --- in a browser, with the network off: one browser, and each page is opened once ----------------------------------------
drawn = [
    p.url
    for p in read_pages()[1]
    if any(
        "application/vnd.plotly.v1+json" in o.get("data", {}) for c in p.cells for o in c.outputs
    )
]
SAMPLE = [
    "index",
    "learn/kl",
    "guides/same_name",
    "know",
    "quiz",
    "tables",
    "glossary",
    "learn",
    "reference",
    "learn/from_a_reward_to_ppo",
    "learn/group",
    "learn/trainer",
    "learn/quickstart",
]
TYPED = ALIASES | {  # what people type, and the page that teaches it: the first hit
    "policy gradient": "learn/from_a_reward_to_ppo",
    "advantage": "learn/advantages",
    "KL penalty": "learn/kl",
    "reward hacking": "learn/quickstart",
    "clip": "learn/policy_loss",
    "GAE": "learn/advantages",
    "GRPO": "learn/group",
    "LoRA": "guides/lora",
    "entropy bonus": "learn/ppo",
    "reward model": "learn/reward_model",
    "rejection sampling": "learn/sft",
    "off-policy": "learn/policy_loss",
    "whitening": "learn/masks",
    "what is a reward model": "learn/reward_model",
    "out of memory": "guides/cost",
    "grpo vs ppo": "learn/group",
    "resume training from a checkpoint": "guides/resume",
    "write my own reward function": "learn/your_own",
    "entropy collapse": "guides/questions",
    "padding tokens in the loss mean": "learn/masks",
    "explained variance of the critic": "learn/value_loss",
    "train with tool calls": "learn/agents",
    "difference between k1 and k3": "learn/kl",
}


def at(url: str) -> str:
    "A page of the site from disk; what stands behind its # or ? too."
    page = re.match(r"[\w/]+", url)[0]
    return (site / f"{page}.html").as_uri() + url[len(page) :]


FITS = """(() => {
  const wide = [...document.querySelectorAll("figure.plot, figure.plot svg, .drift")].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
  const small = [...document.querySelectorAll("figure.plot svg text")].filter(t => t.checkVisibility() && !t.closest("svg").closest(".plotly-figure"))
    .map(t => t.getBoundingClientRect()).filter(r => r.width > 0 && Math.max(r.width, r.height) < 9).length
  const long = e => Math.max(...e.textContent.split("\\n").map(line => line.length))
  const cut = innerWidth < 1280 ? [] : [...document.querySelectorAll("article > section pre, article > section > section pre")].filter(e => e.clientWidth && long(e) < 81 && e.scrollWidth > e.clientWidth + 1)
  const contents = document.querySelector(".toc-drawer:not(.no-toc)")?.getBoundingClientRect()
  return {across: document.documentElement.scrollWidth, screen: innerWidth, wide: wide.length, small, cut: cut.map(e => e.textContent.slice(0, 90)),
          contents: !contents || innerWidth < 1280 || contents.left > 0 && contents.right <= innerWidth + 1}
})()"""
DRAG = """(async () => {
  const made = {}, wait = () => new Promise(done => setTimeout(done, 100))
  for (const box of document.querySelectorAll(".plotly-figure")) {
    const seen = [], rail = () => box.querySelector(".slider-rail-touch-rect"), now = () => JSON.stringify(box.data.map(c => [c.x, c.y]))
    for (const part of [0.01, .5, .99]) {
      const there = rail().getBoundingClientRect(), place = {bubbles: true, view: window, clientX: there.left + part * there.width, clientY: there.top + there.height / 2}
      rail().dispatchEvent(new MouseEvent("mousedown", place)); await wait()
      document.dispatchEvent(new MouseEvent("mouseup", place)); box.dispatchEvent(new MouseEvent("mouseup", place)); await wait()
      for (let i = 0; i < 20 && seen.at(-1) === now(); i++) await wait()
      seen.push(now())
    }
    made[box.id] = [new Set(seen).size, box.layout.sliders[0].active]
  }
  return made
})()"""


@built
@browser
@pytest.mark.parametrize("url", first(3, [*SAMPLE, *(u for u in drawn if u not in SAMPLE)]))
def test_a_page_in_the_browser(url, one):
    "Nothing to scroll sideways, no figure or line of code cut, the page's contents in sight; what can be dragged is drawn and moves; no error."
    tab = one.open(
        at(url),
        390,
        first="requestAnimationFrame = f => setTimeout(() => f(performance.now()))"
        if url in drawn
        else "",
    )
    boxes = len(soup(site / f"{url}.html").select(".plotly-figure"))
    assert bool(boxes) == (url in drawn)
    if boxes:
        tab.wait(
            f"document.querySelectorAll('.plotly-figure svg.main-svg').length >= {boxes} && [...document.querySelectorAll('.plotly-figure')].every(b => b.querySelector('svg.main-svg'))"
        )
    for width in (390, 1280, 1920) if url in SAMPLE else ():
        tab.screen(width)
        tab.wait(f"innerWidth == {width}")
        for _ in range(20):  # plotly draws again a moment after the screen has changed
            seen = tab.ask(FITS)
            if seen["across"] <= width and not seen["wide"]:
                break
            tab.ask("new Promise(done => setTimeout(done, 100))")
        assert seen["screen"] == width and seen["across"] <= width, (width, seen)
        assert not seen["wide"] and not seen["small"] and not seen["cut"] and seen["contents"], (
            width,
            seen,
        )
    if boxes:
        tab.screen(1280)
        moved = tab.ask(DRAG)
        assert len(moved) == boxes and all(
            states > 1 and active > 0 for states, active in moved.values()
        ), moved
    assert tab.quiet(), (tab.log, tab.asked)
    tab.close()


@built
@browser
def test_search_finds_names_and_what_a_newcomer_types(one):
    tab = one.open(at("search?q=group_advantages"))
    found = tab.ask(
        "[...document.querySelectorAll('ol.search a')].map(a => a.getAttribute('href'))"
    )
    assert (
        found[0] == "learn/advantages.html#instruct_goose.objective.advantages.group_advantages"
    ), found[:3]
    assert tab.ask("document.querySelector('#found').textContent").endswith(
        "for “group_advantages”"
    )
    wanted = {}
    for p in read_pages()[1]:
        for name in p.names:
            wanted.setdefault(name, []).append(f"{p.url}.html#{p.module}.{name}")
    first = tab.ask(
        f"{json.dumps(sorted(wanted))}.map(name => [name, findInSite(name).slice(0, 3).map(r => r.href)])"
    )
    missing = [(name, hrefs) for name, hrefs in first if not set(wanted[name]) & set(hrefs)]
    assert not missing, (len(missing), missing[:5])
    hits = tab.ask(f"{json.dumps(list(TYPED))}.map(words => findInSite(words)[0].href)")
    wrong = {
        words: href
        for (words, url), href in zip(TYPED.items(), hits, strict=True)
        if href.partition(".html")[0] != url
    }
    assert len(TYPED) > 50 and not wrong
    offered = "[...(document.querySelector('#find input').list?.options || [])].map(o => o.value)"
    tab.wait(f"{offered}.length > 200")
    assert {"The value loss", "calibration", "how to choose beta"} <= set(tab.ask(offered))
    assert tab.quiet(), (tab.log, tab.asked)
    tab.close()


@built
@browser
def test_a_table_of_sentences_is_read_row_by_row_on_a_phone(one):
    tab = one.open(at("guides/logged_metrics"), 390)
    cells = """[...document.querySelectorAll('article td')].filter(c => c.checkVisibility() && c.textContent.trim())
      .map(c => [c.dataset.label, c.getBoundingClientRect().right])"""
    found = tab.ask(cells)
    assert {"meaning", "healthy", "a warning"} <= {name for name, _ in found}
    assert max(right for _, right in found) <= 390
    tab.screen(1280)
    tab.wait("!document.querySelector('table.sentences')")  # there it is a table again
    tab.close()


@built
@browser
def test_code_is_as_large_as_it_should_be_and_a_long_line_goes_on_below_unchanged(one):
    tab = one.open(at("learn/trainer"), 1280)
    page = soup(site / "learn/trainer.html")
    stored = [pre.get_text() for pre in page.select("article div.highlight pre")]
    assert stored == tab.ask(
        "[...document.querySelectorAll('article div.highlight pre')].map(p => p.textContent)"
    )
    shown = "[...document.querySelectorAll('article div.highlight pre')].filter(p => p.checkVisibility())"
    assert tab.ask(f"Math.min(...{shown}.map(p => parseFloat(getComputedStyle(p).fontSize)))") >= 15
    assert tab.ask("document.querySelectorAll('pre.continued').length") > 3
    hidden = f"{shown}.filter(p => p.classList.contains('continued') && p.scrollWidth > p.clientWidth + 1)"
    assert tab.ask(f"{hidden}.length") == 0
    tab.close()


@built
@browser
@pytest.mark.parametrize(
    "url",
    first(
        1,
        [
            "index",
            "learn/value_loss",
            "search?q=policy%20gradient",
            "reference/supervised/fit",
            "learn",
            "reference",
            "api",
            "guides/exercises",
            "know",
        ],
    ),
)
def test_no_barrier_that_axe_knows(url, one):
    tab = one.open(at(url))
    for dark in (False, True):
        tab.screen(1280, dark=dark)
        assert not (found := tab.barriers()), ("dark" if dark else "light", found)
    tab.close()


# --- the shelves --------------------------------------------------------------------------------------------------------
def test_each_page_stands_on_its_shelf():
    course = of_course(read_pages()[1])
    assert (
        [p.number for p in course] == list(range(1, 28))
        and shelves.neighbours(course[0].url)[0] is None
        and shelves.neighbours("guides/lora") == (None, None)
    )
    assert [shelves.neighbours(p.url)[1] for p in course] == [*course[1:], None]
    for url, shelf in (
        ("learn/kl", "Learn"),
        ("guides/lora", "Guides"),
        ("reference/config", "Reference"),
        ("notation", "Reference"),
        ("index", "Learn"),
    ):
        made = BeautifulSoup(shelves.sidebar(url), "html.parser")
        assert [a.text for a in made.select(".shelves a.here")] == [shelf] and len(
            made.select(".current-page")
        ) == (url != "index")
        assert len(made.select("details[open]")) == (url.startswith("reference/"))
    assert len(BeautifulSoup(shelves.sidebar("learn/kl"), "html.parser").select("li")) == 27
    every = {
        a["href"]
        for shelf in ("learn", "guides", "reference")
        for a in BeautifulSoup(shelves.sidebar(shelf), "html.parser").select("li a")
    }
    assert {f"{p.url}.html" for p in read_pages()[1]} <= every


@built
def test_one_place_and_one_way_on():
    for p in of_course(read_pages()[1]):
        text = (site / f"{p.url}.html").read_text("utf-8")
        after = shelves.neighbours(p.url)[1]
        said = [
            m[1] or m[2]
            for m in re.finditer(
                r'class="to-next"[^>]*>.*?href="([^"]*)"|class="next-page" href="([^"]*)"',
                text,
                re.S,
            )
        ]
        assert text.count(f"lesson {p.number} of 27") == 1 and "<strong>Next</strong>" not in text
        assert said == ([f"{Path(after.url).name}.html"] * 2 if after else ["../guides.html"]), (
            p.url
        )
    assert [a["href"] for a in soup(site / "index.html").select(".start a")] == [
        "learn/from_a_reward_to_ppo.html",
        "#run-it",
    ]


@built
@browser
def test_a_lesson_is_ticked_and_the_notation_opens_beside_it(one):
    tab = one.open(at("learn/kl"))
    tab.ask("localStorage.removeItem('read')")
    tab.go(at("learn/kl"))
    assert not tab.ask("document.querySelectorAll('.number.read').length")
    tab.ask("document.querySelector('.to-next').scrollIntoView()")
    tab.wait("document.querySelectorAll('.number.read').length == 1")
    ticked = "document.querySelector('.number.read')"
    title = f"{ticked}.parentElement.lastChild"
    assert tab.ask(f"getComputedStyle({ticked}, '::after').position") == "absolute"
    assert tab.ask(  # the tick takes no place from the title
        f"(r => (r.selectNode({title}), r.getBoundingClientRect().left))(document.createRange())"
    ) >= tab.ask(f"{ticked}.getBoundingClientRect().right")
    tab.go(at("learn"))
    assert tab.ask(
        "[...document.querySelectorAll('.lesson-map .read')].map(n => n.textContent)"
    ) == ["6"]
    tab.go(at("learn/kl"))
    tab.ask("document.querySelector('a.beside').click()")
    tab.wait("document.querySelector('dialog.beside[open] iframe')")
    assert "/notation.html" in tab.ask(
        "document.querySelector('dialog.beside iframe').src"
    ) and "/learn/kl" in tab.ask("location.href")
    tab.ask(
        "document.querySelector('dialog.beside button').click(), localStorage.removeItem('read')"
    )
    assert not tab.ask("document.querySelector('dialog.beside').open")
    assert tab.quiet(), (tab.log, tab.asked)
    tab.close()


# --- the front page -----------------------------------------------------------------------------------------------------
def test_the_code_of_the_readme_runs_in_order(tmp_path, monkeypatch):
    import instruct_goose
    from instruct_goose.models.loading import tiny_smollm

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        instruct_goose,
        "load_smollm",
        lambda: tiny_smollm("The movie was acting a good film 2+3= 4+4= 5 8".split()),
        raising=False,
    )
    readme = (root / "README.md").read_text("utf-8")
    space = {}
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    for block in blocks:
        exec(block, space)
    assert len(blocks) >= 2 and len(space["metrics"]) == 1 and Path("runs/mine/policy").is_dir()


def test_no_sentence_installs_another_project():
    "`pip install instruct_goose` gets an older project of that name; how an optional part is installed is said by `instruct_goose.install`."
    stray = []
    for path in [
        p
        for f in ("nbs", "instruct_goose", "docs", "tests", "evidence", "bench")
        for p in (root / f).rglob("*.*")
        if p.suffix in (".py", ".pyi", ".ipynb", ".md", ".html")
    ] + list(root.glob("*.md")):
        if {"_build", "_site", "jupyter_execute"} & set(path.parts) or path == Path(__file__):
            continue
        text = re.sub(r"instruct_goose\[dev\] @ git\+", "", path.read_text("utf-8"))
        stray += [
            str(path.relative_to(root))
            for m in re.finditer(
                r"instruct_goose\[\w+(,\w+)*\]|pip install (-\w+ )?['\"]?instruct[_-]goose\b(?!` from the package index)",
                text,
            )
        ]
    assert not stray


def test_links_to_the_repository_are_made_from_one_setting():
    allowed = {
        "settings.ini",
        "pyproject.toml",
        "CITATION.cff",
        "instruct_goose/_modidx.py",
    }  # test_settings keeps these in step
    found = {
        p.relative_to(root).as_posix()
        for f in ("docs", "instruct_goose", ".")
        for p in ((root / f).glob("*.*") if f == "." else (root / f).rglob("*.py"))
        if p.is_file()
        and p.suffix in (".py", ".md", ".toml", ".ini", ".cff")
        and not {"_build", "_site"} & set(p.parts)
        and "github.com/instruct-goose" in p.read_text("utf-8")
    }
    assert found <= allowed, found - allowed


@built
def test_the_first_page_is_light():
    "What the front page loads, without what only other pages need: under 300 KB, scripts and fonts included."
    page = soup(site / "index.html")
    loaded = [
        t.get("href") or t.get("src")
        for t in page.find_all(["link", "script", "img"])
        if t.name != "link" or "stylesheet" in t.get("rel", [])
    ]
    sizes = {
        name: (site / urlsplit(name).path).stat().st_size
        for name in ["index.html", *filter(None, loaded)]
    }
    assert sum(sizes.values()) < 300_000, sizes
    assert not [n for n in sizes if "katex" in n or "find-index" in n or "plotly" in n]
    for path in files:
        assert 'class="-Color' not in path.read_text("utf-8"), (
            f"{path.name}: coloured output, and find.lighter has taken its colours away"
        )
