"""Primal weights of a kernel SVD, its objective J, and angles between its spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch

from attnlens.choices import Convention
from attnlens.errors import UsageError
from attnlens.maths.ksvd.dual import Dual, centre_rows
from attnlens.maths.linalg import singular_values

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor


@dataclass(frozen=True)
class Primal:
    """W_e, W_r and Λ of Chen et al. 2023, Eq. 6, per head; scores cost O(n·s) and need no training tokens except F."""

    query_weight: Float[Tensor, "*batch sampled s"]
    """W_e = Σ_j Fφ_k(x_j) h_{r,j}ᵀ: the queries' weights are built from the keys (sampled = features if F is I)."""
    key_weight: Float[Tensor, "*batch sampled s"]
    """W_r = Σ_i Fφ_q(x_i) h_{e,i}ᵀ: the keys' weights are built from the queries."""
    multipliers: Float[Tensor, "*batch s"]
    """Λ = Σ⁻¹, 0 where σ is 0: h_e = Λe and h_r = Λr."""
    projection: Float[Tensor, "*batch sampled features"] | None = None
    """F; None is the identity."""

    def e_scores(self, query_features: Float[Tensor, "*batch n features"]) -> Float[Tensor, "*batch n s"]:
        """Return e_i = W_eᵀ F φ_q(x_i) of any queries."""
        return query_features.double() @ self._apply_projection(self.query_weight)

    def r_scores(self, key_features: Float[Tensor, "*batch m features"]) -> Float[Tensor, "*batch m s"]:
        """Return r_j = W_rᵀ F φ_k(x_j) of any keys."""
        return key_features.double() @ self._apply_projection(self.key_weight)

    def _apply_projection(self, weight: Float[Tensor, "*batch sampled s"]) -> Float[Tensor, "*batch features s"]:
        return weight if self.projection is None else self.projection.double().mT @ weight


def primal(
    solution: Dual,
    query_features: Float[Tensor, "*batch n features"],
    key_features: Float[Tensor, "*batch m features"],
    projection: Float[Tensor, "*batch sampled features"] | None = None,
) -> Primal:
    """Compute the primal weights of a dual solution from the stationarity of J; e and r agree with the dual's.

    `projection` is the F that the solution was computed with; the features are those of the training tokens.
    """
    through_keys = key_features.double().mT @ solution.right
    through_queries = query_features.double().mT @ solution.left
    if projection is not None:
        through_keys, through_queries = projection.double() @ through_keys, projection.double() @ through_queries
    return Primal(through_keys, through_queries, solution.multipliers, projection)


def objective(
    e: Float[Tensor, "*batch n s"],
    r: Float[Tensor, "*batch m s"],
    query_weight: Float[Tensor, "*#batch sampled s"],
    key_weight: Float[Tensor, "*#batch sampled s"],
    multipliers: Float[Tensor, "*#batch s"],
    convention: Convention = "paper",
) -> Float[Tensor, "*batch"]:
    """Return J of every head, of any sign, in the kernel's unit, by the convention `paper` (Eq. 6) or `code`.

    paper: ½Σ_i e_iᵀΛe_i + ½Σ_j r_jᵀΛr_j − tr(W_eᵀW_r), 0 at every stationary point, each half of the scores being ½Σσ.
    That is not sufficient (J is indefinite): check `residual` too. code: ½mean_i‖Λe_i‖² + ½mean_j‖Λr_j‖² −
    tr(W_eᵀW_r), 0 if Λ² is n/σ instead of Λ = 1/σ. Differentiable in every argument. Raises UsageError for another
    convention.
    """
    _check_convention(convention)
    trace = (query_weight * key_weight).sum((-2, -1))
    weight = (multipliers if convention == "paper" else multipliers.square())[..., None, :]
    spread_e, spread_r = ((scores.square() * weight).sum(-1) for scores in (e, r))
    if convention == "paper":
        return (spread_e.sum(-1) + spread_r.sum(-1)) / 2 - trace
    return (spread_e.mean(-1) + spread_r.mean(-1)) / 2 - trace


def regulariser(
    objectives: Float[Tensor, "*batch layers heads"], convention: Convention = "paper"
) -> Float[Tensor, "*batch"]:
    """Return the term ≥ 0 that η multiplies in the loss. paper: Σ_layers Σ_heads J². code: mean_layers (mean_heads J)².

    The paper has one J per layer and does not mention heads. Here each head is a problem of its own, so that J < 0 of
    one head cannot cancel J > 0 of another, as it can in the code's mean. Raises UsageError for another convention.
    """
    _check_convention(convention)
    if convention == "paper":
        return objectives.square().sum((-2, -1))
    return objectives.mean(-1).square().mean(-1)


def _check_convention(convention: str) -> None:
    if convention not in get_args(Convention):
        raise UsageError(f"Unknown convention of the objective J: {convention!r}.", 'Write "paper" or "code".')


def principal_angles(
    left: Float[Tensor, "*batch n s"], right: Float[Tensor, "*batch n s"]
) -> Float[Tensor, "*batch s"]:
    """Return the angles between two spaces given by orthonormal columns, ascending, in [0, π/2].

    Zero columns span nothing and count as π/2 at the end. Small angles are computed from the sines, large ones from the
    cosines, so that both are exact to rounding (Knyazev & Argentati 2002).
    """
    overlap = left.mT @ right
    cosines = singular_values(overlap).clamp(max=1.0)  # rounding can leave a cosine above 1
    # parts outside the left space, ascending like the angles, except that zero columns come first
    sines = singular_values(right - left @ overlap).clamp(max=1.0).flip(-1)
    empty = (right == 0).all(-2).sum(-1, keepdim=True)
    places = (torch.arange(sines.shape[-1], device=sines.device) + empty).clamp(max=sines.shape[-1] - 1)
    # At 45° both are as exact; the acos of a cosine near 1 would lose half of the digits.
    return torch.where(cosines > 0.5**0.5, sines.gather(-1, places).asin(), cosines.acos())


def mean_angle(
    left: Float[Tensor, "*batch n s"], right: Float[Tensor, "*batch n s"], sizes: Real[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return the mean principal angle in radians between the spans of the first `sizes` columns; NaN if that is none.

    0 if both spans are equal, as for a symmetric K; π/2 if they are orthogonal. If singular values are equal at the
    border, the span is arbitrary.
    """
    first = torch.arange(left.shape[-1], device=left.device) < sizes[..., None]
    angles = principal_angles(*(torch.where(first[..., None, :], part, 0.0) for part in (left, right)))
    return torch.where(first, angles, 0.0).sum(-1) / first.sum(-1)


def share_inside(
    values: Float[Tensor, "*batch n value_dim"], basis: Float[Tensor, "*batch n s"], sizes: Real[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return ‖H_rᵀ V‖²/‖V‖² in [0, 1], V centred over tokens, H_r the first `sizes` of orthonormal columns.

    Use H_r of K(I − 11ᵀ/n), whose key features are centred like V. It is orthogonal to the vector 1 and contains, for V
    with independent normal entries, sizes/(n − 1) on average. A space that leans towards 1 contains less, down to
    (sizes − 1)/(n − 1), as that of K itself if its first mode is near-constant. NaN if all tokens have the same value.
    """
    centred = centre_rows(values)
    first = torch.arange(basis.shape[-1], device=basis.device) < sizes[..., None]
    inside = ((basis.mT @ centred).square().sum(-1) * first).sum(-1)
    return inside / centred.square().sum((-2, -1))
