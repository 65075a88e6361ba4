"The frame of a recipe: its directory, its files by hash, and its tables."
import json
from pathlib import Path

import pytest

from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.recipes.stages import in_run_directory, models_table, side_by_side, spread


def test_a_run_that_could_not_begin_leaves_no_directory_and_one_that_could_names_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("x = 1\n")
    config = QuickstartConfig(plugin=("mine.py",), output_dir=tmp_path / "run")
    def no_model(out, manager): raise ValueError("the model is damaged")
    with pytest.raises(ValueError, match="damaged"): in_run_directory(config, "test", no_model)
    assert not config.output_dir.exists()
    assert in_run_directory(config, "test", lambda out, manager: {"written": str(out)}) == {"written": str(config.output_dir)}
    made = json.loads((config.output_dir / "config.json").read_text())
    assert made["algorithm"] == "ppo" and list(made["files"]) == ["mine.py"] and len(made["files"]["mine.py"]) == 64
    with pytest.raises(FileExistsError): in_run_directory(config, "test", no_model)


def test_side_by_side_shows_each_prompt_once(unchecked):
    from types import SimpleNamespace as Made
    before = Made(prompts=["a", "", "a"], texts=["a plot .", "what .", "a cast ."])
    after = Made(prompts=before.prompts, texts=["1", "2", "3"])
    with unchecked(): table, short = side_by_side(before, after).splitlines(), side_by_side(before, after, 1).splitlines()
    assert [[c.strip() for c in row.split("|")[1:4]] for row in table[2:]] == [["a", "a plot .", "1"], ["(nothing)", "what .", "2"]]
    assert short[2].split("|")[1].strip() == "a" and len(short) == 3


def test_tables_of_models_and_of_several_runs():
    assert spread([3., 1., 2.]) == "2.00 [1.00, 3.00]" and spread([1., 1.], ".0f") == "1"
    rows = [[c.strip() for c in row.strip("|").split("|")] for row in models_table(["a_b"], {"a_b": 1.}, {"a_b": 2.}, {"best_of_8": {}}).splitlines()]
    assert rows[0] == ["", "a b"] and rows[2:] == [["SFT model", "1.000"], ["best of 8", "–"], ["policy", "2.000"]]
