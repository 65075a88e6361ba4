"""A row as a prompt or a pair: texts, conversations through a chat template, dialogues in one
string; what is refused; and each function that reads a part of a row, over all kinds of values that
files hold there. The expectations are written by hand."""

import json
import math

import fuzz
import pytest

from instruct_goose.data.files import REASONS, BadRow
from instruct_goose.data.load import load_pairs, load_prompts
from instruct_goose.data.rows import (
    CHANGES_MEANING,
    LEARNT_MARKS,
    ROLES,
    SCORES,
    Opening,
    as_object,
    check_scores,
    check_turns,
    conversation_in,
    pair_margin,
    read_answer,
    read_label,
    read_pair,
    read_prompt,
    refuse_tie,
    require_text,
    shared_dialogue,
    shared_opening,
    with_system,
)


@pytest.fixture(scope="module")
def tokenizer():
    return fuzz.tokenizer()


def user(text="q"):
    return {"role": "user", "content": text}


def said(text="a"):
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


WHERE = "row 7"
TOOLS = [{"type": "function", "function": {"name": "add"}}]
NOTHING = [None, "", math.nan]  # what is no value in a file


SYSTEM = {"role": "system", "content": "s"}


def refusal(reason, words, call, *args, **kwargs):
    "A call that is refused for this reason, naming the row."
    with pytest.raises(BadRow) as e:
        call(*args, **kwargs)
    assert e.value.reason == reason, str(e.value)
    assert words in str(e.value) and str(e.value).startswith(WHERE), str(e.value)


# --- which columns are used, which stay, which are refused


@pytest.mark.parametrize(
    "row, columns, kept, parts, unused",
    [
        ({"prompt": "q"}, {}, (), {"prompt": "q"}, set()),
        ({"prompt": "q", "id": 3}, {}, (), {"prompt": "q", "id": 3}, set()),
        # another column is the prompt: the row's own of that name is not read
        ({"film": "q", "prompt": "p"}, {"prompt": "film"}, (), {"prompt": "q"}, {"prompt"}),
        ({"film": "q"}, {"prompt": "film"}, (), {"prompt": "q"}, set()),
        ({"film": "q"}, {"prompt": "film"}, ["film"], {"prompt": "q", "film": "q"}, set()),
        ({"film": "q"}, {"prompt": "film"}, None, {"prompt": "q", "film": "q"}, set()),
        # the answer for the reward function has another name
        ({"prompt": "q", "key": "4"}, {"answer": "key"}, (), {"prompt": "q", "answer": "4"}, set()),
        (
            {"prompt": "q", "key": "4", "answer": "x"},
            {"answer": "key"},
            (),
            {"prompt": "q", "answer": "4"},
            {"answer"},
        ),
        (
            {"prompt": "q", "answer": "x"},
            {"answer": "answer"},
            (),
            {"prompt": "q", "answer": "x"},
            set(),
        ),
        # the two answers of a pair stay for the reward function
        (
            {"prompt": "q", "chosen": "x", "rejected": "y"},
            {},
            (),
            {"prompt": "q", "chosen": "x", "rejected": "y"},
            set(),
        ),
        (
            {
                "chosen": [user(), said("x")],
                "rejected": [user(), said("y")],
            },
            {},
            (),
            {
                "prompt": [user()],
                "chosen": [user(), said("x")],
                "rejected": [user(), said("y")],
            },
            set(),
        ),
        (
            {"prompt": [user()], "tools": TOOLS},
            {},
            (),
            {"prompt": [user()], "tools": TOOLS},
            set(),
        ),
    ],
)
def test_a_prompt_and_the_columns_beside_it(row, columns, kept, parts, unused):
    made = read_prompt(row, WHERE, columns, True, kept)
    assert made.parts == parts and made.unused == unused


