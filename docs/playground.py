"""Build the playground, a page that trains a language model: docs/playground/*.js → one script that needs no server and no network.

    python docs/playground.py DIR      a page of its own, DIR/playground.html; Python for its editor in DIR/_static
    python docs/playground.py --start  train the model that every run begins with, and write docs/playground/start.json

Browsers load neither modules nor workers from a file. So the modules are joined into two classic scripts, and the page makes its worker from a string.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

import page_loss
from page_cells import lesson_path

HERE = Path(__file__).parent / "playground"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)"\n', re.M)


def bundle(name: str, seen: list[str] | None = None) -> str:
    "A module after all that it imports, each once, as one classic script."
    seen = [] if seen is None else seen
    if name in seen:
        return ""
    seen.append(name)
    source = (HERE / name).read_text("utf-8")
    before = "".join(bundle(other, seen) for other in IMPORT.findall(source))
    return before + re.sub(r"^export ", "", IMPORT.sub("", source), flags=re.M)


def plugin_text() -> str:
    "The plug-in that lesson 24 invents: the cell whose docstring names the flag."
    for cell in json.loads(lesson_path(24).read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith('"A surrogate of my own: instruct-goose train --plugin'):
            return source.rstrip("\n") + "\n"
    raise SystemExit("docs/playground.py: lesson 24 has no plug-in for the editor")


def editor_sources() -> dict:
    "What the editor of the loss shows at first, by part, and the module that each part is of."
    texts = page_loss.exported_texts() | {page_loss.PLUGIN: plugin_text()}
    modules = {part: f"instruct_goose.{module}" for part, (module, _) in page_loss.PARTS.items()}
    return {"exported": texts, "modules": modules, "plugin": page_loss.PLUGIN}


def prepared_edits() -> list[dict]:
    return json.loads((HERE / "edits.json").read_text("utf-8"))


def measured_edits() -> dict:
    "What the prepared edits do, as a table: median, least and most of all seeds."
    record = json.loads((HERE.parents[1] / "evidence/playground_edits.json").read_text("utf-8"))
    columns = {"human score": ("human_score", 1), "grammatical, %": ("grammatical", 100)}
    columns["KL, nats"] = ("kl", 1)
    says = {edit["name"]: (edit["title"], edit["says"]) for edit in prepared_edits()}
    says = {"exported": ("As it is exported", "The loss of the library.")} | says
    rows = []
    for name, (title, sentence) in says.items():
        cells = []
        for figure, factor in columns.values():
            numbers = [factor * one[figure] for one in record["edits"][name]]
            digits = 0 if factor == 100 else 2
            middle, least, most = (
                f"{f(numbers):.{digits}f}" for f in (statistics.median, min, max)
            )
            cells.append(f"{middle} ({least} to {most})")
        rows.append([title, sentence, *cells])
    note = (
        f"After {record['iterations']} iterations of PPO with the default settings: median of "
        f"{len(record['seeds'])} seeds, in brackets the least and the most. Measured in Node "
        f"with this page's code, commit {record['origin']['commit'][:9]}."
    )
    return {"head": ["Loss", *columns, "What it does"], "rows": rows, "note": note}


def script(has_python: bool) -> str:
    "The page's whole script: the data, the worker as a string, and the page."
    data = {
        "HAS_PYTHON": has_python,
        "START": json.loads((HERE / "start.json").read_text("utf-8")),
        "SOURCES": editor_sources(),
        "EDITS": prepared_edits(),
        "MEASURED": measured_edits(),
        "WORKER": '"use strict";\n' + bundle("worker.js"),
    }
    constants = "\n".join(
        f"const {name} = {json.dumps(x, ensure_ascii=False, separators=(',', ':'))}"
        for name, x in data.items()
    )
    text = f'(() => {{\n"use strict";\n{constants}\n{bundle("page.js")}\n}})()\n'
    return text.replace("</", "<\\/")


def body() -> str:
    return (HERE / "page.html").read_text("utf-8")


def style() -> str:
    return (HERE / "page.css").read_text("utf-8")


def page_of_site(static: Path, has_python: bool) -> str:
    "The page within the site, as Markdown; its script and its style go to the folder `static`."
    static.mkdir(parents=True, exist_ok=True)
    (static / "playground.js").write_text(script(has_python), "utf-8")
    (static / "playground.css").write_text(style(), "utf-8")
    return (
        "---\norphan: true\nhide-toc: true\n---\n\n# Playground\n\n```{rst-class} subtitle\n```\n\n"
        "PPO trains a small language model here, in your browser, while you change its settings\n\n"
        f'<link rel="stylesheet" href="_static/playground.css">\n\n{body()}\n\n<script src="_static/playground.js" defer></script>\n'
    )


def frame(experiment: str | None = None, up: str = "", loss: str | None = None) -> str:
    """The playground folded up in another page, loaded when the reader opens it.

    `up` leads from that page to the site's root; with `loss`, a part of the editor, it is open.
    """
    asked = "embed=1" + (f"&amp;experiment={experiment}" if experiment else "")
    if loss is not None:
        asked += f"&amp;loss={loss.replace(' ', '%20')}"
    words = "Train the model here" if loss is None else "Train with your loss here"
    return (
        f'<details class="playground-frame" ontoggle="const frame = this.querySelector(\'iframe\'); frame.src ||= frame.dataset.src"><summary>{words}</summary>'
        f'<iframe data-src="{up}playground.html?{asked}" title="Playground: PPO trains a language model" style="width: 100%; height: 60rem; border: 0"></iframe></details>'
    )


def page(has_python: bool = True) -> str:
    "The same as one file of HTML: for a frame in Jupyter, or to send by mail."
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Playground: PPO trains a language model in this page</title>\n<style>\n{style()}</style>\n"
        f'<body class="alone">\n<main>\n<h1>Playground</h1>\n{body()}\n</main>\n<script>\n{script(has_python)}</script>\n</body>\n</html>\n'
    )


def write_static(folder: Path) -> bool:
    "Write what the editor of the loss loads; False where Pyodide cannot be had."
    import exercises
    import page_build

    page_build.write_files(folder / "page_files.js")
    return exercises.write_python(folder / "python.js", HERE.parent / "_build")


def train_start():
    "SFT and the reward model, by the library: half a minute."
    import torch

    from instruct_goose.tasks.playground import train_language_model, train_reward, write_start

    torch.set_num_threads(1)
    write_start(HERE / "start.json", train_language_model(), train_reward())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where playground.html goes")
    parser.add_argument("--start", action="store_true", help="train start.json anew")
    args = parser.parse_args()
    if args.start:
        train_start()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        has_python = write_static(args.folder / "_static")
        (args.folder / "playground.html").write_text(page(has_python), "utf-8")
        print(args.folder / "playground.html")


if __name__ == "__main__":
    main()
