"""Read the lessons in nbs/ as pages: title, part, minutes, cells with their directives. For the site and the README."""
import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {"0_start": "Start here", "": "Notation", "1_objective": "Objective", "2_models": "Models", "3_training": "Training", "4_practice": "Practice", "5_compat": "Coming from elsewhere"}
KNOWN = {  # the directives that mean something here; any other is a spelling mistake
    "default_exp", "export", "exports", "exporti", "hide", "code-fold", "code-summary", "fig-cap", "classes", "echo", "output", "eval"}
STAGES = {  # what one step of RLHF does, and the lesson that explains it; drawn at the head of those lessons
    "reference/models/tokens": "prompts", "learn/rollout": "rollout", "learn/reward_model": "score", "learn/kl": "KL penalty",
    "learn/advantages": "advantages", "learn/policy_loss": "ratio and clip", "learn/value_loss": "value loss",
    "learn/ppo": "PPO loss", "learn/trainer": "update"}
PIPELINE = {  # a whole run, and the lesson of each of its stages; PPO is the one that STAGES takes apart
    "reference/data/load": "data", "learn/sft": "SFT", "learn/reward_model": "reward model", "learn/trainer": "PPO", "learn/evaluation": "evaluation"}
START = {"learn/from_a_reward_to_ppo": "start from nothing", "learn/quickstart": "follow a run, step by step", "api": "look up a name"}
ROUTES = {  # who you are, what you will have at the end, and the lessons in between
    "New to RL": ("You know supervised deep learning. At the end you have trained a policy, and can say what each number of the run means.", [
        "learn/from_a_reward_to_ppo", "learn/hundred_lines", "learn/quickstart", "learn/kl", "learn/advantages",
        "learn/policy_loss", "learn/value_loss", "learn/ppo", "learn/trainer", "learn/reading_the_log"]),
    "PPO, and only PPO": ("You want every term of the loss, with the number it should give.", [
        "learn/from_a_reward_to_ppo", "learn/logprobs", "learn/kl", "learn/advantages", "learn/policy_loss",
        "learn/value_loss", "learn/ppo", "learn/trainer", "learn/hundred_lines"]),
    "GRPO in production": ("You run GRPO or a relative, and must know which mean, clip and KL, who writes, what is paid for, and whether it helped.", [
        "learn/masks", "learn/policy_loss", "learn/group", "learn/rollout", "guides/vllm", "guides/smollm_answers",
        "guides/reward_shaping", "guides/dynamic_sampling", "guides/doctor", "learn/evaluation", "learn/change_the_loss"]),
    "Preferences: reward models and DPO": ("You have pairs of which one is preferred. You want a judge of them, or a policy without one, and to see when a judge is pleased too much.", [
        "learn/reward_model", "guides/reward_model_training", "guides/kto", "learn/preference", "guides/dpo", "learn/your_own", "learn/evaluation",
        "guides/smollm_reviews"]),
    "From classical RL": ("You know PPO from games or robots, by CleanRL or Spinning Up. What stays, what sentences change, and what to watch instead of the return.", [
        "guides/details", "guides/classic_control", "learn/rollout", "learn/kl", "learn/group", "learn/reading_the_log"]),
    "Coming from TRL": ("You have a script. It runs here with other names, and you want to know what differs.", [
        "guides/from_trl", "reference/training/rewards", "reference/training/config", "guides/same_name", "learn/reading_the_log",
        "learn/bug_hunt", "learn/change_the_loss"])}
REPO = "https://github.com/instruct-goose/instruct_goose"


def comments(source: str) -> dict[int, str]:
    "line number -> its comment; a line of nothing but comment continues the one above."
    found, alone = {}, set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type == tokenize.COMMENT:
            found[t.start[0]] = t.string.lstrip("# ").strip()
            if not t.line[:t.start[1]].strip(): alone.add(t.start[0])
    for n in sorted(alone, reverse=True):
        if n - 1 in found: found[n - 1] += " " + found.pop(n)
    return found


@dataclass
class Cell:
    kind: str         # "code" or "markdown"
    source: str       # without its directives
    directives: dict  # name -> value, "" without one
    outputs: list
    id: str

    @cached_property
    def exported(self) -> list[ast.stmt]:
        "The statements of an exporting cell; each carries the comments of the cell as `notes`."
        if not {"export", "exports", "exporti"} & self.directives.keys(): return []
        notes, tree = comments(self.source), ast.parse(self.source)
        for node in ast.walk(tree): node.notes = notes
        return tree.body

    @property
    def defined(self) -> list[ast.stmt]:
        "The public functions and classes that an exporting cell defines, and the methods it adds to a class."
        if "exporti" in self.directives: return []
        return [s for s in self.exported if isinstance(s, ast.FunctionDef | ast.ClassDef) and s.name[0] != "_"]

    @property
    def documented(self) -> list[ast.stmt]:
        "Those of them that stand alone: an added method stands with its class."
        return [s for s in self.defined if not patched(s)]


