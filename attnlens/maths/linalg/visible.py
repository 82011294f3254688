"""Visible attention scores: shares of variance explained by keys and distances, and the rank of what softmax sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnlens.maths.linalg.long import TiledMatrix, is_long, least_rank, map_heads, split_tiles
from attnlens.maths.linalg.spectra import EPS, over_heads, product_singular_values, rank_at

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
    from torch import Tensor

    from attnlens.records import QueryKey

    Ends = Int[Tensor, "2 heads _"]
    """First index of each interval, and one past its last; equal if the interval is empty."""
    Sums = Float[Tensor, "heads sums"]
    PerHead = Float[Tensor, " heads"]

RESIDUAL = 1e-11
"""Residual, relative to ‖L‖, at which conjugate gradients stop. The explained share is then too small by less than
RESIDUAL² times the condition number of the scaled normal equations: by rounding, for any such number in float64."""
STEPS = 1000  # Most steps of conjugate gradients; real masks take 6 to 20


@dataclass(frozen=True)
class VisibleShares:
    """Shares of the visible scores' variance beyond row constants, by what explains it; NaN if there is none.

    L_ij ≈ a_i + b_j + c_{j−i} by least squares on the visible pairs, in this order. Softmax ignores a. Each share is in
    [0, 1], and they sum to 1. Cross-attention has no distances: its interaction is all that b does not explain.
    """

    key: Float[Tensor, "*batch heads"]  # explained by b_j: the same keys for every query
    distance: Float[Tensor, "*batch heads"]  # explained by c_{j−i} beyond b; NaN for cross-attention
    interaction: Float[Tensor, "*batch heads"]


def visible_shares(query_key: QueryKey) -> VisibleShares:
    """Compute the three shares of every head on one sequence, for any mask; NaN for long heads whose mask has gaps."""
    lead, n, m = query_key.query.shape[:-2], query_key.query.shape[-2], query_key.key.shape[-2]
    energy, rounding, sums = torch.split(_sum_scores(query_key).flatten(0, -2), [1, 1, n + 2 * m - 1], 1)
    tolerance = (RESIDUAL**2 * energy + rounding)[:, 0]
    masks = query_key.allowed
    if masks is None:
        masks = torch.ones((), dtype=torch.bool, device=sums.device).expand(*[1] * len(lead), n, m)
    mask_of = torch.arange(masks[..., 0, 0].numel(), device=sums.device).view(masks.shape[:-2]).expand(lead).flatten()
    masks = masks.flatten(0, -3)
    fit, gaps = find_intervals(masks)
    explained = explained_squares(IntervalMask(fit.keys[:, mask_of], fit.queries[:, mask_of]), m, sums, tolerance)
    for head in gaps[mask_of].nonzero():
        dense = None if is_long(query_key) else DenseMask(masks[mask_of[head]].double())
        explained[head] = torch.nan if dense is None else explained_squares(dense, m, sums[head], tolerance[head])
    shares = torch.where(energy > 0, explained / energy, torch.nan).view(*lead, 2)
    key, distance = shares.clamp(0, 1).unbind(-1)  # rounding can leave a share outside [0, 1]
    if query_key.site.part == "cross":
        return VisibleShares(key, torch.full_like(key, torch.nan), 1 - key)
    return VisibleShares(key, distance, (1 - key - distance).clamp(min=0))


def visible_scores(query_key: QueryKey) -> Float[Tensor, "*batch heads n m"]:
    """Return the visible scores minus the mean of their row, 0 if the mask hides; cached in the QueryKey.

    Rounding is set to zero: scores that depend on the query alone give 0.
    """
    if "visible_scores" not in query_key.shared:
        scores, centred = _centre_scores(query_key)
        norm, whole = torch.linalg.matrix_norm(centred), torch.linalg.matrix_norm(scores)
        centred[norm <= _rounding(whole, scores.shape[-1])] = 0.0
        query_key.shared["visible_scores"] = centred
    return query_key.shared["visible_scores"]


def compares_all(query_key: QueryKey) -> Bool[Tensor, "*batch heads"]:
    """Return whether the mask hides no pair, so that attention identifies all of L up to row constants."""
    lead = query_key.query.shape[:-2]
    if query_key.allowed is None:
        return torch.ones(lead, dtype=torch.bool, device=query_key.query.device)
    return query_key.allowed.all(-1).all(-1).expand(lead)


def visible_rank(query_key: QueryKey, share: float) -> Float[Tensor, "*batch heads"]:
    """Return the least k with Σ_{l≤k} σ² ≥ share · Σσ², σ of the row-centred visible scores; NaN if these are zero.

    Bilinear scores of all pairs are s·q(k − k̄)ᵀ and stay factored. All others go through their Gram matrix; if they
    are long, only its leading eigenvalues are computed (`least_rank`).
    """

    def rank(head: QueryKey) -> float:
        if not float(_sum_scores(head)[..., 0]) > 0:
            return torch.nan
        rows = TiledMatrix(lambda: (_centre_scores(tile)[1][0, 0] for _, tile in split_tiles(head)), head.key.shape[-2])
        return least_rank(rows, share)

    if query_key.bilinear and bool(compares_all(query_key).all()):
        key = query_key.paired_key.double()
        values = abs(query_key.scale) * product_singular_values(query_key.query, key - key.mean(-2, keepdim=True))
        whole = torch.stack([torch.linalg.matrix_norm(tile.logits) for _, tile in split_tiles(query_key)]).norm(dim=0)
        above = values.norm(dim=-1) > _rounding(whole, key.shape[-2])
        return rank_at(values * above[..., None], share)
    if is_long(query_key):
        return map_heads(rank, query_key)
    return rank_at(over_heads(_gram_values, visible_scores(query_key)), share)


def _gram_values(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some least"]:
    """Return σ, descending, with the accuracy of σ²."""
    small = scores if scores.shape[-2] <= scores.shape[-1] else scores.mT
    energies: Tensor = torch.linalg.eigvalsh(small @ small.mT)
    return energies.clamp(min=0).flip(-1).sqrt()


def _centre_scores(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n m"], Float[Tensor, "*batch heads n m"]]:
    """Return the visible scores, 0 if the mask hides, with and without the mean of their row."""
    logits, allowed = query_key.logits, query_key.allowed
    scores = logits if allowed is None else logits.masked_fill(~allowed, 0.0)
    count = scores.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - scores.sum(-1, keepdim=True) / count
    return scores, centred if allowed is None else centred.masked_fill_(~allowed, 0.0)


def _rounding(norm: Float[Tensor, "*batch"], keys: int) -> Float[Tensor, "*batch"]:
    """Return the largest norm that rounding leaves after centring constant rows of scores with this norm."""
    return EPS * keys * norm


def _sum_scores(query_key: QueryKey) -> Float[Tensor, "*batch heads sums"]:
    """Concatenate ‖L‖² of the row-centred visible scores L, its rounding, and the sums of L per key and per distance.

    All sums are 0 if L is rounding alone. Distances are j − i from 1 − n on.
    """
    n, m = query_key.query.shape[-2], query_key.key.shape[-2]
    whole = query_key.query.new_zeros(query_key.query.shape[:-2], dtype=torch.float64)
    sums = whole.new_zeros(*whole.shape, 1 + m + n + m - 1)
    for rows, tile in split_tiles(query_key):
        scores, centred = _centre_scores(tile)
        whole += scores.square().sum((-2, -1))
        height, width = centred.shape[-2:]
        first = 1 + m + n - rows.stop  # index of the distance between the tile's last query and first key
        of_tile = over_heads(_sums, centred)
        sums[..., : 1 + width] += of_tile[..., : 1 + width]
        sums[..., first : first + height + width - 1] += of_tile[..., 1 + width :]
    # Strict: scores that are constant in each row leave at most this norm.
    sums[sums[..., 0].sqrt() <= _rounding(whole.sqrt(), m)] = 0.0
    return torch.cat((sums[..., :1], EPS**2 * whole[..., None], sums[..., 1:]), -1)


def _sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some sums"]:
    """Concatenate ‖L‖², the sums over each key and the sums over each distance."""
    return torch.cat((scores.square().sum((-2, -1))[:, None], scores.sum(-2), distance_sums(scores)), -1)


def distance_sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some distances"]:
    """Return the sum over the pairs of each distance j − i from 1 − n to m − 1.

    Rows stored n + m − 1 apart and read n + m apart shift by one from row to row.
    """
    some, n, m = scores.shape
    stored = scores.new_zeros(some, n * (n + m))
    stored[:, n - 1 : -1].view(some, n, n + m - 1)[..., :m] = scores
    return stored.view(some, n, n + m).sum(1)[:, :-1]


@dataclass(frozen=True)
class IntervalMask:
    """Masks in which each query sees an interval of keys, and each key is seen by an interval of queries.

    Causal masks, windows, consecutive documents, prefixes and all pairs are such masks. Sums over what a query sees are
    then differences of running sums, so that a product with the normal equations does not need n × m numbers.
    """

    keys: Ends  # Keys that each query sees
    queries: Ends  # Queries that see each key

    @property
    def pairs(self) -> Sums:
        """Number of visible pairs of each key and of each distance."""
        counts = self.queries[1] - self.queries[0]
        return torch.cat((counts, self._sum_by_distance(torch.ones_like(self.keys[0]), self._distances[0])), 1).double()

    def multiply_normal(self, x: Sums) -> Sums:
        """Multiply the normal equations of b_j + c_{j−i}, row constants eliminated, with x = (b, c)."""
        b, c = x.tensor_split([self.queries.shape[-1]], 1)
        of_queries, of_keys = self._distances
        row_sums = _sum_intervals(b, self.keys) + _sum_intervals(c, of_queries)
        row_means = row_sums / (self.keys[1] - self.keys[0]).clamp(min=1)
        by_key = _sum_intervals(c, of_keys) - _sum_intervals(row_means, self.queries)
        by_distance = self._sum_by_distance(b, of_keys) - self._sum_by_distance(row_means, of_queries)
        return self.pairs * x + torch.cat((by_key, by_distance), 1)

    @property
    def _distances(self) -> tuple[Ends, Ends]:
        """Intervals of the distances of each query and of each key, as indices j − i + n − 1."""
        n = self.keys.shape[-1]
        query, key = (torch.arange(ends.shape[-1], device=ends.device) for ends in (self.keys, self.queries))
        return self.keys - query + n - 1, (key - self.queries + n).flip(0)

    def _sum_by_distance(self, values: Shaped[Tensor, "heads size"], ends: Ends) -> Shaped[Tensor, "heads distances"]:
        """Sum, over the pairs of each distance, the value of their query or key; `ends` are its distances."""
        change = values.new_zeros(len(values), self.keys.shape[-1] + self.queries.shape[-1])
        return change.scatter_add_(1, ends[0], values).scatter_add_(1, ends[1], -values).cumsum(1)[:, :-1]


def _sum_intervals(values: Float[Tensor, "heads size"], ends: Ends) -> Float[Tensor, "heads some"]:
    """Sum the values from each start to just before each end."""
    running = pad(values.cumsum(1), (1, 0))
    return running.gather(1, ends[1]) - running.gather(1, ends[0])


def find_intervals(allowed: Bool[Tensor, "masks n m"]) -> tuple[IntervalMask, Bool[Tensor, " masks"]]:
    """Return the intervals of each mask, and which masks have gaps: their intervals contain hidden pairs."""
    sides, gaps = [], torch.zeros(len(allowed), dtype=torch.bool, device=allowed.device)
    for axis in (2, 1):
        count, first = allowed.sum(axis), allowed.byte().argmax(axis)
        last = allowed.shape[axis] - 1 - allowed.flip(axis).byte().argmax(axis)
        gaps |= ((count > 0) & (last - first + 1 != count)).any(1)
        sides.append(torch.stack((first, first + count)))
    return IntervalMask(*sides), gaps


@dataclass(frozen=True)
class DenseMask:
    """Masks with gaps: the normal equations of `IntervalMask` from n × m numbers."""

    visible: Float[Tensor, "heads n m"]

    @property
    def pairs(self) -> Sums:
        """Number of visible pairs of each key and of each distance."""
        return torch.cat((self.visible.sum(-2), distance_sums(self.visible)), 1)

    def multiply_normal(self, x: Sums) -> Sums:
        """Multiply the normal equations of b_j + c_{j−i}, row constants eliminated, with x = (b, c)."""
        m = self.visible.shape[-1]
        b, c = x.tensor_split([m], 1)
        scores = self.visible * (b[:, None] + c.unfold(1, m, 1).flip(1))
        means = scores.sum(-1, keepdim=True) / self.visible.sum(-1, keepdim=True).clamp(min=1)
        centred = self.visible * (scores - means)
        return torch.cat((centred.sum(-2), distance_sums(centred)), 1)


def explained_squares(
    mask: IntervalMask | DenseMask, keys: int, sums: Sums, tolerance: PerHead
) -> Float[Tensor, "heads 2"]:
    """Return the sums of squares explained by b, and by c beyond b, from the scores' sums per key and distance.

    They are gᵀN⁺g, N the normal equations and g, in the range of N, the sums. NaN if conjugate gradients do not reach a
    squared residual of `tolerance` in STEPS.
    """
    pairs = mask.pairs
    scale = torch.where(pairs > 0, pairs.clamp(min=1).rsqrt(), 0.0)  # N has a unit diagonal before elimination
    of_keys = scale.clone()
    of_keys[:, keys:] = 0.0  # the equations are then those of b alone
    energies = [_solve_energy(mask, sums, part, tolerance) for part in (of_keys, scale)]
    return torch.stack((energies[0], energies[1] - energies[0]), 1)


def _solve_energy(mask: IntervalMask | DenseMask, right: Sums, scale: Sums, tolerance: PerHead) -> PerHead:
    """Return gᵀN⁺g by conjugate gradients on N, scaled on both sides."""
    goal = right * scale
    solution, remainder, direction = torch.zeros_like(goal), goal, goal
    squared = goal.square().sum(1)
    for _ in range(STEPS):
        active = squared > tolerance
        if not bool(active.any()):
            break
        product = mask.multiply_normal(direction * scale) * scale
        step = torch.where(active, squared / (direction * product).sum(1), 0.0)[:, None]
        solution, remainder = solution + step * direction, remainder - step * product
        before, squared = squared, remainder.square().sum(1)
        direction = remainder + torch.where(active, squared / before, 0.0)[:, None] * direction
    return torch.where(squared > tolerance, torch.nan, (solution * goal).sum(1))
