"""LoRA: by hand, against peft's own words, and in the trainer; Linear and Conv1D, all families, padding on either side."""

import copy
import dataclasses
import json
import sys
import warnings

import peft
import pytest
import torch
from deep import first
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import families, tiny, what_learns
from states import through_files
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
)

from instruct_goose.config import RLHFConfig
from instruct_goose.core.state import flatten
from instruct_goose.core.tensor_checks import LostSteps
from instruct_goose.models import adapters
from instruct_goose.models.adapters import (
    adapted_weight,
    adapter_layers,
    copy_sharing_frozen,
    four_bits,
    frozen_copy,
    has_adapters,
    load_module_state,
    merge_adapters,
    merge_in_place,
    module_state,
    unwrap_peft,
    widen_trainable,
    with_lora,
    without_adapters,
)
from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.models.decoding import has_own_steps
from instruct_goose.models.families import trunk
from instruct_goose.models.loading import (
    load_adapters,
    load_model,
    save_merged,
    save_model,
    tiny_smollm,
)
from instruct_goose.models.response import response_logits, response_logprobs
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.training.trainer import RLHFTrainer

IDS, MASK = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def trained(name="llama", seed=3, **options):
    "A model with adapters that say something."
    model = with_lora(tiny(name), **{"rank": 3, **options})
    torch.manual_seed(seed)
    for p in what_learns(model).values():
        nn.init.normal_(p, std=0.3)
    return model


def by_hand(model, scale):
    "W + s·B·A written into a plain copy, by the names of the parameters alone."
    plain = tiny(model.config.model_type)
    lora = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        a, b = (lora.get(name.removesuffix("weight") + f"lora_{s}.default.weight") for s in "AB")
        own = (
            lora.get(name)
            if name in lora
            else lora[
                name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
            ]
        )
        delta = 0 if a is None else scale * b @ a
        p.data = (
            (
                own
                + (
                    delta.T
                    if torch.is_tensor(delta) and plain.config.model_type == "gpt2"
                    else delta
                )
            )
            .detach()
            .clone()
        )  # x·W, not W·x
    return plain


