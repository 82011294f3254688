"""Rank correlations, permutation tests and reliability of measures of heads; comparisons of treatments in blocks.

A measure is compared with the harm: the increase in loss when a head is changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from attnlens.lazy import LazyModule
from attnlens.maths.statistics.design import Design
from attnlens.maths.statistics.intervals import LEVEL, Interval, student_interval

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray
    from torch import Tensor

    PerHead = Float[Tensor, " heads"]
    Draws = Float[Tensor, "draws heads"]
    Measures = Float[Tensor, "measures heads"]
    Windows = Float[Tensor, "windows heads"]
    Sizes = Float[Tensor, " windows"]
    Variances = Float[ndarray, " pairs"]

optimize = LazyModule("scipy.optimize")
special = LazyModule("scipy.special")
stats = LazyModule("scipy.stats")

LEAST = 1e-5  # Lower limit on variances, relative to their median: differences equal by chance must not give p = 0
COUNTED = 0.5  # Factor for degrees of freedom from other pairs: pairs with a common treatment share noise
FEWEST = 3  # Fewest variances whose spread can be estimated; fewer variances are not moderated
NEAR_ONE = 1 - 1e-12
"""Largest |ρ| passed to artanh, which is infinite at 1; a bootstrap sample can have |ρ| = 1."""
PERMUTATIONS = 10_000  # Permutations of heads for a p-value
DRAWS = 1000  # Bootstrap samples of windows for an interval
SPLITS = 100  # Random halvings of the windows
ROUNDING = 1e-9  # Largest rounding difference between equal scores of two permutations


@dataclass(frozen=True)
class Blocks:
    """Table of treatments × blocks, y_cs = μ_c + β_s + ε_cs; the variance of ε can differ between treatments.

    Student's t compares two treatments by their differences in each block, in which β cancels. The variance of the
    differences is moderated by the variances of other pairs (Smyth 2004), which add more degrees of freedom the more
    similar they are. The test suite checks the false positive rate.
    """

    values: Float[Tensor, "treatments blocks"]  # One row per treatment, one column per block; finite
    kinds: Sequence[int] = ()
    """Kind of each treatment. A pair's variance is moderated by other pairs of the same two kinds. Empty: one kind."""

    @property
    def means(self) -> Float[Tensor, " treatments"]:
        """Mean of each treatment."""
        return self.values.double().mean(1)

    def p_values(self) -> list[float]:
        """Return the two-sided p-value of each pair (a, b) of treatments, in the order of `pairs_of`, for μ_a = μ_b.

        A p-value is NaN if there is a single block, or if more than half of the pairs of the same two kinds have
        differences of zero variance.
        """
        pairs, values = pairs_of(len(self.values)), self.values.double().numpy()
        blocks, differences = values.shape[1], np.array([values[a] - values[b] for a, b in pairs])
        variances, p_values = differences.var(1, ddof=1), np.full(len(pairs), np.nan)
        kinds = self.kinds or [0] * len(values)
        kinds_of_pairs = [tuple(sorted((kinds[a], kinds[b]))) for a, b in pairs]
        for kinds_of_pair in set(kinds_of_pairs):
            members = [index for index, each in enumerate(kinds_of_pairs) if each == kinds_of_pair]
            others = len({treatment for index in members for treatment in pairs[index]}) - 2
            moderated, prior = _moderate_variances(variances[members], blocks - 1, others)
            score = np.abs(differences[members].mean(1)) / np.sqrt(moderated / blocks)
            p_values[members] = 2 * stats.t.sf(score, blocks - 1 + prior)
        return list(map(float, p_values))


def _moderate_variances(variances: Variances, freedom: int, others: int) -> tuple[Variances, float]:
    """Return (d₀s₀² + d s²)/(d₀ + d) for each s² with d degrees of freedom, and d₀ (Smyth 2004, Section 6.2).

    d₀ and s₀² are the parameters of the scaled χ² distribution that fits the spread of log s². d₀ is at most the
    degrees of freedom of `others` treatments, and is then multiplied by COUNTED. Fewer than FEWEST variances are not
    moderated, and d₀ is 0. Each s² is raised to at least LEAST times the median; if the median is 0, the results are
    NaN and 0.
    """
    middle = float(np.median(variances))
    if not middle > 0:
        return np.full(len(variances), np.nan), 0.0
    variances = np.maximum(variances, LEAST * middle)
    if len(variances) < FEWEST:
        return variances, 0.0
    logs = np.log(variances) - special.digamma(freedom / 2) + math.log(freedom / 2)
    excess, most = logs.var(ddof=1) - special.polygamma(1, freedom / 2), float(freedom * others)
    prior = most
    if excess > special.polygamma(1, most / 2):
        # The trigamma function decreases from +∞ at 0, so that the root lies between these ends.
        prior = 2 * optimize.brentq(lambda half: special.polygamma(1, half) - excess, 1e-6, most)
    centre = math.exp(logs.mean() + special.digamma(prior / 2) - math.log(prior / 2))
    prior *= COUNTED
    return (prior * centre + freedom * variances) / (prior + freedom), prior


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p adjusted for n tests; the k-th smallest becomes max_{j≤k} (n − j + 1) p_(j), at most 1 (Holm 1979).

    NaN stays NaN and does not count as a test.
    """
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda index: p_values[index])
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(order) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Return all unordered pairs of different indices below `count`."""
    return list(itertools.combinations(range(count), 2))


