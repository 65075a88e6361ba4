"""DPO: against plain Python, the known optimum of an enumerable world, and in test_numbers finite differences."""

import math

import pytest
import torch

from instruct_goose.objective.preference import dpo_loss

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def slow(c, j, rc, rj, beta, eps):
    "one pair in floats, by the definition of σ"
    margin = beta * ((c - rc) - (j - rj))
    sigma = 1 / (1 + math.exp(-margin))
    return -(1 - eps) * math.log(sigma) - eps * math.log(1 - sigma)


@pytest.mark.parametrize("beta", [0.1, 1, 2.5])
@pytest.mark.parametrize("eps", [0.0, 0.1, 0.4])
def test_against_plain_python(beta, eps):
    rows = -3 * torch.rand(4, 7, dtype=torch.float64)
    expected = [slow(*row, beta, eps) for row in rows.T.tolist()]
    close(dpo_loss(*rows, beta, eps), f64(expected))


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_gradient_descent_ends_at_the_optimum_of_the_objective(beta):
    "Bradley–Terry labels, every pair of five answers enumerated: π ∝ π_ref·exp(r/β), which PPO with KL in the reward climbs to."
    ref = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    r = torch.randn(5, dtype=torch.float64)
    star = torch.tensor(
        [math.exp(a + b / beta) for a, b in zip(ref.tolist(), r.tolist(), strict=True)],
        dtype=torch.float64,
    )
    star /= star.sum()
    z = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([z], lr=0.1)
    i, j = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    for step in range(600):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.99**step
        optimizer.zero_grad()
        lp = z.log_softmax(-1)
        (
            torch.sigmoid(r[i] - r[j]) * dpo_loss(lp[i], lp[j], ref[i], ref[j], beta)
        ).mean().backward()
        optimizer.step()
    assert (z.softmax(-1) - star).abs().sum() / 2 < 2e-3


def test_refusals(unchecked):
    x = torch.zeros(2)
    with unchecked():
        with pytest.raises(ValueError, match="shapes differ.*rejected_logprobs"):
            dpo_loss(x, x[:1], x, x)
        with pytest.raises(ValueError, match="shapes differ.*ref_chosen_logprobs"):
            dpo_loss(x, x, x[:1], x)
        with pytest.raises(
            ValueError, match=r"logprobs has shape \(2, 1\).*sum over its real tokens"
        ):
            dpo_loss(*4 * [x[:2, None]])
        for beta in (0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="beta is"):
                dpo_loss(x, x, x, x, beta)
        for eps in (-0.1, 0.5, 1.0, float("nan")):
            with pytest.raises(ValueError, match="label_smoothing is"):
                dpo_loss(x, x, x, x, 0.1, eps)
