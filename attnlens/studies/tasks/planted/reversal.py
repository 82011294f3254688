"""A built-in translation task that no model without positions can learn, and the least loss that one can reach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from attnlens.studies.tasks.batching import in_order
from attnlens.studies.tasks.sentences import BEGIN, END, PADDING, SPECIALS, paired
from attnlens.studies.tasks.task import Examples, Split

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

HELD_OUT = {"validation": 10**9 + 7, "test": 10**9 + 9}
"""Seeds of what models are judged on, far from those that they are trained with."""


@dataclass(frozen=True, eq=False)
class Reversal:
    """A sentence of random letters, written backwards, in capitals where the letter before it in the source is odd.

    Of a source x₁ … xₙ the target is yₜ = (x_i, x_{i−1} odd) with i = n + 1 − t, and x₀ is even. An encoder without
    positions gives the same set of states for every order of its tokens (Tsai et al. 2019, Proposition 1), and
    cross-attention without positions does not know in which order they stand; so what the decoder writes depends on
    the source through its bag of letters alone, whatever it knows of its own order. The bag does not tell the order,
    and the target does: given a bag, sources and targets are one to one. The least loss is `bag_bound`.
    """

    letters: int = 8
    """How many letters there are."""
    shortest: int = 4
    """The fewest letters of a source."""
    longest: int = 8
    """The most."""
    evaluated: int = 256
    """Pairs of validation and of test."""
    name: str = field(default="planted reversal", init=False)
    form: Literal["translation"] = field(default="translation", init=False)
    channels: int = field(default=0, init=False)
    metric: str = field(default="BLEU", init=False)
    higher_is_better: bool = field(default=True, init=False)
    files: Mapping[str, str] = field(default_factory=dict, init=False)
    padding: int = field(default=PADDING, init=False)
    begin: int = field(default=BEGIN, init=False)
    end: int = field(default=END, init=False)

    @property
    def vocabulary(self) -> int:
        """Letters, their capitals, and the ids that begin, end and pad."""
        return len(SPECIALS) + 2 * self.letters

    outputs = vocabulary

    @property
    def length(self) -> int:
        """The most tokens of a side, with the one that ends it."""
        return self.longest + 1

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """New pairs without end."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield self._examples(self.sources(size, draws))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Pairs that are the same at each call."""
        sources = self._held_out(split)
        return in_order([*map(len, sources)], size, lambda chosen: self._examples([sources[at] for at in chosen]))

    def bound(self, split: Split) -> float:
        """The least loss on that part of a model without positions in encoder and cross-attention: `bag_bound`."""
        return bag_bound(source.tolist() for source in self._held_out(split))

    def sources(self, count: int, draws: torch.Generator) -> list[Int[Tensor, " tokens"]]:
        """Random sources: each letter, and each number of letters, as likely as any other."""
        first = len(SPECIALS)
        sizes = torch.randint(self.shortest, self.longest + 1, (count,), generator=draws).tolist()
        return [torch.randint(first, first + self.letters, (size,), generator=draws) for size in sizes]

    def target(self, source: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """The source backwards, a letter in capitals where the one before it in the source is odd."""
        before = torch.cat((torch.zeros(1, dtype=torch.int64), (source[:-1] - len(SPECIALS)) % 2))
        return (source + self.letters * before).flip(0)

    def written(self, ids: Sequence[int]) -> str:
        """The numbers of letters with spaces between them."""
        return " ".join(str(number) for number in ids if number >= len(SPECIALS))

    def _held_out(self, split: Split) -> list[Int[Tensor, " tokens"]]:
        return self.sources(self.evaluated, torch.Generator().manual_seed(HELD_OUT[split]))

    def _examples(self, sources: Sequence[Int[Tensor, " tokens"]]) -> Examples:
        return paired(sources, [self.target(source) for source in sources])


def bag_bound(sources: Iterable[Sequence[int]]) -> float:
    """The least loss (nats a target token, END included) on those sources of a model that sees their bags alone.

    Σ log(n!/Π c_v!) / Σ (n + 1), c_v how often letter v stands in a source of n: given its bag, a source is one of
    n!/Π c_v! orders, all as likely; each has a target of its own, and the sum over a target's tokens of the least loss
    is minus the logarithm of its probability, by the chain rule. The size of the bag tells where END stands.
    """
    total, tokens = 0.0, 0
    for source in sources:
        orders = math.factorial(len(source)) // math.prod(map(math.factorial, Counter(source).values()))
        total += math.log(orders)
        tokens += len(source) + 1
    return total / tokens
