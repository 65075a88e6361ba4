"""What reward functions are given, what they may return, how they fail, and scores of tokens. The
oracles are sums by hand and scripted functions."""

import asyncio
import copy
import json
import math
import multiprocessing
import random
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import two_processes
from small_trainer import (
    EOS,
    PROMPTS,
    SUMS,
    TOKENIZER,
    agent_and_reference,
    config,
    reward,
    tiny,
    trainer,
)
from transformers import TrainerState

from instruct_goose.config import RLHFConfig
from instruct_goose.core.processes import in_processes, rank_slice
from instruct_goose.objective.kl import kl_in_reward
from instruct_goose.rollouts.rewards import (
    LIBRARY_NAMES,
    TAKES_ALL,
    Messages,
    RewardError,
    RewardLog,
    RewardOutput,
    RewardRequest,
    as_number,
    as_score_list,
    asked_names,
    call_reward,
    call_with_timeout,
    check_column_names,
    check_scores,
    completion_kwargs,
    copy_containers,
    merge_reward_logs,
    name_rewards,
    noticing_alarms,
    reward_callable,
    reward_kwargs,
    reward_noise,
    reward_signature,
    run_in_thread,
    same_random_numbers,
    scatter_token_scores,
    score_rollout,
    score_texts,
    weighted_sum,
)
from instruct_goose.rollouts.rollout import Rollout, Tokens
from instruct_goose.training.metrics import rollout_metrics
from instruct_goose.training.trainer import RLHFTrainer


@pytest.mark.parametrize("advantage", ["group_mean", "greedy"])
def test_a_reward_sees_the_columns_of_its_own_row(advantage):
    seen = []

    def right(prompts, completions, answer, completion_ids):
        seen.extend(zip(prompts, completions, answer, completion_ids, strict=True))
        return [float(c.split()[:1] == [a]) for c, a in zip(completions, answer)]

    settings = RLHFConfig(
        batch_size=8,
        max_new_tokens=4,
        advantage=advantage,
        group_size=2 if advantage == "group_mean" else 1,
        eval_every=1,
        steps=2,
        minibatches=2,
    )
    trainer = RLHFTrainer(tiny(), config=settings, tokenizer=TOKENIZER)
    trainer.train(SUMS, right, held_out=SUMS[:3], progress=False)
    expected = {row["prompt"]: row["answer"] for row in SUMS}
    assert len(seen) >= 2 * (8 + 3)
    for prompt, completion, right, ids in seen:
        assert right == expected[prompt]
        assert completion == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_reward_that_changes_what_it_is_given_changes_no_prompt():
    talk = [{"role": "user", "content": "w1"}]
    offer = {"texts": ["a"], "prompts": [Messages(talk)], "tags": [["x"]]}

    def changes(texts, prompts, tags):
        prompts[0][0]["content"] = tags[0][0] = "w2"
        assert isinstance(prompts[0], Messages)
        return [1.0]

    call_reward(changes, offer)
    assert talk[0]["content"] == "w1" and offer["tags"] == [["x"]]


def test_two_rewards_are_their_weighted_sum_and_stand_in_the_log():
    def long(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    def first(completions, answer):
        return [None if a == "w2" else 1.0 for a in answer]

    c = config(reward_weights=(0.5, 2.0))
    trainer = RLHFTrainer(tiny(), config=c, tokenizer=TOKENIZER)
    r = trainer.score(trainer.rollout(SUMS), [long, first])

    lengths = r.mask.sum(-1).tolist()
    answers = [row["answer"] for row in SUMS for _ in range(c.group_size)]
    by_hand = []
    for length, answer in zip(lengths, answers, strict=True):
        by_hand.append(0.5 * length + (0.0 if answer == "w2" else 2.0))
    assert r.scores.tolist() == by_hand
    metrics = rollout_metrics(trainer.advantages(r), c)
    assert metrics["reward_mean/long"] == pytest.approx(sum(lengths) / len(r))
    assert metrics["reward_mean/first"] == 1.0  # of the rows that it applies to
    long_scores = r.score_parts["long"].tolist()
    assert r[[2, 0]].score_parts["long"].tolist() == [long_scores[2], long_scores[0]]
    assert r[1].columns["answer"] == [answers[1]]


def test_there_is_one_weight_for_each_reward(unchecked):
    trainer = RLHFTrainer(tiny(), config=config(reward_weights=(1.0,)), tokenizer=TOKENIZER)
    r = trainer.rollout(SUMS)
    with pytest.raises(ValueError, match="2 reward functions and 1 weights"):
        trainer.score(r, [reward, reward])


def test_scores_are_shaped_in_training_on_held_out_prompts_and_for_the_greedy_baseline():
    """By hand: a score of 9 is cut to 2; no end costs 1; with 6 tokens at most and a buffer of 3
    responses of 4, 5 and 6 tokens cost a third, two thirds, and one."""
    shaping = dict(reward_clip=2.0, missing_eos_penalty=1.0, overlong_buffer=3)
    shaped = RLHFTrainer(
        tiny(), config=config("remax", batch_size=64, eval_every=1, **shaping), tokenizer=TOKENIZER
    )
    plain = RLHFTrainer(tiny(), config=config("remax", batch_size=64), tokenizer=TOKENIZER)

    def nine(texts):
        return [9.0] * len(texts)

    r = shaped.score(shaped.rollout(PROMPTS * 8), nine)

    expected = []
    for ids, mask in zip(r.response_ids, r.mask, strict=True):
        length = int(mask.sum())
        no_end = 0.0 if ids[mask][-1].item() == EOS else 1.0
        expected.append(2.0 - no_end - max(0, length - 3) / 3)
    assert r.scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) > 3
    unshaped = plain.score(plain.rollout(PROMPTS * 8), nine)
    assert (unshaped.baseline > r.baseline).all()
    assert shaped.evaluate(PROMPTS, nine)["held_out_reward"] < 2.0
    assert plain.evaluate(PROMPTS, nine)["held_out_reward"] == 9.0


