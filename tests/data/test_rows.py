"""A row as a prompt or a pair: texts, conversations through a chat template, dialogues in one
string; and what is refused."""

import json

import fuzz
import pytest

from instruct_goose.data.files import REASONS, BadRow
from instruct_goose.data.load import load_pairs, load_prompts
from instruct_goose.data.rows import read_answer, read_prompt


@pytest.fixture(scope="module")
def tokenizer():
    return fuzz.tokenizer()


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row, reason, words",
    [
        (3, "shape", "of type int"),
        ({"x": 1, "y": 2}, "column", "no 'prompt': there are 'x', 'y'"),
        ({"prompt": 3}, "type", "prompt is 3"),
        ({"prompt": None, "text": "a"}, "empty", "prompt is None"),
        ({"text": " \n"}, "empty", "text is empty"),
        ({"prompt": "\ud83d"}, "encoding", "prompt: half a surrogate pair"),
        ([user("q"), said("x")], "conversation", "ends with the assistant's turn"),
        ({"prompt": []}, "empty", "without turns"),
        ([3], "shape", "turn 0: of type int"),
        ([{"from": "judge", "value": "q"}], "conversation", "from is 'judge', and it is one of"),
        ([{"value": "q"}], "conversation", "turn 0 has value, and neither role and content"),
        ({"messages": "q"}, "type", "messages is 'q': a conversation is needed"),
        ([user("q"), user(None)], "empty", "turn 1, content is None"),
        (
            {"chosen": [user("q"), said("x")], "rejected": [user("p"), said("y")]},
            "conversation",
            "no first turn in common",
        ),
    ],
)
def test_a_bad_prompt_is_named(tokenizer, row, reason, words, refused):
    e = refused(lambda: load_prompts(["a", row], tokenizer=tokenizer), "row 1", words, error=BadRow)
    assert e.reason == reason in REASONS


