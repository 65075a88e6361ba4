"""FSDP2 on two CPU processes gives the weights of one process.

Really run: torch's FSDP2 over gloo. Not run: NCCL, GPUs, bfloat16, offloading."""

import copy
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from deep import first
from row_alone import tiny
from safetensors.torch import load_file
from small_trainer import no_clock
from transformers import AutoModelForCausalLM
from two_processes import (
    GRPO,
    PPO,
    PROMPTS,
    apart,
    reward,
    run,
    same_numbers,
    trainer_of,
    weights_of,
)

from instruct_goose.core.processes import in_processes, rank
from instruct_goose.core.state import flatten, map_tensors
from instruct_goose.models.agent import Agent
from instruct_goose.models.sharding import (
    LearnerState,
    accumulate_gradient,
    all_reduce_gradients,
    configs,
    fsdp_requested,
    full_gradients,
    is_sharded,
    load_weights,
    optimized_parameters,
    reshard,
    shard_agent,
    shards_of,
    synchronize,
    transformer_blocks,
    unshard,
    unsharded_copy,
)
from instruct_goose.models.tokens import pad
from instruct_goose.recipes.training import train_in
from instruct_goose.runs import resume as by_time
from instruct_goose.runs.checkpoints import load_checkpoint, newest_checkpoint

root = Path(__file__).parents[2]


def train(preset, settings, out=None, steps=2):
    if out is not None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    trainer = trainer_of(preset, steps=steps, **settings)
    if out is None:
        history = trainer.train(PROMPTS, reward, progress=False)
        return weights_of(trainer), history, None
    with patch.multiple(
        by_time, SHORTEST_SAVE_INTERVAL=1e9, LONGEST_SAVE_INTERVAL=1e9
    ):  # no checkpoint by the clock, however slow this machine is
        summary = train_in(trainer, out, PROMPTS, reward, save_every=None, progress=False)
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["iterations"] == steps and not (out / "checkpoints").exists()
    own = sum(
        p.to_local().numel() for group in trainer.optimizer.param_groups for p in group["params"]
    )
    return (
        {k: p.detach().clone() for k, p in trainer.agent.named_parameters()},
        history,
        (own, len(shards_of(trainer.agent).modules), is_sharded(trainer.agent)),
    )


@pytest.mark.parametrize("preset, settings", first(1, (("ppo", PPO), ("grpo", GRPO))))
def test_two_processes_with_a_shard_each_are_one(preset, settings, tmp_path):
    weights, history, _ = train(preset, settings)
    (one, one_history, (own, parts, sharded)), (two, _, (rest, _, _)) = in_processes(
        2, train, preset, settings, tmp_path / "run", seconds=500
    )
    assert sharded
    assert parts == (6 if preset == "ppo" else 4)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert apart(one, weights) < 1e-9
    everything = sum(
        p.numel() for k, p in one.items() if preset == "ppo" or k.startswith("model.")
    )  # GRPO learns no values
    assert (
        own + rest == everything and max(own, rest) < 0.56 * everything
    )  # a value head of one row cannot be halved
    saved = load_file(tmp_path / "run/policy/model.safetensors")
    assert (
        all(
            torch.equal(saved[k.removeprefix("model.")], one[k])
            for k in one
            if k.startswith("model.") and k.removeprefix("model.") in saved
        )
        and len(saved) > 20
    )
    same_numbers(history, one_history)


# ----------------------------------------------------------- saved as one


def run_in_directory(
    shard, out, steps, preset="ppo", settings=PPO, resume=False, ctrl_c=None, **more
):
    """A run in a directory; process 0 is interrupted while its ctrl_c-th batch is scored.

    The first call is the trial before the run.
    """
    os.environ["ACCELERATE_USE_FSDP"] = str(shard)
    calls = []

    def judge(texts):
        calls.append(1)
        if len(calls) - 1 == ctrl_c and rank() == 0:
            raise KeyboardInterrupt
        return reward(texts)

    trainer = trainer_of(preset, steps=steps, **settings)
    options = {"save_every": 2} | more
    train_in(trainer, out, PROMPTS, judge, resume=resume, progress=False, **options)
    assert is_sharded(trainer.agent) == shard
    return trainer