@pytest.mark.parametrize(
    "row, parts, unused",
    [
        ({"text": "t"}, {"prompt": "", "completion": "t"}, set()),
        ({"text": "t", "image": "x"}, {"prompt": "", "completion": "t"}, {"image"}),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a"}, set()),
        ({"prompt": None, "completion": "a"}, {"prompt": "", "completion": "a"}, set()),
        ({"prompt": "", "completion": "a"}, {"prompt": "", "completion": "a"}, set()),
        ({"prompt": "q", "completion": "a", "id": ""}, {"prompt": "q", "completion": "a"}, {"id"}),
        # a known column that is empty has nothing to be used
        (
            {"prompt": "q", "completion": "a", "label": ""},
            {"prompt": "q", "completion": "a"},
            set(),
        ),
        (
            {"prompt": "q", "completion": "a", "input": None},
            {"prompt": "q", "completion": "a"},
            set(),
        ),
        (
            {
                "messages": [user(), said()],
                "tools": TOOLS,
                "documents": None,
                "id": 1,
            },
            {"prompt": [user()], "completion": [said()], "tools": TOOLS},
            {"id"},
        ),
        (
            {"messages": [user(), said()], "chat_template_kwargs": {"x": 1}},
            {
                "prompt": [user()],
                "completion": [said()],
                "chat_template_kwargs": {"x": 1},
            },
            set(),
        ),
    ],
)
def test_an_answer_and_the_columns_that_nothing_is_done_with(row, parts, unused):
    made = read_answer(row, WHERE, {}, True)
    assert made.parts == parts and made.unused == unused


@pytest.mark.parametrize("chat", [False, True])
def test_a_named_column_without_a_prompt_is_an_empty_one(chat):
    row = {"film": None, "completion": "a"}
    made = read_answer(row, WHERE, {"prompt": "film"}, chat)
    assert made.parts == {"prompt": "", "completion": "a"}
    refusal("empty", "film is None", read_prompt, {"film": None}, WHERE, {"prompt": "film"}, chat)


def test_the_column_of_the_label_is_used():
    row = {"prompt": "q", "completion": "a", "kto_tag": "true", "id": 1}
    made = read_answer(row, WHERE, {}, True, labels=True)
    assert made.parts == {"prompt": "q", "completion": "a", "label": True}
    assert made.unused == {"id"}
    assert read_answer(row, WHERE, {}, True).unused == {"id", "kto_tag"}  # in SFT nobody asks


@pytest.mark.parametrize(
    "row, parts, unused",
    [
        ({"margin": 2}, {"margin": 2.0}, set()),
        ({"margin": ""}, {}, set()),
        ({"id": 1, "score_chosen": 2, "score_rejected": 1}, {}, {"id", *SCORES[0]}),
    ],
)
def test_a_pair_its_margin_and_the_columns_that_nothing_is_done_with(row, parts, unused):
    pair = {"prompt": "q", "chosen": "x", "rejected": "y"}
    made = read_pair(pair | row, WHERE, {}, True)
    assert made.parts == pair | parts and made.unused == unused


def test_a_pair_of_conversations_has_what_its_template_reads():
    pair = {
        "prompt": [user()],
        "chosen": [said("x")],
        "rejected": [said("y")],
    }
    assert read_pair(pair | {"tools": TOOLS}, WHERE, {}, True).parts == pair | {"tools": TOOLS}


READS = {
    "prompt": (read_prompt, {"prompt": "q"}),
    "answer": (read_answer, {"prompt": "q", "completion": "a"}),
    "pair": (read_pair, {"prompt": "q", "chosen": "x", "rejected": "y"}),
}
READ_THERE = {"system", "system_prompt"}  # these shapes read a system message
CHANGING = [name for name in CHANGES_MEANING if name not in READ_THERE]


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("name", CHANGING)
def test_a_column_without_which_the_row_means_something_else_is_refused(kind, name):
    read, row = READS[kind]
    refusal("column", f"{name} is 'x', and without it", read, row | {name: "x"}, WHERE, {}, True)
    for empty in [*NOTHING, [], ()]:
        read(row | {name: empty}, WHERE, {}, True)


