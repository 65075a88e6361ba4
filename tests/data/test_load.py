"""Prompts and pairs from any source: options, skipped and repeated rows, streams; and the fuzzer on
all of it."""

import itertools
import math
import re
import sys
import types
import warnings
from functools import partial
from types import SimpleNamespace

import fuzz
import pytest
from templates import FAMILIES, tokenizer_of

from instruct_goose.cli import main as cli
from instruct_goose.data import files, load
from instruct_goose.data.files import COMPRESSED, BadRow
from instruct_goose.data.load import (
    BINARY,
    FORMATS,
    TASK_COLUMN,
    UnusedColumns,
    check_path,
    check_source,
    format_of,
    formats_table,
    has_template,
    load_answers,
    load_from_hub,
    load_pairs,
    load_prompts,
    load_saved,
    load_tasks,
    read_rows,
    stream_pairs,
    stream_prompts,
)
from instruct_goose.data.shapes import (
    PARTS,
    SHAPES,
    fit_shape,
    is_given,
    names_table,
    shapes_help,
    shapes_table,
)
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.supervised.dpo import pair_rows

PAIRS = [
    {"prompt": "the film is", "chosen": " good", "rejected": " dull"},
    {"prompt": "", "chosen": "é", "rejected": "x\ny"},
]


def test_every_kind_of_source(at, refused):
    import datasets

    assert load_pairs(PAIRS) == load_pairs(iter(PAIRS)) == PAIRS
    assert load_pairs([(r["chosen"], r["rejected"]) for r in PAIRS]) == [
        r | {"prompt": ""} for r in PAIRS
    ]
    ds = datasets.Dataset.from_list(PAIRS)
    assert load_pairs(ds) == load_pairs(ds.to_iterable_dataset()) == PAIRS
    assert list(itertools.islice(stream_pairs(ds, repeat=True), 5)) == [*PAIRS, *PAIRS, PAIRS[0]]
    refused(
        lambda: load_pairs(datasets.DatasetDict(train=ds)),
        "DatasetDict",
        "'train'",
        error=TypeError,
    )
    assert load_pairs(ds.to_pandas().set_index("prompt", drop=False)) == PAIRS


def test_prompts_in_all_their_forms(at, refused):
    assert load_prompts(["a", " b\n"]) == [{"prompt": "a"}, {"prompt": " b\n"}]
    assert load_prompts(
        at("a.jsonl", '{"prompt": "a", "text": "b"}\n"c"\n{"text": "d", "label": 1}\n')
    ) == [{"prompt": "a", "text": "b"}, {"prompt": "c"}, {"prompt": "d", "text": "d", "label": 1}]
    assert load_prompts(at("a.json", '["a", {"prompt": "b"}]')) == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]
    assert load_prompts(at("a.csv", "id,film\n1,a\n2,b\n"), columns={"prompt": "film"}) == [
        {"prompt": "a", "id": "1", "film": "a"},
        {"prompt": "b", "id": "2", "film": "b"},
    ]
    refused(
        lambda: load_prompts(at("b.jsonl", '{"text": "a"}'), columns={"prompt": "question"}),
        "b.jsonl, line 1",
        "'question'",
    )
    assert load_pairs(
        [{"good": "a", "bad": "b", "prompt": None}], columns={"chosen": "good", "rejected": "bad"}
    ) == [{"prompt": "", "chosen": "a", "rejected": "b"}]


def test_sources_that_are_no_source(at, tmp_path, refused):
    refused(
        lambda: load_prompts("someone/preferences"),
        "no file 'someone/preferences'",
        "load_dataset",
        error=FileNotFoundError,
    )
    refused(lambda: load_prompts("x" * 9999), "no file", error=FileNotFoundError)
    refused(lambda: load_prompts(tmp_path), "a folder that save_to_disk has not written")
    refused(lambda: load_prompts(at("a.txt", "a")), "a.txt", "suffix")
    for source in ({"prompt": ["a"]}, 3, None, b"a.jsonl", object()):
        refused(partial(load_prompts, source), "source is of type", error=TypeError)
    refused(lambda: load_prompts([]), "no rows")


