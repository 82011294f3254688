"""Tests what is said to predict harm, and that an early end of a sweep keeps its word."""

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
from attnlens.plots import panel_figure, swap_panels
from attnlens.plots.style import house_style
from attnlens.records import Site, Swap, read_report
from attnlens.run.swap.pipeline import swap_kernel
from attnlens.run.swap.predictors.joined import predicted_by
from attnlens.run.swap.predictors.ordered import MISSED, ordered
from attnlens.run.swap.predictors.readings import CONSTANT, SweptMeasures
from attnlens.run.swap.predictors.swept import swept_in_order
from attnlens.run.swap.sweep import Alone
from attnlens.statistics import Design, remaining
from attnlens.statistics.associations import over_windows, permutation_tests, split_half

READ = {"sequences": 8, "tokens": 32}


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


def test_the_interval_over_windows_is_the_bootstrap_of_both_sides():
    """Naively: each sample's means and Spearman's ρ, from the same draws."""
    measure, harm, sizes = drawn(0, 10, 12) + drawn(3, 12), drawn(1, 10, 12) + drawn(3, 12), drawn(2, 10).abs() + 1
    design = Design.plain(10)
    value = float(spearmanr(measure.mean(0), (sizes @ harm) / sizes.sum())[0])
    found = over_windows(measure, harm, sizes, design, value, draws=200)
    rhos = []
    for times in 1 + (design.draws(200, 0) - 1) * math.sqrt(10 / 9):
        own = (times[:, None] * measure).sum(0) / times.sum()
        other = ((times * sizes)[:, None] * harm).sum(0) / (times * sizes).sum()
        rhos.append(math.atanh(spearmanr(own, other)[0]))
    reach = 2.2621571628 * np.std(rhos, ddof=1)
    assert found[1:] == pytest.approx((math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach)))
    still = over_windows(measure.mean(0), harm, sizes, design, value, draws=200)
    assert still.high - still.low < found.high - found.low, "a measure of the weights does not vary"
    assert math.isnan(over_windows(measure[:1], harm[:1], sizes[:1], Design.plain(1), value).low)


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
    encoder = swap_kernel(family("bert"), "rbf", sweep="heads", sequences=4, tokens=16)
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
    swap = swap_kernel(demo, "rbf", **{"sweep": "heads", "sequences": 2, "tokens": 16} | more).swap
    assert swap.sweep
    assert (swap.predictors, swap.prediction) == ([], None)


def test_the_sweep_itself_is_the_same_with_and_without_the_join(demo, report):
    assert swap_kernel(demo, "rbf", sweep="heads", predictors=False, **READ).swap.sweep == report.swap.sweep


# --- a sweep in the order of a measure --------------------------------------------------------------------------------


def dense(predictor, values, rest, most):
    """Σ P(t₄ > …) by pooling neighbours one by one."""
    from scipy.stats import t

    middle = np.median(values)
    tame = np.arcsinh((values - middle) / (1.4826 * np.median(np.abs(values - middle))))
    order = np.argsort(predictor)
    pools = [[y] for y in tame[order]]
    while True:
        means = [np.mean(pool) for pool in pools]
        fall = next((i for i in range(len(pools) - 1) if means[i] >= means[i + 1]), None)
        if fall is None:
            break
        pools[fall : fall + 2] = [pools[fall] + pools[fall + 1]]
    fit = np.concatenate([[np.mean(pool)] * len(pool) for pool in pools])
    pooled = np.concatenate([[len(pool)] * len(pool) for pool in pools])
    residuals = tame[order] - fit
    squares = max((residuals**2).sum(), 2 * (np.maximum(residuals, 0) ** 2).sum())
    size = math.sqrt(squares / max(2, len(fit) - len(pools)))
    known = predictor[order]
    at = [max(0, int((known <= x).sum()) - 1) for x in rest]
    return sum(t.sf((np.sort(tame)[-most] - fit[i]) / size - 1 / math.sqrt(pooled[i]), 4) for i in at)


