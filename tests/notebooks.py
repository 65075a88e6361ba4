"""Run notebooks as nbdev-test does, each in a process of its own, and say for each that fails in which cell, at which line, and why.

python tests/notebooks.py                                     all of them
python tests/notebooks.py learn/16_trainer reference   some, by their names in nbs/
python tests/notebooks.py --without learn/16_trainer     all others
python tests/notebooks.py --json FILE                         what happened, for a program
python tests/notebooks.py --save                              store what they print and draw
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import transformers
from execnb.shell import CaptureShell
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_nb

os.environ.setdefault(
    "CUDA_VISIBLE_DEVICES", ""
)  # lessons are written for a CPU; `make portable ARGS=gpu` shows them a GPU
root = Path(__file__).parents[1]
nbs = root / "nbs"
LONGEST = [
    "learn/03_quickstart",
    "guides/pseudo_code",
]  # begun first, so that no worker is left alone with one
# loaded once, before the processes are forked: most lessons need them, and they take seconds
OFTEN = [
    "beartype",
    "jaxtyping",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "mpl_toolkits.mplot3d",
    "nbformat",
    "pandas",
    "peft",
    "plotly.io",
    "pytest",
    "transformers.trainer_utils",
    "transformers.models.auto.modeling_auto",
]
forking = threading.Lock()  # filelock refuses a fork while another thread is within one


def title(path: Path) -> str:
    return path.relative_to(nbs).with_suffix("").as_posix()


def find(names: list[str]) -> list[Path]:
    "The notebooks of these names or folders, all of them without; an unknown name is an error."
    every = {title(p): p for p in sorted(nbglob(nbs, as_path=True))}
    chosen = {
        n: [t for t in every if f"{t}/".startswith(f"{n.removesuffix('.ipynb')}/")] for n in names
    }
    if unknown := [n for n, found in chosen.items() if not found]:
        sys.exit(f"no such notebook: {', '.join(unknown)}")
    order = sorted(every, key=lambda t: t not in LONGEST)
    return [every[t] for t in order if not names or any(t in found for found in chosen.values())]


def shared_modules() -> list[str]:
    "Modules of the package that a notebook would share with others, with what they registered."
    return sorted(name for name in sys.modules if name.split(".")[0] == "instruct_goose")


def run(path: Path, save: bool) -> dict:
    "One notebook; `fell` is None, or where and why."
    if loaded := shared_modules():
        error = f"{', '.join(loaded)} was imported before: a notebook has to run alone"
        return {"name": title(path), "seconds": 0.0, "fell": {"error": error}}
    cfg = get_config()
    pretty = CaptureShell.prettytb
    fell = {}

    def caught(shell, *args, **kwargs):
        "nbdev asks for this text when a cell has failed, and drops the rest."
        cell = shell._cell_idx - 1
        error = shell.exc
        lines = [
            f.line
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename.startswith("<ipython")
        ] or [""]
        words = " ".join(traceback.format_exception_only(error)[-1].split())[:500]
        if words == "AssertionError":
            words += f": {lines[-1]}"
        fell.update(
            cell=cell,
            id=json.loads(path.read_text("utf-8"))["cells"][cell].get("id"),
            line=lines[0],
            error=words,
        )
        return pretty(shell, *args, **kwargs)

    CaptureShell.prettytb = caught
    ok, seconds = run_nb(
        path,
        skip_flags=cfg.tst_flags.split(),
        basepath=cfg.config_path,
        cell_timeout=cfg.cell_timeout,
        save=save,
    )
    return {
        "name": title(path),
        "seconds": round(seconds, 1),
        "fell": None if ok else fell or {"error": "it could not be read"},
    }


def in_a_process(path: Path, save: bool = False) -> dict:
    "A fresh process for each notebook; no daemon, since lessons start processes of their own."
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(run(path, save)))
    with forking:
        process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        result = {"name": title(path), "seconds": 0.0, "fell": {"error": "its process died"}}
    process.join()
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--without", nargs="*", default=[], help="names that are left out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="store the outputs in the notebooks")
    args = parser.parse_args()
    paths = [p for p in find(args.names) if title(p) not in args.without]
    results = []
    for name in OFTEN:
        importlib.import_module(name)
    for name in (
        "AutoModelForCausalLM",
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "PreTrainedTokenizerFast",
    ):
        getattr(transformers, name)
    os.chdir(nbs)
    with ThreadPoolExecutor(args.workers) as pool:
        for done in as_completed([pool.submit(in_a_process, p, args.save) for p in paths]):
            results.append(r := done.result())
            print(
                f"{'FAILED' if r['fell'] else 'ok    '} {r['name']:<34} {r['seconds']:6.1f} s",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(sorted(results, key=lambda r: r["name"])), "utf-8")
    fell = [r for r in results if r["fell"]]
    for r in sorted(fell, key=lambda r: r["name"]):
        f = r["fell"]
        print(
            f"FAILED {r['name']}, cell {f.get('cell')} ({f.get('id')}): {f.get('line', '')}\n       why: {f['error']}"
        )
    print(f"{len(results) - len(fell)} of {len(results)} notebooks ran to the end")
    sys.exit(bool(fell))


if __name__ == "__main__":
    main()
