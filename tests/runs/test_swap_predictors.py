"""Tests of the measures that predict which heads a swap harms, and of their statistics."""

import csv
import itertools
import math

import families
import numpy as np
import pytest
import torch
from loaded import BARE, family, loaded
from scipy.stats import spearmanr
from typer.testing import CliRunner

import attnlens
from attnlens.cli.commands import app
from attnlens.maths.statistics import Design
from attnlens.maths.statistics.associations import permutation_tests, split_half, windows_interval
from attnlens.records import Site, Swap
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style
from attnlens.report.pictures.swaps import swap_panels
from attnlens.report.report import read_report
from attnlens.runs.swap import sweep as sweeping
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sweep import CONSTANT, Alone, SweptMeasures, predicted_by


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_p_values_are_those_of_all_permutations():
    """Naively: every order of six heads, Spearman's ρ each, and the largest of three measures."""
    measures, harm = drawn(0, 3, 6), drawn(1, 6)
    orders = np.array([[*range(6)], *itertools.permutations(range(6))])
    rhos = abs(
        spearmanr(measures.numpy(), harm.numpy()[orders], axis=1).statistic[:3, 3:]
    )  # ranks do not depend on order
    own, every = rhos[:, 0], rhos[:, 1:]
    alone, most = (every >= own[:, None] - 1e-9).mean(1), (every.max(0) >= own[:, None] - 1e-9).mean(1)
    tests = permutation_tests(measures, harm, draws=20_000)
    assert tests.p_value.numpy() == pytest.approx(alone, abs=0.015)
    assert tests.corrected.numpy() == pytest.approx(most, abs=0.015)
    assert np.all(most >= alone)
    assert np.any(most > alone + 0.1), "the control: uncorrected they are smaller"


def test_a_measure_that_some_heads_lack_is_tested_over_the_others():
    measures, harm = drawn(0, 2, 20), drawn(1, 20)
    measures[1] = harm
    measures[1, :5] = harm[6] = torch.nan
    assert permutation_tests(measures, harm, draws=2000).p_value[1] == pytest.approx(1 / 2001)
    missing = torch.full((1, 20), torch.nan, dtype=torch.float64)
    assert permutation_tests(missing, harm, draws=100).p_value.isnan().all()
    assert permutation_tests(torch.ones_like(missing), harm, draws=100).corrected.isnan().all()
    assert permutation_tests(measures, missing[0], draws=10).p_value.isnan().all()


@pytest.mark.parametrize("runs", [40, pytest.param(300, marks=pytest.mark.full)])
def test_measures_of_shuffled_heads_are_significant_at_the_stated_rate(swept, runs):
    """The measures of demo, correlated as they are, against its own harms in another order."""
    measures = torch.tensor([each.values for each in swept.swap.predictors], dtype=torch.float64)
    harm = torch.tensor([effect.delta for effect in swept.swap.sweep], dtype=torch.float64)
    shuffled = (harm[torch.randperm(32, generator=torch.Generator().manual_seed(run))] for run in range(runs))
    smallest = torch.tensor([float(permutation_tests(measures, each, draws=500).corrected.min()) for each in shuffled])
    assert (smallest < 0.05).any(), "the control: a test that never rejects"
    assert float((smallest < 0.05).double().mean()) == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / runs))
    assert float(permutation_tests(measures, harm, draws=500).corrected.min()) < 0.005, "the control: in their order"


def test_the_windows_interval_is_the_bootstrap_of_both_sides():
    """Naively: each sample's means and Spearman's ρ, from the same draws."""
    measure, harm, sizes = drawn(0, 10, 12) + drawn(3, 12), drawn(1, 10, 12) + drawn(3, 12), drawn(2, 10).abs() + 1
    design = Design.plain(10)
    value = float(spearmanr(measure.mean(0), (sizes @ harm) / sizes.sum())[0])
    interval = windows_interval(measure, harm, sizes, design, value, draws=200)
    times = 1 + (design.draws(200, 0) - 1) * math.sqrt(10 / 9)
    pairs = zip(times @ measure, (times * sizes) @ harm / ((times * sizes).sum(1, keepdim=True)), strict=True)
    reach = 2.2621571628 * np.std([math.atanh(spearmanr(*pair)[0]) for pair in pairs], ddof=1)
    assert interval[1:] == pytest.approx(np.tanh(math.atanh(value) + np.array([-reach, reach])))
    constant = windows_interval(measure.mean(0), harm, sizes, design, value, draws=200)
    assert constant.high - constant.low < interval.high - interval.low, "a measure of the weights does not vary"
    assert math.isnan(windows_interval(measure[:1], harm[:1], sizes[:1], Design.plain(1), value).low)