def rank_correlation(
    x: PerHead, y: PerHead, groups: Sequence[object] | None = None, draws: int = 2000, seed: int = 0
) -> Interval:
    """Return Spearman's ρ in [−1, 1] and its 95 % interval. Ties share their mean rank; pairs with NaN do not count.

    The interval's ends are quantiles of artanh ρ over bootstrap samples of heads, or of whole `groups` (layers).
    Because intervals from few layers would be too narrow, the distance of each end from the artanh ρ of all heads is
    multiplied by √(n/(n − 1)), for n heads or groups, and by the ratio of Student's t (n − 1 degrees of freedom) to the
    normal quantile. All three numbers are NaN for fewer than four pairs, or if all x or all y are equal; for a single
    group, only the ends are NaN.
    """
    present = ~(x + y).isnan()
    x, y = x[present].double(), y[present].double()
    if len(x) < 4:
        return Interval(math.nan, math.nan, math.nan)
    names = zip(range(len(present)) if groups is None else groups, present.tolist(), strict=True)
    design = Design.of([name for name, has_both in names if has_both], over="texts")
    value = float(_correlations(x, y, torch.ones(1, len(x), dtype=torch.float64))[0])
    if math.isnan(value) or design.units < 2:
        return Interval(value, math.nan, math.nan)
    samples = _correlations(x, y, design.draws(draws, seed))
    samples = samples[samples.isfinite()].clamp(-NEAR_ONE, NEAR_ONE).atanh()
    centre = math.atanh(max(-NEAR_ONE, min(NEAR_ONE, value)))
    student_over_normal = stats.t.ppf((1 + LEVEL) / 2, design.units - 1) / stats.norm.ppf((1 + LEVEL) / 2)
    widening = math.sqrt(design.units / (design.units - 1)) * float(student_over_normal)
    ends = samples.quantile(samples.new_tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])).tolist()
    low, high = (math.tanh(centre + widening * (end - centre)) for end in ends)
    return Interval(value, low, high)


def _correlations(x: PerHead, y: PerHead, times: Draws) -> Float[Tensor, " draws"]:
    """Return Spearman's ρ of x and y in each sample; `times` counts the occurrences of each head in each sample."""
    total = times.sum(1, keepdim=True)
    centred = []
    for side in (x, y):
        ranks = times @ (side[None] > side[:, None]).double() + (times @ (side[None] == side[:, None]).double() + 1) / 2
        centred.append(ranks - (times * ranks).sum(1, keepdim=True) / total)
    first, second = centred
    products = (times * first * second).sum(1)
    return products / ((times * first.square()).sum(1) * (times * second.square()).sum(1)).sqrt()


class PermutationTests(NamedTuple):
    """Permutation p-values of each measure's rank correlation with the harm."""

    p_value: Float[Tensor, " measures"]  # two-sided, not corrected for the number of measures
    corrected: Float[Tensor, " measures"]  # corrected for the number of measures


def rank_values(values: Float[Tensor, "*batch heads"]) -> Float[Tensor, "*batch heads"]:
    """Return ranks along the last axis; ties share their mean rank, and a NaN in a row makes the whole row NaN."""
    return torch.from_numpy(np.asarray(stats.rankdata(values.double().numpy(), axis=-1, nan_policy="propagate")))


