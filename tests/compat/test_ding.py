"""DI-engine's names: against loops written from the papers, always, and against DI-engine itself where it is installed; then the oddities, by hand."""
import importlib
import inspect
import itertools
import math
import pickle
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import tensor

import instruct_goose.compat.ding as ours

RECORDS = [n for n in ours.__all__ if hasattr(getattr(ours, n), "_fields")]
METHODS = ["naive_method", "efficient_method", "less_efficient_method"]
RESULTS = {name: (getattr(ours, loss), getattr(ours, info)) for name, loss, info in (
    ("ppo_error", "ppo_loss", "ppo_info"), ("ppo_error_continuous", "ppo_loss", "ppo_info"), ("ppo_policy_error", "ppo_policy_loss", "ppo_info"),
    ("ppo_policy_error_continuous", "ppo_policy_loss", "ppo_info"))}


def flat(out):
    "Losses and meters in a row, however they are packed."
    if not isinstance(out, tuple): return [out]
    return [x for part in out for x in flat(part)]


def leaves(*data):
    "What can have a gradient, also in dicts, each once."
    tensors = itertools.chain.from_iterable(d.values() if isinstance(d, dict) else [d] for d in data)
    return [x for x in tensors if torch.is_tensor(x) and x.is_leaf and x.requires_grad]


def gradients(outputs, inputs):
    grads = [torch.autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True, allow_unused=True)
             for o in outputs if torch.is_tensor(o) and o.requires_grad]
    return [torch.zeros_like(i) if g is None else g for gs in grads for g, i in zip(gs, inputs)]


def agree(got, wanted, dtype, inputs, their_inputs=None):
    "Values and every gradient, to 1e-5 and 1e-6 in float32, 1e-10 in float64; Python numbers, which may be float32's, to 1e-6."
    got, wanted = flat(got), flat(wanted)
    assert len(got) == len(wanted)
    close = partial(torch.testing.assert_close, equal_nan=True, check_dtype=False,
                    **(dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-10, atol=1e-10)))
    for a, b in zip(got, wanted):
        if not torch.is_tensor(a): assert type(a) in (int, float) and a == pytest.approx(float(b), rel=1e-6, abs=1e-6)
        else: assert a.shape == torch.Size() or torch.is_tensor(b) and a.shape == b.shape; close(a, torch.as_tensor(b))
    ga, gb = gradients(got, inputs), gradients(wanted, inputs if their_inputs is None else their_inputs)
    ga, gb = ([g for g in gs if g.any()] for gs in (ga, gb))  # a tensor(0.) has no gradient, a loop's 0 may have one
    assert len(ga) == len(gb)
    for a, b in zip(ga, gb): close(a, b)


def places(x): return list(itertools.product(*map(range, x.shape)))


def probability(logits, a):
    weights = [math.e**z for z in logits]
    return weights[int(a)] / sum(weights)


def density(mu_sigma, i, action):
    p = 1.
    for m, s, a in zip(mu_sigma["mu"][i], mu_sigma["sigma"][i], action[i]):
        p = p * math.e**(-((a - m) / s)**2 / 2) / (s * math.sqrt(2 * math.pi))
    return p


def slow_surrogate(r, adv, clip, dual, everywhere=False):
    near = r if 1 - clip <= r <= 1 + clip else 1 + clip if r > 1 else 1 - clip
    loss = r * adv if r * adv <= near * adv else near * adv
    if dual is None or adv >= 0 and not everywhere: return loss  # odd, if everywhere: the paper's c is for Â < 0 alone
    return loss if loss >= dual * adv else dual * adv


def slow_kl(p, q, kind):
    return {"k1": (p / q).log(), "k2": (p / q).log()**2 / 2, "k3": q / p - 1 - (q / p).log()}[kind]


def mean(x): return sum(x) / len(x)


def slow_policy(p_new, p_old, entropies, adv, weight, clip, dual, p_pretrained, kl_type, everywhere=False):
    "Lists of one number per action. Odd: everything divided by their count, KL and meters without the weight."
    r = [p / q for p, q in zip(p_new, p_old)]
    weight = [1.] * len(r) if weight is None else [w * 1. for w in weight]
    loss = mean([-w * slow_surrogate(x, a, clip, dual, everywhere) for x, a, w in zip(r, adv, weight)])
    entropy = mean([h * w for h, w in zip(entropies, weight)])
    kl = 0. if p_pretrained is None else mean([slow_kl(p, q, kl_type) for p, q in zip(p_new, p_pretrained)])
    approx_kl = mean([math.log(q.item() / p.item()) for p, q in zip(p_new, p_old)])
    return loss, entropy, kl, approx_kl, mean([float(x > 1 + clip or x < 1 - clip) for x in r])


