"""Sampling beside transformers' `generate`: equal lengths; lengths spread over 4…64; the shape of GPT-2 small; four times the tokens."""

from bench.form import Case, Job, Row, Side

SHORTEST, LONGEST = 4, 64
EOS = 1  # where one is needed


def model_and_queries(
    rows: int, query: int, mixed: bool, layers: int, width: int, vocab: int, new_tokens: int
):
    """Mixed: every row ends where its text reaches a certain position, at once and for sure, whatever the dice say. A query that is
    longer by k leaves room for k tokens fewer, so the lengths are known beforehand and both sides write the same number of tokens."""
    import torch

    from bench.tiny import gpt2, prompts

    last = query + new_tokens  # tokens of every row when it has ended, in the mixed case
    model = gpt2(0, layers, width, vocab, positions=last + new_tokens, tie_word_embeddings=False)
    if not mixed:
        return (
            model,
            torch.tensor(prompts(rows, 0, query, vocab)),
            torch.ones(rows, query, dtype=torch.bool),
            None,
        )
    lengths = torch.linspace(SHORTEST, new_tokens, rows).round().long()
    ends_at(model, last - 2)
    width_of = last - lengths  # tokens of each query
    ids = torch.tensor(prompts(rows, 0, int(width_of.max()), vocab)).clamp(min=2)
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - width_of[:, None]
    return model, ids * mask, mask, lengths


def ends_at(model, position: int):
    "Give the model's weights one direction that only the position moves, up from here on and down before; EOS follows nothing else."
    import torch

    h = model.config.n_embd
    u = torch.tensor([1.0, -1.0] * (h // 2)) / h**0.5
    with torch.no_grad():
        for weight in (
            model.transformer.wte.weight,
            model.transformer.wpe.weight,
            model.lm_head.weight,
        ):
            weight -= (weight @ u)[:, None] * u
        for block in model.transformer.h:
            for part in (block.attn.c_proj, block.mlp.c_proj):
                part.weight -= (part.weight @ u)[:, None] * u
        model.transformer.wpe.weight[position:] += u
        model.transformer.wpe.weight[:position] -= u
        model.lm_head.weight[EOS], model.lm_head.weight[0] = (
            100 * u,
            20 * u,
        )  # 0 is what fills up: never drawn either


def job(
    write, rows=32, query=16, mixed=False, layers=2, width=64, vocab=2000, new_tokens=LONGEST
) -> Job:
    "`write(model, ids, mask, new_tokens, eos, greedy)` returns the response ids; what comes after an EOS is 0."
    import torch

    model, ids, mask, lengths = model_and_queries(
        rows, query, mixed, layers, width, vocab, new_tokens
    )
    eos = EOS if mixed else None
    torch.manual_seed(0)

    def check(_):
        few = slice(0, rows, max(1, rows // 8))
        likeliest = write(model, ids[few], mask[few], new_tokens, eos, True)
        drawn = write(model, ids, mask, new_tokens, eos, False)
        real = (drawn != 0).sum(1) if mixed else torch.full((rows,), drawn.shape[1])
        if lengths is not None and (real != lengths).any():
            raise ValueError(f"lengths {real.tolist()} for {lengths.tolist()}")
        return {
            "numbers": {
                "the likeliest tokens": likeliest.flatten().tolist(),
                "lengths": real.tolist(),
            }
        }

    def run():
        write(model, ids, mask, new_tokens, eos, False)

    return Job(run, check)


def ours(**settings) -> Job:
    from instruct_goose.models.sampling import sample

    def write(model, ids, mask, new_tokens, eos, greedy):
        return sample(model, ids, mask, new_tokens, eos, 0, greedy=greedy)[0]

    return job(write, **settings)


def generate(**settings) -> Job:
    import torch

    @torch.no_grad()
    def write(model, ids, mask, new_tokens, eos, greedy):
        dice = {} if greedy else dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            max_new_tokens=new_tokens,
            eos_token_id=eos,
            pad_token_id=0,
            **dice,
        )
        return out[:, ids.shape[1] :]

    return job(write, **settings)


def matmuls(
    rows=32, query=16, mixed=False, layers=2, width=64, vocab=2000, new_tokens=LONGEST
) -> Job:
    "The products of weights and states alone, of as many rows as are still being written; no attention, no softmax, no dice."
    import torch

    model, _, _, lengths = model_and_queries(rows, query, mixed, layers, width, vocab, new_tokens)
    weights = [p.detach() for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    head = model.lm_head.weight.detach().T
    alive = [rows if lengths is None else int((lengths > t).sum()) for t in range(new_tokens)]

    def run():
        for t, n in enumerate(alive):
            for w in weights:
                torch.ones(n * query if t == 0 else n, w.shape[0]) @ w
            torch.ones(n, head.shape[0]) @ head

    return Job(run)


HERE = "bench.cases.sampling:"
WHY = "the weights' matrix products alone, of the rows still being written"


def sides(**settings) -> dict[str, Side]:
    return {
        "generate": Side("transformers' generate", HERE + "generate", settings),
        "ours": Side("sample", HERE + "ours", settings),
        "matmuls": Side("matrix products", HERE + "matmuls", settings, agrees=None),
    }


def case(word: str, name: str, goal: str, repeats: int | None = None, **settings) -> Case:
    row = Row(
        f"sampling, {name}: generate over ours",
        "ours",
        "generate",
        flip=True,
        goal=goal,
        limit="matmuls",
        limit_why=WHY,
    )
    return Case(f"sampling {word}", sides(**settings), [row], tolerance=0.0, repeats=repeats)


SMALL, SHAPE = dict(layers=2, width=64), dict(layers=4, width=128)
GPT2 = dict(layers=12, width=768, vocab=50257, rows=8, new_tokens=32)
GROWS = dict(SHAPE, rows=16)
CASES = [
    case("2x64", "2×64, equal lengths", "≥ 1.6", **SMALL),
    case("4x128", "4×128, equal lengths", "≥ 1.6", **SHAPE),
    case("2x64 spread", "2×64, lengths 4…64", "≥ 2.2", mixed=True, **SMALL),
    case("4x128 spread", "4×128, lengths 4…64", "≥ 2.2", mixed=True, **SHAPE),
    case("gpt2", "GPT-2 small's shape, equal lengths", "≥ 1.0", 3, **GPT2),
    case("gpt2 spread", "GPT-2 small's shape, lengths 4…32", "≥ 1.4", 3, mixed=True, **GPT2),
    Case(
        "sampling growth",
        {
            "128": Side("T = 128", HERE + "ours", GROWS | {"new_tokens": 128}, agrees=None),
            "512": Side("T = 512", HERE + "ours", GROWS | {"new_tokens": 512}, agrees=None),
            "128 by generate": Side(
                "generate, T = 128", HERE + "generate", GROWS | {"new_tokens": 128}, agrees=None
            ),
            "512 by generate": Side(
                "generate, T = 512", HERE + "generate", GROWS | {"new_tokens": 512}, agrees=None
            ),
        },
        [
            Row(
                "rollout time, T = 512 over T = 128",
                "512",
                "128",
                goal="≤ 4.4",
                limit=4.0,
                limit_why="as many times the tokens",
            ),
            Row(
                "rollout time by generate, T = 512 over T = 128",
                "512 by generate",
                "128 by generate",
            ),
        ],
        repeats=3,
    ),
]
