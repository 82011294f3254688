"""Predictions of hypotheses about how one layer became another, and helpers that several hypotheses share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from attnlens.maths.diagnosis.layer import ROLES, Layer, Parts, turn_from

if TYPE_CHECKING:
    from jaxtyping import Float


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
    second_spacing: float  # relative spacing of the second's type
    head_dim: int
    heads: tuple[int, ...] = ()  # numbers of these heads; empty for a part without heads
    inputs_first: bool = False  # True if the rows of a matrix are its inputs
    offset: float = 0.0  # what a norm adds to its stored weight to make this gain


def show_factor(factor: float) -> str:
    """Return a factor with at least two digits of its difference from 1."""
    change = abs(factor - 1)
    digits = 4 if change == 0 else max(4, 2 - math.floor(math.log10(change)))
    return f"{factor:.{digits}g}"


BETTER = 0.5
"""A structural hypothesis is considered if it at least halves the angle between rows of A and B."""
KINDS = ("weight", "bias")
PERMUTED = ("query", "key")
SIDES = (PERMUTED, ("output", "value"))  # pairs of roles with a product in each head; the first has the query heads


def present_roles(*layers: Layer, roles: Sequence[str] = ROLES, kind: str = "weight") -> list[str]:
    """Return the roles that have this kind of part in all layers."""
    return [role for role in roles if all(f"{role}.{kind}" in layer.parts for layer in layers)]


def are_better(new: Float[Tensor, " heads"], old: Float[Tensor, " heads"]) -> Tensor:
    """Return which heads are closer to their prediction than to the first model's head, by a factor."""
    return (new < BETTER * old) & (old > 0)


def mean_angles(first: Tensor, second: Tensor) -> Float[Tensor, " heads"]:
    """Compute the mean sine of the angles between the rows of each head."""
    return turn_from(first.flatten(0, 1), second.flatten(0, 1)).view(first.shape[:2]).mean(1)


def query_heads_of(key_heads: Sequence[int], layer: Layer) -> tuple[int, ...]:
    """Return the query heads that read these key heads."""
    heads, kv_heads = len(layer.parts["query.weight"]), len(layer.parts["key.weight"])
    return tuple(head for head in range(heads) if head * kv_heads // heads in key_heads)


def tensors_between(layer: Layer, roles: Sequence[str]) -> list[str]:
    """Return the tensors by coordinate of a head, other than gains, that can act between both projections."""
    shapes = [layer.parts[f"{role}.weight"].shape for role in roles]
    sizes = {size for heads, size, _ in shapes for size in (size, heads * size)}
    gains = [f"{role}.gain" for role in ROLES]
    return [name for name in layer.parts_along(*sizes) if name not in gains]
