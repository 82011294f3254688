"""Primal weights of a kernel SVD, its objective J, and angles between its spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch

from attnlens.choices import Convention
from attnlens.errors import UsageError
from attnlens.maths.ksvd.dual import Dual, centred
from attnlens.maths.linalg import singular_values

if TYPE_CHECKING:
    from jaxtyping import Float, Real
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


def objective(
    e: Float[Tensor, "*batch n s"],
    r: Float[Tensor, "*batch m s"],
    query_weight: Float[Tensor, "*#batch sampled s"],
    key_weight: Float[Tensor, "*#batch sampled s"],
    multipliers: Float[Tensor, "*#batch s"],
    convention: Convention = "paper",
) -> Float[Tensor, "*batch"]:
    """paper: J = ½Σ_i e_iᵀΛe_i + ½Σ_j r_jᵀΛr_j − tr(W_eᵀW_r) (Eq. 6). code: ½mean_i‖Λe_i‖² + ½mean_j‖Λr_j‖² − tr(…).

    One J a head, of any sign, in the kernel's unit. paper: J = 0 at every stationary point, each half of the scores
    being ½Σσ; that is necessary and not sufficient (J is indefinite): look at the eigen-residual beside it. code: 0
    where Λ² is n/σ instead of Λ = 1/σ. Differentiable in every argument. Raises UsageError for another convention.
    """
    _check(convention)
    trace = (query_weight * key_weight).sum((-2, -1))
    weight = (multipliers if convention == "paper" else multipliers.square())[..., None, :]
    spread_e, spread_r = ((scores.square() * weight).sum(-1) for scores in (e, r))
    if convention == "paper":
        return (spread_e.sum(-1) + spread_r.sum(-1)) / 2 - trace
    return (spread_e.mean(-1) + spread_r.mean(-1)) / 2 - trace


def regulariser(
    objectives: Float[Tensor, "*batch layers heads"], convention: Convention = "paper"
) -> Float[Tensor, "*batch"]:
    """What η multiplies in the training loss, ≥ 0. paper: Σ_layers Σ_heads J². code: mean_layers (mean_heads J)².

    The paper has one J a layer and says nothing of heads; each head is a problem of its own here, so that no head's
    J < 0 hides another's J > 0, as it can in the code's mean. Raises UsageError for another convention.
    """
    _check(convention)
    if convention == "paper":
        return objectives.square().sum((-2, -1))
    return objectives.mean(-1).square().mean(-1)


def _check(convention: str) -> None:
    if convention not in get_args(Convention):
        raise UsageError(f"{convention!r} is no convention of the objective J.", 'Write "paper" or "code".')


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
