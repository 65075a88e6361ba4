"""The site that `make docs` has built, for the tests of its pages."""

import re
from functools import cache
from pathlib import Path

import chromium
import pytest
from bs4 import BeautifulSoup

root = Path(__file__).parents[2]
site = root / "docs/_site"
built = pytest.mark.skipif(
    not (site / "index.html").exists(), reason="docs/_site is not built: make docs"
)
browser = pytest.mark.skipif(chromium.FOUND is None, reason="no Chromium on this machine")


@cache
def soup(path: Path) -> BeautifulSoup:
    "To be read, not changed. Without what is within drawings, scripts and the colours of code, which would take half a minute more for all pages."
    text = re.sub(
        r"(<(svg|script|math)\b[^>]*>).*?(</\2>)", r"\1\3", path.read_text("utf-8"), flags=re.S
    )
    return BeautifulSoup(
        re.sub(r'<span class="(?:[a-z][a-z0-9]?|pre|linenos)">([^<]*)</span>', r"\1", text),
        "html.parser",
    )
