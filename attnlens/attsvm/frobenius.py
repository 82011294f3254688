"""Which W of least Frobenius norm separates? An active set that grows by each query's worst constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from attnlens.attsvm.certificates import PROOF, certified
from attnlens.attsvm.constraints import Constraints
from attnlens.attsvm.leastdistance import EPS, nearest, pivoted
from attnlens.errors import UnposedError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.attsvm.problem import Problem
    from attnlens.attsvm.solution import Solution

SMALL = 128
"""Constraints up to which all of them are worked on from the start."""
RIDGE = 1e-13
"""Added to the diagonal of G, which is 1, where G is singular."""
WORST = 4
"""How many of a query's most violated constraints enter at once."""


def solve(problem: Problem, tolerance: float = 1e-9, limit: int = 200) -> Solution:
    """W_mm = argmin ‖W‖_F s.t. u_cᵀ W z_q(c) ≥ b_c, = b_c where equal (Tarzanagh et al. 2023, Eq. Att-SVM), certified.

    min ½λᵀGλ − bᵀλ over the working set, then each query's most violated constraints join it, at most `limit` times.
    Status `inaccurate` with its gap where that is not enough. Raises UnposedError for a problem without constraints.
    """
    if not len(problem.margins):
        raise UnposedError("The problem has no constraint.", "Pose it on sequences of at least two tokens.")
    constraints = Constraints(problem)
    hopeless = constraints.hopeless
    if len(hopeless):
        return certified(problem, unscaled(constraints, hopeless, np.sign(constraints.bounds[hopeless])), tolerance)
    every = np.arange(len(constraints.u))
    rows = every if len(every) <= SMALL else np.flatnonzero(constraints.free)
    gram, loads = constraints.gram(rows, rows), np.zeros(len(rows))
    steps = 0
    while steps < limit:
        steps += 1
        loads = best(constraints, rows, gram, loads)
        joining = worst(constraints, rows, loads, tolerance)
        if not len(joining):
            break
        gram = grown(constraints, gram, rows, joining)
        rows, loads = np.append(rows, joining), np.append(loads, np.zeros(len(joining)))
    answer = certified(problem, unscaled(constraints, rows, loads), tolerance, steps)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    loads = nearest(constraints.explicit(rows), constraints.bounds[rows], constraints.free[rows])
    return certified(problem, unscaled(constraints, rows, loads), tolerance, steps)


def best(
    constraints: Constraints, rows: Int[ndarray, " k"], gram: Float[ndarray, "k k"], loads: Float[ndarray, " k"]
) -> Float[ndarray, " k"]:
    """λ of the working set alone; starts from the support it had."""
    bounds, free = constraints.bounds[rows], constraints.free[rows]
    found = pivoted(gram, bounds, free, loads != 0.0)
    if found is None:
        # Repeated constraints share their λ under a ridge that changes W by less than the tolerance.
        found = pivoted(gram + RIDGE * np.eye(len(rows)), bounds, free, loads != 0.0)
        if found is not None and RIDGE * np.abs(found).max() > 1e-11 * np.abs(bounds).max():
            found = None
    return nearest(constraints.explicit(rows), bounds, free) if found is None else found


def worst(
    constraints: Constraints, rows: Int[ndarray, " k"], loads: Float[ndarray, " k"], tolerance: float
) -> Int[ndarray, " joining"]:
    """Each query's WORST most violated constraints outside the working set; none when λ proves that no W exists."""
    if len(rows) == len(constraints.u):
        return rows[:0]
    held = np.flatnonzero(loads)
    scores = constraints.scores(rows[held], loads[held])
    bounds, worth = constraints.bounds, float(loads @ constraints.bounds[rows])
    reach = float(np.abs(loads).sum())
    if worth > PROOF * reach and loads @ scores[rows] <= (PROOF * reach) ** 2:
        return rows[:0]
    short = bounds - scores - 0.1 * tolerance * np.abs(bounds) - EPS * reach
    short[rows] = -np.inf
    joining = []
    for _, block in constraints.blocks:
        candidates = constraints.order[block]
        top = candidates[np.argsort(-short[candidates])[:WORST]]
        joining.append(top[short[top] > 0.0])
    return np.concatenate(joining)


def grown(
    constraints: Constraints, gram: Float[ndarray, "k k"], rows: Int[ndarray, " k"], joining: Int[ndarray, " more"]
) -> Float[ndarray, "whole whole"]:
    """The Gram matrix of the working set and what joins it."""
    side = constraints.gram(rows, joining)
    return np.block([[gram, side], [side.T, constraints.gram(joining, joining)]])


def unscaled(
    constraints: Constraints, rows: Int[ndarray, " k"], loads: Float[ndarray, " k"]
) -> Float[Tensor, " constraints"]:
    """λ of every constraint as it was posed, before its length was divided out."""
    multipliers = np.zeros(len(constraints.u))
    multipliers[rows] = loads
    return torch.from_numpy(multipliers / constraints.scale)
