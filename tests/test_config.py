"Settings: their ranges, their presets, and how each is called on the command line."

import ast
import dataclasses
import inspect

import pytest

from instruct_goose import config
from instruct_goose.config import RLHFConfig, lr_factor
from instruct_goose.core.checks import Settings
from instruct_goose.objective.group import PRESETS
from instruct_goose.training.trainer import RLHFTrainer


def test_every_setting_is_checked_by_name_value_and_range(unchecked):
    with unchecked():
        for name in (
            "steps",
            "batch_size",
            "epochs",
            "minibatches",
            "max_new_tokens",
            "group_size",
            "seed",
        ):
            for bad in (1.5, True, None):
                with pytest.raises(TypeError, match=f"{name} is .*whole number"):
                    RLHFConfig(**{name: bad})
        for bad, message in [
            (dict(clip=0), "above 0"),
            (dict(lam=1.01), "from 0 to 1"),
            (dict(gamma=-0.1), "from 0 to 1"),
            (dict(temperature=0), "above 0"),
            (dict(advantage="group_mean"), "group_size is 1: it must be at least 2 for group_mean"),
            (dict(advantage="group_mean_std"), "at least 2 for group_mean_std"),
            (dict(advantage="leave_one_out"), "at least 2 for leave_one_out"),
            (dict(aggregation="group_token_mean"), "at least 2 for group_token_mean"),
            (dict(group_size=0), "at least 1"),
            (dict(group_size=8, batch_size=12), "multiple of group_size, 8"),
            (dict(dual_clip=1.0), "above 1"),
            (dict(dual_clip=2.0, surrogate="ratio"), "None with surrogate='ratio'"),
            (dict(importance_cap=0.0), "above 0"),
            (dict(importance_floor=0.5), "below importance_cap"),
            (dict(importance_cap=2.0, importance_floor=2.0), "below importance_cap"),
            (dict(max_kl_to_old=0.0), "above 0"),
            (dict(importance_beyond="mask"), "one of"),
            (dict(group_ddof=2), "one of 0, 1"),
            (
                dict(kl_placement="loss", kl_estimator="k1"),
                "kl_gradient is 'plain': it must be 'ratio' or 'straight_through'",
            ),
            (dict(kl_gradient="ratio"), "'plain' with kl_placement='reward'"),
            (dict(minibatches=65), "at most batch_size, 64"),
            (dict(beta=0, kl_target=3), "above 0 when kl_target"),
        ]:
            with pytest.raises(ValueError, match=message):
                RLHFConfig(**bad)
        RLHFConfig(
            beta=0, lr=1, clip=1, gamma=1, lam=0, ent_coef=0, vf_coef=0
        )  # whole numbers where numbers are meant


