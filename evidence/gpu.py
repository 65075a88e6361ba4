"""What the library does on a GPU: `make evidence ARGS=gpu`. Writes evidence/gpu.json, with the GPU's name; the site's Tables read it.

    python evidence/gpu.py                      needs a GPU with 24 GiB; minutes
    python evidence/gpu.py --rehearse           every line of it on the CPU, with tiny models: nothing is measured, nothing is written
    python evidence/gpu.py --rehearse --output FILE   the same, kept in FILE and marked as a rehearsal

1. The quickstart, end to end.
2. One PPO iteration of two models with random weights, in float32 and bfloat16: GPT-2 small (124 million parameters) and a Llama
   of 135 million (30 layers of width 576, 49,152 tokens). Tokens a second by phase, how much of the time the GPU computes (the rest
   it waits for Python), the most memory a phase takes. And log-probabilities in pieces of several sizes.
3. Log-probabilities, loss and gradient of both against the CPU's float64, within bounds that `bounds` derives.
4. A run that is interrupted and resumed, against one that is not.
"""
import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from run import git, origin, root, rounded

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in the same process, for part 4

PHASES = ("rollout", "annotate", "update")
UNIT = {"float32": 2.**-24, "bfloat16": 2.**-8}  # unit roundoff: half the distance from 1 to the next number
SIZES = {"batch_size": 64, "micro_batch_size": 16, "max_new_tokens": 64, "query": 32, "repeats": 3}
TINY = {"batch_size": 4, "micro_batch_size": 2, "max_new_tokens": 6, "query": 5, "repeats": 1}


def models(rehearse: bool) -> dict:
    "Name: a function that makes the model, on the CPU, in float32, with random weights."
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    ends = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    llama = dict(vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                 intermediate_size=1536, max_position_embeddings=2048, tie_word_embeddings=True)
    gpt2 = {}
    if rehearse:
        gpt2 = dict(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        llama |= dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                      intermediate_size=24, max_position_embeddings=32)

    def make(config):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {"GPT-2, 124M": lambda: make(GPT2Config(**ends, **gpt2)), "Llama, 135M": lambda: make(LlamaConfig(**ends, **llama))}


# --- 2. speed and memory ----------------------------------------------------------------------------------------------
class Meter:
    "Seconds and peak memory of each phase. A GPU works on while Python goes ahead, so it is waited for on both sides."

    def __init__(self, device: str): self.cuda, self.seconds, self.bytes = device == "cuda", {}, {}

    def __call__(self, phase: str, f, *args):
        import torch

        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start, out = time.perf_counter(), f(*args)
        if self.cuda: torch.cuda.synchronize()
        self.seconds.setdefault(phase, []).append(time.perf_counter() - start)
        if self.cuda: self.bytes[phase] = max(self.bytes.get(phase, 0), torch.cuda.max_memory_allocated())
        return out


def new_trainer(model, device: str, sizes: dict, **changes):
    from instruct_goose.models.agent import Agent
    from instruct_goose.training.config import RLHFConfig
    from instruct_goose.training.trainer import RLHFTrainer

    settings = {k: sizes[k] for k in ("batch_size", "micro_batch_size", "max_new_tokens")}
    return RLHFTrainer(Agent(model), None, RLHFConfig(**{"device": device, "epochs": 1, "minibatches": 2, "lr": 1e-5} | settings | changes))


