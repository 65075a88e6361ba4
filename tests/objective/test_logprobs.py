import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.objective.logprobs import entropy, logprobs_from_hidden, token_logprobs

# Next-token distributions of two steps, and what was sampled
P = torch.tensor([[.55, .30, .15], [.20, .25, .55]], dtype=torch.float64)
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
TAUS = st.sampled_from([.3, .7, 1, 2.5])


@given(LOGITS, TAUS, st.data())
def test_against_python_floats(row, tau, data):
    token = data.draw(st.integers(0, len(row) - 1)); z = torch.tensor([row], dtype=torch.float64)
    near(token_logprobs(z, torch.tensor([token]), tau), [slow_logprob(row, token, tau)], 1e-9)
    near(entropy(z, tau), [slow_entropy(row, tau)], 1e-9)


def test_no_underflow_and_no_overflow():
    z = torch.tensor([[0., -200.], [1e4, 1e4 + 1]]).requires_grad_()
    lp = token_logprobs(z, torch.tensor([1, 0])); lp.sum().backward()
    near(lp.detach(), [-200, -math.log1p(math.e)], 1e-6)        # second: −ln(1 + e)
    p = 1 / (1 + math.e)                                        # of the sampled one
    near(z.grad, [[-1, 1], [1 - p, p - 1]], 1e-6)


def test_expected_slope_is_zero_at_the_sampling_temperature_only():
    z = P.log().requires_grad_(); chance = (P.log() / 2).softmax(-1)
    def slope(tau): return torch.autograd.grad(sum((chance[:, v] * token_logprobs(z, torch.full((2,), v), tau)).sum() for v in range(3)), z)[0]
    near(slope(2.), torch.zeros(2, 3))
    near(slope(1.), chance - P)


def test_forbidden_tokens():
    z = torch.tensor([[0., 0., -math.inf]], dtype=torch.float64).requires_grad_()
    lp = token_logprobs(z, torch.tensor([1])); near(lp.detach(), [-math.log(2)])
    lp.sum().backward(); near(z.grad, [[-.5, .5, 0]])
    assert token_logprobs(z, torch.tensor([2])).item() == -math.inf


def test_alignment_by_enumeration():
    "All responses of two tokens, from a model that sees the last token only: probabilities add up to 1."
    table = torch.tensor([[.60, .20, .20], [.20, .25, .55], [.40, .20, .40]], dtype=torch.float64).log()
    responses = torch.tensor(list(itertools.product(range(3), repeat=2)))
    logits = table[torch.cat([torch.ones(9, 1, dtype=torch.long), responses], 1)]
    near(token_logprobs(logits[:, :-1], responses).sum(-1).exp().sum(), 1)
    near(token_logprobs(logits[:, 1:], responses).sum(-1).exp().sum(), 1.25**2)       # off by one: the trace, squared


def test_poisoned_rows_stay_where_they_are(poison):
    "Logits at padding may be anything: other rows' values and gradients do not notice."
    mask = torch.tensor([[True, True, False], [True, False, False]])
    z, ids = torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(4, (2, 3))
    bad = poison(z.clone().requires_grad_(), mask[..., None].expand(2, 3, 4)); z.requires_grad_()
    for fn in (lambda z: token_logprobs(z, ids, .7), lambda z: entropy(z, .7)):
        near(fn(bad)[mask].detach(), fn(z)[mask].detach())
        near(torch.autograd.grad(fn(bad)[mask].sum(), bad)[0][mask], torch.autograd.grad(fn(z)[mask].sum(), z)[0][mask])


@pytest.mark.parametrize("row", [[0., 0., -math.inf], [0., -math.inf, -math.inf], [3., -math.inf, 1.], [0., -1e4, 2.]])
def test_entropy_survives_forbidden_tokens(row):
    z = torch.tensor(row, requires_grad=True); s = entropy(z); s.backward()
    near(s.detach(), slow_entropy(row, 1), 1e-6)
    assert z.grad.isfinite().all()
    allowed = z.detach()[z.detach() > -math.inf].requires_grad_()
    near(z.grad[z.detach() > -math.inf], torch.autograd.grad(entropy(allowed), allowed)[0], 1e-6)


