"""Tests that every kernel is its formula, that its fit is the best for a head, and how kernels are spelled."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import attention_calls
import pytest
import torch
from heads import random
from hypothesis import given
from hypothesis import strategies as st

from attnlens.errors import UsageError
from attnlens.kernels import FILTERS, TIES, Kernel, kernels, parsed
from attnlens.kernels.pair_weights import pairs_weighted
from attnlens.maths.ksvd import orthogonal_draws
from attnlens.records import Call

SCALE = 0.4
NAMES = [name for name, info in kernels().items() if info.form != "output" and info.oracle is None]
"""Kernels of a query and a key; nearest reads both of each token, and has its own tests."""
VARIANTS = [name if name != "rank" else "rank:3" for name in NAMES]
VARIANTS += ["rank:99", "rbf:gamma=2", "polynomial:degree=4,offset=1.5", "polynomial:degree=3,offset=-1"]
VARIANTS += ["taylor:order=3", "taylor:order=12", "laplacian:0.3", "cosine:2.5", "random-features:count=7,seed=5"]
FITTED = ["rbf", "rbf:gamma=0.2", "rbf:gamma=1", "polynomial", "polynomial:degree=4", "cosine", "rank:3"]
PAIRWISE = [name for name, tie in TIES.items() if tie.part is None]


def product(q, k, s):
    return s * torch.einsum("bhid,bhjd->bhij", q, k)


def pairs(q, k):
    return q[..., :, None, :], k[..., None, :, :]


def by_features(phi):
    return lambda q, k, s, **p: torch.mul(*pairs(phi(q * s**0.5, **p), phi(k * s**0.5, **p))).sum(-1)


def performer(x, count, seed):
    omega = orthogonal_draws(count, x.shape[-1], seed)
    return torch.exp((x[..., None, :] * omega).sum(-1) - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(count)


def hedgehog(q, k, s, count, query_weight, key_weight):
    """Σ_l of the products of two softmaxes, one feature after another."""
    assert count == 2 * query_weight.shape[1]
    total = 0.0
    for sign in (1, -1):
        sides = []
        for x, weight in ((q, query_weight), (k, key_weight)):
            powers = [(sign * s**0.5 * (x * row[:, None]).sum(-1)).exp() for row in weight.unbind(1)]
            sides.append([power / sum(powers) for power in powers])
        total = total + sum(a[..., :, None] * b[..., None, :] for a, b in zip(*sides, strict=True))
    return total.log()


def series(q, k, s, order):
    return sum(product(q, k, s) ** n / math.factorial(n) for n in range(order + 1))


NAIVE = {
    "exponential": product,
    "polynomial": lambda q, k, s, degree, offset: ((product(q, k, s) + offset) ** degree).abs().log(),
    "taylor": lambda *a, **p: series(*a, **p).abs().log(),
    "linear": lambda q, k, s: product(q, k, s).abs().log(),
    "hard": product,
    "rbf": lambda q, k, s, gamma: -gamma * s * torch.sub(*pairs(q, k)).square().sum(-1),
    "laplacian": lambda q, k, s, gamma: -gamma * s * torch.sub(*pairs(q, k)).abs().sum(-1),
    "intersection": lambda q, k, s: s * torch.minimum(*pairs(q, k)).sum(-1),
    "l2": lambda q, k, s: (s * torch.sub(*pairs(q, k)).norm(dim=-1)).log(),
    "cosine": lambda q, k, s, beta: beta * torch.cosine_similarity(*pairs(q, k), dim=-1),
    "elu": lambda *a: by_features(lambda x: torch.where(x > 0, x + 1, x.exp()))(*a).log(),
    "relu": lambda *a: by_features(lambda x: x.clamp(min=0) + 0.001)(*a).log(),
    "random-features": lambda *a, **p: by_features(performer)(*a, **p).log(),
    "learned-features": hedgehog,
    "uniform": lambda q, k, s: torch.zeros_like(product(q, k, s)),
    "rank": lambda q, k, s, rank, group, rotation, metric, query_map, key_map: product(
        torch.einsum("bhid,hdr->bhir", q, query_map), torch.einsum("bhid,hdr->bhir", k, key_map), s
    ),
}


def drawn(seed=0, batch=2, queries=9, keys=11, head_dim=8, dtype=torch.float64, size=1.5):
    """Queries and keys of three heads far from uniform attention, the keys with a mean that softmax ignores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 3, n, head_dim) for n in (queries, keys))
    q, k = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype), (k + torch.linspace(-1, 1, head_dim).double()).to(dtype)


def known(words: str) -> Kernel:
    """The kernel, fitted to other queries and keys if it needs a fit; learned maps moved apart from each other."""
    kernel = parsed(words, allow_signed=True)
    kernel = fitted(words) if kernel.info.needs_fit else kernel
    if kernel.info.name != "learned-features":
        return kernel
    draw = torch.Generator().manual_seed(3)
    return kernel.with_fitted({n: p + torch.randn(p.shape, generator=draw) for n, p in kernel.fitted.items()})


