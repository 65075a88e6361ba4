"The frame of a recipe: its directory, its files by hash, and its tables."

import json
from pathlib import Path

import pytest

from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.recipes.stages import beginnings, models_table, spread
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
    assert made["algorithm"] == "ppo"
    assert list(made["files"]) == ["mine.py"] and len(made["files"]["mine.py"]) == 64
    with pytest.raises(FileExistsError):
        in_run_directory(config, "test", no_model)
    longer = QuickstartConfig(
        plugin=("mine.py",), output_dir=tmp_path / "run", resume=True, steps=config.steps + 1
    )
    (config.output_dir / "summary.json").unlink()
    with pytest.raises(ValueError, match="damaged"):
        in_run_directory(longer, "test", no_model)
    assert (
        json.loads((config.output_dir / "config.json").read_text()) == made
    )  # what could not go on is what it was


def test_prompts_are_the_first_words_of_texts_and_the_same_for_a_seed():
    texts = ["a b c d", "e f g"]
    prompts = beginnings(texts, 50, 1, 3, "seed")
    assert prompts == beginnings(texts, 50, 1, 3, "seed") != beginnings(texts, 50, 1, 3, "other")
    assert set(prompts) == {"a", "a b", "a b c", "e", "e f", "e f g"}


def test_a_table_of_models_begins_with_the_sft_model_and_ends_with_the_policy():
    table = models_table(["kl"], {"kl": 0.0}, {"kl": 3.0}, {"best_of_8": {}})
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == [
        "SFT model",
        "best of 8",
        "policy",
    ]


def test_a_spread_names_the_ends_only_where_they_differ():
    assert spread([0.7, 0.9, 0.8]) == "0.80 [0.70, 0.90]"
    assert spread([0.801, 0.799]) == "0.80"
