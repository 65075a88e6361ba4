"""plotly.io on a page: where figures go is not asked."""

from types import SimpleNamespace

renderers = SimpleNamespace(default=None)
