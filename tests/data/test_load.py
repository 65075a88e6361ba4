import ast
import codecs
import csv
import io
import itertools
import json
import re
import sys
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import fuzz
import pytest
from deep import first
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.cli import main as cli
from instruct_goose.data import files, rows
from instruct_goose.data import files as tables
from instruct_goose.data import load as data
from instruct_goose.data.files import BadRow
from instruct_goose.data.load import load_pairs, load_prompts, stream_pairs, stream_prompts
from instruct_goose.models.tokens import PairDataset, PromptDataset, bpe_tokenizer

root = Path(__file__).parents[2]
PAIRS = [{"prompt": "the film is", "chosen": " good", "rejected": " dull"}, {"prompt": "", "chosen": "é\u2028\n\"x\", y", "rejected": "\t漢字\r\n"}]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SAID = TEXT.filter(str.strip)
ANY_PAIRS = st.lists(st.fixed_dictionaries({"prompt": TEXT, "chosen": SAID, "rejected": SAID}).filter(lambda p: p["chosen"] != p["rejected"])
                     .filter(lambda p: not re.match(r"\s*(\[|Human:)", p["prompt"] + p["chosen"])), min_size=1, max_size=5)


@pytest.fixture
def at(tmp_path, monkeypatch):
    "at(name, content): a file in an empty working directory."
    monkeypatch.chdir(tmp_path)

    def write(name, content=b""):
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name
    return write


@pytest.fixture(autouse=True)
def _own_errors(unchecked):
    with unchecked(): yield


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

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as e: call()
    for word in words: assert word in str(e.value), str(e.value)
    return e.value


# --- formats ---

@settings(max_examples=25, deadline=None)
@given(ANY_PAIRS, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.sampled_from([1, 2, 5, 2**16]))
def test_every_format_gives_the_rows_that_were_written(tmp_path_factory, rows, end, bom, piece):
    folder = tmp_path_factory.mktemp("formats")
    mark = "\ufeff" * bom
    for name, content in {
        "a.jsonl": lines(rows, end), "a.NDJSON": lines(rows, end) + end + " " + end, "b.json": lines(rows, end),
        "c.json": json.dumps(rows, ensure_ascii=False), "d.json": json.dumps(rows, indent=2), "a.csv": as_csv(rows, ",", end), "a.tsv": as_csv(rows, "\t", end),
    }.items():
        (folder / name).write_bytes((mark + content).encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "PIECE", piece)
            assert load_pairs(folder / name) == rows, name
    assert load_pairs(parquet(rows, folder / "a.parquet")) == load_pairs(rows) == load_pairs(iter(rows)) == rows
    assert load_pairs([(r["chosen"], r["rejected"]) for r in rows]) == [r | {"prompt": ""} for r in rows]


def test_datasets_of_the_hub_s_library(at, tmp_path):
    import datasets

    ds = datasets.Dataset.from_list(PAIRS)
    assert load_pairs(ds) == load_pairs(ds.to_iterable_dataset()) == PAIRS
    assert list(itertools.islice(stream_pairs(ds, repeat=True), 5)) == [*PAIRS, *PAIRS, PAIRS[0]]
    refused(lambda: load_pairs(datasets.DatasetDict(train=ds)), "DatasetDict", "'train'", error=TypeError)
    refused(lambda: load_pairs(ds.to_pandas()), "to_dict('records')", error=TypeError)


def test_prompts_in_all_their_forms(at):
    assert load_prompts(["a", " b\n"]) == ["a", " b\n"]
    assert load_prompts(at("a.jsonl", '{"prompt": "a", "text": "b"}\n"c"\n{"text": "d", "label": 1}\n')) == ["a", "c", "d"]
    assert load_prompts(at("a.json", '["a", {"prompt": "b"}]')) == ["a", "b"]
    assert load_prompts(at("a.csv", "id,question\n1,a\n2,b\n"), columns={"prompt": "question"}) == ["a", "b"]
    refused(lambda: load_prompts(at("b.jsonl", '{"text": "a"}'), columns={"prompt": "question"}), "b.jsonl, line 1: no 'question'")
    assert load_pairs([{"good": "a", "bad": "b", "prompt": None}], columns={"chosen": "good", "rejected": "bad"}) == [
        {"prompt": "", "chosen": "a", "rejected": "b"}]


