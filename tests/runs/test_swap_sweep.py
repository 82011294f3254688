"""Tests that each effect of a sweep is that of a separate swap, for half the work, ranked and marked."""

from collections import Counter

import families
import pytest
import torch
from loaded import BARE, apart, family, loaded, sites_of

import attnlens
from attnlens.kernels import parsed
from attnlens.maths.statistics import Design, false_discovery, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import feed, task_of
from attnlens.runs.progress import Interrupted
from attnlens.runs.swap import sweep as room
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup
from attnlens.runs.swap.sweep import sweep, units

READ = {"windows": 4, "length": 16, "batch_size": 2} | BARE
SWEPT = ["gpt2", "llama", "gpt_neox", "gemma2", "gpt_oss", "bert", "albert", "t5", "bart", "whisper"]


@pytest.fixture(scope="module")
def demo():
    return attnlens.load("demo")


@pytest.mark.parametrize("what", ["layers", "heads"])
@pytest.mark.parametrize("name", SWEPT)
def test_each_effect_is_that_of_a_separate_swap(name, what):
    model = family(name)
    effects = swap_kernel(model, "rbf", sweep=what, seed=3, **READ).swap.sweep
    assert len({(effect.layer, effect.head) for effect in effects}) == len(effects)
    for effect in effects[:: 1 if what == "layers" else 3]:
        heads = None if effect.head is None else [effect.head]
        alone = swap_kernel(model, "rbf", layers=[effect.layer], heads=heads, seed=3, **READ).swap
        if name == "whisper":
            assert effect.delta == pytest.approx(alone.kl, abs=1e-6)
            assert effect.ci95[0] <= effect.delta <= effect.ci95[1]
            assert effect.p_value is None
            assert not effect.significant
        else:
            assert effect.delta == pytest.approx(alone.loss.delta, abs=1e-6)
            assert effect.ci95 == pytest.approx(alone.loss.ci95, abs=1e-6)
        assert effect.part == alone.sites[0].part
    assert max(abs(effect.delta) for effect in effects) > 1e-3


def test_every_chosen_unit_is_swept_once():
    model = family("llama")
    layers = swap_kernel(model, "rbf", sweep="layers", **READ).swap.sweep
    assert sorted(effect.layer for effect in layers) == [0, 1]
    assert {effect.head for effect in layers} == {None}
    heads = swap_kernel(model, "rbf", sweep="heads", layers=[1], heads=[0, 5], **READ).swap.sweep
    assert sorted((effect.layer, effect.head) for effect in heads) == [(1, 0), (1, 5)]
    every = swap_kernel(model, "rbf", sweep="heads", **READ).swap.sweep
    assert sorted((effect.layer, effect.head) for effect in every) == [
        (layer, head) for layer in (0, 1) for head in range(6)
    ]


def test_the_effect_of_unequal_lines_is_weighed_by_their_tokens(tmp_path, demo):
    text = tmp_path / "lines.txt"
    text.write_text("And God said.\nLet there be light: and there was light, and God saw the light.\nAmen, amen.\n")
    read = {"text": str(text), "pack": False, "windows": 3, "length": 32, "batch_size": 2}
    for effect in swap_kernel(demo, "rbf", sweep="layers", **read).swap.sweep:
        alone = swap_kernel(demo, "rbf", layers=[effect.layer], **read).swap
        assert effect.delta == pytest.approx(alone.loss.delta, abs=1e-6)


def test_a_headless_models_effect_is_what_its_states_lose():
    model = loaded(families.build("bert").bert)
    for effect in swap_kernel(model, "rbf", sweep="layers", **READ).swap.sweep:
        alone = swap_kernel(model, "rbf", layers=[effect.layer], **READ).swap
        assert effect.delta == pytest.approx(1 - alone.hidden_cosine, abs=1e-6)
        assert effect.delta > 1e-3
        assert effect.p_value is None
        assert not effect.significant


# --- what is not computed again ---------------------------------------------------------------------------------------


def counted(model, work):
    """How often each attention module is asked for its queries while `work` runs."""
    calls = Counter()
    modules = {module: name for name, module in model.named_modules() if hooks.is_attention(module)}
    handles = [module.register_forward_hook(lambda module, *_: calls.update([modules[module]])) for module in modules]
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def swept(model, words="rbf", what="layers"):
    found = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=2))
    fed = feed(model, found, task_of(model.model), 0)
    sites = sites_of(model.model, fed[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(words)))
    heads = {reached.site: reached.call.query.shape[1] for reached in hooks.survey(model.model, fed[0].inputs)}
    chosen = units(swaps, what, heads)
    design = Design.of(found.parts)
    return lambda: sweep(SwapSetup(model, sites, swaps, task_of(model.model)), chosen, fed, design, lambda _: None)