@families
def test_the_forward_is_w_plus_ba_and_so_is_the_merged_model(name):
    model = trained(name, rank=3, alpha=4.5)
    plain = by_hand(model, 1.5)
    merged = merge_adapters(model)
    ours, theirs = model(IDS).logits, tiny(name)(IDS).logits
    assert (ours - theirs).abs().max() > 0.1
    torch.testing.assert_close(ours, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    assert not has_adapters(merged) and has_adapters(model) and type(merged) is type(model)
    assert not {id(p) for p in merged.parameters()} & {id(p) for p in model.parameters()}
    assert merged.state_dict().keys() == tiny(name).state_dict().keys()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_merged_model_that_was_saved_is_loaded_as_it_was(name, tmp_path):
    "By transformers alone. transformers 5 remembers the names that adapters were loaded under, and would give them to all weights."
    tiny(name).save_pretrained(tmp_path / "base")
    model = trained(name, rank=3, alpha=4.5)
    base = str(tmp_path / "base")
    Agent(model).save_pretrained(tmp_path / "adapters")
    again = load_adapters(tmp_path / "adapters", base)
    merge_adapters(again).save_pretrained(tmp_path / "served")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    torch.testing.assert_close(served(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    again.save_pretrained(tmp_path / "once more")  # its adapters, under the names that they had
    torch.testing.assert_close(
        load_adapters(tmp_path / "once more", base)(IDS).logits,
        model(IDS).logits,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("side", ["left", "right"])
@families
def test_kl_is_zero_to_the_bit_and_gradients_reach_adapters_alone(name, side):
    model = with_lora(tiny(name), rank=2)
    reference = create_reference_model(model)
    query, qm = (IDS, MASK) if side == "left" else (IDS.flip(1), MASK.flip(1))
    response, rm = torch.tensor([[2, 3, 0], [4, 99, 99]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    args = query.masked_fill(qm == 0, 77), qm, response.masked_fill(rm == 0, -5), rm
    assert torch.equal(*(response_logprobs(m, *args) for m in (model, reference)))
    assert torch.equal(response_logits(model, *args), response_logits(tiny(name), *args))
    response_logprobs(model, *args).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n in what_learns(model)
    }
    assert all("lora_" in n for n in what_learns(model))
    assert all(p.grad is None and not p.requires_grad for p in reference.parameters())


def test_a_reference_shares_what_is_frozen_and_copies_what_learns():
    fresh = with_lora(tiny("llama"))
    later = trained()

    def mine(model, other):
        return sum(
            p.numel()
            for p in other.parameters()
            if id(p) not in {id(x) for x in model.parameters()}
        )

    assert mine(fresh, frozen_copy(fresh)) == 0 and not has_adapters(frozen_copy(fresh))
    twin = frozen_copy(later)
    assert mine(later, twin) == sum(
        p.numel() for p in what_learns(later).values()
    ) and has_adapters(twin)
    before = twin(IDS).logits
    assert torch.equal(before, later(IDS).logits) and not torch.equal(
        before, without_adapters(later)(IDS).logits
    )
    assert torch.equal(without_adapters(later)(IDS).logits, tiny("llama")(IDS).logits)
    for p in what_learns(later).values():
        p.data += 1
    assert torch.equal(twin(IDS).logits, before)


@pytest.mark.parametrize(
    "options",
    [
        dict(use_dora=True),
        dict(init_lora_weights="pissa"),
        dict(modules_to_save=["lm_head"]),
        dict(init_lora_weights=False),
    ],
)
def test_what_speaks_at_once_belongs_to_the_reference(options):
    base = tiny("llama")
    base.config.tie_word_embeddings, base.lm_head.weight = (
        False,
        nn.Parameter(base.lm_head.weight.detach().clone()),
    )
    torch.manual_seed(1)
    model = Agent(
        get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))
    ).model
    reference = create_reference_model(model)
    before = model(IDS).logits
    assert torch.equal(reference(IDS).logits, before)
    for p in what_learns(model).values():
        p.data += 0.3
    assert (
        torch.equal(reference(IDS).logits, before)
        and (model(IDS).logits - before).abs().max() > 0.01
    )


@pytest.mark.parametrize("name, value_model", first(1, [("llama", "copy"), ("gpt2", None)]))
def test_on_weights_in_bfloat16_adapters_learn_in_float32(name, value_model, tmp_path):
    "Sampled, annotated, trained, saved and loaded: sampler and training forward agree, and the small steps arrive."
    base = tiny(name, std=0.05).bfloat16()
    base.save_pretrained(tmp_path / "base")
    agent = Agent(with_lora(base, 2), value_model)
    dtypes = (
        {p.dtype for p in agent.parameters() if p.requires_grad},
        {p.dtype for p in agent.model.parameters() if not p.requires_grad},
    )
    assert dtypes == ({torch.float32}, {torch.bfloat16})
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostSteps)
        first = RLHFTrainer(
            agent, config=dataclasses.replace(CONFIG, lr=1e-6), tokenizer=trainer(make()).tokenizer
        )
    before = {k: p.detach().clone() for k, p in what_learns(agent).items()}
    log = first.train(PROMPTS, score, steps=2, progress=False, held_out=PROMPTS)
    assert log[0]["max_ratio_deviation_first"] < 0.05 and log[0]["kl_to_reference"] == 0
    moved = [
        (p != before[k]).double().mean() for k, p in what_learns(agent).items() if "lora_B" in k
    ]
    assert min(moved) > 0.9  # in bfloat16 nothing would, but from 0
    agent.save_pretrained(tmp_path / "adapters")
    again = load_adapters(tmp_path / "adapters", tmp_path / "base")
    assert all(
        p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
        for p in again.parameters()
    )
    assert torch.equal(again(IDS).logits, agent.model(IDS).logits)


CONFIG = RLHFConfig(
    batch_size=4,
    minibatches=2,
    epochs=1,
    max_new_tokens=4,
    steps=4,
    lr=0.05,
    device="cpu",
    keep_best=True,
    eval_every=1,
)


def test_four_bits_train_where_the_package_is(tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    model, tokenizer = tiny_smollm([*"abcd"], width=64)
    model.save_pretrained(tmp_path / "model")
    model = with_lora(load_model(tmp_path / "model", **four_bits()), 4)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert any(p.dtype == torch.uint8 for p in frozen.values())
    history = RLHFTrainer(model, config=CONFIG, tokenizer=tokenizer).train(
        ["a b", "c"], lambda texts: [float(t.count("d")) for t in texts], steps=3, progress=False
    )
    assert history[0]["kl_to_reference"] == 0 < history[2]["kl_to_reference"] and all(
        m["max_sampler_deviation"] < 1e-3 for m in history
    )
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def trainer(agent):
    return RLHFTrainer(
        agent,
        config=CONFIG,
        tokenizer=word_tokenizer([f"w{i}" for i in range(6)], bos="<end>", eos="<end>"),
    )


PROMPTS = ["w1 w2", "w3", "w4 w5", "w0"]


def score(texts):
    return [t.count("w5") - 0.1 * len(t.split()) for t in texts]


def make(value_model=None, seed=5, base=0):
    model = tiny("llama", seed=base)
    torch.manual_seed(seed)
    return Agent(
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"])), value_model
    )


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_training_moves_adapters_and_values_and_resumes_to_the_bit(tmp_path, value_model):
    agent = make(value_model)
    frozen = {n: p.clone() for n, p in agent.named_parameters() if not p.requires_grad}
    first = trainer(agent)
    log = first.train(PROMPTS, score, steps=2, progress=False, held_out=PROMPTS)
    assert log[0]["kl_to_reference"] == 0 and log[1]["kl_to_reference"] > 0
    assert all(torch.equal(p, frozen[n]) for n, p in agent.named_parameters() if n in frozen)
    assert {n.split(".")[0] for n, p in agent.named_parameters() if p.requires_grad} == {
        "model",
        "value_head",
    } | ({"value_model"} if value_model else set())
    state = through_files(tmp_path, first.state_dict())
    names, _ = flatten(state)
    assert not [n for n in names if "base_layer" in n or "embed" in n]
    assert [n for n in names if n.startswith("parts/best_policy/weights/")]
    rest = first.train(PROMPTS, score, steps=2, progress=False, held_out=PROMPTS)
    second = trainer(make(value_model, seed=11))  # other adapters, until the state is loaded
    second.load_state_dict(state)
    assert [
        r["reward_mean"]
        for r in second.train(PROMPTS, score, steps=2, progress=False, held_out=PROMPTS)
    ] == [r["reward_mean"] for r in rest]
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.agent.state_dict().values(), second.agent.state_dict().values())
    )
    first.load_best()
    with pytest.raises(ValueError, match="is not the one"):
        trainer(make(value_model, base=8)).load_state_dict(state)


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_saved_and_loaded_alone_and_in_pefts_own_format(tmp_path, value_model):
    agent = make(value_model)
    for p in what_learns(agent).values():
        nn.init.normal_(p)
    agent.save_pretrained(tmp_path)
    again = Agent.from_pretrained(tmp_path, base=tiny("llama"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            agent.model.state_dict().values(), again.model.state_dict().values(), strict=True
        )
    )
    assert what_learns(again.model).keys() == what_learns(agent.model).keys()
    torch.testing.assert_close(
        again.values(IDS, MASK, IDS, MASK), agent.values(IDS, MASK, IDS, MASK), rtol=1e-4, atol=1e-4
    )  # its adapters are merged
    theirs = PeftModel.from_pretrained(tiny("llama"), tmp_path)
    assert torch.equal(theirs(IDS).logits, agent.model(IDS).logits)
    with pytest.raises(ValueError, match="base="):
        Agent.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="already"):
        load_adapters(tmp_path, trained())