def test_nothing_is_imported_before_it_is_needed(at):
    for module in (data, files, rows, tables): assert not re.search(r"^\s*(import|from) (pyarrow|datasets|pandas)", Path(module.__file__).read_text("utf-8"), re.M)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        refused(lambda: load_pairs(at("a.parquet")), "instruct_goose[data]", error=ImportError)


def test_remote_code_is_asked_for_nowhere():
    for path in [*(root / "instruct_goose").rglob("*.py"), *(root / "nbs").rglob("*.ipynb")]:
        text = path.read_text("utf-8")
        assert not re.search(r"trust_remote_code\s*=(?!\s*False)|[\"']trust_remote_code\\?[\"']\s*:", text), path.name


def loads_of(source: str) -> list[tuple[int, bool]]:
    "Line of each `X.from_pretrained` of transformers, and whether it is a call with trust_remote_code=False written in it."
    tree, found = ast.parse(source), []
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for n in ast.walk(tree):
        if not (isinstance(n, ast.Attribute) and n.attr == "from_pretrained"): continue
        if isinstance(n.value, ast.Name) and n.value.id in ("Agent", "RewardModel"): continue  # ours, and they come to the others
        given = {k.arg: k.value for k in calls[id(n)].keywords} if id(n) in calls else {}
        said = given.get("trust_remote_code")
        found.append((n.lineno, isinstance(said, ast.Constant) and said.value is False))
    return sorted(found)


def test_every_load_says_that_remote_code_is_not_trusted():
    assert loads_of("A.from_pretrained(x)\nload = B.from_pretrained\nC.from_pretrained(x, **read)\nAgent.from_pretrained(x)\n"
                    "D.from_pretrained(x, trust_remote_code=no)\nE.from_pretrained(x, trust_remote_code=False)") == [
                        (1, False), (2, False), (3, False), (5, False), (6, True)]
    loads = {f"{path.name}, line {line}": said for path in (root / "instruct_goose").rglob("*.py") for line, said in loads_of(path.read_text("utf-8"))}
    assert len(loads) >= 10 and all(loads.values()), [place for place, said in loads.items() if not said]


# --- what is refused, and where it stands ---

@pytest.mark.parametrize("name, content, reason, words", [
    ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b" "c"}\n', "json", "a.jsonl, line 3: not JSON: Expecting ',' delimiter at column 16"),
    ("a.jsonl", '{\n "prompt": "a"\n}', "json", "a.jsonl, line 1: not JSON|jq -c ."),
    ("a.jsonl", "{'prompt': 'a'}", "json", "json.dumps"),
    ("a.jsonl", '{"prompt": "a", "prompt": "b"}', "json", "line 1: the key 'prompt' stands twice"),
    ("a.jsonl", "[" * 100_000, "json", "line 1: nested too deeply"),
    ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}", "json", "line 1: not JSON: Exceeds the limit"),
    ("a.jsonl", '"a"\n3', "shape", "line 2: of type int"),
    ("a.jsonl", '{"x": 1, "y": 2}', "column", "line 1: no 'prompt': there are 'x', 'y'"),
    ("a.jsonl", '{"prompt": 3}', "type", "line 1: prompt is of type int, expected text: 3"),
    ("a.jsonl", '{"prompt": null, "text": "a"}', "empty", "line 1: prompt is null"),
    ("a.jsonl", '{"text": " \\n"}', "empty", "line 1: text is empty"),
    ("a.jsonl", '{"prompt": "\\ud83d"}', "encoding", "line 1: prompt holds half a surrogate pair, '\\ud83d'"),
    ("a.json", '["a",\n\n 3]', "shape", "a.json, line 3 (row 1): of type int"),
    ("a.csv", 'prompt,id\na,1\n"b\nc",2\nd\n', "shape", "a.csv, line 5: 1 fields under 2 columns"),
    ("a.csv", 'prompt,id\n"a" b,1\n', "csv", "a.csv, line 2: ',' expected after '\"'"),
    ("a.tsv", 'prompt\tid\n"a\t1\n', "csv", "a.tsv, line 2: unexpected end of data"),
    ("a.csv", "prompt\na\rb\n", "csv", "line 2: a carriage return outside quotes"),
    ("a.csv", "prompt\n" + '"' + "x" * 140_000, "size", "line 2: a field beyond 131072"),
    ("a.csv", "prompt\n\"[{'role': 'user', 'content': 'a'}]\"\n", "conversation", "line 2: prompt is a conversation written as text"),
])
def test_a_bad_row_is_named(at, name, content, reason, words):
    e = refused(lambda: load_prompts(at(name, content)), *words.split("|"), error=BadRow)
    assert e.reason == reason in files.REASONS


