"""The problem, its solution and the certificate of it, and the checks of their arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer, Shaped
    from torch import Tensor

    Each = Float[Tensor, " constraints"]

MANY = 8
"""Constraints a query from which products are taken query by query."""


@dataclass(frozen=True)
class Problem:
    """Find the smallest W (d × d_query) with u_cᵀ W z_q(c) ≥ b_c, = b_c where `equal` (Tarzanagh et al. 2023, Eq. 2).

    u_c = x_α − x_t is a difference of two tokens, z_q(c) the query for which it counts. Everything is float64.
    """

    differences: Float[Tensor, "constraints d"]
    """u_c, one row a constraint."""
    queries: Float[Tensor, "queries d_query"]
    """z, one row a query."""
    query_of: Int[Tensor, " constraints"]
    """Which query a constraint belongs to."""
    margins: Float[Tensor, " constraints"]
    """b_c: 1, or a label margin, or the log-ratio of two weights."""
    equal: Bool[Tensor, " constraints"]
    """Whether the constraint is an equality (inside a set of tokens that are all kept)."""

    @property
    def paired_queries(self) -> Float[Tensor, "constraints d_query"]:
        """z of every constraint."""
        return self.queries[self.query_of]

    @cached_property
    def gram(self) -> Float[Tensor, "constraints constraints"]:
        """G = (UUᵀ)∘(ZZᵀ), the inner products of the constraints' u zᵀ; for small problems only."""
        u, z = self.differences, self.queries
        return (u @ u.mT) * (z @ z.mT)[self.query_of][:, self.query_of]

    @cached_property
    def counts(self) -> list[int] | None:
        """How many constraints each query has, where they stand in the order of the queries; None elsewhere."""
        if not bool((self.query_of.diff() >= 0).all()):
            return None
        counts: list[int] = self.query_of.bincount(minlength=len(self.queries)).tolist()
        return counts

    def scores(self, W: Float[Tensor, "d d_query"]) -> Float[Tensor, " constraints"]:
        """u_cᵀ W z_q(c), which is to be ≥ b_c."""
        return self.along(self.queries @ W.mT)

    def along(self, directions: Float[Tensor, "queries d"]) -> Float[Tensor, " constraints"]:
        """u_c · v_q(c): how far each constraint reaches along its query's direction."""
        if self.counts is None or len(self.query_of) < MANY * len(self.queries):
            return (self.differences * directions[self.query_of]).sum(-1)
        # A direction for every constraint would be as much memory as the differences.
        blocks = torch.split(self.differences, self.counts)
        return torch.cat([block @ direction for block, direction in zip(blocks, directions, strict=True)])

    def form(self, multipliers: Float[Tensor, " constraints"]) -> Float[Tensor, "d d_query"]:
        """W(λ) = Σ_c λ_c u_c z_q(c)ᵀ."""
        held = multipliers.nonzero().flatten()
        weighted = self.differences.new_zeros(len(self.queries), self.differences.shape[1])
        weighted.index_add_(0, self.query_of[held], multipliers[held, None] * self.differences[held])
        return weighted.mT @ self.queries


Status = Literal["optimal", "infeasible", "inaccurate"]


@dataclass(frozen=True)
class Solution:
    """An answer to a Problem, and how far it can be trusted; recomputed from `multipliers`, whoever found them."""

    status: Status
    """optimal: the gap is within the tolerance; infeasible: `multipliers` prove that no W exists; inaccurate: neither
    was reached within the iteration limit, and `gap` says how far off W may be."""
    multipliers: Float[Tensor, " constraints"]
    """λ, ≥ 0 at inequalities. Infeasible: Gordan's certificate, Σλ = 1 over the inequalities and Σλ u zᵀ ≈ 0."""
    W: Float[Tensor, "d d_query"] | None
    """The solution, scaled so that its least margin is exactly met; None where there is none."""
    norm: float | None
    """‖W‖_F, or the nuclear norm Σσ(W) for the nuclear problem; the max-margin is 1/norm."""
    gap: float | None
    """Relative duality gap (P − D)/P of the squared norm (Frobenius) or the norm (nuclear), ≥ 0; None if infeasible."""
    least: float | None
    """min over inequalities of u W z − b, before W is rescaled; 0 at the optimum."""
    kkt: float | None
    """Largest violation of the optimality conditions, relative: complementarity, equalities, stationarity."""
    residual: float | None
    """‖Σλ u zᵀ‖ of a normalised certificate (infeasible only): 0 proves it."""
    support: Bool[Tensor, " constraints"]
    """Which constraints carry W: λ > 0 (equalities: λ ≠ 0), beyond rounding."""
    iterations: int
    """Steps of the outer loop."""


