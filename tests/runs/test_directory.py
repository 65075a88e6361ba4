"A run's directory. Oracles: the files as any reader finds them, and a run that was never stopped."

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from deep import first
from small_models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from instruct_goose import Agent, RLHFConfig, RLHFTrainer, model_card
from instruct_goose.core.files import append_jsonl, write_json
from instruct_goose.models.loading import save_model
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.recipes.training import RunSettings, train_in
from instruct_goose.rollouts.rewards import RewardError
from instruct_goose.runs import directory as runs
from instruct_goose.runs.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from instruct_goose.runs.directory import (
    OptionalSettings,
    check_directory,
    check_same_run,
    checked_log,
    claim_run_dir,
    directory_digests,
    file_history,
    finished_run,
    has_begun,
    in_run_directory,
    input_digests,
    model_digests,
    new_run_dir,
    optional_settings,
    print_changed_files,
    print_new_schedule,
    print_worst_finding,
    require_unused,
    saving_conflicts,
    settings_of,
    truncate_log,
)
from instruct_goose.runs.resume import CheckpointManager, RunState, StageProgress, Terminated
from instruct_goose.training.callbacks import Callback


def make_some(root):
    return [str(new_run_dir("run", root)) for _ in range(20)]


def test_settings_that_a_command_lacks_count_as_unset():
    class Few:
        track = "wandb"
        reward = ("mine.py:score",)
        seed = 3  # no optional one

    assert optional_settings(Few()) == OptionalSettings(track="wandb", reward=("mine.py:score",))
    assert optional_settings(object())._asdict() == {
        "model": None,
        "reward": (),
        "trainer": None,
        "environment": None,
        "plugin": (),
        "threads": None,
        "track": None,
        "to_go_on": None,
    }


def test_new_run_dirs_differ_when_several_processes_ask_at_once(tmp_path):
    (tmp_path / "run").write_text("a file of that name")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.map(make_some, [str(tmp_path)] * 4, chunksize=1)
    assert len(set(sum(made, []))) == 80 == len(list(tmp_path.iterdir())) - 1


def test_claim_run_dir(tmp_path):
    assert (
        claim_run_dir(tmp_path / "x" / "new").is_dir()
        and claim_run_dir(tmp_path / "x" / "new").is_dir()
    )  # empty
    (tmp_path / "x/new/.summary.json.12").write_text("half")
    assert (
        claim_run_dir(tmp_path / "x/new") == tmp_path / "x/new"
    )  # its own half-written file, and no other
    (tmp_path / "x/new/.notes.json.12").write_text("somebody's")
    with pytest.raises(FileExistsError, match="already holds files: give another"):
        claim_run_dir(tmp_path / "x" / "new")
    (tmp_path / "x" / "new" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a run"):
        claim_run_dir(str(tmp_path / "x" / "new"))
    assert (tmp_path / "x/new/.notes.json.12").read_text() == "somebody's"


def test_json_is_whole_or_the_old_one(tmp_path, monkeypatch):
    "A number that JSON lacks is refused. Stopped just before the renaming, the old file is whole."
    write_json(tmp_path / "s.json", {"ä": 1, "path": tmp_path})
    old = (tmp_path / "s.json").read_bytes()
    assert json.loads(old) == {"ä": 1, "path": str(tmp_path)} and "ä".encode() in old
    with pytest.raises(ValueError):
        write_json(tmp_path / "s.json", {"a": [1, {"b": math.inf}]})
    assert (tmp_path / "s.json").read_bytes() == old and os.listdir(tmp_path) == ["s.json"]

    def killed(self, other):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "s.json", {"a": 2})
    assert (tmp_path / "s.json").read_bytes() == old


def test_jsonl_grows_line_by_line_and_knows_no_nan(tmp_path):
    for i in range(2):
        append_jsonl(
            tmp_path / "m.jsonl",
            {
                "i": i,
                "text": "zwei\nZeilen – ü",
                "b": [1.5, math.inf, {"c": math.nan}],
                "d": (2, None, True, "NaN"),
            },
        )
    rows = [json.loads(x) for x in (tmp_path / "m.jsonl").read_text("utf-8").splitlines()]
    assert rows == [
        {
            "i": i,
            "text": "zwei\nZeilen – ü",
            "b": [1.5, None, {"c": None}],
            "d": [2, None, True, "NaN"],
        }
        for i in range(2)
    ]


# ---------------------------------------------------------------- one call

