"""The runs behind the figures in README and site: `make evidence`. Too long for tests.

Writes evidence/quickstart.json, evidence/control.json and, where the rated sentences are at hand, evidence/reviews.json: what was
measured, with which commit and versions. Nobody types a figure.

    python evidence/run.py                     everything that can be run here
    python evidence/run.py quickstart resume   only these; `--help` lists them with how long each takes
    python evidence/run.py gpu                 only where there is one: tokens/s, memory, agreement with the CPU
    python evidence/run.py reviews --data DIR  the sentences are in DIR (default: ../shared/data/icwsm2014)
"""

import argparse
import importlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import quickstart
import reported
from quickstart import CURVES, in_lines, open_block, rounded, settings_in

root = Path(__file__).parents[1]
bin = Path(sys.executable).parent


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def origin(command: str, commit: str | None = None) -> dict:
    "Where a figure comes from; git says at which commit."
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        processor = next(
            (
                line.split(": ")[1].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            processor,
        )
    at = (
        {"commit": commit}
        if commit
        else {
            "commit": git("rev-parse", "HEAD"),
            "committed": git("show", "-s", "--format=%cs", "HEAD"),
        }
    )
    return {
        "command": command,
        **at,
        "python": platform.python_version(),
        "torch": version("torch").split("+")[0],
        "transformers": version("transformers"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
    }


def run(*args: str) -> dict:
    "One run of the command: its summary, its curves and its first samples."
    out = Path(tempfile.mkdtemp()) / "run"
    print(f"\n\033[1m── instruct-goose {' '.join(args)}\033[0m", flush=True)
    subprocess.run([bin / "instruct-goose", *args, "--output-dir", str(out)], cwd=root, check=True)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    table = [
        line
        for line in (out / "samples.md").read_text("utf-8").splitlines()
        if line.startswith("|")
    ][2:10]
    samples = [[c.strip() for c in line.strip("|").split("|")] for line in table]
    shutil.rmtree(out.parent)
    summary.pop("versions", None)
    for name in ("data", "output_dir"):
        summary["config"].pop(name, None)  # places on this machine
    return {
        "flags": list(args[:1]) + [a for a in args[1:] if a != "--data" and not Path(a).is_dir()],
        **rounded(summary),
        "curves": {k: rounded([m[k] for m in log], 3) for k in CURVES if k in log[0]},
        "samples": samples,
    }


def control(env_id: str) -> dict:
    "Three seeds of one environment: what each took, its training curve, and how 100 fresh episodes went afterwards."
    from dataclasses import asdict

    from instruct_goose.runs.resume import Clock
    from instruct_goose.tasks.control import SETTINGS, evaluate, train_control

    runs = []
    for seed in (0, 1, 2):
        print(f"\n\033[1m── {env_id}, seed {seed}\033[0m", flush=True)
        clock = Clock()
        log, policy = train_control(env_id, seed=seed)
        seconds = clock.read()
        returns = [x for m in log for x in m["returns"]]
        after = {
            how: evaluate(policy, env_id, 100, seed, greedy=how == "greedy")
            for how in ("greedy", "sampled")
        }
        runs.append(
            rounded(
                {
                    "seed": seed,
                    **seconds,
                    "steps": log[-1]["steps"],
                    "episodes": len(returns),
                    "first_20": sum(returns[:20]) / 20,
                    "last_50": sum(returns[-50:]) / 50,
                    "evaluation": {
                        how: {
                            "mean": x.mean().item(),
                            "standard_error": x.std().item() / 10,
                            "min": x.min().item(),
                        }
                        for how, x in after.items()
                    },
                    "curves": {
                        "steps": [m["steps"] for m in log],
                        "return_50": [m["return_50"] for m in log],
                    }
                    | {
                        k: rounded([m[k] for m in log], 3)
                        for k in ("entropy", "approx_kl", "explained_variance")
                    },
                }
            )
        )
        print({k: v for k, v in runs[-1].items() if k != "curves"}, flush=True)
    return {"config": asdict(SETTINGS[env_id]), "runs": runs}


def family(seeds=(0, 1, 2)) -> dict:
    """Every preset from the same start with the same budget: as its paper has it, and all with the same β; DPO beside them.
    Three seeds; and on the first, with the same β, half and twice the learning rate."""
    from instruct_goose.objective.group import PRESETS
    from instruct_goose.recipes.family import family_config, improve, improve_by_dpo
    from instruct_goose.recipes.quickstart import make_start

    def measured(name, price, seed, result, lr, beta):
        figures = {k: v for k, v in result.figures.items() if k != "ended"}
        curves = {
            k: rounded([m[k] for m in result.metrics], 3)
            for k in ("reward_mean", "kl_to_reference")
            if k in result.metrics[0]
        }
        row = {
            "name": name,
            "price": price,
            "seed": seed,
            "lr": lr,
            "beta": beta,
            **rounded(figures),
            "cpu_seconds": round(result.cpu_seconds, 1),
        }
        print(row, flush=True)
        return row | {"curves": curves, "texts": result.texts}

    runs = []
    for seed in seeds:
        start = make_start(family_config("ppo", seed=seed, progress=False))
        trials = [(name, one, 1) for one in (False, True) for name in PRESETS]
        if not seed:
            trials += [(name, True, factor) for factor in (0.5, 2) for name in PRESETS]
        for name, one, factor in trials:
            lr = factor * family_config(name).lr
            c = family_config(name, one, seed=seed, lr=lr, progress=False)
            if (
                one and factor == 1 and c == family_config(name, seed=seed, lr=lr, progress=False)
            ):  # it has that β already
                runs.append(
                    next(
                        r
                        for r in runs
                        if (r["name"], r["seed"], r["price"]) == (name, seed, "published")
                    )
                    | {"price": "one"}
                )
                continue
            runs.append(
                measured(name, "one" if one else "published", seed, improve(c, start), lr, c.beta)
            )
        for beta in (0.3, 1.0):
            c = family_config("ppo", seed=seed, progress=False)
            runs.append(
                measured("dpo", "dpo", seed, improve_by_dpo(c, start, beta=beta), 1e-3, beta)
            )
    c = family_config("ppo")
    return {
        "config": {
            k: getattr(c, k)
            for k in ("steps", "batch_size", "epochs", "minibatches", "lr", "lr_schedule", "pairs")
        },
        "runs": runs,
    }


def exact_run(job: dict) -> dict:
    "One run in the exact world: how far from the optimum it ends and, with the KL in the loss, from the fixed point of that."
    import torch

    from instruct_goose.tasks.exact_world import (
        converge,
        converge_dpo,
        enumerate_logprobs,
        exact_config,
        fixed_point,
        make_world,
        optimum,
        total_variation,
    )

    torch.set_num_threads(1)
    job = {"kind": "absolute", "side": "left", "seed": 0, "settings": {}} | job
    name = job["name"]
    beta = job["beta"]
    settings = job["settings"]
    world = make_world(job["kind"])
    with torch.no_grad():
        ref = enumerate_logprobs(world.reference, world).sum(-1).double()
    if name == "dpo":
        return rounded(
            job | {k: x for k, x in converge_dpo(world, beta).items() if k != "logprobs"}
        )
    config = exact_config(name, beta, seed=job["seed"], **settings)
    result = converge(world, config, job["side"])
    end, mean = result["logprobs"], result["mean_logprobs"]
    row = {k: result[k][-1] for k in ("tv", "reward", "kl")}
    row["from_reference"] = total_variation(end, ref)
    row["likeliest_is_best"] = (end.argmax(-1) == world.rewards.argmax(-1)).float().mean().item()
    if beta:
        row["mean_tv"] = total_variation(mean, optimum(ref, world.rewards, beta))
    if config.kl_placement == "loss":
        how = config.advantage.removeprefix("group_")
        there = fixed_point(
            world,
            beta,
            config.kl_estimator or "k2",
            how,
            config.aggregation == "sequence_mean",
            config.group_size,
        )
        row |= {
            "fixed_point": total_variation(there, optimum(ref, world.rewards, beta)),
            "to_fixed_point": total_variation(end, there),
            "mean_to_fixed_point": total_variation(mean, there),
        }
    row = rounded(job | row) | {
        "cpu_seconds": round(result["cpu_seconds"], 1),
        "curve": rounded(result["tv"][4::5], 3) if beta else None,
    }
    print({k: x for k, x in row.items() if k != "curve"}, flush=True)
    return row


def exact_world(processes: int = 3) -> dict:
    """The trainer against an optimum that is known: presets, prices, models, padding sides, three seeds; what a constant learning
    rate costs; where the KL in the loss leads; β from 0 to 20; DPO. About half a CPU-hour."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from instruct_goose.objective.group import PRESETS
    from instruct_goose.tasks.exact_world import exact_config

    three = ("ppo", "rloo", "dr_grpo")
    seeds = (0, 1, 2)
    in_loss = {"kl_placement": "loss"}
    jobs = [
        {
            "part": "convergence",
            "name": name,
            "beta": beta,
            "kind": kind,
            "seed": seed,
            "side": "right" if seed == 1 else "left",
        }
        for name in three
        for beta in (0.5, 2.0)
        for kind in ("absolute", "rotary")
        for seed in seeds
    ]
    jobs += [
        {"part": "others", "name": name, "beta": 0.5, "seed": seed}
        for name in PRESETS
        if name not in three
        for seed in seeds
    ]
    jobs += [
        {
            "part": "loss",
            "name": name,
            "beta": 0.5,
            "seed": seed,
            "settings": in_loss | more | {"lr": 5e-4},
        }
        for seed in seeds
        for name, more in (
            ("dr_grpo", {"kl_estimator": "k2"}),
            ("dr_grpo", {"kl_estimator": "k3"}),
            ("grpo", {"kl_estimator": "k3"}),
        )
    ]
    jobs += [
        {
            "part": "constant",
            "name": name,
            "beta": 0.5,
            "seed": seed,
            "settings": {"lr_schedule": "constant"},
        }
        for name in three
        for seed in seeds
    ]
    jobs += [
        {"part": "price", "name": "rloo", "beta": beta, "seed": seed}
        for beta in (0.0, 0.05, 0.1, 0.2, 0.3, 1.0, 5.0, 20.0)
        for seed in seeds
    ]
    jobs += [
        {"part": "dpo", "name": "dpo", "beta": beta, "kind": kind}
        for beta in (0.5, 2.0)
        for kind in ("absolute", "rotary")
    ]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = list(pool.map(exact_run, jobs))
    config = exact_config("ppo", 0.5)
    return {
        "config": {
            k: getattr(config, k)
            for k in ("steps", "batch_size", "epochs", "minibatches", "lr", "lr_schedule", "lam")
        },
        "runs": runs,
    }


def streamed(megabytes: int = 200) -> dict:
    "A file of that size in each format, read once from end to end by a process of its own: seconds, and the memory that reading added."
    import csv

    reading = """if True:
        import json, resource, sys, time
        from instruct_goose.data.load import stream_pairs
        held = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
        small, large = sys.argv[1:]
        for pair in stream_pairs(small): pass
        before = most = held()
        start, rows = time.process_time(), 0
        for pair in stream_pairs(large):
            rows += 1
            if not rows % 1000: most = max(most, held())
        print(json.dumps({"rows": rows, "cpu_seconds": time.process_time() - start, "mib_added": most - before}))"""

    def make(path: Path, rows: int):
        pairs = (
            {
                "prompt": f"{i} the film is",
                "chosen": " good" * 20 + f" {i}",
                "rejected": " dull" * 20,
            }
            for i in range(rows)
        )
        with open(path, "w", encoding="utf-8", newline="") as out:
            if path.suffix == ".csv":
                writer = csv.DictWriter(out, ["prompt", "chosen", "rejected"])
                writer.writeheader()
                writer.writerows(pairs)
            else:
                array = path.suffix == ".json"
                for i, pair in enumerate(pairs):
                    out.write(
                        ("[" if not i else ",\n") * array + json.dumps(pair) + "\n" * (not array)
                    )
                out.write("]" * array)

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".json", ".csv"):
            small, large = Path(folder) / f"small{suffix}", Path(folder) / f"large{suffix}"
            make(small, 1000)
            make(large, megabytes * 2**20 * 1000 // small.stat().st_size)
            done = subprocess.run(
                [sys.executable, "-c", reading, small, large],
                cwd=root,
                capture_output=True,
                text=True,
                check=True,
            )
            found[suffix] = rounded(
                {"file_mib": large.stat().st_size / 2**20} | json.loads(done.stdout), 3
            )
            print(suffix, found[suffix], flush=True)
            large.unlink()
    return found


def fuzz(inputs: int = 200_000) -> dict:
    "Broken input for the loaders and the settings, see tests/fuzz.py; and files of 200 MiB as streams."
    sys.path.insert(0, str(root / "tests"))
    from fuzz import fuzz

    found = fuzz(inputs)
    for f in found["failures"]:
        f.pop("trace")
    print({k: v for k, v in found.items() if k != "outcomes"}, flush=True)
    return found | {"streams": streamed()}


def resume() -> dict:
    """Twenty processes killed (SIGKILL) at random moments, each resumed in a new process and compared with a run that was never
    stopped: weights byte by byte, the log less its times, the summary's figures, the samples."""
    import multiprocessing
    import random
    import re
    import time

    from instruct_goose.cli.main import main as command
    from instruct_goose.runs.checkpoints import checkpoints, load_checkpoint

    settings = {
        "reviews": 1000,
        "pairs": 500,
        "held_out_pairs": 100,
        "sft_steps": 60,
        "rm_steps": 30,
        "steps": 8,
        "batch_size": 32,
        "eval_samples": 64,
        "best_of": 2,
        "tune_steps": 10,
    }
    flags = [x for k, v in settings.items() for x in (f"--{k.replace('_', '-')}", str(v))] + [
        "--no-progress",
        "--save-every",
        "1",
    ]
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["instruct_goose.recipes.quickstart", "instruct_goose.cli.main"])
    here = Path(tempfile.mkdtemp())

    def start(out, *more):
        child = fork.Process(
            target=command, args=(["quickstart", *flags, "--output-dir", str(out), *more],)
        )
        child.start()
        return child

    def said(out):
        files = {
            str(p.relative_to(out)): p.read_bytes()
            for p in out.rglob("*.safetensors")
            if "checkpoints" not in p.parts
        }
        log = [
            {k: v for k, v in json.loads(line).items() if "second" not in k}
            for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()
        ]
        summary = json.loads((out / "summary.json").read_text("utf-8"))
        return (
            files,
            log,
            {k: v for k, v in summary.items() if "seconds" not in k and k != "resumed_from"},
            (out / "samples.md").read_bytes(),
        )

    def killed(out, moment):
        "Where it was, and whether it was killed at all: it may have been done by then."
        child = start(out)
        while not (out / "config.json").exists():
            time.sleep(0.005)
        child.join(moment)
        child.kill()
        child.join()
        found = checkpoints(out / "checkpoints")
        return child.exitcode == -9, load_checkpoint(found[-1])[1]["progress"] if found else None

    start(here / "whole").join()
    whole = said(here / "whole")
    longest = json.loads((here / "whole/summary.json").read_text("utf-8"))["wall_seconds"]
    dice = random.Random(0)
    rows = []
    seconds = longest
    while len(rows) < 20:
        moment, out = (
            (len(rows) + dice.random()) * longest / 20,
            here / f"run{len(rows)}",
        )  # one in each twentieth of the run
        really, place = killed(out, moment)
        if not really:
            shutil.rmtree(out)
            longest *= 0.97
            continue  # it was done by then
        beside = sorted(p.name for p in out.rglob(".*"))  # what was half written
        again = start(out, "--resume")
        again.join()
        resumed_from = json.loads((out / "summary.json").read_text("utf-8"))["resumed_from"]
        rows.append(
            {
                "killed_after_seconds": round(moment, 2),
                "last_saved": place,
                "half_written": [re.sub("[-.][0-9]+$", "", name) for name in beside],
                "exit_status": again.exitcode,
                "resumed_from": resumed_from,
                "identical": said(out) == whole,
                "left_over": [p.name for p in out.rglob(".*")],
            }
        )
        print(rows[-1], flush=True)
    shutil.rmtree(here)
    return {
        "config": settings | {"save_every": 1},
        "seconds": seconds,
        "lost": sum(not r["identical"] for r in rows),
        "kills": rows,
    }


def probe_run(job: tuple[str | None, int]) -> dict:
    "The whole ladder for one trainer: which rungs failed, and what was measured."
    from instruct_goose.tasks.probes import BROKEN, run_probes

    bug, seed = job
    trainer, _ = BROKEN[bug] if bug else (None, None)
    results = run_probes(trainer, seed=seed)
    row = {
        "bug": bug,
        "seed": seed,
        "failed": [r.name for r in results if not r.passed],
        "raised": [r.note for r in results if r.note],
        "measured": {
            r.name: rounded({k: x for k, (x, _, _) in r.numbers.items()}, 3) for r in results
        },
    }
    print({k: x for k, x in row.items() if k != "measured"}, flush=True)
    return row


def probes(processes: int = 3) -> dict:
    "The ladder of probes: ten seeds of the shipped trainer, and every broken one with two. Seven CPU-minutes."
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from instruct_goose.tasks.probes import BROKEN, PROBES

    jobs = [(None, seed) for seed in range(10)] + [(bug, seed) for bug in BROKEN for seed in (0, 1)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = list(pool.map(probe_run, jobs))
    return {
        "probes": list(PROBES),
        "meant_for": {bug: rung for bug, (_, rung) in BROKEN.items()},
        "runs": runs,
    }


def gallery(seeds=(0, 1, 2)) -> dict:
    "Every bug of the gallery and every healthy setting: what the doctor reads, and which guard of the library objects."
    from gallery_world import gallery_world

    from instruct_goose.tasks.gallery import (
        BUGS,
        HEALTHY,
        RUN,
        WORLD,
        run_bug,
        run_healthy,
        stopped_by,
        to_columns,
    )

    bugs: dict[str, list[str]] = {name: [] for name in BUGS}  # a run is a line of the file
    healthy: dict[str, list[str]] = {name: [] for name in HEALTHY}
    guards = {}
    for seed in seeds:
        world = gallery_world(seed)
        for name in BUGS:
            bugs[name].append(json.dumps(to_columns(run_bug(name, world, seed))))
            print(f"seed {seed}, {name}", flush=True)
        for name in HEALTHY:
            healthy[name].append(json.dumps(to_columns(run_healthy(name, world, seed))))
            print(f"seed {seed}, {name}", flush=True)
        if seed == 0:
            guards = {name: stopped_by(name, world) for name in BUGS}
    return {"config": WORLD | RUN, "guards": guards, "bugs": bugs, "healthy": healthy}


def reviews(data: Path, seeds) -> None:
    "The pipeline on real sentences, about seven CPU-minutes a seed; a block for each machine."
    from ridge import ridge_shares

    from instruct_goose.recipes.ratings import read_rated, split_reviews

    path = root / "evidence/reviews.json"
    made_by = origin("instruct-goose reviews --data DIR")
    ridge = ridge_shares(*split_reviews(read_rated(data)[0]))
    for seed in seeds:
        one = run("reviews", "--data", str(data), "--seed", str(seed), "--no-progress")
        one["judges"]["ridge"] = ridge
        whole, here = open_block(path, settings_in(one.pop("config")), made_by, only_these=False)
        here["runs"] = [r for r in here["runs"] if r["seed"] != seed] + [one]
        path.write_text(in_lines(whole), "utf-8")


def indented(record: dict) -> str:
    "JSON in which each value has a line of its own."
    return json.dumps(record, indent=1, ensure_ascii=False)


def one_run_a_line(record: dict) -> str:
    "JSON of an origin and of many short runs."
    origin = json.dumps(record["origin"], ensure_ascii=False)
    runs = ",\n".join("  " + json.dumps(run, ensure_ascii=False) for run in record["runs"])
    return f'{{\n "origin": {origin},\n "runs": [\n{runs}\n ]\n}}'


RUNS = {  # what can be measured, and how long it takes
    "quickstart": "ten seeds, two draws, with and without a KL penalty; 25 CPU-minutes",
    "family": "every preset from one start",
    "control": "CartPole and Pendulum",
    "exact_world": "half a CPU-hour",
    "resume": "twenty kills; three CPU-minutes",
    "probes": "seven CPU-minutes",
    "gallery": "the failure gallery; six CPU-minutes",
    "doctor_unseen": "twenty bugs written after the rules, and 200 random healthy runs; ten CPU-minutes",
    "doctor_bugs": "twenty-four more bugs, doctor and probes; twenty CPU-minutes",
    "doctor_fresh": "twenty-four bugs invented after the rules; probes where the doctor is silent; ten CPU-minutes",
    "doctor_healthy": "five hundred healthy runs; fifteen CPU-minutes",
    "fuzz": "broken input; five CPU-minutes",
    "inputs": "wrong input of five kinds; ten CPU-minutes",
    "models": "sixty small models through every stage; a CPU-minute",
    "details": "the details of PPO switched off one by one; five CPU-minutes",
    "distillation": "a small student of the quickstart's policy; six CPU-minutes",
    "asynchrony": "samples that are some updates old, and the time that they save; three CPU-minutes",
    "playground_edits": "five losses in the playground, in Node; half an hour on one core",
    "trackers": "TensorBoard, Weights & Biases and trackio in an environment of their own; downloads",
    "reports": "the two runs whose reports are on the site; ten CPU-minutes",
    "reviews": "the pipeline on rated sentences; twenty CPU-minutes",
}


def measured(name: str, args: argparse.Namespace) -> dict:
    "What a record holds beside its origin."
    three = args.seeds or (0, 1, 2)
    if name == "family":
        return family(three)
    if name == "control":
        return {env_id: control(env_id) for env_id in ("CartPole-v1", "Pendulum-v1")}
    if name in ("exact_world", "probes"):
        return globals()[name](args.processes)
    if name == "distillation":
        return importlib.import_module(name).record(three)
    if name == "playground_edits":
        return importlib.import_module(name).record(args.seeds or range(5))
    if name in (
        "asynchrony",
        "doctor_unseen",
        "doctor_bugs",
        "doctor_fresh",
        "doctor_healthy",
        "inputs",
        "models",
    ):
        return importlib.import_module(name).record()
    if name == "details":
        return importlib.import_module(name).details()
    if name == "trackers":
        return importlib.import_module(name).run_trackers()
    return globals()[name]()


def main():
    listed = "; ".join(f"{name}: {what}" for name, what in RUNS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "only",
        nargs="*",
        default=list(RUNS),
        help=f"{listed.replace('%', '%%')}; all without, or gpu alone",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help="of quickstart (0 to 9), playground_edits (0 to 4), reviews, distillation and family (0 to 2)",
    )
    parser.add_argument("--processes", type=int, default=3, help="of exact_world and probes")
    parser.add_argument(
        "--draws",
        type=int,
        nargs="+",
        default=[0, 1],
        help="of the quickstart's initial weights; 0: as they are",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=root.parent / "shared/data/icwsm2014",
        help="directory of the rated sentences",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=root / "runs/evidence",
        help="of reports: where they are run, and taken from if they are finished there",
    )
    args = parser.parse_args()
    if args.only == ["gpu"]:
        raise SystemExit(subprocess.call([sys.executable, root / "evidence/gpu.py"]))
    if wrong := set(args.only) - set(RUNS):
        parser.error(f"no such run: {', '.join(wrong)}")
    if dirty := git(
        "status", "--porcelain", "--", "instruct_goose", "pyproject.toml", "constraints.txt"
    ):
        raise SystemExit(f"commit first, so that the figures have a commit to name:\n{dirty}")
    for name in args.only:
        made_by = origin(f"python evidence/run.py {name}")
        if name == "quickstart":
            quickstart.record(
                root / "evidence/quickstart.json", made_by, args.seeds or range(10), args.draws
            )
        elif name == "reports":
            reported.record(args.runs, made_by)
        elif name == "reviews" and args.data.is_dir():
            reviews(args.data, args.seeds or (0, 1, 2))
        elif name == "reviews":
            print(f"\nreviews left out: no directory {args.data} (pass ARGS='reviews --data DIR')")
        else:
            path = root / f"evidence/{name}.json"
            record = {"origin": made_by} | measured(name, args)
            text = one_run_a_line(record) if name == "doctor_healthy" else indented(record)
            path.write_text(text + "\n", "utf-8")
            print(f"\nwritten: {path.relative_to(root)}")


if __name__ == "__main__":
    main()
