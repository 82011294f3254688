"""Reads the arguments of transformers' attention functions as a Call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnlens.attention.masks import split_mask
from attnlens.errors import ModelError
from attnlens.records import Call


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, Any]
) -> Call:
    """The arguments of transformers' attention functions in one vocabulary.

    Raises ModelError for one that changes the scores and is not known here.
    """
    scaling = more.get("scaling")
    if more.get("sinks") is not None:
        raise ModelError(
            f"{type(module).__name__} gives every query a sink of its own, which attnlens can't compute yet.",
            "Choose another model; one sink for each head is supported.",
        )
    if isinstance(scaling, complex):  # the root of a negative number in a config
        raise ModelError(f"{type(module).__name__} multiplies its scores by {scaling:.3g}.", "Mend its config.json.")
    heads = max(key.shape[1], value.shape[1])  # one of them may be shared by more queries than the other
    if key.shape[1] != value.shape[1]:
        key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    if mask is not None:  # one row may stand for all queries (LightGlue)
        mask = mask[..., : key.shape[2]].expand(*mask.shape[:-2], query.shape[2], -1)
    allowed, added = split_mask(mask)
    bias = more.get("position_bias")
    if bias is not None and added is not None:
        bias = bias + added
    places = more.get("position_ids")
    call = Call(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        allowed=allowed,
        causal=mask is None and _causal_without_mask(module, query, more.get("is_causal")),
        bias=added if bias is None else bias,
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
        dropout=(more.get("dropout") or 0.0) if module.training else 0.0,
        module=module,
        places=places if isinstance(places, Tensor) and places.shape[1:] == query.shape[2:3] else None,
    )
    return _narrowed(call, more)


def _narrowed(call: Call, more: dict[str, Any]) -> Call:
    """The call with those keys alone visible that a sparse model's indexer chose for each query, where it has one.

    Modules put them into the mask that they give to transformers' own functions; others get the numbers of the keys, or
    of blocks of keys (MiniMax-M3).
    """
    indices, blocks = more.get("indices"), more.get("block_indices")
    if indices is None and blocks is None:
        return call
    query, keys = call.query, call.key.shape[2]
    chosen = query.new_zeros(query.shape[0], 1, query.shape[2], keys, dtype=torch.bool)
    if indices is not None:
        chosen = chosen.scatter(-1, indices.long()[:, None], True)
    else:
        indexer = cast("Any", call.module).indexer
        chosen = indexer.build_block_mask(blocks, ~chosen, keys, query.dtype, query.device, None) == 0
    seen = call.visible()
    return replace(call, allowed=chosen if seen is None else chosen & seen, causal=False)


def _causal_without_mask(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """transformers' own rule for a missing mask (its SDPA function)."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
