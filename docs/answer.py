"""Runs a reader's answer in plain Python and says what a lesson's checker would say. The browser runs this file (Pyodide), and so do the tests."""

import contextlib
import io
import json
import traceback

FILE, LIMIT = (
    "your code",
    10_000,
)  # what tracebacks call the reader's lines, and how many printed signs are kept


class Printed(io.TextIOBase):
    "What the reader's code prints, up to LIMIT signs: a loop may print for ever."

    text = ""

    def write(self, more):
        self.text = (self.text + more)[:LIMIT]
        return len(more)


def shape(x):
    "() of a number, (2, 3) of two rows of three; None where it is something else or its rows differ."
    if isinstance(x, bool | int | float):
        return ()
    if not isinstance(x, list | tuple):
        return None
    inner = {shape(y) for y in x} or {()}
    return None if len(inner) > 1 or None in inner else (len(x), *inner.pop())


def in_words(shape):
    if not shape:
        return "one number"
    if len(shape) == 1:
        return f"a list of {shape[0]}"
    return " rows of ".join(map(str, shape))


def flat(x):
    return [z for y in x for z in flat(y)] if isinstance(x, list | tuple) else [float(x)]


def close(x, y):
    return all(
        a == b or abs(a - b) <= 1e-6 + 1e-5 * abs(b) for a, b in zip(flat(x), flat(y), strict=True)
    )


def shown(x):
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(shown, x))}]"
    return f"{x:.4f}" if isinstance(x, float) else str(x)


def mishap(error):
    "An error with the line of the reader's code that it comes from."
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        lines = [error.lineno]
        said = error.msg
    elif isinstance(error, ModuleNotFoundError):
        said = f"there is no {error.name} on this page, only Python and what comes with it"
    else:
        said = str(error)
    return (
        f"it raised {type(error).__name__}"
        + f": {said}" * bool(said)
        + (f" (line {lines[-1]} of your code)" if lines else "")
    )


def verdict_on(answer, name, cases):
    "As lesson.diagnose on the lesson's own numbers, then on the numbers of its later checks, then on others."
    for case in cases:
        args = json.loads(json.dumps(case["args"]))
        right = case["right"]  # an answer may change what it is given
        got = answer(*args)
        if got is None:
            return "nothing returned yet: write the function, then run this again"
        if shape(got) is None and isinstance(got, list | tuple):
            return "type: return numbers, in rows of one length"
        if shape(got) is None:
            return f"type: return {in_words(shape(right))}, not {type(got).__name__}"
        if shape(got) != shape(right):
            return f"shape: yours is {in_words(shape(got))}, expected {in_words(shape(right))}"
        if close(got, right):
            continue
        if "otherwise" in case:
            return case["otherwise"]
        named = (said for said, wrong in case.get("mistakes", {}).items() if close(got, wrong))
        call = f"{name}({', '.join(map(shown, case['args']))})"
        asked = (
            "" if "mistakes" in case else f"right on the lesson's numbers, not on others: {call}: "
        )
        return next(named, f"{asked or 'not yet: '}you have {shown(got)}, expected {shown(right)}")
    return "right"


def check(code, exercise):
    "JSON of the verdict and what was printed; `exercise` is the JSON of its name and cases."
    name, cases = (json.loads(exercise)[k] for k in ("name", "cases"))
    printed = Printed()
    space = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, FILE, "exec"), space)
            if not callable(space.get(name)):
                verdict = f"{name} is gone: the function has to keep its name"
            else:
                verdict = verdict_on(space[name], name, cases)
    except BaseException as error:  # SystemExit too: it must not end the page's Python
        verdict = mishap(error)
    return json.dumps({"verdict": verdict, "printed": printed.text})
