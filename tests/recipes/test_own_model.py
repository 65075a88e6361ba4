"""The commands for one's own model, data and reward, in this process: models of two families, awkward files, rewards that fail.

Oracles: files as other programs read them; a run that was never stopped.
"""

import hashlib
import json
import multiprocessing
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
import yaml
from deep import first
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from instruct_goose import Agent
from instruct_goose.cli.commands import template_arguments
from instruct_goose.cli.main import main
from instruct_goose.core import processes
from instruct_goose.data.files import BadRow
from instruct_goose.data.load import UnusedColumns
from instruct_goose.models.families import recomputed_layers
from instruct_goose.models.loading import find_model, tiny_smollm
from instruct_goose.models.rendering import template_columns
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import PairDataset
from instruct_goose.recipes import own_model
from instruct_goose.recipes import own_model as own_run
from instruct_goose.recipes.inputs import (
    SAMPLE,
    as_yaml,
    load_reward,
    own_tokenizer,
    read_demos,
    read_prompts,
    try_reward,
)
from instruct_goose.recipes.own_model import (
    TrainConfig,
    check_labels,
    demo_columns,
    ends_of_rows,
    fit_options,
    learn_demonstrations,
    learn_demos,
    learn_labels,
    learn_preferences,
    learn_scores,
    memory_of_run,
    own_rewards,
    own_trainer,
    plan_text,
    read_answers,
    read_labelled_answers,
    read_pairs,
    read_pairs_with_margins,
    run_train,
    show_results,
    split_held_out,
    trainer_of,
)
from instruct_goose.rollouts.environments import EnvironmentSampler, environment_reward
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.supervised.dpo import labelled_rows
from instruct_goose.training.trainer import RLHFTrainer

TEXTS = [
    "tell me: is tea hot",
    "rain is wet.",
    "Rome? no, jazz",
    "yes no maybe",
    "<ask>what</ask>",
] * 9
CHAT = "{% for m in messages %}<ask>{{ m.role }}: {{ m.content }}</ask>{% endfor %}{% if add_generation_prompt %}<ask>assistant: {% endif %}"


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch):
    "Without the shape checker, which doubles the time, and without pictures."
    monkeypatch.setattr(own_run, "plot_metrics", lambda *_: [])
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def tokenizer():
    "Byte pairs that merge over every border; no pad token, as GPT-2's; a chat template."
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>"],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<end>", eos_token="<end>", model_max_length=64
    )
    made.chat_template = CHAT
    return made


@pytest.fixture
def here(tmp_path, monkeypatch, tokenizer):
    "A directory with two models, prompts of text and of messages, and rewards."
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).save_pretrained("gpt2")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).save_pretrained("llama")
    for name in ("gpt2", "llama"):
        tokenizer.save_pretrained(name)
    write(
        "prompts.jsonl",
        [
            {"prompt": "is tea hot", "answer": "yes", "n": 3},
            {"prompt": [{"role": "user", "content": "rain?"}], "answer": "wet", "n": 4},
        ],
    )
    Path("rewards.py").write_text(
        "import asyncio\nimport helper\n\ndef score(completions, answer, n): return [helper.one(c) for c in completions]\n\n"
        "async def later(texts):\n    await asyncio.sleep(0)\n    return [1.0] * len(texts)\n\nclass Judge:\n    def score(self, texts): return [2.0] * len(texts)\n\n"
        "judge = Judge()\ndef nan(texts): return [float('nan')] * len(texts)\ndef broken(texts): return 1 / 0\ndef missing(texts, colour): return texts\nx = 3\n"
    )
    Path("helper.py").write_text(
        "def one(c): return float(len(c if isinstance(c, str) else c[-1]['content']))\n"
    )
    return tmp_path


def write(name, rows):
    Path(name).write_text("\n".join(map(json.dumps, rows)) + "\n")


TINY = [
    "--steps",
    "2",
    "--batch-size",
    "4",
    "--max-new-tokens",
    "3",
    "--epochs",
    "1",
    "--minibatches",
    "1",
    "--no-progress",
]


def train(*more, reward="rewards.py:score"):
    return [
        "train",
        "--model",
        "llama",
        "--data",
        "prompts.jsonl",
        "--reward",
        reward,
        *TINY,
        *map(str, more),
    ]


def refused(*args):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, args)))
    assert isinstance(stop.value.code, str), stop.value.code
    return stop.value.code


def log(out):
    return [
        {k: x for k, x in json.loads(line).items() if "second" not in k}
        for line in Path(out, "metrics.jsonl").read_text().splitlines()
    ]


def test_rows_of_every_kind_become_prompts_with_their_columns(here, tokenizer):
    talk = [{"role": "user", "content": "q"}]
    write(
        "p.jsonl",
        [
            "plain",
            {"text": "t", "k": 1},
            talk,
            {"messages": [*talk, {"role": "assistant", "content": "a"}], "k": [2]},
            {"prompt": "p", "messages": None, "k": None},
        ],
    )
    assert read_prompts("p.jsonl", tokenizer) == [
        {"prompt": "plain"},
        {"prompt": "t", "k": 1},
        {"prompt": talk},
        {"prompt": talk, "k": [2]},
        {"prompt": "p", "messages": None, "k": None},
    ]


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"prompt": "a"', "not JSON"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": 7}', "prompt is 7"),
        ('{"film": "a"}', "no 'prompt': there are 'film'"),
        ("7", "type int"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "what the policy is to write",
        ),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_prompt_that_is_none_is_named_by_its_line(here, tokenizer, line, says):
    Path("p.jsonl").write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(BadRow, match=f"p.jsonl, line 3: .*{says}"):
        read_prompts("p.jsonl", tokenizer)


def test_demonstrations_are_parted_where_the_answer_begins(here, tokenizer):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    write(
        "d.jsonl",
        [
            "all of it",
            {"prompt": "is tea ", "completion": "hot"},
            {"prompt": talk, "completion": "yes"},
            {"messages": [*talk, {"role": "assistant", "content": "no"}]},
            {"prompt": "q", "completion": [{"role": "assistant", "content": "r"}]},
        ],
    )
    demos = read_demos("d.jsonl", tokenizer)
    assert [demo["prompt"] for demo in demos] == ["", "is tea ", talk, talk, [talk[1]]]
    assert [demo["completion"] for demo in demos] == [
        "all of it",
        "hot",
        [{"role": "assistant", "content": "yes"}],
        [{"role": "assistant", "content": "no"}],
        [{"role": "assistant", "content": "r"}],
    ]
    write("d.jsonl", [{"messages": [{"role": "assistant", "content": "no"}]}])
    with pytest.raises(BadRow, match="ends with the assistant's turn, after at least one other"):
        read_demos("d.jsonl", tokenizer)


def test_rewards_by_their_place(here, tokenizer):
    rows = read_prompts("prompts.jsonl", tokenizer)
    assert try_reward([load_reward("rewards.py:score")], rows, tokenizer) == [
        15.0,
        15.0,
    ] and try_reward([load_reward("rewards.py:later")], rows, tokenizer) == [1.0, 1.0]
    assert try_reward(
        [load_reward("rewards.py:judge"), load_reward("rewards.py:later")],
        rows,
        tokenizer,
        [1.0, -3.0],
    ) == [-1.0, -1.0]
    (here / "elsewhere").mkdir()
    Path("elsewhere/beside_it.py").write_text("points = 7.")
    Path("elsewhere/r.py").write_text(
        "from beside_it import points\ndef score(texts): return [points for _ in texts]"
    )
    assert try_reward([load_reward("elsewhere/r.py:score")], rows, tokenizer) == [
        7.0,
        7.0,
    ]  # a file may import what stands beside it

    def lengths(texts, completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    assert (
        try_reward([lengths], rows, tokenizer)
        == [float(len(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]))] * 2
    )
    assert str(here) not in sys.path[:1]


