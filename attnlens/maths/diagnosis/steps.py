"""Predictions of hypotheses about how one layer became another, and helpers that several hypotheses share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from attnlens.maths.diagnosis.layer import ROLES, Layer, Parts, sines_between

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Step:
    """The prediction of a structural hypothesis: parts of the second layer, computed from those of the first."""

    hypothesis: str  # name of the hypothesis
    text: str  # how the second layer differs, as a clause
    repair: str | None  # how to undo the difference, as an imperative; None if there is nothing to undo
    parts: Parts  # predicted parts
    heads: tuple[int, ...] = ()  # query heads concerned; empty for all
    harmless: bool = False  # True if the layer's output is the same


@dataclass(frozen=True)
class Fit:
    """The prediction of a hypothesis on one tensor."""

    hypothesis: str  # name of the hypothesis; it can contain {number} and the plural ending {s}
    text: str  # difference as a clause with {parts}, the tensors concerned; it can contain {number} and {s}
    repair: str | None  # as in Step
    predicted: Tensor  # predicted tensor of the second layer
    harmless: bool = False  # as in Step
    number: int = 0  # bits or rank; the largest is shown if several tensors have the same cause


Structural = Callable[[Layer, Layer], Iterator[Step]]
TensorHypothesis = Callable[["Pair"], Iterator[Fit]]


@dataclass(frozen=True)
class Pair:
    """A part of both layers, or some heads of this part."""

    name: str
    first: Tensor  # A, the part of the first layer
    second: Tensor  # B, the part of the second layer
    is_gain: bool  # True if the part is the gain of a norm
    spacing: float  # relative spacing of the coarser of both parts' number types
    finer: float  # relative spacing of the finer type
    second_spacing: float  # relative spacing of the second part's type
    head_dim: int
    heads: tuple[int, ...] = ()  # numbers of these heads; empty for a part without heads
    inputs_first: bool = False  # True if the rows of the matrix are its inputs
    offset: float = 0.0  # number that a norm adds to its stored weight to make this gain
    weight: Pair | None = None  # for a bias: the weight of the same name, if both layers have it


def show_factor(factor: float) -> str:
    """Format a factor with enough digits to show at least two digits of its difference from 1."""
    change = abs(factor - 1)
    digits = 4 if change == 0 else max(4, 2 - math.floor(math.log10(change)))
    return f"{factor:.{digits}g}"


BETTER = 0.5
"""A structural hypothesis is considered only if it reduces a distance, such as row angles, to below this share."""
KINDS = ("weight", "bias")
PERMUTED = ("query", "key")
SIDES = (PERMUTED, ("output", "value"))  # roles whose matrices are multiplied in each head; the first has query heads


def present_roles(*layers: Layer, roles: Sequence[str] = ROLES, kind: str = "weight") -> list[str]:
    """Return those of `roles` that have a part of this kind in all layers."""
    return [role for role in roles if all(f"{role}.{kind}" in layer.parts for layer in layers)]


def are_better(new: Float[Tensor, " heads"], old: Float[Tensor, " heads"]) -> Tensor:
    """Return a mask of the heads whose distance `new` is less than BETTER times their distance `old`."""
    return (new < BETTER * old) & (old > 0)


def mean_angles(first: Tensor, second: Tensor) -> Float[Tensor, " heads"]:
    """Compute for each head the mean sine of the angles between the rows of one part and the same rows of the other."""
    return sines_between(first.flatten(0, 1), second.flatten(0, 1)).view(first.shape[:2]).mean(1)


def query_heads_of(key_heads: Sequence[int], layer: Layer) -> tuple[int, ...]:
    """Return the numbers of the query heads that use these key heads."""
    heads, kv_heads = len(layer.parts["query.weight"]), len(layer.parts["key.weight"])
    return tuple(head for head in range(heads) if head * kv_heads // heads in key_heads)


def tensors_between(layer: Layer, roles: Sequence[str]) -> list[str]:
    """Return the names of the parts between the roles: other parts than gains, with an axis of head coordinates."""
    shapes = [layer.parts[f"{role}.weight"].shape for role in roles]
    sizes = {size for heads, size, _ in shapes for size in (size, heads * size)}
    gains = [f"{role}.gain" for role in ROLES]
    return [name for name in layer.parts_along(*sizes) if name not in gains]
