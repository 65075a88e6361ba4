"""Read the notebooks in nbs/ as pages: title, shelf, minutes, cells with their directives. For the site and the README."""

import ast
import configparser
import io
import json
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = configparser.ConfigParser(interpolation=None)
SETTINGS.read(ROOT / "settings.ini", "utf-8")
REPO, BRANCH = (
    SETTINGS["DEFAULT"]["git_url"],
    SETTINGS["DEFAULT"]["branch"],
)  # every link to the repository is made from these
ONLINE = False  # can readers reach REPO? Only then do pages lead to Colab and to files of the repository; until then the site has copies of these files
SHELVES = {"learn": "Learn", "guides": "Guides", "reference": "Reference"}
COURSE = {
    1: "First steps",
    4: "The objective",
    13: "The model and the trainer",
    19: "Does it work?",
    25: "Verifiable rewards and agents",
}  # the first lesson of each part
GUIDES = {  # the groups of the second shelf; a guide that is not named here stands under "More"
    "Models and memory": [
        "real_model",
        "first_settings",
        "lora",
        "cost",
        "one_gpu",
        "resume",
        "trackers",
        "command_line",
    ],
    "Sampling and scale": ["vllm", "asynchronous", "several_processes", "fsdp", "larger_libraries"],
    "Rewards and data": [
        "your_data",
        "your_stages",
        "reward_model_training",
        "reward_shaping",
        "multi_turn",
        "environments",
        "verifiers",
        "kto",
        "film_reviews",
        "real_reviews",
    ],
    "Algorithms": [
        "dpo",
        "side_by_side",
        "dynamic_sampling",
        "continuous_actions",
        "classic_control",
        "playground",
        "details",
    ],
    "Recipes": [
        "smollm_recipes",
        "smollm_sentiment",
        "smollm_answers",
        "smollm_reviews",
        "hub_recipes",
    ],
    "Debugging": ["doctor", "logged_metrics", "microscope", "invariances", "bug_hunt"],
    "From other libraries": [
        "from_trl",
        "from_value_head",
        "more_losses",
        "from_torchtune",
        "from_ding",
        "from_goose",
        "same_name",
        "pseudo_code",
    ],
    "Practice": ["questions", "exercises", "projects"],
    "Extending": ["how_the_trainer_is_made", "page_tensors"],
}
PACKAGES = [  # from the bottom of the house to its top
    "core",
    "objective",
    "config",
    "models",
    "data",
    "rollouts",
    "training",
    "supervised",
    "doctor",
    "runs",
    "tasks",
    "compat",
    "recipes",
    "cli",
]
LOOK_UP = {  # pages of the third shelf that are no notebooks; the builder makes them
    "Look up": ["notation", "playground", "paste", "glossary", "api", "quiz", "figures", "tables"],
    "The project": ["know", "reports", "speed", "compare", "changelog", "contributing"],
}
MARKS = {  # who may leave out what, as a line above the course
    "For PPO alone": "skip 11 and 12.",
    "For GRPO and its family": "skip 7, 9 and 12; read 11 after 8.",
    "For reward models and DPO": "read 3 to 6, 12, 14, 17 and 19.",
    "If you know PPO from control tasks": "begin with 3, and skip 7 to 9.",
}
KNOWN = {  # the directives that mean something here; any other is a spelling mistake
    "default_exp",
    "export",
    "exports",
    "exporti",
    "hide",
    "code-fold",
    "code-summary",
    "fig-cap",
    "classes",
    "echo",
    "output",
    "eval",
}
STAGES = {  # what one step of RLHF does, and the lesson that explains it; drawn at the head of those lessons
    "learn/rollout": "rollout",
    "learn/reward_model": "score",
    "learn/kl": "KL penalty",
    "learn/advantages": "advantages",
    "learn/policy_loss": "ratio and clip",
    "learn/value_loss": "value loss",
    "learn/ppo": "PPO loss",
    "learn/trainer": "update",
}


