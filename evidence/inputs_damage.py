"The damage of `inputs.py`: what each case changes in the world, and how the command may end."

import json
import math
import random
import re
import shutil
from pathlib import Path

TRAIN = (
    "train --model model --data prompts.jsonl --reward r.py:good --steps 1 --batch-size 4 --max-new-tokens 3 --epochs 1 --minibatches 1 "
    "--no-progress --device cpu --output-dir out"
).split()
WORDS = "a good film ; a dull film ; the plot was thin".split()


def write_world(here: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from instruct_goose.models.tokens import word_tokenizer

    torch.manual_seed(0)
    tokenizer = word_tokenizer(sorted(set(WORDS)), 16, pad="<end>", bos="<end>", eos="<end>")
    end = tokenizer.eos_token_id
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            bos_token_id=end,
            eos_token_id=end,
        )
    )
    model.save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    rows = [{"prompt": p, "answer": "film"} for p in ("a", "the plot", "a good", "dull film")]
    (here / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (here / "r.py").write_text("def good(texts): return [text.count('a') for text in texts]\n")


# --- YAML -------------------------------------------------------------------------------------------------------------
GOOD = {
    "model": "model",
    "data": "prompts.jsonl",
    "reward": "r.py:good",
    "steps": "1",
    "batch_size": "4",
    "max_new_tokens": "3",
    "epochs": "1",
    "minibatches": "1",
    "progress": "false",
    "device": "cpu",
    "lr": "1e-3",
    "beta": "0.05",
    "seed": "3",
    "output_dir": "out",
}
LINES = "".join(f"{k}: {v}\n" for k, v in GOOD.items())
REFUSED = [  # a line that takes the place of the one with its name, or is added
    "steps: 1_0",
    "steps: 0x1",
    "steps: 0b1",
    "steps: 0o7",
    "steps: 01",
    "steps: 1:30",
    "steps: 1e0",
    "steps: ~",
    "steps: 2001-12-14",
    "steps: =",
    "steps: 1 2",
    "steps: -0",
    "steps: >\n  1",
    "steps: [1]",
    "seed: 99999999999999999999",
    "seed: !!python/object/apply:os.system ['touch pwned']",
    "seed: !!binary aGk=",
    "seed: !!set {1}",
    "seed: *x",
    "<<: {seed: 4}",
    "? steps\n: 1\n? steps\n: 1",
    "algorithm: GRPOO",
    "algorithm: PPO",
    "algorithm: 'ppo '",
    "algorithm: [ppo]",
    "algorithm: gpro",
    "algorithm: dr-grpo",
    "algorithm: true",
    "algorithm:",
    "learning_rate: 1",
    "lr: 1e400",
    "lr: .inf",
    "lr: .nan",
    "lr: nan",
    "lr: 1,5",
    "lr: '1_0'",
    "lr: '\u0661'",
    "lr: ' 5 '",
    "lr: infinity",
    "progress: yes",
    "progress: off",
    "progress: 0",
    "\tbeta: 0.1",
    "beta: 0.1\0",
    "model: " + "a" * 10**6,
    "reward: {r.py: good}",
    "reward: r.py: good",
    "reward: null",
    "plugin: 3",
    "plugin: [1]",
    "plugin: null",
    "plugin: {a: 1}",
    "output_dir: [a]",
    "dataset: x",
    "1: 2",
    "true: 1",
    "[a]: 1",
    ".nan: 1",
    "batch-size: 4\nbatch_size: 4",
    "config: c.yaml",
    "surrogate_settings: {x: 1}",
    "clip: " + "[" * 1000,
    "clip: " + "{a: " * 300,
    "clip: " + "- " * 400 + "x",
    "temperature: !!float 1:30",
    "seed: !!int 010",
    "max_new_tokens: 1000000000000",
    "n: &a [x, x]\nm: [*a, *a]",
    "beta: 0.1\n---\nbeta: 0.2",
    "beta: 0.1\n...\nseed: 2",
    "beta: 0.1 # old\u2028ent_coef: 0.5",
    "beta: 0.1 # old\x85ent_coef: 0.5",
    "# \u2029ent_coef: 0.5",
    "beta:\t0.05",
]
RAN = [
    "seed: &x 3",
    "seed: !!int '3'",
    "seed: -0",
    "seed: +3",
    "lr: '1e-3'",
    "lr: 1e-3 # 5",
    "reward: [r.py:good, r.py:good]",
    "plugin: r.py",
    "beta: 5.e-2",
    '"beta": 0.05',
    "stop_strings: a",
    "stop_strings: [a, 1]",
    "steps: '1'",
    "progress: 'false'",
    "algorithm: reinforce_pp",
    "resume: true",
]


def with_line(line: str) -> str:
    name = line.split(":")[0].strip('"')
    return "".join(f"{k}: {v}\n" for k, v in GOOD.items() if k != name) + line + "\n"


def read_plainly(text: str) -> dict | None:  # None: not every line is a name and a plain value
    lines = [
        re.fullmatch(r"([a-z_]+): ([^\s#'\"\[\]{},&*!|>%@`]+)", line)
        for line in text.split("\n")
        if line.strip()
    ]
    return {m[1]: m[2] for m in lines} if all(lines) else None


def as_asked(text: str):
    "Of a run of this file: the settings are those that its plain lines say."

    def wrong(here: Path, said: str) -> str | None:
        asked = (
            read_plainly(text)
            or read_plainly(
                "".join(
                    f"{x}\n"
                    for x in re.split(r"\r?\n|\r(?=\Z)", text)
                    if re.fullmatch(r"[a-z_]+: [\w.:-]+", x)
                )
            )
            or {}
        )
        done = json.loads((here / "out/config.json").read_text())

        def same(x, y):
            return (
                str(x).lower() == y
                or x == [y]
                or (isinstance(x, int | float) and float(x) == float(y))
            )

        odd = [k for k, x in asked.items() if not same(done[k], x)] + [
            k
            for k, x in {"ent_coef": 0.0, "vf_coef": 0.5}.items()
            if k not in asked and done[k] != x
        ]
        return f"{odd[0]} is {done[odd[0]]}" if odd else None

    return wrong


def yaml(r: random.Random, world: Path):
    def case(name, ends, text):
        def make(here):
            (here / "c.yaml").write_bytes(
                text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            )
            return ["train", "--config", "c.yaml"]

        return (
            f"{name:.60}",
            ends,
            make,
            as_asked(text.decode("utf-8", "replace") if isinstance(text, bytes) else text),
        )

    yield from (case(line, "refused", with_line(line)) for line in REFUSED)
    yield from (case(line, "ran", with_line(line)) for line in RAN)
    whole = {
        "empty": "",
        "a comment": "# x\n",
        "a word": "hello",
        "a list": "- steps: 1\n",
        "UTF-16": LINES.encode("utf-16"),
        "Latin-1": LINES.encode() + b"# \xe9\n",
        "half a character": LINES + "# \ud800\n",
        "an alias bomb": "a: &a [x, x]\n"
        + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in zip("abcdefgh", "bcdefghi"))
        + LINES,
    }
    yield from (case(name, "refused", text) for name, text in whole.items())
    yield from (
        case(name, "ran", text)
        for name, text in {
            "CRLF": LINES.replace("\n", "\r\n"),
            "JSON": json.dumps(
                {k: json.loads(v) if re.match(r"[\d.]|false", v) else v for k, v in GOOD.items()}
            ),
            "a directive": "%YAML 1.2\n---\n" + LINES,
            "a byte order mark": "\ufeff" + LINES,
        }.items()
    )
    for i in range(15):
        text = list(LINES)
        for _ in range(r.choice([1, 1, 2])):
            at = r.randrange(len(text))
            text[at] = r.choice(
                ["", text[at] * 2, *"0_:.-#'\"[{\t&*!|%=~x", "\n", "\u2028", "\x85"]
            )
        yield case(f"changed at random, {i}", "either", "".join(text))


