"""Parameters, operations and cached bytes of a latent's key heads and their query heads at a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteSizes:
    """What one site's queries and keys are made of."""

    query_width: int
    """d_model: entries of an input of the queries."""
    key_width: int
    """The same of the keys."""
    head_dim: int
    value_dim: int
    """Entries of a key, and of a value."""
    query_bias: bool
    key_bias: bool
    """Whether there are biases."""
    folds: bool
    """Whether maps can be multiplied into W_Q and W_K: no rotation and no norm stands between."""
    folds_before: bool
    """Whether maps of keys before the rotation can be multiplied into W_K: no norm stands between."""
    keys_seen: float
    """Keys that a query sees, mean over the sequence."""
    keys_a_query: float
    """Keys made for each query that is made: 1, but in cross-attention."""
    number_bytes: int
    """Bytes of a cached number."""
    cached: bool
    """Whether a key-value cache keeps a key for every token: in a decoder's self-attention."""


@dataclass(frozen=True)
class LatentSizes:
    """What one latent is read and written by."""

    heads: int
    """Query heads that read it."""
    keys: int
    """Key heads that share it."""
    rank: int
    """Numbers that it keeps of a token."""
    before: bool = False
    """Whether it is of keys before the rotation, which are made of it again."""


@dataclass(frozen=True)
class Costs:
    """What a latent's key heads and their query heads take."""

    parameters: float
    flops: float
    """For each query's token."""
    cache: float
    """Bytes of a token."""
    rebuilding: float = 0.0
    """Operations that make the keys of one cached token again of the latent."""


def costs(size: SiteSizes, latent: LatentSizes) -> Costs:
    """Of the key heads of one latent and their query heads; at full rank, of the model's own.

    A product of m × n numbers takes 2mn operations; a score 2 for each entry of its key; a cached token keeps the
    latent and all of its values. Where maps fold, one W_K B (d_model × r) serves the latent, and queries are made by
    W_Q A of each head (d_model × r), or by W_Q and then A (head_dim × r for each key head): whichever takes fewer
    operations, or else fewer numbers. The second is cheaper where a latent that key heads share is wider than a head.
    Where maps don't fold, W_Q and W_K stay, A and B (head_dim × r for each key head) come on top, and only scores and
    cache shrink; rank 0 needs none of them. Before the rotation queries stay as they are, and keys are made of the
    latent.
    """
    full = latent.rank == size.head_dim * latent.keys
    if full or (latent.rank == 0 and not latent.before):
        return _bare(size, latent)
    return _before(size, latent) if latent.before else _after(size, latent)


def _after(size: SiteSizes, latent: LatentSizes) -> Costs:
    """Of the ways to make queries, that of the fewest operations; W_K B, or W_K and B."""
    if not size.folds:
        return _made(size, latent, query_folds=False)
    ways = (_made(size, latent, query_folds=folds) for folds in (True, False))
    return min(ways, key=lambda found: (found.flops, found.parameters))


def _made(size: SiteSizes, latent: LatentSizes, *, query_folds: bool) -> Costs:
    """W_Q A, or W_Q and A; W_K B, or W_K and B."""
    heads, keys, rank = latent.heads, latent.keys, latent.rank
    up = size.head_dim * rank
    query, query_map = (rank, 0) if query_folds else (size.head_dim, up)
    key, key_map = (rank, 0) if size.folds else (keys * size.head_dim, keys * up)
    made = heads * (size.query_width * query + query_map) + size.keys_a_query * (size.key_width * key + key_map)
    return Costs(
        parameters=heads * (size.query_width + size.query_bias) * query
        + keys * query_map
        + (size.key_width + size.key_bias) * key
        + key_map,
        flops=2 * made + 2 * rank * heads * size.keys_seen,
        cache=_cached(size, latent),
    )


def _before(size: SiteSizes, latent: LatentSizes) -> Costs:
    """W_Q; W_K B and A, or W_K, B and A."""
    whole = latent.keys * size.head_dim
    queries = latent.heads * (size.query_width + size.query_bias) * size.head_dim
    down = size.key_width * latent.rank if size.folds_before else size.key_width * whole + whole * latent.rank
    up = latent.rank * whole
    bias = whole if size.folds_before or not size.key_bias else 2 * whole
    made = latent.heads * size.query_width * size.head_dim + size.keys_a_query * (down + up)
    return Costs(
        parameters=queries + down + up + bias,
        flops=2 * made + 2 * size.head_dim * latent.heads * size.keys_seen,
        cache=_cached(size, latent),
        rebuilding=2.0 * up,
    )


def _bare(size: SiteSizes, latent: LatentSizes) -> Costs:
    """W_Q and W_K alone, of the rank that the latent has: all of it, or none."""
    width = size.head_dim if latent.rank else 0
    queries, keys = latent.heads * width, latent.keys * width
    made = queries * size.query_width + size.keys_a_query * keys * size.key_width
    return Costs(
        parameters=queries * (size.query_width + size.query_bias) + keys * (size.key_width + size.key_bias),
        flops=2 * made + 2 * width * latent.heads * size.keys_seen,
        cache=_cached(size, latent),
    )


def _cached(size: SiteSizes, latent: LatentSizes) -> float:
    return (latent.rank + latent.keys * size.value_dim) * size.number_bytes if size.cached else 0.0
