"""Tests how many features a head's attention needs, against loops, and two networks that learn a planted kernel."""

import math
from dataclasses import replace

import pytest
import torch
from experiment_words import assert_in_words
from heads import query_key, random

import attnlens
from attnlens.analyzers import extra
from attnlens.lab.experiments import binary_kernel as binary
from attnlens.lab.reproduce import ROWS
from attnlens.maths import linalg
from attnlens.runs.progress import silent

N = 9
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()[None]
MASKS = {"all": None, "causal": CAUSAL, "window": CAUSAL.triu(-3)}


def heads(mask="causal", size=1.0, n=N, **rest):
    """Three heads on one key head each."""
    query, key = size * random(3, n, 4), random(3, n, 4, seed=1) + 0.3
    return query_key(query, key, "tokens", scale=0.6, allowed=MASKS[mask], **rest)


# --- by loops ---------------------------------------------------------------------------------------------------------


def seen(given, head, i):
    whole = given.allowed is None
    return [j for j in range(given.key.shape[-2]) if whole or given.allowed[min(head, len(given.allowed) - 1), i, j]]


def scores(given, head, i, keys):
    key = given.key[given.key_of[head]]
    found = [given.scale * float(given.query[head, i] @ key[j]) for j in keys]
    if given.softcap is not None:
        found = [math.tanh(x / given.softcap) * given.softcap for x in found]
    return found


def series(x, order):
    return math.fsum(x**n / math.factorial(n) for n in range(order + 1))


def variation(kernels, own, biases, sink, shift=0.0):
    """½Σ|p̂ − p| of one query, the sink a key of its own."""
    first = [k * math.exp(b) for k, b in zip(kernels, biases, strict=True)]
    second = [math.exp(x + b) for x, b in zip(own, biases, strict=True)]
    if sink is not None:
        first, second = [*first, math.exp(sink - shift)], [*second, math.exp(sink)]
    return sum(abs(a / sum(first) - b / sum(second)) for a, b in zip(first, second, strict=True)) / 2


def naive_order(given, head, error, largest, centred):
    for order in range(0, largest + 1, 2):
        apart = []
        for i in range(N):
            keys = seen(given, head, i)
            if len(keys) < 2:
                continue
            own = scores(given, head, i, keys)
            bias = [0.0] * len(keys) if given.bias is None else [float(given.bias[head, i, j]) for j in keys]
            sink, shift, used = None if given.sinks is None else float(given.sinks[head]), 0.0, own
            if centred:
                own, bias = [x + b for x, b in zip(own, bias, strict=True)], [0.0] * len(keys)
                shift = sum(own) / len(own)
                used = [x - shift for x in own]
            apart.append(variation([series(x, order) for x in used], own, bias, sink, shift))
        if sum(apart) / len(apart) <= error:
            return order
    return math.nan


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": random(3, N, N, seed=5)},
    "sinks": {"sinks": random(3, seed=6)},
    "sinks and bias": {"sinks": random(3, seed=6), "bias": random(3, N, N, seed=5) + 2},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("centred", [False, True])
def test_the_order_is_what_loops_find(mask, extra, centred):
    given = heads(mask, size=2.0, **EXTRAS[extra])
    for error in (0.02, 0.1):
        found = linalg.taylor_order(given, error, 30, centred=centred)
        expected = [naive_order(given, head, error, 30, centred) for head in range(3)]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


def test_the_order_rises_with_the_logits_and_ends_at_the_largest():
    orders = torch.stack([linalg.taylor_order(heads(size=size), 0.1, 64) for size in (0.001, 0.5, 2.0, 4.0)])
    assert orders[0].tolist() == [0, 0, 0], "tiny scores: even attention does"
    assert bool((orders.diff(dim=0) >= 0).all())
    assert bool((orders[-1] > 10).all())
    assert linalg.taylor_order(heads(size=100.0), 0.1, 64).isnan().all()
    assert linalg.taylor_order(heads(size=1e200), 0.1, 64).isnan().all(), "nor does an overflow stand in for one"


def test_terms_of_the_query_move_the_order_and_not_the_centred_one():
    given = heads(size=0.5)
    moved = replace(given, key=given.key - 8 * random(3, 1, 4, seed=7))
    torch.testing.assert_close(moved.attention, given.attention, rtol=1e-9, atol=1e-12)
    centred = [linalg.taylor_order(one, 0.1, 64, centred=True).tolist() for one in (given, moved)]
    assert centred[0] == centred[1]
    plain = [linalg.taylor_order(one, 0.1, 64) for one in (given, moved)]
    assert bool((plain[1] > plain[0]).any()), "the control"


