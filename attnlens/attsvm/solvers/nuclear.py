"""Max-margin W = K Qᵀ of least nuclear norm, with a certified duality gap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnlens.attsvm.solution import Solution
from attnlens.attsvm.solvers.frobenius import solve
from attnlens.attsvm.solvers.interior_point import Constraints, Found, interior_point
from attnlens.attsvm.solvers.newton_face import on_face, part
from attnlens.attsvm.validation import bounded, ordinary

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.attsvm.problem import Problem

EPS = torch.finfo(torch.float64).eps
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
        if answer.gap is not None and answer.gap <= POLISHED:
            answer = better(answer, polished(problem, answer, tolerance))
        broken = violated(problem, working, W)
        if answer.status == "optimal" or steps >= limit or (goal <= tolerance / 2 and not len(broken)):
            return answer
        working = torch.cat([working, broken])
        floor = max(tolerance / 2, NEAR if goal > NEAR else 0.0)
        goal = max(floor, goal / 10) if len(broken) else floor


def polished(problem: Problem, found: Solution, tolerance: float) -> Solution:
    """The answer on the face that `found` has shown; `found` where it shows none."""
    landed = None if found.W is None else on_face(problem, found.multipliers, found.W, found.support | problem.equal)
    return found if landed is None else certified_nuclear(problem, *landed, tolerance, found.iterations)


def better(one: Solution, other: Solution) -> Solution:
    """The one with the smaller gap."""
    gaps = [math.inf if found.gap is None else found.gap for found in (one, other)]
    return other if gaps[1] < gaps[0] else one


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
