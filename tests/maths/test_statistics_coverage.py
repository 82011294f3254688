"""Tests that intervals have their nominal coverage on populations with drift and heavy tails.

A text is a population of windows, whose mean the intervals estimate. Topics come in blocks, so that consecutive windows
contain less information than as many windows spread over the text.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from attnlens.maths import statistics
from attnlens.maths.statistics import Design, paired_difference, rank_correlation, standard_error, student_interval
from attnlens.models.texts.sequences import choose_windows

WINDOWS, POPULATION, BLOCK = 32, 640, 16
TAILS = ("gaussian", "heavy")
each_size = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.full)], ids=["few", "many"])


def bounds(samples):
    """Limits on the observed coverage if the true coverage is 95 %."""
    return [float(stats.binom.ppf(q, samples, 0.95)) / samples for q in (0.0005, 0.9995)]


def share(covers, samples, *arguments):
    """The share of seeds for which `covers` is true."""
    return sum(covers(seed, *arguments) for seed in range(samples)) / samples


def normals(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def drawn(generator, *shape, tails):
    """Gaussian, or Student's t with three degrees of freedom, whose fourth moment is infinite."""
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if tails == "gaussian":
        return values
    return values / torch.randn(3, *shape, generator=generator, dtype=torch.float64).square().mean(0).sqrt()


