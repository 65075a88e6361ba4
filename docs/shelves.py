"""The three shelves: the list at the side of each, the page that opens it, and where a page stands on it."""

import html
import os
import re
from functools import cache
from pathlib import Path

from lessons import LOOK_UP, MARKS, PACKAGES, SHELVES, Page, grouped, long, of_course, read_pages
from quizzes import QUIZZES, coded

MADE = {
    "playground": "Playground",
    "paste": "Paste your log",
    "glossary": "Glossary",
    "api": "All names",
    "quiz": "Questions on each part",
    "figures": "All figures",
    "tables": "Tables",
    "know": "How we know",
    "reports": "Recorded runs",
    "speed": "How fast",
    "compare": "How it compares",
    "changelog": "Changelog",
    "contributing": "Contributing",
}
OPENING = {  # what the first page of a shelf says
    "learn": "One course, read in order: {n} lessons, about {hours} with what is to be tried. Most need only the lessons before them. Lessons 1, 3 and 10 look ahead, and say where a thing is explained.",
    "guides": "How to do one thing. Read one when you need it, in any order.",
    "reference": "What each module holds, by package, and the pages on which things are looked up.",
}


def up(here: str, url: str) -> str:
    "Relative address of another page or file of the site."
    folder, name = os.path.split(url)
    return (
        os.path.join(os.path.relpath(folder or ".", Path(here).parent), name)
        .replace(os.sep, "/")
        .removeprefix("./")
    )


def shelf_of(url: str) -> str:
    "The shelf whose list stands beside a page."
    first = url.split("/")[0]
    if first in SHELVES:
        return first
    return "learn" if url == "index" else "reference"


def looked_up(pages: list[Page]) -> dict[str, list[tuple[str, str]]]:
    "heading -> (address, title) of the third shelf's pages that are no modules."
    titles = MADE | {p.url: p.title for p in pages}
    return {
        heading: [(url, titles[url]) for url in urls if url in titles]
        for heading, urls in LOOK_UP.items()
    }


@cache
def everything() -> list[Page]:
    return read_pages()[1]


def neighbours(url: str) -> tuple[Page | None, Page | None]:
    "The lessons before and after one of the course; other pages have none."
    course = of_course(everything())
    i = next((i for i, p in enumerate(course) if p.url == url), None)
    if i is None:
        return None, None
    return course[i - 1] if i else None, course[i + 1] if i + 1 < len(course) else None


# --- the list at the side ---------------------------------------------------------------------------------------------
def item(here: str, url: str, title: str, before: str = "") -> str:
    current = ' class="toctree-l1 current current-page"' if url == here else ' class="toctree-l1"'
    mark = ' aria-current="page"' if url == here else ""
    return f'<li{current}><a class="reference internal" href="{up(here, url)}.html"{mark}>{before}{html.escape(title)}</a></li>'


def sidebar(here: str) -> str:
    "The shelves, the one that the page stands on open: parts of the course, kinds of guides, packages that unfold."
    pages = everything()
    shelf = shelf_of(here)
    tabs = "".join(
        f'<a href="{up(here, name)}.html"{" class=here" * (name == shelf)}{" aria-current=true" * (name == shelf)}>{title}</a>'
        for name, title in SHELVES.items()
    )
    made = [f'<nav class="shelves" aria-label="Shelves">{tabs}</nav>']
    for heading, mine in grouped(pages, shelf).items():

        def number(p):
            return (
                f'<span class="number" data-lesson="{p.url}">{p.number}</span>' if p.number else ""
            )

        items = "<ul>" + "".join(item(here, p.url, p.title, number(p)) for p in mine) + "</ul>"
        if shelf != "reference":
            made.append(
                f'<p class="caption"><span class="caption-text">{html.escape(heading)}</span></p>{items}'
            )
        else:
            made.append(
                f'<details class="package"{" open" * any(p.url == here for p in mine)}><summary>{html.escape(heading)}</summary>{items}</details>'
            )
    if shelf == "reference":
        for heading, rows in looked_up(pages).items():
            made.append(
                f'<p class="caption"><span class="caption-text">{heading}</span></p><ul>{"".join(item(here, url, title) for url, title in rows)}</ul>'
            )
    return "".join(made)