def comments(source: str) -> dict[int, str]:
    "line number -> its comment; a line of nothing but comment continues the one above."
    found = {}
    alone = set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type == tokenize.COMMENT:
            found[t.start[0]] = t.string.lstrip("# ").strip()
            if not t.line[: t.start[1]].strip():
                alone.add(t.start[0])
    for n in sorted(alone, reverse=True):
        if n - 1 in found:
            found[n - 1] += " " + found.pop(n)
    return found


@dataclass
class Cell:
    kind: str  # "code" or "markdown"
    source: str  # without its directives
    directives: dict  # name -> value, "" without one
    outputs: list
    id: str

    @cached_property
    def exported(self) -> list[ast.stmt]:
        "The statements of an exporting cell; each carries the comments of the cell as `notes`."
        if not {"export", "exports", "exporti"} & self.directives.keys():
            return []
        notes = comments(self.source)
        tree = ast.parse(self.source)
        for node in ast.walk(tree):
            node.notes = notes
        return tree.body

    @property
    def defined(self) -> list[ast.stmt]:
        "The public functions and classes that an exporting cell defines, and the methods it adds to a class."
        if "exporti" in self.directives:
            return []
        return [
            s
            for s in self.exported
            if isinstance(s, ast.FunctionDef | ast.ClassDef) and s.name[0] != "_"
        ]

    @property
    def documented(self) -> list[ast.stmt]:
        "Those of them that stand alone: an added method stands with its class."
        return [s for s in self.defined if not patched(s)]


def patched(node: ast.stmt) -> str | None:
    "The class that a function is added to: @patch above, the class as the annotation of its self."
    if not isinstance(node, ast.FunctionDef) or "patch" not in [
        ast.unparse(d) for d in node.decorator_list
    ]:
        return None
    return ast.unparse(node.args.args[0].annotation)


@dataclass
class Page:
    path: Path  # nbs/learn/06_kl.ipynb
    part: str  # the shelf: "learn", "guides", "reference", "" of the front page and the notation
    url: str  # "learn/kl", no ending
    title: str
    subtitle: str
    minutes: int | None  # reading time that the lesson states
    module: str | None  # "instruct_goose.objective.kl"
    cells: list[Cell] = field(repr=False)

    @property
    def number(self) -> int | None:
        "Which lesson of the course it is."
        return int(self.path.name[:2]) if self.part == "learn" else None

    @property
    def group(self) -> str:
        "The heading that it stands under on its shelf: a part of the course, a kind of guide, a package."
        if self.part == "learn":
            return COURSE[max(first for first in COURSE if first <= self.number)]
        if self.part == "guides":
            return next((name for name, stems in GUIDES.items() if self.path.stem in stems), "More")
        if self.part == "reference":  # nbs/reference/config.ipynb has no package
            return self.path.relative_to(ROOT / "nbs/reference").with_suffix("").parts[0]
        return "Look up"

    @property
    def order(self) -> tuple:
        "Its place among all pages."

        def known(x, names):
            return names.index(x) if x in names else len(names)

        shelf = known(self.part, list(SHELVES))
        if self.part == "guides":
            return (
                shelf,
                known(self.group, list(GUIDES)),
                known(self.path.stem, GUIDES.get(self.group, [])),
                self.path.name,
            )
        return (
            shelf,
            known(self.group, PACKAGES) if self.part == "reference" else 0,
            0,
            self.path.name,
        )

    @property
    def names(self) -> list[str]:
        "Public names that the page exports, in order."
        return [n.name for c in self.cells for n in c.documented]


def plain(name: str) -> str:
    "02_kl -> kl"
    return re.sub(r"^\d+_", "", name)


def unquoted(value: str) -> str:
    "A value without the quotation marks that YAML wants around a colon."
    is_quoted = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in value[1:-1]
    return value[1:-1] if is_quoted else value


