"""DI-engine's names: the numbers, gradients and kinds that DI-engine gave, and the same of DI-engine itself where it is installed; then the oddities, by hand."""

import importlib
import inspect
import math
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from originals import compare, normal
from torch import tensor

import instruct_goose.compat.ding as ours

RECORDS = [n for n in ours.__all__ if hasattr(getattr(ours, n), "_fields")]
METHODS = ["naive_method", "efficient_method", "less_efficient_method"]
OPTIONS = [  # ε, value clip, c of the dual clip, estimator of the KL to a pretrained policy
    (0.2, True, None, None),
    (0.5, False, 1.3, "k1"),
    (0.2, True, 1.3, "k2"),
    (0, False, None, "k3"),
    (0.2, True, 5.0, "k3"),
    (0.3, False, 1.3, None),
]


def calls(library, x):
    "Each option once, with and without weights, one step or several, one agent or several."

    def call(name, record, fields, *args, **options):
        f = getattr(library, name)
        kind = getattr(library, record) if record else None
        return (
            name,
            (lambda *fields: f(kind(*fields) if record else fields, *args, **options)),
            fields,
            {},
        )

    def action(*shape):
        return (10 * x(*shape)).long().abs() % 5

    weights = {
        (6,): [None, x(6).abs(), tensor([1, 0, 1, 1, 0, 1]).bool()],
        (2, 3): [None, x(2, 3).abs(), tensor([[1, 0, 1], [1, 1, 0]]).bool()],
    }
    yield from ppo_calls(call, x, action, weights)
    yield from group_calls(library, call, x, action)


def ppo_calls(call, x, action, weights):
    "PPO's losses of choices and of numbers, together and apart."
    for k, (clip, value_clip, dual, kl) in enumerate(OPTIONS):
        more = {"kl_type": kl} if kl else {}
        for shape, kinds in weights.items():
            new = x(*shape, 5)
            old = x(*shape, 5)
            pretrained = x(*shape, 5) if kl else None
            a = action(*shape)
            v = x(*shape)
            v_old = x(*shape)
            adv = x(*shape)
            returns = x(*shape)
            w = kinds[k % 3]
            yield call(
                "ppo_error",
                "ppo_data",
                (new, old, a, v, v_old, adv, returns, w, pretrained),
                clip,
                value_clip,
                dual,
                **more,
            )
            yield call(
                "ppo_policy_error",
                "ppo_policy_data",
                (new, old, a, adv, w, pretrained),
                clip,
                dual and dual - 0.9,
                value_clip,
                **more,
            )
            yield call(
                "ppo_value_error", "ppo_value_data", (v, v_old, returns, w), clip, value_clip
            )
        new, old, pretrained = ({"mu": x(6, 2), "sigma": x(6, 2).abs() + 0.8} for _ in range(3))
        a = x(6, 2)
        v = x(6)
        v_old = x(6)
        adv = x(6)
        returns = x(6)
        w = weights[6,][(k + 1) % 3]
        pretrained = pretrained if kl else None
        yield call(
            "ppo_error_continuous",
            "ppo_data_continuous",
            (new, old, a, v, v_old, adv, returns, w, pretrained),
            clip,
            value_clip,
            dual,
            **more,
        )
        yield call(
            "ppo_policy_error_continuous",
            "ppo_policy_data_continuous",
            (new, old, a, adv, w, pretrained),
            clip,
            dual,
            **more,
        )


