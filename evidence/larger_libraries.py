"""Runs exported to verl and OpenRLHF, as far as those two go on a CPU: their settings are read, their loaders take the reward.

    make launchers      runs this after launchers.py; verl and OpenRLHF are installed without their dependencies

verl: Hydra composes ppo_trainer.yaml with the exported overrides, and verl makes its own dataclasses of actor, critic, sampler and
algorithm, which check the values. verl's loader takes the reward file and scores rows of the exported Parquet file.
OpenRLHF: the statements that make its parser are run as they stand in train_ppo_ray.py, which itself cannot be imported without a
GPU's packages, and read the exported flags. Its reward file is loaded as its agent loads one.
No model is trained: neither library trains on a CPU.
"""

import ast
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import warnings
from argparse import ArgumentParser
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from instruct_goose import RLHFConfig
from instruct_goose.compat.exports import (
    CannotExport,
    ClusterJob,
    openrlhf_command,
    openrlhf_row,
    to_openrlhf,
    to_verl,
    verl_command,
    write_verl_rows,
)
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.objective.group import PRESETS

root = Path(__file__).parents[1]
RECORD = root / "evidence/larger_libraries.json"
PACKAGES = ("verl", "openrlhf", "hydra-core", "tensordict", "torch", "ray")
REWARDS = "def right(completions, answer):\n    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"
SAMPLES = [("7", "7", 1.0), (" 7 ", "7", 1.0), ("8", "7", 0.0), ("", "7", 0.0)]  # answer, right one
SECTIONS = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic", "algorithm")


def settings_of(preset):
    "Sizes with which eight GPUs get whole shares."
    sizes = {"batch_size": 512, "group_size": 8, "minibatches": 4, "epochs": 1}
    if preset in ("ppo", "reinforce_pp", "remax"):
        sizes["group_size"] = 1
    if preset in ("rloo", "remax"):
        sizes["minibatches"] = 1
    return RLHFConfig.preset(preset, steps=20, max_new_tokens=64, **sizes)


def words_of(command):
    "The words behind `python3 -m MODULE`, as a shell makes them."
    return shlex.split(command.replace("\\\n", ""))[3:]


def read_by_verl(exported):
    "Compose verl's configuration with the overrides, and make its dataclasses."
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    overrides = words_of(verl_command(exported))
    folder = str(Path(verl.__file__).parent / "trainer/config")
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides)
    for name, value in exported.settings.items():
        found = OmegaConf.select(config, name.removeprefix("+"))
        same = list(found) == value if isinstance(value, list) else found == value
        if not same:
            raise ValueError(f"{name} is {found!r} and not {value!r}")
    made = []
    for section in SECTIONS:
        part = OmegaConf.select(config, section)
        if section == "critic" and not config.algorithm.adv_estimator == "gae":
            continue
        made.append(type(omega_conf_to_dataclass(part)).__name__)
    return config, made


def scored_by_verl(config, rows):
    "Load the reward with verl's loader, and score rows of the Parquet file."
    from pyarrow import parquet
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = get_custom_reward_fn(config)
    stored = parquet.read_table(config.data.train_files).to_pylist()
    scores = []
    for row, (answer, _, _) in zip(stored, rows, strict=True):
        scores.append(
            function(
                data_source=row["data_source"],
                solution_str=answer,
                ground_truth=row["reward_model"]["ground_truth"],
                extra_info=row["extra_info"],
            )
        )
    return scores


def openrlhf_source(name):
    "The text of a module of OpenRLHF, which is not imported."
    spec = importlib.util.find_spec("openrlhf")
    return (Path(spec.submodule_search_locations[0]) / name).read_text("utf-8")


