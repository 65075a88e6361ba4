"""Small models of many kinds through every stage: `python evidence/models.py`, two CPU-minutes.

A case makes a tiny model, stores it, loads it, trains it two steps and saves it, and is compared with what was asked for: finite losses, weights that
have moved, the router's loss in the log if and only if it was asked for, twice the layer passes with recomputed layers, adapters that reach the experts,
a saved directory in the precision of the base that says what the trained model says. A fault is an exception or a difference.
"""

import itertools
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from instruct_goose.config import RLHFConfig
from instruct_goose.models.adapters import expert_parameters, with_lora
from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.loading import load_model, save_model
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.supervised.dpo import train_dpo
from instruct_goose.supervised.reward_model_training import train_reward_model
from instruct_goose.supervised.sft import train_lm
from instruct_goose.training.trainer import RLHFTrainer

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "models")]  # their small models
from mixtures import SMALL  # noqa: E402
from small_trainer import BASE, EOS, ROTARY, TOKENIZER  # noqa: E402

LONGER = {"max_position_embeddings": 32}
FAMILIES = {
    "mixtral": lambda **k: transformers.MixtralConfig(**SMALL, num_local_experts=4, **k),
    "qwen3_moe": lambda **k: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, head_dim=8, **k
    ),
    "gpt_oss": lambda **k: transformers.GptOssConfig(**SMALL, num_local_experts=4, head_dim=8, **k),
    "llama": lambda **k: transformers.LlamaConfig(**ROTARY | LONGER, **k),
    "gemma3": lambda **k: transformers.Gemma3TextConfig(**ROTARY | LONGER, head_dim=8, **k),
    "gpt2": lambda **k: transformers.GPT2Config(**BASE | LONGER, **k),
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
STAGES = ("train", "sft", "dpo", "reward-model")
PAIRS = [("w1 w2", "w3"), ("w4", "w5 w6 w7")]


class Case(NamedTuple):
    "A family in a stage, and what is asked for besides."

    family: str
    stage: str
    router: bool  # its auxiliary loss is trained
    adapters: bool
    bf16: bool  # the base is stored in it
    checkpointing: bool  # transformers is asked to recompute layers
    tied: bool  # head and embedding


