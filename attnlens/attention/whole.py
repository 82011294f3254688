"""Attention under ties that change a sequence's whole matrix of log k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import dropout

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
