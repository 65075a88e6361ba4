"""The oracle is one unpadded row at a time: the whole text through the model again for every token, no cache."""

from itertools import accumulate

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from instruct_goose.config import RLHFConfig
from instruct_goose.models import decoding as decode
from instruct_goose.models.agent import Agent
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.sampling import sample, sample_index, sample_token
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.objective.masks import response_mask
from instruct_goose.rollouts.rollout import PromptBatch, Rollout, Tokens, micro_batch_slices
from instruct_goose.rollouts.sampler import PolicySampler

V, EOS, PAD = 11, 2, 0
BASE = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=20,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        **BASE, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3
    ),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, attention_dropout=0.3),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, attention_dropout=0.3),
    "gemma2": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2.0),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=V, hidden_size=16, n_layer=2, n_head=2, eos_token_id=EOS, pad_token_id=0
    ),
}
FAMILIES = ["gpt2", "llama", "qwen2"]
QUERIES = [[1, 5, 7], [1], [1, 4, 6, 6, 8], [1, 3]]


def tiny(name="gpt2", seed=0, dtype=None):
    if dtype is None:
        dtype = (
            torch.float64 if name in FAMILIES else torch.float32
        )  # their attention takes float64 to float32, where its mask is -inf
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.35)
    return model.to(dtype)


