"""Tests that attention by every route is softmax(log k + mask) v as computed naively in float64."""

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from attention_calls import CASES, DIM, HEADS, apart, bias, call, right_padded, sliding, tril
from program import python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens.errors import UsageError
from attnlens.kernels import Kernel, attention, kernels, parsed
from attnlens.kernels.attention import attend, route, rows, scores, weights
from attnlens.records import Call

SPELLINGS = ["polynomial:degree=4,offset=1", "taylor:3", "rbf:gamma=1", "random-features:count=12"]


def every_kernel() -> list[Kernel]:
    """Each registered kernel with defaults, some with other numbers, and some with a tie or filter."""
    spelled = [name for name, info in kernels().items() if not info.needs_fit]
    found = [parsed(words, allow_signed=True) for words in [*spelled, *SPELLINGS]]
    return [*found, *(fitted(parsed(words)) for words in ("rank:3", "rbf", "learned-features:6"))]


def fitted(kernel: Kernel) -> Kernel:
    """With what its fit would find per head, drawn at random."""
    draw = torch.Generator().manual_seed(3)
    numbers = {
        "rank": {"query_map": (HEADS, DIM, 3), "key_map": (HEADS, DIM, 3)},
        "rbf": {"origin": (HEADS, DIM)},
        "learned-features": {"query_weight": (HEADS, 3, DIM), "key_weight": (HEADS, 3, DIM)},
        "elu": {},
    }[kernel.info.name]
    numbers |= {} if kernel.near is None else {"near_log_weight": (HEADS,)}
    return kernel.with_fitted({name: torch.randn(size, generator=draw).double() for name, size in numbers.items()})


KERNELS = every_kernel()
NAMES = [kernel.spelling + (" fitted" if kernel.fitted else "") for kernel in KERNELS]
COMBINED = [
    parsed(words, allow_signed=True)
    for words in (
        "window:9",
        "rbf+window:40",
        "linear+window:9",
        "sink-window:3,9",
        "strided:8",
        "symmetric",
        "rbf+symmetric",
        "rbf+tied-key",
        "elu+tied-query",
        "hard+strided:8",
        "elu+hybrid:9",
    )
]
COMBINED.append(fitted(parsed("learned-features:6+hybrid:40")))


def dense(found: Call, kernel: Kernel) -> Tensor:
    """In float64, all at once: Σ_j k_j exp(b_j) v_j / Σ_j k_j exp(b_j) over the keys allowed; NaN where none is."""
    q, k, v = (x.double() for x in (found.query, found.paired_key, found.paired_value))
    log_k = kernel.log(q, k, found.scale, softcap=found.softcap)
    sign = kernel.sign(q, k, found.scale, softcap=found.softcap) if kernel.signed else torch.ones_like(log_k)
    log_k = log_k if found.bias is None else log_k + found.bias.double()
    seen = found.visible()
    seen = torch.ones_like(log_k, dtype=torch.bool) if seen is None else seen.expand_as(log_k).clone()
    if kernel.filter is not None or kernel.near is not None:
        sequences, queries, keys = (range(n) for n in (q.shape[0], q.shape[2], k.shape[2]))
        kept = torch.tensor([[[keeps(found, kernel, b, i, j) for j in keys] for i in queries] for b in sequences])
        if kernel.near is not None:
            mass = hybrid_mass(found, kernel, log_k.exp(), kept[:, None] & seen, seen)
            return (mass @ v / mass.sum(-1, keepdim=True)).transpose(1, 2)
        seen &= kept[:, None]
    log_k = log_k.masked_fill(~seen, -math.inf)
    mass = torch.where(seen, sign * (log_k - log_k.max(-1, keepdim=True).values).exp(), 0.0)
    if kernel.info.hard:
        mass = seen * torch.nn.functional.one_hot(log_k.argmax(-1), log_k.shape[-1]).double()
    return (mass @ v / mass.sum(-1, keepdim=True)).transpose(1, 2)


