"""Tests what is said to predict harm."""

import csv
import itertools
import json
import math

import families
import numpy as np
import pytest
import torch
from loaded import family, loaded
from program import attnlens as program
from program import refused
from scipy.stats import spearmanr

import attnlens
from attnlens.maths.statistics import Design
from attnlens.maths.statistics.associations import permutation_tests, split_half, windows_interval
from attnlens.records import Site, Swap
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style
from attnlens.report.pictures.swaps import swap_panels
from attnlens.report.report import read_report
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sweep import CONSTANT, Alone, SweptMeasures, predicted_by

READ = {"windows": 8, "length": 32}


@pytest.fixture(scope="module")
def demo():
    return attnlens.load("demo")


@pytest.fixture(scope="module")
def report(demo):
    return swap_kernel(demo, "rbf", sweep="heads", **READ)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(rate, runs, sds=3):
    """What a rate may read in so many runs."""
    return rate + sds * math.sqrt(rate * (1 - rate) / runs)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_p_values_are_those_of_all_permutations():
    """Naively: every order of six heads, Spearman's ρ each, and the largest of three measures."""
    measures, harm = drawn(0, 3, 6), drawn(1, 6)
    own = np.array([abs(spearmanr(row, harm)[0]) for row in measures])
    every = np.array(
        [[abs(spearmanr(row, harm[list(order)])[0]) for row in measures] for order in itertools.permutations(range(6))]
    )
    alone = (every >= own - 1e-9).mean(0)
    most = (every.max(1)[:, None] >= own - 1e-9).mean(0)
    found = permutation_tests(measures, harm, draws=20_000)
    assert found.p_value.numpy() == pytest.approx(alone, abs=0.015)
    assert found.corrected.numpy() == pytest.approx(most, abs=0.015)
    assert np.all(most >= alone)
    assert np.any(most > alone + 0.1), "the control: uncorrected they are smaller"


def test_a_measure_that_some_heads_lack_is_tested_over_the_others():
    measures, harm = drawn(0, 2, 20), drawn(1, 20)
    measures[1] = harm
    measures[1, :5] = torch.nan
    harm[6] = torch.nan
    found = permutation_tests(measures, harm, draws=2000)
    assert found.p_value[1] == pytest.approx(1 / 2001)
    lacking = permutation_tests(torch.full((1, 20), torch.nan, dtype=torch.float64), harm, draws=100)
    assert bool(lacking.p_value.isnan().all())
    constant = permutation_tests(torch.ones(1, 20, dtype=torch.float64), harm, draws=100)
    assert bool(constant.corrected.isnan().all())
    assert permutation_tests(measures, torch.full((20,), torch.nan).double(), draws=10).p_value.isnan().all()


def test_shuffled_heads_of_a_real_sweep_are_named_at_the_stated_rate(report):
    """demo's own measures, correlated as they are, against its own harms in another order."""
    runs = 300
    measures = torch.tensor([one.values for one in report.swap.predictors], dtype=torch.float64)
    harm = torch.tensor([effect.delta for effect in report.swap.sweep], dtype=torch.float64)
    shuffled = (harm[torch.randperm(32, generator=torch.Generator().manual_seed(run))] for run in range(runs))
    least = torch.tensor([float(permutation_tests(measures, one, draws=500).corrected.min()) for one in shuffled])
    assert float((least < 0.05).double().mean()) <= bound(0.05, runs)
    assert float((least < 0.05).double().mean()) >= 0.05 - 3 * math.sqrt(0.05 * 0.95 / runs)
    assert float(permutation_tests(measures, harm, draws=500).corrected.min()) < 0.005, (
        "the control: in their own order"
    )


def test_the_windows_interval_is_the_bootstrap_of_both_sides():
    """Naively: each sample's means and Spearman's ρ, from the same draws."""
    measure, harm, sizes = drawn(0, 10, 12) + drawn(3, 12), drawn(1, 10, 12) + drawn(3, 12), drawn(2, 10).abs() + 1
    design = Design.plain(10)
    value = float(spearmanr(measure.mean(0), (sizes @ harm) / sizes.sum())[0])
    found = windows_interval(measure, harm, sizes, design, value, draws=200)
    rhos = []
    for times in 1 + (design.draws(200, 0) - 1) * math.sqrt(10 / 9):
        own = (times[:, None] * measure).sum(0) / times.sum()
        other = ((times * sizes)[:, None] * harm).sum(0) / (times * sizes).sum()
        rhos.append(math.atanh(spearmanr(own, other)[0]))
    reach = 2.2621571628 * np.std(rhos, ddof=1)
    assert found[1:] == pytest.approx((math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach)))
    still = windows_interval(measure.mean(0), harm, sizes, design, value, draws=200)
    assert still.high - still.low < found.high - found.low, "a measure of the weights does not vary"
    assert math.isnan(windows_interval(measure[:1], harm[:1], sizes[:1], Design.plain(1), value).low)


