"""Learn PPO and RLHF by running it, and go on using the library afterwards."""

import lazy_loader

__version__ = "0.1.0"

# the public names stand in __init__.pyi; each is loaded when it is first asked for
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
