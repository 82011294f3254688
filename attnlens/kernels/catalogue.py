"""Which kernels are there? Those that this room's files enter, and those that other packages offer as entry points."""

from __future__ import annotations

from importlib import import_module, metadata

from attnlens.registry import KERNELS, KernelInfo

for _file in ("products", "distances", "features", "lowrank", "primal"):
    import_module(f"attnlens.kernels.{_file}")


def kernels() -> dict[str, KernelInfo]:
    """Every kernel by name, in the order of entry."""
    for entry in metadata.entry_points(group="attnlens.kernels"):
        entry.load()
    return dict(KERNELS)