def run_sharded(*args, **options):
    weights = weights_of(run_in_directory(True, *args, **options))
    assert not any(
        hasattr(x, "to_local") for x in weights.values()
    )  # asked for its state, it stays whole
    return weights


def newest(out):
    return load_checkpoint(newest_checkpoint(out / "checkpoints"))


def logged(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_state(out, other_out):
    """Two runs' newest checkpoints: tensors within 1e-9, generators to the bit, and the record.

    Their logs say the same, but for seconds.
    """
    tensors, record = newest(out)
    others, other = newest(other_out)
    assert list(tensors) == list(others)
    assert sum("/moments/exp_avg" in name for name in tensors) > 40
    for name, x in tensors.items():
        if name.endswith("/generators/python"):
            continue  # transformers draws from Python's generator for names of its own
        assert (x.shape, x.dtype) == (others[name].shape, others[name].dtype)
        if x.is_floating_point():
            torch.testing.assert_close(x, others[name], rtol=0, atol=1e-9, msg=name)
        elif "/moments/" not in name:
            assert x.equal(others[name]), name
    same_numbers(logged(out), logged(other_out))
    stage = dict(record["stages"]["ppo"])
    other_stage = dict(other["stages"]["ppo"])
    assert stage.pop("log")["lines"] == other_stage.pop("log")["lines"]
    assert stage == other_stage
    assert record["progress"] == other["progress"]
    assert record["settings"] == other["settings"]


def go_on_and_refuse_nan(out):
    "Goes on sharded; then is given a state with a weight that is NaN, which changes nothing."
    trainer = run_in_directory(True, out, 4, resume=True)
    state = copy.deepcopy(map_tensors(torch.clone, trainer.state_dict()))
    before = {k: x.to_local().clone() for k, x in shards_of(trainer.agent).parameters.items()}
    weights = state["parts"]["learner"]["model"]
    weights[next(iter(weights))].fill_(float("nan"))
    state["parts"]["coefficients"]["beta"] = 7.0
    with pytest.raises(ValueError, match="is not finite"):
        trainer.load_state_dict(state)
    assert trainer.beta != 7.0
    assert all(
        x.to_local().equal(before[k]) for k, x in shards_of(trainer.agent).parameters.items()
    )
    return weights_of(trainer)


def test_a_sharded_run_is_saved_as_one_and_goes_on_after_ctrl_c(tmp_path):
    one = weights_of(run_in_directory(False, tmp_path / "one", 4))
    with pytest.raises(RuntimeError, match="process 0: KeyboardInterrupt.*process 1: PeerFailed"):
        in_processes(2, run_sharded, tmp_path / "two", 4, ctrl_c=4, save_every=None, seconds=500)
    (saved, _) = newest(tmp_path / "two")
    rescued = load_file(tmp_path / "two/policy/model.safetensors")
    assert newest(tmp_path / "two")[1]["progress"] == ["ppo", 3, 4]
    assert (
        all(x.equal(saved[f"ppo/parts/learner/model/model.{k}"]) for k, x in rescued.items())
        and len(rescued) > 20
    )
    first, second = in_processes(2, go_on_and_refuse_nan, tmp_path / "two", seconds=500)
    assert apart(one, first) < 1e-9 and all(x.equal(second[k]) for k, x in first.items())
    same_state(tmp_path / "one", tmp_path / "two")
    written = AutoModelForCausalLM.from_pretrained(
        tmp_path / "two/policy", dtype=torch.float64
    ).state_dict()
    assert apart(written, {k.removeprefix("model."): x for k, x in first.items()}) == 0


MOVING = GRPO | dict(eval_every=1, keep_best=True, ref_every=2, ref_mixup=0.5)


@pytest.mark.deep
@pytest.mark.parametrize(
    "preset, settings, more", (("ppo", PPO, {}), ("grpo", MOVING, {"held_out": PROMPTS[:2]}))
)
def test_begun_by_one_or_by_two_it_is_one_run(preset, settings, more, tmp_path):
    """Two iterations by the one, two by the other, two by the first again.

    With GRPO a best policy is kept, and the reference follows.
    """
    alone = {
        out: weights_of(run_in_directory(False, tmp_path / out, n, preset, settings, **more))
        for out, n in (("six", 6), ("one first", 2))
    }
    in_processes(2, run_sharded, tmp_path / "two first", 2, preset, settings, seconds=500, **more)
    run_in_directory(False, tmp_path / "two first", 4, preset, settings, resume=True, **more)
    in_processes(
        2,
        run_sharded,
        tmp_path / "one first",
        4,
        preset,
        settings,
        resume=True,
        seconds=500,
        **more,
    )
    last = weights_of(
        run_in_directory(False, tmp_path / "one first", 6, preset, settings, resume=True, **more)
    )
    both, _ = in_processes(
        2,
        run_sharded,
        tmp_path / "two first",
        6,
        preset,
        settings,
        resume=True,
        seconds=500,
        **more,
    )
    again, _ = in_processes(
        2,
        run_sharded,
        tmp_path / "two first",
        6,
        preset,
        settings,
        resume=True,
        seconds=500,
        **more,
    )  # nothing to do
    for weights in (last, both):
        assert apart(alone["six"], weights) < 1e-9
    if preset == "ppo":
        assert apart(both, again) < 1e-9
    for out in ("one first", "two first"):
        same_state(tmp_path / "six", tmp_path / out)


# ----------------------------------------------------------- LearnerState


def test_full_gradients_are_the_parameters_own_and_zero_where_there_is_none():
    layer = torch.nn.Linear(2, 1)
    (3 * layer.weight).sum().backward()
    weight, bias = full_gradients(layer, [layer.weight, layer.bias])
    assert weight.equal(torch.full((1, 2), 3.0))
    assert bias.equal(torch.zeros(1))


def a_learner(steps, make_optimizer=torch.optim.AdamW):
    "A linear map and its optimizer, after some steps."
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(3)).square().sum().backward()
        optimizer.step()
    return LearnerState(module, optimizer)


