"""Two processes give what one gives: weights, texts, metrics, files. They are forked here, meet over gloo, and are really two.

The oracle is the same trainer in one process, whose arithmetic other files check against equations. Seven prompts of seven responses, or three groups
of three: no share divides evenly."""
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from small_models import tiny

from instruct_goose import Agent, RLHFConfig, RLHFTrainer
from instruct_goose.distributed.data_parallel import ShardDice, by_rows
from instruct_goose.distributed.fsdp import configs
from instruct_goose.distributed.processes import (
    agree,
    all_sum,
    by_first,
    count,
    from_first,
    in_processes,
    is_first,
    join,
    place,
    same_weights,
    share,
    together,
)
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.checkpoints import checkpoints
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.rollout import Rollout
from instruct_goose.training.sampling import joined

PROMPTS = ["the film", "a plot is", "the", "is good film the", "bad"]
PPO = dict(batch_size=7, minibatches=2, epochs=2)
GRPO = dict(batch_size=9, group_size=3, minibatches=2, micro_batch_size=2)
CASES = {"ppo": ("ppo", PPO | dict(eval_every=4), 10, torch.float64), "grpo in float32": ("grpo", GRPO, 10, torch.float32),
         "dapo, whole responses only": ("dapo", GRPO | dict(mask_truncated=True), 2, torch.float64),
         "remax, two of three rows": ("remax", dict(batch_size=3, minibatches=3, epochs=1), 2, torch.float64)}


def words():
    return word_tokenizer("the a film plot is good bad".split(), model_max_length=12, pad="<end>", bos="<end>", eos="<end>")


def reward(texts): return [t.split().count("good") - t.split().count("bad") + .1 * len(t.split()) for t in texts]
def halves(completion_ids): return [[.5] * len(ids) if len(ids) % 2 else 1. for ids in completion_ids]


class Texts(Callback):
    def __init__(self): self.seen = []
    def on_score(self, trainer, rollout): self.seen.append(list(rollout.texts))


def trainer_of(preset="ppo", dtype=torch.float64, sampler=None, **settings):
    # GPT-2's key biases have a gradient of exactly 0, which in float32 is rounding, and which Adam makes as large as any
    model = tiny("llama" if dtype is torch.float32 else "gpt2").to(dtype)
    if place() == 1:  # another start: the first process's is what counts
        for p in model.parameters(): p.data.add_(1.)
    config = RLHFConfig.preset(preset, max_new_tokens=5, seed=3, device="cpu", **dict(lr=1e-3) | settings)
    agent = Agent(model, value_model="copy" if preset == "ppo" else None)
    return RLHFTrainer(agent, config=config, tokenizer=words(), sampler=sampler)


def run(preset, settings, steps=10, dtype=torch.float64, reward_fn=(reward, halves), **more):
    trainer, texts = trainer_of(preset, dtype, steps=steps, **settings), Texts()
    trainer.callbacks.append(texts)
    history = trainer.train(PROMPTS, list(reward_fn), progress=False, **more)
    return weights_of(trainer), texts.seen, history


def weights_of(trainer): return {k: x.detach().clone() for k, x in trainer.agent.state_dict().items()}
def apart(a, b): return max((a[k] - b[k]).abs().max().item() for k in a)


def same_numbers(a, b, rel=1e-6):
    "Metrics; but for seconds, and the share of weights that moved at all, which counts rounding where the gradient is 0."
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            if "second" in name or name == "weights_moved": continue
            assert x[name] == y[name] or x[name] == pytest.approx(y[name], rel=rel, abs=rel / 100), name


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name):
    preset, settings, steps, dtype = CASES[name]
    held = dict(held_out=PROMPTS[:3]) if "eval_every" in settings else {}
    weights, texts, history = run(preset, settings, steps, dtype, **held)
    (one, one_texts, one_history), (two, two_texts, two_history) = in_processes(2, run, preset, settings, steps, dtype, seconds=500, **held)
    assert all(torch.equal(one[k], two[k]) for k in one)    # the two agree to the bit
    assert apart(weights, one) < (1e-5 if dtype is torch.float32 else 1e-9)
    assert texts == one_texts == two_texts                  # the dice fell the same way
    if dtype is torch.float64: same_numbers(history, one_history)
    assert one_history == two_history                       # and the seconds are the slower one's


