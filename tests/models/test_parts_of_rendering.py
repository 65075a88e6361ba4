"""The small functions between a conversation and its token ids, one table each. The expectations are
written by hand, from what the functions document."""

import json

import pytest

from instruct_goose.models.rendering import (
    THOUGHTS,
    Rendered,
    Renderer,
    added_by_call,
    argument_objects,
    check_arguments,
    is_conversation,
    is_in_parts,
    is_written_as_python,
    left_out,
    message_texts,
    pair_parts,
    prompt_and_answer,
    special_tokens,
    template_columns,
    times_in,
    values_of,
    with_arguments_as_json,
    with_marks,
    with_one_text,
    without_blanks,
    words_of,
)
from instruct_goose.models.tokens import word_tokenizer

WORDS = "the film is good why".split()


def user(content="q"):
    return {"role": "user", "content": content}


def said(content="a", **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, name="f"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def text(words):
    return {"type": "text", "text": words}


# --- rows


def test_a_row_is_given_first_and_learnt_behind_that():
    row = Rendered([1, 2, 3], [4, 5], [6])
    assert row.ids == [1, 2, 3, 4, 5, 6] and row.answer_start == 3
    assert row.sides == ([1, 2, 3], [4, 5, 6])
    assert row.answer_mask == [False, False, False, True, True, True]
    assert Rendered([], [4], []).answer_mask == [True]


@pytest.mark.parametrize(
    "value, is_one",
    [
        ([user()], True),
        ((user(), said()), True),
        ([{"role": "user"}], True),
        ([], False),
        ("q", False),
        ([3, 4], False),
        ([user(), "q"], False),
        ([user(), {"content": "q"}], False),
        ({"role": "user"}, False),
        (None, False),
    ],
)
def test_a_conversation_is_a_list_of_messages_with_roles(value, is_one):
    assert is_conversation(value) == is_one


@pytest.mark.parametrize(
    "row, side, parts",
    [
        ([user(), said()], "completion", ([user()], [said()])),
        ([user(), said("b"), user(), said()], "x", ([user(), said("b"), user()], [said()])),
        ({"prompt": "q", "completion": "a"}, "completion", ("q", "a")),
        ({"prompt": "q", "chosen": "a", "completion": "b"}, "chosen", ("q", "a")),
        ({"prompt": None, "completion": "a"}, "completion", ("", "a")),
        ({"completion": "a"}, "completion", ("", "a")),
    ],
)
def test_the_prompt_and_the_answer_of_a_row(row, side, parts):
    assert prompt_and_answer(row, side) == parts


X, Y = said("x"), said("y")


@pytest.mark.parametrize(
    "pair, parts",
    [
        (("x", "y"), ("", "x", "y")),
        (["x", "y"], ("", "x", "y")),
        ({"prompt": "q", "chosen": "x", "rejected": "y"}, ("q", "x", "y")),
        ({"prompt": None, "chosen": "x", "rejected": "y"}, ("", "x", "y")),
        ({"chosen": "", "rejected": "y"}, ("", "", "y")),
        (([user(), X], [user(), Y]), ([user()], [X], [Y])),
        (([X], [Y]), ([], [X], [Y])),
        (
            ([user(), X, user("r"), Y], [user(), X, user("r"), X]),
            ([user(), X, user("r")], [Y], [X]),
        ),
        # turns behind the first difference belong to the answers
        (
            ([user(), X, user("r"), Y], [user(), Y, user("r"), Y]),
            ([user()], [X, user("r"), Y], [Y, user("r"), Y]),
        ),
        # each answer keeps one turn at least
        (([user(), X], [user(), X, user("r"), Y]), ([user()], [X], [X, user("r"), Y])),
        (([user(), X, user("r"), Y], [user(), X]), ([user()], [X, user("r"), Y], [X])),
        # a prompt that is given stays as it is
        (
            {"prompt": [user("p")], "chosen": [user(), X], "rejected": [user(), Y]},
            ([user("p")], [user(), X], [user(), Y]),
        ),
        ({"prompt": "", "chosen": [user(), X], "rejected": [user(), Y]}, ([user()], [X], [Y])),
        ({"chosen": [user(), X], "rejected": "y"}, ("", [user(), X], "y")),
    ],
)
def test_a_pair_has_a_prompt_and_two_answers(pair, parts):
    assert pair_parts(3, pair) == parts


@pytest.mark.parametrize(
    "pair",
    [
        ("x", "x"),
        ("x",),
        ("x", "y", "z"),
        ("x", None),
        {"chosen": "x"},
        {"rejected": "x"},
        {"chosen": [user(), X], "rejected": [user(), X]},
        "xy",
        None,
    ],
)
def test_a_pair_without_two_different_answers_is_refused_by_its_number(pair):
    with pytest.raises(ValueError, match="pair 3 is .*it needs two different texts"):
        pair_parts(3, pair)


# --- arguments of the template


TOOLS = [{"name": "f"}]


@pytest.mark.parametrize(
    "row, arguments",
    [
        ({"tools": TOOLS, "documents": (TOOLS[0],)}, {"tools": TOOLS, "documents": TOOLS}),
        ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"tools": " \n" + json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"tools": [], "documents": "[]"}, {}),
        ({"tools": None, "documents": ""}, {}),
        ({"tools": "none", "documents": {"a": 1}}, {}),
        ({"chat_template_kwargs": {"x": 1}, "tools": TOOLS}, {"x": 1, "tools": TOOLS}),
        ({"chat_template_kwargs": {"tools": [3]}, "tools": TOOLS}, {"tools": [3]}),
        ({"chat_template_kwargs": None}, {}),
        ({"prompt": "q", "answer": "a"}, {}),
        ("q", {}),
        ([user()], {}),
    ],
)
def test_the_columns_of_a_row_that_the_template_takes(row, arguments):
    assert template_columns(row) == arguments


