"""Share of a head's scores explained by a term for each key and one for each distance, by least squares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.records import QueryKey

RIDGE = 1e-10
"""Added to the unit diagonal of the normal equations, which constants and lines among b and c leave singular."""
REFINEMENTS = 2
"""Steps that take the ridge's effect out again: each leaves RIDGE/λ of it, λ the least eigenvalue that is not zero."""


class Solver(NamedTuple):
    """N⁺g for g in the range of N, a singular positive semidefinite matrix, by Cholesky of N + RIDGE and refinement."""

    matrix: Float[Tensor, "size size"]
    """N between its scales."""
    factor: Float[Tensor, "size size"]
    """The Cholesky factor of that plus RIDGE."""
    scale: Float[Tensor, " size"]
    """What brings N's diagonal before any elimination to 1."""

    def __call__(self, right: Float[Tensor, "some size"]) -> Float[Tensor, "some size"]:
        """A solution of N x = g for every row g."""
        goal = (right * self.scale).mT
        found = torch.cholesky_solve(goal, self.factor)
        for _ in range(REFINEMENTS):
            found = found + torch.cholesky_solve(goal - self.matrix @ found, self.factor)
        return found.mT * self.scale


@dataclass(frozen=True)
class Even:
    """The same for the keys where all pairs are visible: N = n(I − 11ᵀ/m), and g sums to 0."""

    queries: int
    """n."""

    def __call__(self, right: Float[Tensor, "some keys"]) -> Float[Tensor, "some keys"]:
        """g/n for every row g."""
        return right / self.queries


@dataclass(frozen=True)
class Additive:
    """The fit of b_j + c_{i−j} to row-centred scores on the visible pairs of one mask; row constants are eliminated."""

    keys: Solver | Even
    """Of the normal equations of b."""
    distances: Solver | None
    """Of those of c, b eliminated; None for cross-attention, where distances mean nothing."""
    shared: Float[Tensor, "keys some_distances"]
    """The normal equations' block between b and c."""
    present: Int[Tensor, " some_distances"]
    """Which distances occur among the visible pairs: (j − i) mod (n + m)."""

    def explained(
        self, by_key: Float[Tensor, "some keys"], by_distance: Float[Tensor, "some every_distance"]
    ) -> Float[Tensor, "some 2"]:
        """The sums of squares that b explains, and c beyond b, of scores with these sums over each key and distance."""
        b = self.keys(by_key)
        of_keys = (by_key * b).sum(-1)
        if self.distances is None:
            return torch.stack((of_keys, torch.full_like(of_keys, torch.nan)), -1)
        left = by_distance[:, self.present] - b @ self.shared
        return torch.stack((of_keys, (left * self.distances(left)).sum(-1)), -1)


def additives(query_key: QueryKey) -> Iterator[tuple[Bool[Tensor, "*batch heads"], Additive]]:
    """The fit of every distinct mask, with the heads and sequences that have it."""
    lead, (n, m) = query_key.query.shape[:-2], query_key.logits.shape[-2:]
    distances, device = query_key.site.part != "cross", query_key.query.device
    if query_key.allowed is None:
        yield torch.ones(lead, dtype=torch.bool, device=device), _additive(None, n, m, distances, device)
        return
    masks = query_key.allowed.expand(*lead[:-1], -1, n, m)
    members: dict[bytes | None, list[int]] = defaultdict(list)
    for number, mask in enumerate(masks.reshape(-1, n, m)):
        members[None if bool(mask.all()) else np.packbits(mask.cpu().numpy()).tobytes()].append(number)
    for packed, numbers in members.items():
        having = torch.zeros(masks.shape[:-2], dtype=torch.bool, device=device)
        having.view(-1)[numbers] = True
        yield having.expand(lead), _additive(packed, n, m, distances, device)


# Two, as models with sliding windows alternate between two masks: at 2,048 tokens one takes up to 340 MB.
@lru_cache(maxsize=2)
def _additive(packed: bytes | None, n: int, m: int, distances: bool, device: torch.device) -> Additive:
    """The fit for the mask with these bits (None: all pairs), n queries and m keys."""
    visible = torch.ones(n, m, dtype=torch.float64, device=device)
    if packed is not None:
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=n * m)
        visible = torch.from_numpy(bits).to(visible).view(n, m)
    rooted = visible / visible.sum(-1, keepdim=True).clamp(min=1).sqrt()
    keys = Even(n) if packed is None else _solver(-rooted.mT @ rooted, visible.sum(0))
    if not distances:
        return Additive(keys, None, visible[:0].mT, torch.zeros(0, dtype=torch.long, device=device))
    counts, normal, shared, present = _of_distances(visible, rooted)
    normal.addmm_(shared.mT, keys(shared.mT).mT, alpha=-1)
    return Additive(keys, _solver(normal, counts), shared, present)


def _of_distances(visible: Float[Tensor, "n m"], rooted: Float[Tensor, "n m"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of each distance, c's normal equations less those on the diagonal, their block with b, which occur.

    `rooted` is the mask over the root of each query's number of keys, through which row constants are eliminated.
    """
    n, m = visible.shape
    queries, keys = (torch.arange(size, device=visible.device) for size in (n, m))
    place = (keys - queries[:, None]) % (n + m)
    present = torch.bincount(place[visible > 0], minlength=n + m).nonzero()[:, 0]
    by_query = visible.new_zeros(n, n + m).scatter_(1, place, rooted)[:, present]
    by_key = visible.new_zeros(m, n + m).scatter_(1, place.mT, visible.mT)[:, present]
    return by_key.sum(0), -by_query.mT @ by_query, by_key - rooted.mT @ by_query, present


def _solver(reduced: Float[Tensor, "size size"], counts: Float[Tensor, " size"]) -> Solver:
    """The solver of the normal equations diag(pairs of each term) + `reduced`, a matrix that it takes over."""
    reduced.diagonal().add_(counts)
    scale = counts.clamp(min=1).rsqrt()
    matrix = reduced.mul_(scale).mul_(scale[:, None])
    factor = matrix.clone()
    factor.diagonal().add_(RIDGE)
    return Solver(matrix, torch.linalg.cholesky(factor), scale)


def distance_sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some every_distance"]:
    """Σ over the pairs of each distance, n + m of them: entry (j − i) mod (n + m); one of these is no distance.

    Rows stored n + m − 1 apart and read n + m apart slip by one from row to row.
    """
    some, n, m = scores.shape
    stored = scores.new_zeros(some, n * (n + m))
    stored[:, : n * (n + m - 1)].view(some, n, n + m - 1)[..., :m] = scores
    return stored.view(some, n, n + m).sum(1)
