"""What trains or rebuilds a model: the papers' experiments, their tables on small transformers, Primal-Attention."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a module when it is first used, as in `attnlens.lab.primal`."""
    if name in ("primal",):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
