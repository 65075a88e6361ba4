"""Change the package in one small way after another, and see whether a test notices: `make mutations`.

`python tests/mutations.py 150 60` draws 150 mutants, as many from each module between the objective and the worlds, to write tests for, and
60 others to see how many such changes are noticed of which nobody has thought; `--seed` draws others. It runs for each
the tests of these floors that pass through the changed lines until one fails, the quick ones before the slow, for at most --seconds
of their usual time. What nobody noticed is listed in evidence/mutations.json. Write behind its
"equivalent" why it makes no difference that anybody could see, or else write a test. The same command again tries only those
that are neither judged nor caught: what was caught in this source is remembered in runs/mutations, until that is removed.

A mutant lives in a copy of the repository, in a process forked from one that has everything imported and every test collected:
there the functions get the code of the changed source. What is computed while a module is imported (defaults, fields, tables) is
changed in the copy, which is imported anew. A mutant that hangs, or dies, is caught. Left alone is what is no behaviour:
documentation, annotations, errors and their words, what is printed.
"""
import argparse
import ast
import copy
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

root = Path(__file__).parents[1]
TABLE = "evidence/mutations.json"
ROOMS = ("models", "training", "variants", "supervised", "runs", "distributed", "data", "doctor")
FLOORS, TESTS = [f"instruct_goose/{room}" for room in ROOMS], [f"tests/{room}" for room in ROOMS]
WARM = ("torch", "transformers.modeling_utils", "transformers.models.gpt2.modeling_gpt2", "beartype", "jaxtyping", "hypothesis",
        "tokenizers", "safetensors.torch", "matplotlib.pyplot")  # what takes seconds to import
COMPARE = {ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
           ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)}
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
         ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And}
SHOWN = {"print", "tqdm", "set_postfix_str", "isinstance", "cast", "TypeVar"}  # nothing in these calls is changed
LOOKS = {"indent", "ensure_ascii", "stacklevel", "help", "desc", "newline", "errors"}
BASES = {"c": "Config", "config": "Config", "r": "Rollout", "rollout": "Rollout", "batch": "Rollout"}  # names of old friends


# --- what may be changed ---

class Mutant(NamedTuple):
    module: str    # its file
    line: int
    operator: str
    where: str     # the function or class around it
    before: str
    after: str
    start: int     # in bytes
    end: int
    lines: tuple   # of the statement, or of its head
    inside: bool   # a function: else it happens while the module is imported
    nth: int = 0   # of equal ones in the same function

    @property
    def key(self): return " | ".join((self.module, self.where, self.operator, self.before, self.after, str(self.nth)))


def changed(node, **parts):
    vars(new := copy.copy(node)).update(parts)
    return new


def prose(node): return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value)


def text(node): return isinstance(node, ast.JoinedStr | ast.List) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def last_word(node): return re.split("_|\\.", ast.unparse(node))[-1]


def alike(a, b, kinds):
    "Two different names of one type: the same annotation, or the same last word."
    if not all(isinstance(x, ast.Name | ast.Attribute) for x in (a, b)) or ast.unparse(a) == ast.unparse(b): return False
    known = [kinds.get(ast.unparse(x)) for x in (a, b)]
    return known[0] == known[1] not in (None, "Any") or last_word(a) == last_word(b)


def other_field(node, kinds, classes):
    "The next field of the same annotation, of the class that this seems to be an attribute of."
    base = last_word(node.value)
    kind = kinds.get(base) if kinds.get(base) in classes else BASES.get(base, "?")
    for name, fields in classes.items():
        if name.endswith(kind) and node.attr in fields:
            same = [f for f, x in fields.items() if x == fields[node.attr]]
            if len(same) > 1: return same[(same.index(node.attr) + 1) % len(same)]
    return None


def number(x):
    if isinstance(x, bool): return not x
    return {0: 1, 1: 0}.get(x, x + 1 if isinstance(x, int) else 2 * x) * type(x)(1)