# --- the page that opens a shelf --------------------------------------------------------------------------------------
def cards(here: str, rows: list[Page]) -> str:
    items = "".join(
        f'<li><a href="{up(here, p.url)}.html"><b>{f"<i data-lesson={p.url}>{p.number}</i> " if p.number else ""}{html.escape(p.title)}</b>'
        f"<span>{coded(p.subtitle)}</span><em>{f'{p.minutes} min' if p.minutes and p.number else ''}</em></a></li>"
        for p in rows
    )
    return f"<ol>{items}</ol>"


def marks() -> str:
    return (
        '<ul class="marks">'
        + "".join(f"<li><b>{who}</b> {what}</li>" for who, what in MARKS.items())
        + "</ul>"
    )


def shelf_page(shelf: str, pages: list[Page]) -> str:
    "Markdown."
    groups = grouped(pages, shelf)
    minutes = sum(p.minutes or 0 for p in pages if p.part == shelf)
    said = OPENING[shelf].format(n=len(of_course(pages)), hours=f"{round(minutes / 60)} hours")
    text = [f"# {SHELVES[shelf]}", f"```{{rst-class}} subtitle\n```\n\n{said}\n"]
    if shelf == "learn":
        text += [
            f'<p class="start"><a href="{of_course(pages)[0].url}.html">Start with lesson 1</a></p>',
            marks(),
        ]
    for heading, rows in groups.items():
        of = (
            f'<p class="of-part">Lessons {rows[0].number} to {rows[-1].number}, {long(sum(p.minutes or 0 for p in rows))}</p>\n\n'
            if shelf == "learn"
            else ""
        )
        quiz = (
            f'\n\n<p class="to-quiz"><a href="quiz.html#{anchor(heading)}">{len(QUIZZES[heading])} questions on this part</a></p>'
            if heading in QUIZZES
            else ""
        )
        if shelf == "reference":
            quiz = elsewhere(heading, pages)
        text.append(f'## {heading}\n\n{of}<div class="lesson-map">{cards(shelf, rows)}</div>{quiz}')
    if shelf == "reference":
        text += [
            f"## {package}{elsewhere(package, pages)}"
            for package in PACKAGES
            if package not in groups and elsewhere(package, pages)
        ]
        for heading, rows in looked_up(pages).items():
            text.append(
                f"## {heading}\n\n"
                + "\n".join(
                    f"- [{title}]({url}.{'ipynb' if url not in MADE else 'md'})"
                    for url, title in rows
                )
            )
    return "\n\n".join(text) + "\n"


def elsewhere(package: str, pages: list[Page]) -> str:
    "The modules of a package that a lesson or a guide exports, each a link."
    found = [
        p
        for p in pages
        if p.part in ("learn", "guides") and p.module and p.module.split(".")[1] == package
    ]
    links = ", ".join(
        f'<a href="{p.url}.html"><code>{p.module.split(".")[-1]}</code></a>' for p in found
    )
    return f'\n\n<p class="elsewhere">In the course and the guides: {links}</p>' if found else ""


def anchor(heading: str) -> str:
    "The id that Sphinx gives a heading of a page of Markdown."
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def course(here: str, pages: list[Page]) -> str:
    "The course at a glance: four columns of titles, for the front page."
    parts = []
    for heading, rows in grouped(pages, "learn").items():
        items = "".join(
            f'<li value="{p.number}"><a href="{up(here, p.url)}.html">{html.escape(p.title)}</a></li>'
            for p in rows
        )
        parts.append(f"<section><h3>{html.escape(heading)}</h3><ol>{items}</ol></section>")
    return f'<div class="course">{"".join(parts)}</div>'
