"""Train the playground with a reader's loss: Python gives its gradient, JavaScript does the rest.

What the reader edits is the exported source of `objective` itself. The modules are loaded anew with
the reader's text in the place of their own, so that everything which imports them uses it. The
text of a plug-in, as `instruct-goose train --plugin` takes it, is run after them.
"""

import ast
import importlib
import importlib.abc
import importlib.util
import json
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

PACKAGE = "instruct_goose"
PARTS = {  # what can be edited: the module, and the definitions that the editor shows
    "surrogate": (
        "objective.policy_loss",
        ("clipped_objective", "_weight_objective", "_weight_clipped", "SURROGATES", "policy_loss"),
    ),
    "value loss": ("objective.value_loss", ("value_loss",)),
    "whole loss": ("objective.ppo", ("ppo_loss",)),
    "advantage": ("objective.advantages", ("td_errors", "gae", "group_advantages", "ADVANTAGES")),
    "KL estimator": ("objective.kl", ("k1", "k2", "k3", "ESTIMATORS", "kl_in_reward")),
    "average": ("objective.masks", ("AGGREGATES", "aggregate", "whiten")),
}
PLUGIN = "plug-in"  # a text of the reader's own
TABLES = {  # what a plug-in adds to, and the setting of an algorithm that names its entry
    "surrogate": ("objective.policy_loss", "SURROGATES"),
    "advantage": ("objective.advantages", "ADVANTAGES"),
    "aggregation": ("objective.masks", "AGGREGATES"),
}


class Mistake(Exception):
    "What is wrong with the reader's text: in which part, in which line, in words."

    def __init__(self, part: str | None, line: int | None, words: str):
        super().__init__(words)
        self.part = part
        self.line = line
        self.words = words


# --- the exported source, and the reader's in its place ---------------------------------------
def named(statement: ast.stmt) -> str | None:
    "What a statement of a module defines."
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
    target = getattr(target, "target", target)
    return target.id if isinstance(target, ast.Name) else None


class Source(NamedTuple):
    "The exported text of a part, and what stands before and after it in its module."

    before: str
    text: str
    after: str


def split_source(source: str, names: Sequence[str]) -> Source:
    "Take some definitions out of a module; they go where the last of them stood."
    lines = source.splitlines()
    texts = []
    end = 0
    for statement in ast.parse(source).body:
        if named(statement) in names:
            texts.append("\n".join(lines[statement.lineno - 1 : statement.end_lineno]))
            end = statement.end_lineno
            for number in range(statement.lineno - 1, statement.end_lineno):
                lines[number] = ""
    if len(texts) != len(names):
        raise LookupError(f"of {names} there are {len(texts)} in the module")
    return Source("\n".join(lines[:end]), "\n\n\n".join(texts) + "\n", "\n".join(lines[end:]))


@cache  # before a reader's text takes the place of a module
def exported_sources() -> dict[str, Source]:
    "Each part as it is exported."
    sources = {}
    for part, (module, names) in PARTS.items():
        spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
        sources[part] = split_source(Path(spec.origin).read_text("utf-8"), names)
    return sources


def exported_texts() -> dict[str, str]:
    "What the editor shows at first, by part."
    return {part: source.text for part, source in exported_sources().items()}


def place_of(part: str) -> str:
    "What stands for a file's name in errors from the reader's text."
    return f"<{part}>"


def compile_text(part: str, text: str):
    "Compile the reader's text; a Mistake if it is no Python."
    linecache.cache[place_of(part)] = (len(text), None, text.splitlines(True), place_of(part))
    try:
        return compile(text, place_of(part), "exec")
    except SyntaxError as error:
        raise Mistake(part, error.lineno, f"{type(error).__name__}: {error.msg}") from None


class EditedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Loads a module with the reader's text in the place of its own."

    def __init__(self, parts: dict[str, tuple[str, Source, object]]):
        self.parts = parts  # by the module's name: the part, its exported source, the new code

    def find_spec(self, name: str, path, target=None):
        if name not in self.parts:
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        _, source, code = self.parts[module.__name__]
        for one in (source.before, code, source.after):
            exec(one, vars(module))


