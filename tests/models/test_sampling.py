"The oracle: one unpadded row at a time, the whole text through the model for every token."

from itertools import accumulate

import pytest
import torch
from row_alone import CONFIGS, EOS, FAMILIES, V, tiny

from instruct_goose.models import decoding
from instruct_goose.models.sampling import (
    Column,
    TokenChoice,
    apply_stops,
    choose_tokens,
    draw_uniforms,
    inverse_cdf,
    keep_order,
    left_padded,
    probabilities,
    sample,
    sample_index,
    sample_token,
    scatter_columns,
    top_k_filter,
    write_columns,
)
from instruct_goose.models.tokens import pad
from instruct_goose.objective.masks import response_mask

PAD = 0
ENDS = [EOS, 3, 5]
QUERIES = [[1, 5, 7], [1], [1, 4, 6, 6, 8], [1, 3]]  # an end token in a query ends nothing
LONGEST = 9  # with the longest query, the models' context of 14


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def one_by_one(model, query, uniforms, eos, temperature=1.0):
    ids = list(query)
    response = []
    model.eval()
    for u in uniforms.tolist():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        p = (logits / temperature).softmax(-1).tolist()
        token = 0
        height = p[0]
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
    model = tiny(name, dtype=torch.float64 if name in FAMILIES else torch.float32).train()
    temperature = 1.0 if pad_id == PAD else 0.8
    ids, mask = pad(QUERIES, 9, side=side)  # 9 is a token like any other: nobody may read it
    response, written, logprobs = sample(
        model, ids, mask, LONGEST, ENDS, pad_id, temperature, generator(), with_logprobs=True
    )
    assert all(module.training for module in model.modules())
    u = torch.rand(LONGEST, len(QUERIES), dtype=torch.float64, generator=generator())
    lengths = set()
    for i, query in enumerate(QUERIES):
        expected = one_by_one(model, query, u[:, i], ENDS, temperature)
        assert response[i][written[i]].tolist() == expected
        assert (response[i][~written[i]] == pad_id).all()
        assert (logprobs[i][~written[i]] == 0).all()
        lengths.add(len(expected))
        full = (model(torch.tensor([query + expected])).logits[0] / temperature).log_softmax(-1)
        slow = torch.stack([full[len(query) - 1 + t, token] for t, token in enumerate(expected)])
        tolerance = 1e-9 if name in FAMILIES else 1e-5
        torch.testing.assert_close(logprobs[i][written[i]], slow, atol=tolerance, rtol=0)
    assert len(lengths) > 1, "all rows ended together: this seed tests nothing"
    assert written.equal(response_mask(response, ENDS)) or pad_id == EOS
    assert response.shape[1] == max(lengths)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom: no position ids"])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("with_stops", [False, True])
def test_how_seldom_ended_rows_are_looked_for_changes_no_response(name, greedy, with_stops):
    model = tiny(name, dtype=torch.float32).eval()
    ids, mask = pad(QUERIES * 3, PAD, side="left")
    ends = torch.tensor(ENDS)

    @torch.no_grad()
    def write(steps_between_checks, limit):
        newest = {}

        def repeats(rows, tokens):  # who draws the same token twice in a row stops
            pairs = list(zip(rows.tolist(), tokens.tolist(), strict=True))
            ended = [newest.get(row) == token for row, token in pairs]
            newest.update(pairs)
            return torch.tensor(ended)

        choice = TokenChoice(greedy=greedy, generator=generator())
        stops = repeats if with_stops else None
        columns = write_columns(model, ids, mask, limit, ends, choice, stops, steps_between_checks)
        return scatter_columns(columns, len(ids), PAD)

    for limit in (1, 5, LONGEST):
        response, written, logprobs = write(1, limit)
        for steps_between_checks in (2, 4, 16):
            other = write(steps_between_checks, limit)
            assert other[0].equal(response) and other[1].equal(written)
            torch.testing.assert_close(other[2], logprobs, atol=1e-5, rtol=0)


