"What a file of settings may say, and how it is read."

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small_trainer import TOKENIZER
from transformers import LlamaConfig

from instruct_goose.core.checks import Positive
from instruct_goose.data.files import BadRow
from instruct_goose.data.load import UnusedColumns
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.rendering import Renderer
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import PairDataset
from instruct_goose.objective.policy_loss import SURROGATES
from instruct_goose.recipes.inputs import (
    NOTHING,
    SAMPLE,
    OwnRun,
    as_yaml,
    at_most,
    load_module,
    memory_parts,
    memory_table,
    name_in_run,
    read_demos,
    read_preferences,
    read_prompts,
    readable,
    right_answer,
    settings_in,
    source_of,
    try_reward,
)
from instruct_goose.recipes.own_model import TrainConfig
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rewards import RewardError
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.supervised.dpo import pair_rows
from instruct_goose.supervised.sft import lm_rows


@dataclass(kw_only=True)
class Mine(OwnRun):
    lr: Positive = 1e-5
    weights: tuple[float, ...] | None = None


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    "text, says",
    [
        ("algorithm: GRPOO", "algorithm is 'GRPOO'.*'grpo'"),
        ("steps: 500\nlr: 1\nsteps: 1", "line 3: 'steps' stands in it twice"),
        ("batch-size: 8\nbatch_size: 4", "'batch_size' stands in it twice"),
        ("lr: 1\nsteps: 010", "line 2: steps is '010'"),
        ("steps: 1:30", "'1:30'"),
        ("steps: 1_000", "'1_000'"),
        ("resume: yes", "'yes'"),
        ("steps: 0o10", "'0o10'"),
        ("<<: {steps: 3}", "'<<'"),
        ("lr: '\u0661'", "lr is"),
        ("lr: 1 # old\u2028steps: 9", r"'\\u2028'"),
        (BOMB, "refers to another"),
        ("model: " + "[" * 10_000 + "]" * 10_000, "line 1: .*20 deep"),
        ("surrogate_settings: {x: 1, x: 2}", "twice"),
        (
            "num_generations: 4\nlearning_rate: 1\nsetps: 3",
            "'num_generations': here it is called group_size.*'learning_rate'.*lr.*'setps'.*steps",
        ),
        ("model: [" + "1, " * 5000 + "]", "model is"),
        ("lr: 1\n\tb: 2", "cannot start any token"),
        ("- 1", "no settings"),
        ("", "no settings"),
    ],
)
def test_a_file_is_refused_in_one_line(tmp_path, text, says):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"(?s)^--config .*run.yaml.*{says}") as e:
        settings_in(TrainConfig, tmp_path / "run.yaml")
    assert len(str(e.value)) < 700


def test_a_value_is_read_as_its_setting_asks(tmp_path):
    text = "model: 010\ndata: a.jsonl\nlr: 1e-5\nsave-every: 10\nweights: [1, .5, -2.5e+3]\nresume: false\noutput_dir: null\ndataset: ~\nprompt_column: 2001-01-01\nprogress: false\n"
    (tmp_path / "run.yaml").write_text(text)
    mine = Mine.read(tmp_path / "run.yaml")
    assert mine == Mine(
        model="010",
        data="a.jsonl",
        lr=1e-5,
        save_every=10,
        weights=(1, 0.5, -2500.0),
        prompt_column="2001-01-01",
        progress=False,
    )
    (tmp_path / "run.yaml").write_text(as_yaml(mine))
    assert Mine.read(tmp_path / "run.yaml") == mine


def test_a_plug_in_of_the_file_is_run_before_its_other_settings_are_read(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from instruct_goose.objective.policy_loss import SURROGATES\nSURROGATES['of_mine'] = SURROGATES['ratio']\n"
    )
    (tmp_path / "run.yaml").write_text(f"surrogate: of_mine\nplugin: {tmp_path / 'mine.py'}\n")
    try:
        assert settings_in(TrainConfig, tmp_path / "run.yaml")["surrogate"] == "of_mine"
    finally:
        SURROGATES.pop("of_mine", None)


def test_rows_come_from_a_file_or_a_data_set():
    for wrong in ({}, {"data": "a.jsonl", "dataset": "owner/name"}):
        with pytest.raises(ValueError, match="one of the two"):
            Mine(model="m", **wrong)
    assert Mine(model="m", dataset="owner/name").data is None
    assert source_of(Mine(model="m", data=Path("a.jsonl"))) == Path("a.jsonl")