@pytest.mark.parametrize(
    "change, says",
    [
        *(
            (["--reward", place], says)
            for place, says in (
                ("rewards.py", "its functions: score, later, nan, broken, missing"),
                ("rewards.py:x", "class 'x'"),
                ("nowhere.py:f", "no file nowhere.py"),
                ("no.where:f", "no.where does not run"),
                ("rewards.py:nan", "is nan"),
                ("rewards.py:missing", "asks for 'colour'"),
                (
                    "half.py:f",
                    "half.py does not run: SyntaxError: invalid syntax (half.py, line 1)",
                ),
                ("falls.py:f", "falls.py, line 2)"),
                ("lacks.py:f", "lacks.py, line 2)"),
                ("judges.py:Judge", "such as reward = Judge(), and name that"),
                ("llama", "score.weight"),
                (".", "is no reward model"),
                ("score", "FILE.py:NAME"),
            )
        ),
        (["--model", "lama"], "no directory 'lama'"),
        (["--model", "empty"], "holds no model"),
        (["--data", "no.jsonl"], "no file 'no.jsonl'"),
        (["--data", "none.jsonl"], "none.jsonl: no rows"),
        (["--data", "rewards.py"], "suffix"),
        (["--output-dir", "llama"], "already holds a run"),
        (["--max-new-tokens", "64"], "no room for a prompt"),
        (["--max-new-tokens", "62"], "the limit is 2"),
        (["--sft", "prompts.jsonl"], "no 'completion'"),
        (["--config", "bad.yaml"], "here it is called lr"),
        (["--config", "no.yaml"], "no.yaml"),
        (["--reward-weights", "1", "2"], "2 reward_weights and 1 rewards"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_nothing_is_made(here, monkeypatch, change, says):
    monkeypatch.setattr(own_run, "own_model", lambda *_: pytest.fail("the model was loaded"))
    Path("half.py").write_text("def f(:\n")
    Path("falls.py").write_text("def f(texts):\n    return {}[texts]\n\nf('a')\n")
    Path("lacks.py").write_text("import json\nimport not_installed_anywhere\n")
    Path("judges.py").write_text(
        "class Judge:\n    def score(self, texts):\n        return texts\n"
    )
    Path("empty").mkdir()
    Path("none.jsonl").touch()
    Path("bad.yaml").write_text("learning_rate: 3\n")
    before = sorted(map(str, here.rglob("*")))
    said = refused(*(train(reward=change[1]) if change[0] == "--reward" else train(*change)))
    assert says in said and (
        change[0] != "--reward" or said.startswith("instruct-goose: --reward")
    ), said
    assert [p for p in sorted(map(str, here.rglob("*"))) if "__pycache__" not in p] == before


RUN_SETTINGS = """
data: prompts.jsonl
reward: rewards.py:score
algorithm: rloo
group-size: 2
sft: demos.jsonl
sft_steps: 3
sft_lr: 1e-3
eval_data: eval.jsonl
lr: 1e-3
eval_every: 1
"""


@pytest.fixture(params=first(1, ["llama", "gpt2"]))
def demo_run(here, request, capsys):
    """A run of two iterations after SFT on demonstrations, judged on held-out prompts; its command.

    What it prints waits in capsys.
    """
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "wet"}]
    write("demos.jsonl", [{"prompt": "is tea ", "completion": "hot"}, {"messages": turns}])
    write("eval.jsonl", [{"prompt": "Rome?", "answer": "no", "n": 1}])
    Path("run.yaml").write_text(f"model: {request.param}{RUN_SETTINGS}")
    command = ["train", "--config", "run.yaml", *TINY]
    main([*command, "--output-dir", "run"])
    return command


def test_a_run_with_demonstrations_and_held_out_prompts(demo_run, capsys):
    settings = json.loads(Path("run/config.json").read_text())
    assert settings["algorithm"] == "rloo"
    assert settings["lr"] == 1e-3
    assert settings["group_size"] == 2
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["held_out_reward"].keys() == {"before", "after"}

    first_row, second_row = log("run")
    assert "held_out_reward" in first_row
    assert first_row["reward_noise"] == first_row["reward_shift"] == 0
    assert "reward_noise" not in second_row  # asked again now and then

    assert "Rome?" in capsys.readouterr().out
    assert "Rome?" in Path("run/samples.md").read_text()
    assert "RLOO, 2 iterations" in Path("run/policy/README.md").read_text()
    for part in ("sft", "policy"):
        assert AutoModelForCausalLM.from_pretrained(f"run/{part}")
        assert AutoTokenizer.from_pretrained(f"run/{part}").chat_template == CHAT
    assert Agent.from_pretrained("run/policy")
    assert find_model("run") == "run/policy"


def test_a_run_that_is_made_longer_is_one_that_was_longer_from_the_start(demo_run):
    assert refused(*demo_run, "--output-dir", "run").endswith(
        "run already holds a run: --resume goes on with it; else give another directory"
    )
    main([*demo_run, "--output-dir", "run", "--resume", "--steps", "3"])
    main([*demo_run, "--output-dir", "whole", "--steps", "3"])
    assert log("run") == log("whole")
    assert len(log("run")) == 3

    write("eval.jsonl", [{"prompt": "jazz", "answer": "no", "n": 1}])
    with pytest.raises(SystemExit, match="SHA-256 of the data"):
        main([*demo_run, "--output-dir", "run", "--resume", "--steps", "4"])


@pytest.mark.parametrize("asked", [False, True])
def test_gradient_checkpointing_reaches_the_trainer(here, asked):
    config = TrainConfig(
        model="llama",
        data=Path("prompts.jsonl"),
        reward=(),
        device="cpu",
        gradient_checkpointing=asked,
    )
    model = AutoModelForCausalLM.from_pretrained("llama")
    inputs = SimpleNamespace(
        make_trainer=RLHFTrainer,
        tokenizer=own_run.own_tokenizer("llama"),
        make_environment=None,
    )
    trainer = own_run.trainer_of(config, model, inputs)
    assert bool(recomputed_layers(trainer.agent.model)) == asked


def test_functions_of_python_take_the_place_of_those_on_the_disk(here):
    config = TrainConfig(
        model="llama",
        data=Path("prompts.jsonl"),
        reward=(),
        steps=1,
        batch_size=2,
        minibatches=1,
        max_new_tokens=2,
        progress=False,
    )

    def short(completions):
        return [-float(len(c)) for c in completions]

    assert (
        run_train(config, [short])["iterations"] == 1
        and Path("runs/train/policy/values/head.safetensors").exists()
    )


def test_a_dry_run_counts_the_rows_that_a_micro_batch_holds(here, capsys):
    "Two minibatches of 4 rows; or 2 rows, by themselves and as 2 × the longest prompt and answer."

    def shown(*settings):
        main(train("--no-trial", "--batch-size", "8", "--minibatches", "2", "--dry-run", *settings))
        return capsys.readouterr().out

    def activations(*settings):
        return re.search("activations.*", shown(*settings)).group()

    longest = int(re.search(r"of \d+ to (\d+) tokens", shown()).group(1)) + 3  # and the new ones
    one, two, four = (activations("--micro-batch-size", n) for n in "124")
    by_tokens = [
        activations("--micro-batch-tokens", str(n)) for n in (1, 2 * longest - 1, 2 * longest, 9999)
    ]
    assert (
        by_tokens == [one, one, two, four] and len({one, two, four}) == 3 and activations() == four
    )
    assert activations("--micro-batch-tokens", "9999", "--micro-batch-size", "2") == two


def test_a_dry_run_prints_a_file_that_makes_the_same_run_and_writes_nothing(here, capsys):
    Path("mine.py").write_text(RAISES % (0, "raise RuntimeError"))
    main(train("--dry-run", "--no-trial", reward="mine.py:reward"))
    assert "was not asked" in capsys.readouterr().out
    main(train("--algorithm", "dapo", "--group-size", "2", "--dry-run"))
    shown = capsys.readouterr().out
    assert "asked about 2 sample answers: 15, 15" in shown
    text = shown.split("\n\n")[0]
    Path("again.yaml").write_text(text)
    assert yaml.safe_load(text)["model"] == "llama" and not Path("runs").exists()
    off = TrainConfig.preset(
        "grpo",
        model="llama",
        data=Path("prompts.jsonl"),
        reward=("rewards.py:score",),
        save_every=None,
        recheck_every=None,
    )
    Path("off.yaml").write_text(as_yaml(off))
    assert TrainConfig.read("off.yaml") == off and "save_every: null" in as_yaml(
        off
    )  # none where the default is a number
    assert TrainConfig.read("again.yaml") == TrainConfig.preset(
        "dapo",
        model="llama",
        data=Path("prompts.jsonl"),
        reward=("rewards.py:score",),
        steps=2,
        batch_size=4,
        group_size=2,
        max_new_tokens=3,
        epochs=1,
        minibatches=1,
        progress=False,
    )
    assert "dapo: 2 prompts, 2 responses each" in shown


def test_adapters_need_their_package(here, monkeypatch):
    pytest.importorskip("peft")
    main(train("--lora-rank", 2, "--output-dir", "lora"))
    assert len(log("lora")) == 2
    monkeypatch.setitem(sys.modules, "peft", None)
    assert (
        "the package peft" in refused(*train("--lora-rank", 4, "--output-dir", "none"))
        and not Path("none").exists()
    )


PAIRS = [
    {"prompt": "is tea ", "chosen": "hot", "rejected": "wet"},
    {"prompt": [{"role": "user", "content": "rain?"}], "chosen": "wet", "rejected": "hot"},
    {"prompt": "Answer: ", "chosen": "good plot", "rejected": "bad plot"},
] * 4


STAGE = "--steps 4 --batch-size 4 --lr 1e-3 --held-out .25 --no-progress"


def run(line: str) -> None:
    "Run a command as it is written in a shell."
    main(shlex.split(line))


@pytest.fixture
def pairs(here):
    "Preferences, and their chosen sides as demonstrations."
    write("pairs.jsonl", PAIRS)
    write("demos.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS])


def test_the_stages_one_after_the_other(pairs):
    run(f"sft --model llama --data demos.jsonl --output-dir a {STAGE}")
    run(f"reward-model --model a --data pairs.jsonl --output-dir b {STAGE}")
    run(f"dpo --model a --data pairs.jsonl --output-dir c {STAGE}")
    tiny = shlex.join(TINY)
    run(f"train --model c --data prompts.jsonl --reward b --output-dir d {tiny}")

    for out in "abc":
        summary = json.loads(Path(out, "summary.json").read_text())
        assert summary["rows"] == 9
        assert summary["held_out_rows"] == 3
        assert [m["step"] for m in log(out)] == [0, 1, 2, 3]
    assert load_reward("b").model.config.reward_std > 0
    assert own_tokenizer("d/policy").chat_template == CHAT


def test_a_stage_goes_on_and_a_finished_one_is_not_repeated(pairs, capsys):
    dpo = f"dpo --model llama --data pairs.jsonl --output-dir c {STAGE}"
    run(dpo)
    run(f"{dpo} --steps 5 --resume")
    assert [m["step"] for m in log("c")] == [0, 1, 2, 3, 4]

    run(f"{dpo} --steps 5 --resume")
    assert "is finished: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, data",
    [("sft", "demos.jsonl"), ("reward-model", "pairs.jsonl"), ("dpo", "pairs.jsonl")],
)
def test_a_dry_run_of_a_stage_says_what_it_would_do(pairs, capsys, name, data):
    run(f"{name} --model gpt2 --data {data} --dry-run")
    assert f"{name}: 100 updates of " in capsys.readouterr().out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "command, bars",
    [
        ("sft --data demos.jsonl", ["held-out rows, before", "held-out rows, after"]),
        ("reward-model --data pairs.jsonl", ["held-out pairs"]),
        ("dpo --data pairs.jsonl", ["held-out pairs"]),
        ("kto --data labels.jsonl", ["held-out answers"]),
    ],
)
def test_held_out_figures_have_a_progress_bar_if_they_take_a_second(
    pairs, capsys, monkeypatch, command, bars
):
    rows = [{"prompt": p["prompt"], "completion": p["chosen"], "label": True} for p in PAIRS]
    write("labels.jsonl", [row | {"label": i % 2 == 0} for i, row in enumerate(rows)])
    few = "--model gpt2 --steps 1 --batch-size 4 --held-out .25"
    monkeypatch.setattr(processes, "SECONDS_UNSEEN", 1e9)
    run(f"{command} {few}")
    quick = capsys.readouterr().err
    monkeypatch.setattr(processes, "SECONDS_UNSEEN", 0.0)
    run(f"{command} {few}")
    slow = capsys.readouterr().err
    for bar in bars:
        assert bar not in quick
        assert f"{bar}: 100%" in slow


