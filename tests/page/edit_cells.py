"""Run cells of lessons as a reader does, in a folder that holds a page's files.

python edit_cells.py FOLDER CELLS.json STEPS.json RESULT.json

CELLS.json: [[id, source], …]. STEPS.json: [[wanted, {id: text}] or null, …]; null opens the lesson
anew. RESULT.json: what was reported at each step.
"""

import json
import sys
from pathlib import Path


def main():
    folder, cells, steps, result = sys.argv[1:]
    sys.path.insert(0, folder)
    import page_runner

    source = Path(cells).read_text("utf-8")
    lesson = page_runner.open_lesson(source)
    reports = []
    for step in json.loads(Path(steps).read_text("utf-8")):
        said: list[dict] = []
        if step is None:
            lesson = page_runner.Lesson(json.loads(source))
        else:
            wanted, edited = step
            lesson.run(wanted, edited, lambda text, said=said: said.append(json.loads(text)))
        reports.append(said)
    Path(result).write_text(json.dumps(reports), "utf-8")


if __name__ == "__main__":
    main()