def test_layers_before_the_swapped_one_are_not_computed(demo):
    """One pass to find the blocks, one to record them, and layer l runs for the swaps of layers 0 … l alone."""
    layers = 4
    calls = counted(demo.model, swept(demo))
    assert [calls[f"transformer.h.{layer}.attn"] for layer in range(layers)] == [
        2 + layer + 1 for layer in range(layers)
    ]
    assert sum(calls.values()) == 2 * layers + layers * (layers + 1) // 2


def test_an_encoder_is_not_computed_again_for_a_swap_in_the_decoder():
    model = family("bart")
    calls = counted(model.model, swept(model))
    encoder = [calls[f"model.encoder.layers.{layer}.self_attn"] for layer in (0, 1)]
    assert encoder == [2 + 1, 2 + 2]


def test_shared_layers_are_all_computed():
    model = family("albert")
    inputs = families.inputs("albert", model.model)
    assert hooks.blocks(model.model, inputs) == []
    calls = counted(model.model, swept(model))
    assert max(calls.values()) >= (2 + 3) * 3, "three passes of three calls each, beside the two at the start"


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "gemma3"])
def test_blocks_answer_with_what_they_gave_and_are_themselves_again(name):
    model = families.build(name)
    inputs, other = (families.inputs(name, model, seed=seed) for seed in (0, 1))
    blocks = hooks.blocks(model, inputs)
    sites = sites_of(model, inputs)
    with torch.no_grad():
        own, fresh = (hooks.real_outputs(hooks.forward(model, given), given)[:1] for given in (inputs, other))
        with hooks.record_outputs(blocks) as given:
            hooks.forward(model, inputs)
        with hooks.replay_outputs(blocks, given, sites[-1]):
            again = hooks.real_outputs(hooks.forward(model, inputs), inputs)[:1]
            stale = hooks.real_outputs(hooks.forward(model, other), other)[:1]
        after = hooks.real_outputs(hooks.forward(model, other), other)[:1]
    assert apart(own, again) == 0
    assert apart(stale, fresh) > 1e-2, "the control: the recorded states were used"
    assert apart(fresh, after) == 0
    assert all("forward" not in vars(block) for _, block in blocks)


def test_blocks_are_restored_after_an_error():
    model = families.build("gpt2")
    inputs = families.inputs("gpt2", model)
    blocks = hooks.blocks(model, inputs)
    with hooks.record_outputs(blocks) as given:
        hooks.forward(model, inputs)
    site = sites_of(model, inputs)[-1]
    with pytest.raises(ZeroDivisionError), hooks.replay_outputs(blocks, given, site):
        raise ZeroDivisionError
    assert all("forward" not in vars(block) for _, block in blocks)
    assert not any(block._forward_hooks for _, block in blocks)


# --- ranks and marks --------------------------------------------------------------------------------------------------


def test_the_most_harmful_comes_first_and_marks_are_those_of_the_false_discovery_rate(demo):
    effects = swap_kernel(demo, "rbf", sweep="heads", windows=8, length=24, **BARE).swap.sweep
    assert len(effects) == 32
    deltas = [effect.delta for effect in effects]
    assert deltas == sorted(deltas, reverse=True)
    marked = false_discovery(torch.tensor([effect.p_value for effect in effects], dtype=torch.float64)).tolist()
    assert [effect.significant for effect in effects] == marked
    assert any(marked)
    assert not all(marked)
    assert all(0 <= effect.p_value <= 1 for effect in effects)
    for effect in effects:
        low, high = effect.ci95
        assert low <= effect.delta <= high
        assert effect.delta > 0 or not (effect.significant and low > 0)


def test_an_interrupted_sweep_keeps_what_was_measured_before(demo, monkeypatch, tmp_path):
    done = []

    def interrupted(*given):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return sweep(*given)

    monkeypatch.setattr("attnlens.runs.swap.kernel_run.sweep", interrupted)
    with pytest.raises(Interrupted) as stop:
        swap_kernel(demo, ["rbf", "linear"], sweep="layers", **READ)
    swept, left = stop.value.report.swaps
    assert (len(swept.sweep), len(left.sweep)) == (4, 0)
    assert left.loss is not None
    assert "interrupted" in left.notes[-1]
    folder = tmp_path / "fitted"
    with pytest.raises(Interrupted) as stop:
        swap_kernel(demo, "rbf", sweep="layers", fit=True, save=folder, **READ)
    assert stop.value.report.swap.stages[-1].name == "fitted"
    assert (folder / "attnlens.json").is_file()


