"Python files of users: found by every process, and each with the modules that stand beside it."

import multiprocessing
import pickle

import pytest

from instruct_goose.core.user_files import module_name_of, run_user_file
from instruct_goose.recipes.inputs import load_reward

POOL = """
import multiprocessing
import helper

def points(text): return helper.POINTS + len(text)

def score(texts):
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        return pool.map(points, texts)
"""


def write(folder, points, method="spawn"):
    folder.mkdir()
    (folder / "helper.py").write_text(f"POINTS = {points}")
    (folder / "rewards.py").write_text(POOL.format(method=method))
    return str(folder / "rewards.py")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_pool_of_a_reward_file_finds_its_functions(tmp_path, method):
    "A function of a file is sent by its module's name; a process that is spawned imports it anew."
    file = write(tmp_path / "é 1", 1, method)
    assert load_reward(f"{file}:score")(["a", "bbb"]) == [2, 4]


@pytest.mark.parametrize("first, second", [(1, 2), (2, 1)])
def test_helpers_of_one_name_in_two_folders_are_two(tmp_path, first, second):
    files = {points: write(tmp_path / str(points), points) for points in (1, 2)}
    rewards = {points: load_reward(f"{files[points]}:points") for points in (first, second)}
    assert {points: reward("") for points, reward in rewards.items()} == {1: 1, 2: 2}
    again = load_reward(f"{files[first]}:points")
    assert again is rewards[first] and again("") == first


def test_a_helper_may_import_late(tmp_path):
    (tmp_path / "only_here.py").write_text("X = 70")
    file = tmp_path / "mine.py"
    file.write_text("def score(texts):\n    import only_here\n    return only_here.X")
    assert load_reward(f"{file}:score")([]) == 70


def test_a_file_that_has_changed_is_run_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(): return 1")
    first = run_user_file(file).f
    file.write_text("def f(): return 2  # other")
    assert (first(), run_user_file(file).f()) == (1, 2)


def test_a_module_is_found_by_its_name_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Judge: pass")
    judge = run_user_file(file).Judge()
    assert type(pickle.loads(pickle.dumps(judge))) is type(judge)
    assert type(judge).__module__ == module_name_of(file)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(type(judge)).__class__ is type(judge)
    file.unlink()
    with pytest.raises(ModuleNotFoundError):
        run_user_file(file)
