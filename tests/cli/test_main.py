"The command as a shell runs it: a real process, so that nothing imported here can help."

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from deep import first

from instruct_goose.cli.commands import PrintableStreamer, SampleConfig
from instruct_goose.cli.main import COMMANDS, as_flags, flag_table, flags, in_a_shell, main
from instruct_goose.config import RLHFConfig
from instruct_goose.core.processes import ProgressBar
from instruct_goose.data.shapes import SHAPES
from instruct_goose.objective.group import PRESETS
from instruct_goose.recipes import quickstart, ratings
from instruct_goose.recipes.quickstart import QuickstartConfig
from instruct_goose.recipes.ratings import ReviewsConfig
from instruct_goose.recipes.training import RunSettings
from instruct_goose.runs.directory import in_run_directory
from instruct_goose.runs.resume import CheckpointManager

TINY = [
    "--reviews",
    "300",
    "--pairs",
    "60",
    "--held-out-pairs",
    "40",
    "--sft-steps",
    "12",
    "--rm-steps",
    "6",
    "--steps",
    "2",
    "--batch-size",
    "16",
    "--eval-samples",
    "32",
    "--tune-steps",
    "2",
    "--no-progress",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A whole quickstart of another algorithm, small enough for a few seconds, from an empty directory, in a process of its own."
    here = tmp_path_factory.mktemp("cli")
    code = "from instruct_goose.cli.main import main; main()"
    args = ["quickstart", *TINY, "--no-baselines", "--algorithm", "remax", "--seed", "3"]
    return here, subprocess.run(
        [sys.executable, "-c", code, *args], cwd=here, capture_output=True, text=True, timeout=300
    )


def test_a_run_says_its_algorithm_and_finds_its_directory(run):
    here, done = run
    assert (
        done.returncode == 0
        and "REMAX: 2 times" in done.stdout
        and "human score" in done.stdout
        and "Writing model" not in done.stderr
    ), done.stderr
    config, summary = (
        json.loads((here / f"runs/quickstart/{name}.json").read_text())
        for name in ("config", "summary")
    )
    assert (
        config["algorithm"] == summary["config"]["algorithm"] == "remax"
        and summary["seed"] == 3
        and summary["torch_threads"] == 1
    )
    rows = [
        json.loads(line)
        for line in (here / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 2 and all("baseline_mean" in row for row in rows)


def test_sample_reads_that_run(run, monkeypatch, capsys):
    here, _ = run
    monkeypatch.chdir(here)
    main(["sample", "runs/quickstart", "the film", "--n", "2"])
    assert sum("| the film" in line for line in capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(SystemExit, match="'zyzzyva'"):
        main(["sample", "runs/quickstart", "zyzzyva"])


def test_sample_stops_where_the_run_stopped(tmp_path, capsys):
    "A model that writes a b c d a b c … for certain. A string that ends inside the third word, a token, and neither."
    import torch
    import transformers

    from instruct_goose.models.tokens import word_tokenizer

    words = word_tokenizer(list("abcd"), 16, pad="<end>", bos="<end>", eos="<end>")
    a, b, c, d, end = words.convert_tokens_to_ids([*"abcd", "<end>"])
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(words),
            n_positions=16,
            n_embd=len(words),
            n_layer=1,
            n_head=1,
            tie_word_embeddings=False,
            bos_token_id=end,
            eos_token_id=end,
        )
    )
    with torch.no_grad():
        block = model.transformer.h[0]
        for part in (block.attn.c_proj, block.mlp.c_proj, model.transformer.wpe, model.lm_head):
            for p in part.parameters():
                p.zero_()
        model.transformer.wte.weight.copy_(torch.eye(len(words)))
        for now, then in ((a, b), (b, c), (c, d), (d, a), (end, a)):
            model.lm_head.weight[then, now] = 50.0
    model.save_pretrained(tmp_path / "policy")
    words.save_pretrained(tmp_path / "policy")
    for settings, says in (
        ({}, "a b c d a b"),
        ({"stop_strings": None, "stop_token_ids": None}, "a b c d a b"),
        ({"stop_strings": ["b c"]}, "a b c"),
        ({"stop_token_ids": [d]}, "a b c d"),
        ({"stop_strings": ["d a"], "stop_token_ids": [end]}, "a b c d a"),
    ):
        if settings:
            (tmp_path / "config.json").write_text(json.dumps(settings))
        main(["sample", str(tmp_path), "a", "--n", "1", "--max-new-tokens", "5"])
        assert f"| {says} |" in " ".join(capsys.readouterr().out.split()), settings


@pytest.mark.parametrize(
    "args, code, says",
    [
        (["quickstart", "--beta", "-1"], 2, "beta"),
        (["quickstart", "--steps", "0"], 2, "steps"),
        (["quickstart", "--algorithm", "dqn"], 2, "'remax'"),
        ([], 2, "quickstart"),
        (["quickstart", "--algorithm", "grpo", "--group-size", "1"], 2, "group_size is 1"),
        (["reviews"], 2, "data"),
        (["reviews", "--data", "."], 1, "GroundTruth"),
        (["sample", "here"], 1, "here"),
        (["probe", "kl", "speed"], 1, "'speed'"),
        (["probe", "--trainer", "mine.py:Mine"], 1, "no file mine.py"),
        (["probe", "--trainer", "json:Mine"], 1, "class 'Mine'"),
        (["probe", "--trainer", "json.mine:Mine"], 1, "json.mine"),
        (["doctor"], 2, "PATH"),
        (["doctor", "here"], 1, "metrics.jsonl is missing"),
        (["doctor", "."], 1, "runs/quickstart"),
    ],
)
def test_what_is_refused_names_itself_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, args, code, says
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(args)
    if isinstance(stop.value.code, str):
        assert code == 1 and says in stop.value.code
    else:
        shown = capsys.readouterr()
        assert stop.value.code == code and says in " ".join((shown.err + shown.out).split())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def parsed(monkeypatch):
    "What the command would run, without running it."
    seen = []
    monkeypatch.setattr(quickstart, "run_quickstart", seen.append)
    monkeypatch.setattr(ratings, "run_reviews", seen.append)

    def parse(*args):
        main(list(args))
        return seen.pop()

    return parse


@pytest.mark.parametrize("name", first(2, PRESETS))
def test_algorithm_is_the_preset_and_other_flags_override_it(parsed, name, tmp_path):
    quick = QuickstartConfig.preset(name)
    reviews = ReviewsConfig.preset(name, data=tmp_path)
    assert (
        parsed("quickstart", "--algorithm", name) == quick
        and type(parsed("quickstart", "--algorithm", name)) is QuickstartConfig
    )
    assert parsed("reviews", "--data", str(tmp_path), f"--algorithm={name}") == reviews
    flags = ["--clip", ".11", "--group-size", "4", "--clip-high", "None"]
    for args in ([*flags, "--algorithm", name], ["--algorithm", name, *flags]):
        assert parsed("quickstart", *args) == QuickstartConfig.preset(
            name, clip=0.11, group_size=4, clip_high=None
        )
    assert (
        parsed("quickstart", "--algorithm", "grpo", "--algorithm", name) == quick
    )  # the last counts, as for any flag
    assert parsed("quickstart") == QuickstartConfig()


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_help_and_version_do_not_wait_for_torch(flag):
    code = f"""
import sys
from instruct_goose.cli.main import main
try: main([{flag!r}])
except SystemExit: pass
heavy = [m for m in ("torch", "transformers", "numpy", "matplotlib") if m in sys.modules]
sys.exit(f"loaded: {{heavy}}" if heavy else 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "instruct-goose" in done.stdout, done.stderr


def test_an_error_inside_a_trainers_module_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half_written.py").write_text("import not_installed_here")
    for place in ("half_written:Mine", "half_written.py:Mine"):
        with pytest.raises(SystemExit, match=r"half_written\S* does not run: .*not_installed_here"):
            main(["probe", "--trainer", place])


HEALTHY = [
    {
        "iteration": i,
        "reward_mean": 0.1 * i,
        "kl_to_reference": 0.02 * i,
        "kl_estimate": 0.02 * i,
        "max_sampler_deviation": 1e-6,
    }
    for i in range(6)
]


def test_probe_takes_the_settings_of_a_run(tmp_path, capsys):
    config = asdict(RLHFConfig.preset("grpo", batch_size=16))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "reward_mean": 1.0}) + "\n")
    main(["probe", str(tmp_path), "advantage_sign", "credit"])
    shown = capsys.readouterr().out
    assert "1 of 2 passed, 1 skipped," in shown and "there are no values" in shown
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="does not hold the settings of a trainer"):
        main(["probe", str(tmp_path), "credit"])


def doctor_status(*words):
    "The exit status of the doctor; 0 where it ends as a function."
    try:
        main(["doctor", *map(str, words)])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.parametrize(
    "changes, says, status, strict",
    [
        ({"max_sampler_deviation": 0.9}, "0.9", 3, 3),
        ({"prompts_ended": 0.5}, "prompts that end", 0, 3),
        ({}, "Nothing looks wrong", 0, 0),
    ],
)
def test_doctor_names_what_looks_wrong_and_its_exit_status_says_so(
    tmp_path, capsys, changes, says, status, strict
):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(m | changes) + "\n" for m in HEALTHY)
    )
    assert doctor_status(tmp_path) == status
    shown = capsys.readouterr()
    assert says in shown.out and "no config.json" in shown.out and not shown.err
    assert doctor_status(tmp_path, "--json") == status
    findings = json.loads(capsys.readouterr().out)
    assert bool(findings) == bool(changes) and all(
        {"name", "severity", "what", "evidence", "lesson", "cure"} <= f.keys() for f in findings
    )
    assert doctor_status(tmp_path, "--strict") == strict


@pytest.mark.parametrize(
    "spoil, says",
    [
        ({2: b"[1, 2]", 5: b"7"}, "line 2 is no JSON object"),
        ({4: b'{"a": "\xff"}'}, "line 4 is no JSON object"),
        ({2: b'{"iteration": 1, "reward_mean": NaN}'}, "reward_mean in metrics[1]"),
        ({i: b"" for i in range(1, 7)}, "is empty"),
        (None, "config.json"),
    ],
)
def test_damaged_files_are_named(tmp_path, spoil, says):
    if spoil is None:
        (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(
            (spoil or {}).get(i, json.dumps(m).encode()) + b"\n" for i, m in enumerate(HEALTHY, 1)
        )
    )
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(tmp_path)])
    assert says in stop.value.code and str(tmp_path) in stop.value.code


def test_as_a_module_behind_a_pipe_that_is_closed(tmp_path):
    "`python -m instruct_goose` is the command; `| head -1` is no traceback."
    shell = f"{sys.executable} -m instruct_goose train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 141) and not done.stderr and "usage" in done.stdout.lower()


def test_an_error_of_our_own_is_shortened_and_says_how_to_see_more(monkeypatch, capsys):
    def wrong(config):
        raise KeyError("x" * 10_000)

    monkeypatch.setattr(quickstart, "run_quickstart", wrong)
    with pytest.raises(SystemExit) as stop:
        main(["quickstart"])
    assert "KeyError" in stop.value.code and len(stop.value.code) < 1800

    class Mute(BaseException):
        def __str__(self):
            return 1 / 0

    for odd, says in (
        (ValueError("\x1b[2J"), r"\x1b[2J"),
        (ValueError("line\n" * 10_000), "line"),
        (Mute(), "Mute"),
    ):

        def wrong(config, odd=odd):
            raise odd

        monkeypatch.setattr(quickstart, "run_quickstart", wrong)
        with pytest.raises(SystemExit) as stop:
            main(["quickstart"])
        assert says in stop.value.code and len(stop.value.code) < 1800
    monkeypatch.setattr(
        quickstart, "run_quickstart", lambda config: monkeypatch.setattr(sys, "stdout", None)
    )
    main(["quickstart"])
    monkeypatch.setattr(quickstart, "run_quickstart", wrong)
    monkeypatch.setenv("INSTRUCT_GOOSE_TRACEBACK", "1")
    with pytest.raises(Mute):
        main(["quickstart"])


def test_a_list_given_twice_is_refused():
    "The parser would keep the second alone, and train on half of the reward."
    with pytest.raises(ValueError, match="--reward is there twice"):
        flags("train", ["--reward", "a.py:f", "--steps", "1", "--reward=b.py:g"])
    flags("train", ["--steps", "1", "--steps", "2"])


# ---------------------------------------------------------------- where the output goes


@pytest.mark.parametrize(
    "argv, encoding",
    first(
        2,
        [
            (["exercises"], "ascii"),
            (["--help"], "latin-1"),
            (["exercises"], "latin-1"),
            (["train", "--help"], "ascii"),
        ],
    ),
)
def test_an_output_that_is_not_utf8_gets_replacements(argv, encoding):
    code = "import sys; from instruct_goose.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding)


def test_a_run_ends_well_on_an_output_that_is_not_utf8(tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    config = RunSettings(output_dir=tmp_path / "run", steps=1)
    in_run_directory(config, "test", lambda run_dir, manager: {"printed": print("π → θ")})
    assert (tmp_path / "run/summary.json").exists()
    out.flush()
    assert b"? ? ?" in out.buffer.getvalue()


def test_a_progress_bar_asks_nothing_of_standard_error_but_to_write(monkeypatch):
    class Plain:
        def __init__(self):
            self.texts = []

        def write(self, text):
            self.texts.append(text)

    plain = Plain()
    monkeypatch.setattr(sys, "stderr", plain)
    with ProgressBar(2, "SFT") as bar:
        bar.step("loss 1.0")
    assert "SFT" in "".join(plain.texts)


@pytest.mark.parametrize("threads", [0, 1025, 10**9])
def test_threads_are_bounded(threads):
    for kind in (SampleConfig, QuickstartConfig):
        needed = {"run_dir": Path("run")} if kind is SampleConfig else {}
        with pytest.raises(ValueError, match="threads"):
            kind(threads=threads, **needed)


def test_an_answer_in_a_chat_does_not_steer_the_terminal(capsys):
    streamer = PrintableStreamer(None)
    streamer.on_finalized_text("\x1b[2Jgone\n", stream_end=True)
    assert capsys.readouterr().out == "\\x1b[2Jgone\n\n"


def test_the_hint_to_go_on_is_a_word_of_the_shell(tmp_path, capsys):
    out = tmp_path / "my run"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt), CheckpointManager(out, {}, steps=3) as manager:
        manager.stage("ppo").after_step(1, 3, lambda: {"x": 1})
        raise KeyboardInterrupt
    assert f"--output-dir '{out}' --resume" in capsys.readouterr().err


WITHOUT_TORCH = """
import contextlib
import io
import json
import sys
from instruct_goose.cli.main import main
answers = []
for argv in json.loads(sys.stdin.read()):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(argv)
        except SystemExit as stop:
            print(stop.code)
    answers.append([said.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))])
