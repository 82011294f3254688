"""Classification of sequences: rows of ids or of a series' steps, each with the number of its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from attnlens.studies.tasks.batching import endless, in_order, padded
from attnlens.studies.tasks.byte_pairs import BytePairs
from attnlens.studies.tasks.task import Examples, Split

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cases:
    """The sequences of one part and their classes."""

    rows: Sequence[Tensor]
    """Ids (tokens,), int64, or a series (steps, channels), float32."""
    labels: Int[Tensor, " cases"]
    """Class numbers."""

    def batch(self, chosen: Sequence[int]) -> Examples:
        """Those of some numbers, padded with zeros."""
        inputs, kept = padded([self.rows[number] for number in chosen], 0)
        return Examples(inputs, None if bool(kept.all()) else kept, self.labels[list(chosen)])


@dataclass(frozen=True, eq=False)
class Labelled:
    """Sequences of which a model is to name the class."""

    name: str
    """What the data are called."""
    classes: tuple[str, ...]
    """The label of each class number."""
    cases: Mapping[str, Cases]
    """Of each part its cases."""
    files: Mapping[str, str]
    """SHA-256 of each file by its name; empty for built-in data."""
    vocabulary: int = 0
    """How many ids there are; 0 for a series."""
    channels: int = 0
    """How many numbers a step has; 0 for ids."""
    pairs: BytePairs | None = None
    """The encoding of texts, trained on the training part alone; None where nothing is encoded."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many cases are not as the file has them, by what was done to them."""
    form: Literal["classification"] = field(default="classification", init=False)
    metric: str = field(default="accuracy", init=False)
    higher_is_better: bool = field(default=True, init=False)

    @property
    def outputs(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def length(self) -> int:
        """The most tokens or steps of a sequence."""
        return max(len(row) for part in self.cases.values() for row in part.rows)

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Shuffled cases without end, those of about one length together."""
        part = self.cases["training"]
        return endless([len(row) for row in part.rows], size, seed, part.batch)

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """The cases of that part, the shortest first."""
        part = self.cases[split]
        return in_order([len(row) for row in part.rows], size, part.batch)

    def permuted(self, seed: int) -> Labelled:
        """The same sequences with the labels of each part in a random order, so that no model can beat chance on them.

        Chance is the share of the commonest class, or less where a model names others.
        """
        draws = torch.Generator().manual_seed(seed)
        mixed = {
            part: replace(each, labels=each.labels[torch.randperm(len(each.labels), generator=draws)])
            for part, each in self.cases.items()
        }
        return replace(self, name=f"{self.name}, labels permuted", cases=mixed)