def prompts(vocab: int, sizes: dict, seed: int = 0) -> dict:
    "Random token ids, half of the rows padded on the left."
    import torch

    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (sizes["batch_size"], sizes["query"]), generator=dice)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[::2, :sizes["query"] // 2] = False
    return {"query_ids": ids, "query_mask": mask}


def iterate(trainer, batch: dict, meter) -> int:
    "One iteration by the trainer's public steps, the score being the share of even tokens. Tokens that were written."
    rollout = meter("rollout", trainer.rollout, batch)
    rollout.scores = ((rollout.response_ids % 2 == 0) & rollout.mask).sum(-1) / rollout.mask.sum(-1)
    meter("annotate", trainer.advantages, rollout)
    meter("update", trainer.optimize, rollout)
    return int(rollout.mask.sum())


def computing(trainer, batch: dict) -> dict:
    "Seconds in which the GPU computes, by phase, in one more iteration under torch's profiler."
    import torch
    from torch.profiler import ProfilerActivity, profile

    seconds = {}

    def watched(phase, f, *args):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            out = f(*args)
            torch.cuda.synchronize()
        seconds[phase] = sum(e.self_device_time_total for e in seen.key_averages() if e.device_type.name == "CUDA") / 1e6
        return out

    iterate(trainer, batch, watched)
    return seconds


def iteration(make, dtype: str, device: str, sizes: dict) -> dict:
    "Medians over the repeats, after one iteration that warms up."
    import torch

    model = make().to(device, getattr(torch, dtype))
    parameters, trainer = sum(p.numel() for p in model.parameters()), new_trainer(model, device, sizes)
    vocab = model.get_input_embeddings().num_embeddings
    iterate(trainer, prompts(vocab, sizes), Meter(device))
    meter = Meter(device)
    tokens = [iterate(trainer, prompts(vocab, sizes, seed), meter) for seed in range(1, 1 + sizes["repeats"])]
    seconds = {phase: statistics.median(meter.seconds[phase]) for phase in PHASES}
    busy = computing(trainer, prompts(vocab, sizes, 1 + sizes["repeats"])) if device == "cuda" else {}
    return {"parameters": parameters, "writers": writers(make, dtype, device, sizes), "tokens": statistics.median(tokens), "seconds": seconds, "computing_seconds": busy,
            "tokens_per_second": {phase: statistics.median(tokens) / s for phase, s in seconds.items()},
            "peak_gib": {phase: x / 2**30 for phase, x in meter.bytes.items()}}


def writers(make, dtype: str, device: str, sizes: dict) -> dict:
    """Tokens a second of `sample` and of transformers' `generate`, with its growing cache and with its static one, which it compiles on a GPU:
    median, least and most of interleaved repeats after one that warms up. No response ends early."""
    import torch

    from instruct_goose.training.rollout import sample

    model, n = make().to(device, getattr(torch, dtype)).eval(), sizes["max_new_tokens"]
    batch = {k: x.to(device) for k, x in prompts(model.get_input_embeddings().num_embeddings, sizes).items()}
    ids, mask = batch["query_ids"], batch["query_mask"]
    model.generation_config.eos_token_id = None
    theirs = lambda **cache: model.generate(ids, attention_mask=mask.long(), do_sample=True, top_k=0, max_new_tokens=n, pad_token_id=0, **cache)
    ways = {"sample": lambda: sample(model, ids, mask, n, None, 0), "generate": theirs, "generate, static": lambda: theirs(cache_implementation="static")}
    meter = Meter(device)
    for _ in range(1 + sizes["repeats"]):
        for name, way in ways.items(): meter(name, way)
    speeds = {name: [len(ids) * n / s for s in seconds[1:]] for name, seconds in meter.seconds.items()}
    return {name: {"median": statistics.median(x), "least": min(x), "most": max(x)} for name, x in speeds.items()}


def pieces(device: str, rehearse: bool) -> dict:
    "Log-probabilities under GPT-2's head and their gradient, milliseconds, the least of five: by bytes in a piece, and over the whole table."
    import torch

    from instruct_goose.objective.logprobs import logprobs_from_hidden

    tokens, width, vocab = (32, 16, 300) if rehearse else (4096, 768, 50_257)
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=dice).div(width ** .5).to(device).requires_grad_() for n in (tokens, vocab))
    sampled = torch.randint(0, vocab, (tokens,), generator=dice).to(device)
    ways = {f"{n} MiB": lambda n=n: logprobs_from_hidden(hidden, weight, sampled, chunk_bytes=n * 2**20) for n in (4, 16, 64, 256, 1024)}
    ways["whole table"] = lambda: torch.log_softmax(hidden @ weight.T, -1).gather(1, sampled[:, None])
    found = {}
    for name, way in ways.items():
        meter = Meter(device)
        for _ in range(2 if rehearse else 5): meter("both", lambda way=way: way().sum().backward())
        found[name] = 1000 * min(meter.seconds["both"])
    return found


# --- 3. agreement -----------------------------------------------------------------------------------------------------
def judged(agent, tokens: tuple, old, advantages, returns) -> tuple:
    "Log-probabilities, values, loss and gradient of a PPO loss whose inputs are given."
    import torch

    from instruct_goose.objective.ppo import ppo_loss

    agent.zero_grad(set_to_none=True)
    now, mask = agent.evaluate(*tokens, with_entropy=False), tokens[3]
    loss, _ = ppo_loss(now.logprobs, old, advantages, mask, values=now.values, returns=returns, value_clip=None)
    loss.backward()
    gradient = [p.grad for p in agent.parameters() if p.grad is not None]
    wide = lambda x: x.detach().to("cpu", torch.float64)
    return wide(now.logprobs), wide(now.values), wide(loss), [wide(g) for g in gradient]