def test_every_setting_has_help_on_the_command_line():
    import contextlib
    import io
    import re

    import tyro

    assert tyro.cli(
        RLHFConfig,
        args=[
            "--advantage",
            "leave_one_out",
            "--group-size",
            "4",
            "--beta",
            "0",
            "--micro-batch-size",
            "8",
            "--no-whiten-advantages",
            "--dual-clip",
            "3",
            "--kl-estimator",
            "None",
            "--group-ddof",
            "0",
        ],
    ) == RLHFConfig(
        advantage="leave_one_out",
        group_size=4,
        beta=0.0,
        micro_batch_size=8,
        whiten_advantages=False,
        dual_clip=3.0,
        group_ddof=0,
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        tyro.cli(RLHFConfig, args=["--help"], console_outputs=True)
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", out.getvalue())
    for field in dataclasses.fields(RLHFConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    lines = inspect.getsource(RLHFConfig).splitlines()
    for field in dataclasses.fields(RLHFConfig):
        at = next(i for i, x in enumerate(lines) if re.match(rf"\s+{field.name}:", x))
        below = next(
            x for x in lines[at:] if re.match(r'    "', x) or "  # " in x
        )  # beside the field, or a string under it
        comment = below.split("  # ")[1] if "  # " in below else below.strip().strip('"')
        assert len(comment) > 10 and comment.split()[0].strip("`;:") in text, field.name


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_preset_is_its_dials_and_what_overrides_them(algorithm):
    c = RLHFConfig.preset(algorithm)
    assert {k: getattr(c, k) for k in PRESETS[algorithm]} == PRESETS[
        algorithm
    ] and c.algorithm == algorithm
    defaults = RLHFConfig()
    for f in dataclasses.fields(RLHFConfig):
        if f.name not in PRESETS[algorithm]:
            assert getattr(c, f.name) == getattr(defaults, f.name), f.name
    other = RLHFConfig.preset(algorithm, steps=7, clip=0.11, beta=0.9, group_size=4)
    assert (other.steps, other.clip, other.beta, other.group_size, other.algorithm) == (
        7,
        0.11,
        0.9,
        4,
        algorithm,
    )  # sizes do not make another algorithm
    assert RLHFConfig.preset(algorithm, group_ddof=0).algorithm == "custom"
    assert dataclasses.replace(c, steps=3).algorithm == algorithm


def test_presets_of_other_configurations_and_unknown_ones():
    @dataclasses.dataclass
    class Mine(RLHFConfig):
        beta: float = 0.7
        clip: float = 0.3
        steps: int = 5

    grpo, rloo = Mine.preset("grpo"), Mine.preset("rloo")
    assert type(grpo) is Mine and (grpo.beta, grpo.clip, grpo.steps) == (
        0.04,
        0.2,
        5,
    )  # the preset beats the class
    assert (
        rloo.beta == 0.7 and Mine.preset("rloo", beta=0.2).beta == 0.2
    )  # which it leaves alone where it says nothing
    assert RLHFConfig().algorithm == Mine().algorithm == "ppo"
    with pytest.raises(ValueError, match="no preset 'dqn': choose one of ppo, grpo.*remax"):
        RLHFConfig.preset("dqn")
    with pytest.raises(TypeError, match="algorithm"):
        RLHFConfig(algorithm="grpo")
    with pytest.raises(AttributeError):
        RLHFConfig().algorithm = "grpo"


def aliases_of_tables():
    "From config.py: the names that each alias lists for an editor, and its table at run time."
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            break
    listed = {x.targets[0].id: ast.literal_eval(x.value.slice) for x in node.body}
    tables = {}
    for alias in node.orelse:  # Alias = Annotated[str, OneOf(TABLE)]
        _, one_of = alias.value.slice.elts
        tables[alias.targets[0].id] = one_of.args[0].id
    return listed, tables


def test_an_editor_completes_the_names_of_every_table():
    listed, tables = aliases_of_tables()
    assert listed.keys() == tables.keys() and len(tables) == 7
    for alias, table in tables.items():
        missing = [name for name in getattr(config, table) if name not in listed[alias]]
        gone = [name for name in listed[alias] if name not in getattr(config, table)]
        where = f"the Literal {alias} in nbs/reference/config.ipynb (instruct_goose/config.py)"
        assert not missing, f"{table} has {missing}: add them to {where}"
        assert not gone, f"{table} no longer has {gone}: take them out of {where}"


def test_settings_that_name_an_entry_of_a_table_are_annotated_with_its_alias():
    used = {
        x.annotation.id
        for x in ast.walk(ast.parse(inspect.getsource(RLHFConfig)))
        if isinstance(x, ast.AnnAssign) and isinstance(x.annotation, ast.Name)
    }
    assert used >= {"Advantage", "Level", "Surrogate", "Aggregation", "KLGradient"}


HINTS = dict(
    gradient_accumulation_steps="micro_batch_size",
    output_dir="train_in",
    save_steps="save_every",
    logging_steps="every iteration",
    warmup_ratio="warmup_steps",
    top_p="whole distribution",
    use_vllm="sampler",
    optim="optimizer",
    max_prompt_length="long_rows",
    normalize_advantages="whiten_advantages",
    top_entropy_quantile="high_entropy",
    off_policy_mask_threshold="sequence_masked",
    save_model="save_pretrained",
    resume_from_checkpoint="resume=True",
    GRPOTrainer="RLHFTrainer",
    batchsize="batch_size",
    batch_sise="did you mean batch_size",
    num_train_epochs="prompts × group_size / batch_size",
)


def test_words_of_other_libraries_are_answered_all_at_once(unchecked):
    with unchecked(), pytest.raises(TypeError) as e:
        RLHFConfig(lr=1e-3, **dict.fromkeys(HINTS, 1))
    parts = str(e.value).removeprefix("RLHFConfig has ").split("; ")
    assert len(parts) == len(HINTS)
    for part, (name, ours) in zip(parts, HINTS.items(), strict=True):
        assert part.startswith(f"no argument {name!r}") and ours in part
    with pytest.raises(
        AttributeError, match="no attribute 'save_model': here it is called save_pretrained"
    ):
        RLHFTrainer.__new__(RLHFTrainer).save_model()
    with pytest.raises(
        AttributeError, match="no attribute 'num_generations': here it is called group_size"
    ):
        RLHFConfig().num_generations  # noqa: B018


def test_a_configuration_shows_what_differs_from_the_defaults():
    @dataclasses.dataclass
    class Mine(RLHFConfig):
        more: int = 3

    assert (
        repr(RLHFConfig()) == "RLHFConfig()"
        and repr(RLHFConfig(beta=0.2, steps=50)) == "RLHFConfig(beta=0.2)"
    )
    assert repr(Mine(more=4, gamma=0.9)) == "Mine(gamma=0.9, more=4)" and repr(
        RLHFConfig.preset("grpo")
    ) == repr(eval(repr(RLHFConfig.preset("grpo"))))
    assert issubclass(Mine, Settings)


@pytest.mark.parametrize(
    "schedule, factors",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_climbs_before_its_schedule_begins(schedule, factors):
    c = RLHFConfig(steps=6, warmup_steps=2, lr_schedule=schedule)
    assert [lr_factor(c, i) for i in range(6)] == pytest.approx(factors, abs=1e-6)
    with pytest.raises(ValueError, match="warmup_steps is 50: it must be below steps, 50"):
        RLHFConfig(warmup_steps=50)


def test_the_value_clip_is_on_unless_somebody_says_otherwise():
    "As lesson 9 has it."
    assert RLHFConfig().value_clip == 0.2