def test_errors_of_generators_and_of_objects_with_a_score_method_are_theirs():
    t = trainer()
    r = t.rollout(PROMPTS)

    class Judge:
        def score(self, texts):
            return (1 / (text != r.texts[4]) for text in texts)

    with pytest.raises(RewardError, match="raised ZeroDivisionError.*for 8 texts") as e:
        t.score(r, Judge())
    assert isinstance(e.value.__cause__, ZeroDivisionError)

    def late(texts):
        raise TimeoutError("the service does not answer")

    with pytest.raises(RewardError, match="raised TimeoutError.*the service does not answer"):
        trainer(reward_timeout=5.0).score(r, late)


def test_a_class_is_not_called_as_if_it_were_its_instance():
    class Judge:
        def score(self, texts):
            return [1.0 for _ in texts]

    t = trainer()
    r = t.rollout(PROMPTS)
    with pytest.raises(TypeError, match=r"the class Judge: pass an instance of it, Judge\("):
        t.score(r, Judge)
    assert t.score(r, Judge()).scores.tolist() == [1.0] * len(r.texts)


def test_a_place_alone_gets_the_texts_and_never_in_the_place_of_a_column():
    offer = {"texts": ["1+1=2", "2+3=6"], "completions": ["2", "6"], "answer": ["2", "5"]}

    def anything(xs, /):
        return [len(x) for x in xs]

    def texts_by_name(texts, /, answer):
        return [text.endswith(a) for text, a in zip(texts, answer, strict=True)]

    assert call_reward(anything, offer) == [5, 5]
    assert call_reward(texts_by_name, offer) == [True, False]

    def first(completions, /):
        return [len(completion) for completion in completions]

    def second(xs, answer, /):
        return [0.0 for _ in xs]

    for function, name in ((first, "completions"), (second, "answer")):
        with pytest.raises(RewardError, match=f"takes '{name}' by its place alone"):
            call_reward(function, offer)


@pytest.mark.parametrize("interrupt, seconds", [(KeyboardInterrupt, None), (SystemExit, 5.0)])
def test_an_interrupt_is_nobodys_mistake(interrupt, seconds):
    t = trainer(reward_timeout=seconds)
    calls = []

    def judge(texts):
        calls.append(texts)
        raise interrupt

    with pytest.raises(interrupt):
        t.score(t.rollout(PROMPTS), judge)
    assert len(calls) == 1


def test_a_function_that_hangs_is_left_behind():
    t = trainer(reward_timeout=0.1)
    r = t.rollout(PROMPTS)
    t.iteration = 6
    release, ended = threading.Event(), threading.Event()

    def hangs(texts):
        release.wait(20)
        ended.set()
        return [0.0] * len(texts)

    message = (
        "iteration 6: no answer from the reward function within reward_timeout, 0.1 seconds, "
        "for 8 texts, 'w0 w3"
    )
    try:
        with pytest.raises(TimeoutError, match=message) as e:
            t.score(r, hangs)
        assert all(repr(text) in str(e.value) for text in r.texts[:3])
        assert r.scores is None and not ended.is_set()
        [thread] = [x for x in threading.enumerate() if x.name == "reward function"]
        assert thread.daemon  # the process may end without it
        assert t.score(r, reward).scores.tolist() == reward(r.texts)  # and the trainer goes on
        r.scores = None
    finally:
        release.set()
    thread.join(20)
    assert ended.is_set() and r.scores is None  # what it says too late is thrown away