def bounds(model, dtype: str, logits_sd: float, values_sd: float, pull: float, error: float) -> dict:
    """How far rounding may carry each figure from the exact one. Rounding errors of k operations in series behave as k independent
    steps of at most u: with probability near 1 they add up to λ√k·u, λ = 4, relative to the size of the result (Higham and Mary,
    2019, theorem 2.4), and not to the worst case k·u.

    k: a layer has at most seven matrix products in series and seven other operations (norms, softmax, activation, residual sums);
    in float32 a product over n numbers counts as n operations, n at most the widest layer. In bfloat16 products are summed in
    float32 and rounded once, so all count as one. After L layers k = L(7n + 7) + n, or 14L + 1.
    z is thus known to λ√k·u·sd(z); log π = z_a − log Σ exp z holds two such errors; a value, one, of its own size.
    The loss has the derivatives ρÂ and c₁(V − R), whose mean sizes are `pull` and `error`; a ratio grows by exp(error of log π).
    The gradient, as a whole and relative to its norm: backward repeats each operation twice and starts from what forward got
    wrong, 3k in series, twice the bound of one pass."""
    c = model.config.get_text_config()
    width = max(p.shape[-1] for p in model.parameters() if p.ndim > 1 and p.shape[0] != c.vocab_size)
    width = max([width, *(p.shape[0] for p in model.parameters() if p.ndim > 1 and p.shape[0] != c.vocab_size)])
    k = c.num_hidden_layers * (7 * width + 7) + width if dtype == "float32" else 14 * c.num_hidden_layers + 1
    one = 4 * math.sqrt(k) * UNIT[dtype]
    logprobs, values = 2 * one * logits_sd, one * values_sd
    return {"logprobs": logprobs, "loss": pull * math.expm1(logprobs) + .5 * error * values, "gradient": 2 * math.sqrt(3) * one}


