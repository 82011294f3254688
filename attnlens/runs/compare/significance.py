"""Test changes: p beyond sampling and rounding, q over all tests, and the smallest detectable change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scipy import stats
from torch import Tensor

from attnlens.maths.statistics import Design, adjust_p_values, false_discovery, p_values, standard_error
from attnlens.records import Head, MeasureChange

if TYPE_CHECKING:
    from jaxtyping import Float

POWER = 0.8  # probability with which the smallest detectable change is named


@dataclass(frozen=True)
class Rounding:
    """The effect on a measure of rounding the weights, estimated from draws."""

    size: Float[Tensor, " heads"]
    """Root mean square of the changes; for a divergence their mean, since it is quadratic in its cause."""
    freedom: int  # number of draws per model
    squared: bool = False  # True for a divergence


@dataclass(frozen=True)
class ChangeTest:
    """Changes of one measure in all heads, with their p."""

    delta: Float[Tensor, " heads"]
    p: Float[Tensor, " heads"]
    se: Float[Tensor, " heads"] | None = None  # standard error over windows
    freedom: int = 0  # degrees of freedom of the standard error
    rounding: Rounding | None = None

    def least_change(self, level: float) -> Float[Tensor, " heads"]:
        """Compute the change that a test at `level` detects with probability POWER; NaN without an error estimate."""
        least = torch.zeros_like(self.delta)
        if self.se is not None and self.freedom > 0:
            least = torch.fmax(least, self.se * _detectable_errors(level, self.freedom))
        if self.rounding is not None:
            errors = _detectable_errors(level, self.rounding.freedom)
            least = torch.fmax(least, self.rounding.size * (errors**2 if self.rounding.squared else errors))
        return torch.where(least > 0, least, torch.nan)


def _detectable_errors(level: float, freedom: int) -> float:
    """Return the standard errors by which a change must differ from 0 to be reported with probability POWER."""
    return float(stats.t.isf(level / 2, freedom) + stats.t.ppf(POWER, freedom))


def test_windows(
    differences: Float[Tensor, "windows heads"], design: Design, rounding: Rounding | None, seed: int
) -> ChangeTest:
    """Test changes paired by window: p is the larger of those for sampling and rounding; 1 without any change."""
    values = differences.double()
    p = torch.full(values.shape[1:], torch.nan, dtype=torch.float64)
    missing = values.isnan().mT
    for pattern in set(map(tuple, missing.tolist())):
        heads = (missing == torch.tensor(pattern)).all(1)
        present = [window for window, absent in enumerate(pattern) if not absent]
        if present:
            p[heads] = p_values(values[present][:, heads].mT, design.select(present), torch.ones(len(present)), seed)
    delta = values.nanmean(0)
    p[(values.nan_to_num() == 0).all(0) & ~delta.isnan()] = 1.0
    # equal changes in all windows: no other sample would give another change
    error = standard_error(values, design)
    p[(error == 0) & (delta != 0)] = 0.0
    # if rounding never moved a measure, p depends on windows alone
    beyond = rounding_p_values(delta, rounding) if rounding is not None else p
    p = torch.maximum(p, beyond.nan_to_num(nan=0.0))
    return ChangeTest(delta, p, error, design.freedom, rounding)


def test_rounding(delta: Float[Tensor, " heads"], rounding: Rounding) -> ChangeTest:
    """Test changes of measures that do not depend on a text: p is that of rounding, 1 for no change."""
    p = torch.where(delta == 0, 1.0, rounding_p_values(delta, rounding)).masked_fill(~delta.isfinite(), torch.nan)
    return ChangeTest(delta, p, rounding=rounding)


def test_unpaired(delta: Float[Tensor, " heads"], se: Float[Tensor, " heads"], freedom: int) -> ChangeTest:
    """Test changes between two unpaired readings by Student's t, from their standard errors; conservative.

    Readings of the same windows are correlated, so the true error of their difference is smaller than `se`.
    """
    p = torch.from_numpy(2 * stats.t.sf((delta.abs() / se).numpy(), max(freedom, 1)))
    p = torch.where(se > 0, p, torch.nan) if freedom > 0 else torch.full_like(delta, torch.nan)
    return ChangeTest(delta, torch.where(delta == 0, 1.0, p), se, freedom)


def rounding_p_values(delta: Float[Tensor, " heads"], rounding: Rounding) -> Float[Tensor, " heads"]:
    """Compute P(|t| ≥ |delta|/size), with the draws as degrees of freedom; NaN if rounding never moved the measure."""
    ratios = delta.abs() / rounding.size
    scores = (ratios.sqrt() if rounding.squared else ratios).numpy()
    p = torch.from_numpy(2 * stats.t.sf(scores, rounding.freedom))
    return torch.where(rounding.size > 0, p, torch.nan)


def number_of(value: float | Tensor) -> float | None:
    """Convert a value to float; None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def combine_rounding(
    first: Float[Tensor, "draws heads"], second: Float[Tensor, "draws heads"], *, squared: bool
) -> Rounding:
    """Combine the rounding of both models: the mean squares of their draws add up, and so do divergences.

    The size of each head is at least that of a Gaussian whose typical maximum, over the draws of all heads, is the
    largest one seen: a measure that jumps (a count of columns, a rank) does not move in most draws of most heads.
    """
    # a form of zeros is not rounded (NaN); then the other model's draws count alone
    squares = [part.double() if squared else part.double().square() for part in (first, second)]
    means = torch.stack([part.mean(0) for part in squares])
    draws = torch.cat(squares)
    draws = draws[~draws.isnan()]
    # of n squared standard normal numbers, one exceeds isf(0.5/n)² on average
    least = float(draws.max()) / stats.norm.isf(0.5 / len(draws)) ** 2 if len(draws) else 0.0
    total = means.nansum(0).clamp(min=least).masked_fill(means.isnan().all(0), torch.nan)
    return Rounding(total if squared else total.sqrt(), min(len(first), len(second)), squared)