def test_the_reliability_is_that_of_the_noise():
    """Of normal harms and noise: halves correlate by r = 1/(1 + 2σ²/n), in ranks by 6/π arcsin(r/2)."""
    true, noise, even = drawn(0, 2000), drawn(1, 40, 2000), torch.ones(40, dtype=torch.float64)
    for size in (0.0, 2.0, 6.0):
        half = 6 / math.pi * math.asin(1 / (1 + size**2 / 20) / 2)
        found = split_half(true + size * noise, even, Design.plain(40))
        assert found == pytest.approx(2 * half / (1 + half), abs=0.03)
    assert split_half(noise, even, Design.plain(40)) < 0.1
    assert math.isnan(split_half(noise[:1], even[:1], Design.plain(1)))


# --- the join ---------------------------------------------------------------------------------------------------------


def test_the_measures_are_those_of_inspect_on_the_same_windows(demo, report):
    every = attnlens.inspect(demo, analyzers=["symmetry", "spectrum", "ksvd"], **READ)
    heads = {(head.layer, head.head): head.measures for head in every.heads}
    assert len(report.swap.predictors) >= 18
    for one in report.swap.predictors:
        own = [heads[effect.layer, effect.head][one.measure].value for effect in report.swap.sweep]
        assert one.values == pytest.approx(own, rel=1e-12)


def test_each_correlation_is_spearmans_with_the_harm(report):
    harm = [effect.delta for effect in report.swap.sweep]
    for one in report.swap.predictors:
        assert one.rho == pytest.approx(spearmanr(one.values, harm)[0], abs=1e-12)
        assert (one.heads, one.left_out) == (32, 0)
        for low, high in (one.heads_ci95, one.layers_ci95, one.sequences_ci95):
            assert low <= one.rho <= high
        assert one.p_value <= one.p_corrected
        assert one.holds == (one.p_corrected < 0.05 and one.layers_ci95[0] * one.layers_ci95[1] > 0)
    surest = [one.p_corrected for one in report.swap.predictors]
    assert surest == sorted(surest)
    prediction = report.swap.prediction
    assert (prediction.heads, prediction.diverged, prediction.measures) == (32, 0, len(surest))
    assert prediction.ceiling == pytest.approx(math.sqrt(prediction.reliability))


def test_what_causal_heads_do_not_identify_is_left_out_with_its_reason(report):
    left = report.swap.prediction.left_out
    for name in ("positive", "negative", "skew"):
        assert left[f"tokens.share_{name}"] == "not identified: the model never compares a query with a later key"
    assert left["weights.inertia_positive"] == CONSTANT
    encoder = swap_kernel(family("bert"), "rbf", sweep="heads", windows=4, length=16)
    assert {"tokens.share_positive", "tokens.share_skew"} <= {one.measure for one in encoder.swap.predictors}


