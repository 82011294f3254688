"""With which kernels can attention be computed? The files of this room define them; a Kernel is one with parameters."""

from importlib import import_module

from attnlens.kernels.modifiers import FILTERS, TIES, Filter, Modifier
from attnlens.kernels.spec import Kernel, parsed

for _room in ("products", "distances", "features", "lowrank"):
    import_module(f"{__name__}.{_room}")

__all__ = ["FILTERS", "TIES", "Filter", "Kernel", "Modifier", "parsed"]
