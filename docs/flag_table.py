"""Write instruct_goose/cli/flags.json, every command's flags, from the classes of settings: `python docs/flag_table.py`; --check only compares."""

import argparse
import inspect
import json
import types
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro._docstrings import get_field_docstring  # what the parser itself would show

from instruct_goose.cli.main import COMMANDS, flag_type
from instruct_goose.config import FOREIGN_NAMES
from instruct_goose.data.shapes import shapes_help
from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes.inputs import NAMES_OF_RUNS, name_in_run

FILE = Path(__file__).parents[1] / "instruct_goose/cli/flags.json"
NAMES = {int: "int", float: "float", str: "str", bool: "bool", Path: "path"}


def type_of(hint: Any) -> dict[str, Any]:
    "A type as `instruct_goose.cli.main.stored_flag` reads it."
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        is_positional = any("Positional" in repr(mark) for mark in marks)
        return type_of(kind) | ({"positional": True} if is_positional else {})
    if get_origin(hint) in (Union, types.UnionType):
        [kind] = [part for part in get_args(hint) if part is not type(None)]
        return type_of(kind) | {"or_none": True}
    if get_origin(hint) is tuple:
        return type_of(get_args(hint)[0]) | {"many": True}
    if get_origin(hint) is Literal:
        return {"type": "choices", "choices": list(get_args(hint))}
    if hint == dict[str, float]:
        return {"type": "numbers"}
    return {"type": NAMES[hint]}


def flag_of(name: str, hint: Any, default: Any, about: str | None) -> dict[str, Any]:
    "A flag of the table."
    flag = {"name": name} | type_of(flag_type(hint))
    if default is not MISSING:
        flag["default"] = str(default) if isinstance(default, Path) else default
    if about is not None:
        flag["help"] = about
    return flag


def flags_of(kind: type) -> list[dict[str, Any]]:
    "The flags of a class of settings: --config and --algorithm first, then one for each setting."
    flags = []
    if hasattr(kind, "read"):
        about = "a YAML file of these settings; a flag wins over it"
        flags.append(flag_of("config", Path | None, None, about))
    if hasattr(kind, "preset"):
        about = "sets the defaults of the flags below to its own"
        flags.append(flag_of("algorithm", Literal[tuple(PRESETS)], "ppo", about))
    hints = get_type_hints(kind, include_extras=True)
    for setting in fields(kind):
        if setting.name in getattr(kind, "NOT_TAKEN", ()):
            continue
        about = get_field_docstring(kind, setting.name, ())
        flags.append(flag_of(setting.name, hints[setting.name], setting.default, about))
    return flags


def about_rows(kind: type) -> str:
    "What a command does, and which rows it reads."
    about = inspect.getdoc(kind)
    stage = getattr(kind, "stage", "")
    return f"{about}\n\n{shapes_help(stage)}" if stage else about


def foreign_to(known: list[str]) -> dict[str, str]:
    "What other libraries call settings, and what a command with these settings calls them."
    names = {*FOREIGN_NAMES, *NAMES_OF_RUNS} - {*known}
    return {name: name_in_run(name, known) for name in sorted(names)}


def table() -> dict[str, Any]:
    "All that the parser needs to know."
    commands = {}
    for name, command in COMMANDS.items():
        kind, _ = command.load()
        flags = flags_of(kind)
        known = [flag["name"] for flag in flags]
        commands[name] = {"about": about_rows(kind), "flags": flags, "foreign": foreign_to(known)}
        if getattr(kind, "NOT_TAKEN", None):
            commands[name]["not_taken"] = kind.NOT_TAKEN
    return {"commands": commands, "presets": PRESETS}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is stale")
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    if not parser.parse_args().check:
        FILE.write_text(text, "utf-8")
    elif not FILE.exists() or FILE.read_text("utf-8") != text:
        raise SystemExit("stale, run make save: instruct_goose/cli/flags.json")


if __name__ == "__main__":
    main()
