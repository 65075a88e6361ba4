"""The same seed gives the same draws as torch, call after call."""

import page_tensors as page
import pytest
import torch

DRAWS = [
    lambda t, g: t.rand(3, 5, generator=g),
    lambda t, g: t.rand(7, generator=g, dtype=t.float64),
    lambda t, g: t.randn(5, generator=g),  # one by one, in pairs
    lambda t, g: t.randn(4, generator=g, dtype=t.float64),
    lambda t, g: t.randn(37, generator=g),  # sixteen at a time
    lambda t, g: t.randn(2, 16, generator=g, dtype=t.float64),
    lambda t, g: t.randint(10, (6,), generator=g),
    lambda t, g: t.randint(-5, 2**29, (6,), generator=g),
    lambda t, g: t.randint(2**40, (6,), generator=g),
    lambda t, g: t.randperm(9, generator=g),
    lambda t, g: t.bernoulli(t.full((9,), 0.3), generator=g),
    lambda t, g: t.multinomial(t.tensor([0.2, 0.5, 0.3]), 50, replacement=True, generator=g),
    lambda t, g: t.multinomial(t.tensor([[1.0, 0, 3], [2, 2, 2]]), 2, generator=g),
    lambda t, g: t.multinomial(t.tensor([0.2, 0.8]).double(), 1, replacement=True, generator=g),
]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**33 + 5])
def test_a_sequence_of_draws(seed):
    ours = torch.Generator().manual_seed(seed)
    theirs = page.Generator().manual_seed(seed)
    for _ in range(2):
        for i, draw in enumerate(DRAWS):
            expected = draw(torch, ours)
            found = draw(page, theirs)
            assert str(expected.dtype) == str(found.dtype), i
            assert tuple(expected.shape) == tuple(found.shape), i
            numbers = expected.flatten().tolist()
            assert list(found.flat()) == pytest.approx(numbers, rel=2e-6, abs=3e-6), i


def test_the_default_stream_before_and_after_a_seed():
    torch.manual_seed(3)
    page.manual_seed(3)
    assert page.rand(4).tolist() == torch.rand(4).tolist()
    assert page.distributions.Categorical(logits=page.zeros(4)).sample((20,)).tolist() == (
        torch.distributions.Categorical(logits=torch.zeros(4)).sample((20,)).tolist()
    )