def test_float64_is_enough_for_every_order_that_is_asked_for():
    """Exact fractions find the same order where the alternating sum loses most."""
    from fractions import Fraction

    logits = [0.0, -5.0, -12.0, -18.0, -24.0, -30.0]
    expected = None
    own = [math.exp(x) for x in logits]
    for order in range(0, 200, 2):
        exact = [sum(Fraction(x) ** n / math.factorial(n) for n in range(order + 1)) for x in logits]
        apart = sum(abs(float(k / sum(exact)) - p / sum(own)) for k, p in zip(exact, own, strict=True)) / 2
        if apart <= 0.1:
            expected = order
            break
    given = query_key(torch.ones(1, 1, 1).double(), torch.tensor(logits).double().view(1, -1, 1), "tokens", scale=1.0)
    assert linalg.taylor_order(given, 0.1, 200).tolist() == [expected]
    assert expected > 64


# --- the rank ---------------------------------------------------------------------------------------------------------


def classes(count, n=24, sharpness=40.0, **rest):
    """Token t is of class t mod count, and attends to its own class alone: `count` distinct rows of exp scores."""
    unit = torch.eye(count, dtype=torch.float64)[torch.arange(n) % count][None]
    return query_key(sharpness * unit, unit, "tokens", scale=1.0, **rest)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_kernel_of_that_many_distinct_rows_has_that_rank(count):
    given = classes(count)
    assert torch.linalg.matrix_rank(given.attention[0]) == count
    assert linalg.feature_rank(given, 0.1).tolist() == [count]


@pytest.mark.parametrize("count", [3, 6])
def test_what_the_mask_hides_costs_no_features(count):
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None]
    given = classes(count, allowed=causal)
    found = linalg.feature_rank(given, 0.1).item()
    assert 2 <= found <= count + 1, "what is found is an upper bound"
    values = torch.linalg.svdvals(given.attention[0])
    assert int((values > 0.05).sum()) == 24, "the control: P, zero where hidden, is of full rank"


def test_attention_by_the_key_alone_has_rank_one_under_any_mask():
    key = random(1, N, 1, seed=3)
    for allowed in MASKS.values():
        given = query_key(torch.ones(1, N, 1).double(), 2 * key, "tokens", scale=1.0, allowed=allowed)
        assert linalg.feature_rank(given, 0.01).tolist() == [1]
    steep = 5 * torch.arange(N, dtype=torch.float64).view(1, N, 1)
    given = query_key(torch.ones(1, N, 1).double(), steep, "tokens", scale=1.0, allowed=CAUSAL)
    assert linalg.feature_rank(given, 0.05).tolist() == [1], "attention to the last key too"
    assert linalg.feature_rank(classes(3), 0.1).item() > 1, "the control"


def naive_apart(kernel, given, head):
    """The mean total variation of K_ij/Σ_j K_ij from attention, by loops; 1 where the sum is not above 0."""
    apart = []
    for i in range(N):
        keys = seen(given, head, i)
        if len(keys) < 2:
            continue
        own = [math.exp(x) for x in scores(given, head, i, keys)]
        row = [float(kernel[i, j]) for j in keys]
        if sum(row) <= 0:
            apart.append(1.0)
            continue
        apart.append(min(1.0, sum(abs(k / sum(row) - p / sum(own)) for k, p in zip(row, own, strict=True)) / 2))
    return sum(apart) / len(apart)


def naive_rank(given, head, error, steps=60):
    """Hard imputation from several starts with whole singular value decompositions, and every rank in turn."""
    shown = torch.tensor([[j in seen(given, head, i) for j in range(N)] for i in range(N)])
    own = given.attention[head]
    fills = [torch.zeros(N, N).double(), own.mean(0).expand(N, N), torch.full((N, N), 1 / N).double()]
    for m in range(1, N + 1):
        for fill in fills:
            filled = torch.where(shown, own, fill)
            for _ in range(steps):
                left, values, right = torch.linalg.svd(filled)
                low = left[:, :m] * values[:m] @ right[:m]
                if naive_apart(low, given, head) <= error:
                    return m
                filled = torch.where(shown, own, low)
    return N


@pytest.mark.parametrize("mask", MASKS)
def test_the_rank_is_near_what_a_longer_search_finds(mask):
    given = heads(mask, size=2.0)
    found = linalg.feature_rank(given, 0.1).tolist()
    longer = [naive_rank(given, head, 0.1) for head in range(3)]
    assert all(0 <= ours - theirs <= 2 for ours, theirs in zip(found, longer, strict=True)), (found, longer)
    assert max(found) > 2


