"""Row-centred visible attention scores: their rank, and the shares of variance explained by keys and distances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnlens.maths.linalg.long import TiledMatrix, find_intervals, is_long, least_rank, map_heads, split_tiles
from attnlens.maths.linalg.spectra import over_heads, product_singular_values, rank_at

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey

    Pairs = Float[Tensor, "n m"]
    PerHead = Float[Tensor, "*batch heads"]
    Norms = Float[Tensor, "*batch"]
    Sums = Float[Tensor, "some size"]
    Explain = Callable[[Float[Tensor, "some keys"], Float[Tensor, "some every_distance"]], Float[Tensor, "some 2"]]

RIDGE = 1e-10
"""Number added to the unit diagonal of the normal equations, which are singular because constant and linear terms can
be moved between key terms b and distance terms c. The number exceeds rounding, so that Cholesky succeeds, and is below
the least non-zero eigenvalue."""
REFINEMENTS = 2  # Steps that each multiply the ridge's effect by RIDGE/λ; λ is the least non-zero eigenvalue


def _fit_masks(query_key: QueryKey) -> Iterator[tuple[Bool[Tensor, "*batch heads"], Explain]]:
    """Yield, for each distinct mask, flags of the sequences and heads that use it, and the fit made by `_fit_mask`."""
    lead, (n, m) = query_key.query.shape[:-2], query_key.logits.shape[-2:]
    distances, device = query_key.site.part != "cross", query_key.query.device
    if query_key.allowed is None:
        yield torch.ones(lead, dtype=torch.bool, device=device), _fit_mask(None, n, m, distances, device)
        return
    masks = query_key.allowed.expand(*lead[:-1], -1, n, m)
    members: dict[bytes | None, list[int]] = defaultdict(list)
    for number, mask in enumerate(masks.reshape(-1, n, m)):
        members[None if bool(mask.all()) else np.packbits(mask.cpu().numpy()).tobytes()].append(number)
    for packed, numbers in members.items():
        users = torch.zeros(masks.shape[:-2], dtype=torch.bool, device=device)
        users.view(-1)[numbers] = True
        yield users.expand(lead), _fit_mask(packed, n, m, distances, device)


# Two entries, because models with sliding windows alternate between two masks. At 2,048 tokens an entry takes 340 MB.
@lru_cache(maxsize=2)
def _fit_mask(packed: bytes | None, n: int, m: int, distances: bool, device: torch.device) -> Explain:
    """Prepare the least-squares fit of b_j + c_{i−j} to row-centred scores on one mask's visible pairs.

    `packed` contains the bits of the mask (None: all pairs are visible). The returned function takes the scores' sums
    per key (heads, m) and per distance (heads, n + m). It returns the sums of squares (heads, 2): the part explained by
    b, and the part that c explains in addition (NaN if `distances` is false).
    """
    visible = torch.ones(n, m, dtype=torch.float64, device=device)
    if packed is not None:
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=n * m)
        visible = torch.from_numpy(bits).to(visible).view(n, m)
    scaled = visible / visible.sum(-1, keepdim=True).clamp(min=1).sqrt()
    # If all pairs are visible, N = n(I − 11ᵀ/m), and the sums per key sum to 0.
    solve_keys = (lambda right: right / n) if packed is None else _build_solver(-scaled.mT @ scaled, visible.sum(0))
    if distances:
        counts, normal, shared, present = _distance_equations(visible, scaled)
        normal.addmm_(shared.mT, solve_keys(shared.mT).mT, alpha=-1)
        solve_distances = _build_solver(normal, counts)

    def explain(by_key: Float[Tensor, "some keys"], by_distance: Float[Tensor, "some every_distance"]) -> Tensor:
        b = solve_keys(by_key)
        of_keys = (by_key * b).sum(-1)
        if not distances:
            return torch.stack((of_keys, torch.full_like(of_keys, torch.nan)), -1)
        beyond_keys = by_distance[:, present] - b @ shared
        return torch.stack((of_keys, (beyond_keys * solve_distances(beyond_keys)).sum(-1)), -1)

    return explain


def _distance_equations(visible: Pairs, scaled: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normal equations of the distance term c for the distances that occur.

    The results are the number of pairs at each distance, the normal matrix minus the diagonal matrix of these numbers,
    the coupling of c with the key term b, and the indices of the distances. `scaled` is the mask divided by the square
    root of each query's number of keys, which eliminates the row constants.
    """
    n, m = visible.shape
    queries, keys = (torch.arange(size, device=visible.device) for size in (n, m))
    place = (keys - queries[:, None]) % (n + m)
    present = torch.bincount(place[visible > 0], minlength=n + m).nonzero()[:, 0]
    by_query = visible.new_zeros(n, n + m).scatter_(1, place, scaled)[:, present]
    by_key = visible.new_zeros(m, n + m).scatter_(1, place.mT, visible.mT)[:, present]
    return by_key.sum(0), -by_query.mT @ by_query, by_key - scaled.mT @ by_query, present


