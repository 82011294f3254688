"""The nuclear-norm SVM: an interior point on the Gram matrices, refined on the face that it ends at.

min ‖W‖_* s.t. u_cᵀ W z_c ≥ b_c is min ½ tr X with W in the corner of X = [[P, W], [Wᵀ, Q]] ⪰ 0; its dual is
max bᵀλ s.t. S = [[I, −M], [−Mᵀ, I]] ⪰ 0, M = Σλ u zᵀ, λ ≥ 0. As the constraints are rank-one in u and z, the Newton
system is a sum of elementwise products of four Gram matrices, and never has the size of X squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve

from attnlens.maths.attsvm.problem import Problem, Solution, bounded, ordinary
from attnlens.maths.attsvm.solvers.frobenius import solve

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor

    Each = Float[ndarray, " constraints"]
    Block = Float[ndarray, "order order"]
    """Of order d + d_query."""
    BilinearForm = Float[ndarray, "d d_query"]
    Gram = Float[ndarray, "constraints constraints"]

EPS = float(np.finfo(np.float64).eps)
PATIENCE = 8
"""Steps without a better bound after which rounding has won."""
EQUALITY = 0.1
"""How far off an equality may be, as a share of the tolerance."""
INSIDE = 0.95
"""Share of the way to the border of the cone that a step may take."""


@dataclass(frozen=True)
class Constraints:
    """u_cᵀ W z_c ≥ b_c, = b_c where `equal`: one row a constraint, all of about unit size."""

    u: Float[ndarray, "constraints d"]
    z: Float[ndarray, "constraints d_query"]
    b: Each
    equal: Bool[ndarray, " constraints"]

    def form(self, multipliers: Each) -> BilinearForm:
        """M = Σ_c λ_c u_c z_cᵀ."""
        form: BilinearForm = (self.u * multipliers[:, None]).T @ self.z
        return form

    def block(self, multipliers: Each) -> Block:
        """[[0, M], [Mᵀ, 0]]."""
        rows, columns = self.u.shape[1], self.z.shape[1]
        block = np.zeros((rows + columns, rows + columns))
        block[:rows, rows:] = self.form(multipliers)
        block[rows:, :rows] = self.corner(block).T
        return block

    def scores(self, block: Block) -> Each:
        """2 u_cᵀ W z_c, W being the corner of a symmetric block matrix."""
        scores: Each = 2 * ((self.u @ self.corner(block)) * self.z).sum(1)
        return scores

    def corner(self, block: Block) -> BilinearForm:
        """W of [[P, W], [Wᵀ, Q]]."""
        return block[: self.u.shape[1], self.u.shape[1] :]

    def grams(self, block: Block) -> tuple[Gram, Gram, Gram]:
        """U P Uᵀ, U W Zᵀ, Z Q Zᵀ of [[P, W], [Wᵀ, Q]]."""
        rows = self.u.shape[1]
        P, Q = block[:rows, :rows], block[rows:, rows:]
        return self.u @ P @ self.u.T, self.u @ self.corner(block) @ self.z.T, self.z @ Q @ self.z.T


@dataclass(frozen=True)
class Point:
    """X ≻ 0 and s > 0 (primal), λ > 0 and S ≻ 0 (dual, exactly feasible); s is 0 at equalities, where λ is free.

    A direction is a Point too: by how much a Newton step changes each of them.
    """

    X: Block
    s: Each
    multipliers: Each
    S: Block


@dataclass(frozen=True)
class Found:
    """Where the method stopped."""

    W: BilinearForm
    multipliers: Each
    iterations: int


def interior_point(constraints: Constraints, size: float, tolerance: float, limit: int) -> Found:
    """W and λ ≥ 0 whose relative gap is ≤ tolerance, or the best there is after `limit` steps or at rounding.

    `size` is the expected size of W. Mehrotra's predictor-corrector with the HKM direction (Helmberg et al. 1996).
    """
    point = start(constraints, size)
    found, upper, lower = Found(constraints.corner(point.X), point.multipliers, 0), np.inf, 0.0
    for step in range(1, limit + 1):
        try:
            newton = Newton(constraints, point)
            affine = newton.direction(0.0, None)
            # Mehrotra's centring: the further the affine step gets, the less centring is needed
            left = mean_product(constraints, newton.moved(affine, 1.0)) / newton.mean
            centring = min(1.0, max(1e-6, left) ** 3) * newton.mean
            point = newton.moved(newton.direction(centring, affine), INSIDE)
        except np.linalg.LinAlgError:  # the border is reached within rounding: the best so far stands
            break
        P, D = bounds(constraints, point, tolerance)
        if upper > P:
            upper, found = P, replace(found, W=constraints.corner(point.X), iterations=step)
        if lower < D:
            lower, found = D, replace(found, multipliers=point.multipliers, iterations=step)
        if (np.isfinite(upper) and upper - lower <= tolerance * upper) or step > found.iterations + PATIENCE:
            break
    return found


def start(constraints: Constraints, size: float) -> Point:
    """A point well inside: X = size · I, λ equal and so small that ‖M‖ = ½."""
    inequal = ~constraints.equal
    flat = inequal.astype(float)
    # a Σ u zᵀ of nothing (equalities only) has norm 0, and λ = 0 is then inside
    flat *= 0.5 / max(float(np.linalg.norm(constraints.form(flat), 2)), EPS)
    order = constraints.u.shape[1] + constraints.z.shape[1]
    return Point(size * np.eye(order), size * inequal, flat, np.eye(order) - constraints.block(flat))


def bounds(constraints: Constraints, point: Point, tolerance: float) -> tuple[float, float]:
    """P = ‖W‖_* once W is scaled to its least margin, and D = bᵀλ / ‖M‖; P is infinite where W is not yet feasible."""
    scores, needed = constraints.scores(point.X) / 2, ~constraints.equal & (constraints.b > 0)
    # what is left of an equality is mended later, at a price that must not show in the gap
    held = np.abs(scores - constraints.b)[constraints.equal].max(initial=0.0) <= EQUALITY * tolerance
    P = float("inf")
    if held and (scores[needed] > 0).all():
        factor = (constraints.b[needed] / scores[needed]).max(initial=0.0) if needed.any() else 1.0
        P = float(factor * np.linalg.norm(constraints.corner(point.X), "nuc"))
    size = float(np.linalg.norm(constraints.form(point.multipliers), 2))
    return P, float(constraints.b @ point.multipliers) / max(size, EPS)


def mean_product(constraints: Constraints, point: Point) -> float:
    """μ = (⟨X, S⟩ + sᵀλ) / how many products these are; 0 at the optimum."""
    count = len(point.X) + int((~constraints.equal).sum())
    return float(((point.X * point.S).sum() + point.s @ point.multipliers) / count)


class Newton:
    """The Newton system of one point, factored."""

    def __init__(self, constraints: Constraints, point: Point) -> None:
        self.constraints, self.point = constraints, point
        # L⁻¹ of X = L Lᵀ and of S: they tell the way to the border, and S⁻¹ = L⁻ᵀ L⁻¹
        self.whiteners = tuple(np.linalg.inv(np.linalg.cholesky(matrix)) for matrix in (point.X, point.S))
        self.inverse = self.whiteners[1].T @ self.whiteners[1]
        self.mean = mean_product(constraints, point)
        # 1/λ and s/λ at inequalities, 0 at equalities
        self.reciprocal = np.where(constraints.equal, 0.0, 1 / np.where(constraints.equal, 1.0, point.multipliers))
        self.ratio = point.s * self.reciprocal
        (uPu, uWz, zQz), (uRu, uTz, zVz) = constraints.grams(point.X), constraints.grams(self.inverse)
        crossed = uWz * uTz.T
        system = uPu * zVz + zQz * uRu + crossed + crossed.T
        # equalities that repeat each other leave the system singular; their λ is then any of several
        system[np.diag_indices_from(system)] += self.ratio + EPS * len(system) * system.diagonal().max()
        self.system = cho_factor(system, lower=True, overwrite_a=True, check_finite=False)

    def direction(self, mean: float, affine: Point | None) -> Point:
        """Towards X S = mean · I and s λ = mean, corrected for the affine direction's second order."""
        constraints, point, inverse = self.constraints, self.point, self.inverse
        fixed, slack = mean * inverse, mean * self.reciprocal
        if affine is not None:
            fixed = fixed - symmetric(affine.X @ affine.S @ inverse)
            slack = slack - affine.s * affine.multipliers * self.reciprocal
        missing = 2 * constraints.b - constraints.scores(fixed) + slack
        change = cho_solve(self.system, missing, check_finite=False)
        block = constraints.block(change)
        moved = symmetric(point.X @ block @ inverse) + fixed - point.X
        return Point(moved, slack - point.s - self.ratio * change, change, -block)

    def moved(self, direction: Point, share: float) -> Point:
        """The point after the longest step inside the cones, at most 1, times `share` where a border is met."""
        point = self.point
        primal = min(to_border(self.whiteners[0], direction.X, share), to_zero(point.s, direction.s, share))
        dual = to_border(self.whiteners[1], direction.S, share)
        inequal = ~self.constraints.equal
        dual = min(dual, to_zero(point.multipliers[inequal], direction.multipliers[inequal], share))
        multipliers = point.multipliers + dual * direction.multipliers
        S = np.eye(len(point.S)) - self.constraints.block(multipliers)
        return Point(point.X + primal * direction.X, point.s + primal * direction.s, multipliers, S)


