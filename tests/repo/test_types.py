"""A type checker reads the package and a script such as a user writes, and finds nothing; in a script with a typo it does."""

import importlib.metadata as metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

root = Path(__file__).parents[2]

SCRIPT = """
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose import Agent, RLHFConfig, RLHFTrainer
from instruct_goose.models.agent import Evaluation
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.experience import Experience
from instruct_goose.training.metrics import Metrics


class Bold(RLHFTrainer):
    def loss(self, new: Evaluation, batch: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        loss, parts = super().loss(new, batch)
        push = -(new.logprobs * batch.advantages)[batch.mask].mean()
        return loss + 0.1 * push, parts | {"push": push.detach()}


class Diary(Callback):
    def on_iteration(
        self, trainer: RLHFTrainer, experience: Experience, metrics: Metrics
    ) -> str | None:
        return "enough" if len(experience) < 2 or metrics["reward_mean"] == trainer.iteration else None


def reward(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def main(place: Path) -> float | int | None:
    model = AutoModelForCausalLM.from_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    config = RLHFConfig(steps=2, batch_size=4, max_new_tokens=3, device="cpu")
    plain = RLHFTrainer(model, None, config, tokenizer=tokenizer)
    plain.train(["so"], reward)
    trainer = Bold(Agent(model), config=config, tokenizer=tokenizer, callbacks=[Diary()])
    metrics = trainer.train(["so", "good"], reward, steps=2, progress=False)
    trainer.agent.model.save_pretrained(place)
    trainer.agent.save_pretrained(place / "agent")
    return metrics[-1]["reward_mean"]
"""


def test_the_package_and_a_users_script_have_no_type_errors(tmp_path):
    "One run over the package, the script, and the script with a typo, which is reported."
    try:
        metadata.version("basedpyright")
    except metadata.PackageNotFoundError:
        pytest.skip("basedpyright is not installed: pip install -e '.[dev]'")
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "typo.py").write_text(SCRIPT.replace("trainer.train(", "trainer.trian("), "utf-8")
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["basedpyright"]
    config = {
        "include": [*(str(root / name) for name in settings["include"]), str(tmp_path)],
        "extraPaths": [str(root)],
        "typeCheckingMode": settings["typeCheckingMode"],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--project",
        tmp_path,
        "--pythonpath",
        sys.executable,
        "--outputjson",
    ]
    report = json.loads(
        subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    )
    assert report["summary"]["filesAnalyzed"] > len(list((root / "instruct_goose").rglob("*.py")))
    errors = [
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1, d["message"])
        for d in report["generalDiagnostics"]
        if d["severity"] == "error"
    ]
    assert len(errors) == 1 and errors[0][0] == "typo.py" and "trian" in errors[0][2], errors


def test_few_errors_are_silenced():
    ignored = [
        path.name
        for path in (root / "instruct_goose").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if "type: ignore" in line or "pyright: ignore" in line
    ]
    assert len(ignored) <= 3, ignored
