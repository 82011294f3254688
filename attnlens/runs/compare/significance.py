"""Test changes: p beyond sampling and rounding, q over all tests, and the smallest detectable change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor

from attnlens.maths.statistics import Design, adjust_p_values, false_discovery, p_values, standard_error
from attnlens.records import Head, Measure, MeasureChange

if TYPE_CHECKING:
    from jaxtyping import Float

POWER = 0.8
"""Probability with which the smallest detectable change is named."""
UNMOVED = "rounding never moved it, so that nothing says by how much it would"
ONE_DRAW = "one window, or one text, has no spread"


@dataclass(frozen=True)
class Rounding:
    """The effect on a measure of rounding the weights, estimated from draws."""

    size: Float[Tensor, " heads"]
    """Root mean square of the changes; for a divergence their mean, since it is quadratic in its cause."""
    freedom: int  # number of draws per model
    squared: bool = False  # True for a divergence


@dataclass(frozen=True)
class Judged:
    """The changes of one measure in all heads, with their p."""

    delta: Float[Tensor, " heads"]
    p: Float[Tensor, " heads"]
    se: Float[Tensor, " heads"] | None = None  # standard error over windows
    freedom: int = 0  # degrees of freedom of the standard error
    rounding: Rounding | None = None

    def least(self, level: float) -> Float[Tensor, " heads"]:
        """Compute the change that a test at `level` detects with probability POWER; NaN without an error estimate."""
        found = torch.zeros_like(self.delta)
        if self.se is not None and self.freedom > 0:
            found = torch.fmax(found, self.se * _detectable_errors(level, self.freedom))
        if self.rounding is not None:
            reach = _detectable_errors(level, self.rounding.freedom)
            found = torch.fmax(found, self.rounding.size * (reach**2 if self.rounding.squared else reach))
        return torch.where(found > 0, found, torch.nan)


def _detectable_errors(level: float, freedom: int) -> float:
    """Return the standard errors by which a change must differ from 0 to be named with probability POWER."""
    return float(stats.t.isf(level / 2, freedom) + stats.t.ppf(POWER, freedom))


def sampled(
    differences: Float[Tensor, "windows heads"], design: Design, rounding: Rounding | None, seed: int
) -> Judged:
    """Test changes paired by window: p is the larger one of sampling and rounding.

    Windows in which either model has no value are left out. If there is no change in any window, p = 1.
    """
    values = differences.double()
    p = torch.full(values.shape[1:], torch.nan, dtype=torch.float64)
    missing = values.isnan().mT
    for pattern in set(map(tuple, missing.tolist())):
        heads = (missing == torch.tensor(pattern)).all(1)
        there = [window for window, absent in enumerate(pattern) if not absent]
        if there:
            some = values[there][:, heads]
            p[heads] = p_values(some.mT, design.select(there), torch.ones(len(there)), seed)
    delta = values.nanmean(0)
    p[(values.nan_to_num() == 0).all(0) & ~delta.isnan()] = 1.0
    # equal changes in all windows: no other sample would give another change
    error = standard_error(values, design)
    p[(error == 0) & (delta != 0)] = 0.0
    # if rounding never moved a measure, p depends on windows alone
    beyond = by_rounding(delta, rounding) if rounding is not None else p
    p = torch.maximum(p, beyond.nan_to_num(nan=0.0))
    return Judged(delta, p, error, design.freedom, rounding)


def measured(delta: Float[Tensor, " heads"], rounding: Rounding) -> Judged:
    """Test changes of measures that do not depend on a text: p is that of rounding, 1 for no change."""
    p = by_rounding(delta, rounding)
    return Judged(delta, torch.where(delta == 0, 1.0, p).masked_fill(~delta.isfinite(), torch.nan), rounding=rounding)


def independent(delta: Float[Tensor, " heads"], se: Float[Tensor, " heads"], freedom: int) -> Judged:
    """Test changes between two unpaired readings by Student's t, from their standard errors; conservative.

    Readings of the same windows are correlated, so the true error of their difference is smaller than `se`.
    """
    p = torch.from_numpy(2 * stats.t.sf((delta.abs() / se).numpy(), max(freedom, 1)))
    p = torch.where(se > 0, p, torch.nan) if freedom > 0 else torch.full_like(delta, torch.nan)
    return Judged(delta, torch.where(delta == 0, 1.0, p), se, freedom)


def by_rounding(delta: Float[Tensor, " heads"], rounding: Rounding) -> Float[Tensor, " heads"]:
    """Compute P(|t| ≥ |delta|/size), with the draws as degrees of freedom; NaN if rounding never moved the measure."""
    ratios = delta.abs() / rounding.size
    scores = (ratios.sqrt() if rounding.squared else ratios).numpy()
    p = torch.from_numpy(2 * stats.t.sf(scores, rounding.freedom))
    return torch.where(rounding.size > 0, p, torch.nan)


def named(
    rows: Sequence[MeasureChange], judged: Sequence[tuple[Judged | None, int]], fdr: float
) -> list[MeasureChange]:
    """Add q, `named` and the smallest detectable change to the rows, over all rows with a p.

    `judged` gives the tested changes that each row belongs to, and its index among them.
    """
    p = torch.tensor([math.nan if row.p is None else row.p for row in rows], dtype=torch.float64)
    q, chosen = adjust_p_values(p), false_discovery(p, fdr)
    tests = int((~p.isnan()).sum())
    level = float(p[chosen].max().clamp(min=fdr / tests)) if bool(chosen.any()) else fdr / max(tests, 1)
    least = {id(one): one.least(level) for one, _ in judged if one is not None}
    found = []
    for row, rate, hit, (one, place) in zip(rows, q.tolist(), chosen.tolist(), judged, strict=True):
        update = {"q": number_of(rate), "named": hit}
        if row.p is not None:
            update["least"] = number_of(least[id(one)][place])
        found.append(row.model_copy(update=update))
    return found


def number_of(value: float | Tensor) -> float | None:
    """Convert a value to float; None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def combined(first: Float[Tensor, "draws heads"], second: Float[Tensor, "draws heads"], *, squared: bool) -> Rounding:
    """Combine the rounding of both models: the mean squares of their draws add up, and so do divergences.

    The size of each head is at least that of a Gaussian whose typical maximum, over the draws of all heads, is the
    largest one seen: a measure that jumps (a count of columns, a rank) does not move in most draws of most heads.
    """
    # a form of zeros is not rounded (NaN); then the other model's draws count alone
    each = [part.double() if squared else part.double().square() for part in (first, second)]
    means = torch.stack([part.mean(0) for part in each])
    drawn = torch.cat(each)
    drawn = drawn[~drawn.isnan()]
    usual = stats.norm.isf(0.5 / len(drawn)) ** 2 if len(drawn) else math.inf
    least = drawn.max() / usual if len(drawn) else drawn.sum()
    total = means.nansum(0).clamp(min=float(least)).masked_fill(means.isnan().all(0), torch.nan)
    return Rounding(total if squared else total.sqrt(), min(len(first), len(second)), squared)