def symmetric(matrix: Block) -> Block:
    """(A + Aᵀ) / 2."""
    half: Block = (matrix + matrix.T) / 2
    return half


def to_border(whitener: Block, change: Block, share: float) -> float:
    """Longest step ≤ 1 that keeps L Lᵀ + step · change positive definite, times `share` where it would not be."""
    least = np.linalg.eigvalsh(symmetric(whitener @ change @ whitener.T))[0]
    return 1.0 if least >= -share else float(-share / least)


def to_zero(values: Each, change: Each, share: float) -> float:
    """Longest step ≤ 1 that keeps values + step · change positive, times `share` where they would not be."""
    falling = change < 0
    return float(min(1.0, share * (values[falling] / -change[falling]).min(initial=np.inf)))


NEWTON_STEPS = 6
"""It converges quadratically once it is near: 1e-4, 1e-8, 1e-16; the first few steps may be needed to get there."""
ARRIVED = 1e-14
"""Relative length of a step that ends it."""
MOST_UNKNOWNS = 1000
"""Size up to which the system is solved: dense, about a second a step."""


def on_face(
    problem: Problem,
    multipliers: Float[Tensor, " constraints"],
    W: Float[Tensor, "d d_query"],
    tight: Bool[Tensor, " constraints"],
) -> tuple[Float[Tensor, " constraints"], Float[Tensor, "d d_query"]] | None:
    """(λ, W) near the given ones, with W = A Bᵀ of W's rank and u W z = b where `tight`, λ = 0 elsewhere.

    Solves the stationarity of ½‖A‖² + ½‖B‖², whose least value is ‖A Bᵀ‖_*: A = M B, B = Mᵀ A, M = Σλ u zᵀ. None where
    the system would be too large. Nothing says that the answer is better: certify it.
    """
    left, values, right = torch.linalg.svd(W, full_matrices=False)
    # Strict complementarity tells a zero of W from a small singular value: either σ(W) = 0 or σ(M) = 1.
    border = 1 - torch.linalg.svdvals(problem.form(multipliers))
    rank = int((values > border * values[:1]).sum())
    rows = tight.nonzero().flatten()
    if rank * sum(W.shape) + len(rows) > MOST_UNKNOWNS:
        return None
    A, B = left[:, :rank] * values[:rank].sqrt(), right[:rank].mT * values[:rank].sqrt()
    face, active = part(problem, rows), multipliers[rows]
    for _ in range(NEWTON_STEPS):
        before = A @ B.mT
        A, B, active = newton_step(face, A, B, active)
        if (A @ B.mT - before).norm() <= ARRIVED * before.norm():
            break
    return torch.zeros_like(multipliers).index_add(0, rows, active), A @ B.mT


