"""The playground in Chromium, from a file, with the network off: `python evidence/run.py playground`, about half a CPU-hour.

Writes evidence/playground.json: speed beside PyTorch's, the default settings and β = 0 on ten seeds, the five experiments of the page.
CPU time is that of the worker's thread, read from /proc: other programs on the machine do not count.
"""
import copy
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

import torch

root = Path(__file__).parents[1]
sys.path[:0] = [str(root / "docs"), str(root / "tests/repo"), str(root / "evidence")]
import playground  # noqa: E402
from chromium import Chromium  # noqa: E402
from lesson_code import lesson_module  # noqa: E402
from run import origin  # noqa: E402

model = lesson_module("guides/playground")
PlaygroundSettings, read_start, train = model.PlaygroundSettings, model.read_start, model.train


EXPERIMENTS = {  # as in docs/playground/experiments.js
    "kl": [({"beta": 0}, 120)], "clip": [({"epochs": 8}, 40), ({"epochs": 8, "clip": 1e6}, 40)], "lambda": [({"lam": 0}, 40), ({"lam": 1}, 40)],
    "group": [({"algorithm": "grpo", "group_size": 2}, 60), ({"algorithm": "grpo", "group_size": 16}, 60)], "rate": [({"lr": .03}, 40)]}


def worker_seconds(chromium: Chromium) -> float:
    "CPU seconds of all worker threads of this browser."
    def stat(path): return path.read_text().rpartition(")")[2].split()

    parents = {}
    for p in Path("/proc").glob("[0-9]*"):
        try: parents[int(p.name)] = int(stat(p / "stat")[1])
        except OSError: pass
    ours, spent = {chromium.process.pid}, 0
    for _ in range(5): ours |= {p for p, parent in parents.items() if parent in ours}
    for p in ours:
        for task in Path(f"/proc/{p}/task").glob("*"):
            if (task / "comm").read_text().startswith("DedicatedWorker"): spent += sum(map(int, stat(task / "stat")[11:13]))
    return spent / os.sysconf("SC_CLK_TCK")


def rounded(x):
    if isinstance(x, dict): return {k: rounded(v) for k, v in x.items()}
    return float(f"{x:.4g}") if isinstance(x, float) else x


def run(chromium: Chromium, page: str, settings: dict, iterations: int) -> dict:
    "One run by the page's address, and what it left in #result."
    tab = chromium.open(f"{page}?{urlencode(settings | {'iterations': iterations})}")
    tab.wait("!document.getElementById('result').hidden", 1200)
    found = json.loads(tab.ask("document.getElementById('result').textContent"))
    assert not tab.log, tab.log
    tab.close()
    print(settings, rounded(found["after"]), f"{found['iterations_per_second']:.1f}/s", flush=True)
    return {"settings": settings, "iterations": iterations, "before": rounded(found["before"]), "after": rounded(found["after"])}


def speed(chromium: Chromium, page: str) -> dict:
    "Milliseconds of CPU for an iteration, here and in PyTorch; seconds from pressing play to the first iteration."
    tab = chromium.open(page)
    tab.ask("playground.ready.then(() => 1)")
    tab.ask("playground.trace({}, 10).then(() => 1)")
    began = worker_seconds(chromium)
    tab.ask("playground.trace({}, 10).then(() => 1)")
    few = worker_seconds(chromium)
    tab.ask("playground.trace({}, 50).then(() => 1)")
    many = worker_seconds(chromium)
    tab.ask("document.getElementById('pg-reset').click()")
    tab.wait("document.getElementById('pg-iteration').textContent === 'Iteration 0'")
    first = tab.ask("""new Promise(done => {
      const began = performance.now()
      new MutationObserver(() => document.getElementById('pg-iteration').textContent === 'Iteration 1' && done((performance.now() - began) / 1000))
        .observe(document.getElementById('pg-iteration'), {childList: true})
      document.getElementById('pg-play').click() })""")
    tab.close()
    per = ((many - few) - (few - began)) / 40
    made = {"page_float64": {"cpu_ms": round(1000 * per, 1), "iterations_per_cpu_second": round(1 / per, 1)}}
    torch.set_num_threads(1)
    reference, reward = read_start(root / "docs/playground/start.json")
    for name, dtype in (("torch_float32", torch.float32), ("torch_float64", torch.float64)):
        ref = copy.deepcopy(reference).to(dtype)
        list(train(copy.deepcopy(ref), ref, reward, PlaygroundSettings(), 3))
        began = time.process_time()
        list(train(copy.deepcopy(ref), ref, reward, PlaygroundSettings(), 50))
        per = (time.process_time() - began) / 50
        made[name] = {"cpu_ms": round(1000 * per, 1), "iterations_per_cpu_second": round(1 / per, 1)}
    return made | {"seconds_to_first_iteration": round(first, 2), "load_average": round(os.getloadavg()[0], 1)}


