"""Tests the number of features that attention needs, against loops, and two networks that learn a planted kernel."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from experiment_words import assert_in_words
from heads import query_key, random

import attnlens
from attnlens.analyzers import extra
from attnlens.lab.experiments import binary_kernel as binary
from attnlens.lab.reproduce import ROWS
from attnlens.maths import linalg
from attnlens.maths.linalg import spectra
from attnlens.runs.progress import silent

N = 9
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()[None]
MASKS = {"all": None, "causal": CAUSAL, "window": CAUSAL.triu(-3)}


def heads(mask="causal", size=1.0, n=N, **rest):
    """Three heads on one key head each."""
    query, key = size * random(3, n, 4), random(3, n, 4, seed=1) + 0.3
    return query_key(query, key, "tokens", scale=0.6, allowed=MASKS[mask], **rest)


def rows_of(qk, head):
    """The keys that each query sees and its scores, for queries with a choice."""
    for i in range(N):
        keys = torch.arange(N) if qk.allowed is None else qk.allowed[0, i].nonzero()[:, 0]
        x = qk.scale * qk.key[qk.key_of[head]][keys] @ qk.query[head, i]
        if len(keys) >= 2:
            yield i, keys, x if qk.softcap is None else torch.tanh(x / qk.softcap) * qk.softcap


def variation(first, second):
    return float((first / first.sum() - second / second.sum()).abs().sum() / 2)


def naive_order(qk, head, error, largest, centred):
    sink = torch.empty(0, dtype=torch.float64) if qk.sinks is None else qk.sinks[head : head + 1]
    for order in range(0, largest + 1, 2):
        apart = []
        for i, keys, x in rows_of(qk, head):
            bias = torch.zeros_like(x) if qk.bias is None else qk.bias[head, i][keys]
            own = torch.cat([x + bias, sink]).exp()
            shift = (x + bias).mean() if centred else torch.zeros(()).double()
            used, factor = (x + bias - shift, 1.0) if centred else (x, bias.exp())
            series = sum(used**n / float(math.factorial(n)) for n in range(order + 1))
            apart.append(variation(torch.cat([series * factor, (sink - shift).exp()]), own))
        if sum(apart) / len(apart) <= error:
            return order
    return math.nan


BIAS, SINKS = random(3, N, N, seed=5), random(3, seed=6)
EXTRAS = [{}, {"softcap": 2.0}, {"bias": BIAS}, {"sinks": SINKS}, {"sinks": SINKS, "bias": BIAS + 2}]


@pytest.mark.parametrize("centred", [False, True])
def test_the_order_is_that_of_loops(centred):
    errors = itertools.cycle((0.02, 0.1))  # of five extras: each meets both
    for (mask, more), error in zip(itertools.product(MASKS, EXTRAS), errors, strict=False):
        qk = heads(mask, size=2.0, **more)
        order = linalg.taylor_order(qk, error, 30, centred=centred)
        expected = [naive_order(qk, head, error, 30, centred) for head in range(3)]
        assert order.tolist() == pytest.approx(expected, nan_ok=True, abs=0), (mask, more, error)


def test_the_order_rises_with_the_logits_and_terms_of_the_query_move_it_and_not_the_centred_one():
    orders = torch.stack([linalg.taylor_order(heads(size=size), 0.1, 64) for size in (0.001, 0.5, 2.0, 4.0)])
    assert orders[0].tolist() == [0, 0, 0], "tiny scores: even attention suffices"
    assert bool((orders.diff(dim=0) >= 0).all())
    assert bool((orders[-1] > 10).all())
    for size in (100.0, 1e200):  # nor does an overflow stand in for one
        assert linalg.taylor_order(heads(size=size), 0.1, 64).isnan().all()
    qk = heads(size=0.5)
    moved = replace(qk, key=qk.key - 8 * random(3, 1, 4, seed=7))
    torch.testing.assert_close(moved.attention, qk.attention, rtol=1e-9, atol=1e-12)
    centred = [linalg.taylor_order(one, 0.1, 64, centred=True).tolist() for one in (qk, moved)]
    assert centred[0] == centred[1]
    assert bool((linalg.taylor_order(moved, 0.1, 64) > linalg.taylor_order(qk, 0.1, 64)).any()), "the control"


def test_float64_is_enough_for_every_order():
    """Exact fractions give the same order for scores at which the alternating sum loses most digits."""
    logits = [0.0, -5.0, -12.0, -18.0, -24.0, -30.0]
    own = torch.tensor(logits).double().exp()

    def exact(order):
        series = [sum(Fraction(x) ** n / math.factorial(n) for n in range(order + 1)) for x in logits]
        return torch.tensor([float(k / sum(series)) for k in series]).double()

    expected = next(order for order in range(0, 200, 2) if variation(exact(order), own) <= 0.1)
    qk = query_key(torch.ones(1, 1, 1).double(), torch.tensor(logits).double().view(1, -1, 1), "tokens", scale=1.0)
    assert linalg.taylor_order(qk, 0.1, 200).tolist() == [expected]
    assert expected > 64


def classes(count, **rest):
    """Token t has the class t mod count and attends only to its class: exp of the scores has `count` distinct rows."""
    unit = torch.eye(count, dtype=torch.float64)[torch.arange(24) % count][None]
    return query_key(40.0 * unit, unit, "tokens", scale=1.0, **rest)


def test_the_rank_is_the_number_of_distinct_rows_and_hidden_pairs_cost_none():
    for count in (2, 3, 6):
        assert torch.linalg.matrix_rank(classes(count).attention[0]) == count
        assert linalg.feature_rank(classes(count), 0.1).tolist() == [count]
    for count in (3, 6):
        qk = classes(count, allowed=torch.ones(24, 24, dtype=torch.bool).tril()[None])
        assert 2 <= linalg.feature_rank(qk, 0.1).item() <= count + 1, "the value is an upper bound"
        values = torch.linalg.svdvals(qk.attention[0])
        assert int((values > 0.05).sum()) == 24, "the control: P, zero where hidden, is of full rank"
    ones, key = torch.ones(1, N, 1).double(), 2 * random(1, N, 1, seed=3)
    steep = 5 * torch.arange(N, dtype=torch.float64).view(1, N, 1)  # attention to the last key
    for keys, allowed, error in (*((key, mask, 0.01) for mask in MASKS.values()), (steep, CAUSAL, 0.05)):
        qk = query_key(ones, keys, "tokens", scale=1.0, allowed=allowed)
        assert linalg.feature_rank(qk, error).tolist() == [1], "attention by the key alone"


def naive_apart(kernel, qk, head):
    """The mean total variation of K_ij/Σ_j K_ij from attention, row by row; 1 if the sum is not above 0."""
    apart = []
    for i, keys, x in rows_of(qk, head):
        row = kernel[i, keys]
        apart.append(min(1.0, variation(row, x.exp())) if row.sum() > 0 else 1.0)
    return sum(apart) / len(apart)


def naive_rank(qk, head, error, steps=60):
    """Hard imputation from several starts with whole singular value decompositions, and every rank in turn."""
    shown, own = torch.ones(N, N).bool() if qk.allowed is None else qk.allowed[0], qk.attention[head]
    fills = [torch.zeros(N, N).double(), own.mean(0).expand(N, N), torch.full((N, N), 1 / N).double()]
    for m, fill in itertools.product(range(1, N + 1), fills):
        filled = torch.where(shown, own, fill)
        for _ in range(steps):
            left, values, right = torch.linalg.svd(filled)
            low = left[:, :m] * values[:m] @ right[:m]
            if naive_apart(low, qk, head) <= error:
                return m
            filled = torch.where(shown, own, low)
    return N


@pytest.mark.parametrize(
    "mask", ["window", *(pytest.param(mask, marks=pytest.mark.full) for mask in ("all", "causal"))]
)
def test_the_rank_is_near_that_of_a_longer_search(mask):
    qk = heads(mask, size=2.0)
    ranks = linalg.feature_rank(qk, 0.1).tolist()
    longer = [naive_rank(qk, head, 0.1) for head in range(3)]
    assert all(0 <= ours - theirs <= 2 for ours, theirs in zip(ranks, longer, strict=True)), (ranks, longer)
    assert max(ranks) > 2
    visible = torch.ones(N, N).double() if MASKS[mask] is None else MASKS[mask][0].double()
    for head, own in enumerate(qk.attention):
        kernel = (own + 0.2 * random(N, N, seed=head)).double()
        error = spectra._kernel_error(kernel, own, visible)
        assert error == pytest.approx(naive_apart(kernel, qk, head), abs=1e-12), "the error behind the rank"
        assert error > 0.01


def test_masks_per_head_batches_and_shared_keys_change_nothing():
    qk = heads("causal", size=2.0)
    twice = {name: getattr(qk, name).expand(2, -1, -1, -1) for name in ("query", "key")}
    shared = query_key(2 * random(2, N, 4), random(1, N, 4, seed=1), "tokens", scale=0.6, allowed=CAUSAL)
    own = replace(shared, key=shared.key.expand(2, -1, -1), key_of=(0, 1))
    for first, second in ((qk, replace(qk, allowed=CAUSAL.expand(2, 3, N, N), **twice)), (shared, own)):
        other = extra.count_features(second)
        for name, reading in extra.count_features(first).items():
            expected = reading.expand(other[name].shape)
            torch.testing.assert_close(other[name], expected, equal_nan=True, msg=name)


def test_sinks_take_their_share_and_queries_without_a_choice_have_no_value():
    sinks = heads("causal", size=2.0, sinks=torch.full((3,), 50.0).double())
    assert linalg.feature_rank(sinks, 0.1).tolist() == [1, 1, 1], "a sink that takes all leaves nothing to reproduce"
    assert max(linalg.feature_rank(heads("causal", size=2.0), 0.1).tolist()) > 1, "the control"
    only = replace(heads(), allowed=torch.eye(N, dtype=torch.bool)[None])
    assert all(reading.isnan().all() for reading in extra.count_features(only).values())
    for n, m in ((5, 12), (12, 5)):
        qk = query_key(random(2, n, 4), random(2, m, 4, seed=1), "tokens", part="cross", scale=1.0)
        assert bool((linalg.feature_rank(qk, 0.1) <= 5).all())


def test_the_null_has_the_head_s_mean_and_covariance_and_selective_heads_need_more_features():
    qk = query_key(random(2, 2000, 3) @ random(3, 3, seed=1) + 2, random(2, 2000, 3, seed=2) - 1, "tokens")
    drawn = linalg.gaussian_like(qk)
    for own, other in ((qk.query, drawn.query), (qk.key, drawn.key)):
        assert (own.mean(-2) - other.mean(-2)).abs().max() < 0.15
        for head in range(2):
            assert (own[head].mT.cov() - other[head].mT.cov()).abs().max() < 0.3
            assert abs(torch.corrcoef(torch.stack((own[head, :, 0], other[head, :, 0])))[0, 1]) < 0.1
    assert torch.equal(drawn.query, linalg.gaussian_like(qk).query)
    place = 2 * math.pi * torch.arange(48).double() / 48
    turn = torch.stack([f(k * place) for k in range(1, 9) for f in (torch.cos, torch.sin)], -1)[None]
    causal = torch.ones(48, 48, dtype=torch.bool).tril()[None]
    local, even = (
        extra.count_features(query_key(size * turn, turn, "tokens", scale=3.0, allowed=causal)) for size in (1, 0.001)
    )
    assert local["features.rank"] > local["features.rank_by_chance"] > 1
    assert even["features.rank"] == even["features.rank_by_chance"] == 1
    assert even["features.taylor_order"] == 0
    far = query_key(turn, turn + 3, "tokens", scale=1.0, allowed=causal)  # a part of the scores is equal for all keys
    order, centred = (extra.count_features(far)[f"features.{name}"] for name in ("taylor_order", "centred_order"))
    assert centred == linalg.taylor_order(far, extra.ERROR, extra.LARGEST, centred=True) < order


def test_inspect_measures_every_head_with_errors_or_a_reason():
    report = attnlens.inspect("demo", analyzers="features", windows=2, length=32, layers=[0])
    assert len(report.heads) == 8
    for head in report.heads:
        assert set(head.measures) == {info.name for info in extra.FEATURES}
        rank = head.measures["features.rank"]
        assert 1 <= rank.value <= 32
        assert rank.se is not None
        for name in ("features.taylor_order", "features.centred_order"):
            order = head.measures[name]
            assert order.reason == extra.BEYOND if order.value is None else 0 <= order.value <= 64


SMALL = (8, 16, 32, 64), 60
"""Points of each domain, and steps."""


@pytest.fixture(scope="module")
def fits():
    return binary.build_fits(2, 24, binary.WIDTHS, 0)


def test_the_planted_kernel_is_its_formula_and_the_bounds_are_those_of_explicit_nearest_matrices(fits):
    x, y = (side[1] for side in fits.points)
    R = binary._rotation(torch.Generator().manual_seed(1))
    torch.testing.assert_close(R @ R.mT, torch.eye(2).double())
    expected = (-torch.cdist(x[:3], y[:3] @ R.mT).square() / (2 * 0.7**2)).exp()
    torch.testing.assert_close(fits.known[1, :3, :3], expected, rtol=1e-12, atol=0)
    for matrix in fits.truth:
        assert (matrix - matrix.mT).norm() > 0.3 * matrix.norm(), "not symmetric"
        assert torch.linalg.eigvalsh((matrix + matrix.mT) / 2)[0] < -1, "nor definite"
    matrix = fits.truth[0]
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    nearest = vectors * values.clamp(min=0) @ vectors.mT
    assert float(binary.definite_floor(matrix)) == pytest.approx(float((matrix - nearest).norm() / matrix.norm()))
    for seed in range(5):
        other = nearest + 0.1 * (factor := random(256, 3, seed=seed)) @ factor.mT
        assert (matrix - other).norm() > (matrix - nearest).norm()
    assert float(binary.definite_floor(nearest)) < 1e-10, "the control: a definite kernel has no floor"
    left, sigma, right = torch.linalg.svd(matrix)
    for m, best in zip((2, 8), binary.best_errors(matrix, (2, 8)), strict=True):
        low = left[:, :m] * sigma[:m] @ right[:m]
        assert float(best) == pytest.approx(float((matrix - low).norm() / matrix.norm()), rel=1e-10)


def test_one_network_is_a_definite_matrix_of_its_rank_and_two_are_not(fits):
    for networks in (1, 2):
        kernel = binary._kernel(binary._learn(fits, 20, networks), fits.widths, fits.grid, fits.grid)
        for at, m in enumerate(fits.widths):
            ranks = torch.linalg.svdvals(kernel[0, at])
            assert ranks[m:].max() < 1e-10 * ranks[0]
        lowest = torch.linalg.eigvalsh((kernel + kernel.mT) / 2)[..., 0]
        assert bool(((kernel - kernel.mT).abs() < 1e-10).all()) == (networks == 1)
        assert bool((lowest > -1e-9).all()) == (networks == 1)


@pytest.mark.parametrize("quick", [SMALL, pytest.param(binary.QUICK, marks=pytest.mark.full)], ids=["small", "quick"])
def test_the_experiment_passes_and_its_three_inequalities_hold(quick, monkeypatch):
    monkeypatch.setattr(binary, "QUICK", quick)
    stages = []
    width, samples = both = binary.binary_kernel(True, 0, lambda *words: stages.append(words))
    for experiment in both:
        assert experiment.passed is True
        assert_in_words(experiment)
    assert stages[-1][1:] == (5, 5)
    for m in binary.WIDTHS:
        assert width.final[f"best_m{m}"] <= width.final[f"two_m{m}"] < width.final["floor"] <= width.final[f"one_m{m}"]
    assert samples.final["two_n64"] == width.final["two_m32"] < samples.final["two_n8"]
    assert set(width.published) == {"two_above_best", "two_below_floor", "one_above_floor"}


def test_a_seed_reproduces_and_trials_and_widths_are_independent(fits):
    two = fits.errors(30, shared=False)
    assert torch.equal(two, binary.build_fits(2, 24, binary.WIDTHS, 0).errors(30, shared=False))
    alone = binary.build_fits(1, 24, binary.WIDTHS[-1:], 1).errors(30, shared=False)
    torch.testing.assert_close(alone[0, 0], two[1, -1], rtol=1e-4, atol=0)
    assert two[0, -1] != two[1, -1]


def test_two_networks_fail_as_one_does_an_untrained_one_fails_and_the_experiment_is_a_row_of_verify(monkeypatch):
    monkeypatch.setattr(binary, "QUICK", ((6, 24), 60))
    learn = binary._learn
    monkeypatch.setattr(binary, "_learn", lambda fits, steps, networks: learn(fits, steps, 1))
    shared = binary.binary_kernel(True)[0]
    assert shared.passed is False, "the control: one network in the place of two"
    assert shared.meets("two_below_floor") is False
    monkeypatch.setattr(binary, "_learn", lambda fits, steps, networks: learn(fits, 1, networks))
    row, again = ROWS[-4](True, 5, silent), binary.binary_kernel(True, 5)
    assert [experiment.name for experiment in row] == ["binary kernel by width", "binary kernel by samples"]
    assert row == again
    assert again[0].meets("two_below_floor") is False
