"""Five hundred healthy runs shown to the doctor: `python evidence/run.py doctor_healthy`.

Each run draws its settings, its reward, its prompts, its start and its course from its number. A
run trains in about a second; `python evidence/doctor_healthy.py --runs 0 100` shows some. The record keeps every finding with its evidence, and whether the
finding is true by `TRUTH`, which looks at the run itself and not at its log.
"""

import argparse
import dataclasses
import json
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from doctor_unseen import CHOICES, USUAL, KeepTokens
from torch import nn

from instruct_goose.config import RLHFConfig
from instruct_goose.core.random import torch_threads
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.report import read_run
from instruct_goose.models.agent import Agent
from instruct_goose.tasks.probes import tiny_world
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer

# --- what a run is made of ------------------------------------------------------------------------
SETTINGS = CHOICES | dict(
    batch_size=[1, 2, 8, 32, 64],
    max_new_tokens=[1, 2, 3, 6],
    eval_every=[None, 2],
    eval_greedy=[False, True],
    keep_best=[False, True],
    max_kl_to_reference=[None, None, 2.0],
    keep_special_tokens=[False, True],
    micro_batch_tokens=[None, 40],
    entropy_step=[0.005, 0.1],
    beta=[0.0, 0.02, 0.2, 1.0],
    steps=[1, 2, 5, 9, 14],
)


def graded(text: str) -> float:
    return 0.2 * text.count("a") - 0.1 * text.count("b") + 0.03 * len(text)


def heavy_tailed(text: str) -> float:
    return math.exp(2 * text.count("a"))


# by name: the score of a text
REWARDS: dict[str, Callable[[str], float]] = {
    "graded": graded,
    "graded, plus 1": lambda text: graded(text) + 1,
    "graded, plus 1000": lambda text: graded(text) + 1000,
    "graded, plus 1000000": lambda text: graded(text) + 1e6,
    "graded, times 0.001": lambda text: graded(text) / 1000,
    "graded, times 1000": lambda text: graded(text) * 1000,
    "graded, minus 10": lambda text: graded(text) - 10,
    "0 or 1": lambda text: float("a" in text),
    "rarely 1": lambda text: float(text.count("a") > 3),
    "solved: always 1": lambda text: 1.0,
    "failed: always 0": lambda text: 0.0,
    "heavy-tailed": heavy_tailed,
    "the length": lambda text: float(len(text.split())),
}
PROMPTS = {
    "six": ["", "a", "b c", "c", "a b", "b"],
    "one": ["a b"],
    "two": ["a", "b c c"],
    "of one length": ["a", "b", "c"],
    "long": ["a b c a b c", "c c c c c c", "a a b b c c a"],
}
STARTS = ("uniform", "skewed", "varied", "sharp", "dropout")
COURSES = ("whole", "whole", "resumed", "killed", "grown")


class HealthyRun(NamedTuple):
    "All that a healthy run is made of."

    settings: dict[str, Any]
    reward: str
    prompts: str
    start: str
    course: str
    copies_values: bool


