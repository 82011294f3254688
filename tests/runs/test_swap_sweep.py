"""Tests that each effect of a sweep is that of a separate swap, and of the measures that predict the harm of a head."""

import csv
import itertools
import math
from collections import Counter

import families
import numpy as np
import pytest
import torch
from loaded import BARE, apart, family, loaded, sites_of
from program import SMALL, invoke
from scipy.stats import spearmanr

import attnlens
from attnlens.kernels import parsed
from attnlens.maths.statistics import Design, false_discovery, paired_difference
from attnlens.maths.statistics.associations import permutation_tests, split_half, windows_interval
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import feed, task_of
from attnlens.records import Site, Swap
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style
from attnlens.report.pictures.swaps import swap_panels
from attnlens.report.report import read_report
from attnlens.runs.progress import Interrupted
from attnlens.runs.swap import sweep as sweeping
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 16, "batch_size": 2} | BARE
full = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("llama", "heads"), ("albert", "layers"), ("whisper", "heads"), ("headless", "layers")),
        *(pytest.param(name, "heads", marks=full) for name in ("gpt2", "gpt_neox", "gpt_oss", "bert", "bart")),
        *(pytest.param(name, "layers", marks=full) for name in ("llama", "gemma2", "t5", "bart")),
    ],
)
def test_each_effect_is_that_of_a_separate_swap(name, what):
    model = loaded(families.build("bert").bert) if name == "headless" else family(name)
    report = swap_kernel(model, "rbf", sweep=what, seed=3, **READ)
    swap = report.swap
    units = [(effect.layer, effect.head) for effect in swap.sweep]
    heads = {site.layer: site.heads if what == "heads" else [None] for site in swap.sites}
    assert sorted(units) == [(layer, head) for layer in heads for head in heads[layer]]
    for effect in swap.sweep[:: 1 if what == "layers" else 11]:
        chosen = None if effect.head is None else [effect.head]
        layers = [report.model.layer_name(effect.layer)]
        alone = swap_kernel(model, "rbf", layers=layers, heads=chosen, seed=3, **READ).swap
        if name in ("whisper", "headless"):
            assert effect.delta == pytest.approx(alone.kl if name == "whisper" else 1 - alone.hidden_cosine, abs=1e-6)
            assert effect.ci95[0] <= effect.delta <= effect.ci95[1]
            assert (effect.p_value, effect.significant) == (None, False)
        else:
            assert effect.delta == pytest.approx(alone.loss.delta, abs=1e-6)
            assert effect.ci95 == pytest.approx(alone.loss.ci95, abs=1e-6)
        assert effect.part == alone.sites[0].part
    assert max(abs(effect.delta) for effect in swap.sweep) > 1e-3


def test_the_effect_of_unequal_lines_is_weighted_by_their_tokens(tmp_path, demo):
    """A line of one token predicts nothing."""
    text = tmp_path / "lines.txt"
    text.write_text("A\nAnd God said.\nLet there be light: and there was light, and God saw the light.\nAmen, amen.\n")
    read = READ | {"text": str(text), "pack": False, "length": 32}
    for model in (demo, loaded(families.build("bert").bert)):
        for effect in swap_kernel(model, "rbf", sweep="layers", layers=[0, 1], **read).swap.sweep:
            alone = swap_kernel(model, "rbf", layers=[effect.layer], **read).swap
            expected = alone.loss.delta if model is demo else 1 - alone.hidden_cosine
            assert effect.delta == pytest.approx(expected, abs=1e-6)


