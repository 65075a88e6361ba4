"""The settings that verl and OpenRLHF have, read from their wheels: `python tests/compat/peer_keys.py VERL.whl OPENRLHF.whl`.

Writes tests/compat/peer_keys.json. verl's keys are those of its flattened configuration, without its profilers'; OpenRLHF's are the
arguments of its parser, read from the source without running it.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

import yaml

RECORD = Path(__file__).with_suffix(".json")
VERL_FILE = "verl/trainer/config/_generated_ppo_trainer.yaml"
OPENRLHF_FILE = "openrlhf/cli/train_ppo_ray.py"
PREFIXES = ("actor", "critic")  # what the parser's loop puts in front of a flag


def flat_keys(node: object, before: str = "") -> list[str]:
    "The dotted names of all leaves; an empty mapping is one, too."
    if not isinstance(node, dict) or not node:
        return [before]
    keys = []
    for name, below in node.items():
        keys += flat_keys(below, f"{before}.{name}" if before else str(name))
    return keys


def flags_in(source: str) -> list[str]:
    "The long names of all add_argument calls; f-strings once for each prefix."
    flags = []
    for call in ast.walk(ast.parse(source)):
        is_flag = isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        if not is_flag or not call.args:
            continue
        text = ast.unparse(call.args[0]).removeprefix("f")[1:-1]
        made = [text.replace("{prefix}", prefix) for prefix in PREFIXES]
        flags += [name.removeprefix("--") for name in dict.fromkeys(made)]
    return sorted(set(flags))


def read_member(wheel: str, ending: str) -> str:
    "The text of the file in a wheel whose path ends so."
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def version_of(wheel: str) -> str:
    "The version in a wheel's name."
    return re.match(r"[^-]+-([^-]+)-", Path(wheel).name)[1]


def write_record(verl: str, openrlhf: str) -> None:
    "Read both wheels."
    keys = flat_keys(yaml.safe_load(read_member(verl, VERL_FILE)))
    record = {
        "verl": {
            "version": version_of(verl),
            "file": VERL_FILE,
            "keys": [key for key in sorted(keys) if not re.search("profiler|_target_", key)],
        },
        "openrlhf": {
            "version": version_of(openrlhf),
            "file": OPENRLHF_FILE,
            "keys": flags_in(read_member(openrlhf, OPENRLHF_FILE)),
        },
    }
    RECORD.write_text(json.dumps(record, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    write_record(*sys.argv[1:])
