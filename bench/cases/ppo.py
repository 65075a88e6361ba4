"""One iteration of PPO: 32 responses of 32 tokens to prompts of 16, scored, and four epochs in one minibatch each."""

from bench.form import Case, Job, Row, Side
from bench.tiny import QUERY, RESPONSE, ROWS

SETTINGS = dict(epochs=4, lr=1e-3, beta=0.05, clip=0.2, value_clip=0.2, vf_coef=0.1, lam=0.95)
POLICY, REFERENCE, VALUES = (
    0,
    1,
    2,
)  # seeds; a reference that is another model makes a KL that is a number to compare


def size_of(settings: dict) -> dict:
    return {k: settings[k] for k in ("layers", "width", "vocab") if k in settings}


def ours(separate: bool, rows: int = ROWS, new_tokens: int = RESPONSE, **size) -> Job:
    from bench.ours import Run
    from bench.tiny import even_share, gpt2, movement, prompts, tokenizer
    from instruct_goose.config import RLHFConfig

    config = RLHFConfig.preset(
        "ppo",
        **SETTINGS,
        batch_size=rows,
        max_new_tokens=new_tokens,
        minibatches=1,
        max_grad_norm=1e9,
        device="cpu",
    )

    def reward(texts):
        return [even_share(t, new_tokens) for t in texts]

    def made(responses=None):
        value_model = gpt2(VALUES, trunk=True, **size) if separate else None
        return Run(
            gpt2(POLICY, **size),
            gpt2(REFERENCE, **size),
            config,
            tokenizer(size.get("vocab", 2000)),
            reward,
            value_model,
            responses,
        )

    timed = made()
    batches = iter(range(10**9))

    def check(given):
        run = made(given)
        run.step(
            prompts(rows, 0, vocab=size.get("vocab", 2000)) if given is None else given["queries"]
        )
        r = run.watch.rollout
        given = given or {"queries": r.query_ids.tolist(), "responses": r.response_ids.tolist()}
        return {
            "given": given,
            "numbers": run.numbers()
            | {"movement": movement(run.trainer.agent.model, POLICY, **size)},
        }

    return Job(
        lambda: timed.step(prompts(rows, next(batches), vocab=size.get("vocab", 2000))), check
    )


def by_hand(separate: bool, rows: int = ROWS, new_tokens: int = RESPONSE, **size) -> Job:
    import torch

    from bench.by_hand import Loop
    from bench.tiny import gpt2, movement, prompts

    vocab = size.get("vocab", 2000)

    def reward(ids):
        return (ids[:, -new_tokens:] % 2 == 0).float().mean(1).tolist()

    def made():
        trunk = gpt2(VALUES, trunk=True, **size) if separate else None
        return Loop(
            gpt2(POLICY, **size),
            gpt2(REFERENCE, **size),
            trunk,
            reward,
            new_tokens=new_tokens,
            max_norm=1e9,
            **SETTINGS,
        )

    timed = made()
    batches = iter(range(10**9))

    def check(given):
        loop = made()
        queries = torch.tensor(prompts(rows, 0, vocab=vocab))
        ids = (
            torch.cat([torch.tensor(given[k]) for k in ("queries", "responses")], 1)
            if given
            else loop.rollout(queries)
        )
        loop.step(None, ids)
        given = given or {"queries": ids[:, :QUERY].tolist(), "responses": ids[:, QUERY:].tolist()}
        return {
            "given": given,
            "numbers": loop.said | {"movement": movement(loop.policy, POLICY, **size)},
        }

    return Job(lambda: timed.step(torch.tensor(prompts(rows, next(batches), vocab=vocab))), check)


HERE, TRL = "bench.cases.ppo:", "bench.peers.trl_ppo:trainer"
SIDES = {
    "trl": Side("TRL 1.12.0 PPOTrainer", TRL, {}, "trl112", "separate"),
    "trl, no gc": Side(
        "TRL 1.12.0 without its gc.collect()", TRL, {"collect": False}, "trl112", "separate"
    ),
    "hand, separate": Side(
        "a loop by hand", HERE + "by_hand", {"separate": True}, agrees="separate"
    ),
    "separate": Side(
        "RLHFTrainer, separate values", HERE + "ours", {"separate": True}, agrees="separate"
    ),
    "hand, shared": Side("a loop by hand", HERE + "by_hand", {"separate": False}, agrees="shared"),
    "shared": Side(
        "RLHFTrainer, shared trunk", HERE + "ours", {"separate": False}, agrees="shared"
    ),
}
ONLY = "TRL knows separate values only"


def against_hand(kind: str, goal: str) -> list[Row]:
    rows = [Row(f"PPO iteration over the loop by hand, {kind}", kind, f"hand, {kind}", goal=goal)]
    return rows + [
        Row(f"PPO {phase} over the loop by hand, {kind}", kind, f"hand, {kind}", phase)
        for phase in ("rollout", "score", "update")
    ]


CASES = [
    Case(
        "ppo",
        SIDES,
        [
            Row(
                "PPO iteration, TRL 1.12 over ours, shared trunk",
                "shared",
                "trl",
                flip=True,
                goal="≥ 2.3",
                note=ONLY,
            ),
            Row(
                "PPO iteration, TRL 1.12 over ours, separate values",
                "separate",
                "trl",
                flip=True,
                goal="≥ 1.35",
            ),
            Row(
                "PPO iteration, TRL 1.12 without gc.collect over ours, shared trunk",
                "shared",
                "trl, no gc",
                flip=True,
                note=ONLY,
            ),
            Row(
                "PPO iteration, TRL 1.12 without gc.collect over ours, separate values",
                "separate",
                "trl, no gc",
                flip=True,
            ),
            *[
                Row(
                    f"PPO {phase}, TRL 1.12 over ours, separate values",
                    "separate",
                    "trl",
                    phase,
                    True,
                )
                for phase in ("rollout", "score", "update")
            ],
            *against_hand("shared", "≤ 0.85"),
            *against_hand("separate", "≤ 0.95"),
        ],
    )
]
