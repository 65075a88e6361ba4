"""pyproject.toml is the source; settings.ini, constraints.txt and the workflows say the same."""

import ast
import configparser
import importlib.metadata as metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

root = Path(__file__).parents[2]
sys.path.insert(0, str(root))

from bench.environments import ENVIRONMENTS  # noqa: E402

pyproject = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
project, extras = pyproject["project"], pyproject["project"]["optional-dependencies"]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


constraints = {
    normal(n): v
    for n, v in (
        line.split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    )
}


def test_settings_ini_is_in_step():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "settings.ini", "utf-8")
    ini, nbdev = parser["DEFAULT"], pyproject["tool"]["nbdev"]
    version = re.search(r'__version__ = "(.+)"', (root / "instruct_goose/__init__.py").read_text())[
        1
    ]
    assert (ini["lib_name"], ini["version"], ini["description"]) == (
        project["name"],
        version,
        project["description"],
    )
    assert ini["min_python"] == project["requires-python"].removeprefix(">=")
    assert (
        ini["author"] == project["authors"][0]["name"]
        and ini["git_url"] == project["urls"]["Repository"]
    )
    assert ini["license"] == "apache2" and project["license"] == "Apache-2.0"
    for key in ("lib_path", "nbs_path", "doc_path"):
        assert ini[key] == nbdev[key], key
    for key, wanted in (
        ("requirements", project["dependencies"]),
        ("dev_requirements", extras["dev"]),
        ("docs_requirements", extras["docs"]),
        ("bench_requirements", extras["bench"]),
    ):
        assert ini[key].split() == wanted, key
    assert ini["console_scripts"] == "=".join(*project["scripts"].items())
    needed = "repo branch user author_email copyright keywords title audience language status recursive tst_flags custom_sidebar"
    assert not [k for k in needed.split() if k not in ini]  # what nbdev 2 reads


def test_extras_are_those_that_contributing_lists():
    said = (root / "CONTRIBUTING.md").read_text("utf-8")
    assert set(extras) == {
        "smollm",
        "peft",
        "trackers",
        "data",
        "control",
        "bench",
        "docs",
        "dev",
        "parity",
    }
    assert not [name for name in extras if f"`{name}`" not in re.search(r"- Extras.*", said)[0]]


def test_constraints_pin_everything_and_nothing_of_one_machine():
    wanted = project["dependencies"] + [r for extra in extras.values() for r in extra]
    direct = [normal(Requirement(r).name) for r in wanted]
    assert not [n for n in direct if n not in constraints and n != "setuptools"]
    assert constraints["torch"] == "2.13.0"
    assert not [
        v for v in constraints.values() if not re.fullmatch(r"[\w.]+", v)
    ]  # no +cpu, no paths
    for r in map(Requirement, wanted):
        if normal(r.name) in constraints:
            assert r.specifier.contains(constraints[normal(r.name)]), r


def test_the_environment_is_what_constraints_say():
    installed = {
        normal(d.metadata["Name"]): d.version.split("+")[0] for d in metadata.distributions()
    }
    assert not {n: (v, installed[n]) for n, v in constraints.items() if installed.get(n, v) != v}


def imported(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"instruct_goose"}


@pytest.mark.parametrize(
    "folder, requirements",
    [
        (
            "instruct_goose",
            project["dependencies"]
            + ["matplotlib-inline", "numpy"]  # which matplotlib, ipykernel and torch bring
            + [
                r
                for extra in ("control", "data", "peft", "smollm", "trackers")
                for r in extras.get(extra, [])
            ],
        ),  # imported where they are used
        (
            "tests",
            project["dependencies"]
            + extras["dev"]
            + extras["docs"]
            + extras["trackers"]
            + extras["smollm"]
            + ["numpy", "packaging", "beautifulsoup4"],
        ),
        ("docs", project["dependencies"] + extras["dev"] + extras["docs"] + ["docutils"]),
        (
            "bench",
            project["dependencies"]
            + extras["bench"]
            + [r for rs in ENVIRONMENTS.values() for r in rs if "==" in r],
        ),  # the peers, each where it is installed
    ],
)
def test_what_is_imported_is_required(folder, requirements):
    belongs = metadata.packages_distributions()
    allowed = {normal(Requirement(r).name) for r in requirements}
    local = {"device", "bench", "same_name_formulas", "traced_here", "tasks"} | {
        p.stem for f in (folder, "docs", "evidence", "bench") for p in (root / f).rglob("*.py")
    }
    stray = {}
    for path in (root / folder).rglob("*.py"):
        for name in imported(path.read_text("utf-8")) - local:
            if not allowed & {normal(d) for d in belongs.get(name, [name])}:
                stray.setdefault(name, path.name)
    assert not stray


def test_ci_calls_make_test():
    assert "exec make test" in (root / ".ci/run").read_text()
    assert ".ci/run" in (root / ".github/workflows/ci.yml").read_text()


def test_every_make_target_is_listed_and_real():
    text = (root / "Makefile").read_text()
    listed = set(re.findall(r"^([a-z]+):.*##", text, re.M))
    assert listed == {
        "help",
        "setup",
        "quickstart",
        "test",
        "deep",
        "lab",
        "docs",
        "save",
        "evidence",
        "bench",
        "parity",
        "clean",
        *(listed & {"fuzz", "mutations", "portable"}),
    }
    assert listed == set(re.search(r"\.PHONY: (.+)", text)[1].split())


def test_the_citation_names_this_version():
    import instruct_goose

    said = (root / "CITATION.cff").read_text("utf-8")
    assert (
        f"\nversion: {instruct_goose.__version__}\n" in said
        and f"\nrepository-code: {project['urls']['Repository']}\n" in said
    )
    assert f"\n## {instruct_goose.__version__}\n" in (root / "CHANGELOG.md").read_text("utf-8")