def read_cell(raw: dict, where: str) -> Cell:
    source = "".join(raw["source"])
    directives = {}
    if raw["cell_type"] == "code":
        lines = source.splitlines()
        while lines and (found := re.match(r"#\|\s*([\w-]+):?\s*(.*)", lines[0])):
            directives[found[1]] = unquoted(found[2].strip())
            lines.pop(0)
        source = "\n".join(lines).strip("\n")
        if unknown := directives.keys() - KNOWN:
            raise SystemExit(
                f"{where}, cell {raw.get('id')}: unknown directive {sorted(unknown)}; known are {sorted(KNOWN)}"
            )
    return Cell(
        raw["cell_type"],
        source,
        directives,
        shown_outputs(raw.get("outputs", [])),
        raw.get("id", ""),
    )


def shown_outputs(outputs: list) -> list:
    "Without progress bars, which say nothing on paper and differ from run to run."
    return [o for o in outputs if not (o.get("name") == "stderr" and "\r" in "".join(o["text"]))]


def read_page(path: Path) -> Page:
    rel = path.relative_to(ROOT / "nbs")
    cells = [read_cell(c, str(rel)) for c in json.loads(path.read_text("utf-8"))["cells"]]
    text = next(
        (c.source for c in cells if c.kind == "markdown" and c.source.startswith("# ")), None
    )
    title = text.splitlines()[0][2:].strip() if text else plain(path.stem)
    subtitle = re.search(r"^> (.+)$", text or "", re.M)
    everything = "\n".join(c.source for c in cells if c.kind == "markdown")
    minutes = re.search(r"\*\*Time\*\*:?\s*:?\s*(?:about |some )?(\d+) min", everything)
    module = next(
        (c.directives["default_exp"] for c in cells if "default_exp" in c.directives), None
    )
    part = rel.parts[0] if len(rel.parts) > 1 else ""
    return Page(
        path,
        part,
        "/".join(plain(p) for p in rel.with_suffix("").parts),
        title,
        subtitle[1].strip() if subtitle else "",
        int(minutes[1]) if minutes else None,
        f"instruct_goose.{module}" if module else None,
        cells,
    )


@cache
def read_pages() -> tuple[Page, list[Page]]:
    "The front page, and the lessons in reading order."
    found = sorted(
        p
        for p in (ROOT / "nbs").rglob("*.ipynb")
        if not any(q[0] in "._" for q in p.relative_to(ROOT / "nbs").parts)
    )
    pages = [read_page(p) for p in found]
    nodes = {p.url: [n for c in p.cells for n in c.exported] for p in pages}

    def classes(nodes):
        return {n.name: n for n in reversed(nodes) if isinstance(n, ast.ClassDef)}

    everywhere = classes(
        [n for p in sorted(pages, key=lambda p: p.path) for n in nodes[p.url]]
    )  # the first of a name
    for own in nodes.values():
        for node in own:  # a method may be added in a later lesson than its class's
            if owner := patched(node):
                (classes(own).get(owner) or everywhere[owner]).body.append(node)
    index = [p for p in pages if p.url == "index"]
    if len(index) != 1:
        raise SystemExit("nbs/index.ipynb is missing")
    return index[0], sorted((p for p in pages if p.url != "index"), key=lambda p: p.order)


def target(page: Page, link: str) -> Path:
    "The file that a relative link in a page points at."
    return (page.path.parent / link).resolve()


def grouped(pages: list[Page], shelf: str) -> dict[str, list[Page]]:
    "heading -> its pages, of one shelf, in order."
    found = {}
    for p in pages:
        if p.part == shelf:
            found.setdefault(p.group, []).append(p)
    return found


def of_course(pages: list[Page]) -> list[Page]:
    return [p for p in pages if p.part == "learn"]


def long(minutes: int) -> str:
    "75 -> 1 h 15 min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
