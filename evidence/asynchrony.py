"""What old samples cost and what asynchronous rollouts save. `python evidence/run.py asynchrony`; two minutes.

`staleness_costs` trains tables of bigrams on samples that are some updates old, 32 seeds at once, and computes the expected reward
exactly. `throughput` times the AsyncTrainer with a reward function that sleeps.
"""

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.config import RLHFConfig
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.objective.advantages import group_advantages
from instruct_goose.objective.policy_loss import policy_loss, sampler_weights
from instruct_goose.training.asynchronous import AsyncTrainer

SEEDS = 32
WORDS = 8
TOKENS = 16
RESPONSES = 64  # a rollout of one seed
UPDATES = 40
LAGS = (0, 1, 2, 4, 8)
LEARNING_RATE = 0.1
WAYS = ("no weights", "token weights", "response weights", "μ as π_old")
CAP = 2.0
REWARD_SECONDS = 2.0
STALENESS = (0, 1, 2, 4, 8)
ITERATIONS = 20


def climb(generator):
    "Each word has one right successor: the hits of each seed, (seeds, words, words), and a score for each count of them."
    successors = torch.stack([torch.randperm(WORDS, generator=generator) for _ in range(SEEDS)])
    hits = torch.nn.functional.one_hot(successors, WORDS).bool()
    return hits, torch.arange(TOKENS + 1) / TOKENS


def balance(generator):
    "One word is to come in half of the places: the hits of each seed, and a score for each count of them."
    hits = torch.zeros(SEEDS, WORDS, WORDS, dtype=torch.bool)
    hits[:, :, 0] = True
    half = TOKENS / 2
    return hits, 1 - (torch.arange(TOKENS + 1) - half).abs() / half


TASKS = {"climb": climb, "balance": balance}


def expected_reward(tables, hits, scores):
    "The exact mean score, (seeds,): from the distribution of the last word and the count of hits."
    probabilities = tables.softmax(-1)
    hit = probabilities * hits
    miss = probabilities * ~hits
    chance = torch.zeros(SEEDS, WORDS, TOKENS + 1)  # of a last word with so many hits before
    chance[..., 0] = 1 / WORDS  # the word before the first one
    for _ in range(TOKENS):
        with_hit = torch.einsum("svc,svw->swc", chance, hit).roll(1, -1)
        chance = torch.einsum("svc,svw->swc", chance, miss) + with_hit
    return (chance.sum(1) * scores).sum(-1)


def sample(tables, generator):
    "Token ids of each response, with the token before the first one: (seeds, responses, 1 + tokens)."
    seeds = torch.arange(SEEDS)[:, None]
    probabilities = tables.softmax(-1)
    token = torch.randint(WORDS, (SEEDS, RESPONSES), generator=generator)
    tokens = [token]
    for _ in range(TOKENS):
        rows = probabilities[seeds, token].reshape(-1, WORDS)
        token = torch.multinomial(rows, 1, generator=generator).reshape(SEEDS, RESPONSES)
        tokens.append(token)
    return torch.stack(tokens, -1)


def logprobs_of(tables, tokens):
    "log π of each token of the responses, (seeds · responses, tokens)."
    seeds = torch.arange(SEEDS)[:, None, None]
    logprobs = tables.log_softmax(-1)[seeds, tokens[..., :-1], tokens[..., 1:]]
    return logprobs.flatten(0, 1)