def group_calls(library, call, x, action):
    "The losses of GRPO and RLOO, and what they need."
    for method, w, (clip, beta) in zip(
        METHODS, [None, x(6, 3).abs(), x(6, 3) < 0.5], [(0.2, 0.1), (0.5, 2.0), (0, 0)]
    ):
        log_prob = getattr(library, method)
        yield call(
            "grpo_policy_error",
            "grpo_policy_data",
            (x(6, 3, 5), x(6, 3, 5), x(6, 3, 5), action(6, 3), x(6), w),
            log_prob,
            clip,
            beta,
        )
        for shape in ((3, 2), (2, 3), (6, 1), (6,)):

            def rloo(
                new, old, a, w, reward=x(*shape), log_prob=log_prob
            ):  # a reward has no gradient
                return library.rloo_policy_error(
                    library.rloo_policy_data(new, old, a, reward, w), log_prob
                )

            yield "rloo_policy_error", rloo, (x(6, 3, 5), x(6, 3, 5), action(6, 3), w), {}
        yield method, log_prob, (x(3, 4, 5), action(3, 4)), {}
    for value, reward in ((7,), (7,)), ((7, 3), (7, 3)), ((7, 3, 2), (7, 3)):
        for done, flag, (gamma, lam) in (
            (None, None, (0.99, 0.97)),
            (x(*reward) < -0.5, None, (0.9, 0.0)),
            (x(*reward) < 0, x(*reward) < 0, (1, 1)),
        ):
            yield call(
                "gae", "gae_data", (x(*value), x(*value), x(*reward), done, flag), gamma, lam
            )
    for kind in ("k1", "k2", "k3"):
        yield "calculate_kl_div", library.calculate_kl_div, (x(2, 3), kind), {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_numbers_of_di_engine(dtype):
    compare("DI-engine", calls(ours, normal(0, dtype)), dtype)


@pytest.fixture(scope="session")
def ding():
    """The installed originals, from their own files. Their package imports gym, flask and forty others; these files ask for
    nothing but hpc_wrapper, which hands a function back unless a CUDA extension is switched on."""
    spec = importlib.util.find_spec("ding")
    root = spec and Path(spec.submodule_search_locations[0])
    if not root or not (root / "rl_utils/grpo.py").exists():
        pytest.skip("DI-engine of its repository is not installed: `make parity` takes it")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ding", "ding.rl_utils", "ding.hpc_rl"):
            patch.setitem(sys.modules, name, module := ModuleType(name))
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.hpc_wrapper = lambda **_: lambda f: f
        for name in ("ppo", "gae", "grpo", "rloo", "log_prob_utils"):
            found |= vars(importlib.import_module(f"ding.rl_utils.{name}"))
        for name in [n for n in sys.modules if n.startswith("ding.rl_utils.")]:
            patch.delitem(sys.modules, name)
    return SimpleNamespace(**found)


def test_di_engine_itself(ding):
    compare("DI-engine", calls(ding, normal(0)))


def test_names_and_defaults_are_theirs(ding):
    for name in ours.__all__:
        mine, original = getattr(ours, name), getattr(ding, name, None)
        if name in RECORDS and original:
            assert mine._fields == original._fields
        elif inspect.isfunction(original):
            p, q = (
                [
                    (n, getattr(x.default, "__name__", x.default))
                    for n, x in inspect.signature(f).parameters.items()
                ]
                for f in (mine, original)
            )
            assert p == q, name


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_pickled_and_only_the_pretrained_is_optional(name):
    kind = getattr(ours, name)
    assert kind.__name__ == name and kind._field_defaults == (
        {"logit_pretrained": None} if "logit_pretrained" in kind._fields else {}
    )
    one = kind(*range(len(kind._fields)))
    assert pickle.loads(pickle.dumps(one)) == one  # data of workers


def test_results_are_records():
    z, one = torch.zeros(2, 3), torch.zeros(2)
    losses, info = ours.ppo_error(ours.ppo_data(z, z, one.long(), one, one, one, one, None))
    assert type(losses) is ours.ppo_loss and type(info) is ours.ppo_info
    assert (
        type(ours.ppo_policy_error(ours.ppo_policy_data(z, z, one.long(), one, None))[0])
        is ours.ppo_policy_loss
    )


def test_any_log_prob_fn_is_called():
    z = torch.randn(6, 3, 5)
    calls = []
    d = ours.grpo_policy_data(
        z, z + torch.randn_like(z), z.flip(0), torch.ones(6, 3).long(), torch.randn(6), None
    )

    def halved(logits, index):
        calls.append(index)
        return ours.naive_method(logits, index) / 2

    loss, _ = ours.grpo_policy_error(d, log_prob_fn=halved)
    assert len(calls) == 3 and loss != ours.grpo_policy_error(d)[0]


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="Unknown kl_type: k4"):
        ours.calculate_kl_div(torch.zeros(2), "k4")


def two_actions(ratio):
    "Logits of an old policy with ½, ½ and a new one whose first action has `ratio` times that."
    new = torch.stack([ratio / 2, 1 - ratio / 2], -1).log().requires_grad_()
    return new, torch.zeros_like(new)


def normal_of_one(n=1):
    return (
        {
            "mu": torch.zeros(n, 1, requires_grad=True),
            "sigma": torch.ones(n, 1, requires_grad=True),
        },
        {"mu": torch.zeros(n, 1), "sigma": torch.ones(n, 1)},
        torch.full((n, 1), 0.5),
    )


