"""What the search of the site looks through: titles, sections, names and the glossary, written as a script.

A page that is opened from disk may load a script and may not fetch text. The ranking is in _static/find.js.
"""

import json
import re
from pathlib import Path

from docutils import nodes
from glossary import ALIASES, TERMS, anchor
from lessons import SHELVES, read_pages
from sphinx import addnodes

APART = (
    nodes.raw,
    nodes.section,
    nodes.title,
    nodes.literal_block,
    nodes.math_block,
    nodes.table,
    nodes.comment,
    addnodes.desc,
    addnodes.index,
)
EFFORT = r"(?:\s|&nbsp;|&#160;)*[●○]{3}(?:\s|&nbsp;|&#160;)*\d* ?(?:minutes?)?"  # behind an exercise's title, and not in a list of titles
SHORT = 14  # signs of a formula that still reads as text


def words(node: nodes.Node) -> str:
    "The prose of a node: no code, no tables, no drawings, no long formulas."
    made = []

    def walk(n):
        if isinstance(n, nodes.Text):
            made.append(str(n))
        elif isinstance(n, nodes.math):
            tex = re.sub(
                r"\\(hat|tilde|bar|mathrm|text|operatorname|left|right|mathbb)\b|[\\{}]",
                "",
                n.astext(),
            )
            made.append(tex if len(tex) <= SHORT else "…")
        elif not isinstance(n, APART) and "cell_output" not in n.get("classes", ()):
            for child in n.children:
                walk(child)
            if isinstance(n, nodes.paragraph):
                made.append(" ")

    for child in node.children:
        walk(child)
    return " ".join("".join(made).split())


def sections(doctree: nodes.document) -> list[list[str]]:
    "[id, heading, text] of each section, in order."
    return [
        [
            s["ids"][0],
            re.sub(EFFORT, "", " ".join(s.next_node(nodes.title).astext().split())),
            words(s),
        ]
        for s in doctree.findall(nodes.section)
    ]


def entries(doctree: nodes.document) -> list[list[str]]:
    "[id, name, first sentence] of what a page exports."
    made = []
    for entry in doctree.findall(addnodes.desc):
        for signature in entry.findall(addnodes.desc_signature):
            if signature.parent is not entry or not signature["ids"]:
                continue
            said = next(
                (
                    words(p) or p.astext()
                    for c in entry.children
                    if isinstance(c, addnodes.desc_content)
                    for p in c.children
                    if isinstance(p, nodes.paragraph)
                ),
                "",
            )
            made.append(
                [
                    signature["ids"][0],
                    signature["fullname"],
                    re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(said.split()))[0],
                ]
            )
    return made


def rows(doctree: nodes.document) -> list[list[str]]:
    "[id of the section, word, what is said of it] of each row of a table that begins with a word of code: settings, metrics, other libraries' words."
    made = []
    for row in doctree.findall(nodes.row):
        first, *rest = row.children
        table = row.parent.parent.parent
        inside = row
        section = row
        while inside is not None and not isinstance(inside, addnodes.desc):
            inside = inside.parent
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if inside is not None or section is None or "parameters" in table.get("classes", ()):
            continue
        said = " – ".join(text for cell in rest if (text := " ".join(cell.astext().split())))
        made += [
            [section["ids"][0], word.astext().split(" ")[0], said[:200]]
            for word in first.findall(nodes.literal)
        ]
    return made


def fields(doctree: nodes.document) -> list[list[str]]:
    "[id of the class, field, what is said of it, the class] of each field of a dataclass: the settings, where their entry shows them."
    made = []
    for entry in doctree.findall(addnodes.desc):
        signature = entry.next_node(addnodes.desc_signature)
        if entry.get("objtype") != "class" or not signature["ids"]:
            continue
        for table in entry.findall(nodes.table):
            if "fields" not in table.get("classes", ()):
                continue
            for row in (r for body in table.findall(nodes.tbody) for r in body.children):
                name, *rest = [" ".join(cell.astext().split()) for cell in row.children]
                made.append(
                    [
                        signature["ids"][0],
                        name,
                        " – ".join(text for text in rest[::-1] if text)[:200],
                        signature["fullname"],
                    ]
                )
    return made