def test_adapters_of_another_family_are_refused_though_their_matrices_fit(tmp_path):
    "Mistral's layers have the names and shapes of Llama's."
    trained("llama").save_pretrained(tmp_path)
    llama = tiny("llama").config
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    config = MistralConfig(**{name: getattr(llama, name) for name in (*sizes, *heads)})
    with pytest.raises(ValueError, match="of a LlamaForCausalLM, and the base is a Mistral"):
        load_adapters(tmp_path, MistralForCausalLM(config))
    load_adapters(tmp_path, tiny("llama"))
    path = tmp_path / "adapter_config.json"  # of a tool that does not say the family
    written = json.loads(path.read_text("utf-8"))
    assert written.pop("auto_mapping")["base_model_class"] == "LlamaForCausalLM"
    path.write_text(json.dumps(written), "utf-8")
    load_adapters(tmp_path, MistralForCausalLM(config))


def base_and_adapters(path, name="llama"):
    "A base in bfloat16's numbers, saved, and adapters that were trained on it, saved."
    base = tiny(name).bfloat16().float()
    base.save_pretrained(path / "base")
    adapted = with_lora(load_model(path / "base"), rank=2)
    for p in what_learns(adapted).values():
        nn.init.normal_(p, std=0.3)
    save_model(adapted, None, path / "adapters")
    return base, path / "adapters"


