"""README.md from nbs/index.ipynb: the prose, the stored output of its cells, and the course in lines.

Beside it, as files that can be read in the repository: pages of the site that are made from records.

`--check` writes nothing and fails when README.md or its pictures are stale.
"""

import argparse
import re
from pathlib import Path

from compare import compare_page
from know import know_page
from lessons import ROOT, grouped, of_course, read_pages
from speed import speed_page

IMAGES = ROOT / "docs/images"
INK = "<style>svg { --ink: #262626 } @media (prefers-color-scheme: dark) { svg { --ink: #e6e6e6 } }</style>"


def course(pages) -> str:
    "The course in a line for each part."

    def link(p):
        return f"[{p.number} {p.title}]({p.path.relative_to(ROOT / 'nbs').as_posix()})"

    return "\n".join(
        f"- **{heading}**: {', '.join(map(link, rows))}"
        for heading, rows in grouped(pages, "learn").items()
    )


def start(pages) -> str:
    return f"**[Start the course]({of_course(pages)[0].path.relative_to(ROOT / 'nbs').as_posix()})** · **[Run it](#run-it)**"


def picture(svg: str) -> str:
    "An SVG file that is legible on a light and on a dark page."
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"\n\s*", " ", svg).replace("> <", "><").replace("#262626", "var(--ink)")
    return svg.replace("><", f">{INK}<", 1)


def as_file(text: str, made_by: str) -> str:
    "A page of the site in plain Markdown, to be read in docs/; its links are those of a notebook in nbs/."
    text = re.sub(r"```\{rst-class\} subtitle\n```\n\n", "> ", text)
    text = re.sub(r"<figure.*?</figure>\n*", "", text, flags=re.S)  # a drawing that needs the site

    def link(m):
        inside = m[1].removeprefix("../docs/")
        return f"]({inside if inside != m[1] or m[1].startswith('../') else f'../nbs/{m[1]}'})"

    text = re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", link, text)
    return (
        f"<!-- Made by docs/readme.py from {made_by} and the records: run make save. -->\n\n{text}"
    )


def render() -> dict[Path, str]:
    "The README with its pictures, and the pages beside it: file -> text."
    index, pages = read_pages()
    parts = []
    files = {}
    for cell in index.cells:
        if "hide" in cell.directives:
            continue
        if cell.kind == "markdown":
            said = cell.source.replace("<!-- course -->", course(pages))
            said = said.replace("<!-- start -->", start(pages))
            parts.append(re.sub(r"<!-- github: (.*?) -->", r"(\1)", said))
            continue
        if cell.directives.get("echo") != "false":
            parts.append(f"```python\n{cell.source}\n```")
        for data in (
            o.get("data", {}) for o in cell.outputs if cell.directives.get("output") != "false"
        ):
            caption = cell.directives.get("fig-cap", "")
            if svg := "".join(data.get("image/svg+xml", "")):
                file = IMAGES / ("-".join(re.findall(r"\w+", caption.lower())[:6]) + ".svg")
                files[file] = picture(svg)
                parts.append(f"![{caption}]({file.relative_to(ROOT).as_posix()})")
            else:
                parts.append("".join(data["text/markdown"]).strip())
    text = (
        "<!-- Made from nbs/index.ipynb by docs/readme.py: edit the notebook, then run make save. -->\n\n"
        + "\n\n".join(parts)
        + "\n"
    )
    # links are relative to nbs/ in the notebook and to the repository here
    relative = r"(\]\()(?!https?:|#|docs/images/|mailto:)([^)\s]+\))"
    files[ROOT / "README.md"] = re.sub(
        relative, lambda m: m[1] + (m[2][3:] if m[2].startswith("../") else "nbs/" + m[2]), text
    )
    for name, page in {"know": know_page, "compare": compare_page, "speed": speed_page}.items():
        files[ROOT / f"docs/{name}.md"] = as_file(page(), f"docs/{name}.py")
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if something is stale"
    )
    check = parser.parse_args().check
    files = render()
    stale = [
        path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    unused = set(IMAGES.glob("*")) - files.keys()
    if check and (stale or unused):
        raise SystemExit(
            f"stale, run make save: {', '.join(str(p.relative_to(ROOT)) for p in [*stale, *unused])}"
        )
    for path in unused:
        path.unlink()
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path], "utf-8")


if __name__ == "__main__":
    main()
