"""The page that compares: every cell has a fact, a source and a day, every project that was to be looked at is there."""
import re
import sys
from datetime import date
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "docs"))
import compare  # noqa: E402

ASKED = ("ARENA", "The RLHF book", "CleanRL", "Spinning Up", "TRL", "torchtune", "DI-engine", "The original instructGOOSE", compare.OURS)


def test_every_project_that_was_asked_for_has_a_section_and_courses_follow():
    page = compare.compare_page()
    assert not [name for name in ASKED if f"\n## {name}\n" not in page]
    assert len(compare.PROJECTS) > len(ASKED) and "not" in compare.PROJECTS[compare.OURS][3]


@pytest.mark.parametrize("name", compare.PROJECTS)
def test_every_cell_has_a_fact_a_source_and_a_day(name):
    repo, commit, day, facts = compare.PROJECTS[name]
    assert [q for q in compare.QUESTIONS if q in facts or q == "not"] == list(compare.QUESTIONS) and not facts.keys() - compare.QUESTIONS.keys()
    assert re.fullmatch("[0-9a-f]{40}", commit) or name == compare.OURS
    assert date(2026, 1, 1) < date.fromisoformat(day)
    assert compare.extent(name) in compare.EXTENT
    for question, (fact, sources) in facts.items():
        shown = compare.cell(name, question)
        assert fact.strip().endswith(".") and sources and "|" not in shown and "\n" not in shown, question
        found = re.findall(r"\[([^\]]+)\]\((https://[^\s()]+)\)", shown)
        packages = [s for s in sources if re.fullmatch(r"package \w+ [\d.]+", s)]
        assert all(p in shown for p in packages) and len(found) == len(sources) - len(packages) and shown.endswith(f"; {day})"), shown
        for (_, url), source in zip(found, [s for s in sources if s not in packages], strict=True):  # what moves is no source: a commit or a release, but for our own pages
            assert name == compare.OURS or re.search(r"/[0-9a-f]{40}(/|$)", url), url
            assert name != compare.OURS or (root / source).exists(), source
