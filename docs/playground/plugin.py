"A surrogate of my own: instruct-goose train --plugin my_loss.py --surrogate soft_brake …"

from instruct_goose.objective.policy_loss import SURROGATES, Surrogate


def soft_brake(x):
    "ρ·Â − ½b·(log ρ)²: no clip; what leaves ρ = 1 is pulled back."
    distance = x.ratio.log().square() / 2
    return x.ratio * x.advantages - x.settings["brake"] * distance


SURROGATES["soft_brake"] = Surrogate(soft_brake, settings={"brake": 2.0})
