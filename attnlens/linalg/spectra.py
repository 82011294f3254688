"""How fast do singular values fall, and which rank does a matrix need?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.linalg.parallel import over_heads

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

EPS = torch.finfo(torch.float64).eps
FLAT, EXPONENTIAL, POWER = 0, 1, 2
CLEAR = 2.0
"""Least difference in AIC that makes one law clearly better than another."""
FEWEST = 4
"""Singular values below which three laws can't be told apart."""


def singular_values(matrix: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch least"]:
    """σ of dense matrices, descending, min(n, m) of them."""
    return over_heads(torch.linalg.svdvals, matrix)


def product_singular_values(
    left: Float[Tensor, "*batch n head_dim"], right: Float[Tensor, "*batch m head_dim"]
) -> Float[Tensor, "*batch least"]:
    """σ of A Bᵀ, descending, without forming it: QR of both factors, then their core; min(n, m, head_dim) of them."""
    return over_heads(_product_core, left, right)


def _product_core(left: Tensor, right: Tensor) -> Tensor:
    upper = (torch.linalg.qr(factor.double(), mode="r").R for factor in (left, right))
    values: Tensor = torch.linalg.svdvals(next(upper) @ next(upper).mT)
    return values


def stable_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """‖M‖_F² / ‖M‖₂² ≥ 1 of singular values in descending order; σ = (4, 2, 1, 1) has 1.375. NaN for a zero matrix."""
    return (values / values[..., :1]).square().sum(-1)


def effective_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """exp(−Σ p log p) ≥ 1, p = σ/Σσ (Roy & Vetterli 2007); σ = (4, 2, 1, 1) has 3.36359. NaN for a zero matrix."""
    shares = values / values.sum(-1, keepdim=True)
    entropies: Tensor = torch.special.entr(shares).sum(-1)
    return entropies.exp()


def rank_at(values: Float[Tensor, "*batch steps"], share: float) -> Float[Tensor, "*batch"]:
    """The least k with Σ_{l≤k} σ² ≥ share · Σσ², ≥ 1, of singular values in descending order. NaN for a zero matrix."""
    energy = values.square().cumsum(-1) / values.square().sum(-1, keepdim=True)
    # Strict, and below by rounding: k values that reach the share exactly are enough.
    short = energy < share - EPS * values.shape[-1]
    return torch.where(energy[..., -1].isnan(), torch.nan, 1 + short.sum(-1).to(values))


def cumulative(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch steps"]:
    """Σ_{l≤k} v_l / Σ v_l for k = 1 … steps, rising to 1. NaN where all are zero."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def decay_law(
    values: Float[Tensor, "*batch steps"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Which law fits log σ_l best by AIC: flat a (0), exponential a·e^{−bl} (1) or power a·l^{−b} (2); its b and R².

    Least squares on the values above eps · steps · largest. Flat is nested in both others, so its AIC can lead by 2 at
    most: it holds unless another leads by 2 or more. Then the two others must differ by 2, else all three are NaN (no
    clear law), as they are for fewer than four values. R² of flat is 0: it explains no variance.
    """
    # Strict: a zero matrix keeps no value.
    kept = values > EPS * values.shape[-1] * values[..., :1]
    logs = torch.where(kept, values, 1.0).log()
    index = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    fits = [_line(x, logs, kept) for x in (torch.zeros_like(index), index, index.log())]
    slopes, residuals = (torch.stack(part, -1) for part in zip(*fits, strict=True))
    count = kept.sum(-1, keepdim=True)
    # Residuals below the rounding of a logarithm say nothing: without a floor, noise would choose among perfect fits.
    score = count * torch.maximum(residuals / count, (EPS * count).square()).log()
    score[..., FLAT] -= 2.0  # one parameter less
    law = 1 + score[..., 1:].argmin(-1)
    flat = score[..., FLAT] < score[..., 1:].amin(-1) + CLEAR
    clear = flat | ((score[..., EXPONENTIAL] - score[..., POWER]).abs() >= CLEAR)
    law = torch.where(flat, FLAT, law)
    found = clear & (count[..., 0] >= FEWEST)
    rate = -slopes.gather(-1, law[..., None])[..., 0]
    fitted = 1 - residuals.gather(-1, law[..., None])[..., 0] / residuals[..., FLAT]
    fitted = torch.where(flat, 0.0, fitted)
    law, rate, fitted = (torch.where(found, part.to(values), torch.nan) for part in (law, rate, fitted))
    return law, rate, fitted


def _line(
    x: Float[Tensor, " steps"], y: Float[Tensor, "*batch steps"], kept: Bool[Tensor, "*batch steps"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Slope and sum of squared residuals of the least-squares line through the kept points; slope 0 for constant x."""
    weight = kept.to(y.dtype) / kept.sum(-1, keepdim=True)
    dx = (x - (weight * x).sum(-1, keepdim=True)) * kept
    dy = (y - (weight * y).sum(-1, keepdim=True)) * kept
    spread = dx.square().sum(-1)
    slope = (dx * dy).sum(-1) / torch.where(spread > 0, spread, 1.0)
    return slope, (dy - slope[..., None] * dx).square().sum(-1)
