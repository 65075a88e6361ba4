"What a rollout holds, and how its rows are dealt out."

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from instruct_goose.config import RLHFConfig
from instruct_goose.core.processes import in_processes
from instruct_goose.models.agent import Agent
from instruct_goose.models.response import response_logprobs
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.rollouts.rollout import (
    PromptBatch,
    Rollout,
    Tokens,
    by_length,
    concat,
    map_shares,
    micro_batch_slices,
)
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
    sizes = [len(batch) for batch in deal]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sorted(text for batch in deal for text in batch.texts) == sorted(make().texts)
    for batch in deal:
        for i, text in enumerate(batch.texts):
            row = int(text)
            assert (batch.query_ids[i], batch.response_ids[i]) == (row, 10 * row)
            assert (batch.scores[i], batch.token_scores[i]) == (row, row / 2)
            assert batch.baseline[i] == row / 4
        assert batch.ended is None
    again = make().minibatches(parts, dice())
    assert [batch.texts for batch in again] == [batch.texts for batch in deal]


def test_rows_are_taken_by_number_slice_list_and_mask():
    rollout = make()
    assert len(rollout[1]) == 1 and rollout[-1].texts == ["6"]
    assert rollout[5:].texts == ["5", "6"]
    assert rollout[[2, 0]].response_ids.tolist() == [[20], [0]]
    assert rollout[torch.arange(7) % 3 == 0].texts == ["0", "3", "6"]
    assert rollout[[2, 0]].ended is None


def rows_of(n):
    "n rows; row i has min(i + 1, 4) sampled tokens."
    mask = torch.arange(4) < torch.arange(1, n + 1).clamp(max=4)[:, None]
    return Rollout(torch.zeros(n, 2).long(), torch.ones(n, 2).bool(), mask.long(), mask)


def test_rollouts_are_concatenated_at_their_padding():
    short, long = rows_of(1), rows_of(2)
    short.response_ids = short.response_ids[:, :1]
    short.mask = short.mask[:, :1]
    long.query_ids = torch.tensor([[5, 6, 7]] * 2)
    long.query_mask = torch.ones(2, 3).bool()
    short.texts, long.texts = ["x"], ["y", "z"]
    short.columns, long.columns = {"n": [1]}, {"n": [2, 3]}

    both = concat([short, long], pad_id=8)

    assert both.query_mask.tolist() == [[False, True, True], [True] * 3, [True] * 3]
    assert both.response_ids.tolist() == [[1, 8, 8, 8], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert both.texts == ["x", "y", "z"]
    assert both.columns == {"n": [1, 2, 3]}
    assert both.sampled_logprobs is None


def columns_by_row(rollout):
    "Which rows this process computes; `late` is known only to the process of the last row."
    lengths = rollout.mask.sum(-1)
    is_last = bool((lengths == 4).any())
    return {"lengths": lengths, "late": lengths if is_last else None, "none": None}


def map_four_rows():
    return map_shares(columns_by_row, rows_of(4)), map_shares(lambda r: {"n": r.mask}, rows_of(1))


def test_every_process_gets_the_columns_that_one_process_computes():
    alone = map_shares(columns_by_row, rows_of(4))
    for columns, one_row in in_processes(2, map_four_rows):
        assert columns["lengths"].tolist() == alone["lengths"].tolist() == [1, 2, 3, 4]
        assert columns["late"].tolist() == [0, 0, 3, 4]  # the first process knows none
        assert columns["none"] is None
        assert one_row["n"].shape == (1, 4)  # one of the processes has no row at all


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=9),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 30),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_micro_batches_are_as_large_as_they_may_be(lengths, max_rows, max_tokens, data):
    "No micro-batch is beyond a limit, and none could have taken the next row too."
    r = Rollout(
        *pad([[1] * query for query, _ in lengths], 0, side="left"),
        *pad([[1] * response for _, response in lengths], 0, side="right"),
    )
    r.environment_mask = torch.zeros_like(r.mask)
    r.environment_mask[::2, 0] = r.mask[::2].sum(-1) > 1  # tokens of others count too
    r.mask = r.mask & ~r.environment_mask
    first = data.draw(st.integers(0, len(r)))
    among = data.draw(st.sampled_from([None, slice(first, len(r)), slice(0, first)]))
    config = RLHFConfig(device="cpu", micro_batch_size=max_rows, micro_batch_tokens=max_tokens)

    cuts = list(micro_batch_slices(r, config, among))

    tokens = [query + response for query, response in lengths]

    def fits(sizes):
        in_rows = max_rows is None or len(sizes) <= max_rows
        in_tokens = max_tokens is None or len(sizes) * max(sizes) <= max_tokens
        return in_rows and in_tokens

    covered = [row for cut in cuts for row in range(len(r))[cut]]
    assert covered == list(range(len(r))[among or slice(None)])
    for cut, following in itertools.zip_longest(cuts, cuts[1:]):
        sizes = tokens[cut]
        assert fits(sizes) or len(sizes) == 1
        assert following is None or not fits([*sizes, tokens[following.start]])


def test_micro_batches_of_like_length_count_what_an_environment_wrote():
    one_token = torch.ones(4, 1, dtype=torch.long)
    slots = torch.arange(9).expand(4, 9)
    sampled = slots < torch.tensor([[1], [2], [3], [4]])
    read = slots < torch.tensor([[9], [2], [8], [4]])  # the first and the third asked a tool
    rollout = Rollout(one_token, one_token.bool(), slots.clone(), sampled, read & ~sampled)

    order = by_length(rollout)

    assert order.tolist() == [1, 3, 2, 0]
    config = RLHFConfig(micro_batch_tokens=20)
    sizes = [rows.stop - rows.start for rows in micro_batch_slices(rollout[order], config)]
    assert sizes == [2, 2]  # 2 rows of 5 slots, and 2 of 10
