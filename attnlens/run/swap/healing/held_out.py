"""Calibration text kept back from training: the distance there chooses the best step and ends a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlens import texts
from attnlens.choices import HealingStage
from attnlens.errors import TextError
from attnlens.run.swap.healing.healer import Healer
from attnlens.run.swap.healing.transfer import transferred
from attnlens.statistics import paired_difference
from attnlens.statistics.intervals import FEWEST_DRAWS
from attnlens.texts import Batches
from attnlens.texts.sampling import chosen
from attnlens.texts.targets import Fed, feed

SHARE, MOST, A_BATCH = 0.125, 4, 40
"""Share of the calibration batches that is kept back from training, how many at most, and for how many batches that are
trained on there is one: measuring on them should take less than the training."""


@dataclass
class HeldOut:
    """The batches kept back, and what was measured on them."""

    healer: Healer
    """What is measured."""
    fed: Sequence[Fed]
    """On which batches."""

    def distances(self, stage: HealingStage = "whole", most: int = MOST) -> Distances:
        """What a stage makes smaller, for each sequence of the first `most` batches; of the whole the distance."""
        if stage == "transfer":
            errors = torch.cat([transferred(self.healer, one.inputs) for one in self.fed[:most]])
            return Distances(errors, torch.ones_like(errors))
        found = [self.healer.by_sequence(one.inputs, one.targets) for one in self.fed[:most]]
        each, counts = (torch.cat([part[side].double() for part in found]) for side in (0, 1))
        return Distances(each, counts)


@dataclass(frozen=True)
class Distances:
    """Distances sequence by sequence."""

    each: Tensor
    """Their means over tokens, float64."""
    counts: Tensor
    """Over how many tokens."""

    @property
    def mean(self) -> float:
        """Over all tokens, ∞ where it is not finite; below 0 it is rounding, and no nearer than the model itself."""
        if not self.finite:
            return math.inf
        return max(0.0, float((self.each * self.counts).sum() / self.counts.sum()))

    @property
    def finite(self) -> bool:
        """Whether there is one."""
        return math.isfinite(float(self.each.sum()))

    def falls_from(self, before: Distances) -> bool:
        """Whether it is lower than `before`, with its paired 95 % interval over the sequences.

        Of fewer than FEWEST_DRAWS sequences, whose interval says too little, whether it is lower at all.
        """
        if not (self.finite and before.finite):
            return self.finite
        value, _, high = paired_difference(before.each, self.each, weights=self.counts)
        return (value if len(self.each) < FEWEST_DRAWS or math.isnan(high) else high) < 0


@dataclass
class Best:
    """The step with the least distance so far, whose numbers are kept."""

    step: int = 0
    distance: float = math.inf
    kept: list[Tensor] = field(default_factory=list)

    def offer(self, step: int, distance: float, leaves: Sequence[Tensor]) -> bool:
        """Keep the numbers where the distance is the least; whether it is."""
        if not distance < self.distance:  # strictly: of equals the first, and never NaN
            return False
        self.step, self.distance = step, distance
        self.kept = [leaf.detach().clone() for leaf in leaves]
        return True

    def restore(self, leaves: Sequence[Tensor]) -> None:
        """Put the best step's numbers back."""
        put_back(leaves, self.kept)


def put_back(leaves: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give the leaves these numbers."""
    with torch.no_grad():
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)


def split(healer: Healer, batches: Batches, seed: int, trained: float = math.inf) -> tuple[list[Fed], list[Fed]]:
    """Training batches, and those kept back, which are spread over the texts; `trained`: how many are trained on.

    Raises TextError for fewer than two.
    """
    if len(batches) < 2:
        raise TextError(
            "Healing needs two batches of calibration text at least: one to train, one to choose the best step.",
            "Give a longer text with --calibration, or a smaller --batch-size.",
        )
    if healer.goal == "text":
        fed = feed(healer.loaded, batches, healer.task, seed)
    else:
        fed = [Fed(batch.inputs, None) for batch in batches]
    back = chosen(len(batches), max(1, round(min(MOST, len(batches) * SHARE, trained / A_BATCH))), "spread", seed=0)
    return [one for number, one in enumerate(fed) if number not in back], [fed[number] for number in back]


def parts_of(fed: Sequence[Fed], size: int | None) -> tuple[list[Fed], int]:
    """The batches cut into parts of at most `size` sequences, and how many of them make a step of so many.

    A step of more sequences than a batch holds takes several batches, one after another.
    """
    whole = texts.sequences_in(fed[0].inputs)
    if size is None or size == whole:
        return list(fed), 1
    if size > whole:
        return list(fed), -(-size // whole)
    found = []
    for one in fed:
        count = texts.sequences_in(one.inputs)
        if count == 1:
            found.append(one)
            continue
        for start in range(0, count, size):
            rows = slice(start, start + size)
            inputs = {name: value[rows] for name, value in one.inputs.items()}
            found.append(Fed(inputs, None if one.targets is None else one.targets[rows], one.noise))
    return found, 1
