"""Tests that each effect of a sweep is that of a separate swap, computed with less work, ranked and marked."""

import math
from collections import Counter

import families
import pytest
import torch
from loaded import BARE, apart, family, loaded, sites_of

from attnlens.kernels import parsed
from attnlens.maths.statistics import Design, false_discovery, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import feed, task_of
from attnlens.runs.progress import Interrupted
from attnlens.runs.swap import sweep as sweeping
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 16, "batch_size": 2} | BARE
full = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("llama", "heads"),
        ("albert", "layers"),
        ("bart", "layers"),
        ("whisper", "heads"),
        ("headless", "layers"),
        *(pytest.param(name, "heads", marks=full) for name in ("gpt2", "gpt_neox", "gpt_oss", "bert", "bart")),
        *(pytest.param(name, "layers", marks=full) for name in ("llama", "gemma2", "t5")),
    ],
)
def test_each_effect_is_that_of_a_separate_swap(name, what):
    model = loaded(families.build("bert").bert) if name == "headless" else family(name)
    swap = swap_kernel(model, "rbf", sweep=what, seed=3, **READ).swap
    units = [(effect.layer, effect.head) for effect in swap.sweep]
    heads = {site.layer: site.heads if what == "heads" else [None] for site in swap.sites}
    assert sorted(units) == [(layer, head) for layer in heads for head in heads[layer]]
    for effect in swap.sweep[:: 1 if what == "layers" else 5]:
        chosen = None if effect.head is None else [effect.head]
        alone = swap_kernel(model, "rbf", layers=[effect.layer], heads=chosen, seed=3, **READ).swap
        if name in ("whisper", "headless"):
            assert effect.delta == pytest.approx(alone.kl if name == "whisper" else 1 - alone.hidden_cosine, abs=1e-6)
            assert effect.ci95[0] <= effect.delta <= effect.ci95[1]
            assert effect.p_value is None
            assert not effect.significant
        else:
            assert effect.delta == pytest.approx(alone.loss.delta, abs=1e-6)
            assert effect.ci95 == pytest.approx(alone.loss.ci95, abs=1e-6)
        assert effect.part == alone.sites[0].part
    assert max(abs(effect.delta) for effect in swap.sweep) > 1e-3


def test_the_effect_of_unequal_lines_is_weighted_by_their_tokens(tmp_path, demo):
    """A line of one token predicts nothing."""
    text = tmp_path / "lines.txt"
    text.write_text("A\nAnd God said.\nLet there be light: and there was light, and God saw the light.\nAmen, amen.\n")
    read = {"text": str(text), "pack": False, "windows": 4, "length": 32, "batch_size": 2} | BARE
    for model in (demo, loaded(families.build("bert").bert)):
        for effect in swap_kernel(model, "rbf", sweep="layers", layers=[0, 1], **read).swap.sweep:
            alone = swap_kernel(model, "rbf", layers=[effect.layer], **read).swap
            expected = alone.loss.delta if model is demo else 1 - alone.hidden_cosine
            assert effect.delta == pytest.approx(expected, abs=1e-6)


def test_the_effect_of_a_fitted_kernel_is_that_of_a_separate_fit(demo):
    """The fit sees the original model's queries and keys, so it is the same for one head and for all."""
    effects = swap_kernel(demo, "rbf", sweep="heads", layers=[1, 2], heads=[0, 5], fit=True, **READ).swap.sweep
    assert sorted((effect.layer, effect.head) for effect in effects) == [(1, 0), (1, 5), (2, 0), (2, 5)]
    for effect in effects[::2]:
        alone = swap_kernel(demo, "rbf", layers=[effect.layer], heads=[effect.head], fit=True, **READ).swap
        assert effect.delta == pytest.approx(alone.stages[-1].loss.delta, abs=1e-6)
        assert alone.stages[-1].name == "fitted"


def test_each_head_is_swapped_with_its_own_fitted_parameters(demo, monkeypatch):
    alone, together, original = {}, {}, hooks.replace

    def watch(model, sites, swaps, *rest, **more):
        for site, swap in swaps.items():
            if len(swaps) == 1 and swap.heads is not None and len(swap.heads) == 1:
                alone[site.layer, swap.heads[0]] = swap.kernel.fitted["origin"]
            elif len(swaps) > 1 and swap.kernel.fitted:
                together[site.layer] = dict(zip(swap.heads, swap.kernel.fitted["origin"], strict=True))
        return original(model, sites, swaps, *rest, **more)

    monkeypatch.setattr(hooks, "replace", watch)
    swap_kernel(demo, "rbf", heads=[5, 1], sweep="heads", fit=True, **READ)
    assert sorted(alone) == [(layer, head) for layer in range(4) for head in (1, 5)]
    for (layer, head), origin in alone.items():
        assert torch.equal(origin, together[layer][head][None])
    assert not torch.allclose(alone[0, 1], alone[0, 5], atol=1e-3)


