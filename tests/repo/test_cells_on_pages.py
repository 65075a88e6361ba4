"""A reader runs and edits the cells of a lesson on its page, in Chromium, from a file, with the network off."""

import pytest
from built_site import browser, built, site

SOON = "const later = setTimeout; window.setTimeout = (f, t, ...more) => later(f, t === 10000 ? 900 : t, ...more)"  # ten seconds


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

    def run(self) -> str:
        "Press Run, and return what stands below."
        self.tab.ask(self.button("Run") + ".click()")
        self.tab.wait(self.button("Stop") + ".disabled")
        return self.ask("querySelector('.page-output').innerText")

    def edit(self, old: str, new: str) -> None:
        self.tab.ask(
            f"(box => {{ box.value = box.value.replace({old!r}, {new!r});"
            f"box.dispatchEvent(new Event('input')) }})({self.at}.querySelector('textarea'))"
        )


@built
@browser
def test_a_reader_runs_edits_and_starts_over(one):
    tab = one.open((site / "learn/policy_loss.html").as_uri(), first=SOON)
    assert not [address for address in tab.asked if "python.js" in address]
    objective = Cell(tab, "def clipped_objective(")
    check = Cell(tab, "expect(clipped_objective(")
    assert "You changed" not in check.run()
    objective.edit("torch.minimum(", "torch.maximum(")
    objective.run()
    assert tab.ask("document.querySelectorAll('.cell-runner.stale').length") > 10
    assert "You changed something: this was" in check.run()
    assert tab.barriers("'.cell-runner'") == []
    tab.ask(objective.button("Start over") + ".click()")
    tab.wait(objective.button("Stop") + ".disabled")
    assert "You changed" not in check.run()
    assert tab.quiet()


@built
@browser
def test_a_loop_without_an_end_is_stopped_and_the_next_run_begins_anew(one):
    tab = one.open((site / "learn/policy_loss.html").as_uri(), 390, first=SOON)
    first = Cell(tab, "ex = running_example()")
    first.edit("ex = running_example()", "while True: pass")
    first.run()
    assert "stopped after 10 seconds" in first.ask("querySelector('.state').textContent")
    first.edit("while True: pass", "ex = running_example()\nprint('again')")
    assert "again" in first.run()
    assert tab.ask("document.documentElement.scrollWidth") <= 390


@built
@browser
@pytest.mark.deep
@pytest.mark.parametrize("lesson", ["kl", "advantages", "value_loss", "group", "preference"])
def test_every_cell_of_a_lesson_runs_on_its_page(lesson, one):
    tab = one.open((site / f"learn/{lesson}.html").as_uri())
    for place in range(tab.ask("document.querySelectorAll('.run-here').length")):
        at = f"document.querySelectorAll('.run-here')[{place}]"
        tab.ask(f"{at}.querySelector('button').click()")
        tab.wait(
            f"[...{at}.querySelectorAll('button')].find(b => b.textContent === 'Stop').disabled"
        )
        state = tab.ask(f"{at}.querySelector('.state').textContent")
        said = tab.ask(f"{at}.querySelector('.page-output').innerText")
        assert state == "done", (lesson, place, state, said)
        assert "You changed" not in said, (lesson, place, said)


@built
@browser
def test_an_exercise_is_checked_on_its_page_and_a_usual_mistake_is_named(one):
    tab = one.open((site / "learn/policy_loss.html").as_uri(), first=SOON)
    exercise = Cell(tab, "def my_objective(")
    exercise.edit(": ...", ":\n    return ratio * advantages")
    tab.ask(exercise.button("Check") + ".click()")
    tab.wait(exercise.button("Stop") + ".disabled")
    wrong = exercise.ask("querySelector('.page-output').innerText")
    exercise.edit(
        "return ratio * advantages",
        "return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)",
    )
    tab.ask(exercise.button("Check") + ".click()")
    tab.wait(exercise.button("Stop") + ".disabled")
    assert "clip" in wrong and "right" not in wrong
    assert "right" in exercise.ask("querySelector('.page-output').innerText")
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