def test_each_head_has_the_effect_of_a_separate_fit_and_its_own_fitted_parameters(demo, monkeypatch):
    """The fit sees the original model's queries and keys, so it is the same for one head and for all."""
    alone, together, original = {}, {}, hooks.replace

    def watch(model, sites, swaps, *rest, **more):
        for site, swap in swaps.items():
            if len(swaps) == 1 and swap.heads is not None and len(swap.heads) == 1:
                alone[site.layer, swap.heads[0]] = swap.kernel.fitted["origin"]
            elif len(swaps) > 1 and swap.kernel.fitted:
                together[site.layer] = dict(zip(swap.heads, swap.kernel.fitted["origin"], strict=True))
        return original(model, sites, swaps, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "replace", watch)
        effects = swap_kernel(demo, "rbf", sweep="heads", layers=[1, 2], heads=[5, 0], fit=True, **READ).swap.sweep
    units = [(1, 0), (1, 5), (2, 0), (2, 5)]
    assert sorted(alone) == sorted((effect.layer, effect.head) for effect in effects) == units
    for layer, head in units:
        assert torch.equal(alone[layer, head], together[layer][head][None])
    assert not torch.allclose(alone[1, 0], alone[1, 5], atol=1e-3)
    for effect in effects[::2]:
        swap = swap_kernel(demo, "rbf", layers=[effect.layer], heads=[effect.head], fit=True, **READ).swap
        assert effect.delta == pytest.approx(swap.stages[-1].loss.delta, abs=1e-6)
        assert swap.stages[-1].name == "fitted"


def test_the_interval_is_the_paired_bootstrap_of_the_sequences(demo):
    """Naively: the loss of each sequence of eight alone, with and without."""
    effect = swap_kernel(demo, "rbf", sweep="layers", layers=[2], windows=8, length=16, **BARE).swap.sweep[0]
    batches = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8))
    rows = [row[None] for batch in batches for row in batch.inputs["input_ids"]]
    sites, losses = sites_of(demo.model, {"input_ids": rows[0]}), ([], [])
    for values, swaps in zip(losses, ({}, {sites[2]: hooks.Replacement(parsed("rbf"))}), strict=True):
        with torch.no_grad(), hooks.replace(demo.model, sites, swaps):
            values += [demo.model(input_ids=row, labels=row).loss.double() for row in rows]
    assert (effect.delta, *effect.ci95) == pytest.approx(paired_difference(*map(torch.stack, losses)), abs=1e-5)


def count_calls(model):
    """Sweep over the layers of a model; return how often each attention module ran, by name."""
    cut = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=2))
    task, calls = task_of(model.model), Counter()
    fed = feed(model, cut, task, 0)
    sites = sites_of(model.model, fed[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed("rbf")))
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, module in model.model.named_modules()
        if hooks.is_attention(module)
    ]
    setup, units = SwapSetup(model, sites, swaps, task), sweeping.list_units(swaps, "layers", {})
    sweeping.sweep(setup, units, fed, Design.of(cut.parts), lambda _: None)
    for handle in handles:
        handle.remove()
    return calls


def test_layers_before_the_swapped_one_are_not_computed(demo):
    """One pass finds the blocks, one records them, and layer l runs for the swaps of layers 0 … l alone."""
    assert count_calls(demo) == {f"transformer.h.{layer}.attn": 2 + layer + 1 for layer in range(4)}
    calls = count_calls(family("bart"))
    assert [calls[f"model.encoder.layers.{layer}.self_attn"] for layer in (0, 1)] == [2 + 1, 2 + 2]
    albert = family("albert")
    assert hooks.blocks(albert.model, families.inputs("albert", albert.model)) == []
    assert max(count_calls(albert).values()) >= (2 + 3) * 3, "three passes of three calls each, after two at the start"


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma3"])
def test_replayed_blocks_return_their_recorded_outputs_and_are_restored(name):
    model = families.build(name)
    inputs, other = (families.inputs(name, model, seed=seed) for seed in (0, 1))
    blocks = hooks.blocks(model, inputs)
    earlier = blocks[: hooks.place_of(sites_of(model, inputs)[-1], blocks)]

    def states(inputs):
        return hooks.real_outputs(hooks.forward(model, inputs), inputs)[:1]

    with torch.no_grad():
        own, fresh = states(inputs), states(other)
        with hooks.record_outputs(blocks) as recorded:
            hooks.forward(model, inputs)
        with hooks.replay_outputs(earlier, recorded):
            again, stale = states(inputs), states(other)
        after = states(other)
    assert apart(own, again) == apart(fresh, after) == 0
    assert apart(stale, fresh) > 1e-2, "the control: the recorded states were used"
    with pytest.raises(ZeroDivisionError), hooks.replay_outputs(earlier, recorded):
        raise ZeroDivisionError
    assert not any("forward" in vars(block) or block._forward_hooks for _, block in blocks)


