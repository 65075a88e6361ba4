"A stage of a run that keeps every state that it is shown, as it comes back from the files."

from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint
from instruct_goose.runs.resume import Stage


class Shelf(Stage):
    saved = None

    def __init__(self, directory, saved=None):
        self.directory, self.saved, self.kept = directory, saved, {}

    def after_step(self, at, of, state, often=1):
        self.kept[at] = load_checkpoint(save_checkpoint(self.directory, *state(), keep=1000))
