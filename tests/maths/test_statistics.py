"""Tests streams, nulls, errors, tests and comparisons over seeds against textbooks and SciPy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from heads import query_key, random, rotary
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attnlens.analyzers.registry import MeasureInfo, select_analyzers
from attnlens.maths import statistics
from attnlens.maths.statistics import Design, paired_difference
from attnlens.maths.statistics.associations import Blocks, _moderate_variances, holm, pairs_of
from attnlens.maths.statistics.intervals import DRAWS

NAN = math.nan


def filled(*batches):
    stream = statistics.Stream()
    for batch in batches:
        stream.merge(*statistics.count_and_mean(batch))
    return stream


@given(st.integers(1, 6), st.integers(1, 5), st.floats(-1e6, 1e6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_stream_of_batches_has_the_mean_of_all_at_once(batches, size, offset, seed):
    values = random(batches * size, 3, 2, seed=seed) + offset
    stream = filled(*values.split(size))
    torch.testing.assert_close(stream.mean, values.mean(0), rtol=1e-12, atol=1e-12)
    assert (stream.count == len(values)).all()


def test_streams_skip_nan_and_average_curves_of_different_lengths_by_step():
    values = torch.tensor([[1.0, NAN, NAN], [3.0, 4.0, NAN], [8.0, NAN, NAN]], dtype=torch.float64)
    stream = filled(values[:1], values[1:])
    assert stream.count.tolist() == [3, 1, 0]
    torch.testing.assert_close(stream.mean, torch.tensor([4, 4, NAN]).double(), equal_nan=True)
    curves = filled(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[3.0, 6.0]]]), torch.tensor([[[5.0]], [[7.0]]]))
    assert curves.mean.tolist() == [[4.0, 4.0, 3.0]]
    assert curves.count.tolist() == [[4, 2, 1]]
    scalars = filled(torch.tensor([1.0, 2.0]), torch.tensor([6.0]))
    assert (scalars.mean.item(), scalars.count.item()) == (3, 3)
    assert statistics.Stream().mean.isnan()


def test_the_null_of_weights_is_that_of_random_factors():
    (analyzer,) = select_analyzers(["symmetry"], "weights")
    null = statistics.gaussian_null([analyzer], query_key(random(1, 60, 8), random(1, 60, 8)), draws=600)
    mean, sd = null["weights.symmetry"]
    assert mean == pytest.approx(1 / 60, abs=4 * math.sqrt(2) / 60 / math.sqrt(600))
    assert sd == pytest.approx(math.sqrt(2) / 60, rel=0.15)
    assert null["weights.inertia_positive"] == (8, 0)
    assert 0.15 < null["weights.directionality"][1] < 0.5
    factor, noise, *other = (random(1, 60, 8, seed=seed) for seed in range(4))
    trained, other = query_key(factor, factor + 0.5 * noise), query_key(*other)
    far, near = ((analyzer.function(qk)["weights.symmetry"].item() - mean) / sd for qk in (trained, other))
    assert far > 10
    assert abs(near) < 5
    heads = query_key(7 * random(400, 30, 4, seed=5), 3 * random(400, 30, 4, seed=6))
    mean, _ = statistics.gaussian_null([analyzer], heads, draws=400)["weights.norm"]
    lengths = heads.query.norm(dim=(1, 2)) * heads.key.norm(dim=(1, 2))
    rescaled = analyzer.function(heads)["weights.norm"] / lengths
    assert rescaled.mean().item() == pytest.approx(mean, rel=0.02), "that of the norm for factors of norm 1"


def test_the_null_has_the_shapes_and_rotation_of_the_heads_and_is_deterministic():
    seen = []

    def look(heads):
        seen.append(heads)
        return {"a": heads.query[:, 0, 0].double(), "b": torch.full((len(heads.heads),), NAN)}

    heads = query_key(random(6, 9, 4), random(2, 9, 4), rotation=rotary(3, 4))
    infos = [MeasureInfo(name, "", "") for name in ("a", "b", "c")]
    infos += [MeasureInfo("a", "", "", curve=True), MeasureInfo("a", "", "", has_null=False)]
    analyzer = SimpleNamespace(function=look, measures=tuple(infos))
    nulls = [statistics.gaussian_null([analyzer], heads, draws=5, seed=seed) for seed in (0, 0, 1)]
    assert nulls[0] == nulls[1] != nulls[2]
    assert list(nulls[0]) == ["a"], "b has no value, c is not read"
    assert seen[0].query.shape == seen[0].key.shape == (5, 9, 4)
    assert seen[0].rotation is heads.rotation
    assert seen[0].query.norm(dim=(1, 2)).tolist() == pytest.approx([1.0] * 5)


def test_a_median_has_a_narrower_null_than_one_head_and_robust_scores_ignore_the_outlier_that_they_detect():
    means, sds = torch.zeros(144), torch.full((144,), 2.0)
    mean, sd = statistics.null_of_median(means, sds)
    assert mean == pytest.approx(0, abs=0.02)
    assert sd == pytest.approx(2 * math.sqrt(math.pi / 2 / 144), rel=0.06)
    assert statistics.null_of_median(means[:1], sds[:1])[1] == pytest.approx(2, rel=0.06)
    values = torch.cat((torch.linspace(-1, 1, 21), torch.tensor([1000.0, NAN])))
    scores = statistics.robust_z(values)
    assert scores[21] > 1000
    assert scores[22].isnan()
    assert scores[:21].abs().max() < 2
    plain = (values[21] - values[:22].mean()) / values[:22].std()
    assert plain < 5, "the control: with mean and sd it hides itself"
    normal = random(20001)
    standard = (normal - normal.mean()) / normal.std()
    torch.testing.assert_close(statistics.robust_z(normal), standard, rtol=0, atol=0.1)
    for without in (torch.ones(4), torch.full((3,), NAN)):
        assert statistics.robust_z(without).isnan().all()
    assert statistics.robust_z(torch.ones(0)).shape == (0,)


def test_pairs_narrow_the_interval_missing_ones_do_not_count_and_tails_lengthen_their_side():
    before = 10 * random(60)
    after = before + 0.3 + 0.1 * random(60, seed=1)
    widths = [high - low for _, low, high in (paired_difference(before, y) for y in (after, after.roll(1)))]
    assert widths[0] < 0.1
    assert widths[1] > 2, "the control: the pairs broken"
    assert paired_difference(before, after, seed=3) == paired_difference(before, after, seed=3)
    before, after = torch.tensor([1.0, NAN, 3.0]), torch.tensor([2.0, 5.0, 4.0])
    assert paired_difference(before, after) == (1, 1, 1)
    assert all(math.isnan(part) for part in paired_difference(before[1:2], after[1:2]))
    delta, _, _ = paired_difference(before, after + torch.tensor([0, 0, 1]), weights=torch.tensor([1.0, 100.0, 3.0]))
    assert delta == pytest.approx((1 * 1 + 3 * 2) / 4), "a missing pair takes its weight with it"
    before, after = random(40).abs(), random(40, seed=1).abs() + 1
    ratio = paired_difference(before, after, of=torch.exp)
    assert ratio.value == pytest.approx(float(after.mean().exp() - before.mean().exp()))
    assert ratio.low < ratio.value < ratio.high
    skewed = torch.distributions.Exponential(1.0).icdf((torch.arange(40) + 0.5) / 40)
    right, left = (paired_difference(torch.zeros(40), values) for values in (skewed, -skewed))
    assert right.high - right.value > 1.2 * (right.value - right.low), "longer on the side of the long tail"
    assert left.value - left.low > 1.2 * (left.high - left.value), "the control"


def test_weighted_pairs_are_repeated_pairs():
    """A sequence of three tokens counts as three equal pairs, because means are over tokens."""
    before, after, sizes = random(6), random(6, seed=1), torch.tensor([1, 3, 2, 5, 1, 4])
    delta, low, high = paired_difference(before, after, weights=sizes.double())
    assert delta == pytest.approx(float((after - before).repeat_interleave(sizes).mean()), abs=1e-12)
    assert delta != pytest.approx(float((after - before).mean()), abs=1e-3)
    assert low < delta < high
    narrow = paired_difference(before.repeat_interleave(sizes), after.repeat_interleave(sizes))
    assert high - low > 1.2 * (narrow[2] - narrow[1]), "sequences are drawn, not their tokens"
    plain = paired_difference(before, after)
    assert paired_difference(before, after, weights=torch.full((6,), 7.0)) == pytest.approx(plain, abs=1e-12)
    delta, _, _ = paired_difference(before[:3], after[:3], weights=torch.tensor([2.0, 0.0, 3.0]).double())
    assert delta == pytest.approx(float((2 * (after - before)[0] + 3 * (after - before)[2]) / 5))


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_weighted_interval_contains_its_estimate_and_shifts_with_the_differences(sizes, seed):
    before, after = random(len(sizes), seed=seed), random(len(sizes), seed=seed + 1)
    options = {"weights": torch.tensor(sizes, dtype=torch.float64), "draws": 200, "seed": seed}
    interval = paired_difference(before, after, **options)
    assert interval.low <= interval.value <= interval.high
    shifted = [part - 3 for part in paired_difference(before, after + 3, **options)]
    doubled = [part / 2 for part in paired_difference(2 * before, 2 * after, **options)]
    assert [*shifted, *doubled] == pytest.approx([*interval, *interval], abs=1e-8)


def naive_variance(values, texts, clustered):
    """The textbook's variance of a mean, by loops: over strata (Cochran 1977, Eq. 5.12) or clusters."""
    n, mean = len(values), values.mean()
    groups = [values[[i for i, text in enumerate(texts) if text == number]] for number in dict.fromkeys(texts)]
    if not clustered:
        return sum((len(group) / n) ** 2 * group.var() / len(group) for group in groups)
    totals = [(group - mean).sum() / n for group in groups]
    return len(groups) / (len(groups) - 1) * sum(total**2 for total in totals)


