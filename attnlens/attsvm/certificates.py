"""Certificates of a solution: status, duality gap and margins recomputed from its multipliers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnlens.attsvm.problem import Solution, bounded, ordinary
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.attsvm.problem import Problem, Status

    Each = Float[Tensor, " constraints"]

PROOF = 1e-10
"""‖Σλ u zᵀ‖ / Σ|λ|‖u zᵀ‖ up to which λ proves that there is no W: any W would be 10¹⁰ times the constraints' scale."""
ROUNDING = 1e-10
"""Violation of a constraint, against |b| + ‖W‖‖u zᵀ‖, that float64 leaves where no scaling can remove it."""
NEGLIGIBLE = 1e-9
"""Share of the largest λ‖u zᵀ‖ below which a constraint carries nothing."""


def certified(problem: Problem, multipliers: Each, tolerance: float = 1e-9, iterations: int = 0) -> Solution:
    """The answer that λ proves: D = (Σλb)²/(2‖W(λ)‖²) ≤ ½‖W*‖² ≤ P, the value of W(λ) scaled until it is feasible.

    Negative λ at inequalities are set to 0, so that D is a true bound for any λ. Where equalities with b ≠ 0 forbid
    scaling, or where b ≤ 0, what rounding leaves of a violation r is charged to P as Σ|λ|r, its first-order price, and
    more than rounding is `inaccurate` with an infinite gap. The gap is (P − D)/P. λ itself is scaled so that
    Σλb = ‖W(λ)‖². Raises UsageError when λ has another length or isn't finite, for a tolerance ≤ 0, and for sizes
    outside [1e-50, 1e50], at which rounding to 0 or ∞ would pass for a proof.
    """
    bounded(tolerance)
    ordinary(problem)
    if multipliers.shape != problem.margins.shape or not multipliers.isfinite().all():
        raise UsageError("The multipliers are not one finite number a constraint.", "Give λ of this problem.")
    free, bounds = problem.equal, problem.margins
    multipliers = torch.where(free, multipliers.double(), multipliers.double().clamp(min=0.0))
    W = problem.form(multipliers)
    norm, value = float(W.norm()), float(multipliers @ bounds)
    reach = lengths(problem)
    weight = float(multipliers.abs() @ reach)
    if value > PROOF * float(multipliers.abs() @ bounds.abs()) and norm <= PROOF * weight:
        return refuted(multipliers, free, norm, iterations)
    factor = value / norm**2 if value > 0.0 and norm > 0.0 else 0.0
    return judged(problem, multipliers * factor, W * factor, reach, tolerance, iterations)


def lengths(problem: Problem) -> Each:
    """‖u zᵀ‖ of every constraint."""
    reach: Each = problem.differences.norm(dim=-1) * problem.paired_queries.norm(dim=-1)
    return reach


def refuted(multipliers: Each, free: Bool[Tensor, " constraints"], norm: float, iterations: int) -> Solution:
    """No W exists (Gordan): the multipliers with Σλ = 1 over the inequalities, or Σ|λ| = 1 where all are equalities."""
    total = float(multipliers[~free].sum()) or float(multipliers.abs().sum())
    return Solution(
        status="infeasible",
        multipliers=multipliers / total,
        W=None,
        norm=None,
        gap=None,
        least=None,
        kkt=None,
        residual=norm / total,
        support=carried(multipliers.abs()),
        iterations=iterations,
    )


def carried(loads: Each) -> Bool[Tensor, " constraints"]:
    """Which loads are more than rounding of the largest."""
    return loads > NEGLIGIBLE * loads.max()


def judged(
    problem: Problem, multipliers: Each, W: Float[Tensor, "d d_query"], reach: Each, tolerance: float, iterations: int
) -> Solution:
    """The Solution of λ at its dual optimum along the ray, W = W(λ)."""
    free, bounds = problem.equal, problem.margins
    norm, scores = float(W.norm()), problem.scores(W)
    price = multipliers.abs()
    factor = feasible_scale(scores, bounds, free)
    slack = violations(factor * scores, bounds, free)
    span = bounds.abs() + factor * norm * reach
    broken = bool((slack > ROUNDING * span).any())
    primal = math.inf if broken else 0.5 * (factor * norm) ** 2 + float(price @ slack)
    gap = max((primal - 0.5 * norm**2) / primal, 0.0) if 0.0 < primal < math.inf else primal
    status: Status = "optimal" if gap <= tolerance else "inaccurate"
    return Solution(
        status=status,
        multipliers=multipliers,
        W=W * factor,
        norm=norm * factor,
        gap=gap,
        least=None if free.all() else float((scores - bounds)[~free].min()),
        kkt=optimality(scores, bounds, free, price, norm, reach),
        residual=None,
        support=carried(price * reach),
        iterations=iterations,
    )


def feasible_scale(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> float:
    """The least t with t · score ≥ b wherever b > 0; 1 where there is none or an equality with b ≠ 0 fixes it."""
    positive = ~free & (bounds > 0.0)
    if not positive.any() or (bounds[free] != 0.0).any() or not (scores[positive] > 0.0).all():
        return 1.0
    return float((bounds[positive] / scores[positive]).max())


def violations(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> Each:
    """How far each constraint is broken: |score − b| at equalities, b − score where positive elsewhere."""
    short = bounds - scores
    return torch.where(free, short.abs(), short.clamp(min=0.0))


def optimality(
    scores: Each, bounds: Each, free: Bool[Tensor, " constraints"], price: Each, norm: float, reach: Each
) -> float:
    """The larger of violation against |b| + ‖W‖‖u zᵀ‖ and λ|score − b| against ‖W‖²; W = W(λ) by construction."""
    span = bounds.abs() + norm * reach
    broken = float((violations(scores, bounds, free) / span.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return max(broken, float((price * (scores - bounds).abs()).max()) / norm**2) if norm > 0.0 else broken
