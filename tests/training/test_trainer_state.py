"A trainer's state: it goes on as if nothing had happened, and takes nobody else's state."

import copy
import json
import math
import random
from dataclasses import replace

import pytest
import small_trainer
import torch
from deep import first
from states import through_files
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.config import RLHFConfig
from instruct_goose.core.state import flatten, map_tensors
from instruct_goose.models.adapters import module_state
from instruct_goose.models.agent import Agent
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer

WORDS = "abcdefghijklmnop"
TOKENIZER = word_tokenizer(list(WORDS))
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


def model(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(TOKENIZER),
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def trainer(config=CONFIG, reference=None, **options):
    agent = Agent(model(), value_model="copy" if config.advantage == "gae" else None)
    return RLHFTrainer(agent, reference, config, tokenizer=TOKENIZER, **options)


def noisy_reward(texts):
    return [text.count("a") + random.random() + torch.rand(()).item() for text in texts]


def train(trainer, steps=None, seed=None):
    "The metrics of so many iterations, without the clock's."
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)
    log = trainer.train(list(WORDS[:11]), noisy_reward, steps, progress=False)
    return [{k: v for k, v in metrics.items() if "second" not in k} for metrics in log]


def clone(state):
    return copy.deepcopy(map_tensors(torch.Tensor.clone, state))


def same(a, b):
    "Are these nested states equal, to the bit?"
    tensors, record = flatten(a)
    its_tensors, its_record = flatten(b)
    return (
        json.dumps(record) == json.dumps(its_record)
        and tensors.keys() == its_tensors.keys()
        and all(x.dtype == its_tensors[k].dtype for k, x in tensors.items())
        and all(torch.equal(x, its_tensors[k]) for k, x in tensors.items())
    )


@pytest.fixture
def plain(unchecked):
    "Without the shape checker, which draws from Python's generator to choose what it looks at."
    with unchecked():
        yield


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
    metrics = train(whole, seed=3)
    for k in (1, 2, 4):
        stopped = trainer(config)
        head = train(stopped, k, seed=3)
        state = through_files(tmp_path, stopped.state_dict())
        random.seed(99)
        torch.manual_seed(99)
        resumed = trainer(config)
        resumed.load_state_dict(state)
        assert head + train(resumed) == metrics
        assert resumed.iteration == config.steps
        assert resumed.beta == whole.beta
        assert same(module_state(resumed.agent), module_state(whole.agent))


def test_the_state_holds_nothing_else():
    t = trainer()
    state = t.state_dict()
    names = {"trainer", "iteration", "base_lrs", "stop_reason", "environment", "identity", "parts"}
    assert state.keys() == names
    assert state["parts"]["learner"]["moments"] == {}  # before the first update
    train(t, 1)
    assert state["parts"].keys() == t.state_dict()["parts"].keys()
    assert t.state_dict()["parts"]["learner"]["moments"].keys() == {"exp_avg", "exp_avg_sq", "step"}
    plain = {
        name
        for name, value in vars(t).items()
        if isinstance(value, int | float | str | bool) or value is None
    }
    only_while_training = {"held_out", "ends_after"}
    assert plain - only_while_training <= state.keys(), (
        "a new attribute of the trainer that changes must be kept as well"
    )


def test_base_rates_that_were_changed_on_the_way_are_those_of_the_resumed_run(tmp_path, plain):
    stopped = trainer()
    train(stopped, 1, seed=3)
    stopped.schedule.base_lrs = [5e-3, 2e-3]
    train(stopped, 1)
    state = through_files(tmp_path, stopped.state_dict())
    resumed = trainer()
    resumed.load_state_dict(state)
    rates = [[group["lr"] for group in t.optimizer.param_groups] for t in (stopped, resumed)]
    assert rates[0] == rates[1]
    assert train(stopped, 1)[0]["lr"] == train(resumed, 1)[0]["lr"] > CONFIG.lr


def test_what_does_not_belong_is_refused_and_nothing_changes(plain):
    trained = trainer()
    train(trained, 2, seed=3)
    state = trained.state_dict()
    other = trainer(replace(CONFIG, lr=2e-3, clip=0.3))
    before = clone(other.state_dict())
    with pytest.raises(
        ValueError, match=r"other settings: clip was 0.2 and is 0.3; lr was 0.001 and is 0.002"
    ) as e:
        other.load_state_dict(state)
    assert "beta" not in str(e.value)
    assert same(before, other.state_dict())
    with pytest.raises(ValueError, match="reference model is not the one"):
        trainer(reference=model(7)).load_state_dict(state)
    with pytest.raises(ValueError, match="other settings: steps was 5 and is 6"):
        trainer(replace(CONFIG, steps=6)).load_state_dict(state)  # the cosine ends elsewhere
    with torch.no_grad():  # one that moved is another, though its fingerprint is remembered
        next(trained.ref_model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="reference model is not the one"):
        trainer().load_state_dict(trained.state_dict())