def test_options_are_checked_before_anything_is_read(refused):
    def never():
        raise AssertionError("it was read")
        yield

    refused(
        lambda: stream_prompts(never(), columns={"question": "prompt"}), "columns names 'question'"
    )
    refused(lambda: stream_prompts(never(), max_length=9), "pass tokenizer=")
    refused(lambda: stream_prompts(never(), repeat=True), "can be read once")
    refused(lambda: stream_prompts("nowhere.csv"), "no file", error=FileNotFoundError)
    refused(lambda: load_prompts(["a"], repeat=True), "repeat", error=TypeError)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MESSAGE_PARTS = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the film was"},
        {"messages": [{"role": "user", "content": "is it good"}]},
        {"prompt": [{"role": "user", "content": "is it good"}], "tools": TOOLS},
        {"prompt": "is it 4", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [{"role": "user", "content": MESSAGE_PARTS}]},
    ],
    ids=["question", "messages", "tools", "template argument", "parts of text"],
)
def test_the_limit_counts_the_ids_that_the_trainer_reads(row, refused):
    tokenizer = tokenizer_of(FAMILIES["Qwen3"])
    prompts = load_prompts([row], tokenizer=tokenizer)
    tokens = Tokens(tokenizer, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    [ids] = encode_rows(prompts, tokens)
    kept = load_prompts([row], tokenizer=tokenizer, max_length=len(ids))
    assert kept == prompts
    refused(
        lambda: load_prompts([row], tokenizer=tokenizer, max_length=len(ids) - 1),
        f"the prompt: {len(ids)} tokens, and max_length is {len(ids) - 1}",
        error=BadRow,
    )


def test_the_limit_counts_both_answers_of_a_pair_with_their_ends(refused):
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    pair = {"prompt": "is it", "chosen": "the film was good", "rejected": "good"}
    [(chosen, _)] = pair_rows(load_pairs([pair], tokenizer=tokenizer), tokenizer)
    length = len(chosen[0]) + len(chosen[1])
    assert load_pairs([pair], tokenizer=tokenizer, max_length=length)
    swapped = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
    for row, name in ((pair, "chosen"), (swapped, "rejected")):
        refused(
            lambda row=row: load_pairs([row], tokenizer=tokenizer, max_length=length - 1),
            f"prompt and {name}: {length} tokens",
            error=BadRow,
        )


def test_what_the_template_refuses_is_a_bad_row(refused):
    tokenizer = tokenizer_of(FAMILIES["ChatML"])
    image = [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]
    refused(
        lambda: load_prompts([{"prompt": image}], tokenizer=tokenizer, max_length=99),
        "row 0",
        error=BadRow,
    )


def test_skipped_rows_are_counted_and_reported(at, refused):
    at("a.jsonl", b'"a"\n{"prompt": 1}\n\xff\n{"prompt": }\n"b"\n{"prompt": 2}\n"a"\n')
    report = {}
    message = (
        r"a.jsonl: 4 of 7 rows skipped \(1 × encoding, 1 × json, 2 × type\). "
        "The first: a.jsonl, line 2: prompt"
    )
    with pytest.warns(UserWarning, match=message):
        prompts = load_prompts("a.jsonl", on_error="skip", report=report)
    assert [row["prompt"] for row in prompts] == ["a", "b", "a"]
    assert {k: report[k] for k in ("rows", "kept", "duplicates", "skipped")} == {
        "rows": 7,
        "kept": 3,
        "duplicates": 0,
        "skipped": {"type": 2, "encoding": 1, "json": 1},
    }
    assert [re.search(r"line (\d)", x)[1] for x in report["examples"]] == ["2", "3", "4", "6"]
    refused(
        lambda: load_prompts([1, 2], on_error="skip"),
        "none of its 2 rows can be used (2 × shape)",
        "row 0",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_prompts(["a"], on_error="skip") == [{"prompt": "a"}]


def test_copies_are_kept_unless_asked():
    # it joins to the same texts as the first pair, and is another pair all the same
    parted_elsewhere = {"prompt": "the film", "chosen": " is good", "rejected": " is dull"}
    rows = [PAIRS[0], PAIRS[1], PAIRS[0], parted_elsewhere]
    report = {}
    assert load_pairs(rows) == rows
    assert load_pairs(rows, unique=True, report=report) == [PAIRS[0], PAIRS[1], parted_elsewhere]
    assert report["duplicates"] == 1


def test_a_stream_reads_no_further_than_it_is_asked_and_repeats(at, refused):
    numbers = itertools.count()
    first = next(stream_prompts(f"prompt {i}" for i in numbers))
    assert first == {"prompt": "prompt 0"} and next(numbers) == 1
    at("a.jsonl", '"a"\n3\n"b"\n"a"\n')
    report = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stream = stream_prompts("a.jsonl", repeat=True, on_error="skip", unique=True, report=report)
        prompts = [row["prompt"] for row in itertools.islice(stream, 7)]
    assert prompts == ["a", "b"] * 3 + ["a"]
    assert len(said) == 1 and report["rows"] == 4 and report["duplicates"] == 1  # of the first pass
    refused(lambda: next(stream_prompts(at("b.jsonl"), repeat=True)), "no rows")


def test_no_class_of_settings_is_left_out():
    fuzzed = {kind.__name__ for kind in fuzz.KINDS}
    assert len(fuzzed) == len(fuzz.KINDS) >= 18
    assert {c.load()[0].__name__ for c in cli.COMMANDS.values()} - {"ExercisesConfig"} <= fuzzed


def test_broken_input_ends_as_documented():
    found = fuzz.fuzz(2000, seed=1)
    assert not found["failures"], found["failures"][0]["error"] + found["failures"][0]["trace"]
    assert {
        *(kind.__name__ for kind in fuzz.KINDS),
        "RLHFConfig.preset",
        "load_pairs, file",
        "load_prompts, rows",
    } <= set(found["outcomes"])
    seen = set().union(*found["outcomes"].values())
    assert (
        set(files.REASONS) - {"length", "template", "tie", "vocabulary"} <= seen
        and {"valid", "ValueError", "TypeError"} <= seen
    )


SHAPE = {shape.name: shape for shape in SHAPES}


def user(text="q"):
    return {"role": "user", "content": text}


def said(text="a"):
    return {"role": "assistant", "content": text}


# --- sources


@pytest.mark.parametrize(
    "path, suffix",
    [
        *((f"a{suffix}", suffix) for suffix in FORMATS),
        ("a.JSONL", ".jsonl"),
        ("a.b.csv", ".csv"),
        ("a.jsonl.txt", ""),
        ("a.txt", ""),
        ("a", ""),
        *((f"a.jsonl{packed}", ".jsonl") for packed in COMPRESSED),
        *((f"a.csv{packed.upper()}", ".csv") for packed in COMPRESSED),
        *((f"a{suffix}.gz", "") for suffix in BINARY),  # are compressed inside
        ("a.txt.gz", ""),
        ("a.gz", ""),
        (".gz", ""),
    ],
)
def test_a_files_format_is_that_of_its_suffix_behind_a_compression(path, suffix):
    assert format_of(path) == suffix


def test_the_table_of_formats_says_what_must_be_installed():
    lines = formats_table().splitlines()
    for suffix in FORMATS:
        [line] = [line for line in lines if line.startswith(f"| `{suffix}` ")]
        assert line.rstrip("| ").endswith("pyarrow" if suffix in BINARY else "–")
    assert any("`.gz`" in line and "`.zst`" in line for line in lines)
    assert "a folder" in lines[-1] and lines[0].split() == "| file | holds | needs |".split()


@pytest.mark.parametrize("source", [b"a.jsonl", bytearray(b"a"), {"prompt": ["a"]}, 3, None])
def test_what_holds_no_rows_is_refused(source):
    with pytest.raises(TypeError, match="source is of type"):
        check_source(source)


class Numbered:
    "Rows by their number alone, as a sequence of Python's early days."

    def __getitem__(self, i):
        return ["a", "b"][i]


def test_what_has_rows_is_read_and_again_unless_it_is_a_generator():
    for source in ([], (), Numbered(), range(2)):
        check_source(source, repeat=True)
    check_source(iter([]))
    with pytest.raises(ValueError, match="can be read once"):
        check_source(iter([]), repeat=True)
    assert load_prompts(Numbered()) == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("name", ["dataset_dict.json", "dataset_info.json", "state.json"])
def test_a_folder_is_one_that_save_to_disk_has_written(name, tmp_path):
    with pytest.raises(ValueError, match="a folder that save_to_disk has not written"):
        check_path(str(tmp_path))
    (tmp_path / name).write_text("{}")
    check_path(str(tmp_path))


@pytest.mark.parametrize(
    "name, is_known", [("a.jsonl", True), ("a.csv.gz", True), ("a.txt", False)]
)
def test_a_file_is_of_a_known_format(name, is_known, tmp_path):
    path = tmp_path / name
    with pytest.raises(FileNotFoundError):
        check_path(str(path))
    path.write_text("")
    if is_known:
        check_path(str(path))
    else:
        with pytest.raises(ValueError, match=r"the suffix tells the format, and it is none of"):
            check_path(str(path))


class Table(list):
    "Rows that say how they are read."


def pandas_like(rows):
    table = Table()
    table.iterrows = None
    table.to_dict = lambda how: rows if how == "records" else None
    return table


def polars_like(rows):
    table = Table()
    table.iter_rows = lambda named: iter(rows if named else [tuple(row.values()) for row in rows])
    return table


def arrow_like(rows):
    half = [SimpleNamespace(to_pylist=lambda part=part: part) for part in (rows[:1], rows[1:])]
    table = Table()
    table.to_batches = lambda: half
    return table


def data_set(rows):
    table = Table(rows)
    table.features = {}
    return table


def not_available(kind):
    return type(kind, (), {})()


ARRAY = SimpleNamespace(tolist=lambda: [1, 2])


@pytest.mark.parametrize(
    "value, made",
    [
        (math.nan, None),
        (1.5, 1.5),
        (not_available("NAType"), None),
        (not_available("NaTType"), None),
        (SimpleNamespace(tolist=lambda: 3), 3),
        (SimpleNamespace(tolist=lambda: [ARRAY]), [[1, 2]]),
        ((1, ARRAY), [1, [1, 2]]),
        ({"a": None, "b": ARRAY}, {"b": [1, 2]}),
        ([{"a": None}], [{}]),
        ("a", "a"),
    ],
)
def test_a_value_of_pandas_is_one_of_python(value, made):
    [(where, row)] = read_rows(pandas_like([{0: value}]))
    assert (where, row) == ("row 0", {"0": made})


@pytest.mark.parametrize(
    "table, kept",
    [
        (polars_like, {"a": None, "b": 1}),
        (arrow_like, {"b": 1}),
        (data_set, {"b": 1}),
        (list, {"a": None, "b": 1}),
    ],
)
def test_rows_of_every_kind_of_table_have_their_numbers(table, kept):
    rows = [{"x": [{"a": None, "b": 1}]}, {"x": 2}]
    assert [*read_rows(table(rows))] == [("row 0", {"x": [kept]}), ("row 1", {"x": 2})]


def test_rows_of_a_data_set_that_are_no_objects_stay():
    assert [*read_rows(data_set(["a"]))] == [("row 0", "a")]


# --- data sets by name


@pytest.fixture
def datasets(monkeypatch):
    "A stand-in of the library, which notes what it is asked for."
    library: types.ModuleType = types.ModuleType("datasets")
    library.asked = []
    library.saved = None
    library.load_dataset = lambda *names, split: library.asked.append((*names, split))
    library.load_from_disk = lambda path: library.saved
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


@pytest.mark.parametrize(
    "name, asked",
    [
        ("owner/films", ("owner/films", "train")),
        ("owner/films:", ("owner/films", "train")),
        ("owner/films:test", ("owner/films", "test")),
        ("owner/films:main:test", ("owner/films", "main", "test")),
        ("owner/films:main:", ("owner/films", "main", "train")),
        ("owner/films:train[:100]", ("owner/films", "train[:100]")),
        ("owner/films:main:test[10:20]", ("owner/films", "main", "test[10:20]")),
    ],
)
def test_a_data_set_has_a_name_a_configuration_and_a_split(name, asked, datasets):
    load_from_hub(name)
    assert datasets.asked == [asked]


def test_a_data_set_with_three_names_behind_it_is_refused(datasets):
    with pytest.raises(ValueError, match="a:b:c:d: write NAME, NAME:SPLIT"):
        load_from_hub("a:b:c:d")
    assert not datasets.asked


@pytest.mark.parametrize(
    "saved, loaded",
    [
        ([1], [1]),
        ({"train": [1], "test": [2]}, [1]),
        ({"test": [2]}, [2]),
        ({"train": [1]}, [1]),
    ],
)
def test_of_saved_splits_train_or_the_only_one_is_loaded(saved, loaded, datasets):
    datasets.saved = saved
    assert load_saved("place") == loaded


def test_of_several_saved_splits_one_is_to_be_named(datasets):
    datasets.saved = {"a": [1], "b": [2]}
    with pytest.raises(ValueError, match=re.escape("name one, place/a or place/b")):
        load_saved("place")


@pytest.fixture
def reasoning_gym(monkeypatch):
    library = types.ModuleType("reasoning_gym")

    def create_dataset(name, size, seed):
        if name != "sums":
            raise ValueError(f"no task {name}")
        return [{"question": f"{i} + {seed}", "answer": str(i), "more": i} for i in range(size)]

    library.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)


def test_tasks_are_rows_with_their_answer_and_what_their_checker_reads(reasoning_gym):
    first = {"prompt": "0 + 0", "answer": "0"}
    task = '{"question": "0 + 0", "answer": "0", "more": 0}'
    assert load_tasks("sums", 1) == [first | {TASK_COLUMN: task}]
    assert load_from_hub("reasoning_gym:sums:1") == load_tasks("sums", "1")
    assert len(load_from_hub("reasoning_gym:sums")) == 500


@pytest.mark.parametrize(
    "name", ["sums:0", "sums:-1", "sums:many", "sums:1.5", "sums:", "sums:1:2"]
)
def test_the_size_of_tasks_is_a_number(name, reasoning_gym):
    with pytest.raises(ValueError, match="write reasoning_gym:NAME:SIZE"):
        load_from_hub(f"reasoning_gym:{name}")


def test_tasks_of_no_known_name_are_refused(reasoning_gym):
    with pytest.raises(ValueError, match="reasoning_gym:other: no task other"):
        load_from_hub("reasoning_gym:other")


def test_a_package_that_is_missing_is_named_with_the_source(monkeypatch):
    for package, source in (("datasets", "owner/films"), ("reasoning_gym", "reasoning_gym:sums")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"^{source}: .*pip install"):
            load_from_hub(source)


# --- lengths


@pytest.fixture(scope="module")
def tokenizer():
    "A token per word, and a chat template that writes three tokens around each turn."
    return tiny_smollm(["q", "a", "b"])[1]


@pytest.mark.parametrize(
    "read, row, n, name",
    [
        (load_prompts, {"prompt": "q q q"}, 3, "the prompt"),
        (load_prompts, {"prompt": [user()]}, 6, "the prompt"),
        (load_answers, {"prompt": "q q", "completion": " a"}, 4, "prompt and completion"),
        (load_answers, {"messages": [user(), said()]}, 8, "prompt and completion"),
        (load_pairs, {"prompt": "q", "chosen": " a a", "rejected": " b"}, 4, "prompt and chosen"),
        (load_pairs, {"prompt": "q", "chosen": " a", "rejected": " b b"}, 4, "prompt and rejected"),
    ],
)
def test_a_row_may_be_as_long_as_is_allowed_with_its_end_and_no_longer(
    read, row, n, name, tokenizer
):
    assert len(read([row], tokenizer=tokenizer, max_length=n)) == 1
    with pytest.raises(
        BadRow, match=f"row 0: {name}: {n} tokens, and max_length is {n - 1}: "
    ) as e:
        read([row], tokenizer=tokenizer, max_length=n - 1)
    assert e.value.reason == "length"
    assert len(read([row], tokenizer=tokenizer)) == 1  # nobody counts


def test_a_conversation_is_counted_through_its_template(tokenizer):
    bare = tiny_smollm(["q"])[1]
    for template, says in (
        (None, "row 0: the prompt .*no chat template"),
        ("{{ raise_exception('no') }}", "row 0: the prompt: the chat template refuses it: .*: no"),
    ):
        bare.chat_template = template
        with pytest.raises(BadRow, match=says) as e:
            load_prompts([[user()]], tokenizer=bare, max_length=9)
        assert e.value.reason == "template"
    bare.chat_template = None
    assert [has_template(t) for t in (None, tokenizer, bare)] == [True, True, False]


# --- reports


def test_a_report_counts_rows_and_shows_the_first_five_bad_ones():
    report = {}
    rows = ["a", *range(7), "a", {"prompt": "b", "x": 1}]
    with pytest.warns(UserWarning, match=r"the source: 7 of 10 rows skipped \(7 × shape\)"):
        load_prompts(rows, on_error="skip", unique=True, report=report)
    examples = report.pop("examples")
    assert [re.match(r"row (\d)", text)[1] for text in examples] == list("12345")
    assert report == {
        "rows": 10,
        "kept": 2,
        "duplicates": 1,
        "skipped": {"shape": 7},
        "unused": [],
    }


def test_columns_that_are_not_used_are_named_once_and_in_order():
    report = {}
    rows = [
        {"prompt": "q", "completion": "a", "z": 1, "b": 1},
        {"prompt": "q", "completion": "a", "z": 1, "a": 1},
    ]
    with pytest.warns(UnusedColumns, match="^not used: a, b, z$"):
        load_answers(rows, report=report)
    assert report["unused"] == ["b", "z", "a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_answers([{"prompt": "q", "completion": "a"}])


def test_a_source_without_a_usable_row_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"a.jsonl: no rows"):
        load_prompts(tmp_path / "a.jsonl")
    says = r"the source: none of its 2 rows can be used \(2 × shape\). The first: row 0: of type"
    with pytest.raises(ValueError, match=says):
        load_prompts([1, 2], on_error="skip")
    with pytest.raises(BadRow):
        load_prompts(["a", 1])


@pytest.mark.parametrize(
    "stream, name, is_known",
    [
        (load.stream_prompts, "prompt", True),
        (load.stream_prompts, "messages", True),
        (load.stream_prompts, "answer", True),
        (load.stream_prompts, "chosen", False),
        (load.stream_answers, "completion", True),
        (load.stream_answers, "answer", False),
        (load.stream_pairs, "rejected", True),
        (load.stream_pairs, "completion", False),
    ],
)
def test_columns_have_the_names_that_the_stage_knows(stream, name, is_known):
    if is_known:
        stream([], columns={name: "x"})
    else:
        with pytest.raises(ValueError, match=f"columns names '{name}'"):
            stream([], columns={name: "x"})


def test_a_stream_without_an_end_goes_on():
    stream = stream_prompts(["a", "b"], repeat=True)
    assert [next(stream)["prompt"] for _ in range(5)] == ["a", "b", "a", "b", "a"]


# --- shapes


@pytest.mark.parametrize(
    "value, given",
    [
        (None, False),
        ("", False),
        (math.nan, False),
        (" ", True),
        (0, True),
        (0.0, True),
        (False, True),
        (math.inf, True),
        ([], True),
        ({}, True),
    ],
)
def test_null_nan_and_the_empty_text_are_nothing(value, given):
    assert is_given(value) == given


@pytest.mark.parametrize(
    "stage, row, named, shape, columns",
    [
        ("RL", {"prompt": 1}, {}, "prompt", {"prompt": "prompt"}),
        ("RL", {"prompt": 1, "messages": 1, "question": 1}, {}, "prompt", {"prompt": "prompt"}),
        ("RL", {"question": 1}, {}, "question", {"question": "question"}),  # without an answer
        ("RL", {"problem": 1}, {}, "question", {"question": "problem"}),
        ("RL", {"text": 1}, {}, "text", {"text": "text"}),
        ("RL", {"text": 1, "prompt": 1}, {}, "prompt", {"prompt": "prompt"}),
        (
            "RL",
            {"chosen": 1, "rejected": 1},
            {},
            "pair",
            {"chosen": "chosen", "rejected": "rejected"},
        ),
        ("SFT", {"text": 1}, {}, "text", {"text": "text"}),
        ("SFT", {"completion": 1}, {}, "prompt and completion", {"completion": "completion"}),
        # what is empty is not there, unless nothing else is
        (
            "SFT",
            {"messages": None, "question": 1, "answer": 1},
            {},
            "question",
            {"question": "question", "answer": "answer"},
        ),
        ("SFT", {"messages": None, "text": ""}, {}, "messages", {"messages": "messages"}),
        # an input beside a question is another column, a history is not
        (
            "SFT",
            {"question": 1, "answer": 1, "input": 1, "history": 1},
            {},
            "question",
            {"question": "question", "answer": "answer", "history": "history"},
        ),
        (
            "SFT",
            {"instruction": 1, "output": 1, "context": 1, "history": 1},
            {},
            "instruction",
            {
                "instruction": "instruction",
                "output": "output",
                "input": "context",
                "history": "history",
            },
        ),
        # beside a prompt other openings are other columns
        (
            "DPO",
            {"prompt": 1, "question": 1, "chosen": 1, "rejected": 1, "margin": 1},
            {},
            "pair",
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "margin"},
        ),
        (
            "DPO",
            {"good": 1, "rejected": 1, "chosen": 1},
            {"chosen": "good"},
            "pair",
            {"chosen": "good", "rejected": "rejected"},
        ),
        ("RL", {"prompt": 1, "key": 1}, {"answer": "key"}, "prompt", {"prompt": "prompt"}),
        (
            "SFT",
            {"talk": 1, "prompt": 1, "completion": 1},
            {"messages": "talk"},
            "messages",
            {"messages": "talk"},
        ),
    ],
)
def test_a_row_has_the_shape_of_its_columns(stage, row, named, shape, columns):
    fit = fit_shape(row, "row 0", stage, named)
    assert fit.shape.name == shape and fit.columns == columns


