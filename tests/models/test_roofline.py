"The least seconds of each phase, counted by hand from the table of the guide One GPU."

from transformers import GPT2Config

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
