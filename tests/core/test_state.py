"What a training's state is: nothing is left out, and nothing that does not belong to it is let in."

import json
import random
import string

import hypothesis
import pytest
import safetensors.torch
import torch
from deep import first
from hypothesis import strategies
from small_models import tiny
from tokenizers import normalizers
from torch import nn

from instruct_goose.core.state import (
    STATE_METHODS,
    check_identity,
    check_optimizer,
    check_tensors,
    differences,
    fingerprint_module,
    fingerprint_tokenizer,
    flatten,
    identity_of,
    load_optimizer,
    map_tensors,
    named_tensors,
    optimizer_state,
    random_state,
    require_all_state_methods,
    set_random_state,
    unflatten,
)
from instruct_goose.models.adapters import load_module_state, module_state
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint


def same(a, b):
    "Are these tensors by name equal, in dtype and shape too?"
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and x.shape == b[name].shape and torch.equal(x, b[name])
        for name, x in a.items()
    )


# ---------------------------------------------------------------- nested states and flat files


def test_a_nested_state_becomes_tensors_by_path_and_a_record_that_names_them():
    weight = torch.ones(2)
    step = torch.tensor(3)
    state = {"learner": {"model": {"weight": weight}, "lr": 0.1}, "step": step, "names": ["a", 1]}

    tensors, record = flatten(state)

    assert list(tensors) == ["learner/model/weight", "step"]
    assert tensors["learner/model/weight"] is weight
    assert tensors["step"] is step
    assert record == {
        "learner": {"model": {"weight": {"__tensor__": "learner/model/weight"}}, "lr": 0.1},
        "step": {"__tensor__": "step"},
        "names": ["a", 1],
    }


LEAVES = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.text()
    | strategies.lists(strategies.integers())
    | strategies.floats(allow_nan=False).map(torch.tensor)
)
NAMES = strategies.text(string.ascii_letters + "._ '")


@hypothesis.given(
    strategies.dictionaries(
        NAMES, strategies.recursive(LEAVES, lambda inner: strategies.dictionaries(NAMES, inner))
    )
)
def test_every_state_comes_back_from_its_tensors_and_json(state):
    def plain(value):
        if torch.is_tensor(value):
            return "tensor", value.item()
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return value

    tensors, record = flatten(state)

    assert plain(unflatten(tensors, json.loads(json.dumps(record)))) == plain(state)


