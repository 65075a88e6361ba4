"""The playground in a browser, from a file and without a network: equal to the library number by number, and a page that can be used."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from deep import first

from instruct_goose.tasks.playground import WORDS, PlaygroundSettings, evaluate, read_start, train

root = Path(__file__).parents[2]
sys.path[:0] = [str(root / "docs"), str(root / "tests/repo")]
import chromium  # noqa: E402
import playground  # noqa: E402

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "playground.html").write_text(playground.page(), "utf-8")
    return (folder / "playground.html").as_uri()


@pytest.fixture
def opened(one, page):
    tabs = []

    def go(asked=""):
        tabs.append(one.open(page + asked))
        tabs[-1].ask("playground.ready.then(() => 1)") if "iterations" not in asked else tabs[
            -1
        ].wait("!document.getElementById('result').hidden", 300)
        return tabs[-1]

    yield go
    for tab in tabs:
        assert tab.quiet(), (tab.log, tab.asked)
        tab.close()


# --- equal to the library ---------------------------------------------------------------------------------------------
CASES = {
    "ppo": {},
    "grpo": {"algorithm": "grpo", "kl_placement": "loss", "beta": 0.3},
    "rloo": {"algorithm": "rloo"},
    "reinforce": {"algorithm": "reinforce", "seed": 7},
    "everything else": {
        "temperature": 0.7,
        "ent_coef": 0.03,
        "lam": 0.5,
        "clip": 0.05,
        "epochs": 3,
        "batch_size": 32,
        "kl_placement": "loss",
        "seed": 3,
    },
}


def close(ours, theirs):
    torch.testing.assert_close(
        torch.as_tensor(ours, dtype=torch.float64),
        torch.as_tensor(theirs, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("case", first(1, CASES))
def test_five_iterations_equal_those_of_the_library(opened, case):
    settings = CASES[case]
    n = 5
    there = opened().ask(f"playground.trace({json.dumps(settings)}, {n})")
    reference, reward = read_start(root / "docs/playground/start.json")
    policy = copy.deepcopy(reference.double())
    for here, of_page in zip(
        train(policy, reference, reward, PlaygroundSettings(**settings), n),
        there["iterations"],
        strict=True,
    ):
        r = here.responses

        def rows(x):
            return [row[m].tolist() for row, m in zip(x, r.mask)]  # noqa: B023

        assert rows(r.ids) == of_page["ids"]
        for name, x in {
            "logprobs": r.logprobs,
            "values": r.values,
            "ref_logprobs": here.ref_logprobs,
            "rewards": here.rewards,
            "advantages": here.advantages,
        }.items():
            for ours, theirs in zip(rows(x), of_page[name], strict=True):
                close(ours, theirs)
        close(here.losses, of_page["losses"])
        close(here.gradient_norms, of_page["gradient_norms"])
    close(torch.cat([p.detach().flatten() for p in policy.parameters()]), there["weights"])
    moved = max(
        (a - b).abs().max().item() for a, b in zip(policy.parameters(), reference.parameters())
    )
    assert moved > 0.01
    for name, x in evaluate(policy, reference, reward).items():
        close(x, there["figures"][name])


# --- the address ------------------------------------------------------------------------------------------------------
def test_an_address_runs_at_once_and_leaves_its_figures(opened):
    tab = opened("?algorithm=rloo&beta=0.15&seed=4&iterations=3")
    found = json.loads(tab.ask("document.getElementById('result').textContent"))
    reference, reward = read_start(root / "docs/playground/start.json")
    policy = copy.deepcopy(reference.double())
    list(
        train(policy, reference, reward, PlaygroundSettings(algorithm="rloo", beta=0.15, seed=4), 3)
    )
    for name, theirs in (("before", reference), ("after", policy)):
        for figure, x in evaluate(theirs, reference, reward).items():
            close(x, found[name][figure])
    assert (
        found["iterations"] == 3
        and found["iterations_per_second"] > 0
        and found["settings"]["beta"] == 0.15
    )


def test_a_curve_shows_that_the_texts_grow_alike_and_the_experiments_stand_before_the_controls(
    opened,
):
    tab = opened("?iterations=2&seed=3")
    titles = "[...document.querySelectorAll('#pg-curves figcaption')].map(c => c.firstChild.textContent.trim())"
    drawn = dict(
        zip(
            tab.ask(titles),
            tab.ask(
                "[...document.querySelectorAll('#pg-curves .pg-present')].map(p => p.getAttribute('d'))"
            ),
            strict=True,
        )
    )
    height = float(drawn["Different word pairs"].split(" ")[-1])
    reference, reward = read_start(root / "docs/playground/start.json")
    policy = copy.deepcopy(reference.double())
    last = list(train(policy, reference, reward, PlaygroundSettings(seed=3), 2))[-1]
    texts = [
        [
            WORDS[token]
            for token, real in zip(ids.tolist(), mask.tolist(), strict=True)
            if real and token
        ]
        for ids, mask in zip(last.responses.ids, last.responses.mask, strict=True)
    ]
    pairs = [pair for words in texts for pair in zip(words, words[1:])]  # noqa: B905
    assert abs(height - (100 - 100 * len(set(pairs)) / len(pairs))) < 0.01
    order = "document.querySelector('.pg-experiments').compareDocumentPosition(document.querySelector('.pg-bar'))"
    assert tab.ask(order) & 4  # the controls follow


SET = """(name, x) => { const slider = document.getElementById('pg-' + name); slider.value = x === 'max' ? slider.max : x
  slider.dispatchEvent(new Event('input', {bubbles: true})) }"""


@pytest.mark.deep
def test_every_slider_is_held_by_the_address_and_restored(opened):
    tab = opened("?algorithm=grpo")
    names = tab.ask(
        "[...document.querySelectorAll('.playground input[type=range]')].map(x => x.id.slice(3))"
    )
    assert set(names) == {
        "beta",
        "clip",
        "lam",
        "lr",
        "epochs",
        "batch_size",
        "group_size",
        "temperature",
        "ent_coef",
        "seed",
    }
    for name in names:
        tab.ask(f"({SET})('{name}', {0 if name == 'epochs' else json.dumps('max')})")
    shown = (
        "[...document.querySelectorAll('.playground .pg-slider output')].map(x => x.textContent)"
    )
    before, asked = tab.ask(shown), tab.ask("location.search")
    assert (
        all(f"{name}=" in asked for name in (*names, "algorithm"))
        and opened(asked).ask(shown) == before
    )


# --- the training can be steered --------------------------------------------------------------------------------------
STEP = """(async n => { for (let i = 0; i < n; i++) { const at = document.getElementById('pg-iteration'), seen = at.textContent
  document.getElementById('pg-step').click(); while (at.textContent === seen) await new Promise(done => setTimeout(done, 20)) }
  await new Promise(done => setTimeout(done, 100)); return document.getElementById('pg-responses').innerText })"""


@pytest.mark.deep
def test_a_slider_acts_on_the_running_training(opened):
    tab = opened()
    plain = [tab.ask(f"{STEP}(1)") for _ in range(3)]
    tab.ask("document.getElementById('pg-reset').click()")
    tab.wait("document.getElementById('pg-iteration').textContent === 'Iteration 0'")
    steered = [tab.ask(f"{STEP}(1)")]
    tab.ask(f"({SET})('lr', 'max')")
    steered += [tab.ask(f"{STEP}(1)") for _ in range(2)]

    def texts(shown):
        return ["".join(c for c in line if c.isalpha() or c == " ") for line in shown.splitlines()]

    assert (
        texts(steered[0]) == texts(plain[0])
        and texts(steered[1]) == texts(plain[1])
        and texts(steered[2]) != texts(plain[2])
    )
    assert (
        tab.ask("document.querySelectorAll('.pg-chart')[0].querySelectorAll('.pg-mark').length")
        == 1
    )
    assert tab.ask(
        "[...document.querySelectorAll('.pg-chart')].every(c => c.querySelectorAll('.pg-earlier').length === 1)"
    )  # the run before, in grey


# --- what one sees ----------------------------------------------------------------------------------------------------
def test_the_next_word_is_that_of_the_model(opened):
    tab = opened()
    tab.wait("document.querySelector('#pg-next tbody tr')")
    table = tab.ask(
        "[...document.querySelectorAll('#pg-next tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    policy, _ = read_start(root / "docs/playground/start.json")
    context = [0, 0, *(WORDS.index(w) for w in "the plot is".split())]
    p = policy(torch.tensor(context))[0].softmax(-1)
    assert [row[0] for row in table] == [WORDS[i] for i in p.topk(8).indices]
    assert all(row[1] == row[2] == f"{100 * p[WORDS.index(row[0])]:.1f} %" for row in table)
    tab.ask(
        "(x => { x.value = 'the goose'; x.dispatchEvent(new Event('input')) })(document.getElementById('pg-prefix'))"
    )
    assert "goose" in tab.ask("document.getElementById('pg-unknown').textContent")


def test_no_barrier_that_axe_knows_and_nothing_beside_the_screen(opened):
    tab = opened("?beta=0&lr=0.01")
    tab.ask(f"{STEP}(3)")
    tab.ask(
        "document.querySelectorAll('details').forEach(d => { d.removeAttribute('name'); d.open = true })"
    )
    for width in (1280, 390):
        for dark in (False, True):
            tab.screen(width, dark=dark)
            assert not (found := tab.barriers()), (width, dark, found)
        assert tab.ask("document.documentElement.scrollWidth") <= width