TOKENIZER = word_tokenizer(
    "a b c d e f".split(), pad="<e>", bos="<e>", eos="<e>", unk="<u>", model_max_length=12
)
ROWS = [
    {"prompt": "a b", "answer": "c"},
    {"prompt": "d", "answer": "e"},
    {"prompt": "f a", "answer": "c"},
]


def right(completions, answer):
    return [text.split().count(a) for text, a in zip(completions, answer, strict=True)]


def trainer(steps=3, family="llama", value_model=None, **settings):
    config = RLHFConfig(
        **dict(batch_size=8, max_new_tokens=4, lr=0.01, epochs=1) | settings, steps=steps
    )
    return RLHFTrainer(Agent(tiny(family), value_model), config=config, tokenizer=TOKENIZER)


def files(out, suffix):
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob(f"*.{suffix}")
        if "checkpoints" not in p.parts
    }


def log(out):
    return [
        {k: x for k, x in json.loads(line).items() if "second" not in k}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def test_all_that_a_run_is_lies_in_its_directory(tmp_path):
    out = tmp_path / "runs/mine"
    made = trainer(value_model="copy")
    summary = train_in(made, out, ROWS, right, progress=False)
    assert (
        summary == json.loads((out / "summary.json").read_text())
        and summary["iterations"] == len(log(out)) == 3
    )
    settings = json.loads((out / "config.json").read_text())
    assert (
        settings["lr"] == 0.01
        and settings["algorithm"] == "ppo"
        and summary["config"]["beta"] == settings["beta"]
    )
    again = Agent.from_pretrained(out / "policy")
    words = AutoTokenizer.from_pretrained(out / "policy")
    assert again.value_model is not None and again.value_head.weight.norm() > 0
    assert all(p.equal(q) for p, q in zip(again.parameters(), made.agent.parameters(), strict=True))
    assert words("a b")["input_ids"] == TOKENIZER("a b")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(out / "policy")  # transformers alone
    assert all(
        p.equal(q) for p, q in zip(plain.parameters(), made.agent.model.parameters(), strict=True)
    )


def samples(out):
    return [
        [x.strip() for x in line.strip("|").split("|")]
        for line in (out / "samples.md").read_text().splitlines()
        if line.startswith("|")
    ]


def test_samples_are_the_same_prompts_before_and_after_and_no_reward_is_asked(tmp_path):
    asked = []

    def counted(completions, answer):
        asked.append(len(completions))
        return right(completions, answer)

    start, made = trainer(2, lr=0.5), trainer(2, lr=0.5)
    train_in(made, tmp_path / "run", ROWS, counted, progress=False, trial=False)
    assert asked == [8, 8]  # two iterations
    header, _, *rows = samples(tmp_path / "run")
    assert header == ["prompt", "before", "after"] and [r[0] for r in rows] == ["a b", "d", "f a"]
    for column, who in ((1, start), (2, made)):  # the dice of an evaluation, whoever throws them
        [r] = who.evaluation_rollouts(ROWS)
        words = [
            TOKENIZER.decode(ids[m], skip_special_tokens=True)
            for ids, m in zip(r.response_ids, r.mask, strict=True)
        ]
        assert [row[column] for row in rows] == words
    assert [r[1] for r in rows] != [r[2] for r in rows]


@pytest.mark.parametrize("held_out", [None, ROWS[1:]])
def test_nothing_is_taken_of_a_stream_for_samples(held_out, tmp_path):
    train_in(
        trainer(1),
        tmp_path / "run",
        itertools.cycle(ROWS),
        right,
        progress=False,
        held_out=held_out,
    )
    assert (tmp_path / "run/samples.md").exists() == (held_out is not None)
    if held_out:
        assert [r[0] for r in samples(tmp_path / "run")[2:]] == ["d", "f a"] and "Held-out" in (
            tmp_path / "run/samples.md"
        ).read_text()


class Stop(Callback):
    def on_annotate(self, trainer, annotations):
        if trainer.iteration == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stream, save_every", first(1, [(True, 1), (False, None)]))
def test_stopped_resumed_and_made_longer_it_is_the_run_that_was_that_long(
    tmp_path, stream, save_every
):
    """To the bit, the best policy too. A stream begins anew, and what was seen is skipped; the log
    was ahead of the checkpoint.
    """

    def go(out, made, **options):
        prompts = itertools.cycle(ROWS) if stream else ROWS
        return train_in(
            made,
            tmp_path / out,
            prompts,
            right,
            save_every=save_every,
            held_out=ROWS,
            progress=False,
            **options,
        )

    best = dict(eval_every=2, keep_best=True, lr=0.05)
    whole, stopped, again = (trainer(n, **best) for n in (4, 3, 4))
    go("whole", whole)
    stopped.callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt):
        go("run", stopped)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run/policy")
        and not (tmp_path / "run/summary.json").exists()
    )
    with (tmp_path / "run/metrics.jsonl").open("a") as f:
        f.write('{"iteration": 2}\n{"iter')
    assert go("run", again, resume=True)["resumed_from"] == 2 and not again.callbacks
    assert log(tmp_path / "run") == log(tmp_path / "whole") and files(
        tmp_path / "run", "safetensors"
    ) == files(tmp_path / "whole", "safetensors")
    assert again.best_policy.iteration == whole.best_policy.iteration is not None
    assert (tmp_path / "run/tokens.jsonl").read_bytes() == (
        tmp_path / "whole/tokens.jsonl"
    ).read_bytes()
    assert samples(tmp_path / "run") == samples(tmp_path / "whole") and len(
        samples(tmp_path / "run")
    ) == 2 + len(ROWS)


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ("linear", [1, 2 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 6]),
        (
            "cosine",
            [(1 + math.cos(x * math.pi)) / 2 for x in (0, 1 / 3, 2 / 3, 1 / 2, 2 / 3, 5 / 6)],
        ),
    ],
)
def test_a_run_with_more_steps_goes_on_at_the_rate_of_the_longer_run(
    tmp_path, capsys, schedule, rates
):
    "Its first new iteration had the rate of the old end, which is 0; the doctor took the rest for another schedule."
    for steps in (3, 6):
        made = trainer(steps, lr_schedule=schedule)
        train_in(made, tmp_path, ROWS, right, resume=steps > 3, progress=False)
    assert [row["lr"] for row in log(tmp_path)] == pytest.approx([0.01 * rate for rate in rates])
    assert "other schedule" not in capsys.readouterr().out


