"What a training's state is: nothing is left out, and nothing that does not belong to it is let in."

import json
import math
import random
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from deep import first
from tokenizers import normalizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.config import RLHFConfig
from instruct_goose.core.state import (
    check_optimizer,
    fingerprint_tokenizer,
    load_optimizer,
    optimizer_state,
    random_state,
    set_random_state,
)
from instruct_goose.models.adapters import load_module, module_state
from instruct_goose.models.agent import Agent
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint
from instruct_goose.training.trainer import RLHFTrainer


def same(a, b):
    return a.keys() == b.keys() and all(
        x.dtype == b[k].dtype and x.shape == b[k].shape and torch.equal(x, b[k])
        for k, x in a.items()
    )


# ---------------------------------------------------------------- random numbers, weights, moments


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
    first = draw()
    assert draw() != first
    set_random_state(safetensors.torch.load(safetensors.torch.save(state)))
    assert draw() == first


def tiny(seed=0, dropout=0.0, vocab=19):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


# ---------------------------------------------------------------- the trainer

WORDS = "abcdefghijklmnop"
CONFIG = RLHFConfig(
    steps=5,
    batch_size=8,
    group_size=2,
    max_new_tokens=5,
    minibatches=2,
    lr=1e-3,
    lr_schedule="cosine",
    kl_target=0.05,
    beta=0.2,
)
TOKENIZER = word_tokenizer(list(WORDS))


def reward(texts):
    return [
        text.count("a") + random.random() + torch.rand(()).item() for text in texts
    ]  # noisy judges are judges


def trainer(config=CONFIG, reference=None, **options):
    agent = Agent(
        tiny(vocab=len(TOKENIZER)), value_model="copy" if config.advantage == "gae" else None
    )
    return RLHFTrainer(agent, reference, config, tokenizer=TOKENIZER, **options)


@pytest.fixture
def plain(unchecked):
    "Without the shape checker, which draws from Python's generator to choose what it looks at."
    with unchecked():
        yield


def go(t, steps=None, seed=None):
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)
    return [
        {k: v for k, v in m.items() if "second" not in k}
        for m in t.train(list(WORDS[:11]), reward, steps, progress=False)
    ]


def clone(state):
    return {k: x.clone() for k, x in state[0].items()}, json.loads(json.dumps(state[1]))


@pytest.mark.parametrize(
    "changes",
    first(
        1,
        [
            {"advantage": "greedy", "lr_schedule": "linear"},
            {},
            {"advantage": "group_mean_std", "whiten_advantages": False},
        ],
    ),
    ids=["greedy", "gae", "group"],
)
def test_a_trainer_goes_on_as_if_nothing_had_happened(changes, tmp_path, plain):
    config = replace(CONFIG, **changes)
    whole = trainer(config)
    metrics = go(whole, seed=3)
    for k in (1, 2, 4):
        first = trainer(config)
        head = go(first, k, seed=3)
        path = save_checkpoint(tmp_path, *first.state())
        random.seed(99)
        torch.manual_seed(99)
        second = trainer(config)
        second.load_state(*load_checkpoint(path))
        assert head + go(second) == metrics and second.iteration == config.steps
        assert (
            same(module_state(second.agent), module_state(whole.agent))
            and second.beta == whole.beta
        )


def test_the_state_holds_nothing_else():
    parts = {name.split("/")[0] for name in trainer().state()[0]}
    assert parts == {"model", "generator"}  # no moments before the first update
    t = trainer()
    go(t, 1)
    assert {name.split("/")[0] for name in t.state()[0]} == parts | {"optimizer"}
    plain = {
        k for k, v in vars(t).items() if isinstance(v, int | float | str | bool) or v is None
    } - {"fresh", "ent_weight", "pad_id"}
    assert plain <= t.state()[1].keys(), (
        "a new attribute of the trainer that changes must be kept as well"
    )


def test_what_does_not_belong_is_refused_and_nothing_changes(plain):
    first = trainer()
    go(first, 2, seed=3)
    state = first.state()
    other = trainer(replace(CONFIG, lr=2e-3, clip=0.3))
    before = clone(other.state())
    with pytest.raises(
        ValueError, match=r"other settings: clip was 0.2 and is 0.3; lr was 0.001 and is 0.002"
    ) as e:
        other.load_state(*state)
    assert "beta" not in str(e.value)
    assert same(before[0], other.state()[0])
    with pytest.raises(ValueError, match="reference model is not the one"):
        trainer(reference=tiny(7, vocab=len(TOKENIZER))).load_state(*state)
    with pytest.raises(ValueError, match="other settings: steps was 5 and is 6"):
        trainer(replace(CONFIG, steps=6)).load_state(*state)  # the cosine ends elsewhere
    with torch.no_grad():
        next(first.ref_model.parameters()).add_(
            1.0
        )  # one that moved is another, though its fingerprint is remembered
    with pytest.raises(ValueError, match="reference model is not the one"):
        trainer().load_state(*first.state())


def test_the_number_of_threads_is_kept():
    before, t = torch.get_num_threads(), trainer()
    tensors, record = t.state()
    try:
        with pytest.warns(UserWarning, match=f"threads was {before + 1} and is {before}"):
            t.load_state(
                tensors, record | {"environment": record["environment"] | {"threads": before + 1}}
            )
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- what is forged