@pytest.mark.parametrize(
    "row, reason, words",
    [
        ({"chosen": "a"}, "column", "no 'rejected': there are 'chosen'"),
        ({"chosen": "a", "rejected": None}, "empty", "rejected is None"),
        ({"chosen": "a", "rejected": "a"}, "tie", "'a'"),
        ("a", "shape", "of type str"),
        (["a"], "shape", "of type list"),
        ((1, "a"), "type", "chosen is 1"),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "type", "prompt is 1"),
        (
            {"chosen": [user("q"), said("x")], "rejected": [user("q"), user("y")]},
            "conversation",
            "rejected: after the prompt the assistant's turn is missing",
        ),
        ({"chosen": [user("q"), said("x")], "rejected": [user("q"), said("x")]}, "tie", "'x'"),
        ({"chosen": [user("q"), said("x")], "rejected": "y"}, "type", "chosen is ["),
        (
            {"chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2.5},
            "column",
            "score_rejected is 2.5 and score_chosen 1: which answer is preferred?",
        ),
        (
            {"prompt": "p", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
            "conversation",
            "the prompt 'p' is not among",
        ),
        (
            {"prompt": [user("p")], "chosen": [user("q"), said("x")], "rejected": [said("y")]},
            "conversation",
            "chosen: after the prompt",
        ),
        (
            {"prompt": [user("q"), said("p")], "chosen": "x", "rejected": "y"},
            "conversation",
            "answer nothing",
        ),
        (
            {"chosen": [user("q") | {"x": 1}], "rejected": []},
            "empty",
            "rejected is a conversation without turns",
        ),
    ],
)
def test_a_bad_pair_is_named(tokenizer, row, reason, words, refused):
    assert (
        refused(lambda: load_pairs([row], tokenizer=tokenizer), "row 0", words, error=BadRow).reason
        == reason
    )


def test_a_conversation_is_a_prompt(tokenizer):
    talk = [user("a"), said("b"), user("c")]
    rows = [
        talk,
        {"prompt": talk},
        {"messages": [*talk, said("d")]},
        {"messages": json.dumps([*talk, said("d")])},
        {"conversation": [*talk, said("d")]},
    ]
    prompts = load_prompts(rows, tokenizer=tokenizer)
    assert [row["prompt"] for row in prompts] == [talk] * 5
    pair = {"chosen": [*talk, said("d")], "rejected": [*talk, said("e")]}
    assert load_prompts([pair], tokenizer=tokenizer) == [{"prompt": talk} | pair]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
        ([user("q"), said("x")], [user("q"), said("y")]),
        {"prompt": [user("q")], "chosen": [said("x")], "rejected": [said("y")]},
        {"prompt": [user("q")], "chosen": "x", "rejected": "y"},
        {"prompt": "q", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
        {"prompt": "q", "chosen": [said("x")], "rejected": [said("y")]},
        {"prompt": "", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
        {
            "chosen": [user("q") | {"name": None}, said("x")],
            "rejected": [user("q"), said("y") | {"tool_calls": None}],
        },
    ],
)
def test_a_pair_of_conversations(tokenizer, row, tmp_path):
    wanted = {"prompt": [user("q")], "chosen": [said("x")], "rejected": [said("y")]}
    assert load_pairs([row], tokenizer=tokenizer) == [wanted]
    (tmp_path / "a.json").write_text(json.dumps([row]))
    assert load_pairs(tmp_path / "a.json", tokenizer=tokenizer) == [wanted]


def test_dialogues_in_one_string(refused):
    """As in hh-rlhf: Human and Assistant by turns; the prompt is what both share up to the answer in
    which they differ."""
    head = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: a joke?\n\nAssistant:"
    row = {
        "chosen": head + " Goose walks in.",
        "rejected": head + " Go away.\n\nHuman: why?\n\nAssistant: So.",
    }
    assert load_pairs([row]) == [
        {
            "prompt": head,
            "chosen": " Goose walks in.",
            "rejected": " Go away.\n\nHuman: why?\n\nAssistant: So.",
        }
    ]
    assert load_prompts([row]) == [{"prompt": head} | row]
    assert load_pairs([{"chosen": "Human error", "rejected": "Human kindness"}])[0]["prompt"] == ""
    refused(lambda: load_pairs([{"chosen": head, "rejected": head + " x"}]), "chosen is empty")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_demonstration_that_is_not_to_be_learnt_is_refused(mark):
    "OpenAI's files and axolotl's say it of each turn of the assistant."
    other = said("no") | mark
    with pytest.raises(BadRow, match="the last turn has .*, which says that it is not to be"):
        read_answer({"messages": [user("q"), other]}, "row 1", {}, True)
    kept = {"messages": [user("q"), other, user("q"), said("yes") | {"weight": 1, "train": True}]}
    assert read_answer(kept, "row 1", {}, True).parts["completion"][0]["content"] == "yes"


ROOT = {"message_id": "1", "parent_id": None, "text": "why is it blue?", "role": "prompter"}
REPLY = {"message_id": "2", "parent_id": "1", "text": "it scatters", "role": "assistant"}
AGAIN = {"message_id": "3", "parent_id": "2", "text": "and red?", "role": "prompter"}


@pytest.mark.parametrize("row", [ROOT, REPLY, AGAIN, {"text": "a", "role": "system"}])
@pytest.mark.parametrize("labels", [False, True])
def test_one_turn_of_a_tree_is_no_answer(row, labels):
    with pytest.raises(BadRow, match=f"one turn of a conversation, of the role {row['role']}"):
        read_answer(row | {"label": True}, "row 0", {}, False, labels)


def test_of_a_tree_only_the_first_turns_are_prompts():
    assert read_prompt(ROOT, "row 0", {}, False).parts["prompt"] == "why is it blue?"
    assert read_prompt({"text": "a", "role": "user"}, "row 0", {}, False).parts["prompt"] == "a"
    for row in (REPLY, AGAIN, {"text": "a", "role": "assistant"}):
        with pytest.raises(BadRow, match="one turn of a conversation"):
            read_prompt(row, "row 0", {}, False)


@pytest.mark.parametrize("role", ["doctor", None, ["user"], 3])
def test_a_role_of_another_meaning_is_a_column(role):
    row = {"text": "it hurts", "role": role}
    assert read_prompt(row, "row 0", {}, False).parts["prompt"] == "it hurts"
    assert read_answer(row, "row 0", {}, False).parts["completion"] == "it hurts"


def test_a_named_column_is_taken_whatever_its_role_is():
    read = read_prompt(REPLY, "row 0", {"prompt": "text"}, False)
    assert read.parts["prompt"] == "it scatters"
