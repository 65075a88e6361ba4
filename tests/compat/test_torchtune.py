"""torchtune's names: against loops written from the definitions, always; against torchtune 0.6.1 where it is installed."""
import inspect
import math

import pytest
import torch
from torch import tensor

from instruct_goose.compat import torchtune as ours

close = torch.testing.assert_close
shapes = pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 5)], ids=str)
masks = pytest.mark.parametrize("kind", [None, "bool", "int", "float", "row"])


def double(*shape): return torch.randn(*shape, dtype=torch.float64)


def make_mask(kind, shape, p=.6):
    "None; bool; 0 and 1 as integers; weights; a mask of one row for all of them."
    if kind is None: return None
    if kind == "row": shape = shape[-1:]
    mask = torch.rand(shape) < p
    mask[..., :2] = True
    return {"int": mask.long(), "float": mask * torch.rand(shape)}.get(kind, mask)


def grid(x, like): return [float(v) for v in torch.as_tensor(x).broadcast_to(like.shape).flatten()]


def slow_mean(x, mask):
    "x and mask of one shape, or a row of mask for all; the sum of the mask is its own, not that of its copies."
    return sum(a * b for a, b in zip(grid(x, x), grid(mask, x), strict=True)) / (sum(map(float, mask.flatten())) + 1e-8)


def slow_var(c, mask):
    n = sum(map(float, mask.flatten())) + 1e-8
    return slow_mean(c * c, mask) * n / (n - 1)


def slow_whiten(x, mask, shift_mean):
    n = x.numel()
    if mask is None:
        mean = sum(grid(x, x)) / n
        var = sum((a - mean)**2 for a in grid(x, x)) / (n - 1)
    else:
        mean = slow_mean(x, mask)
        var = slow_var(x - mean, mask)
    return tensor([(a - mean) / math.sqrt(var + 1e-8) + mean * shift_mean for a in grid(x, x)]).double().view(x.shape)


def slow_gae(values, rewards, gamma, lam):
    "Âₜ = Σ_k (γλ)^k δₜ₊ₖ, the definition; no recursion."
    b, n = values.shape
    v, r = values.tolist(), rewards.tolist()
    delta = [[r[i][t] + (gamma * v[i][t + 1] if t + 1 < n else 0) - v[i][t] for t in range(n)] for i in range(b)]
    return tensor([[sum((gamma * lam)**k * delta[i][t + k] for k in range(n - t)) for t in range(n)] for i in range(b)]).double()


def slow_ppo(old, new, A, v_old, v, R, mask=None, v_mask=None, eps=.1, c=.2, coeff=.1):
    rows = lambda *xs: zip(*(grid(x, torch.broadcast_tensors(*xs)[0]) for x in xs), strict=True)
    policy, cut, ratios = [], [], []
    for o, n, a in rows(old, new, A):
        rho = math.exp(n - o)
        plain, clipped = -a * rho, -a * min(max(rho, 1 - eps), 1 + eps)
        policy.append(max(plain, clipped)); cut.append(float(clipped > plain)); ratios.append(rho)
    value = [max((x - r)**2, (min(max(x, o - c), o + c) - r)**2) for o, x, r in rows(v_old, v, R)]

    def mean(xs, mask, like):
        if mask is None: return sum(xs) / len(xs)
        return slow_mean(tensor(xs).double().view(like), mask)

    shape = torch.broadcast_shapes(new.shape, old.shape, A.shape)
    policy, cut = mean(policy, mask, shape), mean(cut, mask, shape)
    value = .5 * mean(value, v_mask, torch.broadcast_shapes(v.shape, v_old.shape, R.shape))
    return policy + coeff * value, policy, value, sum(ratios) / len(ratios), cut


def slow_logprob(logits, token, temperature=1.):
    z = [float(x) / temperature for x in logits]
    return z[token] - max(z) - math.log(sum(math.exp(x - max(z)) for x in z))


@shapes
@masks
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten(shape, kind, shift_mean):
    x, mask = double(*shape), make_mask(kind, shape, .8)
    if kind == "row": x = x[..., :shape[-1]]
    close(ours.whiten(x, mask, shift_mean), slow_whiten(x, mask, shift_mean), rtol=1e-6, atol=1e-6)


