"What is written, what is believed when it is read, what happens when writing fails, and that nothing a run depends on is left out."
import errno
import json
import os
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.models.agent import Agent
from instruct_goose.models.text import word_tokenizer
from instruct_goose.training import checkpoints as module
from instruct_goose.training.checkpoints import (
    Keeper,
    checkpoints,
    load_checkpoint,
    load_module,
    load_optimizer,
    module_state,
    newest_checkpoint,
    optimizer_state,
    random_state,
    save_checkpoint,
    set_random_state,
)
from instruct_goose.training.trainer import RLHFConfig, RLHFTrainer

RECORD = {"where": "Zürich – 北京", "numbers": [1, .1 + .2, 1e-300, 2**53 + 1, None, True], "nested": {"": []}}


def some(seed=0):
    torch.manual_seed(seed)
    return {"a/b": torch.randn(3, 5), "scalar": torch.tensor(3.), "none": torch.zeros(0, 4), "bytes": torch.arange(256, dtype=torch.uint8),
            "half": torch.randn(7).bfloat16(), "wide": torch.randn(2, dtype=torch.float64), "ids": torch.tensor([-1, 2**62]),
            "mask": torch.tensor([True, False]), "transposed": torch.randn(4, 6).T}


def same(a, b): return a.keys() == b.keys() and all(x.dtype == b[k].dtype and x.shape == b[k].shape and torch.equal(x, b[k]) for k, x in a.items())


def contents(directory): return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- files

def test_what_is_written_is_read(tmp_path):
    path = save_checkpoint(tmp_path / "new/place", some(), RECORD)
    assert path == tmp_path / "new/place/checkpoint-000001" and newest_checkpoint(tmp_path / "new/place") == path
    tensors, record = load_checkpoint(path)
    assert same(tensors, some()) and record == RECORD
    assert {p.name for p in path.iterdir()} == {"tensors.safetensors", "record.json"}
    assert same(safetensors.torch.load_file(path / "tensors.safetensors"), some())  # plain safetensors, plain JSON
    assert json.loads((path / "record.json").read_text("utf-8"))["record"] == RECORD
    source = Path(module.__file__).read_text("utf-8")
    assert not re.findall(r"pickle|(?<!safetensors\.)torch\.(?:load|save)\b|eval\(", source)


