"""README.md from nbs/index.ipynb: the prose, the stored output of its cells, and the course in four lines.

The notebook is run first, so that what it quotes is what evidence/ holds. `--check` writes nothing and fails when
README.md, its pictures or the outputs stored in the notebook are stale.
"""
import argparse
import hashlib
import re
from pathlib import Path

from lessons import ROOT, grouped, of_course, read_pages, shown_outputs

IMAGES = ROOT / "docs/images"
INK = "<style>svg { --ink: #262626 } @media (prefers-color-scheme: dark) { svg { --ink: #e6e6e6 } }</style>"


def course(pages) -> str:
    "The course in a line for each part."
    def link(p): return f"[{p.number} {p.title}]({p.path.relative_to(ROOT / 'nbs').as_posix()})"
    return "\n".join(f"- **{heading}**: {', '.join(map(link, rows))}" for heading, rows in grouped(pages, "learn").items())


def start(pages) -> str: return f"**[Start the course]({of_course(pages)[0].path.relative_to(ROOT / 'nbs').as_posix()})** · **[Run it](#run-it)**"


def fresh_outputs(path: Path) -> dict:
    "Run a notebook and return cell id -> outputs."
    from execnb.shell import CaptureShell
    from fastcore.nbio import read_nb
    from fastcore.xtras import working_directory

    nb, shell = read_nb(path), CaptureShell(path)
    with working_directory(path.parent): shell.run_all(nb, exc_stop=True)
    return {c.id: c.get("outputs", []) for c in nb.cells if c.cell_type == "code"}


def text_of(output) -> str | None:
    data = output.get("data", {})
    for kind in ("text/markdown", "text/html", "text/plain"):
        if kind in data: return ("".join(data[kind]), kind)
    return ("".join(output.get("text", "")), "text/plain")


def picture(svg: str, stamp: str) -> str:
    "An SVG file that is legible on a light and on a dark page."
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg"):], flags=re.S)
    svg = re.sub(r"\n\s*", " ", svg).replace("> <", "><")
    svg = svg.replace("#262626", "var(--ink)")
    return svg.replace("><", f"><!-- {stamp} -->{INK}<", 1)


def render() -> tuple[str, dict[Path, str], list[str]]:
    "The README, its pictures, and what is stale in the notebook's stored outputs."
    index, pages = read_pages()
    ran, parts, pictures, stale = fresh_outputs(index.path), [], {}, []
    recorded = sorted(p for p in (ROOT / "evidence").glob("*.json") if p.stem not in ("portable", "mutations", "playground"))
    evidence = b"".join(p.read_bytes() for p in recorded)
    for cell in index.cells:
        if "hide" in cell.directives: continue
        if cell.kind == "markdown":
            parts.append(cell.source.replace("<!-- course -->", course(pages)).replace("<!-- start -->", start(pages)))
            continue
        if cell.directives.get("echo") != "false" and "code-fold" not in cell.directives:
            parts.append(f"```python\n{cell.source}\n```")
        # what a run prints may differ: a finding of the doctor, or none
        outputs = [] if cell.directives.get("output") == "false" else shown_outputs(ran[cell.id])
        for i, o in enumerate(outputs):
            if svg := "".join(o.get("data", {}).get("image/svg+xml", "")):
                words = re.findall(r"\w+", cell.directives.get("fig-cap", cell.id).lower())
                name = IMAGES / f"{'-'.join(words[:6])}.svg"
                # a drawing may differ in the last digit between machines: compare what it is drawn from
                stamp = hashlib.sha256(cell.source.encode() + evidence).hexdigest()[:16]
                pictures[name] = picture(svg, stamp)
                alt = cell.directives.get("fig-cap", "").replace('"', "'")
                parts.append(f"![{alt}]({name.relative_to(ROOT).as_posix()})")
            else:
                text, kind = text_of(o)
                if kind != "text/html":  # what moves is not for GitHub
                    parts.append(text.strip() if kind == "text/markdown" else f"```\n{text.rstrip()}\n```")
                stored = cell.outputs[i] if i < len(cell.outputs) else {}
                if text_of(stored)[0].strip() != text.strip(): stale.append(f"the output stored in cell {cell.id} of nbs/index.ipynb")
    text = "<!-- Made from nbs/index.ipynb by docs/readme.py: edit the notebook, then run make save. -->\n\n" + "\n\n".join(parts) + "\n"
    # links are relative to nbs/ in the notebook and to the repository here
    relative = r"(\]\()(?!https?:|#|docs/images/|mailto:)([^)\s]+\))"
    text = re.sub(relative, lambda m: m[1] + (m[2][3:] if m[2].startswith("../") else "nbs/" + m[2]), text)
    return text, pictures, stale


def stamp_of(path: Path) -> str | None:
    found = re.search(r"<!-- (\w{16}) -->", path.read_text("utf-8")) if path.exists() else None
    return found and found[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    args = parser.parse_args()
    text, pictures, stale = render()
    readme = ROOT / "README.md"
    if args.check:
        if not readme.exists() or readme.read_text("utf-8") != text: stale.append("README.md")
        for path, svg in pictures.items():
            if stamp_of(path) != re.search(r"<!-- (\w{16}) -->", svg)[1]: stale.append(str(path.relative_to(ROOT)))
        if IMAGES.exists(): stale += [f"{p.relative_to(ROOT)} (not used)" for p in IMAGES.glob("*.svg") if p not in pictures]
        if stale: raise SystemExit(f"stale, run make save: {', '.join(stale)}")
        return
    readme.write_text(text, "utf-8")
    IMAGES.mkdir(exist_ok=True)
    for path in IMAGES.glob("*.svg"):
        if path not in pictures: path.unlink()
    for path, svg in pictures.items():
        if stamp_of(path) != re.search(r"<!-- (\w{16}) -->", svg)[1]: path.write_text(svg, "utf-8")


if __name__ == "__main__": main()
