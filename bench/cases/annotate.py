"""What policy, reference and values say of each token, at a vocabulary of 128,000: beside one epoch of the update, and one table."""

from bench.form import Case, Job, Row, Side

ROWS, QUERY, TIME, VOCAB = 32, 16, 32, 128_000
SHAPE = dict(layers=2, width=64)


def parts(layers: int, width: int, vocab: int, rows: int, new_tokens: int):
    "A trainer with a shared trunk, and a rollout of random tokens, scored."
    import torch

    from bench.ours import Run
    from bench.tiny import gpt2, prompts, tokenizer
    from instruct_goose.config import RLHFConfig

    config = RLHFConfig.preset(
        "ppo",
        batch_size=rows,
        max_new_tokens=new_tokens,
        minibatches=1,
        epochs=1,
        lr=1e-5,
        device="cpu",
    )
    given = {
        "queries": prompts(rows, 0, QUERY, vocab),
        "responses": prompts(rows, 1, new_tokens, vocab),
    }
    size = dict(layers=layers, width=width, vocab=vocab)
    trainer = Run(
        gpt2(0, **size), gpt2(1, **size), config, tokenizer(8), None, responses=given
    ).trainer
    r = trainer.sampler()
    r.scores = torch.linspace(-1, 1, rows)
    return trainer, r


def means(columns: dict, mask) -> dict[str, float]:
    return {
        name: columns[name][mask].mean().item()
        for name in ("old_logprobs", "ref_logprobs", "entropy", "kl")
    }


def annotate(layers=2, width=64, vocab=VOCAB, rows=ROWS, new_tokens=TIME) -> Job:
    from instruct_goose.training.experience import annotate

    trainer, r = parts(layers, width, vocab, rows, new_tokens)

    def look():
        return annotate(trainer.agent, trainer.ref_model, r, trainer.config)._asdict()

    return Job(lambda: look() and None, lambda _: {"numbers": means(look(), r.mask)})


def epoch(layers=2, width=64, vocab=VOCAB, rows=ROWS, new_tokens=TIME) -> Job:
    "One pass of the update over the same rollout: forward, backward, optimizer."
    trainer, r = parts(layers, width, vocab, rows, new_tokens)
    experience = trainer.advantages(r)

    def run():
        for batch in experience.minibatches(1, trainer.generators.shuffling):
            trainer.update(batch)

    return Job(run)


def table(layers=2, width=64, vocab=VOCAB, rows=ROWS, new_tokens=TIME) -> Job:
    "The same four numbers from whole tables."
    import torch

    trainer, r = parts(layers, width, vocab, rows, new_tokens)
    ids = torch.cat([r.query_ids, r.response_ids], 1)

    @torch.no_grad()
    def look():
        pi, ref = (
            m(input_ids=ids).logits[:, -new_tokens - 1 : -1].log_softmax(-1)
            for m in (trainer.agent.model, trainer.ref_model)
        )

        def of(x):
            return x.gather(-1, r.response_ids[..., None])[..., 0]

        return {
            "old_logprobs": of(pi),
            "ref_logprobs": of(ref),
            "entropy": -(pi.exp() * pi).sum(-1),
            "kl": (pi.exp() * (pi - ref)).sum(-1),
        }

    return Job(lambda: look() and None, lambda _: {"numbers": means(look(), r.mask)})


HERE = "bench.cases.annotate:"
CASES = [
    Case(
        "annotate",
        {
            "table": Side("whole tables", HERE + "table", SHAPE),
            "ours": Side("annotations", HERE + "annotate", SHAPE),
            "epoch": Side("one epoch of the update", HERE + "epoch", SHAPE, agrees=None),
        },
        [
            Row(
                "annotate at vocabulary 128,000, time over an epoch of the update",
                "ours",
                "epoch",
                goal="≤ 0.7",
            ),
            Row(
                "annotate at vocabulary 128,000, peak memory over the (B,T,V) table",
                "ours",
                ROWS * TIME * VOCAB * 4 / 2**20,
                "peak",
                goal="≤ 0.3",
                peer_label="(B,T,V) in float32",
            ),
            Row("annotate at vocabulary 128,000, time over whole tables", "ours", "table"),
        ],
        peaks=("ours",),
    )
]
