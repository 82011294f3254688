"""Symmetric and positive semidefinite forms nearest to a given one, in the metric of two covariances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.kernels.latents import roots

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Square = Float[Tensor, "*heads size size"]

STEPS, ENOUGH = 500, 1e-9
"""Steps towards the nearest positive form at most, and the relative change at which they end."""


def own_form(like: Float[Tensor, "heads size"]) -> Float[Tensor, "heads size size"]:
    """N₀ = [[0, I], [0, 0]] of each head: uᵀN₀u' = ⟨q, k'⟩."""
    import torch

    size = like.shape[-1] // 2
    return torch.diag(like.new_ones(size), size).expand(len(like), -1, -1)


def nearest_symmetric(
    own: Square, queries: Square, keys: Square
) -> tuple[Square, Square, Float[Tensor, "*heads size size"]]:
    """P, X and weights: N = PXPᵀ is the symmetric N of least tr (N−N₀)ᵀC_q(N−N₀)C_k.

    PᵀC_kP = 1 and PᵀC_qP = diag λ, so that with X₀ = P⁻¹N₀P⁻ᵀ the error is Σ_ab λ_a (X−X₀)²_ab, and
    X_ab = (λ_a X₀_ab + λ_b X₀_ba)/(λ_a+λ_b); off the span of the tokens X is 0. Where C_q = C_k = C, N = C^{−½} sym(C^½
    N₀ C^½) C^{−½}. The weights are (λ_a+λ_b)/2: the error of another X' is that of X and Σ weights (X'−X)².
    """
    import torch

    root, inverse = roots(queries + keys)
    values, vectors = torch.linalg.eigh(inverse @ queries @ inverse)
    # of C_q + C_k, shares of both: queries have `share` of a direction, keys the rest
    share = values.clamp(0, 1)
    basis = inverse @ vectors
    back = vectors.mT @ root @ own @ root @ vectors
    weights = share[..., :, None] * (1 - share[..., None, :])
    both = weights + weights.mT
    mean = (weights * back + weights.mT * back.mT) / both.clamp_min(torch.finfo(both.dtype).tiny)
    return basis, torch.where(both > 0, mean, (back + back.mT) / 2), both / 2


def nearest_positive(form: Square, weights: Float[Tensor, "*heads size size"]) -> Square:
    """The positive semidefinite X' of least Σ weights (X'−X)², by accelerated projected gradients.

    Of equal weights it is [X]₊, the first step. Beck & Teboulle 2009 (FISTA); restarts of O'Donoghue & Candès 2015.
    """
    import torch

    step = weights / weights.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    border = ENOUGH * form.norm(dim=(-2, -1))
    found = ahead = positive_part(form)
    pace = torch.ones_like(border)[..., None, None]
    for _ in range(STEPS):
        following = positive_part(ahead - step * (ahead - form))
        moved = following - found
        back = ((ahead - following) * moved).sum((-2, -1), keepdim=True) > 0  # the momentum climbs: begin again
        quicker = torch.where(back, 1.0, (1 + (1 + 4 * pace.square()).sqrt()) / 2)
        ahead = following + torch.where(back, 0.0, (pace - 1) / quicker) * moved
        found, pace = following, quicker
        if bool((moved.norm(dim=(-2, -1)) <= border).all()):
            break
    return found


def positive_part(form: Square) -> Square:
    """[X]₊: X with its negative eigenvalues put to 0."""
    import torch

    values, vectors = torch.linalg.eigh(form)
    found: Tensor = (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT
    return found


def factored(basis: Square, form: Square) -> tuple[Float[Tensor, "heads size rank"], Float[Tensor, "heads rank"]]:
    """F and signs with F diag(signs) Fᵀ = PXPᵀ, the largest eigenvalues of X first; zeros beyond a head's rank."""
    import torch

    values, vectors = torch.linalg.eigh(form)
    order = values.abs().argsort(-1, descending=True)
    values = values.gather(-1, order)
    vectors = vectors.gather(-1, order[..., None, :].expand_as(vectors))
    border = torch.finfo(form.dtype).eps * form.shape[-1] * values[..., :1].abs()
    # Strict: a zero form has border 0 and keeps nothing.
    signs = values.sign() * (values.abs() > border)
    width = max(1, int(signs.abs().sum(-1).max()))
    factor = basis @ vectors * (values.abs().sqrt() * signs.abs())[..., None, :]
    return factor[..., :width].contiguous(), signs[..., :width].contiguous()
