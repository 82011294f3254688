"""Attention kernels, defined in the modules of this package; a Kernel is a kernel with its parameters."""

from attnlens.kernels.modifiers import FILTERS, HYBRIDS, TIES, Modifier
from attnlens.kernels.spec import Kernel
from attnlens.kernels.spelling import kernels, parsed

OWN = Kernel(kernels()["exponential"])  # the models' own kernel

__all__ = ["FILTERS", "HYBRIDS", "OWN", "TIES", "Kernel", "Modifier", "kernels", "parsed"]
