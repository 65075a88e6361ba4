"""Rows beyond a limit. Oracles: a cut found by trying every pair of lengths; rows made by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.models.long_rows import RowsTooLong, cut_row, fit_row, fit_rows, row_length


def best_cut(prompt, answer, limit):
    "Slow: the longest row that fits in which the prompt gives way first, down to half the limit."
    fits = []
    for p, a in itertools.product(range(prompt + 1), range(answer + 1)):
        if p + a <= limit and p >= min(prompt, max(limit // 2, 1)):
            fits.append((p + a, a, p))
    return max(fits)[::-1][:2]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_a_prompt_loses_its_beginning_and_an_answer_its_end(n_prompt, n_answer, limit):
    prompt = list(range(n_prompt))
    answer = list(range(100, 100 + n_answer))
    [(kept, learnt)] = cut_row([(prompt, answer)], limit)
    assert (len(kept), len(learnt)) == best_cut(n_prompt, n_answer, limit)
    assert kept == prompt[n_prompt - len(kept) :]
    assert learnt == answer[: len(learnt)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(2, 9))
def test_both_sides_of_a_pair_keep_the_same_prompt(n_prompt, n_chosen, n_rejected, limit):
    prompt = list(range(n_prompt))
    row = [(prompt, [50] * n_chosen), (prompt, [60] * n_rejected)]
    (one, chosen), (other, rejected) = cut_row(row, limit)
    assert one == other
    assert len(one) + max(len(chosen), len(rejected)) <= limit


def test_a_row_that_fits_stays_as_it_is():
    row = [([1, 2], [3])]
    for how in ("refuse", "cut", "drop"):
        assert fit_row(row, 3, how) == row
        assert fit_row(row, None, how) == row


def test_a_pair_that_is_a_tie_after_the_cut_is_left_out():
    pair = [([1], [2, 2, 2, 3]), ([1], [2, 2, 2, 4])]
    assert fit_row(pair, 4, "cut") is None
    assert fit_row(pair, 5, "cut") == pair


def test_long_rows_are_refused_by_the_first_with_the_ways_out():
    rows = [[([1], [2])], [([1] * 3, [2] * 3)], [([1] * 9, [])]]
    with pytest.raises(
        ValueError, match="2 of 3 texts are beyond the room of 4 tokens: text 1 has "
    ):
        fit_rows(rows, 4, "refuse", "text", "the room")
    with pytest.raises(
        ValueError, match="'drop' would leave none: shorten .* set long_rows='cut'$"
    ):
        fit_rows(rows[1:], 4, "drop")
    ties = [[([1], [2, 2, 3]), ([1], [2, 2, 4])]]
    with pytest.raises(ValueError, match="1 of 1 rows .*'cut' would leave none: shorten them$"):
        fit_rows(ties, 3, "cut")


def test_the_length_of_a_row_is_that_of_its_longest_side():
    assert row_length([([1, 2], [3])]) == 3
    assert row_length([([1], [2]), ([1, 1], [2, 2]), ([1], [])]) == 4


@pytest.mark.parametrize("limit", [None, 12, 6])
def test_rows_that_all_fit_stay_as_they_are_and_nothing_is_said(limit, recwarn):
    rows = [[([1], [2])], [([1] * 3, [2] * 3)]]
    for how in ("refuse", "cut", "drop"):
        assert fit_rows(rows, limit, how) == rows
    assert not recwarn


@pytest.mark.parametrize(
    "how, left, told",
    [
        ("drop", [[([1], [2])], None], "1 left out"),
        ("cut", [[([1], [2])], [([1] * 2, [2] * 2)]], "1 cut"),
    ],
)
def test_what_is_cut_or_left_out_is_told(how, left, told):
    rows = [[([1], [2])], [([1] * 3, [2] * 3)]]
    with pytest.warns(RowsTooLong, match=f"row 1 has 6 tokens. {told}$"):
        assert fit_rows(rows, 4, how) == left


def test_pairs_may_be_cut_and_left_out_at_once():
    tie = [([1], [2, 2, 2, 3]), ([1], [2, 2, 2, 4])]
    other = [([1], [2, 2, 2, 3]), ([1], [5])]
    with pytest.warns(RowsTooLong, match="3 of 3 pairs .* 2 cut and 1 left out$"):
        fitted = fit_rows([other, tie, other], 4, "cut", "pair")
    assert fitted == [[([1], [2, 2, 2]), ([1], [5])], None, [([1], [2, 2, 2]), ([1], [5])]]