def test_the_expected_number_is_that_of_the_formula():
    x, noise = drawn(0, 30).numpy(), drawn(1, 30).numpy()
    values = np.exp(x + 0.4 * noise)
    found = remaining.expected_above(*(torch.from_numpy(part) for part in (x[:20], values[:20], x[20:])), 3)
    assert found == pytest.approx(dense(x[:20], values[:20], x[20:], 3), rel=1e-9)
    assert remaining.expected_above(torch.arange(9.0), torch.arange(9.0), torch.zeros(0), 2) == 0
    assert remaining.expected_above(torch.arange(9.0), torch.ones(9), torch.zeros(1), 2) == math.inf


LAWS = {
    "normal": lambda heads, seed: drawn(seed, heads),
    "t4": lambda heads, seed: torch.from_numpy(np.random.default_rng(seed).standard_t(4, heads)) / math.sqrt(2),
    "Laplace": lambda heads, seed: drawn(seed, heads).abs() * drawn(seed + 10**6, heads).sign() * 1.2,
    "lognormal harm": lambda heads, seed: drawn(seed, heads),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_stopped_sweep_misses_a_top_head_at_most_as_often_as_stated(law):
    """72 heads whose harm one of four measures predicts but for noise; the most harmful eight are wanted."""
    runs, missed, stopped, least = 60, 0, 0, 0
    for run in range(runs):
        measures = drawn(run, 4, 72)
        harm = measures[2] + 0.2 * LAWS[law](72, run + 10**5)
        harm = harm.exp() if law == "lognormal harm" else harm
        found = ordered(measures, lambda places, harm=harm: harm[places], run)
        top = set(harm.argsort(descending=True)[: found.most].tolist())
        assert sorted([*found.swept, *found.left]) == list(range(72))
        stopped += bool(found.left)
        missed += bool(top & set(found.left))
        least += bool(top - set(found.swept[: found.drawn]))
    assert stopped > runs / 2
    assert missed / runs <= bound(MISSED, runs, sds=2)
    assert least == runs, "the control: the heads drawn at random alone never hold them all"


def test_shuffled_measures_order_nothing_at_the_stated_rate():
    runs = 200
    chosen = []
    for run in range(runs):
        harm = drawn(run, 48).exp()
        found = ordered(drawn(run + 10**5, 6, 48), lambda places, harm=harm: harm[places], run)
        chosen.append(found.chosen is not None)
        assert found.chosen is not None or not found.left
    assert sum(chosen) / runs <= bound(0.05, runs)


def test_a_sweep_that_stops_lists_what_it_left_without_a_number():
    harm = (drawn(0, 80) * 2).exp()
    alone, measures = planted(harm, {"planted": harm.log() + 0.02 * drawn(2, 80), "other": drawn(3, 80)})
    asked = []

    def sweep(some):
        asked.extend(some)
        places = [alone.units.index(unit) for unit in some]
        return Alone(list(some), alone.own, alone.changed[places], alone.sizes, alone.kept, alone.design, tested=False)

    fields = swept_in_order(alone.units, sweep, measures, 0)
    prediction, left = fields["prediction"], fields["prediction"].order.not_swept
    assert prediction.order.measure == "planted"
    assert prediction.order.expected <= MISSED
    assert len(left) > 20
    assert len(asked) + len(left) == 80
    assert {(one.layer, one.head) for one in left}.isdisjoint((effect.layer, effect.head) for effect in fields["sweep"])
    assert all("predicted harm" in one.reason for one in left)
    assert "delta" not in type(left[0]).model_fields
    assert prediction.heads == prediction.order.drawn == 20, "the others were chosen by a measure"
    top = {(alone.units[p][0].layer, alone.units[p][1]) for p in harm.argsort(descending=True)[:8].tolist()}
    assert top <= {(effect.layer, effect.head) for effect in fields["sweep"]}
    for one in fields["predictors"]:
        assert len(one.values) == len(fields["sweep"])


@pytest.mark.parametrize("why", ["lacks", "diverged", "expected"])
def test_a_sweep_of_all_heads_names_its_cause(why):
    harm = drawn(3, 40)
    measure = harm + 0.8 * drawn(103, 40)
    some = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:12].tolist()
    if why == "lacks":
        measure[next(place for place in range(40) if place not in some)] = math.nan
    if why == "diverged":  # of the heads drawn, which are swept first
        harm[some[0]] = math.nan
    alone, measures = planted(harm, {"planted": measure})

    def sweep(units):
        places = [alone.units.index(unit) for unit in units]
        return Alone(list(units), alone.own, alone.changed[places], alone.sizes, alone.kept, alone.design, tested=False)

    order = swept_in_order(alone.units, sweep, measures, 0)["prediction"].order
    assert (order.measure, order.not_swept) == ("planted", [])
    told = {
        "lacks": "1 head lacks planted",
        "diverged": "1 head diverged",
        "expected": "were expected among the last ones left, more than 0.05",
    }
    assert {name: words in order.rule for name, words in told.items()} == {name: name == why for name in told}