def test_the_own_kernel_has_no_effect_anywhere(demo):
    effects = swap_kernel(demo, "exponential", sweep="heads", **READ).swap.sweep
    assert max(abs(effect.delta) for effect in effects) < 1e-5
    for effect in effects:
        assert effect.ci95[0] <= 1e-6
        assert effect.ci95[1] >= -1e-6


def test_one_sequence_has_no_p_value(demo):
    effects = swap_kernel(demo, "rbf", sweep="layers", windows=1, length=16, **BARE).swap.sweep
    assert all(effect.p_value is None and not effect.significant for effect in effects)
    assert all(effect.delta is not None for effect in effects)


def test_a_diverged_unit_comes_first_and_is_not_marked(demo, monkeypatch):
    honest = room._losses

    def one_diverges(own, new, fed, task):
        found = honest(own, new, fed, task)
        return found * float("nan") if new is not own and one_diverges.calls() == 2 else found

    count = iter(range(10**6))
    one_diverges.calls = lambda: next(count)
    monkeypatch.setattr(room, "_losses", one_diverges)
    effects = swap_kernel(demo, "rbf", sweep="layers", windows=2, length=16, **BARE).swap.sweep
    assert effects[0].delta is None
    assert effects[0].layer == 2
    assert effects[0].ci95 is None
    assert not effects[0].significant
    assert all(effect.delta is not None for effect in effects[1:])


def test_each_head_is_swapped_with_its_own_fitted_parameters(demo, monkeypatch):
    seen = {}
    honest = hooks.replace

    def watching(model, sites, swaps, *rest, **more):
        for site, swap in swaps.items():
            if len(swaps) == 1 and swap.heads is not None and len(swap.heads) == 1:
                seen[site.layer, swap.heads[0]] = swap.kernel.fitted["origin"]
            elif len(swaps) > 1 and swap.kernel.fitted:
                whole[site.layer] = (swap.heads, swap.kernel.fitted["origin"])
        return honest(model, sites, swaps, *rest, **more)

    whole = {}
    monkeypatch.setattr(hooks, "replace", watching)
    swap_kernel(demo, "rbf", heads=[5, 1], sweep="heads", fit=True, **READ)
    assert sorted(seen) == [(layer, head) for layer in range(4) for head in (1, 5)]
    for (layer, head), origin in seen.items():
        heads, fitted = whole[layer]
        assert origin.shape == (1, 16)
        assert torch.equal(origin[0], fitted[heads.index(head)])
    assert not torch.allclose(seen[0, 1], seen[0, 5], atol=1e-3)


def test_a_sweep_of_a_fitted_kernel_is_that_of_a_separate_swap(demo):
    """The fit sees the original model's queries and keys, so that it is the same for one head and for all."""
    effects = swap_kernel(demo, "rbf", sweep="heads", layers=[1, 2], fit=True, **READ).swap.sweep
    for effect in effects[::5]:
        alone = swap_kernel(demo, "rbf", layers=[effect.layer], heads=[effect.head], fit=True, **READ).swap
        assert effect.delta == pytest.approx(alone.stages[-1].loss.delta, abs=1e-6)
        assert alone.stages[-1].name == "fitted"


def test_the_interval_is_the_paired_bootstrap_of_the_sequences(demo):
    """Naively: the loss of each sequence of eight alone, with and without."""
    effect = swap_kernel(demo, "rbf", sweep="layers", layers=[2], windows=8, length=16, **BARE).swap.sweep[0]
    rows = torch.cat(
        [b.inputs["input_ids"] for b in texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8))]
    )
    sites = sites_of(demo.model, {"input_ids": rows[:1]})
    losses = [[], []]
    for row in rows:
        for store, swaps in zip(losses, ({}, {sites[2]: hooks.Replacement(parsed("rbf"))}), strict=True):
            with torch.no_grad(), hooks.replace(demo.model, sites, swaps):
                store.append(demo.model(input_ids=row[None], labels=row[None]).loss.double())
    expected = paired_difference(*(torch.stack(found) for found in losses))
    assert (effect.delta, *effect.ci95) == pytest.approx(expected, abs=1e-5)
