"""The way in: the hundred lines stand alone and are linked line by line, the routes lead somewhere, and the glossary's hover text touches prose only."""
import ast
import re
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
import glossary  # noqa: E402
import lessons  # noqa: E402

index, pages = lessons.read_pages()
by_url = {p.url: p for p in pages}
program = by_url["start/hundred_lines"]


def is_program(cell): return cell.directives.get("classes") == "program"


def test_the_program_has_a_hundred_lines_and_imports_nothing_of_ours():
    source = "\n".join(c.source for c in program.cells if is_program(c))
    assert 80 < len([line for line in source.splitlines() if line.strip()]) <= 100
    imported = {a.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert imported == {"copy", "random", "torch", "transformers"}


def test_each_piece_of_the_program_names_its_lesson_and_its_function():
    links, run = build.Links([index, *pages]), [c for c in program.cells if is_program(c)][-1]
    for before, cell in zip(program.cells, program.cells[1:]):
        if not is_program(cell) or cell is run: continue  # the last piece only calls the others
        assert re.search(r"\]\(\.\./\w+/\w+\.ipynb\)", before.source), before.id
        assert any(links.find(name) for name in re.findall(r"`([\w.]+)`", before.source)), f"{before.id}: no function of the library"


def test_routes_lead_through_lessons_that_exist():
    assert not [url for _, urls in lessons.ROUTES.values() for url in urls if url not in by_url]
    assert not [url for url in lessons.PIPELINE if url not in by_url]
    for _, _, on_the_way, minutes in lessons.routes(pages):
        assert len(set(p.url for p in on_the_way)) == len(on_the_way)
        assert minutes == sum(p.minutes for p in on_the_way) > 0
    assert [lessons.long(m) for m in (5, 60, 75)] == ["5 min", "1 h 00 min", "1 h 15 min"]


@pytest.mark.parametrize("here, lit", [("training/sft", "SFT"), ("objective/kl", "PPO"), ("models/reward", "reward model")])
def test_the_map_lights_the_present_stage(here, lit):
    soup = BeautifulSoup(build.head(by_url[here], pages), "html.parser")
    assert [li.text for li in soup.select(".pipeline li.here")] == [lit]
    assert all((root / "nbs").exists() and a["href"].endswith(".html") for a in soup.select(".pipeline a"))


def test_the_cards_of_the_routes_are_links_with_minutes():
    soup = BeautifulSoup(build.route_cards(index, pages), "html.parser")
    assert len(soup.select("section")) == len(lessons.ROUTES) == 4
    assert soup.select_one("section a")["href"] == "start/from_a_reward_to_ppo.html"


def test_the_glossary_names_lessons_that_exist():
    assert not [term for term, (_, url, _) in glossary.TERMS.items() if url not in by_url]
    made = BeautifulSoup(glossary.glossary_page({p.url: p.title for p in pages}), "html.parser")
    assert len({e["id"] for e in made.select(".entry")}) == len(glossary.TERMS)


def test_hover_marks_each_term_once_and_leaves_code_alone():
    text = "The advantage `advantage` and $advantage$, [a rollout](x.ipynb).\n\n# GAE\n\n| GAE |\n\nAdvantages, rollouts. A KL-penalty, GAE."
    seen = set()
    made = glossary.hover(text, seen, "../glossary.html")
    assert seen == {"advantage", "rollout", "GAE"}
    soup = BeautifulSoup(made, "html.parser")
    assert [a.text for a in soup.select("a.term")] == ["advantage", "rollouts", "GAE"]
    assert soup.a["href"] == "../glossary.html#term-advantage" and soup.a["title"] == glossary.TERMS["advantage"][0]
    for untouched in ("`advantage`", "$advantage$", "[a rollout](x.ipynb)", "# GAE", "| GAE |", "KL-penalty"): assert untouched in made
    assert glossary.hover("an advantage", seen, "") == "an advantage"


def test_numbers_to_expect_are_folded():
    made = build.folded("**Time**: 5 minutes.\n\n**Numbers to expect**, by hand:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nMore.")
    soup = BeautifulSoup(made, "html.parser")
    assert soup.details.summary.text == "Numbers to expect, by hand" and "| 1 | 2 |" in soup.details.text and "More." not in soup.details.text
    assert build.folded("**Numbers to expect**: one.") == "**Numbers to expect**: one."


def test_a_plain_word_is_no_name_of_another_lesson():
    links = build.Links([index, *pages])
    assert links.find("whiten") and links.find("clipped_objective") and links.find("RLHFTrainer")
    assert links.find("rows", by_url["models/data"]) is None or links.find("rows", by_url["models/data"]).startswith("instruct_goose.models.data.")
    assert links.find("temperature") is None and links.find("step") is None


def test_cards_show_code_as_code():
    assert build.coded("a `b` < c") == "a <code>b</code> &lt; c"
