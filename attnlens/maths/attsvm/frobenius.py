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
from attnlens.maths.attsvm.problem import PROOF, certify, check_limits, check_sizes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.maths.attsvm.problem import Problem, Solution

    Loads = Float[ndarray, " k"]

EPS = float(np.finfo(np.float64).eps)
LARGE = 2**22
"""Numbers in explicit vectors (32 MB) beyond which the Gram matrix is factored instead."""
PIVOTS = 3
"""Consecutive exchanges without a new minimum of wrong signs before pivoting gives up."""
DEPENDENT = 1e-11
"""Relative singular value below which equalities are linearly dependent; rounding is far smaller."""
INCONSISTENT = 1e-9
"""Residual, relative to the largest b, up to which equalities count as consistent with each other."""
LEAST_DAMPING = 1e-12
"""Damping, relative to the diagonal of G, below which a step is Newton's up to rounding."""
SHORTEST = 1e-6
"""Smallest fraction of a Newton step that is tried."""
DECREASE = 1e-4
"""Share of the decrease predicted by the slope that a step must reach (Armijo's condition; the usual constant)."""
LONG = 1e-3
"""Residual of NNLS below which w is longer than 1/LONG in its units, or does not exist."""
RESOLVED = 1e-12
"""Residual of NNLS that is rounding: in float64 such a w cannot be distinguished from a missing one."""
INSIDE = 1e-10
"""Squared share of an inequality's length outside the equalities' span below which it may contradict them."""
MISSED = 1e-9
"""Residual, relative to the largest b, allowed for equalities that depend on others."""
REFINEMENTS = 2
"""Number of refinement steps for λ of the equalities."""
SMALL = 128
"""Constraints up to which all are in the working set from the start."""
DAMPING = 1e-2
"""Added to the diagonal of G, which is 1, in the first damped step."""
PATIENCE = 60
"""Most damped steps for a degenerate problem."""
WORST = 4
"""Number of a query's most violated constraints that enter at once."""


class UnitConstraints:
    """The constraints a_c = u_c z_q(c)ᵀ of a problem, each divided by its length, so that ⟨a_c, a_c⟩ = 1 or a_c = 0.

    Only ⟨a_c, a_e⟩ = (u_c·u_e)(z_q(c)·z_q(e)) is needed, so that no d × d_query matrix is formed.
    """

    def __init__(self, problem: Problem) -> None:
        u, z = problem.differences.numpy(), problem.queries.numpy()
        self.query_of: Int[ndarray, " constraints"] = problem.query_of.numpy()
        u_lengths, z_lengths = np.linalg.norm(u, axis=1), np.linalg.norm(z, axis=1)
        self.lengths: Float[ndarray, " constraints"] = u_lengths * z_lengths[self.query_of]
        self.u = u / np.where(u_lengths > 0.0, u_lengths, 1.0)[:, None]
        self.z = z / np.where(z_lengths > 0.0, z_lengths, 1.0)[:, None]
        self.products = self.z @ self.z.T
        self.free: Bool[ndarray, " constraints"] = problem.equal.numpy()
        self.scale = np.where(self.lengths > 0.0, self.lengths, 1.0)
        self.bounds: Float[ndarray, " constraints"] = problem.margins.numpy() / self.scale
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
    def impossible(self) -> Int[ndarray, " first"]:
        """First constraint of length 0 that no W satisfies, which proves infeasibility; empty if there is none."""
        unmet_by_zero = np.where(self.free, self.bounds != 0.0, self.bounds > 0.0)
        return np.flatnonzero(unmet_by_zero & (self.lengths == 0.0))[:1]

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """Return ⟨a_c, a_e⟩ for c in rows and e in columns."""
        pairs = self.products[np.ix_(self.query_of[rows], self.query_of[columns])]
        pairs *= self.u[rows] @ self.u[columns].T
        return pairs

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ for every constraint c."""
        shares = csr_array((loads, (self.query_of[rows], rows)), shape=(len(self.z), len(self.u)))
        directions = self.products @ (shares @ self.u)
        values = np.empty(len(self.u))
        for query, block in self.blocks:
            values[self.order[block]] = self.ordered[block] @ directions[query]
        return values

    def vectors(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """Return a_c of these rows as vectors, in coordinates that preserve their inner products."""
        u, z = compact(self.u[rows]), compact(self.z)[self.query_of[rows]]
        if u.size * z.shape[1] > LARGE:
            return factor_gram(self.gram(rows, rows))
        return compact((u[:, :, None] * z[:, None, :]).reshape(len(rows), -1))


def factor_gram(gram: Float[ndarray, "rows rows"], largest: float | None = None) -> Float[ndarray, "rows width"]:
    """Return vectors with these inner products: directions below √ε are lost, whose error the certificate includes.

    `largest` is the size that rounding is relative to, the largest eigenvalue by default.
    """
    sizes, vectors = np.linalg.eigh(gram)
    above = sizes > EPS * len(gram) * (sizes[-1] if largest is None else largest)
    factor: Float[ndarray, "rows width"] = vectors[:, above] * np.sqrt(sizes[above])
    return factor


def compact(rows: Float[ndarray, "rows width"]) -> Float[ndarray, "rows least"]:
    """Return the rows in an orthonormal basis of their span (QR of the transpose) if that is narrower."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle: Float[ndarray, "least rows"] = np.linalg.qr(rows.T)[1]
    return triangle.T