def test_the_value_of_a_part_is_that_of_its_column_or_none():
    fit = fit_shape({"problem": "q"}, "row 0", "RL", {})
    assert fit.value({"problem": "q"}, "question") == "q"
    assert (
        fit.value({"problem": "q", "system": "s"}, "system") is None
    )  # not there when it was fitted


@pytest.mark.parametrize(
    "stage, row, either, mend",
    [
        ("SFT", {"question": 1, "answer": 1, "output": 1}, "'answer' or 'output'", "'prompt'"),
        (
            "SFT",
            {"messages": 1, "text": 1, "question": 1, "answer": 1},
            "'messages' or 'question'",
            "'messages'",
        ),
        (
            "DPO",
            {"question": 1, "instruction": 1, "chosen": 1, "rejected": 1},
            "'question' or 'instruction'",
            "'prompt'",
        ),
        (
            "SFT",
            {"conversations": 1, "conversation": 1},
            "'conversations' or 'conversation'",
            "'prompt'",
        ),
    ],
)
def test_a_row_that_can_be_read_in_two_ways_is_refused(stage, row, either, mend):
    with pytest.raises(BadRow) as e:
        fit_shape(row, "row 0", stage, {})
    assert f"from {either}: there are" in str(e.value) and f"columns={{{mend}: " in str(e.value)


