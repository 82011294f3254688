"""The SVM of least Frobenius norm: hard margin, separability and soft margin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg.lapack import dposv, dpotrf, dpotrs, dpstrf, dtrtrs
from scipy.optimize import Bounds, minimize, nnls
from scipy.sparse import csr_array

from attnlens.errors import UsageError
from attnlens.maths.attsvm.problem import PROOF, certify, check_solvable

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    from attnlens.maths.attsvm.problem import Problem, Solution

    Loads = Float[ndarray, " k"]
    Rows = Int[ndarray, " k"]
    Each = Float[ndarray, " constraints"]
    Multipliers = tuple[Int[ndarray, " all"], Float[ndarray, " all"]]  # rows and their λ

EPS = float(np.finfo(np.float64).eps)
LARGE = 2**22  # Most numbers (32 MB) in explicit vectors; if there are more, the Gram matrix is factored instead
PIVOTS = 3  # Consecutive exchanges without a new least number of wrong signs after which `exchange_signs` gives up
LEAST_DAMPING = 1e-12  # Damping, relative to the diagonal of G, below which a step is Newton's up to rounding
SHORTEST = 1e-6  # Smallest fraction of a Newton step that is tried
DECREASE = 1e-4  # Share of the decrease predicted by the slope that a step must reach (Armijo's condition)
LONG = 1e-3  # If the residual of NNLS is below LONG for bounds of at most 1, w is longer than 1/LONG or does not exist
RESOLVED = 1e-12  # If the residual of NNLS is below RESOLVED, float64 cannot determine whether w exists
INSIDE = 1e-10  # Largest squared share outside the span of the equalities at which an inequality can contradict them
MISSED = 1e-9  # Rounding, relative to the largest b, allowed in equalities that depend on other equalities
REFINEMENTS = 2  # Number of refinement steps for λ if equalities were eliminated
SMALL = 128  # Most inequalities of a problem whose working set contains all of them from the start
DAMPING = 1e-2  # Number added in the first damped step to the diagonal of G, which is at most 1
PATIENCE = 60  # Damped steps after which NNLS solves a degenerate problem
WORST = 4  # Number of a query's most violated constraints that join the working set at once
BETWEEN = 25  # L-BFGS-B steps between two calls of `Box.polish`
NEWTON, WIDEST = 30, 1000
"""Limits on the number of Newton steps in `Box.polish`, and of λ in a step, whose time grows with their cube."""
RIDGES = tuple(10.0**power for power in range(-12, 1, 2))
"""Numbers that Newton steps add to the unit diagonal of G: if G is singular, they would otherwise leave the bounds."""
NOTICED = 1e-6  # Least slack, relative to |b| + |score|, that counts as a violation; less is within the duality gap


def solve(problem: Problem, tolerance: float = 1e-9, limit: int = 200) -> Solution:
    """Compute W_mm = argmin ‖W‖_F s.t. u_cᵀ W z_q(c) ≥ b_c (= b_c for equality constraints), and its certificate.

    This is the Att-SVM of Tarzanagh et al. 2023. The solver eliminates equalities, minimises ½λᵀGλ − bᵀλ (G is the Gram
    matrix of the u zᵀ) over a working set of constraints, and adds each query's most violated constraints, at most
    `limit` times. If this does not suffice, the status is `inaccurate`, and `gap` is the gap reached. Raises
    UsageError for a tolerance ≤ 0, a limit < 1, and nonzero differences, queries or margins whose largest |entry| is
    outside [1e-50, 1e50]; raises UnposedError for a problem without constraints.
    """
    check_solvable(problem, tolerance, limit)
    constraints = Constraints(problem)
    working, steps = WorkingSet(constraints, tolerance), 0

    def certify_loads(rows: Rows, loads: Loads, meet_bounds: bool = True) -> Solution:
        multipliers = np.zeros(len(constraints.u))
        rows, loads = constraints.complete(rows, loads, meet_bounds)
        multipliers[rows] = loads
        return certify(problem, torch.from_numpy(multipliers / constraints.scale), tolerance, steps)

    contradiction = constraints.find_contradiction(np.append(constraints.suspects, working.rows))
    while steps < limit:
        if len(contradiction[0]):
            proof = certify_loads(*contradiction, meet_bounds=False)
            if proof.status == "infeasible":
                return proof
        steps += 1
        joining = working.advance()
        if joining is None:
            break
        contradiction = constraints.find_contradiction(joining)
    answer = certify_loads(working.rows, constraints.refine(working.rows, working.loads))
    if answer.status != "inaccurate" or steps == limit:
        return answer
    loads = working.solve_nnls() if working.patience else working.loads  # patience 0: the loads are those of NNLS
    proof = certify_loads(working.rows, loads, meet_bounds=False)
    if proof.status == "infeasible":
        return proof
    return certify_loads(working.rows, constraints.refine(working.rows, loads))


@dataclass(frozen=True)
class Separability:
    """Whether any W meets the constraints u W z ≥ b, with a proof.

    The proof is λ: a multiple of Σλ u zᵀ meets the constraints, or Σλ u zᵀ = 0 < Σλb (Gordan 1873, Farkas 1902).
    """

    verdict: bool | None  # True if a W exists, False if none does; None if nothing was proven within the limit
    distance: float | None
    """Least ‖Σλ u zᵀ‖ over λ ≥ 0 with Σλb = 1: the max-margin 1/‖W‖_F; ∞ if W = 0 meets the constraints, about 0 if no
    W exists, None if unknown."""
    multipliers: Float[Tensor, " constraints"]
    """λ of the proof, or of the last attempt; if no W exists, Σλ = 1 over the inequalities."""


def separable(problem: Problem, limit: int = 200) -> Separability:
    """Decide whether any W meets the constraints, from the point of least norm in {Σλ u zᵀ : λ ≥ 0, Σλb = 1}.

    `limit` is as in `solve`. Raises the same errors as `solve`.
    """
    answer = solve(problem, limit=limit)
    if answer.status == "infeasible":
        return Separability(False, answer.residual, answer.multipliers)
    if answer.gap is None or answer.norm is None or answer.gap == math.inf:
        return Separability(None, None, answer.multipliers)
    # The gap is finite, so W meets the constraints, although a shorter W can exist.
    return Separability(True, 1.0 / answer.norm if answer.norm > 0.0 else math.inf, answer.multipliers)


class UnitConstraints:
    """The constraints a_c = u_c z_q(c)ᵀ of a problem, each divided by its length, so that ⟨a_c, a_c⟩ = 1 or a_c = 0.

    Only ⟨a_c, a_e⟩ = (u_c·u_e)(z_q(c)·z_q(e)) is needed, so no d × d_query matrix is formed.
    """

    def __init__(self, problem: Problem) -> None:
        u, z = problem.differences.numpy(), problem.queries.numpy()
        self.query_of: Int[ndarray, " constraints"] = problem.query_of.numpy()
        u_lengths, z_lengths = np.linalg.norm(u, axis=1), np.linalg.norm(z, axis=1)
        lengths = u_lengths * z_lengths[self.query_of]
        self.empty: Bool[ndarray, " constraints"] = lengths == 0.0
        self.scale = np.where(self.empty, 1.0, lengths)
        self.u = u / np.where(u_lengths > 0.0, u_lengths, 1.0)[:, None]
        self.z = z / np.where(z_lengths > 0.0, z_lengths, 1.0)[:, None]
        self.products = self.z @ self.z.T
        self.equal: Bool[ndarray, " constraints"] = problem.equal.numpy()
        self.unit_bounds: Each = problem.margins.numpy() / self.scale
        grouped = bool((np.diff(self.query_of) >= 0).all())
        self.order = np.arange(len(u)) if grouped else np.argsort(self.query_of, kind="stable")
        self.ordered = self.u if grouped else self.u[self.order]  # sorted by query
        present, starts = np.unique(self.query_of[self.order], return_index=True)
        ends = [*starts[1:], len(u)]
        self.blocks = [(q, slice(s, e)) for q, s, e in zip(present.tolist(), starts.tolist(), ends, strict=True)]
        """Queries that have constraints, and the positions of these constraints in `order`."""

    def unit_gram(self, rows: Rows, columns: Int[ndarray, " columns"]) -> Float[ndarray, "k columns"]:
        """Return the inner products ⟨a_c, a_e⟩ of unit constraints a, for c in rows and e in columns."""
        pairs = self.products[np.ix_(self.query_of[rows], self.query_of[columns])]
        pairs *= self.u[rows] @ self.u[columns].T
        return pairs

    def unit_scores(self, rows: Rows, loads: Loads) -> Each:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ for every unit constraint a_c, where r runs over rows."""
        shares = csr_array((loads, (self.query_of[rows], rows)), shape=(len(self.z), len(self.u)))
        directions = self.products @ (shares @ self.u)
        values = np.empty(len(self.u))
        for query, block in self.blocks:
            values[self.order[block]] = self.ordered[block] @ directions[query]
        return values


