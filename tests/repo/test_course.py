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
import colab  # noqa: E402
import find  # noqa: E402
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


def test_printed_paths_of_lessons_are_links():
    links, page = build.Links([index, *pages]), by_url["guides/doctor"]
    made = build.linked({"output_type": "stream", "name": "stdout", "text": ["a < b\n  lesson nbs/learn/06_kl.ipynb\nnbs/learn/99_such.ipynb\n"]}, page, links)
    soup = BeautifulSoup(made["data"]["text/html"], "html.parser")
    assert [(a["href"], a.text) for a in soup.select("a")] == [("../learn/kl.html", "nbs/learn/06_kl.ipynb")]
    assert soup.text == "a < b\n  lesson nbs/learn/06_kl.ipynb\nnbs/learn/99_such.ipynb"
    plain = {"output_type": "stream", "name": "stdout", "text": ["no path"]}
    assert build.linked(plain, page, links) == plain


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
    soup = BeautifulSoup(build.folded("**Time**: 5 minutes.\n\n**Numbers to expect**: one,\nand two.\n\nMore."), "html.parser")
    assert "two" in soup.details.text and "More." not in soup.details.text
    for open_ in (": none to remember.", ", of the real model, below."): assert build.folded("**Numbers to expect**" + open_) == "**Numbers to expect**" + open_


def test_a_plain_word_is_no_name_of_another_lesson():
    links = build.Links([index, *pages])
    assert links.find("whiten") and links.find("clipped_objective") and links.find("RLHFTrainer")
    assert links.find("rows", by_url["reference/data/load"]) is None or links.find("rows", by_url["reference/data/load"]).startswith("instruct_goose.data.load.")
    assert links.find("temperature") is None and links.find("step") is None


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


def test_text_of_a_single_panel_grows_on_a_phone():
    assert narrow.text_factor(300) == 1. and narrow.text_factor(518) == pytest.approx(1.41, abs=.01) and narrow.text_factor(2000) == 1.5
    svg = ('<svg xmlns="http://www.w3.org/2000/svg" width="518pt" height="200pt" viewBox="0 0 518 200"><g id="figure_1"><text style="font: 10.5px sans">a</text>'
           '<text style="font-size: 9px; x: y">b</text></g></svg>')
    c = lessons.read_cell({"cell_type": "code", "source": "#| fig-cap: A figure.", "id": "c",
                           "outputs": [{"output_type": "display_data", "data": {"image/svg+xml": svg}}]}, "test")
    made = build.figure(c.outputs[0], c, 0)["data"]["text/html"]
    assert "--narrow: 1.41" in made and "font: calc(10.5px * var(--text, 1)) sans" in made and "font-size: calc(9px * var(--text, 1))" in made


def test_the_install_cell_is_given_once_and_runs_in_colab_only():
    nb = {"cells": [{"cell_type": "code", "id": "a", "source": ["#| default_exp x.y"]}, {"cell_type": "markdown", "id": "b", "source": ["# T"]}]}
    made = colab.with_install_cell(nb)
    assert [c["id"] for c in made["cells"]] == ["a", "c01ab000", "b"] and colab.with_install_cell(made) is None
    assert [c["id"] for c in colab.with_install_cell({"cells": nb["cells"][1:]})["cells"]] == ["c01ab000", "b"]
    cell = lessons.read_cell(made["cells"][1], "test")
    assert build.code_cell(cell) is None and f"git+{lessons.REPO}" in cell.source  # not on the page
    assert "google.colab" not in sys.modules
    exec(cell.source, {})  # installs nothing here


def test_every_notebook_installs_the_package_in_colab():
    without = [p.url for p in [index, *pages] if not any(colab.NOTE in c.source for c in p.cells)]
    assert not without, f"run make save, or python docs/colab.py: {without}"


def a_class(kind, table_classes, name="Dials"):
    "An entry as Sphinx has it: a class with a table of two fields, and below it a method with a table of its own."
    from find import addnodes, nodes

    def cells(*texts): return nodes.row("", *(nodes.entry("", nodes.paragraph("", text)) for text in texts))

    def table(classes, *rows):
        return nodes.table("", nodes.tgroup("", nodes.thead("", cells("parameter", "type", "what")), nodes.tbody("", *rows)), classes=classes)

    def described(kind, name, *body):
        return addnodes.desc("", addnodes.desc_signature("", "", ids=[f"m.{name}"], fullname=name), addnodes.desc_content("", *body), objtype=kind)

    method = described("method", f"{name}.turn", table(["parameters"], cells("by", "float", "how far")))
    return described(kind, name, table(table_classes, cells("lr", "float", "the rate"), cells("seed", "int", "")), method)


def test_the_search_knows_the_fields_of_dataclasses():
    doctree = find.nodes.document(None, None)
    doctree += [a_class("class", ["parameters", "fields"]), a_class("class", ["parameters"], "Plain"), a_class("function", ["parameters", "fields"], "made")]
    assert find.fields(doctree) == [["m.Dials", "lr", "the rate – float", "Dials"], ["m.Dials", "seed", "int", "Dials"]]
