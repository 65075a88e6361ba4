"""Formulas typeset while the site is built: KaTeX runs here, so that pages need no script and a wrong formula stops the build.

KaTeX itself comes with sphinxcontrib-katex, its style sheet and fonts with jupyterlab-myst; nothing is fetched.
The fonts go into the style sheet, because some browsers refuse font files beside a page opened from disk.
"""

import atexit
import base64
import io
import json
import re
import sys
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

log = logging.getLogger(__name__)


@cache
def engine():
    import sphinxcontrib.katex
    from py_mini_racer import MiniRacer

    js = MiniRacer()
    atexit.register(js.close)  # its thread would keep Python from ending
    js.eval((Path(sphinxcontrib.katex.__file__).parent / "katex.min.js").read_text("utf-8"))
    return js


@cache
def html(tex: str, display: bool) -> str:
    "One formula as HTML with MathML for screen readers. Raises ValueError with KaTeX's own words."
    options = {"displayMode": display, "throwOnError": True, "strict": "ignore"}
    found = engine().eval(f"""(() => {{ try {{ return katex.renderToString({json.dumps(tex)}, {json.dumps(options)}) }}
                                        catch (e) {{ return "!" + e.message }} }})()""")
    if found.startswith("!"):
        raise ValueError(found[1:])
    return found


def style_sheet() -> str:
    "katex.css with its fonts inside, from the JavaScript bundle of jupyterlab-myst."
    from fontTools.ttLib import TTFont

    static = Path(sys.prefix) / "share/jupyter/labextensions/jupyterlab-myst/static"
    bundle = next(
        (
            t
            for p in sorted(static.glob("*.js"))
            if "katex-version::after" in (t := p.read_text("utf-8"))
        ),
        None,
    )
    if bundle is None:
        raise SystemExit(
            f"no KaTeX style sheet in {static}: pip install -c constraints.txt -e '.[docs]'"
        )
    start = bundle.index("/* stylelint-disable", bundle.rindex("@font-face"))
    css = engine().eval("`" + re.match(r"(?:[^`\\]|\\.)*", bundle[start:], re.S)[0] + "`")
    faces = []
    for path in sorted(static.glob("*.woff")):
        raw = path.read_bytes()
        name = TTFont(io.BytesIO(raw))["name"]
        family, style = name.getDebugName(1), name.getDebugName(2)
        if not family.startswith("KaTeX_"):
            continue
        faces.append(
            f'@font-face {{ font-family: "{family}"; font-weight: {"bold" if "Bold" in style else "normal"}; '
            f"font-style: {'italic' if 'Italic' in style else 'normal'}; font-display: block; "
            f'src: url(data:font/woff;base64,{base64.b64encode(raw).decode()}) format("woff"); }}'
        )
    if len(faces) < 20 or ".katex .mfrac" not in css:
        raise SystemExit(f"KaTeX's style sheet in {static} is not as expected")
    return "\n".join([*faces, css])


def visit(self, node, display: bool):
    tex = node.astext()
    try:
        made = html(tex.strip(), display)
    except ValueError as e:
        log.warning("formula %r: %s", tex[:80], e, location=node)
        made = f"<code>{self.encode(tex)}</code>"
    if display:
        label = node.get("label")
        self.body.append(
            self.starttag(
                node, "div", CLASS="math notranslate nohighlight", ids=node.get("ids", [])
            )
            + made
        )
        if label:
            self.body.append(f'<span class="eqno">({node["number"]})</span>')
        self.body.append("</div>\n")
    else:
        self.body.append(
            self.starttag(node, "span", "", CLASS="math notranslate nohighlight") + made + "</span>"
        )
    raise nodes.SkipNode


LONGEST = 60  # letters of TeX: a longer formula may have to break


def keep_with_punctuation(app, doctree, url):
    "Hold a short formula and the full stop, comma or bracket behind it in one line."
    for formula in list(doctree.findall(nodes.math)):
        behind = formula.next_node(siblings=True, descend=False)
        if len(formula.astext()) > LONGEST or not isinstance(behind, nodes.Text):
            continue
        found = re.match(r"[.,;:!?)]+", str(behind))
        if not found:
            continue
        parent = formula.parent
        at = parent.index(formula)
        rest = str(behind)[found.end() :]
        together = nodes.inline(
            "", "", formula.deepcopy(), nodes.Text(found[0]), classes=["nobreak"]
        )
        parent.children[at : at + 2] = [together, *([nodes.Text(rest)] if rest else [])]
        parent.setup_child(together)
        for child in parent.children[at : at + 2]:
            child.parent = parent


def setup(app):
    app.connect("doctree-resolved", keep_with_punctuation)
    app.add_html_math_renderer(
        "built",
        (lambda self, node: visit(self, node, False), None),
        (lambda self, node: visit(self, node, True), None),
    )
    app.config.html_math_renderer = "built"
    app.add_css_file("katex.css")
    return {"parallel_read_safe": True, "parallel_write_safe": False}
