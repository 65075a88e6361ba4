"""Tiles, columns and gradients of `logprobs_in_pieces` one at a time; oracles are whole tables and autograd."""

from types import SimpleNamespace

import pytest
import torch

from instruct_goose.objective.logprobs_in_pieces import (
    TILE_BYTES,
    Blocks,
    Head,
    add_product,
    compare_heads,
    head_scores,
    own_column,
    shape_for,
    tile_bytes,
    tile_gradient,
    tile_shape,
    tiles,
)


@pytest.mark.parametrize(
    "tokens, vocab, numbers, shape",
    [
        (4, 10, 40, (4, 10)),  # all of it
        (4, 10, 4000, (4, 10)),
        (100, 100, 100, (10, 10)),  # a square
        (2, 1000, 100, (2, 50)),  # wider: there are few tokens
        (1000, 5, 100, (20, 5)),  # higher: there are few words
        (100, 10000, 10000, (100, 64)),  # a multiple of 64 columns
        (10, 10000, 2000, (10, 192)),
        (10, 10000, 630, (10, 63)),  # too narrow for one
        (10, 10000, 640, (10, 64)),
        (10, 65, 650, (10, 65)),  # it spans the vocabulary
        (4, 10, 1, (1, 1)),
        (4, 10, 0, (1, 1)),
    ],
)
def test_a_tile_holds_so_many_numbers(tokens, vocab, numbers, shape):
    assert tile_shape(tokens, vocab, numbers) == shape


def test_blocks_of_the_vocabulary_come_one_after_the_other():
    made = [(rows.start, rows.stop, cut.start, cut.stop) for rows, cut in tiles(3, 5, (2, 3))]
    assert made == [(0, 2, 0, 3), (2, 4, 0, 3), (0, 2, 3, 6), (2, 4, 3, 6)]


def test_a_token_is_in_one_block():
    tokens = torch.tensor([2, 3, 5, 6])
    here, at = own_column(tokens, slice(3, 6), 3)
    assert here.tolist() == [False, True, True, False]
    assert at.tolist() == [[0], [0], [2], [2]]  # elsewhere a column that may be read


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_of_some_words(bias):
    head = Head(torch.arange(8.0).view(4, 2), torch.arange(4.0) if bias else None)
    part = head.part(slice(1, 3))
    assert part.weight.tolist() == [[2, 3], [4, 5]]
    assert part.weight.data_ptr() == head.weight[1:].data_ptr()  # not copied
    assert (part.bias.tolist() if bias else part.bias) == ([1, 2] if bias else None)


def test_scores_are_divided_by_the_temperature_and_forbidden_words_are_finite():
    hidden = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    assert head_scores(hidden, Head(weight)).tolist() == [[1, 6]]
    assert head_scores(hidden, Head(weight), 2).tolist() == [[0.5, 3]]
    bias = torch.tensor([1.0, -torch.inf])
    least = torch.finfo(torch.float32).min / 4
    assert head_scores(hidden, Head(weight, bias), 2.0).tolist() == [[1, least]]
    assert head_scores(hidden.half(), Head(weight.half())).dtype == torch.float32


def test_the_bytes_of_a_tile():
    assert tile_bytes(torch.device("cpu")) == TILE_BYTES["cpu"]
    assert tile_bytes(torch.device("meta")) == 2**28
    weight = torch.zeros(10, 3)
    assert shape_for(4, weight, 1, 160) == (4, 10)  # 40 numbers of four bytes
    assert shape_for(4, weight, 2, 320) == (4, 10)
    assert shape_for(4, weight, 2, 160) == tile_shape(4, 10, 20)
    assert shape_for(4, weight.double(), 1, 160) == tile_shape(4, 10, 20)
    assert shape_for(4, weight.half(), 1, 160) == (4, 10)  # scores are in float32
    assert shape_for(4, weight, 1, None) == (4, 10)


def test_a_gpu_gives_a_share_of_its_memory(monkeypatch):
    memory = SimpleNamespace(total_memory=6400)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert tile_bytes(torch.device("cuda")) == 200


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_by_a_table_of_scores_is_autograds(with_entropy):
    torch.manual_seed(0)
    z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 4, 2])
    g, k = torch.randn(2, 3, dtype=torch.float64)
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = (g * logp.gather(1, tokens[:, None])[:, 0]).sum()
    if with_entropy:
        loss = loss + (k * entropy).sum()
    loss.backward()
    here, at = own_column(tokens, slice(0, 5), 5)
    made = tile_gradient(
        logp.detach().clone(), here, at, g, k if with_entropy else None, entropy.detach()
    )
    torch.testing.assert_close(made, z.grad)


def test_products_are_added_in_the_precision_of_the_weights():
    total = torch.ones(2, 2)
    a, b = torch.full((2, 2), 2.0), torch.eye(2)
    add_product(total, a, b)
    assert total.tolist() == [[3, 3], [3, 3]]
    add_product(total, a, b.bfloat16())
    assert total.tolist() == [[5, 5], [5, 5]] and total.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 2), (3, 7), (1, 1), (2, 3)])
def test_blocks_remember_what_the_whole_table_says(shape):
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64)
    weight = torch.randn(7, 4, dtype=torch.float64)
    tokens = torch.tensor([6, 0, 3])
    blocks = Blocks(hidden, 7, shape)
    for rows, columns in tiles(3, 7, shape):
        logq = blocks.read(head_scores(hidden[rows], Head(weight[columns])), tokens, rows, columns)
        blocks.read_entropy(logq.exp(), logq, rows, columns)
    logp = (hidden @ weight.T).log_softmax(-1)
    torch.testing.assert_close(blocks.logprobs(tokens), logp.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(blocks.whole_entropy(), -(logp.exp() * logp).sum(-1))


@pytest.mark.parametrize("bytes", [None, 24, 240])
def test_two_heads_are_compared_from_tiles(bytes):
    torch.manual_seed(0)
    hidden, other = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    head = Head(torch.randn(7, 4, dtype=torch.float64))
    ref_head = Head(torch.randn(7, 2, dtype=torch.float64))
    tokens = torch.tensor([6, 0, 3])
    made = compare_heads(hidden, head, other, ref_head, tokens, 1.5, bytes)
    logp = (hidden @ head.weight.T / 1.5).log_softmax(-1)
    logq = (other @ ref_head.weight.T / 1.5).log_softmax(-1)
    torch.testing.assert_close(made.logprobs, logp.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(made.ref_logprobs, logq.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(made.entropy, -(logp.exp() * logp).sum(-1))
    torch.testing.assert_close(made.kl, (logp.exp() * (logp - logq)).sum(-1))
