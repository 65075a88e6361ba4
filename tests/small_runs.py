"""Small healthy runs, each trained once, and changes of what they recorded."""

import copy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "evidence"))
from doctor_unseen import USUAL, a_run

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