def newton_step(
    face: Problem,
    A: Float[Tensor, "d rank"],
    B: Float[Tensor, "d_query rank"],
    multipliers: Float[Tensor, " constraints"],
) -> tuple[Float[Tensor, "d rank"], Float[Tensor, "d_query rank"], Float[Tensor, " constraints"]]:
    """One step towards A = M B, B = Mᵀ A, u A Bᵀ z = b; the shortest, as A and B may be turned together."""
    u, z, M, eye = face.differences, face.paired_queries, face.form(multipliers), torch.eye(A.shape[1]).double()
    by_a = (u[:, :, None] * (z @ B)[:, None, :]).flatten(1)
    by_b = (z[:, :, None] * (u @ A)[:, None, :]).flatten(1)
    rows = [
        torch.cat([torch.eye(A.numel()), -torch.kron(M, eye), -by_a.mT], 1),
        torch.cat([-torch.kron(M.mT.contiguous(), eye), torch.eye(B.numel()), -by_b.mT], 1),
        torch.cat([by_a, by_b, torch.zeros(len(u), len(u))], 1),
    ]
    missing = torch.cat([(M @ B - A).flatten(), (M.mT @ A - B).flatten(), face.margins - face.scores(A @ B.mT)])
    step = torch.linalg.lstsq(torch.cat(rows), missing[:, None], driver="gelsd").solution[:, 0]
    a, b, change = step.split([A.numel(), B.numel(), len(u)])
    return A + a.view_as(A), B + b.view_as(B), multipliers + change