def copied_state(learner):
    return map_tensors(torch.clone, learner.state_dict())


def require_same(state, other):
    tensors, record = flatten(state)
    others, other_record = flatten(other)
    assert record == other_record
    assert tensors.keys() == others.keys()
    assert all(x.equal(others[name]) for name, x in tensors.items())


def test_a_learner_that_is_given_a_state_has_this_state():
    state = copied_state(a_learner(steps=3))
    learner = a_learner(steps=1)
    learner.check_state_dict(state)
    learner.load_state_dict(state)
    require_same(copied_state(learner), state)


def test_a_state_from_before_the_first_step_takes_the_moments_away():
    unbegun = copied_state(a_learner(steps=0))
    assert unbegun["moments"] == {}
    learner = a_learner(steps=2)
    learner.load_state_dict(unbegun)
    require_same(copied_state(learner), unbegun)


def with_nan(state):
    state["model"]["weight"][0, 0] = float("nan")


def without_bias(state):
    del state["model"]["bias"]


def with_a_moment_of_another_shape(state):
    state["moments"]["exp_avg"]["weight"] = torch.zeros(5)


def with_another_decay(state):
    state["groups"][0]["settings"]["weight_decay"] = 0.5


def without_groups(state):
    del state["groups"]


REFUSED_STATES = {
    with_nan: "weight is not finite",
    without_bias: "another model's weights: bias is missing",
    with_a_moment_of_another_shape: "another optimizer's moments: exp_avg of weight",
    with_another_decay: "weight_decay was 0.5 and is 0.01",
    without_groups: "groups",
}


@pytest.mark.parametrize("forge, says", REFUSED_STATES.items())
def test_a_learner_refuses_another_ones_state_and_stays_as_it_is(forge, says):
    learner = a_learner(steps=2)
    before = copied_state(learner)
    forged = copy.deepcopy(before)
    forge(forged)
    with pytest.raises(ValueError, match=says):
        learner.check_state_dict(forged)
    require_same(copied_state(learner), before)


def test_a_learner_refuses_an_optimizer_of_other_weights():
    other = torch.nn.Linear(3, 2)
    learner = LearnerState(other, a_learner(steps=1).optimizer)
    with pytest.raises(ValueError, match="do not belong to the model"):
        learner.state_dict()


