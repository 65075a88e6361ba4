"""Rollouts that are written ahead: the weights that write them, their scores, errors, and the way back."""

import threading

import pytest
import torch
from small_trainer import PROMPTS, TOKENIZER, config, reward, same, tiny, weights

from instruct_goose.core.random import generator
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.training.asynchronous import FIRST_BATCH_STREAM, AsyncTrainer
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer

ROWS = [*PROMPTS, *PROMPTS]


def async_trainer(max_staleness, steps=6, **settings):
    "A small trainer with weights for old samples."
    settings = {"importance_cap": 2.0, "steps": steps} | settings
    return AsyncTrainer(
        tiny(), config=config(**settings), tokenizer=TOKENIZER, max_staleness=max_staleness
    )


def ages(history):
    return [metrics["staleness"] for metrics in history]


def test_with_staleness_0_it_is_the_synchronous_trainer():
    background = async_trainer(0)
    history = background.train(ROWS, reward, progress=False)
    one_by_one = RLHFTrainer(tiny(), config=background.config, tokenizer=TOKENIZER)

    def same_numbers(agent, tokens):
        sampler = PolicySampler(agent, tokens)

        def sample(queries, n, config, _):
            stream = FIRST_BATCH_STREAM + one_by_one.iteration
            return sampler(queries, n, config, generator(config.seed, stream))

        return sample

    one_by_one.use_sampler(same_numbers)
    one_by_one.train(ROWS, reward, progress=False)
    assert ages(history) == [0] * 6
    assert same(weights(background), weights(one_by_one))


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_no_batch_is_older_than_allowed_and_a_slow_trainer_meets_the_oldest(max_staleness):
    trainer = async_trainer(max_staleness)
    written = threading.Semaphore(0)
    background_rewards = []

    def counted(texts):
        background_rewards.append(threading.current_thread() is not threading.main_thread())
        written.release()
        return reward(texts)

    class WaitForTheThread(Callback):
        def on_score(self, trainer, rollout):
            "Go on when the thread has written all that it may with these weights."
            allowed = min(trainer.iteration + 1 + max_staleness, trainer.config.steps)
            while len(background_rewards) < allowed:
                assert written.acquire(timeout=60)

    trainer.callbacks.append(WaitForTheThread())
    history = trainer.train(ROWS, counted, progress=False)
    assert ages(history) == [min(i, max_staleness) for i in range(6)]
    assert background_rewards == [True] * 6  # in another thread, and none beyond the run
    assert history[-1]["sampler_kl"] > 1e-9  # the samples are another policy's


def test_a_resumed_run_writes_the_batches_that_the_whole_one_would():
    whole = async_trainer(0)
    whole.train(ROWS, reward, progress=False)
    first = async_trainer(0)
    first.train(ROWS, reward, steps=3, progress=False)
    second = async_trainer(0)
    second.load_state_dict(first.state_dict())
    second.train(ROWS, reward, progress=False)
    assert same(weights(whole), weights(second))
    with pytest.raises(ValueError, match="max_staleness was 0 and is 2"):
        async_trainer(2).load_state_dict(first.state_dict())


def test_an_error_of_the_reward_or_of_the_sampler_is_raised_by_train():
    def fails(texts):
        raise OSError("the judge does not answer")

    with pytest.raises(ValueError, match="the judge does not answer"):
        async_trainer(2).train(ROWS, fails, progress=False)
    trainer = async_trainer(2)
    trainer.use_sampler(lambda agent, tokens: lambda queries, n, config, generator: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(ROWS, reward, progress=False)


def test_a_sampler_with_weights_of_its_own_gets_them_before_each_batch():
    given = []

    class Counting(PolicySampler):
        def updated(self, model):
            given.append(next(model.parameters()).detach().clone())

    trainer = async_trainer(0, steps=3)
    trainer.use_sampler(Counting)
    trainer.train(ROWS, reward, progress=False)
    assert len(given) == 3
    assert not torch.equal(given[0], given[1])


def test_the_thread_ends_with_the_training_and_other_rollouts_are_the_policys():
    trainer = async_trainer(2)
    trainer.train(ROWS, reward, steps=2, progress=False)
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join(60)
            assert not thread.is_alive()
    metrics = trainer.step(ROWS[: trainer.config.batch_size], reward)
    assert "staleness" not in metrics and metrics["sampler_kl"] < 1e-9


@pytest.mark.parametrize(
    ("settings", "max_staleness", "words"),
    [
        ({"importance_cap": None}, 1, "set importance_cap"),
        ({}, -1, "0 or more"),
        (
            {"advantage": "group_mean_std", "group_size": 2, "max_redraws": 2},
            1,
            "set max_redraws=0",
        ),
    ],
)
def test_settings_that_need_another_order_are_refused(settings, max_staleness, words):
    with pytest.raises(ValueError, match=words):
        async_trainer(max_staleness, **settings)


def test_a_stream_and_a_sampler_that_is_made_already_are_refused():
    with pytest.raises(TypeError, match="pass a list"):
        async_trainer(1).train(iter(ROWS), reward, progress=False)
    with pytest.raises(ValueError, match="use_sampler"):
        AsyncTrainer(
            tiny(),
            config=config(importance_cap=2.0),
            tokenizer=TOKENIZER,
            sampler=lambda queries, n, config, generator: None,
        )


def test_a_callback_that_changes_rollouts_is_told_that_they_are_scored_already():
    class Rewrites(Callback):
        def on_rollout(self, trainer, rollout):
            rollout.texts = ["w1"] * len(rollout)

    trainer = async_trainer(1)
    trainer.callbacks = [Rewrites()]
    with pytest.warns(UserWarning, match="Rewrites.on_rollout is called when the scores"):
        trainer.train(ROWS, reward, steps=1, progress=False)
