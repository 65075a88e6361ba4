"""Exported code without the checks of its input, for the pages: the idea first, the whole beneath it.

Left out of a function's own lines: `if …: raise`, loops of nothing else, calls of functions that only check, and what was computed for
these alone. What stands within a loop or a branch of the computation stays, and a function that does nothing but check stays whole.
"""
import ast
import re

ONLY_CHECK = re.compile(  # functions of the package that return nothing and raise
    r"(self\.)?_?((check|require|refuse)_\w+|same_shape|only_tensors|need_adapters|not_negative|between_0_and_1|positive|no_empty_rows|dual_clip_above_1|refuse_merged)")


def guards(s: ast.stmt, within: bool = False) -> bool:
    "Can this statement do nothing but refuse?"
    if isinstance(s, ast.Raise): return within
    if isinstance(s, ast.If | ast.For): return all(guards(t, True) for t in s.body + s.orelse)
    call = isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
    return isinstance(s, ast.Assert) or call and bool(ONLY_CHECK.fullmatch(ast.unparse(s.value.func)))


def names(trees: list[ast.stmt], kind: type) -> set[str]:
    "Those that are read (ast.Load) or written (ast.Store)."
    return {n.id for t in trees for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}


def plain(s: ast.stmt) -> bool:
    "A name for a value, which changes nothing else."
    calls = [n.func for n in ast.walk(s) if isinstance(n, ast.Call)]
    changes = any(getattr(f, "attr", getattr(f, "id", "")) in ("next", "pop", "popitem", "read", "setdefault") for f in calls)
    return isinstance(s, ast.Assign | ast.AnnAssign) and not changes and all(
        isinstance(t, ast.Name | ast.Tuple) for t in (s.targets if isinstance(s, ast.Assign) else [s.target]))


def checks(f: ast.FunctionDef) -> list[ast.stmt]:
    "What a function does to refuse, and no more; nothing where it does nothing else."
    kept, gone = f.body[:], []
    for s in f.body:
        if guards(s) and not names([s], ast.Store) & names([t for t in f.body if t is not s and not guards(t)], ast.Load):
            kept.remove(s)
            gone.append(s)
    for s in reversed(kept[:]):
        made = names([s], ast.Store)
        if plain(s) and made & names(gone, ast.Load) and not made & names([t for t in kept if t is not s], ast.Load):
            kept.remove(s)
            gone.append(s)
    told = lambda s: isinstance(s, ast.Import | ast.ImportFrom) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
    return gone if any(not told(s) and not plain(s) for s in kept) else []


def without_guards(source: str) -> str:
    "The source of a cell without the checks of its functions; as it is where there are none."
    lines, gone = source.split("\n"), set()
    for f in ast.walk(ast.parse(source)):
        for s in checks(f) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            before = lines[s.lineno - 1].encode()[:s.col_offset].decode()
            after = lines[s.end_lineno - 1].encode()[s.end_col_offset:].decode().strip()
            if before.strip() or after and not after.startswith("#"): continue  # another statement on its line
            first = s.lineno - 1
            while lines[first - 1].strip().startswith("#") and lines[first - 1].startswith(before): first -= 1  # what is said of it
            gone |= set(range(first, s.end_lineno))
    kept = []
    for i, line in enumerate(lines):
        after_a_gap = kept and (not kept[-1].strip() or kept[-1].rstrip().endswith(":"))
        if i not in gone and not (not line.strip() and i - 1 in gone and after_a_gap): kept.append(line)
    return "\n".join(kept)
