"""What does a rotary position encoding do to a trace or a Gram matrix, summed over positions?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """R(0) … R(positions − 1) by their entries that are not always zero (2 · head_dim of head_dim² under RoPE).

    Both sums below are quadratic in R, so they are a sum over pairs of entries: their cost does not grow with
    positions · head_dim³, as that of multiplying the matrices out would.
    """

    values: Float[Tensor, "positions entries"]
    """The entries, in float64."""
    rows: Int[Tensor, " entries"]
    """Their rows."""
    columns: Int[Tensor, " entries"]
    """Their columns."""
    size: int
    """head_dim."""

    @classmethod
    def of(cls, matrices: Float[Tensor, "positions head_dim head_dim"]) -> Rotation:
        """The rotation with these matrices."""
        rows, columns = (matrices != 0).any(0).nonzero(as_tuple=True)
        return cls(matrices[:, rows, columns].double(), rows, columns, matrices.shape[-1])

    @property
    def transposed(self) -> Rotation:
        """R(i)ᵀ = R(−i) in the place of R(i)."""
        return replace(self, rows=self.columns, columns=self.rows)

    def averaged(self, matrix: Float[Tensor, "*batch head_dim head_dim"]) -> Float[Tensor, "*batch head_dim head_dim"]:
        """mean_i R(i)ᵀ X R(i)."""
        pairs = self.values.mT @ self.values / len(self.values)
        terms = matrix[..., self.rows[:, None], self.rows] * pairs
        into = torch.nn.functional.one_hot(self.columns, self.size).to(terms)
        return into.mT @ terms @ into

    def traces(
        self,
        left: Float[Tensor, "*batch terms head_dim head_dim"],
        right: Float[Tensor, "*batch terms head_dim head_dim"],
    ) -> Float[Tensor, "*batch positions"]:
        """Σ_terms tr(X R(Δ)ᵀ Y R(Δ)) for each distance Δ = 0 … positions − 1."""
        x = left.mT[..., self.columns[:, None], self.columns]
        y = right[..., self.rows[:, None], self.rows]
        pairs = (x * y).sum(-3)
        return ((self.values @ pairs) * self.values).sum(-1)