def exchange_signs(
    gram: Float[ndarray, "k k"], bounds: Loads, free: Bool[ndarray, " k"], support: Bool[ndarray, " k"]
) -> Loads | None:
    """Minimise ½λᵀGλ − bᵀλ, λ ≥ 0 unless free, by exchanging all wrong signs at once (Kim and Park 2011, Alg. 2).

    `support` is the first guess. None if a block of G is singular or the exchanges do not settle: use `damped_step`.
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
        # A sign counts as wrong only beyond the rounding of its sums (64: a margin); ties would be exchanged forever.
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


def damped_step(
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
        if slope + 0.5 * float(moved @ block @ moved) <= DECREASE * slope:
            better = loads.copy()
            better[active] += moved
            # Damp less after a whole step, more after a quarter of one or less.
            factor = 0.1 if share == 1.0 else 10.0 if share < 0.3 else 1.0
            return better, max(damping * factor, LEAST_DAMPING)
        share *= 0.5
    return loads, 100.0 * damping


def solve_by_nnls(rows: Float[ndarray, "k width"], bounds: Loads, free: Bool[ndarray, " k"]) -> Loads:
    """Return λ of min ‖w‖ with rows·w ≥ b, = b where free; or λ with rowsᵀλ = 0 < bᵀλ if no w exists.

    Equalities are eliminated. λ is then the NNLS solution of min ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖ (Lawson and Hanson 1974,
    §23.4), whose residual is zero exactly if no w exists. Singular, repeated and surplus constraints are allowed.
    """
    left, right = rows[~free], bounds[~free]
    shortest = np.linalg.lstsq(rows[free], bounds[free], rcond=DEPENDENT)[0] if free.any() else np.zeros(rows.shape[1])
    residual = bounds[free] - rows[free] @ shortest
    if free.any() and np.abs(residual).max() > INCONSISTENT * np.abs(bounds[free]).max():
        return scatter(residual, free)
    outside = left
    if free.any():
        _, sizes, basis = np.linalg.svd(rows[free], full_matrices=False)
        basis = basis[sizes > DEPENDENT * sizes.max(initial=0.0)]
        outside = left - left @ (basis.T @ basis)
    loads, exists = solve_inequalities(outside, right - left @ shortest)
    multipliers = scatter(loads, ~free)
    if free.any():
        remainder = (shortest if exists else 0.0) - loads @ left
        multipliers[free] = np.linalg.lstsq(rows[free].T, remainder, rcond=DEPENDENT)[0]
    return multipliers


def scatter(loads: Float[ndarray, " some"], where: Bool[ndarray, " k"]) -> Loads:
    """Return a vector with the loads where the mask is true, zero elsewhere."""
    multipliers = np.zeros(len(where))
    multipliers[where] = loads
    return multipliers


def solve_inequalities(rows: Float[ndarray, "k width"], bounds: Loads) -> tuple[Loads, bool]:
    """Return (λ ≥ 0, True), w = rowsᵀλ the shortest with rows·w ≥ b; or (λ, False) with rowsᵀλ = 0 < bᵀλ."""
    if not (bounds > 0.0).any():
        return np.zeros(len(bounds)), True
    scale = 1.0 / np.abs(bounds).max()
    loads, residual = fit_nnls(rows, bounds * scale)
    if RESOLVED < residual < LONG:
        # The residual is 1/√(1 + ‖w‖²): scaling a long w to length 1 distinguishes it from a missing w.
        scale *= residual
        loads, residual = fit_nnls(rows, bounds * scale)
    if residual < LONG:
        return loads, False
    return polish(rows, bounds, loads / (residual**2 * scale)), True


def fit_nnls(rows: Float[ndarray, "k width"], bounds: Loads) -> tuple[Loads, float]:
    """Return λ ≥ 0 with the least ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖, and that norm."""
    target = np.zeros(rows.shape[1] + 1)
    target[-1] = 1.0
    try:
        loads, residual = nnls(np.vstack([rows.T, bounds]), target, maxiter=30 * len(bounds))
    except RuntimeError:
        # NNLS raises only if it cycles; λ = 0 proves nothing and is certified as inaccurate.
        return np.zeros(len(bounds)), 1.0
    return loads, float(residual)


def polish(rows: Float[ndarray, "k width"], bounds: Loads, loads: Loads) -> Loads:
    """Return λ solved from its support's equations, which NNLS meets only to ε‖w‖²; unchanged if a sign would flip."""
    support = np.flatnonzero(loads)
    shortest = np.linalg.lstsq(rows[support], bounds[support], rcond=EPS)[0]
    exact = np.linalg.lstsq(rows[support].T, shortest, rcond=EPS)[0]
    return scatter(exact, loads > 0.0) if (exact >= 0.0).all() else loads