# --- reward files -----------------------------------------------------------------------------------------------------
def later(bad: str) -> str:
    return f"asked = 0\ndef good(texts):\n    global asked\n    asked += 1\n    if asked > 2: {bad}\n    return [1.] * len(texts)\n"


def scores(x: str) -> str:
    return f"import torch, numpy as np, fractions, decimal\ndef good(texts): return {x}\n"


HEAD = "def good(texts): return [text.count('a') for text in texts]\n"
AT_IMPORT = {  # refused; each at import, and in the function when it is asked for the third time
    "exit": "raise SystemExit",
    "exit 0": "raise SystemExit(0)",
    "exit, a page": "raise SystemExit('x' * 10**7)",
    "sys.exit": "__import__('sys').exit()",
    "a loop of itself": "f = lambda: f(); f()",
    "an error of many lines": "raise ValueError('x\\n' * 10**6)",
    "BaseException": "raise BaseException",
    "GeneratorExit": "raise GeneratorExit",
    "StopIteration": "raise StopIteration(3)",
    "cancelled": "raise __import__('asyncio').CancelledError",
    "MemoryError": "raise MemoryError",
    "control characters": "raise ValueError('\\x1b[2J\\0\\ud800')",
    "an error that has no text": "raise type('Evil', (Exception,), {'__str__': lambda s: 1 / 0, '__repr__': lambda s: 1 / 0})",
    "an end that has no text": "raise type('Evil', (BaseException,), {'__str__': lambda s: 1 / 0, '__repr__': lambda s: 1 / 0})",
    "a group": "raise ExceptionGroup('all', [ValueError('x')])",
    "a missing module": "import not_there",
    "an interrupt": "raise KeyboardInterrupt",
    "an exit of an exit": "raise SystemExit(SystemExit(0))",
}
NOT_SCORES = [
    "[float('nan')] * len(texts)",
    "[float('inf'), *[0.] * (len(texts) - 1)]",
    "['1'] * len(texts)",
    "[None] * len(texts)",
    "[None, *[1.] * (len(texts) - 1)]",
    "[1j] * len(texts)",
    "[10**400] * len(texts)",
    "torch.ones(len(texts), 2)",
    "torch.ones(())",
    "torch.ones(len(texts) + 1)",
    "1.",
    "'1' * len(texts)",
    "{t: 1. for t in texts}",
    "set(texts)",
    "None",
    "[]",
    "[[1.] * 99] * len(texts)",
    "iter([1.])",
    "(1. for _ in iter(int, 1))",
    "torch.ones(len(texts), device='meta')",
    "torch.ones(len(texts)).to_sparse()",
    "[object()] * len(texts)",
    "np.array([None] * len(texts))",
    "[decimal.Decimal('NaN')] * len(texts)",
    "texts",
]
SCORES = [
    "[True] * len(texts)",
    "torch.ones(len(texts), requires_grad=True) * 2",
    "np.ones(len(texts), np.float16)",
    "(1. for _ in texts)",
    "[fractions.Fraction(1, 3)] * len(texts)",
    "torch.ones(len(texts), dtype=torch.bfloat16)",
    "tuple(range(len(texts)))",
    "[torch.ones(1)[0]] * len(texts)",
    "torch.ones(len(texts), dtype=torch.bool)",
    "[10**300 / 10**299] * len(texts)",
    "sorted(range(len(texts)))",
]
BESIDE = {  # what runs, and is not what is asked; `good` is the same
    "prints 10 MB": "print('LOUD' * 2_500_000)",
    "the working directory": "__import__('os').chdir('/')",
    "float64 from now on": "__import__('torch').set_default_dtype(__import__('torch').float64)",
    "no gradients from now on": "__import__('torch').set_grad_enabled(False)",
    "meta from now on": "__import__('torch').set_default_device('meta')",
    "its own seed": "__import__('torch').manual_seed(0); __import__('random').seed(0)",
    "warnings are errors": "__import__('warnings').simplefilter('error')",
    "all is logged": "__import__('logging').basicConfig(level=0)",
    "a thread": "__import__('threading').Thread(target=__import__('time').sleep, args=(1,)).start()",
    "inference for ever": "__import__('torch').inference_mode().__enter__()",
    "torch.exp is another": "__import__('torch').exp = None",
    "its texts are cleared": "texts.clear()",
    "its texts are sorted": "texts.sort()",
    "standard output closed": "__import__('sys').stdout.close()",
    "standard output lost": "__import__('sys').stdout = None",
    "little recursion": "__import__('sys').setrecursionlimit(90)",
    "a bar": "__import__('os').environ.clear()",
}
FILES = {
    "empty": b"",
    "a byte order mark": b"\xef\xbb\xbf" + HEAD.encode(),
    "NUL": b"\0",
    "Latin-1": b"# \xe9\n" + HEAD.encode(),
    "tabs": b"if 1:\n\tx = 1\n        y = 2\n",
    "brackets": b"(" * 10**5,
    "a class": b"class good:\n    def __init__(self, texts): pass\n",
    "a module": b"import os as good\n",
    "no texts": b"def good(): return [1.]\n",
    "asks for more": b"def good(texts, colour): return [1.]\n",
    "async": b"async def good(texts): yield 1.\n",
    "calls the command": b"import sys\nfrom instruct_goose.cli.main import main\nmain(sys.argv[1:])\n"
    + HEAD.encode(),
    "a type": b"good = type\n",
    "a pickle": b"\x80\x04K\x01.",
    "UTF-16": HEAD.encode("utf-16"),
}


