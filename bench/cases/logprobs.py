"""log π(aₜ|sₜ) and its gradients from hidden states (8·256, 512) and a matrix (32000, 512), without a table of logits, and with one."""

from bench.form import Case, Job, Row, Side

FULL = dict(tokens=2048, hidden=512, vocab=32000)


def inputs(tokens: int, hidden: int, vocab: int):
    "States, matrix, ids."
    import torch

    g = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=g).requires_grad_()
    w = (torch.randn(vocab, hidden, generator=g) / hidden**0.5).requires_grad_()
    return h, w, torch.randint(vocab, (tokens,), generator=g)


def job(forward, sizes: dict, packages=()) -> Job:
    """`forward(h, w, tokens)` returns the sum that goes backward, and the log-probabilities where it has them. Each column has the
    same weight, 1, since one of the peers knows no other."""
    h, w, tokens = inputs(**sizes)

    def run():
        forward(h, w, tokens)[0].backward()
        h.grad = w.grad = None  # as zero_grad leaves them

    def check(_):
        total, logprobs = forward(h, w, tokens)
        total.backward()
        numbers = {
            "sum": total.item(),
            "gradient of the states": h.grad.norm().item(),
            "gradient of the matrix": w.grad.norm().item(),
            "a few of its numbers": w.grad[tokens[:8], :3].flatten().tolist(),
        }
        h.grad = w.grad = None
        if logprobs is not None:
            numbers["log-probabilities"] = logprobs[:64].tolist()
        return {"numbers": numbers}

    return Job(run, check, packages)


def ours(entropy: bool = False, **sizes) -> Job:
    from instruct_goose.objective.logprobs import logprobs_from_hidden

    def forward(h, w, tokens):
        out = logprobs_from_hidden(h, w, tokens, 1.0, with_entropy=entropy)
        return (out[0].sum() + 0.01 * out[1].sum(), out[0]) if entropy else (out.sum(), out)

    return job(forward, sizes)


def naive(entropy: bool = False, **sizes) -> Job:
    "log-softmax and gather: the whole table, as everybody writes it first."
    import torch.nn.functional as F

    def forward(h, w, tokens):
        table = F.linear(h, w).log_softmax(-1)
        logprobs = table.gather(-1, tokens[:, None])[:, 0]
        if not entropy:
            return logprobs.sum(), logprobs
        return logprobs.sum() - 0.01 * (table.exp() * table).sum(), logprobs

    return job(forward, sizes)


def torch_chunks(**sizes) -> Job:
    "F.linear_cross_entropy. It returns the sum alone and makes the gradients on the way forward, so a token's weight is fixed before."
    import torch
    import torch.nn.functional as F

    options = torch.nn.LinearCrossEntropyOptions()
    return job(
        lambda h, w, t: (-F.linear_cross_entropy(h, w, t, reduction="sum", options=options), None),
        sizes,
    )


def matmuls(**sizes) -> Job:
    "Logits, gradient of the states, gradient of the matrix: three products, into memory that is there."
    import torch

    h, w, _ = inputs(**sizes)
    h = h.detach()
    w = w.detach()
    rows = 256 if len(h) >= 256 else len(h)
    logits = torch.empty(rows, len(w))
    at_states = torch.empty_like(h[:rows])
    at_matrix = torch.zeros_like(w)

    def run():
        for part in h.split(rows):
            torch.mm(part, w.T, out=logits)
            torch.mm(logits, w, out=at_states)
            at_matrix.addmm_(logits.T, part)

    return Job(run)


def sides(entropy: bool) -> dict[str, Side]:
    here = "bench.cases.logprobs:"
    sizes = FULL | {"entropy": entropy}
    made = {
        "naive": Side("log-softmax + gather" + " + entropy" * entropy, here + "naive", sizes),
        "ours": Side("logprobs_from_hidden", here + "ours", sizes),
    }
    if not entropy:
        made |= {
            "liger": Side("Liger 0.8.5", "bench.peers.liger:logprobs", FULL, "liger"),
            "torch": Side("F.linear_cross_entropy in chunks", here + "torch_chunks", FULL),
        }
    return made | {"matmuls": Side("three matrix products", here + "matmuls", FULL, agrees=None)}


WHY = "the three matrix products alone; a pass that keeps no table needs a fourth, the logits again"
NAIVE = 3 * 4 * FULL["tokens"] * FULL["vocab"]  # bytes: logits, their log-softmax, its gradient
LEAST = (
    4 * FULL["hidden"] * (FULL["vocab"] + FULL["tokens"]) / NAIVE
)  # what must be there at the end: the gradients
CASES = [
    Case(
        "logprobs",
        sides(False),
        [
            Row(
                "token log-probabilities, time",
                "ours",
                "naive",
                goal="≤ 1.25",
                limit="matmuls",
                limit_why=WHY,
            ),
            Row(
                "token log-probabilities, peak memory",
                "ours",
                "naive",
                "peak",
                goal="≤ 0.12",
                limit=LEAST,
                limit_why="the gradients themselves, over three tables",
            ),
            Row("token log-probabilities, time against Liger", "ours", "liger"),
            Row("token log-probabilities, peak memory against Liger", "ours", "liger", "peak"),
            Row(
                "token log-probabilities, time against torch in chunks",
                "ours",
                "torch",
                note="torch's gives the sum alone, every token's weight the same",
            ),
            Row(
                "token log-probabilities, peak memory against torch in chunks",
                "ours",
                "torch",
                "peak",
            ),
        ],
        tolerance=2e-3,
        peaks=("ours", "naive", "liger", "torch"),
    ),
    Case(
        "logprobs with entropy",
        sides(True),
        [
            Row(
                "log-probabilities and entropy, time",
                "ours",
                "naive",
                goal="≤ 1.25",
                limit="matmuls",
                limit_why=WHY,
            ),
            Row(
                "log-probabilities and entropy, peak memory",
                "ours",
                "naive",
                "peak",
                goal="≤ 0.12",
                limit=LEAST * 3 / 5,
                limit_why="the gradients themselves, over five tables",
            ),
        ],
        tolerance=2e-3,
        peaks=("ours", "naive"),
    ),
]