def _build_solver(normal: Float[Tensor, "size size"], counts: Float[Tensor, " size"]) -> Callable[[Sums], Sums]:
    """Return a solver of N x = g, for rows g in the range of the singular N = diag(counts) + `normal` (overwritten).

    The solver scales N such that `counts` become 1, factors N + RIDGE·I by Cholesky, and refines solutions iteratively.
    """
    normal.diagonal().add_(counts)
    scale = counts.clamp(min=1).rsqrt()
    matrix = normal.mul_(scale).mul_(scale[:, None])
    factor = matrix.clone()
    factor.diagonal().add_(RIDGE)
    factor = torch.linalg.cholesky(factor)

    def solve(right: Sums) -> Sums:
        goal = (right * scale).mT
        solution = torch.cholesky_solve(goal, factor)
        for _ in range(REFINEMENTS):
            solution = solution + torch.cholesky_solve(goal - matrix @ solution, factor)
        return solution.mT * scale

    return solve


def distance_sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some every_distance"]:
    """Return the sum of the scores at each distance, as entry (j − i) mod (n + m); one of the n + m entries is 0."""
    some, n, m = scores.shape
    # Rows stored at intervals of n + m − 1 and read at intervals of n + m shift by one from row to row.
    stored = scores.new_zeros(some, n * (n + m))
    stored[:, : n * (n + m - 1)].view(some, n, n + m - 1)[..., :m] = scores
    return stored.view(some, n, n + m).sum(1)


@dataclass(frozen=True)
class VisibleShares:
    """Shares of the variance of visible, row-centred scores that keys and distances explain; NaN if the variance is 0.

    L_ij ≈ a_i + b_j + c_{i−j} is fitted by least squares on the visible pairs, first a, then b, then c. Softmax ignores
    a. The shares are in [0, 1] and sum to 1. Cross-attention has no distances, so its `content` is 1 − `key`.
    """

    key: PerHead  # explained by b_j: keys that all queries favour
    position: PerHead  # explained by c_{i−j} in addition to b; NaN for cross-attention
    content: PerHead  # explained by neither: depends on the pair of query and key


def visible_shares(query_key: QueryKey) -> VisibleShares:
    """Compute the three shares of every head under any mask.

    The shares are NaN if the scores have no variance or, for long sequences, if the mask has gaps or conjugate
    gradients do not converge.

    The normal equations depend only on the mask and are factored once per mask; long sequences use conjugate gradients.
    """
    shares = map_heads(_long_shares, query_key) if is_long(query_key) else _shares(query_key)
    key, distance = shares.clamp(0, 1).unbind(-1)  # rounding can leave a share outside [0, 1]
    content = 1 - key if query_key.site.part == "cross" else 1 - key - distance
    return VisibleShares(key, distance, content.clamp(min=0))


def visible_scores(query_key: QueryKey) -> Float[Tensor, "*batch heads n m"]:
    """Return the visible scores, each minus the mean of its row, cached in the QueryKey.

    Masked entries are 0. A centred matrix whose norm is within rounding is set to 0.
    """
    if "visible_scores" not in query_key.shared:
        scores, centred = _centre_scores(query_key)
        norm, whole = torch.linalg.matrix_norm(centred), torch.linalg.matrix_norm(scores)
        centred[~_exceeds_rounding(norm, whole, scores.shape[-1])] = 0.0
        query_key.shared["visible_scores"] = centred
    return query_key.shared["visible_scores"]


def compares_all(query_key: QueryKey) -> Bool[Tensor, "*batch heads"]:
    """Return True for heads whose mask hides no pair; attention then determines all scores up to row constants."""
    lead = query_key.query.shape[:-2]
    if query_key.allowed is None:
        return torch.ones(lead, dtype=torch.bool, device=query_key.query.device)
    return query_key.allowed.all(-1).all(-1).expand(lead)