def test_what_is_given_in_python_beats_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\ndata: a.jsonl\nlr: 1e-5\nseed: 3\n")
    mine = Mine.read(tmp_path / "run.yaml", lr=0.5)
    assert (mine.lr, mine.seed) == (0.5, 3)
    (tmp_path / "rl.yaml").write_text("algorithm: dapo\nmodel: m\ndata: a.jsonl\nlr: 1e-5\n")
    config = TrainConfig.read(tmp_path / "rl.yaml", lr=0.5)
    assert config == TrainConfig.preset("dapo", model="m", data=Path("a.jsonl"), lr=0.5)


def test_settings_are_written_in_the_order_of_their_class():
    "The model first, then the data: as the help lists them, and not by the alphabet."
    names = [line.partition(":")[0] for line in as_yaml(Mine(model="m", data="a")).splitlines()]
    assert names[:2] == ["model", "data"] and names[-1] == "lr"


@pytest.mark.parametrize("progress, name", [(True, "SFT"), (False, None)])
def test_a_bar_without_progress_has_no_name(progress, name):
    assert Mine(model="m", data="a", progress=progress).bar_name("SFT") == name


@pytest.mark.parametrize(
    "name, known, hint",
    [
        ("model_name_or_path", {"model", "lr"}, "model"),
        ("model_name_or_path", {"run_dir"}, "run_dir, the first word behind the command"),
        ("model_name_or_path", {"lr"}, "the models are the command's own"),
        ("train_file", {"data"}, "data"),
        ("train_file", {"lr"}, NOTHING),
        ("dataset_text_field", {"data"}, "data, with a column text"),
        ("use_vllm", {"lr", "data"}, NOTHING),
    ],
)
def test_a_hint_is_the_first_that_speaks_of_known_settings_alone(name, known, hint):
    assert name_in_run(name, known) == hint


def test_a_file_that_does_not_run_names_the_line_once(tmp_path, monkeypatch):
    "Of a file that is no Python, that line; the line which imports it is no fault."
    monkeypatch.chdir(tmp_path)
    Path("no_python.py").write_text("x = 1\ndef (:\n")
    Path("imports_it.py").write_text("import no_python\n")
    Path("falls.py").write_text("x = 1\nx / 0\n")
    for file, place in (
        ("imports_it.py", "no_python.py, line 2"),
        ("falls.py", "falls.py, line 2"),
    ):
        with pytest.raises(ValueError, match=f"^--reward: {file} does not run: ") as e:
            load_module(file, "--reward")
        assert str(e.value).endswith(f"{place})")
        assert str(e.value).count(", line ") == 1


# --- rows and chat templates


QUESTION = [{"role": "user", "content": "the film"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ 'tools ' + t['function']['name'] + ' ' }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'human' %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for c in m['tool_calls'] or [] %}{{ 'call ' + c['function']['name'] + ' ' }}{% endfor %}"
    "{{ (m['content'] or '') + ' <|im_end|> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


@pytest.fixture
def chat_tokenizer():
    _, tokenizer = tiny_smollm("the film was good bad weather call tools a sample answer".split())
    tokenizer.chat_template = WITH_TOOLS
    return tokenizer


