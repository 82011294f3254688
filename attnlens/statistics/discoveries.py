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
    Student's t, standing in for few or very many windows, takes for effects about twice as often. NaN where there are
    too few differences, or all are the same.
    """
    size = weights.double()
    once = torch.ones_like(size)
    mean, error = _means(differences.double(), size, once[None], design)
    scores = torch.where(error > 0, mean.abs() / error, torch.nan)[0]
    if design.fewest < FEWEST_DRAWS or design.count > MOST_WINDOWS:
        return _students(scores, design.freedom)
    beyond, drawn = torch.zeros_like(scores), torch.zeros_like(scores)
    for times in torch.split(design.draws(DRAWS, seed), PIECE):
        going = (beyond < ENOUGH) & ~scores.isnan()
        if not bool(going.any()):
            break
        found, errors = _means(differences[going].double(), size, times, design)
        beyond[going] += ((found - mean[:, going]).abs() >= scores[going] * errors).sum(0)
        drawn[going] += len(times)
    return torch.where(scores.isnan(), torch.nan, (1 + beyond) / (1 + drawn))


def _means(
    differences: Float[Tensor, "units windows"],
    size: Float[Tensor, " windows"],
    times: Float[Tensor, "draws windows"],
    design: Design,
) -> tuple[Float[Tensor, "draws units"], Float[Tensor, "draws units"]]:
    """Of each sample the mean difference over tokens and its standard error (Cochran 1977, ratio estimate)."""
    total = (times @ size)[:, None]
    mean = (times * size) @ differences.mT / total
    residuals = size * (differences - mean[..., None]) / total[..., None]
    return mean, design.variance(residuals, times[:, None].expand_as(residuals)).sqrt()


def _students(scores: Float[Tensor, " units"], freedom: int) -> Float[Tensor, " units"]:
    from scipy import stats

    return torch.from_numpy(2 * stats.t.sf(scores.numpy(), freedom)) if freedom > 0 else scores * torch.nan


def false_discovery(p_values: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Which hypotheses to reject so that at most `rate` of the rejected are true (Benjamini & Hochberg 1995).

    The k smallest p-values, k the largest with p_(k) ≤ rate · k/n; NaN is never rejected and doesn't count in n.
    """
    tests = int((~p_values.isnan()).sum())
    # Not strict: the procedure rejects at equality. NaN is sorted last and compares as false.
    ranked, order = p_values.double().sort()
    passed = ranked <= rate * torch.arange(1, len(ranked) + 1, device=ranked.device) / max(tests, 1)
    last = int(passed.nonzero().max()) + 1 if passed.any() else 0
    rejected = torch.zeros_like(passed)
    rejected[order[:last]] = True
    return rejected
