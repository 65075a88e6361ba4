"""Every published form of a row: which shape it is, what it is read as, in Python and from files of
every format; and what is refused, with what is near."""

import bz2
import copy
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import fuzz
import pytest

from instruct_goose.data.files import BadRow
from instruct_goose.data.load import (
    UnusedColumns,
    load_answers,
    load_from_hub,
    load_pairs,
    load_prompts,
)
from instruct_goose.data.rows import read_answer, read_pair, read_prompt
from instruct_goose.data.shapes import (
    PARTS,
    SETTABLE,
    SHAPES,
    STAGES,
    fit_shape,
    names_table,
    shapes_help,
    shapes_table,
)
from instruct_goose.models.tokens import bpe_tokenizer

EXAMPLES = {title: row for shape in SHAPES for title, row in shape.examples.items()}
STAGES_OF = {title: shape.stages for shape in SHAPES for title in shape.examples}


def user(text="2 + 3?"):
    return {"role": "user", "content": text}


def said(text="5"):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "You add."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CALLING = [user(), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
CALLING.append({"role": "tool", "content": "5"})

# what each form is read as with a chat template, written by hand: prompt, answer
ANSWERS = {
    "TRL, prompt and completion": ("2 + 3 =", " 5"),
    "TRL, conversation": ([user()], [said()]),
    "TRL and OpenAI, messages": ([user()], [said()]),
    "OpenAI, content in parts": ([user()], [said()]),
    "OpenAI, tool calls": (CALLING, [said()]),
    "ShareGPT": ([SYSTEM, user()], [said()]),
    "ShareGPT, with tools": (CALLING, [said()]),
    "Alpaca": ([user("Add.\n\n2 + 3")], [said()]),
    "Dolly": ([user()], [said()]),
    "GSM8K": ([user()], [said()]),
    "MATH": ([user()], [said()]),
    "Orca": ([SYSTEM, user()], [said()]),
    "ms-swift": ([user("1 + 1?"), said("2"), user()], [said()]),
    "text": ("", "2 + 3 = 5"),
}
PAIRS = {
    "TRL, pair": ("2 + 3 =", " 5", " 6"),
    "HH-RLHF, transcripts": ("\n\nHuman: 2 + 3?\n\nAssistant:", " 5", " 6"),
    "Orca, pair": ([SYSTEM, user()], [said()], [said("6")]),
}
for form in (
    "TRL, pair with an implicit prompt",
    "UltraFeedback, scored",
    "Stack Exchange",
    "ShareGPT, pair",
    "answers as messages",
    "answers as dictionaries",
):
    PAIRS[form] = ([user()], [said()], [said("6")])
# as texts, where there is no chat template
TEXTS = {
    "Alpaca": ("Add.\n\n2 + 3\n", "5"),
    "Dolly": ("2 + 3?\n", "5"),
    "GSM8K": ("2 + 3?\n", "5"),
    "MATH": ("2 + 3?\n", "5"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return fuzz.tokenizer()


def without_template():
    return bpe_tokenizer(["2 + 3? 5"], 270)


def load(stage, source, **options):
    "The row of a source, as a stage reads it."
    loads = {"RL": load_prompts, "DPO": load_pairs, "reward model": load_pairs}
    if stage in ("SFT", "KTO"):
        [row] = load_answers(source, labels=stage == "KTO", **options)
        return row
    [row] = loads[stage](source, **options)
    return row


def sides(row):
    return tuple(
        row[name] for name in ("prompt", "completion", "chosen", "rejected") if name in row
    )


def test_each_form_has_an_expectation_here():
    assert {*ANSWERS, *PAIRS} == {title for title in EXAMPLES if "prompt only" not in title}


@pytest.mark.filterwarnings("ignore::instruct_goose.data.load.UnusedColumns")
@pytest.mark.parametrize("title", EXAMPLES)
def test_a_form_is_read_as_it_is_meant(title, tokenizer):
    wanted = ANSWERS | PAIRS
    for stage in STAGES_OF[title]:
        row = copy.deepcopy(EXAMPLES[title])
        if stage == "KTO":
            row["label"] = True
        made = load(stage, [row], tokenizer=tokenizer)
        assert row == EXAMPLES[title] | ({"label": True} if stage == "KTO" else {})
        if stage == "RL" and title == "text":
            assert made["prompt"] == "2 + 3 = 5"
        elif stage == "RL" and title in wanted:
            assert made["prompt"] == wanted[title][0]
        elif stage == "RL":
            assert made == row
        else:
            assert sides(made) == wanted[title]
            assert made.get("label") == (True if stage == "KTO" else None)


@pytest.mark.parametrize("title", TEXTS)
def test_a_question_is_a_text_where_there_is_no_chat_template(title):
    bare = without_template()
    assert sides(load("SFT", [EXAMPLES[title]], tokenizer=bare)) == TEXTS[title]
    assert load("RL", [EXAMPLES[title]], tokenizer=bare)["prompt"] == TEXTS[title][0]


def test_a_system_message_needs_a_chat_template(refused):
    row = EXAMPLES["Orca"]
    refused(
        lambda: load("SFT", [row], tokenizer=without_template()),
        "row 0: it has a system message, and the tokenizer has no chat template for it",
    )


# --- files


def as_csv(row, delimiter=","):
    "As a spreadsheet has it: lists as JSON."
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(row)
    texts = {key: "" if x is None else x for key, x in row.items()}
    writer.writerow([x if isinstance(x, str) else json.dumps(x) for x in texts.values()])
    return out.getvalue()


def write_parquet(path, row):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)


def write_arrow(path, row):
    import pyarrow

    table = pyarrow.Table.from_pylist([row])
    opened = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
    with opened(path, table.schema) as file:
        file.write_table(table)


def save_to_disk(path, row):
    import datasets

    datasets.Dataset.from_list([row]).save_to_disk(path)


def write_zst(path, row):
    import pyarrow

    with pyarrow.output_stream(path, compression="zstd") as file:
        file.write((json.dumps(row) + "\n").encode())


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def compressed(path, row):
    is_table = path.name.startswith("table.csv")
    text = as_csv(row) if is_table else json.dumps(row)
    path.write_bytes(COMPRESS[path.suffix](text.encode()))


def in_text(write, encoding="utf-8"):
    return lambda path, row: path.write_bytes(write(row).encode(encoding))


WRITERS = {
    "rows.jsonl": in_text(json.dumps),
    "utf16.jsonl": in_text(json.dumps, "utf-16"),
    "utf16-without-mark.jsonl": in_text(json.dumps, "utf-16-le"),
    "array.json": in_text(lambda row: json.dumps([row], indent=2)),
    "wrapped.json": in_text(lambda row: json.dumps({"data": [row]})),
    "wrapped-indented.json": in_text(lambda row: json.dumps({"rows": [row]}, indent=1)),
    "table.csv": in_text(as_csv),
    "semicolons.csv": in_text(lambda row: as_csv(row, ";")),
    "bars.csv": in_text(lambda row: as_csv(row, "|")),
    "utf16.csv": in_text(as_csv, "utf-16"),
    "table.tsv": in_text(lambda row: as_csv(row, "\t")),
    "rows.jsonl.gz": compressed,
    "rows.json.gz": compressed,
    "rows.jsonl.bz2": compressed,
    "table.csv.bz2": compressed,
    "rows.jsonl.xz": compressed,
    "rows.json.xz": compressed,
    "rows.jsonl.zst": write_zst,
    "table.parquet": write_parquet,
    "stream.arrow": write_arrow,
    "file.feather": write_arrow,
    "saved": save_to_disk,
}


NOT_MIXED = (
    "table.parquet",
    "stream.arrow",
    "file.feather",
    "saved",
)  # texts and lists, in a column


@pytest.mark.filterwarnings("ignore::instruct_goose.data.load.UnusedColumns")
@pytest.mark.parametrize("name", WRITERS)
def test_every_form_is_the_same_from_every_file(name, tmp_path, tokenizer):
    for number, (title, row) in enumerate(EXAMPLES.items()):
        if title == "OpenAI, content in parts" and name in NOT_MIXED:
            continue
        stage = STAGES_OF[title][0 if title not in ANSWERS else -2]
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        WRITERS[name](path, row)
        wanted = load(stage, [row], tokenizer=tokenizer)
        assert sides(load(stage, path, tokenizer=tokenizer)) == sides(wanted), title


def test_a_table_of_pandas_is_read_by_its_rows_whatever_its_index(tmp_path, tokenizer):
    pandas = pytest.importorskip("pandas")
    rows = [
        {"prompt": [user()], "chosen": [said()], "rejected": [said("6")], "margin": None},
        {"prompt": [user("1?")], "chosen": [said()], "rejected": [said("6")], "margin": 2.0},
    ]
    wanted = [{k: x for k, x in row.items() if x is not None} for row in rows]
    table = pandas.DataFrame(rows, index=[7, 7])
    assert load_pairs(table, tokenizer=tokenizer) == wanted
    table.to_parquet(tmp_path / "a.parquet")
    as_arrays = pandas.read_parquet(tmp_path / "a.parquet")
    assert load_pairs(as_arrays, tokenizer=tokenizer) == wanted
    table.to_csv(tmp_path / "a.csv", index=False)  # what Python prints of a list
    assert load_pairs(tmp_path / "a.csv", tokenizer=tokenizer) == wanted


def test_a_field_of_a_table_may_be_of_any_length(tmp_path):
    limit = csv.field_size_limit()
    text = "long " * 100_000
    (tmp_path / "a.csv").write_text(f'prompt,id\n"{text}",1\n')
    assert load_prompts(tmp_path / "a.csv") == [{"prompt": text, "id": "1"}]
    assert csv.field_size_limit() == limit


def test_objects_of_a_table_have_no_fields_of_other_rows(tmp_path, tokenizer):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    first = {"messages": [user(), {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    other = {"type": "function", "function": {"name": "sum", "arguments": {"of": 1}}}
    second = {"messages": [user(), {"role": "assistant", "content": "x", "tool_calls": [other]}]}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([first, second]), path)
    rows = load_answers(path, tokenizer=tokenizer)
    assert rows == load_answers([first, second], tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["stream.arrow", "file.feather", "table.parquet"])
def test_a_row_of_a_table_has_its_number_in_whatever_batch_it_is(name, tmp_path, refused):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": ["a", "b", "c", "", "e"]})
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
    else:
        opened = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
        with opened(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    refused(lambda: load_prompts(path), f"{name}, row 3")


def test_of_several_saved_splits_train_is_read(tmp_path, refused):
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "both")
    datasets.DatasetDict(a=split, b=split).save_to_disk(tmp_path / "neither")
    assert load_prompts(tmp_path / "both") == [{"prompt": "a"}]
    assert load_prompts(tmp_path / "both" / "test") == [{"prompt": "a"}]
    refused(lambda: load_prompts(tmp_path / "neither"), "several splits", "neither/b")


def test_damaged_files_are_named(at, refused):
    line = b'{"prompt": "a"}\n'
    cut = {f"cut.jsonl{end}": pack(line * 100)[:-9] for end, pack in COMPRESS.items()}
    not_compressed = {f"none.jsonl{end}": line for end in [*COMPRESS, ".zst"]}
    for name, content in {
        **cut,
        **not_compressed,
        "none.parquet": b"PAR1",
        "none.arrow": b"ARROW1\0\0",
        "cut.jsonl": '{"prompt": "é"}'.encode("utf-16")[:-1],
    }.items():
        refused(lambda name=name, content=content: load_prompts(at(name, content)), name)


def test_a_name_that_stands_twice_is_refused(at, refused):
    refused(lambda: load_prompts(at("a.csv", "prompt,prompt\na,b\n")), "'prompt' is there twice")
    twice = '{"prompt": "a", "prompt": "b"}'
    refused(lambda: load_prompts(at("a.jsonl", twice)), "line 1", "'prompt' stands twice")
    refused(lambda: load_prompts(at("a.json", f"[{twice}]")), "a.json", "'prompt' stands twice")


def test_what_stands_beside_the_rows_of_a_document_is_named(at):
    with pytest.warns(UserWarning, match="rows are under 'data'; not used: 'version'"):
        load_prompts(at("a.json", json.dumps({"version": 1, "data": [{"prompt": "a"}]})))


# --- values


@pytest.mark.parametrize(
    "label, value",
    [(True, True), (0, False), (1.0, True), ("true", True), ("False", False), (" 0", False)],
)
def test_labels_are_true_or_false_however_they_are_written(label, value, tmp_path):
    row = {"prompt": "a", "completion": "b", "label": label}
    assert load("KTO", [row])["label"] is value
    (tmp_path / "a.csv").write_text(f"prompt,completion,label\na,b,{label}\n")
    assert load("KTO", tmp_path / "a.csv")["label"] is value


@pytest.mark.parametrize("label", [2, -1, "good", None, "", [True], 0.5])
def test_another_label_is_refused(label, refused):
    row = {"prompt": "a", "completion": "b", "label": label}
    refused(lambda: load("KTO", [row]), "row 0: label is", "true or false is needed")


@pytest.mark.parametrize("margin, value", [(2, 2.0), ("0.5", 0.5), ("", None), (None, None)])
def test_a_margin_is_a_number_from_any_file(margin, value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert load("reward model", [row]).get("margin") == value


def test_roles_of_share_gpt(tokenizer, refused):
    turns = [
        {"from": "human", "value": "q"},
        {"from": "chatgpt", "value": "a"},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "b", "weight": None},
    ]
    made = load("SFT", [{"conversations": turns}], tokenizer=tokenizer)
    assert [turn["role"] for turn in made["prompt"]] == ["user", "assistant", "tool"]
    refused(
        lambda: load("SFT", [{"conversations": [{"from": "judge", "value": "q"}]}]),
        "turn 0: from is 'judge', and it is one of human",
    )
    call = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add(2, 3)"}]
    refused(lambda: load("SFT", [{"conversations": call}]), "turn 1", "'add(2, 3)' is no {")


def test_several_parts_of_a_content_stay_for_the_template():
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 3?"}]
    made = load("SFT", [{"messages": [{"role": "user", "content": parts}, said()]}])
    assert made["prompt"] == [{"role": "user", "content": parts}]


def test_histories_stand_before_the_instruction(tokenizer, refused):
    row = {"instruction": "q", "output": "a", "history": [["p", "b"]], "system": "s"}
    made = load("SFT", [row], tokenizer=tokenizer)
    assert [turn["content"] for turn in made["prompt"]] == ["s", "p", "b", "q"]
    as_text = row | {"history": json.dumps(row["history"])}
    assert load("SFT", [as_text], tokenizer=tokenizer) == made
    refused(lambda: load("SFT", [row | {"history": ["p"]}]), "history is ['p']")


def test_a_system_message_stands_once(tokenizer, refused):
    row = {"messages": [SYSTEM, user(), said()], "system": "You add."}
    made = load("SFT", [row], tokenizer=tokenizer)
    assert made["prompt"] == [SYSTEM, user()]
    refused(lambda: load("SFT", [row | {"system": "s"}]), "begins with another system message")


def test_a_text_that_only_looks_like_a_conversation_stays_a_text():
    for text in ("[1]", "[a link]", '{"role": 1', "[]", '[{"name": "x"}]'):
        assert load("RL", [{"prompt": text}])["prompt"] == text


# --- columns


def test_a_row_that_fits_two_shapes_is_refused_and_may_be_named(refused):
    row = {"problem": "2 + 3?", "solution": "5", "messages": [user(), said()]}
    for stage in ("RL", "SFT"):
        refused(lambda stage=stage: load(stage, [row]), "several ways", "'messages'", "'problem'")
    with pytest.warns(UnusedColumns, match="not used: problem, solution"):
        named = load("SFT", [row], columns={"messages": "messages"})
    assert sides(named) == ([user()], [said()])
    assert load("RL", [row], columns={"prompt": "problem"})["prompt"] == "2 + 3?"
    doubled = {"question": "q", "answer": "a", "response": "b"}
    refused(lambda: load("SFT", [doubled]), "'answer' or 'response'")
    with pytest.warns(UnusedColumns, match="not used: response"):
        assert load("SFT", [doubled], columns={"completion": "answer"})["completion"] == [said("a")]


@pytest.mark.parametrize(
    "stage, row, says",
    [
        ("SFT", {"question": "q", "answr": "a"}, "no 'answer': |{'completion': 'answr'}"),
        ("SFT", {"chosen": "a", "rejected": "b"}, "It would do for RL and DPO and reward model"),
        ("DPO", {"messages": [user(), said()]}, "no 'chosen'|It would do for RL and SFT and KTO"),
        ("DPO", {"chosen": "a", "rejcted": "b"}, "no 'rejected'|{'rejected': 'rejcted'}"),
        ("RL", {"promt": "a"}, "no 'prompt'|{'prompt': 'promt'}"),
        ("SFT", {"promt": "a"}, "there are 'promt'"),
        ("KTO", {"prompt": "a", "completion": "b"}, "no 'label': there are"),
        (
            "SFT",
            {"prompt": "a", "response": "b"},
            "no 'completion': there are 'prompt', 'response'",
        ),
    ],
)
def test_a_row_of_no_shape_is_refused_with_what_is_near(stage, row, says, refused):
    refused(lambda: load(stage, [row]), "row 0: ", *says.split("|"), error=BadRow)


def test_named_columns_of_every_kind(tokenizer):
    talk = [user(), said()]
    odd = {"film": "q", "good": "a", "bad": "b", "talk": talk}
    assert load("RL", [odd], columns={"messages": "talk"})["prompt"] == [user()]
    with pytest.warns(UnusedColumns):
        made = load("SFT", [odd], columns={"messages": "talk"})
        pair = load("DPO", [odd], columns={"prompt": "film", "chosen": "good", "rejected": "bad"})
    assert sides(made) == ([user()], [said()])
    assert sides(pair) == ("q", "a", "b")
    row = {"dialogue": [user("q")], "chosen": said("a"), "rejected": said("b")}
    pair = load("DPO", [row], columns={"messages": "dialogue"})
    assert sides(pair) == ([user("q")], [said("a")], [said("b")])


def test_tools_beside_a_text_are_refused(refused):
    tools = EXAMPLES["OpenAI, tool calls"]["tools"]
    for stage, row in (
        ("SFT", {"prompt": "a", "completion": "b"}),
        ("DPO", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ):
        refused(lambda stage=stage, row=row: load(stage, [row | {"tools": tools}]), "it has tools")
        load(stage, [row | {"tools": []}])
    refused(lambda: read_prompt({"prompt": "a", "tools": tools}, "row 0", {}, True), "it has tools")
    assert read_prompt({"prompt": "a", "tools": tools}, "", {}, True, ["tools"]).parts["tools"]


def test_a_column_that_the_prompt_was_read_from_stays_where_a_reward_asks_for_it():
    row = {"question": "q", "answer": "a"}
    assert read_prompt(row, "", {}, True).parts == {"prompt": [user("q")], "answer": "a"}
    asked = read_prompt(row, "", {}, True, ["question"]).parts
    assert asked == {"prompt": [user("q")], "question": "q", "answer": "a"}


# --- the table itself


def test_the_table_is_whole():
    assert {stage for shape in SHAPES for stage in shape.stages} == {*STAGES}
    for shape in SHAPES:
        parts = {*shape.opening, *shape.answers, *shape.may_have}
        assert parts <= PARTS.keys() and shape.examples and {*shape.fallback} <= {*shape.stages}
        for row in shape.examples.values():
            known = {name for part in parts for name in PARTS[part]}
            assert {*row} <= known | {"tools", "score_chosen", "score_rejected"}
    assert {part for parts in SETTABLE.values() for part in parts} <= PARTS.keys()


def test_help_and_page_are_made_from_the_table():
    page = shapes_table() + names_table()
    for shape in SHAPES:
        assert f"| {shape.name} " in page
        for stage in shape.stages:
            for title in shape.examples:
                assert title in shapes_help(stage)
    for names in PARTS.values():
        assert all(f"`{name}`" in page for name in names if len(names) > 1) or names[0] in page
    assert {read.__name__ for read in (read_answer, read_pair, read_prompt)}


def test_a_path_may_be_a_path_or_a_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    assert load_prompts(tmp_path / "a.jsonl") == load_prompts(str(Path(tmp_path, "a.jsonl")))


# --- data sets by name


def test_a_data_set_is_named_with_its_configuration_and_split(tmp_path, refused):
    pytest.importorskip("datasets")
    for name in ("main", "other"):
        for split in ("train", "test"):
            path = tmp_path / "set" / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f'{{"prompt": "{name} {split} {i}"}}\n' for i in range(3)))
    card = "---\nconfigs:\n"
    for name in ("main", "other"):
        card += f"- config_name: {name}\n  data_files:\n"
        card += "".join(f"  - split: {x}\n    path: {name}/{x}.jsonl\n" for x in ("train", "test"))
    (tmp_path / "set/README.md").write_text(card + "---\n")
    place = str(tmp_path / "set")

    def first(name):
        return load_prompts(load_from_hub(name))[0]["prompt"]

    assert first(f"{place}:other:test") == "other test 0"
    assert first(f"{place}:main:train[1:2]") == "main train 1"
    refused(lambda: load_from_hub(place), "main", f"{place}:CONFIGURATION:SPLIT")
    refused(lambda: load_from_hub(f"{place}:main:nosuch"), "nosuch", "CONFIGURATION:SPLIT")
    refused(lambda: load_from_hub("a:b:c:d"), "write NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT")


@pytest.mark.parametrize(
    "turn, says",
    [
        ({"human": "2 + 3?", "assistant": "5"}, "turn 0 has human, assistant, and neither role"),
        ({"role": "user", "content": [{"type": "image"}]}, "part 0 of its content has type, and"),
        (
            {"role": "user", "content": [{"type": "text", "value": "2 + 3?"}]},
            "part 0 of its content has type, value, and no text",
        ),
    ],
)
def test_a_turn_of_another_form_is_refused_with_the_names_of_its_fields(turn, says):
    with pytest.raises(BadRow, match=says):
        load("SFT", [{"messages": [turn, said()]}])


def test_of_two_columns_with_similar_names_the_nearest_is_shown():
    row = {"prompt": "q", "chosem": "b", "chosn": "a", "rejected": "c"}
    with pytest.raises(BadRow, match=r"columns=\{'chosen': 'chosn'\}"):
        fit_shape(row, "row 1", "DPO", {})
