"""A reader runs and edits the cells of a lesson on its page, in Chromium, from a file, with the network off."""

import json
import sys
import time

import nbformat
import pytest
from built_site import browser, built, root, site

sys.path.insert(0, str(root / "docs"))
import build  # noqa: E402
import page_cells  # noqa: E402

# ten seconds pass at once where a test says `impatient`; elsewhere a slow machine has all ten
SOON = """const later = setTimeout
window.setTimeout = (f, t, ...more) => later(f, t === 10000 && window.impatient ? 300 : t, ...more)"""
ENDED = "['done', 'failed', 'stopped'].includes({block}.dataset.run)"


def opened(one, page: str, width: int = 1280):
    "A lesson's page, without the edits of an earlier visit."
    address = (site / f"learn/{page}.html").as_uri()
    return one.open(address, width, first=f"localStorage.clear()\n{SOON}")


class Cell:
    "A cell of a page whose editor has a text."

    def __init__(self, tab, text: str):
        self.tab = tab
        self.at = (
            "[...document.querySelectorAll('.run-here')]"
            f".find(e => e.querySelector('textarea').value.includes({text!r}))"
        )
        tab.ask(f"window.cell_{id(self)} = {self.at}, 0")
        self.at = f"window.cell_{id(self)}"

    def ask(self, script: str):
        return self.tab.ask(f"{self.at}.{script}")

    def button(self, name: str) -> str:
        return f"[...{self.at}.querySelectorAll('button')].find(b => b.textContent === {name!r})"

    def press(self, name: str) -> str:
        "Press a button that runs Python, and return how the run ended: done, failed or stopped."
        self.tab.ask(self.button(name) + ".click()")
        self.tab.wait(ENDED.format(block=f"{self.at}.querySelector('.cell-runner')"))
        return self.ask("querySelector('.cell-runner').dataset.run")

    def state(self) -> str:
        return self.ask("querySelector('.state').textContent")

    def output(self) -> str:
        "What stands below."
        return self.ask("querySelector('.page-output').innerText")

    def run(self) -> str:
        "Press Run, and return what stands below."
        ended = self.press("Run")
        assert ended == "done", (ended, self.state(), self.output())
        return self.output()

    def edit(self, old: str, new: str) -> None:
        assert old in self.ask("querySelector('textarea').value")
        self.tab.ask(
            f"(box => {{ box.value = box.value.replace({old!r}, {new!r});"
            f"box.dispatchEvent(new Event('input')) }})({self.at}.querySelector('textarea'))"
        )


def test_a_build_without_python_says_so_on_the_pages_of_lessons_that_run():
    _, pages = build.read_pages()
    links = build.Links(pages)
    by_url = {page.url: page for page in pages}

    def text_of(url: str, below: dict) -> str:
        return json.dumps(build.staged(by_url[url], pages, links, below))

    has_python = {("learn/kl", "a cell"): "an exercise"}
    assert "no Python for the browser" in text_of("learn/ppo", {})
    assert "run-here" not in text_of("learn/ppo", {})
    assert "no Python for the browser" not in text_of("learn/ppo", has_python)
    assert "run-here" in text_of("learn/ppo", has_python)
    assert "no Python for the browser" not in text_of("learn/trainer", {})


@built
@browser
def test_a_reader_runs_edits_and_starts_over(one):
    tab = opened(one, "policy_loss")
    assert not [address for address in tab.asked if "python.js" in address]
    objective = Cell(tab, "def clipped_objective(")
    check = Cell(tab, "expect(clipped_objective(")
    assert "You changed" not in check.run()
    objective.edit("torch.minimum(", "torch.maximum(")
    objective.run()
    assert tab.ask("document.querySelectorAll('.cell-runner.stale').length") > 10
    assert "You changed something: this was" in check.run()
    assert tab.barriers("'.cell-runner'") == []
    assert objective.press("Start over") == "done"
    assert "You changed" not in check.run()
    assert tab.quiet()


@built
@browser
def test_a_loop_without_an_end_is_stopped_and_the_next_run_begins_anew(one):
    tab = opened(one, "policy_loss", 390)
    first = Cell(tab, "ex = running_example()")
    first.edit("ex = running_example()", "while True: pass")
    tab.ask("window.impatient = true")
    assert first.press("Run") == "stopped"
    assert "stopped after 10 seconds" in first.state()
    tab.ask("window.impatient = false")
    first.edit("while True: pass", "ex = running_example()\nprint('again')")
    assert "again" in first.run()
    bar = tab.ask("document.querySelector('.edited-cells').getBoundingClientRect().bottom")
    assert bar <= tab.ask("innerHeight")  # it stays in sight
    assert tab.ask("document.documentElement.scrollWidth") <= 390