def test_only_the_given_generator_is_used():
    model = tiny("gpt2")
    ids, mask = pad(QUERIES, PAD, side="left")
    state = torch.get_rng_state()
    first = sample(model, ids, mask, 8, EOS, PAD, generator=generator())[0]
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(99)
    assert sample(model, ids, mask, 8, EOS, PAD, generator=generator())[0].equal(first)


def test_without_a_generator_torchs_global_one_is_used():
    model = tiny("gpt2")
    ids, mask = pad(QUERIES, PAD, side="left")
    torch.manual_seed(99)
    first = sample(model, ids, mask, 8, EOS, PAD)[0]
    torch.manual_seed(99)
    assert sample(model, ids, mask, 8, EOS, PAD)[0].equal(first)


def test_greedy_text_draws_no_random_number():
    model = tiny("gpt2")
    ids, mask = pad(QUERIES, PAD, side="left")
    state = torch.get_rng_state()
    unused = generator()
    sample(model, ids, mask, 8, EOS, PAD, greedy=True)
    sample(model, ids, mask, 8, EOS, PAD, generator=unused, greedy=True)
    assert torch.get_rng_state().equal(state)
    assert unused.get_state().equal(generator().get_state())


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = tiny("gpt2")
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    ids, mask = pad(QUERIES, PAD, side="left")
    sample(model, ids, mask, 3, EOS, PAD)
    assert [module.training for module in model.modules()] == before
    model.lm_head.weight.data[3] = float("nan")
    for greedy in (False, True):
        with pytest.raises(FloatingPointError, match="NaN or infinite in rows"):
            sample(model, ids, mask, 3, EOS, PAD, greedy=greedy)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_is_computed_for_rows_that_have_ended(name, monkeypatch):
    model = tiny(name, dtype=torch.float32)
    rows_per_step = []
    one_step = decoding.OwnSteps.__call__

    def counted(self, token):
        rows_per_step.append(len(token))
        return one_step(self, token)

    monkeypatch.setattr(decoding.OwnSteps, "__call__", counted)
    ids, mask = pad(QUERIES * 3, PAD, side="left")
    _, written = sample(model, ids, mask, LONGEST, ENDS, PAD, generator=generator(3))
    assert rows_per_step[0] == len(ids)  # the last column of the queries, again
    assert rows_per_step[1:] == written.sum(0).tolist()[1:]
    assert rows_per_step[-1] < rows_per_step[0]