print(json.dumps(answers))
"""


def answers_without_torch(commands):
    "What each command prints, in a process of their own that has imported neither library."
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=120,
    )
    answers = []
    for argv, (said, imported) in zip(commands, json.loads(done.stdout), strict=True):
        assert imported == [], argv
        answers.append(" ".join(said.split()))
    return answers


def test_help_is_shown_without_torch():
    commands = [*COMMANDS]
    shown = answers_without_torch([[command, "--help"] for command in commands])
    for command, text in zip(commands, shown, strict=True):
        for flag in flag_table()["commands"][command]["flags"]:
            name = f"--{flag['name'].replace('_', '-')}"
            assert flag.get("positional") or name in text, (command, name)


OWN = ["--model", ".", "--data", "rows.jsonl"]


ANSWERED_AT_ONCE = [
    (["--help"], "quickstart"),
    (["train", "--algorithm", "gspo", "--help"], "0.0003"),
    (["quickstart", "--step", "3"], "--steps"),
    (["chat", ".", "--learning-rate", "1"], "learning_rate"),
    (["sft", *OWN, "--learning-rate", "1"], "here it is called --lr"),
    (["train", "--config", "no.yaml", "--lerning-rate", "1"], "--lerning-rate"),
    (["train", "--config", "no.yaml"], "no file no.yaml"),
    (["train", *OWN, "--reward", "a.py:f", "--plugin", "no.py"], "no file no.py"),
    (["train", *OWN, "--reward", "a.py:f"], "no file 'rows.jsonl'"),
    (["train", "--model", "no", "--reward", "a.py:f"], "no directory 'no'"),
    (["dpo", "--model", "no", "--data", "rows.jsonl"], "no directory 'no'"),
    (["probe", "--trainer", "no.py:Mine"], "no file no.py"),
    (["sample", "no"], "no directory 'no'"),
    (["merge", "no", "new"], "no directory 'no'"),
    (["doctor", "no"], "metrics.jsonl is missing"),
    (["report", "no"], "metrics.jsonl is missing"),
    (["compare", "no", "neither"], "metrics.jsonl is missing"),
    (["reviews", "--data", "no"], "no 'no' here"),
]


def test_what_cannot_be_run_is_answered_without_torch():
    answers = answers_without_torch([argv for argv, _ in ANSWERED_AT_ONCE])
    for (argv, says), answer in zip(ANSWERED_AT_ONCE, answers, strict=True):
        assert says in answer, argv


def test_the_table_of_flags_is_that_of_the_settings():
    "The parser reads a table, so that it needs no torch; the table is made from the classes."
    docs = Path(__file__).parents[2] / "docs/flag_table.py"
    done = subprocess.run([sys.executable, docs, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_setting_that_a_command_refuses_is_no_flag_of_it(tmp_path, capsys):
    for command, setting, value in [
        ("reward-model", "lora_rank", 3),
        ("reward-model", "four_bits", True),
        ("reward-model", "answer_column", "reply"),
        ("dpo", "answer_column", "reply"),
    ]:
        flag = f"--{setting.replace('_', '-')}"
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"{flag} " not in capsys.readouterr().out
        with pytest.raises(SystemExit, match=f"no {flag} here: "):
            main([command, "--model", ".", flag])
        kind, _ = COMMANDS[command].load()
        with pytest.raises(ValueError, match=f"{setting} is .*: it must be (None|False): "):
            kind(model=".", data=Path("rows.jsonl"), **{setting: value})


def test_a_hint_names_only_what_the_command_has():
    table = flag_table()["commands"]
    known = {name: {flag["name"] for flag in command["flags"]} for name, command in table.items()}
    every = set().union(*known.values()) - {"n", "prompts", "reward", "like", "loss"}  # words, too
    for name, command in table.items():
        for foreign, hint in command["foreign"].items():
            text = as_flags(hint)
            spoken_of = set(re.findall(r"\w+", text)) & every
            assert spoken_of <= known[name], (name, foreign, hint)
            assert not re.search(r"[a-z]\(|=|torch|RLHF|Agent", text), (name, foreign, hint)


@pytest.mark.parametrize(
    "command, says",
    [
        *((name, "called --model") for name in ("train", "sft", "kto", "dpo", "reward-model")),
        *((name, "here run_dir, the first word") for name in ("sample", "chat", "doctor")),
        *((name, "here the models are the command's own") for name in ("quickstart", "reviews")),
    ],
)
def test_the_model_of_another_library_gets_a_hint_in_every_command(command, says):
    with pytest.raises(
        SystemExit, match=f"no setting 'model_name_or_path': {says}|: here .*{says}"
    ):
        main([command, "--model_name_or_path", "x"])


@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "reward-model"])
def test_a_supervised_stage_is_not_told_of_settings_of_the_trainer(command):
    for flag in ("--bf16", "--gradient_accumulation_steps"):
        with pytest.raises(SystemExit, match="here there is nothing like it"):
            main([command, "--model", "m", flag, "1"])


def test_what_a_message_says_in_python_is_said_in_flags():
    python = "another name: columns={'chosen': 'good one'}, or columns={'prompt': '…'}"
    assert in_a_shell(python, ["chosen_column", "prompt_column"]) == (
        "another name: --chosen-column 'good one', or --prompt-column NAME"
    )
    assert in_a_shell(python, []) == "another name: rename it to chosen, or rename it to prompt"
    by_name = (
        "datasets.load_dataset(name, split='train') or datasets.load_dataset('a/b', split='train')"
    )
    assert in_a_shell(by_name, []) == "--dataset NAME or --dataset a/b"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    from instruct_goose.models.loading import tiny_smollm

    place = tmp_path_factory.mktemp("chat") / "model"
    model, tokenizer = tiny_smollm("2 + 3? 5 6 You add. Add. = a tool add".split())
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


STAGE_COMMANDS = {"SFT": "sft", "KTO": "kto", "DPO": "dpo", "reward model": "reward-model"}
FORMS = [
    (shape.name, stage) for shape in SHAPES for stage in shape.stages if stage in STAGE_COMMANDS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, stage", FORMS)
def test_the_commands_take_every_form_of_a_row(chat_model, tmp_path, capsys, name, stage):
    [shape] = [shape for shape in SHAPES if shape.name == name]
    for number, row in enumerate(shape.examples.values()):
        if "tools" in row:
            continue  # the model's chat template takes none
        labels = [{"label": "true"}, {"label": 0}] if stage == "KTO" else [{}, {}]
        rows = [row | label for label in labels]
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"data": rows}))
        flags = ["--data", str(path), "--held-out", "0", "--dry-run"]
        main([STAGE_COMMANDS[stage], "--model", str(chat_model), *flags])
        assert "2 rows to learn from" in capsys.readouterr().out


def test_warnings_of_this_package_are_a_line_in_a_shell():
    told = subprocess.run(
        [sys.executable, "-c", WARNS], capture_output=True, text=True, check=True
    ).stderr
    assert told == "warning: not used: source\n"


WARNS = """
import warnings
from instruct_goose.cli.main import warnings_in_a_line
from instruct_goose.data.load import UnusedColumns
with warnings_in_a_line(["sft"]):
    warnings.warn("not used: source", UnusedColumns)
"""
