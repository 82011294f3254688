"""Features φ of queries and keys with K_ij = ⟨Fφ_q(x_i), Fφ_k(x_j)⟩, and the choice of F."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def cosine_features(x: Float[Tensor, "*batch n head_dim"]) -> Float[Tensor, "*batch n head_dim"]:
    """φ(x) = x/‖x‖ in float64 (Chen et al. 2023, section 4.1): K is a cosine. A zero vector stays zero."""
    return unit(x.double())


def unit(x: Float[Tensor, "*batch n head_dim"]) -> Float[Tensor, "*batch n head_dim"]:
    """x/‖x‖ in x's own type; zero, with finite gradients, where x is zero.

    Each row is divided by its largest entry first, so that no square under- or overflows.
    """
    # x/‖x‖ does not depend on that divisor, and so has no gradient through it.
    largest = x.detach().abs().amax(-1, keepdim=True)
    level = x / torch.where(largest > 0, largest, 1.0)
    length = level.norm(dim=-1, keepdim=True)
    return level / torch.where(length > 0, length, 1.0)


def centred(x: Float[Tensor, "*batch n features"]) -> Float[Tensor, "*batch n features"]:
    """(I − 11ᵀ/n)X: the rows less their mean, in float64; exactly zero where they differ by rounding alone.

    Of key features it takes the mean over keys out of every row of K: Φ_q((I − 11ᵀ/n)Φ_k)ᵀ = K(I − 11ᵀ/n).
    """
    x = x.double()
    apart = x - x.mean(-2, keepdim=True)
    whole, left = (torch.linalg.matrix_norm(each) for each in (x, apart))
    # Strict: rows that are equal leave rounding of at most this size.
    kept = left > torch.finfo(x.dtype).eps * x.shape[-2] * whole
    return torch.where(kept[..., None, None], apart, 0.0)


def random_features(
    x: Float[Tensor, "*batch n head_dim"], scale: float, count: int, seed: int = 0
) -> Float[Tensor, "*batch n count"]:
    """φ_i(x) = exp(⟨ω_i, x√s⟩ − s‖x‖²/2)/√count > 0; the mean of ⟨φ(q), φ(k)⟩ over ω is exp(s⟨q, k⟩).

    Positive random features of the softmax kernel (Choromanski et al. 2021, Lemma 1), ω Gaussian in orthogonal blocks,
    in float64. The exponent is at most ‖ω‖²/2, about head_dim/2, and can't overflow for any usual head_dim. Raises
    UsageError where count < 1.
    """
    at_least_one("count", count)
    x = x.double() * scale**0.5
    draws = orthogonal_draws(count, x.shape[-1], seed).to(x.device)
    exponent: Tensor = x @ draws.mT - x.square().sum(-1, keepdim=True) / 2
    return exponent.exp() / math.sqrt(count)


def sampled_rows(x: Float[Tensor, "*batch n features"], count: int) -> Float[Tensor, "*batch sampled features"]:
    """X': `count` evenly spaced rows of X, the first and the last among them; all of them where n ≤ count.

    The data-dependent F = X' of Chen et al. 2023 (Eq. 6, f(X)); their code takes min(n, 10·s) rows in this way. Raises
    UsageError where count < 1.
    """
    at_least_one("count", count)
    return evenly_spaced(x.double(), min(count, x.shape[-2]))


def evenly_spaced(
    x: Float[Tensor, "*batch n features"], count: int, kept: Bool[Tensor, "*#batch n"] | None = None
) -> Float[Tensor, "*batch count features"]:
    """Rows ⌊i(n − 1)/(count − 1)⌋ of the n that are `kept` (None: all), as in the published code, in x's own type.

    Some are repeated where n < count; where none is kept the first row is.
    """
    if kept is None:
        kept = x.new_ones(x.shape[-2], dtype=torch.bool)
    order = (~kept).int().argsort(dim=-1, stable=True)
    steps = torch.arange(count, device=x.device) * (kept.sum(-1, keepdim=True) - 1).clamp_min(0)
    index = order.gather(-1, steps // max(count - 1, 1))
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], count, x.shape[-1]))


def at_least_one(name: str, number: int) -> None:
    """Refuse a count of 0 or less with UsageError."""
    if number < 1:
        raise UsageError(f"{name} is {number}.", "It counts something that must be there: give 1 or more.")


@lru_cache(maxsize=16)
def orthogonal_draws(count: int, head_dim: int, seed: int) -> Float[Tensor, "count head_dim"]:
    """Blocks of orthogonal rows, uniform in direction, with the lengths of independent Gaussian rows."""
    # They outlive this call, and a tensor made in inference mode could never be trained through.
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        shape, float64 = (-(-count // head_dim), head_dim, head_dim), torch.float64
        upright, upper = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=float64))
        # QR is unique, and Q uniform, only once the diagonal of R is positive.
        directions = (upright * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(-1, head_dim)
        lengths = torch.randn(directions.shape, generator=generator, dtype=float64).norm(dim=-1, keepdim=True)
        draws: Tensor = directions * lengths
        return draws[:count]
