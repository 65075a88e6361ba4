"""instruct_goose/exercises.json from the lessons: what each exercise asks, its hints, its answer, and its checker with what that one needs.

The lessons are the one place where a checker is written; the package has no notebooks, so it carries this table.
Nothing is run to make it. `--check` writes nothing and fails when the table is stale.
"""

import argparse
import ast
import builtins
import json
import re
import symtable
from functools import cache

from lessons import ROOT, Cell, Page, read_pages

import instruct_goose.lesson

TABLE = ROOT / "instruct_goose/exercises.json"
IN_ITS_LESSON = {  # what a checker reads that no wheel has
    "doctor.answers": "it reads runs that are recorded in the repository",
    "same_name.mean": "its formulas of other libraries are the tests' own",
    "your_own.digits": "it reads files that the lesson writes",
}
STARS, DETAILS = r"[●○]{3}", r"<details><summary>([^<]*)</summary>(.*?)</details>"
GIVEN = {*dir(builtins), *instruct_goose.lesson.__all__}  # every lesson has them


# --- where an exercise begins and ends --------------------------------------------------------------------------------
def heads(page: Page) -> list[tuple[int, str, str]]:
    "(cell, heading, what is asked) of each exercise of a lesson. Three in a numbered list of one cell are three."
    found = []
    among = False  # among: below the heading "Exercises"
    for i, cell in enumerate(page.cells):
        if cell.kind != "markdown":
            continue
        for piece in re.split(r"^(?=#{2,3} )", cell.source, flags=re.M):
            line, _, rest = piece.partition("\n")
            if re.match(r"## (?!Exercise)", line):
                among = False
            elif re.fullmatch(r"## Exercises?", line.strip()):
                among = True
                found += [
                    (i, m[0], m[0].partition("minutes. ")[2])
                    for m in re.finditer(rf"^\d\. (?:&nbsp; )?{STARS}.*$", rest, re.M)
                ]
            elif (
                line.startswith("## Exercise:")
                or line.startswith("### ")
                and (among or re.search(STARS, line))
            ):
                found.append((i, line.lstrip("# ").removeprefix("Exercise: "), rest))
    return found


def end(page: Page, at: int) -> int:
    "The cell before which the exercise that begins at `at` is over."
    for i in range(at + 1, len(page.cells)):
        if page.cells[i].kind == "markdown" and re.search(
            r"^#{2,3} |^\*\*Next\*\*", page.cells[i].source, re.M
        ):
            return i
    return len(page.cells)


# --- the code ---------------------------------------------------------------------------------------------------------
@cache
def statements(source: str) -> list[tuple[ast.stmt, str]]:
    "The statements of a cell, and their text."
    source = re.sub(r"^[%!].*$", "", source, flags=re.M)
    lines = [line.encode() for line in source.split("\n")]

    def text(s):  # a line may hold several statements; what decorates one stands above it
        first = min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", []))])
        piece = [*lines[first - 1 : s.end_lineno - 1], lines[s.end_lineno - 1][: s.end_col_offset]]
        return b"\n".join(
            [piece[0][s.col_offset if first == s.lineno else 0 :], *piece[1:]]
        ).decode()

    return [(s, text(s)) for s in ast.parse(source).body]


def parsed(cell: Cell) -> list[ast.stmt]:
    return [s for s, _ in statements(cell.source)]


