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
import narrow  # noqa: E402
import quizzes  # noqa: E402

index, pages = lessons.read_pages()
by_url = {p.url: p for p in pages}
program = by_url["learn/hundred_lines"]


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
        assert re.search(r"\]\((\.\./[\w/]+/)?\w+\.ipynb\)", before.source), before.id
        assert any(links.find(name) for name in re.findall(r"`([\w.]+)`", before.source)), f"{before.id}: no function of the library"


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


# --- questions at the end of each part ---------------------------------------------------------------------------------
def anchors(page): return {build.heading_slug(h) for c in page.cells if c.kind == "markdown" for h in re.findall(r"^#+ (.+)$", c.source, re.M)}


@pytest.mark.parametrize("part", quizzes.QUIZZES)
def test_each_question_is_taught_where_its_link_leads(part):
    assert part in lessons.COURSE.values() and len(quizzes.QUIZZES[part]) >= 10
    for question, answer, where in quizzes.QUIZZES[part]:
        url, _, section = where.partition("#")
        assert question.endswith((".", "?")) and answer.endswith((".", "!")) and url in by_url, question
        assert not section or section in anchors(by_url[url]), (where, sorted(anchors(by_url[url])))


def test_the_answers_are_folded_and_the_parts_lead_to_them():
    made = BeautifulSoup(quizzes.quiz_page({p.url: p.title for p in pages}), "html.parser")
    assert len(made.select("details.quiz")) == sum(map(len, quizzes.QUIZZES.values())) >= 50 and not made.select("details[open]")
    last = [p for p in pages if p.group == "The objective"][-1]
    cells = build.staged(last, pages, build.Links([index, *pages]))["cells"]
    assert any('href="../quiz.html#the-objective"' in c["source"] for c in cells)


# --- a lesson elsewhere ----------------------------------------------------------------------------------------------
def test_a_lesson_can_be_opened_in_colab_and_downloaded():
    made = BeautifulSoup(build.head(by_url["learn/kl"], pages), "html.parser")
    links = {a.text: a["href"] for a in made.select(".lesson-facts a")}
    assert links["open in Colab"] == f"{build.COLAB}/learn/06_kl.ipynb"
    assert links["notebook"] == "../notebooks/learn/06_kl.ipynb"


# --- figures on a phone ----------------------------------------------------------------------------------------------
def drawing(*axes, legend=""):
    group = lambda i, l, t, r, b: (f'<g id="axes_{i}"><g id="patch_{i}"><path d="M {l} {b} L {r} {b} L {r} {t} L {l} {t} z"/></g>'
                                   f'<g id="line_{i}"><path d="M -500 3 L 900 4"/></g></g>')
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 200"><g id="figure_1">'
            + "".join(group(i, *a) for i, a in enumerate(axes, 1)) + legend + "</g></svg>")


def test_panels_are_stacked_on_a_phone():
    left, right, below = (40, 20, 220, 80), (290, 20, 480, 80), (40, 120, 480, 180)
    assert narrow.windows(drawing(left)) == [] and narrow.stacked(drawing(left), "x-") == ""
    assert narrow.windows(drawing(left, (40, 120, 220, 180))) == []  # they are stacked already
    made = narrow.windows(drawing(right, left))
    assert [names for names, _ in made] == [["axes_2"], ["axes_1"]]  # from the left, whatever their order in the file
    (l0, _, r0, _), (l1, _, r1, _) = (where for _, where in made)
    assert l0 == 0 and 220 <= r0 < 290 and 220 < l1 <= 290 - 30 and r1 == 500  # each with its labels, none with the other's lines
    assert [n for n, _ in narrow.windows(drawing(left, right, below))] == [["axes_1"], ["axes_2"], ["axes_3"]]
    assert [n for n, _ in narrow.windows(drawing(left, right, right))] == [["axes_1"], ["axes_2", "axes_3"]]  # twins
    soup = BeautifulSoup(narrow.stacked(drawing(left, right, legend='<g id="legend_1"/>'), "c-"), "html.parser")
    assert [u["href"] for u in soup.select("use")] == ["#c-axes_1", "#c-axes_2", "#c-legend_1"]


def test_every_notebook_installs_the_package_in_colab():
    without = [p.url for p in [index, *pages] if not any('"google.colab" in sys.modules' in c.source for c in p.cells)]
    assert not without, f"copy the second cell of another notebook: {without}"
