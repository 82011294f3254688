"""Positions of queries and keys in their sequences, and masks apart from position biases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.errors import UsageError
from attnlens.kernels.modifiers import KeyFilter
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

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


@dataclass(frozen=True)
class Positions:
    """Places among the keys of a call."""

    own: Int[Tensor, "#batch queries"]
    """The index, among the keys, of each query's own token."""
    first: Int[Tensor, "#batch 1"]
    """The index of the sequence's first token: what stands before it is padding."""

    def kept(self, found: KeyFilter, rows: slice, columns: slice) -> Bool[Tensor, "#batch 1 rows columns"]:
        """Which of the keys `columns` the filter lets the queries `rows` see; places count from the first token."""
        keys = torch.arange(columns.start, columns.stop, device=self.own.device) - self.first
        return found.keeps(self.own[:, rows] - self.first, keys)[:, None]

    def reached(self, distance: int, rows: slice) -> slice:
        """The keys at most `distance` away from some query of `rows`."""
        own = self.own[:, rows]
        return slice(max(0, int(own.min()) - distance), int(own.max()) + distance + 1)


def positions(call: Call, found: KeyFilter) -> Positions:
    """The place of every query among the keys, and of the sequence's start.

    Without a key-value cache query i is key i. With one there are more keys than queries, and a query's own key is the
    last that it may see. A sequence starts at the first key that any of its queries may see.
    Raises UsageError for cross-attention, where nothing says which keys are the queries' own, and where a filter counts
    from the start of the text, which a model's own sliding window hides once there is a cache.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.cross:
        raise unplaced("this site attends to another sequence")
    seen = None if call.allowed is None else call.allowed.any(dim=1)
    if found.modifier.from_start and queries != keys and _windowed(call, seen):
        raise UsageError(
            f"{found.modifier.name} counts from the start of the text, but with a key-value cache "
            "this model's own sliding window hides where the text begins.",
            "Run without a key-value cache, leave out such layers with --layers, or filter with window or strided.",
        )
    first = torch.zeros(1, 1, dtype=torch.long, device=call.query.device)
    if seen is not None:
        first = seen.any(dim=1).int().argmax(-1, keepdim=True)
    if queries == keys or call.causal:
        own = torch.arange(queries, device=call.query.device)[None]
    elif queries == 1 and seen is None:
        own = torch.full_like(first, keys - 1)
    elif seen is None or queries > keys:
        raise unplaced(f"{queries} queries meet {keys} keys without a mask")
    else:
        own = keys - 1 - seen.flip(-1).int().argmax(-1)
        if queries > 1 and bool((own == own[:, :1]).all()):
            raise unplaced(f"all of the {queries} queries see the same last key")
    return Positions(own, first)


def _windowed(call: Call, seen: Bool[Tensor, "batch queries keys"] | None) -> bool:
    """Whether the module says that it has a sliding window, or its mask shows that it slides."""
    config = getattr(call.module, "config", None)
    # a layer's own word first: None in a layer of full attention beside others that slide
    if getattr(call.module, "sliding_window", getattr(config, "sliding_window", None)) is not None:
        return True
    if seen is None:
        return False
    starts = seen.int().argmax(-1)
    some = seen.any(-1)
    return bool((some & (starts != starts[:, -1:]) & some[:, -1:]).any())


def unplaced(reason: str) -> UsageError:
    """The error for a filter where queries have no place among the keys."""
    return UsageError(
        f"A filter or hybrid needs each query's place among the keys, but {reason}.",
        "Leave out such sites with --part or --layers, or use the kernel without it.",
    )