def healthy_run(number: int) -> HealthyRun:
    "Draw the run of this number. Settings that cannot be combined are drawn again."
    dice = random.Random(number)
    while True:
        names = dice.sample([*SETTINGS], dice.randint(2, 16))
        settings = USUAL | {name: dice.choice(SETTINGS[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                RLHFConfig(**settings)
            except ValueError:
                continue
        return HealthyRun(
            settings,
            reward=dice.choice([*REWARDS]),
            prompts=dice.choice([*PROMPTS]),
            start=dice.choice(STARTS),
            course=dice.choice(COURSES),
            copies_values=dice.random() < 0.3,
        )


def started(start: str, seed: int) -> tuple[nn.Module, Any]:
    "A tiny model that begins where the run begins, with its tokenizer."
    chances = {"skewed": (0.7, 0.1, 0.15, 0.05), "sharp": (0.97, 0.01, 0.01, 0.01)}
    model, tokenizer = tiny_world(chances.get(start, (0.25,) * 4), seed=seed)
    if start in ("varied", "dropout"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nn.init.normal_(model.lm_head.weight, std=0.3)
    if start == "dropout":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
    return model, tokenizer


def missed(experience: Any, gamma: float) -> float:
    "Σ(V − G)² / ΣG² over the sampled tokens, G the discounted sum of the rewards that follow."
    error = 0.0
    square = 0.0
    for rewards, values, own in zip(
        experience.rewards, experience.values, experience.mask, strict=True
    ):
        total = 0.0
        for reward, value in reversed([*zip(rewards[own].tolist(), values[own].tolist())]):
            total = reward + gamma * total
            error += (value - total) ** 2
            square += total**2
    return error / square if square else 0.0


class Facts(Callback):
    "What happened in each iteration, read from the rows themselves."

    def __init__(self):
        self.rows: list[dict] = []

    def on_iteration(self, trainer, experience, metrics):
        mask = experience.mask
        scores = experience.scores.double()
        lengths = mask.sum(-1).double()
        size = trainer.config.group_size
        groups = scores.view(-1, size) if size > 1 and len(scores) % size == 0 else scores[None]
        spread = groups.amax(-1) - groups.amin(-1)
        with torch.no_grad():
            moved = trainer.evaluate_tokens(experience).logprobs - experience.old_logprobs
        pairs = set()
        ended = 0
        for ids, own in zip(experience.response_ids, mask, strict=True):
            tokens = ids[own].tolist()
            pairs.update(zip(tokens, tokens[1:], strict=False))
            ended += tokens[-1] in trainer.eos_ids
        fact = {
            "equal": float((spread <= 4e-7 * groups.abs().amax(-1)).double().mean()),
            "responses": len(scores),
            "spread": float(scores.std(unbiased=False)),
            "line": abs(float(torch.corrcoef(torch.stack([scores, lengths]))[0, 1].nan_to_num())),
            "nll": -float(experience.old_logprobs[mask].mean()),
            "moved": float(moved[mask].abs().mean()),
            "ended": ended / len(scores),
            "pairs": len(pairs),
            "beta": trainer.beta,
        }
        if experience.ref_logprobs is not None:
            away = experience.old_logprobs - experience.ref_logprobs
            fact["away"] = float(away[mask].mean())
        if experience.returns is not None:
            fact["missed"] = missed(experience, trainer.config.gamma)
            fact["returns"] = float(experience.returns[mask].std(unbiased=False))
        self.rows.append(fact)


@torch.no_grad()
def prompts_against_chance(model: nn.Module, tokenizer: Any, prompts: list[str]) -> float:
    "−log π of the prompts' tokens behind the first, in units of log |V|; 1 is a uniform guess."
    total = 0.0
    count = 0
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        if ids.shape[1] > 1:
            logprobs = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
            total -= float(logprobs.gather(-1, ids[0, 1:, None]).sum())
            count += ids.shape[1] - 1
    return total / max(count, 1) / math.log(model.config.vocab_size)


def made_run(run: HealthyRun) -> tuple[list[dict], dict, dict, list[dict]]:
    "Train: metrics, settings, tokens and facts. Raises ValueError where the run refuses its settings."
    config = RLHFConfig(**run.settings)
    kept = KeepTokens()
    facts = Facts()

    def trainer(seed: int) -> RLHFTrainer:
        model, tokenizer = started(run.start, seed)
        agent = Agent(model, value_model="copy" if run.copies_values else None)
        return RLHFTrainer(agent, None, config, tokenizer=tokenizer, callbacks=[kept, facts])

    score = REWARDS[run.reward]
    prompts = PROMPTS[run.prompts]
    options: dict[str, Any] = {"progress": False}
    if config.eval_every is not None:
        options["held_out"] = ["a c", "b"]

    def reward(texts: list[str]) -> list[float]:
        return [score(text) for text in texts]

    first = trainer(config.seed)
    half = config.steps // 2
    if run.course == "resumed" and half and not first.stop_reason:
        metrics = list(first.train(prompts, reward, half, **options))
        if first.stop_reason is None:
            second = trainer(config.seed)
            second.load_state_dict(first.state_dict())
            metrics += second.train(prompts, reward, **options)
    elif run.course == "grown" and config.lr_schedule == "constant":
        metrics = list(first.train(prompts, reward, **options))
        if first.stop_reason is None:
            metrics += first.train(prompts, reward, 3, **options)
    else:
        metrics = list(first.train(prompts, reward, **options))
    model, tokenizer = started(run.start, config.seed)
    facts.rows[0]["prompts"] = prompts_against_chance(model, tokenizer, prompts)
    facts.rows[0]["held out"] = bool({*prompts} & {*options.get("held_out", ())})
    return metrics, dataclasses.asdict(config), kept.record, facts.rows


def as_read(metrics: list[dict], config: dict, tokens: dict, killed: bool) -> tuple:
    "The three as they come back from a run's directory; of a killed run the last line is cut."
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        lines = "".join(json.dumps(row) + "\n" for row in metrics)
        lines_of_tokens = "".join(
            json.dumps({"iteration": i, "responses": rows}) + "\n" for i, rows in tokens.items()
        )
        if killed and len(metrics) > 1:
            lines = lines[:-20]
            lines_of_tokens = lines_of_tokens[:-20]
        (directory / "metrics.jsonl").write_text(lines, "utf-8")
        (directory / "tokens.jsonl").write_text(lines_of_tokens, "utf-8")
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        run = read_run(directory)
    return run.metrics, run.summary | run.config, run.tokens


# --- is a warning true of the run? ----------------------------------------------------------------
def median_of(facts: list[dict], name: str) -> float:
    "The median of a fact over the iterations that have it; 0 without one."
    return median([fact[name] for fact in facts if name in fact] or [0.0])


def at_end(facts: list[dict], name: str) -> float:
    "The mean of a fact over the last quarter, three iterations at least."
    last = facts[-max(3, len(facts) // 4) :]
    return fmean(fact.get(name, 0.0) for fact in last)


def fell(facts: list[dict], name: str, share: float, first: int = 1) -> bool:
    "Is the end below this share of the first iterations?"
    return at_end(facts, name) < share * fmean(fact[name] for fact in facts[:first])


# A warning's sentence, asked of the run itself. The limits are a little wider than the doctor's.
TRUTH: dict[str, Callable[[list[dict]], bool]] = {
    "equal rewards": lambda facts: (
        median_of(facts, "responses") > 1
        and (median_of(facts, "equal") >= 0.75 or median_of(facts, "spread") < 1e-6)
    ),
    "foreign prompts": lambda facts: facts[0]["prompts"] > 1.1,
    "reward scale": lambda facts: median_of(facts, "returns") > 3.5,
    "entropy collapse": lambda facts: fell(facts, "nll", 0.5),
    "variety collapse": lambda facts: fell(facts, "pairs", 0.45, first=3),
    "length is reward": lambda facts: median_of(facts, "line") > 0.9,
    "never ends": lambda facts: at_end(facts, "ended") < 0.06,
    "small rewards": lambda facts: median_of(facts, "spread") < 0.6 * median_of(facts, "beta"),
    "drift": lambda facts: at_end(facts, "away") > 1.2,
    "harmful values": lambda facts: at_end(facts, "missed") > 1.5,
    "no clip": lambda facts: max(fact["moved"] for fact in facts) > 0.3,
    "large steps": lambda facts: max(fact["moved"] for fact in facts) > 0.3,
    "held out prompts trained": lambda facts: facts[0]["held out"],
}


def is_true(name: str, facts: list[dict]) -> bool:
    "Whether the sentence of a finding holds. An error is never true of a healthy run."
    return name in TRUTH and bool(TRUTH[name](facts))


# --- the record -----------------------------------------------------------------------------------
def findings_on(number: int) -> dict:
    "What the doctor says of the healthy run of this number."
    run = healthy_run(number)
    row: dict[str, Any] = {"run": number, "findings": []}
    with warnings.catch_warnings(), torch_threads(1):
        warnings.simplefilter("ignore")
        try:
            metrics, settings, tokens, facts = made_run(run)
        except (ValueError, FloatingPointError) as error:
            return row | {"refused": str(error).partition("\n")[0][:200]}
    read = as_read(metrics, settings, tokens, killed=run.course == "killed")
    facts = facts[: len(read[0])]
    for finding in diagnose(*read):
        row["findings"].append(
            {
                "name": finding.name,
                "severity": finding.severity,
                "evidence": finding.evidence,
                "true": is_true(finding.name, facts),
            }
        )
    return row


def record(first: int = 0, beyond: int = 500) -> dict:
    "What the doctor finds in each run of these numbers."
    rows = []
    for number in range(first, beyond):
        rows.append(findings_on(number))
        if number % 50 == 49:
            print(f"{number + 1} runs", flush=True)
    return {"runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs=2, default=(0, 500), help="first, and one beyond")
    rows = record(*parser.parse_args().runs)["runs"]
    counts = Counter((f["severity"], f["name"], f["true"]) for row in rows for f in row["findings"])
    for (severity, name, true), n in sorted(counts.items(), key=str):
        print(f"{n:4}  {severity:8} {name}  true: {true}")
    print(len(rows), "runs,", sum("refused" in row for row in rows), "refused")


if __name__ == "__main__":
    main()