@pytest.mark.parametrize("row, reason, words", [
    ({"chosen": "a"}, "column", "row 0: no 'rejected': there are 'chosen'"), ({"chosen": "a", "rejected": None}, "empty", "rejected is null"),
    ({"chosen": " ", "rejected": "a"}, "empty", "chosen is empty"), ({"chosen": "a", "rejected": "a"}, "tie", "are the same, 'a'"),
    (("a", "a"), "tie", "are the same"), ("a", "shape", "of type str"), (["a"], "shape", "of type list"), ((1, "a"), "type", "chosen is of type int"),
    ({"prompt": 1, "chosen": "a", "rejected": "b"}, "type", "prompt is of type int"), ({"prompt": "\udc00", "chosen": "a", "rejected": "b"}, "encoding", "prompt"),
])
def test_a_bad_pair_is_named(row, reason, words):
    assert refused(lambda: load_pairs([row]), words, error=BadRow).reason == reason


def test_files_that_are_no_source(at, tmp_path):
    refused(lambda: load_prompts("someone/preferences"), "no file 'someone/preferences'", "load_dataset", error=FileNotFoundError)
    refused(lambda: load_prompts("x" * 9999), "no file", error=FileNotFoundError)
    refused(lambda: load_prompts(tmp_path), "is a directory")
    refused(lambda: load_prompts(at("a.txt", "a")), "'.txt' is none of .jsonl")
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"): refused(partial(load_prompts, at(name)), name)
    refused(lambda: load_prompts(at("a.csv", "prompt,id\n")), "a.csv: no rows")
    refused(lambda: load_prompts(at("a.csv", "prompt;id\na;1\n")), "line 1: the columns are 'prompt;id'", "Does ';' separate them?")
    refused(lambda: load_prompts(at("a.csv", "prompt,prompt\na,b\n")), "'prompt' stands twice")
    refused(lambda: load_prompts(at("a.json", '["a",\n"b" "c"]')), "a.json, line 2 (row 1)", "no comma")
    for cut in ("[", '["a"', '["a",', '["a", "b', '["a"] 1', '["a",]', "3", "[tru"): refused(partial(load_prompts, at("a.json", cut)), "a.json, line 1")
    refused(lambda: load_prompts(parquet([{"other": 1}], at("b.parquet"))), "b.parquet: the columns are 'other'")
    whole = Path(parquet(PAIRS, at("b.parquet"))).read_bytes()
    refused(lambda: load_pairs(at("c.parquet", whole[:-9])), "c.parquet, after 0 rows")


def test_sources_that_are_no_source():
    for source in ({"prompt": ["a"]}, 3, None, b"a.jsonl", object()): refused(partial(load_prompts, source), "source is of type", error=TypeError)
    refused(lambda: load_prompts([]), "no rows")


def test_options_are_checked_before_anything_is_read():
    def never():
        raise AssertionError("it was read")
        yield

    refused(lambda: stream_prompts(never(), on_error="ignore"), "'raise' or 'skip'")
    refused(lambda: stream_prompts(never(), columns={"question": "prompt"}), "columns names 'question'")
    refused(lambda: stream_prompts(never(), columns={"prompt": 3}), "columns holds 3", error=TypeError)
    refused(lambda: stream_prompts(never(), report=[]), "report is a list", error=TypeError)
    refused(lambda: stream_prompts(never(), max_length=9), "pass tokenizer=")
    refused(lambda: stream_prompts(never(), max_length=0), "at least 1")
    refused(lambda: stream_prompts(never(), max_length=True), "whole number", error=TypeError)
    refused(lambda: stream_prompts(never(), repeat=True), "can be read once")
    refused(lambda: stream_prompts("nowhere.csv"), "no file", error=FileNotFoundError)
    refused(lambda: load_prompts(["a"], repeat=True), "stream_prompts", error=TypeError)


