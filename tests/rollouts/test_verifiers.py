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
    CodeTest,
    CodeTests,
    MathAnswer,
    answer_in,
    boxed,
    code_in,
    math_answer,
    read_test,
    task_score,
    value_from,
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
    tests = CodeTests(allow_execution=True, seconds=3.0, megabytes=400, partial=1.0)
    assert tests.score([code], tests=[TESTS]) == [pytest.approx(share)]


def test_a_share_of_the_tests_is_paid_a_tenth_unless_all_pass():
    half = "def double(x):\n    return 4"
    for partial, paid in ((None, 0.1 / 3), (0.5, 0.5 / 3), (0.0, 0.0)):
        given = {} if partial is None else {"partial": partial}
        verifier = CodeTests(allow_execution=True, **given)
        assert verifier.score([half, RIGHT], tests=[TESTS] * 2) == [pytest.approx(paid), 1.0]


# Each attack knows how the verifier works, but not how to double. It is told nothing of the
# tests beyond what its process is sent.
CHANNEL = """
import json, os, sys
job = sys._getframe(1).f_globals["job"]
results = sys._getframe(1).f_globals["results"]
"""
EQUAL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __hash__(self): return hash(4)
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __repr__(self): return "4"
def double(x): return Equal({value})
"""
ATTACKS = {
    "equals everything": EQUAL.format(base="", value=""),
    "an int that equals everything": EQUAL.format(base="(int)", value="1"),
    "a text that equals everything": EQUAL.format(base="(str)", value="'b'"),
    "a list that equals everything": EQUAL.format(base="(list)", value=""),
    "an index that is another each time": "class N:\n    def __index__(self): raise SystemExit(0)\n"
    "def double(x): return N()",
    "writes the verdict itself": CHANNEL
    + "print(json.dumps([[] for _ in job['tests']]), file=results, flush=True)\nos._exit(0)",
    "writes true for each test": CHANNEL
    + "print(json.dumps([[True]] * len(job['tests'])), file=results, flush=True)\nos._exit(0)",
    "writes passed for each test": CHANNEL
    + "print(json.dumps([['true', 'true']] * 3), file=results, flush=True)\nos._exit(0)",
    "sends what decodes to no value": CHANNEL
    + """print(json.dumps([['{"eval": ["1"]}']] * 3), file=results, flush=True)\nos._exit(0)""",
    "sends lists without end": CHANNEL
    + "results.write('[' * 500000)\nresults.flush()\nos._exit(0)",
    "sends a value without end": CHANNEL
    + "print(json.dumps(['[' * 90000] * 3), file=results, flush=True)\nos._exit(0)",
    "sends more than it may": CHANNEL + "while True: os.write(results.fileno(), b'4' * 9999)",
    "sends guesses one after the other": CHANNEL
    + "for k in range(9): print(json.dumps([[str(k)]] * 3), file=results, flush=True)\nos._exit(0)",
    "replaces json": 'import json\njson.dumps = lambda *_: \'[["5"], ["5"], ["5"]]\'\n'
    "def double(x): return 0",
    "replaces the sender's functions": CHANNEL
    + "sys._getframe(1).f_globals['outputs'] = lambda *_: []\ndef double(x): return 0",
    "overrides builtins": "import builtins\nbuiltins.abs = builtins.len = lambda x: 4\n"
    "builtins.isinstance = lambda *_: True\ndef double(x): return 0",
    "looks into its process": CHANNEL
    + """
import gc
seen = [str(job['tests']), str(sys.argv), str(sys.orig_argv), str(dict(os.environ))]
seen += [each for each in gc.get_objects() if isinstance(each, dict) and "tests" in each]
with open("/proc/self/environ") as file: seen.append(file.read())
text = str([each for each in seen if isinstance(each, str)])
def double(x):
    for right in (4, 6, 'aa'):
        if "== " + repr(right) in text: return right
""",
    "looks into the frames of its callers": """
