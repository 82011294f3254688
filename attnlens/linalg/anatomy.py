"""Shares of a head's logits as softmax sees them: positive, negative, skew, key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.long import is_long
from attnlens.linalg.parallel import over_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import QueryKey


@dataclass(frozen=True)
class Anatomy:
    """‖LJ‖² = Σμ₊² + Σμ₋² + ‖JAJ‖² + n‖c‖², as shares of the whole, each in [0, 1]; NaN where LJ = 0.

    J = I − 11ᵀ/n; S and A the symmetric and skew parts of the logits L, μ the eigenvalues of JSJ, c the centred column
    means of L. Softmax ignores what depends on the query alone, so it sees only LJ.
    """

    positive: Float[Tensor, "*batch heads"]
    """Σμ₊²/‖LJ‖²: a positive definite kernel."""
    negative: Float[Tensor, "*batch heads"]
    """Σμ₋²/‖LJ‖²: the negative part of the symmetric kernel."""
    skew: Float[Tensor, "*batch heads"]
    """‖JAJ‖²/‖LJ‖²: asymmetry that no gate on queries or keys removes."""
    key: Float[Tensor, "*batch heads"]
    """n‖c‖²/‖LJ‖²: key salience, the same for every query."""


def anatomy(query_key: QueryKey) -> Anatomy:
    """The four shares of every head on one sequence, for self-attention.

    Bilinear logits with 2·head_dim < n are reduced to a core of that size by QR of the centred [Q K]; others are taken
    apart as n × n matrices, and have no shares where they are long.
    """
    small = query_key.bilinear and 2 * query_key.query.shape[-1] < query_key.query.shape[-2]
    if small:
        parts = over_heads(_factored_parts, query_key.query, query_key.paired_key)
    elif is_long(query_key):
        parts = query_key.query.new_full((*query_key.query.shape[:-2], 4), torch.nan, dtype=torch.float64)
    else:
        parts = over_heads(_dense_parts, query_key.logits)
    return Anatomy(*parts.unbind(-1))


def _factored_parts(query: Float[Tensor, "some n head_dim"], key: Float[Tensor, "some n head_dim"]) -> Tensor:
    query, key = query.double(), key.double()
    n, size = query.shape[-2:]
    mean = query.mean(-2, keepdim=True)
    spread = key - key.mean(-2, keepdim=True)
    upper = torch.linalg.qr(torch.cat((query - mean, spread), -1), mode="r").R
    core = upper[..., :size] @ upper[..., size:].mT
    salience = n * (mean @ spread.mT).square().sum((-2, -1))
    gram = query.mT @ query
    whole = (gram * (spread.mT @ spread)).sum((-2, -1))
    return _shares(core, salience, whole, (gram * (key.mT @ key)).sum((-2, -1)), n)


def _dense_parts(logits: Float[Tensor, "some n n"]) -> Tensor:
    seen = logits - logits.mean(-1, keepdim=True)
    salience = seen.mean(-2, keepdim=True)
    n = logits.shape[-1]
    whole, uncentred = (matrix.square().sum((-2, -1)) for matrix in (seen, logits))
    return _shares(seen - salience, n * salience.square().sum((-2, -1)), whole, uncentred, n)


def _shares(core: Tensor, salience: Tensor, whole: Tensor, uncentred: Tensor, n: int) -> Float[Tensor, "some parts"]:
    """The parts over the whole, `core` being JLJ or a matrix that shares its invariants."""
    eigenvalues = torch.linalg.eigvalsh((core + core.mT) / 2)
    positive, negative = (side.clamp(min=0).square().sum(-1) for side in (eigenvalues, -eigenvalues))
    skew = ((core - core.mT) / 2).square().sum((-2, -1))
    parts = torch.stack((positive, negative, skew, salience), -1)
    # Strict: logits that depend on the query alone leave rounding of at most this norm.
    seen = whole > (torch.finfo(whole.dtype).eps * n) ** 2 * uncentred
    return torch.where(seen[..., None], parts / whole[..., None], torch.nan)
