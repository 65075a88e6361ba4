"""Run the cells of lessons with torch or with page tensors, in a folder that holds a page's files.

python run_lessons.py FOLDER torch|page RESULT.json CELLS.json

CELLS.json: {lesson: [[id, source], …]}. RESULT.json: {lesson: {id: {printed, shown, error, checks,
seconds}}}. A check is its name, the numbers it was given and expected, and what it said.
"""

import json
import sys
import time
from pathlib import Path


def main():
    folder, which, result, cells = sys.argv[1:]
    sys.path.insert(0, folder)
    if which == "page":
        import page_tensors

        page_tensors.install()
    import torch
    from page_runner import run_cell

    from instruct_goose import lesson

    checks = []

    def numbers(x):
        return torch.as_tensor(x, dtype=torch.float64).detach().flatten().tolist()

    def precision(*values):
        "float32 if a tensor of it takes part."
        narrow = [v for v in values if torch.is_tensor(v) and v.dtype != torch.float64]
        return "float32" if any(v.is_floating_point() for v in narrow) else "float64"

    def watched(name, check, n):
        def call(*args, **kwargs):
            seen = {"name": name, "said": "right"}
            checks.append(seen)
            seen["precision"] = precision(*args[:n])
            seen["numbers"] = [numbers(x) for x in args[:n]]
            try:
                check(*args, **kwargs)
            except AssertionError as error:
                seen["said"] = str(error)
                raise

        return call

    def watched_diagnose(*args, **kwargs):
        said = diagnose(*args, **kwargs)
        checks.append({"name": "diagnose", "said": said, "numbers": [], "precision": "float64"})
        return said

    diagnose = lesson.diagnose
    lesson.expect = watched("expect", lesson.expect, 2)
    lesson.within = watched("within", lesson.within, 3)
    lesson.diagnose = watched_diagnose

    results = {}
    for number, sources in json.loads(Path(cells).read_text("utf-8")).items():
        torch.manual_seed(0)
        torch.set_printoptions(sci_mode=None)
        space = {"__name__": "__main__"}
        results[number] = {}
        for cell, source in sources:
            checks.clear()
            start = time.process_time()
            ran = run_cell(source, space, cell)
            ran["seconds"] = time.process_time() - start
            ran["checks"] = [dict(c) for c in checks]
            results[number][cell] = ran
    Path(result).write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main()
