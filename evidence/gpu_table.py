"What evidence/gpu.json says, in Markdown, for the site: all of it for How we know, a table for How fast. Reads older records too."

import json
from pathlib import Path

root = Path(__file__).parents[1]
FILE = root / "evidence/gpu.json"
EARLIER = root / "evidence/gpu_h100.json"  # what FILE has not measured again
PHASES = ("rollout", "annotate", "update")
NONE = "Measured on CPUs only so far. `make evidence ARGS=gpu` measures a GPU where there is one, and its figures then stand here."


def read(path: Path = FILE) -> dict | None:
    "None: nothing was measured. A rehearsal measures nothing. A record of before the parts is put into their form."
    figures = json.loads(path.read_text("utf-8")) if path.is_file() else None
    if figures is None or figures["rehearsal"]:
        return None
    if "models" not in figures:
        return figures
    models = figures["models"]
    return {
        "origin": figures["origin"],
        "sizes": figures["sizes"],
        "resume": {next(iter(models)): figures["resume"]},
        "recipes": {"quickstart": figures["quickstart"]},
        "speed": {
            name: {way: x for way, x in row.items() if way != "agreement"}
            for name, row in models.items()
        },
        "agreement": {name: row["agreement"] for name, row in models.items()},
    }


def measured(figures: dict) -> str:
    "The card and the day; an older record has the day of its commit."
    o = figures["origin"]
    return f"{o['gpu']} ({o['memory_gib']:.0f} GiB, CUDA {o['cuda']}, torch {o['torch']}), {o.get('measured') or o['committed']}, commit `{o['commit'][:7]}`"


def spread(x: dict, form: str = ",.0f") -> str:
    return f"{x['median']:{form}} ({x['least']:{form}} to {x['most']:{form}})"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def speed_table(figures: dict) -> str:
    "Tokens a second by phase, memory and, where it was watched, how long the GPU computes and how often Python waits for it."
    rows = [(name, way, x) for name, ways in figures["speed"].items() for way, x in ways.items()]
    head = [
        "model",
        "precision",
        "tokens a second: writing",
        "annotating",
        "updating",
        "most memory, GiB",
    ]
    body = [
        [
            name,
            way,
            *(f"{x['tokens_per_second'][p]:,.0f}" for p in PHASES),
            f"{max(x['peak_gib'].values(), default=0):.1f}",
        ]
        for name, way, x in rows
    ]
    if all(x.get("computing_seconds") for _, _, x in rows):
        head.append("the GPU computes")
        for line, (_, _, x) in zip(body, rows):
            line.append(f"{sum(x['computing_seconds'].values()) / sum(x['seconds'].values()):.0%}")
    if all(x.get("waits_per") for _, _, x in rows):
        head += ["waits per sampled token", "per optimizer step"]
        for line, (_, _, x) in zip(body, rows):
            line += [f"{n:.3g}" for n in x["waits_per"].values()]
    return table(head, body)


def large_table(figures: dict) -> str:
    rows = [
        [
            name,
            x["weights"],
            *(f"{x['seconds'][p]:.1f}" for p in PHASES),
            f"{max(x['peak_gib'].values(), default=0):.0f}",
            f"{x['estimated_gib']:.0f}",
            f"{x['utilisation']['update']:.0%} + {x['utilisation']['recomputed']:.0%}"
            if x["utilisation"]
            else "",
        ]
        for name, x in figures["large"].items()
    ]
    return table(
        [
            "model",
            "precision",
            "seconds: writing",
            "annotating",
            "updating",
            "most memory, GiB",
            "estimated",
            "of peak FLOP/s, + recomputed",
        ],
        rows,
    )


def against_bounds(figures: dict) -> str:
    "Measured over estimated: seconds over the roofline's, bytes over the ledger's."
    rows = [
        [
            name,
            way,
            *(f"{x['seconds'][p] / x['roofline_seconds'][p]:,.1f}" for p in PHASES),
            f"{max(x['peak_gib'].values(), default=0) / x['estimated_gib']:.2f}",
        ]
        for name, ways in figures["speed"].items()
        for way, x in ways.items()
        if x.get("roofline_seconds")
    ]
    return (
        table(
            [
                "model",
                "precision",
                "seconds over the bound: writing",
                "annotating",
                "updating",
                "memory over the estimate",
            ],
            rows,
        )
        if rows
        else ""
    )


def graphs(figures: dict) -> str:
    "For which models and precisions the sampler's step was a CUDA graph, and why not."
    seen = {
        f"{name}, {way}": x
        for name, ways in figures["speed"].items()
        for way, x in ways.items()
        if "graph" in x
    }
    if not seen:
        return ""
    without = {
        name: "; ".join(dict.fromkeys(x["profile"]["rollout"]["no_graph"]))
        for name, x in seen.items()
        if not x["graph"]
    }
    if not without:
        return "The sampler's step was a CUDA graph in all of them."
    return (
        "The sampler's step was no CUDA graph: "
        + "; ".join(name + f" ({why})" * bool(why) for name, why in without.items())
        + "."
    )


