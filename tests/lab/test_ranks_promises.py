"""Tests that promises cover: simulated texts whose plans harm other windows, by the budget's own search.

A text is a population of windows with topics in blocks and heavy tails. What chose a plan was chosen for being small
there: only windows that neither fitted nor chose, spread over the text, say what the plan costs on all of it.
"""

import pytest
import torch
from scipy import stats

from attnlens.kernels.lowrank import Latents
from attnlens.lab.ranks import search as calibration
from attnlens.lab.ranks.bases import Basis
from attnlens.lab.ranks.search import BudgetSearch, Losses, rise_of
from attnlens.maths.linalg.spectra import nested_steps
from attnlens.maths.statistics import Design
from attnlens.models.texts.sequences import choose_windows

WINDOWS, POPULATION, BLOCK, RANKS = 32, 960, 16, 64
BUDGET = 0.01
SAMPLES = [pytest.param(32, id="few"), pytest.param(320, marks=pytest.mark.full, id="many")]


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    """200 bootstrap samples an interval in the place of 2000, for speed: its ends move by a tenth of their error."""
    whole = calibration.paired_difference
    monkeypatch.setattr(calibration, "paired_difference", lambda *sides, **more: whole(*sides, draws=200, **more))


def heavy(generator, *shape):
    """Student's t with three degrees of freedom."""
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return normal / torch.randn(3, *shape, generator=generator, dtype=torch.float64).square().mean(0).sqrt()


def text(seed):
    """The loss of every window, and what each rank of the one head adds to it: nothing with all 64, 0.7 % with none."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randn(POPULATION // BLOCK, RANKS + 2, generator=generator, dtype=torch.float64)
    topics = topics.repeat_interleave(BLOCK, 0)
    own = 2.5 + 0.2 * topics[:, 0] + 0.2 * heavy(generator, POPULATION).clamp(-5, 5)
    spread = 0.6 * topics[:, 1:] + heavy(generator, POPULATION, RANKS + 1)
    lost = 1 - torch.arange(RANKS + 1, dtype=torch.float64) / RANKS
    mean = 2.5 * 0.007 * lost**1.2  # convex, so that every rank is a step of its own
    harm = mean + 2.5 * 0.010 * (spread - spread.mean(0))
    harm[:, RANKS] = 0
    return own, harm, mean


class Trial:
    """What a rank does to the loss on some windows."""

    def __init__(self, own, harm, picks):
        weights = torch.ones(len(picks), dtype=torch.float64)
        self.original, self.harm = Losses(own[picks], weights, Design.plain(len(picks))), harm[picks]

    def rise(self, ranks):
        return rise_of(self.original, self.original.means + self.harm[:, ranks[0]], ["text"], 0)


def searched(costs, trial):
    """The rank that the budget's own search finds, and the estimate that it is chosen by; None where it keeps all."""
    search = BudgetSearch(None, (), {}, "causal", progress=lambda _: None)
    nothing = torch.zeros(1, RANKS, RANKS)
    search.bases = {None: Basis((0,), (0,), Latents(((0,),), (0,), nothing, nothing))}
    search.table, search.steps = costs[None], nested_steps(costs[None])
    best, tried = search._search_steps(trial, BUDGET)
    return (search.ranks_after(best), tried[best].rise) if best else None


def promises(placement, seeds):
    """For each seed that chose something: the truth, the estimate by the windows that chose, the promise by others."""
    results = []
    for seed in range(seeds):
        own, harm, mean = text(seed)
        picks = choose_windows(POPULATION, 3 * WINDOWS, placement, seed)
        # in a row, those that fit come first, and those that choose promise too
        choosing, promising = (picks[1::3], picks[2::3]) if placement != "first" else [picks[WINDOWS : 2 * WINDOWS]] * 2
        if (choice := searched(mean, Trial(own, harm, choosing))) is not None:
            ranks, estimated = choice
            truth = float(harm[:, ranks[0]].sum() / own.sum())
            results.append((truth, estimated, Trial(own, harm, promising).rise(ranks)))
    assert len(results) >= 0.6 * seeds
    return zip(*results, strict=True)


def covered(truths, rises):
    """The share of rises whose interval holds the truth, and of those whose upper end is not below it."""
    pairs = list(zip(truths, rises, strict=True))
    inside = sum(rise.ci95[0] <= truth <= rise.ci95[1] for truth, rise in pairs)
    return inside / len(pairs), sum(truth <= rise.high for truth, rise in pairs) / len(pairs)


@pytest.mark.parametrize("seeds", [pytest.param(64, id="few"), SAMPLES[1]])
def test_promises_cover_and_estimates_do_not(seeds):
    truths, estimated, promised = promises("spread", seeds)
    lowest = float(stats.binom.ppf(0.0005, len(truths), 0.95)) / len(truths)
    assert min(covered(truths, promised)) >= lowest
    assert max(covered(truths, estimated)) < lowest, "the control"
    beyond = sum(truth > BUDGET for truth in truths)
    assert beyond <= stats.binom.ppf(0.9995, len(truths), 0.025), "the budget is kept"


@pytest.mark.parametrize("seeds", SAMPLES)
def test_windows_in_a_row_that_chose_promise_far_too_little(seeds):
    truths, estimated, _ = promises("first", seeds)
    assert covered(truths, estimated)[1] < 0.6
