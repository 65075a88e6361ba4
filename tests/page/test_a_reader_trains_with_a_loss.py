"""A loss that a reader edits on the page: its numbers are torch's, and a mistake is said beside its line."""

import json
import subprocess
import sys
from pathlib import Path

import page_loss
import playground as page
import pytest
import torch

from instruct_goose import RLHFConfig
from instruct_goose.models.agent import Evaluation
from instruct_goose.objective.policy_loss import SURROGATES
from instruct_goose.recipes.inputs import load_plugins
from instruct_goose.tasks.playground import (
    ALGORITHMS,
    PlaygroundSettings,
    minibatch_loss,
    rewards_and_advantages,
)
from instruct_goose.training.experience import Experience
from instruct_goose.training.update import total_loss

EXPORTED = page_loss.exported_texts()
PLUGIN = page.plugin_text()
LENGTHS = [3, 5, 1, 4, 2, 5, 3, 4]
MASK = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
ROWS = [5, 0, 3, 6]  # of the minibatch


def tokens(seed: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    "One number per token, 0 at padding."
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(MASK.shape, generator=generator, dtype=torch.float64)
    return torch.where(MASK, scale * drawn + shift, 0.0)


OLD = tokens(0, 0.5, -2.0)
REF = OLD + tokens(1, 0.3)
VALUES = tokens(2)
SCORES = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, 1.5, -0.5, 0.25], dtype=torch.float64)
NEW = OLD + tokens(3, 0.4)  # some ratios leave the clip
NEW_VALUES = VALUES + tokens(4, 0.3)
ENTROPY = tokens(5, 0.1, 2.0)


def real(x: torch.Tensor, rows=slice(None)) -> list[float]:
    return x[rows][MASK[rows]].tolist()


def job(texts: dict, **settings) -> dict:
    return {
        "texts": texts,
        "settings": settings,
        "batch": [LENGTHS, SCORES.tolist(), real(OLD), real(REF), real(VALUES)],
        "new": [ROWS, real(NEW, ROWS), real(NEW_VALUES, ROWS), real(ENTROPY, ROWS)],
    }


@pytest.fixture(scope="session")
def ask(page_folder, tmp_path_factory):
    "ask(jobs): what Python says on the page, with the standard library only."

    def go(jobs: list[dict]) -> list[dict]:
        place = tmp_path_factory.mktemp("jobs")
        (place / "jobs.json").write_text(json.dumps(jobs), "utf-8")
        script = Path(__file__).parent / "ask_loss.py"
        paths = [script, page_folder, place / "jobs.json", place / "said.json"]
        subprocess.run([sys.executable, "-I", "-S", *map(str, paths)], check=True, timeout=300)
        return json.loads((place / "said.json").read_text("utf-8"))

    return go


def of_torch(surrogate: str | None = None, **chosen) -> tuple[list, list]:
    "What the library's own functions make with torch: advantages, and the three gradients."
    settings = PlaygroundSettings(**chosen)
    algorithm = dict(ALGORITHMS[settings.algorithm])
    if surrogate is not None:
        algorithm["surrogate"] = surrogate
    _, advantages, returns = rewards_and_advantages(
        SCORES, OLD, REF, MASK, VALUES, algorithm, settings
    )
    new = [x[ROWS].clone().requires_grad_() for x in (NEW, NEW_VALUES, ENTROPY)]
    has_critic = returns is not None
    loss, _ = minibatch_loss(
        new[0],
        OLD[ROWS],
        REF[ROWS],
        MASK[ROWS],
        advantages[ROWS],
        new[1] if has_critic else None,
        returns[ROWS] if has_critic else None,
        new[2],
        algorithm,
        settings,
    )
    loss.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in new]
    return real(advantages), [loss.item(), *(x[MASK[ROWS]].tolist() for x in gradients)]


def near(ours, theirs) -> bool:
    ours = torch.tensor(ours, dtype=torch.float64)
    return torch.allclose(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-9, atol=1e-9)


SETTINGS = {
    "ppo": {},
    "grpo": {"algorithm": "grpo", "kl_placement": "loss", "beta": 0.3},
    "rloo": {"algorithm": "rloo", "ent_coef": 0.03},
    "reinforce": {"algorithm": "reinforce"},
}


def test_the_exported_loss_gives_the_numbers_of_torch(ask):
    for said, settings in zip(ask([job({}, **s) for s in SETTINGS.values()]), SETTINGS.values()):
        advantages, gradients = of_torch(**settings)
        assert near(said["prepared"]["advantages"], advantages), settings
        found = said["gradient"]
        assert near(found["loss"], gradients[0]), settings
        for ours, theirs in zip(found["gradients"], gradients[1:]):
            assert near(ours, theirs), settings


@pytest.fixture
def plugged_in(tmp_path, monkeypatch):
    "The plug-in of the page in this process, loaded as the command line does; gone afterwards."
    before = dict(SURROGATES)
    (tmp_path / "my_loss.py").write_text(PLUGIN, "utf-8")
    load_plugins([str(tmp_path / "my_loss.py")])
    yield
    SURROGATES.clear()
    SURROGATES.update(before)


