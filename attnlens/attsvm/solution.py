"""The answer of a solver: a direction with its certificate, or the proof that there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

Status = Literal["optimal", "infeasible", "inaccurate"]


@dataclass(frozen=True)
class Solution:
    """An answer to a Problem, and how far it can be trusted; recomputed from `multipliers`, whoever found them."""

    status: Status
    """optimal: the gap is within the tolerance; infeasible: `multipliers` prove that no W exists; inaccurate: neither
    was reached within the iteration limit, and `gap` says how far off W may be."""
    multipliers: Float[Tensor, " constraints"]
    """λ, ≥ 0 at inequalities. Infeasible: Gordan's certificate, Σλ = 1 over the inequalities and Σλ u zᵀ ≈ 0."""
    W: Float[Tensor, "d d_query"] | None
    """The solution, scaled so that its least margin is exactly met; None where there is none."""
    norm: float | None
    """‖W‖_F, or the nuclear norm Σσ(W) for the nuclear problem; the max-margin is 1/norm."""
    gap: float | None
    """Relative duality gap (P − D)/P of the squared norm (Frobenius) or the norm (nuclear), ≥ 0; None if infeasible."""
    least: float | None
    """min over inequalities of u W z − b, before W is rescaled; 0 at the optimum."""
    kkt: float | None
    """Largest violation of the optimality conditions, relative: complementarity, equalities, stationarity."""
    residual: float | None
    """‖Σλ u zᵀ‖ of a normalised certificate (infeasible only): 0 proves it."""
    support: Bool[Tensor, " constraints"]
    """Which constraints carry W: λ > 0 (equalities: λ ≠ 0), beyond rounding."""
    iterations: int
    """Steps of the outer loop."""