@shapes
@masks
def test_masked_mean_and_var(shape, kind):
    x, mask = double(*shape), make_mask(kind, shape)
    if mask is None: return
    close(ours.masked_mean(x, mask), tensor(slow_mean(x, mask)).double(), rtol=1e-7, atol=1e-7)
    close(ours.masked_var(x, mask), tensor(slow_var(x, mask)).double(), rtol=1e-6, atol=1e-6)
    close(ours.masked_var(x, mask, unbiased=False), tensor(slow_mean(x * x, mask)).double(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("gamma, lam", [(1., .95), (.9, .5), (1, 0), (0, 1), (1.1, 1.2)])
@pytest.mark.parametrize("masked", [True, False])
def test_estimate_advantages(gamma, lam, masked):
    values, rewards = double(3, 6), double(3, 6)
    mask = torch.rand(3, 6) < .7 if masked else None
    A, R = ours.estimate_advantages(values, rewards, gamma, lam, mask)
    slow = slow_gae(values, rewards, gamma, lam)
    close(R, slow + values)
    white = slow_whiten(slow, mask, True)
    close(A, white if mask is None else torch.where(mask, white, 0.), rtol=1e-6, atol=1e-6)


def test_an_integer_mask_zeroes_whole_rows():
    "~1 is −2 and ~0 is −1, and as an index they are the last two rows: only the first survives."
    values, rewards = torch.randn(3, 4), torch.randn(3, 4)
    A, _ = ours.estimate_advantages(values, rewards, 1., 1., tensor([[1, 1, 1, 0]] * 3))
    assert A[0].abs().min() > 0 and not A[1:].any()


@pytest.mark.parametrize("placed", [True, False])
def test_get_rewards_ppo(placed):
    scores, logprobs, ref = double(3), double(3, 4), double(3, 4)
    at = [1, 3, 0] if placed else [3, 3, 3]
    total, kl, charged = ours.get_rewards_ppo(scores, logprobs, ref, .3, tensor(at) if placed else None)
    for i in range(3):
        for t in range(4):
            ell = (logprobs[i, t] - ref[i, t]).item()
            assert kl[i, t].item() == pytest.approx(ell) and charged[i, t].item() == pytest.approx(-.3 * ell)
            assert total[i, t].item() == pytest.approx(-.3 * ell + (t == at[i]) * scores[i].item())


def test_get_reward_penalty_mask_by_hand():
    "Rows: cut off and long; ended, long; ended, short."
    padding = tensor([[False] * 4, [False, False, False, True], [False, True, True, True]])
    lengths = tensor([4, 3, 1])
    assert ours.get_reward_penalty_mask(padding, lengths).tolist() == [True, False, False]
    assert ours.get_reward_penalty_mask(padding, lengths, False).tolist() == [False] * 3
    assert ours.get_reward_penalty_mask(padding, lengths, True, 2).tolist() == [True, False, True]
    assert ours.get_reward_penalty_mask(padding, lengths, False, 4).tolist() == [False, True, True]
    assert ours.get_reward_penalty_mask(padding.long(), lengths).tolist() == [True, False, False]


@pytest.mark.parametrize("shape", [(9,), (6, 9)], ids=str)
def test_truncate(shape):
    tokens, before = torch.randint(0, 5, shape), None
    before = tokens.clone()
    filled, same = ours.truncate_sequence_at_first_stop_token(tokens, tensor([2, 4]), fill_value=-7)
    assert same is tokens  # written into
    for row, was, pad in zip(tokens.view(-1, 9).tolist(), before.view(-1, 9).tolist(), filled.view(-1, 9).tolist(), strict=True):
        ended = False
        for t in range(9):
            assert pad[t] is ended and row[t] == (-7 if ended else was[t])
            ended = ended or was[t] in (2, 4)


def test_logits_to_logprobs():
    logits, tokens = double(2, 3, 5), torch.randint(0, 5, (2, 3))
    for tau in (1., .7, 2, -1.):
        out = ours.logits_to_logprobs(logits, tokens, tau)
        for i in range(2):
            for t in range(3): assert out[i, t].item() == pytest.approx(slow_logprob(logits[i, t], tokens[i, t], tau))
    close(ours.logits_to_logprobs(logits, tokens[:1, :2]), ours.logits_to_logprobs(logits, tokens)[:1, :2])


@pytest.mark.parametrize("average", [True, False])
def test_get_batch_log_probs(average):
    logits, labels = double(2, 5, 4), tensor([[-100, 1, 3, -100, 2], [0, 2, -100, -100, -100]])
    before, out = labels.clone(), ours.get_batch_log_probs(logits, labels, return_average_logprobs=average)
    assert torch.equal(labels, before)
    for i in range(2):
        terms = [slow_logprob(logits[i, t], labels[i, t + 1]) for t in range(4) if labels[i, t + 1] != -100]
        assert out[i].item() == pytest.approx(sum(terms) / (len(terms) if average else 1), rel=1e-7)
    with pytest.raises(ValueError, match="must be equal"): ours.get_batch_log_probs(logits, labels[:, 1:])


@pytest.mark.parametrize("kind", [None, "bool", "int", "float", "row"])
@shapes
def test_ppo_loss(shape, kind):
    six = [double(*shape) for _ in range(6)]
    mask, v_mask = make_mask(kind, shape), make_mask(kind, shape)
    out = ours.PPOLoss(.15, .3, .7)(*six, mask, v_mask)
    close(torch.stack(out), tensor(slow_ppo(*six, mask, v_mask, .15, .3, .7)).double(), rtol=1e-6, atol=1e-6)


def test_ppo_loss_takes_what_broadcasts():
    "One advantage per response, one return for all, a column of old values."
    old, new = double(3, 4), double(3, 4)
    six = (old, new, double(3, 1), double(3, 1), double(3, 4), double(()))
    close(torch.stack(ours.PPOLoss()(*six)), tensor(slow_ppo(*six)).double())


@pytest.mark.parametrize("eps", [0., .2, .6, 1])
def test_preference_losses(eps):
    four = [double(5) for _ in range(4)]
    beta, gamma = .4, .7
    losses, up, down = ours.DPOLoss(beta, eps)(*four)
    hinge, *_ = ours.RSOLoss(gamma)(*four)
    for i, (pc, pr, rc, rr) in enumerate(zip(*(x.tolist() for x in four), strict=True)):
        ell = (pc - rc) - (pr - rr)
        nll = lambda x: math.log1p(math.exp(-x))
        assert losses[i].item() == pytest.approx((1 - eps) * nll(beta * ell) + eps * nll(-beta * ell))
        assert up[i].item() == pytest.approx(beta * (pc - rc)) and down[i].item() == pytest.approx(beta * (pr - rr))
        assert hinge[i].item() == pytest.approx(max(0., 1 - gamma * ell))


def test_gradients_by_finite_differences():
    check, x, m = torch.autograd.gradcheck, lambda *s: double(*s).requires_grad_(), make_mask("bool", (3, 4))
    assert check(lambda x: ours.whiten(x, m.double()), (x(3, 4),))
    assert check(lambda v, r: ours.estimate_advantages(v, r, 1.1, .9, None), (x(3, 4), x(3, 4)))
    assert check(lambda *a: ours.get_rewards_ppo(*a, .3, tensor([1, 0, 3])), (x(3), x(3, 4), x(3, 4)))
    assert check(lambda *a: ours.PPOLoss(.5, .5)(*a, m.double())[0], [x(3, 4) for _ in range(6)])
    assert check(lambda z: ours.logits_to_logprobs(z, tensor([[0, 2]]), .7), (x(1, 2, 3),))
    assert check(lambda z: ours.get_batch_log_probs(z, tensor([[0, 2, -100]])), (x(1, 3, 3),))
    assert check(lambda *a: ours.DPOLoss(.5, .1)(*a)[0], [x(3) for _ in range(4)])
    assert check(lambda *a: ours.RSOLoss(.5)(*a)[0], [x(3) for _ in range(4)])


@pytest.fixture(scope="module")
def theirs():
    why = "torchtune 0.6.1 with torchao 0.16.0 is not installed: `make parity` installs it elsewhere and runs these"
    rlhf = pytest.importorskip("torchtune.rlhf", reason=why, exc_type=ImportError)
    loss = pytest.importorskip("torchtune.rlhf.loss", reason=why, exc_type=ImportError)
    return {name: getattr(module, name) for module in (rlhf, loss) for name in module.__all__}


def leaves(args):
    "A copy to work on: floats as leaves that want a gradient."
    copy = lambda x: x.clone().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x
    return [copy(x) for x in args]


def run(f, args, kwargs, seed=0):
    "Outputs, the gradients of a random sum of them, and the arguments afterwards."
    given = leaves(args)
    passed = [x * 1 if torch.is_tensor(x) and x.requires_grad else x for x in given]
    out = f(*passed, **kwargs)
    outs = [out] if torch.is_tensor(out) else list(out)
    smooth = [o for o in outs if o.requires_grad]
    if smooth:
        g = torch.Generator().manual_seed(seed)
        sum((o.double() * torch.randn(o.shape, generator=g, dtype=torch.float64)).sum() for o in smooth).backward()
    zero = lambda x: torch.zeros_like(x) if x.grad is None else x.grad
    grads = [zero(x) for x in given if torch.is_tensor(x) and x.is_floating_point()]
    after = [x.detach() for x in passed if torch.is_tensor(x)]
    return [o.detach() for o in outs], grads, after, [o.requires_grad for o in outs]


def compare(mine, theirs, args, kwargs):
    dtypes = {x.dtype for x in args if torch.is_tensor(x) and x.is_floating_point()}
    tol = dict(rtol=1e-10, atol=1e-10) if dtypes <= {torch.float64} else dict(rtol=1e-5, atol=1e-6)
    if torch.bfloat16 in dtypes: tol = dict(rtol=2e-2, atol=2e-2)
    a, b = run(mine, args, kwargs), run(theirs, args, kwargs)
    close(a[:3], b[:3], equal_nan=True, **tol)  # dtypes and shapes too
    assert a[3] == b[3]


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_every_public_name_is_there_with_its_signature(theirs):
    assert set(theirs) <= set(ours.__all__)
    for name, original in theirs.items():
        mine = getattr(ours, name)
        pairs = [(mine, original)] if not hasattr(original, "forward") else [(mine, original), (mine.forward, original.forward)]
        for a, b in pairs:
            p, q = (list(inspect.signature(f).parameters.values()) for f in (a, b))
            assert [(x.name, x.default, x.kind) for x in p] == [(x.name, x.default, x.kind) for x in q], name
    for name in ("Trajectory", "PPOStats"): assert getattr(ours, name)._fields == theirs[name]._fields


@dtypes
@shapes
@masks
def test_parity_of_masked_statistics(theirs, dtype, shape, kind):
    x, mask = torch.randn(shape).to(dtype), make_mask(kind, shape)
    for shift in (True, False): compare(ours.whiten, theirs["whiten"], (x, mask), {"shift_mean": shift})
    if mask is None: return
    for dim in (None, 0, -1): compare(ours.masked_mean, theirs["masked_mean"], (x, mask), {"dim": dim if kind != "row" else None})
    for unbiased in (True, False): compare(ours.masked_var, theirs["masked_var"], (x, mask, unbiased), {})


@dtypes
@pytest.mark.parametrize("gamma, lam", [(1., .95), (.9, .5), (1, 0), (0, 1), (1.1, 1.2)])
@pytest.mark.parametrize("kind", [None, "bool", "int"])
def test_parity_of_advantages(theirs, dtype, gamma, lam, kind):
    f = "estimate_advantages"
    mask = make_mask(kind, (5, 9))
    values, rewards = torch.randn(5, 9).to(dtype), torch.randn(5, 9).to(dtype)
    compare(ours.estimate_advantages, theirs[f], (values, rewards, gamma, lam, mask), {})
    compare(ours.estimate_advantages, theirs[f], (values[:, :1], rewards[:, :1], gamma, lam), {})
    compare(ours.estimate_advantages, theirs[f], (values, rewards[:1], gamma, lam), {})                   # broadcasts
    compare(ours.estimate_advantages, theirs[f], (values[:, :5], rewards, gamma, lam), {})                # more rewards
    compare(ours.estimate_advantages, theirs[f], (values, torch.randint(-3, 3, (5, 9)), gamma, lam), {})  # whole numbers


@dtypes
def test_parity_of_rewards(theirs, dtype):
    f, (s, lp, ref) = "get_rewards_ppo", (torch.randn(4).to(dtype), torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype))
    for beta in (.3, 0, -1.):
        compare(ours.get_rewards_ppo, theirs[f], (s, lp, ref, beta), {})
        compare(ours.get_rewards_ppo, theirs[f], (s, lp, ref, beta, tensor([0, 5, 2, 2])), {})
    compare(ours.get_rewards_ppo, theirs[f], (s[0], lp, ref, .3), {})                        # one score for all
    compare(ours.get_rewards_ppo, theirs[f], (s[:2], lp, ref, .3, tensor([1, 2])), {})       # the first two rows
    compare(ours.get_rewards_ppo, theirs[f], (s, lp, ref[:1], .3), {})                       # broadcasts


def test_parity_of_the_penalty_mask(theirs):
    f, lengths = "get_reward_penalty_mask", torch.randint(1, 6, (5,))
    padding = torch.arange(6) >= torch.tensor([6, 3, 1, 6, 5])[:, None]
    for pad in (padding, padding.long(), padding.float()):
        for no_eos in (True, False):
            for shortest in (None, 0, 3): compare(ours.get_reward_penalty_mask, theirs[f], (pad, lengths, no_eos, shortest), {})
    compare(ours.get_reward_penalty_mask, theirs[f], (padding, lengths.float(), False, 2), {})


@pytest.mark.parametrize("shape", [(6, 9), (1, 1), (2, 5, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("stop", [[2, 4], [7], []])
def test_parity_of_truncation(theirs, shape, stop):
    stop = torch.tensor(stop, dtype=torch.long)
    compare(ours.truncate_sequence_at_first_stop_token, theirs["truncate_sequence_at_first_stop_token"],
            (torch.randint(0, 5, shape), stop, -7), {})
    tokens = torch.randint(0, 5, shape)
    assert ours.truncate_sequence_at_first_stop_token(tokens, stop)[1] is tokens


@dtypes
def test_parity_of_logprobs(theirs, dtype):
    logits, tokens = torch.randn(3, 5, 7).to(dtype), torch.randint(0, 7, (3, 5))
    f, mine = theirs["logits_to_logprobs"], ours.logits_to_logprobs
    for tau in (1.0, .7, 3, -2.): compare(mine, f, (logits, tokens), {"temperature": tau})
    compare(mine, f, (logits, tokens[:2, :4]), {})
    compare(mine, f, (logits[:, :1], tokens[:, :1]), {})
    for context in (1, 3, 5): compare(ours.truncate_sequence_for_logprobs, theirs["truncate_sequence_for_logprobs"], (logits, context), {})
    tokens[0, 2:] = tokens[1, 0] = -100
    tokens[2] = -100
    for average in (True, False):
        compare(ours.get_batch_log_probs, theirs["get_batch_log_probs"], (logits, tokens), {"return_average_logprobs": average})
    compare(ours.get_batch_log_probs, theirs["get_batch_log_probs"], (logits, tokens.clamp(min=0), 3), {})


@dtypes
@shapes
@masks
def test_parity_of_ppo_loss(theirs, dtype, shape, kind):
    six = [torch.randn(shape).mul(.7).to(dtype) for _ in range(6)]
    pair = make_mask(kind, shape), make_mask(kind, shape)
    for dials in ((), (.3, .1, 1.), (0, 0, 0), (2., math.inf, -1)):
        mine, original = ours.PPOLoss(*dials), theirs["PPOLoss"](*dials)
        compare(mine, original, six, dict(padding_masks=pair[0], value_padding_masks=pair[1]))
        compare(mine, original, six, dict(padding_masks=pair[0]))


@dtypes
def test_parity_of_ppo_loss_at_the_edges(theirs, dtype):
    mine, original = ours.PPOLoss(), theirs["PPOLoss"]()
    x = lambda *shape: torch.randn(shape).to(dtype)
    compare(mine, original, (x(3, 4), x(3, 4), x(3, 1), x(3, 1), x(3, 4), x()), {})                 # broadcasts
    compare(mine, original, (x(4), x(3, 4), x(3, 4), x(4), x(3, 4), x(3, 4)), {})
    compare(mine, original, (x(), x(), x(), x(), x(), x()), {})                                     # scalars
    same = x(3, 4)
    compare(mine, original, (same, same, x(3, 4), same, same, same), {})                            # ratio 1, ties everywhere
    empty = torch.zeros(3, 4).bool()
    compare(mine, original, [x(3, 4) for _ in range(6)], dict(padding_masks=empty, value_padding_masks=empty))
    far, flat = torch.full((3, 4), 60.).to(dtype), torch.zeros(3, 4).to(dtype)
    compare(mine, original, (flat, far, x(3, 4), flat, flat, flat), {})                             # ratio e⁶⁰
    holes = x(3, 4); holes[0, 0] = math.nan
    compare(mine, original, (x(3, 4), holes, *(x(3, 4) for _ in range(4))), dict(padding_masks=~holes.isnan()))


@dtypes
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_parity_of_preference_losses(theirs, dtype, shape):
    four = [torch.randn(shape).mul(3).to(dtype) for _ in range(4)]
    for dials in ((), (.4, .2), (2, .7), (0, 0), (-.5, 1)): compare(ours.DPOLoss(*dials), theirs["DPOLoss"](*dials), four, {})
    for gamma in (.1, 1, 0, -2.): compare(ours.RSOLoss(gamma), theirs["RSOLoss"](gamma), four, {})
    compare(ours.DPOLoss(), theirs["DPOLoss"](), [x - 100 for x in four], {})
