"The laws of rendering: for every template, and for random conversations."

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import FAMILIES, tokenizer_of

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.rendering import Rendered, Renderer, template_columns
from instruct_goose.models.tokens import bpe_tokenizer, word_tokenizer

TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
TOKENIZERS["stand-in"] = tiny_smollm("the film was good is it 4 why? what in".split())[1]
RENDERERS = {name: Renderer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
every_family = pytest.mark.parametrize("name", TOKENIZERS)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


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


def test_an_argument_that_no_template_reads_is_refused_before_any_row():
    Renderer(TOKENIZERS["Qwen3"], {"enable_thinking": True})
    with pytest.raises(ValueError, match="hold 'enable_thinkin', .* reads none"):
        Renderer(TOKENIZERS["Qwen3"], {"enable_thinkin": True})
    assert Renderer(word_tokenizer(["a"]), {"enable_thinking": True}).prompt("a")  # no template


def test_template_arguments_of_a_row():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"prompt": "q", "tools": tools, "documents": None, "answer": "4"}
    assert template_columns(row) == {"tools": tools}
    assert template_columns({"tools": '[{"name": "f"}]'}) == {"tools": [{"name": "f"}]}
    assert template_columns({"chat_template_kwargs": {"enable_thinking": False}}) == {
        "enable_thinking": False
    }
    assert template_columns("a text") == {}


def test_a_tool_call_is_an_answer():
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "rome"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]

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
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]

    row = renderer.row([user("what is it")], answer)

    as_json = '{"city": "roma", "days": 2, "is it": null}'
    assert tokenizer.decode(row.answer_ids) == f"call weather {as_json}"
    result = [*answer, {"role": "tool", "content": "4"}, said("good")]
    assert f"call weather {as_json}" in tokenizer.decode(
        renderer.row([user("what is it")], result).answer_ids
    )
    assert call["function"]["arguments"] is arguments


def test_arguments_that_a_template_leaves_out_or_refuses_are_refused():
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    head = "{% for m in messages %}{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "roma"}}}
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    for write, says in (
        ("{{ c['function']['name'] }}", "the row: .*leaves out what turn 1 .*'roma'"),
        ("{{ raise_exception('no tools') }}", "the row: the chat template refuses it: .*no tools"),
    ):
        tokenizer.chat_template = f"{head}{write}{{% endfor %}}{{% endfor %}}"
        with pytest.raises(ValueError, match=says):
            Renderer(tokenizer).row([user("what")], answer)


PARTS = [{"type": "text", "text": "what is"}, {"type": "text", "text": " it"}]


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


def test_texts_in_parts_are_read():
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it"}]
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert tokenizer.decode(Renderer(tokenizer).prompt([user(parts)])) == "what is it"


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
