"""Verifiers: what they score, what they refuse, and what hostile answers can do.

math-verify and reasoning-gym are an extra; their tests are skipped without them.
"""

import time
from fractions import Fraction

import pytest

from instruct_goose.data.load import TASK_COLUMN, load_from_hub, load_tasks
from instruct_goose.rollouts.rewards import RewardError, score_texts
from instruct_goose.rollouts.verifiers import (
    Checker,
    CodeTests,
    MathAnswer,
    answer_in,
    boxed,
    code_in,
    math_answer,
    task_score,
)


def test_boxes_answers_and_code_are_found():
    assert boxed(r"\boxed{\frac{1}{2}} or \boxed {3}, not \boxed{4") == [r"\frac{1}{2}", "3"]
    assert boxed("none") == []
    assert answer_in("<answer>1</answer> no <answer> 2\n</answer>") == "2"
    assert answer_in(" 3 ") == "3"
    assert code_in("a\n```py\nx\n```\nb\n```python\ny = 1\n```") == "y = 1\n"
    assert code_in("x = 1") == "x = 1"


TESTS = ["assert double(2) == 4", "assert double(3) == 6", "assert double('a') == 'aa'"]
RIGHT = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    "code, share",
    [
        (RIGHT, 1),
        (f"Here it is:\n```python\n{RIGHT}\n```\nDone.", 1),
        ("def double(x):\n    return x + 2", 1 / 3),
        ("def double(x:", 0),
        ("raise SystemExit(0)", 0),
        ("import os\nos._exit(0)", 0),
        (RIGHT + "\nprint('0' * 32, 3)\nimport os\nos._exit(0)", 0),
        ("while True:\n    pass", 0),
        ("def double(x):\n    import sys\n    sys.exit(0)", 0),
        ("x = bytearray(2**31)\n" + RIGHT, 0),
        ("open('large', 'wb').write(bytes(2**21))\n" + RIGHT, 0),
        ("import json\nprint(json.loads(open(0).read()))", 0),
    ],
)
def test_code_is_scored_by_the_share_of_its_tests(code, share):
    tests = CodeTests(allow_execution=True, seconds=3.0, megabytes=400)
    assert tests.score([code], tests=[TESTS]) == [pytest.approx(share)]


def test_code_sees_no_variables_of_the_environment_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.chdir(tmp_path)
    code = "import os\nopen('here', 'w').write('x')\nseen = dict(os.environ), os.getcwd()"
    hidden = ["assert 'SECRET' not in seen[0]", f"assert seen[1] != {str(tmp_path)!r}"]
    assert CodeTests(allow_execution=True).score([code], tests=[hidden]) == [1.0]
    assert list(tmp_path.iterdir()) == []


def test_children_of_the_code_are_killed_with_it(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(4); open({str(mark)!r}, 'w').write('x')"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n" + RIGHT
    tests = CodeTests(allow_execution=True, seconds=2.0)
    assert tests.score([code], tests=[TESTS]) == [0.0]  # its child writes on after two seconds
    time.sleep(5)
    assert not mark.exists()


def test_code_is_not_run_unless_it_is_allowed(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with pytest.raises(RewardError, match="allow_execution=True"):
        score_texts(CodeTests(), ["a"], given={"completions": [code], "tests": [TESTS]})
    assert list(tmp_path.iterdir()) == []
    allowed = CodeTests(allow_execution=True)
    with pytest.raises(RewardError, match="no column 'tests' with tests: it has answer"):
        allowed.score(["a"], answer=["1"])
    with pytest.raises(RewardError, match="has no tests"):
        allowed.score(["a"], tests=[[]])


def test_a_missing_package_is_named(monkeypatch):
    with pytest.raises(ImportError, match=r"no_such_package checks these answers.*verifiers"):
        Checker("no_such_package").check({"kind": "math"})


def test_mathematics_by_value():
    pytest.importorskip("math_verify")
    same = [r"\boxed{\frac12}", r"$\frac{3}{6}$", "0.5", "The answer is 1/2.", r"\boxed{0.50}"]
    other = [r"\boxed{2} or \boxed{.5}", "two", "", "2", r"\boxed{\frac13}", "$0.51$"]
    answers = [str(Fraction(1, 2))] * (len(same) + len(other))
    assert math_answer(same + other, answers) == [1.0] * len(same) + [0.0] * len(other)
    assert math_answer([r"\boxed{x^2+2x+1}"], ["$(x+1)^2$"]) == [1.0]


def test_an_answer_that_takes_forever_costs_itself_alone():
    pytest.importorskip("math_verify")
    logged = {}
    scores = MathAnswer(seconds=3.0).score(
        ["5", "9**9**9**9**9", "5"], log_metric=logged.__setitem__, answer=["5"] * 3
    )
    assert scores == [1.0, 0.0, 1.0]
    assert logged["unread_answers"] in (0.0, pytest.approx(1 / 3))


def test_a_right_answer_that_cannot_be_read_is_an_error():
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="cannot read the right answer 'no number'"):
        math_answer(["5"], ["no number"])
    with pytest.raises(RewardError, match=r"no column 'value'.*Pass MathAnswer\(column="):
        MathAnswer("value").score(["5"], answer=["5"])


def test_tasks_come_with_their_checkers():
    pytest.importorskip("reasoning_gym")
    rows = load_tasks("leg_counting", 3)
    assert rows == load_from_hub("reasoning_gym:leg_counting:3")
    assert len(load_from_hub("reasoning_gym:leg_counting")) == 500
    assert sorted(rows[0]) == sorted(["prompt", "answer", TASK_COLUMN])
    tasks = {TASK_COLUMN: [row[TASK_COLUMN] for row in rows]}
    right = [f"So <answer>{row['answer']}</answer>" for row in rows]
    assert task_score(right, **tasks) == [1.0, 1.0, 1.0]
    assert task_score(["", "<answer>-1</answer>", "many"], **tasks) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="reasoning_gym:no_such_task"):
        load_from_hub("reasoning_gym:no_such_task")
    with pytest.raises(ValueError, match="write reasoning_gym:NAME:SIZE"):
        load_from_hub("reasoning_gym:leg_counting:many")


def test_rows_that_are_no_tasks_are_refused():
    with pytest.raises(RewardError, match="these rows are no tasks"):
        task_score(["1"], answer=["1"])