def test_a_trained_reward_models_scores_have_mean_0_and_deviation_1(pairs):
    "On the texts that it was trained with; the models that it begins with have other scores."
    run(
        "reward-model --model llama --data pairs.jsonl --output-dir b --steps 4 --held-out 0 --no-progress"
    )
    reward_model = RewardModel.from_pretrained("b/reward_model").eval()
    texts = []
    for pair in PairDataset(PAIRS, reward_model.tokenizer).rows:
        texts += pair.values()
    scores = torch.tensor(reward_model.score(texts))
    assert scores.mean() == pytest.approx(0, abs=1e-4)
    assert scores.std(correction=0) == pytest.approx(1, abs=1e-4)


def test_a_reward_model_takes_no_adapters(pairs):
    with pytest.raises(SystemExit, match="no --lora-rank here: "):
        run("reward-model --model llama --data pairs.jsonl --lora-rank 3")


def test_kto_learns_from_labelled_answers(here, capsys):
    "The labels decide: with all of them turned, the other answer rises. Chat rows and plain ones."

    def rows(turned):
        return [
            {"prompt": p["prompt"], "completion": p[side], "label": (side == "chosen") != turned}
            for p in PAIRS
            for side in ("chosen", "rejected")
        ]

    quick = ["--steps", "12", "--batch-size", "8", "--lr", "1e-2", "--no-progress"]
    for name in ("kto", "turned"):
        write(f"{name}.jsonl", rows(name == "turned"))
        main(["kto", "--model", "llama", "--data", f"{name}.jsonl", "--output-dir", name, *quick])
        assert (
            log(name)[-1]["margin"] > log(name)[0]["margin"] + 0.5
            and json.loads(Path(name, "summary.json").read_text())["held_out_rows"] == 2
        )

    def likelier(name):  # mean log π of the chosen answers − that of the rejected ones
        model = AutoModelForCausalLM.from_pretrained(f"{name}/policy")
        words = own_tokenizer(f"{name}/policy")
        total = 0.0
        read = read_demos(Path("kto.jsonl"), words, labels=True)
        for (given, response), row in zip(labelled_rows(read, words)[0], read, strict=True):
            logprobs = model(torch.tensor([given + response])).logits[0].log_softmax(-1)
            total += (
                (1 if row["label"] else -1)
                * sum(logprobs[len(given) + i - 1, x].item() for i, x in enumerate(response))
                / len(PAIRS)
            )
        return total

    assert likelier("kto") > likelier("turned") + 3
    write("odd.jsonl", [{"prompt": "a", "completion": "b", "label": "good"}])
    assert "label is 'good'" in refused(
        "kto", "--model", "llama", "--data", "odd.jsonl", "--output-dir", "x", *quick
    )


RAISES = "import sys\ncalls = []\nclass Odd(BaseException): pass\ndef reward(texts):\n    calls.append(1)\n    if len(calls) > %d: %s\n    return [1.] * len(texts)\n"


@pytest.mark.parametrize(
    "calls, what, says, more",
    [
        (0, "sys.exit(0)", "SystemExit", ()),
        (2, "sys.exit(0)", "SystemExit", ()),
        (2, "raise Odd('mine')", "Odd: mine", ()),
        (0, "sys.exit(0)", "SystemExit", ("--reward-timeout", 60)),
    ],
)
def test_whatever_a_reward_raises_is_a_sentence_and_no_success(here, calls, what, says, more):
    "In the trial, in training, and in a thread."
    Path("mine.py").write_text(RAISES % (calls, what))
    assert says in refused(*train(*more, reward="mine.py:reward"))


def test_a_file_that_goes_elsewhere_takes_nobody_along_and_ctrl_c_stays_what_it_is(here):
    Path("mine.py").write_text(
        "import os\nos.chdir('/')\n" + RAISES % (0, "raise KeyboardInterrupt")
    )
    with pytest.raises(SystemExit) as stop:
        main(train(reward="mine.py:reward"))
    assert stop.value.code == 130 and Path.cwd() == here


def test_a_plug_in_from_the_shell_is_recorded_and_asked_for_again(here, monkeypatch, capsys):
    "Its surrogate is a choice of the flag; the run names both files by hash, and says when one has changed."
    from instruct_goose.objective.policy_loss import SURROGATES

    text = "from instruct_goose.objective.policy_loss import SURROGATES\nSURROGATES['from_mine'] = SURROGATES['ratio']\ndef reward(texts): return [float(len(t)) for t in texts]\n"
    Path("mine.py").write_text(text)
    flags = train(
        "--surrogate",
        "from_mine",
        "--output-dir",
        "run",
        "--save-every",
        1,
        reward="mine.py:reward",
    )
    try:
        with pytest.raises(SystemExit):
            main(flags)
        main([*flags, "--plugin", "mine.py"])
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert (
            json.loads(Path("run/config.json").read_text())["files"] == {"mine.py": digest}
            and digest in Path("run/policy/README.md").read_text()
        )
        SURROGATES.pop("from_mine")
        more = [*flags, "--steps", "3", "--resume"]
        assert "--plugin mine.py again" in refused(*more)
        Path("mine.py").write_text(text + "# more\n")
        main([*more, "--plugin", "mine.py"])
        assert "mine.py has changed" in capsys.readouterr().out and len(log("run")) == 3
    finally:
        SURROGATES.pop("from_mine", None)


def test_a_trainer_of_ones_own_trains_and_is_recorded(here, capsys):
    Path("term.py").write_text(
        "from instruct_goose import RLHFTrainer\n"
        "class Unsure(RLHFTrainer):\n"
        "    def loss(self, new, batch):\n"
        "        loss, parts = super().loss(new, batch)\n"
        "        return 0 * loss, parts\n"
        "class Other: pass\n"
    )
    main(train("--trainer", "term.py:Unsure", "--output-dir", "run", "--save-every", 1))
    assert all(row["grad_norm"] == 0 for row in log("run"))
    config = json.loads(Path("run/config.json").read_text())
    assert config["trainer"] == "term.py:Unsure" and set(config["files"]) >= {"term.py"}
    assert "trainer was" in refused(*train("--output-dir", "run", "--steps", "3", "--resume"))
    assert "no subclass of RLHFTrainer" in refused(*train("--trainer", "term.py:Other"))
    assert "its classes: Unsure, Other" in refused(*train("--trainer", "term.py:Unsre"))


WORDS = """
class Words:
    "The reward is the number of the column n, if a word came first; `say` is a tool."
    def reset(self, n, **row):
        self.n = n
        return " 7"

    def say(self, word: str) -> str:
        \"\"\"Say a word.

        Args:
            word: it.
        \"\"\"
        return word

    def get_reward(self):
        return float(self.n)


class Steps:
    "Every turn is paid .5, and the second one is the last."
    def reset(self, answer):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return " go on", 0.5, self.turns == 2


class Unpaid:
    def reset(self, **row):
        pass


class Other:
    pass


class Colour(Words):
    def reset(self, colour):
        pass


class Late(Words):
    def get_reward(self):
        return [][1]
"""