@pytest.mark.parametrize(
    "stage, row, named, says",
    [
        ("RL", {}, {}, ["no 'prompt': there are no columns"]),
        ("RL", {f"c{i:02}": 0 for i in range(13)}, {}, ["'c10', 'c11'. "]),
        (
            "SFT",
            {"question": 1, "reply": 1},
            {},
            ["no 'answer'", "also be called response, solution"],
        ),
        ("SFT", {"prompt": 1}, {}, ["no 'completion': there are 'prompt'", "It would do for RL."]),
        ("RL", {"completion": 1}, {}, ["no 'prompt'", "It would do for SFT and KTO."]),
        ("RL", {"promt": 1}, {}, ["columns={'prompt': 'promt'}"]),
        ("RL", {"x": 1}, {}, ["columns={'prompt': '…'}"]),
        ("DPO", {"chosen": 1, "rejectd": 1}, {}, ["no 'rejected'", "{'rejected': 'rejectd'}"]),
        ("DPO", {"good": 1}, {"chosen": "good"}, ["no 'rejected'"]),
        ("RL", {"x": 1}, {"prompt": "film"}, ["no 'film': there are 'x'"]),
    ],
)
def test_a_row_of_no_shape_says_what_there_is_and_what_is_near(stage, row, named, says):
    with pytest.raises(BadRow) as e:
        fit_shape(row, "row 0", stage, named)
    assert e.value.reason == "column" and all(words in str(e.value) for words in says), str(e.value)