def hybrid_mass(found: Call, kernel: Kernel, far: Tensor, near: Tensor, seen: Tensor) -> Tensor:
    """γ·e^{s − max over near keys} where near, k elsewhere; one row after another."""
    scores = found.query.double() @ found.paired_key.double().mT * found.scale
    scores = scores if found.bias is None else scores + found.bias.double()
    mass = torch.zeros_like(far)
    gamma = kernel.fitted.get("near_log_weight", torch.zeros(HEADS)).double().exp()
    for i in range(far.shape[2]):
        row, there = scores[:, :, i], near[:, :, i]
        largest = torch.where(there, row, torch.tensor(-1e9).double()).max(-1, keepdim=True).values
        mass[:, :, i] = torch.where(there, gamma[:, None] * (row - largest).exp(), far[:, :, i] * seen[:, :, i])
    return mass


def keeps(found: Call, kernel: Kernel, sequence: int, query: int, key: int) -> bool:
    """The filter or window by its formula, from places counted by hand."""
    kept = kernel.filter or kernel.near
    assert kept is not None
    start = 0
    if found.allowed is not None and found.allowed.shape[0] > 1 and not bool(found.allowed[sequence, 0, -1, 0]):
        start = 70  # left padding
    own = query + (0 if found.causal else found.key.shape[2] - found.query.shape[2])
    i, j, numbers = own - start, key - start, kept.parameters
    near = abs(i - j) < numbers.get("width", numbers.get("stride", 0))
    if kept.modifier.name == "strided":
        return near or (i - j) % numbers["stride"] == 0
    return near or j < numbers.get("sinks", 0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows a tile, so that 150 tokens are ten tiles (and three chunks)."""
    monkeypatch.setattr(rows, "TILE_BYTES", 1)


def serves(found: Call, kernel: Kernel) -> bool:
    try:
        route(found, kernel)
    except UsageError:
        return False
    return not (kernel.tie and found.query.shape[2] != found.key.shape[2])


@pytest.mark.parametrize("kernel", [*KERNELS, *COMBINED], ids=[*NAMES, *(kernel.spelling for kernel in COMBINED)])
@pytest.mark.parametrize("case", CASES)
def test_every_path_is_the_dense_sum_in_float64(case: str, kernel: Kernel) -> None:
    found = CASES[case]()
    if not serves(found, kernel):
        pytest.skip("no meaning, refused")
    expected = dense(found, kernel)
    for path in ("auto", "eager"):
        # a signed kernel's denominators come near zero, which magnifies rounding
        assert apart(attend(found, kernel, path), expected) <= (1e-9 if kernel.signed else 1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
@pytest.mark.parametrize("case", ["causal", "left padding, causal", "right padding", "grouped heads", "decoding"])
def test_float32_is_float64_to_a_hundred_thousandth(case: str, kernel: Kernel) -> None:
    found = CASES[case](dtype=torch.float32)
    if kernel.signed:  # positive features keep denominators away from zero
        found = replace(found, query=found.query.abs(), key=found.key.abs())
    for path in ("auto", "eager"):
        assert apart(attend(found, kernel, path), dense(found, kernel)) <= 1e-5


@pytest.mark.parametrize("words", ["exponential", "rbf", "cosine", "elu", "polynomial"])
def test_bfloat16_is_as_near_as_its_eight_bits(words: str) -> None:
    found, kernel = CASES["causal"](dtype=torch.bfloat16), parsed(words)
    for path in ("auto", "eager"):
        result = attend(found, kernel, path)
        assert result.dtype == torch.bfloat16
        assert apart(result, dense(found, kernel)) <= 1e-2


GRADIENTS = [
    ("causal", "exponential"),
    ("left padding, causal", "exponential"),
    ("left padding, causal", "rbf"),
    ("grouped heads", "rbf"),
    ("bias", "rbf"),
    ("wider values", "cosine"),
    ("narrower values", "rbf"),
    ("cross", "rbf"),
    ("causal", "linear"),
    ("left padding, causal", "elu"),
    ("right padding", "elu"),
    ("cross", "random-features"),
    ("causal", "window:9"),
    ("left padding, causal", "rbf+window:9"),
    ("causal", "elu+hybrid:9"),
    ("left padding, causal", "elu+hybrid:70"),
    ("right padding", "elu+hybrid:9"),
    ("grouped heads", "elu+hybrid:200"),
]


@pytest.mark.parametrize(("case", "words"), GRADIENTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_agree(case: str, words: str, dtype: torch.dtype, tolerance: float) -> None:
    kernel = parsed(words)
    base = CASES[case]()
    if kernel.signed:
        base = replace(base, query=base.query.abs(), key=base.key.abs())
    weight = torch.randn(base.query.shape[0], base.query.shape[2], HEADS, base.value.shape[-1], dtype=torch.float64)
    if base.allowed is not None:
        weight = weight * base.allowed.any(-1).any(1)[..., None, None]  # rows that see nothing are nobody's business

    def gradients(path: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (base.query, base.key, base.value)]
        found = replace(base, query=leaves[0], key=leaves[1], value=leaves[2])
        return list(torch.autograd.grad((attend(found, kernel, path) * weight.to(dtype)).sum(), leaves))

    assert route(base, kernel) != "row tiles"
    expected = gradients("eager", torch.float64)
    for path in ("auto", "eager"):
        for mine, theirs in zip(gradients(path, dtype), expected, strict=True):
            assert apart(mine, theirs) <= tolerance


def test_a_bias_gets_its_gradient_on_every_path() -> None:
    base = call(causal=True)
    found = []
    for path in ("auto", "eager"):
        added = bias(150).requires_grad_()
        attend(replace(base, bias=added), parsed("rbf"), path).square().sum().backward()
        found.append(added.grad)
    assert apart(found[0], found[1]) <= 1e-12


CAUSAL = ["causal", "left padding, causal", "sliding window", "bias"]


@pytest.mark.parametrize("kernel", [*KERNELS, *COMBINED], ids=[*NAMES, *(kernel.spelling for kernel in COMBINED)])
@pytest.mark.parametrize("path", ["auto", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_future_token_moves_a_bit_of_the_past(kernel: Kernel, path: str, dtype: torch.dtype) -> None:
    for case in CAUSAL:
        before = CASES[case](dtype=dtype)
        after = changed(before, slice(100, None))
        first, second = attend(before, kernel, path), attend(after, kernel, path)
        start = 71 if "left" in case else 0  # before that, a row is uniform over all keys: padding
        assert bool((first == second)[:, start:100].all())
        assert not torch.equal(first[:, 100:], second[:, 100:])


@pytest.mark.parametrize("path", ["auto", "eager"])
def test_without_a_mask_the_future_moves_the_past(path: str) -> None:
    before = call(dtype=torch.float32)
    after = changed(before, slice(100, None))
    for words in ("exponential", "rbf", "polynomial", "elu", "linear"):
        first, second = (attend(found, parsed(words), path) for found in (before, after))
        assert not torch.equal(first[:, :100], second[:, :100])


def changed(found: Call, tokens: slice) -> Call:
    """Other queries, keys and values at those tokens."""
    new = {name: getattr(found, name).clone() for name in ("query", "key", "value")}
    for tensor in new.values():
        tensor[:, :, tokens] = 2 * tensor[:, :, tokens].flip(-2).roll(1, -1) + 1
    return replace(found, **new)


@pytest.mark.parametrize("kernel", [*KERNELS, *COMBINED], ids=[*NAMES, *(kernel.spelling for kernel in COMBINED)])
@pytest.mark.parametrize("path", ["auto", "eager"])
@pytest.mark.parametrize("case", ["left padding, causal", "right padding"])
def test_padding_moves_no_bit_of_what_is_no_padding(kernel: Kernel, path: str, case: str) -> None:
    before = CASES[case](dtype=torch.float32)
    padding, rest = (slice(0, 70), slice(70, None)) if "left" in case else (slice(90, None), slice(0, 90))
    after = changed(before, padding)
    first, second = attend(before, kernel, path), attend(after, kernel, path)
    assert torch.equal(first[1, rest], second[1, rest])
    control = [attend(replace(x, allowed=None, causal=False), kernel, path)[1, rest] for x in (before, after)]
    if kernel.filter is None and not kernel.info.hard:
        assert not torch.equal(*control)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_rows_are_probabilities_unless_the_kernel_is_signed(kernel: Kernel) -> None:
    found = weights(call(causal=True), kernel)
    assert found.sum(-1).sub(1).abs().max() <= 1e-9
    assert bool((found >= 0).all()) == (not kernel.signed)


def test_the_weights_of_these_calls_are_far_from_uniform() -> None:
    largest = weights(call(causal=True), parsed("exponential")).max(-1).values
    assert float(largest.mean()) > 10 * float((1 / torch.arange(1, 151)).mean())


def test_a_signed_row_without_mass_is_not_hidden() -> None:
    found = call(2, dtype=torch.float64)
    key = torch.stack([found.key[:, :, 0], -found.key[:, :, 0]], dim=2)
    assert not bool(torch.isfinite(attend(replace(found, key=key), parsed("linear"), "eager")).any())


def test_hard_takes_the_first_of_equal_keys() -> None:
    found = call(6, 6)
    equal = replace(found, key=found.key[:, :, :1].expand(-1, -1, 6, -1))
    assert torch.equal(weights(equal, parsed("hard")).argmax(-1), torch.zeros(2, HEADS, 6, dtype=torch.long))


def test_weights_of_some_rows_are_those_rows_and_give_the_output() -> None:
    found = CASES["left padding, causal"]()
    for kernel in (parsed("rbf"), parsed("linear"), parsed("sink-window:3,9")):
        whole = weights(found, kernel)
        assert torch.equal(weights(found, kernel, slice(100, 120)), whole[:, :, 100:120])
        mine = (whole @ found.paired_value).transpose(1, 2)
        assert apart(mine, dense(found, kernel)) <= 1e-9
    narrow = weights(CASES["causal"](dtype=torch.bfloat16), parsed("rbf"))
    assert narrow.dtype == torch.float32


def test_a_row_that_sees_nothing_is_uniform_in_row_tiles() -> None:
    found = CASES["left padding, causal"]()
    for kernel in (parsed("exponential"), parsed("linear"), parsed("polynomial")):
        assert torch.allclose(weights(found, kernel)[1, :, :70], torch.full((), 1 / 150, dtype=torch.float64))


def transformers_eager(found: Call) -> Tensor:
    """What transformers' gpt_oss and gemma2 do: softcap, mask of least numbers, sink column, softmax."""
    logits = found.query @ found.paired_key.mT * found.scale
    if found.softcap is not None:
        logits = torch.tanh(logits / found.softcap) * found.softcap
    seen = found.visible()
    if seen is not None:
        logits = logits + torch.zeros(()).to(logits).where(seen, torch.finfo(logits.dtype).min)
    if found.sinks is not None:
        logits = torch.cat([logits, found.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., : found.key.shape[2]] @ found.paired_value).transpose(1, 2)


def test_all_directions_are_the_model_itself_under_a_softcap() -> None:
    """A Bᵀ = 1 loses nothing; without the softcap, or with fewer directions, the output is another."""
    found, own = call(causal=True, softcap=2.0), parsed("exponential")
    draw = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(4)).double()
    whole = parsed(f"rank:{DIM}").with_fitted({"query_map": draw, "key_map": torch.linalg.inv(draw).mT})
    expected = attend(found, own)
    assert apart(attend(found, whole), expected) <= 1e-10
    assert apart(attend(replace(found, softcap=None), whole), expected) > 0.05
    cut = {name: part[..., :-1] for name, part in whole.fitted.items()}
    assert apart(attend(found, whole.with_fitted(cut)), expected) > 0.05


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_softcap_and_sinks_are_transformers_own(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE_BYTES", budget)
    own = parsed("exponential")
    sinks = torch.linspace(-2, 6, HEADS).double()
    for more in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 2.0, "sinks": sinks}):
        found = CASES["left padding, causal"](**more)
        assert route(found, own) == "row tiles"
        difference = (attend(found, own) - transformers_eager(found)).norm() / attend(found, own).norm()
        assert float(difference) <= 1e-12
        plain = attend(replace(found, softcap=None, sinks=None), own)
        assert apart(plain, transformers_eager(found).double()) > 0.05  # the control: they change the output


