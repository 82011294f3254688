"""Attention weights written out for a tile of query rows at a time, or of whole matrices under a tie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import dropout, one_hot
from torch.utils.checkpoint import checkpoint

from attnlens.attention.masks import Positions, positions
from attnlens.attention.sums import near_scores
from attnlens.errors import UsageError
from attnlens.kernels.spec import Kernel
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def by_whole(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries value_dim"]:
    """softmax(what the tie leaves of log k + bias) v over each sequence's real tokens; rows of padding are zero.

    O(T²) memory, one sequence of the batch at a time; in float64, as means are taken away.
    """
    value = call.paired_value
    found = value.new_zeros(*call.query.shape[:3], value.shape[-1])
    for index, real, rows in _sequences(call, kernel):
        found[index][:, real] = dropout(rows.to(value.dtype), call.dropout) @ value[index][:, real]
    return found


def whole_weights(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries keys"]:
    """The attention matrices of `by_whole`, in float64; rows and columns of padding are zero."""
    found = call.query.new_zeros(*call.query.shape[:3], call.key.shape[2], dtype=torch.float64)
    for index, real, rows in _sequences(call, kernel):
        found[index][:, real[:, None], real] = rows
    return found


def refuse_hidden(call: Call, kernel: Kernel) -> None:
    """Raise UsageError where the tie's parts are no property of the model: a mask hides pairs, or a sink competes."""
    name = kernel.tied_by
    if call.sinks is not None:
        raise UsageError(
            f"{name} leaves query-only terms out, and this model's attention sinks compete with them.",
            "Choose another kernel for this model.",
        )
    if _hides(call):
        instead = "; or leave out oracle: the fitted form runs under any mask" if kernel.oracle else ""
        raise UsageError(
            f"{name} needs every pair of tokens, and a mask hides some here (causal, or a window): the parts of log k "
            "are no property of such a head.",
            f"Choose the bidirectional sites: --part encoder, or --layers{instead}.",
        )


def _sequences(call: Call, kernel: Kernel) -> Iterator[tuple[int, Int[Tensor, " n"], Float[Tensor, "heads n n"]]]:
    """Each sequence of the batch: its number, its real tokens' places, their attention matrices."""
    key, untied, part = call.paired_key, replace(kernel, tie=None), kernel.part
    assert part is not None  # noqa: S101  # route has seen to it
    for index, kept in enumerate(_real(call)):
        one, real = slice(index, index + 1), kept.nonzero()[:, 0]
        query, its_key = (x[one, :, real].double() for x in (call.query, key))
        log_k = untied.log(query, its_key, call.scale, softcap=call.softcap)
        if call.bias is not None:
            log_k = log_k + call.bias.expand(len(key), -1, -1, -1)[one, :, real][..., real]
        yield index, real, part(log_k)[0].softmax(-1)


def _real(call: Call) -> Bool[Tensor, "batch tokens"]:
    """Which tokens are no padding: those that some query may see."""
    batch, _, tokens, _ = call.query.shape
    if call.allowed is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=call.query.device)
    return call.allowed.any(dim=1).any(dim=1).expand(batch, -1)


def _hides(call: Call) -> bool:
    """Whether some real token may not see another."""
    if call.allowed is None:
        return call.causal
    real = _real(call)[:, None]
    return bool((real[..., None] & real[..., None, :] & ~call.allowed).any())


TILE_BYTES = 4 << 20
"""How large one tile of scores may be, in float32; about four such tensors live at a time."""


def weights(call: Call, kernel: Kernel, rows: slice = slice(None)) -> Float[Tensor, "batch heads rows keys"]:
    """softmax(log k(q, k) + bias, over the keys allowed) of the queries `rows`, in float32 or better.

    The share of a sink is left out. A signed kernel gives k · exp(bias) / Σ, not finite where the sum is zero; the hard
    kernel gives 1 to the largest score, the first of equal ones. A row that may see nothing is uniform, as in
    transformers' eager attention; under a tie of whole sequences, rows of padding are zero. Raises UsageError for a tie
    or a filter where queries have no place among the keys.
    """
    call, kernel = kernel.prepared(call)
    if kernel.part is not None:
        return whole_weights(call, kernel)[..., rows, :]
    rows = slice(*rows.indices(call.query.shape[2]))
    where = _places(call, kernel)
    return _weights(call, kernel, call.paired_key, where, rows, slice(0, call.key.shape[2]))


def in_tiles(call: Call, kernel: Kernel, *, banded: bool) -> Float[Tensor, "batch heads queries value_dim"]:
    """The output from one tile of rows after another; `banded`: each with the keys alone that its filter can reach.

    Where gradients are asked for, a tile's weights are computed again in the backward pass, so that memory stays
    O(T · tile) there, too.
    """
    value = call.paired_value
    where = _places(call, kernel)
    reach = kernel.filter.reach if banded and kernel.filter is not None else None
    output = partial(_tile, call, kernel, call.paired_key, value, where, reach)
    tiles = _tiles(call, reach)
    if len(tiles) == 1:
        return output(tiles[0])
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(output, rows, use_reentrant=False) for rows in tiles], dim=-2)
    # Written in place, the widest tile first: small results between large scratch tensors would scatter the heap.
    whole = value.new_empty(*call.query.shape[:3], value.shape[-1])
    for rows in reversed(tiles):
        whole[..., rows, :] = output(rows)
    return whole


