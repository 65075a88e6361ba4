"""The runs whose reports are on the site: kept whole and with their origin, and their reports ask for nothing."""

import json
import re
import sys

import pytest
from built_site import browser, built, root, site, soup
from deep import first

from instruct_goose.doctor.report import read_run

sys.path[:0] = [str(root / "evidence"), str(root / "docs")]
import reported  # noqa: E402
import reports  # noqa: E402

KEPT = root / "evidence/reports"
names = pytest.mark.parametrize("name", reports.RUNS)


@names
def test_a_record_is_whole_and_small(name):
    run = read_run(KEPT / name)
    said = json.loads((KEPT / f"{name}.json").read_text("utf-8"))
    assert not run.notes and len(run.metrics) == run.config["steps"] and run.config["seed"] == 0
    assert list(run.tokens) == list(range(len(run.metrics))) and run.samples.startswith("|")
    assert (
        re.fullmatch("[0-9a-f]{40}", said["origin"]["commit"])
        and {"processor", "torch", "transformers", "python"} <= said["origin"].keys()
    )
    assert sum(p.stat().st_size for p in (KEPT / name).iterdir()) <= reported.MOST
    assert not re.search(
        r"/(tmp|home|root|work)/|output_dir|\"platform\"",
        "".join(p.read_text("utf-8") for p in (KEPT / name).iterdir()),
    )


@built
@names
def test_the_report_on_the_site(name):
    assert soup(site / "reports.html").find("a", href=f"reports/{name}.html") and soup(
        site / "know.html"
    ).find("a", href="reports.html")
    text = (site / f"reports/{name}.html").read_text("utf-8")
    page = soup(site / f"reports/{name}.html")
    run = read_run(KEPT / name)
    assert (
        page.h1.text == name
        and page.nav.find("a", href="../reports.html")
        and f"{len(run.metrics)} iterations" in page.select_one(".facts").text
    )
    assert not page.select("img, iframe, link, script[src], [style*=url]") and not re.search(
        r"@import|url\((?!#)|fetch\(|XMLHttp", text
    )
    record = json.loads(
        re.search(r'<script[^>]*\bid="record"[^>]*>(.*?)</script>', text, re.S)[1]
    )  # soup leaves scripts empty
    assert [i["iteration"] for i in record["iterations"]] == list(run.tokens)


@built
@browser
@pytest.mark.parametrize("name", first(1, reports.RUNS))
def test_a_report_fits_a_phone_and_asks_for_nothing(name, one):
    tab = one.open((site / f"reports/{name}.html").as_uri(), 390)
    assert tab.ask("[document.documentElement.scrollWidth <= 390, innerWidth]") == [True, 390]
    responses = read_run(KEPT / name).tokens[
        tab.ask("+document.querySelector('#microscope output').textContent")
    ]
    assert tab.ask("document.querySelectorAll('.token').length") == sum(
        len(r["tokens"]) for r in responses
    )
    assert tab.quiet(), (tab.log, tab.asked)
    tab.close()
