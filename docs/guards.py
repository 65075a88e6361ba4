"""Exported code without the checks of its input, for the pages: the idea first, the whole beneath it.

Only what a function begins with is left out, behind its docstring and its imports: `if …: raise`, loops of nothing else, and calls
of functions that only check. What stands between the lines of a computation stays, and a function that does nothing but check stays whole.
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


def leading(f: ast.FunctionDef) -> list[ast.stmt]:
    "The guards that a function begins with; none where it has nothing else."
    found, told = [], isinstance(f.body[0], ast.Expr) and isinstance(f.body[0].value, ast.Constant)
    for s in f.body[told:]:
        if guards(s): found.append(s)
        elif not isinstance(s, ast.Import | ast.ImportFrom): return found
    return []


def without_guards(source: str) -> str:
    "The source of a cell without the guards at the beginning of its functions; as it is where there are none."
    lines, gone = source.split("\n"), set()
    for f in ast.walk(ast.parse(source)):
        for s in leading(f) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) else ():
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