def part(problem: Problem, chosen: Int[Tensor, " chosen"]) -> Problem:
    """The problem with these constraints only."""
    return Problem(
        differences=problem.differences[chosen],
        queries=problem.queries,
        query_of=problem.query_of[chosen],
        margins=problem.margins[chosen],
        equal=problem.equal[chosen],
    )


SMALL = 256
"""Constraints up to which all are worked on from the start."""
FIRST_GAP = 1e-2
"""Relative gap to which the first working set is solved: it will change anyway."""
NEAR = 1e-8
"""Relative gap that an interior point reaches without trouble; what is asked beyond is left to Newton's method."""
POLISHED = 1e-6
"""Relative gap below which rank and support show, so that Newton's method can take over."""
SLACK = 1e-12
"""How far below its margin an inequality may end by rounding, relative to the largest margin."""


def solve_nuclear(problem: Problem, tolerance: float = 1e-4, limit: int = 500) -> Solution:
    """argmin ‖W‖_* s.t. u_cᵀ W z_c ≥ b_c, = b_c where `equal` (Tarzanagh et al. 2023, Eq. Att-SVM⋆).

    An interior-point method on a working set of constraints, which grows by the violated ones, in the row spaces of u
    and z (W never leaves them). `tolerance` is the relative gap (P − D)/P that suffices: by default 1e-4, so that the
    norm is known to 1e-4 and W less well; it is exact, to rounding, only when asked, say by 1e-10. `gap` in the answer
    is what was reached. `limit` bounds the interior-point steps in all.
    An infeasible problem returns Gordan's certificate, which knows no norm. Raises what `solve` raises.
    """
    bounded(tolerance, limit)
    frobenius = solve(problem)
    if frobenius.status == "infeasible":
        return frobenius
    if not (problem.margins[problem.equal] != 0).any() and not (problem.margins > 0).any():
        return certified_nuclear(problem, frobenius.multipliers, torch.zeros_like(problem.form(problem.margins)))
    left, right = row_basis(problem.differences), row_basis(problem.queries)
    small = replace(problem, differences=problem.differences @ left, queries=problem.queries @ right)
    answer = solve_reduced(small, frobenius, tolerance, limit)
    if answer.W is None:
        return answer
    return certified_nuclear(problem, answer.multipliers, left @ answer.W @ right.mT, tolerance, answer.iterations)


