"""vLLM itself as the sampler, on a CPU, in an environment of its own.

    make engines      builds .venv-engines and runs this; downloads, some ten minutes

Each case trains a model of two blocks whose head is tied to its embedding, and asks one thing of the
engine. The record has the versions, and what each case found.
"""

import json
import os
import platform
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.models.adapters import with_lora
from instruct_goose.models.tokens import unpad, word_tokenizer
from instruct_goose.recipes.training import train_in
from instruct_goose.rollouts.sampler import PolicySampler
from instruct_goose.rollouts.vllm import EngineSampler, VLLMEngine

root = Path(__file__).parents[1]
RECORD = root / "evidence/engines.json"
PACKAGES = ("vllm-cpu", "torch", "transformers", "peft")
WORDS = "the a film plot is was good bad one two three four five six seven eight".split()
PROMPTS = ["the film", "a", "plot is bad", "one two three four five six seven eight is"]
LARGEST = 1e-4  # of |ρ − 1| between engine and trainer, in float32


def likes_good(texts):
    "Count a word."
    return [float(text.split().count("good")) for text in texts]


def new_model():
    "An untrained model, always the same, and its tokenizer."
    end = "<end>"
    tokenizer = word_tokenizer(WORDS, 64, pad=end, bos=end, eos=end)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def start_engine(folder):
    "vLLM with the untrained model, which is saved in a folder first."
    from vllm import LLM

    model, tokenizer = new_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="instruct_goose.rollouts.vllm.WorkerExtension",
    )
    return VLLMEngine(llm, patience=60.0)


def trainer_with(engine, preset="grpo", lora=False, stop_token_ids=(), **settings):
    "A trainer whose responses the engine writes."
    model, tokenizer = new_model()
    if lora:
        model = with_lora(model, 8)
    defaults = dict(batch_size=32, max_new_tokens=6, lr=3e-3, beta=0.0, device="cpu", steps=12)
    if preset == "grpo":
        defaults["group_size"] = 8
    config = RLHFConfig.preset(preset, **defaults | settings)
    trainer = RLHFTrainer(
        model, config=config, tokenizer=tokenizer, stop_token_ids=list(stop_token_ids)
    )
    trainer.use_sampler(lambda agent, tokens: EngineSampler(agent, tokens, engine))
    return trainer


def learns(engine, preset, **settings):
    "Twelve iterations: the reward rises, and engine and trainer agree."
    trainer = trainer_with(engine, preset, **settings)
    start = time.perf_counter()
    history = trainer.train(PROMPTS, likes_good, progress=False)
    rewards = [metrics["reward_mean"] for metrics in history]
    deviation = max(metrics["max_sampler_deviation"] for metrics in history)
    found = {
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "max_sampler_deviation": deviation,
        "seconds": time.perf_counter() - start,
    }
    return found | {"passed": deviation <= LARGEST and rewards[-1] > rewards[0] + 0.5}


def responses(sampler, trainer, prompts, generator=None):
    "The response ids to each prompt."
    rollout = sampler(trainer.encode(prompts), 1, trainer.config, generator)
    return unpad(rollout.response_ids, rollout.mask)


def ragged_prompts(engine):
    "Prompts of one to nine tokens get the likeliest responses that the trainer's sampler writes."
    trainer = trainer_with(engine)
    own = PolicySampler(trainer.agent, trainer.tokens)
    theirs = responses(trainer.sampler, trainer, PROMPTS)
    return {"responses": theirs, "passed": theirs == responses(own, trainer, PROMPTS)}


def stop_ids(engine):
    "A second stop id ends responses, and is their last token."
    tokenizer = new_model()[1]
    stop = tokenizer.convert_tokens_to_ids("film")
    trainer = trainer_with(engine, stop_token_ids=(stop,), max_new_tokens=20)
    generator = torch.Generator().manual_seed(0)
    written = responses(trainer.sampler, trainer, PROMPTS * 8, generator)
    ended = [ids for ids in written if ids[-1] == stop]
    clean = all(stop not in ids[:-1] for ids in written)
    return {"ended": len(ended), "of": len(written), "passed": clean and len(ended) > 0}