def load_package(texts: dict[str, str], sources: dict[str, Source]) -> None:
    "Import the package anew, with these texts in the place of the exported ones."
    parts = {}
    for part, text in texts.items():
        if part != PLUGIN and text != sources[part].text:
            name = f"{PACKAGE}.{PARTS[part][0]}"
            parts[name] = (part, sources[part], compile_text(part, text))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    finder = EditedModules(parts)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(f"{PACKAGE}.tasks.playground")
    finally:
        sys.meta_path.remove(finder)


def table_of(setting: str) -> dict:
    module, name = TABLES[setting]
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def run_plugin(text: str) -> dict[str, str]:
    "Run the text of a plug-in; returns, by setting, the last entry that it has added."
    before = {setting: set(table_of(setting)) for setting in TABLES}
    exec(compile_text(PLUGIN, text), {"__name__": "plugin"})
    added = {}
    for setting in TABLES:
        for name in table_of(setting):
            if name not in before[setting]:
                added[setting] = name
    if not added:
        raise Mistake(
            PLUGIN,
            None,
            "The plug-in adds nothing to SURROGATES, ADVANTAGES or AGGREGATES: "
            "end it with SURROGATES['mine'] = Surrogate(my_function)",
        )
    return added


# --- which line of the reader's text ----------------------------------------------------------
def part_of(filename: str) -> str | None:
    "The part that a file's name stands for."
    part = filename[1:-1]
    return part if filename == place_of(part) and part in (*PARTS, PLUGIN) else None


def line_in_traceback(error: BaseException) -> tuple[str | None, int | None]:
    "The innermost line of the reader's text in which an error arose."
    found: tuple[str | None, int | None] = (None, None)
    for frame in traceback.extract_tb(error.__traceback__):
        if part_of(frame.filename) is not None:
            found = (part_of(frame.filename), frame.lineno)
    return found


def line_now() -> tuple[str, int] | None:
    "The line of the reader's text that is being run."
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        part = part_of(frame.f_code.co_filename)
        if part is not None:
            return part, frame.f_lineno
        frame = frame.f_back
    return None


class LastLine:
    "Watches a run, and knows the line of the reader's text that ran last, and that returned x."

    def __init__(self):
        self.last: tuple[str | None, int | None] = (None, None)
        self.returned: dict[int, tuple[str, int]] = {}  # by id of what was returned
        self.kept: list = []  # so that no id is given twice

    def watch(self, frame: FrameType, event: str, value: object):
        part = part_of(frame.f_code.co_filename)
        if part is None:
            return None
        self.last = (part, frame.f_lineno)
        if event == "return":
            self.kept.append(value)
            self.returned.setdefault(id(value), self.last)
        return self.watch

    def run(self, function: Callable) -> object:
        before = sys.gettrace()
        sys.settrace(self.watch)
        try:
            return function()
        finally:
            sys.settrace(before)


def line_that_is_not_finite(loss_of: Callable) -> tuple[str | None, int | None]:
    "The line of the reader's text whose operation is the first to give a gradient that is not finite."
    from page_tensors import autograd

    autograd.Mode.place = line_now
    try:
        loss = loss_of()
    finally:
        autograd.Mode.place = None
    walk = autograd.Walk()
    walk.send(autograd.edge_to(loss), [1.0])
    while walk.newest_first:
        node, arrived = walk.next_node()
        gradients = node.pull(arrived[0] if node.outputs == 1 else arrived)
        for edge, g in zip(node.edges, gradients, strict=False):
            if edge is None or g is None:
                continue
            if node.place is not None and not all(map(math.isfinite, g)):
                return node.place
            walk.send(edge, g)
    return None, None


# --- training ---------------------------------------------------------------------------------
class Batch(NamedTuple):
    "What an iteration has sampled and compared; rows are responses."

    settings: object  # PlaygroundSettings
    algorithm: dict
    lengths: list[int]
    mask: object  # tensors, (batch, time)
    old_logprobs: object
    ref_logprobs: object
    advantages: object
    returns: object  # None: no critic