@pytest.mark.parametrize("clustered", [False, True], ids=["strata", "clusters"])
def test_the_error_is_that_of_the_textbook(clustered):
    texts = [0] * 7 + [1] * 4 + [2] * 9 + [3] * 3 + [4] * 5
    values = random(len(texts), 3, seed=4) + torch.tensor(texts)[:, None]
    design = Design.of(texts, "texts" if clustered else "windows")
    expected = torch.stack([naive_variance(column, texts, clustered) for column in values.mT]).sqrt()
    torch.testing.assert_close(statistics.standard_error(values, design), expected)
    assert design.freedom == (4 if clustered else len(texts) - 5)
    one_text = statistics.standard_error(values, Design.plain(len(texts)))
    assert (one_text < expected if clustered else one_text > 1.2 * expected).all(), "the control"


def test_designs_of_few_texts_and_windows():
    assert [Design.of(texts).clustered for texts in ("aabbccddee", "aabbccdd")] == [True, False]
    assert Design.of("aabb", "texts").clustered
    values = torch.tensor([[1.0, 1.0], [3.0, NAN], [8.0, NAN]], dtype=torch.float64)
    error = statistics.standard_error(values, Design.plain(3))
    assert error[0] == pytest.approx(float(values[:, 0].std() / math.sqrt(3)))
    assert error[1].isnan(), "one window has no error"
    lone = statistics.standard_error(values[:, :1], Design.of("aab"))
    assert lone == pytest.approx(float(error[0])), "a text with one window: all windows are one sample"
    assert math.isnan(statistics.median_error(values[:1], Design.plain(1), [range(2)])[0])


