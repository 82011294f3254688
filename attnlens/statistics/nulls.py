"""What measures read by chance: nulls of one head and of a median over heads; scores against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnlens.records import QueryKey

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DRAWN_BYTES = 2**26
"""Of random factors that are read at once; those of all draws together are larger than a layer of a large model."""
MEDIAN_DRAWS = 2000
"""Draws of all heads behind the null of a median."""


def gaussian_null(
    analyzers: Sequence[Any], like: QueryKey, draws: int = 32, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Mean and sd of each scalar measure over independent Gaussian factors of the shapes, scale and rotation of `like`.

    Analyzers are registry.Analyzer or alike: a `function` of a QueryKey, and `measures` with `name`, `curve` and
    `has_null`. All read the same draws. Each factor has unit Frobenius norm: a measure that is proportional to
    ‖W_Q‖‖W_K‖ is to be rescaled by the caller. Draws without a value don't count; a measure with fewer than two values
    is left out.
    """
    generator = np.random.default_rng(seed)  # draws normal numbers in half the time that torch takes
    size = 8 * (like.query[..., 0, :, :].numel() + like.key[..., 0, :, :].numel())
    at_once = max(1, min(draws, DRAWN_BYTES // size))
    found: dict[str, list[Tensor]] = {}
    for start in range(0, draws, at_once):
        drawn = _drawn(like, min(at_once, draws - start), generator)
        for analyzer in analyzers:
            readings = analyzer.function(drawn)
            for measure in analyzer.measures:
                if measure.has_null and not measure.curve and measure.name in readings:
                    found.setdefault(measure.name, []).append(readings[measure.name].double())
    null = {}
    for name, parts in found.items():
        values = torch.cat(parts)
        values = values[~values.isnan()]
        if len(values) > 1:
            null[name] = (float(values.mean()), float(values.std()))
    return null


def _drawn(like: QueryKey, count: int, generator: np.random.Generator) -> QueryKey:
    """So many random heads of unit norm in the place of those that it has."""

    def factor(shape: torch.Size) -> Tensor:
        drawn = torch.from_numpy(generator.standard_normal((count, *shape[-2:])))
        drawn /= torch.linalg.matrix_norm(drawn, keepdim=True)
        return drawn.to(like.query.device)

    heads = tuple(range(count))
    return replace(like, query=factor(like.query.shape), key=factor(like.key.shape), heads=heads, key_of=heads)


def null_of_median(means: Float[Tensor, " heads"], sds: Float[Tensor, " heads"], seed: int = 0) -> tuple[float, float]:
    """Mean and sd of the median over heads whose values are independent draws of their own normal nulls.

    The sd of one head's null says nothing of a median over many: of n equal normals it is about 1.25 sd/√n.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(MEDIAN_DRAWS, len(means), generator=generator, dtype=torch.float64)
    medians = (means.double() + sds.double() * drawn).quantile(0.5, dim=1)
    return float(medians.mean()), float(medians.std())


def z_scores(
    values: Float[Tensor, "*shape"], mean: float | Float[Tensor, "*shape"], sd: float | Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """(value − mean)/sd; NaN where sd is 0."""
    spread = torch.as_tensor(sd, dtype=torch.float64)
    scores: Tensor = (values.double() - mean) / torch.where(spread > 0, spread, torch.nan)
    return scores


def robust_z(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """(value − median)/(1.4826 · MAD), the median absolute deviation in units of a normal sd; NaN where MAD is 0.

    NaN values don't count and stay NaN (Iglewicz & Hoaglin 1993).
    """
    there = values.double()
    median = there.nanquantile(0.5) if len(there) else there.sum()
    apart = (there - median).abs()
    return z_scores(there, float(median), 1.4826 * float(apart.nanquantile(0.5) if len(apart) else 0.0))