def test_a_sweep_in_order_gives_each_head_the_effect_of_a_full_one(demo, report):
    swap = swap_kernel(demo, "rbf", sweep="predicted", **READ).swap
    full = {(effect.layer, effect.head): effect.delta for effect in report.swap.sweep}
    order = swap.prediction.order
    assert len(swap.sweep) + len(order.not_swept) == 32
    assert order.drawn == 12
    assert order.most == 4
    for effect in swap.sweep:
        assert effect.delta == pytest.approx(full[effect.layer, effect.head], abs=1e-6)


def test_one_head_is_swept_and_orders_nothing(demo):
    swap = swap_kernel(demo, "rbf", sweep="predicted", layers=[2], heads=[3], **READ).swap
    assert [(effect.layer, effect.head) for effect in swap.sweep] == [(2, 3)]
    assert swap.predictors == []
    assert swap.prediction.order.measure is None
    assert "drawn at random before any measure" in swap.prediction.order.rule


def test_a_kernel_that_diverges_everywhere_is_swept_whole_and_says_so(demo, monkeypatch):
    from attnlens.run.swap import sweep as room

    honest = room._losses
    monkeypatch.setattr(
        room, "_losses", lambda own, new, *rest: honest(own, new, *rest) * (1 if new is own else math.nan)
    )
    swap = swap_kernel(demo, "rbf", sweep="predicted", **READ).swap
    assert len(swap.sweep) == 32
    assert all(effect.delta is None for effect in swap.sweep)
    assert swap.prediction.diverged == 32
    assert swap.predictors == []
    assert "have no harm" in swap.prediction.order.rule


def test_noise_and_shared_layers_are_joined_too():
    noise = swap_kernel(family("whisper"), "rbf", sweep="predicted", **READ | {"tokens": 16, "sequences": 4}).swap
    assert noise.judged_by == "kl"
    assert noise.predictors
    assert len(noise.sweep) + len(noise.prediction.order.not_swept) == sum(len(site.heads) for site in noise.sites)
    shared = swap_kernel(family("albert"), "rbf", sweep="heads", sequences=4, tokens=16).swap
    assert len(shared.sweep) >= 8
    assert shared.predictors
    headless = swap_kernel(loaded(families.build("bert").bert), "rbf", sweep="heads", sequences=4, tokens=16).swap
    assert headless.predictors


# --- views and the program --------------------------------------------------------------------------------------------


def test_the_program_tells_writes_and_reads_it_again(tmp_path):
    names = {name: tmp_path / f"report.{name}" for name in ("json", "csv")}
    out = program(
        *("swap-kernel", "demo", "--kernel", "rbf", "--sweep", "predicted", "--sequences", "8", "--tokens", "32"),
        *("--json", names["json"], "--csv", names["csv"]),
    )
    assert out.returncode == 0, out.stderr
    text = " ".join(out.stdout.split())
    assert "What predicts harm" in text
    assert "drawn at random" in text
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
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.collections and axes.get_xlabel() == ""]
    assert {"tokens.share_key", "ksvd.rank90", "tokens.entropy"} < set(titles)
    assert len(set(titles) - {"", "layer"}) == 6
    dots = [axes.collections[0].get_offsets() for axes in figure.axes if axes.get_title(loc="left") == "tokens.entropy"]
    entropy = next(one for one in report.swap.predictors if one.measure == "tokens.entropy")
    harm = [effect.delta for effect in report.swap.sweep]
    assert np.asarray(dots[0]) == pytest.approx(np.array([entropy.values, harm]).T)


def test_an_order_without_measures_is_refused():
    out = program("swap-kernel", "demo", "--sweep", "predicted", "--no-predictors")
    refused(out, "--no-predictors reads none")