def _places(call: Call, kernel: Kernel) -> Positions | None:
    """Places among the keys, where the kernel asks for them."""
    found = kernel.filter or kernel.near
    return None if found is None else positions(call, found)


def _tile(
    call: Call,
    kernel: Kernel,
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys value_dim"],
    where: Positions | None,
    reach: int | None,
    rows: slice,
) -> Float[Tensor, "batch heads rows value_dim"]:
    columns = _columns(call, where, reach, rows)
    found = _weights(call, kernel, key, where, rows, columns).to(call.query.dtype)
    return dropout(found, call.dropout) @ value[..., columns, :]


def _tiles(call: Call, reach: int | None) -> list[slice]:
    """Equal slices of the queries within the budget; a band's tiles are about as high as it is wide."""
    batch, heads, queries = call.query.shape[:3]
    width = call.key.shape[2] if reach is None else min(call.key.shape[2], 4 * max(reach, 64))
    height = max(16, TILE_BYTES // (4 * batch * heads * width))
    if reach is not None:
        height = min(height, max(reach, 64))
    return [slice(start, min(start + height, queries)) for start in range(0, queries, height)]


def _columns(call: Call, where: Positions | None, reach: int | None, rows: slice) -> slice:
    """The keys that some query of the tile may see; all of them if one of the queries may see none."""
    keys = call.key.shape[2]
    start, stop = 0, min(rows.stop, keys) if call.causal and call.allowed is None else keys
    if where is not None and reach is not None:
        band = where.reached(reach, rows)
        return slice(min(band.start, stop - 1), min(band.stop, stop))
    if call.allowed is not None:
        seen = call.allowed[..., rows, :]
        if bool(seen.any(-1).all()):
            columns = seen.flatten(0, -2).any(0).nonzero()
            start, stop = int(columns[0]), int(columns[-1]) + 1
    return slice(start, stop)


def _seen(
    call: Call, kernel: Kernel, where: Positions | None, rows: slice, columns: slice
) -> Bool[Tensor, "#batch #heads rows columns"] | None:
    """Which keys the mask and the filter allow; None means all."""
    seen = call.visible(rows)
    seen = None if seen is None else seen[..., columns]
    if kernel.filter is None or where is None:
        return seen
    kept = where.kept(kernel.filter, rows, columns)
    return kept if seen is None else seen & kept


def _weights(
    call: Call,
    kernel: Kernel,
    key: Float[Tensor, "batch heads keys head_dim"],
    where: Positions | None,
    rows: slice,
    columns: slice,
) -> Float[Tensor, "batch heads rows columns"]:
    log_k = kernel.log(call.query, key, call.scale, softcap=call.softcap, rows=rows, columns=columns)
    log_k = log_k.to(torch.promote_types(log_k.dtype, torch.float32))
    if call.bias is not None:
        log_k = log_k + call.bias[..., rows, columns]
    seen = _seen(call, kernel, where, rows, columns)
    sign, sinks = None, None if call.sinks is None else call.sinks.view(1, -1, 1, 1)
    if kernel.near is not None and where is not None:
        near = where.kept(kernel.near, rows, columns)
        near = near if seen is None else near & seen
        own, largest = near_scores(call, kernel, key, near, rows, columns)
        log_k, sinks = torch.where(near, own, log_k), None if sinks is None else sinks - largest
    if kernel.signed:
        sign = kernel.sign(call.query, key, call.scale, softcap=call.softcap, rows=rows, columns=columns)
    if seen is not None:
        # −∞ and no least number, which would win over log 0 = −∞ of the keys that are allowed; a sink takes blind rows
        blind = ~seen.any(-1, keepdim=True) & (call.sinks is None)
        log_k = torch.where(seen, log_k, torch.where(blind, 0.0, -torch.inf).to(log_k.dtype))
        sign = None if sign is None else torch.where(blind, 1, sign)
    return _normalised(log_k, sign, sinks, hard=kernel.info.hard)


def _normalised(
    log_k: Float[Tensor, "batch heads rows columns"],
    sign: Float[Tensor, "batch heads rows columns"] | None,
    sinks: Float[Tensor, "#batch heads #rows 1"] | None,
    *,
    hard: bool,
) -> Float[Tensor, "batch heads rows columns"]:
    """The weights of the keys from log|k|, masked with −∞, and the sign of k."""
    if sign is not None:
        mass = (log_k - log_k.detach().amax(-1, keepdim=True)).exp() * sign
        return mass / mass.sum(-1, keepdim=True)
    keys = log_k.shape[-1]
    if sinks is not None:
        column = sinks.expand(*log_k.shape[:3], 1)
        log_k = torch.cat([log_k, column.to(log_k.dtype)], dim=-1)
    if hard:
        return one_hot(log_k.argmax(-1), log_k.shape[-1])[..., :keys].to(log_k.dtype)
    return log_k.softmax(-1)[..., :keys]