def slow_values(new, old, returns, weight, clip):
    total = []
    for i in places(new):
        v, o, r = new[i], old[i], returns[i]
        errors = [(v - r)**2]
        if clip is not None: errors.append(((v if abs(v - o) <= clip else o + clip if v > o else o - clip) - r)**2)
        total.append(max(errors) / 2 * (1. if weight is None else weight[i]))
    return mean(total)  # odd: not by the sum of the weights


def slow_discrete(d, clip, dual, bonus=True, kl_type="k1"):
    at = places(d.action)
    ps = [[probability(z[i], d.action[i]) for i in at] for z in (d.logit_new, d.logit_old)]
    everything = [[probability(d.logit_new[i], a) for a in range(d.logit_new.shape[-1])] for i in at]
    entropies = [-sum(p * p.log() for p in row) if bonus else 0. for row in everything]
    pretrained = None if d.logit_pretrained is None else [probability(d.logit_pretrained[i], d.action[i]) for i in at]
    weight = None if d.weight is None else [d.weight[i] for i in at]
    return slow_policy(*ps, entropies, [d.adv[i] for i in at], weight, clip, dual, pretrained, kl_type)


def slow_gaussian(d, clip, dual, kl_type="k1"):
    at = range(len(d.action))
    ps = [[density(m, i, d.action) for i in at] for m in (d.mu_sigma_new, d.mu_sigma_old)]
    entropies = [sum((s * math.sqrt(2 * math.pi * math.e)).log() for s in d.mu_sigma_new["sigma"][i]) for i in at]
    pretrained = None if d.logit_pretrained is None else [density(d.logit_pretrained, i, d.action) for i in at]
    return slow_policy(*ps, entropies, d.adv, d.weight, clip, dual, pretrained, kl_type, everywhere=True)


def slow_rows(d, adv, clip, beta=0.):
    "GRPO and RLOO: each row's weighted mean, then the mean of the rows."
    rows, logs, outside = [], [], []
    for b, row in enumerate(d.action):
        terms, weights = [], []
        for t, a in enumerate(row):
            p, q = probability(d.logit_new[b, t], a), probability(d.logit_old[b, t], a)
            kl = slow_kl(p, probability(d.logit_ref[b, t], a), "k3") if beta else 0.
            weights.append(1. if d.weight is None else d.weight[b, t])
            terms.append((beta * kl - slow_surrogate(p / q, adv[b], clip, None)) * weights[-1])
            logs.append(math.log(q.item() / p.item())); outside.append(float(abs(p.item() / q.item() - 1) > clip))
        rows.append(sum(terms) / sum(weights))
    return mean(rows), mean(logs), mean(outside)


def slow_gae(d, gamma, lam):
    "The double sum of the definition: what step k adds to step t, if no trajectory ended between them. Odd: γλ has 24 bits."
    rate = tensor(gamma * lam, dtype=torch.float32).double()
    T, done = len(d.reward), d.done if d.done is not None else torch.zeros(d.reward.shape)
    flag = done if d.traj_flag is None else d.traj_flag
    out = []
    for t in range(T):
        total, factor = 0., 1.
        for k in range(t, T):
            r, end = d.reward[k], 1 - done[k].double()
            if d.value.ndim > d.reward.ndim: r, end = r[..., None], end[..., None]
            total = total + factor * (r + gamma * d.next_value[k] * end - d.value[k])
            stop = flag[k].double()
            factor = factor * rate * (1 - (stop[..., None] if d.value.ndim > d.reward.ndim else stop))
        out.append(total)
    return torch.stack(out)


def slow_rloo(d, log_prob_fn, clip=.2):
    n, queries = len(d.action), d.reward.shape[1] if d.reward.ndim == 2 else 1
    reward, adv = d.reward.flatten(), []
    for b in range(n):  # row b: sample b // queries of query b % queries
        adv.append(reward[b] - mean([reward[o] for o in range(n) if o != b and o % queries == b % queries]))
    return slow_rows(d, adv, clip)