def train_tables(task, lag, way):
    "The expected reward before and after each update, and the largest mean of w − 1 − log w."
    generator = torch.Generator().manual_seed(0)
    hits, scores_of_counts = TASKS[task](generator)
    tables = torch.zeros(SEEDS, WORDS, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([tables], lr=LEARNING_RATE)
    seeds = torch.arange(SEEDS)[:, None, None]
    past = []
    rewards = [expected_reward(tables.detach(), hits, scores_of_counts)]
    sampler_kl = 0.0
    for _ in range(UPDATES):
        past.append(tables.detach().clone())
        sampler = past[max(0, len(past) - 1 - lag)]
        tokens = sample(sampler, generator)
        count = hits[seeds, tokens[..., :-1], tokens[..., 1:]].sum(-1)
        scores = scores_of_counts[count].flatten()
        mask = torch.ones(len(scores), TOKENS, dtype=torch.bool)
        advantages = group_advantages(scores, RESPONSES)[:, None].expand_as(mask)
        sampled = logprobs_of(sampler, tokens)
        old = logprobs_of(past[-1], tokens)
        difference = old - sampled
        sampler_kl = max(sampler_kl, (difference.exp() - 1 - difference).mean().item())
        weights = None
        if way == "token weights":
            weights = sampler_weights(old, sampled, mask, CAP)
        if way == "response weights":
            weights = sampler_weights(old, sampled, mask, CAP, level="product")
        if way == "μ as π_old":
            old = sampled
        loss = policy_loss(logprobs_of(tables, tokens), old, advantages, mask, weights=weights)
        optimizer.zero_grad()
        (loss.sum() / (RESPONSES * TOKENS)).backward()  # the mean of each seed
        optimizer.step()
        rewards.append(expected_reward(tables.detach(), hits, scores_of_counts))
    return torch.stack(rewards), sampler_kl


def staleness_costs():
    "One row for each task, way and lag."
    rows = []
    for task in TASKS:
        for way in WAYS:
            for lag in LAGS:
                rewards, sampler_kl = train_tables(task, lag, way)
                row = {
                    "task": task,
                    "way": way,
                    "lag": lag,
                    "mean": [round(x, 4) for x in rewards.mean(1).tolist()],
                    "std": [round(x, 4) for x in rewards.std(1).tolist()],
                    "sampler_kl": round(sampler_kl, 4),
                }
                rows.append(row)
                print(
                    task, way, lag, row["sampler_kl"], row["mean"][::8], row["std"][-1], flush=True
                )
    return rows


def slow_reward(texts):
    "Count a word, as slowly as a call over the network."
    time.sleep(REWARD_SECONDS)
    return [float(text.split().count("good")) for text in texts]


def timed(max_staleness):
    "Seconds of an iteration, and how old the samples were."
    words = word_tokenizer("the a film plot is was good bad".split(), model_max_length=16)
    torch.manual_seed(0)
    shape = dict(vocab_size=len(words), n_positions=16, n_embd=32, n_layer=1, n_head=2)
    ends = dict(bos_token_id=None, eos_token_id=words.eos_token_id)
    config = RLHFConfig.preset(
        "grpo",
        steps=ITERATIONS,
        batch_size=16,
        group_size=8,
        max_new_tokens=6,
        lr=1e-3,
        epochs=1,
        minibatches=1,
        importance_cap=2.0,
        device="cpu",
    )
    trainer = AsyncTrainer(
        GPT2LMHeadModel(GPT2Config(**shape, **ends)),
        config=config,
        tokenizer=words,
        max_staleness=max_staleness,
    )
    start = time.perf_counter()
    history = trainer.train(["the film is", "a plot"], slow_reward, progress=False)
    seconds = (time.perf_counter() - start) / ITERATIONS
    ages = [metrics["staleness"] for metrics in history]
    return {
        "max_staleness": max_staleness,
        "seconds_per_iteration": round(seconds, 3),
        "mean_staleness": round(sum(ages) / len(ages), 2),
        "largest_staleness": max(ages),
    }


def throughput():
    "One row for each bound on the staleness."
    torch.set_num_threads(1)
    rows = []
    for max_staleness in STALENESS:
        rows.append(timed(max_staleness))
        print(rows[-1], flush=True)
    return rows


def record():
    "Both, with what they were measured on."
    return {
        "world": {
            "seeds": SEEDS,
            "words": WORDS,
            "tokens": TOKENS,
            "responses": RESPONSES,
            "updates": UPDATES,
            "lr": LEARNING_RATE,
            "cap": CAP,
        },
        "costs": staleness_costs(),
        "reward_seconds": REWARD_SECONDS,
        "iterations": ITERATIONS,
        "throughput": throughput(),
    }
