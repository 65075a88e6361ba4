"""The steps of the recipes of small and of real models: what they hand to the functions that do the work,
rewards by hand, tables by hand. Stand-ins note what they are given; no model learns here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from instruct_goose.models.adapters import adapter_layers
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.recipes import smollm, stages
from instruct_goose.recipes.ratings import Review
from instruct_goose.recipes.smollm import (
    RECIPES,
    Judge,
    RatedConfig,
    RecipeFlags,
    Task,
    as_marked,
    helpful,
    make_judges,
    make_policy_trainer,
    positive,
    question,
    questions,
    rated_sentences,
    recipe_settings,
    right_number,
    run_recipe,
    run_task,
    sentiment,
    train_judge,
    well_summed_up,
)
from instruct_goose.recipes.stages import (
    improve,
    make_baselines,
    models_table,
    side_by_side,
    spread,
    texts_by_prompt,
)


@pytest.fixture(autouse=True)
def _stand_ins_are_no_settings(unchecked):
    with unchecked():
        yield


def noting(monkeypatch, module, name, result=None):
    "A function of a module notes its arguments and returns this."
    asked = []

    def work(*args, **options):
        asked.append((args, options))
        return result

    monkeypatch.setattr(module, name, work)
    return asked


# --- settings of recipes


def test_a_recipe_has_the_settings_of_its_file_and_given_ones_beat_them():
    settings = recipe_settings("smollm-answers")
    assert settings.algorithm == "grpo" and settings.group_size > 1
    given = recipe_settings("smollm-answers", steps=3, lr=0.5, stand_in=True)
    assert (given.steps, given.lr, given.stand_in) == (3, 0.5, True)
    assert given.group_size == settings.group_size


@pytest.mark.parametrize("name", ["smollm-sentiment", "smollm-answers"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_an_algorithm_without_groups_takes_the_file_for_it(name, algorithm):
    settings = recipe_settings(name, algorithm)
    assert settings.algorithm == algorithm
    assert (settings.group_size > 1) == (algorithm != "ppo")


@pytest.mark.parametrize("stand_in, is_small", [(True, True), (False, False)])
def test_a_stand_in_of_a_rated_recipe_is_small(stand_in, is_small):
    settings = recipe_settings("smollm-reviews", stand_in=stand_in, data=Path("x"))
    small = RatedConfig.small
    assert all((getattr(settings, name) == value) == is_small for name, value in small.items())
    own = recipe_settings("smollm-reviews", stand_in=True, lr=0.5)
    assert own.lr == 0.5 and own.judge_frozen == small["judge_frozen"]


@pytest.mark.parametrize(
    "given, is_enough", [({}, False), ({"stand_in": True}, True), ({"data": Path("x")}, True)]
)
def test_rated_sentences_are_a_directory_or_made_up(given, is_enough):
    if is_enough:
        recipe_settings("smollm-reviews", **given)
    else:
        with pytest.raises(ValueError, match="data.*--data DIR"):
            recipe_settings("smollm-reviews", **given)


def test_a_recipe_is_run_as_its_task_or_as_train(monkeypatch, capsys):
    settings = noting(monkeypatch, smollm, "recipe_settings", "settings")
    tasks = noting(monkeypatch, smollm, "run_task", {"of": "task"})
    trains = noting(monkeypatch, smollm, "run_train", {"of": "train"})
    assert run_recipe(RecipeFlags("smollm-answers", steps=3, seed=0)) == {"of": "task"}
    assert settings == [(("smollm-answers",), {"steps": 3})]  # what differs from no flag
    assert tasks == [(("smollm-answers", "settings", RECIPES["smollm-answers"].task), {})]
    assert run_recipe(RecipeFlags("imdb-gpt2", algorithm="ppo")) == {"of": "train"}
    assert settings[1] == (("imdb-gpt2",), {"algorithm": "ppo"})
    assert trains == [(("settings",), {})] and len(tasks) == 1
    with pytest.raises(ValueError, match="there is no 'nothing': choose from smollm-sentiment"):
        run_recipe(RecipeFlags("nothing"))
    with pytest.raises(ValueError, match="smollm-answers reads no data: leave it out"):
        run_recipe(RecipeFlags("smollm-answers", data=Path("x")))
    with pytest.raises(ValueError, match="imdb-gpt2 reads no cache and no stand_in: leave it out"):
        run_recipe(RecipeFlags("imdb-gpt2", cache=Path("x"), stand_in=True))
    assert run_recipe(RecipeFlags()) is None
    shown = capsys.readouterr().out
    assert all(f"| {name} " in shown and recipe.what in shown for name, recipe in RECIPES.items())


TASK = Task(["p"], ["h"], "reward", "figures", ["a", "b"], {"found": 1})


@pytest.mark.parametrize("is_made", [True, False])
def test_a_task_is_improved_in_a_runs_directory(is_made, monkeypatch):
    asked = noting(monkeypatch, smollm, "improve", {"summary": 1})
    makes = noting(monkeypatch, smollm, "make_policy_trainer", "trainer")
    prepared = []

    def prepare(config, out, manager):
        prepared.append((config, out, manager))
        return TASK

    def in_run_directory(config, name, work):
        assert name == "smollm-answers"
        return work("out", "manager")

    monkeypatch.setattr(smollm, "in_run_directory", in_run_directory)
    config = SimpleNamespace(
        eval_samples=5, bar_name=lambda name: f"bar: {name}", job=lambda *args: ("job", *args)
    )
    assert run_task("smollm-answers", config, prepare if is_made else TASK) == {"summary": 1}
    [(args, options)] = asked
    assert args[:5] == (config, "out", "manager", "trainer", ("job", ["p"], "reward"))
    measure = args[5]
    assert measure.func is smollm.figures_of
    assert measure.args == ("trainer", TASK, 5, "bar: held-out texts")
    assert options == {"found": 1} and makes == [((config, TASK), {})]
    assert prepared == [(config, "out", "manager")] * is_made


@pytest.mark.parametrize("top, adapted", [(None, {0, 1}), (1, {1}), (2, {0, 1}), (9, {0, 1})])
def test_adapters_are_in_the_last_blocks(top, adapted, monkeypatch):
    made = noting(monkeypatch, smollm, "RLHFTrainer", "trainer")
    config = SimpleNamespace(stand_in=True, cache=None, seed=3, lora_top=top, lora_rank=2)
    assert make_policy_trainer(config, TASK) == "trainer"
    (agent, reference, settings), options = made[0]
    names = [name for name, p in agent.model.named_parameters() if p.requires_grad]
    assert {
        int(name.split(".layers.")[1].split(".")[0]) for name in names if "lora" in name
    } == adapted
    assert all(layer.r["default"] == 2 for layer in adapter_layers(agent.model))
    assert settings is config and {"a", "b"} <= {*options["tokenizer"].get_vocab()}
    ids = torch.tensor([[0, 1]])
    assert torch.equal(reference(ids).logits, agent.model(ids).logits)
    again = noting(monkeypatch, smollm, "RLHFTrainer")
    make_policy_trainer(config, TASK)
    other = again[0][0][0].model.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in agent.model.state_dict().items())


def test_the_real_model_is_kept_where_it_is_asked_for(monkeypatch):
    noting(monkeypatch, smollm, "RLHFTrainer", "trainer")
    loads = noting(monkeypatch, smollm, "load_smollm", tiny_smollm(["a"]))
    config = SimpleNamespace(stand_in=False, cache="kept", seed=3, lora_top=1, lora_rank=2)
    make_policy_trainer(config, TASK)
    assert loads == [(("kept",), {})]


# --- rewards


def test_all_sums_of_two_digits_are_asked_and_sixteen_are_held_out():
    learnt, held_out = questions()
    assert len(held_out) == 16 and len(learnt) == 81 - 16
    asked = [row["prompt"][1]["content"] for row in (*learnt, *held_out)]
    assert len({*asked}) == 81
    assert {*asked} == {f"What is {a} + {b} ?" for a in range(1, 10) for b in range(1, 10)}
    assert questions() == (learnt, held_out)
    assert question(3, 4) == {
        "prompt": [
            {"role": "system", "content": "Do the sum ."},
            {"role": "user", "content": "What is 3 + 4 ?"},
        ],
        "answer": "7",
    }


@pytest.mark.parametrize(
    "text, score",
    [
        ("7", 1.0),
        ("3 + 4 = 7", 1.0),
        ("7 = 3 + 4", 0.0),
        ("17", 0.0),
        ("7.", 1.0),
        ("07", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_is_the_answer(text, score):
    assert right_number([text, text], ["7", "8"]) == [score, 0.0]


def test_cheerfulness_is_vaders_score(monkeypatch):
    monkeypatch.setattr(smollm, "vader_compound", lambda texts: [len(text) for text in texts])
    assert sentiment(["a", "bb"]) == [1, 2]


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "prompt, written",
    [
        ("q", "\n\nHuman: q\n\nAssistant: a"),
        ([{"role": "user", "content": "q"}], "\n\nHuman: q\n\nAssistant: a"),
        (
            [SYSTEM, {"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
            "\n\nHuman: s\n\nHuman: q\n\nAssistant: b\n\nAssistant: a",
        ),
    ],
)
def test_dialogues_have_the_form_that_hh_rlhf_has(prompt, written):
    before = len(prompt)
    assert as_marked(prompt, "a") == written and len(prompt) == before


def test_the_rewards_of_the_hub_are_classifiers_that_are_loaded_once(monkeypatch):
    models = noting(monkeypatch, smollm, "load_model", SimpleNamespace(to=lambda device: "model"))
    tokenizers = noting(monkeypatch, smollm, "load_tokenizer", "tokenizer")

    class Made:
        def __init__(self, *args):
            self.args = args

        def score(self, *asked):
            return self.args, asked

    monkeypatch.setattr(smollm, "Classifier", Made)
    smollm.hub_classifier.cache_clear()
    try:
        for _ in range(2):
            args, asked = positive(["a"])
            assert args == ("model", "tokenizer", "POSITIVE", None) and asked == (["a"],)
        args, asked = helpful(["t"], ["p"], ["c"])
        assert args == ("model", "tokenizer", None, as_marked) and asked == (["t"], ["p"], ["c"])
        args, asked = well_summed_up(["t"])
        assert args == ("model", "tokenizer", None, None) and asked == (["t"],)
    finally:
        smollm.hub_classifier.cache_clear()
    names = [
        "hub:lvwerra/distilbert-imdb",
        "hub:Ray2333/gpt2-large-helpful-reward_model",
        "hub:cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
    ]
    assert models == [((name, "reward"), {}) for name in names]
    assert tokenizers == [((name,), {}) for name in names]


# --- judges


def judge_of(frozen=1, trained=1):
    lm, tokenizer = tiny_smollm(["good", "bad", "film", "?"])
    return Judge(lm, tokenizer, frozen, trained, " ?")


@pytest.mark.parametrize(
    "n, epochs, batch_size, steps",
    [(10, 2.0, 4, 5), (10, 0.01, 4, 1), (10, 1.0, 4, 2), (3, 1.0, 64, 1)],
)
def test_a_judge_learns_for_so_many_passes(n, epochs, batch_size, steps, monkeypatch):
    judge = judge_of()
    learning = []

    def fit(model, loss_of, batches, **options):
        learning.append([name for name, p in judge.named_parameters() if p.requires_grad])
        learning.append((loss_of([0, 1]), options))
        return ["log"]

    monkeypatch.setattr(smollm, "fit", fit)
    reviews = [Review(str(i), "good film" if i % 2 else "bad", (i % 2, 0)) for i in range(n)]
    log = train_judge(judge, reviews, epochs=epochs, lr=0.5, batch_size=batch_size, desc="x")
    names, (loss, options) = learning
    assert log == ["log"] and options == {"steps": steps, "lr": 0.5, "desc": "x"}
    parts = ("model.model.layers.1.", "model.model.norm.", "model.score.")
    assert names and all(name.startswith(parts) for name in names)
    assert not any(p.requires_grad for p in judge.parameters())
    assert loss.requires_grad and loss.item() == pytest.approx(0.6931, abs=1e-4)  # a head of zeros


def test_a_judge_reads_its_question_behind_each_text():
    judge = judge_of()
    torch.nn.init.normal_(judge.model.score.weight)
    ids = judge.tokenizer("good film ?")["input_ids"]
    [score] = judge.score(["good film"])
    assert score == pytest.approx(judge(torch.tensor([ids])).item(), abs=1e-6)
    assert len(judge.model.model.layers) == judge.model.config.num_hidden_layers == 2
    assert len(judge_of(1, 0).model.model.layers) == 1


def test_two_judges_learn_from_a_half_of_the_raters_each(monkeypatch):
    trained = []

    def train(judge, reviews, **options):
        trained.append((reviews, options))

    monkeypatch.setattr(smollm, "train_judge", train)
    scaled = []
    monkeypatch.setattr(Judge, "normalise", lambda self, texts: scaled.append(texts))
    config = SimpleNamespace(
        stand_in=True,
        cache=None,
        question="\nIs it ?",
        device="cpu",
        seed=3,
        judge_frozen=1,
        judge_trained=1,
        judge_epochs=2.0,
        judge_lr=0.5,
        judge_batch=7,
        progress=False,
    )
    train_rows = [Review("1", "good film", (1, 2, 3, 4)), Review("2", "bad", (-1, -2))]
    held_out = [Review("3", "film", (0, 1))]
    manager = SimpleNamespace(stage=lambda name: f"stage of {name}")
    judges = make_judges(config, train_rows, held_out, ["good", "film", "bad"], manager)
    assert [*judges] == ["proxy", "other_half"] and scaled == [["film"]] * 2
    (proxy, options), (other, others) = trained
    for review, one, rest in zip(train_rows, proxy, other, strict=True):
        assert sorted(one.ratings + rest.ratings) == sorted(review.ratings)
    assert options.pop("seed") != others.pop("seed")
    shared = {"epochs": 2.0, "lr": 0.5, "batch_size": 7, "progress": False}
    assert options == shared | {"desc": "proxy", "stage": "stage of proxy"}
    assert others == shared | {"desc": "other_half", "stage": "stage of other_half"}
    assert judges["proxy"].question == "\nIs it ?"


def test_made_up_sentences_are_read_where_there_are_no_others(monkeypatch):
    train, held_out = rated_sentences(SimpleNamespace(data=None, held_out=60))
    assert len(held_out) == 60 and 150 < len(train) <= 180  # twins of held-out ones are dropped
    reads = noting(monkeypatch, smollm, "read_rated", (held_out, []))
    train, test = rated_sentences(SimpleNamespace(data=Path("x"), held_out=20))
    assert len(test) == 20 and len(train) <= 40 and reads == [((Path("x"),), {})]


# --- stages of small models


def wrote(prompts, texts):
    return SimpleNamespace(prompts=prompts, texts=texts)


def test_each_prompt_stands_once_beside_the_first_text_of_each_model():
    before = wrote(["p", "q", "p"], ["a", "b", "c"])
    after = wrote(["p", "q", "p"], ["d", "e", "f"])
    assert texts_by_prompt(before, after) == [("p", "a", "d"), ("q", "b", "e")]
    table = side_by_side(wrote(["", "q"], ["a", "b"]), wrote(["", "q"], ["d", "e"]), 1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["prompt", "SFT model", "policy"] and rows[2:] == [["(nothing)", "a", "d"]]


@pytest.mark.parametrize(
    "values, form, cell",
    [
        ([1.0], ".2f", "1.00"),
        ([1.0, 2.0, 6.0], ".1f", "2.0 [1.0, 6.0]"),
        ([0.801, 0.799], ".2f", "0.80"),
        ([0.801, 0.799], ".3f", "0.800 [0.799, 0.801]"),
    ],
)
def test_a_figure_of_several_runs_is_its_median_and_its_ends(values, form, cell):
    assert spread(values, form) == cell


def test_a_table_of_models_has_a_row_for_each_and_a_dash_for_what_is_missing():
    table = models_table(
        ["kl_x", "y"], {"kl_x": 0.5, "y": 1}, {"kl_x": 3.0}, {"best_of_8": {"y": 2}}
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["", "kl x", "y"]
    assert rows[2:] == [
        ["SFT model", "0.500", "1"],
        ["best of 8", "–", "2"],
        ["policy", "3.000", "–"],
    ]


class Best:
    "The best texts, of which so many ended."

    prompts = ["p"]

    def __init__(self, ended):
        self.ended = ended

    def __len__(self):
        return self.ended

    def __getitem__(self, rows):
        return self


@pytest.mark.parametrize("ended", [0, 2])
@pytest.mark.parametrize("prompts_given", [False, True])
def test_baselines_are_the_best_texts_and_sft_on_those_that_ended(
    ended, prompts_given, monkeypatch
):
    generates = noting(monkeypatch, stages, "generate", "rollout")
    noting(monkeypatch, stages, "require_texts", ["a", "b"])
    best = noting(monkeypatch, stages, "best_of_n", (Best(ended), None))
    noting(monkeypatch, stages, "finished")
    noting(monkeypatch, stages, "text_figures", {"of": "best"})
    learns = noting(monkeypatch, stages, "train_lm")
    measured = noting(monkeypatch, stages, "evaluate", (None, {"of": "tuned"}))
    config = SimpleNamespace(
        best_of=2,
        max_new_tokens=5,
        seed=3,
        bar_name=lambda name: name,
        tune_steps=7,
        tune_lr=0.5,
        progress=False,
    )
    judge = SimpleNamespace(score=lambda texts, desc: [1.0, 2.0])
    lm, _ = tiny_smollm(["a"])
    tokenizer = SimpleNamespace(eos_token_id=0)
    made = make_baselines(
        config, lm, tokenizer, judge, ["p", "q"], "measure", "stage", prompts_given, batch_size=4
    )
    args, options = generates[0]
    assert args == (lm, tokenizer, ["p", "p", "q", "q"], 5) and options["desc"] == "best of 2"
    assert best == [(("rollout", [1.0, 2.0], 2), {})]
    if not ended:
        assert made == {"best_of_2": {"of": "best"}} and not learns
        return
    assert made == {"best_of_2": {"of": "best"}, "sft_on_best_of_2": {"of": "tuned"}}
    (tuned, *rest), options = learns[0]
    assert tuned is not lm and rest == [tokenizer, ["a", "b"]]
    assert options.pop("seed") != generates[0][1]["seed"]
    assert options == {
        "prompts": ["p"] if prompts_given else None,
        "steps": 7,
        "lr": 0.5,
        "desc": "4 SFT on the best",
        "progress": False,
        "stage": "stage",
        "batch_size": 4,
    }
    assert measured[0][0][1:] == (tuned, lm, tokenizer, judge, ["p", "q"], "measure")


@pytest.mark.parametrize("has_baselines", [True, False])
@pytest.mark.parametrize("columns", [None, ["y"]])
def test_a_policy_is_measured_before_and_after(
    has_baselines, columns, monkeypatch, tmp_path, capsys
):
    done = []
    monkeypatch.setattr(stages, "train_policy", lambda *args: done.append(args) or ["metrics"])
    plots = noting(monkeypatch, stages, "plot_metrics")
    monkeypatch.setattr(stages, "settings_of", lambda config: {"lr": 1})
    monkeypatch.setattr(stages, "require_texts", lambda rollout: rollout.texts)
    prompts = [f"p{i}" for i in range(9)]
    measures = iter(
        [
            (wrote(prompts, ["before"] * 9), {"x": 1.0, "y": 2.0}),
            (wrote(prompts, ["after"] * 9), {"x": 3.0, "y": 4.0}),
        ]
    )
    trainer = SimpleNamespace(
        stop_reason=None,
        best_policy=SimpleNamespace(iteration=5),
        save_pretrained=lambda place: done.append(place),
    )
    manager = SimpleNamespace(
        stage=lambda name: f"stage {name}",
        seconds=lambda: {"cpu_seconds": 1.0, "wall_seconds": 2.0},
        resumed_from=None,
    )
    config = SimpleNamespace(algorithm="ppo", steps=3, batch_size=4, beta=0.1, seed=7, threads=1)
    summary = improve(
        config,
        tmp_path,
        manager,
        trainer,
        "job",
        lambda: next(measures),
        baselines=(lambda: {"best_of_8": {"y": 9.0}}) if has_baselines else None,
        columns=columns,
        found=11,
    )
    assert done == [(trainer, "job", tmp_path, f"stage {stages.RL_STAGE}"), tmp_path / "policy"]
    assert plots == [((["metrics"], tmp_path), {})]
    assert summary["before"] == {"x": 1.0, "y": 2.0} and summary["after"] == {"x": 3.0, "y": 4.0}
    assert summary["baselines"] == ({"best_of_8": {"y": 9.0}} if has_baselines else {})
    assert summary["samples"] == [["before", "after"]] * 8
    assert (summary["seed"], summary["best_iteration"], summary["found"]) == (7, 5, 11)
    assert summary["config"] == {"algorithm": "ppo", "lr": 1} and summary["torch_threads"] == 1
    written = (tmp_path / "samples.md").read_text("utf-8")
    shown, _, figures = written.partition("# Figures")
    assert shown.count("| before") == 9 and ("| x " in figures) == (columns is None)
    assert ("best of 8" in figures) == has_baselines
    out = capsys.readouterr().out
    assert out.count("| before") == 8 and ("Baselines: " in out) == has_baselines
    assert "PPO: 3 times, write 4 texts" in out