EMPTY_ROW = pad(QUERIES, PAD, side="left")[1]
EMPTY_ROW[2] = False
REFUSALS = {
    "no query token in row \\[2\\]": dict(query_mask=EMPTY_ROW),
    "differ in shape": dict(query_ids=torch.ones(4, 4, dtype=torch.int64)),
    "max_new_tokens is 0": dict(max_new_tokens=0),
    "query 2 has 5 tokens, which with max_new_tokens=10 is beyond the model's context of 14": dict(
        max_new_tokens=10
    ),
    "token 4 of query 0 is 14, but the model's vocabulary ends at 12": dict(
        query_ids=pad(QUERIES, PAD, side="left")[0] + 7
    ),
    "temperature is 0": dict(temperature=0.0),
    "temperature is nan": dict(temperature=float("nan")),
    "temperature is inf": dict(temperature=float("inf")),
    "top_k is 0": dict(top_k=0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_name_the_row_and_the_setting(message, unchecked):
    ids, mask = pad(QUERIES, PAD, side="left")
    good = dict(query_ids=ids, query_mask=mask, max_new_tokens=4, eos_id=EOS, pad_id=PAD)
    with unchecked(), pytest.raises(ValueError, match=message):
        sample(tiny("gpt2"), **(good | REFUSALS[message]))


def test_a_response_may_fill_the_context_exactly():
    ids, mask = pad(QUERIES, PAD, side="left")
    response, _ = sample(tiny("gpt2"), ids, mask, 9, None, PAD, generator=generator())
    assert response.shape[1] == 9


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 384, 1000, 5003])
def test_blocks_choose_what_one_running_sum_chooses(vocab):
    p = torch.rand(40, vocab, generator=generator(vocab), dtype=torch.float64) ** 4
    p[:, torch.rand(vocab, generator=generator(1)) < 0.3] = 0
    p[:, vocab // 2] = 0.1
    u = torch.rand(40, generator=generator(2), dtype=torch.float64)
    expected = []
    for row, x in zip(p.tolist(), u.tolist(), strict=True):
        heights = list(accumulate(row))
        height = x * heights[-1]
        expected.append(sum(h <= height for h in heights))
    assert sample_index(p, u).tolist() == expected


@pytest.mark.parametrize("vocab", [300, 50_257, 128_000])
def test_every_token_gets_its_piece_of_the_line(vocab):
    """Just inside both ends of a token's piece, as float64 has it, float32 draws that token,
    wherever the piece is much longer than the rounding."""
    z = 2 * torch.randn(1, vocab, generator=generator(vocab))
    exact = z.double().softmax(-1)[0]
    top = exact.cumsum(-1)
    some = torch.randint(vocab, (300,), generator=generator(1))
    tokens = torch.cat([some, torch.tensor([0, 127, 128, vocab - 1])])
    tokens = tokens[exact[tokens] > 2e-6]
    for u in (top[tokens] - 5e-7, top[tokens] - exact[tokens] + 5e-7):
        assert sample_token(z.expand(len(tokens), -1), u).equal(tokens)
    assert len(tokens) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_in_blocks_too_tokens_of_probability_zero_are_never_drawn(dtype):
    logits = torch.randn(1, 20_000, generator=generator(6)).to(dtype)
    logits[:, ::2] = -torch.inf
    for whole_block in (slice(0, 128), slice(128, 256), slice(-128, None)):
        logits[:, whole_block] = -torch.inf
    edges = logits.float().softmax(-1).double().cumsum(-1)[0, 1000:3000:7]
    extremes = torch.tensor([0.0, 1e-300, 1 - 2**-53, 1.0], dtype=torch.float64)
    random = torch.rand(500, dtype=torch.float64, generator=generator(0))
    u = torch.cat([random, extremes, edges])
    assert logits[0, sample_token(logits.expand(len(u), -1), u)].isfinite().all()


def test_a_number_falls_into_a_step_and_as_far_along_in_it():
    "Steps of 2, 0, 3 and 5 of 10: the step of height 0 is never found, the last one holds u = 1."
    heights = torch.tensor([[2.0, 0.0, 3.0, 5.0]])
    found = {
        0.0: (0, 0.0),
        0.1: (0, 0.5),
        0.2: (2, 0.0),
        0.35: (2, 0.5),
        0.9: (3, 0.8),
        1.0: (3, 1),
    }
    for p in (heights, heights / 10):
        for u, (step, along) in found.items():
            at, part = inverse_cdf(p, torch.tensor([[u]], dtype=torch.float64))
            assert at.item() == step
            assert part.item() == pytest.approx(along, abs=1e-6)


@pytest.mark.parametrize(
    "top_k, kept",
    [
        (None, [[0.1, 0.4, 0.2, 0.3], [0.2, 0.2, 0.5, 0.1]]),
        (1, [[0, 0.4, 0, 0], [0, 0, 0.5, 0]]),
        (2, [[0, 0.4, 0, 0.3], [0.2, 0.2, 0.5, 0]]),  # what is as likely as the second stays
        (3, [[0, 0.4, 0.2, 0.3], [0.2, 0.2, 0.5, 0]]),
        (9, [[0.1, 0.4, 0.2, 0.3], [0.2, 0.2, 0.5, 0.1]]),
    ],
)
def test_of_the_likeliest_tokens_those_as_likely_as_the_kth_stay(top_k, kept):
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.2, 0.2, 0.5, 0.1]])
    assert top_k_filter(p, top_k).equal(torch.tensor(kept))