GARBAGE = {
    "nothing": (None, "returned a NoneType for 8 texts, the first of them 'w0 w3"),
    "a text": ("12345678", "a str"),
    "a dictionary": ({}, "a dict"),
    "too few": (
        [0.0] * 7,
        "7 scores for 8 texts; the first without a score is text 7 of 8, 'w6.*, "
        "for the prompt 'w6'",
    ),
    "endless": (iter(int, 1), "9 scores for 8"),
    "none": (
        [0.0] * 3 + [None] + [0.0] * 4,
        "text 3 of 8, 'w1 w1 w2.*, for the prompt 'w1 w1 w2' is None, which says that the "
        "function does not apply.*a list of functions",
    ),
    "texts": ([0.0] * 5 + ["1"] + [0.0] * 2, "text 5 of 8, 'w4.*, for the prompt 'w4' is '1': not"),
    "complex array": (np.array([0, 1j] * 4), "text 0 of 8, 'w0 w3.* is 0j"),
    "complex numbers of numpy": ([np.complex64(1j)] * 8, "not a number"),
    "nested": ([[0.0]] * 8, r"text 0 of 8, .* got a list of 1 numbers.*one number for each"),
    "table": (np.zeros((8, 1)), r"shape \(8, 1\)"),
    "nan": (
        [0.0] * 6 + [float("nan"), 0.0],
        "the score of text 6 of 8, 'w2.*, for the prompt 'w2' is nan",
    ),
    "beyond float32": ([1e300] * 8, r"is 1e\+300: scores must be finite"),
    "beyond float": ([10**400] * 8, "is inf"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_named_with_iteration_text_and_prompt(kind, unchecked):
    answer, message = GARBAGE[kind]
    t = trainer()
    t.iteration = 9
    r = t.rollout(PROMPTS)
    with unchecked(), pytest.raises(RewardError, match=f"^iteration 9: .*{message}"):
        t.score(r, lambda texts: answer)
    assert r.scores is None


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.fractions()
    | st.dates(),
    lambda x: (
        st.lists(x, max_size=4)
        | st.tuples(x)
        | st.dictionaries(st.text(max_size=2), x, max_size=2)
        | st.lists(x, max_size=4).map(iter)
    ),
    max_leaves=6,
)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(anything)
def test_whatever_is_returned_becomes_finite_numbers_or_a_clear_error(answer):
    try:
        scores = score_texts(lambda texts: answer, ["a", "b"]).scores
    except RewardError as e:
        said = ("the reward function returned", "the score of text", "got a list of")
        assert any(words in str(e) for words in said)
    else:
        assert scores.shape == (2,) and scores.dtype == torch.float32 and scores.isfinite().all()


def slow_paid(scores, parts, ell, beta):
    "One row: lists of the real tokens."
    paid = [p - beta * k for p, k in zip(parts, ell, strict=True)]
    paid[-1] += scores - sum(parts)
    return paid


@pytest.mark.parametrize(
    "mask",
    [[[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], [[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1]]],
    ids=["right", "holes"],
)
def test_parts_stand_at_their_tokens_and_the_rest_at_the_end(mask, unchecked, poison):
    generator = torch.Generator().manual_seed(2)
    mask = torch.tensor(mask).bool()
    logprobs, ref, parts = (
        torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    scores = torch.tensor([1.5, -2.0, 0.25], dtype=torch.float64)
    beta = 0.3

    rewards = kl_in_reward(
        scores,
        poison(logprobs, mask),
        poison(ref, mask),
        mask,
        beta,
        token_scores=poison(parts, mask),
    )

    for i, m in enumerate(mask):
        log_ratio = (logprobs - ref)[i][m].tolist()
        by_hand = slow_paid(scores[i].item(), parts[i][m].tolist(), log_ratio, beta)
        assert rewards[i][m].tolist() == pytest.approx(by_hand, abs=1e-12)
    assert (rewards[~mask] == 0).all() and not rewards.requires_grad
    with unchecked(), pytest.raises(ValueError, match="token_scores"):
        kl_in_reward(scores, logprobs, ref, mask, beta, token_scores=parts[:, :3])


def dense(completion_ids):
    return [[0.5 * (i % 3) - 0.1 * t for t, i in enumerate(ids)] for ids in completion_ids]


def summed(completion_ids):
    return [sum(row) for row in dense(completion_ids)]


def slow_gae(rewards, values, gamma, lam):
    "One row: lists of the real tokens."
    advantages = []
    later = 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * following - values[t] + gamma * lam * later
        advantages.insert(0, later)
    return advantages


def test_gae_on_parts_beside_kl_and_a_price_for_no_end():
    agent, reference = agent_and_reference()
    c = config(
        beta=0.3,
        gamma=0.9,
        lam=0.7,
        missing_eos_penalty=0.75,
        whiten_advantages=False,
        micro_batch_size=3,
    )
    trainer = RLHFTrainer(agent, reference, c, tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)
    for i in (0, 3):  # two that end
        r.response_ids[i, 2] = EOS
        r.mask[i, 3:] = False
    r.sampled_logprobs = None

    experience = trainer.advantages(trainer.score(r, dense))

    ended = 0
    log_ratios = experience.old_logprobs - experience.ref_logprobs
    for i, m in enumerate(experience.mask):
        ids = experience.response_ids[i][m].tolist()
        [parts] = dense([ids])
        has_ended = ids[-1] == EOS
        ended += has_ended
        score = sum(parts) - (0.0 if has_ended else 0.75)
        rewards = slow_paid(score, parts, log_ratios[i][m].tolist(), 0.3)
        advantages = slow_gae(rewards, experience.values[i][m].tolist(), 0.9, 0.7)
        assert experience.scores[i].item() == pytest.approx(score, abs=1e-5)
        assert experience.rewards[i][m].tolist() == pytest.approx(rewards, abs=1e-5)
        assert experience.advantages[i][m].tolist() == pytest.approx(advantages, abs=1e-5)
    assert 0 < ended < len(r)
    metrics = rollout_metrics(experience, c)
    assert metrics["reward_mean"] == pytest.approx(experience.scores.mean().item())


def test_several_functions_with_and_without_parts():
    def flat(completions):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    trainer = RLHFTrainer(
        tiny(), config=config(reward_weights=(2.0, 0.5, -1.0)), tokenizer=TOKENIZER
    )

    def twice(completion_ids):
        return [[1.0] * len(ids) if i % 3 else None for i, ids in enumerate(completion_ids)]

    r = trainer.score(trainer.rollout(PROMPTS), [dense, flat, twice])
    for i in range(len(r)):
        ids = r.response_ids[i][r.mask[i]].tolist()
        parts = [2.0 * p - bool(i % 3) for p in dense([ids])[0]]
        assert r.token_scores[i][r.mask[i]].tolist() == pytest.approx(parts, abs=1e-5)
        assert r.scores[i].item() == pytest.approx(sum(parts) + 0.5 * (i % 2 == 0), abs=1e-5)
    again = trainer.score(r, summed)  # scored anew by a plain one: no part is left from before
    assert again.token_scores is None
    assert r.token_scores is not None  # the rollout that was given stays as it is


def log_and_score(texts, log_metric, log_extra):
    "Logs how many texts a call is about, their words, and some of the process of the first row."
    words = [len(text.split()) for text in texts]
    log_metric("rows", len(texts))
    if texts[0].startswith(two_processes.PROMPTS[0]):
        log_extra("words of the first", words)
    log_extra("words", words)
    return [0.0] * len(texts)


def score_seven_rows():
    t = two_processes.trainer_of(**two_processes.PPO)
    r = t.score(t.rollout((two_processes.PROMPTS * 2)[:7]), log_and_score)
    return r.logged, r.extra, r.texts, rank_slice(7).stop


def test_every_process_gets_what_reward_functions_log_in_all_of_them():
    "Three or four rows each, which log 3 and 4: the mean over the rows is (3 · 3 + 4 · 4) / 7."
    results = in_processes(2, score_seven_rows)
    rows_of_first = results[0][3]
    for logged, extra, texts, _ in results:
        words = [len(text.split()) for text in texts]
        of_first = words[:rows_of_first] + [None] * (7 - rows_of_first)
        assert logged == {"rows": pytest.approx(25 / 7)}
        assert extra == {"words of the first": of_first, "words": words}


@pytest.mark.parametrize("name", ["texts", "completions", "prompt_ids", "log_extra"])
def test_a_column_never_stands_for_what_the_library_gives(name):
    rows = [{"prompt": PROMPTS[0], name: "of the data"}] * 2
    settings = RLHFConfig(batch_size=2, max_new_tokens=2, minibatches=1, steps=1)
    trainer = RLHFTrainer(tiny(), config=settings, tokenizer=TOKENIZER)
    with pytest.raises(RewardError, match=f"column '{name}'.*rename the column"):
        trainer.train(rows, lambda texts: [0.0] * len(texts), progress=False)


def test_given_texts_are_not_what_is_scored():
    output = score_texts(lambda texts: map(len, texts), ["ab"], given={"texts": ["other"]})
    assert output.scores.tolist() == [2]


@pytest.mark.parametrize("keep", [False, True])
def test_completions_have_special_tokens_where_the_settings_ask_for_them(keep):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w3", "w4"]})
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(["w3", "w5", "w4"]) + [EOS]])
    query = torch.tensor([[5]])
    ones = torch.ones_like
    rollout = Rollout(query, ones(query).bool(), ids, ones(ids).bool(), texts=["w"], prompts=["w"])
    settings = RLHFConfig(batch_size=2, keep_special_tokens=keep)
    seen = []

    def judge(completions, completion_messages):
        seen.extend(completions)
        assert completion_messages[0][0]["content"] == completions[0]
        return [1.0]

    tokens = Tokens(tokenizer, [EOS], tokenizer.pad_token_id)
    score_rollout(rollout, judge, settings, tokens, TrainerState(), RewardLog())
    assert seen == ["w3 w5 w4" if keep else "w5"]


def test_the_settings_template_arguments_reach_a_judge_with_a_template_of_its_own():
    "As the columns of the data do; a row's own arguments win."
    seen = []

    class Judge:
        def score(self, texts, prompts=None, completions=None, chat_template_kwargs=None):
            seen.extend(chat_template_kwargs or [None] * len(texts))
            return [float(i) for i in range(len(texts))]

    rows = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1], "chat_template_kwargs": {"mood": "own"}}]
    for setting in ('{"mood": "quiet", "n": 3}', None):
        settings = config("grpo", template_kwargs=setting)
        trainer = RLHFTrainer(tiny(), config=settings, tokenizer=TOKENIZER)
        trainer.score(trainer.rollout(rows), Judge())

    n = len(seen) // 4
    assert n and seen == (
        [{"mood": "quiet", "n": 3}] * n
        + [{"mood": "own", "n": 3}] * n
        + [None] * n
        + [{"mood": "own"}] * n
    )


