"""The tensors of one attention layer, keyed by role; distances between two layers, and predictions of hypotheses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Parts = Mapping[str, Tensor]
ROLES = ("query", "key", "value", "output")
SYMBOLS = {"query": "Q", "key": "K", "value": "V", "output": "O"}
SINGLE = torch.finfo(torch.float32).eps
ROUNDING = 0.25
"""Upper limit on a tensor's relative rms rounding error, in units of its type's relative spacing (0.2 on average)."""
EXPLAINED, FACTOR = 10.0, 10.0
"""A hypothesis explains a tensor if the remaining difference is at most EXPLAINED times the rounding, and at most
1/FACTOR of the difference without a hypothesis."""


@dataclass(frozen=True)
class Layer:
    """Tensors ("parts") of one layer.

    The names of `parts` are:

    - `query.weight` and `key.weight` (heads, head_dim, d_model), `value.weight` and `output.weight` (heads, value_dim,
      d_model);
    - `query.bias` (heads, head_dim) and so on, for biases;
    - `query.gain` and `key.gain`, for the norms of queries and keys;
    - the name in the model, for any other tensor.

    A gain is the factor that a norm applies (1 + w if the norm adds 1 to its weight w).
    """

    parts: Parts
    gains: frozenset[str] = frozenset()  # names of the parts that are gains of norms
    pairs: Sequence[tuple[int, int]] | None = ()
    """Pairs of coordinates of a head that RoPE rotates together; empty without RoPE, None if unknown."""
    spacing: Mapping[str, float] = field(default_factory=dict)
    """Relative spacing of the number type of each part, keyed by name; that of float32 if missing."""
    headless: frozenset[str] = frozenset()
    """Names of parts without an axis of heads, whatever their shape: parts outside attention, and W_O's bias."""

    shift_invariant: bool = True
    """False if adding a number to all scores of a query changes attention, because of a softcap or sinks."""

    is_post_norm: bool = False
    """True if the norms follow the residual sums (BERT), so that a norm's output is a term of the next sum."""

    is_cross: bool = False
    """True if keys and values are computed from a different sequence than queries (cross-attention)."""

    offsets: Mapping[str, float] = field(default_factory=dict)
    """Non-zero number that a norm adds to its stored weight to make the gain, keyed by the gain's name. Such gains are
    stored in float64, without rounding."""

    inputs_first: frozenset[str] = frozenset()  # names of the matrices whose rows are inputs (Conv1D of GPT-2)

    def with_parts(self, parts: Parts) -> Layer:
        """Return the layer with these parts replaced or added."""
        return replace(self, parts={**self.parts, **parts})

    def weight(self, role: str) -> Float[Tensor, "heads size d_model"]:
        """Return the projection matrix of this role."""
        return self.parts[f"{role}.weight"]

    @property
    def rotated_coordinates(self) -> list[int]:
        """Coordinates of a head that RoPE rotates; empty without RoPE, or if unknown."""
        return sorted({coordinate for pair in self.pairs or () for coordinate in pair})

    @property
    def is_unrotated(self) -> bool:
        """True if the layer is known to have no RoPE, so that queries and keys are not rotated."""
        return self.pairs is not None and not self.pairs

    def parts_along(self, *sizes: int) -> list[str]:
        """Return the names of attention's parts that have an axis of one of these sizes, such as sinks and norms.

        Weights and biases of projections are left out.
        """
        others = [name for name in self.parts if not has_heads(name) and name not in self.headless]
        return [name for name in others if set(self.parts[name].shape) & set(sizes)]


def has_heads(name: str) -> bool:
    """Return True if the first axis of the part with this name has one entry per head."""
    role, _, kind = name.partition(".")
    return role in ROLES and kind in ("weight", "bias")  # excludes BERT's output.dense.weight


def count_heads(part: Tensor, name: str) -> int:
    """Return the number of heads of this part; 1 if the part has no axis of heads."""
    return part.shape[0] if has_heads(name) else 1


def residuals(first: Tensor, second: Tensor, name: str) -> Float[Tensor, " heads"]:
    """Compute ‖B − A‖/max(‖A‖, ‖B‖) of two parts A and B, per head if they have heads; all 1 if their shapes differ."""
    heads = count_heads(second, name)
    if first.shape != second.shape:
        return torch.ones(heads, dtype=torch.float64)
    before, after = (part.double().reshape(heads, -1) for part in (first, second))
    size = torch.maximum(before.norm(dim=1), after.norm(dim=1))
    change = (after - before).norm(dim=1)
    return torch.where(change > 0, change / size, 0.0)


