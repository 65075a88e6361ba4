"""The plug-in of more losses against the libraries that have them: numbers that TRL 1.16.0 (trl/trainer/grpo_trainer.py::_compute_loss) and verl 0.9.1
(verl/trainer/ppo/core_algos.py) gave for the batch below, and a second implementation, token by token, from their formulas."""

import importlib
import itertools
import math
import sys
import warnings
from dataclasses import replace

import pytest
import small_trainer
import torch

from instruct_goose import RLHFConfig
from instruct_goose.config import BiasedSettings
from instruct_goose.objective.advantages import ADVANTAGES, Advantage, estimate_advantages
from instruct_goose.objective.group import PRESET_SOURCES, PRESETS, preset_table
from instruct_goose.objective.kl import ESTIMATORS, kl_in_loss, token_kl
from instruct_goose.objective.masks import AGGREGATES
from instruct_goose.objective.policy_loss import SURROGATES, clipped_shares, policy_loss
from instruct_goose.objective.ppo import ppo_loss
from instruct_goose.training.metrics import advantage_metrics

TABLES = (SURROGATES, ADVANTAGES, AGGREGATES, ESTIMATORS, PRESETS, PRESET_SOURCES)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


close = torch.testing.assert_close
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
LOGPROBS = f64([[-1.0, -2.0, -0.5], [-1.2, -0.4, 0.0], [-0.7, -1.9, -3.0], [-2.2, 0.0, 0.0]])
ELL = f64([[0.3, -0.6, 0.5], [-0.2, 0.7, 0.0], [-0.5, -0.4, 0.1], [0.6, 0.0, 0.0]])  # log ρ
A = [1.0, -0.5, -1.5, 0.25]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    before = [dict(table) for table in TABLES]
    sys.modules.pop("instruct_goose.compat.losses", None)
    yield importlib.import_module("instruct_goose.compat.losses")
    del sys.modules["instruct_goose.compat.losses"]
    for table, old in zip(TABLES, before):
        table.clear(), table.update(old)


def of(preset, **changed):
    "Loss and gradient of a preset on the batch; padding holds NaN."
    c = RLHFConfig.preset(preset, beta=0.0, **changed)
    lp = torch.where(MASK, LOGPROBS, torch.nan).requires_grad_()
    loss, parts = ppo_loss(
        lp,
        LOGPROBS - ELL,
        f64(A)[:, None].expand(4, 3),
        MASK,
        how=c.aggregation,
        level=c.ratio_level,
        surrogate=c.surrogate,
        clip=c.clip,
        clip_high=c.clip_high,
        surrogate_settings=c.surrogate_settings,
    )
    return loss.item(), torch.autograd.grad(loss, lp)[0], parts


THEIRS = {  # loss, and its gradient
    "sapo": (
        0.2051054490646739,
        [
            [-0.1091150831678195, -0.043483510759793856, -0.12389488421331249],
            [0.0507100218162549, 0.09600020133166068, 0.0],
            [0.07267097539146118, 0.08132917103493287, 0.1377260570977813],
            [-0.09661666207715729, 0.0, 0.0],
        ],
    ),
    "vespo": (
        -0.047733001692821984,
        [
            [-0.0853126230024678] * 3,
            [0.06802946905028658] * 2 + [0.0],
            [0.045482965967452806] * 3,
            [-0.007829353498515892, 0.0, 0.0],
        ],
    ),
    "luspo": (
        0.5205520248615004,
        [[-0.2672347764368116] * 3, [0.1605031770859677] * 2 + [0.0], [0.0] * 3, [0.0] * 3],
    ),
    "gmpo": (
        0.09662447935422526,
        [
            [-0.08760592409936153] * 2 + [0.0],
            [0.08025158764015349] * 2 + [0.0],
            [0.0] + [0.09898619520917899] * 2,
            [0.0] * 3,
        ],
    ),
    "gpg": (
        -0.5722222222222223,
        [[-1 / 9] * 3, [0.5 / 9] * 2 + [0.0], [1.5 / 9] * 3, [-0.25 / 9, 0.0, 0.0]],
    ),
}
CLIPS = {"luspo": dict(clip=0.05, clip_high=0.08), "gmpo": dict(clip=0.4, clip_high=0.45)}


