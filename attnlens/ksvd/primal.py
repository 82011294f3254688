"""Primal kernel SVD: weights W_e, W_r on the features that give the scores of seen and unseen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.ksvd.dual import Dual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class Primal:
    """W_e, W_r and Λ of Chen et al. 2023, Eq. 6, per head; scores cost O(n·s) and need no training token but F."""

    query_weight: Float[Tensor, "*batch sampled s"]
    """W_e = Σ_j Fφ_k(x_j) h_{r,j}ᵀ: the queries' weights are made of the keys (sampled = features where F is I)."""
    key_weight: Float[Tensor, "*batch sampled s"]
    """W_r = Σ_i Fφ_q(x_i) h_{e,i}ᵀ: the keys' weights are made of the queries."""
    multipliers: Float[Tensor, "*batch s"]
    """Λ = Σ⁻¹, 0 where σ is 0: h_e = Λe and h_r = Λr."""
    projection: Float[Tensor, "*batch sampled features"] | None = None
    """F; None is the identity."""

    def e_scores(self, query_features: Float[Tensor, "*batch n features"]) -> Float[Tensor, "*batch n s"]:
        """e_i = W_eᵀ F φ_q(x_i) of any queries."""
        return query_features.double() @ self._mapped(self.query_weight)

    def r_scores(self, key_features: Float[Tensor, "*batch m features"]) -> Float[Tensor, "*batch m s"]:
        """r_j = W_rᵀ F φ_k(x_j) of any keys."""
        return key_features.double() @ self._mapped(self.key_weight)

    def _mapped(self, weight: Float[Tensor, "*batch sampled s"]) -> Float[Tensor, "*batch features s"]:
        return weight if self.projection is None else self.projection.double().mT @ weight


def primal(
    solution: Dual,
    query_features: Float[Tensor, "*batch n features"],
    key_features: Float[Tensor, "*batch m features"],
    projection: Float[Tensor, "*batch sampled features"] | None = None,
) -> Primal:
    """The primal weights of a dual solution, by the stationarity of J; e and r agree with the dual's.

    `projection` is F, as the solution was made with; the features are those of the training tokens.
    """
    through_keys = key_features.double().mT @ solution.right
    through_queries = query_features.double().mT @ solution.left
    if projection is not None:
        wide = projection.double()
        through_keys, through_queries = wide @ through_keys, wide @ through_queries
    return Primal(through_keys, through_queries, solution.multipliers, projection)
