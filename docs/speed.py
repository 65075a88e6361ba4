"""The page "How fast", made from bench/results.json: a table, a picture of what is near its goal, and what each row is."""

import html
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.why import TRIED, WHY  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))
from gpu_table import gpu_speed  # noqa: E402

sys.path.pop(0)  # it has a playground.py, as docs/ has

RESULTS = Path(__file__).parents[1] / "bench/results.json"
TITLES = {
    "logprobs": "Log-probabilities from hidden states",
    "ppo": "An iteration of PPO",
    "grpo": "An iteration of GRPO",
    "sampling": "Sampling",
    "annotate": "One look at each token",
    "command": "Starting",
    "quickstart": "The quickstart",
    "trials": "What was tried",
}
BLUE, ORANGE = "#3b82f6", "#ea7a1a"


def number(x: float, digits: int = 3) -> str:
    return f"{float(f'{x:.{digits}g}'):,.10g}"


def outcome(row: dict) -> str:
    "met, or missed and by how much."
    if row.get("missed"):
        return "not measured: " + row["missed"]
    if row.get("error"):
        return "error: " + row["error"]
    if row["met"] is None:
        return ""
    return "met" if row["met"] else f"missed, at {reached(row):.0%} of it"


def value(row: dict) -> float | None:
    "What the goal is set for: the ratio, or ours where there is no peer."
    return row["ratio"] if row["ratio"] is not None else row["ours"] and row["ours"]["median"]


def reached(row: dict, x: float | None = None) -> float:
    "The share of the goal that is reached: 1 or more where it is met."
    sign, goal = row["goal"].split()
    x = value(row) if x is None else x
    return float(goal) / x if sign == "≤" else x / float(goal)


def named(unit: str) -> str:
    return {"CPU-seconds": "s"}.get(unit, unit)


def side(which: dict | None, unit: str) -> str:
    if not which:
        return ""
    return f"{which['label']}: {number(which['median'])} {named(unit)}"


def cells(row: dict) -> list[str]:
    found = (
        ""
        if value(row) is None
        else number(value(row)) + ("×" if row["ratio"] is not None else " " + named(row["unit"]))
    )
    spread = row["spread"] or (
        row["ours"] and not row["peer"] and [row["ours"]["min"], row["ours"]["max"]]
    )
    if found and spread:
        found += f" ({'–'.join(map(number, spread))})"
    name = row["name"] + (f"; {row['note']}" if row["note"] else "")
    goal = ": ".join(filter(None, [row["goal"], outcome(row)]))
    if row["limit"]:
        goal += f"; limit {number(row['limit']['ratio'])}×"
    return [
        name,
        f"{found} {row['of'] or ''}",
        side(row["ours"], row["unit"]),
        side(row["peer"], row["unit"]),
        goal,
    ]


def table(rows: list[dict]) -> str:
    head = ["| work | median (least–most) | ours | the other | goal |", "|---|---|---|---|---|"]
    return "\n".join(
        head + ["| " + " | ".join(c.replace("|", "/") for c in cells(r)) + " |" for r in rows]
    )


def reasons(mine: list[dict], rows: list[dict]) -> str:
    "Why rows of this group miss their goal; a figure is that of the row named after its @."
    figure = {r["name"]: f"{number(value(r))}×" for r in rows if value(r) is not None}
    names = "|".join(map(re.escape, sorted(figure, key=len, reverse=True)))

    def told(text):
        return re.sub(f"@({names})", lambda m: figure[m[1]], text) if names else text

    return "\n".join(
        f"- **{r['name']}**, missed. {told(WHY[r['name']])}"
        for r in mine
        if r["met"] is False and r["name"] in WHY
    )


