"""`make bench`: ours and the peers side by side, row by row into bench/results.json.

python -m bench.run                     all rows but the quickstart
python -m bench.run logprobs grpo       these groups; a part of a row's name will do
python -m bench.run quickstart          the quickstart, about a minute a repeat
python -m bench.run trials              what was tried to make an update cheaper
python -m bench.run --repeats 9         more of them: a narrower guess of the median
python -m bench.run --list              what there is
"""

import argparse
import sys
from importlib import import_module

from bench.environments import Missing, python_of
from bench.form import Case
from bench.measure import EXACT
from bench.record import entry, write
from bench.worker import SideFailed, Worker, answer, versions

GROUPS = ("logprobs", "ppo", "grpo", "sampling", "annotate", "command", "trials")


def cases() -> list[Case]:
    return [case for group in GROUPS for case in import_module(f"bench.cases.{group}").CASES]


def wanted(words: list[str], all_cases: list[Case]) -> list[Case]:
    "The cases that a word names, by their own name or by one of a row."
    if not words:
        return [c for c in all_cases if not c.optional]

    def said(c, w):
        return w in c.name or any(w in row.name for row in c.rows)

    if unknown := [w for w in words if not any(said(c, w) for c in all_cases)]:
        raise SystemExit(f"no row is called {unknown[0]!r}: python -m bench.run --list")
    return [c for c in all_cases if any(said(c, w) for w in words)]


def differ(a, b, tolerance: float) -> str | None:
    "Where two sides' numbers are not the same, in words."
    for name in a:
        if name not in b:
            continue
        x, y = (v if isinstance(v, list) else [v] for v in (a[name], b[name]))
        if len(x) != len(y):
            return f"{name}: {len(x)} numbers and {len(y)}"
        far = [
            (p, q) for p, q in zip(x, y) if not abs(p - q) <= tolerance * max(abs(p), abs(q), 1e-2)
        ]
        if far:
            return f"{name}: {far[0][0]:.7g} and {far[0][1]:.7g}"
    return None


def check(case: Case, workers: dict[str, Worker]) -> dict[str, str]:
    "Side -> why it may not be compared. The first of those that must agree says what the others are given, and is right."
    reasons, first = {}, {}
    for name, worker in workers.items():
        group = case.sides[name].agrees
        if group is None:
            continue
        try:
            said = worker.ask("check", first[group][1].get("given") if group in first else None)
        except SideFailed as e:
            reasons[name] = str(e)
            continue
        if group not in first:
            first[group] = (name, said)
            continue
        other, known = first[group]
        if said["numbers"] is None or known["numbers"] is None:
            continue
        shared = known["numbers"].keys() & said["numbers"].keys()
        wrong = (
            differ(known["numbers"], said["numbers"], case.tolerance)
            if shared
            else "no number in common"
        )
        if wrong:
            reasons[name] = f"not the same numbers as {case.sides[other].label}: {wrong}"
    return reasons


def start(case: Case) -> tuple[dict[str, Worker], dict[str, str], dict[str, str]]:
    "The workers that could be started; why a peer is missed; and what went wrong with our own sides."
    workers, missed, errors = {}, {}, {}
    for name, side in case.sides.items():
        try:
            workers[name] = (
                Here(side) if case.together else Worker(side, python_of(side.environment))
            )
        except (Missing, SideFailed) as e:
            (missed if side.environment else errors)[name] = str(e)
    return workers, missed, errors


def measure(case: Case, repeats: int) -> list[dict]:
    "The objects of the case's rows."
    workers, missed, errors = start(case)
    versions = {name: w.versions for name, w in workers.items()}
    runs = {}
    try:
        errors |= check(case, workers)
        fit = {name: w for name, w in workers.items() if name not in errors}
        for w in fit.values():
            w.ask("run")  # to get warm
        runs = {name: [] for name in fit}
        for i in range(min(repeats, case.repeats or repeats)):
            for name in list(fit)[:: -1 if i % 2 else 1]:
                runs[name].append(fit[name].ask("run"))  # who goes first changes
    except SideFailed as e:
        runs = {}
        errors = errors | {name: str(e) for name in case.sides if name not in missed}
    finally:
        for w in workers.values():
            w.close()
    for name in case.peaks:
        if name in runs:
            add_peaks(case, name, runs[name])
    return [entry(case, row, runs, versions, missed, errors) for row in case.rows]


class Here:
    "What Worker is, in this process."

    def __init__(self, side):
        import torch

        torch.set_num_threads(1)
        module, name = side.make.split(":")
        self.job = getattr(import_module(module), name)(**side.settings)
        self.versions = {"python": sys.version.split()[0], **versions(self.job.packages)}

    def ask(self, do: str, given=None) -> dict:
        return answer(self.job, do, given)

    def close(self):
        pass


def add_peaks(case: Case, name: str, runs: list[dict]):
    "Two fresh processes, or one."
    found = []
    for _ in runs[: 1 if case.together else 2]:
        worker = Worker(case.sides[name], python_of(case.sides[name].environment), **EXACT)
        try:
            found.append(worker.ask("peak")["peak"])
        finally:
            worker.close()
    for i, run in enumerate(runs):
        run["peak"] = found[i % len(found)]


def line(row: dict) -> str:
    "One row on the screen."
    why = row.get("error") or row.get("missed")
    if why:
        return f"  {row['name']}: {'ERROR' if 'error' in row else 'missed'}: {why}"
    value = row["ratio"] if row["ratio"] is not None else row["ours"]["median"]
    spread = f" ({row['spread'][0]}–{row['spread'][1]})" if row["spread"] else ""
    goal = f"   goal {row['goal']}: {'met' if row['met'] else 'MISSED'}" if row["goal"] else ""
    limit = f"   limit {row['limit']['ratio']}" if row["limit"] else ""
    unit = f" {row['unit']}" if row["ratio"] is None else f"×  {row['of']}"
    return f"  {row['name']}: {value}{unit}{spread}{goal}{limit}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="groups, or parts of rows' names; all without")
    parser.add_argument("--repeats", type=int, default=5, help="of each side, taking turns")
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    args = parser.parse_args()
    for case in wanted(args.names, cases()):
        print(f"\033[1m· {case.name}\033[0m", flush=True)
        rows = [] if args.list else measure(case, args.repeats)
        if args.list:
            print(*(f"  {row.name}" for row in case.rows), sep="\n")
        else:
            write(rows)
        for row in rows:
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