class Constraints(UnitConstraints):
    """The inequalities a_c of a problem, each without its component in the span of the equalities.

    The equalities' Gram matrix G_EE = LLᵀ is factored once with pivoting, so that dependent equalities drop out.
    Inequalities c and d then have the inner products G_cd − (L⁻¹G_Ec)ᵀ(L⁻¹G_Ed) and the bounds b_c − (L⁻¹G_Ec)ᵀL⁻¹b_E,
    and no equality remains.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        equal = np.flatnonzero(self.equal)
        factor, pivots, rank = self.unit_gram(equal, equal), equal, 0
        if len(equal):
            factor, pivots, rank, _ = dpstrf(factor, lower=1, overwrite_a=1)
        self.independent: Int[ndarray, " rank"] = equal[pivots[:rank] - 1]
        self.factor = np.asfortranarray(factor[:rank, :rank])
        self.suspects: Rows = np.append(equal[pivots[rank:] - 1], np.flatnonzero(self.empty & ~self.equal))
        """Equalities that depend on others and can contradict them, and inequalities of length 0, which need b ≤ 0."""
        loads = self.solve_root(self.solve_root(self.unit_bounds[self.independent]), transposed=True)
        self.missing: Each = self.unit_bounds - self.unit_scores(self.independent, loads)
        """b minus the score of the shortest W that meets the equalities."""
        # Equalities are met for every λ of the inequalities, so they are never violated.
        self.bounds = np.where(self.equal, -np.inf, self.missing)
        self.position: Int[ndarray, " constraints"] = np.full(len(self.u), -1)
        self.count = 0
        self.columns = np.empty((len(self.u) - rank, rank))

    def solve_root(self, right: Float[ndarray, "rank ..."], transposed: bool = False) -> Float[ndarray, "rank ..."]:
        """Return L⁻¹ or, if `transposed`, L⁻ᵀ times `right`, where LLᵀ is the Gram matrix of the equalities."""
        if not len(self.independent):
            return right
        answer: Float[ndarray, "rank ..."] = dtrtrs(self.factor, right, lower=1, trans=int(transposed))[0]
        return answer.reshape(right.shape)

    def inner_products(self, rows: Rows) -> Float[ndarray, "k rank"]:
        """Return the cached inner products (L⁻¹G_Ec)ᵀ of constraints c in rows with the orthonormalised equalities."""
        new = rows[self.position[rows] < 0]
        if len(new):
            self.position[new] = self.count + np.arange(len(new))
            self.columns[self.position[new]] = self.solve_root(self.unit_gram(self.independent, new)).T
            self.count += len(new)
        products: Float[ndarray, "k rank"] = self.columns[self.position[rows]]
        return products

    def gram(self, rows: Rows, columns: Int[ndarray, " columns"]) -> Float[ndarray, "k columns"]:
        """Return ⟨a_c, a_d⟩ without the components in the equalities' span, for c in rows and d in columns."""
        outside: Float[ndarray, "k columns"] = self.unit_gram(rows, columns)
        outside -= self.inner_products(rows) @ self.inner_products(columns).T
        return outside

    def scores(self, rows: Rows, loads: Loads) -> Each:
        """Return ⟨a_c, Σ_r loads_r a_r⟩ without the components in the equalities' span, for every constraint c."""
        share = self.solve_root(self.inner_products(rows).T @ loads, transposed=True)
        return self.unit_scores(np.append(rows, self.independent), np.append(loads, -share))

    def vectors(self, rows: Rows) -> Float[ndarray, "k width"]:
        """Return one vector per row such that the inner products of the vectors are the entries of `gram`."""
        both = np.append(rows, self.independent)
        u, z = compact(self.u[both]), compact(self.z)[self.query_of[both]]
        if u.size * z.shape[1] > LARGE:
            # Directions below √ε are lost; the certificate accounts for the error.
            sizes, vectors = np.linalg.eigh(self.gram(rows, rows))
            above = sizes > EPS * len(rows)
            large: Float[ndarray, "k width"] = vectors[:, above] * np.sqrt(sizes[above])
            return large
        whole = compact((u[:, :, None] * z[:, None, :]).reshape(len(both), -1))
        basis = np.linalg.qr(whole[len(rows) :].T)[0]
        outside: Float[ndarray, "k width"] = whole[: len(rows)] - whole[: len(rows)] @ basis @ basis.T
        return outside

    def complete(self, rows: Rows, loads: Loads, meet_bounds: bool = True) -> Multipliers:
        """Append the equalities to the rows, with λ that give each of them the score b (0 unless `meet_bounds`)."""
        if not len(self.independent):
            return rows, loads
        zeros = np.zeros(len(self.independent))
        goal = self.unit_bounds[self.independent] if meet_bounds else zeros
        all_rows, multipliers = np.append(rows, self.independent), np.append(loads, zeros)
        for _ in range(1 + REFINEMENTS):
            residual = goal - self.unit_scores(all_rows, multipliers)[self.independent]
            multipliers[len(rows) :] += self.solve_root(self.solve_root(residual), transposed=True)
        return all_rows, multipliers

    def refine(self, rows: Rows, loads: Loads) -> Loads:
        """Make λ more accurate if equalities were eliminated; return λ unchanged if an entry would become negative."""
        support = np.flatnonzero(loads)
        if not len(support) or not len(self.independent):
            return loads
        factor, failed = dpotrf(self.gram(rows[support], rows[support]), lower=1)
        better = loads.copy()
        for _ in range(0 if failed else REFINEMENTS):
            scores = self.unit_scores(*self.complete(rows[support], better[support]))
            better[support] += dpotrs(factor, (self.unit_bounds - scores)[rows[support]], lower=1)[0]
        return better if (better >= 0.0).all() else loads

    def find_contradiction(self, rows: Rows) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """Return the row that most clearly contradicts the equalities, and its λ = ±1; both are empty if none does."""
        outside = ~self.empty[rows] - (self.inner_products(rows) ** 2).sum(-1)
        short = np.where(self.equal[rows], np.abs(self.missing[rows]), self.missing[rows])
        beyond = short > MISSED * np.abs(self.unit_bounds[self.equal]).max(initial=0.0)
        suspicious = (outside < INSIDE) & beyond
        worst = rows[suspicious][np.argsort(-short[suspicious])[:1]]
        return worst, np.sign(self.missing[worst])


