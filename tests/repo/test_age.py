"""Evidence that is older than the code that it measures is named in the summary; a record of an unknown commit is an error."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "evidence"))
import age  # noqa: E402

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("name", age.MEASURES)
def test_evidence_is_as_old_as_its_code(name):
    asked = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=root, capture_output=True, text=True)
    if asked.stdout.strip() != "false": pytest.skip("not a git checkout with its whole history, which is needed to tell")
    record = root / f"evidence/{name}.json"
    if not record.exists(): pytest.skip(f"not recorded yet: python evidence/run.py {name}")
    found = sorted(set(age.commits(json.loads(record.read_text("utf-8")))))
    assert found, f"evidence/{name}.json does not say at which commit it was measured"
    old = sorted({m for commit in found for m in age.changed(name, commit)})
    if old: pytest.skip(f"evidence/{name}.json is older than {len(old)} modules, such as {', '.join(old[:3])}: python evidence/run.py {name}")


def test_every_record_of_runs_is_watched():
    dated = {p.stem for p in (root / "evidence").glob("*.json") if list(age.commits(json.loads(p.read_text("utf-8"))))}
    assert dated - {"portable", "mutations", "gpu", "lowest"} <= set(age.MEASURES)  # these measure all of the code: each says at which commit


@pytest.fixture
def repository(tmp_path, monkeypatch):
    "A package of three modules, `worlds.family` on top; write(name, text) commits one and returns the commit."
    def git(*args): return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    def write(name, text):
        path = tmp_path / f"instruct_goose/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        git("add", "-A")
        git("commit", "-qm", name)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    write("objective/far", "def f(x): return x + 1\n")
    write("training/near", "from ..objective import far\nfrom instruct_goose.objective.far import f\n")
    write("training/other", "y = 1\n")
    return tmp_path, write, write("recipes/quickstart", '"what it is"\nfrom ..training.near import far\n\ndef run():\n    "one"\n    return far.f(1)\n')


def test_a_change_far_away_counts(repository):
    folder, write, commit = repository
    write("objective/far", "LIMIT = 3\ndef f(x): return x + 2\n")
    assert age.changed("quickstart", commit, folder) == ["objective.far.LIMIT", "objective.far.f"]