@pytest.fixture
def words(here):
    "The environments above, and a model without a chat template: replies stand as they are."
    Path("words.py").write_text(WORDS)
    Path("llama/chat_template.jinja").unlink()
    row = {"prompt": "is tea hot", "answer": "yes", "n": 3}
    write("prompts.jsonl", [row, row | {"prompt": "is rain wet", "n": 4}])
    return here


def in_environment(name, *more):
    "The command with an environment in the place of a reward."
    command = train("--environment", f"words.py:{name}", *more)
    at = command.index("--reward")
    return command[:at] + command[at + 2 :]


def test_an_environment_pays_and_its_file_is_recorded(words, capsys):
    main(in_environment("Words", "--output-dir", "run", "--save-every", 1))
    capsys.readouterr()
    assert all(3 <= row["reward_mean"] <= 4 for row in log("run"))
    config = json.loads(Path("run/config.json").read_text())
    assert config["environment"] == "words.py:Words" and set(config["files"]) == {"words.py"}
    more = ["--output-dir", "run", "--resume", "--steps", "3"]
    assert "environment was" in refused(*in_environment("Steps", *more))
    main(in_environment("Words", *more))
    assert len(log("run")) == 3


def test_a_reward_stands_beside_what_the_environment_pays(words, capsys):
    both = train("--environment", "words.py:Steps", "--reward-weights", "2", "0")
    main([*both, "--stop-strings", "e", "a", "i", "--output-dir", "run"])
    rows = log("run")
    assert all("reward_mean/environment_reward" in row for row in rows)
    paid = [row["reward_mean/environment_reward"] for row in rows]
    assert max(paid) > 0 and [row["reward_mean"] / 2 for row in rows] == pytest.approx(paid)
    assert max(row["replies"] for row in rows) > 0


