"""A reader pastes logs on the page, in Chromium, from a file, with the network off: the answer is the command's."""

import json
import sys
from pathlib import Path

import pytest
from built_site import browser, built, root, site

from instruct_goose.cli.main import main
from instruct_goose.doctor.rules import METRIC_RULES

sys.path.insert(0, str(root / "tests/doctor"))
from test_libraries import NUMBERS, console, table  # noqa: E402

OURS = root / "evidence/reports/quickstart"
TRL = root / "tests/doctor/library_logs"
PASTED = {  # a log's name: the file that the command reads, and its text
    "ours": ("metrics.jsonl", (OURS / "metrics.jsonl").read_text("utf-8")),
    "trl": ("trainer_state.json", (TRL / "trl_grpo_one_reward_twice.json").read_text("utf-8")),
    "verl": ("console.log", console(NUMBERS)),
    "csv": ("wandb.csv", table(NUMBERS)),
}


class PastePage:
    "The page, opened from a file."

    def __init__(self, tab):
        self.tab = tab
        tab.wait("!document.querySelector('.paste').hidden")

    def ask(self, script: str):
        return self.tab.ask(f"document.querySelector('.paste').{script}")

    def finish(self) -> str:
        self.tab.wait("!document.querySelector('.paste').hasAttribute('aria-busy')")
        return self.ask("querySelector('.state').textContent")

    def paste(self, text: str) -> str:
        "Paste a text, press *Examine*, and return the state in which the page ends."
        self.ask("querySelector('.paste-clear').click()")
        self.ask(f"querySelector('textarea').value = {json.dumps(text)}")
        self.ask("querySelector('.paste-run').click()")
        return self.finish()

    def answer(self) -> str:
        return self.ask("querySelector('.paste-answer').textContent")

    def printed(self) -> str:
        return self.ask("querySelector('.as-printed').textContent")


@pytest.fixture(scope="module")
def page(one):
    return PastePage(one.open((site / "paste.html").as_uri()))


def as_printed(path: Path, capsys) -> tuple[str, list[dict]]:
    "What the command prints of a log, and its findings."
    for arguments in ([], ["--json"]):
        try:
            main(["doctor", str(path), *arguments])
        except SystemExit as stop:
            assert stop.code == 3
    text, _, rows = capsys.readouterr().out.rpartition("\n[")
    return text, json.loads("[" + rows)


@built
@browser
@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_log_gets_the_words_of_the_command(name, page, tmp_path, capsys):
    file, text = PASTED[name]
    path = tmp_path / file
    path.write_text(text, "utf-8")
    printed, findings = as_printed(path.parent if name == "ours" else path, capsys)
    assert page.paste(text) == "done"
    assert page.printed().strip() == printed.strip()
    assert page.ask("querySelectorAll('.finding').length") == len(findings)
    answer = page.answer()
    for finding in findings:
        for sentence in ("name", "what", "evidence", "cure"):
            assert finding[sentence] in answer
    lessons = page.ask("querySelectorAll('.to-lesson a').length")
    assert lessons == len(findings)
    assert 3 <= page.ask("querySelectorAll('.paste-curves svg').length") <= 5


@built
@browser
@pytest.mark.parametrize(
    "text, says",
    [
        ("", "nothing to read yet"),
        ("hello\nworld\n", "no line of the log holds numbers by name"),
        ("<!doctype html><p>404", "this is a web page"),
        ('{"log_history": [{"loss": 1.0', "cut short"),
        ("Traceback (most recent call last):\n  File", "traceback of an error"),
        ('{"a": 1.0, "b": 2}', "not the metrics of a library that is known here (a, b)"),
    ],
)
def test_what_is_no_log_gets_a_clear_message(text, says, page):
    state = page.paste(text)
    assert says in state + page.answer()
    assert "pasted/" not in page.answer()


@built
@browser
def test_an_example_is_one_press_away_and_nothing_leaves_the_page(one):
    tab = one.open((site / "paste.html").as_uri(), 390)
    page = PastePage(tab)
    page.ask("querySelector('[data-example]').click()")
    assert page.finish() == "done"
    assert "equal rewards" in page.answer()
    assert tab.ask("document.documentElement.scrollWidth") <= 390
    assert tab.barriers("'.paste'") == []
    assert all(address.startswith(("file:", "blob:", "data:")) for address in tab.asked)
    assert tab.quiet()
    links = tab.ask("[...document.querySelectorAll('.to-lesson a')].map(a => a.href)")
    assert links and all((site / link.partition("_site/")[2]).exists() for link in links)


@built
@browser
def test_a_run_is_chosen_with_its_settings(page):
    files = [OURS / name for name in ("metrics.jsonl", "config.json", "summary.json")]
    given = {file.name: file.read_text("utf-8") for file in files} | {"notes.txt": "mine"}
    page.ask("querySelector('.paste-clear').click()")
    page.tab.ask(
        f"""(() => {{
            const chooser = document.querySelector('.paste-files');
            const given = new DataTransfer();
            for (const [name, text] of Object.entries({json.dumps(given)}))
                given.items.add(new File([text], name));
            chooser.files = given.files;
            chooser.onchange();
        }})()"""
    )
    page.tab.wait("document.querySelector('.paste .state').textContent === 'done'")
    assert "notes.txt was not used" in page.answer()
    assert "There is no config.json" not in page.printed()


@built
def test_every_lesson_of_a_rule_is_linked():
    text = (site / "paste.html").read_text("utf-8")
    for rule in METRIC_RULES:
        assert f'"{rule.lesson}"' in text