import sys
def double(x):
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, str) and "== " in value and "def " not in value:
                return eval(value.partition("== ")[2])
        frame = frame.f_back
""",
    "forks, and both write": CHANNEL + "\nanswer = [['0']] * 3 if os.fork() else [['7']] * 3\n"
    "print(json.dumps(answer), file=results, flush=True)\nos._exit(0)",
    "ends in its first call": "def double(x):\n    import os\n    os._exit(0)",
    "ends as its value is sent": "import os\nclass D(dict):\n    def items(self): os._exit(0)\n"
    "def double(x): return D()",
    "catches the end of the time": "import signal\nsignal.signal(signal.SIGTERM, print)\n"
    "signal.signal(signal.SIGXCPU, print)\nwhile True: pass",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes_a_test_without_its_output(name):
    verifier = CodeTests(allow_execution=True, seconds=3.0, megabytes=400)
    assert not any(read_test(each).is_weak for each in TESTS)
    assert verifier.share_passed(ATTACKS[name], TESTS) == 0


def test_tolerances_and_lengths_are_computed_where_the_program_cannot_reach_them():
    tests = [
        "assert abs(double(2) - 4) < 0.5",
        "import math\nassert math.isclose(double(2), 4)",
        "assert len(double('abc')) == 6",
        "assert isinstance(double(2), int) and double(2) == 4",
        "assert double(2) in (4, 4.0)",
        "assert sorted(double('ab')) == ['a', 'a', 'b', 'b']",
    ]
    verifier = CodeTests(allow_execution=True)
    assert not any(read_test(each).is_weak for each in tests)
    assert verifier.share_passed(RIGHT, tests) == 1
    yes_man = EQUAL.format(base="", value="") + "abs = len = sorted = lambda *_: 4\n"
    assert verifier.share_passed(yes_man + ATTACKS["overrides builtins"], tests) == 0
    assert verifier.share_passed(yes_man, tests) == 0


PROGRAM = """
from collections import Counter, defaultdict
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
class Number(int): pass
def same(x): return x
def add(a, b=1): return a + b
def sort(xs): xs.sort()
def count(xs): return Counter(xs)
def number(x): return Number(x)
def fail(x): raise ValueError(x)
def half(x): return x / 2
table = {1: [2, (3, None)], "a": {4, 5}}
"""
DIVIDED = [
    *("assert add(2) == 3", "assert 3 == add(2)", "assert add(2) == 4", "assert add(2, b=2) != 3"),
    *("assert add(1.5, 1) == 2.5", "assert add(True) == 2", "assert add('a', 'b') == 'ab'"),
    *("assert 0 < add(1) < 3", "assert not add(-1)", "assert add(-1) or add(1)", "assert same([])"),
    *("assert same(None) is None", "assert same((1, 2)) == [1, 2]", "assert same((1,)) == (1,)"),
    *("assert same({1: (2,)}) == {1: (2,)}", "assert same({1: 2}) == {'1': 2}"),
    *("assert same({1, 2}) == {2, 1}", "assert same(frozenset([1])) == {1}"),
    *("assert same(b'a\\xff') == b'a\\xff'", "assert same(b'a') == 'a'"),
    *("assert same(float('nan')) == float('nan')", "assert same(float('inf')) == float('inf')"),
    *("assert same(-0.0) == 0", "assert same(.1 + .2) == .3", "assert same(10**30) == 10"),
    *(
        "assert round(half(3), 1) == 1.5",
        "assert abs(half(3) - 1.4) < .2",
        "assert half(3) // 1 == 1",
    ),
    *("assert count('aab') == {'a': 2, 'b': 1}", "assert number(3) == 3", "assert number(3) == 4"),
    *("assert table[1][1] == (3, None)", "assert table['a'] == {5, 4}, 'a message'"),
    *("x = [3, 1]\nsort(x)\nassert x == [1, 3]", "x = [3, 1]\nsort(x)\nassert x == [3, 1]"),
    "s = Stack()\ns.push(1)\ns.push('b')\nassert s.pop() == 'b'\nassert s.pop() == 1",
    *("assert fail(1) == 1", "assert missing(1) == 1", "assert [add(1), add(2)] == [2, 3]"),
    *("assert same('\\ud800') == '\\ud800'", "assert same(1 + 2j) == 1 + 2j"),
]
WEAK = [
    *("assert add(2) == add(1) + 1", "assert all(add(k) == k + 1 for k in range(3))"),
    *("for k in range(3):\n    assert add(k) == k + 1", "assert add(2) == 2 * 2", "assert True"),
    *("def check(f):\n    assert f(2) == 3\ncheck(add)", "right = 3\nassert add(2) == right"),
    *("same_as = add(2) == 3\nassert same_as", "import copy\nassert copy.copy(add(2)) == 3"),
    *(
        "d = add(2) - 3\nassert d == 0",
        "try:\n    fail(1)\nexcept ValueError:\n    pass",
        "fail(1)",
    ),
    *("assert 'a' * add(1) == 'aa'", "assert max(1, add(1)) == 2", "assert __import__('os')"),
    *("assert (lambda x: x)(add(1)) == 2", "assert abs(add(1) - add(2)) < 2"),
]


def test_divided_tests_and_weak_ones_judge_an_honest_program_as_python_does():
    tests = DIVIDED + WEAK
    by_python = []
    for test in tests:
        space = {}
        exec(PROGRAM, space)
        try:
            exec(test, space)
        except Exception:
            by_python.append(False)
        else:
            by_python.append(True)
    read = [read_test(each) for each in tests]
    assert [each.is_weak for each in read] == [False] * len(DIVIDED) + [True] * len(WEAK)
    answers = CodeTests(allow_execution=True).answers_of(PROGRAM, [each.steps for each in read])
    judged = [test.passes(each) for test, each in zip(read, answers, strict=True)]
    wrong = [test for test, a, b in zip(tests, judged, by_python, strict=True) if a != b]
    assert wrong == []
    assert 10 < sum(by_python) < len(tests) - 10


def test_the_program_is_not_sent_what_its_outputs_are_compared_with():
    for test in DIVIDED:
        texts = [text for kind, text in read_test(test).steps if kind == "value"]
        assert not any("==" in text or "<" in text for text in texts), test
    assert "7391" not in str(read_test("assert f(2) == 7391").steps)
    assert "7391" not in str(read_test("s = f(2)\nassert abs(s.x[0] - 7391) <= 1").steps)


def test_weak_tests_are_logged_and_a_test_that_is_no_python_is_refused():
    logged = {}
    verifier = CodeTests(allow_execution=True)
    rows = [TESTS[:1], ["assert double(1) == double(1)"]]
    assert verifier.score([RIGHT] * 2, logged.__setitem__, tests=rows) == [1.0, 1.0]
    assert logged == {"weak_tests": 0.5}
    with pytest.raises(RewardError, match="'assert double\\(' is no Python"):
        verifier.score([RIGHT], tests=[["assert double("]])


def test_a_process_that_does_not_start_is_not_a_wrong_answer():
    with pytest.raises(RewardError, match=r"was not graded.*16 MB.*megabytes="):
        CodeTests(allow_execution=True, megabytes=16).score([RIGHT], tests=[TESTS])


@pytest.mark.parametrize(
    "sent",
    [{"eval": ["1"]}, {}, {"list": [1], "set": [2]}, {"complex": [1]}, {"set": [[1]]}, {"dict": 1}],
)
def test_what_no_value_is_written_as_is_refused(sent):
    with pytest.raises((ValueError, TypeError, KeyError)):
        value_from(sent)
    assert not CodeTest([("value", "f()")], [("output0", 1)]).passes(sent)


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
    tests = CodeTests(allow_execution=True, seconds=3.0)
    assert tests.score([code], tests=[TESTS]) == [1.0]  # its child would write after four seconds
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
