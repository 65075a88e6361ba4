"""What keeps the exported code readable: short lines, small files, a trainer of two screens, no private name of another room."""
import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
MODULES = sorted(p for p in (root / "instruct_goose").rglob("*.py") if p.name != "_modidx.py")
each = pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(root / "instruct_goose").as_posix())


def written(path):
    "The lines that a person wrote, with their numbers: nbdev makes a header of the notebook's subtitle and of all names, and marks each cell."
    lines = list(enumerate(path.read_text("utf-8").splitlines(), 1))
    cells = [n for n, line in lines if re.match(r"# %% \S+\.ipynb #", line)]
    return [(n, line) for n, line in lines if not cells or n > cells[0] and n not in cells]


@each
def test_lines_are_short(path):
    assert not [(n, len(line)) for n, line in written(path) if len(line) >= 100]


@each
def test_files_are_small(path):
    assert len(written(path)) < 300


def test_the_measure_sees_what_it_measures(tmp_path):
    fake = tmp_path / "fake.py"
    fake.write_text('"""' + "title " * 30 + '"""\n__all__ = ["x"]\n# %% ../nbs/a.ipynb #1\nx = 1\n' + "y = 2  # " + "é" * 91 + "\n", "utf-8")
    assert [n for n, _ in written(fake)] == [4, 5] and [len(line) for _, line in written(fake)][-1] == 100


def private_imports(source):
    "Names with an underscore that are imported from another module of the package, or read off one."
    found, modules = [], set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom): continue
        ours = node.level > 0 or (node.module or "").startswith("instruct_goose")
        if ours: found += [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
        if ours: modules |= {a.asname or a.name for a in node.names if a.name.islower()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules and re.match("_[a-z]", node.attr):
            found.append(f"{node.value.id}.{node.attr}")
    return found


@each
def test_nothing_private_crosses_modules(path):
    assert not private_imports(path.read_text("utf-8"))


def test_a_private_import_is_seen():
    assert private_imports("from instruct_goose.models.agent import Agent, _wide") == ["_wide"]
    assert private_imports("from ..models import agent\nagent._wide(3)") == ["agent._wide"]
    assert private_imports("from os import _exit\nfrom ..models.agent import Agent") == []


def test_the_trainer_fits_on_two_screens():
    tree = ast.parse((root / "instruct_goose/training/trainer.py").read_text("utf-8"))
    trainer = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "RLHFTrainer")
    assert trainer.end_lineno - trainer.lineno + 1 <= 150


def test_the_trainers_lesson_is_read_in_half_an_hour():
    "6,000 words at 200 a minute: everything between blanks, in prose and code, hidden cells and docstrings included."
    cells = json.loads((root / "nbs/learn/16_trainer.ipynb").read_text("utf-8"))["cells"]
    text = ["".join(c["source"]) for c in cells]
    assert sum(len(t.split()) for t in text) <= 6000
    assert re.search(r"\*\*Time\*\*: 30 minutes", "\n".join(text))


def test_no_module_is_left_without_its_notebook():
    made = {p: re.search(r"File to edit: (\S+\.ipynb)", p.read_text("utf-8")) for p in MODULES}
    assert not [str(p) for p, m in made.items() if m and not (p.parent / m[1]).resolve().exists()]
    assert subprocess.run(["git", "check-ignore", "instruct_goose"], cwd=root, capture_output=True).returncode != 0
