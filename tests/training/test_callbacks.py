"""Callbacks: when they are called, how they end a run, and what of them is saved.

Held-out prompts and rewards that are asked again stand here, too: they must not change the run.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import two_processes
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
    trainer,
    weights,
)
from states import through_files

from instruct_goose.core.checks import check_values
from instruct_goose.core.processes import in_processes, rank
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import pad
from instruct_goose.training.callbacks import Callback, Phases, StopWhen
from instruct_goose.training.trainer import RLHFTrainer

# ── the hooks ──


class Journal(Callback):
    "Writes down each hook with what it is given."

    def __init__(self, calls, name=""):
        self.calls = calls
        self.name = name

    def note(self, hook, given):
        self.calls.append((self.name + hook, type(given).__name__))

    def on_rollout(self, trainer, rollout):
        self.note("on_rollout", rollout)

    def on_score(self, trainer, rollout):
        self.note("on_score", rollout)

    def on_annotate(self, trainer, annotations):
        self.note("on_annotate", annotations)

    def on_advantages(self, trainer, experience):
        self.note("on_advantages", experience)

    def on_optimize(self, trainer, update):
        self.note("on_optimize", update)

    def on_iteration(self, trainer, experience, metrics):
        self.note("on_iteration", experience)

    def on_iteration_end(self, trainer, experience, metrics):
        self.note("on_iteration_end", experience)


def test_each_phase_tells_its_hook_what_it_has_made():
    calls = []
    trainer(callbacks=[Journal(calls)]).step(PROMPTS, reward)
    assert calls == [
        ("on_rollout", "Rollout"),
        ("on_score", "Rollout"),
        ("on_annotate", "Annotations"),
        ("on_advantages", "Experience"),
        ("on_optimize", "dict"),
        ("on_iteration", "Experience"),
        ("on_iteration_end", "Experience"),
    ]


def test_callbacks_are_told_in_their_order_and_the_function_of_train_comes_last():
    calls = []
    t = trainer(callbacks=[Journal(calls, "first "), Journal(calls, "second ")])
    t.train(PROMPTS, reward, steps=1, progress=False, callback=lambda m: calls.append(("third", m)))
    told = [name for name, _ in calls if name.endswith("on_iteration") or name == "third"]
    assert told == ["first on_iteration", "second on_iteration", "third"]


def test_the_function_of_train_is_forgotten_when_the_run_is_over():
    own = Callback()
    t = trainer(callbacks=[own])
    t.train(PROMPTS, reward, steps=1, progress=False, callback=lambda m: None)
    assert t.callbacks == [own]


def test_what_a_callback_adds_to_the_metrics_is_logged():
    class Adds(Callback):
        def on_iteration(self, trainer, experience, metrics):
            metrics["longest"] = int(experience.mask.sum(-1).max())

    history = trainer(callbacks=[Adds()]).train(PROMPTS, reward, steps=2, progress=False)
    assert all(1 <= m["longest"] <= 6 for m in history)


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.float32(2.0)], ids=["torch", "numpy"])
def test_a_metric_that_the_log_cannot_hold_is_named(value):
    class Adds(Callback):
        def on_iteration(self, trainer, experience, metrics):
            metrics["longest"] = value

    with pytest.raises(TypeError, match=r"the metric 'longest', .* numbers of Python, as .item"):
        trainer(callbacks=[Adds()]).train(PROMPTS, reward, steps=2, progress=False)


def test_what_on_optimize_adds_replaces_no_metric():
    class Adds(Callback):
        def on_optimize(self, trainer, update):
            update["entropy"] = 0.0

    with pytest.raises(ValueError, match="on_optimize of a callback, logs .* 'entropy'"):
        trainer(callbacks=[Adds()]).train(PROMPTS, reward, steps=1, progress=False)


class Clock:
    "Seconds that pass only when somebody says so."

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


class NoChecks:
    def read(self):
        pass


def test_the_time_of_a_callback_belongs_to_no_phase(monkeypatch, unchecked):
    clock = Clock(monkeypatch)

    class Slow(Callback):
        def on_rollout(self, trainer, rollout):
            clock.now += 100.0

    with unchecked():
        done = Phases(None, [Slow()], NoChecks())
        rollout = SimpleNamespace(host_copy=None)
        clock.now += 2.0
        assert done.rollout(rollout) is rollout
        clock.now += 3.0
        done.score("a rollout")
    assert done.seconds == {"rollout": 2.0, "score": 3.0}


class Misspelt(Callback):
    def on_iterations(self, trainer, experience, metrics):
        pass


class Loose:
    def on_iteration(self, trainer, experience, metrics):
        pass


@pytest.mark.parametrize(
    "own, function, says",
    [
        (
            [Misspelt()],
            None,
            "Misspelt.on_iterations is called by no phase: the hooks are on_rollout.*on_iteration",
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


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def fail_in_process_one(hook):
    "Train in each of two processes; a hook of process 1 raises. Returns what each one raised."

    def fail(callback, *given):
        raise ZeroDivisionError("of process 1")

    failing = type("Failing", (Callback,), {hook: fail})
    t = two_processes.trainer_of(batch_size=4)
    t.callbacks = [failing()] if rank() == 1 else []  # each process has its own list
    try:
        t.train(two_processes.PROMPTS, two_processes.reward, steps=1, progress=False)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_of_a_hook_in_one_process_is_named_in_the_others(hook):
    first, second = in_processes(2, fail_in_process_one, hook)
    assert second == "ZeroDivisionError: of process 1"
    assert first.startswith("PeerFailed: process 1 of 2 failed")
    assert "ZeroDivisionError: of process 1" in first


# ── ending a run ──


def test_a_text_from_on_iteration_ends_the_run_and_says_why():
    class Enough(Callback):
        def on_iteration(self, trainer, experience, metrics):
            return "I have seen enough" if metrics["iteration"] == 1 else None

    t = trainer(callbacks=[Enough()])
    assert len(t.train(PROMPTS, reward, progress=False)) == 2
    assert t.stop_reason == "iteration 1: I have seen enough"


def test_a_function_that_returns_something_true_ends_the_run():
    t = trainer()
    history = t.train(PROMPTS, reward, callback=lambda m: m["iteration"] == 1, progress=False)
    assert len(history) == 2
    assert t.stop_reason == "iteration 1: the callback asked for it"


@pytest.mark.parametrize("answer", [None, False, 0, ""])
def test_a_function_that_returns_nothing_true_lets_the_run_go_on(answer):
    t = trainer(callbacks=[StopWhen(lambda metrics: answer)])
    assert len(t.train(PROMPTS, reward, steps=2, progress=False)) == 2
    assert t.stop_reason is None


def test_of_several_callbacks_the_first_reason_is_named():
    class Late(Callback):
        def on_iteration(self, trainer, experience, metrics):
            return "too late"

    t = trainer(callbacks=[StopWhen(lambda metrics: True), Late()])
    t.train(PROMPTS, reward, progress=False)
    assert t.stop_reason == "iteration 0: the callback asked for it"


@pytest.mark.parametrize("answer", [True, 1, ["why"], object()])
def test_a_reason_to_stop_that_is_no_text_is_an_error_that_names_the_callback(answer):
    class Hasty(Callback):
        def on_iteration(self, trainer, experience, metrics):
            return answer

    with pytest.raises(TypeError, match=r"Hasty\.on_iteration returned .*return None to go on"):
        trainer(callbacks=[Hasty()]).train(PROMPTS, reward, progress=False)


@pytest.mark.parametrize("answer", [None, False, 0, ""])
def test_what_is_false_is_no_reason_to_stop(answer):
    class Calm(Callback):
        def on_iteration(self, trainer, experience, metrics):
            return answer

    t = trainer(callbacks=[Calm()])
    assert len(t.train(PROMPTS, reward, steps=2, progress=False)) == 2
    assert t.stop_reason is None


def test_an_error_of_the_final_kl_after_a_callback_has_stopped_names_the_iteration():
    class BreakAndStop(Callback):
        def on_iteration(self, trainer, experience, metrics):
            if metrics["iteration"] < 1:
                return None
            next(iter(trainer.agent.model.parameters())).data.fill_(float("nan"))
            return "enough"

    t = trainer(max_kl_to_reference=1e9, callbacks=[BreakAndStop()])
    with pytest.raises(FloatingPointError, match=r"^iteration 1: .* weight .* is not finite"):
        t.train(PROMPTS, reward, progress=False)


def test_beside_the_reason_of_a_callback_stands_that_a_policy_was_put_back():
    t = trainer(max_kl_to_reference=1e-9, callbacks=[StopWhen(lambda metrics: True)])
    t.train(PROMPTS, reward, progress=False)
    assert t.stop_reason.startswith("iteration 0: the callback asked for it; final_kl_to_reference")
    assert t.stop_reason.endswith("the policy after 0 iterations is put back")


@pytest.mark.parametrize("hook", ["on_iteration", "on_iteration_end"])
def test_a_metric_that_no_log_can_hold_is_named_before_the_log_is_written(hook):
    written = []

    def add_tensor(self, trainer, experience, metrics):
        metrics["my_number"] = torch.ones(3)

    class Log(Callback):
        def on_iteration_end(self, trainer, experience, metrics):
            written.append(metrics)

    adder = type("Adder", (Callback,), {hook: add_tensor})()
    with pytest.raises(TypeError, match=r"'my_number', which a callback has added, .* Tensor"):
        trainer(callbacks=[adder, Log()]).train(PROMPTS, reward, progress=False)
    assert written == []


def test_at_on_end_the_trainer_knows_that_the_run_ends():
    class Last(Callback):
        def on_iteration_end(self, trainer, experience, metrics):
            self.reason = trainer.stop_reason

    last = Last()
    t = trainer(callbacks=[last])
    t.train(PROMPTS, reward, progress=False, callback=lambda m: True)
    assert last.reason == t.stop_reason == "iteration 0: the callback asked for it"


# ── what is saved ──


class RunningReward(Callback):
    "A running average of the reward, which it adds to the metrics."

    def __init__(self, decay=0.9):
        self.decay = decay
        self.mean = torch.zeros((), dtype=torch.float64)

    def on_iteration(self, trainer, experience, metrics):
        self.mean = self.decay * self.mean + (1 - self.decay) * experience.scores.double().mean()
        metrics["running_reward"] = self.mean.item()

    def state_dict(self):
        return {"mean": self.mean, "decay": self.decay}

    def check_state_dict(self, state):
        check_values(state, {"mean": torch.Tensor, "decay": float})

    def load_state_dict(self, state):
        self.mean = state["mean"]


def stopped_run(tmp_path, *callbacks):
    "The state of a run after two of four iterations, through the files of a checkpoint."
    t = trainer(steps=4, callbacks=callbacks)
    t.train(PROMPTS, reward, steps=2, progress=False)
    return through_files(tmp_path, t.state_dict())


def test_the_state_of_a_callback_survives_a_resume_to_the_bit(tmp_path):
    whole = trainer(steps=4, callbacks=[RunningReward()])
    expected = whole.train(PROMPTS, reward, progress=False)
    again = trainer(steps=4, callbacks=[RunningReward()])
    again.load_state_dict(stopped_run(tmp_path, RunningReward()))
    assert no_clock(again.train(PROMPTS, reward, progress=False)) == no_clock(expected[2:])
    assert again.callbacks[0].mean.equal(whole.callbacks[0].mean)


def named(callback, name):
    callback.name_in_checkpoint = name
    return callback


def test_two_callbacks_of_a_class_find_their_states_by_name_in_any_order(tmp_path):
    slow, fast = named(RunningReward(0.9), "slow"), named(RunningReward(0.5), "fast")
    state = stopped_run(tmp_path, slow, fast)
    assert state["parts"]["callback slow"]["decay"] == 0.9
    assert state["parts"]["callback fast"]["decay"] == 0.5
    other_slow, other_fast = named(RunningReward(0.9), "slow"), named(RunningReward(0.5), "fast")
    again = trainer(steps=4, callbacks=[other_fast, other_slow])
    again.load_state_dict(state)
    assert other_slow.mean.equal(slow.mean)
    assert other_fast.mean.equal(fast.mean)
    assert slow.mean != fast.mean


def test_two_callbacks_of_a_class_without_names_are_refused_before_any_work():
    t = trainer(callbacks=[RunningReward(0.9), RunningReward(0.5)])
    says = "two callbacks with a state have the name 'RunningReward' in a checkpoint"
    with pytest.raises(ValueError, match=says):
        t.train(PROMPTS, reward, progress=False)
    with pytest.raises(ValueError, match=says):
        t.state_dict()
    assert t.iteration == 0


def test_a_callback_without_a_state_is_no_part_of_the_checkpoint(tmp_path):
    plain = trainer(steps=4, callbacks=[Journal([])])
    plain.load_state_dict(stopped_run(tmp_path))
    assert plain.iteration == 2


def test_a_missing_state_of_a_callback_is_refused_by_its_name(tmp_path):
    t = trainer(steps=4, callbacks=[RunningReward()])
    before = weights(t)
    with pytest.raises(ValueError, match="callback RunningReward is missing"):
        t.load_state_dict(stopped_run(tmp_path))
    assert t.iteration == 0
    assert same(weights(t), before)


def test_a_malformed_state_of_a_callback_is_refused_before_anything_changes(tmp_path):
    state = stopped_run(tmp_path, RunningReward())
    state["parts"]["callback RunningReward"]["mean"] = "high"
    t = trainer(steps=4, callbacks=[RunningReward()])
    before = weights(t)
    with pytest.raises(ValueError, match="mean is 'high'"):
        t.load_state_dict(state)
    assert t.iteration == 0
    assert same(weights(t), before)


def test_a_state_whose_callback_is_gone_is_a_warning(tmp_path):
    state = stopped_run(tmp_path, RunningReward())
    t = trainer(steps=4)
    with pytest.warns(UserWarning, match="the state of the callback RunningReward is left out"):
        t.load_state_dict(state)
    assert t.iteration == 2


def test_why_a_run_was_stopped_is_in_the_checkpoint(tmp_path):
    t = trainer()
    t.train(PROMPTS, reward, progress=False, callback=lambda m: True)
    again = trainer()
    again.load_state_dict(through_files(tmp_path, t.state_dict()))
    assert again.stop_reason == "iteration 0: the callback asked for it"


@pytest.mark.parametrize("stopped", [True, 3, ["why"]])
def test_a_reason_that_is_no_text_is_refused(stopped):
    t = trainer()
    with pytest.raises(ValueError, match="stop_reason is"):
        t.load_state_dict(t.state_dict() | {"stop_reason": stopped})


# ── held-out prompts ──


class Watched(RLHFTrainer):
    "Keeps the rollouts that it scores."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []

    def ask_rewards(self, rollout, reward_fn, kind="text"):
        scored = super().ask_rewards(rollout, reward_fn, kind)
        self.asked.append((kind, scored))
        return scored


def test_evaluating_changes_no_bit_of_the_training():
    plain, watched = trainer(), trainer(eval_every=2, keep_best=True)
    global_state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="held_out= is not used"):  # without eval_every
        one = plain.train(PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT)
    two = watched.train(PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT)
    assert torch.get_rng_state().equal(global_state)
    assert same(weights(plain), weights(watched))
    for name in ("sampling", "shuffling"):
        state = plain.generators.own[name].get_state()
        assert watched.generators.own[name].get_state().equal(state)
    evaluated = [{k: m.pop(k) for k in list(m) if k.startswith("held_out")} for m in two]
    overlaps = [(m.pop("prompts_held_out"), n.pop("prompts_held_out")) for m, n in zip(one, two)]
    assert overlaps == [(None, 0.0)] * 5  # no prompt is held out as well
    assert no_clock(one) == no_clock(two)
    assert [sorted(e) for e in evaluated] == [[], ["held_out_kl", "held_out_reward"]] * 2 + [[]]
    assert plain.best_weights is None
    assert watched.best_weights is not None
    assert watched.stop_reason is None
    assert all(module.training for module in watched.agent.modules())  # dropout is as it was


def evaluated_run():
    "A run with one evaluation, its metrics, and the held-out rollouts."
    t = trainer(Watched, eval_every=3, seed=4, temperature=1.2)
    history = t.train(PROMPTS, reward, steps=3, progress=False, held_out=HELD_OUT)
    return t, history[2], [rollout for kind, rollout in t.asked if kind == "held-out text"]


def encoded(prompts):
    return pad([TOKENIZER(prompt)["input_ids"] for prompt in prompts], EOS, side="left")


def test_held_out_prompts_are_answered_from_random_numbers_of_their_own():
    t, _, held_out = evaluated_run()
    assert [len(rollout) for rollout in held_out] == [8, 3]
    prompts = [prompt for rollout in held_out for prompt in rollout.prompts]
    assert [prompt.split()[0] for prompt in prompts] == ["w7"] * 11
    generator = torch.Generator().manual_seed(4 * 2**20 + 2**20 - 1)
    for part, rollout in zip((HELD_OUT[:8], HELD_OUT[8:]), held_out, strict=True):
        response, mask = sample(t.agent, *encoded(part), 6, EOS, EOS, 1.2, generator)
        assert response.equal(rollout.response_ids)
        assert mask.equal(rollout.mask)


def test_what_an_evaluation_says_is_the_mean_over_the_held_out_prompts():
    t, metrics, held_out = evaluated_run()
    texts = [text for rollout in held_out for text in rollout.texts]
    assert metrics["held_out_reward"] == pytest.approx(sum(reward(texts)) / 11)
    kl = []
    for rollout in held_out:
        kl += kl_by_hand(t.agent.model, t.ref_model, *rows(rollout), 1.2)
    assert sum(kl) > 0.01
    assert metrics["held_out_kl"] == pytest.approx(sum(kl) / 11, rel=1e-6)


def test_an_evaluation_repeated_says_the_same_of_texts_and_of_ids():
    t, metrics, _ = evaluated_run()
    again = t.evaluate(HELD_OUT, reward)
    assert again == {name: metrics[name] for name in again}
    as_ids = dict(zip(("query_ids", "query_mask"), encoded(HELD_OUT), strict=True))
    assert t.evaluate(as_ids, reward) == again


NO_ROWS = {
    "query_ids": torch.zeros(0, 3, dtype=torch.long),
    "query_mask": torch.zeros(0, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("prompts", [[], NO_ROWS], ids=["a list", "ids"])
def test_an_evaluation_on_no_prompts_is_refused(prompts):
    with pytest.raises(ValueError, match="no prompts to evaluate on"):
        trainer().evaluate(prompts, reward)


@pytest.mark.parametrize(
    "held_out, says",
    [
        (None, "eval_every is 2, but there is nothing to evaluate on: pass held_out="),
        ([], "held_out= is empty"),
        (NO_ROWS, "held_out= is empty"),
        (["w1 " * 16], "room for prompts of 14 tokens"),
    ],
    ids=["none", "empty", "no rows of ids", "too long"],
)
def test_wrong_held_out_prompts_are_refused_before_any_work(held_out, says, unchecked):
    asked = []

    def judge(texts):
        asked.append(texts)
        return reward(texts)

    with unchecked(), pytest.raises(ValueError, match=says):
        trainer(eval_every=2).train(PROMPTS, judge, progress=False, held_out=held_out)
    assert not asked


def test_a_stream_of_held_out_prompts_is_refused_before_any_work(unchecked):
    t = trainer(eval_every=2)
    with unchecked(), pytest.raises(TypeError, match="a stream can be read once: pass a list"):
        t.train(PROMPTS, reward, progress=False, held_out=iter(HELD_OUT))
    assert t.iteration == 0


def evaluate_in_a_callback(fails):
    "A callback evaluates in two processes; the reward of process 0 may fail. Returns what is seen."
    scores = []

    def judge(texts):
        if fails and rank() == 0:
            raise OSError("the judge is down")
        return two_processes.reward(texts)

    class Evaluates(Callback):
        def on_iteration(self, trainer, experience, metrics):
            log = trainer.evaluate(two_processes.PROMPTS, judge)
            scores.append(log["held_out_reward"])

    t = two_processes.trainer_of(batch_size=4)
    t.callbacks = [Evaluates()]
    try:
        t.train(two_processes.PROMPTS, two_processes.reward, steps=2, progress=False)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return scores


def test_a_callback_evaluates_in_several_processes():
    first, second = in_processes(2, evaluate_in_a_callback, False)
    assert len(first) == 2 and first == second


def test_a_reward_that_fails_in_a_callback_is_named_in_its_own_process():
    first, second = in_processes(2, evaluate_in_a_callback, True)
    assert first.startswith("RewardError") and "the judge is down" in first
    assert second.startswith("PeerFailed: process 0 of 2") and "the judge is down" in second


# ── rewards that are asked again ──


def noisy(texts):  # the shape checker draws from Python's own generator
    return [x + torch.rand(()).item() + np.random.rand() for x in even(texts)]


def run_with_own_seeds(reward_fn, **settings):
    "The metrics of three iterations; the reward draws from torch's and numpy's global generators."
    t = made(steps=3, **settings)
    torch.manual_seed(3)
    np.random.seed(3)
    return no_clock(t.train(FOUR, reward_fn, progress=False))


@pytest.mark.parametrize("reward_fn", [even, noisy])
def test_asking_again_changes_no_number_of_the_run(reward_fn):
    alone = run_with_own_seeds(reward_fn)
    asked_again = run_with_own_seeds(reward_fn, recheck_every=1)
    for m in asked_again:
        noise = m.pop("reward_noise")
        shift = m.pop("reward_shift")
        if reward_fn is noisy:
            assert noise > 0.01
        else:
            assert noise == shift == 0
    assert asked_again == alone


def test_a_run_asks_again_as_often_as_its_setting_says():
    log = made(recheck_every=2, steps=4).train(FOUR, even, progress=False)
    assert [m["iteration"] for m in log if "reward_noise" in m] == [0, 2]
    assert all(m.get("reward_noise", 0) == m.get("reward_shift", 0) == 0 for m in log)
