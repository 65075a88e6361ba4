"""Two processes give what one gives: weights, texts, metrics, files. The oracle is the same trainer in one process, whose arithmetic other files
check against equations."""

import pytest
import torch
from deep import first
from two_processes import (
    GRPO,
    PPO,
    PROMPTS,
    apart,
    reward,
    rollout,
    run,
    same_numbers,
    trainer_of,
    weights_of,
)

from instruct_goose.core.processes import in_processes, is_main, rank, rank_slice
from instruct_goose.rollouts.rollout import Rollout, concat
from instruct_goose.training.callbacks import Callback

CASES = {
    "ppo": ("ppo", PPO | dict(eval_every=4), 10, torch.float64),
    "grpo in float32": ("grpo", GRPO, 10, torch.float32),
    "dapo, whole responses only": ("dapo", GRPO | dict(mask_truncated=True), 2, torch.float64),
    "remax, two of three rows": (
        "remax",
        dict(batch_size=3, minibatches=3, epochs=1),
        2,
        torch.float64,
    ),
}


@pytest.mark.parametrize("name", first(2, CASES))
def test_two_processes_are_one(name):
    preset, settings, steps, dtype = CASES[name]
    held = dict(held_out=PROMPTS[:3]) if "eval_every" in settings else {}
    weights, texts, history = run(preset, settings, steps, dtype, **held)
    (one, one_texts, one_history), (two, two_texts, two_history) = in_processes(
        2, run, preset, settings, steps, dtype, seconds=500, **held
    )
    assert all(torch.equal(one[k], two[k]) for k in one)  # the two agree to the bit
    assert apart(weights, one) < (1e-5 if dtype is torch.float32 else 1e-9)
    assert texts == one_texts == two_texts  # the dice fell the same way
    if dtype is torch.float64:
        same_numbers(history, one_history)
    logs = (
        [{k: x for k, x in m.items() if "second" not in k} for m in history]
        for history in (one_history, two_history)
    )
    assert next(logs) == next(logs)


# ----------------------------------------------------------- a sampler that has dice of its own


class OwnDice:
    "Another program's sampler: it takes the generator as it is, so its texts depend on who asks."

    told = 0

    def updated(self, model):
        self.told += 1

    def __call__(self, queries, n, config, generator):
        ids, mask = (x.repeat_interleave(n, 0) for x in queries)
        width = int(torch.randint(2, 6, (), generator=generator))
        return Rollout(
            ids,
            mask,
            torch.randint(1, 9, (len(ids), width), generator=generator),
            torch.ones(len(ids), width).bool(),
        )


class Recorded:
    "The same rollouts again."

    def __init__(self, rollouts):
        self.rollouts, self.next = rollouts, -1

    def __call__(self, queries, n, config, generator):
        self.next += 1
        return self.rollouts[self.next]


class Keep(Callback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, trainer, r):
        self.rollouts.append(Rollout(r.query_ids, r.query_mask, r.response_ids, r.mask))


def run_with(sampler, preset, settings, steps=3):
    trainer, keep = trainer_of(preset, sampler=sampler, steps=steps, **settings), Keep()
    trainer.callbacks.append(keep)
    trainer.train(PROMPTS, [reward], progress=False)
    return weights_of(trainer), keep.rollouts, getattr(sampler, "told", None)


def test_given_the_same_rollouts_any_sampler_trains_alike():
    (two, rollouts, told), other = in_processes(
        2, lambda: run_with(OwnDice(), "grpo", GRPO), seconds=500
    )
    assert all(torch.equal(two[k], other[0][k]) for k in two) and told == 3
    assert len({r.mask.shape[1] for r in rollouts}) > 1 and not torch.equal(
        rollouts[0].response_ids, rollouts[1].response_ids
    )
    assert apart(run_with(Recorded(rollouts), "grpo", GRPO)[0], two) < 1e-9


def noting(texts, log_metric, log_extra):
    log_metric("rows", len(texts))
    if texts[0].startswith(PROMPTS[0]):
        log_extra("words of the first", [len(t.split()) for t in texts])
    log_extra("words", [len(t.split()) for t in texts])
    return [0.0] * len(texts)


def note():
    t = trainer_of(**PPO)
    r = t.score(t.rollout((PROMPTS * 2)[:7]), noting)
    return r.logged, r.extra, r.texts, rank_slice(7).stop


def test_what_a_reward_notes_is_put_together_in_every_process():
    "Three or four rows each: the mean of the calls is 3.5."
    both = in_processes(2, note)
    first = both[0][3]
    for logged, extra, texts, _ in both:
        words = [len(t.split()) for t in texts]
        assert logged == {"rows": 3.5} and extra == {
            "words of the first": words[:first] + [None] * (7 - first),
            "words": words,
        }


def test_rollouts_are_joined_at_their_padding():
    a, b = rollout(1), rollout(2)
    a.response_ids, a.mask = a.response_ids[:, :1], a.mask[:, :1]
    b.query_ids, b.query_mask = torch.tensor([[5, 6, 7]] * 2), torch.ones(2, 3).bool()
    a.texts, b.texts, a.columns, b.columns = ["x"], ["y", "z"], {"n": [1]}, {"n": [2, 3]}
    r = concat([a, b], pad_id=8)
    assert r.query_mask.tolist() == [[False, True, True]] + [
        [True] * 3
    ] * 2 and r.response_ids.tolist() == [[1, 8, 8, 8], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert (
        r.texts == ["x", "y", "z"] and r.columns == {"n": [1, 2, 3]} and r.sampled_logprobs is None
    )


def test_other_prompts_or_settings_are_refused():
    def other_prompts():
        trainer = trainer_of("grpo", **GRPO)
        with pytest.raises(
            ValueError, match="the prompts differ between process .* the trainer deals it out"
        ):
            trainer.step(PROMPTS[:3] if is_main() else PROMPTS[1:4], reward)
        with pytest.raises(ValueError, match="the settings differ"):
            trainer_of("grpo", **GRPO | dict(lr=1e-3 * (1 + rank())))
        return True

    assert in_processes(2, other_prompts) == [True, True]
