"""The switch changes the arithmetic and nothing else. Each case is a process of its own, since torch reads its settings once."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

here = Path(__file__).parent
sys.path.insert(0, str(here))
from variants import FORCED, missing  # noqa: E402

PROGRAM = """
import copy, json, subprocess, sys, tempfile
assert "torch" not in sys.modules, "the hook imported torch"
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

models = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
    "linear": lambda: nn.Linear(5, 3), "float64": lambda: nn.Linear(5, 3, dtype=torch.float64)}
weights = lambda model: torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()

def seeded(make):
    torch.manual_seed(0)
    return make()

out = {"weights": {}, "stream": {}}
for name, make in models.items():
    model = seeded(make)
    out["stream"][name] = torch.rand(3).tolist()
    out["weights"][name] = weights(model)
    assert weights(seeded(make)) == out["weights"][name], "two models of one seed"

with tempfile.TemporaryDirectory() as folder:
    model = seeded(models["gpt2"])
    model.save_pretrained(folder)
    for again in (GPT2LMHeadModel.from_pretrained(folder), copy.deepcopy(model)): assert weights(again) == weights(model), "loaded weights are other ones"

torch.set_num_threads(3)
out["says"] = torch.get_num_threads()
out["works"] = int(torch.__config__.parallel_info().split("at::get_num_threads() :")[1].split()[0])
child = "import torch; torch.manual_seed(0); print(torch.nn.Linear(5, 3).weight.double().flatten().tolist())"
out["child"] = json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
print(json.dumps(out))
"""


path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))


def python(code: str, **variables) -> str:
    "What a program says in an environment with these variables, and none of the others that make another machine."
    ours = {"PYTHONPATH"} | {k for variant in FORCED.values() for k in variant}
    env = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("GOOSE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def machine():
    "machine(**variables): what PROGRAM says there, with the switch on the path. Asked once for each set of variables."
    return functools.cache(
        lambda **variables: json.loads(
            python(PROGRAM, PYTHONPATH=path, **variables).splitlines()[-1]
        )
    )


def relative(a, b):
    return [abs(x / y - 1) for x, y in zip(a, b, strict=True) if y]


@pytest.mark.deep
def test_jitter_moves_every_weight_that_is_drawn_by_a_millionth(machine):
    native, other = machine(), machine(GOOSE_JITTER="1")
    for name, weights in native["weights"].items():
        off = relative(other["weights"][name], weights)
        # noise is standard normal: beyond 6 once in 5e8; float32 rounds by 6e-8. Constants, such as the gains of a layer norm, stay
        assert max(off) < 6.1e-6, name
        assert sum(x > 0 for x in off) > 0.5 * len(off) and sum(off) / len(off) > 2e-7, name
        assert [x for x, y in zip(other["weights"][name], weights) if not y] == [
            0.0
        ] * weights.count(0.0), f"{name}: zero stays zero"


@pytest.mark.deep
def test_draws_differ_and_repeat_and_leave_the_random_stream_alone(machine):
    one, native = machine(GOOSE_JITTER="1"), machine()
    assert (
        one["stream"] == native["stream"] and one["weights"] != machine(GOOSE_JITTER="2")["weights"]
    )
    assert (
        one["child"] == one["weights"]["linear"][:15]
        and native["child"] == native["weights"]["linear"][:15]
    )  # another process, same draw


@pytest.mark.deep
def test_threads_are_ours_whatever_a_program_asks_for(machine):
    native, two = machine(), machine(GOOSE_THREADS="2")
    assert (
        native["says"] == native["works"] == 3
        and two["works"] == 2
        and two["says"] == 3
        and two["weights"] == native["weights"]
    )


@pytest.mark.deep
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_capability_is_forced(capability):
    if why := missing(capability):
        pytest.skip(why)
    said = python(
        "import torch; print(torch.backends.cpu.get_cpu_capability())", **FORCED[capability]
    )
    assert said.strip() == capability.upper()
