"A model card says what a reader of the Hub needs, and nothing of this machine."

import pytest
import yaml

from instruct_goose.recipes.card import model_card

SUMMARY = {
    "config": {"algorithm": "grpo", "lr": 2e-5, "seed": 0},
    "iterations": 100,
    "model": "owner/base",
    "first": {"reward_mean": 0.1, "finished": 1.0},
    "last": {"reward_mean": 0.8},
}


def test_the_header_is_yaml_with_the_base_model():
    _, header, text = model_card(SUMMARY).split("---\n", 2)
    assert yaml.safe_load(header) == {
        "base_model": "owner/base",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "instruct_goose", "grpo"],
    }
    assert "GRPO, 100 iterations from `owner/base`" in text


@pytest.mark.parametrize("place", ["/models/base", "models/of/base", "."])
def test_a_directory_of_this_machine_is_not_named(place):
    assert "base_model" not in model_card(SUMMARY | {"model": place})


def test_only_settings_that_are_not_the_defaults_are_listed():
    text = model_card(SUMMARY)
    assert "| lr " in text and "2e-05" in text
    assert "| seed" not in text


def test_metrics_that_the_last_iteration_lacks_are_left_out():
    text = model_card(SUMMARY)
    assert "| reward mean" in text and "| finished" not in text


def test_adapters_are_loaded_with_their_model_and_files_have_their_hash():
    text = model_card(SUMMARY | {"adapters": True, "files": {"reward.py": "0a1b"}})
    assert "load_model(path)" in text and "AutoModelForCausalLM" not in text
    assert "reward.py, SHA-256 0a1b" in text
    assert "model.generation_config = GenerationConfig.from_pretrained(path)" in text
