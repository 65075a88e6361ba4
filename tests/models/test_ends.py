"""What ends a response: the union of tokenizer, configuration, generation configuration and learnt
rows, in the plan, in the saved model, in plain `generate`, in `sample` and in `chat`."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from templates import FAMILIES, tokenizer_of
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from instruct_goose.cli.commands import stops_of
from instruct_goose.cli.main import main
from instruct_goose.models.loading import load_model, load_tokenizer, save_merged
from instruct_goose.rollouts.prompts import model_eos_ids

TOKENIZER = tokenizer_of(FAMILIES["Gemma"])  # its turns end in a token that no text ends in
EOS, TURN, OF_CONFIG, OF_GENERATION = TOKENIZER.convert_tokens_to_ids(
    ["<eos>", "<end_of_turn>", "w", "f"]
)
QUESTION = [{"role": "user", "content": "what is it?"}]
ROWS = {
    "sft": [{"prompt": QUESTION, "completion": "the film"}] * 4,
    "dpo": [{"prompt": QUESTION, "chosen": "the film", "rejected": "why?"}] * 4,
    "kto": [{"prompt": QUESTION, "completion": "the film", "label": i % 2 == 0} for i in range(4)],
    "train": [{"prompt": QUESTION}] * 4,
}
MORE = {
    "train": "--reward rewards.py:length --max-new-tokens 2 --minibatches 1",
    "sft": "",
    "dpo": "",
    "kto": "",
}
LEARNT = {"sft": [TURN], "dpo": [TURN], "kto": [TURN], "train": []}
SAVED = {"sft": "out/sft", "dpo": "out/policy", "kto": "out/policy", "train": "out/policy"}


@pytest.fixture(params=["number", "list"])
def here(request, tmp_path, monkeypatch):
    "A model whose tokenizer, configuration and generation configuration end in tokens of their own."
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
        bos_token_id=TOKENIZER.bos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    is_list = request.param == "list"
    model.config.eos_token_id = [OF_CONFIG] if is_list else OF_CONFIG
    model.generation_config.eos_token_id = [OF_GENERATION] if is_list else OF_GENERATION
    model.save_pretrained("base")
    TOKENIZER.save_pretrained("base")
    for stage, rows in ROWS.items():
        Path(f"{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text("def length(texts): return [len(text) % 7 for text in texts]\n")


def run(stage, *more):
    shared = f"--model base --data {stage}.jsonl --output-dir out --steps 1 --batch-size 4"
    line = f"{stage} {shared} --no-progress {MORE[stage]} {shlex.join(more)}"
    main(shlex.split(line))


def written_before_the_end(model, token):
    "How many tokens `generate` writes of a model that would go on with one token for ever."
    ids = torch.tensor([[5, 6]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        do_sample=False,
        sequence_bias={(token,): 1e4},
    )
    return out.shape[1] - ids.shape[1]


@pytest.mark.parametrize("stage", ROWS)
def test_the_ends_are_one_union_in_the_plan_and_the_saved_model(here, stage, capsys):
    ends = [EOS, OF_CONFIG, OF_GENERATION, *LEARNT[stage]]
    run(stage, "--dry-run")
    shown = " or ".join(f"{TOKENIZER.convert_ids_to_tokens(token)} ({token})" for token in ends)
    assert f"a response ends with {shown}\n" in capsys.readouterr().out

    run(stage)

    saved = AutoModelForCausalLM.from_pretrained(SAVED[stage])
    assert saved.generation_config.eos_token_id == ends
    assert [written_before_the_end(saved, token) for token in ends] == [1] * len(ends)
    assert written_before_the_end(saved, 7) == 4
    model = load_model("out")
    tokenizer = load_tokenizer("out")
    assert sorted(model_eos_ids(model, tokenizer)) == sorted(ends)
    assert sorted(stops_of(Path("out"), model, tokenizer)[0]) == sorted(ends)


@pytest.mark.parametrize("stage", ROWS)
def test_adapters_stop_where_training_stopped_and_so_does_what_is_merged(here, stage, capsys):
    pytest.importorskip("peft")
    ends = [EOS, OF_CONFIG, OF_GENERATION, *LEARNT[stage]]

    run(stage, "--lora-rank", "2")
    save_merged("out", "merged")

    assert load_model("out").generation_config.eos_token_id == ends
    plain = AutoModelForCausalLM.from_pretrained(SAVED[stage])  # has its base's ends
    plain.generation_config = GenerationConfig.from_pretrained(SAVED[stage])
    assert [written_before_the_end(plain, token) for token in ends] == [1] * len(ends)
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert [written_before_the_end(merged, token) for token in ends] == [1] * len(ends)
    capsys.readouterr()
    main(shlex.split(f"train --model {SAVED[stage]} --data train.jsonl {MORE['train']} --dry-run"))
    shown = capsys.readouterr().out
    assert all(f"({token})" in shown.partition("a response ends")[2] for token in ends)


def test_sample_and_chat_take_what_train_and_sft_take_without_a_pad_token(
    here, capsys, monkeypatch
):
    tokenizer = load_tokenizer("base")
    tokenizer.pad_token = None
    tokenizer.save_pretrained("base")
    assert load_tokenizer("base").pad_token is None
    run("train", "--dry-run")
    run("sft", "--dry-run")

    main(shlex.split("sample base 'what is it?' --chat --n 2 --max-new-tokens 2"))
    main(shlex.split("sample base 'what' 'what is it?' --max-new-tokens 2"))
    monkeypatch.setattr("builtins.input", lambda _, lines=iter(["what", ""]): next(lines))
    main(shlex.split("chat base --max-new-tokens 2"))

    assert "model: " in capsys.readouterr().out