def test_the_error_of_a_median_is_not_that_of_one_head():
    """If heads vary together, their median has the error of one head; if they vary independently, a smaller one."""
    shared, alone = random(32, 1) + 0.1 * random(32, 64, seed=1), random(32, 64, seed=2)
    groups, one = [range(64), range(8)], 1 / math.sqrt(32)
    together, apart = (statistics.median_error(values, Design.plain(32), groups)[0] for values in (shared, alone))
    assert 0.7 * one < together < 1.3 * one
    assert apart < 0.3 * one
    assert statistics.median_error(alone, Design.plain(32), groups)[1] > 1.5 * apart
    values = random(4, 1, seed=3)
    (error,) = statistics.median_error(values, Design.plain(4), [[0]], draws=20_000)
    assert error == pytest.approx(float(values.std() / 2), rel=0.03), "without √(n/(n − 1)) it would be 13 % too small"


def test_students_interval_and_p_values_beyond_the_draws():
    for freedom, quantile in ((4, 2.776445), (10**6, 1.959966)):
        assert statistics.student_interval(1.0, 2.0, freedom).high == pytest.approx(1 + 2 * quantile)
    assert math.isnan(statistics.student_interval(1.0, 2.0, 0).low)
    effects, near = 5 + 0.01 * random(2, 32, seed=4), random(40, 32, seed=5) + 0.75
    p, counted = (statistics.p_values(values, Design.plain(32), torch.ones(32)) for values in (effects, near))
    student, tail = (torch.from_numpy(stats.ttest_1samp(each.numpy(), 0, axis=1).pvalue) for each in (effects, near))
    assert (p >= student * (1 - 1e-9)).all(), "never below Student's tail"
    assert (p < 1 / DRAWS).all(), "so that a head among many thousands can be named"
    even = float(statistics.p_values(1e-9 * random(1, 32, seed=6) + 1e-12, Design.plain(32), torch.ones(32)))
    assert any(abs(even * (1 + count) - round(even * (1 + count))) < 1e-6 for count in range(500, 5000, 500))
    assert float((counted / tail).log().abs().median()) < 1, "where draws and tail meet they are alike"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=4, max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_rank_correlation_is_that_of_scipy_with_ties(pairs):
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    value = statistics.rank_correlation(x, y, draws=50).value
    constant = 1 in (len(x.unique()), len(y.unique()))
    expected = NAN if constant else stats.spearmanr(x.numpy(), y.numpy()).statistic
    assert value == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert math.isnan(statistics.rank_correlation(x[:3], y[:3]).value)


