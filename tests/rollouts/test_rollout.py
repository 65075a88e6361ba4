"What a rollout holds, and how its rows are dealt out."

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.rollouts.rollout import PromptBatch, Rollout, Tokens, micro_batch_slices
from instruct_goose.rollouts.sampler import PolicySampler


def dice(seed=5):
    return torch.Generator().manual_seed(seed)


def test_a_rollout_holds_texts_and_what_the_sampler_saw():
    words = [f"w{i}" for i in range(5)]
    tokenizer = word_tokenizer(words, 12)  # 4 special tokens and 5 words: the model's 9
    model = tiny()
    prompts = ["w0 w3", "w1", ""]
    ids, mask = pad([tokenizer(p)["input_ids"] for p in prompts], 0, side="right")
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
        token_scores=rows[:, None] / 2,
        baseline=rows / 4,
    )


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_minibatches_deal_every_row_once_and_keep_it_whole(parts):
    deal = list(make().minibatches(parts, dice()))
    assert len(deal) == parts and max(map(len, deal)) - min(map(len, deal)) <= 1
    assert sorted(t for b in deal for t in b.texts) == sorted(make().texts)
    for b in deal:
        for i, text in enumerate(b.texts):
            k = int(text)
            assert (b.query_ids[i], b.response_ids[i], b.scores[i], b.token_scores[i]) == (
                k,
                10 * k,
                k,
                k / 2,
            )
            assert b.baseline[i] == k / 4
        assert b.ended is None
    assert [b.texts for b in make().minibatches(parts, dice())] == [b.texts for b in deal]


def test_rows_are_taken_by_number_slice_list_and_mask():
    rollout = make()
    assert len(rollout[1]) == 1 and rollout[-1].texts == ["6"]
    assert rollout[5:].texts == ["5", "6"]
    assert rollout[[2, 0]].response_ids.tolist() == [[20], [0]]
    assert rollout[torch.arange(7) % 3 == 0].texts == ["0", "3", "6"]
    assert rollout[[2, 0]].ended is None


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
        r[rows].query_mask.sum(-1).add(r[rows].attention_mask.sum(-1)).tolist()
        for rows in micro_batch_slices(r, c, among)
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
