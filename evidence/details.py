"""What each detail of PPO brings: the exact world's trainer with one thing changed, and how far from the best policy it ends.

python evidence/run.py details        writes evidence/details.json, about five CPU-minutes
"""

import torch

from instruct_goose.tasks.exact_world import converge, exact_config, make_world

SEEDS = (0, 1, 2)
BETA = 1.0
SIZES = dict(steps=40, batch_size=96, lr_schedule="linear", lr=2e-3)
CHANGES: dict[str, dict] = {  # what is changed of the preset "ppo"
    "as it is": {},
    "advantages not whitened": dict(whiten_advantages=False),
    "no clip": dict(surrogate="ratio"),
    "value loss not clipped": dict(value_clip=None),
    "no values: the return itself": dict(advantage="return"),
    "λ = 0": dict(lam=0.0),
    "λ = 1": dict(lam=1.0),
    "one epoch": dict(epochs=1),
    "eight epochs": dict(epochs=8),
    "one minibatch": dict(minibatches=1),
    "learning rate constant": dict(lr_schedule="constant"),
    "learning rate ten times": dict(lr=2e-2),
    "no gradient clipping": dict(max_grad_norm=1e9),
    "entropy bonus of .1": dict(ent_coef=0.1),
    "Adam's ε = 1e-5": dict(eps=1e-5),
}


def one(change: dict, seed: int) -> dict:
    "Total variation to the optimum at the end, mean of the last five iterations; KL and reward of the last."
    settings = {k: v for k, v in change.items() if k != "eps"}
    eps = change.get("eps", 1e-8)
    usual = torch.optim.AdamW.__init__

    def init(self, *args, **kw):
        usual(self, *args, **{**kw, "eps": eps})

    torch.optim.AdamW.__init__ = init
    try:
        config = exact_config("ppo", BETA, seed=seed, **SIZES | settings)
        run = converge(make_world("absolute"), config)
    finally:
        torch.optim.AdamW.__init__ = usual
    return {
        "seed": seed,
        "tv": round(sum(run["tv"][-5:]) / 5, 4),
        "kl": round(run["kl"][-1], 4),
        "reward": round(run["reward"][-1], 4),
        "cpu_seconds": round(run["cpu_seconds"], 1),
    }


def details() -> dict:
    torch.set_num_threads(1)
    runs = {}
    for name, change in CHANGES.items():
        runs[name] = [one(change, seed) for seed in SEEDS]
        print(f"{name:32}", *(f"{run['tv']:.3f}" for run in runs[name]), flush=True)
    return {"sizes": SIZES, "beta": BETA, "runs": runs}