def changes(node, kinds, classes):
    "(what is replaced, operator, by what) for one node alone."
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for other in COMPARE[type(op)]: yield node, "comparison", changed(node, ops=[*node.ops[:i], other(), *node.ops[i + 1:]])
        case ast.BinOp() if type(node.op) in OTHER and not text(node.left) and not text(node.right):
            yield node, "arithmetic", changed(node, op=OTHER[type(node.op)]())
        case ast.BoolOp(): yield node, "and, or", changed(node, op=OTHER[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()): yield node, "not, minus", node.operand
        case ast.Constant(value=bool() | int() | float()) if abs(node.value) < float("inf"): yield node, "constant", ast.Constant(number(node.value))
        case ast.AugAssign():
            yield node, "statement", ast.Pass()
            if type(node.op) in OTHER: yield node, "arithmetic", changed(node, op=OTHER[type(node.op)]())
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]): yield node, "statement", ast.Pass()
        case ast.Attribute(ctx=ast.Load()):
            if field := other_field(node, kinds, classes): yield node, "field", changed(node, attr=field)
        case ast.Call():
            for i, k in enumerate(node.keywords):
                if k.arg and k.arg not in LOOKS: yield node, "keyword", changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1:]])
            for i, (a, b) in enumerate(itertools.pairwise(node.args)):
                if alike(a, b, kinds): yield node, "arguments", changed(node, args=[*node.args[:i], b, a, *node.args[i + 2:]])
            for i, (a, b) in enumerate(itertools.pairwise(node.keywords)):
                if a.arg and b.arg and alike(a.value, b.value, kinds):
                    swapped = changed(a, value=b.value), changed(b, value=a.value)
                    yield node, "arguments", changed(node, keywords=[*node.keywords[:i], *swapped, *node.keywords[i + 2:]])
    tests = node.ifs if isinstance(node, ast.comprehension) else [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
    for test in tests:
        if not isinstance(test, ast.Compare | ast.BoolOp) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield test, "condition", ast.UnaryOp(ast.Not(), test)


def left_alone(node):
    "No behaviour, or words."
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()): return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")): return True
        case ast.FunctionDef(name="__str__" | "__repr__"): return True
        case ast.IfExp(): return prose(node.body) or prose(node.orelse)
        case ast.BinOp(): return prose(node.left) or prose(node.right)
        case ast.keyword(arg=name) if name in LOOKS: return True
        case ast.Expr(value=ast.Call(func=f)) | ast.Call(func=f): return last_word(f) in SHOWN
    return False


def sites(node, classes, where="", inside=False, lines=(1, 1), kinds=types.MappingProxyType({})):
    "(node, operator, replacement, where, inside, lines) for everything below a node."
    if left_alone(node): return
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        lines = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno)
    for found in changes(node, kinds, classes): yield *found, where, inside, lines
    below = {name: x if isinstance(x, list) else [x] for name, x in ast.iter_fields(node) if name not in ("annotation", "returns", "decorator_list")}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name = f"{where}.{node.name}".lstrip(".")
        for x in below.pop("body"):
            if isinstance(node, ast.ClassDef): yield from sites(x, classes, name, inside, lines, kinds)
            else:
                own = {a.arg: ast.unparse(a.annotation) for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation}
                yield from sites(x, classes, name, True, lines, dict(kinds) | own)
    for x in itertools.chain.from_iterable(below.values()):
        if isinstance(x, ast.AST): yield from sites(x, classes, where, inside, lines, kinds)


