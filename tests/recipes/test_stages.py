"The frame of a recipe: its directory, its files by hash, and its tables."

import json
from pathlib import Path

import pytest

from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.runs.directory import in_run_directory


def test_a_run_that_could_not_begin_leaves_no_directory_and_one_that_could_names_its_files(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("x = 1\n")
    config = QuickstartConfig(plugin=("mine.py",), output_dir=tmp_path / "run")

    def no_model(out, manager):
        raise ValueError("the model is damaged")

    with pytest.raises(ValueError, match="damaged"):
        in_run_directory(config, "test", no_model)
    assert not config.output_dir.exists()
    assert in_run_directory(config, "test", lambda out, manager: {"written": str(out)}) == {
        "written": str(config.output_dir)
    }
    made = json.loads((config.output_dir / "config.json").read_text())
    assert (
        made["algorithm"] == "ppo"
        and list(made["files"]) == ["mine.py"]
        and len(made["files"]["mine.py"]) == 64
    )
    with pytest.raises(FileExistsError):
        in_run_directory(config, "test", no_model)
    longer = QuickstartConfig(
        plugin=("mine.py",), output_dir=tmp_path / "run", resume=True, steps=config.steps + 1
    )
    with pytest.raises(ValueError, match="damaged"):
        in_run_directory(longer, "test", no_model)
    assert (
        json.loads((config.output_dir / "config.json").read_text()) == made
    )  # what could not go on is what it was