def test_a_column_that_changes_the_meaning_stays_where_a_reward_asks_for_it():
    row = {"prompt": "q", "image": "x"}
    assert read_prompt(row, WHERE, {}, True, ["image"]).parts == row
    assert read_prompt(row, WHERE, {}, True, None).parts == row


@pytest.mark.parametrize("columns, is_named", [({}, False), ({"prompt": "instruction"}, True)])
def test_the_input_of_an_instruction_that_was_named_has_its_mend(columns, is_named):
    row = {"instruction": "q", "output": "a", "input": "x", "completion": "b"}
    if not is_named:
        row = {"prompt": "q", "completion": "b", "input": "x"}
    with pytest.raises(BadRow) as e:
        read_answer(row, WHERE, columns | ({"completion": "output"} if is_named else {}), True)
    assert ("name no columns: it is then read with the instruction" in str(e.value)) == is_named
    assert "put it into the prompt, or drop the column" in str(e.value)


@pytest.mark.parametrize(
    "stage, row, made",
    [
        ("RL", "q", {"prompt": "q"}),
        ("SFT", "q", {"text": "q"}),
        ("KTO", "q", {"text": "q"}),
        ("RL", [user()], {"prompt": [user()]}),
        ("SFT", [user()], {"messages": [user()]}),
        ("SFT", (user(),), {"messages": (user(),)}),
        ("DPO", ["x", "y"], {"chosen": "x", "rejected": "y"}),
        ("DPO", ("x", "y"), {"chosen": "x", "rejected": "y"}),
        ("DPO", {"a": 1}, {"a": 1}),
    ],
)
def test_a_bare_value_is_what_the_stage_reads(stage, row, made):
    assert as_object(row, stage, WHERE, {}) == made


@pytest.mark.parametrize(
    "stage, row, columns",
    [
        ("DPO", "x", {}),
        ("DPO", ["x"], {}),
        ("DPO", ["x", "y", "z"], {}),
        ("DPO", "xy", {}),  # of two characters
        ("RL", 3, {}),
        ("SFT", None, {}),
        ("RL", "q", {"prompt": "film"}),
        ("SFT", [user()], {"messages": "talk"}),
        ("DPO", ["x", "y"], {"chosen": "good"}),
    ],
)
def test_a_bare_value_that_the_stage_cannot_read_or_that_has_no_named_column_is_refused(
    stage, row, columns
):
    refusal("shape", f"of type {type(row).__name__}", as_object, row, stage, WHERE, columns)


# --- what is given before an answer


@pytest.mark.parametrize(
    "opening, chat, answers, spoken",
    [
        (Opening("q"), True, ["a"], ["q", "a"]),
        (Opening("q", True), False, ["a"], ["q\n", "a"]),
        (Opening("q", True), True, ["a"], [[user()], [said()]]),
        (Opening(None), True, ["a"], ["", "a"]),
        (Opening(None), False, ["a", "b"], ["", "a", "b"]),
        (Opening("q"), False, [[said()]], [[user()], [said()]]),
        (
            Opening("q"),
            False,
            [[said()], "b"],
            [[user()], [said()], [said("b")]],
        ),
        (
            Opening(""),
            True,
            [[user(), said()]],
            [[], [user(), said()]],
        ),
        (Opening([user()]), False, ["a"], [[user()], [said()]]),
        (Opening([user()]), True, [], [[user()]]),
        (Opening("q", False, "s"), True, ["a"], [[SYSTEM, user()], [said()]]),
        (Opening("q", False, ""), True, ["a"], ["q", "a"]),
        (
            Opening("q", True, "s", [user("p"), said("b")]),
            True,
            [],
            [[SYSTEM, user("p"), said("b"), user()]],
        ),
        (
            Opening("q", True, None, [user("p"), said("b")]),
            True,
            [],
            [[user("p"), said("b"), user()]],
        ),
    ],
)
def test_a_prompt_and_its_answers_are_all_texts_or_all_turns(opening, chat, answers, spoken):
    assert opening.spoken(chat, WHERE, *answers) == spoken


