"""What was tried to make an update cheaper: rows of like length together, rows without padding, half precision, a compiler. One
forward and backward pass of the same 32 responses of 4 to 64 tokens to prompts of 16; each side has the same gradient."""

from bench.form import Case, Job, Row, Side

ROWS, QUERY, LONGEST = 32, 16, 64
SHAPES = {"4×128": dict(layers=4, width=128), "6×384": dict(layers=6, width=384)}


def rollout(rows: int, query: int, longest: int, vocab: int):
    "Random tokens, lengths evenly spread and in no order; queries, their mask, responses, their mask."
    import torch

    g = torch.Generator().manual_seed(0)
    lengths = torch.linspace(4, longest, rows).round().long()[torch.randperm(rows, generator=g)]
    ids = torch.randint(vocab, (rows, query + longest), generator=g)
    there = torch.arange(longest) < lengths[:, None]
    return ids[:, :query], torch.ones(rows, query, dtype=torch.bool), ids[:, query:] * there, there


def model_of(layers: int, width: int, vocab: int):
    from bench.tiny import gpt2

    return gpt2(0, layers=layers, width=width, vocab=vocab).requires_grad_()


def job(model, batch, loss) -> Job:
    "`loss` yields parts of −Σ log π; each goes backward by itself."

    def run():
        model.zero_grad(set_to_none=True)
        for part in loss():
            part.backward()

    def check(_):
        run()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return {"numbers": {"parts of the gradient": [g.norm().item() for g in grads]}}

    return Job(run, check)


def ours(
    size: int = ROWS,
    sort: bool = False,
    autocast: bool = False,
    compiled: bool = False,
    narrow: bool = False,
    rows: int = ROWS,
    query: int = QUERY,
    longest: int = LONGEST,
    vocab: int = 2000,
    **shape,
) -> Job:
    "Through `response_logprobs`, `size` rows at a time."
    import torch

    from instruct_goose.models.families import trunk
    from instruct_goose.models.response import response_logprobs

    model = model_of(vocab=vocab, **shape)
    batch = rollout(rows, query, longest, vocab)
    if narrow:
        model.bfloat16()
    if compiled:
        trunk(model).compile(dynamic=True)
    order = batch[3].sum(-1).argsort() if sort else torch.arange(rows)

    def loss():
        for some in order.split(size):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logprobs = response_logprobs(model, *(x[some] for x in batch))
            yield -logprobs.sum()

    return job(model, batch, loss)