def rewards(r: random.Random, world: Path):
    def case(name, ends, text, more=(), wrong=lambda here, said: None):
        def make(here):
            (here / "r.py").write_bytes(text if isinstance(text, bytes) else text.encode())
            return [*TRAIN, *more] if more else None

        return name, ends, make, wrong

    def same(here, said):
        ours, theirs = (
            [
                {
                    k: x
                    for k, x in json.loads(line).items()
                    if "second" not in k and "score" not in k
                }
                for line in (place / "metrics.jsonl").read_text().splitlines()
            ][:1]
            for place in (here / "out", here / "run")
        )
        differ = [
            k
            for k, x in theirs[0].items()
            if ours[0].get(k) != x and not (isinstance(x, float) and abs(ours[0][k] - x) < 1e-5)
        ]
        return f"another {differ[0]}" if differ else None

    for name, bad in AT_IMPORT.items():
        yield case(f"{name}, at once", "refused", f"{bad}\n{HEAD}")
        yield case(f"{name}, later", "refused", later(bad))
    yield from (case(x, "refused", scores(x)) for x in NOT_SCORES)
    yield from (
        case(f"{x}, later", "refused", later(f"import torch, numpy as np, decimal; return {x}"))
        for x in r.sample(NOT_SCORES, 5)
    )
    yield from (case(x, "ran", scores(x)) for x in SCORES)
    for name, what in BESIDE.items():
        if "texts" not in what:
            yield case(f"{name}, at once", "either", f"{what}\n{HEAD}", wrong=same)
        yield case(
            f"{name}, when asked",
            "either",
            HEAD.replace(
                ": return",
                f":\n    made = [text.count('a') for text in texts]\n    {what}\n    return made\n#",
            ),
            wrong=same,
        )
    yield from (
        case(name, "ran" if name in ("a byte order mark", "Latin-1") else "refused", text)
        for name, text in FILES.items()
    )
    yield case(
        "sleeps",
        "refused",
        "def good(texts): __import__('time').sleep(100)\n",
        ["--reward-timeout", "1"],
    )
    yield case(
        "ends in its thread",
        "refused",
        "def good(texts): raise SystemExit(0)\n",
        ["--reward-timeout", "9"],
    )
    for place in (
        "r.py",
        "r.py:",
        ":good",
        "r.PY:good",
        "r.py:good:x",
        "r.py:__name__",
        "r.py:good.x",
        "json:loads",
        "os:getcwd",
        "math:fsum",
        "prompts.jsonl:good",
        "model",
        "model/model.safetensors",
        ".",
        "/dev/null:good",
        "r.py:",
        " ",
    ):
        yield case(f"--reward {place}", "refused", HEAD, ["--reward", place])


# --- model directories ------------------------------------------------------------------------------------------------
CONFIG = {
    "refused": [  # changes of config.json
        {"model_type": "bert"},
        {"model_type": "mamba"},
        {"model_type": "vit"},
        {"model_type": "t5"},
        {"model_type": "llama"},
        {"model_type": "gqt2"},
        {"model_type": None},
        {"model_type": ["gpt2"]},
        {"n_layer": 10**7},
        {"n_layer": 1},
        {"n_layer": 3},
        {"n_layer": -1},
        {"n_layer": 0},
        {"n_layer": "2"},
        {"n_layer": 2.5},
        {"n_embd": 0},
        {"n_embd": 16},
        {"n_head": 3},
        {"n_head": 0},
        {"vocab_size": 4},
        {"vocab_size": 10**12},
        {"n_positions": 0},
        {"n_positions": 10**9},
        {"activation_function": "x"},
        {"quantization_config": 3},
        {"layer_norm_epsilon": "x"},
        {
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
            "model_type": "evil",
        },
    ],
    "either": [
        {"quantization_config": {"quant_method": "x"}},
        {"tie_word_embeddings": "no"},
        {"dtype": "x"},
        {"dtype": "int8"},
        {"dtype": "float64"},
        {"eos_token_id": 999},
        {"eos_token_id": [1, "x"]},
        {"eos_token_id": -7},
        {"pad_token_id": -1},
        {"architectures": "x"},
        {"architectures": ["BertModel"]},
        {"attn_pdrop": 7},
        {"n_head": 4},
        {"layer_norm_epsilon": -1.0},
        {"layer_norm_epsilon": math.nan},
        {"scale_attn_weights": "x"},
        {"bos_token_id": 10**30},
        {"add_cross_attention": True},
        {"is_decoder": False},
        {"use_cache": None},
        {"initializer_range": "x"},
    ],
}
TEXTS = {
    "empty": "",
    "a list": "[]",
    "null": "null",
    "nested": "[" * 10**5,
    "nested names": '{"a":' * 10**5,
    "NaN": "NaN",
    "half": None,
    "UTF-16": "{}".encode("utf-16").decode("latin-1"),
    "a number": "1" * 5000,
}


WEIGHTS = "model.safetensors"
FIRST_WEIGHT = "transformer.wte.weight"


def write(name, content):
    "What writes a file into the model's directory: text, tensors, or bytes; None: the file goes."
    from safetensors.torch import save_file

    def make(here):
        path = here / "model" / name
        path.unlink(missing_ok=True)
        if isinstance(content, str):
            path.write_text(content, "latin-1")
        elif isinstance(content, dict):
            save_file(content, path, {"format": "pt"})
        elif content is not None:
            path.write_bytes(content)

    return make