def test_a_log_without_a_checkpoint_is_kept_beside(tmp_path, capsys):
    """A run that was killed before its first checkpoint starts over; what it has measured is still
    there.
    """
    (tmp_path / "checkpoints").mkdir()
    for n, text in enumerate(['{"iteration": 0}\n{"iter', '{"iteration": 0}\n'], 1):
        for name in ("metrics", "tokens"):
            (tmp_path / f"{name}.jsonl").write_text(text)
        train_in(trainer(1), tmp_path, ROWS, right, save_every=None, resume=True, progress=False)
        said = capsys.readouterr().out
        for name in ("metrics", "tokens"):
            assert (
                tmp_path / f"{name}.{n}.jsonl"
            ).read_text() == text and f"kept as {name}.{n}.jsonl" in said
        assert len(log(tmp_path)) == 1
        (tmp_path / "summary.json").unlink()


def test_the_worst_finding_is_the_last_thing_a_run_says(tmp_path, capsys):
    def flat(texts):
        return [0.0] * len(texts)

    train_in(trainer(3), tmp_path / "run", ROWS, flat, progress=False)
    said = capsys.readouterr().out.rstrip().splitlines()
    assert not any("Stopped early" in line for line in said)
    assert said[-1].endswith(f"instruct-goose doctor {tmp_path / 'run'}")
    assert said[-2].startswith("WARNING  equal rewards: ")