# ----------------------------------------------------------- a sampler that has dice of its own

class OwnDice:
    "Another program's sampler: it takes the generator as it is, so its texts depend on who asks."
    told = 0
    def updated(self, model): self.told += 1
    def __call__(self, queries, n, config, generator):
        ids, mask = (x.repeat_interleave(n, 0) for x in queries)
        width = int(torch.randint(2, 6, (), generator=generator))
        return Rollout(ids, mask, torch.randint(1, 9, (len(ids), width), generator=generator), torch.ones(len(ids), width).bool())


class Recorded:
    "The same rollouts again."
    def __init__(self, rollouts): self.rollouts, self.next = rollouts, -1
    def __call__(self, queries, n, config, generator):
        self.next += 1
        return self.rollouts[self.next]


class Keep(Callback):
    def __init__(self): self.rollouts = []
    def on_rollout(self, trainer, r): self.rollouts.append(Rollout(r.query_ids, r.query_mask, r.response_ids, r.mask))


def run_with(sampler, preset, settings, steps=3):
    trainer, keep = trainer_of(preset, sampler=sampler, steps=steps, **settings), Keep()
    trainer.callbacks.append(keep)
    trainer.train(PROMPTS, [reward], progress=False)
    return weights_of(trainer), keep.rollouts, getattr(sampler, "told", None)


def test_given_the_same_rollouts_any_sampler_trains_alike():
    (two, rollouts, told), other = in_processes(2, lambda: run_with(OwnDice(), "grpo", GRPO), seconds=500)
    assert all(torch.equal(two[k], other[0][k]) for k in two) and told == 3
    assert len({r.mask.shape[1] for r in rollouts}) > 1 and not torch.equal(rollouts[0].response_ids, rollouts[1].response_ids)
    assert apart(run_with(Recorded(rollouts), "grpo", GRPO)[0], two) < 1e-9


def noting(texts, log_metric, log_extra):
    log_metric("rows", len(texts))
    if texts[0].startswith(PROMPTS[0]): log_extra("words of the first", [len(t.split()) for t in texts])
    log_extra("words", [len(t.split()) for t in texts])
    return [0.] * len(texts)


def note():
    t = trainer_of(**PPO)
    r = t.score(t.rollout((PROMPTS * 2)[:7]), noting)
    return r.logged, r.extra, r.texts, share(7).stop


def test_what_a_reward_notes_is_put_together_in_every_process():
    "Three or four rows each: the mean of the calls is 3.5."
    both = in_processes(2, note)
    first = both[0][3]
    for logged, extra, texts, _ in both:
        words = [len(t.split()) for t in texts]
        assert logged == {"rows": 3.5} and extra == {"words of the first": words[:first] + [None] * (7 - first), "words": words}


def test_dice_are_thrown_for_all_rows_and_catch_up():
    def one(): return torch.Generator().manual_seed(7)
    want = torch.stack([torch.rand(5, dtype=torch.float64, generator=(g := one()))] + [torch.rand(5, dtype=torch.float64, generator=g) for _ in range(2)])
    left, right = one(), one()
    a, b = ShardDice(left, 5, slice(0, 2)), ShardDice(right, 5, slice(2, 5))
    assert torch.equal(torch.stack([a.throw(2) for _ in range(3)]), want[:, :2]) and torch.equal(b.throw(3), want[0, 2:])
    a.catch_up(3); b.catch_up(3)
    assert torch.equal(left.get_state(), right.get_state()) and not torch.equal(left.get_state(), one().get_state())
    c = ShardDice(left, 5, slice(0, 2)); before = left.get_state().clone(); torch.rand(3, generator=c)
    assert torch.equal(left.get_state(), before)
    c.catch_up(0)  # it was used as a plain generator: the next one must be another
    assert not torch.equal(torch.rand(3, generator=ShardDice(left, 5, slice(0, 2))), torch.rand(3, generator=ShardDice(right, 5, slice(0, 2))))


# ----------------------------------------------------------- the primitives

