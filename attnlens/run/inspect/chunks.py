"""Cuts a batch's queries and keys into pieces without padding or NaN that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnlens.hooks.survey import real_parts
from attnlens.records import QueryKey

PIECE_BYTES = 32 * 2**20
"""Largest (sequences × heads × tokens × tokens) float64 matrix that is analysed at once."""


def pieces(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """A batch without its padding, in pieces whose score matrices stay under PIECE_BYTES each, with their sequences.

    A key that no query may see is padding, and in cross-attention a query that may see none. Sequences of one length
    stay together; long ones are cut by heads.
    """
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        rest = query_key.sequences(batch, queries, keys)
        one_head = 8 * rest.query.shape[-2] * rest.key.shape[-2]
        together = max(1, PIECE_BYTES // (one_head * len(rest.heads)))
        heads = max(1, min(len(rest.heads), PIECE_BYTES // one_head))
        for start in range(0, len(batch), together):
            rows = range(start, min(start + together, len(batch)))
            some = rest.sequences(rows, slice(None), slice(None))
            for head in range(0, len(rest.heads), heads):
                yield [batch[row] for row in rows], some.select(range(head, min(head + heads, len(rest.heads))))


def sequences(query_key: QueryKey) -> Iterator[tuple[int, QueryKey]]:
    """Each sequence of a batch by itself and without its padding, with its number in the batch."""
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Which heads have finite queries and keys in every sequence, by index."""
    # a sum is finite where all its terms are, and needs no mask of their size
    query, key = (part.sum((-1, -2), dtype=torch.float64).isfinite() for part in (query_key.query, query_key.key))
    fine = query & key[..., list(query_key.key_of)]
    return fine.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()