def test_the_newest_stay(tmp_path):
    assert checkpoints(tmp_path) == checkpoints(tmp_path / "nowhere") == [] and newest_checkpoint(tmp_path) is None
    for n in range(5): save_checkpoint(tmp_path, {"n": torch.tensor(n)}, {"n": n}, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["checkpoint-000004", "checkpoint-000005"]
    (tmp_path / "checkpoint-notes").mkdir(); (tmp_path / "checkpoint-000099").write_text("a file")
    assert load_checkpoint(newest_checkpoint(tmp_path))[1] == {"n": 4}
    save_checkpoint(tmp_path, {}, {}, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-000006"] and (tmp_path / "checkpoint-notes").is_dir()
    with pytest.raises(ValueError, match="keep is 0"): save_checkpoint(tmp_path, {}, {}, keep=0)


def test_a_number_that_json_lacks_is_refused_before_anything_is_written(tmp_path):
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"): save_checkpoint(tmp_path / "here", some(), {"x": wrong})
    assert not (tmp_path / "here").exists()


def _cut(n): return lambda path, rng: (path / "tensors.safetensors").write_bytes((path / "tensors.safetensors").read_bytes()[:n])


def _flip(name):
    def damage(path, rng):
        content = bytearray((path / name).read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(content)
    return damage


def _edit(path, rng): (path / "record.json").write_text((path / "record.json").read_text("utf-8").replace("1e-300", "2e-300"), "utf-8")
def _lose(name): return lambda path, rng: (path / name).unlink()
def _half(path, rng): (path / "record.json").write_bytes((path / "record.json").read_bytes()[:-30])
def _exchange(path, rng): (path / "tensors.safetensors").write_bytes(safetensors.torch.save({k: x.contiguous() for k, x in some(5).items()}))
def _foreign(path, rng): (path / "record.json").write_text('{"model_type": "gpt2"}')
def _list(path, rng): (path / "record.json").write_text("[]")


DAMAGES = {"empty": _cut(0), "cut": _cut(-1), "cut far": _cut(40), "flipped": _flip("tensors.safetensors"), "edited": _edit, "flipped record": _flip("record.json"),
           "no tensors": _lose("tensors.safetensors"), "no record": _lose("record.json"), "half a record": _half, "exchanged": _exchange,
           "foreign": _foreign, "list": _list}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_damaged_are_named_and_passed_over(tmp_path, damage, capsys):
    for seed in range(10):
        shutil.rmtree(tmp_path); tmp_path.mkdir()
        good, bad = (save_checkpoint(tmp_path, some(i), RECORD) for i in range(2))
        damage(bad, random.Random(seed))
        with pytest.raises(ValueError, match="is damaged|is no checkpoint") as e: load_checkpoint(bad)
        assert str(bad) in str(e.value)
        assert newest_checkpoint(tmp_path) == good and str(bad) in capsys.readouterr().err
        damage(good, random.Random(seed))
        with pytest.raises(ValueError, match="none of the 2 checkpoints in .* is whole"): newest_checkpoint(tmp_path)
        if damage not in (DAMAGES["flipped"], DAMAGES["flipped record"]): break  # the others do the same each time


# ---------------------------------------------------------------- writing that fails

def failing(monkeypatch, at, error):
    "The at-th operation on the file system does `error()`; returns the names of those that went before."
    done = []
    def watch(owner, name):
        real = getattr(owner, name)
        def wrapped(*args, **kwargs):
            done.append(name)
            if len(done) == at: error()
            return real(*args, **kwargs)
        monkeypatch.setattr(owner, name, wrapped)
    for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "open"), (shutil, "rmtree")): watch(owner, name)
    return done


OPERATIONS = 14  # mkdir ×2, (open, fsync) ×2, fsync, rename, fsync, rename, rmtree …; what lies beyond is done without failing


@pytest.mark.parametrize("number, cure", [(errno.ENOSPC, "free some space"), (errno.EROFS, "make the directory writable"), (errno.EIO, "writable")])
def test_whatever_fails_the_last_one_is_intact(tmp_path, number, cure):
    for at in range(1, OPERATIONS):
        shutil.rmtree(tmp_path)
        good = save_checkpoint(tmp_path, some(), RECORD, keep=1)
        before = contents(tmp_path)
        def fail(): raise OSError(number, os.strerror(number))
        with pytest.MonkeyPatch.context() as patch:
            done = failing(patch, at, fail)
            try: save_checkpoint(tmp_path, some(1), RECORD, keep=1)
            except OSError as e: failed = e
            else: failed = None
        if failed and done[:at].count("rename") < 2 and "checkpoint-000002" not in {p.name for p in tmp_path.iterdir()}:
            assert failed.errno == number and contents(tmp_path) == before
            assert "could not be written" in str(failed) and cure in str(failed) and good.name in str(failed) and str(tmp_path) in str(failed)
        newest = newest_checkpoint(tmp_path)  # whatever happened: a whole one
        assert same(load_checkpoint(newest)[0], some(int(newest.name[-1]) - 1))
        assert same(load_checkpoint(save_checkpoint(tmp_path, some(2), RECORD, keep=1))[0], some(2))
        assert len(list(tmp_path.iterdir())) == 1  # nothing is left beside


def test_killed_at_every_operation(tmp_path):
    "A process that ends there and then, without a chance to clear up."
    moments = set()
    for at in range(1, OPERATIONS):
        shutil.rmtree(tmp_path)
        save_checkpoint(tmp_path, some(), RECORD, keep=1)
        if not (child := os.fork()):
            try:
                failing(pytest.MonkeyPatch(), at, lambda: os._exit(9))
                save_checkpoint(tmp_path, some(1), RECORD, keep=1)
            finally: os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0: break
        newest = newest_checkpoint(tmp_path)
        moments.add(newest.name)
        assert same(load_checkpoint(newest)[0], some(int(newest.name[-1]) - 1))
        assert same(load_checkpoint(save_checkpoint(tmp_path, some(2), RECORD, keep=1))[0], some(2))
        assert len(list(tmp_path.iterdir())) == 1
    assert moments == {"checkpoint-000001", "checkpoint-000002"} and at > 8


def test_a_disk_that_is_full(tmp_path):
    "The operating system itself refuses: no file may grow beyond 4 kB."
    resource = pytest.importorskip("resource")
    good, before = save_checkpoint(tmp_path, {}, RECORD), contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="could not be written.*checkpoint-000001, is untouched.*free some space"):
            save_checkpoint(tmp_path, {"x": torch.zeros(10_000)}, RECORD)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before and newest_checkpoint(tmp_path) == good


