"""Concentration of attention matrices: entropy, largest weight, weight on the first token, singular values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.long import TiledMatrix, each_head, is_long, least_rank, tiles
from attnlens.linalg.spectra import rank_at, singular_values

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey


def entropy(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean over queries of −Σ p log p / log(allowed keys), in [0, 1]: 0 one key, 1 all alike.

    Queries with fewer than two allowed keys are left out; NaN where none is left. A sink logit counts as one more
    allowed key, with the probability that it takes.
    """
    return _mean(query_key, _entropies)


def max_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean over queries of max_j p_ij, in [0, 1]; queries that may see nothing are left out, NaN where none is left."""
    return _mean(query_key, lambda tile: (tile.attention.amax(-1), _allowed_keys(tile) >= 1))


def first_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean of p_ij over queries that see two keys or more, j the first that query i sees, in [0, 1]; NaN for none."""
    return _mean(query_key, _first_weights)


def even_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean of 1/m over queries that see two keys or more, m the keys that a query sees: what `first_weight` is where
    attention is even. A sink logit counts as one more key; NaN where no query sees two.
    """
    return _mean(query_key, lambda tile: (1 / _choices(tile).clamp(min=1), _allowed_keys(tile) >= 2))


def attention_singular_values(
    query_key: QueryKey, *, without_row_sums: bool = False
) -> Float[Tensor, "*batch heads least"]:
    """σ(P) or σ(P(I − 11ᵀ/m)), descending; computed once for a QueryKey, as several analyzers ask for them.

    One NaN for a long sequence, of which not all are computed: `attention_rank` needs the leading ones alone.
    """
    if is_long(query_key):
        return query_key.query.new_full((*query_key.query.shape[:-2], 1), torch.nan, dtype=torch.float64)
    name = "centred_attention_singular_values" if without_row_sums else "attention_singular_values"
    if name not in query_key.shared:
        attention = query_key.attention
        query_key.shared[name] = singular_values(centred(attention) if without_row_sums else attention)
    return query_key.shared[name]


def attention_rank(query_key: QueryKey, share: float) -> Float[Tensor, "*batch heads"]:
    """The least k with Σ_{l≤k} σ² ≥ share · Σσ², σ of P; NaN for P = 0, and where `least_rank` proves none."""
    if not is_long(query_key):
        return rank_at(attention_singular_values(query_key), share)
    return each_head(query_key, partial(_long_rank, share=share))


def centred(attention: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n m"]:
    """P(I − 11ᵀ/m), which is P − 11ᵀ/m where rows sum to 1: attention beyond the even one. Rounding becomes zero."""
    beyond = attention - attention.mean(-1, keepdim=True)
    border = torch.finfo(attention.dtype).eps * attention.shape[-1] * torch.linalg.matrix_norm(attention)
    # Strict: an even matrix leaves rounding of at most this norm.
    return torch.where((torch.linalg.matrix_norm(beyond) > border)[..., None, None], beyond, 0.0)


def _entropies(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n"], Bool[Tensor, "*batch heads n"]]:
    attention = query_key.attention
    choices = _choices(query_key)
    spread = torch.special.entr(attention).sum(-1)
    if query_key.sinks is not None:
        spread = spread + torch.special.entr((1 - attention.sum(-1)).clamp(min=0))
    chooses = choices >= 2
    return spread / torch.where(chooses, choices, 2.0).log(), chooses


def _first_weights(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n"], Bool[Tensor, "*batch heads n"]]:
    attention = query_key.attention
    if query_key.allowed is None:
        first = attention[..., 0]
    else:
        place = query_key.allowed.byte().argmax(-1, keepdim=True)
        first = attention.gather(-1, place.expand(*attention.shape[:-1], 1))[..., 0]
    return first, _allowed_keys(query_key) >= 2


def _long_rank(head: QueryKey, share: float) -> float:
    return least_rank(TiledMatrix(partial(_attention_tiles, head), head.key.shape[-2]), share)


def _attention_tiles(head: QueryKey) -> Iterator[Float[Tensor, "rows some_keys"]]:
    return (tile.attention[0, 0] for _, tile in tiles(head))


def _allowed_keys(query_key: QueryKey) -> Float[Tensor, "*batch heads n"]:
    """How many keys each query may see."""
    rows = query_key.query[..., 0]
    if query_key.allowed is None:
        return torch.full_like(rows, query_key.key.shape[-2], dtype=torch.float64)
    return query_key.allowed.sum(-1).to(rows.device, torch.float64).expand_as(rows)


def _choices(query_key: QueryKey) -> Float[Tensor, "*batch heads n"]:
    """Among how many keys each query's weight is spread, a sink logit counted as one."""
    return _allowed_keys(query_key) + (query_key.sinks is not None)


def _mean(
    query_key: QueryKey, of_queries: Callable[[QueryKey], tuple[Float[Tensor, "*batch n"], Bool[Tensor, "*batch n"]]]
) -> Float[Tensor, "*batch"]:
    """The mean of what is read of each query, over those where it counts; a tile of them at a time."""
    parts = [of_queries(tile) for _, tile in tiles(query_key)]
    values, where = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return torch.where(where, values, 0.0).sum(-1) / where.sum(-1)
