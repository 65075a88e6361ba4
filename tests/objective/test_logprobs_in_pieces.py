"""The plain way beside it: the whole table, log_softmax, autograd. And numbers derived by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from instruct_goose.lesson import running_example
from instruct_goose.objective.kl import exact_kl
from instruct_goose.objective.logprobs import entropy, logprobs_from_hidden, token_logprobs
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


def near(a, b, atol=1e-10):
    return torch.testing.assert_close(a, b, atol=atol, rtol=0)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def problem(N=7, H=4, V=11):
    return (
        draw(N, H).requires_grad_(),
        draw(V, H).requires_grad_(),
        draw(V).requires_grad_(),
        torch.randint(V, (N,)),
    )


def whole(hidden, weight, ids, tau, bias):
    "Written as the formulas read, nothing in place."
    p = ((hidden @ weight.T + (0 if bias is None else bias)) / tau).softmax(-1)
    return p[range(len(ids)), ids].log(), -(p * p.log()).sum(-1)


# --- values and gradients, however it is cut ---


@given(
    st.integers(1, 9),
    st.sampled_from([1, 40, 200, 700, 2**20]),
    st.booleans(),
    st.sampled_from([1.0, 0.6, 3]),
    st.sampled_from(["both", "logprobs", "entropy"]),
)
def test_no_cut_changes_a_number(N, bytes, with_bias, tau, used):
    hidden, weight, bias, ids = problem(N)
    bias = bias if with_bias else None
    got = logprobs_from_hidden(hidden, weight, ids, tau, bias, with_entropy=True, chunk_bytes=bytes)
    want = whole(hidden, weight, ids, tau, bias)
    for a, b in zip(got, want, strict=True):
        near(a.detach(), b.detach())
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    lopsided = torch.arange(1.0, N + 1)

    def loss(lp, s):
        return (lopsided * lp).sum() * (used != "entropy") + (lopsided**2 * s).sum() * (
            used != "logprobs"
        )

    for a, b in zip(*(torch.autograd.grad(loss(*x), inputs) for x in (got, want)), strict=True):
        near(a, b, 1e-9)
    alone = logprobs_from_hidden(hidden, weight, ids, tau, bias, chunk_bytes=bytes)
    near(alone.detach(), want[0].detach())


@pytest.mark.parametrize("bytes", [8, 16, 2**20])
def test_numbers_by_hand(bytes):
    "A head that is the identity has the logits for states: (.55, .30, .15), and good was sampled."
    z = running_example().logits[0, :1].clone().requires_grad_()
    lp, s = logprobs_from_hidden(
        z, torch.eye(3).double(), torch.tensor([0]), with_entropy=True, chunk_bytes=bytes
    )
    near(lp.item(), math.log(0.55))
    near(s.item(), -sum(p * math.log(p) for p in (0.55, 0.3, 0.15)))
    near(torch.autograd.grad(lp, z, retain_graph=True)[0], f64([[0.45, -0.30, -0.15]]))
    near(
        torch.autograd.grad(s, z)[0],
        f64([[-p * (math.log(p) + s.item()) for p in (0.55, 0.3, 0.15)]]),
    )


@pytest.mark.parametrize("bytes", [32, 200, 2**20])
def test_forbidden_tokens(bytes):
    "A bias of −inf, also over whole pieces of the vocabulary: probability 0, and no NaN."
    hidden, weight, bias, ids = problem()
    forbidden = torch.arange(11) >= 4
    ids = ids % 4
    closed = bias.detach().masked_fill(forbidden, -math.inf).requires_grad_()
    lp, s = logprobs_from_hidden(
        hidden, weight, ids, 1.0, closed, with_entropy=True, chunk_bytes=bytes
    )
    want = whole(hidden, weight[:4], ids, 1.0, bias[:4])
    near(lp.detach(), want[0].detach())
    near(s.detach(), want[1].detach())
    for a, b in zip(
        *(torch.autograd.grad(x.sum() + 2 * y.sum(), (hidden, weight)) for x, y in ((lp, s), want)),
        strict=True,
    ):
        near(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bytes", [400, 2**20])
def test_narrow_floats(dtype, bytes):
    "Sums are made in float32: the error of the gradient is that of rounding the inputs, not of adding up."
    hidden, weight, bias, ids = (
        x.detach().to(dtype) if x.is_floating_point() else x for x in problem(40, 16, 60)
    )
    for x in (hidden, weight, bias):
        x.requires_grad_()
    lp, s = logprobs_from_hidden(
        hidden, weight, ids, 0.9, bias, with_entropy=True, chunk_bytes=bytes
    )
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    want = whole(exact[0], exact[1], ids, 0.9, exact[2])
    eps = torch.finfo(dtype).eps
    assert lp.dtype == s.dtype == torch.float32
    near(lp.double().detach(), want[0].detach(), 60 * eps)
    near(s.double().detach(), want[1].detach(), 60 * eps)
    (lp.sum() + s.sum()).backward()
    (want[0].sum() + want[1].sum()).backward()
    for a, b in zip((hidden, weight, bias), exact, strict=True):
        assert a.grad.dtype == dtype
        near(a.grad.double(), b.grad, 30 * eps * b.grad.abs().max().item())


def test_under_autocast():
    "The trunk hands on bfloat16 and the head's weight is float32: the product is made in bfloat16, as a linear layer makes it."
    hidden, weight, _, ids = (x.detach().float() if x.is_floating_point() else x for x in problem())
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        lp = logprobs_from_hidden(hidden.bfloat16(), weight, ids, chunk_bytes=64)
    lp.sum().backward()
    assert lp.dtype == weight.grad.dtype == torch.float32
    near(lp.detach(), token_logprobs(hidden @ weight.detach().T, ids), 0.1)


# --- what is not computed ---


class Work(TorchDispatchMode):
    "Multiplications in matrix products, and the largest tensor that is made."

    def __init__(self):
        super().__init__()
        self.products = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.products += a.shape[0] * a.shape[1] * b.shape[1]
        for t in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(t):
                self.largest = max(self.largest, t.numel())
        return out


def test_by_default_no_table_of_a_cpu_is_larger_than_its_cache():
    "32 MiB of scores, where all of them are 96 MiB."
    tokens = 480
    vocabulary = 50_000
    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    with Work() as work:
        logprobs_from_hidden(hidden, weight, torch.arange(tokens)).sum().backward()
    assert 4 * work.largest <= 2**25


N, H, V = 60, 8, 90


@pytest.mark.parametrize(
    "learns,moved,bytes,products",
    [
        (("hidden", "weight"), 60, 2**10, 4),
        (("hidden", "weight"), 15, 2**10, 1 + 3 / 4),
        (("hidden", "weight"), 0, 2**10, 1),
        (("hidden",), 60, 2**10, 3),
        (("weight",), 60, 2**10, 3),
        (("hidden",), 30, 2**10, 2),
        (("hidden", "weight"), 60, 2**20, 3),
        (("hidden", "weight"), 15, 2**20, 1 + 2 / 4),
    ],
)
def test_the_work_that_is_done(learns, moved, bytes, products):
    hidden, weight, _, ids = problem(N, H, V)
    for name, x in (("hidden", hidden), ("weight", weight)):
        x.requires_grad_(name in learns)
    with Work() as seen:
        lp = logprobs_from_hidden(hidden, weight, ids, chunk_bytes=bytes)
        (lp * (torch.arange(N) % 4 < moved // 15)).sum().backward()
    assert seen.products == products * N * H * V
    assert (hidden.grad is not None) == ("hidden" in learns) and (weight.grad is not None) == (
        "weight" in learns
    )


@pytest.mark.parametrize("with_entropy", [True, False])
def test_what_the_loss_does_not_move_may_be_poison(with_entropy):
    hidden, weight, _, ids = problem(6)
    clean = hidden.detach().clone()
    m = torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    dirty = torch.where(m[:, None], clean, math.nan).requires_grad_()
    clean.requires_grad_()
    for bytes in (64, 2**20):
        outs = [
            logprobs_from_hidden(h, weight, i, with_entropy=with_entropy, chunk_bytes=bytes)
            for h, i in ((dirty, ids), (clean, ids))
        ]
        sums = [
            sum(x.masked_fill(~m, 0.0).sum() for x in (out if with_entropy else (out,)))
            for out in outs
        ]
        (a, wa), (b, wb) = (
            torch.autograd.grad(s, (h, weight)) for s, h in zip(sums, (dirty, clean), strict=True)
        )
        near(a, b)
        near(wa, wb)
        assert (a[~m] == 0).all()


@pytest.mark.parametrize("bytes,with_entropy", [(2**11, True), (2**12, True), (2**12, False)])
def test_no_tensor_is_larger_than_asked_for(bytes, with_entropy):
    hidden, weight, _, ids = problem(300, 2, 400)
    with Work() as seen:
        out = logprobs_from_hidden(
            hidden, weight, ids, with_entropy=with_entropy, chunk_bytes=bytes
        )
        (sum(x.sum() for x in out) if with_entropy else out.sum()).backward()
    blocks = 300 * math.ceil(400 / tile_shape(300, 400, bytes // 8 // (1 + with_entropy))[1])
    assert seen.largest <= max(
        bytes // 8 // (1 + with_entropy), hidden.numel(), weight.numel(), 2 * blocks
    )


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 5000))
def test_tiles_cover_the_table_once(tokens, vocab, numbers):
    shape = tile_shape(tokens, vocab, numbers)
    assert shape[0] * shape[1] <= max(numbers, 1)
    if tokens <= 40 and vocab <= 40:
        seen = torch.zeros(tokens, vocab)
        for rows, columns in tiles(tokens, vocab, shape):
            seen[rows, columns] += 1
        assert (seen == 1).all()


# --- two models ---


@given(
    st.integers(0, 9),
    st.sampled_from([1, 100, 600, 2**20]),
    st.sampled_from([1.0, 0.6, 3]),
    st.booleans(),
)
def test_two_models_at_once(N, bytes, tau, with_bias):
    a = draw(N, 4)
    b = draw(N, 3)
    ids = torch.randint(11, (N,))
    head = Head(draw(11, 4), draw(11) if with_bias else None)
    other = Head(draw(11, 3))
    pi = head_scores(a, head).log_softmax(-1)
    ref = head_scores(b, other).log_softmax(-1)
    got = compare_heads(a, head, b, other, ids, tau, bytes)
    near(got.logprobs, token_logprobs(pi, ids, tau))
    near(got.ref_logprobs, token_logprobs(ref, ids, tau))
    near(got.entropy, entropy(pi, tau))
    near(got.kl, exact_kl((pi / tau).log_softmax(-1), (ref / tau).log_softmax(-1)))
    assert (compare_heads(a, head, a, head, ids, tau, bytes).kl == 0).all()


def test_two_vocabularies_are_not_compared():
    with pytest.raises(ValueError, match=r"\(5,\).*\(6,\)"):
        compare_heads(
            draw(2, 4), Head(draw(5, 4)), draw(2, 4), Head(draw(6, 4)), torch.tensor([0, 1])
        )


@pytest.mark.parametrize("wrong", [0, -1])
def test_what_must_be_above_0(wrong):
    hidden, weight, _, ids = problem()
    with pytest.raises(ValueError, match=f"chunk_bytes={wrong} must be above 0"):
        logprobs_from_hidden(hidden, weight, ids, chunk_bytes=wrong)


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