def agreement(make, device: str, sizes: dict) -> dict:
    "Four responses under the CPU's float64, then under the device's float32 and bfloat16: largest differences, and their bounds."
    import torch

    from instruct_goose.models.agent import Agent

    exact = Agent(make().double()).eval()
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad(): exact.value_head.weight.copy_(torch.randn(exact.value_head.weight.shape, generator=dice, dtype=torch.float64) / 8)
    weights = {name: x.clone() for name, x in exact.state_dict().items()}
    for name, x in weights.items(): exact.state_dict()[name].copy_(x.to(torch.bfloat16))  # numbers that all three types hold
    weights = {name: x.clone() for name, x in exact.state_dict().items()}
    vocab, (B, T) = exact.model.get_input_embeddings().num_embeddings, (4, sizes["max_new_tokens"] // 2)
    batch = prompts(vocab, sizes | {"batch_size": B})
    response, mask = torch.randint(1, vocab, (B, T), generator=dice), torch.ones(B, T, dtype=torch.bool)
    mask[1, T // 2:] = False
    tokens = batch["query_ids"], batch["query_mask"], response, mask
    with torch.no_grad():
        start, logits = exact.evaluate(*tokens, with_entropy=False), exact(response, mask).logits[mask]
        old = start.logprobs + .1 * (torch.rand(B, T, generator=dice, dtype=torch.float64) - .5)  # ratios inside the clip's range
    advantages, returns = (torch.randn(B, T, generator=dice, dtype=torch.float64) for _ in range(2))
    truth = judged(exact, tokens, old, advantages, returns)
    size = {"logits_sd": logits.std().item(), "values_sd": truth[1][mask].std().item() + truth[1][mask].mean().abs().item(),
            "pull": ((start.logprobs - old).exp() * advantages)[mask].abs().mean().item(), "error": (truth[1] - returns)[mask].abs().mean().item()}
    del exact

    found = {}
    for dtype in UNIT:
        agent = Agent(make().to(device, getattr(torch, dtype))).to(device).eval()
        agent.load_state_dict(weights)
        there = [x.to(device) for x in (*tokens, old, advantages, returns)]
        logprobs, _, loss, gradient = judged(agent, tuple(there[:4]), *there[4:])
        off = math.sqrt(sum((g - t).square().sum().item() for g, t in zip(gradient, truth[3], strict=True)))
        norm = math.sqrt(sum(t.square().sum().item() for t in truth[3]))
        differs = {"logprobs": (logprobs - truth[0])[mask].abs().max().item(), "loss": abs((loss - truth[2]).item()), "gradient": off / norm}
        limit = bounds(agent.model, dtype, **size)
        found[dtype] = {"difference": differs, "bound": limit, "within": all(differs[k] <= limit[k] for k in limit)}
    return found


# --- 4. resume --------------------------------------------------------------------------------------------------------
def resumed(make, device: str, sizes: dict) -> dict:
    """Four iterations, twice: the noise of this GPU between two equal runs. Then two, a checkpoint on disk, a new trainer, and two
    more. What is loaded is what was saved, to the bit; what follows may differ by no more than ten times the noise."""
    import torch

    from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint

    def go(trainer, first, last):
        vocab = trainer.agent.model.get_input_embeddings().num_embeddings
        for seed in range(first, last):
            iterate(trainer, prompts(vocab, sizes, seed), lambda _, f, *args: f(*args))
            trainer.iteration += 1
        return trainer

    def far(a, b):
        return max((x.float() - y.float()).abs().max().item() for x, y in zip(a.agent.parameters(), b.agent.parameters(), strict=True))

    new = lambda: new_trainer(make().to(device), device, sizes, lr=1e-4, steps=4)
    whole, again, first, second = go(new(), 0, 4), go(new(), 0, 4), go(new(), 0, 2), new()
    with tempfile.TemporaryDirectory() as folder: second.load_state(*load_checkpoint(save_checkpoint(folder, *first.state())))
    saved, there = first.state()[0], second.state()[0]
    loaded = saved.keys() == there.keys() and all(torch.equal(x, there[name]) for name, x in saved.items())
    go(second, 2, 4)
    noise, difference = far(whole, again), far(whole, second)
    return {"loaded_to_the_bit": loaded, "noise": noise, "difference": difference, "within": loaded and difference <= 10 * noise}


# --- 1. the quickstart ------------------------------------------------------------------------------------------------
def quickstart(device: str, rehearse: bool) -> dict:
    from instruct_goose.recipes.quickstart import QuickstartConfig, run_quickstart

    small = dict(reviews=300, pairs=60, held_out_pairs=40, sft_steps=12, rm_steps=6, steps=2, batch_size=16, eval_samples=32)
    with tempfile.TemporaryDirectory() as folder:
        summary = run_quickstart(QuickstartConfig(**small if rehearse else {}, device=device, baselines=False, progress=False,
                                                  output_dir=Path(folder) / "run"))
    return {k: summary[k] for k in ("wall_seconds", "before", "after", "sft", "reward_model") if k in summary}


# --- all of it --------------------------------------------------------------------------------------------------------
def gpu_name(device: str) -> dict:
    import torch

    if device == "cpu": return {"gpu": "none: a rehearsal on the CPU"}
    p = torch.cuda.get_device_properties(0)
    return {"gpu": p.name, "memory_gib": p.total_memory / 2**30, "capability": f"{p.major}.{p.minor}", "cuda": torch.version.cuda}


def measure(rehearse: bool) -> dict:
    import torch

    device, sizes = ("cpu", TINY) if rehearse else ("cuda", SIZES)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    made = models(rehearse)
    figures = {"origin": origin("python evidence/gpu.py") | gpu_name(device), "rehearsal": rehearse, "sizes": sizes, "models": {}}
    for name, make in made.items():
        row = {dtype: iteration(make, dtype, device, sizes) for dtype in UNIT}
        figures["models"][name] = row | {"agreement": agreement(make, device, sizes)}
        print(name, json.dumps(rounded(figures["models"][name], 3)), flush=True)
    figures["pieces_ms"] = pieces(device, rehearse)
    print("pieces", json.dumps(rounded(figures["pieces_ms"], 3)), flush=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    figures["resume"] = resumed(next(iter(made.values())), device, sizes)
    torch.use_deterministic_algorithms(False)
    print("resume", figures["resume"], flush=True)
    return figures | {"quickstart": quickstart(device, rehearse)}


def gpu_table(path: Path = root / "evidence/gpu.json") -> str:
    "For the Tables page: what was measured, in Markdown, or that nothing was. A rehearsal measures nothing."
    figures = json.loads(path.read_text("utf-8")) if path.is_file() else None
    if figures is None or figures["rehearsal"]:
        return "Measured on CPUs only so far. `make evidence ARGS=gpu` measures a GPU where there is one, and its figures then stand here."
    return _table(figures)


def _table(figures: dict) -> str:
    o, q, r = figures["origin"], figures["quickstart"], figures["resume"]
    dtypes, models = list(UNIT), figures["models"]
    watched = all(row[dtype].get("computing_seconds") for row in models.values() for dtype in dtypes)  # an older record has not
    text = [f"Measured on one {o['gpu']} ({o['memory_gib']:.0f} GiB, CUDA {o['cuda']}, torch {o['torch']}), commit {o['commit'][:7]}: "
            f"a PPO iteration of {figures['sizes']['batch_size']} responses of up to {figures['sizes']['max_new_tokens']} tokens, random weights.",
            "| model | weights | tokens a second: writing | annotating | updating | most memory, GiB |" + " the GPU computes |" * watched
            + "\n|" + "---|" * (6 + watched)]
    for name, row in models.items():
        for dtype in dtypes:
            speed, memory = row[dtype]["tokens_per_second"], row[dtype]["peak_gib"]
            busy = f" {sum(row[dtype]['computing_seconds'].values()) / sum(row[dtype]['seconds'].values()):.0%} |" if watched else ""
            text[-1] += f"\n| {name} | {dtype} | {' | '.join(f'{speed[p]:,.0f}' for p in PHASES)} | {max(memory.values(), default=0):.1f} |{busy}"
    wrote = {name: [row[dtype]["tokens_per_second"]["rollout"] for dtype in ("float32", "bfloat16")] for name, row in models.items()}
    if slower := [name for name, (fine, coarse) in wrote.items() if coarse < fine]:
        text.append(f"Slower to write in bfloat16 than in float32: {'; '.join(slower)}. Why was not looked into.")
    for name, row in models.items():
        for dtype in dtypes:
            if ways := row[dtype].get("writers"):
                text.append(f"{name}, {dtype}, tokens a second of writing alone: "
                            + ", ".join(f"`{way}` {x['median']:,.0f} ({x['least']:,.0f} to {x['most']:,.0f})" for way, x in ways.items()) + ".")
    if watched:
        text.append("The last column is the share of an iteration in which the GPU computes. The rest of the time it waits to be told what: models "
                    "and batches of this size do not fill it.")
    if "pieces_ms" in figures:
        text.append("Log-probabilities of 4,096 tokens under GPT-2's head with their gradient, milliseconds, by the size of a "
                    f"[piece](reference/objective/logprobs_in_pieces.ipynb): {', '.join(f'{name} {ms:.0f}' for name, ms in figures['pieces_ms'].items())}.")
    text += ["Against the CPU's float64, largest difference of a log-probability, difference of the loss, relative difference of the "
             "gradient; in brackets the bound that rounding allows.", "| model | weights | log-probability | loss | gradient |\n|---|---|---|---|---|"]
    for name, row in models.items():
        for dtype in dtypes:
            a = row["agreement"][dtype]
            cells = (f"{a['difference'][k]:.1e} ({a['bound'][k]:.1e})" for k in ("logprobs", "loss", "gradient"))
            text[-1] += f"\n| {name} | {dtype} | {' | '.join(cells)} |"
    same = "to the bit" if r["difference"] == 0 else f"to {r['difference']:.1e}, where two equal runs differ by {r['noise']:.1e}"
    text.append(f"A resumed run ends where the undisturbed one does, {same}. The quickstart takes {q['wall_seconds']:.0f} seconds there: human score "
                f"{q['before']['human_score']:.2f} before, {q['after']['human_score']:.2f} after, {q['after']['grammatical']:.0%} grammatical.")
    return "\n\n".join(text)


def main(args: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny models, to see that everything runs")
    parser.add_argument("--output", type=Path, help="where to write; evidence/gpu.json unless it is a rehearsal")
    args = parser.parse_args(args)
    import torch

    if not args.rehearse:
        if not torch.cuda.is_available():
            raise SystemExit(f"no GPU here: torch {version('torch')} finds no CUDA device, and evidence/gpu.json is about one. Run this where "
                             "there is one, with a CUDA build of torch; `python evidence/gpu.py --rehearse` tries every line of it on the CPU")
        if dirty := git("status", "--porcelain", "--", "instruct_goose", "pyproject.toml", "constraints.txt"):
            raise SystemExit(f"commit first, so that the figures have a commit to name:\n{dirty}")
    figures = rounded(measure(args.rehearse))
    path = args.output or (None if args.rehearse else root / "evidence/gpu.json")
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"\nwritten: {path}")
    wrong = [f"{name}, {dtype}" for name, row in figures["models"].items() for dtype, a in row["agreement"].items() if not a["within"]]
    wrong += [] if figures["resume"]["within"] else ["resume"]
    if wrong: sys.exit(f"outside their bounds: {'; '.join(wrong)}")


if __name__ == "__main__": main()
