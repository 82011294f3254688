"""The s leading singular triplets of a large dense kernel matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy.sparse.linalg import svds

from attnlens.ksvd.dual import EPS, Dual, all_finite, matrix_dual
from attnlens.ksvd.features import at_least_one

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray
    from torch import Tensor

SparseSolver = Literal["arpack", "propack"]
"""arpack: restarted Lanczos on KᵀK; residuals near 1e-15, but directions with σ below 1e-8·σ₁ are lost.
propack: Lanczos bidiagonalisation of K itself; about 1.5 times as fast, residuals near 1e-10."""


def truncated(matrix: Float[Tensor, "*batch n m"], s: int, solver: SparseSolver = "arpack") -> Dual:
    """The s leading singular triplets of a dense K, head by head, by Lanczos; the start vector is fixed.

    A library function, which no command calls: `truncated(attention, s=8)` of attention matrices (heads, n, m). It is
    for s far below min(n, m), as of attention over more than a thousand tokens; where 4s ≥ min(n, m) the full SVD is as
    fast, and is taken. For K of features use `dual`, which is exact and faster. σ up to eps · max(n, m) · σ₁ counts as
    0. Raises UsageError where s < 1 or the matrix has NaN or Inf.
    """
    at_least_one("s", s)
    n, m = matrix.shape[-2:]
    if 4 * s >= min(n, m):
        return matrix_dual(matrix, s)
    all_finite("kernel matrix", matrix)
    flat = matrix.detach().double().cpu().reshape(-1, n, m).numpy()
    found = [_one(each, s, solver) for each in flat]
    left, values, right = (
        torch.from_numpy(np.stack(part)).reshape(*matrix.shape[:-2], *part[0].shape).to(matrix.device)
        for part in zip(*found, strict=True)
    )
    return Dual(left, values, right, asked=s)


def _one(
    matrix: Float[ndarray, "n m"], s: int, solver: SparseSolver
) -> tuple[Float[ndarray, "n s"], Float[ndarray, " s"], Float[ndarray, "m s"]]:
    n, m = matrix.shape
    if not matrix.any():
        return np.zeros((n, s)), np.zeros(s), np.zeros((m, s))
    start = np.random.default_rng(0).standard_normal(n if solver == "propack" else min(n, m))
    u, values, vh = svds(matrix, k=s, solver=solver, v0=start, tol=0)
    order = np.argsort(-values)
    kept = values[order] > EPS * max(n, m) * values.max()
    return u[:, order] * kept, values[order] * kept, vh[order].T * kept