def test_false_discovery_by_hand_and_at_its_rate():
    # Benjamini & Hochberg 1995, section 3.2: 15 p-values, of which the four smallest are rejected at 0.05.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528]
    p = torch.tensor([*p, 0.7590, 1], dtype=torch.float64)
    shuffled = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    assert sorted(shuffled[statistics.false_discovery(p[shuffled])].tolist()) == [0, 1, 2, 3]
    padded = torch.cat((p, torch.full((100,), NAN).double()))
    assert statistics.false_discovery(padded).nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert statistics.false_discovery(torch.ones(0)).shape == (0,)
    assert not statistics.false_discovery(torch.full((3,), NAN)).any()
    shift, rates = torch.cat((torch.full((30,), 3.5), torch.zeros(70))), []
    for seed in range(200):
        p = torch.special.erfc((random(100, seed=seed) + shift).abs() / math.sqrt(2))
        true, false = statistics.false_discovery(p, 0.1).double().split((30, 70))
        rates.append((float(false.sum() / (false.sum() + true.sum()).clamp(min=1)), float(true.mean())))
    false, true = np.mean(rates, 0)
    assert false < 0.1
    assert true > 0.8


NOISE = {
    **{"alike": [1.0] * 8, "of four cells": [1.0] * 4, "other in every cell": None},
    "of two cells a hundred times larger": [1.0] * 6 + [100.0] * 2,
    "of two cells three times larger": [1.0] * 6 + [3.0] * 2,
    "of one cell ten times larger": [1.0] * 7 + [10.0],
    "of half the cells three times larger": [1.0] * 4 + [3.0] * 4,
    "of two cells ten times smaller": [1.0] * 6 + [0.1] * 2,
}


