"""API entries: a function or class of an exporting cell -> a Sphinx directive with a table of parameters and types.

Read from the source, where each parameter's comment stands beside it; nothing is imported.
"""

import ast
import inspect
import re
from collections.abc import Callable

GLOSSARY = {  # parameters that mean the same everywhere; said here where a lesson does not say it beside them
    "mask": "True where a token takes part",
    "logprobs": "log π(aₜ|sₜ) of the sampled tokens, under the policy being trained",
    "old_logprobs": "the same under the policy that sampled",
    "ref_logprobs": "the same under the reference",
    "values": "what the value head expects from each token on",
    "advantages": "how much better each token was than expected",
    "returns": "the target of the value head",
    "query_ids": "the queries (prompts), padded",
    "query_mask": "True at their tokens",
    "response_ids": "the responses, padded",
    "response_mask": "True at their tokens, the first end-of-text included",
    "input_ids": "token ids, padded",
    "attention_mask": "True (or 1) at real tokens",
    "logits": "of the next token",
    "temperature": "divides the logits",
    "gamma": "discount",
    "lam": "λ of GAE",
    "beta": "KL coefficient",
    "clip": "how far the ratio may go from 1",
    "model": "a causal language model",
    "tokenizer": "its tokenizer",
    "texts": "texts",
    "prompts": "prompts",
    "path": "a directory",
    "seed": "of the random numbers",
    "config": "the settings",
    "steps": "updates",
    "items": "rows of the data set",
    "with_entropy": "also return the entropy",
    "x": "the numbers",
    "loss": "of each token",
    "unbiased": "divide by n − 1",
    "chosen": "scores of the preferred texts",
    "rejected": "scores of the others",
    "lr": "learning rate",
    "rollout": "prompts, responses and, once there are any, their scores",
    "notes": "what the models say of a rollout: log-probabilities, entropy, KL, values",
    "annotations": "what the models say of a rollout: log-probabilities, entropy, KL, values",
    "experience": "a rollout with its annotations, rewards, advantages and returns",
    "metrics": "the iteration's numbers by name",
    "state": "what `state_dict` returned",
    "sampler": "what writes the responses",
    "make": "is given the agent and `Tokens`, and returns a sampler",
    "reward_fn": "texts → one number per text; or an object with such a method `score`",
    "batch": "a minibatch of an experience",
    "ref_model": "the frozen reference",
    "new": "what `evaluate_tokens(batch)` returned: log-probabilities, entropy, values",
    "kind": "what an error calls a text",
    "first": "is it the first step of the iteration?",
    "directory": "where to save to, or load from",
    "hidden": "hidden states",
}


def shown(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node).replace("'", '"')


def parameters(fn: ast.FunctionDef, notes: dict[int, str]) -> list[dict]:
    "name, type, default and comment of each parameter, in order."
    a = fn.args
    rows = []
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    every = list(zip(positional, defaults))
    if a.vararg:
        every.append((a.vararg, None))
    every += zip(a.kwonlyargs, a.kw_defaults)
    if a.kwarg:
        every.append((a.kwarg, None))
    lines = [arg.lineno for arg, _ in every]
    for arg, default in every:
        stars = "*" * (arg is a.vararg) + "**" * (arg is a.kwarg)
        last = max(arg.end_lineno, default.end_lineno if default else 0)
        rows.append(
            {
                "name": stars + arg.arg,
                "type": shown(arg.annotation),
                "default": shown(default),
                "what": notes.get(last, "") if lines.count(arg.lineno) == 1 else "",
                "keyword": arg in a.kwonlyargs,
            }
        )
    return rows