def agreement(chromium: Chromium, page: str, iterations: int = 10) -> dict:
    "The page beside the library in float64: tokens that differ, and the largest difference of anything else."
    made = {}
    for algorithm, settings in {"ppo": {}, "grpo": {"kl_placement": "loss", "beta": .3}, "rloo": {}}.items():
        settings |= {"algorithm": algorithm}
        tab = chromium.open(page)
        there = tab.ask(f"playground.ready.then(() => playground.trace({json.dumps(settings)}, {iterations}))")
        tab.close()
        reference, reward = read_start(root / "docs/playground/start.json")
        policy, tokens, differ, gap = copy.deepcopy(reference.double()), 0, 0, 0.

        def farthest(ours, theirs) -> float: return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

        for here, of_page in zip(train(policy, reference, reward, PlaygroundSettings(**settings), iterations), there["iterations"], strict=True):
            mask = here.responses.mask
            flat = lambda rows: [x for row in rows for x in row]
            ours = here.responses.ids[mask].tolist()
            tokens += len(ours)
            differ += sum(a != b for a, b in zip(ours, flat(of_page["ids"]), strict=True))
            gap = max(gap, farthest(here.advantages[mask].tolist(), flat(of_page["advantages"])), farthest(here.losses, of_page["losses"]), farthest(here.gradient_norms, of_page["gradient_norms"]))
        weights = torch.cat([p.detach().flatten() for p in policy.parameters()]).tolist()
        made[algorithm] = {"iterations": iterations, "tokens": tokens, "tokens_that_differ": differ, "largest_difference": rounded(max(gap, farthest(weights, there["weights"])))}
    return made


def record(seeds: int = 10, experiment_seeds: int = 5):
    "Write evidence/playground.json, a piece after each run."
    folder = Path(tempfile.mkdtemp())
    (folder / "playground.html").write_text(playground.page(), "utf-8")
    page, chromium = (folder / "playground.html").as_uri(), Chromium(folder / "profile")
    made = {"origin": origin("python evidence/run.py playground") | {"browser": chromium.send("Browser.getVersion")["product"]}, "agreement": agreement(chromium, page), "speed": speed(chromium, page)}
    print(made["agreement"], made["speed"], flush=True)

    def save():
        (root / "evidence/playground.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")

    made["defaults"], made["no_kl"], made["experiments"] = [], [], []
    for seed in range(seeds):
        made["defaults"].append(run(chromium, page, {"seed": seed}, 60))
        made["no_kl"].append(run(chromium, page, {"beta": 0, "seed": seed}, 120))
        save()
    for name, runs in EXPERIMENTS.items():
        if name == "kl": continue  # recorded above
        for settings, n in runs:
            for seed in range(experiment_seeds): made["experiments"].append({"experiment": name} | run(chromium, page, settings | {"seed": seed}, n))
            save()
    chromium.close()


if __name__ == "__main__": record()
