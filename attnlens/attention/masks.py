"""Tells masked pairs from a position bias in what is added to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GAP = -math.log(torch.finfo(torch.float64).eps)
"""A score that is lower than another by more has no weight beside it: e^−36 is float64's rounding."""

LOST = -1 / torch.finfo(torch.float32).eps
"""A number beside which a float32 score loses all its decimals: −1e9 and the type's least number are beyond it."""


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are allowed, and what a mask of numbers adds beside that: a position bias, or None.

    One number for all visible pairs is no bias (EoMT adds 1). A masked pair has the bias that the same head gives it in
    another sequence (Swin's windows), where all that see it agree; else 0.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = visible_under(mask)
    most, least = mask.masked_fill(~allowed, -math.inf).amax(0), mask.masked_fill(~allowed, math.inf).amin(0)
    if bool(most.max() <= least.min()):
        return allowed, None
    return allowed, torch.where(allowed, mask, torch.where(most == least, most, 0.0))


def visible_under(mask: Tensor) -> Tensor:
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