def primitives():
    k = place()
    shares = [list(range(n))[share(n)] for n in (5, 1, 0)] + [list(range(7))[share(7, 3)]]
    x, y, z = torch.full((3,), 1. + k), torch.full((2, 2), 10. * k, dtype=torch.float64), torch.ones(4)
    all_sum([x, y, z], most=4)
    column = by_rows(lambda r, offset: {"s": r.mask.sum(-1) + offset, "none": None, "some": r.mask.double() if k == 0 else None}, rollout(5), 10)
    torch.manual_seed(k); net = torch.nn.Linear(2, 1); same_weights(net)
    seen = []
    by_first(lambda: seen.append(k))
    try: agree("the settings", k, "start again")
    except ValueError as e: said = str(e)
    return shares, (x, y, z), column, net.weight, (seen, is_first(), count(), from_first(lambda: k)), said, together(lambda: k * 2)


def rollout(n):
    mask = torch.arange(4) < torch.arange(1, n + 1).clamp(max=4)[:, None]
    return Rollout(torch.zeros(n, 2).long(), torch.ones(n, 2).bool(), mask.long(), mask)


def test_primitives():
    (shares, sums, column, weight, firsts, said, twice), other = in_processes(2, primitives)
    assert shares == [[0, 1], [], [], [0, 1, 2]] and other[0] == [[2, 3, 4], [0], [], [3, 4, 5, 6]]
    assert [x.flatten()[0].item() for x in sums] == [3., 10., 2.] and [x.dtype for x in sums] == [torch.float32, torch.float64, torch.float32]
    assert column["s"].tolist() == [11, 12, 13, 14, 14] and column["none"] is None and column["some"].sum(-1).tolist() == [1, 2, 0, 0, 0]
    assert torch.equal(weight, other[3]) and firsts == ([0], True, 2, 0) and other[4] == ([], False, 2, 0) and twice == [0, 2]
    assert "the settings differ between process 0 and process 1: start again" == said


def test_alone_nothing_is_sent():
    x = torch.ones(2)
    all_sum([x])
    assert (x.tolist(), count(), place(), is_first(), together(lambda: 3), from_first(lambda: 4), list(range(5))[share(5)]) == ([1, 1], 1, 0, True, [3], 4, [0, 1, 2, 3, 4])
    join()


def test_rollouts_are_joined_at_their_padding():
    a, b = rollout(1), rollout(2)
    a.response_ids, a.mask = a.response_ids[:, :1], a.mask[:, :1]
    b.query_ids, b.query_mask = torch.tensor([[5, 6, 7]] * 2), torch.ones(2, 3).bool()
    a.texts, b.texts, a.columns, b.columns = ["x"], ["y", "z"], {"n": [1]}, {"n": [2, 3]}
    r = joined([a, b], pad_id=8)
    assert r.query_mask.tolist() == [[False, True, True]] + [[True] * 3] * 2 and r.response_ids.tolist() == [[1, 8, 8, 8], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert r.texts == ["x", "y", "z"] and r.columns == {"n": [1, 2, 3]} and r.sampled_logprobs is None


# ----------------------------------------------------------- one fails, the others do not wait

def how_it_ends(trouble, seconds=60.):
    began = time.monotonic()
    try: run("grpo", GRPO, 3, reward_fn=[trouble])
    except BaseException as e: return type(e).__name__, str(e), time.monotonic() - began
    return "fine", "", 0


def raising(error):
    def trouble(texts):
        if place() == 1 and count() == 2: raise error
        return [0.] * len(texts)
    return trouble


@pytest.mark.parametrize("error", (ValueError("no more"), KeyboardInterrupt("Ctrl-C")))
def test_an_error_in_one_process_ends_all_and_is_named(error):
    first, second = in_processes(2, how_it_ends, raising(error))
    assert first[0] == "OthersFailed" and "process 1 of 2 failed" in first[1] and str(error) in first[1]
    assert second[0] in ("RuntimeError", "KeyboardInterrupt") and str(error) in second[1] and "others" not in second[1]


def left_alone(leave):
    "Process 1 leaves without a word, or sleeps; process 0 is told, and tells."
    if place() == 1: return leave()
    try: together(lambda: 1)
    except ConnectionError as e: return str(e)


def test_a_process_that_is_gone_is_not_waited_for():
    began = time.monotonic()
    said, _ = in_processes(2, left_alone, torch.distributed.destroy_process_group, seconds=500)
    assert "process 0 waited for the others and lost them" in said and time.monotonic() - began < 200


def impatient():
    "As `join` would have it: no longer than three seconds."
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3), torch.distributed.group.WORLD)
    return left_alone(lambda: time.sleep(6))


