"""Intervals cover as often as they say, on populations with drift and heavy tails; the old sampling does not.

A text is a population of windows; its mean is what an interval over windows of it is about. Topics come in blocks, so
that windows in a row say less than as many windows spread over the text.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from attnlens.maths.statistics import (
    Design,
    false_discovery,
    median_error,
    p_values,
    paired_difference,
    rank_correlation,
    standard_error,
    student_interval,
)
from attnlens.models.texts.sequences import choose_windows

WINDOWS, POPULATION, BLOCK = 32, 640, 16
MANY = pytest.param(300, marks=pytest.mark.full)
each_size = pytest.mark.parametrize("samples", [40, MANY])
two_sided = pytest.mark.parametrize("samples", [160, MANY])
"""Where too wide an interval is to be noticed: below 149 samples, all of them may cover."""


def bounds(samples):
    """Between which the share of intervals that cover lies where each covers with 95 %."""
    return [float(stats.binom.ppf(q, samples, 0.95)) / samples for q in (0.0005, 0.9995)]


def drawn(generator, *shape, tails):
    """Gaussian, or Student's t with three degrees of freedom, whose fourth moment is infinite."""
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if tails == "gaussian":
        return normal
    squares = torch.randn(3, *shape, generator=generator, dtype=torch.float64).square().mean(0)
    return normal / squares.sqrt()