def permutation_tests(measures: Measures, harm: PerHead, draws: int = PERMUTATIONS, seed: int = 0) -> PermutationTests:
    """Return the permutation p-values of each measure's Spearman correlation ρ with the harm.

    p is (1 + #{t* ≥ t})/(1 + draws), where t = |ρ|√(n − 1) over the n heads with both values, and t* is the value of t
    after a permutation of the harms. Each permutation is used for all measures. `corrected` compares t with the largest
    t* of any measure (maxT, Westfall & Young 1993, section 2.6), which bounds the probability of reporting even
    one unassociated measure. Harms are ranked among all heads with a harm. NaN for a measure that is constant or has
    fewer than four values.
    """
    has_harm = ~harm.isnan()
    values, harm = measures.double()[:, has_harm], harm[has_harm].double()
    ranks = rank_values(harm) if len(harm) else harm
    present = ~values.isnan()
    centred = torch.zeros_like(values)
    for row, (value, heads) in enumerate(zip(values, present, strict=True)):
        if int(heads.sum()) >= 4:
            value_ranks = rank_values(value[heads])
            centred[row, heads] = value_ranks - value_ranks.mean()
    observed = _permutation_scores(centred, present.double(), ranks[None])[0]
    generator = np.random.default_rng(seed)
    beyond, largest = torch.zeros_like(observed), torch.zeros_like(observed)
    for size in [1000] * (draws // 1000) + [draws % 1000]:
        samples = generator.permuted(np.tile(ranks.numpy(), (size, 1)), axis=1)
        scores = _permutation_scores(centred, present.double(), torch.from_numpy(samples))
        beyond += (scores >= observed - ROUNDING).sum(0)
        most = scores.nan_to_num(nan=0.0).amax(1, keepdim=True) if scores.numel() else scores
        largest += (most >= observed - ROUNDING).sum(0)
    undefined = observed.isnan()
    p_value, corrected = (((1 + hits) / (1 + draws)).masked_fill(undefined, math.nan) for hits in (beyond, largest))
    return PermutationTests(p_value, corrected)


def _permutation_scores(centred: Measures, present: Measures, ranks: Draws) -> Float[Tensor, "draws measures"]:
    """Return |ρ|√(n − 1) for each measure and each row of harm ranks; NaN if either is constant."""
    count = present.sum(1)
    spread = ranks.square() @ present.mT - (ranks @ present.mT).square() / count.clamp(min=1)
    # Rounding can leave the spread of equal ranks below 0.
    scale = (spread * centred.square().sum(1)).clamp(min=0).sqrt()
    scores = (ranks @ centred.mT).abs() / scale * (count - 1).clamp(min=0).sqrt()
    return torch.where(scale > ROUNDING, scores, torch.nan)


def windows_interval(
    measure: PerHead | Windows,
    harm: Windows,
    sizes: Sizes,
    design: Design,
    value: float,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return the 95 % interval, over windows, of the correlation ρ = `value` between a measure and the harm.

    The interval is tanh(artanh ρ ± t·sd), with Student's t and the sd of artanh ρ* over bootstrap samples of windows or
    texts, widened by `Design.widening`. The harm is recomputed in each sample, and so is the measure if it has an axis
    of windows. Samples in which a head lacks a value are ignored. The ends are NaN if ρ is NaN, if `design` has no
    degrees of freedom, or if fewer than two samples remain.
    """
    if design.freedom < 1 or math.isnan(value):
        return Interval(value, math.nan, math.nan)
    times = 1 + (design.draws(draws, seed) - 1) * design.widening
    weight = times * sizes.double()
    harms = rank_values(weight @ harm.double() / weight.sum(1, keepdim=True))
    if measure.dim() == 1:
        values = rank_values(measure.double())[None]
    else:
        present = (~measure.isnan()).double()
        values = rank_values(times @ measure.double().nan_to_num(nan=0.0) / (times @ present))
    first, second = (side - side.mean(1, keepdim=True) for side in (values, harms))
    samples = (first * second).sum(1) / (first.square().sum(1) * second.square().sum(1)).sqrt()
    samples = samples[samples.isfinite()].clamp(-NEAR_ONE, NEAR_ONE).atanh()
    if len(samples) < 2:
        return Interval(value, math.nan, math.nan)
    centre = math.atanh(max(-NEAR_ONE, min(NEAR_ONE, value)))
    _, low, high = student_interval(centre, float(samples.std()), design.freedom)
    return Interval(value, math.tanh(low), math.tanh(high))


def split_half(harm: Windows, sizes: Sizes, design: Design, seed: int = 0) -> float:
    """Return the Spearman–Brown reliability 2r/(1 + r) ≥ 0 of the heads' harms, from halves of the windows.

    r is the median of Spearman's ρ between the harms on both halves over random halvings, within each text if every
    text has at least two windows. A measure that predicts the harm perfectly, apart from noise between windows, has an
    expected ρ of √reliability. NaN for fewer than two windows or fewer than four heads; 0 if r is undefined.
    """
    if design.count < 2 or harm.shape[1] < 4:
        return math.nan
    generator, correlations = torch.Generator().manual_seed(seed), []
    groups = [row.nonzero()[:, 0] for row in Design(design.texts, "windows").members]
    for _ in range(SPLITS):
        half = torch.zeros(design.count, dtype=torch.bool)
        for windows in groups:
            half[windows[torch.randperm(len(windows), generator=generator)[: len(windows) // 2]]] = True
        means = [sizes[part].double() @ harm[part].double() / sizes[part].sum() for part in (half, ~half)]
        correlations.append(float(torch.corrcoef(rank_values(torch.stack(means)))[0, 1]))
    r = math.nan if np.isnan(correlations).all() else float(np.nanmedian(correlations))
    return max(0.0, 2 * r / (1 + r)) if r > -1 else 0.0
