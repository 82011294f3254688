"""Code that trains or rebuilds models: healing, key ranks, Primal-Attention, the papers' experiments and tables.

docs/architecture.md describes the modules. Imported by `cli`, and by `attnlens` itself for its public functions.
"""

from attnlens.lazy import import_submodules

__getattr__ = import_submodules(__name__, ("primal",))
