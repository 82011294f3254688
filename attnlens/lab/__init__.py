"""Code that trains or rebuilds models: the papers' experiments and tables, Primal-Attention, healing, ranks of keys."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a submodule on first use, as in `attnlens.lab.primal`."""
    if name == "primal":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