def test_tools_of_a_row_reach_the_template_in_every_stage(chat_tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    good = [{"role": "assistant", "content": "was good"}]
    prompts = read_prompts([{"prompt": QUESTION, "tools": TOOLS}], chat_tokenizer)
    demos = read_demos([{"messages": QUESTION + answer, "tools": TOOLS}], chat_tokenizer)
    pairs = read_preferences(
        [{"prompt": QUESTION, "chosen": good, "rejected": answer, "tools": TOOLS}], chat_tokenizer
    )

    (asked,) = encode_rows(prompts, Tokens(chat_tokenizer, [], 0))
    (learnt,), (start,) = lm_rows(demos, chat_tokenizer)
    ((chosen, rejected),) = pair_rows(pairs, chat_tokenizer)

    assert chat_tokenizer.decode(asked).startswith("tools weather")
    assert learnt[:start] == chosen[0] == rejected[0] == asked
    assert "call weather" in chat_tokenizer.decode(learnt[start:])
    assert PairDataset(pairs, chat_tokenizer)[0]["chosen"] == chosen[0] + chosen[1]


@pytest.mark.parametrize("read", [read_prompts, read_demos, read_preferences])
def test_a_question_that_the_template_drops_is_refused_by_its_line(read, chat_tokenizer):
    answers = {"completion": "good", "chosen": "good", "rejected": "bad"}
    unknown = [{"role": "human", "content": "the film"}]
    rows = [{"prompt": QUESTION} | answers, {"prompt": unknown} | answers]
    with pytest.raises(BadRow, match="row 1: .*leaves out what turn 0 .human. says"):
        read(rows, chat_tokenizer)


def test_the_trial_asks_a_reward_model_as_the_run_does(chat_tokenizer):
    model, _ = tiny_smollm("the film was good bad weather call tools a sample answer".split())
    reward_model = RewardModel.from_causal_lm(model, chat_tokenizer).eval()
    torch.nn.init.normal_(reward_model.model.score.weight)
    renderer = Renderer(chat_tokenizer)
    row = renderer.row(QUESTION, SAMPLE)
    trial = try_reward([reward_model], [{"prompt": QUESTION}], chat_tokenizer)
    assert trial == pytest.approx(reward_model.score([row.prompt_ids + row.answer_ids]), abs=1e-5)


# --- columns


def test_a_named_column_is_taken_whatever_else_is_there(chat_tokenizer):
    names = {"prompt": "question", "answer": "solution"}
    row = {"prompt": "other", "question": "the film", "answer": "other", "solution": "good"}
    for order in (row, dict(reversed(row.items()))):
        with pytest.warns(UnusedColumns, match="not used: answer, prompt"):
            assert read_prompts([order], chat_tokenizer, names) == [
                {"prompt": "the film", "answer": "good"}
            ]
    talk = [*QUESTION, {"role": "assistant", "content": "bad"}]
    row = {"text": "whole", "completion": "other", "good": "was good", "messages": talk}
    with pytest.warns(UnusedColumns):
        demos = read_demos([row], chat_tokenizer, {"completion": "good"})
    assert demos == [{"prompt": "", "completion": "was good"}]
    with pytest.raises(BadRow, match="no 'completion'"):
        read_demos(
            [{"question": "the film", "messages": talk}], chat_tokenizer, {"prompt": "question"}
        )


def test_a_named_column_that_is_not_there_is_an_error(chat_tokenizer):
    rows = [{"prompt": "the film", "completion": "good", "chosen": "good", "rejected": "bad"}]
    for read in (read_prompts, read_demos, read_preferences):
        with pytest.raises(BadRow, match="no 'nonsense': there are 'prompt'"):
            read(rows, chat_tokenizer, {"prompt": "nonsense"})
        with pytest.raises(BadRow, match="expected an object with named columns"):
            read(["the film"], chat_tokenizer, {"prompt": "nonsense"})


def test_a_column_with_a_name_of_the_librarys_is_refused_before_the_run(chat_tokenizer):
    rows = [{"prompt": "the film", "completion_ids": "x"}]
    with pytest.raises(RewardError, match="a column 'completion_ids'.*rename the column"):
        read_prompts(rows, chat_tokenizer)


def test_columns_that_are_not_used_are_named_once(chat_tokenizer):
    more = {"source": "web", "image": None}
    demos = [{"prompt": "the film ", "completion": "was good"} | more] * 2
    pairs = [{"prompt": "the film ", "chosen": "good", "rejected": "bad"} | more] * 2
    for read, rows in ((read_demos, demos), (read_preferences, pairs)):
        with pytest.warns(UnusedColumns, match="^not used: image, source$") as warned:
            read(rows, chat_tokenizer)
        assert len(warned) == 1


@pytest.mark.parametrize("name", ["images", "audio", "history", "input", "context"])
@pytest.mark.filterwarnings("ignore::instruct_goose.data.load.UnusedColumns")
def test_a_column_without_which_a_row_means_something_else_is_refused(chat_tokenizer, name):
    row = {"prompt": "the film ", "completion": "good", "chosen": "good", "rejected": "bad"}
    for read in (read_prompts, read_demos, read_preferences):
        with pytest.raises(BadRow, match=f"row 0: {name} is 'x'.* put it into the prompt"):
            read([row | {name: "x"}], chat_tokenizer)
    read_prompts([row | {name: ""}], chat_tokenizer)
    assert read_prompts([row | {name: "x"}], chat_tokenizer, asked=[name])[0][name] == "x"
    assert read_demos([{"text": "the film", name: "x"}], chat_tokenizer)[0]["prompt"] == ""


def test_the_trial_asks_about_the_first_two_rows_and_then_their_right_answers():
    "Of three rows, the first of which has no answer."
    asked = []

    def grader(texts):
        asked.extend(texts)
        return [float(text.endswith(("w4", "w5"))) for text in texts]

    answers = ("", "w4", "w5")
    rows = [{"prompt": f"w{i}", "solution": answer} for i, answer in enumerate(answers)]
    assert try_reward([grader], rows, TOKENIZER, answers="solution") == [0.0, 0.0, 1.0]
    assert asked == [f"w0 {SAMPLE}", f"w1 {SAMPLE}", "w1 w4"]


def test_an_alarm_that_a_grader_swallows_is_named_before_the_run():
    "Under a timeout it runs outside the main thread; it would call every answer wrong."
    import signal

    def grader(texts):
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError:
            return [0.0] * len(texts)
        return [1.0] * len(texts)

    rows = [{"prompt": "what"}]
    assert try_reward([grader], rows, TOKENIZER) == [1.0]
    with pytest.raises(ValueError, match="SIGALRM.*leave reward_timeout out"):
        try_reward([grader], rows, TOKENIZER, seconds=30.0)


@pytest.mark.parametrize(
    "value, answer",
    [("yes", "yes"), (4, "4"), (0, "0"), (2.5, "2.5"), ("", None), (None, None), (True, None)],
)
def test_a_right_answer_is_a_text_or_a_number(value, answer):
    assert right_answer({"solution": value}, "solution") == answer
    assert right_answer({"solution": value}, "answer") is None
    assert right_answer({"solution": value}, None) is None


# --- memory: two blocks counted by hand

# embedding and head 10·8 each; of a block q, o 8·8, k, v 8·4, three of the MLP 8·12, two norms of 8
HEAD = 80
BLOCK_MATRICES = 64 + 32 + 32 + 64 + 3 * 96
WEIGHTS = HEAD + 2 * (BLOCK_MATRICES + 16) + 8 + HEAD
ROWS_AND_COLUMNS = 2 * (16 + 12 + 12 + 16 + 3 * 20)  # of all matrices: what one rank of LoRA has
A_TOKEN = (
    34 * 8 * 2
)  # bytes of activations in a block: 34·hidden in half precision, twice in float32


def small_shape(**changes):
    return LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **changes,
    )