def sharded_learner(make_optimizer=None):
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    trainer = trainer_of("ppo", steps=2, **PPO)
    optimizer = trainer.optimizer
    if make_optimizer is not None:
        optimizer = make_optimizer(shards_of(trainer.agent).parameters.values())
    return LearnerState(trainer.agent, optimizer)


def states_of_a_learner_before_its_first_step():
    learner = sharded_learner()
    first = copied_state(learner)
    second = copied_state(learner)
    return first["moments"], second["moments"], len(learner.optimizer.state)


def test_reading_the_state_of_sharded_weights_takes_no_step():
    "torch.distributed.checkpoint's get_optimizer_state_dict does: Adam's step would be 1."
    read = in_processes(2, states_of_a_learner_before_its_first_step, seconds=300)
    assert read == [({}, {}, 0)] * 2


def load_whole_moments():
    "Gives a sharded learner moments of ones, then none; returns what it has."
    learner = sharded_learner()
    unbegun = copied_state(learner)
    shards = shards_of(learner.module).parameters
    ones = {name: torch.ones(shard.shape, dtype=shard.dtype) for name, shard in shards.items()}
    steps = {name: torch.tensor(3.0) for name in shards}
    moments = {"step": steps, "exp_avg": ones, "exp_avg_sq": dict(ones)}
    groups = copy.deepcopy(unbegun["groups"])
    for group in groups:
        group["params"] = {name: sorted(moments) for name in group["params"]}
    state = unbegun | {"moments": moments, "groups": groups}
    learner.check_state_dict(state)
    learner.load_state_dict(state)
    held = sum(x["exp_avg"].to_local().numel() for x in learner.optimizer.state.values())
    require_same(copied_state(learner), state)
    learner.load_state_dict(unbegun)
    require_same(copied_state(learner), unbegun)
    return held, sum(x.numel() for x in ones.values())


def test_each_process_keeps_its_shards_of_whole_moments():
    (first, whole), (second, _) = in_processes(2, load_whole_moments, seconds=300)
    assert first + second == whole
    assert max(first, second) < 0.56 * whole  # a value head of one row cannot be halved


class MeanGradient(torch.optim.SGD):
    "An optimizer that remembers a number per column of each weight."

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["columns"] = torch.zeros(p.shape[-1] + 1)


def save_moments_per_column():
    learner = sharded_learner(MeanGradient)
    learner.optimizer.step()
    learner.state_dict()


def test_sharded_moments_of_another_shape_than_the_weights_are_refused():
    with pytest.raises(RuntimeError, match="process 0: ValueError: .* optimizer cannot be saved"):
        in_processes(2, save_moments_per_column, seconds=300)


# ----------------------------------------------------------- piece by piece


def gradients_of_three_parameters():
    "Process 0 has no gradient of the second, no process one of the third; the last stands still."
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parameters[3].requires_grad_(False)
    for p in (parameters[0], parameters[3]):
        p.grad = torch.full((2,), rank() + 1.0)
    if rank() == 1:
        parameters[1].grad = torch.full((2,), 5.0)
    all_reduce_gradients(parameters)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_gradients_are_added_up_over_the_processes_that_have_one():
    together = [[3.0, 3.0], [5.0, 5.0], None]
    assert in_processes(2, gradients_of_three_parameters) == [
        [*together, [1.0, 1.0]],
        [*together, [2.0, 2.0]],
    ]
    assert gradients_of_three_parameters() == [[1.0, 1.0], None, None, [1.0, 1.0]]


TEXTS = [([1, 5, 7], [8, 2]), ([1], [2, 11, 3]), ([4, 2], [7])]


def gradient_of_texts(shard, of_process):
    "The gradient of three texts, of which each process has some, and what was traced."
    os.environ["ACCELERATE_USE_FSDP"] = str(shard)
    agent = Agent(tiny("gpt2"), "copy")
    torch.nn.init.ones_(agent.value_head.weight)
    agent = shard_agent(agent)
    assert is_sharded(agent) == shard

    def evaluate(i):
        query, response = TEXTS[i]
        return agent.evaluate(*pad([query], 0), *pad([response], 0), with_entropy=False)

    def backward(i):
        found = evaluate(i)
        ((i + 1) * (found.logprobs.sum() + found.values.square().sum())).backward()
        return f"text {i}"

    traces = accumulate_gradient(agent, backward, evaluate, of_process[rank()])
    parameters = list(agent.parameters())
    names = [name for name, _ in agent.named_parameters()]
    owners = optimized_parameters(agent, parameters)
    assert shard or all(p is owner for p, owner in zip(parameters, owners, strict=True))
    return traces, dict(zip(names, full_gradients(agent, parameters), strict=True))


