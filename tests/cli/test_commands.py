"""The commands that read a finished run: sample, chat, merge, on models small enough to
write what is known; and flags, exit statuses and messages of the command line, one function at a
time."""

import io
import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from instruct_goose import exercises
from instruct_goose.cli import commands
from instruct_goose.cli import main as cli
from instruct_goose.cli.commands import (
    FOUND,
    ChatConfig,
    ConformConfig,
    DoctorConfig,
    ExercisesConfig,
    MergeConfig,
    ProbeConfig,
    SampleConfig,
    Writing,
    check_words,
    new_conversations,
    next_line,
    padding_tokenizer,
    responses_of,
    run_conform,
    run_doctor,
    run_exercises,
    run_ladder,
    run_merge,
    stops_of,
    stream_answer,
    template_arguments,
)
from instruct_goose.cli.main import (
    COMMANDS,
    Command,
    Flag,
    ImpossibleSettings,
    as_flags,
    flag_table,
    flag_type,
    flags,
    foreign,
    in_a_sentence,
    in_a_shell,
    main,
    may_be_missing,
    refuse_foreign,
    require_places,
    run_plugins,
    settings_of_command,
    stored_flag,
    unknown_flags,
    values_of,
    with_defaults,
    with_flags,
)
from instruct_goose.core.checks import OneOf
from instruct_goose.doctor.rules import Finding
from instruct_goose.models.loading import load_model, tiny_smollm
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.tasks.probes import EXCLUDED, ProbeResult

WORDS = word_tokenizer(
    "is tea hot yes no ask: you:".split(), 48, pad="<end>", bos="<end>", eos="<end>"
)
WORDS.chat_template = "{% for m in messages %}{{ 'ask: ' if m.role == 'user' else 'you: ' }}{{ m.content }} {% endfor %}{% if add_generation_prompt %}you:{% endif %}"


def refused(*args):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, args)))
    assert isinstance(stop.value.code, str), stop.value.code
    return stop.value.code


def test_an_exercise_is_shown_with_its_hint_or_its_answer(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("INSTRUCT_GOOSE_PROGRESS", str(tmp_path / "exercises.json"))

    def printed(*flags):
        main(["exercises", *flags])
        return capsys.readouterr().out.strip()

    exercise = "kl.k3"
    assert printed(exercise) == exercises.show(exercise).strip()
    first = printed(exercise, "--hint")
    assert "Hint 1 of 2" in first and "Hint 2 of 2" not in first
    assert "Hint 2 of 2" in printed(exercise, "--hint")
    assert printed(exercise, "--solution") == exercises.solution(exercise).strip()
    assert exercise in printed() and exercise in printed("kl")
    assert "masks." in printed() and "masks." not in printed("kl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "A plain model, and runs that are adapters on it: RL, SFT, and RL behind SFT."
    pytest.importorskip("peft")
    here = tmp_path_factory.mktemp("commands")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=48,
            bos_token_id=WORDS.bos_token_id,
            eos_token_id=WORDS.eos_token_id,
        )
    ).save_pretrained(here / "plain")
    WORDS.save_pretrained(here / "plain")
    (here / "rows.jsonl").write_text('{"prompt": "is tea", "completion": " hot"}\n' * 4)
    (here / "reward.py").write_text("def score(texts): return [float(len(t)) for t in texts]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        shared = [
            "--model",
            "plain",
            "--data",
            "rows.jsonl",
            "--lora-rank",
            "2",
            "--steps",
            "2",
            "--lr",
            ".05",
            "--batch-size",
            "4",
            "--no-progress",
        ]
        main(
            [
                "train",
                *shared,
                "--reward",
                "reward.py:score",
                "--max-new-tokens",
                "3",
                "--minibatches",
                "1",
                "--output-dir",
                "rl",
            ]
        )
        main(["sft", *shared, "--output-dir", "sft"])
    return here


@pytest.mark.parametrize(
    "source, columns",
    [
        ("rl", ["before", "policy"]),
        ("sft", ["before", "sft model"]),
        ("plain", ["model"]),
        ("rl/policy", ["model"]),
    ],
)
def test_sample_reads_adapters_stages_and_plain_models(runs, monkeypatch, capsys, source, columns):
    monkeypatch.chdir(runs)
    main(["sample", source, "is tea", "--n", "2", "--max-new-tokens", "4"])
    header, _, *rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("|")
    ]
    assert [x.strip().lower() for x in header.strip("|").split("|")] == [
        "prompt",
        *columns,
    ] and len(rows) == 2
    main(["sample", source, "is tea", "--n", "1", "--max-new-tokens", "4", "--chat"])


