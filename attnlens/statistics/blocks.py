"""Comparisons of treatments that were all tried in the same blocks, such as training runs from the same seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DRAWS = 20_000
"""Of the posterior of the means, behind an interval of Kendall's τ."""


@dataclass(frozen=True)
class Blocks:
    """Treatments × blocks with additive effects: y_cs = μ_c + β_s + ε, the variance of ε the same in all cells."""

    values: Float[Tensor, "treatments blocks"]
    """One row a treatment, one column a block; finite."""

    @property
    def means(self) -> Float[Tensor, " treatments"]:
        """Of each treatment."""
        return self.values.double().mean(1)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of ε, (treatments − 1)(blocks − 1)."""
        return (self.values.shape[0] - 1) * (self.values.shape[1] - 1)

    @property
    def variance(self) -> float:
        """Of ε, from what neither treatments nor blocks explain; NaN without degrees of freedom."""
        if self.freedom < 1:
            return math.nan
        wide = self.values.double()
        rest = wide - wide.mean(1, keepdim=True) - wide.mean(0, keepdim=True) + wide.mean()
        return float(rest.square().sum()) / self.freedom

    @property
    def error(self) -> float:
        """The standard error of a difference between two treatments' means, √(2 s²/blocks)."""
        return math.sqrt(2 * self.variance / self.values.shape[1])

    def p_values(self) -> Float[Tensor, "treatments treatments"]:
        """Two-sided p of μ_a = μ_b, by Student's t of the pooled variance; NaN on the diagonal.

        Exact for normal ε of one variance. Where the variances of treatments differ, pairs of the noisier ones are
        called different too often (the tests say how often); blocks drop out, however much they differ.
        """
        from scipy import stats

        count = len(self.values)
        if not self.error > 0:
            return torch.full((count, count), torch.nan, dtype=torch.float64)
        score = (self.means[:, None] - self.means[None]).abs() / self.error
        found = torch.from_numpy(2 * stats.t.sf(score.numpy(), self.freedom))
        return found.fill_diagonal_(torch.nan)

    def drawn_means(self, draws: int = DRAWS, seed: int = 0) -> Float[Tensor, "draws treatments"]:
        """Means as they may truly be: the found ones plus their error, times a factor that t has of its variance."""
        made = torch.Generator().manual_seed(seed)
        noise = torch.randn(draws, len(self.values), generator=made, dtype=torch.float64)
        freedom = torch.full((draws, 1), float(self.freedom), dtype=torch.float64)
        # a gamma of shape f/2 doubled is χ²_f; torch draws it from its global state alone, so it is made of normals
        chi = sum(torch.randn(draws, 1, generator=made, dtype=torch.float64).square() for _ in range(self.freedom))
        return self.means + noise * (self.error / math.sqrt(2)) * (freedom / chi).sqrt()


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p: max_{j ≤ k} (n − j + 1) p_(j), at most 1 (Holm 1979).

    The chance of any false rejection stays below the level that they are compared with. NaN stays NaN and doesn't count
    in n.
    """
    order = sorted((at for at, p in enumerate(p_values) if not math.isnan(p)), key=lambda at: p_values[at])
    found, least = [math.nan] * len(p_values), 0.0
    for rank, at in enumerate(order):
        least = max(least, (len(order) - rank) * p_values[at])
        found[at] = min(1.0, least)
    return found


def kendall(first: Float[Tensor, "*draws n"], second: Float[Tensor, " n"]) -> Float[Tensor, "*draws"]:
    """τ_a: (pairs in the same order − pairs in the other)/all pairs; a tie counts as neither."""
    pairs = torch.combinations(torch.arange(second.shape[-1]))
    signs = [(part[..., pairs[:, 0]] - part[..., pairs[:, 1]]).sign() for part in (first, second)]
    return (signs[0] * signs[1]).mean(-1)


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Each two of so many, once."""
    return list(itertools.combinations(range(count), 2))