@pytest.mark.parametrize("shard, of_process", [(False, ([0, 1], [2])), (True, ([], [0, 1, 2]))])
def test_a_gradient_is_the_sum_over_the_texts_of_all_processes(shard, of_process):
    traces, alone = gradient_of_texts(False, ([0, 1, 2],))
    assert traces == ["text 0", "text 1", "text 2"]
    assert max(g.abs().max() for g in alone.values()) > 1
    for traces, gradient in in_processes(2, gradient_of_texts, shard, of_process, seconds=300):
        assert traces == ["text 0", "text 1", "text 2"]
        assert apart(gradient, alone) < 1e-9


def weights_while_sharded():
    "The parts of this process, and whether the weights are whole after each call."
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plain = Agent(tiny("gpt2", seed=rank()), "copy")
    first = {name: p.detach().clone() for name, p in plain.named_parameters()}
    agent = shard_agent(plain)
    sizes = []
    for change in (None, unshard, reshard, unshard):
        if change is not None:
            change(agent)
        sizes.append(sum(p.numel() for p in map(local, agent.parameters())))
    held = {name: local(p).clone() for name, p in shards_of(agent).parameters.items()}
    doubled = {name: 2 * p.detach() for name, p in agent.named_parameters()}
    load_weights(agent, doubled)
    twin = unsharded_copy(agent)
    assert not is_sharded(twin) and twin.value_model is not None
    now = {name: p.detach().clone() for name, p in twin.named_parameters()}
    moved = all(local(p).equal(2 * held[k]) for k, p in shards_of(agent).parameters.items())
    return sizes, first, now, moved


def local(p):
    return p.to_local() if hasattr(p, "to_local") else p


def test_weights_are_in_parts_or_whole_and_the_parts_follow_what_is_written():
    (sizes, first, now, moved), (other_sizes, other_first, other_now, other_moved) = in_processes(
        2, weights_while_sharded, seconds=300
    )
    whole = sum(p.numel() for p in first.values())
    for after in (0, 2):  # sharded at the start, and again
        assert sizes[after] + other_sizes[after] == whole
        assert max(sizes[after], other_sizes[after]) < 0.56 * whole
    for after in (1, 3):
        assert sizes[after] == other_sizes[after] == whole
    assert not all(first[name].equal(other_first[name]) for name in first)
    for name, p in now.items():  # all begin with the weights of the main one
        assert p.equal(2 * first[name]) and p.equal(other_now[name])
    assert moved and other_moved


@pytest.mark.parametrize("value_model, blocks", [(None, 2), ("copy", 4)])
def test_the_blocks_are_the_members_of_lists_of_several_modules(value_model, blocks):
    agent = Agent(tiny("gpt2"), value_model)
    found = list(transformer_blocks(agent))
    assert found[:2] == [*agent.model.transformer.h] and len(found) == blocks
    del agent.model.transformer.h[1]
    assert len(list(transformer_blocks(agent))) == blocks - 2


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_an_agent_of_other_weights_is_copied_and_one_that_is_whole_is_itself(value_model):
    agent = Agent(tiny("gpt2"), value_model)
    assert unsharded_copy(agent) is agent
    agent.model.generation_config.temperature = 0.25
    weights = {name: p.detach() + 1 for name, p in agent.named_parameters()}
    before = torch.get_rng_state()
    twin = unsharded_copy(agent, weights)
    assert torch.equal(torch.get_rng_state(), before)
    assert twin.model.generation_config.temperature == 0.25
    named = dict(twin.named_parameters())
    assert named.keys() == weights.keys()
    assert all(p.equal(weights[name]) for name, p in named.items())
    assert (twin.value_model is None) == (value_model is None)


