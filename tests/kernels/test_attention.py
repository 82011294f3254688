"""Tests that attention by every route is softmax(log k + mask) v as computed naively in float64."""

import itertools
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention
from attention_calls import CASES, DIM, HEADS, apart, bias, call, dense, right_padded, sliding, tril
from heads import random
from program import python
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens.errors import UsageError
from attnlens.kernels import OWN, kernels, parsed
from attnlens.kernels.attention import attend, route, rows, scores, weights


def with_maps(words):
    """The kernel with per-head parameters drawn at random instead of fitted."""
    kernel, draw = parsed(words), torch.Generator().manual_seed(3)
    sizes = {
        "rank": {"query_map": (HEADS, DIM, 3), "key_map": (HEADS, DIM, 3)},
        "rbf": {"origin": (HEADS, DIM)},
        "learned-features": {"query_weight": (HEADS, 3, DIM), "key_weight": (HEADS, 3, DIM)},
    }[kernel.info.name] | ({} if kernel.near is None else {"near_log_weight": (HEADS,)})
    return kernel.with_fitted({name: torch.randn(size, generator=draw).double() for name, size in sizes.items()})


SPELLINGS = [name for name, info in kernels().items() if not info.needs_fit]
SPELLINGS += ["polynomial:degree=4,offset=1", "taylor:3", "rbf:gamma=1", "random-features:count=12"]
PLAIN = [parsed(words, allow_signed=True) for words in SPELLINGS]
PLAIN += [with_maps(words) for words in ("rank:3", "rbf", "learned-features:6")]
COMBINED = (
    *("window:9", "rbf+window:40", "linear+window:9", "sink-window:3,9", "strided:8", "hard+strided:8"),
    *("symmetric", "rbf+symmetric", "rbf+tied-key", "elu+tied-query", "elu+hybrid:9"),
)
KERNELS = PLAIN + [parsed(words) for words in COMBINED] + [with_maps("learned-features:6+hybrid:40")]
NAMES = [kernel.spelling + (" fitted" if kernel.fitted else "") for kernel in KERNELS]
every_kernel = pytest.mark.parametrize("number", range(len(KERNELS)), ids=NAMES)
"""By number: kernels of the same route take turns at the cases."""
in_turns = pytest.mark.parametrize("turns", [True, pytest.param(False, marks=pytest.mark.full)], ids=["turns", "all"])