def test_the_reliability_is_that_of_the_noise():
    """Of normal harms and noise: halves correlate by r = 1/(1 + 2σ²/n), in ranks by 6/π arcsin(r/2)."""
    true, noise, even = drawn(0, 2000), drawn(1, 40, 2000), torch.ones(40, dtype=torch.float64)
    for size in (0.0, 2.0, 6.0):
        half = 6 / math.pi * math.asin(1 / (1 + size**2 / 20) / 2)
        share = split_half(true + size * noise, even, Design.plain(40))
        assert share == pytest.approx(2 * half / (1 + half), abs=0.03)
    assert split_half(noise, even, Design.plain(40)) < 0.1
    assert math.isnan(split_half(noise[:1], even[:1], Design.plain(1)))


def test_measures_are_those_of_inspect_and_correlations_those_of_spearman(demo, swept):
    inspected = attnlens.inspect(demo, analyzers=["symmetry", "spectrum", "ksvd"], windows=8, length=24)
    heads = {(head.layer, head.head): head.measures for head in inspected.heads}
    predictors, prediction = swept.swap.predictors, swept.swap.prediction
    harm = [effect.delta for effect in swept.swap.sweep]
    assert len(predictors) >= 18
    for each in predictors:
        expected = [heads[effect.layer, effect.head][each.measure].value for effect in swept.swap.sweep]
        assert each.values == pytest.approx(expected, rel=1e-12)
        assert each.rho == pytest.approx(spearmanr(each.values, harm)[0], abs=1e-12)
        assert (each.heads, each.left_out) == (32, 0)
        for low, high in (each.heads_ci95, each.layers_ci95, each.sequences_ci95):
            assert low <= each.rho <= high
        assert each.p_value <= each.p_corrected
        assert each.holds == (each.p_corrected < 0.05 and each.layers_ci95[0] * each.layers_ci95[1] > 0)
    corrected = [each.p_corrected for each in predictors]
    assert corrected == sorted(corrected)
    assert (prediction.heads, prediction.diverged, prediction.measures) == (32, 0, len(predictors))
    assert prediction.ceiling == pytest.approx(math.sqrt(prediction.reliability))
    for name in ("positive", "negative", "skew"):
        reason = "not identified: the model never compares a query with a later key"
        assert prediction.left_out[f"tokens.share_{name}"] == reason
    assert prediction.left_out["weights.inertia_positive"] == CONSTANT
    without = swap_kernel(demo, "rbf", sweep="heads", predictors=False, windows=8, length=24, **BARE).swap
    assert without.sweep == swept.swap.sweep
    assert (without.predictors, without.prediction) == ([], None)


def test_predictors_need_a_sweep_of_eight_heads(demo):
    for more in ({"sweep": "heads", "layers": [0], "heads": range(7)}, {"sweep": "layers"}):
        swap = swap_kernel(demo, "rbf", windows=2, length=16, **BARE, **more).swap
        assert swap.sweep
        assert (swap.predictors, swap.prediction) == ([], None)


def test_encoders_noise_shared_layers_and_headless_models_have_predictors():
    read = {"windows": 4, "length": 16, "sweep": "heads"} | BARE
    for model, judge in (
        (family("bert"), "loss"),
        (family("whisper"), "kl"),
        (family("albert"), "loss"),
        (loaded(families.build("bert").bert), "hidden"),
    ):
        swap = swap_kernel(model, "rbf", **read).swap
        assert swap.judged_by == judge
        assert swap.predictors
        assert len(swap.sweep) == sum(len(site.heads) for site in swap.sites)
        identified = {"tokens.share_positive", "tokens.share_skew"} <= {each.measure for each in swap.predictors}
        assert identified or judge == "kl"


