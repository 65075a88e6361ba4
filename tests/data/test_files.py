"""Rows of JSON, JSON lines and CSV files: every format against what was written, and what is
refused, with its place."""

import codecs
import csv
import io
import json
import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.data import files
from instruct_goose.data.files import BadRow, delimiter_of, encoding_of
from instruct_goose.data.load import load_pairs, load_prompts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FULL = TEXT.filter(str.strip)
ANY_PAIRS = st.lists(
    st.fixed_dictionaries({"prompt": TEXT, "chosen": FULL, "rejected": FULL})
    .filter(lambda p: p["chosen"] != p["rejected"])
    .filter(lambda p: not re.match(r"\s*(\[|Human:)", p["prompt"] + p["chosen"])),
    min_size=1,
    max_size=5,
)


def lines(rows, end="\n"):
    return "".join(json.dumps(row) + end for row in rows)


def as_csv(rows, delimiter=",", end="\n"):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(
        out, rows[0], delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@settings(max_examples=25, deadline=None)
@given(ANY_PAIRS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_every_format_gives_the_rows_that_were_written(tmp_path_factory, rows, end, bom):
    folder = tmp_path_factory.mktemp("formats")
    for name, content in {
        "a.jsonl": lines(rows, end),
        "a.NDJSON": lines(rows, end) + end + " " + end,
        "b.json": lines(rows, end),
        "c.json": json.dumps(rows, ensure_ascii=False),
        "d.json": json.dumps(rows, indent=2),
        "a.csv": as_csv(rows, ",", end),
        "a.tsv": as_csv(rows, "\t", end),
    }.items():
        (folder / name).write_bytes(("\ufeff" * bom + content).encode())
        assert load_pairs(folder / name) == rows, name


@pytest.mark.parametrize(
    "name, content, reason, words",
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n{"prompt": "b" "c"}\n',
            "json",
            "a.jsonl, line 3|column 16",
        ),
        ("a.jsonl", '{\n "prompt": "a"\n}', "json", "a.jsonl, line 1|jq -c ."),
        ("a.jsonl", "[" * 100_000, "json", "line 1"),
        ("a.jsonl", b'"a"\r\n"caf\xff"\r\n', "encoding", "a.jsonl, line 2|caf"),
        (
            "a.jsonl",
            r'"a \ud83d\ude00"' + "\n" + r'"wink \ude09"',
            "encoding",
            r"a.jsonl, line 2|half a surrogate pair, \ude09, after 'wink '",
        ),
        ("a.json", '["a",\n\n 3]', "shape", "a.json, row 1|int"),
        (
            "a.csv",
            'prompt,id\na,1\n"b\nc",2\nd\n',
            "shape",
            "a.csv, line 5: 1 fields under 2 columns",
        ),
        ("a.csv", 'prompt,id\n"a" b,1\n', "csv", "a.csv, line 2"),
        ("a.csv", "prompt#id\na#1\n", "column", "a.csv, line 2|'prompt#id'"),
        ("a.csv", b"prompt\r\n\xe6\xbc\xa2\r\n\xe6\xbc\r\n", "encoding", "a.csv, line 3"),
        ("a.tsv", 'prompt\tid\n"a\t1\n\n', "csv", "a.tsv, line 2 to 3"),
    ],
)
def test_a_bad_row_is_named(at, name, content, reason, words, refused):
    for bom in ("", "\ufeff"):
        blob = bom.encode() + (content if isinstance(content, bytes) else content.encode())
        e = refused(
            lambda name=name, blob=blob: load_prompts(at(name, blob)),
            *words.split("|"),
            error=BadRow,
        )
        assert e.reason == reason in files.REASONS


def test_files_that_hold_no_rows(at, refused):
    for name in ("a.jsonl", "a.json", "a.csv"):
        refused(partial(load_prompts, at(name)), name)
    refused(lambda: load_prompts(at("a.csv", "prompt,id\n")), "a.csv: no rows")
    refused(lambda: load_prompts(at("a.json", '["a",\n"b" "c"]')), "a.json", "line 2")
    for cut in (
        "[",
        '["a", "b',
        '["a"] 1',
        "3",
        "[" * 100_000,
        b'["caf\xff"]',
        '["a"]'.encode("utf-16")[:-1],
    ):
        refused(partial(load_prompts, at("a.json", cut)), "a.json")


def test_a_bad_row_of_a_csv_file_costs_no_row_after_it(at):
    at("a.csv", 'prompt,id\na,1\nb,2\nc\n"d" e,5\n"f\ng",6\nh,7\n')
    report = {}
    with pytest.warns(UserWarning):
        prompts = load_prompts("a.csv", on_error="skip", report=report)
    assert [row["prompt"] for row in prompts] == ["a", "b", "f\ng", "h"]
    assert report["skipped"] == {"csv": 1, "shape": 1}


@pytest.mark.parametrize(
    "start, encoding",
    [
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE + "a".encode("utf-16-le"), "utf-16"),
        (codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "utf-16"),
        ("ab".encode("utf-16-le"), "utf-16-le"),
        ("ab".encode("utf-16-be"), "utf-16-be"),
        (codecs.BOM_UTF8 + b"a", "utf-8-sig"),
        (b"abcd", "utf-8-sig"),
        (b"a\0", "utf-8-sig"),  # too short to say
        (b"a\0\0\0", "utf-8-sig"),
        (b"\0\0\0a", "utf-8-sig"),
        (b"\0\0\0\0", "utf-8-sig"),
        (b"", "utf-8-sig"),
    ],
)
def test_an_encoding_is_known_by_its_mark_or_by_its_zeros(start, encoding):
    assert encoding_of(start) == encoding


@pytest.mark.parametrize(
    "line, delimiter",
    [
        ("a,b;c,d", ","),
        ("a;b;c,d", ";"),
        ("a\tb", "\t"),
        ("a|b", "|"),
        ('"a,b,c";"d,e"', ";"),
        ("prompt", ","),
    ],
)
def test_the_commonest_sign_outside_of_quotes_divides_the_fields(line, delimiter):
    assert delimiter_of(line) == delimiter
