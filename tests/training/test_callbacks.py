"When a run ends, what it tells, held-out prompts and the best policy, and rewards that are asked again."

import numpy as np
import pytest
import torch
from small_trainer import (
    EOS,
    FOUR,
    HELD_OUT,
    PROMPTS,
    TOKENIZER,
    even,
    kl_by_hand,
    made,
    no_clock,
    reward,
    rows,
    same,
    tiny,
    trainer,
    weights,
)

from instruct_goose.config import RLHFConfig
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import pad
from instruct_goose.rollouts.rewards import RecheckRewards, RewardError
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer


def test_a_run_stops_after_the_iteration_whose_kl_is_too_large():
    free = trainer()
    history = free.train(PROMPTS, reward, steps=6, progress=False)
    kl = [m["kl_to_reference"] for m in history]
    limit = kl[2]
    first = next(i for i, x in enumerate(kl) if x > limit)
    assert free.stopped is None and 2 < first < 5
    t, told = trainer(kl_stop=limit), []

    def note(m):
        told.append((m["iteration"], {k: x.clone() for k, x in t.agent.model.state_dict().items()}))

    stopped = t.train(PROMPTS, reward, steps=6, callback=note, progress=False)
    policies = [policy for _, policy in told]
    assert all(
        x.equal(policies[first - 2][k]) for k, x in t.agent.model.state_dict().items()
    )  # the one that wrote the last rollout within the limit
    assert f"the policy after {first - 1} iterations is put back" in t.stopped and not policies[
        first - 2
    ]["lm_head.weight"].equal(policies[first - 1]["lm_head.weight"])
    assert (
        no_clock(stopped) == no_clock(history[: first + 1])
        and [i for i, _ in told] == list(range(first + 1))
        and t.iteration == first + 1
    )
    assert t.stopped.startswith(
        f"iteration {first}: kl_to_reference is {kl[first]:.3g}, above kl_stop"
    )
    t.config.kl_stop = 1e9
    with pytest.raises(RewardError):
        t.train(PROMPTS, lambda texts: None, steps=1, progress=False)
    assert t.stopped is None  # it is over that the last run was stopped
    assert (
        len(t.train(PROMPTS, reward, steps=2, progress=False)) == 2
        and t.stopped is None
        and t.iteration == first + 3
    )


def test_a_callback_that_stops_is_named():
    t = trainer()
    assert (
        len(t.train(PROMPTS, reward, callback=lambda m: m["iteration"] == 1, progress=False)) == 2
    )
    assert t.stopped == "iteration 1: the callback asked for it"


class Watched(RLHFTrainer):
    "Keeps the rollouts it judges; held-out ones get the next of a script's rewards, if there is one."

    def judge(self, rollout, reward_fn, kind="text"):
        self.__dict__.setdefault("judged", []).append((kind, rollout))
        if kind == "held-out text" and getattr(self, "script", None):
            return torch.full((len(rollout),), self.script.pop(0))
        return super().judge(rollout, reward_fn, kind)


def test_evaluating_changes_no_bit_of_the_training():
    plain, watched = trainer(), trainer(eval_every=2, keep_best=True)
    state = torch.get_rng_state()
    one = plain.train(
        PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT
    )  # without eval_every they are not asked
    two = watched.train(PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT)
    assert (
        torch.get_rng_state().equal(state)
        and same(weights(plain), weights(watched))
        and watched.stopped is None
    )
    assert plain.sampling.get_state().equal(
        watched.sampling.get_state()
    ) and plain.shuffling.get_state().equal(watched.shuffling.get_state())
    held = [{k: m.pop(k) for k in list(m) if k.startswith("held_out")} for m in two]
    assert no_clock(one) == no_clock(two) and [sorted(h) for h in held] == [
        [],
        ["held_out_kl", "held_out_reward"],
    ] * 2 + [[]]
    assert plain.best is None and watched.best is not None
    assert all(m.training for m in watched.agent.modules())  # dropout is as it was


def test_what_an_evaluation_says_is_so():
    t = trainer(Watched, eval_every=3, seed=4, temperature=1.2)
    history = t.train(PROMPTS, reward, steps=3, progress=False, held_out=HELD_OUT)
    held = [r for kind, r in t.judged if kind == "held-out text"]
    assert [len(r) for r in held] == [8, 3] and [x.split()[0] for r in held for x in r.prompts] == [
        "w7"
    ] * 11
    texts, dice = (
        [text for r in held for text in r.texts],
        torch.Generator().manual_seed(4 * 2**20 + 2**20 - 1),
    )
    for part, r in zip((HELD_OUT[:8], HELD_OUT[8:]), held, strict=True):
        response, mask = sample(
            t.agent,
            *pad([TOKENIZER(p)["input_ids"] for p in part], EOS, side="left"),
            6,
            EOS,
            EOS,
            1.2,
            dice,
        )
        assert response.equal(r.response_ids) and mask.equal(r.mask)
    assert history[2]["held_out_reward"] == pytest.approx(sum(reward(texts)) / 11)
    kl = [x for r in held for x in kl_by_hand(t.agent.model, t.ref_model, *rows(r), 1.2)]
    assert history[2]["held_out_kl"] == pytest.approx(sum(kl) / 11, rel=1e-6) and sum(kl) > 0.01
    again = t.evaluate(HELD_OUT, reward)
    assert again == {k: history[2][k] for k in again}  # the same dice every time
    as_ids = dict(
        zip(
            ("query_ids", "query_mask"),
            pad([TOKENIZER(p)["input_ids"] for p in HELD_OUT], EOS, side="left"),
            strict=True,
        )
    )
    assert t.evaluate(as_ids, reward) == again


