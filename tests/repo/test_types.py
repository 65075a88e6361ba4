"""A type checker reads the package and a script such as a user writes, and finds nothing; in a script with a typo it does."""
import importlib.metadata as metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

root = Path(__file__).parents[2]

SCRIPT = '''
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruct_goose import Agent, RLHFConfig, RLHFTrainer, Rollout
from instruct_goose.models.agent import Evaluation
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.metrics import Metrics


class Bold(RLHFTrainer):
    def loss(self, now: Evaluation, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        loss, parts = super().loss(now, batch)
        push = -(now.logprobs * batch.advantages)[batch.mask].mean()
        return loss + 0.1 * push, parts | {"push": push.detach()}


class Diary(Callback):
    def on_iteration(self, trainer: RLHFTrainer, rollout: Rollout, metrics: Metrics) -> str | None:
        return "enough" if len(rollout) < 2 or metrics["reward_mean"] == trainer.iteration else None


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
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    "What basedpyright says, by file name: one run over the package and two scripts."
    try: metadata.version("basedpyright")
    except metadata.PackageNotFoundError: pytest.skip("basedpyright is not installed: pip install -e '.[dev]'")
    here = tmp_path_factory.mktemp("types")
    (here / "script.py").write_text(SCRIPT, "utf-8")
    assert "trainer.train(" in SCRIPT
    (here / "typo.py").write_text(SCRIPT.replace("trainer.train(", "trainer.trian("), "utf-8")
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["basedpyright"]
    config = {"include": [*(str(root / name) for name in settings["include"]), str(here)], "extraPaths": [str(root)],
              "typeCheckingMode": settings["typeCheckingMode"]}
    (here / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")
    command = [sys.executable, "-m", "basedpyright", "--project", here, "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report, errors = json.loads(done.stdout), {}
    assert report["summary"]["filesAnalyzed"] > len(list((root / "instruct_goose").rglob("*.py")))
    for each in report["generalDiagnostics"]:
        path = Path(each["file"])
        if each["severity"] == "error":
            line = f"{path.name}:{each['range']['start']['line'] + 1}: {each['message']}"
            errors.setdefault(path.name if path.parent == here else "instruct_goose", []).append(line)
    return errors


def test_the_package_has_no_type_errors(found):
    assert found.get("instruct_goose", []) == []


def test_a_users_script_has_no_type_errors(found):
    assert found.get("script.py", []) == []


def test_a_typo_is_reported(found):
    assert len(found.get("typo.py", [])) == 1 and "trian" in found["typo.py"][0]


def test_few_errors_are_silenced():
    ignored = [path.name for path in (root / "instruct_goose").rglob("*.py") for line in path.read_text("utf-8").splitlines()
               if "type: ignore" in line or "pyright: ignore" in line]
    assert len(ignored) <= 3, ignored
