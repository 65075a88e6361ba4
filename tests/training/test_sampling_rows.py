"""What the sampler adds to a decode step: dice that know no neighbours, rows that leave, float32 on shelves."""
from itertools import accumulate

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from instruct_goose.models import decoding as decode
from instruct_goose.models.tokens import pad
from instruct_goose.training.rollout import draw, pick, sample

V, EOS, PAD = 30, 2, 0
BASE = dict(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=60, bos_token_id=1, eos_token_id=EOS)
CONFIGS = {"gpt2": lambda: transformers.GPT2Config(**BASE), "llama": lambda: transformers.LlamaConfig(**BASE, intermediate_size=24, num_key_value_heads=2)}
families = pytest.mark.parametrize("name", CONFIGS)


def tiny(name, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.3)
    return model


def seeded(seed=0): return torch.Generator().manual_seed(seed)


def queries(n=12):
    g = seeded(1)
    return [torch.randint(3, V, (int(k),), generator=g).tolist() for k in torch.randint(1, 9, (n,), generator=g)]


@families
def test_nothing_is_computed_for_rows_that_have_ended(name, monkeypatch):
    model, counts = tiny(name), []
    plain = decode.OwnSteps.__call__
    monkeypatch.setattr(decode.OwnSteps, "__call__", lambda self, token: counts.append(len(token)) or plain(self, token))
    ids, mask = pad(queries(), PAD, side="left")
    _, written = sample(model, ids, mask, 25, list(range(2, 8)), PAD, generator=seeded(3))
    assert counts[0] == len(ids)  # the last column of the queries, again
    assert counts[1:] == written.sum(0).tolist()[1:] and counts[-1] < counts[0]


# --- dice -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 384, 1000, 5003])
def test_shelves_choose_what_one_staircase_chooses(vocab):
    p = torch.rand(40, vocab, generator=seeded(vocab), dtype=torch.float64)**4
    p[:, torch.rand(vocab, generator=seeded(1)) < .3] = 0
    p[:, vocab // 2] = .1
    u = torch.rand(40, generator=seeded(2), dtype=torch.float64)
    slow = []
    for row, x in zip(p.tolist(), u.tolist(), strict=True):
        stairs = list(accumulate(row))
        slow.append(next(v for v, height in enumerate(stairs) if height > x * stairs[-1]))
    assert pick(p, u).tolist() == slow


@pytest.mark.parametrize("vocab", [300, 50_257, 128_000])
def test_every_token_gets_its_piece_of_the_line(vocab):
    """Just inside both ends of a token's piece, as float64 has it, float32 draws that token, wherever the piece is much longer than the rounding."""
    z = 2 * torch.randn(1, vocab, generator=seeded(vocab))
    exact = z.double().softmax(-1)[0]
    top = exact.cumsum(-1)
    tokens = torch.cat([torch.randint(vocab, (300,), generator=seeded(1)), torch.tensor([0, 127, 128, vocab - 1])])
    tokens = tokens[exact[tokens] > 2e-6]
    for u in (top[tokens] - 5e-7, top[tokens] - exact[tokens] + 5e-7):
        assert draw(z.expand(len(tokens), -1), u).equal(tokens)
    assert len(tokens) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_shelves_too_tokens_of_probability_zero_are_never_drawn(dtype):
    logits = torch.randn(1, 20_000, generator=seeded(6)).to(dtype)
    logits[:, ::2] = -torch.inf
    logits[:, 128:256], logits[:, -128:], logits[:, :128] = -torch.inf, -torch.inf, -torch.inf  # whole shelves, the ends among them
    edges = logits.float().softmax(-1).double().cumsum(-1)[0, 1000:3000:7]
    u = torch.cat([torch.rand(500, dtype=torch.float64, generator=seeded()), torch.tensor([0., 1e-300, 1 - 2**-53, 1.], dtype=torch.float64), edges])
    assert logits[0, draw(logits.expand(len(u), -1), u)].isfinite().all()


def test_bad_rows_are_named():
    z = torch.randn(4, 700, generator=seeded())
    for bad in (float("nan"), float("inf")):
        wrong = z.clone(); wrong[1, 600] = bad; wrong[3, 5] = bad
        with pytest.raises(FloatingPointError, match="rows \\[1, 3\\]"): draw(wrong, torch.rand(4))
    none = z.clone(); none[2] = -torch.inf
    with pytest.raises(FloatingPointError, match="rows \\[2\\]"): draw(none, torch.rand(4))
