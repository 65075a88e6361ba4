"""The package as an importer meets it: documentation, what an import costs, and the wheel."""

import ast
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
package = root / "instruct_goose"
sys.path.insert(0, str(root / "docs"))
from api import GLOSSARY, doc, fields, is_dataclass, parameters  # noqa: E402
from lessons import read_pages  # noqa: E402

LAZY = {"gymnasium", "matplotlib", "plotly", "nbdev", "IPython", "sphinx", "vaderSentiment"}


PROMISED = """PPOLoss Agent RewardModel PairwiseLoss PairDataset PromptDataset RLHFConfig RLHFTrainer create_reference_model
    response_mask masked_mean masked_var whiten aggregate token_logprobs entropy k1 k2 k3 exact_kl log_ratio token_kl sequence_kl
    kl_in_reward kl_in_loss adaptive_beta discounted_returns gae group_advantages probability_ratio policy_loss value_loss ppo_loss"""

NAMES = set(
    re.findall(r"\w+ as (\w+)", (package / "__init__.pyi").read_text("utf-8"))
)  # what `instruct_goose` itself exports


def is_public_method(method: ast.FunctionDef) -> bool:
    "What a user calls; a property's setter is described by its getter."
    decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
    if any(name.endswith(".setter") for name in decorators):
        return False
    return method.name[0] != "_" or method.name == "__init__"


def definitions():
    "(module.name, node, whether a method) of everything public that the lessons export."
    for page in read_pages()[1]:
        for cell in page.cells:
            for node in cell.documented:
                yield f"{page.module}.{node.name}", node, False
                if isinstance(node, ast.ClassDef):
                    for m in node.body:
                        if isinstance(m, ast.FunctionDef) and is_public_method(m):
                            yield f"{page.module}.{node.name}.{m.name}", m, True


public = list(definitions())
# methods of a base class that has said what they are for
INHERITED = {
    "__init__",
    "forward",
    "conflicts",
    "on_iteration",
    "rollout",
    "ask_rewards",
    "annotate",
    "advantages",
    "loss",
    "update",
}
said = [
    (name, n)
    for name, n, method in public
    if name.split(".")[-2 if method else -1] in NAMES and ".compat." not in name
]


@pytest.mark.parametrize("node", [n for _, n in said], ids=[name for name, _ in said])
def test_public_names_have_a_docstring(node):
    if node.name not in INHERITED:
        assert doc(node), "no docstring"


top = [
    (name, n)
    for name, n, _ in public
    if set(name.split(".")) & set(PROMISED.split()) and ".compat." not in name
]


@pytest.mark.parametrize("node", [n for _, n in top], ids=[name for name, _ in top])
def test_parameters_of_the_public_names_are_documented(node):
    if isinstance(node, ast.ClassDef):
        rows = fields(node, node.notes) if is_dataclass(node) else []
    else:
        rows = parameters(node, node.notes)
    rows = [r for r in rows if r["name"] not in ("self", "cls") and r["name"][0] not in "_*"]
    assert not (bare := [r["name"] for r in rows if not (r["what"] or r["name"] in GLOSSARY)]), (
        f"no comment beside {bare}"
    )
    assert not (bare := [r["name"] for r in rows if not r["type"]]), f"no type for {bare}"


def run_python(code: str, **kwargs):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_offline_and_lazy():
    out = run_python(f"""
import importlib, pkgutil, socket, sys
def no(*args, **kwargs): raise OSError("the network was asked for")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = no
import instruct_goose
for m in pkgutil.walk_packages(instruct_goose.__path__, "instruct_goose."): importlib.import_module(m.name)
print(sorted({LAZY} & set(sys.modules)))""")
    assert out.strip() == "[]"


def test_public_names_import_from_the_top():
    import instruct_goose

    assert not [n for n in PROMISED.split() if not hasattr(instruct_goose, n)]
    assert set(PROMISED.split()) <= set(instruct_goose.__all__)
    assert all(hasattr(instruct_goose, n) for n in instruct_goose.__all__)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"  # setuptools writes build/ beside what it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((root / name).read_bytes())
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            to = source / "instruct_goose" / path.relative_to(package)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(source),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names} == {
        "instruct_goose",
        f"instruct_goose-{wheel.name.split('-')[1]}.dist-info",
    }
    inside = {n for n in names if n.startswith("instruct_goose/")}
    assert inside == {
        p.relative_to(root).as_posix()
        for p in package.rglob("*")
        if p.suffix in (".py", ".pyi", ".html", ".yaml", ".slurm", ".json") or p.name == "py.typed"
    }
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.deep
def test_wheel_runs_in_an_empty_environment(wheel, tmp_path):
    """The packages that it requires are lent by this environment (a .pth file), so that no network is needed;
    instruct_goose itself comes from the wheel alone."""
    venv.create(tmp_path / "env", with_pip=False)
    bin = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(bin / "python"),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def where():
        return subprocess.run(
            [bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
        ).stdout.strip()

    lent = next(p for p in sys.path if p.endswith("site-packages"))
    (Path(where()) / "lent.pth").write_text(lent + "\n")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import instruct_goose; print(instruct_goose.__file__); from instruct_goose import PPOLoss, RLHFTrainer, Agent"
    done = subprocess.run(
        [bin / "python", "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    done = subprocess.run(
        [bin / "instruct-goose", "--help"], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0 and "quickstart" in done.stdout, done.stderr


@pytest.mark.deep
def test_type_checkers_and_editors_find_an_editable_install(tmp_path):
    "In an environment of its own, whose other packages this one lends: a path in site-packages leads to the sources, no import hook."
    source, env = tmp_path / "source", tmp_path / "env"
    for path in [
        *package.rglob("*"),
        root / "pyproject.toml",
        root / "README.md",
        root / "LICENSE",
    ]:
        if path.is_file() and "__pycache__" not in path.parts:
            (to := source / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    venv.create(env, with_pip=False)
    python = env / ("Scripts" if os.name == "nt" else "bin") / "python"
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    there = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            env=clean,
        ).stdout.strip()
    )
    (there / "lent.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--ignore-installed",
            "-e",
            str(source),
        ],
        capture_output=True,
        text=True,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    assert str(source) in "".join(p.read_text() for p in there.glob("*.pth"))
    (tmp_path / "script.py").write_text(
        "from instruct_goose import RLHFConfig\nreveal_type(RLHFConfig(steps=2).steps)\nRLHFConfig(steps='two')\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--level",
            "error",
            "--pythonpath",
            str(python),
            str(tmp_path / "script.py"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean,
    )
    assert "could not be resolved" not in done.stdout and "reportArgumentType" in done.stdout, (
        done.stdout
    )
    names = subprocess.run(
        [
            sys.executable,
            "-c",
            "import jedi, sys; print([c.name for c in jedi.Script('import instruct_goose\\ninstruct_goose.RLHFC',"
            "environment=jedi.create_environment(sys.argv[1], safe=False)).complete(2, 20)])",
            str(env),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean,
    )
    assert "'RLHFConfig'" in names.stdout, names.stderr


@pytest.mark.parametrize(
    "name, ours",
    [
        ("GRPOTrainer", "RLHFTrainer"),
        ("PPOConfig", "RLHFConfig"),
        ("DPOTrainer", "train_dpo"),
        ("SFTTrainer", "train_lm"),
    ],
)
def test_a_class_of_trl_is_answered_with_ours(name, ours):
    with pytest.raises(ImportError, match=f"{name}.*{ours}"):
        exec(f"from instruct_goose import {name}")
