"""Judges changes: p beyond sampling and rounding, q over everything looked at, the least change that would be named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor

from attnlens.maths.statistics import Design, adjusted, false_discovery, p_values, standard_error
from attnlens.records import Head, Measure, MeasureChange

if TYPE_CHECKING:
    from jaxtyping import Float

POWER = 0.8
"""With which probability the least change would have been named."""
UNMOVED = "rounding never moved it, so that nothing says by how much it would"
ONE_DRAW = "one window, or one text, has no spread"


@dataclass(frozen=True)
class Rounding:
    """What rounding of the weights alone does to a measure, from draws of it."""

    size: Float[Tensor, " heads"]
    """Root mean square of the changes; of a divergence its mean, since that grows with the square of what moves it."""
    freedom: int  # how many draws of each model there were
    squared: bool = False  # whether it is a divergence


@dataclass(frozen=True)
class Judged:
    """The changes of one measure at all heads."""

    delta: Float[Tensor, " heads"]
    p: Float[Tensor, " heads"]
    se: Float[Tensor, " heads"] | None = None  # over windows
    freedom: int = 0  # its degrees of freedom
    rounding: Rounding | None = None

    def least(self, level: float) -> Float[Tensor, " heads"]:
        """The change that a test at that level names with a probability of POWER, sampling or rounding in its way."""
        found = torch.zeros_like(self.delta)
        if self.se is not None and self.freedom > 0:
            found = torch.fmax(found, self.se * _reach(level, self.freedom))
        if self.rounding is not None:
            reach = _reach(level, self.rounding.freedom)
            found = torch.fmax(found, self.rounding.size * (reach**2 if self.rounding.squared else reach))
        return torch.where(found > 0, found, torch.nan)


def _reach(level: float, freedom: int) -> float:
    """How many standard errors off a change must be to be named with a probability of POWER."""
    return float(stats.t.isf(level / 2, freedom) + stats.t.ppf(POWER, freedom))


def sampled(
    differences: Float[Tensor, "windows heads"], design: Design, rounding: Rounding | None, seed: int
) -> Judged:
    """Changes that are paired window by window: p is the larger of those of sampling and of rounding.

    Windows in which either model has no value don't count. No change in any window is p = 1.
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
    # the same change in every window: no sampling would have given another one
    error = standard_error(values, design)
    p[(error == 0) & (delta != 0)] = 0.0
    # where rounding never moved a measure, windows alone decide
    beyond = by_rounding(delta, rounding) if rounding is not None else p
    p = torch.maximum(p, beyond.nan_to_num(nan=0.0))
    return Judged(delta, p, error, design.freedom, rounding)


def measured(delta: Float[Tensor, " heads"], rounding: Rounding) -> Judged:
    """Changes of what no text has part in: p is that of rounding."""
    p = by_rounding(delta, rounding)
    return Judged(delta, torch.where(delta == 0, 1.0, p).masked_fill(~delta.isfinite(), torch.nan), rounding=rounding)


def independent(delta: Float[Tensor, " heads"], se: Float[Tensor, " heads"], freedom: int) -> Judged:
    """Changes between two readings of which the standard errors alone are known: Student's t, never too small an error.

    Readings of the same windows move together, so that the error of their difference is smaller than this.
    """
    p = torch.from_numpy(2 * stats.t.sf((delta.abs() / se).numpy(), max(freedom, 1)))
    p = torch.where(se > 0, p, torch.nan) if freedom > 0 else torch.full_like(delta, torch.nan)
    return Judged(delta, torch.where(delta == 0, 1.0, p), se, freedom)


def by_rounding(delta: Float[Tensor, " heads"], rounding: Rounding) -> Float[Tensor, " heads"]:
    """P(|t| ≥ |delta|/size) with as many degrees of freedom as draws; NaN where rounding never moved it."""
    ratios = delta.abs() / rounding.size
    scores = (ratios.sqrt() if rounding.squared else ratios).numpy()
    p = torch.from_numpy(2 * stats.t.sf(scores, rounding.freedom))
    return torch.where(rounding.size > 0, p, torch.nan)


def named(
    rows: Sequence[MeasureChange], judged: Sequence[tuple[Judged | None, int]], fdr: float
) -> list[MeasureChange]:
    """The rows with q, whether they are named, and the least change, over all that have a p.

    `judged` says where each row's change stands: among which changes, and which of them.
    """
    p = torch.tensor([math.nan if row.p is None else row.p for row in rows], dtype=torch.float64)
    q, chosen = adjusted(p), false_discovery(p, fdr)
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
    """The number, None where there is none."""
    return float(value) if math.isfinite(value) else None


def combined(first: Float[Tensor, "draws heads"], second: Float[Tensor, "draws heads"], *, squared: bool) -> Rounding:
    """The rounding of both models at once: mean squares of their draws add up, and so do divergences.

    No head's is less than that of a Gaussian whose largest draw, of as many as there are over all heads, is the largest
    seen: a measure that jumps (a count of columns, a rank) stays where it is in most draws of most heads.
    """
    # a form of zeros has nothing to round: it is the other one that counts
    each = [part.double() if squared else part.double().square() for part in (first, second)]
    means = torch.stack([part.mean(0) for part in each])
    drawn = torch.cat(each)
    drawn = drawn[~drawn.isnan()]
    usual = stats.norm.isf(0.5 / len(drawn)) ** 2 if len(drawn) else math.inf
    least = drawn.max() / usual if len(drawn) else drawn.sum()
    total = means.nansum(0).clamp(min=float(least)).masked_fill(means.isnan().all(0), torch.nan)
    return Rounding(total if squared else total.sqrt(), min(len(first), len(second)), squared)


Heads = tuple[Sequence[Head], Sequence[Head]]
"""The heads of the first model, and the partner of each in the second one."""
CATEGORY = "a category, of which there is no difference"


def named_rows(heads: Heads, judged: Mapping[str, Judged | None], fdr: float, unjudged: str) -> list[MeasureChange]:
    """A row a measure and head, in that order; those that changed beyond chance are named.

    `unjudged` says why a measure without a judgement has no p.
    """
    rows, places = [], []
    for name, one in judged.items():
        for place, row in enumerate(_rows(heads, name)):
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
    """Whether a measure has labels, and no numbers that could be subtracted."""
    return any(name in head.measures and head.measures[name].label is not None for each in heads for head in each)


def change(heads: Heads, name: str, of: str = "value") -> tuple[Tensor, Tensor]:
    """What both models read of a measure, head by head; NaN where there is nothing. `of` may be its standard error."""
    first, second = (_numbers([head.measures.get(name) for head in each], of) for each in heads)
    return first, second


def _numbers(each: Sequence[Measure | None], of: str) -> Tensor:
    found = [None if one is None else getattr(one, of) for one in each]
    return torch.tensor([math.nan if number is None else number for number in found], dtype=torch.float64)


def _rows(heads: Heads, name: str) -> Iterator[MeasureChange]:
    category = is_category(heads, name)
    for one, other in zip(*heads, strict=True):
        read = {"first": one.measures.get(name), "second": other.measures.get(name)}
        before, after = (None if measure is None else measure.value for measure in read.values())
        lacks = [f"in the {which} model {part.reason}" for which, part in read.items() if part and part.reason]
        reason = CATEGORY if category else next(iter(lacks), None)
        yield MeasureChange(layer=one.layer, head=one.head, measure=name, before=before, after=after, reason=reason)