def test_a_sink_may_win_over_every_key_of_the_hard_kernel() -> None:
    sinks = torch.tensor([100.0, -100.0, 0.0, 0.0], dtype=torch.float64)
    found = weights(call(causal=True, sinks=sinks), parsed("hard"))
    assert not bool(found[:, 0].any())
    assert bool((found[:, 1].sum(-1) == 1).all())
    assert 0 < float(found[:, 2].sum(-1).mean()) < 1


@pytest.mark.parametrize("words", ["rbf", "rbf+symmetric"])
def test_beside_sinks_a_fitted_rbf_is_the_whole_distance_from_its_origin(words: str) -> None:
    """Sinks are measured against log k itself, so that its query-only terms count."""
    found = call(30, sinks=torch.linspace(-30, 6, HEADS).double())
    found = replace(found, query=0.5 * found.query, key=0.5 * found.key)
    kernel = fitted(parsed("rbf"))
    kernel = replace(kernel, tie="symmetric") if "symmetric" in words else kernel
    origin = kernel.fitted["origin"]

    def expected(query: Tensor) -> Tensor:
        log_k = -0.5 * found.scale * (query[..., None, :] - found.key[..., None, :, :]).square().sum(-1)
        log_k = (log_k + log_k.mT) / 2 if kernel.tie else log_k
        mass, sink = log_k.exp(), found.sinks.exp()[:, None, None]
        return (mass / (mass.sum(-1, keepdim=True) + sink) @ found.value).transpose(1, 2)

    result = attend(found, kernel)
    assert apart(result, expected(found.query + origin[:, None])) <= 1e-12
    assert apart(result, expected(found.query)) > 0.05


