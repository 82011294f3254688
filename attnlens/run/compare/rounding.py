"""What rounding alone would do: weights moved within the spacing of the number type that they were stored in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.records import Site
from attnlens.weights import Factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""From the widest spacing to the finest."""
BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""The whole number that has a number's bits, and how many of them are behind the binary point."""
DIFFERENT, MANY = 16, 4096
"""So many different numbers, among the first so many, say of which type a weight is."""
MOVED = 12
"""One number of so many moves by a whole spacing: the variance is that of rounding, 1/12 of a spacing squared."""


def stored_type(weight: Tensor) -> torch.dtype:
    """The coarsest number type that holds every number of a weight exactly, whatever the model was loaded as.

    A weight of few different numbers (gains of 1, zeros) tells nothing, and counts as float32.
    """
    first = weight.flatten()[:MANY]
    if len(first.unique()) < min(DIFFERENT, weight.numel()):  # type: ignore[no-untyped-call]
        return torch.float32
    return next((kind for kind in TYPES if _holds(kind, first) and _holds(kind, weight)), torch.float64)


def _holds(kind: torch.dtype, weight: Tensor) -> bool:
    return torch.equal(weight.to(kind).to(weight.dtype), weight)


def site_type(model: PreTrainedModel, site: Site) -> torch.dtype:
    """The coarsest type among the matrices of a site's module: that of its queries and keys."""
    kinds = [stored_type(weight) for weight in model.get_submodule(site.path).parameters() if weight.dim() > 1]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def stored_types(model: PreTrainedModel) -> list[tuple[Tensor, torch.dtype]]:
    """Every weight of the model with the type that it was stored in."""
    return [(weight.data, stored_type(weight.data)) for weight in model.parameters() if weight.is_floating_point()]


@contextmanager
def rounded(types: Sequence[tuple[Tensor, torch.dtype]], generator: torch.Generator) -> Iterator[None]:
    """Inside, one number of twelve is a spacing of its weight's type larger or smaller; afterwards none is."""
    own: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for data, kind in types:
            places = _places(data, generator)
            own.append((data, places, data.take(places)))
            data.put_(places, _moved(own[-1][2], kind, generator))
        yield
    finally:
        for data, places, before in own:
            data.put_(places, before)


def rounded_factors(factors: Factors, kind: torch.dtype, generator: torch.Generator) -> Factors:
    """The same maps with their numbers moved in the same way."""
    maps = factors.maps
    query, key = (nudged(part, kind, generator) for part in (maps.query, maps.key))
    return replace(factors, maps=replace(maps, query=query, key=key))


def nudged(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """The same numbers, one of twelve a spacing of `kind` up or down: mean 0, the variance of rounding."""
    places = _places(tensor, generator)
    return tensor.clone().put_(places, _moved(tensor.take(places), kind, generator))


def _places(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Which numbers move, by their flat index."""
    part, rest = divmod(tensor.numel(), MOVED)
    count = part + int(torch.randint(MOVED, (1,), generator=generator)) // (MOVED - rest)
    return torch.randint(max(tensor.numel(), 1), (count,), generator=generator).to(tensor.device)


def _moved(values: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each number's neighbour in `kind`, away from 0 or towards it; 0 stays 0."""
    whole, behind = BITS[values.dtype]
    step = 1 << max(behind - BITS[kind][1], 0)
    steps = (2 * torch.randint(2, values.shape, generator=generator) - 1).to(values.device, whole) * step
    # numbers of one sign are in the order of their bits
    return torch.where(values == 0, values, (values.view(whole) + steps).view(values.dtype))
