"""Cuts a batch's queries and keys into pieces without padding or NaN that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from attnlens.records import Call, QueryKey

PIECE_BYTES = 32 * 2**20
"""Largest (sequences × heads × tokens × tokens) float64 matrix that is analysed at once."""


def hiding_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """The same computation, in which queries of padding see nothing.

    In self-attention they are the tokens that nobody sees; in cross-attention only the mask among the inputs tells.
    """
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def pieces(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """A batch without its padding, in pieces whose score matrices stay under PIECE_BYTES each, with their sequences.

    A key that no query may see is padding, and in cross-attention a query that may see none. Sequences of one length
    stay together; long ones are cut by heads.
    """
    for batch, queries, keys in _same_length(query_key):
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
    for batch, queries, keys in _same_length(query_key):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def _same_length(query_key: QueryKey) -> Iterator[tuple[list[int], Tensor | slice, Tensor | slice]]:
    """Sequences of a batch with their queries and keys; one in which no query sees a key is left out."""
    batch = query_key.query.shape[0]
    every = list(range(batch)), slice(None), slice(None)
    if query_key.allowed is None:
        yield every
        return
    keys = query_key.allowed.any(dim=-2).any(dim=-2)
    queries = query_key.allowed.any(dim=-1).any(dim=-2) if query_key.site.part == "cross" else keys
    if bool(keys.all()) and bool(queries.all()):
        yield every
        return
    for sequence in keys.any(-1).nonzero().flatten().tolist():
        yield [sequence], queries[sequence].nonzero().squeeze(-1), keys[sequence].nonzero().squeeze(-1)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Which heads have finite queries and keys in every sequence, by index."""
    fine = query_key.query.isfinite().all(-1).all(-1) & query_key.paired_key.isfinite().all(-1).all(-1)
    return fine.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()
