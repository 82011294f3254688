"""Attention in tiles of query rows or, for ties that need whole sequences, in whole matrices; masks and positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import dropout, one_hot
from torch.utils.checkpoint import checkpoint

from attnlens.errors import UsageError
from attnlens.kernels.registry import NEAR_WEIGHT, KeyFilter
from attnlens.kernels.spec import Kernel, score, wide
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from attnlens.kernels.registry import Key

    Near = Bool[Tensor, "#batch #heads rows columns"]
    Tile = Float[Tensor, "batch heads rows columns"]
    Outputs = Float[Tensor, "batch heads queries value_dim"]


GAP = -math.log(torch.finfo(torch.float64).eps)  # a score lower by more than this (36) has a weight below rounding
LOST = -1 / torch.finfo(torch.float32).eps  # a float32 score plus a number below this (−8e6) loses its decimals


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the allowed pairs and the position bias that it adds (None: no bias).

    A constant added to all visible pairs is not a bias (EoMT adds 1). The bias of a masked pair is taken from sequences
    in which the same pair of the same head is visible (Swin's windows); it is 0 if there are no such sequences or if
    their biases differ.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = visible_under(mask)
    most, least = mask.masked_fill(~allowed, -math.inf).amax(0), mask.masked_fill(~allowed, math.inf).amin(0)
    if bool(most.max() <= least.min()):
        return allowed, None
    return allowed, torch.where(allowed, mask, torch.where(most == least, most, 0.0))


def visible_under(mask: Tensor) -> Tensor:
    """Return True for each entry of an additive mask that leaves its pair visible, whatever number marks masked pairs.

    An entry is masked if it is at most LOST (in float16: −32,752). For each head, the other entries are sorted by their
    distance below the largest entry of their row; entries beyond the first gap of more than GAP are masked, too. Thus,
    −100 on top of a position bias is a mask (Swin), but a bias that falls in small steps is not.
    """
    masked = mask <= max(torch.finfo(mask.dtype).min / 2, LOST)
    largest = mask.masked_fill(masked, -math.inf).amax(-1, keepdim=True)
    below = (mask - largest).masked_fill(masked, -math.inf)
    others = [axis for axis in range(mask.dim()) if axis != mask.dim() - 3]
    lowest = torch.zeros_like(below.amin(others, keepdim=True))
    # not strict: an entry exactly GAP below still has a weight above rounding
    while bool(((reached := below.where(below >= lowest - GAP, 0.0).amin(others, keepdim=True)) < lowest).any()):
        lowest = reached
    return below >= lowest


def near_scores(
    call: Call, kernel: Kernel, key: Key, near: Near, rows: slice, columns: slice | Int[Tensor, " columns"]
) -> tuple[Float[Tensor, "batch heads rows columns"], Float[Tensor, "batch heads rows 1"]]:
    """Compute s_ij − max_near s_ij + log γ, and max_near s_ij (0 if no key is near); s are the model's own scores.

    The scores include the bias, and γ is the fitted weight of near keys (1 if not fitted; Zhang et al. 2024, LoLCATs).
    `key` has one head per query head.
    """
    scores = score(wide(call.query[..., rows, :]), wide(key[..., columns, :]), call.scale, call.softcap)
    scores = scores if call.bias is None else scores + call.bias[..., rows, columns]
    largest = scores.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight = kernel.fitted.get(NEAR_WEIGHT)
    shifted = scores - largest
    return shifted if weight is None else shifted + weight.to(shifted)[:, None, None], largest


@dataclass(frozen=True)
class Positions:
    """Positions of a call's queries among its keys."""

    query: Int[Tensor, "#batch queries"]  # index of each query's token among the keys
    first: Int[Tensor, "#batch 1"]  # index of the first token of each sequence; keys before it are padding

    def keys_kept(self, key_filter: KeyFilter, rows: slice, columns: slice) -> Bool[Tensor, "#batch 1 rows columns"]:
        """Return True for each pair of a query in `rows` and a key in `columns` that the filter keeps."""
        keys = torch.arange(columns.start, columns.stop, device=self.query.device) - self.first
        return key_filter.keeps(self.query[:, rows] - self.first, keys)[:, None]


