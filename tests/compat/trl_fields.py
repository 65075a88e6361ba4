"""The fields of TRL's configurations: the classes themselves where TRL is installed, else classes made from the record.

`python tests/compat/trl_fields.py`, in an environment with TRL such as `.venv-bench-trl116`, writes the record,
`tests/compat/trl_fields.json`: of each field the default that the class declares, and what a configuration holds that
sets nothing, as `repr`. Derived values that differ between machines are left to the class."""

import dataclasses
import importlib
import json
import warnings
from ast import literal_eval
from functools import cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
KINDS = ("GRPOConfig", "RLOOConfig", "DPOConfig", "SFTConfig", "RewardConfig")


def write_record() -> None:
    "Ask the installed TRL."
    trl = importlib.import_module("trl")
    transformers = importlib.import_module("transformers")
    record: dict[str, Any] = {"trl": trl.__version__, "transformers": transformers.__version__}
    for kind in KINDS:
        cls = getattr(trl, kind)
        unset = cls(use_cpu=True)
        record[kind] = {
            field.name: [
                _literal(default_of(field)),
                _literal(getattr(unset, field.name)),
            ]
            for field in dataclasses.fields(cls)
        }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def default_of(field: dataclasses.Field) -> Any:
    "What the class declares."
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _literal(value: Any) -> str:
    "As Python would write it; an object that it cannot write is None."
    text = repr(getattr(value, "value", value))
    try:
        literal_eval(text)
    except (ValueError, SyntaxError):
        return "None"
    return text


@cache
def recorded_class(kind: str) -> type:
    "A dataclass with the recorded fields, which fills in what TRL's derives."
    fields = json.loads(RECORD.read_text("utf-8"))[kind]
    declared = {name: literal_eval(default) for name, (default, _) in fields.items()}
    derived = {name: literal_eval(unset) for name, (_, unset) in fields.items()}

    def __post_init__(self):
        for name, default in declared.items():
            if getattr(self, name) == default and name != "use_cpu":
                setattr(self, name, derived[name])

    made = [
        (
            name,
            Any,
            dataclasses.field(default_factory=lambda x=default: x),
        )
        for name, default in declared.items()
    ]
    return dataclasses.make_dataclass(kind, made, namespace={"__post_init__": __post_init__})


def trl_class(kind: str) -> tuple[type, str]:
    "TRL's configuration, and where it comes from."
    try:
        trl = importlib.import_module("trl")
        return getattr(trl, kind), f"trl {trl.__version__}"
    except ImportError:
        return recorded_class(kind), "the record"


def trl_args(kind: str, **options: Any) -> Any:
    "A configuration on a CPU; TRL refuses bfloat16 without a GPU unless it is told so."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers on its own renamed fields
        return trl_class(kind)[0](**{"use_cpu": True} | options)


if __name__ == "__main__":
    write_record()
