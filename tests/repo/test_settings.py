"""pyproject.toml is the source; settings.ini, constraints.txt and the workflows say the same."""

import ast
import configparser
import importlib.metadata as metadata
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "docs")]

from settings_ini import settings_ini  # noqa: E402

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


def test_settings_ini_is_made_from_pyproject():
    assert (root / "settings.ini").read_text("utf-8") == settings_ini(), (
        "run python docs/settings_ini.py"
    )


def test_nbdev_2_finds_what_it_reads():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "settings.ini", "utf-8")
    needed = """repo branch user author author_email copyright keywords title audience language status
        recursive tst_flags custom_sidebar lib_name lib_path nbs_path doc_path version min_python
        license requirements dev_requirements console_scripts"""
    assert not set(needed.split()) - parser["DEFAULT"].keys()


def test_extras_are_those_that_contributing_lists():
    said = (root / "CONTRIBUTING.md").read_text("utf-8")
    assert set(extras) == {
        "verifiers",
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
    places = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]  # not what setuptools brings
    found = metadata.distributions(path=list(dict.fromkeys(places)))
    installed = {normal(d.metadata["Name"]): d.version.split("+")[0] for d in found}
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
    local = {
        "device",
        "bench",
        "same_name_formulas",
        "traced_here",
        "tasks",
        "page_tensors",
        "IPython",
    } | {p.stem for f in (folder, "docs", "evidence", "bench") for p in (root / f).rglob("*.py")}
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
        "engines",
        "launchers",
        "clean",
        "coverage",
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
