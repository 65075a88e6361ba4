"""The builder on small cases, and the site that make docs has built: links, offline, formulas, entries."""
import ast
import json
import re
import shutil
import subprocess
import sys
import xml.dom.minidom
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

root = Path(__file__).parents[2]
site = root / "docs/_site"
sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
import readme  # noqa: E402
import typeset  # noqa: E402
from api import entry  # noqa: E402
from lessons import Page, read_cell, read_pages  # noqa: E402


# --- the builder ------------------------------------------------------------------------------------------------------
def cell(source, kind="code", **outputs): return read_cell({"cell_type": kind, "source": source, "id": "c0", **outputs}, "test")


def node(source): return cell("#| export\n" + source).exported[0]


def page(part="1_objective", name="01_b", cells=()):
    path = root / "nbs" / part / f"{name}.ipynb"
    return Page(path, part, f"{part[2:]}/{name[3:]}", name, "sub", 5, "instruct_goose.objective.b", list(cells))


GAE = '''def gae(
    rewards: Float[Tensor, "batch time"],  # per token
    *,
    lam: float = .95,  # the dial;
                       # 1 is Monte Carlo
    old: int | None = None,
) -> Float[Tensor, "batch time"]:  # advantages
    "A_t = Σ (γλ)^l *delta* [1]."
'''


def test_entry_has_signature_types_and_comments():
    made = entry(node(GAE), "m", lambda t: t)
    assert "{py:function} gae(rewards, *, lam=0.95, old=None)\n:module: m" in made
    assert '| `rewards` | `Float[Tensor, "batch time"]` |  | per token |' in made
    assert "| `lam` | `float` | `0.95` | the dial; 1 is Monte Carlo |" in made
    assert r"| `old` | `int \| None` | `None` |  |" in made
    assert '| *returns* | `Float[Tensor, "batch time"]` |  | advantages |' in made
    assert r"\*delta\* \[1\]" in made  # the docstring's signs are not markup


def test_entry_of_classes():
    made = entry(node('''@dataclass
class C:
    "Settings."
    lr: float = 1e-3  # rate
    name: str = "x"
    """what it is called"""
    def go(self, n: int):  # steps
        "Go."
    def _hidden(self): "No."
'''), "m", lambda t: t)
    assert "{py:class} C(lr=0.001, name=\"x\")" in made and "| `lr` | `float` | `0.001` | rate |" in made
    assert "what it is called" in made and "{py:method} go(n)" in made and "_hidden" not in made


def test_patched_functions_are_methods_of_their_class(tmp_path, monkeypatch):
    monkeypatch.setattr("lessons.ROOT", tmp_path)
    path = tmp_path / "nbs/1_objective/00_a.ipynb"
    path.parent.mkdir(parents=True)
    sources = ["#| export\nclass C:\n    'A class.'", "#| exports\n@patch\ndef go(self: C, n: int):\n    'Go.'"]
    cells = [{"cell_type": "markdown", "source": "# T"}] + [{"cell_type": "code", "source": s} for s in sources]
    path.write_text(json.dumps({"cells": cells}))
    later = [{"cell_type": "markdown", "source": "# L"}, {"cell_type": "code", "source": "#| exports\n@patch\ndef come(self: C):\n    'Come.'"}]
    (tmp_path / "nbs/1_objective/01_b.ipynb").write_text(json.dumps({"cells": later}))
    (tmp_path / "nbs/index.ipynb").write_text(json.dumps({"cells": cells[:1]}))
    read = read_pages()[1][0]
    assert "{py:method} come()" in entry(read.cells[1].documented[0], "m", lambda t: t)  # from another lesson
    assert read.names == ["C"]
    assert "{py:method} go(n)" in entry(read.cells[1].documented[0], "m", lambda t: t)