def positions(call: Call, key_filter: KeyFilter) -> Positions:
    """Find the position of each query among the keys, and the first token of each sequence: the first visible key.

    Without a key-value cache, query i has position i; with a cache, its position is that of the last key that it sees.
    Raises UsageError for cross-attention, for a mask from which positions cannot be derived, and if the filter counts
    from the start of the text, but the run uses a cache and the model's sliding window hides the start.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.cross:
        raise position_error("this site attends to another sequence")
    seen = None if call.allowed is None else call.allowed.any(dim=1)
    if key_filter.modifier.from_start and queries != keys and _has_window(call, seen):
        raise UsageError(
            f"{key_filter.modifier.name} counts from the start of the text, but with a key-value cache "
            "this model's own sliding window hides where the text begins.",
            "Run without a key-value cache, leave out layers with a sliding window (--layers), or choose the filter "
            "`window` or `strided`.",
        )
    start = torch.zeros(1, 1, dtype=torch.long, device=call.query.device)
    first = start if seen is None else seen.any(dim=1).int().argmax(-1, keepdim=True)
    if queries == keys or call.causal:
        query = torch.arange(queries, device=call.query.device)[None]
    elif queries == 1 and seen is None:
        query = torch.full_like(first, keys - 1)
    elif seen is None or queries > keys:
        raise position_error(f"there are {queries} queries and {keys} keys, but no mask")
    else:
        query = keys - 1 - seen.flip(-1).int().argmax(-1)
        if queries > 1 and bool((query == query[:, :1]).all()):
            raise position_error(f"all {queries} queries see the same last key")
    return Positions(query, first)


def _has_window(call: Call, seen: Bool[Tensor, "batch queries keys"] | None) -> bool:
    config = getattr(call.module, "config", None)
    # The layer's setting precedes the model's: None marks a layer with full attention among layers with windows.
    if getattr(call.module, "sliding_window", getattr(config, "sliding_window", None)) is not None:
        return True
    if seen is None:
        return False
    starts, sees_any = seen.int().argmax(-1), seen.any(-1)
    return bool((sees_any & (starts != starts[:, -1:]) & sees_any[:, -1:]).any())


def position_error(reason: str) -> UsageError:
    """Build the error for a filter or hybrid whose queries have no known position among the keys."""
    problem = f"A filter or hybrid needs the position of each query among the keys, but {reason}."
    return UsageError(problem, "Leave out the filter or hybrid, or leave out such sites with --part or --layers.")


def by_whole(call: Call, kernel: Kernel) -> Outputs:
    """Compute softmax(X) v for each sequence's real tokens, in O(T²) memory; padded rows are zero.

    X is the part of log k + bias that the kernel's tie keeps; the tie needs whole sequences.
    """
    value = call.paired_value
    output = value.new_zeros(*call.query.shape[:3], value.shape[-1])
    for index, real, rows in _sequences(call, kernel):
        output[index][:, real] = dropout(rows.to(value.dtype), call.dropout) @ value[index][:, real]
    return output


def refuse_hidden(call: Call, kernel: Kernel) -> None:
    """Raise UsageError for a tie that needs whole sequences if a mask hides pairs, or if the model has sinks."""
    name = kernel.tied_by
    if call.sinks is not None:
        problem = f"`{name}` omits terms that depend only on the query, but they matter for attention sinks."
        raise UsageError(problem, "Choose another kernel for this model.")
    real = _find_real_tokens(call)[:, None]
    hidden = call.causal if call.allowed is None else (real[..., None] & real[..., None, :] & ~call.allowed).any()
    if bool(hidden):
        instead = ", or leave out `oracle`: the fitted form runs under any mask" if kernel.oracle else ""
        problem = f"`{name}` needs every pair of tokens, but this head's mask hides some pairs (causal, or a window)."
        raise UsageError(problem, f"Choose bidirectional sites with --part encoder or --layers{instead}.")


def _sequences(call: Call, kernel: Kernel) -> Iterator[tuple[int, Int[Tensor, " n"], Float[Tensor, "heads n n"]]]:
    """Yield each sequence's index, the positions of its real tokens, and its attention weights in float64."""
    key, untied, part = call.paired_key, replace(kernel, tie=None), kernel.part
    assert part is not None  # noqa: S101  # guaranteed by route
    for index, tokens in enumerate(_find_real_tokens(call)):
        sequence, real = slice(index, index + 1), tokens.nonzero()[:, 0]
        query, its_key = (x[sequence, :, real].double() for x in (call.query, key))
        log_k = untied.log(query, its_key, call.scale, softcap=call.softcap)
        if call.bias is not None:
            log_k = log_k + call.bias.expand(len(key), -1, -1, -1)[sequence, :, real][..., real]
        yield index, real, part(log_k)[0].softmax(-1)