def test_a_directory_that_is_read_only(tmp_path):
    good, before = save_checkpoint(tmp_path, {}, RECORD), contents(tmp_path)
    user = os.geteuid()
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == user and parent != Path("/tmp"): parent.chmod(0o755)
    tmp_path.chmod(0o555)
    if user == 0: os.seteuid(65534)  # nothing is read-only for root
    try:
        with pytest.raises(PermissionError, match="could not be written.*checkpoint-000001, is untouched.*writable"):
            save_checkpoint(tmp_path, some(), RECORD)
        with pytest.raises(PermissionError, match="There is none yet"): save_checkpoint(tmp_path / "new", some(), RECORD)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
    assert contents(tmp_path) == before and newest_checkpoint(tmp_path) == good


# ---------------------------------------------------------------- random numbers, weights, moments

def test_every_generator_goes_back_to_its_place():
    numpy = pytest.importorskip("numpy")
    draw = lambda: [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(2).tolist(), numpy.random.randn()]
    draw()  # leaves half a pair of normal numbers behind, in Python and numpy
    state = random_state()
    first = draw()
    assert draw() != first
    set_random_state(safetensors.torch.load(safetensors.torch.save(state)))
    assert draw() == first


def tiny(seed=0, dropout=0., vocab=19):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
                                      attn_pdrop=dropout, bos_token_id=0, eos_token_id=0))


def test_weights_of_another_model_are_refused_before_any_is_written():
    one, other = tiny(0), tiny(1)
    state = module_state(one)
    assert "lm_head.weight" not in state or "transformer.wte.weight" not in state  # tied: one name
    before = {k: x.clone() for k, x in module_state(other).items()}
    for wrong, says in ((module_state(tiny(vocab=20)), "19, 8"), (dict(list(state.items())[:-1]), "is missing"), (state | {"x": torch.ones(1)}, "not known"),
                        ({k: x.double() for k, x in state.items()}, "float64")):
        with pytest.raises(ValueError, match=f"another model's weights: .*{says}"): load_module(other, wrong)
        assert same(module_state(other), before)
    load_module(other, state)
    assert same(module_state(other), state) and other.lm_head.weight is other.transformer.wte.weight


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=.01), lambda p: torch.optim.AdamW(p, lr=.01, fused=True, amsgrad=True), lambda p: torch.optim.SGD(p, lr=.01, momentum=.9),
    lambda p: torch.optim.Adam([{"params": p[:1], "lr": .1, "betas": (.5, .6)}, {"params": p[1:]}], lr=.01), lambda p: torch.optim.RMSprop(p, lr=.01)])
def test_an_optimizer_remembers(make, tmp_path):
    def update(net, optimizer, steps):
        for i in range(steps):
            optimizer.zero_grad(); (net(torch.full((2, 3), i + 1.)) ** 2).sum().backward(); optimizer.step()
    def fresh():
        torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return net, make(list(net.parameters()))
    net, optimizer = fresh(); update(net, optimizer, 3)
    tensors, groups = optimizer_state(optimizer, net)
    path = save_checkpoint(tmp_path, tensors, {"groups": groups})
    again, empty = fresh(); load_module(again, module_state(net))
    load_optimizer(empty, again, load_checkpoint(path)[0], load_checkpoint(path)[1]["groups"])
    assert [{k: v for k, v in g.items() if k != "params"} for g in empty.param_groups] == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for n, o in ((net, optimizer), (again, empty)): update(n, o, 2)
    assert same(module_state(net), module_state(again))


def test_an_optimizer_of_other_groups_is_refused():
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="do not belong to the model"): optimizer_state(torch.optim.SGD(other.parameters(), lr=.1), net)
    tensors, groups = optimizer_state(torch.optim.Adam(net.parameters()), net)
    one_each = torch.optim.Adam([{"params": [p]} for p in net.parameters()])
    with pytest.raises(ValueError, match="groups are not those"): load_optimizer(one_each, net, tensors, groups)


# ---------------------------------------------------------------- the trainer

WORDS = "abcdefghijklmnop"
CONFIG = RLHFConfig(steps=5, batch_size=8, group_size=2, max_new_tokens=5, minibatches=2, lr=1e-3, lr_schedule="cosine", kl_target=.05, beta=.2)
TOKENIZER = word_tokenizer(list(WORDS))


def reward(texts): return [text.count("a") + random.random() + torch.rand(()).item() for text in texts]  # noisy judges are judges


def trainer(config=CONFIG, reference=None, **options):
    agent = Agent(tiny(vocab=len(TOKENIZER)), value_model="copy" if config.advantage == "gae" else None)
    return RLHFTrainer(agent, reference, config, tokenizer=TOKENIZER, **options)


