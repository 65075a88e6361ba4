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

SOURCES = {  # name and version, the repository at it, and where in it a formula stands unless its row says otherwise
    "instruct_goose": ("instruct_goose", None, "objective.masks::aggregate"),
    "torchtune": ("torchtune 0.6.1", "pytorch/torchtune/blob/v0.6.1", "torchtune/rlhf/loss/ppo.py::PPOLoss"),
    "DI-engine": ("DI-engine 0.5.3+22", "opendilab/DI-engine/blob/d0b21d0", "ding/rl_utils/ppo.py::ppo_policy_error"),
    "TRL PPO": ("TRL 1.9.0", "huggingface/trl/blob/v1.9.0", "trl/experimental/ppo/ppo_trainer.py::train"),
    "TRL GRPO": ("TRL 1.16.0", "huggingface/trl/blob/v1.16.0", "trl/trainer/grpo_trainer.py::_compute_loss"),
    "OpenRLHF": ("OpenRLHF 0.11.0", "OpenRLHF/OpenRLHF/blob/v0.11.0", "openrlhf/models/loss.py::PolicyLoss"),
    "verl": ("verl 0.7.0+125", "volcengine/verl/blob/b178a3c", "verl/trainer/ppo/core_algos.py::agg_loss"),
    "CleanRL": ("CleanRL 1.0.0+72", "vwxyzjn/cleanrl/blob/fe8d8a0", "cleanrl/ppo.py::train loop"),
    "rlhf-book": ("rlhf-book 0.4+7", "natolambert/rlhf-book/blob/a66b0bf", "code/policy_gradients/loss.py::PPOLoss"),
    "instructGOOSE": ("instructGOOSE 0.0.7", "xrsrke/instructGOOSE/blob/5b9ac3f", "instruct_goose/trainer.py::compute_loss"),
    "torchrl": ("torchrl, 0098844", "pytorch/rl/blob/0098844", "torchrl/objectives/llm/grpo.py::CISPOLoss"),
    "Liger": ("Liger 0.8.5", "linkedin/Liger-Kernel/blob/v0.8.5",
              "src/liger_kernel/chunked_loss/grpo_loss.py::LigerFusedLinearGRPOFunction"),
    "labml": ("labml, 0a4b5b6", "labmlai/annotated_deep_learning_paper_implementations/blob/0a4b5b6",
              "labml_nn/rl/ppo/__init__.py::ClippedValueFunctionLoss"),
    "illustrated-rlhf": ("illustrated-rlhf", "deepak-karkala/illustrated-rlhf/blob/57d7d01",
                         "src/components/visualizations/ppo-clip-visualizer.tsx::clippedObjective"),
    "RLHF_in_notebooks": ("RLHF_in_notebooks", "ash80/RLHF_in_notebooks/blob/f73d8ed", "3-RLHF.ipynb::masked_whiten"),
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


class Formula:
    "What one or more libraries compute. A user is a name of SOURCES, or (name, place or ::function, what to know before use)."

    def __init__(self, kind: str, formula: str, f: Callable, good_for: str, verdict: str, *users: str | tuple):
        self.kind, self.formula, self.f, self.good_for, self.rows = kind, formula, f, good_for, []
        for user in users:
            library, place, what = (*((user,) if isinstance(user, str) else user), "", "")[:3]
            usual = SOURCES[library.partition(": ")[0]][2]
            if place.startswith("::"): place = usual.partition("::")[0] + place
            self.rows.append(Row(self, library, place or usual, what or verdict))


@dataclass(frozen=True)
class Row:
    "One library's formula for one quantity."

    of: Formula
    library: str  # a key of SOURCES, perhaps with ": which"
    place: str    # path::function
    verdict: str  # what to know before use

    kind = property(lambda self: self.of.kind)  # what it computes, in words
    f = property(lambda self: self.of.f)

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
        if source is None: return f"`{path} {where}`"
        return f"[{path.split('/')[-1]}](https://github.com/{source}/{path}) `{where}`"


class Quantity:
    "A name that several libraries use, and how to find out what one of them means."

    def __init__(
        self,
        name: str,       # "masked mean"
        shows: str,      # what the worked number is
        work: Callable,  # an implementation → that number, on the shared example
        tell: Callable,  # an implementation → what it computes, in words
        *formulas: Formula,
    ):
        self.name, self.shows, self.work, self.tell = name, shows, work, tell
        self.test = "test_" + name.replace(" ", "_").replace(",", "")  # that tells the formulas apart
        self.rows = [row for formula in formulas for row in formula.rows]
        self.kinds = {}  # what is computed → the rows that compute it
        for row in self.rows: self.kinds.setdefault(row.kind, []).append(row)

    def __getitem__(self, library: str) -> Row:
        return next(row for row in self.rows if row.library == library)

    def number(self, row: Row) -> str:
        "The worked number, computed now."
        return show(self.work(row.f))


def kinds_table(
    quantity: Quantity, # one of QUANTITIES
) -> str: # Markdown
    "One line for each thing that is computed under this name, with its libraries."
    lines = []
    for kind, rows in quantity.kinds.items():
        uses = "; ".join(dict.fromkeys(r.of.good_for for r in rows))
        lines.append([f"**{kind}**", rows[0].of.formula, quantity.number(rows[0]), uses, ", ".join(r.version for r in rows)])
    return _markdown("it computes", "formula", "number", "right for", "libraries", lines)


def _markdown(*head_and_lines):
    *head, lines = head_and_lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


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


MASKED_MEAN = Quantity("masked mean", "mean of the loss over the padded example", lambda f: f(padded_example().loss, padded_example().mask),
    _tell_masked_mean,
    Formula("real tokens, empty: refused", "Σ m·x / Σ m, by selection", masked_mean, "token losses and metrics", "refuses an empty mask",
        ("instruct_goose", "::masked_mean")),
    Formula("real tokens, NaN leaks in, empty: 0", "Σ m·x / (Σ m + 10⁻⁸)", lambda x, m: (x * m).sum() / (m.sum() + 1e-8),
        "batches that may be empty", "right for finite padding", ("torchtune", "torchtune/rlhf/rewards.py::masked_mean")),
    Formula("real tokens, NaN leaks in, empty: nan", "Σ m·x / Σ m", lambda x, m: (x * m).sum() / m.sum(), "finite padding",
        "right; nan tells of an empty mask", ("TRL PPO", "::masked_mean"), ("OpenRLHF", "openrlhf/models/utils.py::masked_mean")),
    Formula("real tokens, NaN leaks in, empty: 0", "Σ m·x / max(Σ m, 1)", lambda x, m: (x * m).sum() / m.sum().clamp(min=1),
        "batches that may be empty", "right for finite padding", "TRL GRPO"),
    Formula("all slots, padding as 0", "Σ m·x / N, N all slots", lambda x, m: (x * m).mean(), "importance weights of steps",
        "as a mask it shrinks the loss by the share of padding", "DI-engine"),
    Formula("real tokens, empty: 0", "Σ m·x / (Σ m + 10⁻⁸), by selection", lambda x, m: torch.where(m, x, 0.).sum() / (m.sum() + 1e-8),
        "padding that holds anything", "right, also with NaN in padding", ("verl", "verl/utils/torch_functional.py::masked_mean")),
    Formula("all slots", "Σ x / N", lambda x, m: x.mean(), "environments, where every slot is a step", "right there; no mask to give",
        "CleanRL"),
    Formula("real tokens, NaN leaks in, empty: 0", "Σ m·x / max(Σ m, 10⁻⁸)", lambda x, m: (x * m).sum() / m.sum().clamp(min=1e-8),
        "batches that may be empty", "right for finite padding", ("rlhf-book", "::masked_mean")))


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


AGGREGATION = Quantity("aggregation", "the padded example's policy loss as one number",
    lambda f: f(padded_example().loss, padded_example().mask), _tell_aggregation,
    Formula("token mean", "Σ m·x / Σ m", aggregate, "every token alike", "long responses weigh more", "instruct_goose: token_mean"),
    Formula("sequence mean", "mean over rows of Σₜ m·x / Σₜ m", lambda x, m: aggregate(x, m, "sequence_mean"), "every response alike",
        "tokens of long responses weigh less", "instruct_goose: sequence_mean"),
    Formula("sums over B·L", "Σ m·x / (B·L)", lambda x, m: aggregate(x, m, "sequence_sum"), "no length bias", "the loss shrinks with L",
        "instruct_goose: sequence_sum"),
    Formula("token mean", "Σ m·x / Σ m", _token, "every token alike", "of the micro-batch: splitting a batch changes the weights",
        "torchtune", "TRL PPO", ("rlhf-book: DAPO", "::DAPOLoss", "of the micro-batch")),
    Formula("sums over B·L", "Σ m·x / (B·T)", lambda x, m: (x * m).mean(), "no length bias",
        "T is the batch's width: padding sets the learning rate", "DI-engine: PPO"),
    Formula("sequence mean", "mean over rows of Σₜ m·x / Σₜ m", _sequence, "every response alike", "as published; an empty row gives nan",
        ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error"), ("TRL GRPO: grpo", "", "as published"),
        ("verl: seq-mean-token-mean", "", "rows without a token are left out"),
        ("rlhf-book", "", "PPO, GRPO, GSPO, CISPO and REINFORCE alike")),
    Formula("token mean", "Σ m·x / tokens of the whole batch", _token, "every token alike", "counts are global: splits add up",
        ("TRL GRPO: dapo, its default", "", "the count spans the accumulation window: splits add up"), ("OpenRLHF", "::aggregate_loss"),
        "verl: token-mean"),
    Formula("sums over B·L", "Σ m·x / (B·L)", lambda x, m: (x * m).sum() / (len(x) * 4), "no length bias", "L = max_completion_length",
        "TRL GRPO: dr_grpo"),
    Formula("sums over B", "Σ m·x / B", lambda x, m: (x * m).sum(1).mean(), "long responses weigh more, on purpose",
        "1.9.0 had Liger's formula", "TRL GRPO: luspo"),
    Formula("length × unmasked mean", "Σ n·x / (B·T), n a row's tokens, x not masked", lambda x, m: (x * m.sum(1, keepdim=True)).mean(),
        "a ratio per sequence, one number per row", "with one number per token, padding enters", "Liger: luspo"),
    Formula("sums over B", "Σ m·x / B", lambda x, m: (x * m).sum(1).mean(), "the policy gradient of whole responses", "grows with length",
        "verl: seq-mean-token-sum"),
    Formula("sums over L", "Σ m·x / L", lambda x, m: (x * m).sum() / 4, "no length bias", "not divided by B: it grows with the batch",
        "verl: seq-mean-token-sum-norm"),
    Formula("all slots", "Σ x / N", lambda x, m: x.mean(), "environments", "right there", "CleanRL"))


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


WHITENING = Quantity("whitening", "mean and sd of the whitened advantages of the real tokens", _spread, _tell_whitening,
    Formula("centred", "(x − x̄) / √(var + ϵ)", whiten, "advantages", "centred; 0 at padding", ("instruct_goose", "::whiten")),
    Formula("mean added back", "(x − x̄) / √(var + ϵ) + x̄", lambda x, m: sum(_whitened(x, m)), "rewards, whose mean carries meaning",
        "shift_mean=True adds the mean back; its PPO advantages are scaled, not centred",
        ("torchtune", "torchtune/rlhf/rewards.py::whiten")),
    Formula("centred", "(x − x̄) / √(var + ϵ)", lambda x, m: _whitened(x, m)[1], "advantages",
        "centred; for rewards it passes shift_mean=False, which keeps the mean", ("TRL PPO", "::masked_whiten"),
        ("verl", "verl/utils/torch_functional.py::masked_whiten", "centred; refuses a single token")),
    Formula("over all slots", "(x − x̄) / (std + ϵ) over all slots", lambda x, m: (x - x.mean()) / (x.std() + 1e-8),
        "environments without padding", "padding moves mean and spread", ("DI-engine", "ding/policy/ppo.py::_forward_learn")),
    Formula("centred, by n", "(x − x̄) / √max(var_n, ϵ)", lambda x, m: _whitened(x, m, ddof=0)[1], "advantages",
        "centred; the variance divides by n, not n − 1",
        ("OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns")),
    Formula("over all slots", "(x − x̄) / (std + ϵ) per minibatch", lambda x, m: (x - x.mean()) / (x.std() + 1e-8),
        "environments without padding", "per minibatch: the same token's advantage depends on its company", "CleanRL"),
    Formula("not whitened", "x (PPO)", lambda x, m: x * m, "advantages in the unit of the reward", "PPO advantages stay as GAE gives them",
        ("rlhf-book", "code/policy_gradients/utils.py::compute_advantages")),
    Formula("mean added back, by n", "(x − x̄) / √(var_n + ϵ) + x̄", lambda x, m: _whitened(x, m, 0)[1] + (x * m).sum() / m.sum(),
        "rewards, whose mean carries meaning", "advantages are scaled, not centred", "RLHF_in_notebooks"))


def _tell_returns(f):
    advantages, values = _t([1, 2, 3, 6]), _t([1, 0, 0, 0])
    white = _t([-2, -1, 0, 3]) / 3.5**.5 + 3 + values
    return _match(
        f(advantages, values, torch.ones(1, 4, dtype=torch.bool)),
        {"before whitening": _t([2, 2, 3, 6]), "after whitening, mean added back": white})


RETURNS = Quantity("returns", "target of the value head at the last token of each response",
    lambda f: f(*(getattr(padded_example(), k) for k in ("advantages", "old_values", "mask")))[ [0, 1], [2, 1]], _tell_returns,
    Formula("before whitening", "Â + V, then whiten", lambda a, v, m: a + v, "a target with the unit of the reward", "right",
        ("instruct_goose", "objective.advantages::gae", "whitening is a step of its own"),
        ("torchtune", "torchtune/rlhf/rewards.py::estimate_advantages"), "TRL PPO",
        ("OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py::get_advantages_and_returns"),
        ("verl", "::compute_gae_advantage_return")),
    Formula("before whitening", "Â + V", lambda a, v, m: a + v, "a target with the unit of the reward",
        "right; it whitens later, per minibatch", "CleanRL"),
    Formula("before whitening", "Â + V, never whitened", lambda a, v, m: a + v, "a target with the unit of the reward", "right",
        "rlhf-book"),
    Formula("after whitening, mean added back", "whitened Â + V", lambda a, v, m: _whitened(a, m, 0)[1] + (a * m).sum() / m.sum() + v,
        "none that we know of", "not a return: its unit is a standard deviation", ("RLHF_in_notebooks", "::compute_advantage")))


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


GROUP_STD = Quantity("group std", "advantages of the scores (1, −1), and of the near tie (.0001, 0)",
    lambda f: (f(_t(1., -1.)), f(_t(1e-4, 0.))), _tell_group_std,
    Formula("divides by G − 1, ϵ = 1e-04, one alone: refused", "(x − x̄) / (std + 10⁻⁴)", lambda x: group_advantages(x, len(x)),
        "scores of size 1", "near ties stay small; refuses a group of one", ("instruct_goose", "objective.advantages::group_advantages")),
    Formula("divides by G − 1, ϵ = 1e-04, one alone: nan", "(x − x̄) / (std + 10⁻⁴)", _grouped(), "scores of size 1",
        "near ties stay small", ("torchtune: dev recipe", "recipes/dev/grpo_full_finetune_distributed.py::generate_trajectory")),
    Formula("divides by G − 1, ϵ = 1e-04, one alone: 0", "(x − x̄) / (std + 10⁻⁴)", lambda x: _grouped()(x) if len(x) > 1 else 0 * x,
        "scores of size 1", "near ties stay small; a group of one gets 0", ("TRL GRPO", "::_generate_and_score_completions")),
    Formula("divides by G − 1, ϵ = 1e-09, one alone: nan", "(x − x̄) / (std + 10⁻⁹)", _grouped(eps=1e-9), "scores on any scale",
        "a near tie counts like a clear win",
        ("OpenRLHF: group_norm", "openrlhf/trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns")),
    Formula("divides by G − 1, ϵ = 1e-06, one alone: 3", "(x − x̄) / (std + 10⁻⁶)",
        lambda x: _grouped(eps=1e-6)(x) if len(x) > 1 else x / (1 + 1e-6), "scores on any scale", "a group of one keeps its raw score",
        ("verl", "::compute_grpo_outcome_advantage")),
    Formula("divides by G − 1, ϵ = 1e-08, one alone: nan", "(x − x̄) / (std + 10⁻⁸)", _grouped(eps=1e-8), "scores on any scale",
        "a near tie counts like a clear win", ("rlhf-book", "code/policy_gradients/utils.py::compute_standardized_advantages")))


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


KL_K1 = Quantity("KL, k1", "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)", expected_estimate, _tell_kl,
    Formula("k1, unbiased", "ℓ = log π − log π_ref", lambda p, q: k1(p - q), "the reward", "unbiased",
        ("instruct_goose", "objective.kl::k1")),
    Formula("k1, unbiased", "ℓ", lambda p, q: p - q, "the reward", "unbiased", ("torchtune", "torchtune/rlhf/rewards.py::get_rewards_ppo"),
        "TRL PPO", ("verl", "::kl_penalty_forward")),
    Formula("k1, unbiased", "ℓ", lambda p, q: p - q, "a meter", "unbiased; averaged over all slots, weight left out",
        ("DI-engine", "::calculate_kl_div")),
    Formula("k1, unbiased up to 10", "clip(ℓ, ±10)", lambda p, q: _clamped(p - q), "the reward", "unbiased while every ℓ lies within ±10",
        ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl")),
    Formula("k1, unbiased", "log π_old − log π, a from π_old", lambda p, q: -(q - p), "a meter",
        "unbiased: the policy that sampled comes first", "CleanRL: old_approx_kl"),
    Formula("reversed k1, averages to −KL", "−ℓ", lambda p, q: -(p - q), "none that we know of",
        "the sign is turned: subtracted from the reward it pays for drift", ("rlhf-book", "::approx_kl1")))


KL_K3 = Quantity("KL, k3", "its average under π = (.7, .2, .1), π_ref = (.3, .3, .4)", expected_estimate, _tell_kl,
    Formula("k3, unbiased", "e^(−ℓ) − 1 + ℓ, ℓ ≥ −10", lambda p, q: k3(p - q), "a meter", "unbiased; at most e¹⁰",
        ("instruct_goose", "objective.kl::k3")),
    Formula("k3, unbiased", "e^(−ℓ) − 1 + ℓ", lambda p, q: (q - p).exp() - 1 + p - q, "a meter",
        "unbiased; averaged over all slots, weight left out", ("DI-engine", "::calculate_kl_div"),
        ("TRL PPO", "", "unbiased as a number; see the lesson on its gradient"), ("TRL GRPO", "", "unbiased")),
    Formula("k3, unbiased up to 10", "clip(e^(−ℓ) − 1 + ℓ, ±10)", lambda p, q: _clamped((q - p).exp() - 1 + p - q), "a meter",
        "biased down where k3 exceeds 10; no gradient there", ("OpenRLHF", "openrlhf/models/utils.py::compute_approx_kl")),
    Formula("k3, unbiased up to 10", "clip(e^(−ℓ) − 1 + ℓ, ±10)",
        lambda p, q: _clamped((q - p).clamp(-20, 20).exp() - 1 - (q - p).clamp(-20, 20)), "a meter",
        "biased down where k3 exceeds 10; no gradient there", ("verl", "::kl_penalty_forward")),
    Formula("k3, unbiased", "ρ − 1 − log ρ, a from π_old", lambda p, q: (q - p).exp() - 1 - (q - p), "early stopping",
        "unbiased: the policy that sampled comes first", "CleanRL: approx_kl"),
    Formula("reversed k3, averages to χ² − KL", "e^ℓ − 1 − ℓ", lambda p, q: torch.expm1(p - q) - (p - q), "samples from π_ref",
        "with samples from π it averages to χ² − KL", ("rlhf-book", "::approx_kl3")))


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


KL_LOSS = Quantity("KL as a loss", "expected gradient on the three logits; KL(π‖π_ref) has .3317, −.1558, −.176", kl_pull, _tell_kl_loss,
    Formula("gradient of KL(π‖π_ref)", "½ℓ²", _ours(), "the loss, on policy", "the gradient of KL(π‖π_ref)",
        ("instruct_goose: default", "objective.kl::kl_in_loss")),
    Formula("gradient of KL(π‖π_ref)", "k₂ − sg(k₂) + sg(k₃)", _ours(estimator="k3", straight_through=True),
        "a loss whose value is a KL too", "the gradient of KL(π‖π_ref)", ("instruct_goose: straight_through", "objective.kl::kl_in_loss")),
    Formula("no gradient", "ℓ", lambda p, q, old: p - q, "the reward", "expected gradient 0, all noise; kl_type='k2' is the one to set",
        ("DI-engine: k1, its default", "::calculate_kl_div")),
    Formula("gradient of KL(π‖π_ref)", "½ℓ²", lambda p, q, old: (p - q)**2 / 2, "the loss, on policy", "the gradient of KL(π‖π_ref)",
        ("DI-engine: k2", "::calculate_kl_div")),
    Formula("gradient of KL(π_ref‖π)", "e^(−ℓ) − 1 + ℓ", lambda p, q, old: (q - p).exp() - 1 + p - q, "GRPO as published",
        "the gradient of KL(π_ref‖π)", ("DI-engine: GRPO", "ding/rl_utils/grpo.py::grpo_policy_error")),
    Formula("gradient of KL(π‖π_ref)", "ρ·(e^(−ℓ) − 1 + ℓ)", lambda p, q, old: (p - old).exp() * ((q - p).exp() - 1 + p - q),
        "the loss, also off policy",
        "the gradient of KL(π‖π_ref); use_bias_correction_kl was False by default in 1.9.0; at sequence level ρ is the response's",
        "TRL GRPO: its default"),
    Formula("no gradient", "clip(ℓ, ±10)", lambda p, q, old: _clamped(p - q), "the reward, its default placement",
        "as a loss: expected gradient 0; it prints the advice to take k2 or k3",
        ("OpenRLHF: k1, its default", "openrlhf/models/utils.py::compute_approx_kl")),
    Formula("gradient of KL(π_ref‖π)", "clip(e^(−ℓ) − 1 + ℓ, ±10)", lambda p, q, old: _clamped((q - p).exp() - 1 + p - q),
        "GRPO as published", "the gradient of KL(π_ref‖π)", ("verl: low_var_kl, its default", "::kl_penalty")),
    Formula("gradient of KL(π‖π_ref)", "k₂ − sg(k₂) + sg(k₃)", lambda p, q, old: (k2(p - q) - k2(p - q).detach() + k3(p - q).detach()),
        "a loss whose value is a KL too",
        "right as written; at b178a3c the call raises NotImplementedError, since the inner function gets the name with the +",
        ("verl: k3+", "::kl_penalty")),
    Formula("gradient of ½χ²(π‖π_ref)", "e^ℓ − 1 − ℓ", lambda p, q, old: torch.expm1(p - q) - (p - q),
        "a heavy price on rare tokens of π_ref", "pulls to the reference, as a χ²-divergence, not as a KL",
        ("rlhf-book: kl3, its default", "::GRPOLoss")))


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


ENTROPY = Quantity("entropy", "entropy of the padded example at temperature .7", _entropies, _tell_entropy,
    Formula("real tokens", "Σ m·S / Σ m, at τ", lambda z, lp, m, tau: masked_mean(entropy(z, tau), m), "a bonus and a meter",
        "of the policy that samples, its real tokens", ("instruct_goose", "objective.logprobs::entropy")),
    Formula("all slots, padding as 0, τ = 1", "Σ m·S / N", lambda z, lp, m, tau: (entropy(z) * m).mean(), "batches without padding",
        "shrinks with padding; the logits are the caller's", "DI-engine"),
    Formula("per response, each pad −1", "−Σ log π over all slots / B, log π = 1 at padding",
        lambda z, lp, m, tau: -torch.where(m, lp, 1.).sum(1).mean(), "responses of full length",
        "every padded slot takes 1 nat off; it can turn negative", "TRL PPO: objective/entropy"),
    Formula("all slots", "Σ S / N, at τ", lambda z, lp, m, tau: entropy(z, tau).mean(), "responses of full length",
        "what the model says at padding is in it; a meter only, no bonus", "TRL PPO: policy/entropy_avg"),
    Formula("real tokens", "Σ m·S / Σ m, at τ", lambda z, lp, m, tau: (entropy(z, tau) * m).sum() / m.sum(), "a bonus and a meter", "right",
        "TRL GRPO", ("verl", "verl/workers/actor/dp_actor.py::_forward_micro_batch", "right; averaged by loss_agg_mode")),
    Formula("real tokens, τ = 1", "Σ m·S / Σ m, at τ = 1", lambda z, lp, m, tau: (entropy(z) * m).sum() / m.sum(), "runs at temperature 1",
        "computed before the logits are divided: not the sampler's entropy at τ ≠ 1", ("OpenRLHF", "openrlhf/models/response.py::forward")),
    Formula("all slots, τ = 1", "Σ S / N", lambda z, lp, m, tau: entropy(z).mean(), "environments, temperature 1", "right there",
        "CleanRL"))


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


LOGGED_KL = Quantity("logged KL", "the padded example's approx_kl, .2 nats lower, old to new", _logged, _tell_logged_kl,
    Formula("k3, real tokens", "Σ m·k₃ / Σ m", lambda new, old, m: masked_mean(k3(old - new), m), "early stopping",
        "unbiased, never negative", ("instruct_goose", "objective.ppo::update_meters")),
    Formula("k2, all slots", "Σ ½ℓ² / N", lambda new, old, m: ((new - old)**2 / 2).mean(), "responses of full length",
        "padding counts as agreement", ("torchtune", "recipes/ppo_full_finetune_single_device.py::ppo_step"), "TRL PPO"),
    Formula("k1, all slots", "Σ ℓ / N", lambda new, old, m: (old - new).mean(), "batches without padding",
        "padding counts, with whatever it holds", "DI-engine"),
    Formula("k1, real tokens", "Σ m·ℓ / Σ m", lambda new, old, m: ((old - new) * m).sum() / m.sum(), "a meter", "unbiased; can be negative",
        "OpenRLHF", ("verl", "::compute_policy_loss_vanilla")),
    Formula("k3, all slots", "Σ k₃ / N", lambda new, old, m: ((new - old).exp() - 1 - (new - old)).mean(), "early stopping",
        "unbiased; no mask to give", "CleanRL"))


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


TEMPERATURE = Quantity("temperature", "log-probability of end after bad, sampled at temperature .6",
    lambda f: f(_SPOT, torch.tensor(2), .6), _tell_temperature,
    Formula("the sampler's τ", "log softmax(z/τ)", token_logprobs, "training the policy that samples", "τ belongs to the policy",
        ("instruct_goose", "objective.logprobs::token_logprobs")),
    Formula("the sampler's τ", "log softmax(z/τ)", _tempered, "training the policy that samples", "right; the recipe passes its sampling τ",
        ("torchtune", "torchtune/rlhf/sequence_processing.py::logits_to_logprobs"),
        ("TRL GRPO", "::_get_per_token_logps_and_entropies", "right"),
        ("OpenRLHF", "openrlhf/models/utils.py::log_probs_from_logits", "right; the entropy beside it is taken at τ = 1"),
        ("verl", "verl/workers/actor/dp_actor.py::_forward_micro_batch", "right; entropy too")),
    Formula("τ = 1", "log softmax(z)", _raw, "logits already divided", "the caller divides by τ, or trains at τ = 1",
        ("DI-engine", "ding/rl_utils/log_prob_utils.py::efficient_method")),
    Formula("the sampler's, τ + 1e-7", "log softmax(z/(τ + 10⁻⁷))", lambda z, a, tau: _tempered(z, a, tau + 1e-7),
        "training the policy that samples", "right; sampled with the same τ + 10⁻⁷", "TRL PPO"),
    Formula("τ = 1", "log softmax(z)", _raw, "sampling at τ = 1", "right there; no temperature", ("CleanRL", "::get_action_and_value")),
    Formula("τ = 1", "log softmax(z), samples at τ = .6", _raw, "sampling at τ = 1",
        "its configurations sample at .6: not the distribution that sampled",
        ("rlhf-book", "code/policy_gradients/utils.py::compute_log_probs")))


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


POSITION = Quantity("reward position", "GAE of each response's last token, γ = 1, λ = .95, V = 0 at padding", _last_advantages,
    _tell_position,
    Formula("last real token", "at the last real token", lambda s, m: kl_in_reward(s, 0 * m.double(), 0 * m.double(), m, 0.), "any padding",
        "by index, left padding too", ("instruct_goose", "objective.kl::kl_in_reward")),
    Formula("one past it, from two tokens on", "one past the last, if there is room", lambda s, m: _past(s, m, 1),
        "a value head that reads the state after the end", "a full row and a response of one token get it at the last token",
        ("torchtune: recipe", "recipes/ppo_full_finetune_single_device.py::generate_trajectory")),
    Formula("last column", "in the last column", lambda s, m: _put(s, m, 0 * m.sum(1) + m.shape[1] - 1), "rows without padding",
        "pass valid_score_idxs where there is padding", ("torchtune: by default", "torchtune/rlhf/rewards.py::get_rewards_ppo")),
    Formula("one past it, if there is room", "one past the last, if there is room", _past,
        "a value head that reads the state after the end", "a full row gets it at the last token: two kinds of row in one batch",
        "TRL PPO"),
    Formula("last real token", "at the last real token", lambda s, m: _put(s, m, m.shape[1] - 1 - m.long().fliplr().argmax(1)),
        "any padding", "right", ("OpenRLHF", "openrlhf/models/utils.py::compute_reward")),
    Formula("last real token", "at index Σ m − 1", _at_last, "right padding", "right there: its responses begin in column 0",
        ("verl", "verl/workers/reward_manager/naive.py::__call__")),
    Formula("last real token", "at the last real token", lambda s, m: _put(s, m, m.long().cumsum(1).argmax(1)), "any padding", "right",
        ("rlhf-book", "code/policy_gradients/utils.py::compute_gae")))


_RATIOS, _SIGNS = _t(.5, 1.5, 1.5, .5), _t(.8, .8, -1., -1.)

def _tell_objective(f):
    return _match(
        f(_RATIOS, _SIGNS, .2), {
            "the smaller of both": _t(.4, .96, -1.5, -.8),
            "clipped on every side": _t(.64, .96, -1.2, -.8),
            "ρ·clip(ρ) in the place of clip(ρ)Â": _t(.4, 1.2, -1.5, -.5)})

def _clip_min(r, a, eps): return torch.minimum(r * a, r.clamp(1 - eps, 1 + eps) * a)
def _clip_max(r, a, eps): return -torch.maximum(-r * a, -r.clamp(1 - eps, 1 + eps) * a)


OBJECTIVE = Quantity("clipped objective", "at (ρ, Â) = (.5, .8), (1.5, .8), (1.5, −1), (.5, −1), ε = .2", lambda f: f(_RATIOS, _SIGNS, .2),
    _tell_objective,
    Formula("the smaller of both", "min(ρÂ, clip(ρ)Â)", clipped_objective, "several updates per batch", "a lower bound of ρÂ",
        ("instruct_goose", "objective.policy_loss::clipped_objective")),
    Formula("the smaller of both", "−max(−ρÂ, −clip(ρ)Â)", _clip_max, "several updates per batch", "right", "torchtune", "TRL PPO",
        ("verl", "::compute_policy_loss_vanilla", "right, up to its dual clip (below)"), "CleanRL"),
    Formula("the smaller of both", "min(ρÂ, clip(ρ)Â)", _clip_min, "several updates per batch", "right", "DI-engine", "TRL GRPO",
        "OpenRLHF", "rlhf-book"),
    Formula("clipped on every side", "clip(ρ)Â", lambda r, a, eps: r.clamp(1 - eps, 1 + eps) * a, "none that we know of",
        "without the min a bad move below 1 − ε has no gradient back", "illustrated-rlhf"),
    Formula("ρ·clip(ρ) in the place of clip(ρ)Â", "min(ρÂ, ρ·clip(ρ)), minimised",
        lambda r, a, eps: torch.minimum(r * a, r * r.clamp(1 - eps, 1 + eps)), "none that we know of",
        "Â is missing from the second term, and the sign is that of a loss to be maximised", "instructGOOSE"))


def _tell_dual_clip(f):
    return _match(f(_t(1., 5., 1.), _t(1., -1., -1.), 3.), {
        "negative advantages only": _t(1., -3., -1.),
        "every advantage": _t(3., -3., -1.), "none": _t(1., -5., -1.)})

def _dual(r, a, c):
    inner = _clip_min(r, a, .2)
    return torch.where(a < 0, torch.maximum(inner, c * a), inner)


DUAL_CLIP = Quantity("dual clip", "objective at (ρ, Â) = (1, 1) and (5, −1), ε = .2, c = 3", lambda f: f(_t(1., 5.), _t(1., -1.), 3.),
    _tell_dual_clip,
    Formula("negative advantages only", "Â < 0: max(min(…), cÂ)", lambda r, a, c: clipped_objective(r, a, dual_clip=c),
        "ratios that explode", "off by default", ("instruct_goose", "objective.policy_loss::clipped_objective")),
    Formula("negative advantages only", "Â < 0: max(min(…), cÂ)", _dual, "ratios that explode", "right; off by default",
        "DI-engine: discrete", "OpenRLHF", ("verl", "::compute_policy_loss_vanilla", "right; always on, c = 3")),
    Formula("every advantage", "max(min(…), cÂ)", lambda r, a, c: torch.maximum(_clip_min(r, a, .2), c * a), "none that we know of",
        "for Â > 0 the constant cÂ wins: no gradient from any good action", ("DI-engine: continuous", "::ppo_error_continuous")),
    Formula("negative advantages only", "min(min(ρ, δ)Â, clip(ρ)Â)",
        lambda r, a, c: torch.minimum(r.clamp(max=c) * a, r.clamp(.8, 1.2) * a), "ratios that explode",
        "the same by another way for δ ≥ 1 + ε_high, below that not; off by default", "TRL GRPO: delta"))


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


CISPO = Quantity("CISPO", "gradient on log π where ρ = 1.5 and .6, Â = 1, range .8 to 1.2", cispo_pull, _tell_cispo,
    Formula("weight cut on both sides", "−sg(clip(ρ))·Â·log π",
        lambda new, old, a, low, high: policy_loss( new[None], old[None], a[None], torch.ones_like(new[None], dtype=torch.bool), 1 - low, high - 1, surrogate="weight")[0],
        "keeping rare tokens in the gradient", "the preset cispo has no lower bound, as the paper's runs",
        ("instruct_goose", "objective.policy_loss::policy_loss")),
    Formula("weight cut above", "−sg(min(ρ, ε_high))·Â·log π", lambda new, old, a, low, high: _weight(0., new, old, a, high),
        "keeping rare tokens in the gradient", "ε_high is the cap itself, not its distance from 1; no lower bound", "TRL GRPO"),
    Formula("weight cut on both sides", "−sg(clip(ρ, 1−ε, 1+ε_high))·Â·log π",
        lambda new, old, a, low, high: _weight(low, new, old, a, high), "keeping rare tokens in the gradient", "bounds on both sides",
        ("verl", "::compute_policy_loss_cispo"), ("rlhf-book", "::CISPOLoss")),
    Formula("no gradient outside", "−clip(ρ)·Â", lambda new, old, a, low, high: -(new - old).exp().clamp(low, high) * a,
        "none that we know of", "neither stop-gradient nor log π: outside the range the token is silent", "torchrl"))


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


CLIP_FRACTION = Quantity("clip fraction", "share of clipped tokens in the padded example, ε = .2", _ratios, _tell_clip_fraction,
    Formula("cut, of real tokens", "Σ m·[gradient cut] / Σ m", lambda r, a, m, eps: sum(clip_fraction(r, a, m, eps)), "what the clip does",
        "low and high apart", ("instruct_goose", "objective.policy_loss::clip_fraction")),
    Formula("cut, of real tokens", "Σ m·[clip(ρ)Â < ρÂ] / Σ m", _cut, "what the clip does", "right", "torchtune", "TRL PPO", "OpenRLHF",
        ("verl", "::compute_policy_loss_vanilla", "right; the dual clip's share apart")),
    Formula("cut, of real tokens", "low: ρ < 1−ε, Â < 0; high: ρ > 1+ε, Â > 0",
        lambda r, a, m, eps: ((((r < 1 - eps) & (a < 0)) | ((r > 1 + eps) & (a > 0))) * m).sum() / m.sum(), "what the clip does",
        "right; low and high apart", "TRL GRPO"),
    Formula("out of range, of all slots", "Σ [ρ outside 1 ± ε] / N", _outside, "how far ratios went",
        "the sign of Â and the mask are left out", "DI-engine", ("CleanRL", "", "the sign of Â is left out; no mask to give")))


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


VALUE_CLIP = Quantity("value clipping", "mean value loss of the real tokens, c = .2", _value_number, _tell_value_clip,
    Formula("half the larger square", "½ max((V − R̂)², (clip(V, V_old ± c) − R̂)²)",
        lambda v, r, old, c: value_loss(v, r, torch.ones_like(v, dtype=torch.bool), old, c), "slowing the value head",
        "c has the unit of the reward", ("instruct_goose", "objective.value_loss::value_loss")),
    Formula("half the larger square", "the same, c = .2", _at_old, "slowing the value head", "right", "torchtune", "TRL PPO", "rlhf-book"),
    Formula("half the larger square", "V_clip = V_old + clip(V − V_old, ±ε)", _from_old, "rewards of size 1",
        "same value; c is the policy's ε, whatever the scale of rewards", ("DI-engine", "::ppo_value_error"), "CleanRL"),
    Formula("half the larger square", "V_clip = V_old + clip(V − V_old, ±c), c = .5", _from_old, "slowing the value head", "right",
        ("OpenRLHF", "::ValueLoss")),
    Formula("half the larger square", "the same, c = .5", _at_old, "slowing the value head", "right", ("verl", "::compute_value_loss")),
    Formula("without V_old", "V_clip = clip(V − V_old, ±ε)",
        lambda v, r, old, c: torch.maximum((v - r)**2, ((v - old).clamp(-c, c) - r)**2) / 2, "none that we know of",
        "the printed equation lacks V_old +; the code beside it has it", "labml: its equation"),
    Formula("the square", "(V − R̂)²", lambda v, r, old, c: (v - r)**2, "a head that may move freely",
        "no clip, no ½: the same vf_coef weighs twice as much", "instructGOOSE"))


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


SAMPLER_WEIGHTS = Quantity("sampler weights", "weights of three tokens with π_old/μ = 4, .25 and 1; bounds .5 and 2", _weights_of_three,
    _tell_sampler_weights,
    Formula("cut above", "min(w, C)", lambda log_w, m, low, high: sampler_weights(log_w, torch.zeros_like(log_w), m, high),
        "a small mismatch", "off by default", ("instruct_goose", "objective.policy_loss::sampler_weights")),
    Formula("cut on both sides", "clip(w, low, high)", lambda log_w, m, low, high: log_w.exp().clamp(low, high), "a small mismatch",
        "lifts small weights too; bounds .5 and 5; off by default", "OpenRLHF: tis"),
    Formula("0 outside", "w·1[low ≤ w ≤ high]", lambda log_w, m, low, high: log_w.exp() * ((log_w.exp() >= low) & (log_w.exp() <= high)),
        "a few tokens that are far off", "a token outside teaches nothing", "OpenRLHF: icepop"),
    Formula("whole responses, uncut", "w·1[low ≤ exp(mean log w) ≤ high]", _by_response, "a few responses that are far off",
        "no bound on a single token", "OpenRLHF: seq-mask-tis"))


QUANTITIES = {q.name: q for q in (
    MASKED_MEAN, AGGREGATION, WHITENING, RETURNS, GROUP_STD, KL_K1, KL_K3, KL_LOSS,
    ENTROPY, LOGGED_KL, TEMPERATURE, POSITION, OBJECTIVE, DUAL_CLIP, CISPO,
    SAMPLER_WEIGHTS, CLIP_FRACTION, VALUE_CLIP)}


def _quantity(name):
    if name not in QUANTITIES:
        raise ValueError(f"no quantity {name!r}: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]

def tells_apart(
    quantity: str, # a key of QUANTITIES
    f: Callable,   # an implementation; the formulas above show what it is called with
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
    lines = [[f"**{r.version}** {r.link}", r.of.formula, q.number(r), r.of.good_for, f"*{r.kind}*; {r.verdict}"] for r in q.rows]
    table = _markdown("library", "formula", "number", "right for", "what to know", lines)
    return f"**{q.name}**: {q.shows}. Told apart by `{q.test}`.\n\n{table}"