def _find_real_tokens(call: Call) -> Bool[Tensor, "batch tokens"]:
    """Return True for each token that is not padding; a token is padding if no query sees its key."""
    batch, _, tokens, _ = call.query.shape
    if call.allowed is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=call.query.device)
    return call.allowed.any(dim=1).any(dim=1).expand(batch, -1)


TILE_BYTES = 4 << 20  # size of a tile of float32 scores; about four tensors of this size exist at a time
TILE_BYTES_ON_GPU = 64 << 20  # in smaller tiles, starting the operations takes longer than computing them


def weights(call: Call, kernel: Kernel, rows: slice = slice(None)) -> Float[Tensor, "batch heads rows keys"]:
    """Compute softmax(log k(q, k) + bias, over the allowed keys) for the queries `rows`, in float32 or better.

    The weight of a sink is not returned, so rows then sum to less than 1. A signed kernel gives k · exp(bias) / Σ,
    which is not finite if the sum is zero. A hard kernel gives weight 1 to the first key with the largest score. The
    row of a query that sees no key is uniform, or zero if the model has sinks or the kernel's tie needs whole
    sequences. Raises UsageError for a tie if queries and keys differ in number, and for a filter or hybrid if the
    queries' positions among the keys are unknown.
    """
    call, kernel = kernel.prepare_call(call)
    if kernel.part is not None:
        attention = call.query.new_zeros(*call.query.shape[:3], call.key.shape[2], dtype=torch.float64)
        for index, real, whole in _sequences(call, kernel):
            attention[index][:, real[:, None], real] = whole
        return attention[..., rows, :]
    rows = slice(*rows.indices(call.query.shape[2]))
    where = _positions(call, kernel)
    return _weights(call, kernel, call.paired_key, where, rows, slice(0, call.key.shape[2]))


def in_tiles(call: Call, kernel: Kernel, *, banded: bool) -> Outputs:
    """Compute the output in tiles of query rows; if `banded`, each tile uses only keys within reach of the filter."""
    key, value, where = call.paired_key, call.paired_value, _positions(call, kernel)
    reach = kernel.filter.reach if banded and kernel.filter is not None else None

    def output(rows: slice) -> Tensor:
        columns = _columns(call, where, reach, rows)
        tile = _weights(call, kernel, key, where, rows, columns).to(call.query.dtype)
        return dropout(tile, call.dropout) @ value[..., columns, :]

    tiles = _tiles(call, reach)
    if len(tiles) == 1:
        return output(tiles[0])
    if torch.is_grad_enabled():  # the backward pass recomputes the weights of each tile, to save memory
        return torch.cat([checkpoint(output, rows, use_reentrant=False) for rows in tiles], dim=-2)
    # written in place, widest tile first: small results between large temporary tensors would fragment the heap
    whole = value.new_empty(*call.query.shape[:3], value.shape[-1])
    for rows in reversed(tiles):
        whole[..., rows, :] = output(rows)
    return whole


def _positions(call: Call, kernel: Kernel) -> Positions | None:
    key_filter = kernel.filter or kernel.near
    return None if key_filter is None else positions(call, key_filter)


