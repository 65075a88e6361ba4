"A stage of a run that keeps every state that it is shown, as it comes back from the files."

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from instruct_goose.core.state import State, flatten, unflatten
from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint


def through_files(directory: str | Path, state: State) -> State:
    "The state after it has been written to a checkpoint and read again."
    tensors, record = flatten(state)
    path = save_checkpoint(directory, tensors, record, keep=1000)
    return unflatten(*load_checkpoint(path))


class Shelf:
    "A `StageStore`: `kept[n]` is the state after n steps; `newest_state` is where the stage begins."

    def __init__(self, directory: str | Path, saved: State | None = None):
        self.directory = directory
        self.newest_state = saved
        self.kept: dict[int, State] = {}

    def uninterrupted_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def offer_state(self, done: int, total: int, state: Callable[[], State]) -> None:
        pass

    def after_step(self, done: int, total: int, state: Callable[[], State]) -> None:
        self.kept[done] = through_files(self.directory, state())