LEAST, MOST = 1e-50, 1e50
"""Sizes between which λ ~ b/‖u zᵀ‖² and ‖W‖² ~ b²/‖u zᵀ‖² stay within float64."""


def real(name: str, given: object) -> Shaped[Tensor, "*shape"]:
    """A tensor of real numbers; raises UsageError for anything else."""
    if not isinstance(given, torch.Tensor):
        raise UsageError(
            f"The {name} are {type(given).__name__}, not a torch tensor.", "Wrap them: torch.as_tensor(…)."
        )
    if given.is_complex():
        raise UsageError(f"The {name} are complex numbers.", "Give real ones, for example their real parts.")
    return given


def indices(name: str, given: object) -> Integer[Tensor, "*shape"]:
    """A tensor of whole numbers; raises UsageError for anything else."""
    numbers = real(name, given)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise UsageError(f"The {name} have dtype {numbers.dtype}, but are indices.", "Give integers, as .long() does.")
    return numbers


def bounded(tolerance: float, limit: int = 1) -> None:
    """Raises UsageError unless the tolerance is positive and the limit at least 1."""
    if not tolerance > 0.0:
        raise UsageError(f"The tolerance is {tolerance}, but must be positive.", "Give a relative gap such as 1e-9.")
    if limit < 1:
        raise UsageError(f"The limit is {limit}, but one step is the least.", "Give a limit of at least 1.")


def ordinary(problem: Problem) -> None:
    """Raises UsageError where squares and products of a problem's numbers would leave float64.

    Each difference, query and margin that isn't zero must have its largest |number| in [1e-50, 1e50].
    """
    every = {
        "difference of two tokens": problem.differences,
        "query": problem.queries,
        "margin": problem.margins[:, None],
    }
    for name, rows in every.items():
        if not rows.numel():
            continue
        sizes = rows.abs().amax(-1)
        odd = sizes[(sizes != 0.0) & ~((sizes >= LEAST) & (sizes <= MOST))]
        if len(odd):
            raise UsageError(
                f"A {name} has size {float(odd[0]):.0e}, whose powers leave float64.",
                f"Scale the tokens, queries and margins to between {LEAST:.0e} and {MOST:.0e}.",
            )


PROOF = 1e-10
"""‖Σλ u zᵀ‖ / Σ|λ|‖u zᵀ‖ up to which λ proves that there is no W: any W would be 10¹⁰ times the constraints' scale."""
ROUNDING = 1e-10
"""Violation of a constraint, against |b| + ‖W‖‖u zᵀ‖, that float64 leaves where no scaling can remove it."""
NEGLIGIBLE = 1e-9
"""Share of the largest λ‖u zᵀ‖ below which a constraint carries nothing."""


def certified(problem: Problem, multipliers: Each, tolerance: float = 1e-9, iterations: int = 0) -> Solution:
    """The answer that λ proves: D = (Σλb)²/(2‖W(λ)‖²) ≤ ½‖W*‖² ≤ P, the value of W(λ) scaled until it is feasible.

    Negative λ at inequalities are set to 0, so that D is a true bound for any λ. Where equalities with b ≠ 0 forbid
    scaling, or where b ≤ 0, what rounding leaves of a violation r is charged to P as Σ|λ|r, its first-order price, and
    more than rounding is `inaccurate` with an infinite gap. The gap is (P − D)/P. λ itself is scaled so that
    Σλb = ‖W(λ)‖². Raises UsageError when λ has another length or isn't finite, for a tolerance ≤ 0, and for sizes
    outside [1e-50, 1e50], at which rounding to 0 or ∞ would pass for a proof.
    """
    bounded(tolerance)
    ordinary(problem)
    if multipliers.shape != problem.margins.shape or not multipliers.isfinite().all():
        raise UsageError("The multipliers are not one finite number a constraint.", "Give λ of this problem.")
    free, bounds = problem.equal, problem.margins
    multipliers = torch.where(free, multipliers.double(), multipliers.double().clamp(min=0.0))
    W = problem.form(multipliers)
    norm, value = float(W.norm()), float(multipliers @ bounds)
    reach = lengths(problem)
    weight = float(multipliers.abs() @ reach)
    if value > PROOF * float(multipliers.abs() @ bounds.abs()) and norm <= PROOF * weight:
        return refuted(multipliers, free, norm, iterations)
    factor = value / norm**2 if value > 0.0 and norm > 0.0 else 0.0
    return judged(problem, multipliers * factor, W * factor, reach, tolerance, iterations)


