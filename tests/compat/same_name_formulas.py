"""What the libraries compute under one name: each formula as read in its source, with the libraries that have it. Data of the
lesson `nbs/guides/same_name.ipynb`, of the site's page Tables and of `test_same_name.py`; nothing is quoted."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from instruct_goose.compat.library_losses import (
    SOURCES,
    clip_without_min,
    delta_clip,
    dual_clip_of_every_sign,
    kl_as_k1,
    kl_as_k3,
    kl_as_reversed_k3,
    kl_as_straight_through,
    kl_as_weighted_k3,
    length_times_unmasked_mean,
    mean_of_all_slots,
    no_gradient_outside,
    ratio_times_clip_loss,
    sequence_mean,
    sums_over_rows,
    sums_over_width,
    token_mean,
    token_sum,
    weight_cut_above,
)
from instruct_goose.lesson import running_example
from instruct_goose.objective.advantages import estimate_advantages, gae, group_advantages
from instruct_goose.objective.kl import k1, k2, k3, kl_in_loss, kl_in_reward
from instruct_goose.objective.logprobs import entropy, token_logprobs
from instruct_goose.objective.masks import masked_mean, whiten
from instruct_goose.objective.policy_loss import (
    clip_fraction,
    clipped_objective,
    policy_loss,
    sampler_weights,
)
from instruct_goose.objective.value_loss import value_loss


class Padded(NamedTuple):
    "The running example with padding that holds a 1. float64."

    mask: Bool[Tensor, "2 time"]  # three real tokens, and two
    logits: Float[Tensor, "2 time 3"]  # uniform at padding
    logprobs: Float[Tensor, "2 time"]  # of the policy being trained
    old_logprobs: Float[Tensor, "2 time"]  # of the policy that sampled
    values: Float[Tensor, "2 time"]  # of the value head being trained
    old_values: Float[Tensor, "2 time"]  # at sampling time
    advantages: Float[Tensor, "2 time"]  # γ = .9, λ = .5, not whitened
    returns: Float[Tensor, "2 time"]  # targets of the value head
    loss: Float[Tensor, "2 time"]  # clipped policy loss, ε = .2
    scores: Float[Tensor, "2"]  # one per response


def padded_example(width: int = 4) -> Padded:
    "The five tokens of the running example in rows of `width`, 3 at least."
    ex = running_example()
    mask = torch.arange(width) < torch.tensor([[3], [2]])

    def place(x, pad=1.0):
        wide = torch.full((2, width, *x.shape[2:]), pad, dtype=x.dtype)
        wide[mask] = x[ex.mask]
        return wide

    new, old, values = (place(x) for x in (ex.logprobs, ex.old_logprobs, ex.old_values))
    advantages, returns = gae(
        kl_in_reward(ex.scores, old, place(ex.ref_logprobs), mask, 0.1), values, mask, 0.9, 0.5
    )
    loss = policy_loss(new, old, advantages, mask)
    return Padded(
        mask,
        place(ex.logits, 0.0),
        new,
        old,
        place(ex.values),
        values,
        *(torch.where(mask, x, 1.0) for x in (advantages, returns, loss)),
        ex.scores,
    )


class Row(NamedTuple):
    "One library's formula for one quantity."

    kind: str  # what it computes, in words
    formula: str  # the same in signs
    f: Callable
    good_for: str
    library: str  # a key of SOURCES, perhaps with ": which"
    place: str  # path::function
    verdict: str  # what to know before use

    @property
    def version(self) -> str:
        "Library and version."
        name, _, which = self.library.partition(": ")
        return SOURCES[name][0] + (f" ({which})" if which else "")

    @property
    def link(self) -> str:
        "The place, in Markdown: a link that is pinned to the version."
        path, _, where = self.place.partition("::")
        source = SOURCES[self.library.partition(": ")[0]][1]
        if source is None:
            return f"`{path} {where}`"
        return f"[{path.split('/')[-1]}](https://github.com/{source}/{path}) `{where}`"


def formula(
    kind: str, text: str, f: Callable, good_for: str, verdict: str, *users: str | tuple
) -> list[Row]:
    "One row for each user: a library, or (library, path::function or ::function, what to know before use)."
    rows = []
    for user in users:
        library, place, what = (*((user,) if isinstance(user, str) else user), "", "")[:3]
        usual = SOURCES[library.partition(": ")[0]][2]
        if place.startswith("::"):
            place = usual.partition("::")[0] + place
        rows.append(Row(kind, text, f, good_for, library, place or usual, what or verdict))
    return rows


class Quantity:
    "A name that several libraries use, and how to find out what one of them means."

    def __init__(
        self,
        name: str,  # "masked mean"
        shows: str,  # what the worked number is
        work: Callable,  # an implementation → that number, on the shared example
        *formulas: list[Row],
        probe: Callable
        | None = None,  # an implementation → numbers that differ between kinds; None: the worked one
        tell: Callable
        | None = None,  # an implementation → what it computes; None: the kind that has its probe
    ):
        self.name = name
        self.shows = shows
        self.work = work
        probe = probe or work
        self.test = "test_" + name.replace(" ", "_").replace(
            ",", ""
        )  # that tells the formulas apart
        self.rows = sum(formulas, [])
        self.kinds = {}  # what is computed → the rows that compute it
        for row in self.rows:
            self.kinds.setdefault(row.kind, []).append(row)
        self.tell = tell or (
            lambda f: _match(
                probe(f), {kind: probe(rows[0].f) for kind, rows in self.kinds.items()}
            )
        )

    def __getitem__(self, library: str) -> Row:
        return next(row for row in self.rows if row.library == library)

    def number(self, row: Row) -> str:
        "The worked number, computed now."
        return show(self.work(row.f))


def kinds_table(quantity: Quantity) -> str:
    "Markdown: one line for each thing that is computed under this name, with its libraries."
    lines = [
        [
            f"**{kind}**",
            rows[0].formula,
            quantity.number(rows[0]),
            "; ".join(dict.fromkeys(r.good_for for r in rows)),
            ", ".join(r.version for r in rows),
        ]
        for kind, rows in quantity.kinds.items()
    ]
    return _markdown("it computes", "formula", "number", "right for", "libraries", lines)


def _markdown(*head_and_lines):
    *head, lines = head_and_lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def show(x) -> str:
    "Numbers as the lessons print them: four decimals, no zero before the point."
    if isinstance(x, str):
        return x
    if isinstance(x, tuple | list):
        return ", ".join(show(i) for i in x)

    def one(v):
        s = f"{v:.4f}".rstrip("0").rstrip(".") if v == v else "nan"
        s = "0" if s == "-0" else s
        return s.replace("-0.", "-.").replace("-", "−").removeprefix("0") or "0"

    return ", ".join(one(v) for v in torch.as_tensor(x).detach().flatten().tolist())


def _match(got, names: dict) -> str:
    "The first name whose numbers these are."
    got = torch.as_tensor(got, dtype=torch.float64).detach()
    for name, wanted in names.items():
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        if got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-6, equal_nan=True):
            return name
    return f"unknown: {show(got)}"


def _t(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def _refuses(f, *args):
    "What f returns, or 'refused'."
    try:
        return f(*args)
    except (ValueError, ZeroDivisionError):
        return "refused"


def _on_example(*names):
    "What an implementation makes of these columns of the padded example."
    return lambda f: f(*(getattr(padded_example(), name) for name in names))


def _tell_masked_mean(f):
    x = _t([2, 4, 9], [6, 9, 9])
    m = torch.arange(3) < torch.tensor([[2], [1]])
    kind = _match(f(x, m), {"real tokens": 4, "all slots, padding as 0": 2, "all slots": 6.5})
    if kind != "real tokens":
        return kind
    if not f(torch.where(m, x, torch.nan), m).isfinite():
        kind += ", NaN leaks in"
    empty = _refuses(f, x, m & False)
    return kind + f", empty: {show(empty)}"


MASKED_MEAN = Quantity(
    "masked mean",
    "mean of the loss over the padded example",
    _on_example("loss", "mask"),
    formula(
        "real tokens, empty: refused",
        "Σ m·x / Σ m, by selection",
        masked_mean,
        "token losses and metrics",
        "refuses an empty mask",
        ("instruct_goose", "::masked_mean"),
    ),
    formula(
        "real tokens, NaN leaks in, empty: 0",
        "Σ m·x / (Σ m + 10⁻⁸)",
        lambda x, m: (x * m).sum() / (m.sum() + 1e-8),
        "batches that may be empty",
        "right for finite padding",
        ("torchtune", "torchtune/rlhf/rewards.py::masked_mean"),
        ("TRL GRPO", "", "right for finite padding; by max(Σ m, 1)"),
        ("rlhf-book", "::masked_mean", "right for finite padding; by max(Σ m, 10⁻⁸)"),
    ),
    formula(
        "real tokens, NaN leaks in, empty: nan",
        "Σ m·x / Σ m",
        lambda x, m: (x * m).sum() / m.sum(),
        "finite padding",
        "right; nan tells of an empty mask",
        ("TRL PPO", "::masked_mean"),
        ("OpenRLHF", "openrlhf/models/utils.py::masked_mean"),
    ),
    formula(
        "all slots, padding as 0",
        "Σ m·x / N, N all slots",
        lambda x, m: (x * m).mean(),
        "importance weights of steps",
        "as a mask it shrinks the loss by the share of padding",
        "DI-engine",
    ),
    formula(
        "real tokens, empty: 0",
        "Σ m·x / (Σ m + 10⁻⁸), by selection",
        lambda x, m: torch.where(m, x, 0.0).sum() / (m.sum() + 1e-8),
        "padding that holds anything",
        "right, also with NaN in padding",
        ("verl", "verl/utils/torch_functional.py::masked_mean"),
    ),
    formula(
        "all slots",
        "Σ x / N",
        lambda x, m: x.mean(),
        "environments, where every slot is a step",
        "right there; no mask to give",
        "CleanRL",
    ),
    tell=_tell_masked_mean,
)


def _token_weights(f):
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(f(x, torch.arange(4) < torch.tensor([[3], [2]])), x)[0]


AGGREGATION = Quantity(
    "aggregation",
    "the padded example's policy loss as one number",
    _on_example("loss", "mask"),
    formula(
        "token mean",
        "Σ m·x / Σ m",
        token_mean,
        "every token alike",
        "of the micro-batch: splitting a batch changes the weights",
        ("instruct_goose: token_mean", "", "long responses weigh more"),
        "torchtune",
        "TRL PPO",
        ("rlhf-book: DAPO", "::DAPOLoss"),
        (
            "TRL GRPO: dapo, its default",
            "",
            "the count spans the accumulation window: splits add up",
        ),
        ("OpenRLHF", "::aggregate_loss", "counts are global: splits add up"),
        ("verl: token-mean", "", "counts are global: splits add up"),
        ("nanochat", "", "of the micro-batch, then the mean over micro-batches"),
    ),
    formula(
        "sequence mean",
        "mean over rows of Σₜ m·x / Σₜ m",
        sequence_mean,
        "every response alike",
        "as published; an empty row gives nan",
        ("instruct_goose: sequence_mean", "", "tokens of long responses weigh less"),
        ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error"),
        ("TRL GRPO: grpo", "", "as published"),
        ("verl: seq-mean-token-mean", "", "rows without a token are left out"),
        ("rlhf-book", "", "PPO, GRPO, GSPO, CISPO and REINFORCE alike"),
    ),
    formula(
        "sums over B·L",
        "Σ m·x / (B·L)",
        sums_over_width,
        "no length bias",
        "the loss shrinks with L",
        "instruct_goose: sequence_sum",
        ("DI-engine: PPO", "", "L is the batch's width: padding sets the learning rate"),
        ("TRL GRPO: dr_grpo", "", "L = max_completion_length"),
        (
            "verl: seq-mean-token-sum-norm",
            "",
            "L is the batch's width unless loss_scale_factor is set; B counts rows with a token",
        ),
    ),
    formula(
        "sums over B",
        "Σ m·x / B",
        sums_over_rows,
        "long responses weigh more, on purpose; the policy gradient of whole responses",
        "grows with length",
        ("TRL GRPO: luspo", "", "1.9.0 had Liger's formula"),
        "verl: seq-mean-token-sum",
    ),
    formula(
        "length × unmasked mean",
        "Σ n·x / (B·T), n a row's tokens, x not masked",
        length_times_unmasked_mean,
        "a ratio per sequence, one number per row",
        "with one number per token, padding enters",
        "Liger: luspo",
    ),
    formula(
        "the sum",
        "Σ m·x",
        token_sum,
        "losses that are divided elsewhere",
        "grows with the batch and with length",
        "verl: token-sum",
    ),
    formula("all slots", "Σ x / N", mean_of_all_slots, "environments", "right there", "CleanRL"),
    probe=_token_weights,
)


def _spread(f):
    ex = padded_example()
    white = f(ex.advantages, ex.mask)[ex.mask]
    return white.mean(), white.std()


def _white_by_n(x, m):
    "The mean and (x − mean)/√var_n of the real tokens."
    mean = (x * m).sum() / m.sum()
    return mean, (x - mean) * (((x - mean) ** 2 * m).sum() / m.sum() + 1e-8).rsqrt()


WHITENING = Quantity(
    "whitening",
    "mean and sd of the whitened advantages of the real tokens",
    _spread,
    formula(
        "centred",
        "(x − x̄) / √(var + ϵ)",
        whiten,
        "advantages",
        "centred; for rewards it passes shift_mean=False, which keeps the mean",
        ("instruct_goose", "::whiten", "centred; 0 at padding"),
        ("TRL PPO", "::masked_whiten"),
        (
            "verl",
            "verl/utils/torch_functional.py::masked_whiten",
            "centred; refuses a single token",
        ),
    ),
    formula(
        "mean added back",
        "(x − x̄) / √(var + ϵ) + x̄",
        lambda x, m: whiten(x, m) + masked_mean(x, m),
        "rewards, whose mean carries meaning",
        "shift_mean=True adds the mean back; its PPO advantages are scaled, not centred",
        ("torchtune", "torchtune/rlhf/rewards.py::whiten"),
    ),
    formula(
        "over all slots",
        "(x − x̄) / (std + ϵ) over all slots",
        lambda x, m: (x - x.mean()) / (x.std() + 1e-8),
        "environments without padding",
        "padding moves mean and spread",
        ("DI-engine", "ding/policy/ppo.py::_forward_learn"),
        ("CleanRL", "", "per minibatch: the same token's advantage depends on its company"),
    ),
    formula(
        "centred, by n",
        "(x − x̄) / √max(var_n, ϵ)",
        lambda x, m: _white_by_n(x, m)[1],
        "advantages",
        "centred; the variance divides by n, not n − 1",
        (
            "OpenRLHF",
            "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns",
        ),
    ),
    formula(
        "not whitened",
        "x (PPO)",
        lambda x, m: x * m,
        "advantages in the unit of the reward",
        "PPO advantages stay as GAE gives them",
        ("rlhf-book", "code/policy_gradients/utils.py::compute_advantages"),
    ),
    formula(
        "mean added back, by n",
        "(x − x̄) / √(var_n + ϵ) + x̄",
        lambda x, m: sum(_white_by_n(x, m)),
        "rewards, whose mean carries meaning",
        "advantages are scaled, not centred",
        "RLHF_in_notebooks",
    ),
    probe=lambda f: f(_t([1, 2, 3, 6, 9]), torch.arange(5)[None] < 4)[:, :4],
)


RETURNS = Quantity(
    "returns",
    "target of the value head at the last token of each response",
    lambda f: _on_example("advantages", "old_values", "mask")(f)[[0, 1], [2, 1]],
    formula(
        "before whitening",
        "Â + V, then whiten",
        lambda a, v, m: a + v,
        "a target with the unit of the reward",
        "right",
        ("instruct_goose", "objective.advantages::gae", "whitening is a step of its own"),
        ("torchtune", "torchtune/rlhf/rewards.py::estimate_advantages"),
        "TRL PPO",
        ("OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py::get_advantages_and_returns"),
        ("verl", "::compute_gae_advantage_return"),
        ("CleanRL", "", "right; it whitens later, per minibatch"),
        ("rlhf-book", "", "right; never whitened"),
    ),
    formula(
        "after whitening, mean added back",
        "whitened Â + V",
        lambda a, v, m: sum(_white_by_n(a, m)) + v,
        "none that we know of",
        "not a return: its unit is a standard deviation",
        ("RLHF_in_notebooks", "::compute_advantage"),
    ),
)


def _grouped(eps, alone=None):
    "Scores over their spread; of one response `alone` makes what it gets."

    def f(x):
        if alone and len(x) < 2:
            return alone(x)
        far = x - x.mean()
        return far / ((far.square().sum() / (len(x) - 1)).sqrt() + eps)

    return f


def _tell_group_std(f):
    by = _match(f(_t(1.0, -1.0)).round(decimals=2), {"G − 1": _t(0.71, -0.71), "G": _t(1.0, -1.0)})
    s = 1e-6  # of two scores ±s: s / (√2·s + ϵ) → ϵ
    eps = s / f(_t(s, -s))[0].item() - s * (2**0.5 if by == "G − 1" else 1)
    alone = _refuses(f, _t(3.0))
    return f"divides by {by}, ϵ = {eps:.0e}, one alone: {show(alone)}"


GROUP_STD = Quantity(
    "group std",
    "advantages of the scores (1, −1), and of the near tie (.0001, 0)",
    lambda f: (f(_t(1.0, -1.0)), f(_t(1e-4, 0.0))),
    formula(
        "divides by G − 1, ϵ = 1e-04, one alone: refused",
        "(x − x̄) / (std + 10⁻⁴)",
        lambda x: group_advantages(x, len(x)),
        "scores of size 1",
        "near ties stay small; refuses a group of one",
        ("instruct_goose", "objective.advantages::group_advantages"),
    ),
    formula(
        "divides by G − 1, ϵ = 1e-04, one alone: nan",
        "(x − x̄) / (std + 10⁻⁴)",
        _grouped(1e-4),
        "scores of size 1",
        "near ties stay small",
        (
            "torchtune: dev recipe",
            "recipes/dev/grpo_full_finetune_distributed.py::generate_trajectory",
        ),
    ),
    formula(
        "divides by G − 1, ϵ = 1e-04, one alone: 0",
        "(x − x̄) / (std + 10⁻⁴)",
        _grouped(1e-4, lambda x: 0 * x),
        "scores of size 1",
        "near ties stay small; a group of one gets 0",
        ("TRL GRPO", "::_generate_and_score_completions"),
    ),
    formula(
        "divides by G − 1, ϵ = 1e-09, one alone: nan",
        "(x − x̄) / (std + 10⁻⁹)",
        _grouped(1e-9),
        "scores on any scale",
        "a near tie counts like a clear win",
        (
            "OpenRLHF: group_norm",
            "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns",
        ),
    ),
    formula(
        "divides by G − 1, ϵ = 1e-06, one alone: 3",
        "(x − x̄) / (std + 10⁻⁶)",
        _grouped(1e-6, lambda x: x / (1 + 1e-6)),
        "scores on any scale",
        "a group of one keeps its raw score",
        ("verl", "::compute_grpo_outcome_advantage"),
    ),
    formula(
        "divides by G − 1, ϵ = 1e-08, one alone: nan",
        "(x − x̄) / (std + 10⁻⁸)",
        _grouped(1e-8),
        "scores on any scale",
        "a near tie counts like a clear win",
        ("rlhf-book", "code/policy_gradients/utils.py::compute_standardized_advantages"),
    ),
    tell=_tell_group_std,
)


_PI = _t(0.7, 0.2, 0.1).log()
_REF = _t(0.3, 0.3, 0.4).log()


def expected_estimate(f):
    return (_PI.exp() * f(_PI, _REF)).sum()


def _estimate_near_and_far(f):
    "Its average, at ℓ = −1, and at ℓ = −15 the bound, if there is one of 10 or below."
    return torch.stack(
        [
            expected_estimate(f),
            f(_t(-2.0), _t(-1.0))[0],
            f(_t(-16.0), _t(-1.0))[0].abs().clamp(max=11),
        ]
    )


def _clamped(x):
    return x.clamp(-10, 10)


KL_K1 = Quantity(
    "KL, k1",
    "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)",
    expected_estimate,
    formula(
        "k1, unbiased",
        "ℓ = log π − log π_ref",
        lambda p, q: k1(p - q),
        "the reward; a metric",
        "unbiased",
        ("instruct_goose", "objective.kl::k1"),
        ("torchtune", "torchtune/rlhf/rewards.py::get_rewards_ppo"),
        "TRL PPO",
        ("verl", "::kl_penalty_forward"),
        ("DI-engine", "::calculate_kl_div", "unbiased; averaged over all slots, weight left out"),
        (
            "CleanRL: old_approx_kl",
            "",
            "a metric, log π_old − log π; unbiased: the policy that sampled comes first",
        ),
    ),
    formula(
        "k1, unbiased up to 10",
        "clip(ℓ, ±10)",
        lambda p, q: _clamped(p - q),
        "the reward",
        "unbiased while every ℓ lies within ±10",
        ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl"),
    ),
    formula(
        "reversed k1, averages to −KL",
        "−ℓ",
        lambda p, q: q - p,
        "none that we know of",
        "the sign is turned: subtracted from the reward it pays for drift",
        ("rlhf-book", "::approx_kl1"),
    ),
    probe=_estimate_near_and_far,
)

KL_K3 = Quantity(
    "KL, k3",
    "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)",
    expected_estimate,
    formula(
        "k3, unbiased",
        "e^(−ℓ) − 1 + ℓ",
        lambda p, q: k3(p - q),
        "a metric; early stopping",
        "unbiased",
        ("instruct_goose", "objective.kl::k3", "unbiased; ℓ ≥ −10, so at most e¹⁰"),
        ("DI-engine", "::calculate_kl_div", "unbiased; averaged over all slots, weight left out"),
        ("TRL PPO", "", "unbiased as a number; see the lesson on its gradient"),
        "TRL GRPO",
        (
            "CleanRL: approx_kl",
            "",
            "for early stopping, ρ − 1 − log ρ; unbiased: the policy that sampled comes first",
        ),
    ),
    formula(
        "k3, unbiased up to 10",
        "clip(e^(−ℓ) − 1 + ℓ, ±10)",
        lambda p, q: _clamped((q - p).exp() - 1 + p - q),
        "a metric",
        "biased down where k3 exceeds 10; no gradient there",
        ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl"),
        ("verl", "::kl_penalty_forward"),
    ),
    formula(
        "reversed k3, averages to χ² − KL",
        "e^ℓ − 1 − ℓ",
        lambda p, q: torch.expm1(p - q) - (p - q),
        "samples from π_ref",
        "with samples from π it averages to χ² − KL",
        ("rlhf-book", "::approx_kl3"),
    ),
    probe=_estimate_near_and_far,
)


def kl_pull(f):
    "The expected gradient on the logits, on policy."
    z = _PI.clone().requires_grad_()
    p = z.log_softmax(-1)
    loss = (_PI.exp() * f(p, _REF, p.detach())).sum()
    return torch.autograd.grad(loss, z)[0] if loss.requires_grad else torch.zeros(3)


def _ours(**how):
    return lambda p, q, old: kl_in_loss(
        p[None], q[None], torch.ones(1, 3, dtype=torch.bool), 1.0, **how
    )[0]


KL_LOSS = Quantity(
    "KL as a loss",
    "expected gradient on the three logits; KL(π‖π_ref) has .3317, −.1558, −.176",
    kl_pull,
    formula(
        "gradient of KL(π‖π_ref)",
        "½ℓ²",
        _ours(),
        "the loss, on policy",
        "the gradient of KL(π‖π_ref)",
        ("instruct_goose: default", "objective.kl::kl_in_loss"),
        ("DI-engine: k2", "::calculate_kl_div"),
    ),
    formula(
        "gradient of KL(π‖π_ref)",
        "k₂ − sg(k₂) + sg(k₃)",
        _ours(estimator="k3", straight_through=True),
        "a loss whose value is a KL too",
        "the gradient of KL(π‖π_ref)",
        ("instruct_goose: straight_through", "objective.kl::kl_in_loss"),
    ),
    formula(
        "no gradient",
        "ℓ",
        kl_as_k1,
        "the reward",
        "expected gradient 0, all noise; kl_type='k2' is the one to set",
        ("DI-engine: k1, its default", "::calculate_kl_div"),
    ),
    formula(
        "gradient of KL(π_ref‖π)",
        "e^(−ℓ) − 1 + ℓ",
        kl_as_k3,
        "GRPO as published",
        "the gradient of KL(π_ref‖π)",
        ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error"),
    ),
    formula(
        "gradient of KL(π‖π_ref)",
        "ρ·(e^(−ℓ) − 1 + ℓ)",
        kl_as_weighted_k3,
        "the loss, also off policy",
        "the gradient of KL(π‖π_ref); use_bias_correction_kl was False by default in 1.9.0; at sequence level ρ is the response's",
        "TRL GRPO: its default",
    ),
    formula(
        "no gradient",
        "clip(ℓ, ±10)",
        lambda p, q, old: _clamped(p - q),
        "the reward, its default placement",
        "as a loss: expected gradient 0; it prints the advice to take k2 or k3",
        ("OpenRLHF: k1, its default", "openrlhf/models/utils.py::compute_approx_kl"),
    ),
    formula(
        "gradient of KL(π_ref‖π)",
        "clip(e^(−ℓ) − 1 + ℓ, ±10)",
        lambda p, q, old: _clamped((q - p).exp() - 1 + p - q),
        "GRPO as published",
        "the gradient of KL(π_ref‖π)",
        ("verl: low_var_kl, its default", "::kl_penalty"),
    ),
    formula(
        "gradient of KL(π‖π_ref)",
        "k₂ − sg(k₂) + sg(k₃)",
        kl_as_straight_through,
        "a loss whose value is a KL too",
        "right; up to 0.7.0 the call raised NotImplementedError, since the inner function got the name with the +",
        ("verl: k3+", "::kl_penalty"),
    ),
    formula(
        "gradient of KL(π‖π_ref)",
        "w·k₂ − sg(w·k₂) + sg(clip(k, ±10)), w = sg(π/π_old)",
        lambda p, q, old: (
            (p - old).exp().detach() * (k2(p - q) - k2(p - q).detach())
            + _clamped(k3(p - q)).detach()
        ),
        "the loss, also off policy",
        "the gradient of KL(π‖π_ref) for k1, k2 and k3 alike; off by default",
        ("OpenRLHF: unbiased_gradient", "openrlhf/models/utils.py::compute_approx_kl"),
    ),
    formula(
        "gradient of ½χ²(π‖π_ref)",
        "e^ℓ − 1 − ℓ",
        kl_as_reversed_k3,
        "a heavy penalty on rare tokens of π_ref",
        "pulls to the reference, as a χ²-divergence, not as a KL",
        ("rlhf-book: kl3, its default", "::GRPOLoss"),
    ),
)


def _entropy_at(f, tau=0.7):
    return _on_example("logits", "old_logprobs", "mask")(lambda *x: f(*x, tau))


ENTROPY = Quantity(
    "entropy",
    "entropy of the padded example at temperature .7",
    _entropy_at,
    formula(
        "real tokens",
        "Σ m·S / Σ m, at τ",
        lambda z, lp, m, tau: masked_mean(entropy(z, tau), m),
        "a bonus and a metric",
        "right",
        (
            "instruct_goose",
            "objective.logprobs::entropy",
            "of the policy that samples, its real tokens",
        ),
        "TRL GRPO",
        (
            "verl",
            "verl/workers/engine/fsdp/transformer_impl.py::prepare_model_outputs",
            "right; averaged by loss_agg_mode",
        ),
        (
            "OpenRLHF",
            "openrlhf/models/actor.py::forward",
            "right; up to 0.11.0 it was taken at τ = 1",
        ),
    ),
    formula(
        "all slots, padding as 0, τ = 1",
        "Σ m·S / N",
        lambda z, lp, m, tau: (entropy(z) * m).mean(),
        "batches without padding",
        "shrinks with padding; the logits are the caller's",
        "DI-engine",
    ),
    formula(
        "per response, each pad −1",
        "−Σ log π over all slots / B, log π = 1 at padding",
        lambda z, lp, m, tau: -torch.where(m, lp, 1.0).sum(1).mean(),
        "responses of full length",
        "every padded slot takes 1 nat off; it can turn negative",
        "TRL PPO 1.9: objective/entropy",
    ),
    formula(
        "per response",
        "−Σ m·log π / B",
        lambda z, lp, m, tau: -(lp * m).sum(1).mean(),
        "a metric of whole responses",
        "an estimate from the sampled tokens, which grows with length",
        "TRL PPO: objective/entropy",
    ),
    formula(
        "all slots",
        "Σ S / N, at τ",
        lambda z, lp, m, tau: entropy(z, tau).mean(),
        "responses of full length",
        "what the model says at padding is in it; a metric only, no bonus",
        "TRL PPO: policy/entropy_avg",
    ),
    formula(
        "all slots, τ = 1",
        "Σ S / N",
        lambda z, lp, m, tau: entropy(z).mean(),
        "environments, temperature 1",
        "right there",
        "CleanRL",
    ),
)


def _logged(f):
    ex = (
        padded_example()
    )  # its ratios average to 1, and k1 is k3 there: so every token loses .2 nats
    return f(ex.logprobs - 0.2 * ex.mask.double(), ex.old_logprobs, ex.mask)


LOGGED_KL = Quantity(
    "logged KL",
    "the padded example's approx_kl, .2 nats lower, old to new",
    _logged,
    formula(
        "k3, real tokens",
        "Σ m·k₃ / Σ m",
        lambda new, old, m: masked_mean(k3(old - new), m),
        "early stopping",
        "unbiased, never negative",
        ("instruct_goose", "objective.ppo::update_meters"),
    ),
    formula(
        "k2, all slots",
        "Σ ½ℓ² / N",
        lambda new, old, m: k2(new - old).mean(),
        "responses of full length",
        "padding counts as agreement",
        ("torchtune", "recipes/ppo_full_finetune_single_device.py::ppo_step"),
        "TRL PPO",
    ),
    formula(
        "k1, all slots",
        "Σ ℓ / N",
        lambda new, old, m: (old - new).mean(),
        "batches without padding",
        "padding counts, with whatever it holds",
        "DI-engine",
    ),
    formula(
        "k1, real tokens",
        "Σ m·ℓ / Σ m",
        lambda new, old, m: masked_mean(old - new, m),
        "a metric",
        "unbiased; can be negative",
        "OpenRLHF",
        ("verl", "::compute_policy_loss_vanilla"),
    ),
    formula(
        "k3, all slots",
        "Σ k₃ / N",
        lambda new, old, m: k3(old - new).mean(),
        "early stopping",
        "unbiased; no mask to give",
        "CleanRL",
    ),
)


def _raw(z, a, tau):
    return token_logprobs(z, a)


TEMPERATURE = Quantity(
    "temperature",
    "log-probability of end after bad, sampled at temperature .6",
    lambda f: f(_t(0.30, 0.20, 0.50).log(), torch.tensor(2), 0.6),  # the old policy after bad
    formula(
        "the sampler's τ",
        "log softmax(z/τ)",
        token_logprobs,
        "training the policy that samples",
        "right",
        ("instruct_goose", "objective.logprobs::token_logprobs", "τ belongs to the policy"),
        (
            "torchtune",
            "torchtune/rlhf/sequence_processing.py::logits_to_logprobs",
            "right; the recipe passes its sampling τ",
        ),
        ("TRL GRPO", "::_get_per_token_logps_and_entropies"),
        (
            "OpenRLHF",
            "openrlhf/models/utils.py::log_probs_from_logits",
            "right; the model's forward divides the logits by τ",
        ),
        (
            "verl",
            "verl/workers/engine/fsdp/transformer_impl.py::prepare_model_outputs",
            "right; entropy too",
        ),
    ),
    formula(
        "τ = 1",
        "log softmax(z)",
        _raw,
        "logits already divided",
        "the caller divides by τ, or trains at τ = 1",
        ("DI-engine", "ding/rl_utils/log_prob_utils.py::efficient_method"),
    ),
    formula(
        "the sampler's, τ + 1e-7",
        "log softmax(z/(τ + 10⁻⁷))",
        lambda z, a, tau: token_logprobs(z, a, tau + 1e-7),
        "training the policy that samples",
        "right; sampled with the same τ + 10⁻⁷",
        "TRL PPO",
    ),
    formula(
        "τ = 1",
        "log softmax(z)",
        _raw,
        "sampling at τ = 1",
        "right there; no temperature",
        ("CleanRL", "::get_action_and_value"),
        (
            "rlhf-book",
            "code/policy_gradients/utils.py::compute_log_probs",
            "its configurations sample at .6: not the distribution that sampled",
        ),
    ),
    probe=lambda f: f(_t(0.0, 1e-4, 3e-4), torch.tensor(1), 2e-4),
)  # so small that 1e-7 shows


def _put(scores, m, at):
    return torch.where(torch.arange(m.shape[1]) == at[:, None], scores[:, None], 0.0)


def _past(scores, m, least=0):
    n = m.sum(1)
    return _put(scores, m, torch.where((n > least) & (n < m.shape[1]), n, n - 1))


def _last_advantages(f):
    ex = padded_example(3)  # the first response fills its row
    values = torch.where(ex.mask, ex.old_values, 0.0)
    return gae(f(ex.scores, ex.mask), values, torch.ones_like(ex.mask), 1.0, 0.95)[0][
        [0, 1], [2, 1]
    ]


POSITION = Quantity(
    "reward position",
    "GAE of each response's last token, γ = 1, λ = .95, V = 0 at padding",
    _last_advantages,
    formula(
        "last real token",
        "at the last real token",
        lambda s, m: kl_in_reward(s, 0 * m.double(), 0 * m.double(), m, 0.0),
        "any padding",
        "right",
        ("instruct_goose", "objective.kl::kl_in_reward", "by index, left padding too"),
        ("OpenRLHF", "openrlhf/models/utils.py::compute_reward"),
        (
            "verl",
            "verl/workers/reward_manager/naive.py::__call__",
            "at index Σ m − 1: its responses begin in column 0",
        ),
        ("rlhf-book", "code/policy_gradients/utils.py::compute_gae"),
    ),
    formula(
        "one past it, from two tokens on",
        "one past the last, if there is room",
        lambda s, m: _past(s, m, 1),
        "a value head that reads the state after the end",
        "a full row and a response of one token get it at the last token",
        ("torchtune: recipe", "recipes/ppo_full_finetune_single_device.py::generate_trajectory"),
    ),
    formula(
        "last column",
        "in the last column",
        lambda s, m: _put(s, m, 0 * m.sum(1) + m.shape[1] - 1),
        "rows without padding",
        "pass valid_score_idxs where there is padding",
        ("torchtune: by default", "torchtune/rlhf/rewards.py::get_rewards_ppo"),
    ),
    formula(
        "one past it, if there is room",
        "one past the last, if there is room",
        _past,
        "a value head that reads the state after the end",
        "a full row gets it at the last token: two kinds of row in one batch",
        "TRL PPO",
    ),
    probe=lambda f: f(_t(1.0, 1.0, 1.0), torch.arange(4) < torch.tensor([[4], [2], [1]])),
)


OBJECTIVE = Quantity(
    "clipped objective",
    "at (ρ, Â) = (.5, .8), (1.5, .8), (1.5, −1), (.5, −1), ε = .2",
    lambda f: f(_t(0.5, 1.5, 1.5, 0.5), _t(0.8, 0.8, -1.0, -1.0), 0.2),
    formula(
        "the smaller of both",
        "min(ρÂ, clip(ρ)Â)",
        clipped_objective,
        "several updates per batch",
        "right",
        ("instruct_goose", "objective.policy_loss::clipped_objective", "a lower bound of ρÂ"),
        "torchtune",
        "TRL PPO",
        ("verl", "::compute_policy_loss_vanilla", "right, up to its dual clip (below)"),
        "CleanRL",
        "DI-engine",
        "TRL GRPO",
        "OpenRLHF",
        "rlhf-book",
    ),
    formula(
        "clipped on every side",
        "clip(ρ)Â",
        clip_without_min,
        "none that we know of",
        "without the min a bad move below 1 − ε has no gradient back",
        "illustrated-rlhf",
    ),
    formula(
        "ρ·clip(ρ) in the place of clip(ρ)Â",
        "min(ρÂ, ρ·clip(ρ)), minimised",
        ratio_times_clip_loss,
        "none that we know of",
        "Â is missing from the second term, and the sign is that of a loss to be maximised",
        "instructGOOSE",
    ),
)


DUAL_CLIP = Quantity(
    "dual clip",
    "objective at (ρ, Â) = (1, 1) and (5, −1), ε = .2, c = 3",
    lambda f: f(_t(1.0, 5.0), _t(1.0, -1.0), 3.0),
    formula(
        "negative advantages only",
        "Â < 0: max(min(…), cÂ)",
        lambda r, a, c: clipped_objective(r, a, dual_clip=c),
        "ratios that explode",
        "off by default",
        ("instruct_goose", "objective.policy_loss::clipped_objective"),
        "DI-engine: discrete",
        "OpenRLHF",
        ("verl", "::compute_policy_loss_vanilla", "right; always on, c = 3"),
    ),
    formula(
        "every advantage",
        "max(min(…), cÂ)",
        dual_clip_of_every_sign,
        "none that we know of",
        "for Â > 0 the constant cÂ wins: no gradient from any good action",
        ("DI-engine: continuous", "::ppo_error_continuous"),
    ),
    formula(
        "negative advantages only",
        "min(min(ρ, δ)Â, clip(ρ)Â)",
        delta_clip,
        "ratios that explode",
        "the same by another way for δ ≥ 1 + ε_high, below that not; off by default",
        "TRL GRPO: delta",
    ),
)


def cispo_pull(f, log_ratios=(1.5, 0.6)):
    "Gradient of the loss on log π where ρ = 1.5 and .6, Â = 1, range .8 to 1.2."
    old = _t(-1.0, -2.0)
    new = (old + _t(*log_ratios).log()).requires_grad_()
    return torch.autograd.grad(f(new, old, _t(1.0, 1.0), 0.8, 1.2).sum(), new)[0]


def _weighted(new, old, a, low, high):
    rows = (x[None] for x in (new, old, a, torch.ones_like(new, dtype=torch.bool)))
    return policy_loss(*rows, 1 - low, high - 1, surrogate="weight")[0]


CISPO = Quantity(
    "CISPO",
    "gradient on log π where ρ = 1.5 and .6, Â = 1, range .8 to 1.2",
    cispo_pull,
    formula(
        "weight cut on both sides",
        "−sg(clip(ρ))·Â·log π",
        _weighted,
        "keeping rare tokens in the gradient",
        "bounds on both sides",
        (
            "instruct_goose",
            "objective.policy_loss::policy_loss",
            "the preset cispo has no lower bound, as the paper's runs",
        ),
        ("verl", "::compute_policy_loss_cispo"),
        ("rlhf-book", "::CISPOLoss"),
    ),
    formula(
        "weight cut above",
        "−sg(min(ρ, ε_high))·Â·log π",
        weight_cut_above,
        "keeping rare tokens in the gradient",
        "ε_high is the cap itself, not its distance from 1; no lower bound",
        "TRL GRPO",
    ),
    formula(
        "no gradient outside",
        "−clip(ρ)·Â",
        no_gradient_outside,
        "none that we know of",
        "neither stop-gradient nor log π: outside the range the token is silent",
        "torchrl",
    ),
)


def _ratios(f):
    ex = padded_example()
    return f((ex.logprobs - ex.old_logprobs).exp(), ex.advantages, ex.mask, 0.2)


CLIP_FRACTION = Quantity(
    "clip fraction",
    "share of clipped tokens in the padded example, ε = .2",
    _ratios,
    formula(
        "cut, of real tokens",
        "Σ m·[clip(ρ)Â < ρÂ] / Σ m",
        lambda r, a, m, eps: sum(clip_fraction(r, a, m, eps)),
        "what the clip does",
        "right",
        ("instruct_goose", "objective.policy_loss::clip_fraction", "low and high apart"),
        "torchtune",
        "TRL PPO",
        "OpenRLHF",
        ("verl", "::compute_policy_loss_vanilla", "right; the dual clip's share apart"),
        ("TRL GRPO", "", "right; low and high apart"),
    ),
    formula(
        "out of range, of all slots",
        "Σ [ρ outside 1 ± ε] / N",
        lambda r, a, m, eps: ((r - 1).abs() > eps).double().mean(),
        "how far ratios went",
        "the sign of Â and the mask are left out",
        "DI-engine",
        ("CleanRL", "", "the sign of Â is left out; no mask to give"),
    ),
)


def _value_number(f):
    ex = padded_example()
    return masked_mean(f(ex.values, ex.returns, ex.old_values, 0.2), ex.mask)


VALUE_CLIP = Quantity(
    "value clipping",
    "mean value loss of the real tokens, c = .2",
    _value_number,
    formula(
        "half the larger square",
        "½ max((V − R̂)², (clip(V, V_old ± c) − R̂)²)",
        lambda v, r, old, c: value_loss(v, r, torch.ones_like(v, dtype=torch.bool), old, c),
        "slowing the value head",
        "right; c = .2",
        ("instruct_goose", "objective.value_loss::value_loss", "c has the unit of the reward"),
        "torchtune",
        "TRL PPO",
        "rlhf-book",
        ("DI-engine", "::ppo_value_error", "c is the policy's ε, whatever the scale of rewards"),
        ("CleanRL", "", "c is the policy's ε, whatever the scale of rewards"),
        ("OpenRLHF", "::ValueLoss", "right; c = .5"),
        ("verl", "::compute_value_loss", "right; c = .5"),
    ),
    formula(
        "without V_old",
        "V_clip = clip(V − V_old, ±ε)",
        lambda v, r, old, c: torch.maximum((v - r) ** 2, ((v - old).clamp(-c, c) - r) ** 2) / 2,
        "none that we know of",
        "the printed equation lacks V_old +; the code beside it has it",
        "labml: its equation",
    ),
    formula(
        "the square",
        "(V − R̂)²",
        lambda v, r, old, c: (v - r) ** 2,
        "a head that may move freely",
        "no clip, no ½: the same vf_coef weighs twice as much",
        "instructGOOSE",
    ),
)


def _by_response(log_w, m, low, high):
    of_row = (torch.where(m, log_w, 0.0).sum(1, keepdim=True) / m.sum(1, keepdim=True)).exp()
    return log_w.exp() * ((of_row >= low) & (of_row <= high))


SAMPLER_WEIGHTS = Quantity(
    "sampler weights",
    "weights of three tokens with π_old/μ = 4, .25 and 1; bounds .5 and 2",
    lambda f: f(_t([4, 0.25, 1]).log(), torch.ones(1, 3, dtype=torch.bool), 0.5, 2.0)[0],
    formula(
        "cut above",
        "min(w, C)",
        lambda log_w, m, low, high: sampler_weights(log_w, torch.zeros_like(log_w), m, high),
        "a small mismatch",
        "off by default",
        ("instruct_goose", "objective.policy_loss::sampler_weights"),
    ),
    formula(
        "cut on both sides",
        "clip(w, low, high)",
        lambda log_w, m, low, high: log_w.exp().clamp(low, high),
        "a small mismatch",
        "lifts small weights too; bounds .5 and 5; off by default",
        "OpenRLHF: token, clip",
        (
            "TRL GRPO: token_truncate",
            "::_generate_and_score_completions",
            "each bound may be left out; with vLLM alone",
        ),
    ),
    formula(
        "0 outside",
        "w·1[low ≤ w ≤ high]",
        lambda log_w, m, low, high: log_w.exp() * ((log_w.exp() >= low) & (log_w.exp() <= high)),
        "a few tokens that are far off",
        "a token outside teaches nothing",
        "OpenRLHF: token, mask",
        (
            "TRL GRPO: token_mask",
            "::_generate_and_score_completions",
            "a token outside teaches nothing; with vLLM alone",
        ),
    ),
    formula(
        "whole responses, uncut",
        "w·1[low ≤ exp(mean log w) ≤ high]",
        _by_response,
        "a few responses that are far off",
        "no bound on a single token",
        "OpenRLHF: seq, mask",
    ),
)


def _remax_number(f):
    return f(_t([0.5, 0, 1]), torch.ones(1, 3, dtype=torch.bool), _t(0.4))[0]


REMAX = Quantity(
    "ReMax advantage",
    "of three tokens with rewards .5, 0 and 1, where the greedy response got .4",
    _remax_number,
    formula(
        "total less baseline",
        "Σₛ rₛ − b, at each token",
        lambda r, m, b: estimate_advantages("greedy", r, m, baseline=b)[0],
        "one score per response",
        "what an earlier token was paid counts for a later one too",
        ("instruct_goose", "objective.advantages::estimate_advantages"),
    ),
    formula(
        "reward to go less baseline",
        "Σₛ₌ₜ rₛ − b",
        lambda r, m, b: (r * m).flip(-1).cumsum(-1).flip(-1) - b[:, None] * m,
        "one score per response",
        "with rewards per token a later token is compared with the whole baseline",
        ("verl", "::compute_remax_outcome_advantage"),
    ),
)


def _gmpo_weighted(f):
    return f(_t([4, 0.25, 1]), torch.ones(1, 3, dtype=torch.bool), _t(1.0)).sum()


GMPO_WEIGHTS = Quantity(
    "GMPO, sampler weights",
    "objective of a response with Â = 1, ρ = 1 and weights of 4, .25 and 1",
    _gmpo_weighted,
    formula(
        "arithmetic mean",
        "Â·g·Σ m·w / Σ m, g the geometric mean of the ratios",
        lambda w, m, a: a * masked_mean(w, m),
        "weights near 1",
        "one large weight lifts the response",
        ("instruct_goose", "objective.policy_loss::policy_loss"),
    ),
    formula(
        "geometric mean",
        "Â·g·exp(Σ m·log w / Σ m)",
        lambda w, m, a: a * masked_mean((w + 1e-10).log(), m).exp(),
        "weights of any size",
        "a weight of 0, from a dropped token, silences the response",
        ("verl", "::compute_policy_loss_geo_mean"),
    ),
    probe=lambda f: torch.stack(
        [_gmpo_weighted(f), f(_t([2, 2, 9]), _t([1, 1, 0]).bool(), _t(-0.5)).sum()]
    ),
)


def _clipped_weights(f):
    "Five tokens, ρ = .5, .5, 1, 2 and 2, with Â above and below 0; weights between .8 and 1.5."
    ratios, signs = _t([0.5, 0.5, 1, 2, 2]), _t([1.0, -1.0, 1.0, 1.0, -1.0])
    return f(ratios, signs, torch.ones(1, 5, dtype=torch.bool), 0.8, 1.5)


CISPO_CLIPS = Quantity(
    "CISPO, clip fraction",
    "share of ρ = .5, .5, 1, 2, 2 with Â = +, −, +, +, −; weights cut to .8 and 1.5",
    _clipped_weights,
    formula(
        "either side, either sign",
        "Σ m·[ρ outside] / Σ m",
        lambda r, a, m, low, high: masked_mean(((r < low) | (r > high)).double(), m),
        "the share of weights that are cut",
        "the weight is cut whatever the sign of Â",
        ("instruct_goose", "objective.policy_loss::clipped_shares", "low and high apart"),
        ("verl", "::compute_policy_loss_cispo", "both sides in one number"),
    ),
    formula(
        "above, Â > 0",
        "Σ m·[ρ > ε_high]·[Â > 0] / Σ m",
        lambda r, a, m, low, high: masked_mean(((r > high) & (a > 0)).double(), m),
        "none that we know of",
        "cispo_clip_ratio: weights that are cut where Â < 0 are not counted",
        "TRL GRPO",
    ),
)


GMPO_CLIPS = Quantity(
    "GMPO, clip fraction",
    "share of ρ = .5, .5, 1, 2, 2 with Â = +, −, +, +, −; log ρ cut to ±.4",
    lambda f: f(
        _t([0.5, 0.5, 1, 2, 2]),
        _t([1.0, -1.0, 1.0, 1.0, -1.0]),
        torch.ones(1, 5, dtype=torch.bool),
        0.4,
    ),
    formula(
        "cut",
        "Σ m·[log ρ cut, since Â drives it on] / Σ m",
        lambda r, a, m, eps: masked_mean(
            (((r.log() > eps) & (a > 0)) | ((r.log() < -eps) & (a < 0))).double(), m
        ),
        "what the clip does",
        "right; low and high apart",
        ("instruct_goose", "objective.policy_loss::clipped_shares"),
    ),
    formula(
        "out of range",
        "Σ m·[log ρ outside ±ε] / Σ m",
        lambda r, a, m, eps: masked_mean((r.log().abs() > eps).double(), m),
        "how far ratios went",
        "pg_clipfrac has those with Â > 0, pg_clipfrac_lower those with Â < 0: the sum of both",
        ("verl", "::compute_policy_loss_geo_mean"),
    ),
)


QUANTITIES = {
    q.name: q
    for q in (
        MASKED_MEAN,
        AGGREGATION,
        WHITENING,
        RETURNS,
        GROUP_STD,
        KL_K1,
        KL_K3,
        KL_LOSS,
        ENTROPY,
        LOGGED_KL,
        TEMPERATURE,
        POSITION,
        OBJECTIVE,
        DUAL_CLIP,
        CISPO,
        SAMPLER_WEIGHTS,
        CLIP_FRACTION,
        CISPO_CLIPS,
        GMPO_CLIPS,
        REMAX,
        GMPO_WEIGHTS,
        VALUE_CLIP,
    )
}


def _quantity(name):
    if name not in QUANTITIES:
        raise ValueError(f"no quantity {name!r}: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]


def tells_apart(
    quantity: str,  # a key of QUANTITIES
    f: Callable,  # an implementation; the formulas above show what it is called with
) -> str:  # what it computes, in words
    "Run an implementation and say which of the formulas it is. Raises ValueError for an unknown quantity."
    return _quantity(quantity).tell(f)


def comparison_table(quantity: str) -> str:
    "Markdown: each library's formula, with numbers computed now. Raises ValueError for an unknown quantity."
    q = _quantity(quantity)
    lines = [
        [
            f"**{r.version}** {r.link}",
            r.formula,
            q.number(r),
            r.good_for,
            f"*{r.kind}*; {r.verdict}",
        ]
        for r in q.rows
    ]
    table = _markdown("library", "formula", "number", "right for", "what to know", lines)
    return f"**{q.name}**: {q.shows}. Told apart by `{q.test}`.\n\n{table}"
