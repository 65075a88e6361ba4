"""Each method of the three protocols of environments, with environments of a few lines; how turns are read
and replies are written. The expectations are what the protocols document."""

from types import SimpleNamespace

import pytest
import torch

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.rollouts.environments import (
    Answer,
    EnvironmentFailed,
    MessageEnvironment,
    StepEnvironment,
    ToolCall,
    ToolEnvironment,
    Turn,
    adapt_environment,
    call_with_known,
    environment_reward,
    explain_failure,
    finished_value,
    new_state,
    observation_of,
    observation_text,
    parse_tool_calls,
    parse_turn,
    prompt_row,
    public_methods,
    reply_text,
    reward_table,
    step_result,
    tool_call_message,
    with_observation,
)
from instruct_goose.rollouts.multi_turn import Episode


def turn(text="", *calls):
    return Turn(text, list(calls))


def user(text):
    return {"role": "user", "content": text}


# --- calls by name


async def later(a, b=2):
    return a, b


@pytest.mark.parametrize(
    "function, result",
    [
        (lambda: (), ()),
        (lambda a: a, 1),
        (lambda a, other=7: (a, other), (1, 7)),
        (lambda **known: known, {"a": 1, "b": 3, "c": 5}),
        (lambda a, **known: (a, known), (1, {"b": 3, "c": 5})),
        (later, (1, 3)),
    ],
)
def test_a_function_gets_what_it_names_and_a_coroutine_is_awaited(function, result):
    assert call_with_known(function, {"a": 1, "b": 3, "c": 5}) == result
    assert finished_value(later(1)) == (1, 2) and finished_value(7) == 7


# --- tools


class Tools:
    heard = None

    def reset(self, level, seed=None):
        self.heard = level, seed
        return " hello"

    def get_reward(self):
        return 0.5

    def look(self) -> str:
        "Look."
        return "seen"

    def _private(self):
        return ""

    @property
    def size(self):
        return 3


def test_tools_are_the_public_methods_of_the_class():
    tools = Tools()
    tools.extra = print
    assert public_methods(tools) == {"look": tools.look}
    assert [*ToolEnvironment(tools).tools] == ["look"]


@pytest.mark.parametrize(
    "row, heard",
    [
        ({"level": 3, "more": 1}, (3, 11)),
        ({"level": 3, "seed": 5}, (3, 5)),  # the row's own
    ],
)
def test_reset_gets_the_columns_and_the_seed_that_it_names(row, heard):
    environment = ToolEnvironment(Tools())
    assert environment.begin(row, 11) == " hello"
    assert environment.instance.heard == heard
    assert environment.final_reward() == 0.5


def test_a_reset_that_names_no_seed_gets_none():
    class Everything(Tools):
        def reset(self, **row):
            self.heard = row

    environment = ToolEnvironment(Everything())
    assert environment.begin({"level": 3}, 11) is None
    assert environment.instance.heard == {"level": 3}


def test_a_turn_without_a_call_ends_the_episode():
    environment = ToolEnvironment(Tools())
    assert environment.answer(turn("bye")) == Answer([], None, 0, 0)
    answer = environment.answer(turn("", ToolCall("look", {}), ToolCall("_private", {})))
    assert [message["content"] for message in answer.messages] == [
        "seen",
        "{'error': 'Tool _private not found.'}",
    ]
    assert (answer.calls, answer.failures, answer.reward) == (2, 1, None)


@pytest.mark.parametrize("reward, number", [(1, 1.0), (True, 1.0), (torch.tensor(0.5), 0.5)])
def test_an_episodes_reward_is_a_number_and_may_be_awaited(reward, number):
    class Pays(Tools):
        async def get_reward(self):
            return reward

    assert ToolEnvironment(Pays()).final_reward() == number


def test_an_episodes_reward_that_is_no_number_is_named():
    class Pays(Tools):
        def get_reward(self):
            return "much"

    with pytest.raises(ValueError, match=r"get_reward\(\) of Pays is 'much': not a number"):
        ToolEnvironment(Pays()).final_reward()


# --- steps


@pytest.mark.parametrize(
    "first, seen",
    [
        ("a", "a"),
        (("a", {"info": 1}), "a"),
        (SimpleNamespace(observation="a", reward=0.0), "a"),
        ((SimpleNamespace(observation="a"), {}), "a"),
        (None, None),
    ],
)
def test_the_first_observation_of_any_form(first, seen):
    instance = SimpleNamespace(reset=lambda: first, step=None)
    assert StepEnvironment(instance).begin({"prompt": "q"}, 3) == seen


