"""Spearman's rank correlation with a bootstrap interval over heads or over groups of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnlens.statistics.design import Design
from attnlens.statistics.intervals import Interval, tail

NEAR_ONE = 1 - 1e-12
"""Largest |ρ| whose artanh is taken."""

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def rank_correlation(
    x: Float[Tensor, " heads"],
    y: Float[Tensor, " heads"],
    groups: Sequence[object] | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Spearman's ρ in [−1, 1], ties sharing their mean rank, and its interval; pairs with a NaN don't count.

    The ends are quantiles of artanh ρ over samples of heads, or of whole `groups` (layers), centred on the sample's own
    and widened by √(n/(n − 1)) and, as of few layers they fall short, by Student's t over the normal quantile, n the
    draws and t with n − 1 degrees of freedom. NaN where fewer than four pairs are left or one side is constant.
    """
    there = ~(x + y).isnan()
    x, y = x[there].double(), y[there].double()
    names = (
        list(range(len(x))) if groups is None else [g for g, kept in zip(groups, there.tolist(), strict=True) if kept]
    )
    if len(x) < 4:
        return Interval(math.nan, math.nan, math.nan)
    design = Design.of(names, over="texts")
    once = torch.ones(1, len(x), dtype=torch.float64)
    value = float(_correlations(x, y, once)[0])
    if math.isnan(value) or design.units < 2:
        return Interval(value, math.nan, math.nan)
    drawn = _correlations(x, y, design.draws(draws, seed))
    drawn = drawn[drawn.isfinite()].clamp(-NEAR_ONE, NEAR_ONE).atanh()
    centre = math.atanh(max(-NEAR_ONE, min(NEAR_ONE, value)))
    wider = math.sqrt(design.units / (design.units - 1)) * tail(level, design.units - 1)
    ends = drawn.quantile(drawn.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    low, high = (math.tanh(centre + wider * (end - centre)) for end in ends)
    return Interval(value, low, high)


def _correlations(
    x: Float[Tensor, " heads"], y: Float[Tensor, " heads"], times: Float[Tensor, "draws heads"]
) -> Float[Tensor, " draws"]:
    """ρ of each sample, in which a head is there so many `times`."""
    total = times.sum(1, keepdim=True)
    centred = []
    for side in (x, y):
        ranks = times @ (side[None] > side[:, None]).double() + (times @ (side[None] == side[:, None]).double() + 1) / 2
        centred.append(ranks - (times * ranks).sum(1, keepdim=True) / total)
    first, second = centred
    products = (times * first * second).sum(1)
    return products / ((times * first.square()).sum(1) * (times * second.square()).sum(1)).sqrt()
