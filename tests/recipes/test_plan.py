"""Counts from shapes against the operations that PyTorch sees, weights against real models, and the ledger against what was measured."""
import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from instruct_goose.models.agent import Agent
from instruct_goose.recipes.plan import (
    PASSING,
    Work,
    at_most,
    backward_flops,
    by_phase,
    forward_flops,
    iteration_flops,
    ledger,
    memory_parts,
    predicted,
    sizes_of,
)
from instruct_goose.training.annotate import annotations
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.rollout import Rollout, sample

root = Path(__file__).parents[2]
ROTARY = dict(vocab_size=40, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=32)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=3, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, head_dim=8, bos_token_id=None, eos_token_id=None),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, tie_word_embeddings=True)}
ROWS, PROMPT, RESPONSE = 3, 6, 5
WORK = Work(ROWS, PROMPT, RESPONSE, epochs=1)


def real(name, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


def counted(work):
    with FlopCounterMode(display=False) as counter: work()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_a_real_model(name):
    model, s = real(name), sizes_of(CONFIGS[name]())
    assert s.weights == sum(p.numel() for p in model.parameters()) and s.adapters == 0
    blocks = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "wte" not in n and "wpe" not in n and "lm_head" not in n)
    assert s.matrices == blocks and s.head == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_phase_is_what_pytorch_counts(name):
    "Rotary angles are a product as well, which the formula leaves out: a few parts in a thousand."
    policy, ref = real(name), real(name, 1)
    agent, parts = Agent(policy), by_phase(iteration_flops(CONFIGS[name](), WORK))
    queries, there = torch.randint(40, (ROWS, PROMPT)), torch.ones(ROWS, PROMPT, dtype=torch.bool)
    response = sample(policy, queries, there, RESPONSE, None, 0)  # and the models are asked what they are
    found = counted(lambda: sample(policy, queries, there, RESPONSE, None, 0))
    s = sizes_of(CONFIGS[name]())  # the counter hooks every module, so transformers' forward writes: without our step's look at the last column
    found += ROWS * (2 * (s.matrices + s.head) + 4 * s.attention * PROMPT)
    assert found == pytest.approx(parts["sampling"], rel=.005)
    r, c = Rollout(queries, there, *response), RLHFConfig(batch_size=ROWS, max_new_tokens=RESPONSE)
    annotations(agent, ref, r, c)
    assert counted(lambda: annotations(agent, ref, r, c)) == pytest.approx(parts["scoring"], rel=.005)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_backward_is_twice_forward(name):
    model, s = real(name), sizes_of(CONFIGS[name]())
    ids = torch.randint(40, (ROWS, 11))
    run = lambda: model(input_ids=ids, use_cache=False).logits.sum().backward()
    head = ROWS * 2 * 11 * s.head
    assert counted(run) == pytest.approx(forward_flops(s, ROWS, 11, 11) + backward_flops(s, ROWS, 11) + 2 * head, rel=.03)


def test_what_adapters_and_a_value_model_do_to_the_count():
    config = CONFIGS["gpt2"]()
    plain, thin, two = (iteration_flops(config, w) for w in (WORK, WORK._replace(lora_rank=1), WORK._replace(value_copy=True)))
    s = sizes_of(config, 1)
    assert s.adapters == 3 * ((24 + 72) + (24 + 24) + 2 * (24 + 96)) and s.matrices == 3 * 12 * 24**2
    tokens, pairs = ROWS * 11, ROWS * 11**2
    assert plain["updating: backward"] == 4 * tokens * s.matrices + 8 * pairs * s.attention
    assert thin["updating: backward"] == 2 * tokens * (s.matrices + 2 * s.adapters) + 8 * pairs * s.attention
    assert thin["scoring: reference"] == plain["scoring: reference"] and plain["updating: head"] - thin["updating: head"] == 2 * ROWS * RESPONSE * s.head
    assert two["updating: value model"] == plain["updating: forward"] + plain["updating: backward"] and two["updating: AdamW"] == 2 * plain["updating: AdamW"]


def test_a_prediction_by_hand():
    flops, others = {"a: x": 10, "a: y": 30, "b: x": 5}, {"a: x": 60, "a: y": 60, "b: x": 5}
    assert by_phase(flops) == {"a": 40, "b": 5} and predicted({"a": 2., "b": 7.}, flops, others) == {"a": 6., "b": 7.}


def test_the_ledger_by_hand():
    config = transformers.GPT2Config(vocab_size=100, n_embd=8, n_layer=2, n_head=2, n_positions=16, dtype=torch.bfloat16)
    n, (whole, thin, grpo, least) = sizes_of(config).weights, ledger(config, 6, 2, 4, 5, lora_rank=2).values()
    learn = sizes_of(config, 2).adapters
    lasting = lambda parts: sum(x for name, x in parts.items() if name not in PASSING)
    assert [lasting(p) for p in (whole, grpo)] == [4 * 9 * n + 2 * n, 4 * 5 * n]  # what learns, and its reference, is float32; the judge is as stored
    assert [lasting(p) for p in (thin, least)] == [2 * 2 * n + 4 * 8 * learn, 2 * n + 4 * 4 * learn]
    assert at_most(whole) == lasting(whole) + max(whole[name] for name in PASSING) < sum(whole.values())


def test_the_ledger_is_near_what_was_measured():
    "In the record: a fresh process that makes two models and does two iterations. The lesson states the margin."
    path = root / "bench/cost.json"
    if not path.exists(): pytest.skip("nothing is recorded: python -m bench.cost")
    models = json.loads(path.read_text("utf-8"))["models"]
    llama = transformers.LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                                     num_key_value_heads=3, tie_word_embeddings=True)
    assert sizes_of(llama).weights == 134_515_008  # SmolLM-135M's
    for name, config in {"gpt2-small": transformers.GPT2Config(n_positions=32), "smollm-135m": llama}.items():
        s = models[name]["settings"]
        expected = at_most(memory_parts(config, s["rows"], s["rows"], s["prompt"], s["response"]))
        assert .8 < models[name]["peak_mib"] * 2**20 / expected < 1.25, name


def test_the_goal_of_a_long_rollout_is_what_the_count_says():
    "bench/why.py: four times the tokens of the 4×128 model at 16 rows are 4.39 times the operations."
    config = transformers.GPT2Config(vocab_size=2000, n_embd=128, n_layer=4, n_head=4, n_positions=1040, bos_token_id=None, eos_token_id=None)
    long, short = (by_phase(iteration_flops(config, Work(16, 16, t)))["sampling"] for t in (512, 128))
    assert round(long / short, 2) == 4.39 and "4.39 times" in (root / "bench/why.py").read_text("utf-8")
