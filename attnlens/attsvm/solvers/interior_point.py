"""Nuclear-norm Att-SVM by a primal-dual interior-point method on the Gram matrices.

min ‖W‖_* s.t. u_cᵀ W z_c ≥ b_c is min ½ tr X with W in the corner of X = [[P, W], [Wᵀ, Q]] ⪰ 0; its dual is
max bᵀλ s.t. S = [[I, −M], [−Mᵀ, I]] ⪰ 0, M = Σλ u zᵀ, λ ≥ 0. As the constraints are rank-one in u and z, the Newton
system is a sum of elementwise products of four Gram matrices, and never has the size of X squared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import cho_factor, cho_solve

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from numpy import ndarray

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
    """X ≻ 0 and s > 0 (primal), λ > 0 and S ≻ 0 (dual, exactly feasible); s is 0 at equalities, where λ is free."""

    X: Block
    s: Each
    multipliers: Each
    S: Block


@dataclass(frozen=True)
class Direction:
    """By how much a Newton step changes the Point."""

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
            point = stepped(constraints, point)
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


def stepped(constraints: Constraints, point: Point) -> Point:
    """The next point: the affine direction says how far to centre, and corrects for the second order."""
    newton = Newton(constraints, point)
    affine = newton.direction(0.0, None)
    near = newton.moved(affine, 1.0)
    # Mehrotra's centring: the further the affine step gets, the less centring is needed
    share = min(1.0, max(1e-6, mean_product(constraints, near) / newton.mean) ** 3)
    return newton.moved(newton.direction(share * newton.mean, affine), INSIDE)


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

    def direction(self, mean: float, affine: Direction | None) -> Direction:
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
        return Direction(moved, slack - point.s - self.ratio * change, change, -block)

    def moved(self, direction: Direction, share: float) -> Point:
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
