"""With which kernels can attention be computed? The files of this room define them; a Kernel is one with parameters."""

from attnlens.kernels.catalogue import kernels
from attnlens.kernels.modifiers import FILTERS, TIES, Filter, Modifier
from attnlens.kernels.spec import Kernel
from attnlens.kernels.spelling import parsed

__all__ = ["FILTERS", "TIES", "Filter", "Kernel", "Modifier", "kernels", "parsed"]