def _tiles(call: Call, reach: int | None) -> list[slice]:
    """Split the queries into slices whose tiles fit in TILE_BYTES (TILE_BYTES_ON_GPU); 16 rows are always allowed.

    With `reach`, a slice has at most max(reach, 64) rows.
    """
    batch, heads, queries = call.query.shape[:3]
    # a tile of at most max(reach, 64) rows, with `reach` keys on both sides, is less than 4 · max(reach, 64) wide
    width = call.key.shape[2] if reach is None else min(call.key.shape[2], 4 * max(reach, 64))
    tile_bytes = TILE_BYTES_ON_GPU if call.query.is_cuda else TILE_BYTES
    height = max(16, tile_bytes // (4 * batch * heads * width))
    if reach is not None:
        height = min(height, max(reach, 64))
    return [slice(start, min(start + height, queries)) for start in range(0, queries, height)]


def _columns(call: Call, where: Positions | None, reach: int | None, rows: slice) -> slice:
    """Return a range of keys that contains every key visible to the queries `rows`.

    Without `reach`, the range contains all keys if one of these queries sees no key.
    """
    keys = call.key.shape[2]
    start, stop = 0, min(rows.stop, keys) if call.causal and call.allowed is None else keys
    if where is not None and reach is not None:
        queries = where.query[:, rows]
        first = max(0, int(queries.min()) - reach)
        return slice(min(first, stop - 1), min(int(queries.max()) + reach + 1, stop))
    if call.allowed is not None:
        seen = call.allowed[..., rows, :]
        if bool(seen.any(-1).all()):
            columns = seen.flatten(0, -2).any(0).nonzero()
            start, stop = int(columns[0]), int(columns[-1]) + 1
    return slice(start, stop)


def _weights(call: Call, kernel: Kernel, key: Key, where: Positions | None, rows: slice, columns: slice) -> Tile:
    """Compute one tile of `weights`, for queries `rows` and keys `columns`; `key` has one head per query head."""
    log_k = kernel.log(call.query, key, call.scale, softcap=call.softcap, rows=rows, columns=columns)
    log_k = log_k.to(torch.promote_types(log_k.dtype, torch.float32))
    if call.bias is not None:
        log_k = log_k + call.bias[..., rows, columns]
    seen = call.visible(rows)
    seen = None if seen is None else seen[..., columns]
    if kernel.filter is not None and where is not None:
        visible = where.keys_kept(kernel.filter, rows, columns)
        seen = visible if seen is None else seen & visible
    sinks = None if call.sinks is None else call.sinks.view(1, -1, 1, 1)
    sign = None
    if kernel.signed:
        sign = kernel.sign(call.query, key, call.scale, softcap=call.softcap, rows=rows, columns=columns)
    if kernel.near is not None and where is not None:
        near = where.keys_kept(kernel.near, rows, columns)
        near = near if seen is None else near & seen
        near_logits, largest = near_scores(call, kernel, key, near, rows, columns)
        log_k, sinks = torch.where(near, near_logits, log_k), None if sinks is None else sinks - largest
    if seen is not None:
        # −∞, since allowed keys can have log 0 = −∞; rows that see no key are uniform, unless a sink takes their weight
        blind = ~seen.any(-1, keepdim=True) & (call.sinks is None)
        log_k = torch.where(seen, log_k, torch.where(blind, 0.0, -torch.inf).to(log_k.dtype))
        sign = None if sign is None else torch.where(blind, 1, sign)
    if sign is not None:
        # the maximum cancels in the quotient, and keeps exp from overflowing
        mass = (log_k - log_k.detach().amax(-1, keepdim=True)).exp() * sign
        return mass / mass.sum(-1, keepdim=True)
    if sinks is not None:
        log_k = torch.cat([log_k, sinks.expand(*log_k.shape[:3], 1).to(log_k.dtype)], dim=-1)
    attention = one_hot(log_k.argmax(-1), log_k.shape[-1]).to(log_k.dtype) if kernel.info.hard else log_k.softmax(-1)
    return attention if sinks is None else attention[..., :-1]
