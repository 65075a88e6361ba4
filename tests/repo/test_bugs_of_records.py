"""The bugs that the doctor is measured with act on trainers: a method of another name changes nothing."""

import sys
from pathlib import Path

import pytest

from instruct_goose.training.trainer import RLHFTrainer

sys.path.append(str(Path(__file__).parents[2] / "evidence"))
import doctor_bugs
import doctor_fresh
import doctor_unseen

BUGS = doctor_unseen.UNSEEN | doctor_bugs.BUGS | doctor_fresh.BUGS


def methods_without_use(trainer: type) -> list[str]:
    "Public methods of a changed trainer that the library's trainer does not have, and never calls."
    found = []
    for one in trainer.__mro__:
        if one is RLHFTrainer:
            return found
        found += [
            name
            for name, value in vars(one).items()
            if callable(value) and not name.startswith("_") and not hasattr(RLHFTrainer, name)
        ]
    raise AssertionError(f"{trainer} is no RLHFTrainer")


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_changes_methods_that_a_trainer_has(name):
    assert methods_without_use(BUGS[name].trainer) == []


def test_a_method_of_another_name_would_be_found():
    class Renamed(RLHFTrainer):
        def updates_of_old(self):
            pass

    assert methods_without_use(Renamed) == ["updates_of_old"]
