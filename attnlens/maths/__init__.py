"""Mathematics on plain tensors, usable without a model: linear algebra, KSVD, Att-SVM and statistics."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a subpackage on first access, as in `attnlens.maths.attsvm`."""
    if name in ("attsvm", "ksvd", "linalg", "statistics"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
