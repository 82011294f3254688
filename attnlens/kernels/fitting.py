"""Distance of a kernel to a head's own: row-centred squares of log k over the visible pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.kernels.spec import score

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import Call

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


def pairs_weighted(call: Call) -> Float[Tensor, "batch heads queries keys"]:
    """½·(the head's own attention) + ½·(1/number of keys seen) over the pairs seen: every query counts alike.

    The variance of a change of logits under the attention itself is twice its KL to second order: errors count where
    the head looks. The uniform half keeps the keys in sight that it ignores, which a wrong fit could raise. A row sums
    to 1, less half of what a sink takes.
    """
    query, key = call.query.double(), call.paired_key.double()
    seen = pairs_seen(query, key, call.visible())
    return (_attention(call, seen) + seen / seen.sum(-1, keepdim=True).clamp_min(1)) / 2


def own_attention(call: Call) -> Float[Tensor, "batch heads queries keys"]:
    """The head's own attention over the pairs seen; rows of queries that see fewer than two keys are 0."""
    return _attention(call, pairs_seen(call.query, call.paired_key, call.visible()))


def output_weighted(
    call: Call, metric: Float[Tensor, "heads value_dim value_dim"]
) -> Float[Tensor, "batch heads queries keys"]:
    """a_ij² (v_j − ō_i)ᵀ W_OᵀW_O (v_j − ō_i), ō_i = Σ_j a_ij v_j: what an error of the logit ij does to the output.

    To first order δo_i = Σ_j a_ij δ_ij (v_j − ō_i). `metric` is W_OᵀW_O of each head, or what stands in its place.
    """
    own = own_attention(call)
    value, metric = call.paired_value.double(), metric.double().to(own.device)
    mean = own @ value
    onto = value @ metric
    length = (onto * value).sum(-1)[..., None, :] + ((mean @ metric) * mean).sum(-1, keepdim=True)
    return own.square() * (length - 2 * mean @ onto.mT).clamp_min(0.0)


def _attention(
    call: Call, seen: Float[Tensor, "#batch #heads queries keys"]
) -> Float[Tensor, "batch heads queries keys"]:
    """The head's own attention over the pairs seen, less what a sink takes; 0 for a query without a choice."""
    import torch

    query, key = call.query.double(), call.paired_key.double()
    scores = score(query, key, call.scale, call.softcap)
    scores = (scores if call.bias is None else scores + call.bias).masked_fill(seen == 0, -1e30)
    if call.sinks is not None:
        sink = call.sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    own: Tensor = scores.softmax(-1)[..., : key.shape[-2]] * (seen.sum(-1, keepdim=True) > 0)
    return own


def some_rows(
    call: Call,
) -> tuple[Float[Tensor, "batch heads rows head_dim"], Float[Tensor, "#batch #heads rows keys"]]:
    """Evenly spaced queries, at most MOST_ROWS of a sequence, its last among them, in float64, and what they see."""
    step = -(-call.query.shape[-2] // MOST_ROWS)
    rows = slice((call.query.shape[-2] - 1) % step, None, step)
    query = call.query[..., rows, :].double()
    return query, pairs_seen(query, call.paired_key, call.visible(rows))


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
