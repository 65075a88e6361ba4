"Rows of JSON, JSON lines, CSV and Parquet files: every format against what was written, and what is refused, with its place."
import csv
import io
import json
import re
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.data import files
from instruct_goose.data.files import BadRow
from instruct_goose.data.load import load_pairs, load_prompts

PAIRS = [{"prompt": "the film is", "chosen": " good", "rejected": " dull"}, {"prompt": "", "chosen": "é\u2028\n\"x\", y", "rejected": "\t漢字\r\n"}]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FULL = TEXT.filter(str.strip)
ANY_PAIRS = st.lists(st.fixed_dictionaries({"prompt": TEXT, "chosen": FULL, "rejected": FULL}).filter(lambda p: p["chosen"] != p["rejected"])
                     .filter(lambda p: not re.match(r"\s*(\[|Human:)", p["prompt"] + p["chosen"])), min_size=1, max_size=5)


def lines(rows, end="\n"): return "".join(json.dumps(row) + end for row in rows)


def as_csv(rows, delimiter=",", end="\n"):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, rows[0], delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def parquet(rows, path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    return path


@settings(max_examples=25, deadline=None)
@given(ANY_PAIRS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_every_format_gives_the_rows_that_were_written(tmp_path_factory, rows, end, bom):
    folder = tmp_path_factory.mktemp("formats")
    for name, content in {
        "a.jsonl": lines(rows, end), "a.NDJSON": lines(rows, end) + end + " " + end, "b.json": lines(rows, end),
        "c.json": json.dumps(rows, ensure_ascii=False), "d.json": json.dumps(rows, indent=2), "a.csv": as_csv(rows, ",", end), "a.tsv": as_csv(rows, "\t", end),
    }.items():
        (folder / name).write_bytes(("\ufeff" * bom + content).encode())
        assert load_pairs(folder / name) == rows, name
    assert load_pairs(parquet(rows, folder / "a.parquet")) == rows


def test_parquet_without_pyarrow(at, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(lambda: load_pairs(at("a.parquet")), "pip install -e '.[data]'", error=ImportError)


@pytest.mark.parametrize("name, content, reason, words", [
    ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b" "c"}\n', "json", "a.jsonl, line 3|column 16"),
    ("a.jsonl", '{\n "prompt": "a"\n}', "json", "a.jsonl, line 1|jq -c ."),
    ("a.jsonl", "[" * 100_000, "json", "line 1"),
    ("a.jsonl", b'"a"\r\n"caf\xff"\r\n', "encoding", "a.jsonl, line 2|caf"),
    ("a.json", '["a",\n\n 3]', "shape", "a.json, row 1|int"),
    ("a.csv", 'prompt,id\na,1\n"b\nc",2\nd\n', "shape", "a.csv, line 5: 1 fields under 2 columns"),
    ("a.csv", 'prompt,id\n"a" b,1\n', "csv", "a.csv, line 2"),
    ("a.csv", "prompt;id\na;1\n", "column", "a.csv, line 2|'prompt;id'"),
    ("a.csv", b"prompt\r\n\xe6\xbc\xa2\r\n\xe6\xbc\r\n", "encoding", "a.csv, line 3"),
    ("a.tsv", 'prompt\tid\n"a\t1\n\n', "csv", "a.tsv, line 2 to 3"),
])
def test_a_bad_row_is_named(at, name, content, reason, words, refused):
    for bom in ("", "\ufeff"):
        blob = bom.encode() + (content if isinstance(content, bytes) else content.encode())
        e = refused(lambda name=name, blob=blob: load_prompts(at(name, blob)), *words.split("|"), error=BadRow)
        assert e.reason == reason in files.REASONS


def test_files_that_hold_no_rows(at, refused):
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"): refused(partial(load_prompts, at(name)), name)
    refused(lambda: load_prompts(at("a.csv", "prompt,id\n")), "a.csv: no rows")
    refused(lambda: load_prompts(at("a.json", '["a",\n"b" "c"]')), "a.json", "line 2")
    for cut in ("[", '["a", "b', '["a"] 1', "3", "[" * 100_000, b'["caf\xff"]', '["a"]'.encode("utf-16")): refused(partial(load_prompts, at("a.json", cut)), "a.json")
    whole = Path(parquet(PAIRS, at("b.parquet"))).read_bytes()
    refused(lambda: load_pairs(at("c.parquet", whole[:-9])), "c.parquet, after 0 rows")


def test_a_bad_row_of_a_csv_file_costs_no_row_after_it(at):
    at("a.csv", 'prompt,id\na,1\nb,2\nc\n"d" e,5\n"f\ng",6\nh,7\n')
    with pytest.warns(UserWarning): assert load_prompts("a.csv", on_error="skip", report=(report := {})) == ["a", "b", "f\ng", "h"]
    assert report["skipped"] == {"csv": 1, "shape": 1}


def test_rows_without_end_are_refused_before_they_fill_the_memory(at, monkeypatch, refused):
    monkeypatch.setattr(files, "LONGEST", 100)
    for name in ("a.jsonl", "a.csv"): refused(partial(load_prompts, at(name, 'prompt\n"' + "x" * 1000 + '"\n'), on_error="skip"), f"{name}: the line", "longer than 100")
    monkeypatch.setattr(files, "LARGEST", 50)
    assert load_prompts(at("a.json", json.dumps(["a", "x" * 40]))) == ["a", "x" * 40]
    refused(lambda: load_prompts(at("a.json", json.dumps(["a", "x" * 42]))), "a.json", "50 bytes", "jq -c")


def test_a_packed_parquet_file_is_read_a_few_rows_at_a_time(tmp_path):
    "Two mebibytes, 150 times, in a few kilobytes: all rows at once would be 300 MiB."
    import pyarrow as pa
    import pyarrow.parquet as pq

    big = "x" * 2**21
    pq.write_table(pa.table({"prompt": pa.array([[{"role": "user", "content": big}]]).take(pa.array([0] * 150))}), path := tmp_path / "a.parquet", compression="zstd")
    assert path.stat().st_size < 10_000
    pa.default_memory_pool().release_unused()
    before, most, found = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for _, row in files.read_parquet(str(path)):
        most, found = max(most, pa.total_allocated_bytes() - before), found + (len(str(row)) >= 2**21)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 150 and most + python < 160 * 2**20, (most, python)