def test_directives_decide_what_is_shown():
    shown = lambda text, **k: build.code_cell(cell(text, **k))
    assert shown("#| hide\nx = 1") is None and shown("#| default_exp a.b") is None
    assert shown("#| export\nimport os") is None
    folded = shown("#| export\ndef f(): 'F.'")
    assert folded["metadata"]["tags"] == ["hide-input"] and "The code of f" in str(folded["metadata"])
    assert shown("#| exports\ndef f(): 'F.'")["metadata"]["tags"] == []
    assert shown("#| code-fold: true\nx")["metadata"]["tags"] == ["hide-input"]
    assert shown("#| echo: false\nx")["metadata"]["tags"] == ["remove-input"]
    with pytest.raises(SystemExit, match="unknown directive"): cell("#| hid\nx")


def test_figures_are_inline_described_and_recoloured():
    svg = ('<?xml version="1.0"?><svg width="72pt" height="36pt" viewBox="0 0 72 36"><metadata>x</metadata>'
           '<g id="a"><text style="fill: #262626">t</text></g><use href="#a"/></svg>')
    c = cell('#| fig-cap: One "figure".\nplot()', outputs=[{"output_type": "display_data", "data": {"image/svg+xml": svg}}])
    made = build.code_cell(c)["outputs"][0]["data"]["text/html"]
    soup = BeautifulSoup(made, "html.parser")
    assert soup.svg["aria-label"] == 'One "figure".' and soup.figcaption.text == 'One "figure".'
    assert "currentColor" in made and "#262626" not in made and "metadata" not in made
    assert soup.g["id"] == "c0-0-a" and soup.use["href"] == "#c0-0-a"
    assert "max-width:96px" in soup.svg["style"] and not soup.svg.get("width")


def test_links_resolve_names_and_notebooks():
    a, b = page(name="00_a"), page(name="01_b", cells=[cell(GAE.join(["#| export\n", ""]))])
    a.module = "instruct_goose.objective.a"
    links = build.Links([a, b])
    full = "{py:obj}`gae <instruct_goose.objective.b.gae>`"
    assert links.apply("see `gae`, then `gae` and `other`", a) == f"see {full}, then `gae` and `other`"
    assert links.apply("`gae()`", a) == "{py:obj}`gae() <instruct_goose.objective.b.gae>`"
    links.add("C.values", b)
    assert links.apply("`values()`", a) == "{py:obj}`values() <instruct_goose.objective.b.C.values>`"
    for untouched in ("`values`", "# `gae`", "```\n`gae`\n```", "$$\n`gae`\n$$", "[`gae`](https://x.y)"): assert links.apply(untouched, a) == untouched
    assert links.apply("[B](01_b.ipynb#The-end)", a) == "[B](b.ipynb#the-end)"
    assert links.apply("[l](../../LICENSE)", a) == f"[l]({build.REPO}/blob/main/LICENSE)"
    assert not links.broken
    links.apply("[x](09_none.ipynb)", a)
    assert "09_none.ipynb, which is not there" in links.broken[0]


def test_formulas_are_typeset_or_refused():
    assert "katex-display" in typeset.html(r"\sum_{i \lt t} x_i", True)
    assert "katex-display" not in typeset.html("x", False)
    with pytest.raises(ValueError, match="KaTeX parse error"): typeset.html(r"\frac{1}{", True)


def test_readme_paths_and_pictures():
    svg = '<?xml version="1.0"?><svg width="1"><metadata>d</metadata><g style="fill: #262626; stroke: #262626"/><text>t</text></svg>'
    made = readme.picture(svg, "0" * 16)
    assert xml.dom.minidom.parseString(made).documentElement.tagName == "svg"
    assert "prefers-color-scheme: dark" in made and "#262626;" not in made and "fill: var(--ink)" in made and "metadata" not in made
    rows = readme.table_of_lessons([page()])
    assert "[01_b](1_objective/01_b.ipynb) | 5 | sub" in rows and "**Objective**" in rows


