"""Spearman's rank correlation with a bootstrap interval over heads or over groups of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnlens.statistics.design import Design
from attnlens.statistics.intervals import Interval

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
    and widened by √(n/(n − 1)), n the draws. NaN where fewer than four pairs are left or one side is constant.
    """
    there = ~(x + y).isnan()
    x, y = x[there].double(), y[there].double()
    names = (
        list(range(len(x))) if groups is None else [g for g, kept in zip(groups, there.tolist(), strict=True) if kept]
    )
    if len(x) < 4:
        return Interval(math.nan, math.nan, math.nan)
    design = Design.of(names, over="texts")
    value = float(_correlation(x[None], y[None])[0])
    if math.isnan(value) or design.units < 2:
        return Interval(value, math.nan, math.nan)
    picks = [times.long().clamp(min=0) for times in design.draws(draws, seed)]
    drawn = torch.stack([_drawn(x, y, times) for times in picks])
    centre = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value)))
    drawn = drawn[drawn.isfinite()].clamp(-1 + 1e-12, 1 - 1e-12).atanh()
    ends = drawn.quantile(drawn.new_tensor([(1 - level) / 2, (1 + level) / 2]))
    low, high = (
        math.tanh(centre + math.sqrt(design.units / (design.units - 1)) * (float(end) - centre)) for end in ends
    )
    return Interval(value, low, high)


def _drawn(x: Tensor, y: Tensor, times: Tensor) -> Tensor:
    picks = torch.arange(len(x)).repeat_interleave(times)
    return _correlation(x[picks][None], y[picks][None])[0]


def _correlation(x: Float[Tensor, "some heads"], y: Float[Tensor, "some heads"]) -> Float[Tensor, " some"]:
    first, second = (_ranks(side) - _ranks(side).mean(-1, keepdim=True) for side in (x, y))
    found: Tensor = (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    return found


def _ranks(values: Float[Tensor, "some heads"]) -> Float[Tensor, "some heads"]:
    """Ranks, equal values sharing the mean of theirs."""
    below = (values[:, :, None] > values[:, None, :]).sum(-1)
    equal = (values[:, :, None] == values[:, None, :]).sum(-1)
    return below + (equal + 1) / 2
