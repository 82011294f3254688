"""Parameters, operations and cached bytes of a key head and its query heads at a rank."""

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
    """Whether the maps can be multiplied into W_Q and W_K: no rotation and no norm stands between."""
    keys_seen: float
    """Keys that a query sees, mean over the sequence."""
    keys_a_query: float
    """Keys made for each query that is made: 1, but in cross-attention."""
    number_bytes: int
    """Bytes of a cached number."""
    cached: bool
    """Whether a key-value cache keeps a key for every token: in a decoder's self-attention."""


@dataclass(frozen=True)
class Costs:
    """What one key head and its query heads take."""

    parameters: float
    flops: float
    """For each query's token."""
    cache: float
    """Bytes of a token."""


def costs(size: SiteSizes, group: int, rank: int) -> Costs:
    """Of one key head of that rank and the `group` query heads that share it; at rank head_dim, of the model's own.

    Where the maps fold, W_Q A and W_K B are d_model × r. Where they don't, W_Q and W_K stay, A and B (head_dim × r, one
    of each for the group) come on top, and only scores and cache shrink; rank 0 needs none of them. A product of m × n
    numbers takes 2mn operations; a score 2r; a cached token keeps r numbers of its key and all of its value.
    """
    bare = rank in (0, size.head_dim) or size.folds
    width = rank if bare else size.head_dim
    maps = 0 if bare else size.head_dim * rank
    query, key = (
        w * width + width * bias for w, bias in ((size.query_width, size.query_bias), (size.key_width, size.key_bias))
    )
    made = group * (size.query_width * width + maps) + size.keys_a_query * (size.key_width * width + maps)
    return Costs(
        parameters=group * query + key + 2 * maps,
        flops=2 * made + 2 * rank * group * size.keys_seen,
        cache=(rank + size.value_dim) * size.number_bytes if size.cached else 0.0,
    )
