"""Write settings.ini, nbdev 2's format for tools that read it, from pyproject.toml: `python docs/settings_ini.py`; --check only compares."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "settings.ini"
LICENSES = {"Apache-2.0": "apache2"}  # as nbdev calls them
HEAD = """[DEFAULT]
# Made from pyproject.toml by docs/settings_ini.py: change it there, then `make save`.
"""


def settings_ini() -> str:
    "The text of settings.ini, from pyproject.toml and the package's version."
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = pyproject["project"]
    nbdev = pyproject["tool"]["nbdev"]
    extras = project["optional-dependencies"]
    repository = project["urls"]["Repository"]
    user, name = repository.split("/")[-2:]
    author = project["authors"][0]["name"]
    init = (ROOT / "instruct_goose/__init__.py").read_text("utf-8")
    keywords = [keyword.replace(" ", "-") for keyword in project["keywords"]]
    status = next(c for c in project["classifiers"] if c.startswith("Development Status"))
    groups = [
        {
            "repo": name,
            "lib_name": project["name"],
            "version": re.search(r'__version__ = "(.+)"', init)[1],
            "min_python": project["requires-python"].removeprefix(">="),
            "license": LICENSES[project["license"]],
            "black_formatting": nbdev["black_formatting"],
        },
        {
            "doc_path": nbdev["doc_path"],
            "lib_path": nbdev["lib_path"],
            "nbs_path": nbdev["nbs_path"],
            "recursive": True,
            "tst_flags": "notest",
            "put_version_in_init": True,
            "update_pyproject": nbdev["update_pyproject"],
        },
        {
            "branch": "main",
            "custom_sidebar": False,
            "doc_host": f"https://{user}.github.io",
            "doc_baseurl": f"/{name}",
            "git_url": repository,
            "title": project["name"],
        },
        {
            "audience": "Education",
            "author": author,
            "author_email": "",
            "copyright": author,
            "description": project["description"],
            "keywords": " ".join(keywords),
            "language": "English",
            "status": re.search(r"\d", status)[0],
            "user": user,
        },
        {
            "requirements": " ".join(project["dependencies"]),
            "dev_requirements": " ".join(extras["dev"]),
            "docs_requirements": " ".join(extras["docs"]),
            "bench_requirements": " ".join(extras["bench"]),
            "console_scripts": "=".join(*project["scripts"].items()),
        },
    ]
    texts = []
    for group in groups:
        texts.append("".join(f"{key} = {value}".rstrip() + "\n" for key, value in group.items()))
    return HEAD + "\n".join(texts)


def main():
    if "--check" not in sys.argv:
        FILE.write_text(settings_ini(), "utf-8")
    elif FILE.read_text("utf-8") != settings_ini():
        sys.exit("settings.ini is not what pyproject.toml says: run python docs/settings_ini.py")


if __name__ == "__main__":
    main()
