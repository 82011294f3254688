"""Intervals of a mean and of a paired difference of means, over windows or over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens.statistics.design import Design

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FEWEST_DRAWS = 8
"""Draws (windows of each text, or texts) from which an interval is bootstrapped; below, Student's t says more of the
tails: a sample that draws one of two windows twice has next to no error of its own."""


class Interval(NamedTuple):
    """A number with the ends of its interval; NaN where there is none."""

    value: float
    """The estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


def student_interval(value: float, error: float, freedom: int, level: float = 0.95) -> Interval:
    """value ± t·error, t the quantile of Student's distribution with these degrees of freedom."""
    if freedom < 1 or math.isnan(error):
        return Interval(value, math.nan, math.nan)
    from scipy import stats

    reach = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    return Interval(value, value - reach, value + reach)


def further(values: Sequence[float], level: float = 0.95) -> float:
    """The number that one more draw stays below with a chance of `level`, m + t s √(1 + 1/n), t of n − 1 degrees.

    The one-sided prediction interval of n normal draws of one population for one further draw (Hahn 1970); NaN for
    fewer than two.
    """
    if len(values) < 2:
        return math.nan
    from scipy import stats

    every = torch.tensor(values, dtype=torch.float64)
    reach = float(stats.t.ppf(level, len(values) - 1)) * math.sqrt(1 + 1 / len(values))
    return float(every.mean() + reach * every.std())


def tail(level: float, freedom: int) -> float:
    """Student's quantile over the normal one."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, freedom) / stats.norm.ppf((1 + level) / 2))


def paired_difference(
    before: Float[Tensor, " windows"],
    after: Float[Tensor, " windows"],
    design: Design | None = None,
    *,
    weights: Float[Tensor, " windows"] | None = None,
    of: Callable[[Tensor], Tensor] | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """of(mean after) − of(mean before) over windows, with its interval.

    The studentised bootstrap (Efron & Tibshirani 1993, section 12.5): windows, or whole texts, are drawn in pairs, and
    the quantiles of (θ* − θ)/se* turn the sample's own error into an interval; Student's t where a text has fewer than
    eight windows, or where there are fewer than eight texts that are drawn.
    `weights` are the windows' numbers of tokens: means are then over tokens. `of` is the identity, or exp (perplexity)
    or log. Pairs with a NaN don't count; all three are NaN where none is left.
    """
    (there,) = (~(after - before).isnan()).nonzero(as_tuple=True)
    if not len(there):
        return Interval(math.nan, math.nan, math.nan)
    sampled = (design or Design.plain(len(before))).select(there.tolist())
    weight = torch.ones(len(there), dtype=torch.float64) if weights is None else weights.cpu()[there.cpu()].double()
    pair = torch.stack((before, after)).cpu()[:, there.cpu()].double()
    value, error = (float(part) for part in _contrast(pair, weight, torch.ones_like(weight), sampled, of))
    if sampled.fewest < FEWEST_DRAWS or not error > 0:
        return student_interval(value, error, sampled.freedom, level)
    found, errors = _contrast(pair, weight, sampled.draws(draws, seed), sampled, of)
    scores = (found - value) / errors
    scores = scores[scores.isfinite()]
    low, high = scores.quantile(scores.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return Interval(value, value - high * error, value - low * error)


def _contrast(
    pair: Float[Tensor, "2 windows"],
    weight: Float[Tensor, " windows"],
    times: Float[Tensor, "*draws windows"],
    design: Design,
    of: Callable[[Tensor], Tensor] | None,
) -> tuple[Float[Tensor, "*draws"], Float[Tensor, "*draws"]]:
    """The difference for each sample, and its standard error to first order (the delta method)."""
    total = (times * weight).sum(-1)
    means = torch.stack([(times * weight * side).sum(-1) / total for side in pair])
    slopes = torch.ones_like(means)
    if of is not None:
        with torch.enable_grad():
            point = means.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(of(point).sum(), point)
        means_of = of(means)
    else:
        means_of = means
    first, second = (
        slope[..., None] * (side - mean[..., None]) for slope, side, mean in zip(slopes, pair, means, strict=True)
    )
    residuals = weight * (second - first) / total[..., None]
    return means_of[1] - means_of[0], design.variance(residuals, times).sqrt()
