"""Tests that comparisons over the same seeds keep the rate that they promise, and that orders are counted rightly."""

import math

import pytest
import torch
from scipy import stats

from attnlens.statistics.blocks import Blocks, holm, kendall, pairs_of


def drawn(treatments, blocks, sd, seed, spread=0.0):
    """Cells of equal means: blocks differ by `spread`, noise by `sd` of each treatment."""
    made = torch.Generator().manual_seed(seed)
    noise = torch.randn(treatments, blocks, generator=made, dtype=torch.float64) * torch.as_tensor(sd)[:, None]
    return noise + spread * torch.randn(1, blocks, generator=made, dtype=torch.float64)


def any_named(values):
    every = Blocks(values).p_values()
    found = holm([float(every[a, b]) for a, b in pairs_of(len(values))])
    return min(found) <= 0.05


@pytest.mark.parametrize(("cells", "seeds"), [(4, 3), (8, 3), (5, 5)])
def test_no_difference_is_named_in_one_of_twenty_studies_at_most(cells, seeds):
    runs = [any_named(drawn(cells, seeds, [1.0] * cells, seed, spread=10.0)) for seed in range(600)]
    assert sum(runs) / 600 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)


def test_seeds_that_are_no_blocks_hide_what_pairing_shows():
    """Control: the same difference, lost in what seeds share where nobody takes that out."""
    values = drawn(3, 3, [0.1] * 3, 0, spread=10.0) + torch.tensor([[0.0], [0.0], [2.0]])
    assert any_named(values)
    unpaired = stats.ttest_ind(values[0].numpy(), values[2].numpy()).pvalue
    assert unpaired > 0.5


def test_one_cell_of_far_larger_noise_breaks_the_promise():
    """What is said of the pooled variance: pairs of the noisier cells are called different too often."""
    runs = [any_named(drawn(8, 3, [0.01] * 6 + [1.0] * 2, seed)) for seed in range(300)]
    assert sum(runs) / 300 > 0.08


def test_p_values_are_those_of_the_two_way_table():
    values = drawn(3, 4, [1.0, 1.0, 1.0], 5)
    found = Blocks(values)
    rest = values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()
    error = math.sqrt(2 * float((rest**2).sum()) / 6 / 4)
    score = abs(float(values[0].mean() - values[1].mean())) / error
    assert float(found.p_values()[0, 1]) == pytest.approx(2 * stats.t.sf(score, 6))
    assert math.isnan(float(found.p_values()[1, 1]))


def test_holm_is_the_step_down_procedure():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_kendall_is_scipys_without_ties_and_draws_cover_the_true_order():
    first, second = torch.randperm(9, generator=torch.Generator().manual_seed(1)).double(), torch.arange(9.0).double()
    assert float(kendall(first, second)) == pytest.approx(stats.kendalltau(first, second).statistic)
    truth, inside = torch.tensor([0.0, 1.0, 2.0, 2.2], dtype=torch.float64), 0
    for seed in range(200):
        taus = kendall(Blocks(drawn(4, 3, [0.5] * 4, seed) + truth[:, None]).drawn_means(2000), truth)
        low, high = taus.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        inside += low <= 1.0 <= high
    assert inside / 200 >= 0.9
