"""What TRL 1.16 documents, unchanged: its forms of reward functions (its page on GRPO, `trl.rewards`) and its data formats, through our trainer and commands.

One difference: completions are texts on conversational rows too; who wants messages asks for completion_messages. The functions are in our words; each score has an oracle of its own, worked out from the tokens of the rollout.
"""

import asyncio
import json
import re
from pathlib import Path

import jaxtyping
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerState

from instruct_goose.cli.main import main
from instruct_goose.config import RLHFConfig
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.recipes import own_model as own_run
from instruct_goose.recipes.inputs import try_reward
from instruct_goose.rollouts.rewards import RewardError
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.trainer import RLHFTrainer

WORDS = "is tea hot rain wet yes no < > think what one two system user assistant".split()
TOKENIZER = word_tokenizer(WORDS, 48, pad="<end>", bos="<end>", eos="<end>")
TOKENIZER.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
TEXT = [
    {"prompt": "is tea", "ground_truth": "hot", "task": "math"},
    {"prompt": "what is rain", "ground_truth": "wet", "task": "code"},
]
CHAT = [
    row
    | {
        "prompt": [
            {"role": "system", "content": "yes no"},
            {"role": "user", "content": row["prompt"]},
        ]
    }
    for row in TEXT
]


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch):
    monkeypatch.setattr(own_run, "plot_metrics", lambda *_: [])
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(TOKENIZER),
            n_positions=48,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.3,
        )
    )


def trainer(algorithm="grpo", **changes):
    settings = RLHFConfig.preset(
        algorithm,
        **dict(
            dict(
                batch_size=8,
                group_size=4,
                max_new_tokens=5,
                epochs=1,
                minibatches=1,
                lr=1e-3,
                steps=4,
            ),
            **changes,
        ),
    )
    return RLHFTrainer(model(), config=settings, tokenizer=TOKENIZER)


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_letters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def of_form(completion_messages, **kwargs):
    said = [completion[0]["content"] for completion in completion_messages]
    return [1.0 if re.match(r"^< think > .*", text, re.S) else 0.5 * (" " in text) for text in said]


def is_right(completions, ground_truth, **kwargs):
    return [
        1.0 if truth in text.split() else 0.0
        for text, truth in zip(completions, ground_truth, strict=True)
    ]


def for_sums(prompts, completions, task, **kwargs):
    return [float(len(c)) if t == "math" else None for c, t in zip(completions, task, strict=True)]


def for_programs(prompts, completions, task, **kwargs):
    return [-1.0 if t == "code" else None for t in task]


async def later(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(len(p)) for p in prompts]


class Repeated:
    __name__ = "repeated"

    def __call__(self, completion_ids, **kwargs):
        return [len(set(ids)) / len(ids) - 1 for ids in completion_ids]


def overlong(limit):
    def over(completion_ids, **kwargs):
        return [-1.0 if len(ids) >= limit else 0.0 for ids in completion_ids]

    return over


def noted(completions, ground_truth, trainer_state, log_extra=None, log_metric=None, **kwargs):
    scores = is_right(completions, ground_truth)
    if log_extra:
        log_extra("truth", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(scores) / len(scores))
    return [s * (1 + trainer_state.global_step / trainer_state.max_steps) for s in scores]


def from_kwargs(completions, **kwargs):
    kwargs["log_metric"]("twice", 2)
    return [float(kwargs["trainer_state"].global_step) for _ in completions]


def said(r):
    return [
        TOKENIZER.decode(ids[m].tolist(), skip_special_tokens=True)
        for ids, m in zip(r.response_ids, r.mask, strict=True)
    ]


def column(rows, name):
    return [row[name] for row in rows for _ in range(4)]