# --- encodings ---

@pytest.mark.parametrize("piece", [1, 2, 3, 7, 2**16])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("name, blob", [
    ("a.jsonl", '"漢"\r\n"b"\r\n"caf\xff"\r\n'), ("a.json", '["漢",\r\n"b",\r\n"caf\xff"]'), ("a.csv", 'prompt\r\n漢\r\n"caf\xff"\r\n')])
def test_bytes_that_are_not_utf8_are_found(at, monkeypatch, name, blob, bom, piece):
    monkeypatch.setattr(files, "PIECE", piece)
    blob = bom + blob.encode().replace("\xff".encode(), b"\xff")
    refused(lambda: load_prompts(at(name, blob)), f"{name}, line 3", f"byte {blob.index(0xff)} of the file is 0xff")
    refused(lambda: load_prompts(at(name, blob.replace(b"\xff", b"\xe6\xbc"))), f"{name}, line 3", f"byte {blob.index(0xff)} of")  # half of 漢
    assert load_prompts(at(name, blob.replace(b"\xff", "é".encode())))[-1] == "café"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf16_is_recognised(at, name):
    refused(lambda: load_prompts(at(name, 'prompt\n"a"\n'.encode("utf-16"))), f"{name}: the file is UTF-16", "iconv")
    refused(lambda: load_prompts(at(name, 'prompt\n"a"\n'.encode("utf-32"))), f"{name}: the file is UTF-32", "iconv -f UTF-32")


# --- skipping, copies, lengths ---