def with_value(policy, d, clip, value_clip):
    loss, *rest = policy
    return loss, slow_values(d.value_new, d.value_old, d.return_, d.weight, clip if value_clip else None), *rest


LOOPS = SimpleNamespace(
    ppo_policy_error=slow_discrete, ppo_policy_error_continuous=slow_gaussian,
    ppo_error=lambda d, clip, value_clip, dual, kl_type="k1": with_value(slow_discrete(d, clip, dual, kl_type=kl_type), d, clip, value_clip),
    ppo_error_continuous=lambda d, clip, value_clip, dual, kl_type="k1": with_value(slow_gaussian(d, clip, dual, kl_type), d, clip, value_clip),
    ppo_value_error=lambda d, clip, value_clip: slow_values(*d, clip if value_clip else None),
    grpo_policy_error=lambda d, log_prob_fn, clip, beta: slow_rows(d, d.adv, clip, beta), rloo_policy_error=slow_rloo, gae=slow_gae,
    calculate_kl_div=None, naive_method=None, efficient_method=None, less_efficient_method=None)


def learnable(*shape, dtype): return torch.randn(*shape, dtype=dtype, requires_grad=True)


def weights(kind, shape, dtype):
    if kind == "float": return torch.rand(shape, dtype=dtype, requires_grad=True)
    if kind == "bool": return (torch.rand(shape) < .6).index_fill(-1, tensor([0]), True)


def discrete(shape, weight, pretrained, dtype, vocab=5, linked=False):
    "linked: the old side is a function of the new, as in DI-engine's own tests, and is not detached."
    make = partial(learnable, dtype=dtype)
    new, v = make(*shape, vocab), make(*shape)
    old = new + .5 * torch.randn_like(new) if linked else make(*shape, vocab)
    v_old = v + .5 * torch.randn_like(v) if linked else make(*shape)
    return ours.ppo_data(new, old, torch.randint(vocab, shape), v, v_old, make(*shape), make(*shape),
                         weights(weight, shape, dtype), make(*shape, vocab) if pretrained else None)


def gaussian(weight, pretrained, dtype, batch=5, dims=2):
    make = partial(learnable, dtype=dtype)
    sigma = lambda: (torch.rand(batch, dims, dtype=dtype) + .8).requires_grad_()
    pair = lambda: {"mu": make(batch, dims), "sigma": sigma()}
    return ours.ppo_data_continuous(pair(), pair(), torch.randn(batch, dims, dtype=dtype), *(make(batch) for _ in range(4)),
                                    weights(weight, (batch,), dtype), pair() if pretrained else None)


def group(weight, dtype, rows=6, time=3, vocab=5):
    make = partial(learnable, dtype=dtype)
    return ours.grpo_policy_data(*(make(rows, time, vocab) for _ in range(3)), torch.randint(vocab, (rows, time)), make(rows),
                                 weights(weight, (rows, time), dtype))


def policy_part(d):
    kind = ours.ppo_policy_data_continuous if isinstance(d.action, torch.Tensor) and isinstance(d[0], dict) else ours.ppo_policy_data
    return kind(d[0], d[1], d.action, d.adv, d.weight, d.logit_pretrained)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
weighted = pytest.mark.parametrize("weight", [None, "float", "bool"])
OPTIONS = [  # ε, value clip, c of the dual clip, estimator of the KL to a pretrained policy
    (.2, True, None, None), (.5, False, 1.3, "k1"), (.2, True, 1.3, "k2"), (0, False, None, "k3"), (.2, True, 5., "k3"), (.3, False, 1.3, None)]


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_pickled_and_only_the_pretrained_is_optional(name):
    kind = getattr(ours, name)
    assert kind.__name__ == name and kind._field_defaults == ({"logit_pretrained": None} if "logit_pretrained" in kind._fields else {})
    one = kind(*range(len(kind._fields)))
    assert pickle.loads(pickle.dumps(one)) == one  # data of workers


def test_names_and_defaults_are_theirs(ding):
    for name in ours.__all__:
        mine, original = getattr(ours, name), getattr(ding, name, None)
        if name in RECORDS and original: assert mine._fields[:len(original._fields)] == original._fields
        elif inspect.isfunction(original):
            p, q = ([(n, getattr(x.default, "__name__", x.default)) for n, x in inspect.signature(f).parameters.items()] for f in (mine, original))
            assert p[:len(q)] == q, name


