"""The Frobenius SVM by active sets over the Gram matrix, with equalities eliminated; and whether any W separates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg.lapack import dposv, dpotrf, dpotrs, dpstrf, dtrtrs
from scipy.optimize import nnls
from scipy.sparse import csr_array

from attnlens.errors import UnposedError
from attnlens.maths.attsvm.problem import PROOF, bounded, certified, ordinary

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.maths.attsvm.problem import Problem, Solution

    Loads = Float[ndarray, " k"]

LARGE = 2**22
"""Numbers in an explicit form (32 MB) beyond which the Gram matrix is factored instead."""


class UnitConstraints:
    """The constraints a_c = u_c z_q(c)ᵀ of a problem, each divided by its length, so that ⟨a_c, a_c⟩ = 1 or a_c = 0.

    Only ⟨a_c, a_e⟩ = (u_c·u_e)(z_q(c)·z_q(e)) is needed, so that no d × d_query matrix is formed.
    """

    def __init__(self, problem: Problem) -> None:
        u, z = problem.differences.numpy(), problem.queries.numpy()
        self.query_of: Int[ndarray, " constraints"] = problem.query_of.numpy()
        wide, long = np.linalg.norm(u, axis=1), np.linalg.norm(z, axis=1)
        self.lengths: Float[ndarray, " constraints"] = wide * long[self.query_of]
        self.u = u / np.where(wide > 0.0, wide, 1.0)[:, None]
        self.z = z / np.where(long > 0.0, long, 1.0)[:, None]
        self.products = self.z @ self.z.T
        self.free: Bool[ndarray, " constraints"] = problem.equal.numpy()
        safe = np.where(self.lengths > 0.0, self.lengths, 1.0)
        self.bounds: Float[ndarray, " constraints"] = problem.margins.numpy() / safe
        self.scale = safe
        grouped = bool((np.diff(self.query_of) >= 0).all())
        self.order = np.arange(len(u)) if grouped else np.argsort(self.query_of, kind="stable")
        self.ordered = self.u if grouped else self.u[self.order]  # sorted by query

    @cached_property
    def blocks(self) -> list[tuple[int, slice]]:
        """Queries that have constraints, and the positions of these constraints in `order`."""
        present, starts = np.unique(self.query_of[self.order], return_index=True)
        ends = [*starts[1:], len(self.order)]
        return [(int(q), slice(int(s), int(e))) for q, s, e in zip(present, starts, ends, strict=True)]

    @property
    def hopeless(self) -> Int[ndarray, " first"]:
        """First constraint that no W meets because its length is 0, a proof of infeasibility; empty if none."""
        wanted = np.where(self.free, self.bounds != 0.0, self.bounds > 0.0)
        return np.flatnonzero(wanted & (self.lengths == 0.0))[:1]

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """Return ⟨a_c, a_e⟩ for c in rows and e in columns."""
        pairs = self.products[np.ix_(self.query_of[rows], self.query_of[columns])]
        pairs *= self.u[rows] @ self.u[columns].T
        return pairs

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ for every constraint c."""
        shares = csr_array((loads, (self.query_of[rows], rows)), shape=(len(self.z), len(self.u)))
        seen = self.products @ (shares @ self.u)
        values = np.empty(len(self.u))
        for query, block in self.blocks:
            values[self.order[block]] = self.ordered[block] @ seen[query]
        return values

    def explicit(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """Return a_c of these rows as vectors, in coordinates that preserve their inner products."""
        u, z = compact(self.u[rows]), compact(self.z)[self.query_of[rows]]
        if u.size * z.shape[1] > LARGE:
            # Directions below √ε are lost; the certificate includes the resulting error.
            sizes, vectors = np.linalg.eigh(self.gram(rows, rows))
            kept = sizes > np.finfo(np.float64).eps * len(rows) * sizes[-1]
            factor: Float[ndarray, "rows kept"] = vectors[:, kept] * np.sqrt(sizes[kept])
            return factor
        return compact((u[:, :, None] * z[:, None, :]).reshape(len(rows), -1))


def compact(rows: Float[ndarray, "rows width"]) -> Float[ndarray, "rows least"]:
    """Return the rows in an orthonormal basis of their span (QR of the transpose) if that is narrower."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle: Float[ndarray, "least rows"] = np.linalg.qr(rows.T)[1]
    return triangle.T


EPS = float(np.finfo(np.float64).eps)
PIVOTS = 3
"""Consecutive exchanges without a new minimum of wrong signs before pivoting gives up."""
DEPENDENT = 1e-11
"""Relative singular value below which equalities are linearly dependent."""
INCONSISTENT = 1e-9
"""Residual, relative to the largest b, up to which equalities count as consistent."""
LEAST_DAMPING = 1e-12
"""Damping, relative to the diagonal of G, below which a step is Newton's up to rounding."""
SHORTEST = 1e-6
"""Smallest fraction of a Newton step that is tried."""
LONG = 1e-3
"""Residual of NNLS below which w is longer than 1/LONG in its units, or does not exist."""
RESOLVED = 1e-12
"""Residual of NNLS that is rounding: in float64 such a w cannot be distinguished from a missing one."""


def pivoted(
    gram: Float[ndarray, "k k"], bounds: Loads, free: Bool[ndarray, " k"], support: Bool[ndarray, " k"]
) -> Loads | None:
    """Minimise ½λᵀGλ − bᵀλ, λ ≥ 0 unless free, by exchanging all wrong signs at once (Kim and Park 2011, Alg. 2).

    `support` is the first guess. None if a block of G is singular or the exchanges do not settle: then use `damped`.
    """
    support = support | free
    fewest, patience = len(bounds) + 1, PIVOTS
    while patience:
        active = np.flatnonzero(support)
        loads, failed = dposv(gram[np.ix_(active, active)], bounds[active])[1:] if len(active) else (np.zeros(0), 0)
        if failed:
            return None
        multipliers = np.zeros(len(bounds))
        multipliers[active] = loads
        slack = gram @ multipliers - bounds
        # A sign counts as wrong only beyond the rounding of its sums; otherwise ties would be exchanged forever.
        noise = 64.0 * EPS * (np.abs(loads).sum() + np.abs(bounds).max(initial=0.0))
        wrong = np.where(support, ~free & (multipliers < 0.0), slack < -noise)
        if (np.abs(slack[active]) > noise).any():
            return None
        count = int(wrong.sum())
        if not count:
            return multipliers
        patience = PIVOTS if count < fewest else patience - 1
        fewest = min(fewest, count)
        support = support ^ wrong
    return None


def damped(
    gram: Float[ndarray, "k k"], bounds: Loads, free: Bool[ndarray, " k"], loads: Loads, damping: float
) -> tuple[Loads, float]:
    """Return a better λ for the same problem by a projected Newton step (Bertsekas 1982), and the next damping.

    With G + damping · I repeated constraints cause no singularity. The objective never rises, so that steps cannot
    cycle. If no step lowers it, λ is unchanged and the damping grows.
    """
    slack = gram @ loads - bounds
    active = np.flatnonzero(free | (loads > 0.0) | (slack < 0.0))
    block = gram[np.ix_(active, active)]
    ridge = damping * np.eye(len(active))
    move, failed = dposv(block + ridge, -slack[active])[1:] if len(active) else (np.zeros(0), 0)
    share = 0.0 if failed else 1.0
    while share > SHORTEST:
        moved = loads[active] + share * move
        moved = np.where(free[active], moved, moved.clip(min=0.0)) - loads[active]
        slope = float(slack[active] @ moved)
        if slope + 0.5 * float(moved @ block @ moved) <= 1e-4 * slope:  # Armijo's condition: sufficient decrease
            better = loads.copy()
            better[active] += moved
            factor = 0.1 if share == 1.0 else 10.0 if share < 0.3 else 1.0
            return better, max(damping * factor, LEAST_DAMPING)
        share *= 0.5
    return loads, 100.0 * damping


def nearest(rows: Float[ndarray, "k width"], bounds: Loads, free: Bool[ndarray, " k"]) -> Loads:
    """Return λ of min ‖w‖ with rows·w ≥ b, = b where free; or λ with rowsᵀλ = 0 < bᵀλ if no w exists.

    Equalities are eliminated. λ is then the NNLS solution of min ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖ (Lawson and Hanson 1974,
    §23.4), whose residual is zero exactly if no w exists. Singular, repeated and surplus constraints are allowed.
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
        remainder = (fixed if exists else 0.0) - loads @ left
        multipliers[free] = np.linalg.lstsq(rows[free].T, remainder, rcond=DEPENDENT)[0]
    return multipliers


def spread(loads: Float[ndarray, " some"], where: Bool[ndarray, " k"]) -> Loads:
    """Return a vector with the loads where the mask is true, zero elsewhere."""
    multipliers = np.zeros(len(where))
    multipliers[where] = loads
    return multipliers


def across(rows: Float[ndarray, "k width"]) -> Float[ndarray, "width width"]:
    """Return the projection onto the span of the rows."""
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    kept = basis[sizes > DEPENDENT * sizes.max(initial=0.0)]
    projection: Float[ndarray, "width width"] = kept.T @ kept
    return projection


def distance(rows: Float[ndarray, "k width"], bounds: Loads) -> tuple[Loads, bool]:
    """Return (λ ≥ 0, True), w = rowsᵀλ the shortest with rows·w ≥ b; or (λ, False) with rowsᵀλ = 0 < bᵀλ."""
    if not (bounds > 0.0).any():
        return np.zeros(len(bounds)), True
    scale = 1.0 / np.abs(bounds).max()
    loads, residual = fitted(rows, bounds * scale)
    if RESOLVED < residual < LONG:
        # The residual is 1/√(1 + ‖w‖²): scaling a long w to length 1 distinguishes it from a missing w.
        scale *= residual
        loads, residual = fitted(rows, bounds * scale)
    if residual < LONG:
        return loads, False
    return polished(rows, bounds, loads / (residual**2 * scale)), True


def fitted(rows: Float[ndarray, "k width"], bounds: Loads) -> tuple[Loads, float]:
    """Return λ ≥ 0 with the least ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖, and that norm."""
    target = np.zeros(rows.shape[1] + 1)
    target[-1] = 1.0
    try:
        loads, residual = nnls(np.vstack([rows.T, bounds]), target, maxiter=30 * len(bounds))
    except RuntimeError:
        # NNLS raises only if it cycles; λ = 0 proves nothing and is certified as inaccurate.
        return np.zeros(len(bounds)), 1.0
    return loads, float(residual)


def polished(rows: Float[ndarray, "k width"], bounds: Loads, loads: Loads) -> Loads:
    """Return λ solved from its support's equations, which NNLS meets only to ε‖w‖²; unchanged if a sign would flip."""
    support = np.flatnonzero(loads)
    shortest = np.linalg.lstsq(rows[support], bounds[support], rcond=EPS)[0]
    exact = np.linalg.lstsq(rows[support].T, shortest, rcond=EPS)[0]
    return spread(exact, loads > 0.0) if (exact >= 0.0).all() else loads


INSIDE = 1e-10
"""Squared share of an inequality's length outside the equalities' span below which it may contradict them."""
MISSED = 1e-9
"""Residual, relative to the largest b, allowed for equalities that depend on others."""
REFINEMENTS = 2
"""Number of refinement steps for λ of the equalities."""


class Eliminated:
    """The inequalities a_c of a problem, projected off the span of its equalities; replaces UnitConstraints.

    G_EE = LLᵀ is factored once with pivoting, so that dependent equalities drop out. Inequalities then have the inner
    products G_cd − (L⁻¹G_Ec)ᵀ(L⁻¹G_Ed) and the bounds b_c − (L⁻¹G_Ec)ᵀL⁻¹b_E, and no equality remains.
    """

    def __init__(self, constraints: UnitConstraints) -> None:
        self.whole = constraints
        self.blocks, self.order = constraints.blocks, constraints.order
        self.free = np.zeros_like(constraints.free)
        equal = np.flatnonzero(constraints.free)
        factor, pivots, rank, _ = dpstrf(constraints.gram(equal, equal), lower=1, overwrite_a=1)
        self.kept: Int[ndarray, " rank"] = equal[pivots[:rank] - 1]
        self.repeated: Int[ndarray, " repeated"] = equal[pivots[rank:] - 1]
        self.factor = np.asfortranarray(factor[:rank, :rank])
        self.fixed = self.solved(self.solved(constraints.bounds[self.kept]), transposed=True)
        # Equalities are met for every λ of the inequalities, so they are never violated.
        self.bounds = np.where(constraints.free, -np.inf, constraints.bounds - self.fixed_scores)
        self.known: Int[ndarray, " constraints"] = np.full(len(self.free), -1)
        self.count = 0
        self.columns = np.empty((len(self.free) - len(equal), rank))

    @property
    def fixed_scores(self) -> Float[ndarray, " constraints"]:
        """Scores of the shortest W that meets the equalities."""
        return self.whole.scores(self.kept, self.fixed)

    def solved(self, right: Float[ndarray, "rank ..."], transposed: bool = False) -> Float[ndarray, "rank ..."]:
        """Return L⁻¹ or L⁻ᵀ times the right-hand side."""
        if not len(self.kept):
            return right
        answer: Float[ndarray, "rank ..."] = dtrtrs(self.factor, right, lower=1, trans=int(transposed))[0]
        return answer.reshape(right.shape)

    def inner(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows rank"]:
        """Return (L⁻¹G_Ec)ᵀ for c in rows, each computed once."""
        new = rows[self.known[rows] < 0]
        if len(new):
            self.known[new] = self.count + np.arange(len(new))
            self.columns[self.known[new]] = self.solved(self.whole.gram(self.kept, new)).T
            self.count += len(new)
        inner_products: Float[ndarray, "rows rank"] = self.columns[self.known[rows]]
        return inner_products

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """Return ⟨a_c, a_d⟩ outside the equalities' span, for c in rows and d in columns."""
        outside: Float[ndarray, "rows columns"] = self.whole.gram(rows, columns)
        outside -= self.inner(rows) @ self.inner(columns).T
        return outside

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ outside the equalities' span, for every constraint c."""
        share = self.solved(self.inner(rows).T @ loads, transposed=True)
        return self.whole.scores(np.append(rows, self.kept), np.append(loads, -share))

    def explicit(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """Return vectors with these inner products; lost directions below √ε show in the certificate."""
        sizes, vectors = np.linalg.eigh(self.gram(rows, rows))
        kept = sizes > np.finfo(np.float64).eps * len(rows)
        factor: Float[ndarray, "rows width"] = vectors[:, kept] * np.sqrt(sizes[kept])
        return factor

    def completed(
        self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"], met: bool = True
    ) -> tuple[Int[ndarray, " all"], Float[ndarray, " all"]]:
        """Add λ of the equalities to these λ such that every equality has its b, or 0 if `met` is false."""
        all_rows, wanted = np.append(rows, self.kept), self.whole.bounds[self.kept] if met else np.zeros(len(self.kept))
        multipliers = np.append(loads, np.zeros(len(self.kept)))
        for _ in range(1 + REFINEMENTS):
            missing = wanted - self.whole.scores(all_rows, multipliers)[self.kept]
            multipliers[len(rows) :] += self.solved(self.solved(missing), transposed=True)
        return all_rows, multipliers

    def sharpened(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " rows"]:
        """Return λ refined by its inequalities' residuals, with equalities met; unchanged if a sign would flip."""
        support = np.flatnonzero(loads)
        if not len(support):
            return loads
        factor, failed = dpotrf(self.gram(rows[support], rows[support]), lower=1)
        better = loads.copy()
        for _ in range(0 if failed else REFINEMENTS):
            scores = self.whole.scores(*self.completed(rows[support], better[support]))
            better[support] += dpotrs(factor, (self.whole.bounds - scores)[rows[support]], lower=1)[0]
        return better if (better >= 0.0).all() else loads

    def contradicted(self, rows: Int[ndarray, " rows"]) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """Return the row most likely to contradict the equalities alone, and its residual's sign; empty if none."""
        left = 1.0 - (self.inner(rows) ** 2).sum(-1)
        inside = rows[(left < INSIDE) & (self.bounds[rows] > 0.0)]
        inside = inside[np.argsort(-self.bounds[inside])[:1]]
        return inside, np.ones(len(inside))

    @property
    def inconsistent(self) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """Dependent equality that the others contradict most, and the sign of its residual; empty if there is none."""
        missed = (self.whole.bounds - self.fixed_scores)[self.repeated]
        beyond = np.abs(missed) > MISSED * np.abs(self.whole.bounds[self.whole.free]).max()
        worst = np.argsort(-np.abs(missed))[:1] if beyond.any() else np.flatnonzero(beyond)
        return self.repeated[worst], np.sign(missed[worst])


SMALL = 128
"""Constraints up to which all are in the working set from the start."""
DAMPING = 1e-2
"""Added to the diagonal of G, which is 1, in the first damped step."""
PATIENCE = 60
"""Most damped steps for a degenerate problem."""
WORST = 4
"""Number of a query's most violated constraints that enter at once."""


def solve(problem: Problem, tolerance: float = 1e-9, limit: int = 200) -> Solution:
    """Compute W_mm = argmin ‖W‖_F s.t. u_cᵀ W z_q(c) ≥ b_c, = b_c where equal, with its certificate.

    Att-SVM of Tarzanagh et al. 2023: min ½λᵀGλ − bᵀλ over the working set, then each query's most violated constraints
    join, at most `limit` times. Many equalities are eliminated first. Status `inaccurate`, with its gap, if that is not
    enough. Raises UsageError for a tolerance ≤ 0, a limit < 1 and sizes outside [1e-50, 1e50]; UnposedError for a
    problem without constraints.
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
    all_rows = np.arange(len(constraints.u))
    working = Working(constraints, all_rows if len(all_rows) <= SMALL else np.flatnonzero(constraints.free), tolerance)
    steps = working.run(limit)
    answer = certified(problem, unscaled(constraints, working.rows, working.loads), tolerance, steps)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    return certified(problem, unscaled(constraints, working.rows, working.nearest()), tolerance, steps)


def solve_eliminated(problem: Problem, space: Eliminated, tolerance: float, limit: int) -> Solution:
    """Solve a problem with many equalities on its inequalities alone, projected off the equalities."""
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
    loads = working.nearest() if working.patience else working.loads  # without patience they already are the nearest
    refuted = certain(working.rows, loads, met=False)
    return refuted if refuted.status == "infeasible" else sharp(loads)


class Working:
    """The working set of constraints, and their λ."""

    def __init__(self, constraints: UnitConstraints | Eliminated, rows: Int[ndarray, " k"], tolerance: float) -> None:
        self.constraints = constraints
        self.tolerance = tolerance
        self.rows = rows
        self.bounds: Float[ndarray, " k"] = constraints.bounds[rows]
        self.free: Bool[ndarray, " k"] = constraints.free[rows]
        self.loads = np.zeros(len(rows))
        self.gram = constraints.gram(rows, rows)
        self.settled = False  # whether λ is optimal for these constraints
        self.joined = True  # whether any constraint is new
        self.damping = 0.0  # 0 while signs are exchanged
        self.patience = PATIENCE

    def run(self, limit: int) -> int:
        """Advance until no constraint joins, at most `limit` steps; return the number of steps."""
        for step in range(1, limit + 1):
            if self.advance() is None:
                return step
        return limit

    def advance(self) -> Int[ndarray, " joining"] | None:
        """Take one step; return the constraints that join, or None if λ is optimal for all constraints."""
        self.improve()
        joining = self.worst()
        if self.settled and not len(joining):
            return None
        self.join(joining)
        return joining

    def improve(self) -> None:
        """Find the optimal λ of these constraints alone, from their support; a better λ if they are degenerate."""
        if not self.damping or not self.joined:
            optimal = pivoted(self.gram, self.bounds, self.free, self.loads != 0.0)
            if optimal is not None:
                self.loads, self.settled = optimal, True
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
        """Return each query's WORST most violated constraints outside the working set; none if λ proves no W exists."""
        constraints, support = self.constraints, np.flatnonzero(self.loads)
        scores = constraints.scores(self.rows[support], self.loads[support])
        proven = PROOF * float(np.abs(self.loads).sum())
        if self.loads @ self.bounds > proven and self.loads @ scores[self.rows] <= proven**2:
            # Damped steps only converge towards a proof; NNLS finds an exact one.
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
        """Add constraints to the working set, with λ = 0."""
        self.joined = len(joining) > 0
        if not self.joined:
            return
        side = self.constraints.gram(self.rows, joining)
        self.gram = np.block([[self.gram, side], [side.T, self.constraints.gram(joining, joining)]])
        self.rows, self.loads = np.append(self.rows, joining), np.append(self.loads, np.zeros(len(joining)))
        self.bounds, self.free = self.constraints.bounds[self.rows], self.constraints.free[self.rows]

    def nearest(self) -> Float[ndarray, " k"]:
        """Return λ by NNLS: slow and without a first guess, but it works for any constraints."""
        return nearest(self.constraints.explicit(self.rows), self.bounds, self.free)

    def _rounding(self, bounds: Float[ndarray, " some"]) -> Float[ndarray, " some"]:
        """Return the violation allowed for each constraint."""
        lacking: Float[ndarray, " some"] = 0.1 * self.tolerance * np.abs(bounds) + EPS * np.abs(self.loads).sum()
        return lacking


def unscaled(
    constraints: UnitConstraints, rows: Int[ndarray, " k"], loads: Float[ndarray, " k"]
) -> Float[Tensor, " constraints"]:
    """Return λ of every constraint of the original problem, whose lengths were divided out."""
    multipliers = np.zeros(len(constraints.u))
    multipliers[rows] = loads
    return torch.from_numpy(multipliers / constraints.scale)


@dataclass(frozen=True)
class Separability:
    """Exactly one of the two exists: W with u W z ≥ b, or λ with Σλ u zᵀ = 0 < Σλb (Gordan 1873, Farkas 1902)."""

    verdict: bool | None
    """True if a W exists; None if neither proof was found within the iteration limit."""
    distance: float | None
    """Least ‖Σλ u zᵀ‖ over Σλb = 1: the max-margin 1/‖W‖_F, or the certificate's residual ≈ 0; None if unknown."""
    multipliers: Float[Tensor, " constraints"]
    """λ of the proof; a certificate has Σλ = 1 over the inequalities."""


def separable(problem: Problem, limit: int = 200) -> Separability:
    """Decide if any W meets the constraints, by the point of least norm in {Σλ u zᵀ : λ ≥ 0, Σλb = 1}.

    Raises what `solve` raises.
    """
    answer = solve(problem, limit=limit)
    if answer.status == "infeasible":
        return Separability(False, answer.residual, answer.multipliers)
    # Any feasible W is a proof, even if not the shortest: its gap is finite.
    if answer.gap is None or answer.norm is None or answer.gap == float("inf"):
        return Separability(None, None, answer.multipliers)
    return Separability(True, 1.0 / answer.norm if answer.norm > 0.0 else float("inf"), answer.multipliers)