def drawn(sd, blocks, seed, spread=0.0):
    """Treatments of equal means, with noise of each treatment's `sd` and block effects of size `spread`."""
    made = torch.Generator().manual_seed(seed)
    sd = torch.randn(8, generator=made).exp() if sd is None else torch.as_tensor(sd)
    noise = torch.randn(len(sd), blocks, generator=made, dtype=torch.float64) * sd[:, None]
    return noise + spread * torch.randn(1, blocks, generator=made, dtype=torch.float64)


def any_significant(values):
    return min(holm(Blocks(values, ()).p_values())) <= 0.05


def pooled(values):
    """The textbook p-values of a two-way table with one variance for all treatments."""
    rest = values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    error = math.sqrt(2 * float((rest**2).sum()) / freedom / values.shape[1])
    means = values.mean(1).tolist()
    return [2 * stats.t.sf(abs(means[a] - means[b]) / error, freedom) for a, b in pairs_of(len(values))]


@pytest.mark.parametrize("studies", [100, pytest.param(600, marks=pytest.mark.full)])
@pytest.mark.parametrize("seeds", [3, 5])
def test_no_difference_is_significant_in_one_of_twenty_studies_at_most(seeds, studies):
    for name, noise in NOISE.items():
        runs = [any_significant(drawn(noise, seeds, seed, spread=10.0)) for seed in range(studies)]
        assert sum(runs) / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies), name


def test_pooled_and_unpaired_tests_break_the_promise_or_hide_the_difference():
    """Controls: if two treatments are noisier, the pooled test rejects too often for them and never for the others."""
    quiet_and_noisy = NOISE["of two cells a hundred times larger"]
    assert sum(min(holm(pooled(drawn(quiet_and_noisy, 3, seed)))) <= 0.05 for seed in range(100)) > 10
    values = drawn(quiet_and_noisy, 3, 0) + torch.tensor([[12.0]] + [[0.0]] * 7)
    assert holm(pooled(values))[0] > 0.5
    assert holm(Blocks(values, [0] * 6 + [1] * 2).p_values())[0] <= 0.05, "with the kinds of cells declared"
    values = drawn([0.1] * 3, 3, 0, spread=10.0) + torch.tensor([[0.0], [0.0], [2.0]])
    assert any_significant(values)
    assert stats.ttest_ind(values[0].numpy(), values[2].numpy()).pvalue > 0.5


def test_blocks_are_paired_tests_of_two_cells_and_nearly_pooled_ones_of_many(monkeypatch):
    """s² = s₀² d₀/χ²_d₀ · χ²_d/d, with d₀ = 6 and s₀² = 4: both are recovered (Smyth 2004)."""
    values = drawn([1.0, 3.0], 4, 5)
    assert Blocks(values).p_values() == pytest.approx([stats.ttest_rel(*values.numpy()).pvalue])
    many = drawn([1.0] * 40, 6, 1)
    assert np.abs(np.array(Blocks(many).p_values()) - np.array(pooled(many))).max() < 0.1
    monkeypatch.setattr(statistics.associations, "COUNTED", 1.0)
    draws = np.random.default_rng(0)
    variances = 4 * 6 / draws.chisquare(6, 20_000) * draws.chisquare(3, 20_000) / 3
    moderated, prior = _moderate_variances(variances, 3, others=20_000)
    assert prior == pytest.approx(6, rel=0.1)
    assert moderated[0] == pytest.approx((6 * 4 + 3 * variances[0]) / 9, rel=0.05)


def test_holm_is_the_step_down_procedure_and_cells_without_spread_have_no_p_value():
    assert all(math.isnan(p) for p in Blocks(torch.ones(3, 3) * torch.arange(3.0)[:, None]).p_values())
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
