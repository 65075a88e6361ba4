"""What a dry run prints. Oracle: rows written out by hand."""

from types import SimpleNamespace

import pytest
import torch

from instruct_goose.data.bad_rows import RowPolicy, RowReport
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.recipes.plan import (
    SHOWN_CHARACTERS,
    dialogue_text,
    ends_text,
    loaded_text,
    prompts_of_each_kind,
    report_lines,
    rows_of_each_kind,
    trial_text,
    without_middle,
)
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer

QUESTION = [{"role": "user", "content": "the film"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_smollm("is the film good yes no".split())[1]


def test_what_is_learnt_of_a_conversation_stands_in_marks(tokenizer):
    rows = [{"prompt": QUESTION, "completion": "good"}]
    assert rows_of_each_kind(rows, ("completion",), tokenizer, RowPolicy())[1:] == [
        "- messages, completion:",
        "    <|im_start|> user the film <|im_end|> <|im_start|> assistant⟦good <|im_end|>⟧",
    ]


def test_nothing_predicts_the_first_token_of_a_text(tokenizer):
    rows = [{"prompt": "", "completion": "is the film good"}]
    lines = rows_of_each_kind(rows, ("completion",), tokenizer, RowPolicy())
    assert lines[-1].strip() == "is⟦the film good <|im_end|>⟧"
    begins = word_tokenizer(["is", "good"])
    lines = rows_of_each_kind(
        [{"prompt": "", "completion": "is good"}], ("completion",), begins, RowPolicy()
    )
    assert lines[-1].strip() == "<bos>⟦is good <eos>⟧"


def test_each_kind_is_shown_once_by_its_first_row(tokenizer):
    rows = [
        {"prompt": "is ", "completion": "yes", "label": True},
        {"prompt": "the ", "completion": "yes", "label": True},
        {"prompt": "is ", "completion": "no", "label": False},
        {"prompt": QUESTION, "completion": "no", "label": False},
    ]
    lines = rows_of_each_kind(rows, ("completion",), tokenizer, RowPolicy())
    assert [line for line in lines if line.startswith("- ")] == [
        "- texts, good, completion:",
        "- texts, bad, completion:",
        "- messages, bad, completion:",
    ]


def test_a_reward_model_reads_texts_without_an_end_that_its_tokenizer_does_not_write(tokenizer):
    pair = [{"prompt": "is ", "chosen": "yes", "rejected": "no"}]
    lines = rows_of_each_kind(pair, ("chosen", "rejected"), tokenizer, RowPolicy(), True)
    assert lines[0].endswith("what is scored stands in ⟦ ⟧:")
    assert [lines[2].strip(), lines[4].strip()] == ["is⟦yes⟧", "is⟦no⟧"]


def test_a_row_is_shown_as_it_will_be_cut(tokenizer):
    rows = [{"prompt": "is the film ", "completion": "good yes no"}]
    policy = RowPolicy(long_rows="cut", limit=4)
    lines = rows_of_each_kind(rows, ("completion",), tokenizer, policy)
    assert lines[-1].strip() == "the film⟦good yes⟧"


def test_a_prompt_of_the_policy_is_followed_by_its_response(tokenizer):
    lines = prompts_of_each_kind([{"prompt": "is the film"}], tokenizer, RowPolicy())
    assert lines[-1].strip() == "is the film⟦the response⟧"


def test_a_models_text_does_not_steer_the_terminal(tokenizer):
    steering = word_tokenizer(["\x1b[31m", "is"])
    rows = [{"prompt": "is ", "completion": "\x1b[31m"}]
    lines = rows_of_each_kind(rows, ("completion",), steering, RowPolicy())
    assert "\x1b" not in "".join(lines) and "\\x1b[31m" in lines[-1]


def test_files_and_columns():
    examples = ["f, line 2: empty", "f, line 4: empty"]
    report = RowReport(rows=4, kept=2, skipped={"empty": 2}, examples=examples)
    report.note_columns({"prompt": "a", "answer": "b", "source": "c"}, {"source"})
    assert report_lines({"data": report, "sft": RowReport()}, {"prompt": "question"}) == [
        "data: 2 of 4 rows skipped (2 × empty)",
        "  the first: f, line 2: empty",
        "data, columns: answer, question; not used: source",
    ]


def test_the_trial_says_when_a_right_answer_gains_nothing():
    assert "gets no more" in trial_text([1.0, 0.0, 1.0], 2)
    assert "gets no more" not in trial_text([0.5, 0.0, 1.0], 2)
    assert trial_text([0.0, 0.0], 2).startswith("the reward was asked about 2 sample answers: 0, 0")
    assert trial_text(None, 2) == "the reward was not asked"


def test_ends_are_those_of_the_model_and_of_what_it_will_learn(tmp_path):
    model, tokenizer = tiny_smollm("is the film good yes no".split())
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = ends_text(str(tmp_path), tokenizer, [0, 5], ["stop"])
    assert (
        text
        == f"a response ends with <|im_end|> (0) or {tokenizer.decode([5])} (5), or with 'stop'"
    )


def test_the_middle_of_a_long_text_is_left_out():
    half = SHOWN_CHARACTERS // 2
    assert without_middle("a" * half + "b" * half) == "a" * half + "b" * half
    assert without_middle("a" * half + "c" + "b" * half) == "a" * half + " … " + "b" * half


def test_a_loaded_model_says_how_many_of_its_weights_learn():
    "Frozen ones are counted among all, and not among those that learn."
    model, tokenizer = tiny_smollm("is the film good yes no".split())
    whole = sum(p.numel() for p in model.parameters())
    head = model.get_input_embeddings().weight
    head.requires_grad_(False)
    line, *_, last = loaded_text(model, tokenizer).splitlines()
    assert line.endswith(f"{whole:,} weights, {whole - head.numel():,} of them learn")
    assert last == "nothing was written"


class OneDialogue(RLHFTrainer):
    "A trainer in whose rollout every token was written by hand."

    tokenizer = word_tokenizer("is tea hot go on yes".split())  # is: 4, …, yes: 9

    def __init__(self, **columns):
        self.columns = columns
        self.asked = None

    def generate(self, rows, n, generator):
        self.asked = SimpleNamespace(rows=rows, n=n, seed=generator.initial_seed())
        wrote = torch.tensor([[True, False, False, True, False]])
        replied = torch.tensor([[False, True, True, False, False]])
        return Rollout(
            query_ids=torch.tensor([[0, 4, 5]]),
            query_mask=torch.tensor([[False, True, True]]),
            response_ids=torch.tensor([[9, 7, 8, 6, 0]]),
            mask=wrote,
            environment_mask=replied,
            **self.columns,
        )


def test_a_dialogue_shows_who_wrote_what_and_what_it_was_paid():
    trainer = OneDialogue(
        ended=torch.tensor([False]),
        environment_rewards=torch.tensor([[0.5, 0.0, 0.0, 1.0, 0.0]]),
        episodes={"replies": [1], "tool_calls": [0]},
    )
    shown = dialogue_text(trainer, {"prompt": "is tea"}, seed=7)
    assert shown.splitlines()[1:] == [
        "    is tea⟦yes⟧go on⟦hot⟧",
        "replies 1, tool calls 0; the environment paid 1.5; cut off at max_new_tokens",
    ]
    assert trainer.asked == SimpleNamespace(rows=[{"prompt": "is tea"}], n=1, seed=7)


@pytest.mark.parametrize("ended", [None, torch.tensor([True])])
def test_a_dialogue_that_ended_was_not_cut_off(ended):
    shown = dialogue_text(OneDialogue(ended=ended, episodes={"replies": [1]}), {"prompt": ""}, 0)
    assert shown.splitlines()[-1] == "replies 1"
