"Where the recorded runs of the gallery start."

from instruct_goose.recipes.quickstart import QuickstartConfig, make_start
from instruct_goose.tasks.gallery import RUN, WORLD, World


def gallery_world(seed: int) -> World:
    "Train the language model and the reward model that the runs of one seed start from."
    start = make_start(QuickstartConfig(**WORLD | RUN, seed=seed))
    return World(start.data.prompts, start.tokenizer, start.lm, start.reward_model)