@pytest.mark.parametrize(
    "opening, what",
    [
        (Opening("q", False, "s"), "it has a system message"),
        (Opening("q", True, None, [user(), said()]), "it has a history"),
        (Opening([user()], False, "s"), "it has a system message"),
    ],
)
def test_a_system_message_or_a_history_needs_a_chat_template(opening, what):
    refusal("template", what, opening.spoken, False, WHERE, "a")


@pytest.mark.parametrize(
    "system, turns, made",
    [
        (None, [user()], [user()]),
        ("", [user()], [user()]),
        ("s", [user()], [SYSTEM, user()]),
        ("s", [], [SYSTEM]),
        ("s", [SYSTEM, user()], [SYSTEM, user()]),
    ],
)
def test_a_system_message_stands_first_and_once(system, turns, made):
    assert with_system(system, turns, WHERE) == made


def test_another_system_message_is_refused():
    refusal("column", "begins with another system message, 's'", with_system, "t", [SYSTEM], WHERE)


@pytest.mark.parametrize("messages", [None, "q", 3])
def test_messages_are_a_list_of_turns(messages):
    reason = "empty" if messages is None else "type"
    says = f"messages is {messages!r}: a conversation is needed"
    refusal(reason, says, read_prompt, {"messages": messages}, WHERE, {}, True)


def test_in_rl_the_last_answer_of_a_conversation_is_left_out_but_not_an_only_turn():
    talk = [user(), said(), user("r"), said("b")]
    assert read_prompt({"messages": talk}, WHERE, {}, True).parts["prompt"] == talk[:3]
    assert read_prompt({"messages": talk[:3]}, WHERE, {}, True).parts["prompt"] == talk[:3]
    says = "the prompt ends with the assistant's turn"
    refusal("conversation", says, read_prompt, {"messages": [said()]}, WHERE, {}, True)
    refusal("conversation", says, read_prompt, {"prompt": talk}, WHERE, {}, True)


@pytest.mark.parametrize("system", [*NOTHING, "s"])
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_message_is_read_where_there_is_one(name, system):
    row = {"question": "q", "answer": "a", name: system}
    expected = [SYSTEM, user()] if system == "s" else [user()]
    assert read_answer(row, WHERE, {}, True).parts["prompt"] == expected


def test_a_system_message_of_blanks_is_refused():
    row = {"question": "q", "answer": "a", "system": " "}
    refusal("empty", "system is empty", read_answer, row, WHERE, {}, True)


@pytest.mark.parametrize("more", [*NOTHING, "2 + 3"])
def test_an_instruction_and_its_input_are_one_question(more):
    row = {"instruction": "Add.", "output": "5", "input": more}
    text = "Add.\n\n2 + 3" if more == "2 + 3" else "Add."
    assert read_answer(row, WHERE, {}, True).parts["prompt"] == [user(text)]
    assert read_answer(row, WHERE, {}, False).parts["prompt"] == text + "\n"


@pytest.mark.parametrize("name", ["question", "instruction"])
def test_a_question_is_never_empty_and_a_prompt_may_be(name):
    row = {name: " ", "answer" if name == "question" else "output": "a"}
    refusal("empty", f"{name} is empty", read_answer, row, WHERE, {}, True)
    assert read_answer({"prompt": " ", "completion": "a"}, WHERE, {}, True).parts["prompt"] == " "
    refusal("empty", "prompt is empty", read_prompt, {"prompt": " "}, WHERE, {}, True)


