"""A reader's own runs to drag: frames are what the policy answers and earns at that iteration, and the same start for every price."""
import bisect
import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from instruct_goose.recipes.quickstart import QuickstartConfig, make_trainer
from instruct_goose.worlds import drift
from instruct_goose.worlds.drift import SHOWN, Frames, draw_drift, first_stages, frames_at, record_drift

TINY = dict(reviews=300, pairs=60, held_out_pairs=40, sft_steps=30, sft_batch_size=16, rm_steps=6, rm_batch_size=16, steps=3, batch_size=16,
            hidden_size=16, heads=2, layers=1, max_new_tokens=6, eval_samples=32, lr=3e-3, progress=False)
ROOT = Path(__file__).parents[2]
PROMPTS = ("the film", "a", "")


@pytest.fixture(scope="module")
def config(): return QuickstartConfig(**TINY)


@pytest.fixture(scope="module")
def stages(config): return first_stages(config)


def logits(model, ids):
    with torch.no_grad(): return model(torch.tensor([ids])).logits[0].double()


def written_by_hand(model, tokenizer, prompts, seed):
    "Token after token without a cache or padding: row i of step t gets die i of throw t, and takes the word on which it falls."
    generator, rows = torch.Generator().manual_seed(seed), [[tokenizer.bos_token_id] + tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
    heads, done = [len(r) for r in rows], [False] * len(rows)
    for _ in range(TINY["max_new_tokens"]):
        dice = torch.rand(len(rows), dtype=torch.float64, generator=generator).tolist()
        for i, u in enumerate(dice):
            if done[i]: continue
            steps = list(accumulate(logits(model, rows[i])[-1].softmax(-1).tolist()))
            rows[i].append(bisect.bisect_right(steps, u * steps[-1]))
            done[i] = rows[i][-1] == tokenizer.eos_token_id
        if all(done): break
    return [tokenizer.decode(r[1:], skip_special_tokens=True) for r in rows], [(r, n) for r, n in zip(rows, heads)]


def test_a_frame_is_what_the_policy_writes_at_that_iteration(config, stages):
    _, tokenizer, lm, reward_model = stages
    trainer, seen = make_trainer(config, lm, tokenizer), []
    def judge(model):
        by_hand, rows = written_by_hand(model, tokenizer, PROMPTS, 5)
        kl = sum((logits(model, r).log_softmax(-1) - logits(lm, r).log_softmax(-1))[n - 1:-1].mul(logits(model, r).softmax(-1)[n - 1:-1]).sum() for r, n in rows)
        seen.append(by_hand)
        return {"kl": kl.item()}

    looks = Frames(judge, PROMPTS, every=2, seed=5)
    looks.look(trainer)
    trainer.callbacks.append(looks)
    trainer.train(stages[0].prompts, reward_model, progress=False)
    assert [f["iteration"] for f in looks.frames] == [0, 2, 3]  # the last one too
    assert [f["texts"] for f in looks.frames] == seen and len({tuple(t) for t in seen}) > 1
    assert [f["kl"] == 0 for f in looks.frames] == [True, False, False]


def test_every_price_starts_from_the_same_policy_and_goes_its_own_way(config, stages, monkeypatch):
    trained, before = [], [p.clone() for p in stages[2].parameters()]
    def keep(*args): trained.append(make_trainer(*args)); return trained[-1]
    monkeypatch.setattr(drift, "make_trainer", keep)
    record = record_drift((0, 2.), config, PROMPTS, every=2, judged=8, stages=stages)
    free, dear = record["runs"]
    assert (free["beta"], dear["beta"]) == (0., 2.) and [t.config.beta for t in trained] == [0., 2.]
    assert record["prompts"] == list(PROMPTS) and record["seed"] == 0
    assert free["frames"][0] == dear["frames"][0] and free["frames"][0]["kl_to_reference"] == 0.
    assert free["frames"][-1] != dear["frames"][-1] and all(set(f) == {"iteration", "texts", *SHOWN} for f in free["frames"])
    for run, trainer in zip(record["runs"], trained, strict=True):
        end = run["frames"][-1]
        assert end["texts"] == written_by_hand(trainer.agent.model, stages[1], PROMPTS, 3)[0]
        answers, rows = written_by_hand(trainer.agent.model, stages[1], stages[0].held_out_prompts[:8], dice_of_the_judge(config))
        p, q = ([logits(m, r).log_softmax(-1)[n - 1:-1] for r, n in rows] for m in (trainer.agent.model, stages[2]))
        assert end["kl_to_reference"] == pytest.approx(sum((a.exp() * (a - b)).sum().item() for a, b in zip(p, q)) / 8, rel=6e-3)
    assert frames_at(trained[1].config, stages, PROMPTS, 2, 8) == dear["frames"]  # again: the same
    assert all(torch.equal(a, b) for a, b in zip(before, stages[2].parameters(), strict=True))  # the start is copied, not trained


def dice_of_the_judge(config):
    from instruct_goose.supervised.fit import one_seed
    return one_seed(config.seed, "evaluation")


@pytest.mark.parametrize("betas, changes, word", [
    ((), {}, "at least one"), ((.1, .1), {}, "each once"), (-1., {}, "beta"), (.1, {"every": 0}, "at least 1"),
    (.1, {"prompts": ["the film is a film that goes on and on " * 9]}, "tokens")])
def test_what_cannot_be_recorded_is_refused_before_anything_is_trained(betas, changes, word, config, monkeypatch):
    monkeypatch.setattr(drift, "first_stages", lambda config: pytest.fail("trained"))
    with pytest.raises(ValueError, match=word): record_drift(betas, config, **changes)


def test_the_figure_carries_its_record_and_no_other_file():
    record = {"prompts": ["</script>$x"], "runs": [{"beta": .5, "frames": [{"iteration": 0, "texts": ["<b>é"]}]}]}
    page = draw_drift(record)._repr_html_()
    [found] = re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    assert json.loads(found) == record and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    place = re.match(r'<div class="drift" id="([\w-]+)"', page)[1]
    other = draw_drift(record | {"seed": 1}).html
    assert page.count(f'"{place}"') == 2 and place not in other  # two figures of one notebook do not share an id, or buttons
    assert 'id="here"' in draw_drift(record, "here").html and f'name: "{place}-beta"' in page


@pytest.mark.parametrize("lesson", ["learn/03_quickstart", "guides/drag_a_run"])
def test_the_cells_that_a_reader_starts_by_hand_run(lesson, config, stages, monkeypatch):
    "No lesson runs them, since they take minutes: here with the small models."
    monkeypatch.setattr(drift, "QuickstartConfig", lambda: config)
    monkeypatch.setattr(drift, "first_stages", lambda _: stages)
    cells = ["".join(c["source"]) for c in json.loads((ROOT / f"nbs/{lesson}.ipynb").read_text("utf-8"))["cells"]]
    mine, = (s for s in cells if s.startswith("#| eval: false"))
    there = dict(zip(("data", "tokenizer", "lm", "reward_model"), stages), config=config, record_drift=record_drift, draw_drift=draw_drift)
    exec(mine, there)
    assert [r["beta"] for r in there["mine"]["runs"]] == [float(x) for x in re.search(r"record_drift\(\(([^)]*)\)", mine)[1].split(",")]
