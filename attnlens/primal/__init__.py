"""How is a model trained with Primal-Attention? Its torch module, its loss, and whole models that own it."""

from attnlens.primal.attention import PrimalAttention, PrimalHeads, regulariser
from attnlens.primal.former import build

__all__ = ["PrimalAttention", "PrimalHeads", "build", "regulariser"]
