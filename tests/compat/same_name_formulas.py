"""What the libraries compute under one name: each formula as read in its source, in a few lines, and the test that tells
them apart. Data of the lesson `nbs/guides/same_name.ipynb` and of `test_same_name.py`; nothing is quoted."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from instruct_goose.objective.advantages import gae, group_advantages
from instruct_goose.objective.kl import k1, k2, k3, kl_in_loss, kl_in_reward
from instruct_goose.objective.logprobs import entropy, token_logprobs
from instruct_goose.objective.masks import aggregate, masked_mean, whiten
from instruct_goose.objective.policy_loss import clip_fraction, clipped_objective, policy_loss, sampler_weights
from instruct_goose.objective.value_loss import value_loss

SOURCES = {
    "torchtune": ("torchtune 0.6.1", "pytorch/torchtune/blob/v0.6.1"),
    "DI-engine": ("DI-engine 0.5.3+22", "opendilab/DI-engine/blob/d0b21d0"),
    "TRL PPO": ("TRL 1.9.0", "huggingface/trl/blob/v1.9.0"),
    "TRL GRPO": ("TRL 1.16.0", "huggingface/trl/blob/v1.16.0"),
    "OpenRLHF": ("OpenRLHF 0.11.0", "OpenRLHF/OpenRLHF/blob/v0.11.0"),
    "verl": ("verl 0.7.0+125", "volcengine/verl/blob/b178a3c"),
    "CleanRL": ("CleanRL 1.0.0+72", "vwxyzjn/cleanrl/blob/fe8d8a0"),
    "rlhf-book": ("rlhf-book 0.4+7", "natolambert/rlhf-book/blob/a66b0bf"),
    "instructGOOSE": ("instructGOOSE 0.0.7", "xrsrke/instructGOOSE/blob/5b9ac3f"),
    "torchrl": ("torchrl, 0098844", "pytorch/rl/blob/0098844"),
    "Liger": ("Liger 0.8.5", "linkedin/Liger-Kernel/blob/v0.8.5"),
    "labml": ("labml, 0a4b5b6",
              "labmlai/annotated_deep_learning_paper_implementations/blob/0a4b5b6"),
    "illustrated-rlhf": ("illustrated-rlhf",
                         "deepak-karkala/illustrated-rlhf/blob/57d7d01"),
    "RLHF_in_notebooks": ("RLHF_in_notebooks", "ash80/RLHF_in_notebooks/blob/f73d8ed"),
}


@dataclass(frozen=True)
class Padded:
    "The running example with padding that holds `fill`. float64."

    mask: Bool[Tensor, "2 time"]          # three real tokens, and two
    tokens: Int[Tensor, "2 time"]         # 0 at padding
    logits: Float[Tensor, "2 time 3"]     # uniform at padding
    logprobs: Float[Tensor, "2 time"]     # of the policy being trained
    old_logprobs: Float[Tensor, "2 time"] # of the policy that sampled
    values: Float[Tensor, "2 time"]       # of the value head being trained
    old_values: Float[Tensor, "2 time"]   # at sampling time
    advantages: Float[Tensor, "2 time"]   # γ = .9, λ = .5, not whitened
    returns: Float[Tensor, "2 time"]      # targets of the value head
    loss: Float[Tensor, "2 time"]         # clipped policy loss, ε = .2
    scores: Float[Tensor, "2"]            # one per response


def padded_example(
    width: int = 4,   # columns, at least 3
    fill: float = 1., # what stands in the padded slots
) -> Padded:
    "The five tokens of the running example in rows of `width`."
    d = lambda rows: torch.tensor(rows, dtype=torch.float64)
    new = d([[.55, .30, .15], [.60, .20, .20], [.35, .30, .35],
             [.60, .15, .25], [.20, .25, .55]])
    old = d([[.50, .25, .25], [.40, .40, .20], [.25, .25, .50],
             [.50, .25, .25], [.30, .20, .50]])
    ref = d([[.40, .40, .20], [.40, .40, .20], [.25, .25, .50],
             [.50, .25, .25], [.50, .25, .25]])
    chosen, scores = torch.tensor([0, 0, 2, 1, 2]), d([1., -1.])
    mask = torch.arange(width) < torch.tensor([[3], [2]])
    place = lambda x, pad=fill: torch.full(
        (2, width), pad, dtype=x.dtype).masked_scatter(mask, x)
    pick = lambda p: place(p.gather(-1, chosen[:, None])[:, 0].log())
    logits = torch.zeros(2, width, 3, dtype=torch.float64)
    logits[mask] = new.log()
    values = d([.55, .90, .70, -.30, -.40])
    old_values = place(d([.50, .60, .80, .10, -.20]))
    rewards = kl_in_reward(scores, pick(old), pick(ref), mask, .1)
    advantages, returns = gae(rewards, old_values, mask, .9, .5)
    loss = policy_loss(pick(new), pick(old), advantages, mask)
    return Padded(
        mask, place(chosen, 0), logits, pick(new), pick(old), place(values), old_values,
        *(torch.where(mask, x, fill) for x in (advantages, returns, loss)), scores)


@dataclass(frozen=True)
class Quantity:
    "A name that several libraries use, and how to find out what one of them means."

    name: str       # "masked mean"
    shows: str      # what the worked number is
    work: Callable  # an implementation → that number, on the shared example
    tell: Callable  # an implementation → what it computes, in words
    formulas: tuple # rows, see Row: (library, place, formula, f, good for, verdict)

    @property
    def test(self) -> str:
        "The test that tells the formulas apart."
        return "test_" + self.name.replace(" ", "_").replace(",", "")

    @property
    def rows(self) -> list["Row"]:
        "Its formulas as rows."
        return [Row(self, *formula) for formula in self.formulas]

    @property
    def kinds(self) -> dict[str, list["Row"]]:
        "What is computed → the rows that compute it."
        kinds = {}
        for row in self.rows: kinds.setdefault(row.kind, []).append(row)
        return kinds

    def __getitem__(self, library: str) -> "Row":
        return next(row for row in self.rows if row.library == library)


@dataclass(frozen=True)
class Row:
    "One library's formula for one quantity."

    quantity: Quantity
    library: str  # a key of SOURCES, perhaps with ": which"; or "instruct_goose"
    place: str    # path::function, at the version in SOURCES
    formula: str  # in the letters of the lessons
    f: Callable   # the same, as a function
    good_for: str # the purpose that it serves
    verdict: str  # what to know before use

    @property
    def number(self) -> str:
        "The worked number, computed now."
        return show(self.quantity.work(self.f))

    @property
    def kind(self) -> str:
        "What the test finds that it computes."
        return self.quantity.tell(self.f)

    @property
    def version(self) -> str:
        "Library and version."
        name, _, which = self.library.partition(": ")
        return SOURCES.get(name, (name,))[0] + (f" ({which})" if which else "")

    @property
    def link(self) -> str:
        "The place, in Markdown: a link that is pinned to the version."
        path, _, where = self.place.partition("::")
        source = SOURCES.get(self.library.partition(": ")[0])
        if source is None: return f"`{self.place.replace('::', ' ')}`"
        return f"[{path.split('/')[-1]}](https://github.com/{source[1]}/{path}) `{where}`"


def kinds_table(
    quantity: Quantity, # one of QUANTITIES
) -> str: # Markdown
    "One line for each thing that is computed under this name, with its libraries."
    lines = [["it computes", "formula", "number", "right for", "libraries"], ["---"] * 5]
    for kind, rows in quantity.kinds.items():
        uses = "; ".join(dict.fromkeys(r.good_for for r in rows))
        lines.append([f"**{kind}**", rows[0].formula, rows[0].number, uses,
                      ", ".join(r.version for r in rows)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(x) -> str:
    "Numbers as the lessons print them: four decimals, no zero before the point."
    if isinstance(x, str): return x
    if isinstance(x, tuple | list): return ", ".join(show(i) for i in x)
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
        if got.shape == wanted.shape and torch.allclose(
            got, wanted, atol=1e-6, equal_nan=True): return name
    return f"unknown: {show(got)}"


def _t(*rows): return torch.tensor(rows, dtype=torch.float64)

def _refuses(f, *args):
    "What f returns, or 'refused'."
    try: return f(*args)
    except (ValueError, ZeroDivisionError): return "refused"


def _tell_masked_mean(f):
    x, m = _t([2, 4, 9], [6, 9, 9]), torch.arange(3) < torch.tensor([[2], [1]])
    kind = _match(f(x, m), {
        "real tokens": 4, "all slots, padding as 0": 2, "all slots": 6.5})
    if kind != "real tokens": return kind
    if not f(torch.where(m, x, torch.nan), m).isfinite(): kind += ", NaN leaks in"
    empty = _refuses(f, x, m & False)
    return kind + f", empty: {show(empty)}"


MASKED_MEAN = Quantity(
    "masked mean", "mean of the loss over the padded example",
    lambda f: f(padded_example().loss, padded_example().mask), _tell_masked_mean, (
    ("instruct_goose", "objective.masks::masked_mean", "Σ m·x / Σ m, by selection",
     masked_mean, "token losses and metrics", "refuses an empty mask"),
    ("torchtune", "torchtune/rlhf/rewards.py::masked_mean", "Σ m·x / (Σ m + 10⁻⁸)",
     lambda x, m: (x * m).sum() / (m.sum() + 1e-8),
     "batches that may be empty", "right for finite padding"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::masked_mean", "Σ m·x / Σ m",
     lambda x, m: (x * m).sum() / m.sum(),
     "finite padding", "right; nan tells of an empty mask"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "Σ m·x / max(Σ m, 1)",
     lambda x, m: (x * m).sum() / m.sum().clamp(min=1),
     "batches that may be empty", "right for finite padding"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_policy_error", "Σ m·x / N, N all slots",
     lambda x, m: (x * m).mean(),
     "importance weights of steps", "as a mask it shrinks the loss by the share of padding"),
    ("OpenRLHF", "openrlhf/models/utils.py::masked_mean", "Σ m·x / Σ m",
     lambda x, m: (x * m).sum() / m.sum(),
     "finite padding", "right; nan tells of an empty mask"),
    ("verl", "verl/utils/torch_functional.py::masked_mean", "Σ m·x / (Σ m + 10⁻⁸), by selection",
     lambda x, m: torch.where(m, x, 0.).sum() / (m.sum() + 1e-8),
     "padding that holds anything", "right, also with NaN in padding"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Σ x / N",
     lambda x, m: x.mean(),
     "environments, where every slot is a step", "right there; no mask to give"),
    ("rlhf-book", "code/policy_gradients/loss.py::masked_mean", "Σ m·x / max(Σ m, 10⁻⁸)",
     lambda x, m: (x * m).sum() / m.sum().clamp(min=1e-8),
     "batches that may be empty", "right for finite padding")))


def _tell_aggregation(f):
    m = torch.arange(4) < torch.tensor([[3], [2]])
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    weight, = torch.autograd.grad(f(x, m), x)
    rows = lambda a, b: torch.where(m, _t([a], [b]), 0.)
    every = lambda a, b: _t([a] * 4, [b] * 4)
    return _match(weight, {
        "token mean": rows(.2, .2), "sequence mean": rows(1 / 6, 1 / 4),
        "sums over B·L": rows(1 / 8, 1 / 8), "sums over B": rows(1 / 2, 1 / 2),
        "sums over L": rows(1 / 4, 1 / 4), "all slots": every(1 / 8, 1 / 8),
        "length × unmasked mean": every(3 / 8, 2 / 8)})

def _token(x, m): return (x * m).sum() / m.sum()
def _sequence(x, m): return ((x * m).sum(1) / m.sum(1)).mean()


AGGREGATION = Quantity(
    "aggregation", "the padded example's policy loss as one number",
    lambda f: f(padded_example().loss, padded_example().mask), _tell_aggregation, (
    ("instruct_goose: token_mean", "objective.masks::aggregate", "Σ m·x / Σ m", aggregate,
     "every token alike", "long responses weigh more"),
    ("instruct_goose: sequence_mean", "objective.masks::aggregate", "mean over rows of Σₜ m·x / Σₜ m",
     lambda x, m: aggregate(x, m, "sequence_mean"), "every response alike", "tokens of long responses weigh less"),
    ("instruct_goose: sequence_sum", "objective.masks::aggregate", "Σ m·x / (B·L)",
     lambda x, m: aggregate(x, m, "sequence_sum"), "no length bias", "the loss shrinks with L"),
    ("torchtune", "torchtune/rlhf/loss/ppo.py::PPOLoss", "Σ m·x / Σ m", _token, "every token alike",
     "of the micro-batch: splitting a batch changes the weights"),
    ("DI-engine: PPO", "ding/rl_utils/ppo.py::ppo_policy_error", "Σ m·x / (B·T)",
     lambda x, m: (x * m).mean(), "no length bias", "T is the batch's width: padding sets the learning rate"),
    ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error", "mean over rows of Σₜ m·x / Σₜ m", _sequence,
     "every response alike", "as published; an empty row gives nan"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "Σ m·x / Σ m", _token, "every token alike",
     "of the micro-batch: splitting a batch changes the weights"),
    ("TRL GRPO: dapo, its default", "trl/trainer/grpo_trainer.py::_compute_loss", "Σ m·x / tokens of the whole batch",
     _token, "every token alike", "the count spans the accumulation window: splits add up"),
    ("TRL GRPO: grpo", "trl/trainer/grpo_trainer.py::_compute_loss", "mean over rows of Σₜ m·x / Σₜ m", _sequence,
     "every response alike", "as published"),
    ("TRL GRPO: dr_grpo", "trl/trainer/grpo_trainer.py::_compute_loss", "Σ m·x / (B·L)",
     lambda x, m: (x * m).sum() / (len(x) * 4), "no length bias", "L = max_completion_length"),
    ("TRL GRPO: luspo", "trl/trainer/grpo_trainer.py::_compute_loss", "Σ m·x / B",
     lambda x, m: (x * m).sum(1).mean(), "long responses weigh more, on purpose", "1.9.0 had Liger's formula"),
    ("Liger: luspo", "src/liger_kernel/chunked_loss/grpo_loss.py::LigerFusedLinearGRPOFunction",
     "Σ n·x / (B·T), n a row's tokens, x not masked", lambda x, m: (x * m.sum(1, keepdim=True)).mean(),
     "a ratio per sequence, one number per row", "with one number per token, padding enters"),
    ("OpenRLHF", "openrlhf/models/loss.py::aggregate_loss", "Σ m·x / tokens of the whole batch", _token,
     "every token alike", "counts are global: splits add up"),
    ("verl: token-mean", "verl/trainer/ppo/core_algos.py::agg_loss", "Σ m·x / tokens of the whole batch", _token,
     "every token alike", "counts are global: splits add up"),
    ("verl: seq-mean-token-mean", "verl/trainer/ppo/core_algos.py::agg_loss", "mean over rows of Σₜ m·x / Σₜ m",
     _sequence, "every response alike", "rows without a token are left out"),
    ("verl: seq-mean-token-sum", "verl/trainer/ppo/core_algos.py::agg_loss", "Σ m·x / B",
     lambda x, m: (x * m).sum(1).mean(), "the policy gradient of whole responses", "grows with length"),
    ("verl: seq-mean-token-sum-norm", "verl/trainer/ppo/core_algos.py::agg_loss", "Σ m·x / L",
     lambda x, m: (x * m).sum() / 4, "no length bias", "not divided by B: it grows with the batch"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Σ x / N", lambda x, m: x.mean(), "environments", "right there"),
    ("rlhf-book", "code/policy_gradients/loss.py::PPOLoss", "mean over rows of Σₜ m·x / Σₜ m", _sequence,
     "every response alike", "PPO, GRPO, GSPO, CISPO and REINFORCE alike"),
    ("rlhf-book: DAPO", "code/policy_gradients/loss.py::DAPOLoss", "Σ m·x / Σ m", _token, "every token alike",
     "of the micro-batch")))


def _tell_whitening(f):
    x, m = _t([1, 2, 3, 6, 9]), torch.tensor([[True] * 4 + [False]])
    far = _t([-2, -1, 0, 3])  # from the mean, 3; squares add up to 14
    s, n, every = (14 / 3)**.5, 3.5**.5, (42.8 / 4)**.5
    return _match(
        f(x, m)[:, :4], {
            "centred": far / s, "mean added back": far / s + 3,
            "centred, by n": far / n, "mean added back, by n": far / n + 3,
            "over all slots": (far - 1.2) / every, "not whitened": far + 3})

def _spread(f):
    ex = padded_example(); white = f(ex.advantages, ex.mask)[ex.mask]
    return white.mean(), white.std()

def _whitened(x, m, ddof=1):
    "By the masked mean and variance, with padding multiplied by 0."
    mean, n = (x * m).sum() / m.sum(), m.sum()
    var = ((x - mean)**2 * m).sum() / (n - ddof)
    return mean, (x - mean) * (var + 1e-8).rsqrt()


WHITENING = Quantity(
    "whitening", "mean and sd of the whitened advantages of the real tokens", _spread,
    _tell_whitening, (
    ("instruct_goose", "objective.masks::whiten", "(x − x̄) / √(var + ϵ)", whiten,
     "advantages", "centred; 0 at padding"),
    ("torchtune", "torchtune/rlhf/rewards.py::whiten", "(x − x̄) / √(var + ϵ) + x̄",
     lambda x, m: sum(_whitened(x, m)), "rewards, whose mean carries meaning",
     "shift_mean=True adds the mean back; its PPO advantages are scaled, not centred"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::masked_whiten", "(x − x̄) / √(var + ϵ)",
     lambda x, m: _whitened(x, m)[1], "advantages",
     "centred; for rewards it passes shift_mean=False, which keeps the mean"),
    ("DI-engine", "ding/policy/ppo.py::_forward_learn", "(x − x̄) / (std + ϵ) over all slots",
     lambda x, m: (x - x.mean()) / (x.std() + 1e-8), "environments without padding",
     "padding moves mean and spread"),
    ("OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns",
     "(x − x̄) / √max(var_n, ϵ)", lambda x, m: _whitened(x, m, ddof=0)[1], "advantages",
     "centred; the variance divides by n, not n − 1"),
    ("verl", "verl/utils/torch_functional.py::masked_whiten", "(x − x̄) / √(var + ϵ)",
     lambda x, m: _whitened(x, m)[1], "advantages", "centred; refuses a single token"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "(x − x̄) / (std + ϵ) per minibatch",
     lambda x, m: (x - x.mean()) / (x.std() + 1e-8), "environments without padding",
     "per minibatch: the same token's advantage depends on its company"),
    ("rlhf-book", "code/policy_gradients/utils.py::compute_advantages", "x (PPO)",
     lambda x, m: x * m, "advantages in the unit of the reward", "PPO advantages stay as GAE gives them"),
    ("RLHF_in_notebooks", "3-RLHF.ipynb::masked_whiten", "(x − x̄) / √(var_n + ϵ) + x̄",
     lambda x, m: _whitened(x, m, 0)[1] + (x * m).sum() / m.sum(),
     "rewards, whose mean carries meaning", "advantages are scaled, not centred")))


def _tell_returns(f):
    advantages, values = _t([1, 2, 3, 6]), _t([1, 0, 0, 0])
    white = _t([-2, -1, 0, 3]) / 3.5**.5 + 3 + values
    return _match(
        f(advantages, values, torch.ones(1, 4, dtype=torch.bool)),
        {"before whitening": _t([2, 2, 3, 6]), "after whitening, mean added back": white})


RETURNS = Quantity(
    "returns", "target of the value head at the last token of each response",
    lambda f: f(*(getattr(padded_example(), k) for k in ("advantages", "old_values", "mask")))[
        [0, 1], [2, 1]], _tell_returns, (
    ("instruct_goose", "objective.advantages::gae", "Â + V, then whiten", lambda a, v, m: a + v,
     "a target with the unit of the reward", "whitening is a step of its own"),
    ("torchtune", "torchtune/rlhf/rewards.py::estimate_advantages", "Â + V, then whiten",
     lambda a, v, m: a + v, "a target with the unit of the reward", "right"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "Â + V, then whiten",
     lambda a, v, m: a + v, "a target with the unit of the reward", "right"),
    ("OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py::get_advantages_and_returns",
     "Â + V, then whiten", lambda a, v, m: a + v, "a target with the unit of the reward", "right"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_gae_advantage_return", "Â + V, then whiten",
     lambda a, v, m: a + v, "a target with the unit of the reward", "right"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Â + V", lambda a, v, m: a + v,
     "a target with the unit of the reward", "right; it whitens later, per minibatch"),
    ("rlhf-book", "code/policy_gradients/loss.py::PPOLoss", "Â + V, never whitened",
     lambda a, v, m: a + v, "a target with the unit of the reward", "right"),
    ("RLHF_in_notebooks", "3-RLHF.ipynb::compute_advantage", "whitened Â + V",
     lambda a, v, m: _whitened(a, m, 0)[1] + (a * m).sum() / m.sum() + v,
     "none that we know of", "not a return: its unit is a standard deviation")))


def _grouped(eps=1e-4):
    def f(x):
        far = x - x.mean()
        return far / (far.square().sum().div(len(x) - 1).sqrt() + eps)
    return f

def _tell_group_std(f):
    by = _match(f(_t(1., -1.)).round(decimals=2), {
        "G − 1": _t(.71, -.71), "G": _t(1., -1.)})
    s = 1e-6  # of two scores ±s: s / (√2·s + ϵ) → ϵ
    eps = s / f(_t(s, -s))[0].item() - s * (2**.5 if by == "G − 1" else 1)
    alone = _refuses(f, _t(3.))
    return f"divides by {by}, ϵ = {eps:.0e}, one alone: {show(alone)}"


GROUP_STD = Quantity(
    "group std", "advantages of the scores (1, −1), and of the near tie (.0001, 0)",
    lambda f: (f(_t(1., -1.)), f(_t(1e-4, 0.))), _tell_group_std, (
    ("instruct_goose", "objective.advantages::group_advantages", "(x − x̄) / (std + 10⁻⁴)",
     lambda x: group_advantages(x, len(x)), "scores of size 1", "near ties stay small; refuses a group of one"),
    ("torchtune: dev recipe", "recipes/dev/grpo_full_finetune_distributed.py::generate_trajectory",
     "(x − x̄) / (std + 10⁻⁴)", _grouped(), "scores of size 1", "near ties stay small"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_generate_and_score_completions", "(x − x̄) / (std + 10⁻⁴)",
     lambda x: _grouped()(x) if len(x) > 1 else 0 * x, "scores of size 1",
     "near ties stay small; a group of one gets 0"),
    ("OpenRLHF: group_norm", "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns",
     "(x − x̄) / (std + 10⁻⁹)", _grouped(eps=1e-9), "scores on any scale", "a near tie counts like a clear win"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_grpo_outcome_advantage", "(x − x̄) / (std + 10⁻⁶)",
     lambda x: _grouped(eps=1e-6)(x) if len(x) > 1 else x / (1 + 1e-6), "scores on any scale",
     "a group of one keeps its raw score"),
    ("rlhf-book", "code/policy_gradients/utils.py::compute_standardized_advantages", "(x − x̄) / (std + 10⁻⁸)",
     _grouped(eps=1e-8), "scores on any scale", "a near tie counts like a clear win")))


_PI, _REF = _t(.7, .2, .1).log(), _t(.3, .3, .4).log()

def expected_estimate(f): return (_PI.exp() * f(_PI, _REF)).sum()

def _tell_kl(f):
    true = (_PI.exp() * (_PI - _REF)).sum()
    chi2 = (_PI.exp()**2 / _REF.exp()).sum() - 1
    value = _match(expected_estimate(f), {
        "unbiased": true, "averages to −KL": -true, "averages to χ² − KL": chi2 - true})
    at = f(_t(-2.), _t(-1.))  # ℓ = −1
    kind = _match(at.squeeze(), {
        "k1": -1., "k3": torch.e - 2,
        "reversed k1": 1., "reversed k3": 1 / torch.e})
    far = f(_t(-16.), _t(-1.)).abs().item()  # ℓ = −15
    return f"{kind}, {value}" + (f" up to {far:.0f}" if far <= 10 else "")

def _clamped(x): return x.clamp(-10, 10)


KL_K1 = Quantity(
    "KL, k1", "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)", expected_estimate, _tell_kl, (
    ("instruct_goose", "objective.kl::k1", "ℓ = log π − log π_ref", lambda p, q: k1(p - q),
     "the reward", "unbiased"),
    ("torchtune", "torchtune/rlhf/rewards.py::get_rewards_ppo", "ℓ", lambda p, q: p - q,
     "the reward", "unbiased"),
    ("DI-engine", "ding/rl_utils/ppo.py::calculate_kl_div", "ℓ", lambda p, q: p - q,
     "a meter", "unbiased; averaged over all slots, weight left out"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "ℓ", lambda p, q: p - q,
     "the reward", "unbiased"),
    ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl", "clip(ℓ, ±10)",
     lambda p, q: _clamped(p - q), "the reward", "unbiased while every ℓ lies within ±10"),
    ("verl", "verl/trainer/ppo/core_algos.py::kl_penalty_forward", "ℓ", lambda p, q: p - q,
     "the reward", "unbiased"),
    ("CleanRL: old_approx_kl", "cleanrl/ppo.py::train loop", "log π_old − log π, a from π_old",
     lambda p, q: -(q - p), "a meter", "unbiased: the policy that sampled comes first"),
    ("rlhf-book", "code/policy_gradients/loss.py::approx_kl1", "−ℓ", lambda p, q: -(p - q),
     "none that we know of", "the sign is turned: subtracted from the reward it pays for drift")))


KL_K3 = Quantity(
    "KL, k3", "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)", expected_estimate, _tell_kl, (
    ("instruct_goose", "objective.kl::k3", "e^(−ℓ) − 1 + ℓ, ℓ ≥ −10", lambda p, q: k3(p - q),
     "a meter", "unbiased; at most e¹⁰"),
    ("DI-engine", "ding/rl_utils/ppo.py::calculate_kl_div", "e^(−ℓ) − 1 + ℓ",
     lambda p, q: (q - p).exp() - 1 + p - q, "a meter",
     "unbiased; averaged over all slots, weight left out"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "e^(−ℓ) − 1 + ℓ",
     lambda p, q: (q - p).exp() - 1 + p - q, "a meter", "unbiased as a number; see the lesson on its gradient"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "e^(−ℓ) − 1 + ℓ",
     lambda p, q: (q - p).exp() - 1 + p - q, "a meter", "unbiased"),
    ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl", "clip(e^(−ℓ) − 1 + ℓ, ±10)",
     lambda p, q: _clamped((q - p).exp() - 1 + p - q), "a meter",
     "biased down where k3 exceeds 10; no gradient there"),
    ("verl", "verl/trainer/ppo/core_algos.py::kl_penalty_forward", "clip(e^(−ℓ) − 1 + ℓ, ±10)",
     lambda p, q: _clamped((q - p).clamp(-20, 20).exp() - 1 - (q - p).clamp(-20, 20)), "a meter",
     "biased down where k3 exceeds 10; no gradient there"),
    ("CleanRL: approx_kl", "cleanrl/ppo.py::train loop", "ρ − 1 − log ρ, a from π_old",
     lambda p, q: (q - p).exp() - 1 - (q - p), "early stopping",
     "unbiased: the policy that sampled comes first"),
    ("rlhf-book", "code/policy_gradients/loss.py::approx_kl3", "e^ℓ − 1 − ℓ",
     lambda p, q: torch.expm1(p - q) - (p - q), "samples from π_ref",
     "with samples from π it averages to χ² − KL")))


def kl_pull(f):
    "The expected gradient on the logits, on policy."
    z = _PI.clone().requires_grad_(); p = z.log_softmax(-1)
    loss = (_PI.exp() * f(p, _REF, p.detach())).sum()
    return torch.autograd.grad(loss, z)[0] if loss.requires_grad else torch.zeros(3)

def _tell_kl_loss(f):
    p, ell = _PI.exp(), _PI - _REF
    return _match(
        kl_pull(f), {
            "gradient of KL(π‖π_ref)": p * (ell - (p * ell).sum()), "no gradient": 0 * p,
            "gradient of KL(π_ref‖π)": p - _REF.exp(),
            "gradient of ½χ²(π‖π_ref)": p * (ell.exp() - (p * ell.exp()).sum())})

def _ours(**how):
    real = torch.ones(1, 3, dtype=torch.bool)
    return lambda p, q, old: kl_in_loss(p[None], q[None], real, 1., **how)[0]


KL_LOSS = Quantity(
    "KL as a loss", "expected gradient on the three logits; KL(π‖π_ref) has .3317, −.1558, −.176",
    kl_pull, _tell_kl_loss, (
    ("instruct_goose: default", "objective.kl::kl_in_loss", "½ℓ²", _ours(), "the loss, on policy",
     "the gradient of KL(π‖π_ref)"),
    ("instruct_goose: straight_through", "objective.kl::kl_in_loss", "k₂ − sg(k₂) + sg(k₃)",
     _ours(estimator="k3", straight_through=True), "a loss whose value is a KL too",
     "the gradient of KL(π‖π_ref)"),
    ("DI-engine: k1, its default", "ding/rl_utils/ppo.py::calculate_kl_div", "ℓ", lambda p, q, old: p - q,
     "the reward", "expected gradient 0, all noise; kl_type='k2' is the one to set"),
    ("DI-engine: k2", "ding/rl_utils/ppo.py::calculate_kl_div", "½ℓ²", lambda p, q, old: (p - q)**2 / 2,
     "the loss, on policy", "the gradient of KL(π‖π_ref)"),
    ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error", "e^(−ℓ) − 1 + ℓ",
     lambda p, q, old: (q - p).exp() - 1 + p - q, "GRPO as published", "the gradient of KL(π_ref‖π)"),
    ("TRL GRPO: its default", "trl/trainer/grpo_trainer.py::_compute_loss", "ρ·(e^(−ℓ) − 1 + ℓ)",
     lambda p, q, old: (p - old).exp() * ((q - p).exp() - 1 + p - q), "the loss, also off policy",
     "the gradient of KL(π‖π_ref); use_bias_correction_kl was False by default in 1.9.0; "
     "at sequence level ρ is the response's"),
    ("OpenRLHF: k1, its default", "openrlhf/models/utils.py::compute_approx_kl", "clip(ℓ, ±10)",
     lambda p, q, old: _clamped(p - q), "the reward, its default placement",
     "as a loss: expected gradient 0; it prints the advice to take k2 or k3"),
    ("verl: low_var_kl, its default", "verl/trainer/ppo/core_algos.py::kl_penalty", "clip(e^(−ℓ) − 1 + ℓ, ±10)",
     lambda p, q, old: _clamped((q - p).exp() - 1 + p - q), "GRPO as published",
     "the gradient of KL(π_ref‖π)"),
    ("verl: k3+", "verl/trainer/ppo/core_algos.py::kl_penalty", "k₂ − sg(k₂) + sg(k₃)",
     lambda p, q, old: (k2(p - q) - k2(p - q).detach() + k3(p - q).detach()), "a loss whose value is a KL too",
     "right as written; at b178a3c the call raises NotImplementedError, "
     "since the inner function gets the name with the +"),
    ("rlhf-book: kl3, its default", "code/policy_gradients/loss.py::GRPOLoss", "e^ℓ − 1 − ℓ",
     lambda p, q, old: torch.expm1(p - q) - (p - q), "a heavy price on rare tokens of π_ref",
     "pulls to the reference, as a χ²-divergence, not as a KL")))


def _entropies(f, tau=.7):
    ex = padded_example()
    return f(ex.logits, ex.old_logprobs, ex.mask, tau)

def _tell_entropy(f):
    m = torch.arange(3) < torch.tensor([[3], [1]])
    p = _t(.5, .25, .25)                                 # entropy 1.5·log 2
    z = torch.where(m[..., None], p.log(), 0.)           # uniform at padding, log 3
    lp = torch.where(m, _t(-1.), 1.)                     # a marker at padding
    S, flat = 1.5 * _t(2.).log().item(), _t(3.).log().item()
    hot = p.sqrt() / p.sqrt().sum()                      # the same at τ = 2
    hot = -(hot * hot.log()).sum().item()
    return _match(f(z, lp, m, 2.), {
        "real tokens": hot, "real tokens, τ = 1": S,
        "all slots": (4 * hot + 2 * flat) / 6, "all slots, τ = 1": (4 * S + 2 * flat) / 6,
        "all slots, padding as 0": 4 * hot / 6, "all slots, padding as 0, τ = 1": 4 * S / 6,
        "per response, each pad −1": (4 - 2) / 2})


ENTROPY = Quantity(
    "entropy", "entropy of the padded example at temperature .7", _entropies, _tell_entropy, (
    ("instruct_goose", "objective.logprobs::entropy", "Σ m·S / Σ m, at τ",
     lambda z, lp, m, tau: masked_mean(entropy(z, tau), m), "a bonus and a meter",
     "of the policy that samples, its real tokens"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_policy_error", "Σ m·S / N",
     lambda z, lp, m, tau: (entropy(z) * m).mean(), "batches without padding",
     "shrinks with padding; the logits are the caller's"),
    ("TRL PPO: objective/entropy", "trl/experimental/ppo/ppo_trainer.py::train",
     "−Σ log π over all slots / B, log π = 1 at padding",
     lambda z, lp, m, tau: -torch.where(m, lp, 1.).sum(1).mean(), "responses of full length",
     "every padded slot takes 1 nat off; it can turn negative"),
    ("TRL PPO: policy/entropy_avg", "trl/experimental/ppo/ppo_trainer.py::train", "Σ S / N, at τ",
     lambda z, lp, m, tau: entropy(z, tau).mean(), "responses of full length",
     "what the model says at padding is in it; a meter only, no bonus"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "Σ m·S / Σ m, at τ",
     lambda z, lp, m, tau: (entropy(z, tau) * m).sum() / m.sum(), "a bonus and a meter", "right"),
    ("OpenRLHF", "openrlhf/models/response.py::forward", "Σ m·S / Σ m, at τ = 1",
     lambda z, lp, m, tau: (entropy(z) * m).sum() / m.sum(), "runs at temperature 1",
     "computed before the logits are divided: not the sampler's entropy at τ ≠ 1"),
    ("verl", "verl/workers/actor/dp_actor.py::_forward_micro_batch", "Σ m·S / Σ m, at τ",
     lambda z, lp, m, tau: (entropy(z, tau) * m).sum() / m.sum(), "a bonus and a meter",
     "right; averaged by loss_agg_mode"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Σ S / N",
     lambda z, lp, m, tau: entropy(z).mean(), "environments, temperature 1", "right there")))


def _tell_logged_kl(f):
    new, old = _t([0., -1., 1.], [-2., 1., 1.]), _t([0., 0., 1.], [0., 1., 1.])
    m = torch.tensor([[True, True, False], [True, False, False]])
    k = torch.e**-1 + torch.e**-2 + 1  # ℓ, old to new, is 0, 1, 2 on the real tokens
    return _match(f(new, old, m), {
        "k1, real tokens": 1., "k2, real tokens": 2.5 / 3, "k3, real tokens": k / 3,
        "k1, all slots": .5, "k2, all slots": 2.5 / 6, "k3, all slots": k / 6})

def _logged(f):
    ex = padded_example()  # its ratios average to 1, and k1 is k3 there: so every token loses .2 nats
    return f(ex.logprobs - .2 * ex.mask.double(), ex.old_logprobs, ex.mask)


LOGGED_KL = Quantity(
    "logged KL", "the padded example's approx_kl, .2 nats lower, old to new", _logged, _tell_logged_kl, (
    ("instruct_goose", "objective.ppo::update_meters", "Σ m·k₃ / Σ m",
     lambda new, old, m: masked_mean(k3(old - new), m), "early stopping", "unbiased, never negative"),
    ("torchtune", "recipes/ppo_full_finetune_single_device.py::ppo_step", "Σ ½ℓ² / N",
     lambda new, old, m: ((new - old)**2 / 2).mean(), "responses of full length",
     "padding counts as agreement"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_policy_error", "Σ ℓ / N",
     lambda new, old, m: (old - new).mean(), "batches without padding",
     "padding counts, with whatever it holds"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "Σ ½ℓ² / N",
     lambda new, old, m: ((new - old)**2 / 2).mean(), "responses of full length",
     "padding counts as agreement"),
    ("OpenRLHF", "openrlhf/models/loss.py::PolicyLoss", "Σ m·ℓ / Σ m",
     lambda new, old, m: ((old - new) * m).sum() / m.sum(), "a meter", "unbiased; can be negative"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_policy_loss_vanilla", "Σ m·ℓ / Σ m",
     lambda new, old, m: ((old - new) * m).sum() / m.sum(), "a meter", "unbiased; can be negative"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Σ k₃ / N",
     lambda new, old, m: ((new - old).exp() - 1 - (new - old)).mean(), "early stopping",
     "unbiased; no mask to give")))


def _tell_temperature(f):
    z, a = _t(0., 1., 3.), torch.tensor(1)
    got, right = f(z, a, 2.).item(), token_logprobs(z, a, 2.).item()
    if 1e-12 < abs(got - right) < 1e-6: return "the sampler's, τ + 1e-7"
    at_1 = token_logprobs(z, a).item()
    return _match(got, {
        "the sampler's τ": right, "τ = 1": at_1, "divided after the softmax": at_1 / 2})

_SPOT = _t(.30, .20, .50).log()  # the old policy after bad
def _raw(z, a, tau): return z.log_softmax(-1).gather(-1, a[..., None])[..., 0]
def _tempered(z, a, tau): return _raw(z / tau, a, tau)


TEMPERATURE = Quantity(
    "temperature", "log-probability of end after bad, sampled at temperature .6",
    lambda f: f(_SPOT, torch.tensor(2), .6), _tell_temperature, (
    ("instruct_goose", "objective.logprobs::token_logprobs", "log softmax(z/τ)", token_logprobs,
     "training the policy that samples", "τ belongs to the policy"),
    ("torchtune", "torchtune/rlhf/sequence_processing.py::logits_to_logprobs", "log softmax(z/τ)", _tempered,
     "training the policy that samples", "right; the recipe passes its sampling τ"),
    ("DI-engine", "ding/rl_utils/log_prob_utils.py::efficient_method", "log softmax(z)", _raw,
     "logits already divided", "the caller divides by τ, or trains at τ = 1"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "log softmax(z/(τ + 10⁻⁷))",
     lambda z, a, tau: _tempered(z, a, tau + 1e-7), "training the policy that samples",
     "right; sampled with the same τ + 10⁻⁷"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_get_per_token_logps_and_entropies", "log softmax(z/τ)", _tempered,
     "training the policy that samples", "right"),
    ("OpenRLHF", "openrlhf/models/utils.py::log_probs_from_logits", "log softmax(z/τ)", _tempered,
     "training the policy that samples", "right; the entropy beside it is taken at τ = 1"),
    ("verl", "verl/workers/actor/dp_actor.py::_forward_micro_batch", "log softmax(z/τ)", _tempered,
     "training the policy that samples", "right; entropy too"),
    ("CleanRL", "cleanrl/ppo.py::get_action_and_value", "log softmax(z)", _raw, "sampling at τ = 1",
     "right there; no temperature"),
    ("rlhf-book", "code/policy_gradients/utils.py::compute_log_probs", "log softmax(z), samples at τ = .6", _raw,
     "sampling at τ = 1", "its configurations sample at .6: not the distribution that sampled")))


def _tell_position(f):
    m = torch.arange(4) < torch.tensor([[4], [2], [1]])
    r = f(_t(1., 1., 1.), m).int().argmax(1)
    return _match(r, {
        "last real token": _t(3, 1, 0), "last column": _t(3, 3, 3),
        "one past it, if there is room": _t(3, 2, 1),
        "one past it, from two tokens on": _t(3, 2, 0)})

def _put(scores, m, at):
    rows = torch.arange(m.shape[1])
    return torch.where(rows == at[:, None], scores[:, None], 0.)

def _past(scores, m, least=0):
    n = m.sum(1)
    return _put(scores, m, torch.where((n > least) & (n < m.shape[1]), n, n - 1))

def _at_last(scores, m): return _put(scores, m, m.sum(1) - 1)

def _last_advantages(f):
    ex = padded_example(3)  # the first response fills its row
    full = torch.ones_like(ex.mask)
    values = torch.where(ex.mask, ex.old_values, 0.)
    return gae(f(ex.scores, ex.mask), values, full, 1., .95)[0][[0, 1], [2, 1]]


POSITION = Quantity(
    "reward position", "GAE of each response's last token, γ = 1, λ = .95, V = 0 at padding",
    _last_advantages, _tell_position, (
    ("instruct_goose", "objective.kl::kl_in_reward", "at the last real token",
     lambda s, m: kl_in_reward(s, 0 * m.double(), 0 * m.double(), m, 0.), "any padding",
     "by index, left padding too"),
    ("torchtune: recipe", "recipes/ppo_full_finetune_single_device.py::generate_trajectory",
     "one past the last, if there is room", lambda s, m: _past(s, m, 1),
     "a value head that reads the state after the end",
     "a full row and a response of one token get it at the last token"),
    ("torchtune: by default", "torchtune/rlhf/rewards.py::get_rewards_ppo", "in the last column",
     lambda s, m: _put(s, m, 0 * m.sum(1) + m.shape[1] - 1), "rows without padding",
     "pass valid_score_idxs where there is padding"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "one past the last, if there is room", _past,
     "a value head that reads the state after the end",
     "a full row gets it at the last token: two kinds of row in one batch"),
    ("OpenRLHF", "openrlhf/models/utils.py::compute_reward", "at the last real token",
     lambda s, m: _put(s, m, m.shape[1] - 1 - m.long().fliplr().argmax(1)), "any padding", "right"),
    ("verl", "verl/workers/reward_manager/naive.py::__call__", "at index Σ m − 1", _at_last,
     "right padding", "right there: its responses begin in column 0"),
    ("rlhf-book", "code/policy_gradients/utils.py::compute_gae", "at the last real token",
     lambda s, m: _put(s, m, m.long().cumsum(1).argmax(1)), "any padding", "right")))


_RATIOS, _SIGNS = _t(.5, 1.5, 1.5, .5), _t(.8, .8, -1., -1.)

def _tell_objective(f):
    return _match(
        f(_RATIOS, _SIGNS, .2), {
            "the smaller of both": _t(.4, .96, -1.5, -.8),
            "clipped on every side": _t(.64, .96, -1.2, -.8),
            "ρ·clip(ρ) in the place of clip(ρ)Â": _t(.4, 1.2, -1.5, -.5)})

def _clip_min(r, a, eps): return torch.minimum(r * a, r.clamp(1 - eps, 1 + eps) * a)
def _clip_max(r, a, eps): return -torch.maximum(-r * a, -r.clamp(1 - eps, 1 + eps) * a)


OBJECTIVE = Quantity(
    "clipped objective", "at (ρ, Â) = (.5, .8), (1.5, .8), (1.5, −1), (.5, −1), ε = .2",
    lambda f: f(_RATIOS, _SIGNS, .2), _tell_objective, (
    ("instruct_goose", "objective.policy_loss::clipped_objective", "min(ρÂ, clip(ρ)Â)", clipped_objective,
     "several updates per batch", "a lower bound of ρÂ"),
    ("torchtune", "torchtune/rlhf/loss/ppo.py::PPOLoss", "−max(−ρÂ, −clip(ρ)Â)", _clip_max,
     "several updates per batch", "right"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_policy_error", "min(ρÂ, clip(ρ)Â)", _clip_min,
     "several updates per batch", "right"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "−max(−ρÂ, −clip(ρ)Â)", _clip_max,
     "several updates per batch", "right"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "min(ρÂ, clip(ρ)Â)", _clip_min,
     "several updates per batch", "right"),
    ("OpenRLHF", "openrlhf/models/loss.py::PolicyLoss", "min(ρÂ, clip(ρ)Â)", _clip_min,
     "several updates per batch", "right"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_policy_loss_vanilla", "−max(−ρÂ, −clip(ρ)Â)", _clip_max,
     "several updates per batch", "right, up to its dual clip (below)"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "−max(−ρÂ, −clip(ρ)Â)", _clip_max, "several updates per batch", "right"),
    ("rlhf-book", "code/policy_gradients/loss.py::PPOLoss", "min(ρÂ, clip(ρ)Â)", _clip_min,
     "several updates per batch", "right"),
    ("illustrated-rlhf", "src/components/visualizations/ppo-clip-visualizer.tsx::clippedObjective", "clip(ρ)Â",
     lambda r, a, eps: r.clamp(1 - eps, 1 + eps) * a, "none that we know of",
     "without the min a bad move below 1 − ε has no gradient back"),
    ("instructGOOSE", "instruct_goose/trainer.py::compute_loss", "min(ρÂ, ρ·clip(ρ)), minimised",
     lambda r, a, eps: torch.minimum(r * a, r * r.clamp(1 - eps, 1 + eps)), "none that we know of",
     "Â is missing from the second term, and the sign is that of a loss to be maximised")))


def _tell_dual_clip(f):
    return _match(f(_t(1., 5., 1.), _t(1., -1., -1.), 3.), {
        "negative advantages only": _t(1., -3., -1.),
        "every advantage": _t(3., -3., -1.), "none": _t(1., -5., -1.)})

def _dual(r, a, c):
    inner = _clip_min(r, a, .2)
    return torch.where(a < 0, torch.maximum(inner, c * a), inner)


DUAL_CLIP = Quantity(
    "dual clip", "objective at (ρ, Â) = (1, 1) and (5, −1), ε = .2, c = 3",
    lambda f: f(_t(1., 5.), _t(1., -1.), 3.), _tell_dual_clip, (
    ("instruct_goose", "objective.policy_loss::clipped_objective", "Â < 0: max(min(…), cÂ)",
     lambda r, a, c: clipped_objective(r, a, dual_clip=c), "ratios that explode", "off by default"),
    ("DI-engine: discrete", "ding/rl_utils/ppo.py::ppo_policy_error", "Â < 0: max(min(…), cÂ)", _dual,
     "ratios that explode", "right; off by default"),
    ("DI-engine: continuous", "ding/rl_utils/ppo.py::ppo_error_continuous", "max(min(…), cÂ)",
     lambda r, a, c: torch.maximum(_clip_min(r, a, .2), c * a), "none that we know of",
     "for Â > 0 the constant cÂ wins: no gradient from any good action"),
    ("TRL GRPO: delta", "trl/trainer/grpo_trainer.py::_compute_loss", "min(min(ρ, δ)Â, clip(ρ)Â)",
     lambda r, a, c: torch.minimum(r.clamp(max=c) * a, r.clamp(.8, 1.2) * a), "ratios that explode",
     "the same by another way for δ ≥ 1 + ε_high, below that not; off by default"),
    ("OpenRLHF", "openrlhf/models/loss.py::PolicyLoss", "Â < 0: max(min(…), cÂ)", _dual, "ratios that explode",
     "right; off by default"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_policy_loss_vanilla", "Â < 0: max(min(…), cÂ)", _dual,
     "ratios that explode", "right; always on, c = 3")))


def cispo_pull(f, log_ratios=(1.5, .6)):
    "Gradient of the loss on log π where ρ = 1.5 and .6, Â = 1, range .8 to 1.2."
    old = _t(-1., -2.); new = (old + _t(*log_ratios).log()).requires_grad_()
    return torch.autograd.grad(f(new, old, _t(1., 1.), .8, 1.2).sum(), new)[0]

def _tell_cispo(f):
    return _match(cispo_pull(f), {
        "weight cut on both sides": _t(-1.2, -.8), "weight cut above": _t(-1.2, -.6),
        "no gradient outside": _t(0., 0.)})

def _weight(low, new, old, a, high):
    return -(new - old).exp().clamp(low, high).detach() * a * new


CISPO = Quantity(
    "CISPO", "gradient on log π where ρ = 1.5 and .6, Â = 1, range .8 to 1.2", cispo_pull, _tell_cispo, (
    ("instruct_goose", "objective.policy_loss::policy_loss", "−sg(clip(ρ))·Â·log π",
     lambda new, old, a, low, high: policy_loss(
         new[None], old[None], a[None], torch.ones_like(new[None], dtype=torch.bool),
         1 - low, high - 1, surrogate="weight")[0], "keeping rare tokens in the gradient",
     "the preset cispo has no lower bound, as the paper's runs"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "−sg(min(ρ, ε_high))·Â·log π",
     lambda new, old, a, low, high: _weight(0., new, old, a, high), "keeping rare tokens in the gradient",
     "ε_high is the cap itself, not its distance from 1; no lower bound"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_policy_loss_cispo", "−sg(clip(ρ, 1−ε, 1+ε_high))·Â·log π",
     lambda new, old, a, low, high: _weight(low, new, old, a, high), "keeping rare tokens in the gradient",
     "bounds on both sides"),
    ("rlhf-book", "code/policy_gradients/loss.py::CISPOLoss", "−sg(clip(ρ, 1−ε, 1+ε_high))·Â·log π",
     lambda new, old, a, low, high: _weight(low, new, old, a, high), "keeping rare tokens in the gradient",
     "bounds on both sides"),
    ("torchrl", "torchrl/objectives/llm/grpo.py::CISPOLoss", "−clip(ρ)·Â",
     lambda new, old, a, low, high: -(new - old).exp().clamp(low, high) * a, "none that we know of",
     "neither stop-gradient nor log π: outside the range the token is silent")))


def _tell_clip_fraction(f):
    r = _t([1.5, .5, 1.5, .5], [1., 1., 1.5, 1.5])
    a = _t([1., 1., -1., -1.], [1., 1., 1., 1.])
    m = torch.arange(4) < torch.tensor([[4], [2]])
    return _match(f(r, a, m, .2), {
        "cut, of real tokens": 2 / 6, "cut, of all slots": 4 / 8,
        "out of range, of real tokens": 4 / 6, "out of range, of all slots": 6 / 8})

def _cut(r, a, m, eps):
    return ((r.clamp(1 - eps, 1 + eps) * a < r * a) * m).sum() / m.sum()

def _outside(r, a, m, eps):
    return ((r > 1 + eps) | (r < 1 - eps)).double().mean()

def _ratios(f):
    ex = padded_example()
    return f((ex.logprobs - ex.old_logprobs).exp(), ex.advantages, ex.mask, .2)


CLIP_FRACTION = Quantity(
    "clip fraction", "share of clipped tokens in the padded example, ε = .2", _ratios, _tell_clip_fraction, (
    ("instruct_goose", "objective.policy_loss::clip_fraction", "Σ m·[gradient cut] / Σ m",
     lambda r, a, m, eps: sum(clip_fraction(r, a, m, eps)), "what the clip does", "low and high apart"),
    ("torchtune", "torchtune/rlhf/loss/ppo.py::PPOLoss", "Σ m·[clip(ρ)Â < ρÂ] / Σ m", _cut, "what the clip does", "right"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "Σ m·[clip(ρ)Â < ρÂ] / Σ m", _cut,
     "what the clip does", "right"),
    ("TRL GRPO", "trl/trainer/grpo_trainer.py::_compute_loss", "low: ρ < 1−ε, Â < 0; high: ρ > 1+ε, Â > 0",
     lambda r, a, m, eps: ((((r < 1 - eps) & (a < 0)) | ((r > 1 + eps) & (a > 0))) * m).sum() / m.sum(),
     "what the clip does", "right; low and high apart"),
    ("OpenRLHF", "openrlhf/models/loss.py::PolicyLoss", "Σ m·[clip(ρ)Â < ρÂ] / Σ m", _cut, "what the clip does", "right"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_policy_loss_vanilla", "Σ m·[clip(ρ)Â < ρÂ] / Σ m", _cut,
     "what the clip does", "right; the dual clip's share apart"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_policy_error", "Σ [ρ outside 1 ± ε] / N", _outside, "how far ratios went",
     "the sign of Â and the mask are left out"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "Σ [ρ outside 1 ± ε] / N", _outside, "how far ratios went",
     "the sign of Â is left out; no mask to give")))


def _tell_value_clip(f):
    v, r, old = _t([2., 2., .9]), _t([0., 3., 1.]), _t([1., 1., 1.])
    return _match(f(v, r, old, .2), {
        "half the larger square": _t([2., 1.62, .005]),
        "without V_old": _t([2., 3.92, .605]),
        "the square": _t([4., 1., .01]), "half the square": _t([2., .5, .005])})

def _value_number(f):
    ex = padded_example()
    return masked_mean(f(ex.values, ex.returns, ex.old_values, .2), ex.mask)

def _at_old(v, r, old, c):
    return torch.maximum((v - r)**2, (v.clamp(old - c, old + c) - r)**2) / 2

def _from_old(v, r, old, c):
    return torch.maximum((v - r)**2, (old + (v - old).clamp(-c, c) - r)**2) / 2


VALUE_CLIP = Quantity(
    "value clipping", "mean value loss of the real tokens, c = .2", _value_number, _tell_value_clip, (
    ("instruct_goose", "objective.value_loss::value_loss", "½ max((V − R̂)², (clip(V, V_old ± c) − R̂)²)",
     lambda v, r, old, c: value_loss(v, r, torch.ones_like(v, dtype=torch.bool), old, c),
     "slowing the value head", "c has the unit of the reward"),
    ("torchtune", "torchtune/rlhf/loss/ppo.py::PPOLoss", "the same, c = .2", _at_old,
     "slowing the value head", "right"),
    ("TRL PPO", "trl/experimental/ppo/ppo_trainer.py::train", "the same, c = .2", _at_old,
     "slowing the value head", "right"),
    ("DI-engine", "ding/rl_utils/ppo.py::ppo_value_error", "V_clip = V_old + clip(V − V_old, ±ε)", _from_old,
     "rewards of size 1", "same value; c is the policy's ε, whatever the scale of rewards"),
    ("OpenRLHF", "openrlhf/models/loss.py::ValueLoss", "V_clip = V_old + clip(V − V_old, ±c), c = .5",
     _from_old, "slowing the value head", "right"),
    ("verl", "verl/trainer/ppo/core_algos.py::compute_value_loss", "the same, c = .5", _at_old,
     "slowing the value head", "right"),
    ("CleanRL", "cleanrl/ppo.py::train loop", "V_clip = V_old + clip(V − V_old, ±ε)", _from_old,
     "rewards of size 1", "same value; c is the policy's ε, whatever the scale of rewards"),
    ("rlhf-book", "code/policy_gradients/loss.py::PPOLoss", "the same, c = .2", _at_old,
     "slowing the value head", "right"),
    ("labml: its equation", "labml_nn/rl/ppo/__init__.py::ClippedValueFunctionLoss",
     "V_clip = clip(V − V_old, ±ε)",
     lambda v, r, old, c: torch.maximum((v - r)**2, ((v - old).clamp(-c, c) - r)**2) / 2,
     "none that we know of", "the printed equation lacks V_old +; the code beside it has it"),
    ("instructGOOSE", "instruct_goose/trainer.py::compute_loss", "(V − R̂)²",
     lambda v, r, old, c: (v - r)**2, "a head that may move freely",
     "no clip, no ½: the same vf_coef weighs twice as much")))


def _tell_sampler_weights(f):
    log_w, m = _t([4, .25, 1], [1, 9, 9]).log(), torch.arange(3) < torch.tensor([[3], [1]])
    return _match(f(log_w, m, .5, 2.)[m], {
        "cut above": _t(2, .25, 1, 1), "cut on both sides": _t(2, .5, 1, 1),
        "0 outside": _t(0, 0, 1, 1), "whole responses, uncut": _t(4, .25, 1, 1)})


def _by_response(log_w, m, low, high):
    of_row = _sequence_mean_of(log_w, m).exp()
    return log_w.exp() * ((of_row >= low) & (of_row <= high))


def _sequence_mean_of(x, m):
    return (torch.where(m, x, 0.).sum(1) / m.sum(1))[:, None]


def _weights_of_three(f):
    return f(_t([4, .25, 1]).log(), torch.ones(1, 3, dtype=torch.bool), .5, 2.)[0]


SAMPLER_WEIGHTS = Quantity(
    "sampler weights", "weights of three tokens with π_old/μ = 4, .25 and 1; bounds .5 and 2",
    _weights_of_three, _tell_sampler_weights, (
    ("instruct_goose", "objective.policy_loss::sampler_weights", "min(w, C)",
     lambda log_w, m, low, high: sampler_weights(log_w, torch.zeros_like(log_w), m, high),
     "a small mismatch", "off by default"),
    ("OpenRLHF: tis", "openrlhf/models/loss.py::PolicyLoss", "clip(w, low, high)",
     lambda log_w, m, low, high: log_w.exp().clamp(low, high), "a small mismatch",
     "lifts small weights too; bounds .5 and 5; off by default"),
    ("OpenRLHF: icepop", "openrlhf/models/loss.py::PolicyLoss", "w·1[low ≤ w ≤ high]",
     lambda log_w, m, low, high: log_w.exp() * ((log_w.exp() >= low) & (log_w.exp() <= high)),
     "a few tokens that are far off", "a token outside teaches nothing"),
    ("OpenRLHF: seq-mask-tis", "openrlhf/models/loss.py::PolicyLoss",
     "w·1[low ≤ exp(mean log w) ≤ high]", _by_response, "a few responses that are far off",
     "no bound on a single token")))


QUANTITIES = {q.name: q for q in (
    MASKED_MEAN, AGGREGATION, WHITENING, RETURNS, GROUP_STD, KL_K1, KL_K3, KL_LOSS,
    ENTROPY, LOGGED_KL, TEMPERATURE, POSITION, OBJECTIVE, DUAL_CLIP, CISPO,
    SAMPLER_WEIGHTS, CLIP_FRACTION, VALUE_CLIP)}
ROWS = [row for q in QUANTITIES.values() for row in q.rows]


def _quantity(name):
    if name not in QUANTITIES:
        raise ValueError(f"no quantity {name!r}: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]

def tells_apart(
    quantity: str, # a key of QUANTITIES
    f: Callable,   # an implementation; the formulas in ROWS show what it is called with
) -> str: # what it computes, in words
    """Run an implementation on inputs whose answers are known for every formula, and say
    which one it is. Raises ValueError for an unknown quantity."""
    return _quantity(quantity).tell(f)


def comparison_table(
    quantity: str | None = None, # a key of QUANTITIES; None: all of them
) -> str: # Markdown
    """The formulas side by side, with numbers computed now; for each quantity its test.
    Raises ValueError for an unknown quantity."""
    if quantity is None: return "\n\n".join(comparison_table(name) for name in QUANTITIES)
    q = _quantity(quantity)
    lines = [["library", "formula", "number", "right for", "what to know"], ["---"] * 5]
    for r in q.rows:
        what = f"*{r.kind}*; {r.verdict}"
        lines.append([f"**{r.version}** {r.link}", r.formula, r.number, r.good_for, what])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"**{q.name}**: {q.shows}. Told apart by `{q.test}`.\n\n{table}"