@families
def test_adapters_of_another_base_of_the_same_family_are_refused(name, tmp_path):
    _, adapters = base_and_adapters(tmp_path, name)
    tiny(name, seed=9).save_pretrained(tmp_path / "other")
    for base in (tiny(name, seed=9), str(tmp_path / "other")):
        with pytest.raises(ValueError, match="its weights are not those that they were trained on"):
            load_adapters(adapters, base)
    with pytest.raises(ValueError, match="not those that they were trained on"):
        save_merged(adapters, tmp_path / "merged", base=tmp_path / "other")
    assert not (tmp_path / "merged").exists()


def test_a_base_into_which_other_adapters_were_merged_is_another_base(tmp_path):
    "Embedding and norms are the same then, and so is each layer without an adapter."
    _, adapters = base_and_adapters(tmp_path)
    merged = with_lora(tiny("llama").bfloat16().float(), targets=["v_proj"])
    for p in what_learns(merged).values():
        nn.init.normal_(p, std=0.05)
    with pytest.raises(ValueError, match="not those that they were trained on"):
        load_adapters(adapters, merge_adapters(merged))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_in_another_precision_is_the_same(dtype, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")  # not in bfloat16's numbers
    adapted = with_lora(load_model(tmp_path / "base"), rank=2)
    for precision in (torch.float32, torch.bfloat16):
        save_model(adapted.to(precision), None, tmp_path / str(precision))
        load_adapters(tmp_path / str(precision), tiny("llama").to(dtype))
        load_adapters(tmp_path / str(precision), tiny("llama").to(dtype).float())


def test_a_base_with_more_tokens_is_the_same(tmp_path):
    base, adapters = base_and_adapters(tmp_path)
    base.resize_token_embeddings(14)
    load_adapters(adapters, base)


def test_adapters_that_peft_made_know_their_base_when_they_are_saved_here(tmp_path):
    options = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    agent = Agent(get_peft_model(tiny("llama"), options))
    nn.init.normal_(what_learns(agent.model)["model.embed_tokens.modules_to_save.default.weight"])
    agent.save_pretrained(tmp_path)
    Agent.from_pretrained(tmp_path, base=tiny("llama"))
    with pytest.raises(ValueError, match="not those that they were trained on"):
        Agent.from_pretrained(tmp_path, base=tiny("llama", seed=9))


def test_adapters_without_weights_of_their_base_warn_where_they_name_another(tmp_path):
    adapted = trained()
    adapted.peft_config["default"].base_model_name_or_path = "someone/small-model"
    adapted.save_pretrained(tmp_path)
    base = tiny("llama")
    base.name_or_path = "/models/small-model"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*holds adapters of")
        load_adapters(tmp_path, base)
    base = tiny("llama")
    base.name_or_path = "/models/other-model"
    with pytest.warns(UserWarning, match="holds adapters of 'someone/small-model', and the base"):
        load_adapters(tmp_path, base)


def test_what_is_refused(monkeypatch):
    with pytest.raises(TypeError, match="prompt_tuning puts tokens"):
        Agent(
            get_peft_model(
                tiny("llama"),
                peft.PromptTuningConfig(
                    task_type="CAUSAL_LM",
                    num_virtual_tokens=2,
                    num_layers=2,
                    token_dim=16,
                    num_attention_heads=2,
                ),
            )
        )
    agent = make()
    with pytest.raises(ValueError, match="shares parameters"):
        RLHFTrainer(agent, agent.model, CONFIG)
    RLHFTrainer(agent, without_adapters(agent.model), CONFIG)  # frozen weights may be shared
    with pytest.raises(ValueError, match="second place"):
        merge_adapters(with_lora(tiny("gpt2"), targets=["lm_head"]))
    with pytest.raises(ValueError, match="Target modules"):
        with_lora(tiny("llama"), targets=["nowhere"])
    merged = trained()
    for layer in [m for m in merged.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]:
        layer.merge()
    whole = get_peft_model(
        tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    ).get_base_model()
    with pytest.raises(ValueError, match="modules_to_save"):
        without_adapters(whole)
    for way in (without_adapters, merge_adapters):
        with pytest.raises(ValueError, match="unmerge"):
            way(merged)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"\[peft\]"):
        with_lora(tiny("llama"))