def solve_reduced(problem: Problem, frobenius: Solution, tolerance: float, limit: int) -> Solution:
    """The same for a problem in the row spaces of u and z: rounds of interior point, polish, more constraints."""
    working, steps = first_working_set(problem, frobenius), 0
    goal = max(tolerance / 2, NEAR if len(working) == len(problem.margins) else FIRST_GAP)
    while True:
        found, multipliers = solve_working_set(problem, working, frobenius.norm or 1.0, goal, limit - steps)
        steps += found.iterations
        W = torch.from_numpy(found.W)
        answer = certified_nuclear(problem, multipliers, W, tolerance, steps)
        if answer.W is not None and answer.gap is not None and answer.gap <= POLISHED:
            landed = on_face(problem, answer.multipliers, answer.W, answer.support | problem.equal)
            polished = answer if landed is None else certified_nuclear(problem, *landed, tolerance, steps)
            answer = polished if polished.gap is not None and polished.gap < answer.gap else answer
        broken = violated(problem, working, W)
        if answer.status == "optimal" or steps >= limit or (goal <= tolerance / 2 and not len(broken)):
            return answer
        working = torch.cat([working, broken])
        floor = max(tolerance / 2, NEAR if goal > NEAR else 0.0)
        goal = max(floor, goal / 10) if len(broken) else floor


def certified_nuclear(
    problem: Problem,
    multipliers: Float[Tensor, " constraints"],
    W: Float[Tensor, "d d_query"],
    tolerance: float = 1e-4,
    iterations: int = 0,
) -> Solution:
    """What λ and W prove, whoever found them: P = ‖W‖_*, W scaled to its least margin, and D = bᵀλ / ‖Σλ u zᵀ‖₂ ≤ P.

    D bounds every feasible W: bᵀλ ≤ ⟨Σλ u zᵀ, W⟩ ≤ ‖Σλ u zᵀ‖₂ ‖W‖_*. λ < 0 at an inequality counts as 0; where no
    multiple of W is feasible, W and the norm are None and the gap is infinite. Raises UsageError for a tolerance ≤ 0
    and sizes outside [1e-50, 1e50].
    """
    bounded(tolerance)
    ordinary(problem)
    multipliers = torch.where(problem.equal, multipliers, multipliers.clamp(min=0))
    size = float(torch.linalg.matrix_norm(problem.form(multipliers), 2))
    multipliers = multipliers / size if size > 0 else torch.zeros_like(multipliers)
    feasible, least = scaled(problem, W)
    if feasible is None:
        nothing = torch.zeros_like(problem.equal)
        return Solution("inaccurate", multipliers, None, None, math.inf, least, None, None, nothing, iterations)
    norm = float(torch.linalg.matrix_norm(feasible, "nuc"))
    dual = max(0.0, float(problem.margins @ multipliers))
    gap = max(0.0, (norm - dual) / norm) if norm > 0 else 0.0
    return Solution(
        status="optimal" if gap <= tolerance else "inaccurate",
        multipliers=multipliers,
        W=feasible,
        norm=norm,
        gap=gap,
        least=least,
        kkt=violation(problem, multipliers, feasible, norm),
        residual=None,
        support=carriers(problem, multipliers, feasible),
        iterations=iterations,
    )


def nuclear_rank(W: Float[Tensor, "d d_query"], relative: float = 1e-5) -> int:
    """Number of σ(W) > relative · σ₁, in [0, min(d, d_query)]; meaningful where the gap is well below `relative`."""
    values = torch.linalg.svdvals(W)
    # strict: the zero matrix has rank 0
    return int((values > relative * values[:1]).sum())


