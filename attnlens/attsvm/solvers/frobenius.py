"""Max-margin W of least Frobenius norm, by an active set that grows by each query's worst constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from attnlens.attsvm.certificates import PROOF, certified
from attnlens.attsvm.solvers.active_set import EPS, damped, nearest, pivoted
from attnlens.attsvm.solvers.equalities import Eliminated
from attnlens.attsvm.solvers.gram import UnitConstraints
from attnlens.attsvm.validation import bounded, ordinary
from attnlens.errors import UnposedError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.attsvm.problem import Problem
    from attnlens.attsvm.solution import Solution

SMALL = 128
"""Constraints up to which all of them are worked on from the start."""
DAMPING = 1e-2
"""Added to the diagonal of G, which is 1, at the first damped step."""
PATIENCE = 60
"""Damped steps that a degenerate problem may take."""
WORST = 4
"""How many of a query's most violated constraints enter at once."""


def solve(problem: Problem, tolerance: float = 1e-9, limit: int = 200) -> Solution:
    """W_mm = argmin ‖W‖_F s.t. u_cᵀ W z_q(c) ≥ b_c, = b_c where equal (Tarzanagh et al. 2023, Eq. Att-SVM), certified.

    min ½λᵀGλ − bᵀλ over the working set, then each query's most violated constraints join it, at most `limit` times;
    many equalities are eliminated first. Status `inaccurate` with its gap where that is not enough. Raises UsageError
    for a tolerance ≤ 0, a limit < 1 and sizes outside [1e-50, 1e50]; UnposedError for a problem without constraints.
    """
    bounded(tolerance, limit)
    ordinary(problem)
    if not len(problem.margins):
        raise UnposedError("The problem has no constraint.", "Pose it on sequences of at least two tokens.")
    constraints = UnitConstraints(problem)
    hopeless = constraints.hopeless
    if len(hopeless):
        return certified(problem, unscaled(constraints, hopeless, np.sign(constraints.bounds[hopeless])), tolerance)
    if int(constraints.free.sum()) > SMALL:
        return solve_eliminated(problem, Eliminated(constraints), tolerance, limit)
    every = np.arange(len(constraints.u))
    working = Working(constraints, every if len(every) <= SMALL else np.flatnonzero(constraints.free), tolerance)
    steps = working.run(limit)
    answer = certified(problem, unscaled(constraints, working.rows, working.loads), tolerance, steps)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    return certified(problem, unscaled(constraints, working.rows, working.nearest()), tolerance, steps)


def solve_eliminated(problem: Problem, space: Eliminated, tolerance: float, limit: int) -> Solution:
    """The same where equalities are many: on the inequalities alone, by what the equalities leave of them."""
    working, steps = Working(space, np.arange(0), tolerance), 0

    def certain(rows: Int[ndarray, " k"], loads: Float[ndarray, " k"], met: bool = True) -> Solution:
        return certified(problem, unscaled(space.whole, *space.completed(rows, loads, met)), tolerance, steps)

    def sharp(loads: Float[ndarray, " k"]) -> Solution:
        return certain(working.rows, space.sharpened(working.rows, loads))

    clash = space.inconsistent
    while steps < limit:
        if len(clash[0]):
            refuted = certain(*clash, met=False)
            if refuted.status == "infeasible":
                return refuted
        steps += 1
        joining = working.advance()
        if joining is None:
            break
        clash = space.contradicted(joining)
    answer = sharp(working.loads)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    loads = working.nearest() if working.patience else working.loads  # without patience they are the nearest already
    refuted = certain(working.rows, loads, met=False)
    return refuted if refuted.status == "infeasible" else sharp(loads)