def test_reset_gets_the_row_as_options_and_by_name_and_the_seed():
    heard = {}

    def reset(seed, options, level, own=4):
        heard.update(seed=seed, options=options, level=level, own=own)
        return 7

    environment = StepEnvironment(SimpleNamespace(reset=reset), describe="no {}".format)
    assert environment.begin({"prompt": "q", "level": 2}, 3) == "no 7"
    assert heard == {"seed": 3, "options": {"prompt": "q", "level": 2}, "level": 2, "own": 4}
    environment.begin({"level": 2, "seed": 9}, 3)
    assert heard["seed"] == 9  # the row's own


@pytest.mark.parametrize(
    "result, read",
    [
        (("a", 1, False, False, {}), ("a", 1, False)),
        (("a", 1, True, False, {}), ("a", 1, True)),
        (("a", 1, False, True, {}), ("a", 1, True)),
        (("a", 1, 0, {}), ("a", 1, False)),
        (("a", 1, 1), ("a", 1, True)),
        (SimpleNamespace(observation="a", reward=1, done=1), ("a", 1, True)),
    ],
)
def test_a_step_is_an_observation_a_reward_and_whether_it_is_over(result, read):
    assert step_result(result, None) == read and type(step_result(result, None)[2]) is bool


@pytest.mark.parametrize(
    "result",
    [
        ("a", 1),
        ("a", 1, False, False, {}, {}),
        ["a", 1, False],
        "a",
        None,
        SimpleNamespace(observation="a", reward=1),
        SimpleNamespace(observation="a", done=True),
        SimpleNamespace(reward=1, done=True),
    ],
)
def test_what_is_no_result_of_a_step_is_refused(result):
    with pytest.raises(TypeError, match="step of object returned"):
        step_result(result, object())


@pytest.mark.parametrize(
    "result, answer",
    [
        (("b", 0.5, False), Answer([user("b")], 0.5)),
        (("", 0.5, False), Answer([user("")], 0.5)),
        ((None, 0.5, False), Answer([], 0.5)),  # nothing is to be read
        (("b", 0.5, True), Answer([], 0.5)),
        (("b", None, False), Answer([user("b")], 0.0)),
    ],
)
def test_an_episode_goes_on_where_there_is_something_to_read(result, answer):
    acted = []
    instance = SimpleNamespace(step=lambda action: acted.append(action) or result)
    environment = StepEnvironment(instance, action=str.upper)
    assert environment.answer(turn("go")) == answer and acted == ["GO"]
    assert environment.final_reward() == 0.0


def test_an_observation_is_text():
    assert observation_text(None, 0) is None and observation_text("a", 0) == "a"
    assert observation_of(SimpleNamespace(observation=3)) == 3 and observation_of(4) == 4
    with pytest.raises(TypeError, match="int returned the observation 3: the policy reads text"):
        observation_text(3, 0)


# --- messages


class Talk:
    "The protocol of verifiers. It notes what its methods are given."

    def __init__(self, replies=(), completed=False, **more):
        self.replies = list(replies)
        self.completed = completed
        self.given = []
        vars(self).update(more)

    def is_completed(self, state):
        return self.completed

    def env_response(self, messages, state, prompt, completion, answer, info, task):
        self.given.append((messages, prompt, completion, answer, info, task))
        return self.replies.pop(0)


ROW = {"prompt": "q", "answer": "a", "info": {"x": 1}, "task": "sums"}


def begun(instance, row=ROW):
    environment = MessageEnvironment(instance)
    assert environment.begin(row, 3) is None
    return environment


def test_the_state_of_an_episode_in_which_nothing_has_been_written():
    state = new_state(ROW | {"turn": 9, "more": 2}, [user("q")])
    timing = state.pop("timing")
    assert state == {
        "prompt": [user("q")],
        "answer": "a",
        "info": {"x": 1},
        "task": "sums",
        "more": 2,
        "completion": [],
        "turn": 0,
        "trajectory": [],
        "is_completed": False,
        "is_truncated": False,
        "error": None,
        "final_env_response": None,
        "reward": None,
        "metrics": None,
    }
    assert timing.pop("start_time") > 0 and {*timing.values()} == {0.0}
    bare = new_state({}, [])
    assert (bare["answer"], bare["task"], bare["info"]) == ("", "default", {})