def steps_looked_at(figures: dict) -> str:
    "In how many families and precisions the sampler's step was compared, and how far it was off."
    rows = [row for ways in figures.get("graphs", {}).values() for row in ways.values()]
    if not rows:
        return ""
    told = [row for row in rows if row.get("warnings") or row.get("failed")]
    exact = [row["rows_off"] for row in rows if "rows_off" in row]
    most = max(row.get("mean_nats_off", 0.0) for row in rows)
    same = sum(1 for share in exact if share == 0)
    return (
        f"The sampler's step of {len(figures['graphs'])} small models was captured in {len(rows) - len(told)} of {len(rows)} "
        f"cases (float32, bfloat16, autocast, LoRA). In float32 the responses are the CPU's in {same} of {len(exact)} cases, "
        f"all rows, and its log-probabilities are at most {most:.3f} nats from those of a whole pass, on average over the tokens of a case."
    )


def compared(figures: dict) -> list[str]:
    text = []
    for name, x in figures.get("others", {}).items():
        if name.startswith("writers"):
            text.append(
                f"{name.removeprefix('writers, ')}, tokens a second of writing alone: "
                + ", ".join(f"`{way}` {s.get('failed') or spread(s)}" for way, s in x.items())
                + "."
            )
        elif "by hand" in x:
            text.append(
                f"{name.replace('GRPO by hand', 'An iteration of GRPO')}, seconds: "
                + ", ".join(f"{who} {spread(s, '.3g')}" for who, s in x.items())
                + "."
            )
        elif "trl" in x:
            text.append(
                f"{name.replace('GRPO by TRL', 'An iteration of GRPO')}, seconds: TRL {x['trl']} {spread(x, '.3g')}."
            )
        else:
            text.append(
                "Log-probabilities of 4,096 tokens under GPT-2's head with their gradient, milliseconds, by the size of a "
                f"[piece](reference/objective/logprobs_in_pieces.ipynb): {', '.join(f'{size} {ms:.0f}' for size, ms in x.items())}."
            )
    return text


def agreement_table(figures: dict) -> str:
    rows = [
        [
            name,
            dtype,
            *(
                f"{a['difference'][k]:.1e} ({a['bound'][k]:.1e})"
                for k in ("logprobs", "loss", "gradient")
            ),
        ]
        for name, row in figures["agreement"].items()
        for dtype, a in row.items()
    ]
    return table(["model", "weights", "log-probability", "loss", "gradient"], rows)


def checked(figures: dict) -> list[str]:
    "Agreement with the CPU, resumed runs, and recipes end to end."
    text = []
    if "agreement" in figures:
        text += [
            "Against the CPU's float64, largest difference of a log-probability, difference of the loss, relative difference of the "
            "gradient; in brackets the bound that rounding allows.",
            agreement_table(figures),
        ]
    for r in figures.get("resume", {}).values():
        same = (
            "to the bit"
            if r["difference"] == 0
            else f"to {r['difference']:.1e}, where two equal runs differ by {r['noise']:.1e}"
        )
        text.append(f"A resumed run ends where the undisturbed one does, {same}.")
    for name, q in figures.get("recipes", {}).items():
        change = [
            f"{k.replace('_', ' ')} {q['before'][k]:.2f} before, {x:.2f} after"
            for k, x in list(q["after"].items())[:3]
        ]
        text.append(f"`{name}` takes {q['wall_seconds']:.0f} seconds there: {'; '.join(change)}.")
    return text


def gpu_table(path: Path = FILE, earlier: Path | None = EARLIER) -> str:
    "For How we know."
    if (figures := read(path)) is None:
        return NONE
    text = [f"Measured on one {measured(figures)}."]
    if "speed" in figures:
        s = figures["sizes"]
        text += [
            f"A PPO iteration of {s['batch_size']} responses of {s['max_new_tokens']} tokens, random weights:",
            speed_table(figures),
            graphs(figures),
            against_bounds(figures),
        ]
    text.append(steps_looked_at(figures))
    text += compared(figures)
    if "large" in figures:
        s = figures["large_sizes"]
        text += [
            f"Llama 3's shapes with random weights, {s['batch_size']} responses of {s['max_new_tokens']} tokens:",
            large_table(figures),
        ]
    text += checked(figures)
    if figures.get("not_run"):
        text.append(
            "Not run: "
            + "; ".join(f"{name} ({why})" for name, why in figures["not_run"].items())
            + "."
        )
    before = read(earlier) if earlier is not None else None
    if before is not None:
        missing = {
            part: {
                name: x
                for name, x in before.get(part, {}).items()
                if name not in figures.get(part, {})
            }
            for part in ("agreement", "resume", "recipes")
        }
        rest = checked({part: rows for part, rows in missing.items() if rows})
        if rest:
            text += [f"Not measured again since one {measured(before)}:", *rest]
    return "\n\n".join(filter(None, text))


def gpu_speed(path: Path = FILE) -> str:
    "For How fast: nothing where nothing was measured."
    if (figures := read(path)) is None or "speed" not in figures:
        return ""
    return (
        f"On one {measured(figures)}: PPO with random weights, {figures['sizes']['batch_size']} responses of {figures['sizes']['max_new_tokens']} tokens.\n\n"
        f"{speed_table(figures)}\n\n[One GPU](guides/one_gpu.ipynb) says what bounds these figures and which settings move them; "
        "[How we know](../docs/know.md) has the rest of the record."
    )
