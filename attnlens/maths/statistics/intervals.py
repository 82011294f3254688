"""Standard errors, intervals, p-values and false discovery rates over windows or texts; null distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attnlens.lazy import LazyModule
from attnlens.maths.statistics.design import Design
from attnlens.records import QueryKey
from attnlens.records.provenance import FEWEST_DRAWS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    PerWindow = Float[Tensor, " windows"]
    PerUnit = Float[Tensor, " units"]
    PerDraw = Float[Tensor, "*draws"]
    Samples = Float[Tensor, "*draws windows"]
    Transform = Callable[[Tensor], Tensor]

stats = LazyModule("scipy.stats")

LEVEL = 0.95  # Confidence level of all intervals and bounds
DRAWN_BYTES = 2**26  # Bytes of random factors processed at once: all draws together can exceed memory
MEDIAN_DRAWS = 2000  # Draws of all heads for the null of a median: the sd is then known to 1/√4000, 1.6 %
MEDIAN_ERROR_DRAWS = 1000  # Bootstrap samples for the standard error of a median: it is then known to 1/√2000, 2.2 %
DRAWS = 20_000  # Bootstrap samples for a p-value: among 300 heads, the smallest p must be able to fall below 0.05/300
MOST_WINDOWS = 256  # Most windows that are bootstrapped: the effect of skewness on Student's t falls with √windows
ENOUGH = 50  # Samples beyond a unit's score after which its bootstrap ends: p is then accurate (Besag & Clifford 1991)
PIECE = 500  # Samples computed at once


def gaussian_null(
    analyzers: Sequence[Any], like: QueryKey, draws: int = 32, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return the mean and sd, keyed by measure, of scalar measures over random heads with the shape and RoPE of `like`.

    The factors of a random head are independent and Gaussian, with unit Frobenius norm: the caller must rescale
    measures that are proportional to ‖W_Q‖‖W_K‖. Each analyzer needs a `function` of a QueryKey, and `measures` with
    `name`, `curve` and `has_null`; all analyzers get the same draws. Draws in which a measure is NaN do not count.
    Curves, measures whose `has_null` is false, and measures with fewer than two values are left out.
    """
    generator = np.random.default_rng(seed)  # draws normal numbers in half the time of torch
    size = 8 * (like.query[..., 0, :, :].numel() + like.key[..., 0, :, :].numel())
    at_once = max(1, min(draws, DRAWN_BYTES // size))
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, draws, at_once):
        heads = _draw_heads(like, min(at_once, draws - start), generator)
        for analyzer in analyzers:
            readings = analyzer.function(heads)
            for measure in analyzer.measures:
                if measure.has_null and not measure.curve and measure.name in readings:
                    parts.setdefault(measure.name, []).append(readings[measure.name].double())
    null = {}
    for name, values_of_parts in parts.items():
        values = torch.cat(values_of_parts)
        values = values[~values.isnan()]
        if len(values) > 1:
            null[name] = (float(values.mean()), float(values.std()))
    return null


def _draw_heads(like: QueryKey, count: int, generator: np.random.Generator) -> QueryKey:
    """Return a QueryKey like `like` with `count` random heads whose factors have unit norm."""

    def draw_factor(shape: torch.Size) -> Tensor:
        factor = torch.from_numpy(generator.standard_normal((count, *shape[-2:])))
        factor /= torch.linalg.matrix_norm(factor, keepdim=True)
        return factor.to(like.query.device)

    heads = tuple(range(count))
    query, key = draw_factor(like.query.shape), draw_factor(like.key.shape)
    return replace(like, query=query, key=key, heads=heads, key_of=heads)


def null_of_median(means: Float[Tensor, " heads"], sds: Float[Tensor, " heads"], seed: int = 0) -> tuple[float, float]:
    """Return the mean and sd of the median over heads of independent normal values with these means and sds."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(MEDIAN_DRAWS, len(means), generator=generator, dtype=torch.float64)
    medians = (means.double() + sds.double() * normal).quantile(0.5, dim=1)
    return float(medians.mean()), float(medians.std())


def robust_z(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return (value − median)/(1.4826 · MAD), where MAD is the median absolute deviation; NaN if MAD is 0.

    1.4826 · MAD estimates a normal sd. NaN values do not count and stay NaN (Iglewicz & Hoaglin 1993).
    """
    numbers = values.double()
    if not len(numbers):
        return numbers
    deviations = numbers - numbers.nanquantile(0.5)
    spread = 1.4826 * float(deviations.abs().nanquantile(0.5))
    return deviations / (spread if spread > 0 else math.nan)


class Interval(NamedTuple):
    """A number and its confidence interval; the ends are NaN if there is no interval."""

    value: float
    low: float
    high: float


def student_interval(value: float, error: float, freedom: int) -> Interval:
    """Return the 95 % interval value ± t·error, with the quantile t of Student's distribution.

    `freedom` is the number of degrees of freedom. The ends are NaN if it is less than 1 or if the error is NaN.
    """
    if freedom < 1 or math.isnan(error):
        return Interval(value, math.nan, math.nan)
    half_width = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    return Interval(value, value - half_width, value + half_width)


def prediction_bound(values: Sequence[float]) -> float:
    """Return m + t s √(1 + 1/n), which a further draw from the same normal population exceeds with probability 0.05.

    This is the one-sided prediction bound of the n values (Hahn 1970), with their mean m and sd s; t has n − 1 degrees
    of freedom. NaN for fewer than two values.
    """
    if len(values) < 2:
        return math.nan
    draws = torch.tensor(values, dtype=torch.float64)
    factor = float(stats.t.ppf(LEVEL, len(values) - 1)) * math.sqrt(1 + 1 / len(values))
    return float(draws.mean() + factor * draws.std())


def paired_difference(
    before: PerWindow,
    after: PerWindow,
    design: Design | None = None,
    *,
    weights: PerWindow | None = None,
    of: Transform | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return f(mean after) − f(mean before) over windows, with its 95 % interval; f is `of`.

    The interval is that of a studentised bootstrap (Efron & Tibshirani 1993, section 12.5): windows, or whole texts,
    are resampled with both values of each window, and the standard error is multiplied by the quantiles of (θ* −
    θ)/se*. Student's t is used if the design has fewer than eight `exchangeable` draws, or if the error is 0. If
    `weights` (each window's number of tokens) are given, means are over tokens. `of` is the identity (None), exp
    (perplexity) or log. Pairs with a NaN do not count; all three numbers are NaN if no pair remains.
    """
    (present,) = (~(after - before).isnan()).nonzero(as_tuple=True)
    if not len(present):
        return Interval(math.nan, math.nan, math.nan)
    design = (design or Design.plain(len(before))).select(present.tolist())
    weight = torch.ones(len(present), dtype=torch.float64) if weights is None else weights.cpu()[present.cpu()].double()
    pair = torch.stack((before, after)).cpu()[:, present.cpu()].double()
    value, error = (float(part) for part in _contrast(pair, weight, torch.ones_like(weight), design, of))
    if design.exchangeable < FEWEST_DRAWS or not error > 0:
        return student_interval(value, error, design.freedom)
    differences, errors = _contrast(pair, weight, design.draws(draws, seed), design, of)
    scores = (differences - value) / errors
    scores = scores[scores.isfinite()]
    low, high = scores.quantile(scores.new_tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])).tolist()
    return Interval(value, value - high * error, value - low * error)


def _contrast(
    pair: Float[Tensor, "2 windows"], weight: PerWindow, times: Samples, design: Design, of: Transform | None
) -> tuple[PerDraw, PerDraw]:
    """Return `of`(mean after) − `of`(mean before) in each sample, and its delta-method standard error."""
    total = (times * weight).sum(-1)
    means = torch.stack([(times * weight * side).sum(-1) / total for side in pair])
    values, slopes = means, torch.ones_like(means)
    if of is not None:
        with torch.enable_grad():
            point = means.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(of(point).sum(), point)
        values = of(means)
    first, second = (
        slope[..., None] * (side - mean[..., None]) for slope, side, mean in zip(slopes, pair, means, strict=True)
    )
    residuals = weight * (second - first) / total[..., None]
    return values[1] - values[0], design.variance(residuals, times).sqrt()


def standard_error(values: Float[Tensor, "windows ..."], design: Design) -> Float[Tensor, "*rest"]:
    """Return the standard error of each entry's mean over windows, ignoring NaN.

    The error is the square root of `Design.variance`: sd/√n for windows of one text, NaN for a single window or text.
    """
    rows = values.double().movedim(0, -1)
    present = (~rows.isnan()).double()
    rows = rows.nan_to_num(nan=0.0)
    count = present.sum(-1, keepdim=True).clamp(min=1)
    residuals = (rows - rows.sum(-1, keepdim=True) / count) * present / count
    return design.variance(residuals, present).sqrt()


def median_error(
    values: Float[Tensor, "windows heads"],
    design: Design,
    groups: Sequence[Sequence[int]],
    draws: int = MEDIAN_ERROR_DRAWS,
    seed: int = 0,
) -> list[float]:
    """Return, for each group, the standard error of the median over its heads of each head's mean over windows.

    The error is the sd over bootstrap samples of windows, widened by `Design.widening`. Every sample averages all heads
    over the same windows, because heads that read the same text are not independent. NaN if `design.freedom` is 0.
    """
    if design.freedom < 1 or not len(values):
        return [math.nan] * len(groups)
    times = 1 + (design.draws(draws, seed) - 1) * design.widening
    present = (~values.isnan()).double()
    means = (times @ values.double().nan_to_num(nan=0.0)) / (times @ present)
    return [float(means[:, list(group)].nanquantile(0.5, dim=1).std()) for group in groups]


def p_values(differences: Float[Tensor, "units windows"], design: Design, weights: PerWindow, seed: int = 0) -> PerUnit:
    """Return the two-sided p-value of each row for the hypothesis that its mean difference, weighted by tokens, is 0.

    p is (1 + #{|θ* − θ|/se* ≥ |θ|/se})/(1 + draws) by the studentised bootstrap, because Student's t reports nearly
    twice as many false effects as this bootstrap if heads' differences are skewed. If fewer than ENOUGH samples exceed
    |θ|/se, p is the tail of Student's t, stretched to match the ENOUGH-th largest sample score. For fewer than eight
    `exchangeable` draws or more than MOST_WINDOWS windows, p is that of Student's t. NaN if there are too few
    differences, or if all are equal.
    """
    size = weights.double()
    differences = differences.double()
    mean, error = design.weighted_means(differences, size, torch.ones_like(size)[None])
    scores = torch.where(error > 0, mean.abs() / error, torch.nan)[0]
    centred = differences - mean.mT  # a large mean would cost digits
    if design.exchangeable < FEWEST_DRAWS or design.count > MOST_WINDOWS:
        return _student_p(scores, design.freedom)
    beyond, samples = torch.zeros_like(scores), torch.zeros_like(scores)
    largest = torch.zeros(len(scores), ENOUGH, dtype=torch.float64)
    for times in torch.split(design.draws(DRAWS, seed), PIECE):
        active = (beyond < ENOUGH) & ~scores.isnan()
        if not bool(active.any()):
            break
        means, errors = design.weighted_means(centred[active], size, times)
        sample_scores = (means.abs() / errors).nan_to_num(nan=0.0).mT
        beyond[active] += (sample_scores >= scores[active, None]).sum(1)
        samples[active] += len(times)
        largest[active] = torch.cat((largest[active], sample_scores), 1).topk(ENOUGH).values
    # P(|t| ≥ score/c) with c ≥ 1 such that this probability is ENOUGH/samples at the ENOUGHth largest sample score.
    reached = stats.t.isf(ENOUGH / (2 * samples.clamp(min=ENOUGH).numpy()), design.freedom)
    tail = _student_p(scores / (largest[:, -1] / torch.from_numpy(reached)).clamp(min=1), design.freedom)
    counted = torch.where(scores.isnan(), torch.nan, (1 + beyond) / (1 + samples))
    return torch.where(beyond < ENOUGH, tail, counted)


def _student_p(scores: PerUnit, freedom: int) -> PerUnit:
    """Return the two-sided p-values of these scores by Student's t; NaN if `freedom` is 0."""
    return torch.from_numpy(2 * stats.t.sf(scores.numpy(), freedom)) if freedom > 0 else scores * torch.nan


def adjust_p_values(p_values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the q-value of each p-value: the least false discovery rate at which its hypothesis is rejected.

    The method is due to Benjamini & Hochberg (1995). NaN stays NaN and does not count as a hypothesis.
    """
    rates = torch.full_like(p_values, torch.nan, dtype=torch.float64)
    present = ~p_values.isnan()
    if bool(present.any()):
        rates[present] = torch.from_numpy(stats.false_discovery_control(p_values[present].double().numpy()))
    return rates


def false_discovery(p_values: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Return a mask of the hypotheses to reject; the expected share of wrong rejections among them is ≤ `rate`.

    A hypothesis with p = NaN is never rejected.
    """
    return adjust_p_values(p_values) <= rate