def openrlhf_parser():
    "Run the statements of train_ppo_ray.py that make its parser."
    tree = ast.parse(openrlhf_source("cli/train_ppo_ray.py"))
    (main,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {"argparse": __import__("argparse"), "datetime": datetime}
    for node in main.body:
        if "parse_args" in ast.unparse(node):
            break
        exec(compile(ast.Module([node], []), "train_ppo_ray.py", "exec"), names)
    parser = names["parser"]
    assert isinstance(parser, ArgumentParser)
    return parser


def read_by_openrlhf(exported):
    "Give the flags to OpenRLHF's parser; every value arrives."
    words = words_of(openrlhf_command(exported))
    read = vars(openrlhf_parser().parse_args(words))
    for name, value in exported.settings.items():
        if read[name] != value:
            raise ValueError(f"{name} is {read[name]!r} and not {value!r}")
    return len(exported.settings)


def scored_by_openrlhf(folder, rows):
    "Load the reward file as OpenRLHF's agent does, and ask it as the agent does: one at a time."
    source = openrlhf_source("utils/agent.py")
    assert 'spec_from_file_location("reward_func"' in source  # still the same way
    spec = importlib.util.spec_from_file_location("reward_func", folder / "for_openrlhf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scores = []
    for answer, right, _ in rows:
        label = openrlhf_row(row_of(right))["label"]
        prompt = "<s>user 3 + 4</s>"
        told = module.reward_func([f"{prompt}{answer}</s>"], [prompt], [label])
        scores.append(float(told["rewards"][0]))
    return scores


def row_of(right):
    "A row of the data."
    return {"prompt": [{"role": "user", "content": "3 + 4"}], "answer": right}


def write_files(folder):
    "The reward as its author wrote it, the two files that hand it over, a tiny model, and the rows."
    (folder / "rewards.py").write_text(REWARDS)
    head = f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom rewards import right\n"
    (folder / "for_verl.py").write_text(
        f"{head}from instruct_goose.compat.exports import verl_reward\ncompute_score = verl_reward(right)\n"
    )
    (folder / "for_openrlhf.py").write_text(
        f"{head}from instruct_goose.compat.exports import openrlhf_reward\n"
        'reward_func = openrlhf_reward(right, ends=("</s>",))\n'
    )
    model, tokenizer = tiny_smollm("3 + 4 7 8".split())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_verl_rows([row_of(right) for _, right, _ in SAMPLES], folder / "rows.parquet")


def try_preset(preset, folder):
    "Export a preset to both libraries, and let them read it."
    config = settings_of(preset)
    job = ClusterJob(
        str(folder / "model"), str(folder / "rows.parquet"), str(folder / "for_verl.py")
    )
    wanted = [score for _, _, score in SAMPLES]
    found = {}
    try:
        exported = to_verl(config, job)
        composed, made = read_by_verl(exported)
        same = scored_by_verl(composed, SAMPLES) == wanted
        found["verl"] = {"settings": len(exported.settings), "dataclasses": made, "scores": same}
        found["verl"]["not_carried"] = sorted(exported.not_carried)
    except CannotExport as e:
        found["verl"] = {"refused": str(e).splitlines()[1:]}
    job = job._replace(train_file="rows.jsonl", reward_file=str(folder / "for_openrlhf.py"))
    try:
        exported = to_openrlhf(config, job)
        n = read_by_openrlhf(exported)
        same = scored_by_openrlhf(folder, SAMPLES) == wanted
        found["openrlhf"] = {"settings": n, "scores": same}
        found["openrlhf"]["not_carried"] = sorted(exported.not_carried)
    except CannotExport as e:
        found["openrlhf"] = {"refused": str(e).splitlines()[1:]}
    return found


def main():
    "Every preset; exit status 1 if a score is another."
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        cases = {preset: try_preset(preset, folder) for preset in PRESETS}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    record = {
        "command": "make launchers",
        "commit": commit.stdout.strip(),
        "versions": {package: version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "device": "cpu",
        "trained": False,
        "cases": cases,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(cases, indent=1))
    found = [case for both in cases.values() for case in both.values()]
    sys.exit(not all(case.get("scores", True) for case in found))


if __name__ == "__main__":
    main()
