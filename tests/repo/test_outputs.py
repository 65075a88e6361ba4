"""A stored output comes from its own notebook: nothing that another one registers stands in it."""

import re
import sys
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
sys.path[:0] = [str(root / "docs"), str(root / "tests")]
import notebooks  # noqa: E402
from lessons import read_pages  # noqa: E402

index, pages = read_pages()
TABLES = "SURROGATES|ADVANTAGES|ESTIMATORS|AGGREGATES|PRESETS"


def source(page) -> str:
    return "\n".join(cell.source for cell in page.cells)


def printed(page) -> str:
    "What the page's cells have put out, as text and without addresses."
    texts = []
    for cell in page.cells:
        for output in cell.outputs:
            data = output.get("data", {})
            for text in (output.get("text"), data.get("text/plain"), data.get("text/markdown")):
                texts.append("".join(text or ""))
    return re.sub(r"https?://[^\s)]+", "", "\n".join(texts))


def registered(text: str) -> set[str]:
    "The names that a notebook adds to the library's tables."
    return set(re.findall(rf'\b(?:{TABLES})\["(\w+)"\]\s*=', text))


def strangers(text: str, own_source: str, names: set[str]) -> list[str]:
    """Names of other pages' plug-ins in an output.

    A page's own text may name a plug-in, and so may the library where it says which module has it.
    """
    lines = [line for line in text.splitlines() if "compat.losses" not in line]
    return sorted(
        name
        for name in names
        if not re.search(rf"\b{name}\b", own_source)
        and any(re.search(rf"(?<![\w./-]){name}(?![\w(-])", line) for line in lines)
    )


plug_ins = set().union(*(registered(source(page)) for page in pages))


@pytest.mark.parametrize("page", pages, ids=lambda p: p.url)
def test_a_page_prints_no_plug_in_of_another_page(page):
    assert {"abs", "gpg", "gmpo", "vespo", "sapo"} <= plug_ins
    assert not strangers(printed(page), source(page), plug_ins), "run this notebook alone"


def test_a_row_and_an_error_of_another_page_are_seen():
    table = "k1: mean 0.31\nabs: mean 0.42"
    error = "surrogate is 'sappo': it must be one of 'min', 'sapo', 'gpg', 'gmpo'"
    assert strangers(table, "for name in ESTIMATORS:", {"abs", "gpg"}) == ["abs"]
    assert strangers(error, 'SURROGATES["sapo"] = gate', {"sapo", "gpg", "gmpo"}) == ["gmpo", "gpg"]
    assert not strangers("vespo comes with instruct_goose.compat.losses", "", {"vespo"})
    assert not strangers("torch.abs(x) is abs(x)", "", {"abs"})


def test_a_notebook_begins_without_a_module_of_the_package(monkeypatch):
    "Notebooks are forked from one process; what it had imported, and registered, all would share."
    for name in [n for n in sys.modules if n.split(".")[0] == "instruct_goose"]:
        monkeypatch.delitem(sys.modules, name)
    assert notebooks.shared_modules() == []
    monkeypatch.setitem(sys.modules, "instruct_goose.compat.losses", sys)
    assert notebooks.shared_modules() == ["instruct_goose.compat.losses"]