@pytest.mark.parametrize("name", THEIRS)
def test_the_numbers_of_the_libraries(name):
    loss, gradient, parts = of(name, **CLIPS.get(name, {}))
    assert math.isclose(loss, THEIRS[name][0], rel_tol=1e-6)  # TRL rounds its τ of 1.05 to float32
    close(gradient, f64(THEIRS[name][1]), rtol=1e-6, atol=1e-9)
    if name == "gmpo":
        assert (
            parts["clip_fraction_high"].item(),
            parts["clip_fraction_low"].item(),
        ) == pytest.approx((3 / 9 - 1 / 9, 2 / 9 - 1 / 9), abs=1e-6)


def test_opo_and_abs_as_verl_has_them():
    rewards = torch.zeros(4, 3, dtype=torch.float64)
    rewards[:, 0] = f64([1.0, 0.0, 0.5, 2.0])
    close(
        estimate_advantages("opo", rewards, MASK, group_size=2)[0],
        f64([[0.4] * 3, [-0.6, -0.6, 0.0], [-0.375] * 3, [1.125, 0.0, 0.0]]),
    )
    close(token_kl(LOGPROBS, LOGPROBS - ELL, MASK, "abs"), ELL.abs())


def slow(name, ells, logps, a, own):
    "The objective of one response, and the coefficients of its tokens' ∇log π: two lists of numbers, one token at a time."
    n = len(ells)
    w = math.exp(sum(ells))
    if name == "sapo":
        tau = own["tau_pos"] if a > 0 else own["tau_neg"]
        s = [1 / (1 + math.exp(-tau * (math.exp(e) - 1))) for e in ells]
        return [4 / tau * x * a for x in s], [
            4 * x * (1 - x) * math.exp(e) * a for x, e in zip(s, ells)
        ]
    if name == "vespo":
        k, lam = (own["k_pos"], own["lambda_pos"]) if a >= 0 else (own["k_neg"], own["lambda_neg"])
        phi = math.exp(lam * (1 - w)) * w**k
        return [phi * a * lp for lp in logps], [phi * a] * n
    if name == "gpg":
        return [a * lp for lp in logps], [a] * n
    cut = [min(e, 0.45) if a > 0 else max(e, -0.4) for e in ells]
    mean = math.exp(sum(cut) / n)
    return [mean * a] * n, [
        mean * a * (c == e) for c, e in zip(cut, ells)
    ]  # of gmpo; its row's n tokens share the gradient


@pytest.mark.parametrize(
    "name, own",
    [
        ("sapo", dict(tau_pos=1.5, tau_neg=0.7)),
        ("vespo", dict(k_pos=1.0, lambda_pos=0.5, k_neg=2.0, lambda_neg=4.0)),
        ("gpg", {}),
        ("gmpo", {}),
    ],
)
def test_against_loops(name, own):
    loss, gradient, _ = of(name, surrogate_settings=own or None, **CLIPS.get(name, {}))
    rows = [
        slow(name, [e for e, m in zip(es, ms) if m], [x for x, m in zip(xs, ms) if m], a, own)
        for es, xs, ms, a in zip(ELL.tolist(), LOGPROBS.tolist(), MASK.tolist(), A)
    ]
    by_row = RLHFConfig.preset(name).aggregation == "sequence_mean"
    weights = [1 / (4 * len(x)) if by_row else 1 / 9 for x, _ in rows]
    assert math.isclose(loss, -sum(w * sum(x) for w, (x, _) in zip(weights, rows)), rel_tol=1e-9)
    for i, (w, (_, g)) in enumerate(zip(weights, rows)):
        close(gradient[i, : len(g)], -w * f64(g), rtol=1e-9, atol=1e-12)