def prefix_cache(engine):
    "After an update nothing that was cached under the old weights is used."
    trainer = trainer_with(engine, lr=3e-2)
    long = [" ".join(WORDS * 2) + " " + word for word in WORDS]
    before = responses(trainer.sampler, trainer, long)
    cached = responses(trainer.sampler, trainer, long)
    trainer.train(PROMPTS, likes_good, steps=2, progress=False)
    after = responses(trainer.sampler, trainer, long)
    own = responses(PolicySampler(trainer.agent, trainer.tokens), trainer, long)
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    return {"changed": changed, "passed": before == cached and after == own and changed > 0}


class HoldsBack:
    "An engine that takes every fourth of the weights it is given."

    def __init__(self, engine):
        self.engine = engine
        self.given = 0

    def generate(self, prompts, request):
        return self.engine.generate(prompts, request)

    def load_weights(self, model):
        if self.given % 4 == 0:
            self.engine.load_weights(model)
        self.given += 1


def weights_held_back(engine):
    "Without a cap old weights are an error; with one training goes on, and the log says it."
    try:
        trainer_with(HoldsBack(engine)).train(PROMPTS, likes_good, progress=False)
        error = None
    except ValueError as e:
        error = str(e).splitlines()[0]
    trainer = trainer_with(HoldsBack(engine), importance_cap=2.0)
    history = trainer.train(PROMPTS, likes_good, progress=False)
    kl = [metrics["sampler_kl"] for metrics in history]
    rewards = [metrics["reward_mean"] for metrics in history]
    fresh = max(kl[::4])
    stale = max(kl)
    passed = error is not None and fresh < 1e-6 < 1e-3 < stale and rewards[-1] > rewards[0] + 0.5
    return {
        "error_without_cap": error,
        "sampler_kl_fresh": fresh,
        "sampler_kl_stale": stale,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "passed": passed,
    }


def child_processes(pid):
    "The processes that one has started, and theirs."
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found += [int(folder.name), *child_processes(int(folder.name))]
    return found


def dead_engine(engine, folder):
    "The engine's processes are killed in iteration 4; a new one resumes, and ends as without."
    whole = trainer_with(engine, steps=8)
    whole.train(PROMPTS, likes_good, progress=False)
    run = folder / "run"
    trainer = trainer_with(engine, steps=8)
    before = set(child_processes(os.getpid()))

    def kill(metrics_or_texts):
        if trainer.iteration == 4:
            for pid in before:
                os.kill(pid, signal.SIGKILL)
        return likes_good(metrics_or_texts)

    options = dict(progress=False, trial=False, save_every=2)
    try:
        train_in(trainer, run, PROMPTS, kill, **options)
        error = None
    except Exception as e:
        error = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    engine = start_engine(folder / "again")
    resumed = trainer_with(engine, steps=8)
    train_in(resumed, run, PROMPTS, likes_good, resume=True, **options)
    pairs = zip(whole.agent.parameters(), resumed.agent.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    passed = error is not None and resumed.iteration == 8 and difference < 1e-4
    return {"error": error, "largest_difference": difference, "passed": passed}


def run_engines():
    "Every case, one after the other; the last one needs a second engine."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        engine = start_engine(folder / "model")
        cases = {"start": {"seconds": time.perf_counter() - start, "passed": True}}
        work = {
            "grpo": lambda: learns(engine, "grpo"),
            "ppo": lambda: learns(engine, "ppo", lr=2e-3, minibatches=2, steps=20),
            "ragged_prompts": lambda: ragged_prompts(engine),
            "stop_ids": lambda: stop_ids(engine),
            "prefix_cache": lambda: prefix_cache(engine),
            "lora": lambda: learns(engine, "grpo", lora=True, lr=2e-2),
            "weights_held_back": lambda: weights_held_back(engine),
            "dead_engine": lambda: dead_engine(engine, folder),
        }
        for case, check in work.items():
            cases[case] = check()
            write_record(cases)
            print(case, json.dumps(cases[case]), flush=True)
    return cases


def write_record(cases):
    "The versions, and what each case has found so far."
    record = {
        "versions": {package: version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "device": "cpu",
        "cases": cases,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    found = run_engines()
    failed = [name for name, case in found.items() if not case["passed"]]
    print("failed: " + ", ".join(failed) if failed else f"all {len(found)} cases passed")
    sys.exit(bool(failed))
