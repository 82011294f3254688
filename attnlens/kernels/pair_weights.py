"""Weights of token pairs for fits: visible pairs, the head's own attention, the effect of each pair on the output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnlens.kernels.registry import KERNELS
from attnlens.kernels.spec import Kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.kernels.registry import Matrix, Query
    from attnlens.records import Call

    Seen = Float[Tensor, "#batch #heads queries keys"]

MOST_ROWS = 32  # maximum number of queries per sequence whose whole rows a fit computes, if smaller sums do not suffice


def pairs_seen(call: Call, rows: slice = slice(None)) -> Seen:
    """Return 1.0 for the keys that each query of `rows` sees, else 0.0; queries that see fewer than two keys get 0."""
    query, seen = call.query[..., rows, :].double(), call.visible(rows)
    pairs = query.new_ones(1, 1, query.shape[-2], call.key.shape[-2]) if seen is None else seen.double()
    return pairs * (pairs.sum(-1, keepdim=True) >= 2)


def pairs_weighted(call: Call) -> Matrix:
    """Compute ½·(the head's own attention) + ½·(1/number of keys seen) over the pairs seen.

    The weights of a query that sees two keys or more sum to 1, or to less with a sink, whose attention is left out. To
    second order, the KL divergence due to a change in the logits is half the variance of the change. The uniform half
    limits errors at keys with little attention, whose logits a wrong fit could raise.
    """
    seen = pairs_seen(call)
    return (own_attention(call) + seen / seen.sum(-1, keepdim=True).clamp_min(1)) / 2


def own_attention(call: Call) -> Matrix:
    """Compute the head's own attention without a sink's weight; queries that see fewer than two keys get zeros."""
    from attnlens.kernels.attention import weights

    exact = replace(call, query=call.query.double(), key=call.key.double())
    return weights(exact, Kernel(KERNELS["exponential"])) * (pairs_seen(call).sum(-1, keepdim=True) > 0)


def output_weighted(call: Call, metric: Float[Tensor, "heads value_dim value_dim"]) -> Matrix:
    """Compute the squared effect on the output of a unit error in each logit: a_ij² (v_j − ō_i)ᵀG(v_j − ō_i).

    To first order, errors δ_ij in the logits change output i by Σ_j a_ij δ_ij (v_j − ō_i), where ō_i = Σ_j a_ij v_j.
    `metric` contains G of each head, such as W_OᵀW_O. Queries that see fewer than two keys get zeros.
    """
    attention = own_attention(call)
    value, metric = call.paired_value.double(), metric.double().to(attention.device)
    mean = attention @ value
    onto = value @ metric
    length = (onto * value).sum(-1)[..., None, :] + ((mean @ metric) * mean).sum(-1, keepdim=True)
    # only rounding can make a squared length negative
    return attention.square() * (length - 2 * mean @ onto.mT).clamp_min(0.0)


def sample_rows(call: Call) -> tuple[Query, Seen]:
    """Return up to MOST_ROWS evenly spaced queries per sequence (float64, last included), and their `pairs_seen`."""
    step = -(-call.query.shape[-2] // MOST_ROWS)
    rows = slice((call.query.shape[-2] - 1) % step, None, step)
    return call.query[..., rows, :].double(), pairs_seen(call, rows)


def centre_rows(values: Matrix, seen: Seen) -> Matrix:
    """Subtract from each row its mean over the keys seen; set the entries of unseen keys to 0."""
    count = seen.sum(-1, keepdim=True).clamp_min(1)  # 0/1, not 0/0, for a query that sees fewer than two keys
    mean = (values * seen).sum(-1, keepdim=True) / count
    return (values - mean) * seen
