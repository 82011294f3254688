"""A task of retrieval that needs more features than a polynomial kernel of a small head has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from attnlens.study.tasks.planted.reversal import HELD_OUT
from attnlens.study.tasks.task import NOTHING, Examples, Split

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Recall:
    """Tokens that each hold a name and a value, then names alone, of each of which the value is to be told.

    A head that answers has k(q_a, k_b) small against k(q_a, k_a) for every two of the V names. On d dimensions
    (q·k)² has d(d + 1)/2 features, and `least_leak` bounds from below what such a kernel lets through; the exponential
    kernel lets through as little as it likes on d = 2: names on a circle, large queries. No order is needed.
    """

    names: int = 64
    """V, how many names there are."""
    values: int = 4
    """How many values."""
    held: int = 8
    """Tokens with a name and a value in each sequence, no name twice."""
    asked: int = 4
    """How many of their names are asked for."""
    evaluated: int = 256
    """Sequences of validation and of test."""
    name: str = field(default="planted recall", init=False)
    form: Literal["language"] = field(default="language", init=False)
    channels: int = field(default=0, init=False)
    metric: str = field(default="perplexity", init=False)
    higher_is_better: bool = field(default=False, init=False)
    files: Mapping[str, str] = field(default_factory=dict, init=False)
    widths: Float[Tensor, " vocabulary"] | None = field(default=None, init=False)

    @property
    def vocabulary(self) -> int:
        """Values, names, and names with values."""
        return self.values + self.names + self.names * self.values

    outputs = vocabulary

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.held + self.asked

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """New sequences without end."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield self._examples(size, draws)

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Sequences that are the same at each call."""
        draws = torch.Generator().manual_seed(HELD_OUT[split])
        return [self._examples(min(size, self.evaluated - at), draws) for at in range(0, self.evaluated, size)]

    def _examples(self, count: int, draws: torch.Generator) -> Examples:
        names = torch.rand(count, self.names, generator=draws).argsort(1)[:, : self.held]
        values = torch.randint(self.values, names.shape, generator=draws)
        chosen = torch.rand(count, self.held, generator=draws).argsort(1)[:, : self.asked]
        facts = self.values + self.names + names * self.values + values
        inputs = torch.cat((facts, self.values + names.gather(1, chosen)), 1)
        targets = torch.cat((torch.full_like(facts, NOTHING), values.gather(1, chosen)), 1)
        return Examples(inputs, None, targets)


def least_leak(names: int, features: int) -> float:
    """√((V/r − 1)/(V − 1)), the least root mean square of k(q_a, k_b)/k(q_a, k_a), a ≠ b, of a kernel of r features.

    With A_ab that ratio, V = tr A ≤ ‖A‖_* ≤ √r ‖A‖_F, and ‖A‖_F² = V + Σ_{a≠b} A_ab². Zero where r ≥ V.
    """
    return math.sqrt(max(names / features - 1, 0.0) / (names - 1))
