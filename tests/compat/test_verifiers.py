"""A MultiTurnEnv of verifiers as an environment of ours.

Its version 0.1.9 has such environments: `pip install verifiers==0.1.9` in an environment of its own.
"""

import pytest

from instruct_goose.rollouts.environments import (
    MessageEnvironment,
    Turn,
    adapt_environment,
)

verifiers = pytest.importorskip("verifiers")
if not hasattr(verifiers, "MultiTurnEnv"):
    pytest.skip("this version of verifiers has no MultiTurnEnv", allow_module_level=True)


class Guess(verifiers.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        guess = int(messages[-1]["content"])
        if guess == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        hint = "higher" if guess < int(state["answer"]) else "lower"
        return [{"role": "user", "content": hint}]


def is_right(completion, answer):
    return float(completion[-1]["content"] == "right")


def few_tries(state):
    return -float(state["tries"])


@pytest.fixture
def environment():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": "guess", "answer": "3"}])
    rubric = verifiers.Rubric(funcs=[is_right, few_tries], weights=[1.0, 0.1])
    return Guess(dataset=rows, rubric=rubric, max_turns=4)


def play(environment, guesses):
    "The replies to guesses, until the episode is over, and the reward."
    adapted = adapt_environment(environment)
    assert isinstance(adapted, MessageEnvironment)
    assert adapted.begin({"prompt": "guess", "answer": "3"}, 0) is None
    replies = []
    for guess in guesses:
        answer = adapted.answer(Turn(guess, []))
        replies.append([message["content"] for message in answer.messages])
        if not answer.messages:
            break
    return replies, adapted.final_reward()


def test_replies_ends_and_scores_are_those_of_the_environment(environment):
    assert play(environment, ["1", "5", "3"]) == ([["higher"], ["lower"], []], pytest.approx(0.7))
    assert play(environment, ["3"]) == ([[]], pytest.approx(0.9))


def test_the_turns_are_limited_as_it_says(environment):
    "Four turns at most; the fourth is not answered."
    replies, reward = play(environment, ["1", "1", "1", "1", "1"])
    assert replies == [["higher"], ["higher"], ["higher"], []]
    assert reward == pytest.approx(-0.3)