@pytest.mark.deep
def test_a_compiled_transformer_says_what_the_plain_one_says():
    "The backend here runs what was traced as it stands, without a C++ compiler."
    torch._dynamo.reset()
    model = tiny(std=0.1)
    calls = []
    plain, agent = Agent(copy.deepcopy(model)), Agent(model)
    trunk(model).compile(
        backend=lambda graph, inputs: calls.append(1) or graph.forward, dynamic=True
    )
    said, found = (
        a.evaluate(*pad([[1, 5, 7], [4]], 0, side="left"), *pad([[8, 2], [2, 8, 3, 7, 2]], 0))
        for a in (plain, agent)
    )
    for x, y in zip(said, found, strict=True):
        torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-5)
    for e in (said, found):
        (e.logprobs.sum() + e.values.sum()).backward()
    for x, y in zip(plain.parameters(), agent.parameters(), strict=True):
        torch.testing.assert_close(y.grad, x.grad, atol=1e-5, rtol=1e-4)
    assert (
        calls
        and has_own_steps(agent.model)
        and trunk(create_reference_model(agent))._compiled_call_impl is None
    )
    torch._dynamo.reset()


def test_peft_that_is_too_old_for_transformers_is_named_with_its_cure(tmp_path, monkeypatch):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    with_lora(load_model(tmp_path / "base"), 2).save_pretrained(tmp_path / "adapters")
    monkeypatch.setattr(adapters, "MIN_PEFT_VERSION", "99.0")
    for use in (lambda: with_lora(model, 2), lambda: load_model(tmp_path / "adapters")):
        with pytest.raises(ImportError, match="needs peft 99.0 or newer.*pip install -U 'peft>=99"):
            use()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@families
def test_adapters_come_back_to_the_bit_on_a_base_in_half_precision(name, dtype, tmp_path):
    "Learnt in float32, saved, and loaded again; the base is what was stored."
    tiny(name).to(dtype).save_pretrained(tmp_path / "base")
    model = with_lora(load_model(str(tmp_path / "base"), dtype=dtype), rank=3)
    torch.manual_seed(5)
    for p in what_learns(model).values():
        nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path / "adapters")
    again = load_adapters(tmp_path / "adapters", str(tmp_path / "base"), dtype=dtype)
    learnt = what_learns(again)
    assert learnt.keys() == what_learns(model).keys()
    for place, p in what_learns(model).items():
        assert p.dtype == learnt[place].dtype == torch.float32
        assert torch.equal(p, learnt[place]), place


# --- piece by piece


def layers_with_adapters(model):
    return {name for name, part in model.named_modules() if hasattr(part, "get_base_layer")}


def test_adapters_are_put_on_all_matrices_of_the_transformer_or_where_they_are_asked_for():
    matrices = {
        name
        for name, part in tiny("llama").named_modules()
        if isinstance(part, nn.Linear) and name.startswith("model.")
    }
    assert layers_with_adapters(with_lora(tiny("llama"))) == matrices
    some = with_lora(tiny("llama"), targets=["q_proj", "lm_head"], rank=3)
    assert layers_with_adapters(some) == {
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    }
    last = with_lora(tiny("llama"), top=1)
    assert layers_with_adapters(last) == {name for name in matrices if "layers.1." in name}
    assert layers_with_adapters(with_lora(tiny("llama"), top=2)) == matrices


@pytest.mark.parametrize("rank, alpha, scale", [(3, None, 2.0), (4, 6.0, 1.5), (1, 0.5, 0.5)])
def test_what_is_added_has_the_rank_and_the_scale_that_are_asked_for(rank, alpha, scale):
    model = with_lora(tiny("llama"), rank, alpha)
    for layer in adapter_layers(model):
        assert layer.lora_A.default.weight.shape[0] == rank == layer.lora_B.default.weight.shape[1]
        assert layer.scaling == {"default": scale}
        assert layer.lora_A.default.weight.any() and not layer.lora_B.default.weight.any()
        assert adapted_weight(layer) is layer.get_base_layer().weight


@pytest.mark.parametrize("rank, top", [(0, None), (-1, None), (1, 0), (1, 3), (1, -1)])
def test_a_rank_below_one_and_blocks_that_are_not_there_are_refused(rank, top):
    with pytest.raises(ValueError, match=f"rank is {rank}, top is {top}: .* number of blocks, 2"):
        with_lora(tiny("llama"), rank, top=top)