@pytest.mark.parametrize(
    "history, turns",
    [
        (None, []),
        ("", []),
        ([], []),
        ([["p", "b"]], [user("p"), said("b")]),
        ((("p", "b"),), [user("p"), said("b")]),
        (
            [["p", "b"], ["r", "c"]],
            [user("p"), said("b"), user("r"), said("c")],
        ),
        ([user("p"), said("b")], [user("p"), said("b")]),
        ('[["p", "b"]]', [user("p"), said("b")]),
        ("[['p', 'b']]", [user("p"), said("b")]),  # as Python prints it
    ],
)
def test_a_history_is_messages_or_questions_with_their_answers(history, turns):
    row = {"question": "q", "answer": "a", "history": history}
    assert read_answer(row, WHERE, {}, True).parts["prompt"] == [*turns, user()]


@pytest.mark.parametrize(
    "history, says",
    [
        ("p", "history is None: pairs of texts, or messages"),
        (["p"], "history is ['p']: pairs"),
        ([["p"]], "history is [['p']]: pairs"),
        ([["p", "b", "c"]], "history is [['p', 'b', 'c']]: pairs"),
        ({"p": "b"}, "history is {'p': 'b'}: pairs"),
        ([["p", 3]], "history is 3, expected text"),
        ([user("p"), ["p", "b"]], "pairs of texts, or messages"),
    ],
)
def test_another_history_is_refused(history, says):
    row = {"question": "q", "answer": "a", "history": history}
    refusal("type", says, read_answer, row, WHERE, {}, True)


# --- answers


@pytest.mark.parametrize(
    "turns",
    [[said()], [user()], [user(), said(), user()]],
)
def test_a_demonstration_ends_with_an_answer_behind_something(turns):
    says = "a demonstration ends with the assistant's turn"
    refusal("conversation", says, read_answer, {"messages": turns}, WHERE, {}, True)


@pytest.mark.parametrize("mark", LEARNT_MARKS)
@pytest.mark.parametrize("value, is_learnt", [(0, False), (False, False), (1, True), (None, True)])
def test_a_last_turn_that_is_marked_not_to_be_learnt_is_refused(mark, value, is_learnt):
    row = {"messages": [user(), said() | {mark: value}]}
    if is_learnt:
        assert read_answer(row, WHERE, {}, True).parts["prompt"] == [user()]
    else:
        refusal(
            "conversation", f"the last turn has {mark} {value!r}", read_answer, row, WHERE, {}, True
        )


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize(
    "value, is_refused", [([], False), ("[]", False), ("[1]", True), ([1], True)]
)
def test_tools_and_documents_beside_a_text_are_refused_unless_empty(name, value, is_refused):
    for read, row in READS.values():
        if is_refused:
            refusal("column", f"it has {name}", read, row | {name: value}, WHERE, {}, True)
        else:
            read(row | {name: value}, WHERE, {}, True)
    read_prompt({"prompt": "q", name: value}, WHERE, {}, True, [name])


HEAD = "\n\nHuman: hi\n\nAssistant:"


@pytest.mark.parametrize(
    "chosen, rejected, shared",
    [
        (HEAD + " a", HEAD + " b", HEAD),
        (HEAD.lstrip() + " a", HEAD.lstrip() + " b", HEAD.lstrip()),
        (HEAD + " a\n\nHuman: x\n\nAssistant: c", HEAD + " a\n\nHuman: y", HEAD),
        ("Human: x\n\nAssistant: a", "Human: y\n\nAssistant: a", ""),
        (HEAD + " a", "b", ""),
        ("a", HEAD + " b", ""),
        (HEAD + " a", None, ""),
        ([user()], [user()], ""),
    ],
)
def test_dialogues_share_what_stands_before_the_answer_in_which_they_differ(
    chosen, rejected, shared
):
    assert shared_dialogue(chosen, rejected) == shared


@pytest.mark.parametrize(
    "row, pair",
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, ("", "a", "b")),
        ({"chosen": HEAD + " a", "rejected": HEAD + " b"}, (HEAD, " a", " b")),
        ({"prompt": "", "chosen": HEAD + " a", "rejected": HEAD + " b"}, (HEAD, " a", " b")),
        (
            {"prompt": "q", "chosen": HEAD + " a", "rejected": HEAD + " b"},
            ("q", HEAD + " a", HEAD + " b"),
        ),
        (
            {
                "prompt": [user()],
                "chosen": [user(), said("a")],
                "rejected": [said("b")],
            },
            ([user()], [said("a")], [said("b")]),
        ),
    ],
)
def test_a_prompt_is_given_or_what_both_answers_begin_with(row, pair):
    parts = read_pair(row, WHERE, {}, True).parts
    assert (parts["prompt"], parts["chosen"], parts["rejected"]) == pair