Heads = tuple[Sequence[Head], Sequence[Head]]  # heads of the first model, and their partners in the second


def build_rows(heads: Heads, tests: Mapping[str, ChangeTest | None], fdr: float, untested: str) -> list[MeasureChange]:
    """Build a row per measure and head; changes with q ≤ `fdr` are `named`. `untested`: why a measure has no test."""
    keys = [(name, test, place) for name, test in tests.items() for place in range(len(heads[0]))]
    numbers = [math.nan if test is None else float(test.p[place]) for _, test, place in keys]
    p = torch.tensor(numbers, dtype=torch.float64)
    q, named = adjust_p_values(p), false_discovery(p, fdr)
    count = int((~p.isnan()).sum())
    # the largest p that is named; at least that of a Bonferroni correction, which the first named change would need
    level = float(p[named].max().clamp(min=fdr / count)) if bool(named.any()) else fdr / max(count, 1)
    least = {name: test.least_change(level) for name, test in tests.items() if test is not None}
    categories = {name for name in tests if is_category(heads, name)}  # for each, all heads are read
    rows = []
    for (name, test, place), row_p, row_q, row_named in zip(keys, p.tolist(), q.tolist(), named.tolist(), strict=True):
        head = heads[0][place]
        measures = {"first": head.measures.get(name), "second": heads[1][place].measures.get(name)}
        before, after = (None if measure is None else measure.value for measure in measures.values())
        gaps = [f"in the {which} model {part.reason}" for which, part in measures.items() if part and part.reason]
        reason = "it is a category and has no differences" if name in categories else next(iter(gaps), None)
        fields: dict[str, float | None] = {}
        if test is not None:
            fields = {"delta": number_of(test.delta[place]), "p": number_of(row_p)}
            fields["se"] = None if test.se is None else number_of(test.se[place])
            fields["rounding"] = None if test.rounding is None else number_of(test.rounding.size[place])
            if not math.isnan(row_p):
                fields["least"] = number_of(least[name][place])
            elif fields["delta"] is not None and reason is None:
                unmoved = "rounding never changed it, so the size of its effect is unknown"
                reason = unmoved if test.se is None else "one window, or one text, has no spread"
        elif reason is None and before is not None and after is not None:
            fields, reason = {"delta": after - before}, untested
        rows.append(
            MeasureChange(
                layer=head.layer,
                head=head.head,
                measure=name,
                before=before,
                after=after,
                q=number_of(row_q),
                named=row_named,
                reason=reason,
                **fields,
            )
        )
    return rows


def is_category(heads: Heads, name: str) -> bool:
    """Return True if a measure has labels instead of numbers."""
    return any(name in head.measures and head.measures[name].label is not None for each in heads for head in each)


def field_values(heads: Heads, name: str, field: str = "value") -> tuple[Tensor, Tensor]:
    """Return a measure's `field` (`value` or `se`) for the heads of both models; NaN if it is missing."""
    columns = ([getattr(head.measures.get(name), field, None) for head in side] for side in heads)
    first, second = ([math.nan if number is None else number for number in column] for column in columns)
    return torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
