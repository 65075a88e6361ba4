"""Each step between a rollout and its scores: what a reward function is called with, what it may return and
log, how several are added up. The expectations are computed by hand."""

import asyncio
import math
import random
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_trainer import TOKENIZER, tiny
from transformers import TrainerState

from instruct_goose.config import RLHFConfig
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
