"""Learn PPO and RLHF by running it, and go on using the library afterwards."""

import lazy_loader

__version__ = "0.2.0"


def install(extra: str) -> str:
    "How to install an optional part: from a clone. The index has an older project of this name."
    return f"pip install -e '.[{extra}]' in a clone of the repository"


# the public names stand in __init__.pyi; each is loaded when it is first asked for
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
