"The least seconds of each phase, counted by hand from the table of the guide One GPU."

import pytest
from transformers import GPT2Config, LlamaConfig

from instruct_goose.models.roofline import CARDS, Card, roofline

PARAMETERS = 124_439_808  # GPT-2's
CACHE = 2 * 12 * 768  # numbers that the cache holds of a token
H100 = CARDS["H100 80GB HBM3"]


def test_sampling_reads_the_weights_and_the_cache_for_every_token():
    bound = roofline(GPT2Config(), H100, rows=64, prompt=32, response=64)["rollout"]
    read = 64 * (2 * PARAMETERS + 2 * CACHE * 64 * (32 + 32))
    assert bound.bytes == read
    assert bound.seconds == read / H100.bandwidth > bound.flops / H100.bfloat16


def test_the_update_is_bounded_by_products_and_repeats_with_its_passes():
    once = roofline(GPT2Config(), H100, 64, 32, 64)["update"]
    twice = roofline(GPT2Config(), H100, 64, 32, 64, passes=2, minibatches=3)["update"]
    assert once.flops == 6 * PARAMETERS * 64 * (32 + 64)
    assert once.seconds == once.flops / H100.bfloat16
    assert twice.flops == 2 * once.flops and twice.bytes == 6 * once.bytes


def test_float32_doubles_the_bytes_and_has_its_own_peak():
    card = Card(bfloat16=4e12, tf32=2e12, float32=1e12, bandwidth=1e15)
    half, whole = (
        roofline(GPT2Config(), card, 4, 8, 8, products=products)
        for products in ("bfloat16", "float32")
    )
    assert whole["rollout"].bytes == 2 * half["rollout"].bytes
    assert whole["annotate"].seconds == 4 * half["annotate"].seconds


SIZE = dict(rows=4, prompt=8, response=16)
SLOW_MEMORY = Card(bfloat16=4e12, tf32=2e12, float32=1e12, bandwidth=1.0)
FAST_MEMORY = Card(bfloat16=4e12, tf32=2e12, float32=1e12, bandwidth=1e30)


def test_two_models_read_the_responses_once_each_before_the_update():
    bound = roofline(GPT2Config(), SLOW_MEMORY, **SIZE)["annotate"]
    assert bound.flops == 2 * (2 * PARAMETERS) * 4 * (8 + 16)  # a product and a sum for each weight
    assert bound.bytes == 2 * (2 * PARAMETERS)  # bytes of bfloat16
    assert bound.seconds == bound.bytes


def test_adamw_reads_four_numbers_of_each_weight_and_writes_three():
    "The weight, its gradient and two moments; all but the gradient are written. Float32 each."
    bound = roofline(GPT2Config(), SLOW_MEMORY, **SIZE, passes=2, minibatches=3)["update"]
    assert bound.bytes == bound.seconds == 6 * (4 + 3) * 4 * PARAMETERS


def test_a_forward_pass_has_two_operations_for_each_weight_and_token():
    bound = roofline(GPT2Config(), FAST_MEMORY, **SIZE)
    assert bound["rollout"].flops == 2 * PARAMETERS * 4 * 24
    assert bound["rollout"].seconds == 2 * PARAMETERS * 4 * 24 / 4e12


@pytest.mark.parametrize("products, peak", [("bfloat16", 4e12), ("tf32", 2e12), ("float32", 1e12)])
def test_each_type_of_products_has_its_own_peak(products, peak):
    for bound in roofline(GPT2Config(), FAST_MEMORY, **SIZE, products=products).values():
        assert bound.seconds == bound.flops / peak


@pytest.mark.parametrize(
    "heads, cached",
    [
        (dict(), 4 * 8),  # four heads of 32 / 4 numbers
        (dict(num_key_value_heads=2), 2 * 8),
        (dict(num_key_value_heads=2, head_dim=6), 2 * 6),
    ],
)
def test_the_cache_holds_keys_and_values_of_the_heads_that_have_them(heads, cached):
    "A longer prompt is read for each token of the response; the weights are read all the same."
    size = dict(vocab_size=11, hidden_size=32, intermediate_size=16, num_attention_heads=4)
    config = LlamaConfig(**size, num_hidden_layers=3, **heads)
    short, long = (
        roofline(config, SLOW_MEMORY, 1, prompt, 10)["rollout"].bytes for prompt in (0, 100)
    )
    assert long - short == 10 * 100 * (2 * 3 * cached) * 2


# multiprocessors; products and sums of bfloat16 in the tensor cores of each, per tick; their ticks
# a second; float32 lanes of each; ticks; the memory's pins; bits a second through each of them
CHIPS = {
    "H100 80GB HBM3": (132, 4096, 1.83e9, 128, 1.98e9, 5120, 5.23e9),
    "H200": (132, 4096, 1.83e9, 128, 1.98e9, 6144, 6.25e9),
    "A100-SXM4-80GB": (108, 2048, 1.41e9, 64, 1.41e9, 5120, 3.19e9),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_peaks_of_a_card_are_those_of_its_parts(name):
    parts, tensor_operations, tensor_clock, lanes, clock, pins, pin_rate = CHIPS[name]
    card = CARDS[name]
    in_bfloat16 = parts * tensor_operations * tensor_clock
    assert card.bfloat16 == pytest.approx(in_bfloat16, rel=0.01)
    assert card.tf32 == pytest.approx(in_bfloat16 / 2, rel=0.01)
    assert card.float32 == pytest.approx(parts * lanes * 2 * clock, rel=0.01)
    assert card.bandwidth == pytest.approx(pins * pin_rate / 8, rel=0.01)
