"""A function of two mean losses, paired over sequences, with the interval of its difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from attnlens.records import Change
from attnlens.statistics import Design, paired_difference

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST_LOSS = 700.0
"""Loss whose exponential is still a number."""


def paired_change(
    before: Float[Tensor, " sequences"],
    after: Float[Tensor, " sequences"],
    counts: Float[Tensor, " sequences"],
    design: Design,
    seed: int,
    of: Callable[[Tensor], Tensor] = lambda mean: mean,
) -> Change:
    """`of` the mean loss over tokens of both, and its difference with its 95 % interval; NaN pairs don't count.

    `before` and `after` are means over the `counts` tokens of each sequence.
    """
    delta, low, high = paired_difference(before, after, design, weights=counts, of=of, seed=seed)
    there = ~(after - before).isnan()
    first, second = (float(of((part[there] * counts[there]).sum() / counts[there].sum())) for part in (before, after))
    return Change(before=first, after=second, delta=delta, ci95=None if math.isnan(low) else (low, high))
