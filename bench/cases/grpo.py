"""One iteration of GRPO: 4 prompts, 8 responses of 32 tokens each, and four epochs in one minibatch each, the KL in the loss."""

from bench.form import Case, Job, Row, Side

PROMPTS, GROUP, BETA, LR, EPOCHS = 4, 8, 0.05, 1e-3, 4
POLICY = 0  # the seed of policy and reference: TRL copies its own


def ours() -> Job:
    from bench.ours import Run
    from bench.tiny import RESPONSE, even_shares, gpt2, movement, prompts, tokenizer
    from instruct_goose.config import RLHFConfig

    config = RLHFConfig.preset(
        "grpo",
        epochs=EPOCHS,
        minibatches=1,
        batch_size=PROMPTS * GROUP,
        group_size=GROUP,
        beta=BETA,
        lr=LR,
        max_new_tokens=RESPONSE,
        device="cpu",
    )

    def made(responses=None):
        return Run(
            gpt2(POLICY), gpt2(POLICY), config, tokenizer(), even_shares, responses=responses
        )

    timed = made()
    batches = iter(range(10**9))

    def check(given):
        run = made(given)
        run.step(given["queries"][::GROUP] if given else prompts(PROMPTS, 0))
        m = run.metrics
        return {
            "numbers": {
                "score": m["reward_mean"],
                "spread of the scores": m["group_reward_std"],
                "policy_loss": run.numbers()["policy_loss"],
                "movement": movement(run.trainer.agent.model, POLICY),
            }
        }

    return Job(lambda: timed.step(prompts(PROMPTS, next(batches))), check)


CASES = [
    Case(
        "grpo",
        {
            "trl": Side("TRL 1.16.0 GRPOTrainer", "bench.peers.trl_grpo:trainer", {}, "trl116"),
            "ours": Side("RLHFTrainer", "bench.cases.grpo:ours"),
        },
        [
            Row("GRPO iteration, TRL 1.16 over ours", "ours", "trl", flip=True, goal="≥ 1.8"),
            *[
                Row(f"GRPO {phase}, TRL 1.16 over ours", "ours", "trl", phase, True)
                for phase in ("rollout", "score", "update")
            ],
        ],
        tolerance=2e-3,
    )
]
