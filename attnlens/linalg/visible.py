"""Visible scores without their row means: what softmax sees of a head's logits, and their rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.additive import additives, distance_sums
from attnlens.linalg.parallel import over_heads
from attnlens.linalg.spectra import product_singular_values, rank_at

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey


@dataclass(frozen=True)
class VisibleShares:
    """What explains the visible scores, as shares of what row constants leave of them; NaN where they leave nothing.

    L_ij ≈ a_i + b_j + c_{i−j} by least squares on the visible pairs, in this order. Softmax ignores a. Each share is in
    [0, 1], and they sum to 1. Cross-attention has no distances: its interaction is all that b leaves.
    """

    key: Float[Tensor, "*batch heads"]
    """What b_j explains: the same keys whatever the query."""
    distance: Float[Tensor, "*batch heads"]
    """What c_{i−j} explains beyond b; NaN for cross-attention."""
    interaction: Float[Tensor, "*batch heads"]
    """The rest."""


def visible_shares(query_key: QueryKey) -> VisibleShares:
    """The three shares of every head on one sequence, whatever its mask.

    The normal equations depend on the mask alone and are factored once for each; a head adds its sums over keys and
    distances.
    """
    scores = seen(query_key)
    n, m = scores.shape[-2:]
    energy, by_key, by_distance = torch.split(over_heads(_sums, scores), [1, m, n + m], -1)
    explained = scores.new_zeros(*scores.shape[:-2], 2)
    for having, fit in additives(query_key):
        explained[having] = fit.explained(by_key[having], by_distance[having])
    shares = torch.where(energy > 0, explained / energy, torch.nan)
    key, distance = shares.clamp(0, 1).unbind(-1)
    rest = 1 - key if query_key.site.part == "cross" else 1 - key - distance
    return VisibleShares(key, distance, rest.clamp(min=0))


def seen(query_key: QueryKey) -> Float[Tensor, "*batch heads n m"]:
    """Visible scores without the mean of their row, 0 where the mask hides; computed once for a QueryKey.

    Rounding becomes zero: scores that depend on the query alone leave nothing.
    """
    if "seen" not in query_key.shared:
        logits, allowed = query_key.logits, query_key.allowed
        scores = logits if allowed is None else logits.masked_fill(~allowed, 0.0)
        count = scores.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1)
        centred = scores - scores.sum(-1, keepdim=True) / count
        if allowed is not None:
            centred.masked_fill_(~allowed, 0.0)
        centred[~_above_rounding(torch.linalg.matrix_norm(centred), scores)] = 0.0
        query_key.shared["seen"] = centred
    return query_key.shared["seen"]


def compares_all(query_key: QueryKey) -> Bool[Tensor, "*batch heads"]:
    """Whether the mask hides no pair, so that attention identifies L up to row constants and not a part of it."""
    lead = query_key.query.shape[:-2]
    if query_key.allowed is None:
        return torch.ones(lead, dtype=torch.bool, device=query_key.query.device)
    return query_key.allowed.all(-1).all(-1).expand(lead)


def seen_rank(query_key: QueryKey, share: float) -> Float[Tensor, "*batch heads"]:
    """The least k with Σ_{l≤k} σ² ≥ share · Σσ², σ of what softmax sees; NaN where it sees nothing.

    Bilinear scores of all pairs are s·q(k − k̄)ᵀ, and keep their factors; all others go through their Gram matrix.
    """
    if not (query_key.bilinear and bool(compares_all(query_key).all())):
        return rank_at(over_heads(_gram_values, seen(query_key)), share)
    key = query_key.paired_key.double()
    values = abs(query_key.scale) * product_singular_values(query_key.query, key - key.mean(-2, keepdim=True))
    return rank_at(values * _above_rounding(values.norm(dim=-1), query_key.logits)[..., None], share)


def _above_rounding(
    norm: Float[Tensor, "*batch heads"], scores: Float[Tensor, "*batch heads n m"]
) -> Bool[Tensor, "*batch heads"]:
    """Whether a norm is more than centring the rows of these scores leaves by rounding."""
    # Strict: scores of one value a row leave at most this norm.
    above: Tensor = norm > torch.finfo(scores.dtype).eps * scores.shape[-1] * torch.linalg.matrix_norm(scores)
    return above


def _sums(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some sums"]:
    """‖L‖², then the sums over each key, then those over each distance."""
    energy = scores.flatten(1).norm(dim=1, keepdim=True).square()
    return torch.cat((energy, scores.sum(-2), distance_sums(scores)), -1)


def _gram_values(scores: Float[Tensor, "some n m"]) -> Float[Tensor, "some least"]:
    """σ, descending, with the accuracy of σ²."""
    small = scores if scores.shape[-2] <= scores.shape[-1] else scores.mT
    energies: Tensor = torch.linalg.eigvalsh(small @ small.mT)
    return energies.clamp(min=0).flip(-1).sqrt()