def test_what_the_settings_say():
    assert all(
        RLHFConfig.preset(name).algorithm == name
        for name in ("sapo", "gpg", "gmpo", "vespo", "luspo", "opo")
    )
    table = preset_table()
    assert "sapo, tau_pos 1, tau_neg 1.05" in table and "| luspo |" in table
    PRESETS["mine"] = dict(
        surrogate="sapo", beta=0.1
    )  # without a source, and without most settings
    assert (
        "| mine | token | sapo" in preset_table() and RLHFConfig.preset("mine").algorithm == "mine"
    )
    with pytest.raises(ValueError, match="tau_pos, tau_neg"):
        RLHFConfig(surrogate="sapo", surrogate_settings={"tau": 1.0})
    with pytest.raises(ValueError, match="surrogate_settings"):
        RLHFConfig(surrogate_settings={"tau_pos": 1.0})
    with pytest.raises(ValueError, match="no setting 'tau'"):
        clipped_shares("sapo", ELL.exp(), ELL, MASK, 0.2, None, None, {"tau": 1.0})
    with pytest.warns(BiasedSettings, match="'abs'"):
        RLHFConfig(kl_estimator="abs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RLHFConfig(kl_estimator="k1")


def test_the_kl_of_abs_in_the_loss_is_biased_with_the_ratio_too_and_the_settings_say_so():
    "Over all tokens of two distributions, by hand: ∇E_π[|ℓ|] is not ∇KL, straight through it is k2's."
    theta = f64([0.4, -0.3, 0.9]).requires_grad_()
    log_pi = theta.log_softmax(-1)
    log_old = f64([0.5, 0.2, 0.3]).log()
    log_ref = f64([0.2, 0.5, 0.3]).log()
    pi = log_pi.exp().detach()
    ell = (log_pi - log_ref).detach()
    of_kl = pi * (ell - (pi * ell).sum())
    # ∂π_b/∂θ_a = π_b(1[a=b] − π_a); |ℓ| itself has the gradient sign(ℓ)·(1[a=b] − π_a)
    weight = pi * (ell.abs() + ell.sign())
    of_abs = weight - pi * weight.sum()
    for straight, expected in ((False, of_abs), (True, of_kl)):
        kl = kl_in_loss(log_pi[None], log_ref[None], None, 1.0, "abs", log_old[None], straight)
        mean = (log_old.exp() * kl[0]).sum()
        close(torch.autograd.grad(mean, theta, retain_graph=True)[0], expected)
    assert (of_abs - of_kl).abs().max() > 0.04
    for options in (dict(kl_gradient="plain"), dict(kl_gradient="ratio")):
        with pytest.warns(BiasedSettings, match="kl_estimator='abs' in the loss is biased"):
            RLHFConfig(kl_estimator="abs", kl_placement="loss", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RLHFConfig(kl_estimator="abs", kl_placement="loss", kl_gradient="straight_through")
        for name in ("k2", "k3"):
            RLHFConfig(kl_estimator=name, kl_placement="loss", kl_gradient="ratio")


def test_the_table_says_that_gmpo_bounds_the_logarithm_of_the_ratio():
    "A token is cut where log ρ > .4, that is ρ > 1.49, and not at ρ = 1.41."
    assert "| gmpo | token | gmpo, log ρ in [-0.4, 0.4] |" in preset_table()
    ratio = f64([[1.41, 1.48, 1.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    shares = clipped_shares("gmpo", ratio, torch.ones_like(ratio), mask, 0.4)
    assert shares["clip_fraction_high"].item() == pytest.approx(1 / 3)


DPPO = {  # gradients of verl 0.9.1's compute_policy_loss_dppo_tv and _kl, clip_ratio_c 1e9
    ("dppo_tv", 0.12, 0.15): [
        [-0.14998431195288922, -0.06097907067711404, 0.0],
        [0.04548504183766566, 0.11187515041502648, 0.0],
        [0.0, 0.11172000767260654, 0.18419515301260794],
        [-0.05061441112195858, 0.0, 0.0],
    ],
    ("dppo_kl", 0.004, 0.02): [
        [0.0, -0.06097907067711404, 0.0],
        [0.0, 0.11187515041502648, 0.0],
        [0.0, 0.0, 0.18419515301260794],
        [-0.05061441112195858, 0.0, 0.0],
    ],
}


@pytest.mark.parametrize("name, low, high", DPPO)
def test_dppo_as_verl_has_it_and_its_meters_count_what_it_masks(name, low, high):
    loss, gradient, parts = of(name, clip=low, clip_high=high)
    expected = f64(DPPO[name, low, high])
    close(gradient, expected, rtol=1e-6, atol=1e-9)
    masked = ((expected == 0) & MASK).sum() / 9
    assert parts["clip_fraction"].item() == pytest.approx(masked.item(), abs=1e-6)


@pytest.mark.parametrize("kind, delta", [("dppo_tv", 0.1), ("dppo_kl", 0.02)])
def test_dppo_by_hand_on_whole_distributions(kind, delta):
    "Two outcomes, the token and the rest: the divergences by their definitions, token by token."
    for new in (0.05, 0.3, 0.45, 0.9):
        for old in (0.05, 0.3, 0.45, 0.9):
            tv = (abs(new - old) + abs((1 - new) - (1 - old))) / 2
            kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
            far = (tv if kind == "dppo_tv" else kl) > delta
            for a in (1.0, -1.0):
                lp = f64([[math.log(new)]]).requires_grad_()
                one = torch.ones(1, 1, dtype=torch.bool)
                loss = policy_loss(
                    lp, f64([[math.log(old)]]), f64([[a]]), one, surrogate=kind, clip=delta
                )
                pull = -torch.autograd.grad(loss.sum(), lp)[0].item()
                driven_on = (new - old) * a > 0
                wanted = 0.0 if far and driven_on else a * new / old
                assert pull == pytest.approx(wanted, rel=1e-9), (new, old, a)


def test_the_sequence_mask_leaves_out_what_trl_s_leaves_out():
    """TRL 1.16.0's get_off_policy_mask on the batch keeps rows 1, 1, 0, 1 at .1 and .2, all at .3.

    By hand: the means of log π_old − log π are −.067, −.25, .267 and −.6; the third Â is −1.5.
    """
    for limit, kept in ((0.1, [1, 1, 0, 1]), (0.2, [1, 1, 0, 1]), (0.3, [1, 1, 1, 1])):
        loss, gradient, parts = of(
            "grpo", surrogate="sequence_masked", surrogate_settings={"max_kl": limit}
        )
        _, plain, _ = of("grpo")
        close(gradient, plain * f64(kept)[:, None])
        left_out = 3 / 9 * (0 in kept)
        assert parts["clip_fraction_left_out"].item() == pytest.approx(left_out, abs=1e-6)


def test_max_rl_as_the_rlhf_book_has_it_and_it_points_to_the_log_of_the_success_rate():
    """compute_maxrl_advantages of natolambert/rlhf-book at a66b0bf: (r − r̄)/r̄, 0 where r̄ is 0.

    Its mean over all groups of G answers, by enumeration, is the gradient of the objective of order
    G − 1, Σₖ (1 − p)ᵏ⁻¹·∇p: of p itself for G = 2, towards log p for more.
    """
    rewards = torch.zeros(6, 3, dtype=torch.float64)
    rewards[:, 0] = f64([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    mask = torch.ones(6, 3, dtype=torch.bool)
    advantages, _ = estimate_advantages("max_rl", rewards, mask, group_size=3)
    close(advantages, f64([2.0, -1.0, -1.0, 0.0, 0.0, 0.0])[:, None].expand(6, 3))
    p = 0.2
    for size in (2, 3, 5):
        slope = 0.0  # in a coin's logit: ∇log π is 1 − p for a success, −p for a failure
        for answers in itertools.product((1.0, 0.0), repeat=size):
            chance = math.prod(p if x else 1 - p for x in answers)
            column = f64([[x] for x in answers])
            every = torch.ones(size, 1, dtype=torch.bool)
            a, _ = estimate_advantages("max_rl", column, every, group_size=size)
            pulls = [w * (x - p) for w, x in zip(a[:, 0].tolist(), answers, strict=True)]
            slope += chance * sum(pulls) / size
        order = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
        assert slope == pytest.approx(order, rel=1e-9)


def gae_slow(rewards, values, lam, gamma):
    "One response as lists: Σₖ (γλ)ᵏ·δₜ₊ₖ, a sum for each token."
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [r + gamma * v - now for r, v, now in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize("name", ["gae_decoupled", "gae_adaptive"])
def test_vapo_s_gae_against_sums(name):
    torch.manual_seed(0)
    lengths = [60, 25, 12]
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    rewards, values = torch.randn(2, 3, 60, dtype=torch.float64)
    advantages, returns = estimate_advantages(
        name, rewards, mask, values=values, gamma=0.99, lam=0.9
    )
    for i, n in enumerate(lengths):
        lam = 0.9 if name == "gae_decoupled" else max(0.0, 1 - 1 / (0.05 * n))
        r = rewards[i, :n].tolist()
        v = values[i, :n].tolist()
        close(advantages[i, :n], f64(gae_slow(r, v, lam, 0.99)))
        whole = [sum(0.99 ** (k - t) * r[k] for k in range(t, n)) for t in range(n)]
        close(returns[i, :n], f64(whole))
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize("name", ["gae_decoupled", "gae_adaptive"])
def test_a_critic_with_another_lambda_is_logged_by_its_own_advantages(name):
    "Advantages are not returns less values here, and no λ can be read off the returns."
    t = small_trainer.trainer(advantage=name, lam=0.5, whiten_advantages=False)
    experience = small_trainer.ready(t)
    logged = advantage_metrics(experience, t.config)
    real = experience.advantages[experience.mask]
    assert logged["advantage_mean"].item() == pytest.approx(real.mean().item())
    assert logged["advantage_correlation"].item() == pytest.approx(1.0)
    assert "return_lam" not in logged and "explained_variance" in logged
    assert "return_lam" in advantage_metrics(experience, replace(t.config, advantage="gae"))


def test_tokens_of_low_entropy_get_no_advantage(plugin):
    "Nine real tokens with entropies 1 to 9: the upper third are 7, 8 and 9."
    order = [[3.0, 9.0, 1.0], [7.0, 2.0, 99.0], [4.0, 8.0, 5.0], [6.0, 99.0, 99.0]]
    entropy = f64(order)
    rewards = torch.zeros(4, 3, dtype=torch.float64)
    rewards[:, 0] = f64([1.0, 0.0, 1.0, 0.0])
    ADVANTAGES["upper_third"] = Advantage(plugin.high_entropy("group_mean", 1 / 3), needs="group")
    got, _ = estimate_advantages("upper_third", rewards, MASK, group_size=2, entropy=entropy)
    whole, _ = estimate_advantages("group_mean", rewards, MASK, group_size=2)
    close(got, torch.where((entropy >= 7) & (entropy < 99), whole, 0.0))
    with pytest.raises(ValueError, match="entropy is missing"):
        estimate_advantages("upper_third", rewards, MASK, group_size=2)
    with pytest.raises(ValueError, match="share is 0"):
        plugin.high_entropy("group_mean", 0.0)
