"""Where models come from: directories, runs, adapters, the Hub by name; what is damaged is refused in one sentence, and no foreign code runs."""

import copy
import json
import os
import re

import pytest
import small_trainer
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import tiny, what_learns
from transformers import AutoModelForCausalLM

from instruct_goose.models import loading
from instruct_goose.models.adapters import has_adapters, merge_adapters, with_lora
from instruct_goose.models.agent import Agent
from instruct_goose.models.loading import (
    find_model,
    load_adapters,
    load_config,
    load_model,
    load_smollm,
    load_tokenizer,
    missing_weights,
    read_config,
    require_smollm,
    save_merged,
    save_model,
    tiny_smollm,
)
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.tasks.probes import tiny_world

transformers.utils.logging.set_verbosity_error()
IDS = torch.tensor([[1, 2, 3, 4]])
WORDS = word_tokenizer(list("abcde"))
NOTHING = {"missing_keys": [], "unexpected_keys": []}


def test_a_path_that_is_not_there_is_named_at_once(tmp_path):
    "The network is shut in all tests: a look-up would end in another error."
    for load in (
        load_model,
        load_tokenizer,
        Agent,
        lambda path: Agent(tiny(), path),
        RewardModel.from_pretrained,
    ):
        with pytest.raises(
            FileNotFoundError, match="no directory 'no/such-dir' here.*hub:no/such-dir"
        ):
            load("no/such-dir")
    file = tmp_path / "model.txt"
    file.write_text("")
    with pytest.raises(FileNotFoundError, match="no directory"):
        load_model(file)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_model(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    assert torch.equal(
        load_model(tmp_path).get_output_embeddings().weight, model.get_output_embeddings().weight
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "model_type": "evil",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="no policy can be loaded"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_only_hub_asks_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda name, **k: asked.append((name, k)) or (tiny(), NOTHING),
    )
    load_model("hub:owner/name")
    assert asked == [
        (
            "owner/name",
            {
                "trust_remote_code": False,
                "local_files_only": False,
                "dtype": "auto",
                "output_loading_info": True,
            },
        )
    ]


@pytest.mark.parametrize(
    "stored, learns",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_half_precision_is_widened_unless_it_is_asked_for(stored, learns, tmp_path):
    weights = {k: x.to(stored) for k, x in tiny().state_dict().items()}
    tiny().to(stored).save_pretrained(tmp_path)
    for options, expected in (
        ({}, learns),
        ({"dtype": "auto"}, stored),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
    ):
        found = load_model(tmp_path, **options).state_dict()
        assert all(
            x.dtype == expected and x.equal(weights[k].to(expected))
            for k, x in found.items()
            if x.is_floating_point()
        ), options


# --- adapters, and runs ---


def adapted(model=None, **options):
    "A model with adapters that say something."
    model = with_lora(model or tiny("llama"), 2, **options)
    torch.manual_seed(1)
    for p in what_learns(model).values():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def run(tmp_path, monkeypatch):
    "A run's directory with adapters of a model beside it, which was given by a relative path."
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("base")
    Agent(adapted(load_model("base"))).save_pretrained("run/policy")
    WORDS.save_pretrained("run/policy")
    monkeypatch.chdir("/")
    return tmp_path / "run"


def test_adapters_are_loaded_with_their_model_and_merged(run, tmp_path):
    model = load_model(run)
    expected = adapted()(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (
        not has_adapters(model)
        and find_model(run) == str(run / "policy")
        and load_config(run).model_type == "llama"
    )
    live = load_adapters(run / "policy")
    assert has_adapters(live) and what_learns(live).keys() == what_learns(adapted()).keys()
    torch.testing.assert_close(live(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(run).get_vocab() == WORDS.get_vocab()


def test_merged_adapters_are_a_plain_directory(run, tmp_path):
    save_merged(run, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(
        plain(IDS).logits, merge_adapters(adapted())(IDS).logits, rtol=1e-4, atol=1e-4
    )
    assert load_tokenizer(tmp_path / "out").get_vocab() == WORDS.get_vocab()
    with pytest.raises(FileExistsError, match="there already"):
        save_merged(run, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out", "run"]


@pytest.mark.parametrize("base", [None, 3, "owner/name", "itself"])
def test_adapters_without_their_model_say_what_is_wanted(run, base, tmp_path):
    place = run / "policy"
    settings(
        place / "adapter_config.json",
        base_model_name_or_path=str(place) if base == "itself" else base,
    )
    with pytest.raises(ValueError, match="base="):
        load_model(run)
    assert load_model(run, base=tmp_path / "base") and load_model(run, base=tiny("llama"))


# --- damage ---


def settings(file, **change):
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def tensors(change, name="model"):
    def work(place):
        found = load_file(place / f"{name}.safetensors")
        change(found)
        save_file(found, place / f"{name}.safetensors", metadata={"format": "pt"})

    return work


def cut(n, name="model"):
    return lambda place: (file := place / f"{name}.safetensors").write_bytes(file.read_bytes()[:n])


def text(name, words):
    return lambda place: (place / name).write_text(words)


def config(**change):
    return lambda place: settings(place / "config.json", **change)


MATRIX = "transformer.h.0.mlp.c_fc.weight"
DAMAGE = {
    "cut": (cut(-50), "Copy the file again"),
    "empty": (cut(0), "Copy the file again"),
    "int8": (
        tensors(lambda w: w.update({k: x.to(torch.int8) for k, x in w.items()})),
        "stored as I8",
    ),
    "ten million layers": (config(num_hidden_layers=10**7, n_layer=10**7), "10000000 layers"),
    "one is missing": (tensors(lambda w: w.pop(MATRIX)), f"missing, {MATRIX}"),
    "one is unknown": (tensors(lambda w: w.update(extra=torch.ones(2))), "unknown, extra"),
    "NaN": (tensors(lambda w: w[MATRIX].view(-1)[:1].fill_(torch.nan)), f"not finite, {MATRIX}"),
    "another width": (config(n_embd=32), "shapes"),
    "more layers": (config(n_layer=3, num_hidden_layers=3), "missing"),
    "words for a number": (config(n_embd="wide"), "no policy can be loaded"),
    "another kind": (config(model_type="t5"), "policy"),
    "config is cut": (text("config.json", '{"a":'), "cannot be read"),
    "config is deep": (text("config.json", '{"a":' * 10**5), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_is_refused_in_one_sentence(name, tmp_path):
    "All of these were tracebacks, or trained with random weights."
    tiny().save_pretrained(tmp_path)
    change, says = DAMAGE[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=re.escape(says)) as e:
        load_model(tmp_path)
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 500


def test_what_is_missing_may_be_allowed(tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors(lambda w: w.pop(MATRIX))(tmp_path)
    tensors(lambda w: w.update(extra=torch.ones(2)))(tmp_path)
    model = load_model(tmp_path, strict=False)
    found = model.state_dict()
    assert all(x.equal(found[k]) for k, x in tiny().state_dict().items() if k != MATRIX)
    assert missing_weights(model) == [MATRIX]
    assert missing_weights(torch.nn.ModuleList([model])) == [MATRIX]  # as adapters hold it
    assert missing_weights(copy.deepcopy(model)) == missing_weights(tiny()) == []


def test_a_reader_is_no_policy_and_a_policy_no_reward_model(tmp_path):
    T = transformers
    base = dict(
        vocab_size=9,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    for name, model in {
        "bert": T.BertForMaskedLM(T.BertConfig(**base)),
        "llama": tiny("llama"),
    }.items():
        model.save_pretrained(tmp_path / name)
    with pytest.raises(TypeError, match="looks ahead"):
        load_model(tmp_path / "bert")
    with pytest.raises(ValueError, match="missing, score.weight"):
        load_model(tmp_path / "llama", "reward", num_labels=1)
    load_model(tmp_path / "llama", "reward", strict=False, num_labels=1)


@pytest.mark.parametrize(
    "change, says",
    [
        (cut(-9, "adapter_model"), "Copy the file again"),
        (tensors(lambda w: w.pop(next(iter(w))), "adapter_model"), "missing"),
        (tensors(lambda w: next(iter(w.values())).fill_(torch.nan), "adapter_model"), "not finite"),
        (text("adapter_config.json", "{"), "cannot be read"),
        (lambda p: settings(p / "adapter_config.json", r=5), "rank is 5, and the files hold"),
        (lambda p: settings(p / "adapter_config.json", r=10**9), "rank is 1000000000"),
        (lambda p: settings(p / "adapter_config.json", r="2"), "rank is '2'"),
        (lambda p: settings(p / "adapter_config.json", r=0), "rank is 0"),
        (lambda p: (p / "adapter_model.safetensors").unlink(), "do not fit"),
    ],
)
def test_damaged_adapters_are_refused_too(run, change, says):
    change(run / "policy")
    with pytest.raises(ValueError, match=says) as e:
        load_model(run)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "words", ["{", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "nonsense"}}']
)
def test_a_malformed_tokenizer_is_named(words, tmp_path):
    WORDS.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == WORDS.get_vocab()
    (tmp_path / "tokenizer.json").write_text(words)
    with pytest.raises(ValueError, match="no tokenizer can be loaded") as e:
        load_tokenizer(tmp_path)
    assert "\n" not in str(e.value)


# --- SmolLM2 from its package, or the stand-in of its make ---


def test_a_kept_model_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SMOLLM_PACKAGES", ("no_such_package", "os"))
    with pytest.raises(ImportError, match="(?s)no no_such_package here.*pip install"):
        require_smollm()
    with pytest.raises(ImportError, match="no_such_package"):
        load_smollm(tmp_path / "kept")
    assert not os.listdir(tmp_path)
    for part in (made := tiny_smollm(["a"])):
        part.save_pretrained(tmp_path / "kept")
    model, tokenizer = load_smollm(tmp_path / "kept")
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), made[0].state_dict().values(), strict=True)
    )
    assert tokenizer.get_vocab() == made[
        1
    ].get_vocab() and model.get_input_embeddings().num_embeddings == len(tokenizer)


@pytest.mark.parametrize("limit", [0, -1, "512", None, [8]])
def test_a_tokenizer_whose_longest_text_is_no_length_is_refused(limit, tmp_path):
    WORDS.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"model_max_length": limit}))
    if limit is None:  # transformers takes a very large one
        assert load_tokenizer(tmp_path).model_max_length > 1
        return
    with pytest.raises(ValueError, match="(?s)model_max_length"):
        load_tokenizer(tmp_path)


def test_a_head_with_a_bias_that_its_family_has_not_is_saved_and_loaded(tmp_path):
    model, tokenizer = tiny_world()
    assert model.lm_head.bias is not None
    save_model(Agent(model), tokenizer, tmp_path / "policy")
    for again in (
        load_model(tmp_path / "policy"),
        Agent.from_pretrained(tmp_path / "policy").model,
    ):
        assert torch.equal(again.lm_head.bias, model.lm_head.bias)
        ids = torch.tensor([[0, 1]])
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_stored_in_half_precision_learns_in_float32_and_is_stored_as_it_was(
    dtype, tied, tmp_path
):
    config = small_trainer.CONFIGS["llama"]()
    config.tie_word_embeddings = tied
    stored = AutoModelForCausalLM.from_config(config).to(dtype)
    stored.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    with torch.no_grad():
        model.model.norm.weight += 1e-4  # less than a step of half precision
    agent = Agent(model, "copy")
    reward_model = RewardModel.from_causal_lm(model, small_trainer.TOKENIZER)
    save_model(agent, small_trainer.TOKENIZER, tmp_path / "policy")
    reward_model.save_pretrained(tmp_path / "reward")
    size = (tmp_path / "base/model.safetensors").stat().st_size
    assert (tmp_path / "policy/model.safetensors").stat().st_size == size
    for directory in ("policy", "policy/value_model", "reward"):
        weights = load_file(tmp_path / directory / "model.safetensors")
        assert {x.dtype for x in weights.values()} == {dtype}
        assert read_config(tmp_path / directory / "config.json")["dtype"] == str(dtype)[6:]
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # it can go on
    assert model.model.norm.weight[0] == 1 + 1e-4
    again = load_model(tmp_path / "policy", dtype="auto")
    for mine, theirs in zip(again.parameters(), stored.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_model_that_was_stored_in_float32_stays_in_it(tmp_path):
    save_model(tiny(), WORDS, tmp_path)
    assert load_model(tmp_path, dtype="auto").dtype == torch.float32