def positive(case):
    """The call with positive features, which keep the denominators of a signed kernel away from zero."""
    return replace(case, query=case.query.abs(), key=case.key.abs())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 32 rows for two sequences of 150 keys: five tiles (and three chunks)."""
    monkeypatch.setattr(rows, "TILE_BYTES", 32 * 4 * 2 * HEADS * 150)


PATHS = ("auto", "eager")
BRAIN = ("exponential", "rbf", "cosine", "elu", "polynomial")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@every_kernel
@in_turns
def test_every_path_and_the_weights_give_the_dense_sum(number, turns):
    """Kernels share their routes: each plain one without per-head maps takes a third of the cases, others half."""
    kernel, share = KERNELS[number], 3 if number < len(PLAIN) - 3 else 2
    names = list(CASES)[number % share :: share] if turns else list(CASES)
    narrow = ["causal", "left padding, causal", "right padding", "grouped heads", "decoding"]
    cases = [(name, torch.float64) for name in names]
    cases += [(narrow[at % 5], torch.float32) for at in ((number, number + 2) if turns else range(5))]
    cases += [("causal", torch.bfloat16)] if kernel.spelling.partition(":")[0] in BRAIN else []
    for name, dtype in cases:
        case = CASES[name](dtype=dtype)
        unpaired = kernel.tie and case.query.shape[2] != case.key.shape[2]
        if unpaired or (case.cross and (kernel.filter or kernel.near)):
            with pytest.raises(UsageError):
                attend(case, kernel)
            continue
        case = positive(case) if kernel.signed and dtype == torch.float32 else case
        expected = dense(case, kernel)
        # a signed kernel's denominators come near zero, which magnifies rounding
        limit = LIMITS.get(dtype, 1e-9 if kernel.signed else 1e-12)
        for path in PATHS:
            output = attend(case, kernel, path)
            assert output.dtype == dtype
            assert apart(output, expected) <= limit, (name, dtype, path)
        matrix, middle = weights(case, kernel), slice(case.query.shape[2] // 3, 120)
        assert matrix.dtype == torch.promote_types(dtype, torch.float32)
        assert apart((matrix.double() @ case.paired_value.double()).transpose(1, 2), expected) <= limit
        atol = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(weights(case, kernel, middle), matrix[:, :, middle], rtol=0, atol=atol)
        assert bool((matrix >= 0).all()) or kernel.signed


GRADIENTS = [
    *(("causal", words) for words in ("linear", "window:9", "elu+hybrid:9")),
    *(("left padding, causal", words) for words in ("exponential", "rbf", "elu", "rbf+window:9", "elu+hybrid:70")),
    *(("right padding", "elu"), ("right padding", "elu+hybrid:9"), ("bias", "rbf"), ("wider values", "cosine")),
    *(("grouped heads", "rbf"), ("grouped heads", "elu+hybrid:200"), ("narrower values", "rbf")),
    *(("cross", "rbf"), ("cross", "random-features")),
]


@pytest.mark.parametrize(("name", "words"), GRADIENTS)
def test_gradients_of_all_paths_agree(name, words):
    kernel, base = parsed(words), CASES[name]()
    base = positive(base) if kernel.signed else base
    weight = torch.randn(2, base.query.shape[2], HEADS, base.value.shape[-1], dtype=torch.float64)
    if base.allowed is not None:
        weight = weight * base.allowed.any(-1).any(1)[..., None, None]  # rows that see nothing do not matter

    def gradients(path, dtype):
        names = ["query", "key", "value"] + ["bias"] * (base.bias is not None)
        leaves = {name: getattr(base, name).to(dtype).requires_grad_() for name in names}
        output = attend(replace(base, **leaves), kernel, path) * weight.to(dtype)
        return torch.autograd.grad(output.sum(), list(leaves.values()))

    assert route(base, kernel) != "row tiles"
    expected = gradients("eager", torch.float64)
    for path, dtype, limit in (("auto", torch.float64, 1e-12), *((path, torch.float32, 1e-5) for path in PATHS)):
        assert all(apart(*pair) <= limit for pair in zip(gradients(path, dtype), expected, strict=True)), (path, dtype)


def changed(case, tokens):
    """The call with other queries, keys and values at those tokens."""
    new = {name: getattr(case, name).clone() for name in ("query", "key", "value")}
    for tensor in new.values():
        tensor[:, :, tokens] = 2 * tensor[:, :, tokens].flip(-2).roll(1, -1) + 1
    return replace(case, **new)


@every_kernel
@in_turns
def test_no_future_token_moves_a_bit_of_the_past(number, turns):
    kernel = KERNELS[number]
    names, dtypes = ["causal", "left padding, causal", "sliding window", "bias"], [torch.float32, torch.bfloat16]
    each = [(names[at % 4], dtypes[at // 2 % 2], PATHS[(at - number) % 2]) for at in range(number, number + 4)]
    for name, dtype, path in each if turns else itertools.product(names, dtypes, PATHS):
        before = CASES[name](dtype=dtype)
        both = before, changed(before, slice(100, None))
        first, second = (attend(case, kernel, path) for case in both)
        start = 71 if "left" in name else 0  # before that, a row is uniform over all keys: padding
        assert torch.equal(first[:, start:100], second[:, start:100]), (name, path, dtype)
        assert not torch.equal(first[:, 100:], second[:, 100:])
        if name == "causal" and not (kernel.filter or kernel.info.hard):
            blind = [attend(replace(case, causal=False), kernel, path)[:, :100] for case in both]
            assert not torch.equal(*blind), "the control: without the mask the future moves the past"


@every_kernel
@in_turns
def test_padding_moves_no_bit_of_real_tokens(number, turns):
    kernel, names = KERNELS[number], ("left padding, causal", "right padding")
    each = [(names[number % 2], "auto"), (names[number % 2 - 1], PATHS[number // 2 % 2])]
    for name, path in each if turns else itertools.product(names, PATHS):
        before = CASES[name](dtype=torch.float32)
        padding, real = (slice(0, 70), slice(70, None)) if "left" in name else (slice(90, None), slice(0, 90))
        both = before, changed(before, padding)
        assert torch.equal(*(attend(case, kernel, path)[1, real] for case in both)), (name, path)
        if kernel.filter is None and not kernel.info.hard:
            blind = [attend(replace(case, allowed=None, causal=False), kernel, path)[1, real] for case in both]
            assert not torch.equal(*blind), "the control: without the mask it does"


def test_degenerate_rows_have_their_conventions_and_dropout_drops_its_share():
    largest = weights(call(causal=True), OWN).amax(-1)
    assert float(largest.mean()) > 10 * float((1 / torch.arange(1, 151)).mean()), "these calls are far from uniform"
    matrix = weights(call(causal=True), parsed("linear"))
    assert not bool((matrix >= 0).all()), "a signed kernel has negative weights"
    assert matrix.sum(-1).sub(1).abs().max() <= 1e-9
    case = call(6, 6)
    equal = replace(case, key=case.key[:, :, :1].expand(-1, -1, 6, -1))
    assert torch.equal(weights(equal, parsed("hard")).argmax(-1), torch.zeros(2, HEADS, 6, dtype=torch.long))
    case = call(2)
    cancelling = replace(case, key=torch.stack([case.key[:, :, 0], -case.key[:, :, 0]], dim=2))
    assert not bool(torch.isfinite(attend(cancelling, parsed("linear"), "eager")).any()), "no mass is not hidden"
    for words in ("exponential", "linear", "polynomial"):
        blind = weights(CASES["left padding, causal"](), parsed(words))[1, :, :70]
        assert torch.allclose(blind, torch.full((), 1 / 150, dtype=torch.float64)), words
    torch.manual_seed(0)
    case = call(dropout=0.25)
    dropped = attend(replace(case, value=torch.ones_like(case.value)), OWN)
    assert float((dropped - 1).abs().mean()) > 0.05
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)


def transformers_eager(case):
    """What transformers' gpt_oss and gemma2 do: softcap, mask of least numbers, sink column, softmax."""
    logits = case.query @ case.paired_key.mT * case.scale
    logits = logits if case.softcap is None else torch.tanh(logits / case.softcap) * case.softcap
    logits = logits + torch.zeros(()).to(logits).where(case.visible(), torch.finfo(logits.dtype).min)
    if case.sinks is not None:
        logits = torch.cat([logits, case.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., : case.key.shape[2]] @ case.paired_value).transpose(1, 2)


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_softcap_and_sinks_are_those_of_transformers(budget, monkeypatch):
    monkeypatch.setattr(rows, "TILE_BYTES", budget)
    sinks = torch.linspace(-2, 6, HEADS).double()
    for more in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 2.0, "sinks": sinks}):
        case = CASES["left padding, causal"](**more)
        assert route(case, OWN) == "row tiles"
        assert apart(attend(case, OWN), transformers_eager(case)) <= 1e-12
        plain = attend(replace(case, softcap=None, sinks=None), OWN)
        assert apart(plain, transformers_eager(case)) > 0.05, "the control: they change the output"
    sinks = torch.tensor([100.0, -100.0, 0.0, 0.0], dtype=torch.float64)
    sums = weights(call(causal=True, sinks=sinks), parsed("hard")).sum(-1)
    assert not bool(sums[:, 0].any()), "a sink may win over every key of the hard kernel"
    assert bool((sums[:, 1] == 1).all())
    assert 0 < float(sums[:, 2].mean()) < 1