def test_the_error_behind_the_rank_is_the_one_of_loops():
    from attnlens.maths.linalg import spectra

    given = heads("causal", size=2.0)
    for head in range(3):
        kernel = (given.attention[head] + 0.2 * random(N, N, seed=head)).double()
        visible = CAUSAL[0].double()
        ours = spectra._kernel_error(kernel, given.attention[head], visible)
        assert ours == pytest.approx(naive_apart(kernel, given, head), abs=1e-12)
        assert ours > 0.01


def test_a_mask_of_its_own_for_each_head_and_batches_change_nothing():
    given = heads("causal", size=2.0)
    twice = replace(
        given,
        query=given.query.expand(2, -1, -1, -1),
        key=given.key.expand(2, -1, -1, -1),
        allowed=CAUSAL.expand(2, 3, N, N),
    )
    for name, reading in extra.count_features(given).items():
        torch.testing.assert_close(extra.count_features(twice)[name], reading.expand(2, 3), equal_nan=True, msg=name)


def test_sinks_take_their_share_and_keys_shared_by_heads_are_paired():
    sinks = heads("causal", size=2.0, sinks=torch.full((3,), 50.0).double())
    assert linalg.feature_rank(sinks, 0.1).tolist() == [1, 1, 1], "a sink that takes all leaves nothing to reproduce"
    assert max(linalg.feature_rank(heads("causal", size=2.0), 0.1).tolist()) > 1, "the control"
    shared = query_key(2 * random(2, N, 4), random(1, N, 4, seed=1), "tokens", scale=0.6, allowed=CAUSAL)
    own = replace(shared, key=shared.key.expand(2, -1, -1), key_of=(0, 1))
    for name, reading in extra.count_features(shared).items():
        torch.testing.assert_close(extra.count_features(own)[name], reading, equal_nan=True, msg=name)


def test_cross_attention_has_values_whatever_its_lengths():
    for n, m in ((5, 12), (12, 5)):
        given = query_key(random(2, n, 4), random(2, m, 4, seed=1), "tokens", part="cross", scale=1.0)
        for name, reading in extra.count_features(given).items():
            assert reading.shape == (2,)
            assert bool((reading <= min(n, m)).all()) or "rank" not in name
            assert not reading.isnan().any()


def test_queries_that_see_one_key_give_no_value():
    given = heads()
    only = replace(given, allowed=torch.eye(N, dtype=torch.bool)[None])
    for reading in extra.count_features(only).values():
        assert reading.isnan().all()


def test_the_null_has_the_heads_mean_and_covariance_and_none_of_its_order():
    given = query_key(random(2, 4000, 3) @ random(3, 3, seed=1) + 2, random(2, 4000, 3, seed=2) - 1, "tokens")
    drawn = linalg.gaussian_like(given)
    for first, second in ((given.query, drawn.query), (given.key, drawn.key)):
        assert (first.mean(-2) - second.mean(-2)).abs().max() < 0.15
        for head in range(2):
            assert (first[head].mT.cov() - second[head].mT.cov()).abs().max() < 0.3
            assert abs(torch.corrcoef(torch.stack((first[head, :, 0], second[head, :, 0])))[0, 1]) < 0.1
    again = linalg.gaussian_like(given)
    assert torch.equal(drawn.query, again.query)


def test_selective_heads_need_more_than_their_null_and_even_ones_do_not():
    n = 48
    place = 2 * math.pi * torch.arange(n).double() / n
    turn = torch.stack([f(k * place) for k in range(1, 9) for f in (torch.cos, torch.sin)], -1)[None]
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None]
    local = extra.count_features(query_key(turn, turn, "tokens", scale=3.0, allowed=causal))
    even = extra.count_features(query_key(0.001 * turn, turn, "tokens", scale=3.0, allowed=causal))
    assert local["features.rank"] > local["features.rank_by_chance"] > 1
    assert even["features.rank"].tolist() == even["features.rank_by_chance"].tolist() == [1]
    assert even["features.taylor_order"].tolist() == [0]


def test_inspect_says_it_of_every_head_with_errors_or_why_not():
    report = attnlens.inspect("demo", analyzers="features", windows=2, length=48)
    assert len(report.heads) == 32
    for head in report.heads:
        assert set(head.measures) == {info.name for info in extra.FEATURES}
        rank = head.measures["features.rank"]
        assert 1 <= rank.value <= 48
        assert rank.se is not None
        for name in ("features.taylor_order", "features.centred_order"):
            found = head.measures[name]
            assert found.reason == extra.BEYOND if found.value is None else 0 <= found.value <= 64
    plain = attnlens.inspect("demo", source="tokens", windows=1, length=16)
    assert not any(name.startswith("features.") for name in plain.measure_names()), "only where it is asked for"


# --- the planted kernel -----------------------------------------------------------------------------------------------

FEW = (6, 24), 200