@pytest.fixture(scope="session")
def ding():
    """The installed originals, from their own files. Their package imports gym, flask and forty others; these files ask for
    nothing but hpc_wrapper, which hands a function back unless a CUDA extension is switched on."""
    spec = importlib.util.find_spec("ding")
    if spec is None: pytest.skip("DI-engine is not installed: `make parity` makes an environment that has it")
    root, found = Path(spec.submodule_search_locations[0]), {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ding", "ding.rl_utils", "ding.hpc_rl"):
            patch.setitem(sys.modules, name, module := ModuleType(name))
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.hpc_wrapper = lambda **_: lambda f: f
        for name in ("ppo", "gae", "grpo", "rloo", "log_prob_utils"):
            if (root / "rl_utils" / f"{name}.py").exists(): found |= vars(importlib.import_module(f"ding.rl_utils.{name}"))
        for name in [n for n in sys.modules if n.startswith("ding.rl_utils.")]: patch.delitem(sys.modules, name)
    return SimpleNamespace(**found)


@pytest.fixture(params=["loops", "DI-engine"])
def theirs(request): return LOOPS if request.param == "loops" else request.getfixturevalue("ding")


def need(theirs, name):
    if not hasattr(theirs, name):
        pytest.skip(f"the DI-engine installed is PyPI's 0.5.3, which has no {name}: `make parity` takes the repository's")


def same(theirs, name, data, *args, dtype, **kwargs):
    "Theirs and ours give the same numbers and gradients; of the fields that the release lacks nothing is said."
    kind = getattr(theirs, type(data).__name__, type(data))
    wanted = getattr(theirs, name)(kind(**{f: getattr(data, f) for f in kind._fields}), *args, **kwargs)
    got = getattr(ours, name)(data, *args, **kwargs)
    if name in RESULTS: assert (type(got[0]), type(got[1])) == RESULTS[name]
    if isinstance(wanted, tuple) and hasattr(wanted[0], "_fields"):
        got = (tuple(getattr(got[0], f) for f in wanted[0]._fields), got[1])
        assert [type(x) for x in flat(wanted)] == [type(x) for x in flat(got)]
    agree(got, wanted, dtype, leaves(*data))


@dtypes
@weighted
@pytest.mark.parametrize("shape", [(6,), (3, 4)], ids=str)
@pytest.mark.parametrize("linked", [False, True])
def test_discrete(theirs, shape, weight, linked, dtype):
    full = hasattr(theirs, "calculate_kl_div")
    for clip, value_clip, dual, kl in OPTIONS:
        d = discrete(shape, weight, kl and full, dtype, linked=linked)
        extra = {"kl_type": kl} if kl and full else {}
        same(theirs, "ppo_error", d, clip, value_clip, dual, dtype=dtype, **extra)
        same(theirs, "ppo_value_error", ours.ppo_value_data(d.value_new, d.value_old, d.return_, d.weight), clip, value_clip, dtype=dtype)
        bonus = [value_clip] if full else []
        same(theirs, "ppo_policy_error", policy_part(d), clip, dual and dual - .9, *bonus, dtype=dtype, **extra)


@dtypes
@weighted
def test_continuous(theirs, weight, dtype):
    full = hasattr(theirs, "calculate_kl_div")
    for clip, value_clip, dual, kl in OPTIONS:
        d = gaussian(weight, kl and full, dtype)
        extra = {"kl_type": kl} if kl and full else {}
        same(theirs, "ppo_error_continuous", d, clip, value_clip, dual, dtype=dtype, **extra)
        same(theirs, "ppo_policy_error_continuous", policy_part(d), clip, dual, dtype=dtype, **extra)


@dtypes
@weighted
@pytest.mark.parametrize("method", METHODS)
def test_groups(theirs, weight, method, dtype):
    need(theirs, "grpo_policy_error")
    g, method = group(weight, dtype), getattr(ours, method)
    for clip, beta in ((.2, .1), (.5, 2.), (0, 0)): same(theirs, "grpo_policy_error", g, method, clip, beta, dtype=dtype)
    for shape in ((3, 2), (2, 3), (6, 1), (6,)):
        d = ours.rloo_policy_data(g.logit_new, g.logit_old, g.action, torch.randn(shape, dtype=dtype), g.weight)
        same(theirs, "rloo_policy_error", d, method, dtype=dtype)


@dtypes
@pytest.mark.parametrize("value, reward", [((7,), (7,)), ((7, 3), (7, 3)), ((7, 3, 2), (7, 3))], ids=str)
def test_gae(theirs, value, reward, dtype):
    for with_done, with_flag, (gamma, lam) in itertools.product([0, 1], [0, 1], [(.99, .97), (.9, 0.), (1, 1)]):
        done = torch.rand(reward) < .3 if with_done else None
        flag = torch.rand(reward) < .5 if with_flag else None
        v, n, r = (learnable(*s, dtype=dtype) for s in (value, value, reward))
        n1, n2 = n * 1, n * 1
        wanted = theirs.gae(getattr(theirs, "gae_data", ours.gae_data)(v, n1, r, done, flag), gamma, lam)
        got = ours.gae(ours.gae_data(v, n2, r, done, flag), gamma, lam)
        assert theirs is LOOPS or got.dtype == wanted.dtype and torch.equal(n1, n2)
        agree(got, wanted, dtype, [v, n, r])


@pytest.mark.parametrize("method", METHODS)
def test_log_prob_fn(method):
    logits, ids = learnable(3, 4, 6, dtype=torch.float64), torch.randint(6, (3, 4))
    slow = torch.stack([probability(logits[i], ids[i]).log() for i in places(ids)]).view(3, 4)
    agree(getattr(ours, method)(logits, ids), slow, torch.float64, [logits])
    agree(getattr(ours, method)(logits[0], ids[0]), slow[0], torch.float64, [logits])
    assert getattr(ours, method)(logits.bfloat16(), ids).dtype == torch.bfloat16


def test_any_log_prob_fn_is_called():
    d, calls = group(None, torch.float64), []
    def halved(logits, index): calls.append(index); return ours.naive_method(logits, index) / 2
    loss, _ = ours.grpo_policy_error(d, log_prob_fn=halved)
    assert len(calls) == 3 and loss != ours.grpo_policy_error(d)[0]


def test_calculate_kl_div():
    ell = tensor([math.log(2), -math.log(3)], dtype=torch.float64)
    for kind, wanted in dict(k1=(math.log(2) - math.log(3)) / 2, k2=(math.log(2)**2 + math.log(3)**2) / 4,
                             k3=((.5 - 1 + math.log(2)) + (3 - 1 - math.log(3))) / 2).items():
        assert ours.calculate_kl_div(ell, kind).item() == pytest.approx(wanted, abs=1e-12)
        assert ours.calculate_kl_div(ell[0], kind).shape == ()
    with pytest.raises(ValueError, match="Unknown kl_type: k4"): ours.calculate_kl_div(ell, "k4")


def two_actions(ratio):
    "Logits of an old policy with ½, ½ and a new one whose first action has `ratio` times that."
    new = torch.stack([ratio / 2, 1 - ratio / 2], -1).log().requires_grad_()
    return new, torch.zeros_like(new)


def normal_of_one(n=1):
    return ({"mu": torch.zeros(n, 1, requires_grad=True), "sigma": torch.ones(n, 1, requires_grad=True)},
            {"mu": torch.zeros(n, 1), "sigma": torch.ones(n, 1)}, torch.full((n, 1), .5))


def test_without_a_pretrained_policy_the_kl_is_a_zero_of_three_kinds():
    z, z_old = two_actions(torch.ones(1).double())
    flat_ = ours.ppo_policy_error(ours.ppo_policy_data(z, z_old, tensor([0]), torch.ones(1).double(), None))[0].kl_div
    new, old, action = normal_of_one()
    whole = ours.ppo_error_continuous(ours.ppo_data_continuous(new, old, action, *torch.zeros(2, 1), torch.ones(1), torch.zeros(1), None))[0].kl_div
    part = ours.ppo_policy_error_continuous(ours.ppo_policy_data_continuous(new, old, action, torch.ones(1), None))[0].kl_div
    assert torch.is_tensor(flat_) and flat_.dtype == torch.float64 and torch.is_tensor(whole) and not whole.requires_grad
    assert type(part) is int and part == whole == flat_ == 0


def test_gae_writes_into_next_value():
    "One step that ends: Â = 1 + .99·0 − 3, and the caller's 5 is gone."
    next_value = tensor([5., 7.])
    adv = ours.gae(ours.gae_data(tensor([3., 0.]), next_value, tensor([1., 0.]), tensor([1., 0.]), None))
    assert next_value.tolist() == [0., 7.] and adv[0].item() == -2. and adv[1].item() == pytest.approx(.99 * 7)
    seen = tensor([1., 2., 3.])  # a view of the values themselves: the value of step 2 is gone before it is subtracted
    adv = ours.gae(ours.gae_data(seen[:-1], seen[1:], torch.zeros(2), tensor([1., 0.]), None), lambda_=0.)
    assert seen.tolist() == [1., 0., 3.] and adv.tolist() == pytest.approx([-1., .99 * 3])


def test_ratios_of_agents_are_averaged_before_the_clip():
    "1.6 and .4 average to 1: within the clip, though each alone is outside. Their entropies are averaged too."
    new, old = two_actions(tensor([[1.6, .4]]))
    losses, info = ours.ppo_policy_error(ours.ppo_policy_data(new, old, torch.zeros(1, 2).long(), torch.ones(1), None))
    assert losses.policy_loss.item() == pytest.approx(-1.) and info.clipfrac == 0
    assert losses.entropy_loss.item() == pytest.approx(-(.8 * math.log(.8) + .2 * math.log(.2)))
    assert info.approx_kl == pytest.approx(-math.log(1.6 * .4) / 2)


@pytest.mark.parametrize("dual", [1., .5, 0, -1.])
def test_who_checks_the_dual_clip(dual):
    new, old, action = normal_of_one()
    z, z_old = two_actions(tensor([1.]))
    one, none = torch.ones(1), torch.zeros(1)
    for refused in (lambda: ours.ppo_error(ours.ppo_data(z, z_old, tensor([0]), none, none, one, none, None), dual_clip=dual),
                    lambda: ours.ppo_error_continuous(ours.ppo_data_continuous(new, old, action, none, none, one, none, None), dual_clip=dual),
                    lambda: ours.ppo_policy_error_continuous(ours.ppo_policy_data_continuous(new, old, action, one, None), dual_clip=dual)):
        with pytest.raises(AssertionError, match="dual_clip value must be greater than 1.0"): refused()
    for adv in (-2., 2.):  # ppo_policy_error takes any: ratio 1, so −max(Â, c·Â) where Â < 0
        loss = ours.ppo_policy_error(ours.ppo_policy_data(z, z_old, tensor([0]), tensor([adv]), None), dual_clip=dual)[0].policy_loss
        assert loss.item() == pytest.approx(-max(adv, dual * adv) if adv < 0 else -adv)


def test_what_people_pass():
    z, z_old = two_actions(tensor([1.1, .9]))
    adv, action, none = tensor([1., -1.]), tensor([0, 1]), torch.zeros(2)
    base = ours.ppo_policy_error(ours.ppo_policy_data(z, z_old, action, adv, None))[0].policy_loss
    same = lambda *data, **k: torch.testing.assert_close(ours.ppo_policy_error(data, **k)[0].policy_loss, base)
    same(z, z_old, action, adv, None)             # a plain tuple, of the release's five fields
    same(z, z_old, action.float(), adv, torch.ones(2).bool())
    same(z, z_old[0], action, adv, None)          # an old policy that is the same in every state
    losses = ours.ppo_error((z, z_old, action, none, none, adv, none, None), 1)[0]  # a whole number
    torch.testing.assert_close(losses.policy_loss, base)
    with pytest.raises(ValueError): ours.ppo_policy_error((z, z_old, tensor([0, 2]), adv, None))  # as Categorical does
    new, old, where = normal_of_one(2)
    ours.ppo_error_continuous(ours.ppo_data(new, old, where, none, none, adv, none, None, None))  # the wrong record, as in their tests


def test_continuous_data_names_the_function_for_it():
    mu = {"mu": torch.zeros(2, 1), "sigma": torch.ones(2, 1)}
    one = torch.zeros(2)
    with pytest.raises(TypeError, match="ppo_error_continuous"):
        ours.ppo_error(ours.ppo_data_continuous(mu, mu, torch.zeros(2, 1), one, one, one, one, None))
    with pytest.raises(TypeError, match="ppo_policy_error_continuous"):
        ours.ppo_policy_error(ours.ppo_policy_data_continuous(mu, mu, torch.zeros(2, 1), one, None))