def test_weights_of_another_model_are_refused_and_nothing_is_written():
    agent = Agent(tiny("gpt2"))
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    load_weights(agent, {name: x + 1 for name, x in before.items()})
    assert all(p.equal(before[name] + 1) for name, p in agent.named_parameters())
    with pytest.raises(ValueError, match="another model's weights"):
        load_weights(agent, {name: x[:1] for name, x in before.items()})
    assert all(p.equal(before[name] + 1) for name, p in agent.named_parameters())


def begun_together(settings, with_reference=True):
    "The first weight of agent and reference, which differ between processes before."
    agent = Agent(tiny("gpt2", seed=rank()))
    reference = tiny("gpt2", seed=5 + rank()) if with_reference else None
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    synchronize(settings[rank()], agent, reference, optimizer)
    models = [agent.model, reference] if with_reference else [agent.model]
    return [model.transformer.wte.weight.detach() for model in models]


def test_processes_begin_with_the_weights_of_the_main_one_and_with_the_same_settings():
    alone = begun_together([{"lr": 1}])
    together = in_processes(2, begun_together, [{"lr": 1}] * 2)
    for found in together:
        assert all(x.equal(y) for x, y in zip(found, alone, strict=True))
    [[first], [second]] = in_processes(2, begun_together, [{"lr": 1}] * 2, with_reference=False)
    assert first.equal(second)
    with pytest.raises(RuntimeError, match="the settings"):
        in_processes(2, begun_together, [{"lr": 1}, {"lr": 2}])


# ----------------------------------------------------------- DeepSpeed, and configurations


@pytest.mark.parametrize(
    "value, asks", [("true", True), ("True", True), ("TRUE", True), ("false", False), ("1", False)]
)
def test_fsdp_is_asked_for_as_accelerate_writes_it(value, asks, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", value)
    assert fsdp_requested() is asks
    agent = Agent(tiny("gpt2"))
    assert shard_agent(agent) is agent and not is_sharded(agent)  # one process needs no shards


def test_deepspeed_is_refused_by_name(monkeypatch):
    assert fsdp_requested() is False
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="does not run under DeepSpeed.*fsdp.yaml"):
        fsdp_requested()


@pytest.mark.parametrize(
    "name, kind",
    (
        ("data_parallel", "MULTI_GPU"),
        ("fsdp", "FSDP"),
        ("zero2", "DEEPSPEED"),
        ("zero3", "DEEPSPEED"),
    ),
)
def test_accelerate_reads_the_configurations(name, kind):
    "Its own parser, which go_on_and_refuse_nan keys that it does not know. Nothing is launched."
    config = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file(
        str(configs() / f"{name}.yaml")
    )
    assert config.distributed_type == kind and config.num_processes == 8
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2


# ------------------------------------------------------- whole weights in each of two processes

DATA_PARALLEL = {
    "ppo": ("ppo", PPO | dict(eval_every=4), 10, torch.float64),
    "grpo in float32": ("grpo", GRPO, 10, torch.float32),
    "dapo, whole responses only": ("dapo", GRPO | dict(mask_truncated=True), 2, torch.float64),
    "remax, two of three rows": (
        "remax",
        dict(batch_size=3, minibatches=3, epochs=1),
        2,
        torch.float64,
    ),
}


@pytest.mark.parametrize("name", first(2, DATA_PARALLEL))
def test_two_processes_that_share_the_rows_are_one(name):
    preset, settings, steps, dtype = DATA_PARALLEL[name]
    held_out = dict(held_out=PROMPTS[:3]) if "eval_every" in settings else {}
    weights, texts, history = run(preset, settings, steps, dtype, **held_out)
    (one, one_texts, one_history), (two, two_texts, two_history) = in_processes(
        2, run, preset, settings, steps, dtype, seconds=500, **held_out
    )
    assert all(torch.equal(one[name], two[name]) for name in one)  # to the bit
    assert apart(weights, one) < (1e-5 if dtype is torch.float32 else 1e-9)
    assert texts == one_texts == two_texts  # the random numbers belong to rows, not processes
    if dtype is torch.float64:
        same_numbers(history, one_history)
    assert no_clock(one_history) == no_clock(two_history)