def cases(n: int = 60) -> list[Case]:
    "Every family in every stage, with options that are dealt out so that each pair of them occurs."
    found = []
    options = list(itertools.product([False, True], repeat=5))
    for k in range(n):
        family = list(FAMILIES)[k % len(FAMILIES)]
        stage = STAGES[(k // len(FAMILIES)) % len(STAGES)]
        router, *others = options[(13 * k + 7 * (k // 24) + 5) % len(options)]
        found.append(Case(family, stage, router and family in MIXTURES, *others))
    return found


class Passes:
    "Count a model's layer passes that have a gradient, below any checkpoint."

    def __init__(self, model: torch.nn.Module):
        self.n = 0
        for name, part in model.named_modules():
            if name.rsplit(".", 1)[-1] in ("input_layernorm", "ln_1"):
                part.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.n += torch.is_grad_enabled()


def train(case: Case, model: PreTrainedModel) -> tuple[list[dict], torch.nn.Module]:
    "Train two steps; the log, and what is to be saved."
    few = dict(steps=2, lr=1e-2, batch_size=2, progress=False)
    if case.stage == "sft":
        return train_lm(model, TOKENIZER, ["w1 w2 w3", "w4", "w5 w6"], **few), model
    if case.stage == "dpo":
        reference = create_reference_model(model)
        return train_dpo(model, TOKENIZER, PAIRS, ref_model=reference, **few), model
    if case.stage == "reward-model":
        judge = RewardModel.from_causal_lm(model, TOKENIZER)
        return train_reward_model(judge, PAIRS, **few), judge
    config = RLHFConfig.preset(
        "grpo", device="cpu", batch_size=8, group_size=4, max_new_tokens=6, lr=1e-2
    )
    trainer = RLHFTrainer(model, config=config, tokenizer=TOKENIZER)

    def reward(texts: list[str]) -> list[float]:
        return [text.split().count("w1") - 0.1 * len(text) for text in texts]

    return trainer.train(["w0 w3", "w5"], reward, steps=2, progress=False), trainer.agent


def fault_of(case: Case, folder: Path) -> str | None:
    "Run a case; what is not as it was asked for, None: nothing."
    model = stored_model(case, folder)
    if model.dtype != torch.float32:
        return f"it learns in {model.dtype}"
    is_policy = case.stage != "reward-model"
    if case.adapters and is_policy:
        with_lora(model, rank=2, experts=case.family in MIXTURES)
        learning = sum(p.requires_grad for n, p in model.named_parameters() if "experts" in n)
        if learning != 2 * len(expert_parameters(model)):
            return f"{learning} tensors of experts' adapters learn"
    if case.checkpointing and is_policy:
        model.activation_checkpointing_enable()
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    passes = Passes(model)
    log, trained = train(case, model)
    fault = log_fault(case, log)
    if fault is None and is_policy:
        after = [p for p in model.parameters() if p.requires_grad]
        if all(torch.equal(x, y) for x, y in zip(before, after, strict=True)):
            return "no weight has moved"
        times = passes.n / (2 * len(log) * log[0].get("updates", 1))
        if times != 1 + case.checkpointing:
            return f"{times:g} passes through each layer in an update"
    return fault or saved_fault(case, trained, folder)


def stored_model(case: Case, folder: Path) -> PreTrainedModel:
    "Make the case's model, store it, and load it to learn in."
    config = FAMILIES[case.family](tie_word_embeddings=case.tied)
    if case.router:
        config.output_router_logits = True
        config.router_aux_loss_coef = 0.1
    torch.manual_seed(0)
    stored = AutoModelForCausalLM.from_config(config)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    stored.to(dtype).save_pretrained(folder / "base")
    return load_model(folder / "base")


def log_fault(case: Case, log: list[dict]) -> str | None:
    "What is wrong with the losses in a log; None: nothing."
    losses = [row.get("loss", row.get("policy_loss")) for row in log]
    if not all(isinstance(x, float) and x == x for x in losses):
        return f"its losses are {losses}"
    if any(("router_aux_loss" in row) != case.router for row in log):
        return f"router_aux_loss: asked for is {case.router}, the log has {sorted(log[0])}"
    return None


def saved_fault(case: Case, trained: torch.nn.Module, folder: Path) -> str | None:
    "Save what was trained, load it again, and compare what both say of a text."
    ids = torch.tensor([[3, 5, 2, 7]])
    rounding = 0.1 if case.bf16 else 1e-4
    trained.eval()
    if isinstance(trained, RewardModel):
        trained.save_pretrained(folder / "saved")
        again = RewardModel.from_pretrained(folder / "saved").eval()
        gap = (again(ids) - trained(ids)).abs().max().item()
        dtype = again.model.dtype
    else:
        model = trained if isinstance(trained, PreTrainedModel) else trained.model
        save_model(trained, TOKENIZER, folder / "saved", [EOS])
        loaded = load_model(folder / "saved", dtype="auto").eval()
        gap = (loaded(ids).logits - model(ids).logits).abs().max().item()
        dtype = loaded.dtype
    if dtype != (torch.bfloat16 if case.bf16 else torch.float32):
        return f"it is saved in {dtype}"
    if not gap <= rounding:
        return f"what was saved is {gap:.2g} from what was trained"
    return None


def record() -> dict:
    "The table: what was tried with each option, and the faults."
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    tried: Counter[str] = Counter()
    faults = []
    rows = []
    for case in cases():
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fault = fault_of(case, Path(folder))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        asked = [name for name in Case._fields[2:] if getattr(case, name)]
        tried.update([case.family, case.stage, *asked])
        rows.append({"case": " ".join([case.family, case.stage, *asked]), "fault": fault})
        if fault is not None:
            faults.append(rows[-1])
            print(f"FAULT {rows[-1]['case']}: {fault}", flush=True)
    return {"tried": len(rows), "by": dict(tried), "faults": faults, "cases": rows}


if __name__ == "__main__":
    print(json.dumps(record(), ensure_ascii=False, indent=1))
