"""Give every notebook the cell that installs the package in Colab. A notebook that has it is left alone; run it again at any time."""
import json

from lessons import REPO, ROOT

NOTE = "in Colab, this installs the package first; elsewhere it does nothing"
SOURCE = f'''#| hide
#| eval: false
# {NOTE}
import sys

if "google.colab" in sys.modules:
    import subprocess
    subprocess.run([sys.executable, "-m", "pip", "install", "-q",
                    "instruct_goose[dev] @ git+{REPO}"], check=True)'''


def with_install_cell(nb: dict) -> dict | None:
    "The notebook with the cell behind its first one, or in front if that is no directive; None if it has it."
    if any(NOTE in "".join(c["source"]) for c in nb["cells"]): return None
    place = int("default_exp" in "".join(nb["cells"][0]["source"]))
    cell = {"cell_type": "code", "execution_count": None, "id": "c01ab000", "metadata": {}, "outputs": [],
            "source": SOURCE.splitlines(keepends=True)}
    return nb | {"cells": [*nb["cells"][:place], cell, *nb["cells"][place:]]}


def main():
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if any(p[0] in "._" for p in path.relative_to(ROOT / "nbs").parts): continue
        if made := with_install_cell(json.loads(path.read_text("utf-8"))):
            path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__": main()