@pytest.fixture
def plain(unchecked):
    "Without the shape checker, which draws from Python's generator to choose what it looks at."
    with unchecked(): yield


def go(t, steps=None, seed=None):
    if seed is not None: random.seed(seed); torch.manual_seed(seed)
    return [{k: v for k, v in m.items() if "second" not in k} for m in t.train(list(WORDS[:11]), reward, steps, progress=False)]


def clone(state): return {k: x.clone() for k, x in state[0].items()}, json.loads(json.dumps(state[1]))


@pytest.mark.parametrize("changes", [{}, {"advantage": "group_mean_std", "whiten_advantages": False}, {"advantage": "greedy", "lr_schedule": "linear"}],
                         ids=["gae", "group", "greedy"])
def test_a_trainer_goes_on_as_if_nothing_had_happened(changes, tmp_path, plain):
    config = replace(CONFIG, **changes)
    whole = trainer(config)
    metrics = go(whole, seed=3)
    for k in (1, 2, 4):
        first = trainer(config)
        head = go(first, k, seed=3)
        path = save_checkpoint(tmp_path, *first.state())
        random.seed(99); torch.manual_seed(99)
        second = trainer(config)
        second.load_state(*load_checkpoint(path))
        assert head + go(second) == metrics and second.iteration == config.steps
        assert same(module_state(second.agent), module_state(whole.agent)) and second.beta == whole.beta


FORGOTTEN = ["agent", "optimizer", "dice", "generator/sampling", "generator/shuffling", "iteration", "prompts_seen", "beta"]


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_whatever_is_forgotten_is_missed(forgotten, plain):
    "Each part of the state matters: without it the run goes elsewhere. So the test above would notice."
    first = trainer()
    go(first, 2, seed=3)
    tensors, record = clone(first.state())
    rest = go(first)
    new = trainer()
    fresh, beginning = clone(new.state())
    if forgotten in record: record[forgotten] = beginning[forgotten]
    elif forgotten == "optimizer": tensors = {k: x for k, x in tensors.items() if not k.startswith("optimizer/")}
    else: tensors |= {k: x for k, x in fresh.items() if k.startswith(forgotten)}
    new.load_state(tensors, record)
    without = lambda ms: [{k: v for k, v in m.items() if k != "iteration"} for m in ms]
    assert without(go(new, 3 if forgotten != "iteration" else None))[:3] != without(rest)


def test_the_state_holds_nothing_else():
    parts = {name.split("/")[0] for name in trainer().state()[0]}
    assert parts == {"agent", "generator", "dice"}  # no moments before the first update
    t = trainer(); go(t, 1)
    assert {name.split("/")[0] for name in t.state()[0]} == parts | {"optimizer"}
    plain = {k for k, v in vars(t).items() if isinstance(v, int | float | str | bool) or v is None} - {"tokenizer", "pad_id", "_reference_fingerprint", "best"}
    assert plain <= t.state()[1].keys(), "a new attribute of the trainer that changes must be kept as well"


def test_what_does_not_belong_is_refused_and_nothing_changes(plain):
    first = trainer(); go(first, 2, seed=3)
    state = first.state()
    other = trainer(replace(CONFIG, lr=2e-3, clip=.3))
    before = clone(other.state())
    with pytest.raises(ValueError, match=r"other settings: lr was 0.001 and is 0.002; clip was 0.2 and is 0.3") as e: other.load_state(*state)
    assert "beta" not in str(e.value)
    assert same(before[0], other.state()[0])
    with pytest.raises(ValueError, match="reference model is not the one"): trainer(reference=tiny(7, vocab=len(TOKENIZER))).load_state(*state)
    with pytest.raises(ValueError, match="other settings: steps was 5 and is 6"): trainer(replace(CONFIG, steps=6)).load_state(*state)  # the cosine ends elsewhere
    constant = trainer(replace(CONFIG, lr_schedule="constant")); go(constant, 2)
    longer = trainer(replace(CONFIG, lr_schedule="constant", steps=9)); longer.load_state(*constant.state())
    assert longer.iteration == 2


def test_the_best_policy_is_kept(tmp_path, plain):
    config = replace(CONFIG, eval_every=1, keep_best=True)
    def go(t, steps=None): return t.train(list(WORDS[:11]), lambda texts: [text.count("a") for text in texts], steps, progress=False, held_out=list(WORDS[11:]))
    whole, first, second = (trainer(config) for _ in range(3))
    log = go(whole)
    go(first, 3)
    second.load_state(*load_checkpoint(save_checkpoint(tmp_path, *first.state())))
    assert same(second.best, first.best) and second.best_reward == first.best_reward == max(m["held_out_reward"] for m in log[:3])
    go(second)
    assert same(second.best, whole.best) and second.best_reward == whole.best_reward
    fresh = trainer(config); second.load_state(*fresh.state())
    assert second.best is None and second.best_reward is None


