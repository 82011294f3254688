"""Tests that a hybrid is the model's own kernel within its window and a kernel of features beyond."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_calls import dense
from heads import random
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loaded import BARE, sites_of
from views import summary

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import OWN, parsed
from attnlens.kernels.attention import attend, route, sums, weights
from attnlens.kernels.spelling import HeadShape, branches, state_numbers
from attnlens.models import hooks
from attnlens.models.texts import placeholder
from attnlens.records import Call
from attnlens.report.sections.reference import explanation
from attnlens.runs.swap.fit import NearShares, expand_parameters
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped
from attnlens.runs.swap.sites import SwapSetup

HEADS, DIM = 2, 4


def drawn(tokens, *, seed=0, size=1.5):
    query, key, value = random(3, 2, HEADS, tokens, DIM, seed=seed)
    return size * query, size * key, value


def causal(tokens, **more):
    return Call(*drawn(tokens), 0.6, causal=True, **more)


def hybrid(width, far="learned-features:6", *, sinks=0, gamma=None):
    """With maps and weights of the near part as if trained, or with γ = e^gamma."""
    kernel = parsed(f"{far}+sink-hybrid:{sinks},{width}" if sinks else f"{far}+hybrid:{width}")
    maps = zip(("query_weight", "key_weight"), random(2, HEADS, 3, DIM, seed=5), strict=True)
    near = random(HEADS, seed=6) if gamma is None else torch.zeros(HEADS).double() + gamma
    return kernel.with_fitted({**(dict(maps) if "learned" in far else {}), "near_log_weight": near})


@settings(deadline=None, max_examples=50)
@example(tokens=7, width=1, sinks=6, causal=False, padding=0, chunk=2)  # first tokens behind the chunks that are read
@given(st.integers(1, 11), st.integers(1, 13), st.integers(0, 7), st.booleans(), st.integers(-6, 6), st.integers(1, 5))
def test_a_hybrid_is_its_formula_weight_by_weight(tokens, width, sinks, causal, padding, chunk):
    """Padding of the second sequence on the left if positive, else on the right."""
    seen = torch.ones(2, tokens, tokens, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen[1, :, : max(0, padding)] = False
    seen[1, :, max(1, tokens + min(0, padding)) :] = False
    call, kernel = Call(*drawn(tokens, seed=tokens), 0.6, seen[:, None]), hybrid(width, sinks=sinks)
    expected, real = dense(call, kernel), seen.any(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "CHUNK", chunk)
        for path in ("auto", "eager"):
            torch.testing.assert_close(attend(call, kernel, path)[real], expected[real], rtol=1e-10, atol=1e-12)


def test_where_nothing_is_far_it_is_the_model_itself():
    """Whatever γ is: in the first w rows of a causal head, and everywhere with w ≥ T."""
    same = partial(torch.testing.assert_close, rtol=0, atol=1e-13)
    for call in (causal(150), Call(*drawn(150), 0.6)):
        own, some, all_near = (attend(call, kernel) for kernel in (OWN, hybrid(40), hybrid(150)))
        assert route(call, hybrid(40)) == "window and running sums"
        same(all_near, own)
        if call.causal:
            same(some[:, :40], own[:, :40])
        assert (some[:, 41:109] - own[:, 41:109]).abs().amax((0, 2, 3)).min() > 1e-3, "the control: beyond it is not"
    distance = (torch.arange(60)[:, None] - torch.arange(60)).abs().double()[None, None]
    for more in ({"softcap": 1.5}, {"bias": -distance / 9}, {"sinks": torch.tensor([2.0, -1.0]).double()}):
        own = attend(causal(60, **more), OWN)
        same(attend(causal(60, **more), hybrid(20, gamma=0))[:, :20], own[:, :20])
        assert (own - attend(causal(60), OWN)).abs().max() > 0.01, "the control: it changes the model"


@pytest.mark.parametrize(("size", "sinks"), [(1.5, 0), (60.0, 5), (60.0, 0)])
@pytest.mark.parametrize("width", [1, 9, 64, 200])
def test_gradients_are_finite_and_those_of_the_written_out_rows(width, size, sinks):
    """With scores of thousands too, in parameters as in queries, keys and values; no far key gives no NaN."""
    gradients = []
    for path in ("auto", "eager"):
        leaves = [x.requires_grad_() for x in drawn(150, size=size)]
        kernel = hybrid(width, sinks=sinks)
        parts = {name: part.requires_grad_() for name, part in kernel.fitted.items()}
        attend(Call(*leaves, 0.6, causal=True), kernel.with_fitted(parts), path).square().sum().backward()
        gradients.append([x.grad for x in (*leaves, *parts.values())])
    for fast, written in zip(*gradients, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, written, rtol=1e-8, atol=1e-8)
    assert (gradients[0][3].abs().max() > 0) == (width < 150), "maps of the far part have a gradient if there is one"


def test_first_tokens_have_the_weights_of_near_keys():
    """A loud near part leaves a sink-window; left padding moves the first tokens, and takes the written-out rows."""
    call, kernel = causal(150), hybrid(20, sinks=4)
    assert route(call, kernel) == "window and running sums"
    expected = attend(call, parsed("sink-window:4,20"))
    torch.testing.assert_close(attend(call, hybrid(20, sinks=4, gamma=60)), expected, rtol=0, atol=1e-12)
    assert (attend(call, parsed("window:20")) - expected).abs().max() > 0.01, "the control: without first tokens"
    allowed = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    allowed[1, ..., :3] = False
    padded = replace(call, allowed=allowed, causal=False)
    assert route(padded, kernel) == "row tiles"
    later = Call(*(x[1:, :, 3:] for x in (call.query, call.key, call.value)), 0.6, causal=True)
    torch.testing.assert_close(attend(padded, kernel)[1:, 3:], attend(later, kernel), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_lower_precision_is_as_near_as_its_digits_and_never_overflows(dtype, limit):
    narrow, expected = Call(*(x.to(dtype) for x in drawn(150)), 0.6, causal=True), attend(causal(150), hybrid(20))
    huge = replace(narrow, query=1e3 * narrow.query, key=1e3 * narrow.key)
    for path in ("auto", "eager"):
        output = attend(narrow, hybrid(20), path)
        assert output.dtype == dtype
        assert (output.double() - expected).norm() / expected.norm() < limit
        assert attend(huge, hybrid(20), path).isfinite().all()


def test_caches_cross_attention_and_grouped_keys():
    call = causal(80)
    step = replace(call, query=call.query[:, :, -1:], causal=False)
    torch.testing.assert_close(attend(step, hybrid(9))[:, 0], attend(call, hybrid(9))[:, -1])
    with pytest.raises(UsageError, match="another sequence"):
        attend(replace(step, cross=True), hybrid(9))
    assert attend(replace(step, cross=True), branches(hybrid(9))[1]).isfinite().all()
    grouped, repeated = (replace(call, key=call.key[:, at], value=call.value[:, at]) for at in ([0], [0, 0]))
    matrix = weights(grouped, hybrid(9))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, HEADS, 80, dtype=torch.float64))
    torch.testing.assert_close(attend(grouped, hybrid(9)), attend(repeated, hybrid(9)))


def test_state_is_sums_and_the_window_and_branches_are_both_parts():
    shape = HeadShape(heads=HEADS, head_dim=DIM, value_dim=DIM, tokens=128, causal=True)
    assert state_numbers(hybrid(9), shape) == 6 * (DIM + 1) + 9 * 2 * DIM
    assert state_numbers(hybrid(9), replace(shape, causal=False)) == 6 * (DIM + 1) + 17 * 2 * DIM
    assert state_numbers(hybrid(9, sinks=4), shape) == 6 * (DIM + 1) + 13 * 2 * DIM
    assert branches(hybrid(9, sinks=4))[0].spelling == "sink-window:4,9"
    near, far = branches(hybrid(9))
    assert (near.spelling, far.spelling) == ("window:9", "learned-features:count=6")
    assert set(far.fitted) == {"query_weight", "key_weight"}
    assert parsed("elu+hybrid:9").trainable == ("near_log_weight",)
    for name, words in (("hybrid", "elu+hybrid:64"), ("sink-hybrid", "elu+sink-hybrid:4,64")):
        page = dict(explanation(name).items)
        assert page["command"] == f"swap-kernel --kernel {words} --fit"
        assert parsed(words).near is not None
        assert all(parsed(f"{kernel}+hybrid:8").near for kernel in page["kernels"].split(", "))


@pytest.mark.parametrize("far", ["learned-features:6", "elu"])
@pytest.mark.parametrize(("sinks", "sink"), [(0, None), (3, None), (0, torch.tensor([4.0, 5.0], dtype=torch.float64))])
def test_the_fitted_weight_of_near_keys_has_the_least_divergence_of_all(far, sinks, sink):
    """Σ KL(own ‖ hybrid) over rows, computed densely at many γ, is nowhere lower; at γ = 1 it is higher.

    What the model's own sink takes is one more outcome of a row.
    """
    call = Call(*drawn(70, size=1.0), 0.6, causal=True, sinks=sink)
    fitting = NearShares(hybrid(9, far, sinks=sinks, gamma=0))
    for at in ([0], [1]):
        fitting.update(replace(call, query=call.query[at], key=call.key[at], value=call.value[at]))
    best = fitting.best()["near_log_weight"]

    def outcomes(kernel):
        matrix = weights(call, kernel)
        return matrix if sink is None else torch.cat([matrix, 1 - matrix.sum(-1, keepdim=True)], -1)

    def divergence(log_weight):
        new = outcomes(hybrid(9, far, sinks=sinks, gamma=log_weight))
        return torch.where(own > 0, own * (own / new).log(), 0.0).sum((0, 2, 3))

    own = outcomes(OWN)
    for away in (-3.0, -0.3, -0.01, 0.01, 0.3, 3.0):
        assert (divergence(best + away) > divergence(best)).all()
    assert (best.abs() > 0.05).all()
    assert (divergence(0 * best) > divergence(best)).all(), "the control: γ = 1"
    nothing_far = NearShares(hybrid(70, far, gamma=0))
    nothing_far.update(causal(70))
    assert nothing_far.best()["near_log_weight"].tolist() == [0.0, 0.0]


OPTIONS = {"windows": 4, "length": 40, "layers": [1, 2], "train": 8}


def test_healing_brings_learned_features_nearer(demo):
    """A third of the distance at least is gone after eight steps: untrained maps of a random start are worse."""
    swap = attnlens.heal(demo, "learned-features:16", **BARE, **OPTIONS).swap
    assert [stage.name for stage in swap.stages] == ["swapped", "healed"]
    assert swap.stages[-1].kl < 0.67 * swap.stages[0].kl
    assert swap.fitted == ["key_weight", "query_weight"]
    assert not any("random" in note for note in swap.notes)


def test_only_parameters_fitted_to_text_are_called_fitted(demo):
    """The maps of learned features are random until they are trained; γ of their hybrid is fitted to text."""
    options = {"windows": 2, "length": 32, "layers": [1]} | BARE
    report = swap_kernel(demo, "learned-features:16", **options)
    random = "The maps of learned-features are random until `attnlens heal` trains them."
    assert (report.swap.fitted, report.settings.calibration) == ([], None)
    assert random in report.swap.notes
    assert "fitted" not in summary(report)
    mixed = swap_kernel(demo, ["learned-features:16+hybrid:8", "elu+hybrid:8"], fit=True, **options)
    assert [swap.fitted for swap in mixed.swaps] == [["near_log_weight"], ["near_log_weight"]]
    assert [random in swap.notes for swap in mixed.swaps] == [True, False]
    assert summary(mixed).count("fitted per head: γ") == 2
    bare = swap_kernel(demo, "elu+hybrid:8", **options)
    assert "γ, the weight of near keys, is 1 in every head; --fit estimates it." in bare.swap.notes
    assert not any("--fit" in note for swap in mixed.swaps for note in swap.notes)


def test_a_healed_hybrid_is_reported_with_its_branches_and_comes_back_from_its_folder(demo, tmp_path):
    swap = attnlens.heal(demo, "learned-features:16+hybrid:16", generate=4, save=tmp_path / "saved", **OPTIONS).swap
    controls = {control.role: control for control in swap.controls}
    assert controls["filter alone"].kernel == "window:16"
    assert controls["without filter"].kernel == controls["far part, healed"].kernel == "learned-features:count=16"
    for role in ("filter alone", "without filter", "far part, healed"):
        assert controls[role].loss.delta > swap.loss.delta
    # for all keys it need not be nearer: it was trained for those beyond the window
    assert controls["far part, healed"].kl != controls["without filter"].kl, "its maps were trained"
    assert (swap.fitted, swap.state) == (["key_weight", "near_log_weight", "query_weight"], 16 * 17 + 16 * 32)
    assert swap.agreement is not None, "greedy continuations run with a key-value cache"
    assert (swap.mask_error or 0.0, swap.causality_error) == (0.0, 0.0)
    ids = torch.arange(40)[None] + 5
    back = load_swapped(tmp_path / "saved")
    with torch.no_grad():
        new = back.model(ids).logits
        back.close()
        own = back.model(ids).logits
    assert back.kernel == swap.kernel
    torch.testing.assert_close(new[:, :16], own[:, :16], rtol=1e-4, atol=1e-4)
    assert (new - own)[:, 17:].abs().amax((0, 2)).min() > 1e-3, "the kernel was in its place"


def test_elu_gets_a_trainable_weight_of_near_keys(demo):
    batches = placeholder(demo, 2, seed=0).batches
    sites = sites_of(demo.model, batches[0].inputs)
    bare = {sites[1]: hooks.Replacement(parsed("elu+hybrid:16"), (0, 3))}
    kernel = expand_parameters(SwapSetup(demo, sites, bare), batches)[sites[1]].kernel
    assert {name: part.tolist() for name, part in kernel.fitted.items()} == {"near_log_weight": [0.0, 0.0]}
    assert kernel.trainable == ("near_log_weight",)