def packed(
    rowwise: bool,
    rows: int = ROWS,
    query: int = QUERY,
    longest: int = LONGEST,
    vocab: int = 2000,
    **shape,
) -> Job:
    "All rows in one, without padding: positions begin anew, and attention stays within a row, by a mask or row by row."
    import torch
    from torch.nn import functional as F
    from transformers import AttentionInterface

    from instruct_goose.objective.logprobs import logprobs_from_hidden

    model = model_of(vocab=vocab, **shape)
    batch = rollout(rows, query, longest, vocab)
    ids, there = torch.cat([batch[0], batch[2]], 1), torch.cat([batch[1], batch[3]], 1)
    lengths = there.sum(-1).tolist()
    flat = ids[there][None]
    row = torch.arange(rows).repeat_interleave(torch.tensor(lengths))
    at = torch.cat([torch.arange(n) for n in lengths])[None]
    predicts = (at[0] >= query - 1) & (torch.cat([row[1:], row.new_tensor([-1])]) == row)
    tokens = torch.cat([flat[0, 1:], flat.new_zeros(1)])[predicts]
    mask = torch.where((row[:, None] == row) & (at[0][:, None] >= at[0]), 0.0, -torch.inf)[
        None, None
    ]

    def row_by_row(module, q, k, v, attention_mask, **_):
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        out = torch.cat(
            [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2
        )
        return out.transpose(1, 2).contiguous(), None

    if rowwise:
        AttentionInterface.register("row_by_row", row_by_row)
        model.set_attn_implementation("row_by_row")

    def loss():
        hidden = model.transformer(
            input_ids=flat, position_ids=at, attention_mask=mask, use_cache=False
        )[0][0, predicts]
        yield -logprobs_from_hidden(hidden, model.lm_head.weight, tokens).sum()

    return job(model, batch, loss)


def rounding(
    rows: int = ROWS, query: int = QUERY, longest: int = LONGEST, vocab: int = 2000, **shape
) -> Job:
    "How far bfloat16 products are from float32's: of log π, and of the direction of the gradient."
    import torch

    from instruct_goose.models.response import response_logprobs

    model = model_of(vocab=vocab, **shape)
    batch = rollout(rows, query, longest, vocab)

    def look(autocast: bool):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = response_logprobs(model, *batch)
        logprobs.sum().backward()
        return logprobs.detach()[batch[3]], torch.cat(
            [p.grad.flatten() for p in model.parameters()]
        )

    def run():
        (exact, g), (coarse, k) = look(False), look(True)
        return {
            "log": (exact - coarse).abs().max().item(),
            "loss": abs((exact - coarse).mean().item()),
            "cosine": 1 - torch.cosine_similarity(g, k, dim=0).item(),
        }

    return Job(run)


def sides(shape: dict) -> dict[str, Side]:
    def side(label, make, agrees="all", **more):
        return Side(label, f"bench.cases.trials:{make}", shape | more, agrees=agrees)

    return {
        "padded": side("32 rows, padded", "ours"),
        "micro": side("8 rows at a time, as they come", "ours", size=8),
        "sorted": side("8 rows at a time, by length", "ours", size=8, sort=True),
        "masked": side("one row, a mask", "packed", rowwise=False),
        "rowwise": side("one row, attention row by row", "packed", rowwise=True),
        "autocast": side("autocast to bfloat16", "ours", None, autocast=True),
        "narrow": side("weights in bfloat16", "ours", None, narrow=True),
        "compiled": side("torch.compile", "ours", compiled=True),
        "rounding": side("autocast to bfloat16", "rounding", None),
    }


SAID = {
    "micro": "8 rows at a time",
    "sorted": "8 rows at a time, by length",
    "masked": "without padding, one mask",
    "rowwise": "without padding, attention row by row",
    "autocast": "autocast to bfloat16",
    "narrow": "weights in bfloat16",
    "compiled": "compiled",
}
GAPS = {
    "log": ("largest difference of a log-probability", "nats"),
    "loss": ("difference of the mean log-probability", "nats"),
    "cosine": ("1 − cosine of the gradients", "of 1"),
}


def heads(everything: bool, tokens: int = 1024, hidden: int = 64, vocab: int = 128_000) -> Job:
    "What two heads say of the same tokens: log-probabilities, and with everything entropy and exact KL."
    import torch

    from instruct_goose.objective.logprobs import logprobs_from_hidden
    from instruct_goose.objective.logprobs_in_pieces import Head, compare_heads

    g = torch.Generator().manual_seed(0)
    (h, k), (w, u) = (
        torch.randn(2, n, hidden, generator=g) / size for n, size in ((tokens, 1), (vocab, 8))
    )
    ids = torch.randint(vocab, (tokens,), generator=g)

    @torch.no_grad()
    def look():
        return (
            compare_heads(h, Head(w), k, Head(u), ids)[:2]
            if everything
            else (logprobs_from_hidden(h, w, ids), logprobs_from_hidden(k, u, ids))
        )

    return Job(
        lambda: look() and None,
        lambda _: {"numbers": {"log-probabilities": torch.cat(look())[::100].tolist()}},
    )


def case(
    word: str, names: tuple[str, ...], rows: list[Row], shape: dict, peaks: tuple[str, ...] = ()
) -> Case:
    return Case(
        f"trials {word}",
        {name: side for name, side in sides(shape).items() if name in names},
        rows,
        tolerance=2e-3,
        peaks=peaks,
        optional=True,
        together=True,
    )


def time_of(name: str, side: str) -> Row:
    return Row(f"{name}, lengths 4…64: {SAID[side]}, time over padded", side, "padded")


CASES = []
for name, shape in SHAPES.items():
    plain = tuple(side for side in SAID if side != "compiled")
    gaps = [
        Row(f"{name}, bfloat16 beside float32: {said}", "rounding", None, gap, unit=unit)
        for gap, (said, unit) in GAPS.items()
    ]
    CASES += [
        case(
            name,
            ("padded", "rounding", *plain),
            [*[time_of(name, side) for side in plain], *gaps],
            shape,
        ),
        case(f"compiled {name}", ("padded", "compiled"), [time_of(name, "compiled")], shape),
    ]
NARROW = ("autocast", "narrow")
CASES.append(
    case(
        "memory 4×128",
        ("padded", *NARROW),
        [
            Row(f"4×128, lengths 4…64: {SAID[side]}, memory over padded", side, "padded", "peak")
            for side in NARROW
        ],
        SHAPES["4×128"],
        ("padded", *NARROW),
    )
)
CASES.append(
    Case(
        "trials heads",
        {
            name: Side(label, "bench.cases.trials:heads", {"everything": name == "all"})
            for name, label in (
                ("bare", "log-probabilities alone"),
                ("all", "and entropy and exact KL"),
            )
        },
        [
            Row(
                "two heads at vocabulary 128,000: log-probabilities alone, time over all that annotation says",
                "bare",
                "all",
            )
        ],
        optional=True,
        together=True,
    )
)
