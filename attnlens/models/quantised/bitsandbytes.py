"""What codes of bitsandbytes stand for: LLM.int8, and nf4 and fp4 with their tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from attnlens.models.quantised.parts import CodesError, Parts, PartShapes, sizes

QUANT_STATE = ".quant_state.bitsandbytes__"
"""How the name of what bitsandbytes says of its codes goes on behind the weight's, before their kind."""


def in_state(shapes: PartShapes, read: Callable[[str], Tensor], _settings: object) -> tuple[int, ...]:
    """The shape that bitsandbytes says of its four-bit codes."""
    return sizes(_state({part: read(part) for part in shapes if part.startswith(QUANT_STATE)}).get("shape"))


def four_bits(parts: Parts, _settings: dict[str, Any]) -> Tensor:
    """map[code] · absmax of each block, two codes a byte, the higher bits first (bitsandbytes nf4 and fp4)."""
    state = _state(parts)
    shape, side = state.get("shape") or [], state.get("blocksize")
    codes, values = parts[""].contiguous().view(torch.uint8).flatten(), parts.get(".quant_map")
    counts = isinstance(shape, list) and all(isinstance(size, int) and size > 0 for size in shape)
    if not counts or not isinstance(side, int) or side < 1 or not 0 <= 2 * len(codes) - prod(shape) <= 1:
        raise CodesError("its codes don't have the shape that it says")
    if values is None or values.shape != (16,):
        raise CodesError("it has no table of sixteen values")
    count = prod(shape)
    found = values.float()[torch.stack([codes >> 4, codes & 15], -1).flatten().long()[:count]]
    return (found * _by_block(_largest(parts, state), side, count)).reshape(*shape)


def _state(parts: Parts) -> dict[str, Any]:
    """What bitsandbytes says of the codes in JSON, which it stores as a tensor of bytes."""
    stored = next((value for part, value in parts.items() if part.startswith(QUANT_STATE)), None)
    try:
        found = json.loads(bytes(stored.tolist())) if stored is not None and stored.numel() < 2**16 else None
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CodesError("nothing says what its codes are")
    return found


def _largest(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """absmax of each block, which may itself be codes with a map, an absmax of each block of them, and an offset."""
    absmax = parts.get(".absmax")
    if absmax is None:
        raise CodesError("it has no absmax")
    if absmax.is_floating_point():
        return absmax.float()
    values, outer, side = parts.get(".nested_quant_map"), parts.get(".nested_absmax"), state.get("nested_blocksize")
    offset = state.get("nested_offset")
    if values is None or outer is None or values.shape != (256,) or absmax.dtype != torch.uint8:
        raise CodesError("its absmax can't be decoded")
    if not isinstance(side, int) or side < 1 or not isinstance(offset, int | float):
        raise CodesError("its absmax can't be decoded")
    return values.float()[absmax.long()] * _by_block(outer.float(), side, len(absmax)) + offset


def _by_block(largest: Tensor, side: int, count: int) -> Tensor:
    if largest.shape != (ceil(count / side),):
        raise CodesError(f"{len(largest)} blocks of {side} are no {count} codes")
    return largest.repeat_interleave(min(side, count))[:count]


def eight_bits(parts: Parts, _settings: dict[str, Any]) -> Tensor:
    """codes · SCB/127 row by row (bitsandbytes LLM.int8)."""
    codes, largest = parts[""], parts.get(".SCB")
    order = parts.get(".weight_format")
    if codes.dtype != torch.int8 or largest is None or largest.shape != codes.shape[:1]:
        raise CodesError("its codes are no int8 with an SCB for each row")
    if order is not None and bool(order.any()):
        raise CodesError("its codes are not in the order of rows")
    return codes.float() * largest.float()[:, None] / 127