class ProjectedConstraints:
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
        self.independent: Int[ndarray, " rank"] = equal[pivots[:rank] - 1]
        self.dependent: Int[ndarray, " dependent"] = equal[pivots[rank:] - 1]
        self.factor = np.asfortranarray(factor[:rank, :rank])
        self.equality_loads = self.solve_root(self.solve_root(constraints.bounds[self.independent]), transposed=True)
        # Equalities are met for every λ of the inequalities, so they are never violated.
        self.bounds = np.where(constraints.free, -np.inf, constraints.bounds - self.equality_scores)
        self.position: Int[ndarray, " constraints"] = np.full(len(self.free), -1)
        self.count = 0
        self.columns = np.empty((len(self.free) - len(equal), rank))

    @property
    def equality_scores(self) -> Float[ndarray, " constraints"]:
        """Scores of the shortest W that meets the equalities."""
        return self.whole.scores(self.independent, self.equality_loads)

    def solve_root(self, right: Float[ndarray, "rank ..."], transposed: bool = False) -> Float[ndarray, "rank ..."]:
        """Return L⁻¹ or, if transposed, L⁻ᵀ times the right-hand side."""
        if not len(self.independent):
            return right
        answer: Float[ndarray, "rank ..."] = dtrtrs(self.factor, right, lower=1, trans=int(transposed))[0]
        return answer.reshape(right.shape)

    def inner_products(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows rank"]:
        """Return (L⁻¹G_Ec)ᵀ for c in rows, each computed once."""
        new = rows[self.position[rows] < 0]
        if len(new):
            self.position[new] = self.count + np.arange(len(new))
            self.columns[self.position[new]] = self.solve_root(self.whole.gram(self.independent, new)).T
            self.count += len(new)
        products: Float[ndarray, "rows rank"] = self.columns[self.position[rows]]
        return products

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """Return ⟨a_c, a_d⟩ outside the equalities' span, for c in rows and d in columns."""
        outside: Float[ndarray, "rows columns"] = self.whole.gram(rows, columns)
        outside -= self.inner_products(rows) @ self.inner_products(columns).T
        return outside

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ outside the equalities' span, for every constraint c."""
        share = self.solve_root(self.inner_products(rows).T @ loads, transposed=True)
        return self.whole.scores(np.append(rows, self.independent), np.append(loads, -share))

    def vectors(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """Return vectors with these inner products, of constraints of length 1 before the projection."""
        return factor_gram(self.gram(rows, rows), 1.0)

    def complete(
        self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"], meet_bounds: bool = True
    ) -> tuple[Int[ndarray, " all"], Float[ndarray, " all"]]:
        """Add λ of the equalities to these λ such that every equality has its b, or 0 if `meet_bounds` is false."""
        zeros = np.zeros(len(self.independent))
        goal = self.whole.bounds[self.independent] if meet_bounds else zeros
        all_rows, multipliers = np.append(rows, self.independent), np.append(loads, zeros)
        for _ in range(1 + REFINEMENTS):
            residual = goal - self.whole.scores(all_rows, multipliers)[self.independent]
            multipliers[len(rows) :] += self.solve_root(self.solve_root(residual), transposed=True)
        return all_rows, multipliers

    def refine(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " rows"]:
        """Return λ refined by its inequalities' residuals, with equalities met; unchanged if a sign would flip."""
        support = np.flatnonzero(loads)
        if not len(support):
            return loads
        factor, failed = dpotrf(self.gram(rows[support], rows[support]), lower=1)
        better = loads.copy()
        for _ in range(0 if failed else REFINEMENTS):
            scores = self.whole.scores(*self.complete(rows[support], better[support]))
            better[support] += dpotrs(factor, (self.whole.bounds - scores)[rows[support]], lower=1)[0]
        return better if (better >= 0.0).all() else loads

    def find_contradiction(self, rows: Int[ndarray, " rows"]) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """Return the row most likely to contradict the equalities alone, and its residual's sign; empty if none."""
        outside = 1.0 - (self.inner_products(rows) ** 2).sum(-1)
        inside = rows[(outside < INSIDE) & (self.bounds[rows] > 0.0)]
        inside = inside[np.argsort(-self.bounds[inside])[:1]]
        return inside, np.ones(len(inside))

    def find_inconsistency(self) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """Return the dependent equality that the others contradict most, and its residual's sign; empty if none."""
        residual = (self.whole.bounds - self.equality_scores)[self.dependent]
        beyond = np.abs(residual) > MISSED * np.abs(self.whole.bounds[self.whole.free]).max()
        worst = np.argsort(-np.abs(residual))[:1] if beyond.any() else np.flatnonzero(beyond)
        return self.dependent[worst], np.sign(residual[worst])


def solve(problem: Problem, tolerance: float = 1e-9, limit: int = 200) -> Solution:
    """Compute W_mm = argmin ‖W‖_F s.t. u_cᵀ W z_q(c) ≥ b_c, = b_c where equal, with its certificate.

    Att-SVM of Tarzanagh et al. 2023: min ½λᵀGλ − bᵀλ over the working set, then each query's most violated constraints
    join, at most `limit` times. Many equalities are eliminated first. Status `inaccurate`, with its gap, if that is not
    enough. Raises UsageError for a tolerance ≤ 0, a limit < 1 and sizes outside [1e-50, 1e50]; UnposedError for a
    problem without constraints.
    """
    check_limits(tolerance, limit)
    check_sizes(problem)
    if not len(problem.margins):
        raise UnposedError("The problem has no constraints.", "Give sequences of at least two tokens.")
    constraints = UnitConstraints(problem)
    impossible = constraints.impossible
    if len(impossible):
        return certify(problem, unscale(constraints, impossible, np.sign(constraints.bounds[impossible])), tolerance)
    if int(constraints.free.sum()) > SMALL:
        return solve_projected(problem, ProjectedConstraints(constraints), tolerance, limit)
    rows = np.arange(len(constraints.u)) if len(constraints.u) <= SMALL else np.flatnonzero(constraints.free)
    working = WorkingSet(constraints, rows, tolerance)
    steps = working.run(limit)
    answer = certify(problem, unscale(constraints, working.rows, working.loads), tolerance, steps)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    return certify(problem, unscale(constraints, working.rows, working.solve_nnls()), tolerance, steps)


def solve_projected(problem: Problem, space: ProjectedConstraints, tolerance: float, limit: int) -> Solution:
    """Solve a problem with many equalities on its inequalities alone, projected off the equalities."""
    working, steps = WorkingSet(space, np.arange(0), tolerance), 0

    def certify_rows(rows: Int[ndarray, " k"], loads: Float[ndarray, " k"], meet_bounds: bool = True) -> Solution:
        return certify(problem, unscale(space.whole, *space.complete(rows, loads, meet_bounds)), tolerance, steps)

    def certify_refined(loads: Float[ndarray, " k"]) -> Solution:
        return certify_rows(working.rows, space.refine(working.rows, loads))

    contradiction = space.find_inconsistency()
    while steps < limit:
        if len(contradiction[0]):
            proof = certify_rows(*contradiction, meet_bounds=False)
            if proof.status == "infeasible":
                return proof
        steps += 1
        joining = working.advance()
        if joining is None:
            break
        contradiction = space.find_contradiction(joining)
    answer = certify_refined(working.loads)
    if answer.status != "inaccurate" or steps == limit:
        return answer
    loads = working.solve_nnls() if working.patience else working.loads  # without patience they already are NNLS's
    proof = certify_rows(working.rows, loads, meet_bounds=False)
    return proof if proof.status == "infeasible" else certify_refined(loads)


class WorkingSet:
    """The working set of constraints, and their λ."""

    def __init__(
        self, constraints: UnitConstraints | ProjectedConstraints, rows: Int[ndarray, " k"], tolerance: float
    ) -> None:
        self.constraints = constraints
        self.tolerance = tolerance
        self.rows = rows
        self.bounds: Float[ndarray, " k"] = constraints.bounds[rows]
        self.free: Bool[ndarray, " k"] = constraints.free[rows]
        self.loads = np.zeros(len(rows))
        self.gram = constraints.gram(rows, rows)
        self.optimal = False  # whether λ is optimal for these constraints
        self.grown = True  # whether any constraint is new
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
        joining = self.find_violated()
        if self.optimal and not len(joining):
            return None
        self.join(joining)
        return joining

    def improve(self) -> None:
        """Find the optimal λ of these constraints alone, from their support; a better λ if they are degenerate."""
        if not self.damping or not self.grown:
            loads = exchange_signs(self.gram, self.bounds, self.free, self.loads != 0.0)
            if loads is not None:
                self.loads, self.optimal = loads, True
                return
        if not self.patience:
            self.loads, self.optimal = self.solve_nnls(), True
            return
        self.patience -= 1
        self.loads, self.damping = damped_step(self.gram, self.bounds, self.free, self.loads, self.damping or DAMPING)
        short = self.bounds - self.gram @ self.loads
        short = np.where(self.free | (self.loads > 0.0), np.abs(short), short)
        self.optimal = bool((short <= self._rounding(self.bounds)).all())

    def find_violated(self) -> Int[ndarray, " joining"]:
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
        self.grown = len(joining) > 0
        if not self.grown:
            return
        side = self.constraints.gram(self.rows, joining)
        self.gram = np.block([[self.gram, side], [side.T, self.constraints.gram(joining, joining)]])
        self.rows, self.loads = np.append(self.rows, joining), np.append(self.loads, np.zeros(len(joining)))
        self.bounds, self.free = self.constraints.bounds[self.rows], self.constraints.free[self.rows]

    def solve_nnls(self) -> Float[ndarray, " k"]:
        """Return λ by NNLS: slow and without a first guess, but it works for any constraints."""
        return solve_by_nnls(self.constraints.vectors(self.rows), self.bounds, self.free)

    def _rounding(self, bounds: Float[ndarray, " some"]) -> Float[ndarray, " some"]:
        """Return the violation allowed for each constraint."""
        # A tenth of the tolerance: violations add up in the duality gap.
        allowed: Float[ndarray, " some"] = 0.1 * self.tolerance * np.abs(bounds) + EPS * np.abs(self.loads).sum()
        return allowed


def unscale(
    constraints: UnitConstraints, rows: Int[ndarray, " k"], loads: Float[ndarray, " k"]
) -> Float[Tensor, " constraints"]:
    """Return λ for the original problem's constraints by undoing the division by their lengths."""
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

    Raises the errors of `solve`.
    """
    answer = solve(problem, limit=limit)
    if answer.status == "infeasible":
        return Separability(False, answer.residual, answer.multipliers)
    # Any feasible W is a proof, even if not the shortest: its gap is finite.
    if answer.gap is None or answer.norm is None or answer.gap == float("inf"):
        return Separability(None, None, answer.multipliers)
    return Separability(True, 1.0 / answer.norm if answer.norm > 0.0 else float("inf"), answer.multipliers)
