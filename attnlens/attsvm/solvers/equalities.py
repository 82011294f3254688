"""Eliminates equalities from a problem: the Gram matrix of what is left of the inequalities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotrs, dpstrf, dtrtrs

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy import ndarray

    from attnlens.attsvm.solvers.gram import UnitConstraints

INSIDE = 1e-10
"""Squared share of an inequality's length outside the equalities' span below which it may contradict them."""
MISSED = 1e-9
"""What equalities that repeat others may miss of the largest b."""
REFINEMENTS = 2
"""Times that λ of the equalities is mended by what they still miss."""


class Eliminated:
    """The inequalities a_c of a problem, projected off the span of its equalities, in place of its UnitConstraints.

    G_EE = LLᵀ is factored once, pivoted, so that equalities which repeat others drop out. Inequalities then have the
    inner products G_cd − (L⁻¹G_Ec)ᵀ(L⁻¹G_Ed) and the bounds b_c − (L⁻¹G_Ec)ᵀL⁻¹b_E, and no equality is left.
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
        # Equalities are met by every λ of the others, so that none of them is ever violated.
        self.bounds = np.where(constraints.free, -np.inf, constraints.bounds - self.fixed_scores)
        self.known: Int[ndarray, " constraints"] = np.full(len(self.free), -1)
        self.count = 0
        self.columns = np.empty((len(self.free) - len(equal), rank))

    @property
    def fixed_scores(self) -> Float[ndarray, " constraints"]:
        """What the shortest W that meets the equalities scores."""
        return self.whole.scores(self.kept, self.fixed)

    def solved(self, right: Float[ndarray, "rank ..."], transposed: bool = False) -> Float[ndarray, "rank ..."]:
        """L⁻¹ or L⁻ᵀ times the right-hand side."""
        if not len(self.kept):
            return right
        answer: Float[ndarray, "rank ..."] = dtrtrs(self.factor, right, lower=1, trans=int(transposed))[0]
        return answer.reshape(right.shape)

    def inner(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows rank"]:
        """(L⁻¹G_Ec)ᵀ for c in rows, each computed once."""
        new = rows[self.known[rows] < 0]
        if len(new):
            self.known[new] = self.count + np.arange(len(new))
            self.columns[self.known[new]] = self.solved(self.whole.gram(self.kept, new)).T
            self.count += len(new)
        found: Float[ndarray, "rows rank"] = self.columns[self.known[rows]]
        return found

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """⟨a_c, a_d⟩ outside the equalities' span, for c in rows and d in columns."""
        outside: Float[ndarray, "rows columns"] = self.whole.gram(rows, columns)
        outside -= self.inner(rows) @ self.inner(columns).T
        return outside

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """⟨a_c, Σ_r loads_r a_r⟩ outside the equalities' span, for every constraint c."""
        share = self.solved(self.inner(rows).T @ loads, transposed=True)
        return self.whole.scores(np.append(rows, self.kept), np.append(loads, -share))

    def explicit(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """Vectors with these inner products; directions below √ε are lost, which the certificate then tells."""
        sizes, vectors = np.linalg.eigh(self.gram(rows, rows))
        kept = sizes > np.finfo(np.float64).eps * len(rows)
        factor: Float[ndarray, "rows width"] = vectors[:, kept] * np.sqrt(sizes[kept])
        return factor

    def completed(
        self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"], met: bool = True
    ) -> tuple[Int[ndarray, " all"], Float[ndarray, " all"]]:
        """These λ with those of the equalities under which every equality has its b, or 0 where `met` is false."""
        every, wanted = np.append(rows, self.kept), self.whole.bounds[self.kept] if met else np.zeros(len(self.kept))
        multipliers = np.append(loads, np.zeros(len(self.kept)))
        for _ in range(1 + REFINEMENTS):
            missing = wanted - self.whole.scores(every, multipliers)[self.kept]
            multipliers[len(rows) :] += self.solved(self.solved(missing), transposed=True)
        return every, multipliers

    def sharpened(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " rows"]:
        """λ mended by what its own inequalities still miss, with the equalities met; as it was, if a sign turns."""
        held = np.flatnonzero(loads)
        if not len(held):
            return loads
        factor, failed = dpotrf(self.gram(rows[held], rows[held]), lower=1)
        better = loads.copy()
        for _ in range(0 if failed else REFINEMENTS):
            scores = self.whole.scores(*self.completed(rows[held], better[held]))
            better[held] += dpotrs(factor, (self.whole.bounds - scores)[rows[held]], lower=1)[0]
        return better if (better >= 0.0).all() else loads

    def contradicted(self, rows: Int[ndarray, " rows"]) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """The row that most likely contradicts the equalities alone, and the sign of what they lack; none elsewhere."""
        left = 1.0 - (self.inner(rows) ** 2).sum(-1)
        inside = rows[(left < INSIDE) & (self.bounds[rows] > 0.0)]
        inside = inside[np.argsort(-self.bounds[inside])[:1]]
        return inside, np.ones(len(inside))

    @property
    def inconsistent(self) -> tuple[Int[ndarray, " one"], Float[ndarray, " one"]]:
        """The repeated equality that the others contradict most, and the sign of what it lacks; none elsewhere."""
        missed = (self.whole.bounds - self.fixed_scores)[self.repeated]
        beyond = np.abs(missed) > MISSED * np.abs(self.whole.bounds[self.whole.free]).max()
        worst = np.argsort(-np.abs(missed))[:1] if beyond.any() else np.flatnonzero(beyond)
        return self.repeated[worst], np.sign(missed[worst])
