"""Tests that a hybrid is the model's own kernel within its window and a kernel of features beyond."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from views import summary

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend, route, sums, weights
from attnlens.kernels.products import LearnedStart
from attnlens.kernels.spelling import HeadShape, branches, state_numbers
from attnlens.models import hooks, loading
from attnlens.models.texts import placeholder
from attnlens.records import Call, Swap
from attnlens.report.sections.reference import explanation
from attnlens.runs.swap.fit import NearShares, expand_parameters
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped
from attnlens.runs.swap.sites import SwapSetup

HEADS, DIM = 2, 4
OWN = parsed("exponential")


def drawn(tokens: int, *, heads: int = HEADS, seed: int = 0, size: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (2, heads, tokens, DIM)
    query, key, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    return size * query, size * key, value


def hybrid(width: int, far: str = "learned-features:6", *, sinks: int = 0) -> Kernel:
    """With maps and weights of the near part as if trained."""
    near = f"sink-hybrid:{sinks},{width}" if sinks else f"hybrid:{width}"
    kernel, draw = parsed(f"{far}+{near}"), torch.Generator().manual_seed(5)
    sizes = {"query_weight": (HEADS, 3, DIM), "key_weight": (HEADS, 3, DIM)} if "learned" in far else {}
    sizes = {**sizes, "near_log_weight": (HEADS,)}
    return kernel.with_fitted({name: torch.randn(size, generator=draw).double() for name, size in sizes.items()})


def product(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def feature(x: list[float], weight: list[list[float]], scale: float) -> list[float]:
    found = []
    for sign in (1, -1):
        powers = [math.exp(sign * sum(w * a * math.sqrt(scale) for w, a in zip(row, x, strict=True))) for row in weight]
        found += [power / sum(powers) for power in powers]
    return found


def by_loops(call: Call, kernel: Kernel, seen: Tensor) -> Tensor:
    """Every weight by itself, from the formula alone."""
    assert kernel.near is not None
    width, sinks = kernel.near.parameters["width"], kernel.near.parameters.get("sinks", 0)
    query, key, value = (x.tolist() for x in (call.query, call.key, call.value))
    found = torch.zeros(call.query.shape, dtype=torch.float64)
    for batch, head, i in torch.cartesian_prod(*map(torch.arange, call.query.shape[:3])).tolist():
        keys = [j for j in range(len(key[batch][head])) if bool(seen[batch, i, j])]
        begin = min((j for j in range(len(key[batch][head])) if bool(seen[batch, :, j].any())), default=0)
        near = {j for j in keys if abs(i - j) < width or j - begin < sinks}
        scores = {j: call.scale * product(query[batch][head][i], key[batch][head][j]) for j in keys}
        largest = max((scores[j] for j in near), default=0.0)
        gamma = math.exp(float(kernel.fitted["near_log_weight"][head]))
        maps = [kernel.fitted[name][head].tolist() for name in ("query_weight", "key_weight")]
        mass = {}
        for j in keys:
            far = product(
                feature(query[batch][head][i], maps[0], call.scale), feature(key[batch][head][j], maps[1], call.scale)
            )
            mass[j] = gamma * math.exp(scores[j] - largest) if j in near else far
        for d in range(DIM if keys else 0):
            found[batch, head, i, d] = sum(mass[j] * value[batch][head][j][d] for j in keys) / sum(mass.values())
    return found.transpose(1, 2)


@settings(deadline=None, max_examples=60)
@example(tokens=7, width=1, sinks=6, causal=False, padding=0, chunk=2)  # first tokens behind the chunks that are met
@given(st.integers(1, 11), st.integers(1, 13), st.integers(0, 7), st.booleans(), st.integers(-6, 6), st.integers(1, 5))
def test_a_hybrid_is_its_formula_weight_by_weight(
    tokens: int, width: int, sinks: int, causal: bool, padding: int, chunk: int
) -> None:
    """Padding on the left where positive, else on the right, of the second sequence."""
    query, key, value = drawn(tokens, seed=tokens)
    seen = torch.ones(2, tokens, tokens, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen[1, :, : max(0, padding)] = False
    seen[1, :, max(1, tokens + min(0, padding)) :] = False
    found, kernel = Call(query, key, value, 0.6, seen[:, None]), hybrid(width, sinks=sinks)
    expected, rows = by_loops(found, kernel, seen), seen.any(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "CHUNK", chunk)
        for path in ("auto", "eager"):
            torch.testing.assert_close(attend(found, kernel, path)[rows], expected[rows], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_where_nothing_is_far_it_is_the_model_itself(causal: bool) -> None:
    """Whatever γ is: in the first w rows of a causal head, and everywhere with w ≥ T."""
    found = Call(*drawn(150), 0.6, causal=causal)
    own, some, all_near = (attend(found, kernel) for kernel in (OWN, hybrid(40), hybrid(150)))
    assert route(found, hybrid(40)) == "window and running sums"
    torch.testing.assert_close(all_near, own, rtol=0, atol=1e-13)
    if causal:
        torch.testing.assert_close(some[:, :40], own[:, :40], rtol=0, atol=1e-13)
    assert (some[:, 41:109] - own[:, 41:109]).abs().amax((0, 2, 3)).min() > 1e-3, "the control: beyond it is not"


def test_with_softcap_bias_or_sinks_it_still_is_where_nothing_is_far() -> None:
    distance = (torch.arange(60)[:, None] - torch.arange(60)).abs().double()
    sinks = torch.tensor([2.0, -1.0], dtype=torch.float64)
    plain = Call(*drawn(60), 0.6, causal=True)
    neutral = hybrid(20).with_fitted(hybrid(20).own_fitted | {"near_log_weight": torch.zeros(HEADS)})
    for found in (
        replace(plain, softcap=1.5),
        replace(plain, bias=-distance[None, None] / 9),
        replace(plain, sinks=sinks),
    ):
        own = attend(found, OWN)
        torch.testing.assert_close(attend(found, neutral)[:, :20], own[:, :20], rtol=0, atol=1e-13)
        assert (own - attend(plain, OWN)).abs().max() > 0.01, "the control: it changes the model"


@pytest.mark.parametrize("width", [1, 9, 64, 200])
@pytest.mark.parametrize(("size", "sinks"), [(1.5, 0), (60.0, 0), (60.0, 5)])
def test_gradients_are_finite_and_those_of_the_written_out_rows(width: int, size: float, sinks: int) -> None:
    """With scores of thousands too, in parameters as in queries, keys and values; no far key gives no NaN."""
    found = []
    for path in ("auto", "eager"):
        leaves = [x.requires_grad_() for x in drawn(150, size=size)]
        kernel = hybrid(width, sinks=sinks)
        parts = {name: part.requires_grad_() for name, part in kernel.fitted.items()}
        attend(Call(*leaves, 0.6, causal=True), kernel.with_fitted(parts), path).square().sum().backward()
        found.append([x.grad for x in (*leaves, *parts.values())])
    for fast, written in zip(*found, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, written, rtol=1e-8, atol=1e-8)
    far = found[0][3].abs().max()
    assert (far > 0) == (width < 150), "maps of the far part have a gradient where there is one"


def test_first_tokens_keep_the_model_s_own_weights_among_near_keys() -> None:
    """Far features of nothing leave a sink-window; left padding moves what is first, and takes the written-out rows."""
    found = Call(*drawn(150), 0.6, causal=True)
    kernel = hybrid(20, sinks=4)
    assert route(found, kernel) == "window and running sums"
    loud = kernel.with_fitted(kernel.own_fitted | {"near_log_weight": torch.full((HEADS,), 60.0)})
    expected = attend(found, parsed("sink-window:4,20"))
    torch.testing.assert_close(attend(found, loud), expected, rtol=0, atol=1e-12)
    assert (attend(found, parsed("window:20")) - expected).abs().max() > 0.01, "the control: without first tokens"
    allowed = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    allowed[1, ..., :3] = False
    padded = replace(found, allowed=allowed, causal=False)
    assert route(padded, kernel) == "row tiles"
    later = Call(found.query[1:, :, 3:], found.key[1:, :, 3:], found.value[1:, :, 3:], 0.6, causal=True)
    torch.testing.assert_close(attend(padded, kernel)[1:, 3:], attend(later, kernel), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_as_near_as_its_digits_and_never_overflows(dtype: torch.dtype) -> None:
    exact = Call(*drawn(150), 0.6, causal=True)
    narrow = replace(exact, query=exact.query.to(dtype), key=exact.key.to(dtype), value=exact.value.to(dtype))
    expected = attend(exact, hybrid(20))
    for path in ("auto", "eager"):
        found = attend(narrow, hybrid(20), path)
        assert found.dtype == dtype
        assert (found.double() - expected).norm() / expected.norm() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
        huge = replace(narrow, query=1e3 * narrow.query, key=1e3 * narrow.key)
        assert attend(huge, hybrid(20), path).isfinite().all()


def test_a_cached_step_is_the_last_row_and_cross_attention_is_refused() -> None:
    found = Call(*drawn(80), 0.6, causal=True)
    step = replace(found, query=found.query[:, :, -1:], causal=False)
    torch.testing.assert_close(attend(step, hybrid(9))[:, 0], attend(found, hybrid(9))[:, -1])
    with pytest.raises(UsageError, match="another sequence"):
        attend(replace(step, cross=True), hybrid(9))
    assert attend(replace(step, cross=True), branches(hybrid(9))[1]).isfinite().all()


def test_rows_are_probabilities_and_grouped_keys_are_those_repeated() -> None:
    query, key, value = drawn(70)
    grouped = Call(query, key[:, :1], value[:, :1], 0.6, causal=True)
    found = weights(grouped, hybrid(9))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, HEADS, 70, dtype=torch.float64))
    repeated = Call(query, key[:, [0, 0]], value[:, [0, 0]], 0.6, causal=True)
    torch.testing.assert_close(attend(grouped, hybrid(9)), attend(repeated, hybrid(9)))


def test_it_keeps_sums_and_its_window_and_has_two_branches() -> None:
    shape = HeadShape(heads=HEADS, head_dim=DIM, value_dim=DIM, tokens=128, causal=True)
    assert state_numbers(hybrid(9), shape) == 6 * (DIM + 1) + 9 * 2 * DIM
    assert state_numbers(hybrid(9), replace(shape, causal=False)) == 6 * (DIM + 1) + 17 * 2 * DIM
    assert state_numbers(hybrid(9, sinks=4), shape) == 6 * (DIM + 1) + 13 * 2 * DIM
    assert branches(hybrid(9, sinks=4))[0].spelling == "sink-window:4,9"
    near, far = branches(hybrid(9))
    assert (near.spelling, far.spelling) == ("window:9", "learned-features:count=6")
    assert set(far.fitted) == {"query_weight", "key_weight"}
    assert parsed("elu+hybrid:9").trainable == ("near_log_weight",)


@pytest.mark.parametrize("far", ["learned-features:6", "elu"])
@pytest.mark.parametrize(("sinks", "sink_logits"), [(0, None), (3, None), (0, [4.0, 5.0])])
def test_the_fitted_weight_of_near_keys_has_the_least_divergence_of_all(
    far: str, sinks: int, sink_logits: list[float] | None
) -> None:
    """Σ KL(own ‖ hybrid) over rows, computed densely at many γ, is nowhere lower; at γ = 1 it is higher.

    What the model's own sink takes is one more outcome of a row.
    """
    sink = None if sink_logits is None else torch.tensor(sink_logits, dtype=torch.float64)
    found = Call(*drawn(70, size=1.0), 0.6, causal=True, sinks=sink)
    kernel = hybrid(9, far, sinks=sinks)
    kernel = kernel.with_fitted(kernel.fitted | {"near_log_weight": torch.zeros(HEADS).double()})
    fitting = NearShares(kernel)
    for part in (0, 1):
        one = (x[part : part + 1] for x in (found.query, found.key, found.value))
        fitting.update(Call(*one, 0.6, causal=True, sinks=sink))
    best = fitting.best()["near_log_weight"]

    def outcomes(of: Kernel) -> Tensor:
        rows = weights(found, of)
        return torch.cat([rows, 1 - rows.sum(-1, keepdim=True)], -1) if sink is not None else rows

    own = outcomes(OWN)

    def divergence(log_weight: Tensor) -> Tensor:
        new = outcomes(kernel.with_fitted(kernel.fitted | {"near_log_weight": log_weight}))
        return torch.where(own > 0, own * (own / new).log(), 0.0).sum((0, 2, 3))

    least = divergence(best)
    for away in (-3.0, -0.3, -0.01, 0.01, 0.3, 3.0):
        assert (divergence(best + away) > least).all()
    assert (best.abs() > 0.05).all()
    assert (divergence(torch.zeros(HEADS).double()) > least).all(), "the control: γ = 1"


def test_without_far_keys_there_is_no_weight_to_fit() -> None:
    kernel = hybrid(70).with_fitted(hybrid(70).own_fitted | {"near_log_weight": torch.zeros(HEADS).double()})
    fitting = NearShares(kernel)
    fitting.update(Call(*drawn(70), 0.6, causal=True))
    assert fitting.best()["near_log_weight"].tolist() == [0.0, 0.0]


# --- on a trained model -----------------------------------------------------------------------------------------------

ASKED = {"windows": 8, "length": 64, "layers": [1, 2], "train": 14}


@pytest.fixture(scope="module")
def demo() -> loading.Loaded:
    return loading.load("demo")


@pytest.fixture(scope="module")
def healed(demo: loading.Loaded, tmp_path_factory: pytest.TempPathFactory) -> tuple[Swap, Path]:
    folder = tmp_path_factory.mktemp("hybrid") / "saved"
    return attnlens.heal(demo, "learned-features:16+hybrid:16", generate=4, save=folder, **ASKED).swap, folder


def test_attention_transfer_brings_learned_features_nearer(demo: loading.Loaded) -> None:
    """A third of the distance at least is gone after fourteen steps: untrained maps of a random start are worse."""
    swap = attnlens.heal(demo, "learned-features:16", generate=0, controls=False, **ASKED).swap
    before, after = swap.stages[0].kl, swap.stages[-1].kl
    assert [stage.name for stage in swap.stages] == ["swapped", "healed"]
    assert before is not None
    assert after is not None
    assert after < 0.67 * before
    assert swap.fitted == ["key_weight", "query_weight"]
    assert not any("random" in note for note in swap.notes)


def test_errors_and_the_page_have_an_example_to_type() -> None:
    with pytest.raises(UsageError, match="Write, for example, sink-hybrid:4,64;"):
        parsed("elu+sink-hybrid:4")
    with pytest.raises(UsageError, match=r"learned-features, as in elu\+hybrid:8"):
        parsed("hybrid:8")
    with pytest.raises(UsageError, match=r"learned-features\.$"):
        parsed("rbf+hybrid:8")
    for name, words in (("hybrid", "elu+hybrid:64"), ("sink-hybrid", "elu+sink-hybrid:4,64")):
        page = dict(explanation(name).items)
        assert page["command"] == f"swap-kernel --kernel {words} --fit"
        assert parsed(words).near is not None
        assert all(parsed(f"{far}+hybrid:8").near for far in page["kernels"].split(", "))


def test_what_no_text_was_read_for_is_not_called_fitted(demo: loading.Loaded) -> None:
    """The maps of learned features are random until they are trained; γ of their hybrid is fitted to text."""
    asked = {"windows": 2, "length": 32, "layers": [1], "generate": 0, "controls": False}
    report = swap_kernel(demo, "learned-features:16", **asked)
    random = "The maps of learned-features are random until `attnlens heal` trains them."
    assert report.swap.fitted == []
    assert random in report.swap.notes
    assert report.settings.calibration is None
    assert "fitted" not in summary(report)
    mixed = swap_kernel(demo, ["learned-features:16+hybrid:8", "elu+hybrid:8"], fit=True, **asked)
    assert [swap.fitted for swap in mixed.swaps] == [["near_log_weight"], ["near_log_weight"]]
    assert [random in swap.notes for swap in mixed.swaps] == [True, False]
    assert summary(mixed).count("fitted per head: γ") == 2
    bare = swap_kernel(demo, "elu+hybrid:8", **asked)
    assert "γ, the weight of near keys, is 1 in every head; --fit estimates it." in bare.swap.notes
    assert not any("--fit" in note for swap in mixed.swaps for note in swap.notes)


def test_a_healed_hybrid_stands_beside_its_branches(healed: tuple[Swap, Path]) -> None:
    swap, _ = healed
    found = {control.role: control for control in swap.controls}
    assert found["filter alone"].kernel == "window:16"
    assert found["without filter"].kernel == found["far part, healed"].kernel == "learned-features:count=16"
    for role in ("filter alone", "without filter", "far part, healed"):
        assert found[role].loss.delta > swap.loss.delta
    # for all keys it need not be nearer: it was trained for those beyond the window
    assert found["far part, healed"].kl != found["without filter"].kl, "its maps were trained"
    assert swap.fitted == ["key_weight", "near_log_weight", "query_weight"]
    assert swap.state == 16 * 17 + 16 * 32
    assert swap.agreement is not None, "greedy continuations run with a key-value cache"
    assert swap.mask_error in (None, 0.0)
    assert swap.causality_error == 0.0


def test_a_saved_hybrid_comes_back_and_is_the_healed_model_itself_within_its_window(healed: tuple[Swap, Path]) -> None:
    swap, folder = healed
    ids = torch.arange(40)[None] + 5
    back = load_swapped(folder)
    with torch.no_grad():
        first = back.model(ids).logits
        back.close()
        own = back.model(ids).logits
    assert back.kernel == swap.kernel
    torch.testing.assert_close(first[:, :16], own[:, :16], rtol=1e-4, atol=1e-4)
    assert (first - own)[:, 17:].abs().amax((0, 2)).min() > 1e-3, "the kernel was in its place"


def test_elu_gets_a_weight_of_near_keys_to_train(demo: loading.Loaded) -> None:
    text = placeholder(demo, 2, seed=0).batches
    sites = tuple(found.site for found in hooks.survey(demo.model, text[0].inputs))
    bare = {sites[1]: hooks.Replacement(parsed("elu+hybrid:16"), (0, 3))}
    found = expand_parameters(SwapSetup(demo, sites, bare), text)[sites[1]].kernel
    assert {name: part.tolist() for name, part in found.fitted.items()} == {"near_log_weight": [0.0, 0.0]}
    assert found.trainable == ("near_log_weight",)


def test_a_start_reads_shapes_alone() -> None:
    start = LearnedStart(6)
    start.update(Call(*drawn(3), 0.6))
    first = start.solve()
    start.update(Call(*drawn(5, seed=9), 0.6))
    assert all(torch.equal(part, first[name]) for name, part in start.solve().items())
    assert first["query_weight"].shape == (HEADS, 3, DIM)
    gram = first["query_weight"][0] @ first["query_weight"][0].mT
    torch.testing.assert_close(gram, gram.diagonal().diag())
