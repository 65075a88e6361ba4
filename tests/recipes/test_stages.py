"The frame of a recipe: its directory, its files by hash, and its tables."

import json
from pathlib import Path

import pytest
import torch

from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.recipes.stages import (
    SmallModelSettings,
    beginnings,
    evaluate,
    make_baselines,
    models_table,
    small_gpt2,
    spread,
)
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


TOKENIZER = word_tokenizer("the film was good bad".split())
SMALL = SmallModelSettings(
    hidden_size=8,
    layers=1,
    heads=2,
    max_new_tokens=3,
    best_of=2,
    tune_steps=1,
    progress=False,
)


def ends_never_or_at_once(at_once):
    "A model whose first number decides: of the special tokens it writes the end or none."
    model = small_gpt2(SMALL, TOKENIZER, 16).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()[0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[TOKENIZER.all_special_ids, 0] = -50.0
        model.lm_head.weight[TOKENIZER.eos_token_id, 0] = 50.0 if at_once else -50.0
    return model


def reward_model():
    model = RewardModel.from_causal_lm(small_gpt2(SMALL, TOKENIZER, 16), TOKENIZER).eval()
    torch.nn.init.normal_(model.model.score.weight)
    return model


def words(texts, ended):
    return {"words": [len(text.split()) for text in texts]}


def test_a_small_model_has_the_shape_that_was_asked_for_and_the_weights_of_its_seed():
    before = torch.get_rng_state()
    model = small_gpt2(SMALL, TOKENIZER, 16, dropout=0.25)
    shape = model.config
    assert (shape.vocab_size, shape.n_positions) == (len(TOKENIZER), 16)
    assert (shape.n_embd, shape.n_layer, shape.n_head) == (8, 1, 2)
    assert shape.resid_pdrop == shape.embd_pdrop == shape.attn_pdrop == 0.25
    assert shape.bos_token_id == TOKENIZER.bos_token_id
    assert shape.eos_token_id == TOKENIZER.eos_token_id
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again = small_gpt2(SMALL, TOKENIZER, 16)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    other = small_gpt2(SmallModelSettings(hidden_size=8, layers=1, heads=2, seed=1), TOKENIZER, 16)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_figures_of_a_model_are_means_over_its_texts():
    "Two prompts of 2 and 1 words, of which one that never ends gets 3 words more."
    judge = reward_model()
    prompts = ["the film", "film"]
    never = ends_never_or_at_once(False)
    rollout, figures = evaluate(SMALL, never, never, TOKENIZER, judge, prompts, words)
    assert figures["words"] == 4.5
    assert figures["response_length"] == 3
    assert figures["ended"] == figures["kl_to_reference"] == 0
    score = sum(judge.score(rollout.texts)) / 2
    assert figures["reward_model_score"] == pytest.approx(score, abs=1e-6)

    at_once = ends_never_or_at_once(True)
    _, figures = evaluate(SMALL, at_once, never, TOKENIZER, judge, prompts, words)
    assert figures["words"] == 1.5
    assert figures["response_length"] == figures["ended"] == 1
    # the end has probability 1, and with the reference, which writes five words, e⁻⁵⁰/5
    log_ratio = 50 + torch.tensor(5.0).log()
    assert figures["kl_to_reference"] == pytest.approx(log_ratio.item(), rel=1e-3)


@pytest.mark.parametrize(
    "at_once, names", [(True, ["best_of_2", "sft_on_best_of_2"]), (False, ["best_of_2"])]
)
def test_without_a_text_that_ended_there_is_no_sft_on_the_best(at_once, names):
    lm = ends_never_or_at_once(at_once)
    before = {name: weight.clone() for name, weight in lm.state_dict().items()}
    made = make_baselines(
        SMALL, lm, TOKENIZER, reward_model(), ["the", "film"], words, batch_size=2
    )
    assert list(made) == names
    assert made["best_of_2"]["ended"] == at_once
    assert all(torch.equal(weight, before[name]) for name, weight in lm.state_dict().items())