def parts_of(config=None, response=4, **changes):
    "Three rows of 5 + 4 tokens are sampled at once, and two of them are in a backward pass."
    return memory_parts(config or small_shape(), 3, 2, 5, response, **changes)


def test_memory_of_full_training():
    assert parts_of(value_copy=True) == {
        "weights": 4 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "AdamW's two moments": 8 * WEIGHTS,
        "reference": 4 * WEIGHTS,
        "value function": 16 * WEIGHTS,  # weights, gradients and two moments again
        "cache while sampling": 2 * 2 * 4 * 4 * (3 * 9),  # k and v, blocks, numbers, bytes, tokens
        "activations, about": 2 * A_TOKEN * (2 * 9),
        "scores, about": 2 * 4 * 10 * (2 * 4),  # and their gradients; of the response alone
    }
    plain = parts_of(reference=False)
    assert "reference" not in plain and "value function" not in plain


def test_memory_of_supervised_training_has_nothing_of_sampling():
    parts = parts_of(response=0)
    assert "cache while sampling" not in parts and "scores, about" not in parts
    assert parts["activations, about"] == 2 * A_TOKEN * (2 * 5)


def test_memory_of_adapters():
    "Frozen weights as they are stored, adapters in float32, and no second model as a reference."
    learnt = 4 * 3 * ROWS_AND_COLUMNS
    parts = parts_of(small_shape(dtype="bfloat16"), lora_rank=3)
    assert parts["weights"] == 2 * WEIGHTS + learnt
    assert parts["gradients"] == learnt
    assert parts["AdamW's two moments"] == 2 * learnt
    assert "reference" not in parts
    assert parts["activations, about"] == A_TOKEN * (2 * 9)  # two blocks, half the bytes
    in_four_bits = parts_of(small_shape(dtype="bfloat16"), lora_rank=3, four_bits=True)
    others = WEIGHTS - 2 * BLOCK_MATRICES
    bits = 4.127 * 2 * BLOCK_MATRICES
    assert in_four_bits["weights"] == 2 * others + round(bits / 8) + learnt


def test_what_makes_memory_smaller_and_what_larger():
    kept = parts_of(checkpointing=True)["activations, about"]
    assert kept == (2 * 8 * 4 + A_TOKEN) * (2 * 9)  # each block's input, and one block whole
    eager = parts_of(small_shape(attn_implementation="eager"))["activations, about"]
    assert eager == 2 * (A_TOKEN + 5 * 2 * 9 * 2) * (2 * 9)  # 5·heads·length, twice in float32
    assert parts_of(tile=100)["scores, about"] == 200


def test_the_highest_point_is_while_sampling_or_in_the_update():
    parts = {
        "weights": 1_000,
        "cache while sampling": 70,
        "activations, about": 40,
        "scores, about": 50,
    }
    assert at_most(parts) == 1_090
    assert at_most(parts | {"cache while sampling": 95}) == 1_095
    assert at_most({"weights": 1_000}) == 1_000
    *_, last = memory_table(parts).splitlines()
    assert [cell.strip() for cell in last.strip("|").split("|")] == [
        "at the highest point",
        "1.1 kB",
    ]


@pytest.mark.parametrize(
    "n, text",
    [(999, "999 B"), (1_000, "1.0 kB"), (2_540_000, "2.5 MB"), (10**9, "1.0 GB")],
)
def test_bytes_are_written_in_the_largest_unit_that_they_fill(n, text):
    assert readable(n) == text