# --- the site ---------------------------------------------------------------------------------------------------------
built = pytest.mark.skipif(not (site / "index.html").exists(), reason="docs/_site is not built: make docs")
files = sorted(p for p in site.rglob("*.html") if "_static" not in p.parts) if site.exists() else []
lessons = [p.url for p in read_pages()[1]]


@cache
def soup(path: Path) -> BeautifulSoup: return BeautifulSoup(path.read_text("utf-8"), "html.parser")  # to be read, not changed


@cache
def anchors(path: Path) -> set[str]: return {t["id"] for t in soup(path).find_all(id=True)} | {"", "top"}


@built
def test_every_lesson_has_a_page():
    assert not [u for u in lessons if not (site / f"{u}.html").exists()]
    for url in lessons:
        s = soup(site / f"{url}.html")
        assert s.h1 and s.select_one(".lesson-facts") and s.select_one("a.next-page") and s.html["lang"] == "en"
        assert s.find("meta", {"name": "viewport"})


@built
def test_links_and_anchors():
    broken = []
    for path in files:
        for a in soup(path).find_all("a", href=True):
            parts = urlsplit(a["href"])
            if parts.scheme or parts.netloc: continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.exists(): broken.append((path.name, a["href"]))
            elif there.suffix == ".html" and unquote(parts.fragment) not in anchors(there): broken.append((path.name, a["href"]))
    assert not broken


@built
def test_nothing_is_fetched_from_elsewhere():
    away = re.compile(r"^(https?:)?//")
    for path in files:
        for tag in soup(path).find_all(["script", "img", "iframe", "link", "source"]):
            address = tag.get("src") or (tag.get("href") if set(tag.get("rel", [])) & {"stylesheet", "preload", "icon", "preconnect"} else "")
            assert not (address and away.match(address)), f"{path.name}: {address}"
            if address: assert (path.parent / unquote(urlsplit(address).path)).exists(), f"{path.name}: {address}"
    for css in site.rglob("*.css"):
        for address in re.findall(r"url\(['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css.read_text("utf-8")):
            assert not away.match("".join(address)), css.name


@built
def test_every_formula_is_typeset():
    count = 0
    for path in files:
        for t in soup(path).select(".math"): assert t.select_one(".katex"), f"{path.name}: {t.text[:60]}"
        count += len(soup(path).select(".katex"))
        prose = " ".join(t.text for t in soup(path).select("article p") if not t.find(["code", "math"]))
        assert not re.search(r"\$\$|\\\(|\\begin\{|\{py:", prose), path.name
    assert count > 100


@built
def test_figures_have_descriptions():
    count = 0
    for path in files:
        for t in soup(path).select("figure.plot > svg, figure.plot > .plotly-figure"):
            count += 1
            assert len(t["aria-label"]) > 40, path.name
        for t in soup(path).select("article img"): assert t.get("alt"), path.name
    assert count > 5


@built
def test_every_public_name_has_an_entry_with_its_parameters():
    for p in read_pages()[1]:
        if not p.names: continue
        s = soup(site / f"{p.url}.html")
        for c in p.cells:
            for n in c.documented:
                entry = s.find(id=f"{p.module}.{n.name}")
                assert entry, n.name
                assert entry.find("a", href=re.compile("_modules/")), f"{n.name}: no source link"
                if isinstance(n, ast.FunctionDef) and n.args.args: assert entry.find_next("table", class_="parameters"), n.name


@built
def test_names_in_the_text_lead_to_their_entries():
    linked = sum(len(soup(site / f"{u}.html").select("article p a.reference > code.xref")) for u in lessons)
    assert linked > 30


@built
def test_search_index_knows_the_names():
    index = (site / "searchindex.js").read_text("utf-8")
    for page in read_pages()[1]:
        for name in page.names: assert name.lower() in index.lower(), name


@built
def test_no_two_elements_share_an_id():
    for path in files:
        if path.relative_to(site).parts[0] in ("_modules", "reports"): continue  # a report has a drawing for each curve, whose groups matplotlib numbers alike
        ids = [t["id"] for t in soup(path).find_all(id=True)]
        assert len(ids) == len(set(ids)), (path.name, sorted({i for i in ids if ids.count(i) > 1})[:5])




# --- in a browser, with the network off ---------------------------------------------------------------------------------
chromium = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
browser = pytest.mark.skipif(chromium is None, reason="no Chromium on this machine")


def open_page(address: str, tmp_path: Path, *more: str) -> tuple[BeautifulSoup, str]:
    "The page as a browser leaves it, and what it logged. No host name can be resolved."
    if not address.startswith("file:"): address = (site / address.partition("?")[0]).as_uri() + "".join(address.partition("?")[1:])
    flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
             "--disable-component-update --disable-sync --virtual-time-budget=15000 --enable-logging=stderr --dump-dom").split()
    done = subprocess.run([chromium, *flags, *more, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}", address],
                          capture_output=True, text=True, timeout=120)
    return BeautifulSoup(done.stdout, "html.parser"), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@built