def changed_configs(settings: dict):
    "config.json with other settings."
    yield from (
        (f"config {x}"[:70], ends, write("config.json", json.dumps(settings | x)))
        for ends, changes in CONFIG.items()
        for x in changes
    )


def cut_weights(whole: bytes):
    "The file of weights, cut, or with another size of its header."
    for cut in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        yield f"weights cut to {cut} bytes", "refused", write(WEIGHTS, whole[:cut])
    for size in (2**63, 2**40, 3):
        yield (
            f"a header of {size} bytes",
            "refused",
            write(WEIGHTS, size.to_bytes(8, "little") + whole[8:]),
        )


def broken_weights(r: random.Random, tensors: dict) -> dict[str, dict]:
    "Tensors that are not those of the configuration, by what is wrong."
    import torch

    first = FIRST_WEIGHT
    return {
        "one missing": {k: x for k, x in tensors.items() if k != first},
        "one more": tensors | {"x": torch.ones(2)},
        "turned": tensors | {first: tensors[first].T.contiguous()},
        "a name changed": {k.replace("h.1", "h.7"): x for k, x in tensors.items()},
        "no tensor": {},
        "a row more": tensors | {first: torch.cat([tensors[first], tensors[first][:1]])},
        "one in int8": tensors | {first: tensors[first].to(torch.int8)},
        "all in int64": {k: x.long() for k, x in tensors.items()},
        "complex": {k: x.to(torch.complex64) for k, x in tensors.items()},
        "bool": {k: x > 0 for k, x in tensors.items()},
        "empty ones": {k: x[:0].clone() for k, x in tensors.items()},
        **{
            f"one {x}": tensors | {k: tensors[k].index_fill(0, torch.tensor([0]), x)}
            for k in r.sample(sorted(tensors), 2)
            for x in (math.nan, math.inf)
        },
        "float8": {k: x.to(torch.float8_e4m3fn) for k, x in tensors.items()},
    }


def changed_weights(tensors: dict, broken: dict[str, dict]):
    "The file of weights with other tensors, or in another precision."
    import torch

    yield from (
        (f"weights: {name}", "either" if name == "float8" else "refused", write(WEIGHTS, x))
        for name, x in broken.items()
    )
    yield from (
        (
            f"weights in {kind}",
            "ran",
            write(WEIGHTS, {k: x.to(kind) for k, x in tensors.items()}),
        )
        for kind in (torch.float16, torch.bfloat16, torch.float64)
    )


def mixed_damage(tensors: dict, settings: dict, broken: dict[str, dict]):
    "Several files at a time, and weights that are huge."
    yield (
        "int8 weights, and a quantisation that there is not",
        "refused",
        lambda here: (
            write(WEIGHTS, broken["one in int8"])(here),
            write(
                "config.json", json.dumps(settings | {"quantization_config": {"quant_method": "x"}})
            )(here),
        )[2:],
    )
    yield (
        "a chat template that is none, and messages",
        "refused",
        lambda here: (
            (here / "model/chat_template.jinja").write_text("{% for"),
            (here / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n'),
        )[2:],
    )
    yield (
        "weights that are huge",
        "either",
        write(WEIGHTS, {k: x * 1e30 for k, x in tensors.items()}),
    )


def damaged_files(r: random.Random, model: Path):
    "Each file of settings as another text, and changed at random."
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        kept = (model / name).read_text()
        for what, text in TEXTS.items():
            yield (
                f"{name}: {what}",
                "refused" if name in ("config.json", "tokenizer.json") else "either",
                write(name, kept[: len(kept) // 2] if text is None else text),
            )
        for i in range(3):
            at = r.randrange(len(kept))
            yield (
                f"{name}: changed at random, {i}",
                "either",
                write(
                    name,
                    kept[:at] + r.choice(["", "0", '"', "-", "}", "null", "\\"]) + kept[at + 1 :],
                ),
            )


def changed_tokenizers(model: Path):
    "A tokenizer of more words, and other settings of it."
    words = json.loads((model / "tokenizer.json").read_text())
    more = words | {
        "model": words["model"]
        | {
            "vocab": words["model"]["vocab"]
            | {f"w{i}": len(words["model"]["vocab"]) + i for i in range(50)}
        }
    }
    yield (
        "a tokenizer with more words than the model",
        "refused",
        lambda here: (
            write("tokenizer.json", json.dumps(more))(here),
            (here / "prompts.jsonl").write_text('{"prompt": "w49"}\n'),
        )[2:],
    )
    for what, x in {
        "chat_template": "{% for",
        "model_max_length": "x",
        "eos_token": None,
        "tokenizer_class": "Evil",
        "pad_token": "w99",
        "auto_map": {"AutoTokenizer": ["evil.T", None]},
        "padding_side": "up",
    }.items():
        yield (
            f"tokenizer_config {what}: {x}",
            "either",
            write(
                "tokenizer_config.json",
                json.dumps(json.loads((model / "tokenizer_config.json").read_text()) | {what: x}),
            ),
        )


def shard_indices(tensors: dict):
    "An index of shards that leads elsewhere, or to half of them."
    from safetensors.torch import save_file

    first = FIRST_WEIGHT
    for what, shard in {
        "missing": "gone.safetensors",
        "outside": "../run/policy/model.safetensors",
        "absolute": "/etc/passwd",
        "a directory": ".",
        "config.json": "config.json",
        "a number": 3,
    }.items():
        index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)})
        yield (
            f"an index, its shard is {what}",
            "either" if what == "outside" else "refused",
            lambda here, index=index: (
                (here / "model/model.safetensors").unlink(),
                (here / "model/model.safetensors.index.json").write_text(index),
            )[2:],
        )
    yield (
        "an index and half of its shards",
        "refused",
        lambda here: (
            [
                save_file({first: tensors[first]}, here / "model/model-00001-of-00002.safetensors"),
                (here / "model/model.safetensors").unlink(),
                (here / "model/model.safetensors.index.json").write_text(
                    json.dumps(
                        {
                            "weight_map": {
                                k: f"model-0000{1 + (k != first)}-of-00002.safetensors"
                                for k in tensors
                            }
                        }
                    )
                ),
            ]
            and None
        ),
    )


