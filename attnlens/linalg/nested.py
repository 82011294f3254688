"""Nested plans of ranks, each the cheapest of its size by the costs of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Step = tuple[int, int]
"""A key head, counted over all sites, and its next smaller rank."""


def nested(costs: Float[Tensor, "kv_heads ranks"]) -> list[Step]:
    """Steps from all directions to none, the cheapest per direction first: the plans after each are nested.

    Each head goes along the lower convex hull of its costs, on which no step costs less per direction than the one
    before it, so that the greedy plan after every step is the cheapest of its size (Fox 1966). Costs are ≥ 0, and 0
    with all directions, so that the hull falls with rank; beyond a head's own head_dim they are infinite.
    """
    steps: list[tuple[float, int, int]] = []
    for head, row in enumerate(costs.tolist()):
        cost = [c for c in row if math.isfinite(c)]
        for low, high in reversed(list(pairwise(_hull(cost)))):
            steps.append(((cost[low] - cost[high]) / (high - low), head, low))
    return [(head, rank) for _, head, rank in sorted(steps, key=lambda step: step[0])]


def _hull(cost: Sequence[float]) -> list[int]:
    """The ranks on the lower convex hull of the costs, the smallest first."""
    hull: list[int] = []
    for rank in range(len(cost)):
        while len(hull) > 1 and _above(cost, hull[-2], hull[-1], rank):
            hull.pop()
        hull.append(rank)
    return hull


def _above(cost: Sequence[float], first: int, middle: int, last: int) -> bool:
    """Whether the middle point lies on or above the line from the first to the last."""
    return (cost[middle] - cost[first]) * (last - first) >= (cost[last] - cost[first]) * (middle - first)