def test_one_text_trains_the_page_and_the_trainer(ask, plugged_in):
    "The text of lesson 24: on a page, by the library's functions, and in the trainer's own loss."
    (said,) = ask([job({page_loss.PLUGIN: PLUGIN})])
    assert said["added"] == {"added": {"surrogate": "soft_brake"}}
    advantages, gradients = of_torch("soft_brake")
    assert near(said["gradient"]["loss"], gradients[0])
    assert near(said["gradient"]["gradients"][0], gradients[1])

    config = RLHFConfig(surrogate="soft_brake", value_clip=None, vf_coef=0.5, beta=0.25)
    prepared = {"rewards": None, "returns": None}
    for name in ("rewards", "advantages", "returns"):
        prepared[name] = torch.zeros_like(OLD)
        prepared[name][MASK] = torch.tensor(said["prepared"][name], dtype=torch.float64)
    ids = MASK.long()
    batch = Experience(
        ids,
        MASK,
        ids,
        MASK,
        old_logprobs=OLD,
        ref_logprobs=REF,
        entropy=ENTROPY,
        values=VALUES,
        **prepared,
    )[ROWS]
    new = NEW[ROWS].clone().requires_grad_()
    loss, _ = total_loss(Evaluation(new, ENTROPY[ROWS], NEW_VALUES[ROWS]), batch, config, 0.25)
    loss.backward()
    assert near(said["gradient"]["loss"], loss.item())
    assert near(said["gradient"]["gradients"][0], new.grad[MASK[ROWS]].tolist())
    without = of_torch()[1]
    assert not near(said["gradient"]["gradients"][0], without[1])


def test_every_prepared_edit_changes_the_gradient_and_nothing_else(ask):
    edits = page.prepared_edits()
    texts = []
    for edit in edits:
        assert EXPORTED[edit["part"]].count(edit["old"]) == 1, edit["name"]
        texts.append({edit["part"]: EXPORTED[edit["part"]].replace(edit["old"], edit["new"])})
    plain, *edited = ask([job({}), *map(job, texts), job({})])
    *edited, again = edited
    assert again == plain
    for edit, said in zip(edits, edited):
        assert said["prepared"] == plain["prepared"], edit["name"]
        gradients, before = said["gradient"]["gradients"], plain["gradient"]["gradients"]
        assert not near(gradients[0], before[0]), edit["name"]
        assert near(gradients[2], before[2]), edit["name"]


def by_hand(edit: str) -> torch.Tensor:
    "∂L/∂log π of the policy's part, from the formula of each edit."
    advantages = torch.zeros_like(OLD)
    advantages[MASK] = torch.tensor(of_torch()[0], dtype=torch.float64)
    ratio = (NEW - OLD).exp()
    held = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    plain = torch.where(held, 0.0, ratio * advantages)
    tokens_of_row = MASK.sum(1, keepdim=True)
    real_tokens = MASK[ROWS].sum()
    slopes = {
        "no_clip": -ratio * advantages / real_tokens,
        "cispo": -ratio.clamp(0.8, 1.2) * advantages / real_tokens,
        "sign": plain / real_tokens,
        "sequence": -plain / tokens_of_row / len(ROWS),
    }
    return slopes[edit][ROWS][MASK[ROWS]]


def test_the_prepared_edits_are_what_their_names_say(ask):
    edits = page.prepared_edits()
    texts = [
        {edit["part"]: EXPORTED[edit["part"]].replace(edit["old"], edit["new"])} for edit in edits
    ]
    for edit, said in zip(edits, ask(list(map(job, texts)))):
        assert near(said["gradient"]["gradients"][0], by_hand(edit["name"]).tolist()), edit["name"]


# --- mistakes ---------------------------------------------------------------------------------
CLIPPED = "    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)"
LINE = EXPORTED["surrogate"].splitlines().index(CLIPPED) + 1
WRONG = {  # the new line, and words of what is said of it
    "    objective = (": "SyntaxError",
    "    objective = ratio * advantage": "NameError",
    "    objective = torch.einsum('ij,ij->ij', ratio, advantages)": "einsum",
    "    objective = ratio * advantages[:, :2]": "size of tensor",
    "    objective = (ratio * advantages).sqrt()": "gradient stops being finite",
    "    objective = (ratio - ratio.detach()).sqrt() * advantages": "gradient stops being finite",
}


def edited_line(line: str) -> dict[str, str]:
    return {"surrogate": EXPORTED["surrogate"].replace(CLIPPED, line)}


def test_a_mistake_is_said_beside_its_line(ask):
    for (line, words), said in zip(WRONG.items(), ask([job(edited_line(x)) for x in WRONG])):
        mistake = said["mistake"]
        assert (mistake["part"], mistake["line"]) == ("surrogate", LINE), (line, mistake)
        assert words in mistake["words"], (line, mistake)


def test_a_wrong_shape_is_said_beside_the_line_that_returns_it(ask):
    row, one = ask(
        [
            job(edited_line("    return (ratio * advantages).sum(1, keepdim=True)")),
            job(edited_line("    return (ratio * advantages).mean()")),
        ]
    )
    for said, shape in ((row, "(4, 1)"), (one, "()")):
        assert said["mistake"]["line"] == LINE, said
        assert f"has the shape {shape}; expected is (4, 5)" in said["mistake"]["words"]


def test_a_loss_that_does_not_depend_on_the_policy_is_refused(ask):
    (said,) = ask([job(edited_line("    objective = (ratio * advantages).detach()"))])
    assert "does not depend on log π" in said["mistake"]["words"]


def test_a_plugin_that_adds_nothing_is_refused(ask):
    nothing, broken = ask(
        [job({page_loss.PLUGIN: "x = 1\n"}), job({page_loss.PLUGIN: "x = 1\ny = x / 0\n"})]
    )
    assert "adds nothing" in nothing["mistake"]["words"]
    assert broken["mistake"]["part"] == page_loss.PLUGIN
    assert broken["mistake"]["line"] == 2


def test_a_definition_that_is_gone_is_named(ask):
    (said,) = ask([job({"average": EXPORTED["average"].replace("def whiten(", "def whitening(")})])
    assert "whiten" in said["mistake"]["words"]
