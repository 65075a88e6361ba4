"""The rules of the house that import-linter and ruff do not know: types, names, a test and a notebook for each module.

The layers stand in pyproject.toml, under tool.importlinter; here they are held against imports that break them.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
package = root / "instruct_goose"
LINTER = Path(sys.executable).parent / "lint-imports"
MODULES = sorted(
    path
    for path in package.rglob("*.py")
    if path.name != "_modidx.py" and "configs" not in path.parts
)
each = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: path.relative_to(package).as_posix()
)


def module_name(path: Path) -> str:
    "instruct_goose/objective/kl.py -> objective.kl"
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


# --- layers -----------------------------------------------------------------------------------------------------------
def lint(directory: Path) -> subprocess.CompletedProcess:
    "Hold the package in a directory against the contracts of pyproject.toml."
    return subprocess.run(
        [LINTER, "--no-cache", "--config", root / "pyproject.toml"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path):
    "A copy of the package's Python files, into which a test may write."
    shutil.copytree(package, tmp_path / "instruct_goose", ignore=shutil.ignore_patterns("*.json"))
    return tmp_path


def test_imports_point_down():
    done = lint(root)
    assert done.returncode == 0, done.stdout


UP = "from instruct_goose.training.trainer import RLHFTrainer"
# what is written at the end of a module, and how the linter calls the import that it complains of
PLANTED = {
    "a higher layer": (
        "objective/kl.py",
        UP,
        "instruct_goose.objective.kl -> instruct_goose.training.trainer",
    ),
    "a higher layer, inside a function": (
        "rollouts/rollout.py",
        f"def late():\n    {UP}",
        "instruct_goose.rollouts.rollout -> instruct_goose.training.trainer",
    ),
    "a higher layer, for type checkers": (
        "core/files.py",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {UP}",
        "instruct_goose.core.files -> instruct_goose.training.trainer",
    ),
    "a neighbour": (
        "tasks/probes.py",
        "import instruct_goose.compat.trl",
        "instruct_goose.tasks.probes -> instruct_goose.compat.trl",
    ),
    "a circle in a folder, inside a function": (
        "objective/masks.py",
        "def late():\n    from . import kl",
        "No module needs itself, near or far BROKEN",
    ),
    "the face": (
        "cli/main.py",
        "def late():\n    from instruct_goose import __version__",
        "instruct_goose.cli.main -> instruct_goose ",
    ),
}


@pytest.mark.parametrize("file, code, complaint", PLANTED.values(), ids=PLANTED)
def test_an_import_that_breaks_a_layer_is_found(copy, file, code, complaint):
    with (copy / "instruct_goose" / file).open("a", encoding="utf-8") as module:
        module.write(f"\n\n{code}\n")
    done = lint(copy)
    assert done.returncode == 1
    assert complaint in re.sub(r"\s+", " ", done.stdout), done.stdout


def test_a_folder_that_no_layer_names_is_found(copy):
    (copy / "instruct_goose/attic").mkdir()
    (copy / "instruct_goose/attic/__init__.py").touch()
    done = lint(copy)
    assert done.returncode == 1 and "attic" in done.stdout


# --- types ------------------------------------------------------------------------------------------------------------
def outer_functions(path: Path):
    "Functions and methods of a module, without those inside of functions."
    todo = [(tree_of(path), "")]
    while todo:
        node, where = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, f"{where}{child.name}"
            elif isinstance(child, ast.ClassDef):
                todo.append((child, f"{where}{child.name}."))
            else:
                todo.append((child, where))


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    "All but self and cls."
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [x for x in every if x.arg not in ("self", "cls")]


# A parameter may be of any type where it comes from a foreign place, and for no other reason.
MAY_BE_ANY = {
    "what a file, a user's function or a reader's cell returned": """
        tasks.probes.values_at(agent) core.checks.value_error(hint) core.files._cell(x) core.files.write_json(value)
        core.files.nan_to_none(x) cli.main.flag_type(hint) doctor.report._cell_text(x)
        exercises._kept(x) exercises._value(x) exercises.check(answer)
        exercises._Watch.__init__(answer) rollouts.rewards.copy_containers(x)
        rollouts.rewards.as_number(x) rollouts.rewards.check_scores(scores)
        recipes.inputs.with_arguments(row)
        data.files.batch_rows(batches) data.load._object_rows(source)
        rollouts.rewards.as_score_list(scores) rollouts.rewards._finite_score(score)
        rollouts.environments.finished_value(x) rollouts.environments.observation_of(first)
        rollouts.environments.step_result(result) rollouts.environments.observation_text(observation)""",
    "prompts in one of several forms: text, ids, messages, rows, tensors": """
        models.rendering.is_conversation(prompt) models.rendering.template_columns(row)
        models.rendering.prompt_and_answer(row) models.rendering.pair_parts(pair)
        recipes.training.first_of(prompts) rollouts.prompts.take_prompt(row)
        rollouts.prompts.data_columns(prompts) rollouts.prompts.prompt_chunks(prompts)
        rollouts.environments.prompt_row(prompt)
        rollouts.prompts.drop_long_prompts(prompts) rollouts.prompts.is_short_enough(prompt)
        training.trainer.RLHFTrainer.is_short_enough(prompt) training.trainer.RLHFTrainer.prompts_that_fit(prompts)""",
    "what a program under test has made: any value": """
        rollouts.verifiers.value_from(data) rollouts.verifiers.CodeTest.passes(answer)""",
    "objects of libraries that have no types, or are not installed": """
        compat.trl.config_from_args(args) compat.trl.dpo_from_trl(args)
        compat.trl.sft_from_trl(args) compat.trl.reward_model_from_trl(args)
        compat.trl.TRLArguments.__init__(args) compat.trl.TRLArguments.value(default)
        compat.trl._plain(value) core.processes.full_tensor(x) lesson.draw_tokens(ax)
        lesson.drag(fig) models.adapters.unwrap_peft(model) models.decoding.conv1d_layer(part)
        models.decoding.OwnSteps.__init__(past) models.decoding.StaticSteps.__init__(past)
        models.decoding.PreallocatedLayer.__init__(past) models.decoding._faster_step(past)
        objective.logprobs_in_pieces.LogprobsInPieces.forward(ctx)
        objective.logprobs_in_pieces.LogprobsInPieces.backward(ctx)
        rollouts.vllm.to_response(completion) rollouts.vllm.VLLMEngine.__init__(llm)
        rollouts.vllm.load_into(model_runner) rollouts.vllm.repack_tied_head(model)""",
    "environments of any protocol, told apart by their methods": """
        rollouts.environments.public_methods(instance) rollouts.environments.adapt_environment(instance)
        rollouts.environments.step_result(instance) rollouts.environments.observation_text(instance)
        rollouts.environments.MessageEnvironment.__init__(instance)
        rollouts.environments.StepEnvironment.__init__(instance)
        rollouts.environments.ToolEnvironment.__init__(instance)""",
}


@each
def test_every_parameter_has_a_type(path):
    named = {name for names in MAY_BE_ANY.values() for name in names.split()}
    missing = []
    for function, where in outer_functions(path):
        for parameter in parameters_of(function):
            name = f"{module_name(path)}.{where}({parameter.arg})"
            annotation = parameter.annotation
            if annotation is None or ast.unparse(annotation) == "Any" and name not in named:
                missing.append(name)
    assert not missing


# --- names, tests, notebooks ------------------------------------------------------------------------------------------
def own_lines(path: Path) -> list[str]:
    "The lines of a module's cells, without what nbdev writes above and between them."
    lines = path.read_text("utf-8").splitlines()
    cells = [n for n, line in enumerate(lines) if re.match(r"# %% \S+\.ipynb #", line)]
    return [line for n, line in enumerate(lines) if not cells or n > cells[0] and n not in cells]


@each
def test_lines_are_short(path):
    assert not [line for line in own_lines(path) if len(line) > 100]


def test_each_module_has_its_test_file():
    missing = []
    for path in MODULES:
        test = root / "tests" / path.relative_to(package).with_name(f"test_{path.name}")
        if not path.name.startswith("__") and not test.exists():
            missing.append(f"{module_name(path)}: {test.relative_to(root)} is missing")
    assert not missing


@each
def test_nothing_private_crosses_folders(path):
    "No name with an underscore is imported from another folder, or read off a module of one."
    ours = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and (node.level > 1 or (node.module or "").startswith("instruct_goose"))
    ]
    imported = [alias for node in ours for alias in node.names]
    assert not [alias.name for alias in imported if re.match("_[^_]", alias.name)]
    modules = {alias.asname or alias.name for alias in imported if alias.name.islower()}
    assert not [
        ast.unparse(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and re.match("_[a-z]", node.attr)
        and ast.unparse(node.value) in modules
    ]


def test_no_module_is_left_without_its_notebook():
    orphans = []
    for path in MODULES:
        made_from = re.search(r"File to edit: (\S+\.ipynb)", path.read_text("utf-8"))
        if made_from and not (path.parent / made_from[1]).resolve().exists():
            orphans.append(module_name(path))
    assert not orphans


def test_git_does_not_ignore_the_package():
    done = subprocess.run(["git", "check-ignore", "instruct_goose"], cwd=root, capture_output=True)
    assert done.returncode != 0


def test_no_test_file_registers_more_losses_when_it_is_collected():
    """A plug-in that is imported at the top stands in the tables of every test after it.

    A fixture imports it, and takes its entries out again (tests/compat/test_losses.py).
    """
    early = []
    for path in (root / "tests").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            early += [path.name for name in names if name == "instruct_goose.compat.losses"]
    assert not early