def links_and_gaps():
    "Files that are links, or missing."
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        for what, target in {
            "nowhere": "gone",
            "itself": name,
            "a directory": "..",
            "/dev/zero": "/dev/zero",
        }.items():
            if what == "/dev/zero" and name != "model.safetensors":
                continue
            yield (
                f"{name} is a link to {what}",
                "refused",
                lambda here, name=name, target=target: (
                    (here / "model" / name).unlink(),
                    (here / "model" / name).symlink_to(target),
                )[2:],
            )
        yield f"{name} is missing", "refused", write(name, None)
    yield (
        "the model is a link",
        "ran",
        lambda here: (
            (here / "model").rename(here / "there"),
            (here / "model").symlink_to("there"),
        )[2:],
    )


def foreign_code(settings: dict):
    "Pickles and Python files beside the weights."
    yield "a pickle beside them", "ran", write("pytorch_model.bin", b"\x80\x04cos\nsystem\n")
    yield (
        "a pickle alone",
        "refused",
        lambda here: (
            write("pytorch_model.bin", b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")(here),
            (here / "model/model.safetensors").unlink(),
        )[2:],
    )
    yield "code beside them", "ran", write("evil.py", b"raise SystemExit(0)")
    yield (
        "modeling code of its own",
        "either",
        lambda here: (
            write(
                "config.json",
                json.dumps(settings | {"auto_map": {"AutoModelForCausalLM": "evil.M"}}),
            )(here),
            write("evil.py", b"raise SystemExit(0)")(here),
        )[2:],
    )


def damaged_adapters():
    "Adapters on a base, as they should be and otherwise."
    import torch
    from safetensors.torch import save_file

    lora = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["c_attn"],
        "base_model_name_or_path": "model",
    }
    fits = {
        f"base_model.model.transformer.h.{i}.attn.c_attn.lora_{x}.weight": torch.ones(shape)
        for i in (0, 1)
        for x, shape in (("A", (2, 8)), ("B", (24, 2)))
    }
    for what, change, given in (
        ("as it should be", {}, fits),
        ("itself for a base", {"base_model_name_or_path": "adapter"}, fits),
        ("no base", {"base_model_name_or_path": None}, fits),
        ("a base that is gone", {"base_model_name_or_path": "gone"}, fits),
        ("an adapter for a base", {"base_model_name_or_path": "other"}, fits),
        ("rank -1", {"r": -1}, fits),
        ("rank 10⁹", {"r": 10**9}, fits),
        ("rank x", {"r": "x"}, fits),
        ("other modules", {"target_modules": ["q_proj"]}, fits),
        ("another kind", {"peft_type": "IA3"}, fits),
        ("an unknown kind", {"peft_type": "X"}, fits),
        ("NaN", {}, {k: x * math.nan for k, x in fits.items()}),
        ("half of it", {}, dict(list(fits.items())[:3])),
        ("another shape", {}, {k: x[:, :1].clone() for k, x in fits.items()}),
        ("no tensors", {}, {}),
        ("a setting of tomorrow", {"new": 3}, fits),
        ("alpha NaN", {"lora_alpha": math.nan}, fits),
        ("modules by a pattern that hangs", {"target_modules": "(a+)+$"}, fits),
    ):

        def make(here, change=change, given=given):
            for name in ("adapter", "other"):
                (here / name).mkdir()
                for file in (here / "model").glob("tok*"):
                    (here / name / file.name).write_bytes(file.read_bytes())
                own = {"base_model_name_or_path": "adapter"} if name == "other" else change
                (here / name / "adapter_config.json").write_text(json.dumps(lora | own))
                save_file(given, here / name / "adapter_model.safetensors")
            return [*TRAIN, "--model", "adapter"]

        ends = {"as it should be": "ran", "a setting of tomorrow": "either"}
        yield f"an adapter, {what}", ends.get(what, "refused"), make


def models(r: random.Random, world: Path):
    from safetensors.torch import load_file

    model = world / "model"
    tensors = load_file(model / WEIGHTS)
    settings = json.loads((model / "config.json").read_text())
    yield from changed_configs(settings)
    yield from cut_weights((model / WEIGHTS).read_bytes())
    broken = broken_weights(r, tensors)
    yield from changed_weights(tensors, broken)
    yield from mixed_damage(tensors, settings, broken)
    yield from damaged_files(r, model)
    yield from changed_tokenizers(model)
    yield from shard_indices(tensors)
    yield from links_and_gaps()
    yield from foreign_code(settings)
    yield from damaged_adapters()


# --- logs and reports -------------------------------------------------------------------------------------------------
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
ODD = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "1e308",
    "9" * 400,
    "true",
    "null",
    '"high"',
    '"3"',
    "[]",
    "{}",
    "-0.0",
    "5e-324",
    json.dumps(EVIL),
    '"\\u2028"',
    '"\\ud800"',
]
NO_NUMBER = {
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "9" * 400,
    "true",
    '"high"',
    '"3"',
    "[]",
    "{}",
    json.dumps(EVIL),
    '"\\u2028"',
    '"\\ud800"',
}


def page_is_whole(here: Path, said: str) -> str | None:
    "No foreign script, and the record in it is JSON."
    page = next((p for p in (here / "run/report.html", here / "compare.html") if p.exists()), None)
    if page is None:
        return "no page"
    text = page.read_text("utf-8")
    if "<script>alert" in text or "<img src=x" in text:
        return "HTML that is not escaped"

    def none(x):
        raise ValueError(f"{x} in the record")

    for record in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S):
        json.loads(record, parse_constant=none)
    return "no end" if "</html>" not in text else None


def written(rows) -> str:
    return "".join(json.dumps(x) + "\n" for x in rows)


def put(lines: list[str], name: str, x: str, at: int = 1) -> str:
    "The log with another value of a metric in one line."
    changed = list(lines)
    changed[at] = re.sub(rf'"{name}": [^,}}]+', lambda _: f'"{name}": {x}', lines[at])
    return "".join(changed)


