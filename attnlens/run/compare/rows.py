"""The rows of a comparison: each measure of each head, with what both models read of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from attnlens.records import Head, Measure, MeasureChange
from attnlens.run.compare import significance
from attnlens.run.compare.significance import Judged

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
            rows.append(_unjudged(row, unjudged) if one is None else significance.row_of(one, place, row))
            places.append((one, place))
    return significance.named(rows, places, fdr)


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


def _unjudged(row: MeasureChange, why: str) -> MeasureChange:
    """The row with its difference alone, where there is one."""
    if row.reason is not None or row.before is None or row.after is None:
        return row
    return row.model_copy(update={"delta": row.after - row.before, "reason": why})
