"""A max-margin problem: linear constraints on one bilinear form W."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

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