def compact(rows: Float[ndarray, "rows width"]) -> Float[ndarray, "rows least"]:
    """Express the rows in an orthonormal basis of their span (by QR) if there are fewer rows than columns."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle: Float[ndarray, "least rows"] = np.linalg.qr(rows.T)[1]
    return triangle.T


class WorkingSet:
    """Constraints that the solver currently takes into account, with their multipliers λ."""

    def __init__(self, constraints: Constraints, tolerance: float) -> None:
        inequalities = np.flatnonzero(~constraints.equal)
        self.constraints = constraints
        self.tolerance = tolerance
        self.rows = inequalities if len(inequalities) <= SMALL else inequalities[:0]
        self.bounds: Loads = constraints.bounds[self.rows]
        self.loads = np.zeros(len(self.rows))
        self.gram = constraints.gram(self.rows, self.rows)
        self.optimal = False  # True if λ is optimal for the working set
        self.grown = True  # True if constraints joined in the last step
        self.damping = 0.0  # Damping of the last damped step; 0 before the first step
        self.patience = PATIENCE  # Number of damped steps left before NNLS is used

    def advance(self) -> Rows | None:
        """Take one step; return the constraints added to the set (possibly none), or None if the search is finished."""
        self.improve()
        joining = self.find_violated()
        self.grown = len(joining) > 0
        if self.grown:
            side = self.constraints.gram(self.rows, joining)
            self.gram = np.block([[self.gram, side], [side.T, self.constraints.gram(joining, joining)]])
            self.rows, self.loads = np.append(self.rows, joining), np.append(self.loads, np.zeros(len(joining)))
            self.bounds = self.constraints.bounds[self.rows]
        return joining if self.grown or not self.optimal else None

    def improve(self) -> None:
        """Find the optimal λ of the working set from the current support, or a better λ if the set is degenerate."""
        if not self.damping or not self.grown:
            loads = exchange_signs(self.gram, self.bounds, self.loads != 0.0)
            if loads is not None:
                self.loads, self.optimal = loads, True
                return
        if not self.patience:
            self.loads, self.optimal = self.solve_nnls(), True
            return
        self.patience -= 1
        self.loads, self.damping = damped_step(self.gram, self.bounds, self.loads, self.damping or DAMPING)
        short = self.bounds - self.gram @ self.loads
        short = np.where(self.loads > 0.0, np.abs(short), short)
        self.optimal = bool((short <= self._rounding(self.bounds)).all())

    def find_violated(self) -> Rows:
        """Return the most violated constraints, at most WORST of each query; none if λ proves that no W exists."""
        constraints, support = self.constraints, np.flatnonzero(self.loads)
        scores = constraints.scores(self.rows[support], self.loads[support])
        proven = PROOF * float(np.abs(self.loads).sum())
        if self.loads @ self.bounds > proven and self.loads @ scores[self.rows] <= proven**2:
            # Damped steps would only converge to a proof; NNLS finds an exact one.
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

    def solve_nnls(self) -> Loads:
        """Compute λ by nonnegative least squares, which is slow but works for any constraints without a first guess."""
        return solve_by_nnls(self.constraints.vectors(self.rows), self.bounds)

    def _rounding(self, bounds: Loads) -> Loads:
        # A tenth of the tolerance, because violations add up in the duality gap.
        allowed: Loads = 0.1 * self.tolerance * np.abs(bounds) + EPS * np.abs(self.loads).sum()
        return allowed


def exchange_signs(gram: Float[ndarray, "k k"], bounds: Loads, support: Bool[ndarray, " k"]) -> Loads | None:
    """Minimise ½λᵀGλ − bᵀλ over λ ≥ 0 by exchanging all wrong signs at once (Kim and Park 2011, Alg. 2).

    `support` is the first guess of where λ > 0. Returns None if a block of G is singular up to rounding, or if the
    exchanges do not converge; the caller then uses `damped_step`.
    """
    fewest, patience = len(bounds) + 1, PIVOTS
    while patience:
        active = np.flatnonzero(support)
        loads, failed = dposv(gram[np.ix_(active, active)], bounds[active])[1:] if len(active) else (np.zeros(0), 0)
        if failed:
            return None
        multipliers = np.zeros(len(bounds))
        multipliers[active] = loads
        slack = gram @ multipliers - bounds
        # A sign is wrong only beyond the rounding of sums, times 64 for safety; otherwise ties would alternate.
        noise = 64.0 * EPS * (np.abs(loads).sum() + np.abs(bounds).max(initial=0.0))
        wrong = np.where(support, multipliers < 0.0, slack < -noise)
        if (np.abs(slack[active]) > noise).any():
            return None
        count = int(wrong.sum())
        if not count:
            return multipliers
        patience = PIVOTS if count < fewest else patience - 1
        fewest = min(fewest, count)
        support = support ^ wrong
    return None


def damped_step(gram: Float[ndarray, "k k"], bounds: Loads, loads: Loads, damping: float) -> tuple[Loads, float]:
    """Lower ½λᵀGλ − bᵀλ over λ ≥ 0 by a projected Newton step (Bertsekas 1982); return λ and the next damping.

    The step uses G + damping · I, which is not singular even if constraints are repeated. The objective never rises, so
    steps cannot cycle. If no step lowers the objective, λ is unchanged and the damping grows.
    """
    slack = gram @ loads - bounds
    active = np.flatnonzero((loads > 0.0) | (slack < 0.0))
    block = gram[np.ix_(active, active)]
    ridge = damping * np.eye(len(active))
    move, failed = dposv(block + ridge, -slack[active])[1:] if len(active) else (np.zeros(0), 0)
    share = 0.0 if failed else 1.0
    while share > SHORTEST:
        moved = (loads[active] + share * move).clip(min=0.0) - loads[active]
        slope = float(slack[active] @ moved)
        if slope + 0.5 * float(moved @ block @ moved) <= DECREASE * slope:
            better = loads.copy()
            better[active] += moved
            # Damp less after a whole step, more after at most a quarter of a step.
            factor = 0.1 if share == 1.0 else 10.0 if share < 0.3 else 1.0
            return better, max(damping * factor, LEAST_DAMPING)
        share *= 0.5
    return loads, 100.0 * damping


def solve_by_nnls(rows: Float[ndarray, "k width"], bounds: Loads) -> Loads:
    """Return λ ≥ 0 such that w = rowsᵀλ is the shortest w with rows·w ≥ b or, if there is none, rowsᵀλ = 0 < bᵀλ.

    λ is the NNLS solution of min ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖ (Lawson and Hanson 1974, §23.4), whose residual is zero
    if and only if no w exists. Dependent and repeated constraints are allowed.
    """
    if not (bounds > 0.0).any():
        return np.zeros(len(bounds))
    scale = 1.0 / np.abs(bounds).max()
    loads, residual = fit_nnls(rows, bounds * scale)
    if RESOLVED < residual < LONG:
        # The residual is 1/√(1 + ‖w‖²): scaling a long w to length 1 distinguishes it from a missing w.
        scale *= residual
        loads, residual = fit_nnls(rows, bounds * scale)
    if residual < LONG:
        return loads
    # Solving the support's equations is more exact than NNLS, which meets them only to ε‖w‖².
    support = loads > 0.0
    shortest = np.linalg.lstsq(rows[support], bounds[support], rcond=EPS)[0]
    exact = np.linalg.lstsq(rows[support].T, shortest, rcond=EPS)[0]
    loads /= residual**2 * scale
    if (exact >= 0.0).all():
        loads[support] = exact
    return loads


def fit_nnls(rows: Float[ndarray, "k width"], bounds: Loads) -> tuple[Loads, float]:
    """Return the λ ≥ 0 with the least ‖[rowsᵀ; bᵀ]λ − (0, …, 0, 1)‖, and this norm; if NNLS cycles, return 0 and 1."""
    target = np.zeros(rows.shape[1] + 1)
    target[-1] = 1.0
    try:
        loads, residual = nnls(np.vstack([rows.T, bounds]), target, maxiter=30 * len(bounds))
    except RuntimeError:
        # NNLS raises only if it cycles; λ = 0 proves nothing and is certified as inaccurate.
        return np.zeros(len(bounds)), 1.0
    return loads, float(residual)


@dataclass(frozen=True)
class SoftMargin:
    """The W that minimises ½‖W‖² + C Σ v; the violation v is max(0, b − u W z), or |b − u W z| at equalities."""

    W: Float[Tensor, "d d_query"]  # W(λ), not rescaled
    multipliers: Float[Tensor, " constraints"]  # λ in [0, C]; at equalities in [−C, C]
    slack: float  # Σ violation: 0 if the problem is separable and C is large enough
    violated: float  # Share of the constraints with a violation beyond rounding
    gap: float  # Relative duality gap (P − D)/P of the objective
    iterations: int  # L-BFGS-B steps


def soft_margin(problem: Problem, C: float, tolerance: float = 1e-9, limit: int = 5000) -> SoftMargin:
    """Compute the soft-margin W by maximising bᵀλ − ½‖W(λ)‖² over 0 ≤ λ ≤ C, or |λ| ≤ C at equalities.

    This is the SVM of Cortes and Vapnik 1995. L-BFGS-B and Newton steps are taken until the relative gap is at most
    `tolerance`, or for `limit` steps of L-BFGS-B; the result contains the gap reached. Raises the errors of `solve`,
    and UsageError unless C is finite and positive.
    """
    check_solvable(problem, tolerance, limit)
    if not (C > 0.0 and math.isfinite(C)):
        raise UsageError(f"C must be positive and finite, not {C}.", "Pass a positive number such as C=1.")
    box = Box(problem, C)
    # Start from the hard margin's λ, clipped to the box; if λ lies in the box, it is already the solution.
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
        # A constraint of length 0 has the same violation for every W; if b > 0, its λ is C, which does not change W.
        self.high = C * self.scale
        self.low = np.where(self.equal, -self.high, 0.0)
        self.rows = np.arange(len(self.u))

    def uphill(self, loads: Loads) -> Loads:
        """Return b − Gλ, the gradient of the dual objective."""
        rise: Loads = self.unit_bounds - self.unit_scores(self.rows, loads)
        return rise

    def is_optimal(self, loads: Loads, tolerance: float) -> bool:
        """Return True if the gap P − D = max ∇·(λ' − λ) over λ' in the box, where ∇ = b − Gλ, is ≤ `tolerance` · P."""
        uphill = self.uphill(loads)
        missing = float(np.maximum(uphill * (self.high - loads), uphill * (self.low - loads)).sum())
        return missing <= tolerance * (missing + 0.5 * float(loads @ (self.unit_bounds + uphill)))

    def minimise(self, loads: Loads, tolerance: float, limit: int) -> tuple[Loads, int]:
        """Minimise ½λᵀGλ − bᵀλ by L-BFGS-B with `polish` every few steps; return λ and the number of L-BFGS-B steps."""

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
        """Improve λ by up to NEWTON projected Newton steps (Bertsekas 1982) on the entries that no bound blocks.

        Stop if no step helps, or if more than WIDEST entries are free.
        """
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
        """Try a Newton step of λ[free] with each of RIDGES; return the best λ and its `uphill`; None if none helps."""
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