def test_a_conversation_is_handed_over_with_what_stands_beside_it():
    talk = Talk([[user("r")], "s"])
    environment = begun(talk)
    assert environment.answer(turn("x")).messages == [user("r")]
    assert environment.answer(turn("y")).messages == [user("s")]  # a text is the user's
    x, y = ({"role": "assistant", "content": text} for text in "xy")
    assert talk.given == [
        ([user("q"), x], [user("q")], [x], "a", {"x": 1}, "sums"),
        ([user("q"), x, user("r"), y], [user("q")], [x, user("r"), y], "a", {"x": 1}, "sums"),
    ]
    assert environment.state["turn"] == 2
    assert [step["prompt"] for step in environment.state["trajectory"]] == [
        [user("q")],
        [user("q"), x, user("r")],
    ]
    assert [step["completion"] for step in environment.state["trajectory"]] == [[x], [y]]
    assert not any(step["is_truncated"] for step in environment.state["trajectory"])
    assert environment.state["completion"] == environment.messages[1:]


def test_a_prompt_of_messages_stays_and_is_no_part_of_the_completion():
    opening = [{"role": "system", "content": "s"}, user("q")]
    environment = begun(Talk(["r"]), {"prompt": opening})
    environment.answer(turn("x"))
    assert environment.state["prompt"] == opening == environment.messages[:2]
    assert len(environment.state["completion"]) == 2 and len(opening) == 2


def test_calls_of_tools_stand_in_the_message_as_chats_have_them():
    environment = begun(Talk(["r", "s"]))
    environment.answer(turn("", ToolCall("add", {"a": 1})))
    environment.answer(turn("x"))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert environment.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "tool_calls" not in environment.messages[3]
    assert tool_call_message(ToolCall("f", {}))["function"] == {"name": "f", "arguments": "{}"}


def test_a_completed_episode_is_not_answered():
    talk = Talk(completed=True)
    assert begun(talk).answer(turn("x")) == Answer([]) and talk.given == []


def test_an_environment_may_make_the_state_and_return_it():
    def setup_state(state):
        return {**state, "own": 1}

    def env_response(messages, state):
        return [user("r")], {**state, "later": 2}

    environment = begun(Talk(setup_state=setup_state, env_response=env_response))
    assert environment.state["own"] == 1
    assert environment.answer(turn("x")).messages == [user("r")]
    assert environment.state["later"] == 2
    in_place = begun(Talk(setup_state=lambda state: state.update(own=1)))
    assert in_place.state["own"] == 1


@pytest.mark.parametrize("final, goes_on", [(None, True), ([user("end")], False), ([], False)])
def test_a_final_reply_ends_the_episode(final, goes_on):
    talk = Talk(["r"])
    environment = begun(talk)
    environment.state["final_env_response"] = final
    assert environment.answer(turn("x")).messages == ([user("r")] if goes_on else [])
    assert environment.messages[-1] == user("r")  # the rubric reads it


def test_an_early_version_is_asked_again_behind_its_reply():
    def is_completed(messages, state):
        return messages[-1]["content"] == "right"

    talk = Talk(["wrong", "right"], is_completed=is_completed)
    environment = begun(talk)
    environment.state["final_env_response"] = "of later versions"
    assert environment.answer(turn("x")).messages == [user("wrong")]
    assert environment.answer(turn("y")).messages == []


@pytest.mark.parametrize(
    "score, reward",
    [
        (lambda state: state.update(reward=2.0), 2.0),
        (lambda state: {"reward": 3.0}, 3.0),
        (lambda state: SimpleNamespace(reward=4.0), 4.0),
        (lambda state: state.update(reward=0.0), 0.0),
        (lambda state, score_sem, task: {"reward": len(task)}, 4.0),
    ],
)
def test_a_rubric_scores_the_episode(score, reward):
    environment = begun(Talk(rubric=SimpleNamespace(score_rollout=score)))
    assert environment.final_reward() == reward
    assert begun(Talk()).final_reward() is None
    assert begun(Talk(rubric=None)).final_reward() is None


# --- which protocol


def methods(*names):
    return SimpleNamespace(**dict.fromkeys(names, print))


@pytest.mark.parametrize(
    "instance, kind",
    [
        (methods("reset", "step"), StepEnvironment),
        (methods("reset"), ToolEnvironment),
        (methods("reset", "step", "get_reward"), ToolEnvironment),
        (methods("reset", "get_reward"), ToolEnvironment),
        (methods("env_response", "reset", "step"), MessageEnvironment),
        (methods("begin", "answer", "final_reward", "env_response"), SimpleNamespace),
    ],
)
def test_methods_tell_the_protocol(instance, kind):
    assert type(adapt_environment(instance)) is kind


@pytest.mark.parametrize(
    "instance", [methods("step"), SimpleNamespace(reset=3), 3, methods("begin")]
)
def test_an_object_of_no_protocol_is_refused(instance):
    with pytest.raises(TypeError, match="is no environment"):
        adapt_environment(instance)


# --- turns and replies