def lengths(problem: Problem) -> Each:
    """‖u zᵀ‖ of every constraint."""
    reach: Each = problem.differences.norm(dim=-1) * problem.paired_queries.norm(dim=-1)
    return reach


def refuted(multipliers: Each, free: Bool[Tensor, " constraints"], norm: float, iterations: int) -> Solution:
    """No W exists (Gordan): the multipliers with Σλ = 1 over the inequalities, or Σ|λ| = 1 where all are equalities."""
    total = float(multipliers[~free].sum()) or float(multipliers.abs().sum())
    return Solution(
        status="infeasible",
        multipliers=multipliers / total,
        W=None,
        norm=None,
        gap=None,
        least=None,
        kkt=None,
        residual=norm / total,
        support=carried(multipliers.abs()),
        iterations=iterations,
    )


def carried(loads: Each) -> Bool[Tensor, " constraints"]:
    """Which loads are more than rounding of the largest."""
    return loads > NEGLIGIBLE * loads.max()


def judged(
    problem: Problem, multipliers: Each, W: Float[Tensor, "d d_query"], reach: Each, tolerance: float, iterations: int
) -> Solution:
    """The Solution of λ at its dual optimum along the ray, W = W(λ)."""
    free, bounds = problem.equal, problem.margins
    norm, scores = float(W.norm()), problem.scores(W)
    price = multipliers.abs()
    factor = feasible_scale(scores, bounds, free)
    slack = violations(factor * scores, bounds, free)
    span = bounds.abs() + factor * norm * reach
    broken = bool((slack > ROUNDING * span).any())
    primal = math.inf if broken else 0.5 * (factor * norm) ** 2 + float(price @ slack)
    gap = max((primal - 0.5 * norm**2) / primal, 0.0) if 0.0 < primal < math.inf else primal
    status: Status = "optimal" if gap <= tolerance else "inaccurate"
    return Solution(
        status=status,
        multipliers=multipliers,
        W=W * factor,
        norm=norm * factor,
        gap=gap,
        least=None if free.all() else float((scores - bounds)[~free].min()),
        kkt=optimality(scores, bounds, free, price, norm, reach),
        residual=None,
        support=carried(price * reach),
        iterations=iterations,
    )


def feasible_scale(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> float:
    """The least t with t · score ≥ b wherever b > 0; 1 where there is none or an equality with b ≠ 0 fixes it."""
    positive = ~free & (bounds > 0.0)
    if not positive.any() or (bounds[free] != 0.0).any() or not (scores[positive] > 0.0).all():
        return 1.0
    return float((bounds[positive] / scores[positive]).max())


def violations(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> Each:
    """How far each constraint is broken: |score − b| at equalities, b − score where positive elsewhere."""
    short = bounds - scores
    return torch.where(free, short.abs(), short.clamp(min=0.0))


def optimality(
    scores: Each, bounds: Each, free: Bool[Tensor, " constraints"], price: Each, norm: float, reach: Each
) -> float:
    """The larger of violation against |b| + ‖W‖‖u zᵀ‖ and λ|score − b| against ‖W‖²; W = W(λ) by construction."""
    span = bounds.abs() + norm * reach
    broken = float((violations(scores, bounds, free) / span.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return max(broken, float((price * (scores - bounds).abs()).max()) / norm**2) if norm > 0.0 else broken