def test_skipped_rows_are_counted_and_reported(at):
    at("a.jsonl", b'"a"\n{"prompt": 1}\n\xff\n{"prompt": }\n"b"\n{"prompt": 2}\n"a"\n')
    report = {}
    with pytest.warns(UserWarning, match=r"a.jsonl: 4 of 7 rows skipped \(1 × encoding, 1 × json, 2 × type\). The first: a.jsonl, line 2: prompt"):
        assert load_prompts("a.jsonl", on_error="skip", report=report) == ["a", "b", "a"]
    assert {k: report[k] for k in ("rows", "kept", "duplicates", "skipped")} == {
        "rows": 7, "kept": 3, "duplicates": 0, "skipped": {"type": 2, "encoding": 1, "json": 1}}
    assert [re.search(r"line (\d)", x)[1] for x in report["examples"]] == ["2", "3", "4", "6"]
    refused(lambda: load_prompts([1, 2], on_error="skip"), "none of its 2 rows can be used (2 × shape)", "row 0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_prompts(["a"], on_error="skip") == ["a"]


def test_a_bad_row_of_a_csv_file_costs_no_other(at):
    at("a.csv", 'prompt,id\na,1\n"open,2\nb,3\nc\n"d" e,5\n"f\ng",6\nh,7\n')
    report = {}
    with pytest.warns(UserWarning): assert load_prompts("a.csv", on_error="skip", report=report) == ["a", "b", "f\ng", "h"]
    assert report["skipped"] == {"csv": 2, "shape": 1}


def test_an_open_quote_in_a_long_file_costs_one_row(at):
    at("a.csv", 'prompt,id\n"open,0\n' + "".join(f"{i} {'x' * 90},{i}\n" for i in range(3000)))
    with pytest.warns(UserWarning, match="1 of 3001 rows skipped .1 × size"): assert len(load_prompts("a.csv", on_error="skip")) == 3000


def test_copies_are_kept_unless_asked(at):
    rows = [PAIRS[0], PAIRS[1], PAIRS[0], {"prompt": "the film", "chosen": " is good", "rejected": " is dull"}]
    report = {}
    assert load_pairs(rows) == rows  # the last one joins to the same texts and is another pair all the same
    assert load_pairs(rows, unique=True, report=report) == [rows[0], rows[1], rows[3]] and report["duplicates"] == 1
    assert load_prompts(["a", "b", "a "], unique=True) == ["a", "b", "a "]


def test_long_rows(at):
    tokenizer = fuzz.tokenizer()
    n = len(tokenizer("a good film")["input_ids"])
    assert load_prompts(["a good film"], tokenizer=tokenizer, max_length=n) == ["a good film"]
    e = refused(lambda: load_prompts(["a", "a good film"], tokenizer=tokenizer, max_length=n - 1), f"row 1: the prompt has {n} tokens, max_length is {n - 1}")
    assert e.reason == "length"
    pair = {"prompt": "a", "chosen": " good film", "rejected": "!"}
    refused(lambda: load_pairs([pair], tokenizer=tokenizer, max_length=n - 1), f"prompt and chosen has {n} tokens")
    with pytest.warns(UserWarning, match="1 × length"):
        assert load_prompts(["a", "a good film"], tokenizer=tokenizer, max_length=n - 1, on_error="skip") == ["a"]


def test_rows_without_end_are_refused_before_they_fill_the_memory(at, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 100)
    monkeypatch.setattr(files, "PIECE", 16)
    at("a.jsonl", '"a"\n"' + "x" * 1000 + '"\n"b"\n')
    assert refused(lambda: load_prompts("a.jsonl"), "a.jsonl, line 2: longer than 100 bytes").reason == "size"
    with pytest.warns(UserWarning): assert load_prompts("a.jsonl", on_error="skip") == ["a", "b"]
    refused(lambda: load_prompts(at("a.json", '["a", "' + "x" * 1000 + '"]')), "a.json, line 1 (row 1): longer than 100")
    refused(lambda: load_prompts(at("a.csv", "prompt\n" + "x" * 1000 + "\n")), "a.csv, line 2: longer than 100")


# --- streams ---

def big(suffix, n):
    rows = [{"prompt": f"{i} the film is", "chosen": " good" * 9, "rejected": " dull" * 9} for i in range(n)]
    return {".jsonl": lines, ".json": json.dumps, ".csv": as_csv}[suffix](rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_stream_takes_the_same_memory_however_long_the_file(at, suffix):
    peaks = []
    for n in (1000, 8000):
        at(f"{n}{suffix}", big(suffix, n))
        tracemalloc.start()
        assert sum(1 for _ in stream_pairs(f"{n}{suffix}")) == n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert Path(f"8000{suffix}").stat().st_size > 800_000
    assert max(peaks) < 600_000 and peaks[1] < peaks[0] + 100_000, peaks


def test_a_stream_reads_no_further_than_it_is_asked():
    taken = []
    source = (taken.append(i) or f"prompt {i}" for i in itertools.count())
    stream = stream_prompts(source)
    assert not taken and next(stream) == "prompt 0" and taken == [0]


def test_a_stream_repeats(at):
    at("a.jsonl", '"a"\n3\n"b"\n"a"\n')
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stream = stream_prompts("a.jsonl", repeat=True, on_error="skip", unique=True, report=(report := {}))
        assert list(itertools.islice(stream, 7)) == ["a", "b"] * 3 + ["a"]
    assert len(said) == 1 and report["rows"] == 4 and report["duplicates"] == 1  # of the first pass
    refused(lambda: next(stream_prompts(at("b.jsonl"), repeat=True)), "no rows")


# --- conversations ---

def user(text): return {"role": "user", "content": text}
def said(text): return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(): return fuzz.tokenizer()


def test_a_conversation_is_a_prompt(tokenizer):
    talk = [user("a"), said("b"), user("c")]
    theirs = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert theirs == "<s><|user|>a<|assistant|>b</s><|user|>c<|assistant|>"  # the template by hand
    rows = [talk, {"prompt": talk}, {"messages": [*talk, said("d")]}, {"chosen": [*talk, said("d")], "rejected": [*talk, said("e")]}]
    prompts = load_prompts(rows, tokenizer=tokenizer)
    assert prompts == [theirs.removeprefix("<s>")] * 4  # the tokenizer begins every text with <s> itself
    ids = PromptDataset(prompts, tokenizer).ids[0]
    assert ids == tokenizer(theirs, add_special_tokens=False)["input_ids"] and ids.count(tokenizer.bos_token_id) == 1
    plain = bpe_tokenizer(["a"], 270, bos="<s>", eos="</s>", add_bos=False)
    plain.chat_template = fuzz.TEMPLATE
    assert load_prompts([talk], tokenizer=plain) == [theirs]  # here nobody else would


@pytest.mark.parametrize("row", [
    {"chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]}, ([user("q"), said("x")], [user("q"), said("y")]),
    {"prompt": [user("q")], "chosen": [said("x")], "rejected": [said("y")]}, {"prompt": [user("q")], "chosen": "x", "rejected": "y"},
    {"prompt": "q", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
    {"prompt": "q", "chosen": [said("x")], "rejected": [said("y")]}, {"prompt": "", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
    {"prompt": [user("q")], "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]},
    {"chosen": [user("q") | {"name": None}, said("x")], "rejected": [user("q"), said("y") | {"tool_calls": None}]},
])
def test_a_pair_of_conversations(tokenizer, row, tmp_path):
    wanted = {"prompt": "<|user|>q<|assistant|>", "chosen": "x", "rejected": "y"}
    assert load_pairs([row], tokenizer=tokenizer) == [wanted]
    if isinstance(row, dict): assert load_pairs(parquet([row], tmp_path / "a.parquet"), tokenizer=tokenizer) == [wanted]
    (tmp_path / "a.json").write_text(json.dumps([row]))
    assert load_pairs(tmp_path / "a.json", tokenizer=tokenizer) == [wanted]


def test_prompt_and_answer_join_to_what_the_template_writes(tokenizer):
    talk = [{"role": "system", "content": "be kind"}, user("a"), said("b"), user("c")]
    [pair] = load_pairs([{"chosen": [*talk, said("d"), user("e"), said("f")], "rejected": [*talk, said("g")]}], tokenizer=tokenizer)
    whole = tokenizer.apply_chat_template([*talk, said("d"), user("e"), said("f")], tokenize=False)
    assert "<s>" + pair["prompt"] + pair["chosen"] + "</s>" == whole
    assert pair["prompt"].endswith("<|user|>c<|assistant|>") and pair["rejected"] == "g"


def test_a_template_whose_opening_of_the_answer_is_another(tokenizer):
    "Some write a thinking mark where an answer is asked for, and none where one stands: then the prompt ends before the answer's opening."
    thinking = fuzz.tokenizer()
    thinking.chat_template = fuzz.TEMPLATE.replace("<|assistant|>", "<|assistant|><think>")
    [pair] = load_pairs([([user("q"), said("x")], [user("q"), said("y")])], tokenizer=thinking)
    assert pair == {"prompt": "<|user|>q", "chosen": "<|assistant|>x", "rejected": "<|assistant|>y"}
    thinking.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert refused(lambda: load_pairs([([user("q"), said("x")], [user("q"), said("y")])], tokenizer=thinking), "cannot be parted").reason == "template"


@pytest.mark.parametrize("row, words", [
    ([user("q"), said("x")], "ends with the assistant's turn"), ({"prompt": []}, "without turns"), ([3], "turn 0 is of type int"),
    ([{"from": "human", "value": "q"}], "turn 0: 'role' is None"), ([user("q"), user(None)], "turn 1: 'content' is None"), ([user(" ")], "turn 0, content is empty"),
    ({"chosen": [user("q"), said("x")], "rejected": [user("p"), said("y")]}, "no first turn in common"),
    ([user("q"), {"role": "system", "content": "late"}], "TemplateError: system comes first"),
])
def test_a_bad_conversation_is_named(tokenizer, row, words):
    assert refused(lambda: load_prompts([user("a") and [user("a")], row], tokenizer=tokenizer), "row 1", words, error=BadRow).reason in (
        "conversation", "empty", "template")


@pytest.mark.parametrize("row, reason, words", [
    ({"chosen": [user("q"), said("x")], "rejected": [user("q"), user("y")]}, "conversation", "rejected: after the prompt comes 'user'"),
    ({"chosen": [user("q"), said("x")], "rejected": [user("q"), said("x")]}, "tie", "the same conversation"),
    ({"chosen": [user("q"), said("x")], "rejected": "y"}, "type", "chosen is of type list"),
    ({"prompt": "p", "chosen": [user("q"), said("x")], "rejected": [user("q"), said("y")]}, "conversation", "the prompt 'p' is not among"),
    ({"prompt": [user("p")], "chosen": [user("q"), said("x")], "rejected": [said("y")]}, "conversation", "chosen: after the prompt comes 'user'"),
    ({"prompt": [user("q"), said("p")], "chosen": "x", "rejected": "y"}, "conversation", "answer nothing"),
])
def test_a_bad_pair_of_conversations_is_named(tokenizer, row, reason, words):
    assert refused(lambda: load_pairs([row], tokenizer=tokenizer), "row 0", words, error=BadRow).reason == reason


def test_conversations_need_a_template():
    bare = bpe_tokenizer(["a"], 270)
    for on_error in ("raise", "skip"):  # no row's fault
        refused(partial(load_prompts, [[user("q")]], on_error=on_error), "row 0 is a conversation: pass tokenizer=")
        refused(partial(load_prompts, [[user("q")]], tokenizer=bare, on_error=on_error), "no chat template")


def test_dialogues_in_one_string(at):
    "As in hh-rlhf: Human and Assistant by turns; the prompt is what both share up to the answer in which they differ."
    head = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: a joke?\n\nAssistant:"
    row = {"chosen": head + " Goose walks in.", "rejected": head + " Go away.\n\nHuman: why?\n\nAssistant: So."}
    assert load_pairs([row]) == [{"prompt": head, "chosen": " Goose walks in.", "rejected": " Go away.\n\nHuman: why?\n\nAssistant: So."}]
    assert load_prompts(at("a.jsonl", lines([row]))) == [head]
    assert load_pairs([{"chosen": "Human error", "rejected": "Human kindness"}])[0]["prompt"] == ""
    refused(lambda: load_pairs([{"chosen": head, "rejected": head + " x"}]), "chosen is empty")


# --- on to the training ---

def test_what_is_loaded_trains(tokenizer, at):
    from transformers import GPT2Config, GPT2LMHeadModel

    from instruct_goose.models.agent import create_reference_model
    from instruct_goose.models.reward_model import RewardModel
    from instruct_goose.supervised.dpo import train_dpo
    from instruct_goose.supervised.reward_model_training import train_reward_model
    from instruct_goose.training.config import RLHFConfig
    from instruct_goose.training.trainer import RLHFTrainer

    lm = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_head=1, n_embd=8, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    at("pairs.jsonl", lines([{"chosen": [user("q"), said("good")], "rejected": [user("q"), said("bad")]}, PAIRS[0]]))
    pairs = load_pairs("pairs.jsonl", tokenizer=tokenizer)
    assert len(PairDataset(pairs, tokenizer)) == 2
    quiet = {"steps": 1, "lr": 1e-3, "batch_size": 2, "progress": False}
    train_reward_model(RewardModel.from_causal_lm(lm, tokenizer), pairs, **quiet)
    assert train_dpo(lm, tokenizer, pairs, ref_model=create_reference_model(lm), **quiet)[0]["loss"] == pytest.approx(.6931, abs=1e-3)
    trainer = RLHFTrainer(lm, config=RLHFConfig(steps=2, batch_size=3, max_new_tokens=3, epochs=1, minibatches=1), tokenizer=tokenizer)
    trainer.train(stream_prompts("pairs.jsonl", tokenizer=tokenizer, repeat=True), lambda texts: [len(t) for t in texts], progress=False)
    assert trainer.prompts_seen == 6


# --- a small file that holds a large one ---

def peak_of(read):
    tracemalloc.start()
    import pyarrow
    pyarrow.default_memory_pool().release_unused()
    before, most = pyarrow.total_allocated_bytes(), 0
    try:
        for _ in read: most = max(most, pyarrow.total_allocated_bytes() - before)
    finally:
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most + python


@pytest.mark.parametrize("chat", first(1, [False, True]), ids=["texts", "conversations"])
def test_a_packed_parquet_file_is_read_row_by_row(tmp_path, chat):
    "Two mebibytes, 150 times, in a few kilobytes: all rows at once would be 300 MiB and more."
    import pyarrow as pa
    import pyarrow.parquet as pq

    big = "x" * 2**21
    value = [{"role": "user", "content": big}] if chat else big
    pq.write_table(pa.table({"prompt": pa.array([value]).take(pa.array([0] * 150))}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    found = []
    most = peak_of(found.append(len(str(row))) for _, row in tables.read_parquet(str(tmp_path / "a.parquet"), {"prompt"}))
    assert len(found) == 150 and min(found) >= 2**21 and most < 120 * 2**20, most


def test_a_parquet_row_beyond_the_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST", 1000)
    path = parquet([{"prompt": "a"}, {"prompt": "x" * 1001}, {"prompt": "b"}], tmp_path / "a.parquet")
    assert refused(lambda: load_prompts(path), "a.parquet, row 1: longer than 1000 bytes").reason == "size"
    with pytest.warns(UserWarning, match="1 × size"): assert load_prompts(path, on_error="skip") == ["a", "b"]


def test_a_parquet_row_far_beyond_the_limit_is_named_without_being_read(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(tables, "LONGEST", 1000)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "z" * 5000, "b"]}), path, compression="none", row_group_size=1)
    blob = path.read_bytes()
    assert blob.count(b"z" * 5000) == 1
    begin = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset  # whoever reads the row meets a header of nothing
    path.write_bytes(blob[:begin] + b"\xff" * 20 + blob[begin + 20:])
    assert refused(lambda: load_prompts(path), "a.parquet, row 1: longer than 1000 bytes").reason == "size"
    with pytest.warns(UserWarning, match="1 × size"): assert load_prompts(path, on_error="skip") == ["a", "b"]
    with pytest.raises(OSError): pq.read_table(path)


def test_a_parquet_file_that_no_text_could_fill_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST", 2**16)
    path = parquet([{"prompt": "x" * 2**22}], tmp_path / "a.parquet")  # snappy packs it about twentyfold, zstd a thousandfold
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table({"prompt": ["x" * 2**22]}), path, compression="zstd")
    refused(lambda: load_prompts(path), "would unpack to", "a.parquet")


# --- broken input ---

def settings_written() -> set[str]:
    "Names of dataclasses that are called settings, or derive from them, as the source has them."
    classes = {n.name: n for path in (root / "instruct_goose").rglob("*.py") if path.parent.name != "compat"  # another library's, checked as ours
               if path.parent.name != "cli"  # which loads no torch: its one class is made by the parser alone
               for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ClassDef)}
    bases = {name: {b.id for b in n.bases if isinstance(b, ast.Name)} for name, n in classes.items()}
    below = lambda name: name == "Settings" or any(below(b) for b in bases.get(name, ()))
    dataclass = {name for name, n in classes.items() if any("dataclass" in ast.unparse(d) for d in n.decorator_list)}
    return {name for name in dataclass if below(name) or re.search("(Config|Settings|Flags)$", name)}


def test_no_class_of_settings_is_left_out():
    fuzzed = {kind.__name__ for kind in fuzz.KINDS}
    assert fuzzed == settings_written() and len(fuzzed) == len(fuzz.KINDS) >= 18
    assert {c.settings for c in cli.COMMANDS.values() if not c.module.startswith("cli.")} <= fuzzed


def test_broken_input_ends_as_documented():
    found = fuzz.fuzz(2000, seed=1)
    assert not found["failures"], found["failures"][0]["error"] + found["failures"][0]["trace"]
    assert {*(kind.__name__ for kind in fuzz.KINDS), "RLHFConfig.preset", "load_pairs, file", "load_prompts, rows", "load_pairs, parquet"} <= set(found["outcomes"])
    seen = set().union(*found["outcomes"].values())
    assert set(files.REASONS) - {"size", "length", "template", "tie"} <= seen and {"valid", "ValueError", "TypeError"} <= seen


@pytest.mark.parametrize("where, name, bug", [
    (rows, "as_text", lambda value, name, where: value),                                 # anything goes for text
    (files, "decode", lambda path, number, offset, line: line.decode()),                 # an error without a place
    (files, "_BLANKS", (" ", "\t", "\r")),                                                # arrays on several lines
    (files.ArrayReader, "more", lambda self: False if self.text else _MORE(self)),       # reading ends with the first piece
    (tables.Feed, "__next__", lambda self: self.row.append(next(self.lines)) or self.row[-1][2].decode("latin-1")),  # a wrong encoding
], ids=["text", "place", "lines", "pieces", "encoding"])
def test_the_fuzzer_finds_planted_bugs(monkeypatch, where, name, bug):
    monkeypatch.setattr(where, name, bug)
    assert fuzz.fuzz(500, seed=2)["failures"]


_MORE = files.ArrayReader.more