def visible_rank(query_key: QueryKey, share: float) -> PerHead:
    """Return the least k with Σ_{l≤k} σ² ≥ share · Σσ² for σ of the row-centred visible scores; NaN if all are zero.

    For long sequences, the result is also NaN if `least_rank` cannot prove k.
    """

    def rank(head: QueryKey) -> float:
        if not _long_sums(head)[0] > 0:
            return math.nan
        rows = TiledMatrix(lambda: (_centre_scores(tile)[1][0, 0] for _, tile in split_tiles(head)), head.key.shape[-2])
        return least_rank(rows, share)

    if not (query_key.bilinear and bool(compares_all(query_key).all())):
        if is_long(query_key):
            return map_heads(rank, query_key)
        return rank_at(over_heads(_gram_values, visible_scores(query_key)), share)
    # Bilinear scores of all pairs, s·q(k − k̄)ᵀ, are not multiplied out.
    key = query_key.paired_key.double()
    values = abs(query_key.scale) * product_singular_values(query_key.query, key - key.mean(-2, keepdim=True))
    logits = torch.stack([torch.linalg.matrix_norm(tile.logits) for _, tile in split_tiles(query_key)]).norm(dim=0)
    return rank_at(values * _exceeds_rounding(values.norm(dim=-1), logits, key.shape[-2])[..., None], share)


def _shares(query_key: QueryKey) -> Float[Tensor, "*batch heads 2"]:
    """Return the shares of the scores' variance explained by keys, and by distances in addition to keys."""
    scores = visible_scores(query_key)
    n, m = scores.shape[-2:]
    energy, by_key, by_distance = torch.split(over_heads(_sums, scores), [1, m, n + m], -1)
    explained = scores.new_zeros(*scores.shape[:-2], 2)
    for users, explain in _fit_masks(query_key):
        explained[users] = explain(by_key[users], by_distance[users])
    return torch.where(energy > 0, explained / energy, torch.nan)


def _long_shares(head: QueryKey) -> tuple[float, float]:
    """Apply `_shares` to one head over a long sequence; NaN in the cases listed at `visible_shares`."""
    n, m = head.query.shape[-2], head.key.shape[-2]
    all_pairs = torch.ones((), dtype=torch.bool, device=head.query.device)
    fit = find_intervals((all_pairs if head.allowed is None else head.allowed).expand(1, 1, n, m)[0, 0])
    energy, by_key, by_distance = _long_sums(head)
    if fit is None or not energy > 0:
        return math.nan, math.nan
    of_keys, beyond_keys = fit.explained_squares(by_key, None if head.site.part == "cross" else by_distance)
    return of_keys / float(energy), beyond_keys / float(energy)


def _long_sums(head: QueryKey) -> tuple[Float[Tensor, ""], Float[Tensor, " m"], Float[Tensor, " distances"]]:
    """Return ‖L‖² (0 if within rounding), and the sums of L per key and per distance j − i ≥ 1 − n, for a single head.

    L contains the row-centred visible scores.
    """
    n, m = head.query.shape[-2], head.key.shape[-2]
    by_key, by_distance = (torch.zeros(size, dtype=torch.float64, device=head.query.device) for size in (m, n + m - 1))
    norms = []
    for rows, tile in split_tiles(head):
        scores, centred = (part[0] for part in _centre_scores(tile))
        norms.append(torch.stack([torch.linalg.matrix_norm(part)[0] for part in (scores, centred)]))
        height, width = centred.shape[-2:]
        by_key[:width] += centred[0].sum(0)
        start = n - rows.stop  # index of the distance between the tile's last query and first key
        by_distance[start : start + height + width - 1] += distance_sums(centred)[0].roll(height - 1)[:-1]
    whole, energy = torch.stack(norms).norm(dim=0)
    return energy.square() * _exceeds_rounding(energy, whole, m), by_key, by_distance


def _centre_scores(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n m"], Float[Tensor, "*batch heads n m"]]:
    """Return the visible scores, and the same scores minus the mean of their row; masked entries of both are 0."""
    logits, allowed = query_key.logits, query_key.allowed
    scores = logits if allowed is None else logits.masked_fill(~allowed, 0.0)
    count = scores.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - scores.sum(-1, keepdim=True) / count
    return scores, centred if allowed is None else centred.masked_fill_(~allowed, 0.0)


def _exceeds_rounding(norm: Norms, scores: Norms, keys: int) -> Bool[Tensor, "*batch"]:
    """Return True if the `norm` of row-centred scores exceeds rounding; `scores` is the norm before centring."""
    # Strict: scores that are constant in each row leave at most this norm.
    return norm > torch.finfo(norm.dtype).eps * keys * scores


def _sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some sums"]:
    """Return the squared norm of the scores, their sums per key and their sums per distance, concatenated."""
    energy = scores.flatten(1).norm(dim=1, keepdim=True).square()
    return torch.cat((energy, scores.sum(-2), distance_sums(scores)), -1)


def _gram_values(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some least"]:
    """Return singular values, descending, from Gram eigenvalues: σ² is accurate to rounding, but a small σ is not."""
    small = scores if scores.shape[-2] <= scores.shape[-1] else scores.mT
    energies: Tensor = torch.linalg.eigvalsh(small @ small.mT)
    return energies.clamp(min=0).flip(-1).sqrt()
