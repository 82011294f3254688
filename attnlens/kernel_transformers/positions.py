"""What positions add to the logarithm of a kernel, as modules: Eq. 5, 6 and 9 of Tsai et al. 2019."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Added = Float[Tensor, "#batch heads queries keys"]

FURTHEST = 16
"""The distance from which on a table knows no difference (Shaw et al. 2018)."""
WAVELENGTH = 10_000.0


def sinusoids(places: Float[Tensor, " places"], d_model: int) -> Float[Tensor, "places d_model"]:
    """sin(t/10000^{2p/d}) for p < d/2, then the cosines (Vaswani et al. 2017, halves in the place of pairs)."""
    half = torch.arange((d_model + 1) // 2, device=places.device, dtype=places.dtype)
    angles = places[:, None] * torch.exp(-math.log(WAVELENGTH) * 2 * half / d_model)
    return torch.cat((angles.sin(), angles.cos()), 1)[:, :d_model]


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """t_i − t_j of every query and key, (queries, keys)."""
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)


class PositionTable(nn.Module):
    """log L(t_i − t_j, f_i) = s⟨f_i W_Q, a_{t_i − t_j}⟩ with a learned vector for each distance (Eq. 6)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(2 * FURTHEST + 1, d_model // heads) * (d_model // heads) ** -0.5)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """Distances beyond FURTHEST are as FURTHEST."""
        index = distances(query.shape[2], keys, query.device).clamp(-FURTHEST, FURTHEST) + FURTHEST
        every = query @ self.vectors.mT * scale
        return every.gather(-1, index.expand(*every.shape[:2], -1, -1))


class AsymmetricProduct(nn.Module):
    """log k_f(t_i, t_j) = s⟨f_i W_Q, r_{t_i − t_j} W_R⟩ with the sinusoids r of a distance (Eq. 5).

    A sum of cos((t_i − t_j)/λ_p) and sin((t_i − t_j)/λ_p) whose coefficients the query's features say, as in
    Transformer-XL, without its two learned offsets.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative = nn.Linear(d_model, d_model, bias=False)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """One product a distance, read out by pair."""
        queries = query.shape[2]
        places = torch.arange(1 - keys, queries, device=query.device, dtype=query.dtype)
        projected = self.relative(sinusoids(places, self.relative.in_features))
        every: Tensor = query @ projected.unflatten(1, (self.heads, -1)).permute(1, 2, 0) * scale
        index = distances(queries, keys, query.device) + keys - 1
        return every.gather(-1, index.expand(*every.shape[:2], -1, -1))


class SymmetricProduct(nn.Module):
    """log k_T(t_i, t_j) = s⟨t_i W_T, t_j W_T⟩, the exponential kernel of the sinusoids of both places (Eq. 9)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.place = nn.Linear(d_model, d_model, bias=False)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """The same for every sequence."""
        places = torch.arange(max(query.shape[2], keys), device=query.device, dtype=query.dtype)
        projected: Tensor = self.place(sinusoids(places, self.place.in_features))
        split: Tensor = projected.unflatten(1, (self.heads, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
        return (split[:, : query.shape[2]] @ split[:, :keys].mT * scale)[None]
