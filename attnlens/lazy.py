"""Import modules at their first use, so that listing kernels or measures loads neither torch nor scipy."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stand-in for a module, which is imported when one of its attributes is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