SHOWN = ("policy_loss", "value_loss", "entropy", "clip_fraction")  # parts that the page shows


class Gradient(NamedTuple):
    "The loss of a minibatch, its parts, and its gradient at each real token, row after row."

    loss: float
    parts: dict[str, float]
    logprobs: list[float]
    values: list[float]
    entropy: list[float]


def in_rows(numbers: Sequence[float], lengths: Sequence[int], width: int):
    "Numbers of real tokens, one after the other, as a tensor of rows that are filled with 0."
    import torch

    rows = []
    at = 0
    for n in lengths:
        rows.append([*numbers[at : at + n], *[0.0] * (width - n)])
        at += n
    return torch.tensor(rows, dtype=torch.float64)


def real_tokens(x, mask) -> list[float]:
    "The numbers of a tensor at the real tokens, one after the other; None counts as 0."
    return [0.0] * int(mask.sum()) if x is None else x[mask].tolist()


class Loss:
    "A reader's loss: what JavaScript asks for in each iteration."

    def __init__(self, texts: dict[str, str]):
        self.added: dict[str, str] = {}  # by a plug-in: setting → entry
        self.batch: Batch | None = None
        self.is_checked = False  # has a loss of this text had the right shape?
        sources = exported_sources()
        unknown = set(texts) - {*PARTS, PLUGIN}
        if unknown:
            raise LookupError(f"there is no part {sorted(unknown)}")
        self.checked(lambda: load_package(texts, sources))
        if texts.get(PLUGIN):
            self.added = self.checked(lambda: run_plugin(texts[PLUGIN]))
        self.playground = sys.modules[f"{PACKAGE}.tasks.playground"]

    # what JavaScript asks for
    def prepare(self, settings: dict, lengths, scores, logprobs, ref_logprobs, values) -> dict:
        "Rewards, advantages and returns of a batch, each one number per real token."
        import torch

        own = self.playground
        known = own.PlaygroundSettings.__dataclass_fields__
        chosen = own.PlaygroundSettings(**{k: x for k, x in settings.items() if k in known})
        algorithm = {**own.ALGORITHMS[chosen.algorithm], **self.added}
        lengths = list(lengths)
        width = max(lengths)
        mask = torch.tensor([[t < n for t in range(width)] for n in lengths])
        scores = torch.tensor(list(scores), dtype=torch.float64)
        per_token = [in_rows(x, lengths, width) for x in (logprobs, ref_logprobs, values)]

        def make():
            old, ref, old_values = per_token
            return own.rewards_and_advantages(scores, old, ref, mask, old_values, algorithm, chosen)

        made = dict(zip(("rewards", "advantages", "returns"), self.checked(make), strict=True))
        for name, x in made.items():
            if x is None:
                continue
            refuse_shape(x, mask.shape, f"What is returned as {name}", make)
            if not x[mask].isfinite().all():
                raise Mistake(*last_line_of(make), f"The {name} are not finite")
        old, ref, _ = per_token
        self.batch = Batch(
            chosen, algorithm, lengths, mask, old, ref, made["advantages"], made["returns"]
        )
        return {name: real_tokens(x, mask) for name, x in made.items() if x is not None}

    def gradient(self, rows, logprobs, values, entropy) -> Gradient:
        "The loss of the given rows, and its gradient at each real token."
        rows = list(rows)
        batch = self.batch
        lengths = [batch.lengths[b] for b in rows]
        mask = batch.mask[rows]
        width = batch.mask.shape[1]
        new, new_values, new_entropy = [
            in_rows(x, lengths, width).requires_grad_() for x in (logprobs, values, entropy)
        ]
        has_critic = batch.returns is not None

        def make():
            return self.playground.minibatch_loss(
                new,
                batch.old_logprobs[rows],
                batch.ref_logprobs[rows],
                mask,
                batch.advantages[rows],
                new_values if has_critic else None,
                batch.returns[rows] if has_critic else None,
                new_entropy,
                batch.algorithm,
                batch.settings,
            )

        if not self.is_checked:
            self.check_shapes(new, rows)
            self.is_checked = True
        loss, parts = self.checked(make)
        if loss.requires_grad:
            self.checked(loss.backward)
        if new.grad is None:
            raise Mistake(
                *last_line_of(make), "The loss does not depend on log π: nothing would be learnt"
            )
        gradients = [real_tokens(x.grad, mask) for x in (new, new_values, new_entropy)]
        if not all(math.isfinite(g) for one in gradients for g in one):
            place = line_that_is_not_finite(lambda: make()[0])
            raise Mistake(*place, "Here the gradient stops being finite")
        if not loss.isfinite():
            raise Mistake(*last_line_of(make), f"The loss is {loss.item()}")
        numbers = {name: parts[name].item() for name in SHOWN if name in parts}
        return Gradient(loss.item(), numbers, *gradients)

    # what can be wrong
    def checked(self, function: Callable):
        "Run a function of the reader's; what it raises becomes a Mistake."
        try:
            return function()
        except Mistake:
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            part, line = line_in_traceback(error)
            if part is None:
                part, line = last_line_of(function)
            raise Mistake(part, line, words) from None

    def check_shapes(self, new, rows: list[int]) -> None:
        "Refuse a surrogate, or a loss, without one number per token, which would broadcast."
        batch = self.batch
        losses = sys.modules[f"{PACKAGE}.objective.policy_loss"]
        mask = batch.mask[rows]
        old_logprobs = batch.old_logprobs[rows]
        advantages = batch.advantages[rows]
        surrogate = batch.algorithm["surrogate"]
        level = batch.algorithm["ratio_level"]
        clip = batch.settings.clip
        inputs = losses.SurrogateInputs(
            losses.probability_ratio(new, old_logprobs, mask, level=level),
            new,
            advantages,
            mask,
            clip,
            settings=losses.complete_settings(surrogate),
        )

        def objective():
            return losses.SURROGATES[surrogate].objective(inputs)

        def loss():
            return losses.policy_loss(
                new, old_logprobs, advantages, mask, clip, level=level, surrogate=surrogate
            )

        refuse_shape(self.checked(objective), mask.shape, "The surrogate", objective)
        refuse_shape(self.checked(loss), mask.shape, "The loss", loss)