def text(seed, tails, heads=1):
    """One text (windows × heads): topics, which are constant in blocks of 16 windows, plus noise of each window."""
    generator = torch.Generator().manual_seed(seed)
    topics = drawn(generator, POPULATION // BLOCK, heads, tails="gaussian").repeat_interleave(BLOCK, 0)
    return 0.6 * topics + drawn(generator, POPULATION, heads, tails=tails)


def picks(seed, placement):
    return choose_windows(POPULATION, WINDOWS, placement, seed)


def mean_is_covered(seed, placement, tails):
    population = text(seed, tails)[:, 0]
    sample = population[picks(seed, placement)]
    error = float(standard_error(sample[:, None], Design.plain(WINDOWS))[0])
    _, low, high = student_interval(float(sample.mean()), error, WINDOWS - 1)
    return low <= float(population.mean()) <= high


def median_of_heads_is_covered(seed, placement, tails):
    population = text(seed, tails, heads=12) + torch.linspace(-1, 1, 12)
    sample = population[picks(seed, placement)]
    (error,) = statistics.median_error(sample, Design.plain(WINDOWS), [range(12)], draws=200, seed=seed)
    _, low, high = student_interval(float(sample.mean(0).quantile(0.5)), error, WINDOWS - 1)
    return low <= float(population.mean(0).quantile(0.5)) <= high


def difference_is_covered(seed, placement, tails, of):
    """A difference of losses or, if `of` is exp, of perplexities."""
    before = 3 + 0.3 * text(seed, tails)[:, 0]
    after = before + 0.2 + 0.1 * text(seed + 300, tails)[:, 0]
    own = picks(seed, placement)
    interval = paired_difference(before[own], after[own], of=of, draws=300, seed=seed)
    means = (before.mean(), after.mean())
    truth = float(means[1] - means[0] if of is None else of(means[1]) - of(means[0]))
    return interval.low <= truth <= interval.high


def mean_of_texts_is_covered(seed, over, count):
    """The mean over texts of six windows each."""
    kinds, own = normals(seed, count, 6 * count)
    design = Design.of([number // 6 for number in range(6 * count)], over)
    values = kinds.repeat_interleave(6) + own
    interval = paired_difference(torch.zeros_like(values), values, design, draws=300, seed=seed)
    return interval.low <= 0 <= interval.high


def correlation_is_covered(seed, _):
    """For a normal pair, ρ_S = (6/π)·asin(ρ/2) (Pearson 1907)."""
    x, y = normals(seed, 48, 48)
    value, low, high = rank_correlation(x, 0.5 * x + math.sqrt(0.75) * y, None, draws=200, seed=seed)
    assert low <= value <= high
    return low <= 6 / math.pi * math.asin(0.5 / 2) <= high


def correlation_over_layers_is_covered(seed, units, layers, heads, alike):
    """Heads of one layer have the correlation `alike`; whole layers are resampled, or single heads."""
    common, own = normals(seed, (2, layers), (2, layers * heads))
    x, y = math.sqrt(alike) * common.repeat_interleave(heads, 1) + math.sqrt(1 - alike) * own
    groups = [number // heads for number in range(layers * heads)] if units == "layers" else None
    interval = rank_correlation(x, y, groups, 200, seed=seed)
    return interval.low <= 0 <= interval.high


COLUMNS = ("covered", "settings", "few", "at_least", "exactly", "control")
INTERVALS = [
    *((mean_is_covered, (tails,), 160, "spread", "random", ("first", 0.85)) for tails in TAILS),
    (median_of_heads_is_covered, ("gaussian",), 40, "spread", None, ("first", 0.85)),
    (median_of_heads_is_covered, ("heavy",), 300, "spread", None, ("first", 0.85)),
    (difference_is_covered, ("gaussian", None), 160, "spread", None, ("first", 0.85)),
    (difference_is_covered, ("gaussian", torch.exp), 40, "spread", None, ("first", 0.85)),
    *((difference_is_covered, ("heavy", of), 40, "spread", None, ("first", 0.85)) for of in (None, torch.exp)),
    *((mean_of_texts_is_covered, (count,), 160, None, "texts", ("windows", 0.85)) for count in (5, 9)),
    (correlation_is_covered, (), 160, None, "pairs", None),
    (correlation_over_layers_is_covered, (4, 8, 0.0), 40, "layers", None, None),
    (correlation_over_layers_is_covered, (6, 12, 0.5), 40, "layers", None, ("heads", 0.8)),
    (correlation_over_layers_is_covered, (12, 8, 0.9), 40, "layers", None, ("heads", 0.8)),
]
"""Rows with `exactly` need 160 samples: of fewer than 149, all intervals can cover although they are not too wide."""


@each_size
@pytest.mark.parametrize(COLUMNS, INTERVALS, ids=[row[0].__name__ for row in INTERVALS])
def test_intervals_have_their_nominal_coverage(covered, settings, few, at_least, exactly, control, many):
    """The coverage is at least 95 % for spread windows and 95 % for random ones; in the control it is too low."""
    samples = 300 if many else few
    low, high = bounds(samples)
    assert at_least is None or low <= share(covered, samples, at_least, *settings)
    assert exactly is None or low <= share(covered, samples, exactly, *settings) <= high
    assert control is None or share(covered, samples, control[0], *settings) < control[1]


@each_size
@pytest.mark.parametrize("sizes", [(3, 3, 2), (2, 2, 2, 2), (16, 8, 8)])
def test_a_paired_difference_over_windows_of_several_texts_covers_and_is_no_wider_than_students(sizes, many):
    """A bootstrap sample that contains one of two windows twice has no standard error."""
    design = Design.of([text for text, size in enumerate(sizes) for _ in range(size)], "windows")

    samples = 300 if many else 160

    def interval_of(seed):
        (values,) = normals(seed, sum(sizes))
        interval = paired_difference(torch.zeros_like(values), values, design, draws=300, seed=seed)
        error = float(standard_error(values[:, None], design)[0])
        student = student_interval(interval.value, error, design.freedom)
        return interval.low <= 0 <= interval.high, (interval.high - interval.low) / (student.high - student.low)

    covered, wider = zip(*map(interval_of, range(samples)), strict=True)
    low, high = bounds(samples)
    assert low <= sum(covered) / samples <= high
    assert max(wider) < 1.7


def test_the_error_of_a_median_is_that_of_each_texts_windows():
    """Two texts have few windows that vary much: one widening factor for all texts would give too small an error."""
    sizes, sds = (28, 2, 2), (1.0, 5.0, 5.0)
    design = Design.of([text for text, size in enumerate(sizes) for _ in range(size)], "windows")
    spread = torch.cat([torch.full((size,), sd, dtype=torch.float64) for size, sd in zip(sizes, sds, strict=True)])
    errors = []
    for seed in range(300):
        values = spread[:, None] * normals(seed, (32, 1))[0]
        errors += statistics.median_error(values, design, [[0]], draws=100, seed=seed)
    truth = math.sqrt(sum(size * sd**2 for size, sd in zip(sizes, sds, strict=True))) / 32
    assert math.sqrt(sum(error**2 for error in errors) / 300) == pytest.approx(truth, rel=0.05)


def named(population, seed, placement):
    """True if a head is named although no head differs from 0 over the whole text: by p_values, by Student's t."""
    sample = (population - population.mean(0))[picks(seed, placement)]
    design = Design.plain(WINDOWS)
    ours = statistics.p_values(sample.T, design, torch.ones(WINDOWS), seed)
    scores = sample.mean(0) / standard_error(sample, design)
    students = torch.from_numpy(2 * stats.t.sf(scores.abs().numpy(), WINDOWS - 1))
    return bool(statistics.false_discovery(ours).any()), bool(statistics.false_discovery(students).any())


@each_size
def test_a_sweep_without_effects_names_a_head_in_at_most_five_percent_of_runs(many):
    """For skewed differences (χ² with four degrees of freedom), it names a head less often than Student's t does."""
    samples, heads = (300, 16) if many else (20, 8)

    def names_a_head(seed, placement):
        return named(text(seed, "gaussian", heads), seed, placement)[0]

    assert share(names_a_head, samples, "spread") <= float(stats.binom.ppf(0.9995, samples, 0.05)) / samples
    assert share(names_a_head, samples, "first") > 0.2, "the control: windows in a row"
    skewed = [named(normals(seed, (4, POPULATION, 32))[0].square().sum(0), seed, "random") for seed in range(samples)]
    ours, students = (sum(each) for each in zip(*skewed, strict=True))
    assert ours < 0.75 * students
    assert students / samples > 0.1, "the control: they are skewed"


def test_spread_windows_lie_apart_and_first_ones_do_not():
    for placement, distance in (("spread", POPULATION // WINDOWS), ("first", 1)):
        assert {after - before for before, after in pairwise(picks(3, placement))} == {distance}