def test_a_run_goes_on_with_the_same_stop_tokens_alone():
    state = trainer(stop_token_ids=[3]).state_dict()
    trainer(stop_token_ids=[3]).check_state_dict(state)
    with pytest.raises(ValueError, match=r"eos_ids was \[.*3\] and is"):
        trainer().load_state_dict(state)


def test_an_argument_of_a_trainer_of_ones_own_is_compared_where_it_says_so():
    class Pushes(RLHFTrainer):
        def __init__(self, *args, push=0.1, **options):
            super().__init__(*args, **options)
            self.push = push

        def more_settings(self):
            return super().more_settings() | {"push": self.push}

    def pushes(push):
        return Pushes(model(), None, CONFIG, tokenizer=TOKENIZER, push=push)

    state = pushes(0.1).state_dict()
    pushes(0.1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"push was 0.1 and is 0.2"):
        pushes(0.2).load_state_dict(state)


def test_the_number_of_threads_is_kept():
    before = torch.get_num_threads()
    t = trainer()
    state = clone(t.state_dict())
    state["environment"]["threads"] = before + 1
    try:
        with pytest.warns(UserWarning, match=f"threads was {before + 1} and is {before}"):
            t.load_state_dict(state)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- what is forged


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
    return t, clone(t.state_dict())


def forge(state, path, change):
    "The state with another value at a path; `...` for the value takes the entry away."
    forged = clone(state)
    *parents, name = path.split("/")
    place = forged
    for parent in parents:
        place = place[parent]
    if change is ...:
        del place[name]
    else:
        place[name] = change(place[name]) if callable(change) else change
    return forged


WEIGHT = "parts/learner/model/model.transformer.wte.weight"
MOMENT = "parts/learner/moments/exp_avg/model.transformer.wte.weight"
BEST = "parts/best_policy/weights/transformer.wte.weight"
GENERATORS = "parts/generators"
FORGED = {
    "no numpy": (f"{GENERATORS}/numpy", ..., "numpy is missing"),
    "python's place": (f"{GENERATORS}/python", lambda x: x + 10**6, "malformed"),
    "one generator": (f"{GENERATORS}/sampling", ..., "sampling is missing"),
    "short generator": (f"{GENERATORS}/sampling", lambda x: x[:-1], "sampling is "),
    "NaN weights": (WEIGHT, lambda x: x * math.nan, "is not finite"),
    "weights of float64": (WEIGHT, lambda x: x.double(), "float64"),
    "no weights": ("parts/learner/model", {}, "another model's weights"),
    "a moment short": (MOMENT, lambda x: x[:2], "another optimizer's moments"),
    "best of another": (BEST, lambda x: x[:2], "in a policy that was put aside"),
    "NaN best": (BEST, lambda x: x * math.nan, "finite"),
    "no best": ("parts/best_policy", ..., "best_policy is missing"),
    "no parts": ("parts", {}, "learner is missing"),
    "iteration below": ("iteration", -5, "iteration is -5"),
    "iteration beyond": ("iteration", 6, "iteration is 6"),
    "a base rate short": ("base_lrs", lambda x: x[:1], "one for each group"),
    "base rate below 0": ("base_lrs", [1e-3, -1e-3], "base_lrs is -0.001"),
    "base rates no list": ("base_lrs", 1e-3, "must be list"),
    "beta NaN": ("parts/coefficients/beta", math.nan, "beta is nan"),
    "threads 0": ("environment/threads", 0, "threads is 0"),
    "config other": ("identity/config", {}, "other settings"),
    "no config": ("identity/config", ..., "config"),
    "reference": ("identity/reference", "x", "reference model is not the one"),
    "tokenizer": ("identity/tokenizer", "x", "tokenizer is not the one"),
    "groups": ("parts/learner/groups", [], "groups are not those"),
    "no groups": ("parts/learner/groups", ..., "groups"),
    **{
        f"no {name}": (name, ..., name)
        for name in ("identity", "iteration", "base_lrs", "stop_reason", "parts", "environment")
    },
}


@pytest.mark.parametrize("path, change, says", FORGED.values(), ids=FORGED)
def test_a_forged_state_is_refused_and_nothing_changes(once, path, change, says, unchecked):
    t, state = once
    with unchecked():
        before = clone(t.state_dict())
        with pytest.raises(ValueError, match=says):
            t.load_state_dict(forge(state, path, change))
        assert same(t.state_dict(), before)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, object()], ids=["nan", "inf", "set", "object"]
)
def test_a_callback_whose_state_a_file_cannot_hold_is_named_in_the_first_iteration(value):
    class Odd(Callback):
        def state_dict(self):
            return {"best": value}

        def check_state_dict(self, state):
            pass

        def load_state_dict(self, state):
            pass

    own = small_trainer.trainer(callbacks=[Odd()])
    with pytest.raises(TypeError, match="'callback Odd/best' is .* a checkpoint cannot hold"):
        own.state_dict()


