import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.objective.masks import (
    AGGREGATES,
    aggregate,
    group_token_counts,
    last_index,
    masked_mean,
    masked_sum,
    masked_var,
    response_mask,
    whiten,
)

# Two responses of three and two tokens. Sums 1.9 and -.1; lengths 3 and 2
X = torch.tensor([[0.5, 0.6, 0.8], [0.1, -0.2, 0.0]], dtype=torch.float64)
M = torch.tensor([[True, True, True], [True, True, False]])
# group_token_mean: the rows belong to groups of 5 and of 4 real tokens, whose other rows are elsewhere. They are 3/5 and
# 2/4 of their groups, so the count is 1.1:  (1.9/5 − .1/4) / 1.1 = .355 / 1.1
GROUPS = torch.tensor([5, 4])
BY_HAND = {
    "token_mean": 1.8 / 5,
    "sequence_mean": (1.9 / 3 - 0.1 / 2) / 2,
    "sequence_sum": 1.8 / 6,
    "group_token_mean": 0.355 / 1.1,
}
MEANS = [how for how in AGGREGATES if how != "group_token_mean"]


def needs(how, counts=GROUPS):
    return {"group_tokens": counts} if how == "group_token_mean" else {}


def near(a, b, atol=1e-12):
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def slow_aggregate(x, m, how, denominator=None, length=None):
    "The three definitions as Python loops over the real tokens."
    rows = [
        [v for v, real in zip(r, k, strict=True) if real]
        for r, k in zip(x.tolist(), m.tolist(), strict=True)
    ]
    if how == "token_mean":
        return sum(map(sum, rows)) / (denominator or sum(map(len, rows)))
    if how == "sequence_mean":
        return sum(sum(r) / len(r) for r in rows if r) / (denominator or len(rows))
    return sum(map(sum, rows)) / (length or x.shape[1]) / (denominator or len(rows))


@st.composite
def batches(draw, rows=(1, 5), time=(1, 6), empty_rows=False):
    "x and a mask with holes on any side."
    B, T = draw(st.integers(*rows)), draw(st.integers(*time))
    x = draw(st.lists(st.floats(-9, 9, width=16), min_size=B * T, max_size=B * T))
    m = torch.tensor(draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))).view(B, T)
    if not empty_rows:
        m[:, draw(st.integers(0, T - 1))] = True
    return torch.tensor(x, dtype=torch.float64).view(B, T), m


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.sets(st.integers(0, 4), max_size=3))
def test_response_mask_is_where_a_loop_would_stop(row, ends):
    kept = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
    assert response_mask(torch.tensor([row]), list(ends)).tolist() == [
        [t < kept for t in range(len(row))]
    ]


def test_response_mask_without_an_end_id(unchecked):
    with unchecked(), pytest.raises(ValueError, match="eos_token"):
        response_mask(torch.tensor([[1]]), None)


@given(batches())
def test_last_index_is_the_largest_true(xm):
    assert last_index(xm[1]).tolist() == [
        max(t for t, real in enumerate(row) if real) for row in xm[1].tolist()
    ]


def test_last_index_names_empty_rows():
    with pytest.raises(ValueError, match=r"rows \[0, 2\]"):
        last_index(torch.tensor([[False], [True], [False]]))
    with pytest.raises(ValueError, match=r"rows \[0, 1\]"):
        last_index(torch.zeros(2, 0, dtype=torch.bool))