class Working:
    """The constraints that are worked on, and their λ."""

    def __init__(self, constraints: UnitConstraints | Eliminated, rows: Int[ndarray, " k"], tolerance: float) -> None:
        self.constraints = constraints
        self.tolerance = tolerance
        self.rows = rows
        self.bounds: Float[ndarray, " k"] = constraints.bounds[rows]
        self.free: Bool[ndarray, " k"] = constraints.free[rows]
        self.loads = np.zeros(len(rows))
        self.gram = constraints.gram(rows, rows)
        self.settled = False  # whether λ is the best for these constraints
        self.joined = True  # whether any of them is new
        self.damping = 0.0  # 0 as long as signs are exchanged
        self.patience = PATIENCE

    def run(self, limit: int) -> int:
        """The steps taken until no constraint joins, at most `limit`."""
        for step in range(1, limit + 1):
            if self.advance() is None:
                return step
        return limit

    def advance(self) -> Int[ndarray, " joining"] | None:
        """One step; the constraints that join by it, or None where λ is the best for all."""
        self.improve()
        joining = self.worst()
        if self.settled and not len(joining):
            return None
        self.join(joining)
        return joining

    def improve(self) -> None:
        """The best λ of these constraints alone, from their support; a better λ where they are degenerate."""
        if not self.damping or not self.joined:
            found = pivoted(self.gram, self.bounds, self.free, self.loads != 0.0)
            if found is not None:
                self.loads, self.settled = found, True
                return
        if not self.patience:
            self.loads, self.settled = self.nearest(), True
            return
        self.patience -= 1
        self.loads, self.damping = damped(self.gram, self.bounds, self.free, self.loads, self.damping or DAMPING)
        short = self.bounds - self.gram @ self.loads
        short = np.where(self.free | (self.loads > 0.0), np.abs(short), short)
        self.settled = bool((short <= self._rounding(self.bounds)).all())

    def worst(self) -> Int[ndarray, " joining"]:
        """Each query's WORST most violated constraints outside the working set; none when λ proves that no W exists."""
        constraints, held = self.constraints, np.flatnonzero(self.loads)
        scores = constraints.scores(self.rows[held], self.loads[held])
        proven = PROOF * float(np.abs(self.loads).sum())
        if self.loads @ self.bounds > proven and self.loads @ scores[self.rows] <= proven**2:
            # λ that grows by damped steps only tends to a proof; NNLS finds one that is exact.
            self.patience = 0
            return self.rows[:0]
        short = constraints.bounds - scores - self._rounding(constraints.bounds)
        short[self.rows] = -np.inf
        joining = [self.rows[:0]]
        for _, block in constraints.blocks:
            candidates = constraints.order[block]
            top = candidates[np.argsort(-short[candidates])[:WORST]]
            joining.append(top[short[top] > 0.0])
        return np.concatenate(joining)

    def join(self, joining: Int[ndarray, " more"]) -> None:
        """They are worked on too, from λ = 0."""
        self.joined = len(joining) > 0
        if not self.joined:
            return
        side = self.constraints.gram(self.rows, joining)
        self.gram = np.block([[self.gram, side], [side.T, self.constraints.gram(joining, joining)]])
        self.rows, self.loads = np.append(self.rows, joining), np.append(self.loads, np.zeros(len(joining)))
        self.bounds, self.free = self.constraints.bounds[self.rows], self.constraints.free[self.rows]

    def nearest(self) -> Float[ndarray, " k"]:
        """λ by NNLS, from nothing and slowly, whatever they are."""
        return nearest(self.constraints.explicit(self.rows), self.bounds, self.free)

    def _rounding(self, bounds: Float[ndarray, " some"]) -> Float[ndarray, " some"]:
        """What a constraint may lack."""
        lacking: Float[ndarray, " some"] = 0.1 * self.tolerance * np.abs(bounds) + EPS * np.abs(self.loads).sum()
        return lacking


def unscaled(
    constraints: UnitConstraints, rows: Int[ndarray, " k"], loads: Float[ndarray, " k"]
) -> Float[Tensor, " constraints"]:
    """λ of every constraint as it was posed, before its length was divided out."""
    multipliers = np.zeros(len(constraints.u))
    multipliers[rows] = loads
    return torch.from_numpy(multipliers / constraints.scale)
