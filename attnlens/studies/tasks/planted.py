"""Built-in tasks of which theory says what a model without positions, or with few features, can reach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from attnlens.studies.tasks.classification import Cases, Labelled
from attnlens.studies.tasks.task import BEGIN, END, PADDING, SPECIALS, Examples, Split, in_order, paired

if TYPE_CHECKING:
    from jaxtyping import Float, Int
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


SIZES = {"training": 4096, "validation": 256, "test": 256}
"""Cases of each part."""
SEEDS = {"training": 10**9 + 21, **HELD_OUT}


def before(tokens: int = 10, fillers: int = 4) -> Labelled:
    """Whether token 0 stands before token 1 among fillers: half of the cases, and for every bag of tokens half.

    A classifier without positions gives all orders of a bag one answer (Tsai et al. 2019, Proposition 1), and the bag
    tells nothing of the class: its accuracy is 1/2 and its loss at least log 2, whatever its kernel. That holds for
    attention without a causal mask, and for pooling that does not pick a place; the first and the last token are
    always fillers, so that picking one of them helps nobody.
    """

    def draw(count: int, draws: torch.Generator) -> tuple[Int[Tensor, "count tokens"], Int[Tensor, " count"]]:
        rows = torch.randint(2, 2 + fillers, (count, tokens), generator=draws)
        places = 1 + torch.rand(count, tokens - 2, generator=draws).argsort(1)[:, :2]
        rows.scatter_(1, places, torch.tensor([0, 1]).expand(count, 2))
        return rows, (places[:, 0] < places[:, 1]).long()

    return drawn("planted order", ("after", "before"), draw, SIZES, vocabulary=2 + fillers)


def majority(tokens: int = 11) -> Labelled:
    """Whether token 1 stands more often than token 0 (`tokens` is odd): the bag tells the class, so no position helps.

    Each class has half of the cases but for chance, and each count of token 1 is as likely as any other.
    """

    def draw(count: int, draws: torch.Generator) -> tuple[Int[Tensor, "count tokens"], Int[Tensor, " count"]]:
        ones = torch.randint(tokens + 1, (count, 1), generator=draws)
        rows = (torch.rand(count, tokens, generator=draws).argsort(1) < ones).long()
        return rows, (2 * ones[:, 0] > tokens).long()

    return drawn("planted majority", ("zeros", "ones"), draw, SIZES, vocabulary=2)


def drawn(
    name: str,
    classes: tuple[str, str],
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    sizes: Mapping[str, int],
    *,
    vocabulary: int = 0,
    channels: int = 0,
) -> Labelled:
    """A task of cases drawn with fixed seeds: `draw` gives so many sequences and their classes."""
    cases = {}
    for part, count in sizes.items():
        rows, labels = draw(count, torch.Generator().manual_seed(SEEDS[part]))
        cases[part] = Cases(list(rows), labels)
    return Labelled(name=name, classes=classes, cases=cases, files={}, vocabulary=vocabulary, channels=channels)


ANGLE_SIZES = {"training": 16384, "validation": 512, "test": 512}
"""Cases of each part."""


def angles(directions: int = 16, steps: int = 8) -> Labelled:
    """Which sign the one step has that points where the last step points: directions on a circle, each step another.

    A step is (cos θ, sin θ, sign, 0), the last (cos φ, sin φ, 0, 1); the θ are `steps` of `directions` even ones turned
    by a random angle, φ one of them. In queries and keys linear in the step, with a constant or without, the score is
    of degree 1 in cos θ, sin θ, so that its power p is a trigonometric polynomial of degree p: 2p + 1 features, however
    wide the head, and `least_leak(directions, 2p + 1)` bounds from below what comes from other directions.
    exp(s cos(θ − φ)) leaks as little as it likes. Order and positions have nothing to do with the class. Layers above
    the first may find more features in what feed-forward parts make of a step.
    """

    def draw(count: int, draws: torch.Generator) -> tuple[Float[Tensor, "count steps 4"], Int[Tensor, " count"]]:
        slots = torch.rand(count, directions, generator=draws).argsort(1)[:, :steps]
        theta = 2 * math.pi * (slots / directions + torch.rand(count, 1, generator=draws))
        signs = 2.0 * torch.randint(2, (count, steps), generator=draws) - 1
        meant = torch.randint(steps, (count, 1), generator=draws)
        phi, zero = theta.gather(1, meant), torch.zeros(count, 1)
        held = torch.stack((theta.cos(), theta.sin(), signs, torch.zeros_like(signs)), -1)
        asked = torch.stack((phi.cos(), phi.sin(), zero, zero + 1), -1)
        return torch.cat((held, asked), 1), (signs.gather(1, meant)[:, 0] > 0).long()

    return drawn("planted angles", ("minus", "plus"), draw, ANGLE_SIZES, channels=4)


def least_leak(places: int, features: int) -> float:
    """√((V/r − 1)/(V − 1)), the least root mean square of k(q_a, k_b)/k(q_a, k_a), a ≠ b, of a kernel of r features.

    V queries each have a key of their own among V. With A_ab that ratio, V = tr A ≤ ‖A‖_* ≤ √r ‖A‖_F by the rank r of
    A, and ‖A‖_F² = V + Σ_{a≠b} A_ab². Zero where r ≥ V.
    """
    return math.sqrt(max(places / features - 1, 0.0) / (places - 1))