@pytest.mark.parametrize(
    "row, reason, says",
    [
        (
            {"chosen": "a", "rejected": "b", "system": "s"},
            "column",
            "a system message and no prompt",
        ),
        (
            {"chosen": [user(), said()], "rejected": "b"},
            "type",
            "both are texts, or both are",
        ),
        (
            {"chosen": "a", "rejected": [user(), said()]},
            "type",
            "both are texts, or both are",
        ),
        ({"chosen": HEAD, "rejected": HEAD + " b"}, "empty", "chosen is empty"),
        ({"chosen": HEAD + " a", "rejected": HEAD}, "empty", "rejected is empty"),
        (
            {
                "prompt": [user()],
                "chosen": [user("r"), said("a")],
                "rejected": [said("b")],
            },
            "conversation",
            "chosen: after the prompt the assistant's turn is missing",
        ),
        (
            {
                "prompt": [user()],
                "chosen": [user()],
                "rejected": [said("b")],
            },
            "conversation",
            "chosen: after the prompt the assistant's turn is missing",
        ),
        (
            {"prompt": [user(), said()], "chosen": "x", "rejected": "y"},
            "conversation",
            "after the assistant's turn responses answer nothing",
        ),
    ],
)
def test_a_pair_that_has_no_prompt_or_no_answer_is_refused(row, reason, says):
    refusal(reason, says, read_pair, row, WHERE, {}, True)


@pytest.mark.parametrize(
    "prompt, chosen, rejected, shared",
    [
        ([user()], [said("x")], [said("y")], [user()]),
        (
            None,
            [user(), said("x")],
            [user(), said("y")],
            [user()],
        ),
        # turns behind the first difference are no more shared
        (
            None,
            [user(), said("b"), user("r"), said("x")],
            [user(), said("c"), user("r"), said("y")],
            [user()],
        ),
        # the last turn is an answer, though both have it
        (
            None,
            [user(), said("b"), user("r")],
            [user(), said("b"), user("r")],
            [user(), said("b")],
        ),
        ("q", [said("x")], [said("y")], [user()]),
        (
            " q\n",
            [user(), said("x")],
            [user(), said("y")],
            [user()],
        ),
        (
            "r",
            [user(), said("b"), user("r"), said("x")],
            [user(), said("b"), user("r"), said("y")],
            [user(), said("b"), user("r")],
        ),
    ],
)
def test_the_turns_before_two_conversations(prompt, chosen, rejected, shared):
    assert shared_opening(prompt, chosen, rejected, WHERE) == shared


@pytest.mark.parametrize(
    "prompt, chosen, rejected, reason, says",
    [
        (
            None,
            [user(), said()],
            [user("r"), said()],
            "conversation",
            "no first turn in common",
        ),
        (None, [said()], [said("b")], "conversation", "no first turn in common"),
        (
            "p",
            [user(), said()],
            [user(), said("b")],
            "conversation",
            "the prompt 'p' is not among",
        ),
        (
            "p",
            [said()],
            [user(), said("b")],
            "conversation",
            "the prompt 'p' is not among",
        ),
        (3, [said()], [said("b")], "type", "prompt is 3, expected text"),
    ],
)
def test_without_turns_in_common_there_is_no_prompt(prompt, chosen, rejected, reason, says):
    refusal(reason, says, shared_opening, prompt, chosen, rejected, WHERE)


# --- scores, margins, labels