class Index:
    "Collects page by page, while Sphinx writes them."

    def __init__(self):
        index, lessons = read_pages()
        self.about = {
            p.url: {"subtitle": p.subtitle, "part": SHELVES.get(p.part, "Reference")}
            for p in lessons
        } | {"index": {"subtitle": index.subtitle, "part": "Front page"}}
        self.pages = []

    def add(self, app, url, template, context, doctree):
        if doctree is None:
            return
        found = sections(doctree)
        if not found:
            return
        self.pages.append(
            {
                "url": url,
                "title": found[0][1],
                "subtitle": "",
                "part": "Reference",
                "sections": found,
                "names": entries(doctree),
                "rows": rows(doctree) + fields(doctree),
            }
            | self.about.get(url, {})
        )

    def write(self, app, error):
        if error or app.builder.name != "html":
            return
        terms = [
            [term, meaning, url, list(others), anchor(term)]
            for term, (meaning, url, others) in TERMS.items()
        ]
        terms += [[alias, "", url, [], ""] for alias, url in ALIASES.items()]
        text = json.dumps(
            {"pages": self.pages, "terms": terms}, ensure_ascii=False, separators=(",", ":")
        )
        (Path(app.outdir) / "_static/find-index.js").write_text(f"const INDEX = {text}\n", "utf-8")
        titles = [page["title"] for page in self.pages if page["part"] != "Reference"]
        offered = json.dumps(sorted({*titles, *TERMS, *ALIASES}, key=str.lower), ensure_ascii=False)
        path = Path(app.outdir) / "_static/suggestions.js"
        path.write_text(f"const SUGGESTIONS = {offered}\n", "utf-8")


def for_all_readers(app, url, template, context, doctree):
    "What a screen reader asks of the theme: levels of its headings, no list of definitions without a term."

    def lines(m):
        return re.sub(
            r"<(/?)d[ld]>", lambda tag: f"<{tag[1]}span{'' if tag[1] else ' class=line'}>", m[0]
        )

    if "toc" in context:
        context["toc"] = re.sub(EFFORT, "", context["toc"])
    if "body" in context:
        context["body"] = re.sub(r'<dt class="sig .*?</dt>', lines, context["body"], flags=re.S)


def only_what_is_used(app, url, template, context, doctree):
    "A page without a formula needs no fonts for formulas, one without code nothing to copy code with."
    body = context.get("body", "")
    unused = (
        ["sphinx_highlight"]
        + ([] if 'class="katex' in body else ["katex"])
        + ([] if "highlight" in body else ["copybutton", "clipboard"])
    )
    for kind in ("css_files", "script_files"):
        context[kind] = [
            f for f in context[kind] if not any(u in str(getattr(f, "filename", f)) for u in unused)
        ]


def lighter(app, error):
    "Style sheets that every page loads, without comments, and without the colours of terminals, which no output has."
    if error or app.builder.name != "html":
        return
    for path in [
        p
        for name in ("mystnb*.css", "pygments.css", "goose.css")
        for p in (Path(app.outdir) / "_static").glob(name)
    ]:
        text = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.S)
        text = re.sub(r"[^{}]*\.-Color[^{}]*\{[^}]*\}", "", text)
        path.write_text(re.sub(r":\s+", ":", re.sub(r"\s*([{};])\s*", r"\1", text)), "utf-8")


def setup(app):
    index = Index()
    app.connect(
        "builder-inited", lambda app: setattr(app.builder, "search", False)
    )  # Sphinx's own: no excerpts from disk
    app.connect("html-page-context", index.add)
    app.connect("html-page-context", for_all_readers, priority=890)
    app.connect("html-page-context", only_what_is_used, priority=900)
    app.connect("build-finished", index.write)
    app.connect("build-finished", lighter)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