def test_effects_are_ranked_and_marked_by_the_false_discovery_rate(swept):
    effects = swept.swap.sweep
    deltas = [effect.delta for effect in effects]
    assert len(deltas) == 32
    assert deltas == sorted(deltas, reverse=True)
    marked = false_discovery(torch.tensor([effect.p_value for effect in effects], dtype=torch.float64)).tolist()
    assert [effect.significant for effect in effects] == marked
    assert set(marked) == {True, False}
    for effect in effects:
        assert 0 <= effect.p_value <= 1
        assert effect.ci95[0] <= effect.delta <= effect.ci95[1]
        assert effect.delta > 0 or not (effect.significant and effect.ci95[0] > 0)


def test_the_own_kernel_has_no_effect_one_sequence_no_p_value_and_a_diverged_unit_comes_first(demo, monkeypatch):
    for effect in swap_kernel(family("gpt2"), "exponential", sweep="heads", **READ).swap.sweep:
        assert abs(effect.delta) < 1e-5
        assert effect.ci95[0] <= 1e-6
        assert effect.ci95[1] >= -1e-6
    for effect in swap_kernel(demo, "rbf", sweep="layers", windows=1, length=16, **BARE).swap.sweep:
        assert (effect.p_value, effect.ci95, effect.significant) == (None, None, False)
        assert effect.delta is not None
    original, calls = sweeping._losses, itertools.count()

    def diverging(own, new, *rest):
        return original(own, new, *rest) * (math.nan if new is not own and next(calls) == 2 else 1)

    monkeypatch.setattr(sweeping, "_losses", diverging)
    first, *rest = swap_kernel(demo, "rbf", sweep="layers", windows=2, length=16, **BARE).swap.sweep
    assert (first.layer, first.delta, first.ci95, first.p_value, first.significant) == (2, None, None, None, False)
    assert all(effect.delta is not None for effect in rest)


def test_an_interrupted_sweep_keeps_what_was_measured_before(demo, monkeypatch, tmp_path):
    original, finished = sweeping.sweep, []

    def interrupted(*args):
        if finished:
            raise KeyboardInterrupt
        finished.append(1)
        return original(*args)

    monkeypatch.setattr("attnlens.runs.swap.kernel_run.sweep", interrupted)
    with pytest.raises(Interrupted) as stop:
        swap_kernel(demo, ["rbf", "linear"], sweep="layers", **READ)
    first, second = stop.value.report.swaps
    assert (len(first.sweep), len(second.sweep)) == (4, 0)
    assert second.loss is not None
    assert "interrupted" in second.notes[-1]
    with pytest.raises(Interrupted) as stop:
        swap_kernel(demo, "rbf", sweep="layers", fit=True, save=tmp_path / "fitted", **READ)
    assert stop.value.report.swap.stages[-1].name == "fitted"
    assert (tmp_path / "fitted" / "attnlens.json").is_file()


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_p_values_are_those_of_all_permutations():
    """Naively: every order of six heads, Spearman's ρ each, and the largest of three measures."""
    measures, harm = drawn(0, 3, 6), drawn(1, 6)
    orders = np.array([[*range(6)], *itertools.permutations(range(6))])
    rhos = abs(spearmanr(measures.numpy(), harm.numpy()[orders], axis=1).statistic[:3, 3:])
    own, every = rhos[:, :1], rhos[:, 1:]
    alone, most = (every >= own - 1e-9).mean(1), (every.max(0) >= own - 1e-9).mean(1)
    tests = permutation_tests(measures, harm, draws=20_000)
    assert tests.p_value.numpy() == pytest.approx(alone, abs=0.015)
    assert tests.corrected.numpy() == pytest.approx(most, abs=0.015)
    assert np.all(most >= alone)
    assert np.any(most > alone + 0.1), "the control: uncorrected they are smaller"
    measures, harm = drawn(0, 2, 20), drawn(1, 20)
    measures[1] = harm
    measures[1, :5] = harm[6] = torch.nan  # a measure that some heads lack is tested over the others
    assert permutation_tests(measures, harm, draws=2000).p_value[1] == pytest.approx(1 / 2001)
    missing = torch.full((1, 20), torch.nan, dtype=torch.float64)
    assert permutation_tests(missing, harm, draws=100).p_value.isnan().all()
    assert permutation_tests(torch.ones_like(missing), harm, draws=100).corrected.isnan().all()
    assert permutation_tests(measures, missing[0], draws=10).p_value.isnan().all()


