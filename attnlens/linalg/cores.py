"""Which small matrix has the norm, the eigenvalues and the singular values of s · W_Q W_Kᵀ?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.grams import Grams
from attnlens.linalg.parallel import over_heads
from attnlens.linalg.rotation import Rotation

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey

LARGEST_CONDITION = 1e5
"""Condition above which a Cholesky factor of a Gram matrix, whose error grows with its square, gives way to QR."""


@dataclass(frozen=True)
class Core:
    """N = s · R_Q R_Kᵀ, where [W_Q W_K] = U [R_Q R_K], UᵀU = 1: M = U N Uᵀ, so M and N share every invariant.

    Under rotation M is the joint kernel on (content, position): its block (i, j) is W_Q R(i−j) W_Kᵀ, over the number of
    positions, so that its norm and singular values compare with those of one matrix.
    """

    root: Float[Tensor, "*batch heads twice twice"]
    """[R_Q R_K], upper triangular."""
    scale: float
    """s."""

    @property
    def query(self) -> Float[Tensor, "*batch heads twice head_dim"]:
        """R_Q."""
        return self.root[..., : self.root.shape[-1] // 2]

    @property
    def key(self) -> Float[Tensor, "*batch heads twice head_dim"]:
        """R_K."""
        return self.root[..., self.root.shape[-1] // 2 :]

    @cached_property
    def matrix(self) -> Float[Tensor, "*batch heads twice twice"]:
        """N; its rows from head_dim on are zero, because R_Q is triangular."""
        return over_heads(_outer, self.query, self.key) * self.scale

    @property
    def norm(self) -> Float[Tensor, "*batch heads"]:
        """‖M‖_F = s·√tr(G_Q G_K)."""
        norm: Tensor = torch.linalg.matrix_norm(self.matrix)
        return norm

    @property
    def singular_values(self) -> Float[Tensor, "*batch heads head_dim"]:
        """σ(M), descending; the d_model − head_dim that are always zero are left out."""
        return over_heads(torch.linalg.svdvals, self.matrix[..., : self.root.shape[-1] // 2, :])

    @cached_property
    def symmetric_eigenvalues(self) -> Float[Tensor, "*batch heads twice"]:
        """μ, the eigenvalues of S = (M + Mᵀ)/2, ascending; those that are always zero are left out."""
        return over_heads(torch.linalg.eigvalsh, (self.matrix + self.matrix.mT) / 2)

    @property
    def definiteness(self) -> Float[Tensor, "*batch heads"]:
        """Σμ / Σ|μ| in [−1, 1]: 1 iff S is positive semidefinite."""
        eigenvalues = self.symmetric_eigenvalues
        return eigenvalues.sum(-1) / eigenvalues.abs().sum(-1)

    @property
    def inertia(self) -> tuple[Float[Tensor, "*batch heads"], Float[Tensor, "*batch heads"]]:
        """How many μ are above, and how many below, ± eps · size · max|μ|; 0 … head_dim each."""
        eigenvalues = self.symmetric_eigenvalues
        largest = eigenvalues.abs().amax(-1, keepdim=True)
        border = torch.finfo(eigenvalues.dtype).eps * eigenvalues.shape[-1] * largest
        # Strict on both sides: an eigenvalue at the border is zero up to rounding, and a zero matrix has none.
        return (eigenvalues > border).sum(-1).double(), (eigenvalues < -border).sum(-1).double()

    @property
    def positivity(self) -> Float[Tensor, "*batch heads"]:
        """Re Σλ / Σ|λ| in [−1, 1], λ the eigenvalues of C = W_KᵀW_Q, the non-zero ones of M (Elhage et al. 2021)."""
        eigenvalues = over_heads(torch.linalg.eigvals, self.key.mT @ self.query)
        return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def core(query_key: QueryKey, grams: Grams) -> Core:
    """The core of every head of a QueryKey, given its Gram matrices (before rotation).

    The root is the Cholesky factor of the Gram matrix where the condition estimate allows it, else that of a QR of the
    factors themselves. Under rotation the stacked factors are too long for QR: there an ill-conditioned Gram matrix
    gets an eigenvalue root, in which singular values below about 1e-8 of the largest are rounding.
    """
    rotation = None if query_key.rotation is None else Rotation.of(query_key.rotation)
    joint = (grams if rotation is None else grams.averaged(rotation)).joint
    root, good = _cholesky(joint)
    if not good.all():
        bad = ~good
        apart = rotation is not None or query_key.site.part == "cross"
        root[bad] = _eigenvalue_root(joint[bad]) if apart else _qr_root(query_key, bad)
    return Core(root, query_key.scale)


def _cholesky(
    gram: Float[Tensor, "*batch twice twice"],
) -> tuple[Float[Tensor, "*batch twice twice"], Bool[Tensor, "*batch"]]:
    """R with RᵀR = B, and where its condition estimate √size / min diag(R), at unit columns, is small enough."""
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    unit = torch.where(lengths > 0, lengths, 1.0)
    lower = over_heads(_factor, gram / unit[..., None] / unit[..., None, :])
    least = lower.diagonal(dim1=-2, dim2=-1).amin(-1)
    return lower.mT * unit[..., None, :], least * LARGEST_CONDITION > gram.shape[-1] ** 0.5


def _factor(gram: Tensor) -> Tensor:
    """The Cholesky factor, or zero where the matrix is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(gram)
    return torch.where(failed[:, None, None] == 0, lower, 0.0)


def _qr_root(query_key: QueryKey, where: Bool[Tensor, "*batch heads"]) -> Float[Tensor, "some twice twice"]:
    """R of [W_Q W_K] = U R for some heads, filled up with rows of zeros where there are fewer rows than columns."""
    factors = torch.cat((query_key.query[where], query_key.paired_key[where]), -1).double()
    upper = over_heads(_upper, factors)
    return torch.nn.functional.pad(upper, (0, 0, 0, upper.shape[-1] - upper.shape[-2]))


def _eigenvalue_root(gram: Float[Tensor, "some twice twice"]) -> Float[Tensor, "some twice twice"]:
    """R with RᵀR = B; eigenvalues up to eps · size · largest, which may be negative by rounding, count as zero."""
    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    # Strict: a zero matrix has border 0 and keeps nothing.
    kept = torch.where(values > border, values, 0.0).sqrt()
    return over_heads(_upper, kept[..., None] * vectors.mT)


def _upper(matrix: Tensor) -> Tensor:
    upper: Tensor = torch.linalg.qr(matrix, mode="r").R
    return upper


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.mT
