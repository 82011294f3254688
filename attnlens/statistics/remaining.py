"""How many of the largest values are still to be found among those that a predictor puts last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FREEDOM = 4
"""Degrees of freedom of Student's law for residuals: far heavier tails than the normal law's."""
NORMAL_MAD = 1.4826
"""The standard deviation of a normal law in units of its median absolute deviation."""


def expected_above(
    predictor: Float[Tensor, " known"], values: Float[Tensor, " known"], rest: Float[Tensor, " rest"], most: int
) -> float:
    """Expected number of unknown values above the `most`-th largest known, τ: Σ_j P(t₄ > (g(τ) − f(x_j))/s − 1/√m_j).

    g = asinh((value − median)/(1.4826 · MAD)) tames large values, f is the regression of g on the `predictor` that
    rises nowhere but with it (isotonic least squares), s the residuals' root mean square or, where they are skewed
    upwards, √2 times that of their positive side, over the degrees of freedom that f leaves, and m_j the known values
    that f pools at x_j: at the lower end it is a minimum of means, and too low by about s/√m. It holds as far as the
    residuals of those unknown are like those known, and none is heavier in the tail than Student's t₄; by Markov's
    inequality it bounds the chance that any of them is above τ. ∞ where all known values are alike.
    """
    from scipy import stats
    from scipy.optimize import isotonic_regression

    if not len(rest):
        return 0.0
    x, order = predictor.double().sort()
    tamed = _tamed(values.double())
    if tamed is None or most > len(values):
        return math.inf
    threshold = float(tamed.sort(descending=True).values[most - 1])
    y = tamed[order]
    fit = isotonic_regression(y.numpy())
    residuals = y - torch.from_numpy(fit.x)
    freedom = max(2, len(y) - (len(fit.blocks) - 1))
    squares = max(float(residuals.square().sum()), 2 * float(residuals.clamp(min=0).square().sum()))
    if not squares > 0:
        return math.inf
    place = (torch.searchsorted(x, rest.double(), right=True) - 1).clamp(min=0)
    size = math.sqrt(squares / freedom)
    pooled = torch.from_numpy(fit.blocks).diff().double()
    # one standard error above f, whose lower end is a minimum of means
    reach = torch.from_numpy(fit.x) + size / pooled.repeat_interleave(pooled.long()).sqrt()
    return float(stats.t.sf(((threshold - reach[place]) / size).numpy(), FREEDOM).sum())


def _tamed(values: Float[Tensor, " known"]) -> Float[Tensor, " known"] | None:
    """asinh of the values in units of their spread; None where half of them are alike."""
    median = values.quantile(0.5)
    spread = NORMAL_MAD * float((values - median).abs().quantile(0.5))
    return ((values - median) / spread).asinh() if spread > 0 else None
