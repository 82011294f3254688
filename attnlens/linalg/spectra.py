"""Effective rank, stable rank and decay of singular values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.linalg.parallel import over_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EPS = torch.finfo(torch.float64).eps


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


def decay_rate(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """b ≥ 0 of the least-squares line log σ_l ≈ a − b·l through descending values; NaN for fewer than two.

    Values up to eps · steps · largest are rounding and take no part. Sorted values of random factors fall too: the rate
    says something beside their rate alone.
    """
    # Strict: a zero matrix keeps no value.
    kept = values > EPS * values.shape[-1] * values[..., :1]
    count = kept.sum(-1, keepdim=True)
    index = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    centred = (index - (count + 1) / 2) * kept  # descending: those kept are the first
    slope = (centred * torch.where(kept, values, 1.0).log()).sum(-1) / centred.square().sum(-1)
    return torch.where(count[..., 0] >= 2, (-slope).clamp(min=0), torch.nan)
