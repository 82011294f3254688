"""Tests that comparisons over the same seeds keep the rate that they promise, and that orders are counted rightly."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from attnlens.maths.statistics import associations
from attnlens.maths.statistics.associations import Blocks, _moderate_variances, holm, pairs_of

STUDIES = 600
NOISE = {
    "alike": [1.0] * 8,
    "of four cells": [1.0] * 4,
    "of two cells a hundred times larger": [1.0] * 6 + [100.0] * 2,
    "of two cells three times larger": [1.0] * 6 + [3.0] * 2,
    "of one cell ten times larger": [1.0] * 7 + [10.0],
    "of half the cells three times larger": [1.0] * 4 + [3.0] * 4,
    "of two cells ten times smaller": [1.0] * 6 + [0.1] * 2,
    "other in every cell": None,
}


def drawn(sd, blocks, seed, spread=0.0):
    """Cells of equal means: blocks differ by `spread`, noise by `sd` of each treatment."""
    made = torch.Generator().manual_seed(seed)
    sd = torch.randn(8, generator=made).exp() if sd is None else torch.as_tensor(sd)
    noise = torch.randn(len(sd), blocks, generator=made, dtype=torch.float64) * sd[:, None]
    return noise + spread * torch.randn(1, blocks, generator=made, dtype=torch.float64)


def any_named(values, kinds=()):
    return min(holm(Blocks(values, kinds).p_values())) <= 0.05


def pooled(values):
    """p of the two-way table with one variance for all cells, from its textbook."""
    rest = values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    error = math.sqrt(2 * float((rest**2).sum()) / freedom / values.shape[1])
    means = values.mean(1).tolist()
    return [2 * stats.t.sf(abs(means[a] - means[b]) / error, freedom) for a, b in pairs_of(len(values))]


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("noise", NOISE)
def test_no_difference_is_named_in_one_of_twenty_studies_at_most(noise, seeds):
    runs = [any_named(drawn(NOISE[noise], seeds, seed, spread=10.0)) for seed in range(STUDIES)]
    assert sum(runs) / STUDIES <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def test_one_variance_for_all_cells_breaks_the_promise_and_hides_what_is_there():
    """Control: where two cells are noisier, the pooled test names them too often and quiet ones never."""
    quiet_and_noisy = NOISE["of two cells a hundred times larger"]
    runs = [min(holm(pooled(drawn(quiet_and_noisy, 3, seed)))) <= 0.05 for seed in range(300)]
    assert sum(runs) / 300 > 0.1
    values = drawn(quiet_and_noisy, 3, 0) + torch.tensor([[12.0]] + [[0.0]] * 7)
    assert holm(pooled(values))[0] > 0.5
    assert holm(Blocks(values, [0] * 6 + [1] * 2).p_values())[0] <= 0.05  # once it is said which are of another kind


def test_seeds_that_are_no_blocks_hide_what_pairing_shows():
    """Control: the same difference, lost in what seeds share where nobody takes that out."""
    values = drawn([0.1] * 3, 3, 0, spread=10.0) + torch.tensor([[0.0], [0.0], [2.0]])
    assert any_named(values)
    unpaired = stats.ttest_ind(values[0].numpy(), values[2].numpy()).pvalue
    assert unpaired > 0.5


def test_two_cells_are_compared_by_the_paired_test_and_many_alike_by_nearly_the_pooled_one():
    values = drawn([1.0, 3.0], 4, 5)
    assert Blocks(values).p_values() == pytest.approx([stats.ttest_rel(*values.numpy()).pvalue])
    many = drawn([1.0] * 40, 6, 1)
    own, of_all = np.array(Blocks(many).p_values()), np.array(pooled(many))
    assert np.abs(own - of_all).max() < 0.1


def test_a_prior_is_found_in_variances_that_were_drawn_from_it(monkeypatch):
    """s² = s₀² d₀/χ²_d₀ · χ²_d/d, with d₀ = 6 and s₀² = 4: both are found again (Smyth 2004)."""
    monkeypatch.setattr(associations, "COUNTED", 1.0)
    draws = np.random.default_rng(0)
    variances = 4 * 6 / draws.chisquare(6, 20_000) * draws.chisquare(3, 20_000) / 3
    moderated, prior = _moderate_variances(variances, 3, others=20_000)
    assert prior == pytest.approx(6, rel=0.1)
    assert moderated[0] == pytest.approx((6 * 4 + 3 * variances[0]) / 9, rel=0.05)


def test_cells_without_any_spread_are_not_called_different():
    assert all(math.isnan(p) for p in Blocks(torch.ones(3, 3) * torch.arange(3.0)[:, None]).p_values())


def test_holm_is_the_step_down_procedure():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