@given(batches())
def test_sums_and_means_against_indexing(xm):
    x, m = xm
    near(masked_sum(x, m), x[m].sum(), 1e-9)
    near(masked_mean(x, m), x[m].mean(), 1e-9)
    near(masked_sum(x, m, dim=-1), [r[k].sum() for r, k in zip(x, m, strict=True)], 1e-9)
    near(masked_mean(x, m, dim=1), [r[k].mean() for r, k in zip(x, m, strict=True)], 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_wide(dtype):
    ones, all_ = torch.ones(1, 4099, dtype=dtype), torch.ones(1, 4099, dtype=torch.bool)
    assert masked_sum(ones, all_).item() == 4099  # bfloat16 itself would say 4096
    assert masked_sum(ones, all_).dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert aggregate(ones, all_, "sequence_sum", length=1).item() == 4099
    assert whiten(ones, all_).dtype == dtype


def test_nothing_to_average():
    with pytest.raises(ValueError, match="no True anywhere"):
        masked_mean(X, M & False)
    with pytest.raises(ValueError, match=r"dim 1 at \[\[1\]\]"):
        masked_mean(X, torch.tensor([[True] * 3, [False] * 3]), dim=1)
    assert masked_sum(X, M & False) == 0


@pytest.mark.parametrize("how", AGGREGATES)
def test_aggregate_by_hand(how):
    near(aggregate(X, M, how, **needs(how)), BY_HAND[how])
    near(aggregate(X.float(), M, how, **needs(how)), BY_HAND[how], 1e-6)
    near(aggregate(X.bfloat16(), M, how, **needs(how)), BY_HAND[how], 4e-3)


@given(
    batches(), st.sampled_from(MEANS), st.sampled_from([None, 4, 2.5]), st.sampled_from([None, 8])
)
def test_aggregate_against_loops(xm, how, denominator, length):
    length = length if how == "sequence_sum" else None
    near(
        aggregate(*xm, how, denominator, length),
        slow_aggregate(*xm, how, denominator, length),
        1e-9,
    )


def test_rows_without_tokens():
    half = torch.tensor([[True] * 3, [False] * 3])
    near(aggregate(X, half, "sequence_mean", denominator=2), 1.9 / 3 / 2)
    for how in AGGREGATES:
        with pytest.raises(ValueError, match=r"rows \[1\].*denominator"):
            aggregate(X, half, how, **needs(how))
        near(
            aggregate(X, M & False, how, denominator=5, **needs(how)), 0
        )  # an empty piece of a larger minibatch
        with pytest.raises(ValueError, match="no True in rows"):
            aggregate(X, M & False, how, **needs(how))


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(how="mean"), "token_mean, sequence_mean, sequence_sum"),
        (dict(denominator=0), "denominator=0"),
        (dict(denominator=torch.tensor(-1.0)), "above 0"),
        (dict(how="sequence_sum", length=0), "length=0"),
        (dict(length=5), "length does not belong"),
        (dict(group_tokens=GROUPS), "group_tokens does not belong"),
        (dict(how="group_token_mean"), r"needs group_tokens.*group_token_counts\(mask"),
        (dict(how="group_token_mean", group_tokens=torch.tensor([[5, 4]])), "each of the 2 rows"),
    ],
)
def test_aggregate_refuses(bad, says):
    with pytest.raises(ValueError, match=says):
        aggregate(X, M, **bad)


@st.composite
def grouped(draw):
    "x, mask and G: whole groups, side by side; rows may be empty, groups may not"
    G, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    x, m = draw(batches(rows=(G * groups,) * 2, empty_rows=True))
    m[::G, draw(st.integers(0, m.shape[1] - 1))] = True
    return x, m, G


def slow_group_mean(x, m, G):
    "Python lists: all real tokens of a group in one bag, its mean, and the mean of those"
    bags = [
        [v for r in range(g, g + G) for v, real in zip(x[r], m[r], strict=True) if real]
        for g in range(0, len(x), G)
    ]
    return sum(sum(bag) / len(bag) for bag in bags) / len(bags)


@given(grouped())
def test_group_token_mean_against_loops(batch):
    x, m, G = batch
    counts = group_token_counts(m, G)
    assert counts.tolist() == [
        sum(map(sum, m.tolist()[i // G * G : i // G * G + G])) for i in range(len(m))
    ]
    if m.any(-1).all():
        near(
            aggregate(x, m, "group_token_mean", group_tokens=counts),
            slow_group_mean(x.tolist(), m.tolist(), G),
            1e-9,
        )
    near(
        aggregate(x, m, "group_token_mean", len(m) / G, group_tokens=counts),
        slow_group_mean(x.tolist(), m.tolist(), G),
        1e-9,
    )


def test_group_token_counts_refuses():
    for size in (0, -1, 3):
        with pytest.raises(ValueError, match=f"2 rows do not divide into groups of {size}"):
            group_token_counts(M, size)


@given(batches(rows=(2, 5)))
def test_whiten_against_indexing(xm):
    x, m = xm
    near(masked_var(x, m), x[m].var(), 1e-9)
    near(masked_var(x, m, unbiased=False), x[m].var(correction=0), 1e-9)
    assert (whiten(x, m)[~m] == 0).all() and (whiten(x, m, shift_mean=False)[~m] == 0).all()
    near(whiten(x, m)[m], (x[m] - x[m].mean()) / (x[m].var() + 1e-8).sqrt(), 1e-9)


def test_no_spread():
    near(whiten(torch.full((1, 3), 7.0), torch.ones(1, 3).bool()), [[0, 0, 0]])
    near(whiten(torch.full((1, 3), 7.0), torch.ones(1, 3).bool(), shift_mean=False), [[7, 7, 7]])
    one = torch.tensor([[True, False, False]])
    near(masked_var(X[:1], one, unbiased=False), 0)
    for fn in (masked_var, whiten):
        with pytest.raises(ValueError, match="unbiased"):
            fn(X[:1], one)
        with pytest.raises(ValueError, match="nothing to average"):
            fn(X[:1], one & False)


@pytest.mark.parametrize("fn", [masked_sum, masked_mean, masked_var, whiten, aggregate])
def test_shapes_and_masks_are_checked_without_the_shape_checker(fn, unchecked):
    with unchecked():
        with pytest.raises(ValueError, match=r"\(2, 3\).*'mask': \(2, 1\).*broadcast"):
            fn(X, M[:, :1])
        for wrong in (M.long(), M.float()):
            with pytest.raises(TypeError, match=r"pass mask.bool\(\)"):
                fn(X, wrong)
