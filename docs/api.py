"""API entries: a function or class of an exporting cell -> a Sphinx directive with a table of parameters and types.

Read from the source, where each parameter's comment stands beside it; nothing is imported.
"""
import ast
import inspect
from collections.abc import Callable


def shown(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node).replace("'", '"')


def parameters(fn: ast.FunctionDef, notes: dict[int, str]) -> list[dict]:
    "name, type, default and comment of each parameter, in order."
    a, rows = fn.args, []
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    every = list(zip(positional, defaults))
    if a.vararg: every.append((a.vararg, None))
    every += zip(a.kwonlyargs, a.kw_defaults)
    if a.kwarg: every.append((a.kwarg, None))
    lines = [arg.lineno for arg, _ in every]
    for arg, default in every:
        stars = "*" * (arg is a.vararg) + "**" * (arg is a.kwarg)
        last = max(arg.end_lineno, default.end_lineno if default else 0)
        rows.append({"name": stars + arg.arg, "type": shown(arg.annotation), "default": shown(default),
                     "what": notes.get(last, "") if lines.count(arg.lineno) == 1 else "", "keyword": arg in a.kwonlyargs})
    return rows


def fields(cls: ast.ClassDef, notes: dict[int, str]) -> list[dict]:
    "The same of a dataclass: its annotated fields, described by a comment beside them or a string below."
    rows = []
    for node, after in zip(cls.body, [*cls.body[1:], None]):
        if not isinstance(node, ast.AnnAssign): continue
        doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        rows.append({"name": node.target.id, "type": shown(node.annotation), "default": shown(node.value),
                     "what": notes.get(node.end_lineno) or " ".join(str(doc).split()), "keyword": False})
    return rows


def is_dataclass(cls: ast.ClassDef) -> bool: return any("dataclass" in ast.unparse(d) for d in cls.decorator_list)


def signature(rows: list[dict]) -> str:
    made, star = [], False
    for r in rows:
        if r["keyword"] and not star and not any(x["name"].startswith("*") for x in rows):
            made.append("*"); star = True
        made.append(r["name"] + (f"={r['default']}" if r["default"] else ""))
    return "(" + ", ".join(made) + ")"


def doc(node) -> str:
    "A docstring as Markdown: its signs are meant as they stand."
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    for c in "*[]<$": text = text.replace(c, "\\" + c)
    return text


def one_line(node) -> str:
    "The first line of a docstring, fit for a table."
    return doc(node).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def table(rows: list[dict], returns: dict | None) -> str:
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ")
    code = lambda text: f"`{cell(text)}`" if text else ""
    lines = []
    for r in rows: lines.append(f"| {code(r['name'])} | {code(r['type'])} | {code(r['default'])} | {cell(r['what'])} |")
    if returns and (returns["type"] or returns["what"]): lines.append(f"| *returns* | {code(returns['type'])} | | {cell(returns['what'])} |")
    if not lines: return ""
    return "```{rst-class} parameters\n```\n\n| parameter | type | default | |\n|---|---|---|---|\n" + "\n".join(lines)


def returned(fn: ast.FunctionDef, notes: dict[int, str]) -> dict | None:
    if fn.returns is None or shown(fn.returns) == "None": return None
    return {"type": shown(fn.returns), "what": notes.get(fn.returns.end_lineno, "") if fn.returns.end_lineno > fn.lineno else ""}


def entry(node, module: str, link: Callable[[str], str], fence: int = 6, inside: str = "") -> str:
    "The directive for a function, class or method."
    notes = node.notes
    if isinstance(node, ast.ClassDef):
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        rows = fields(node, notes) if is_dataclass(node) else parameters(init, notes)[1:] if init else []
        kind, options, returns = "class", "", None
        members = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_" and ast.get_docstring(n)]
    else:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        kind = "function" if not inside else "property" if "property" in decorators else "method"
        options = "".join(f":{o}:\n" for o in ("classmethod", "staticmethod") if o in decorators)
        rows, returns, members = parameters(node, notes), returned(node, notes), []
        if inside and "staticmethod" not in decorators: rows = rows[1:]
    head = node.name + ("" if kind == "property" else signature(rows))
    body = [link(doc(node)), link(table(rows, returns)), *(entry(m, module, link, fence - 1, node.name) for m in members)]
    ticks = "`" * fence
    where = "" if inside else f":module: {module}\n"
    return f"{ticks}{{py:{kind}}} {head}\n{where}{options}\n" + "\n\n".join(b for b in body if b) + f"\n{ticks}"

