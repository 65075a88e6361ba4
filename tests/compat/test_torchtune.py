"""torchtune's names: the numbers, gradients and kinds that torchtune 0.6.1 gave; and the same of torchtune itself where it is installed."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from originals import compare, normal
from torch import tensor

from instruct_goose.compat import torchtune as ours

MASK = tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()


def calls(library, x):
    "Of each function asymmetric arguments, what its callers pass (weights as a mask, one row of it for all, what broadcasts), and edges."

    def call(name, *args, dials=(), **options):
        f = getattr(library, name)
        return name, f(*dials) if isinstance(f, type) else f, args, options

    yield from masked_calls(call, x)
    yield from advantage_calls(call, x)
    yield from reward_calls(call, x)
    yield from sequence_calls(call, x)
    yield from loss_calls(call, x)


def masked_calls(call, x):
    "Whitening, PPO's loss, means and variances, under each kind of mask."
    for m in (None, MASK, MASK.long(), MASK * x(3, 4).abs(), MASK[0]):
        for shift in (True, False):
            yield call("whiten", x(3, 4), m, shift_mean=shift)
        for dials in ((), (0.3, 0.1, 1.0), (0, 0, 0), (2.0, math.inf, -1)):
            yield call(
                "PPOLoss",
                *(0.7 * x(3, 4) for _ in range(6)),
                dials=dials,
                padding_masks=m,
                value_padding_masks=None if m is None else m.roll(1, 0),
            )
        if m is None:
            continue
        for dim in (None, 0, -1):
            yield call("masked_mean", x(3, 4), m, dim=dim if m.ndim > 1 else None)
        for unbiased in (True, False):
            yield call("masked_var", x(3, 4), m, unbiased)


def advantage_calls(call, x):
    "GAE with usual and odd discounts, masks and shapes."
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (1, 0), (1.1, 1.2)):
        for m in (None, MASK, MASK.long()):
            yield call("estimate_advantages", x(3, 4), x(3, 4), gamma, lam, m)
    for shape in ((1, 4), (3, 6)):
        yield call("estimate_advantages", x(3, 4), x(*shape), 0.9, 0.5)
    yield call("estimate_advantages", x(3, 4), tensor([[1, 0, -2, 3]] * 3), 0.9, 0.5)


def reward_calls(call, x):
    "Rewards with a KL penalty, and who is penalised for no end."
    for beta in (0.3, 0, -1.0):
        for at in (None, tensor([0, 3, 2])):
            yield call("get_rewards_ppo", x(3), x(3, 4), x(3, 4), beta, at)
    yield call("get_rewards_ppo", x(), x(3, 4), x(1, 4), 0.3)
    yield call("get_rewards_ppo", x(2), x(3, 4), x(3, 4), 0.3, tensor([1, 2]))
    lengths = tensor([4, 1, 2])
    padding = tensor([[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    for pad in (padding, padding.long()):
        for no_eos, shortest in ((True, None), (False, None), (True, 2), (False, 4)):
            yield call("get_reward_penalty_mask", pad, lengths, no_eos, shortest)


def sequence_calls(call, x):
    "Cutting at stop tokens, and log-probabilities of sequences."
    for stop in ([2, 4], [7], []):
        for shape in ((3, 4), (2, 2, 3), (0, 4)):
            yield call(
                "truncate_sequence_at_first_stop_token",
                (10 * x(*shape)).long() % 5,
                tensor(stop, dtype=torch.long),
                -7,
            )
    for tau in (1.0, 0.7, 3, -2.0):
        yield call(
            "logits_to_logprobs", x(2, 3, 5), tensor([[0, 4, 2], [1, 1, 3]]), temperature=tau
        )
    yield call("logits_to_logprobs", x(2, 3, 5), tensor([[4, 2]]))
    for context in (1, 2):
        yield call("truncate_sequence_for_logprobs", x(2, 3, 5), context)
    labels = tensor([[-100, 1, 3, -100, 2], [0, 2, -100, -100, -100], [-100] * 5])
    for average in (True, False):
        yield call("get_batch_log_probs", x(3, 5, 4), labels, return_average_logprobs=average)
    yield call("get_batch_log_probs", x(3, 5, 4), labels.clamp(min=0), 3)


def loss_calls(call, x):
    "Losses of what broadcasts, of ties, of nothing, of e²⁰ and of holes; DPO and RSO."
    for shapes in (
        [(3, 4), (3, 4), (3, 1), (3, 1), (3, 4), ()],
        [(4,), (3, 4), (3, 4), (4,), (3, 4), (3, 4)],
        [()] * 6,
    ):
        yield call("PPOLoss", *(x(*shape) for shape in shapes))
    same = x(3, 4)
    zero = torch.zeros_like(x(3, 4))
    holes = torch.where(MASK, x(3, 4), math.nan)
    yield call("PPOLoss", same, same, x(3, 4), same, same, same)  # ratio 1, ties everywhere
    yield call(
        "PPOLoss", *(x(3, 4) for _ in range(6)), padding_masks=MASK & False
    )  # nothing to average
    yield call("PPOLoss", zero, zero + 20, x(3, 4), zero, zero, zero)  # ratio e²⁰
    yield call("PPOLoss", x(3, 4), holes, *(x(3, 4) for _ in range(4)), padding_masks=MASK)
    for dials in ((), (0.4, 0.2), (2, 0.7), (0, 0), (-0.5, 1)):
        yield call("DPOLoss", *(3 * x(3) for _ in range(4)), dials=dials)
    for gamma in (0.1, 1, 0, -2.0):
        yield call("RSOLoss", *(x(2, 3) for _ in range(4)), dials=(gamma,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_numbers_of_torchtune(dtype):
    compare("torchtune", calls(ours, normal(0, dtype)), dtype)


@pytest.fixture(scope="module")
def theirs():
    why = "torchtune 0.6.1 with torchao 0.16.0 is not installed: `make parity` installs it elsewhere and runs these"
    modules = [
        pytest.importorskip(name, reason=why, exc_type=ImportError)
        for name in ("torchtune.rlhf", "torchtune.rlhf.loss")
    ]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def test_torchtune_itself(theirs):
    compare("torchtune", calls(SimpleNamespace(**theirs), normal(0)))


def test_every_public_name_is_there_with_its_signature(theirs):
    assert set(theirs) <= set(ours.__all__)
    for name, original in theirs.items():
        mine = getattr(ours, name)
        pairs = (
            [(mine, original)]
            if not hasattr(original, "forward")
            else [(mine, original), (mine.forward, original.forward)]
        )
        for a, b in pairs:
            p, q = (list(inspect.signature(f).parameters.values()) for f in (a, b))
            assert [(x.name, x.default, x.kind) for x in p] == [
                (x.name, x.default, x.kind) for x in q
            ], name
    for name in ("Trajectory", "PPOStats"):
        assert getattr(ours, name)._fields == theirs[name]._fields


def test_an_integer_mask_zeroes_whole_rows():
    "~1 is −2 and ~0 is −1, and as an index they are the last two rows: only the first survives."
    values, rewards = torch.randn(3, 4), torch.randn(3, 4)
    A, _ = ours.estimate_advantages(values, rewards, 1.0, 1.0, tensor([[1, 1, 1, 0]] * 3))
    assert A[0].abs().min() > 0 and not A[1:].any()


def test_get_reward_penalty_mask_by_hand():
    "Rows: cut off and long; ended, long; ended, short."
    padding, lengths = (
        tensor([[False] * 4, [False, False, False, True], [False, True, True, True]]),
        tensor([4, 3, 1]),
    )
    assert ours.get_reward_penalty_mask(padding, lengths).tolist() == [True, False, False]
    assert ours.get_reward_penalty_mask(padding, lengths, True, 2).tolist() == [True, False, True]
    assert ours.get_reward_penalty_mask(padding, lengths, False, 4).tolist() == [False, True, True]


def test_truncation_writes_into_what_it_is_given():
    tokens = tensor([5, 2, 3, 4])
    filled, same = ours.truncate_sequence_at_first_stop_token(tokens, tensor([2, 4]), fill_value=-7)
    assert (
        same is tokens
        and tokens.tolist() == [5, 2, -7, -7]
        and filled.tolist() == [False, False, True, True]
    )


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="must be equal"):
        ours.get_batch_log_probs(torch.zeros(2, 5, 4), torch.zeros(2, 4).long())
