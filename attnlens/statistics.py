"""How sure is a number? Running means with errors, nulls, robust scores, paired intervals, false discoveries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from attnlens.records import QueryKey

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class Stream:
    """Mean and standard error of values that arrive in batches, entry by entry, without keeping them (Welford, Chan).

    Entries that are NaN don't count. A curve's last axis may differ in length between batches: each step is averaged
    over the values that have it.
    """

    def __init__(self) -> None:
        self.count: Tensor = torch.zeros(())
        """How many values each entry rests on."""
        self._mean: Tensor = torch.zeros(())
        self._squares: Tensor = torch.zeros(())
        self._started = False

    def update(self, values: Float[Tensor, "samples ..."]) -> None:
        """Take in some samples at once."""
        values = values.double()
        there = ~values.isnan()
        count = there.sum(0).double()
        mean = torch.where(there, values, 0.0).sum(0) / count.clamp(min=1)
        squares = torch.where(there, values - mean, 0.0).square().sum(0)
        self._join(count, mean, squares)

    def merge(self, other: Stream) -> None:
        """Take in what another stream has seen."""
        if other._started:
            self._join(other.count, other._mean, other._squares)

    @property
    def mean(self) -> Tensor:
        """The mean of each entry; NaN where there was no value."""
        return torch.where(self.count > 0, self._mean, torch.nan)

    @property
    def standard_error(self) -> Tensor:
        """sd/√n of each entry, sd unbiased; NaN where there were fewer than two values."""
        variance = self._squares / (self.count - 1).clamp(min=1)
        return torch.where(self.count > 1, (variance / self.count.clamp(min=1)).sqrt(), torch.nan)

    def _join(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if not self._started:
            self.count, self._mean, self._squares, self._started = count, mean, squares, True
            return
        (n, m), (mean_n, mean_m), (squares_n, squares_m) = (
            _same_length(*pair) for pair in ((self.count, count), (self._mean, mean), (self._squares, squares))
        )
        total = (n + m).clamp(min=1)
        apart = mean_m - mean_n
        self.count = n + m
        self._mean = mean_n + apart * m / total
        self._squares = squares_n + squares_m + apart.square() * n * m / total


def _same_length(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros behind their last axis up to the longer one."""
    if first.dim() == 0 or first.shape == second.shape:
        return first, second
    steps = max(first.shape[-1], second.shape[-1])
    both = (torch.nn.functional.pad(part, (0, steps - part.shape[-1])) for part in (first, second))
    return next(both), next(both)


@runtime_checkable
class Quantity(Protocol):
    """What the null needs to know of a measure."""

    @property
    def name(self) -> str:
        """Its name among the readings."""

    @property
    def curve(self) -> bool:
        """Whether it is a curve; curves have no null."""

    @property
    def has_null(self) -> bool:
        """Whether Gaussian factors are a null for it."""


@runtime_checkable
class Question(Protocol):
    """What the null needs to know of an analyzer (registry.Analyzer is one)."""

    @property
    def function(self) -> Callable[[QueryKey], Mapping[str, Tensor]]:
        """QueryKey → readings."""

    @property
    def measures(self) -> Iterable[Quantity]:
        """What it measures."""


def gaussian_null(analyzer: Question, like: QueryKey, draws: int = 32, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Mean and sd of each scalar measure over independent Gaussian factors of the shapes, scale and rotation of `like`.

    Each factor has unit Frobenius norm: a measure that is proportional to ‖W_Q‖‖W_K‖ is to be rescaled by the caller.
    Draws without a value don't count; a measure with fewer than two values is left out.
    """
    generator = torch.Generator().manual_seed(seed)

    def factor(shape: torch.Size) -> Tensor:
        drawn = torch.randn(draws, *shape[-2:], generator=generator, dtype=torch.float64)
        unit: Tensor = drawn / torch.linalg.matrix_norm(drawn, keepdim=True)
        return unit.to(like.query.device)

    heads = tuple(range(draws))
    query, key = factor(like.query.shape), factor(like.key.shape)
    readings = analyzer.function(replace(like, query=query, key=key, heads=heads, key_of=heads))
    null = {}
    for measure in analyzer.measures:
        if measure.has_null and not measure.curve and measure.name in readings:
            values = readings[measure.name].double()
            values = values[~values.isnan()]
            if len(values) > 1:
                null[measure.name] = (float(values.mean()), float(values.std()))
    return null


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


def paired_bootstrap(
    before: Float[Tensor, " n"],
    after: Float[Tensor, " n"],
    weights: Float[Tensor, " n"] | None = None,
    of: Callable[[Tensor], Tensor] | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Mean of after − before over sequences, and the ends of its percentile interval (Efron 1979).

    `weights` are the sequences' numbers of tokens: the mean is then that over tokens, and sequences are still what is
    drawn. `of` is applied to both means before they are subtracted (exp: perplexity). Pairs with a NaN don't count; all
    three are NaN where no pair is left.
    """
    there = ~(after - before).isnan()
    before, after = before[there].double(), after[there].double()
    weight = torch.ones_like(before) if weights is None else weights[there].double()
    if not len(before):
        return torch.nan, torch.nan, torch.nan

    def difference(picks: Tensor | slice) -> Tensor:
        first, second = ((weight * part)[picks].sum(-1) / weight[picks].sum(-1) for part in (before, after))
        return second - first if of is None else of(second) - of(first)

    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(before), (draws, len(before)), generator=generator).to(before.device)
    drawn = difference(picks)
    low, high = drawn.quantile(drawn.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return float(difference(slice(None))), low, high


def false_discovery(p_values: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Which hypotheses to reject so that at most `rate` of the rejected are true (Benjamini & Hochberg 1995).

    The k smallest p-values, k the largest with p_(k) ≤ rate · k/n; NaN is never rejected and doesn't count in n.
    """
    tests = int((~p_values.isnan()).sum())
    # Not strict: the procedure rejects at equality. NaN is sorted last and compares as false.
    ranked, order = p_values.double().sort()
    passed = ranked <= rate * torch.arange(1, len(ranked) + 1, device=ranked.device) / max(tests, 1)
    last = int(passed.nonzero().max()) + 1 if passed.any() else 0
    rejected = torch.zeros_like(passed)
    rejected[order[:last]] = True
    return rejected