def test_the_interval_is_the_paired_bootstrap_of_the_sequences(demo):
    """Naively: the loss of each sequence of eight alone, with and without."""
    effect = swap_kernel(demo, "rbf", sweep="layers", layers=[2], windows=8, length=16, **BARE).swap.sweep[0]
    rows = [
        row
        for batch in texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8))
        for row in batch.inputs["input_ids"]
    ]
    sites, losses = sites_of(demo.model, {"input_ids": rows[0][None]}), ([], [])
    for values, swaps in zip(losses, ({}, {sites[2]: hooks.Replacement(parsed("rbf"))}), strict=True):
        with torch.no_grad(), hooks.replace(demo.model, sites, swaps):
            values += [demo.model(input_ids=row[None], labels=row[None]).loss.double() for row in rows]
    assert (effect.delta, *effect.ci95) == pytest.approx(paired_difference(*map(torch.stack, losses)), abs=1e-5)


def count_calls(model):
    """Sweep over the layers of a model; return how often each attention module ran, by name."""
    cut = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=2))
    fed, task, calls = feed(model, cut, task_of(model.model), 0), task_of(model.model), Counter()
    sites = sites_of(model.model, fed[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed("rbf")))
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, module in model.model.named_modules()
        if hooks.is_attention(module)
    ]
    setup, units = SwapSetup(model, sites, swaps, task), sweeping.units(swaps, "layers", {})
    sweeping.sweep(setup, units, fed, Design.of(cut.parts), lambda _: None)
    for handle in handles:
        handle.remove()
    return calls


def test_layers_before_the_swapped_one_are_not_computed(demo):
    """One pass finds the blocks, one records them, and layer l runs for the swaps of layers 0 … l alone."""
    calls = count_calls(demo)
    assert calls == {f"transformer.h.{layer}.attn": 2 + layer + 1 for layer in range(4)}
    calls = count_calls(family("bart"))
    assert [calls[f"model.encoder.layers.{layer}.self_attn"] for layer in (0, 1)] == [2 + 1, 2 + 2]
    albert = family("albert")
    assert hooks.blocks(albert.model, families.inputs("albert", albert.model)) == []
    assert max(count_calls(albert).values()) >= (2 + 3) * 3, "three passes of three calls each, after two at the start"


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma3"])
def test_replayed_blocks_return_their_recorded_outputs_and_are_restored(name):
    model = families.build(name)
    inputs, other = (families.inputs(name, model, seed=seed) for seed in (0, 1))
    blocks, sites = hooks.blocks(model, inputs), sites_of(model, inputs)

    def states(inputs):
        return hooks.real_outputs(hooks.forward(model, inputs), inputs)[:1]

    with torch.no_grad():
        own, fresh = states(inputs), states(other)
        with hooks.record_outputs(blocks) as recorded:
            hooks.forward(model, inputs)
        with hooks.replay_outputs(blocks, recorded, sites[-1]):
            again, stale = states(inputs), states(other)
        after = states(other)
    assert apart(own, again) == apart(fresh, after) == 0
    assert apart(stale, fresh) > 1e-2, "the control: the recorded states were used"
    with pytest.raises(ZeroDivisionError), hooks.replay_outputs(blocks, recorded, sites[-1]):
        raise ZeroDivisionError
    assert not any("forward" in vars(block) or block._forward_hooks for _, block in blocks)


def test_effects_are_ranked_and_marked_by_the_false_discovery_rate(swept):
    effects = swept.swap.sweep
    assert len(effects) == 32
    deltas = [effect.delta for effect in effects]
    assert deltas == sorted(deltas, reverse=True)
    marked = false_discovery(torch.tensor([effect.p_value for effect in effects], dtype=torch.float64)).tolist()
    assert [effect.significant for effect in effects] == marked
    assert any(marked)
    assert not all(marked)
    for effect in effects:
        assert 0 <= effect.p_value <= 1
        assert effect.ci95[0] <= effect.delta <= effect.ci95[1]
        assert effect.delta > 0 or not (effect.significant and effect.ci95[0] > 0)


def test_the_own_kernel_has_no_effect_and_one_sequence_no_p_value(demo):
    for effect in swap_kernel(demo, "exponential", sweep="heads", **READ).swap.sweep:
        assert abs(effect.delta) < 1e-5
        assert effect.ci95[0] <= 1e-6
        assert effect.ci95[1] >= -1e-6
    for effect in swap_kernel(demo, "rbf", sweep="layers", windows=1, length=16, **BARE).swap.sweep:
        assert (effect.p_value, effect.ci95, effect.significant) == (None, None, False)
        assert effect.delta is not None


def test_a_diverged_unit_comes_first_and_is_not_marked(demo, monkeypatch):
    original, calls = sweeping._losses, iter(range(100))
    monkeypatch.setattr(
        sweeping,
        "_losses",
        lambda own, new, *rest: original(own, new, *rest) * (math.nan if new is not own and next(calls) == 2 else 1),
    )
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
