"""Which inner products decide everything about W_Q W_Kᵀ? Its factors' Gram matrices, of size head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.parallel import over_heads
from attnlens.linalg.rotation import Rotation

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import QueryKey


@dataclass(frozen=True)
class Grams:
    """G_Q = W_QᵀW_Q, G_K = W_KᵀW_K and C = W_KᵀW_Q of every query head with its own key head, in float64."""

    query: Float[Tensor, "*batch heads head_dim head_dim"]
    """G_Q."""
    key: Float[Tensor, "*batch heads head_dim head_dim"]
    """G_K, that of the head's key head."""
    cross: Float[Tensor, "*batch heads head_dim head_dim"]
    """C; zero where queries and keys live on different domains."""

    @property
    def joint(self) -> Float[Tensor, "*batch heads twice twice"]:
        """B = [W_Q W_K]ᵀ[W_Q W_K], 2·head_dim square."""
        above = torch.cat((self.query, self.cross.mT), -1)
        below = torch.cat((self.cross, self.key), -1)
        return torch.cat((above, below), -2)

    def averaged(self, rotation: Rotation) -> Grams:
        """The Gram matrices of the stacked factors [W_Q R(i)]_i and [W_K R(j)]_j, over the number of positions."""
        return Grams(rotation.averaged(self.query), rotation.averaged(self.key), rotation.averaged(self.cross))


def grams(query_key: QueryKey) -> Grams:
    """G_Q, G_K and C of every head of a QueryKey, without its scale and before rotation.

    G_K is computed once for each key head. In cross-attention C is zero: queries and keys share no directions.
    """
    query, key = query_key.query.double(), query_key.key.double()
    key_gram = over_heads(_inner, key, key)[..., list(query_key.key_of), :, :]
    query_gram = over_heads(_inner, query, query)
    if query_key.site.part == "cross":
        return Grams(query_gram, key_gram, torch.zeros_like(query_gram))
    return Grams(query_gram, key_gram, over_heads(_inner, query_key.paired_key.double(), query))


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return left.mT @ right
