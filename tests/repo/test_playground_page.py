"""The playground in a browser, from a file and without a network: equal to the library number by number, and a page that can be used."""
import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from deep import first

root = Path(__file__).parents[2]
sys.path[:0] = [str(root / "docs"), str(root / "tests/repo")]
import chromium  # noqa: E402
import playground  # noqa: E402

from instruct_goose.worlds.playground import PlaygroundSettings, evaluate, read_start, train  # noqa: E402

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "playground.html").write_text(playground.page(), "utf-8")
    return (folder / "playground.html").as_uri()


@pytest.fixture
def opened(browser, page):
    tabs = []

    def go(asked="", **screen):
        tabs.append(browser.open(page + asked, **screen))
        tabs[-1].ask("playground.ready.then(() => 1)") if "iterations" not in asked else tabs[-1].wait("!document.getElementById('result').hidden", 300)
        return tabs[-1]

    yield go
    for tab in tabs:
        assert not tab.log and all(a.startswith(("file:", "blob:", "data:")) for a in tab.asked), (tab.log, tab.asked)
        tab.close()


# --- equal to the library ---------------------------------------------------------------------------------------------
CASES = {
    "ppo": {}, "grpo": {"algorithm": "grpo", "kl_placement": "loss", "beta": .3}, "rloo": {"algorithm": "rloo"},
    "reinforce": {"algorithm": "reinforce", "seed": 7},
    "everything else": {"temperature": .7, "ent_coef": .03, "lam": .5, "clip": .05, "epochs": 3, "batch_size": 32, "kl_placement": "loss", "seed": 3}}


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", first(3, CASES))
def test_ten_iterations_equal_those_of_the_library(opened, case):
    settings, n = CASES[case], 10
    there = opened().ask(f"playground.trace({json.dumps(settings)}, {n})")
    reference, reward = read_start(root / "docs/playground/start.json")
    policy = copy.deepcopy(reference.double())
    for here, of_page in zip(train(policy, reference, reward, PlaygroundSettings(**settings), n), there["iterations"], strict=True):
        r = here.responses
        rows = lambda x: [row[m].tolist() for row, m in zip(x, r.mask)]  # noqa: B023
        assert rows(r.ids) == of_page["ids"]
        for name, x in {"logprobs": r.logprobs, "values": r.values, "ref_logprobs": here.ref_logprobs, "rewards": here.rewards, "advantages": here.advantages}.items():
            for ours, theirs in zip(rows(x), of_page[name], strict=True): close(ours, theirs)
        close(here.losses, of_page["losses"])
        close(here.gradient_norms, of_page["gradient_norms"])
    close(torch.cat([p.detach().flatten() for p in policy.parameters()]), there["weights"])
    moved = max((a - b).abs().max().item() for a, b in zip(policy.parameters(), reference.parameters()))
    assert moved > .01
    for name, x in evaluate(policy, reference, reward).items(): close(x, there["figures"][name])