def planted(harm, measures, windows=6, noise=0.0, layers=4):
    """A sweep with these harms, and the measures of its heads."""
    heads = len(harm)
    sites = [Site(path=f"l{layer}", ordinal=0, layer=layer, part="encoder") for layer in range(layers)]
    units = [(sites[head * layers // heads], head % (heads // layers)) for head in range(heads)]
    own, sizes = torch.ones(windows, dtype=torch.float64), torch.ones(windows, dtype=torch.float64)
    changed = own + harm[:, None] + noise * drawn(9, heads, windows)
    alone = Alone(units, own, changed, sizes, list(range(windows)), Design.plain(windows), tested=False)
    return alone, SweptMeasures(measures, {}, {})


def test_a_planted_relation_is_found_and_an_unrelated_measure_is_not():
    harm = drawn(0, 32).exp()
    alone, measures = planted(harm, {"planted": -harm.log(), "unrelated": drawn(1, 32)}, noise=1e-3)
    found, prediction = predicted_by(alone, measures, 0)
    assert [one.measure for one in found] == ["planted", "unrelated"]
    assert found[0].rho < -0.99
    assert found[0].holds
    assert not found[1].holds
    assert prediction.ceiling > 0.99


def test_heads_that_diverge_or_lack_a_measure_are_left_out_and_counted():
    harm = drawn(0, 32).exp()
    value = harm.clone()
    value[:3] = torch.nan
    harm[10] = math.inf
    alone, measures = planted(harm, {"planted": value})
    (one,), prediction = predicted_by(alone, measures, 0)
    assert (one.rho, one.heads, one.left_out) == (pytest.approx(1), 28, 4)
    assert prediction.diverged == 1
    alone, measures = planted(torch.full((32,), math.inf).double(), {"planted": value})
    nothing, prediction = predicted_by(alone, measures, 0)
    assert nothing == []
    assert prediction.diverged == 32
    assert "planted" in prediction.left_out
    assert prediction.ceiling is None
    assert "ceiling" in prediction.reasons


def test_one_layer_and_one_window_have_reasons_in_the_place_of_intervals():
    harm = drawn(0, 12).exp()
    alone, measures = planted(harm, {"planted": harm}, windows=1, layers=1)
    (one,), prediction = predicted_by(alone, measures, 0)
    assert (one.layers_ci95, one.sequences_ci95, prediction.ceiling) == (None, None, None)
    assert {"layers_ci95", "sequences_ci95"} <= set(one.reasons)
    assert not one.holds


@pytest.mark.parametrize("more", [{"predictors": False}, {"layers": [0], "heads": range(7)}, {"sweep": "layers"}])
def test_nothing_is_joined_where_it_is_not_asked_for_or_heads_are_few(demo, more):
    swap = swap_kernel(demo, "rbf", **{"sweep": "heads", "windows": 2, "length": 16} | more).swap
    assert swap.sweep
    assert (swap.predictors, swap.prediction) == ([], None)


def test_the_sweep_itself_is_the_same_with_and_without_the_join(demo, report):
    assert swap_kernel(demo, "rbf", sweep="heads", predictors=False, **READ).swap.sweep == report.swap.sweep


def test_a_kernel_that_diverges_everywhere_is_swept_and_has_no_predictor(demo, monkeypatch):
    from attnlens.runs.swap import sweep as room

    honest = room._losses
    monkeypatch.setattr(
        room, "_losses", lambda own, new, *rest: honest(own, new, *rest) * (1 if new is own else math.nan)
    )
    swap = swap_kernel(demo, "rbf", sweep="heads", **READ).swap
    assert len(swap.sweep) == 32
    assert all(effect.delta is None for effect in swap.sweep)
    assert swap.prediction.diverged == 32
    assert swap.predictors == []


def test_noise_and_shared_layers_are_joined_too():
    noise = swap_kernel(family("whisper"), "rbf", sweep="heads", **READ | {"length": 16, "windows": 4}).swap
    assert noise.judged_by == "kl"
    assert noise.predictors
    assert len(noise.sweep) == sum(len(site.heads) for site in noise.sites)
    shared = swap_kernel(family("albert"), "rbf", sweep="heads", windows=4, length=16).swap
    assert len(shared.sweep) >= 8
    assert shared.predictors
    headless = swap_kernel(loaded(families.build("bert").bert), "rbf", sweep="heads", windows=4, length=16).swap
    assert headless.predictors


# --- views and the program --------------------------------------------------------------------------------------------


def test_the_program_tells_writes_and_reads_it_again(tmp_path):
    names = {name: tmp_path / f"report.{name}" for name in ("json", "csv")}
    out = program(
        *("swap-kernel", "demo", "--kernel", "rbf", "--sweep", "heads", "--windows", "8", "--length", "32"),
        *("--json", names["json"], "--csv", names["csv"]),
    )
    assert out.returncode == 0, out.stderr
    text = " ".join(out.stdout.split())
    assert "What predicts harm" in text
    assert "Not compared: tokens.share_positive" in text
    found = read_report(names["json"])
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert len(rows) == len(found.swap.sweep)
    first = found.swap.predictors[0]
    assert [float(row[first.measure]) for row in rows] == pytest.approx(first.values)
    old = json.loads(names["json"].read_text())
    for name in ("predictors", "prediction"):
        del old["swap"][name]
    assert Swap.model_validate(old["swap"]).predictors == []


def test_the_picture_shows_the_measures_asked_for_and_the_strongest_others(report):
    (panel,) = [found for found in swap_panels(report) if found.stem == "predictors"]
    assert "Not drawn: tokens.share_positive: not identified" in panel.caption
    with house_style():
        figure = panel_figure(report, panel)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.collections]
    assert {"tokens.share_key", "ksvd.rank90", "tokens.entropy"} < set(titles)
    assert len(set(titles) - {"", "layer"}) == 6
    dots = [axes.collections[0].get_offsets() for axes in figure.axes if axes.get_title(loc="left") == "tokens.entropy"]
    entropy = next(one for one in report.swap.predictors if one.measure == "tokens.entropy")
    harm = [effect.delta for effect in report.swap.sweep]
    assert np.asarray(dots[0]) == pytest.approx(np.array([entropy.values, harm]).T)


def test_a_sweep_in_the_order_of_a_measure_is_no_longer_offered():
    out = program("swap-kernel", "demo", "--sweep", "predicted")
    refused(out, "predicted")