def patched(node: ast.stmt) -> str | None:
    "The class that a function is added to: @patch above, the class as the annotation of its self."
    if not isinstance(node, ast.FunctionDef) or "patch" not in [ast.unparse(d) for d in node.decorator_list]: return None
    return ast.unparse(node.args.args[0].annotation)


@dataclass
class Page:
    path: Path            # nbs/learn/06_kl.ipynb
    part: str             # "1_objective"
    url: str              # "learn/kl", no ending
    title: str
    subtitle: str
    minutes: int | None   # reading time that the lesson states
    module: str | None    # "instruct_goose.objective.kl"
    cells: list[Cell] = field(repr=False)

    @property
    def names(self) -> list[str]:
        "Public names that the page exports, in order."
        return [n.name for c in self.cells for n in c.documented]


def plain(name: str) -> str:
    "02_kl -> kl"
    return re.sub(r"^\d+_", "", name)


def read_cell(raw: dict, where: str) -> Cell:
    source, directives = "".join(raw["source"]), {}
    if raw["cell_type"] == "code":
        lines = source.splitlines()
        while lines and (found := re.match(r"#\|\s*([\w-]+):?\s*(.*)", lines[0])):
            directives[found[1]] = found[2].strip()
            lines.pop(0)
        source = "\n".join(lines).strip("\n")
        if unknown := directives.keys() - KNOWN:
            raise SystemExit(f"{where}, cell {raw.get('id')}: unknown directive {sorted(unknown)}; known are {sorted(KNOWN)}")
    return Cell(raw["cell_type"], source, directives, shown_outputs(raw.get("outputs", [])), raw.get("id", ""))


def shown_outputs(outputs: list) -> list:
    "Without progress bars, which say nothing on paper and differ from run to run."
    return [o for o in outputs if not (o.get("name") == "stderr" and "\r" in "".join(o["text"]))]


def read_page(path: Path) -> Page:
    rel = path.relative_to(ROOT / "nbs")
    cells = [read_cell(c, str(rel)) for c in json.loads(path.read_text("utf-8"))["cells"]]
    text = next((c.source for c in cells if c.kind == "markdown" and c.source.startswith("# ")), None)
    title = text.splitlines()[0][2:].strip() if text else plain(path.stem)
    subtitle = re.search(r"^> (.+)$", text or "", re.M)
    everything = "\n".join(c.source for c in cells if c.kind == "markdown")
    minutes = re.search(r"\*\*Time\*\*:?\s*:?\s*(?:about |some )?(\d+) min", everything)
    module = next((c.directives["default_exp"] for c in cells if "default_exp" in c.directives), None)
    part = rel.parts[0] if len(rel.parts) > 1 else ""
    return Page(path, part, "/".join(plain(p) for p in rel.with_suffix("").parts), title,
                subtitle[1].strip() if subtitle else "", int(minutes[1]) if minutes else None,
                f"instruct_goose.{module}" if module else None, cells)


@cache
def read_pages() -> tuple[Page, list[Page]]:
    "The front page, and the lessons in reading order."
    found = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if not any(q[0] in "._" for q in p.relative_to(ROOT / "nbs").parts))
    pages = [read_page(p) for p in found]
    nodes = {p.url: [n for c in p.cells for n in c.exported] for p in pages}
    classes = lambda nodes: {n.name: n for n in reversed(nodes) if isinstance(n, ast.ClassDef)}
    everywhere = classes([n for p in sorted(pages, key=lambda p: p.path) for n in nodes[p.url]])  # the first of a name
    for own in nodes.values():
        for node in own:  # a method may be added in a later lesson than its class's
            if owner := patched(node): (classes(own).get(owner) or everywhere[owner]).body.append(node)
    index = [p for p in pages if p.url == "index"]
    if len(index) != 1: raise SystemExit("nbs/index.ipynb is missing")
    place = {part: i for i, part in enumerate(PARTS)}
    return index[0], sorted((p for p in pages if p.url != "index"), key=lambda p: (place.get(p.part, len(place)), p.path.name))


def target(page: Page, link: str) -> Path:
    "The file that a relative link in a page points at."
    return (page.path.parent / link).resolve()


def routes(pages: list[Page]) -> list[tuple[str, str, list[Page], int]]:
    "Name, purpose, lessons and minutes of each route; those of its lessons that are there."
    by_url = {p.url: p for p in pages}
    found = [(name, why, [by_url[u] for u in urls if u in by_url]) for name, (why, urls) in ROUTES.items()]
    return [(name, why, lessons, sum(p.minutes or 0 for p in lessons)) for name, why, lessons in found if lessons]


def route_id(name: str) -> str:
    "PPO, and only PPO -> ppo-and-only-ppo, what stands behind ?route="
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def long(minutes: int) -> str:
    "75 -> 1 h 15 min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
