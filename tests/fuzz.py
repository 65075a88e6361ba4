"""Throw broken input at everything that reads it: `make fuzz`. Plain random mutation; input i of a seed is always the same.

Each input must end as it is documented to: with a valid result, or with a ValueError, TypeError or FileNotFoundError that names
the file and line, the row, the argument or the field. Anything else is a failure, and so is a result that disagrees with a second
way to read the same file. `python tests/fuzz.py 100000 0` prints the counts of seed 0; `python tests/fuzz.py 1 0 1234` repeats input 1234.
"""

import csv
import importlib
import io
import json
import math
import pkgutil
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np

import instruct_goose
from instruct_goose.config import RLHFConfig
from instruct_goose.core.checks import Settings
from instruct_goose.data import files
from instruct_goose.data import load as data
from instruct_goose.models.tokens import bpe_tokenizer
from instruct_goose.objective.group import PRESETS

WORDS = [
    "film",
    "good",
    "",
    " ",
    "é",
    "漢字",
    "🙂",
    'say "x"',
    "a,b",
    "tab\tx",
    "two\nlines",
    "cr\rx",
    "\u2028",
    "'",
    "{",
    "[1]",
    "null",
    "\ufeff",
    "\0",
    "\ud800",
    "<s>",
    "</s>",
    "Human: hi",
    "\n\nHuman: q\n\nAssistant: a",
    "\n\nHuman: q\n\nAssistant: b",
    "x" * 300,
]
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**400,
    math.nan,
    math.inf,
    [],
    {},
    [[]],
    [{}],
    ["a", "b"],
    {"role": "user"},
    b"bytes",
    ("a", "b"),
]
SCRAPS = [
    b'"',
    b"'",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u",
    b"\\ud800",
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\0",
    b"\r",
    b"\n",
    b"\r\n",
    b"\xe2\x80\xa8",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 1200,
    b"null",
    b"tru",
    b"prompt",
    b"chosen",
    b'"prompt":1,',
    b"\t",
    b";",
    b"Infinit",
    b"a" * 140_000,
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer():
    made = bpe_tokenizer(["a good film", "a dull film"], 270, bos="<s>", eos="</s>")
    made.chat_template = TEMPLATE
    return made


# --- what is thrown ---


def text(r: random.Random) -> str:
    return "".join(r.choice(WORDS) for _ in range(r.choice([1, 1, 1, 2, 3])))


def turns(r: random.Random) -> list:
    made = [
        {"role": r.choice(["user", "user", "assistant", "system", "tool"]), "content": text(r)}
        for _ in range(r.randint(0, 4))
    ]
    if r.random() < 0.5:
        made = [
            {"role": role, "content": text(r) or "x"}
            for role in ("user", "assistant", "user", "assistant")[: r.randint(1, 4)]
        ]
    if made and r.random() < 0.1:
        r.choice(made)[r.choice(["role", "content", "name"])] = r.choice(ODD)
    return made


def value(r: random.Random):
    p = r.random()
    if p < 0.6:
        return text(r)
    return turns(r) if p < 0.9 else r.choice(ODD)


def row(r: random.Random):
    if (p := r.random()) < 0.05:
        return r.choice(ODD)
    if p < 0.1:
        return value(r)
    if p < 0.25:  # two conversations that share a beginning
        shared = turns(r)
        return {
            side: [*shared, {"role": "assistant", "content": text(r)}]
            for side in ("chosen", "rejected")
        }
    if p < 0.6:
        return {
            "prompt": "a film",
            "chosen": " " + text(r) + "!",
            "rejected": " bad",
        }  # as it should be, as a rule
    return {
        name: value(r)
        for name in ("prompt", "chosen", "rejected", "text", "messages", "id")
        if r.random() < 0.6
    }


def mutate(r: random.Random, blob: bytes) -> bytes:
    for _ in range(r.choice([0, 1, 1, 2, 5])):
        i = r.randrange(len(blob) + 1)
        j = min(len(blob), i + r.choice([1, 1, 4, 40]))
        blob = (
            blob[:i]
            + r.choice(
                [
                    b"",
                    b"",
                    blob[i:j] * 2,
                    r.choice(SCRAPS),
                    r.choice(SCRAPS),
                    bytes([r.randrange(256)]),
                ]
            )
            + blob[r.choice([i, j]) :]
        )
    return blob[: r.randrange(len(blob) + 1)] if r.random() < 0.1 else blob


def written(r: random.Random, suffix: str) -> bytes:
    "A file as it should be, of rows that may not be."
    rows = [row(r) for _ in range(r.choice([0, 1, 3, 8]))]

    def dump(x, **kw):
        return json.dumps(x, default=str, ensure_ascii=r.random() < 0.5, **kw)

    if suffix in (".csv", ".tsv"):
        out = io.StringIO(newline="")
        names = ["prompt", "chosen", "rejected", "text"][: r.randint(1, 4)]
        writer = csv.writer(
            out,
            delimiter="," if suffix == ".csv" else "\t",
            lineterminator=r.choice(["\n", "\r\n"]),
        )
        writer.writerows([names, *([text(r) for _ in names] for _ in rows)])
        blob = out.getvalue()
    elif suffix == ".json" and r.random() < 0.8:
        blob = dump(rows, indent=r.choice([None, None, 1]))
    else:
        blob = r.choice(["\n", "\n", "\r\n"]).join(dump(x) for x in rows)
    return b"\xef\xbb\xbf" * (r.random() < 0.1) + blob.encode("utf-8", "surrogatepass")


# --- how it must end ---


def check_rows(made: list, pairs: bool) -> None:
    assert made
    for x in made:
        if not pairs:
            check_value(x["prompt"])
            continue
        assert list(x) == ["prompt", "chosen", "rejected"]
        assert len({isinstance(side, list) for side in x.values()}) == 1
        assert x["chosen"] != x["rejected"]
        for side in ("prompt", "chosen", "rejected"):
            if side != "prompt" or isinstance(x[side], list):
                check_value(x[side])


def check_value(value: object) -> None:
    "A text that says something, or turns that have a role and a content."
    assert value
    if isinstance(value, str):
        assert value.strip() and value.encode()
        return
    for turn in value:
        assert isinstance(turn["role"], str) and "content" in turn


def once(items: list) -> dict:
    if len(dict(items)) < len(items):
        raise ValueError("a name twice")
    return dict(items)


def second_reading(path: Path) -> list | None:
    "What a JSON array or a CSV file holds, read at once by the standard library alone; None where it cannot be read."
    blob = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        if path.suffix == ".json":
            made = json.loads(blob.decode(), object_pairs_hook=once)
            return made if isinstance(made, list) else None
        csv.field_size_limit(10**9)
        header, *rows = [
            x
            for x in csv.reader(
                io.StringIO(blob.decode(), newline="\n"),
                delimiter="," if path.suffix == ".csv" else "\t",
                strict=True,
            )
            if x
        ]
        return (
            [dict(zip(header, x)) for x in rows]
            if all(len(x) == len(header) for x in rows) and len({*header}) == len(header)
            else None
        )
    except (ValueError, RecursionError, csv.Error):
        return None


def same_as_second(path: Path) -> None:
    read = (
        files.read_array
        if path.suffix == ".json"
        else lambda p: files.read_csv(p, "," if path.suffix == ".csv" else "\t")
    )
    try:
        if path.suffix == ".json" and files.is_json_lines(str(path)):
            return
        ours = [x for _, x in read(str(path))]
    except ValueError:
        ours = None
    if ours is not None and any(isinstance(x, data.BadRow) for x in ours):
        ours = None
    theirs = second_reading(path)
    if path.suffix != ".json" and not theirs and not ours:
        return  # a file without rows
    assert repr(ours) == repr(theirs), f"{ours} is not {theirs}"  # repr: NaN differs from itself


def content(r: random.Random, kind: str, suffix: str) -> bytes:
    "What a file holds: any bytes, or rows, most of them damaged."
    if kind == "bytes":
        return r.randbytes(r.choice([0, 1, 10, 200]))
    if r.random() < 0.8:
        return mutate(r, written(r, suffix))
    return written(r, suffix)


def loaders(r: random.Random, tools: dict) -> tuple[str, str]:
    "One input for load_prompts or load_pairs."
    folder = tools["folder"]
    pairs = r.random() < 0.5
    load = data.load_pairs if pairs else data.load_prompts
    kind = r.choice(["bytes", "file", "file", "file", "file", "file", "rows", "rows"])
    options = {
        "tokenizer": tools["tokenizer"] if r.random() < 0.8 else None,
        "on_error": r.choice(["raise", "skip"]),
        "unique": r.random() < 0.2,
    }
    if r.random() < 0.1:
        options["max_length"] = r.choice([4, 40, 400, 0, -1])
    if r.random() < 0.05:
        options["columns"] = r.choice(
            [{"prompt": "text"}, {"prompt": "id"}, {"x": "y"}, {"chosen": 3}, {}]
        )
    if kind == "rows":
        source = [row(r) for _ in range(r.randint(0, 4))]
        if r.random() < 0.05:
            source = r.choice(
                [
                    *ODD,
                    "no such file",
                    Path("nowhere.jsonl"),
                    "x" * 5000,
                    "a\0b",
                    str(folder),
                    3,
                    object(),
                    iter(["a"]),
                ]
            )
    else:
        suffix = r.choice([".jsonl", ".json", ".csv", ".tsv", ".ndjson", ".JSONL"])
        if r.random() < 0.01:
            suffix = r.choice([".txt", "", ".jsonl.gz", ".parquet"])
        source = folder / f"input{suffix}"
        source.write_bytes(content(r, kind, suffix))
    report = options["report"] = {}
    try:
        made = load(source, **options)
        check_rows(made, pairs)
        assert report["kept"] == len(made) and report["rows"] == report["kept"] + report[
            "duplicates"
        ] + sum(report["skipped"].values())
        assert options["on_error"] == "skip" or not report["skipped"]
        outcome = "valid, some skipped" if report["skipped"] else "valid"
    except (ValueError, TypeError, FileNotFoundError) as e:
        names = ("input", "row ", "source", "no file", "max_length", "columns")
        assert any(name in str(e) for name in names), f"names nothing: {e}"
        if isinstance(e, data.BadRow):
            assert e.reason in files.REASONS and ("line " in str(e) or "row " in str(e)), e
        assert not isinstance(e, UnicodeError), repr(e)
        outcome = e.reason if isinstance(e, data.BadRow) else type(e).__name__
    if kind == "file" and source.suffix in (".json", ".csv", ".tsv"):
        same_as_second(source)
    return f"{load.__name__}, {kind}", outcome


def kinds() -> list[type]:
    """Every class of settings of the package, in whatever module: none can be forgotten. The plug-in of more losses is left alone: imported, it would
    stand in every table of the tests collected after this."""
    for module in pkgutil.walk_packages(instruct_goose.__path__, "instruct_goose."):
        if module.name != "instruct_goose.compat.losses":
            importlib.import_module(module.name)
    found = set()
    new = {Settings}
    while new:
        found, new = found | new, {below for kind in new for below in kind.__subclasses__()} - found
    return sorted(
        (
            k
            for k in found
            if is_dataclass(k) and fields(k) and k.__module__.startswith("instruct_goose.")
        ),
        key=lambda k: (k.__module__, k.__name__),
    )


KINDS = kinds()
# what has no default, by its name
FILLED = {
    "data": Path("data"),
    "run_dir": Path("run"),
    "run_dirs": (Path("run"), Path("other")),
    "model": "model",
    "reward": ("reward.py:good",),
    "output_dir": Path("out"),
    "dataset": ("owner/rows",),
    "column": "text",
    "made_up": "a text",
    "judge": "owner/classifier",
    "loss": "loss.py:mine",
}
NEEDED = {
    k: {f.name: FILLED[f.name] for f in fields(k) if f.default is f.default_factory is MISSING}
    for k in KINDS
}
VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    8,
    64,
    -1,
    0.5,
    1.0,
    0.2,
    -0.0,
    1e-9,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    2**63,
    2**1024,
    "",
    "0.1",
    "8",
    "gae",
    "nan",
    "group_mean_std",
    "sequence",
    "weight",
    "loss",
    "k1",
    "k3",
    "straight_through",
    "group_token_mean",
    "cpu",
    [],
    [1],
    {},
    {"a": 1},
    b"x",
    1j,
    np.float64(0.3),
    np.int64(4),
    np.float32("nan"),
    np.bool_(True),
    object,
    (),
    (2, 6),
    (6, 2),
    (2, "6"),
    (1.5, 2),
    (1, 2, 3),
    ("a",),
    ("a", None),
    [2, 6],
    (math.nan, 3),
    ((1, 2), 3),
    Path("x"),
    20261121215400,
]


