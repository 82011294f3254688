"""Reads the arguments of transformers' attention functions as a Call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.errors import ModelError
from attnlens.records import Call

GAP = -math.log(torch.finfo(torch.float64).eps)
"""A score that is lower than another by more has no weight beside it: e^−36 is float64's rounding."""

LOST = -1 / torch.finfo(torch.float32).eps
"""A number beside which a float32 score loses all its decimals: −1e9 and the type's least number are beyond it."""


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
    allowed, added = _split(None if mask is None else mask[..., : key.shape[2]])
    bias = more.get("position_bias")
    if bias is not None and added is not None:
        bias = bias + added
    return Call(
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
    )


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are allowed, and what a mask of numbers adds beside that: a position bias, or None.

    One number for all visible pairs is no bias (EoMT adds 1). A masked pair has the bias that the same head gives it in
    another sequence (Swin's windows), where all that see it agree; else 0.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = _seen(mask)
    most, least = mask.masked_fill(~allowed, -math.inf).amax(0), mask.masked_fill(~allowed, math.inf).amin(0)
    if bool(most.max() <= least.min()):
        return allowed, None
    return allowed, torch.where(allowed, mask, torch.where(most == least, most, 0.0))


def _seen(mask: Tensor) -> Tensor:
    """Which entries of an added mask leave their pair visible, whatever number stands for a masked one.

    Masked is what is so low that a float32 score beside it is lost; and what lies so far below its row's largest entry
    that its weight is below rounding, with a gap of that width above it in which its head has no entry. So −100 on top
    of a position bias is a mask (Swin), and a bias that falls with distance in small steps is none (ALiBi).
    """
    masked = mask <= max(torch.finfo(mask.dtype).min / 2, LOST)
    largest = mask.masked_fill(masked, -math.inf).amax(-1, keepdim=True)
    below = (mask - largest).masked_fill(masked, -math.inf)
    others = [axis for axis in range(mask.dim()) if axis != mask.dim() - 3]
    lowest = torch.zeros_like(below.amin(others, keepdim=True))
    # Not strict: what lies exactly at the gap's end still has a weight that is not lost.
    while bool(((reached := below.where(below >= lowest - GAP, 0.0).amin(others, keepdim=True)) < lowest).any()):
        lowest = reached
    return below >= lowest


def _causal_without_mask(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """transformers' own rule for a missing mask (its SDPA function)."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
