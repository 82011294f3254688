"""Fit of a term for each key and one for each distance under masks of intervals, in O(tokens) a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

RESIDUAL = 1e-10
"""Where conjugate gradients stop, relative to the right side. What is explained is then short of the whole by less than
RESIDUAL² times the condition number of the scaled normal equations: by rounding, for any number that float64 allows."""
STEPS = 1000
"""Steps of conjugate gradients at most; real masks take 6 to 20."""


@dataclass(frozen=True)
class IntervalMask:
    """A mask in which each query sees the keys from..to−1, and each key is seen by queries that follow each other.

    Causal masks are such, windows, documents behind each other, prefixes, and all pairs. Sums over what a query sees
    are then differences of running sums, and so is the product of the normal equations of b_j + c_{j−i} with a vector.
    """

    keys: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
    """First key of each query, and one behind its last; the same number twice where it sees none."""
    queries: tuple[Int[Tensor, " m"], Int[Tensor, " m"]]
    """First query of each key, and one behind its last."""

    def explained(
        self, by_key: Float[Tensor, " m"], by_distance: Float[Tensor, " distances"] | None
    ) -> tuple[float, float]:
        """The sums of squares that b explains, and c beyond b, of row-centred scores with these sums over each key and
        distance j − i (from 1 − n on; None: cross-attention has none). NaN where no solution is reached.
        """
        nothing = by_key.new_zeros(len(self.keys[0]) + len(by_key) - 1)
        pairs = torch.cat((self._counts(self.queries), self._spread(torch.ones_like(self._of_queries), self.keys)))
        scale = torch.where(pairs > 0, pairs.clamp(min=1).rsqrt(), 0.0)
        size = len(by_key)
        of_keys = _energy(lambda b: self._normal(b, nothing)[:size], by_key, scale[:size])
        if by_distance is None:
            return of_keys, math.nan
        both = _energy(lambda x: self._normal(x[:size], x[size:]), torch.cat((by_key, by_distance)), scale)
        return of_keys, both - of_keys

    @property
    def _of_queries(self) -> Float[Tensor, " n"]:
        return self._counts(self.keys)

    def _counts(self, ends: tuple[Tensor, Tensor]) -> Float[Tensor, " size"]:
        return (ends[1] - ends[0]).double()

    def _distances(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The places j − i + n − 1 of the distances that each query and each key has: first, one behind the last."""
        n = len(self.keys[0])
        query, key = (torch.arange(len(ends[0]), device=ends[0].device) for ends in (self.keys, self.queries))
        of_queries = self.keys[0] - query + n - 1, self.keys[1] - query + n - 1
        return of_queries, (key - self.queries[1] + n, key - self.queries[0] + n)

    def _normal(self, b: Float[Tensor, " m"], c: Float[Tensor, " distances"]) -> Float[Tensor, " both"]:
        """The normal equations of b and c times (b, c), row constants eliminated."""
        of_queries, of_keys = self._distances()
        seen = (_between(b, self.keys) + _between(c, of_queries)) / self._of_queries.clamp(min=1)
        keys = self._counts(self.queries) * b + _between(c, of_keys) - _between(seen, self.queries)
        pairs = self._spread(torch.ones_like(seen), self.keys)
        return torch.cat((keys, pairs * c + self._spread(b, self.queries) - self._spread(seen, self.keys)))

    def _spread(self, values: Float[Tensor, " size"], ends: tuple[Tensor, Tensor]) -> Float[Tensor, " distances"]:
        """Σ over the pairs of each distance of the value of their query (`ends` are keys') or of their key."""
        first, behind = self._distances()[0 if ends is self.keys else 1]
        change = values.new_zeros(len(self.keys[0]) + len(self.queries[0]))
        change.index_add_(0, first, values).index_add_(0, behind, -values)
        return change.cumsum(0)[:-1]


def interval_mask(allowed: Bool[Tensor, "n m"]) -> IntervalMask | None:
    """The intervals of a mask; None where the keys that a query sees, or the queries that see a key, leave a gap."""
    sides = []
    for axis in (1, 0):
        count, first = allowed.sum(axis), allowed.byte().argmax(axis)
        last = allowed.shape[axis] - 1 - allowed.flip(axis).byte().argmax(axis)
        if bool(((count > 0) & (last - first + 1 != count)).any()):
            return None
        sides.append((first, first + count))
    return IntervalMask(*sides)


def _between(values: Float[Tensor, " size"], ends: tuple[Tensor, Tensor]) -> Float[Tensor, " some"]:
    """Sums of the values from each first to the one before each end."""
    running = pad(values.cumsum(0), (1, 0))
    return running[ends[1]] - running[ends[0]]


def _energy(
    normal: Callable[[Float[Tensor, " size"]], Float[Tensor, " size"]],
    right: Float[Tensor, " size"],
    scale: Float[Tensor, " size"],
) -> float:
    """gᵀN⁺g for g in the range of N by conjugate gradients, N scaled to unit diagonal before elimination; else NaN."""
    goal = right * scale
    found, left, direction = torch.zeros_like(goal), goal.clone(), goal.clone()
    size = start = goal @ goal
    for _ in range(STEPS):
        if size <= RESIDUAL**2 * start:
            return float(found @ goal)
        product = normal(direction * scale) * scale
        step = size / (direction @ product)
        found, left = found + step * direction, left - step * product
        before, size = size, left @ left
        direction = left + size / before * direction
    return math.nan