def last_line_of(function: Callable) -> tuple[str | None, int | None]:
    "The line of the reader's text that runs last in a function, which may raise."
    watch = LastLine()
    try:
        watch.run(function)
    except Exception:
        return watch.last
    return watch.last


def refuse_shape(x, expected: tuple, name: str, again: Callable) -> None:
    "A Mistake, if what the reader's text made does not have one number per token."
    found = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
    expected = tuple(expected)
    if found == expected:
        return
    watch = LastLine()
    returned = watch.run(again)
    part, line = watch.returned.get(id(returned), watch.last)
    raise Mistake(
        part, line, f"{name} has the shape {found}; expected is {expected}, one per token"
    )


# --- asked by JavaScript, in JSON -------------------------------------------------------------
LOSSES: list[Loss] = []  # the one that is trained with


def as_json(function: Callable) -> str:
    "What a function returns, or the reader's mistake, as JSON."
    try:
        return json.dumps(function())
    except Mistake as mistake:
        said = {"part": mistake.part, "line": mistake.line, "words": mistake.words}
        return json.dumps({"mistake": said})


def new_loss(texts: str) -> str:
    "Train with these texts from now on."

    def make():
        LOSSES[:] = [Loss(json.loads(texts))]
        return {"added": LOSSES[0].added}

    return as_json(make)


def prepare(*given: str) -> str:
    "See Loss.prepare."
    return as_json(lambda: LOSSES[0].prepare(*map(json.loads, given)))


def gradient(*given: str) -> str:
    "See Loss.gradient."

    def make():
        loss, parts, *gradients = LOSSES[0].gradient(*map(json.loads, given))
        return {"loss": loss, "parts": parts, "gradients": gradients}

    return as_json(make)


def editor_texts() -> str:
    "What the editor shows at first."
    return json.dumps(exported_texts())