def test_a_log_of_tokens_is_cut_back_byte_for_byte(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(
        b'{"iteration": 0, "responses": [{"x": 1.0}]}\n'
        b'{"iteration": 3, "responses": []}\n[1]\n{"iteration": 1, "resp'
    )
    runs.truncate_log(path, 3)
    assert path.read_bytes() == b'{"iteration": 0, "responses": [{"x": 1.0}]}\n'


def test_a_run_that_its_kl_ended_stays_ended_though_it_was_killed_before_it_could_say_so(tmp_path):
    made, again = (trainer(5, max_kl_to_reference=1e-6, lr=0.05) for _ in range(2))
    ended = train_in(made, tmp_path, ROWS, right, save_every=1, progress=False)
    assert (
        ended["iterations"] == 2 and "kl_to_reference is" in ended["stopped"]
    )  # of iteration 0 it is 0
    (tmp_path / "summary.json").unlink()
    assert (
        train_in(again, tmp_path, ROWS, right, save_every=1, resume=True, progress=False)["stopped"]
        == ended["stopped"]
        and again.iteration == 2
    )
    assert all(
        p.equal(q)
        for p, q in zip(made.agent.model.parameters(), again.agent.model.parameters(), strict=True)
    )  # the policy within the limit


def test_what_is_refused_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "run"
    train_in(trainer(2), out, ROWS, right, save_every=None, progress=False)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}

    def go(made, **options):
        return train_in(made, out, ROWS, right, progress=False, **options)

    with pytest.raises(FileExistsError, match="already holds a run"):
        go(trainer(2))
    with pytest.raises(ValueError, match="clip was 0.2 and is 0.3"):
        go(trainer(2, clip=0.3), resume=True)
    with pytest.raises(ValueError, match="steps was 2 and is 1"):
        go(trainer(1), resume=True)
    with pytest.raises(ValueError, match="kept no checkpoint"):
        go(trainer(3), resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    done = trainer(2)
    assert (
        go(done, resume=True)["iterations"] == 2
    )  # nothing is trained, and the trainer has what was
    assert all(
        p.equal(q)
        for p, q in zip(
            done.agent.parameters(), Agent.from_pretrained(out / "policy").parameters(), strict=True
        )
    )


def test_a_reward_that_fails_leaves_a_run_that_can_go_on(tmp_path):
    def fails(texts, broken=iter([False, False, True])):
        if next(broken):
            raise OSError("the judge is down")
        return [len(t) for t in texts]

    with pytest.raises(ValueError, match="iteration 2: .*the judge is down.*'a"):
        train_in(trainer(3), tmp_path / "run", ["a", "b c"], fails, progress=False, trial=False)
    assert len(log(tmp_path / "run")) == 2
    assert (
        train_in(
            trainer(3),
            tmp_path / "run",
            ["a", "b c"],
            lambda texts: [len(t) for t in texts],
            resume=True,
            progress=False,
        )["resumed_from"]
        == 2
    )


SUMMARY = {
    "model": "owner/name",
    "iterations": 7,
    "first": {"reward_mean": -1.0, "kl_to_reference": 0.0},
    "last": {"reward_mean": 2.5, "kl_to_reference": math.pi},
    "config": {
        "algorithm": "rloo",
        "lr": 2e-5,
        "beta": 0.1,
        "group_size": 4,
        "reward_weights": [1.0, 2.0],
    },
    "versions": {"torch": "2", "platform": "secret"},
}


@pytest.mark.parametrize(
    "base, named", [("owner/name", True), ("/home/me/model", False), (None, False)]
)
def test_a_card_says_what_was_done_and_nothing_of_the_machine(base, named):
    card = model_card(SUMMARY | {"model": base})
    _, header, body = card.split("---\n", 2)
    assert (
        ("base_model: owner/name" in header) == named == ("owner/name" in body)
        and "/home" not in card
        and "secret" not in card
    )
    assert (
        "| -1.000 " in body
        and "3.142" in body
        and "RLOO, 7 iterations" in body
        and "[1.0, 2.0]" in body
        and "beta" not in body.split("## Settings")[1].split("## To load")[0]
    )


@pytest.mark.parametrize(
    "wrong", [{"iteration": 10**9}, {"iteration": 1}, {"log": [1, 2]}, {"log": None}]
)
def test_a_checkpoint_that_was_resealed_with_nonsense_is_refused(tmp_path, wrong):
    made = trainer(2)
    train_in(made, tmp_path, ROWS, right, save_every=1, progress=False)
    tensors, record = load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"))
    record["stages"]["ppo"] |= wrong
    save_checkpoint(tmp_path / "checkpoints", tensors, record)
    (tmp_path / "summary.json").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="not that of a run"):
        train_in(trainer(2), tmp_path, ROWS, right, resume=True, progress=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_does_not_grow_with_the_log_and_refuses_another_log(tmp_path):
    train_in(trainer(6), tmp_path, ROWS, right, save_every=1, keep=9, progress=False)
    sizes = [path.stat().st_size for path in tmp_path.rglob("record.json")]
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    assert len(sizes) == 6 and max(sizes) - min(sizes) < 200 < len(before) / 6
    (tmp_path / "summary.json").unlink()
    for content in (before.replace(b'"iteration": 1', b'"iteration": 1.0'), before[:-9], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="metrics.jsonl is not the log of the run"):
            train_in(trainer(6), tmp_path, ROWS, right, resume=True, progress=False)
        assert path.read_bytes() == content
    path.write_bytes(before + b'{"iteration": 6}\n{"it')
    train_in(trainer(6), tmp_path, ROWS, right, resume=True, progress=False)
    assert path.read_bytes() == before


def test_a_resumed_run_can_be_resumed_again(tmp_path):
    "Its later checkpoints belong to the whole log, with the lines that were there before it."
    for steps in (1, 2, 3):
        train_in(
            trainer(steps), tmp_path, ROWS, right, save_every=1, resume=steps > 1, progress=False
        )
    _, record = load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"))
    state = record["stages"]["ppo"]
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    assert state["log"] == {"lines": 3, "sha256": hashlib.sha256(lines).hexdigest()}


# ---------------------------------------------------------------- what a user's code does to a run


def test_a_reward_that_changes_the_working_directory_moves_no_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "home")

    def wandering(completions, answer):
        os.chdir(tmp_path / "elsewhere")
        return right(completions, answer)

    stopped = trainer(4)
    stopped.callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt):
        train_in(stopped, "run", ROWS, wandering, save_every=1, progress=False)
    said = capsys.readouterr().err
    assert f"{tmp_path}/home/run/checkpoints" in said and "resume=True" in said
    os.chdir(tmp_path / "home")
    assert train_in(
        trainer(4), "run", ROWS, wandering, save_every=1, resume=True, progress=False
    ) == json.loads((tmp_path / "home/run/summary.json").read_text())
    assert len(log(tmp_path / "home/run")) == 4
    assert not list((tmp_path / "elsewhere").iterdir())