def damaged_logs(lines: list[str]) -> dict[str, tuple]:
    "metrics.jsonl by what is wrong: how `doctor` may end, and the content."
    rows = [json.loads(x) for x in lines]
    return {
        "doubled": ("refused", "".join(lines * 2)),
        "each twice": ("refused", "".join(x * 2 for x in lines)),
        "reversed": ("refused", "".join(lines[::-1])),
        "one missing": ("ran", lines[0] + lines[2]),
        "two runs": ("refused", "".join(lines + lines[1:])),
        "cut in a line": ("ran", "".join(lines)[:-40]),
        "cut in the middle": ("refused", lines[0] + lines[1][:50] + "\n" + lines[2]),
        "two lines in one": ("refused", lines[0].strip() + "".join(lines[1:])),
        "empty": ("refused", ""),
        "empty lines": ("ran", "\n\n".join(lines)),
        "no end": ("ran", "".join(lines).rstrip()),
        "CRLF": ("ran", "".join(lines).replace("\n", "\r\n")),
        "UTF-16": ("refused", "".join(lines).encode("utf-16")),
        "a byte order mark": ("ran", "\ufeff" + "".join(lines)),
        "NUL": ("refused", lines[0] + "\0" + "".join(lines[1:])),
        "a list": ("refused", json.dumps(rows)),
        "lists": ("refused", "[1]\n" * 3),
        "no names": ("refused", "{}\n" * 3),
        "unknown names": ("ran", written([m | {"new": 1, EVIL: 2, "\u2028": 3} for m in rows])),
        "a name twice": ("ran", lines[0][:-2] + ', "iteration": 0}\n' + "".join(lines[1:])),
        "nested": ("refused", "[" * 10**5 + "\n" + "".join(lines)),
        "a line of 10 MB": ("ran", written([rows[0] | {"x": "y" * 10**7}, *rows[1:]])),
        "text for an iteration": ("refused", put(lines, "iteration", '"one"')),
        "half an iteration": ("either", put(lines, "iteration", "1.5")),
        "an iteration below 0": ("refused", put(lines, "iteration", "-1")),
        "a huge iteration": ("refused", put(lines, "iteration", "1" + "0" * 30)),
        "SFT and RL": ("either", "".join(lines) + '{"step": 1, "loss": 2.0}\n'),
        "of SFT": ("ran", '{"step": 0, "loss": 2.0, "lr": 1}\n{"step": 1, "loss": 1.0, "lr": 1}\n'),
    }


def foreign_summaries() -> dict[str, str | None]:
    "config.json and summary.json by what is wrong; None: half of the file."
    return {
        "empty": "",
        "a list": "[]",
        "half": None,
        "nested": "[" * 10**5,
        "NaN": '{"lr": NaN}',
        "of another": '{"steps": "x", "lr": [1], "beta": {}, "algorithm": 3, "seed": null}',
        "HTML": json.dumps(
            {
                EVIL: EVIL,
                "algorithm": EVIL,
                "stopped": EVIL,
                "before": {EVIL: EVIL},
                "versions": {EVIL: EVIL},
            }
        ),
        "$": '{"algorithm": "$x^{$", "lr": "$\\\\frac{$"}',
        "figures of text": '{"before": 3, "after": [], "baselines": "x", "cpu_seconds": "long", "versions": 7, "config": []}',
        "huge": '{"lr": 1e999, "cpu_seconds": 1e308, "steps": 1' + "0" * 400 + "}",
    }


def output_is_json(here: Path, said: str) -> None:
    "Raises ValueError for a list of findings that is none."
    if said[:1] == "[":
        json.loads(said.partition("\ninstruct-goose")[0])