def dice(seed=5):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def one_by_one(model, query, uniforms, eos, temperature=1.0):
    ids, response = list(query), []
    model.eval()
    for u in uniforms.tolist():
        p = (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()
        token, height = 0, p[0]
        while height <= u and token < V - 1:
            token += 1
            height += p[token]
        ids.append(token)
        response.append(token)
        if token in eos:
            break
    return response


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_a_padded_batch_with_a_cache_writes_what_single_rows_without_either_write(
    name, side, pad_id
):
    model, T, temperature = tiny(name).train(), 12, 1.0 if pad_id == PAD else 0.8
    ids, mask = pad(QUERIES, 9, side=side)  # 9 is a token like any other: nobody may read it
    response, written, logprobs = sample(
        model, ids, mask, T, EOS, pad_id, temperature, dice(), with_logprobs=True
    )
    assert all(m.training for m in model.modules())
    u = torch.rand(T, len(QUERIES), dtype=torch.float64, generator=dice())
    lengths = set()
    for i, query in enumerate(QUERIES):
        expected = one_by_one(model, query, u[:, i], {EOS}, temperature)
        assert response[i][written[i]].tolist() == expected
        assert (response[i][~written[i]] == pad_id).all() and (logprobs[i][~written[i]] == 0).all()
        lengths.add(len(expected))
        full = (model(torch.tensor([query + expected])).logits[0] / temperature).log_softmax(-1)
        slow = torch.stack([full[len(query) - 1 + t, token] for t, token in enumerate(expected)])
        torch.testing.assert_close(
            logprobs[i][written[i]], slow, atol=1e-9 if name in FAMILIES else 1e-5, rtol=0
        )
    assert len(lengths) > 1, "all rows ended together: this seed tests nothing"
    assert written.equal(response_mask(response, EOS)) or pad_id == EOS
    assert response.shape[1] == max(lengths)


def test_only_the_given_generator_is_used():
    model = tiny()
    ids, mask = pad(QUERIES, PAD, side="left")
    state = torch.get_rng_state()
    first = sample(model, ids, mask, 8, EOS, PAD, generator=dice())[0]
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(99)
    assert sample(model, ids, mask, 8, EOS, PAD, generator=dice())[0].equal(first)
    torch.manual_seed(99)
    a = sample(model, ids, mask, 8, EOS, PAD)[0]
    torch.manual_seed(99)
    b = sample(model, ids, mask, 8, EOS, PAD)[0]
    assert a.equal(b)
    state, own = torch.get_rng_state(), dice()
    sample(model, ids, mask, 8, EOS, PAD, greedy=True)
    sample(model, ids, mask, 8, EOS, PAD, generator=own, greedy=True)
    assert torch.get_rng_state().equal(state) and own.get_state().equal(
        dice().get_state()
    )  # greedy text throws no dice


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = tiny()
    model.train()
    model.transformer.h[0].eval()
    before = [m.training for m in model.modules()]
    ids, mask = pad(QUERIES, PAD, side="left")
    sample(model, ids, mask, 3, EOS, PAD)
    assert [m.training for m in model.modules()] == before
    model.lm_head.weight.data[3] = float("nan")
    for greedy in (False, True):
        with pytest.raises(FloatingPointError, match="NaN or infinite in rows"):
            sample(model, ids, mask, 3, EOS, PAD, greedy=greedy)
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_is_computed_for_rows_that_have_ended(name, monkeypatch):
    model, counts = tiny(name, dtype=torch.float32), []
    plain = decode.OwnSteps.__call__
    monkeypatch.setattr(
        decode.OwnSteps,
        "__call__",
        lambda self, token: counts.append(len(token)) or plain(self, token),
    )
    ids, mask = pad(QUERIES * 3, PAD, side="left")
    _, written = sample(model, ids, mask, 12, [2, 3], PAD, generator=dice(3))
    assert counts[0] == len(ids)  # the last column of the queries, again
    assert counts[1:] == written.sum(0).tolist()[1:] and counts[-1] < counts[0]


def test_refusals(unchecked):
    model = tiny()
    ids, mask = pad(QUERIES, PAD, side="left")
    empty = mask.clone()
    empty[2] = False
    cases = [
        (dict(query_mask=empty), "no query token in row \\[2\\]"),
        (dict(query_ids=ids[:, 1:]), "differ in shape"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (
            dict(max_new_tokens=16),
            "query 2 has 5 tokens, which with max_new_tokens=16 is beyond the model's context of 20",
        ),
        (
            dict(query_ids=ids + 5),
            "token 4 of query 0 is 12, but the model's vocabulary ends at 10",
        ),
        (dict(temperature=0.0), "temperature is 0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=0), "top_k is 0"),
    ]
    good = dict(query_ids=ids, query_mask=mask, max_new_tokens=4, eos_id=EOS, pad_id=PAD)
    with unchecked():
        for change, message in cases:
            with pytest.raises(ValueError, match=message):
                sample(model, **(good | change))
    assert (
        sample(model, **(good | dict(max_new_tokens=15)))[0].shape[1] <= 15
    )  # exactly the context


def test_a_rollout_holds_texts_and_what_the_sampler_saw():
    words = [f"w{i}" for i in range(7)]
    tokenizer = word_tokenizer(words, 20)  # 4 special tokens and 7 words: the model's 11
    model = tiny(dtype=torch.float32)
    prompts = ["w0 w3", "w1", ""]
    ids, mask = pad([tokenizer(p)["input_ids"] for p in prompts], PAD, side="right")
    tokens = Tokens(tokenizer, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    r = PolicySampler(Agent(model), tokens)(
        PromptBatch(ids, mask), 1, RLHFConfig(max_new_tokens=6), dice()
    )
    assert r.prompts == prompts
    for i in range(3):
        real = tokenizer.decode(r.response_ids[i][r.mask[i]], skip_special_tokens=True)
        assert r.texts[i] == f"{prompts[i]} {real}".strip()
    assert r.query_mask[:, -1].all(), "queries must end where responses begin"
    again = response_logprobs(model, r.query_ids, r.query_mask, r.response_ids, r.mask)
    torch.testing.assert_close(again, r.sampled_logprobs, atol=1e-5, rtol=0)


def make(n=7):
    rows = torch.arange(n)
    return Rollout(
        rows[:, None],
        torch.ones(n, 1).bool(),
        rows[:, None] * 10,
        torch.ones(n, 1).bool(),
        texts=[str(i) for i in range(n)],
        scores=rows.float(),
        values=rows[:, None] / 2,
        baseline=rows / 4,
        group_tokens=rows + 3,
    )


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_minibatches_deal_every_row_once_and_keep_it_whole(parts):
    deal = list(make().minibatches(parts, dice()))
    assert len(deal) == parts and max(map(len, deal)) - min(map(len, deal)) <= 1
    assert sorted(t for b in deal for t in b.texts) == sorted(make().texts)
    for b in deal:
        for i, text in enumerate(b.texts):
            k = int(text)
            assert (b.query_ids[i], b.response_ids[i], b.scores[i], b.values[i]) == (
                k,
                10 * k,
                k,
                k / 2,
            )
            assert (b.baseline[i], b.group_tokens[i]) == (k / 4, k + 3)
        assert b.advantages is None
    assert [b.texts for b in make().minibatches(parts, dice())] == [b.texts for b in deal]


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 384, 1000, 5003])
def test_shelves_choose_what_one_staircase_chooses(vocab):
    p = torch.rand(40, vocab, generator=dice(vocab), dtype=torch.float64) ** 4
    p[:, torch.rand(vocab, generator=dice(1)) < 0.3] = 0
    p[:, vocab // 2] = 0.1
    u = torch.rand(40, generator=dice(2), dtype=torch.float64)
    slow = []
    for row, x in zip(p.tolist(), u.tolist(), strict=True):
        stairs = list(accumulate(row))
        slow.append(next(v for v, height in enumerate(stairs) if height > x * stairs[-1]))
    assert sample_index(p, u).tolist() == slow


@pytest.mark.parametrize("vocab", [300, 50_257, 128_000])
def test_every_token_gets_its_piece_of_the_line(vocab):
    """Just inside both ends of a token's piece, as float64 has it, float32 draws that token, wherever the piece is much longer than the rounding."""
    z = 2 * torch.randn(1, vocab, generator=dice(vocab))
    exact = z.double().softmax(-1)[0]
    top = exact.cumsum(-1)
    tokens = torch.cat(
        [torch.randint(vocab, (300,), generator=dice(1)), torch.tensor([0, 127, 128, vocab - 1])]
    )
    tokens = tokens[exact[tokens] > 2e-6]
    for u in (top[tokens] - 5e-7, top[tokens] - exact[tokens] + 5e-7):
        assert sample_token(z.expand(len(tokens), -1), u).equal(tokens)
    assert len(tokens) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_shelves_too_tokens_of_probability_zero_are_never_drawn(dtype):
    logits = torch.randn(1, 20_000, generator=dice(6)).to(dtype)
    logits[:, ::2] = -torch.inf
    logits[:, 128:256], logits[:, -128:], logits[:, :128] = (
        -torch.inf,
        -torch.inf,
        -torch.inf,
    )  # whole shelves, the ends among them
    edges = logits.float().softmax(-1).double().cumsum(-1)[0, 1000:3000:7]
    u = torch.cat(
        [
            torch.rand(500, dtype=torch.float64, generator=dice(0)),
            torch.tensor([0.0, 1e-300, 1 - 2**-53, 1.0], dtype=torch.float64),
            edges,
        ]
    )
    assert logits[0, sample_token(logits.expand(len(u), -1), u)].isfinite().all()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=9),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 30),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_as_large_as_they_may_be(lengths, rows, tokens, data):
    "Every cut of the rows is tried: no piece is beyond a limit, and each could not take the next row."
    queries, responses = ([[1] * n[i] for n in lengths] for i in (0, 1))
    r = Rollout(*pad(queries, 0, side="left"), *pad(responses, 0, side="right"))
    r.environment_mask = torch.zeros_like(r.mask)
    r.environment_mask[::2, 0] = r.mask[::2].sum(-1) > 1  # tokens of others count too
    r.mask = r.mask & ~r.environment_mask
    first = data.draw(st.integers(0, len(r)))
    among = data.draw(st.sampled_from([None, slice(first, len(r)), slice(0, first)]))
    c = RLHFConfig(device="cpu", micro_batch_size=rows, micro_batch_tokens=tokens)
    found = [
        p.query_mask.sum(-1).add(p.attention_mask.sum(-1)).tolist()
        for p in micro_batch_slices(r, c, among)
    ]
    sizes = [a + b for a, b in lengths][among or slice(None)]
    assert sum(found, []) == sizes

    def fits(piece):
        return len(piece) <= (rows or 99) and len(piece) * max(piece) <= (tokens or 999)

    left = sizes
    for piece in found:
        left = left[len(piece) :]
        assert piece and (fits(piece) or len(piece) == 1)
        assert not left or not fits([*piece, left[0]])
