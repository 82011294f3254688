"""Orders a sweep by the measure that predicts harm, and stops it where few of the most harmful heads can be left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens.statistics import rank_correlation
from attnlens.statistics.associations import permutation_tests
from attnlens.statistics.remaining import expected_above

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LEVEL, MISSED = 0.05, 0.05
"""p at which a measure may order the sweep; expected number of the most harmful heads that may be left when it ends."""
SHARE, FEWEST_DRAWN = 4, 12
"""One head in so many is drawn at random and swept first, and at least so many."""
MOST, PART = 10, 10
"""The sweep is after the so many most harmful heads, and one in so many at most."""
STEPS = 24
"""Into how many parts about the ordered sweep is cut; after each it may stop."""


@dataclass(frozen=True)
class SweepSearch:
    """How a sweep in the order of a measure went."""

    swept: list[int]
    """Places of the heads swept, in that order."""
    drawn: int
    """How many of them were drawn at random, and came first."""
    most: int
    """How many of the most harmful it was after."""
    chosen: int | None = None
    """The place of the measure that ordered the others."""
    rho: float = math.nan
    """Its ρ over the heads drawn."""
    p_corrected: float = math.nan
    """The least corrected p of any measure over the heads drawn."""
    left: tuple[int, ...] = ()
    """Places of the heads not swept, in the order in which they would have come."""
    expected: float = math.nan
    """Expected number of the most harmful among those left at the last look; ∞ where that can't be told."""
    diverged: int = 0
    """How many heads had diverged by then, so that no harm is known of them."""
    lacking: int = 0
    """How many heads lack the measure that orders them."""


def ordered(
    measures: Float[Tensor, "measures heads"],
    harm_of: Callable[[list[int]], Float[Tensor, " some"]],
    seed: int,
) -> SweepSearch:
    """Sweep a random part of the heads, then the others from the largest predicted harm on.

    `harm_of` sweeps the heads at some places; NaN where one diverged. The measure of least permutation p over the
    heads drawn (maxT over measures) orders the others where p < LEVEL; the sweep stops where `expected_above` of the
    MOST-th largest harm so far is at most MISSED. It goes on to the end where no measure stands, a head diverged, or
    one of the others lacks the measure.
    """
    heads = measures.shape[1]
    most, first = min(MOST, -(-heads // PART)), min(heads, max(FEWEST_DRAWN, -(-heads // SHARE)))
    permuted = torch.randperm(heads, generator=torch.Generator().manual_seed(seed)).tolist()
    swept, rest = sorted(permuted[:first]), sorted(permuted[first:])
    harm = harm_of(swept)
    tests = permutation_tests(measures[:, swept], harm, seed=seed).corrected
    known = bool((~tests.isnan()).any())
    best = int(tests.nan_to_num(nan=2.0).argmin()) if known else 0
    p_value = float(tests[best]) if known else math.nan
    if not rest or not p_value < LEVEL:
        if rest:
            harm_of(rest)
        return SweepSearch(swept + rest, first, most, p_corrected=p_value)
    rho = rank_correlation(measures[best, swept], harm, draws=2).value
    score = math.copysign(1.0, rho) * measures[best]
    rest.sort(key=lambda place: -math.inf if math.isnan(score[place]) else -float(score[place]))
    expected, diverged, lacking = math.inf, 0, int(score[swept + rest].isnan().sum())
    step = max(4, -(-heads // STEPS))
    while rest:
        diverged = int(harm.isnan().sum())
        expected = math.inf if diverged or lacking else expected_above(score[swept], harm, score[rest], most)
        if expected <= MISSED:
            break
        some, rest = rest[:step], rest[step:]
        harm = torch.cat([harm, harm_of(some)])
        swept = swept + some
    return SweepSearch(swept, first, most, best, rho, p_value, tuple(rest), expected, diverged, lacking)