@pytest.mark.parametrize("case", ["all", "causal", "left padding, causal", "right padding", "decoding", "cross"])
@pytest.mark.parametrize("words", ["random-features", "elu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_that_underflow_are_the_row_tiles(case: str, words: str, dtype: torch.dtype) -> None:
    found, kernel = CASES[case](dtype=dtype), parsed(words)
    size = 6.0 if dtype == torch.float32 else 30.0
    found = replace(found, query=-size * found.query.abs(), key=-size * found.key.abs())
    if words == "random-features":
        phi = [kernel.info.function(x, found.scale, "", **kernel.parameters) for x in (found.query, found.key)]
        blank = float(((phi[0] @ phi[1].mT) == 0).double().mean())
        assert blank > 0.5
    assert route(found, kernel) == "running sums"
    visible = found.visible()
    seen = torch.ones(1, dtype=torch.bool) if visible is None else visible.any(-1).any(1)[..., None, None]
    fused, eager = (attend(found, kernel, path) for path in ("fused", "eager"))
    assert apart(torch.where(seen, fused, 0.0), torch.where(seen, eager, 0.0).double()) <= 2e-5
    assert float(eager.norm()) > 0.1


@pytest.mark.parametrize("case", ["all", "causal", "left padding, causal", "right padding", "decoding"])
@pytest.mark.parametrize("words", ["linear", "random-features"])
def test_a_query_without_features_attends_evenly_on_every_path(case: str, words: str) -> None:
    found, kernel = CASES[case](dtype=torch.float32), parsed(words)
    query = found.query.clone()
    query[:, :, -1] = 0.0 if words == "linear" else 200.0
    found = replace(found, query=query.requires_grad_())
    visible = found.visible()
    seen = torch.ones(2, 1, found.key.shape[2]) if visible is None else visible[..., -1, :].expand(2, 1, -1).float()
    even = (seen[:, :, None] @ found.paired_value / seen.sum(-1)[..., None, None])[:, :, 0]
    assert float(even.norm()) > 0.1
    for path in ("fused", "eager"):
        result = attend(found, kernel, path)
        assert apart(result[:, -1].detach(), even.double()) <= 1e-5
        (gradient,) = torch.autograd.grad((result[:, -1] * 10).square().sum(), query)
        assert bool(gradient.isfinite().all())


ROUTES = [
    ("causal", "exponential", "sdpa"),
    ("bias", "rbf", "sdpa"),
    ("sliding window", "cosine", "sdpa"),
    ("left padding, causal", "elu", "running sums"),
    ("right padding", "linear", "running sums"),
    ("decoding", "random-features", "running sums"),
    ("sliding window", "elu", "row tiles"),
    ("causal", "polynomial", "row tiles"),
    ("causal", "polynomial+window:9", "banded tiles"),
    ("causal", "sink-window:2,9", "row tiles"),
    ("causal", "rbf+symmetric", "row tiles"),
    ("causal", "rbf+tied-key", "sdpa"),
    ("causal", "hard", "row tiles"),
]


@pytest.mark.parametrize(("case", "words", "expected"), ROUTES)
def test_the_route_is_named_and_eager_is_always_row_tiles(case: str, words: str, expected: str) -> None:
    found, kernel = CASES[case](), parsed(words)
    assert route(found, kernel) == expected
    assert route(found, kernel, "eager") == "row tiles"
    if expected != "row tiles":
        assert route(found, kernel, "fused") == expected


REASONS = [
    (call(softcap=2.0), "exponential", "softcap"),
    (call(softcap=2.0), "linear", "softcap"),
    (call(sinks=torch.zeros(HEADS)), "rbf", "sinks"),
    (call(dropout=0.1), "rbf", "dropout"),
    (call(), "rbf+symmetric", "transpose"),
    (call(bias=bias(150)), "elu", "bias"),
    (call(allowed=sliding(150)), "elu", "neither causal nor"),
    (call(), "sink-window:2,9", "SDPA cannot apply the filter sink-window"),
    (call(), "polynomial", "GPU"),
    (call(), "laplacian", "row tiles"),
]


@pytest.mark.parametrize(("found", "words", "reason"), REASONS)
def test_fused_is_refused_with_the_reason(found: Call, words: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        attend(found, parsed(words), "fused")
    assert route(found, parsed(words)) == "row tiles"


def test_what_has_no_meaning_is_refused_on_every_path() -> None:
    for path in ("auto", "eager", "fused"):
        with pytest.raises(UsageError, match="sinks"):
            attend(call(sinks=torch.zeros(HEADS)), parsed("linear"), path)
        for tokens in (30, 150):
            for words in ("window:9", "strided:4", "symmetric", "rbf+tied-key"):
                with pytest.raises(UsageError, match="another sequence"):
                    attend(call(tokens, 150, cross=True), parsed(words), path)
        with pytest.raises(UsageError, match="same tokens"):
            attend(CASES["decoding"](), parsed("symmetric"), path)


def test_queries_without_a_place_among_the_keys_are_refused() -> None:
    everything = torch.ones(1, 1, 30, 150, dtype=torch.bool)
    for found in (call(30, 150), call(30, 150, allowed=everything), call(150, 30)):
        with pytest.raises(UsageError, match="position of each query among the keys"):
            attend(found, parsed("window:9"))


@pytest.mark.parametrize("words", ["window:9", "sink-window:3,9", "strided:8", "rbf+window:9", "rbf"])
@pytest.mark.parametrize("padded", [0, 13])
def test_decoding_with_either_cache_is_the_row_of_the_whole(words: str, padded: int) -> None:
    kernel, tokens = parsed(words), 60
    whole = call(tokens, batch=1)
    mask = tril(tokens, tokens).clone()
    mask[..., :padded] = False
    expected = attend(replace(whole, allowed=mask), kernel)
    room = [torch.cat([x, 5 * torch.ones_like(x[:, :, :30])], dim=2) for x in (whole.key, whole.value)]
    for start, stop in ((40, 41), (40, 55)):
        now, query = slice(start, stop), whole.query[:, :, start:stop]
        seen = mask[..., now, :stop]
        dynamic = replace(whole, query=query, key=whole.key[:, :, :stop], value=whole.value[:, :, :stop], allowed=seen)
        static = replace(whole, query=query, key=room[0], value=room[1])
        static = replace(static, allowed=torch.nn.functional.pad(seen, (0, tokens + 30 - stop)))
        for found in (dynamic, static):
            for path in ("auto", "eager"):
                assert apart(attend(found, kernel, path), expected[:, now]) <= 1e-12
    if not padded:
        last = replace(whole, query=whole.query[:, :, 59:])
        assert apart(attend(last, kernel), expected[:, 59:]) <= 1e-12


def test_what_counts_from_the_start_is_refused_where_a_sliding_window_hides_it() -> None:
    """A cache of the last 21 keys, or a mask that hides the others; padding and full layers hide no start."""
    whole, kernel = call(60, batch=1), parsed("sink-window:3,9")
    mask = sliding(60)
    expected = attend(replace(whole, allowed=mask), kernel)
    chunk = replace(whole, query=whole.query[:, :, 40:55], key=whole.key[:, :, :55], value=whole.value[:, :, :55])
    one = replace(whole, query=whole.query[:, :, 54:55], key=whole.key[:, :, 34:55], value=whole.value[:, :, 34:55])
    own, of_config, full = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    own.sliding_window = 20  # type: ignore[assignment]
    of_config.config = full.config = SimpleNamespace(sliding_window=20)  # type: ignore[assignment]
    full.sliding_window = None  # type: ignore[assignment]
    hidden = [replace(chunk, allowed=mask[..., 40:55, :55]), *(replace(one, module=m) for m in (own, of_config))]
    for found in hidden:
        for path in ("auto", "eager"):
            with pytest.raises(UsageError, match="own sliding window hides where the text begins"):
                attend(found, kernel, path)
            for words in ("window:9", "strided:8"):
                same = attend(replace(whole, allowed=mask), parsed(words))[:, 55 - found.query.shape[2] : 55]
                assert apart(attend(found, parsed(words), path), same) <= 1e-12
    for module in (own, of_config, full):
        assert torch.equal(attend(replace(whole, allowed=mask, module=module), kernel), expected)
    plain = replace(chunk, allowed=tril(60, 60)[..., 40:55, :55], module=full)
    assert apart(attend(plain, kernel), attend(replace(whole, causal=True), kernel)[:, 40:55]) <= 1e-12


def test_places_in_bidirectional_attention_are_the_indices() -> None:
    where = rows.positions(call(allowed=right_padded(150)), parsed("sink-window:3,9").filter)
    assert torch.equal(where.query[0], torch.arange(150))
    assert not bool(where.first.any())


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(found, Tensor):
                stored = found.untyped_storage().nbytes() // found.element_size()
                self.elements = max(self.elements, stored)
        return result


LONG = [
    ("polynomial", "auto"),
    ("rbf", "eager"),
    ("elu", "auto"),
    ("linear", "eager"),
    ("rbf+window:9", "auto"),
    ("elu+hybrid:9", "auto"),
]


@pytest.mark.parametrize(("words", "path"), LONG)
@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_grows_with_queries_times_keys(words: str, path: str, training: bool) -> None:
    largest = []
    for tokens in (512, 1024):
        found = call(tokens, batch=1, dtype=torch.float32, causal=True)
        found = replace(found, query=found.query.requires_grad_(training))
        with torch.set_grad_enabled(training), Largest() as mode:
            result = attend(found, parsed(words), path)
            if training:
                result.sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= max(2.1 * largest[0], 1)
    assert largest[1] <= HEADS * 1024 * max(16, 2 * DIM)
    with Largest() as control:
        weights(found, parsed(words))
    assert control.elements >= HEADS * 1024**2


def test_saved_tensors_of_the_backward_pass_stay_linear_too() -> None:
    saved = []

    def packed(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    for words in ("polynomial", "elu", "rbf+window:9", "elu+hybrid:9"):
        saved.clear()
        found = call(1024, batch=1, dtype=torch.float32, causal=True)
        found = replace(found, query=found.query.requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            attend(found, parsed(words))
        assert sum(saved) < HEADS * 1024**2 / 2


def test_a_band_reads_only_the_keys_in_reach() -> None:
    found = call(2048, batch=1, dtype=torch.float32, causal=True)
    with Largest() as mode:
        banded = attend(found, parsed("rbf+window:9"))
    assert mode.elements <= HEADS * 64 * 4 * 64 * 8  # never a row tile × all keys
    assert apart(banded, attend(found, parsed("rbf+window:9"), "eager").double()) <= 1e-5


def test_dropout_drops_the_share_asked_for() -> None:
    torch.manual_seed(0)
    found = call(dropout=0.25)
    value = torch.ones_like(found.value)
    dropped = attend(replace(found, value=value), parsed("exponential"))
    assert float((dropped - 1).abs().mean()) > 0.05
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)


FLEX = [
    ("causal", "polynomial:degree=2,offset=1"),
    ("left padding, causal", "taylor"),
    ("left padding, causal", "sink-window:3,9"),
    ("grouped heads", "window:9"),
    ("bias", "polynomial"),
    ("chunk of a cache", "strided:8"),
    ("right padding", "polynomial+tied-key"),
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own arithmetic in plain torch."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("case", "words"), FLEX)
def test_flex_attention_asks_for_the_same_sum(case: str, words: str) -> None:
    found, kernel = CASES[case](dtype=torch.float32), parsed(words)
    result = scores.by_scores(found, kernel, compiled=False).transpose(1, 2)
    assert apart(result, dense(found, kernel)) <= 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_flex_attention_compiled_is_the_same_sum() -> None:
    """For a CPU, where torch can: not for grouped heads, a bias or a cache, which its CPU kernel has no room for."""
    found = CASES["left padding, causal"](dtype=torch.float32)
    kernel = parsed("polynomial:degree=2,offset=1+sink-window:3,9")
    from torch._inductor import config

    # in this process, and without another compilation that tries whether g++ knows the processor
    with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        result = scores.by_scores(found, kernel).transpose(1, 2)
    assert apart(result, dense(found, kernel)) <= 1e-5
    assert apart(result, dense(found, parsed("polynomial:degree=2,offset=1+window:9"))) > 0.01, "the control"


ONE_GRAPH = """
import torch
from attnlens.kernels import parsed
from attnlens.kernels.attention import scores

for words in ("exponential", "polynomial:degree=4,offset=1", "taylor"):
    kernel, values = parsed(words), torch.linspace(-3, 3, 12)
    compiled = torch.compile(lambda x: kernel.info.function(x, **kernel.parameters), backend="eager", fullgraph=True)
    assert torch.equal(compiled(values), kernel.info.function(values, **kernel.parameters))
    print(words)
"""


def test_the_formula_of_a_kernel_of_the_score_is_one_graph() -> None:
    """What torch cannot compile, FlexAttention on a GPU would compute with a matrix of all pairs.

    In a process of its own, since type checks of the tests import torch for the kernels.
    """
    run = python("-c", ONE_GRAPH)
    assert run.stdout.count("\n") == 3, run.stderr


@pytest.mark.usefixtures("uncompiled")
def test_flex_attention_reads_the_softcap() -> None:
    found, own = call(causal=True, softcap=2.0, dtype=torch.float32), parsed("exponential")
    result = scores.by_scores(found, own, compiled=False).transpose(1, 2)
    assert apart(result, dense(found, own)) <= 1e-5


@pytest.mark.usefixtures("uncompiled")
def test_a_mask_of_blocks_is_compiled_under_the_settings_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, after a few kinds of masks, torch would silently build a matrix of all pairs."""
    create, limits = scores.create_block_mask, []

    def record(*args: Any, **options: Any) -> Any:
        limits.append((torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit))
        return create(*args, **options)

    monkeypatch.setattr(scores, "create_block_mask", record)
    scores.by_scores(CASES["causal"](dtype=torch.float32), parsed("taylor"), compiled=False)
    assert limits == [(scores.LIMITS["recompile_limit"], True)]


def test_the_room_says_what_it_offers() -> None:
    assert set(attention.__all__) == {"Route", "attend", "route", "weights"}