@pytest.mark.parametrize(
    "text, calls",
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [ToolCall("f", {"a": 1})]),
        ('<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>', [ToolCall("f", {})]),
        ('<tool_call>{"name": 3}</tool_call>', [ToolCall("3", {})]),
        ('<tool_call>{"name": "f"}</tool_call> <tool_call>3</tool_call>', []),
        ("none", []),
    ],
)
def test_calls_are_json_between_marks(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.fixture
def reader():
    "A tokenizer that reads its own calls, and notes what it is given."
    tokenizer = tiny_smollm(["x", "y"])[1]
    tokenizer.response_template = "its own"
    tokenizer.given = []
    return tokenizer


@pytest.mark.parametrize(
    "parsed, calls",
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            [ToolCall("f", {"a": 1})],
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": None}}]}, [ToolCall("f", {})]),
        ({"tool_calls": None}, []),
        ({}, []),
        ({"tool_calls": [{"function": {}}]}, []),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, []),
        (None, []),
    ],
)
@pytest.mark.parametrize("tools", [(), (print,)])
def test_a_tokenizer_with_a_template_for_responses_reads_them(parsed, calls, tools, reader):
    def parse_response(ids, prefix, tools):
        reader.given.append((ids, prefix, tools))
        if parsed is None:
            raise ValueError("it cannot be read")
        return parsed

    reader.parse_response = parse_response
    ids = reader("x y")["input_ids"]
    assert parse_turn(reader, (*ids, reader.eos_token_id), (5, 6), tools) == Turn("x y", calls)
    assert reader.given == [([*ids, reader.eos_token_id], [5, 6], list(tools) or None)]


def test_a_turn_is_its_text_without_special_tokens_and_its_calls_with_them():
    words = ["<tool_call>", '{"name":"f"}', "</tool_call>"]
    tokenizer = word_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = tokenizer.convert_tokens_to_ids(words)
    assert parse_turn(tokenizer, ids, []) == Turn('{"name":"f"}', [ToolCall("f", {})])


@pytest.mark.parametrize(
    "prompt, row",
    [
        ("q", {"prompt": "q"}),
        ([user("q")], {"prompt": [user("q")]}),
        ({"prompt": "q", "x": 1}, {"prompt": "q", "x": 1}),
    ],
)
def test_a_prompt_is_a_row(prompt, row):
    made = prompt_row(prompt, 2)
    assert made == row and made is not prompt


@pytest.mark.parametrize("prompt", [[3, 4], {"prompt": [3, 4]}])
def test_a_prompt_of_token_ids_is_refused_by_its_number(prompt):
    with pytest.raises(TypeError, match="prompt 2 is token ids, and an environment reads text"):
        prompt_row(prompt, 2)


TWO_TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}]


@pytest.mark.parametrize(
    "prompt, said, made",
    [
        ("q", None, "q"),
        ("q", " o", "q o"),
        (TWO_TURNS, None, TWO_TURNS),
        (TWO_TURNS, " o", [TWO_TURNS[0], {**TWO_TURNS[1], "content": "q o"}]),
    ],
)
def test_what_an_environment_says_first_stands_behind_the_prompt(prompt, said, made):
    row = {"prompt": prompt, "x": 1}
    assert with_observation(row, said) == {"prompt": made, "x": 1}
    assert TWO_TURNS[1]["content"] == "q" and row["prompt"] is prompt


def test_replies_are_written_as_the_chat_template_does_and_end_an_open_turn():
    tokenizer = tiny_smollm(["x"])[1]
    replies = [{"role": "tool", "content": "x"}, user("y")]
    closed = reply_text(replies, tokenizer, True)
    assert closed.endswith("<|im_start|>assistant ") and "tool x" in closed
    assert reply_text(replies, tokenizer, False) == "<|im_end|>" + closed
    tokenizer.chat_template = None
    for is_ended in (False, True):
        assert reply_text(replies, tokenizer, is_ended) == "x\ny"


def test_what_was_paid_stands_at_its_tokens():
    episodes = [Episode([5], rewards=[1.0, 0.0, 2.0]), Episode([5], rewards=[3.0])]
    mask = torch.tensor([[True, True, True], [True, False, False]])
    table = reward_table(episodes, mask)
    assert table.tolist() == [[1, 0, 2], [3, 0, 0]]
    assert environment_reward(environment_rewards=[[1.0], [2.0]]) == [[1.0], [2.0]]


# --- failures


def test_what_a_users_environment_raises_has_its_place():
    says = "the environment Tools, asked for a move, raised KeyError: 'no such level'"
    with pytest.raises(EnvironmentFailed, match=says) as failed:
        with explain_failure(ToolEnvironment(Tools()), "a move"):
            raise KeyError("no such level")
    assert f"{__file__}, line " in str(failed.value)
