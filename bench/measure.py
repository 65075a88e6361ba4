"""CPU time beside wall time, and the most memory that a piece of work adds to a process."""

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def cpu() -> float:
    "CPU-seconds of this process and of the children that it has waited for, every thread of them."
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def timed(work: Callable) -> dict:
    "{cpu, wall, phases}: seconds of one run."
    c = cpu()
    w = time.perf_counter()
    phases = work()
    return {"cpu": cpu() - c, "wall": time.perf_counter() - w, "phases": phases or {}}


def status(field: str) -> int:
    return (
        next(
            int(line.split()[1])
            for line in STATUS.read_text().splitlines()
            if line.startswith(field)
        )
        * 1024
    )


def peak(work: Callable) -> dict:
    """{peak, how}: MiB at the highest point of the work, less what the process held before. On Linux the work is done once before, so
    that what a library loads at its first call is not counted, and the mark is taken back; elsewhere ru_maxrss knows only the highest
    point ever, and the first time is the one that counts."""
    try:
        RESET.write_text("5")
        work()
        RESET.write_text("5")  # the high-water mark becomes what is held now
        before = status("VmRSS")
        how = "VmHWM - VmRSS"
        work()
        return {"peak": (status("VmHWM") - before) / MIB, "how": how}
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        work()
        return {
            "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before) / MIB,
            "how": "ru_maxrss",
        }


# freed blocks of a MiB go back to the system at once, so that what is held is what is used
EXACT = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}


def quiet(threads: int = 1) -> dict[str, str]:
    "The environment of every process that is measured: one thread, none that waits by spinning, no network."
    n = str(threads)
    return os.environ | {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