def test_top_k_changes_what_is_drawn_and_not_its_probability():
    model = tiny("gpt2")
    ids, mask = pad(QUERIES, PAD, side="left")
    texts, _, logprobs = sample(
        model, ids, mask, 8, None, PAD, 0.7, generator(), top_k=2, with_logprobs=True
    )
    ranks = []
    for query, text, found in zip(QUERIES, texts.tolist(), logprobs, strict=True):
        whole = (model.eval()(torch.tensor([query + text])).logits[0] / 0.7).log_softmax(-1)
        before = whole[len(query) - 1 : -1]
        drawn = before.gather(-1, torch.tensor(text)[:, None])
        torch.testing.assert_close(found, drawn[:, 0], atol=1e-9, rtol=0)
        ranks += (before > drawn).sum(-1).tolist()
    assert {*ranks} == {0, 1}
    likeliest = sample(model, ids, mask, 8, None, PAD, greedy=True)[0]
    assert sample(model, ids, mask, 8, None, PAD, top_k=1)[0].equal(likeliest)


def test_probabilities_are_the_softmax_of_the_logits_over_the_temperature():
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    weights = torch.tensor([1.0, 2.718281828**4, 2.718281828**-2])
    torch.testing.assert_close(probabilities(logits, 0.5)[0], weights / weights.sum())
    assert probabilities(logits.bfloat16()).dtype == torch.float32
    assert probabilities(logits.double()).dtype == torch.float64


def test_a_token_is_chosen_by_its_number_or_as_the_likeliest():
    logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).log()
    tokens, logprobs = choose_tokens(logits, TokenChoice(), torch.tensor([0.2, 0.99]))
    assert tokens.tolist() == [0, 0]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 1.0]))
    tokens, logprobs = choose_tokens(logits, TokenChoice(temperature=0.5, greedy=True), None)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.9, 1.0]))  # 3² of 1² + 3²


def test_random_numbers_of_several_steps_are_those_of_one_after_another():
    drawn = draw_uniforms(3, 5, generator(), torch.device("cpu"))
    one_by_one = generator()
    for row in drawn:
        assert row.equal(torch.rand(5, dtype=torch.float64, generator=one_by_one))


def test_what_a_row_writes_after_its_stop_is_taken_out():
    rows = torch.tensor([7, 2, 4])
    before = torch.tensor([True, True, False])  # row 4 of the batch had ended
    columns = []
    for tokens in ([5, 1, 1], [1, 5, 1], [1, 1, 1]):
        columns.append(Column(rows, torch.tensor(tokens), torch.zeros(3), before))
    asked = []

    def at_five(rows, tokens):
        asked.append(rows.tolist())
        return tokens == 5

    kept, goes_on = apply_stops(columns, at_five)
    assert [column.written.tolist() for column in kept] == [
        [True, True, False],
        [False, True, False],
        [False, False, False],
    ]
    assert goes_on.tolist() == [False, False, True]
    assert asked == [[7, 2, 4]] * 3


def test_a_stop_ends_a_response_as_an_end_token_does():
    "The oracle writes the whole response, and looks for its first two tokens in rising order."
    model = tiny("gpt2")
    ids, mask = pad(QUERIES, PAD, side="left")
    whole = sample(model, ids, mask, LONGEST, None, PAD, generator=generator())[0].tolist()
    newest = {}

    def rises(rows, tokens):
        ended = []
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            ended.append(newest.get(row, V) < token)
            newest[row] = token
        return torch.tensor(ended)

    found, written = sample(
        model, ids, mask, LONGEST, None, PAD, generator=generator(), stops=rises
    )
    lengths = []
    for row, text in enumerate(whole):
        rising = [t + 1 for t in range(1, LONGEST) if text[t - 1] < text[t]]
        lengths.append(min(rising, default=LONGEST))
        assert found[row][written[row]].tolist() == text[: lengths[row]]
    assert min(lengths) < max(lengths)