def test_without_a_pretrained_policy_the_kl_is_a_zero_of_three_kinds():
    z, z_old = two_actions(torch.ones(1).double())
    flat_ = ours.ppo_policy_error(
        ours.ppo_policy_data(z, z_old, tensor([0]), torch.ones(1).double(), None)
    )[0].kl_div
    new, old, action = normal_of_one()
    whole = ours.ppo_error_continuous(
        ours.ppo_data_continuous(
            new, old, action, *torch.zeros(2, 1), torch.ones(1), torch.zeros(1), None
        )
    )[0].kl_div
    part = ours.ppo_policy_error_continuous(
        ours.ppo_policy_data_continuous(new, old, action, torch.ones(1), None)
    )[0].kl_div
    assert (
        torch.is_tensor(flat_)
        and flat_.dtype == torch.float64
        and torch.is_tensor(whole)
        and not whole.requires_grad
    )
    assert type(part) is int and part == whole == flat_ == 0


def test_gae_writes_into_next_value():
    "One step that ends: Â = 1 + .99·0 − 3, and the caller's 5 is gone."
    next_value = tensor([5.0, 7.0])
    adv = ours.gae(
        ours.gae_data(tensor([3.0, 0.0]), next_value, tensor([1.0, 0.0]), tensor([1.0, 0.0]), None)
    )
    assert (
        next_value.tolist() == [0.0, 7.0]
        and adv[0].item() == -2.0
        and adv[1].item() == pytest.approx(0.99 * 7)
    )
    seen = tensor(
        [1.0, 2.0, 3.0]
    )  # a view of the values themselves: the value of step 2 is gone before it is subtracted
    adv = ours.gae(
        ours.gae_data(seen[:-1], seen[1:], torch.zeros(2), tensor([1.0, 0.0]), None), lambda_=0.0
    )
    assert seen.tolist() == [1.0, 0.0, 3.0] and adv.tolist() == pytest.approx([-1.0, 0.99 * 3])


def test_ratios_of_agents_are_averaged_before_the_clip():
    "1.6 and .4 average to 1: within the clip, though each alone is outside. Their entropies are averaged too."
    new, old = two_actions(tensor([[1.6, 0.4]]))
    losses, info = ours.ppo_policy_error(
        ours.ppo_policy_data(new, old, torch.zeros(1, 2).long(), torch.ones(1), None)
    )
    assert losses.policy_loss.item() == pytest.approx(-1.0) and info.clipfrac == 0
    assert losses.entropy_loss.item() == pytest.approx(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)))
    assert info.approx_kl == pytest.approx(-math.log(1.6 * 0.4) / 2)


@pytest.mark.parametrize("dual", [1.0, 0.5, 0, -1.0])
def test_who_checks_the_dual_clip(dual):
    new, old, action = normal_of_one()
    z, z_old = two_actions(tensor([1.0]))
    one = torch.ones(1)
    none = torch.zeros(1)
    for refused in (
        lambda: ours.ppo_error(
            ours.ppo_data(z, z_old, tensor([0]), none, none, one, none, None), dual_clip=dual
        ),
        lambda: ours.ppo_error_continuous(
            ours.ppo_data_continuous(new, old, action, none, none, one, none, None), dual_clip=dual
        ),
        lambda: ours.ppo_policy_error_continuous(
            ours.ppo_policy_data_continuous(new, old, action, one, None), dual_clip=dual
        ),
    ):
        with pytest.raises(AssertionError, match="dual_clip value must be greater than 1.0"):
            refused()
    for adv in (-2.0, 2.0):  # ppo_policy_error takes any: ratio 1, so −max(Â, c·Â) where Â < 0
        loss = ours.ppo_policy_error(
            ours.ppo_policy_data(z, z_old, tensor([0]), tensor([adv]), None), dual_clip=dual
        )[0].policy_loss
        assert loss.item() == pytest.approx(-max(adv, dual * adv) if adv < 0 else -adv)


def test_what_people_pass():
    z, z_old = two_actions(tensor([1.1, 0.9]))
    adv = tensor([1.0, -1.0])
    action = tensor([0, 1])
    none = torch.zeros(2)
    base = ours.ppo_policy_error(ours.ppo_policy_data(z, z_old, action, adv, None))[0].policy_loss

    def same(*data, **k):
        return torch.testing.assert_close(ours.ppo_policy_error(data, **k)[0].policy_loss, base)

    same(z, z_old, action, adv, None)  # a plain tuple, of the release's five fields
    same(z, z_old, action.float(), adv, torch.ones(2).bool())
    same(z, z_old[0], action, adv, None)  # an old policy that is the same in every state
    losses = ours.ppo_error((z, z_old, action, none, none, adv, none, None), 1)[0]  # a whole number
    torch.testing.assert_close(losses.policy_loss, base)
    with pytest.raises(ValueError):
        ours.ppo_policy_error((z, z_old, tensor([0, 2]), adv, None))  # as Categorical does
    new, old, where = normal_of_one(2)
    ours.ppo_error_continuous(
        ours.ppo_data(new, old, where, none, none, adv, none, None, None)
    )  # the wrong record, as in their tests