def test_the_best_policy_is_kept():
    t, snapshots = trainer(Watched, eval_every=1, keep_best=True, batch_size=16), []
    t.script = [1.0, 5.0, 3.0, 5.0]  # the first of equals stays
    t.train(
        PROMPTS,
        reward,
        steps=4,
        progress=False,
        held_out=HELD_OUT[:8],
        callback=lambda m: snapshots.append(
            {k: x.clone() for k, x in t.agent.model.state_dict().items()}
        ),
    )
    assert t.best_policy.reward == 5.0 and all(x.device.type == "cpu" for x in t.best.values())

    def is_(i):
        return (
            all(t.best[k].equal(x) for k, x in snapshots[i].items())
            and t.best.keys() == snapshots[i].keys()
        )

    assert [is_(i) for i in range(4)] == [False, True, False, False]
    fresh = tiny(seed=3)
    fresh.load_state_dict(t.best)
    value = t.agent.value_head.weight.clone()
    t.load_best()
    ids = torch.tensor([[0, 3, 4]])
    assert t.agent.model.eval()(ids).logits.equal(
        fresh.eval()(ids).logits
    ) and t.agent.value_head.weight.equal(value)
    kept = {k: x.clone() for k, x in t.best.items()}
    t.step(PROMPTS, reward)
    assert all(t.best[k].equal(x) for k, x in kept.items()) and not all(
        x.equal(t.agent.model.state_dict()[k]) for k, x in kept.items()
    )


def test_stopping_and_evaluating_refuse_before_any_work(unchecked):
    asked = []

    def judge(texts):
        asked.append(texts)
        return reward(texts)

    with unchecked():
        for held_out, says in (
            (None, "eval_every is 2, but there is nothing to evaluate on: pass held_out="),
            ([], "no prompts"),
            (["w1 " * 16], "the limit is 14"),
        ):
            with pytest.raises(ValueError, match=says):
                trainer(eval_every=2).train(PROMPTS, judge, progress=False, held_out=held_out)
        with pytest.raises(ValueError, match="no policy has been kept: set keep_best"):
            trainer().load_best()
        with pytest.raises(
            ValueError,
            match="eval_every is None: it must be a number of iterations, at most steps, with keep_best",
        ):
            RLHFConfig(keep_best=True)
    assert not asked


class Misspelt(Callback):
    def on_iterations(self, trainer, rollout, metrics):
        pass


class Loose:
    def on_iteration(self, trainer, rollout, metrics):
        pass


@pytest.mark.parametrize(
    "own, function, says",
    [
        (
            [Misspelt()],
            None,
            "Misspelt.on_iterations is called by no step: the hooks are on_rollout.*on_iteration",
        ),
        ([Loose()], None, "Loose.* is no Callback"),
        ([], [print], "one function of the metrics"),
    ],
)
def test_what_is_no_callback_gets_a_sentence(own, function, says, unchecked):
    t = trainer()
    t.callbacks = own
    with unchecked(), pytest.raises(TypeError, match=says):
        t.train(PROMPTS, reward, callback=function, progress=False)
    assert t.iteration == 0


def noisy(texts):
    return [
        x + torch.rand(()).item() + np.random.rand() for x in even(texts)
    ]  # the shape checker plays with Python's


@pytest.mark.parametrize("reward", [even, noisy])
def test_asking_again_changes_no_number_of_the_run(reward):
    logs = []
    for again in (False, True):
        t = made(callbacks=[RecheckRewards(reward, rows=3)] if again else [])
        torch.manual_seed(3)
        np.random.seed(3)  # the reward's own dice, which are global
        logs.append(
            [
                {k: x for k, x in t.step(FOUR * 2, reward).items() if "second" not in k}
                for _ in range(3)
            ]
        )
    for alone, asked in zip(*logs, strict=True):
        found = {k: asked.pop(k) for k in ("reward_noise", "reward_shift")}
        assert alone == asked
        assert (
            found["reward_noise"] > 0.01
            if reward is noisy
            else found == {"reward_noise": 0, "reward_shift": 0}
        )


def test_a_run_asks_again_as_often_as_its_setting_says():
    log = made(recheck_every=2, steps=4).train(FOUR, even, progress=False)
    assert {
        m["iteration"]: (m["reward_noise"], m["reward_shift"]) for m in log if "reward_noise" in m
    } == {0: (0, 0), 2: (0, 0)}
