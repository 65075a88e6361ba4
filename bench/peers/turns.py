"""A trainer's own loop, one iteration at a time: it runs in a thread that waits at the head of each iteration until it is asked."""

import threading
from collections.abc import Callable

from bench.measure import cpu


class Turns:
    def __init__(self, train: Callable):
        self.go = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.error = None
        self.train = train
        self.thread = None
        self.marks = {}

    def gate(self):
        "Called by the trainer between two iterations."
        self.done.release()
        self.go.acquire()

    def mark(self, name: str):
        self.marks[name] = cpu()

    def first(self, name: str):
        self.marks.setdefault(name, cpu())

    def loop(self):
        try:
            self.train()
        except BaseException as e:
            self.error = e
        self.done.release()

    def step(self):
        "One iteration. Raises what the trainer raises."
        if self.thread is None:  # up to the head of the first
            self.thread = threading.Thread(target=self.loop, daemon=True)
            self.thread.start()
            self.done.acquire()
        if self.error:
            raise self.error
        self.marks = {"start": cpu()}
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error
        self.marks["end"] = cpu()
