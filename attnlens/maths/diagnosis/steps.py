"""Hypotheses about how one layer became another, in registries: structural ones, and ones about single tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from attnlens.maths.diagnosis.layer import Layer, Parts


@dataclass(frozen=True)
class Step:
    """The prediction of a structural hypothesis: the parts of the second layer, from those of the first."""

    hypothesis: str
    text: str  # what the second layer is, as the end of a sentence
    repair: str | None
    parts: Parts  # predicted parts
    heads: tuple[int, ...] = ()  # query heads concerned; empty for all
    harmless: bool = False  # True if attention is the same


@dataclass(frozen=True)
class Fit:
    """The prediction of a hypothesis on one tensor."""

    hypothesis: str
    text: str  # with {parts}, the tensors concerned, {number} and its plural {s}
    repair: str | None
    predicted: Tensor
    harmless: bool = False
    number: int = 0  # bits or rank; of several tensors the largest counts


Structural = Callable[[Layer, Layer], Iterator[Step]]
OfTensor = Callable[["Pair"], Iterator[Fit]]


@dataclass(frozen=True)
class Pair:
    """One part of both layers, or some heads of it."""

    name: str
    first: Tensor
    second: Tensor
    is_gain: bool
    spacing: float  # relative spacing of the coarser type in which the two are stored
    finer: float  # relative spacing of the finer type
    head_dim: int
    heads: tuple[int, ...] = ()  # numbers of these heads; empty for a part without heads


def show_factor(factor: float) -> str:
    """Return a factor with at least two digits of its difference from 1."""
    change = abs(factor - 1)
    digits = 4 if change == 0 else max(4, 2 - math.floor(math.log10(change)))
    return f"{factor:.{digits}g}"


STRUCTURAL: list[Structural] = []
"""Hypotheses on several tensors, in the order in which they are preferred."""
OF_TENSOR: list[OfTensor] = []
"""Hypotheses on single tensors, in the order in which they are preferred."""


def structural(function: Structural) -> Structural:
    """Register a structural hypothesis."""
    STRUCTURAL.append(function)
    return function


def of_tensor(function: OfTensor) -> OfTensor:
    """Register a hypothesis on single tensors."""
    OF_TENSOR.append(function)
    return function