def row_basis(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d rank"]:
    """An orthonormal basis of what the rows span, to rounding: QR, then the SVD of its small factor."""
    upper = torch.linalg.qr(rows, mode="r").R
    _, values, basis = torch.linalg.svd(upper, full_matrices=False)
    spanned: Tensor = basis[values > EPS * max(rows.shape) * values[:1]]
    return spanned.mT


def first_working_set(problem: Problem, frobenius: Solution) -> Int[Tensor, " working"]:
    """All constraints of a small problem; else the equalities and those that carry the Frobenius solution."""
    if len(problem.margins) <= SMALL:
        return torch.arange(len(problem.margins))
    likely = (problem.equal | frobenius.support).nonzero().flatten()
    return likely if len(likely) else torch.arange(SMALL)


def solve_working_set(
    problem: Problem, working: Int[Tensor, " working"], size: float, goal: float, limit: int
) -> tuple[Found, Float[Tensor, " constraints"]]:
    """W and λ (0 outside the working set), found at unit lengths of u, z and b; `size` is the expected one of W."""
    u, z, b = problem.differences[working], problem.paired_queries[working], problem.margins[working]
    length, height = float(u.norm(dim=1).max() * z.norm(dim=1).max()), float(b.abs().max())
    unit = Constraints(
        (u / u.norm(dim=1).max()).numpy(),
        (z / z.norm(dim=1).max()).numpy(),
        (b / height).numpy(),
        problem.equal[working].numpy(),
    )
    found = interior_point(unit, size * length / height, goal, limit)
    multipliers = torch.zeros_like(problem.margins)
    multipliers[working] = torch.from_numpy(found.multipliers) / length
    return replace(found, W=found.W * height / length), multipliers


def violated(
    problem: Problem, working: Int[Tensor, " working"], W: Float[Tensor, "d d_query"]
) -> Int[Tensor, " broken"]:
    """The constraints outside the working set that W breaks most: at most as many as are in it, plus one."""
    slack = problem.scores(W) - problem.margins
    slack[working] = math.inf
    least = slack.topk(min(len(working) + 1, len(slack)), largest=False)
    return least.indices[least.values < 0]


def scaled(problem: Problem, W: Float[Tensor, "d d_query"]) -> tuple[Float[Tensor, "d d_query"] | None, float | None]:
    """W on the equalities and scaled to its least margin, and that margin minus b; None where there is no such."""
    inequal = ~problem.equal
    anchor = on_equalities(problem, torch.zeros_like(W))
    free = on_equalities(problem, W) - anchor
    needed = (problem.margins - problem.scores(anchor))[inequal]
    gained = problem.scores(free)[inequal]
    if len(needed) == 0:
        return anchor + free, None
    least, short = float((gained - needed).min()), needed > 0
    if (gained[short] <= 0).any():
        return None, least
    factor = (needed[short] / gained[short]).max() if short.any() else 1.0
    if (factor * gained < needed - SLACK * problem.margins.abs().max()).any():
        return None, least
    return anchor + factor * free, least


def on_equalities(problem: Problem, W: Float[Tensor, "d d_query"]) -> Float[Tensor, "d d_query"]:
    """The nearest W (Frobenius) that meets the equalities."""
    if not problem.equal.any():
        return W
    equal = part(problem, problem.equal.nonzero().flatten())
    for _ in range(2):  # the second time mends what the Gram matrix's condition spoilt
        missing = equal.margins - equal.scores(W)
        W = W + equal.form(torch.linalg.lstsq(equal.gram, missing[:, None], driver="gelsd").solution[:, 0])
    return W


def violation(
    problem: Problem, multipliers: Float[Tensor, " constraints"], W: Float[Tensor, "d d_query"], norm: float
) -> float:
    """Largest of: λ(uWz − b)/‖W‖_*, |uWz − b|/max b at equalities, 1 − ⟨Σλ u zᵀ, W⟩/‖W‖_* (stationarity)."""
    slack, inequal = problem.scores(W) - problem.margins, ~problem.equal
    unit = norm if norm > 0 else 1.0
    parts = [(multipliers * slack)[inequal].abs() / unit]
    parts.append(slack[problem.equal].abs() / problem.margins.abs().max().clamp(min=EPS))
    parts.append(((norm - (problem.form(multipliers) * W).sum()) / unit).abs()[None])
    return float(torch.cat(parts).max())


def carriers(
    problem: Problem, multipliers: Float[Tensor, " constraints"], W: Float[Tensor, "d d_query"]
) -> Bool[Tensor, " constraints"]:
    """λ ≠ 0 beyond rounding, and at inequalities beyond the slack: an interior point leaves a trace of λ everywhere."""
    count = len(multipliers)
    share = multipliers.abs() * count / multipliers.abs().sum().clamp(min=EPS)
    slack = (problem.scores(W) - problem.margins) / problem.margins.abs().max().clamp(min=EPS)
    return (share > EPS * count) & (problem.equal | (share > slack))