@pytest.mark.parametrize(
    "state, error, message",
    [
        ({"a": {1: torch.ones(1)}}, TypeError, "'a/1' has a key that is no text"),
        ({"a": [torch.ones(1)]}, TypeError, "'a' is a list of tensors"),
        ({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, ValueError, "two tensors 'a/b'"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused(state, error, message, unchecked):
    with unchecked(), pytest.raises(error, match=message):
        flatten(state)


def test_a_tensor_that_the_record_names_must_be_there():
    tensors, record = flatten({"a": {"b": torch.ones(1)}})
    with pytest.raises(ValueError, match="the tensor 'a/b' is missing"):
        unflatten({}, record)


def test_a_function_is_mapped_over_the_tensors_and_leaves_the_state_as_it_was():
    state = {"a": {"b": torch.ones(2)}, "n": 1}

    doubled = map_tensors(lambda x: 2 * x, state)

    assert doubled["a"]["b"].tolist() == [2, 2]
    assert doubled["n"] == 1
    assert state["a"]["b"].tolist() == [1, 1]


# ---------------------------------------------------------------- random numbers and weights


def test_every_generator_goes_back_to_its_place():
    numpy = pytest.importorskip("numpy")

    def draw():
        return [
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            numpy.random.rand(2).tolist(),
            numpy.random.randn(),
        ]

    draw()  # leaves half a pair of normal numbers behind, in Python and numpy
    state = random_state()
    drawn = draw()
    assert draw() != drawn
    set_random_state(safetensors.torch.load(safetensors.torch.save(state)))
    assert draw() == drawn


@pytest.mark.parametrize(
    "saved, message",
    [
        ({}, "these are his: w is missing"),
        ({"w": torch.ones(2), "v": torch.ones(1)}, "these are his: v is new"),
        ({"w": torch.ones(3)}, r"w is \(3,\) torch.float32, here \(2,\)"),
        ({"w": torch.ones(2).double()}, r"w is \(2,\) torch.float64, here \(2,\) torch.float32"),
        ({"w": torch.tensor([1.0, torch.inf])}, "w is not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, message):
    with pytest.raises(ValueError, match=message):
        check_tensors({"w": torch.ones(2)}, saved, "his")


def test_what_is_infinite_here_may_be_infinite_there():
    check_tensors({"mask": torch.tensor([-torch.inf])}, {"mask": torch.tensor([-torch.inf])}, "his")


def test_a_tied_weight_has_one_name():
    module = nn.Module()
    module.first = nn.Linear(2, 2, bias=False)
    module.second = nn.Linear(2, 2, bias=False)
    module.second.weight = module.first.weight
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("derived", torch.ones(1), persistent=False)

    assert list(named_tensors(module)) == ["kept", "first.weight"]
    assert named_tensors(module)["first.weight"] is module.first.weight


# ---------------------------------------------------------------- optimizers


def moved(make, module=None):
    "A module and its optimizer after two steps."
    net = module or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = make(list(net.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


OTHERS = {
    "SGD for Adam": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        adamw,
        "optimizer was 'SGD' and is 'AdamW'",
    ),
    "other betas": (
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
        adamw,
        r"betas was \[0.8, 0.9\] and is \[0.9, 0.999\]",
    ),
    "one group for two": (
        adamw,
        lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:]}], lr=0.01),
        "groups are not those",
    ),
    "another model's": (
        adamw,
        lambda p: adamw(list(nn.Linear(2, 2).parameters())),
        "do not belong to the model",
    ),
}


@pytest.mark.parametrize("there, here, says", OTHERS.values(), ids=OTHERS)
def test_another_optimizers_state_is_refused(there, here, says):
    net, optimizer = moved(there)
    state = optimizer_state(optimizer, named_tensors(net))
    with pytest.raises(ValueError, match=says):
        check_optimizer(here(list(net.parameters())), named_tensors(net), *state)


FORGED_MOMENTS = {
    "too short": lambda x: {"exp_avg": {"0.weight": x[:2]}},
    "of another parameter": lambda x: {"exp_avg": {"x": x}},
    "of another kind": lambda x: {"speed": {"0.weight": x}},
    "not finite": lambda x: {"exp_avg": {"0.weight": x / 0}},
}


@pytest.mark.parametrize("forge", FORGED_MOMENTS.values(), ids=FORGED_MOMENTS)
def test_moments_that_do_not_fit_their_parameters_are_refused(forge):
    net, optimizer = moved(adamw)
    moments, groups = optimizer_state(optimizer, named_tensors(net))
    forged = {moment: dict(by_name) for moment, by_name in moments.items()}
    for moment, by_name in forge(moments["exp_avg"]["0.weight"]).items():
        forged.setdefault(moment, {}).update(by_name)
    with pytest.raises(ValueError, match="another optimizer's moments"):
        check_optimizer(optimizer, named_tensors(net), forged, groups)


def test_a_moment_that_is_missing_is_refused():
    net, optimizer = moved(adamw)
    moments, groups = optimizer_state(optimizer, named_tensors(net))
    del moments["exp_avg"]["0.weight"]
    with pytest.raises(ValueError, match="exp_avg of 0.weight is missing"):
        check_optimizer(optimizer, named_tensors(net), moments, groups)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adam(
            [{"params": p[:1], "lr": 0.1, "betas": (0.5, 0.6)}, {"params": p[1:]}], lr=0.01
        ),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        *first(
            0,
            [
                lambda p: torch.optim.NAdam(p),
                lambda p: torch.optim.Adagrad(p),
                lambda p: torch.optim.Rprop(p),
                lambda p: torch.optim.RMSprop(p, lr=0.01),
            ],
        ),
    ],
)
def test_every_optimizer_is_resumed_from_files(make, tmp_path):
    torch.manual_seed(0)
    net, optimizer = moved(make)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    schedule.step()  # wraps step
    moments, groups = optimizer_state(optimizer, named_tensors(net))
    path = save_checkpoint(tmp_path, *flatten({"moments": moments, "groups": groups}))

    torch.manual_seed(0)
    again, empty = moved(make)
    torch.optim.lr_scheduler.ExponentialLR(empty, 0.9)
    load_module_state(again, module_state(net))
    state = unflatten(*load_checkpoint(path))
    check_optimizer(empty, named_tensors(again), state["moments"], state["groups"])
    load_optimizer(empty, state["moments"], state["groups"])

    assert empty.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for module, its_optimizer in ((net, optimizer), (again, empty)):
        its_optimizer.zero_grad()
        module(torch.ones(2, 3) * 3).sum().backward()
        its_optimizer.step()
    assert same(module_state(net), module_state(again))


class MasterWeights(torch.optim.Optimizer):
    "Gradient descent on a float32 copy of the weights; it counts its steps as a number of Python."

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.state[p]
                if not memory:
                    memory.update(master=p.float(), count=0, note=None, total=0.0)
                memory["count"] += 1
                memory["total"] += 0.1
                memory["master"] = memory["master"] - group["lr"] * p.grad.float()
                p.copy_(memory["master"])


def test_an_optimizer_of_ones_own_is_resumed_with_its_dtypes_and_its_numbers_of_python(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(3, 2).bfloat16()
    optimizer = MasterWeights(net.parameters())
    for _ in range(300):  # bfloat16 cannot count to 257
        net.weight.grad = torch.full_like(net.weight, 1e-3)
        net.bias.grad = torch.full_like(net.bias, 1e-3)
        optimizer.step()
    moments, groups = optimizer_state(optimizer, named_tensors(net))
    path = save_checkpoint(tmp_path, *flatten({"moments": moments, "groups": groups}))

    again = nn.Linear(3, 2).bfloat16()
    resumed = MasterWeights(again.parameters())
    state = unflatten(*load_checkpoint(path))
    check_optimizer(resumed, named_tensors(again), state["moments"], state["groups"])
    load_optimizer(resumed, state["moments"], state["groups"])

    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        before = optimizer.state[p]
        after = resumed.state[q]
        assert after["master"].dtype == torch.float32
        assert torch.equal(before["master"], after["master"])
        assert type(after["count"]) is int
        assert (after["count"], after["note"], after["total"]) == (300, None, before["total"])


def test_numbers_of_a_parameter_that_the_optimizer_does_not_move_are_refused():
    net, optimizer = moved(adamw)
    moments, groups = optimizer_state(optimizer, named_tensors(net))
    groups[0]["plain"] = {"x": {"count": 3}}
    with pytest.raises(ValueError, match="parameters that it does not move"):
        check_optimizer(optimizer, named_tensors(net), moments, groups)


# ---------------------------------------------------------------- identities

WORDS = "abcdefghijklmnop"


def test_each_difference_is_said_in_words():
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}) == (
        "b was 2 and is 3; c was 'not there' and is None"
    )
    assert differences({"a": 1}, {"a": 1}) == ""


def test_a_modules_fingerprint_changes_with_its_weights_alone():
    model = tiny()
    before = fingerprint_module(model)

    assert fingerprint_module(tiny()) == before
    assert fingerprint_module(model.train()) == before
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0
    assert fingerprint_module(model) != before


def test_a_fingerprint_of_frozen_weights_ignores_what_learns():
    model = tiny()
    learning, *frozen = model.parameters()
    for p in frozen:
        p.requires_grad_(False)
    before = fingerprint_module(model, frozen=True)
    with torch.no_grad():
        learning += 1.0
    assert fingerprint_module(model, frozen=True) == before


def test_a_tokenizers_fingerprint_is_its_own():
    one, other = word_tokenizer(list(WORDS)), word_tokenizer(list(WORDS))
    assert fingerprint_tokenizer(one) == fingerprint_tokenizer(other)
    one(["a b", "c"], padding=True, truncation=True, max_length=2)  # leaves its settings behind
    assert fingerprint_tokenizer(one) == fingerprint_tokenizer(other)
    other.add_special_tokens({"eos_token": "a"})
    replacing = word_tokenizer(list(WORDS))  # has the same words, and the same special ones
    replacing.backend_tokenizer.normalizer = normalizers.Replace("a", "b")
    reversed_words = word_tokenizer(list(WORDS[::-1]))
    different = {fingerprint_tokenizer(t) for t in (one, other, replacing, reversed_words)}
    assert len(different) == 4


def identity(reference=None, adapters=False, **settings):
    settings = {"lr_schedule": "constant", "steps": 5, "clip": 0.2, "keep": 2} | settings
    return identity_of(settings, tiny(), reference, None, adapters)


def test_settings_that_change_no_number_are_free():
    check_identity(identity(), identity(keep=7))
    check_identity(identity(), identity(steps=9))  # the learning rate is constant


@pytest.mark.parametrize(
    "before, now, message",
    [
        (identity(), identity(clip=0.3), "other settings: clip was 0.2 and is 0.3"),
        (
            identity(lr_schedule="cosine"),
            identity(lr_schedule="cosine", steps=6),
            "steps was 5 and is 6",
        ),
        (identity(reference=tiny(seed=1)), identity(), "reference model is not the one"),
        (identity(adapters=True), identity(), "model under the adapters is not the one"),
        ({}, identity(), "config is missing"),
    ],
)
def test_another_identity_is_refused(before, now, message):
    with pytest.raises(ValueError, match=message):
        check_identity(before, now)


@pytest.mark.parametrize("lacks", [{name} for name in STATE_METHODS] + [{*STATE_METHODS[:2]}])
def test_what_has_some_of_the_three_methods_is_refused_with_those_that_it_lacks(lacks):
    methods = {name: lambda self, *_: None for name in STATE_METHODS if name not in lacks}
    with pytest.raises(TypeError, match="Part would not be saved") as refused:
        require_all_state_methods(type("Part", (), methods)())
    missing = str(refused.value).split("it lacks ")[1].split(". ")[0]
    assert {*missing.split(" and ")} == lacks


@pytest.mark.parametrize("names", [(), STATE_METHODS])
def test_what_has_all_of_them_or_none_is_taken(names):
    require_all_state_methods(type("Part", (), dict.fromkeys(names, lambda self, *_: None))())