@given(LOGITS.filter(lambda row: max(row) - min(row) > .1))
def test_entropy_rises_with_temperature(row):
    z = torch.tensor(row, dtype=torch.float64)
    s = [entropy(z, tau).item() for tau in (.5, 1., 2., 4.)] + [math.log(len(row))]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(s))


def problem(N=7, H=4, V=5, dtype=torch.float64):
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()
    return make(N, H), make(V, H), make(V), torch.randint(V, (N,))


@given(st.integers(1, 9), st.integers(1, 12), st.booleans(), TAUS)
def test_chunks_change_nothing(N, chunk, with_bias, tau):
    hidden, weight, bias, ids = problem(N)
    bias = bias if with_bias else None
    logits = torch.nn.functional.linear(hidden, weight, bias)
    want = token_logprobs(logits, ids, tau), entropy(logits, tau)
    got = logprobs_from_hidden(hidden, weight, ids, tau, bias, chunk, with_entropy=True)
    lopsided = torch.arange(1., N + 1)          # a row in the wrong place changes the gradient
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    grads = [torch.autograd.grad((lopsided * lp + lopsided**2 * s).sum(), inputs) for lp, s in (got, want)]
    for a, b in zip(got, want, strict=True): near(a.detach(), b.detach())
    for a, b in zip(*grads, strict=True): near(a, b, 1e-10)
    near(logprobs_from_hidden(hidden, weight, ids, tau, bias, chunk).detach(), want[0].detach())


def test_no_tokens_no_gradient_no_copy():
    hidden, weight, bias, ids = problem()
    lp, s = logprobs_from_hidden(hidden[:0], weight, ids[:0], with_entropy=True)
    assert lp.shape == s.shape == (0,)
    with torch.no_grad(): frozen = logprobs_from_hidden(hidden, weight, ids, chunk=2)
    assert not frozen.requires_grad
    near(frozen, token_logprobs(hidden.detach() @ weight.detach().T, ids))


@pytest.mark.parametrize("chunk", [10, 90])
def test_logits_are_forgotten_until_the_backward_pass(chunk):
    "Autograd keeps no table from the forward pass, unless one chunk holds everything."
    hidden, weight, _, ids = problem(90, 6, 200)
    shapes = []
    def keep(t): shapes.append(t.shape); return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logprobs_from_hidden(hidden, weight, ids, chunk=chunk)
    assert ((chunk, 200) in shapes) == (chunk == 90)


def test_shapes_without_the_shape_checker(unchecked):
    hidden, weight, _, ids = problem()
    with unchecked():
        with pytest.raises(ValueError, match=r"\(2,\).*\(2, 1\)"): token_logprobs(P.log(), TOKENS[:, None])
        for chunk in (2, 7):
            with pytest.raises(ValueError, match=r"\(7,\).*\(6,\)"): logprobs_from_hidden(hidden, weight, ids[:6], chunk=chunk)
    with pytest.raises(TypeError, match="Type-check error"): token_logprobs(P.log(), TOKENS[:, None])


@pytest.mark.parametrize("wrong", [-100, -1, 3, 50_256])
def test_ids_outside_the_vocabulary(wrong):
    ids = torch.tensor([0, wrong])
    with pytest.raises(ValueError, match=f"{wrong}.*from 0 to 2.*the mask keeps it out"): token_logprobs(P.log(), ids)
    with pytest.raises(ValueError, match="from 0 to 2"): logprobs_from_hidden(P, torch.eye(3).double(), ids)


@pytest.mark.parametrize("tau", [0, -1., float("nan")])
def test_temperature_above_zero(tau):
    for call in (lambda: token_logprobs(P.log(), TOKENS, tau), lambda: entropy(P.log(), tau),
                 lambda: logprobs_from_hidden(P, torch.eye(3).double(), TOKENS, tau)):
        with pytest.raises(ValueError, match="above 0"): call()