def test_a_shapes_answers_are_not_needed_in_rl_unless_they_hold_the_prompt():
    assert SHAPE["question"].needs("SFT") == ("answer",)
    assert SHAPE["question"].needs("RL") == ()
    assert SHAPE["pair"].needs("RL") == ("chosen", "rejected")


@pytest.mark.parametrize(
    "name, columns",
    [
        ("prompt", "`prompt`, (`system`)"),
        ("prompt and completion", "(`prompt`), `completion`, (`system`)"),
        ("question", "`question`, `answer`, (`system`), (`history`)"),
        (
            "pair",
            "(`prompt` or `question` or `instruction` or `conversations`), `chosen`, `rejected`, "
            "(`input`), (`system`), (`history`), (`margin`)",
        ),
    ],
)
def test_the_tables_line_of_a_shape(name, columns):
    assert SHAPE[name].columns_text() == columns
    cells = [[cell.strip() for cell in line.split("|")] for line in shapes_table().splitlines()]
    [line] = [line for line in cells if line[1] == name]
    assert line[2] == columns
    stages = [
        stage
        for stage in ("RL", "SFT", "KTO", "DPO", "reward model")
        if stage in SHAPE[name].stages
    ]
    assert line[3] == ", ".join(stages)


def test_the_table_of_names_has_the_columns_that_have_several():
    lines = names_table().splitlines()[2:]
    several = [part for part, names in PARTS.items() if len(names) > 1]
    assert [line.split("`")[1] for line in lines] == several
    [question] = [line for line in lines if line.startswith("| `question` ")]
    assert "| `query`, `problem`" in question


@pytest.mark.parametrize(
    "stage, forms",
    [
        ("RL", ["prompt (", "question (", "prompt, chosen, rejected (", "text (text)"]),
        ("SFT", ["prompt, completion (", "question, answer (", "messages ("]),
        ("KTO", ["prompt, completion, label (", "messages, label ("]),
        ("DPO", ["prompt, chosen, rejected (TRL, pair; "]),
        ("reward model", ["prompt, chosen, rejected, margin ("]),
    ],
)
def test_the_help_of_a_stage_names_its_shapes(stage, forms):
    words = shapes_help(stage)
    assert all(f" {form}" in words for form in forms), words
    assert ("margin" in words) == (stage == "reward model")
    assert ("label" in words) == (stage == "KTO")