def binds(s: ast.stmt) -> set[str]:
    "Names that a statement of a cell gives a value to."
    if isinstance(s, ast.FunctionDef | ast.ClassDef):
        return {s.name}
    if isinstance(s, ast.Import | ast.ImportFrom):
        return {a.asname or a.name.partition(".")[0] for a in s.names}
    return {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@cache
def reads(text: str) -> set[str]:
    "Names that a statement takes from the notebook: of a function those that are not its own."

    def of(table):
        own = {
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and (table.get_type() == "module" or s.is_global())
        }
        return own.union(*map(of, table.get_children()))

    return of(symtable.symtable(text, "cell", "exec")) - GIVEN


@cache
def lines_of(path: str) -> tuple[list, set[str]]:
    "(cell, statement, names it binds, text) of a lesson's own code, and the names that it exports."
    page = next(p for p in read_pages()[1] if str(p.path) == path)
    lines = [
        (i, s, binds(s), text)
        for i, cell in enumerate(page.cells)
        if cell.kind == "code" and not cell.exported and "eval" not in cell.directives
        for s, text in statements(cell.source)
    ]
    return lines, {name for cell in page.cells for s in cell.exported for name in binds(s)}


def needed(page: Page, upto: int, *names: str) -> str:
    "The lesson's statements that names come from, and what those need in turn, in the lesson's order; nothing of what it exports."
    lines, exported = lines_of(str(page.path))
    made = {}
    todo = [(name, len(lines)) for name in names]
    last = sum(i <= upto for i, *_ in lines)
    while todo:
        name, before = todo.pop()
        at = next((i for i in reversed(range(min(before, last))) if name in lines[i][2]), None)
        if (
            at is None
            or at in made
            or name in exported
            and isinstance(lines[at][1], ast.ImportFrom)
        ):
            continue
        _, s, _, made[at] = lines[at]
        later = isinstance(s, ast.FunctionDef)  # a function reads its names when it is called
        todo += [(n, len(lines) if later else at) for n in reads(made[at])]
    return "\n".join(made[i] for i in sorted(made))


def called(cell: Cell, check: str) -> str | None:
    "What `check` is called with in the last statement of a cell: a name."
    last = parsed(cell)[-1:]
    for n in ast.walk(last[0]) if last and isinstance(last[0], ast.Expr) else ():
        if (
            isinstance(n, ast.Call)
            and getattr(n.func, "id", "") == check
            and len(n.args) == 1
            and isinstance(n.args[0], ast.Name)
        ):
            return n.args[0].id


def checked(page: Page, cells: range) -> tuple[int, str, str] | None:
    "The cell of the checker, its name, and what it checks."
    code = [
        i
        for i in cells
        if page.cells[i].kind == "code"
        and "hide" not in page.cells[i].directives
        and not page.cells[i].exported
    ]
    for i in code:
        for check in [
            n for s in parsed(page.cells[i]) for n in sorted(binds(s)) if re.match(r"check(_|$)", n)
        ]:
            for j in code:
                if j >= i and (asks := called(page.cells[j], check)):
                    return i, check, asks


# --- the table --------------------------------------------------------------------------------------------------------
def hints(text: list[str], code: str) -> list[str]:
    "The lesson's hints in their order; then the mistakes that the checker has a name for."
    made = [
        plain(words)
        for t in text
        for title, words in re.findall(DETAILS, t, re.S)
        if "hint" in title.lower()
    ]
    known = [
        k.value
        for n in ast.walk(ast.parse(code))
        if isinstance(n, ast.keyword) and n.arg == "mistakes" and isinstance(n.value, ast.Dict)
        for k in n.value.keys
        if isinstance(k, ast.Constant)
    ]
    return made + ["What goes wrong most often:\n" + "\n".join(f"- {k}" for k in known)] * bool(
        known
    )


def plain(text: str) -> str:
    "Without links to other lessons, which lead nowhere from here, and without fences."
    return (
        re.sub(
            r"^```\w*\n?", "", re.sub(r"\[([^]]+)\]\([^)]*\.ipynb[^)]*\)", r"\1", text), flags=re.M
        )
        .replace("&nbsp; ", "")
        .strip()
    )


def title_of(heading: str, asked: str) -> str:
    title = re.sub(rf"^\d+\. |\s*&nbsp;.*|{STARS}.*", "", heading).strip()
    title = (title or " ".join(plain(asked).split()[:6]) + " …").replace("`", "")
    return title[0].upper() + title[1:]


def exercise(page: Page, at: int, heading: str, asked: str) -> dict:
    "An exercise as the table has it."
    cells = range(at, end(page, at))
    title = title_of(heading, asked)
    stars = re.search(STARS, heading)
    text = [page.cells[i].source for i in cells if page.cells[i].kind == "markdown"]
    made = {
        "lesson": page.path.relative_to(ROOT).as_posix(),
        "title": title,
        "stars": stars[0].count("●") if stars else 0,
        "asks": plain(re.sub(DETAILS, "", asked, flags=re.S)),
    }
    short = (
        f"exercise_{heading[0]}"
        if title.endswith("…")
        else re.sub(r"\W+", "_", re.sub("[`’']", "", title.lower())).strip("_")
    )
    if found := checked(page, cells):
        i, check, what = found
        short = re.sub(r"^my_|^My", "", what).lower()
        begin = next(
            page.cells[j].source
            for j in reversed(range(i))
            if page.cells[j].kind == "code" and any(what in binds(s) for s in parsed(page.cells[j]))
        )
        checker = needed(page, i, check)
        if "globals()" in checker:
            checker = needed(
                page,
                i,
                check,
                *(n for s in ast.parse(begin).body for n in sorted(binds(s)) if n != what),
            )
        answers = [
            page.cells[j].source
            for j in cells
            if "olution" in page.cells[j].directives.get("code-summary", "")
        ]
        answers += [
            words for t in text for fold, words in re.findall(DETAILS, t, re.S) if "olution" in fold
        ]
        made |= {
            "what": what,
            "begin": begin,
            "hints": hints(text, checker),
            "solution": plain(re.sub(rf"\n+(?:print\()?{check}\(\w+\)\)?\s*$", "", answers[0])),
        }
        name = f"{page.url.rpartition('/')[2]}.{short}"
        made |= (
            {"why_not": IN_ITS_LESSON[name]}
            if name in IN_ITS_LESSON
            else {"module": page.module, "check": check, "checker": checker}
        )
    return {"name": f"{page.url.rpartition('/')[2]}.{short}"} | made


def table() -> list[dict]:
    "Every exercise of every lesson, in reading order."
    made = [exercise(page, *head) for page in read_pages()[1] for head in heads(page)]
    names = [e["name"] for e in made]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise SystemExit(f"docs/exercise_table.py: two exercises with one name: {', '.join(twice)}")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the table is stale"
    )
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    if not parser.parse_args().check:
        TABLE.write_text(text, "utf-8")
    elif not TABLE.exists() or TABLE.read_text("utf-8") != text:
        raise SystemExit("stale, run make save: instruct_goose/exercises.json")


if __name__ == "__main__":
    main()
