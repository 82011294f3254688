"""A sequence's log k without its skew part, its negative part, both, or its key term."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def skewless(log_k: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """L − JAJ up to query-only terms, J = I − 11ᵀ/n and A the skew part of L: the gates on queries and keys stay."""
    core, key = _identified(log_k)
    return (core + core.mT) / 2 + key


def negativeless(log_k: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """L − Σ μ₋uuᵀ up to query-only terms, μ and u of JSJ, S the symmetric part of L: skew part and key term stay."""
    core, key = _identified(log_k)
    return _positive(core) + (core - core.mT) / 2 + key


def mercer(log_k: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Σ μ₊uuᵀ of JSJ with the key term 1cᵀ: a positive definite kernel times a key gate."""
    core, key = _identified(log_k)
    return _positive(core) + key


def keyless(log_k: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """JLJ, which is L − 1cᵀ up to query-only terms, c the centred column means of L: no key is liked by all queries."""
    return _identified(log_k)[0]


def _positive(core: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Σ μ₊uuᵀ of the symmetric part of JLJ.

    NaN where it is not finite; no gradient, as eigenvalues meet at 0 where L has a small rank.
    """
    import torch

    if not bool(core.isfinite().all()):
        return core * torch.nan
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    found: Tensor = (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT
    return found


def _identified(log_k: Float[Tensor, "*batch n n"]) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch 1 n"]]:
    """JLJ and c; JLJ + 1cᵀ = LJ is what softmax sees of L (maths of `linalg.anatomy`)."""
    seen = log_k - log_k.mean(-1, keepdim=True)
    key = seen.mean(-2, keepdim=True)
    return seen - key, key
