"""The tensors of one attention layer by role, and distances between the tensors of two layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Parts = Mapping[str, Tensor]
ROLES = ("query", "key", "value", "output")
SYMBOLS = {"query": "Q", "key": "K", "value": "V", "output": "O"}
SINGLE = torch.finfo(torch.float32).eps
ROUNDING = 0.25
"""Relative root-mean-square rounding of a tensor, in spacings of its type: 0.2 on average over magnitudes."""
EXPLAINED, FACTOR = 10.0, 10.0
"""A hypothesis explains a tensor if what it leaves is at most EXPLAINED times the rounding, and at most 1/FACTOR of the
difference without a hypothesis."""


@dataclass(frozen=True)
class Layer:
    """Tensors of one layer.

    Names of `parts`: `query.weight` (heads, head_dim, d_model), `key.weight`, `value.weight`, `output.weight` (heads,
    value_dim, d_model), biases as `query.bias` (heads, head_dim), the gains of norms of queries and keys as
    `query.gain`, and any other tensor of the layer under its own name. Gains are the factors that a norm applies (1 + w
    if the norm adds 1 to its weight w).
    """

    parts: Parts
    gains: frozenset[str] = frozenset()  # names of the parts that are gains of norms
    pairs: Sequence[tuple[int, int]] | None = ()
    """Coordinates of a head that RoPE rotates together; empty without RoPE, None if unknown."""
    spacing: Mapping[str, float] = field(default_factory=dict)
    """Relative spacing of the number type in which each part is stored; float32 if missing."""
    headless: frozenset[str] = frozenset()
    """Names of parts without heads, whatever their shapes: those outside the attention module, and W_O's bias."""

    shift_invariant: bool = True
    """False if a number added to all scores of a query changes attention, because of a softcap or sinks."""

    is_post_norm: bool = False
    """True if attention reads no norm of its layer (BERT): then the output of its norms is also a residual."""

    is_cross: bool = False
    """True if keys and values read another sequence than the queries (cross-attention)."""

    offsets: Mapping[str, float] = field(default_factory=dict)
    """What the norm adds to its stored weight to make a gain, if not 0; such gains are in float64, to be exact."""

    inputs_first: frozenset[str] = frozenset()  # names of the matrices whose rows are inputs (Conv1D of GPT-2)

    def with_parts(self, parts: Parts) -> Layer:
        """Return the layer with some parts replaced."""
        return replace(self, parts={**self.parts, **parts})

    @property
    def rotated_coordinates(self) -> list[int]:
        """Coordinates of a head that RoPE rotates."""
        return sorted({coordinate for pair in self.pairs or () for coordinate in pair})

    @property
    def is_unrotated(self) -> bool:
        """True if position does not rotate queries and keys."""
        return self.pairs is not None and not self.pairs

    def parts_along(self, *sizes: int) -> list[str]:
        """Return the names of the attention module's other parts with an axis of one of these sizes.

        They are tensors by head or by coordinate of a head, such as sinks, position biases and norms.
        """
        others = [name for name in self.parts if not has_heads(name) and name not in self.headless]
        return [name for name in others if set(self.parts[name].shape) & set(sizes)]


def has_heads(name: str) -> bool:
    """Return True if the first axis of this part is heads."""
    role, _, kind = name.partition(".")
    return role in ROLES and kind in ("weight", "bias")  # not BERT's output.dense.weight


def count_heads(part: Tensor, name: str) -> int:
    """Return the number of heads of this part; 1 if it has none."""
    return part.shape[0] if has_heads(name) else 1


def residuals(first: Tensor, second: Tensor, name: str) -> Float[Tensor, " heads"]:
    """Compute ‖B − A‖/max(‖A‖, ‖B‖) of each head, or of the whole part if it has no heads; 1 if shapes differ."""
    heads = count_heads(second, name)
    if first.shape != second.shape:
        return torch.ones(heads, dtype=torch.float64)
    before, after = (part.double().reshape(heads, -1) for part in (first, second))
    size = torch.maximum(before.norm(dim=1), after.norm(dim=1))
    change = (after - before).norm(dim=1)
    return torch.where(change > 0, change / size, 0.0)


def limit_of(name: str, first: Layer, second: Layer) -> float:
    """Return the relative residual up to which rounding explains a difference in this part."""
    spacing = max(side.spacing.get(name, SINGLE) for side in (first, second))
    return EXPLAINED * ROUNDING * spacing


NO_TURN = 1e-6  # sines below this are 0


def turn_from(first: Tensor, second: Tensor) -> Float[Tensor, " rows"]:
    """Compute the sine of the angle between corresponding rows, after flattening all other axes; 1 for zeros."""
    before, after = (part.double().flatten(1) for part in (first, second))
    lengths = before.norm(dim=1) * after.norm(dim=1)
    cosine = torch.where(lengths > 0, (before * after).sum(1) / lengths, 0.0)
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return torch.where(sine < NO_TURN, 0.0, sine)


def list_names(names: Sequence[str]) -> str:
    """Join names: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def name_parts(names: Sequence[str]) -> str:
    """Return parts in words: `W_Q and W_K`; biases are b_Q, gains g_Q, other tensors have their own names."""
    letters = {"weight": "W", "bias": "b", "gain": "g"}
    words = []
    for name in names:
        role, _, kind = name.partition(".")
        words.append(f"{letters[kind]}_{SYMBOLS[role]}" if role in ROLES and kind in letters else name)
    return list_names(words) if len(words) < 6 else f"{', '.join(words[:4])} and {len(words) - 4} more tensors"
