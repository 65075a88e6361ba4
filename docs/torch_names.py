"""Write docs/page_tensors/torch_names.py: what torch has, so that a page can tell what it lacks from what is misspelt.

python docs/torch_names.py
"""

import textwrap
from pathlib import Path

PLACE = Path(__file__).parent / "page_tensors/torch_names.py"
HEAD = '''"""The public names of torch 2.13: a name that is not here either is misspelt.

Written by docs/torch_names.py.
"""
'''


def listed(name: str, names: list[str]) -> str:
    lines = textwrap.wrap(" ".join(sorted(names)), 96)
    return f'\n{name} = set(\n    """\n' + "\n".join(lines) + '\n""".split()\n)\n'


def text() -> str:
    import torch

    def public(thing: object) -> list[str]:
        return [name for name in dir(thing) if not name.startswith("_")]

    functions = [
        name for name in public(torch) if name[0].islower() and callable(getattr(torch, name))
    ]
    return HEAD + listed("TENSOR", public(torch.Tensor)) + listed("TORCH", functions)


if __name__ == "__main__":
    PLACE.write_text(text(), "utf-8")
