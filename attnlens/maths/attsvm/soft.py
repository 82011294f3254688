"""Solve the soft-margin problem, which is always feasible, unlike the hard-margin problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg.lapack import dposv
from scipy.optimize import Bounds, minimize

from attnlens.errors import UsageError
from attnlens.maths.attsvm.frobenius import UnitConstraints, solve
from attnlens.maths.attsvm.problem import check_solvable

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.maths.attsvm.problem import Problem

    Loads = Float[ndarray, " k"]

BETWEEN = 25  # L-BFGS-B steps between two polishings
NEWTON, WIDEST = 30, 1000
"""Newton steps of one polishing, and the most λ that a step solves for: its cost grows with their cube."""
RIDGES = tuple(10.0**power for power in range(-12, 1, 2))
"""Added to the diagonal of G, which is 1: if G is singular, steps would otherwise be too long for the bounds."""
NOTICED = 1e-6
"""Slack, relative to |b| + |score|, that counts as a violation: λ is known to the duality gap, not to rounding."""


@dataclass(frozen=True)
class SoftMargin:
    """The W that violates its constraints least: min ½‖W‖² + C Σ max(0, b − u W z), |b − u W z| at equalities."""

    W: Float[Tensor, "d d_query"]  # W(λ), not rescaled
    multipliers: Float[Tensor, " constraints"]  # λ in [0, C], in [−C, C] at equalities
    slack: float  # Σ max(0, b − u W z), |b − u W z| at equalities: 0 if the problem is separable and C is large enough
    violated: float
    """Share of the constraints with slack beyond rounding; an inequality on the wrong side has slack above b."""
    gap: float  # Relative duality gap (P − D)/P of the objective
    iterations: int  # L-BFGS-B steps


def soft_margin(problem: Problem, C: float, tolerance: float = 1e-9, limit: int = 5000) -> SoftMargin:
    """Maximise bᵀλ − ½‖W(λ)‖², 0 ≤ λ ≤ C (Cortes and Vapnik 1995), by L-BFGS-B and Newton steps.

    Stops at a gap of `tolerance` or after `limit` steps; the result has the gap. Raises UsageError unless C is finite
    and positive, for a tolerance ≤ 0, a limit < 1 and sizes outside [1e-50, 1e50]; UnposedError for a problem without
    constraints.
    """
    check_solvable(problem, tolerance, limit)
    if not (C > 0.0 and math.isfinite(C)):
        raise UsageError(f"C is {C}, but must be positive and finite.", "Give a positive number, e.g. 1.")
    box = Box(problem, C)
    # The hard margin's λ, if it exists and lies in the box, is the answer; clipped to the box it is a start.
    start = solve(problem).multipliers.numpy() * box.scale
    loads, steps = box.minimise(np.clip(start, box.low, box.high), tolerance, limit)
    multipliers = torch.from_numpy(loads / box.scale)
    multipliers = torch.where(problem.equal, multipliers.clamp(-C, C), multipliers.clamp(0.0, C))
    W = problem.form(multipliers)
    scores = problem.scores(W)
    slack = problem.violations(scores)
    half = 0.5 * float(W.square().sum())
    primal, dual = half + C * float(slack.sum()), float(multipliers @ problem.margins) - half
    violated = slack > NOTICED * (problem.margins.abs() + scores.abs())
    return SoftMargin(
        W=W,
        multipliers=multipliers,
        slack=float(slack.sum()),
        violated=float(violated.double().mean()),
        gap=max(primal - dual, 0.0) / primal if primal > 0.0 else 0.0,
        iterations=steps,
    )


class Box(UnitConstraints):
    """The problem min ½λᵀGλ − bᵀλ over low ≤ λ ≤ high, for constraints of unit length."""

    def __init__(self, problem: Problem, C: float) -> None:
        super().__init__(problem)
        # A constraint of length 0 has the same loss for every W: its λ is C if b > 0, without effect on W.
        self.high = C * self.scale
        self.low = np.where(self.equal, -self.high, 0.0)
        self.rows = np.arange(len(self.u))

    def uphill(self, loads: Loads) -> Loads:
        """Return b − Gλ, the direction in which the dual objective rises."""
        rise: Loads = self.unit_bounds - self.unit_scores(self.rows, loads)
        return rise

    def is_optimal(self, loads: Loads, tolerance: float) -> bool:
        """Return whether the gap P − D, Σ max over the box of ∇·(λ' − λ), is within the tolerance of P."""
        uphill = self.uphill(loads)
        missing = float(np.maximum(uphill * (self.high - loads), uphill * (self.low - loads)).sum())
        return missing <= tolerance * (missing + 0.5 * float(loads @ (self.unit_bounds + uphill)))

    def minimise(self, loads: Loads, tolerance: float, limit: int) -> tuple[Loads, int]:
        """Return λ and the number of steps, by L-BFGS-B and, every few steps, Newton steps on the free λ."""

        def objective(loads: Loads) -> tuple[float, Loads]:
            downhill = -self.uphill(loads)
            return 0.5 * float(loads @ (downhill - self.unit_bounds)), downhill

        steps, box = 0, Bounds(self.low, self.high)
        while not self.is_optimal(loads, tolerance):
            loads = self.polish(loads)
            if steps >= limit or self.is_optimal(loads, tolerance):
                break
            options = {"maxiter": min(BETWEEN, limit - steps), "ftol": 0.0, "gtol": 0.0}
            answer = minimize(objective, loads, jac=True, method="L-BFGS-B", bounds=box, options=options)
            loads, steps = answer.x, steps + (answer.nit or BETWEEN)
        return loads, steps

    def polish(self, loads: Loads) -> Loads:
        """Return λ after projected Newton steps (Bertsekas 1982) on the λ not stopped by a bound, while they gain."""
        uphill = self.uphill(loads)
        for _ in range(NEWTON):
            blocked = ((loads <= self.low) & (uphill <= 0.0)) | ((loads >= self.high) & (uphill >= 0.0))
            free = np.flatnonzero(~blocked)
            if not 0 < len(free) <= WIDEST:
                break
            better = self.take_newton_step(loads, uphill, free)
            if better is None:
                break
            loads, uphill = better
        return loads

    def take_newton_step(self, loads: Loads, uphill: Loads, free: Int[ndarray, " face"]) -> tuple[Loads, Loads] | None:
        """Return the best λ of Newton steps with any of the RIDGES, clipped to the box, and its gradient, or None."""
        best, largest_gain = None, 0.0
        curvature, diagonal = self.unit_gram(free, free), np.diag_indices(len(free))
        for ridge in RIDGES:
            curvature[diagonal] = 1.0 + ridge
            move, failed = dposv(curvature, uphill[free])[1:]
            if failed:
                continue
            moved = loads.copy()
            moved[free] = np.clip(loads[free] + move, self.low[free], self.high[free])
            uphill_after = self.uphill(moved)
            gain = float((moved - loads) @ (uphill + uphill_after))  # twice the rise of the quadratic objective
            if gain > largest_gain:
                best, largest_gain = (moved, uphill_after), gain
        return best
