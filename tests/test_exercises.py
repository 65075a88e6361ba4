"""instruct_goose.exercises: the table is the lessons', every checker knows right from wrong in an empty directory, and progress is never lost."""

import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import jaxtyping
import pytest
import torch

root = Path(__file__).parents[1]
sys.path.insert(0, str(root / "docs"))
import exercise_table  # noqa: E402
from lessons import read_pages  # noqa: E402

from instruct_goose import exercises, lesson  # noqa: E402

ALL = exercises.all_exercises()
CHECKED = [n for n, e in ALL.items() if e.check]
RIGHT = {  # where the lesson's answer is a text
    "reading_the_log.charged_kl": "def charged_kl(reward, total_reward, beta): return (reward - total_reward) / beta",
    "reading_the_log.left": "def left(x): return x[-max(3, len(x) // 4):].mean() / x[:3].mean()",
    "failure_gallery.place": "from instruct_goose.objective.masks import last_index\ndef place(scores, mask):\n    made = torch.zeros(mask.shape)\n    made[torch.arange(len(mask)), last_index(mask)] = scores\n    return made",
    "from_goose.repaired": "def repaired(r, A, e): return -torch.min(r * A, r.clamp(1 - e, 1 + e) * A)",
    "from_torchtune.centred_advantages": "def centred_advantages(v, r, g, l, m):\n    A, _ = estimate_advantages(v, r, g, l, m)\n    return torch.where(m, A - masked_mean(A, m), 0.)",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    "Nothing of the repository is here, and nothing of the reader's own is touched."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSTRUCT_GOOSE_PROGRESS", str(tmp_path / "deep/progress.json"))
    return tmp_path / "deep/progress.json"


# --- the table --------------------------------------------------------------------------------------------------------
def test_the_table_is_what_the_lessons_say():
    assert json.loads(exercise_table.TABLE.read_text("utf-8")) == exercise_table.table(), (
        "run make save, or docs/exercise_table.py"
    )


def test_no_exercise_is_left_out():
    "Counted another way: circles in the lessons' text, and cells that call a checker on a name."
    pages = read_pages()[1]
    starred = sum(
        len(re.findall("[●○]{3}", c.source)) for p in pages for c in p.cells if c.kind == "markdown"
    )
    assert sum(e.stars > 0 for e in ALL.values()) == starred > 100
    called = {
        (p.path.name, m[1])
        for p in pages
        for c in p.cells
        if c.kind == "code" and "hide" not in c.directives
        if (m := re.search(r"^(?:print\()?check(?:_\w+)?\((\w+)\)\)?$", c.source, re.M))
    }
    known = {(Path(e.lesson).name, e.what) for e in ALL.values() if e.what}
    assert called <= known and len(known) == len(CHECKED) + len(exercise_table.IN_ITS_LESSON)
    assert all(
        e.what == "my_rounds"
        for e in ALL.values()
        if (Path(e.lesson).name, e.what) in known - called
    ), known - called


# --- the checkers -----------------------------------------------------------------------------------------------------
def space_of(e):
    return (
        {n: getattr(lesson, n) for n in lesson.__all__}
        | {"torch": torch}
        | (vars(import_module(e.module)) if e.module else {})
    )


@cache
def answers(name):
    "What the lesson begins with, and its answer."
    e = ALL[name]
    page = next(
        p
        for p in read_pages()[1]
        if p.path.name == Path(e.lesson).name and p.path.parent.name in e.lesson
    )
    at = [
        i
        for i, c in enumerate(page.cells)
        if "olution" in c.directives.get("code-summary", "")
        and e.solution
        and e.solution in c.source
    ]
    source = RIGHT[name] if name in RIGHT else exercise_table.needed(page, at[0], e.what)
    made = []
    for text in (
        exercise_table.needed(
            page, next(i for i, c in enumerate(page.cells) if c.source == e.begin), e.what
        ),
        source,
    ):
        exec(text, space := space_of(e))
        made.append(space[e.what])
    return made


def off(x):
    "Of the same kind, and wrong."
    if torch.is_tensor(x):
        return ~x if x.dtype == torch.bool else 2 * x + 1
    if isinstance(x, bool):
        return not x
    if isinstance(x, int | float):
        return 2 * x + 1
    if isinstance(x, list | tuple):
        return type(x)(map(off, x))
    return None


@pytest.mark.parametrize("name", CHECKED)
def test_a_right_answer_passes_and_a_wrong_one_does_not(name, monkeypatch):
    if name == "your_own.changes":
        monkeypatch.setattr(
            jaxtyping.config, "jaxtyping_disable", True
        )  # paths as text, which only a test minds
    begin, right = answers(name)
    before = torch.get_rng_state()
    assert exercises.check(name, begin) != "right" and "done" not in exercises.progress()[name]
    if not isinstance(right, type):
        assert exercises.check(name, lambda *args: off(right(*args))) != "right"
    assert exercises.check(name, right) == "right"
    assert exercises.progress()[name]["done"] and torch.equal(before, torch.get_rng_state())
    assert exercises.check(name, begin) != "right" and "done" in exercises.progress()[name], (
        "what is done stays done"
    )


def test_what_differed_is_said():
    wrong = exercises.check(
        "k3",
        lambda logprobs, ref_logprobs: (ref_logprobs - logprobs).exp() + logprobs - ref_logprobs,
    )
    lines = wrong.splitlines()
    assert lines[0].startswith("constant: not zero") and repr(wrong) == wrong
    assert lines[1:3] == [
        "your function was given",
        "    logprobs = tensor([-0.3000, -1.1000, -4.0000], dtype=torch.float64)",
    ]
    assert lines[-4] == "it returned" and lines[-3].startswith(
        "    tensor([1.3066, 1.0499, 3.3530]"
    )  # the answer and 1
    assert lines[-2] == "expected" and lines[-1].startswith(
        "    tensor([0.3066, 0.0499, 2.3530]"
    )  # e^(−ℓ) − 1 + ℓ at .9, −.3, −1.6


def test_an_error_is_placed_in_the_readers_code():
    def my_k3(logprobs, ref_logprobs):
        return logprobs / nothing  # noqa: F821

    wrong = exercises.check("k3", my_k3)
    assert (
        wrong.startswith("it raised NameError")
        and "it stopped in line" in wrong
        and wrong.endswith("return logprobs / nothing  # noqa: F821")
    )
    assert exercises.check("trackers.best", int).startswith(
        ("it raised", "the checker could not go on")
    )


# --- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kl.k3", "k3", "my_k3", "KL.k3", "kl.my_k3"])
def test_an_exercise_has_several_names(name):
    assert exercises.find(name).name == "kl.k3"


@pytest.mark.parametrize(
    "name, said",
    [
        ("kl.k4", "nearest are kl.k3"),
        ("cliped_objective", "policy_loss.objective"),
        ("", "there is no exercise ''"),
        ("rewards", "kl.rewards or classic_control.rewards: say which"),
        ("masks.k3", "there is no exercise 'masks.k3'; nearest are kl.k3"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(name, said):
    for ask in (
        exercises.show,
        exercises.hint,
        exercises.solution,
        lambda n: exercises.check(n, len),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            ask(name)


def test_what_has_no_checker_here_says_why():
    with pytest.raises(
        ValueError, match=r"recorded in the repository\): do it in nbs/guides/doctor"
    ):
        exercises.check("doctor.answers", {})
    with pytest.raises(ValueError, match="its lesson has none"):
        exercises.check("read_a_loop", {})
    with pytest.raises(ValueError, match="no lesson 'kll' has exercises: choose from .* kl,"):
        exercises.table("kll")


# --- progress ---------------------------------------------------------------------------------------------------------
def test_hints_come_one_by_one_and_are_remembered(place):
    first, second = ALL["kl.k3"].hints
    assert exercises.hint("k3") == f"Hint 1 of 2. {first}"
    for _ in range(2):
        assert exercises.hint("k3") == f"Hint 1 of 2. {first}\nHint 2 of 2. {second}"
    assert json.loads(place.read_text("utf-8")) == {"kl.k3": {"hints": 2}} and "direction" in second
    assert "no hints" in exercises.hint(
        "change_the_loss.patient"
    ) and "- logprobs" not in exercises.solution("change_the_loss.patient")


def test_progress_survives_a_new_process_which_does_not_load_torch():
    exercises.check("k3", lambda l, q: (q - l).exp() - 1 + l - q), exercises.hint("kl.rewards")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from instruct_goose import exercises as e; print(e.table('kl')); print(e.table(still_open=True).count('\\n')); assert 'torch' not in sys.modules",
        ],
        capture_output=True,
        text=True,
        cwd=root,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "1 of 3 done" and lines[4] == str(len(ALL) - 1), (
        done
    )
    assert re.fullmatch(r"done +kl\.k3 +●○○  Write k3 \(tried 1\)", lines[1]) and lines[
        2
    ].startswith("open")


@pytest.mark.parametrize("data", [b"", b'["kl.k3"]', b'{"kl.k3": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_a_broken_file_is_refused_by_name_and_kept(place, data):
    place.parent.mkdir()
    place.write_bytes(data)
    for ask in (exercises.hint, lambda name: exercises.check(name, len)):
        with pytest.raises(ValueError, match="progress.json is no table of progress"):
            ask("k3")
    assert place.read_bytes() == data


def test_a_crash_in_the_middle_of_writing_leaves_the_old_file(place, monkeypatch):
    exercises.hint("k3")
    before = place.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match="not noted: .*No space left"):
        said = exercises.check("k3", lambda l, q: l)
    assert said.startswith("not yet") and place.read_bytes() == before


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command_lists_and_shows(capsys):
    from instruct_goose.cli.main import main

    for argv, said in (
        (["kl"], "0 of 3 done"),
        ([], "0 of 119 done; 13 more"),
        (["k3"], "kl.k3 · Write k3 · ●○○"),
        (["k3", "--hint"], "Hint 1 of 2"),
        (["k3", "--solution"], "def my_k3"),
        (["kl", "--still-open"], "0 of 3 done"),
    ):
        main(["exercises", *argv])
        assert capsys.readouterr().out.startswith(said)
    with pytest.raises(SystemExit, match="nearest are kl.k3"):
        main(["exercises", "kl.k4"])
