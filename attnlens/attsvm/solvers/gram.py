"""Inner products of a problem's constraints, for any few of them, without the matrix of all."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray

    from attnlens.attsvm.problem import Problem

LARGE = 2**22
"""Numbers of an explicit form (32 MB) beyond which the Gram matrix is factored instead."""


class UnitConstraints:
    """The constraints a_c = u_c z_q(c)ᵀ of a problem, each divided by its length, so that ⟨a_c, a_c⟩ = 1 or a_c = 0.

    Only ⟨a_c, a_e⟩ = (u_c·u_e)(z_q(c)·z_q(e)) is ever needed, which is never d × d_query.
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
        if not grouped:
            self._sorted = self.u[self.order]

    @cached_property
    def blocks(self) -> list[tuple[int, slice]]:
        """Each query that has constraints, and where they stand in `order`."""
        present, starts = np.unique(self.query_of[self.order], return_index=True)
        ends = [*starts[1:], len(self.order)]
        return [(int(q), slice(int(s), int(e))) for q, s, e in zip(present, starts, ends, strict=True)]

    @property
    def hopeless(self) -> Int[ndarray, " first"]:
        """The first constraint that no W meets because its length is 0, each of which proves that there is none."""
        wanted = np.where(self.free, self.bounds != 0.0, self.bounds > 0.0)
        return np.flatnonzero(wanted & (self.lengths == 0.0))[:1]

    @property
    def ordered(self) -> Float[ndarray, "constraints d"]:
        """u, query after query."""
        return getattr(self, "_sorted", self.u)

    def gram(self, rows: Int[ndarray, " rows"], columns: Int[ndarray, " columns"]) -> Float[ndarray, "rows columns"]:
        """⟨a_c, a_e⟩ for c in rows and e in columns."""
        pairs = self.products[np.ix_(self.query_of[rows], self.query_of[columns])]
        pairs *= self.u[rows] @ self.u[columns].T
        return pairs

    def scores(self, rows: Int[ndarray, " rows"], loads: Float[ndarray, " rows"]) -> Float[ndarray, " constraints"]:
        """⟨a_c, Σ_r loads_r a_r⟩ for every constraint c."""
        shares = csr_array((loads, (self.query_of[rows], rows)), shape=(len(self.z), len(self.u)))
        seen = self.products @ (shares @ self.u)
        found = np.empty(len(self.u))
        for query, block in self.blocks:
            found[self.order[block]] = self.ordered[block] @ seen[query]
        return found

    def explicit(self, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows width"]:
        """a_c of these rows as vectors, in coordinates in which their inner products are unchanged."""
        u, z = compact(self.u[rows]), compact(self.z)[self.query_of[rows]]
        if u.size * z.shape[1] > LARGE:
            # Directions below √ε are lost, which costs accuracy that the certificate then tells.
            sizes, vectors = np.linalg.eigh(self.gram(rows, rows))
            kept = sizes > np.finfo(np.float64).eps * len(rows) * sizes[-1]
            factor: Float[ndarray, "rows kept"] = vectors[:, kept] * np.sqrt(sizes[kept])
            return factor
        return compact((u[:, :, None] * z[:, None, :]).reshape(len(rows), -1))


def compact(rows: Float[ndarray, "rows width"]) -> Float[ndarray, "rows least"]:
    """The rows in an orthonormal basis of their span (QR of the transpose), where that is narrower."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle: Float[ndarray, "least rows"] = np.linalg.qr(rows.T)[1]
    return triangle.T
