"""R with RᵀR = AᵀA: by Cholesky where it is accurate, else by QR of A, else by eigenvalues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

LARGEST_CONDITION = 1e5
"""Condition above which a Cholesky factor of a Gram matrix, whose error grows with its square, gives way."""


def cholesky_root(
    gram: Float[Tensor, "some size size"],
) -> tuple[Float[Tensor, "some size size"], Bool[Tensor, " some"]]:
    """R by Cholesky at columns of unit length, and where its condition estimate √size / min diag(R) is at most 1e5.

    Elsewhere R is zero.
    """
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    lower, failed = torch.linalg.cholesky_ex(gram / lengths[..., None] / lengths[..., None, :])
    least = lower.diagonal(dim1=-2, dim2=-1).amin(-1)
    # A zero column makes NaN, which is not above anything.
    good = (failed == 0) & (least * LARGEST_CONDITION > gram.shape[-1] ** 0.5)
    return torch.where(good[:, None, None], lower.mT * lengths[..., None, :], 0.0), good


def factor_root(factor: Float[Tensor, "some n size"]) -> Float[Tensor, "some size size"]:
    """R by QR of A = U R, filled up with rows of zeros where A has fewer rows than columns."""
    upper: Tensor = torch.linalg.qr(factor.double(), mode="r").R
    return torch.nn.functional.pad(upper, (0, 0, 0, upper.shape[-1] - upper.shape[-2]))


def eigenvalue_root(gram: Float[Tensor, "some size size"]) -> Float[Tensor, "some size size"]:
    """R by eigenvalues; those up to eps · size · largest, which may be negative by rounding, count as zero.

    For an ill-conditioned B whose A is too long to be had: what is left below 1e-8 of the largest is rounding.
    """
    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    # Strict: a zero matrix has border 0 and keeps nothing.
    kept = torch.where(values > border, values, 0.0).sqrt()
    root: Tensor = kept[..., None] * vectors.mT
    return root
