"""Nonnegative least distance for few constraints: sign exchanges, damped Newton steps, NNLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg.lapack import dposv
from scipy.optimize import nnls

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from numpy import ndarray

    Each = Float[ndarray, " k"]

EPS = float(np.finfo(np.float64).eps)
PATIENCE = 3
"""Exchanges in a row without a new least number of wrong signs before pivoting gives up."""
DEPENDENT = 1e-11
"""Singular value, against the largest, below which equalities repeat each other."""
INCONSISTENT = 1e-9
"""What may remain of equalities, against the largest b, that can be met."""
LEAST_DAMPING = 1e-12
"""Damping, against the diagonal of G, below which a step is Newton's to rounding."""
SHORTEST = 1e-6
"""Share of a Newton step below which it leads nowhere."""
LONG = 1e-3
"""Residual of NNLS below which w is longer than 1/LONG in its units, or does not exist."""
RESOLVED = 1e-12
"""Residual of NNLS that is rounding: no w exists that float64 could tell from none."""


def pivoted(
    gram: Float[ndarray, "k k"], bounds: Each, free: Bool[ndarray, " k"], support: Bool[ndarray, " k"]
) -> Each | None:
    """argmin ½λᵀGλ − bᵀλ, λ ≥ 0 unless free, by exchanging all wrong signs at once (Kim and Park 2011, Algorithm 2).

    `support` is the first guess. None where a block of G is singular or the exchanges don't settle: then ask `damped`.
    """
    support = support | free
    fewest, patience = len(bounds) + 1, PATIENCE
    while patience:
        held = np.flatnonzero(support)
        loads, failed = dposv(gram[np.ix_(held, held)], bounds[held])[1:] if len(held) else (np.zeros(0), 0)
        if failed:
            return None
        multipliers = np.zeros(len(bounds))
        multipliers[held] = loads
        slack = gram @ multipliers - bounds
        # A sign is wrong beyond the rounding of the sums it comes from: ties must not be exchanged forever.
        noise = 64.0 * EPS * (np.abs(loads).sum() + np.abs(bounds).max(initial=0.0))
        wrong = np.where(support, ~free & (multipliers < 0.0), slack < -noise)
        if (np.abs(slack[held]) > noise).any():
            return None
        count = int(wrong.sum())
        if not count:
            return multipliers
        patience = PATIENCE if count < fewest else patience - 1
        fewest = min(fewest, count)
        support = support ^ wrong
    return None


def damped(
    gram: Float[ndarray, "k k"],
    bounds: Each,
    free: Bool[ndarray, " k"],
    loads: Each,
    damping: float,
) -> tuple[Each, float]:
    """A better λ for the same problem, and the damping of the next step: Newton's, projected to λ ≥ 0 (Bertsekas 1982).

    With G + damping · I a repeated constraint is as good as any, and the objective never rises, so that nothing cycles.
    Where no step lowers it, λ stays and the damping grows.
    """
    slack = gram @ loads - bounds
    held = np.flatnonzero(free | (loads > 0.0) | (slack < 0.0))
    block = gram[np.ix_(held, held)]
    ridge = damping * np.eye(len(held))
    move, failed = dposv(block + ridge, -slack[held])[1:] if len(held) else (np.zeros(0), 0)
    share = 0.0 if failed else 1.0
    while share > SHORTEST:
        moved = loads[held] + share * move
        moved = np.where(free[held], moved, moved.clip(min=0.0)) - loads[held]
        slope = float(slack[held] @ moved)
        if slope + 0.5 * float(moved @ block @ moved) <= 1e-4 * slope:
            better = loads.copy()
            better[held] += moved
            factor = 0.1 if share == 1.0 else 10.0 if share < 0.3 else 1.0
            return better, max(damping * factor, LEAST_DAMPING)
        share *= 0.5
    return loads, 100.0 * damping


def nearest(rows: Float[ndarray, "k width"], bounds: Each, free: Bool[ndarray, " k"]) -> Each:
    """λ of min ‖w‖ with rows·w ≥ b, = b where free; or λ with rowsᵀλ = 0 < bᵀλ where no w exists.

    Equalities are eliminated, then λ is the NNLS solution of min ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖ (Lawson and Hanson 1974,
    §23.4), whose residual is zero exactly where there is no w. Singular, repeated and surplus constraints are welcome.
    """
    left, right = rows[~free], bounds[~free]
    fixed = np.linalg.lstsq(rows[free], bounds[free], rcond=DEPENDENT)[0] if free.any() else np.zeros(rows.shape[1])
    missed = bounds[free] - rows[free] @ fixed
    if free.any() and np.abs(missed).max() > INCONSISTENT * np.abs(bounds[free]).max():
        return spread(missed, free)
    inner = left - left @ across(rows[free]) if free.any() else left
    loads, exists = distance(inner, right - left @ fixed)
    multipliers = spread(loads, ~free)
    if free.any():
        rest = (fixed if exists else 0.0) - loads @ left
        multipliers[free] = np.linalg.lstsq(rows[free].T, rest, rcond=DEPENDENT)[0]
    return multipliers


def spread(loads: Float[ndarray, " some"], where: Bool[ndarray, " k"]) -> Each:
    """The loads where they belong, zero elsewhere."""
    multipliers = np.zeros(len(where))
    multipliers[where] = loads
    return multipliers


def across(rows: Float[ndarray, "k width"]) -> Float[ndarray, "width width"]:
    """The projection onto the span of the rows."""
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    kept = basis[sizes > DEPENDENT * sizes.max(initial=0.0)]
    projection: Float[ndarray, "width width"] = kept.T @ kept
    return projection


def distance(rows: Float[ndarray, "k width"], bounds: Each) -> tuple[Each, bool]:
    """λ ≥ 0 with w = rowsᵀλ the shortest w with rows·w ≥ b, and true; or λ with rowsᵀλ = 0 < bᵀλ, and false."""
    if not (bounds > 0.0).any():
        return np.zeros(len(bounds)), True
    scale = 1.0 / np.abs(bounds).max()
    loads, residual = fitted(rows, bounds * scale)
    if RESOLVED < residual < LONG:
        # The residual is 1/√(1 + ‖w‖²): a long w is told from none once it is scaled to length 1.
        scale *= residual
        loads, residual = fitted(rows, bounds * scale)
    if residual < LONG:
        return loads, False
    return polished(rows, bounds, loads / (residual**2 * scale)), True


def fitted(rows: Float[ndarray, "k width"], bounds: Each) -> tuple[Each, float]:
    """λ ≥ 0 with the least ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖, and that norm."""
    target = np.zeros(rows.shape[1] + 1)
    target[-1] = 1.0
    try:
        loads, residual = nnls(np.vstack([rows.T, bounds]), target, maxiter=30 * len(bounds))
    except RuntimeError:
        # Its only one says that it cycles; λ = 0 proves nothing, and so is certified as inaccurate.
        return np.zeros(len(bounds)), 1.0
    return loads, float(residual)


def polished(rows: Float[ndarray, "k width"], bounds: Each, loads: Each) -> Each:
    """λ from its support's equations alone, which NNLS meets only to ε‖w‖²; as it was, if that spoils a sign."""
    held = np.flatnonzero(loads)
    shortest = np.linalg.lstsq(rows[held], bounds[held], rcond=EPS)[0]
    exact = np.linalg.lstsq(rows[held].T, shortest, rcond=EPS)[0]
    return spread(exact, loads > 0.0) if (exact >= 0.0).all() else loads
