"""Every cell that runs on a page gives there what it gives with torch.

Compared are the text that it prints and shows, the figures that can be moved, the numbers that its
checks were given, what the checks said, and the error, if it raises one. Numbers may differ by 1e-9
of their size, those of float32 by 2e-5, those in
figures by 1e-3.
"""

import re

import pytest
from page_cells import DIFFERENT

NUMBER = re.compile(r"[-−]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")


def near(a: float, b: float, tolerance: float) -> bool:
    if a == b or (a != a and b != b):
        return True
    return abs(a - b) <= tolerance * max(1.0, abs(a))


def texts_agree(a: str, b: str, tolerance: float = 1e-9) -> bool:
    "The same words, and numbers that are near."
    if a == b:
        return True
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return False
    ours = [float(x.replace("−", "-")) for x in NUMBER.findall(a)]
    theirs = [float(x.replace("−", "-")) for x in NUMBER.findall(b)]
    return all(near(x, y, tolerance) for x, y in zip(ours, theirs))


def checks_agree(a: dict, b: dict) -> bool:
    "The same check of the same numbers, with the same verdict."
    tolerance = 1e-9 if a["precision"] == "float64" else 2e-5
    if (a["name"], a["precision"]) != (b["name"], b["precision"]):
        return False
    if not texts_agree(a["said"], b["said"], tolerance):
        return False
    lengths = [len(x) for x in a["numbers"]]
    if lengths != [len(x) for x in b["numbers"]]:
        return False
    ours = [x for row in a["numbers"] for x in row]
    theirs = [x for row in b["numbers"] for x in row]
    return all(near(x, y, tolerance) for x, y in zip(ours, theirs))


def difference(torch_run: dict, page_run: dict) -> str | None:
    "In words what differs between two runs of a cell, or None."
    if torch_run["error"] != page_run["error"]:
        return f"error {torch_run['error']}, on the page {page_run['error']}"
    if not texts_agree(torch_run["printed"], page_run["printed"]):
        return f"prints {torch_run['printed']!r}, on the page {page_run['printed']!r}"
    if len(torch_run["checks"]) != len(page_run["checks"]):
        return "another number of checks"
    for ours, theirs in zip(torch_run["checks"], page_run["checks"]):
        if not checks_agree(ours, theirs):
            return f"check {ours}, on the page {theirs}"
    if [list(x) for x in torch_run["shown"] if x] != [list(x) for x in page_run["shown"] if x]:
        return f"shows {torch_run['shown']}, on the page {page_run['shown']}"
    for ours, theirs in zip(torch_run["shown"], page_run["shown"]):
        for kind in ours or ():
            tolerance = 1e-3 if kind == "figure" else 1e-9  # four digits are drawn
            if not texts_agree(ours[kind], theirs[kind], tolerance):
                return f"shows {ours[kind]}, on the page {theirs[kind]}"
    return None


@pytest.fixture(scope="session")
def differences(both_runs) -> dict[tuple[int, str], str]:
    "All cells that do not agree, and how."
    found = {}
    for number, cells in both_runs["torch"].items():
        for cell, torch_run in cells.items():
            words = difference(torch_run, both_runs["page"][number][cell])
            if words is not None:
                found[int(number), cell] = words
    return found


def test_every_runnable_cell_agrees_but_for_the_listed_ones(differences):
    unexpected = {where: words for where, words in differences.items() if where not in DIFFERENT}
    assert not unexpected, "\n".join(
        f"{where}: {words[:600]}" for where, words in unexpected.items()
    )


def test_every_listed_exception_still_differs(differences):
    assert set(DIFFERENT) - set(differences) == set()


def test_no_cell_raises_with_torch_but_where_types_would_be_checked(both_runs):
    raised = {
        (int(number), cell): run["error"]["text"]
        for number, cells in both_runs["torch"].items()
        for cell, run in cells.items()
        if run["error"] is not None
    }
    assert raised == {(6, "b2558b08"): "Expected Exception but none raised. "}


def test_every_cell_takes_less_than_a_page_allows(both_runs):
    seconds = sorted(
        run["seconds"] for cells in both_runs["page"].values() for run in cells.values()
    )
    assert seconds[len(seconds) // 2] < 0.02