def test_a_dry_run_plays_one_dialogue(words, capsys):
    main(in_environment("Steps", "--stop-strings", "e", "a", "--max-new-tokens", 30, "--dry-run"))
    shown = capsys.readouterr().out
    assert "environment: words.py:Steps answers each response up to 16 times" in shown
    assert "data, columns: answer, prompt; not used: n" in shown
    dialogue = shown[shown.index("one dialogue") :]
    assert "is tea hot⟦" in dialogue and "⟧ go on⟦" in dialogue
    assert "replies 1, tool calls 0, tool failures 0; the environment paid 1" in dialogue
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "name, says",
    [
        ("Word", "has no function or class 'Word'; its functions: ; its classes: Words, Steps"),
        ("Other", "--environment words.py:Other, made without arguments: TypeError: Other is no"),
        ("Unpaid", "--environment words.py:Unpaid pays nothing: give it get_reward"),
        ("Colour", "reset with the first row, of the columns prompt, answer, n: TypeError: Colour"),
        ("Late", "Late, asked for the reward, raised IndexError: list index out of range ("),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_before_the_run(words, name, says):
    said = refused(*in_environment(name, "--dry-run"))
    assert says in said
    if name == "Late":
        assert f"words.py, line {WORDS.splitlines().index('        return [][1]') + 1})" in said


def test_no_greedy_baseline_in_an_environment(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(in_environment("Words", "--algorithm", "remax"))
    assert stop.value.code == 2
    assert "no environment plays the greedy response" in capsys.readouterr().err


def test_columns_by_other_names_and_a_data_set(here, tokenizer, capsys):
    write("odd.jsonl", [{"film": "is tea hot", "right": "yes", "n": 1}])
    assert "--prompt-column NAME" in refused(*train("--data", "odd.jsonl"))
    names = ["--prompt-column", "film", "--answer-column", "right"]
    main(train("--data", "odd.jsonl", *names, "--dry-run"))
    main(["sft", "--model", "llama", "--data", "odd.jsonl", *names, "--dry-run"])
    assert read_demos("odd.jsonl", tokenizer, {"prompt": "film", "completion": "right"}) == [
        {"prompt": "is tea hot", "completion": "yes"}
    ]
    pytest.importorskip("datasets")
    Path("set").mkdir()
    Path("odd.jsonl").rename("set/train.jsonl")
    main(["sft", "--model", "llama", "--dataset", "set:train", *names, "--dry-run"])
    assert "prompt" in capsys.readouterr().out


def test_named_columns_count_in_the_demonstrations_that_have_them(here, capsys):
    write("odd.jsonl", [{"film": "is tea hot", "right": "yes", "n": 1}] * 2)
    write("demos.jsonl", [{"prompt": "is tea hot", "completion": "yes"}] * 2)
    names = ["--prompt-column", "film", "--answer-column", "right", "--dry-run"]
    for demos in ("odd.jsonl", "demos.jsonl"):
        main(train("--data", "odd.jsonl", *names, "--sft", demos))
        assert "of 2 demonstrations" in capsys.readouterr().out


# ---------------------------------------------------------------- the identity of every stage

FEW_PAIRS = [{"prompt": "is tea", "chosen": " hot", "rejected": " wet"}] * 4
FEW_DEMOS = [{"prompt": "is tea", "completion": " hot"}] * 4
THUMBS = [row | {"label": bool(n % 2)} for n, row in enumerate(FEW_DEMOS)]
STAGES = {"sft": FEW_DEMOS, "dpo": FEW_PAIRS, "kto": THUMBS, "reward-model": FEW_PAIRS}


def stage(name, *more):
    write("rows.jsonl", STAGES[name])
    quick = ["--batch-size", "2", "--lr", "1e-3", "--held-out", "0", "--device", "cpu"]
    return [
        *(name, "--model", "llama", "--data", "rows.jsonl", "--output-dir", name, *quick),
        *("--save-every", "1", "--no-progress", *more),
    ]


def other_weights():
    model = AutoModelForCausalLM.from_pretrained("llama")
    model.model.norm.weight.data.add_(0.5)
    model.save_pretrained("llama")


def other_ids():
    file = Path("llama/tokenizer.json")
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(text))


def other_setting(name, **change):
    file = Path("llama", name)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


CHANGED = {
    "model.safetensors": other_weights,
    "tokenizer.json": other_ids,
    "config.json": lambda: other_setting("config.json", rms_norm_eps=0.1),
    "generation_config.json": lambda: other_setting("generation_config.json", eos_token_id=[0, 7]),
}


@pytest.mark.parametrize("name", first(2, ["dpo", "train", "sft", "kto", "reward-model"]))
def test_no_stage_goes_on_with_another_model(here, name):
    flags = train("--output-dir", name, "--save-every", 1)
    if name in STAGES:
        flags = stage(name, "--steps", "2")
    main(flags)
    for file, change in CHANGED.items():
        before = {path.name: path.read_bytes() for path in Path("llama").iterdir()}
        change()
        assert f"the model's {file} was" in refused(*flags, "--steps", "3", "--resume")
        for kept, content in before.items():
            Path("llama", kept).write_bytes(content)
    Path("llama/README.md").write_text("of no account")
    main([*flags, "--steps", "3", "--resume"])
    assert len(log(name)) == 3


def test_adapters_do_not_go_on_on_another_base(here):
    pytest.importorskip("peft")
    main(stage("sft", "--steps", "1", "--lora-rank", "1"))
    flags = stage("dpo", "--lora-rank", "1")
    flags[flags.index("llama")] = "sft"
    main([*flags, "--steps", "1"])
    other_weights()
    assert "base's model.safetensors was" in refused(*flags, "--steps", "2", "--resume")


def test_a_run_does_not_go_on_with_another_reward_model(here):
    main(stage("reward-model", "--steps", "1"))
    flags = train("--output-dir", "run", "--save-every", 1, reward="reward-model")
    main(flags)
    main(stage("reward-model", "--steps", "2", "--resume"))
    assert "the reward reward-model/model.safetensors was" in refused(
        *flags, "--steps", "3", "--resume"
    )


def test_the_files_of_a_run_keep_their_history(here, monkeypatch, capsys):
    "Each file and module that has made a part of a run, with the step from which it counts."
    monkeypatch.syspath_prepend(str(here))
    write_rewards = Path("graders.py").write_text
    write_rewards("def score(texts): return [1.0] * len(texts)\n")
    flags = train("--output-dir", "run", "--save-every", 1, reward="graders:score")
    main(flags)
    write_rewards("def score(texts): return [2.0] * len(texts)\n")
    for steps in (3, 4):
        capsys.readouterr()
        main([*flags, "--steps", str(steps), "--resume"])
        assert ("graders has changed" in capsys.readouterr().out) == (steps == 3)
    settings = json.loads(Path("run/config.json").read_text())
    first_files, second_files = settings["file_history"]
    assert first_files["from"] == {"stage": None, "step": 0}
    assert second_files["from"] == {"stage": "ppo", "step": 2}
    assert first_files["files"].keys() == second_files["files"].keys() == {"graders"}
    assert first_files["files"] != second_files["files"] == settings["files"]


# ---------------------------------------------------------------- several processes


def as_torchrun(rank, port, flags):
    "What torchrun tells a process that it starts."
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    torch.set_num_threads(1)
    main(flags)
    os._exit(0)  # what the parent has planned for its own end is not for its children


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start_two(flags):
    "The exit statuses of two processes that run this command, as under torchrun."
    port = free_port()
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=as_torchrun, args=(rank, port, flags)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def test_two_processes_meet_before_one_of_them_takes_the_directory(here):
    "And train as one: what the policy is does not depend on how many there were."
    Path("rewards.py").write_text("def score(texts): return [float(len(t)) for t in texts]\n")
    for steps, more in ((2, []), (3, ["--resume"])):
        flags = train("--output-dir", "two", "--save-every", 1, "--steps", steps, *more)
        assert start_two(flags) == [0, 0]
        assert len(log("two")) == steps and Path("two/summary.json").exists()
    main(train("--output-dir", "one", "--steps", 3))
    for name in ("reward_mean", "response_length"):
        assert [m[name] for m in log("one")] == pytest.approx([m[name] for m in log("two")])


def test_a_supervised_stage_does_not_run_in_two_processes(here, capfd):
    assert start_two(stage("sft", "--steps", "1")) == [1, 1]
    assert "sft runs in one process" in capfd.readouterr().err
    assert not Path("sft").exists()


@pytest.mark.deep
def test_torchrun_starts_the_command(here):
    Path("rewards.py").write_text("def score(texts): return [float(len(t)) for t in texts]\n")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "instruct_goose", *train("--output-dir", "two")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(log("two")) == 2 and Path("two/summary.json").exists()


def test_a_dry_run_names_the_columns_that_no_reward_asks_for(here, capsys):
    with pytest.warns(UnusedColumns, match="^not used: answer, n$"):
        main(train("--dry-run", reward="rewards.py:later"))
    write("prompts.jsonl", [{"prompt": "is tea hot", "context": "rain is wet."}])
    assert "context is 'rain is wet.'" in refused(*train("--dry-run", reward="rewards.py:later"))


def stopping_base(name="llama"):
    "The model of `here` with a generation config that stops at another token than is learnt."
    model = AutoModelForCausalLM.from_pretrained(name)
    model.generation_config.eos_token_id = 7
    model.save_pretrained(name)


def saved_ends(directory):
    return json.loads(Path(directory, "generation_config.json").read_text())["eos_token_id"]


def test_a_saved_model_stops_where_training_stopped(here, capsys):
    stopping_base()
    write("sft.jsonl", [{"prompt": "is tea hot", "completion": " yes"}] * 4)
    write("pairs.jsonl", [{"prompt": "is tea hot", "chosen": " yes", "rejected": " no"}] * 4)
    options = ["--model", "llama", "--steps", "1", "--batch-size", "2", "--no-progress"]
    main(["sft", *options, "--data", "sft.jsonl", "--output-dir", "a"])
    main(["dpo", *options, "--data", "pairs.jsonl", "--output-dir", "b"])
    main(train("--output-dir", "c", "--no-progress"))
    for directory in ("a/sft", "b/policy", "c/policy"):
        assert saved_ends(directory) == [0, 7]


def test_a_dry_run_says_what_ends_a_response(here, capsys):
    stopping_base()
    write("sft.jsonl", [{"prompt": "is tea hot", "completion": " yes"}] * 4)
    main(["sft", "--model", "llama", "--data", "sft.jsonl", "--dry-run"])
    end = AutoTokenizer.from_pretrained("llama").convert_ids_to_tokens(7)
    assert f"a response ends with <end> (0) or {end} (7)\n" in capsys.readouterr().out
    main(train("--dry-run", "--stop-strings", "stop"))
    assert f"ends with <end> (0) or {end} (7), or with 'stop'\n" in capsys.readouterr().out


def test_sample_and_chat_take_a_model_without_a_pad_token(here, capsys, monkeypatch):
    assert AutoTokenizer.from_pretrained("llama").pad_token is None
    main(["sample", "llama", "is tea", "--n", "2", "--max-new-tokens", "2"])
    monkeypatch.setattr("builtins.input", lambda _, lines=iter(["hot", ""]): next(lines))
    main(["chat", "llama", "--max-new-tokens", "2"])
    assert "model: " in capsys.readouterr().out


THINKS = CHAT.replace("{% if add", "{{ mood or '' }}{% if add")


def test_arguments_of_the_template_reach_every_stage_and_the_sampler(here, capsys):
    tokenizer = AutoTokenizer.from_pretrained("llama")
    tokenizer.chat_template = THINKS
    question = [{"role": "user", "content": "rain?"}]
    arguments = {"mood": "jazz"}
    prompts = read_prompts(
        [{"prompt": question}, question, "is tea"], tokenizer, arguments=arguments
    )
    [demo] = read_demos([{"prompt": question, "completion": "wet"}], tokenizer, arguments=arguments)
    ids = encode_rows(prompts, Tokens(tokenizer, [], 0))
    expected = tokenizer.apply_chat_template(question, add_generation_prompt=True, mood="jazz")
    assert ids[0] == ids[1] == expected["input_ids"]
    assert template_columns(demo) == arguments
    own = {"prompt": question, "chat_template_kwargs": {"mood": "hot"}}
    [row] = read_prompts([own], tokenizer, arguments=arguments)
    assert template_columns(row) == {"mood": "hot"}
    for name in ("llama", "gpt2"):
        tokenizer.save_pretrained(name)
    given = ["--template-kwargs", '{"mood": "jazz"}']
    main(train("--output-dir", "out", "--no-progress", *given))
    assert template_arguments(Path("out"), None) == arguments
    assert template_arguments(Path("out"), '{"mood": "hot"}') == {"mood": "hot"}
    main(["sample", "out", "rain?", "--chat", "--n", "1", "--max-new-tokens", "2", *given])
    wrong = ["--template-kwargs", '{"moot": "jazz"}']
    for command in (train("--dry-run", *wrong), ["sample", "out", "rain?", "--chat", *wrong]):
        assert "the arguments for the chat template hold 'moot'" in refused(*command)


@pytest.mark.parametrize("text", ["mood", "[1]", "3"])
def test_arguments_of_the_template_are_an_object(text):
    with pytest.raises(ValueError, match="template_kwargs is .* an object in JSON"):
        TrainConfig(model="m", data=Path("d.jsonl"), reward=("r.py:f",), template_kwargs=text)


# --- rows that cannot be used, and rows that are too long


def chat(question):
    return [{"role": "user", "content": question}]


LONG = "is tea hot " * 80  # beyond the context of 64
ROW_OF_STAGE = {
    "sft": {"prompt": "is tea hot", "completion": " yes"},
    "dpo": {"prompt": "is tea hot", "chosen": " yes", "rejected": " no"},
    "reward-model": {"prompt": "is tea hot", "chosen": " yes", "rejected": " no"},
    "kto": {"prompt": "is tea hot", "completion": " yes"},
}


def rows_of(name, n=12):
    rows = [dict(ROW_OF_STAGE[name], prompt=f"is tea hot {i} ") for i in range(n)]
    if name == "kto":
        rows = [row | {"label": i % 2 == 0} for i, row in enumerate(rows)]
    return rows


def supervised(name, *more):
    options = ["--steps", "1", "--batch-size", "4", "--no-progress", "--lr", "1e-3"]
    return [name, "--model", "llama", "--data", "rows.jsonl", *options, *map(str, more)]


def summary_of(directory):
    return json.loads(Path(directory, "summary.json").read_text())


@pytest.mark.parametrize("name", ROW_OF_STAGE)
def test_a_long_row_that_is_held_out_stops_the_dry_run_and_the_run_before_its_first_step(
    here, name
):
    rows = rows_of(name)
    rows[9] = rows[9] | {"prompt": LONG}  # of .1 the tenth row is held out
    write("rows.jsonl", rows)
    for more in (["--dry-run"], ["--output-dir", "out"]):
        said = refused(*supervised(name, *more))
        assert said.startswith("instruct-goose: rows.jsonl, line 10: it has ")
        assert "the limit is 64" in said and "--long-rows cut or --long-rows drop" in said
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ROW_OF_STAGE)
@pytest.mark.parametrize("how", ["cut", "drop"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_long_rows_are_cut_or_left_out_in_every_stage_and_counted(here, name, how):
    rows = rows_of(name)
    for i in (1, 9):
        rows[i] = rows[i] | {"prompt": LONG}
    write("rows.jsonl", rows)
    main(supervised(name, "--long-rows", how, "--output-dir", "out", "--held-out", ".25"))
    summary = summary_of("out")
    found = summary["data"]["data"]
    assert found["rows"] == 12
    assert (found["cut"], found["skipped"]) == {"cut": (2, {}), "drop": (0, {"length": 2})}[how]
    assert (
        summary["rows"] + summary["held_out_rows"] == found["used"] == {"cut": 12, "drop": 10}[how]
    )


@pytest.mark.parametrize("name", ROW_OF_STAGE)
def test_a_row_that_is_cut_is_named_by_its_line_of_the_file_and_once(here, name, capsys):
    rows = rows_of(name)
    rows[6] = rows[6] | {"prompt": LONG}
    write("rows.jsonl", rows)
    more = ["--long-rows", "cut", "--output-dir", "out", "--held-out", ".25"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main(supervised(name, *more))
    said = [str(w.message) for w in caught if "limit" in str(w.message)]
    said += [str(w.message) for w in caught if "beyond" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("rows.jsonl: 1 of 12 rows cut (the first: rows.jsonl, line 7: it has")


@pytest.mark.parametrize("name", ROW_OF_STAGE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_rows_are_refused_together_or_skipped_and_counted_in_every_stage(here, name, capsys):
    rows = rows_of(name)
    Path("rows.jsonl").write_text(
        "\n".join([json.dumps(rows[0]), "{", "7", *map(json.dumps, rows[1:])]) + "\n"
    )
    said = refused(*supervised(name, "--dry-run"))
    assert "rows.jsonl: 2 of 14 rows cannot be used (1 × json, 1 × shape)" in said
    assert "- rows.jsonl, line 2: not JSON" in said and "- rows.jsonl, line 3: of type int" in said
    assert "--bad-rows skip leaves such rows out" in said
    main(supervised(name, "--bad-rows", "skip", "--dry-run"))
    assert "data: 2 of 14 rows skipped (1 × json, 1 × shape)" in capsys.readouterr().out
    main(supervised(name, "--bad-rows", "skip", "--output-dir", "out"))
    assert summary_of("out")["data"]["data"]["skipped"] == {"json": 1, "shape": 1}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prompts_held_out_prompts_and_demonstrations_have_the_same_policy(here, capsys):
    good = {"prompt": "is tea hot", "answer": "yes", "n": 1}
    write("prompts.jsonl", [good, good | {"prompt": ""}])
    write("eval.jsonl", [good | {"prompt": LONG}, good])
    write("sft.jsonl", [{"prompt": "is tea ", "completion": "hot"}, {"prompt": "is tea "}])
    files = ["--eval-data", "eval.jsonl", "--sft", "sft.jsonl", "--sft-steps", "1"]
    assert "prompts.jsonl, line 2: prompt is empty" in refused(*train(*files))
    skips = [*files, "--bad-rows", "skip"]
    assert "eval.jsonl, line 1: it has " in refused(*train(*skips))
    drops = [*skips, "--long-rows", "drop"]
    main(train(*drops, "--dry-run"))
    shown = capsys.readouterr().out
    assert "prompts: 1 of " in shown and "held out: 1 prompts" in shown
    main(train(*drops, "--output-dir", "out"))
    found = summary_of("out")["data"]
    assert {name: report["skipped"] for name, report in found.items()} == {
        "data": {"empty": 1},
        "eval_data": {"length": 1},
        "sft": {"column": 1},
    }


def test_a_share_of_the_rows_is_held_out():
    for share, held_out in ((0.4, 40), (0.1, 10), (0.25, 25), (0.33, 33), (0.9, 90), (0.0, 0)):
        learnt, judged = own_run.split_held_out(list(range(100)), share)
        assert len(judged) == held_out and sorted(learnt + judged) == list(range(100))
    assert own_run.split_held_out([1], 0.9) == ([1], [])


# --- what a dry run promises


def test_a_dry_run_shows_a_row_of_each_kind_the_ends_and_the_columns(here, capsys):
    rows = rows_of("sft", 3) + [{"prompt": chat("rain?"), "completion": "wet", "source": "web"}]
    write("rows.jsonl", rows)
    with pytest.warns(UnusedColumns):
        main(supervised("sft", "--dry-run"))
    shown = capsys.readouterr().out
    assert "    is tea hot 0 ⟦ yes<end>⟧" in shown
    assert "    <ask>user: rain?</ask><ask>assistant: ⟦wet</ask><end>⟧" in shown
    assert "a response ends with <end> (0)" in shown
    assert "data, columns: completion, prompt; not used: source" in shown
    assert "the model was loaded and checked" in shown
    main(train("--dry-run"))
    shown = capsys.readouterr().out
    assert "    is tea hot⟦the response⟧" in shown
    assert "    <ask>user: rain?</ask><ask>assistant: ⟦the response⟧" in shown


def not_finite(name):
    "Spoil a weight of a saved model."
    model = AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    model.save_pretrained(name)


def occupied(name):
    "A directory that holds something."
    Path("out").mkdir()
    Path("out/file").touch()


def one_label(name):
    write("rows.jsonl", [row | {"label": True} for row in rows_of("kto")])


FAULTS = [
    *((name, not_finite, "not finite") for name in (*ROW_OF_STAGE, "train")),
    *((name, occupied, "already holds files: give another") for name in (*ROW_OF_STAGE, "train")),
    ("kto", one_label, "not two kinds of label"),
]


@pytest.mark.parametrize("name, spoil, says", FAULTS)
def test_a_dry_run_refuses_what_the_run_refuses_and_writes_nothing(here, name, spoil, says):
    if name != "train":
        write("rows.jsonl", rows_of(name))
    spoil("llama")
    before = sorted(map(str, here.rglob("*")))
    command = train() if name == "train" else supervised(name)
    said = refused(*command, "--output-dir", "out", "--dry-run")
    assert says in said
    assert [p for p in sorted(map(str, here.rglob("*"))) if "__pycache__" not in p] == before
    assert says in refused(*command, "--output-dir", "out")


def test_a_dry_run_of_a_run_that_goes_on_compares_its_settings(here, capsys):
    write("rows.jsonl", rows_of("sft"))
    main(supervised("sft", "--output-dir", "out"))
    main(supervised("sft", "--output-dir", "out", "--resume", "--steps", "3", "--dry-run"))
    assert "1 of 1 steps of the stage 'sft' are done" in capsys.readouterr().out
    options = ["--output-dir", "out", "--resume", "--lr", "2e-3", "--dry-run"]
    assert "lr" in refused(*supervised("sft", *options))


def test_the_trial_gives_the_reward_a_right_answer_from_the_answer_column(here, capsys):
    Path("right.py").write_text(
        "def score(completions, solution):\n"
        "    said = [c if isinstance(c, str) else c[-1]['content'] for c in completions]\n"
        "    return [float(str(s) in text) for text, s in zip(said, solution)]\n"
    )
    rows = [{"prompt": "is tea hot", "solution": 7}, {"prompt": chat("rain?"), "solution": "wet"}]
    write("prompts.jsonl", rows)
    Path("answer.py").write_text(Path("right.py").read_text().replace("solution", "answer"))
    main(train("--dry-run", "--answer-column", "solution", reward="answer.py:score"))
    shown = capsys.readouterr().out
    assert (
        "about 2 sample answers: 0, 0; and about 2 right ones, of the answer column: 1, 1" in shown
    )
    main(train("--dry-run", reward="right.py:score"))
    assert "right ones" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward-model", "train"])
def test_a_token_beyond_the_embedding_is_refused_by_its_line_and_else_noted(here, capsys, name):
    tokenizer = AutoTokenizer.from_pretrained("llama")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    tokenizer.save_pretrained("llama")
    spoilt = [row | {"prompt": "<tool> " + row["prompt"]} for row in rows_of("sft", 1)]
    if name == "train":
        good = [{"prompt": "is tea hot", "answer": "yes", "n": 1}]
        spoilt = [good[0] | {"prompt": "<tool> is tea hot"}]
        file = "prompts.jsonl"
        command = train("--dry-run")
    else:
        good = rows_of(name)
        spoilt = [good[9] | {"prompt": "<tool> is tea hot"}]
        file = "rows.jsonl"
        command = supervised(name, "--dry-run")
    write(file, good)
    main(command)
    assert (
        f"embedding: {rows} rows for {rows + 1} tokens; 1 tokens have no row"
        in capsys.readouterr().out
    )
    write(file, good[:9] + spoilt)
    line = min(len(good), 9) + 1
    assert f"{file}, line {line}: the token '<tool>' ({rows}) is beyond" in refused(*command)


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_a_stage_goes_on_from_a_run_with_adapters(here, name):
    "The adapters are merged, and all weights learn."
    pytest.importorskip("peft")
    main(train("--lora-rank", 2, "--output-dir", "lora"))
    argv = stage(name, "--steps", "2")
    argv[argv.index("llama")] = "lora"
    main(argv)
    assert len(log(name)) == 2 and all(row["grad_norm"] > 0 for row in log(name))
    saved = Path(name, "sft" if name == "sft" else "policy")
    assert not (saved / "adapter_config.json").exists()
    assert any(saved.glob("model*.safetensors"))


@pytest.mark.parametrize("name", STAGES)
def test_a_coefficient_of_routers_is_refused_for_a_model_without_experts(here, name):
    said = refused(*stage(name, "--steps", "1", "--router-aux-loss-coef", "0.1"))
    assert "router_aux_loss_coef is 0.1, and Llama" in said


@pytest.fixture(autouse=True)
def _stand_ins_are_no_settings(unchecked):
    with unchecked():
        yield


@pytest.fixture
def asked(monkeypatch):
    "replace(name, result): a function of the recipe notes what it is given, and returns this."
    noted = {}

    def replace(name, result=None):
        def work(*args, **options):
            noted[name] = (args, options)
            return result

        monkeypatch.setattr(own_model, name, work)

    noted["replace"] = replace
    return noted


@pytest.mark.parametrize(
    "n, share, held_out",
    [
        (10, 0.1, [10]),
        (20, 0.1, [10, 20]),
        (10, 0.4, [3, 5, 8, 10]),
        (5, 0.9, [2, 3, 4, 5]),
        (9, 0.1, []),
        (3, 0, []),
        (30, 0.3, [4, 7, 10, 14, 17, 20, 24, 27, 30]),  # exact, as no binary fraction is
    ],
)
def test_held_out_rows_are_spread_evenly(n, share, held_out):
    rows = list(range(1, n + 1))
    learnt, judged = split_held_out(rows, share)
    assert judged == held_out and learnt == [row for row in rows if row not in held_out]


# --- what the run learns with


def manager_of(progress, has_state=True):
    stage = SimpleNamespace(newest_state=has_state)
    return SimpleNamespace(stage=lambda name: stage, latest=SimpleNamespace(progress=progress))


@pytest.mark.parametrize(
    "progress, has_state, done",
    [(("sft", 7, 9), True, 7), (("sft", 7, 9), False, 0), (None, True, 0)],
)
def test_a_stages_log_is_cut_to_where_it_was_left(progress, has_state, done, asked, tmp_path):
    asked["replace"]("truncate_log")
    asked["replace"]("append_jsonl")
    config = SimpleNamespace(
        steps=9,
        lr=0.1,
        batch_size=8,
        seed=3,
        long_rows="cut",
        progress=False,
        router_aux_loss_coef=0.5,
    )
    manager = manager_of(progress, has_state)
    options = fit_options(config, "sft", 5, tmp_path, manager)
    assert asked["truncate_log"] == ((tmp_path / "metrics.jsonl", done), {})
    options.pop("callback")(1, {"loss": 2.0})
    assert asked["append_jsonl"] == ((tmp_path / "metrics.jsonl", {"loss": 2.0}), {})
    assert options.pop("stage") is manager.stage("sft")
    assert options.pop("seed") != fit_options(config, "dpo", 5, tmp_path, manager)["seed"]
    assert options == {
        "steps": 9,
        "lr": 0.1,
        "batch_size": 5,  # of five rows
        "desc": "sft",
        "long_rows": "cut",
        "progress": False,
        "router_aux_loss_coef": 0.5,
    }
    assert fit_options(config, "sft", 50, tmp_path, manager)["batch_size"] == 8


@pytest.mark.parametrize("rows, batch_size", [(3, 3), (30, 8)])
def test_demonstrations_are_learnt_with_their_own_settings(rows, batch_size, asked):
    asked["replace"]("train_lm")
    config = SimpleNamespace(
        sft_steps=7, sft_lr=0.2, sft_batch_size=8, seed=1, long_rows="drop", progress=True
    )
    inputs = SimpleNamespace(tokenizer="tokenizer", demos=[{}] * rows)
    manager = manager_of(None)
    learn_demos(config, "model", inputs, manager)
    args, options = asked["train_lm"]
    assert args == ("model", "tokenizer", inputs.demos) and isinstance(options.pop("seed"), int)
    assert options == {
        "steps": 7,
        "lr": 0.2,
        "batch_size": batch_size,
        "desc": "SFT",
        "long_rows": "drop",
        "progress": True,
        "stage": manager.stage("sft"),
    }


@pytest.mark.parametrize(
    "settings, rows",
    [
        ({}, 4),  # 16 responses in four minibatches
        ({"batch_size": 18}, 5),  # rounded up
        ({"micro_batch_size": 3}, 3),
        ({"micro_batch_size": 9}, 4),
        ({"micro_batch_tokens": 60}, 2),  # of 20 + 10 tokens each
        ({"micro_batch_tokens": 59}, 1),
        ({"micro_batch_tokens": 5}, 1),
        ({"micro_batch_tokens": 3000}, 4),
        ({"micro_batch_size": 3, "micro_batch_tokens": 3000}, 3),
    ],
)
def test_memory_is_that_of_the_rows_that_are_read_at_once(settings, rows, asked):
    for name, result in (
        ("load_config", "shape"),
        ("memory_parts", "parts"),
        ("memory_table", "table"),
    ):
        asked["replace"](name, result)
    plain = dict(
        batch_size=16,
        minibatches=4,
        micro_batch_size=None,
        micro_batch_tokens=None,
        max_new_tokens=10,
        lora_rank=2,
        needs_reference=True,
        value_model="shared",
        advantage="gae",
        four_bits=False,
        gradient_checkpointing=True,
        device="cpu",
    )
    config = SimpleNamespace(**plain | settings)
    inputs = SimpleNamespace(place="place", lengths=[3, 20, 7])
    assert memory_of_run(config, inputs) == "table" and asked["memory_table"] == (("parts",), {})
    args, options = asked["memory_parts"]
    assert args == ("shape", config.batch_size, rows, 20, 10, 2)
    tile = options.pop("tile")
    assert tile > 0 and options == {
        "reference": True,
        "value_copy": False,
        "four_bits": False,
        "checkpointing": True,
    }


@pytest.mark.parametrize(
    "value_model, advantage, copied",
    [("copy", "gae", True), ("copy", "greedy", False), ("shared", "gae", False)],
)
def test_a_copy_for_the_values_is_counted_where_there_are_values(
    value_model, advantage, copied, asked
):
    for name in ("load_config", "memory_parts", "memory_table"):
        asked["replace"](name)
    config = SimpleNamespace(
        batch_size=4,
        minibatches=1,
        micro_batch_size=None,
        micro_batch_tokens=None,
        max_new_tokens=1,
        lora_rank=None,
        needs_reference=False,
        value_model=value_model,
        advantage=advantage,
        four_bits=True,
        gradient_checkpointing=False,
        device="cpu",
    )
    memory_of_run(config, SimpleNamespace(place="place", lengths=[1]))
    options = asked["memory_parts"][1]
    assert (options["value_copy"], options["four_bits"], options["reference"]) == (
        copied,
        True,
        False,
    )


def test_a_plan_is_settings_lines_and_a_place(asked):
    asked["replace"]("as_yaml", "lr: 1")
    lines = plan_text(SimpleNamespace(output_dir=None), ["a", "b"]).splitlines()
    assert lines[1:5] == ["lr: 1", "", "a", "b"]
    assert lines[5] == "written to: a fresh directory under runs/"
    assert plan_text(SimpleNamespace(output_dir=Path("x")), []).endswith("written to: x")


# --- rewards, trainers, columns


class Steps:
    def reset(self):
        return ""

    def step(self, action):
        return "", 0.0, True


@pytest.mark.parametrize("is_paid", [True, False])
def test_what_an_environment_pays_stands_before_the_rewards(is_paid, asked):
    asked["replace"]("load_reward", "reward")
    asked["replace"]("is_paying", is_paid)
    config = SimpleNamespace(reward=("a", "b"), environment="x.py:X")
    assert own_rewards(config, None) == ["reward", "reward"]
    assert own_rewards(config, Steps()) == [environment_reward] * is_paid + ["reward", "reward"]
    config.reward = ()
    with pytest.raises(ValueError, match="--reward is missing"):
        own_rewards(config, None)
    if is_paid:
        assert own_rewards(config, Steps()) == [environment_reward]
    else:
        with pytest.raises(ValueError, match="--environment x.py:X pays nothing"):
            own_rewards(config, Steps())


class OwnTrainer(RLHFTrainer):
    pass


@pytest.mark.parametrize(
    "named, is_taken", [(OwnTrainer, True), (int, False), (print, False), (3, False)]
)
def test_a_trainer_of_ones_own_is_a_subclass(named, is_taken, asked):
    assert own_trainer(None) is RLHFTrainer
    asked["replace"]("named_object", named)
    if is_taken:
        assert own_trainer("x.py:X") is named
    else:
        with pytest.raises(ValueError, match="--trainer x.py:X is no subclass of RLHFTrainer"):
            own_trainer("x.py:X")
    assert asked["named_object"] == (("x.py:X", "--trainer"), {})


@pytest.mark.parametrize(
    "rows, columns",
    [
        ([{"q": 1, "a": 1}], {"prompt": "q", "completion": "a"}),
        ([{"q": 1, "b": 1}, {"a": 1}], {"prompt": "q"}),  # the first row counts
        (["text", {"a": 1}], {"completion": "a"}),
        (["text"], {}),
        ([], {}),
    ],
)
def test_columns_of_the_prompts_count_where_demonstrations_have_them(rows, columns, asked):
    asked["replace"]("own_rows", [(f"line {i}", row) for i, row in enumerate(rows)])
    config = SimpleNamespace(prompt_column="q", messages_column=None, answer_column="a", sft="x")
    assert demo_columns(config) == columns


@pytest.mark.parametrize("value_model, copied", [("copy", True), ("shared", False)])
@pytest.mark.parametrize("has_environment", [True, False])
def test_the_trainer_of_a_run_has_its_values_and_its_environment(
    value_model, copied, has_environment
):
    model, tokenizer = tiny_smollm(["a"])
    made = []

    class Made:
        def __init__(self, agent, ref_model, config, tokenizer):
            made.append((agent, ref_model, config, tokenizer))

        def use_sampler(self, make):
            made.append(make)

    config = SimpleNamespace(
        value_model=value_model, gradient_checkpointing=True, environment_turns=3
    )
    inputs = SimpleNamespace(
        make_trainer=Made,
        tokenizer=tokenizer,
        make_environment=Steps if has_environment else None,
    )
    trainer_of(config, model.train(), inputs)
    agent, ref_model, *rest = made[0]
    assert (agent.value_model is not None) == copied and ref_model is None
    assert rest == [config, tokenizer] and not agent.model.training
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    assert len(made) == 1 + has_environment
    if has_environment:
        tokens = SimpleNamespace(tokenizer=tokenizer, eos_ids=[0], pad_id=0)
        sampler = made[1](agent, tokens)
        assert type(sampler) is EnvironmentSampler and sampler.factory is Steps


# --- supervised stages


@pytest.mark.parametrize(
    "read, reads, flag",
    [
        (read_answers, "read_demos", False),
        (read_labelled_answers, "read_demos", True),
        (read_pairs, "read_preferences", False),
        (read_pairs_with_margins, "read_preferences", True),
    ],
)
def test_rows_are_read_with_labels_or_margins_where_the_stage_wants_them(read, reads, flag, asked):
    asked["replace"](reads, ["row"])
    config = SimpleNamespace(template_kwargs='{"a": 1}', columns=lambda: {"prompt": "q"})
    source = own_model.RowSource("source", "policy", "report")
    assert read(config, source, "tokenizer") == ["row"]
    expected = ("source", "tokenizer", {"prompt": "q"}, flag, {"a": 1}, "policy", "report")
    assert asked[reads] == (expected, {})


@pytest.mark.parametrize(
    "labels, batch_size, says",
    [
        ([True, False], 2, None),
        ([True, True], 2, "label"),
        ([True, False], 1, "row"),
    ],
)
def test_kto_needs_both_labels_and_two_rows(labels, batch_size, says):
    config = SimpleNamespace(batch_size=batch_size)
    rows = [{"label": label} for label in labels]
    if says is None:
        check_labels(config, rows)
    else:
        with pytest.raises(ValueError, match=says):
            check_labels(config, rows)


class Model:
    is_training = True

    def eval(self):
        self.is_training = False
        return self


def inputs_of(rows, held_out, **options):
    data = SimpleNamespace(rows=rows, held_out=held_out, tokenizer="tokenizer")
    return own_model.StageInputs(Model(), "reference", data, options)


def config_of(**settings):
    return SimpleNamespace(long_rows="cut", bar_name=lambda name: f"bar: {name}", **settings)


@pytest.mark.parametrize("has_held_out", [True, False])
def test_sft_measures_before_and_after(has_held_out, asked, monkeypatch, tmp_path):
    asked["replace"]("train_lm", ["log"])
    asked["replace"]("learnt_ends", [7])
    asked["replace"]("save_model")
    measured = []

    def lm_nats(model, tokenizer, rows, **options):
        measured.append((tokenizer, rows, options))
        return 5.0 - len(measured)

    monkeypatch.setattr(own_model, "lm_nats", lm_nats)
    inputs = inputs_of(["a"], ["b"] if has_held_out else [], steps=3)
    log, figures = learn_demonstrations(config_of(), inputs, tmp_path)
    assert log == ["log"] and asked["train_lm"] == (
        (inputs.model, "tokenizer", ["a"]),
        {"steps": 3},
    )
    assert asked["learnt_ends"][0] == (inputs.model, "tokenizer", ["a"], "completion")
    assert asked["save_model"][0] == (inputs.model, "tokenizer", tmp_path / "sft", [7])
    assert not inputs.model.is_training
    if has_held_out:
        assert figures == {"nats_before": 4.0, "nats_after": 3.0}
        assert measured == [
            ("tokenizer", ["b"], {"long_rows": "cut", "desc": f"bar: held-out rows, {when}"})
            for when in ("before", "after")
        ]
    else:
        assert figures == {} and measured == []


class RewardModelStandIn(Model):
    def normalise(self, texts):
        self.texts = texts

    def save_pretrained(self, directory):
        (directory / "saved").write_text("")


@pytest.mark.parametrize("has_held_out", [True, False])
def test_a_reward_model_has_the_scale_of_its_first_500_pairs(has_held_out, asked, tmp_path):
    rows = [{"chosen": f"x{i}", "rejected": f"y{i}"} for i in range(501)]
    asked["replace"]("train_reward_model", ["log"])
    asked["replace"]("pair_accuracy", 0.75)
    asked["replace"]("fitting_pairs", SimpleNamespace(rows=rows[:2]))
    inputs = inputs_of(rows, ["b"] if has_held_out else [], lr=1)
    judge = RewardModelStandIn()
    inputs = inputs._replace(partner=judge)
    log, figures = learn_scores(config_of(), inputs, tmp_path)
    assert log == ["log"] and asked["train_reward_model"] == ((judge, rows), {"lr": 1})
    assert asked["fitting_pairs"][0] == (judge, rows[:500], "cut")
    assert judge.texts == ["x0", "y0", "x1", "y1"] and not judge.is_training
    assert [file.name for file in (tmp_path / "reward_model").iterdir()] == ["saved"]
    assert figures == ({"pair_accuracy": 0.75} if has_held_out else {})
    if has_held_out:
        assert asked["pair_accuracy"][0] == (judge, ["b"], "cut", "bar: held-out pairs")


@pytest.mark.parametrize("has_held_out", [True, False])
def test_dpo_counts_the_held_out_pairs_whose_preferred_answer_gained_more(
    has_held_out, asked, tmp_path
):
    asked["replace"]("train_dpo", ["log"])
    asked["replace"]("save_learnt")
    asked["replace"]("pair_rows", [("x", "y"), ("z", "w")])
    asked["replace"]("log_ratios", [[1.0, 0.5], [0.0, 1.0], [2.0, 2.0], [0.0, -1.0]])
    inputs = inputs_of(["a"], ["b"] if has_held_out else [], steps=3)
    config = config_of(beta=0.3, label_smoothing=0.1)
    log, figures = learn_preferences(config, inputs, tmp_path)
    options = {"ref_model": "reference", "beta": 0.3, "label_smoothing": 0.1, "steps": 3}
    assert asked["train_dpo"] == ((inputs.model, "tokenizer", ["a"]), options)
    assert asked["save_learnt"][0] == (inputs, "chosen", tmp_path / "policy")
    assert figures == ({"pair_accuracy": 2 / 4} if has_held_out else {}) and log == ["log"]
    if has_held_out:
        rows = [["x", "y"], ["z", "w"]]
        assert asked["log_ratios"][0] == (inputs, rows, "cut", "bar: held-out pairs")


@pytest.mark.parametrize("has_held_out", [True, False])
def test_kto_measures_how_far_answers_moved_the_way_of_their_labels(has_held_out, asked, tmp_path):
    asked["replace"]("train_kto", ["log"])
    asked["replace"]("save_learnt")
    asked["replace"]("prompts_and_responses", ["x", "y"])
    asked["replace"]("log_ratios", [[1.0], [0.5]])
    held_out = [
        {"prompt": "p", "completion": "c", "label": True},
        {"prompt": "q", "completion": "d", "label": False},
    ]
    inputs = inputs_of(["a"], held_out if has_held_out else [], steps=3)
    config = config_of(beta=0.3, good_weight=1.5, bad_weight=0.5)
    log, figures = learn_labels(config, inputs, tmp_path)
    options = {"ref_model": "reference", "beta": 0.3, "good_weight": 1.5, "bad_weight": 0.5}
    assert asked["train_kto"] == ((inputs.model, "tokenizer", ["a"]), options | {"steps": 3})
    assert asked["save_learnt"][0] == (inputs, "completion", tmp_path / "policy")
    assert figures == ({"margin": (1.0 - 0.5) / 2} if has_held_out else {}) and log == ["log"]
    if has_held_out:
        parts = (["p", "q"], ["c", "d"], "tokenizer", [{}, {}])
        assert asked["prompts_and_responses"][0] == parts
        assert asked["log_ratios"][0] == (inputs, [["x"], ["y"]], "cut", "bar: held-out answers")


def test_the_ends_of_answers_are_those_of_the_first_hundred_rows():
    tokenizer = tiny_smollm(["a", "b"])[1]
    rows = [{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}] * 100
    broken = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "user"}]}
    assert ends_of_rows(tokenizer, [*rows, broken], "completion") == [tokenizer.eos_token_id]
    assert ends_of_rows(tokenizer, [], "completion") == []


# --- what is shown


@pytest.mark.parametrize(
    "kind, kl, shown",
    [("training", 0.256, "KL 0.26 nats a response. "), ("held_out", None, "")],
)
def test_the_results_of_a_run_are_shown(kind, kl, shown, asked, tmp_path, capsys):
    asked["replace"]("plot_metrics")
    asked["replace"]("read_metrics", (["rows"], "more"))
    (tmp_path / "samples.md").write_text("\n".join(f"line {i}" for i in range(20)))
    summary = {
        f"{kind}_reward": {"before": 0.25, "after": 0.5},
        "last": {} if kl is None else {"kl_to_reference": kl},
        "cpu_seconds": 12.3,
    }
    show_results(summary, 64, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:10] == [f"line {i}" for i in range(2, 12)]
    assert lines[11].startswith(
        f"Reward on 64 {kind.replace('_', '-')} prompts: 0.250 → 0.500. {shown}12 CPU-seconds."
    )
    assert asked["plot_metrics"][0] == (["rows"], tmp_path)
