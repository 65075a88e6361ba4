"The two games of the guide on environments, by hand, and the model that can write tool calls."

import json
import random
import re

import pytest

from instruct_goose.tasks.games import Calculator, GuessingGame, calculator_talks, tool_model

TOOLS = (["add", "submit"], ["a", "b", "value"])


def test_the_calculator_adds_and_judges_the_last_answer():
    game = Calculator()
    assert game.reset(a=3, b=4, prompt="3 + 4") is None
    assert game.add(20, 22) == "42"
    assert game.get_reward() == 0.0
    assert (game.submit(7), game.get_reward()) == ("ok", 1.0)
    assert (game.submit(8), game.get_reward()) == ("ok", 0.0)


def test_the_guessing_game_hints_and_ends():
    game = GuessingGame()
    game.reset(options={"secret": 3})
    assert game.step("4") == ("lower", 0.0, False, False, {})
    assert game.step(" 2 ") == ("higher", 0.0, False, False, {})
    assert game.step("7") == ("lower", 0.0, False, True, {})
    game.reset(options={"secret": 3})
    assert game.step("3") == ("right", 1.0, True, False, {})
    game.reset(seed=1)
    assert game.step("the")[2] is True


def test_a_seed_chooses_the_number():
    game = GuessingGame()
    secrets = []
    for seed in [*range(30), *range(30)]:
        game.reset(seed=seed)
        secrets.append(game.secret)
    assert secrets[:30] == secrets[30:]
    assert set(secrets) == set(range(1, 8))


def test_dialogues_are_read_back_from_the_template_as_they_were():
    _, tokenizer = tool_model([*map(str, range(9)), "+", "ok"], *TOOLS)
    calls = 0
    for talk in calculator_talks(40, random.Random(0)):
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        *before, last = talk
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True)["input_ids"]
        parsed = tokenizer.parse_response(ids[len(prompt) :], prefix=prompt)
        assert (parsed.get("tool_calls") or []) == last.get("tool_calls", [])
        calls += len(last.get("tool_calls", []))
    assert calls > 40


def test_the_careless_user_is_right_by_chance_alone():
    talks = calculator_talks(2000, random.Random(0))
    whole = [talk for talk in talks if talk[-1]["content"] == "ok"]
    right = 0
    for talk in whole:
        a, b = map(int, re.findall(r"\d+", talk[0]["content"]))
        value = talk[-3]["tool_calls"][0]["function"]["arguments"]["value"]
        right += value == a + b
    # guesses: 1/9 of half; with the tool: (.5 + .5/5)² right sums, and .5 + .5/9 of them copied
    expected = 0.5 / 9 + 0.5 * (0.6**2 * (0.5 + 0.5 / 9) + (1 - 0.6**2) * 0.5 / 9)
    assert len(whole) == 2000
    assert right / len(whole) == pytest.approx(expected, abs=0.035)
    assert json.dumps(talks)  # plain data
