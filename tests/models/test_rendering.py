"""The laws of rendering, for every template and for random conversations.

Then the small functions between a conversation and its token ids, one table each, whose
expectations are written by hand."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import FAMILIES, tokenizer_of

from instruct_goose.models.loading import tiny_smollm
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
from instruct_goose.models.tokens import bpe_tokenizer, word_tokenizer

TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
TOKENIZERS["stand-in"] = tiny_smollm("the film was good is it 4 why? what in".split())[1]
RENDERERS = {name: Renderer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
every_family = pytest.mark.parametrize("name", TOKENIZERS)


def user(content="q"):
    return {"role": "user", "content": content}


def said(content="a", **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, name="f"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def part(words):
    return {"type": "text", "text": words}


def template_ids(tokenizer, messages, ask, **kwargs):
    "What transformers gives for a conversation."
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=ask, tokenize=True, return_dict=True, **kwargs
    )["input_ids"]


def marks_of(name, ids):
    "How often each special token occurs."
    return Counter(token for token in ids if token in RENDERERS[name].special_ids)


words = st.lists(
    st.sampled_from("the film was good is it 4 why? what in".split()), min_size=1, max_size=4
).map(" ".join)
turns = st.lists(st.tuples(words, words), min_size=0, max_size=2)


@st.composite
def conversations(draw, takes_system=True):
    "Questions and answers in turn, perhaps behind a system message; the last turn answers."
    messages = []
    if takes_system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words)})
    for question, answer in draw(turns):
        messages += [user(question), said(answer)]
    return [*messages, user(draw(words)), said(draw(words))]


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_the_prompt_is_the_templates_own_and_begins_the_row(name, data):
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    takes_system = name not in FAMILIES or FAMILIES[name].takes_system
    messages = data.draw(conversations(takes_system))

    prompt = renderer.prompt(messages[:-1])
    row = renderer.conversation(messages)

    assert prompt == template_ids(tokenizer, messages[:-1], True)
    assert row.prompt_ids == prompt
    assert row.ids[: len(prompt)] == prompt
    assert renderer.reward_rows([messages[:-1]], [messages[-1:]]) == [row.ids]


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_a_row_has_the_special_tokens_that_the_template_writes_and_no_more(name, data):
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    takes_system = name not in FAMILIES or FAMILIES[name].takes_system
    messages = data.draw(conversations(takes_system))
    own_end = Counter({tokenizer.eos_token_id: 1} if name == "GLM" else {})  # it writes none

    row = renderer.conversation(messages)

    assert (
        marks_of(name, row.ids)
        == marks_of(name, template_ids(tokenizer, messages, False)) + own_end
    )
    assert row.ids.count(tokenizer.bos_token_id) == template_ids(tokenizer, messages, False).count(
        tokenizer.bos_token_id
    )
    assert row.end_ids and row.ids[-1] in renderer.special_ids
    assert row.end_ids[-1] == tokenizer.eos_token_id or name == "Gemma"


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_every_turn_stands_in_the_row_and_the_answer_alone_is_learnt(name, data):
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    takes_system = name not in FAMILIES or FAMILIES[name].takes_system
    messages = data.draw(conversations(takes_system))

    row = renderer.conversation(messages)

    text = tokenizer.decode(row.ids)
    assert all(message["content"] in text for message in messages)
    learnt = tokenizer.decode(row.answer_ids)
    assert learnt.strip().endswith(messages[-1]["content"])
    for header in ("user", "User", "USER", "assistant\n", "Assistant", "model\n", "CHATBOT"):
        assert header not in learnt


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_whatever_the_messages_say_they_stand_in_the_row_or_are_refused(name, data):
    if name == "stand-in":
        pytest.skip("it knows few words")
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
    thoughts = st.tuples(texts, texts).map("<think>\n{0[0]}\n</think>\n\n{0[1]}".format)
    question, answer = data.draw(texts), data.draw(texts | thoughts)
    try:
        row = renderer.row([user(question)], answer)
    except ValueError:
        return
    assert row.prompt_ids == template_ids(tokenizer, [user(question)], True)
    prompt, learnt = ("".join(tokenizer.decode(ids).split()) for ids in (row.prompt_ids, row.ids))
    assert "".join(question.split()) in prompt
    assert "".join(answer.split()) in learnt
    assert learnt.startswith(prompt)


@every_family
def test_a_row_is_the_templates_own_where_the_template_can_write_it(name):
    if name in ("R1", "Nemotron"):
        pytest.skip("the generation prompt opens what the conversation does not have there")
    messages = [user("what is it"), said("the film was good")]
    whole = template_ids(TOKENIZERS[name], messages, False)

    ids = RENDERERS[name].conversation(messages).ids

    assert ids[:-1] == whole[: len(ids) - 1] if name == "GLM" else ids == whole[: len(ids)]
    assert not TOKENIZERS[name].decode(whole[len(ids) :]).strip()


@pytest.mark.parametrize("name", ["R1", "Nemotron"])
def test_an_answer_stands_behind_a_generation_prompt_that_opens_a_thought(name):
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    question = [user("what is it")]

    plain = renderer.row(question, "good")
    thought = renderer.row(question, "<think>\nwhy? it is\n</think>\n\ngood")

    assert tokenizer.decode(plain.prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(plain.answer_ids).strip() == "good"
    assert tokenizer.decode(thought.answer_ids).strip() == "why? it is\n</think>\n\ngood"
    assert thought.prompt_ids == plain.prompt_ids
    assert tokenizer.decode(thought.ids).count("<think>") == 1
    assert thought.end_ids == plain.end_ids == [tokenizer.eos_token_id]


def test_pairs_that_differ_in_the_thought_alone_differ():
    renderer = RENDERERS["R1"]
    question = [user("what is it")]
    assert (
        renderer.row(question, "<think>\nwhy?</think>good").ids
        != renderer.row(question, "<think>\nin</think>good").ids
    )


def test_earlier_thoughts_are_left_to_the_template():
    messages = [user("why?"), said("<think>\nthe film\n</think>\n\nit is"), user("what"), said("4")]
    for name in ("Qwen3", "R1"):
        text = TOKENIZERS[name].decode(RENDERERS[name].conversation(messages).ids)
        assert "the film" not in text and "it is" in text


def test_the_thoughts_of_a_field_are_learnt_or_refused():
    answer = [{**said("good"), "reasoning_content": "why? it is"}]
    row = RENDERERS["Qwen3"].row([user("what")], answer)
    assert "why? it is" in TOKENIZERS["Qwen3"].decode(row.answer_ids)
    with pytest.raises(ValueError, match="the row: .*leaves out what turn 1 .*'why. it is'"):
        RENDERERS["ChatML"].row([user("what")], answer)


def test_template_arguments_are_passed_on():
    tokenizer, renderer = TOKENIZERS["Qwen3"], RENDERERS["Qwen3"]
    question = [user("what is it")]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]

    quiet = Renderer(tokenizer, {"enable_thinking": False})

    assert quiet.prompt(question) == template_ids(tokenizer, question, True, enable_thinking=False)
    assert quiet.prompt(question) == renderer.prompt(question, enable_thinking=False)
    assert quiet.row(question, "good").ids[: len(quiet.prompt(question))] == quiet.prompt(question)
    assert renderer.prompt(question, tools=tools) == template_ids(
        tokenizer, question, True, tools=tools
    )
    documents = [{"title": "a", "text": "the film was good"}]
    granite = RENDERERS["Granite"]
    assert granite.prompt(question, documents=documents) == template_ids(
        TOKENIZERS["Granite"], question, True, documents=documents
    )
    with pytest.raises(ValueError, match="the prompt has tools"):
        RENDERERS["ChatML"].prompt(question, tools=tools)
    with pytest.raises(ValueError, match="the prompt has documents"):
        RENDERERS["ChatML"].prompt(question, documents=documents)


def test_a_tool_call_is_an_answer():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    answer = [said(None, tool_calls=[call({"city": "rome"}, "weather")])]

    row = RENDERERS["Qwen3"].row([user("what is it")], answer, tools=tools)

    assert '"weather"' in TOKENIZERS["Qwen3"].decode(row.answer_ids)
    assert row.end_ids == [TOKENIZERS["Qwen3"].eos_token_id]
    with pytest.raises(ValueError, match="weather"):
        RENDERERS["gpt-oss"].row([user("what is it")], [{**answer[0], "content": "good"}])


CALLS = {  # how templates write the arguments of a call
    "a string alone": "{{ 'call ' + c['function']['name'] + ' ' + c['function']['arguments'] }}",
    "whatever it is": "{{ 'call ' ~ c['function']['name'] ~ ' ' ~ c['function']['arguments'] }}",
    "an object": (
        "{{ 'call ' + c['function']['name'] + ' ' + c['function']['arguments'] | tojson }}"
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_templates_tool_calls_are_json_whether_it_takes_an_object_or_a_string(kind):
    "DeepSeek's templates add the arguments to a text; most others make JSON of an object."
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    calls = "{% for c in m['tool_calls'] or [] %}" + CALLS[kind] + "{% endfor %}"
    tokenizer.chat_template = FAMILIES["ChatML"].template.replace(
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
        + calls
        + "{{ '<|im_end|>\n' }}",
    )
    renderer = Renderer(tokenizer)
    arguments = {"city": "roma", "days": 2, "is it": None}
    answer = [said(None, tool_calls=[call(arguments, "weather")])]

    row = renderer.row([user("what is it")], answer)

    as_json = '{"city": "roma", "days": 2, "is it": null}'
    assert tokenizer.decode(row.answer_ids) == f"call weather {as_json}"
    result = [*answer, {"role": "tool", "content": "4"}, said("good")]
    assert f"call weather {as_json}" in tokenizer.decode(
        renderer.row([user("what is it")], result).answer_ids
    )
    assert answer[0]["tool_calls"][0]["function"]["arguments"] is arguments


def test_arguments_that_a_template_leaves_out_or_refuses_are_refused():
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    head = "{% for m in messages %}{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    answer = [said(None, tool_calls=[call({"city": "roma"}, "weather")])]
    for write, says in (
        ("{{ c['function']['name'] }}", "the row: .*leaves out what turn 1 .*'roma'"),
        ("{{ raise_exception('no tools') }}", "the row: the chat template refuses it: .*no tools"),
    ):
        tokenizer.chat_template = f"{head}{write}{{% endfor %}}{{% endfor %}}"
        with pytest.raises(ValueError, match=says):
            Renderer(tokenizer).row([user("what")], answer)


PARTS = [part("what is"), part(" it")]


@pytest.mark.parametrize("content", ["m['content']", "'' + m['content']"])
def test_parts_of_text_are_one_text_for_a_template_that_does_not_read_parts(content):
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {content} }}}}{{% endfor %}}"
    messages = [{"role": "user", "content": PARTS}]
    renderer = Renderer(tokenizer)
    assert renderer.prompts([messages]) == renderer.prompts([[user("what is it")]])
    assert messages[0]["content"] is PARTS


def test_parts_of_text_stay_parts_for_a_template_that_reads_them():
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }} good"
        "{% endfor %}{% endfor %}"
    )
    ids = Renderer(tokenizer).prompts([[{"role": "user", "content": PARTS}]])[0]
    assert tokenizer.decode(ids).split() == "what is good it good".split()


REFUSED = {
    "a role that the template drops": (
        "Phi-3",
        [{"role": "human", "content": "what"}],
        r"prompt 1: .*leaves out what turn 0 \(human\) says, 'what'",
    ),
    "a role that it refuses": ("Gemma", [{"role": "system", "content": "x"}], "prompt 1: .*System"),
    "an image": (
        "ChatML",
        [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
        "prompt 1, turn 0|prompt 1: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_prompt_that_cannot_be_rendered_is_refused_by_its_number(case):
    name, messages, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        RENDERERS[name].prompts([[user("what")], messages])


def test_a_template_that_begins_an_answer_elsewhere_is_refused_with_both_texts():
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="row 0: .*\nprompt: '1what'\nconversation: '2whatgood'"):
        Renderer(tokenizer).rows([[user("what")]], ["good"])


def test_a_row_without_a_template_an_answer_or_a_question_is_refused():
    renderer = RENDERERS["ChatML"]
    with pytest.raises(ValueError, match="prompt 0 is a list of messages.*no chat template"):
        Renderer(word_tokenizer(["a"])).prompts([[user("a")]])
    with pytest.raises(ValueError, match="answers nothing"):
        renderer.row([user("what"), said("it")], "good")
    with pytest.raises(ValueError, match="is not the assistant's"):
        renderer.row([user("what")], [user("what")])


def test_a_prompt_may_end_inside_the_assistants_turn():
    tokenizer, renderer = TOKENIZERS["ChatML"], RENDERERS["ChatML"]
    text = tokenizer.decode(renderer.prompt([user("what"), said("the film")]))
    assert text.endswith("<|im_start|>assistant\nthe film")


HABITS = {
    "adds nothing": dict(add_bos=False),
    "adds a bos": dict(add_bos=True),
    "adds a bos and an eos": dict(add_bos=True, add_eos=True),
    "adds an eos": dict(add_bos=False, add_eos=True),
}


@pytest.mark.parametrize("habit", HABITS)
def test_plain_texts_get_what_the_tokenizers_call_gives_and_prompts_no_end(habit):
    tokenizer = word_tokenizer("the film is good".split(), **HABITS[habit])
    renderer = Renderer(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = [bos] if "bos" in habit else []
    end = [eos] if "eos" in habit else []
    film = tokenizer.convert_tokens_to_ids(["the", "film"])
    good = tokenizer.convert_tokens_to_ids(["is", "good"])

    row = renderer.row("the film", " is good")

    assert renderer.texts(["the film"]) == [tokenizer("the film")["input_ids"]]
    assert renderer.prompt("the film") == [*begin, *film]
    assert row == Rendered([*begin, *film], good, [eos])
    assert renderer.reward_rows(["the film"], [" is good"]) == renderer.texts(["the film is good"])
    assert renderer.reward_rows(["the film"], [" is good"]) == [[*begin, *film, *good, *end]]


@pytest.mark.parametrize("habit", HABITS)
def test_a_text_that_has_its_marks_already_gets_no_more(habit):
    tokenizer = word_tokenizer("the film is good".split(), **HABITS[habit])
    renderer = Renderer(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    assert renderer.prompt("<bos> the film").count(bos) == 1
    assert renderer.texts(["<bos> the film <eos>"])[0].count(eos) == 1
    assert renderer.row("<bos> the", " film <eos>").ids.count(eos) == 1
    assert renderer.row("<bos> the", " film <eos>").ids.count(bos) == 1


def test_one_token_for_begin_and_end_is_both_in_an_empty_text():
    tokenizer = word_tokenizer(["a"], bos="<end>", eos="<end>", pad="<end>", add_eos=True)
    renderer = Renderer(tokenizer)
    end = tokenizer.eos_token_id
    assert renderer.texts(["", "a"]) == tokenizer(["", "a"])["input_ids"]
    assert renderer.prompt("") == [end]


def test_an_empty_prompt_is_refused_unless_the_tokenizer_begins_it():
    bare = Renderer(word_tokenizer(["a"], add_bos=False))
    with pytest.raises(ValueError, match="prompt 1 is empty: ''"):
        bare.prompts(["a", ""])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        Renderer(word_tokenizer(["a"], add_bos=False, add_eos=True)).prompts([""])
    assert len(Renderer(word_tokenizer(["a"])).prompt("")) == 1


@given(text=st.text("the film was god.?\n", max_size=12), cut=st.integers(0, 12))
def test_wherever_the_border_of_two_texts_lies_the_prompt_is_the_policys(text, cut):
    tokenizer = BYTES
    renderer = Renderer(tokenizer)
    row = renderer.row(text[:cut], text[cut:])
    assert row.prompt_ids == renderer.prompt(text[:cut])
    assert tokenizer.decode(row.ids[1:-1]) == text


BYTES = bpe_tokenizer(["the film was good. "] * 9, 300, lowercase=False)


@pytest.mark.parametrize("name", ["ChatML", "Llama 3", "Mistral", "Gemma", "gpt-oss"])
def test_sampled_ids_are_the_reward_models_row(name):
    renderer = RENDERERS[name]
    question = [user("what is it")]
    row = renderer.row(question, "good")
    response = [*row.answer_ids, *row.end_ids]
    assert [renderer.response_row(row.prompt_ids, response, False)] == renderer.reward_rows(
        [question], ["good"]
    )
    text = renderer.row("the film", " was good")
    for ids in (text.answer_ids, [*text.answer_ids, *text.end_ids]):
        assert [renderer.response_row(text.prompt_ids, ids, True)] == renderer.reward_rows(
            ["the film"], [" was good"]
        )


def test_rows_of_both_kinds_keep_their_order():
    renderer = RENDERERS["ChatML"]
    prompts = ["the film", [user("what")], "it"]
    answers = [" was good", "good", [said("is")]]
    rows = renderer.rows(prompts, answers)
    assert rows == [renderer.row(q, a) for q, a in zip(prompts, answers, strict=True)]
    assert [row.prompt_ids for row in rows[:2]] == renderer.prompts(prompts[:2])
    assert rows[2].prompt_ids == renderer.prompt([user("it")])


# --- rows, piece by piece

WORDS = "the film is good why".split()


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
        assert Renderer(tokenizer, {name: 1}).prompt("the")
    else:
        with pytest.raises(ValueError, match=f"hold '{name}', and the template reads none"):
            Renderer(tokenizer, {name: 1})
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
        ([part("q"), part("r")], ["q", "r"]),
        ((part("q"),), ["q"]),
        ([part("")], [""]),
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
        ([part("q"), {"type": "image"}], "turn 2: the content holds .*image"),
        ([part(3)], "turn 2: the content holds"),
    ],
)
def test_a_content_that_is_no_text_is_refused(content, says):
    with pytest.raises(ValueError, match=says):
        message_texts(user(content), "turn 2")


def test_marks_stand_in_the_place_of_texts():
    messages = [user("q"), said(None), user([part("r") | {"x": 1}, part("s")]), said("")]
    marked, marks = with_marks(messages)
    assert marks == [["⟦0.0⟧"], [], ["⟦2.0⟧", "⟦2.1⟧"], []]
    assert marked == [
        user("⟦0.0⟧"),
        said(None),
        user([part("⟦2.0⟧") | {"x": 1}, part("⟦2.1⟧")]),
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
        ([part("q")], True),
        ((part("q"),), True),
        ([], True),
        (["q"], False),
        ([part("q"), {"type": "image"}], False),
        ([part(3)], False),
    ],
)
def test_a_content_in_parts_is_a_list_of_texts(content, in_parts):
    assert is_in_parts(user(content)) == in_parts
    assert is_in_parts({"role": "user"}) is False


def test_parts_are_put_together_without_anything_between_them():
    message = user([part("what is"), part(" it")]) | {"x": 1}
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
    parts = [part("q")]
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
