"""The page that compares: every fact has a source that does not move, and a day."""

import re
import sys
from datetime import date
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "docs"))
import compare  # noqa: E402


@pytest.mark.parametrize("name", compare.PROJECTS)
def test_every_fact_has_a_source_and_a_day(name):
    repo, commit, day, facts = compare.PROJECTS[name]
    assert [q for q in compare.QUESTIONS if q in facts or q == "not"] == list(
        compare.QUESTIONS
    ) and compare.extent(name) in compare.EXTENT
    assert date(2026, 1, 1) < date.fromisoformat(day)
    for question, (fact, sources) in facts.items():
        shown = compare.cell(name, question)
        assert (
            fact.strip().endswith(".")
            and sources
            and "|" not in shown
            and shown.endswith(f"; {day})")
        ), question
        links = [s for s in sources if not re.fullmatch(r"package \w+ [\d.]+", s)]
        if name == compare.OURS:
            assert all((root / source).exists() for source in links), question
        else:
            assert len(re.findall(r"\]\(https://[^\s()]+/[0-9a-f]{40}[/)]", shown)) == len(links), (
                shown
            )