def fields(cls: ast.ClassDef, notes: dict[int, str]) -> list[dict]:
    "The same of a dataclass: its annotated fields, described by a comment beside them or a string below."
    rows = []
    for node, after in zip(cls.body, [*cls.body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        doc = (
            after.value.value
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            else ""
        )
        rows.append(
            {
                "name": node.target.id,
                "type": shown(node.annotation),
                "default": shown(node.value),
                "what": notes.get(node.end_lineno) or " ".join(str(doc).split()),
                "keyword": False,
            }
        )
    return rows


def methods(node: ast.stmt) -> list[ast.FunctionDef]:
    "The public methods of a class that say what they do."
    if not isinstance(node, ast.ClassDef):
        return []
    return [
        n
        for n in node.body
        if isinstance(n, ast.FunctionDef) and n.name[0] != "_" and ast.get_docstring(n)
    ]


def is_dataclass(cls: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in cls.decorator_list)


def signature(rows: list[dict]) -> str:
    made = []
    star = False
    for r in rows:
        if r["keyword"] and not star and not any(x["name"].startswith("*") for x in rows):
            made.append("*")
            star = True
        made.append(r["name"] + (f"={r['default']}" if r["default"] else ""))
    return "(" + ", ".join(made) + ")"


def doc(node) -> str:
    "A docstring as Markdown: its signs are meant as they stand."
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    for c in "*[]<$":
        text = text.replace(c, "\\" + c)
    return text


def one_line(node) -> str:
    "The first sentence of a docstring, fit for a table."
    return (
        re.split(r"(?<=[.!?])\s+(?=[A-Z`])", doc(node).split("\n\n")[0])[0]
        .replace("\n", " ")
        .replace("|", "\\|")
    )


def table(
    rows: list[dict], returns: dict | None, link: Callable[[str], str], kind: str = "parameters"
) -> str:
    "Parameters and what comes back; a column that would be empty is left out. `kind`: the table's classes."
    if returns:
        rows = [*rows, returns]
    columns = [c for c in ("name", "type", "default", "what") if any(r[c] for r in rows)]
    if not columns:
        return ""

    def cell(r, c):
        text = r[c].replace("|", "\\|")
        if c == "what" and not text:
            text = GLOSSARY.get(r["name"], "")
        if c == "what":
            return link(text)
        if not text or r is returns and c == "name":
            return text
        return link(f"`{text}`") if c == "type" else f"`{text}`"

    lines = [
        "| " + " | ".join({"name": "parameter", "what": ""}.get(c, c) for c in columns) + " |",
        "|---" * len(columns) + "|",
    ]
    lines += ["| " + " | ".join(cell(r, c) for c in columns) + " |" for r in rows]
    return f"```{{rst-class}} {kind}\n```\n\n" + "\n".join(lines)


def returned(fn: ast.FunctionDef, notes: dict[int, str]) -> dict | None:
    if fn.returns is None or shown(fn.returns) == "None":
        return None
    return {
        "name": "*returns*",
        "type": shown(fn.returns),
        "default": "",
        "what": notes.get(fn.returns.end_lineno, "") if fn.returns.end_lineno > fn.lineno else "",
    }


def entry(node, module: str, link: Callable[[str], str], fence: int = 6, inside: str = "") -> str:
    "The directive for a function, class or method."
    notes = node.notes
    if isinstance(node, ast.ClassDef):
        init = next(
            (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
        )
        rows = []
        if is_dataclass(node):
            rows = fields(node, notes)
        elif init:
            rows = parameters(init, notes)[1:]
        kind, options, returns = "class", "", None
        members = methods(node)
    else:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        kind = "function"
        if inside:
            kind = "property" if "property" in decorators else "method"
        options = "".join(f":{o}:\n" for o in ("classmethod", "staticmethod") if o in decorators)
        rows = parameters(node, notes)
        returns = returned(node, notes)
        members = []
        if inside and "staticmethod" not in decorators:
            rows = rows[1:]
    head = node.name + ("" if kind == "property" else signature(rows))
    place = (
        ""
        if inside
        else f'<p class="to-lesson"><a href="#code-{node.name}">its place in the lesson</a></p>'
    )
    columns = (
        "parameters fields"
        if isinstance(node, ast.ClassDef) and is_dataclass(node)
        else "parameters"
    )  # find.py knows fields by name
    body = [
        link(doc(node)),
        table(rows, returns, link, columns),
        place,
        *(entry(m, module, link, fence - 1, node.name) for m in members),
    ]
    ticks = "`" * fence
    where = "" if inside else f":module: {module}\n"
    return (
        f"{ticks}{{py:{kind}}} {head}\n{where}{options}\n"
        + "\n\n".join(b for b in body if b)
        + f"\n{ticks}"
    )
