"""The known kernels: this room's, and those that other packages offer as entry points."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata

from attnlens.registry import KERNELS, KernelInfo

for _file in ("products", "distances", "features", "lowrank", "nearest", "primal"):
    import_module(f"attnlens.kernels.{_file}")


def kernels() -> dict[str, KernelInfo]:
    """Every kernel by name, in the order of entry."""
    _load_offered()
    return dict(KERNELS)


@cache
def _load_offered() -> None:
    """Import the kernels that other packages offer; once in a process."""
    for entry in metadata.entry_points(group="attnlens.kernels"):
        entry.load()