def fitted(words, *batches, scale=SCALE, **more) -> Kernel:
    batches = batches or [(*drawn(7, queries=30, keys=40), None)]
    calls = [Call(q, k, torch.zeros_like(k), scale, allowed, **more) for q, k, allowed in batches]
    return attention_calls.fitted(words, *calls)


def centred(values, allowed=None):
    """Each row minus its mean over the allowed keys."""
    weight = torch.ones_like(values) if allowed is None else allowed.to(values).expand_as(values)
    return (values - (values * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)) * weight


def energy(values, allowed=None):
    return centred(values, allowed).square().sum((0, 2, 3))


def naive(kernel: Kernel, q, k):
    return NAIVE[kernel.info.name](q.double(), k.double(), SCALE, **kernel.parameters, **kernel.fitted)


@pytest.mark.parametrize("words", VARIANTS)
def test_log_k_is_its_formula_in_every_dtype_with_its_sign_and_symmetry(words):
    kernel, (q, k) = known(words), drawn()
    log = kernel.log(q, k, SCALE)
    assert log.shape == (2, 3, 9, 11)
    torch.testing.assert_close(log, naive(kernel, q, k), rtol=1e-10, atol=1e-10)
    assert (centred(log).abs().max() > 0.3) == kernel.info.reads
    rows, columns = slice(2, 6), slice(1, 9)
    torch.testing.assert_close(kernel.log(q, k, SCALE, rows=rows, columns=columns), log[..., rows, columns])
    other = kernel.log(q, k + 0.1 * torch.linspace(-1, 1, 11, dtype=k.dtype)[:, None], SCALE)
    assert ((centred(log) - centred(other)).abs().max() > 1e-3) == kernel.info.reads
    assert kernel.signed == (words in ("linear", "polynomial:degree=3,offset=-1", "taylor:order=3"))
    assert kernel.signed or kernel.info.positive
    if kernel.signed:
        sign, x = kernel.sign(q, k, SCALE), product(q, k, SCALE)
        assert sign.unique().tolist() == [-1, 1]
        whole = {"linear": x, "polynomial": (x - 1) ** 3, "taylor": series(q, k, SCALE, 3)}[kernel.info.name]
        torch.testing.assert_close(sign * log.exp(), whole)
    same, untied = kernel.log(q, q, SCALE).nan_to_num(neginf=-700.0), kernel.log(q, k[:, :, :9], SCALE)
    # a fitted rank that cuts nothing is the exponential kernel
    assert ((same - same.mT).abs().max() < 1e-9) == (kernel.info.symmetric or words == "rank:99")
    assert ((untied - untied.mT).abs().max() > 0.1) == kernel.info.reads
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = drawn(dtype=dtype)
        log = kernel.log(q, k, SCALE)
        assert log.isfinite().all()
        if dtype == torch.float32 or kernel.info.form != "score":  # half precision is lost in the score alone
            assert dtype != torch.float32 or log.dtype == dtype
            torch.testing.assert_close(log.softmax(-1).double(), naive(kernel, q, k).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("words", [*(words for words in VARIANTS if words != "uniform"), "fitted rbf", "fitted cosine"])
def test_gradients_of_log_k_and_dot_products_are_those_of_the_formula(words):
    kernel = fitted(words.split()[-1]) if "fitted" in words else known(words)
    q, k = (x.requires_grad_() for x in drawn())
    log = kernel.log(q, k, SCALE)
    ours = torch.autograd.grad(log.softmax(-1).square().sum(), (q, k))
    assert ours[1].abs().max() > 1e-3
    if "fitted" not in words:
        theirs = torch.autograd.grad(naive(kernel, q, k).softmax(-1).square().sum(), (q, k))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    if kernel.info.dot:
        dots = kernel.info.dot(q, k, SCALE, **kernel.parameters, **kernel.fitted)
        fused = product(*dots)
        theirs = torch.autograd.grad(fused.softmax(-1).square().sum(), (q, k))
        torch.testing.assert_close((centred(fused), *theirs), (centred(log), *ours), rtol=1e-10, atol=1e-10)
        assert centred(fused).abs().max() > 1
        assert words != "rank:3" or dots[0].shape[-1] == 3, "the dots of a rank are smaller"
    for dtype in (torch.float32, torch.bfloat16):  # finite where it is hardest
        q, k = drawn(queries=11, size=4.0, dtype=dtype)
        q[:, :, 0], k[:, :, 1] = 0.0, 0.0
        k[:, :, 3:6] = q[:, :, 3:6]
        log = kernel.log(q.requires_grad_(), k.requires_grad_(), SCALE)
        log.softmax(-1)[..., 1].sum().backward()
        assert all(x.isfinite().all() for x in (log, log.softmax(-1), q.grad, k.grad))


@pytest.mark.parametrize("words", ["rbf", "rbf:gamma=2", "rbf+symmetric"])
def test_rbf_measures_the_whole_distance_from_its_fitted_origin(words):
    (q, k), kernel = drawn(keys=9), fitted(words)
    origin, gamma = kernel.fitted["origin"], kernel.parameters["gamma"]
    distance = torch.cdist(q + origin[:, None], k).square()
    distance = (distance + distance.mT) / 2 if kernel.tie else distance
    log = kernel.log(q, k, SCALE)
    torch.testing.assert_close(log, -gamma * SCALE * distance)
    # the control: without b in the query's own term, rows of log k + its transpose differ by more than a constant
    lost = log + gamma * SCALE * (2 * (q * origin[:, None]).sum(-1))[..., None]
    assert (lost + lost.mT - log - log.mT).std() > 0.1
    if not kernel.tie:
        log = kernel.log(q, q, SCALE)
        assert (log - log.mT).abs().max() > 0.1, "an origin makes rbf asymmetric"


def test_kernels_of_features_are_positive_semidefinite_and_their_maps_multiply_to_them_token_by_token():
    q, _ = drawn(queries=40)
    for name in ("exponential", "rbf", "laplacian", "intersection", "cosine", "elu", "relu", "polynomial"):
        log = parsed(name).log(q, q, SCALE)
        half = log.diagonal(dim1=-2, dim2=-1)[..., None] / 2
        # scaled to unit diagonal: definiteness doesn't change, and nothing overflows
        assert torch.linalg.eigvalsh((log - half - half.mT).exp()).min() > -1e-12, name
        assert parsed(name).info.features != "none"
    assert torch.linalg.eigvalsh(parsed("l2").log(q[:, :, :20], q[:, :, :20], SCALE).exp()).min() < -1
    assert parsed("l2").info.features == "none"
    for words in ("linear", "elu", "relu", "random-features", "learned-features:6"):
        kernel, (q, k) = known(words), drawn()
        sign = kernel.sign(q, k, SCALE) if kernel.signed else 1
        key = kernel.phi(k, SCALE, "key")
        torch.testing.assert_close(kernel.phi(q, SCALE, "query") @ key.mT, sign * kernel.log(q, k, SCALE).exp())
        torch.testing.assert_close(kernel.phi(k[..., 2:5, :], SCALE, "key"), key[..., 2:5, :])
    assert parsed("exponential").info.feature_map is None


def test_in_half_precision_rbf_splits_its_key_term():
    q, k = drawn(dtype=torch.bfloat16, head_dim=64, queries=40, keys=50)
    queries, keys, scale = parsed("rbf").info.dot(q, k, SCALE, gamma=0.5)
    assert queries.dtype == keys.dtype == torch.bfloat16
    assert queries.shape[-1] == keys.shape[-1] == 66
    exact = parsed("rbf").log(q.double(), k.double(), SCALE)
    dots = [product(queries[..., :width].double(), keys[..., :width].double(), scale) for width in (66, 65)]
    split, alone = (centred(dot - exact).abs().max() for dot in dots)
    assert split < alone / 50
    assert alone > 0.1


def test_identities_between_kernels():
    q, k = drawn()
    x = product(q, k, SCALE)
    assert x.abs().max() > 6
    orders = [parsed(f"taylor:{n}").log(q, k, SCALE).softmax(-1) for n in (10, 20, 30, 60)]
    errors = [(weights - x.softmax(-1)).abs().max() for weights in orders]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1 > 1e-12 > errors[-1], "the series becomes the exponential, in float32 too"
    single = parsed("taylor:60").log(q.float(), k.float(), SCALE)
    torch.testing.assert_close(single.softmax(-1), x.softmax(-1).float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(single[x.abs() < 8], x[x.abs() < 8].float(), rtol=0, atol=1e-5)
    on_sphere = k / k.norm(dim=-1, keepdim=True) * 4
    for words, key, equal in (("rbf", k, False), ("rbf", on_sphere, True), ("rbf:gamma=1", on_sphere, False)):
        error = (centred(parsed(words).log(q, key, SCALE)) - centred(product(q, key, SCALE))).abs().max()
        assert error < 1e-12 if equal else error > 1, "rbf is exponential if key lengths are equal, and only then"
    gated = parsed("laplacian:0.5").log(q, k, SCALE) + SCALE / 2 * torch.add(*pairs(q, k)).sum(-1)
    torch.testing.assert_close(parsed("intersection").log(q, k, SCALE), gated)
    # Tsai et al. 2019, Eq. 9: the kernel of concatenated content and position is the product of their kernels
    content, position = drawn(1), drawn(2)
    both = [torch.cat(sides, -1) for sides in zip(content, position, strict=True)]
    for words, holds in (("exponential", True), ("rbf", True), ("polynomial", False)):
        whole, first, second = (parsed(words).log(*sides, SCALE) for sides in (both, content, position))
        assert ((whole - first - second).abs().max() < 1e-12) == holds


def test_conventions_of_single_kernels():
    q, k = drawn()
    x, zero = product(q, k, SCALE), torch.zeros(1, 1, 4, 8)
    for words in ("polynomial", "linear", "l2", "relu", "cosine", "taylor"):  # rows of zeros are uniform
        assert torch.equal(parsed(words).log(zero, zero, SCALE).softmax(-1), torch.full((1, 1, 4, 4), 0.25)), words
    assert torch.equal(parsed("linear").sign(zero, zero, SCALE), torch.ones(1, 1, 4, 4))
    for words in ("polynomial:degree=2", "taylor:order=4"):  # even powers and orders have no negative sign
        assert not parsed(words).signed
        assert (parsed(words).sign(q, k, SCALE) == 1).all()
    assert (x < 0).any()
    capped = (x / 2).tanh() * 2
    torch.testing.assert_close(parsed("exponential").log(q, k, SCALE, softcap=2.0), capped)
    torch.testing.assert_close(parsed("polynomial").log(q, k, SCALE, softcap=2.0), capped.square().log())
    assert torch.equal(parsed("linear").sign(q, k, SCALE, softcap=2.0), capped.sign())
    assert (capped - x).abs().max() > 1
    for words in ("taylor:64", "polynomial:64", f"random-features:16,{2**63 - 1}", "random-features:65536"):
        assert parsed(words).log(q / 3, k / 3, SCALE).isfinite().all(), "the largest numbers allowed are computed"
    for words in (f"window:{2**31}", f"sink-window:{2**31},{2**31}", f"strided:{2**31}"):
        assert parsed(words).filter.keeps(torch.arange(5), torch.arange(5)).all()
    orthogonal_draws.cache_clear()
    with torch.inference_mode():
        parsed("random-features:5").log(q, k, SCALE)
    parsed("random-features:5").log(q.clone().requires_grad_(), k, SCALE).sum().backward()  # the draws can be cached


def test_random_features_are_unbiased_orthogonal_and_never_overflow():
    q, k = drawn(size=0.3)
    exact = product(q, k, SCALE).exp()
    draws = torch.stack([parsed(f"random-features:8,{seed}").log(q, k, SCALE).exp() for seed in range(1500)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact).abs() / error).max() < 5
    assert (exact - exact.mean()).abs().max() > 10 * error.max()
    more = parsed("random-features:4096").log(q, k, SCALE).exp()
    assert (more / exact - 1).abs().mean() < (draws[0] / exact - 1).abs().mean() / 4
    omega = orthogonal_draws(20, 8, 0)
    for block in (omega[:8], omega[8:16]):
        torch.testing.assert_close(block @ block.mT, block.square().sum(-1).diag())
    assert (omega[:8] @ omega[8:16].mT).abs().max() > 0.1
    for size in (0.0, 10.0, 1e3):
        assert parsed("random-features").log(q.float() * size, k.float() * size, SCALE).isfinite().all()


def test_learned_features_begin_as_random_ones_of_either_sign_and_never_overflow():
    """Σ_l e^{⟨ω_l, x⟩} is about m e^{‖x‖²/2}, by which the softmax divides, so that k is Performer's over m²."""
    q, k = drawn(size=0.3)
    exact = product(q, k, SCALE)
    many, few = (energy(fitted(f"learned-features:{n}").log(q, k, SCALE) - exact).mean() for n in (4096, 16))
    assert many < 0.1 * energy(exact).mean()
    assert few > 3 * many, "the control"
    for size in (0.0, 10.0, 1e3, 1e6):
        phi = fitted("learned-features").phi(q.float() * size, SCALE, "query")
        torch.testing.assert_close(phi.sum(-1), torch.full(phi.shape[:-1], 2.0))
    start = [fitted("learned-features:6", (*drawn(seed), None)).fitted for seed in (0, 9)]
    assert all(torch.equal(part, start[1][name]) for name, part in start[0].items()), "the start reads shapes alone"
    weight = start[0]["query_weight"]
    assert weight.shape == (3, 3, 8)
    torch.testing.assert_close(weight[0] @ weight[0].mT, weight[0].square().sum(-1).diag())


def causal(n, padding=0):
    """Lower triangle; the last `padding` tokens of sequence 1 neither see nor are seen."""
    allowed = torch.ones(n, n, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    allowed[1, :, n - padding :] = allowed[1, :, :, n - padding :] = False
    return allowed


@pytest.mark.parametrize("words", FITTED)
def test_a_fit_is_nearer_on_unseen_text_ignores_hidden_tokens_and_adds_up(words):
    q, k = drawn(3, queries=60, keys=60, size=1.0)
    logits, kernel = product(q, k, SCALE), parsed(words)
    trained = fitted(words, (*drawn(4, queries=60, keys=60, size=1.0), causal(60)))
    before = logits if kernel.info.needs_fit else logits - kernel.log(q, k, SCALE)
    assert (energy(logits - trained.log(q, k, SCALE), causal(60)) < energy(before, causal(60))).all()
    q, k = drawn(5, queries=24, keys=24)
    other_q, other_k = q.clone(), k.clone()
    other_q[1, :, 20:], other_k[1, :, 20:] = 1e4, -1e4
    allowed = causal(24, padding=4)
    hidden = fitted(words, (other_q, other_k, allowed)).fitted
    seen = fitted(words, (other_q, other_k, causal(24))).fitted
    halves = fitted(words, *((q[[b]], k[[b]], allowed[[b]]) for b in (0, 1))).fitted
    for name, value in fitted(words, (q, k, allowed)).fitted.items():
        assert value.shape[0] == 3
        torch.testing.assert_close((hidden[name], halves[name]), (value, value))
        assert (seen[name] - value).abs().max() > 1e-3
    q, k = drawn(14, queries=50, keys=50)
    left = fitted(words, (q, k, None)).log(q, k, SCALE) - product(q, k, SCALE)
    assert energy(left).sum() > 0.02 * energy(product(q, k, SCALE)).sum(), "no fit makes it the exponential kernel"


@pytest.mark.parametrize("gamma", [0.3, 0.5, 2.0])
def test_the_origin_is_the_least_squares_one_for_any_gamma(gamma):
    """The naive regression: every allowed pair is a row of one tall matrix, weighted half by attention, half evenly."""
    q, k = drawn(8, queries=14, keys=14)
    allowed, words = causal(14, padding=3), f"rbf:gamma={gamma}"
    counts = allowed.sum(-1, keepdim=True)
    attention = product(q, k, SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    weight = torch.where((counts >= 2) & allowed, attention / 2 + 1 / (2 * counts), 0.0)

    def around(values):
        mean = (weight * values).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1e-9)
        return weight.sqrt() * (values - mean)

    target = around(product(q, k, SCALE) - parsed(words).log(q, k, SCALE))
    slopes = torch.stack([around((2 * gamma * SCALE * k[..., None, :, d]).expand_as(target)) for d in range(8)])
    for head in range(3):
        solution = torch.linalg.lstsq(slopes[:, :, head].flatten(1).mT, target[:, head].flatten()[:, None]).solution
        torch.testing.assert_close(fitted(words, (q, k, allowed)).fitted["origin"][head], solution[:, 0])


def test_polynomial_finds_the_best_offset():
    """Of 1,600 tried one by one; with scores of −1.1 … 1.1 the error is smooth near its least value."""
    q, k = drawn(9, queries=32, keys=32, size=0.3)
    best = fitted("polynomial", (q, k, causal(32))).fitted["offset_of_head"]
    logits, steps = product(q, k, SCALE), torch.logspace(-2, 3, 800).double()

    def error(offset):
        return energy(logits - 2 * (logits + offset).abs().log(), causal(32))

    offsets = torch.cat([-steps, steps])
    errors = torch.stack([error(offset) for offset in offsets])
    assert (error(best[:, None, None]) < 1.01 * errors.amin(0)).all()
    torch.testing.assert_close(best, offsets[errors.argmin(0)], rtol=0.05, atol=0)
    assert (errors.median(0).values > 10 * errors.amin(0)).all()
    assert all((error(factor * best[:, None, None]) > 1.1 * errors.amin(0)).all() for factor in (0.8, 1.25))
    # with scores of 15 … 25, (x − 18)² rises as steeply as the exponential; no positive offset comes near
    q, k = drawn(15, queries=60, keys=60, size=0.5)
    q[..., 0] = k[..., 0] = 7.0
    trained, exact = fitted("polynomial", (q, k, None)), product(q, k, SCALE)
    assert (trained.fitted["offset_of_head"] < -10).all()
    assert (energy(trained.log(q, k, SCALE) - exact) < 0.3 * energy(exact)).all()


def test_cosine_finds_its_beta_where_lengths_are_equal_and_none_below_zero():
    """With keys (cos t, sin t) / cos² t, the logits of the query e₁ are 1 / cos t, and fall as the cosine rises."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in drawn(10, queries=20, keys=20))
    lengths = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    trained = fitted("cosine", (q * lengths[:, None, None], k * lengths[:, None, None], None))
    torch.testing.assert_close(trained.fitted["beta_of_head"], SCALE * lengths**2)
    t = torch.linspace(0, 1.2, 20, dtype=torch.float64)
    around = torch.nn.functional.pad(torch.stack([t.cos(), t.sin()], -1), (0, 6))
    q, k = torch.eye(8, dtype=torch.float64)[:1], around / t.cos()[:, None] ** 2
    keys = torch.stack([k, around, k[:1].expand(20, -1)]).expand(1, -1, -1, -1)
    beta = fitted("cosine", (q.expand(1, 3, 20, 8), keys, None)).fitted["beta_of_head"]
    assert beta.tolist() == [0, pytest.approx(SCALE), 0], "falling; rising with it; all keys equal"


@pytest.mark.parametrize("sinks", [None, torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64)])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_rank_r_loses_least_where_the_head_attends(rank, sinks):
    """tr(C_q E C_k Eᵀ), E = 1 − ABᵀ, is the sum of the squared singular values left out; maps nearby lose more."""
    q, k = drawn(11, batch=1, queries=12, keys=12)
    trained, even = (fitted(f"rank:{rank}", (q, k, None), sinks=sinks, scale=s).fitted for s in (SCALE, 1e-12))
    if sinks is None:  # where attention is even, all pairs count alike, and the fit is that of Eckart and Young
        logits = product(q, k, SCALE)
        left = energy(logits - parsed(f"rank:{rank}").with_fitted(even).log(q, k, SCALE))
        torch.testing.assert_close(left, torch.linalg.svdvals(centred(logits))[0, :, rank:].square().sum(-1))
    scores = product(q, k, SCALE)[0].exp()
    total = scores.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    draw = torch.Generator().manual_seed(rank)
    for head in range(3):
        weight, keys = scores[head] / total[head] / 2 + 1 / 24, k[0, head]
        of_queries, of_keys = q[0, head].mT @ q[0, head], torch.zeros(8, 8, dtype=torch.float64)
        for row in weight:  # what a row of weights leaves of 1 is the weight of a key at 0
            mean = (row / row.sum()) @ keys if sinks is None else row @ keys
            of_keys += (keys - mean).mT @ (row[:, None] * (keys - mean)) + (1 - row.sum()) * torch.outer(mean, mean)

        def lost(a, b, of_queries=of_queries, of_keys=of_keys):
            error = torch.eye(8, dtype=torch.float64) - a @ b.mT
            return float((of_queries @ error @ of_keys @ error.mT).trace())

        a, b = trained["query_map"][head], trained["key_map"][head]
        values = torch.linalg.eigvals(of_queries @ of_keys).real.sort(descending=True).values
        assert lost(a, b) == pytest.approx(float(values[rank:].sum()), rel=1e-6)
        moves = [0.02 * x.abs().mean() * torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (a, b)]
        assert min(lost(a + moves[0], b), lost(a, b + moves[1])) > lost(a, b)
        assert lost(even["query_map"][head], even["key_map"][head]) > 1.001 * lost(a, b), "the weights matter"


def test_pairs_are_weighted_by_the_attention_of_the_head_itself():
    """½ of a naive softmax with softcap, bias and sink, ½ even; each of the three changes it."""
    q, k = drawn(16, queries=9, keys=9)
    bias, sinks = random(1, 3, 9, 9, seed=2), torch.tensor([-1.0, 1.0, 3.0]).double()
    more = {"softcap": 2.0, "bias": bias, "sinks": sinks}
    weighted = pairs_weighted(Call(q, k, k, SCALE, causal(9), **more))
    for batch, head, i in itertools.product(range(2), range(3), range(1, 9)):
        scores = 2 * torch.tanh(k[batch, head, : i + 1] @ q[batch, head, i] * SCALE / 2)
        terms = (scores + bias[0, head, i, : i + 1]).exp()
        share = terms / (terms.sum() + sinks[head].exp())
        torch.testing.assert_close(weighted[batch, head, i, : i + 1], share / 2 + 0.5 / (i + 1))
    assert not weighted.triu(1).any()
    assert not weighted[:, :, 0].any(), "the first query has no choice"
    for name in more:
        other = pairs_weighted(Call(q, k, k, SCALE, causal(9), **{**more, name: None}))
        assert (other - weighted).abs().max() > 0.05


def test_a_rank_of_head_dim_is_the_model_itself_outside_the_calibration_text_and_needs_a_fit():
    (q, k), narrow = drawn(12), drawn(13, queries=20, keys=20)
    narrow[0][..., 5:] = 0.0
    torch.testing.assert_close(fitted("rank:8", (*narrow, None)).log(q, k, SCALE), product(q, k, SCALE))
    cut = fitted("rank:7", (*narrow, None)).fitted
    assert all(value.isfinite().all() for value in cut.values())
    assert cut["query_map"][:, 5:].abs().max() < 1e-9
    for words in ("rank:4", "learned-features:4"):
        with pytest.raises(UsageError, match="must be fitted"):
            parsed(words).log(q, k, SCALE)


@st.composite
def spellings(draw):
    """A kernel with any parameters that it takes, with a pairwise tie and a filter or without, in any order."""

    def spell(name, parameters):
        words, named = [], draw(st.booleans())
        for p in parameters:
            if p.words:
                value = draw(st.sampled_from([word for word, _ in p.words]))
            elif p.kind is float:
                value = draw(st.floats(min_value=-1e30 if p.above is None else 1e-30, max_value=1e30))
            else:
                step = 2 if p.even else p.multiple_of
                value = step * draw(st.integers(-(-int(p.low) // step), int(p.high) // step))
            words.append((f"{p.name}=" * named + repr(value)).replace("'", ""))
        return f"{name}:{','.join(words)}" if words else name

    info = draw(st.sampled_from([info for info in kernels().values() if info.oracle is None]))
    pairwise = info.form != "output"
    key_filter = draw(st.sampled_from([None, *FILTERS.values()])) if pairwise else None
    tie = draw(st.sampled_from([None, *PAIRWISE])) if pairwise and info.prepare is None else None
    parts = [spell(info.name, info.parameters), tie, key_filter and spell(key_filter.name, key_filter.parameters)]
    return draw(st.permutations([part for part in parts if part])), tie, key_filter


@given(spellings())
def test_a_spelling_is_read_back_and_order_does_not_matter(case):
    parts, tie, key_filter = case
    kernel = parsed("+".join(parts))
    again = parsed(kernel.spelling)
    assert (again, again.spelling) == (kernel, kernel.spelling)
    assert (kernel.tie, kernel.filter and kernel.filter.modifier) == (tie, key_filter)


def test_spellings_are_short_and_name_only_unusual_parameters():
    for words, spelling in {
        **{"rbf": "rbf:gamma=0.5", "rbf:1e+3": "rbf:gamma=1000", "polynomial:4,1": "polynomial:degree=4,offset=1"},
        **{"window:64": "window:64", "symmetric + sink-window:4,64": "symmetric+sink-window:4,64"},
        **{"rank:3": "rank:rank=3", "rank:3,all": "rank:rank=3,group=all"},
        "rank:rank=3,group=2": "rank:rank=3,group=2",
        "rank:3,all,before,output": "rank:rank=3,group=all,rotation=before,metric=output",
        **{"exponential+skewless": "skewless", "mercer+rbf": "rbf:gamma=0.5+mercer"},
    }.items():
        assert parsed(words).spelling == parsed(spelling).spelling == spelling
    assert "skewless: " + TIES["skewless"].formula in parsed("skewless").formula


REFUSED = [
    ("Unknown kernel 'rbff'", "Did you mean 'rbf'", "rbff"),
    ("Unknown kernel 'windw'", "Did you mean 'window'", "rbf+windw:3"),
    ("Unknown kernel 'hybrd'", "Did you mean 'hybrid'", "elu+hybrd:4"),
    ("Unknown kernel 'polinomial'", "Did you mean 'polynomial'", "polinomial:2"),
    ("Unknown kernel ''", "Choose from: exponential", ""),
    ("rbf has no parameter 'sigma'", "Write rbf:gamma=0.5;", "rbf:sigma=1"),
    ("gamma must be a number, not 'wide'", "rbf:gamma=0.5", "rbf:gamma=wide"),
    ("gamma must be finite and above 0, not", "", "rbf:gamma=0", "rbf:gamma=nan", "rbf:gamma=inf", "laplacian:0"),
    ("beta must be finite and above 0, not 0", "cosine:beta=8", "cosine:0"),
    ("offset must be finite, not inf", "polynomial:offset=0", "polynomial:offset=inf"),
    ("rbf takes one parameter, so '2' is not allowed", "rbf:gamma=0.5", "rbf:1,2"),
    ("polynomial takes 2 parameters, so '3' is not allowed", "polynomial:degree=2,offset=0", "polynomial:2,1,3"),
    ("takes no parameters, so '2' is not allowed", "without parameters", "exponential:2", "symmetric:2"),
    ("the parameter gamma is given more than once", "rbf:gamma=0.5", "rbf:1,gamma=2"),
    ("degree must be a whole number, not '2.5'", "polynomial:degree=2", "polynomial:degree=2.5"),
    ("With an odd `degree`, `polynomial` can be negative", "allow_signed=True", "polynomial:degree=3"),
    ("With an odd `order`, `taylor` can be negative", "allow_signed=True", "taylor:5"),
    ("count must be a multiple of 2, not 7", "learned-features:count=64", "learned-features:7"),
    ("must be at least 1, not 0", "Write ", "polynomial:0", "taylor:0", "random-features:0", "rank:0", "rank:3,0"),
    ("must be at least 1, not ", "Write", "window:-1", "strided:0", "sink-window:0,4", "elu+hybrid:0", "primal:0"),
    ("must be at least ", "Write ", "learned-features:0", "random-features:seed=-1", "primal:4,-1"),
    ("must be at most 64, not", "Write ", "taylor:order=66", "polynomial:66", "taylor:order=99999999998"),
    ("must be at most 65536", "Write ", "random-features:65537", "learned-features:65538", "rank:65537"),
    ("must be at most 65536", "Write ", "rank:3,65537", "primal:65537", "primal:4,65537"),
    ("seed must be at most 9223372036854775807", "seed=0", "random-features:seed=9223372036854775808"),
    ("must be at most 2147483648", "", "window:2147483649", "strided:2147483649", f"window:1{'0' * 400}"),
    ("sinks must be at most 2147483648", "sink-window:4,64", "sink-window:2147483649,4"),
    ("group must be a whole number, not 'some'", "", "rank:3,group=some"),
    ("rotation must be after or before, not 'sideways'", "", "rank:3,rotation=sideways"),
    ("metric must be attention or output, not '2'", "", "rank:3,metric=2"),
    ("rank needs the parameter rank", "rank:rank=…", "rank"),
    ("window needs the parameter width", "window:64", "window"),
    ("primal needs the parameter scores", "", "primal"),
    ("hybrid needs the parameter width", "Write, for example, hybrid:64;", "elu+hybrid"),
    ("sink-hybrid needs the parameter width", "Write, for example, sink-hybrid:4,64;", "elu+sink-hybrid:4"),
    ("nearest needs the parameter part", "", "nearest"),
    ("symmetric or positive or no-key or no-skew", "", "nearest:skew"),
    ("fitted or oracle", "", "nearest:positive,guess"),
    ("more than one kernel", "one --kernel for each", "rbf+linear"),
    ("more than one tie", "one --kernel for each", "symmetric+tied-key", "symmetric+mercer"),
    ("more than one filter", "one --kernel for each", "window:3+strided:4"),
    ("more than one hybrid", "one --kernel for each", "elu+hybrid:4+hybrid:5"),
    ("`linear` can be negative", "Choose one of elu, relu", "linear+hybrid:4"),
    ("`exponential` is not a kernel of positive features", "learned-features, as in elu+hybrid:8.", "hybrid:8"),
    ("is not a kernel of positive features", "learned-features.", "rbf+hybrid:4", "primal:4+hybrid:4"),
    ("`window` cannot be combined", "Leave out `window`", "elu+hybrid:4+window:9"),
    ("`tied-key` cannot be combined", "Leave out `tied-key`", "elu+tied-key+hybrid:4"),
    ("cannot be combined with the parameter `group`", "Leave out `symmetric`, or `group`", "rank:3,group=2+symmetric"),
    ("`window` hides some", "Leave out `window`", "skewless+window:4"),
    ("`elu` is a sum over features", "Write `keyless` alone", "elu+keyless"),
    ("`linear` can be negative", "Write `mercer` alone", "linear+mercer"),
    ("`hard` picks one key", "Write `negativeless` alone", "hard+negativeless"),
    ("tied or filtered", "Write `primal` alone", "primal:4+window:3", "primal:4+symmetric", "primal:4+skewless"),
    ("already determines", "Leave out `symmetric`", "nearest:positive+symmetric", "nearest:positive,oracle+symmetric"),
    ("`nearest:positive,oracle` needs every pair", "Leave out `window`", "nearest:positive,oracle+window:8"),
]


def test_senseless_words_are_refused_with_a_remedy():
    for problem, remedy, words in ((problem, remedy, words) for problem, remedy, *row in REFUSED for words in row):
        with pytest.raises(UsageError) as refusal:
            parsed(words)
        assert problem in refusal.value.problem, words
        assert remedy in refusal.value.remedy, words
        assert "\n" not in refusal.value.problem + refusal.value.remedy


def test_ties_of_pairs_compute_their_formula_with_any_kernel_and_filters_keep_what_theirs_say():
    q, k = drawn(keys=9)
    for tie, words in itertools.product(PAIRWISE, ("rbf", "polynomial", "elu", "laplacian")):
        kernel, plain = parsed(f"{words}+{tie}"), parsed(words)
        own = plain.log(q, k, SCALE)
        tied = {"tied-query": plain.log(q, q, SCALE), "tied-key": plain.log(k, k, SCALE)}.get(tie, (own + own.mT) / 2)
        torch.testing.assert_close((kernel.log(q, k, SCALE), tied), (tied, tied.mT))
        tile = kernel.log(q, k, SCALE, rows=slice(1, 4), columns=slice(2, 9))
        torch.testing.assert_close(tile, tied[..., 1:4, 2:9])
        with pytest.raises(UsageError, match="same tokens"):
            kernel.log(*drawn(), SCALE)
    keys = torch.tensor([0, 1, 2, 3, 4, 7])  # and a query at 4
    rows = {"window:2": [3, 4], "sink-window:1,2": [0, 3, 4], "strided:3": [1, 2, 3, 4, 7], "strided:2": [0, 2, 3, 4]}
    for words, row in rows.items():
        assert keys[parsed(words).filter.keeps(torch.tensor([4]), keys)[0]].tolist() == row, words


def test_facts_are_complete_and_need_no_torch():
    assert set(NAIVE) == set(NAMES), "every kernel has a naive definition here"
    for info in kernels().values():
        assert all((info.formula, info.source, *(parameter.meaning for parameter in info.parameters))), info.name
        assert info.meaning.endswith("."), info.name
    script = "import sys; from attnlens.kernels import kernels; kernels(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