def broken(completions, answer):
    raise ZeroDivisionError("the user's own")


@pytest.mark.parametrize("place", [".", "link", "gone"])
def test_cleaning_up_does_not_hide_the_users_error(tmp_path, monkeypatch, place):
    "Nor does it remove what the run has not written."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    if place == ".":
        os.chdir("mine")

    def reward(completions, answer):
        if place == "gone":
            shutil.rmtree(tmp_path / "gone")
        return broken(completions, answer)

    with pytest.raises(RewardError, match="the user's own"):
        train_in(trainer(), place, ROWS, reward, progress=False, trial=False)
    assert (tmp_path / "mine").is_dir() and not list((tmp_path / "mine").iterdir())
    assert (tmp_path / "link").is_symlink()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(FileExistsError, match="run is a file"):
        train_in(trainer(), tmp_path / "run", ROWS, right, progress=False)
    assert (tmp_path / "run").read_text() == "mine"


# ---------------------------------------------------------------- a run that is broken off twice


class Late(Callback):
    "Ends the run in its third iteration by a signal, and a second one follows while it is saved."

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_annotate(self, trainer, annotations):
        if trainer.iteration != 2:
            return
        save = GPT2LMHeadModel.save_pretrained

        def interrupted(model, place, **options):
            save(model, place, **options)
            os.kill(os.getpid(), signal.SIGTERM)

        self.monkeypatch.setattr(type(trainer.agent.model), "save_pretrained", interrupted)
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_does_not_break_off_the_policy(tmp_path, monkeypatch):
    stopped = trainer(4, family="gpt2")
    stopped.callbacks.append(Late(monkeypatch))
    with pytest.raises(Terminated):
        train_in(stopped, tmp_path, ROWS, right, save_every=1, progress=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy")("a b")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


def test_an_error_in_the_middle_leaves_the_model_that_was_there(tmp_path):
    "Or no directory, where there was none."
    save_model(tiny("gpt2"), TOKENIZER, tmp_path / "old")
    before = files(tmp_path / "old", "*")

    class Breaks:
        def save_pretrained(self, directory):
            (Path(directory) / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            save_model(Breaks(), TOKENIZER, tmp_path / name)
    assert files(tmp_path / "old", "*") == before and before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_model_replaces_the_shards_of_another_and_no_other_file(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.md"):
        (tmp_path / name).write_text("{}")
    save_model(tiny("gpt2"), TOKENIZER, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert "notes.md" in names and {n for n in names if "safetensors" in n} == {"model.safetensors"}


def test_a_run_that_is_broken_off_in_its_figures_can_be_resumed(tmp_path, monkeypatch):
    "Nothing that a run writes comes after summary.json, which says that it is finished."
    config = RunSettings(output_dir=tmp_path / "run", steps=2)

    begun = []

    def work(out, manager):
        manager.stage("ppo").after_step(2, 2, lambda: {"x": 1})
        begun.append(out)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return {"figures": 1}

    with pytest.raises(KeyboardInterrupt):
        in_run_directory(config, "test", work)
    assert not (tmp_path / "run/summary.json").exists()
    config.resume = True
    assert in_run_directory(config, "test", work) == {"figures": 1}
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {"figures": 1}


def test_a_run_that_another_process_is_at_is_refused_before_it_says_where_it_goes_on(
    tmp_path, capsys
):
    config = RunSettings(output_dir=tmp_path / "run", steps=2)

    def work(out, manager):
        again = RunSettings(output_dir=out, steps=2, resume=True)
        for resume in (
            partial(in_run_directory, again, "test", work),
            partial(check_directory, again, {}),
        ):
            with pytest.raises(BlockingIOError, match="another process is at work"):
                resume()
        return {"figures": 1}

    in_run_directory(config, "test", work)
    assert "starts over" not in capsys.readouterr().out


# ---------------------------------------------------------------- what a callback remembers


class Enough(Callback):
    "Ends the run when it has seen so many iterations."

    def __init__(self, most):
        self.most = most
        self.seen = 0

    def on_iteration(self, trainer, experience, metrics):
        self.seen += 1
        return "seen enough" if self.seen == self.most else None

    def state_dict(self):
        return {"seen": self.seen}

    def check_state_dict(self, state):
        assert state.keys() == {"seen"}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_a_run_that_a_callback_ended_stays_ended_though_it_was_killed_before_its_summary(tmp_path):
    for resume in (False, True):
        made = trainer(5)
        made.callbacks.append(Enough(2))
        summary = train_in(made, tmp_path, ROWS, right, save_every=1, resume=resume, progress=False)
        assert summary["stopped"] == "iteration 1: seen enough" and len(log(tmp_path)) == 2
        assert made.callbacks[0].seen == 2
        (tmp_path / "summary.json").unlink()


# ---------------------------------------------------------------- each function on files by hand
def settings(path=None, **changes):
    return RunSettings(output_dir=path, steps=4, **changes)


def test_names_of_new_directories_are_counted(tmp_path):
    made = [new_run_dir("run", tmp_path / "deep") for _ in range(3)]
    assert [path.name for path in made] == ["run", "run-2", "run-3"]


def test_what_is_in_the_way_of_a_run(tmp_path):
    require_unused(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="a link to nothing"):
        require_unused(tmp_path / "link")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="already holds a run"):
        require_unused(tmp_path / "run")


@pytest.mark.parametrize(
    "name, begun", [("config.json", True), ("checkpoints", True), ("x", False)]
)
def test_a_directory_that_holds_a_run(tmp_path, name, begun):
    (tmp_path / name).mkdir()
    assert has_begun(tmp_path) == begun


def test_the_settings_that_a_number_may_depend_on(tmp_path):
    kept = settings_of(settings(tmp_path, keep=7, save_every=3, lr=0.5))
    assert kept["lr"] == 0.5 and kept["steps"] == 4
    assert not {"output_dir", "keep", "save_every", "resume"} & kept.keys()
    assert kept == json.loads(json.dumps(kept))


def test_settings_are_compared_with_those_of_the_file(tmp_path):
    "What the file holds beside is no setting of the command; a run may grow."
    check_same_run(settings(tmp_path), tmp_path)
    then = settings_of(settings(tmp_path, lr=0.5)) | {"files": {}}
    (tmp_path / "config.json").write_text(json.dumps(then | {"steps": 3}))
    check_same_run(settings(tmp_path, lr=0.5, keep=9), tmp_path)
    with pytest.raises(ValueError, match="lr was 0.5 and is 0.25"):
        check_same_run(settings(tmp_path, lr=0.25), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(then | {"steps": 5}))
    with pytest.raises(ValueError, match="steps was 5 and is 4"):
        check_same_run(settings(tmp_path, lr=0.5), tmp_path)


@pytest.mark.parametrize(
    "resume, summary, is_finished",
    [
        (False, {"config": {"steps": 4}}, False),
        (True, None, False),
        (True, {"config": {"steps": 4}}, True),
        (True, {"config": {"steps": 5}}, True),
        (True, {"config": None}, True),
        (True, {}, True),
    ],
)
def test_a_finished_run_has_a_summary_of_as_many_steps(
    tmp_path, capsys, resume, summary, is_finished
):
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = finished_run(settings(tmp_path, resume=resume))
    assert found == (summary if is_finished else None)
    said = f"The run in {tmp_path} is finished: nothing to do.\n"
    assert capsys.readouterr().out == (said if is_finished else "")


def test_a_finished_run_can_be_made_longer_from_its_checkpoint(tmp_path):
    (tmp_path / "summary.json").write_text('{"config": {"steps": 3}}')
    with pytest.raises(ValueError, match="kept no checkpoint"):
        finished_run(settings(tmp_path, resume=True))
    save_checkpoint(tmp_path / "checkpoints", {}, {})
    assert finished_run(settings(tmp_path, resume=True)) is None
    assert finished_run(settings(None)) is None


def test_a_run_goes_on_in_a_directory_that_is_named(tmp_path):
    found = [
        list(saving_conflicts(settings(path, resume=resume)))
        for path, resume in ((None, True), (tmp_path, True), (None, False))
    ]
    assert found == [[("output_dir", "the run to go on with, since resume is set")], [], []]


@pytest.mark.parametrize("schedule, is_said", [("constant", False), ("linear", True)])
def test_the_schedule_of_a_longer_run_is_said(capsys, schedule, is_said):
    print_new_schedule(settings(lr_schedule=schedule), 3, 2)
    said = "linear learning rate: the first 2 iterations had that of a run of 3, the rest have "
    assert capsys.readouterr().out == (f"{said}that of a run of 4\n" if is_said else "")


LINES = b'{"iteration": 0}\n{"iteration": 1}\n'


def state_of(lines=2, done=2, digest=None, config=None):
    digest = digest or hashlib.sha256(LINES).hexdigest()
    return {
        "iteration": done,
        "log": {"lines": lines, "sha256": digest},
        "identity": {"config": {} if config is None else config},
    }


def test_the_log_up_to_a_checkpoint(tmp_path):
    "Lines behind it do not matter, and a run may have begun without one."
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES + b'{"iteration": 2}\n{"ite')
    assert checked_log(state_of(), path) == [{"iteration": 0}, {"iteration": 1}]
    first = LINES[: len(LINES) // 2]
    digest = hashlib.sha256(first).hexdigest()
    assert checked_log(state_of(1, 1, digest), path) == [{"iteration": 0}]
    path.write_bytes(LINES[len(LINES) // 2 :])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert checked_log(state_of(1, 2, digest), path) == [{"iteration": 1}]


@pytest.mark.parametrize(
    "state",
    [
        state_of(lines=0),
        state_of(lines=3),
        state_of(lines=2.0),
        state_of(lines=2, done=3),  # its last line is that of another iteration
        state_of(done="2"),
        state_of(config=[]),
        state_of() | {"identity": None},
        state_of() | {"log": None},
        {},
    ],
)
def test_counts_that_make_no_sense_are_those_of_no_run(tmp_path, state):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES)
    with pytest.raises(ValueError, match="is not that of a run"):
        checked_log(state, path)


@pytest.mark.parametrize("content", [None, b"", LINES[:-1], LINES.replace(b"0", b"7")])
def test_a_log_of_other_lines_is_refused(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="its first 2 lines are not those that were written"):
        checked_log(state_of(), path)


@pytest.mark.parametrize(
    "done, kept",
    [
        (1, ['{"iteration": 0}']),
        (2, ['{"iteration": 0}', '{"step": 1}']),
        (3, ['{"iteration": 0}', '{"step": 1}', '{"iteration": 2, "step": 9}']),
    ],
)
def test_a_log_is_cut_to_its_first_rows(tmp_path, done, kept):
    "By iteration, or by step; a row without either goes, and so does a last line without its end."
    path = tmp_path / "log.jsonl"
    rows = [
        '{"iteration": 0}',
        '{"step": 1}',
        '{"iteration": 2, "step": 9}',
        '{"loss": 1.0}',
        "[0]",
    ]
    path.write_text("\n".join([*rows, '{"iteration": 0}']))
    truncate_log(path, done)
    assert path.read_text() == "".join(f"{row}\n" for row in kept)
    truncate_log(tmp_path / "none.jsonl", done)
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_of_nothing_is_kept_under_the_next_name(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    for n in (1, 2):
        path.write_text(f"{n}")
        truncate_log(path, 0)
        assert not path.exists() and (tmp_path / f"log.{n}.jsonl").read_text() == f"{n}"
        assert capsys.readouterr().out == f"log.jsonl of the run before is kept as log.{n}.jsonl.\n"
    truncate_log(path, 0)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- files that a run is given
def test_the_files_of_a_user_are_fingerprinted(tmp_path, monkeypatch):
    "By the name that was given; of a module that of its file, of a directory none."
    monkeypatch.chdir(tmp_path)
    for name in ("plug.py", "reward.py", "trainer.py", "world.py"):
        (tmp_path / name).write_text(name)

    class Given:
        plugin = ("plug.py", "none.py")
        reward = ("reward.py:score", f"{__name__}:right", "some/directory", "json:loads")
        trainer = "trainer.py:Mine"
        environment = "world.py:World"

    def digest(path):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    assert input_digests(Given()) == {
        "plug.py": digest("plug.py"),
        "reward.py": digest("reward.py"),
        __name__: digest(__file__),
        "json": digest(json.__file__),
        "trainer.py": digest("trainer.py"),
        "world.py": digest("world.py"),
    }
    assert input_digests(object()) == {}


def test_files_that_have_changed_are_named(capsys):
    print_changed_files({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"})
    said = [f"{name} has changed since this run began." for name in ("b", "c")]
    assert capsys.readouterr().out.splitlines() == said


BEGINNING = {"stage": None, "step": 0}


@pytest.mark.parametrize(
    "history, progress, expected",
    [
        (None, None, [(BEGINNING, "new")]),
        ([(BEGINNING, "new")], ("ppo", 3), [(BEGINNING, "new")]),
        ([(BEGINNING, "old")], None, [(BEGINNING, "new")]),  # no step was made with the old one
        (
            [(BEGINNING, "old")],
            ("ppo", 3),
            [(BEGINNING, "old"), ({"stage": "ppo", "step": 3}, "new")],
        ),
        (
            [(BEGINNING, "older"), ({"stage": "ppo", "step": 3}, "old")],
            ("ppo", 3),
            [(BEGINNING, "older"), ({"stage": "ppo", "step": 3}, "new")],
        ),
    ],
)
def test_the_history_of_the_files(tmp_path, history, progress, expected):
    def entries(pairs):
        return [{"from": start, "files": {"r.py": digest}} for start, digest in pairs]

    manager = CheckpointManager(tmp_path, {}, steps=9)
    if progress is not None:
        manager.latest = RunState({}, StageProgress(*progress, total=9))
    then = {} if history is None else {"file_history": entries(history)}
    assert file_history(then, {"r.py": "new"}, manager) == entries(expected)


def test_the_files_of_a_model_are_fingerprinted(tmp_path):
    "What its numbers depend on, in order; of a name on the Hub nothing is known."
    of_a_model = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json", "vocab.txt"]
    for name in (*of_a_model, "README.md", "notes.json", "optimizer.pt"):
        (tmp_path / name).write_text("{}" if name.endswith("json") else name)
    digests = directory_digests(str(tmp_path))
    assert list(digests) == of_a_model
    assert digests["vocab.txt"] == hashlib.sha256(b"vocab.txt").hexdigest()
    assert directory_digests("owner/name") == {}


def test_the_models_of_a_run_are_told_apart(tmp_path):
    for name in ("model", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"of": "{name}"}}')
        weights = {name: torch.zeros(1)}
        safetensors.torch.save_file(weights, tmp_path / name / "model.safetensors")

    class Given:
        model = str(tmp_path / "model")
        reward = (str(tmp_path / "reward"), "mine.py:score")

    digests = model_digests(Given())
    assert list(digests) == [
        "SHA-256 of the model's config.json",
        "SHA-256 of the model's model.safetensors",
        f"SHA-256 of the reward {tmp_path}/reward/config.json",
        f"SHA-256 of the reward {tmp_path}/reward/model.safetensors",
    ]
    assert len(set(digests.values())) == 4
    assert model_digests(object()) == {}


def test_the_worst_finding_and_how_many_there_are(tmp_path, capsys):
    print_worst_finding(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0, "step": 0}\n')
    print_worst_finding(tmp_path, {})
    rows = [{"iteration": i, "reward_std": 0.0, "stale_gradient": 1.0} for i in range(2)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)
    print_worst_finding(tmp_path, {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "" and said[1].startswith("ERROR  stale gradients: ")
    assert said[2].startswith("Findings: 2. For all of them: instruct-goose doctor ")
    assert len(said) == 3


def test_what_is_checked_before_a_run(tmp_path, capsys, monkeypatch):
    "Nothing is written; where the run would go on is said."
    out = tmp_path / "run"
    check_directory(settings(None), {})
    check_directory(settings(out), {})
    check_directory(settings(out, resume=True), {})
    assert not out.exists() and capsys.readouterr().out == ""
    manager = CheckpointManager(out, settings_of(settings(out)) | {"data": 1}, steps=4, every=1)
    manager.stage("ppo").after_step(3, 4, lambda: {"x": 1})
    check_directory(settings(out, resume=True), {"data": 1})
    assert capsys.readouterr().out == (
        "Going on from checkpoint-000001: 3 of 4 steps of the stage 'ppo' are done.\n"
    )
    with pytest.raises(ValueError, match="data was 1 and is 2"):
        check_directory(settings(out, resume=True), {"data": 2})
    with pytest.raises(FileExistsError, match="already holds a run"):
        check_directory(settings(out), {})
    (tmp_path / "begun").mkdir()
    begun = json.dumps(settings_of(settings(None)))
    (tmp_path / "begun/config.json").write_text(begun)
    check_directory(settings(tmp_path / "begun", resume=True), {})
    assert capsys.readouterr().out == "Nothing is saved here yet: the run starts over.\n"
