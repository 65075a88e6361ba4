"The commands that read a finished run: sample, chat, merge, on models small enough to write what is known."

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from instruct_goose import exercises
from instruct_goose.cli import commands
from instruct_goose.cli.main import main
from instruct_goose.models.loading import load_model, tiny_smollm
from instruct_goose.models.tokens import word_tokenizer

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
