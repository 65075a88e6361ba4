"""Tables of the doctor, made from the records: bugs and tools, healthy runs and findings, libraries and rules."""

import json
from collections import Counter
from functools import cache

from lessons import ROOT

TOOLS = ("doctor", "probes")


@cache
def record(name: str) -> dict:
    return json.loads((ROOT / f"evidence/{name}.json").read_text("utf-8"))


def table(head: list[str], rows: list[list[str]]) -> str:
    "Rows as Markdown."
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def counted(n: int, total: int) -> str:
    return f"{n} of {total}"


# --- bugs × tools ---------------------------------------------------------------------------------
def probes_saw(bug: dict) -> str:
    "What the probes in the run's own settings said of a bug."
    probes = bug["probes"]
    if probes is None:
        return "–"
    return ", ".join(probes) if probes else "nothing"


def bugs_by_tools() -> str:
    "Each bug, what the doctor found in its log, and which probes failed."
    rows = []
    for name, bug in record("doctor_bugs")["bugs"].items():
        found = ", ".join(sorted(set().union(*bug["found"]))) or "nothing"
        rows.append([name, bug["wrong"], found, ", ".join(bug["verdicts"]), probes_saw(bug)])
    return table(["bug", "what is wrong", "findings", "verdict", "probes that fail"], rows)


def fresh_bugs() -> str:
    "Each bug that was invented when the rules were fixed, with what was said of it in two seeds."
    rows = []
    for name, bug in record("doctor_fresh")["bugs"].items():
        without = set().union(*bug["without"])
        found = ", ".join(sorted(set().union(*bug["found"]) - without)) or "nothing"
        marked = ", ".join(bug["unforeseen"])
        rows.append(
            [name, bug["wrong"], found, marked, ", ".join(bug["verdicts"]), fresh_probe(bug)]
        )
    head = ["bug", "what is wrong", "findings", "not foreseen", "verdict", "first probe that fails"]
    return table(head, rows)


def fresh_probe(bug: dict) -> str:
    "The first probe that fails, where the probes were asked."
    if bug["probes"] == "not asked":
        return "–"
    return bug["probes"] or "none"


def fresh_counts() -> str:
    "How many of these bugs the doctor names and sees, and how many are seen by doctor or probes."
    bugs = list(record("doctor_fresh")["bugs"].values())
    sentences = []
    for seed in range(len(bugs[0]["verdicts"])):
        verdicts = Counter(bug["verdicts"][seed] for bug in bugs)
        sentences.append(
            f"With seed {seed} the doctor names {counted(verdicts['named'], len(bugs))} bugs, sees "
            f"{verdicts['seen']} more by a true finding, says something false of "
            f"{verdicts['false']} and nothing of {verdicts['missed']}."
        )
    asked = [bug for bug in bugs if bug["probes"] != "not asked"]
    failed = sum(bug["probes"] is not None for bug in asked)
    sentences.append(
        f"The probes were asked of {len(asked)} bugs of which it says nothing with seed 0; they fail "
        f"on {failed}."
    )
    return " ".join(sentences)


def seen_by_either() -> str:
    "How many bugs the doctor names, and how many the doctor or the probes see."
    bugs = list(record("doctor_bugs")["bugs"].values())
    named = sum(bug["verdicts"][0] == "named" for bug in bugs)
    by_doctor = sum(bug["verdicts"][0] in ("named", "seen") for bug in bugs)
    asked = [bug for bug in bugs if bug["probes"] is not None]
    by_probes = sum(bool(bug["probes"]) for bug in asked)
    by_either = sum(bug["verdicts"][0] in ("named", "seen") or bool(bug["probes"]) for bug in bugs)
    text = (
        f"The doctor names {counted(named, len(bugs))} bugs and sees {by_doctor} by a finding that "
        "is true."
    )
    if asked:
        text += (
            f" The probes, in the run's own settings, fail on {counted(by_probes, len(asked))}. "
            f"The doctor or the probes see {counted(by_either, len(bugs))}."
        )
    return text


# --- healthy runs × findings ----------------------------------------------------------------------
def healthy_by_findings() -> str:
    "Each finding of healthy runs: how often, and how often it was true of the run."
    runs = record("doctor_healthy")["runs"]
    seen: Counter = Counter()
    true: Counter = Counter()
    severity = {}
    for run in runs:
        for finding in run["findings"]:
            seen[finding["name"]] += 1
            true[finding["name"]] += finding["true"]
            severity[finding["name"]] = finding["severity"]
    rows = []
    for name, n in seen.most_common():
        rows.append([name, severity[name], n, true[name], n - true[name]])
    silent = sum(not run["findings"] for run in runs)
    rows.append(["no finding", "", silent, "", ""])
    return table(["finding", "severity", "runs", "true of the run", "not true"], rows)