def test_the_number_of_threads_is_kept():
    before, t = torch.get_num_threads(), trainer()
    tensors, record = t.state()
    try:
        t.load_state(tensors, record | {"threads": before + 1})
        assert torch.get_num_threads() == before + 1
    finally: torch.set_num_threads(before)


# ---------------------------------------------------------------- runs of several stages

def reach(keeper, name, at, of, **tensors): keeper.stage(name).reached(at, of, lambda: (tensors, {"at": at}))


def test_other_stages_are_saved_as_often(tmp_path):
    keeper = Keeper(tmp_path, {}, steps=12, every=4, keep=100)
    for of, expected in ((12, [4, 8, 12]), (30, [10, 20, 30]), (2, [1, 2])):
        saved = []
        for at in range(1, of + 1):
            before = len(checkpoints(keeper.directory))
            reach(keeper, "stage", at, of)
            if len(checkpoints(keeper.directory)) > before: saved.append(at)
        assert saved == expected


def test_memory_is_a_copy_and_goes_to_the_disk_when_the_block_breaks(tmp_path, capsys):
    keeper, x = Keeper(tmp_path, {"lr": 1.}, steps=10), torch.zeros(2)
    with pytest.raises(KeyboardInterrupt), keeper:
        reach(keeper, "sft", 10, 10, w=torch.ones(1))
        reach(keeper, "ppo", 3, 10, x=x)
        x += 1  # half a step
        assert not checkpoints(keeper.directory)
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert "after 3 of 10 steps of the stage 'ppo'" in said and f"--output-dir {tmp_path} --resume" in said
    again = Keeper(tmp_path, {"lr": 1.}, steps=10)
    assert again.resume() == checkpoints(again.directory)[0] and again.resumed_from == 3
    assert again.stage("ppo").found[0]["x"].tolist() == [0., 0.] and again.stage("sft").found[0]["w"].tolist() == [1.]
    assert again.stage("sft").found[1] == {"at": 10} and again.stage("baselines").found is None
    assert again.save() is None  # it is there already
    with pytest.raises(ValueError, match="lr was 1.0 and is 2.0"): Keeper(tmp_path, {"lr": 2.}, steps=10).resume()


def test_seconds_add_up(tmp_path):
    class Clock:
        def read(self): return {"wall_seconds": 2.5}
    first = Keeper(tmp_path, {}, steps=1, every=1, clock=Clock())
    reach(first, "a", 1, 1)
    second = Keeper(tmp_path, {}, steps=1, clock=Clock())
    second.resume()
    assert second.seconds() == {"wall_seconds": 5.} and second.resumed_from == "a"


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    with Keeper(tmp_path, {}, steps=1):
        with pytest.raises(BlockingIOError, match="another process is at work"), Keeper(tmp_path, {}, steps=1): pass
    with Keeper(tmp_path, {}, steps=1): pass


def test_a_disk_that_is_full_does_not_hide_why_the_run_stopped(tmp_path, monkeypatch, capsys):
    keeper = Keeper(tmp_path, {}, steps=10)
    def full(*_): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(ZeroDivisionError), keeper:
        reach(keeper, "ppo", 3, 10)
        raise ZeroDivisionError
    said = capsys.readouterr().err
    assert "No space left on device" in said and "holds nothing to go on from" in said


def test_ctrl_c_pressed_again_does_not_break_off_the_saving(tmp_path, monkeypatch):
    write = module._write

    def pressed_again(path, content):
        signal.raise_signal(signal.SIGINT)
        write(path, content)

    monkeypatch.setattr(module, "_write", pressed_again)
    hears = signal.getsignal(signal.SIGINT)
    keeper = Keeper(tmp_path, {}, steps=3)
    with pytest.raises(KeyboardInterrupt, match="the first"), keeper:
        keeper.stage("ppo").reached(1, 3, lambda: (some(), {}))
        raise KeyboardInterrupt("the first")
    assert load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"))[1]["place"] == ["ppo", 1, 3]
    assert signal.getsignal(signal.SIGINT) is hears


def test_a_record_nested_without_end_is_damaged(tmp_path):
    good, bad = (save_checkpoint(tmp_path, some(), {}) for _ in range(2))
    (bad / "record.json").write_text("[" * 200_000)
    assert newest_checkpoint(tmp_path) == good
