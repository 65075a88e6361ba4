"""Prompts and pairs from any source: options, skipped and repeated rows, streams; and the fuzzer on
all of it."""

import itertools
import re
import warnings
from functools import partial

import fuzz
import pytest
from templates import FAMILIES, tokenizer_of

from instruct_goose.cli import main as cli
from instruct_goose.data import files
from instruct_goose.data.files import BadRow
from instruct_goose.data.load import load_pairs, load_prompts, stream_pairs, stream_prompts
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
PARTS = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the film was"},
        {"messages": [{"role": "user", "content": "is it good"}]},
        {"prompt": [{"role": "user", "content": "is it good"}], "tools": TOOLS},
        {"prompt": "is it 4", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [{"role": "user", "content": PARTS}]},
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