@built
@browser
@pytest.mark.deep
@pytest.mark.parametrize(
    "lesson",
    [
        "from_a_reward_to_ppo",
        "masks",
        "logprobs",
        "kl",
        "advantages",
        "value_loss",
        "ppo",
        "group",
        "preference",
    ],
)
def test_every_cell_of_a_lesson_runs_on_its_page(lesson, one):
    tab = opened(one, lesson)
    for place in range(tab.ask("document.querySelectorAll('.run-here').length")):
        block = f"document.querySelectorAll('.run-here')[{place}].querySelector('.cell-runner')"
        tab.ask(f"{block}.querySelector('.keys button').click()")
        tab.wait(ENDED.format(block=block))
        state = tab.ask(f"{block}.querySelector('.state').textContent")
        said = tab.ask(f"{block}.querySelector('.page-output').innerText")
        assert state == "done", (lesson, place, state, said)
        assert "You changed" not in said, (lesson, place, said)


@built
@browser
def test_an_exercise_is_checked_on_its_page_and_a_usual_mistake_is_named(one):
    tab = opened(one, "policy_loss")
    exercise = Cell(tab, "def my_objective(")
    exercise.edit(": ...", ":\n    return ratio * advantages")
    assert exercise.press("Check") == "done"
    assert "clip" in exercise.output() and "right" not in exercise.output()
    exercise.edit(
        "return ratio * advantages",
        "return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)",
    )
    assert exercise.press("Check") == "done"
    assert "right" in exercise.output()
    assert tab.quiet()


@built
@browser
def test_an_exercise_that_is_no_python_has_failed_and_one_without_an_end_is_stopped(one):
    tab = opened(one, "policy_loss")
    exercise = Cell(tab, "def my_objective(")
    stop = exercise.button("Stop")
    assert tab.ask(f"{stop}.disabled")
    exercise.edit(": ...", ":\n    return ratio *")
    assert exercise.press("Check") == "failed"
    assert exercise.state() == "an error: see below"
    assert "SyntaxError in line" in exercise.output()
    exercise.edit("return ratio *", "while True: pass")
    tab.ask(exercise.button("Check") + ".click()")
    assert not tab.ask(f"{stop}.disabled")
    tab.wait(f"{exercise.at}.querySelector('.cell-runner').dataset.run === 'running'")
    tab.ask(f"{stop}.click()")
    assert exercise.state() == "stopped"
    assert tab.quiet()


@built
@browser
def test_edits_stay_in_the_browser_and_are_shared_in_a_link(one):
    address = (site / "learn/value_loss.html").as_uri()
    tab = one.open(address)
    count = "document.querySelector('.edited-cells').innerText"
    shown = "!document.querySelector('.edited-cells').hidden"
    assert not tab.ask(shown)
    first = Cell(tab, "def value_loss(")
    first.edit("def value_loss(", "# mine\ndef value_loss(")
    tab.wait(shown)
    assert "1 cell is edited" in tab.ask(count)
    link = tab.ask(
        "packed({[document.querySelector('.run-here').dataset.cell]: '# shared'}).then(x => '#cells=' + x)"
    )
    tab.close()
    again = one.open(address)
    assert again.ask(shown)
    assert Cell(again, "# mine\ndef value_loss(")
    assert again.barriers("'.edited-cells'") == []
    again.ask(
        "[...document.querySelectorAll('.edited-cells button')].find(b => b.textContent === 'Forget the edits').click()"
    )
    assert not again.ask(shown)
    again.close()
    shared = one.open(address + link)
    assert shared.ask("document.querySelector('.run-here textarea').value") == "# shared"
    shared.ask("localStorage.clear()")
    shared.close()


COPIED = """
Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.copied = text }}})"""


@built
@browser
def test_a_shared_link_shows_the_edit_in_another_tab_which_keeps_it_as_a_notebook(one, tmp_path):
    address = (site / "learn/value_loss.html").as_uri()
    sender = one.open(address, first=f"localStorage.clear()\n{COPIED}")
    edited = Cell(sender, "def value_loss(")
    edited.edit("def value_loss(", "# «mine» ✓\ndef value_loss(")
    bar = "document.querySelector('.edited-cells')"
    press = (
        f"(name => [...{bar}.querySelectorAll('button')].find(b => b.textContent === name).click())"
    )
    sender.ask(f"{press}('Share')")
    sender.wait("window.copied")
    link = sender.ask("window.copied")
    sender.close()

    reader = one.open(link, first="localStorage.clear()")
    reader.wait(f"!{bar}.hidden")
    shown = Cell(reader, "# «mine» ✓\ndef value_loss(")
    assert shown.ask("querySelector('textarea').hidden") is False
    assert shown.press("Run") == "done"
    one.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    reader.ask(f"{press}('Download as a notebook')")
    path = tmp_path / "value_loss_edited.ipynb"
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (mine,) = [text for text in texts if "«mine» ✓" in text]
    original = [cell.source for cell in page_cells.page_cells(9) if cell.reason is None]
    assert len(texts) == len(original)
    changed = [(now, before) for now, before in zip(texts, original) if now != before]
    assert changed == [(mine, mine.replace("# «mine» ✓\n", ""))]

    assert shown.press("Start over") == "done"
    assert reader.ask(f"{bar}.hidden")
    assert "«mine»" not in shown.ask("querySelector('textarea').value")
    assert reader.quiet()
    reader.ask("localStorage.clear()")
    reader.close()
