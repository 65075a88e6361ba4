"""The way in: the hundred lines stand alone and are linked line by line, and the glossary's hover text touches prose only."""

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
import quizzes  # noqa: E402

index, pages = lessons.read_pages()
by_url = {p.url: p for p in pages}
program = by_url["learn/hundred_lines"]


def is_program(cell):
    return cell.directives.get("classes") == "program"


def test_the_program_has_a_hundred_lines_and_imports_nothing_of_ours():
    source = "\n".join(c.source for c in program.cells if is_program(c))
    assert 80 < len([line for line in source.splitlines() if line.strip()]) <= 100
    imported = {
        a.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names
    }
    imported |= {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert imported == {"copy", "random", "torch", "transformers"}


def test_each_piece_of_the_program_names_its_lesson_and_its_function():
    links = build.Links([index, *pages])
    run = [c for c in program.cells if is_program(c)][-1]
    for before, cell in zip(program.cells, program.cells[1:]):
        if not is_program(cell) or cell is run:
            continue  # the last piece only calls the others
        assert re.search(r"\]\((\.\./[\w/]+/)?\w+\.ipynb\)", before.source), before.id
        assert any(links.find(name) for name in re.findall(r"`([\w.]+)`", before.source)), (
            f"{before.id}: no function of the library"
        )


def test_the_glossary_names_lessons_that_exist():
    assert not [term for term, (_, url, _) in glossary.TERMS.items() if url not in by_url]
    made = BeautifulSoup(glossary.glossary_page({p.url: p.title for p in pages}), "html.parser")
    assert len({e["id"] for e in made.select(".entry")}) == len(glossary.TERMS)


def test_hover_marks_each_term_once_and_leaves_code_alone():
    text, seen = (
        "The advantage `advantage` and $advantage$, [a rollout](x.ipynb).\n\n# GAE\n\n| GAE |\n\nAdvantages, rollouts. A KL-penalty, GAE.",
        set(),
    )
    made = BeautifulSoup(glossary.hover(text, seen, "../glossary.html"), "html.parser")
    assert [a.text for a in made.select("a.term")] == ["advantage", "rollouts", "GAE"] and seen == {
        "advantage",
        "rollout",
        "GAE",
    }
    assert (
        made.a["href"] == "../glossary.html#term-advantage"
        and glossary.hover("an advantage", seen, "") == "an advantage"
    )


# --- questions at the end of each part ---------------------------------------------------------------------------------
def anchors(page):
    return {
        build.heading_slug(h)
        for c in page.cells
        if c.kind == "markdown"
        for h in re.findall(r"^#+ (.+)$", c.source, re.M)
    }


@pytest.mark.parametrize("part", quizzes.QUIZZES)
def test_each_question_is_taught_where_its_link_leads(part):
    assert part in lessons.COURSE.values() and len(quizzes.QUIZZES[part]) >= 10
    for question, answer, where in quizzes.QUIZZES[part]:
        url, _, section = where.partition("#")
        assert question.endswith((".", "?")) and answer.endswith((".", "!")) and url in by_url, (
            question
        )
        assert not section or section in anchors(by_url[url]), (where, sorted(anchors(by_url[url])))


def test_the_answers_are_folded():
    made = BeautifulSoup(quizzes.quiz_page({p.url: p.title for p in pages}), "html.parser")
    assert len(made.select("details.quiz")) == sum(
        map(len, quizzes.QUIZZES.values())
    ) >= 50 and not made.select("details[open]")


# --- a lesson elsewhere ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("online", [True, False])
def test_a_lesson_is_downloaded_and_opens_in_colab_where_the_repository_can_be_reached(
    monkeypatch, online
):
    monkeypatch.setattr(build, "ONLINE", online)
    links = {
        a.text: a["href"]
        for a in BeautifulSoup(build.head(by_url["learn/kl"], pages), "html.parser").select(
            ".lesson-facts a"
        )
    }
    assert links["notebook"] == "../notebooks/learn/06_kl.ipynb"
    there = {"open in Colab": f"{build.COLAB}/learn/06_kl.ipynb"}
    assert {name: at for name, at in links.items() if "Colab" in name} == (there if online else {})


@pytest.mark.parametrize("online", [True, False])
def test_a_link_to_a_file_leads_to_the_repository_or_to_a_copy(monkeypatch, online):
    monkeypatch.setattr(build, "ONLINE", online)
    links = build.Links([index, *pages])
    made = links.apply("[the licence](../../LICENSE)", by_url["learn/kl"])
    address = re.search(r"\((.*)\)", made)[1]
    if online:
        assert address == f"{build.REPO}/blob/{build.BRANCH}/LICENSE"
    else:
        file = build.BUILD / "pages/learn" / address
        assert file.resolve() == build.ROOT / "LICENSE"


def test_every_notebook_installs_the_package_in_colab():
    without = [
        p.url
        for p in [index, *pages]
        if not any('"google.colab" in sys.modules' in c.source for c in p.cells)
    ]
    assert not without, f"copy the second cell of another notebook: {without}"