@browser
def test_plotly_figures_are_drawn_offline(tmp_path):
    pages = [u for u in lessons if "data-plotly" in (site / f"{u}.html").read_text("utf-8")]
    for i, url in enumerate(pages):
        page, log = open_page(f"{url}.html", tmp_path / str(i))
        for box in page.select(".plotly-figure"): assert box.select_one("svg.main-svg"), f"{url}: not drawn"
        assert "rror" not in log, log


@built
@browser
def test_search_finds_a_name_offline(tmp_path):
    page, log = open_page("search.html?q=group_advantages", tmp_path)
    found = [a["href"] for a in page.select("ul.search a")]
    assert any("objective/advantages.html" in a for a in found), (found, log)


@built
@browser
def test_the_front_page_can_be_dragged_offline(tmp_path):
    record = json.loads((root / "evidence/drift.json").read_text("utf-8"))
    for beta, iteration, prompt in ((0, 30, None), (.6, 6, 1)):
        at = f"index.html?#beta={beta}&iteration={iteration}" + (f"&prompt={prompt}" if prompt is not None else "")
        page, log = open_page(at, tmp_path / str(beta))
        frames = next(r["frames"] for r in record["runs"] if r["beta"] == beta)
        now = next(f for f in frames if f["iteration"] == iteration)
        figure = page.select_one("#drift-figure")
        assert figure.output.text == str(iteration) and "rror" not in log, log
        shown = {m["data-of"]: m.b.text for m in figure.select(".meters > div")}
        assert shown["human_score"] == f"{now['human_score']:.2f}" and float(shown["kl_to_reference"]) == pytest.approx(now["kl_to_reference"], abs=.051)
        texts = [li.text for li in figure.select("li")]
        if prompt is None: assert texts == now["texts"]
        else: assert [t.removeprefix(str(f["iteration"])) for t, f in zip(texts, frames, strict=True)] == [f["texts"][prompt] for f in frames]
        assert len(figure.select("polyline.now")) == 4 and len(figure.select("polyline")) == 4 * len(record["runs"])


SAMPLE = ["index.html", "quiz.html", "tables.html", "glossary.html", "start/from_a_reward_to_ppo.html", "objective/kl.html",
          "objective/group.html", "training/trainer.html", "practice/quickstart.html", "practice/same_name.html"]
PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const wide = [...document.querySelectorAll("figure.plot, figure.plot svg, .drift")].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
  const small = [...document.querySelectorAll("figure.plot svg text")].filter(t => t.checkVisibility() && !t.closest("svg").closest(".plotly-figure"))
    .map(t => t.getBoundingClientRect()).filter(r => r.width > 0 && Math.max(r.width, r.height) < 9).length
  document.documentElement.dataset.seen = JSON.stringify({across: document.documentElement.scrollWidth, screen: innerWidth, wide: wide.length, small,
    outside: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("file:") && !n.startsWith("data:"))})
}, 3000))
</script>"""


@built
@browser
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_pages_fit_the_screen(width, tmp_path):
    "Nothing to scroll sideways, no figure cut, no error, nothing asked of another host. Pages are looked at in a frame as wide as the screen."
    for i, url in enumerate(SAMPLE[: None if width == 390 else 5]):
        text = (site / url).read_text("utf-8")
        base = f'<base href="{(site / url).as_uri()}">'
        (tmp_path / f"{i}.html").write_text(text.replace("<head>", "<head>" + base, 1).replace("</body>", PROBE + "</body>", 1), "utf-8")
    frames = "".join(f'<iframe src="{i}.html" width="{width}" height="900" style="border:0"></iframe>' for i, _ in enumerate(SAMPLE) if (tmp_path / f"{i}.html").exists())
    collect = """<script>addEventListener("load", () => setTimeout(() => { document.body.dataset.seen =
      JSON.stringify([...document.querySelectorAll("iframe")].map(f => f.contentDocument.documentElement.dataset.seen || null)) }, 6000))</script>"""
    (tmp_path / "all.html").write_text(f"<!doctype html><body>{frames}{collect}</body>", "utf-8")
    page, log = open_page((tmp_path / "all.html").as_uri(), tmp_path / "profile", "--allow-file-access-from-files", "--window-size=2000,1200")
    assert "rror" not in log, log
    for url, seen in zip(SAMPLE, json.loads(page.body["data-seen"])):
        assert seen, f"{url}: not loaded"
        seen = json.loads(seen)
        assert seen["screen"] == width and seen["across"] <= width, (url, seen)
        assert not seen["wide"] and not seen["outside"] and not seen["small"], (url, seen)


DRAG = """<script>
addEventListener("load", () => setTimeout(async () => {
  const made = {}, wait = () => new Promise(done => setTimeout(done, 150))
  for (const box of document.querySelectorAll(".plotly-figure")) {
    const seen = [], rail = () => box.querySelector(".slider-rail-touch-rect").getBoundingClientRect()
    for (const part of [0.01, .5, .99]) {
      const at = rail(), place = {bubbles: true, view: window, clientX: at.left + part * at.width, clientY: at.top + at.height / 2}
      box.querySelector(".slider-rail-touch-rect").dispatchEvent(new MouseEvent("mousedown", place)); await wait()
      document.dispatchEvent(new MouseEvent("mouseup", place)); box.dispatchEvent(new MouseEvent("mouseup", place)); await wait()
      seen.push(JSON.stringify(box.data.map(c => [c.x, c.y])))
    }
    made[box.id] = [new Set(seen).size, box.layout.sliders[0].active]
  }
  document.body.dataset.seen = JSON.stringify(made)
}, 4000))
</script>"""


@built
@browser
def test_every_slider_moves_its_curves_in_the_browser(tmp_path):
    pages = [u for u in lessons if "data-plotly" in (site / f"{u}.html").read_text("utf-8")]
    assert len(pages) >= 8
    for i, url in enumerate(pages):
        base = f'<base href="{(site / url).as_uri()}.html"><script>requestAnimationFrame = f => setTimeout(() => f(performance.now()))</script>'
        text = (site / f"{url}.html").read_text("utf-8").replace("<head>", "<head>" + base, 1).replace("</body>", DRAG + "</body>", 1)
        (tmp_path / f"{i}.html").write_text(text, "utf-8")
        page, log = open_page((tmp_path / f"{i}.html").as_uri(), tmp_path / f"p{i}", "--window-size=1280,900")
        seen = json.loads(page.body["data-seen"])
        assert seen and all(states > 1 and active > 0 for states, active in seen.values()), (url, seen)
        assert "rror" not in log, log
