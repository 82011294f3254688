"""Standard errors of a mean over windows, and of a median over heads of such means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlens.statistics.design import Design

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DRAWS = 1000
"""Bootstrap samples behind the standard error of a median."""


def standard_error(values: Float[Tensor, "windows ..."], design: Design) -> Float[Tensor, "*rest"]:
    """The standard error of each entry's mean over windows, entries that are NaN left out.

    sd/√n for windows of one text; see Design for several. NaN where there is only one draw to judge by.
    """
    rows = values.double().movedim(0, -1)
    there = (~rows.isnan()).double()
    rows = rows.nan_to_num(nan=0.0)
    count = there.sum(-1, keepdim=True).clamp(min=1)
    residuals = (rows - rows.sum(-1, keepdim=True) / count) * there / count
    return design.variance(residuals, there).sqrt()


def median_error(
    values: Float[Tensor, "windows heads"],
    design: Design,
    groups: Sequence[Sequence[int]],
    draws: int = DRAWS,
    seed: int = 0,
) -> list[float]:
    """The standard error of the median over each group of heads of their means over windows.

    The sd over bootstrap samples of windows, in each of which all heads are averaged over the same windows (a median's
    heads are not independent: they read the same text), each text's deviations widened by √(n/(n − 1)), n its windows.
    NaN where there is only one.
    """
    if design.freedom < 1 or not len(values):
        return [math.nan] * len(groups)
    times = 1 + (design.draws(draws, seed) - 1) * design.widening
    there = (~values.isnan()).double()
    means = (times @ values.double().nan_to_num(nan=0.0)) / (times @ there)
    return [float(means[:, list(group)].nanquantile(0.5, dim=1).std()) for group in groups]
