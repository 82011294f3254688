"""The nuclear-norm SVM: an interior-point method on Gram matrices, then Newton's method on the face that it reaches.

min ‖W‖_* s.t. u_cᵀ W z_c ≥ b_c is equivalent to min ½ tr X, where W is the upper right corner of X = [[P, W], [Wᵀ, Q]]
⪰ 0. Its dual is max bᵀλ s.t. S = [[I, −M], [−Mᵀ, I]] ⪰ 0, M = Σλ u zᵀ, λ ≥ 0. Because each constraint has rank one,
u zᵀ, the Newton system is a sum of four elementwise products of Gram matrices and has one row per constraint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve

from attnlens.maths.attsvm.frobenius import EPS, solve
from attnlens.maths.attsvm.problem import Problem, Solution, Status, check_solvable, feasible_scale

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    Each = Float[ndarray, " constraints"]
    Block = Float[ndarray, "order order"]  # Symmetric block matrix of order d + d_query
    BilinearForm = Float[ndarray, "d d_query"]
    Gram = Float[ndarray, "constraints constraints"]
    Multipliers = Float[Tensor, " constraints"]
    Matrix = Float[Tensor, "d d_query"]

PATIENCE = 8  # Steps without a better bound after which rounding is assumed to dominate
LEAST_CENTRING = 1e-6
"""Lower limit on the ratio whose cube is Mehrotra's centring parameter; the ratio is 0 if the affine step ends at the
border."""
MISSING = 0.1  # Allowed violation of a constraint, as a share of the tolerance
LEAST_MISSING = 1e-7  # Violation that is always allowed: the Newton system's rounding leaves about 3e-8
INSIDE = 0.95  # Largest step, as a share of the way to the border of the cone
NEWTON_STEPS = 6
"""Limit on Newton steps. After a few steps, convergence is quadratic: errors of 1e-4, 1e-8, 1e-16."""
CONVERGED = 1e-14  # Relative length of a step that ends the iteration, because the next step would be rounding
MOST_UNKNOWNS = 1000  # Most unknowns of the dense system, which takes about a second per step
SMALL = 256  # Most constraints of a problem whose working set contains all of them from the start
FIRST_GAP = 1e-2  # Relative gap to which the first working set is solved; it is loose because the set will change
NEAR = 1e-8  # Relative gap that the interior-point method reaches reliably; Newton's method reaches smaller gaps
POLISHED = 1e-6  # Relative gap below which rank and support are clear, so that Newton's method can be used

SLACK = 5e-12  # Rounding allowed for a violated constraint, relative to the largest margin


@dataclass(frozen=True)
class Constraints:
    """Constraints u_cᵀ W z_c ≥ b_c (= b_c where `equal`), one per row, scaled to about unit size."""

    u: Float[ndarray, "constraints d"]
    z: Float[ndarray, "constraints d_query"]
    b: Each
    equal: Bool[ndarray, " constraints"]

    def form(self, multipliers: Each) -> BilinearForm:
        """Return M = Σ_c λ_c u_c z_cᵀ."""
        form: BilinearForm = (self.u * multipliers[:, None]).T @ self.z
        return form

    def block(self, multipliers: Each) -> Block:
        """Return [[0, M], [Mᵀ, 0]] for M = Σ_c λ_c u_c z_cᵀ."""
        rows, columns = self.u.shape[1], self.z.shape[1]
        block = np.zeros((rows + columns, rows + columns))
        block[:rows, rows:] = self.form(multipliers)
        block[rows:, :rows] = self.corner(block).T
        return block

    def scores(self, block: Block) -> Each:
        """Return 2 u_cᵀ W z_c for each constraint, where W is the upper right block of [[P, W], [Wᵀ, Q]]."""
        scores: Each = 2 * ((self.u @ self.corner(block)) * self.z).sum(1)
        return scores

    def corner(self, block: Block) -> BilinearForm:
        """Return the upper right block W of [[P, W], [Wᵀ, Q]]."""
        return block[: self.u.shape[1], self.u.shape[1] :]

    def grams(self, block: Block) -> tuple[Gram, Gram, Gram]:
        """Return U P Uᵀ, U W Zᵀ and Z Q Zᵀ for the block [[P, W], [Wᵀ, Q]]; the rows of U and Z are the u_c and z_c."""
        rows = self.u.shape[1]
        P, Q = block[:rows, :rows], block[rows:, rows:]
        return self.u @ P @ self.u.T, self.u @ self.corner(block) @ self.z.T, self.z @ Q @ self.z.T


@dataclass(frozen=True)
class Point:
    """Interior point with X ≻ 0, s > 0 (primal), λ > 0 and S ≻ 0 (dual); at equalities, s = 0 and λ has any sign.

    The dual variables are exactly feasible. A Newton direction is also a Point: the change in each field.
    """

    X: Block
    s: Each
    multipliers: Each
    S: Block


def interior_point(constraints: Constraints, size: float, goal: float, limit: int) -> tuple[BilinearForm, Each, int]:
    """Return the best W and λ, and the number of steps until a bound last improved.

    `size` is the expected norm of W. The method stops at the relative gap `goal`, after `limit` steps, or if rounding
    prevents better bounds. This is Mehrotra's predictor-corrector with the HKM direction (Helmberg et al. 1996).
    """
    # Start well inside the cone: X = size · I, and equal λ with ‖M‖ = ½ at inequalities, 0 at equalities.
    inequal, order = ~constraints.equal, constraints.u.shape[1] + constraints.z.shape[1]
    flat = inequal * (0.5 / max(float(np.linalg.norm(constraints.form(inequal.astype(float)), 2)), EPS))
    point = Point(size * np.eye(order), size * inequal, flat, np.eye(order) - constraints.block(flat))
    W, multipliers, steps, upper, lower = constraints.corner(point.X), flat, 0, np.inf, 0.0
    for step in range(1, limit + 1):
        try:
            newton = Newton(constraints, point)
            affine = newton.direction(0.0, None)
            # Mehrotra's centring: the longer the affine step, the less centring is needed
            ratio = mean_product(constraints, newton.move(affine, 1.0)) / newton.mean
            centring = min(1.0, max(LEAST_CENTRING, ratio) ** 3) * newton.mean
            point = newton.move(newton.direction(centring, affine), INSIDE)
        except np.linalg.LinAlgError:  # the point is on the border within rounding: return the best W and λ so far
            break
        P, D = bound_norm(constraints, point, goal)
        if upper > P:
            upper, W, steps = P, constraints.corner(point.X), step
        if lower < D:
            lower, multipliers, steps = D, point.multipliers, step
        if (np.isfinite(upper) and upper - lower <= goal * upper) or step > steps + PATIENCE:
            break
    return W, multipliers, steps


def bound_norm(constraints: Constraints, point: Point, tolerance: float) -> tuple[float, float]:
    """Return bounds P ≥ D on the least ‖W‖_*: P from the corner W of X (∞ if W is clearly infeasible), D from λ."""
    b, equal = constraints.b, constraints.equal
    multipliers = point.multipliers / max(float(np.linalg.norm(constraints.form(point.multipliers), 2)), EPS)
    scores, needed, factor, P = constraints.scores(point.X) / 2, ~equal & (b > 0), 1.0, np.inf
    if needed.any() and (scores[needed] > 0).all() and not b[equal].any():  # an equality b ≠ 0 fixes the scale
        factor = (b[needed] / scores[needed]).max()
    short = np.where(equal, np.abs(factor * scores - b), (b - factor * scores).clip(min=0.0))
    if short.max() <= max(MISSING * tolerance, LEAST_MISSING):
        # Violations are corrected later; each adds twice λ times its size to P. With λ once, W = 0 would give P = D.
        P = factor * np.linalg.norm(constraints.corner(point.X), "nuc") + 2 * np.abs(multipliers) @ short
    return float(P), float(b @ multipliers)


def mean_product(constraints: Constraints, point: Point) -> float:
    """Return μ = (⟨X, S⟩ + sᵀλ)/n, which is 0 at the optimum; n is the order of X plus the number of inequalities."""
    count = len(point.X) + int((~constraints.equal).sum())
    return float(((point.X * point.S).sum() + point.s @ point.multipliers) / count)


class Newton:
    """The Newton system of the interior-point method at one point, factored."""

    def __init__(self, constraints: Constraints, point: Point) -> None:
        self.constraints, self.point = constraints, point
        # L⁻¹ for X = L Lᵀ, and likewise for S: they determine the distance to the border, and S⁻¹ = L⁻ᵀ L⁻¹
        self.whiteners = tuple(np.linalg.inv(np.linalg.cholesky(matrix)) for matrix in (point.X, point.S))
        self.inverse = self.whiteners[1].T @ self.whiteners[1]
        self.mean = mean_product(constraints, point)
        # 1/λ and s/λ at inequalities, 0 at equalities
        self.reciprocal = np.where(constraints.equal, 0.0, 1 / np.where(constraints.equal, 1.0, point.multipliers))
        self.ratio = point.s * self.reciprocal
        (uPu, uWz, zQz), (uRu, uTz, zVz) = constraints.grams(point.X), constraints.grams(self.inverse)
        crossed = uWz * uTz.T
        system = uPu * zVz + zQz * uRu + crossed + crossed.T
        # dependent equalities make the system singular; their λ is then not unique
        system[np.diag_indices_from(system)] += self.ratio + EPS * len(system) * system.diagonal().max()
        self.system = cho_factor(system, lower=True, overwrite_a=True, check_finite=False)

    def direction(self, mean: float, affine: Point | None) -> Point:
        """Return the step towards X S = mean · I and s λ = mean, corrected to second order by `affine` if given."""
        constraints, point, inverse = self.constraints, self.point, self.inverse
        fixed, slack = mean * inverse, mean * self.reciprocal
        if affine is not None:
            fixed = fixed - symmetrise(affine.X @ affine.S @ inverse)
            slack = slack - affine.s * affine.multipliers * self.reciprocal
        missing = 2 * constraints.b - constraints.scores(fixed) + slack
        change = cho_solve(self.system, missing, check_finite=False)
        block = constraints.block(change)
        moved = symmetrise(point.X @ block @ inverse) + fixed - point.X
        return Point(moved, slack - point.s - self.ratio * change, change, -block)

    def move(self, direction: Point, share: float) -> Point:
        """Return the point after primal and dual steps of length min(1, share · t); length t would reach the border."""
        point = self.point
        primal = min(to_border(self.whiteners[0], direction.X, share), to_zero(point.s, direction.s, share))
        dual = to_border(self.whiteners[1], direction.S, share)
        inequal = ~self.constraints.equal
        dual = min(dual, to_zero(point.multipliers[inequal], direction.multipliers[inequal], share))
        multipliers = point.multipliers + dual * direction.multipliers
        S = np.eye(len(point.S)) - self.constraints.block(multipliers)
        return Point(point.X + primal * direction.X, point.s + primal * direction.s, multipliers, S)


def symmetrise(matrix: Block) -> Block:
    """Return the symmetric part (A + Aᵀ) / 2."""
    half: Block = (matrix + matrix.T) / 2
    return half


def to_border(whitener: Block, change: Block, share: float) -> float:
    """Return min(1, share · s) for the largest step s that leaves L Lᵀ + s · change positive semidefinite.

    `whitener` is L⁻¹.
    """
    least = np.linalg.eigvalsh(symmetrise(whitener @ change @ whitener.T))[0]
    return 1.0 if least >= -share else float(-share / least)


def to_zero(values: Each, change: Each, share: float) -> float:
    """Return min(1, share · s), where s is the largest step for which values + s · change is nonnegative."""
    falling = change < 0
    return float(min(1.0, share * (values[falling] / -change[falling]).min(initial=np.inf)))


def refine_on_face(
    problem: Problem, multipliers: Multipliers, W: Matrix, tight: Bool[Tensor, " constraints"]
) -> tuple[Multipliers, Matrix] | None:
    """Return (λ, W) near the given pair, where W keeps its rank, u W z = b if `tight`, and λ = 0 otherwise.

    With W = A Bᵀ, Newton's method solves the stationarity conditions of ½‖A‖² + ½‖B‖², whose least value is ‖A Bᵀ‖_*: A
    = M B and B = Mᵀ A, where M = Σλ u zᵀ. Return None if the system is too large. The result can be worse than the
    given pair, so callers must certify it.
    """
    left, values, right = torch.linalg.svd(W, full_matrices=False)
    # Strict complementarity distinguishes zero from small singular values of W: either σ(W) = 0 or σ(M) = 1.
    border = 1 - torch.linalg.svdvals(problem.form(multipliers))
    rank = int((values > border * values[:1]).sum())
    rows = tight.nonzero().flatten()
    if rank * sum(W.shape) + len(rows) > MOST_UNKNOWNS:
        return None
    A, B = left[:, :rank] * values[:rank].sqrt(), right[:rank].mT * values[:rank].sqrt()
    face, active, eye = problem.select(rows), multipliers[rows], torch.eye(rank).double()
    u, z = face.differences, face.paired_queries
    for _ in range(NEWTON_STEPS):
        M, before = face.form(active), A @ B.mT
        by_a = (u[:, :, None] * (z @ B)[:, None, :]).flatten(1)
        by_b = (z[:, :, None] * (u @ A)[:, None, :]).flatten(1)
        system = [
            torch.cat([torch.eye(A.numel()), -torch.kron(M, eye), -by_a.mT], 1),
            torch.cat([-torch.kron(M.mT.contiguous(), eye), torch.eye(B.numel()), -by_b.mT], 1),
            torch.cat([by_a, by_b, torch.zeros(len(u), len(u))], 1),
        ]
        missing = torch.cat([(M @ B - A).flatten(), (M.mT @ A - B).flatten(), face.margins - face.scores(before)])
        # The shortest step, because the system is singular: rotating A and B together does not change W.
        step = torch.linalg.lstsq(torch.cat(system), missing[:, None], driver="gelsd").solution[:, 0]
        a, b, change = step.split([A.numel(), B.numel(), len(u)])
        A, B, active = A + a.view_as(A), B + b.view_as(B), active + change
        if (A @ B.mT - before).norm() <= CONVERGED * before.norm():
            break
    return torch.zeros_like(multipliers).index_add(0, rows, active), A @ B.mT


def solve_nuclear(problem: Problem, tolerance: float = 1e-4, limit: int = 500) -> Solution:
    """Compute argmin ‖W‖_* s.t. u_cᵀ W z_c ≥ b_c (= b_c where `equal`); Tarzanagh et al. 2023, Eq. Att-SVM⋆.

    An interior-point method solves a working set of constraints, to which violated constraints are added. It works in
    the spans of the u and of the z, which contain W. `tolerance` is the relative gap (P − D)/P to reach. At the default
    of 1e-4, the norm is accurate to 1e-4, but W is not; 1e-10 gives a W that is accurate to rounding. `limit` is the
    largest number of interior-point steps. For an infeasible problem, the result contains Gordan's certificate and no
    norm. Raises the same errors as `solve`.
    """
    check_solvable(problem, tolerance, limit)
    frobenius = solve(problem)
    if frobenius.status == "infeasible":
        return frobenius
    if not (problem.margins[problem.equal] != 0).any() and not (problem.margins > 0).any():
        return certify_nuclear(problem, frobenius.multipliers, torch.zeros_like(problem.form(problem.margins)))
    left, right = row_basis(problem.differences), row_basis(problem.queries)
    small = replace(problem, differences=problem.differences @ left, queries=problem.queries @ right)
    answer = solve_reduced(small, frobenius, tolerance, limit)
    if answer.W is None:
        return answer
    return certify_nuclear(problem, answer.multipliers, left @ answer.W @ right.mT, tolerance, answer.iterations)


def solve_reduced(problem: Problem, frobenius: Solution, tolerance: float, limit: int) -> Solution:
    """Solve a problem: repeatedly solve a working set, refine W and λ, and add violated constraints."""
    # Start with all constraints of a small problem, else with the equalities and the Frobenius solution's support.
    count, support = len(problem.margins), (problem.equal | frobenius.support).nonzero().flatten()
    working = support if count > SMALL and len(support) else torch.arange(min(count, SMALL))
    steps = 0
    goal = max(tolerance / 2, NEAR if len(working) == len(problem.margins) else FIRST_GAP)
    while True:
        W, multipliers, taken = solve_working_set(problem, working, frobenius.norm or 1.0, goal, limit - steps)
        steps += taken
        answer = certify_nuclear(problem, multipliers, W, tolerance, steps)
        if answer.W is not None and answer.gap is not None and answer.gap <= POLISHED:
            refined = refine_on_face(problem, answer.multipliers, answer.W, answer.support | problem.equal)
            polished = answer if refined is None else certify_nuclear(problem, *refined, tolerance, steps)
            answer = polished if polished.gap is not None and polished.gap < answer.gap else answer
        # Add the most violated constraints outside the working set, at most as many as it contains, plus one.
        slack = problem.scores(W) - problem.margins
        slack[working] = math.inf
        most_violated = slack.topk(min(len(working) + 1, len(slack)), largest=False)
        joining = most_violated.indices[most_violated.values < 0]
        if answer.status == "optimal" or steps >= limit or (goal <= tolerance / 2 and not len(joining)):
            return answer
        working = torch.cat([working, joining])
        floor = max(tolerance / 2, NEAR if goal > NEAR else 0.0)
        goal = max(floor, goal / 10) if len(joining) else floor


def certify_nuclear(
    problem: Problem, multipliers: Multipliers, W: Matrix, tolerance: float = 1e-4, iterations: int = 0
) -> Solution:
    """Return W, made feasible, as a solution with the relative gap (P − D)/P that λ proves.

    P is ‖W‖_* of the feasible W. D = bᵀλ / ‖M‖₂ with M = Σλ u zᵀ is a lower bound on ‖W‖_* of every feasible W, because
    bᵀλ ≤ ⟨M, W⟩ ≤ ‖M‖₂ ‖W‖_*. λ < 0 at an inequality counts as 0. If W cannot be made feasible, the solution's W and
    norm are None and its gap is infinite. Raises the same errors as `solve`.
    """
    check_solvable(problem, tolerance)
    multipliers = torch.where(problem.equal, multipliers, multipliers.clamp(min=0))
    size = float(torch.linalg.matrix_norm(problem.form(multipliers), 2))
    multipliers = multipliers / size if size > 0 else torch.zeros_like(multipliers)
    inequal = ~problem.equal
    least = float((problem.scores(W) - problem.margins)[inequal].min()) if inequal.any() else None
    feasible = make_feasible(problem, W)
    if feasible is None:
        answer = Solution("inaccurate", multipliers, torch.zeros_like(problem.equal), iterations)
        return replace(answer, gap=math.inf, least=least)
    norm = float(torch.linalg.matrix_norm(feasible, "nuc"))
    dual = max(0.0, float(problem.margins @ multipliers))
    gap = max(0.0, (norm - dual) / norm) if norm > 0 else 0.0
    unit, largest_margin = norm if norm > 0 else 1.0, problem.margins.abs().max().clamp(min=EPS)
    slack = problem.scores(feasible) - problem.margins
    # Optimality conditions: complementarity, equalities, and ⟨Σλ u zᵀ, W⟩ = ‖W‖_* (stationarity).
    kkt = [
        (multipliers * slack)[~problem.equal].abs() / unit,
        slack[problem.equal].abs() / largest_margin,
        ((norm - (problem.form(multipliers) * feasible).sum()) / unit).abs()[None],
    ]
    # No λ of an interior point is 0: λ is support if it exceeds rounding and, at inequalities, the slack.
    share = multipliers.abs() * len(multipliers) / multipliers.abs().sum().clamp(min=EPS)
    support = (share > EPS * len(multipliers)) & (problem.equal | (share > slack / largest_margin))
    status: Status = "optimal" if gap <= tolerance else "inaccurate"
    worst = float(torch.cat(kkt).max())
    return Solution(status, multipliers, support, iterations, W=feasible, norm=norm, gap=gap, least=least, kkt=worst)


def nuclear_rank(W: Matrix, relative: float = 1e-5) -> int:
    """Return the number of singular values above `relative` · σ₁; valid only if W's gap is well below `relative`."""
    values = torch.linalg.svdvals(W)
    # strict: the zero matrix has rank 0
    return int((values > relative * values[:1]).sum())