def test_adapters_know_their_family_and_where_their_base_is(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, expected in (
        ("base", str(tmp_path / "base")),  # from wherever it is loaded
        ("owner/name", "owner/name"),
        ("", ""),
    ):
        model = tiny("llama")
        model.name_or_path = name
        config = with_lora(model, 2).peft_config["default"]
        assert config.base_model_name_or_path == expected
        assert config.auto_mapping == {
            "base_model_class": "LlamaForCausalLM",
            "parent_library": "transformers.models.llama.modeling_llama",
        }
        assert config.task_type == "CAUSAL_LM"
    with pytest.raises(ValueError, match="has adapters already"):
        with_lora(model)


def test_the_new_head_of_a_classifier_learns_as_a_whole():
    model = with_lora(LlamaForSequenceClassification(tiny("llama").config), 2)
    learning = what_learns(model)
    assert "score.weight" in learning
    assert all("lora_" in name for name in learning if name != "score.weight")


def test_what_learns_is_widened_and_what_stands_still_is_not():
    model = tiny("llama").bfloat16()
    model.requires_grad_(False)
    model.lm_head.double().requires_grad_(True)
    model.model.norm.requires_grad_(True)
    embedding = model.model.embed_tokens.weight
    assert widen_trainable(model) is model
    assert model.lm_head.weight.dtype == torch.float64
    assert model.model.norm.weight.dtype == torch.float32
    assert embedding is model.model.embed_tokens.weight and embedding.dtype == torch.bfloat16


def test_a_copy_shares_what_stands_still_only_beside_adapters():
    plain = tiny("llama")
    plain.model.embed_tokens.requires_grad_(False)
    copied = copy_sharing_frozen(plain)
    assert not {id(p) for p in plain.parameters()} & {id(p) for p in copied.parameters()}
    model = trained()
    twin = copy_sharing_frozen(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p is q) == (not p.requires_grad) and p.equal(q)


@pytest.mark.parametrize("learns", ["lora_B", "lora_A", "norm"])
def test_a_reference_of_adapters_that_say_nothing_yet_is_the_plain_model(learns):
    "A is random from the start, and counts for nothing while B is 0; a norm that learns counts."
    model = with_lora(tiny("llama"), 2)
    if learns == "norm":
        model.model.norm.requires_grad_(True)
    for name, p in what_learns(model).items():
        if learns in name:
            p.data += 0.1
    reference = frozen_copy(model)
    assert has_adapters(reference) == (learns != "lora_A")
    assert torch.equal(reference(IDS).logits, model(IDS).logits)
    assert not what_learns(reference) and not reference.training


def test_a_model_that_peft_wraps_is_taken_out_with_its_adapters():
    model = tiny("llama")
    assert unwrap_peft(model) is model and unwrap_peft("a path") == "a path"
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    inner = unwrap_peft(wrapped)
    assert inner is model and has_adapters(inner)


@pytest.mark.parametrize("merge", [merge_adapters, merge_in_place])
def test_merged_weights_are_on_their_own_or_the_same_tensors(merge):
    model = trained()
    before = model(IDS).logits
    own = {id(p) for p in model.parameters()}
    plain = merge(model)
    torch.testing.assert_close(plain(IDS).logits, before, rtol=1e-4, atol=1e-4)
    assert not has_adapters(plain) and not adapter_layers(plain)
    assert not hasattr(plain, "peft_config")
    merged = {id(p) for p in plain.parameters()}
    if merge is merge_in_place:
        assert merged <= own
    else:
        assert not merged & own and torch.equal(model(IDS).logits, before)


def test_a_checkpoint_of_adapters_holds_what_learns_and_of_a_plain_model_all():
    plain = tiny("llama")
    plain.register_buffer("count", torch.tensor(3.0))
    assert module_state(plain).keys() == {*dict(plain.named_parameters()), "count"}
    model = trained()
    model.register_buffer("count", torch.tensor(3.0))
    state = module_state(model)
    assert state.keys() == {*what_learns(model), "count"}
    assert all(
        x.data_ptr() == what_learns(model)[k].data_ptr() for k, x in state.items() if k != "count"
    )
    assert not any(x.requires_grad for x in state.values())
    other = trained(seed=4)
    other.register_buffer("count", torch.tensor(0.0))
    places = {name: p.data_ptr() for name, p in what_learns(other).items()}
    load_module_state(other, state)
    assert torch.equal(other(IDS).logits, model(IDS).logits) and other.count == 3
    assert {name: p.data_ptr() for name, p in what_learns(other).items()} == places
    with pytest.raises(ValueError, match="another model's weights"):
        load_module_state(trained(rank=2), state)
