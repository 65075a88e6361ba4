import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.objective.logprobs import entropy, logprobs_from_hidden, token_logprobs

# Next-token distributions of two steps, and what was sampled
P = torch.tensor([[0.55, 0.30, 0.15], [0.20, 0.25, 0.55]], dtype=torch.float64)
TOKENS = torch.tensor([0, 2])


def near(a, b, atol=1e-12):
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def slow_logprob(row, token, tau):
    "The formula in Python floats, with exact summation."
    z = [v / tau for v in row]
    return z[token] - max(z) - math.log(math.fsum(math.exp(v - max(z)) for v in z))


def slow_entropy(row, tau):
    lp = [slow_logprob(row, v, tau) for v in range(len(row)) if row[v] > -math.inf]
    return -math.fsum(math.exp(v) * v for v in lp)


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=6)
TAUS = st.sampled_from([0.3, 0.7, 1, 2.5])


@given(LOGITS, TAUS, st.data())
def test_against_python_floats(row, tau, data):
    token = data.draw(st.integers(0, len(row) - 1))
    z = torch.tensor([row], dtype=torch.float64)
    near(token_logprobs(z, torch.tensor([token]), tau), [slow_logprob(row, token, tau)], 1e-9)
    near(entropy(z, tau), [slow_entropy(row, tau)], 1e-9)


def test_no_underflow_and_no_overflow():
    z = torch.tensor([[0.0, -200.0], [1e4, 1e4 + 1]]).requires_grad_()
    lp = token_logprobs(z, torch.tensor([1, 0]))
    lp.sum().backward()
    near(lp.detach(), [-200, -math.log1p(math.e)], 1e-6)  # second: −ln(1 + e)
    p = 1 / (1 + math.e)  # of the sampled one
    near(z.grad, [[-1, 1], [1 - p, p - 1]], 1e-6)


def test_expected_slope_is_zero_at_the_sampling_temperature_only():
    z = P.log().requires_grad_()
    chance = (P.log() / 2).softmax(-1)

    def slope(tau):
        return torch.autograd.grad(
            sum(
                (chance[:, v] * token_logprobs(z, torch.full((2,), v), tau)).sum() for v in range(3)
            ),
            z,
        )[0]

    near(slope(2.0), torch.zeros(2, 3))
    near(slope(1.0), chance - P)


def test_forbidden_tokens():
    z = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64).requires_grad_()
    lp = token_logprobs(z, torch.tensor([1]))
    near(lp.detach(), [-math.log(2)])
    lp.sum().backward()
    near(z.grad, [[-0.5, 0.5, 0]])
    assert token_logprobs(z, torch.tensor([2])).item() == -math.inf


@pytest.mark.parametrize(
    "row",
    [[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf], [3.0, -math.inf, 1.0], [0.0, -1e4, 2.0]],
)
def test_entropy_survives_forbidden_tokens(row):
    z = torch.tensor(row, requires_grad=True)
    s = entropy(z)
    s.backward()
    near(s.detach(), slow_entropy(row, 1), 1e-6)
    assert z.grad.isfinite().all()
    allowed = z.detach()[z.detach() > -math.inf].requires_grad_()
    near(z.grad[z.detach() > -math.inf], torch.autograd.grad(entropy(allowed), allowed)[0], 1e-6)


def problem(N=7, H=4, V=5, dtype=torch.float64):
    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    return make(N, H), make(V, H), make(V), torch.randint(V, (N,))


def test_no_tokens_no_gradient_no_copy():
    hidden, weight, bias, ids = problem()
    lp, s = logprobs_from_hidden(hidden[:0], weight, ids[:0], with_entropy=True)
    assert lp.shape == s.shape == (0,)
    with torch.no_grad():
        frozen = logprobs_from_hidden(hidden, weight, ids, chunk_bytes=2)
    assert not frozen.requires_grad
    near(frozen, token_logprobs(hidden.detach() @ weight.detach().T, ids))


def test_shapes_without_the_shape_checker(unchecked):
    hidden, weight, _, ids = problem()
    with unchecked():
        with pytest.raises(ValueError, match=r"\(2,\).*\(2, 1\)"):
            token_logprobs(P.log(), TOKENS[:, None])
        with pytest.raises(ValueError, match=r"\(7,\).*\(6,\)"):
            logprobs_from_hidden(hidden, weight, ids[:6])
    with pytest.raises(TypeError, match="Type-check error"):
        token_logprobs(P.log(), TOKENS[:, None])


@pytest.mark.parametrize("wrong", [-100, -1, 3, 50_256])
def test_ids_outside_the_vocabulary(wrong):
    ids = torch.tensor([0, wrong])
    with pytest.raises(ValueError, match=f"{wrong}.*from 0 to 2.*the mask keeps it out"):
        token_logprobs(P.log(), ids)
    with pytest.raises(ValueError, match="from 0 to 2"):
        logprobs_from_hidden(P, torch.eye(3).double(), ids)


@pytest.mark.parametrize("tau", [0, -1.0, float("nan")])
def test_temperature_above_zero(tau):
    for call in (
        lambda: token_logprobs(P.log(), TOKENS, tau),
        lambda: entropy(P.log(), tau),
        lambda: logprobs_from_hidden(P, torch.eye(3).double(), TOKENS, tau),
    ):
        with pytest.raises(ValueError, match="above 0"):
            call()