def test_all_directions_under_a_softcap_are_the_model_itself():
    """A Bᵀ = 1 loses nothing; without the softcap, or with fewer directions, the output is another."""
    case, draw = call(causal=True, softcap=2.0), random(HEADS, DIM, DIM, seed=4)
    whole = parsed(f"rank:{DIM}").with_fitted({"query_map": draw, "key_map": torch.linalg.inv(draw).mT})
    cut = whole.with_fitted({name: part[..., :-1] for name, part in whole.fitted.items()})
    plain, expected = replace(case, softcap=None), attend(case, OWN)
    assert apart(attend(case, whole), expected) <= 1e-10
    assert min(apart(attend(plain, whole), expected), apart(attend(case, cut), expected)) > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_query_whose_keys_are_all_masked_sees_none_whatever_number_masks_them(dtype):
    numbers = [torch.finfo(dtype).min, *([] if dtype == torch.float16 else [-1e9])]
    for number in numbers:
        mask = torch.tensor([[0.0, -1.0, number], [number] * 3, [-1000.0] * 3], dtype=dtype)[None, None]
        visible = [[True, True, False], [False] * 3, [True] * 3]  # the control: −1000 at every key is a bias
        assert rows.split_mask(mask)[0][0, 0].tolist() == visible, number


@pytest.mark.parametrize("tie", [None, "symmetric"])
def test_sinks_are_compared_with_the_whole_distance_from_a_fitted_origin(tie):
    """Sinks are measured against log k itself, so its query-only terms count."""
    case = call(30, sinks=torch.linspace(-30, 6, HEADS).double())
    case = replace(case, query=0.5 * case.query, key=0.5 * case.key)
    kernel = replace(with_maps("rbf"), tie=tie)

    def expected(query):
        log_k = -0.5 * case.scale * torch.cdist(query, case.key).square()
        mass = ((log_k + log_k.mT) / 2 if tie else log_k).exp()
        return (mass / (mass.sum(-1, keepdim=True) + case.sinks.exp()[:, None, None]) @ case.value).transpose(1, 2)

    result = attend(case, kernel)
    assert apart(result, expected(case.query + kernel.fitted["origin"][:, None])) <= 1e-12
    assert apart(result, expected(case.query)) > 0.05


