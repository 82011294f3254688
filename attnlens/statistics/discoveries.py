"""p-values of differences with mean 0, and the rejections of Benjamini and Hochberg."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.statistics.design import Design
from attnlens.statistics.intervals import FEWEST_DRAWS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

DRAWS = 20_000
"""Bootstrap samples behind a p-value: of 300 heads the smallest has to be below 0.05/300 to be named."""
MOST_WINDOWS = 256
"""From which on Student's t is as good: what skewness does to it falls with √windows."""
ENOUGH = 50
"""Samples beyond a unit's own score after which its p-value is known well enough (Besag & Clifford 1991)."""
PIECE = 500
"""Samples computed at once."""


def p_values(
    differences: Float[Tensor, "units windows"], design: Design, weights: Float[Tensor, " windows"], seed: int = 0
) -> Float[Tensor, " units"]:
    """Two-sided p of a mean difference of 0 over windows, weighted by their numbers of tokens, unit by unit.

    (1 + #{|θ* − θ|/se* ≥ |θ|/se})/(1 + draws) by the studentised bootstrap: differences of heads are skewed, which
    Student's t, standing in for few or very many windows, takes for effects about twice as often. Beyond the ENOUGH
    largest of the samples' scores, of which too few are left to count, Student's tail goes on, stretched so that it
    meets them. NaN where there are too few differences, or all are the same.
    """
    size = weights.double()
    whole = differences.double()
    mean, error = design.weighted_means(whole, size, torch.ones_like(size)[None])
    scores = torch.where(error > 0, mean.abs() / error, torch.nan)[0]
    centred = whole - mean.mT  # what is left of the numbers once large means are gone
    if design.fewest < FEWEST_DRAWS or design.count > MOST_WINDOWS:
        return _students(scores, design.freedom)
    beyond, drawn = torch.zeros_like(scores), torch.zeros_like(scores)
    largest = torch.zeros(len(scores), ENOUGH, dtype=torch.float64)
    for times in torch.split(design.draws(DRAWS, seed), PIECE):
        going = (beyond < ENOUGH) & ~scores.isnan()
        if not bool(going.any()):
            break
        found, errors = design.weighted_means(centred[going], size, times)
        drawn_scores = (found.abs() / errors).nan_to_num(nan=0.0).mT
        beyond[going] += (drawn_scores >= scores[going, None]).sum(1)
        drawn[going] += len(times)
        largest[going] = torch.cat((largest[going], drawn_scores), 1).topk(ENOUGH).values
    counted = torch.where(scores.isnan(), torch.nan, (1 + beyond) / (1 + drawn))
    return torch.where(beyond < ENOUGH, _tail(scores, largest[:, -1], drawn, design.freedom), counted)


def _tail(
    scores: Float[Tensor, " units"], met: Float[Tensor, " units"], drawn: Float[Tensor, " units"], freedom: int
) -> Float[Tensor, " units"]:
    """P(|t| ≥ score/c), c ≥ 1 such that it is ENOUGH/drawn at the score `met`, the ENOUGHth largest of the samples."""
    from scipy import stats

    reach = torch.from_numpy(stats.t.isf(ENOUGH / (2 * drawn.clamp(min=ENOUGH).numpy()), freedom))
    return _students(scores / (met / reach).clamp(min=1), freedom)


def _students(scores: Float[Tensor, " units"], freedom: int) -> Float[Tensor, " units"]:
    from scipy import stats

    return torch.from_numpy(2 * stats.t.sf(scores.numpy(), freedom)) if freedom > 0 else scores * torch.nan


def adjusted(p_values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return q of each p: the smallest rate at which it is rejected (Benjamini & Hochberg 1995).

    NaN stays NaN and doesn't count in n.
    """
    from scipy import stats

    found = torch.full_like(p_values, torch.nan, dtype=torch.float64)
    present = ~p_values.isnan()
    if bool(present.any()):
        found[present] = torch.from_numpy(stats.false_discovery_control(p_values[present].double().numpy()))
    return found


def false_discovery(p_values: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Select the hypotheses to reject so that at most `rate` of the rejected are true; never one whose p is NaN."""
    return adjusted(p_values) <= rate
