"Recipes on the stand-in: the command, the rewards by hand, a run that goes on, and the real model where its package is."

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from device.pretend import PretendGPU
from transformers import LlamaConfig, LlamaForCausalLM

import instruct_goose
from instruct_goose.cli.main import main
from instruct_goose.models import loading as smollm
from instruct_goose.models.agent import Agent
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.recipes import smollm as recipes
from instruct_goose.recipes.ratings import Review
from instruct_goose.recipes.smollm import Judge, train_judge
from instruct_goose.rollouts.rewards import RewardError
from instruct_goose.runs.checkpoints import checkpoints, load_checkpoint

TINY = dict(stand_in=True, progress=False, steps=2, batch_size=8, max_new_tokens=3, eval_samples=8)


def test_the_list_and_what_is_refused(capsys, monkeypatch, tmp_path):
    main(["recipe"])
    said = capsys.readouterr().out
    assert all(name in said for name in recipes.RECIPES)
    for args, why in (
        (["nothing"], "smollm-sentiment"),
        (["smollm-answers", "--algorithm", "dqn"], "2"),
        (["smollm-answers", "--resume"], "output_dir"),
        (["smollm-answers", "--data", "x", "--stand-in"], "reads no data"),
        (["smollm-reviews"], "--data DIR"),
    ):
        with pytest.raises(SystemExit, match=why):
            main(["recipe", *args])
    monkeypatch.setattr(smollm, "SMOLLM_PACKAGES", ("surely_not_a_package",))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="surely_not_a_package"):
        main(["recipe", "smollm-answers"])
    assert not any(tmp_path.glob("runs/*"))  # what cannot begin leaves no run behind


@pytest.mark.parametrize("name", ["smollm-sentiment", "smollm-answers", "smollm-reviews"])
def test_by_the_command_on_the_stand_in(name, tmp_path, capsys):
    out = tmp_path / "run"
    main(
        [
            "recipe",
            name,
            "--stand-in",
            "--no-progress",
            "--steps",
            "2",
            "--output-dir",
            str(out),
            "--seed",
            "4",
        ]
    )
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["seed"] == 4
        and summary["before"]["kl_to_reference"] == 0 < summary["after"]["kl_to_reference"]
    )
    assert {p.name for p in (out / "policy").iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "values",
    }
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    if name == "smollm-reviews":
        assert row["reward_mean"] == pytest.approx(row["reward_mean/proxy"]) and None not in (
            row["reward_mean/vader"],
            row["reward_mean/other_half"],
        )
    main(
        [
            "recipe",
            name,
            "--stand-in",
            "--no-progress",
            "--steps",
            "2",
            "--output-dir",
            str(out),
            "--seed",
            "4",
            "--resume",
        ]
    )
    assert "finished" in capsys.readouterr().out


def test_a_recipe_of_the_hub_is_settings_of_train(tmp_path, monkeypatch):
    "With a tiny model, rows of messages and a tiny classifier in place of the Hub's."
    lm, tokenizer = tiny_smollm(WORDS)
    for part in (lm, tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in SAID]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = RewardModel.from_causal_lm(lm, tokenizer)
    torch.nn.init.normal_(judge.model.get_submodule("score").weight)
    monkeypatch.setattr(recipes, "load_model", lambda place, kind: judge.model)
    monkeypatch.setattr(recipes, "load_tokenizer", lambda place: tokenizer)
    monkeypatch.setattr(recipes, "hub_classifier", recipes.hub_classifier.__wrapped__)
    config = recipes.recipe_settings(
        "hh-rlhf",
        model=str(tmp_path / "model"),
        dataset=None,
        data=tmp_path / "rows.jsonl",
        steps=1,
        batch_size=8,
        max_new_tokens=3,
        lora_rank=2,
        progress=False,
        output_dir=tmp_path / "run",
    )
    summary = recipes.run_train(config)
    assert (
        summary["config"]["algorithm"] == "grpo"
        and (tmp_path / "run/policy/adapter_model.safetensors").exists()
    )
    assert recipes.helpful([], [rows[0]["prompt"]], ["it is good"]) == pytest.approx(
        judge.score([f"\n\nHuman: {SAID[0]}\n\nAssistant: it is good"])
    )


def test_broken_off_and_gone_on_with_is_the_same_run(tmp_path):
    class Enough(Exception):
        "A plug that is pulled."

    def reward(completions):
        reward.asked += 1
        if reward.asked == 3 and reward.pull:
            raise Enough
        return recipes.sentiment(completions)

    task = recipes.SENTIMENT._replace(reward=reward)
    summaries = []
    for pull, resume in ((False, False), (True, False), (False, True)):
        reward.asked = 0
        reward.pull = pull
        config = recipes.recipe_settings(
            "smollm-sentiment",
            **TINY
            | dict(
                steps=4,
                output_dir=tmp_path / ("whole" if not (pull or resume) else "broken"),
                resume=resume,
            ),
        )
        if pull:
            with pytest.raises(RewardError, match="Enough"):
                recipes.run_task("x", config, task)
            names = load_checkpoint(checkpoints(tmp_path / "broken" / "checkpoints")[-1])[0]
            assert names and not [n for n in names if "base_layer" in n or "embed_tokens" in n]
        else:
            summaries.append(recipes.run_task("x", config, task))
    whole, broken = summaries
    assert whole["after"] == broken["after"] and broken["resumed_from"] == 2
    policies = [
        Agent.from_pretrained(tmp_path / name / "policy", base=smollm.tiny_smollm(task.words)[0])
        for name in ("whole", "broken")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*(p.state_dict().values() for p in policies)))


