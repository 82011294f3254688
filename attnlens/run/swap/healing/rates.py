"""A range test (Smith 2017): a few steps at each of several learning rates, all from the same start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnlens.choices import HealingStage
from attnlens.records import HealingRate
from attnlens.run.swap.healing.course import adamw, descend
from attnlens.run.swap.healing.healer import Healer
from attnlens.run.swap.healing.held_out import HeldOut, put_back
from attnlens.texts.targets import Fed

RATES: dict[HealingStage, tuple[float, ...]] = {
    "transfer": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "whole": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
}
"""What is tried, from the least on, until one gains less than ENOUGH of what the best has gained."""
SLOWER, LEAST = 0.1, 1e-7
"""Where none leads nearer than the start, this share of the least is tried, down to the smallest that is."""
STEPS = 8
"""Steps at each rate, over which it rises and falls, and no more than a tenth of all that are planned."""
ENOUGH = 0.9
"""Share of the largest gain from which a larger rate is taken: over more steps it gains more."""


def chosen_rate(
    healer: Healer, stage: HealingStage, steps: Sequence[Sequence[Fed]], held: HeldOut
) -> tuple[float, list[HealingRate]]:
    """The largest rate after whose steps the held-out distance has fallen as far as after any, and what was tried.

    As far: by at least ENOUGH of the largest fall.

    The numbers are put back. 0 where no rate leads nearer than the start.
    """
    before = [leaf.detach().clone() for leaf in healer.leaves]
    start = held.distances(stage, most=1).mean
    tried: list[HealingRate] = []

    def distance(rate: float) -> float:
        optimiser = adamw(healer.leaves, rate)
        for number, parts in enumerate(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(number + 1, len(steps) - number) / ((len(steps) + 1) // 2)
            descend(healer, optimiser, parts, stage)
        found = held.distances(stage, most=1)
        put_back(healer.leaves, before)
        tried.append(HealingRate(rate=rate, validation=found.mean if found.finite else None))
        return found.mean if found.finite else math.inf

    known: dict[float, float] = {}
    for rate in RATES[stage]:
        known[rate] = distance(rate)
        if not enough(known[rate], min(known.values()), start):
            break
    while min(known.values()) >= start > 0 and min(known) * SLOWER >= LEAST:
        rate = min(known) * SLOWER
        known[rate] = distance(rate)
    least = min(known.values())
    if least >= start:
        return 0.0, tried
    return max(rate for rate, found in known.items() if enough(found, least, start)), tried


def enough(distance: float, least: float, start: float) -> bool:
    """Whether a rate gains nearly what the best one gains."""
    return start - distance >= ENOUGH * (start - least)