def moved(make, module=None):
    net = module or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = make(list(net.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


def ADAM(p):
    return torch.optim.AdamW(p, lr=0.01)


OTHERS = {
    "SGD for Adam": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        ADAM,
        "optimizer was 'SGD' and is 'AdamW'",
    ),
    "other betas": (
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
        ADAM,
        r"betas was \[0.8, 0.9\] and is \[0.9, 0.999\]",
    ),
    "one group for two": (
        ADAM,
        lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:]}], lr=0.01),
        "groups are not those",
    ),
    "another model's": (
        ADAM,
        lambda p: ADAM(list(nn.Linear(2, 2).parameters())),
        "do not belong to the model",
    ),
}


@pytest.mark.parametrize("there, here, says", OTHERS.values(), ids=OTHERS)
def test_another_optimizers_state_is_refused(there, here, says):
    net, optimizer = moved(there)
    state = optimizer_state(optimizer, net)
    with pytest.raises(ValueError, match=says):
        check_optimizer(here(list(net.parameters())), net, *state)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
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
def test_every_optimizer_is_resumed(make, tmp_path):
    torch.manual_seed(0)
    net, optimizer = moved(make)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    schedule.step()  # wraps step
    path = save_checkpoint(
        tmp_path, optimizer_state(optimizer, net)[0], {"groups": optimizer_state(optimizer, net)[1]}
    )
    torch.manual_seed(0)
    again, empty = moved(make)
    torch.optim.lr_scheduler.ExponentialLR(empty, 0.9)
    load_module(again, module_state(net))
    state = load_checkpoint(path)[0], load_checkpoint(path)[1]["groups"]
    check_optimizer(empty, again, *state)
    load_optimizer(empty, *state)
    assert empty.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for n, o in ((net, optimizer), (again, empty)):
        o.zero_grad()
        n(torch.ones(2, 3) * 3).sum().backward()
        o.step()
    assert same(module_state(net), module_state(again))


@pytest.fixture(scope="module")
def once():
    "A trainer after two iterations, and its state; tests put everything back."
    from jaxtyping import config as jax

    jax.update("jaxtyping_disable", True)
    t = trainer(replace(CONFIG, eval_every=1, keep_best=True))
    t.train(
        list(WORDS[:11]),
        lambda texts: [text.count("a") for text in texts],
        2,
        progress=False,
        held_out=list(WORDS[11:]),
    )
    jax.update("jaxtyping_disable", False)
    return t, clone(t.state())


def drop(name):
    return lambda t, r: ({k: x for k, x in t.items() if not k.startswith(name)}, r)


def lose(name):
    return lambda t, r: (t, {k: x for k, x in r.items() if k != name})


def put(name, x):
    return lambda t, r: (t | {name: x(t[name]) if callable(x) else x}, r)


def say(**changes):
    return lambda t, r: (t, r | changes)


W, BEST = "model/model.transformer.wte.weight", "best/transformer.wte.weight"
STATES = {
    "no dice": (drop("generator/numpy"), "numpy is missing"),
    "python's place": (put("generator/python", lambda x: x + 10**6), "malformed"),
    "one generator": (drop("generator/sampling"), "sampling is missing"),
    "short generator": (put("generator/sampling", lambda x: x[:-1]), "sampling is "),
    "NaN weights": (put(W, lambda x: x * math.nan), "is not finite"),
    "weights of float64": (put(W, lambda x: x.double()), "float64"),
    "no weights": (drop("model/"), "another model's weights"),
    "a moment short": (
        put("optimizer/exp_avg/model.transformer.wte.weight", lambda x: x[:2]),
        "another optimizer's moments",
    ),
    "best of another": (put(BEST, lambda x: x[:2]), "kept as the best policy"),
    "NaN best": (put(BEST, lambda x: x * math.nan), "finite"),
    "no parts": (say(parts={}), "best is missing"),
    "iteration below": (say(iteration=-5), "iteration is -5"),
    "iteration beyond": (say(iteration=6), "iteration is 6"),
    "beta NaN": (say(beta=math.nan), "beta is nan"),
    "threads 0": (say(environment={"threads": 0}), "threads is 0"),
    "config other": (say(config={}), "other settings"),
    "reference": (say(reference="x"), "reference model is not the one"),
    "tokenizer": (say(tokenizer="x"), "tokenizer is not the one"),
    "groups": (say(groups=[]), "groups are not those"),
    **{
        f"no {name}": (lose(name), name)
        for name in ("config", "iteration", "parts", "groups", "environment")
    },
}


@pytest.mark.parametrize("forge, says", STATES.values(), ids=STATES)
def test_a_forged_state_is_refused_and_nothing_changes(once, forge, says, unchecked):
    t, state = once
    with unchecked():
        before = clone(t.state())
        with pytest.raises(ValueError, match=says):
            t.load_state(*forge(*clone(state)))
        after = t.state()
    assert same(after[0], before[0]) and json.dumps(after[1]) == json.dumps(before[1])


def test_a_tokenizers_fingerprint_is_its_own():
    one, other = word_tokenizer(list(WORDS)), word_tokenizer(list(WORDS))
    assert fingerprint_tokenizer(one) == fingerprint_tokenizer(other)
    one(["a b", "c"], padding=True, truncation=True, max_length=2)  # leaves its settings behind
    assert fingerprint_tokenizer(one) == fingerprint_tokenizer(other)
    other.add_special_tokens({"eos_token": "a"})
    cut = word_tokenizer(list(WORDS))
    cut.backend_tokenizer.normalizer = normalizers.Replace(
        "a", "b"
    )  # the same words, the same special ones
    assert (
        len(
            {fingerprint_tokenizer(t) for t in (one, other, cut, word_tokenizer(list(WORDS[::-1])))}
        )
        == 4
    )