def rounding_limit(name: str, first: Layer, second: Layer) -> float:
    """Return the largest relative residual of the part `name` that rounding can explain."""
    spacing = max(side.spacing.get(name, SINGLE) for side in (first, second))
    return EXPLAINED * ROUNDING * spacing


NO_ANGLE = 1e-6  # smaller sines are set to 0


def sines_between(first: Tensor, second: Tensor) -> Float[Tensor, " rows"]:
    """Compute the sine of the angle between corresponding rows of two parts; 1 if either row is zero."""
    before, after = (part.double().flatten(1) for part in (first, second))
    lengths = before.norm(dim=1) * after.norm(dim=1)
    cosine = torch.where(lengths > 0, (before * after).sum(1) / lengths, 0.0)
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return torch.where(sine < NO_ANGLE, 0.0, sine)


def list_names(names: Sequence[str]) -> str:
    """Join names: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def name_unchanged(names: Sequence[str]) -> str:
    """Return a clause such as `, but W_V is unchanged`, about parts that should have changed; '' if there are none."""
    return f", but {name_parts(names)} {'is' if len(names) == 1 else 'are'} unchanged" if names else ""


def name_parts(names: Sequence[str]) -> str:
    """Join the names of parts: `W_Q, b_K and g_Q` for a weight, a bias and a gain; other tensors keep their names.

    Of six or more parts, only the first four are named.
    """
    letters = {"weight": "W", "bias": "b", "gain": "g"}
    words = []
    for name in names:
        role, _, kind = name.partition(".")
        words.append(f"{letters[kind]}_{SYMBOLS[role]}" if role in ROLES and kind in letters else name)
    return list_names(words) if len(words) < 6 else f"{', '.join(words[:4])} and {len(words) - 4} more tensors"


def name_weights(roles: Iterable[str]) -> str:
    """Join the names of the projections of these roles: `W_Q and W_K`."""
    return name_parts([f"{role}.weight" for role in roles])


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
    """The prediction of a hypothesis for one tensor."""

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
    """The same part, or the same heads of a part, in both layers."""

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
SIDES = (PERMUTED, ("output", "value"))  # pairs of roles multiplied in each head; the first role has query heads


def present_roles(*layers: Layer, roles: Sequence[str] = ROLES, kind: str = "weight") -> list[str]:
    """Return those of `roles` that have a part of this kind in all layers."""
    return [role for role in roles if all(f"{role}.{kind}" in layer.parts for layer in layers)]


def are_better(new: Float[Tensor, " heads"], old: Float[Tensor, " heads"]) -> Tensor:
    """Return a mask of the heads whose distance `new` is less than BETTER times their distance `old`."""
    return (new < BETTER * old) & (old > 0)


def mean_angles(first: Tensor, second: Tensor) -> Float[Tensor, " heads"]:
    """Compute for each head the mean sine of the angles between corresponding rows of two parts."""
    return sines_between(first.flatten(0, 1), second.flatten(0, 1)).view(first.shape[:2]).mean(1)


def match_rows(first: Float[Tensor, "rows width"], second: Float[Tensor, "rows width"]) -> Int[Tensor, " rows"]:
    """Match rows one to one by direction; return, for each row of `second`, the index of its partner in `first`."""
    units = [torch.nn.functional.normalize(part.double(), dim=1) for part in (second, first)]
    similar = units[0] @ units[1].mT
    return torch.from_numpy(linear_sum_assignment(-similar.cpu().numpy())[1])


def query_heads_of(key_heads: Sequence[int], layer: Layer) -> tuple[int, ...]:
    """Return the indices of the query heads that use these key heads."""
    return tuple(head for head, key_head in enumerate(key_heads_of(layer)) if key_head in key_heads)


def key_heads_of(layer: Layer) -> list[int]:
    """Return, for each query head, the index of its key head."""
    heads, kv_heads = len(layer.weight("query")), len(layer.weight("key"))
    return [head * kv_heads // heads for head in range(heads)]


def name_heads(heads: Collection[int], layer: Layer) -> tuple[int, ...]:
    """Return `heads` in ascending order, or () if they are all query heads of the layer."""
    return () if len(heads) == len(layer.weight("query")) else tuple(sorted(heads))


def tensors_between(layer: Layer, roles: Sequence[str]) -> list[str]:
    """Return the names of parts, except gains of roles, with an axis as long as one head, or all, of these roles."""
    shapes = [layer.weight(role).shape for role in roles]
    sizes = {size for heads, size, _ in shapes for size in (size, heads * size)}
    gains = [f"{role}.gain" for role in ROLES]
    return [name for name in layer.parts_along(*sizes) if name not in gains]