def log_case(command: list[str], file: str, what: str, ends: str, content, lines: list[str]):
    "A command that reads a run, one of whose files has another content; None: half of it."

    def make(here):
        if command[0] == "compare":
            (here / "other").mkdir()
            (here / "other/metrics.jsonl").write_text("".join(lines))
        path = here / "run" / file
        new = content
        if new is None:
            kept = path.read_text()
            new = kept[: len(kept) // 2]
        if isinstance(new, str):
            new = new.encode("utf-8", "surrogatepass")
        path.write_bytes(new)
        return command

    wrong = page_is_whole
    if command[0] == "doctor":
        wrong = output_is_json if "--json" in command else says_nothing
    return f"{file}, {what}: {' '.join(command)}", ends, make, wrong


def says_nothing(here: Path, said: str) -> None:
    "Whatever was written is right."


def damaged_tokens(r: random.Random, seen: list[str]) -> dict[str, str | None]:
    "tokens.jsonl by what is wrong; None: half of the file."
    return {
        **{
            f"the score is {x[:20]}": re.sub(
                r'("score": )[^,]+', lambda m, x=x: m[1] + x, "".join(seen)
            )
            for x in r.sample(ODD, 6)
        },
        **{
            f"a number is {x[:20]}": re.sub(
                r'("logprobs": \[)[^,\]]+', lambda m, x=x: m[1] + x, seen[0], count=1
            )
            + "".join(seen[1:])
            for x in ODD
        },
        "HTML": "".join(seen).replace("film", EVIL.replace('"', "")),
        "U+2028": "".join(seen).replace("film", "fi\u2028lm"),
        "half": None,
        "doubled": "".join(seen * 2),
        "short columns": re.sub(r'("logprobs": \[)[^,\]]+, ', r"\1", seen[0]),
        "no responses": '{"iteration": 0}\n',
        "a list": "[]\n",
        "nested": "[" * 10**5 + "\n{}\n",
        "text for iterations": '{"iteration": "x", "responses": []}\n' + "".join(seen),
        "iterations of two kinds": "".join(seen) + '{"iteration": null, "responses": []}\n',
        "a huge iteration": '{"iteration": 1e999, "responses": []}\n',
    }


def damaged_samples() -> dict[str, str | bytes]:
    "samples.md by what is odd about it."
    return {
        "HTML": f"# x\n\n| a | b |\n|---|---|\n| {EVIL} | {EVIL} |\n",
        "U+2028": "| a\u2028 | b |\n|---|---|\n| 1 | 2\u2028 |\n",
        "uneven": "| a | b |\n|---|---|\n| 1 |\n| 1 | 2 | 3 |\n",
        "NUL": "\0",
        "bars": "|" * 10**5,
        "UTF-16": "| a |".encode("utf-16"),
    }


READERS = [
    ["doctor", "run"],
    ["doctor", "run", "--json"],
    ["report", "run"],
    ["compare", "run", "other"],
]


def metrics_cases(r: random.Random, lines: list[str]):
    "metrics.jsonl damaged, and with odd numbers, read by `doctor` and another command."
    from instruct_goose.doctor.diagnosis import RULES

    names = sorted(
        {name for rule in RULES for name in rule.metrics} & json.loads(lines[1]).keys()
    )  # those that the doctor reads
    ways = damaged_logs(lines)
    for x in ODD:
        for name in r.sample(names, 1):
            ends = "refused" if x in NO_NUMBER else "either"
            ways[f"{name} is {x[:20]}"] = (ends, put(lines, name, x))
    for what, (ends, content) in ways.items():
        for command in READERS[:1] + [r.choice(READERS[1:])]:
            may = ends if command[0] == "doctor" else "either"
            yield log_case(command, "metrics.jsonl", what, may, content, lines)


def summary_cases(r: random.Random, lines: list[str]):
    "config.json and summary.json damaged, read by the pages and another command."
    for file in ("config.json", "summary.json"):
        for what, content in foreign_summaries().items():
            for command in READERS[2:] + [r.choice(READERS[:2])]:
                yield log_case(command, file, what, "either", content, lines)


def randomly_changed_logs(r: random.Random, lines: list[str]):
    "metrics.jsonl with one or three characters replaced."
    for i in range(12):
        text = list("".join(lines))
        for _ in range(r.choice([1, 1, 3])):
            text[r.randrange(len(text))] = r.choice(["", "0", '"', "-", "e", "\n", "}", ",", "N"])
        what = f"changed at random, {i}"
        yield log_case(READERS[i % 4], "metrics.jsonl", what, "either", "".join(text), lines)


def logs(r: random.Random, world: Path):
    lines = (world / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    yield from metrics_cases(r, lines)
    yield from summary_cases(r, lines)
    seen = (world / "run/tokens.jsonl").read_text().splitlines(keepends=True)
    for what, content in damaged_tokens(r, seen).items():
        for command in (["doctor", "run"], ["report", "run"]):
            yield log_case(command, "tokens.jsonl", what, "either", content, lines)
    for what, content in damaged_samples().items():
        yield log_case(["report", "run"], "samples.md", what, "ran", content, lines)
    yield from randomly_changed_logs(r, lines)


# --- checkpoints ------------------------------------------------------------------------------------------------------
ON = [*TRAIN[:-1], "run", "--steps", "4", "--save-every", "1", "--keep", "3", "--resume"]
RECORD = [  # a place in the record of the newest checkpoint, what stands there now, how --resume may end
    ("progress", ["ppo", 10**9, 3], "refused"),
    ("progress", ["ppo", 0, 3], "refused"),
    ("progress", ["ppo", 2, 3], "either"),
    ("progress", ["ppo", 3, 10**9], "either"),
    ("progress", ["sft", 3, 3], "refused"),
    ("progress", ["ppo", True, 3], "refused"),
    ("progress", 3, "refused"),
    ("settings.lr", 1.0, "refused"),
    ("settings.steps", 10**9, "refused"),
    ("settings.steps", "3", "either"),
    ("settings.seed", None, "refused"),
    ("settings", [], "refused"),
    ("settings.new", 3, "refused"),
    ("settings.reward", ["r.py:other"], "refused"),
    ("seconds", {"cpu_seconds": -1}, "refused"),
    ("seconds", {"cpu_seconds": 1e308, "wall_seconds": 1e308}, "either"),
    ("seconds", "long", "refused"),
    ("seconds", {}, "either"),
    ("environment", {}, "either"),
    ("stages", {}, "refused"),
    ("stages.a/b", {}, "refused"),
    ("stages.sft", {}, "either"),
    ("stages.ppo", [], "refused"),
    ("stages.ppo", {}, "refused"),
    ("stages.ppo.environment.threads", 0, "refused"),
    ("stages.ppo.environment.threads", 10**6, "refused"),
    ("stages.ppo.environment.torch", "1.0", "ran"),
    ("stages.ppo.iteration", 2, "refused"),
    ("stages.ppo.iteration", 10**9, "refused"),
    ("stages.ppo.iteration", -1, "refused"),
    ("stages.ppo.iteration", "3", "refused"),
    ("stages.ppo.iteration", 3.0, "refused"),
    ("stages.ppo.iteration", None, "refused"),
    ("stages.ppo.metrics", [], "refused"),
    ("stages.ppo.metrics", [{}] * 3, "refused"),
    ("stages.ppo.metrics", "xyz", "refused"),
    ("stages.ppo.metrics", [{"iteration": i} for i in (2, 1, 0)], "refused"),
    ("stages.ppo.metrics", [{"iteration": i} for i in range(3)], "either"),
    ("stages.ppo.metrics", [{"iteration": i, "reward_mean": "high"} for i in range(3)], "either"),
    ("stages.ppo.metrics", [{"iteration": i, "lr": 10**400} for i in range(3)], "either"),
    ("stages.ppo.parts.prompt_order.seen", -1, "refused"),
    ("stages.ppo.parts.prompt_order.seen", 10**12, "either"),
    ("stages.ppo.parts.prompt_order.seen", 1.5, "refused"),
    ("stages.ppo.parts.prompt_order.seen", 10**400, "either"),
    ("stages.ppo.parts.coefficients.beta", -1, "refused"),
    ("stages.ppo.parts.coefficients.beta", 1e308, "either"),
    ("stages.ppo.parts.coefficients.beta", None, "refused"),
    ("stages.ppo.stop_reason", 3, "refused"),
    ("stages.ppo.parts", {}, "refused"),
    ("stages.ppo.parts.best_policy", {"kept_for": 1.0, "iteration": 1}, "refused"),
    ("stages.ppo.parts.best_policy.iteration", 10**9, "either"),
    ("stages.ppo.parts.reward_scale.moments", [-3.0, 0.0, 0.0], "refused"),
    ("stages.ppo.parts.learner.groups", [], "refused"),
    ("stages.ppo.parts.learner.groups.0.settings.lr", 1e9, "either"),
    ("stages.ppo.parts.learner.groups.0.settings.lr", -1, "refused"),
    ("stages.ppo.parts.learner.groups.0.settings.eps", 1.0, "refused"),
    ("stages.ppo.parts.learner.groups.0.params", {}, "refused"),
    ("stages.ppo.parts.learner.groups.0.params", ["x"], "refused"),
    ("stages.ppo.parts.learner.groups.0.settings.optimizer", "SGD", "refused"),
    ("stages.ppo.identity.config.lr", 1.0, "refused"),
    ("stages.ppo.identity.config", None, "refused"),
    ("stages.ppo.identity.reference", "0", "refused"),
    ("stages.ppo.identity.tokenizer", None, "refused"),
]


def log_is_whole(here: Path, said: str) -> str | None:
    "Four iterations, each once."
    lines = [
        json.loads(x)["iteration"] for x in (here / "run/metrics.jsonl").read_text().splitlines()
    ]
    return None if lines == [0, 1, 2, 3] else f"its log has {lines}"


def checkpoint_case(name: str, ends: str, tensors: dict, record: dict):
    "A run that goes on from a newest checkpoint of these tensors and this record."
    from instruct_goose.runs.checkpoints import save_checkpoint

    def make(here):
        save_checkpoint(here / "run/checkpoints", tensors, record, keep=9)
        return ON

    return name[:90], ends, make, log_is_whole


def changed_records(tensors: dict, record: dict):
    "Checkpoints whose record has another value in one place."
    for place, x, ends in RECORD:
        changed = json.loads(json.dumps(record))
        *path, last = [int(k) if k.isdigit() else k for k in place.split(".")]
        inner = changed
        for k in path:
            inner = inner[k]
        inner[last] = x
        yield checkpoint_case(f"{place} is {x!r}", ends, tensors, changed)


def changed_states(r: random.Random, tensors: dict, record: dict):
    "Checkpoints of which one tensor is another, two of each kind."
    import torch

    kinds: dict[str, list[str]] = {}  # by the part and what it keeps: parts/learner/moments
    for name in tensors:
        kinds.setdefault("/".join(name.split("/")[1:4]), []).append(name)
    for names in kinds.values():
        for name in r.sample(names, min(2, len(names))):
            x = tensors[name]
            ways = {
                "gone": {k: y for k, y in tensors.items() if k != name},
                "one more": tensors | {f"{name}x": x.clone()},
                "long": tensors | {name: x.flatten().repeat(2)},
                "empty": tensors | {name: x.flatten()[:0].clone()},
                "double": tensors | {name: x.double()},
                "0": tensors | {name: torch.zeros_like(x)},
                "negative": tensors | {name: -x - 1 if x.dtype != torch.uint8 else 255 - x},
                "NaN": tensors | {name: x * math.nan},
                "renamed": {k.replace(name, "ppo/new/x"): y for k, y in tensors.items()},
            }
            for way in r.sample(sorted(ways), 5):
                is_same = way == "double" and x.dtype == torch.double
                may_fit = way in ("0", "negative", "empty") or x.numel() == 0 or is_same
                ends = "either" if may_fit else "refused"
                yield checkpoint_case(f"{name}: {way}", ends, ways[way], record)


def other_commands():
    "Whole checkpoints, and commands that are not those of the run."
    for what, more in {
        "another seed": ["--seed", "1"],
        "fewer steps": ["--steps", "2"],
        "another reward": ["--reward", "r.py:other"],
        "another model": ["--model", "run"],
        "other prompts": ["--data", "other.jsonl"],
        "another algorithm": ["--algorithm", "reinforce_pp"],
        "adapters": ["--lora-rank", "2"],
    }.items():

        def make(here, more=more):
            (here / "other.jsonl").write_text('{"prompt": "a"}\n')
            (here / "r.py").write_text((here / "r.py").read_text() + "other = good\n")
            return [*ON, *more]

        yield f"resumed with {what}", "refused", make
    yield (
        "resumed with a changed reward",
        "ran",
        lambda here: (
            (here / "r.py").write_text("def good(texts): return [0.] * len(texts)\n") and ON
        ),
        lambda here, said: None if "r.py has changed" in said else "not a word of it",
    )


def damaged_directories():
    "Checkpoints that are damaged, gone, or something else."
    for what, change in {
        "all damaged": lambda d: [(x / "record.json").write_text("{}") for x in d.iterdir()],
        "the newest damaged": lambda d: (
            sorted(d.iterdir())[-1] / "tensors.safetensors"
        ).write_bytes(b""),
        "all gone": shutil.rmtree,
        "a file in their place": lambda d: (shutil.rmtree(d), d.write_text("x")),
        "no right name": lambda d: [x.rename(x.with_name("c" + x.name)) for x in [*d.iterdir()]],
        "one of them empty": lambda d: (d / "checkpoint-000099").mkdir(),
        "a link to itself": lambda d: (d / "checkpoint-000099").symlink_to("checkpoint-000099"),
    }.items():
        yield (
            f"checkpoints: {what}",
            "ran"
            if what in ("the newest damaged", "one of them empty", "a link to itself")
            else "refused",
            lambda here, change=change: change(here / "run/checkpoints") and ON or ON,
        )


def checkpoints(r: random.Random, world: Path):
    from instruct_goose.runs.checkpoints import load_checkpoint

    newest = sorted((world / "run/checkpoints").glob("checkpoint-*"))
    tensors, record = load_checkpoint(newest[-1])
    older_tensors, older_record = load_checkpoint(newest[-2])
    yield checkpoint_case("as it was", "ran", tensors, record)
    yield from changed_records(tensors, record)
    yield from changed_states(r, tensors, record)
    yield checkpoint_case("the weights of an earlier one", "either", older_tensors, record)
    yield checkpoint_case("the record of an earlier one", "either", tensors, older_record)
    yield checkpoint_case("no tensors", "refused", {}, record)
    yield checkpoint_case("no record", "refused", tensors, {})
    yield from other_commands()
    yield from damaged_directories()


KINDS = {
    "YAML": yaml,
    "reward files": rewards,
    "model directories": models,
    "reports and logs": logs,
    "checkpoints": checkpoints,
}
