"""The page "Reports of real runs", and the reports that it opens: made by today's `run_report` from the runs kept in evidence/reports."""

import html
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "evidence/reports"
RUNS = {  # directory: title, what it is, the figures to say first
    "quickstart": (
        "The quickstart",
        "A small GPT-2 learns to write film reviews from sentences of a grammar, a reward model learns from comparisons what "
        "people like, and PPO makes the better reviews likelier ([the lesson](learn/03_quickstart.ipynb)). People's ratings "
        "(`human_score`) and the grammar are asked afterwards: no training has seen them.",
        ("human_score", "reward_model_score", "grammatical", "kl_to_reference"),
    ),
    "smollm-sentiment": (
        "SmolLM2 learns to like films",
        "Adapters in the last blocks of SmolLM2-135M-Instruct learn to go on with “The movie was” "
        "more cheerfully; the reward is VADER's rules ([the lesson](guides/smollm_sentiment.ipynb)). `perplexity_untouched` "
        "says how surprised the untouched model is by what is written.",
        ("compound", "distinct_2", "kl_to_reference", "perplexity_untouched"),
    ),
}


def kept(name: str) -> dict:
    "Summary, settings and origin of a run that is kept, and how many iterations its log has."

    def read(path):
        return json.loads(path.read_text("utf-8"))

    return {
        "summary": read(KEPT / name / "summary.json"),
        "config": read(KEPT / name / "config.json"),
        **read(KEPT / f"{name}.json"),
        "iterations": len((KEPT / name / "metrics.jsonl").read_text("utf-8").splitlines()),
    }


def figures(summary: dict, names: tuple[str, ...]) -> str:
    "Before, the baselines and after, a row each."
    rows = {
        "before": summary["before"],
        **(summary.get("baselines") or {}),
        "after": summary["after"],
    }

    def number(x):
        return "–" if x is None else f"{x:.3g}".replace("-", "−")

    body = [
        f"| {which.replace('_', ' ')} | {' | '.join(number(row.get(n)) for n in names)} |"
        for which, row in rows.items()
    ]
    return "\n".join(
        [
            f"| | {' | '.join(n.replace('_', ' ') for n in names)} |",
            "|---" + "|---:" * len(names) + "|",
            *body,
        ]
    )


def said(name: str) -> str:
    "What was run, where, and how long it took."
    run = kept(name)
    o, s, c = run["origin"], run["summary"], run["config"]
    threads = f"{s['torch_threads']} thread{'s' * (s['torch_threads'] > 1)}"
    return (
        f"`{run['command']}`: {c['algorithm'].upper()}, {run['iterations']} iterations of {c['batch_size']} responses. "
        f"{s['cpu_seconds']:.0f} CPU-seconds on {threads} of {o['processor'].replace('(R)', '')}{run.get('beside', '')}, with torch {o['torch']}, "
        f"transformers {o['transformers']} and Python {o['python']}, at commit `{o['commit'][:7]}` of {o['committed']}."
    )


def reports_page() -> str:
    "Markdown."
    text = [
        "# Reports of real runs",
        "```{rst-class} subtitle\n```\n\nRecorded runs, as `instruct-goose report` shows them\n",
        "Every run leaves a directory, and `instruct-goose report` makes of it one page that needs no network: figures, curves, samples, the doctor's "
        "findings, all settings, and a microscope that shows what the update did to which token ([the lesson](reference/doctor/report.ipynb)). "
        "These are the pages of runs with seed 0, as anybody gets them. The runs are kept in `evidence/reports`; the pages are made by the "
        "code that this site is built from.",
    ]
    for name in RUNS:
        title, about, names = RUNS[name]
        links = [
            (f"reports/{name}.html", "open the report"),
            (f"reports/{name}.html#part-microscope", "its microscope"),
            (f"reports/{name}.html#part-samples", "its samples"),
        ]
        buttons = "".join(
            f'<a href="{html.escape(url)}">{label[0].upper()}{label[1:]}</a>'
            for url, label in links
        )
        text += [
            f"## {title}",
            about,
            said(name),
            figures(kept(name)["summary"], names),
            f'<p class="start">{buttons}</p>',
        ]
    text.append(
        "`make evidence ARGS=reports` makes them again. `instruct-goose compare` lays several runs over each other on such a page, seeds as a band."
    )
    return "\n\n".join(text) + "\n"


def write_reports(folder: Path) -> None:
    "The reports, as `instruct-goose report` writes them, with a way back to the site."
    from instruct_goose.doctor.report import ReportConfig, run_report

    folder.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        path = run_report(ReportConfig(KEPT / name, out=folder / f"{name}.html"))
        path.write_text(
            path.read_text("utf-8").replace(
                "<nav>", '<nav><a href="../reports.html">Reports of real runs</a>', 1
            ),
            "utf-8",
        )