@pytest.mark.parametrize(
    "template, name, is_read",
    [
        ("{{ mood }}", "mood", True),
        ("{{ moody }}", "mood", False),
        ("{{ my_mood }}", "mood", False),
        ("{{ messages }}", "mood", False),
        (None, "mood", True),  # it has no template: nothing to compare
        ("{{ a.b }}", "a.b", True),
        ("{{ axb }}", "a.b", False),
    ],
)
def test_an_argument_stands_in_the_template_as_a_word_of_its_own(template, name, is_read):
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = template
    if is_read:
        check_arguments(tokenizer, {name: 1})
        assert Renderer(tokenizer, {name: 1}).template_kwargs == {name: 1}
    else:
        with pytest.raises(ValueError, match=f"hold '{name}', and the template reads none"):
            check_arguments(tokenizer, {name: 1})
    check_arguments(tokenizer, {})


# --- what a tokenizer adds


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_what_the_tokenizers_call_puts_around_a_text_is_found(bos, eos):
    tokenizer = word_tokenizer(["a", *WORDS], add_bos=bos, add_eos=eos)
    expected = ([tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos)
    assert added_by_call(tokenizer) == expected
    unknown = word_tokenizer(WORDS, add_bos=bos, add_eos=eos)  # "a" is no word of it
    assert added_by_call(unknown) == expected


def test_special_tokens_are_those_of_the_tokenizer_and_of_its_vocabulary():
    tokenizer = word_tokenizer(WORDS)
    before = special_tokens(tokenizer)
    assert before == {name: tokenizer.convert_tokens_to_ids(name) for name in before}
    assert {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} <= {*before}
    assert not {*WORDS} & {*before}
    tokenizer.add_tokens(["plain"])
    tokenizer.add_tokens(["<|mark|>"], special_tokens=True)
    added = special_tokens(tokenizer).keys() - before.keys()
    assert added == {"<|mark|>"}


# --- the texts of a message


@pytest.mark.parametrize(
    "content, texts",
    [
        ("q", ["q"]),
        ("", []),
        (None, []),
        ([text("q"), text("r")], ["q", "r"]),
        ((text("q"),), ["q"]),
        ([text("")], [""]),
        ([], []),
    ],
)
def test_a_content_is_one_text_or_those_of_its_parts(content, texts):
    assert message_texts(user(content), "turn 2") == texts


def test_a_message_without_a_content_has_no_text():
    assert message_texts({"role": "assistant"}, "turn 2") == []


@pytest.mark.parametrize(
    "content, says",
    [
        (3, "turn 2: the content 3 is no text"),
        ({"text": "q"}, "turn 2: the content .* is no text"),
        (["q"], "turn 2: the content holds 'q', and only text is rendered"),
        ([text("q"), {"type": "image"}], "turn 2: the content holds .*image"),
        ([text(3)], "turn 2: the content holds"),
    ],
)
def test_a_content_that_is_no_text_is_refused(content, says):
    with pytest.raises(ValueError, match=says):
        message_texts(user(content), "turn 2")


def test_marks_stand_in_the_place_of_texts():
    messages = [user("q"), said(None), user([text("r") | {"x": 1}, text("s")]), said("")]
    marked, marks = with_marks(messages)
    assert marks == [["⟦0.0⟧"], [], ["⟦2.0⟧", "⟦2.1⟧"], []]
    assert marked == [
        user("⟦0.0⟧"),
        said(None),
        user([text("⟦2.0⟧") | {"x": 1}, text("⟦2.1⟧")]),
        said(""),
    ]
    assert messages[0] == user("q") and messages[2]["content"][0]["text"] == "r"
    with pytest.raises(ValueError, match="^turn 1: "):
        with_marks([user(), user(3)])


@pytest.mark.parametrize(
    "content, in_parts",
    [
        ("q", False),
        (None, False),
        ([text("q")], True),
        ((text("q"),), True),
        ([], True),
        (["q"], False),
        ([text("q"), {"type": "image"}], False),
        ([text(3)], False),
    ],
)
def test_a_content_in_parts_is_a_list_of_texts(content, in_parts):
    assert is_in_parts(user(content)) == in_parts
    assert is_in_parts({"role": "user"}) is False


def test_parts_are_put_together_without_anything_between_them():
    message = user([text("what is"), text(" it")]) | {"x": 1}
    assert with_one_text(message) == user("what is it") | {"x": 1}
    assert len(message["content"]) == 2
    for other in (user("q"), said(None)):
        assert with_one_text(other) == other and with_one_text(other) is not other


# --- what stands in a rendered text


@pytest.mark.parametrize(
    "words, rendered, n",
    [
        ("q", "a q and q", 2),
        ("q", "none", 0),
        ("what is", "what\n  is", 1),
        (" q ", "q", 1),
        ('say "x"', '{"text": "say \\"x\\""}', 1),  # as JSON has it
        ("é", '{"text": "é"}', 1),
        ("a\nb", "a\\nb", 1),
    ],
)
def test_a_text_stands_in_a_rendered_one_whatever_its_blanks(words, rendered, n):
    assert times_in(words, rendered) == n
    assert without_blanks(" a\tb\n c ") == "abc"


@pytest.mark.parametrize(
    "message, objects",
    [
        (said(), []),
        (said(tool_calls=None), []),
        (said(tool_calls=[call({"a": 1}), call('{"a": 1}'), call({"b": 2})]), [{"a": 1}, {"b": 2}]),
        (said(tool_calls=[{"name": "f", "arguments": {"a": 1}}]), [{"a": 1}]),
        (said(tool_calls=[{"name": "f"}]), []),
        (said(tool_calls=[call({})]), [{}]),
    ],
)
def test_arguments_of_calls_that_are_objects(message, objects):
    assert argument_objects(message) == objects


def test_arguments_as_json_for_templates_that_want_a_string():
    direct = {"name": "g", "arguments": {"é": None}}
    message = said(None, tool_calls=[call({"a": 1}), call("as it is"), direct])
    made = with_arguments_as_json(message)
    assert made == said(
        None,
        tool_calls=[
            call('{"a": 1}'),
            call("as it is"),
            {"name": "g", "arguments": '{"é": null}'},
        ],
    )
    assert message["tool_calls"][0] == call({"a": 1}) and direct["arguments"] == {"é": None}
    for other in (said(), said(tool_calls=[call("x")])):
        assert with_arguments_as_json(other) == other


def test_values_that_a_template_might_print_as_python_does():
    parts = [text("q")]
    messages = [user("q"), user(parts), said(None, tool_calls=[call({"a": 1}), call("x")])]
    assert values_of(messages) == [parts, {"a": 1}]


@pytest.mark.parametrize(
    "value, rendered, is_python",
    [
        ({"a": 1}, "{'a': 1}", True),
        ({"a": 1}, "call {'a': 1}.", True),
        ({"a": 1}, '{"a": 1}', False),
        ({}, "{}", False),  # JSON writes it alike
        ([1, 2], "[1, 2]", False),
        ([None], "[None]", True),
        ([None], "[null]", False),
        ({"a": 1}, "nothing", False),
    ],
)
def test_a_value_is_written_as_python_prints_it_where_json_differs(value, rendered, is_python):
    assert is_written_as_python(value, rendered) == is_python


@pytest.mark.parametrize(
    "message, is_history, words",
    [
        (user("q"), True, ["q"]),
        (user(" "), True, []),
        (said("a"), False, ["a"]),
        # templates leave out earlier thoughts; those of the answer must stay
        (said("<think>t</think>a"), True, ["a"]),
        (said("<think>t</think>a"), False, ["<think>t</think>a"]),
        (said("<think>t</think>"), True, []),
        (user("<think>t</think>q"), True, ["<think>t</think>q"]),
        *((said("a", **{field: "t"}), False, ["a", "t"]) for field in THOUGHTS),
        *((said("a", **{field: "t"}), True, ["a"]) for field in THOUGHTS),
        (said("a", thinking=""), False, ["a"]),
        (said(None, tool_calls=[call({"city": "x", "n": 3})]), False, ["f", "x"]),
        (said(None, tool_calls=[{"name": "g", "arguments": {}}]), True, ["g"]),
        (said(None, tool_calls=[call('{"city": "x"}')]), False, ["f"]),
    ],
)
def test_the_words_that_the_rendered_text_must_hold(message, is_history, words):
    assert words_of(message, "turn 0", is_history) == words


def test_words_that_are_left_out_are_named_with_their_turn_and_role():
    assert str(left_out("row 3", 1, said(), "word")).startswith(
        "row 3: the chat template leaves out what turn 1 (assistant) says, 'word'."
    )


# --- texts and ids


@pytest.fixture(scope="module")
def renderer():
    return Renderer(word_tokenizer(WORDS, add_bos=True, add_eos=True))


def test_texts_are_a_list(renderer):
    assert renderer.texts([]) == []
    with pytest.raises(TypeError, match="texts is one string"):
        renderer.texts("the film")


@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_sampled_ids_become_the_row_that_a_reward_model_reads(kind, renderer):
    tokenizer = renderer.tokenizer
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    the, film = tokenizer.convert_tokens_to_ids(["the", "film"])
    sampled = [bos, film, pad, film, eos, pad]
    made = renderer.response_row((bos, the), sampled, kind == "text")
    if kind == "text":
        assert made == [bos, the, film, film, eos]
    else:
        assert made == [bos, the, *sampled]


def test_special_tokens_at_the_end_of_a_text_go_and_those_inside_it_stay():
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens(["<|mark|>"], special_tokens=True)
    renderer = Renderer(tokenizer)
    film, mark = tokenizer.convert_tokens_to_ids(["film", "<|mark|>"])
    assert renderer.response_row([5], [mark, film, mark, mark], True) == [5, mark, film]
    assert renderer.response_row([5], [mark], True) == [5]


def test_a_tokenizer_without_an_end_cannot_teach_to_stop():
    tokenizer = word_tokenizer(WORDS)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos token"):
        Renderer(tokenizer).rows(["the"], [" film"])


def test_errors_have_the_name_of_their_row(renderer):
    prompts = [[user("the film")], "the"]
    with pytest.raises(ValueError, match="^row 0 is a list of messages, .*no chat template"):
        renderer.rows(prompts, ["good", " film"])
    with pytest.raises(ValueError, match="^example 0 is a list of messages"):
        renderer.rows(prompts, ["good", " film"], name="example {}".format)
    with pytest.raises(ValueError, match="^the prompt is a list of messages"):
        renderer.prompt([user("the film")])


def test_columns_belong_to_their_own_row():
    tokenizer = word_tokenizer([*WORDS, "sad"])
    tokenizer.chat_template = "{{ mood }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    renderer = Renderer(tokenizer, {"mood": "good"})
    columns = [{}, {"mood": "sad"}]
    prompts = [[user("the")], [user("film")]]
    decoded = [tokenizer.decode(ids) for ids in renderer.prompts(prompts, columns)]
    assert decoded == ["good the", "sad film"]
    rows = renderer.rows(prompts, ["is", "why"], columns)
    assert [tokenizer.decode(row.prompt_ids) for row in rows] == decoded
    assert [tokenizer.decode(row.answer_ids) for row in rows] == ["is", "why"]
    assert [row.end_ids for row in rows] == [[tokenizer.eos_token_id]] * 2
    assert renderer.reward_rows(prompts, ["is", "why"], columns) == [row.ids for row in rows]
    assert [tokenizer.decode(ids) for ids in renderer.prompts(prompts)] == ["good the", "good film"]