def test_prompts_reach_a_reward_as_the_data_has_them():
    "Texts with special tokens and blanks that decoding leaves out, messages, and ids as text."
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w3"]})
    seen = []

    def judge(prompts, texts, text):
        seen.extend(zip(prompts, text, texts, strict=True))
        return [float(i) for i in range(len(prompts))]

    rows = ["w3 w1", {"prompt": "w1   w2", "text": "a column"}, tokenizer("w1 w2")["input_ids"]]
    trainer = RLHFTrainer(tiny(), config=config("grpo"), tokenizer=tokenizer)
    trainer.score(trainer.rollout(rows), judge)

    n = len(seen) // 3
    assert [prompt for prompt, _, _ in seen] == (
        ["w3 w1"] * n + ["w1   w2"] * n + [tokenizer.decode(rows[2], skip_special_tokens=True)] * n
    )
    assert [column for _, column, _ in seen] == [None] * n + ["a column"] * n + [None] * n
    assert all(text.startswith("w1") for _, _, text in seen)


def ids_only(**settings):
    "A trainer whose prompts are token ids: it has no tokenizer."
    small = config("grpo", eval_every=1, recheck_every=1, **settings)
    return RLHFTrainer(tiny(), config=small, stop_token_ids=[EOS])


def lengths(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_a_trainer_without_a_tokenizer_trains_with_rewards_that_read_ids():
    asked = []

    def reward(completion_ids, prompt_ids, answer, completions=None):
        asked.extend(zip(prompt_ids, answer, strict=True))
        assert completions is None
        return [1.0 * (ids[0] == right) for ids, right in zip(completion_ids, answer, strict=True)]

    rows = [{"prompt": [3, 4 + i], "answer": i} for i in range(4)]
    t = ids_only()
    (log,) = t.train(rows, reward, steps=1, held_out=rows[:1], progress=False)
    assert 0 <= log["reward_mean"] <= 1 and log["held_out_reward"] is not None
    assert all(prompt == [3, 4 + right] for prompt, right in asked) and len(asked) > 8
    rollout = t.score(t.rollout([[3, 4]] * 4), [lengths, lambda completion_ids, **_: [0.0] * 8])
    assert rollout.scores.tolist() == rollout.attention_mask.sum(-1).tolist()


def test_scores_of_tokens_need_no_tokenizer():
    t = ids_only()
    rollout = t.score(
        t.rollout([[3, 4]] * 4), lambda completion_ids: [[0.5] * len(ids) for ids in completion_ids]
    )
    torch.testing.assert_close(
        rollout.scores.double(), 0.5 * rollout.attention_mask.sum(-1).double()
    )


@pytest.mark.parametrize(
    "reward, says",
    [
        (reward, "reward reads texts, and without a tokenizer there are none"),
        (lambda completions: [0.0] * 8, "name the parameter completion_ids"),
        (lambda completion_ids, prompts: [0.0] * 8, "asks for 'prompts', and there is only"),
    ],
)
def test_without_a_tokenizer_a_reward_that_reads_texts_is_refused_by_name(reward, says):
    t = ids_only()
    with pytest.raises(RewardError, match=says):
        t.score(t.rollout([[3, 4]] * 4), reward)


def test_all_calls_of_async_rewards_share_one_event_loop(monkeypatch):
    "A semaphore, a lock or a pool of connections belongs to the loop that first waits for it."
    gate = asyncio.Semaphore(1)
    loops = set()

    async def one(text):
        async with gate:
            await asyncio.sleep(0)
            return float(len(text))

    async def judge(texts):
        loops.add(asyncio.get_running_loop())
        return await asyncio.gather(*map(one, texts))

    for seconds in (None, 30.0, None):
        assert score_texts(judge, ["a", "bb"], seconds=seconds).scores.tolist() == [1, 2]
    assert len(loops) == 1

    async def asks_another(texts):
        return score_texts(judge_of_its_own, texts).scores.tolist()

    async def judge_of_its_own(texts):
        return [3.0] * len(texts)

    assert score_texts(asks_another, ["a"]).scores.tolist() == [3]


@pytest.mark.parametrize("leaves", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_what_an_async_reward_raises_ends_no_event_loop(leaves):
    async def bad(texts):
        raise leaves

    async def good(texts):
        return [1.0] * len(texts)

    with pytest.raises((leaves, RewardError)):
        score_texts(bad, ["a"])
    assert score_texts(good, ["a"], seconds=30.0).scores.tolist() == [1]


def in_a_child(texts, queue):
    queue.put(score_texts(later, texts).scores.tolist())


async def later(texts):
    await asyncio.sleep(0)
    return [1.0] * len(texts)


def test_a_forked_child_has_an_event_loop_of_its_own():
    assert score_texts(later, ["a"]).scores.tolist() == [1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(["a", "b"], queue))
    child.start()
    assert queue.get(timeout=60) == [1, 1]
    child.join()


def test_an_error_of_a_reward_has_its_file_and_line():
    def fails(texts):
        return json.loads("no JSON")  # its own last line is what counts, not that in json

    line = fails.__code__.co_firstlineno + 1
    for seconds in (None, 30.0):
        with pytest.raises(RewardError, match=rf"test_rewards.py, line {line}\)"):
            score_texts(fails, ["a"], seconds=seconds)


def test_an_alarm_under_a_timeout_is_named(monkeypatch):
    def grader(texts):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0] * len(texts)

    before = signal.getsignal(signal.SIGALRM)
    assert score_texts(grader, ["a"]).scores.tolist() == [1]
    with pytest.raises(RewardError, match="main thread alone.*leave reward_timeout out"):
        score_texts(grader, ["a"], seconds=30.0)
    signal.signal(signal.SIGALRM, before)


KNOWN = ["texts", "completions", "answer"]
TWO = RewardRequest(["a", "b"])


class Scored:
    def score(self, texts, answer=None):
        return [0.0 for _ in texts]


# --- what is called, and with what


@pytest.mark.parametrize(
    "function, texts_first, names",
    [
        (lambda: 0, False, []),
        (lambda xs: 0, True, []),
        (lambda texts: 0, False, ["texts"]),
        (lambda texts, /: 0, True, []),
        (lambda *xs: 0, True, []),
        (lambda xs, answer: 0, True, ["answer"]),
        (lambda answer, completions: 0, False, ["answer", "completions"]),
        (lambda *, answer: 0, False, ["answer"]),
        (lambda xs, other=3: 0, True, []),
        (lambda xs, *more: 0, True, []),
        (lambda **all_of_it: 0, False, KNOWN),
        (lambda answer, **others: 0, False, ["answer", "texts", "completions"]),
        (lambda xs, **others: 0, True, ["completions", "answer"]),  # the texts are given once
        (lambda xs, answer, **others: 0, True, ["answer", "completions"]),
        (max, True, []),  # written in C: it does not say
    ],
)
def test_a_function_gets_the_texts_first_or_what_it_names(function, texts_first, names):
    assert reward_signature(function, KNOWN) == (texts_first, names)


@pytest.mark.parametrize(
    "function, says",
    [
        (lambda xs, other: 0, "asks for 'other', and there is only texts, completions, answer"),
        (lambda xs, *, other: 0, "asks for 'other'"),
        (lambda xs, other, /: 0, "asks for 'other'"),
        (lambda xs, answer, /: 0, "takes 'answer' by its place alone"),
        (lambda answer, /: 0, "takes 'answer' by its place alone"),
    ],
)
def test_a_parameter_that_cannot_be_given_is_refused(function, says):
    with pytest.raises(RewardError, match=says):
        reward_signature(function, KNOWN)


def test_what_all_functions_ask_for_together():
    functions = [lambda xs, answer: 0, Scored(), lambda **k: 0, max]
    assert asked_names(functions) == {"xs", "answer", "texts", TAKES_ALL}
    assert asked_names([max]) == set()


def test_a_function_is_called_with_copies_and_its_generator_is_read_no_further_than_needed():
    given = {"texts": ["a", "b"], "answer": ["1", "2"]}
    read = []

    def endless(texts, answer):
        texts.clear()
        answer.clear()
        while True:
            read.append(1.0)
            yield 1.0

    assert call_reward(endless, given) == [1.0] * 3 and len(read) == 3  # one too many is seen
    assert given == {"texts": ["a", "b"], "answer": ["1", "2"]}
    ids = {"completion_ids": [[1], [2], [3]]}
    assert call_reward(lambda completion_ids: iter([0.0] * 9), ids) == [0.0] * 4


def test_texts_that_come_by_place_are_a_list_of_their_own():
    given = {"texts": ["a", "b"]}
    assert call_reward(lambda xs: [xs.pop(), xs.pop()], given) == ["b", "a"]
    assert given == {"texts": ["a", "b"]}
    with pytest.raises(RewardError, match="reads texts, and without a tokenizer there are none"):
        call_reward(lambda xs: [], {"completion_ids": [[1]]})


def test_a_coroutine_is_run_to_its_end():
    async def judge(texts):
        await asyncio.sleep(0)
        return [float(len(text)) for text in texts]

    assert call_reward(judge, {"texts": ["a", "bb"]}) == [1.0, 2.0]
    loops = [thread for thread in threading.enumerate() if thread.name == "async rewards"]
    assert loops and all(thread.daemon for thread in loops)  # the process may end without them


def test_a_conversation_is_not_searched_for_words():
    talk = Messages([{"role": "user", "content": "a"}])
    assert {"role": "user", "content": "a"} in talk and 3 not in talk
    with pytest.raises(TypeError, match="'a' is looked for in a list of messages"):
        assert "a" in talk


def test_lists_and_dictionaries_are_copied_and_nothing_else_is():
    class Own(dict):
        pass

    inner, own, pair = [1], Own(), ([1],)
    given = Messages([{"a": inner, "b": own, "c": pair}])
    made = copy_containers(given)
    assert made == given and made is not given and type(made) is Messages
    assert made[0] is not given[0] and made[0]["a"] is not inner
    assert made[0]["b"] is own and made[0]["c"] is pair


def test_a_thread_that_nobody_waits_for_hands_over_its_result_or_its_error():
    assert run_in_thread(lambda a, b: a + b, 1, 2).result(5) == 3
    assert run_in_thread(lambda: threading.current_thread().daemon).result(5)
    for error in (ZeroDivisionError, SystemExit):

        def fails(error=error):
            raise error

        assert isinstance(run_in_thread(fails).exception(5), error)


@pytest.mark.parametrize("reward_fn", [3, None, [1.0], tiny()], ids=["3", "None", "list", "model"])
def test_what_scores_no_texts_is_refused(reward_fn, unchecked):
    with unchecked(), pytest.raises(TypeError, match=f"reward_fn is a {type(reward_fn).__name__}"):
        reward_callable(reward_fn)


def test_a_function_or_the_method_score_is_called():
    judge = Scored()
    assert reward_callable(judge) == judge.score and reward_callable(len) is len
    with pytest.raises(TypeError, match="the class Scored: pass an instance"):
        reward_callable(Scored)


def test_functions_are_named_after_themselves_or_their_class_and_numbered():
    def length(texts):
        return []

    named = name_rewards([length, Scored(), length, length, Scored()])
    assert [*named] == ["length", "Scored", "length_2", "length_3", "Scored_2"]


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_no_column_has_a_name_of_the_librarys(name):
    check_column_names(["answer", "prompt"])
    with pytest.raises(RewardError, match=f"the data has a column '{name}'"):
        check_column_names(["answer", name])


def test_prompts_and_completions_are_texts_and_messages():
    talk = [{"role": "user", "content": "q"}]
    made = completion_kwargs(["q", talk], ["a", "b"])
    assert made["prompts"] == ["q", talk] and type(made["prompts"][1]) is Messages
    assert made["completions"] == ["a", "b"]
    assert made["completion_messages"] == [
        [{"role": "assistant", "content": "a"}],
        [{"role": "assistant", "content": "b"}],
    ]
    assert {type(x) for x in made["completion_messages"]} == {Messages}


# --- a rollout by hand: two rows, of which the first has a token of an environment


def two_rows(**columns):
    w1, w2, w3 = TOKENIZER.convert_tokens_to_ids(["w1", "w2", "w3"])
    pad = TOKENIZER.pad_token_id
    return Rollout(
        query_ids=torch.tensor([[pad, w1], [w1, w2]]),
        query_mask=torch.tensor([[False, True], [True, True]]),
        response_ids=torch.tensor([[w1, w2, w3], [w3, pad, pad]]),
        mask=torch.tensor([[True, False, True], [True, False, False]]),
        environment_mask=torch.tensor([[False, True, False], [False, False, False]]),
        prompts=["w1", "w1 w2"],
        texts=["w1 w1 w2 w3", "w1 w2 w3"],
        **columns,
    )


def test_what_a_function_may_name_is_a_list_of_one_item_per_response():
    numbers = torch.arange(6.0).view(2, 3)
    rollout = two_rows(
        columns={"answer": ["x", "y"], "prompt": [None, "as the data has it"]},
        sampled_logprobs=-numbers,
        environment_rewards=numbers,
    )
    w1, w2, w3 = TOKENIZER.convert_tokens_to_ids(["w1", "w2", "w3"])
    given = reward_kwargs(rollout, TOKENIZER)
    assert given.pop("tokenizer") is TOKENIZER
    assert given.pop("completion_messages")[1] == [{"role": "assistant", "content": "w3"}]
    assert given == {
        "answer": ["x", "y"],
        "prompts": ["w1", "as the data has it"],
        "completions": ["w1 w2 w3", "w3"],
        "completion_ids": [[w1, w2, w3], [w3]],
        "completion_mask": [[1, 0, 1], [1]],
        "prompt_ids": [[w1], [w1, w2]],
        "sampled_logprobs": [[0, -1, -2], [-3]],
        "environment_rewards": [[0, 1, 2], [3]],
    }
    assert rollout.columns == {"answer": ["x", "y"], "prompt": [None, "as the data has it"]}


def test_without_a_tokenizer_there_are_ids_alone():
    given = reward_kwargs(two_rows(), None)
    assert given.keys() == {"completion_ids", "completion_mask", "prompt_ids"}
    assert reward_kwargs(two_rows(), TOKENIZER, ["a", "b"])["completions"] == ["a", "b"]
    bare = two_rows()
    bare.prompts = None
    assert reward_kwargs(bare, TOKENIZER)["prompts"] == ["", ""]


def scored(reward_fn, kind="text", **settings):
    log = RewardLog()
    config = RLHFConfig(batch_size=2, **settings)
    tokens = Tokens(TOKENIZER, [TOKENIZER.eos_token_id], TOKENIZER.pad_token_id)
    made = score_rollout(two_rows(), reward_fn, config, tokens, TrainerState(), log, kind)
    return made, log


def test_a_rollouts_scores_stand_at_its_rows_and_its_tokens():
    def parts(completion_ids, log_extra, log_metric):
        log_extra("ids", completion_ids)
        log_metric("n", 2)
        return [[1.0, 5.0, 2.0], None]

    made, log = scored([parts, lambda texts: [0.5, 3.0]])
    assert made["scores"].tolist() == made["raw_scores"].tolist() == [3.5, 3.0]
    assert made["token_scores"].tolist() == [[1, 0, 2], [0, 0, 0]]  # none of the environment's
    assert [*made["score_parts"]] == ["parts", "<lambda>"]
    assert made["score_parts"]["parts"][0] == 3 and made["score_parts"]["parts"][1].isnan()
    assert log.rows == 2 and log.metrics == {"n": [2.0]} and len(log.extra["ids"]) == 2
    one, _ = scored(lambda texts: [1.0, 2.0])
    assert one["score_parts"] is None and one["token_scores"] is None


def test_an_error_names_the_iteration_the_kind_of_text_and_the_prompt():
    says = "^iteration 0: the score of held-out text 1 of 2, 'w1 w2 w3', for the prompt 'w1 w2' is"
    with pytest.raises(RewardError, match=says):
        scored(lambda texts: [1.0, math.nan], "held-out text")
    weighted = scored([lambda texts: [1.0, 2.0]], reward_weights=(3.0,))[0]
    assert weighted["scores"].tolist() == [3, 6]


def test_scores_of_tokens_are_not_compared_over_whole_responses():
    def parts(completion_ids):
        return [[0.0] * len(ids) for ids in completion_ids]

    def whole(texts):
        return [1.0, 2.0]

    def ones(completion_ids):
        return [[1.0] * len(ids) for ids in completion_ids]

    with pytest.raises(RewardError, match="iteration 0: .*reward_weighting='scaled'"):
        scored([ones, whole], reward_weighting="scaled")
    assert scored([whole, whole], reward_weighting="scaled")[0]["scores"].tolist() == [2, 4]
    assert scored(ones, reward_weighting="scaled")[0]["scores"].tolist() == [2, 1]
    assert scored([parts, whole])[0]["scores"].tolist() == [1, 2]


# --- numbers


@pytest.mark.parametrize(
    "x, number",
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2.0),
        (torch.tensor([3.0]), 3.0),
        (10**400, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_a_number_of_any_library_is_a_float(x, number):
    assert as_number(x, "it") == number and type(as_number(x, "it")) is float


@pytest.mark.parametrize("x", ["1", b"1", None, [1], {}, np.complex64(1), torch.ones(2), object()])
def test_what_is_no_number_is_refused(x):
    with pytest.raises(RewardError, match="^it is .*: not a number$"):
        as_number(x, "it")


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("score", [0, -LARGEST, LARGEST, np.float64(1.5), torch.tensor(1.5)])
def test_a_score_is_what_float32_can_hold(score):
    assert check_scores([score, 1.0], TWO).scores.tolist() == [float(score), 1.0]


@pytest.mark.parametrize("score", [1.001 * LARGEST, -1.001 * LARGEST, math.nan, math.inf])
def test_a_score_that_is_none_is_named(score):
    with pytest.raises(RewardError, match="the score of text 1 of 2, 'b' is .*must be finite"):
        check_scores([0.0, score], TWO)


@pytest.mark.parametrize(
    "scores",
    [
        [[1, 2.5], [0.5]],
        ((1, 2.5), (0.5,)),
        [torch.tensor([1, 2.5]), torch.tensor([0.5])],
        [np.array([1, 2.5]), [0.5]],
    ],
)
def test_a_number_per_token_is_added_up_over_the_policys_own(scores):
    made = check_scores(scores, TWO, [[7, 8], [9]])
    assert made.scores.tolist() == [3.5, 0.5] and made.tokens == [[1.0, 2.5], [0.5]]
    made = check_scores(scores, TWO, [[7, 8], [9]], [[0, 1], [1]])
    assert made.scores.tolist() == [2.5, 0.5] and made.tokens == [[0.0, 2.5], [0.5]]


def test_a_function_that_does_not_apply_has_no_score_and_no_parts():
    made = check_scores([None, 1], TWO)
    assert made.scores.isnan().tolist() == [True, False] and made.tokens is None
    assert check_scores([None, [2.0]], TWO, [[7], [9]]).tokens == [[], [2.0]]


@pytest.mark.parametrize(
    "scores, ids, says",
    [
        ([[1.0], [1.0]], None, "got a list of 1 numbers, and there are no tokens to pay"),
        ([[1.0], 0.0], [[7, 8], [9]], "a list of 1 numbers, and the completion has 2 tokens"),
        ([[1.0, 2.0], ["x"]], [[7, 8], [9]], "the number of token 0 of text 1 of 2, 'b' is 'x'"),
    ],
)
def test_another_number_of_tokens_is_refused(scores, ids, says):
    with pytest.raises(RewardError, match=says):
        check_scores(scores, TWO, ids)


@pytest.mark.parametrize(
    "scores", [[1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2]), iter([1, 2]), range(1, 3)]
)
def test_scores_are_a_list_of_any_kind(scores):
    assert as_score_list(scores, TWO) == [1, 2]


@pytest.mark.parametrize(
    "scores, says",
    [
        (1.0, "returned a float for 2 texts, the first of them 'a': return a list"),
        ("12", "returned a str"),
        (b"12", "returned a bytes"),
        ({1: 2}, "returned a dict"),
        ({1, 2}, "returned a set"),
        (frozenset([1, 2]), "returned a frozenset"),
        (torch.ones(2, 1), r"shape \(2, 1\) for 2 texts: return shape \(2,\)"),
        (np.array(1.0), r"returned shape \(\)"),
        ([1], "returned 1 scores for 2 texts; the first without a score is text 1 of 2, 'b'"),
        ([1, 2, 3], "returned 3 scores for 2 texts$"),
        (iter(int, 1), "returned 3 scores for 2 texts$"),
    ],
)
def test_what_is_no_list_of_one_item_per_text_is_refused(scores, says):
    with pytest.raises(RewardError, match=says):
        as_score_list(scores, TWO)


@pytest.mark.parametrize(
    "request_, name",
    [
        (RewardRequest(["a", "b"]), "text 1 of 2, 'b'"),
        (RewardRequest(["a", "b"], None, "answer"), "answer 1 of 2, 'b'"),
        (RewardRequest(["a", "b"], ["p", "q"]), "text 1 of 2, 'b', for the prompt 'q'"),
        (
            RewardRequest(["a", "b" * 201], ["p", "q" * 201]),
            f"text 1 of 2, {'b' * 200!r}, for the prompt {'q' * 200!r}",
        ),
    ],
)
def test_a_text_has_a_name_for_messages(request_, name):
    assert request_.name(1) == name


# --- several functions


def output(scores, tokens=None):
    return RewardOutput(torch.tensor(scores), tokens)


def test_scores_are_added_up_with_their_weights_over_the_functions_that_apply():
    outputs = {
        "a": output([1.0, math.nan], [[1.0, 0.0], []]),
        "b": output([2.0, 3.0]),
        "c": output([4.0, 5.0], [[3.0, 1.0], [5.0]]),
    }
    total = weighted_sum(outputs, [2.0, 1.0, -0.5], TWO)
    assert total.scores.tolist() == [2 + 2 - 2, 3 - 2.5]
    assert total.tokens == [[2 - 1.5, -0.5], [-2.5]]
    assert [*total.parts] == ["a", "b", "c"] and total.parts["c"].tolist() == [4, 5]
    assert weighted_sum(outputs, None, TWO).scores.tolist() == [7, 8]
    assert weighted_sum({"b": outputs["b"]}, None, TWO).tokens is None


@pytest.mark.parametrize("n, weights", [(0, []), (0, None), (2, [1.0]), (1, [1.0, 2.0])])
def test_there_is_a_function_and_a_weight_for_each(n, weights):
    outputs = {str(i): output([1.0, 1.0]) for i in range(n)}
    with pytest.raises(ValueError, match=f"{n} reward functions and"):
        weighted_sum(outputs, weights, TWO)


def test_a_text_to_which_no_function_applies_is_named():
    outputs = {"a": output([math.nan, 1.0]), "b": output([math.nan, math.nan])}
    with pytest.raises(RewardError, match="the score of text 0 of 2, 'a' is None"):
        weighted_sum(outputs, None, TWO)
    outputs["a"] = output([2.0, 1.0])  # a function may apply to none
    assert weighted_sum(outputs, None, TWO).scores.tolist() == [2, 1]


def test_one_function_has_no_parts_and_no_weight():
    def ones(texts):
        return [1.0 for _ in texts]

    one = score_texts(ones, ["a"], weights=[5.0])
    assert one.scores.tolist() == [1] and one.parts is None
    several = score_texts([ones], ["a"], weights=[5.0])
    assert several.scores.tolist() == [5] and several.parts["ones"].tolist() == [1]
    with pytest.raises(
        RewardError, match="^there: the reward function returned 0 scores for 1 word"
    ):
        score_texts(lambda texts: [], ["a"], where="there: ", kind="word")


def test_parts_of_scores_stand_at_the_tokens_of_their_rows():
    mask = torch.tensor([[True, False, True], [True, True, False], [True, False, False]])
    table = scatter_token_scores([[1.0, 2.0], [], [3.0]], mask)
    assert table.tolist() == [[1, 0, 2], [0, 0, 0], [3, 0, 0]]


def test_numbers_of_other_rows_or_tokens_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        scatter_token_scores([[1.0]], torch.tensor([[True], [True]]))
    with pytest.raises(ValueError, match="shorter"):
        check_scores([[1.0, 2.0], [3.0]], TWO, [[7, 8], [9]], [[1], [1]])


# --- logs


def test_numbers_and_columns_are_logged_beside_the_scores():
    log = RewardLog(rows=2)
    for value in (1, np.float32(3)):
        log.log_metric("x", value)
    log.log_extra("c", ("a", "b"))
    assert log.metrics == {"x": [1.0, 3.0]} and log.extra == {"c": ["a", "b"]}
    with pytest.raises(RewardError, match="the metric 'x' is 'a': not a number"):
        log.log_metric("x", "a")
    for values in (["a"], ["a", "b", "c"]):
        with pytest.raises(RewardError, match=f"was given {len(values)} values for 2 responses"):
            log.log_extra("c", values)


def test_logs_of_processes_are_one_in_which_each_row_counts_the_same():
    first, second, third = RewardLog(2), RewardLog(3), RewardLog(1)
    first.metrics = {"x": [1.0, 3.0], "y": [5.0]}  # means 2 and 5, over two rows
    second.metrics = {"x": [7.0]}
    first.extra = {"c": ["a", "b"]}
    third.extra = {"c": ["z"], "d": [0]}
    means, columns = merge_reward_logs([first, second, third])
    assert means == {"x": (2 * 2 + 7 * 3) / 5, "y": 5.0}
    assert columns == {"c": ["a", "b", None, None, None, "z"], "d": [None] * 5 + [0]}
    assert merge_reward_logs([RewardLog(2), RewardLog(1)]) == (None, None)


# --- time, signals, random numbers


@pytest.mark.parametrize("n, shown", [(1, "'a'"), (3, "'a', 'b', 'c'"), (4, "'a', 'b', 'c' …")])
def test_an_error_shows_the_first_three_texts(n, shown):
    def fails(texts):
        raise KeyError("k")

    texts = list("abcd")[:n]
    with pytest.raises(RewardError) as e:
        call_with_timeout(fails, {"texts": texts}, RewardRequest(texts), None)
    assert str(e.value).endswith(f"for {n} texts, {shown}")
    assert "raised KeyError('k')" in str(e.value)


def test_a_completion_that_is_read_as_messages_has_a_hint():
    with pytest.raises(RewardError, match="name the parameter completion_messages"):
        score_texts(lambda texts: [text["content"] for text in texts], ["a"])


@pytest.mark.parametrize("seconds", [None, 5.0, math.inf])
def test_a_function_may_take_its_time(seconds):
    assert score_texts(lambda texts: [1.0], ["a"], seconds=seconds).scores.tolist() == [1]


def test_signals_are_noticed_in_other_threads_alone_and_handled_as_before():
    handle = signal.signal
    old = signal.getsignal(signal.SIGUSR1)
    with noticing_alarms() as wanted:
        signal.signal(signal.SIGUSR1, old)
        assert wanted == []
        future = run_in_thread(signal.signal, signal.SIGALRM, signal.SIG_DFL)
        assert isinstance(future.exception(5), ValueError)
    assert wanted == ["SIGALRM"] and signal.signal is handle


def random_states():
    "Of Python, numpy and torch."
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_random_numbers_afterwards_are_those_of_before():
    before = random_states()
    with pytest.raises(KeyError), same_random_numbers():
        random.random()
        np.random.rand()
        torch.rand(1)
        raise KeyError
    after = random_states()
    assert after == before


def ten_rows(scores):
    ones = torch.ones(10, 1, dtype=torch.bool)
    ids = torch.arange(10)[:, None]
    return Rollout(ids, ones, ids, ones, scores=torch.tensor(scores))


def test_a_reward_is_asked_twice_again_for_a_few_rows_in_reverse_order():
    """Ten rows, at most eight of them: every second one. Their scores are 0 … 9, with standard
    deviation √8.25; the second answer adds 1 to row 4, and both add 0.5 to all."""
    asked = []

    def ask(rollout):
        rows = rollout.response_ids[:, 0]
        asked.append(rows.tolist())
        more = 0.5 + (rows == 4) * (len(asked) == 2)
        return replace(rollout, scores=rollout.scores + more)

    noise = reward_noise(ten_rows([float(i) for i in range(10)]), ask)
    assert asked == [[8, 6, 4, 2, 0]] * 2
    assert noise["reward_noise"].item() == pytest.approx(1 / 8.25**0.5)
    assert noise["reward_shift"].item() == pytest.approx(1 / 8.25**0.5)  # row 4: 0.5 and 1.5
    asked.clear()
    reward_noise(ten_rows([float(i) for i in range(10)]), ask, rows=10)
    assert asked[0] == [*range(9, -1, -1)]
    asked.clear()
    reward_noise(ten_rows([float(i) for i in range(10)]), ask, rows=3)
    assert asked[0] == [8, 4, 0]


def test_scores_that_are_all_the_same_have_a_tiny_unit_and_not_none():
    def ask(rollout):
        return replace(rollout, scores=rollout.scores + 1e-9)

    noise = reward_noise(ten_rows([0.0] * 10), ask)
    assert noise["reward_noise"].item() == 0
    assert noise["reward_shift"].item() == pytest.approx(1.0)


def test_a_reward_with_a_name_of_its_own_is_shown_by_it():
    judge = SimpleNamespace(score=lambda texts: [1.0])
    assert [*name_rewards([judge])] == ["SimpleNamespace"]
