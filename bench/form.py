"""What a comparison is made of. A case has sides, each run in a process of its own, and rows that say which two to divide."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Job:
    "What a side does once it is set up, in its own process."

    run: Callable[
        [], dict | None
    ]  # the work that is timed; may return the CPU-seconds of its phases
    check: Callable[[Any], dict] | None = (
        None  # given what the first side passes on: {"numbers": …, "given": …}
    )
    packages: tuple[
        str, ...
    ] = ()  # whose versions belong in the record, beside torch and transformers


@dataclass
class Side:
    label: str
    make: str  # "bench.cases.logprobs:ours", a function that returns a Job
    settings: dict = field(default_factory=dict)
    environment: str | None = None  # a key of ENVIRONMENTS; None: the one that runs this
    agrees: str | None = (
        "all"  # sides with the same word must compute the same numbers; None: nothing to compare
    )


@dataclass
class Row:
    name: str
    ours: str  # a side
    peer: (
        str | float | None
    )  # a side; or a number in the row's unit; None: ours has no peer, the goal is for itself
    what: str = "cpu"  # "cpu", "peak", or a phase
    flip: bool = False  # False: ours over the peer's. True: the peer's over ours, how many times faster we are
    goal: str | None = None  # "≤ 1.25", "≥ 1.8"
    limit: str | float | None = (
        None  # a side that does only what cannot be left out; or a number, on the ratio's scale
    )
    limit_why: str = ""
    peer_label: str = ""  # where the peer is a number
    note: str = ""
    unit: str = ""  # "": MiB of a peak, CPU-seconds of anything else


@dataclass
class Case:
    name: str  # a group of it is the word before the first space
    sides: dict[str, Side]
    rows: list[Row]
    tolerance: float = 1e-3  # relative, of the numbers that must agree
    peaks: tuple[str, ...] = ()  # sides whose memory is measured, each in a fresh process
    repeats: int | None = None  # fewer than asked, where one takes long
    optional: bool = False  # only when it is named
    together: bool = (
        False  # the sides are timed in one process: where they are few lines and share all imports
    )

    @property
    def group(self) -> str:
        return self.name.split()[0]
