"""Code that trains or rebuilds models: the papers' experiments and tables, Primal-Attention, healing, ranks of keys."""

from attnlens.lazy import import_submodules

__getattr__ = import_submodules(__name__, ("primal",))