class OwnPart:
    "A part with the state that it is given."

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def check_state_dict(self, state):
        if set(state) != set(self.state):
            raise ValueError("another part's state")

    def load_state_dict(self, state):
        self.state = dict(state)


def with_part(state):
    class Larger(RLHFTrainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.own_part = OwnPart(state)

        def parts(self):
            return super().parts() | {"own_part": self.own_part}

    return small_trainer.trainer(Larger)


def test_a_part_that_a_trainer_adds_is_saved_and_loaded(tmp_path):
    saved = through_files(tmp_path, with_part({"mean.x": torch.ones(2), "n": 3}).state_dict())
    new = with_part({"mean.x": torch.zeros(2), "n": 0})
    new.load_state_dict(saved)
    assert new.own_part.state["mean.x"].tolist() == [1.0, 1.0]
    assert new.own_part.state["n"] == 3


@pytest.mark.parametrize(
    "state, error, says",
    [
        ({"seen": {1, 2}}, TypeError, "'own_part/seen' is .* a checkpoint cannot hold"),
        (
            {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}},
            ValueError,
            "two tensors 'own_part/a/b'",
        ),
    ],
    ids=["set", "two names"],
)
def test_a_part_whose_state_a_file_cannot_hold_is_named_at_once(state, error, says):
    with pytest.raises(error, match=says):
        with_part(state).state_dict()


@pytest.mark.parametrize("lacks", ["state_dict", "check_state_dict", "load_state_dict"])
def test_a_sampler_that_would_not_be_saved_is_refused_when_it_is_given(lacks):
    names = {"state_dict", "check_state_dict", "load_state_dict"} - {lacks}
    methods = {name: lambda self, *_: {} for name in names}
    sampler = type("Half", (), {"__call__": lambda self, queries, n, config, generator: None})
    half = type("Half", (sampler,), methods)()
    says = f"Half would not be saved with the trainer: it lacks {lacks}"
    trainer = small_trainer.trainer()
    with pytest.raises(TypeError, match=says):
        trainer.use_sampler(lambda agent, tokens: half)
    with pytest.raises(TypeError, match=says):
        RLHFTrainer(
            small_trainer.tiny(),
            None,
            trainer.config,
            tokenizer=trainer.tokens.tokenizer,
            sampler=half,
        )
    trainer.use_sampler(lambda agent, tokens: sampler())  # none of the three: nothing to save


@pytest.mark.parametrize("lacks", ["state_dict", "check_state_dict", "load_state_dict"])
def test_a_callback_that_would_not_be_saved_is_refused_before_training(lacks):
    names = {"state_dict", "check_state_dict", "load_state_dict"} - {lacks}
    half = type("Half", (Callback,), {name: lambda self, *args: {} for name in names})
    with pytest.raises(
        TypeError, match=f"Half would not be saved with the trainer: it lacks {lacks}"
    ):
        small_trainer.trainer(callbacks=[half()]).train(
            small_trainer.PROMPTS, small_trainer.reward, steps=1, progress=False
        )


class KeepsWeights:
    "A sampler with weights of its own: it writes down how often it was given the policy."

    def __init__(self, agent, tokens):
        self.policy = PolicySampler(agent, tokens)
        self.given = []

    def __call__(self, queries, n, config, generator):
        return self.policy(queries, n, config, generator)

    def updated(self, model):
        self.given.append(next(model.parameters()).detach().clone())


def test_a_sampler_with_weights_of_its_own_gets_those_that_are_loaded_or_put_back():
    trained = small_trainer.trainer(eval_every=1, keep_best=True, steps=3)
    trained.train(
        small_trainer.PROMPTS,
        small_trainer.reward,
        steps=2,
        held_out=small_trainer.HELD_OUT,
        progress=False,
    )
    second = small_trainer.trainer(eval_every=1, keep_best=True, steps=3)
    sampler = KeepsWeights(second.agent, second.tokens)
    second.use_sampler(lambda agent, tokens: sampler)
    second.load_state_dict(trained.state_dict())
    assert torch.equal(sampler.given[-1], next(trained.agent.model.parameters()))
    second.load_best()
    assert torch.equal(sampler.given[-1], next(second.agent.model.parameters()))
    assert len(sampler.given) == 3  # at use_sampler, after loading, after the best policy
