"""Attention kernels, defined in the files of this room; a Kernel is one with its parameters."""

from attnlens.kernels.modifiers import FILTERS, HYBRIDS, TIES, Modifier
from attnlens.kernels.spec import Kernel
from attnlens.kernels.spelling import kernels, parsed

OWN = Kernel(kernels()["exponential"])  # the models' own kernel

__all__ = ["FILTERS", "HYBRIDS", "OWN", "TIES", "Kernel", "Modifier", "kernels", "parsed"]
