"""Margin that a head reaches of the best one, and the cosine between its form and the max-margin form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens.attsvm.head import Chosen, FactoredForm, Posed, Scene, Softmax, choose, pose
from attnlens.attsvm.problem import Problem
from attnlens.attsvm.solvers.frobenius import solve
from attnlens.errors import UnposedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from attnlens.attsvm.solution import Solution

TOLERANCE = 1e-8
"""Relative duality gap of a head's SVM; its norm is then known to half of that."""
SPAN = 1e-6
"""Singular value, against the largest, below which differences of tokens span nothing: rounding of float32 inputs."""


@dataclass(frozen=True)
class Nearness:
    """A head beside the max-margin form that selects the same tokens; the scale of M matters to none of it."""

    chosen: Chosen
    """What was posed."""
    posed: Posed
    """As a problem."""
    solution: Solution
    """Its certified answer W_mm."""
    best: float
    """1/‖W_mm‖_F: no form of unit norm has a larger least margin."""
    norm: float
    """‖ΠM‖_F; Π projects onto span(U) ⊗ span(Z)."""
    margins: Float[Tensor, " queries"]
    """Least (logit_α − logit_t)/‖ΠM‖_F of each query."""
    svm_cosine: float
    """⟨M, W_mm⟩/(‖ΠM‖‖W_mm‖) in [−1, 1]."""

    @property
    def shares(self) -> Float[Tensor, " queries"]:
        """The margins over the best one; their minimum is the efficiency, ≤ 1, and 1 iff the head is the SVM."""
        return self.margins / self.best


def nearness(
    scenes: Sequence[Scene], form: FactoredForm, softmax: Softmax, most: int = 64, top_p: float | None = None
) -> tuple[Chosen, Nearness | str]:
    """What a head selects, and the head measured against the SVM of its own problem; or the reason why there is none.

    Where sets of several tokens are kept, M stands without its finite part W_fin, the least form with M's own score
    differences inside the sets: trained forms tend to W_fin + R · W_mm, and only what is left can meet the equalities.
    """
    chosen = choose(scenes, form, softmax, most, top_p)
    return chosen, nearness_of(scenes, form, chosen)


def nearness_of(scenes: Sequence[Scene], form: FactoredForm, chosen: Chosen) -> Nearness | str:
    """The same for what was chosen before, on the same scenes or on others with the same scores."""
    try:
        problem = pose(scenes, form, chosen)
    except UnposedError:
        return _unposed(chosen)
    return judged(chosen, problem, solve(problem.problem, tolerance=TOLERANCE))


def judged(chosen: Chosen, posed: Posed, solution: Solution) -> Nearness | str:
    """The head against the solution of its problem."""
    if solution.status == "infeasible":
        return "no form separates the selected tokens from the others with equal scores among them"
    if solution.status == "inaccurate" or solution.norm is None:
        return f"the SVM was not solved: relative duality gap {solution.gap:.0e}"
    problem, form = posed.problem, posed.form
    gaps, whole = score_gaps(problem, form), projected_norm(problem, form)
    squared = whole**2
    if bool(problem.equal.any()):
        finite = solve(_inside(problem, gaps), tolerance=TOLERANCE)
        if finite.W is None:
            return "no form has the head's own score differences among the selected tokens"
        gaps = gaps - problem.scores(finite.W)
        squared -= float(finite.W.square().sum())
    if not squared > (SPAN * whole) ** 2:  # strict: rounding leaves as much of a form that is its finite part
        return "the head's form tells no token from another here"
    free, size = ~problem.equal, squared**0.5
    least = gaps.new_full((len(problem.queries),), torch.inf)
    least = least.scatter_reduce(0, problem.query_of[free], gaps[free], "amin") / size
    cosine = float(solution.multipliers[free] @ gaps[free]) / (size * solution.norm)
    return Nearness(chosen, posed, solution, 1 / solution.norm, size, least, cosine)


def score_gaps(problem: Problem, form: FactoredForm) -> Float[Tensor, " constraints"]:
    """u_cᵀ M z_q(c): how far the head itself scores the kept token above the other."""
    return problem.along((problem.queries @ form.right) @ form.left.mT)


def projected_norm(problem: Problem, form: FactoredForm) -> float:
    """‖ΠM‖_F, Π the projection onto span(U) ⊗ span(Z); the queries' coordinates span their space already."""
    left = span(problem.differences).mT @ form.left
    return float((left @ form.right.mT).norm())


def span(rows: Float[Tensor, "rows d"]) -> Float[Tensor, "d rank"]:
    """An orthonormal basis of the rows' span, from their Gram matrix; directions below SPAN are left out."""
    numbers = rows.numpy()
    # numpy knows that a matrix times its own transpose is symmetric, which halves the work.
    values, vectors = torch.linalg.eigh(torch.from_numpy(numbers.T @ numbers))
    basis: Tensor = vectors[:, values > SPAN**2 * values[-1:]]  # strict: tokens that don't differ span nothing
    return basis


def _inside(problem: Problem, gaps: Float[Tensor, " constraints"]) -> Problem:
    """The equalities alone, to be met as the head meets them: u W z = u M z."""
    equal = problem.equal
    return Problem(problem.differences[equal], problem.queries, problem.query_of[equal], gaps[equal], equal[equal])


def _unposed(chosen: Chosen) -> str:
    if chosen.tied:
        return f"the largest scores are equal in all {chosen.tied} queries that may choose"
    return "no query may choose between different tokens"