def test_the_figures_by_a_second_way():
    config = recipes.recipe_settings("smollm-answers", **TINY)
    trainer = recipes.make_policy_trainer(config, recipes.ANSWERS)
    for n, p in trainer.agent.model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.5)
    r, found = recipes.figures_of(trainer, recipes.ANSWERS, 8)
    surprise, tokens, kl = 0.0, 0, 0.0
    for i in range(8):  # row by row, without padding, from whole tables
        q, a = r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]
        ids = torch.cat([q, a])[None]
        ours, theirs = (
            m(ids).logits[0, len(q) - 1 : -1].log_softmax(-1).detach()
            for m in (trainer.agent.model, trainer.ref_model)
        )
        surprise -= theirs.gather(-1, a[:, None]).sum().item()
        kl += (ours.exp() * (ours - theirs)).sum().item() / 8
        tokens += len(a)
    assert found["perplexity_untouched"] == pytest.approx(
        torch.tensor(surprise / tokens).exp().item(), rel=1e-3
    )
    assert (
        found["kl_to_reference"] == pytest.approx(kl, rel=1e-3)
        and kl > 0.1
        and found["response_length"] == tokens / 8
    )
    assert r.columns["answer"] == [row["answer"] for row in recipes.HELD_OUT_SUMS[:8]]


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_a_file_of_settings(name, tmp_path):
    "Read by a second reader: what stands in the file is what runs, and what is given beats it."
    folder = Path(instruct_goose.__file__).parent / "configs"
    found = yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8"))
    read = functools.partial(
        recipes.recipe_settings, **{"data": tmp_path} if name == "smollm-reviews" else {}
    )
    found = {k: tuple(x) if isinstance(x, list) else x for k, x in found.items()}
    made = read(name)
    assert (
        made.algorithm == found.pop("algorithm") and {k: getattr(made, k) for k in found} == found
    )
    assert read(name, lr=0.5, steps=3).lr == 0.5
    assert read(name, "ppo").group_size == 1 and read(name, "dapo").group_size > 1
    if (folder / f"{name}-ppo.yaml").exists():
        assert recipes.recipe_settings(name, "reinforce_pp").lr_schedule == "linear"


def test_judges_on_a_gpu_that_is_not_there(tmp_path):
    with PretendGPU():
        config = recipes.recipe_settings(
            "smollm-reviews",
            stand_in=True,
            progress=False,
            steps=1,
            judge_epochs=1.0,
            eval_samples=8,
            device="cuda",
            output_dir=tmp_path / "run",
        )
        summary = recipes.run_task("x", config, recipes.prepare)
        assert summary["judges"]["pairs"]["proxy"]["pair_accuracy"] > 0


# a reward model on the lower layers

SAID = ["a fine film", "the plot", "a slow and silly film the plot is dull", "fine"]
WORDS = sorted({w for t in SAID for w in t.split()} | {"is", "it", "good"})
ASK = " is it good"


def model(layers=4):
    tokenizer = tiny_smollm(WORDS)[1]
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(shape).eval(), tokenizer


def test_a_judge_beside_the_models_own_states():
    lm, tokenizer = model()
    judge = Judge(lm, tokenizer, 2, 1, ASK)
    w = torch.linspace(-1, 1, 24)
    with torch.no_grad():
        judge.learns[-1].weight.copy_(w[None])
    for text, score in zip(
        SAID, judge.score(SAID), strict=True
    ):  # row by row, without padding, in the untouched model
        ids = torch.tensor([tokenizer.convert_tokens_to_ids((text + ASK).split())])
        last = lm.model(ids, output_hidden_states=True).hidden_states[3][
            0, -1
        ]  # hidden_states[k]: what goes into layer k
        assert score == pytest.approx(
            ((last / (last.square().mean() + lm.config.rms_norm_eps).sqrt()) @ w).item(),
            rel=1e-4,
            abs=1e-5,
        )  # the norm's weights are 1


def test_only_the_upper_layers_learn():
    judge = Judge(*model(), 2, 1, ASK)
    reviews = [
        Review(
            str(i),
            ["a dull film", "the plot", "a fine film"][i % 3] + " and" * (i % 4),
            (2 * good, 2 * good + 1, 2 * good - 1, i % 2),
        )
        for i in range(60)
        for good in [i % 3 - 1]
    ]
    before = {k: x.clone() for k, x in judge.state_dict().items()}
    log = train_judge(judge, reviews, epochs=8.0, lr=3e-3, batch_size=20, progress=False)
    assert (
        len(log) == 24
        and log[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
        and log[-1]["loss"] < 0.6
    )
    moved = {k for k, x in judge.state_dict().items() if not torch.equal(x, before[k])}
    assert {re.sub(r".*layers\.(\d).*", r"\1", k) for k in moved if "layers." in k} == {
        "2"
    } and len([k for k in moved if "layers.2" in k]) == 9
    assert not any("embed" in k for k in moved) and not any(
        p.requires_grad for p in judge.parameters()
    )
    judge.normalise(SAID)
    scores = torch.tensor(judge.score(SAID))
    assert scores.mean().abs() < 1e-5 and scores.std(correction=0) == pytest.approx(1, abs=1e-5)