def row_basis(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d rank"]:
    """Return an orthonormal basis of the rows' span, exact to rounding, by QR and the SVD of the factor R."""
    upper = torch.linalg.qr(rows, mode="r").R
    _, values, basis = torch.linalg.svd(upper, full_matrices=False)
    spanned: Tensor = basis[values > EPS * max(rows.shape) * values[:1]]  # strict: zero rows span nothing
    return spanned.mT


def solve_working_set(
    problem: Problem, working: Int[Tensor, " working"], size: float, goal: float, limit: int
) -> tuple[Matrix, Multipliers, int]:
    """Solve a problem with only the constraints `working`; return W, λ (0 at all others) and the number of steps.

    `size` is the expected norm of W; `goal` and `limit` are those of `interior_point`.
    """
    u, z, b = problem.differences[working], problem.paired_queries[working], problem.margins[working]
    u_size, z_size, height = float(u.norm(dim=1).max()), float(z.norm(dim=1).max()), float(b.abs().max())
    length = u_size * z_size
    unit = Constraints((u / u_size).numpy(), (z / z_size).numpy(), (b / height).numpy(), problem.equal[working].numpy())
    W, loads, steps = interior_point(unit, size * length / height, goal, limit)
    multipliers = torch.zeros_like(problem.margins)
    multipliers[working] = torch.from_numpy(loads) / length
    return torch.from_numpy(W * height / length), multipliers, steps


def make_feasible(problem: Problem, W: Matrix) -> Matrix | None:
    """Scale W to meet inequalities, then add the least matrix that removes remaining violations; None if this fails."""
    # Scaling cannot remove violations of constraints with b ≤ 0 or of equalities with b ≠ 0.
    W = W * feasible_scale(problem, problem.scores(W))
    for _ in range(3):  # a second correction removes the rounding of a first, large one
        scores = problem.scores(W)
        if float(problem.violations(scores).max()) <= SLACK * float(problem.margins.abs().max()):
            return W
        correction = solve(replace(problem, margins=problem.margins - scores))
        if correction.W is None or correction.gap == math.inf:
            return None
        W = W + correction.W
    return None