# --- libraries × rules ----------------------------------------------------------------------------
LIBRARY_LOGS = ROOT / "tests/doctor/library_logs"
MADE_BY = {  # whose program has written the logs that a library's table is tested with
    "verl": (("verl_",), "verl's own functions and loggers, called by a loop of ours on a CPU"),
    "TRL (GRPO, RLOO)": (("trl_grpo", "trl_rloo"), "TRL's trainers"),
    "TRL (PPO)": (("trl_ppo",), "TRL's trainer"),
    "torchtune (PPO, GRPO)": (
        ("torchtune_",),
        "torchtune's PPO recipe; GRPO is read from its source",
    ),
    "OpenRLHF": ((), "nobody: it needs a GPU's packages, the names are read from its source"),
    "TRL and transformers (SFT, DPO, reward model)": (
        ("trl_dpo", "trl_sft", "trl_reward"),
        "TRL's trainers",
    ),
}


def libraries_by_rules() -> str:
    "Which rules the numbers of each library allow, if it logs all that is read."
    from instruct_goose.doctor.diagnosis import RULES
    from instruct_goose.doctor.libraries import LIBRARIES, can_be_asked

    logged = {library.name: {column.ours for column in library.columns} for library in LIBRARIES}
    rows = []
    for rule in RULES:
        cells = ["yes" if can_be_asked(rule, ours) else "–" for ours in logged.values()]
        if "yes" in cells:
            rows.append([rule.name, *cells])
    totals = [sum(row[i] == "yes" for row in rows) for i in range(1, len(logged) + 1)]
    rows.append([f"of {len(RULES)} rules", *totals])
    return table(["rule", *logged], rows)


def library_verdicts() -> dict[str, tuple[dict, list[str]]]:
    "Each log that a library has made: what is known of its run, and what the doctor finds."
    from instruct_goose.doctor.libraries import diagnose_log, read_log

    expected = json.loads((LIBRARY_LOGS / "expected.json").read_text("utf-8"))
    verdicts = {}
    for name, known in expected.items():
        found = [finding.name for finding in diagnose_log(read_log(LIBRARY_LOGS / name))]
        verdicts[name] = (known, found)
    return verdicts


def libraries_by_logs() -> str:
    "By whom the logs of each library were made, and what the doctor says of them."
    verdicts = library_verdicts()
    rows = []
    for library, (prefixes, maker) in MADE_BY.items():
        of_library = [both for name, both in verdicts.items() if name.startswith(prefixes)]
        healthy = [found for known, found in of_library if not known["wrong"]]
        said = Counter(verdict_on(found, known) for known, found in of_library if known["wrong"])
        silent = sum(not found for found in healthy)
        counts = [said[verdict] for verdict in ("named", "seen", "false", "missed")]
        rows.append([library, maker, len(healthy), len(healthy) - silent, said.total(), *counts])
    head = ["library", "logs made by", "healthy", "with a finding", "bugs", "named", "only seen"]
    return table([*head, "named falsely", "silent"], rows)


def bugs_by_logs() -> str:
    "Each bug in a log that a library has made, and what the doctor says of it."
    rows = []
    for name, (known, found) in library_verdicts().items():
        if known["wrong"]:
            log = name.rpartition(".")[0].replace("_", " ")
            said = ", ".join(found) or "nothing"
            rows.append([log, known["wrong"], said, verdict_on(found, known)])
    return table(["log", "what is wrong", "findings", "verdict"], rows)


# --- how often it was right -----------------------------------------------------------------------
def confusion() -> str:
    "What was true of a run, against what the doctor said of it."
    verdicts = Counter(
        verdict for bug in record("doctor_bugs")["bugs"].values() for verdict in bug["verdicts"]
    )
    fresh = Counter(
        verdict for bug in record("doctor_fresh")["bugs"].values() for verdict in bug["verdicts"]
    )
    unseen: Counter = Counter()
    for bug in record("doctor_unseen")["bugs"].values():
        for found in bug["found"]:
            unseen[verdict_on(found, bug)] += 1
    healthy = record("doctor_healthy")["runs"]
    untrue = sum(any(not f["true"] for f in run["findings"]) for run in healthy)
    silent = sum(not run["findings"] for run in healthy)
    rows = [
        ["bugs that were invented when the rules were fixed", *of_verdicts(fresh)],
        ["bugs of the kinds that the rules were written for", *of_verdicts(verdicts)],
        ["other bugs that the rules were not made for", *of_verdicts(unseen)],
        ["no bug", len(healthy), "–", len(healthy) - silent - untrue, untrue, silent],
    ]
    head = ["the run has", "runs", "named", "only true findings", "a false finding", "silent"]
    return table(head, rows)


def verdict_on(found: list[str], bug: dict) -> str:
    "Named, seen by a consequence, named falsely, or missed; a false name spoils a right one."
    if set(found) - {*bug["names"], *bug["consequences"]}:
        return "false"
    if set(found) & {*bug["names"]}:
        return "named"
    return "seen" if found else "missed"


def of_verdicts(verdicts: Counter) -> list[int]:
    return [verdicts.total(), *(verdicts[name] for name in ("named", "seen", "false", "missed"))]


# --- logs of others -------------------------------------------------------------------------------
def public_logs() -> str:
    "Logs from public issues and repositories: what was found, and whether it is true."
    logs = record("doctor_public")["logs"]
    rows = []
    for log in logs:
        where = f"[{log['title']}]({log['source']})"
        found = ", ".join(log["found"]) or "nothing"
        rows.append([where, log["library"], log["steps"], found, log["true"], log["why"]])
    head = ["log", "library", "steps", "findings", "true?", "by what"]
    return table(head, rows)
