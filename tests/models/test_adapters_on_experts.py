"""Adapters on experts, and token rows and whole modules that learn beside adapters: what is saved,
loaded and merged says what was trained."""

import warnings

import peft
import pytest
import small_trainer
import torch
from mixtures import CONFIGS as MIXTURES
from mixtures import mixture
from small_trainer import TOKENIZER
from transformers import AutoModelForCausalLM

from instruct_goose.models.adapters import (
    LeftOut,
    expert_parameters,
    has_adapters,
    merge_adapters,
    with_lora,
)
from instruct_goose.models.agent import Agent
from instruct_goose.models.loading import load_adapters, load_model, save_model


def moved(model):
    "The model with its adapters away from 0, so that they say something."
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        if p.requires_grad and "lora_A" not in name:
            p.data += 0.1 * torch.randn_like(p)
    return model


IDS = torch.tensor([[3, 5, 7, 2, 5]])
families = pytest.mark.parametrize("name", MIXTURES)


@families
def test_adapters_reach_the_experts_are_saved_loaded_and_merged(name, tmp_path):
    mixture(name).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    experts = expert_parameters(model)
    before = model(IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeftOut)
        with_lora(model, rank=2, experts=True)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=1e-6)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "experts" in n]
    assert len(trained) == 2 * len(experts) == 2 * 2 * 2  # A and B, two tables in two layers
    moved(model)
    assert not torch.allclose(model(IDS).logits, before, atol=1e-3)
    merged = merge_adapters(model)
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert not has_adapters(merged) and has_adapters(model)
    save_model(model, TOKENIZER, tmp_path / "adapters")
    again = load_adapters(tmp_path / "adapters", tmp_path / "base")
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-6)
    whole = load_model(tmp_path / "adapters")
    torch.testing.assert_close(whole(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@families
def test_the_share_of_experts_that_is_left_out_is_named(name):
    model = mixture(name)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n) - experts
    share = experts / (experts + rest + 16)  # and the last norm
    with pytest.warns(LeftOut, match=f"leave out {share:.0%} of the transformer's weights"):
        with_lora(model, rank=2)


def test_top_blocks_alone_have_experts_with_adapters():
    model = with_lora(mixture("mixtral"), rank=2, top=1, experts=True)
    assert {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {"1"}


def test_a_model_without_experts_is_refused_with_experts():
    with pytest.raises(ValueError, match="the model has no experts"):
        with_lora(small_trainer.tiny("llama"), rank=2, experts=True)


@pytest.mark.parametrize("beside", ["token rows", "a whole head"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_learns_whole_beside_adapters_is_trained_saved_loaded_and_merged(
    tied, beside, tmp_path
):
    config = small_trainer.CONFIGS["llama"]()
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    options = {"trainable_token_indices": [3, 5]}
    if beside == "a whole head":
        options = {"modules_to_save": ["lm_head"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tied heads
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        agent = Agent(peft.get_peft_model(load_model(tmp_path / "base"), lora))
        t = small_trainer.trainer(model=agent, algorithm="grpo", group_size=2, lr=0.05)
        t.train(small_trainer.PROMPTS, small_trainer.reward, steps=2, progress=False)
        said = agent.model.eval()(IDS).logits
        t.save_pretrained(tmp_path / "run")
        loaded = load_adapters(tmp_path / "run", tmp_path / "base").eval()
        merged = load_model(tmp_path / "run").eval()
        save_model(merged, TOKENIZER, tmp_path / "merged")
    for model in (loaded, merged, load_model(tmp_path / "merged").eval()):
        torch.testing.assert_close(model(IDS).logits, said, rtol=1e-4, atol=1e-5)
    assert all(p.requires_grad for p in merged.parameters())  # it can be trained on
