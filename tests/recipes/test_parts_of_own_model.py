"""What each stage on one's own model hands to the function that does the work, and what it makes of the
result. Stand-ins note what they are given; no model learns here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.recipes import own_model
from instruct_goose.recipes.own_model import (
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
    show_results,
    split_held_out,
    trainer_of,
)
from instruct_goose.rollouts.environments import EnvironmentSampler, environment_reward
from instruct_goose.training.trainer import RLHFTrainer


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