def plot(rows: list[dict]) -> str:
    "How much of its goal each row has reached, on a logarithmic axis; the line through the repeats is the spread."
    rows = [r for r in rows if r["goal"] and value(r) is not None]
    if not rows:
        return ""
    left, width, step = 390, 300, 22
    spans = [[reached(r, x) for x in (r["spread"] or [value(r)] * 2)] for r in rows]
    low = min(min(s) for s in spans)
    high = max(1.5, *(max(s) for s in spans))
    low = min(low, 0.5)

    def at(share):
        return left + width * math.log(share / low) / math.log(high / low)

    height = step * len(rows) + 34
    made = [
        f'<line x1="{at(1):.1f}" x2="{at(1):.1f}" y1="4" y2="{height - 24}" stroke="currentColor" stroke-dasharray="3 3"/>'
    ]
    for share in (0.05, 0.1, 0.25, 0.5, 1, 2, 4):
        if low <= share <= high:
            made.append(
                f'<text x="{at(share):.1f}" y="{height - 8}" text-anchor="middle">{share:.0%}</text>'
            )
    for i, (row, span) in enumerate(zip(rows, spans)):
        y = step * i + 14
        colour = BLUE if row["met"] else ORANGE
        made.append(
            f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{html.escape(row["name"])}</text>'
        )
        made.append(
            f'<line x1="{at(min(span)):.1f}" x2="{at(max(span)):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        made.append(f'<circle cx="{at(reached(row)):.1f}" cy="{y}" r="4" fill="{colour}"/>')
    met = sum(bool(r["met"]) for r in rows)
    caption = f"How much of its goal each row reaches, with the spread of the repeats; blue where it is met, {met} of {len(rows)}, orange where not."
    svg = (
        f'<svg role="img" aria-label="{html.escape(caption)}" viewBox="0 0 {left + width + 20} {height}" style="max-width:{left + width + 20}px" '
        f'font-size="11.5" fill="currentColor" xmlns="http://www.w3.org/2000/svg">{"".join(made)}</svg>'
    )
    return f'<figure class="plot">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'


def one(rows: list[dict], key: str) -> list[str]:
    return sorted({r[key] for r in rows if r[key]})


def packages(rows: list[dict]) -> str:
    found = sorted(
        {
            (name, number)
            for r in rows
            for side in (r["versions"] or {}).values()
            for name, number in side.items()
        }
    )
    return ", ".join(f"{name} {number}" for name, number in found)


def speed_page() -> str:
    "Markdown."
    text = [
        "# How fast",
        "```{rst-class} subtitle\n```\n\nOurs and other libraries on the same work, side by side, and what is left to win\n",
    ]
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else []
    if not rows:
        return "\n\n".join([*text, "Nothing is measured yet: `make bench` does."]) + "\n"
    commits = ", ".join(f"`{c[:7]}{'+' if c.endswith('+') else ''}`" for c in one(rows, "commit"))
    text += [
        f"Measured on {' and '.join(one(rows, 'processor'))} at {commits}, with {packages(rows)}. One thread, float32, the same weights, "
        "tokens and epochs on both sides, each side in a process of its own. Before anything is timed the sides must have computed the same "
        "numbers: log-probabilities and gradients, the losses of a whole iteration and how far it moved the weights, the likeliest tokens. "
        "Then they take turns. Times are CPU-seconds of the process, which neighbours on a busy machine disturb least; memory is the "
        "highest point of a fresh process less what it held before.",
        "Each turn gives a ratio: shown is the median, in brackets the least and the most. A side's seconds are the median of its own turns, so "
        "their quotient is not quite the ratio. “ours / peer” is better when small, “peer / ours” when large. The limit is the same ratio for a side that does only what nobody can leave out.",
        plot(rows),
    ]
    groups = [g for g in TITLES if any(r["case"].split()[0] == g for r in rows)]
    for group in groups:
        mine = [r for r in rows if r["case"].split()[0] == group]
        why = sorted(
            {
                f"{number(r['limit']['ratio'])}×: {r['limit']['why']}"
                for r in mine
                if r["limit"] and r["limit"]["why"]
            }
        )
        text += [
            f"## {TITLES[group]}",
            *([TRIED] if group == "trials" else []),
            table(mine),
            *([f"Limits: {'; '.join(why)}."] if why else []),
            *filter(None, [reasons(mine, rows)]),
        ]
    if on_gpu := gpu_speed():
        text += ["## On one GPU", on_gpu]
    text.append(
        "torchtune 0.6.1 is no side here. Its PPO is a recipe around models, checkpoints and a generation of its own, so the same weights "
        "would have to be translated before the same work could be asked of both; and the functions it offers, losses and what they need, are "
        "a few operations on a table of tokens, which `make parity` compares number by number."
    )
    text.append(
        '`make bench` measures all of it again, `make bench ARGS="grpo --repeats 9"` a part; the loop by hand is `bench/by_hand.py`.'
    )
    return "\n\n".join(text) + "\n"
