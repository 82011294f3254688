"""Comparisons of treatments that were all tried in the same blocks, such as training runs from the same seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LEAST = 1e-5
"""Of the median variance: no variance counts as smaller, so that equal values by chance are no certainty."""
COUNTED = 0.5
"""Of the degrees of freedom that other pairs add: pairs that share a treatment tell of the same noise."""
FEWEST = 3
"""Variances that say how variances are spread; fewer leave each by itself."""


@dataclass(frozen=True)
class Blocks:
    """Treatments × blocks: y_cs = μ_c + β_s + ε_cs, where ε may be larger in one treatment than in another.

    Two treatments are compared by their differences in each block, so that β drops out: Student's t of the differences'
    own variance, moderated by those of the other pairs (Smyth 2004). With three blocks a variance has two degrees of
    freedom; what other pairs say of its size adds more, the more alike their variances are. Pairs that share a
    treatment tell of the same noise, so that only half of what the others add is counted. The tests hold the rate of
    false names that follows.
    """

    values: Float[Tensor, "treatments blocks"]
    """One row a treatment, one column a block; finite."""
    kinds: Sequence[int] = ()
    """Of each treatment a number: only pairs of the same two kinds moderate each other. None given: all are of one."""

    @property
    def means(self) -> Float[Tensor, " treatments"]:
        """Of each treatment."""
        return self.values.double().mean(1)

    def p_values(self) -> list[float]:
        """Two-sided p of μ_a = μ_b of each of `pairs_of`; NaN where no pair of its kinds has any spread."""
        from scipy import stats

        pairs, wide = pairs_of(len(self.values)), self.values.double().numpy()
        blocks, differences = wide.shape[1], np.array([wide[a] - wide[b] for a, b in pairs])
        variances, found = differences.var(1, ddof=1), np.full(len(pairs), np.nan)
        kinds = [tuple(sorted(self.kinds[one] if self.kinds else 0 for one in pair)) for pair in pairs]
        for kind in set(kinds):
            own = [at for at, one in enumerate(kinds) if one == kind]
            others = len({treatment for at in own for treatment in pairs[at]}) - 2
            moderated, more = _moderated(variances[own], blocks - 1, others, COUNTED)
            score = np.abs(differences[own].mean(1)) / np.sqrt(moderated / blocks)
            found[own] = 2 * stats.t.sf(score, blocks - 1 + more)
        return list(map(float, found))


def _moderated(variances: Any, freedom: int, others: int, counted: float) -> tuple[Any, float]:
    """(d₀s₀² + d s²)/(d₀ + d) of each s² with d degrees of freedom, and the d₀ of it (Smyth 2004, Section 6.2).

    d₀ and s₀² are those of the scaled χ² that log s² is spread like, d₀ at most what `others` treatments have; of d₀
    the part `counted` counts.
    """
    from scipy import optimize, special

    middle = float(np.median(variances))
    if not middle > 0:
        return np.full(len(variances), np.nan), 0.0
    variances = np.maximum(variances, LEAST * middle)
    if len(variances) < FEWEST:
        return variances, 0.0
    logs = np.log(variances) - special.digamma(freedom / 2) + math.log(freedom / 2)
    beyond, most = logs.var(ddof=1) - special.polygamma(1, freedom / 2), float(freedom * others)
    prior = most
    if beyond > special.polygamma(1, most / 2):
        prior = 2 * optimize.brentq(lambda half: special.polygamma(1, half) - beyond, 1e-6, most)
    centre = math.exp(logs.mean() + special.digamma(prior / 2) - math.log(prior / 2))
    prior *= counted
    return (prior * centre + freedom * variances) / (prior + freedom), prior


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


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Each two of so many, once."""
    return list(itertools.combinations(range(count), 2))