SUMMED = ["all", "causal", "left padding, causal", "right padding", "decoding"]


@pytest.mark.parametrize("words", ["random-features:count=64", "elu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_that_underflow_are_the_row_tiles(words, dtype):
    kernel, size = parsed(words), 6.0 if dtype == torch.float32 else 30.0
    for name in [*SUMMED, "cross"]:
        case = CASES[name](dtype=dtype)
        case = replace(case, query=-size * case.query.abs(), key=-size * case.key.abs())
        if "features" in words:
            phi = [kernel.phi(x, case.scale, "") for x in (case.query, case.key)]
            assert float(((phi[0] @ phi[1].mT) == 0).double().mean()) > 0.5
        assert route(case, kernel) == "running sums"
        visible = case.visible()
        seen = torch.ones(1, dtype=torch.bool) if visible is None else visible.any(-1).any(1)[..., None, None]
        fused, eager = (torch.where(seen, attend(case, kernel, path), 0.0) for path in ("fused", "eager"))
        assert apart(fused, eager.double()) <= 2e-5, name
        assert float(eager.norm()) > 0.1


@pytest.mark.parametrize("words", ["linear", "random-features"])
def test_a_query_without_features_attends_evenly_on_every_path(words):
    for name in SUMMED:
        case = CASES[name](dtype=torch.float32)
        query = case.query.clone()
        query[:, :, -1] = 0.0 if words == "linear" else 200.0
        case = replace(case, query=query.requires_grad_())
        visible = case.visible()
        seen = torch.ones(2, 1, case.key.shape[2]) if visible is None else visible[..., -1, :].expand(2, 1, -1).float()
        even = (seen[:, :, None] @ case.paired_value / seen.sum(-1)[..., None, None])[:, :, 0]
        assert float(even.norm()) > 0.1
        for path in ("fused", "eager"):
            result = attend(case, parsed(words), path)[:, -1]
            assert apart(result.detach(), even.double()) <= 1e-5, (name, path)
            (gradient,) = torch.autograd.grad((result * 10).square().sum(), query)
            assert bool(gradient.isfinite().all())


ROUTES = [
    *(("causal", "exponential", "sdpa"), ("bias", "rbf", "sdpa"), ("sliding window", "cosine", "sdpa")),
    *(("causal", "rbf+tied-key", "sdpa"), ("causal", "rbf+symmetric", "row tiles"), ("causal", "hard", "row tiles")),
    *(("left padding, causal", "elu", "running sums"), ("right padding", "linear", "running sums")),
    *(("decoding", "random-features", "running sums"), ("sliding window", "elu", "row tiles")),
    *(("causal", "polynomial", "row tiles"), ("causal", "polynomial+window:9", "banded tiles")),
    *(("causal", "sink-window:2,9", "row tiles"), ("causal", "elu+hybrid:9", "window and running sums")),
]
NOT_FUSED = [
    (call(softcap=2.0), "exponential", "softcap"),
    (call(softcap=2.0), "linear", "softcap"),
    (call(sinks=torch.zeros(HEADS)), "rbf", "sinks"),
    (call(dropout=0.1), "rbf", "dropout"),
    (call(), "rbf+symmetric", "transpose"),
    (call(bias=bias(150)), "elu", "bias"),
    (call(allowed=sliding(150)), "elu", "neither padding nor later"),
    (call(), "sink-window:2,9", "SDPA cannot apply the filter sink-window"),
    (call(), "elu+sink-window:2,9", "running sums cannot apply the filter sink-window"),
    (CASES["decoding"](), "elu+hybrid:9", "hybrids with a key-value cache are computed in row tiles"),
    (CASES["left padding, causal"](), "elu+sink-hybrid:2,9", "first tokens are not at position 0"),
    (call(), "polynomial", "GPU"),
    (call(), "laplacian", "row tiles"),
]


def test_the_route_is_named_eager_is_always_row_tiles_and_fused_is_refused_with_the_reason():
    for name, words, expected in ROUTES:
        case, kernel = CASES[name](), parsed(words)
        assert route(case, kernel) == expected, (name, words)
        assert route(case, kernel, "eager") == "row tiles"
        if expected != "row tiles":
            assert route(case, kernel, "fused") == expected
    for case, words, reason in NOT_FUSED:
        with pytest.raises(UsageError, match=reason):
            attend(case, parsed(words), "fused")
        assert route(case, parsed(words)) == "row tiles", words


@pytest.mark.parametrize("path", ["auto", "eager", "fused"])
def test_calls_without_a_meaning_are_refused_on_every_path(path):
    cases = [(call(sinks=torch.zeros(HEADS)), "linear", "sinks"), (CASES["decoding"](), "symmetric", "same tokens")]
    for words in ("window:9", "strided:4", "symmetric", "rbf+tied-key"):
        cases += [(call(tokens, 150, cross=True), words, "another sequence") for tokens in (30, 150)]
    if path != "fused":
        everything = torch.ones(1, 1, 30, 150, dtype=torch.bool)
        unplaced = call(30, 150), call(30, 150, allowed=everything), call(150, 30)
        cases += [(case, "window:9", "position of each query among the keys") for case in unplaced]
    for case, words, problem in cases:
        with pytest.raises(UsageError, match=problem):
            attend(case, parsed(words), path)


def in_cache(case, start, stop, **more):
    """The queries start … stop − 1 with the keys before stop."""
    query, key, value = case.query[:, :, start:stop], case.key[:, :, :stop], case.value[:, :, :stop]
    return replace(case, query=query, key=key, value=value, **more)


@pytest.mark.parametrize("words", ["window:9", "sink-window:3,9", "strided:8", "rbf+window:9", "rbf", "elu+hybrid:9"])
@pytest.mark.parametrize("padded", [0, 13])
def test_decoding_with_either_cache_is_the_row_of_the_whole(words, padded, monkeypatch):
    monkeypatch.setattr(rows, "TILE_BYTES", 1)  # sixteen rows
    kernel, tokens = parsed(words), 60
    whole, mask = call(tokens, batch=1), tril(tokens, tokens)
    mask[..., :padded] = False
    expected = attend(replace(whole, allowed=mask), kernel)
    room = [torch.cat([x, 5 * torch.ones_like(x[:, :, :30])], dim=2) for x in (whole.key, whole.value)]
    for start, stop in ((40, 41), (40, 55)):
        seen = mask[..., start:stop, :stop]
        dynamic = in_cache(whole, start, stop, allowed=seen)
        static = torch.nn.functional.pad(seen, (0, tokens + 30 - stop))
        for case in (dynamic, replace(dynamic, key=room[0], value=room[1], allowed=static)):
            for path in PATHS:
                assert apart(attend(case, kernel, path), expected[:, start:stop]) <= 1e-12
    if not padded:
        assert apart(attend(in_cache(whole, 59, 60), kernel), expected[:, 59:]) <= 1e-12


def test_counting_from_the_start_is_refused_where_a_sliding_window_hides_it(monkeypatch):
    """A cache of the last 21 keys, or a mask that hides the others; padding and full layers hide no start."""
    monkeypatch.setattr(rows, "TILE_BYTES", 1)
    whole, kernel, mask = call(60, batch=1), parsed("sink-window:3,9"), sliding(60)
    expected = attend(replace(whole, allowed=mask), kernel)
    chunk = in_cache(whole, 40, 55, allowed=mask[..., 40:55, :55])
    one = in_cache(whole, 54, 55)
    one = replace(one, key=one.key[:, :, 34:], value=one.value[:, :, 34:])
    own, of_config, full = (torch.nn.Module() for _ in range(3))
    own.sliding_window, full.sliding_window = 20, None
    of_config.config = full.config = SimpleNamespace(sliding_window=20)
    for case, path in itertools.product((chunk, replace(one, module=own), replace(one, module=of_config)), PATHS):
        with pytest.raises(UsageError, match="own sliding window hides where the text begins"):
            attend(case, kernel, path)
        for words in ("window:9", "strided:8"):
            same = attend(replace(whole, allowed=mask), parsed(words))[:, 55 - case.query.shape[2] : 55]
            assert apart(attend(case, parsed(words), path), same) <= 1e-12
    for module in (own, of_config, full):
        assert torch.equal(attend(replace(whole, allowed=mask, module=module), kernel), expected)
    where = rows.positions(call(allowed=right_padded(150)), kernel.filter)
    assert torch.equal(where.query[0], torch.arange(150))
    assert not bool(where.first.any())
    plain = replace(chunk, allowed=tril(60, 60)[..., 40:55, :55], module=full)
    assert apart(attend(plain, kernel), attend(replace(whole, causal=True), kernel)[:, 40:55]) <= 1e-12


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def long_call(tokens, *, training=False):
    case = call(tokens, batch=1, dtype=torch.float32, causal=True)
    return replace(case, query=case.query.requires_grad_(training))


@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_grows_with_queries_times_keys(training):
    paths = {"polynomial": "auto", "rbf": "eager", "elu": "auto", "rbf+window:9": "auto", "elu+hybrid:9": "auto"}
    for words, path in paths.items():
        largest = []
        for tokens in (512, 1024):
            with torch.set_grad_enabled(training), Largest() as mode:
                result = attend(long_call(tokens, training=training), parsed(words), path)
                if training:
                    result.sum().backward()
            largest.append(mode.elements)
        assert largest[1] <= min(2.1 * largest[0], HEADS * 1024 * max(16, 2 * DIM)), words
    with Largest() as control:
        weights(long_call(1024), OWN)
    assert control.elements >= HEADS * 1024**2


def test_tensors_saved_for_the_backward_pass_stay_linear_and_a_band_reads_only_the_keys_in_reach():
    for words in ("polynomial", "elu", "rbf+window:9", "elu+hybrid:9"):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):  # noqa: B023
            attend(long_call(1024, training=True), parsed(words))
        assert sum(saved) < HEADS * 1024**2 / 2
    with Largest() as mode:
        banded = attend(long_call(2048), parsed("rbf+window:9"))
    assert mode.elements <= HEADS * 64 * 4 * 64 * 8  # never a row tile × all keys
    assert apart(banded, attend(long_call(2048), parsed("rbf+window:9"), "eager").double()) <= 1e-5


FLEX = [
    *(("causal", "polynomial:degree=2,offset=1", {}), ("bias", "polynomial", {}), ("grouped heads", "window:9", {})),
    *(("left padding, causal", "taylor", {}), ("left padding, causal", "sink-window:3,9", {})),
    *(("chunk of a cache", "strided:8", {}), ("right padding", "polynomial+tied-key", {})),
    ("causal", "exponential", {"softcap": 2.0}),
]


def test_flex_attention_computes_the_same_sum_and_compiles_a_block_mask_under_its_limits(monkeypatch):
    """In plain torch. Without the limits, after a few kinds of masks, torch would silently build all pairs."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    create, limits = scores.create_block_mask, []

    def record(*args, **options):
        limits.append((torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit))
        return create(*args, **options)

    monkeypatch.setattr(scores, "create_block_mask", record)
    for name, words, more in FLEX:
        case = CASES[name](dtype=torch.float32, **more)
        result = scores.by_scores(case, parsed(words), compiled=False).transpose(1, 2)
        assert apart(result, dense(case, parsed(words))) <= 1e-5, words
    assert set(limits) == {(scores.LIMITS["recompile_limit"], True)}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_flex_attention_compiled_is_the_same_sum():
    """For a CPU, whose kernel lacks grouped heads, biases and caches."""
    case = CASES["left padding, causal"](dtype=torch.float32)
    kernel = parsed("polynomial:degree=2,offset=1+sink-window:3,9")
    from torch._inductor import config

    # in this process, and without another compilation that tries whether g++ knows the processor
    with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        result = scores.by_scores(case, kernel).transpose(1, 2)
    assert apart(result, dense(case, kernel)) <= 1e-5
    assert apart(result, dense(case, parsed("polynomial:degree=2,offset=1+window:9"))) > 0.01, "the control"


ONE_GRAPH = """
import torch
from attnlens.kernels import parsed

for words in ("exponential", "polynomial:degree=4,offset=1", "taylor"):
    kernel, values = parsed(words), torch.linspace(-3, 3, 12)
    compiled = torch.compile(lambda x: kernel.info.function(x, **kernel.parameters), backend="eager", fullgraph=True)
    assert torch.equal(compiled(values), kernel.info.function(values, **kernel.parameters))
    print(words)
"""


def test_the_formula_of_a_kernel_of_the_score_is_one_graph():
    """What torch cannot compile, FlexAttention on a GPU would compute with a matrix of all pairs.

    In a process of its own, since type checks of the tests import torch for the kernels.
    """
    run = python("-c", ONE_GRAPH)
    assert run.stdout.count("\n") == 3, run.stderr
