"""The gallery: every figure of every lesson on one page, each a link to its place. The files are loaded as they are scrolled to."""

import html
import re

from lessons import SHELVES, Cell, Page

from instruct_goose.lesson import small_svg


def drawings(cell: Cell) -> list[tuple[str, str]]:
    "Anchor and SVG of each figure that a cell shows."
    if "hide" in cell.directives:
        return []
    made = []
    for i, output in enumerate(cell.outputs):
        if svg := "".join(output.get("data", {}).get("image/svg+xml", "")):
            made.append((f"fig-{cell.id}-{i}", small_svg(svg)))
    return made


def moving(page: Page) -> list[tuple[str, str]]:
    "Anchor and caption of what can be moved in a lesson."
    return [
        (f"plotly-{c.id}-{i}", c.directives.get("fig-cap", ""))
        for c in page.cells
        if "hide" not in c.directives
        for i, o in enumerate(c.outputs)
        if "application/vnd.plotly.v1+json" in o.get("data", {})
    ]


def figures_page(pages: list[Page]) -> tuple[str, dict[str, str]]:
    "The page, and the drawings that it loads: name of the file -> SVG."
    files = {}
    movable = []
    parts = []
    for part, name in {"": "Notation", **SHELVES}.items():
        made = []
        for page in (p for p in pages if p.part == part):
            movable += [
                f'<li><a href="{page.url}.html#{anchor}">{html.escape(page.title)}</a>: {html.escape(caption)}</li>'
                for anchor, caption in moving(page)
            ]
            for cell in page.cells:
                for anchor, svg in drawings(cell):
                    files[f"{anchor}.svg"] = svg
                    caption = html.escape(cell.directives.get("fig-cap", page.title))
                    width, height = (
                        round(float(x) * 4 / 3)
                        for x in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups()
                    )
                    made.append(
                        f'<figure><a href="{page.url}.html#{anchor}"><img src="_static/figures/{anchor}.svg" loading="lazy" width="{width}" '
                        f'height="{height}" alt="{caption}"></a><figcaption>{html.escape(page.title)}</figcaption></figure>'
                    )
        if made:
            parts.append(f"## {name}\n\n" + f'<div class="all-figures">{"".join(made)}</div>')
    text = [
        "# Figures",
        "```{rst-class} subtitle\n```\n\nAll that the lessons draw; a click leads to where it is explained, with the code that draws it\n",
        f"{len(files)} figures, and {len(movable)} that move.",
        *parts,
        "## What moves",
        f"<ul>{''.join(movable)}</ul>",
    ]
    return "\n\n".join(text) + "\n", files
