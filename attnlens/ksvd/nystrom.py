"""Kernel SVD of a long sequence from a few of its rows and columns, by asymmetric Nyström features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.ksvd.dual import matrix_dual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class Nystrom:
    """Features with ⟨φ_q(x), φ_k(y)⟩ ≈ K(x, y) for any x and y, from a block K(x_I, y_J) of n' queries and m' keys.

    φ_q(x) = Σ^{−½}Vᵀ K(x, y_J)ᵀ and φ_k(y) = Σ^{−½}Uᵀ K(x_I, y), with W = U Σ Vᵀ the block's truncated SVD: together
    K(·, y_J) W⁺ K(x_I, ·) (the asymmetric Nyström method of Tao et al. 2023, up to its norms).
    """

    through_keys: Float[Tensor, "*batch m_sampled s"]
    """V Σ^{−½}; zero columns beyond the block's rank."""
    through_queries: Float[Tensor, "*batch n_sampled s"]
    """U Σ^{−½}; zero columns beyond the block's rank."""

    def query_features(self, columns: Float[Tensor, "*batch n m_sampled"]) -> Float[Tensor, "*batch n s"]:
        """φ_q of queries, from their kernel K(x, y_J) with the sampled keys."""
        return columns.double() @ self.through_keys

    def key_features(self, rows: Float[Tensor, "*batch n_sampled m"]) -> Float[Tensor, "*batch m s"]:
        """φ_k of keys, from the sampled queries' kernel K(x_I, y) with them."""
        return rows.double().mT @ self.through_queries


def nystrom(block: Float[Tensor, "*batch n_sampled m_sampled"], s: int) -> Nystrom:
    """The features of a block W = K(x_I, y_J); `dual` of them is the kernel SVD of the whole sequence.

    A library function for sequences whose K does not fit in memory, which no command calls: make the block of
    `sampled_rows` of queries and keys, hand K(x, y_J) to `query_features` and K(x_I, y) to `key_features`, and both to
    `dual`, as the example of `attnlens.ksvd` does.

    Exact where W has the rank of K and s is no less. Else, with k = n' = m' = s and W invertible, the error is at most
    σ_{k+1}(K) · ‖K(·, y_J)W⁻¹‖₂ · ‖V_J⁻¹‖₂, V_J the sampled rows of K's k leading right singular vectors. It grows as W
    comes near to singular: σ of W up to eps · size · σ₁ count as 0. Raises UsageError where s < 1 or
    W has NaN or Inf.
    """
    solution = matrix_dual(block, s)
    half = solution.multipliers.sqrt()[..., None, :]
    return Nystrom(through_keys=solution.right * half, through_queries=solution.left * half)
