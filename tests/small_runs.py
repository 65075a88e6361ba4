"""Small healthy runs, each trained once, and changes of what they recorded."""

import copy
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "evidence"))
from doctor_unseen import USUAL, a_run

from instruct_goose.config import RLHFConfig

healthy = {}


def run(**settings):
    "A healthy run, once for each settings."
    key = str(settings)
    if key not in healthy:
        healthy[key] = a_run(
            USUAL
            | dict(steps=8, max_new_tokens=6, ent_coef=0.02, whiten_advantages=False)
            | settings
        )
    log, config, tokens = healthy[key]
    return log, config, copy.deepcopy(tokens)


def each(change):
    "A change of every recorded response."

    def changed(tokens):
        for i, rows in tokens.items():
            for k, r in enumerate(rows):
                change(r, i, k)

    return changed


def settings_of(**settings):
    "What a run says of its settings."
    return asdict(RLHFConfig(**{"lr": 1e-3, "beta": 0.5} | settings))


def rows_of(**columns):
    "One dictionary per iteration: of a list its number, of a single number the same each time."
    n = max(len(column) for column in columns.values() if isinstance(column, list))
    rows = []
    for i in range(n):
        row = {}
        for name, column in columns.items():
            value = column[i] if isinstance(column, list) else column
            if value is not None:
                row[name] = value
        rows.append(row)
    return rows