def sums_of_many(): return torch.arange(300_000.).exp2().clamp(max=1.).sum().item()


def test_a_process_that_has_worked_with_threads_can_fork():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = sums_of_many()                                             # begins OpenMP's threads, which are not forked along
        assert in_processes(2, sums_of_many, seconds=20) == [alone, alone]
    finally: torch.set_num_threads(before)


def test_a_process_that_sleeps_is_waited_for_as_long_as_allowed():
    said, _ = in_processes(2, impatient, seconds=500)
    assert "process 0 waited for the others and lost them" in said and "has taken another way" in said


def test_who_ends_without_a_word_is_named():
    with pytest.raises(RuntimeError, match="process 1: it ended without a word"): in_processes(2, left_alone, lambda: os._exit(3))


def crashes(flag):
    if torch.distributed.get_rank() == 1 and not flag.exists():
        flag.touch()
        faulthandler.disable()  # it would print the stack
        os.kill(os.getpid(), signal.SIGSEGV)
    return torch.distributed.get_rank()


def test_a_crash_is_tried_once_more_and_said(tmp_path, monkeypatch):
    with pytest.warns(RuntimeWarning, match="process 1: it ended without a word; once more"):
        assert in_processes(2, crashes, tmp_path / "once") == [0, 1]
    monkeypatch.setattr(type(tmp_path), "exists", lambda self: False)  # and again, and again
    with pytest.warns(RuntimeWarning, match="once more"), pytest.raises(RuntimeError, match="process 1: it ended without a word"):
        in_processes(2, crashes, tmp_path / "always")


def test_other_prompts_or_settings_are_refused():
    def other_prompts():
        trainer = trainer_of("grpo", **GRPO)
        with pytest.raises(ValueError, match="the prompts differ between process .* the trainer deals it out"): trainer.step(PROMPTS[:3] if is_first() else PROMPTS[1:4], reward)
        with pytest.raises(ValueError, match="the settings differ"): trainer_of("grpo", **GRPO | dict(lr=1e-3 * (1 + place())))
        return True
    assert in_processes(2, other_prompts) == [True, True]


# ----------------------------------------------------------- files are written once

def kept(out, steps, resume=False):
    trainer = trainer_of(steps=steps, **PPO)
    return trainer.train_in(out, PROMPTS, reward, save_every=2, resume=resume, progress=False), weights_of(trainer)


@pytest.mark.deep
def test_a_run_on_the_disk_is_written_once_and_goes_on_in_two_processes(tmp_path):
    _, whole = kept(tmp_path / "whole", 4)
    kept(tmp_path / "two", 2)                                          # begun alone
    (summary, one), (same, two) = in_processes(2, kept, tmp_path / "two", 4, True, seconds=500)
    assert summary == same and summary["iterations"] == 4 and summary["resumed_from"] == 2
    assert apart(whole, one) < 1e-9 and all(torch.equal(one[k], two[k]) for k in one)
    lines = [json.loads(x)["iteration"] for x in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3] and len(checkpoints(tmp_path / "two/checkpoints")) == 2
    again = in_processes(2, kept, tmp_path / "two", 4, True)           # nothing left to do
    assert all(apart(weights, one) < 1e-6 for _, weights in again)
    with pytest.raises(RuntimeError, match="process 0: FileExistsError.*process 1: OthersFailed.*already holds"):
        in_processes(2, kept, tmp_path / "two", 4)


# ----------------------------------------------------------- launched, by torch's own launcher