def text(seed, tails, heads=1, size=POPULATION):
    """One text: windows × heads, topic blocks of 16 windows and what is each window's own."""
    generator = torch.Generator().manual_seed(seed)
    topics = drawn(generator, size // BLOCK, heads, tails="gaussian").repeat_interleave(BLOCK, 0)
    return 0.6 * topics + drawn(generator, size, heads, tails=tails)


def picks(seed, placement, size=POPULATION):
    return choose_windows(size, WINDOWS, placement, seed)


def share(covers, samples, *arguments):
    """The share of the seeds for which that is true."""
    return sum(covers(seed, *arguments) for seed in range(samples)) / samples


@two_sided
@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
def test_the_error_of_a_mean_covers(tails, samples):
    def covers(seed, placement):
        population = text(seed, tails)[:, 0]
        sample = population[picks(seed, placement)]
        error = float(standard_error(sample[:, None], Design.plain(WINDOWS))[0])
        _, low, high = student_interval(float(sample.mean()), error, WINDOWS - 1)
        return low <= float(population.mean()) <= high

    assert bounds(samples)[0] <= share(covers, samples, "spread") <= 1
    assert bounds(samples)[0] <= share(covers, samples, "random") <= bounds(samples)[1]
    assert share(covers, samples, "first") < 0.85, "the control: windows in a row"


@each_size
@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
def test_the_error_of_a_median_over_heads_covers(tails, samples):
    def covers(seed, placement):
        population = text(seed, tails, heads=12) + torch.linspace(-1, 1, 12)
        sample = population[picks(seed, placement)]
        (error,) = median_error(sample, Design.plain(WINDOWS), [range(12)], draws=200, seed=seed)
        median = float(sample.mean(0).quantile(0.5))
        _, low, high = student_interval(median, error, WINDOWS - 1)
        return low <= float(population.mean(0).quantile(0.5)) <= high

    assert bounds(samples)[0] <= share(covers, samples, "spread") <= 1
    assert share(covers, 300, "first") < 0.85, "the control: windows in a row"


PAIRED = [(tails, of) for tails in ("gaussian", "heavy") for of in (None, torch.exp)]
"""Of losses and of perplexities."""


@pytest.mark.parametrize(
    ("tails", "of", "samples"),
    [
        *((*pair, 160 if pair == ("gaussian", None) else 40) for pair in PAIRED),
        *(pytest.param(*pair, 300, marks=pytest.mark.full) for pair in PAIRED),
    ],
)
def test_a_paired_difference_covers(tails, of, samples):
    def covers(seed, placement):
        before = 3 + 0.3 * text(seed, tails)[:, 0]
        after = before + 0.2 + 0.1 * text(seed + 300, tails)[:, 0]
        own = picks(seed, placement)
        found = paired_difference(before[own], after[own], of=of, draws=300, seed=seed)
        means = (before.mean(), after.mean())
        truth = float(means[1] - means[0] if of is None else of(means[1]) - of(means[0]))
        return found.low <= truth <= found.high

    assert bounds(samples)[0] <= share(covers, samples, "spread") <= 1
    assert share(covers, samples, "first") < 0.85, "the control: windows in a row"


@two_sided
@pytest.mark.parametrize("sizes", [(3, 3, 2), (2, 2, 2, 2), (16, 8, 8)])
def test_a_paired_difference_over_windows_of_several_texts_covers_and_is_no_wider_than_students(sizes, samples):
    """A bootstrap sample that draws one of two windows twice has no error of its own, and its interval no end."""
    design = Design.of([text for text, size in enumerate(sizes) for _ in range(size)], "windows")

    def interval_of(seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
        interval = paired_difference(torch.zeros_like(values), values, design, draws=300, seed=seed)
        error = float(standard_error(values[:, None], design)[0])
        student = student_interval(interval.value, error, design.freedom)
        return interval.low <= 0 <= interval.high, (interval.high - interval.low) / (student.high - student.low)

    covered, wider = zip(*map(interval_of, range(samples)), strict=True)
    assert bounds(samples)[0] <= sum(covered) / samples <= bounds(samples)[1]
    assert max(wider) < 1.7


def test_the_error_of_a_median_is_that_of_each_texts_windows():
    """Of few windows that vary much and many that vary little: one factor for all would say too little."""
    sizes, sds = (28, 2, 2), (1.0, 5.0, 5.0)
    design = Design.of([text for text, size in enumerate(sizes) for _ in range(size)], "windows")
    spread = torch.cat([torch.full((size,), sd, dtype=torch.float64) for size, sd in zip(sizes, sds, strict=True)])
    errors = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        values = spread[:, None] * torch.randn(32, 1, generator=generator, dtype=torch.float64)
        errors += median_error(values, design, [[0]], draws=100, seed=seed)
    truth = math.sqrt(sum(size * sd**2 for size, sd in zip(sizes, sds, strict=True))) / 32
    assert math.sqrt(sum(error**2 for error in errors) / 300) == pytest.approx(truth, rel=0.05)


@two_sided
@pytest.mark.parametrize("count", [5, 9])
def test_intervals_over_texts_cover_texts_like_them_and_those_over_windows_do_not(count, samples):
    def covers(seed, over):
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randn(count, generator=generator, dtype=torch.float64)
        values = kinds.repeat_interleave(6) + torch.randn(6 * count, generator=generator, dtype=torch.float64)
        design = Design.of([number // 6 for number in range(6 * count)], over)
        found = paired_difference(torch.zeros_like(values), values, design, draws=300, seed=seed)
        return found.low <= 0 <= found.high

    assert bounds(samples)[0] <= share(covers, samples, "texts") <= bounds(samples)[1]
    assert share(covers, samples, "windows") < 0.85, "the control: these texts' windows"


@two_sided
def test_spearmans_interval_covers(samples):
    """Of a normal pair ρ_S = (6/π)·asin(ρ/2) (Pearson 1907)."""
    truth = 6 / math.pi * math.asin(0.5 / 2)

    def covers(seed, groups):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(48, generator=generator, dtype=torch.float64) for _ in range(2))
        value, low, high = rank_correlation(x, 0.5 * x + math.sqrt(0.75) * y, groups, draws=200, seed=seed)
        assert low <= value <= high
        return low <= truth <= high

    assert bounds(samples)[0] <= share(covers, samples, None) <= bounds(samples)[1]


@each_size
@pytest.mark.parametrize(("layers", "heads", "alike"), [(4, 8, 0.0), (6, 12, 0.5), (12, 8, 0.9)])
def test_spearmans_interval_over_layers_covers(layers, heads, alike, samples):
    """Heads of a layer alike by any amount; of four layers too."""
    groups = [number // heads for number in range(layers * heads)]

    def covers(seed, groups):
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(2, layers, generator=generator, dtype=torch.float64).repeat_interleave(heads, 1)
        own = torch.randn(2, layers * heads, generator=generator, dtype=torch.float64)
        found = rank_correlation(*(math.sqrt(alike) * common + math.sqrt(1 - alike) * own), groups, 200, seed=seed)
        return found.low <= 0 <= found.high

    assert share(covers, samples, groups) >= bounds(samples)[0]
    if alike > 0.2:
        assert share(covers, samples, None) < 0.8, "the control: heads drawn one by one"


def named(population, seed, placement):
    """Whether a sweep names a head, none of which differs from 0 over the whole text: by p_values, by Student's t."""
    sample = (population - population.mean(0))[picks(seed, placement)]
    design = Design.plain(WINDOWS)
    ours = p_values(sample.T, design, torch.ones(WINDOWS), seed)
    scores = sample.mean(0) / standard_error(sample, design)
    students = torch.from_numpy(2 * stats.t.sf(scores.abs().numpy(), WINDOWS - 1))
    return bool(false_discovery(ours).any()), bool(false_discovery(students).any())


@each_size
def test_a_sweep_without_effects_names_a_head_in_at_most_five_percent_of_runs(samples):
    def names_a_head(seed, placement):
        return named(text(seed, "gaussian", heads=16), seed, placement)[0]

    most = float(stats.binom.ppf(0.9995, samples, 0.05)) / samples
    assert share(names_a_head, samples, "spread") <= most
    assert share(names_a_head, samples, "first") > 0.2, "the control: windows in a row"


@each_size
def test_of_skewed_differences_it_names_half_as_many_as_students_t(samples):
    """Windows of 32 heads that are χ² with four degrees of freedom: still more than 5 %, as docs/inference.md says."""

    def pair(seed):
        generator = torch.Generator().manual_seed(seed)
        squares = torch.randn(4, POPULATION, 32, generator=generator, dtype=torch.float64).square().sum(0)
        return named(squares, seed, "random")

    ours, students = zip(*(pair(seed) for seed in range(samples)), strict=True)
    assert sum(ours) < 0.75 * sum(students)
    assert sum(students) / samples > 0.1, "the control: they are skewed"


def test_spread_windows_lie_apart_and_first_ones_do_not():
    for placement, distance in (("spread", POPULATION // WINDOWS), ("first", 1)):
        assert {after - before for before, after in pairwise(picks(3, placement))} == {distance}