def planted(harm, measures, windows=6, noise=0.0, layers=4):
    """Predict these harms of the heads of a sweep from these measures."""
    heads, ones = len(harm), torch.ones(windows, dtype=torch.float64)
    sites = [Site(path=f"l{layer}", ordinal=0, layer=layer, part="encoder") for layer in range(layers)]
    units = [(sites[head * layers // heads], head % (heads // layers)) for head in range(heads)]
    changed = ones + harm[:, None] + noise * drawn(9, heads, windows)
    alone = Alone(units, ones, changed, ones, list(range(windows)), Design.plain(windows), tested=False)
    return predicted_by(alone, SweptMeasures(measures, {}, {}), 0)


def test_a_planted_relation_is_significant_and_an_unrelated_measure_is_not():
    harm = drawn(0, 32).exp()
    predictors, prediction = planted(harm, {"planted": -harm.log(), "unrelated": drawn(1, 32)}, noise=1e-3)
    assert [(each.measure, each.holds) for each in predictors] == [("planted", True), ("unrelated", False)]
    assert predictors[0].rho < -0.99
    assert prediction.ceiling > 0.99
    weak = {f"weak {seed}": 0.45 * harm.log() + drawn(seed, 32) for seed in range(2, 10)}
    uncorrected = [each for each in planted(harm, weak, noise=1e-3)[0] if each.p_value < 0.05 < each.p_corrected]
    assert any(math.prod(each.layers_ci95) > 0 for each in uncorrected)
    assert not any(each.holds for each in uncorrected)
    (one,), prediction = planted(harm[:12], {"planted": harm[:12]}, windows=1, layers=1)
    assert (one.layers_ci95, one.sequences_ci95, prediction.ceiling, one.holds) == (None, None, None, False)
    assert {"layers_ci95", "sequences_ci95"} <= set(one.reasons)


def test_heads_that_diverge_or_lack_a_measure_are_left_out_and_counted(demo, monkeypatch):
    harm = drawn(0, 32).exp()
    value = harm.clone()
    value[:3] = torch.nan
    harm[10] = math.inf
    (one,), prediction = planted(harm, {"planted": value})
    assert (one.rho, one.heads, one.left_out) == (pytest.approx(1), 28, 4)
    assert prediction.diverged == 1
    predictors, prediction = planted(torch.full((32,), math.inf).double(), {"planted": value})
    assert (predictors, prediction.diverged, prediction.ceiling) == ([], 32, None)
    assert "planted" in prediction.left_out
    assert "ceiling" in prediction.reasons
    original = sweeping._losses
    diverging = lambda own, new, *rest: original(own, new, *rest) * (1 if new is own else math.nan)  # noqa: E731
    monkeypatch.setattr(sweeping, "_losses", diverging)
    swap = swap_kernel(demo, "rbf", sweep="heads", windows=8, length=24, **BARE).swap
    assert [effect.delta for effect in swap.sweep] == [None] * 32
    assert (swap.prediction.diverged, swap.predictors) == (32, [])


def test_the_program_prints_writes_and_reads_predictors(tmp_path):
    words = ["swap-kernel", "demo", "--kernel", "rbf", "--sweep", "heads", "--windows", "8", "--length", "24"]
    words += ["--generate", "0", "--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "What predicts harm" in text
    assert "Not compared: tokens.share_positive" in text
    report = read_report(tmp_path / "r.json")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert len(rows) == len(report.swap.sweep)
    first = report.swap.predictors[0]
    assert [float(row[first.measure]) for row in rows] == pytest.approx(first.values)
    old = report.swap.model_dump(exclude={"predictors", "prediction"})
    assert Swap.model_validate(old).predictors == []


def test_the_picture_shows_the_strongest_measures_and_three_fixed_ones(swept):
    (panel,) = [panel for panel in swap_panels(swept) if panel.stem == "predictors"]
    assert "Not drawn: tokens.share_positive: not identified" in panel.caption
    with house_style():
        figure = panel_figure(swept, panel)
    axes = {each.get_title(loc="left"): each for each in figure.axes if each.collections}
    assert {"tokens.share_key", "ksvd.rank90", "tokens.entropy"} < axes.keys()
    assert len(axes.keys() - {"", "layer"}) == 6
    entropy = next(each for each in swept.swap.predictors if each.measure == "tokens.entropy")
    harm = [effect.delta for effect in swept.swap.sweep]
    dots = axes["tokens.entropy"].collections[0].get_offsets()
    assert np.asarray(dots) == pytest.approx(np.array([entropy.values, harm]).T)