@pytest.mark.parametrize("rows", [TEXT, CHAT], ids=["standard", "conversational"])
@pytest.mark.parametrize(
    "function, oracle",
    [
        (by_tokens, lambda r, rows: r.mask.sum(-1).tolist()),
        (later, lambda r, rows: [len(p) for p in column(rows, "prompt")]),
        (
            Repeated(),
            lambda r, rows: [
                len(set(ids[m].tolist())) / m.sum().item() - 1
                for ids, m in zip(r.response_ids, r.mask, strict=True)
            ],
        ),
        (overlong(5), lambda r, rows: [-float(m.sum() == 5) for m in r.mask]),
        (from_kwargs, lambda r, rows: [0] * 8),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_functions_of_tokens_prompts_and_the_run(rows, function, oracle):
    t = trainer()
    r = t.score(t.rollout(rows), function)
    assert r.scores.tolist() == pytest.approx(oracle(r, rows), abs=1e-6)


def test_functions_of_text_and_of_messages():
    t = trainer()
    r = t.score(t.rollout(TEXT), by_letters)
    assert r.scores.tolist() == [len(text) for text in said(r)] and len(set(r.scores.tolist())) > 2
    truth = column(TEXT, "ground_truth")
    assert t.score(r, is_right).scores.tolist() == [
        float(w in text.split()) for w, text in zip(truth, said(r), strict=True)
    ]
    t = trainer()
    r = t.score(t.rollout(CHAT), of_form)
    assert r.scores.tolist() == [0.5 * (" " in text) for text in said(r)]
    assert of_form([[{"role": "assistant", "content": "< think > yes"}]]) == [1.0]


def test_completions_are_texts_on_conversational_rows_too():
    def starred(completions, ground_truth):
        return [
            float(c.strip() == w) for c, w in zip(completions, ground_truth, strict=True)
        ]  # the README's second reward

    def searches(prompts):
        return [float("hot" in p) for p in prompts]

    def as_in_trl(completions):
        return [float("yes" in c[0]["content"]) for c in completions]

    t = trainer()
    r = t.rollout(CHAT)
    assert t.score(r, starred).scores.tolist() == [
        float(text.strip() == w)
        for text, w in zip(said(r), column(CHAT, "ground_truth"), strict=True)
    ]
    assert t.score(r, is_right).scores.tolist() == [
        float(w in text.split())
        for w, text in zip(column(CHAT, "ground_truth"), said(r), strict=True)
    ]
    with pytest.raises(RewardError, match="'hot' is looked for in a list of messages"):
        t.score(r, searches)
    with pytest.raises(
        ValueError,
        match="--reward, asked about 2 sample answers before the run: .*'hot' is looked for in a list of messages",
    ):
        try_reward([searches], CHAT, TOKENIZER)
    with pytest.raises(RewardError, match="name the parameter completion_messages"):
        t.score(r, as_in_trl)


def test_each_task_has_its_function_and_none_is_left_out():
    t = trainer(reward_weights=(1.0, 2.0))
    r = t.score(t.rollout(TEXT), [for_sums, for_programs])
    assert r.scores.tolist() == [float(len(text)) for text in said(r)[:4]] + [-2.0] * 4
    m = t.step(TEXT, [for_sums, for_programs])
    assert m["reward_mean/for_programs"] == -1 and m["reward_mean/for_sums"] > 0


def test_what_a_function_notes_stands_in_the_log_and_beside_the_responses():
    "By hand: step k of 4 multiplies by 1 + k/4."

    class Look(Callback):
        seen = []

        def on_score(self, trainer, r):
            self.seen.append(
                (
                    r.extra["truth"],
                    r.scores / (1 + trainer.iteration / 4),
                    said(r),
                    r[[5, 0]].extra["truth"],
                )
            )

    t = trainer(eval_every=2)
    t.callbacks = [Look()]
    history = t.train(TEXT, noted, held_out=TEXT[:1], progress=False)
    assert len(history) == 4
    for m, (truth, plain, texts, picked) in zip(history, Look.seen, strict=True):
        right = [float(w in text.split()) for w, text in zip(truth, texts, strict=True)]
        assert (
            plain.tolist() == pytest.approx(right)
            and m["logged/accuracy"] == pytest.approx(sum(right) / 8)
            and picked == [truth[5], truth[0]]
        )
        assert sorted(set(truth)) == ["hot", "wet"]
    assert [m.get("held_out_logged/accuracy") is not None for m in history] == [False, True] * 2
    json.dumps(history)


def test_the_state_is_transformers_own():
    seen = []

    def look(completions, trainer_state, **kwargs):
        seen.append(trainer_state)
        return [0.0] * len(completions)

    t = trainer(steps=3)
    t.train(TEXT * 2, look, progress=False)
    assert all(isinstance(s, TrainerState) for s in seen)
    assert [(s.global_step, s.max_steps) for s in seen] == [(0, 3), (1, 3), (2, 3)]


def test_a_column_that_does_not_fit_is_refused_by_name():
    def short(completions, log_extra, **kwargs):
        log_extra("half", [1])
        return [0.0] * len(completions)

    def odd(completions, log_metric, **kwargs):
        log_metric("rate", "high")
        return [0.0] * len(completions)

    t = trainer()
    with pytest.raises(
        ValueError, match=r"iteration 0: log_extra\('half', …\) was given 1 values for 8 responses"
    ):
        t.step(TEXT, short)
    with pytest.raises(RewardError, match="the metric 'rate' is 'high': not a number"):
        t.step(TEXT, odd)


def turns(*contents):
    return [{"role": role, "content": c} for role, c in zip(["user", "assistant"] * 2, contents)]


PROMPT_ONLY = {
    "standard": [{"prompt": "is tea"}, {"prompt": "what is rain"}],
    "conversational": [{"prompt": turns("is tea")}, {"prompt": turns("what is rain")}],
}
SFT = {
    "language modelling": [{"text": "tea is hot"}, {"text": "rain is wet"}],
    "language modelling, conversational": [
        {"messages": turns("is tea hot", "yes")},
        {"messages": turns("tea", "hot", "rain", "wet")},
    ],
    "prompt-completion": [
        {"prompt": "is tea", "completion": " hot"},
        {"prompt": "rain is", "completion": " wet"},
    ],
    "prompt-completion, conversational": [
        {"prompt": turns("is tea"), "completion": [{"role": "assistant", "content": "hot"}]}
    ]
    * 2,
}


def answer(text):
    return [{"role": "assistant", "content": text}]


PAIRS = {
    "explicit prompt": [{"prompt": "is tea", "chosen": " hot", "rejected": " wet"}] * 2,
    "implicit prompt": [{"chosen": "tea is hot", "rejected": "tea is wet"}] * 2,
    "explicit prompt, conversational": [
        {"prompt": turns("is tea"), "chosen": answer("hot"), "rejected": answer("wet")}
    ]
    * 2,
    "implicit prompt, conversational": [
        {"chosen": turns("is tea", "hot"), "rejected": turns("is tea", "wet")}
    ]
    * 2,
}
QUICK = ["--steps", "1", "--batch-size", "2", "--held-out", "0", "--no-progress"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model().save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    return tmp_path


def write(rows):
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def log(out):
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", PROMPT_ONLY)
def test_prompts_by_the_command_with_functions_that_note(here, form):
    write(
        [
            row | {"ground_truth": w}
            for row, w in zip(PROMPT_ONLY[form], ("hot", "wet"), strict=True)
        ]
    )
    Path("rewards.py").write_text(
        "def right(completions, ground_truth, trainer_state, log_metric, log_extra, **kwargs):\n"
        "    said = completions\n    log_metric('share', trainer_state.global_step / trainer_state.max_steps)\n"
        "    log_extra('said', said)\n    return [float(w in s) for s, w in zip(said, ground_truth)]\n\n"
        "async def length(completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]\n"
    )
    main(
        [
            "train",
            "--model",
            "model",
            "--data",
            "rows.jsonl",
            "--reward",
            "rewards.py:right",
            "rewards.py:length",
            "--algorithm",
            "grpo",
            "--group-size",
            "2",
            "--batch-size",
            "4",
            "--steps",
            "2",
            "--max-new-tokens",
            "4",
            "--epochs",
            "1",
            "--minibatches",
            "1",
            "--reward-weighting",
            "scaled",
            "--reward-scaling",
            "batch",
            "--eval-greedy",
            "--gradient-checkpointing",
            "--no-progress",
            "--output-dir",
            "run",
        ]
    )
    assert [m["logged/share"] for m in log("run")] == [0, 0.5] and all(
        {"reward_mean/right", "reward_mean/length"} <= m.keys() for m in log("run")
    )


@pytest.mark.parametrize(
    "last, says",
    [
        ("1 / 0", "raised ZeroDivisionError.*for 4 texts, 'is tea"),
        ("[None] + [0.] * 3", "text 0 of 4, 'is tea.* is None"),
    ],
    ids=["raises", "None"],
)
def test_a_reward_that_fails_in_the_middle_of_a_run_is_one_sentence(here, last, says, capsys):
    write(TEXT)
    Path("rewards.py").write_text(
        f"def late(completions, trainer_state): return {last} if trainer_state.global_step == 1 else [0.] * len(completions)\n"
    )
    with pytest.raises(SystemExit, match=f"^instruct-goose: iteration 1: .*{says}"):
        main(
            [
                "train",
                "--model",
                "model",
                "--data",
                "rows.jsonl",
                "--reward",
                "rewards.py:late",
                "--batch-size",
                "4",
                "--steps",
                "3",
                "--max-new-tokens",
                "4",
                "--epochs",
                "1",
                "--minibatches",
                "1",
                "--no-progress",
                "--output-dir",
                "run",
            ]
        )
    assert "run/checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("form", SFT)
def test_demonstrations(here, form):
    write(SFT[form])
    main(["sft", "--model", "model", "--data", "rows.jsonl", "--output-dir", "run", *QUICK])
    assert len(log("run")) == 1


@pytest.mark.parametrize("form", PAIRS)
def test_preferences(here, form):
    write(PAIRS[form])
    for stage in ("dpo", "reward-model"):
        main([stage, "--model", "model", "--data", "rows.jsonl", "--output-dir", stage, *QUICK])
        assert len(log(stage)) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "is tea", "completion": " hot", "label": True},
        {"prompt": "is tea", "completions": [" hot", " wet"], "labels": [True, False]},
    ],
    ids=["unpaired", "stepwise"],
)
def test_formats_for_trainers_that_are_not_here_are_refused_by_their_columns(here, row):
    write([row] * 2)
    with pytest.raises(SystemExit, match="rows.jsonl, line 1: .*chosen"):
        main(["dpo", "--model", "model", "--data", "rows.jsonl", "--output-dir", "run", *QUICK])
    assert not Path("run").exists()