Heads = tuple[Sequence[Head], Sequence[Head]]
"""Heads of the first model, and their partners in the second."""
CATEGORY = "a category, of which there is no difference"


def named_rows(heads: Heads, judged: Mapping[str, Judged | None], fdr: float, unjudged: str) -> list[MeasureChange]:
    """Build one row per measure and head, in that order; significant changes are named.

    `unjudged` is the reason why measures without a test have no p.
    """
    rows, places = [], []
    for name, one in judged.items():
        for place, row in enumerate(_plain_rows(heads, name)):
            if one is not None:
                p, delta = float(one.p[place]), number_of(one.delta[place])
                found: dict[str, Any] = {"delta": delta, "p": number_of(p)}
                found["se"] = None if one.se is None else number_of(one.se[place])
                found["rounding"] = None if one.rounding is None else number_of(one.rounding.size[place])
                if delta is not None and p != p and row.reason is None:
                    found["reason"] = UNMOVED if one.se is None else ONE_DRAW
                row = row.model_copy(update=found)
            elif row.reason is None and row.before is not None and row.after is not None:
                row = row.model_copy(update={"delta": row.after - row.before, "reason": unjudged})
            rows.append(row)
            places.append((one, place))
    return named(rows, places, fdr)


def is_category(heads: Heads, name: str) -> bool:
    """Return True if a measure has labels instead of numbers."""
    return any(name in head.measures and head.measures[name].label is not None for each in heads for head in each)


def change(heads: Heads, name: str, of: str = "value") -> tuple[Tensor, Tensor]:
    """Return a measure's field `of` (`value` or `se`) for the heads of both models; NaN if it is missing."""
    first, second = (_field_tensor([head.measures.get(name) for head in each], of) for each in heads)
    return first, second


def _field_tensor(each: Sequence[Measure | None], of: str) -> Tensor:
    found = [None if one is None else getattr(one, of) for one in each]
    return torch.tensor([math.nan if number is None else number for number in found], dtype=torch.float64)


def _plain_rows(heads: Heads, name: str) -> Iterator[MeasureChange]:
    category = is_category(heads, name)
    for one, other in zip(*heads, strict=True):
        read = {"first": one.measures.get(name), "second": other.measures.get(name)}
        before, after = (None if measure is None else measure.value for measure in read.values())
        lacks = [f"in the {which} model {part.reason}" for which, part in read.items() if part and part.reason]
        reason = CATEGORY if category else next(iter(lacks), None)
        yield MeasureChange(layer=one.layer, head=one.head, measure=name, before=before, after=after, reason=reason)
