"""What rounding alone would do: weights moved within the spacing of the number type that they were stored in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.weights import Factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""From the widest spacing to the finest."""
MOVED = 1 / 24
"""Probability of a step up, and of one down: the variance is that of rounding, 1/12 of a spacing squared."""


def stored_type(model: PreTrainedModel) -> torch.dtype:
    """The coarsest number type that holds every weight exactly, whatever the model was loaded as."""
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    return next(
        (kind for kind in TYPES if all(torch.equal(weight.to(kind).to(weight.dtype), weight) for weight in weights)),
        torch.float64,
    )


def nudged(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each number a spacing of `kind` up or down with a probability of 1/24 each: mean 0, variance as of rounding."""
    drawn = torch.rand(tensor.shape, generator=generator).to(tensor.device)
    steps = (drawn < MOVED).to(tensor.dtype) - (drawn > 1 - MOVED).to(tensor.dtype)
    _, exponent = torch.frexp(tensor.double())
    # frexp's mantissa is in [½, 1), so that 2^(exponent − 1) is the number's own power of two; eps is at 1.
    spacing = torch.ldexp(torch.full_like(tensor, torch.finfo(kind).eps, dtype=torch.float64), exponent - 1)
    return tensor + torch.where(tensor == 0, 0.0, steps * spacing).to(tensor.dtype)


@contextmanager
def rounded(model: PreTrainedModel, kind: torch.dtype, generator: torch.Generator) -> Iterator[None]:
    """Inside, every weight of the model is nudged; afterwards each is what it was."""
    own = [(weight, weight.detach().clone()) for weight in model.parameters() if weight.is_floating_point()]
    try:
        with torch.no_grad():
            for weight, before in own:
                weight.copy_(nudged(before, kind, generator))
        yield
    finally:
        with torch.no_grad():
            for weight, before in own:
                weight.copy_(before)


def rounded_factors(factors: Factors, kind: torch.dtype, generator: torch.Generator) -> Factors:
    """The same maps with their numbers nudged."""
    maps = factors.maps
    query, key = (nudged(part, kind, generator) for part in (maps.query, maps.key))
    return replace(factors, maps=replace(maps, query=query, key=key))
