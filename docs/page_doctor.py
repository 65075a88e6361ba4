"""Examine a pasted log on a page: the package's own doctor, and what the page shows of its answer."""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instruct_goose.doctor.rules import Finding

PLACE = Path("pasted")  # a folder of the page's own Python, emptied for each log
RUN_FILES = ("config.json", "summary.json", "tokens.jsonl")  # what can stand beside metrics.jsonl


def examine_files(files: str) -> str:
    """Examine the texts of some files, as JSON by name; JSON of what the page shows.

    Of several files the one that is a log counts: metrics.jsonl with what stands beside it, or a
    single file of another library. Where none can be read, `refused` says why.
    """
    from instruct_goose.doctor.examination import examine, main_curves

    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    texts = json.loads(files)
    for name, text in texts.items():
        (PLACE / Path(name).name).write_text(text, "utf-8")
    names = sorted(os.listdir(PLACE))
    try:
        examined = examine(PLACE / chosen_file(names))
    except (OSError, ValueError) as error:
        return json.dumps({"refused": str(error).replace(f"{PLACE}/", "")})
    ignored = [name for name in names if not is_read(name, names)]
    said = examined._asdict()
    said["findings"] = [sentences(finding) for finding in examined.findings]
    said["steps"] = len(said.pop("metrics"))
    said["curves"] = main_curves(examined.metrics)
    said["ignored"] = ignored
    return json.dumps(said, ensure_ascii=False)


def sentences(finding: "Finding") -> dict[str, str]:
    "A finding in the words that the command prints."
    from instruct_goose.doctor.diagnosis import finding_text

    first, seen, cure, _ = finding_text(finding).split("\n")
    return {
        "name": finding.name,
        "severity": finding.severity,
        "what": first.partition(": ")[2],
        "evidence": seen.removeprefix("  seen   "),
        "cure": cure.removeprefix("  cure   "),
        "lesson": finding.lesson,
    }


def chosen_file(names: list[str]) -> str:
    'The file that is the log; "" is the folder, which then is a run\'s.'
    if "metrics.jsonl" in names:
        return ""
    if "trainer_state.json" in names:
        return "trainer_state.json"
    logs = [name for name in names if name not in RUN_FILES]
    if not logs:
        raise ValueError(f"{', '.join(names)} is no log: add metrics.jsonl")
    return logs[0]


def is_read(name: str, names: list[str]) -> bool:
    "Is a file the log, or one that belongs to it?"
    if "metrics.jsonl" in names:
        return name == "metrics.jsonl" or name in RUN_FILES
    return name == chosen_file(names)
