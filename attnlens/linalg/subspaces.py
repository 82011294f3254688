"""Angles between the column spaces of factors, which no change of basis within a head moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.linalg.parallel import over_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def largest_angle(
    one: Float[Tensor, "*batch n head_dim"], other: Float[Tensor, "*batch n head_dim"]
) -> Float[Tensor, "*batch"]:
    """The largest principal angle between two column spaces, in degrees; [0, 90].

    asin ‖(I − U Uᵀ)V‖₂ for orthonormal bases U and V, exact for small angles (Björck & Golub 1973). Directions whose
    singular value is within rounding, eps · n · σ₁, don't count; 90 where the ranks differ, NaN where both are 0.
    """
    return over_heads(_angles, one.double(), other.double())


def _angles(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack([_angle(*pair) for pair in zip(one, other, strict=True)])


def _angle(one: Tensor, other: Tensor) -> Tensor:
    first, second = _basis(one), _basis(other)
    if first.shape != second.shape:
        return one.new_tensor(90.0)
    if not first.shape[1]:
        return one.new_tensor(torch.nan)
    sine: Tensor = torch.linalg.matrix_norm(second - first @ (first.mT @ second), ord=2)
    return sine.clamp(max=1).asin().rad2deg()


def _basis(factor: Tensor) -> Tensor:
    """Orthonormal columns that span the factor's."""
    left, values, _ = torch.linalg.svd(factor, full_matrices=False)
    # Strict: a factor of zeros has no direction.
    kept: Tensor = left[:, values > torch.finfo(values.dtype).eps * max(factor.shape) * values[0]]
    return kept
