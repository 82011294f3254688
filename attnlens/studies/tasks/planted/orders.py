"""Two built-in tasks of two classes: one that order alone decides, and one that it has nothing to do with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from attnlens.studies.tasks.classification import Cases, Labelled
from attnlens.studies.tasks.planted.reversal import HELD_OUT

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

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
