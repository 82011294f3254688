"""Angles between left and right singular spaces, and between them and the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.ksvd.features import centred
from attnlens.linalg import singular_values

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor


def principal_angles(
    left: Float[Tensor, "*batch n s"], right: Float[Tensor, "*batch n s"]
) -> Float[Tensor, "*batch s"]:
    """The angles between two spaces given by orthonormal columns, ascending, in [0, π/2].

    Zero columns span nothing, and count as π/2 at the end. Small angles are read from the sines, large ones from the
    cosines, so that both are exact to rounding (Knyazev & Argentati 2002).
    """
    overlap = left.mT @ right
    cosines = singular_values(overlap).clamp(max=1.0)
    # what lies outside the left space, ascending as the angles are, but for the zero columns, which come first
    sines = singular_values(right - left @ overlap).clamp(max=1.0).flip(-1)
    empty = (right == 0).all(-2).sum(-1, keepdim=True)
    places = (torch.arange(sines.shape[-1], device=sines.device) + empty).clamp(max=sines.shape[-1] - 1)
    return torch.where(cosines > 0.5**0.5, sines.gather(-1, places).asin(), cosines.acos())


def mean_angle(
    left: Float[Tensor, "*batch n s"], right: Float[Tensor, "*batch n s"], sizes: Real[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Mean principal angle in radians between the spaces of the first `sizes` columns; NaN where that is none.

    0 where both are one space, as for a symmetric K; π/2 where they are orthogonal. Between singular values that are
    equal the border of such a space is arbitrary.
    """
    kept = torch.arange(left.shape[-1], device=left.device) < sizes[..., None]
    angles = principal_angles(*(torch.where(kept[..., None, :], part, 0.0) for part in (left, right)))
    return torch.where(kept, angles, 0.0).sum(-1) / kept.sum(-1)


def share_inside(
    values: Float[Tensor, "*batch n value_dim"], basis: Float[Tensor, "*batch n s"], sizes: Real[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """‖H_rᵀ V‖²/‖V‖² in [0, 1], V centred over tokens, H_r the first `sizes` of orthonormal columns.

    Take H_r of K(I − 11ᵀ/n), whose key features are `centred` as V is: it is orthogonal to 1, and by chance, of V with
    independent normal entries, holds sizes/(n − 1) on average. A space that leans to 1, as that of K itself does where
    its first mode is near-constant, holds less, down to (sizes − 1)/(n − 1). NaN where all tokens have the same value.
    """
    spread = centred(values)
    kept = torch.arange(basis.shape[-1], device=basis.device) < sizes[..., None]
    inside = ((basis.mT @ spread).square().sum(-1) * kept).sum(-1)
    return inside / spread.square().sum((-2, -1))