@pytest.mark.parametrize("chosen, rejected", SCORES)
def test_the_chosen_answer_has_no_lower_score_than_the_rejected_one(chosen, rejected):
    check_scores({chosen: 2, rejected: 1.5}, WHERE)
    check_scores({chosen: 2, rejected: 2.0}, WHERE)
    check_scores({chosen: 2}, WHERE)
    check_scores({rejected: 2}, WHERE)
    check_scores({chosen: "1", rejected: 2}, WHERE)  # whatever the text means
    check_scores({chosen: 1, rejected: "2"}, WHERE)
    says = f"{rejected} is 2.5 and {chosen} 2: which answer is preferred?"
    refusal("column", says, check_scores, {chosen: 2, rejected: 2.5}, WHERE)


def test_two_equal_answers_are_a_tie():
    refuse_tie("a", "b", WHERE)
    refusal("tie", "the same, 'a'", refuse_tie, "a", "a", WHERE)


@pytest.mark.parametrize(
    "value, margin",
    [(0, 0.0), (-1.5, -1.5), ("0.5", 0.5), (" 2 ", 2.0), *((x, None) for x in NOTHING)],
)
def test_a_margin_is_a_finite_number_or_none(value, margin):
    assert pair_margin({"margin": value}, WHERE) == margin


def test_a_pair_without_columns_has_no_margin():
    assert pair_margin(("a", "b"), WHERE) is None


@pytest.mark.parametrize("value", [True, "x", [1], math.inf, "nan", "-inf"])
def test_another_margin_is_refused(value):
    refusal("column", "a number is needed", pair_margin, {"margin": value}, WHERE)


@pytest.mark.parametrize(
    "value, label",
    [
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        (1.0, True),
        (0.0, False),
        ("TRUE", True),
        (" false\n", False),
        ("1.0", True),
        ("0.0", False),
    ],
)
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_label_is_true_or_false_in_either_column(name, value, label):
    assert read_label({"x": 1, name: value}, WHERE) == (label, name)


def test_the_column_label_comes_before_its_other_name():
    assert read_label({"kto_tag": False, "label": True}, WHERE) == (True, "label")


def test_a_row_without_a_label_names_twelve_of_its_columns():
    row = {f"c{i}": 0 for i in range(13)}
    known = ", ".join(repr(name) for name in list(row)[:12])
    says = f"no 'label': there are {known}. It is true or false"
    refusal("column", says, read_label, row, WHERE)


# --- turns


TURNS = [user(), said()]


@pytest.mark.parametrize(
    "value, turns",
    [
        (TURNS, TURNS),
        (tuple(TURNS), TURNS),
        (user(), [user()]),
        ({"from": "human", "value": "q"}, [{"from": "human", "value": "q"}]),
        (json.dumps(TURNS), TURNS),
        ("  \n" + json.dumps(TURNS), TURNS),
        (json.dumps(user()), [user()]),
        (str(TURNS), TURNS),
        ("[]", None),
        ("[1]", None),
        (json.dumps([user(), 3]), None),
        ('{"a": 1}', None),
        ("{", None),
        ("text", None),
        ("", None),
        (3, None),
        (None, None),
        ({"a": 1}, None),
        ([], []),
        ([3], [3]),
    ],
)
def test_a_conversation_is_a_list_a_turn_or_either_of_them_as_text(value, turns):
    assert conversation_in(value) == turns


