"""Attention kernels, and attention computed with any of these kernels.

Contents: `registry` (the decorator `kernel`, KernelInfo; ties, filters, hybrids), `products`, `lowrank`, `primal` (the
built-in kernels with their fits), `spec` (Kernel: a kernel with its parameters), `pair_weights` (weights of token pairs
for fits), `spelling` (parse `rbf:gamma=1+window:64`), `attention` (softmax(log k + bias) v, exact). Inputs: a
`records.Call` (queries, keys, values, mask of one attention computation), or queries and keys. Outputs: log k,
attention weights, attention outputs, and parameters fitted per head. Importers: `requests`, `report`, `models`, `runs`,
`lab` and `cli`. Of these modules, only `attention` loads torch on import.

Importing the package registers the kernels of all its modules. To add a kernel, add a function to any module.
"""

from importlib import import_module
from pkgutil import iter_modules

from attnlens.kernels.registry import FILTERS, HYBRIDS, KERNELS, TIES, Modifier, kernels
from attnlens.kernels.spec import Kernel
from attnlens.kernels.spelling import parsed

# `products` is imported first, because lists show kernels in the order of registration
for _module in sorted(iter_modules(__path__), key=lambda module: module.name != "products"):
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")

OWN = Kernel(KERNELS["exponential"])  # the kernel of unmodified models

__all__ = ["FILTERS", "HYBRIDS", "OWN", "TIES", "Kernel", "Modifier", "kernels", "parsed"]
