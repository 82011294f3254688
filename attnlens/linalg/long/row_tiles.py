"""Matrices of long sequences, formed for a tile of query rows at a time and never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import QueryKey

LONG = 2048**2
"""A head with more pairs of queries and keys is long: its matrices are read in tiles, and its spectra not whole. At
2,048 tokens the full spectra of a head take 7 s on one core, at 8,192 tokens 64 times as much."""
TILE = 1 << 22
"""Numbers in one tile: 32 MB of float64, of which about five live at a time."""


def is_long(query_key: QueryKey) -> bool:
    """Whether a head has more than LONG pairs of queries and keys."""
    return query_key.query.shape[-2] * query_key.key.shape[-2] > LONG


def tiles(query_key: QueryKey) -> Iterator[tuple[slice, QueryKey]]:
    """Consecutive queries with the keys that they may see; all at once where a head is not long."""
    n, m = query_key.query.shape[-2], query_key.key.shape[-2]
    if not is_long(query_key):
        yield slice(0, n), query_key
        return
    height = max(1, TILE // (m * query_key.query[..., 0, 0].numel()))
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        yield rows, query_key.rows(rows)


def each_head(
    query_key: QueryKey, function: Callable[[QueryKey], float | tuple[float, ...]]
) -> Float[Tensor, "*shape"]:
    """`function` of every head on every sequence, one after another, as batches of one sequence and one head."""
    lead = query_key.query.shape[:-2]
    flat = query_key if len(lead) == 2 else _with_batch(query_key)
    found = [
        function(flat.sequences([number], slice(None), slice(None)).select([head]))
        for number in range(flat.query.shape[0])
        for head in range(lead[-1])
    ]
    values = torch.tensor(found, dtype=torch.float64, device=query_key.query.device)
    return values.reshape(*lead, *values.shape[1:])


def _with_batch(query_key: QueryKey) -> QueryKey:
    """One sequence without a batch axis, as a batch of one."""
    masks = query_key.allowed, query_key.bias
    allowed, bias = (None if mask is None else mask[None] for mask in masks)
    batched = replace(query_key, query=query_key.query[None], key=query_key.key[None], allowed=allowed, bias=bias)
    return replace(batched, value=None, inputs=None)