SCRIPT = """
import sys; sys.path[:0] = {paths!r}
from test_processes import PPO, run, weights_of, trainer_of, is_first, count
from instruct_goose.distributed import fsdp as sharded
import torch
cut = sharded.asked_for()
weights, texts, history = run("ppo", PPO, 2)
if cut: weights = {{k: (x.full_tensor() if hasattr(x, "full_tensor") else x) for k, x in weights.items()}}
if is_first(): torch.save((weights, texts, count(), cut), {out!r})
"""
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate, copies": ["accelerate.commands.launch", "--config_file", "data_parallel.yaml", "--num_processes", "2"],
    "accelerate, FSDP": ["accelerate.commands.launch", "--config_file", "fsdp.yaml", "--num_processes", "2"],
}


@pytest.mark.deep
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_a_script_that_knows_of_nothing(launcher, tmp_path):
    "The configurations are those that are shipped; only the number of processes is another. Really run: CPU processes over gloo."
    if launcher.startswith("accelerate"): pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[smollm]'")
    here, out = Path(__file__).parent, tmp_path / "weights.pt"
    (tmp_path / "script.py").write_text(SCRIPT.format(paths=[str(here), str(here.parents[1])], out=str(out)))
    command = [str(configs() / x) if x.endswith(".yaml") else x for x in LAUNCHERS[launcher]]
    told = subprocess.run([sys.executable, "-m", *command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=500,
                          env={k: x for k, x in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP"))} | {"OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr[-2000:]
    weights, texts, processes, cut = torch.load(out)
    alone, alone_texts, _ = run("ppo", PPO, 2)
    assert processes == 2 and cut == ("FSDP" in launcher) and apart(alone, weights) < 1e-9 and texts == alone_texts


@pytest.mark.deep
def test_ray_starts_a_script_that_knows_of_nothing(tmp_path):
    "Two CPU processes on this machine; Ray is part of no extra."
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[train]'")
    here, out = Path(__file__).parent, tmp_path / "weights.pt"
    (tmp_path / "script.py").write_text(SCRIPT.format(paths=[str(here), str(here.parents[1])], out=str(out)))
    told = subprocess.run([sys.executable, str(configs() / "train_ray.py"), "--processes", "2", "--cpu", "script.py"], capture_output=True, text=True, timeout=500,
                          cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    assert told.returncode == 0, told.stderr[-2000:]
    weights, texts, processes, _ = torch.load(out)
    alone, alone_texts, _ = run("ppo", PPO, 2)
    assert processes == 2 and apart(alone, weights) < 1e-9 and texts == alone_texts


def test_rays_script_asks_ray_for_these_processes_and_runs_the_script_in_each(tmp_path, monkeypatch):
    "With a Ray that only writes down what it is asked, and starts the function here."
    asked, ran = [], []
    class Trainer:
        def __init__(self, function, **how): self.function, self.how = function, how; asked.append(how)
        def fit(self): self.function(self.how["train_loop_config"])
    kept = lambda **how: how
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(ScalingConfig=kept))
    monkeypatch.setitem(sys.modules, "ray.train.torch", types.SimpleNamespace(TorchConfig=kept, TorchTrainer=Trainer, get_device=lambda: 0))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "set_device", ran.append)
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "train.py").write_text("import os, sys, beside\nassert __name__ == '__main__'\nopen('told', 'w').write(f'{sys.argv} {beside.name}')\n")
    monkeypatch.chdir(tmp_path)
    script = configs() / "train_ray.py"
    for flags, backend, gpu in (([], "cpu:gloo,cuda:nccl", True), (["--cpu", "--processes", "2"], "gloo", False)):
        monkeypatch.setattr(sys, "argv", [str(script), *flags, "train.py", "--lr", "3"])
        runpy.run_path(str(script), run_name="__main__")
        assert asked[-1]["torch_config"] == {"backend": backend} and asked[-1]["scaling_config"] == {"num_workers": 2 if flags else 16, "use_gpu": gpu}
        assert (tmp_path / "told").read_text() == "['train.py', '--lr', '3'] beside"
        (tmp_path / "told").unlink()
    assert bool(ran) == torch.cuda.is_available()
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit): runpy.run_path(str(script), run_name="__main__")


def test_slurms_script_is_one(tmp_path):
    assert subprocess.run(["bash", "-n", str(configs() / "train.slurm")], capture_output=True).returncode == 0