def call(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    "turn, made",
    [
        (user(), user()),
        (user() | {"name": None, "id": 3}, user() | {"id": 3}),
        ({"role": "user", "content": [{"text": "q"}]}, user()),
        (
            {"role": "user", "content": [{"text": "q"}, {"text": "r"}]},
            {"role": "user", "content": [{"text": "q"}, {"text": "r"}]},
        ),
        (
            {"role": "assistant", "tool_calls": [call('{"a": 1}')]},
            {"role": "assistant", "content": None, "tool_calls": [call({"a": 1})]},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]},
            {"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]},
        ),
        (
            said() | {"tool_calls": [call("no JSON")]},
            said() | {"tool_calls": [call("no JSON")]},
        ),
        (
            said() | {"tool_calls": [call("[1]")]},
            said() | {"tool_calls": [call("[1]")]},
        ),
        (
            said() | {"tool_calls": [{"name": "add", "arguments": "{'a': 1}"}, "x"]},
            said() | {"tool_calls": [{"name": "add", "arguments": {"a": 1}}, "x"]},
        ),
        (said() | {"tool_calls": []}, said() | {"tool_calls": []}),
        ({"from": "human", "value": "q"}, user()),
        ({"from": "gpt", "value": "a", "weight": 1}, said() | {"weight": 1}),
        (
            {"from": "x", "role": "user", "content": "q"},
            {"from": "x"} | user(),
        ),  # a role it has
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "assistant", "content": None, "tool_calls": [call({"a": 1})]},
        ),
        (
            {"from": "function_call", "value": [{"name": "f"}, {"name": "g"}], "id": 3},
            {
                "role": "assistant",
                "content": None,
                "id": 3,
                "tool_calls": [
                    {"type": "function", "function": {"name": "f"}},
                    {"type": "function", "function": {"name": "g"}},
                ],
            },
        ),
    ],
)
def test_a_turn_is_a_role_and_a_content(turn, made):
    assert check_turns([turn], "talk", WHERE) == [made]


@pytest.mark.parametrize("speaker, role", ROLES.items())
def test_a_speaker_of_share_gpt_has_a_role(speaker, role):
    value = {"name": "f"} if speaker == "function_call" else "x"
    assert check_turns([{"from": speaker, "value": value}], "talk", WHERE)[0]["role"] == role


@pytest.mark.parametrize(
    "turn, reason, says",
    [
        (3, "shape", "talk, turn 1: of type int"),
        ({}, "conversation", "talk, turn 1 has no field, and neither role"),
        ({"content": "q"}, "conversation", "talk, turn 1 has content, and neither role"),
        ({"role": None, "content": "q"}, "empty", "talk, turn 1, role is None"),
        ({"role": "", "content": "q"}, "empty", "talk, turn 1, role is empty"),
        ({"role": "user"}, "empty", "talk, turn 1, content is None"),
        ({"role": "user", "content": " "}, "empty", "talk, turn 1, content is empty"),
        ({"role": "user", "content": []}, "type", "talk, turn 1, content is []"),
        (
            {"role": "user", "content": 3, "tool_calls": [1]},
            "type",
            "talk, turn 1, content is 3",
        ),
        (
            {"role": "user", "content": ["q"]},
            "shape",
            "part 0 of its content: of type str",
        ),
        (
            {"role": "user", "content": [{"text": "q"}, {}]},
            "conversation",
            "part 1 of its content",
        ),
        ({"role": "user", "content": [{"text": 3}]}, "type", "part 0 of its content is 3"),
        ({"from": "human"}, "empty", "talk, turn 1, content is None"),
        ({"from": "function_call", "value": "f()"}, "conversation", "'f()' is no {"),
        ({"from": "function_call", "value": [{"name": "f"}, {}]}, "conversation", "is no {"),
    ],
)
def test_a_turn_without_a_role_or_a_content_is_refused_by_its_number(turn, reason, says):
    refusal(reason, says, check_turns, [user(), turn], "talk", WHERE)


@pytest.mark.parametrize(
    "value, reason, says",
    [
        (3, "type", "film is 3, expected text"),
        (None, "empty", "film is None, expected text"),
        (" \n", "empty", "film is empty: drop the row"),
        ("\ud83d", "encoding", "film: half a surrogate pair"),
    ],
)
def test_a_text_is_a_text_that_says_something(value, reason, says):
    refusal(reason, says, require_text, value, "film", WHERE)


def test_a_text_stays_as_it_is_and_may_be_empty_where_that_is_allowed():
    assert require_text(" x\n", "film", WHERE) == " x\n"
    assert require_text(" ", "film", WHERE, blank=True) == " "
