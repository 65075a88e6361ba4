"The main job: what it writes, what it refuses, what depends on what; the lesson and the committed runs keep the figures that it promises."

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from deep import first
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose.core import processes
from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes import quickstart
from instruct_goose.recipes.quickstart import (
    QuickstartConfig,
    make_data,
    make_lm,
    make_tokenizer,
    run_quickstart,
)
from instruct_goose.runs.directory import settings_of
from instruct_goose.tasks.film_reviews import vocabulary

TINY = dict(
    reviews=300,
    pairs=60,
    held_out_pairs=40,
    sft_steps=12,
    rm_steps=6,
    steps=2,
    batch_size=16,
    eval_samples=32,
    tune_steps=2,
    progress=False,
)
FIGURES = {
    "human_score",
    "reward_model_score",
    "grammatical",
    "distinct_2",
    "kl_to_reference",
    "response_length",
}


def weights(path):
    return {f.name: f.read_bytes() for f in path.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A whole run in seconds; the policy is kept as the trainer left it, and its bars in `said`."
    kept = {}
    make = quickstart.make_trainer

    def keep(*args):
        return kept.setdefault("trainer", make(*args))

    out = tmp_path_factory.mktemp("quickstart") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "make_trainer", keep)
        patch.setattr(processes, "SECONDS_UNSEEN", 0.0)
        config = QuickstartConfig(**TINY | {"progress": True}, output_dir=out)
        with (out.parent / "said").open("w") as said, contextlib.redirect_stderr(said):
            summary = run_quickstart(config)
        return out, summary, kept["trainer"]


def test_each_part_that_takes_a_second_has_a_progress_bar(run):
    said = (run[0].parent / "said").read_text()
    stages = ["1 SFT", "2 reward model", "ppo", "4 SFT on the best"]
    figures = ["held-out reviews", "held-out pairs", "held-out texts", "best of 8"]
    for name in [*stages, *figures, "their scores", "their KL"]:
        assert f"{name}: 100%" in said, name


def test_files_and_summary(run):
    out, summary, _ = run
    for model in ("sft", "reward_model", "policy"):
        assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= {
            p.name for p in (out / model).iterdir()
        }
    assert not [p for p in out.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in lines] == list(range(TINY["steps"])) and {
        "reward_mean",
        "kl_to_reference",
        "entropy",
        "clip_fraction",
        "explained_variance",
    } <= lines[0].keys()
    assert {p.name for p in out.glob("*.png")} == {
        "reward_and_kl.png",
        "entropy.png",
        "clip_fraction.png",
        "explained_variance.png",
    }
    samples = (out / "samples.md").read_text(encoding="utf-8")
    assert (
        "| prompt" in samples
        and "| SFT model" in samples
        and "best of 8" in samples
        and json.loads((out / "config.json").read_text())["reviews"] == 300
    )
    assert (
        json.loads((out / "summary.json").read_text()) == summary
        and str(out) not in (out / "summary.json").read_text()
    )
    assert (
        summary["seed"] == 0
        and summary["torch_threads"] == 1
        and summary["cpu_seconds"] > 0
        and summary["best_iteration"] is None
    )
    assert summary["reward_model"].keys() == {"pair_accuracy", "ceiling"} and summary[
        "baselines"
    ].keys() == {"best_of_8", "sft_on_best_of_8"}
    assert (
        summary["before"].keys() >= FIGURES <= summary["after"].keys()
        and summary["before"]["kl_to_reference"] == 0 < summary["after"]["kl_to_reference"]
    )


def test_plain_transformers_load_everything(run):
    out, _, trainer = run
    for name in ("sft", "policy"):
        tokenizer = AutoTokenizer.from_pretrained(out / name)
        batch = tokenizer(["the film", "every scene is"], return_tensors="pt", padding=True)
        logits = AutoModelForCausalLM.from_pretrained(out / name).eval()(**batch).logits
        assert logits.shape[-1] == len(tokenizer)
        if name == "policy":
            assert torch.equal(logits, trainer.agent.model(**batch).logits)
        else:
            assert not torch.equal(logits, trainer.agent.model(**batch).logits)