@pytest.fixture(scope="module")
def fits():
    return binary.build_fits(2, 24, binary.WIDTHS, 0)


def test_the_planted_kernel_is_its_formula_and_neither_symmetric_nor_definite(fits):
    x, y = (side[1] for side in fits.points)
    R = binary._rotation(torch.Generator().manual_seed(1))
    torch.testing.assert_close(R @ R.mT, torch.eye(2).double())
    for i in range(3):
        for j in range(3):
            expected = math.exp(-float((x[i] - R @ y[j]).square().sum()) / (2 * 0.7**2))
            assert float(fits.known[1, i, j]) == pytest.approx(expected, rel=1e-12)
    for matrix in fits.truth:
        assert (matrix - matrix.mT).norm() > 0.3 * matrix.norm()
        assert torch.linalg.eigvalsh((matrix + matrix.mT) / 2)[0] < -1


def test_the_bounds_are_those_of_explicit_nearest_matrices(fits):
    matrix = fits.truth[0]
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    nearest = vectors * values.clamp(min=0) @ vectors.mT
    floor = binary.definite_floor(matrix)
    assert float(floor) == pytest.approx(float((matrix - nearest).norm() / matrix.norm()), rel=1e-12)
    for seed in range(5):
        other = nearest + 0.1 * (factor := random(256, 3, seed=seed)) @ factor.mT
        assert (matrix - other).norm() > (matrix - nearest).norm()
    left, sigma, right = torch.linalg.svd(matrix)
    for m, best in zip((2, 8), binary.best_errors(matrix, (2, 8)), strict=True):
        low = left[:, :m] * sigma[:m] @ right[:m]
        assert float(best) == pytest.approx(float((matrix - low).norm() / matrix.norm()), rel=1e-10)
    assert float(binary.definite_floor(nearest)) < 1e-10, "the control: a definite kernel has no floor"


def test_one_network_is_a_definite_matrix_of_its_rank_and_two_are_not(fits):
    for networks in (1, 2):
        sides = binary._learn(fits, 20, networks)
        found = binary._kernel(sides, fits.widths, fits.grid, fits.grid)
        for at, m in enumerate(fits.widths):
            ranks = torch.linalg.svdvals(found[0, at])
            assert ranks[m:].max() < 1e-10 * ranks[0]
        lowest = torch.linalg.eigvalsh((found + found.mT) / 2)[..., 0]
        symmetric = bool(((found - found.mT).abs() < 1e-10).all())
        assert symmetric == (networks == 1)
        assert bool((lowest > -1e-9).all()) == (networks == 1)


def test_quick_passes_and_its_three_inequalities_hold():
    told = []
    found = binary.binary_kernel(True, 0, lambda *words: told.append(words))
    assert [one.passed for one in found] == [True, True]
    for one in found:
        assert_in_words(one)
    assert told[-1][1:] == (5, 5)
    width, samples = (one.final for one in found)
    for m in binary.WIDTHS:
        assert width[f"best_m{m}"] <= width[f"two_m{m}"] < width["floor"] <= width[f"one_m{m}"]
    assert samples["two_n64"] == width["two_m32"] < samples["two_n8"]
    assert set(found[0].published) == {"two_above_best", "two_below_floor", "one_above_floor"}


def test_a_seed_reproduces_and_trials_and_widths_know_nothing_of_each_other(fits):
    again = binary.build_fits(2, 24, binary.WIDTHS, 0)
    two = fits.errors(30, shared=False)
    assert torch.equal(two, again.errors(30, shared=False))
    alone = binary.build_fits(1, 24, binary.WIDTHS[-1:], 1).errors(30, shared=False)
    torch.testing.assert_close(alone[0, 0], two[1, -1], rtol=1e-4, atol=0)
    assert two[0, -1] != two[1, -1]


def test_two_networks_fail_as_one_does_and_an_untrained_one_fails(monkeypatch):
    monkeypatch.setattr(binary, "QUICK", FEW)
    learned = binary._learn
    monkeypatch.setattr(binary, "_learn", lambda fits, steps, networks: learned(fits, steps, 1))
    shared = binary.binary_kernel(True)[0]
    assert shared.passed is False, "the control: one network in the place of two"
    assert shared.meets("two_below_floor") is False
    monkeypatch.setattr(binary, "_learn", lambda fits, steps, networks: learned(fits, 1, networks))
    assert binary.binary_kernel(True)[0].meets("two_below_floor") is False


def test_it_is_a_row_of_verify(monkeypatch):
    monkeypatch.setattr(binary, "QUICK", FEW)
    found, again = ROWS[-4](True, 5, silent), binary.binary_kernel(True, 5)
    assert [one.name for one in found] == ["binary kernel by width", "binary kernel by samples"]
    assert found == again