@pytest.mark.parametrize("runs", [40, pytest.param(300, marks=full)])
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
        reason = "a causal head never scores a query against a later key"
        assert prediction.left_out[f"tokens.share_{name}"] == reason
    assert prediction.left_out["weights.inertia_positive"] == sweeping.CONSTANT
    without = swap_kernel(demo, "rbf", sweep="heads", predictors=False, windows=8, length=24, **BARE).swap
    assert without.sweep == swept.swap.sweep
    assert (without.predictors, without.prediction) == ([], None)


def test_predictors_need_a_sweep_of_eight_heads(demo):
    for more in ({"sweep": "heads", "layers": [0], "heads": range(7)}, {"sweep": "layers"}):
        swap = swap_kernel(demo, "rbf", **READ | {"windows": 2}, **more).swap
        assert swap.sweep
        assert (swap.predictors, swap.prediction) == ([], None)


@pytest.mark.parametrize(
    ("name", "judge"),
    [("whisper", "kl"), ("albert", "loss"), ("headless", "hidden"), pytest.param("bert", "loss", marks=full)],
)
def test_predictors_exist_for_any_model(name, judge):
    model = loaded(families.build("bert").bert) if name == "headless" else family(name)
    swap = swap_kernel(model, "rbf", sweep="heads", **READ | {"windows": 2}).swap
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
    alone = sweeping.UnitEffects(units, ones, changed, ones, list(range(windows)), Design.plain(windows), tested=False)
    return sweeping.find_predictors(alone, sweeping.SweptMeasures(measures, {}, {}), 0)


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


def test_heads_that_diverge_or_lack_a_measure_are_left_out_and_counted(monkeypatch):
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
    swap = swap_kernel(family("gpt2"), "rbf", sweep="heads", **READ).swap
    assert [effect.delta for effect in swap.sweep] == [None] * 8
    assert (swap.prediction.diverged, swap.predictors) == (8, [])


def test_the_program_prints_writes_and_reads_predictors(tmp_path):
    words = "swap-kernel", "demo", "--layers", "1", "--kernel", "rbf", "--sweep", "heads", "--generate", "0", "--table"
    paths = [tmp_path / name for name in ("r.json", "r.csv")]
    done = invoke(*words, *SMALL, "--json", paths[0], "--csv", paths[1])
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "What predicts harm" in text
    assert "Not compared: tokens.share_positive" in text
    swap, rows = read_report(paths[0]).swap, list(csv.DictReader(paths[1].read_text().splitlines()))
    assert len(rows) == len(swap.sweep)
    first = swap.predictors[0]
    assert [float(row[first.measure]) for row in rows] == pytest.approx(first.values)
    assert Swap.model_validate(swap.model_dump(exclude={"predictors", "prediction"})).predictors == []


def test_the_picture_shows_the_strongest_measures_and_three_fixed_ones(swept):
    (panel,) = [panel for panel in swap_panels(swept) if panel.stem == "predictors"]
    assert "Not drawn: tokens.share_positive: a causal head never" in panel.caption
    with house_style():
        figure = panel_figure(swept, panel)
    axes = {each.get_title(loc="left"): each for each in figure.axes if each.collections}
    assert {"tokens.share_key", "ksvd.rank90", "tokens.entropy"} < axes.keys()
    assert len(axes.keys() - {"", "layer"}) == 6
    entropy = next(each for each in swept.swap.predictors if each.measure == "tokens.entropy")
    harm = [effect.delta for effect in swept.swap.sweep]
    dots = axes["tokens.entropy"].collections[0].get_offsets()
    assert np.asarray(dots) == pytest.approx(np.array([entropy.values, harm]).T)