def mutants(folder: Path, floors) -> list[Mutant]:
    "All of them, in the order of the files."
    files = {p: p.read_bytes() for floor in floors for p in sorted((folder / floor).glob("*.py"))}
    trees = {p: ast.parse(source) for p, source in files.items()}
    classes = {c.name: {x.target.id: ast.unparse(x.annotation) for x in c.body if isinstance(x, ast.AnnAssign)}
               for tree in trees.values() for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    made = {}
    for p, tree in trees.items():
        starts = [0, *itertools.accumulate(len(line) for line in files[p].splitlines(keepends=True))]
        for node, operator, new, where, inside, lines in sites(tree, classes):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before, text = files[p][start:end].decode(), ast.unparse(new)
            short = re.sub(r"\s+", " ", before)
            m = Mutant(str(p.relative_to(folder)), node.lineno, operator, where, short, text, start, end, lines, inside)
            made.setdefault((m.module, start, end, text), m)
    seen = Counter()
    for place, m in made.items():
        made[place] = m._replace(nth=seen[m.key])
        seen[m.key] += 1
    return list(made.values())


def source_of(folder: Path, m: Mutant) -> str:
    "The whole changed module, each line where it was."
    source = (folder / m.module).read_bytes()
    rest = "\n" * source[m.start:m.end].count(b"\n")
    text = m.after + rest if m.operator == "statement" or re.match(r"[^=(]+ .?=[^=]", m.after) else f"({m.after}{rest})"
    return (source[:m.start] + text.encode() + source[m.end:]).decode()


def draw(found: list[Mutant], n: int, seed: int) -> list[Mutant]:
    "As many of each module, as far as they go."
    dice, piles = random.Random(seed), defaultdict(list)
    for m in found: piles[m.module].append(m)
    for pile in piles.values(): dice.shuffle(pile)
    order = (m for row in itertools.zip_longest(*dice.sample(list(piles.values()), len(piles))) for m in row if m)
    return sorted(itertools.islice(order, n), key=lambda m: (m.module, m.start))


# --- what notices ---

def in_child(work, seconds=None, quiet=True):
    "What work() returns in a forked process; a text that says so if that died or hung."
    here, there = os.pipe()
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            os.setsid()
            os.close(here)
            if quiet:
                for stream in (1, 2): os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            with os.fdopen(there, "w") as pipe: pipe.write(json.dumps(work()) + "\n")
        finally: os._exit(0)
    os.close(there)
    said, end = b"", time.monotonic() + (seconds or 10**6)
    while not said.endswith(b"\n"):
        if not select.select([here], [], [], max(0, end - time.monotonic()))[0]:
            said = b'"it hangs"'
            break
        part = os.read(here, 2**20)
        if not part: break
        said += part
    os.close(here)
    try: os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError: pass  # it has ended already
    os.waitpid(pid, 0)
    return json.loads(said or b'"it died"')


class Watch:
    "A pytest plugin: seconds and lines of the package of each test that passes."

    def __init__(self, folder: Path, floors):
        self.files = {str(p): str(p.relative_to(folder)) for floor in floors for p in (folder / floor).glob("*.py")}
        self.tests, self.failed = {}, []

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files: return None
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines, self.ok, start = set(), True, time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        yield
        sys.settrace(None)
        threading.settrace(None)
        if not self.ok: return self.failed.append(item.nodeid)
        lines = defaultdict(list)
        for file, line in self.lines: lines[self.files[file]].append(line)
        self.tests[item.nodeid] = [time.monotonic() - start, lines]

    def pytest_runtest_logreport(self, report): self.ok = self.ok and not report.failed


def start(folder: Path, args, plugin):
    "pytest in this process, which must be a forked one."
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # for what tests start
    return pytest.main([*args, "-qqs", "--disable-warnings", "-p", "no:cacheprovider", f"--rootdir={folder}"], plugins=[plugin])


def measured(folder: Path, floors, tests, kept: Path) -> dict:
    "nodeid -> [seconds, {module: lines}]. Of test files that have not changed since, it is remembered."
    def read(paths): return b"".join(p.read_bytes() for p in paths)
    base = read(sorted([*folder.glob(f"{Path(floors[0]).parts[0]}/**/*.py"), *folder.glob("tests/conftest.py")]))
    known, todo = {}, {}
    for file in (f for t in tests for f in sorted((folder / t).glob("test_*.py"))):
        name = hashlib.sha256(base + file.read_bytes()).hexdigest()[:16]
        if (at := kept / f"{name}.json").exists(): known |= json.loads(at.read_text())
        else: todo[str(file.relative_to(folder))] = name
    if todo:
        def work():
            watch = Watch(folder, floors)
            start(folder, todo, watch)
            return watch.tests, watch.failed
        done = in_child(work)
        if isinstance(done, str): sys.exit(f"the tests did not end: {done}")
        for name in done[1]: print(f"fails unchanged, and is left out: {name}", flush=True)
        known |= done[0]
        for file, name in todo.items():
            own = {test: x for test, x in done[0].items() if test.startswith(file + "::")}
            if not any(x.startswith(file + "::") for x in done[1]): (kept / f"{name}.json").write_text(json.dumps(own))
    return known


def who_sees(folder: Path, m: Mutant, tests: dict, seconds: float) -> list[str]:
    "The tests that pass through a mutant, quick ones first, many cases of one after few of others; only so many seconds of them."
    seen = set(range(m.lines[0], m.lines[1] + 1))
    through = [t for t, (_, lines) in tests.items() if not seen.isdisjoint(lines.get(m.module, ()))]
    if not m.inside:  # whoever names the module
        name = m.module.removesuffix(".py").replace("/", ".")
        files = {f for f in {t.split("::")[0] for t in tests} if name in (folder / f).read_text("utf-8")}
        through = [t for t, (_, lines) in tests.items() if m.module in lines or t.split("::")[0] in files]
    through.sort(key=lambda t: tests[t][0])
    rank, cases = {}, Counter()
    for t in through: rank[t] = cases[t.split("[")[0]] = cases[t.split("[")[0]] + 1
    through.sort(key=lambda t: rank[t] * tests[t][0])
    spent = itertools.accumulate(tests[t][0] for t in through)
    return [t for i, (t, s) in enumerate(zip(through, spent, strict=True)) if s <= seconds or not i]


def run_items(session, items, limits):
    "The test that falls first, or None. A test that takes longer than its limit ends the process."
    for item, after in itertools.pairwise([*items, None]):
        signal.setitimer(signal.ITIMER_REAL, limits[item.nodeid])
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if session.testsfailed: return item.nodeid
    return None


def patch(folder: Path, m: Mutant, functions):
    "Give the functions of an imported module the code of the changed source. False where that does not work."
    path = str(folder / m.module)
    module = next(x for x in list(sys.modules.values()) if getattr(x, "__file__", None) == path)
    pending, new = [module.__spec__.loader.source_to_code(source_of(folder, m).encode(), path)], {}
    while pending:
        code = pending.pop()
        new[code.co_qualname, code.co_firstlineno] = code
        pending += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    for f in functions[path]:
        code = new.get((f.__code__.co_qualname, f.__code__.co_firstlineno))
        if code is None or code.co_freevars != f.__code__.co_freevars: return False
        f.__code__ = code
    return True


class Server:
    "A pytest plugin that collects all tests, and then forks for each mutant instead of running them."

    def __init__(self, folder, todo, limits, tell):
        self.folder, self.todo, self.limits, self.tell = folder, todo, limits, tell

    def pytest_runtestloop(self, session):
        self.session, self.items, self.functions = session, {item.nodeid: item for item in session.items}, defaultdict(list)
        for f in gc.get_objects():
            if type(f) is types.FunctionType and f.__code__.co_filename.startswith(str(self.folder)): self.functions[f.__code__.co_filename].append(f)
        gc.collect()
        gc.freeze()  # memory that nobody touches is not copied
        for m, names in self.todo: self.tell(m, in_child(partial(self.fallen, m, names), 60 + sum(self.limits[n] for n in names)))
        return True

    def fallen(self, m, names):
        gc.disable()
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
        return run_items(self.session, [self.items[n] for n in names], self.limits) if patch(self.folder, m, self.functions) else "anew"


class Only:
    "A pytest plugin that runs these tests in this order, until one falls."

    def __init__(self, names, limits): self.names, self.limits, self.fell = names, limits, None

    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        self.fell = run_items(session, [items[n] for n in self.names], self.limits)
        return True


def anew(folder: Path, m: Mutant, names, limits):
    "The same with the module changed in the copy, and imported from there."
    def work():
        only = Only(names, limits)
        sys.dont_write_bytecode = True
        status = start(folder, dict.fromkeys(n.split("::")[0] for n in names), only)
        return only.fell or (None if status == 0 else "it cannot be imported")
    path = folder / m.module
    before, stat = path.read_bytes(), path.stat()
    path.write_text(source_of(folder, m), "utf-8")
    try: return in_child(work, 60 + sum(limits[n] for n in names))
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def try_all(folder: Path, chosen: list[Mutant], floors, tests, seconds, patience, kept, show) -> dict[Mutant, str | None]:
    "mutant -> the test that fell, or None: nobody noticed."
    table = measured(folder, floors, tests, kept)
    limits = {t: patience + 10 * usual for t, (usual, _) in table.items()}
    plan = {m: who_sees(folder, m, table, seconds) for m in chosen}
    fell = {m: None for m, names in plan.items() if not names}
    for m in fell: show(m, None)
    todo = [(m, plan[m]) for m in chosen if plan[m]]
    log = Path(tempfile.mkstemp()[1])

    def tell(m, name):  # in the process that serves
        with log.open("a") as f: f.write(json.dumps([chosen.index(m), name]) + "\n")
        if name != "anew": show(m, name)

    inside = [(m, names) for m, names in todo if m.inside]
    if inside:
        files = dict.fromkeys(n.split("::")[0] for _, names in inside for n in names)
        in_child(lambda: int(start(folder, files, Server(folder, inside, limits, tell))), quiet=False)
    for line in log.read_text().splitlines():
        i, name = json.loads(line)
        if name != "anew": fell[chosen[i]] = name
    log.unlink()
    for m, names in todo:
        if m not in fell:
            fell[m] = anew(folder, m, names[:40], limits) or (anew(folder, m, names, limits) if names[40:] else None)
            show(m, fell[m])
    return fell


# --- the table ---

def counts(some) -> dict:
    "How many mutants of each kind, and how many were caught."
    total, caught = Counter(k for k, _ in some), Counter(k for k, name in some if name)
    return {k: {"mutants": total[k], "caught": caught[k]} for k in sorted(total)}


def summary(fell: dict, reasons: dict) -> dict:
    "What evidence/mutations.json says of a sample."
    lost = [m for m in fell if fell[m] is None]
    survivors = [{"at": f"{m.module}:{m.line}", "where": m.where, "operator": m.operator, "before": m.before, "after": m.after,
                  "nth": m.nth, "equivalent": reasons.get(m.key)} for m in lost]
    equivalent = sum(bool(s["equivalent"]) for s in survivors)
    return {"mutants": len(fell), "caught": len(fell) - len(lost), "equivalent": equivalent,
            "share": round((len(fell) - len(lost)) / max(1, len(fell) - equivalent), 4),
            "modules": counts([(m.module, name) for m, name in fell.items()]),
            "operators": counts([(m.operator, name) for m, name in fell.items()]), "survivors": survivors}


def key_of(survivor: dict) -> str:
    return " | ".join((survivor["at"].rsplit(":", 1)[0], *(str(survivor[k]) for k in ("where", "operator", "before", "after", "nth"))))


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, default=[150, 60], help="mutants of each sample; the second has none of the first")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; the second has the next")
    parser.add_argument("--seconds", type=float, default=60., help="of tests for each mutant")
    parser.add_argument("--patience", type=float, default=20., help="seconds that a test may take beyond ten times its usual ones")
    parser.add_argument("--only", help="all mutants of the modules with this in their name; nothing is written")
    parser.add_argument("--list", action="store_true", help="name the mutants, and do no more")
    parser.add_argument("--root", type=Path, default=root, help="of the repository")
    parser.add_argument("--floors", nargs="+", default=FLOORS, help="folders of modules")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders of tests")
    args = parser.parse_args(args)
    path = args.root / TABLE
    table = json.loads(path.read_text("utf-8")) if path.exists() else {"samples": []}
    reasons = {key_of(s): s["equivalent"] for sample in table["samples"] for s in sample["survivors"] if s["equivalent"]}
    found = mutants(args.root, args.floors)
    if args.only: found = [m for m in found if args.only in m.module]
    samples, left = [], found
    for i, n in enumerate(args.numbers):
        samples.append(found if args.only else draw(left, n, args.seed + i))
        left = [m for m in left if m not in set(samples[-1])]
    if args.list: return [print(f"{m.module}:{m.line} {m.operator}: {m.before}  →  {m.after}") for m in found]
    source = b"".join(p.read_bytes() for p in sorted((args.root / Path(args.floors[0]).parts[0]).rglob("*.py")))
    kept = args.root / "runs/mutations"
    kept.mkdir(parents=True, exist_ok=True)
    log = kept / f"caught-{hashlib.sha256(source).hexdigest()[:16]}.jsonl"
    before = dict(json.loads(line) for line in log.read_text("utf-8").splitlines()) if log.exists() else {}
    chosen = list(dict.fromkeys(m for m in itertools.chain(*samples) if m.key not in before and m.key not in reasons))
    print(f"{len(chosen)} of {len(found)} mutants in {len({m.module for m in found})} modules", flush=True)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background may have lost
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if args.root == root:
        for name in WARM: importlib.import_module(name)

    def show(m, name):
        if name:
            with log.open("a", encoding="utf-8") as f: f.write(json.dumps([m.key, name]) + "\n")
        print(f"{'caught  ' if name else 'SURVIVED'} {m.module}:{m.line} {m.operator}: {m.before[:90]}  →  {m.after[:90]}" +
              (f"   [{name[:120]}]" if name else ""), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder).resolve() / "copy"
        shutil.copytree(args.root, copied, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "_site", "_build", "__pycache__", ".hypothesis"))
        fell = try_all(copied, chosen, args.floors, args.tests, args.seconds, args.patience, kept, show)
    if args.only: return None
    table = {"tests": args.tests, "samples": []}
    for i, sample in enumerate(samples):  # None too where it has been judged
        new = {"seed": args.seed + i, **summary({m: fell.get(m, before.get(m.key)) for m in sample}, reasons)}
        table["samples"].append(new)
        print(f"{new['caught']} of {new['mutants']} caught, {new['equivalent']} equivalent: {new['share']:.1%} of the others")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return None


if __name__ == "__main__": main()