@pytest.mark.parametrize(
    "still_writing, order",
    [
        ("111", [0, 1, 2]),
        ("110", [0, 1]),
        ("011", [2, 1]),
        ("0101", [3, 1]),
        ("10011", [0, 4, 3]),
        ("000", []),
    ],
)
def test_the_last_rows_take_the_places_of_those_that_ended(still_writing, order):
    found = keep_order(torch.tensor([x == "1" for x in still_writing]))
    assert sorted(found.tolist()) == sorted(order)
    for place, row in enumerate(found.tolist()):  # who stands among those that remain stays there
        assert row == place or row >= len(order)


@pytest.mark.parametrize(
    "steps_between_checks, sizes, orders",
    [(1, [8, 7, 6, 6, 5, 4, 4, 2, 2], [7, 6, 5, 4, 2]), (3, [8] * 6 + [4] * 3, [4])],
)
def test_rows_leave_the_batch_at_once_or_where_a_graph_is_worth_it(
    steps_between_checks, sizes, orders, monkeypatch
):
    "With several steps between two checks, as on a GPU, only where half of the rows have ended."
    lengths = torch.tensor([1, 2, 4, 5, 7, 7, 9, 9])
    written = torch.zeros(8, dtype=torch.long)
    kept = []
    keep = decoding.OwnSteps.keep

    def at_its_length(rows, tokens):
        written[rows] += 1
        return written[rows] >= lengths[rows]

    def recorded(self, order):
        kept.append(len(order))
        keep(self, order)

    monkeypatch.setattr(decoding.OwnSteps, "keep", recorded)
    ids, mask = pad(QUERIES * 2, PAD, side="left")
    choice = TokenChoice(generator=generator())
    no_ends = torch.tensor([], dtype=torch.long)
    with torch.no_grad():
        columns = write_columns(
            tiny("gpt2", dtype=torch.float32).eval(),
            *(ids, mask, LONGEST, no_ends, choice, at_its_length, steps_between_checks),
        )
    assert [len(column.rows) for column in columns] == sizes
    assert kept == orders
    assert scatter_columns(columns, 8, PAD)[1].sum(-1).equal(lengths)


def test_columns_of_fewer_and_fewer_rows_become_one_table():
    columns = []
    for rows, tokens, written in (
        ([0, 1, 2], [5, 6, 7], [True, True, True]),
        ([0, 2], [8, 9], [True, False]),  # row 2 had ended, and was written on
        ([0], [4], [False]),
    ):
        logprobs = -torch.tensor(tokens).double()
        columns.append(
            Column(torch.tensor(rows), torch.tensor(tokens), logprobs, torch.tensor(written))
        )
    ids, mask, logprobs = scatter_columns(columns, 3, pad_id=3)
    assert ids.tolist() == [[5, 8], [6, 3], [7, 3]]
    assert mask.tolist() == [[True, True], [True, False], [True, False]]
    assert logprobs.tolist() == [[-5, -8], [-6, 0], [-7, 0]]


def test_queries_are_moved_to_the_right_and_cut_to_the_longest():
    ids = torch.tensor([[9, 4, 9, 5, 9], [9, 9, 9, 6, 9]])
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 1, 0]])
    for padding in (9, -100, 10**6):  # which no embedding need have
        found, found_mask = left_padded(tiny("gpt2"), ids.where(mask == 1, padding), mask)
        assert found.tolist() == [[4, 5], [0, 6]]
        assert found_mask.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize("token, is_known", [(-1, False), (0, True), (V - 1, True), (V, False)])
def test_every_token_of_the_vocabulary_may_stand_in_a_query(token, is_known):
    ids, mask = torch.tensor([[token, 5]]), torch.tensor([[1, 1]])
    if is_known:
        found, _ = left_padded(tiny("gpt2"), ids, mask)
        assert found.tolist() == [[token, 5]]
    else:
        with pytest.raises(ValueError, match=f"token 0 of query 0 is {token}, but the model's"):
            left_padded(tiny("gpt2"), ids, mask)
