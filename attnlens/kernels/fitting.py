"""How near is a kernel to a head, once what softmax ignores is gone? Row-centred squares over the pairs seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

MOST_ROWS = 32
"""Queries of a sequence whose rows are written out, where a parameter has no closed form in head_dim sums."""


def pairs_seen(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    allowed: Bool[Tensor, "#batch #heads queries keys"] | None,
) -> Float[Tensor, "#batch #heads queries keys"]:
    """1 where a query sees a key, in float64; 0 throughout for a query that sees fewer than two: it has no choice."""
    every = query.double().new_ones(1, 1, query.shape[-2], key.shape[-2])
    seen = every if allowed is None else allowed.double()
    return seen * (seen.sum(-1, keepdim=True) >= 2)


def pairs_weighted(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    scale: float,
    allowed: Bool[Tensor, "#batch #heads queries keys"] | None,
) -> Float[Tensor, "batch heads queries keys"]:
    """½·softmax(s⟨q, k⟩) + ½·(1/number of keys seen) over the pairs seen: every query counts alike.

    The variance of a change of logits under the attention itself is twice its KL to second order: errors count where
    the head looks. The uniform half keeps the keys in sight that it ignores, which a wrong fit could raise.
    """
    seen = pairs_seen(query, key, allowed)
    scores = (query.double() @ key.double().mT * scale).masked_fill(seen == 0, -1e30)
    uniform = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    return (scores.softmax(-1) * (seen.sum(-1, keepdim=True) > 0) + uniform) / 2


def some_rows(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    allowed: Bool[Tensor, "#batch #heads queries keys"] | None,
) -> tuple[Float[Tensor, "batch heads rows head_dim"], Float[Tensor, "#batch #heads rows keys"]]:
    """Evenly spaced queries, at most MOST_ROWS of a sequence, its last among them, in float64, and what they see."""
    step = -(-query.shape[-2] // MOST_ROWS)
    first = (query.shape[-2] - 1) % step
    query = query[..., first::step, :].double()
    return query, pairs_seen(query, key, None if allowed is None else allowed[..., first::step, :])


def row_centred(
    values: Float[Tensor, "batch heads rows keys"], seen: Float[Tensor, "#batch #heads rows keys"]
) -> Float[Tensor, "batch heads rows keys"]:
    """Each row minus its mean over the keys seen; 0 elsewhere."""
    mean = (values * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return (values - mean) * seen


def squared_error(
    difference: Float[Tensor, "batch heads rows keys"], seen: Float[Tensor, "#batch #heads rows keys"]
) -> Float[Tensor, "batch heads rows"]:
    """Σ_j (d_ij − d̄_i)² of every row."""
    return row_centred(difference, seen).square().sum(-1)


def centred_keys(
    key: Float[Tensor, "batch heads keys head_dim"], seen: Float[Tensor, "#batch #heads queries keys"]
) -> tuple[
    Float[Tensor, "batch heads keys head_dim"],
    Float[Tensor, "batch heads queries head_dim"],
    Float[Tensor, "heads head_dim head_dim"],
]:
    """Keys minus their sequence's mean, in float64; the mean m_i of those that each query sees; their scatter.

    The scatter is Σ_i Σ_{j seen by i} (k_j − m_i)(k_j − m_i)ᵀ = Σ_j (queries that see j) k_j k_jᵀ − Σ_i (keys that i
    sees) m_i m_iᵀ, which no shift of all keys changes; without the shift it would be lost in rounding.
    """
    key = key.double() - key.double().mean(-2, keepdim=True)
    count = seen.sum(-1)[..., None]
    mean = seen @ key / count.clamp_min(1)
    scatter = (key * seen.sum(-2)[..., None]).mT @ key - (mean * count).mT @ mean
    return key, mean, scatter.sum(0)