def config(r: random.Random, tools: dict) -> tuple[str, str]:
    "One set of settings for one of the classes, or for one of its presets."
    kind = r.choice(KINDS)
    own = [f.name for f in fields(kind)]
    given = {r.choice(own): r.choice(VALUES) for _ in range(r.choice([0, 1, 1, 1, 2, 3, 6]))}
    if r.random() < 0.03:
        given[r.choice(["algorithm", "learning_rate", "Steps", "x y", ""])] = r.choice(VALUES)
    preset = issubclass(kind, RLHFConfig) and r.random() < 0.5
    name = (
        r.choice(
            [*PRESETS, *PRESETS, "PPO", "", "dr-grpo", "nan"]
            + [v for v in VALUES if not isinstance(v, np.generic)]
        )
        if preset
        else None
    )
    arguments = NEEDED[kind] | given
    try:
        made = kind.preset(name, **arguments) if preset else kind(**arguments)
        for k, v in given.items():
            assert getattr(made, k) is v or getattr(made, k) == Path(v), k
        hints = get_type_hints(kind)
        for f in fields(made):
            v = getattr(made, f.name)
            hint = hints[f.name]
            for x in v if isinstance(v, (tuple, list)) else [v]:
                assert not isinstance(x, float) or math.isfinite(x), f.name
            assert v is None or isinstance(v, bool) == (hint is bool), (
                f.name
            )  # a second reading of the annotation
            if hint is int:
                assert isinstance(v, int), f.name
        assert kind(**{f.name: getattr(made, f.name) for f in fields(made)}) == made
        if preset:
            assert made.algorithm in (*PRESETS, "custom")
        outcome = "valid"
    except (ValueError, TypeError, OSError) as e:  # OSError: a plug-in that is no file
        assert any(n in str(e) for n in (*own, *map(repr, given), "preset", "algorithm")), (
            f"names no field: {e}"
        )
        outcome = type(e).__name__
    return kind.__name__ + ".preset" * preset, outcome


# --- the run ---


def one(seed: int, i: int, tools: dict) -> tuple[str, str]:
    r = random.Random(f"{seed}/{i}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (config if r.random() < 0.3 else loaders)(r, tools)


def fuzz(n: int, seed: int = 0, first: int = 0) -> dict:
    "n inputs: counts by target and outcome, and the failures with the number that repeats them."
    counts = {}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        tools = {"folder": Path(folder), "tokenizer": tokenizer()}
        for i in range(first, first + n):
            try:
                target, outcome = one(seed, i, tools)
                counts.setdefault(target, Counter())[outcome] += 1
            except Exception as e:
                failures.append(
                    {
                        "input": i,
                        "error": f"{type(e).__name__}: {str(e)[:300]}",
                        "trace": traceback.format_exc(),
                    }
                )
    return {
        "inputs": n,
        "seed": seed,
        "failures": failures,
        "outcomes": {k: dict(v.most_common()) for k, v in sorted(counts.items())},
    }


if __name__ == "__main__":
    result = fuzz(*map(int, sys.argv[1:] or [100_000]))
    print(json.dumps(result, indent=1, ensure_ascii=False))
    sys.exit(bool(result["failures"]))
