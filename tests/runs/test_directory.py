"A run's directory. Oracles: the files as any reader finds them, and a run that was never stopped."

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
    claim_run_dir,
    in_run_directory,
    new_run_dir,
    optional_settings,
)
from instruct_goose.runs.resume import Terminated
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
