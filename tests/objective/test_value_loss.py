"""Value loss and explained variance: against plain Python, finite differences and numbers worked out by hand."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.lesson import running_example
from instruct_goose.objective.value_loss import explained_variance, value_loss

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


RETURNS = f64(
    [[0.612186, 0.81, 1.0], [-0.571192, -1.069315, 0.0]]
)  # derived by hand in test_advantages.py
seeds = st.integers(0, 10**6)
sizes = st.none() | st.floats(0.01, 3)


def batch(seed, B=4, T=6):
    "values, returns, old values and a mask with gaps on any side; no row empty, at least two tokens"
    draw = torch.Generator().manual_seed(seed)
    v, r, old = torch.randn(3, B, T, generator=draw, dtype=torch.float64)
    mask = torch.rand(B, T, generator=draw) < 0.6
    mask[torch.arange(B), torch.randint(T, (B,), generator=draw)] = True
    return v, r, old, mask


def slow_loss(v, r, old, m, clip):
    "one token in floats"
    if not m:
        return 0.0
    near = v if clip is None else old + max(-clip, min(clip, v - old))
    return max(abs(v - r), abs(near - r)) ** 2 / 2


def test_running_example_by_hand():
    ex = running_example()
    # V − R̂ = −.062186, .09, −.3; .271192, .669315, and half their squares
    plain = f64([[0.0019336, 0.00405, 0.045], [0.0367726, 0.2239913, 0.0]])
    close(value_loss(ex.values, RETURNS, ex.mask), plain, atol=1e-7, rtol=0)
    # r2 t1 went from .1 to −.3, twice as far as .2: at −.1 its error is .471192, half the square .1110110. The others:
    # r1 t2 would have .01² at .8, less than .09²; r2 t2 stands on the edge, −.4 = −.2 − .2
    clipped = f64([[0.0019336, 0.00405, 0.045], [0.111011, 0.2239913, 0.0]])
    close(value_loss(ex.values, RETURNS, ex.mask, ex.old_values, 0.2), clipped, atol=1e-7, rtol=0)
    v = ex.values.requires_grad_()
    value_loss(v, RETURNS, ex.mask, ex.old_values, 0.2).sum().backward()
    close(v.grad, f64([[-0.062186, 0.09, -0.3], [0.0, 0.669315, 0.0]]), atol=1e-6, rtol=0)


@given(seeds, sizes)
def test_equals_the_slow_version(seed, clip):
    v, r, old, mask = batch(seed)
    slow = [
        [slow_loss(*x, clip) for x in zip(*row)]
        for row in zip(*(t.tolist() for t in (v, r, old, mask)))
    ]
    close(value_loss(v, r, mask, old, clip), f64(slow), atol=1e-12, rtol=1e-12)


@given(seeds)
def test_explained_variance_against_the_statistics_module(seed):
    v, r, _, mask = batch(seed)
    target = r[mask].tolist()
    error = (r - v)[mask].tolist()
    close(
        explained_variance(v, r, mask),
        f64(1 - statistics.pvariance(error) / statistics.pvariance(target)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", [0.0, 0.1, 0.3, 1e4])
def test_returns_that_do_not_vary_explain_nothing(dtype, level):
    v, _, _, mask = batch(0)
    v = v.to(dtype)
    assert explained_variance(v, torch.full_like(v, level), mask).isnan()
    one = torch.zeros_like(mask)
    one[0, 0] = True
    assert explained_variance(v, v, one).isnan()


def test_bad_input(unchecked):
    v, r, old, mask = batch(4)
    with pytest.raises(ValueError, match="needs old_values"):
        value_loss(v, r, mask, clip=0.2)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            value_loss(v, r, mask, old, bad)
    with unchecked():
        with pytest.raises(ValueError, match="shapes differ.*returns"):
            value_loss(v, torch.zeros(4, 1), mask)
        with pytest.raises(ValueError, match="shapes differ.*values"):
            explained_variance(torch.zeros(4, 1), r, mask)
        with pytest.raises(ValueError, match="old_values"):
            value_loss(v, r, mask, old[:, :1], 0.2)
        with pytest.raises(TypeError, match="mask.bool"):
            value_loss(v, r, mask.int())
        with pytest.raises(ValueError, match="nothing to average"):
            explained_variance(v, r, mask & False)
