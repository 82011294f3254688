"""Tests that measures of long sequences, computed in tiles, equal those of the whole matrices or are missing."""

from collections import Counter
from importlib import import_module

import numpy as np
import pytest
import torch
from heads import query_key, random
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens.analyzers import ksvd, spectrum, symmetry
from attnlens.maths import linalg
from attnlens.maths.linalg import long as tiled
from attnlens.maths.linalg.long import IntervalMask, TiledMatrix, find_intervals, least_rank, split_tiles

T = 240
ALL, PLACE = torch.ones(T, T, dtype=torch.bool), torch.arange(T)
MASKS = {
    **{"all": None, "causal": ALL.tril(), "window": ALL.tril().triu(-40), "local": ALL.tril(30).triu(-30)},
    "documents": ALL.tril() & (PLACE < 100).eq((PLACE < 100)[:, None]),
    "prefix": ALL.tril() | (PLACE < 50),
    "an empty row": ALL.tril(-1),
}
SMALL = tiled.SMALL


@pytest.fixture(autouse=True)
def _by_lanczos(monkeypatch):
    """Without this, matrices of these sizes would be decomposed as a whole."""
    monkeypatch.setattr(tiled, "SMALL", 0)


@pytest.fixture
def long(monkeypatch):
    """A function that calls another one as if every sequence were long, in tiles of a few rows."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr("attnlens.maths.linalg.long.LONG", 0)
            patch.setattr("attnlens.maths.linalg.long.TILE", 37 * T)
            return function(*args)

    return call


def heads(name="causal", size=3.0, batch=(2,), **rest):
    """Two sequences of heads whose attention is far from even."""
    mask = MASKS[name]
    allowed = None if mask is None else mask.expand(*batch, 1, T, T)
    query, key = size * random(*batch, 2, T, 6) + 0.4, random(*batch, 1, T, 6, seed=1) + 0.2
    return query_key(query, key, "tokens", part="encoder" if mask is None else "decoder", allowed=allowed, **rest)


def fallen(power, n=T, m=T):
    """A matrix with the singular values 1, 2^−power, 3^−power, …"""
    left, right = (torch.linalg.qr(random(size, min(n, m), seed=size + add)).Q for add, size in enumerate((n, m)))
    return left * torch.arange(1, min(n, m) + 1).double() ** -power @ right.mT


def halves(matrix):
    return TiledMatrix(lambda: matrix.split(len(matrix) // 2 + 1), matrix.shape[1])


SPECTRA = ("effective_rank", "centred_effective_rank", "singular_values", "singular_values_energy")
NOT_LONG = {f"tokens.{name}" for name in SPECTRA}
PROVEN = {"tokens.rank90", "tokens.logit_rank90"}
KERNEL = {f"tokens.share_{part}" for part in ("positive", "negative", "skew")}
PAIRS = [*((name, "plain") for name in MASKS), *(("all", rest) for rest in ("softcap", "sinks", "bias"))]
PAIRS += [("documents", "softcap"), ("local", "sinks"), ("window", "bias")]


@pytest.mark.parametrize(("name", "rest"), PAIRS)
def test_every_measure_in_tiles_is_that_of_the_whole(name, rest, long):
    biased = {"bias": random(2, 1, T, T, seed=3)}
    options = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": random(2)}, "bias": biased}[rest]
    qk = heads(name, **options)
    whole = symmetry.measure_tokens(qk) | spectrum.measure_tokens(qk)
    ours = long(symmetry.measure_tokens, heads(name, **options)) | long(spectrum.measure_tokens, heads(name, **options))
    assert ours.keys() == whole.keys()
    lost = NOT_LONG | (KERNEL if name == "all" and rest == "softcap" else set())
    assert all(ours[measure].isnan().all() and not whole[measure].isnan().any() for measure in lost)
    for measure in ours.keys() - lost - PROVEN:
        torch.testing.assert_close(ours[measure], whole[measure], rtol=0, atol=1e-9, equal_nan=True)
    for measure in PROVEN:  # proven, or none: of 240 tokens the basis has 128 vectors
        there = ~ours[measure].isnan()
        assert torch.equal(ours[measure][there], whole[measure][there])
    assert not ours["tokens.share_key"].isnan().any()


def test_one_sequence_without_a_batch_axis_a_zero_head_and_cross_attention_in_tiles(long):
    qk = query_key(random(3, T, 4), random(3, T, 4, seed=1), "tokens", allowed=MASKS["causal"][None])
    torch.testing.assert_close(long(linalg.entropy, qk), linalg.entropy(qk))
    shares, whole = long(linalg.visible_shares, qk), linalg.visible_shares(qk)
    torch.testing.assert_close(shares.position, whole.position, rtol=0, atol=1e-9)
    nothing = query_key(torch.zeros(2, T, 4), random(2, T, 4), "tokens", allowed=MASKS["causal"][None])
    assert long(linalg.visible_shares, nothing).key.isnan().all()
    assert long(linalg.visible_rank, nothing, 0.9).isnan().all()
    visible = torch.ones(T, 200, dtype=torch.bool)
    visible[:90, 120:] = False
    for allowed in (None, visible[None]):
        qk = query_key(random(2, T, 4), random(2, 200, 4, seed=1), "tokens", part="cross", allowed=allowed)
        ours, whole = long(linalg.visible_shares, qk), linalg.visible_shares(qk)
        torch.testing.assert_close(ours.key, whole.key, rtol=0, atol=1e-9)
        assert ours.position.isnan().all()
        torch.testing.assert_close(long(linalg.max_weight, qk), linalg.max_weight(qk))


def test_masks_with_gaps_and_conjugate_gradients_that_do_not_arrive_have_no_value(long, monkeypatch):
    mask = ALL.tril() & ((PLACE < 4) | (PLACE[:, None] - PLACE < 50))
    qk = query_key(random(2, T, 4), random(2, T, 4, seed=1), "tokens", part="decoder", allowed=mask[None])
    assert find_intervals(mask) is None
    assert long(linalg.visible_shares, qk).key.isnan().all()
    torch.testing.assert_close(long(linalg.first_weight, qk), linalg.first_weight(qk))
    fit = find_intervals(MASKS["causal"])
    assert isinstance(fit, IntervalMask)
    right = random(T) - random(T).mean()
    assert not np.isnan(fit.explained_squares(right, None)[0])
    monkeypatch.setattr("attnlens.maths.linalg.long.STEPS", 2)
    assert np.isnan(fit.explained_squares(right, None)[0])


def test_verdicts_on_kernels_in_tiles(long, monkeypatch):
    factor = 0.3 * random(1, T, 6)
    mixed = query_key(factor, 0.3 * random(1, T, 6, seed=1), "tokens")
    for factored, expected in ((T, 1.0), (T - 1, np.nan)):
        monkeypatch.setattr(import_module("attnlens.maths.linalg.attention"), "FACTORED", factored)
        assert long(linalg.definite_kernel, mixed).item() == 0
        verdict = long(linalg.definite_kernel, query_key(factor, factor, "tokens")).item()
        assert verdict == pytest.approx(expected, nan_ok=True)
    mask = torch.stack((ALL, MASKS["causal"]))[:, None]  # only some heads of a batch see all pairs
    qk = query_key(random(2, 2, T, 4), random(2, 2, T, 4, seed=1), "tokens", allowed=mask)
    whole, ours = linalg.definite_kernel(qk), long(linalg.definite_kernel, qk)
    assert torch.equal(ours, whole)
    assert not ours.isnan().any()


def test_ksvd_of_a_long_head_has_what_its_factors_determine(long):
    value = random(2, 1, T, 5, seed=4)
    whole, ours = ksvd.measure_tokens(heads(value=value)), long(ksvd.measure_tokens, heads(value=value))
    lost = {name for name, reading in ours.items() if reading.isnan().all()}
    curves = {f"ksvd.{centred}attention_{kind}" for centred in ("", "centred_") for kind in ("spectrum", "energy")}
    assert lost == {"ksvd.first_share", *curves}
    assert all(torch.equal(ours[name], whole[name]) for name in ours.keys() - lost)


@pytest.mark.parametrize(("power", "shape"), [(0.5, (500, 400)), (0.7, (500, 500)), (1.0, (400, 500))])
def test_the_least_rank_is_that_of_all_singular_values_or_none(power, shape):
    matrix = fallen(power, *shape)
    sigma = torch.linalg.svdvals(matrix)
    for share in (0.3, 0.5, 0.9):
        expected, rank = float(linalg.rank_at(sigma, share)), least_rank(halves(matrix), share)
        assert rank == expected or (np.isnan(rank) and expected > 100), share
        assert rank == least_rank(halves(matrix), share) or np.isnan(rank), "the same in every run"


def test_without_gap_size_or_steps_enough_there_is_no_rank(monkeypatch):
    assert least_rank(halves(random(600, 1) @ random(1, 600)), 0.9) == 1
    low = random(600, 40) @ random(40, 600, seed=1)
    assert least_rank(halves(low), 0.9) == linalg.rank_at(torch.linalg.svdvals(low), 0.9)
    assert np.isnan(least_rank(halves(torch.zeros(600, 600).double()), 0.9))
    assert np.isnan(least_rank(halves(torch.eye(600).double()), 0.9)), "all directions are alike"
    tied = torch.diag(torch.cat((torch.ones(9), torch.zeros(591)))).double()
    assert np.isnan(least_rank(halves(tied), 8 / 9)), "8 or 9, as rounding falls"
    matrix = fallen(1.0, 600, 600)
    assert least_rank(halves(matrix), 0.95) == 12
    monkeypatch.setattr("attnlens.maths.linalg.long.LARGEST_BASIS", 64)
    assert np.isnan(least_rank(halves(matrix), 0.95)), "the energy is reached, and nothing is proven of it"


def test_residuals_bound_the_energies_of_every_ritz_pair():
    matrix = fallen(0.7, 400, 400)
    energies = torch.linalg.svdvals(matrix).square()
    for ritz in tiled._lanczos(halves(matrix), torch.Generator().manual_seed(0)):
        nearest = (ritz.values[:, None] - energies).abs().amin(1)
        assert (nearest <= ritz.residuals + 1e-13).all()
        assert (ritz.values.cumsum(0) <= energies[: len(ritz.values)].cumsum(0) + 1e-12).all()
        vectors = ritz.basis @ ritz.turn
        for pairs in (5, 40):
            left = matrix - matrix @ vectors[:, :pairs] @ vectors[:, :pairs].T
            rest = float(torch.linalg.matrix_norm(left, 2)) ** 2
            for rank in (3, 10, 50):
                assert ritz.bound_energy(rank, pairs, rest) >= energies[:rank].sum() - 1e-12
            bounds = list(tiled._bound_deflated_norm(halves(matrix), ritz, pairs, torch.Generator().manual_seed(1)))
            assert min(bounds) >= rest
            assert bounds[-1] <= 1.5 * rest, "near enough to prove something by"


def test_few_columns_are_decomposed_whole(monkeypatch):
    monkeypatch.setattr(tiled, "SMALL", SMALL)
    for columns, decay in ((40, 0.9), (64, 0.9), (129, 0.5), (600, 0.7)):
        matrix = fallen(decay, 500, columns)
        energies = torch.linalg.svdvals(matrix).square()
        rank = 1 + int((energies.cumsum(0) < 0.9 * energies.sum()).sum())
        assert least_rank(halves(matrix), 0.9) == rank > 1
    assert np.isnan(least_rank(halves(torch.eye(40, dtype=torch.float64)), 0.9)), "a tie"
    assert np.isnan(least_rank(halves(torch.zeros(80, 40, dtype=torch.float64)), 0.9))


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest floating-point tensor that is created."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.numbers = max(self.numbers, one.numel())
        return made


def test_tiles_are_of_long_heads_alone_meet_the_whole_and_no_matrix_of_all_pairs_is_formed(long):
    for function in (symmetry.measure_tokens, spectrum.measure_tokens, ksvd.measure_tokens):
        largest = Counter()
        for name in ("whole", "tiles"):
            qk = heads("causal", batch=(1,)).select([0])
            with Largest() as made:
                function(qk) if name == "whole" else long(function, qk)
            largest[name] = made.numbers
        assert largest["tiles"] < 0.7 * T * T, "a tile, or the basis of 128 vectors"
        assert largest["whole"] >= T * T, "the control"
    qk = heads()
    assert [part for _, part in split_tiles(qk)] == [qk]
    parts = long(lambda: list(split_tiles(qk)))
    assert torch.cat([part.query for _, part in parts], -2).equal(qk.query)
    assert max(part.key.shape[-2] for _, part in parts[:3]) < T, "keys that none of them may see are left out"