@pytest.mark.parametrize(
    "changed",
    first(1, [PRESETS["grpo"] | {"group_size": 4}, {"beta": 0.0}]),
    ids=["grpo", "beta 0"],
)
def test_what_changes_ppo_changes_nothing_before_it(run, tmp_path, changed):
    out, summary, _ = run
    other = run_quickstart(
        QuickstartConfig(**TINY | {"baselines": False} | changed, output_dir=tmp_path / "run")
    )
    for name in ("sft", "reward_model"):
        assert weights(tmp_path / "run" / name) == weights(out / name)
    assert weights(tmp_path / "run/policy") != weights(out / "policy")
    for key in ("sft", "reward_model", "before"):
        assert other[key] == summary[key]
    assert other["config"]["algorithm"] == ("grpo" if "advantage" in changed else "ppo")
    value = (tmp_path / "run/explained_variance.png").exists()
    assert value == ("advantage" not in changed)


def test_data_is_held_out_and_depends_on_the_seed_alone():
    small = dict(reviews=400, pairs=50, held_out_pairs=30, steps=3, batch_size=16, eval_samples=64)
    data = make_data(QuickstartConfig(**small, prompt_words=3))
    assert not set(data.held_out) & set(data.reviews)
    sides = {t for p in data.held_out_pairs for t in p.values()}
    assert sides <= set(data.held_out) and {t for p in data.pairs for t in p.values()} <= set(
        data.reviews
    )

    def begins(prompts, texts):
        return all(any(f"{t} ".startswith(f"{p} ") or not p for t in texts) for p in prompts)

    assert begins(data.prompts, data.reviews) and begins(data.held_out_prompts, data.held_out)
    assert {len(p.split()) for p in data.prompts} == {0, 1, 2, 3}
    assert (
        len(data.prompts),
        len(data.held_out_prompts),
        len(data.pairs),
        len(data.held_out_pairs),
    ) == (48, 64, 50, 30)
    assert asdict(make_data(QuickstartConfig(**small, prompt_words=3, beta=0.0, lr=1.0))) == asdict(
        data
    )
    assert make_data(QuickstartConfig(**small, seed=1)).reviews != data.reviews


def test_tokenizer_and_model():
    config = QuickstartConfig(max_new_tokens=50, prompt_words=4)
    tokenizer, ended = make_tokenizer(config), make_tokenizer(config, end=True)
    assert (
        set(vocabulary()) <= set(tokenizer.get_vocab())
        and tokenizer.model_max_length >= 1 + 4 + 50 + 1
    )
    text = "the plot is wonderful ."
    assert ended(text)["input_ids"] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    here = torch.get_rng_state()
    one, two, other = (make_lm(c, tokenizer) for c in (config, config, QuickstartConfig(seed=1)))
    assert (
        torch.equal(torch.get_rng_state(), here)
        and torch.equal(one.lm_head.weight, two.lm_head.weight)
        and not torch.equal(one.lm_head.weight, other.lm_head.weight)
    )
    assert one.config.n_positions == tokenizer.model_max_length and one.config.attn_pdrop == 0


MEASURED = json.loads((Path(__file__).parents[2] / "evidence/quickstart.json").read_text("utf-8"))[
    "machines"
]


def test_the_committed_figures_are_of_these_settings_in_ten_seeds_and_more_than_one_draw():
    ours = settings_of(QuickstartConfig())
    runs = [run for block in MEASURED.values() for run in block["runs"]]
    for machine, block in MEASURED.items():
        assert block["origin"]["processor"] in machine and block["origin"]["capability"] in machine
        assert {k: ours[k] for k in block["config"] if k in ours} == {
            k: v for k, v in block["config"].items() if k in ours
        }
        for run in block["runs"]:
            assert (
                len(run["curves"]["reward_mean"])
                == len(run["beta_0"]["curves"]["reward_mean"])
                == block["config"]["steps"]
            )
    assert {run["seed"] for run in runs} == set(range(10)) and len(
        {run["draw"] for run in runs}
    ) > 1
    assert len(
        {
            (machine, run["seed"], run["draw"])
            for machine, block in MEASURED.items()
            for run in block["runs"]
        }
    ) == len(runs)


def test_without_a_price_every_recorded_run_leaves_the_grammar():
    "Reward hacking: what ten seeds have in common, with the margin that they leave."
    for run in (run for block in MEASURED.values() for run in block["runs"]):
        priced, free = run["after"], run["beta_0"]["after"]
        assert (
            free["grammatical"] < priced["grammatical"] - 0.1
            and free["distinct_2"] < 0.8 * priced["distinct_2"]
        )
        assert free["kl_to_reference"] > 2.5 * priced["kl_to_reference"]
        assert free["reward_model_score"] > priced["reward_model_score"] + 0.02
