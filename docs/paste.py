"""The page *Paste your log*: the doctor on a log that stays in the tab."""

import html
import json

from doctor_tables import confusion, public_logs
from lessons import ROOT, Page

LOGS = ROOT / "tests/doctor/library_logs"
EXAMPLES = {  # its button: the log
    "a GRPO run of TRL that learns nothing": LOGS / "trl_grpo_all_right.json",
    "a healthy one": LOGS / "trl_grpo_with_kl.json",
}


def lessons(pages: list[Page]) -> dict[str, dict]:
    "The page of each lesson that a rule can name, by the lesson's path below nbs/."
    found = {}
    for page in pages:
        path = page.path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        found[path] = {"url": f"{page.url}.html", "title": page.title}
    return found


def body(pages: list[Page]) -> str:
    "The box, its buttons, and the place of the answer, on one line each."
    examples = {name: path.read_text("utf-8") for name, path in EXAMPLES.items()}
    data = json.dumps({"lessons": lessons(pages), "examples": examples}, ensure_ascii=False)
    buttons = "".join(
        f'<button type="button" data-example="{html.escape(name)}">Try {html.escape(name)}</button>'
        for name in EXAMPLES
    )
    return (
        '<div class="paste" hidden>'
        '<label for="paste-text">The log: lines of a console, JSON lines, trainer_state.json, or a CSV file</label>'
        '<textarea id="paste-text" class="paste-text" spellcheck="false" autocapitalize="off"></textarea>'
        '<div class="paste-keys"><button type="button" class="paste-run">Examine</button>'
        '<button type="button" class="paste-choose">Choose files</button>'
        f"{buttons}"
        '<button type="button" class="paste-stop" disabled>Stop</button>'
        '<button type="button" class="paste-clear">Clear</button></div>'
        '<input type="file" class="paste-files" multiple hidden aria-label="Files of the log">'
        '<p class="paste-chosen"></p><p class="state" role="status"></p><div class="paste-answer"></div>'
        f'<script type="application/json" class="paste-data">{data.replace("</", "<" + chr(92) + "/")}</script>'
        "</div>"
    ).replace("\n", " ")


WITHOUT_PYTHON = (
    "This build of the site has no Python for the browser. Ask the command instead: "
    "`instruct-goose doctor FILE`."
)


def paste_page(pages: list[Page], has_python: bool) -> str:
    "Markdown; links are those of a notebook in nbs/."
    here = body(pages) if has_python else WITHOUT_PYTHON
    return "\n\n".join(
        [
            "---\nhide-toc: true\n---\n\n# Paste your log",
            "```{rst-class} subtitle\n```\n\nThe doctor reads a log of TRL, verl, OpenRLHF, torchtune or of this library, in this tab\n",
            "Paste what your training has printed, and press *Examine*. The page names what looks wrong, what was seen, and what to do. "
            "Nothing leaves the tab: the page asks for no other address, and it works without a network. "
            "The rules and the sentences are those of `instruct-goose doctor FILE` ([the doctor](guides/doctor.ipynb)).",
            '<link rel="stylesheet" href="_static/paste.css">\n\n' + here,
            "## What can be read",
            "- TRL and what builds on it (open-r1, ms-swift, Unsloth): `trainer_state.json` of a checkpoint, or the dictionaries that the console prints.\n"
            "- verl: the console's lines, which begin with `step:`, or its JSON lines. OpenRLHF and torchtune: their lines or JSON lines.\n"
            "- A CSV file of Weights & Biases, with the metrics' names in its header.\n"
            "- This library: the lines of `metrics.jsonl`. Choose `config.json`, `summary.json` and `tokens.jsonl` of the run with it, and more rules can be asked.\n\n"
            "Lines without numbers are left out. [Logs of other libraries](reference/doctor/libraries.ipynb) has every name that is read, with its unit, by version.",
            "## How often it is right",
            "The runs of this table are of this library, with recorded tokens, so that all rules could be asked. *Named*: a finding is the bug. "
            "*Only true findings*: what was said is true of the run, and follows from the bug, or from a setting. "
            "The bugs were written by those who wrote the rules: expect fewer hits on yours.",
            confusion(),
            "A log of another library has fewer numbers, and most rules cannot be asked of it: the answer above says which, and "
            "[How we know](../docs/know.md#libraries-and-rules) has the table. *Nothing looks wrong* is no proof.",
            "## Logs of others",
            "Logs from public issues and repositories, and whether what the doctor said is true by the thread or the repository:",
            public_logs(),
            '<script src="_static/paste.js" defer></script>' if has_python else "",
        ]
    )