def test_sample_writes_n_of_each_prompt_and_its_seed_decides(runs, monkeypatch):
    monkeypatch.chdir(runs)

    def sampled(**settings):
        prompts = ("is tea", "hot")
        config = commands.SampleConfig(
            Path("plain"), prompts, n=3, **{"max_new_tokens": 6} | settings
        )
        rows = commands.run_sample(config)
        assert [row["prompt"] for row in rows] == ["is tea"] * 3 + ["hot"] * 3
        assert all(row["model"].startswith(row["prompt"]) for row in rows)
        return [row["model"] for row in rows]

    drawn = sampled(seed=1)
    assert drawn == sampled(seed=1) != sampled(seed=2)
    assert len(set(drawn[:3])) > 1
    likeliest = sampled(top_k=1, seed=1)
    assert likeliest == sampled(top_k=1, seed=2) == sampled(temperature=1e-9, seed=3)
    assert len(set(likeliest)) == 2  # one text of each prompt
    assert all(len(text.split()) <= 4 for text in sampled(max_new_tokens=2))


def test_sample_without_a_prompt_begins_a_text(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    rows = commands.run_sample(commands.SampleConfig(Path("plain"), n=2, max_new_tokens=3))
    assert [row["prompt"] for row in rows] == ["", ""]
    assert capsys.readouterr().out.count("(nothing)") == 2


def test_a_chat_has_the_seed_the_models_and_the_first_message_that_were_asked_for(
    runs, monkeypatch, capsys
):
    monkeypatch.chdir(runs)

    def talk(**settings):
        monkeypatch.setattr("sys.stdin", io.StringIO("is tea hot\n"))
        config = commands.ChatConfig(Path("rl"), max_new_tokens=6, **settings)
        return commands.run_chat(config)

    drawn = talk(seed=1)
    assert drawn == talk(seed=1) != talk(seed=2)
    assert talk(seed=1, top_k=1) == talk(seed=2, top_k=1) == talk(seed=3, temperature=1e-9)
    assert list(talk(before=False)) == ["policy"]
    for messages in talk(system="yes").values():
        assert messages[0] == {"role": "system", "content": "yes"}
        assert [message["role"] for message in messages[1:]] == ["user", "assistant"]


def test_a_run_stops_at_its_own_ends_and_those_of_its_model(runs, tmp_path):
    model = load_model(str(runs / "plain"))
    end, other = WORDS.eos_token_id, WORDS.convert_tokens_to_ids("no")
    assert commands.stops_of(tmp_path, model, WORDS) == ([end], None)
    settings = {"stop_token_ids": [other, end], "stop_strings": ["yes"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ids, strings = commands.stops_of(tmp_path, model, WORDS)
    assert ids == [end, other]
    assert list(strings.texts) == ["yes"]


def test_merge_writes_the_model_that_the_run_is(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    main(["merge", "rl", "merged"])
    merged = AutoModelForCausalLM.from_pretrained("merged")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        merged(ids).logits, load_model("rl")(ids).logits, atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(merged(ids).logits, load_model("plain")(ids).logits, atol=1e-3)
    assert "is there already" in refused("merge", "rl", "merged")
    main(
        [
            "train",
            "--model",
            "merged",
            "--data",
            "rows.jsonl",
            "--reward",
            "reward.py:score",
            "--dry-run",
        ]
    )
    assert "load_model(path)" in Path("rl/policy/README.md").read_text()


def test_chat_goes_on_with_what_was_said(runs, monkeypatch, capsys):
    "Two models beside each other, each with its own answers in its conversation; what was sent is the template's text."
    from instruct_goose.cli import commands

    monkeypatch.chdir(runs)
    monkeypatch.setattr("sys.stdin", io.StringIO("is tea\nhot\n\n"))
    talks = commands.run_chat(commands.ChatConfig(Path("rl"), max_new_tokens=3))
    out = capsys.readouterr().out
    assert (
        list(talks) == ["before", "policy"] and out.count("before: ") == out.count("policy: ") == 2
    )
    for talk in talks.values():
        assert [m["role"] for m in talk] == ["user", "assistant"] * 2 and [
            m["content"] for m in talk[::2]
        ] == ["is tea", "hot"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hot\n"))
    assert list(commands.run_chat(commands.ChatConfig(Path("rl/policy"), max_new_tokens=3))) == [
        "model"
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("is tea hot " * 20))
    assert "tokens" in refused("chat", "rl", "--max-new-tokens", 3)


def test_a_directory_without_a_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": "gone"}))
    for command in (
        ["sample", tmp_path],
        ["chat", tmp_path],
        ["merge", tmp_path, tmp_path / "out"],
    ):
        assert str(tmp_path) in refused(*command)


def test_a_word_that_byte_pairs_spell_is_known():
    "SmolLM2's tokenizer has an unknown token that it never gives."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from instruct_goose.cli.commands import check_words

    raw = Tokenizer(
        models.BPE(
            {"<unk>": 0}
            | {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)},
            [],
        )
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    check_words(["Name a tree."], PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    with pytest.raises(ValueError, match="'tree.'"):
        check_words(["a tree."], tiny_smollm(["a"])[1])


def test_new_begins_another_conversation(monkeypatch, capsys, tmp_path):
    lines = iter(["one", "/new", "two", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(commands, "load_models", lambda _: {"policy": (None, None)})
    monkeypatch.setattr(commands, "stream_answer", lambda *_: "an answer")
    said = commands.run_chat(commands.ChatConfig(tmp_path, system="be brief"))["policy"]
    assert [turn["content"] for turn in said] == ["be brief", "two", "an answer"]


# --- conform ----------------------------------------------------------------------------------------------------------
LOSSES = """
import torch
from instruct_goose.objective.policy_loss import SURROGATES, Surrogate


def clipped(p, q, advantages, mask, eps=0.2):
    ratio = (p - q).exp()
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return (per_token * mask).sum() / mask.sum()


def turned(p, q, advantages, mask):
    return -clipped(p, q, advantages, mask)
"""
PLUGIN = """
from instruct_goose.objective.policy_loss import SURROGATES, Surrogate

SURROGATES["plain_ratio"] = Surrogate(lambda x: x.ratio * x.advantages)
SURROGATES["squared_ratio"] = Surrogate(lambda x: x.ratio.square() * x.advantages)
"""


@pytest.fixture
def losses(tmp_path, monkeypatch):
    "A directory with a file of losses and a plug-in."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    surrogates = dict(commands.SURROGATES)
    yield tmp_path
    commands.SURROGATES.clear()
    commands.SURROGATES.update(surrogates)


def test_conform_names_the_libraries_of_a_loss(losses, capsys):
    main(["conform", "losses.py:clipped", "--names", "p=logprobs", "q=old_logprobs"])
    assert "It is the loss of" in (text := capsys.readouterr().out)
    assert "torchtune 0.6.1" in text and "ρ in [0.8, 1.2]" in text


def test_conform_ends_with_status_3_for_a_wrong_loss(losses, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["conform", "losses.py:turned", "--names", "p=logprobs", "q=old_logprobs", "--json"])
    assert stop.value.code == 3
    (found,) = json.loads(capsys.readouterr().out)
    assert found["conforms"] is False
    assert found["departure"]["what"].startswith("The sign is turned")


def test_conform_reads_the_surrogates_of_a_plug_in(losses, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["conform", "plugin.py"])
    assert stop.value.code == 3  # for the second one
    plain, squared = capsys.readouterr().out.split("\n\n")
    assert "surrogate plain_ratio" in plain and "the ratio: −ρ·Â" in plain
    assert "instruct_goose (opo, max_rl)" in plain
    assert "surrogate squared_ratio" in squared and "It is the loss of" not in squared


def test_conform_refuses_a_pair_without_a_meaning(losses, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["conform", "losses.py:clipped", "--names", "p"])
    assert stop.value.code == 2
    assert "pairs such as lp=logprobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["losses.py"], "clipped, turned"),
        (["losses.py:none"], "clipped, turned"),
        (["losses.py:clipped"], "--names p=…"),
        (["missing.py:clipped"], "no file missing.py here"),
    ],
)
def test_conform_refuses_what_is_no_loss(losses, words, said):
    assert said in refused("conform", *words)


# --- flags


KINDS = Annotated[str, OneOf({"a": 1, "b": 2})]


@pytest.mark.parametrize(
    "hint, made",
    [
        (int, int),
        (KINDS, Literal["a", "b"]),
        (KINDS | None, Literal["a", "b"] | None),
        (int | None, int | None),
        (Annotated[int, "no table"], Annotated[int, "no table"]),
    ],
)
def test_names_of_a_table_are_choices(hint, made):
    assert flag_type(hint) == made


@pytest.mark.parametrize(
    "stored, hint, default",
    [
        ({"type": "int", "default": 3}, int, 3),
        ({"type": "float"}, float, MISSING),
        ({"type": "bool", "default": False}, bool, False),
        ({"type": "str", "default": None, "or_none": True}, str | None, None),
        ({"type": "str", "default": ["a", "b"], "many": True}, tuple[str, ...], ("a", "b")),
        ({"type": "path", "default": "runs"}, Path, Path("runs")),
        ({"type": "path", "default": None, "or_none": True}, Path | None, None),
        ({"type": "str", "default": "runs"}, str, "runs"),
        ({"type": "choices", "choices": ["a", "b"], "default": "a"}, Literal["a", "b"], "a"),
        ({"type": "numbers", "default": {"a": 1.0}}, dict[str, float], {"a": 1.0}),
    ],
)
def test_a_flag_of_the_table_has_a_type_and_a_default(stored, hint, default):
    assert stored_flag(stored) == Flag(hint, default, None)
    assert stored_flag(stored | {"help": "about it"}).help == "about it"


def test_flags_become_a_class_with_defaults():
    made = with_flags(
        "train", "About.", {"lr": Flag(float, 0.5, "rate"), "n": Flag(int, MISSING, None)}
    )
    assert made.__doc__ == "About." and made(n=3).lr == 0.5
    assert [x.name for x in fields(made)] == ["lr", "n"]
    with pytest.raises(TypeError):
        made()
    assert may_be_missing(Flag(int, MISSING, "x")) == Flag(int | None, None, "x")
    assert may_be_missing(Flag(int, 3, "x")) == Flag(int, 3, "x")


@pytest.mark.parametrize(
    "words, values",
    [
        ("--x 1", ["1"]),
        ("--x 1 2 --y 3", ["1", "2"]),
        ("--x=1 2", ["1"]),
        ("--x 1 --x 2", ["2"]),  # the last one counts
        ("--x 1 --x=2", ["2"]),
        ("--x", []),
        ("--x --y 1", []),
        ("--xx 1", []),
        ("--y 1", []),
        ("", []),
        ("train a --x -1", ["-1"]),
    ],
)
def test_the_values_of_a_flag_are_the_words_behind_it(words, values):
    assert values_of("--x", words.split()) == values


@pytest.mark.parametrize(
    "words, unknown",
    [
        ("train --lr 1 --batch-size=2", []),
        ("--no-progress --progress", []),
        ("--nolr", ["--nolr"]),
        ("--no-other", ["--no-other"]),
        ("--help", []),
        ("--other=1 value --lr 2 --more", ["--other=1", "--more"]),
        ("-x other", []),
    ],
)
def test_words_that_look_like_flags_and_are_none(words, unknown):
    assert unknown_flags(words.split(), ["lr", "batch_size", "progress"]) == unknown


COMMAND = {
    "flags": [
        {"name": "lr", "type": "float"},
        {"name": "reward", "type": "str", "many": True},
        {"name": "reward_weights", "type": "numbers"},
    ],
    "foreign": {"learning_rate": "lr", "lr": "other"},
    "not_taken": {"lora_rank": "it learns with all its weights"},
}


@pytest.mark.parametrize(
    "words, says",
    [
        ("--lora-rank 3", "there is no --lora-rank here: it learns with all its weights"),
        ("--lora-rank=3", "there is no --lora-rank here"),
        ("--reward a --reward b", "--reward is there twice, .*: write --reward ONE TWO"),
        ("--reward-weights a=1 --reward-weights=b", "--reward-weights is there twice"),
        ("--learning-rate 1", "there is no setting 'learning_rate': here it is called --lr"),
    ],
)
def test_a_flag_that_the_command_cannot_use_is_refused(words, says):
    with pytest.raises(ValueError, match=says):
        refuse_foreign(words.split(), COMMAND)


@pytest.mark.parametrize("words", ["", "--lr 1 --lr 2", "--reward a b", "learning_rate --other 1"])
def test_other_words_are_left_to_the_parser(words):
    refuse_foreign(words.split(), COMMAND)


@pytest.mark.parametrize(
    "text, written",
    [
        ("here autocast='bfloat16'", "here --autocast bfloat16"),
        ("group_size='4' and x_y=''", "--group-size 4 and --x-y "),
        ("here it is called value_lr; called lr", "here it is called --value-lr; called --lr"),
        ("nothing", "nothing"),
    ],
)
def test_settings_are_written_as_flags(text, written):
    assert as_flags(text) == written


@pytest.mark.parametrize(
    "text, written",
    [
        ("columns={'prompt': 'promt'}", "--prompt-column promt"),
        ("columns={'completion': 'two words'}", "--answer-column 'two words'"),
        ("columns={'prompt': '…'}", "--prompt-column NAME"),
        ("columns={'chosen': 'good'}", "rename it to chosen"),  # a command without that flag
        (
            "resume=True or bad_rows='skip' or long_rows='cut'",
            "--resume or --bad-rows skip or --long-rows cut",
        ),
        ("datasets.load_dataset('a/b', split='train')", "--dataset a/b"),
        ("datasets.load_dataset(name, split='train')", "--dataset NAME"),
        ("nothing", "nothing"),
    ],
)
def test_what_a_message_says_in_python_is_a_flag_in_a_shell(text, written):
    assert in_a_shell(text, ["prompt_column", "answer_column"]) == written


def test_a_files_settings_are_defaults_and_what_the_command_refuses_is_named():
    known = {"lr": Flag(float, 1.0, "rate"), "n": Flag(int, 1, None)}
    changed = with_defaults(known, {"lr": 2.0}, COMMAND)
    assert changed == {"lr": Flag(float, 2.0, "rate")}
    with pytest.raises(ValueError, match="--config: leave out lora_rank: it learns with all"):
        with_defaults(known, {"lora_rank": 3}, COMMAND)


def default_of(kind, name):
    return {x.name: x.default for x in fields(kind)}[name]


def test_the_algorithm_of_the_words_or_of_the_file_gives_its_preset(tmp_path):
    preset = flag_table()["presets"]["grpo"]
    assert preset["group_size"] > 1
    file = tmp_path / "settings.yaml"
    file.write_text("algorithm: grpo\nlr: 0.125\n")
    for words in (["--algorithm", "grpo"], ["--config", str(file)]):
        made = flags("train", ["train", *words])
        assert default_of(made, "algorithm") == "grpo"
        assert default_of(made, "group_size") == preset["group_size"]
    assert default_of(made, "lr") == 0.125
    both = flags("train", ["train", "--config", str(file), "--algorithm", "ppo"])
    assert default_of(both, "group_size") == 1 and default_of(both, "lr") == 0.125
    plain = flags("train", ["train"])
    assert default_of(plain, "group_size") == 1 and default_of(plain, "model") is MISSING
    unknown = flags("train", ["train", "--config", str(file), "--nonsense"])
    assert default_of(unknown, "model") is None  # the parser is to name the unknown flag


@pytest.mark.parametrize(
    "words, names", [([], False), (["nonsense"], False), (["train", "--lr", "1"], True)]
)
def test_the_settings_of_the_command_that_is_called(words, names):
    assert ("lr" in settings_of_command(words)) == names


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_settings_with_its_first_line(name):
    kind, run = COMMANDS[name].load()
    assert kind.__doc__.splitlines()[0] == COMMANDS[name].about and callable(run)
    assert {*COMMANDS[name].reads} <= {x.name for x in fields(kind)}


def test_what_a_command_reads_must_be_there():
    asked = []
    command = Command("about", lambda: (int, print), {"a": asked.append, "b": asked.append})
    require_places(command, SimpleNamespace(a=Path("x"), b=("y", "z"), c="other"))
    require_places(command, SimpleNamespace(a=None, b=()))
    assert asked == ["x", "y", "z"]


@pytest.mark.parametrize(
    "words, is_refused",
    [
        (["--resume"], True),
        (["--resume", "--plugin", "b.py"], True),
        (["--resume", "--config", "x.yaml"], False),
        ([], False),
    ],
)
def test_a_run_goes_on_with_the_plug_ins_that_it_had(words, is_refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a b.py").write_text("")
    Path("b.py").write_text("")
    Path("out").mkdir()
    Path("out/config.json").write_text('{"plugin": ["a b.py"]}')
    argv = [*words, "--output-dir", "out"]
    if is_refused:
        with pytest.raises(ValueError, match="run in out was made with plug-ins: .*'a b.py' again"):
            run_plugins(argv)
        run_plugins([*argv, "--plugin", "a b.py"])
    else:
        run_plugins(argv)
    Path("out/config.json").write_text('{"plugin": null}')
    run_plugins(argv)


def test_plug_ins_are_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_of_a_test.py").write_text("open('ran', 'w').close()")
    run_plugins(["--plugin", "mine_of_a_test.py"])
    assert Path("ran").exists()


def test_a_plug_in_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="--plugin"):
        run_plugins(["--plugin", "nowhere.py"])


# --- errors and exit statuses


def raised(work):
    try:
        work()
    except BaseException as e:
        return e


def fails():
    raise KeyError("mine")


def test_an_error_of_a_users_code_has_its_place_and_one_of_the_package_has_none():
    own = raised(fails)
    assert foreign(own).name == "fails"
    assert foreign(raised(lambda: flag_table()["nonsense"])).filename == __file__
    assert foreign(raised(lambda: run_plugins(["--plugin", "nowhere.py"]))) is None
    assert foreign(raised(lambda: Path("/no/such/file").read_text())).filename == __file__
    assert foreign(ValueError("never raised")) is None


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("a"), "a"),
        (ValueError("a: b"), "a: b"),
        (OSError("a"), "a"),
        (ImportError("a"), "a"),
        (ImpossibleSettings("a"), "a"),
        (ValueError("resume=True"), "--resume"),
        (ValueError("x" * 1501), "x" * 1500),
        (
            KeyError("a"),
            "KeyError: 'a'\nFor the traceback: INSTRUCT_GOOSE_TRACEBACK=1 before the command",
        ),
        (
            TypeError("a"),
            "TypeError: a\nFor the traceback: INSTRUCT_GOOSE_TRACEBACK=1 before the command",
        ),
    ],
)
def test_an_error_is_a_sentence(error, text):
    assert in_a_sentence(error) == text


def test_an_error_of_a_users_code_keeps_its_class_and_has_a_line():
    said = in_a_sentence(raised(fails))
    line = fails.__code__.co_firstlineno + 1
    assert said.startswith(f"KeyError: 'mine' ({__file__}, line {line})\nFor the traceback")


@pytest.mark.parametrize(
    "error, status",
    [
        (KeyboardInterrupt(), 130),
        (ImpossibleSettings("a"), 2),
        (SystemExit(3), f"instruct-goose: SystemExit: 3 ({__file__}, line"),  # of a user's code
        (ValueError("a"), f"instruct-goose: ValueError: a ({__file__}, line"),
    ],
)
def test_every_end_has_its_exit_status(error, status, monkeypatch):
    def run_command(argv):
        assert argv == ["train"]
        raise error

    monkeypatch.setattr(cli, "run_command", run_command)
    with pytest.raises(SystemExit) as stop:
        main(["train"])
    if isinstance(status, int):
        assert stop.value.code == status
    else:
        assert stop.value.code.startswith(status)


def test_a_signal_has_its_own_status_and_a_traceback_is_shown_where_it_is_asked_for(monkeypatch):
    stopped = KeyboardInterrupt()
    stopped.signum = 15

    def run_command(argv):
        raise error

    monkeypatch.setattr(cli, "run_command", run_command)
    error = stopped
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 143
    error = KeyError("a")
    monkeypatch.setenv("INSTRUCT_GOOSE_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main([])


def test_the_words_of_the_shell_are_taken_where_none_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["instruct-goose", "--version"])
    main()
    assert capsys.readouterr().out.startswith("instruct-goose ")


# --- the commands


@pytest.mark.parametrize(
    "flag, called",
    [
        ({}, ("table", None, False)),
        ({"still_open": True}, ("table", None, True)),
        ({"name": "kl", "hint": True}, ("table", "kl", False)),
        ({"name": "kl.k3"}, ("show", "kl.k3")),
        ({"name": "kl.k3", "hint": True}, ("hint", "kl.k3")),
        ({"name": "kl.k3", "solution": True}, ("solution", "kl.k3")),
        ({"name": "kl.k3", "solution": True, "hint": True}, ("hint", "kl.k3")),
    ],
)
def test_exercises_are_listed_shown_hinted_at_or_solved(flag, called, monkeypatch, capsys):
    for name in ("table", "show", "hint", "solution"):
        monkeypatch.setattr(exercises, name, lambda *args, name=name: (name, *args))
    run_exercises(ExercisesConfig(**flag))
    assert capsys.readouterr().out == f"{called}\n"


def finding(severity):
    return Finding("KL sign", severity, "what", "evidence", "lesson", "cure")


@pytest.mark.parametrize(
    "severities, strict, is_found",
    [
        ([], False, False),
        ([], True, False),
        (["warning"], False, False),
        (["warning"], True, True),
        (["error"], False, True),
        (["warning", "error"], False, True),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctors_status_says_whether_there_is_an_error(
    severities, strict, is_found, as_json, monkeypatch, capsys
):
    findings = [finding(severity) for severity in severities]
    monkeypatch.setattr(
        commands, "examine", lambda place: SimpleNamespace(findings=findings, text=f"of {place}")
    )
    config = DoctorConfig(Path("run"), as_json, strict)
    if is_found:
        with pytest.raises(SystemExit) as stop:
            run_doctor(config)
        assert stop.value.code == FOUND
    else:
        assert run_doctor(config) == findings
    out = capsys.readouterr().out
    assert out.count('"severity"') == (len(severities) if as_json else 0)
    assert (out == "of run\n") != as_json


def result(name, passed, seconds=1.4):
    return ProbeResult(name, passed, {}, seconds, "there")


@pytest.mark.parametrize(
    "passed, says, excludes, status",
    [
        ([True, True], "2 of 2 passed in 3 s\n", False, None),
        ([True, False], "1 of 2 passed in 3 s; begin with kl\n", True, 1),
        ([False, False], "0 of 2 passed in 3 s; begin with value_head\n", False, 1),
        ([True, None], "1 of 2 passed, 1 skipped, in 3 s\n", False, None),
        ([None, None], "0 of 2 passed, 2 skipped, in 3 s\n", False, 1),
        ([None, False], "0 of 2 passed, 1 skipped, in 3 s; begin with kl\n", False, 1),
    ],
)
def test_the_ladder_says_what_passed_and_where_to_begin(
    passed, says, excludes, status, monkeypatch, capsys
):
    results = [result("value_head", passed[0]), result("kl", passed[1])]
    asked = []

    def run_probes(make_trainer, names, *, own, seed, on_result):
        asked.append((make_trainer, names, own, seed))
        on_result("a line")
        return results

    monkeypatch.setattr(commands, "run_probes", run_probes)
    config = ProbeConfig(("value_head", "kl"), None, 7)
    if status is None:
        assert run_ladder(config) == results
    else:
        with pytest.raises(SystemExit) as stop:
            run_ladder(config)
        assert stop.value.code == status
    out = capsys.readouterr().out
    assert f"a line\n\n{says}" in out and ("What passed excludes: " in out) == excludes
    assert asked == [(None, ["value_head", "kl"], None, 7)]
    if excludes:
        assert out.endswith(f"What passed excludes: {EXCLUDED['value_head']}\n")


def test_the_ladder_takes_all_probes_or_one_run(monkeypatch, tmp_path):
    asked = []

    def run_probes(make_trainer, names, **options):
        asked.append(names)
        return [result("kl", True)]

    monkeypatch.setattr(commands, "run_probes", run_probes)
    run_ladder(ProbeConfig())
    assert asked == [None]
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="2 run directories: probe one at a time"):
        run_ladder(ProbeConfig((str(tmp_path / "a"), str(tmp_path / "b"))))


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("conforms", [[True, True], [True, False]])
def test_a_loss_is_compared_with_the_settings_that_are_given(
    as_json, conforms, monkeypatch, capsys, unchecked
):
    asked = []
    losses = {"one": len, "two": max}
    monkeypatch.setattr(commands, "losses_of", lambda place: losses)

    class Found:
        def __init__(self, does):
            self.conforms = does

        def as_dict(self):
            return {"conforms": self.conforms}

        def __str__(self):
            return "found"

    def conform(loss, **options):
        asked.append((loss, options))
        return Found(conforms[len(asked) - 1])

    monkeypatch.setattr(commands, "conform", conform)
    config = ConformConfig("x.py", "TRL", ("lp=a=b", "m=mask"), clip=0.1, beta=0.0, json=as_json)
    if all(conforms):
        with unchecked():
            assert len(run_conform(config)) == 2
    else:
        with pytest.raises(SystemExit) as stop:
            run_conform(config)
        assert stop.value.code == FOUND
    shared = {
        "like": "TRL",
        "names": {"lp": "a=b", "m": "mask"},
        "settings": {"clip": 0.1, "beta": 0.0},
    }
    assert asked == [(loss, shared | {"label": label}) for label, loss in losses.items()]
    out = capsys.readouterr().out
    assert (out == "found\n\nfound\n") != as_json and out.count("conforms") == 2 * as_json


def test_adapters_are_merged_with_the_base_that_is_named(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(commands, "save_merged", lambda *args: asked.append(args))
    run_merge(MergeConfig(Path("run"), Path("out"), Path("base")))
    assert asked == [(Path("run"), Path("out"), Path("base"))]
    assert capsys.readouterr().out.startswith("out holds a model")


@pytest.mark.parametrize("text, n", [(None, 0), ('{"a": 1}', 0), ("[]", 1), ("a", 1)])
def test_arguments_of_the_template_are_an_object(text, n):
    assert len([*Writing.conflicts(SimpleNamespace(template_kwargs=text))]) == n


@pytest.mark.parametrize("names, n", [((), 0), (("a=b",), 0), (("a=b", "c"), 1)])
def test_names_of_parameters_are_pairs(names, n):
    assert len([*ConformConfig.conflicts(SimpleNamespace(names=names))]) == n


# --- writing with a model


@pytest.fixture
def model_and_tokenizer():
    return tiny_smollm(["a", "b", "c"])


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_or_its_first_token(tmp_path):
    tokenizer = word_tokenizer(["a"])
    for name, pad, eos in (
        ("own", "<pad>", "<eos>"),
        ("end", None, "<eos>"),
        ("first", None, None),
    ):
        tokenizer.pad_token, tokenizer.eos_token = pad, eos
        tokenizer.save_pretrained(tmp_path / name)
        found = padding_tokenizer(str(tmp_path / name)).pad_token
        assert found == (pad or eos or tokenizer.convert_ids_to_tokens(0))


@pytest.mark.parametrize(
    "given, of_run, arguments",
    [
        (None, None, {}),
        (None, '{"a": 1}', {"a": 1}),
        ('{"b": 2}', '{"a": 1}', {"b": 2}),
        ('{"b": 2}', None, {"b": 2}),
    ],
)
def test_arguments_of_the_template_are_given_or_the_runs(given, of_run, arguments, tmp_path):
    assert template_arguments(tmp_path, given) == ({} if given is None else {"b": 2})
    (tmp_path / "config.json").write_text(f'{{"template_kwargs": {quoted(of_run)}}}')
    assert template_arguments(tmp_path, given) == arguments


def quoted(text):
    return "null" if text is None else '"' + text.replace('"', '\\"') + '"'


def test_a_response_ends_where_the_runs_did(tmp_path, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    end = tokenizer.eos_token_id
    assert stops_of(tmp_path, model, tokenizer) == ([end], None)
    (tmp_path / "config.json").write_text(
        f'{{"stop_token_ids": [{end}, 1], "stop_strings": ["b"]}}'
    )
    ids, strings = stops_of(tmp_path, model, tokenizer)
    assert ids == [end, 1] and [*strings.texts] == ["b"]


def test_an_unknown_word_is_named_with_its_prompt():
    tokenizer = word_tokenizer(["a", "b"])
    check_words(["a b", ""], tokenizer)
    with pytest.raises(ValueError, match="the word 'z' of the prompt 'b z'"):
        check_words(["a", "b z"], tokenizer)


def test_conversations_begin_with_the_system_message_and_are_no_ones_but_their_own():
    made = new_conversations(["x", "y"], "s")
    assert made == {name: [{"role": "system", "content": "s"}] for name in "xy"}
    made["x"].append({})
    assert len(made["y"]) == 1
    assert new_conversations(["x"], None) == new_conversations(["x"], "") == {"x": []}


def test_the_end_of_the_input_is_an_empty_line(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: f"  {prompt.strip()} yes ")
    assert next_line() == "you: yes"

    def ends(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    assert next_line() == ""


@pytest.mark.parametrize("chat", [False, True])
def test_samples_are_drawn_with_the_settings(chat, tmp_path, model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    asked = []

    def sample(model, ids, mask, n, eos_ids, pad_id, temperature, generator, **options):
        asked.append(
            (ids.tolist(), n, eos_ids, pad_id, temperature, generator.initial_seed(), options)
        )
        rows = torch.tensor([[b, tokenizer.eos_token_id]] * len(ids))
        return rows, torch.ones_like(rows).bool(), torch.zeros(rows.shape)

    monkeypatch.setattr(commands, "sample", sample)
    monkeypatch.setattr(commands, "require_same_forward", lambda *args: asked.append(args[2]))
    config = SampleConfig(tmp_path, chat=chat, max_new_tokens=5, temperature=0.5, top_k=3, seed=11)
    texts = responses_of(model, tokenizer, ["a"], config)
    [(ids, *rest), temperature] = asked
    end = tokenizer.eos_token_id
    assert rest == [5, [end], end, 0.5, 11, {"top_k": 3, "with_logprobs": True, "stops": None}]
    assert temperature == 0.5
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids == ([whole] if chat else [[a]]) and texts == (["b"] if chat else ["a b"])


def test_an_answer_is_generated_with_the_settings(
    tmp_path, model_and_tokenizer, monkeypatch, capsys
):
    model, tokenizer = model_and_tokenizer
    b = tokenizer.convert_tokens_to_ids("b")
    end = tokenizer.eos_token_id
    asked = []

    def generate(ids, **options):
        asked.append((ids, options))
        return torch.cat([ids, torch.tensor([[b, end]])], 1)

    monkeypatch.setattr(model, "generate", generate)
    talk = [{"role": "user", "content": "a"}]
    config = ChatConfig(tmp_path, max_new_tokens=9, temperature=0.5)
    assert stream_answer(model, tokenizer, talk, config) == "b"
    [(ids, options)] = asked
    streamer = options.pop("streamer")
    assert streamer.skip_prompt and streamer.decode_kwargs == {"skip_special_tokens": True}
    assert options.pop("attention_mask").equal(torch.ones_like(ids))
    assert options.pop("tokenizer") is tokenizer
    shared = {"max_new_tokens": 9, "do_sample": True, "temperature": 0.5, "top_p": 1.0}
    shared |= {"eos_token_id": [end], "pad_token_id": end}
    assert options == shared | {"top_k": 0, "stop_strings": None}
    (tmp_path / "config.json").write_text('{"stop_strings": ["c"]}')
    stream_answer(model, tokenizer, talk, ChatConfig(tmp_path, top_k=3))
    assert asked[1][1]["top_k"] == 3 and asked[1][1]["stop_strings"] == ["c"]


def test_a_conversation_may_fill_the_models_context_and_not_more(
    tmp_path, model_and_tokenizer, monkeypatch
):
    model, tokenizer = model_and_tokenizer
    monkeypatch.setattr(model, "generate", lambda ids, **options: ids)
    talk = [{"role": "user", "content": "a"}]  # six tokens with the generation prompt
    room = 256 - 6
    assert stream_answer(model, tokenizer, talk, ChatConfig(tmp_path, max_new_tokens=room)) == ""
    with pytest.raises(ValueError, match="the conversation has 6 tokens, .* room for 5"):
        stream_answer(model, tokenizer, talk, ChatConfig(tmp_path, max_new_tokens=room + 1))
